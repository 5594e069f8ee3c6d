"""One-line summaries of a store's runs: verdict, options, operations, faults. Does not use Spark.

    store/
      .runs.json    the cached summaries, to avoid reading thousands of results.json again
      .runs.lock    held while .runs.json and index.html are written

The file of summaries is a cache: an entry is valid while the size and mtime of its run's results.json are unchanged,
and a damaged, foreign or missing file is rebuilt. Every reader of the store may write it; concurrent writers lose
nothing, because each rebuilds missing entries from the store itself.
"""

from __future__ import annotations

__all__ = [
    "MAX_RUNS",
    "STATES",
    "RunIndex",
    "RunSummary",
    "SummaryCache",
    "index_lock",
    "read_index",
    "read_summary",
    "select",
    "unreadable_words",
]

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checker.faults import count_unmet
from harness.atomic_files import replace_file
from harness.registry import short_name
from harness.report.checks import verdict_word
from harness.store import LATEST, RunDir, RunStatus, Store, StoreError, is_run, run_order
from harness.units import clip, plural

STATES = ("valid", "invalid", "unknown", "running", "unfinished")
"""The possible states of a run. `unfinished`: it died before it was judged."""

MAX_RUNS = 100_000
"""Limit of summarised runs, the newest ones: about 50 MB of memory. Further runs are only counted, and reported."""

MAX_CACHE_BYTES = 128 * 1024 * 1024
"""The largest cache file read: `MAX_RUNS` with the longest texts are smaller."""

MAX_REASON = 240
MAX_SETTINGS = 160
MAX_WORD = 80
"""Limits of characters kept of a run's texts."""

MAX_UNREADABLE_NAMED = 5
"""Limit of unreadable folders that are named; the others are counted."""

LOCK_TIMEOUT_S = 10.0
"""How long to wait for another writer: writing takes a fraction of a second, so one that takes longer hangs."""

LOCK_INTERVAL_S = 0.02

CACHE = ".runs.json"
LOCK = ".runs.lock"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The summary of a run. Texts are clipped and printable; unknown numbers are None."""

    name: str
    """ "<test>/<time>", the name for `Store.find`."""
    verdict: str
    """One of `STATES`."""
    reason: str
    system: str
    workload: str
    nemesis: str
    """As the operator gave it: "partition=leader,kill", "schedule FILE", "none"."""
    cluster: str
    settings: str
    nodes: int | None
    seed: int | None
    ok: int | None
    fail: int | None
    info: int | None
    faults: int | None
    proven: int | None
    unmet: int | None
    """Faults that the system under test did not meet."""
    duration_s: float | None

    @property
    def test(self) -> str:
        """The test's folder in the store."""
        return self.name.partition("/")[0]

    @property
    def time(self) -> str:
        """The run's folder in the test's folder."""
        return self.name.partition("/")[2]

    @property
    def started_at(self) -> datetime | None:
        """The start time from the folder's name; None if that is not a time."""
        stamp = self.time.partition("-")[0]
        try:
            return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            return None

    def age_s(self, now: datetime) -> float | None:
        """Seconds from its start to `now`, at least 0; None if the start is unknown."""
        started_at = self.started_at
        return None if started_at is None else max(0.0, (now - started_at).total_seconds())

    def to_json(self) -> dict[str, Any]:
        """The summary as plain JSON data."""
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(field.name for field in dataclasses.fields(RunSummary))
_NUMBERS = frozenset(("nodes", "seed", "ok", "fail", "info", "faults", "proven", "unmet"))


@dataclass(frozen=True, slots=True)
class RunIndex:
    """The runs of a store, newest first."""

    runs: Sequence[RunSummary]
    left_out: int = 0
    """Number of runs older than the `MAX_RUNS` newest."""
    unreadable: Sequence[str] = ()
    """Folders of the store that cannot be read, with the reason; their runs are missing from `runs`."""


