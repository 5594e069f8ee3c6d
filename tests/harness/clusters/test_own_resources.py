"""Resource limits of programs, as the kernel reports them: in force, hit and released."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clusters import own_resources
from harness.clusters.agent_processes import AgentProcess
from harness.clusters.base import Program
from harness.clusters.host_agent import TIME_WAIT, sockets_here
from harness.clusters.local import LocalCluster
from harness.clusters.netns import NetnsCluster
from harness.clusters.netns_trial import why_no_namespaces
from harness.clusters.own_resources import OwnResources
from harness.faults.processes import ReplicaProcesses
from harness.run_state import RunState
from nemesis.mechanisms.shell import ShellError
from nemesis.resources import RESOURCES
from nemesis.target import ABILITIES, ProcessMember, ResourceLimit
from tests.headless import HEADLESS

Eventually = Callable[..., Any]
KINDS = ABILITIES["resources"]
NO_HOSTS = "needs root" if os.geteuid() != 0 else why_no_namespaces(in_user_namespace=False)
WHY_NOT = {kind: NO_HOSTS or NetnsCluster.missing("resources", kind) for kind in KINDS}

USE = {
    "cpu": "while True: pass",
    "memory": "piece, file = bytes(1 << 16), open(sys.argv[1], 'wb', buffering=0)\nwhile True:\n"
    "    if file.tell() >= 1 << 23: file.seek(0); file.truncate()\n    file.write(piece); time.sleep(0.002)",
    "processes": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n"
    "    try: pid = os.fork()\n    except OSError as error: print(error.strerror, flush=True); pid = 1\n"
    "    if pid == 0: time.sleep(0.5); os._exit(0)\n    time.sleep(0.02)",
    "descriptors": "while True:\n"
    "    try: open('/dev/null').close()\n"
    "    except OSError as error: print(error.strerror, flush=True)\n    time.sleep(0.02)",
}
"""Programs that want ever more of something. (A rewritten file of 64 KiB fits into what the kernel sets aside.)"""
SAYS = {"processes": "Resource temporarily unavailable", "descriptors": "Too many open files"}


async def start(cluster: Any, host: str, kind: str, eventually: Eventually, tmp_path: Path) -> AgentProcess:
    code = "import os, sys, time\nprint('up', flush=True)\n" + USE[kind]
    argv = [sys.executable, "-c", code, str(tmp_path / f"{host}.bytes")]
    child: AgentProcess = await cluster.spawn(host, Program(name="greedy", argv=argv, log_name="greedy.log"))
    await eventually(lambda: "up" in Path(child.log_path).read_text())
    return child


async def with_cluster(made: Any, kind: str, scenario: Callable[[Any], Awaitable[None]]) -> None:
    made.prepare({("resources", kind)})
    await made.start()
    try:
        await scenario(made)
    finally:
        await made.stop()


def target_of(cluster: Any, children: dict[str, AgentProcess], again: Callable[[str], Awaitable[AgentProcess]]) -> Any:
    async def restart(host: str) -> None:
        children[host] = await again(host)  # one that ran out of memory

    processes = ReplicaProcesses(cluster.hosts, process=lambda host: children[host], restart=restart)

    async def answers(host: str, *, timeout_s: float) -> bool:
        return True

    return SimpleNamespace(hosts=cluster.hosts, processes=processes, resources=cluster.resources, answers=answers)


async def met(target: Any, host: str, kind: str) -> int:
    use = await target.resources.usage(host, kind)
    assert use.met is not None
    return int(use.met)


@pytest.mark.root
@pytest.mark.netns
@pytest.mark.parametrize("kind", KINDS)
def test_a_resource_limit_is_hit_by_programs_of_the_limited_host_only(
    kind: str, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    if WHY_NOT[kind] is not None:
        pytest.skip(f"{WHY_NOT[kind]}")

    async def scenario(cluster: Any) -> None:
        def start_on(host: str) -> Awaitable[AgentProcess]:
            return start(cluster, host, kind, eventually, tmp_path)

        children = {host: await start_on(host) for host in cluster.hosts}
        target = target_of(cluster, children, start_on)
        planned = await RESOURCES.plan(target, _Rng(), fault_id="f1", variant=f"{kind}@n1")  # type: ignore[arg-type]
        proof = await RESOURCES.prove(target, planned)
        assert not proof.proven and proof.failed[0].startswith("n1 is not limited: ")
        await RESOURCES.inject(target, planned)
        proof = await RESOURCES.prove(target, planned)
        assert proof.proven, proof
        healed = await RESOURCES.prove_healed(target, planned)
        assert not healed.proven and healed.failed[0].startswith("n1 is still limited: ")
        if kind in SAYS:
            await eventually(lambda: SAYS[kind] in Path(children["n1"].log_path).read_text())
        if kind != "descriptors":
            before = planned.evidence["met"]["n1"]
            async with asyncio.timeout(20):
                while await met(target, "n1", kind) <= before:  # noqa: ASYNC110 - the kernel sends no event
                    await asyncio.sleep(0.05)
        await RESOURCES.heal(target, planned)
        await RESOURCES.heal(target, planned)
        healed = await RESOURCES.prove_healed(target, planned)
        assert healed.proven, healed
        for host in ("n2", "n3"):
            assert SAYS.get(kind, "?") not in Path(children[host].log_path).read_text()

    cluster = NetnsCluster(node_count=3, run=run_state, work_dir=str(tmp_path), ports=[7000])
    asyncio.run(with_cluster(cluster, kind, scenario))
    assert run_state.claims == ()


class _Rng:
    """Always the lowest number."""

    def randint(self, low: int, high: int) -> int:
        return low


def test_a_limit_of_two_faults_lasts_until_the_second_is_released(
    tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """On the cluster that needs no privileges; the limit that a child inherited is restored."""

    async def scenario(cluster: Any) -> None:
        child = await start(cluster, "n1", "descriptors", eventually, tmp_path)
        resources: OwnResources = cluster.resources

        def limit() -> str:
            lines = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
            return next(line for line in lines if line.startswith("Max open files"))

        at_first = limit()
        for fault in ("f1", "f2"):
            await resources.limit(fault, {"n1": ResourceLimit(kind="descriptors")})
        await resources.release("f1")
        assert (await resources.usage("n1", "descriptors")).is_limited and limit() != at_first
        await resources.release("f2")
        assert not (await resources.usage("n1", "descriptors")).is_limited and limit() == at_first

    cluster = LocalCluster(node_count=2, run=run_state, work_dir=str(tmp_path), ports=[21931])
    asyncio.run(with_cluster(cluster, "descriptors", scenario))


HOLDS_FOR_AN_INSTANT = """
import os, sys, time
held = os.open("/dev/null", os.O_RDONLY)
print("up", flush=True)
sys.stdin.readline()
os.close(held)
while True:
    time.sleep(0.01)  # otherwise half of all checks find the file open again
    try: os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError as error: print(error.strerror, flush=True); break
