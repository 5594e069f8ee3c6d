"""Whole runs on real processes and real sockets: valid for a correct system, invalid for a broken one, and cleaned up
however they end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.clusters.select import choose
from harness.execution import Parts, perform, plan_faults
from harness.report import OutputConsole
from harness.store import Store
from harness.systems.broker import BROKER_PORT, DLEDGER_PORT, NAME_SERVER_PORT, BrokerSystem
from harness.test import NemesisChoice, Test
from nemesis.mechanisms.shim import why_no_shim

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.serial]

NO_SHIM = why_no_shim()
needs_shim = pytest.mark.skipif(NO_SHIM is not None, reason=str(NO_SHIM))

NETNS_PROBLEM = "" if choose("auto").name == "netns" and os.geteuid() == 0 else "no namespaces for this process"


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for run states of this test alone."""
    path = tmp_path / "states"
    monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(path))
    return path


def perform_test(store: Path, *, system_class: Any = BrokerSystem, **changes: Any) -> dict[str, Any]:
    test = Test(
        **{
            "system": "broker", "cluster": "local", "nodes": 3, "workload": "register",
            "nemesis": (NemesisChoice("partition"),), "nemesis_interval_s": 2.0, "time_limit_s": 8.0,
            "concurrency": 6, "rate": 150.0, "seed": 11, **changes,
        }
    )  # fmt: skip
    nemeses = {choice.name: registry.load("nemeses", choice.name) for choice in test.nemesis}
    parts = Parts(
        test=test,
        cluster_class=registry.load("clusters", test.cluster),
        cluster_reason="a test",
        system_class=system_class,
        workload=registry.load("workloads", test.workload)(),
        nemeses=nemeses,
        schedule=plan_faults(test, nemeses, registry.load("clusters", test.cluster), system_class),
    )
    _, results = perform(parts, Store(store), OutputConsole(file=io.StringIO()))
    return results


@pytest.mark.parametrize(
    "cluster",
    ["local", pytest.param("netns", marks=pytest.mark.skipif(bool(NETNS_PROBLEM), reason=NETNS_PROBLEM))],
)
@pytest.mark.parametrize("workload", ["register", pytest.param("log", marks=pytest.mark.long)])
def test_a_correct_system_stays_valid_under_partitions(
    cluster: str, workload: str, tmp_path: Path, state_dir: Path
) -> None:
    results = perform_test(tmp_path, cluster=cluster, workload=workload)
    assert results["valid"] is True, results["reason"]
    assert results["faults"]
    assert all(fault["proven"] and fault["healed"] for fault in results["faults"])
    assert results["ops"]["ok"] > 300
    assert results["checks"]["replicas"]["compared_to"] > 0
    assert not state_dir.exists() or list(state_dir.iterdir()) == []


@needs_shim
def test_another_replica_leads_while_the_leaders_disk_stalls(tmp_path: Path, state_dir: Path) -> None:
    stall = (NemesisChoice("disk-stall", "fsync@leader"),)
    results = perform_test(tmp_path, workload="log", nemesis=stall, nemesis_interval_s=4.0, time_limit_s=9.0, rate=60.0)
    assert results["valid"] is True, results["reason"]
    [fault] = results["faults"]
    terms = results["checks"]["leaders"]["terms"]
    during = [term["leader"] for term in terms if fault["start_ns"] < term["start_ns"] < fault["end_ns"]]
    assert during and during[0] not in fault["hosts"], terms
    assert results["checks"]["log"]["stats"]["counts"]["lost"] == 0


@pytest.mark.parametrize(
    ("name", "variant", "settings"),
    [
        pytest.param("members", "remove@followers", {}, marks=pytest.mark.long),
        ("members", "remove@leader", {}),
        pytest.param("transfer", "to@followers", {}, marks=pytest.mark.long),
        ("restart", "rolling@all", {}),
        ("promote", "switch@leader", {"replication": "sync"}),
    ],
)
def test_operator_actions_lose_no_messages(
    name: str, variant: str, settings: dict[str, str], tmp_path: Path, state_dir: Path
) -> None:
    results = perform_test(
        tmp_path, workload="log", nemesis=(NemesisChoice(name, variant),), nemesis_interval_s=3.0, time_limit_s=9.0,
        rate=60.0, settings=settings,
    )  # fmt: skip
    assert results["valid"] is True, results["reason"]
    [fault] = results["faults"]
    assert fault["proven"] and fault["healed"]
    assert results["checks"]["log"]["stats"]["counts"]["lost"] == 0
    if name == "members":  # the removed member belongs to the group again
        assert {table["members"] for table in results["system"]["final_status"].values()} == {"n1,n2,n3"}


@needs_shim
@pytest.mark.parametrize("flush_mode", ["sync", "async"])
def test_a_power_cut_loses_messages_only_with_async_flush(flush_mode: str, tmp_path: Path, state_dir: Path) -> None:
    settings = {"flush_mode": flush_mode, "flush_interval_ms": "500", "flush_least_pages": "1000"}
    cut = (NemesisChoice("power", "cut@all"),)
    results = perform_test(
        tmp_path, workload="log", nemesis=cut, nemesis_interval_s=3.0, time_limit_s=7.0, settings=settings
    )
    [fault] = results["faults"]
    assert fault["proven"] and fault["healed"]
    lost = results["checks"]["log"]["stats"]["counts"]["lost"]
    if flush_mode == "sync":
        assert (results["valid"], lost) == (True, 0), results["reason"]
    else:
        assert results["valid"] is False and lost > 0


