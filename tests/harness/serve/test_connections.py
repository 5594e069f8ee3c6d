"""Clients that send nothing, never finish a request, or read no answer: their connections end, others are served."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.serve.launch import Launcher
from harness.store import RunDir, Store

from .conftest import DEADLINE_S, Client, make_run

connections = pytest.importorskip("harness.serve.connections", reason="the extra `serve` is not installed")
accepting = pytest.importorskip("harness.serve.accepting", reason="the extra `serve` is not installed")

PATIENCE_S = 0.5


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", PATIENCE_S)


def connect(stack: contextlib.ExitStack, client: Client) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", client.port), timeout=DEADLINE_S))


def connect_by_http(stack: contextlib.ExitStack, client: Client) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
    return stack.enter_context(contextlib.closing(connection))


@pytest.fixture
def run_at_work(store: Store) -> Iterator[RunDir]:
    run = store.create("t")
    run.write_test({})
    run.history_path.write_bytes(b"")
    yield run
    run.release()


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server ends the connection; raises TimeoutError if it does not."""
    got = b""
    with contextlib.suppress(ConnectionError):  # a reset counts as closed
        while part := connection.recv(65_536):
            got += part
    return got


def test_idle_connections_do_not_keep_other_clients_out(serve: Callable[..., Client]) -> None:
    """Within seconds, long before any of them times out."""
    client = serve()
    with contextlib.ExitStack() as stack:
        held = [connect(stack, client) for _ in range(2 * accepting.MAX_CONNECTIONS)]
        for connection in held[accepting.MAX_CONNECTIONS :]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert client.ask("/")[0] == 200
        assert read_to_end(held[0]) == b"", "the oldest of them made room"


def test_many_simultaneous_requests_are_all_answered(serve: Callable[..., Client], store: Store) -> None:
    """They exceed the limit of connections, and wait in the kernel's queue."""
    run = make_run(store)
    client = serve()
    with concurrent.futures.ThreadPoolExecutor(2 * accepting.MAX_CONNECTIONS) as pool:
        answers = list(pool.map(client.ask, ["/", f"/runs/{run.name}"] * 2 * accepting.MAX_CONNECTIONS))
    assert {status for status, _, _ in answers} == {200}


