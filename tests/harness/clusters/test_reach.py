"""Faults on programs of this machine's hosts that no library reaches: started by the launcher, hit, and released."""

from __future__ import annotations

import asyncio
import gc
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.agent_shim import AgentShim, LauncherTrial
from harness.clusters.base import HostProcess, Program
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.run_state import RunState
from harness.systems.host_programs import HostPrograms
from nemesis.clock import CLOCK
from nemesis.disk import DISK_ERROR, DISK_STALL
from nemesis.mechanisms.launcher_archive import why_no_clock, why_no_traps
from nemesis.mechanisms.shell import ShellError
from nemesis.mechanisms.shim import why_no_shim
from nemesis.power import POWER
from nemesis.protocol import Injection, Proof
from nemesis.target import DOWN, RUNNING, ClockReading, PowerCut, ProcessView
from tests.nemesis.mechanisms.launched import OWN_FILTER

COMPILER = shutil.which("cc") or shutil.which("gcc")
PROBLEMS = [why_no_shim(), why_no_traps(), why_no_clock(), None if COMPILER else "no C compiler to make programs with"]
pytestmark = pytest.mark.skipif(any(PROBLEMS), reason=str(PROBLEMS))

DEADLINE_S = 60.0
PORT = 23921

SOURCE = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/log", argv[1]);
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
    if (fd < 0)
        return 1;
    for (;;) {
        if (write(fd, "line\n", 5) == 5)
            fsync(fd);
        usleep(5000);
    }
}
"""
"""Appends and syncs, again and again."""


class Target:
    """What a nemesis sees of one program on one host."""

    def __init__(self, cluster: LocalCluster, argv: Sequence[str], multiprocess: bool = False) -> None:
        self.cluster = cluster
        self._program = Program("writer", argv, "writer.log", multiprocess=multiprocess)
        self.hosts = cluster.hosts
        self.disks, self.clocks, self.processes = cluster.disks, cluster.clocks, self
        self.process: HostProcess | None = None
        self.others: list[HostProcess] = []

    async def start(self) -> None:
        self.process = await self.cluster.spawn("n1", self._program)

    async def look(self, host: str) -> ProcessView:
        assert self.process is not None
        assert self.process.host_pid is not None
        state = await self.process.state()
        pids = self.process.host_pids if isinstance(self.process, HostPrograms) else [self.process.host_pid]
        return ProcessView(host, state, 1, () if state == DOWN else pids)

    async def end(self, fault_id: str, hosts: Sequence[str], *, signal_name: str = "KILL") -> None:
        assert self.process is not None
        for process in (self.process, *self.others):
            await process.kill()

    async def release(self, fault_id: str) -> None:
        await self.start()

    async def revive(self, hosts: Sequence[str]) -> Sequence[str]:
        return ()

    async def answers(self, host: str, *, timeout_s: float) -> bool:
        return (await self.look(host)).state == RUNNING

    tells_time = False

    async def read_clock(self, host: str, *, timeout_s: float) -> ClockReading | None:
        raise AssertionError("this system cannot be asked for the time")


Scenario = Callable[[Target], Awaitable[None]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A statically and a dynamically linked program, where any user may reach them."""
    directory = tmp_path_factory.mktemp("programs")
    (directory / "writer.c").write_text(SOURCE)
    built = {}
    for name, arguments in (("static", ["-static"]), ("dynamic", [])):
        built[name] = str(directory / name)
        subprocess.run([str(COMPILER), *arguments, "-o", built[name], str(directory / "writer.c")], check=True)
    return built


def on_a_host(
    tmp_path: Path,
    argv: Callable[[str], Sequence[str]],
    scenario: Scenario,
    *,
    mechanism: str | None = None,
    multiprocess: bool = False,
) -> None:
    """Run a program on a local cluster that is prepared for these faults, and `scenario` on it."""

    async def main() -> None:
        run = RunState.create(f"reach-{os.getpid()}-{tmp_path.name[-20:]}", state_root=str(tmp_path / "states"))
        cluster = LocalCluster(
            node_count=1, run=run, work_dir=str(tmp_path / "work"), ports=[PORT], mechanism=mechanism
        )
        disks = {("disks", "stall-fsync"), ("disks", "error-write"), ("disks", "power")}
        cluster.prepare({*disks, ("clocks", "wall"), ("processes", "kill")})
        await cluster.start()
        try:
            target = Target(cluster, argv(cluster.data_dir("n1")), multiprocess)
            await target.start()
            await wrote(cluster)
            await scenario(target)
        finally:
            await cluster.stop()
        assert run.close()

    asyncio.run(main())


