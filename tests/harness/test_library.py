"""Hosts and faults from a script: in the caller's event loop, and without moving its thread to another network."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from harness.clusters.netns_trial import why_no_namespaces
from harness.embedding import judged_run
from harness.errors import OperatorError
from harness.library import cluster
from harness.sdk import Client, CommandFailed, Host, System

PORT = 7000
WHY_NOT = why_no_namespaces(in_user_namespace=False) if os.geteuid() == 0 else "needs root"
needs_netns = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ECHO = """
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer((sys.argv[1], int(sys.argv[2])), Echo).serve_forever()
"""


def echoed(address: str, text: str) -> str:
    """The answer of an echo server, once it serves."""
    ip, port = address.split(":")
    for _ in range(600):
        try:
            with socket.create_connection((ip, int(port)), timeout=20) as connection:
                connection.sendall(f"{text}\n".encode())
                if line := connection.makefile().readline():
                    return line.strip()
        except ConnectionError:
            pass  # a proxy takes connections before the server behind it does
        threading.Event().wait(0.05)
    raise TimeoutError(address)


async def echoed_async(address: str, text: str) -> str:
    ip, port = address.split(":")
    reader, writer = await asyncio.open_connection(ip, int(port))
    writer.write(f"{text}\n".encode())
    line = await reader.readline()
    writer.close()
    return line.decode().strip()


def own_network() -> str:
    return os.readlink("/proc/thread-self/ns/net")


async def use(name: str, directory: Path) -> None:
    """All operations of hosts, in one cluster, because hosts take a second to create."""
    async with cluster(name, hosts=3, ports=[PORT], directory=str(directory)) as hosts:
        assert list(hosts) == ["n1", "n2", "n3"]
        n1, n2 = hosts["n1"], hosts["n2"]
        await n2.put("echo.py", ECHO)
        server = await n2.start(["python3", f"{n2.data}/echo.py", n2.ip, str(PORT)])
        assert await hosts.call(echoed, n2.address(PORT), "from a thread") == "from a thread"
        assert await hosts.perform(echoed_async(n2.address(PORT), "from a loop")) == "from a loop"

        ask = f"import socket; c = socket.create_connection(({{!r}}, {PORT}), timeout=2); c.sendall(b'x\\n'); c.recv(2)"
        ip = n2.address(PORT, source="n1").split(":")[0]
        assert (await n1.run("python3", "-c", ask.format(ip))).status == 0
        async with hosts.cut("n1 | n2 n3") as proof:
            assert proof.proven and proof.checked == 6
            with pytest.raises(CommandFailed, match=r"n1: python3 .* ended with status 1: "):
                await n1.run("python3", "-c", ask.format(ip))
            assert await hosts.perform(echoed_async(n2.address(PORT), "clients are not cut off")) != ""
        assert (await n1.run("python3", "-c", ask.format(ip))).status == 0

        await server.pause()
        assert await server.state() == "paused"
        await server.resume()
        assert await server.state() == "running" and server.exit_status() is None
        await server.kill()
        assert await server.state() == "down" and server.exit_status() == -9
        assert (await n1.run("false", check=False)).status == 1
        for text, said in (("n1 | n9", "n9"), ("n1", "cut"), ("n1 > n2 > n3", "cut")):
            with pytest.raises(OperatorError, match=said):
                async with hosts.cut(text):
                    pass


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["local", pytest.param("netns", marks=[pytest.mark.netns, needs_netns])])
def test_hosts_work_inside_a_running_event_loop(tmp_path: Path, name: str) -> None:
    before = own_network(), threading.active_count()
    seen: list[str] = []

    async def main() -> None:
        caller = asyncio.ensure_future(use(name, tmp_path))
        while not caller.done():  # the caller's own loop goes on meanwhile, in its own network
            seen.append(own_network())
            await asyncio.wait([caller], timeout=0.05)
        await caller

    asyncio.run(main())
    assert set(seen) == {before[0]} and len(seen) > 5
    assert own_network() == before[0]
    deadline_s = time.monotonic() + 60
    while threading.active_count() > before[1] and time.monotonic() < deadline_s:
        time.sleep(0.01)  # threads of a released pool end on their own
    assert threading.active_count() == before[1]


@pytest.mark.cluster
def test_an_exception_of_the_body_propagates_and_nothing_is_left_running(tmp_path: Path) -> None:
    pids: list[int] = []

    async def main() -> None:
        async with cluster("local", hosts=2, directory=str(tmp_path)) as hosts:
            program = await hosts["n1"].start(["sleep", "600"])
            assert program.pid is not None
            pids.append(program.pid)
            async with hosts.cut("n1|n2"):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(main())
    assert not Path(f"/proc/{pids[0]}").exists()


@pytest.mark.cluster
def test_a_session_can_be_started_and_stopped_without_async_with(tmp_path: Path) -> None:
    async def main() -> None:
        session = cluster("local", hosts=2, directory=str(tmp_path))
        hosts = await session.start()
        with pytest.raises(OperatorError, match="is already started"):
            await session.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hosts["n1"].run("sleep", "60")
        await session.stop()
        await session.stop()
        with pytest.raises(OperatorError, match="is not up"):
            await hosts["n1"].run("true")

    asyncio.run(main())


def test_an_unavailable_cluster_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, said in (("nets", "unknown cluster 'nets'"), ("sim", "cluster sim lasts only as long as its run")):
        with pytest.raises(OperatorError, match=said):
            cluster(name)
    assert not list(tmp_path.iterdir())


PLUGIN = """
import asyncio, json, socket
from harness.sdk import Client
from harness.systems.toy import Toy

