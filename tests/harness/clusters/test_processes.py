"""Children are marked, logged, claimed, ended in every way, and do not outlive the harness."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.base import Program
from harness.clusters.processes import ChildProcess, Processes, raise_descriptor_limit
from harness.errors import OperatorError
from harness.run_state import KIND_PROCESS, RunState, process_start_ticks

Eventually = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[3]


def python(code: str, **more: Any) -> Program:
    return Program(name="child", argv=[sys.executable, "-c", code], log_name="child.log", **more)


SLEEP = python("import time\nprint('up', flush=True)\ntime.sleep(600)")
STUBBORN = python(
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
)


def is_alive(pid: int) -> bool:
    return process_start_ticks(pid) is not None


def log_of(child: ChildProcess) -> str:
    return Path(child.log_path).read_text()


def test_a_child_runs_marked_logged_and_claimed(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        processes = Processes(run_state, str(tmp_path / "logs"))
        code = (
            "import os, sys\nprint(os.environ['SPLITBRAIN_RUN'], os.environ['COLOUR'], os.getcwd(), flush=True)\n"
            "print(os.getpgid(0) == os.getpid() == os.getsid(0), sys.stdin.read() == '', file=sys.stderr)\n"
            "sys.exit(7)"
        )
        child = await processes.spawn("n1", python(code, environment={"COLOUR": "red"}), cwd=str(tmp_path))
        assert any(claim.kind == KIND_PROCESS and claim.ident == str(child.pid) for claim in run_state.claims)
        assert processes.running == [child]
        assert await child.wait() == 7 == child.exit_status()
        assert log_of(child) == f"{run_state.run_id} red {tmp_path}\nTrue True\n"
        assert child.log_path == str(tmp_path / "logs" / "n1" / "child.log")
        assert (child.host, child.name) == ("n1", "child")
        assert not run_state.claims and not processes.running
        again = await processes.spawn("n1", python("print('again')"))
        await again.wait()
        assert log_of(again).endswith("True True\nagain\n")

    asyncio.run(main())


def test_terminate_is_polite_first(tmp_path: Path, run_state: RunState, eventually: Eventually) -> None:
    async def main() -> None:
        processes = Processes(run_state, str(tmp_path))
        polite = await processes.spawn("n1", SLEEP)
        stubborn = await processes.spawn("n2", STUBBORN)
        stopped = await processes.spawn("n3", SLEEP)
        await eventually(lambda: all("up" in log_of(child) for child in (polite, stubborn, stopped)))
        stopped.signal(signal.SIGSTOP)
        assert polite.exit_status() is None
        assert await polite.terminate() == -signal.SIGTERM
        assert await polite.terminate() == -signal.SIGTERM
        assert await stopped.terminate() == -signal.SIGTERM
        assert await stubborn.terminate(grace_s=0.1) == -signal.SIGKILL
        assert not any(is_alive(child.pid) for child in (polite, stubborn, stopped))

    asyncio.run(main())


def test_kill_takes_the_whole_group(tmp_path: Path, run_state: RunState, eventually: Eventually) -> None:
    async def main() -> None:
        processes = Processes(run_state, str(tmp_path))
        code = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            "print(child.pid, flush=True)\ntime.sleep(WAIT)"
        )
        killed = await processes.spawn("n1", python(code.replace("WAIT", "600")))
        leaving = await processes.spawn("n2", python(code.replace("WAIT", "0")))
        await eventually(lambda: log_of(killed).endswith("\n") and log_of(leaving).endswith("\n"))
        await killed.kill()
        assert killed.exit_status() == -signal.SIGKILL
        assert await leaving.wait() == 0
        for child in (killed, leaving):
            grandchild = int(log_of(child))
            await eventually(lambda pid=grandchild: not is_alive(pid))

    asyncio.run(main())


def test_stop_all_ends_everything_at_once(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        processes = Processes(run_state, str(tmp_path))
        children = [await processes.spawn(f"n{number}", SLEEP) for number in range(5)]
        await processes.stop_all()
        await processes.stop_all()
        assert all(child.exit_status() is not None for child in children)
        assert not run_state.claims

    asyncio.run(main())


def test_without_pidfds_children_are_looked_at(
    tmp_path: Path, run_state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("harness.clusters.processes.pidfd_open", refuse)

    async def main() -> None:
        processes = Processes(run_state, str(tmp_path))
        others = [await processes.spawn(f"n{number}", SLEEP) for number in range(3, 40)]
        ended = await processes.spawn("n1", python("raise SystemExit(3)"))
        killed = await processes.spawn("n2", SLEEP)
        assert await ended.wait() == 3
        await killed.kill()
        assert all(child.exit_status() is None for child in others)
        await processes.stop_all()
        assert killed.exit_status() == -signal.SIGKILL
        assert not run_state.claims

    asyncio.run(main())


def test_a_program_that_cannot_run_is_one_line(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        processes = Processes(run_state, str(tmp_path))
        missing = Program(name="broker", argv=["/nowhere/broker"], log_name="log")
        with pytest.raises(OperatorError, match="cannot run broker on n1: /nowhere/broker: No such file"):
            await processes.spawn("n1", missing)
        (tmp_path / "n2").write_text("a file where a directory should be")
        with pytest.raises(OperatorError, match="cannot write the log"):
            await processes.spawn("n2", missing)
        assert not run_state.claims and not processes.running

    asyncio.run(main())


def test_a_child_that_cannot_be_claimed_does_not_run(tmp_path: Path, run_state: RunState) -> None:
    pids: list[int] = []

    def refuse(pid: int) -> None:
        pids.append(pid)
        raise OSError("no space for the claim")

    async def main() -> None:
        run_state.claim_process = refuse  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no space"):
            await Processes(run_state, str(tmp_path)).spawn("n1", SLEEP)

    asyncio.run(main())
    assert len(pids) == 1 and not is_alive(pids[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="death signals are Linux's")
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
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    asyncio.run(eventually(lambda: not any(is_alive(pid) for pid in pids)))


def test_the_descriptor_limit_is_raised_to_what_is_allowed() -> None:
    limit = raise_descriptor_limit()
    assert limit == raise_descriptor_limit() > 0