async def wrote(cluster: LocalCluster, more_than: int = 0, *, name: str = "log") -> int:
    """Wait until the log is longer; returns its size."""
    path = Path(cluster.data_dir("n1"), name)
    async with asyncio.timeout(DEADLINE_S):
        while not path.exists() or path.stat().st_size <= more_than:  # noqa: ASYNC110 - a program elsewhere
            await asyncio.sleep(0.02)
    return path.stat().st_size


def fault(nemesis: Any, variant: str, **details: Any) -> Injection:
    value = {"id": "f1", "nemesis": nemesis.name, "variant": variant, "hosts": ["n1"], **details}
    return Injection(fault_id="f1", nemesis=nemesis.name, variant=variant, value=value)


async def proofs(nemesis: Any, target: Target, injection: Injection) -> tuple[Proof, Proof, Proof]:
    """The proofs of a fault, of its hits, and of its healing."""
    await nemesis.inject(target, injection)
    proof = await nemesis.prove(target, injection)
    async with asyncio.timeout(DEADLINE_S):
        while (met := await nemesis.prove_met(target, injection)).exercised is False:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await nemesis.heal(target, injection)
    return proof, met, await nemesis.prove_healed(target, injection)


def has_filter(target: Target) -> bool:
    assert target.process is not None
    status = Path(f"/proc/{target.process.host_pid}/status").read_text()
    return status.split("Seccomp:")[1].split()[0] == "2"


@pytest.mark.parametrize(("kind", "word"), [("static", "seccomp"), ("dynamic", "the preloaded shim")])
def test_a_stall_hits_statically_and_dynamically_linked_programs(
    tmp_path: Path, programs: dict[str, str], kind: str, word: str
) -> None:
    async def scenario(target: Target) -> None:
        assert not has_filter(target)
        proof, met, healed = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and f"via {word}" in proof.detail, proof
        assert met.proven and met.exercised and "hit 1 call of n1" in met.detail, met
        assert healed.proven, healed
        assert has_filter(target) == (word == "seccomp")

    on_a_host(tmp_path, lambda data: [programs[kind], data], scenario)


def test_a_fault_injected_while_a_program_starts_is_proven(tmp_path: Path, programs: dict[str, str]) -> None:
    """Its supervisor, or the driver of its clock, has not started by then."""

    async def scenario(target: Target) -> None:
        assert target.process is not None
        bump = fault(CLOCK, "bump@n1", skews={"n1": {"offset_ms": 3_600_000}})
        for nemesis, injection in ((DISK_STALL, fault(DISK_STALL, "fsync@n1")), (CLOCK, bump)):
            await target.process.kill()
            await target.start()
            await nemesis.inject(target, injection)  # type: ignore[arg-type]
            proof = await nemesis.prove(target, injection)  # type: ignore[arg-type]
            assert proof.proven, proof
            await nemesis.heal(target, injection)  # type: ignore[arg-type]

    on_a_host(tmp_path, lambda data: [programs["static"], data], scenario)


def test_a_stall_is_not_proven_for_a_program_with_its_own_seccomp_filter(
    tmp_path: Path, programs: dict[str, str]
) -> None:
    """The program is left alone, so the stall does not reach it."""

    async def scenario(target: Target) -> None:
        assert has_filter(target)
        injection = fault(DISK_STALL, "fsync@n1")
        await DISK_STALL.inject(target, injection)
        proof = await DISK_STALL.prove(target, injection)
        assert not proof.proven and "has a seccomp filter of its own" in proof.detail, proof
        await DISK_STALL.heal(target, injection)

    def command(data: str) -> Sequence[str]:
        become = f"{OWN_FILTER}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-c", become, static, data]

    static = programs["static"]
    on_a_host(tmp_path, command, scenario, mechanism="seccomp")


