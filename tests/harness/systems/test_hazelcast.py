"""The plug-in of Hazelcast: its protocol against a fake member, its configuration, and who leads by its log."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from harness.sdk import Host, HttpError, Refused, Status
from harness.systems import hazelcast
from harness.systems.hazelcast import Hazelcast, HazelcastClient
from harness.systems.hazelcast_protocol import (
    AUTHENTICATION,
    BEGIN,
    CREATE_GROUP,
    END,
    ERROR,
    FINAL,
    HEADER,
    NULL,
    REQUEST,
    UNAWAITED,
    WHOLE,
    Frame,
    HazelcastError,
    data,
    partition_of,
    text,
    value_of,
)
from harness.systems.planned_hosts import PlannedHosts
from tests.harness.systems.served import over_a_connection

PARTITIONS = 271
Answer = tuple[bytes, Sequence[Frame]]
"""Fields of fixed size, and further frames."""

ACCEPTED: Answer = (b"\0" + bytes(17) + b"\1" + struct.pack("<i", PARTITIONS) + bytes(18), [(NULL, b""), text("5.3.8")])
GROUP = [(BEGIN, b""), (0, struct.pack("<qq", 0, 3219)), text("default"), (END, b"")]
TRUE: Answer = b"\1", []
FALSE: Answer = b"\0", []
DONE: Answer = b"", []


def number(value: int) -> Answer:
    return struct.pack("<q", value), []


def value(frame: Frame) -> Answer:
    return b"", [frame]


def encoded(kind: int, correlation: int, answer: Answer) -> bytes:
    frames = [(WHOLE, struct.pack("<iqB", kind, correlation, 0) + answer[0]), *answer[1]]
    frames[-1] = frames[-1][0] | FINAL, frames[-1][1]
    return b"".join(HEADER.pack(HEADER.size + len(content), flags) + content for flags, content in frames)


def failure(kind: str) -> tuple[int, Answer]:
    holder = [(BEGIN, b""), (0, struct.pack("<i", 1)), text(f"com.hazelcast.{kind}"), text("why"), (END, b"")]
    return ERROR, (b"", [(BEGIN, b""), *holder, (END, b"")])


class FakeMember:
    """Answers the requests of one connection after its authentication, and keeps (type, partition, frames) of each."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[int, int, bytes, list[bytes]]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(3) == b"CP2"
        try:
            while True:
                await self.answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames: list[Frame] = []
        while not frames or not frames[-1][0] & FINAL:
            size, flags = HEADER.unpack(await reader.readexactly(HEADER.size))
            frames.append((flags, await reader.readexactly(size - HEADER.size)))
        kind, correlation, partition = REQUEST.unpack_from(frames[0][1])
        if kind == AUTHENTICATION:
            writer.write(encoded(kind + 1, correlation, ACCEPTED))
        elif kind == CREATE_GROUP:
            writer.write(encoded(kind + 1, correlation, (b"", GROUP)))
        else:
            self.asked.append((kind, partition, frames[0][1][REQUEST.size :], [content for _, content in frames[1:]]))
            answer = next(self.answers)
            if isinstance(answer, bytes):
                writer.write(answer)
            elif isinstance(answer[0], int):
                writer.write(encoded(answer[0], correlation, answer[1]))
            else:
                writer.write(encoded(UNAWAITED + 1, UNAWAITED, FALSE) + encoded(kind + 1, correlation, answer))


def with_member(
    structure: str, answers: Sequence[Any], scenario: Callable[[HazelcastClient], Awaitable[Any]]
) -> tuple[Any, list[tuple[int, int, bytes, list[bytes]]]]:
    """The result of `scenario` with a client of a member that gives these answers, and what it was asked."""
    member = FakeMember(answers)

    async def opened(streams: Any) -> HazelcastClient:
        client = HazelcastClient()
        client.settings = {"structure": structure}

        async def connect(address: str) -> Any:
            return streams

        client.connect = connect  # type: ignore[method-assign]
        client.host = Host("n1", 1, PlannedHosts(()), Hazelcast.ports, lambda host, name: name)  # type: ignore[arg-type]
        await client.open()
        return client

    async def performed(client: HazelcastClient) -> Any:
        try:
            return await scenario(client)
        finally:
            if client.session is not None:
                client.heartbeats.cancel()

    return over_a_connection(member.serve, opened, performed), member.asked


