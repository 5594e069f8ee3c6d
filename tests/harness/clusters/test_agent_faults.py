"""Faults of clocks, disks, power and links on hosts with agents: their effect on programs, and healing."""

from __future__ import annotations

import asyncio
import os
import runpy
import shlex
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import registry
from harness.clusters import agent_file_systems, agent_links, agent_shim, ssh_connection
from harness.clusters.agent_links import measure_of
from harness.clusters.base import ClusterUnavailable, Program
from harness.clusters.docker import DockerCluster
from harness.clusters.netns_calls import entered
from harness.clusters.options import require_cluster
from harness.clusters.shaped_links import FirstChoice
from harness.clusters.ssh import SshCluster
from harness.clusters.ssh_inventory import SshHost
from harness.faults.target import PlannedTarget
from harness.run_state import RunState
from nemesis.disk import DISK_STALL
from nemesis.link import _is_lossy
from nemesis.mechanisms.shell import ShellError
from nemesis.mechanisms.shim import build_shim, why_no_shim
from nemesis.target import ABILITIES, ClockSkew, DiskFault, Link, LinkShape

LAB = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "lab.py"))
NO_MACHINES = LAB["missing_for"]("ssh") or why_no_shim()
NO_ENGINE = LAB["missing_for"]("docker") or why_no_shim()
on_machines = pytest.mark.skipif(NO_MACHINES is not None, reason=f"no sshd in namespaces: {NO_MACHINES}")
on_engine = pytest.mark.skipif(NO_ENGINE is not None, reason=f"no Docker engine can be started: {NO_ENGINE}")

THERE, BACK, OTHER = Link("n1", "n2"), Link("n2", "n1"), Link("n1", "n3")
MIXED = LinkShape(delay_ms=30, reorder_percent=40)
Scenario = Callable[[Any], Awaitable[None]]


def with_cluster(
    tmp_path: Path, place: Any, cluster_class: Any, scenario: Scenario, hosts: int = 3, **options: Any
) -> None:
    """Run `scenario` on started hosts that are prepared for every fault they support."""

    async def body() -> None:
        run = RunState.create(f"tf{os.getpid()}-{tmp_path.name[-12:]}", state_root=str(tmp_path / "state"))
        cluster = cluster_class(node_count=hosts, run=run, work_dir=str(tmp_path / "work"), ports=[7000], **options)
        every = [(interface, ability) for interface in ("clocks", "disks", "links") for ability in ABILITIES[interface]]
        cluster.prepare([need for need in every if cluster.missing(*need) is None])
        await cluster.start()
        try:
            await scenario(cluster)
        finally:
            await cluster.stop()
        assert run.claims == () and run.close()

    place.run(body())


async def printed(cluster: Any, host: str, code: str) -> str:
    """The output of a program on the host, which the host's faults affect."""
    process = await cluster.spawn(host, Program(name="p", argv=[cluster.python(host), "-c", code], log_name="p.log"))
    assert await asyncio.wait_for(process.wait(), 60) == 0
    _, output, _ = await cluster.run(host, ["tail", "-n", "1", f"{cluster.data_dir(host)}/../logs/p.log"])
    return str(output.strip())


CLOCK = "import time; print(time.time())"
WRITER = """
import os, sys, time
def write(name, synced):
    descriptor = os.open(os.path.join(sys.argv[1], name), os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"content")
    if synced:
        os.fsync(descriptor)
        directory = os.open(sys.argv[1], os.O_RDONLY)
        os.fsync(directory)
write("synced", True)
write("unsynced", False)
print("written", flush=True)
time.sleep(600)
"""


async def clocks(cluster: Any) -> None:
    """Skew the clock of one host by an hour, which leaves another host alone, and release it."""
    await cluster.clocks.skew("f1", {"n1": ClockSkew(offset_ms=3_600_000)})
    assert 3500 < float(await printed(cluster, "n1", CLOCK)) - time.time() < 3700
    assert abs(float(await printed(cluster, "n2", CLOCK)) - time.time()) < 100
    await cluster.clocks.release("f1")
    assert abs(float(await printed(cluster, "n1", CLOCK)) - time.time()) < 100
    with pytest.raises(ValueError, match="no replica runs on n9"):
        await cluster.clocks.skew("f2", {"n9": ClockSkew(offset_ms=1)})