def unreadable_words(index: RunIndex) -> str:
    """Which folders cannot be read, as a sentence without a full stop; "" if all can be read."""
    if not index.unreadable:
        return ""
    named = "; ".join(index.unreadable[:MAX_UNREADABLE_NAMED])
    more = len(index.unreadable) - MAX_UNREADABLE_NAMED
    rest = f"; and {more:,} more" if more > 0 else ""
    return f"{plural(len(index.unreadable), 'folder')} of the store cannot be read: {named}{rest}"


_Stamp = tuple[int, int]
"""Size and mtime in ns of a results.json."""

SummaryCache = dict[str, tuple[_Stamp, RunSummary]]
"""Run name -> the stamp that its summary was made from, and the summary."""


def read_index(store: Store, *, is_kept: bool = True, known: SummaryCache | None = None) -> RunIndex:
    """Summarise every run of `store`; empty if the store does not exist.

    With `is_kept` the summaries are cached in the store, if it is writable. `known` is an in-memory cache that replaces
    the file's, for callers that read the same store repeatedly. Raises StoreError if the store itself cannot be read;
    unreadable folders in it are named in the result.
    """
    before = known if known is not None else {}
    if not before:
        before.update(_load(store.root))
    cached = dict(before)
    names, unreadable = _names(store.root)
    left_out = max(0, len(names) - MAX_RUNS)
    runs = []
    kept: SummaryCache = {}
    for name in names[:MAX_RUNS]:
        stamp = _stamp(f"{store.root}/{name}")
        entry = cached.get(name)
        if stamp is None or entry is None or entry[0] != stamp:
            summary, is_lasting = _summarize(store.root / name, name, is_judged=stamp is not None)
            if summary is None:
                continue
            entry = (stamp or (0, 0), summary)
            if not is_lasting:  # another user may be able to read it, or this one after a chmod, which changes no stamp
                stamp = None
        runs.append(entry[1])
        if stamp is not None:
            kept[name] = entry
    if is_kept and kept != cached:
        _save(store.root, kept)
    before.clear()
    before.update(kept)
    return RunIndex(runs, left_out, unreadable)


def select(
    runs: Sequence[RunSummary],
    *,
    verdicts: Sequence[str] = (),
    test: str = "",
    system: str = "",
    workload: str = "",
    nemesis: str = "",
    cluster: str = "",
    words: str = "",
) -> list[RunSummary]:
    """Those of `runs` that meet every condition given, in the same order.

    `nemesis` is a nemesis's name ("partition" also matches "partition=leader"), or a name with its variant; all `words`
    must occur somewhere in the run's line, ignoring case.
    """
    conditions: list[Callable[[RunSummary], bool]] = []
    if verdicts:
        conditions.append(lambda run: run.verdict in verdicts)
    if system:  # one in a file is also found by its short name
        conditions.append(lambda run: system in (run.system, short_name(run.system)))
    for name, wanted in (("test", test), ("workload", workload), ("cluster", cluster)):
        if wanted:
            conditions.append(lambda run, name=name, wanted=wanted: getattr(run, name) == wanted)  # type: ignore[misc]
    if nemesis:
        conditions.append(lambda run: _has_nemesis(run, nemesis))
    if words.strip():
        searched = words.casefold().split()
        conditions.append(lambda run: _has_words(_line(run), searched))
    return [run for run in runs if all(condition(run) for condition in conditions)]


def _has_nemesis(run: RunSummary, wanted: str) -> bool:
    return any(wanted in (one, one.partition("=")[0]) for one in run.nemesis.split(","))


def _has_words(line: str, words: Sequence[str]) -> bool:
    return all(word in line for word in words)


def _line(run: RunSummary) -> str:
    parts = (run.name, run.verdict, run.system, run.workload, run.nemesis, run.cluster, run.settings, run.reason)
    return f"{' '.join(parts)} {run.seed}".casefold()


