"""Connections at their limits, step by step: which are accepted, which make room, and how long they may wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

connections = pytest.importorskip("harness.serve.connections", reason="the extra `serve` is not installed")
accepting = pytest.importorskip("harness.serve.accepting", reason="the extra `serve` is not installed")

MAX, SPARE = accepting.MAX_CONNECTIONS, accepting.SPARE_CONNECTIONS


class Open:
    """A connection of the server, as the acceptor sees it."""

    def __init__(self, waiting_since_s: float, *, is_silent: bool = True, has_unread: bool = False) -> None:
        self.waiting_since_s, self.is_silent, self.has_unread = waiting_since_s, is_silent, has_unread
        self.given_up = 0

    def give_up(self) -> None:
        self.given_up += 1


def with_acceptor(scenario: Callable[[Any, set[Any], socket.socket], Awaitable[None]]) -> None:
    """Run a scenario with an acceptor, the server's connections, and the listener."""

    async def run() -> None:
        connections: set[Any] = set()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server: Any = SimpleNamespace(server_state=SimpleNamespace(connections=connections))
            acceptor = accepting.Acceptor(listener, server)
            acceptor._make_protocol = asyncio.Protocol
            try:
                await scenario(acceptor, connections, listener)
            finally:
                acceptor.close()

    asyncio.run(run())


def test_the_connection_that_has_been_idle_longest_makes_room() -> None:
    async def scenario(acceptor: Any, connections: set[Any], listener: socket.socket) -> None:
        now_s = asyncio.get_running_loop().time()
        connections |= {Open(now_s - 90 + number) for number in range(10, MAX - 4)}
        busy, sending = Open(now_s - 99, is_silent=False), Open(now_s - 98, has_unread=True)
        oldest, next_one = Open(now_s - 97), Open(now_s - 96)
        connections |= {busy, sending, oldest, next_one}
        connections |= {Open(now_s) for _ in range(MAX - 1 - len(connections))}
        assert len(connections) == MAX - 1
        for freed in (oldest, next_one):
            assert acceptor._has_room() and freed.given_up == 1
            assert [each for each in connections if each.given_up] == [freed]
            connections.remove(freed)
            connections.add(Open(now_s))

    with_acceptor(scenario)


def test_a_full_server_accepts_a_few_more_after_a_while_and_waits_anew_once_a_slot_was_free() -> None:
    polls = round(accepting.FULL_TIMEOUT_S / accepting.POLL_INTERVAL_S)

    async def scenario(acceptor: Any, connections: set[Any], listener: socket.socket) -> None:
        connections |= {Open(0, is_silent=False) for _ in range(MAX - 1)}
        for _ in range(2):
            assert [acceptor._has_room() for _ in range(polls + 1)] == [False] * polls + [True]
            assert acceptor._has_room(), "those that have waited as long are refused at once"
            free = connections.pop()
            assert acceptor._has_room()
            connections.add(free)
        connections.add(Open(0))
        assert acceptor._has_room(), "an idle one makes room"
        connections.add(Open(0, is_silent=False))
        for each in connections:
            each.is_silent = False
        assert not acceptor._has_room()
        acceptor._full_polls = polls + 1
        connections |= {Open(0, is_silent=False) for _ in range(MAX + SPARE - 1 - len(connections))}
        assert acceptor._has_room()
        connections.add(Open(0, is_silent=False))
        assert not acceptor._has_room()

    with_acceptor(scenario)


def test_connections_that_are_being_accepted_count() -> None:
    async def scenario(acceptor: Any, connections: set[Any], listener: socket.socket) -> None:
        connections |= {Open(0, is_silent=False) for _ in range(MAX - 2)}
        with socket.create_connection(listener.getsockname()):
            acceptor._accept_one()
            assert not acceptor._has_room()
            await acceptor.wait_closed()
            await asyncio.sleep(0)
            assert acceptor._has_room()

    with_acceptor(scenario)


