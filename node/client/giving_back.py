"""Sends messages that a handler has failed on back to the broker (code 36), which copies them for another try.

Some are refused permanently: their record has expired, or the current master never had it. Then the client sends the
copy itself, to the retry topic of its group (R: DefaultMQPushConsumerImpl.sendMessageBack, which does so after every
failure; here not if the broker may take the message back later, because an extra copy is an extra delivery).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from node.client.errors import ClientError, NoRoute, error_from_reply
from node.client.messages import MessageQueue, ReceivedMessage, retry_topic
from node.client.requests import retry_request, send_back_request
from node.client.results import SendStatus
from node.client.routes import RouteBook
from node.client.session import Session
from node.remoting import Command, ResponseCode
from node.store.properties import (
    DELAY_LEVEL,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TIMER_PROPERTIES,
    TRANSACTION_PREPARED,
    WAIT_STORE,
    PropertyError,
)
from node.store.record import SYS_FLAG_BORN_HOST_V6, SYS_FLAG_STORE_HOST_V6, SYS_FLAG_TRANSACTION_MASK

__all__ = ["GivingBack"]

logger = logging.getLogger("node.client")

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry; each further one waits a level longer (R)."""
MAX_REMEMBERED: Final = 1024
"""Limit on messages remembered as refused, each logged once; further ones are logged at most every ten seconds."""
REMEMBERED_S: Final = 60.0
"""How long a message is remembered that is not refused again: it is handled again every 5 s or so."""
_GROWING_DELAY: Final = 0
_TO_DEAD_LETTERS: Final = -1
_RECONSUME_TIME: Final = "RECONSUME_TIME"
_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
_RECORD_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6 | SYS_FLAG_TRANSACTION_MASK
"""System flags that describe the record, not the body."""
_STORED: Final = frozenset(int(status.value) for status in SendStatus)


class GivingBack:
    """Sends messages of `group` back. After `max_reconsume_times` redeliveries they become dead letters."""

    def __init__(self, session: Session, group: str, max_reconsume_times: int) -> None:
        self._session = session
        self._group = group
        self._max_reconsume_times = max_reconsume_times
        self._refused: dict[tuple[MessageQueue, int], float] = {}
        """When each message was last refused (loop time, s), the longest ago first."""

    async def give(self, queue: MessageQueue, message: ReceivedMessage) -> bool:
        """Have a message of `queue` redelivered after a delay; False if no broker has confirmed that it will be."""
        is_dead = message.reconsume_times >= self._max_reconsume_times
        return await self._give(queue, message, _GROWING_DELAY, message.reconsume_times + 1, is_dead)

    async def bury(self, queue: MessageQueue, message: ReceivedMessage) -> bool:
        """Put a message, whose `reconsume_times` counts its last delivery already, among the dead letters; False if no
        broker has confirmed that it is there."""
        return await self._give(queue, message, _TO_DEAD_LETTERS, message.reconsume_times, True)

    async def _give(
        self, queue: MessageQueue, message: ReceivedMessage, delay_level: int, times: int, is_dead: bool
    ) -> bool:
        try:
            await self._ask(queue, message, delay_level)
        except ClientError as error:
            self._session.routes.failed(queue.broker_name, queue.topic, error)
            if error.may_pass:
                self._complain("group %s could not give a message back: %s", error)
                return False
            try:
                await self._send_copy(queue, self._copy(message, times, is_dead))
            except (ClientError, PropertyError) as second:
                self._complain_once(queue, message, error, second)
                return False
            self._complain("group %s has sent a copy of a message that was not taken back: %s", error)
        return True

    async def _ask(self, queue: MessageQueue, message: ReceivedMessage, delay_level: int) -> None:
        """Ask the broker to take a message back (code 36). Raises ClientError."""
        request = send_back_request(
            self._group, physical_offset=message.stored.physical_offset, message_id=message.message_id,
            topic=message.topic, delay_level=delay_level, max_reconsume_times=self._max_reconsume_times,
        )  # fmt: skip
        address = self._session.routes.require_master(queue.broker_name)
        reply = await self._session.requests.invoke(address, request)
        if reply.code != ResponseCode.SUCCESS:
            raise error_from_reply(reply.code, reply.remark, address)

    def _copy(self, message: ReceivedMessage, times: int, is_dead: bool) -> Command:
        """The request that stores a copy as the broker would make it. Raises PropertyError."""
        stored = message.stored
        gone = (TRANSACTION_PREPARED, DELAY_LEVEL, *TIMER_PROPERTIES)  # the original's own delay or transaction is over
        properties = {name: value for name, value in stored.properties.items() if name not in gone}
        properties.setdefault(ORIGIN_MESSAGE_ID, message.message_id)
        properties[RETRY_TOPIC] = message.topic
        properties[_RECONSUME_TIME] = str(times)
        properties[_MAX_RECONSUME_TIMES] = str(self._max_reconsume_times)
        properties[WAIT_STORE] = "true"  # the message counts as processed once this is answered
        if not is_dead:
            properties[DELAY_LEVEL] = str(FIRST_RETRY_LEVEL + times - 1)
        return retry_request(
            self._group, retry_topic(self._group), stored.body, properties=properties,
            born_ms=stored.born_timestamp_ms, sys_flag=stored.sys_flag & ~_RECORD_FLAGS, flag=stored.flag,
            reconsume_times=times, is_dead=is_dead,
        )  # fmt: skip

    async def _send_copy(self, queue: MessageQueue, request: Command) -> None:
        """Store a copy on the broker of `queue`, or on another if it certainly was not stored. Raises ClientError."""
        routes = self._session.routes
        failure: ClientError = NoRoute(f"topic {retry_topic(self._group)} has no queue that may be written")
        for broker_name in await self._writable(queue.broker_name):
            try:
                address = routes.require_master(broker_name)
                reply = await self._session.requests.invoke(address, request)
                if reply.code in _STORED:
                    return
                raise error_from_reply(reply.code, reply.remark, address)
            except ClientError as error:
                routes.failed(broker_name, retry_topic(self._group), error)
                if not error.is_definite:
                    raise
                failure = error
        raise failure

    async def _writable(self, first: str) -> list[str]:
        """The brokers whose retry topic may be written, `first` before the others. A broker without the topic creates
        it. Raises NoRoute."""
        try:
            route = await self._session.routes.get(retry_topic(self._group))
        except NoRoute as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            return [first]
        names = dict.fromkeys(queue.broker_name for queue in RouteBook.write_queues(route))
        return sorted(names, key=lambda name: name != first)

    def _complain(self, text: str, error: ClientError) -> None:
        self._session.complaints.warning(logger, f"{text} {self._group}", text, self._group, error)

    def _complain_once(
        self, queue: MessageQueue, message: ReceivedMessage, error: ClientError, second: Exception
    ) -> None:
        place, now_s = (queue, message.queue_offset), asyncio.get_running_loop().time()
        if self._refused.pop(place, None) is not None:
            self._refused[place] = now_s
            return
        text = "group %s could give message %d of %s neither back (%s) nor a copy of it (%s); it is handled again here"
        arguments = (self._group, message.queue_offset, queue, error, second)
        if len(self._refused) >= MAX_REMEMBERED:
            oldest = next(iter(self._refused))
            if self._refused[oldest] + REMEMBERED_S > now_s:
                self._session.complaints.warning(logger, f"{text} {self._group}", text, *arguments)
                return
            del self._refused[oldest]
        self._refused[place] = now_s
        logger.warning(text, *arguments)
