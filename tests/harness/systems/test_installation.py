"""What is installed on hosts with file systems of their own; failures are the operator's to fix."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import registry
from harness.clusters.local import LocalCluster
from harness.errors import OperatorError
from harness.run_state import RunState
from nemesis.mechanisms.shell import ShellError

pytestmark = pytest.mark.cluster

PLUGIN = """
from harness.sdk import Client, System, apt, path

class Mine(System):
    install = {install}
    ports = {{"client": 27000}}

    def command(self, host):
        return ["sleep", "600"]

class Talk(Client):
    async def read(self, key):
        return None
"""


class Remote(LocalCluster):
    """A cluster whose hosts count as having their own file systems, and on which one program fails."""

    failing = ""
    failure: tuple[int, str, str] | ShellError = (0, "", "")

    def python(self, host: str) -> str:
        return "python3"

    async def fetch(self, hosts: Collection[str] | None = None) -> Sequence[Exception]:
        return []

    async def run(self, host: str, argv: Sequence[str], **given: Any) -> tuple[int, str, str]:
        if self.failing in argv:
            if isinstance(self.failure, ShellError):
                raise self.failure
            return self.failure
        return await super().run(host, argv, **given)


def start(tmp_path: Path, install: str, failing: str, failure: tuple[int, str, str] | ShellError) -> None:
    async def main() -> None:
        run = RunState.create(f"test-{tmp_path.name}", state_root=str(tmp_path / "states"))
        cluster = Remote(node_count=1, run=run, work_dir=str(tmp_path / "nodes"), ports=[27000])
        cluster.failing, cluster.failure = failing, failure
        await cluster.start()
        try:
            (tmp_path / "mine.py").write_text(PLUGIN.format(install=install))
            system_class = registry.load("systems", str(tmp_path / "mine.py"))
            given = {"settings": {}, "keys": 1, "log_dir": str(tmp_path), "operation_timeout_s": 3.0}
            await system_class(cluster=cluster, **given).start()
        finally:
            await cluster.stop()
            run.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            (100, "Reading package lists...\n", "E: Unable to locate package kv-server\nplease report\n"),
            r"^install apt kv-server kv-tools: it failed on n1: status 100, E: Unable to locate package kv-server: "
            r"a machine needs current package lists \(apt-get update\) .* image must contain the packages \(--image\)$",
        ),
        (
            (127, "", "env: 'apt-get': No such file or directory\n"),
            r"it failed on n1: status 127, env: 'apt-get': No such file or directory: use hosts or an image",
        ),
        ((-9, "", ""), r"it failed on n1: it took more than 600 s: a machine needs"),
    ],
)
def test_packages_that_cannot_be_installed_are_one_line_with_the_fix(
    tmp_path: Path, failure: tuple[int, str, str], expected: str
) -> None:
    with pytest.raises(OperatorError, match=expected) as caught:
        start(tmp_path, "apt('kv-server', 'kv-tools')", "apt-get", failure)
    assert len(str(caught.value).splitlines()) == 1


def test_a_host_that_stops_answering_during_the_installation_is_named_in_one_line(tmp_path: Path) -> None:
    lost = ShellError("n1", ["run"], 255, "no answer within 605 s; last: connection refused")
    with pytest.raises(OperatorError, match=r"^mine cannot be installed: n1: `run` .*: no answer within 605 s"):
        start(tmp_path, "apt('kv-server')", "apt-get", lost)


def test_files_that_cannot_be_unpacked_on_a_host_are_one_line_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITBRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "server").write_text("x")
    said = "Traceback (most recent call last):\n  File\nOSError: [Errno 28] No space left on device\n"
    expected = (
        r"^install path .*: n1 cannot unpack it in .*installed.*: status 1, OSError: .* on device: make room there"
    )
    with pytest.raises(OperatorError, match=expected):
        start(tmp_path, f"path({os.fspath(tmp_path / 'server')!r})", "python3", (1, "", said))
