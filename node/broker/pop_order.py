"""What POP consumers that want a queue's messages in order have in hand (R: ConsumerOrderInfoManager).

The next messages of a queue are popped when all that were popped before are acknowledged, or their time is over: then
the others are popped again. A group's progress is its consumer offset, which acknowledgements move; nothing is put
into the log. Only the master knows what is in hand: another master pops it again, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from node.broker.pop_checkpoints import QueueOfGroup

__all__ = ["MAX_QUEUES_IN_ORDER", "OrderedQueues"]

MAX_QUEUES_IN_ORDER = 100_000
"""Queues of which a group has messages in hand; of further ones it gets none. A few hundred bytes each. At this number,
those whose time is over are forgotten: they are popped again anyway."""
LOOK_MS = 1000
"""Shortest time between two searches for them: each scans all queues."""


@dataclass(slots=True)
class _InHand:
    attempt: str
    pop_time_ms: int
    until_ms: int
    open: list[int]
    following: int
    """The offset at which the group continues when all are acknowledged."""
    done: set[int]
    """Acknowledged while messages before them are not."""
    tries: dict[int, int] = field(default_factory=dict)


class OrderedQueues:
    """Messages in hand, by group and queue. Times are the loop's, in milliseconds, except `pop_time_ms`."""

    def __init__(self) -> None:
        self._in_hand: dict[QueueOfGroup, _InHand] = {}
        self._next_look_ms = 0

    def clear(self) -> None:
        """This node is master again: what was in hand is popped again."""
        self._in_hand.clear()

    def blocked_until_ms(self, queue: QueueOfGroup, attempt: str, now_ms: int) -> int:
        """From when on the queue's next messages may be popped; 0: now. A client that repeats an attempt, because it
        got no answer, gets the same messages."""
        held = self._in_hand.get(queue)
        if held is None:
            if len(self._in_hand) >= MAX_QUEUES_IN_ORDER and now_ms >= self._next_look_ms:
                # entries of groups that are gone stay until somebody asks again
                self._in_hand = {each: other for each, other in self._in_hand.items() if other.until_ms > now_ms}
                self._next_look_ms = now_ms + LOOK_MS
            return 0 if len(self._in_hand) < MAX_QUEUES_IN_ORDER else self._next_look_ms
        return 0 if held.until_ms <= now_ms or (attempt and attempt == held.attempt) else held.until_ms

    def is_done(self, queue: QueueOfGroup, offset: int) -> bool:
        """Whether the message was acknowledged while one before it was not."""
        held = self._in_hand.get(queue)
        return held is not None and offset in held.done

    def give(
        self, queue: QueueOfGroup, attempt: str, offsets: Iterable[int], pop_time_ms: int, until_ms: int
    ) -> dict[int, int]:
        """Note that these messages are popped; returns how often they were before, for those that were."""
        before = self._in_hand.get(queue)
        given = list(offsets)
        tries = {}
        if before is not None:
            again = 0 if attempt and attempt == before.attempt else 1
            tries = {each: before.tries.get(each, 0) + again for each in given if each in before.open}
        done = {each for each in before.done if each > given[0]} if before is not None else set()
        following = given[-1] + 1
        while following in done:
            following += 1
        self._in_hand[queue] = _InHand(attempt, pop_time_ms, until_ms, given, following, done, tries)
        return {offset: count for offset, count in tries.items() if count}

    def acknowledged(self, queue: QueueOfGroup, offset: int, pop_time_ms: int) -> int | None:
        """Acknowledge a message; returns the offset at which the group continues, None if it was not in hand."""
        held = self._in_hand.get(queue)
        if held is None or held.pop_time_ms != pop_time_ms or offset not in held.open:
            return None
        held.open.remove(offset)
        held.done.add(offset)
        if held.open:
            return held.open[0]
        held.done = {each for each in held.done if each > held.following}
        held.until_ms = 0
        if not held.done:  # otherwise these stay known: they were popped before, in a larger lot than the last one
            del self._in_hand[queue]
        return held.following

    def postpone(self, queue: QueueOfGroup, offset: int, pop_time_ms: int, until_ms: int) -> bool:
        """Messages in hand stay so until `until_ms`; False if the message is not in hand."""
        held = self._in_hand.get(queue)
        if held is None or held.pop_time_ms != pop_time_ms or offset not in held.open:
            return False
        held.until_ms = until_ms
        return True
