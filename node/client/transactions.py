"""Transactional sending: a half message first, then the local transaction, then its outcome.

No consumer sees a half message before it is committed. If the outcome does not reach the broker, or there is none yet,
the broker asks any producer of the group, and `check` answers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Final

from node.client.errors import ClientError
from node.client.messages import (
    PRODUCER_GROUP,
    TRANSACTION_PREPARED,
    MessageQueue,
    NewMessage,
    ReceivedMessage,
    deflate,
)
from node.client.producer import Producer, Receipt
from node.client.requests import end_transaction_request
from node.client.session import Session
from node.remoting import Command, RequestCode
from node.store.record import (
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    decode_record,
)

__all__ = ["TransactionProducer", "TransactionState"]

logger = logging.getLogger("node.client")

MAX_CHECKS_UNDER_WAY: Final = 1000
"""Limit on concurrent checks; further ones are dropped, and the broker asks again."""


class TransactionState(IntEnum):
    """The outcome of a local transaction. The values are those of the protocol."""

    UNKNOWN = 0
    """Not decided: the broker asks again later."""
    COMMIT = SYS_FLAG_TRANSACTION_COMMIT
    ROLLBACK = SYS_FLAG_TRANSACTION_ROLLBACK


class TransactionProducer(Producer):
    """A producer whose messages become visible when a local transaction has committed. Made by
    `Client.transaction_producer`. `check` returns the outcome of a half message's transaction; it must determine that
    from what the local transaction left behind, because it may be called in another process and much later."""

    def __init__(
        self,
        session: Session,
        group: str,
        check: Callable[[ReceivedMessage], Awaitable[TransactionState]],
        *,
        retries: int = 2,
        timeout_ms: int = 3000,
    ) -> None:
        self._check = check
        self._checks = 0
        super().__init__(session, group, retries=retries, timeout_ms=timeout_ms)

    async def send_in_transaction(
        self, message: NewMessage, execute: Callable[[Receipt], Awaitable[TransactionState]]
    ) -> tuple[Receipt, TransactionState]:
        """Send `message` as a half message, run `execute`, and tell the broker what it returned.

        Raises SendFailed if the half message could not be sent; `execute` has not run then. Exceptions of `execute`
        are raised here, after UNKNOWN was sent to the broker. The outcome may fail to reach the broker, which then asks
        `check`.
        """
        if message.delay_level:
            raise ValueError("a transactional message cannot be delayed")
        key = self._session.unique_keys.next()
        body, sys_flag = deflate(message.body, self._compress_over_bytes)
        properties = message.stored_properties(key) | {TRANSACTION_PREPARED: "true", PRODUCER_GROUP: self._group}
        receipt = await self._deliver(
            RequestCode.SEND_MESSAGE_V2, message.topic, body, properties, (key,),
            sys_flag | SYS_FLAG_TRANSACTION_PREPARED, None, None, None,
        )  # fmt: skip
        state = TransactionState.UNKNOWN
        try:
            state = await execute(receipt)
        finally:
            await self._end(
                receipt.result.address, state, receipt.queue_offset, int(receipt.result.msg_id[-16:], 16), key, False
            )
        return receipt, state

    async def check_transaction(self, command: Command, address: str) -> None:
        if self._checks >= MAX_CHECKS_UNDER_WAY:
            return
        self._checks += 1
        try:
            stored, _ = decode_record(command.body)
            message = ReceivedMessage(stored, MessageQueue(stored.topic, "", stored.queue_id))
            state = await self._check(message)
            await self._end(
                address, state, command.get_int("tranStateTableOffset"), command.get_int("commitLogOffset"),
                message.message_id, True,
            )  # fmt: skip
        except Exception as error:
            self._session.complaints.warning(
                logger, f"check {self._group}", "checking a transaction of group %s failed: %r", self._group, error
            )
        finally:
            self._checks -= 1

    async def _end(
        self, address: str, state: TransactionState, queue_offset: int, physical_offset: int, key: str, from_check: bool
    ) -> None:
        request = end_transaction_request(
            self._group, flag=int(state), queue_offset=queue_offset, physical_offset=physical_offset, message_id=key,
            from_check=from_check,
        )  # fmt: skip
        try:
            await self._session.requests.send_oneway(address, request)
        except ClientError as error:
            self._session.complaints.warning(
                logger, f"end {self._group}", "the outcome of a transaction was not sent: %s", error
            )
