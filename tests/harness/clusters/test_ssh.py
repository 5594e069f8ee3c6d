"""The ssh cluster, with sshd in namespaces for machines: hosts, cuts, broken connections and cleanup."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cleanup import clean
from harness.clusters.base import CLIENTS_HOST, ClusterUnavailable, Program
from harness.clusters.ssh import SshCluster
from harness.clusters.ssh_connection import _why_not
from harness.clusters.ssh_inventory import ACCEPT_NEW, SshHost, load_inventory
from harness.errors import HarnessError
from harness.run_state import RunState
from nemesis.mechanisms.shim import why_no_shim
from nemesis.name_service import NAME_SERVICE
from nemesis.partition import PARTITION
from nemesis.target import Link
from tests.harness.clusters.ipv6 import expect_ipv6_is_closed
from tests.harness.test_cleanup import die

LAB = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "lab.py"))
WHY_NOT = LAB["missing_for"]("ssh")
on_machines = pytest.mark.skipif(WHY_NOT is not None, reason=f"no sshd in namespaces: {WHY_NOT}")

pytestmark = [pytest.mark.ssh]

PORT = 7000
RUN = f"ts{os.getpid()}"
LINKS = [Link(a, b) for a, b in permutations(("n1", "n2", "n3"), 2)]


def make(tmp_path: Path, inventory: str | Sequence[SshHost], run_id: str = RUN, count: int = 3) -> Any:
    run = RunState.create(run_id, state_root=str(tmp_path / "state"))
    work_dir = str(tmp_path / run_id)
    return run, SshCluster(
        node_count=count, run=run, work_dir=work_dir, ports=[PORT], extra_hosts=["ns1"], inventory=inventory
    )


def with_cluster(
    tmp_path: Path,
    machines: Any,
    scenario: Callable[[SshCluster], Awaitable[None]],
    *,
    needs: Collection[tuple[str, str]] = (),
) -> None:
    """Run `scenario` on a started cluster, stop it, and check that nothing is left on any machine."""

    async def body() -> None:
        run, cluster = make(tmp_path, str(machines.inventory))
        cluster.prepare(needs)
        await cluster.start()
        try:
            await scenario(cluster)
        finally:
            await cluster.stop()
        await cluster.stop()
        assert run.claims == () and run.close()

    machines.run(body())
    expect_nothing_left(machines)


def expect_nothing_left(machines: Any) -> None:
    for host in ("n1", "n2", "n3", "n4"):
        assert machines.files(host) == []
        assert "splitbrain" not in machines.rules(host)
        assert "sb-aside" not in machines.devices(host)


def is_marked(pid: str, run_id: str) -> bool:
    """Whether a process belongs to a run, as seen from this machine."""
    try:
        return f"SPLITBRAIN_RUN={run_id}".encode() in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    except OSError:
        return False


async def passing(cluster: SshCluster, timeout_s: float = 0.25) -> set[Link]:
    results = await cluster.network.probe(LINKS, timeout_s=timeout_s)
    assert [result.link for result in results] == LINKS
    return {result.link for result in results if result.passed}


@pytest.mark.root
@on_machines
def test_cuts_are_one_way_and_add_up_and_heal_one_by_one(tmp_path: Path, ssh_machines: Any) -> None:
    async def scenario(cluster: SshCluster) -> None:
        network = cluster.network
        assert await passing(cluster, 5.0) == set(LINKS)
        await network.cut("f1", {"n2": frozenset({"n1"})})
        assert await passing(cluster) == set(LINKS) - {Link("n1", "n2")}
        await network.cut("f2", {"n2": frozenset({"n1", "n3"})})
        await network.heal("f1")
        await network.heal("f1")
        assert await passing(cluster) == set(LINKS) - {Link("n1", "n2"), Link("n3", "n2")}
        await cluster.shell.run("n2", ["nft", "flush", "chain", "inet", "splitbrain", "input"])
        assert await passing(cluster, 5.0) == set(LINKS)
        await network.heal_all()
        await network.heal_all()
        assert await passing(cluster, 5.0) == set(LINKS)
        await network.cut("f3", {"n1": frozenset({"n2"})})  # still in force when the cluster is stopped
        with pytest.raises(ValueError, match="n9"):
            await network.cut("f4", {"n9": frozenset({"n1"})})

    with_cluster(tmp_path, ssh_machines, scenario)


@pytest.mark.root
@on_machines
def test_a_cut_of_a_machine_that_has_gained_an_address_is_not_proven(tmp_path: Path, ssh_machines: Any) -> None:
    async def scenario(cluster: SshCluster) -> None:
        target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
        planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
        await PARTITION.inject(target, planned)
        assert (await PARTITION.prove(target, planned)).proven
        assert (await cluster.run("n2", ["ip", "address", "add", "10.99.0.7/32", "dev", "eth0"]))[0] == 0
        try:
            for proof in (await PARTITION.prove(target, planned), await PARTITION.prove_met(target, planned)):
                assert not proof.proven and proof.failed[0].startswith(
                    "n2 has gained addresses since the run began (10.99.0.7)"
                ), proof
        finally:
            await cluster.run("n2", ["ip", "address", "del", "10.99.0.7/32", "dev", "eth0"])
        assert (await PARTITION.prove(target, planned)).proven
        await PARTITION.heal(target, planned)

    with_cluster(tmp_path, ssh_machines, scenario)


@pytest.mark.root
@on_machines
def test_ipv6_between_machines_is_blocked_and_disproves_a_cut_if_it_is_not(tmp_path: Path, ssh_machines: Any) -> None:
    with_cluster(tmp_path, ssh_machines, expect_ipv6_is_closed)


@pytest.mark.root
@on_machines
def test_a_stray_daemon_is_listed_and_ends_with_the_cluster(tmp_path: Path, ssh_machines: Any) -> None:
    asleep = ["sleep", f"601.{os.getpid()}"]

    def count() -> int:
        """The number of such processes, as seen from this machine."""
        commands = (Path(directory) / "cmdline" for directory in map("/proc/{}".format, os.listdir("/proc")))
        return sum(read_or_nothing(path) == b"".join(word.encode() + b"\0" for word in asleep) for path in commands)

    async def scenario(cluster: SshCluster) -> None:
        argv = ["sh", "-c", '(env -i setsid "$@" &); exec sleep 600', "sh", *asleep]
        await cluster.spawn("n1", Program(name="server", argv=argv, log_name="server.log"))
        async with asyncio.timeout(20):
            while not (found := await cluster.strays("n1")):  # noqa: ASYNC110 - another machine's process
                await asyncio.sleep(0.01)
        assert [stray.name for stray in found] == ["sleep"] and await cluster.strays("n2") == []
        assert count() == 1

    with_cluster(tmp_path, ssh_machines, scenario)
    assert count() == 0


def read_or_nothing(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("serving", flush=True)
while True:
    connection, peer = server.accept()
    connection.sendall(open(sys.argv[3], "rb").read())
    connection.close()
"""


