"""Checks of the brokers' own files and logs at the end of a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.systems.base import CheckOutcome
from harness.units import plural

__all__ = ["compare_copies", "compare_replicas", "one_leader_per_term"]

BLOCK_BYTES = 1 << 20
MAX_LEADER_CHANGES_LISTED = 500
"""Role changes stored with the results. A run with more is churning, and the first ones show as much."""

ROLE_CHANGE = re.compile(r"^(\S+) .*\brole_change self=(\S+) role=LEADER term=(\d+)")


def compare_replicas(
    data_dirs: Mapping[str, Path], committed: Mapping[str, int], *, caught_up: bool, unfetched: Collection[str] = ()
) -> CheckOutcome:
    """Whether all replicas hold the same bytes up to the shortest committed position.

    `data_dirs` maps a host to its directory of log segments (files named by the 20-digit position of their first
    byte), `committed` to the position up to which its log is committed (bytes). Valid only if every host answered at
    the end and all had caught up. A replica that was silent or behind makes the outcome "unknown"; differing bytes make
    it False whatever else is known. The files of `unfetched` hosts could not be copied to this machine: they are not
    compared, and make the outcome "unknown".
    """
    heard = {host: position for host, position in committed.items() if position >= 0 and host not in unfetched}
    details: dict[str, Any] = {"committed_bytes": dict(sorted(committed.items()))}
    missing = f"the files of {', '.join(sorted(unfetched))} could not be fetched" if unfetched else None
    if not heard:
        return CheckOutcome("unknown", missing or "no replica reported its committed position at the end", details)
    begin = max((_first_position(data_dirs[host]) for host in heard), default=0)
    end = min(heard.values())
    details |= {"compared_from": begin, "compared_to": end}
    hosts = sorted(heard)
    difference = _first_difference({host: data_dirs[host] for host in hosts}, begin, end)
    if difference is not None:
        position, one, other = difference
        return CheckOutcome(
            False, f"the committed logs of {one} and {other} differ at byte {position} of {end}", details
        )
    digest = hashlib.sha256()
    for block in _blocks(data_dirs[hosts[0]], begin, end):
        digest.update(block)
    details["sha256"] = digest.hexdigest()
    if missing:
        return CheckOutcome("unknown", missing, details)
    silent = sorted(set(data_dirs) - set(heard))
    if silent:
        return CheckOutcome("unknown", f"no status at the end from {', '.join(silent)}", details)
    if not caught_up:
        return CheckOutcome("unknown", f"replicas did not catch up in time; the first {end} bytes are equal", details)
    return CheckOutcome(True, f"{len(hosts)} replicas hold the same {end - begin} committed bytes", details)


def compare_copies(
    data_dirs: Mapping[str, Path],
    committed: Mapping[str, int],
    troubles: Mapping[str, str],
    *,
    caught_up: bool,
    unfetched: Collection[str] = (),
) -> CheckOutcome:
    """`compare_replicas` for a master and its slaves in classic HA. A slave that reports that its log is not a copy of
    the master's (`troubles`, "" for none) is not compared, and keeps the outcome from being valid."""
    refusing = {host: trouble for host, trouble in sorted(troubles.items()) if trouble}
    others = {host: path for host, path in data_dirs.items() if host not in refusing}
    outcome = compare_replicas(
        others,
        {host: position for host, position in committed.items() if host in others},
        caught_up=caught_up,
        unfetched=[host for host in unfetched if host in others],
    )
    if not refusing or outcome.valid is False:
        return outcome
    said = "; ".join(f"{host} does not follow: {trouble}" for host, trouble in refusing.items())
    return CheckOutcome("unknown", said, {**outcome.details, "refusing": refusing})


def _segments(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    return sorted((int(path.name), path) for path in directory.iterdir() if re.fullmatch(r"\d{20}", path.name))


def _first_position(directory: Path) -> int:
    segments = _segments(directory)
    return segments[0][0] if segments else 0


def _blocks(directory: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes [begin, end) of a segmented log in blocks, aligned the same for every replica. A hole or an early end
    gives a shorter block, which then differs from the others."""
    segments = _segments(directory)
    position = begin
    while position < end:
        size_bytes = min(BLOCK_BYTES, end - position)
        block = bytearray()
        while len(block) < size_bytes:
            at = position + len(block)
            holding = [(start, path) for start, path in segments if start <= at]
            if not holding:
                break
            start, path = holding[-1]
            with path.open("rb") as file:
                file.seek(at - start)
                following = [other for other, _ in segments if other > start]
                limit = min(size_bytes - len(block), (following[0] - at) if following else size_bytes)
                piece = file.read(limit)
            if not piece:
                break
            block += piece
        yield bytes(block)
        position += size_bytes


def _first_difference(directories: Mapping[str, Path], begin: int, end: int) -> tuple[int, str, str] | None:
    hosts = list(directories)
    streams = [_blocks(directories[host], begin, end) for host in hosts]
    position = begin
    for blocks in zip(*streams, strict=True):
        for host, block in zip(hosts[1:], blocks[1:], strict=True):
            if block != blocks[0]:
                shorter = min(len(block), len(blocks[0]))
                at = next((i for i in range(shorter) if block[i] != blocks[0][i]), shorter)
                return position + at, hosts[0], host
        if len(blocks[0]) < min(BLOCK_BYTES, end - position):
            return position + len(blocks[0]), hosts[0], "its own committed position"
        position += BLOCK_BYTES
    return None


def one_leader_per_term(logs: Mapping[str, Path], *, started_wall_ms: int) -> CheckOutcome:
    """Whether no term had two leaders, by the role changes in the nodes' own logs.

    `started_wall_ms` is the wall time at which the history's clock was 0; it converts the changes to that clock.
    """
    by_term: dict[int, set[str]] = {}
    changes: list[dict[str, Any]] = []
    unreadable = []
    for host, path in sorted(logs.items()):
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    match = ROLE_CHANGE.match(line)
                    if match:
                        by_term.setdefault(int(match[3]), set()).add(match[2])
                        changes.append(
                            {"term": int(match[3]), "leader": match[2], "start_ns": _since(match[1], started_wall_ms)}
                        )
        except OSError as error:
            unreadable.append(f"{host}: {error.strerror}")
    changes.sort(key=lambda change: (change["term"], change["leader"]))
    details = {"terms_with_leader": len(by_term), "terms": changes[:MAX_LEADER_CHANGES_LISTED]}
    doubled = {term: sorted(nodes) for term, nodes in sorted(by_term.items()) if len(nodes) > 1}
    if doubled:
        term, nodes = next(iter(doubled.items()))
        return CheckOutcome(False, f"term {term} had {len(nodes)} leaders: {', '.join(nodes)}", details)
    if unreadable:
        return CheckOutcome("unknown", f"logs could not be read: {'; '.join(unreadable)}", details)
    if not by_term:
        return CheckOutcome("unknown", "no log mentions a leader", details)
    return CheckOutcome(True, f"{plural(len(by_term), 'term')} with a leader, one each", details)


def _since(text: str, started_wall_ms: int) -> int | None:
    """A log line's timestamp as nanoseconds since the test began; None if it cannot be parsed."""
    try:
        wall_ms = datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000
    except ValueError:
        return None
    return int((wall_ms - started_wall_ms) * 1_000_000)
