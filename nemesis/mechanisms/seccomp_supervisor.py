"""Run a program whose file system calls can be held, delayed and refused: the host's part, a script of its own.

    python3 -I -S seccomp_supervisor.py --control FILE --root DIRECTORY [--trap GROUP]... -- PROGRAM [ARGUMENT]...

The program replaces this process, so its process number is the one that was started. Before that the script installs a
seccomp filter that reports chosen system calls to a supervisor (Linux 5.0, `man 2 seccomp_unotify`), a process that the
script has forked. The supervisor lets each call go on, holds it, delays it or fails it, as the control file says. This
reaches what a preloaded library cannot: static programs, Go, everything that makes system calls by itself. It takes no
privileges; where they are lacking, NO_NEW_PRIVS is set, so programs cannot gain any by set-user-ID.

Children and threads inherit the filter, and the supervisor ends with the last of them. A second process, the guardian, holds
the filter's descriptor as well: when the supervisor is killed, the guardian lets everything go on, so that no call
hangs and none fails.

The control file has the layout of shim/control.h. The supervisor never looks at what a call would write, only
at which file it concerns; a program that changes its arguments meanwhile fools nobody but itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["GROUPS", "ProcessCount", "parse_process_counts"]

SYSCALLS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "writev": 20, "msync": 26, "fsync": 74, "fdatasync": 75, "truncate": 76,
        "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
        "open": 2, "read": 0, "pread64": 17, "readv": 19, "preadv": 295, "preadv2": 327,
        "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
        "sync_file_range": 277, "fallocate": 285, "pwritev": 296, "syncfs": 306, "renameat2": 316,
        "copy_file_range": 326, "pwritev2": 328, "openat2": 437,
    },
    "aarch64": {
        "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "truncate": 45, "ftruncate": 46,
        "fallocate": 47, "openat": 56, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67,
        "pwrite64": 68, "preadv": 69, "pwritev": 70, "fsync": 82, "fdatasync": 83, "sync_file_range": 84, "msync": 227,
        "syncfs": 267, "renameat2": 276, "copy_file_range": 285, "preadv2": 286, "pwritev2": 287, "openat2": 437,
    },
}  # fmt: skip
"""The kernel's numbers (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64."""

