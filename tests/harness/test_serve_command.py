"""`harness serve`: from the command line to a page and to its end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from harness.commands import serve as module
from harness.errors import OperatorError
from harness.store import Store

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "serve", *words],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_on_a_signal_even_with_an_open_live_view(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    run = Store(tmp_path / "store").create("t")
    process = start("--port", "0", cwd=tmp_path)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.match(r"(http://127\.0\.0\.1:\d+/)  1 run; read-only; stop it with Ctrl-C\n", line)
        assert address is not None, line
        with urllib.request.urlopen(address[1], timeout=DEADLINE_S) as answer:
            assert run.name in answer.read().decode()
        # An open live view must not keep the server running.
        with urllib.request.urlopen(f"{address[1]}runs/{run.name}/events", timeout=DEADLINE_S) as stream:
            assert stream.readline() == b"event: state\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        run.release()
    assert process.returncode == (0 if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in said


def test_serve_survives_more_connections_than_it_has_descriptors(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    run = Store(tmp_path / "store").create("t")
    run.release()
    process = start("--port", "0", cwd=tmp_path)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        urllib.request.urlopen(address, timeout=DEADLINE_S).close()  # from here on it accepts connections
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (512, 512))
        with contextlib.ExitStack() as stack:
            process.send_signal(signal.SIGSTOP)  # so that all connections are pending when it resumes
            for _ in range(700):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2])))
            process.send_signal(signal.SIGCONT)
            with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
                assert run.name in answer.read().decode()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert (process.returncode, said) == (0, "")


def test_a_missing_store_or_a_port_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    process = start("--store", "nowhere", cwd=tmp_path)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 254 and "there is no store at" in said and len(said.splitlines()) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--port", str(port), "--allow-run", cwd=tmp_path)
        _, said = process.communicate(timeout=DEADLINE_S)
    assert (
        process.returncode == 254
        and said == f"harness: --port {port}: already in use: choose another port, or 0 for any free one\n"
    )


def test_serve_without_its_packages_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(OperatorError, match=r"harness serve needs starlette: .*pip install 'splitbrain\[serve\]'"):
        module.require_serve()