WRITES_PAST = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/log", argv[1]);
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
    for (int is_done = 0;; usleep(5000)) {
        if (write(fd, "line\n", 5) == 5)
            fsync(fd);
        if (is_done || access(argv[2], F_OK) != 0)
            continue;
        dup2(fd, 77);
        is_done = write(77, "past\n", 5) == 5;
        close(77);
    }
}
"""
"""On request, it duplicates the descriptor of its file, writes by that, and closes it."""


def test_a_write_by_a_duplicate_descriptor_closed_since_disproves_a_fault(tmp_path: Path) -> None:
    (tmp_path / "past.c").write_text(WRITES_PAST)
    subprocess.run([str(COMPILER), "-static", "-o", str(tmp_path / "past"), str(tmp_path / "past.c")], check=True)
    order = tmp_path / "order"

    async def scenario(target: Target) -> None:
        injection = fault(DISK_ERROR, "write@n1")
        await DISK_ERROR.inject(target, injection)
        proof = await DISK_ERROR.prove(target, injection)
        met = await DISK_ERROR.prove_met(target, injection)
        assert proof.proven and met.proven, (proof, met)
        size_bytes = (Path(target.cluster.data_dir("n1")) / "log").stat().st_size
        order.touch()
        await wrote(target.cluster, more_than=size_bytes)
        met = await DISK_ERROR.prove_met(target, injection)
        assert not met.proven and "are not reported" in met.detail, met
        await DISK_ERROR.heal(target, injection)

    on_a_host(tmp_path, lambda data: [str(tmp_path / "past"), data, str(order)], scenario)


def test_filters_are_installed_at_the_start_where_they_cannot_be_attached_later(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: AgentShim, host: str) -> LauncherTrial:
        return LauncherTrial(None, "ptrace is refused", None)

    monkeypatch.setattr(AgentShim, "_try_launcher", refused)

    async def scenario(target: Target) -> None:
        assert has_filter(target)
        proof, met, _ = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and met.exercised, (proof, met)

    on_a_host(tmp_path, lambda data: [programs["static"], data], scenario)


@pytest.mark.parametrize(("kind", "word"), [("static", "the patched vDSO"), ("dynamic", "the preloaded shim")])
def test_a_clock_skew_reaches_statically_and_dynamically_linked_programs(
    tmp_path: Path, programs: dict[str, str], kind: str, word: str
) -> None:
    async def scenario(target: Target) -> None:
        injection = fault(CLOCK, "bump@n1", skews={"n1": {"offset_ms": 3_600_000}})
        await CLOCK.inject(target, injection)
        proof = await CLOCK.prove(target, injection)
        assert proof.proven and f"via {word}" in proof.detail, proof
        await CLOCK.heal(target, injection)
        assert (await CLOCK.prove_healed(target, injection)).proven

    on_a_host(tmp_path, lambda data: [programs[kind], data], scenario)


def test_a_monotonic_skew_is_not_proven_for_a_server_that_the_shim_does_not_reach(
    tmp_path: Path, programs: dict[str, str]
) -> None:
    """The program that was started is reached, but the server that it starts is not."""
    supervise = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:])
while child.poll() is None:
    time.sleep(0.1)
"""

    async def scenario(target: Target) -> None:
        injection = fault(CLOCK, "slow-monotonic@n1", skews={"n1": {"rate_ppm": -700_000, "affects_monotonic": 1}})
        await CLOCK.inject(target, injection)
        for proof in (await CLOCK.prove(target, injection), await CLOCK.prove_met(target, injection)):
            assert not proof.proven and "linked statically" in proof.detail, proof
        await CLOCK.heal(target, injection)

    def command(data: str) -> Sequence[str]:
        return [sys.executable, "-c", supervise, programs["static"], data]

    on_a_host(tmp_path, command, scenario)


def test_the_monotonic_clock_of_a_program_with_a_patched_vdso_is_out_of_reach(
    tmp_path: Path, programs: dict[str, str]
) -> None:
    """The shim skews the clocks of the newest program; the vDSO of the first one skews its wall clock only."""

    async def scenario(target: Target) -> None:
        first, data = target.process, target.cluster.data_dir("n1")
        second = await target.cluster.spawn("n1", Program("second", [programs["dynamic"], data], "second.log"))
        assert first is not None and target.clocks is not None and target.clocks.mechanism("n1") == "the preloaded shim"
        problem = await target.clocks.reaches("n1", first.host_pid, monotonic=True)
        assert problem is not None and "the wall clock only" in problem
        async with asyncio.timeout(DEADLINE_S):  # until the shim is mapped
            while await target.clocks.reaches("n1", second.host_pid, monotonic=True) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    on_a_host(tmp_path, lambda data: [programs["static"], data], scenario)


