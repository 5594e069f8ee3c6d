"""The plug-in of MariaDB: its protocol against a fake server, and its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sdk import Host, Refused
from harness.systems.mariadb import MariaDB, MariaDBClient, Session, is_end, length_at, opened, values_of
from harness.systems.planned_hosts import PlannedHosts
from harness.systems.sql import SqlError
from tests.harness.systems.served import over_a_connection

OK, EOF = b"\0\1\0\2\0\0\0", b"\xfe\0\0\2\0"
GREETING = b"\x0a10.11.19-MariaDB\0" + bytes(40)


def error(number: int) -> bytes:
    return b"\xff" + number.to_bytes(2, "little") + b"#HY000no such luck"


def text(value: str | None) -> bytes:
    if value is None:
        return b"\xfb"
    data = value.encode()
    size = bytes([len(data)]) if len(data) < 251 else b"\xfc" + len(data).to_bytes(2, "little")
    return size + data


def rows(*found: Sequence[str | None]) -> list[bytes]:
    """The packets of a result: the number of columns, their definitions, and the rows."""
    columns = len(found[0])
    return [bytes([columns]), *[b"\3def"] * columns, EOF, *(b"".join(map(text, row)) for row in found), EOF]


def with_server(
    answers: Sequence[Sequence[bytes] | None],
    scenario: Callable[[Session], Awaitable[Any]],
    *,
    greeting: bytes = GREETING,
    login: Sequence[bytes] = (OK,),
) -> tuple[Any, list[bytes]]:
    """The result of `scenario` with a server that answers each statement with these packets (None: it closes), and the
    packets that it received after its greeting, without their headers."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def receive() -> int:
            head = await reader.readexactly(4)
            asked.append(await reader.readexactly(int.from_bytes(head[:3], "little")))
            return head[3]

        def send(number: int, packet: bytes) -> None:
            writer.write(len(packet).to_bytes(3, "little") + bytes([number]) + packet)

        send(0, greeting)
        for packet in login:
            send(await receive() + 1, packet)
        for packets in answers:
            assert await receive() == 0
            if packets is None:
                break
            for number, packet in enumerate(packets, 1):
                send(number, packet)
        writer.close()

    return over_a_connection(serve, opened, scenario), asked


def test_a_statement_returns_its_rows_or_how_many_it_changed() -> None:
    async def scenario(session: Session) -> Any:
        found = await session.query("SELECT 1")
        return found, await session.query("UPDATE 2"), session.changed

    long = "x" * 300
    found, asked = with_server([rows(["1", None], [long, ""]), [b"\0\7\0\2\0\0\0"]], scenario)
    assert found == ([["1", None], [long, ""]], [], 7)
    assert asked[1:] == [b"\3SELECT 1", b"\3UPDATE 2"]


def test_an_authentication_switch_is_answered_with_an_empty_password() -> None:
    async def scenario(session: Session) -> Any:
        return await session.query("SELECT 1")

    found, asked = with_server([rows(["1"])], scenario, login=[b"\xfemysql_native_password\0", OK])
    assert found == [["1"]] and asked[1] == b""


def test_a_server_with_another_protocol_or_an_error_as_greeting_is_refused() -> None:
    async def scenario(session: Session) -> Any:
        raise AssertionError("not opened")

    with pytest.raises(OSError, match="a greeting of version 09"):
        with_server([], scenario, greeting=b"\x09old")
    with pytest.raises(SqlError, match="1040 HY000no such luck"):
        with_server([], scenario, greeting=error(1040), login=[])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(error(1213), Refused), (error(1047), Refused), (error(1062), Refused), (error(1180), SqlError), (None, EOFError)],
)
def test_only_errors_that_rule_out_the_change_are_refusals(answer: bytes | None, expected: type[Exception]) -> None:
    async def scenario(session: Session) -> Any:
        with pytest.raises((Refused, SqlError, EOFError)) as caught:
            await session.change("COMMIT")
        return caught.type

    found, _ = with_server([None if answer is None else [answer]], scenario)
    assert issubclass(found, expected)


