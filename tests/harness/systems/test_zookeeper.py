"""The plug-in of ZooKeeper: its protocol against a fake server, and its configuration."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from harness.sdk import Host, Refused, Status
from harness.systems import zookeeper
from harness.systems.planned_hosts import PlannedHosts
from harness.systems.zookeeper import (
    BAD_VERSION,
    CLOSE,
    CREATE,
    GET_CHILDREN,
    GET_DATA,
    NO_NODE,
    NODE_EXISTS,
    PING,
    SET_DATA,
    SYNC,
    Refusal,
    Session,
    ZooKeeper,
    ZooKeeperClient,
    counted,
    opened,
    text,
    texts,
)
from tests.harness.systems.served import over_a_connection

SESSION_ID = 77
Answer = bytes | int | None
"""A body, the number of an error, or None to close the connection."""


def stat(version: int = 0, owner: int = 0) -> bytes:
    return struct.pack(">qqqqiiiqiiq", 3, 4, 0, 0, version, 0, 0, owner, 0, 0, 0)


def data(value: str, version: int) -> bytes:
    return text(value) + stat(version)


def with_server(
    answers: Sequence[Answer], scenario: Callable[[Session], Awaitable[Any]], *, timeout_ms: int = 8000
) -> tuple[Any, list[int]]:
    """The result of `scenario` with a server that gives these answers, one per request, and the kinds of requests."""
    asked: list[int] = []

    async def frame(reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert len(await frame(reader)) == 45  # protocol, zxid, timeout, session, 16 bytes of password, read-only
        writer.write(counted(struct.pack(">iiq", 0, timeout_ms, SESSION_ID), counted(bytes(16)), b"\0"))
        for answer in answers:
            number, kind = struct.unpack_from(">ii", await frame(reader))
            asked.append(kind)
            if answer is None:
                break
            error, body = (answer, b"") if isinstance(answer, int) else (0, answer)
            writer.write(counted(struct.pack(">iqi", number, 9, error), body))
        writer.close()

    return over_a_connection(serve, opened, scenario), asked


def calling(
    answers: Sequence[Answer], call: Callable[[ZooKeeperClient], Awaitable[Any]], reads: str = "local"
) -> tuple[Any, list[int]]:
    """What a method of the client returns or raises, and the kinds of its requests."""

    async def scenario(session: Session) -> Any:
        client = ZooKeeperClient()
        client.session, client.settings = session, {"reads": reads}
        try:
            return await call(client)
        except (Refused, OSError, EOFError) as raised:
            return raised

    return with_server(answers, scenario)


def test_texts_are_encoded_with_their_length() -> None:
    assert text("ab") == b"\0\0\0\2ab"
    assert texts(struct.pack(">i", 2) + text("a") + text("bc")) == ["a", "bc"]


@pytest.mark.parametrize(("reads", "before"), [("local", []), ("sync", [SYNC]), ("quorum", [SET_DATA])])
def test_the_reads_setting_decides_which_request_precedes_a_read(reads: str, before: list[int]) -> None:
    answers = [*(b"" for _ in before), data("5", 1)]
    assert calling(answers, lambda client: client.read(1), reads) == (5, [*before, GET_DATA])


def test_a_missing_node_reads_as_none_and_is_created_by_a_write() -> None:
    assert calling([NO_NODE], lambda client: client.read(1)) == (None, [GET_DATA])
    written, asked = calling([NO_NODE, NODE_EXISTS, stat()], lambda client: client.write(1, 5))
    assert written is None and asked == [SET_DATA, CREATE, SET_DATA]


def test_compare_and_set_compares_again_after_a_concurrent_write() -> None:
    answers = [data("5", 1), BAD_VERSION, data("5", 2), stat(3)]
    assert calling(answers, lambda client: client.cas(1, 5, 6))[0] is True
    answers = [data("5", 1), BAD_VERSION, data("7", 2)]
    assert calling(answers, lambda client: client.cas(1, 5, 6))[0] is False


def test_only_definite_errors_of_the_server_are_refusals() -> None:
    refused, _ = calling([NODE_EXISTS], lambda client: client.add(3))
    assert isinstance(refused, Refusal) and refused.error == NODE_EXISTS
    for answer, kind in ((-4, OSError), (None, EOFError)):
        lost, _ = calling([answer], lambda client: client.add(3))
        assert isinstance(lost, kind) and not isinstance(lost, Refused)


def test_opening_an_expired_session_is_an_error() -> None:
    async def scenario(session: Session) -> None:
        raise AssertionError("the session opened")

    with pytest.raises(OSError, match="expired"):
        with_server([], scenario, timeout_ms=0)


def test_an_idle_session_is_kept_alive_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is held for longer than a session timeout would be lost otherwise."""
    monkeypatch.setattr(zookeeper, "SESSION_MS", 30)
    asked: list[tuple[int, int]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def frame() -> bytes:
            return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))

        await frame()
        writer.write(counted(struct.pack(">iiq", 0, 30, SESSION_ID), counted(bytes(16)), b"\0"))
        while not asked or asked[-1][1] != CLOSE:
            number, kind = struct.unpack_from(">ii", await frame())
            asked.append((number, kind))
            if struct.pack(">ii", number, kind) == PING:
                pinged.set()
            writer.write(counted(struct.pack(">iqi", number, 9, 0), data("5", 1) if kind == GET_DATA else b""))
        ended.set()
        writer.close()

    async def scenario() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = ZooKeeperClient()
        client.settings = {"reads": "local"}
        port = server.sockets[0].getsockname()[1]
        cluster: Any = PlannedHosts(())
        client.host = Host("n1", 1, cluster, {"client": port}, lambda host, name: name)
        await client.open()
        await pinged.wait()
        found = await client.read(1)
        await client.close()
        await ended.wait()
        server.close()
        return found, client.pings

    async def main() -> Any:
        found, pings = await asyncio.wait_for(scenario(), 20)
        await asyncio.wait([pings], timeout=20)
        return found, pings.done()

    pinged, ended = asyncio.Event(), asyncio.Event()
    assert asyncio.run(main()) == (5, True), "the answer to a ping is not taken for another"
    assert struct.unpack(">ii", PING) in asked and asked[-1] == (2, CLOSE)