def test_a_client_that_has_sent_a_request_is_answered_even_if_the_server_was_busy(
    serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests arrive while the server is busy for longer than an idle connection keeps its slot."""
    client = serve()
    has_room = accepting.Acceptor._has_room
    is_full, is_sent = threading.Event(), threading.Event()

    def look_late(acceptor: Any) -> bool:
        if len(acceptor._server.server_state.connections) == accepting.MAX_CONNECTIONS - 1:
            is_full.set()
            assert is_sent.wait(DEADLINE_S)
        return bool(has_room(acceptor))

    monkeypatch.setattr(accepting.Acceptor, "_has_room", look_late)
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nConnection: close\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        waiting = [connect(stack, client) for _ in range(accepting.MAX_CONNECTIONS)]
        assert is_full.wait(DEADLINE_S)
        monkeypatch.setattr(accepting, "FULL_TIMEOUT_S", 0.3)  # not before: connecting takes long on a busy machine
        time.sleep(2 * accepting.FULL_TIMEOUT_S)
        for connection in waiting:
            connection.sendall(request)
        is_sent.set()
        assert {read_to_end(connection)[:12] for connection in waiting} == {b"HTTP/1.1 200"}


def test_clients_are_answered_503_while_all_connections_are_busy(
    serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "FULL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connections.PatientProtocol, "is_silent", False)
    client = serve()
    with contextlib.ExitStack() as stack:
        for _ in range(accepting.MAX_CONNECTIONS - 1):
            connect(stack, client)
        for _ in range(20):
            assert client.ask("/")[0] == 503
    deadline_s = time.monotonic() + DEADLINE_S
    while client.ask("/")[0] == 503:
        assert time.monotonic() < deadline_s, "503 although the other clients have disconnected"


def test_clients_wait_while_the_server_has_no_free_descriptor(
    serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()
    refusals = 3

    class Refusing(socket.socket):
        __slots__ = ()

        def accept(self) -> tuple[socket.socket, Any]:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    monkeypatch.setattr(client.listener, "__class__", Refusing)
    assert client.ask("/")[0] == 200
    assert refusals == 0


def test_live_views_are_not_closed_to_make_room(run_at_work: RunDir, serve: Callable[..., Client]) -> None:
    client = serve()
    with contextlib.ExitStack() as stack:
        view = connect_by_http(stack, client)
        view.request("GET", f"/runs/{run_at_work.name}/events")
        answer = view.getresponse()
        assert answer.readline() == b"event: state\n"
        for _ in range(2 * accepting.MAX_CONNECTIONS):
            connect(stack, client)
        assert client.ask("/")[0] == 200
        run_at_work.write_results({"valid": True})
        run_at_work.finish()
        assert b'"verdict": "valid"' in answer.read(), "the view continued to its end"


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n"],
    ids=["nothing", "half a line", "half a head"],
)
@pytest.mark.usefixtures("impatient")
def test_a_connection_without_a_complete_request_is_closed(serve: Callable[..., Client], sent: bytes) -> None:
    client = serve()
    with contextlib.ExitStack() as stack:
        connection = connect(stack, client)
        connection.sendall(sent.replace(b"PORT", str(client.port).encode()))
        assert read_to_end(connection) == b""
        assert client.ask("/")[0] == 200


@pytest.mark.usefixtures("impatient")
def test_a_connection_without_a_complete_second_request_is_closed(serve: Callable[..., Client]) -> None:
    """Its first byte ends uvicorn's own timeout between two requests."""
    client = serve()
    with contextlib.ExitStack() as stack:
        connection = connect(stack, client)
        host = f"Host: 127.0.0.1:{client.port}\r\n".encode()
        connection.sendall(b"HEAD / HTTP/1.1\r\n" + host + b"\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET")
        assert b"HTTP" not in read_to_end(connection)


@pytest.mark.usefixtures("impatient")
def test_a_connection_without_a_complete_form_is_closed(store: Store, serve: Callable[..., Client]) -> None:
    client = serve(Launcher(store.root))
    with contextlib.ExitStack() as stack:
        connection = connect(stack, client)
        lines = (
            "POST /new HTTP/1.1", f"Host: 127.0.0.1:{client.port}", "Content-Length: 100",
            "Content-Type: application/x-www-form-urlencoded", "", "token=",
        )  # fmt: skip
        connection.sendall("\r\n".join(lines).encode())
        assert read_to_end(connection) == b""
        assert client.ask("/")[0] == 200


@pytest.mark.usefixtures("impatient")
def test_a_connection_whose_client_does_not_read_the_answer_is_closed(
    tmp_path: Path, store: Store, serve: Callable[..., Client]
) -> None:
    client = serve()
    run = make_run(store)
    with open(run.path / "some.bin", "wb") as file:
        file.truncate(64 << 20)  # more than all buffers in between take

    def is_open() -> bool:
        paths = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        return any(path.endswith("/some.bin") for path in paths)

    with contextlib.ExitStack() as stack:
        connection = connect(stack, client)
        head = f"GET /runs/{run.name}/download/some.bin HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1) and is_open()
        deadline_s = time.monotonic() + DEADLINE_S
        while is_open() and time.monotonic() < deadline_s:
            client.ask("/")
        assert not is_open()
        assert len(read_to_end(connection)) < 64 << 20


def test_a_connection_that_keeps_requesting_or_watching_stays_open(
    run_at_work: RunDir, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 2.0)
    client = serve()
    with contextlib.ExitStack() as stack:
        asking, watching = connect_by_http(stack, client), connect_by_http(stack, client)
        watching.request("GET", f"/runs/{run_at_work.name}/events")
        view = watching.getresponse()
        asking.connect()
        first = asking.sock
        end_s = time.monotonic() + 3.0
        while time.monotonic() < end_s:
            asking.request("GET", "/")
            assert asking.getresponse().read()
            assert asking.sock is first, "on one connection"
        run_at_work.write_results({"valid": True})
        run_at_work.finish()
        assert b'"verdict": "valid"' in view.read()
