"""The replies to sends, written when their messages are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from node.broker.ledger import StoredInPart
from node.broker.message_store import MessageStore, Placed
from node.broker.send_request import names_of
from node.remoting import (
    Command,
    DeferredReply,
    ReplyTemplate,
    RequestError,
    ResponseCode,
    TemplateRequest,
    encode,
    framed,
)
from node.store.columns import pack_longs
from node.store.properties import UNIQUE_KEY, property_value
from node.store.record import message_id

__all__ = ["RefusalTemplates", "SendReplies", "SendReplyWriter"]

REPLY_NAMES = ("msgId", "queueId", "queueOffset", "transactionId")
MAX_FORMATS = 1024
"""Queue ids whose reply formats are cached."""
MAX_REFUSALS = 64
"""Refusals whose replies are cached; the reasons name topics and queues."""


class SendReplyWriter:
    """What the replies of one broker have in common, and how many are still unsent."""

    def __init__(self, store: MessageStore, store_host: str, common_fields: Mapping[str, str]) -> None:
        self.store = store
        self.host_text = message_id(store_host, 0)[:-16]
        """Common beginning of the ids of messages stored here; the position follows in 16 digits."""
        self.common_fields = common_fields
        self.template = ReplyTemplate(REPLY_NAMES, common_fields)
        self._formats: dict[int, bytes] = {}
        self.now_s = asyncio.get_running_loop().time
        self._under_way = 0
        self._all_sent: asyncio.Future[None] | None = None

    async def drain(self, timeout_s: float) -> None:
        """Wait until every reply is sent, at most `timeout_s` seconds."""
        if self._under_way:
            self._all_sent = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._all_sent,), timeout=timeout_s)

    def stored(self, requests: Sequence[Command], queue_ids: Sequence[int], placed: Sequence[Placed]) -> bytes:
        """The frames of the replies to requests whose messages are stored."""
        frames: list[bytes] = []
        formats, host = self._formats, self.host_text
        for request, queue_id, each in zip(requests, queue_ids, placed, strict=True):
            if isinstance(request, TemplateRequest) and request.key is not None and request.serializer == "json":
                queue_offset, positions = each
                ids = b"%016X" % positions[0] if len(positions) == 1 else _ids(host, positions)[len(host) :].encode()
                known = formats.get(queue_id) or self._format(queue_id)
                frames += framed(known % (request.opaque, ids, queue_offset, request.key))
            else:
                frames.append(self.template.frame(request, self.values(queue_id, each, _unique_key(request))))
        return b"".join(frames)

    def values(self, queue_id: int, placed: Placed, key: str) -> tuple[str, ...]:
        """The values of a reply's fields, for the messages of one request."""
        return _ids(self.host_text, placed[1]), str(queue_id), str(placed[0]), key

    def _format(self, queue_id: int) -> bytes:
        """The header of replies for this queue, as a format of opaque, ids without their common beginning, queue offset
        and key."""
        if len(self._formats) >= MAX_FORMATS:
            self._formats.clear()
        known = self.template.json_format((f"{self.host_text}%b", str(queue_id), "%d", "%b"))
        self._formats[queue_id] = known
        return known

    def begun(self) -> None:
        """A reply, or several at once, will be sent; `ended` is called then."""
        self._under_way += 1

    def ended(self) -> None:
        """One of them was sent."""
        self._under_way -= 1
        if self._all_sent is not None and not self._under_way and not self._all_sent.done():
            self._all_sent.set_result(None)


class SendReplies(DeferredReply):
    """The replies to requests whose messages are stored together."""

    __slots__ = ("_began_s", "_is_stored", "_outcome", "_placed", "_queue_ids", "_writer")

    def __init__(self, writer: SendReplyWriter, requests: Sequence[Command], queue_ids: Sequence[int]) -> None:
        super().__init__(requests)
        self._writer = writer
        self._queue_ids = queue_ids
        self._began_s = writer.now_s()
        self._placed: Sequence[Placed] = ()
        self._is_stored = False
        self._outcome: Exception | None = None

    def placed(self, placed: Sequence[Placed]) -> None:
        """The messages are in the log, at these places."""
        self._placed = placed
        self._writer.begun()
        if self._is_stored:
            self._answer()

    def stored(self, error: Exception | None) -> None:
        """The outcome for the messages; only the first call counts. It may come before `placed`."""
        if not self._is_stored:
            self._is_stored, self._outcome = True, error
            if self._placed:
                self._answer()

    def _answer(self) -> None:
        writer, error = self._writer, self._outcome
        writer.ended()
        if error is None or isinstance(error, StoredInPart):
            writer.store.committed_total += sum([len(positions) for _, positions in self._placed])
            writer.store.note_put(writer.now_s() - self._began_s, len(self.requests))
        if error is None:
            self.send(writer.stored(self.requests, self._queue_ids, self._placed))
            return
        frames = []
        for request, queue_id, placed in zip(self.requests, self._queue_ids, self._placed, strict=True):
            if isinstance(error, StoredInPart):
                values = writer.values(queue_id, placed, _unique_key(request))
                fields = {**dict(zip(REPLY_NAMES, values, strict=True)), **writer.common_fields}
                reply = request.reply(error.code, remark=str(error), fields=fields)
            else:
                remark = f"the outcome is unknown: {error}"
                reply = request.reply(ResponseCode.SYSTEM_ERROR, remark=remark, fields=writer.common_fields)
            frames.append(encode(reply))
        self.send(b"".join(frames))


def _ids(host: str, positions: Sequence[int]) -> str:
    """The ids of messages at these positions, as written in a reply."""
    if len(positions) == 1:
        return f"{host}{positions[0]:016X}"
    return f"{host}{pack_longs(positions).hex(',', 8).upper().replace(',', f',{host}')}"


def _unique_key(request: Command) -> str:
    """The unique key of a request, which its reply repeats; "" if it has none."""
    if isinstance(request, TemplateRequest):
        return property_value((request.values[3] or b"").decode(), UNIQUE_KEY) or ""
    return property_value(request.ext_fields.get(names_of(request)["properties"], ""), UNIQUE_KEY) or ""


class RefusalTemplates:
    """Replies to refused requests, of which very many may have the same reason."""

    def __init__(self, common_fields: Mapping[str, str]) -> None:
        self._common_fields = common_fields
        self._templates: dict[tuple[int, str], ReplyTemplate] = {}

    def frames(self, requests: Sequence[Command], errors: Sequence[RequestError]) -> bytes:
        """The frames of the replies to refused requests, each with its own error."""
        pairs = zip(requests, errors, strict=True)
        return b"".join([self._template(error).frame(request, ()) for request, error in pairs])

    def _template(self, error: RequestError) -> ReplyTemplate:
        key = error.code, error.remark
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_REFUSALS:
                self._templates.clear()
            template = ReplyTemplate((), self._common_fields, code=error.code, remark=error.remark)
            self._templates[key] = template
        return template
