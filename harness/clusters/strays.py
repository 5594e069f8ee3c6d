"""Processes of this machine that belong to a host of a run and that its agent does not know: their parents have ended,
and nothing that they inherited tells of the program that started them. A wrapper that starts a daemon in a clean
environment leaves one.

What holds them all the same is what a process does not shed by itself: the host's control groups and its network
namespace; where hosts have neither, the address that they listen on, which is the run's alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from harness.clusters.host_agent import HELPERS, ancestors, sockets_of
from harness.process_table import ProcessId, find_processes
from harness.run_state import process_start_ticks
from nemesis.target import ProcessMember

__all__ = ["is_listening", "member_of", "strays"]

_LISTEN = "0A"


class _Shown(NamedTuple):
    """What /proc/<pid>/stat says of a process."""

    name: str
    letter: str
    parent: int


def strays(belongs: Callable[[int], bool], *, root_pid: int | None) -> list[ProcessId]:
    """The processes for whose pid `belongs` is true, and that were started no earlier than the agents' first process
    `root_pid`; but for its descendants, this process and its parents, and what mechanisms of faults have started in a
    program's place. None where no agents run."""
    begun = None if root_pid is None else process_start_ticks(root_pid)
    if root_pid is None or begun is None:
        return []
    spared = ancestors()

    def matches(pid: int) -> bool:
        return pid not in spared and belongs(pid) and not _descends_from(pid, root_pid) and not _is_helper(pid)

    return [process for process in find_processes(matches) if process.start_ticks >= begun]


def member_of(process: ProcessId) -> ProcessMember | None:
    """A process as it is now; None when it has ended."""
    shown = _shown(process.pid)
    if shown is None or not process.exists:
        return None
    return ProcessMember(process.pid, process.start_ticks, shown.letter, shown.name)


def is_listening(address: str, ports: Collection[int]) -> Callable[[int], bool]:
    """Whether a process has a TCP socket that listens on one of these ports at an IPv4 address. As it is at the time of
    this call, in the network of this process."""
    shown = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    places = {shown, f"{'0' * 16}FFFF0000{shown}"}
    inodes = {inode for place, port, inode in _listeners() if place in places and port in ports}
    return lambda pid: bool(inodes) and not inodes.isdisjoint(sockets_of(pid))


def _listeners() -> Iterator[tuple[str, int, int]]:
    """(address as the kernel shows it, port, inode) of every TCP socket that listens."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN:
                    address, _, port = words[1].partition(":")
                    yield address, int(port, 16), int(words[9])


def _shown(pid: int) -> _Shown | None:
    try:
        before, _, after = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")
    except OSError:
        return None
    fields = after.split()
    return _Shown(os.fsdecode(before.partition(b"(")[2]), fields[0].decode(), int(fields[1]))


def _descends_from(pid: int, root_pid: int) -> bool:
    seen = set[int]()
    while pid > 1 and pid not in seen:
        if pid == root_pid:
            return True
        seen.add(pid)
        shown = _shown(pid)
        pid = 0 if shown is None else shown.parent
    return False


def _is_helper(pid: int) -> bool:
    shown = _shown(pid)
    return shown is None or shown.name.startswith(HELPERS)
