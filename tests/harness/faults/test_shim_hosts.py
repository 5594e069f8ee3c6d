"""The shim on hosts of this machine: it is felt wherever the store is, and goes with the run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cleanup import clean
from harness.faults.shim_hosts import ShimHosts
from harness.run_state import RunState
from nemesis.mechanisms import shim
from nemesis.mechanisms.shim import ShimError, library_directories, why_no_shim
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


def make(run: RunState, work_dir: Path) -> ShimHosts:
    data = work_dir / "n1" / "data"
    data.mkdir(parents=True)
    return ShimHosts(
        ["n1"],
        work_dir=str(work_dir),
        data_dir=lambda host: str(work_dir / host / "data"),
        run=run,
        tracks_writes=False,
    )


def seen_by_a_program(hosts: ShimHosts, work_dir: Path) -> tuple[float, str]:
    """How far the clock of a program on the host is off, in seconds, and what its write to the data came to."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOOK, str(work_dir / "n1" / "data")],
        env={**os.environ, **hosts.environment("n1")},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    clock, write = done.stdout.splitlines()
    return float(clock) - time.time(), write


@pytest.mark.parametrize("name", HARD_NAMES)
def test_faults_are_felt_wherever_the_store_is(tmp_path: Path, name: str) -> None:
    work_dir = tmp_path / name / "logs"

    async def main() -> None:
        run = RunState.create(f"test-{os.getpid()}-{abs(hash(name))}", state_root=str(tmp_path / "states"))
        hosts = make(run, work_dir)
        try:
            await hosts.clocks.skew("c", {"n1": ClockSkew(offset_ms=-3_600_000)})
            await hosts.disks.impair("d", {"n1": DiskFault(kind="full")})
            offset_s, write = seen_by_a_program(hosts, work_dir)
            assert -3700 < offset_s < -3500
            assert write == "No space left on device"
            await hosts.clocks.release("c")
            await hosts.disks.release("d")
            offset_s, write = seen_by_a_program(hosts, work_dir)
            assert abs(offset_s) < 100 and write == "written"
        finally:
            await hosts.close()
            hosts.remove()
            assert run.close()
        assert not os.path.exists(hosts.controls.places["n1"].library_path)

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
        assert why_no_shim.__wrapped__() is None, "it is proven in another place"
    (tmp_path / "link").symlink_to(tmp_path / HARD_NAMES[0])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    assert str(tmp_path / "link") not in library_directories()


def test_a_library_that_is_not_felt_stops_the_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(shim, "build_shim", lambda: b"no library")
    run = RunState.create(f"test-{os.getpid()}-broken", state_root=str(tmp_path / "states"))
    with pytest.raises(ShimError, match="does not reach"):
        make(run, tmp_path / "logs")
    assert run.close(), "every claim was released"
    assert not list(tmp_path.glob("splitbrain-*"))


def test_clean_removes_the_library_of_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    states = tmp_path / "states"
    work_dir = tmp_path / "logs"
    program = f"""
import os, signal
from harness.faults.shim_hosts import ShimHosts
from harness.run_state import RunState
run = RunState.create("killed-run", state_root={str(states)!r})
os.makedirs({str(work_dir / "n1" / "data")!r})
ShimHosts(["n1"], work_dir={str(work_dir)!r}, data_dir=lambda host: {str(work_dir)!r} + "/n1/data",
          run=run, tracks_writes=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    (left,) = tmp_path.glob("splitbrain-*")
    assert list(left.iterdir()), "the library is there"
    report = clean(state_root=str(states), report=lambda line: None)
    assert report.left == [] and not left.exists()
