"""Session guarantees: what a process may expect of its own reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from checker.history import OK, History
from checker.tally import Events, Tally
from checker.values import exact, number
from checker.verdict import Result
from checker.words import named_row

__all__ = ["check_sessions"]


def version_of(result: Any) -> Any:
    """The version of a result: a map's ``tail``, a pair's first part, or the value itself; ``None`` if it has none."""
    if isinstance(result, Mapping):
        return result.get("tail", result.get("version"))
    if isinstance(result, (list, tuple)):
        return result[0] if result else None
    return result


def check_sessions(
    events: Events,
    *,
    reads: tuple[str, ...] = ("read", "tail", "get"),
    writes: tuple[str, ...] = ("write", "append", "put"),
    version: Callable[[Any], Any] = version_of,
) -> Result:
    """Check the session guarantees (Terry et al. 1994) of every process on every key.

    Results must contain a version: a versioned register's ``[version, value]``, a log's offset and tail.  ``version``
    extracts it from a result; ``reads`` and ``writes`` name the operations.  A log's append at offset n has version
    n + 1.  Invalid with the counts ``monotonic-reads`` (a read older than an earlier read), ``read-your-writes`` (a
    read older than an earlier own write), ``monotonic-writes`` (a write placed before an earlier own write) and
    ``writes-follow-reads`` (a write placed before what was read); unknown if no result has a version.  Raises TypeError
    for versions that are not numbers.
    """
    history = History.of(events)
    kinds = ("monotonic-reads", "read-your-writes", "monotonic-writes", "writes-follow-reads")
    tally = Tally("sessions", history, wrong=kinds)
    read_by: dict[Any, tuple[Any, int]] = {}
    wrote_by: dict[Any, tuple[Any, int]] = {}
    versions = 0
    for row, f in enumerate(history.f):
        if history.status[row] != OK or (f not in reads and f not in writes):
            continue
        at = version(history.result[row])
        if at is None:
            continue
        at = number(at)
        versions += 1
        if f == "append":
            at += 1
        session = (history.process[row], exact(history.key[row]))
        read, wrote = read_by.get(session), wrote_by.get(session)
        is_read = f in reads
        for before, kind, strict in (
            (read, "monotonic-reads" if is_read else "writes-follow-reads", not is_read),
            (wrote, "read-your-writes" if is_read else "monotonic-writes", not is_read),
        ):
            if before is not None and (at <= before[0] if strict else at < before[0]):
                text = f"{named_row(history, row)} is at version {at}, after {named_row(history, before[1])}"
                tally.add(kind, (before[1], row), text)
        target = read_by if is_read else wrote_by
        known = target.get(session)
        if known is None or at > known[0]:
            target[session] = (at, row)
    unknown = None if versions else "no result contains a version"
    return tally.result(fine="every session kept its guarantees", unknown=unknown)
