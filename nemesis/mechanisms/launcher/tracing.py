"""Stops a running program by ptrace and makes system calls in it; also finds the processes of a program.

A call changes nothing in the program's memory, only the registers of one of its threads, which are restored right after
it. If this process is killed by SIGKILL within those 100 us or so, the thread continues after our call instead of where
it was, which may end the program; at any other moment the program continues unaffected. No thread is ever left stopped,
since the kernel releases the threads of a tracer that has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time

from .marks import HELPERS, mark_of, marked

__all__ = ["ProcessTree", "Stopped", "TracingError", "read_memory", "write_memory"]

_MAX_STOPS = 100
"""Limit on signals that may reach a thread before our system call in it is done."""
_STOP_POLL_S = 0.0002

_PTRACE_CONT, _PTRACE_GETREGS, _PTRACE_SETREGS, _PTRACE_DETACH, _PTRACE_SYSCALL = 7, 12, 13, 17, 24
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_TRACE_CALLS, _CALL_STOP = 1, 0x80
"""PTRACE_O_TRACESYSGOOD, and the bit that marks its stops as different from a signal's. Single steps are not used: a
thread whose tracer is killed would stay in single-step mode and die at the next instruction."""
_WALL = 0x40000000
_R10, _R9, _R8, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _RIP = 7, 8, 9, 10, 12, 13, 14, 15, 16
_ARGUMENTS = (_RDI, _RSI, _RDX, _R10, _R8, _R9)
_REGISTERS = 27
_TGKILL = 234


class TracingError(RuntimeError):
    """A program cannot be stopped or made to do something; the message says why."""


def read_memory(pid: int, address: int, length: int) -> bytes:
    """Read a process's memory. Raises OSError."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length)


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Write to a process's memory, even where the process itself may not write. Raises OSError."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(data)


class Stopped:
    """A process whose threads are all stopped by ptrace while the context lasts; x86-64."""

    def __init__(self, pid: int, *, timeout_s: float | None = None) -> None:
        """`timeout_s`: how long a thread may take to stop (None: no limit); a thread that waits for a disk in the
        kernel stops only after that. Only a process that exits after a TracingError may set it, since a thread that
        has not stopped cannot be detached from."""
        self._pid = pid
        self._timeout_s = timeout_s
        self._threads: list[int] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._libc.ptrace.restype = ctypes.c_long

    def _trace(self, request: int, thread: int, data: int | None = None) -> None:
        if self._libc.ptrace(request, thread, None, data) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the program may not be traced: {os.strerror(code)}")

    def __enter__(self) -> Stopped:
        try:
            while new := [each for each in self._listed() if each not in self._threads]:
                for thread in new:
                    self._stop(thread)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _listed(self) -> list[int]:
        return [int(name) for name in os.listdir(f"/proc/{self._pid}/task")]

    def _stop(self, thread: int) -> None:
        try:
            self._trace(_PTRACE_SEIZE, thread, _TRACE_CALLS)
            self._threads.append(thread)
            self._trace(_PTRACE_INTERRUPT, thread)
            self._wait_for(thread)
        except ProcessLookupError:
            if thread == self._pid:
                raise
        except ChildProcessError:
            self._threads.remove(thread)

    def _wait_for(self, thread: int) -> None:
        deadline_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            waited, status = os.waitpid(thread, _WALL | (0 if deadline_s is None else os.WNOHANG))
            if waited and (status >> 16 or not os.WIFSTOPPED(status)):
                return
            if waited:
                # A signal was about to be delivered: deliver it, and the thread stops right after.
                self._trace(_PTRACE_CONT, thread, os.WSTOPSIG(status))
            elif deadline_s is not None and time.monotonic() > deadline_s:
                raise TracingError(f"thread {thread} of the program does not stop")
            elif deadline_s is not None:
                time.sleep(_STOP_POLL_S)

    def positions(self) -> list[int]:
        """The instruction pointer of each thread."""
        found = []
        for thread in self._threads:
            registers = (ctypes.c_uint64 * _REGISTERS)()
            with contextlib.suppress(ProcessLookupError):
                self._trace(_PTRACE_GETREGS, thread, ctypes.addressof(registers))
                found.append(registers[_RIP])
        return found

    def call(self, instruction: int, number: int, *arguments: int) -> int:
        """Make the program's first thread execute a system call with the instruction at an address, and restore the
        thread. Returns the call's result. Raises OSError, TracingError."""
        thread = self._threads[0]
        saved, changed = (ctypes.c_uint64 * _REGISTERS)(), (ctypes.c_uint64 * _REGISTERS)()
        self._trace(_PTRACE_GETREGS, thread, ctypes.addressof(saved))
        ctypes.memmove(changed, saved, ctypes.sizeof(saved))
        changed[_RAX], changed[_RIP] = number, instruction
        changed[_ORIG_RAX] = 2**64 - 1  # otherwise the kernel would restart the interrupted call
        for register, value in zip(_ARGUMENTS, arguments, strict=False):
            changed[register] = value
        self._trace(_PTRACE_SETREGS, thread, ctypes.addressof(changed))
        signals: list[int] = []
        try:
            for _ in ("at its entry", "at its exit"):
                self._until_call(thread, signals)
            self._trace(_PTRACE_GETREGS, thread, ctypes.addressof(changed))
        finally:
            # Then run to the kind of stop we started from: only from there does the kernel resume an interrupted call.
            self._trace(_PTRACE_SETREGS, thread, ctypes.addressof(saved))
            self._trace(_PTRACE_INTERRUPT, thread)
            self._trace(_PTRACE_CONT, thread)
            self._wait_for(thread)
            for number_of_signal in signals:
                self._libc.syscall(_TGKILL, self._pid, thread, number_of_signal)
        return ctypes.c_int64(changed[_RAX]).value

    def _until_call(self, thread: int, signals: list[int]) -> None:
        """Run a thread until it enters or leaves a system call; append signals that arrive meanwhile to `signals`."""
        for _ in range(_MAX_STOPS):
            self._trace(_PTRACE_SYSCALL, thread)
            _, status = os.waitpid(thread, _WALL)
            if not os.WIFSTOPPED(status):
                raise ProcessLookupError(errno.ESRCH, "the program has ended")
            if status >> 16:
                continue  # another stop, caused by ptrace itself
            if os.WSTOPSIG(status) == signal.SIGTRAP | _CALL_STOP:
                return
            signals.append(os.WSTOPSIG(status))
        raise TracingError("a thread of the program keeps receiving signals")

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            with contextlib.suppress(OSError):
                self._trace(_PTRACE_DETACH, thread)


