"""The control file as the programs that a host runs under faults see it; its layout is that of shim/control.h."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "CONTROL_BYTES",
    "DELAYED",
    "FAILED",
    "HELD",
    "PROGRAM_SLOTS",
    "REFUSED",
    "TRAPS_FROM_THE_START",
    "UNCOUNTED",
    "UNDO_OVERFLOW",
    "Control",
    "ProgramCounts",
    "Settings",
    "parse_programs",
]

MAGIC = 0x3154554146425053
CONTROL_BYTES = 20480
COUNTERS_OFFSET = 2048
HEAD = struct.Struct("=10QqQqQ")
PROGRAMS_OFFSET = 4096
PROGRAM_BYTES = 256
PROGRAM_SLOTS = 64
"""Programs of one host that are counted at a time."""
CLOCK_SLOTS = 16
CLOCK_SLOT = struct.Struct("=7q")

_TRACING_TIMEOUT_S = 3.0
"""How long one helper waits for another that traces; a program stands still for some milliseconds."""
_TRACING_POLL_S = 0.002

UNCOUNTED = 2**64 - 1
"""For `clock_reads`, where some process of the program cannot count them."""

TRAPS_FROM_THE_START = 2**64 - 1
"""For `traps_generation`: whatever faults come."""

HELD, DELAYED, REFUSED, FAILED, UNDO_OVERFLOW = range(5)
"""Columns of `COUNTERS`."""

_COLUMNS = (
    *("id", "syncs", "writes", "grows", "reads", "held", "delayed", "refused", "failed", "recorded", "clock_reads"),
    *("unseen", "clock_generation", "clock_reached", "clock_failed", "lost", "flipped_reads"),
    *("traps_generation", "traps_reached", "traps_failed", "traps_error", "passed", "buffered"),
    *("held_syncs", "refused_grows", "failed_writes", "failed_syncs", "failed_reads"),
)
_PARTS = {
    (HELD, "syncs"): "held_syncs",
    (REFUSED, "grows"): "refused_grows",
    (FAILED, "writes"): "failed_writes",
    (FAILED, "grows"): "failed_writes",
    (FAILED, "syncs"): "failed_syncs",
    (FAILED, "reads"): "failed_reads",
}
"""What a call met, and what was called -> where that is counted beside the sum of all."""
_PROGRAM = struct.Struct(f"={len(_COLUMNS)}Q")
_COLUMN_OFFSETS = {column: 8 * position for position, column in enumerate(_COLUMNS)}
_FIRST_MET = _COLUMNS.index("held")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCounts:
    """What one program that the harness started has done since then, its children included.

    `syncs`, `writes`, `grows` (writes that need more space) and `reads` are calls on files under the root; so many of
    them were `held`, `delayed`, `refused` (no space) and `failed` (EIO). The preloaded shim counts them while a disk
    fault is in force or what is written is recorded, the launcher always. `recorded` changes are in the account of
    unsynced data; `clock_reads` are of a clock that is skewed, or UNCOUNTED. `unseen` calls are about files that the
    launcher may not look at. Its clock driver has brought the settings of `clock_generation` into force in
    `clock_reached` processes and could not in `clock_failed`. `lost`: the supervisor has ended before the program.
    `flipped_reads` are reads, by a call, of a byte of which a bit was flipped (shim only). With the settings of
    `traps_generation` in force, the calls of `traps_reached` processes were reported to the supervisor and those of
    `traps_failed` could not be, `traps_error` (an errno) says why; TRAPS_FROM_THE_START where all have been reported
    since the program began. `passed` descriptors of files under the root have numbers whose calls are not reported, or
    had since the faults that are in force began. `buffered` files were opened to be written by the C library's own
    buffers (`fopen`), whose writes the shim does not see (shim only). `held_syncs`, `refused_grows` and what has
    `failed` by its kind are those that a fault of the shim or launcher struck: the sums are shared by the faults of a
    host, and have what the disk itself has refused.
    """

    id: int
    syncs: int = 0
    writes: int = 0
    grows: int = 0
    reads: int = 0
    held: int = 0
    delayed: int = 0
    refused: int = 0
    failed: int = 0
    recorded: int = 0
    clock_reads: int = 0
    unseen: int = 0
    clock_generation: int = 0
    clock_reached: int = 0
    clock_failed: int = 0
    lost: int = 0
    flipped_reads: int = 0
    traps_generation: int = 0
    traps_reached: int = 0
    traps_failed: int = 0
    traps_error: int = 0
    passed: int = 0
    buffered: int = 0
    held_syncs: int = 0
    refused_grows: int = 0
    failed_writes: int = 0
    failed_syncs: int = 0
    failed_reads: int = 0

    @property
    def calls(self) -> int:
        """Calls on files under the root."""
        return self.syncs + self.writes + self.grows + self.reads

    @property
    def met(self) -> int:
        """How often a call met a disk fault."""
        return self.held + self.delayed + self.refused + self.failed

    @property
    def refused_by_disk(self) -> int:
        """How often the disk itself had no space."""
        return max(0, self.refused - self.refused_grows)

    @property
    def failed_by_disk(self) -> int:
        """How often the disk itself has failed."""
        return max(0, self.failed - self.failed_writes - self.failed_syncs - self.failed_reads)


def parse_programs(control: bytes) -> dict[int, ProgramCounts]:
    """The counts by program in the bytes of a control file."""
    rows = (_PROGRAM.unpack_from(control, PROGRAMS_OFFSET + slot * PROGRAM_BYTES) for slot in range(PROGRAM_SLOTS))
    return {row[0]: ProgramCounts(**dict(zip(_COLUMNS, row, strict=True))) for row in rows if row[0]}


@dataclass(frozen=True, slots=True)
class Settings:
    """The disk faults in force: the head of the control file. `account`: what is not synced is to be kept track of."""

    has_disk: bool = False
    stall_sync: bool = False
    stall_all: bool = False
    full: bool = False
    error_write: bool = False
    error_sync: bool = False
    error_read: bool = False
    delay_ns: int = 0
    account: bool = False

    @property
    def wants_traps(self) -> bool:
        """Whether a program's calls have to be reported."""
        return self.has_disk or self.account