async def disks(cluster: Any) -> None:
    """Disk errors, a stall, a power cut and a flipped bit."""
    faults = {"n1": DiskFault(kind="error-write"), "n2": DiskFault(kind="stall-fsync")}
    await cluster.disks.impair("f1", faults)
    first, second, third = [await cluster.disks.probe(host, timeout_s=5.0) for host in ("n1", "n2", "n3")]
    assert first.write.outcome == "EIO"
    assert (second.write.outcome, second.sync.outcome) == ("ok", "no answer")
    assert third.write.outcome == third.sync.outcome == third.read.outcome == "ok"
    await cluster.disks.release_all()
    assert (await cluster.disks.probe("n2", timeout_s=30.0)).sync.outcome == "ok"

    data = cluster.data_dir("n1")
    program = Program(name="w", argv=[cluster.python("n1"), "-c", WRITER, data], log_name="w.log")
    process = await cluster.spawn("n1", program)
    log = f"{data}/../logs/w.log"
    status, _, _ = await cluster.run("n1", ["sh", "-c", f"until grep -q written {log}; do :; done"], timeout_s=60)
    assert status == 0 and await cluster.disks.reaches("n1", process.host_pid) is None
    assert "has not loaded" in await cluster.disks.reaches("n1", 1)
    await process.kill()
    lost = await cluster.disks.cut_power("f2", "n1")
    assert lost.lost_bytes == len("content")
    _, left, _ = await cluster.run("n1", ["ls", data])
    assert [name for name in left.split() if name != "lost+found"] == ["synced"]
    await cluster.disks.flip_bit("f3", "n1", files="synced", place=0.0, bit=0)
    assert (await cluster.run("n1", ["cat", f"{data}/synced"]))[1] == "bontent"
    await cluster.disks.release("f3")
    assert (await cluster.run("n1", ["cat", f"{data}/synced"]))[1] == "content"


async def file_systems(cluster: Any) -> None:
    """Freeze, fill and shut down file systems; crash one, which loses what was not written."""
    faults = {"n1": DiskFault(kind="freeze"), "n2": DiskFault(kind="fill"), "n3": DiskFault(kind="shutdown")}
    await cluster.disks.impair("f1", faults)
    first, second, third = [await cluster.disks.probe(host, timeout_s=2.0) for host in ("n1", "n2", "n3")]
    assert first.write.outcome == "no answer"
    assert second.write.outcome == "ENOSPC"
    assert third.write.outcome == "EIO"
    with pytest.raises(RuntimeError, match="the file system of n1 is already held"):
        await cluster.disks.impair("f2", {"n1": DiskFault(kind="fill")})
    await cluster.disks.release("f1")
    await cluster.disks.release_all()
    for host in ("n1", "n2", "n3"):
        probed = await cluster.disks.probe(host, timeout_s=30.0)
        assert (probed.write.outcome, probed.sync.outcome, probed.read.outcome) == ("ok", "ok", "ok")

    data = cluster.data_dir("n1")
    await cluster.run("n1", ["sh", "-c", f"echo lost > {data}/lost"])
    await cluster.put_file("n1", f"{data}/deep/put", b"put")  # the harness's own files are kept
    sleeping = await cluster.spawn("n1", Program(name="s", argv=["sleep", "600"], log_name="s.log"))
    await cluster.disks.cut_power("f3", "n1", kind="crash")
    assert sleeping.exit_status() == -9
    _, left, _ = await cluster.run("n1", ["cat", f"{data}/deep/put", f"{data}/lost"])
    assert left == "put"