class ProcessTree:
    """The processes of a program: its first one and all that it has started. Detached processes are included once they
    have been seen, or after `look_everywhere`."""

    def __init__(self, program: int) -> None:
        """`program` is the pid of its first process, which may not have executed it yet. Raises ProcessLookupError."""
        self.processes = {program: _start_of(program)}
        """process -> its start time"""
        self._program = program
        self._mark = mark_of(program)

    def runs(self) -> bool:
        """Whether any of the processes still runs."""
        self.look()
        return bool(self.processes)

    def look_everywhere(self) -> None:
        """Also find, by their mark, processes that were detached before they were seen; this inspects every process of
        the host."""
        for pid in marked(self._mark) if self._mark is not None else ():
            with contextlib.suppress(OSError):
                self.processes.setdefault(pid, _start_of(pid))
        self.look()

    def look(self) -> list[int]:
        """Find new processes, and drop and return those that have ended."""
        ended = []
        open_ends = list(self.processes)
        while open_ends:
            pid = open_ends.pop()
            try:
                if _start_of(pid) != self.processes[pid] or (pid != self._program and _is_helper(pid)):
                    raise ProcessLookupError
                threads = os.listdir(f"/proc/{pid}/task")
            except OSError:
                self.processes.pop(pid)
                ended.append(pid)
                continue
            for thread in threads:
                for child in _children_of(pid, thread):
                    with contextlib.suppress(OSError):
                        if child not in self.processes and not _is_helper(child):
                            self.processes[child] = _start_of(child)
                            open_ends.append(child)
        return ended


def _children_of(pid: int, thread: str) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
        return [int(word) for word in file.read().split()]
    return []


def _is_helper(pid: int) -> bool:
    """Whether a process is one of the launcher's own, which are briefly children of the program; a helper that watched
    one of these would wait for itself. Raises ProcessLookupError when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().startswith(HELPERS)
    except OSError:
        raise ProcessLookupError(errno.ESRCH, "gone") from None


def _start_of(pid: int) -> int:
    """The start time of a process, which distinguishes it from a later one with the same pid. Raises ProcessLookupError
    when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, "gone") from None
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(errno.ESRCH, "a zombie")
    return int(fields[19])
