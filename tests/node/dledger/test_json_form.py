"""DLedger's own JSON form of the messages: its names and defaults, and the refusal of invalid content."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.json_form import from_json, to_json
from node.dledger.messages import (
    AppendEntryResponse,
    GetEntriesResponse,
    LeadershipTransferRequest,
    MalformedMessage,
    Message,
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
    PushEntryRequest(**BASE, type=PushType.APPEND, commit_index=4, entries=b"\0\xff", previous_term=2),
    PushEntryResponse(**BASE, code=DLedgerCode.INCONSISTENT_STATE, index=7, begin_index=0, end_index=9),
    MetadataResponse(**BASE, code=DLedgerCode.SUCCESS, role="LEADER", committed_index=3),
    GetEntriesResponse(**BASE, code=DLedgerCode.SUCCESS, entries=b"abc"),
    AppendEntryResponse(**BASE, code=DLedgerCode.SUCCESS, index=1, pos=48),
    LeadershipTransferRequest(**BASE, transfer_id="n1", transferee_id="n2", take_index=4),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert from_json(type(message), to_json(message)) == message


def test_field_and_enum_names_on_the_wire() -> None:
    assert json.loads(to_json(MESSAGES[0])) == {
        "group": "g", "remoteId": "n2", "localId": "n1", "term": 3, "leaderId": "n1", "ledgerEndIndex": 5,
        "ledgerEndTerm": 2, "transferredTerm": -1,
    }  # fmt: skip
    pushed = json.loads(to_json(MESSAGES[2]))
    assert (pushed["type"], pushed["entries"], pushed["commitIndex"]) == ("APPEND", "AP8=", 4)
    voted = json.loads(to_json(MESSAGES[1]))
    assert (voted["voteResult"], voted["code"]) == ("REJECT_ALREADY_VOTED", 200)


def test_unknown_fields_are_ignored_and_absent_ones_have_defaults() -> None:
    body = b'{"group":"g","remoteId":"a","localId":"b","future":[1]}'
    answer = from_json(PushEntryResponse, body)
    assert (answer.group, answer.term, answer.code, answer.index) == ("g", -1, DLedgerCode.UNKNOWN, -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group", None), ("group", 7), ("group", "x" * 129), ("group", "a\nb"),
        ("term", "3"), ("term", -2), ("term", 1 << 63), ("term", 3.0), ("term", True), ("term", None),
        ("entries", "!!"), ("entries", 7), ("entries", [1]),
        ("type", "DESTROY"), ("type", 1), ("type", ["APPEND"]),
    ],
)  # fmt: skip
def test_the_error_names_the_invalid_field(field: str, value: Any) -> None:
    content = json.loads(to_json(MESSAGES[2]))
    content[field] = value
    with pytest.raises(MalformedMessage, match=f"the field {field} "):
        from_json(PushEntryRequest, json.dumps(content).encode())


@pytest.mark.parametrize("code", [199, True, "200", [200]])
def test_unknown_codes_are_malformed(code: Any) -> None:
    content = json.loads(to_json(MESSAGES[3])) | {"code": code}
    with pytest.raises(MalformedMessage, match="the field code "):
        from_json(PushEntryResponse, json.dumps(content).encode())


VALUES = st.recursive(st.none() | st.integers() | st.text(), st.lists)


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_parse_or_raise_malformed_message(body: bytes) -> None:
    for message in MESSAGES:
        try:
            found = from_json(type(message), body)
        except MalformedMessage:
            continue
        assert dataclasses.is_dataclass(found)
