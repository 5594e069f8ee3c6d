"""What a slave copies from its master besides the log: topics, consumer offsets, delay offsets, subscription groups
(S3, R: SlaveSynchronize), 3 s after it became a slave and every 10 s from then on, while it is one.

The tables are taken over as they are, so a new master may know less of the consumers' progress than the old one did:
messages are redelivered, none is skipped. Delay offsets are kept in `delayOffset.json` for readers of RocketMQ's files;
this node relies on its log, which is exact (see `delay.py`).

A log that only has copies of the newest files does not tell the next offset of queues without a message in them. The
master is asked for the end of each, once (R: such a slave numbers them from 0 when it becomes master).

In classic HA a slave only takes the tables while its log is a copy of the master's. Another slave's log may be all that
is left, if a master came back with an empty disk; its own tables tell how to read it.

While the master is away consumers may read here and commit offsets here. RocketMQ's slave forgets these at the
first copy from the returned master, and every consumer reads again what it had (rocketmq#1094). This one first
reports them to the master: offsets that were committed here, and only those.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from node.broker.consumer_offsets import ConsumerOffsets, split_key
from node.broker.dispatch_batch import Queue
from node.broker.queue_ends import QueueEnds
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.topics import TopicTable
from node.logs import LogLimiter
from node.remoting import Command, RemotingClient, RemotingError, RequestCode, ResponseCode
from node.runtime import Disk
from node.store.queue_store import QueueStore

__all__ = ["SlaveSynchronize"]

logger = logging.getLogger("node.broker")

FIRST_AFTER_S: Mapping[str, float] = {"default": 3.0, "fast": 0.3}
"""Time from becoming a slave to the first copy, by timing profile (S3: 3 s)."""
INTERVAL_S: Mapping[str, float] = {"default": 10.0, "fast": 1.0}
"""Time between two copies (S3: 10 s)."""
NO_MASTER_PAUSE_S = 1.0
"""Time between two registrations that ask where the master is, while none is known."""
NO_COPY_PAUSE_S = 1.0
"""Time between two checks whether this log is a copy of the master's, while it is not."""
TIMEOUT_MS = 3000
"""Timeout of one request (R)."""
MAX_GIVEN_BACK = 1000
"""Offsets that one round reports to the master; further ones wait for the next."""
MAX_ENDS_ASKED = 1000
"""Queues whose end one round asks the master for; further ones wait for the next."""
_UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, RecursionError)


