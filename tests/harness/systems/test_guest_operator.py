"""What an operator can ask of a plug-in's system: promotions, where it has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.faults.target import system_lacks
from harness.run_state import RunState
from harness.systems.base import Operated

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
    assert "no transfer" in str(system_lacks(registry.load("systems", plugin), {}, "transfer"))


def test_a_promotion_writes_files_and_starts_programs_as_they_are_then(plugin: str, tmp_path: Path) -> None:
    system_class = registry.load("systems", plugin)
    run = RunState.create(f"test-{tmp_path.name}", state_root=str(tmp_path / "states"))

    async def main() -> None:
        work_dir = str(tmp_path / "nodes")
        cluster = LocalCluster(node_count=3, run=run, work_dir=work_dir, ports=system_class.ports)
        system: Any = system_class(cluster=cluster, settings={}, keys=1, log_dir=work_dir, operation_timeout_s=3.0)
        assert isinstance(system, Operated)
        await cluster.start()
        try:
            await system.start()
            view = await system.operator.view("n2", timeout_s=5.0)
            assert (view.leads, view.follows, view.end) == (False, True, 2)
            with pytest.raises(RuntimeError, match="it has no data"):
                await system.operator.promote("f0", "n3")
            await system.process("n1").kill()
            await system.operator.promote("f1", "n2")
            await system.restart("n1")
            assert await wait_for(system, "n2") == {"leads": "true", "term": "0", "file": "primary"}
            assert await wait_for(system, "n1") == {"leads": "false", "term": "0", "file": "standby"}
            assert await system.leaders() == ["n2"]
            with pytest.raises(RuntimeError, match="no members that an operator could ask for"):
                await system.operator.remove("f2", "n1")
        finally:
            await system.stop()
            await cluster.stop()

    async def wait_for(system: Any, host: str) -> Any:
        async with asyncio.timeout(20):
            while True:
                if (status := await system.status(host, timeout_s=1.0)) is not None:
                    return status
                await asyncio.sleep(0.05)

    try:
        asyncio.run(main())
    finally:
        run.close()


def test_a_promote_that_is_not_async_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN + PROMOTES.replace("async def", "def") + CLIENT)
    with pytest.raises(OperatorError, match=r"promote must be async"):
        registry.load("systems", str(path))
