"""Names the messages in a connection: parses the remoting frames in the bytes that hosts send each other.

Requests are named by their code, answers by the request that they answer; messages of the replication protocol also
have details: terms, the result of a vote, the indexes of the entries.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, TypeVar

from node.dledger.messages import (
    HeartBeatRequest,
    HeartBeatResponse,
    MalformedMessage,
    Message,
    PushEntryRequest,
    PushEntryResponse,
    Response,
    VoteRequest,
    VoteResponse,
)
from node.dledger.rpc import DLedgerCode, DLedgerRequestCode
from node.remoting.codec import FrameParser
from node.remoting.codes import RequestCode, ResponseCode
from node.remoting.command import Command, FrameError

__all__ = ["Dissector", "Rpc"]

MAX_STREAMS = 4096
"""Directions of connections that are tracked at once; a run has some hundreds. Beyond this the oldest is dropped."""

MAX_UNANSWERED = 1024
"""Unanswered requests remembered per direction of a connection; clients have far fewer in flight."""

MAX_DETAIL = 60
"""Longest detail, in characters; details come from the nodes, so they need a limit."""

ENTRY_INDEX = slice(8, 16)
"""Position of an entry's index (node.dledger.entry)."""

ENTRY_SIZE = slice(4, 8)

_NAMES: dict[int, str] = {
    **{code: code.name.lower().replace("_", " ") for code in RequestCode},
    RequestCode.SEND_MESSAGE: "send",
    RequestCode.SEND_MESSAGE_V2: "send",
    RequestCode.SEND_BATCH_MESSAGE: "send batch",
    RequestCode.PULL_MESSAGE: "pull",
    RequestCode.HEART_BEAT: "client heartbeat",
    RequestCode.GET_MAX_OFFSET: "max offset",
    RequestCode.GET_MIN_OFFSET: "min offset",
    RequestCode.GET_ROUTE_INFO_BY_TOPIC: "route",
    DLedgerRequestCode.VOTE: "vote",
    DLedgerRequestCode.HEART_BEAT: "heartbeat",
    DLedgerRequestCode.METADATA: "metadata",
    DLedgerRequestCode.APPEND: "append entry",
    DLedgerRequestCode.GET: "get entries",
}


_MessageT = TypeVar("_MessageT", bound=Message)


class Rpc(NamedTuple):
    """One message: its name (for an answer, that of the request), and a short detail."""

    name: str
    is_reply: bool
    detail: str


class _Stream:
    """One direction of a connection. `parser` is None once its bytes were not valid frames."""

    def __init__(self) -> None:
        self.parser: FrameParser | None = FrameParser()
        self.asked: OrderedDict[int, str] = OrderedDict()
        """Names of the requests sent in this direction, by opaque."""


class Dissector:
    """Names the messages in segments, which must be fed in the order in which they were sent."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[int, str, str], _Stream] = OrderedDict()

    def feed(self, connection: int, source: str, destination: str, content: bytes) -> list[Rpc]:
        """The messages that end in this segment."""
        stream = self._stream(connection, source, destination)
        if stream.parser is None:
            return []
        try:
            commands = stream.parser.feed(content)
        except FrameError as error:
            stream.parser = None
            commands = error.commands
        back = self._stream(connection, destination, source)
        return [
            self._reply(command, back) if command.is_response else _request(command, stream) for command in commands
        ]

    def forget(self, connection: int, source: str, destination: str) -> None:
        """Forget a direction that has ended."""
        self._streams.pop((connection, source, destination), None)

    def _stream(self, connection: int, source: str, destination: str) -> _Stream:
        key = (connection, source, destination)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
            if len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
        return stream

    @staticmethod
    def _reply(command: Command, asking: _Stream) -> Rpc:
        name = asking.asked.pop(command.opaque, "answer")
        return Rpc(name, True, _reply_detail(name, command)[:MAX_DETAIL])


def _request(command: Command, stream: _Stream) -> Rpc:
    name, detail = _NAMES.get(command.code, f"code {command.code}"), ""
    if command.code == DLedgerRequestCode.PUSH:
        name, detail = _push(_message(PushEntryRequest, command.body))
    elif command.code in _CANDIDACIES:
        message = _message(_CANDIDACIES[command.code], command.body)
        detail = "" if message is None else f"term {message.term}"
    elif name == "send":
        queue = command.ext_fields.get("queueId", command.ext_fields.get("e"))  # V2 has one-letter field names
        detail = "" if queue is None else f"queue {queue}"
    elif "queueId" in command.ext_fields:
        detail = f"queue {command.ext_fields['queueId']}"
    if not command.is_oneway:
        stream.asked[command.opaque] = name
        if len(stream.asked) > MAX_UNANSWERED:
            stream.asked.popitem(last=False)
    return Rpc(name, False, detail[:MAX_DETAIL])


_CANDIDACIES: dict[int, type[Message]] = {
    DLedgerRequestCode.VOTE: VoteRequest,
    DLedgerRequestCode.HEART_BEAT: HeartBeatRequest,
}

_ANSWERS: dict[str, type[Response]] = {
    "vote": VoteResponse,
    "heartbeat": HeartBeatResponse,
    **dict.fromkeys(("append", "commit", "compare", "truncate"), PushEntryResponse),
}


def _push(request: PushEntryRequest | None) -> tuple[str, str]:
    if request is None:
        return "push", ""
    kind = request.type.name.lower()
    entries = request.entries
    indexes = []
    at = 0
    while len(entries) - at >= ENTRY_INDEX.stop:
        size_bytes = int.from_bytes(entries[at + ENTRY_SIZE.start : at + ENTRY_SIZE.stop], "big")
        if size_bytes <= 0:
            break
        indexes.append(int.from_bytes(entries[at + ENTRY_INDEX.start : at + ENTRY_INDEX.stop], "big"))
        at += size_bytes
    if not indexes:
        return kind, f"to {request.commit_index}" if kind == "commit" else ""
    first, last = indexes[0], indexes[-1]
    return kind, str(first) if first == last else f"{first}–{last}"


def _reply_detail(name: str, command: Command) -> str:
    if command.code != ResponseCode.SUCCESS:
        return _word(ResponseCode, command.code)
    if name not in _ANSWERS:
        return "ok"
    # Errors that occur before the request is processed are answered by a plain response.
    answer = _message(_ANSWERS[name], command.body) or _message(Response, command.body)
    if isinstance(answer, VoteResponse):
        return answer.vote_result.name.lower().replace("_", " ")
    if answer is None or answer.code is not DLedgerCode.SUCCESS:
        return _word(DLedgerCode, None if answer is None else answer.code)
    index = answer.index if isinstance(answer, PushEntryResponse) else -1
    return "ok" if index == -1 else f"ok {index}"


def _word(codes: Any, number: Any) -> str:
    try:
        return str(codes(number).name).lower().replace("_", " ")
    except ValueError:
        return f"code {number}"


def _message(kind: type[_MessageT], body: bytes) -> _MessageT | None:
    try:
        return kind.from_body(body)
    except MalformedMessage:
        return None
