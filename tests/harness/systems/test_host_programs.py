"""Several programs of a host as one process: hit together, and not hit while only some are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from harness.faults.processes import ReplicaProcesses
from harness.systems.host_programs import HostPrograms
from nemesis.target import DOWN, PAUSED, RUNNING, ProcessMember


class Fake:
    """A program in memory."""

    host = "n1"
    pid = None

    def __init__(self, number: int = 1) -> None:
        self.host_pid = number
        self.now = RUNNING
        self.ended_with = -9
        self.ignores_sigterm = False
        self.ended_by_harness = False

    def exit_status(self) -> int | None:
        return self.ended_with if self.now == DOWN else None

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        self.now = DOWN
        self.ended_with = -9 if self.ignores_sigterm else 0
        return self.ended_with

    async def kill(self) -> None:
        self.now = DOWN

    async def pause(self) -> None:
        self.now = DOWN if self.now == DOWN else PAUSED

    async def resume(self) -> None:
        self.now = DOWN if self.now == DOWN else RUNNING

    async def state(self) -> str:
        return self.now


def made(*states: str) -> tuple[HostPrograms, Sequence[Fake]]:
    programs = [Fake(number) for number in range(1, len(states) + 1)]
    for program, state in zip(programs, states, strict=True):
        program.now = state
    return HostPrograms("n1", dict(zip(("kv", "sentinel"), programs, strict=False))), programs


def test_pause_resume_and_kill_apply_to_every_program() -> None:
    async def main() -> None:
        process, programs = made(RUNNING, RUNNING)
        await process.pause()
        assert await process.state() == PAUSED and {one.now for one in programs} == {PAUSED}
        await process.resume()
        assert await process.state() == RUNNING
        await process.kill()
        assert await process.state() == DOWN and process.exit_status() == -9 and process.host_pid == 1

    asyncio.run(main())


def test_one_program_that_ignores_sigterm_makes_the_end_a_forced_one() -> None:
    async def main() -> None:
        process, programs = made(RUNNING, RUNNING)
        assert await process.terminate() == 0
        process, programs = made(RUNNING, RUNNING)
        programs[1].ignores_sigterm = True
        assert await process.terminate() == -9
        programs[0].now = RUNNING  # a program that SIGKILL ended earlier does not count
        assert await process.terminate() == 0 and programs[1].ended_with == -9

    asyncio.run(main())


@pytest.mark.parametrize("other", [DOWN, PAUSED])
def test_the_state_is_mixed_while_a_fault_has_hit_only_one_of_two_programs(other: str) -> None:
    process, _ = made(RUNNING, other)
    assert asyncio.run(process.state()) == f"kv running, sentinel {other}"
    assert process.exit_status() is None


def test_the_program_that_ended_is_named() -> None:
    process, _ = made(RUNNING, DOWN)
    assert process.ended == ["sentinel"]
    assert process.first_problem() == "program sentinel of n1 ended with status -9"


def test_a_kill_ends_the_remaining_programs_and_its_release_starts_all() -> None:
    """One program had exited: the other must be killed too, and both be started on release."""

    async def main() -> None:
        process, programs = made(RUNNING, DOWN)
        current = {"n1": process}

        async def restart(host: str) -> None:
            fresh = {name: Fake() for name in current[host].ended}
            current[host] = current[host].with_started(fresh)

        faults = ReplicaProcesses(["n1"], process=current.get, restart=restart)
        await faults.end("f1", ["n1"])
        assert programs[0].now == DOWN
        await faults.release("f1")
        assert await current["n1"].state() == RUNNING

    asyncio.run(main())


def test_an_unexpected_exit_is_reported_and_followed_by_a_start_after_the_faults() -> None:
    async def main() -> None:
        process, _ = made(RUNNING, DOWN)
        current = {"n1": process}

        async def restart(host: str) -> None:
            current[host] = current[host].with_started({"sentinel": Fake()})

        faults = ReplicaProcesses(["n1"], process=current.get, restart=restart)
        assert (await faults.look("n1")).ended_by_itself
        await faults.release_all()
        told = "n1 exited unexpectedly, in part: program sentinel of n1 ended with status -9"
        assert faults.unexpected_exits == {told: 1}
        assert await current["n1"].state() == RUNNING and not (await faults.look("n1")).ended_by_itself

    asyncio.run(main())


@pytest.mark.parametrize("who", [("harness", "harness"), ("harness", "itself"), ("itself", "itself")])
def test_an_end_is_unexpected_unless_the_harness_ended_every_program(who: Sequence[str]) -> None:
    process, programs = made(DOWN, DOWN)
    for program, ended_by in zip(programs, who, strict=True):
        program.ended_by_harness = ended_by == "harness"
    faults = ReplicaProcesses(["n1"], process=lambda host: process, restart=lambda host: asyncio.sleep(0))
    assert asyncio.run(faults.look("n1")).ended_by_itself == ("itself" in who)


def test_a_look_lists_the_process_ids_of_all_programs_that_have_not_ended() -> None:
    process = HostPrograms("n1", {"kv": Fake(1), "sentinel": Fake(2), "exporter": Fake(3)})
    faults = ReplicaProcesses(["n1"], process=lambda host: process, restart=lambda host: asyncio.sleep(0))

    async def main() -> None:
        assert list((await faults.look("n1")).pids) == [1, 2, 3]
        fresh = Fake(2)
        fresh.now = DOWN
        ended = process.with_started({"sentinel": fresh})
        other = ReplicaProcesses(["n1"], process=lambda host: ended, restart=lambda host: asyncio.sleep(0))
        assert list((await other.look("n1")).pids) == [1, 3]
        await process.kill()
        assert list((await faults.look("n1")).pids) == []

    asyncio.run(main())


class Family(Fake):
    """A program whose host lists its processes."""

    async def members(self) -> list[ProcessMember]:
        return [ProcessMember(self.host_pid, 7, "S", "kv"), ProcessMember(self.host_pid + 100, 8, "S", "io")]


def test_the_processes_of_a_host_are_those_of_all_its_programs() -> None:
    process = HostPrograms("n1", {"kv": Family(1), "sentinel": Family(2), "quiet": Fake(3)})
    assert [member.pid for member in asyncio.run(process.members())] == [1, 101, 2, 102]