def test_only_the_session_that_owns_a_lock_releases_it() -> None:
    ours, asked = calling([stat(owner=SESSION_ID), b""], lambda client: client.unlock("lock1"))
    assert ours is None and len(asked) == 2
    _, asked = calling([stat(owner=SESSION_ID + 1)], lambda client: client.unlock("lock1"))
    assert len(asked) == 1, "a lock of another session is left alone"
    assert calling([NODE_EXISTS], lambda client: client.lock("lock1"))[0] is False


def test_a_job_that_another_client_took_is_skipped() -> None:
    names = struct.pack(">i", 2) + text("0000000002") + text("0000000001")
    answers = [names, data("11", 0), NO_NODE, data("12", 0), b""]
    found, asked = calling(answers, lambda client: client.dequeue())
    assert found == 12 and asked[0] == GET_CHILDREN


def test_a_queue_is_empty_only_if_a_new_listing_has_no_jobs() -> None:
    def names(*found: str) -> bytes:
        return struct.pack(">i", len(found)) + b"".join(map(text, found))

    took = [names("0000000001"), NO_NODE]  # a second job came before another client took the first
    assert calling([*took, names("0000000002"), data("12", 0), b""], lambda client: client.dequeue())[0] == 12
    found, asked = calling([*took, names()], lambda client: client.dequeue())
    assert found is None and asked == [GET_CHILDREN, GET_DATA, GET_CHILDREN]


def test_the_configuration_names_every_server() -> None:
    system = ZooKeeper()
    cluster: Any = PlannedHosts(())
    system.hosts = [Host(f"n{n}", n, cluster, ZooKeeper.ports, lambda host, name: name) for n in (1, 2, 3)]
    files = system.files(system.hosts[1])
    assert files["zk/myid"] == "2"
    assert "server.1=127.0.0.1:2888:3888\nserver.2=127.0.0.2:2888:3888\n" in files["zoo.cfg"]
    assert "clientPortAddress=127.0.0.2" in files["zoo.cfg"]
    system.settings = {"trust_empty_snapshot": "true"}
    assert "-Dzookeeper.snapshot.trust.empty=true" in system.command(system.hosts[1])


def test_the_role_and_epoch_of_a_server_are_read_from_its_answer_to_srvr(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"Zookeeper version: 3.9.3\nReceived: 3\nZxid: 0x500000021\nMode: %s\nNode count: 12\n"

    async def ask(mode: bytes) -> Status:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readexactly(4) == b"srvr"
            writer.write(said % mode if mode else b"This ZooKeeper instance is not currently serving requests\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        host = Host("n1", 1, PlannedHosts(()), {"client": port}, lambda host, name: name)  # type: ignore[arg-type]
        async with server:
            return await zookeeper.ZooKeeper().status(host)

    assert asyncio.run(ask(b"leader")) == Status(leads=True, term=5)
    assert asyncio.run(ask(b"follower")) == Status(leads=False, term=5)
    with pytest.raises(KeyError):
        asyncio.run(ask(b""))
