"""The agent and the harness's link to it, on this machine and without privileges."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.clusters import agent_access, host_agent
from harness.clusters.agent_access import fetch_directory, put_file
from harness.clusters.agent_link import AgentGone, AgentLink, ConnectFailure
from harness.clusters.agent_processes import AgentProcesses
from harness.clusters.base import Program
from harness.errors import OperatorError
from harness.run_state import process_start_ticks
from nemesis.mechanisms.shell import ShellError
from nemesis.target import DOWN, PAUSED, RUNNING
from tests.headless import HEADLESS

AGENT = host_agent.__file__


class Pipe:
    """A relay as a child process."""

    def __init__(self, directory: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, f"{directory}/agent.py", "relay", directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def receive(self) -> bytes:
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), 1 << 16)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Host:
    """An agent of a run on this machine, and a link to it whose connections the test can break."""

    def __init__(self, base: Path, run_id: str) -> None:
        self.base, self.run_id, self.directory = str(base), run_id, str(base / run_id)
        self.pipes: list[Pipe] = []
        self.events: list[dict[str, Any]] = []
        self.refuse = False
        self.link = AgentLink("n1", self._connect, self.events.append)

    def _connect(self) -> Pipe:
        if self.refuse:
            raise ConnectFailure("n1: the test refuses")
        self.pipes.append(Pipe(self.directory))
        return self.pipes[-1]

    def command(self, name: str) -> dict[str, Any]:
        source = Path(AGENT).read_text()
        launcher = (
            "import sys; s = sys.stdin.read(); exec(compile(s, 'a', 'exec'), {'__name__': '__main__', 'SOURCE': s})"
        )
        argv = [sys.executable, "-c", launcher, name, self.base, self.run_id]
        done = subprocess.run(argv, input=source, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def break_connection(self) -> None:
        self.pipes[-1].process.kill()


def with_host(tmp_path: Path, scenario: Callable[[Host], Awaitable[None]]) -> Host:
    host = Host(tmp_path / "base", f"agent{os.getpid()}-{tmp_path.name[-20:]}")

    async def body() -> None:
        answer = await asyncio.to_thread(host.command, "start")
        assert answer["started"] is True
        try:
            host.link.open("test")
            await scenario(host)
        finally:
            await host.link.close()
            cleaned = await asyncio.to_thread(host.command, "clean")
            assert cleaned["left"] == []
        assert not os.path.exists(host.base)

    asyncio.run(body())
    return host


def test_a_command_runs_exactly_once_although_its_connection_breaks(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        count = tmp_path / "count"
        assert await host.link.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin="in") == (3, "in", "err\n")
        slow = asyncio.ensure_future(host.link.run(["sh", "-c", f"sleep 0.5; echo x >> {count}; echo done"]))
        await asyncio.sleep(0.2)
        host.break_connection()
        assert await slow == (0, "done\n", "")
        assert count.read_text() == "x\n"
        assert host.link.connection_count == len(host.pipes) == 2
        assert (await host.link.run(["sleep", "60"], timeout_s=0.2))[0] == -9
        with pytest.raises(ShellError, match="/no/such-program: No such file"):
            await host.link.run(["/no/such-program"])
        status, output, _ = await host.link.run([sys.executable, "-c", "print('y' * 3_000_000)"])
        assert (status, len(output)) == (0, host_agent.MAX_OUTPUT_BYTES)

    with_host(tmp_path, scenario)


def test_an_unreachable_host_is_reported_and_later_reconnected(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        await host.link.request("hello")
        host.refuse = True
        host.break_connection()
        with pytest.raises(ShellError, match=r"n1: .* no answer within 0\.5 s \(n1: the test refuses\)"):
            await host.link.request("run", {"argv": ["true"]}, timeout_s=0.5)
        host.refuse = False
        assert (await host.link.run(["true"]))[0] == 0

    with_host(tmp_path, scenario)


def test_programs_are_watched_while_the_harness_is_disconnected(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        programs = AgentProcesses(
            log_path=lambda of, name: str(tmp_path / of / name),
            remote_log_path=lambda of, name: f"{host.directory}/{of}/logs/{name}",
        )
        events = host.events
        seen = 0

        async def until(condition: Callable[[], bool]) -> None:
            nonlocal seen
            async with asyncio.timeout(20):
                while not condition():
                    for event in events[seen:]:
                        programs.take_event("n1", host.link, event)
                    seen = len(events)
                    await asyncio.sleep(0.01)

        code = "import os, time; print(os.environ['A'], os.environ['SPLITBRAIN_RUN'], flush=True); time.sleep(60)"
        program = Program(name="p", argv=[sys.executable, "-c", code], log_name="p.log", environment={"A": "b"})
        process = await programs.spawn("n1", "n1", host.link, program)
        assert process.pid is None and await process.state() == RUNNING
        await process.pause()
        assert await process.state() == PAUSED
        await process.resume()
        assert await process.state() == RUNNING
        log = Path(host.directory, "n1", "logs", "p.log")
        await until(lambda: log.exists() and log.read_text() == f"b {host.run_id}\n")
        host.refuse = True
        host.break_connection()
        os.kill(process.host_pid, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{process.host_pid}").exists())
        assert process.exit_status() is None
        host.refuse = False
        await until(lambda: process.exit_status() is not None)
        assert (process.exit_status(), await process.state()) == (-9, DOWN)
        await process.kill()
        short = Program(name="q", argv=["sh", "-c", "echo last words; exit 5"], log_name="q.log")
        ended = await programs.spawn("n1", "n1", host.link, short)
        await until(lambda: ended.exit_status() is not None)
        assert ended.exit_status() == 5
        assert Path(ended.log_path).read_text() == "last words\n"
        with pytest.raises(OperatorError, match=r"cannot run r on n1: .*no/such"):
            await programs.spawn("n1", "n1", host.link, Program(name="r", argv=["/no/such"], log_name="r.log"))
        assert await programs.stop_all() == []

    with_host(tmp_path, scenario)


def test_the_end_of_an_agent_is_reported_and_ends_its_programs(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        answer = await host.link.request("spawn", {"argv": ["sleep", "600"], "environment": {}, "log": f"{tmp_path}/l"})
        stat = Path(f"/proc/{answer['pid']}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        with pytest.raises(AgentGone, match="n1: `run` ended with status 255: the agent on this host has ended"):
            await host.link.request("run", {"argv": ["true"]}, timeout_s=host_agent.RELAY_TIMEOUT_S + 15)
        assert host.events[-1] == {"event": "gone"}
        async with asyncio.timeout(20):
            while process_start_ticks(answer["pid"]) is not None:  # noqa: ASYNC110 - another process's end
                await asyncio.sleep(0.02)

    with_host(tmp_path, scenario)


DAEMONISE = '(env -i setsid "$@" &); exec sleep 600'
"""Starts a program as a daemon with an empty environment, and keeps running itself."""


def test_strays_are_listed_and_ended_on_request(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        async def strays(*names: str) -> list[list[Any]]:
            """The strays, once these are their names: a new process has the name of its parent at first."""
            async with asyncio.timeout(20):
                while True:
                    found = list((await host.link.request("strays"))["strays"])
                    if [stray[3] for stray in found] == list(names):
                        return found
                    await asyncio.sleep(0.01)

        argv, log = ["sh", "-c", DAEMONISE, "sh", "sleep", "601"], f"{tmp_path}/l"
        wrapper = await host.link.request("spawn", {"argv": argv, "environment": {}, "log": log})
        [[first, *_]] = await strays("sleep")
        members = (await host.link.request("members", {"pid": wrapper["pid"]}))["members"]
        assert [member[0] for member in members] == [wrapper["pid"]], "the daemon cannot be traced to its program"
        # Once a command has ended, even marked processes that it left behind are strays.
        own_session = 'while [ "$(cut -d " " -f 6 /proc/$!/stat)" = $$ ]; do sleep 0.01; done'  # else it ends
        assert (await host.link.run(["sh", "-c", f"setsid sleep 602 > /dev/null 2>&1 & {own_session}"]))[0] == 0
        await strays("sleep", "sleep")
        await host.link.request("signal", {"pid": wrapper["pid"], "number": signal.SIGKILL})
        assert first in [stray[0] for stray in await strays("sleep", "sleep")]
        ended = await host.link.request("end_strays")
        assert sorted(command for _, command in ended["ended"]) == ["sleep 601", "sleep 602"] and ended["left"] == []
        assert await strays() == [] == (await host.link.request("end_strays"))["ended"]

    with_host(tmp_path, scenario)


def test_adopted_strays_are_signalled_with_their_program(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        async def strays(*, sleeps: int, shells: int = 0) -> list[list[Any]]:
            """The strays, once these are their names: each is a shell before it executes its program."""
            async with asyncio.timeout(20):
                while True:
                    found = list((await host.link.request("strays"))["strays"])
                    names = sorted("sh" if stray[3] == "dash" else stray[3] for stray in found)
                    if names == ["sh"] * shells + ["sleep"] * sleeps:
                        return sorted(found)
                    await asyncio.sleep(0.01)

        async def until_letter(found: list[list[Any]], wanted: str) -> None:
            async with asyncio.timeout(20):
                for pid in [stray[0] for stray in found]:
                    while (await host.link.request("state", {"pid": pid}))["letter"] != wanted:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)

        async def spawn(*argv: str) -> int:
            request = {"argv": ["sh", "-c", DAEMONISE, "sh", *argv], "environment": {}, "log": f"{tmp_path}/l"}
            return int((await host.link.request("spawn", request))["pid"])

        await spawn("sleep", "601")
        older = await strays(sleeps=1)
        await asyncio.sleep(0.05)  # start times are in hundredths of a second
        program = await spawn("sh", "-c", "sleep 602; sleep 603")  # two processes
        found = await strays(sleeps=2, shells=1)
        of_program = [stray for stray in found if stray not in older]
        wrong_start = [[pid, started + 1] for pid, started, *_ in of_program]
        await host.link.request("adopt", {"pid": program, "strays": wrong_start})
        assert len((await host.link.request("members", {"pid": program}))["members"]) == 1
        await host.link.request("adopt", {"pid": program, "strays": [stray[:2] for stray in found]})
        members = (await host.link.request("members", {"pid": program}))["members"]
        assert {stray[0] for stray in of_program} < {member[0] for member in members}
        assert older[0][0] not in [member[0] for member in members], "it is older than the program"
        await host.link.request("signal", {"pid": program, "number": signal.SIGSTOP})
        await until_letter(of_program, "T")
        await until_letter(older, "S")
        assert [stray[0] for stray in await strays(sleeps=2, shells=1)] == [stray[0] for stray in found], (
            "they are still strays, which file faults do not reach"
        )
        await host.link.request("signal", {"pid": program, "number": signal.SIGCONT})
        await until_letter(of_program, "S")
        await host.link.request("signal", {"pid": program, "number": signal.SIGKILL})
        assert await strays(sleeps=1) == older

        script = f"trap 'echo asked > {tmp_path}/asked; exit' TERM; echo > {tmp_path}/ready; sleep 604 & wait"
        program = await spawn("sh", "-c", script)
        found = await strays(sleeps=2, shells=1)
        while not (tmp_path / "ready").exists():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.01)
        await host.link.request("adopt", {"pid": program, "strays": [stray[:2] for stray in found]})
        await host.link.request("signal", {"pid": program, "number": signal.SIGTERM})
        assert await strays(sleeps=1) == older and (tmp_path / "asked").read_text() == "asked\n"

    with_host(tmp_path, scenario)


def test_strays_end_with_the_agent(tmp_path: Path) -> None:
    pids = []

    async def scenario(host: Host) -> None:
        argv = ["sh", "-c", DAEMONISE, "sh", "sh", "-c", "trap '' TERM HUP; sleep 601; sleep 602"]
        await host.link.request("spawn", {"argv": argv, "environment": {}, "log": f"{tmp_path}/l"})
        async with asyncio.timeout(20):
            while len(found := (await host.link.request("strays"))["strays"]) < 2:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.01)
        pids.extend(stray[0] for stray in found)

    with_host(tmp_path, scenario)
    assert pids and [process_start_ticks(pid) for pid in pids] == [None] * len(pids)


def test_files_are_uploaded_and_fetched_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_access, "_PIECE_BYTES", 1000)
    contents = {"empty": b"", "one/piece": b"p" * 1000, "one/more": os.urandom(4321)}

    async def scenario(host: Host) -> None:
        there = f"{host.directory}/n1/data"
        await put_file(host.link, f"{there}/one/more", b"longer than what comes after it" * 1000)
        for name, content in contents.items():
            await put_file(host.link, f"{there}/{name}", content)
        os.symlink("/etc/passwd", f"{there}/link")
        local = tmp_path / "fetched"
        await fetch_directory(host.link, there, str(local))
        found = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
        assert found == contents
        await fetch_directory(host.link, f"{there}/not-there", str(tmp_path / "nothing"))
        assert os.listdir(tmp_path / "nothing") == []
        with pytest.raises(ShellError, match="Is a directory"):
            await put_file(host.link, f"{there}/one", b"")

    with_host(tmp_path, scenario)


def test_an_archive_cannot_write_outside_its_target_directory(tmp_path: Path) -> None:
    archive_path = tmp_path / "bad.tar.gz"
    (tmp_path / "file").write_text("content")
    with tarfile.open(archive_path, "w:gz") as archive:
        for name in ("../escaped", "/escaped", "a/../../escaped", "fine"):
            member = archive.gettarinfo(str(tmp_path / "file"))
            member.name = name
            with open(tmp_path / "file", "rb") as file:
                archive.addfile(member, file)
    target = tmp_path / "in" / "here"
    target.mkdir(parents=True)
    agent_access._unpack(str(archive_path), str(target))
    assert [path.name for path in target.rglob("*")] == ["fine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar.gz", "file", "in"]


def test_probe_datagrams_carry_their_nonce(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        port = (await host.link.request("udp_open", {"address": "127.0.0.1"}))["port"]
        assert (await host.link.request("udp_open", {"address": "127.0.0.1"}))["port"] == port
        good, refused = "ab" * 16, "cd" * 16
        datagrams = [[good, "127.0.0.1", port], [refused, "255.255.255.255", port], ["00", "127.0.0.1", port]]
        answer = await host.link.request("udp_send", {"datagrams": datagrams})
        assert list(answer["errors"]) == [refused]
        await host.link.request("hello")
        arrived = [event for event in host.events if event["event"] == "datagram"]
        assert arrived == [{"event": "datagram", "nonce": good, "from": "127.0.0.1"}]

    with_host(tmp_path, scenario)


def test_a_host_is_claimed_by_one_run_and_cleaned_with_its_undo_commands(tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    async def scenario(host: Host) -> None:
        other = Host(Path(host.base), f"{host.run_id}-2")
        refusal = await asyncio.to_thread(other.command, "start")
        assert refusal["refused"].startswith(f"the host is in use by run {host.run_id}: ")
        assert (await asyncio.to_thread(other.command, "clean"))["removed"] == []
        assert (await host.link.run(["true"]))[0] == 0
        for key in ("first", "second", "dropped"):
            argv = ["sh", "-c", f"cat >> {marks}"]
            await host.link.request("undo", {"key": key, "argv": argv, "stdin": f"{key}\n"})
        await host.link.request("undo", {"key": "dropped", "argv": None})

    host = with_host(tmp_path, scenario)
    assert marks.read_text() == "second\nfirst\n"
    assert host.command("clean") == {"removed": [], "left": []}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_clean_keeps_a_directory_that_others_made_or_use(when: str, tmp_path: Path) -> None:
    """A user who may not create the directory again needs it for the next run."""
    host = Host(tmp_path / "base", f"agent{os.getpid()}-{when}")
    if when == "before":
        os.mkdir(host.base)
    assert host.command("start")["started"] is True
    if when == "meanwhile":
        Path(host.base, "notes").touch()
    assert host.command("clean")["left"] == []
    assert os.listdir(host.base) == ([] if when == "before" else ["notes"])


def test_an_empty_owner_file_is_refused_and_removed_by_clean(tmp_path: Path) -> None:
    """As on a machine that lost power while an earlier version of the agent claimed it."""
    host = Host(tmp_path / "base", f"agent{os.getpid()}-nobody")
    owner = Path(host.base, "owner")
    owner.parent.mkdir()
    owner.touch()
    assert host.command("start") == {
        "refused": f"{owner} is empty: if no run is using the host, delete it",
        "taken": True,
    }
    assert host.command("clean") == {"removed": [], "left": []} and os.listdir(host.base) == []


def test_an_unusable_directory_is_refused_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    def refusal(base: Path) -> dict[str, Any]:
        assert host_agent._start_command(str(base), "one", "") == 0
        return dict(json.loads(capsys.readouterr().out))

    how = "set another with directory = in the inventory"
    why = f"its directory {tmp_path}/file cannot be used (File exists): {how}"
    assert refusal(tmp_path / "file") == {"refused": why, "taken": True}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    why = f"its directory {tmp_path}/full cannot be used (No space left on device): {how}"
    assert refusal(tmp_path / "full") == {"refused": why, "taken": True}
    assert os.listdir(tmp_path) == ["file"]


def test_the_owner_file_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a file may have its name but no content, so the content is synced first."""
    synced: list[str] = []
    fsync, link = os.fsync, os.link

    def linking(source: Path, place: Path) -> None:
        assert Path(source).read_text() in synced
        link(source, place)

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_text())

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "link", linking)
    owner = tmp_path / "owner"
    assert host_agent._take(owner, "one") and not host_agent._take(owner, "two")
    assert owner.read_text() == "one" and os.listdir(tmp_path) == ["owner"]


