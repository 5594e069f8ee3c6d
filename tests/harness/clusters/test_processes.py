"""Programs of hosts on this machine are marked, logged, ended in every way, and do not outlive the harness."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.agent_processes import AgentProcess
from harness.clusters.base import Program
from harness.clusters.link_proxy import raise_descriptor_limit
from harness.errors import OperatorError
from harness.run_state import KIND_PROCESS, RunState, process_start_ticks
from nemesis.target import DOWN, PAUSED, RUNNING
from tests.headless import HEADLESS

Eventually = Callable[..., Any]
OwnHost = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[3]


def python(code: str, **more: Any) -> Program:
    return Program(name="child", argv=[sys.executable, "-c", code], log_name="child.log", **more)


SLEEP = python("import time\nprint('up', flush=True)\ntime.sleep(600)")
STUBBORN = python(
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
)


def is_alive(pid: int) -> bool:
    return process_start_ticks(pid) is not None


def pid_of(child: AgentProcess) -> int:
    assert child.pid is not None and child.pid == child.host_pid
    return child.pid


def log_of(child: AgentProcess) -> str:
    return Path(child.log_path).read_text()


def test_a_program_has_the_run_id_in_its_environment_and_a_log(
    tmp_path: Path, run_state: RunState, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            assert [claim.kind for claim in run_state.claims] == [KIND_PROCESS], "the agents' parent"
            code = (
                "import os, sys\nprint(os.environ['SPLITBRAIN_RUN'], os.environ['COLOUR'], os.getcwd(), flush=True)\n"
                "print(os.getpgid(0) == os.getpid() == os.getsid(0), sys.stdin.read() == '', file=sys.stderr)\n"
                "sys.exit(7)"
            )
            child = await host.spawn("n1", python(code, environment={"COLOUR": "red"}))
            assert host.programs.running == [child]
            assert await child.wait() == 7 == child.exit_status()
            assert await child.state() == DOWN
            assert log_of(child) == f"{run_state.run_id} red /\nTrue True\n"
            assert child.log_path == str(tmp_path / "n1" / "child.log")
            assert (child.host, child.name) == ("n1", "child")
            assert not host.programs.running
            again = await host.spawn("n1", python("print('again')"))
            await again.wait()
            assert log_of(again).endswith("True True\nagain\n")
        assert not run_state.claims

    asyncio.run(main())


def test_terminate_sends_sigterm_before_sigkill(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            polite = await host.spawn("n1", SLEEP)
            stubborn = await host.spawn("n2", STUBBORN)
            stopped = await host.spawn("n3", SLEEP)
            await eventually(lambda: all("up" in log_of(child) for child in (polite, stubborn, stopped)))
            await stopped.signal(signal.SIGSTOP)
            assert polite.exit_status() is None
            assert await polite.terminate() == -signal.SIGTERM
            assert await polite.terminate() == -signal.SIGTERM
            assert await stopped.terminate() == -signal.SIGTERM
            assert await stubborn.terminate(grace_s=0.1) == -signal.SIGKILL
            assert not any(is_alive(pid_of(child)) for child in (polite, stubborn, stopped))

    asyncio.run(main())


def test_a_killed_or_exited_program_takes_its_process_group_with_it(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            code = (
                "import subprocess, sys, time\n"
                "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
                "print(child.pid, flush=True)\ntime.sleep(WAIT)"
            )
            killed = await host.spawn("n1", python(code.replace("WAIT", "600")))
            leaving = await host.spawn("n2", python(code.replace("WAIT", "0")))
            await eventually(lambda: log_of(killed).endswith("\n") and log_of(leaving).endswith("\n"))
            await killed.kill()
            assert killed.exit_status() == -signal.SIGKILL
            assert await leaving.wait() == 0
            for child in (killed, leaving):
                grandchild = int(log_of(child))
                await eventually(lambda pid=grandchild: not is_alive(pid))

    asyncio.run(main())


FAMILY = """
import os, sys, time

def rest(name):
    os.write(1, f"{name} {os.getpid()}\\n".encode())  # in one write, without Python's buffers
    while True:
        time.sleep(0.01)

if os.fork() == 0:
    rest("child")
