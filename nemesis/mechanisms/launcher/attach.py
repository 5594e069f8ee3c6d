"""Reports the calls of a running program from its first disk fault on; until then the program runs as if started
without the launcher.

All processes of the program are stopped while each is made to install a filter for all of its threads (tracing.py), so
that none can start a process without a filter meanwhile; later children inherit the filter. A filter stays until its
process ends. Each process has its own listener, which is taken from it (pidfd_getfd, Linux 5.6).

A separate process does the tracing and ends afterwards: whatever happens to it, the kernel resumes the program.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .control import Control
from .descriptors import take_descriptor, watched_numbers
from .filter import ALL_THREADS, FilterError, Listeners, filter_code, filter_header, install
from .tracing import ProcessTree, Stopped, TracingError, read_memory, write_memory
from .vdso import ClockError, base_of, extent_of

__all__ = ["MAX_PROCESSES", "WATCH_S", "Attached", "listeners_in", "wait_for_faults"]

MAX_PROCESSES = 256
"""Limit on a program's processes when attaching: each takes one of the 1024 descriptors that a helper may have."""

WATCH_S = 0.05
"""How often the control file is read, and the program checked for new processes."""
_STOP_TIMEOUT_S = 0.5
"""For a thread to stop; one that waits for a disk in the kernel does not, and the others are stopped meanwhile."""
_RETRY_S = 5.0
"""How long an attempt that has changed nothing is repeated before it counts as failed: a thread that waits for its
disk, or another tracer, either is soon gone or stays."""

_PAGE_BYTES = 4096
_PAGES_BYTES = 2 * _PAGE_BYTES
"""One page for each of two filters."""
_HEADER_BYTES = 16
_MMAP, _MUNMAP, _CLOSE = 9, 11, 3
_READ_WRITE, _PRIVATE_ANONYMOUS, _NO_FILE = 3, 0x22, 2**64 - 1
_TRACER_NAME = "fault-attach"
_RESULT = "="
"""Prefix of a tracer's final message; its other messages name the process that it is working on."""
_ALL = "all"
_MESSAGE_BYTES = 4096
_LISTENER_LINK = "anon_inode:seccomp notify"
_SYSCALL = b"\x0f\x05"

Note = Callable[[int, int | None], None]
"""Called with a pid before a filter is installed in the process, and again with the listener's descriptor."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The result of attaching to a program: its processes' listeners; how many of its processes could not be reached,
    and an errno that says why; the descriptors below FIRST_PLACED that its filter reports, None for all of them."""

    listeners: Listeners
    failed: int
    error_number: int
    watched: frozenset[int] | None


def wait_for_faults(
    control: Control, tree: ProcessTree, groups: Sequence[str], guardian: socket.socket
) -> Attached | None:
    """Wait until a disk fault comes into force or an account is requested, then have the program's calls of these
    groups reported. `guardian` gets the listeners as well (supervisor.guard). None if the program ends before that."""
    ended, tried, failing_since_s = _Ended(next(iter(tree.processes))), -1, 0.0
    while True:
        tree.look()
        if not tree.processes:
            return None
        generation = control.generation
        if control.settings().wants_traps and generation != tried:
            attached = _attach_in_a_child(control, tree, groups, guardian)
            if any(True for _ in attached.listeners):
                return attached
            failing_since_s = failing_since_s or time.monotonic()
            if time.monotonic() - failing_since_s > _RETRY_S:
                control.trapped(generation, 0, max(1, attached.failed), attached.error_number)
                tried, failing_since_s = generation, 0.0
        ended.wait(WATCH_S)