async def links(cluster: Any) -> None:
    """Delayed, lost, duplicated, reordered and throttled packets."""

    async def measure(count: int = 60, size_bytes: int = 64) -> Any:
        return await cluster.links.measure([THERE, BACK, OTHER], count=count, size_bytes=size_bytes, timeout_s=3.0)

    def median_ms(measured: Any) -> float:
        return float(statistics.median(measured.delays_ms))

    shaping = cluster.links
    await shaping.shape("f1", {THERE: LinkShape(delay_ms=120)})
    seen = await measure()
    assert median_ms(seen[THERE]) >= 90
    assert median_ms(seen[BACK]) < 60 and median_ms(seen[OTHER]) < 60
    await shaping.shape("f2", {THERE: LinkShape(delay_ms=120), BACK: LinkShape(loss_percent=50)})
    seen = await measure()
    assert median_ms(seen[THERE]) >= 210
    assert 5 < seen[BACK].received < 55 and seen[OTHER].received == 60
    await shaping.release("f1")
    await shaping.shape(
        "f2", {THERE: LinkShape(duplicate_percent=50), BACK: LinkShape(delay_ms=30, reorder_percent=40)}
    )
    seen = await measure()
    assert seen[THERE].duplicates > 5 and seen[THERE].received == 60
    assert seen[BACK].out_of_order > 0 and seen[THERE].out_of_order == 0
    await shaping.shape("f2", {THERE: LinkShape(rate_bytes_per_s=50_000)})
    seen = await measure(count=25, size_bytes=1000)
    assert seen[THERE].seconds >= 0.4
    # TCP hands the kernel segments far larger than a packet, which must arrive intact.
    ip, port = cluster.address_from("n1", "n2", 7000).split(":")
    take = (
        f"import hashlib, socket; c, _ = socket.create_server(('{ip}', {port})).accept(); h = hashlib.sha256()\n"
        "while d := c.recv(1 << 16): h.update(d)\n"
        "print(h.hexdigest())"
    )
    send = (
        "import hashlib, random, socket, time\nd = random.Random(5).randbytes(1_000_000)\n"
        "for _ in range(200):\n"
        f"    try: s = socket.create_connection(('{ip}', {port})); break\n"
        "    except OSError: time.sleep(0.1)\n"
        "s.sendall(d); s.close(); print(hashlib.sha256(d).hexdigest())"
    )
    await shaping.shape("f2", {THERE: LinkShape(delay_ms=20, duplicate_percent=5)})
    taken, sent = await asyncio.gather(printed(cluster, "n2", take), printed(cluster, "n1", send))
    assert taken == sent
    await shaping.release_all()
    await shaping.release_all()
    for measured in (await measure()).values():
        assert (measured.received, measured.duplicates, measured.out_of_order) == (60, 0, 0)
        assert median_ms(measured) < 60
    with pytest.raises(ValueError, match="no such hosts in this cluster: n9"):
        await shaping.shape("f3", {Link("n1", "n9"): LinkShape(delay_ms=1)})


async def killed_relay(cluster: Any) -> None:
    """The links of a killed relay can be healed without it, and new shapes are refused."""
    shaping, shaper = cluster.links, cluster.links._shaper
    if isinstance(shaper, FirstChoice):
        return  # the kernel shapes: there is no relay to end
    relay = shaper._relays["n1"]
    await shaping.shape("f1", {THERE: LinkShape(delay_ms=1)})
    assert (await cluster.run("n1", ["kill", "-KILL", str(relay.pid)]))[0] == 0
    await shaping.release("f1")
    seen = await shaping.measure([THERE], count=10, size_bytes=64, timeout_s=3.0)
    assert seen[THERE].received == 10
    with pytest.raises(ShellError, match="does not listen"):
        await shaping.shape("f2", {THERE: LinkShape(delay_ms=1)})
    await shaping.release_all()


LOOP = """
import os, sys, time
descriptor = os.open(os.path.join(sys.argv[1], "loop"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
while True:
    os.write(descriptor, b"line")
    os.fsync(descriptor)
    time.sleep(0.01)
"""


GROWN = """
import os, sys, time
begin = os.path.getsize(sys.argv[1])
while os.path.getsize(sys.argv[1]) <= begin + len("line"):
    time.sleep(0.01)
"""


