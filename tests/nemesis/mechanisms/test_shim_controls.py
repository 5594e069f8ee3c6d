"""Why a supervisor's counts are no evidence about a program, in the order of what is said first."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from nemesis.mechanisms.launcher.control import ProgramCounts
from nemesis.mechanisms.reach import PRELOAD, SECCOMP
from nemesis.mechanisms.shim_controls import ShimControls, ShimPlace
from nemesis.target import DiskFault, ProcessMember

LOOKED = {
    "pid": 7, "program": "/server", "kind": "go", "problem": None, "maps": [], "unseen": [], "clock": None,
    "filters": 1, "root": None, "written": [],
}  # fmt: skip


def controls_with(counts: ProgramCounts | None, *, strays: list[ProcessMember] | None = None, **seen: Any) -> Any:
    """Control files of a host whose program 7 is supervised, has these counts and looks like LOOKED, or as `seen`."""

    async def stray(host: str) -> list[ProcessMember]:
        return strays or []

    place = ShimPlace(library_path="/shim.so", launcher_path="", control_path="/control", data_path="/data")
    controls: Any = ShimControls(object(), {"n1": place}, strays=stray)  # type: ignore[arg-type]
    program = controls.begin("n1", SECCOMP, attaches=True)
    program.pid, program.started_s = 7, float("-inf")
    controls.faults["n1"].add_disk_fault("f1", DiskFault(kind="stall-fsync"))

    async def counted(host: str) -> dict[int, ProgramCounts]:
        return {} if counts is None else {program.number: counts}

    async def looked(host: str, pid: int) -> list[dict[str, Any]]:
        return [{**LOOKED, **seen}]

    controls.counts, controls._look = counted, looked
    return controls


def counts(**columns: int) -> ProgramCounts:
    """Those of a supervised program whose calls are reported."""
    return ProgramCounts(**{"id": 1, "traps_reached": 1, **columns})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (counts(), None),
        (None, "the calls of the replica of n1 are not counted: its supervisor has not started"),
        (counts(lost=1), "the supervisor of the replica of n1 was lost: its system calls are no longer seen"),
        (counts(unseen=1), "the supervisor of the replica of n1 may not inspect its files: it lacks the rights"),
        (counts(unseen=1, syncs=1), None),
        (
            counts(traps_failed=2, traps_error=errno.EEXIST),
            "the calls of 2 running processes of the replica of n1 cannot be reported: the program has a seccomp "
            "filter of its own",
        ),
        (
            counts(passed=3),
            "3 files of the replica of n1 have, or had meanwhile, descriptors whose calls are not reported (made by "
            "dup2, received from another program, or opened before a change of user)",
        ),
        (
            counts(traps_reached=0),
            "the calls of the replica of n1 are not reported yet: its supervisor does not respond",
        ),
    ],
)
def test_a_supervised_program_is_reached_if_its_calls_are_reported(
    given: ProgramCounts | None, problem: str | None
) -> None:
    assert asyncio.run(controls_with(given).reaches("n1", 7)) == problem


def test_what_its_processes_look_like_counts_beside_the_word_of_the_supervisor() -> None:
    problem = asyncio.run(controls_with(counts(), filters=0).reaches("n1", 7))
    assert problem == (
        "the replica of n1 is out of reach: the calls of process 7 (/server) are not reported: it left its program "
        "before it could be seen"
    )


def test_a_process_that_cannot_be_traced_to_its_program_is_out_of_reach() -> None:
    stray = ProcessMember(9, 100, "S", "daemon")
    problem = asyncio.run(controls_with(counts(), strays=[stray]).reaches("n1", 7))
    assert problem is not None and problem.startswith(
        f"the replica of n1 is out of reach: {stray} was started in the background without the environment"
    )


@pytest.mark.parametrize("needs_clock", [False, True])
def test_a_program_that_could_not_be_prepared_is_out_of_reach(needs_clock: bool) -> None:
    controls = controls_with(counts(), clock={"offset": 1})
    program = controls._program_of("n1", 7)
    assert asyncio.run(controls.reaches("n1", 7, needs_clock=needs_clock)) is None
    program.problem, program.clock_problem = "no disk", "no clock"
    said = "no clock" if needs_clock else "no disk"
    found = asyncio.run(controls.reaches("n1", 7, needs_clock=needs_clock))
    assert found == f"the replica of n1 is out of reach: {said}"


def test_counts_of_programs_that_the_harness_did_not_start_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe runs under the same faults as the replica."""
    controls = controls_with(None)
    del controls.counts
    own = controls.begin("n1", PRELOAD).number
    others = {own: ProgramCounts(id=own, syncs=1), own + 1: ProgramCounts(id=own + 1, syncs=5)}
    monkeypatch.setattr("nemesis.mechanisms.shim_controls.parse_programs", lambda content: others)

    async def content(host: str) -> bytes:
        return b""

    monkeypatch.setattr(controls, "_content", content)
    assert asyncio.run(controls.counts("n1")) == {own: others[own]}
