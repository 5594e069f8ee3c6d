"""A plug-in's system on real hosts: started, hit by faults, polled and blamed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness import registry
from harness.clusters.agent_cluster import AgentCluster
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.faults.target import RunTarget
from harness.process_table import ProcessId
from harness.run_state import RunState
from harness.sdk.host import listening_ports
from harness.sdk.plugin import PluginError
from harness.systems import guest
from harness.systems.base import CLIENTS_DECIDE
from harness.unawaited import telling_unawaited
from nemesis.process import KILL, PAUSE
from nemesis.protocol import Nemesis
from nemesis.target import DOWN, PAUSED, RUNNING

pytestmark = pytest.mark.cluster

PLUGIN = """
from harness.sdk import Client, Refused, Status, System

SERVE = '''
import socket, sys, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((sys.argv[1], int(sys.argv[2])))
server.listen()
print("serving", open(sys.argv[3]).read(), flush=True)
time.sleep(600)
'''

class Mine(System):
    ports = {"client": 27000, "other": 27001}
    settings = {"greeting": ("hello", "goodbye")}
    logs = ("*.own",)
    ready_timeout_s = 20.0

    def files(self, host):
        return {"greeting": f"{self.settings['greeting']} from {host.name}", "some.own": "kept"}

    def programs(self, host):
        def serve(port):
            return [host.python, "-c", SERVE, host.ip, str(self.ports[port]), host.path("greeting")]
        return {"kv": serve("client"), "guard": serve("other")}
"""
CLIENT = """
class Talk(Client):
    async def open(self):
        self.streams = await self.connect(self.address("client"))
    async def read(self, key):
        return self.settings["greeting"]
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a plug-in's file, PLUGIN with more methods of its system and a client; returns its path."""

    def make(more: str = "", client: str = CLIENT) -> str:
        path = tmp_path / "mine.py"
        path.write_text(PLUGIN + textwrap.indent(textwrap.dedent(more), "    ") + client)
        return str(path)

    return make


@pytest.fixture
def run_state(tmp_path: Path) -> Any:
    run = RunState.create(f"test-{os.getpid()}-{tmp_path.name}", state_root=str(tmp_path / "states"))
    yield run
    run.close()


@contextlib.asynccontextmanager
async def system_of(
    name: str, run: RunState, tmp_path: Path, count: int = 2, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Any]:
    """A system of a plug-in, started on a local cluster."""
    system_class = registry.load("systems", name)
    work_dir = str(tmp_path / "nodes")
    cluster = LocalCluster(node_count=count, run=run, work_dir=work_dir, ports=system_class.ports)
    system = system_class(cluster=cluster, settings=settings or {}, keys=1, log_dir=work_dir, operation_timeout_s=3.0)
    await cluster.start()
    try:
        with telling_unawaited(system.code_files):
            await system.start()
        yield system
    finally:
        await system.stop()
        await cluster.stop()