def test_an_acceptor_without_a_descriptor_does_not_spin() -> None:
    class Refusing(socket.socket):
        __slots__ = ()

        def accept(self) -> tuple[socket.socket, Any]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scenario(acceptor: Any, connections: set[Any], listener: socket.socket) -> None:
        listener.__class__ = Refusing
        acceptor._accept_one()
        assert acceptor._timer is not None
        assert not asyncio.get_running_loop().remove_reader(listener), "it looks again later"

    with_acceptor(scenario)


def test_what_is_being_accepted_when_the_acceptor_closes_is_closed() -> None:
    async def scenario(acceptor: Any, connections: set[Any], listener: socket.socket) -> None:
        with socket.create_connection(listener.getsockname(), timeout=60) as client:
            acceptor._accept_one()
            acceptor.close()
            assert acceptor._opening
            await acceptor.wait_closed()
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
            await asyncio.sleep(0)
            assert not acceptor._opening

    with_acceptor(scenario)


def test_a_paused_acceptor_that_is_closed_does_not_listen_again() -> None:
    async def scenario(acceptor: Any, connections: set[Any], listener: socket.socket) -> None:
        connections |= {Open(0, is_silent=False) for _ in range(MAX - 1)}
        acceptor._accept_one()
        timer = acceptor._timer
        assert timer is not None
        acceptor.close()
        acceptor.close()
        assert timer.cancelled() and not asyncio.get_running_loop().remove_reader(listener)

    with_acceptor(scenario)


class Clock:
    """The part of an event loop that a connection uses, at a time that a test sets."""

    def __init__(self) -> None:
        self.now_s, self.due = 100.0, list[tuple[float, Any]]()

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Any) -> Mock:
        self.due.append((self.now_s + delay_s, call))
        return Mock()


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection that has just been made, without uvicorn's part."""
    for name in ("connection_made", "connection_lost", "on_response_complete", "pause_writing", "resume_writing"):
        monkeypatch.setattr(connections.H11Protocol, name, lambda *arguments: None)
    made = object.__new__(connections.PatientProtocol)
    made.loop, made.transport, made.cycle = Clock(), Mock(), None
    made.connections = {made, "another"}
    made.connection_made(made.transport)
    return made


def test_a_connection_without_a_request_ends_when_its_patience_does(protocol: Any) -> None:
    clock = protocol.loop
    assert [at_s for at_s, _ in clock.due] == [100 + connections.PATIENCE_S]
    clock.now_s += 10
    protocol.on_response_complete()
    for at_s in (130.0, 140.0):
        assert not protocol.transport.abort.called
        clock.now_s, look = clock.due[-1]
        assert clock.now_s == at_s, "a wait that starts meanwhile has its own full time"
        look()
    protocol.transport.abort.assert_called_once_with()
    assert protocol.connections == {"another"}, "it does not count while its end is in progress"
    assert len(clock.due) == 2


@pytest.mark.parametrize("ends", ["read", "not read"])
def test_a_connection_at_work_ends_only_if_its_client_does_not_read(protocol: Any, ends: str) -> None:
    clock = protocol.loop
    protocol.cycle = SimpleNamespace(response_complete=False, more_body=False)
    clock.now_s, look = clock.due[-1]
    look()
    assert not protocol.transport.abort.called and clock.due[-1][0] == 160
    clock.now_s = 150
    protocol.pause_writing()
    if ends == "read":
        clock.now_s = 155
        protocol.resume_writing()
    clock.now_s = 160
    clock.due[-1][1]()
    assert not protocol.transport.abort.called
    clock.now_s, look = clock.due[-1]
    assert clock.now_s == (185 if ends == "read" else 180)
    look()
    assert protocol.transport.abort.called is (ends == "not read")


def test_a_lost_connection_is_not_looked_at_again(protocol: Any) -> None:
    protocol.connection_lost(None)
    protocol._timer.cancel.assert_called_once_with()


@pytest.mark.parametrize(
    ("response_complete", "more_body", "is_silent"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_a_connection_is_silent_unless_a_request_is_being_answered(
    protocol: Any, response_complete: bool, more_body: bool, is_silent: bool
) -> None:
    assert protocol.is_silent
    protocol.cycle = SimpleNamespace(response_complete=response_complete, more_body=more_body)
    assert protocol.is_silent is is_silent