def test_unsafe_reads_are_found_invalid_when_the_leader_is_cut_off(tmp_path: Path, state_dir: Path) -> None:
    results = perform_test(
        tmp_path, nodes=5, nemesis=(NemesisChoice("partition", "leader"),), settings={"read_mode": "unsafe"}
    )
    assert results["valid"] is False
    assert 2 <= len(results["checks"]["linearizable"]["witness"]["operations"]) <= 6


class AttackedBroker(BrokerSystem):
    """The reference system while garbage is sent to each of its ports."""

    attacks = 0

    async def start(self) -> None:
        await super().start()
        AttackedBroker.attacks = 0
        cluster = self._cluster
        targets = [(cluster.bind_address(h), port) for h in cluster.hosts for port in (BROKER_PORT, DLEDGER_PORT)]
        targets.append((cluster.bind_address("ns1"), NAME_SERVER_PORT))
        self.attackers = [asyncio.create_task(_attack(target, index)) for index, target in enumerate(targets)]

    async def stop(self) -> None:
        for task in getattr(self, "attackers", []):
            task.cancel()
        await super().stop()


async def _attack(target: tuple[str, int], seed: int) -> None:
    rng = random.Random(seed)
    held: list[asyncio.StreamWriter] = []
    try:
        while True:
            try:
                _reader, writer = await asyncio.open_connection(*target)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            AttackedBroker.attacks += 1
            kind = rng.randrange(5)
            if kind == 0:
                writer.write(rng.randbytes(rng.randrange(1, 4096)))
            elif kind == 1:
                writer.write((2**31 - 1).to_bytes(4, "big") + rng.randbytes(64))  # oversize
            elif kind == 2:
                writer.write(b"\x00\x00\x10\x00\x00\x00\x00\x40{")  # half a frame, then silence
            elif kind == 3:
                writer.write(b"\x00\x00\x00\x0a\x00\x00\x00\x06[1,2]]")  # JSON, but no header
            held.append(writer)  # kind 4 sends nothing at all
            if len(held) > 60:
                held.pop(0).close()
            await asyncio.sleep(0.01)
    finally:
        for writer in held:
            writer.close()


def test_garbage_on_every_port_does_not_disturb_a_run(tmp_path: Path, state_dir: Path) -> None:
    results = perform_test(tmp_path, system_class=AttackedBroker, nemesis=(), time_limit_s=6.0)
    assert AttackedBroker.attacks > 100
    assert results["valid"] is True, results["reason"]
    assert results["ops"]["ok"] > 100


def _start(cwd: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _wait_for_fault(store: Path, process: subprocess.Popen[str], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for history in store.glob("*/*/history.jsonl"):
            if '"proof"' in history.read_text():
                return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("no fault was injected in time")


@pytest.fixture
def running(tmp_path: Path, state_dir: Path) -> Iterator[subprocess.Popen[str]]:
    process = _start(
        tmp_path, "run", "--cluster", "local", "--nodes", "3", "--nemesis", "partition=one",
        "--nemesis-interval", "2", "--time-limit", "120", "--json",
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_heals_the_faults_and_gives_a_verdict(running: subprocess.Popen[str], tmp_path: Path) -> None:
    _wait_for_fault(tmp_path / "store", running)
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    results = json.loads(output)
    assert running.returncode == 2, errors
    assert results["valid"] == "unknown" and "SIGINT" in results["interrupted"]
    assert "interrupted: SIGINT" in results["reason"]
    assert all(check["valid"] is True for check in results["checks"].values())
    assert all(fault["healed"] for fault in results["faults"])


def _processes_of(run_id: str) -> list[int]:
    marked = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                is_zombie = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                continue
            if f"SPLITBRAIN_RUN={run_id}".encode() in environment.split(b"\0") and not is_zombie:
                marked.append(int(entry.name))
    return marked


@pytest.mark.xdist_group("clean")
def test_clean_after_kill_9_leaves_nothing(running: subprocess.Popen[str], tmp_path: Path, state_dir: Path) -> None:
    _wait_for_fault(tmp_path / "store", running)
    (state,) = state_dir.glob("*.jsonl")
    run_id = state.stem
    assert _processes_of(run_id), "the nodes of a running test carry its mark"
    running.kill()
    running.communicate()
    cleaned = _start(tmp_path, "clean")
    output, errors = cleaned.communicate(timeout=60)
    assert cleaned.returncode == 0, (output, errors)
    assert _processes_of(run_id) == []
    assert list(state_dir.glob("*")) == [] if state_dir.exists() else True
    analyzed = _start(tmp_path, "analyze", "latest", "--json")
    output, errors = analyzed.communicate(timeout=60)
    assert analyzed.returncode == 2, "the replicas of a killed run were not checked, so its verdict is unknown"
    assert json.loads(output)["valid"] == "unknown"