@pytest.mark.parametrize("mechanism", ["preload", "seccomp"])
def test_a_power_cut_loses_unsynced_writes_of_every_program_of_a_host(tmp_path: Path, mechanism: str) -> None:
    """Each has its own account, as Redis and the Sentinel beside it would."""
    script = """
import sys, time
with open(sys.argv[1], "ab", buffering=0) as log:
    while True:
        log.write(b"line\\n")
        time.sleep(0.005)
"""
    kept: list[str] = []
    lost: list[PowerCut] = []

    async def scenario(target: Target) -> None:
        assert target.disks is not None
        path = f"{target.cluster.data_dir('n1')}/second"
        second = await target.cluster.spawn("n1", Program("second", [sys.executable, "-c", script, path], "second.log"))
        await wrote(target.cluster, name="second")
        target.others.append(second)
        await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        lost.extend(target.disks.lost("f1").values())
        kept.extend(name for name in os.listdir(target.cluster.data_dir("n1")) if not name.startswith("."))

    on_a_host(tmp_path, lambda data: [sys.executable, "-c", script, f"{data}/log"], scenario, mechanism=mechanism)
    assert lost[0].recorded and lost[0].lost_bytes, lost
    if mechanism == "preload":
        assert kept == []
    else:  # their names are older than the account
        assert sorted(kept) == ["log", "second"] and "in 2 files" in lost[0].detail, lost


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_power_cut_counts_the_writes_of_the_replica(tmp_path: Path, programs: dict[str, str], kind: str) -> None:
    async def scenario(target: Target) -> None:
        injection = fault(POWER, "cut@n1", model="ext4")
        await POWER.inject(target, injection)
        assert target.disks is not None
        [cut] = target.disks.lost("f1").values()
        assert cut.recorded, cut

    on_a_host(tmp_path, lambda data: [programs[kind], data], scenario)


def test_a_power_cut_of_several_processes_needs_a_program_declared_as_such(tmp_path: Path) -> None:
    """The library keeps an account of one process; if several are declared, the launcher keeps one of all."""
    script = """
import os, sys, time
os.fork()
with open(f"{sys.argv[1]}/log", "ab", buffering=0) as log:
    while True:
        log.write(b"line\\n")
        time.sleep(0.005)
"""

    async def scenario(target: Target) -> None:
        assert target.disks is not None
        await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        [cut] = target.disks.lost("f1").values()
        assert cut.recorded and "seccomp" in cut.detail, cut

    async def refuses(target: Target) -> None:
        with pytest.raises(RuntimeError, match="several processes wrote"):
            await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))

    def command(data: str) -> Sequence[str]:
        return [sys.executable, "-c", script, data]

    on_a_host(tmp_path, command, scenario, multiprocess=True)
    on_a_host(tmp_path / "again", command, refuses)


@pytest.mark.parametrize("mechanism", ["preload", "seccomp"])
def test_a_power_cut_reports_writes_through_mappings_that_it_keeps(tmp_path: Path, mechanism: str) -> None:
    """The program writes by calls and through a mapping, and reads other mappings. A mapped file that was never synced
    is lost as a whole if the account is as old as the program."""
    script = """
import mmap, os, sys, time
directory = sys.argv[1]
def mapped(path, access, is_synced=True):
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(4096))
        if is_synced:
            os.fsync(file.fileno())
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 4096, access=access)
changed = mapped(f"{directory}/changed", mmap.ACCESS_WRITE)
others = [mapped(f"{directory}/read", mmap.ACCESS_READ), mapped(f"{directory}/copied", mmap.ACCESS_COPY)]
others.append(mapped(f"{directory}-elsewhere", mmap.ACCESS_WRITE))
others.append(mapped(f"{directory}/young", mmap.ACCESS_WRITE, is_synced=False))
with open(f"{directory}/log", "ab", buffering=0) as log:
    while True:
        log.write(b"line\\n")
        changed[:4] = b"mine"
        time.sleep(0.005)
"""
    lost: list[PowerCut] = []

    async def scenario(target: Target) -> None:
        assert target.disks is not None
        await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        lost.extend(target.disks.lost("f1").values())
        assert (Path(target.cluster.data_dir("n1")) / "changed").read_bytes()[:4] == b"mine"
        assert (Path(target.cluster.data_dir("n1")) / "young").exists() is (mechanism == "seccomp")

    on_a_host(tmp_path, lambda data: [sys.executable, "-c", script, data], scenario, mechanism=mechanism)
    kept = "; what it wrote through mappings is kept: changed" + (", young" if mechanism == "seccomp" else "")
    assert all(cut.recorded and cut.detail.endswith(kept) for cut in lost), lost


