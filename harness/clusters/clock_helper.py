"""The clock helper: skews the real wall clock of the machine it runs on, and corrects it afterwards.

For machines that may be disturbed and have a clock of their own: every process there sees the wrong time, however it is
linked. The true time follows from the kernel's clock since boot, which cannot be set: the difference between wall clock
and boot clock is written to a file, durably, before the wall clock is first touched, so that anyone can correct it
later. The file also has the boot id, because a later boot counts anew and starts with a correct clock.
The helper runs as root on a host with an agent and takes requests on the Unix socket that its argument names, in the
format of control_server:

    open         {"base": path}    record the difference, or read the one that an earlier helper has recorded
    skew         {"fault": id, "skew": {"offset_ms", "rate_ppm", "strobe_ms", "strobe_period_ms",
                 "step_ms"}}    in force when answered; several faults add up
    release      {"fault": id}    after the last fault, the clock is checked before the answer
    release_all  {}
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.clusters.control_server import run_helper

__all__ = ["RESTORE_SCRIPT", "ClockHelper", "main", "skew_ns"]

TICK_S = 0.01
"""Interval at which a drifting or strobing clock is set: far below the shortest strobe period."""

RIGHT_NS = 100_000_000
"""A clock this close to the true time is correct: setting and reading it takes microseconds, more on a busy machine."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"

RESTORE_SCRIPT = f"""
import os, sys, time
if os.path.exists(sys.argv[1]):
    base, boot_id = open(sys.argv[1]).read().split()
    if boot_id == open("{_BOOT_ID}").read().strip():
        time.clock_settime_ns(time.CLOCK_REALTIME, int(base) + time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    os.unlink(sys.argv[1])
"""
"""Run by a Python on the machine to correct the clock after the helper has ended; does nothing a second time, nor after
a reboot."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """One fault's skew, and the time since boot at which it began."""

    skew: dict[str, int]
    began_ns: int


def skew_ns(skew: dict[str, int], elapsed_ns: int) -> int:
    """How far a clock is off `elapsed_ns` after its skew began: the offset, plus what the rate has added up to since
    the clock was last stepped right, plus the strobe in the second half of each of its periods."""
    gained_ns = abs(skew["rate_ppm"]) * elapsed_ns // 1_000_000
    if skew["step_ms"]:
        gained_ns %= skew["step_ms"] * 1_000_000
    off_ns = skew["offset_ms"] * 1_000_000 + (gained_ns if skew["rate_ppm"] > 0 else -gained_ns)
    period_ns = skew["strobe_period_ms"] * 1_000_000
    if period_ns and elapsed_ns % period_ns >= period_ns // 2:
        off_ns += skew["strobe_ms"] * 1_000_000
    return off_ns


def _boot_id() -> str:
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def _set_wall(at_ns: int) -> None:
    time.clock_settime_ns(time.CLOCK_REALTIME, at_ns)


class ClockHelper:
    """The faults in force, and the task that moves the clock while one of them needs it."""

    def __init__(
        self,
        *,
        since_boot_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        wall_ns: Callable[[], int] = time.time_ns,
        set_wall: Callable[[int], None] = _set_wall,
        boot_id: Callable[[], str] = _boot_id,
    ) -> None:
        self._since_boot_ns = since_boot_ns
        self._wall_ns = wall_ns
        self._set_wall = set_wall
        self._boot_id = boot_id
        self._base_ns: int | None = None
        self._faults: dict[str, _Fault] = {}
        self._mover: asyncio.Task[None] | None = None

    async def open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Learn the true time: the difference between wall clock and boot clock. Raises OSError."""
        path, boot_id = message["base"], self._boot_id()
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            base_ns, of_boot_id = file.read().split()
            if of_boot_id == boot_id:
                self._base_ns = int(base_ns)
                return {}
        self._base_ns = self._wall_ns() - self._since_boot_ns()
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write(f"{self._base_ns} {boot_id}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
        return {}

    async def skew(self, message: dict[str, Any]) -> dict[str, Any]:
        """Apply one fault."""
        self._require_open()
        skew = {name: int(value) for name, value in message["skew"].items()}
        self._faults[str(message["fault"])] = _Fault(skew, self._since_boot_ns())
        self._apply()
        return {}

    async def release(self, message: dict[str, Any]) -> dict[str, Any]:
        """Undo one fault. Another request for the same fault corrects and checks the clock again, because the first one
        may have failed."""
        self._faults.pop(str(message["fault"]), None)
        if self._base_ns is not None:
            self._apply()
        return {}

    async def release_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """Undo every fault and correct the clock."""
        self._faults.clear()
        if self._base_ns is not None:
            self._apply()
        return {}

    def _require_open(self) -> int:
        if self._base_ns is None:
            raise ValueError("the clock helper was not opened")
        return self._base_ns

    def _apply(self) -> None:
        self._move()
        moves = any(fault.skew["rate_ppm"] or fault.skew["strobe_ms"] for fault in self._faults.values())
        if moves and self._mover is None:
            self._mover = asyncio.get_running_loop().create_task(self._keep_moving())
        elif not moves and self._mover is not None:
            self._mover.cancel()
            self._mover = None
        if not self._faults:
            off_ns = self._wall_ns() - self._require_open() - self._since_boot_ns()
            if abs(off_ns) > RIGHT_NS:
                raise ValueError(f"the clock is off by {off_ns / 1e6:.0f} ms after it was corrected")

    def _move(self) -> None:
        now_ns = self._since_boot_ns()
        off_ns = sum(skew_ns(fault.skew, now_ns - fault.began_ns) for fault in self._faults.values())
        self._set_wall(self._require_open() + now_ns + off_ns)

    async def _keep_moving(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(OSError):  # the next request that sets the clock reports it
                self._move()


def main() -> None:
    """Run the helper on the path that is the first argument."""
    helper = ClockHelper()
    run_helper({"open": helper.open, "skew": helper.skew, "release": helper.release, "release_all": helper.release_all})


if __name__ == "__main__":
    main()
