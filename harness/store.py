"""The store of runs, `store/<test>/<time>/`: writing, reading and finding runs.

    store/
      latest                      -> the newest run
      index.html                  the newest runs, for people; made from .runs.json (run_index.py)
      broker-register-partition/
        latest                    -> the newest run of this test
        20260131T120000Z/
          test.json               the options, written before anything starts
          history.jsonl           the events, written as they happen
          history.parquet         the same with typed columns, written at the end
          results.json            the verdict, written atomically
          report.html             for people
          metrics.jsonl           metrics of the system under test, if it serves any
          harness.log             the harness's own log
          nodes/<node>/           the nodes' logs and data
          running                 present and locked while the harness performs this run

The marker `running` distinguishes three states: locked means that the run is in progress, present but unlocked that its
harness died, absent that the run was finished. The kernel releases the lock with the process, also after kill -9. Every
problem that the operator can fix is a `StoreError` of one line.
"""

from __future__ import annotations

__all__ = [
    "A_COPY", "LATEST", "RunDir", "RunStatus", "Store", "StoreError", "is_run", "require_writable", "run_order",
    "store_of", "without_latest",
]  # fmt: skip

import argparse
import contextlib
import enum
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.atomic_files import replace_file
from harness.errors import OperatorError, nearest

LATEST = "latest"
MARKER = "running"

MAX_RUNS_PER_SECOND = 1_000
"""Attempts to find a free name for a run; a test matrix starts a few per second."""

MAX_JSON_BYTES = 256 * 1024 * 1024
"""The largest results.json or test.json read: far above any real one, so that a wrong file cannot fill memory."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*\Z")

ANOTHER_STORE = "choose another place with --store DIR"
A_COPY = "copy the run to another place, and give the command the path of the copy"
"""Advice about a run that exists: `--store` of its commands only says where to look for it."""

_FIXES = {
    errno.EROFS: "the file system is read-only; {instead}",
    errno.EACCES: "permission denied; {instead}",
    errno.EPERM: "permission denied; {instead}",
    errno.ENOSPC: "no space left; free some or {instead}",
    errno.EDQUOT: "the disk quota is used up; free some or {instead}",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.ENOENT: "no such file or directory",
}


class StoreError(OperatorError):
    """The store cannot be used or lacks the requested run; the message is one line that names the fix."""


class RunStatus(enum.Enum):
    """Whether a run is in progress, was finished, or was left incomplete by a harness that died."""

    RUNNING = "running"
    FINISHED = "finished"
    BROKEN = "broken"


@contextlib.contextmanager
def _as_store_error(what: str, instead: str = ANOTHER_STORE) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        known = _FIXES.get(error.errno or 0)
        reason = (error.strerror or str(error)) if known is None else known.format(instead=instead)
        raise StoreError(f"cannot {what}: {reason}") from error


class RunDir:
    """One run's directory. Created by `Store.create` (then it holds the lock) or found by `Store.find`."""

    def __init__(self, path: Path, lock_fd: int | None = None) -> None:
        self.path = path
        self.test_path = path / "test.json"
        self.schedule_path = path / "schedule.json"
        """The schedule of faults, for `harness replay`."""
        self.history_path = path / "history.jsonl"
        self.parquet_path = path / "history.parquet"
        self.results_path = path / "results.json"
        self.report_path = path / "report.html"
        self.trace_path = path / "trace.jsonl"
        self.metrics_path = path / "metrics.jsonl"
        """What the hosts' pages of metrics said, if the system has such pages."""
        self.explanation_path = path / "explain.json"
        """The result of `harness explain`, if it was run."""
        self.harness_log_path = path / "harness.log"
        self.nodes_path = path / "nodes"
        """Contains a directory for every node, with its logs and, if kept, its data."""
        self._lock_fd = lock_fd

    @property
    def name(self) -> str:
        """ "<test>/<time>", the name for `Store.find`."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def status(self) -> RunStatus:
        """See the module docstring. On file systems without locks a run in progress looks broken."""
        marker = self.path / MARKER
        if self._lock_fd is not None:
            return RunStatus.RUNNING
        try:
            fd = os.open(marker, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
        except FileNotFoundError:
            return RunStatus.FINISHED if self.results_path.exists() else RunStatus.BROKEN
        except OSError as error:
            raise StoreError(f"cannot read {marker}: {error.strerror}") from error
        try:
            # A shared lock, so that two concurrent callers do not take each other for the harness.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return RunStatus.RUNNING
        except OSError:
            return RunStatus.BROKEN
        finally:
            os.close(fd)
        return RunStatus.BROKEN

    def finish(self) -> None:
        """Mark the run as finished: the last step of a run, after its results are written. Idempotent.

        Raises StoreError.
        """
        with _as_store_error(f"finish {self.path}", self._instead):
            (self.path / MARKER).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock without finishing the run, which then counts as broken. Idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write_test(self, test: Mapping[str, Any]) -> None:
        """Write test.json atomically. Raises StoreError."""
        self._write_json(self.test_path, test)

    def write_explanation(self, explanation: Mapping[str, Any]) -> None:
        """Write explain.json atomically. Raises StoreError."""
        self._write_json(self.explanation_path, explanation)

    def read_explanation(self) -> dict[str, Any] | None:
        """The content of explain.json; None if there is none. Raises StoreError if it is damaged."""
        return _read_json(self.explanation_path, "") if self.explanation_path.exists() else None

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json atomically.

        Values that JSON cannot represent are converted (a set to a sorted list, infinity to null, others to their
        text), so that a verdict is not lost over a detail. Raises StoreError.
        """
        self._write_json(self.results_path, results)

    @property
    def _instead(self) -> str:
        return A_COPY if self._lock_fd is None else ANOTHER_STORE

    def _write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        text = json.dumps(_plain(data), indent=2, ensure_ascii=True, allow_nan=False) + "\n"
        with _as_store_error(f"write {path}", self._instead):
            replace_file(path, text.encode("ascii"), is_synced=True)

    def read_test(self) -> dict[str, Any]:
        """The content of test.json. Raises StoreError if it is missing or damaged."""
        return _read_json(
            self.test_path,
            f"{self.path} has no test.json: it is not a run (harness check judges a history alone), or was killed when "
            "it started",
        )

    def read_results(self) -> dict[str, Any]:
        """The content of results.json. Raises StoreError if it is missing or damaged."""
        return _read_json(
            self.results_path,
            f"run {self.name} ended before it had a results.json: create one with `harness analyze {self.name}`",
        )


