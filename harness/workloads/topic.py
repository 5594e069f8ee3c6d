"""Workload `topic`: `publish(value)` and `fetch(partition, offset, max_messages)`, one topic of `partitions` logs.

The system has at most this many partitions, numbered from 0, and chooses the partition of each value. `publish` returns
`[partition, offset]`; offsets of a partition count up from 0 without gaps. `fetch` returns the values of a partition
from an offset on, at most `max_messages`, and fewer only if the partition has no more; none if the partition does not
exist. With `fetches=linearizable` one order of all operations must explain every result. With `fetches=eventual` a
fetch may be stale, and final fetches are repeated, for 30 s at most, until they have what the load has seen. At the end
every partition is read whole, and every acknowledged value is accounted for: lost, duplicated, phantom, reordered or
stored under two offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from checker import History, Topic
from checker.last_reads import without_earlier_tails, without_full_polls
from harness.generator import Context, Generator, Mix, Op, Unpaced
from harness.systems.base import CheckOutcome, Setting
from harness.worker import Client
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityClient, CapabilityWorkload, ClientMistake, is_whole_number
from harness.workloads.checks import linearizable, log_contents
from harness.workloads.client_log import (
    POLL_MAX_MESSAGES,
    ReadToTheEnd,
    polled,
    unless_left_unread,
)
from harness.workloads.queues import ReadWhole, message_numbers

__all__ = ["TopicWorkload"]

NEAR_END = 8
"""Fetches of the load begin fewer than this many values before the last seen end, where stale replicas give themselves
away."""


async def _publish(client: Any, value: Any, key: Any, *, partitions: int | None = None) -> Any:
    found = await client.publish(value)
    is_pair = isinstance(found, (list, tuple)) and len(found) == 2
    if not is_pair or not all(is_whole_number(part, least=0) for part in found):
        raise ClientMistake(f"publish returned {found!r:.80}: it must return [partition, offset], both from 0 on")
    if partitions is not None and found[0] >= partitions:
        # Nothing is fetched from there, so the value of a correct system would look lost.
        due = f"it must be 0 to {partitions - 1}, or --set workload.partitions=N say how many there are"
        raise ClientMistake(f"publish returned partition {found[0]!r:.40}: {due}")
    return list(found)


async def _fetch(client: Any, value: Any, key: Any) -> Any:
    messages = await client.fetch(value["queue"], value["offset"], value["max"])
    return {"queue": value["queue"], **polled("fetch", messages, value)}


@dataclass(frozen=True, slots=True)
class _Fetches(Unpaced):
    partitions: int
    tails: tuple[int, ...]
    seen: dict[int, int]

    def next(self, context: Context) -> tuple[Op, Generator]:
        queue = context.random.randrange(self.partitions)
        offset = max(0, self.tails[queue] - context.random.randrange(NEAR_END))
        return Op("read", None, {"queue": queue, "offset": offset, "max": POLL_MAX_MESSAGES}), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] != "ok":
            return self
        value = event["value"]
        queue, tail = (value[0], value[1] + 1) if event["f"] == "send" else (value["queue"], _end_of(value))
        if queue >= self.partitions or tail <= self.tails[queue]:
            return self
        self.seen[queue] = tail
        return replace(self, tails=(*self.tails[:queue], tail, *self.tails[queue + 1 :]))


def _end_of(value: Mapping[str, Any]) -> int:
    return int(value["offset"]) + len(value["messages"])


@dataclass(frozen=True, slots=True)
class _EveryPartition(Unpaced):
    """Translates reads of logs by key into fetches of partitions."""

    inner: Generator

    def next(self, context: Context) -> tuple[Any, Generator]:
        step, inner = self.inner.next(context)
        if isinstance(step, Op):
            step = step._replace(key=None, value={"queue": step.key, **step.value})
        return step, _EveryPartition(inner)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        return _EveryPartition(self.inner.update(context, _by_partition(event)))


class TopicWorkload(CapabilityWorkload):
    """As many publishes as fetches."""

    name = "topic"
    description = "One topic of several partitions: the system chooses where each message goes."
    capabilities = ("publish", "fetch")
    settings = (
        Setting("partitions", "4", "number of partitions of the topic", bounds=(1, 100)),
        Setting("fetches", "linearizable", "eventual: a fetch may miss messages that were acknowledged before it",
                ("linearizable", "eventual")),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {
        "send": Call("publish", _publish),
        "read": Call("fetch", _fetch, is_read=True),
    }
    check_names = ("linearizable", "log")

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._seen: dict[int, int] = {}
        """Partition -> the end that the load has seen."""

    @property
    def keys(self) -> int:
        """The number of partitions: the system creates for each of them what it creates for each key."""
        return self.number("partitions")

    def generator(self) -> Generator:
        partitions = self.number("partitions")
        fetches = _Fetches(partitions, (0,) * partitions, self._seen)
        return Mix(((1.0, message_numbers("send")), (1.0, fetches)))

    def client(self, connection: Any) -> Client:
        """A client whose `publish` must return an existing partition."""
        publish = functools.partial(_publish, partitions=self.number("partitions"))
        return CapabilityClient(connection, {**self.calls, "send": Call("publish", publish)})

    def final_generator(self) -> Generator:
        """Every partition from its beginning to its end."""
        known = self._seen if self.text("fetches") == "eventual" else {}
        return _EveryPartition(ReadToTheEnd(ReadWhole(self.number("partitions"), POLL_MAX_MESSAGES, known)))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        logs = History.of(_as_logs(history))
        if self.text("fetches") == "eventual":
            contents = log_contents(without_earlier_tails(logs), context)
            return {"log": unless_left_unread(contents, logs, "queue")}
        order = without_full_polls(History.of(history))
        return {
            "linearizable": linearizable(order, Topic(queues=self.number("partitions")), context),
            "log": unless_left_unread(log_contents(logs, context), logs, "queue"),
        }


def _by_partition(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """A fetch event with its partition as the key; other events unchanged."""
    return {**event, "key": event["value"]["queue"]} if event["f"] == "read" else event


def _as_logs(history: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The history as one of logs, one log for each partition.

    An unacknowledged value belongs to the partition in which it was first read; one that was never read is dropped.
    """
    shown: dict[Any, int] = {}
    acknowledged: dict[Any, int] = {}
    asked: dict[Any, Any] = {}
    for event in history:
        if event["f"] == "send":
            if event["type"] == "invoke":
                asked[event["process"]] = event["value"]
            elif event["type"] == "ok":
                acknowledged[asked[event["process"]]] = event["value"][0]
        elif event["type"] == "ok":
            for value in event["value"]["messages"]:
                shown.setdefault(value, event["value"]["queue"])
    sent: dict[Any, Any] = {}
    for event in history:
        if event["f"] == "read":
            yield _by_partition(event)
            continue
        if event["type"] == "invoke":
            sent[event["process"]] = event["value"]
        value = sent[event["process"]]
        key = acknowledged.get(value, shown.get(value))
        if key is not None:
            is_ok = event["type"] == "ok"
            yield {**event, "f": "append", "key": key, "value": [event["value"][1], value] if is_ok else value}
