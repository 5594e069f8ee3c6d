"""What a run claims of a Docker engine and of machines behind SSH, and when a claim ends, on fake engines and machines.

The state of a run must name a thing before it exists, and until it is certainly gone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cleanup import clean
from harness.clusters import docker as docker_cluster
from harness.clusters import docker_engine, host_agent, ssh, ssh_connection
from harness.clusters.agent_link import ConnectFailure
from harness.clusters.base import ClusterUnavailable
from harness.clusters.docker import DockerCluster
from harness.clusters.docker_engine import RUN_LABEL, DockerEngine
from harness.clusters.ssh import SshCluster
from harness.clusters.ssh_connection import HostNotTaken, clean_host, take_host
from harness.clusters.ssh_inventory import SshHost
from harness.errors import OperatorError
from harness.run_state import KIND_CONTAINER, KIND_SSH_HOST, RunState, runs_in

RUN = "claims"
NAMES = [f"sb-{RUN}-n1", f"sb-{RUN}-n2"]
HOSTS = [SshHost(name=name, hostname=name, user="root") for name in ("n1", "n2")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunState]:
    made = RunState.create(RUN, state_root=str(tmp_path / "state"))
    yield made
    made.close()


def claimed(run: RunState) -> list[str]:
    return sorted(claim.ident for claim in run.claims)


# The engine.


class Container:
    def __init__(self, run_id: str | None, *, problem: Exception | None = None) -> None:
        self.labels = {} if run_id is None else {RUN_LABEL: run_id}
        self.done: list[str] = []
        self._problem = problem

    def remove(self, *, force: bool, v: bool) -> None:
        if self._problem is not None:
            raise self._problem
        self.done.append(f"remove force={force} volumes={v}")

    def stop(self, *, timeout: int) -> None:
        self.done.append("stop")


def engine_with(monkeypatch: pytest.MonkeyPatch, containers: dict[str, Container], **more: Any) -> DockerEngine:
    errors = pytest.importorskip("docker.errors")

    def get(name: str) -> Container:
        if name not in containers:
            raise errors.NotFound("no such container")
        return containers[name]

    client = SimpleNamespace(containers=SimpleNamespace(get=get), close=lambda: None, **more)
    monkeypatch.setattr(DockerEngine, "_new_client", lambda self: client)
    return DockerEngine()


def test_a_container_is_ended_and_removed_only_for_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, unlabelled = Container(RUN), Container("other"), Container(None)
    engine = engine_with(monkeypatch, {"ours": ours, "theirs": theirs, "unlabelled": unlabelled})
    assert engine.end_container("ours", RUN) and engine.remove_container("ours", RUN)
    assert ours.done == ["stop", "remove force=True volumes=True"], "its anonymous volumes go with it"
    for name in ("theirs", "unlabelled"):
        for end in (engine.end_container, engine.remove_container):
            with pytest.raises(OperatorError, match=f"container {name} does not carry the label {RUN_LABEL}={RUN}"):
                end(name, RUN)
    assert theirs.done == unlabelled.done == []
    assert not engine.remove_container("gone", RUN)


def test_a_container_that_the_engine_does_not_remove_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("docker.errors")
    engine = engine_with(monkeypatch, {"stuck": Container(RUN, problem=errors.APIError("device is busy"))})
    with pytest.raises(OperatorError, match="container stuck: device is busy"):
        engine.remove_container("stuck", RUN)


def test_a_network_is_removed_only_if_it_is_labelled_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    def networks(*, names: list[str], filters: dict[str, str]) -> list[Any]:
        labels = {"ours": RUN, "theirs": "other"}
        return [
            SimpleNamespace(remove=lambda name=name: removed.append(name))
            for name in names
            if filters.get("label") in (None, f"{RUN_LABEL}={labels[name]}")
        ]

    engine = engine_with(monkeypatch, {}, networks=SimpleNamespace(list=networks))
    assert engine.remove_network("ours", RUN) and not engine.remove_network("theirs", RUN)
    assert removed == ["ours"]


@pytest.mark.parametrize(
    ("status", "said", "is_gone"),
    [(404, "no such container", True), (409, "container is not running", True), (409, "is paused", False),
     (500, "server error", False)],
)  # fmt: skip
def test_a_container_is_gone_only_if_the_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str, is_gone: bool
) -> None:
    errors = pytest.importorskip("docker.errors")

    def refuse(*_: Any, **__: Any) -> None:
        raise errors.APIError(said, response=SimpleNamespace(status_code=status, reason="x", url="u"), explanation=said)

    engine = engine_with(monkeypatch, {}, api=SimpleNamespace(exec_create=refuse))
    with pytest.raises(ConnectFailure) as caught:
        engine.connect("c", ["true"])
    assert caught.value.gone is is_gone


class Engine:
    """An engine that notes what is done, and at each step what the run's state claims."""

    url = "unix:///fake"

    def __init__(self, run: RunState, *, failing: str = "") -> None:
        self.done: list[str] = []
        self.claims: list[Collection[str]] = []
        self._run, self._failing = run, failing

    def _note(self, what: str, name: str) -> None:
        self.done.append(f"{what} {name}")
        self.claims.append([json.loads(line).get("id") for line in Path(self._run.path).read_text().splitlines()])
        if what in self._failing:
            raise OperatorError(f"docker: {what} {name}: busy")

    def has_image(self, image: str) -> bool:
        return True

    def create_network(self, name: str, run_id: str) -> None:
        self._note("create", name)

    def start_container(self, *, name: str, **_: Any) -> str:
        self._note("start", name)
        return "10.0.0.9"

    def remove_container(self, name: str, run_id: str) -> bool:
        self._note("remove", name)
        return True

    def end_container(self, name: str, run_id: str) -> bool:
        self._note("end", name)
        return True

    def remove_network(self, name: str, run_id: str) -> bool:
        self._note("disconnect", name)
        return True

    def close(self) -> None:
        self.done.append("close")


