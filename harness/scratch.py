"""Temporary directories that belong to no run: working files of a search, a trial or a report.

The name identifies the owner, `splitbrain-<purpose>-<pid>-<start>-<pid namespace>-<random>`, so that the directory of a
killed process is recognisable from its creation on, and `harness clean` removes it. Directories of runs are recorded in
the run's state instead (see harness.run_state).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator

from harness.clusters.host_agent import remove_tree
from harness.run_state import TEMP_PREFIX, pid_namespace_of, process_is_live, process_start_ticks, temp_dir
from nemesis.mechanisms.shim import library_directories

__all__ = ["remove_scratch_of_the_dead", "scratch_directory", "scratch_prefix"]

PURPOSES = ("audit", "course", "hypothesis", "launcher", "project", "rehearsal", "shim", "spark", "trial")
_NAME = re.compile(
    rf"{TEMP_PREFIX}(?:{'|'.join(PURPOSES)})-(?P<pid>\d+)-(?:(?P<start>\d+)-(?:(?P<namespace>\d+)-)?)?\w+"
)
"""Packages that do not import the harness omit the start time or the namespace: without a start time a directory counts
as live while any process has the pid, without a namespace as of this one."""


def scratch_prefix(purpose: str) -> str:
    """The name prefix of a temporary file or directory of this process; `purpose` is one of `PURPOSES`."""
    if purpose not in PURPOSES:
        raise ValueError(f"{purpose}: no purpose of temporary directories")
    pid = os.getpid()
    return f"{TEMP_PREFIX}{purpose}-{pid}-{process_start_ticks(pid) or 0}-{pid_namespace_of('self') or 0}-"


@contextlib.contextmanager
def scratch_directory(purpose: str) -> Iterator[str]:
    """An empty directory for the duration of a `with` block."""
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(purpose), dir=temp_dir()) as directory:
        yield directory


def remove_scratch_of_the_dead(*, removed: Callable[[str], None], left: Callable[[str], None]) -> None:
    """Remove temporary files and directories of this user's ended processes. Each is reported in one line to `removed`,
    or with the reason to `left`."""
    for path in _of_the_dead():
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                remove_tree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            continue  # another process is cleaning too
        except OSError as error:
            left(f"{path}, of a process that is gone: {error.strerror}")
        else:
            removed(f"{path}, of a process that is gone")


def _of_the_dead() -> list[str]:
    roots = dict.fromkeys((temp_dir(), tempfile.gettempdir(), *library_directories()[:1]))
    paths = (os.path.join(root, name) for root in roots if os.path.isdir(root) for name in sorted(os.listdir(root)))
    found = []
    for path in paths:
        match = _NAME.fullmatch(os.path.basename(path))
        if match is None or _may_live(**match.groupdict()):
            continue
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
                found.append(path)
    return found


def _may_live(pid: str, start: str | None, namespace: str | None) -> bool:
    if start is None:
        return process_start_ticks(int(pid)) is not None
    return process_is_live(int(pid), int(start), int(namespace or 0) or None) is not False
