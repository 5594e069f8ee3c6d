"""The interpreter of the nodes: `--set python=PROGRAM`."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import main
from harness.errors import OperatorError
from harness.systems.broker import BrokerSystem
from harness.systems.node_program import local_python, node_program
from nemesis.mechanisms.shell import ShellError


class Hosts:
    """A cluster that answers the question for the version of an interpreter; `remote` hosts have files of their own."""

    def __init__(self, status: int = 0, said: str = "") -> None:
        self.status, self.said = status, said
        self.asked: list[tuple[str, str]] = []
        self.files: dict[str, bytes] = {}

    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 10.0
    ) -> tuple[int, str, str]:
        self.asked.append((host, argv[0]))
        return self.status, "", self.said


class RemoteHosts(Hosts):
    def python(self, host: str) -> str:
        return "/usr/bin/python3"

    def data_dir(self, host: str) -> str:
        return f"/data/{host}"

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        self.files[path] = content

    async def fetch(self, hosts: Any = None) -> Sequence[Exception]:
        return []


class Unreachable(RemoteHosts):
    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 10.0
    ) -> tuple[int, str, str]:
        raise ShellError(host, argv, 1, "no such file")


def the_program(cluster: Any, python: str) -> list[str]:
    return list(asyncio.run(node_program(cluster, "n1", "broker", ["broker"], python=python)).argv)


def test_the_given_interpreter_runs_the_node() -> None:
    other = shutil.which("python3")
    assert the_program(Hosts(), "own") == [sys.executable, "-m", "node", "broker"]
    hosts = Hosts()
    assert the_program(hosts, "python3") == [other, "-m", "node", "broker"]
    assert hosts.asked == [("n1", "python3")]


def test_remote_hosts_have_interpreters_of_their_own() -> None:
    hosts = RemoteHosts()
    assert the_program(hosts, "own") == ["/usr/bin/python3", "/data/n1/node.pyz", "broker"]
    assert hosts.asked == []
    assert the_program(hosts, "only-there") == ["only-there", "/data/n1/node.pyz", "broker"]
    assert hosts.asked == [("n1", "only-there")]


@pytest.mark.parametrize(
    ("cluster", "python", "problem"),
    [
        (SimpleNamespace(), "pypy3", "simulated nodes run inside the harness: run the harness itself with pypy3"),
        (Hosts(), "no-such-python", "there is no such program: install it, or give its path"),
        (Hosts(3), "python3", "the node needs Python 3.11 or newer: give another interpreter"),
        (Hosts(1, "trace\nImportError: x\n"), "python3", r"it does not run on n1 \(ImportError: x\): install it"),
        (RemoteHosts(127), "only-here", r"it does not run on n1 \(status 127\): install it"),
        (Unreachable(), "only-here", r"it does not run on n1 \(no such file\): install it"),
    ],
)
def test_an_interpreter_that_cannot_run_the_node_is_refused(cluster: Any, python: str, problem: str) -> None:
    with pytest.raises(OperatorError, match=f"^--set python={python}: {problem}$"):
        the_program(cluster, python)


def test_doctor_judges_the_given_interpreter() -> None:
    assert BrokerSystem.program_commands({})["broker"] == (sys.executable, "-m", "node")
    assert BrokerSystem.program_commands({"python": "python3"})["broker"][0] == shutil.which("python3")
    assert local_python("no-such-python") == "no-such-python"


@pytest.mark.cluster
def test_a_run_starts_every_node_with_the_given_interpreter(tmp_path: Path) -> None:
    wrapper, seen = tmp_path / "other-python", tmp_path / "seen"
    wrapper.write_text(f'#!/bin/sh\necho "$1 $2 $3" >>{seen}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    words = ["--nodes", "3", "--workload", "log", "--nemesis", "none", "--time-limit", "2", "--rate", "20"]
    status = main(
        ["run", "--cluster", "local", *words, "--store", str(tmp_path / "store"), "--set", f"python={wrapper}"]
    )
    assert status == 0
    started = [line for line in seen.read_text().splitlines() if line.startswith("-m")]
    assert sorted(started) == ["-m node broker"] * 3 + ["-m node nameserver"]


def test_simulated_nodes_have_no_interpreter_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "sim", "--nodes", "3", "--workload", "log", "--time-limit", "2"]
    assert main(["run", *words, "--store", str(tmp_path), "--set", "python=pypy3"]) == 254
    assert "simulated nodes run inside the harness" in capsys.readouterr().err
