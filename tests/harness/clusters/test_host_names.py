"""Missing, wrong and late names reach the programs of a host; a fault without lookups was not hit."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clusters.base import Program
from harness.clusters.host_names import NamedHost, why_no_names
from harness.clusters.local import LocalCluster
from harness.clusters.netns import NetnsCluster
from harness.run_state import STATE_DIR_VARIABLE, RunState
from harness.systems import toy_server
from nemesis.name_service import NAME_SERVICE
from nemesis.target import ABILITIES

Eventually = Callable[..., Awaitable[None]]

WHY_NOT = why_no_names() if os.geteuid() == 0 else "needs root"
PORT = 21973

pytestmark = [
    pytest.mark.root,
    pytest.mark.cluster,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

LOOKS_UP = """
import socket, time
while True:
    try:
        found = socket.gethostbyname("n2")
    except socket.gaierror as error:
        found = error.strerror
    print(found, flush=True)
    time.sleep(0.05)
"""
"""A program that looks up n2 again and again."""

KNOWS = "import time; print(1, flush=True); time.sleep(600)"
"""A program that looks up no name."""

HAS_ITS_OWN = """exec unshare --mount sh -c 'umount /etc/resolv.conf && exec "$0" -c "$1"' "$0" "$1" """
"""A program that sees the machine's own /etc/resolv.conf again."""

CLUSTERS = [LocalCluster, pytest.param(NetnsCluster, marks=pytest.mark.netns)]


def on_cluster(
    cluster_class: Any, run: RunState, tmp_path: Path, argv: list[str], eventually: Eventually, scenario: Any
) -> None:
    """Run `scenario` against a target of three hosts, of which n1 runs a program."""

    async def main() -> None:
        cluster = cluster_class(node_count=3, run=run, work_dir=str(tmp_path), ports=[PORT])
        cluster.prepare({("names", kind) for kind in ABILITIES["names"]})
        await cluster.start()
        try:
            child = await cluster.spawn("n1", Program(name="asker", argv=argv, log_name="asker.log"))
            log = Path(child.log_path)
            await eventually(lambda: log.exists() and "\n" in log.read_text())
            assert cluster.names_of("n2") == ("n2",)
            await scenario(SimpleNamespace(hosts=cluster.hosts, names=cluster.names, processes=None), cluster, log)
        finally:
            await cluster.stop()

    asyncio.run(main())
    assert run.claims == ()


