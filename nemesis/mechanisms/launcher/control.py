"""The control file as the programs that a host runs under faults see it; its layout is that of shim/control.h."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

__all__ = [
    "DELAYED",
    "FAILED",
    "HELD",
    "REFUSED",
    "UNDO_OVERFLOW",
    "ClockState",
    "Control",
    "ProcessCount",
    "Settings",
    "parse_clock_states",
    "parse_process_counts",
]

MAGIC = 0x3154554146425053
CONTROL_BYTES = 4096
COUNTERS_OFFSET = 2048
HEAD = struct.Struct("=10Qq")
PROCESSES_OFFSET = 2304
PROCESS = struct.Struct("=3Q")
CLOCKS_OFFSET = 3072
CLOCK_ROW = struct.Struct("=4Q")
CLOCK_SLOTS = 16
CLOCK_SLOT = struct.Struct("=6q")
PROCESS_SLOTS = 32
"""Programs of one host that are counted at a time; one that starts takes the place of one that has ended."""

HELD, DELAYED, REFUSED, FAILED, UNDO_OVERFLOW = range(5)
"""Columns of `COUNTERS`."""


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
class ClockState:
    """What the clock driver of a program has done: it has brought the settings of `generation` into force in `reached`
    processes and could not in `failed`. `pid` is the program's first process."""

    pid: int
    generation: int
    reached: int
    failed: int


def parse_clock_states(control: bytes) -> list[ClockState]:
    """What the clock drivers say in the bytes of a control file."""
    rows = (CLOCK_ROW.unpack_from(control, CLOCKS_OFFSET + slot * CLOCK_ROW.size) for slot in range(PROCESS_SLOTS))
    return [ClockState(*row) for row in rows if row[0]]


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
        self._slot = self._pid = 0
        self._generation = b""
        self._settings = Settings()

    def settings(self) -> Settings:
        """What is in force now."""
        if self._map[8:16] != self._generation:
            raw = self._consistent()
            disk, stall_sync, stall, full, error_write, error_sync, error_read, delay_ns = HEAD.unpack_from(raw)[3:]
            self._generation = raw[8:16]
            self._settings = Settings(
                has_disk=bool(disk),
                stall_sync=bool(stall_sync),
                stall_all=bool(stall),
                full=bool(full),
                error_write=bool(error_write),
                error_sync=bool(error_sync),
                error_read=bool(error_read),
                delay_ns=delay_ns,
            )
        return self._settings

    def wall_clock_slots(self) -> tuple[list[tuple[int, ...]], int]:
        """The skews of the wall clock in force now, as `struct clock_slot` has them, and the settings' generation."""
        raw = self._consistent()
        slots = [CLOCK_SLOT.unpack_from(raw, HEAD.size + i * CLOCK_SLOT.size) for i in range(CLOCK_SLOTS)]
        return [slot for slot in slots if any(slot) and not slot[5]], HEAD.unpack_from(raw, 0)[1]

    def _consistent(self) -> bytes:
        """The settings as one write has left them."""
        while True:
            raw = self._map[:COUNTERS_OFFSET]
            end = struct.unpack_from("=Q", raw, HEAD.size + CLOCK_SLOTS * CLOCK_SLOT.size)[0]
            if HEAD.unpack_from(raw, 0)[1] == end:
                return raw

    def applied(self, generation: int, reached: int, failed: int) -> None:
        """Say that the program's clocks are as `generation` of the settings has them."""
        row = CLOCKS_OFFSET + self._slot * CLOCK_ROW.size
        CLOCK_ROW.pack_into(self._map, row, self._pid, generation, reached, failed)

    def claim(self, pid: int) -> None:
        """Take a row of the table of programs for `pid`. Raises RuntimeError when all are of living programs."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            for slot in range(PROCESS_SLOTS):
                offset = PROCESSES_OFFSET + slot * PROCESS.size
                owner = PROCESS.unpack_from(self._map, offset)[0]
                if owner in (0, pid) or not os.path.exists(f"/proc/{owner}"):
                    PROCESS.pack_into(self._map, offset, pid, 0, 0)
                    CLOCK_ROW.pack_into(self._map, CLOCKS_OFFSET + slot * CLOCK_ROW.size, 0, 0, 0, 0)
                    self._slot, self._pid = slot, pid
                    return
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        raise RuntimeError(f"more than {PROCESS_SLOTS} programs run on one host")

    def count(self, column: int | None) -> None:
        """Count a call, and the fault that it met: a column of `COUNTERS`, None for none."""
        self._add(calls=1)
        if column is not None:
            self.count_met(column)

    def count_met(self, column: int) -> None:
        """Count that a call, which is counted already, met a fault."""
        self._add(met=1)
        self.add_to_counter(column)

    def add_to_counter(self, column: int) -> None:
        """Add one to a counter of the host."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            offset = COUNTERS_OFFSET + 8 * column
            value = struct.unpack_from("=Q", self._map, offset)[0]
            struct.pack_into("=Q", self._map, offset, value + 1)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _add(self, *, calls: int = 0, met: int = 0) -> None:
        offset = PROCESSES_OFFSET + self._slot * PROCESS.size
        pid, calls_before, met_before = PROCESS.unpack_from(self._map, offset)
        PROCESS.pack_into(self._map, offset, pid, calls_before + calls, met_before + met)