async def launched(cluster: Any) -> None:
    """Faults reach a program behind a shell, which might execute anything, through the launcher."""
    python, data = cluster.python("n1"), cluster.data_dir("n1")
    argv = ["sh", "-c", f"exec {shlex.join([python, '-c', LOOP, data])}"]
    process = await cluster.spawn("n1", Program(name="l", argv=argv, log_name="l.log"))
    assert cluster.disks.mechanism("n1") == "seccomp" and cluster.clocks.mechanism("n1") == "the patched vDSO"
    async with asyncio.timeout(60):
        status, _, _ = await cluster.run("n1", ["sh", "-c", f"until [ -s {data}/loop ]; do :; done"], timeout_s=60)
        assert status == 0 and await cluster.disks.reaches("n1", process.host_pid) is None
        await cluster.disks.impair("l1", {"n1": DiskFault(kind="stall-fsync")})
        while not (await cluster.disks.met("l1"))["n1"].met:  # noqa: ASYNC110 - a program elsewhere
            await asyncio.sleep(0.05)
        assert (await cluster.disks.probe("n1", timeout_s=5.0)).sync.outcome == "no answer"
        await cluster.disks.release("l1")
        await cluster.clocks.skew("l2", {"n1": ClockSkew(offset_ms=3_600_000)})
        assert await cluster.clocks.reaches("n1", process.host_pid) is None
        [reading] = await cluster.clocks.read("n1", timeout_s=30.0)
        assert abs(reading.offset_ms - 3_600_000) < 60_000
        with pytest.raises(RuntimeError, match="the wall clock only"):
            await cluster.clocks.skew("l3", {"n1": ClockSkew(rate_ppm=-500_000, affects_monotonic=True)})
        await cluster.clocks.release("l2")
        [reading] = await cluster.clocks.read("n1", timeout_s=30.0)
        assert abs(reading.offset_ms) < 60_000
    assert await cluster.disks.expect_cut("l4", ["n1"]) > 0
    assert (await cluster.run("n1", [python, "-c", GROWN, f"{data}/loop"], timeout_s=60))[0] == 0
    await process.kill()
    cut = await cluster.disks.cut_power("l4", "n1")
    assert cut.recorded and "in the last 2 s" in cut.detail
    await cluster.disks.release("l4")


async def everything(cluster: Any) -> None:
    for part in (clocks, disks, links, killed_relay, launched):
        await part(cluster)


@pytest.mark.ssh
@pytest.mark.root
@on_machines
def test_faults_take_effect_and_heal_on_ssh_machines(tmp_path: Path, ssh_machines: Any) -> None:
    async def and_file_systems(cluster: Any) -> None:
        await everything(cluster)
        await file_systems(cluster)

    with_cluster(tmp_path, ssh_machines, SshCluster, and_file_systems, inventory=str(ssh_machines.inventory))
    assert not (tmp_path / "work" / "n1" / "data" / "lost+found").exists()
    for host in ("n1", "n2", "n3"):
        assert ssh_machines.files(host) == []
        assert "splitbrain" not in ssh_machines.rules(host)
        assert "sb-aside" not in ssh_machines.devices(host)


@pytest.mark.docker
@pytest.mark.root
@on_engine
def test_faults_take_effect_and_heal_in_containers(tmp_path: Path, docker_engine: Any) -> None:
    with_cluster(tmp_path, docker_engine, DockerCluster, everything)


