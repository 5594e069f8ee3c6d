"""The clocks of this process as its programs read them, beside the true ones.

Run in the place of a replica, under the same preloaded library or the same clock driver, it reads what a replica reads.
The true clocks come by raw system calls, which neither of the two bends.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Sequence

from .vdso import ClockError, read_offset_ns

__all__ = ["read_clocks"]

_CLOCK_GETTIME = {"x86_64": 228, "aarch64": 113}
_MOVED_TIMEOUT_S = 10.0
_POLL_S = 0.002


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def read_clocks(is_moved: bool, apart_ms: float, pauses_s: Sequence[float]) -> list[list[int]]:
    """One reading more than there are pauses, in nanoseconds: the true wall clock, the one that is read, and the true
    one again; then the same three of the monotonic clock. None follow once two of them show the wall clock `apart_ms`
    apart, where that is above 0. Where a clock driver is to move this process's clock (`is_moved`), that is waited for.
    Raises ClockError when it does not.
    """
    deadline_s = time.monotonic() + _MOVED_TIMEOUT_S
    while is_moved and read_offset_ns(os.getpid()) is None:
        if time.monotonic() > deadline_s:
            raise ClockError("the clock driver has not moved the clock of a probe")
        time.sleep(_POLL_S)
    readings = [_read()]
    for pause_s in pauses_s:
        offsets_ns = [wall_ns - true_ns for true_ns, wall_ns, *_ in readings]
        if 0 < apart_ms * 1e6 <= max(offsets_ns) - min(offsets_ns):
            break
        time.sleep(pause_s)
        readings.append(_read())
    return readings


def _read() -> list[int]:
    found = []
    for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
        found += [_true_ns(clock), time.clock_gettime_ns(clock), _true_ns(clock)]
    return found


def _true_ns(clock: int) -> int:
    found = _Time()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_CLOCK_GETTIME[platform.machine()], clock, ctypes.byref(found)) != 0:
        raise ClockError(f"the true time cannot be had: {os.strerror(ctypes.get_errno())}")
    return int(found.seconds) * 1_000_000_000 + int(found.nanoseconds)
