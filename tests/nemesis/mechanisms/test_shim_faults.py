"""Counts of faults that are in force together on one host."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemesis.mechanisms.launcher.control import UNCOUNTED, ProgramCounts
from nemesis.mechanisms.launcher_archive import why_no_traps
from nemesis.mechanisms.reach import PRELOAD, SECCOMP
from nemesis.mechanisms.shell import ShellError
from nemesis.mechanisms.shim import why_no_shim
from nemesis.mechanisms.shim_controls import ShimControls, ShimPlace
from nemesis.mechanisms.shim_faults import ShimClocks, ShimDisks
from nemesis.target import ClockSkew, DiskFault, FaultMet
from tests.nemesis.mechanisms import launched, test_shim
from tests.nemesis.mechanisms.launched import Program

PROBLEMS = {PRELOAD: why_no_shim(), SECCOMP: why_no_traps()}


class ThisMachine:
    """Control files on this machine; commands are an error."""

    async def run(self, host: str, argv: Sequence[str], **given: Any) -> tuple[int, str, str]:
        raise AssertionError(argv)

    async def overwrite(self, host: str, path: str, data: bytes) -> None:
        with open(path, "r+b", buffering=0) as file:
            file.write(data)

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        return Path(path).read_bytes()[:size_bytes]

    async def now(self, host: str) -> tuple[int, int]:
        return time.time_ns(), time.monotonic_ns()

    def python(self, host: str) -> str:
        raise AssertionError(host)


@pytest.mark.parametrize(
    ("mechanism", "unmet", "met", "call"),
    [
        *(
            (mechanism, *faults)
            for mechanism in (PRELOAD, SECCOMP)
            for faults in (
                ("stall-fsync", "stall", "write 0"),
                ("error-write", "error-fsync", "sync"),
                ("error-fsync", "error-write", "write 0"),
                ("error-fsync", "error-read", "read"),
                ("error-read", "error-fsync", "sync"),
            )
        ),
        (PRELOAD, "shutdown", "error-fsync", "sync"),
        (PRELOAD, "fill", "full", "write 1000"),
    ],
)
def test_a_call_counts_only_for_the_fault_that_affected_it(
    tmp_path: Path, mechanism: str, unmet: str, met: str, call: str
) -> None:
    if PROBLEMS[mechanism] is not None:
        pytest.skip(str(PROBLEMS[mechanism]))
    program = test_shim.Child(tmp_path, program=launched.NUMBER) if mechanism == PRELOAD else Program(tmp_path)
    ask = program.tell if isinstance(program, test_shim.Child) else program.ask

    async def scenario() -> None:
        place = ShimPlace(
            library_path="", launcher_path="", control_path=str(program.control), data_path=str(program.root)
        )
        controls = ShimControls(ThisMachine(), {"n1": place})
        controls.begin("n1", mechanism).number = launched.NUMBER
        disks = ShimDisks(controls)
        await disks.impair("f1", {"n1": DiskFault(kind=unmet)})
        await disks.impair("f2", {"n1": DiskFault(kind=met)})
        ask(call)
        for _ in range(6000):
            if (await disks.met("f2"))["n1"].met:
                break
            await asyncio.sleep(0.01)
        assert (await disks.met("f2"))["n1"].met == 1
        assert (await disks.met("f1"))["n1"].met == 0
        await disks.release_all()
        assert program.answer()

    try:
        ask("clock")
        assert program.answer()  # it has started, and created its file
        asyncio.run(scenario())
    finally:
        program.process.kill()
        program.process.communicate()


@pytest.mark.skipif(PROBLEMS[PRELOAD] is not None, reason=str(PROBLEMS[PRELOAD]))
def test_calls_and_reads_before_a_fault_do_not_count_for_it(tmp_path: Path) -> None:
    program = test_shim.Child(tmp_path, program=launched.NUMBER)

    async def scenario() -> None:
        place = ShimPlace(
            library_path="", launcher_path="", control_path=str(program.control), data_path=str(program.root)
        )
        controls = ShimControls(ThisMachine(), {"n1": place})
        controls.begin("n1", PRELOAD).number = launched.NUMBER
        disks, clocks = ShimDisks(controls), ShimClocks(controls)
        await disks.impair("f1", {"n1": DiskFault(kind="error-fsync")})
        await clocks.skew("f1", {"n1": ClockSkew(offset_ms=5000)})
        assert program.ask("sync") == os.strerror(errno.EIO) and program.ask("clock")
        assert (await disks.met("f1"))["n1"] == FaultMet(1, 1) and (await clocks.met("f1"))["n1"].met
        await disks.impair("f2", {"n1": DiskFault(kind="error-fsync")})
        await clocks.skew("f2", {"n1": ClockSkew(offset_ms=5000)})
        assert (await disks.met("f2"))["n1"] == FaultMet(0, 0)
        assert (await clocks.met("f2"))["n1"] == FaultMet(None, 0)
        await disks.release_all()

    try:
        assert program.ask("clock")
        asyncio.run(scenario())
    finally:
        program.process.kill()
        program.process.communicate()


def test_reads_of_a_program_that_cannot_count_them_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / "control"
    place = ShimPlace(library_path="", launcher_path="", control_path=str(control), data_path="/data")
    controls = ShimControls(ThisMachine(), {"n1": place})
    control.write_bytes(controls.initial_content("n1"))
    clocks = ShimClocks(controls)

    async def counts(host: str) -> dict[int, ProgramCounts]:
        return {1: ProgramCounts(id=1, clock_reads=7), 2: ProgramCounts(id=2, clock_reads=UNCOUNTED)}

    async def scenario() -> None:
        await clocks.skew("f1", {"n1": ClockSkew(offset_ms=5000)})
        monkeypatch.setattr(controls, "counts", counts)
        assert (await clocks.met("f1"))["n1"] == FaultMet(None, None)

    asyncio.run(scenario())


READS_ONE_CLOCK = """
import sys, time
for line in sys.stdin:
    getattr(time, line.strip())()
    print("read", flush=True)
