"""Process faults of replicas, on real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.base import HostProcess, Program
from harness.faults import processes
from harness.faults.processes import ReplicaProcesses
from harness.run_state import RunState
from nemesis.target import DOWN, PAUSED, RUNNING, ProcessMember

HOSTS = ["n1", "n2", "n3"]


class Replicas:
    """One sleeping Python process per host."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.current: dict[str, HostProcess] = {}
        self.fail_to_start: set[str] = set()
        self.faults = ReplicaProcesses(HOSTS, process=self.current.get, restart=self.restart)

    async def restart(self, host: str) -> None:
        if host in self.fail_to_start:
            raise RuntimeError(f"{host} does not start")
        program = Program(
            name="sleeper", argv=[sys.executable, "-S", "-c", "import time; time.sleep(600)"], log_name="log"
        )
        self.current[host] = await self.host.spawn(host, program)

    async def states(self) -> list[str]:
        return [(await self.faults.look(host)).state for host in HOSTS]


Run = Callable[[Callable[[Replicas], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path, own_host: Any) -> Run:
    """Runs a test on replicas that have started."""

    def run_it(work: Callable[[Replicas], Awaitable[None]]) -> None:
        async def main() -> None:
            state = RunState.create(f"test-{tmp_path.name}", state_root=str(tmp_path / "states"))
            async with own_host(state, tmp_path) as host:
                made = Replicas(host)
                try:
                    for name in HOSTS:
                        await made.restart(name)
                    await work(made)
                finally:
                    await made.faults.release_all()
            assert state.close()

        asyncio.run(main())

    return run_it


IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignores it", flush=True)
time.sleep(600)
"""


def wait_for_a_line(below: Path, name: str) -> None:
    while not any(path.stat().st_size for path in below.rglob(name)):
        time.sleep(0.01)


def test_a_replica_that_ignores_sigterm_is_killed_and_reported_as_forced(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "TERMINATE_GRACE_S", 0.5)

    async def work(made: Replicas) -> None:
        await made.current["n1"].kill()
        program = Program(name="deaf", argv=[sys.executable, "-S", "-c", IGNORES_SIGTERM], log_name="deaf.log")
        made.current["n1"] = await made.host.spawn("n1", program)
        await asyncio.to_thread(wait_for_a_line, tmp_path, "deaf.log")
        await made.faults.end("f1", ["n1", "n2"], signal_name="TERM")
        views = [await made.faults.look(host) for host in HOSTS]
        assert [view.state for view in views] == [DOWN, DOWN, RUNNING]
        assert [view.was_forced for view in views] == [True, False, False]
        await made.faults.release("f1")
        successor = await made.faults.look("n1")
        assert (successor.was_forced, successor.forced_total) == (False, 1)
        await made.faults.end("f2", ["n1"], signal_name="TERM")  # its successor does not ignore SIGTERM
        assert (await made.faults.look("n1")).was_forced is False
        assert [(await made.faults.look(host)).forced_total for host in HOSTS] == [1, 0, 0]

    run(work)


def wait_until_ended(pid: int) -> None:
    """Wait until a process has ended, without letting the harness notice."""
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
            time.sleep(0.01)


async def kill_externally(process: HostProcess) -> None:
    """Kill a process from outside the harness, and wait until the harness has noticed."""
    assert process.host_pid is not None
    os.kill(process.host_pid, signal.SIGKILL)
    while process.exit_status() is None:  # noqa: ASYNC110 - a process
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_known", [True, False], ids=["and is known to have", "and is not known to have yet"])
def test_a_replica_that_had_exited_is_not_attributed_to_the_fault(run: Run, is_known: bool) -> None:
    async def work(made: Replicas) -> None:
        process = made.current["n1"]
        assert process.host_pid is not None
        if is_known:
            await kill_externally(process)
        else:
            os.kill(process.host_pid, signal.SIGKILL)
            wait_until_ended(process.host_pid)
            assert process.exit_status() is None
        await made.faults.end("f1", ["n1", "n2"])
        views = [await made.faults.look(host) for host in HOSTS]
        assert [view.state for view in views] == [DOWN, DOWN, RUNNING]
        assert [view.ended_by_itself for view in views] == [True, False, False]

    run(work)


def test_an_unexpected_exit_is_logged_when_the_replica_is_restarted(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work(made: Replicas) -> None:
        await made.faults.end("f1", ["n1"])
        await made.faults.release("f1")
        assert caplog.messages == []
        await kill_externally(made.current["n2"])
        await made.faults.release_all()
        assert caplog.messages == ["n2 exited unexpectedly, with status -9; restarting it"]
        assert made.faults.unexpected_exits == {"n2 exited unexpectedly, with status -9": 1}

    with caplog.at_level("WARNING", logger="harness.faults.processes"):
        run(work)


@pytest.mark.parametrize("way", ["kill", "terminate"])
def test_a_replica_ended_by_the_harness_without_a_fault_is_no_unexpected_exit(run: Run, way: str) -> None:
    """As for remounting its file system, or for joining its group."""

    async def work(made: Replicas) -> None:
        await getattr(made.current["n1"], way)()
        await kill_externally(made.current["n2"])
        await getattr(made.current["n2"], way)()
        assert [(await made.faults.look(host)).ended_by_itself for host in HOSTS] == [False, True, False]
        await made.faults.release_all()
        assert made.faults.unexpected_exits == {"n2 exited unexpectedly, with status -9": 1}
        assert await made.states() == [RUNNING] * 3

    run(work)


def test_ended_replicas_are_restarted_when_their_fault_is_released(run: Run) -> None:
    async def work(made: Replicas) -> None:
        before = made.current["n1"]
        await made.faults.end("f1", ["n1"])
        assert await made.states() == [DOWN, RUNNING, RUNNING]
        assert before.exit_status() == -signal.SIGKILL
        await made.faults.end("f2", ["n2"], signal_name="TERM")
        assert made.current["n2"].exit_status() == -signal.SIGTERM
        await made.faults.release("f1")
        assert await made.states() == [RUNNING, DOWN, RUNNING]
        assert (await made.faults.look("n1")).starts == 2
        assert made.current["n1"].pid != before.pid
        await made.faults.release("f1")
        assert (await made.faults.look("n1")).starts == 2

    run(work)


def test_an_interrupted_kill_is_completed_before_the_replica_is_restarted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the kill could hit a replica that counts as running, which nothing would restart."""

    async def work(made: Replicas) -> None:
        process, is_asked = made.current["n1"], asyncio.Event()

        async def break_off() -> None:
            is_asked.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(process, "kill", break_off)
            ending = asyncio.ensure_future(made.faults.end("f1", ["n1"]))
            await is_asked.wait()
            ending.cancel()
            await asyncio.wait([ending])
        await made.faults.release("f1")
        assert process.exit_status() == -signal.SIGKILL
        view = await made.faults.look("n1")
        assert (view.state, view.starts) == (RUNNING, 2)

    run(work)


def test_paused_replicas_resume_when_the_last_fault_is_released(run: Run) -> None:
    async def work(made: Replicas) -> None:
        pids = [made.current[host].pid for host in HOSTS]
        await made.faults.pause("f1", ["n1", "n2"])
        await made.faults.pause("f2", ["n2", "n3"])
        assert await made.states() == [PAUSED] * 3
        await made.faults.release("f1")
        assert await made.states() == [RUNNING, PAUSED, PAUSED]
        await made.faults.release("f2")
        assert await made.states() == [RUNNING] * 3
        assert [made.current[host].pid for host in HOSTS] == pids

    run(work)


def test_a_replica_restarted_while_another_fault_pauses_it_is_paused(run: Run) -> None:
    async def work(made: Replicas) -> None:
        await made.faults.pause("pause", ["n1"])
        await made.faults.end("kill", ["n1"])
        assert (await made.faults.look("n1")).state == DOWN
        await made.faults.release("kill")
        assert (await made.faults.look("n1")).state == PAUSED
        await made.faults.end("kill", ["n1"])
        await made.faults.release("pause")
        assert (await made.faults.look("n1")).state == DOWN
        await made.faults.release("kill")
        assert (await made.faults.look("n1")).state == RUNNING

    run(work)


def test_a_crash_loop_kills_repeatedly_until_it_is_released(run: Run) -> None:
    async def work(made: Replicas) -> None:
        await made.faults.crash_loop("f1", ["n2"], up_s=0.05)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + 20
        while (await made.faults.look("n2")).starts < 5:
            assert loop.time() < deadline_s, "the replica is not being killed"
            await asyncio.sleep(0.01)
        await made.faults.release("f1")
        view = await made.faults.look("n2")
        assert view.state == RUNNING
        await asyncio.sleep(0.2)
        assert await made.faults.look("n2") == view

    run(work)


def test_release_all_ends_every_fault_and_restarts_killed_replicas(run: Run) -> None:
    async def work(made: Replicas) -> None:
        await made.faults.end("f1", ["n1"])
        await made.faults.pause("f2", ["n2"])
        await made.faults.crash_loop("f3", ["n3"], up_s=0.05)
        await made.current["n2"].kill()
        await made.faults.release_all()
        assert await made.states() == [RUNNING] * 3

    run(work)


def test_only_replicas_that_no_fault_keeps_down_are_revived(run: Run) -> None:
    async def work(made: Replicas) -> None:
        await made.faults.end("f1", ["n1"])
        await made.current["n2"].kill()
        assert await made.faults.revive(HOSTS) == ["n2"]
        assert await made.states() == [DOWN, RUNNING, RUNNING]

    run(work)


def test_a_replica_that_fails_to_start_does_not_keep_the_others_down(run: Run) -> None:
    async def work(made: Replicas) -> None:
        await made.faults.end("f1", HOSTS)
        made.fail_to_start.add("n1")
        with pytest.raises(RuntimeError, match="n1 does not start"):
            await made.faults.release("f1")
        assert await made.states() == [DOWN, RUNNING, RUNNING]
        made.fail_to_start.clear()
        await made.faults.release_all()
        assert await made.states() == [RUNNING] * 3

    run(work)


def test_unknown_hosts_and_signals_are_refused(run: Run) -> None:
    async def work(made: Replicas) -> None:
        with pytest.raises(ValueError, match="n9"):
            await made.faults.end("f1", ["n9"])
        with pytest.raises(ValueError, match="KILL or TERM"):
            await made.faults.end("f1", ["n1"], signal_name="HUP")

    run(work)


def test_a_replica_that_runs_on_despite_sigstop_was_not_paused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PAUSE_TIMEOUT_S", 0.1)

    async def pause(self: Any) -> None:
        pass

    async def work(made: Replicas) -> None:
        monkeypatch.setattr(type(made.current["n1"]), "pause", pause)
        with pytest.raises(RuntimeError, match=r"^the replica of n1 is running, not paused$"):
            await made.faults.pause("f1", ["n1"])

    run(work)


def test_strays_of_its_host_are_members_of_a_replica(run: Run) -> None:
    stray = ProcessMember(1, 2, "S", "stray")

    class Strays:
        async def strays(self, host: str) -> list[ProcessMember]:
            return [stray] if host == "n1" else []

        async def adopt_strays(self, host: str) -> None:
            raise AssertionError(host)

    async def work(made: Replicas) -> None:
        faults = ReplicaProcesses(HOSTS, process=made.current.get, restart=made.restart, strays=Strays())
        found = {host: await faults.members(host) for host in ("n1", "n2")}
        assert found["n1"] is not None and found["n2"] is not None
        assert [stray in found[host] for host in ("n1", "n2")] == [True, False]  # type: ignore[operator]
        assert [len(found[host]) for host in ("n1", "n2")] == [2, 1]  # type: ignore[arg-type]

    run(work)