GROUPS = {
    "sync": ("fsync", "fdatasync", "sync_file_range", "msync", "syncfs"),
    "write": (
        *("write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "truncate", "ftruncate"),
        *("fallocate", "open", "openat", "openat2", "creat", "rename", "renameat", "renameat2", "unlink", "unlinkat"),
        *("mkdir", "mkdirat", "rmdir", "link", "linkat", "symlink", "symlinkat"),
    ),
    "read": ("read", "pread64", "readv", "preadv", "preadv2"),
}
"""Which calls are reported. A reported call costs two switches of process, so a run takes only the groups that its faults
are about."""

MAGIC = 0x3154554146425053
CONTROL_BYTES = 4096
COUNTERS_OFFSET = 2048
HEAD = struct.Struct("=10Qq")
COUNTERS = struct.Struct("=5Q")
PROCESSES_OFFSET = 2304
PROCESS = struct.Struct("=3Q")
PROCESS_SLOTS = 32
"""Programs of one host that are counted at a time; one that starts takes the place of one that has ended."""

_POLL_S = 0.002
"""How often the control file is looked at while a call is held; nothing is polled while none is."""

_HELD_SLOTS = 4096
"""Calls that can be held at a time: one a thread. One more is let go on and is not counted as held."""

_UNKNOWN_IDS = 64
"""Calls that the guardian lets go on beyond the last one that the supervisor had noted."""

_PATH_BYTES = 4096
_AT_FDCWD = -100
_MS_SYNC = 4

_NOTIF = struct.Struct("=QIIiIQ6Q")
_RESP = struct.Struct("=QqiI")
_RECV, _SEND, _ID_VALID = 0xC0502100, 0xC0182101, 0x40082102
_CONTINUE = 1

_PR_SET_NO_NEW_PRIVS, _PR_SET_PTRACER, _PR_SET_NAME = 38, 0x59616D61, 15
_SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_SECCOMP_NR = {"x86_64": 317, "aarch64": 277}
_RET_ALLOW, _RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """Calls on files under the root by one program and its children since it was started: how many were reported, and
    how many of them were held, delayed or refused. `pid` is the program's first process."""

    pid: int
    calls: int
    met: int


def parse_process_counts(control: bytes) -> list[ProcessCount]:
    """The counts by program in the bytes of a control file."""
    rows = (PROCESS.unpack_from(control, PROCESSES_OFFSET + slot * PROCESS.size) for slot in range(PROCESS_SLOTS))
    return [ProcessCount(*row) for row in rows if row[0]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The disk faults in force: the head of the control file."""

    has_disk: bool = False
    stall_sync: bool = False
    stall_all: bool = False
    full: bool = False
    error_write: bool = False
    error_sync: bool = False
    error_read: bool = False
    delay_ns: int = 0


class Control:
    """The control file, mapped."""

    def __init__(self, path: str) -> None:
        """Raises OSError, and ValueError for a file that is none."""
        with open(path, "r+b") as file:
            self._fd = os.dup(file.fileno())
            self._map = mmap.mmap(file.fileno(), CONTROL_BYTES)
        if HEAD.unpack_from(self._map, 0)[0] != MAGIC:
            raise ValueError(f"{path} is not a control file")
        self._slot = 0
        self._generation = b""
        self._settings = Settings()

    def settings(self) -> Settings:
        """What is in force now."""
        if self._map[8:16] == self._generation:
            return self._settings
        while True:
            raw = self._map[:COUNTERS_OFFSET]
            _, begin, _, has_disk, *flags, delay_ns = HEAD.unpack_from(raw, 0)
            end = struct.unpack_from("=Q", raw, HEAD.size + 16 * 48)[0]
            if begin == end:
                self._generation = raw[8:16]
                self._settings = Settings(bool(has_disk), *map(bool, flags), delay_ns=delay_ns)
                return self._settings

    def claim(self, pid: int) -> None:
        """Take a row of the table of programs for `pid`. Raises RuntimeError when all are of living programs."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            for slot in range(PROCESS_SLOTS):
                offset = PROCESSES_OFFSET + slot * PROCESS.size
                owner = PROCESS.unpack_from(self._map, offset)[0]
                if owner in (0, pid) or not os.path.exists(f"/proc/{owner}"):
                    PROCESS.pack_into(self._map, offset, pid, 0, 0)
                    self._slot = offset
                    return
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        raise RuntimeError(f"more than {PROCESS_SLOTS} programs run on one host")

    def count(self, column: int | None) -> None:
        """Count a call, and the fault that it met: a column of `COUNTERS`, None for none."""
        pid, calls, met = PROCESS.unpack_from(self._map, self._slot)
        PROCESS.pack_into(self._map, self._slot, pid, calls + 1, met)
        if column is not None:
            self.count_met(column)

    def count_met(self, column: int) -> None:
        """Count that a call, which is counted already, met a fault."""
        pid, calls, met = PROCESS.unpack_from(self._map, self._slot)
        PROCESS.pack_into(self._map, self._slot, pid, calls, met + 1)
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            offset = COUNTERS_OFFSET + 8 * column
            value = struct.unpack_from("=Q", self._map, offset)[0]
            struct.pack_into("=Q", self._map, offset, value + 1)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


HELD, DELAYED, REFUSED, FAILED = range(4)
"""Columns of `COUNTERS`."""

WRITE, GROW, SYNC, READ = "write", "grow", "sync", "read"
"""What a call does to the disk."""


@dataclass(slots=True)
class Call:
    """A reported call. `thread` is the number of the thread that made it."""

    id: int
    thread: int
    name: str
    arguments: tuple[int, ...]
    operation: str = ""
    is_met: bool = False
    due_ns: int = 0
    """When its delay is over, by the monotonic clock; 0 for none."""


class Files:
    """Which file a call is about: answers from /proc of the thread that waits in it."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def operation(self, call: Call, *, sees_growth: bool) -> str | None:
        """What the call does to a file under the root: WRITE, GROW, SYNC or READ; None when it is about another file, or changes
        nothing. `sees_growth`: tell WRITE from GROW, which takes two more looks."""
        name, arguments = call.name, call.arguments
        if name == "msync":
            synced = arguments[2] & _MS_SYNC and self._is_mapped_under_root(call.thread, arguments[0])
            return SYNC if synced else None
        if name in GROUPS["sync"]:
            return SYNC if self._descriptor(call.thread, arguments[0]) else None
        if name in GROUPS["read"]:
            return READ if self._descriptor(call.thread, arguments[0]) else None
        if name in _BY_DESCRIPTOR:
            descriptor = arguments[2] if name == "copy_file_range" else arguments[0]
            if not self._descriptor(call.thread, descriptor):
                return None
            return GROW if sees_growth and self._grows(call, descriptor) else WRITE
        return self._by_path(call)

    def _is_under_root(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    def _descriptor(self, thread: int, descriptor: int) -> bool:
        try:
            return self._is_under_root(os.readlink(f"/proc/{thread}/fd/{_signed(descriptor)}"))
        except OSError:
            return False

    def _is_mapped_under_root(self, thread: int, address: int) -> bool:
        with contextlib.suppress(OSError), open(f"/proc/{thread}/maps", "rb") as maps:
            for line in maps:
                words = line.split(maxsplit=5)
                begin, end = (int(part, 16) for part in words[0].split(b"-"))
                if begin <= address < end:
                    return len(words) == 6 and self._is_under_root(os.fsdecode(words[5].rstrip(b"\n")))
        return False

    def _grows(self, call: Call, descriptor: int) -> bool:
        try:
            status = os.stat(f"/proc/{call.thread}/fd/{_signed(descriptor)}")
            position, flags = self._position(call.thread, descriptor)
        except (OSError, ValueError):
            return False
        name, arguments = call.name, call.arguments
        if name == "ftruncate":
            return arguments[1] > status.st_size
        if name == "fallocate":
            return True
        begin = status.st_size if flags & os.O_APPEND else position
        if name in ("pwrite64", "pwritev", "pwritev2") and not flags & os.O_APPEND:
            begin = arguments[3]
        length = arguments[4] if name == "copy_file_range" else arguments[2]
        if name in ("writev", "pwritev", "pwritev2"):
            length = self._vector_bytes(call.thread, arguments[1], arguments[2])
        return begin + length > status.st_size

    def _position(self, thread: int, descriptor: int) -> tuple[int, int]:
        with open(f"/proc/{thread}/fdinfo/{_signed(descriptor)}", "rb") as info:
            fields = dict(line.split(b":", 1) for line in info.read().splitlines() if b":" in line)
        return int(fields[b"pos"]), int(fields[b"flags"], 8)

    def _memory(self, thread: int, address: int, length: int) -> bytes:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)

    def _vector_bytes(self, thread: int, address: int, count: int) -> int:
        raw = self._memory(thread, address, 16 * min(count, 1024))
        return sum(length for _, length in struct.iter_unpack("=2Q", raw))

    def _text(self, thread: int, address: int) -> str:
        text = b""
        while len(text) < _PATH_BYTES and b"\0" not in text:
            at = address + len(text)
            piece = self._memory(thread, at, min(256, 4096 - at % 4096))
            if not piece:
                break
            text += piece
        return os.fsdecode(text.partition(b"\0")[0])

    def _path(self, thread: int, directory: int, address: int) -> str:
        """The path that a call names, its directory resolved as the thread sees it."""
        path = self._text(thread, address)
        if not path.startswith("/"):
            where = "cwd" if _signed(directory) == _AT_FDCWD else f"fd/{_signed(directory)}"
            path = os.path.join(os.readlink(f"/proc/{thread}/{where}"), path)
        parent, name = os.path.split(path)
        return os.path.join(os.path.realpath(parent), name)

    def _by_path(self, call: Call) -> str | None:
        name, arguments = call.name, call.arguments
        directory, at = (arguments[0], 1) if name.endswith("at") or name == "openat2" else (_AT_FDCWD, 0)
        if name in ("renameat2", "linkat", "renameat"):
            directory, at = arguments[0], 1
        if name == "symlink":
            at = 1
        elif name == "symlinkat":
            directory, at = arguments[1], 2
        try:
            path = self._path(call.thread, directory, arguments[at])
            if not self._is_under_root(path):
                return None
            if name in ("open", "openat", "openat2", "creat"):
                return self._opening(call, path)
            if name == "truncate":
                return GROW if arguments[1] > os.stat(path).st_size else WRITE
        except (OSError, ValueError):
            return None
        return GROW if name in ("mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat") else WRITE

    def _opening(self, call: Call, path: str) -> str | None:
        arguments = call.arguments
        if call.name == "creat":
            flags = os.O_CREAT | os.O_TRUNC
        elif call.name == "openat2":
            flags = struct.unpack("=Q", self._memory(call.thread, arguments[2], 8))[0]
        else:
            flags = arguments[2] if call.name == "openat" else arguments[1]
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return GROW if flags & os.O_CREAT else None
        return WRITE if flags & os.O_TRUNC and stat.S_ISREG(status.st_mode) else None


_BY_DESCRIPTOR = frozenset(
    ("write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "ftruncate", "fallocate")
)


def _signed(number: int) -> int:
    """A descriptor as the kernel sees it: the low 32 bits of the argument, with a sign."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number & 1 << 31 else number


class Ledger:
    """Which calls wait for an answer, in memory that the guardian shares."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * (_HELD_SLOTS + 1))
        self._free = list(range(_HELD_SLOTS, 0, -1))
        self._slots: dict[int, int] = {}

    def received(self, identity: int) -> None:
        """Note the newest call."""
        struct.pack_into("=Q", self._map, 0, identity)

    def hold(self, identity: int) -> bool:
        """Note a call that will be answered later; False when no more can be."""
        if not self._free:
            return False
        slot = self._slots[identity] = self._free.pop()
        struct.pack_into("=Q", self._map, 8 * slot, identity)
        return True

    def answered(self, identity: int) -> None:
        """Forget a call."""
        slot = self._slots.pop(identity, None)
        if slot is not None:
            struct.pack_into("=Q", self._map, 8 * slot, 0)
            self._free.append(slot)

    def unanswered(self) -> list[int]:
        """Every call that may be waiting, those that were never noted included."""
        last, *held = (value for (value,) in struct.iter_unpack("=Q", self._map[:]))
        return [*filter(None, held), *range(last, last + _UNKNOWN_IDS)]


class Listener:
    """The descriptor at which the kernel reports calls."""

    def __init__(self, descriptor: int, architecture: str) -> None:
        self.descriptor = descriptor
        self._names = {number: name for name, number in SYSCALLS[architecture].items()}
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float | None) -> bool | None:
        """Wait for a call: True when there is one, False when time is up, None when nobody can make one any more."""
        events = self._poll.poll(None if timeout_s is None else max(0, timeout_s * 1000))
        if not events:
            return False
        return True if events[0][1] & select.POLLIN else None

    def receive(self) -> Call | None:
        """The next call; None when it has been given up meanwhile."""
        buffer = bytearray(_NOTIF.size)
        try:
            fcntl.ioctl(self.descriptor, _RECV, buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise
        identity, thread, _, number, _, _, *arguments = _NOTIF.unpack(buffer)
        return Call(identity, thread, self._names.get(number, ""), tuple(arguments))

    def answer(self, identity: int, error_number: int = 0) -> None:
        """Let a call go on, or fail it with an errno. Nothing where it has been given up."""
        response = _RESP.pack(identity, 0, -error_number, 0 if error_number else _CONTINUE)
        try:
            fcntl.ioctl(self.descriptor, _SEND, response)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
                raise


@dataclass(slots=True)
class Supervisor:
    """Answers the reported calls of one program as its control file says, until the program has ended."""

    listener: Listener
    control: Control
    files: Files
    ledger: Ledger
    waiting: dict[int, Call] = field(default_factory=dict)
    """thread -> its call that waits for an answer"""

    def serve(self) -> None:
        """Until nobody can make a reported call any more."""
        while True:
            has_call = self.listener.wait(self._timeout_s())
            if has_call is None:
                return
            if has_call:
                call = self.listener.receive()
                if call is not None:
                    self._receive(call)
            self._look_again()

    def _timeout_s(self) -> float | None:
        if not self.waiting:
            return None
        now_ns = time.monotonic_ns()
        return min(max(0, call.due_ns - now_ns) / 1e9 if call.due_ns else _POLL_S for call in self.waiting.values())

    def _receive(self, call: Call) -> None:
        self.ledger.received(call.id)
        earlier = self.waiting.pop(call.thread, None)
        if earlier is not None:
            # A signal took the thread out of its call, and the kernel makes the call again.
            self.ledger.answered(earlier.id)
            earlier.id = call.id
            self._decide(earlier)
            return
        settings = self.control.settings()
        operation = self.files.operation(call, sees_growth=settings.full)
        if operation is None:
            self.listener.answer(call.id)
            return
        call.operation = operation
        self.control.count(None)
        self._decide(call)

    def _decide(self, call: Call) -> None:
        """Answer a call, or have it wait."""
        settings, operation = self.control.settings(), call.operation
        if _is_stalled(call, settings):
            self._wait(call, HELD)
        elif _is_delayed(call, settings):
            if not call.due_ns:
                call.due_ns = time.monotonic_ns() + settings.delay_ns
            self._wait(call, DELAYED)
        elif settings.full and operation == GROW:
            self._met(call, REFUSED)
            self._answer(call, errno.ENOSPC)
        elif (
            (settings.error_write and operation in (WRITE, GROW))
            or (settings.error_sync and operation == SYNC)
            or (settings.error_read and operation == READ)
        ):
            self._met(call, FAILED)
            self._answer(call, errno.EIO)
        else:
            self._answer(call)

    def _met(self, call: Call, column: int) -> None:
        if not call.is_met:
            call.is_met = True
            self.control.count_met(column)

    def _wait(self, call: Call, column: int) -> None:
        if self.ledger.hold(call.id):
            self._met(call, column)
            self.waiting[call.thread] = call
        else:
            self.listener.answer(call.id)

    def _answer(self, call: Call, error_number: int = 0) -> None:
        self.listener.answer(call.id, error_number)
        self.ledger.answered(call.id)

    def _look_again(self) -> None:
        """Decide anew about calls that have waited long enough, or whose fault is over."""
        if not self.waiting:
            return
        settings = self.control.settings()
        for call in [*self.waiting.values()]:
            if not _is_stalled(call, settings) and not _is_delayed(call, settings):
                del self.waiting[call.thread]
                self.ledger.answered(call.id)
                self._decide(call)


def _is_stalled(call: Call, settings: Settings) -> bool:
    return (settings.stall_all and call.operation != READ) or (settings.stall_sync and call.operation == SYNC)


def _is_delayed(call: Call, settings: Settings) -> bool:
    if settings.delay_ns <= 0 or call.operation == READ:
        return False
    return not call.due_ns or time.monotonic_ns() < call.due_ns


def guard(listener: Listener, ledger: Ledger, supervisor_alive: int) -> None:
    """Wait until the supervisor has ended, then let every call go on until nobody can make one any more."""
    while True:
        try:
            if not os.read(supervisor_alive, 1):
                break
        except InterruptedError:
            continue
    for identity in ledger.unanswered():
        listener.answer(identity)
    while (has_call := listener.wait(None)) is not None:
        call = listener.receive() if has_call else None
        if call is not None:
            listener.answer(call.id)


class FilterError(RuntimeError):
    """Calls cannot be reported here; the message says why."""


def install_filter(groups: Sequence[str]) -> int:
    """Have this process's calls of these groups reported, and those of everything that it starts. Returns the
    listener's descriptor, which closes on exec. Raises FilterError."""
    architecture = platform.machine()
    if architecture not in SYSCALLS:
        raise FilterError(f"system calls are reported on {', '.join(SYSCALLS)} only, not on {architecture}")
    table = SYSCALLS[architecture]
    numbers = sorted({table[name] for group in groups for name in GROUPS[group] if name in table})
    code = [struct.pack("=HBBI", 0x20, 0, 0, 4), struct.pack("=HBBI", 0x15, 1, 0, _ARCHITECTURES[architecture])]
    code += [struct.pack("=HBBI", 0x06, 0, 0, _RET_ALLOW), struct.pack("=HBBI", 0x20, 0, 0, 0)]
    for position, number in enumerate(numbers):
        code.append(struct.pack("=HBBI", 0x15, len(numbers) - position, 0, number))
    code += [struct.pack("=HBBI", 0x06, 0, 0, _RET_ALLOW), struct.pack("=HBBI", 0x06, 0, 0, _RET_USER_NOTIF)]
    program = ctypes.create_string_buffer(b"".join(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    tried = 0
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        for is_privileged in (True, False):
            if not is_privileged and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
                raise FilterError(f"NO_NEW_PRIVS cannot be set: {os.strerror(ctypes.get_errno())}")
            descriptor = libc.syscall(_SECCOMP_NR[architecture], _SECCOMP_SET_MODE_FILTER, flags, header)
            if descriptor >= 0:
                return int(descriptor)
            tried = ctypes.get_errno()
            if tried != errno.EACCES:
                break
    if tried == errno.EBUSY:
        raise FilterError("the calls of this program are reported to another supervisor already")
    raise FilterError(f"the kernel reports no system calls (seccomp user notification): {os.strerror(tried)}")


def _supervise(channel: socket.socket, control: Control, files: Files, architecture: str) -> None:
    """The supervisor's and the guardian's life; never returns."""
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        os._exit(1)
    listener, ledger = Listener(descriptors[0], architecture), Ledger()
    alive, held_by_supervisor = os.pipe()
    if os.fork() == 0:
        os.close(held_by_supervisor)
        channel.close()
        _name("sb-guardian")
        guard(listener, ledger, alive)
        os._exit(0)
    os.close(alive)
    _name("sb-seccomp")
    channel.sendall(b"+")
    channel.close()
    Supervisor(listener, control, files, ledger).serve()
    os._exit(0)


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def start_supervisor(control: Control, files: Files) -> tuple[int, socket.socket]:
    """Fork the supervisor, as nobody's child, so that the program meets no child that it did not start. Returns its
    process number and the channel to it."""
    ours, theirs = socket.socketpair()
    first = os.fork()
    if first == 0:
        try:
            ours.close()
            second = os.fork()
            if second:
                theirs.sendall(struct.pack("=Q", second))
                os._exit(0)
            _supervise(theirs, control, files, platform.machine())
        finally:
            os._exit(1)
    os.waitpid(first, 0)
    theirs.close()
    return struct.unpack("=Q", ours.recv(8))[0], ours


def main(arguments: Sequence[str]) -> None:
    """Become the program. Exits with 2 and one line for wrong arguments, 126 where calls cannot be reported, 127 where the program
    cannot be run."""
    parser = argparse.ArgumentParser(prog="seccomp_supervisor", allow_abbrev=False)
    parser.add_argument("--control", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--trap", action="append", choices=list(GROUPS), default=[])
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(arguments)
    try:
        control = Control(options.control)
        control.claim(os.getpid())
        supervisor, channel = start_supervisor(control, Files(options.root))
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, supervisor, 0, 0, 0)
        listener = install_filter(options.trap or ["sync"])
        socket.send_fds(channel, [b"+"], [listener])
        if channel.recv(1) != b"+":
            raise FilterError("the supervisor did not start")
        channel.close()
        os.close(listener)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"seccomp: {error}", file=sys.stderr)
        sys.exit(126)
    try:
        os.execvp(options.program[0], options.program)
    except OSError as error:
        print(f"seccomp: {options.program[0]}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
