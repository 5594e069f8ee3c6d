"""Reporting of system calls by the kernel: seccomp user notification (Linux 5.0, `man 2 seccomp_unotify`)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "ALL_THREADS",
    "GROUPS",
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
"""Which calls are reported. A reported call costs two switches of process, so a run takes only the groups that its
faults are about."""

_NOTIF = struct.Struct("=QIIiIQ6Q")
_RESP = struct.Struct("=QqiI")
_RECV, _SEND, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
_SYNC_WAKE_UP = 1
_NOTHING = bytes(_NOTIF.size)
"""What the kernel wants to find where it puts a report."""
_ID = struct.Struct("=Q")
_CONTINUE = 1

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
ALL_THREADS = 1 << 0 | 1 << 4
"""More flags for `install`: for all threads of the process, or for none (TSYNC and TSYNC_ESRCH, Linux 5.7)."""
_SECCOMP_NR = {"x86_64": 317, "aarch64": 277}
_PRCTL_NR = {"x86_64": 157, "aarch64": 167}
_INSTRUCTION = struct.Struct("=HBBI")
_RET_ALLOW, _RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000


@dataclass(frozen=True, slots=True)
class Call:
    """A reported call. `thread` is the number of the thread that made it."""

    id: int
    thread: int
    name: str
    arguments: tuple[int, ...]


class Listener:
    """A descriptor at which the kernel reports calls."""

    def __init__(self, descriptor: int, architecture: str) -> None:
        self.descriptor = descriptor
        self._names = {number: name for name, number in SYSCALLS[architecture].items()}
        # The kernel then hands the processor to who answers, and back, where it can (Linux 6.6).
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, _SET_FLAGS, _SYNC_WAKE_UP)

    def receive(self) -> bytes | None:
        """The report of the next call; None when it has been given up meanwhile."""
        try:
            return fcntl.ioctl(self.descriptor, _RECV, _NOTHING)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise

    def identity(self, report: bytes) -> int:
        """By which the call of a report is answered."""
        identity: int = _ID.unpack_from(report)[0]
        return identity

    def call(self, report: bytes) -> Call:
        """What a report says."""
        identity, thread, _, number, _, _, *arguments = _NOTIF.unpack(report)
        return Call(identity, thread, self._names.get(number, ""), tuple(arguments))

    def let_go_on(self, identity: int) -> None:
        """Have the kernel make a call. Nothing where it has been given up."""
        self._send(_RESP.pack(identity, 0, 0, _CONTINUE))

    def finish(self, identity: int, error_number: int = 0) -> None:
        """Have a call return 0 without being made, or fail with an errno. Nothing where it has been given up."""
        self._send(_RESP.pack(identity, 0, -error_number, 0))

    def _send(self, response: bytes) -> None:
        try:
            fcntl.ioctl(self.descriptor, _SEND, response)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
                raise


class Listeners:
    """The listeners of one program: one where it was started under a filter, one for each process that ran already
    when a filter was installed."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._all: dict[int, Listener] = {}
        self._woken = -1

    def __iter__(self) -> Iterator[Listener]:
        return iter([*self._all.values()])

    def add(self, descriptor: int) -> None:
        """One more."""
        self._all[descriptor] = Listener(descriptor, platform.machine())
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float | None) -> list[Listener] | None:
        """Wait for calls: the listeners that have one, none of them when time is up, None when nobody can make a call
        any more."""
        found = []
        if not self._all:
            return None
        for descriptor, events in self._poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)):
            if descriptor == self._woken:
                os.read(self._woken, 4096)
            elif events & select.POLLIN:
                found.append(self._all[descriptor])
            else:
                self._poll.unregister(descriptor)
                del self._all[descriptor]
                os.close(descriptor)
        return found if self._all else None

    def add_wake(self) -> Callable[[], None]:
        """A function that ends `wait` from another thread."""
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._woken, select.POLLIN)

        def wake_up() -> None:
            # A full pipe has woken it already.
            with contextlib.suppress(BlockingIOError):
                os.write(wake, b"!")

        return wake_up


class FilterError(RuntimeError):
    """Calls cannot be reported here; the message says why, and `error_number` is the kernel's word."""

    def __init__(self, message: str, error_number: int = errno.ENOSYS) -> None:
        super().__init__(message)
        self.error_number = error_number


def filter_code(groups: Sequence[str], architecture: str) -> bytes:
    """The filter's instructions, which have the calls of these groups reported. Raises FilterError for an architecture
    whose numbers are not known."""
    if architecture not in SYSCALLS:
        raise FilterError(f"system calls are reported on {', '.join(SYSCALLS)} only, not on {architecture}")
    table = SYSCALLS[architecture]
    numbers = sorted({table[name] for group in groups for name in GROUPS[group] if name in table})
    code = [_INSTRUCTION.pack(0x20, 0, 0, 4), _INSTRUCTION.pack(0x15, 1, 0, _ARCHITECTURES[architecture])]
    code += [_INSTRUCTION.pack(0x06, 0, 0, _RET_ALLOW), _INSTRUCTION.pack(0x20, 0, 0, 0)]
    for position, number in enumerate(numbers):
        code.append(_INSTRUCTION.pack(0x15, len(numbers) - position, 0, number))
    code += [_INSTRUCTION.pack(0x06, 0, 0, _RET_ALLOW), _INSTRUCTION.pack(0x06, 0, 0, _RET_USER_NOTIF)]
    return b"".join(code)


def filter_header(code: bytes, address: int) -> bytes:
    """How a filter is described to the kernel (`struct sock_fprog`) whose instructions lie at an address."""
    return struct.pack("@HP", len(code) // _INSTRUCTION.size, address)


def install(call: Callable[..., int], architecture: str, header_address: int, *, more_flags: int = 0) -> int:
    """Install a filter by `call`, which makes a system call of a number with arguments and returns its result, or the
    errno negated. Returns the listener's descriptor there, which closes on exec. Raises FilterError."""
    result = -errno.EINVAL
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        for is_privileged in (True, False):
            if not is_privileged:
                refused = call(_PRCTL_NR[architecture], _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                if refused < 0:
                    raise FilterError(f"NO_NEW_PRIVS cannot be set: {os.strerror(-refused)}", -refused)
            number = _SECCOMP_NR[architecture]
            result = call(number, _SECCOMP_SET_MODE_FILTER, flags | more_flags, header_address)
            if result >= 0:
                return result
            if result != -errno.EACCES:
                break
        if result != -errno.EINVAL:
            break
    if result == -errno.EBUSY:
        raise FilterError("the calls of this program are reported to another supervisor already", errno.EBUSY)
    said = os.strerror(-result)
    raise FilterError(f"the kernel reports no system calls (seccomp user notification): {said}", -result)


def install_filter(groups: Sequence[str]) -> int:
    """Have this process's calls of these groups reported, and those of everything that it starts. Returns the
    listener's descriptor, which closes on exec. Raises FilterError."""
    code = filter_code(groups, platform.machine())
    program = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(filter_header(code, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: int) -> int:
        result = int(libc.syscall(number, *map(ctypes.c_ulong, arguments)))
        return -ctypes.get_errno() if result < 0 else result

    return install(call, platform.machine(), ctypes.addressof(header))
