"""Errors in a user's client during a run: the verdict says where the mistake is, with file and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

PLUGIN = """
import asyncio
from harness.sdk import Client, Refused, System

SERVE = '''
import socket, sys, time
server = socket.socket()
server.bind((sys.argv[1], 27050))
server.listen()
time.sleep(600)
'''

class Mine(System):
    ports = {"client": 27050}
    def command(self, host):
        return [host.python, "-c", SERVE, host.ip]

class Talk(Client):
    registers = {}
    async def read(self, key):
        return self.registers.get(key)
    async def write(self, key, value):
        self.registers[key] = value
"""


def run(tmp_path: Path, client: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """(exit status, results.json, everything printed) of a short run with more methods in the client."""
    (tmp_path / "mine.py").write_text(PLUGIN.lstrip() + client)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", "mine.py", "--cluster", "local", "--nodes", "1", "--concurrency", "2",
         "--time-limit", "2", "--rate", "50", "--operation-timeout", "0.5", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    found = sorted((tmp_path / "store").glob("*/2*/results.json"))
    return done.returncode, json.loads(found[-1].read_text()) if found else {}, done.stdout


@pytest.mark.cluster
def test_a_correct_client_gives_a_valid_run(tmp_path: Path) -> None:
    status, results, printed = run(tmp_path, "")
    assert (status, results["valid"]) == (0, True), printed


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ("    async def open(self):\n        raise KeyError('token')\n", "open: KeyError: 'token' (mine.py:24)"),
        ("    async def read(self, key):\n        return key + None\n", "read: TypeError: unsupported operand"),
        (
            "    async def read(self, key):\n        return {1, 2}\n",
            "read returned {1, 2}, which JSON cannot represent (Object of type set is not JSON serializable) (mine.",
        ),
        (
            "    async def read(self, key):\n        await asyncio.sleep(600)\n"
            "    async def write(self, key, value):\n        await self.read(key)\n",
            "times: timeout, most of them waiting at mine.py:24)",
        ),
        ("    async def read(self, key):\n        raise KeyboardInterrupt\n", "read: KeyboardInterrupt (mine.py:24)"),
        (
            "    async def read(self, key):\n        it = asyncio.Future()\n        it.cancel()\n        await it\n",
            "read: CancelledError (mine.py:26)",
        ),
        ("    async def read(self, key):\n        raise BaseException(7)\n", "read: BaseException: 7 (mine.py:24)"),
    ],
)
def test_the_results_report_a_mistake_of_a_client(tmp_path: Path, client: str, expected: str) -> None:
    status, results, printed = run(tmp_path, client)
    told = json.dumps([results["reason"], results["errors"], results["unexpected_errors"]])
    assert expected in told.replace('\\"', '"'), printed
    assert results["valid"] == "unknown"
    if expected.startswith(("open", "times")):  # no operation succeeded: the verdict says why
        assert expected in results["reason"]
    assert status == (0 if results["valid"] is True else 2), printed


@pytest.mark.cluster
def test_a_workload_that_the_client_does_not_support_is_refused(tmp_path: Path) -> None:
    status, results, printed = run(tmp_path, "", "--workload", "cas-register")
    assert (status, results) == (254, {})
    assert printed.startswith("harness: workload cas-register needs the method cas, which client Talk lacks")
    assert printed.count("\n") == 1


DRIVER = """
    async def open(self):
        self.calls = 0
    async def read(self, key):
        return await asyncio.to_thread(self.registers.get, key)
    async def write(self, key, value):
        self.calls += 1
        await asyncio.to_thread(HELD.wait if self.calls == 2 else int)  # the second call of each connection blocks
        self.registers[key] = value

import threading
HELD = threading.Event()
"""


@pytest.mark.cluster
def test_clients_that_block_threads_delay_neither_faults_nor_the_end(tmp_path: Path) -> None:
    """More calls than asyncio has threads: the harness's own calls in threads must not queue behind them."""
    status, results, printed = run(
        tmp_path, DRIVER, "--nemesis", "pause", "--nemesis-interval", "2", "--time-limit", "8", "--concurrency", "12",
        "--operation-timeout", "1",
    )  # fmt: skip
    assert (status, results["valid"]) == (0, True), printed
    assert results["ops"]["info"] > 32, printed


@pytest.mark.cluster
@pytest.mark.parametrize(
    "begun",
    [
        "threading.Thread(target=time.sleep, args=[600]).start()",
        "self.task = asyncio.create_task(keep_alive())",
    ],
)
def test_threads_and_tasks_that_a_client_leaves_running_do_not_hold_up_the_run(tmp_path: Path, begun: str) -> None:
    client = f"""
    async def open(self):
        {begun}

async def keep_alive():
    while True:
        try:
            await asyncio.sleep(1)
        except:
            pass

import threading, time
"""
    status, results, printed = run(tmp_path, client)
    assert (status, results["valid"]) == (0, True), printed
