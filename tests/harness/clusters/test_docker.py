"""The docker cluster on an engine in its own namespace: hosts, cuts, concurrent runs and cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cleanup import clean
from harness.clusters.base import CLIENTS_HOST, ClusterUnavailable, Program
from harness.clusters.docker import DockerCluster
from harness.clusters.docker_engine import HOST_IMAGE, DockerEngine
from harness.errors import HarnessError, OperatorError
from harness.run_state import RunState
from nemesis.name_service import NAME_SERVICE
from nemesis.partition import PARTITION
from nemesis.target import ABILITIES, Link
from tests.harness.clusters.ipv6 import expect_ipv6_is_closed

LAB = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "lab.py"))
WHY_NOT = LAB["missing_for"]("docker")
on_engine = pytest.mark.skipif(WHY_NOT is not None, reason=f"no Docker engine can be started: {WHY_NOT}")

pytestmark = [pytest.mark.docker]

PORT = 7000
RUN = f"td{os.getpid()}"
LINKS = [Link(a, b) for a, b in permutations(("n1", "n2", "n3"), 2)]


def make(tmp_path: Path, run_id: str = RUN, count: int = 3, image: str | None = None) -> Any:
    run = RunState.create(run_id, state_root=str(tmp_path / "state"))
    work_dir = str(tmp_path / run_id)
    return run, DockerCluster(
        node_count=count, run=run, work_dir=work_dir, ports=[PORT], extra_hosts=["ns1"], image=image
    )


def with_cluster(
    tmp_path: Path,
    engine: Any,
    scenario: Callable[[DockerCluster], Awaitable[None]],
    capabilities: Collection[tuple[str, str]] = (),
) -> None:
    """Run `scenario` on a started cluster, stop it, and check that nothing is left in the engine."""

    async def body() -> None:
        run, cluster = make(tmp_path)
        cluster.prepare(capabilities)
        await cluster.start()
        try:
            await scenario(cluster)
        finally:
            await cluster.stop()
        await cluster.stop()
        assert run.claims == () and run.close()

    engine.run(body())
    assert left_in(engine) == []


def left_in(engine: Any) -> list[str]:
    """Names of containers and networks of any run."""
    found = []
    for kind in (["ps", "-a", "--format", "{{.Names}}"], ["network", "ls", "--format", "{{.Name}}"]):
        done = subprocess.run(["docker", "-H", engine.url, *kind], check=True, capture_output=True, text=True)
        found += [name for name in done.stdout.split() if name.startswith("sb-")]
    return sorted(found)


async def passing(cluster: DockerCluster, timeout_s: float = 0.25) -> set[Link]:
    results = await cluster.network.probe(LINKS, timeout_s=timeout_s)
    return {result.link for result in results if result.passed}


@pytest.mark.root
@on_engine
def test_containers_support_cuts_programs_and_files(tmp_path: Path, docker_engine: Any) -> None:
    async def scenario(cluster: DockerCluster) -> None:
        network = cluster.network
        assert await passing(cluster, 5.0) == set(LINKS)
        await network.cut("f1", {"n2": frozenset({"n1"})})
        await network.cut("f2", {"n2": frozenset({"n1", "n3"})})
        await network.heal("f1")
        assert await passing(cluster) == set(LINKS) - {Link("n1", "n2"), Link("n3", "n2")}
        await network.heal_all()
        assert await passing(cluster, 5.0) == set(LINKS)

        await cluster.put_file("n1", os.path.join(cluster.data_dir("n1"), "x"), b"content of n1")
        ip, port = cluster.address_from(CLIENTS_HOST, "n1", PORT).split(":")
        code = f"import socket; s = socket.create_server(('{ip}', {port})); c, _ = s.accept(); c.send(b'served')"
        program = Program(name="server", argv=[cluster.python("n1"), "-c", code], log_name="server.log")
        process = await cluster.spawn("n1", program)
        async with asyncio.timeout(20):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(ip, int(port))
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.01)
            assert await reader.read() == b"served"
            writer.close()
            assert await process.wait() == 0
        assert await cluster.run("n2", ["hostname"]) == (0, "n2\n", "")
        orphan = "(sh -c 'sleep 0.1' &) ; exit 0"  # inherited by the container's first process, which must reap it
        await cluster.run("n2", ["sh", "-c", orphan])
        async with asyncio.timeout(20):
            look = ["sh", "-c", "while cat /proc/[0-9]*/stat 2>/dev/null | grep -q '(sleep)'; do :; done"]
            assert (await cluster.run("n2", look))[0] == 0

    with_cluster(tmp_path, docker_engine, scenario)
    assert (tmp_path / RUN / "n1" / "data" / "x").read_bytes() == b"content of n1"
    assert (tmp_path / RUN / "n1" / "server.log").exists()


LOOKS_UP = "import socket; print(socket.gethostbyname('n2'))"


@pytest.mark.root
@on_engine
def test_missing_and_wrong_names_reach_the_programs_of_a_container(
    tmp_path: Path, docker_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def all_run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(failed=[], detail="", checked=0)

    monkeypatch.setattr("nemesis.name_service.prove_released", all_run)

    async def scenario(cluster: DockerCluster) -> None:
        right, wrong = (cluster.address_from("n1", host, PORT).partition(":")[0] for host in ("n2", "n3"))
        asks = f'while :; do {cluster.python("n1")} -c "{LOOKS_UP}"; sleep 0.1; done'
        await cluster.spawn("n1", Program(name="asker", argv=["sh", "-c", asks], log_name="asker.log"))
        target: Any = SimpleNamespace(hosts=cluster.hosts, names=cluster.names, processes=None)

        async def answer() -> str:
            status, output, errors = await cluster.run("n1", [cluster.python("n1"), "-c", LOOKS_UP])
            return errors.splitlines()[-1] if status else output.strip()

        assert await answer() == right
        for variant, wanted in (("gone@all", "Name or service not known"), ("wrong@n1", wrong)):
            planned = await NAME_SERVICE.plan(target, random.Random(1), fault_id=variant, variant=variant)
            assert not (await NAME_SERVICE.prove(target, planned)).proven
            await NAME_SERVICE.inject(target, planned)
            proof = await NAME_SERVICE.prove(target, planned)
            assert proof.proven, proof
            assert wanted in await answer()
            async with asyncio.timeout(20):
                while not (await NAME_SERVICE.prove_met(target, planned)).exercised:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            await NAME_SERVICE.heal(target, planned)
            assert (await NAME_SERVICE.prove_healed(target, planned)).proven
            assert await answer() == right
        await NAME_SERVICE.inject(target, planned)
        await cluster.run("n1", ["sh", "-c", "echo 'nameserver 127.0.0.11' > /etc/resolv.conf"])
        proof = await NAME_SERVICE.prove(target, planned)
        assert not proof.proven and "/etc/resolv.conf of n1 was modified by something else" in proof.detail

    with_cluster(tmp_path, docker_engine, scenario, {("names", kind) for kind in ABILITIES["names"]})


@pytest.mark.root
@on_engine
def test_concurrent_runs_are_isolated_and_a_dead_container_keeps_its_files(tmp_path: Path, docker_engine: Any) -> None:
    async def scenario(outer: DockerCluster) -> None:
        run, inner = make(tmp_path, f"{RUN}-2", count=1)
        await inner.start()
        process = await inner.spawn("n1", Program(name="p", argv=["sleep", "600"], log_name="p.log"))
        await inner.put_file("n1", os.path.join(inner.data_dir("n1"), "x"), b"kept")
        await outer.network.cut("f1", {"n1": frozenset({"n2"})})
        assert await passing(outer) == set(LINKS) - {Link("n2", "n1")}
        assert len(left_in(docker_engine)) == 4 + 1 + 2 + 1
        kill = ["docker", "-H", docker_engine.url, "kill", inner.container("n1")]
        await asyncio.to_thread(subprocess.run, kill, check=True)
        async with asyncio.timeout(30):
            assert await process.wait() == -9
        with pytest.raises(HarnessError, match="the agent on this host has ended") as caught:
            await inner.stop()
        # Its data could not be fetched, so the container is kept.
        left = f"sb-{RUN}-2-n1"
        assert str(caught.value).startswith("the files of n1 could not be fetched and are still in stopped containers")
        assert [claim.ident for claim in run.claims] == [left] and not run.close()
        copy = re.search(r"docker (cp \S+) DIRECTORY", str(caught.value))
        assert copy is not None
        argv = ["docker", "-H", docker_engine.url, *copy[1].split(), str(tmp_path / "copied")]
        await asyncio.to_thread(subprocess.run, argv, check=True)
        assert (tmp_path / "copied" / "data" / "x").read_bytes() == b"kept"
        assert len(left_in(docker_engine)) == 4 + 1 + 1
        await inner.stop()
        dead = Path(run.path).read_text().splitlines()
        Path(run.path).write_text("\n".join([json.dumps({**json.loads(dead[0]), "start_ticks": 1}), *dead[1:]]) + "\n")
        assert clean(state_root=os.path.dirname(run.path), report=lambda line: None).left == []
        assert len(left_in(docker_engine)) == 4 + 1
        assert await passing(outer) == set(LINKS) - {Link("n2", "n1")}

    with_cluster(tmp_path, docker_engine, scenario)


@pytest.mark.root
@on_engine
def test_clean_removes_containers_and_networks_of_a_killed_harness(tmp_path: Path, docker_engine: Any) -> None:
    state_root, parent = str(tmp_path / "state"), Path(__file__).with_name("hosts_parent.py")
    run_id = f"{RUN}-dead"
    argv = ["nsenter", f"--net={docker_engine.namespace}", sys.executable, str(parent)]
    argv += [run_id, state_root, str(tmp_path / "work"), "docker"]
    foreign = ["docker", "-H", docker_engine.url, "create", "--name", f"sb-{RUN}-foreign", HOST_IMAGE, "true"]
    subprocess.run(foreign, check=True, capture_output=True)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert json.loads(killed.stdout.readline()) == {"up": True}
        killed.kill()
    assert len(left_in(docker_engine)) == 3 + 1 + 1
    report = clean(state_root=state_root, report=lambda line: None)
    assert report.left == []
    assert sorted(line.split(": ", 1)[1] for line in report.removed if "sb-" in line) == [
        f"container sb-{run_id}-n1", f"container sb-{run_id}-n2", f"container sb-{run_id}-ns1", f"network sb-{run_id}",
    ]  # fmt: skip
    assert left_in(docker_engine) == [f"sb-{RUN}-foreign"]
    engine = DockerEngine(docker_engine.url)
    try:
        with pytest.raises(OperatorError, match=r"does not carry the label splitbrain\.run=x"):
            engine.remove_container(f"sb-{RUN}-foreign", "x")
        assert engine.remove_container("sb-none", "x") is False
        assert engine.remove_network("sb-none", "x") is False
    finally:
        engine.close()
    subprocess.run(["docker", "-H", docker_engine.url, "rm", f"sb-{RUN}-foreign"], check=True, capture_output=True)


@pytest.mark.root
@on_engine
def test_ipv6_that_the_engine_enables_does_not_connect_containers(
    tmp_path: Path, docker_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As newer engines can be configured to do for every network."""

    def with_ipv6(engine: DockerEngine, name: str, run_id: str) -> None:
        argv = ["network", "create", "--internal", "--ipv6", "--subnet", "fd00:5b1a:7::/64"]
        argv += ["--label", f"splitbrain.run={run_id}", name]
        subprocess.run(["docker", "-H", engine.url, *argv], check=True, capture_output=True)

    monkeypatch.setattr(DockerEngine, "create_network", with_ipv6)
    with_cluster(tmp_path, docker_engine, expect_ipv6_is_closed)