"""

BUMP, SLOW = ClockSkew(offset_ms=5000), ClockSkew(rate_ppm=-600_000, affects_monotonic=True)


@pytest.mark.skipif(PROBLEMS[PRELOAD] is not None, reason=str(PROBLEMS[PRELOAD]))
@pytest.mark.parametrize(
    ("skews", "clock", "expected"),
    [
        ([BUMP, SLOW], "monotonic_ns", [None, None]),
        ([SLOW, BUMP], "time_ns", [None, None]),
        ([BUMP, BUMP], "time_ns", [1, 1]),
        ([BUMP, BUMP], "monotonic_ns", [0, 0]),
        ([BUMP, SLOW], "", [0, 0]),
    ],
    ids=["the monotonic one", "the wall clock", "the only skewed one", "one that is not skewed", "none"],
)
def test_a_read_counts_for_no_skew_if_it_may_have_been_of_another_skewed_clock(
    tmp_path: Path, skews: list[ClockSkew], clock: str, expected: list[int | None]
) -> None:
    """The shim has one count for all clocks of a program."""
    program = test_shim.Child(tmp_path, program=launched.NUMBER, script=READS_ONE_CLOCK)

    async def scenario() -> list[int | None]:
        place = ShimPlace(
            library_path="", launcher_path="", control_path=str(program.control), data_path=str(program.root)
        )
        controls = ShimControls(ThisMachine(), {"n1": place})
        controls.begin("n1", PRELOAD).number = launched.NUMBER
        clocks = ShimClocks(controls)
        for number, skew in enumerate(skews):
            await clocks.skew(f"f{number}", {"n1": skew})
        if clock:
            assert program.ask(clock) == "read"
        return [(await clocks.met(f"f{number}"))["n1"].met for number in range(len(skews))]

    try:
        assert program.ask("time_ns") == "read"
        assert asyncio.run(scenario()) == expected
    finally:
        program.process.kill()
        program.process.communicate()


class Unanswering(ThisMachine):
    """Hosts of which one does not answer while `is_away`; the control files are in memory."""

    def __init__(self) -> None:
        self.is_away = False
        self.written: list[str] = []

    async def overwrite(self, host: str, path: str, data: bytes) -> None:
        if self.is_away and host == "n1":
            raise ShellError(host, ["overwrite"], 1, "no answer")
        self.written.append(host)

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        return bytes(size_bytes)


def controls_of(access: Unanswering) -> ShimControls:
    place = ShimPlace(library_path="", launcher_path="", control_path="c", data_path="d", undo_path="u")
    return ShimControls(access, {"n1": place, "n2": place})


def test_a_host_whose_account_could_not_be_ended_gets_that_when_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        access = Unanswering()
        controls = controls_of(access)
        disks = ShimDisks(controls)
        running = controls.begin("n1", SECCOMP, attaches=True)
        running.is_running = lambda: True

        async def attached(host: str) -> None:
            return None

        monkeypatch.setattr(controls, "attached", attached)
        await disks.expect_cut("f", ["n1"])
        access.is_away = True
        with pytest.raises(ShellError, match="no answer"):
            await disks.release("f")
        access.is_away = False
        access.written.clear()
        await disks.release("f")
        assert access.written == ["n1"]

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["clocks", "disks"])
def test_faults_of_other_hosts_end_even_if_those_of_one_host_cannot_be_ended(kind: str) -> None:
    async def scenario() -> None:
        access = Unanswering()
        controls = controls_of(access)
        if kind == "clocks":
            clocks = ShimClocks(controls)
            faults: Any = clocks
            for host in ("n1", "n2"):
                await clocks.skew(f"of {host}", {host: ClockSkew(offset_ms=5)})
        else:
            faults = disks = ShimDisks(controls)
            for host in ("n1", "n2"):
                await disks.impair(f"of {host}", {host: DiskFault(kind="full")})
        access.is_away = True
        access.written.clear()
        with pytest.raises(ShellError, match="no answer"):
            await faults.release_all()
        assert access.written == ["n2"]
        access.is_away = False
        await faults.release_all()
        assert access.written == ["n2", "n1"]

    asyncio.run(scenario())