class Threaded(Client):
    \"\"\"Blocking calls in threads, as drivers without asyncio are used.\"\"\"
    async def read(self, key):
        return (await asyncio.to_thread(self.exchange, {})).get(str(key))

    async def write(self, key, value):
        await asyncio.to_thread(self.exchange, {str(key): value})

    def exchange(self, change):
        ip, port = self.address("client", self.hosts[0]).split(":")
        with socket.create_connection((ip, int(port)), timeout=5) as connection:
            connection.sendall(json.dumps(change).encode() + b"\\n")
            return json.loads(connection.makefile().readline())
"""


@pytest.mark.cluster
@pytest.mark.netns
@needs_netns
def test_clients_may_use_threads_on_netns(tmp_path: Path) -> None:
    """A thread that was made before the clients' namespace was entered would not reach the hosts."""
    path = tmp_path / "threaded.py"
    path.write_text(PLUGIN.replace("class Threaded", "class System(Toy):\n    pass\n\nclass Threaded"))
    run = judged_run(f"{path}:System", cluster="netns", nodes=2, time_limit=2, rate=50, store=str(tmp_path / "store"))
    assert run.results["valid"] is True, run.results["reason"]
    assert run.results["ops"]["ok"] > 20 and run.results["ops"]["fail"] == 0


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["local", pytest.param("netns", marks=needs_netns)])
def test_the_script_in_the_docs_works(tmp_path: Path, name: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    assert 'cluster("auto", ' in script
    (tmp_path / "script.py").write_text(script.replace('cluster("auto", ', f'cluster("{name}", '))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["4 links cut, 2 others pass", "1", "here", "", ""], done.stderr


def test_attributes_set_on_an_object_are_refused() -> None:
    """A run creates its own systems and clients: attributes of the given objects would be ignored."""

    class KV(System):
        def command(self, host: Host) -> list[str]:
            return ["true"]

    class Talk(Client):
        pass

    system, client = KV(), Talk()
    system.bug = True  # type: ignore[attr-defined]
    with pytest.raises(
        OperatorError, match=r"KV is created anew for each run, without this object's attributes \(bug\)"
    ):
        judged_run(system, client)
    client.node = "n1"
    with pytest.raises(
        OperatorError, match=r"Talk is created anew for each run, without this object's attributes \(node\)"
    ):
        judged_run(KV, client)