sys.stdin.read()
"""


def test_a_descriptor_closed_while_the_limit_is_set_cannot_be_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check finds a file open that is closed at once; reopening it needs the same number."""

    lowest_free, seen = own_resources._lowest_free, []

    async def limited(program: asyncio.subprocess.Process) -> None:
        stdin, stdout = program.stdin, program.stdout
        assert stdin is not None and stdout is not None
        assert await stdout.readline() == b"up\n"

        async def members(host: str) -> list[ProcessMember]:
            return [ProcessMember(program.pid, 0, "S", "holds")]

        def look(pid: int) -> int:
            seen.append(lowest_free(pid))
            if len(seen) == 1:
                stdin.write(b"close\n")
            return seen[-1]

        monkeypatch.setattr(own_resources, "_lowest_free", look)
        resources = OwnResources({}, members=members)
        await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
        assert await asyncio.wait_for(stdout.readline(), 20) == b"Too many open files\n"
        assert min(seen) < seen[0]
        await resources.release("f")

    async def scenario() -> None:
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HOLDS_FOR_AN_INSTANT, stdin=pipe, stdout=pipe
        )
        try:
            await limited(program)
        finally:
            program.kill()
            await program.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["cpu", "memory", "processes"])
def test_limits_that_need_control_groups_are_refused_on_local_with_a_remedy(kind: str) -> None:
    assert "use --cluster netns as root" in str(LocalCluster.missing("resources", kind))
    assert LocalCluster.missing("resources", "descriptors") is None


@pytest.mark.parametrize("cluster", [LocalCluster, NetnsCluster])
def test_every_ability_has_a_named_mechanism(cluster: Any) -> None:
    of_clusters = {interface: abilities for interface, abilities in ABILITIES.items() if interface != "operator"}
    assert all(cluster.mechanism_of(interface, ability) for interface, of in of_clusters.items() for ability in of)
    assert cluster.mechanism_of("resources", "cpu") != cluster.mechanism_of("resources", "descriptors")


