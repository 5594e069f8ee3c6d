"""A file system, a mount namespace and a control group for each host, and their removal."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cleanup import clean
from harness.clusters import agent_file_systems
from harness.clusters.agent_file_systems import why_no_file_systems
from harness.clusters.agent_processes import AgentProcess
from harness.clusters.agent_shim import AgentShim, LauncherTrial
from harness.clusters.base import ClusterUnavailable, Program
from harness.clusters.control_groups import cgroup_parents
from harness.clusters.loop_devices import ImageMark, loop_devices_of, marked_devices
from harness.clusters.netns import IMAGE, MEMORY, SHARED, NetnsCluster, storage_for
from harness.clusters.netns_trial import why_no_namespaces
from harness.errors import HarnessError
from harness.faults.file_system_disks import FileSystemDisks
from harness.faults.target import RunTarget
from harness.process_table import find_processes, marked_with
from harness.run_state import (
    KIND_CGROUP,
    KIND_IMAGE,
    KIND_NETNS,
    RUN_VARIABLE,
    RunState,
    harness_process,
    load_run,
    temp_dir,
)
from harness.sdk import Host
from nemesis.mechanisms.file_systems import freeze
from nemesis.mechanisms.shim import why_no_shim
from nemesis.target import DiskFault

WHY_NOT = why_no_file_systems() or why_no_namespaces(in_user_namespace=False)

pytestmark = [
    pytest.mark.root,
    pytest.mark.netns,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no file systems for hosts: {WHY_NOT}"),
]

ROOT = Path(__file__).resolve().parents[3]
RUN = f"td{os.getpid()}"
PORT = 7000
WAIT_S = 10.0

Scenario = Callable[[NetnsCluster, FileSystemDisks], Awaitable[None]]


def files_of(cluster: NetnsCluster, host: str) -> list[str]:
    names = os.listdir(cluster.local_path(host, cluster.data_dir(host)))
    return sorted(name for name in names if name not in ("lost+found", ".splitbrain-undo"))


def mounts() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return [line.split()[4] for line in file]


def with_cluster(
    tmp_path: Path,
    scenario: Scenario,
    *,
    storage: str = MEMORY,
    needs: Sequence[str] = ("freeze", "fill", "shutdown", "crash"),
    mechanism: str | None = None,
) -> None:
    """Run `scenario` on two hosts with prepared disks, and check that nothing is left."""

    async def body() -> None:
        run = RunState.create(RUN, state_root=str(tmp_path / "state"))
        place = str(tmp_path / "run")
        cluster = NetnsCluster(
            node_count=2, run=run, work_dir=place, ports=[PORT], storage=storage, mechanism=mechanism
        )
        cluster.prepare({("disks", kind) for kind in needs})
        await cluster.start()
        groups = [claim.ident for claim in run.claims if claim.kind == KIND_CGROUP]
        images = [claim.details["file_id"] for claim in run.claims if claim.kind == KIND_IMAGE]
        assert len(images) == 2 and all(loop_devices_of(image, RUN) for image in images)
        assert not any(loop_devices_of(image, f"{RUN}-other") for image in images), (
            "file numbers are reused, so the run must match too"
        )
        try:
            assert isinstance(cluster.disks, FileSystemDisks)
            await scenario(cluster, cluster.disks)
        finally:
            await cluster.stop()
        assert [point for point in mounts() if point.startswith(str(tmp_path))] == []
        assert [image for image in images if loop_devices_of(image, RUN)] == []
        assert not [path for path in groups if os.path.exists(path)]
        assert not (tmp_path / "run" / "n1" / "disk.img").exists()
        assert run.claims == () and run.close()

    asyncio.run(body())


async def output_of(cluster: NetnsCluster, host: str, name: str, script: str) -> str:
    process = await cluster.spawn(host, Program(name=name, argv=[sys.executable, "-c", script], log_name=f"{name}.log"))
    deadline_s = asyncio.get_running_loop().time() + WAIT_S
    while process.exit_status() is None:
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.01)
    log = Path(cluster.data_dir(host)).parent / f"{name}.log"
    assert process.exit_status() == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("storage", [IMAGE, MEMORY])
def test_a_host_sees_its_own_disk_only_and_its_files_outlive_the_cluster(tmp_path: Path, storage: str) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        own, other = cluster.data_dir("n1"), cluster.data_dir("n2")
        seen = [cluster.local_path(host, cluster.data_dir(host)) for host in cluster.hosts]
        assert len({os.stat(path).st_dev for path in (*seen, str(tmp_path))}) == 3
        assert own not in mounts(), "the mount is invisible outside the host"
        await cluster.put_file("n2", os.path.join(other, "of-n2"), b"kept too")
        script = f"""