@pytest.mark.parametrize(("mode", "expected"), [("a", True), ("r+", True), ("r", False)])
def test_a_power_cut_reports_buffers_of_the_c_library_that_it_does_not_see(
    tmp_path: Path, mode: str, expected: bool
) -> None:
    """The program writes by calls, and writes to another file by fwrite, or only reads that."""
    script = (
        "import ctypes, os, sys, time\n"
        "libc, other = ctypes.CDLL(None), sys.argv[1] + '/other'\n"
        "libc.fopen.restype = libc.fdopen.restype = ctypes.c_void_p\n"
        "os.close(os.open(other, os.O_WRONLY | os.O_CREAT))\n"
        f"stream = ctypes.c_void_p(libc.fopen(other.encode(), b'{mode}'))\n"
        f"assert libc.fopen(b'/dev/null', b'{mode}')\n"
        "with open(sys.argv[1] + '/log', 'ab', buffering=0) as log:\n"
        "    while True:\n"
        "        log.write(b'line')\n"
        "        libc.fwrite(b'lost', 1, 4, stream)\n"
        "        libc.fflush(stream)\n"
        "        time.sleep(0.005)\n"
    )
    lost: list[PowerCut] = []

    async def scenario(target: Target) -> None:
        assert target.disks is not None
        await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        lost.extend(target.disks.lost("f1").values())

    on_a_host(tmp_path, lambda data: [sys.executable, "-c", script, data], scenario, mechanism="preload")
    said = "; 1 opening by the C library's fopen, whose buffers are not seen (--mechanism seccomp sees them)"
    assert [cut.detail.endswith(said) for cut in lost] == [expected], lost


@pytest.mark.parametrize("calls_too", [True, False])
def test_a_disk_fault_reports_buffers_of_the_c_library_that_it_does_not_see(tmp_path: Path, calls_too: bool) -> None:
    """The program writes by fwrite, and by calls too or not; without calls it is not hit."""
    script = (
        "import ctypes, os, sys, time\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.fopen.restype = ctypes.c_void_p\n"
        "other = os.open(sys.argv[1] + '/log', os.O_WRONLY | os.O_CREAT)\n"
        "os.write(other, b'1')\n"
        "stream = ctypes.c_void_p(libc.fopen((sys.argv[1] + '/buffered').encode(), b'a'))\n"
        "while True:\n"
        "    libc.fwrite(b'line', 1, 4, stream)\n"
        "    libc.fflush(stream)\n"
        "    time.sleep(0.005)\n"
        "    try:\n"
        f"        os.write(other, b'line') if {calls_too} else None\n"
        "    except OSError:\n"
        "        pass\n"
    )
    said = "; on n1, 1 opening by the C library's fopen, whose buffers are not seen (--mechanism seccomp sees them)"

    async def scenario(target: Target) -> None:
        injection = fault(DISK_ERROR, "write@n1")
        await DISK_ERROR.inject(target, injection)
        proof = await DISK_ERROR.prove(target, injection)
        written = await wrote(target.cluster, name="buffered")
        await wrote(target.cluster, written, name="buffered")  # so any hit would be counted by now
        met = await DISK_ERROR.prove_met(target, injection)
        await DISK_ERROR.heal(target, injection)
        assert proof.proven and met.proven, (proof, met)
        assert met.exercised is calls_too, met
        assert met.detail.endswith(said), met
        assert met.detail.startswith("hit " if calls_too else "no replica has made such a call"), met

    on_a_host(tmp_path, lambda data: [sys.executable, "-c", script, data], scenario, mechanism="preload")


def test_a_power_cut_of_one_operation_is_reported_in_the_singular(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "os.write(os.open(sys.argv[1] + '/log', os.O_WRONLY), b'1')\n"
        "while True:\n"
        "    time.sleep(60)\n"
    )
    lost: list[PowerCut] = []

    def command(data: str) -> Sequence[str]:
        os.makedirs(data, exist_ok=True)
        Path(data, "log").write_bytes(b"")  # older than the account
        return [sys.executable, "-c", script, data]

    async def scenario(target: Target) -> None:
        assert target.disks is not None
        await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        lost.extend(target.disks.lost("f1").values())

    on_a_host(tmp_path, command, scenario, mechanism="preload")
    said = "1 operation, 1 byte in 1 file, of 1 change that the preloaded shim has seen"
    assert [cut.detail for cut in lost] == [said]


