"""The network trace: its events, its time origin, its bound, and the names of messages."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.sim.dissector import MAX_STREAMS, Dissector, Rpc
from harness.clusters.sim.network import TraceEvent
from harness.clusters.sim.trace import TraceWriter
from node.dledger.entry import NORMAL_MAGIC, encode_entry
from node.dledger.messages import PushEntryRequest, PushEntryResponse, VoteRequest, VoteResponse
from node.dledger.rpc import DLedgerCode, DLedgerRequestCode, PushType, VoteResult
from node.remoting.codec import encode
from node.remoting.codes import RequestCode, ResponseCode
from node.remoting.command import Command

MEMBERS = {"group": "g", "remote_id": "n2", "local_id": "n1"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def event(time_s: float, kind: str = "send", *, to: str = "n2", number: int = 0, content: bytes = b"x") -> TraceEvent:
    return TraceEvent(time_s, kind, "n1", to, 1, len(content), number, content if kind == "send" else b"")


def test_times_count_from_the_start_of_the_load(tmp_path: Path) -> None:
    zero_s: list[float] = []
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), lambda: zero_s[0] if zero_s else None)
    writer.note(event(1000.0))
    writer.note(event(1000.5, "arrive"))
    zero_s.append(1002.0)
    writer.note(event(1002.25, number=1))
    writer.close()
    writer.close()
    found = lines_of(tmp_path / "trace.jsonl")
    assert [line["time"] for line in found] == [-2_000_000_000, -1_500_000_000, 250_000_000]
    assert found[1] == {
        "time": -1_500_000_000, "kind": "arrive", "from": "n1", "to": "n2", "connection": 1, "number": 0, "size": 1,
    }  # fmt: skip


def test_if_the_load_never_starts_times_count_from_the_first_event(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), lambda: None)
    writer.note(event(1000.0))
    writer.note(event(1000.5))
    writer.close()
    assert [line["time"] for line in lines_of(tmp_path / "trace.jsonl")] == [0, 500_000_000]


@pytest.mark.parametrize("starts", [True, False])
def test_the_trace_is_bounded_and_ends_with_a_limit_event(tmp_path: Path, starts: bool) -> None:
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), lambda: 1000.0 if starts else None, max_events=3)
    for number in range(10):
        writer.note(event(1000.0 + number, number=number))
    writer.close()
    found = lines_of(tmp_path / "trace.jsonl")
    assert [line["kind"] for line in found] == ["send", "send", "send", "limit"]
    assert found[-1]["events"] == 3


def test_log_positions_are_traced_on_change_and_within_the_bound(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), lambda: 1000.0, max_events=4)
    for time_s, host, committed, end in (
        (1000.1, "n1", -1, 0), (1000.2, "n1", -1, 0), (1000.3, "n2", -1, 0), (1000.4, "n1", 0, 0), (1000.5, "n1", 0, 1),
        (1000.6, "n1", 1, 1),
    ):  # fmt: skip
        writer.note_log(time_s, host, committed, end)
    writer.close()
    writer.note_log(1000.7, "n1", 2, 2)  # ignored: the trace is closed
    found = lines_of(tmp_path / "trace.jsonl")
    assert found[0] == {"time": 100_000_000, "kind": "log", "host": "n1", "committed": -1, "end": 0}
    assert [(line["host"], line["committed"], line["end"]) for line in found[:-1]] == [
        ("n1", -1, 0), ("n2", -1, 0), ("n1", 0, 0), ("n1", 0, 1),
    ]  # fmt: skip
    assert found[-1]["kind"] == "limit"


def test_messages_of_a_host_to_itself_are_not_traced(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), lambda: 1000.0)
    writer.note(event(1000.0, to="n1"))
    writer.close()
    assert lines_of(tmp_path / "trace.jsonl") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this machine")
def test_a_full_disk_is_reported_only_when_the_trace_is_closed() -> None:
    writer = TraceWriter("/dev/full", lambda: 1000.0)
    for number in range(2000):
        writer.note(event(1000.0, number=number))
    with pytest.raises(OSError, match="No space"):
        writer.close()


def entries(first: int, count: int) -> bytes:
    return b"".join(
        encode_entry(index=index, term=1, pos=0, previous_chain_crc=0, body=b"abc", magic=NORMAL_MAGIC).raw
        for index in range(first, first + count)
    )


def push(kind: PushType, content: bytes = b"") -> Command:
    body = PushEntryRequest(**MEMBERS, term=3, leader_id="n1", type=kind, commit_index=16, entries=content)
    return Command.request(DLedgerRequestCode.PUSH, body=body.to_body())


VOTE = VoteRequest(**MEMBERS, term=3, leader_id="n1", ledger_end_index=4, ledger_end_term=2)
ACCEPTED = VoteResponse(**MEMBERS, term=3, code=DLedgerCode.SUCCESS, vote_result=VoteResult.ACCEPT)
BEHIND = PushEntryResponse(**MEMBERS, term=3, code=DLedgerCode.INCONSISTENT_STATE)


@pytest.mark.parametrize(
    ("request_", "answer", "asked", "answered"),
    [
        (Command.request(DLedgerRequestCode.VOTE, body=VOTE.to_body()), (ResponseCode.SUCCESS, ACCEPTED.to_body()),
         ("vote", "term 3"), "accept"),
        (push(PushType.APPEND, entries(17, 4)), (ResponseCode.SUCCESS, BEHIND.to_body()),
         ("append", "17–20"), "inconsistent state"),
        (push(PushType.COMPARE, entries(9, 1)), (ResponseCode.SUCCESS, BEHIND.to_body()),
         ("compare", "9"), "inconsistent state"),
        (push(PushType.COMMIT), (ResponseCode.SYSTEM_BUSY, b""), ("commit", "to 16"), "system busy"),
        (Command.request(RequestCode.SEND_MESSAGE, {"queueId": 5}), (ResponseCode.SUCCESS, b""),
         ("send", "queue 5"), "ok"),
        (Command.request(RequestCode.PULL_MESSAGE, {"queueId": 5}), (ResponseCode.PULL_NOT_FOUND, b""),
         ("pull", "queue 5"), "pull not found"),
        (Command.request(9999), (ResponseCode.SUCCESS, b""), ("code 9999", ""), "ok"),
        (Command.request(DLedgerRequestCode.VOTE, body=b"[not"), (1234, b""), ("vote", ""), "code 1234"),
    ],
)  # fmt: skip
def test_requests_and_replies_are_named_with_their_details(
    request_: Command, answer: tuple[int, bytes], asked: tuple[str, str], answered: str
) -> None:
    request_.opaque = 77
    dissector = Dissector()
    assert dissector.feed(4, "n1", "n2", encode(request_)) == [Rpc(asked[0], False, asked[1])]
    reply = encode(request_.reply(answer[0], body=answer[1]))
    assert dissector.feed(4, "n2", "n1", reply) == [Rpc(asked[0], True, answered)]


def test_the_same_messages_are_found_however_a_stream_is_split() -> None:
    commands = [push(PushType.APPEND, entries(number, 2)) for number in range(1, 30)]
    for opaque, command in enumerate(commands):
        command.opaque = opaque
    stream = b"".join(map(encode, commands))
    whole = Dissector().feed(1, "n1", "n2", stream)
    assert [rpc.detail for rpc in whole] == [f"{number}–{number + 1}" for number in range(1, 30)]
    rng = random.Random(7)
    for _ in range(20):
        dissector, at, found = Dissector(), 0, []
        while at < len(stream):
            size = rng.randrange(1, 400)
            found += dissector.feed(1, "n1", "n2", stream[at : at + size])
            at += size
        assert found == whole


def test_garbage_ends_the_dissection_of_its_own_stream_only() -> None:
    dissector = Dissector()
    good = encode(push(PushType.COMMIT))
    assert dissector.feed(1, "n1", "n2", good + b"\xff" * 64) == [Rpc("commit", False, "to 16")]
    assert dissector.feed(1, "n1", "n2", good) == []
    assert dissector.feed(2, "n1", "n2", good) == [Rpc("commit", False, "to 16")]
    broken = base64.b64encode(b"\0" * 40)
    body = json.dumps({"type": "APPEND", "entries": broken.decode()}).encode()
    assert dissector.feed(3, "n1", "n2", encode(Command.request(DLedgerRequestCode.PUSH, body=body)))[0].detail == ""


def test_the_number_of_dissected_streams_is_bounded() -> None:
    dissector = Dissector()
    for connection in range(MAX_STREAMS + 100):
        dissector.feed(connection, "n1", "n2", b"\0")
    assert len(dissector._streams) <= MAX_STREAMS
