"""The plug-in of Cassandra: its client against a coordinator that the test plays, and its configuration."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from harness.sdk import Host, Refused
from harness.systems.cassandra import Cassandra, CassandraClient
from harness.systems.cassandra_protocol import (
    BIGINT,
    BOOLEAN,
    COUNTER,
    ERROR,
    HEADER,
    INT,
    INVALID,
    LEVELS,
    QUERY,
    READY,
    RESULT,
    STARTUP,
    UNAVAILABLE,
    CqlError,
)
from harness.systems.planned_hosts import PlannedHosts
from tests.harness.systems.served import over_a_connection

Answer = tuple[int, bytes]
"""Type and body of a message."""

VOID: Answer = RESULT, struct.pack(">i", 1)
WRITE_TIMEOUT, OVERLOADED, SERVER_ERROR, CAS_UNKNOWN, READ_TIMEOUT = 0x1100, 0x1001, 0, 0x1700, 0x1200


def text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode()


def number(value: int | None, size: int = 4) -> bytes:
    return (
        struct.pack(">i", -1) if value is None else struct.pack(">i", size) + value.to_bytes(size, "big", signed=True)
    )


def rows(kind: int, *values: bytes) -> Answer:
    """Rows of one column."""
    head = struct.pack(">iii", 2, 1, 1) + text("splitbrain") + text("registers") + text("v") + struct.pack(">H", kind)
    return RESULT, head + struct.pack(">i", len(values)) + b"".join(values)


def applied(is_applied: bool) -> Answer:
    """The result of a transaction: whether it was applied and, if not, the value that was found. Every column names
    its table here."""
    columns = [("[applied]", BOOLEAN), *([] if is_applied else [("v", INT)])]
    head = struct.pack(">iii", 2, 0, len(columns))
    for name, kind in columns:
        head += text("splitbrain") + text("registers") + text(name) + struct.pack(">H", kind)
    found = b"" if is_applied else number(9)
    return RESULT, head + struct.pack(">ii", 1, 1) + bytes([is_applied]) + found


def error(code: int, *, level: str = "QUORUM") -> Answer:
    rest = struct.pack(">Hii", LEVELS[level], 2, 1) if code == UNAVAILABLE else b""
    return ERROR, struct.pack(">i", code) + text("why") + rest


class Coordinator:
    """Answers the statements of one connection, and keeps each with the name of its consistency level."""

    def __init__(self, answers: Sequence[Answer | bytes]) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[str, str]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self.answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        version, flags, stream, kind, size = HEADER.unpack(await reader.readexactly(HEADER.size))
        assert (version, flags) == (4, 0)
        body = await reader.readexactly(size)
        if kind == STARTUP:
            assert body == struct.pack(">H", 1) + text("CQL_VERSION") + text("3.0.0")
            found: Answer | bytes = READY, b""
        else:
            assert kind == QUERY
            end = 4 + struct.unpack_from(">i", body)[0]
            level, options = struct.unpack(">HB", body[end:])
            assert options == 0
            self.asked.append((body[4:end].decode(), next(name for name, code in LEVELS.items() if code == level)))
            found = next(self.answers)
        if isinstance(found, tuple):
            found = HEADER.pack(0x84, 0, stream, found[0], len(found[1])) + found[1]
        writer.write(found)


SAFE = {"writes": "transaction", "reads": "serial", "commitlog_sync": "batch"}


def host_of(number: int) -> Host:
    return Host(f"n{number}", number, PlannedHosts(()), Cassandra.ports, lambda host, name: name)  # type: ignore[arg-type]


def with_coordinator(
    answers: Sequence[Answer | bytes],
    scenario: Callable[[CassandraClient], Awaitable[Any]],
    settings: Mapping[str, str] = SAFE,
) -> tuple[Any, list[tuple[str, str]]]:
    """The result of `scenario` with a client of a coordinator that gives these answers, and what it was asked."""
    coordinator = Coordinator(answers)

    async def opened(streams: Any) -> CassandraClient:
        client = CassandraClient()
        client.settings = settings
        client.host = host_of(1)

        async def connect(address: str) -> Any:
            return streams

        client.connect = connect  # type: ignore[method-assign]
        await client.open()
        return client

    return over_a_connection(coordinator.serve, opened, scenario), coordinator.asked


async def three_operations(client: CassandraClient) -> Any:
    await client.write(7, 3)
    return await client.read(7), await client.cas(7, 3, 4)


TRANSACTION = "UPDATE splitbrain.registers SET v = 3 WHERE k = 7 IF never = null"
UPDATE = "UPDATE splitbrain.registers SET v = 3 WHERE k = 7"
SELECT = "SELECT v FROM splitbrain.registers WHERE k = 7"
COMPARE_AND_SET = "UPDATE splitbrain.registers SET v = 4 WHERE k = 7 IF v = 3"


def test_registers_are_written_by_transactions_and_read_at_serial() -> None:
    found, asked = with_coordinator([applied(True), rows(INT, number(3)), applied(False)], three_operations)
    assert found == (3, False)
    assert asked == [(TRANSACTION, "QUORUM"), (SELECT, "SERIAL"), (COMPARE_AND_SET, "QUORUM")]


def test_settings_choose_plain_updates_and_their_level() -> None:
    for writes, reads in [("quorum", "quorum"), ("one", "one"), ("quorum", "serial")]:
        settings = SAFE | {"writes": writes, "reads": reads}
        found, asked = with_coordinator([VOID, rows(INT, number(-2)), applied(True)], three_operations, settings)
        assert found == (-2, True)
        assert asked == [(UPDATE, writes.upper()), (SELECT, reads.upper()), (COMPARE_AND_SET, "QUORUM")]


def test_a_register_without_a_row_or_a_value_is_empty() -> None:
    for answer in (rows(INT), rows(INT, number(None))):
        assert with_coordinator([answer], lambda client: client.read(7))[0] is None


def test_sets_and_counters_are_plain_writes() -> None:
    async def scenario(client: CassandraClient) -> Any:
        await client.add(5)
        await client.increment(2)
        return await client.members(), await client.value(), await client.value()

    answers = [VOID, VOID, rows(INT, number(5), number(8)), rows(COUNTER, number(2, 8)), rows(COUNTER)]
    found, asked = with_coordinator(answers, scenario)
    assert found == ([5, 8], 2, 0)
    assert [level for _, level in asked] == ["QUORUM"] * 5
    _, asked = with_coordinator(answers, scenario, SAFE | {"writes": "one", "reads": "one"})
    assert [level for _, level in asked] == ["ONE"] * 5


def outcome_of(answer: Answer, settings: Mapping[str, str], operation: str) -> type[Exception]:
    arguments = {"write": (7, 3), "cas": (7, 3, 4), "add": (5,), "increment": (2,)}[operation]
    with pytest.raises((Refused, CqlError)) as caught:
        with_coordinator([answer], lambda client: getattr(client, operation)(*arguments), settings)
    return caught.type


def test_a_statement_that_reached_no_replica_is_refused() -> None:
    plain = SAFE | {"writes": "quorum"}
    for operation in ("write", "add", "increment"):
        assert outcome_of(error(UNAVAILABLE), plain, operation) is Refused
    for operation in ("write", "cas"):
        assert outcome_of(error(UNAVAILABLE, level="SERIAL"), SAFE, operation) is Refused
        assert outcome_of(error(INVALID), SAFE, operation) is Refused


def test_a_transaction_that_was_accepted_may_lack_replicas_for_its_commit() -> None:
    for operation in ("write", "cas"):
        assert outcome_of(error(UNAVAILABLE, level="QUORUM"), SAFE, operation) is CqlError


@pytest.mark.parametrize("code", [SERVER_ERROR, OVERLOADED, WRITE_TIMEOUT, READ_TIMEOUT, CAS_UNKNOWN])
def test_any_other_error_leaves_the_outcome_open(code: int) -> None:
    for operation in ("write", "cas", "add", "increment"):
        assert outcome_of(error(code), SAFE, operation) is CqlError
    assert outcome_of(error(code), SAFE | {"writes": "quorum"}, "write") is CqlError


def test_a_transaction_whose_condition_always_holds_must_be_applied() -> None:
    with pytest.raises(OSError, match="always met"):
        with_coordinator([applied(False)], lambda client: client.write(7, 3))


def test_warnings_come_before_the_answer() -> None:
    warned = struct.pack(">H", 2) + text("slow") + text("large") + rows(INT, number(3))[1]
    answer = HEADER.pack(0x84, 0x08, 0, RESULT, len(warned)) + warned
    assert with_coordinator([answer], lambda client: client.read(7))[0] == 3


def test_a_malformed_answer_is_an_error() -> None:
    for answer, says in [
        (HEADER.pack(0x83, 0, 0, RESULT, 0), "version 0x83"),
        (HEADER.pack(0x84, 0, 5, RESULT, 0), "stream 5"),
        (HEADER.pack(0x84, 0, 0, RESULT, 1 << 30), "1073741824 bytes"),
        (HEADER.pack(0x84, 0, 0, READY, 0), "type 2 to a statement"),
        (HEADER.pack(0x84, 0, 0, RESULT, 4) + struct.pack(">i", 2), "ends within a field"),
        (HEADER.pack(0x84, 0, 0, RESULT, 12) + struct.pack(">iii", 2, 3, 1), "flags 3"),
    ]:
        with pytest.raises((OSError, ValueError), match=says):
            with_coordinator([answer], lambda client: client.read(7))


def test_a_column_of_an_unknown_type_is_an_error() -> None:
    assert with_coordinator([rows(BIGINT, number(3, 8))], lambda client: client.read(7))[0] == 3
    with pytest.raises(ValueError, match="type 13"):
        with_coordinator([rows(13, number(3))], lambda client: client.read(7))


def system_of(count: int = 3, **settings: str) -> Cassandra:
    system = Cassandra()
    system.settings = SAFE | settings
    system.hosts = [host_of(number) for number in range(1, count + 1)]
    return system


def configuration(system: Cassandra, number: int = 1) -> Any:
    return json.loads(system.files(system.hosts[number - 1])["cassandra.yaml"])


def test_the_hosts_divide_the_ring_evenly() -> None:
    system = system_of()
    tokens = [configuration(system, number)["initial_token"] for number in (1, 2, 3)]
    assert tokens[0] == -(2**63) and tokens[2] < 2**63
    assert tokens[1] - tokens[0] == tokens[2] - tokens[1] == 2**64 // 3
    seeds = configuration(system, 2)["seed_provider"][0]["parameters"][0]["seeds"]
    assert seeds == "127.0.0.1:7000,127.0.0.2:7000,127.0.0.3:7000"


def test_the_commit_log_is_synced_as_the_setting_says() -> None:
    assert configuration(system_of())["commitlog_sync"] == "batch"
    assert "commitlog_sync_period" not in configuration(system_of())
    found = configuration(system_of(commitlog_sync="periodic"))
    assert (found["commitlog_sync"], found["commitlog_sync_period"]) == ("periodic", "10s")


async def same(streams: Any) -> Any:
    return streams


def with_system(
    answers: Sequence[Answer | bytes], scenario: Callable[[Cassandra], Awaitable[Any]], patch: pytest.MonkeyPatch
) -> tuple[Any, list[tuple[str, str]]]:
    """The result of `scenario` with a system all of whose hosts are one coordinator, and what that was asked."""
    coordinator = Coordinator(answers)

    async def performed(streams: Any) -> Any:
        address = "{}:{}".format(*streams[1].get_extra_info("peername"))
        patch.setattr(Host, "address", lambda self, port: address)
        return await scenario(system_of())

    return over_a_connection(coordinator.serve, same, performed), coordinator.asked


def test_a_host_is_ready_if_it_can_read_from_all_or_knows_no_table_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ready(answer: Answer) -> Any:
        return with_system([answer], lambda system: system.ready(system.hosts[0]), monkeypatch)

    for answer in (rows(INT), error(INVALID)):
        assert is_ready(answer) == (True, [("SELECT v FROM splitbrain.registers WHERE k = 0", "ALL")])
    for code in (UNAVAILABLE, READ_TIMEOUT):
        with pytest.raises(CqlError):
            is_ready(error(code))


def test_tables_are_created_once_all_hosts_are_known_and_seen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [rows(BIGINT, number(2, 8)), VOID, VOID, VOID, VOID, rows(COUNTER), rows(COUNTER), rows(COUNTER)]
    _, asked = with_system(answers, Cassandra.start_together, monkeypatch)
    assert "'replication_factor': 3}" in asked[1][0]
    assert [statement.split()[0] for statement, _ in asked] == ["SELECT", *["CREATE"] * 4, *["SELECT"] * 3]
    assert [level for _, level in asked[5:]] == ["ALL"] * 3
    with pytest.raises(LookupError, match="does not know all others"):
        with_system([rows(BIGINT, number(1, 8))], Cassandra.start_together, monkeypatch)
    with pytest.raises(CqlError):  # a host that does not know the tables yet
        with_system([*answers[:6], error(INVALID)], Cassandra.start_together, monkeypatch)
