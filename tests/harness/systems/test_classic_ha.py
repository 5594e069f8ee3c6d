"""Classic HA as a system under test: valid runs, losses that are found, and promotions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.clusters.sim.cluster import SimCluster
from harness.errors import SystemUnderTestError
from harness.systems.broker import BrokerSystem


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(
        [
            "run", "--cluster", "sim", "--nodes", "3", "--workload", "log", "--time-limit", "12", "--rate", "100",
            "--nemesis-interval", "2", "--seed", "3", "--store", str(tmp_path), *words,
        ]
    )  # fmt: skip
    return status, json.loads(next(tmp_path.glob("*/2*/results.json")).read_text())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_faults_of_one_machine_lose_nothing_with_a_synchronous_flush(tmp_path: Path, mode: str) -> None:
    status, results = run(tmp_path, "--set", f"replication={mode}", "--nemesis", "kill@leader,partition,power=cut@one")
    assert (status, results["valid"]) == (0, True), results["reason"]
    assert results["checks"]["replicas"]["reason"].startswith("3 replicas hold the same")
    assert "leaders" not in results["checks"]
    said = results["system"]["acknowledged"]
    assert said["OK"] > 100 and (mode == "sync" or set(said) == {"OK"})


def test_losses_of_an_asynchronous_master_in_a_power_cut_are_found(tmp_path: Path) -> None:
    words = ("--set", "replication=async", "--set", "flush_mode=async", "--nemesis", "power=cut@leader")
    status, results = run(tmp_path, *words)
    assert (status, results["valid"]) == (1, False)
    assert results["checks"]["log"]["valid"] is False
    assert set(results["checks"]["replicas"]["refusing"]) == {"n2", "n3"}, (
        "slaves keep what the master lost, and report it"
    )
    recovers = results["checks"]["recovers"]
    assert recovers["valid"] == "unknown"
    assert recovers["reason"].startswith("not recovered after 15 s: n2 waits for an operator"), (
        "no operator comes in this run"
    )


def test_stale_reads_at_slaves_are_found(tmp_path: Path) -> None:
    words = ("--set", "replication=async", "--set", "slave_reads=on", "--nemesis", "partition")
    status, results = run(tmp_path, *words)
    assert (status, results["checks"]["linearizable"]["valid"]) == (1, False)
    assert results["checks"]["replicas"]["valid"] is True, "reads are stale, but nothing is lost"


def three_hosts(tmp_path: Path) -> SimCluster:
    extra_hosts = BrokerSystem.extra_hosts
    return SimCluster(node_count=3, run=None, work_dir=str(tmp_path), ports=BrokerSystem.ports, extra_hosts=extra_hosts)


def test_a_slave_is_promoted_and_the_former_master_follows_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = three_hosts(tmp_path)
        system = BrokerSystem(
            cluster=cluster, settings={"replication": "sync"}, keys=2, log_dir=str(tmp_path), operation_timeout_s=3.0
        )
        await system.start()
        assert list(await system.leaders()) == ["n1"]
        client: Any = system.connection("queue", process=1, thread=0)
        for value in range(20):
            assert await client.append(value % 2, value) == value // 2
        await system.recover(timeout_s=60)  # the slaves may have joined late: the promoted one must have everything
        assert system._recovered
        cluster.machine("n1").power_fail()
        await system.promote("n3")
        await client.close()
        client = system.connection("queue", process=2, thread=1)
        for value in range(20, 30):
            assert await client.append(value % 2, value) == value // 2
        assert client.node == "n3" and list(await system.leaders()) == ["n3"]
        cluster.machine("n1").boot()
        await system.restart("n1")
        await system.recover(timeout_s=60)
        assert system._recovered
        await client.close()
        await system.stop()

    SimCluster.run_harness(scenario(), seed=1)


def test_promotion_is_refused_with_dledger(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = three_hosts(tmp_path)
        system = BrokerSystem(cluster=cluster, settings={}, keys=2, log_dir=str(tmp_path), operation_timeout_s=3.0)
        with pytest.raises(SystemUnderTestError, match="DLedger elects"):
            await system.promote("n2")

    SimCluster.run_harness(scenario(), seed=1)
