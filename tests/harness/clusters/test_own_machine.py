"""The shim on hosts of this machine: it takes effect wherever the store is, and is removed with the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.cleanup import clean
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable, Program
from harness.clusters.local import LocalCluster
from harness.errors import HarnessError, OperatorError
from harness.run_state import KIND_PROCESS, RunState, load_run, process_start_ticks
from nemesis.mechanisms import shim
from nemesis.mechanisms.shim import library_directories, why_no_shim
from nemesis.target import ClockSkew, DiskFault

NO_SHIM = why_no_shim()
pytestmark = pytest.mark.skipif(NO_SHIM is not None, reason=str(NO_SHIM))

LOOK = """
import os, sys, time
print(time.time())
try:
    os.pwrite(os.open(os.path.join(sys.argv[1], "file"), os.O_RDWR | os.O_CREAT), b"x", 0)
    print("written")
except OSError as error:
    print(error.strerror)
"""

HARD_NAMES = ["a store", "10:30:00", "tab\there", "$ORIGIN", "$LIB and: more"]
"""Parts of paths at which the loader splits LD_PRELOAD, or which it replaces."""


def cluster_in(work_dir: Path, run: RunState, port: int) -> LocalCluster:
    cluster = LocalCluster(node_count=1, run=run, work_dir=str(work_dir), ports=[port])
    cluster.prepare({("clocks", "wall"), ("disks", "full")})
    return cluster


async def seen_by_a_program(cluster: LocalCluster) -> tuple[float, str]:
    """The clock offset of a program on the host, in seconds, and the outcome of its write to the data."""
    argv = [sys.executable, "-I", "-S", "-c", LOOK, cluster.data_dir("n1")]
    process = await cluster.spawn("n1", Program(name="look", argv=argv, log_name="look.log"))
    assert await asyncio.wait_for(process.wait(), 60) == 0
    clock, write = Path(process.log_path).read_text().splitlines()[-2:]
    return float(clock) - time.time(), write


def test_a_store_whose_path_is_not_utf8_is_refused_in_one_line(tmp_path: Path) -> None:
    run = RunState.create(f"test-{os.getpid()}-name", state_root=str(tmp_path / "states"))
    with pytest.raises(OperatorError, match=r"is not valid UTF-8, .*: choose another place with --store DIR") as caught:
        cluster_in(tmp_path / "not UTF-8 \udcff", run, 23911)
    assert "\n" not in str(caught.value)
    assert run.close()


@pytest.mark.parametrize("name", HARD_NAMES)
def test_faults_take_effect_wherever_the_store_is(tmp_path: Path, name: str) -> None:
    work_dir = tmp_path / name / "logs"

    async def main() -> None:
        run = RunState.create(f"test-{os.getpid()}-{abs(hash(name))}", state_root=str(tmp_path / "states"))
        cluster = cluster_in(work_dir, run, 23911)
        await cluster.start()
        try:
            assert cluster.clocks is not None and cluster.disks is not None
            await cluster.clocks.skew("c", {"n1": ClockSkew(offset_ms=-3_600_000)})
            await cluster.disks.impair("d", {"n1": DiskFault(kind="full")})
            offset_s, write = await seen_by_a_program(cluster)
            assert -3700 < offset_s < -3500
            assert write == "No space left on device"
            await cluster.clocks.release("c")
            await cluster.disks.release("d")
            offset_s, write = await seen_by_a_program(cluster)
            assert abs(offset_s) < 100 and write == "written"
        finally:
            await cluster.stop()
        assert run.close()
        assert not os.path.exists(os.path.join(library_directories()[0], f"splitbrain-{run.run_id}-shim"))

    asyncio.run(main())


def test_a_temporary_directory_that_the_loader_cannot_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    monkeypatch.setenv("TMPDIR", str(good))
    assert library_directories()[0] == str(good)
    for name in HARD_NAMES:
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        assert str(tmp_path / name) not in library_directories()
        assert why_no_shim.__wrapped__() is None, "the shim works in another directory"
    (tmp_path / "link").symlink_to(tmp_path / HARD_NAMES[0])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    assert str(tmp_path / "link") not in library_directories()


def test_a_library_without_effect_stops_the_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(shim, "build_shim", lambda: b"no library")
    run = RunState.create(f"test-{os.getpid()}-broken", state_root=str(tmp_path / "states"))
    with pytest.raises(ClusterUnavailable, match="does not reach"):
        asyncio.run(cluster_in(tmp_path / "logs", run, 23912).start())
    assert run.close(), "every claim was released"
    assert not list(tmp_path.glob("splitbrain-*"))


def test_clean_removes_the_library_of_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    states = tmp_path / "states"
    program = f"""