def test_the_rows_of_a_statement_that_galera_replayed_end_with_an_ok_packet() -> None:
    """MariaDB 10.11 answers DELETE ... RETURNING so; a client that waits for the end of rows would hang."""

    async def scenario(session: Session) -> Any:
        return await session.query("SELECT 1"), await session.query("DELETE 2")

    replayed = [*rows(["1137"])[:-1], b'\0\0\0"\2\0\0']
    assert with_server([rows([""], ["7"]), replayed], scenario)[0] == ([[""], ["7"]], [["1137"]])


def test_rows_of_several_attempts_leave_the_outcome_unknown() -> None:
    """MariaDB 10.11 with Galera answers so if `wsrep_retry_autocommit` is 1."""

    async def scenario(session: Session) -> Any:
        client = MariaDBClient()
        client.session = session
        for operation in (client.dequeue, client.generate):
            with pytest.raises(OSError, match="2 rows of one") as caught:
                await operation()
            assert not isinstance(caught.value, SqlError)
        return await client.dequeue(), await client.generate()

    answers = [rows(["17"], ["20"]), rows(["4"], ["7"]), rows(["21"]), rows(["8"])]
    assert with_server(answers, scenario)[0] == (21, 8)


def test_a_transaction_that_is_refused_at_its_commit_did_not_happen() -> None:
    async def scenario(session: Session) -> Any:
        client = MariaDBClient()
        client.session = client.reader = session
        with pytest.raises(Refused, match="1213") as caught:
            await client.transact([["r", 4, None], ["append", 4, 3]])
        return caught.value.reopen

    again, asked = with_server([[OK], rows(["[1,2"]), [OK], [error(1213)], [OK]], scenario)
    assert again is False
    assert asked[3] == b"\3INSERT INTO t1 VALUES (4, '[3') ON DUPLICATE KEY UPDATE v = CONCAT(t1.v, ',3')"
    assert [words[1:7] for words in asked[1:]] == [b"BEGIN", b"SELECT", b"INSERT", b"COMMIT", b"ROLLBA"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_transaction_whose_commit_was_refused_is_rolled_back_or_the_client_reopens(kept: bool) -> None:
    """A host that left the group refuses COMMIT like every statement, and keeps the transaction, which the next BEGIN
    would commit although it was reported as refused."""

    async def scenario(session: Session) -> Any:
        client = MariaDBClient()
        client.session = client.reader = session
        with pytest.raises(Refused, match="1047") as caught:
            await client.transact([["append", 4, 3]])
        return caught.value.reopen

    rolled_back = [error(1047)] if kept else [OK]
    again, asked = with_server([[OK], [OK], [error(1047)], rolled_back], scenario)
    assert again is kept and asked[-1] == b"\3ROLLBACK"


@given(st.lists(st.none() | st.text(max_size=400), min_size=1, max_size=5))
def test_every_row_is_read_as_it_was_written(values: list[str | None]) -> None:
    packet = b"".join(map(text, values))
    assert values_of(packet, len(values)) == (values, len(packet))
    assert not is_end(packet)


@pytest.mark.parametrize(
    ("packet", "expected"),
    [
        (b"\xfa", (250, 1)),
        (b"\xfc\1\2", (513, 3)),
        (b"\xfd\1\2\3", (197121, 4)),
        (b"\xfe\1" + bytes(7), (1, 9)),
    ],
)
def test_length_encoded_integers_of_every_size_are_decoded(packet: bytes, expected: tuple[int, int]) -> None:
    assert length_at(packet, 0) == expected


def test_settings_are_written_to_the_configuration_of_each_host() -> None:
    system = MariaDB()
    cluster: Any = PlannedHosts(())
    system.hosts = [Host(f"n{n}", n, cluster, MariaDB.ports, lambda host, name: f"/opt/{name}") for n in (1, 2)]
    system.settings = {"isolation": "repeatable-read", "sync_wait": "on", "flush": "1", "writes": "own"}
    first, second = (system.files(host)["server.conf"] for host in system.hosts)
    assert first.count("gcomm://") == 1 and "basedir = /opt/usr\n" in first
    assert "transaction_isolation = REPEATABLE-READ" in second and "wsrep_sync_wait = 7" in second
    assert "wsrep_retry_autocommit = 0\n" in first, "otherwise the rows of both attempts are returned"
    assert "socket = socket\n" in first, "a full path may exceed the limit of 107 bytes"
    assert system.command(system.hosts[1])[-1] == system.hosts[1].data
