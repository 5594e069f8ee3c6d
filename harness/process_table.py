"""Processes of this machine from /proc: finds them by run, namespace and control group, and reliably kills them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.pidfds import pidfd_open, pidfd_send_signal
from harness.run_state import living_thread, process_start_ticks

__all__ = [
    "ProcessId",
    "find_processes",
    "is_in_group",
    "is_in_namespace",
    "kill_until_gone",
    "marked_with",
    "variable_of",
]

_POLL_S = 0.05

_EXEC_TIMEOUT_S, _EXEC_POLL_S = 1.0, 0.001
"""For an exec in progress, which takes less than a millisecond of processor time."""

_FLAGS, _ENV_START, _ENV_END, _PF_KTHREAD = 6, 47, 48, 0x00200000
"""Fields of /proc/PID/stat after the name (proc_pid_stat(5)), and a flag (linux/sched.h)."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, distinguished by its start time from a later one with the same pid."""

    pid: int
    start_ticks: int

    @property
    def exists(self) -> bool:
        """Whether it still runs; a zombie does not count."""
        return process_start_ticks(self.pid) == self.start_ticks

    @property
    def command(self) -> str:
        """Its command line on one line, shortened to 80 characters; empty if it is gone."""
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                words = file.read(4096).split(b"\0")
        except OSError:
            return ""
        text = " ".join(word.decode(errors="replace") for word in words).strip()
        return "".join(character if character.isprintable() else " " for character in text[:80])


def find_processes(matches: Callable[[int], bool]) -> list[ProcessId]:
    """Every running process (no zombies) for which `matches` is true, by pid. `matches` gets the id of a live thread,
    which is the pid unless the process's first thread has ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            pid = int(name)
            start_ticks, thread = process_start_ticks(pid), living_thread(pid)
            if start_ticks is not None and thread is not None and matches(thread):
                found.append(ProcessId(pid, start_ticks))
    return sorted(found, key=lambda process: process.pid)


def marked_with(variable: str, value: str) -> Callable[[int], bool]:
    """A test of whether a process was started with `variable`=`value` in its environment.

    False for a process whose environment we may not read: it is not ours.
    """
    entry = os.fsencode(f"{variable}={value}")
    return lambda pid: entry in _environment(pid)


def variable_of(process: ProcessId, variable: str) -> str | None:
    """The value of a variable in a process's initial environment; None if it is not set, or if we may not read it."""
    begin = os.fsencode(f"{variable}=")
    entries = _environment(living_thread(process.pid) or process.pid)
    return next((os.fsdecode(entry.removeprefix(begin)) for entry in entries if entry.startswith(begin)), None)


def _environment(pid: int) -> list[bytes]:
    deadline = time.monotonic() + _EXEC_TIMEOUT_S
    try:
        while not (shown := Path(f"/proc/{pid}/environ").read_bytes()):
            if _has_no_environment(pid) or time.monotonic() > deadline:
                return []
            time.sleep(_EXEC_POLL_S)
        return shown.split(b"\0")
    except OSError:
        return []


def _has_no_environment(pid: int) -> bool:
    """Whether a process whose environment read as empty really has none. During exec it reads as empty too, and after
    the exec, which may have finished by now, the process has one that was not read."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    letter, flags, start, end = fields[0], int(fields[_FLAGS]), int(fields[_ENV_START]), int(fields[_ENV_END])
    return letter in (b"Z", b"X") or bool(flags & _PF_KTHREAD) or start == end != 0


def is_in_namespace(identity: tuple[int, int]) -> Callable[[int], bool]:
    """A test of whether a process is in the network namespace with this device and inode; False if we may not know."""

    def matches(pid: int) -> bool:
        try:
            status = os.stat(f"/proc/{pid}/ns/net")
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == identity

    return matches


def is_in_group(is_ours: Callable[[str], bool]) -> Callable[[int], bool]:
    """A test of whether a process is in or below a control group, of any hierarchy, whose name satisfies `is_ours`."""

    def matches(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
                paths = [line.rstrip("\n").split(":", 2)[2] for line in file]
        except OSError:
            return False
        return any(is_ours(name) for path in paths for name in path.split("/"))

    return matches


def kill_until_gone(find: Callable[[], Iterable[ProcessId]], *, timeout_s: float) -> list[ProcessId]:
    """Send SIGKILL to every process that `find` returns, repeatedly until it returns none or time is up.

    The repetition catches children that were started in between. Returns the killed processes; survivors (stuck in the
    kernel) are found by calling `find` once more. Raises PermissionError.
    """
    deadline = time.monotonic() + timeout_s
    killed: dict[ProcessId, None] = {}
    while found := [process for process in find() if process.exists]:
        for process in found:
            _kill(process)
            killed[process] = None
        _wait(found, deadline)
        if time.monotonic() >= deadline:
            break
    return list(killed)


def _kill(process: ProcessId) -> None:
    try:
        descriptor = pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor pins the process: if it is the right one now, the signal goes to no other.
        if process.exists:
            pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _wait(processes: Iterable[ProcessId], deadline: float) -> None:
    """Wait until all of them have ended or the deadline has passed."""
    for process in processes:
        while process.exists and (left_s := deadline - time.monotonic()) > 0:
            try:
                descriptor = pidfd_open(process.pid)
            except ProcessLookupError:
                break
            try:
                # Readable once it has ended, whether or not its parent has reaped it.
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                ended = bool(poll.poll(min(left_s, 1.0) * 1000))
            finally:
                os.close(descriptor)
            if ended and process.exists:
                time.sleep(_POLL_S)
