"""What the clock driver reports of a program's processes, and the offset of a skew, on a fake vDSO."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from nemesis.mechanisms.launcher import vdso
from nemesis.mechanisms.launcher.tracing import TracingError
from nemesis.mechanisms.launcher.vdso import ClockDriver, ClockError, Image

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the driver is for x86-64")

HOUR_NS = 3_600 * 10**9
HOUR = (HOUR_NS, 0, 0, 0, 0, 0, 0)
NUMBERS = ("offset_ns", "rate_ppb", "since_ns", "strobe_ns", "period_ns", "monotonic", "step_ns")


class FakeControl:
    def __init__(self) -> None:
        self.reports: list[tuple[int, int, int]] = []
        self.reads = 0
        self.cannot_count = 0

    def applied(self, generation: int, reached: int, failed: int) -> None:
        self.reports.append((generation, reached, failed))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        yield

    def count_clock_reads(self, count: int) -> None:
        self.reads += count

    def cannot_count_clock(self) -> None:
        self.cannot_count += 1


class Machine:
    """Processes and the vDSOs that they have: address, whether it is patched, its offset and its count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
        self.control = FakeControl()
        self.driver = ClockDriver(self.control, os.getpid())  # type: ignore[arg-type]
        self.driver._tree.processes = dict.fromkeys(pids, 0)
        self.bases = dict.fromkeys(pids, 0x1000)
        self.patched: set[int] = set()
        self.counts: dict[int, int | None] = dict.fromkeys(pids, 0)
        self.offsets_ns: dict[int, int] = {}
        self.problems: dict[int, Exception] = {}
        for name in ("locate", "base_of", "patch", "restore", "_is_patched", "_count_of", "write_memory"):
            monkeypatch.setattr(vdso, name, getattr(self, name.strip("_")))

    def base_of(self, pid: int) -> int:
        return self.bases[pid]

    def locate(self, pid: int) -> Image:
        if pid in self.problems:
            raise self.problems[pid]
        return Image(self.bases[pid], 0x2000, {}, self.bases[pid] + 0x1800)

    def is_patched(self, pid: int, image: Image) -> bool:
        return pid in self.patched

    def patch(self, pid: int, image: Image) -> None:
        self.patched.add(pid)
        self.counts[pid] = 0

    def restore(self, pid: int, image: Image) -> None:
        self.patched.discard(pid)

    def count_of(self, pid: int, image: Image) -> int | None:
        return self.counts[pid]

    def write_memory(self, pid: int, address: int, data: bytes) -> None:
        assert pid in self.patched and address == self.bases[pid] + 0x1800
        self.offsets_ns[pid] = struct.unpack("=q", data)[0]

    def apply(self, *slots: tuple[int, ...]) -> Any:
        self.driver._apply(list(slots), 7)
        return self.control.reports[-1]


def test_each_process_is_reported_as_reached_or_failed_unless_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, *range(1, 9))
    machine.problems = {
        2: ClockError("the vDSO lacks a clock function"),
        3: TracingError("it does not stop"),
        4: OSError(errno.EPERM, "it may not be traced"),
        5: OSError(errno.ESRCH, "it has ended"),
        6: OSError(errno.ENOENT, "it has ended"),
        7: OSError(errno.EIO, "it is ending"),
    }
    assert machine.apply(HOUR) == (7, 2, 3)
    assert machine.offsets_ns == {1: HOUR_NS, 8: HOUR_NS} and len(machine.control.reports) == 1


def test_skews_add_up_and_the_kernel_s_code_comes_back_after_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1, 2)
    machine.apply(HOUR, HOUR)
    assert machine.offsets_ns == {1: 2 * HOUR_NS, 2: 2 * HOUR_NS}
    machine.apply(HOUR)
    assert machine.offsets_ns == {1: HOUR_NS, 2: HOUR_NS} and machine.patched == {1, 2}
    assert machine.apply() == (7, 2, 0) and machine.patched == set()


def test_a_process_that_has_executed_another_program_is_patched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1)
    machine.apply(HOUR)
    machine.bases[1], machine.offsets_ns = 0x7000, {}
    machine.patched.clear()
    machine.apply(HOUR)
    assert machine.patched == {1} and machine.offsets_ns == {1: HOUR_NS}


def test_readings_are_counted_once_and_those_of_a_parent_not_again_for_its_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 1, 2)
    del machine.driver._tree.processes[2]
    machine.apply(HOUR)
    machine.counts[1] = 5
    machine.apply(HOUR)
    assert machine.control.reads == 5
    machine.driver._tree.processes[2] = 0  # forked, with its parent's patched copy and count
    machine.patched.add(2)
    machine.counts[2] = 5
    machine.apply(HOUR)
    assert machine.control.reads == 5
    machine.counts |= {1: 6, 2: 8}
    machine.apply()
    assert machine.control.reads == 5 + 1 + 3, "the last readings count before the code is restored"


def test_readings_that_cannot_be_counted_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1)
    machine.apply(HOUR)
    machine.counts[1] = None
    machine.apply(HOUR)
    assert machine.control.cannot_count == 1 and machine.control.reads == 0


@pytest.mark.parametrize(
    ("slot", "after_ns", "offset_ns"),
    [
        ({"offset_ns": -5, "rate_ppb": 500_000_000}, 100, 45),
        ({"offset_ns": -5, "rate_ppb": -500_000_000}, 100, -55),
        ({"rate_ppb": 500_000_000, "step_ns": 30}, 100, 20),
        ({"rate_ppb": -500_000_000, "step_ns": 30}, 100, -20),
        ({"strobe_ns": 9, "period_ns": 100}, 40, 0),
        ({"strobe_ns": 9, "period_ns": 100}, 60, 9),
        ({"strobe_ns": 9, "period_ns": 100, "offset_ns": 1}, 110, 1),
    ],
)
def test_a_skew_has_an_offset_a_rate_with_steps_and_a_strobe(
    slot: dict[str, int], after_ns: int, offset_ns: int
) -> None:
    since_ns = 10**18
    numbers = tuple({**dict.fromkeys(NUMBERS, 0), "since_ns": since_ns, **slot}.values())
    assert vdso._slot_offset_ns(numbers, since_ns + after_ns) == offset_ns
