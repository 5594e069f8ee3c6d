"""A plug-in that blocks without `await` while its system starts or stops, so that nothing else can run, nor Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60

PLUGIN = """
import asyncio, socket, time
from harness.sdk import Client, Status, System

SERVE = '''
import socket, sys, time
server = socket.socket()
server.bind((sys.argv[1], 27050))
server.listen()
time.sleep(600)
'''

class Mine(System):
    ports = {"client": 27050}
    ready_timeout_s = READY_S
    def command(self, host):
        return [host.python, "-c", SERVE, host.ip]
    def wait(self):
        with open("waits", "w") as fifo:
            fifo.write("now")
        HOW
    METHOD

class Talk(Client):
    registers = {}
    async def read(self, key):
        return self.registers.get(key)
    async def write(self, key, value):
        self.registers[key] = value
"""
SLEEP, SYSTEM_CALL = "time.sleep(600)", "socket.create_server(('127.0.0.1', 0)).accept()"
METHODS = {
    "command": "def command(self, host):\n        self.wait()",
    "setup": "async def setup(self, host):\n        self.wait()",
    "ready": "async def ready(self, host):\n        self.wait()",
    "status": "async def status(self, host):\n        self.wait()",
    "start_together": "async def start_together(self):\n        self.wait()",
    "stop_together": "async def stop_together(self):\n        self.wait()",
}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a short run of the plug-in, one of whose methods blocks; the run is killed at the end."""
    running: list[subprocess.Popen[str]] = []
    os.mkfifo(tmp_path / "waits")

    def begin(method: str, how: str, ready_s: float, *words: str) -> subprocess.Popen[str]:
        text = PLUGIN.lstrip().replace("METHOD", METHODS[method]).replace("HOW", how)
        (tmp_path / "mine.py").write_text(text.replace("READY_S", str(ready_s)))
        process = subprocess.Popen(
            [sys.executable, "-m", "harness", "run", "mine.py", "--cluster", "local", "--nodes", "1", "--concurrency",
             "2", "--time-limit", "1", "--rate", "50", "--operation-timeout", "0.5", *words],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait(DEADLINE_S)


def wait_until_blocked(tmp_path: Path) -> None:
    """Opening the pipe waits until the plug-in opens its other end, which it does just before it blocks."""
    with open(tmp_path / "waits") as fifo:
        assert fifo.read() == "now"


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, printed


def replicas_left(tmp_path: Path) -> list[str]:
    """Command lines of processes that the run has left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(tmp_path) in line]


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("method", "how"), [("setup", SLEEP), ("setup", SYSTEM_CALL), ("command", SLEEP), ("start_together", SYSTEM_CALL)]
)
def test_a_signal_interrupts_a_blocked_start(
    tmp_path: Path, start: Start, method: str, how: str, number: signal.Signals
) -> None:
    process = start(method, how, ready_s=600.0)
    wait_until_blocked(tmp_path)
    process.send_signal(number)
    status, printed = finish(process)
    assert status == 255, printed
    assert re.search(r"mine\.py:\d+ blocked the harness for \d+ s: a plug-in must await", printed)
    assert "interrupted before the system had started: there is nothing to check" in printed
    assert "Traceback" not in printed and replicas_left(tmp_path) == []


@pytest.mark.cluster
def test_a_signal_during_a_blocked_start_ends_the_series(tmp_path: Path, start: Start) -> None:
    process = start("setup", SLEEP, 600.0, "--test-count", "3")
    wait_until_blocked(tmp_path)
    process.send_signal(signal.SIGINT)
    status, printed = finish(process)
    assert status == 255, printed
    assert "stopped; 2 runs left" in printed and "Traceback" not in printed


@pytest.mark.cluster
def test_a_signal_interrupts_a_blocked_stop_and_the_run_gets_a_verdict(tmp_path: Path, start: Start) -> None:
    process = start("stop_together", SLEEP, ready_s=600.0)
    wait_until_blocked(tmp_path)
    process.send_signal(signal.SIGINT)
    status, printed = finish(process)
    assert status == 2, printed
    assert re.search(
        r"stopping the system: .*mine\.py:\d+: stop_together\(\) raised Blocked: blocked for \d+ s without await",
        printed,
    )
    assert replicas_left(tmp_path) == []


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("setup", r"setup\(n1\) raised Blocked: blocked for \d s without await"),
        ("ready", r"n1 not ready within 0\.5 s"),
        ("status", r"there is no leader .*: status\(n1\) raised Blocked: blocked for \d s without await"),
    ],
)
def test_a_blocked_method_is_interrupted_after_its_timeout_and_named(
    tmp_path: Path, start: Start, method: str, said: str
) -> None:
    process = start(method, SLEEP, ready_s=0.5)
    wait_until_blocked(tmp_path)
    status, printed = finish(process)
    assert status == 254, printed
    assert re.search(r"mine\.py:\d+ blocked the harness for \d s: a plug-in must await", printed)
    assert re.search(rf"harness: mine\.py:\d+: {said}", printed)
    assert replicas_left(tmp_path) == []
