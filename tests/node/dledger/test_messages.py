"""Messages between members: what they look like, and that nothing from the wire is believed unchecked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.messages import (
    AppendEntryRequest,
    AppendEntryResponse,
    GetEntriesRequest,
    GetEntriesResponse,
    HeartBeatRequest,
    HeartBeatResponse,
    MalformedMessage,
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
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert type(message).from_body(message.to_body()) == message


def test_names_on_the_wire() -> None:
    content = json.loads(MESSAGES[4].to_body())
    assert content == {
        "group": "g", "remoteId": "n2", "localId": "n1", "term": 3, "leaderId": "n1", "type": "APPEND",
        "commitIndex": 4, "entries": "AP8=", "preLogTerm": 2, "nextTerm": -1, "nextChainCrc": -1,
    }  # fmt: skip
    assert json.loads(MESSAGES[1].to_body())["voteResult"] == "REJECT_ALREADY_VOTED"
    assert json.loads(MESSAGES[3].to_body())["code"] == 403


def test_unknown_fields_are_ignored_and_absent_ones_have_defaults() -> None:
    body = b'{"group":"g","remoteId":"a","localId":"b","code":200,"future":[1,2]}'
    assert VoteResponse.from_body(body) == VoteResponse(
        group="g", remote_id="a", local_id="b", code=DLedgerCode.SUCCESS
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group", 1),
        ("group", "x" * 129),
        ("group", "line\nbreak"),
        ("remoteId", None),
        ("term", "3"),
        ("term", -2),
        ("term", 2**63),
        ("term", True),
        ("term", 1.0),
        ("term", [1]),
        ("type", "DESTROY"),
        ("type", 1),
        ("type", ["APPEND"]),
        ("commitIndex", None),
        ("commitIndex", {}),
        ("entries", "no base64!"),
        ("entries", 7),
        ("entries", "é"),
    ],
)
def test_wrong_fields_are_named(field: str, value: Any) -> None:
    content = json.loads(MESSAGES[4].to_body())
    content[field] = value
    with pytest.raises(MalformedMessage, match=field):
        PushEntryRequest.from_body(json.dumps(content).encode())


@pytest.mark.parametrize("code", [0, 199, "200", True, [200], 1e9])
def test_unknown_codes_are_malformed(code: Any) -> None:
    content = json.loads(MESSAGES[3].to_body())
    content["code"] = code
    with pytest.raises(MalformedMessage, match="code"):
        HeartBeatResponse.from_body(json.dumps(content).encode())


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"group":NaN}'])
def test_no_object_is_malformed(body: bytes) -> None:
    for message in MESSAGES:
        with pytest.raises(MalformedMessage):
            type(message).from_body(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["group", "remoteId", "localId", "term", "leaderId", "type", "commitIndex", "entries", "code", "voteResult",
     "index", "beginIndex", "endIndex", "ledgerEndIndex", "ledgerEndTerm", "preLogTerm", "nextTerm", "body"]
)  # fmt: skip


@given(content=st.dictionaries(KEYS, JSON), message=st.sampled_from(MESSAGES))
def test_anything_else_is_malformed_or_well_formed(content: dict[str, Any], message: Message) -> None:
    whole = {**json.loads(message.to_body()), **content}
    try:
        parsed = type(message).from_body(json.dumps(whole).encode())
    except MalformedMessage:
        return
    assert type(message).from_body(parsed.to_body()) == parsed
    assert parsed.term >= -1


@given(st.binary(max_size=100))
def test_bytes_are_malformed_or_well_formed(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        PushEntryRequest.from_body(body)