WRITES_AND_HAS_A_CONTEXT = """
import contextlib, ctypes, platform, sys, time
number = {"x86_64": 206, "aarch64": 0}[platform.machine()]
assert ctypes.CDLL(None).syscall(number, 8, ctypes.byref(ctypes.c_ulong())) == 0
with open(sys.argv[1], "ab", buffering=0) as log:
    while True:
        with contextlib.suppress(OSError):
            log.write(b"line\\n")
        time.sleep(0.005)
"""
"""Writes by ordinary calls, and has a context by which it could write unseen (io_setup), as databases do."""


@pytest.mark.parametrize("mechanism", ["preload", "seccomp"])
def test_disk_faults_are_not_proven_for_a_program_that_may_write_unseen(tmp_path: Path, mechanism: str) -> None:
    """Clock faults still reach it."""

    async def scenario(target: Target) -> None:
        injection = fault(DISK_ERROR, "write@n1")
        await DISK_ERROR.inject(target, injection)
        proof = await DISK_ERROR.prove(target, injection)
        assert (
            not proof.proven and "may read and write by io_submit, which bypasses every disk fault" in proof.detail
        ), proof
        await DISK_ERROR.heal(target, injection)
        with pytest.raises(RuntimeError, match="may read and write by io_submit"):
            await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        bump = fault(CLOCK, "bump@n1", skews={"n1": {"offset_ms": 3_600_000}})
        await CLOCK.inject(target, bump)
        proof = await CLOCK.prove(target, bump)
        assert proof.proven, proof
        await CLOCK.heal(target, bump)

    def command(data: str) -> Sequence[str]:
        return [sys.executable, "-c", WRITES_AND_HAS_A_CONTEXT, f"{data}/log"]

    on_a_host(tmp_path, command, scenario, mechanism=mechanism)


