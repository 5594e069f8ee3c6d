"""The control file as the programs under faults on a host see it; its layout is that of shim/control.h."""

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
"""Programs of one host that can be counted at the same time."""
CLOCK_SLOTS = 16
CLOCK_SLOT = struct.Struct("=7q")

_TRACING_TIMEOUT_S = 3.0
"""How long one helper waits for another one to finish tracing, which stops a program for some milliseconds."""
_TRACING_POLL_S = 0.002

UNCOUNTED = 2**64 - 1
"""Value of `clock_reads` if some process of the program cannot count them."""

TRAPS_FROM_THE_START = 2**64 - 1
"""Value of `traps_generation` if calls are always reported, whichever faults are in force."""

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
"""(what a call met, kind of call) -> column that counts this case, in addition to the total."""
_PROGRAM = struct.Struct(f"={len(_COLUMNS)}Q")
_COLUMN_OFFSETS = {column: 8 * position for position, column in enumerate(_COLUMNS)}
_FIRST_MET = _COLUMNS.index("held")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCounts:
    """What one program that the harness started, its children included, has done since its start.

    `syncs`, `writes`, `grows` (writes that need more space) and `reads` are calls on files under the root; of these,
    `held`, `delayed`, `refused` (no space) and `failed` (EIO) met a fault. The preloaded shim counts them while a disk
    fault is in force or changes are recorded, the launcher always. `recorded` are changes in the account of unsynced
    data; `clock_reads` are reads of a skewed clock, or UNCOUNTED. `unseen` are calls about files that the launcher may
    not inspect. The clock driver has applied the settings of `clock_generation` in `clock_reached` processes and failed
    to in `clock_failed`. `lost`: the supervisor ended before the program. `flipped_reads` are reads, by a call, of a
    byte with a flipped bit (shim only). With the settings of `traps_generation` in force, the calls of `traps_reached`
    processes were reported to the supervisor; those of `traps_failed` could not be, for the reason `traps_error` (an
    errno). TRAPS_FROM_THE_START: all calls have been reported since the program's start. `passed` are descriptors of
    files under the root whose calls are not reported, or were not at some time since the faults in force began.
    `buffered` are files opened for writing through the C library's own buffers (`fopen`), whose writes the shim does
    not see (shim only). `held_syncs`, `refused_grows` and the `failed_` columns count calls that a fault of the shim or
    launcher hit; the totals are shared by all faults of a host and include what the disk itself refused.
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
        """Calls that met a disk fault."""
        return self.held + self.delayed + self.refused + self.failed

    @property
    def refused_by_disk(self) -> int:
        """Calls for which the disk itself had no space."""
        return max(0, self.refused - self.refused_grows)

    @property
    def failed_by_disk(self) -> int:
        """Calls in which the disk itself failed."""
        return max(0, self.failed - self.failed_writes - self.failed_syncs - self.failed_reads)


def parse_programs(control: bytes) -> dict[int, ProgramCounts]:
    """The counts in the bytes of a control file, by program."""
    rows = (_PROGRAM.unpack_from(control, PROGRAMS_OFFSET + slot * PROGRAM_BYTES) for slot in range(PROGRAM_SLOTS))
    return {row[0]: ProgramCounts(**dict(zip(_COLUMNS, row, strict=True))) for row in rows if row[0]}


@dataclass(frozen=True, slots=True)
class Settings:
    """The disk faults in force: the head of the control file. `account`: unsynced changes have to be logged."""

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
        """Raises OSError, and ValueError for a file that is not a control file."""
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
        """Exclude other helpers of the host's programs from tracing: the kernel allows one tracer at a time.
        Raises OSError, BlockingIOError if another helper traces for too long."""
        with open(self._path, "rb") as file:  # an open file description of our own: forked helpers share the parent's
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
        """The settings in force now."""
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
        """The skews of the wall clock in force now, with the fields of `struct clock_slot`, and their generation."""
        raw = self._consistent()
        slots = [CLOCK_SLOT.unpack_from(raw, HEAD.size + i * CLOCK_SLOT.size) for i in range(CLOCK_SLOTS)]
        return [slot for slot in slots if any(slot) and not slot[5]], HEAD.unpack_from(raw, 0)[1]

    def _consistent(self) -> bytes:
        """The settings as left by a single write."""
        while True:
            raw = self._map[:COUNTERS_OFFSET]
            end = struct.unpack_from("=Q", raw, HEAD.size + CLOCK_SLOTS * CLOCK_SLOT.size)[0]
            if HEAD.unpack_from(raw, 0)[1] == end:
                return raw

    def claim(self, program: int) -> None:
        """Start counting for the program with this number; 0 counts nothing. The harness assigns a slot to one running
        program at a time."""
        self._program = program
        if program:
            row = PROGRAMS_OFFSET + program % PROGRAM_SLOTS * PROGRAM_BYTES
            self._map[row : row + PROGRAM_BYTES] = _PROGRAM.pack(program, *[0] * (len(_COLUMNS) - 1)).ljust(
                PROGRAM_BYTES, b"\0"
            )

    def applied(self, generation: int, reached: int, failed: int) -> None:
        """Report that the program's clocks follow the settings of `generation`."""
        for column, value in (("clock_reached", reached), ("clock_failed", failed), ("clock_generation", generation)):
            offset = self._offset(column)
            if offset is not None:
                struct.pack_into("=Q", self._map, offset, value)

    def trapped(self, generation: int, reached: int, failed: int, error_number: int = 0) -> None:
        """Report from how many processes calls are reported under the settings of `generation`."""
        values = {"traps_reached": reached, "traps_failed": failed, "traps_error": error_number}
        for column, value in (*values.items(), ("traps_generation", generation)):
            offset = self._offset(column)
            if offset is not None:
                struct.pack_into("=Q", self._map, offset, value)

    def passed(self, count: int) -> None:
        """Report how many descriptors of files have, or had, numbers whose calls are not reported."""
        offset = self._offset("passed")
        if offset is not None:
            struct.pack_into("=Q", self._map, offset, count)

    def count_call(self, operation: str) -> None:
        """Count a call on a file under the root; its operation is a column, such as "syncs"."""
        self._add_one(operation)

    def count_unseen(self) -> None:
        """Count a call about a file that the launcher may not inspect."""
        self._add_one("unseen")

    def count_loss(self) -> None:
        """Report that the supervisor has ended before its program."""
        self._add_one("lost")

    def count_recorded(self) -> None:
        """Count a change that the account of unsynced data has seen."""
        self._add_one("recorded")

    def count_clock_reads(self, count: int) -> None:
        """Add to the reads of a skewed clock, unless they are UNCOUNTED."""
        offset = self._offset("clock_reads")
        if offset is not None and count:
            before = struct.unpack_from("=Q", self._map, offset)[0]
            if before != UNCOUNTED:
                struct.pack_into("=Q", self._map, offset, before + count)

    def cannot_count_clock(self) -> None:
        """Report that reads of the program's clock are not counted."""
        offset = self._offset("clock_reads")
        if offset is not None:
            struct.pack_into("=Q", self._map, offset, UNCOUNTED)

    def count_met(self, column: int, operation: str) -> None:
        """Count that a call, already counted as `operation`, met a fault: a column of `COUNTERS`. The count by kind of
        call comes first, then the host's, as in the shim: a reader who sees the program's total finds both there."""
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
        """The offset of the program's count; None if it has none, or has lost its slot to another program."""
        row = PROGRAMS_OFFSET + self._program % PROGRAM_SLOTS * PROGRAM_BYTES
        if not self._program or struct.unpack_from("=Q", self._map, row)[0] != self._program:
            return None
        return row + _COLUMN_OFFSETS[column]

    def _add_one(self, column: str) -> None:
        offset = self._offset(column)
        if offset is not None:
            struct.pack_into("=Q", self._map, offset, struct.unpack_from("=Q", self._map, offset)[0] + 1)