ACCEPTS = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print("up", flush=True)
while True:
    try:
        server.accept()[0].close()
    except OSError as error:
        print(error.strerror, flush=True)
        time.sleep(0.05)
"""


def test_a_program_that_cannot_accept_hits_the_descriptor_limit(
    tmp_path: Path, run_state: RunState, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of its socket shows it. A program that can still accept is not hit, whatever its limit."""

    async def scenario(cluster: Any) -> None:
        program = Program(name="accepts", argv=[sys.executable, "-c", ACCEPTS], log_name="accepts.log")
        child = await cluster.spawn("n1", program)
        await eventually(lambda: "up" in Path(child.log_path).read_text())
        resources: OwnResources = cluster.resources

        def waiting(child: AgentProcess) -> int:
            return own_resources._waiting([ProcessMember(child.pid, 0, "S", "accepts")])

        for is_sabotaged in (True, False):
            before = await resources.usage("n1", "descriptors")
            with monkeypatch.context() as patched:
                if is_sabotaged:
                    patched.setattr("harness.clusters.own_resources._lowest_free", lambda pid: 1000)
                await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
            if not is_sabotaged:
                await eventually(lambda: "Too many open files" in Path(child.log_path).read_text())
            await eventually(lambda wanted=not is_sabotaged: waiting(child) == wanted)
            use = await resources.usage("n1", "descriptors")
            assert before.met is not None and use.met == before.met + (not is_sabotaged)
            await resources.release("f")
            assert (await resources.usage("n1", "descriptors")).met == use.met
        assert resources._probes == {}
        (listener,) = own_resources._listeners([ProcessMember(child.pid, 0, "S", "accepts")])
        await eventually(lambda: waiting(child) == 0)
        left = [each for each in sockets_here("tcp") if each.state == TIME_WAIT]
        assert listener.port not in {end.port for each in left for end in (each.own, each.peer)}

    cluster = LocalCluster(node_count=2, run=run_state, work_dir=str(tmp_path), ports=[21932])
    asyncio.run(with_cluster(cluster, "descriptors", scenario))


NEVER_ACCEPTS = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("has_numbers_left", [True, False])
def test_an_unaccepted_connection_is_a_hit_only_if_no_descriptor_is_free(
    has_numbers_left: bool, tmp_path: Path, run_state: RunState, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Any) -> None:
        program = Program(name="late", argv=[sys.executable, "-c", NEVER_ACCEPTS], log_name="late.log")
        child = await cluster.spawn("n1", program)
        await eventually(lambda: "up" in Path(child.log_path).read_text())
        resources: OwnResources = cluster.resources
        with monkeypatch.context() as patched:
            if has_numbers_left:
                patched.setattr("harness.clusters.own_resources._lowest_free", lambda pid: 1000)
            await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
        member = ProcessMember(child.pid, 0, "S", "late")
        await eventually(lambda: [each.waiting > 0 for each in own_resources._listeners([member])] == [True])
        assert (await resources.usage("n1", "descriptors")).met == (not has_numbers_left)
        await resources.release("f")
        assert (await resources.usage("n1", "descriptors")).met == (not has_numbers_left)
        if not has_numbers_left:
            await resources.limit("g", {"n1": ResourceLimit(kind="descriptors")})
            await eventually(lambda: [each.waiting > 0 for each in own_resources._listeners([member])] == [True])
            for _ in range(2):
                assert (await resources.usage("n1", "descriptors")).met == 2, "over all faults"
                await resources.release("g")

    cluster = LocalCluster(node_count=2, run=run_state, work_dir=str(tmp_path), ports=[21932])
    asyncio.run(with_cluster(cluster, "descriptors", scenario))


