"""The clock helper: bends the real wall clock of the machine it runs on, and sets it right.

For machines with a clock of their own that are there to be broken: everything on them sees the wrong time, whatever
it is linked to. What is true is known by the kernel's clock since boot, which nobody sets: their difference is written
to a file, durably, before the wall clock is touched for the first time, so that whoever comes later can set it right;
with the boot that it is of, since a later one counts anew and begins with a clock that is right.
It runs on a host with an agent, as root, and is spoken to over the Unix socket that its argument names, as
control_server says:

    open         {"base": path}    learn the difference, or read what an earlier helper has learnt
    skew         {"fault": id, "skew": {"offset_ms", "rate_ppm", "strobe_ms", "strobe_period_ms",
                 "step_ms"}}    in force when answered; several faults add up
    release      {"fault": id}    without any, the clock is seen to be right before it is answered
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
"""Between two settings of a clock that drifts or swings: far below the shortest strobe's period."""

RIGHT_NS = 100_000_000
"""A clock this near to the truth is right: setting and reading it takes microseconds, a busy machine some more."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"

RESTORE_SCRIPT = f"""
import os, sys, time
if os.path.exists(sys.argv[1]):
    base, boot_id = open(sys.argv[1]).read().split()
    if boot_id == open("{_BOOT_ID}").read().strip():
        time.clock_settime_ns(time.CLOCK_REALTIME, int(base) + time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    os.unlink(sys.argv[1])
"""
"""What a Python there runs to set the clock right when the helper has ended; does nothing a second time, nor after the
machine was started anew."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """One fault's skew, and the time since boot at which it began."""

    skew: dict[str, int]
    began_ns: int


def skew_ns(skew: dict[str, int], elapsed_ns: int) -> int:
    """How far a clock is off `elapsed_ns` after its skew began: by the offset, by what the rate has added up to since
    the clock was stepped right, and by the strobe in every second half of its period."""
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
        """Know what is true. Raises OSError."""
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
        """Put one fault in force."""
        self._require_open()
        skew = {name: int(value) for name, value in message["skew"].items()}
        self._faults[str(message["fault"])] = _Fault(skew, self._since_boot_ns())
        self._apply()
        return {}

    async def release(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take one fault back."""
        if self._faults.pop(str(message["fault"]), None) is not None:
            self._apply()
        return {}

    async def release_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take every fault back."""
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
                raise ValueError(f"the clock is off by {off_ns / 1e6:.0f} ms after it was set right")

    def _move(self) -> None:
        now_ns = self._since_boot_ns()
        off_ns = sum(skew_ns(fault.skew, now_ns - fault.began_ns) for fault in self._faults.values())
        self._set_wall(self._require_open() + now_ns + off_ns)

    async def _keep_moving(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(OSError):  # raised to whoever sets it next
                self._move()


def main() -> None:
    """Run the helper on the path that is the first argument."""
    helper = ClockHelper()
    run_helper({"open": helper.open, "skew": helper.skew, "release": helper.release, "release_all": helper.release_all})


if __name__ == "__main__":
    main()