def _names(root: Path) -> tuple[list[str], list[str]]:
    """Names of possible runs, newest first, and the folders that cannot be read. Unprintable names are skipped."""
    found: list[str] = []
    unreadable: list[str] = []
    try:
        tests = _folders(root)
    except OSError as error:
        raise StoreError(f"cannot read the store {root}: {error.strerror}") from error
    for test in tests:
        try:
            found += [f"{test}/{run}" for run in _folders(root / test)]
        except OSError as error:  # such as root's in a shared store: no reason to lose the others
            unreadable.append(f"{clip(test, MAX_WORD)} ({error.strerror})")
    found.sort(key=lambda name: (run_order(name.partition("/")[2]), name), reverse=True)
    return found, sorted(unreadable)


def _folders(path: Path) -> list[str]:
    """The subdirectories of a directory; none if it does not exist or was just removed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
            and entry.name != LATEST
            and entry.name.isprintable()
            and not entry.name.startswith(".")
        ]
    return []


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.lstat(f"{path}/results.json")
    except OSError:
        return None
    # A link is not a file of ours: it may lead anywhere.
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def read_summary(store: Store, name: str) -> RunSummary | None:
    """The summary of the run "<test>/<time>"; None if the store has no such run, or if it is behind a link."""
    parts = name.split("/")
    if len(parts) != 2 or not all(part and part.isprintable() and not part.startswith(".") for part in parts):
        return None
    path = store.root / name
    try:
        if parts[1] == LATEST or path.is_symlink() or path.parent.is_symlink() or not path.is_dir():
            return None
    except OSError as error:
        return (
            None
            if error.errno == errno.ENAMETOOLONG
            else _unreadable_summary(name, f"cannot read {path}: {error.strerror}")
        )
    return _summarize(path, name, is_judged=_stamp(str(path)) is not None)[0]


def _summarize(path: Path, name: str, *, is_judged: bool) -> tuple[RunSummary | None, bool]:
    """(summary from a run's files, or None for a directory without a run; whether it stays valid while results.json is
    unchanged, which is not so if a file could not be read)."""
    try:
        if not is_run(path):
            return None, False
    except OSError as error:  # readable only by its owner: no reason to lose the others
        return _unreadable_summary(name, f"cannot read {path}: {error.strerror}"), False
    run_dir = RunDir(path)
    is_lasting = True
    try:
        test: Mapping[str, Any] = {} if run_dir.test_path.is_symlink() else run_dir.read_test()
    except StoreError as error:
        test, is_lasting = {}, not isinstance(error.__cause__, OSError)
    results: Mapping[str, Any] = {}
    is_running = not is_judged and _status(run_dir) is RunStatus.RUNNING
    # It may have been judged between the two checks.
    if not is_judged and not is_running:
        is_judged = _stamp(str(path)) is not None
    if is_running:
        verdict, reason = "running", ""
    elif not is_judged and os.path.lexists(run_dir.results_path):
        # A directory, a pipe, or a link, which may lead anywhere: the run's result is unknown.
        verdict, reason = (
            "unknown",
            clip(f"{run_dir.results_path} is not a regular file, so splitbrain did not write it", MAX_REASON),
        )
    elif not is_judged:
        verdict, reason = "unfinished", "it ended before it was judged"
    else:
        try:
            results = run_dir.read_results()
            verdict, reason = verdict_word(results.get("valid")), clip(results.get("reason") or "", MAX_REASON)
        except StoreError as error:
            verdict, reason = "unknown", clip(str(error), MAX_REASON)
            is_lasting = is_lasting and not isinstance(error.__cause__, OSError)
    faults = results.get("faults")
    faults = [fault for fault in faults if isinstance(fault, Mapping)] if isinstance(faults, list) else None
    ops = results.get("ops")
    ops = ops if isinstance(ops, Mapping) else {}
    summary = RunSummary(
        name=name,
        verdict=verdict,
        reason=reason,
        system=_word(test.get("system")),
        workload=_word(test.get("workload")),
        nemesis=_nemesis(test),
        cluster=_word(test.get("cluster")),
        settings=_settings(test.get("settings")),
        nodes=_number(test.get("nodes")),
        seed=_number(test.get("seed")),
        ok=_number(ops.get("ok")),
        fail=_number(ops.get("fail")),
        info=_number(ops.get("info")),
        faults=None if faults is None else len(faults),
        proven=None if faults is None else sum(fault.get("proven") is True for fault in faults),
        unmet=None if faults is None else count_unmet(faults),
        duration_s=_seconds(results.get("duration_s")),
    )
    return summary, is_lasting


def _unreadable_summary(name: str, reason: str) -> RunSummary:
    """The summary of a run that exists but cannot be read: never valid."""
    return RunSummary(
        name=name, verdict="unknown", reason=clip(reason, MAX_REASON),
        system="", workload="", nemesis="", cluster="", settings="", nodes=None, seed=None, ok=None, fail=None,
        info=None, faults=None, proven=None, unmet=None, duration_s=None,
    )  # fmt: skip


def _status(run_dir: RunDir) -> RunStatus:
    try:
        return run_dir.status
    except StoreError:  # an unreadable marker does not show that the run is in progress
        return RunStatus.BROKEN


def _word(value: Any) -> str:
    return "" if value is None else clip(value, MAX_WORD)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _seconds(value: Any) -> float | None:
    is_number = isinstance(value, float) or _number(value) is not None
    return float(value) if is_number and math.isfinite(value) else None


def _nemesis(test: Mapping[str, Any]) -> str:
    if isinstance(test.get("nemesis_schedule"), str):
        return clip(f"schedule {os.path.basename(test['nemesis_schedule'])}", MAX_WORD)
    chosen = test.get("nemesis")
    if not isinstance(chosen, list):
        return ""
    return clip(",".join(map(str, chosen[:16])) or "none", MAX_WORD)


def _settings(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return ""
    return clip(" ".join(f"{key}={value}" for key, value in list(settings.items())[:32]), MAX_SETTINGS)


def _load(root: Path) -> SummaryCache:
    """The content of the cache file; empty if it is missing, damaged, or of another version."""
    path = root / CACHE
    try:
        found_at = path.stat()
        # Opening a pipe would block until somebody writes.
        if not stat.S_ISREG(found_at.st_mode) or found_at.st_size > MAX_CACHE_BYTES:
            return {}
        data = json.loads(path.read_bytes())
        if data["format"] != _FORMAT or data["fields"] != list(_FIELDS):
            return {}
        found: SummaryCache = {}
        for size, mtime_ns, values in data["runs"]:
            summary = RunSummary(**dict(zip(_FIELDS, values, strict=True)))
            if not (type(size) is int and type(mtime_ns) is int and _is_valid(summary)):
                return {}
            found[summary.name] = ((size, mtime_ns), summary)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return found


def _is_valid(summary: RunSummary) -> bool:
    if summary.verdict not in STATES or not isinstance(summary.duration_s, float | None):
        return False
    for name in _FIELDS:
        value = getattr(summary, name)
        if name in _NUMBERS:
            if not (value is None or type(value) is int):
                return False
        elif name != "duration_s" and type(value) is not str:
            return False
    return True


def _save(root: Path, cache: SummaryCache) -> None:
    runs = [[*stamp, [getattr(summary, name) for name in _FIELDS]] for stamp, summary in cache.values()]
    text = json.dumps({"format": _FORMAT, "fields": _FIELDS, "runs": runs}, separators=(",", ":"))
    with contextlib.suppress(OSError):  # only a cache: a read-only store is read the slow way
        replace_file(root / CACHE, text.encode("ascii"))


@contextlib.contextmanager
def index_lock(store: Store) -> Iterator[None]:
    """Hold the lock for writing the store's index files, so that the last writer has seen every run.

    The kernel releases the lock with the process. After `LOCK_TIMEOUT_S`, or on file systems without locks, proceeds
    without it: files are still written atomically, and at worst lack the newest run. Raises OSError.
    """
    fd = os.open(store.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(LOCK_INTERVAL_S)
            except OSError:
                break
        yield
    finally:
        os.close(fd)