@pytest.mark.root
@pytest.mark.netns
@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
@pytest.mark.parametrize(("address", "met"), [("0.0.0.0", 1), ("127.0.0.1", None)])
def test_a_host_with_a_network_of_its_own_is_probed_there_and_no_stranger_on_the_harness_s_machine(
    address: str, met: int | None, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    async def scenario(cluster: Any) -> None:
        code = NEVER_ACCEPTS.replace('("127.0.0.1", 0)', repr((address, stranger.getsockname()[1])))
        child = await cluster.spawn("n1", Program(name="late", argv=[sys.executable, "-c", code], log_name="late.log"))
        await eventually(lambda: "up" in Path(child.log_path).read_text())
        resources: OwnResources = cluster.resources
        await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
        member = ProcessMember(child.host_pid, 0, "S", "late")
        await eventually(lambda: [each.waiting > 0 for each in own_resources._listeners([member])] == [met is not None])
        assert (await resources.usage("n1", "descriptors")).met == met
        with pytest.raises(BlockingIOError):
            stranger.accept()

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        cluster = NetnsCluster(node_count=1, run=run_state, work_dir=str(tmp_path), ports=[7000])
        asyncio.run(with_cluster(cluster, "descriptors", scenario))


@pytest.mark.parametrize("ends", ["before the proof", "after it"])
def test_hits_of_a_limit_are_unknown_once_the_limited_program_has_exited(
    ends: str, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """Many programs exit when they cannot accept: then the kernel has nothing to report."""

    async def scenario(cluster: Any) -> None:
        async def start_on(host: str) -> AgentProcess:
            program = Program(name="late", argv=[sys.executable, "-c", NEVER_ACCEPTS], log_name=f"{host}.log")
            child: AgentProcess = await cluster.spawn(host, program)
            await eventually(lambda: "up" in Path(child.log_path).read_text())
            return child

        children = {host: await start_on(host) for host in cluster.hosts}
        target = target_of(cluster, children, start_on)
        planned = await RESOURCES.plan(target, _Rng(), fault_id="f1", variant="descriptors@n1")  # type: ignore[arg-type]
        await RESOURCES.inject(target, planned)
        for is_before in (True, False):
            if is_before == (ends == "before the proof"):
                os.kill(children["n1"].host_pid, signal.SIGKILL)
                await eventually(lambda: children["n1"].exit_status() is not None)
            if is_before:
                proof = await RESOURCES.prove(target, planned)
                assert proof.proven, proof
        met = await RESOURCES.prove_met(target, planned)
        assert met.proven and met.exercised is None, met
        assert met.detail == "hits on n1 are not counted: all limited processes have exited"
        await RESOURCES.heal(target, planned)
        assert (await RESOURCES.prove_healed(target, planned)).proven

    cluster = LocalCluster(node_count=2, run=run_state, work_dir=str(tmp_path), ports=[21932])
    asyncio.run(with_cluster(cluster, "descriptors", scenario))


async def usage_after(tmp_path: Path, members: list[ProcessMember], change: Callable[[], None]) -> Any:
    """What is reported of n1, limited to some processor time by files in place of a control group, after a change."""

    async def listed(host: str) -> list[ProcessMember]:
        return members

    (tmp_path / "cpu.max").write_text("max 100000")
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cpu.stat").write_text("nr_periods 90\nnr_throttled 4\n")
    resources = OwnResources({"n1": {"cpu": str(tmp_path)}}, members=listed)
    await resources.limit("f", {"n1": ResourceLimit(kind="cpu", percent=5)})
    change()
    return await resources.usage("n1", "cpu")


def test_a_limit_that_somebody_has_lifted_is_not_in_force(tmp_path: Path) -> None:
    use = asyncio.run(usage_after(tmp_path, [], lambda: None))
    assert use.is_limited and use.detail == "5 ms of CPU time every 100 ms"
    use = asyncio.run(usage_after(tmp_path, [], lambda: (tmp_path / "cpu.max").write_text("max 100000") and None))
    assert not use.is_limited and use.detail == "unlimited CPU time"


def test_only_periods_in_which_the_limit_was_enforced_are_hits(tmp_path: Path) -> None:
    assert asyncio.run(usage_after(tmp_path, [], lambda: None)).met == 4


def test_a_process_outside_the_limited_group_is_named(tmp_path: Path) -> None:
    members = [ProcessMember(7, 100, "S", "main"), ProcessMember(8, 101, "S", "io")]
    procs = tmp_path / "cgroup.procs"
    use = asyncio.run(usage_after(tmp_path, members, lambda: procs.write_text("7\n") and None))
    assert use.is_limited and use.astray == ["process 8 (io)"]


def test_processes_that_ran_before_they_could_be_put_into_their_group_are_put_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, put, write_text = [ProcessMember(pid, 0, "S", "x") for pid in (7, 8, 9)], [], Path.write_text

    def put_there(path: Path, text: str, **options: Any) -> int:
        if path.name == "cgroup.procs":
            put.append(text)
            if text == "8":
                raise ProcessLookupError
        return write_text(path, text, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", put_there)
        use = asyncio.run(usage_after(tmp_path, members, lambda: None))
    assert put == ["", "7", "8", "9"] and use.is_limited, "and one that has ended meanwhile is no obstacle"


def test_a_process_that_is_ending_is_not_astray_but_another_with_its_pid_is(tmp_path: Path) -> None:
    """Its group does not list it any more, and the host for a moment longer."""
    for ticks, astray in ((100, []), (101, ["process 8 (x)"])):
        answers = [[8, 100], [8, 100], [8, 100], [8, ticks], *([[8, ticks]] if astray else [[]]) * 20]

        async def listed(host: str, answers: Any = answers) -> list[ProcessMember]:
            return [ProcessMember(*each, "S", "x") for each in [answers.pop(0)] if each]

        (tmp_path / "cgroup.procs").write_text("")
        (tmp_path / "pids.max").write_text("max")
        (tmp_path / "pids.current").write_text("1")
        (tmp_path / "pids.events").write_text("max 0\n")
        resources = OwnResources({"n1": {"pids": str(tmp_path)}}, members=listed)
        use = asyncio.run(resources.usage("n1", "processes"))
        assert list(use.astray) == []
        if astray:
            assert list(asyncio.run(resources.usage("n1", "processes")).astray) == astray


async def nobody(host: str) -> list[ProcessMember]:
    return []


def test_the_lowest_limit_of_all_faults_is_in_force_of_each_kind(tmp_path: Path) -> None:
    for name, content in (
        ("cpu.max", "max 100000"), ("memory.max", "max"), ("memory.current", str(50 << 20)), ("pids.max", "max"),
        ("memory.stat", f"anonymous 9\nanon {1 << 20}\nfile {40 << 20}\nkernel {1 << 20}\n"), ("pids.current", "7"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
    resources = OwnResources({"n1": dict.fromkeys(("cpu", "memory", "pids"), str(tmp_path))}, members=nobody)
    limits = {
        "c20": ResourceLimit(kind="cpu", percent=20), "c5": ResourceLimit(kind="cpu", percent=5),
        "m3": ResourceLimit(kind="memory", spare_mib=3), "m1": ResourceLimit(kind="memory", spare_mib=1),
        "m90": ResourceLimit(kind="memory", spare_mib=90), "p": ResourceLimit(kind="processes"),
        "c0": ResourceLimit(kind="cpu", percent=0),
    }  # fmt: skip

    def in_force() -> list[str]:
        cpu, memory, pids = ((tmp_path / f"{name}.max").read_text() for name in ("cpu", "memory", "pids"))
        return [cpu.removesuffix(" 100000"), memory if memory == "max" else f"{int(memory) / (1 << 20):g}", pids]

    async def scenario() -> list[list[str]]:
        found = []
        for step in ("+c20", "+c5", "+m90", "+m3", "+m1", "+p", "-c5", "-m1", "-m3", "-c20", "-p", "-m90", "+c0"):
            if step[0] == "+":
                await resources.limit(step[1:], {"n1": limits[step[1:]]})
            else:
                await resources.release(step[1:])
            found.append(in_force())
        return found

    assert asyncio.run(scenario()) == [
        ["20000", "max", "max"], ["5000", "max", "max"], ["5000", "50", "max"], ["5000", "5", "max"],
        ["5000", "3", "max"], ["5000", "3", "7"], ["20000", "3", "7"], ["20000", "5", "7"], ["20000", "50", "7"],
        ["max", "50", "7"], ["max", "50", "max"], ["max", "max", "max"], ["1000", "max", "max"],
    ]  # fmt: skip


def test_control_groups_of_version_1_are_limited_too(tmp_path: Path) -> None:
    for name, content in (
        ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "50000"), ("cpu.stat", "nr_periods 9\nnr_throttled 3\n"),
        ("memory.limit_in_bytes", str((1 << 63) - 4096)), ("memory.usage_in_bytes", str(50 << 20)),
        ("memory.failcnt", "4"), ("memory.stat", f"rss 9\ntotal_rss {2 << 20}\ntotal_rss_huge 9\n"),
        ("cgroup.procs", ""), ("tasks", ""),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
    groups = own_resources.group_names([str(tmp_path), str(tmp_path / "missing")])
    assert groups == {"cpu": str(tmp_path), "memory": str(tmp_path)}
    resources = OwnResources({"n1": groups}, members=nobody)
    kinds = {"cpu": ResourceLimit(kind="cpu", percent=5), "memory": ResourceLimit(kind="memory", spare_mib=1)}

    async def used() -> list[tuple[bool, int | None, str]]:
        found = [await resources.usage("n1", kind) for kind in kinds]
        return [(use.is_limited, use.met, use.detail) for use in found]

    async def scenario() -> None:
        assert await used() == [(False, 3, "unlimited CPU time"), (False, 4, "50.0 MiB, no limit")]
        for kind, limit in kinds.items():
            await resources.limit(kind, {"n1": limit})
        assert await used() == [(True, 3, "5 ms of CPU time every 100 ms"), (True, 4, "50.0 of 3.0 MiB")]
        await resources.release_all()
        assert ((tmp_path / "cpu.cfs_quota_us").read_text(), (tmp_path / "memory.limit_in_bytes").read_text()) == (
            "-1", "-1",
        )  # fmt: skip

    asyncio.run(scenario())


def test_memory_that_cannot_be_reclaimed_is_left_to_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("max")
    (tmp_path / "memory.current").write_text(str(9 << 20))
    (tmp_path / "memory.stat").write_text(f"anon {4 << 20}\n")
    refusals, tried = [errno.EBUSY] * 2, list[int]()

    def write(path: str, limit_bytes: int) -> None:
        tried.append(limit_bytes >> 20)
        if refusals:
            raise OSError(refusals[0], os.strerror(refusals.pop(0)))

    monkeypatch.setattr(own_resources, "_write_memory", write)
    own_resources._squeeze(str(tmp_path), 1)
    assert tried == [5, 6, 7]
    for reasons, tries in (([errno.EBUSY] * 90, 20), ([errno.EINVAL], 1)):
        refusals[:], tried[:] = reasons, []
        with pytest.raises(OSError, match=os.strerror(reasons[0])):
            own_resources._squeeze(str(tmp_path), 1)
        assert len(tried) == tries


@pytest.mark.parametrize(
    ("address", "is_probed"),
    [("127.0.0.1", True), ("0.0.0.0", True), ("::", True), ("::ffff:127.0.0.1", True), ("::1", False)],
)
def test_a_port_is_probed_unless_it_accepts_ipv6_alone(address: str, is_probed: bool) -> None:
    """Part of an IPv6 address, taken for an IPv4 address, would be that of a stranger."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as server:
            server.bind((address, 0))
            server.listen()
            own = ProcessMember(os.getpid(), 0, "S", "x")
            port = server.getsockname()[1]
            assert port in [each.port for each in own_resources._listeners([own])]
            resources = OwnResources({}, members=nobody)
            resources._open_probes("n1", [own])
            ends = [probe.getpeername() for probe in resources._probes["n1"]]
            assert [end for end in ends if end[1] == port] == [("127.0.0.1", port)] * (2 if is_probed else 0)
            assert all(host.startswith("127.") for host, _ in ends)
            resources._close_probes("n1", [])
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        pytest.skip(f"no IPv6 here ({error.strerror})")


def test_only_a_listener_s_queue_has_connections_that_wait_to_be_accepted() -> None:
    """In the same place, the kernel shows how many bytes of an open connection were not read yet."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        own, port = ProcessMember(os.getpid(), 0, "S", "x"), server.getsockname()[1]
        assert [each.waiting for each in own_resources._listeners([own]) if each.port == port] == [1]
        with server.accept()[0] as accepted:
            client.sendall(b"unread")
            accepted.recv(1, socket.MSG_PEEK)
            assert [each.waiting for each in own_resources._listeners([own]) if each.port == port] == [0]


@pytest.mark.parametrize(
    ("waiting", "short", "hits"), [(1, {1, 2}, 1), (1, {1}, 0), (0, {1, 2}, 0), (3, {1, 2}, 1), (1, set(), 0)]
)
def test_a_connection_waits_for_a_descriptor_only_if_none_of_the_socket_s_processes_has_one(
    waiting: int, short: set[int], hits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = own_resources._Listener("127.0.0.1", 7000, waiting, [1, 2])
    monkeypatch.setattr(own_resources, "_listeners", lambda members: [shared])
    monkeypatch.setattr(own_resources, "_is_short", short.__contains__)
    assert own_resources._waiting([]) == hits


def test_a_process_that_has_ended_is_not_short_of_descriptors() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not own_resources._is_short(ended.pid)
        ended.wait()
        assert not own_resources._is_short(ended.pid)


def test_a_port_that_refuses_at_once_has_no_probes_and_many_ports_have_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [own_resources._Listener(place, port, 0, []) for place in ("255.255.255.255", "127.0.0.1")]
        monkeypatch.setattr(own_resources, "_listeners", lambda members: found)
        resources = OwnResources({}, members=nobody)
        resources._open_probes("n1", [])
        assert [probe.getpeername()[0] for probe in resources._probes["n1"]] == ["127.0.0.1"] * 2
        found[1:] *= 20
        resources._open_probes("n1", [])
        assert len(resources._probes["n1"]) == 32
        resources._close_probes("n1", [])


def test_more_probes_are_sent_once_all_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have had a few descriptors left, and none by now."""
    idle = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
    child = subprocess.Popen(idle, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"

    async def members(host: str) -> list[ProcessMember]:
        return [ProcessMember(child.pid, 0, "S", "x")]

    async def scenario(port: int) -> None:
        waiting = [0]

        def listeners(members: Any) -> list[Any]:
            return [own_resources._Listener("127.0.0.1", port, waiting[0], [child.pid])]

        monkeypatch.setattr(own_resources, "_listeners", listeners)
        resources = OwnResources({}, members=members)
        await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
        numbers = [len(resources._probes["n1"])]
        for waiting[0] in (0, 0, 2, 2):
            assert (await resources.usage("n1", "descriptors")).met == (waiting[0] > 0)
            numbers.append(len(resources._probes["n1"]))
        assert numbers == [2, 4, 6, 6, 6]
        await resources.release("f")

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            asyncio.run(scenario(server.getsockname()[1]))
    finally:
        child.kill()
        child.communicate()


def test_no_limit_on_descriptors_is_raised_by_a_fault() -> None:
    code = (
        "import os, resource, time\nheld = [os.open('/dev/null', os.O_RDONLY) for _ in range(9)]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4, 50))\nprint('up', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"

            async def members(host: str) -> list[ProcessMember]:
                return [ProcessMember(child.pid, 0, "S", "x")]

            resources = OwnResources({}, members=members)
            asyncio.run(resources.limit("f", {"n1": ResourceLimit(kind="descriptors")}))
            assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (4, 50)
        finally:
            child.kill()


@pytest.mark.parametrize("raised", ["one", "both"])
def test_descriptor_limits_that_somebody_has_raised_are_not_in_force(raised: str) -> None:
    async def scenario(children: list[subprocess.Popen[bytes]]) -> None:
        members = [ProcessMember(child.pid, number, "S", "idle") for number, child in enumerate(children)]
        was = resource.prlimit(children[0].pid, resource.RLIMIT_NOFILE)

        async def listed(host: str) -> list[ProcessMember]:
            return members

        resources = OwnResources({}, members=listed)
        await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
        use = await resources.usage("n1", "descriptors")
        assert use.is_limited and use.astray == []
        for child in children[: 1 if raised == "one" else 2]:
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (200, 200))
        use = await resources.usage("n1", "descriptors")
        assert use.is_limited is (raised == "one")
        assert use.astray == [str(member) for member in members[: 1 if raised == "one" else 2]]
        await resources.release("f")
        left = [resource.prlimit(child.pid, resource.RLIMIT_NOFILE) for child in children]
        assert left == [(200, 200), (200, 200) if raised == "both" else was], "those are not ours to undo"

    idle = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
    children = [subprocess.Popen(idle, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:  # it can be limited once it has opened its libraries
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
        asyncio.run(scenario(children))
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_limits_are_undone_on_every_host_and_a_failure_is_made_up_for_when_it_is_repeated(tmp_path: Path) -> None:
    def unlimited(host: str) -> bool:
        return (tmp_path / host / "cpu.max").read_text().startswith("max")

    async def scenario() -> None:
        resources = OwnResources({host: {"cpu": str(tmp_path / host)} for host in hosts}, members=nobody)
        for fault, limited in (("f", ("n1", "n2")), ("g", ("n3",))):
            await resources.limit(fault, {host: ResourceLimit(kind="cpu", percent=5) for host in limited})
        (tmp_path / "n1").rename(tmp_path / "away")
        with pytest.raises(OSError, match="n1/cpu"):
            await resources.release_all()
        assert unlimited("n2") and unlimited("n3"), "neither another host nor another fault keeps its limit"
        for again in (resources.release_all, partial(resources.release, "f")):
            with pytest.raises(OSError, match="n1/cpu"):
                await again()
        (tmp_path / "away").rename(tmp_path / "n1")
        assert not unlimited("n1")
        await resources.release("f")
        assert unlimited("n1")
        (tmp_path / "n1" / "cpu.max").write_text("5000 100000")
        await resources.release("f")
        assert not unlimited("n1"), "what is healed is not touched again"

    hosts = ("n1", "n2", "n3")
    for host in hosts:
        (tmp_path / host).mkdir()
        (tmp_path / host / "cpu.max").write_text("max 100000")
    asyncio.run(scenario())


def test_descriptor_limits_that_could_not_be_undone_are_undone_when_that_is_repeated() -> None:
    """The processes are asked for again, and the host may not answer."""

    async def scenario(child: subprocess.Popen[bytes]) -> None:
        was = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        answers: list[bool] = []

        async def listed(host: str) -> list[ProcessMember]:
            if answers and not answers.pop(0):
                raise ShellError(host, ["members"], 1, "no answer")
            return [ProcessMember(child.pid, 7, "S", "idle")]

        resources = OwnResources({}, members=listed)
        await resources.limit("f", {"n1": ResourceLimit(kind="descriptors")})
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) != was
        answers += [False, True, False]  # the first step fails, then the second one
        for _ in range(2):
            with pytest.raises(ShellError, match="no answer"):
                await resources.release("f")
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) != was
        await resources.release("f")
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == was

    idle = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
    child = subprocess.Popen(idle, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        asyncio.run(scenario(child))
    finally:
        child.kill()
        child.communicate()


FORKS = """
import os, sys, time
held = os.open("/dev/null", os.O_RDONLY)
print("up", flush=True)
sys.stdin.readline()
child = os.fork()
if child:
    os.close(held)
    print(child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("begins_at", [2, 7, 13], ids=["between two looks", "between two faults", "at the end"])
def test_a_process_started_under_a_descriptor_limit_gets_the_limit_of_before_back(begins_at: int) -> None:
    """It inherits its parent's; which is lowered again, here to a lower number, before the new process is found."""

    async def scenario(program: subprocess.Popen[str]) -> None:
        assert program.stdin is not None and program.stdout is not None and program.stdout.readline() == "up\n"
        was = resource.prlimit(program.pid, resource.RLIMIT_NOFILE)
        pids, looks = [program.pid], 0

        async def members(host: str) -> list[ProcessMember]:
            nonlocal looks
            looks += 1
            found = [ProcessMember(pid, 0, "S", "forks") for pid in pids]
            if looks == begins_at:
                print(file=program.stdin, flush=True)
                pids.append(int(program.stdout.readline()))  # type: ignore[union-attr]
                assert resource.prlimit(pids[1], resource.RLIMIT_NOFILE)[0] < was[0]
            return found

        resources = OwnResources({}, members=members)
        for fault in ("f1", "f2"):
            await resources.limit(fault, {"n1": ResourceLimit(kind="descriptors")})
        for fault in ("f1", "f2"):
            await resources.release(fault)
        assert [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids] == [was, was]

    argv, pipe = [sys.executable, "-S", "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as program:
        try:
            asyncio.run(scenario(program))
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def test_descriptors_are_limited_beside_a_process_that_has_ended_and_of_one_without_its_first_thread() -> None:
    """The kernel shows both as zombies, which have no descriptors for root; others may not look."""
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([sys.executable, "-c", ""], stdout=pipe) as ended,
        subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=pipe) as headless,
    ):
        try:
            assert headless.stdout is not None and headless.stdout.readline().startswith(b"headless")
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

            async def members(host: str) -> list[ProcessMember]:
                return [ProcessMember(child.pid, 0, "S", "x") for child in (ended, headless)]

            was = resource.prlimit(ended.pid, resource.RLIMIT_NOFILE)
            asyncio.run(OwnResources({}, members=members).limit("f", {"n1": ResourceLimit(kind="descriptors")}))
            assert resource.prlimit(ended.pid, resource.RLIMIT_NOFILE) == was
            assert resource.prlimit(headless.pid, resource.RLIMIT_NOFILE) == (3, was[1])
        finally:
            headless.kill()