open({own + "/kept"!r}, "w").write("kept")
holed = open({own + "/holed"!r}, "wb"); holed.seek(50_000_000); holed.write(b"end")
print([line.split()[4] for line in open("/proc/self/mountinfo") if line.split()[4].startswith({str(tmp_path)!r})])
print(open("/proc/self/cgroup").read())
"""
        told = await output_of(cluster, "n1", "looks", script)
        assert own in told and other not in told
        assert f"/splitbrain-{RUN}-n1\n" in told

    with_cluster(tmp_path, scenario, storage=storage)
    assert (tmp_path / "run" / "n1" / "data" / "kept").read_text() == "kept"
    holed = tmp_path / "run" / "n1" / "data" / "holed"
    assert holed.stat().st_size == 50_000_003 and holed.stat().st_blocks * 512 < 1_000_000
    assert holed.read_bytes()[-4:] == b"\0end"
    assert (tmp_path / "run" / "n2" / "data" / "of-n2").read_text() == "kept too"
    assert not (tmp_path / "run" / "n1" / "data" / "lost+found").exists()


def data_without_holes(image: Path) -> bytes:
    """What is written in an image of a gigabyte, nearly all of which is a hole."""
    data, end = b"", 0
    with image.open("rb") as file:
        while True:
            try:
                begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO, "only holes are left"
                return data
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            data += os.pread(file.fileno(), end - begin, begin)


@pytest.mark.parametrize("full", ["everywhere", "where the state is"])
def test_a_full_disk_at_the_end_leaves_no_partial_copy_of_the_files_of_a_host(tmp_path: Path, full: str) -> None:
    async def body() -> None:
        run = RunState.create(RUN, state_root=str(tmp_path / "state"))
        cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "run"), ports=[PORT], storage=IMAGE)
        await cluster.start()
        made = [claim.ident for claim in run.claims if claim.kind in (KIND_CGROUP, KIND_IMAGE)]
        assert made and all(map(os.path.exists, made))
        for host in cluster.hosts:
            await cluster.put_file(host, os.path.join(cluster.data_dir(host), "log"), b"acknowledged")
        if full == "everywhere":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
            try:
                with pytest.raises(
                    HarnessError, match=r"the files of n1 could not be kept: .*large; they are in .*/n1/"
                ):
                    await cluster.stop()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        else:
            device = os.open("/dev/full", os.O_WRONLY)
            os.dup2(device, run._fd)
            os.close(device)
            await cluster.stop()
        images = [path for path in made if path.endswith(".img")]
        left = [path for path in made if os.path.exists(path)]
        assert left == (images if full == "everywhere" else []) and run.claims == () and run.close()
        assert all(b"acknowledged" in data_without_holes(Path(image)) for image in left)

    asyncio.run(body())
    for host in ("n1", "n2"):
        data = tmp_path / "run" / host / "data"
        assert not data.with_name("data.kept").exists()
        if full == "everywhere":
            assert not data.exists()
        else:
            assert (data / "log").read_bytes() == b"acknowledged"


def test_the_image_of_a_host_whose_agent_was_killed_keeps_its_files(tmp_path: Path) -> None:
    async def body() -> None:
        run = RunState.create(RUN, state_root=str(tmp_path / "state"))
        cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "run"), ports=[PORT], storage=IMAGE)
        await cluster.start()
        for host in cluster.hosts:
            await cluster.put_file(host, os.path.join(cluster.data_dir(host), "log"), b"acknowledged")
        os.kill(cluster._pids["n1"], signal.SIGKILL)
        with pytest.raises(HarnessError, match=r"the files of n1 could not be kept: .* they are in the image"):
            await cluster.stop()
        run.close()

    asyncio.run(body())
    assert b"acknowledged" in data_without_holes(tmp_path / "run" / "n1" / "disk.img")
    assert (tmp_path / "run" / "n2" / "data" / "log").read_bytes() == b"acknowledged"
    assert not (tmp_path / "run" / "n2" / "disk.img").exists()


def test_a_disk_that_stays_frozen_because_its_agent_was_killed_is_released_at_the_end(tmp_path: Path) -> None:
    """A frozen file system keeps its loop device when its last mount goes with the agent."""

    async def body() -> None:
        run = RunState.create(RUN, state_root=str(tmp_path / "state"))
        cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "run"), ports=[PORT], storage=IMAGE)
        await cluster.start()
        freeze(cluster.local_path("n1", cluster.data_dir("n1")))
        os.kill(cluster._pids["n1"], signal.SIGKILL)
        with pytest.raises(HarnessError, match="the files of n1 could not be kept"):
            await cluster.stop()
        assert [device for device, mark in marked_devices() if mark.run_id == RUN] == []
        assert run.claims == () and run.close()

    asyncio.run(body())


def test_sockets_and_pipes_are_skipped_when_the_files_of_a_replica_are_kept(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        script = f"""
import os, socket
os.chdir({cluster.data_dir("n1")!r})
open("first", "w").write("kept"); os.mkdir("run"); open("run/last", "w").write("kept too")
socket.socket(socket.AF_UNIX).bind("run/server.sock"); os.mkfifo("run/log.pipe"); os.symlink("../first", "run/current")
"""
        await output_of(cluster, "n1", "binds", script)

    with_cluster(tmp_path, scenario, storage=IMAGE)
    data = tmp_path / "run" / "n1" / "data"
    assert (data / "first").read_text() == "kept"
    assert sorted(os.listdir(data / "run")) == ["current", "last"]
    assert (data / "run" / "last").read_text() == "kept too"


def test_disk_faults_reach_a_replica_whose_path_has_blanks_and_colons(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        sleeper = Program(name="sleeper", argv=[sys.executable, "-c", "import time; time.sleep(600)"], log_name="log")
        process = await cluster.spawn("n1", sleeper)
        assert await disks.reaches("n1", process.pid) is None
        assert await disks.reaches("n1", os.getpid()) is not None, "this process sees no disk of a host"

    place = tmp_path / "a store: \\ and\ttab"
    place.mkdir()
    with_cluster(place, scenario)


def test_a_frozen_file_system_blocks_writers_until_it_is_thawed(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        await disks.impair("f1", {"n1": DiskFault(kind="freeze")})
        held, well = await asyncio.gather(disks.probe("n1", timeout_s=0.5), disks.probe("n2", timeout_s=WAIT_S))
        assert held.write.outcome == "no answer" and well.sync.outcome == "ok"
        assert await cluster.strays("n1") == [], "the killed probe, which cannot end yet, is no stray"
        with pytest.raises(RuntimeError, match="the file system of n1 is already held"):
            await disks.impair("f2", {"n1": DiskFault(kind="fill")})
        await disks.release("f2")
        await disks.release("f1")
        await disks.release("f1")
        assert (await disks.probe("n1", timeout_s=WAIT_S)).sync.outcome == "ok"

    with_cluster(tmp_path, scenario)


def test_a_slow_file_system_operation_times_out_with_the_limit_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(agent_file_systems, "CALL_TIMEOUT_S", 0.1)
            patched.setitem(agent_file_systems.OPERATIONS, "freeze", lambda path: time.sleep(0.5))
            with pytest.raises(TimeoutError, match=r"freeze of the file system of n1 took longer than 0\.1 s"):
                await disks.impair("f1", {"n1": DiskFault(kind="freeze")})

    with_cluster(tmp_path, scenario)


def test_a_full_file_system_fails_writes_until_it_is_released(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        await disks.impair("f1", {"n1": DiskFault(kind="fill")})
        status = os.statvfs(cluster.local_path("n1", cluster.data_dir("n1")))
        assert status.f_bavail == 0
        assert (await disks.probe("n1", timeout_s=WAIT_S)).write.outcome == "ENOSPC"
        assert (await disks.probe("n2", timeout_s=WAIT_S)).write.outcome == "ok"
        await disks.release_all()
        assert (await disks.probe("n1", timeout_s=WAIT_S)).write.outcome == "ok"
        assert files_of(cluster, "n1") == []

    with_cluster(tmp_path, scenario)


@pytest.mark.parametrize("kind", ["shutdown", "crash"])
def test_unsynced_data_is_lost_when_a_file_system_shuts_down_or_crashes(tmp_path: Path, kind: str) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        own = cluster.data_dir("n1")
        script = f"""
