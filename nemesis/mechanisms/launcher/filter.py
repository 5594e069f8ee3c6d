"""Reporting of system calls by the kernel: seccomp user notification (Linux 5.0, `man 2 seccomp_unotify`).

A filter sees the number of a call and of its descriptor, but not what the descriptor refers to. A filter installed in a
running program can be *selective* (descriptors.py): it reports calls by descriptor only if the descriptor's number is
on a list, or is FIRST_PLACED or more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "ALL_THREADS",
    "DUPLICATING",
    "FIRST_PLACED",
    "F_DUPFD",
    "F_DUPFD_CLOEXEC",
    "GROUPS",
    "OPENING",
    "SYSCALLS",
    "Call",
    "FilterError",
    "Listener",
    "Listeners",
    "filter_code",
    "filter_header",
    "install",
    "install_filter",
]

SYSCALLS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "writev": 20, "msync": 26, "fsync": 74, "fdatasync": 75, "truncate": 76,
        "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
        "open": 2, "read": 0, "pread64": 17, "readv": 19, "preadv": 295, "preadv2": 327,
        "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
        "sync_file_range": 277, "fallocate": 285, "pwritev": 296, "syncfs": 306, "renameat2": 316,
        "copy_file_range": 326, "pwritev2": 328, "openat2": 437, "dup": 32, "dup2": 33, "fcntl": 72, "dup3": 292,
        "sync": 162, "sendfile": 40, "splice": 275,
    },
    "aarch64": {
        "dup": 23, "dup3": 24, "fcntl": 25, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37,
        "renameat": 38, "truncate": 45, "ftruncate": 46,
        "fallocate": 47, "openat": 56, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67,
        "pwrite64": 68, "preadv": 69, "pwritev": 70, "fsync": 82, "fdatasync": 83, "sync_file_range": 84, "msync": 227,
        "syncfs": 267, "renameat2": 276, "copy_file_range": 285, "preadv2": 286, "pwritev2": 287, "openat2": 437,
        "sync": 81, "sendfile": 71, "splice": 76,
    },
}  # fmt: skip
"""System call numbers (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64."""

GROUPS = {
    "sync": ("fsync", "fdatasync", "sync_file_range", "msync", "syncfs", "sync"),
    "write": (
        *("write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "truncate", "ftruncate"),
        *("fallocate", "open", "openat", "openat2", "creat", "rename", "renameat", "renameat2", "unlink", "unlinkat"),
        *("mkdir", "mkdirat", "rmdir", "link", "linkat", "symlink", "symlinkat", "sendfile", "splice"),
    ),
    "read": ("read", "pread64", "readv", "preadv", "preadv2", "copy_file_range", "sendfile", "splice"),
}
"""Group -> calls that are reported. A reported call costs two context switches, so a run uses only the groups that its
faults need."""

OPENING = ("open", "openat", "openat2", "creat")
"""Calls that open a file."""
DUPLICATING = ("dup", "dup2", "dup3", "fcntl")
"""Calls that duplicate a descriptor; fcntl only with F_DUPFD or F_DUPFD_CLOEXEC."""
F_DUPFD, F_DUPFD_CLOEXEC = 0, 1030
_BY_DESCRIPTOR = (
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "read", "pread64", "readv", "preadv", "preadv2"),
    *("dup", "dup2", "dup3", "sendfile"),
)
"""Calls that a selective filter selects by their first argument, the descriptor. Other calls are rare and always
reported; so is sendfile if reads are reported, since it reads from its second argument."""
FIRST_PLACED = 512
"""Descriptors from this number on are always reported: few programs have that many, and it is far below the default
limit of 1024 per process."""

_NOTIF = struct.Struct("=QIIiIQ6Q")
_RESP = struct.Struct("=QqiI")
_ADDFD = struct.Struct("=Q4I")
_RECV, _SEND, _ADD, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40182103, 0x40082104
_SYNC_WAKE_UP = 1
_AT_NUMBER, _AND_ANSWER = 1, 2
_NOTHING = bytes(_NOTIF.size)
"""The kernel requires the buffer for a report to be zero."""
_ID = struct.Struct("=Q")
_ITIMERSPEC = struct.Struct("@4l")
"""Period, and time until it first expires; seconds and nanoseconds of each."""
_CALL_NUMBER, _CALL_NUMBER_AT = struct.Struct("=i"), 16
_CONTINUE = 1

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3 | 1 << 2, 1 << 5
"""The first includes SPEC_ALLOW: kernels before 5.16 treat a filter as a sandbox and disable some speculative execution
in its processes, which would cost a program far more than its reported calls do."""
ALL_THREADS = 1 << 0 | 1 << 4
"""More flags for `install`: all threads of the process get the filter, or none (TSYNC and TSYNC_ESRCH, Linux 5.7)."""
_SECCOMP_NR = {"x86_64": 317, "aarch64": 277}
_PRCTL_NR = {"x86_64": 157, "aarch64": 167}
_INSTRUCTION = struct.Struct("=HBBI")
_RET_ALLOW, _RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000


@dataclass(frozen=True, slots=True)
class Call:
    """A reported call. `thread` is the id of the thread that made it."""

    id: int
    thread: int
    name: str
    arguments: tuple[int, ...]


class Listener:
    """A descriptor at which the kernel reports calls."""

    def __init__(self, descriptor: int, architecture: str) -> None:
        self.descriptor = descriptor
        self._names = {number: name for name, number in SYSCALLS[architecture].items()}
        # The kernel then switches directly to the answering process and back, if supported (Linux 6.6).
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, _SET_FLAGS, _SYNC_WAKE_UP)

    def receive(self) -> bytearray | None:
        """The report of the next call; None when the call was abandoned meanwhile."""
        report = bytearray(_NOTHING)  # with bytes, ioctl internally raises and drops an exception first
        try:
            fcntl.ioctl(self.descriptor, _RECV, report)
            return report
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise

    def identity(self, report: bytearray) -> int:
        """The id by which the call of a report is answered."""
        identity: int = _ID.unpack_from(report)[0]
        return identity

    def number(self, report: bytearray) -> int:
        """The system call number in a report."""
        number: int = _CALL_NUMBER.unpack_from(report, _CALL_NUMBER_AT)[0]
        return number

    def call(self, report: bytearray) -> Call:
        """The call in a report."""
        identity, thread, _, number, _, _, *arguments = _NOTIF.unpack(report)
        return Call(identity, thread, self._names.get(number, ""), tuple(arguments))

    def let_go_on(self, identity: int) -> None:
        """Have the kernel execute a call. Does nothing if the call was abandoned."""
        self._send(_RESP.pack(identity, 0, 0, _CONTINUE))

    def finish(self, identity: int, error_number: int = 0) -> None:
        """Have a call return 0 without being executed, or fail with an errno. Does nothing if it was abandoned."""
        self._send(_RESP.pack(identity, 0, -error_number, 0))

    def place(self, identity: int, descriptor: int, *, number: int | None, closes_on_exec: bool) -> None:
        """Have a call return a duplicate of our descriptor, with `number` (Linux 5.14) or, if None, the lowest free
        number. Does nothing if the call was abandoned. Raises OSError."""
        flags = _AND_ANSWER | (0 if number is None else _AT_NUMBER)
        new_flags = os.O_CLOEXEC if closes_on_exec else 0
        try:
            fcntl.ioctl(self.descriptor, _ADD, _ADDFD.pack(identity, flags, descriptor, number or 0, new_flags))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
                raise

    def _send(self, response: bytes) -> None:
        try:
            fcntl.ioctl(self.descriptor, _SEND, bytearray(response))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
                raise


class Listeners:
    """The listeners of one program: a single one if the program was started under a filter, otherwise one for each
    process that was running when the filter was installed."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._all: dict[int, Listener] = {}
        self._woken = self._wake = self._timer = -1
        self.changes = 0
        """How often the set of polled descriptors has changed."""

    def __iter__(self) -> Iterator[Listener]:
        return iter([*self._all.values()])

    def add(self, descriptor: int) -> None:
        """Add a listener."""
        self._all[descriptor] = Listener(descriptor, platform.machine())
        self._poll.register(descriptor, select.POLLIN)
        self.changes += 1

    def wait(self, timeout_s: float | None) -> list[Listener] | None:
        """Wait for calls. Returns the listeners that have one: an empty list when time is up, None when no process can
        make a reported call any more."""
        found = []
        if not self._all:
            return None
        for descriptor, events in self._poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)):
            if descriptor in (self._woken, self._timer):
                os.read(descriptor, 4096)
            elif events & select.POLLIN:
                found.append(self._all[descriptor])
            else:
                self._poll.unregister(descriptor)
                del self._all[descriptor]
                os.close(descriptor)
                self.changes += 1
        return found if self._all else None

    @property
    def woken(self) -> Sequence[int]:
        """The other polled descriptors: those of `add_wake` and `wake_every`, if these were called."""
        return [descriptor for descriptor in (self._woken, self._timer) if descriptor >= 0]

    def wake_every(self, period_s: float) -> None:
        """End `wait` every `period_s` seconds, by a periodic timer. A timeout of each wait would program and cancel the
        processor's timer with each call, which on a virtual machine costs more than the answer. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if timer < 0:
            raise OSError(ctypes.get_errno(), "no timer is available")
        period = divmod(round(period_s * 1e9), 10**9)
        if libc.timerfd_settime(timer, 0, _ITIMERSPEC.pack(*period, *period), None):
            os.close(timer)
            raise OSError(ctypes.get_errno(), "the timer cannot be set")
        self._poll.register(timer, select.POLLIN)
        self._timer = timer
        self.changes += 1

    def add_wake(self) -> Callable[[], None]:
        """A function that ends `wait` from another thread."""
        if self._woken < 0:
            self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._poll.register(self._woken, select.POLLIN)
            self.changes += 1

        def wake_up() -> None:
            # If the pipe is full, `wait` has been woken already.
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"!")

        return wake_up


class FilterError(RuntimeError):
    """Calls cannot be reported here; the message says why, and `error_number` is the kernel's errno."""

    def __init__(self, message: str, error_number: int = errno.ENOSYS) -> None:
        super().__init__(message)
        self.error_number = error_number