import asyncio, os, signal
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.run_state import RunState
run = RunState.create("killed-run", state_root={str(states)!r})
cluster = LocalCluster(node_count=1, run=run, work_dir={str(tmp_path / "logs")!r}, ports=[23913])
cluster.prepare({{("clocks", "wall")}})
asyncio.run(cluster.start())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    left = {path.name: path for path in tmp_path.glob("splitbrain-*")}
    assert sorted(left) == ["splitbrain-killed-run-agents", "splitbrain-killed-run-shim"]
    assert list(left["splitbrain-killed-run-shim"].iterdir()), "the library exists"
    report = clean(state_root=str(states), report=lambda line: None)
    assert report.left == [] and not any(path.exists() for path in left.values())


def test_limits_are_lifted_at_the_end_and_what_fails_there_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = RunState.create(f"test-{os.getpid()}-limits", state_root=str(tmp_path / "states"))
    cluster = LocalCluster(node_count=1, run=run, work_dir=str(tmp_path / "logs"), ports=[23917])
    cluster.prepare({("resources", "descriptors")})

    async def fail() -> None:
        raise OSError("the limit cannot be lifted")

    async def main() -> None:
        await cluster.start()
        assert cluster.resources is not None
        monkeypatch.setattr(cluster.resources, "release_all", fail)
        with pytest.raises(OSError, match="the limit cannot be lifted"):
            await cluster.stop()

    asyncio.run(main())
    assert run.claims == () and run.close()


def test_a_leftover_process_that_cannot_be_killed_is_reported_and_stays_on_record(tmp_path: Path) -> None:
    run = RunState.create(f"test-{os.getpid()}-stray", state_root=str(tmp_path / "states"))
    cluster = cluster_in(tmp_path / "logs", run, 23916)

    async def answer(operation: str) -> dict[str, Any]:
        assert operation == "end_strays"
        return {"ended": [], "left": [[os.getpid(), "dd of=/data/x"]]}

    cluster._links = {"machine": cast(AgentLink, SimpleNamespace(request=answer))}
    [problem] = asyncio.run(cluster._end_strays())
    assert str(problem) == f"machine: leftover process {os.getpid()} (dd of=/data/x) cannot be killed"
    [claim] = load_run(run.path).claims
    assert claim == (KIND_PROCESS, str(os.getpid()), {"start_ticks": process_start_ticks(os.getpid())})
    assert not run.close()


def test_directories_are_on_record_before_anything_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = RunState.create(f"test-{os.getpid()}-claims", state_root=str(tmp_path / "states"))
    cluster = LocalCluster(node_count=1, run=run, work_dir=str(tmp_path / "logs"), ports=[23915])
    cluster.prepare({("clocks", "wall"), ("disks", "power")})
    made: list[str] = []
    make, run_there = os.mkdir, AgentLink.run

    def note(path: str) -> None:
        if os.path.basename(path).startswith(f"splitbrain-{run.run_id}-"):
            assert path in [claim.ident for claim in load_run(run.path).claims]
            made.append(os.path.basename(path).removeprefix(f"splitbrain-{run.run_id}-"))

    def make_directory(path: Any, *mode: int) -> None:
        note(os.fspath(path))
        make(path, *mode)

    async def make_there(self: AgentLink, argv: Sequence[str], **options: Any) -> Any:
        if argv[0] == "mkdir":
            note(argv[-1])
        return await run_there(self, argv, **options)

    monkeypatch.setattr(os, "mkdir", make_directory)
    monkeypatch.setattr(AgentLink, "run", make_there)

    async def main() -> None:
        await cluster.start()
        [process] = [claim for claim in load_run(run.path).claims if claim.kind == KIND_PROCESS]
        assert process.details["start_ticks"] == process_start_ticks(int(process.ident)) is not None
        await cluster.stop()

    asyncio.run(main())
    assert sorted(made) == ["agents", "shim", "undo"] and run.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a file system")
def test_a_directory_that_cannot_be_removed_stays_in_the_runs_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = RunState.create(f"test-{os.getpid()}-busy", state_root=str(tmp_path / "states"))
    cluster = cluster_in(tmp_path / "logs", run, 23914)
    busy = tmp_path / f"splitbrain-{run.run_id}-agents" / "busy"

    def occupy() -> None:
        busy.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "busy", str(busy)], check=True)

    async def main() -> None:
        await cluster.start()
        occupy()
        with pytest.raises(HarnessError, match=f"^{busy.parent} cannot be removed"):
            await cluster.stop()

    try:
        asyncio.run(main())
        assert busy.exists() and [claim.ident for claim in run.claims] == [str(busy.parent)]
    finally:
        subprocess.run(["umount", str(busy)], check=True)
    asyncio.run(cluster.stop())
    assert not busy.parent.exists() and run.close()