class Store:
    """A directory of runs. Only `create` creates it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        if not os.fspath(root):
            raise StoreError("--store: the path is empty; omit the option for ./store")
        try:
            self.root = Path(os.path.abspath(root))
        except FileNotFoundError:
            raise StoreError("the current directory no longer exists: change to one that does") from None

    def create(self, test_name: str, *, now: datetime | None = None) -> RunDir:
        """Create the directory of a new run, lock it, and point both `latest` links at it.

        `now` (default: the wall clock) names it, in UTC to the second; runs of the same second get "-2", "-3",
        and so on. Raises StoreError.
        """
        if not _NAME.match(test_name) or test_name == LATEST:
            raise StoreError(f"{test_name!r} is not a valid name for a test in the store")
        stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        folder = self.root / test_name
        with _as_store_error(f"store runs in {self.root}"):
            folder.mkdir(parents=True, exist_ok=True)
            path = _make_unique(folder, stamp)
            lock_fd = -1
            try:
                lock_fd = os.open(path / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
                with contextlib.suppress(OSError):  # a file system without locks: see RunDir.status
                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(lock_fd, f"{os.getpid()}\n".encode())
                _point(folder / LATEST, path.name)
                _point(self.root / LATEST, f"{test_name}/{path.name}")
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)  # no trace of a run that never began
                if lock_fd >= 0:
                    os.close(lock_fd)
                raise
        return RunDir(path, lock_fd)

    def require(self) -> None:
        """Raise StoreError if the store does not exist."""
        with _as_store_error(f"read the store {self.root}"):
            is_there = self.root.is_dir()
        if not is_there:
            raise StoreError(
                f"there is no store at {self.root}: start a run first, or choose another store with --store DIR"
            )

    def find(self, text: str) -> RunDir:
        """The run that `text` names: "latest", "<test>" or "<test>/latest" (its newest), "<test>/<time>", or
        the path of a run's directory or of a file in one. Names in this store take precedence over paths; "latest" is
        always this store's. Raises StoreError.
        """
        candidates = [self.root / text]
        with _as_store_error(f"look for the run {text!r}"):
            if text != LATEST:
                candidates.append(Path(text).parent if Path(text).is_file() else Path(text))
            for candidate in candidates:
                if is_run(candidate):
                    return RunDir(candidate.resolve())
        self.require()
        runs, unreadable = self._scan()
        if not runs and not unreadable:
            raise StoreError(f"the store {self.root} has no runs yet")
        test_name, _, moment = text.strip("/").partition("/")
        if moment in ("", LATEST):
            # The link is absent or dangling, or only the test was named: the newest name is the newest run.
            of_test = [run for run in runs if test_name in (LATEST, run.path.parent.name)]
            newest = max(of_test, key=lambda run: run_order(run.path.name), default=None)
            for path, reason in unreadable:
                is_asked_for = test_name in (LATEST, path.relative_to(self.root).parts[0])
                # A test's folder may contain any run; a run's name tells its age.
                may_be_newer = (
                    newest is None or path.parent == self.root or run_order(path.name) > run_order(newest.path.name)
                )
                if is_asked_for and may_be_newer:
                    raise StoreError(f"cannot tell which run is the newest: cannot read {path}: {reason}")
            if newest is not None:
                return newest
        hint = nearest(text, [run.name for run in runs] + [run.path.parent.name for run in runs])
        if unreadable:
            hint += (
                f"; {len(unreadable):,} of its folders cannot be read, such as {unreadable[0][0]}: {unreadable[0][1]}"
            )
        raise StoreError(f"no run {text!r} in {self.root}{hint}")

    def remove(self, run: RunDir) -> None:
        """Remove a run as far as possible, and point `latest` links to it at the newest remaining run."""
        folder = run.path.parent
        shutil.rmtree(run.path, ignore_errors=True)
        with contextlib.suppress(OSError, StoreError):  # another process may do the same; `find` needs no links
            left = self.runs()
            _repoint(folder / LATEST, [other for other in left if other.path.parent == folder])
            _repoint(self.root / LATEST, left)
            folder.rmdir()  # unless it is not empty

    def runs(self) -> list[RunDir]:
        """Every readable run of the store, oldest first; empty if there is no store. Raises StoreError if the store
        itself cannot be read."""
        return self._scan()[0]

    def _scan(self) -> tuple[list[RunDir], list[tuple[Path, str]]]:
        """The runs, oldest first, and the unreadable folders of tests and runs, with the reason."""
        found: list[RunDir] = []
        unreadable: list[tuple[Path, str]] = []
        with _as_store_error(f"read the store {self.root}"):
            folders = _directories(self.root)
        for folder in folders:
            try:
                paths = _directories(folder)
            except OSError as error:
                unreadable.append((folder, error.strerror or str(error)))
                continue
            for path in paths:
                try:
                    found += [RunDir(path)] if is_run(path) else []
                except OSError as error:  # readable only by its owner: no reason to lose the others
                    unreadable.append((path, error.strerror or str(error)))
        return sorted(found, key=lambda run: (run_order(run.path.name), run.name)), sorted(unreadable)


def store_of(arguments: argparse.Namespace) -> Store:
    """The store of a command that looks for a run. Raises StoreError if --store names one that does not exist, since a
    run of the same name elsewhere is not the requested one."""
    store = Store(arguments.store)
    if "store" in arguments.given:
        store.require()
    return store


def without_latest(path: str) -> str:
    """A path with links named `latest` resolved, since they point elsewhere after the next run."""
    followed = Path()
    for part in Path(path).parts:
        followed /= part
        if part == LATEST and followed.is_symlink():
            followed = followed.parent / os.readlink(followed)
    return str(followed) if str(followed) != str(Path(path)) else path


def require_writable(path: Path, instead: str = ANOTHER_STORE) -> None:
    """Raise StoreError if a directory, which need not exist yet, would not be writable: for commands that write after
    long work; `instead` is the advice. Creates nothing."""
    with _as_store_error(f"write to {path}", instead):
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code))


def _directories(path: Path) -> list[Path]:
    """The subdirectories of a directory; none if it does not exist or was removed meanwhile. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()]
    return []


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run: it has a test.json, a history, or the marker of a run in progress."""
    return any((path / name).is_file() for name in ("test.json", "history.jsonl", MARKER))


def run_order(name: str) -> tuple[str, int]:
    """The order of runs by name: by time, then "-2", "-3" ... "-10" as numbers."""
    stamp, _, number = name.partition("-")
    return stamp, int(number) if number.isdigit() else 0


def _make_unique(folder: Path, stamp: str) -> Path:
    for attempt in range(1, MAX_RUNS_PER_SECOND + 1):
        path = folder / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            path.mkdir(parents=True)  # the test's folder may just have been removed with its last run
        except FileExistsError:
            continue
        return path
    raise StoreError(f"{folder} already holds {MAX_RUNS_PER_SECOND} runs of {stamp}: wait a second")


def _point(link: Path, target: str) -> None:
    """Make `link` point at `target`, replacing an older link in one step."""
    if link.is_dir() and not link.is_symlink():
        raise StoreError(f"{link} is a directory, not a link: move it away")
    temporary = link.with_name(f".{link.name}.{secrets.token_hex(8)}")  # others, even with our pid, may do the same
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            return  # a file system without links: `find` uses the names then
        raise
    os.replace(temporary, link)


def _repoint(link: Path, runs: Sequence[RunDir]) -> None:
    """Point a dangling link at the last of these runs; remove it if there are none."""
    if not link.is_symlink() or link.exists():
        return
    if runs:
        _point(link, os.path.relpath(runs[-1].path, link.parent))
    else:
        link.unlink()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


def _read_json(path: Path, missing: str) -> dict[str, Any]:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would block until somebody writes
            raise StoreError(f"{path} is not a regular file, so splitbrain did not write it")
        if found.st_size > MAX_JSON_BYTES:
            raise StoreError(f"{path} is larger than {MAX_JSON_BYTES} bytes, so splitbrain did not write it")
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(missing) from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise StoreError(f"{path} is damaged: not a JSON object")
    return data