def cluster_on(engine: Engine, run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DockerCluster:
    monkeypatch.setattr(docker_cluster, "DockerEngine", lambda: engine)
    return DockerCluster(node_count=2, run=run, work_dir=str(tmp_path / "work"), ports=[7000])


def test_containers_and_their_network_are_claimed_before_they_are_made(
    run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(run)
    cluster = cluster_on(engine, run, tmp_path, monkeypatch)
    asyncio.run(cluster._make_hosts())
    assert engine.done[0] == f"create sb-{RUN}" and sorted(engine.done[1:]) == [f"start {name}" for name in NAMES]
    for known in engine.claims:
        assert {f"sb-{RUN}", *NAMES} <= set(known)
    assert {claim.details["engine"] for claim in run.claims} == {engine.url}
    assert asyncio.run(cluster._remove_hosts()) == [] and claimed(run) == []
    assert engine.done[-2:] == [f"disconnect sb-{RUN}", "close"], "containers hold their network"


@pytest.mark.parametrize(("failing", "left"), [("remove", NAMES), ("disconnect", [f"sb-{RUN}"])])
def test_what_the_engine_does_not_remove_stays_claimed(
    run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, left: list[str]
) -> None:
    engine = Engine(run, failing=failing)
    cluster = cluster_on(engine, run, tmp_path, monkeypatch)

    async def body() -> None:
        await cluster._make_hosts()
        problems = await cluster._remove_hosts()
        assert claimed(run) == left and len(problems) == len(left)
        engine._failing = ""
        assert await cluster._remove_hosts() == [] and claimed(run) == []

    asyncio.run(body())


def test_a_container_with_files_that_were_not_fetched_is_ended_and_stays_claimed(
    run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(run)
    cluster = cluster_on(engine, run, tmp_path, monkeypatch)

    async def body() -> None:
        await cluster._make_hosts()
        cluster._unfetched.add("n2")
        [problem] = await cluster._remove_hosts()
        assert f"docker cp {NAMES[1]}:" in str(problem)

    asyncio.run(body())
    assert f"end {NAMES[1]}" in engine.done and f"remove {NAMES[1]}" not in engine.done
    assert claimed(run) == [NAMES[1]]


@pytest.mark.parametrize("says", ["busy", "removed"])
def test_clean_keeps_the_claim_of_a_container_that_was_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    root = str(tmp_path / "state")
    run = RunState.create(RUN, state_root=root)
    run.claim(KIND_CONTAINER, NAMES[0], engine="unix:///theirs")
    asked: list[Any] = []

    def make(url: str | None) -> Engine:
        asked.append(url)
        return Engine(run, failing="remove" if says == "busy" else "")

    monkeypatch.setattr(docker_engine, "DockerEngine", make)
    report = cleaned(run, root)
    assert asked == ["unix:///theirs"]
    assert [line.split(": ", 1)[1] for line in report.left] == (
        [f"left: container {NAMES[0]}: docker: remove {NAMES[0]}: busy"] if says == "busy" else []
    )
    assert report.notes == [], "an engine that answers is not forgotten"
    assert runs_in(root) == ([RUN] if says == "busy" else [])


def cleaned(run: RunState, root: str) -> Any:
    """The report of a cleanup after the run's harness was killed, which forgets what does not answer."""
    run.close()
    lines = Path(run.path).read_text().splitlines()
    Path(run.path).write_text("\n".join([json.dumps({**json.loads(lines[0]), "start_ticks": 1}), *lines[1:]]) + "\n")
    return clean(state_root=root, forgets_unreachable=True, report=lambda line: None)


# Machines behind SSH.


Answers = Callable[[SshHost], Any]


def machines(
    run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, take: Answers, give_back: Answers
) -> SshCluster:
    pytest.importorskip("paramiko")
    monkeypatch.setattr(ssh, "take_host", lambda host, run_id: take(host))
    monkeypatch.setattr(ssh, "clean_host", lambda host, run_id, keep: give_back(host))
    return SshCluster(node_count=2, run=run, work_dir=str(tmp_path / "work"), ports=[7000], inventory=HOSTS)


def test_machines_are_claimed_before_they_are_taken_and_until_they_are_clean(
    run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = ["the process 7 hangs"]

    def take(host: SshHost) -> None:
        state = Path(run.path).read_text()
        assert all(f'"{each.hostname}"' in state for each in HOSTS)

    cluster = machines(
        run, tmp_path, monkeypatch, take=take, give_back=lambda host: ([], left if host.name == "n2" else [])
    )
    asyncio.run(cluster._make_hosts())
    [problem] = asyncio.run(cluster._remove_hosts())
    assert str(problem) == "n2: could not clean up: the process 7 hangs" and claimed(run) == ["n2"]
    left.clear()
    assert asyncio.run(cluster._remove_hosts()) == [] and claimed(run) == []


@pytest.mark.parametrize(("error", "left"), [(HostNotTaken, ["n1"]), (ClusterUnavailable, ["n1", "n2"])])
def test_only_a_machine_on_which_certainly_nothing_was_changed_is_not_claimed_any_more(
    run: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], left: list[str]
) -> None:
    def take(host: SshHost) -> None:
        if host.name == "n2":
            raise error("the connection was lost")

    cluster = machines(run, tmp_path, monkeypatch, take=take, give_back=lambda host: ([], []))
    with pytest.raises(error):
        asyncio.run(cluster._make_hosts())
    assert claimed(run) == left


TRACEBACK = 'Traceback (most recent call last):\n  File "<string>", line 4, in <module>\n'


@pytest.mark.parametrize(
    ("status", "said", "was_changed"),
    [
        (127, "bash: line 1: python3: command not found", False),
        (1, "sudo: a password is required", False),
        (1, "PermissionError: [Errno 13] Permission denied: '/var/lib/splitbrain'", False),
        (1, f"{TRACEBACK}FileNotFoundError: [Errno 2] No such file or directory: '/usr/bin/python3'", True),
        (1, f"{TRACEBACK}PermissionError: [Errno 13] Permission denied: '/usr/bin/python3'", True),
        (137, "", True),
    ],
)
def test_a_machine_counts_as_unchanged_only_if_the_agent_did_not_run(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str, was_changed: bool
) -> None:
    monkeypatch.setattr(ssh_connection, "_run_as_root", lambda host, argv, text: (status, "", said))
    with pytest.raises(ClusterUnavailable) as caught:
        take_host(HOSTS[0], RUN)
    assert isinstance(caught.value, HostNotTaken) is not was_changed


def test_a_user_who_may_not_make_the_directory_has_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(SystemExit, match=r"^PermissionError: \[Errno 13\] Permission denied: "):
        host_agent._start_command(str(tmp_path / "base"), RUN, "")


def test_a_machine_that_refuses_is_not_claimed_only_if_it_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, error in (
        ({"refused": "in use", "taken": True}, HostNotTaken),
        ({"refused": "no"}, ClusterUnavailable),
    ):
        monkeypatch.setattr(ssh_connection, "_run_as_root", lambda *_, a=answer: (0, f"motd\n{json.dumps(a)}\n", ""))
        with pytest.raises(ClusterUnavailable) as caught:
            take_host(HOSTS[0], RUN)
        assert type(caught.value) is error
    answered = {"removed": ["rules"], "left": ["process 7"]}
    monkeypatch.setattr(ssh_connection, "_run_as_root", lambda *_: (0, json.dumps(answered), ""))
    assert clean_host(HOSTS[0], RUN) == (["rules"], ["process 7"])


def test_clean_keeps_the_claim_of_a_machine_with_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paramiko")
    root = str(tmp_path / "state")
    run = RunState.create(RUN, state_root=root)
    run.claim(KIND_SSH_HOST, "n1", host=HOSTS[0].to_json())
    monkeypatch.setattr(ssh_connection, "clean_host", lambda host, run_id: (["rules"], ["process 7", "mount /m"]))
    report = cleaned(run, root)
    assert report.left == [f"run {RUN}: left: ssh-host n1: process 7; mount /m"] and report.notes == []
    assert runs_in(root) == [RUN]
