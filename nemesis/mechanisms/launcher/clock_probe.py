"""Reads the clocks that a replica sees, together with the true ones.

If a library skews the replica's clock, this process is under the same library and reads its own clocks. If the replica
has a patched vDSO, the offset stored there shifts every reading of the replica, and is read from it. The true clocks
come from system calls made by the C library itself, which neither mechanism skews.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import time
from collections.abc import Sequence

from .vdso import ClockError, Image, locate, read_offset_ns

__all__ = ["read_clocks"]

_TRIES = 20
_SHORT_NS = 100_000
"""A reading that took no longer than this is good enough."""

_CLOCK_GETTIME = {"x86_64": 228, "aarch64": 113}


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def read_clocks(pid: int, apart_ms: float, pauses_s: Sequence[float]) -> list[list[int]]:
    """One reading more than there are pauses, in nanoseconds: the true wall clock, the skewed one, and the true one
    again; then the same three for the monotonic clock. If `apart_ms` is above 0, stops once two readings of the wall
    clock are that far apart. `pid` is the process whose vDSO is read, 0 for this process's own clocks. Raises
    ClockError, OSError."""
    readings = [_read(pid)]
    for pause_s in pauses_s:
        offsets_ns = [wall_ns - true_ns for true_ns, wall_ns, *_ in readings]
        if 0 < apart_ms * 1e6 <= max(offsets_ns) - min(offsets_ns):
            break
        time.sleep(pause_s)
        readings.append(_read(pid))
    return readings


def _read(pid: int) -> list[int]:
    """The fastest of a few readings: on a busy machine a process may be preempted during one."""
    image = locate(pid) if pid else None
    found: list[int] = []
    for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
        best = _read_once(clock, pid, image)
        for _ in range(_TRIES - 1):
            if best[2] - best[0] <= _SHORT_NS:
                break
            best = min(best, _read_once(clock, pid, image), key=lambda reading: reading[2] - reading[0])
        found += best
    return found


def _read_once(clock: int, pid: int, image: Image | None) -> tuple[int, int, int]:
    before_ns = _true_ns(clock)
    if image is None:
        read_ns = time.clock_gettime_ns(clock)
    else:
        read_ns = _true_ns(clock) + ((read_offset_ns(pid, image) or 0) if clock == time.CLOCK_REALTIME else 0)
    return before_ns, read_ns, _true_ns(clock)


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library, loaded by its own name: a plain lookup of `syscall` may find the preloaded library's."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libc.so.6", use_errno=True)
    return ctypes.CDLL(None, use_errno=True)


def _true_ns(clock: int) -> int:
    found = _Time()
    if _libc().syscall(_CLOCK_GETTIME[platform.machine()], clock, ctypes.byref(found)) != 0:
        raise ClockError(f"the true time cannot be read: {os.strerror(ctypes.get_errno())}")
    return int(found.seconds) * 1_000_000_000 + int(found.nanoseconds)