if os.fork() == 0:
    os.setsid()
    rest("session")
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", sys.argv[1]], os.environ)
rest("first")
"""
"""Four processes: the first one, a child, one in a session of its own, and an orphan that only its environment
identifies."""
ORPHAN = "import os, time\nos.write(1, b'orphan %d\\n' % os.getpid())\nwhile True: time.sleep(0.01)"


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_every_process_of_a_program_is_listed_paused_resumed_and_killed(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            other = await host.spawn("n2", SLEEP)
            argv = [sys.executable, "-c", FAMILY, ORPHAN]
            family = await host.spawn("n1", Program(name="child", argv=argv, log_name="child.log"))
            await eventually(lambda: log_of(family).count("\n") == 4)
            pids = {name: int(pid) for name, pid in (line.split() for line in log_of(family).splitlines())}
            members = await family.members()
            assert {member.pid for member in members} == set(pids.values())
            assert all(member.start_ticks == process_start_ticks(member.pid) for member in members)
            await family.pause()
            assert [state_of(pid) for pid in pids.values()] == ["T"] * 4
            await family.resume()
            assert all(state_of(pid) in "RS" for pid in pids.values())
            await family.kill()
            await eventually(lambda: all(state_of(pid) in ("", "Z") for pid in pids.values()))
            assert await family.members() == []
            assert [member.pid for member in await other.members()] == [pid_of(other)]

    asyncio.run(main())


def test_a_program_continued_while_it_is_being_stopped_keeps_running(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    """As when a stop was abandoned that the agent still carries out."""

    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            family = await host.spawn(
                "n1", Program(name="child", argv=[sys.executable, "-c", FAMILY, ORPHAN], log_name="log")
            )
            await eventually(lambda: log_of(family).count("\n") == 4)
            pids = [int(line.split()[1]) for line in log_of(family).splitlines()]
            for _ in range(10):
                await asyncio.gather(family.signal(signal.SIGSTOP), family.signal(signal.SIGCONT))
                assert all(state_of(pid) in "RS" for pid in pids)

    asyncio.run(main())


HEADLESS_FAMILY = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", sys.argv[1]], os.environ)
{HEADLESS}
""".replace("import os", "import os, sys", 1)
"""Two processes whose first threads have ended: the first one, and an orphan that only its environment identifies."""


def test_a_process_whose_first_thread_has_ended_is_listed_paused_resumed_and_killed(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            argv = [sys.executable, "-c", HEADLESS_FAMILY, HEADLESS]
            family = await host.spawn("n1", Program(name="child", argv=argv, log_name="child.log"))
            await eventually(lambda: log_of(family).count("\n") == 2)
            pids = {int(line.split()[1]) for line in log_of(family).splitlines()}
            assert pid_of(family) in pids and await family.state() == RUNNING
            assert {member.pid: member.letter in "RS" for member in await family.members()} == dict.fromkeys(pids, True)
            await family.pause()
            assert await family.state() == PAUSED
            assert {member.pid: member.letter for member in await family.members()} == dict.fromkeys(pids, "T")
            await family.resume()
            assert await family.state() == RUNNING
            await family.kill()
            await eventually(lambda: not any(map(is_alive, pids)))
            assert await family.state() == DOWN and await family.members() == []

    asyncio.run(main())


WAITS_IN_KERNEL = """
import ctypes, os, signal
if os.fork() == 0:
    os.write(1, b"waits %d\\n" % os.getpid())
    ctypes.CDLL(None).vfork()
signal.pause()
"""
"""A child that waits in vfork for its own child to execute a program, which never happens."""


def test_a_pending_stop_of_a_process_that_waits_in_the_kernel_is_reported(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            argv = [sys.executable, "-c", WAITS_IN_KERNEL]
            program = await host.spawn("n1", Program(name="child", argv=argv, log_name="child.log"))
            await eventually(lambda: log_of(program).endswith("\n"))
            waits = int(log_of(program).split()[1])
            await eventually(lambda: state_of(waits) == "D")
            for work, meets_signal in ((program.pause, True), (program.resume, False)):
                await work()
                found = {member.pid: (member.letter, member.meets_signal) for member in await program.members()}
                assert len(found) == 3 and found[waits] == ("D", meets_signal)

    asyncio.run(main())


def test_programs_that_still_run_end_with_the_agents(
    tmp_path: Path, run_state: RunState, eventually: Eventually, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            children = [await host.spawn(f"n{number}", SLEEP) for number in range(5)]
            await host.programs.stop_all()
            assert await host.programs.stop_all() == []
            assert all(child.exit_status() is not None for child in children)
            late = await host.spawn("n1", STUBBORN)
            await eventually(lambda: "up" in log_of(late))
            await host.agents.stop()
            await eventually(lambda: not is_alive(pid_of(late)) and late.exit_status() == -signal.SIGKILL)
        assert not run_state.claims

    asyncio.run(main())


def test_a_program_that_cannot_be_started_is_reported_in_one_line(
    tmp_path: Path, run_state: RunState, own_host: OwnHost
) -> None:
    async def main() -> None:
        async with own_host(run_state, tmp_path) as host:
            missing = Program(name="broker", argv=["/nowhere/broker"], log_name="log")
            with pytest.raises(OperatorError, match=r"cannot run broker on n1: .*/nowhere/broker: No such file") as one:
                await host.spawn("n1", missing)
            assert "\n" not in str(one.value)
            (tmp_path / "n2").write_text("a file where a directory should be")
            with pytest.raises(OperatorError, match=r"cannot run broker on n2: .*Not a directory|File exists"):
                await host.spawn("n2", missing)
            assert not host.programs.running

    asyncio.run(main())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the death signals of Linux")
def test_nothing_outlives_a_killed_harness(tmp_path: Path, eventually: Eventually) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("processes_parent.py")), str(tmp_path / "s"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 4 and all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    asyncio.run(eventually(lambda: not any(is_alive(pid) for pid in pids)))


def test_raising_the_descriptor_limit_again_gives_the_same_limit() -> None:
    limit = raise_descriptor_limit()
    assert limit == raise_descriptor_limit() > 0