def test_the_partition_of_a_key_is_that_of_hazelcasts_own_client() -> None:
    keys: Sequence[int | str] = (7, -50, "queue", "héllo", "")
    assert [partition_of(data(key), PARTITIONS) for key in keys] == [92, 0, 153, 219, 11]
    assert [value_of(data(key)) for key in keys] == list(keys) and value_of((NULL, b"")) is None
    with pytest.raises(ValueError, match="type -7"):
        value_of((0, struct.pack(">iii", 0, -7, 1)))


def test_registers_are_references_of_a_cp_group_or_entries_of_a_map() -> None:
    async def scenario(client: HazelcastClient) -> Any:
        await client.write(7, 3)
        return await client.read(7), await client.read(8), await client.cas(7, 3, 4), await client.cas(7, 3, 4)

    answers = [value((NULL, b"")), value(data(3)), value((NULL, b"")), TRUE, FALSE]
    found, asked = with_member("cp", answers, scenario)
    assert found == (3, None, True, False)
    assert [request[0] for request in asked] == [0x0A0500, 0x0A0400, 0x0A0400, 0x0A0200, 0x0A0200]
    name = [content for _, content in GROUP] + [b"register-7"]
    assert asked[0] == (0x0A0500, -1, b"\0", [*name, data(3)[1]])
    assert asked[3] == (0x0A0200, -1, b"", [*name, data(3)[1], data(4)[1]])

    found, asked = with_member("ap", [DONE, *answers[1:]], scenario)
    assert found == (3, None, True, False)
    assert [request[:2] for request in asked[:2]] == [(0x010F00, 92), (0x010200, 92)]
    assert asked[3][3] == [b"entries", data(7)[1], data(3)[1], data(4)[1]]


def test_an_addition_to_an_entry_is_repeated_until_nobody_else_changes_it() -> None:
    answers = [value(data(5)), FALSE, value(data(6)), TRUE]
    found, asked = with_member("ap", answers, lambda client: client.fetch_add(2))
    assert found == 6 and asked[-1][3][-2:] == [data(6)[1], data(8)[1]]
    found, asked = with_member("cp", [number(6)], lambda client: client.fetch_add(2))
    assert found == 6 and asked[0][2] == struct.pack("<q", 2)


def test_sets_and_queues_lie_in_the_partition_of_their_name() -> None:
    async def scenario(client: HazelcastClient) -> Any:
        await client.add(4)
        await client.enqueue(5)
        return await client.members(), await client.dequeue(), await client.dequeue()

    listed = b"", [(BEGIN, b""), data(4), data(9), (END, b"")]
    found, asked = with_member("ap", [TRUE, TRUE, listed, value(data(5)), value((NULL, b""))], scenario)
    assert found == ([4, 9], 5, None)
    assert [request[1] for request in asked[1:4]] == [153, partition_of(data("all"), PARTITIONS), 153]
    with pytest.raises(Refused, match="full"):
        with_member("ap", [FALSE], lambda client: client.enqueue(5))


def test_an_error_leaves_the_outcome_open() -> None:
    with pytest.raises(HazelcastError, match="IndeterminateOperationStateException: why") as caught:
        with_member("cp", [failure("IndeterminateOperationStateException")], lambda client: client.write(1, 2))
    assert not isinstance(caught.value, Refused) and not getattr(caught.value, "is_definite", False)


def test_an_answer_to_something_else_is_an_error() -> None:
    for answer, says in [
        (encoded(0x0A0401, 99, DONE), "answer 99 to request"),
        ((0x0A0501, DONE), "type 0xa0501 to a request of type 0xa0400"),
        (HEADER.pack(1 << 30, 0), "a frame of 1073741824 bytes"),
        (HEADER.pack(2, 0), "a frame of 2 bytes"),
    ]:
        with pytest.raises(OSError, match=says):
            with_member("cp", [answer], lambda client: client.read(1))


def test_a_lock_is_held_by_a_session_and_a_lost_one_needs_no_unlock() -> None:
    async def scenario(client: HazelcastClient) -> Any:
        first, second = await client.lock("a"), await client.lock("b")
        await client.unlock("a")
        return first, second

    session = number(17)
    answers = [session, number(3), number(0), failure("LockOwnershipLostException")]
    found, asked = with_member("cp", answers, scenario)
    assert found == (True, False) and [request[0] for request in asked] == [0x1F0100, 0x070200, 0x070200, 0x070300]
    assert all(request[2].startswith(struct.pack("<qq", 17, 1)) for request in asked[1:])

    with pytest.raises(HazelcastError, match="IndeterminateOperationStateException"):
        with_member("cp", [*answers[:3], failure("IndeterminateOperationStateException")], scenario)