JAILED = """
import itertools, os, sys, time
log = os.open(os.path.join(sys.argv[1], "log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.chroot(sys.argv[1])
for number in itertools.count():
    os.close(os.open(f"/{number}", os.O_WRONLY | os.O_CREAT))
    os.pwrite(log, b"%9d" % number, 0)
    os.fsync(log)
    time.sleep(0.02)
"""
"""Opens its log and makes the data its root directory, as daemons do. It syncs the log, which has the number of the
last file created, but never a directory."""


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot is for root")
@pytest.mark.parametrize("mechanism", ["preload", "seccomp"])
def test_a_power_cut_of_a_chrooted_program_keeps_synced_data_or_is_refused(tmp_path: Path, mechanism: str) -> None:
    """The preloaded shim sees none of the syncs of such a program, so it refuses."""

    async def scenario(target: Target) -> None:
        power = fault(POWER, "cut-posix@n1", model="posix")
        if mechanism == "preload":
            with pytest.raises(RuntimeError, match="has its own root"):
                await POWER.inject(target, power)
            return
        await POWER.inject(target, power)
        proof = await POWER.prove(target, power)
        assert proof.proven and proof.exercised, proof
        data = Path(target.cluster.data_dir("n1"))
        last = int((data / "log").read_text())
        assert (data / "0").exists() and not (data / str(last)).exists(), proof
        await POWER.heal(target, power)

    on_a_host(tmp_path, lambda data: [sys.executable, "-c", JAILED, data], scenario, mechanism=mechanism)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_no_fault_is_proven_for_a_program_started_without_its_mechanism(
    tmp_path: Path, programs: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stall in the control file hits a probe, but not the replica."""
    real = AgentShim.prepared

    async def prepared(self: AgentShim, host: str, program: Program) -> Any:
        _, started = await real(self, host, program)
        return program, started

    monkeypatch.setattr(AgentShim, "prepared", prepared)

    async def scenario(target: Target) -> None:
        stall, bump = fault(DISK_STALL, "fsync@n1"), fault(CLOCK, "bump@n1", skews={"n1": {"offset_ms": 3_600_000}})
        for nemesis, injection in ((DISK_STALL, stall), (CLOCK, bump)):
            await nemesis.inject(target, injection)  # type: ignore[attr-defined]
            proof = await nemesis.prove(target, injection)  # type: ignore[attr-defined]
            assert not proof.proven, proof
            await nemesis.heal(target, injection)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"are not counted|is out of reach"):
            await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))

    on_a_host(tmp_path, lambda data: [programs[kind], data], scenario)


def test_no_fault_is_proven_if_a_second_program_is_out_of_reach(tmp_path: Path, programs: dict[str, str]) -> None:
    async def scenario(target: Target) -> None:
        data = f"{target.cluster.data_dir('n1')}/second"
        os.mkdir(data)
        second = await target.cluster.spawn("n1", Program("second", [programs["static"], data], "second.log"))
        await wrote(target.cluster, name="second/log")
        assert target.process is not None
        target.process = HostPrograms("n1", {"main": target.process, "second": second})
        stall, bump = fault(DISK_STALL, "fsync@n1"), fault(CLOCK, "bump@n1", skews={"n1": {"offset_ms": 3_600_000}})
        for nemesis, injection in ((DISK_STALL, stall), (CLOCK, bump)):
            await nemesis.inject(target, injection)  # type: ignore[attr-defined]
            proof = await nemesis.prove(target, injection)  # type: ignore[attr-defined]
            assert not proof.proven and "linked statically" in proof.detail, proof
            await nemesis.heal(target, injection)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="linked statically"):
            await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))

    on_a_host(tmp_path, lambda data: [programs["dynamic"], data], scenario, mechanism="preload")


def test_a_library_that_the_program_preloads_is_kept_beside_the_shim(tmp_path: Path, programs: dict[str, str]) -> None:
    """Such as an allocator."""
    (tmp_path / "own.c").write_text("int own(void) { return 1; }")
    own = str(tmp_path / "own.so")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", own, str(tmp_path / "own.c")], check=True)

    async def scenario(target: Target) -> None:
        assert target.process is not None
        await target.process.kill()
        argv = [programs["dynamic"], target.cluster.data_dir("n1")]
        target.process = await target.cluster.spawn("n1", Program("writer", argv, "own.log", {"LD_PRELOAD": own}))
        await wrote(target.cluster, await wrote(target.cluster))
        assert own in Path(f"/proc/{target.process.host_pid}/maps").read_text()
        proof, met, _ = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and met.exercised and "via the preloaded shim" in proof.detail

    on_a_host(tmp_path, lambda data: [programs["dynamic"], data], scenario)


SERVES_ELSEWHERE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
open(sys.argv[3], "w").write("serves")
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_no_fault_is_proven_if_a_server_runs_as_a_stray_daemon(
    tmp_path: Path, programs: dict[str, str], kind: str
) -> None:
    """Another program of the host is within reach, writes and syncs."""

    async def scenario(target: Target) -> None:
        cluster = target.cluster
        data, begin = cluster.data_dir("n1"), '(env -i setsid "$@" &); exec sleep 600'
        server = [sys.executable, "-c", SERVES_ELSEWHERE, cluster.bind_address("n1"), str(PORT), f"{data}/serves"]
        await cluster.spawn("n1", Program("starter", ["sh", "-c", begin, "sh", *server], "starter.log"))
        await wrote(cluster, name="serves")
        stall, bump = fault(DISK_STALL, "fsync@n1"), fault(CLOCK, "bump@n1", skews={"n1": {"offset_ms": 3_600_000}})
        for nemesis, injection in ((DISK_STALL, stall), (CLOCK, bump)):
            await nemesis.inject(target, injection)  # type: ignore[attr-defined]
            proof = await nemesis.prove(target, injection)  # type: ignore[attr-defined]
            assert not proof.proven and "in the background" in proof.detail, proof
            await nemesis.heal(target, injection)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="in the background"):
            await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))

    on_a_host(tmp_path, lambda data: [programs[kind], data], scenario)


def test_the_mechanism_can_be_chosen_explicitly(tmp_path: Path, programs: dict[str, str]) -> None:
    async def by_name(target: Target) -> None:
        proof, met, _ = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and met.exercised and "via seccomp" in proof.detail

    on_a_host(tmp_path / "a", lambda data: [programs["dynamic"], data], by_name, mechanism="seccomp")

    async def of_no_use(target: Target) -> None:
        injection = fault(DISK_STALL, "fsync@n1")
        await DISK_STALL.inject(target, injection)
        proof = await DISK_STALL.prove(target, injection)
        assert not proof.proven and "linked statically" in proof.detail and "--mechanism seccomp" in proof.detail
        await DISK_STALL.heal(target, injection)

    on_a_host(tmp_path / "b", lambda data: [programs["static"], data], of_no_use, mechanism="preload")


def test_an_unavailable_mechanism_is_refused_or_leaves_faults_unproven(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(self: AgentShim, host: str) -> LauncherTrial:
        return LauncherTrial("the kernel reports no system calls", "nor later", "the vDSO has no room")

    monkeypatch.setattr(AgentShim, "_try_launcher", failing)

    async def nothing(target: Target) -> None:
        raise AssertionError("the program was started")

    with pytest.raises(OperatorError, match="the kernel reports no system calls"):
        on_a_host(tmp_path / "a", lambda data: [programs["static"], data], nothing, mechanism="seccomp")

    async def unproven(target: Target) -> None:
        injection = fault(DISK_STALL, "fsync@n1")
        await DISK_STALL.inject(target, injection)
        proof = await DISK_STALL.prove(target, injection)
        assert not proof.proven and "the kernel reports no system calls" in proof.detail
        await DISK_STALL.heal(target, injection)

    on_a_host(tmp_path / "b", lambda data: [programs["static"], data], unproven)


def test_the_failure_of_an_abandoned_trial_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a start is interrupted, and the host's agent is gone before the trial ends."""

    async def main() -> None:
        let_go = asyncio.Event()

        async def breaks(self: AgentShim, host: str) -> LauncherTrial:
            await let_go.wait()
            raise ShellError(host, ["run"], 255, "the link was closed")

        monkeypatch.setattr(AgentShim, "_try_launcher", breaks)
        none: Any = None
        shim = AgentShim(none, {}, {}, capabilities=())
        waiting = asyncio.ensure_future(shim._trial("n1"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        let_go.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that all users may traverse, which those of pytest are not."""
    path = Path(tempfile.mkdtemp(prefix="reach-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs as another user")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_faults_reach_a_replica_that_runs_as_another_user(
    open_directory: Path, programs: dict[str, str], kind: str
) -> None:
    nobody = pwd.getpwnam("nobody")
    program = shutil.copy(programs[kind], open_directory)

    def argv(data: str) -> Sequence[str]:
        os.chown(data, nobody.pw_uid, nobody.pw_gid)
        return ["setpriv", f"--reuid={nobody.pw_uid}", "--clear-groups", program, data]

    async def scenario(target: Target) -> None:
        proof, met, healed = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and met.exercised and healed.proven, (proof, met, healed)
        assert target.process is not None
        await target.process.kill()  # the next one opens the control file again, which faults have written to since
        await target.start()
        await wrote(target.cluster, await wrote(target.cluster))
        proof, met, healed = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and met.exercised and healed.proven, (proof, met, healed)
        await POWER.inject(target, fault(POWER, "cut@n1", model="ext4"))
        assert target.disks is not None
        [cut] = target.disks.lost("f1").values()
        assert cut.recorded, cut

    async def stalls(target: Target) -> None:
        proof, met, healed = await proofs(DISK_STALL, target, fault(DISK_STALL, "fsync@n1"))
        assert proof.proven and met.exercised and healed.proven, (proof, met, healed)

    on_a_host(open_directory / "a", argv, scenario)
    on_a_host(open_directory / "b", argv, stalls)


def test_calls_of_the_probe_do_not_count_as_hits_of_the_replica(tmp_path: Path, programs: dict[str, str]) -> None:
    """The probe of a fault is hit by the same mechanism, on a replica that makes no such call."""

    async def scenario(target: Target) -> None:
        proof = await DISK_STALL.prove(target, fault(DISK_STALL, "fsync@n1"))
        assert not proof.proven
        injection = fault(DISK_STALL, "fsync@n1")
        await DISK_STALL.inject(target, injection)
        proof, met = await DISK_STALL.prove(target, injection), await DISK_STALL.prove_met(target, injection)
        assert proof.proven and proof.exercised is None
        assert met.proven and met.exercised is False and "no replica has made such a call" in met.detail
        await DISK_STALL.heal(target, injection)

    script = "import sys, time; open(sys.argv[1] + '/log', 'w').write('x'); time.sleep(600)"
    for mechanism in ("preload", "seccomp"):
        work = tmp_path / mechanism
        on_a_host(work, lambda data: [sys.executable, "-c", script, data], scenario, mechanism=mechanism)
