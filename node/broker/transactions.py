"""Transactions: half messages, their end, and checks with the producer if the end does not come.

A half message is stored in RMQ_SYS_TRANS_HALF_TOPIC, where no consumer sees it (R, since 4.3; in S1's older scheme it
was in the log without a queue, with the same effect). END_TRANSACTION (37) commits it by a copy in its real topic, or
rolls it back; either way a message in the op topic records it. If the end of a half message does not come, one of its
group's producers gets a check (code 39) and answers with an END (S3: only the master asks).

Which transactions are open is derived from the log: a half message opens one; a committed copy or an op message, each
of which carries the half message's physical offset, closes it. So a transaction that ended is never checked again and
never committed twice, whatever crashes in between.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from node.broker.append_errors import PUT_REFUSALS, forget, read_message, refusal, stored
from node.broker.client_manager import ClientManager
from node.broker.dispatch_batch import DispatchBatch
from node.broker.dispatcher import Dispatcher, DispatchFailed
from node.broker.internal_topics import HALF_TOPIC, OP_TOPIC, UNRESOLVED_TOPIC
from node.broker.ledger import DLedgerError, Ledger, ReadMode
from node.broker.message_store import MessageStore, NotWritable
from node.broker.requeue import copy_of, real_place
from node.config import TransactionsConfig
from node.logs import LogLimiter
from node.remoting import Command, Connection, RequestCode, RequestError, ResponseCode
from node.runtime import Clock
from node.store.properties import (
    CHECK_IMMUNITY_S,
    PRODUCER_GROUP,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TRANSACTION_PREPARED,
    UNIQUE_KEY,
    join_properties,
    property_value,
    whole_number,
)
from node.store.record import (
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    Message,
    RecordError,
    RecordSummary,
)
from node.store.record_batch import batch_of_one, encode_record

__all__ = [
    "DONE_BEFORE",
    "MAX_OPEN_TRANSACTIONS",
    "EndTransactionProcessor",
    "OpenTransactions",
    "TransactionChecks",
    "names_half",
]

logger = logging.getLogger("node.broker")

DONE_BEFORE = b"-1"
"""Body of an op message that ends no half message for Apache: it ignores half messages before its consumer offset."""
MAX_OPEN_TRANSACTIONS = 100_000
"""Beyond it half messages are refused; each open one costs about 300 bytes."""
MAX_AGE_MS = 72 * 3_600_000
"""A half message about which nobody could be asked for so long is given up (R: as long as the log is kept)."""
OLD_FOR_S = 60.0
"""How long, by the loop's clock, it must look that old: to a wall clock that is ahead for a moment all of them do."""
RECHECK_S = 1.0
"""Longest sleep while a transaction is open: a wall clock that was set is noticed within this time."""
RETRY_MS = 10_000
"""Delay after a half message could not be read or the log accepted nothing."""
BARRIER_TIMEOUT_S = 3.0
"""Time for the other members to confirm that this one leads; then it is tried again."""
CHECKS_PER_TURN = 64
"""Checks sent in one turn of the loop."""
FORGET_ENDINGS_AT = 10_000
"""Ends that are noted as put; at this number, those that are dispatched are forgotten."""
REMOVE_TAG = "d"
"""Tag of an op message: the half message it names is to be removed (R)."""


@dataclass(slots=True)
class _Half:
    queue_offset: int
    stored_ms: int
    due_ms: int
    """When to send the next check."""
    checks: int = 0
    is_put_off: bool = False
    """Whether `due_ms` was counted from a later reading of the clock, not from the half message's store time."""

    old_since_s: float | None = None
    """Since when it has looked too old, by the loop's clock."""

    def put_off(self, due_ms: int) -> None:
        self.due_ms, self.is_put_off = due_ms, True

    def is_too_old(self, now_ms: int, loop_s: float) -> bool:
        """Whether it has looked too old for a while; called each time that a check is due."""
        if now_ms - self.stored_ms <= MAX_AGE_MS:
            self.old_since_s = None
        elif self.old_since_s is None:
            self.old_since_s = loop_s
        return self.old_since_s is not None and loop_s - self.old_since_s >= OLD_FOR_S