import os, time
synced = os.open({own + "/synced"!r}, os.O_RDWR | os.O_CREAT)
os.write(synced, b"synced"); os.fsync(synced); os.fsync(os.open({own!r}, os.O_RDONLY))
open({own + "/unsynced"!r}, "w").write("unsynced")
print("written", flush=True)
time.sleep(60)
"""
        process = await cluster.spawn("n1", Program(name="w", argv=[sys.executable, "-c", script], log_name="w.log"))
        log = Path(own).parent / "w.log"
        deadline_s = asyncio.get_running_loop().time() + WAIT_S
        while "written" not in log.read_text():
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.01)
        assert await disks.reaches("n1", process.pid) is None
        if kind == "crash":
            await process.kill()
            cut = await disks.cut_power("f1", "n1", kind="crash")
            assert cut.lost_bytes is None and disks.lost("f1") == {"n1": cut}
        else:
            await disks.impair("f1", {"n1": DiskFault(kind="shutdown")})
            assert (await disks.probe("n1", timeout_s=WAIT_S)).write.outcome == "EIO"
        await disks.release("f1")
        assert process.exit_status() == -9, "a file system in use cannot be mounted again"
        assert files_of(cluster, "n1") == ["synced"]
        assert (await disks.probe("n1", timeout_s=WAIT_S)).sync.outcome == "ok"
        assert disks.lost("f1") == {}

    with_cluster(tmp_path, scenario)


@pytest.mark.parametrize("ends_before", [False, True])
def test_a_replica_that_is_killed_for_a_remount_did_not_exit_unexpectedly(tmp_path: Path, ends_before: bool) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        current: dict[str, AgentProcess] = {}

        async def restart(host: str) -> None:
            argv = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
            current[host] = await cluster.spawn(host, Program(name="replica", argv=argv, log_name="replica.log"))

        system: Any = SimpleNamespace(process=current.get, restart=restart)
        processes = RunTarget(cluster, system).processes
        await restart("n1")
        await disks.impair("f1", {"n1": DiskFault(kind="shutdown")})
        if ends_before:
            assert current["n1"].host_pid is not None
            os.kill(current["n1"].host_pid, signal.SIGKILL)
            await current["n1"].wait()
        await disks.release("f1")
        assert await processes.revive(["n1"]) == ["n1"]
        told = {"n1 exited unexpectedly, with status -9": 1} if ends_before else {}
        assert dict(processes.unexpected_exits) == told

    with_cluster(tmp_path, scenario)


def test_the_account_of_the_shim_is_on_the_hosts_disk_and_restarts_with_it(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        script = f"open({cluster.data_dir('n1') + '/unsynced'!r}, 'w').write('unsynced'); print('written')"
        await output_of(cluster, "n1", "first", script)
        cut = await disks.cut_power("f1", "n1")
        assert (cut.lost_operations, cut.lost_bytes) == (2, 8)
        assert files_of(cluster, "n1") == []
        await disks.impair("f2", {"n1": DiskFault(kind="shutdown")})
        with pytest.raises(AssertionError, match="Input/output error"):
            await output_of(cluster, "n1", "second", script)
        await disks.release("f2")
        await output_of(cluster, "n1", "third", script)
        assert (await disks.cut_power("f3", "n1")).lost_bytes == 8

    with_cluster(tmp_path, scenario, needs=("power", "shutdown"))


@pytest.mark.parametrize("mechanism", ["preload", "seccomp"])
def test_a_power_cut_loses_nothing_that_was_synced_after_the_data_were_wiped(
    tmp_path: Path, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AgentShim._try_launcher

    async def try_launcher(self: AgentShim, host: str) -> LauncherTrial:
        return dataclasses.replace(await real(self, host), why_not_attached="the account is to begin with the program")

    monkeypatch.setattr(AgentShim, "_try_launcher", try_launcher)

    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        own = cluster.data_dir("n1")
        unsynced = f"open({own + '/file'!r}, 'w').write('unsynced'); print('written')"
        opened = f"import os; file = os.open({own + '/file'!r}, os.O_CREAT | os.O_WRONLY)"
        synced = f"{opened}; os.write(file, b'new'); os.fsync(file); print('synced')"
        await output_of(cluster, "n1", "first", unsynced)
        await Host("n1", 1, cluster, {}, lambda host, name: name).wipe()
        assert files_of(cluster, "n1") == []
        await output_of(cluster, "n1", "second", synced)
        assert (await disks.cut_power("f1", "n1")).lost_bytes == 0
        assert Path(cluster.local_path("n1", own), "file").read_bytes() == b"new"

    with_cluster(tmp_path, scenario, needs=("power",), mechanism=mechanism)


GROWS = """
import os, sys, time
print("up", flush=True)
number = 0
while True:
    number += 1
    try:
        descriptor = os.open(os.path.join(sys.argv[1], f"file{number % 4}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, bytes(1 << 16))
        os.fsync(descriptor)
        if number % 40 == 0:
            os.ftruncate(descriptor, 0)
        os.close(descriptor)
    except OSError as error:
        print(error.strerror, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))
@pytest.mark.parametrize("kind", ["fill", "shutdown", "freeze"])
def test_a_fault_of_a_whole_file_system_hits_only_programs_that_write(tmp_path: Path, kind: str) -> None:
    """A process that waits in the kernel for something else, here for its vfork child, is not hit."""

    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        idle = "import ctypes, signal\nprint('up', flush=True)\nctypes.CDLL(None).vfork()\nsignal.pause()"
        for host, code in (("n1", GROWS), ("n2", idle)):
            argv = [sys.executable, "-c", code, cluster.data_dir(host)]
            child = await cluster.spawn(host, Program(name="p", argv=argv, log_name="p.log"))
            async with asyncio.timeout(WAIT_S):
                while "up" not in Path(child.log_path).read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        await disks.impair("f", {host: DiskFault(kind=kind) for host in ("n1", "n2")})
        async with asyncio.timeout(2 * WAIT_S):
            while not (await disks.met("f"))["n1"].met:  # noqa: ASYNC110 - a program elsewhere
                await asyncio.sleep(0.02)
        assert (await disks.met("f"))["n2"].met == 0
        await disks.release("f")

    with_cluster(tmp_path, scenario, needs=("freeze", "fill", "shutdown", "crash", "full"))


SYNCS = """
import os, sys, time
descriptor = os.open(os.path.join(sys.argv[1], "file"), os.O_CREAT | os.O_WRONLY)
os.fsync(descriptor)
print("up", flush=True)
while len(sys.argv) > 2:
    time.sleep(0.05)
    try:
        os.fsync(descriptor)
    except OSError as error:
        print(error.strerror, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))
@pytest.mark.parametrize(("kind", "is_known"), [("shutdown", True), ("fill", False)])
def test_failed_syncs_of_a_supervised_program_count_as_hits_of_a_shutdown(
    tmp_path: Path, kind: str, is_known: bool
) -> None:
    """Without syncs its hits are unknown, since other calls fail as well; so are those of a full one."""

    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        for host, words in (("n1", ["again"]), ("n2", [])):
            argv = [sys.executable, "-c", SYNCS, cluster.data_dir(host), *words]
            child = await cluster.spawn(host, Program(name="p", argv=argv, log_name="p.log"))
            async with asyncio.timeout(WAIT_S):
                while "up" not in Path(child.log_path).read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert disks.mechanism("n1") == "seccomp"
        await disks.impair("f", {host: DiskFault(kind=kind) for host in ("n1", "n2")})
        async with asyncio.timeout(2 * WAIT_S):
            while is_known and not (await disks.met("f"))["n1"].met:  # noqa: ASYNC110 - a program elsewhere
                await asyncio.sleep(0.02)
        found = await disks.met("f")
        assert found["n2"].met is None and (found["n1"].met is not None) is is_known, found
        await disks.release("f")

    with_cluster(tmp_path, scenario, needs=("fill", "shutdown", "stall-fsync"), mechanism="seccomp")


def test_shared_storage_lacks_file_system_faults_and_bad_storage_is_refused(tmp_path: Path) -> None:
    assert NetnsCluster.configured(storage=SHARED).missing("disks", "freeze") is not None
    assert NetnsCluster.configured(storage=MEMORY).missing("disks", "freeze") is None
    assert NetnsCluster.configured().missing("disks", "stall") is None
    assert storage_for(None) == IMAGE
    with pytest.raises(ClusterUnavailable, match="--storage must be image, memory or shared, not 'ramdisk'"):
        storage_for("ramdisk")


DIES = """
import asyncio, os, signal, sys
from harness.clusters.base import Program
from harness.clusters.netns import NetnsCluster
from harness.run_state import RunState
from nemesis.mechanisms.file_systems import freeze
from nemesis.mechanisms.shim import why_no_shim

async def main():
    run = RunState.create(sys.argv[1], state_root=sys.argv[2])
    cluster = NetnsCluster(node_count=2, run=run, work_dir=sys.argv[3], ports=[7000], storage=sys.argv[4])
    await cluster.start()
    data = cluster.data_dir("n1")
    freeze(cluster.local_path("n1", data))
    if sys.argv[5] == "waits":
        code = "import os; os.write(1, b'now'); open(%r, 'w')" % (data + "/x")
        argv = [sys.executable, "-S", "-c", code]
        process = await cluster.spawn("n1", Program(name="stuck", argv=argv, log_name="stuck.log"))
        while True:
            stat = open(f"/proc/{process.pid}/stat").read()
            if stat.rpartition(")")[2].split()[0] == "D":
                break
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("storage", [IMAGE, MEMORY])
@pytest.mark.parametrize("program", ["waits", "none"])
def test_clean_thaws_and_removes_the_images_of_a_killed_harness(tmp_path: Path, storage: str, program: str) -> None:
    foreign = tmp_path / "foreign.img"
    foreign.write_bytes(bytes(1 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-F", str(foreign)], check=True)
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["mount", "-o", "loop", str(foreign), str(tmp_path / "elsewhere")], check=True)
    try:
        freeze(str(tmp_path / "elsewhere"))
        words = [f"{RUN}-dead", str(tmp_path / "state"), str(tmp_path / "run"), storage, program]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        died = subprocess.run([sys.executable, "-c", DIES, *words], env=environment, capture_output=True, text=True)
        assert died.returncode == -9, died.stderr
        image = tmp_path / "run" / "n1" / ("disk.img" if storage == IMAGE else "memory/disk.img")
        claims = load_run(str(tmp_path / "state" / f"{RUN}-dead.jsonl")).claims
        images = [claim.details["file_id"] for claim in claims if claim.kind == KIND_IMAGE]
        assert loop_devices_of(images[0], f"{RUN}-dead") != [], "a frozen image outlives its last mount"
        lines: list[str] = []
        report = clean(state_root=str(tmp_path / "state"), report=lines.append)
        assert report.left == []
        assert find_processes(marked_with("SPLITBRAIN_RUN", f"{RUN}-dead")) == []
        assert [point for point in mounts() if point.startswith(str(tmp_path / "run"))] == []
        deadline_s = time.monotonic() + WAIT_S
        while any(loop_devices_of(image, f"{RUN}-dead") for image in images):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not image.exists()
        assert str(tmp_path / "elsewhere") in mounts(), "a mount that belongs to no run is left alone"
        assert subprocess.run(["fsfreeze", "-u", str(tmp_path / "elsewhere")]).returncode == 0, "it was still frozen"
        assert clean(state_root=str(tmp_path / "state"), report=lines.append).removed == []
    finally:
        subprocess.run(["fsfreeze", "-u", str(tmp_path / "elsewhere")], capture_output=True)
        subprocess.run(["umount", str(tmp_path / "elsewhere")], check=True)


def test_a_hierarchy_of_control_groups_that_is_mounted_twice_counts_once(tmp_path: Path) -> None:
    program = "from harness.clusters.control_groups import cgroup_parents; print(cgroup_parents())"
    bind = f'mount --rbind /sys/fs/cgroup "{tmp_path}" && exec "$0" -c "{program}"'
    argv = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", bind, sys.executable]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    told = subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout
    assert told.strip() == str(cgroup_parents()) and cgroup_parents()


@pytest.mark.serial  # a concurrent `harness clean` would remove the device, which has no owner any more
@pytest.mark.xdist_group("clean")
def test_clean_finds_a_frozen_image_by_its_mark_when_its_state_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{RUN}-lost", str(tmp_path / "state"), str(tmp_path / "run"), MEMORY, "none"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    died = subprocess.run([sys.executable, "-c", DIES, *words], env=environment, capture_output=True, text=True)
    assert died.returncode == -9, died.stderr
    deadline_s = time.monotonic() + WAIT_S
    while len(devices := [device for device, mark in marked_devices() if mark.run_id == f"{RUN}-lost"]) != 1:
        assert devices != [], "the frozen image of n1 outlives its last mount"
        assert time.monotonic() < deadline_s, "the image of n2 is released with its namespace"
        time.sleep(0.01)
    groups = [f"{parent}/splitbrain-{RUN}-lost-{host}" for parent in cgroup_parents() for host in ("n1", "n2")]
    is_marked = marked_with(RUN_VARIABLE, f"{RUN}-lost")  # the process that forked the agents is in no group
    while any(Path(group, "cgroup.procs").read_text() for group in groups) or find_processes(is_marked):
        assert time.monotonic() < deadline_s, "the hosts' processes end with the harness"
        time.sleep(0.01)
    monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(tmp_path / "other-state"))
    elsewhere = clean(report=lambda line: None)
    # Concurrent tests may leave something for `harness clean` as well: only lines about this run count.
    assert [line for line in elsewhere.removed + elsewhere.left if RUN in line] == [], (
        "a run is cleaned by its own state only"
    )
    assert [note for note in elsewhere.notes if f"run {RUN}-lost" in note] == [
        f"run {RUN}-lost: loop device {devices[0]} belongs to a dead run: "
        f"remove it with SPLITBRAIN_STATE_DIR={tmp_path / 'state'} harness clean",
        f"run {RUN}-lost: its control groups ({len(groups)}) are empty and it has no state here: if its harness is "
        f"dead, `harness clean --run {RUN}-lost` removes them",
    ]
    (tmp_path / "state" / f"{RUN}-lost.jsonl").unlink()
    monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(tmp_path / "state"))
    report = clean(report=lambda line: None)
    assert {f"run {RUN}-lost: loop device {device}" for device in devices} <= set(report.removed)
    assert report.left == []
    assert [mark for _, mark in marked_devices() if mark.run_id == f"{RUN}-lost"] == []
    assert all(map(os.path.isdir, groups)), "without its state the run may still be alive"
    shutil.rmtree(os.path.join(temp_dir(), f"splitbrain-{RUN}-lost-agents"))
    named = clean(run_ids=[f"{RUN}-lost"], report=lambda line: None)
    assert len(named.removed) == 4 + len(groups) and named.left == [], (
        "namespaces and groups are found by the name of the run"
    )