def filter_code(groups: Sequence[str], architecture: str, watched: Collection[int] | None = None) -> bytes:
    """The instructions of a filter that reports the calls of these groups. With `watched`, the filter is selective: it
    reports calls by descriptor only for the numbers `watched` (below FIRST_PLACED) and from FIRST_PLACED on, and also
    calls that open or duplicate. Raises FilterError for an architecture whose system call numbers are not known."""
    if architecture not in SYSCALLS:
        raise FilterError(f"system calls are reported on {', '.join(SYSCALLS)} only, not on {architecture}")
    table = SYSCALLS[architecture]
    names = {name for group in groups for name in GROUPS[group]}
    if watched is not None:
        names |= {*OPENING, *DUPLICATING}
    selected = {*_BY_DESCRIPTOR, "fcntl"} if watched is not None else set[str]()
    selected -= {"sendfile"} if "read" in groups else set()
    code = _Code()
    code.put(_LOAD, 4).put(_IF_EQUAL, _ARCHITECTURES[architecture], "known", "allow")
    code.label("known").put(_LOAD, 0)
    for number, name in sorted((table[name], name) for name in names if name in table):
        target = "report" if name not in selected else "fcntl" if name == "fcntl" else "descriptor"
        code.put(_IF_EQUAL, number, target)
    code.put(_RETURN, _RET_ALLOW)
    if watched is not None:
        code.label("fcntl").put(_LOAD, _ARGUMENTS + 8)
        code.put(_IF_EQUAL, F_DUPFD, "descriptor").put(_IF_EQUAL, F_DUPFD_CLOEXEC, "descriptor", "allow")
        code.label("descriptor").put(_LOAD, _ARGUMENTS).put(_IF_AT_LEAST, FIRST_PLACED, "report")
        code.put(_AND, 31).put(_TO_X).put(_LOAD, _ARGUMENTS).put(_SHIFT_RIGHT, 5)
        words = [sum(1 << number % 32 for number in watched if number // 32 == word) for word in range(_WORDS)]
        for word in range(_WORDS - 1):
            code.put(_IF_EQUAL, word, f"word {word}")
        for word in reversed(range(_WORDS)):
            code.label(f"word {word}").put(_LOAD_NUMBER, words[word]).put(_SHIFT_RIGHT_BY_X)
            code.put(_IF_SET, 1, "report", "allow")
    code.label("allow").put(_RETURN, _RET_ALLOW).label("report").put(_RETURN, _RET_USER_NOTIF)
    return code.assembled()


_WORDS = FIRST_PLACED // 32
_ARGUMENTS = 16
"""Offset of the low half of the first argument in struct seccomp_data, little-endian."""
_LOAD, _LOAD_NUMBER, _TO_X, _RETURN = 0x20, 0x00, 0x07, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_SET = 0x15, 0x35, 0x45
_AND, _SHIFT_RIGHT, _SHIFT_RIGHT_BY_X = 0x54, 0x74, 0x7C
"""Instructions of classic BPF (`man 7 bpf`, include/uapi/linux/bpf_common.h)."""


class _Code:
    """BPF instructions with jumps to labels; all jumps are forward."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, str | None, str | None]] = []
        self._labels: dict[str, int] = {}

    def put(self, operation: int, number: int = 0, target: str | None = None, otherwise: str | None = None) -> _Code:
        """Append an instruction. A jump without `otherwise` falls through if its condition is false."""
        self._instructions.append((operation, number, target, otherwise))
        return self

    def label(self, name: str) -> _Code:
        """Name the position of the next instruction."""
        self._labels[name] = len(self._instructions)
        return self

    def assembled(self) -> bytes:
        """The filter's bytes."""

        def distance(position: int, label: str | None) -> int:
            return 0 if label is None else self._labels[label] - position - 1

        return b"".join(
            _INSTRUCTION.pack(operation, distance(at, target), distance(at, otherwise), number)
            for at, (operation, number, target, otherwise) in enumerate(self._instructions)
        )


def filter_header(code: bytes, address: int) -> bytes:
    """The `struct sock_fprog` of a filter whose instructions are at `address`."""
    return struct.pack("@HP", len(code) // _INSTRUCTION.size, address)


def install(
    call: Callable[..., int],
    architecture: str,
    header_address: int,
    *,
    more_flags: int = 0,
    selective_address: int | None = None,
) -> tuple[int, bool]:
    """Install a filter through `call`, which makes a system call with a number and arguments and returns its result or
    the negated errno. Returns the listener's descriptor there, which is close-on-exec, and whether the filter is the
    selective one, whose header is at `selective_address`: it requires a kernel that does not abandon a report because
    of a signal (Linux 5.19). Raises FilterError."""
    result = -errno.EINVAL
    attempts = [(_NEW_LISTENER | _WAIT_KILLABLE, header_address), (_NEW_LISTENER, header_address)]
    if selective_address is not None:
        attempts.insert(0, (_NEW_LISTENER | _WAIT_KILLABLE, selective_address))
    for flags, address in attempts:
        for is_privileged in (True, False):
            if not is_privileged:
                refused = call(_PRCTL_NR[architecture], _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                if refused < 0:
                    raise FilterError(f"NO_NEW_PRIVS cannot be set: {os.strerror(-refused)}", -refused)
            number = _SECCOMP_NR[architecture]
            result = call(number, _SECCOMP_SET_MODE_FILTER, flags | more_flags, address)
            if result >= 0:
                return result, address == selective_address
            if result != -errno.EACCES:
                break
        if result != -errno.EINVAL:
            break
    if result == -errno.EBUSY:
        raise FilterError("the calls of this program are reported to another supervisor already", errno.EBUSY)
    said = os.strerror(-result)
    raise FilterError(f"the kernel reports no system calls (seccomp user notification): {said}", -result)


def install_filter(groups: Sequence[str]) -> int:
    """Have the calls of these groups reported, for this process and everything that it starts. Returns the listener's
    descriptor, which is close-on-exec. Raises FilterError."""
    code = filter_code(groups, platform.machine())
    program = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(filter_header(code, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: int) -> int:
        result = int(libc.syscall(number, *map(ctypes.c_ulong, arguments)))
        return -ctypes.get_errno() if result < 0 else result

    descriptor, _ = install(call, platform.machine(), ctypes.addressof(header))
    return descriptor