def start_error(name: str, run: RunState, tmp_path: Path) -> str:
    """The error of starting a system, which must be one line and blame the plug-in."""

    async def main() -> None:
        async with system_of(name, run, tmp_path, 1):
            raise AssertionError("the system started")

    with pytest.raises(PluginError) as caught:
        asyncio.run(main())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_programs_of_a_host_are_started_paused_killed_and_restarted(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    async def main() -> None:
        async with system_of(write(), run_state, tmp_path) as system:
            process = system.process("n1")
            assert await process.state() == RUNNING and await system.status("n1", timeout_s=5.0) == {}
            await process.pause()
            assert await process.state() == PAUSED and await system.status("n1", timeout_s=5.0) is None
            assert (await system.recover(timeout_s=0.0)).reason.endswith("the programs of n1 are stopped")
            await process.resume()
            await process.kill()
            assert await process.state() == DOWN and process.ended == ["kv", "guard"]
            outcome = await system.recover(timeout_s=0.0)
            assert outcome.valid is False and outcome.details == {"missing": ["n1"]}
            await system.restart("n1")
            await system.restart("n1")  # running programs are left alone
            outcome = await system.recover(timeout_s=20.0)
            assert outcome.valid is True, outcome
            assert system.last_words("n1")[-1] == "serving hello from n1"
            client = system.connection("client", process=5, thread=1)
            await client.open()
            assert (client.host.name, await client.read(1), client.process) == ("n2", "hello", 5)
            await client.close()
        assert await system.check(started_wall_ms=0) == {}

    asyncio.run(main())
    assert (tmp_path / "nodes" / "n1" / "some.own").read_text() == "kept"


STRAY_SERVER = """
    def programs(self, host):
        def serve(port):
            return [host.python, "-c", SERVE, host.ip, str(self.ports[port]), host.path("greeting")]
        return {"kv": ["sh", "-c", '(env -i setsid "$@" &); exec sleep 600', "sh", *serve("client")],
                "guard": serve("other")}
"""
"""A server that its wrapper starts as a daemon with an empty environment; the wrapper keeps running."""


def test_a_stray_server_still_answers_after_its_program_was_killed(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    async def main() -> None:
        async with system_of(write(STRAY_SERVER), run_state, tmp_path, 1) as system:
            await system.process("n1").kill()
            assert await system.process("n1").state() == DOWN
            assert await system.status("n1", timeout_s=5.0) == {}

    asyncio.run(main())


@pytest.mark.parametrize("still_serves", [True, False])
def test_an_exited_wrapper_is_a_failure_unless_its_daemon_still_serves(
    write: Write, run_state: RunState, tmp_path: Path, still_serves: bool
) -> None:
    end = tmp_path / "end"
    plugin = STRAY_SERVER.replace("exec sleep 600", f"until test -e {end}; do sleep 0.05; done")

    async def main() -> None:
        async with system_of(write(plugin), run_state, tmp_path, 1) as system:
            [stray] = await system._cluster.strays("n1")
            if not still_serves:
                os.kill(stray.pid, signal.SIGKILL)
            end.touch()
            while system.process("n1").first_problem() is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            outcome = await system.recover(timeout_s=0.0)
            assert outcome.valid == ("unknown" if still_serves else False) and outcome.details == {"missing": ["n1"]}
            assert ("but a daemon of it serves on the host" in outcome.reason) == still_serves, outcome
            assert ("(if it daemonises" in outcome.reason) != still_serves, outcome

    asyncio.run(main())


def state_of(pid: int) -> str:
    """The letter of a process's state; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


PROCESS_FAULTS = pytest.mark.parametrize(
    ("nemesis", "variant"), [(KILL, "sigkill@n1"), (KILL, "terminate@n1"), (PAUSE, "sigstop@n1")]
)


@PROCESS_FAULTS
def test_process_faults_hit_a_stray_daemon(
    write: Write, run_state: RunState, tmp_path: Path, nemesis: Nemesis, variant: str
) -> None:
    async def main() -> None:
        async with system_of(write(STRAY_SERVER), run_state, tmp_path, 2) as system:
            target = RunTarget(system._cluster, system)
            [stray] = await system._cluster.strays("n1")
            [other] = await system._cluster.strays("n2")
            for fault_id in ("f1", "f2"):
                planned = await nemesis.plan(target, random.Random(1), fault_id=fault_id, variant=variant)
                await nemesis.inject(target, planned)
                for proof in (await nemesis.prove(target, planned), await nemesis.prove_met(target, planned)):
                    assert proof.proven, proof
                assert state_of(stray.pid) == ("T" if nemesis is PAUSE else "")
                await nemesis.heal(target, planned)
                assert (await system.recover(timeout_s=20.0)).valid is True
                [now] = await system._cluster.strays("n1")
                assert (now.pid == stray.pid) == (nemesis is PAUSE)
                stray = now
            assert [each.pid for each in await system._cluster.strays("n2")] == [other.pid]

    asyncio.run(main())
    assert not run_state.claims


@PROCESS_FAULTS
def test_a_process_fault_is_not_proven_while_a_stray_daemon_still_runs(
    write: Write, run_state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nemesis: Nemesis, variant: str
) -> None:
    async def adopt_none(self: AgentCluster, host: str) -> None:
        assert await self.strays(host)

    monkeypatch.setattr(AgentCluster, "adopt_strays", adopt_none)

    async def main() -> None:
        async with system_of(write(STRAY_SERVER), run_state, tmp_path, 2) as system:
            target = RunTarget(system._cluster, system)
            planned = await nemesis.plan(target, random.Random(1), fault_id="f1", variant=variant)
            await nemesis.inject(target, planned)
            for proof in (await nemesis.prove(target, planned), await nemesis.prove_met(target, planned)):
                assert not proof.proven and re.match(r"process \d+ \(\w.*\) of n1 still runs", proof.detail), proof
            [stray] = await system._cluster.strays("n1")
            os.kill(stray.pid, signal.SIGSTOP if nemesis is PAUSE else signal.SIGKILL)
            while ProcessId(*stray[:2]).exists and state_of(stray.pid) != "T":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            for proof in (await nemesis.prove(target, planned), await nemesis.prove_met(target, planned)):
                assert proof.proven, proof

    asyncio.run(main())
    assert not run_state.claims


def test_a_setting_reaches_system_and_clients(write: Write, run_state: RunState, tmp_path: Path) -> None:
    async def main() -> None:
        async with system_of(write(), run_state, tmp_path, 1, {"greeting": "goodbye"}) as system:
            assert system.last_words("n1")[-1] == "serving goodbye from n1"
            assert system.connection("client", process=0, thread=0).settings == {"greeting": "goodbye"}
            assert system.facts()["settings"] == {"greeting": "goodbye"}

    asyncio.run(main())


def test_a_plug_in_can_set_hosts_up_wait_for_a_line_and_compare_states(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    more = """
        ready_line = "serving set up"
        async def setup(self, host):
            said = await host.run("echo", "set up")
            assert (await host.run("false", check=False)).status == 1
            await host.put("greeting", said.out.strip())
        async def state(self, host):
            return (await host.run("cat", host.path("greeting"))).out + ("" if host.number == 1 else self.more)
        more = ""
    """

    async def main(more_text: str) -> Mapping[str, Any]:
        async with system_of(write(more), run_state, tmp_path) as system:
            system._system.more = more_text
            assert (await system.recover(timeout_s=0.3)).valid is True
        found: Mapping[str, Any] = await system.check(started_wall_ms=0)
        return found

    assert asyncio.run(main(""))["replicas"].valid is True
    outcome = asyncio.run(main("!"))["replicas"]
    assert outcome.valid is False
    assert outcome.reason == 'replicas differ: n1 holds "set up" and n2 holds "set up!"'
    reason = asyncio.run(main("!" * 1000))["replicas"].reason
    assert reason == f'replicas differ: n1 holds "set up" and n2 holds "set up{"!" * 293}...'


def test_the_ready_line_must_be_printed_again_after_a_restart(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    """Logs are appended to: a line from before the kill does not show that the program serves again."""
    more = """
        ready_line = "serving at last"
        def programs(self, host):
            once = "test -e served || { touch served; echo serving at last; }"
            return {"kv": ["sh", "-c", f"cd {host.data}; {once}; exec sleep 60"]}
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path, 1) as system:
            assert (await system.recover(timeout_s=0.0)).valid is True
            await system.process("n1").kill()
            await system.restart("n1")
            outcome = await system.recover(timeout_s=0.5)
            assert outcome.valid is False and "n1 runs but is not ready" in outcome.reason
            (Path(system._hosts["n1"].data) / "served").unlink()
            await system.process("n1").kill()
            await system.restart("n1")
            assert (await system.recover(timeout_s=20.0)).valid is True

    asyncio.run(main())


def test_an_address_in_use_is_reported_with_a_hint_where_to_listen(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    more = """
        def programs(self, host):
            return {"kv": ["sh", "-c", "echo 'listen tcp :7000: bind: address already in use'; exit 1"]}
    """
    said = start_error(write(more), run_state, tmp_path)
    assert said.endswith("bind: address already in use" + guest.ADDRESS_HINT), said


def test_listening_on_localhost_only_is_reported_with_a_hint_where_to_listen(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        more = f"""
            ports = {{"client": {port}}}
            ready_timeout_s = 0.2
            def programs(self, host):
                return {{"kv": ["sleep", "600"]}}
        """
        said = start_error(write(more), run_state, tmp_path)
    assert said.endswith(f"nothing listens on client ({port}){guest.LOOPBACK_HINT}"), said


def test_a_program_starts_in_its_data_directory(write: Write, run_state: RunState, tmp_path: Path) -> None:
    """Disk faults hit what it writes by a relative path, and no other replica shares that."""
    said = start_error(
        write("def programs(self, host):\n    return {'kv': ['sh', '-c', 'pwd; exit 3']}"), run_state, tmp_path
    )
    assert said.endswith(f": {tmp_path / 'nodes' / 'n1' / 'data'}"), said


@pytest.mark.parametrize("file", ["kv ü.py", "-kv.py", "k" * 120 + ".py"])
def test_the_program_of_a_file_of_any_name_is_started(
    write: Write, run_state: RunState, tmp_path: Path, file: str
) -> None:
    only = "del programs\ndef command(self, host):\n    return ['sh', '-c', 'echo it ran; exit 3']"
    path = Path(write(only)).rename(tmp_path / file)
    assert start_error(str(path), run_state, tmp_path).endswith(": it ran")


@pytest.mark.parametrize(("lines", "has_more"), [("echo no disk", False), ("echo why; echo no disk", True)])
@pytest.mark.parametrize("end", ["exit 3", "sleep 600"])
def test_the_log_is_named_if_a_program_has_printed_more_than_is_quoted(
    write: Write, run_state: RunState, tmp_path: Path, lines: str, has_more: bool, end: str
) -> None:
    """The last line that javac, Node.js or Go print does not help."""
    more = f"ready_timeout_s = 1.0\ndef programs(self, host):\n    return {{'kv': ['sh', '-c', '{lines}; {end}']}}"
    said = start_error(write(more), run_state, tmp_path)
    assert said.endswith(": no disk" + f" (full log: {tmp_path / 'nodes' / 'n1'})" * has_more), said


@pytest.mark.parametrize("kind", ["SystemExit", "asyncio.CancelledError", "BaseException"])
@pytest.mark.parametrize("method", ["setup", "ready", "status", "start_together"])
def test_a_method_that_exits_is_blamed_and_does_not_end_the_harness(
    write: Write, run_state: RunState, tmp_path: Path, method: str, kind: str
) -> None:
    """CancelledError arises when a plug-in awaits a task of its own that it has cancelled."""
    words = "self" if method == "start_together" else "self, host"
    more = f"""
        async def {method}({words}):
            import asyncio
            raise {kind}(0)
        ready_timeout_s = 1.0
    """
    said = start_error(write(more), run_state, tmp_path)
    assert said.startswith("mine.py:") and (f"{kind.split('.')[-1]}: 0" in said or method == "ready"), said


def test_leaders_are_those_that_status_reports_newest_term_first(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    more = """
        silent = ()
        async def status(self, host):
            if host.name in self.silent:
                raise OSError("no answer")
            return Status(leads=True, term=host.number)
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path) as system:
            assert await system.leaders() == ["n2", "n1"]
            assert await system.status("n1", timeout_s=1.0) == {"leads": "true", "term": "1"}
            system._system.silent = ("n1", "n2")
            assert await system.leaders() == [] and await system.status("n1", timeout_s=1.0) is None
            outcome = await system.recover(timeout_s=0.0)
            assert outcome.valid is False and outcome.reason.endswith("n2 runs but does not answer; there is no leader")

    asyncio.run(main())


def test_a_program_that_ends_while_starting_is_reported_although_another_serves(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    more = """
        def programs(self, host):
            serve = [host.python, "-c", SERVE, host.ip, "27000", host.path("greeting")]
            guard = f"cd {host.data}; echo $$ > guard; mv guard pid; echo no room; exec sleep 0.5"
            return {"kv": serve, "guard": ["sh", "-c", guard]}
        async def ready(self, host):
            gone = "while ! test -e pid || kill -0 $(cat pid) 2>/dev/null; do sleep 0.02; done"
            await host.run("sh", "-c", f"cd {host.data} && {gone}")
            return True
    """
    said = start_error(write(more), run_state, tmp_path)
    assert re.search(r"program guard of n1 ended with status 0 while starting: ", said), said


def test_an_error_in_the_status_of_a_follower_is_reported_at_the_start(
    write: Write, run_state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "MISTAKEN_S", 0.3)
    more = """
        async def status(self, host):
            return Status(leads=True) if host.name == "n1" else Status(term=None + 1)
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path):
            raise AssertionError("the system started")

    with pytest.raises(PluginError, match=r"^mine.py:\d+: status\(n2\) raised TypeError: unsupported operand"):
        asyncio.run(main())


def test_an_error_in_status_after_the_faults_is_unknown_and_no_failure(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    more = """
        is_late = False
        async def status(self, host):
            return Status(leads=True, term=None + 1 if self.is_late else 1)
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path, 1) as system:
            system._system.is_late = True
            outcome = await system.recover(timeout_s=0.0)
            assert outcome.valid == "unknown"
            assert re.search(r"mine.py:\d+: status\(n1\) raised TypeError", outcome.reason), outcome

    asyncio.run(main())


@pytest.mark.parametrize("hanging", [("n1",), ("n1", "n2")])
def test_a_hanging_status_is_unknown_and_reported_with_its_line(
    write: Write, run_state: RunState, tmp_path: Path, hanging: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for something else, such as a connection that it kept: clients decide the verdict."""
    monkeypatch.setattr(guest, "STATUS_TIMEOUT_S", 0.2)
    more = """
        hanging = ()
        async def status(self, host):
            if host.name in self.hanging:
                await asyncio.Event().wait()
            return Status(leads=host.name == "n1")
    """
    name = write_with_asyncio(write, more)

    async def main() -> None:
        async with system_of(name, run_state, tmp_path) as system:
            system._system.hanging = hanging
            outcome = await system.recover(timeout_s=0.0)
            assert outcome.valid == "unknown" and outcome.details[CLIENTS_DECIDE], outcome
            wanted = r"n1 runs but does not answer: mine.py:\d+: status\(n1\) took more than 0.2 s; "
            assert re.search(wanted, outcome.reason), outcome
            where = int(re.findall(r"mine.py:(\d+)", outcome.reason)[0])
            assert "Event().wait()" in Path(name).read_text().splitlines()[where - 1]
            await system._end("n2")
            outcome = await system.recover(timeout_s=0.0)
            assert outcome.valid is False and CLIENTS_DECIDE not in outcome.details, "a program has ended"

    asyncio.run(main())


def test_hanging_ready_and_state_methods_are_reported_with_their_lines(
    write: Write, run_state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of the program is quoted, so `ready` hangs only once that was printed."""
    monkeypatch.setattr(guest, "QUESTION_TIMEOUT_S", 0.2)
    unready = """
        ready_timeout_s = 0.1
        def programs(self, host):
            return {"kv": ["sh", "-c", "echo serving; touch $0; exec sleep 600", host.path("printed")]}
        async def ready(self, host):
            while not os.path.exists(host.path("printed")):
                time.sleep(0.01)
            await asyncio.Event().wait()
    """
    name = write_with_asyncio(write, unready)
    Path(name).write_text("import os, time\n" + Path(name).read_text())
    said = start_error(name, run_state, tmp_path)
    assert re.search(r"on n1 mine.py:\d+: ready\(n1\) took more than 0.2 s: serving$", said), said

    stateless = """
        async def state(self, host):
            await asyncio.Event().wait()
    """

    async def main() -> None:
        name = write_with_asyncio(write, stateless)
        async with system_of(name, run_state, tmp_path) as system:
            await system.recover(timeout_s=0.0)
            outcome = (await system.check(started_wall_ms=0))["replicas"]
            assert outcome.valid == "unknown", outcome
            assert re.search(r"^mine.py:\d+: state\(n1\) took more than 0.2 s$", outcome.reason), outcome

    asyncio.run(main())


def write_with_asyncio(write: Write, more: str) -> str:
    name = write(more)
    Path(name).write_text("import asyncio\n" + Path(name).read_text())
    return name


def test_recovery_tells_when_the_replicas_agreed(write: Write, run_state: RunState, tmp_path: Path) -> None:
    more = """
        asked = 0
        async def state(self, host):
            self.asked += 1
            return host.name if self.asked <= 8 else "equal"
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path) as system:
            outcome = await system.recover(timeout_s=60.0)
        told = re.fullmatch(r"2 hosts served after (\S+) s, and the states were equal after (\S+) s", outcome.reason)
        assert outcome.valid is True and told, outcome
        assert float(told[2]) >= float(told[1]) + 3 * guest.POLL_S, outcome

    asyncio.run(main())


def test_replicas_that_never_agree_are_waited_for_once(write: Write, run_state: RunState, tmp_path: Path) -> None:
    more = """
        asked = 0
        async def state(self, host):
            self.asked += 1
            return host.name
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path) as system:
            outcome = await system.recover(timeout_s=0.5)
            assert outcome.valid is True and "the states could not be seen to be equal within 0." in outcome.reason
            assert system._is_apart and system._system.asked > 2
            outcome = (await system.check(started_wall_ms=0))["replicas"]
            assert (outcome.valid, outcome.reason) == (False, 'replicas differ: n1 holds "n1" and n2 holds "n2"')

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return {1, 2}", r"^mine.py:\d+: state\(n1\) returned {1, 2}, which JSON cannot represent"),
        ("return None + 1", r"^mine.py:\d+: state\(n1\) raised TypeError"),
    ],
)
def test_a_state_that_cannot_be_compared_is_unknown_and_blamed_on_the_plug_in(
    write: Write, run_state: RunState, tmp_path: Path, body: str, expected: str
) -> None:
    async def main() -> None:
        async with system_of(write(f"async def state(self, host):\n    {body}\n"), run_state, tmp_path) as system:
            assert (await system.recover(timeout_s=600.0)).valid is True  # at once: the answer cannot change
            outcome = (await system.check(started_wall_ms=0))["replicas"]
            assert outcome.valid == "unknown" and re.search(expected, outcome.reason), outcome

    asyncio.run(main())


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("def programs(self, host):\n    return [1]", r"^mine.py:\d+: programs\(n1\) returned \[1\], not a mapping"),
        ("def programs(self, host):\n    return {'kv': 'sleep 9'}", r"programs\(n1\) returned 'sleep 9', not a list"),
        ("def programs(self, host):\n    return {'kv': ['sleep', 9]}", r"\(n1\) has 9 among its words, not a string$"),
        ("def programs(self, host):\n    return {'kv': []}", r"programs\(n1\) returned no words$"),
        ("def programs(self, host):\n    return {}", r"^mine.py:\d+: programs\(n1\) returned no program: every rep"),
        (
            "def programs(self, host):\n    return {3: ['sleep', '9']}",
            r"programs\(n1\) has an invalid program name 3: use",
        ),
        (
            "def programs(self, host):\n    return {'../kv': ['sleep', '9']}",
            r"\(n1\) has an invalid program name '../kv'",
        ),
        ("def programs(self, host):\n    return {'': ['sleep', '9']}", r"\(n1\) has an invalid program name ''"),
        ("def programs(self, host):\n    return 1 / 0", r"^mine.py:\d+: programs\(n1\) raised ZeroDivisionError: div"),
        (
            "def programs(self, host):\n    return {'kv': [host.listen('cleint')]}",
            r"programs\(n1\) raised KeyError: there is no port 'cleint' \(did you mean client\?\); there are c",
        ),
        (
            "def environment(self, host):\n    return {'A': self.settings['gretting']}",
            r"environment\(n1\) raised KeyError: there is no setting 'gretting' \(did you mean greeting\?\); there are",
        ),
        (
            "def programs(self, host):\n    return {'kv': ['no-such-program']}",
            r"^mine.py:\d+: cannot run kv on n1: no-such-program: No such file",
        ),
        (
            "def programs(self, host):\n    return {'kv': ['sh', '-c', 'echo no disk >&2; exit 3']}",
            r"^mine.py:\d+: program kv of n1 ended with status 3 while starting: no disk$",
        ),
        (
            "def programs(self, host):\n    return {'kv': ['sh', '-c', '(sleep 600 &)']}",
            r"^mine.py:\d+: program kv of n1 ended with status 0 while starting .*keep it in the foreground\)$",
        ),
        (
            "ready_timeout_s = 0.2\nasync def ready(self, host):\n    raise ValueError('no answer yet')",
            r"^mine.py:\d+: n1 not ready within 0.2 s: on n1 mine.py:\d+: ready\(n1\) raised ValueError: no answer yet",
        ),
        (
            "ready_timeout_s = 0.2\nasync def ready(self, host):\n    pass",
            r"returned None \(return True once the host serves\): serving hello",
        ),
        (
            "ready_timeout_s = 0.2\ndef programs(self, host):\n    return {'kv': ['sleep', '600']}",
            r"^mine.py:\d+: n1 not ready within 0.2 s: on n1 nothing listens on client \(27000\), other \(27001\)$",
        ),
        ("def files(self, host):\n    return {'x': 3}", r"files\(n1\) returned {'x': 3}, not a mapping"),
        (
            "def files(self, host):\n    return {'x': '\\ud800'}",
            r"^mine.py:\d+: files\(n1\) has a lone surrogate under 'x'",
        ),
        ("def files(self, host):\n    return {'/x': ''}", r"^mine.py:\d+: files\(n1\) names '/x', which is not below"),
        ("def files(self, host):\n    return {'a/../../x': ''}", r"names 'a/../../x', which is not below host.data$"),
        ("async def setup(self, host):\n    await host.run('false')", r"setup\(n1\) raised CommandFailed: n1: false"),
        (
            "async def ready(self, host):\n    return await host.listens('client')",
            r"^mine.py:\d+: ready\(n1\) raised TypeError: listens\('client'\) takes several names of ports: ",
        ),
        ("async def ready(self, host):\n    return host.lisens()", r"^mine.py:\d+: ready\(n1\) raised AttributeError"),
        (
            "ready_timeout_s = 5.0\nasync def start_together(self):\n    raise OSError('no')",
            r"^mine.py:\d+: start_together raised OSError: no$",
        ),
        ("async def status(self, host):\n    return True", r"^mine.py:\d+: status\(n1\) returned True, neither"),
        (
            "async def status(self, host):\n    return Status(leads='yes')",
            r"^mine.py:\d+: status\(n1\) returned a Status whose leads is 'yes', not True or False$",
        ),
        (
            "async def status(self, host):\n    return Status(leads=True, term='3')",
            r"^mine.py:\d+: status\(n1\) returned a Status whose term is '3', not an integer$",
        ),
        ("async def status(self, host):\n    return self.nothing", r"^mine.py:\d+: status\(n1\) raised AttributeError"),
        (
            "ready_timeout_s = 5.0\nasync def status(self, host):\n    return {}['rolle']",
            r"mine.py:\d+: there is no leader 5 s after the start: mine.py:\d+: status\(n1\) raised KeyError: 'rolle'$",
        ),
        (
            "async def setup(self, host):\n    host.run('mkdir', host.path('wal'))",
            r"^mine.py:\d+: setup\(n1\): Host.run\(\) was called but not awaited \(mine.py:\d+\)$",
        ),
        (
            "async def start_together(self):\n    self.hosts[0].put('group', 'n1')",
            r"^mine.py:\d+: start_together\(\): Host.put\(\) was called but not awaited \(mine.py:\d+\)$",
        ),
        (
            "async def ready(self, host):\n    return host.listens()",
            r"^mine.py:\d+: ready\(n1\) returned a coroutine: await it$",
        ),
        ("async def start_together(self):\n    self.nothing()", r"^mine.py:\d+: start_together raised AttributeError"),
    ],
)
def test_errors_at_the_start_are_blamed_on_the_plug_in(
    write: Write, run_state: RunState, tmp_path: Path, more: str, expected: str
) -> None:
    said = start_error(write(more), run_state, tmp_path)
    assert re.search(expected, said), said


def test_start_together_is_repeated_until_it_succeeds(write: Write, run_state: RunState, tmp_path: Path) -> None:
    more = (
        "calls = 0\n"
        "async def start_together(self):\n"
        "    type(self).calls += 1\n"
        "    if self.calls < 3:\n"
        "        raise OSError('no peers yet')"
    )

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path, 1) as system:
            assert type(system._system).calls == 3  # type: ignore[attr-defined]

    asyncio.run(main())


def test_start_together_forms_a_group_that_has_no_leader_before(
    write: Write, run_state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "FORMING_S", 0.3)
    more = """
        calls = []
        async def start_together(self):
            self.calls.append("made")
            if len(self.calls) == 1:
                None.elected  # as with a leader that does not exist
        async def status(self, host):
            return Status(leads=len(self.calls) > 1 and host.name == "n2", term=1)
    """

    async def main() -> None:
        async with system_of(write(more), run_state, tmp_path) as system:
            assert type(system._system).calls == ["made", "made"], (
                "it is repeated until it succeeds, and then not called again"
            )
            assert await system.leaders() == ["n2"]

    asyncio.run(main())


def test_an_error_in_the_constructor_of_a_client_is_blamed_on_the_plug_in(
    write: Write, run_state: RunState, tmp_path: Path
) -> None:
    client = CLIENT + "    def __init__(self):\n        self.x = None + 1\n"

    async def main() -> None:
        async with system_of(write("", client), run_state, tmp_path, 1) as system:
            with pytest.raises(PluginError, match=r"^mine.py:\d+: Talk\(\) raised TypeError: unsupported operand"):
                system.connection("client", process=0, thread=0)
            with pytest.raises(OperatorError, match="offers no 'queue' connections"):
                system.connection("queue", process=0, thread=0)

    asyncio.run(main())


def test_listening_ports_are_those_of_the_host_or_of_every_address() -> None:
    lines = [
        "  sl  local_address rem_address   st",
        "   0: 0100007F:1F90 00000000:0000 0A 0",  # 127.0.0.1:8080
        "   1: 0500004D:0016 00000000:0000 0A 0",  # another host's
        "   2: 00000000:0050 00000000:0000 0A 0",  # every address: 80
        "   3: 0100007F:1F91 0100007F:9999 01 0",  # a connection
        "   4: 00000000000000000000000000000000:01BB 0:0 0A 0",  # every address, IPv6: 443
        "   5: 0000000000000000FFFF00000100007F:1F92 0:0 0A 0",  # IPv4 in IPv6: 8082
    ]
    assert listening_ports("\n".join(lines), "127.0.0.1") == {8080, 80, 443, 8082}


def test_a_directory_copied_to_a_host_keeps_its_links_and_modes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "kv").write_bytes(b"\x7fELF")
    (source / "bin" / "kv").chmod(0o755)
    (source / "bin" / "kv-alias").symlink_to("kv")
    (tmp_path / "x.tar.gz").write_bytes(guest._packed(str(source)))
    subprocess.run([sys.executable, "-c", guest._UNPACK, str(tmp_path / "x.tar.gz"), str(target)], check=True)
    assert (target / "bin" / "kv-alias").read_bytes() == b"\x7fELF"
    assert os.access(target / "bin" / "kv", os.X_OK) and not (tmp_path / "x.tar.gz").exists()


CLOSES = """
    async def stop_together(self):
        self.ended = getattr(self, "ended", 0) + 1
        self.were_serving = [await host.listens() for host in self.hosts]
        {then}
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("pass", None),
        ("raise LookupError('not there')", r"mine.py:\d+: stop_together\(\) raised LookupError: not there"),
        ("await __import__('asyncio').sleep(600)", r"mine.py:\d+: stop_together\(\) took more than 1 s"),
    ],
)
def test_stop_together_is_called_once_while_the_programs_still_run(
    write: Write, run_state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, said: str | None
) -> None:
    """Whatever it raises, the programs are ended."""
    monkeypatch.setattr(guest, "QUESTION_TIMEOUT_S", 1.0)

    async def main() -> None:
        async with system_of(write(CLOSES.format(then=then)), run_state, tmp_path) as system:
            process = system.process("n1")
            with pytest.raises(PluginError, match=said) if said else contextlib.nullcontext():
                await system.stop()
            assert process.exit_status() is not None
            await system.stop()
            assert system._system.ended == 1 and system._system.were_serving == [True, True]

    asyncio.run(main())


def test_stop_together_is_called_even_if_nothing_was_started(write: Write, run_state: RunState, tmp_path: Path) -> None:
    system_class = registry.load("systems", write(CLOSES.format(then="pass")))
    cluster = LocalCluster(node_count=1, run=run_state, work_dir=str(tmp_path), ports=system_class.ports)
    system: Any = system_class(cluster=cluster, settings={}, keys=1, log_dir=str(tmp_path), operation_timeout_s=3.0)

    async def main() -> None:
        with pytest.raises(PluginError, match="stop_together"):  # it asks hosts that do not run
            await system.stop()
        await system.stop()
        assert system._system.ended == 1

    asyncio.run(main())


@given(st.text(max_size=2000), st.text("ab", max_size=2), st.text("cd", max_size=2), st.text(max_size=2000))
def test_the_first_difference_of_replica_states_is_quoted(same: str, one: str, other: str, rest: str) -> None:
    assume(one != other)
    texts = (f"{same}{one}{rest}", f"{same}{other}{rest}")
    assume(texts[0] != texts[1])
    quoted = [guest._around(text, guest._first_difference(*texts)) for text in texts]
    assert quoted[0] != quoted[1]
    assert all(len(quote) <= guest.MAX_STATE_CHARS + len("......") for quote in quoted)