def test_the_mark_of_a_live_harness_and_of_another_machine_protects_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(tmp_path / "other-state"))
        ours = [(device, mark) for device, mark in marked_devices() if mark.run_id == RUN]
        assert len(ours) == 2 and not any(mark.is_of_the_dead for _, mark in ours)
        clean(report=lambda line: None)
        assert [(device, mark) for device, mark in marked_devices() if mark.run_id == RUN] == ours
        assert (await disks.probe("n1", timeout_s=WAIT_S)).write.outcome == "ok"

    with_cluster(tmp_path, scenario)
    elsewhere = ImageMark(run_id=RUN, pid=1, start_ticks=1, boot_id="another machine's")
    assert not elsewhere.is_of_the_dead


_PRINTS_ITS_MARK = """
import json, os, sys
from harness.run_state import harness_process
namespace = os.stat("/proc/self/ns/pid").st_ino
print(json.dumps({"run_id": "x", **harness_process(), "pid_namespace": namespace}), flush=True)
sys.stdin.read()
"""

_JUDGES_A_MARK = """
import json, sys
from harness.clusters.loop_devices import ImageMark
print(ImageMark(**json.loads(sys.argv[1])).is_of_the_dead)
"""


def test_an_image_of_a_harness_in_another_pid_namespace_is_protected_while_it_may_live() -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    with subprocess.Popen(
        [*apart, _PRINTS_ITS_MARK], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        fields = json.loads(other.stdout.readline())
        mark = ImageMark(**fields)
        assert not mark.is_of_the_dead, "here its number is that of another process, or of none"
        other.stdin.close()
    is_seen_everywhere = os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC
    assert mark.is_of_the_dead is is_seen_everywhere
    own = json.dumps({**fields, **harness_process(), "pid_namespace": os.stat("/proc/self/ns/pid").st_ino})
    judged = subprocess.run(
        [*apart, _JUDGES_A_MARK, own], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert judged.stdout == "False\n", "this process is invisible there, but runs"


def test_a_foreign_mount_namespace_does_not_keep_a_file_system_mounted(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster, disks: FileSystemDisks) -> None:
        argv = ["unshare", "--mount", "--propagation", "private", "sleep", "60"]
        with subprocess.Popen(argv) as other:  # noqa: ASYNC220 - it returns at once
            try:
                await disks.impair("f1", {"n1": DiskFault(kind="shutdown")})
                await disks.release("f1")
                assert (await disks.probe("n1", timeout_s=WAIT_S)).sync.outcome == "ok"
            finally:
                other.kill()

    with_cluster(tmp_path, scenario)


def test_a_directory_without_room_for_a_disk_image_is_reported(tmp_path: Path) -> None:
    async def body() -> None:
        run = RunState.create(RUN, state_root=str(tmp_path / "state"))
        work_dir = tmp_path / "full"
        cluster = NetnsCluster(node_count=1, run=run, work_dir=str(work_dir), ports=[PORT], storage=IMAGE)
        with pytest.raises(
            ClusterUnavailable, match=rf"free some space for {work_dir}/n1/disk\.img; to run without one"
        ):
            await cluster.start()
        await cluster.stop()
        assert run.claims == () and run.close()

    (tmp_path / "full").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path / "full")], check=True)
    try:
        asyncio.run(body())
    finally:
        subprocess.run(["umount", str(tmp_path / "full")], check=True)


