"""Operator actions on a plug-in's system: promotions, and changes of members, if it has them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import registry
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.faults.target import system_lacks
from harness.run_state import RunState
from harness.systems.base import Operated
from nemesis.membership import MEMBERS as MEMBERS_NEMESIS
from nemesis.operator import find_view

pytestmark = pytest.mark.cluster

PLUGIN = """
import json
from harness.sdk import Client, Status, System, connection

SERVE = '''
import json, socketserver, sys
class Serve(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(open(sys.argv[3]).read().encode() + b" " + sys.argv[4].encode() + b"\\\\n")
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
with Server((sys.argv[1], int(sys.argv[2])), Serve) as server:
    server.serve_forever()
'''

class Mine(System):
    ports = {"client": 27100}
    ready_timeout_s = 20.0
    primary = 1

    def role(self, host):
        return "primary" if host.number == self.primary else "standby"

    def files(self, host):
        return {"role": self.role(host), "serve.py": SERVE}

    def command(self, host):
        return [host.python, host.path("serve.py"), host.ip, "27100", host.path("role"), self.role(host)]

    async def status(self, host):
        async with connection(host.address("client")) as (reader, _):
            in_file, in_words = (await reader.readline()).decode().split()
        return Status(leads=in_words == "primary", end=host.number, facts={"file": in_file})
"""
PROMOTES = """
    async def promote(self, host):
        if host.number == 3:
            raise LookupError("it has no data")
        self.primary = host.number
"""
MEMBERS = """
    def __init__(self):
        self.group, self.refusals = ["n1", "n2", "n3"], 0

    async def members(self, host):
        return self.group

    async def leave(self, host):
        if host.name == "n3":
            raise LookupError("it is needed")
        self.group = [name for name in self.group if name != host.name]

    async def join(self, host):
        assert not await host.listens(), "its program runs"
        await host.wipe()
        self.refusals += 1
        if self.refusals == 1:
            raise ConnectionError("later")
        self.group = [*self.group, host.name]
"""
LEFT_UNDONE = """
    async def members(self, host):
        return ["n1", "n2", "n3"]

    async def leave(self, host):
        pass

    async def join(self, host):
        pass
"""
CLIENT = """
class Talk(Client):
    async def read(self, key):
        return None
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN + PROMOTES + CLIENT)
    return str(path)


def test_only_a_system_with_the_method_can_be_promoted(plugin: str, tmp_path: Path) -> None:
    without = tmp_path / "without.py"
    without.write_text(PLUGIN + CLIENT)
    assert system_lacks(registry.load("systems", plugin), {}, "promote") is None
    lacks = system_lacks(registry.load("systems", str(without)), {}, "promote")
    assert lacks == "system without has no method promote(host)"
    assert "no operation transfer" in str(system_lacks(registry.load("systems", plugin), {}, "transfer"))


def test_membership_changes_require_members_leave_and_join(plugin: str, tmp_path: Path) -> None:
    with_members = tmp_path / "with_members.py"
    with_members.write_text(PLUGIN + MEMBERS + CLIENT)
    assert system_lacks(registry.load("systems", str(with_members)), {}, "members") is None
    half = tmp_path / "half.py"
    half.write_text(PLUGIN + MEMBERS.replace("async def join", "async def joins") + CLIENT)
    assert system_lacks(registry.load("systems", str(half)), {}, "members") == "system half has no method join(host)"
    lacks = system_lacks(registry.load("systems", plugin), {}, "members")
    assert lacks == "system mine has no method members(host), leave(host), join(host)"