@pytest.mark.root
@on_machines
def test_programs_serve_clients_and_their_files_are_fetched(tmp_path: Path, ssh_machines: Any) -> None:
    async def scenario(cluster: SshCluster) -> None:
        path = os.path.join(cluster.data_dir("n1"), "deep", "x")
        await cluster.put_file("n1", path, b"content of n1")
        ip, port = cluster.address_from(CLIENTS_HOST, "n1", PORT).split(":")
        argv = [cluster.python("n1"), "-c", SERVER, ip, port, path]
        process = await cluster.spawn("n1", Program(name="server", argv=argv, log_name="server.log"))
        async with asyncio.timeout(20):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(ip, int(port))
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.01)
            assert await reader.read() == b"content of n1"
            writer.close()
        status, output, _ = await cluster.run("n2", ["sh", "-c", "hostname; id -u; cat"], stdin="in")
        assert (status, output) == (0, "n2\n0\nin")
        assert await cluster.fetch() == []
        assert Path(cluster.local_path("n1", path)).read_bytes() == b"content of n1"
        assert process.exit_status() is None
        with pytest.raises(ValueError, match="not fetched"):
            cluster.local_path("n1", "/etc/passwd")
        with pytest.raises(ValueError, match="port 7001 is not one of this cluster's ports"):
            cluster.address_from("n1", "n2", 7001)

    with_cluster(tmp_path, ssh_machines, scenario)
    assert (tmp_path / RUN / "n1" / "server.log").read_text() == "serving\n"