@pytest.mark.parametrize("cluster_class", CLUSTERS)
def test_lookups_of_a_program_change_with_the_fault_and_recover_when_it_heals(
    cluster_class: Any, run_state: RunState, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemesis.name_service.prove_released", all_run)

    async def scenario(target: Any, cluster: Any, log: Path) -> None:
        right = cluster.address_from("n1", "n2", PORT).partition(":")[0]
        wrong = cluster.address_from("n1", "n3", PORT).partition(":")[0]

        def last() -> str:
            return log.read_text().splitlines()[-1]

        await eventually(lambda: last() == right)
        for number, (variant, is_met) in enumerate(
            {
                "gone@all": lambda found: found == "Name or service not known",
                "wrong@n1": lambda found: found == wrong,
                "unused@n1": lambda found: found not in (right, wrong) and found[0].isdigit(),
            }.items()
        ):
            planned = await NAME_SERVICE.plan(target, random.Random(1), fault_id=f"f{number}", variant=variant)
            assert not (await NAME_SERVICE.prove(target, planned)).proven
            await NAME_SERVICE.inject(target, planned)
            proof = await NAME_SERVICE.prove(target, planned)
            assert proof.proven, proof
            await eventually(lambda is_met=is_met: is_met(last()))
            met = await NAME_SERVICE.prove_met(target, planned)
            assert met.proven and met.exercised is True, met
            assert not (await NAME_SERVICE.prove_healed(target, planned)).proven
            await NAME_SERVICE.heal(target, planned)
            await NAME_SERVICE.heal(target, planned)
            assert (await NAME_SERVICE.prove_healed(target, planned)).proven
            await eventually(lambda: last() == right)

    argv = [sys.executable, "-c", LOOKS_UP]
    on_cluster(cluster_class, run_state, tmp_path, argv, eventually, scenario)


async def all_run(*_: Any, **__: Any) -> Any:
    return SimpleNamespace(failed=[], detail="", checked=0)


@given(st.sets(st.sampled_from(["n1", "n2", "n3", "n4", "ns"])), st.permutations(["n1", "n2", "n3", "n4"]))
def test_a_wrong_address_is_another_replicas_or_the_hosts_own(known: set[str], replicas: list[str]) -> None:
    """Also for hosts that reach only one replica or none, such as the name server's on `local`."""
    names = {name: f"10.0.0.{number}" for number, name in enumerate(sorted(known), 1)}
    link: Any = None
    served: Any = NamedHost(link, listen="", own="10.0.0.9", names=names, unused="").served(replicas)
    assert served["names"] == names and served["wrong"].keys() == names.keys()
    others = {names[name] for name in replicas if name in names}
    for name, wrong in served["wrong"].items():
        assert wrong != names[name]
        assert wrong in others if name in replicas and len(others) > 1 else wrong == "10.0.0.9"


@pytest.mark.parametrize("cluster_class", CLUSTERS)
def test_a_slow_or_silent_name_service_is_hit_and_gives_no_wrong_answer(
    cluster_class: Any, run_state: RunState, tmp_path: Path, eventually: Eventually
) -> None:
    async def scenario(target: Any, cluster: Any, log: Path) -> None:
        for number, variant in enumerate(("slow@n1", "silent@n1")):
            planned = await NAME_SERVICE.plan(target, random.Random(1), fault_id=f"f{number}", variant=variant)
            await NAME_SERVICE.inject(target, planned)
            proof = await NAME_SERVICE.prove(target, planned)
            assert proof.proven, proof
            async with asyncio.timeout(20):
                while not (await NAME_SERVICE.prove_met(target, planned)).exercised:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            await NAME_SERVICE.heal(target, planned)
            size_bytes = log.stat().st_size
            await eventually(lambda size_bytes=size_bytes: log.stat().st_size > size_bytes)
            said = log.read_text().splitlines()
            assert said.count(said[0]) + said.count("Temporary failure in name resolution") == len(said)

    on_cluster(cluster_class, run_state, tmp_path, [sys.executable, "-c", LOOKS_UP], eventually, scenario)


@pytest.mark.parametrize("cluster_class", CLUSTERS)
def test_a_program_that_looks_up_no_name_is_not_hit(
    cluster_class: Any, run_state: RunState, tmp_path: Path, eventually: Eventually
) -> None:
    async def scenario(target: Any, cluster: Any, log: Path) -> None:
        planned = await NAME_SERVICE.plan(target, random.Random(1), fault_id="f1", variant="gone@n1")
        await NAME_SERVICE.inject(target, planned)
        assert (await NAME_SERVICE.prove(target, planned)).proven
        met = await NAME_SERVICE.prove_met(target, planned)
        assert met.proven and met.exercised is False and "looked up no name" in met.detail

    on_cluster(cluster_class, run_state, tmp_path, [sys.executable, "-c", KNOWS], eventually, scenario)


@pytest.mark.parametrize("cluster_class", CLUSTERS)
def test_a_program_that_sees_another_resolv_conf_disproves_the_fault(
    cluster_class: Any, run_state: RunState, tmp_path: Path, eventually: Eventually
) -> None:
    async def scenario(target: Any, cluster: Any, log: Path) -> None:
        planned = await NAME_SERVICE.plan(target, random.Random(1), fault_id="f1", variant="gone@n1")
        await NAME_SERVICE.inject(target, planned)
        proof = await NAME_SERVICE.prove(target, planned)
        assert not proof.proven and "n1 sees a different /etc/resolv.conf" in proof.detail, proof

    argv = ["sh", "-c", HAS_ITS_OWN, sys.executable, KNOWS]
    on_cluster(cluster_class, run_state, tmp_path, argv, eventually, scenario)


def performed(tmp_path: Path, *system: str) -> Any:
    """The results of a run with missing names."""
    argv = [
        *(sys.executable, "-m", "harness", "run", *system, "--cluster", "local", "--nodes", "3", "--json"),
        *("--time-limit", "8", "--nemesis", "name-service=gone@all", "--nemesis-interval", "2"),
        *("--store", str(tmp_path / "store")),
    ]
    environment = {**os.environ, STATE_DIR_VARIABLE: str(tmp_path / "state")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, env=environment)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


ASKING = '''
from harness.sdk import System, path
from harness.systems.toy import ToyClient

ASKS = """
import socket, sys, time
while True:
    try:
        socket.gethostbyname(sys.argv[1])
    except OSError:
        pass
    time.sleep(0.1)
"""


class Asking(System):
    install = path("toy_server.py")
    ports = {"client": 7000}
    client = ToyClient

    def programs(self, host):
        other = next(each for each in self.hosts if each is not host)
        name, _, _ = other.advertise("client").partition(":")
        server = [host.python, host.installed("toy_server.py"), host.ip, "7000"]
        return {"server": server, "asker": [host.python, "-c", ASKS, name]}
'''


@pytest.mark.serial
def test_a_run_without_name_lookups_is_unknown_and_names_the_remedy(tmp_path: Path) -> None:
    results = performed(tmp_path, "--system", "toy")
    assert results["valid"] == "unknown" and "host.advertise(port)" in results["reason"], results["reason"]
    assert results["faults"] and all(fault["proven"] and not fault["exercised"] for fault in results["faults"])


@pytest.mark.serial
def test_a_run_whose_programs_look_up_names_is_valid_and_hit_by_every_fault(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING, encoding="utf-8")
    (tmp_path / "toy_server.py").write_bytes(Path(toy_server.__file__).read_bytes())
    results = performed(tmp_path, str(tmp_path / "asking.py"))
    assert results["valid"] is True, results["reason"]
    assert results["faults"] and all(fault["proven"] and fault["exercised"] for fault in results["faults"])