def test_a_removed_member_keeps_running_and_starts_again_when_it_joins(tmp_path: Path) -> None:
    async def scenario(system: Any) -> None:
        operator = system.operator
        with pytest.raises(RuntimeError, match="it is needed"):
            await operator.remove("f0", "n3")
        await operator.remove("f1", "n2")
        await operator.remove("f1", "n2")
        view = await operator.view("n1", timeout_s=5.0)
        assert (view.leads, view.members) == (True, {"n1", "n3"})
        before = system.process("n2").pid
        assert (await system.status("n2", timeout_s=5.0)) is not None, "the removed member was ended"
        with pytest.raises(RuntimeError, match="later"):
            await operator.let_in("f1")
        await operator.let_in("f1")
        await operator.let_in("f1")
        assert (await operator.view("n1", timeout_s=5.0)).members == {"n1", "n2", "n3"}
        async with asyncio.timeout(20):
            while (await system.status("n2", timeout_s=1.0)) is None:  # noqa: ASYNC110 - a program elsewhere
                await asyncio.sleep(0.05)
        assert system.process("n2").pid != before, "its files were written again, and its program was started with them"

    on_hosts(tmp_path, PLUGIN + MEMBERS + CLIENT, scenario)


@pytest.mark.parametrize(("methods", "is_proven"), [(MEMBERS, True), (LEFT_UNDONE, False)])
def test_a_removal_that_the_group_does_not_know_of_is_not_proven(
    tmp_path: Path, methods: str, is_proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_view, "__kwdefaults__", {"timeout_s": 1.0})

    async def scenario(system: Any) -> None:
        target: Any = SimpleNamespace(hosts=("n1", "n2", "n3"), operator=system.operator, leaders=system.leaders)
        injection = await MEMBERS_NEMESIS.plan(target, random.Random(1), fault_id="f1", variant="remove@n2")
        await MEMBERS_NEMESIS.inject(target, injection)
        proof = await MEMBERS_NEMESIS.prove(target, injection)
        assert (proof.proven, proof.exercised is True) == (is_proven, is_proven), proof

    on_hosts(tmp_path, PLUGIN + methods + CLIENT, scenario)


def on_hosts(tmp_path: Path, source: str, scenario: Any) -> None:
    """Run `scenario` with the system of a plug-in on three hosts."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    system_class = registry.load("systems", str(path))
    run = RunState.create(f"test-{tmp_path.name}", state_root=str(tmp_path / "states"))

    async def main() -> None:
        work_dir = str(tmp_path / "nodes")
        cluster = LocalCluster(node_count=3, run=run, work_dir=work_dir, ports=system_class.ports)
        system: Any = system_class(cluster=cluster, settings={}, keys=1, log_dir=work_dir, operation_timeout_s=3.0)
        await cluster.start()
        try:
            await system.start()
            await scenario(system)
        finally:
            await system.stop()
            await cluster.stop()

    try:
        asyncio.run(main())
    finally:
        run.close()


def test_after_a_promotion_files_and_programs_have_the_new_roles(tmp_path: Path) -> None:
    async def scenario(system: Any) -> None:
        assert isinstance(system, Operated)
        view = await system.operator.view("n2", timeout_s=5.0)
        assert view is not None and (view.leads, view.follows, view.end) == (False, True, 2)
        with pytest.raises(RuntimeError, match="it has no data"):
            await system.operator.promote("f0", "n3")
        await system.process("n1").kill()
        own = [Path(system._hosts[name].path("serve.py")) for name in ("n2", "n3")]
        for path in own:
            path.write_text(path.read_text() + "# the program's own")
        await system.operator.promote("f1", "n2")
        assert ["own" in path.read_text() for path in own] == [False, True], (
            "n3 keeps the file that its program changed"
        )
        await system.restart("n1")
        assert await wait_for(system, "n2") == {"leads": "true", "term": "0", "file": "primary"}
        assert await wait_for(system, "n1") == {"leads": "false", "term": "0", "file": "standby"}
        assert await system.leaders() == ["n2"]
        with pytest.raises(RuntimeError, match="no method members"):
            await system.operator.remove("f2", "n1")

    async def wait_for(system: Any, host: str) -> Any:
        async with asyncio.timeout(20):
            while True:
                if (status := await system.status(host, timeout_s=1.0)) is not None:
                    return status
                await asyncio.sleep(0.05)

    on_hosts(tmp_path, PLUGIN + PROMOTES + CLIENT, scenario)


def test_a_promote_method_that_is_not_async_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN + PROMOTES.replace("async def", "def") + CLIENT)
    with pytest.raises(OperatorError, match=r"promote must be async"):
        registry.load("systems", str(path))