@pytest.mark.root
@on_machines
def test_data_that_was_not_fetched_completely_is_left_on_the_machine_only(tmp_path: Path, ssh_machines: Any) -> None:
    """As from a full disk, which has no room for an archive."""

    async def scenario(cluster: SshCluster) -> None:
        await asyncio.gather(*(cluster.put_file(h, f"{cluster.data_dir(h)}/x", b"x") for h in ("n1", "n2")))
        assert await cluster.fetch() == []
        here = [Path(cluster.local_path(host, cluster.data_dir(host))) for host in ("n1", "n2")]
        assert [os.listdir(path) for path in here] == [["x"], ["x"]]
        packed = f"{cluster.data_dir('n1').strip('/').replace('/', '-')[-100:]}.tar.gz"
        in_the_way = os.path.join(cluster.agent("n1").directory, packed)
        assert (await cluster.run("n1", ["sh", "-c", f"rm {in_the_way} && mkdir {in_the_way}"]))[0] == 0
        assert ["n1: `pack` ended with status 1" in str(problem) for problem in await cluster.fetch()] == [True]
        assert [path.exists() for path in here] == [False, True]
        assert await cluster.fetch(["n2"]) == []
        packed = f"{os.path.dirname(cluster.log_path('n2', 'log')).strip('/').replace('/', '-')[-100:]}.tar.gz"
        in_the_way = os.path.join(cluster.agent("n2").directory, packed)
        assert (await cluster.run("n2", ["sh", "-c", f"rm {in_the_way} && mkdir {in_the_way}"]))[0] == 0
        where = rf"could not be fetched and are still there, in .*/{RUN}\.left"
        said = rf"n1: the files of n1 {where}; n2: the files of n2 {where}"
        with pytest.raises(HarnessError, match=said):
            await cluster.stop()
        assert here[1].exists(), "which were fetched completely before"
        for host in ("n1", "n2"):
            assert ssh_machines.files(host) == [f"{RUN}.left"]
            left = ssh_machines.directory / host / f"{RUN}.left"
            assert (left / host / "data" / "x").read_bytes() == b"x"
            shutil.rmtree(left)

    with_cluster(tmp_path, ssh_machines, scenario)


LOOKS_UP = """
import socket, time
while True:
    try:
        print(socket.gethostbyname("n2"), flush=True)
    except socket.gaierror as error:
        print(error.strerror, flush=True)
    time.sleep(0.05)
"""


@pytest.mark.root
@on_machines
def test_missing_names_are_hit_by_programs_on_machines_and_are_restored(tmp_path: Path, ssh_machines: Any) -> None:
    async def scenario(cluster: SshCluster) -> None:
        argv = [cluster.python("n1"), "-c", LOOKS_UP]
        await cluster.spawn("n1", Program(name="asker", argv=argv, log_name="asker.log"))

        async def until_last(wanted: str) -> None:
            async with asyncio.timeout(20):
                while True:
                    _, said, _ = await cluster.run("n1", ["tail", "-n", "1", cluster.log_path("n1", "asker.log")])
                    if said.strip() == wanted:
                        return

        await until_last(cluster.bind_address("n2"))
        target: Any = SimpleNamespace(hosts=cluster.hosts, names=cluster.names, processes=None)
        planned = await NAME_SERVICE.plan(target, random.Random(1), fault_id="f1", variant="gone@n1")
        assert not (await NAME_SERVICE.prove(target, planned)).proven
        await NAME_SERVICE.inject(target, planned)
        assert (await NAME_SERVICE.prove(target, planned)).proven
        await until_last("Name or service not known")
        met = await NAME_SERVICE.prove_met(target, planned)
        assert met.proven and met.exercised is True, met
        assert cluster.names is not None
        await cluster.names.release("f1")
        await until_last(cluster.bind_address("n2"))

    with_cluster(tmp_path, ssh_machines, scenario, needs={("names", "gone")})