def test_a_partly_created_cluster_is_removed_again(tmp_path: Path) -> None:
    async def body() -> None:
        run = RunState.create(RUN, state_root=str(tmp_path / "state"))
        work_dir = tmp_path / "run"
        cluster = NetnsCluster(node_count=2, run=run, work_dir=str(work_dir), ports=[PORT], storage=IMAGE)
        (work_dir / "n2").mkdir(parents=True)
        (work_dir / "n2" / "disk.img").write_text("in the way")
        with pytest.raises(ClusterUnavailable, match=r"n2 cannot have a file system of its own .*exists"):
            await cluster.start()
        await cluster.stop()
        assert [point for point in mounts() if point.startswith(str(tmp_path))] == []
        assert run.claims == () and run.close()

    asyncio.run(body())


@pytest.mark.parametrize("storage", [IMAGE, MEMORY])
def test_namespaces_groups_and_images_are_on_record_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """A harness may be killed between the two, and a claim of what was never made is harmless."""
    run = RunState.create(RUN, state_root=str(tmp_path / "state"))
    missing: list[str] = []
    made: list[str] = []

    def on_record(kind: str, idents: Sequence[str]) -> None:
        made.extend([kind] * len(idents))
        known = {(claim.kind, claim.ident) for claim in load_run(run.path).claims}
        missing.extend(ident for ident in idents if (kind, ident) not in known)

    batch, mkdir, create = NetnsCluster._batch, os.mkdir, NetnsCluster._create_file_systems

    async def batched(self: NetnsCluster, ip: Any, lines: Sequence[str]) -> None:
        on_record(KIND_NETNS, [line.removeprefix("netns add ") for line in lines if line.startswith("netns add ")])
        await batch(self, ip, lines)

    def make_directory(path: str, *mode: int) -> None:
        if path.startswith(tuple(cgroup_parents())):
            on_record(KIND_CGROUP, [path])
        mkdir(path, *mode)

    async def created(self: NetnsCluster, agents: Any, places: Any) -> Any:
        on_record(KIND_IMAGE, [place.image for place in places.values()])
        claims = {claim.ident: claim.details for claim in load_run(run.path).claims}
        assert all(claims[place.image]["point"] == place.mount_point for place in places.values())
        return await create(self, agents, places)

    monkeypatch.setattr(NetnsCluster, "_batch", batched)
    monkeypatch.setattr(os, "mkdir", make_directory)
    monkeypatch.setattr(NetnsCluster, "_create_file_systems", created)

    async def body() -> None:
        cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "run"), ports=[PORT], storage=storage)
        cluster.prepare({("disks", "freeze"), ("resources", "memory")})
        await cluster.start()
        await cluster.stop()

    asyncio.run(body())
    assert missing == [] and run.claims == () and run.close()
    # The bridge, two hosts and the clients; a group and one inside it, in each hierarchy.
    assert (made.count(KIND_NETNS), made.count(KIND_IMAGE)) == (4, 2)
    assert made.count(KIND_CGROUP) == 2 * 2 * len(cgroup_parents())
