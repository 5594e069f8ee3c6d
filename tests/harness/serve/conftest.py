"""A server of made-up runs on its own port, and requests to it that no browser would send."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.commands.serve import make_server
from harness.serve.guard import loopback_hosts
from harness.serve.launch import Launcher
from harness.store import RunDir, Store

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
DEADLINE_S = 60
"""Timeout of what takes a fraction of a second on an idle machine."""


def make_run(store: Store, minutes: int = 0, name: str = "broker-register-kill", **changes: Any) -> RunDir:
    """A finished run with the files that a page is made of."""
    run = store.create(name, now=NOON + timedelta(minutes=minutes))
    test = {
        "system": "broker", "workload": "register", "nemesis": ["kill"], "cluster": "sim", "seed": minutes, "nodes": 5,
        "settings": {},
    }  # fmt: skip
    run.write_test({**test, **changes.pop("test", {})})
    faults = [{"id": "f1", "nemesis": "kill", "variant": "sigkill", "proven": True, "healed": True, "start_ns": 10**9}]
    results = {
        "valid": True, "reason": "all holds", "ops": {"ok": 2, "fail": 0, "info": 0}, "duration_s": 4.5,
        "faults": faults, "checks": {"linearizable": {"valid": True, "reason": "one key"}},
        "ops_by_f": {"read": {"ok": 2}},
    }  # fmt: skip
    run.write_results({**results, **changes})
    lines = [
        f'{{"index":{i},"time":{i * 1_000_000},"process":0,"type":"{kind}","f":"read","value":null}}\n'
        for i, kind in enumerate(("invoke", "ok", "invoke", "ok"))
    ]
    run.history_path.write_text("".join(lines))
    run.report_path.write_text("<!doctype html><title>report</title>")
    run.finish()
    return run


class Client:
    """Requests to one server."""

    def __init__(self, listener: socket.socket, end: Callable[[], None]) -> None:
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self.end = end
        """Ends the server. Idempotent."""

    def ask(
        self, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers (lower case) and text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body=body, headers=named)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8")
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
        finally:
            connection.close()

    def page(self, path: str) -> str:
        """The text of a page that must exist."""
        status, _, text = self.ask(path)
        assert status == 200, (path, status, text)
        return text

    def raw(self, data: bytes) -> int:
        """Send raw bytes; returns the status of the answer, or 0 if the server closes without one."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S) as connection:
            try:
                connection.sendall(data)
            except OSError:  # the server has answered and closed before all was sent
                pass
            answer = b""
            try:
                while b"\r\n" not in answer and (part := connection.recv(4096)):
                    answer += part
            except ConnectionError:
                pass
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def serve(store: Store) -> Iterator[Callable[..., Client]]:
    """A function that starts a server for `store`; it ends with the test."""
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from harness.serve.app import RunList, make_app

    ends: list[Callable[[], None]] = []

    def start(launcher: Launcher | None = None, port: int = 0) -> Client:
        listener = socket.create_server(("127.0.0.1", port))
        port = listener.getsockname()[1]
        hosts = loopback_hosts(port)
        server = make_server(
            make_app(RunList(store), hosts=hosts, launcher=launcher, is_ending=lambda: bool(server.should_exit))
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(DEADLINE_S)
            listener.close()
            assert not thread.is_alive()

        ends.append(end)
        return Client(listener, end)

    yield start
    for end in ends:
        end()
