"""The node in simulation: whole runs, faults, and reproducibility."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.clusters.base import Program
from harness.clusters.sim.cluster import SimCluster
from harness.clusters.sim.errors import NotSimulated, SimulationError
from harness.clusters.sim.guard import guarded
from harness.execution import Parts, perform, plan_faults
from harness.report import OutputConsole
from harness.store import Store
from harness.test import NemesisChoice, Test
from nemesis.target import ABILITIES, PAUSED, RUNNING, ClockSkew, DiskFault, Link, LinkShape

EXTRA_HOST = "ns1"
ROOT = Path(__file__).resolve().parents[4]


def run(main: Callable[[SimCluster], Coroutine[Any, Any, Any]], tmp_path: Path, *, seed: int = 1) -> Any:
    """Run `main(cluster)` on a started cluster of three replicas."""

    async def whole() -> Any:
        cluster = SimCluster(node_count=3, run=None, work_dir=str(tmp_path), ports=[9876], extra_hosts=[EXTRA_HOST])
        await cluster.start()
        try:
            return await main(cluster)
        finally:
            await cluster.stop()
            await cluster.stop()

    return SimCluster.run_harness(whole(), seed=seed)


def name_server(address: str) -> Program:
    return Program(
        name="nameserver",
        argv=[sys.executable, "-m", "node", "nameserver", "--listen", address],
        log_name="nameserver.log",
    )


def perform_test(
    tmp_path: Path, *, nemesis: str, seed: int, workload: str = "register", settings: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Any]]:
    """A whole run as `harness run` does it; returns its history and results."""
    choices = tuple(NemesisChoice.parse(word) for word in nemesis.split(",") if word)
    test = Test(
        system="broker",
        cluster="sim",
        nodes=5,
        workload=workload,
        nemesis=choices,
        nemesis_interval_s=2.0,
        time_limit_s=14.0,
        concurrency=5,
        rate=50,
        seed=seed,
        settings=settings or {},
    )
    nemeses = {choice.name: registry.load("nemeses", choice.name) for choice in choices}
    parts = Parts(
        test=test,
        cluster_class=SimCluster,
        cluster_reason="asked for",
        system_class=registry.load("systems", "broker"),
        workload=registry.load("workloads", workload)(),
        nemeses=nemeses,
        schedule=plan_faults(test, nemeses, SimCluster, registry.load("systems", "broker")),
    )
    run_dir, results = perform(parts, Store(tmp_path / "store"), OutputConsole(file=io.StringIO()))
    return Path(run_dir.history_path).read_bytes(), results


def test_a_probe_that_finishes_after_a_stall_does_not_affect_the_next_probe(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> None:
        disks = cluster.disks
        await disks.impair("f1", {"n1": DiskFault(kind="stall")})
        assert (await disks.probe("n1", timeout_s=1.0)).write.outcome == "no answer"
        await disks.release("f1")
        await asyncio.sleep(1.0)  # by now that probe has written its file
        await disks.impair("f2", {"n1": DiskFault(kind="full")})
        assert (await disks.probe("n1", timeout_s=1.0)).write.outcome == "ENOSPC"

    run(main, tmp_path)


def test_a_bit_flipped_at_rest_is_restored_on_release(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> None:
        disks, disk = cluster.disks, cluster.machine("n1").disk
        path = f"{cluster.data_dir('n1')}/data/dledger/data/00"
        with pytest.raises(RuntimeError, match="no data/dledger/data"):
            await disks.flip_bit("f1", "n1", files="data/dledger/data/*", place=0.5, bit=3)
        disk.put(path, bytes(range(1, 101)) + bytes(900))
        flipped = await disks.flip_bit("f1", "n1", files="data/dledger/data/*", place=0.5, bit=3)
        assert (flipped.offset, flipped.before, flipped.after) == (50, 51, 51 ^ 8)
        assert disks.flipped("f1") == {"n1": flipped} and disk.inode(path).cache[50] == 51 ^ 8
        disk.power_fail()
        assert disk.inode(path).cache[50] == 51 ^ 8, "the flip survives a power cut"
        await disks.flip_bit("f3", "n1", files="data/dledger/data/*", place=0.5, bit=0)
        await disks.release("f1")
        assert disks.flipped("f1") == {} and disk.inode(path).cache[50] == 51 ^ 1, "the other fault's bit stays flipped"
        await disks.release("f3")
        assert disk.inode(path).cache[50] == 51
        await disks.flip_bit("f2", "n1", files="data/dledger/data/*", place=0.5, bit=3)
        disk.inode(path).write(50, b"x")
        await disks.release_all()
        assert disk.inode(path).cache[50] == ord("x"), "data written after the flip is kept"

    run(main, tmp_path)


@pytest.mark.parametrize(("workload", "nemesis"), [("register", "partition,kill"), ("log", "pause,power")])
def test_a_run_under_faults_is_valid_and_calls_nothing_outside_the_simulation(
    tmp_path: Path, workload: str, nemesis: str
) -> None:
    with guarded() as guard:
        history, results = perform_test(tmp_path, nemesis=nemesis, seed=3, workload=workload)
    assert guard.violations == []
    assert results["valid"] is True, results
    assert all(results["checks"][name]["valid"] is True for name in ("replicas", "leaders", "invariants"))
    assert history.count(b'"process":"nemesis"') >= 8


def test_only_a_run_with_a_violation_keeps_the_replicas_files(tmp_path: Path) -> None:
    def logs() -> list[Path]:
        return list(tmp_path.glob("store/*/2*/nodes/n*/data/data/dledger/data/0*"))

    _, results = perform_test(tmp_path, nemesis="", seed=1)
    assert results["valid"] is True and logs() == []
    _, results = perform_test(tmp_path, nemesis="", seed=1, settings={"mutant": "quorum-off-by-one"})
    assert results["valid"] is False and len(logs()) >= 5
    assert list(tmp_path.glob("store/*/2*/nodes/n1/data/broker.toml"))


def _history_digest(tmp_path: Path, name: str, hash_seed: str) -> str:
    store = tmp_path / name
    command = ["run", "--cluster", "sim", "--seed", "5", "--time-limit", "12", "--rate", "50", "--store", str(store)]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *command, "--nemesis", "partition,kill,pause", "--nemesis-interval", "2"],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (history,) = store.glob("*/2*/history.jsonl")
    return hashlib.sha256(history.read_bytes()).hexdigest()


@pytest.mark.long
def test_the_same_seed_gives_the_same_history_in_every_process(tmp_path: Path) -> None:
    assert _history_digest(tmp_path, "one", "0") == _history_digest(tmp_path, "two", "4711")


def test_another_seed_gives_another_history(tmp_path: Path) -> None:
    first, _ = perform_test(tmp_path / "1", nemesis="", seed=1)
    other, _ = perform_test(tmp_path / "2", nemesis="", seed=2)
    assert first != other


def test_programs_start_pause_end_and_leave_their_logs(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> None:
        address = f"{cluster.bind_address(EXTRA_HOST)}:9876"
        process = await cluster.spawn(EXTRA_HOST, name_server(address))
        assert process.host == EXTRA_HOST and process.pid is None and process.exit_status() is None
        await asyncio.sleep(1)
        await process.pause()
        assert await process.state() == PAUSED
        assert await process.terminate(grace_s=1) == -9  # a stopped process does not handle SIGTERM
        again = await cluster.spawn(EXTRA_HOST, name_server(address))
        await asyncio.sleep(1)
        await again.resume()
        assert await again.state() == RUNNING
        assert await again.terminate() == 0
        assert await again.terminate() == 0
        third = await cluster.spawn(EXTRA_HOST, name_server(address))
        await third.kill()
        assert third.exit_status() == -9
        wrong = await cluster.spawn(EXTRA_HOST, name_server("10.9.9.9:9876"))
        await asyncio.sleep(1)
        assert wrong.exit_status() == 1

    run(main, tmp_path)
    log = (tmp_path / EXTRA_HOST / "nameserver.log").read_text()
    assert log.count("READY nameserver") == 2
    assert "2026-01-01T00:00:02" in log and "cannot assign" in log


def test_an_unwritable_log_is_reported_at_the_end_and_does_not_affect_the_run(tmp_path: Path) -> None:
    """As on a full disk of this machine, which is not simulated."""
    (tmp_path / EXTRA_HOST).write_text("a file in the place of the host's directory")

    seen: list[int | None] = []

    async def main(cluster: SimCluster) -> None:
        process = await cluster.spawn(EXTRA_HOST, name_server(f"{cluster.bind_address(EXTRA_HOST)}:9876"))
        await asyncio.sleep(1)
        await process.kill()
        seen.append(process.exit_status())

    with pytest.raises(FileExistsError, match=EXTRA_HOST):
        run(main, tmp_path)
    assert seen == [-9]


def test_only_programs_of_the_node_can_be_spawned(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> None:
        for argv in (["sleep", "1"], ["python", "-m", "http.server"], ["python", "-m", "node", "zookeeper"]):
            with pytest.raises(NotSimulated):
                await cluster.spawn("n1", Program(name="x", argv=argv, log_name="x.log"))
        await cluster.put_file("n1", "/n1/data/bad.toml", b"nonsense = 1\n")
        argv = ["python", "-m", "node", "broker", "--config", "/n1/data/bad.toml"]
        process = await cluster.spawn("n1", Program(name="broker", argv=argv, log_name="broker.log"))
        await asyncio.sleep(1)
        assert process.exit_status() == 254

    run(main, tmp_path)
    assert "bad.toml: " in (tmp_path / "n1" / "broker.log").read_text()


def test_files_of_hosts_are_exported_only_on_request(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> tuple[SimCluster, str]:
        path = f"{cluster.data_dir('n2')}/x/y"
        for host in ("n1", "n2"):
            await cluster.put_file(host, f"{cluster.data_dir(host)}/x/y", b"content")
            await cluster.put_file(host, f"{cluster.data_dir(host)}/xx", b"beside it")
        assert cluster.address_from("n1", "n2", 9876) == "10.77.0.2:9876"
        with pytest.raises(ValueError, match="not one of this"):
            cluster.address_from("n1", "n2", 1)
        with pytest.raises(KeyError):
            cluster.data_dir("n9")
        assert list(cluster.hosts) == ["n1", "n2", "n3"]
        return cluster, cluster.local_path("n2", path)

    def exported() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    cluster, local_path = run(main, tmp_path)
    assert Path(local_path).read_bytes() == b"content" and exported() == ["n2/data/x/y"]
    assert Path(cluster.local_path("n1", "/n1/data/x"), "y").read_bytes() == b"content"
    assert exported() == ["n1/data/x/y", "n2/data/x/y"]
    cluster.leave_files()
    assert exported() == ["n1/data/x/y", "n1/data/xx", "n2/data/x/y", "n2/data/xx"]


def test_a_simulated_cluster_refuses_a_real_loop_and_too_many_replicas(tmp_path: Path) -> None:
    async def main() -> None:
        SimCluster(node_count=3, run=None, work_dir=str(tmp_path), ports=[1])

    with pytest.raises(SimulationError, match="simulated loop"):
        asyncio.run(main())
    with pytest.raises(ValueError, match="replicas"):
        SimCluster.run_harness(_too_many(tmp_path), seed=1)


async def _too_many(tmp_path: Path) -> None:
    SimCluster(node_count=1000, run=None, work_dir=str(tmp_path), ports=[1])


def test_only_abilities_of_file_systems_and_kernels_are_not_simulated() -> None:
    lacking = [ability for kind, names in ABILITIES.items() for ability in names if SimCluster.missing(kind, ability)]
    # The simulation has no file system, no kernel, and no checksums that detect corrupted packets.
    kernel = [*ABILITIES["resources"], *ABILITIES["clients"], *ABILITIES["names"]]
    assert lacking == ["freeze", "fill", "shutdown", "crash", "corrupt", *kernel]
    with pytest.raises(KeyError):
        SimCluster.missing("links", "colour")


def test_clocks_of_hosts_are_skewed_and_released(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> None:
        clocks = [cluster.machine(host).clock for host in cluster.hosts]
        await cluster.clocks.skew("f1", {"n1": ClockSkew(offset_ms=1000), "n2": ClockSkew(offset_ms=-1000)})
        await cluster.clocks.skew("f2", {"n1": ClockSkew(offset_ms=500)})
        assert [clock.offset_ms for clock in clocks] == [1500, -1000, 0]
        await cluster.clocks.release("f1")
        assert [clock.offset_ms for clock in clocks] == [500, 0, 0]
        await cluster.clocks.release_all()
        assert [clock.offset_ms for clock in clocks] == [0, 0, 0]
        with pytest.raises(KeyError):
            await cluster.clocks.skew("f3", {"n9": ClockSkew(offset_ms=1)})

    run(main, tmp_path)


@pytest.mark.parametrize(
    ("fault", "write", "sync", "read"),
    [
        (DiskFault(kind="stall"), "no answer", "not tried", "not tried"),
        (DiskFault(kind="stall-fsync"), "ok", "no answer", "not tried"),
        (DiskFault(kind="slow", delay_ms=100), "ok", "ok", "ok"),
        (DiskFault(kind="full"), "ENOSPC", "ENOSPC", "ENOENT"),
        (DiskFault(kind="error-write"), "EIO", "ok", "ok"),
        (DiskFault(kind="error-fsync"), "ok", "EIO", "ok"),
        (DiskFault(kind="error-read"), "ok", "ok", "EIO"),
    ],
)
def test_disk_faults_show_in_a_probe(tmp_path: Path, fault: DiskFault, write: str, sync: str, read: str) -> None:
    async def main(cluster: SimCluster) -> None:
        await cluster.disks.impair("f1", {"n1": fault})
        probe = await cluster.disks.probe("n1", timeout_s=1)
        assert (probe.write.outcome, probe.sync.outcome, probe.read.outcome) == (write, sync, read)
        if fault.kind == "slow":
            assert 0.1 < probe.write.seconds < 0.11 and 0.1 < probe.sync.seconds < 0.2
        await cluster.disks.impair("f2", {"n1": fault, "n2": fault})
        await cluster.disks.release("f1")
        assert (await cluster.disks.probe("n1", timeout_s=1)).write.outcome == write
        await cluster.disks.release_all()
        for host in ("n1", "n2"):
            probe = await cluster.disks.probe(host, timeout_s=1)
            assert (probe.write.outcome, probe.sync.outcome, probe.read.outcome) == ("ok", "ok", "ok")
        assert await cluster.disks.reaches("n1", None) is None
        with pytest.raises(ValueError, match="no fault 'haunted'"):
            await cluster.disks.impair("f3", {"n1": DiskFault(kind="haunted")})
        with pytest.raises(KeyError):
            await cluster.disks.impair("f3", {"n9": fault})

    run(main, tmp_path)


def test_a_power_cut_may_lose_unsynced_data_but_never_synced_data(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> tuple[int, bytes]:
        async def program(process: Any) -> None:
            file = await process.runtime.disk.create("/n1/data/f")
            await file.write(0, b"s" * 4096, sync=True)
            await file.write(4096, b"u" * 4096)
            await process.stop_requested.wait()

        machine = cluster.machine("n1")
        machine.on_end = None
        machine.start(program)
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="while its replica runs"):
            await cluster.disks.cut_power("f1", "n1")
        machine.kill()
        cut = await cluster.disks.cut_power("f1", "n1")
        assert cluster.disks.lost("f1") == {"n1": cut}
        await cluster.disks.release("f1")
        assert cluster.disks.lost("f1") == {}
        return cut.lost_bytes or 0, bytes(machine.disk.inode("/n1/data/f").cache)

    lost = []
    for seed in range(30):
        lost_bytes, content = run(main, tmp_path, seed=seed)
        assert content[:4096] == b"s" * 4096
        assert (lost_bytes == 0) == (content[4096:] == b"u" * 4096)
        lost.append(lost_bytes)
    assert 0 in lost and 4096 in lost


def test_link_measurements_match_the_shapes_of_the_links(tmp_path: Path) -> None:
    async def main(cluster: SimCluster) -> None:
        good, bad = Link("n1", "n2"), Link("n2", "n1")

        async def measure() -> Any:
            found = await cluster.links.measure([good, bad], count=200, size_bytes=100, timeout_s=2)
            assert found[good].received == found[good].sent == 200 and found[good].duplicates == 0
            assert max(found[good].delays_ms) < 50
            return found[bad]

        shape = LinkShape(delay_ms=40, jitter_ms=5, loss_percent=20, duplicate_percent=20, reorder_percent=20)
        await cluster.links.shape("f1", {bad: shape})
        seen = await measure()
        assert 120 < seen.received < 190 and seen.duplicates > 10 and seen.out_of_order > 10
        assert 30 < sorted(seen.delays_ms)[len(seen.delays_ms) // 2] < 50
        await cluster.links.release("f1")
        await cluster.links.shape("f2", {bad: LinkShape(rate_bytes_per_s=10_000)})
        assert (await measure()).seconds == pytest.approx(2, rel=0.1)
        await cluster.links.release_all()
        assert max((await measure()).delays_ms) < 50
        await cluster.network.cut("f3", {"n1": frozenset({"n2"})})
        assert (await measure()).received == 0
        with pytest.raises(ValueError, match="no link"):
            await cluster.links.shape("f4", {Link("n1", "n9"): shape})

    run(main, tmp_path)


def _benchmark_digest(python: str, hash_seed: str) -> str:
    done = subprocess.run(
        [python, "-m", "benchmarks.simulation", "--digest", "9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_simulated_run_imports_no_third_party_package() -> None:
    """So any Python can perform one without further packages, which the next test relies on."""
    program = (
        "import sys, benchmarks.simulation; "
        "print(sorted({name.partition('.')[0] for name, module in sys.modules.items() "
        "if 'site-packages' in (getattr(module, '__file__', None) or '')}))"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert set(ast.literal_eval(answer.stdout)) <= {"_distutils_hack"}, answer.stderr


@pytest.mark.long
def test_every_version_of_python_gives_the_same_history(other_python: str) -> None:
    assert _benchmark_digest(other_python, "1") == _benchmark_digest(sys.executable, "2")