SEND_UDP = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.sendto(bytes(24), (sys.argv[1], 7999))
"""


@pytest.mark.root
@on_engine
def test_traffic_on_a_second_network_disproves_a_cut(
    tmp_path: Path, docker_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, start = f"second-{RUN}", DockerEngine.start_container
    second_of = dict[str, str]()

    def docker(*argv: str) -> str:
        command = ["docker", "-H", docker_engine.url, *argv]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def on_both(engine: DockerEngine, *, host: str, **given: Any) -> str:
        address = start(engine, host=host, **given)
        docker("network", "connect", second, given["name"])
        shown = f'{{{{(index .NetworkSettings.Networks "{second}").IPAddress}}}}'
        second_of[host] = docker("inspect", "-f", shown, given["name"])
        return address

    async def scenario(cluster: DockerCluster) -> None:
        target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
        planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
        await PARTITION.inject(target, planned)
        assert (await PARTITION.prove(target, planned)).proven
        assert await cluster.run("n1", ["python3", "-c", SEND_UDP, second_of["n2"]]) == (0, "", "")
        for proof in (await PARTITION.prove(target, planned), await PARTITION.prove_met(target, planned)):
            assert not proof.proven
            assert re.fullmatch(
                rf"52 bytes from other hosts reached n2 from addresses that no cut applies to \(.*"
                rf"{re.escape(second_of['n1'])}.*\): have them use only the addresses of the run, "
                r"such as [0-9.]+ of n2",
                proof.failed[0],
            ), proof

    docker("network", "create", "--internal", second)
    try:
        monkeypatch.setattr(DockerEngine, "start_container", on_both)
        with_cluster(tmp_path, docker_engine, scenario)
    finally:
        docker("network", "rm", second)


@pytest.mark.root
@on_engine
def test_a_missing_or_incomplete_image_is_refused_with_a_remedy(tmp_path: Path, docker_engine: Any) -> None:
    with pytest.raises(ClusterUnavailable, match="there is no image no-such-image: pull it"):
        DockerCluster.require(image="no-such-image")
    DockerCluster.require(image=HOST_IMAGE)
    for removed, said in (
        ("$(command -v nft)", "n1 lacks nftables: add what is missing to the image, or leave out --image"),
        ("$(command -v sh)", "n1 lacks dash: add what is missing"),
        ("$(command -v python3)", "image sb-bare cannot be used for hosts, which need .*Python.*: add what is missing"),
    ):
        dockerfile = f"FROM {HOST_IMAGE}\nRUN rm {removed}\n"
        build = ["docker", "-H", docker_engine.url, "build", "-q", "-t", "sb-bare", "-"]
        subprocess.run(build, input=dockerfile, text=True, check=True, env={**os.environ, "DOCKER_BUILDKIT": "0"})
        docker_engine.run(expect_refusal(tmp_path, said))
        assert left_in(docker_engine) == []


async def expect_refusal(tmp_path: Path, said: str) -> None:
    """Expect that the image sb-bare is refused."""
    run, cluster = make(tmp_path, f"{RUN}-bare", image="sb-bare", count=1)
    with pytest.raises(ClusterUnavailable, match=said):
        await cluster.start()
    assert run.claims == () and run.close()


def test_a_missing_engine_or_client_library_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ClusterUnavailable, match=r"no engine answers at unix://.*none\.sock: start it") as caught:
        DockerCluster.require()
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ClusterUnavailable, match=r"python.* -m pip install docker"):
        DockerCluster.require()


def test_containers_of_an_unreachable_engine_stay_claimed(tmp_path: Path) -> None:
    run = RunState.create(f"{RUN}-away", state_root=str(tmp_path))
    run.claim("container", f"sb-{RUN}-away-n1", engine=f"unix://{tmp_path}/none.sock")
    assert not run.close()
    lines = Path(run.path).read_text().splitlines()
    Path(run.path).write_text("\n".join([json.dumps({**json.loads(lines[0]), "start_ticks": 1}), *lines[1:]]) + "\n")
    report = clean(state_root=str(tmp_path), report=lambda line: None)
    assert [line for line in report.left if "no engine answers" in line]
    assert report.exit_status == 255 and os.path.exists(run.path)