class Control:
    """The control file, mapped."""

    def __init__(self, path: str) -> None:
        """Raises OSError, and ValueError for a file that is none."""
        self._path = os.path.abspath(path)
        with open(path, "r+b") as file:
            self._fd = os.dup(file.fileno())
            self._map = mmap.mmap(file.fileno(), CONTROL_BYTES)
        if HEAD.unpack_from(self._map, 0)[0] != MAGIC:
            raise ValueError(f"{path} is not a control file")
        self._program = 0
        self._generation = b""
        self._settings = Settings()

    @property
    def generation(self) -> int:
        """The number of the settings that are in force now."""
        return int(struct.unpack_from("=Q", self._map, 8)[0])

    @property
    def read_generation(self) -> int:
        """The generation of the settings that `settings` has read last."""
        return int.from_bytes(self._generation, sys.byteorder)

    @property
    def generation_address(self) -> int:
        """The address, in this process, of the generation that is in force (8 bytes in the machine's order)."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map, 8))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """While this lasts no other helper of the host's programs traces one of them: the kernel lets one at a time.
        Raises OSError, BlockingIOError when another does for long."""
        with open(self._path, "rb") as file:  # a description of our own: helpers have those of whom they were forked by
            deadline_s = time.monotonic() + _TRACING_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(_TRACING_POLL_S)
            yield

    def settings(self) -> Settings:
        """What is in force now."""
        if self._map[8:16] != self._generation:
            raw = self._consistent()
            disk, stall_sync, stall, full, error_write, error_sync, error_read, delay_ns = HEAD.unpack_from(raw)[3:11]
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
                account=bool(HEAD.unpack_from(raw)[13]),
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

    def claim(self, program: int) -> None:
        """Count for the program of this number, which nobody counts for yet; 0 counts for nobody. The harness gives a
        slot to one living program at a time."""
        self._program = program
        if program:
            row = PROGRAMS_OFFSET + program % PROGRAM_SLOTS * PROGRAM_BYTES
            self._map[row : row + PROGRAM_BYTES] = _PROGRAM.pack(program, *[0] * (len(_COLUMNS) - 1)).ljust(
                PROGRAM_BYTES, b"\0"
            )

    def applied(self, generation: int, reached: int, failed: int) -> None:
        """Say that the program's clocks are as `generation` of the settings has them."""
        for column, value in (("clock_reached", reached), ("clock_failed", failed), ("clock_generation", generation)):
            offset = self._offset(column)
            if offset is not None:
                struct.pack_into("=Q", self._map, offset, value)

    def trapped(self, generation: int, reached: int, failed: int, error_number: int = 0) -> None:
        """Say of how many processes calls are reported, with `generation` of the settings in force."""
        values = {"traps_reached": reached, "traps_failed": failed, "traps_error": error_number}
        for column, value in (*values.items(), ("traps_generation", generation)):
            offset = self._offset(column)
            if offset is not None:
                struct.pack_into("=Q", self._map, offset, value)

    def passed(self, count: int) -> None:
        """Say how many descriptors of files have, or had, numbers whose calls are not reported."""
        offset = self._offset("passed")
        if offset is not None:
            struct.pack_into("=Q", self._map, offset, count)

    def count_call(self, operation: str) -> None:
        """Count a call on a file under the root; its operation is a column, such as "syncs"."""
        self._add_one(operation)

    def count_unseen(self) -> None:
        """Count a call about a file that may not be looked at."""
        self._add_one("unseen")

    def count_loss(self) -> None:
        """Say that the supervisor has ended before its program."""
        self._add_one("lost")

    def count_recorded(self) -> None:
        """Count a change that the account of unsynced data has seen."""
        self._add_one("recorded")

    def count_clock_reads(self, count: int) -> None:
        """Count so many readings of a skewed clock; nothing once they cannot all be counted."""
        offset = self._offset("clock_reads")
        if offset is not None and count:
            before = struct.unpack_from("=Q", self._map, offset)[0]
            if before != UNCOUNTED:
                struct.pack_into("=Q", self._map, offset, before + count)

    def cannot_count_clock(self) -> None:
        """Say that readings of the program's clock are not counted."""
        offset = self._offset("clock_reads")
        if offset is not None:
            struct.pack_into("=Q", self._map, offset, UNCOUNTED)

    def count_met(self, column: int, operation: str) -> None:
        """Count that a call, which is counted already as `operation`, met a fault: a column of `COUNTERS`. What was
        called first, then the host's, as the shim does: whoever sees the sum of the program finds both there."""
        part = _PARTS.get((column, operation))
        if part is not None:
            self._add_one(part)
        self.add_to_counter(column)
        self._add_one(_COLUMNS[_FIRST_MET + column])

    def add_to_counter(self, column: int) -> None:
        """Add one to a counter of the host."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            offset = COUNTERS_OFFSET + 8 * column
            value = struct.unpack_from("=Q", self._map, offset)[0]
            struct.pack_into("=Q", self._map, offset, value + 1)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _offset(self, column: str) -> int | None:
        """Where the program has a count; None where it has none, or has lost its slot to another."""
        row = PROGRAMS_OFFSET + self._program % PROGRAM_SLOTS * PROGRAM_BYTES
        if not self._program or struct.unpack_from("=Q", self._map, row)[0] != self._program:
            return None
        return row + _COLUMN_OFFSETS[column]

    def _add_one(self, column: str) -> None:
        offset = self._offset(column)
        if offset is not None:
            struct.pack_into("=Q", self._map, offset, struct.unpack_from("=Q", self._map, offset)[0] + 1)
