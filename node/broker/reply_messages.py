"""Replies to requests: codes 324 and 325 (the same with one-letter fields), and 326, which passes them on.

The sender of a request puts its client id (REPLY_TO_CLIENT), a number (CORRELATION_ID) and how long it waits (TTL)
into an ordinary message. This broker adds its cluster (CLUSTER), and the consumer sends its reply to the reply topic of
that cluster. The broker stores the reply there and pushes it to the client that waits, over the connection on which
that client sends (R: ReplyMessageProcessor, which pushes first and then stores). The answer to the consumer is
SUCCESS once the client has accepted the reply.

The reply reaches the client only if it is registered at this broker: clients send their heartbeats to the masters that
they know, so in a cluster of several masters a request's sender must know the one that receives the reply (R).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from node.broker.append_errors import stored
from node.broker.client_manager import ClientManager
from node.broker.send import SendProcessor
from node.broker.send_request import names_of
from node.remoting import Command, Connection, FieldValue, RemotingError, RequestCode, RequestError, ResponseCode
from node.runtime import Clock
from node.store.properties import PUSH_REPLY_TIME, REPLY_TO_CLIENT, decode_properties, join_properties

__all__ = ["ReplyMessageProcessor"]

PUSH_TIMEOUT_MS = 10_000
"""How long a client may take to accept a reply (R: Broker2Client.callClient). The number of replies that wait for this
is bounded by the requests that each connection may have under way."""
_OPTIONAL = ("defaultTopic", "defaultTopicQueueNums", "reconsumeTimes", "unitMode")


class ReplyMessageProcessor:
    """Answers codes 324 and 325. `address` returns this broker's address, as stored in its messages."""

    def __init__(
        self, sends: SendProcessor, clients: ClientManager, clock: Clock, *, address: Callable[[], str]
    ) -> None:
        self._sends = sends
        self._clients = clients
        self._clock = clock
        self._address = address

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        return {RequestCode.SEND_REPLY_MESSAGE: self.process, RequestCode.SEND_REPLY_MESSAGE_V2: self.process}

    async def process(self, command: Command, connection: Connection) -> Command:
        """Store the reply, pass it on, and answer when the client has it. Raises RequestError."""
        queue_id, put = self._sends.put_reply(command, connection.remote_address)
        await stored(put.committed)
        await self._push(command, connection.remote_address, queue_id)
        return command.reply(ResponseCode.SUCCESS, fields=self._sends.reply_fields(queue_id, put))

    async def _push(self, command: Command, born_host: str, queue_id: int) -> None:
        names = names_of(command)
        properties = decode_properties(command.get_str(names["properties"], ""))
        client_id = properties.get(REPLY_TO_CLIENT)
        if client_id is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the reply has no property {REPLY_TO_CLIENT}")
        client = self._clients.producer(client_id)
        if client is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"client {client_id[:255]!r} is not here to take the reply")
        fields = self._fields(command, names)
        fields |= {"bornHost": born_host, "storeHost": self._address(), "storeTimestamp": self._clock.wall_ms()}
        fields |= {"queueId": queue_id}
        fields["properties"] = join_properties(properties | {PUSH_REPLY_TIME: str(self._clock.wall_ms())})
        request = Command.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, fields, command.body)
        try:
            taken = await client.invoke(request, timeout_ms=PUSH_TIMEOUT_MS)
        except RemotingError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"client {client_id[:255]!r}: {error}") from error
        if taken.code != ResponseCode.SUCCESS:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"client {client_id[:255]!r} did not take the reply: code {taken.code}"
            )

    def _fields(self, command: Command, names: Mapping[str, str]) -> dict[str, FieldValue]:
        """The header of the reply under its long names."""
        fields: dict[str, FieldValue] = {
            "producerGroup": command.get_str(names["producerGroup"], ""),
            "topic": command.get_str(names["topic"]),
            "sysFlag": command.get_int(names["sysFlag"], 0),
            "bornTimestamp": command.get_int(names["bornTimestamp"], 0),
            "flag": command.get_int(names["flag"], 0),
        }
        return fields | {
            name: command.ext_fields[names[name]] for name in _OPTIONAL if names[name] in command.ext_fields
        }
