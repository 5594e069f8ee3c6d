"""Workload `consumer-progress`: `commit_offset(partition, offset)` and `committed_offset(partition)`, for one group.

Every thread commits increasing offsets of its own partition, and all threads read the stored offsets of any partition.
A stored offset must never go back. In any system a commit of unknown outcome may still arrive after newer ones, so its
thread continues with another partition. At the end the offsets of all partitions are read.

`committed_offset` returns the offset, or None if none was ever committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from checker import check_consumer_progress
from harness.generator import Context, EachThread, Generator, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, is_whole_number
from harness.workloads.checks import judged
from harness.workloads.final_reads import unless_left_unanswered
from harness.workloads.queues import MAX_FINAL_ATTEMPTS, RETRY_NS

__all__ = ["ConsumerProgressWorkload"]

GROUP = "group"
"""The name of the one group, in results."""

MAX_ADVANCE = 10
"""Largest step between two commits of a partition: the messages consumed meanwhile."""


async def _commit(client: Any, value: Any, key: Any) -> Any:
    await client.commit_offset(value["queue"], value["offset"])
    return value


async def _fetch(client: Any, value: Any, key: Any) -> Any:
    offset = await client.committed_offset(value["queue"])
    if offset is not None and not is_whole_number(offset, least=0):
        raise ClientMistake(f"committed_offset returned {offset!r:.80}: it must return an offset, from 0 on, or None")
    return {**value, "offset": -1 if offset is None else offset}


@dataclass(frozen=True, slots=True)
class _Commits(Unpaced):
    """Commits and reads of one thread: thread t of n uses the partitions t, t + n, t + 2n ... in turn. The number that
    it has abandoned is also recorded in `left_behind`."""

    left_behind: dict[int, int]
    generation: int = 0
    offset: int = 0

    def next(self, context: Context) -> tuple[Op, Generator]:
        rng = context.random
        if rng.random() < 0.5:
            queue = self.generation * context.threads + rng.randrange(context.threads)
            return Op("fetch", None, {"group": GROUP, "queue": queue}), self
        queue, offset = self.generation * context.threads + context.thread, self.offset + rng.randint(1, MAX_ADVANCE)
        return Op("commit", None, {"group": GROUP, "queue": queue, "offset": offset}), replace(self, offset=offset)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["f"] == "commit" and event["type"] == "info":
            self.left_behind[context.thread] = self.generation + 1
            return _Commits(self.left_behind, self.generation + 1, 0)
        return self


@dataclass(frozen=True, slots=True)
class _LastLook(Unpaced):
    """One thread's final reads of its partitions, latest first, and of the next thread's latest, each until it is
    answered. They are marked `final`, so that the check finds unanswered ones."""

    left_behind: Mapping[int, int]
    done: int = 0
    refusals: int = 0
    due_ns: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        thread, generation = context.thread, self.left_behind.get(context.thread, 0) - self.done
        if generation < 0:
            thread = (thread + 1) % context.threads
            generation = self.left_behind.get(thread, 0)
        if self.done > self.left_behind.get(context.thread, 0) + 1 or self.refusals == MAX_FINAL_ATTEMPTS:
            return None, self
        if context.time_ns < self.due_ns:
            return Wait(self.due_ns), self
        queue = generation * context.threads + thread
        return Op("fetch", None, {"group": GROUP, "queue": queue, "final": True}), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "ok":
            return replace(self, done=self.done + 1)
        if event["type"] == "invoke":
            return self
        return replace(self, refusals=self.refusals + 1, due_ns=context.time_ns + RETRY_NS)


class ConsumerProgressWorkload(CapabilityWorkload):
    """As many commits as reads."""

    name = "consumer-progress"
    description = "Offsets of a consumer group: a stored offset never goes back."
    capabilities = ("commit_offset", "committed_offset")
    calls: ClassVar[Mapping[str, Call]] = {
        "commit": Call("commit_offset", _commit),
        "fetch": Call("committed_offset", _fetch, is_read=True),
    }
    check_names = ("consumer-progress",)

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._left_behind: dict[int, int] = {}
        """Thread -> number of partitions that it has abandoned."""

    def generator(self) -> Generator:
        return EachThread(_Commits(self._left_behind))

    def final_generator(self) -> Generator:
        """Every thread reads the offsets of its partitions and of one of another thread."""
        return EachThread(_LastLook(self._left_behind))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        last = [event for event in history if event["f"] == "fetch" and event["value"].get("final")]
        looks = [(event["value"]["queue"], event["type"] == "ok") for event in last]
        found = judged(check_consumer_progress, history, context)
        return {"consumer-progress": unless_left_unanswered(found, looks, "partition")}