def names_half(body: bytes, number: int) -> bool:
    """Whether an op message marks the half message with this queue offset as done."""
    return body == DONE_BEFORE or str(number).encode() in body.split(b",")  # more than one: RocketMQ 5


class OpenTransactions:
    """The open transactions by the physical offset of their half message, derived from the log."""

    def __init__(self, *, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        """From a half message to its first check."""
        self.halves: dict[int, _Half] = {}
        self._endings: dict[int, int] = {}
        self.on_opened: Callable[[int], None] = lambda physical_offset: None

    @property
    def is_full(self) -> bool:
        return len(self.halves) >= MAX_OPEN_TRANSACTIONS

    def dispatch(self, record: RecordSummary) -> None:
        """Note a half message, or that a transaction has ended."""
        if record.topic == HALF_TOPIC:
            timeout_ms = self.timeout_ms
            immunity_s = whole_number(property_value(record.properties_text, CHECK_IMMUNITY_S))
            if immunity_s is not None:
                timeout_ms = min(immunity_s * 1000, MAX_AGE_MS)
            stored_ms = record.store_timestamp_ms
            self.halves[record.physical_offset] = _Half(record.queue_offset, stored_ms, stored_ms + timeout_ms)
            self.on_opened(record.physical_offset)
        elif record.topic == OP_TOPIC or record.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT:
            self._end(record)

    def _end(self, record: RecordSummary) -> None:
        offset = record.prepared_transaction_offset
        if offset == 0 and record.topic == OP_TOPIC:  # the log's first message, or Apache's op: it has no such offset
            half = self.halves.get(0)
            if half is None or not names_half(record.body, half.queue_offset):
                return
        self.halves.pop(offset, None)

    def is_ending(self, offset: int, term: int) -> bool:
        """Whether the transaction's end was put in this term."""
        return self._endings.get(offset) == term

    def note_ending(self, offset: int, term: int) -> None:
        """The end is put. Until it is dispatched, however long the disk or the group takes, no other end may be put for
        the same transaction; if this node has stopped leading in between, it is unknown what is left."""
        if len(self._endings) >= FORGET_ENDINGS_AT:
            self._endings = {at: term for at, term in self._endings.items() if at in self.halves}
        self._endings[offset] = term

    def take_back(self, offset: int) -> None:
        """The end was not put after all."""
        self._endings.pop(offset, None)

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Nothing is derived from messages that are not special."""

    def snapshot(self) -> Any:
        """Everything that is open."""
        return [
            [offset, half.queue_offset, half.stored_ms, half.due_ms, half.checks, half.is_put_off]
            for offset, half in self.halves.items()
        ]

    def restore(self, state: Any) -> None:
        """Continue from a snapshot; None: from nothing."""
        self.halves = {offset: _Half(*numbers) for offset, *numbers in state or []}
        for half in self.halves.values():
            half.is_put_off |= half.checks > 0  # a snapshot of an earlier version does not have it

    async def flush(self) -> None:
        """Nothing to do: the snapshot is the whole state."""


class _Endings:
    """Puts the messages that end a transaction."""

    def __init__(self, store: MessageStore, store_host: Callable[[], str]) -> None:
        self._store = store
        self._store_host = store_host

    def commit(self, half: Message, *, topic: str, queue_id: int) -> asyncio.Future[None]:
        """Put the copy that consumers see, and the op message after it."""
        properties = dict(half.properties)
        for name in (TRANSACTION_PREPARED, REAL_TOPIC, REAL_QUEUE_ID):
            properties.pop(name, None)
        copy = copy_of(
            half,
            topic=topic,
            queue_id=queue_id,
            properties=properties,
            store_host=self._store_host(),
            sys_flag=half.sys_flag & ~SYS_FLAG_TRANSACTION_MASK | SYS_FLAG_TRANSACTION_COMMIT,
            prepared_transaction_offset=half.physical_offset,
            now_ms=None if topic == UNRESOLVED_TOPIC else self._store.wall_ms(),  # a message given up does not wait
        )
        committed = self._store.put_one(copy).committed
        try:
            forget(self.close(half))
        except (NotWritable, DLedgerError):
            pass  # the copy alone ends the transaction
        return committed

    def close(self, half: Message) -> asyncio.Future[None]:
        """Put the op message: the half message is done."""
        batch = batch_of_one(
            topic=OP_TOPIC,
            queue_id=0,
            body=str(half.queue_offset).encode(),
            properties_text=join_properties({"TAGS": REMOVE_TAG}),
            born_timestamp_ms=half.born_timestamp_ms,
            store_host=self._store_host(),
            prepared_transaction_offset=half.physical_offset,
        )
        return self._store.put_one(batch).committed


class EndTransactionProcessor:
    """Answers code 37. `check_write(command, connection, topic)` raises RequestError if the client may not send to that
    topic."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        store: MessageStore,
        dispatcher: Dispatcher,
        transactions: OpenTransactions,
        store_host: Callable[[], str],
        not_leader_remark: Callable[[], str],
        check_write: Callable[[Command, Connection, str], None] | None = None,
    ) -> None:
        self._check_write = check_write
        self._ledger = ledger
        self._store = store
        self._dispatcher = dispatcher
        self._transactions = transactions
        self._endings = _Endings(store, store_host)
        self._not_leader_remark = not_leader_remark

    async def process(self, command: Command, connection: Connection) -> Command | None:
        """Commit or roll back, answered when that is committed in the log; no answer if the producer does not
        know (R). The request is checked against the half message: group, queue offset, physical offset."""
        if not self._store.is_master:
            raise RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, self._not_leader_remark())
        verdict = command.get_int("commitOrRollback", 0)
        if verdict not in (SYS_FLAG_TRANSACTION_COMMIT, SYS_FLAG_TRANSACTION_ROLLBACK):
            logger.debug("a producer does not know how its transaction ended: %s", connection.remote_address)
            return None
        offset = command.get_int("commitLogOffset")
        await self._catch_up()
        term = self._ledger.member_state.term
        transactions = self._transactions
        if offset not in transactions.halves or transactions.is_ending(offset, term):
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"no transaction is open at {offset}")
        half = self._half(command, offset)
        if self._check_write is not None:
            self._check_write(command, connection, half.properties.get(REAL_TOPIC, ""))
        transactions.note_ending(offset, term)
        await self._end(half, verdict)
        return command.reply(ResponseCode.SUCCESS)

    async def _catch_up(self) -> None:
        """Wait for dispatch: a half message that was acknowledged a moment ago must be known here."""
        try:
            dispatched = self._dispatcher.wait_for(self._ledger.store.committed_index)
            if dispatched is not None:
                await dispatched
        except DispatchFailed as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error

    def _half(self, command: Command, offset: int) -> Message:
        try:
            half = read_message(self._ledger.store, self._store.queues, offset)
        except (OSError, RecordError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"no message lies at {offset}: {error}") from error
        if half.properties.get(PRODUCER_GROUP) != command.get_str("producerGroup"):
            raise RequestError(ResponseCode.SYSTEM_ERROR, "the producer group is not that of the half message")
        if half.queue_offset != command.get_int("tranStateTableOffset"):
            raise RequestError(ResponseCode.SYSTEM_ERROR, "tranStateTableOffset is not that of the half message")
        return half

    async def _end(self, half: Message, verdict: int) -> None:
        try:
            if verdict == SYS_FLAG_TRANSACTION_COMMIT:
                topic, queue_id = real_place(half)
                committed = self._endings.commit(half, topic=topic, queue_id=queue_id)
            else:
                committed = self._endings.close(half)
        except PUT_REFUSALS as error:
            self._transactions.take_back(half.physical_offset)
            raise refusal(error, self._not_leader_remark()) from error
        await stored(committed)
        await self._catch_up()