def test_exactly_one_of_several_concurrent_claims_of_a_host_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an inventory names a machine twice. Threads stand in for processes."""
    monkeypatch.setattr(os, "getpid", threading.get_ident)
    owner, barrier = tmp_path / "owner", threading.Barrier(4)

    def take(_: int) -> bool:
        barrier.wait()
        return host_agent._take(owner, "one")

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            assert sorted(pool.map(take, range(4))) == [False, False, False, True]
            assert os.listdir(tmp_path) == ["owner"]
            owner.unlink()


def test_clean_kills_a_process_whose_first_thread_has_ended(tmp_path: Path) -> None:
    base, run_id = tmp_path / "base", f"headless{os.getpid()}"
    environment = {**os.environ, "SPLITBRAIN_RUN": run_id}
    command: dict[str, Any] = {"args": [sys.executable, "-c", HEADLESS], "env": environment}
    with (
        socket.socket() as end,
        subprocess.Popen(**command, stdout=subprocess.PIPE, pass_fds=[end.fileno()]) as process,
    ):
        try:
            assert process.stdout is not None and process.stdout.readline() == b"headless %d\n" % process.pid
            assert host_agent.sockets_of(process.pid) == {os.fstat(end.fileno()).st_ino}
            cleaned = Host(base, run_id).command("clean")
            assert cleaned["removed"] == [f"process {process.pid}"] and cleaned["left"] == []
        finally:
            process.kill()


def test_a_failed_undo_command_keeps_the_host_claimed(tmp_path: Path) -> None:
    able = tmp_path / "able"

    async def scenario(host: Host) -> None:
        await host.link.request("undo", {"key": "clock", "argv": ["test", "-e", str(able)]})
        cleaned = await asyncio.to_thread(host.command, "clean")
        assert [line.partition(":")[0] for line in cleaned["left"]] == ["clock"]
        assert sorted(os.listdir(host.base)) == sorted([host.run_id, "owner"])
        able.touch()

    with_host(tmp_path, scenario)
    assert able.exists()


def test_a_relay_whose_agent_ends_with_a_request_unread_ends_quietly(tmp_path: Path) -> None:
    """The kernel resets such a connection."""
    agent = shutil.copy(AGENT, tmp_path / "agent.py")  # beside it there, `select` is a module of ours
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(60)
        server.bind(str(tmp_path / host_agent.SOCKET))
        server.listen()
        relay = subprocess.Popen(
            [sys.executable, agent, "relay", str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert relay.stdin is not None
        connection, _ = server.accept()
        relay.stdin.write(b'{"op": "run"}\n')
        relay.stdin.flush()
        assert connection.recv(1, socket.MSG_PEEK) == b"{"
        connection.close()
        relay.wait(timeout=60)  # its input stays open: it would end with that, too
        out, err = relay.communicate()
    assert (relay.returncode, out, err) == (0, b"", b"")
