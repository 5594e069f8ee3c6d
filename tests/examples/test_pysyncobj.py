"""The example of docs/a-library-under-test.md: its server's answers, a whole run, and a read that is surely stale."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checker import Register, check
from harness.embedding import judged_run
from harness.library import cluster
from harness.sdk import path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pysyncobj"
CLIENTS, PEERS = 7000, 7001
PATIENCE_S = 100.0

inet_ntop = socket.inet_ntop
pysyncobj = pytest.importorskip("pysyncobj", reason="needs pysyncobj (pip install 'splitbrain[test]')")
socket.inet_ntop = inet_ntop  # importing PySyncObj 0.3.17 replaces it by a function that only works on Windows


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pysyncobj_example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[loaded.__name__] = loaded
    spec.loader.exec_module(loaded)
    return loaded


server = module("server")


class Raft:
    """A replica as the server sees it."""

    raftCurrentTerm, raftLastApplied = 3, 7

    def __init__(self, is_ready: bool = True) -> None:
        self.is_ready = is_ready

    def isReady(self) -> bool:
        return self.is_ready

    def _isLeader(self) -> bool:
        return True


class Replicated:
    """A group of one that never fails: commands are done at once. Or it fails for a reason."""

    def __init__(self, reason: object = None) -> None:
        self.store = server.Store()
        self.reason = reason
        self.through_log: list[str] = []

    def execute(self, f: str, *arguments: Any, sync: bool, timeout: float) -> Any:
        assert sync and timeout == server.TIMEOUT_S
        if self.reason is not None:
            raise pysyncobj.SyncObjException(self.reason)
        self.through_log.append(f)
        return getattr(self.store, f)(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def ask(store: Any, *request: Any, is_local: bool = False, is_ready: bool = True) -> Any:
    said = server.answer(Raft(is_ready), store, is_local, list(request))
    return json.loads(json.dumps(said))


def test_the_commands_do_what_the_workloads_expect() -> None:
    store = Replicated()
    said = [
        ask(store, *request)["ok"]
        for request in (
            ("read", 1), ("write", 1, 5), ("cas", 1, 4, 6), ("read", 1), ("cas", 1, 5, 6), ("read", 1),
            ("cas", 2, 5, 6), ("add", 8), ("add", 9), ("members",), ("dequeue",), ("enqueue", 3), ("enqueue", 4),
            ("dequeue",),
        )
    ]  # fmt: skip
    assert said == [None, None, False, 5, True, 6, False, None, None, [8, 9], None, None, None, 3]
    assert ask(store, "state") == {"ok": {"registers": [[1, 6]], "elements": [8, 9], "waiting": [4]}}
    assert ask(store, "status") == {"ok": {"leads": True, "term": 3, "applied": 7}}


@pytest.mark.parametrize("request_", [("write", 1), ("read",), ("execute", "read", 1), ("nonsense",), (7,)])
def test_what_is_no_request_is_refused_and_never_replicated(request_: tuple[Any, ...]) -> None:
    """A command that raised would be tried for ever, by every replica."""
    store = Replicated()
    assert "refused" in ask(store, *request_) and store.through_log == []


def test_only_reads_are_local_and_only_once_the_replica_has_caught_up() -> None:
    store = Replicated()
    assert ask(store, "write", 1, 5, is_local=True) == {"ok": None}
    assert ask(store, "read", 1, is_local=True) == {"ok": 5}
    assert ask(store, "members", is_local=True) == {"ok": []}
    assert ask(store, "dequeue", is_local=True) == {"ok": None}
    assert store.through_log == ["write", "dequeue"]
    assert "refused" in ask(store, "read", 1, is_local=True, is_ready=False)
    assert "refused" in ask(store, "write", 1, 6, is_ready=False)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("QUEUE_FULL", "refused"), ("MISSING_LEADER", "refused"), ("NOT_LEADER", "refused"), ("DISCARDED", "refused"),
        ("LEADER_CHANGED", "unknown"), ("UNKNOWN_OUTCOME", "unknown"), ("REQUEST_DENIED", "unknown"),
    ],
)  # fmt: skip
def test_a_failure_is_refused_only_if_the_command_can_never_be_applied(reason: str, outcome: str) -> None:
    number = getattr(pysyncobj.FAIL_REASON, reason)
    assert ask(Replicated(number), "write", 1, 5) == {outcome: reason}


def test_a_command_that_takes_too_long_has_an_unknown_outcome() -> None:
    assert ask(Replicated("Timeout"), "write", 1, 5) == {"unknown": "Timeout"}


@pytest.mark.serial
@pytest.mark.cluster
def test_reads_through_the_log_are_linearizable_under_a_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the installed library in place of one that is fetched."""
    plugin = module("pysyncobj_store")
    monkeypatch.setattr(plugin.PySyncObjStore, "install", path(str(EXAMPLE / "server.py")))
    run = judged_run(
        plugin.PySyncObjStore, cluster="local", workload="cas-register", nemesis="partition=leader", nemesis_interval=3,
        time_limit=9, rate=50, concurrency=6, seed=3, store=str(tmp_path),
    )  # fmt: skip
    assert run.results["valid"] is True, run.results["reason"]
    assert run.results["ops"]["ok"] > 0 and all(fault["proven"] for fault in run.results["faults"])