class TransactionChecks:
    """Sends checks of open transactions to producers while this node is master. `may_ask(connection, topic)` tells
    whether a producer may be shown messages of a topic."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        store: MessageStore,
        clients: ClientManager,
        transactions: OpenTransactions,
        clock: Clock,
        config: TransactionsConfig,
        store_host: Callable[[], str],
        may_ask: Callable[[Connection, str], bool] | None = None,
    ) -> None:
        self._may_ask = may_ask or (lambda connection, topic: True)
        self._ledger = ledger
        self._store = store
        self._clients = clients
        self._transactions = transactions
        self._clock = clock
        self.configure(config)
        self._endings = _Endings(store, store_host)
        self._running = False
        self._due: list[tuple[int, int]] = []
        self._seen_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.checks_total = 0
        """Checks sent since the start."""

    def configure(self, config: TransactionsConfig) -> None:
        """Apply `config`, from the next check of each transaction on."""
        self._transactions.timeout_ms = round(config.timeout_s * 1000)
        self._interval_ms = round(config.check_interval_s * 1000)
        self._max_checks = config.max_checks

    def start(self) -> None:
        """This node is master now."""
        self.stop()
        self._running = True
        self._transactions.on_opened = self._opened
        self._set_all_due(self._clock.wall_ms())
        self._arm()

    def _set_all_due(self, now_ms: int) -> None:
        """Compute when to check each transaction: the clock may have been set back since its times were noted, here or
        at another master. One that was stored in the future is checked at once (R), one that was put off again as
        usual, whether or not there was anybody to ask."""
        self._seen_ms = now_ms
        for half in self._transactions.halves.values():
            if half.is_put_off:
                half.due_ms = min(half.due_ms, now_ms + max(self._interval_ms, RETRY_MS))
            elif half.stored_ms > now_ms:
                half.due_ms = now_ms
        self._due = [(half.due_ms, offset) for offset, half in self._transactions.halves.items()]
        heapq.heapify(self._due)

    def stop(self) -> None:
        """Send no more checks."""
        self._running = False
        self._due = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _opened(self, offset: int) -> None:
        if self._running:
            half, now_ms = self._transactions.halves[offset], self._clock.wall_ms()
            if half.stored_ms > now_ms:  # store times never go back, so it has that of a clock that was ahead
                half.due_ms = now_ms + half.due_ms - half.stored_ms
            heapq.heappush(self._due, (half.due_ms, offset))
            if self._timer is None and (self._asking is None or self._asking.done()):
                self._arm()

    def _arm(self) -> None:
        """Set the timer for the next check that is due, if a transaction is open."""
        self._timer = None
        if len(self._due) > 2 * len(self._transactions.halves) + 1000:
            self._due = [(half.due_ms, offset) for offset, half in self._transactions.halves.items()]
            heapq.heapify(self._due)
        while self._due and self._due[0][1] not in self._transactions.halves:
            heapq.heappop(self._due)
        if self._due:
            wait_s = max(0.0, (self._due[0][0] - self._clock.wall_ms()) / 1000)
            self._timer = asyncio.get_running_loop().call_later(min(wait_s, RECHECK_S), self._run)

    def _run(self) -> None:
        now_ms = self._clock.wall_ms()
        if now_ms < self._seen_ms:
            self._set_all_due(now_ms)
        self._seen_ms = now_ms
        if self._due and self._due[0][0] <= now_ms:
            self._timer = None
            self._asking = asyncio.get_running_loop().create_task(self._ask_due())
        else:
            self._arm()

    async def _ask_due(self) -> None:
        """Send the checks that are due, once it is certain that no other node is master: one that was deposed while it
        was cut off does not know it, and would ask beside its successor (S3: only the master asks)."""
        try:
            async with asyncio.timeout(BARRIER_TIMEOUT_S):
                await self._ledger.read_barrier(ReadMode.READ_INDEX)
        except (DLedgerError, TimeoutError) as error:
            reason = str(error) or f"no majority confirmed the lead within {BARRIER_TIMEOUT_S:g} s"
            self._complaints.warning(logger, "lead", "nobody is asked about transactions: %s", reason)
            self._ask_later()
            return
        except Exception:
            logger.exception("asking about transactions met an error of its own")
            self._ask_later()
            return
        if not self._running or not self._store.is_master:
            return  # `start` begins anew when this node is master again
        now_ms = self._clock.wall_ms()
        for _ in range(CHECKS_PER_TURN):
            if not self._due or self._due[0][0] > now_ms:
                break
            offset = heapq.heappop(self._due)[1]
            half = self._transactions.halves.get(offset)
            if half is None or self._is_gone(offset, half):
                continue
            try:
                self._check(offset, half, now_ms)
            except (OSError, RecordError, NotWritable, DLedgerError) as error:
                self._complaints.warning(logger, "check", "the transaction at %d: %s", offset, error)
                half.put_off(now_ms + RETRY_MS)
            except Exception:
                logger.exception("the check of the transaction at %d met an error of its own", offset)
                half.put_off(now_ms + RETRY_MS)
            heapq.heappush(self._due, (half.due_ms, offset))
        self._arm()

    def _is_gone(self, offset: int, half: _Half) -> bool:
        """Whether the half message was removed with the log's oldest files, so that nobody can end it; forgets it."""
        queue = self._store.queues.find(HALF_TOPIC, 0)
        if queue is not None and half.queue_offset >= queue.min_offset:
            return False
        self._complaints.warning(
            logger, "gone", "the transaction at %d went with the oldest files of the log, without an end", offset
        )
        del self._transactions.halves[offset]
        return True

    def _ask_later(self) -> None:
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._run)

    def _check(self, offset: int, half: _Half, now_ms: int) -> None:
        message = read_message(self._ledger.store, self._store.queues, offset)
        half.put_off(now_ms + self._interval_ms)
        is_too_old = half.is_too_old(now_ms, asyncio.get_running_loop().time())
        if half.checks >= self._max_checks or is_too_old:
            self._give_up(message, half.checks)
            return
        topic, _ = real_place(message)
        group = message.properties.get(PRODUCER_GROUP, "")
        producer = self._clients.next_producer(group, lambda connection: self._may_ask(connection, topic))
        if producer is not None:
            producer.send(_question(message))
            half.checks += 1
            self.checks_total += 1

    def _give_up(self, half: Message, checks: int) -> None:
        offset, term = half.physical_offset, self._ledger.member_state.term
        if self._transactions.is_ending(offset, term):
            return  # its producer has just ended it
        logger.warning("giving up the transaction at %d after %d questions", offset, checks)
        self._transactions.note_ending(offset, term)
        try:
            forget(self._endings.commit(half, topic=UNRESOLVED_TOPIC, queue_id=0))
        except BaseException:
            self._transactions.take_back(offset)
            raise


def _question(half: Message) -> Command:
    """Code 39: the half message as its producer sent it (R: AbstractTransactionalMessageCheckListener)."""
    topic, queue_id = real_place(half)
    key = half.properties.get(UNIQUE_KEY, "")
    fields: dict[str, str | int | bool] = {
        "tranStateTableOffset": half.queue_offset,
        "commitLogOffset": half.physical_offset,
        "msgId": key,
        "transactionId": key,
        "offsetMsgId": half.message_id,
    }
    record = encode_record(replace(half, topic=topic, queue_id=queue_id))
    return Command.request(RequestCode.CHECK_TRANSACTION_STATE, fields, record, oneway=True)