def sessions(machines: Any, host: str) -> list[int]:
    """The sshd processes that serve connections to a machine."""
    namespace = machines.namespace.removesuffix("-net") + f"-{host}"
    found = subprocess.run(["ip", "netns", "pids", os.path.basename(namespace)], capture_output=True, text=True)
    pids = []
    for word in found.stdout.split():
        try:
            command = Path(f"/proc/{word}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"sshd: ") and b"listener" not in command:
            pids.append(int(word))
    return pids


@pytest.mark.root
@on_machines
def test_a_broken_connection_does_not_affect_programs_commands_or_cuts(tmp_path: Path, ssh_machines: Any) -> None:
    async def scenario(cluster: SshCluster) -> None:
        program = Program(name="p", argv=["sleep", "600"], log_name="p.log")
        process = await cluster.spawn("n1", program)
        await cluster.network.cut("f1", {"n1": frozenset({"n2"})})
        count = os.path.join(cluster.data_dir("n1"), "count")
        slow = asyncio.ensure_future(cluster.run("n1", ["sh", "-c", f"sleep 1; echo x >> {count}; cat {count}"]))
        await asyncio.sleep(0.3)
        broken = sessions(ssh_machines, "n1")
        assert broken
        for pid in broken:
            os.kill(pid, signal.SIGKILL)
        assert await slow == (0, "x\n", "")
        assert cluster.agent("n1").connection_count == 2
        assert process.exit_status() is None
        assert await passing(cluster) == set(LINKS) - {Link("n2", "n1")}
        await process.kill()
        assert process.exit_status() == -9

    with_cluster(tmp_path, ssh_machines, scenario)


def refusal(tmp_path: Path, machines: Any, hosts: Sequence[SshHost]) -> str:
    """Why a cluster of these hosts does not start: one line, with nothing claimed afterwards."""
    said = []

    async def body() -> None:
        run, cluster = make(tmp_path, hosts, f"{RUN}-bad", count=len(hosts))
        with pytest.raises(ClusterUnavailable) as caught:
            await cluster.start()
        said.append(str(caught.value))
        assert run.claims == () and run.close()

    machines.run(body())
    assert "\n" not in said[0]
    return said[0]


@pytest.mark.root
@on_machines
def test_each_obstacle_to_a_start_is_reported_in_one_line(tmp_path: Path, ssh_machines: Any) -> None:
    first, second, *_ = load_inventory(str(ssh_machines.inventory))
    said = lambda **changes: refusal(tmp_path, ssh_machines, [dataclasses.replace(first, **changes)])  # noqa: E731
    wrong = tmp_path / "known_hosts"
    keys = (ssh_machines.directory / "known_hosts").read_text().splitlines()
    wrong.write_text(f"{first.hostname} {keys[1].split(' ', 1)[1]}\n")
    assert "n1: the host key of 10.78.0.1 has changed" in said(known_hosts=str(wrong))
    assert "has changed" in said(known_hosts=str(wrong), host_keys=ACCEPT_NEW)
    assert f"the host key of 10.78.0.1 is not in {tmp_path}/none" in said(known_hosts=str(tmp_path / "none"))
    assert "n1: cannot connect to 10.78.0.1:23 (" in said(port=23)
    assert "n1: cannot connect to no.such.host.invalid:22" in said(hostname="no.such.host.invalid")
    assert "n1: there is no python9" in said(python="python9")
    other_key = str(tmp_path / "other")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other_key], check=True)
    assert "n1: cannot log in to 10.78.0.1 as root with " + other_key in said(identity_file=other_key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", other_key], check=True)
    assert f"n1: {other_key} has a passphrase: give it to an SSH agent" in said(identity_file=other_key)
    Path(other_key).write_text("no key\n")
    assert f"n1: {other_key} is not a private key (" in said(identity_file=other_key)
    assert f"n1: known_hosts {tmp_path} cannot be read (Is a directory)" in said(known_hosts=str(tmp_path))
    wrong.write_text(f"@cert-authority * {keys[0].split(' ', 1)[1]}\n{first.hostname} ssh-ed25519 A\n")
    assert f"the host key of 10.78.0.1 is not in {wrong}" in said(known_hosts=str(wrong))
    assert "n1 has no address in 10.99.0.0/24" in said(network="10.99.0.0/24")
    assert "does not answer at 192.0.2.1:7000 from here" in said(address="192.0.2.1")
    same = [dataclasses.replace(host, address="10.78.0.1") for host in (first, second)]
    assert "n1 and n2 have the same address 10.78.0.1" in refusal(tmp_path, ssh_machines, same)
    twice = refusal(tmp_path, ssh_machines, [first, dataclasses.replace(first, name="n2")])
    assert twice[2:] == ": the host is already in this run under another name: list every machine once"
    expect_nothing_left(ssh_machines)


@pytest.mark.root
@on_machines
def test_a_machine_that_sends_from_another_address_is_refused(tmp_path: Path, ssh_machines: Any) -> None:
    """Cuts match source addresses, so its packets would pass a cut that was proven."""
    first, second, *_ = load_inventory(str(ssh_machines.inventory))
    ssh_machines.ip("n1", "address", "add", "10.78.0.101/24", "dev", "eth0")
    try:
        said = refusal(tmp_path, ssh_machines, [dataclasses.replace(first, address="10.78.0.101"), second])
    finally:
        ssh_machines.ip("n1", "address", "delete", "10.78.0.101/24", "dev", "eth0")
    assert said == (
        "n1 sends to the other hosts from 10.78.0.1, not from its address 10.78.0.101, so cuts would miss what it "
        "sends: set its address to 10.78.0.1, or fix its routes to send from 10.78.0.101"
    )
    expect_nothing_left(ssh_machines)


@pytest.mark.root
@on_machines
@pytest.mark.skipif(shutil.which("sudo") is None, reason="sudo is not installed (apt-get install sudo)")
def test_a_cluster_can_run_as_a_user_with_sudo(tmp_path: Path, ssh_machines: Any) -> None:
    hosts = [dataclasses.replace(host, user="admin") for host in load_inventory(str(ssh_machines.inventory))[:3]]

    async def body() -> None:
        run, cluster = make(tmp_path, hosts, f"{RUN}-sudo")
        cluster.prepare({("clocks", "wall"), ("links", "delay")} if why_no_shim() is None else set())
        await cluster.start()
        try:
            assert await cluster.run("n1", ["id", "-u"]) == (0, "0\n", "")
            assert await passing(cluster, 5.0) == set(LINKS)
            await cluster.network.cut("f1", {"n2": frozenset({"n1"})})
            assert await passing(cluster) == set(LINKS) - {Link("n1", "n2")}
        finally:
            await cluster.stop()
        assert run.claims == () and run.close()

    ssh_machines.run(body())
    expect_nothing_left(ssh_machines)


@pytest.mark.root
@on_machines
def test_new_host_keys_are_saved_and_a_machine_is_claimed_only_once(tmp_path: Path, ssh_machines: Any) -> None:
    known = tmp_path / "deep" / "known_hosts"
    known.parent.mkdir()
    known.write_text("# mine\n@revoked * ssh-rsa AAAA\n")
    hosts = [
        dataclasses.replace(
            host, host_keys=ACCEPT_NEW, known_hosts=str(known), network="10.78.0.0/24", directory=f"{host.directory}/"
        )
        for host in load_inventory(str(ssh_machines.inventory))[:2]
    ]

    async def body() -> None:
        run, cluster = make(tmp_path, hosts, f"{RUN}-one", count=1)
        await cluster.start()
        try:
            kept = known.read_text().splitlines()
            assert kept[:2] == ["# mine", "@revoked * ssh-rsa AAAA"]
            assert {line.split()[0] for line in kept[2:]} == {"10.78.0.1", "10.78.0.2"}
            assert cluster.bind_address("n1") == "10.78.0.1"
            assert cluster.bind_address("ns1") == "10.78.0.2"
            second_run, second = make(tmp_path, hosts[:1], f"{RUN}-two", count=1)
            with pytest.raises(ClusterUnavailable, match=f"n1: the host is in use by run {RUN}-one"):
                await second.start()
            assert second_run.claims == ()
            elsewhere = dataclasses.replace(hosts[0], directory=f"{hosts[0].directory}/other/")
            third_run, third = make(tmp_path, [elsewhere], f"{RUN}-three", count=1)
            with pytest.raises(
                ClusterUnavailable, match=f"n1: the host is in use by run {RUN}-one, whose files are in"
            ):
                await third.start()
            assert third_run.claims == () and ssh_machines.files("n1") == sorted([f"{RUN}-one", "owner"])
            assert "splitbrain_counters" in ssh_machines.rules("n1")
            assert (await cluster.run("n1", ["true"]))[0] == 0
        finally:
            await cluster.stop()
        assert run.claims == ()
        twice = [dataclasses.replace(hosts[0], name="again", directory=f"{hosts[0].directory}/{n}/") for n in "ab"]
        run, cluster = make(tmp_path, twice, f"{RUN}-four", count=2)
        with pytest.raises(ClusterUnavailable, match=r"n\d is already in this run under another name"):
            await cluster.start()
        assert run.claims == ()

    ssh_machines.run(body())
    expect_nothing_left(ssh_machines)


@pytest.mark.root
@on_machines
def test_clean_releases_the_machines_of_a_killed_harness(tmp_path: Path, ssh_machines: Any) -> None:
    state_root, parent = str(tmp_path / "state"), Path(__file__).with_name("hosts_parent.py")
    run_id = f"{RUN}-dead"
    argv = ["nsenter", f"--net={ssh_machines.namespace}", sys.executable, str(parent)]
    argv += [run_id, state_root, str(tmp_path / "work"), str(ssh_machines.inventory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert json.loads(killed.stdout.readline()) == {"up": True}
        killed.kill()
    assert "10.78.0.1" in ssh_machines.rules("n2")
    if why_no_shim() is None:
        assert "sb-aside" in ssh_machines.devices("n1") and "10.78.0.1 . 10.78.0.2" in ssh_machines.rules("n1")
    unreachable = clean(state_root=state_root, report=lambda line: None)  # from a network without these machines
    assert len([line for line in unreachable.left if "ssh-host n" in line and "cannot connect" in line]) == 3
    assert unreachable.exit_status == 255
    reports = []

    async def body() -> None:
        reports.append(clean(state_root=state_root, report=lambda line: None))

    ssh_machines.run(body())
    assert reports[0].left == []
    assert [line for line in reports[0].removed if "ssh-host" in line] == [
        f"run {run_id}: ssh-host {host}" for host in ("ns1", "n2", "n1")
    ]
    expect_nothing_left(ssh_machines)
    assert os.listdir(state_root) == []
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and is_marked(pid, run_id)] == []


@pytest.mark.root
@on_machines
def test_a_machine_that_cannot_be_cleaned_up_stays_claimed(tmp_path: Path, ssh_machines: Any) -> None:
    async def body() -> None:
        run, cluster = make(tmp_path, str(ssh_machines.inventory), f"{RUN}-stuck")
        await cluster.start()
        able = tmp_path / "able"
        await cluster.agent("n2").request("undo", {"key": "clock", "argv": ["test", "-e", str(able)]})
        with pytest.raises(HarnessError, match="n2: could not clean up: clock"):
            await cluster.stop()
        assert [claim.ident for claim in run.claims] == ["n2"]
        able.touch()
        await cluster.stop()
        assert run.claims == () and run.close()

    ssh_machines.run(body())
    expect_nothing_left(ssh_machines)


@pytest.mark.root
@on_machines
def test_a_machine_where_the_agent_cannot_start_can_be_forgotten(tmp_path: Path, ssh_machines: Any) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    hosts = [dataclasses.replace(host, python=str(broken)) for host in load_inventory(str(ssh_machines.inventory))[:1]]

    async def body() -> None:
        run, cluster = make(tmp_path, hosts, f"{RUN}-mute", count=1)
        with pytest.raises(ClusterUnavailable, match=r"n1: the agent could not be started \(status 3\)"):
            await cluster.start()
        state_root = str(tmp_path / "state")
        die(run)
        kept = clean(state_root=state_root, report=lambda line: None)
        forgotten = clean(state_root=state_root, forgets_unreachable=True, report=lambda line: None)
        assert "--forget-unreachable" in kept.left[0] and kept.exit_status == 255
        assert (forgotten.left, len(forgotten.notes), os.listdir(state_root)) == ([], 1, [])

    ssh_machines.run(body())
    expect_nothing_left(ssh_machines)


def test_the_remedy_depends_on_the_error_of_a_host() -> None:
    host = SshHost(name="n1", hostname="x", user="admin")

    def why(status: int, said: str) -> str:
        return str(_why_not(host, status, said, said))

    assert "scripts/provision.sh --sudo admin" in why(1, "sudo: a password is required")
    assert "cannot use sudo" in why(127, "bash: line 1: sudo: command not found")
    assert "python 3.9: 3.11 or newer" in why(1, "python 3.9")
    assert "set sudo = true" in why(1, "PermissionError: [Errno 13] Permission denied: '/var/lib/x'")
    assert _why_not(host, 9, "", "") is None