async def asked(address: str, *request: Any) -> dict[str, Any]:
    ip, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(ip, int(port))
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        said: dict[str, Any] = json.loads(await reader.readline())
        return said
    finally:
        writer.close()


async def asked_until(is_enough: Callable[[dict[str, Any]], bool], address: str, *request: Any) -> dict[str, Any]:
    """Ask again until the answer is enough: replicas elect, and proxies take connections before servers do."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        said: dict[str, Any] = {}
        try:
            said = await asked(address, *request)
        except (OSError, ValueError):
            pass
        if is_enough(said):
            return said
        assert time.monotonic() < deadline_s, (request, said)
        await asyncio.sleep(0.1)


@pytest.mark.serial
@pytest.mark.cluster
def test_a_local_read_behind_a_partition_is_stale_and_found(tmp_path: Path) -> None:
    """The leader is cut off, another one takes a write, and the first one is read: nothing that is timed."""

    async def steps() -> list[dict[str, Any]]:
        async with cluster("local", hosts=3, ports=[CLIENTS, PEERS], directory=str(tmp_path)) as hosts:
            for name, host in hosts.items():
                words = [sys.executable, str(EXAMPLE / "server.py"), name, "--local-reads"]
                words += ["--clients", f"{host.ip}:{CLIENTS}", "--peers", f"{host.ip}:{PEERS}"]
                for other, peer in hosts.items():
                    words += ["--other", other, peer.address(PEERS, source=name)] if other != name else []
                await host.start(words)
            return await hosts.perform(history(hosts))

    async def history(hosts: Any) -> list[dict[str, Any]]:
        at = {name: host.address(CLIENTS) for name, host in hosts.items()}
        events: list[dict[str, Any]] = []

        async def record(process: int, address: str, f: str, value: Any = None) -> None:
            events.append({"process": process, "type": "invoke", "f": f, "key": 1, "value": value})
            words = (f, 1) if f == "read" else (f, 1, value)
            said = await asked_until(lambda answer: "ok" in answer, address, *words)
            events.append(
                {"process": process, "type": "ok", "f": f, "key": 1, "value": said["ok"] if f == "read" else value}
            )

        await record(0, at["n1"], "write", 1)
        leader = await leader_among(at)
        others = sorted(at.keys() - {leader})
        async with hosts.cut(f"{leader} | {' '.join(others)}"):
            await leader_among({name: at[name] for name in others})
            await record(0, at[others[0]], "write", 2)
            await record(1, at[leader], "read")
        return events

    async def leader_among(at: dict[str, str]) -> str:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            for name, address in at.items():
                if (await asked_until(lambda answer: "ok" in answer, address, "status"))["ok"]["leads"]:
                    return name
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)

    events = asyncio.run(steps())
    assert events[-1]["value"] == 1
    result = check(events, Register())
    assert result.valid is False and "stale" in result.reason