@pytest.mark.ssh
@pytest.mark.root
@on_machines
def test_a_shim_that_does_not_load_on_a_machine_is_built_there(
    tmp_path: Path, ssh_machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another processor: a prebuilt shim is used, or the machine's compiler builds one, or the missing compiler
    is reported."""
    library = build_shim()
    monkeypatch.setattr(agent_shim, "build_shim", lambda: b"\x7fELF of another kind")
    monkeypatch.setattr(agent_shim, "prebuilt_shim", {}.get)
    with_cluster(tmp_path, ssh_machines, SshCluster, clocks, hosts=2, inventory=str(ssh_machines.inventory))
    monkeypatch.setattr(agent_shim, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ClusterUnavailable, match=r"^n\d: the clock and disk shim .*gcc libc6-dev on n\d$") as caught:
        with_cluster(tmp_path, ssh_machines, SshCluster, clocks, hosts=2, inventory=str(ssh_machines.inventory))
    assert "\n" not in str(caught.value)
    assert ssh_machines.files("n1") == []
    monkeypatch.setattr(agent_shim, "prebuilt_shim", {os.uname().machine: library}.get)
    options = {"hosts": 2, "inventory": str(ssh_machines.inventory)}
    with_cluster(tmp_path / "prebuilt", ssh_machines, SshCluster, clocks, **options)


@pytest.mark.ssh
@pytest.mark.root
@on_machines
def test_a_machine_that_cannot_hold_packets_back_is_refused(
    tmp_path: Path, ssh_machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_links, "_ASIDE", "a-name-that-is-too-long")
    with pytest.raises(ClusterUnavailable, match=r"^n\d cannot hold packets back .*netdev egress hook") as caught:
        with_cluster(tmp_path, ssh_machines, SshCluster, links, inventory=str(ssh_machines.inventory))
    assert "\n" not in str(caught.value)
    assert ssh_machines.files("n1") == []


PACKETS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1000)), max_size=30)


@given(PACKETS, st.integers(-(10**12), 10**12))
def test_link_measurements_do_not_depend_on_clock_offsets(packets: list[tuple[int, int]], ahead_ns: int) -> None:
    sent_ns = [1_000_000 + number for number in range(10)]
    plain = [(number, sent_ns[number] + late) for number, late in packets]
    shifted = [(number, at_ns + ahead_ns) for number, at_ns in plain]
    measured = measure_of(THERE, sent_ns=sent_ns, arrivals=plain, ahead_ns=0)
    assert measured == measure_of(THERE, sent_ns=sent_ns, arrivals=shifted, ahead_ns=ahead_ns)
    numbers = [number for number, _ in packets]
    assert measured.received == len(measured.delays_ms) == len(set(numbers))
    assert measured.duplicates == len(numbers) - len(set(numbers))
    firsts = list(dict.fromkeys(numbers))
    assert measured.out_of_order == sum(number < max(firsts[:at], default=-1) for at, number in enumerate(firsts))
    assert all(delay_ms <= 0.001 for delay_ms in measured.delays_ms)


def test_packets_that_the_source_could_not_send_were_not_lost_on_the_link() -> None:
    """Otherwise they would prove `link=loss`."""
    sent_ns = [1_000_000 + number if number % 4 else 0 for number in range(100)]
    arrivals = [(number, at_ns) for number, at_ns in enumerate(sent_ns) if at_ns]
    measured = measure_of(THERE, sent_ns=sent_ns, arrivals=arrivals, ahead_ns=0)
    assert (measured.sent, measured.received) == (75, 75)
    problem = _is_lossy(measured, LinkShape(loss_percent=25.0), LinkShape())
    assert problem == "0 of 75 lost"


def test_missing_abilities_of_containers_are_reported_with_a_remedy() -> None:
    said = DockerCluster.missing("disks", "freeze")
    assert said is not None and "use --cluster netns" in said and "\n" not in said
    assert DockerCluster.missing("links", "loss") is None and SshCluster.missing("disks", "freeze") is None


@pytest.mark.ssh
@pytest.mark.root
@on_machines
def test_variants_that_need_loop_devices_are_omitted_where_a_machine_has_none(
    tmp_path: Path, ssh_machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = str(ssh_machines.inventory)

    def planned_on(cluster_class: Any) -> PlannedTarget:
        system_class = registry.load("systems", "broker")
        return PlannedTarget(cluster_class, ["n1", "n2", "n3"], system_class=system_class, settings={})

    def usable() -> tuple[set[str], list[str]]:
        with entered(ssh_machines.namespace):
            cluster_class = require_cluster(SshCluster, {"inventory": inventory})
            variants, problems = planned_on(cluster_class).usable(DISK_STALL, None)
        return {variant.partition("@")[0] for variant in variants}, problems

    assert usable() == ({"fsync", "all", "freeze"}, [])
    monkeypatch.setattr(ssh_connection, "_LOOP_TRIAL", "echo 'losetup: cannot find an unused loop device' >&2; exit 1")
    modes, [problem] = usable()
    assert modes == {"fsync", "all"}
    assert problem.endswith("scripts/provision.sh to install what is missing") and "unused loop device" in problem
    assert "\n" not in problem


def test_an_unreachable_machine_is_not_reported_as_lacking_file_systems() -> None:
    nowhere = SshHost(name="n1", hostname="127.0.0.1", port=1)
    assert ssh_connection.why_no_file_systems([nowhere]) is None and ssh_connection.why_no_file_systems([]) is None


@pytest.mark.ssh
@pytest.mark.root
@on_machines
def test_a_machine_without_loop_devices_is_refused_at_the_start(
    tmp_path: Path, ssh_machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_file_systems, "_MAKE", "echo 'mount: failed to setup loop device' >&2; exit 32")
    with pytest.raises(ClusterUnavailable, match=r"^n\d cannot have a file system of its own \(mount: .*\)") as caught:
        with_cluster(tmp_path, ssh_machines, SshCluster, links, inventory=str(ssh_machines.inventory))
    assert "\n" not in str(caught.value)
    assert ssh_machines.files("n1") == []
