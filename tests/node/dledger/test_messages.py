"""Messages between members: their encoding, and the refusal of invalid bytes."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger import messages
from node.dledger.messages import (
    AppendEntryRequest,
    AppendEntryResponse,
    GetEntriesRequest,
    GetEntriesResponse,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallSnapshotRequest,
    InstallSnapshotResponse,
    MalformedMessage,
    MembersRequest,
    MembersResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    PushEntryRequest,
    PushEntryResponse,
    VoteRequest,
    VoteResponse,
)
from node.dledger.rpc import DLedgerCode, PushType, VoteResult

BASE: dict[str, Any] = {"group": "g", "remote_id": "n2", "local_id": "n1", "term": 3, "leader_id": "n1"}
MESSAGES: list[Message] = [
    VoteRequest(**BASE, ledger_end_index=5, ledger_end_term=2),
    VoteResponse(**BASE, code=DLedgerCode.SUCCESS, vote_result=VoteResult.REJECT_ALREADY_VOTED),
    HeartBeatRequest(**BASE),
    HeartBeatResponse(**BASE, code=DLedgerCode.EXPIRED_TERM),
    PushEntryRequest(**BASE, type=PushType.APPEND, commit_index=4, entries=b"\0\xff", previous_term=2),
    PushEntryResponse(**BASE, code=DLedgerCode.SUCCESS, index=7, begin_index=0, end_index=9),
    MetadataRequest(**BASE),
    MetadataResponse(**BASE, code=DLedgerCode.SUCCESS, role="LEADER", committed_index=3),
    GetEntriesRequest(**BASE, begin_index=0),
    GetEntriesResponse(**BASE, code=DLedgerCode.SUCCESS, entries=b"abc"),
    AppendEntryRequest(**BASE, body=b"body"),
    AppendEntryResponse(**BASE, code=DLedgerCode.SUCCESS, index=1, pos=48),
    InstallSnapshotRequest(
        **BASE, last_included_index=9, last_included_term=2, size_bytes=5, digest="0f", offset=2, data_crc=7, data=b"de"
    ),
    InstallSnapshotResponse(**BASE, code=DLedgerCode.SUCCESS, offset=4),
    MembersRequest(**BASE),
    MembersResponse(**BASE, code=DLedgerCode.SUCCESS, index=-1, peers=b'{"peers":{"n1":"127.0.0.1:1"}}'),
]
NAMES = b"\1" + struct.pack(">H1sH2sH2sH2s", 1, b"g", 2, b"n2", 2, b"n1", 2, b"n1").join([b"\0\x0f", b""])
"""Version, length and names of every message above."""


def push(**changed: Any) -> bytes:
    """The bytes of the push request above, built by hand, with other numbers or entries."""
    numbers = {"term": 3, "type": 1, "commit": 4, "previous": 2, "next": -1, "crc": -1}
    entries = changed.pop("entries", b"\0\xff")
    return NAMES + struct.pack(">6q", *(numbers | changed).values()) + struct.pack(">I", len(entries)) + entries


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert type(message).from_body(message.to_body()) == message


def test_bytes_on_the_wire() -> None:
    assert MESSAGES[4].to_body() == push()
    assert MESSAGES[2].to_body() == NAMES + struct.pack(">q", 3)
    assert MESSAGES[3].to_body() == NAMES + struct.pack(">qq", 3, 403)
    assert MESSAGES[1].to_body() == NAMES + struct.pack(">qqq", 3, 200, 5)


def test_enum_numbers_are_stable() -> None:
    assert [(kind.name, kind.value) for kind in PushType] == [
        ("APPEND", 1), ("COMMIT", 2), ("COMPARE", 3), ("TRUNCATE", 4),
    ]  # fmt: skip
    assert [kind.value for kind in VoteResult] == list(range(11))


@pytest.mark.parametrize(
    ("field", "value"),
    [("term", -2), ("term", -(2**63)), ("type", 0), ("type", 5), ("commit", -2), ("previous", -3), ("crc", -2)],
)
def test_the_error_names_the_invalid_number(field: str, value: int) -> None:
    with pytest.raises(MalformedMessage, match={"crc": "next_chain_crc"}.get(field, field)):
        PushEntryRequest.from_body(push(**{field: value}))


@pytest.mark.parametrize("code", [0, 199, -2, 2**40])
def test_unknown_codes_are_malformed(code: int) -> None:
    with pytest.raises(MalformedMessage, match="code"):
        HeartBeatResponse.from_body(NAMES + struct.pack(">qq", 3, code))


@pytest.mark.parametrize("name", [b"x" * 129, b"line\nbreak", b"\xff\xfe"])
@pytest.mark.parametrize("position", range(4))
def test_an_invalid_name_is_refused_and_its_field_named(name: bytes, position: int) -> None:
    texts = [b"g", b"n2", b"n1", b"n1"]
    texts[position] = name
    block = b"".join(struct.pack(">H", len(text)) + text for text in texts)
    with pytest.raises(MalformedMessage, match=("group", "remote_id", "local_id", "leader_id")[position]):
        HeartBeatRequest.from_body(struct.pack(">BH", 1, len(block)) + block + struct.pack(">q", 3))


def test_an_invalid_role_is_refused() -> None:
    message = dataclasses.replace(MESSAGES[7], role="\n")  # type: ignore[call-arg]
    with pytest.raises(MalformedMessage, match="role"):
        MetadataResponse.from_body(message.to_body())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_truncated_or_extended_message_is_malformed(message: Message) -> None:
    body = message.to_body()
    for end in range(len(body)):
        with pytest.raises(MalformedMessage):
            type(message).from_body(body[:end])
    with pytest.raises(MalformedMessage, match="behind"):
        type(message).from_body(body + b"\0")


def test_an_unknown_version_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="version 123"):
        HeartBeatRequest.from_body(b'{"group":"g","remoteId":"n2","localId":"n1","term":3,"leaderId":"n1"}')


def test_the_caches_of_names_are_bounded() -> None:
    for number in range(3 * messages.MAX_CACHED_NAMES):
        message = HeartBeatRequest(**(BASE | {"group": f"g{number}"}))
        assert HeartBeatRequest.from_body(message.to_body()) == message
        assert len(messages._encoded_names) <= messages.MAX_CACHED_NAMES
        assert len(messages._decoded_names) <= messages.MAX_CACHED_NAMES


@given(
    message=st.sampled_from(MESSAGES),
    changes=st.lists(st.tuples(st.integers(0, 80), st.binary(min_size=1, max_size=3)), max_size=4),
)
def test_a_changed_message_is_malformed_or_encodes_to_the_same_bytes(
    message: Message, changes: list[tuple[int, bytes]]
) -> None:
    body = message.to_body()
    for at, data in changes:
        at = min(at, len(body))
        body = body[:at] + data + body[at + len(data) :]
    try:
        parsed = type(message).from_body(body)
    except MalformedMessage:
        return
    assert parsed.to_body() == body
    assert parsed.term >= -1


@given(st.binary(max_size=100))
def test_random_bytes_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        PushEntryRequest.from_body(body)
