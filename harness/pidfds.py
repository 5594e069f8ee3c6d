"""Process descriptors (pidfd), also for interpreters without functions for them, such as PyPy."""

from __future__ import annotations

__all__ = ["pidfd_open", "pidfd_send_signal"]

import ctypes
import os
import signal

_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
"""From asm/unistd.h; such recent system calls have the same number on every architecture."""


def pidfd_open(pid: int) -> int:
    """A new descriptor of a process, readable once the process has ended; the caller must close it.

    Raises ProcessLookupError, or another OSError if the kernel does not support pidfds.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _syscall(_SYS_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(descriptor: int, number: signal.Signals) -> None:
    """Signal the process of a descriptor. Raises ProcessLookupError if it has ended and been reaped, OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _syscall(_SYS_PIDFD_SEND_SIGNAL, descriptor, int(number), None, 0)


def _syscall(number: int, *arguments: int | None) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_void_p(None) if argument is None else ctypes.c_long(argument) for argument in arguments]
    result = int(call(ctypes.c_long(number), *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