class SlaveSynchronize:
    """Copies the tables of the master at `master()` (an address to dial, "" while there is none: then `ask_for_master`
    is called from time to time), while `may_copy()` holds. `may_give_back()` tells whether this node's log is known to
    be a copy of the master's."""

    def __init__(
        self,
        *,
        client: RemotingClient,
        master: Callable[[], str],
        ask_for_master: Callable[[], None],
        may_copy: Callable[[], bool],
        may_give_back: Callable[[], bool],
        topics: TopicTable,
        offsets: ConsumerOffsets,
        groups: SubscriptionGroups,
        queues: QueueStore,
        ends: QueueEnds,
        disk: Disk,
        delay_path: str,
        timing: str,
    ) -> None:
        self._client = client
        self._master = master
        self._ask_for_master = ask_for_master
        self._may_copy = may_copy
        self._may_give_back = may_give_back
        self._topics = topics
        self._offsets = offsets
        self._groups = groups
        self._queues = queues
        self._ends = ends
        self._disk = disk
        self._delay_path = delay_path
        self._delay_offsets: Any = None
        self._first_after_s = FIRST_AFTER_S[timing]
        self._interval_s = INTERVAL_S[timing]
        self._task: asyncio.Task[None] | None = None
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.rounds_total = 0
        """Complete copies of all tables since the start."""

    def start(self) -> None:
        """This node is a slave now."""
        if self._task is None:
            self._offsets.note_taken(True)
            self._task = asyncio.get_running_loop().create_task(self._copy_forever())

    def stop(self) -> None:
        """This node is no longer a slave; a copy under way changes nothing further."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._offsets.note_taken(False)

    async def _copy_forever(self) -> None:
        await asyncio.sleep(self._first_after_s)
        while True:
            while not (address := self._master()):
                self._ask_for_master()
                await asyncio.sleep(NO_MASTER_PAUSE_S)
            if not self._may_copy():
                await asyncio.sleep(NO_COPY_PAUSE_S)
                continue
            try:
                await self._copy_all(address)
                self.rounds_total += 1
            except (RemotingError, OSError) as error:
                self._complaints.warning(logger, "sync", "tables of the master at %s: %s", address, error)
            except _UNREADABLE as error:
                self._complaints.warning(
                    logger, "sync", "the master at %s sends a table that cannot be read: %r", address, error
                )
            except Exception:
                logger.exception("copying the tables of the master at %s met an error of its own", address)
            await asyncio.sleep(self._interval_s)

    async def _copy_all(self, address: str) -> None:
        """One round. Raises RemotingError, OSError, and what reading a table raises."""
        await self._topics.replace(await self._table(address, RequestCode.GET_ALL_TOPIC_CONFIG))
        offsets = await self._table(address, RequestCode.GET_ALL_CONSUMER_OFFSET)
        self._offsets.replace(await self._give_back(address, offsets))
        delays = await self._table(address, RequestCode.GET_ALL_DELAY_OFFSET)
        if delays != self._delay_offsets:
            await self._disk.write_file_atomic(self._delay_path, json.dumps(delays).encode())
            self._delay_offsets = delays
        self._groups.replace(await self._table(address, RequestCode.GET_ALL_SUBSCRIPTION_GROUP_CONFIG))
        await self._learn_queue_ends(address)

    async def _learn_queue_ends(self, address: str) -> None:
        """Ask for the ends of queues without a message in this log, which began with the newest of the master's files.
        As master this node would otherwise number from 0 again, and deliver none of the delayed messages whose new
        number counts as delivered in the log. Asked once for each: later messages are in the log."""
        if not self._may_give_back():
            return
        queues = ((topic.name, queue_id) for topic in self._topics for queue_id in range(topic.all_queues))
        ends: dict[Queue, int] = {}
        for topic, queue_id in self._ends.unknown(queues)[:MAX_ENDS_ASKED]:
            fields: dict[str, str | int | bool] = {"topic": topic, "queueId": queue_id}
            reply = await self._ask(address, Command.request(RequestCode.GET_MAX_OFFSET, fields))
            ends[topic, queue_id] = reply.get_int("offset")
        if ends and self._may_give_back():
            await self._ends.learn(ends)

    async def _give_back(self, address: str, content: Any) -> Any:
        """The master's offsets, after reporting to it those that consumers committed here and that are further on. A
        queue's end bounds them: beyond it are only messages that nobody has any more."""
        for key, queue_id in self._offsets.taken()[:MAX_GIVEN_BACK] if self._may_give_back() else []:
            topic, group = split_key(key)
            own = self._offsets.find(group, topic, queue_id)
            queue = self._queues.find(topic, queue_id)
            theirs = content["offsetTable"].setdefault(key, {}).get(str(queue_id), -1)
            if own is not None and queue is not None and min(own, queue.max_offset) > theirs:
                offset = min(own, queue.max_offset)
                fields: dict[str, str | int | bool] = {
                    "consumerGroup": group, "topic": topic, "queueId": queue_id, "commitOffset": offset,
                }  # fmt: skip
                await self._ask(address, Command.request(RequestCode.UPDATE_CONSUMER_OFFSET, fields))
                content["offsetTable"][key][str(queue_id)] = offset
            self._offsets.forget_taken(key, queue_id, own)
        for key, queue_id in self._offsets.taken():  # not reported yet: stays as it is here
            topic, group = split_key(key)
            content["offsetTable"].setdefault(key, {})[str(queue_id)] = self._offsets.find(group, topic, queue_id)
        return content

    async def _table(self, address: str, code: RequestCode) -> Any:
        return json.loads((await self._ask(address, Command.request(code))).body)

    async def _ask(self, address: str, request: Command) -> Command:
        reply = await self._client.invoke(address, request, timeout_ms=TIMEOUT_MS)
        if reply.code != ResponseCode.SUCCESS:
            raise OSError(f"request {request.code} was answered {reply.code}: {reply.remark}")
        return reply