def test_a_lock_of_an_expired_session_is_refused_and_needs_another_client() -> None:
    answers = [number(17), failure("SessionExpiredException")]
    with pytest.raises(Refused, match="expired") as caught:
        with_member("cp", answers, lambda client: client.lock("a"))
    assert caught.value.reopen
    with pytest.raises(HazelcastError, match="Other"):
        with_member("cp", [number(17), failure("OtherException")], lambda client: client.lock("a"))


def test_a_map_locks_without_a_session() -> None:
    async def scenario(client: HazelcastClient) -> Any:
        locked = await client.lock("a")
        await client.unlock("a")
        return locked

    found, asked = with_member("ap", [TRUE, DONE], scenario)
    assert found is True and [request[0] for request in asked] == [0x011100, 0x011300]


def system_of(structure: str, count: int = 3) -> Hazelcast:
    system, cluster = Hazelcast(), PlannedHosts(())
    system.settings = {"structure": structure, "indeterminate": "fail"}
    names = range(1, count + 1)
    system.hosts = [Host(f"n{n}", n, cluster, Hazelcast.ports, lambda host, name: name) for n in names]  # type: ignore[arg-type]
    return system


def configuration(system: Hazelcast) -> Any:
    return json.loads(system.files(system.hosts[0])["hazelcast.yaml"])["hazelcast"]


def test_the_configuration_names_all_members_and_lets_all_replicate() -> None:
    found = configuration(system_of("cp"))
    members = ["127.0.0.1:5701", "127.0.0.2:5701", "127.0.0.3:5701"]
    assert found["network"]["join"]["tcp-ip"]["member-list"] == members
    assert found["cp-subsystem"]["cp-member-count"] == found["cp-subsystem"]["group-size"] == 3
    assert found["cp-subsystem"]["fail-on-indeterminate-operation-state"] is True
    assert configuration(system_of("ap"))["cp-subsystem"]["cp-member-count"] == 0


def test_one_host_cannot_replicate() -> None:
    with pytest.raises(ValueError, match="--nodes 3, or --set structure=ap"):
        configuration(system_of("cp", 1))
    assert configuration(system_of("ap", 1))["network"]["join"]["tcp-ip"]["member-list"] == ["127.0.0.1:5701"]


LOGGED = """2026-11-29 23:17:51.608 INFO com.hazelcast.cp.internal.raft.impl.RaftNode(default) [10.77.0.1]:5701 \
[splitbrain] [5.3.8]

CP Group Members {{groupId: {group}(3219), size:3, term:{term}, logIndex:0}} [
\tCPMember{{uuid=412f2613-09f4-45f7-8055-ec395047bf24, address=[10.77.0.3]:5701}} - LEADER
\tCPMember{{uuid=aa809e38-c4f1-4405-b1d0-405f929d9970, address=[10.77.0.1]:5701}} - {role} this
\tCPMember{{uuid=a8fc64e4-2bb3-4b90-a20f-a9bf7c8dc409, address=[10.77.0.2]:5701}}
]
"""


def test_who_leads_is_what_a_member_logged_last_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = ""

    async def log(host: Host, path: str) -> bytes:
        assert path == "member.log"
        return logged.encode()

    async def get(url: str) -> Any:
        if url.startswith("http://127.0.0.2"):
            raise HttpError(404, "")
        return {"uuid": "412f2613"}

    def asked(number: int) -> Status | None:
        system = system_of("cp")
        return asyncio.run(system.status(system.hosts[number - 1]))

    monkeypatch.setattr(Host, "get", log)
    monkeypatch.setattr(hazelcast, "get", get)
    assert asked(1) is None
    logged = LOGGED.format(group="default", term=4, role="LEADER")
    assert asked(1) == Status(leads=True, term=4) and asked(2) is None
    logged += LOGGED.format(group="default", term=5, role="FOLLOWER")
    logged += LOGGED.format(group="METADATA", term=9, role="LEADER")
    assert asked(1) == Status(leads=False, term=5)


def test_a_member_that_was_started_again_takes_the_place_of_its_predecessor(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[tuple[str, bytes]] = []

    async def get(url: str) -> Any:
        return [{"uuid": "old", "address": "[127.0.0.2]:5701"}, {"uuid": "other", "address": "[127.0.0.1]:5701"}]

    async def post(url: str, body: bytes) -> None:
        posted.append((url.partition("/cp-subsystem")[2], body))

    monkeypatch.setattr(hazelcast, "get", get)
    monkeypatch.setattr(hazelcast, "post", post)
    asyncio.run(hazelcast.promote(system_of("cp").hosts[1]))
    assert posted == [("/members/old/remove", b"splitbrain&"), ("/members", b"splitbrain&")]
