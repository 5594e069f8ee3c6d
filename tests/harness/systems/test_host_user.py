"""Systems that refuse to run as root run as another user, and end with the agent that started them."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.clusters.base import Program
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.run_state import RunState
from harness.sdk import Host
from harness.systems.host_user import user_of, words_for_user
from tests.mounts import IS_PLAIN_CHROOT

pytestmark = [pytest.mark.cluster, pytest.mark.root]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

PLUGIN = """
from harness.sdk import Client, System

SERVE = '''
import os, socket, sys
server = socket.create_server((sys.argv[1], 27000))
open(sys.argv[2], "w").write(f"{os.geteuid()} {os.getpid()}")
while True:
    server.accept()
'''

class Mine(System):
    ports = {"client": 27000}
    user = "nobody"
    def files(self, host):
        return {"serve.py": SERVE}
    async def setup(self, host):
        await host.run("sh", "-c", f"id -u > {host.path('setup')}")
    def command(self, host):
        return [host.python, host.path("serve.py"), host.ip, host.path("pid")]

class Talk(Client):
    async def read(self, key):
        return None
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that all users may traverse, which those of pytest are not."""
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="sb-user-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def closed_directory() -> Iterator[Path]:
    """A directory that only root may traverse."""
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="sb-user-"))
    yield directory
    shutil.rmtree(directory)


def on_a_host(directory: Path, scenario: Callable[[LocalCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        run = RunState.create(f"test-{directory.name}", state_root=str(directory / "states"))
        cluster = LocalCluster(node_count=1, run=run, work_dir=str(directory / "nodes"), ports=[27000])
        await cluster.start()
        try:
            await scenario(cluster)
        finally:
            await cluster.stop()
            run.close()

    asyncio.run(main())


def host_of(cluster: LocalCluster) -> Host:
    return Host("n1", 1, cluster, {"client": 27000}, lambda host, name: name)


@needs_root
def test_a_system_runs_as_the_user_that_it_names_and_owns_its_data(open_directory: Path) -> None:
    (open_directory / "mine.py").write_text(PLUGIN)
    nobody = str(pwd.getpwnam("nobody").pw_uid)

    async def scenario(cluster: LocalCluster) -> None:
        system_class = registry.load("systems", str(open_directory / "mine.py"))
        system: Any = system_class(
            cluster=cluster, settings={}, keys=1, log_dir=str(open_directory), operation_timeout_s=3.0
        )
        await system.start()
        data = Path(cluster.data_dir("n1"))
        uid, pid = (data / "pid").read_text().split()
        process = system.process("n1")
        assert uid == nobody and (data / "setup").read_text().strip() == nobody
        assert data.stat().st_uid == (data / "serve.py").stat().st_uid == int(nobody)
        assert int(pid) == process.pid, "the program itself is the process that was started"
        assert f"\nUid:\t{nobody}\t{nobody}\t" in Path(f"/proc/{pid}/status").read_text()
        await system.stop()

    on_a_host(open_directory, scenario)


@needs_root
def test_a_program_that_became_another_user_ends_with_its_agent(open_directory: Path) -> None:
    """The kernel clears the parent-death signal of a process that becomes another user."""
    pids: list[int] = []

    async def scenario(cluster: LocalCluster) -> None:
        words = await words_for_user(host_of(cluster), "nobody", [])
        assert user_of(words) == str(pwd.getpwnam("nobody").pw_uid)
        process = await cluster.spawn("n1", Program("sleeper", [*words, "sleep", "600"], "sleeper.log"))
        pid = process.host_pid
        pids.append(pid)
        async with asyncio.timeout(10):
            while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":  # noqa: ASYNC110 - a program elsewhere
                await asyncio.sleep(0.02)
        agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, 9)
        async with asyncio.timeout(10):
            while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110 - a program elsewhere
                await asyncio.sleep(0.02)

    on_a_host(open_directory, scenario)
    assert pids


@needs_root
@pytest.mark.skipif(IS_PLAIN_CHROOT, reason="there are no user namespaces in a chroot")
def test_root_becomes_nobody_in_a_namespace_if_the_user_cannot_reach_the_data(closed_directory: Path) -> None:
    async def scenario(cluster: LocalCluster) -> None:
        host = host_of(cluster)
        words = await words_for_user(host, "nobody", [])
        assert words[:2] == ["unshare", "--user"] and user_of(words) is None
        script = f"id -u; touch {host.path('file')} && stat -c %u {host.path('file')}; chown 1 {host.path('file')}"
        output = await host.run_as_harness(*words, "sh", "-c", script, check=False)
        nobody = Path("/proc/sys/kernel/overflowuid").read_text().strip()
        assert output.out.split() == [nobody, nobody] and output.status != 0, output
        assert Path(host.path("file")).stat().st_uid == 0, "outside of the namespace it belongs to root"

    on_a_host(closed_directory, scenario)


@needs_root
def test_an_unknown_user_is_reported_with_a_remedy(open_directory: Path) -> None:
    async def scenario(cluster: LocalCluster) -> None:
        with pytest.raises(
            OperatorError, match=r"^there is no user nosuchuser on n1: create it there \(useradd nosuch"
        ):
            await words_for_user(host_of(cluster), "nosuchuser", [])

    on_a_host(open_directory, scenario)


@pytest.mark.skipif(os.geteuid() == 0, reason="root has to become another user")
def test_an_ordinary_user_stays_the_same_user(tmp_path: Path) -> None:
    async def scenario(cluster: LocalCluster) -> None:
        assert await words_for_user(host_of(cluster), "nobody", []) == []

    on_a_host(tmp_path, scenario)


@needs_root
def test_a_python_that_the_user_cannot_execute_is_named_with_the_fix(
    open_directory: Path, closed_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an installation below /root, which other users may not enter."""
    (open_directory / "mine.py").write_text(PLUGIN)
    python = closed_directory / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} $*\n")
    python.chmod(0o755)

    async def scenario(cluster: LocalCluster) -> None:
        monkeypatch.setattr(Host, "python", property(lambda host: str(python)))
        system_class = registry.load("systems", str(open_directory / "mine.py"))
        system: Any = system_class(
            cluster=cluster, settings={}, keys=1, log_dir=str(open_directory), operation_timeout_s=3.0
        )
        with pytest.raises(OperatorError) as caught:
            await system.start()
        await system.stop()
        said = str(caught.value)
        assert "ended with status" in said and len(said.splitlines()) == 1
        fix = "install it where all users have access, or give them access (chmod a+x"
        assert f": user nobody cannot execute {python}, the harness's own Python: {fix}" in said

    on_a_host(open_directory, scenario)