class _Ended:
    """The end of a program's first process."""

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(pid)
            self._poll.register(self._descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process, or for `timeout_s` seconds."""
        if self._poll.poll(timeout_s * 1000):
            self._poll.unregister(self._descriptor)  # its children may run on


def _attach_in_a_child(control: Control, tree: ProcessTree, groups: Sequence[str], guardian: socket.socket) -> Attached:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            Path("/proc/self/comm").write_text(_TRACER_NAME)

            def note(pid: int, descriptor: int | None) -> None:
                # The guardian comes first, and is needed even if the supervisor is gone: it takes its place.
                for channel, is_needed in ((guardian, True), (theirs, False)):
                    with contextlib.nullcontext() if is_needed else contextlib.suppress(OSError):
                        socket.send_fds(channel, [str(pid).encode()], [] if descriptor is None else [descriptor])

            failed, error_number, reported = _attach(control, tree, groups, note)
            numbers = _ALL if reported is None else ",".join(map(str, reported))
            theirs.sendall(f"{_RESULT}{failed} {error_number} {numbers}".encode())
        finally:
            os._exit(0)
    theirs.close()
    listeners, unfinished, failed, error_number = Listeners(), set[int](), 1, errno.ECHILD
    watched: frozenset[int] | None = frozenset()  # not known if the tracer is killed midway
    while True:
        message, descriptors, _, _ = socket.recv_fds(ours, _MESSAGE_BYTES, 1)
        if descriptors:
            listeners.add(descriptors[0])
            unfinished.discard(int(message))
        elif message.startswith(_RESULT.encode()):
            first, second, numbers = message[len(_RESULT) :].decode().split()
            failed, error_number = int(first), int(second)
            watched = None if numbers == _ALL else frozenset(map(int, numbers.split(",")))
            unfinished.clear()
        elif message:
            unfinished.add(int(message))
        else:
            break
    ours.close()
    os.waitpid(child, 0)
    for pid in unfinished:  # the tracer was killed midway
        for descriptor in listeners_in(pid):
            with contextlib.suppress(OSError):
                socket.send_fds(guardian, [str(pid).encode()], [descriptor])
            listeners.add(descriptor)
    return Attached(listeners, failed, error_number, watched)


def _attach(
    control: Control, tree: ProcessTree, groups: Sequence[str], note: Note
) -> tuple[int, int, frozenset[int] | None]:
    """(processes that could not be reached, errno, the descriptors that are reported). If the first process could not
    be reached, nothing has been installed in any."""
    reached = 0
    watched: frozenset[int] | None = None
    try:
        if platform.machine() != "x86_64":
            raise FilterError("calls of a running program are reported on x86-64 only")
        with control.tracing(), contextlib.ExitStack() as standing:
            stopped = _stop_all(tree, standing)
            for pid in stopped:
                _require_attachable(pid)
            wanted = watched_numbers(stopped) if {*groups} - {"sync"} else None
            codes = [filter_code(groups, platform.machine())]
            if wanted is not None:
                codes.append(filter_code(groups, platform.machine(), wanted))
            for pid, process in stopped.items():
                if _install(pid, process, codes, note):
                    watched = wanted
                reached += 1
            return 0, 0, watched
    except FilterError as error:
        return len(tree.processes) - reached, error.error_number, watched
    except OSError as error:
        return len(tree.processes) - reached, error.errno or errno.EIO, watched
    except (TracingError, ClockError):
        return len(tree.processes) - reached, errno.EBUSY, watched


def _stop_all(tree: ProcessTree, standing: contextlib.ExitStack) -> dict[int, Stopped]:
    """Stop all processes of the program. Raises OSError, TracingError, FilterError when there are too many."""
    stopped: dict[int, Stopped] = {}
    tree.look_everywhere()
    while new := [pid for pid in tree.processes if pid not in stopped]:
        if len(tree.processes) > MAX_PROCESSES:
            raise FilterError("the program has too many processes", errno.E2BIG)
        for pid in new:
            try:
                stopped[pid] = standing.enter_context(Stopped(pid, timeout_s=_STOP_TIMEOUT_S))
            except (ProcessLookupError, FileNotFoundError):
                tree.processes.pop(pid)
        tree.look_everywhere()
    return {pid: process for pid, process in stopped.items() if pid in tree.processes}


def _require_attachable(pid: int) -> None:
    """Check that a process has no filters of its own, which might kill it for the calls it has to make, and that its
    descriptors can be taken from it. Raises FilterError, OSError."""
    if _filters(pid) != _filters(os.getpid()):
        raise FilterError("the program has a filter of its own", errno.EEXIST)
    for name in os.listdir(f"/proc/{pid}/fd")[:1]:
        os.close(take_descriptor(pid, int(name)))


def _filters(pid: int) -> list[bytes]:
    """What the kernel reports about the filters of a process: the mode and, since Linux 5.9, their number."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return [line for line in file if line.startswith(b"Seccomp")]


def _install(pid: int, process: Stopped, codes: Sequence[bytes], note: Note) -> bool:
    """Make one process install a filter: of two, the second one, which is selective, if the kernel supports it.
    Returns whether it is selective. Raises FilterError, OSError, TracingError, ClockError."""
    instruction = _instruction_in(pid)

    def call(number: int, *arguments: int) -> int:
        return process.call(instruction, number, *arguments)

    page = call(_MMAP, 0, _PAGES_BYTES, _READ_WRITE, _PRIVATE_ANONYMOUS, _NO_FILE, 0)
    if -_PAGE_BYTES < page < 0:
        raise OSError(-page, os.strerror(-page))
    try:
        addresses = [page + number * _PAGE_BYTES for number in range(len(codes))]
        for address, code in zip(addresses, codes, strict=True):
            header = filter_header(code, address + _HEADER_BYTES).ljust(_HEADER_BYTES, b"\0")
            write_memory(pid, address, header + code)
        selective = addresses[1] if len(addresses) > 1 else None
        note(pid, None)
        machine = platform.machine()
        descriptor, is_selective = install(call, machine, page, more_flags=ALL_THREADS, selective_address=selective)
        note(pid, take_descriptor(pid, descriptor))
        call(_CLOSE, descriptor)
        return is_selective
    finally:
        call(_MUNMAP, page, _PAGES_BYTES)


def _instruction_in(pid: int) -> int:
    """The address of a system call instruction in a process: its vDSO has several. Raises ClockError, OSError."""
    base = base_of(pid)
    image = read_memory(pid, base, extent_of(pid, base))
    at = image.find(_SYSCALL)
    if image[:5] != b"\x7fELF\x02" or at < 0:
        raise ClockError("the program's vDSO is not as expected")
    return base + at


def listeners_in(pid: int) -> list[int]:
    """Listeners that a process itself still holds because its tracer was killed midway, duplicated into this one."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}") == _LISTENER_LINK:
                found.append(take_descriptor(pid, int(name)))
    return found
