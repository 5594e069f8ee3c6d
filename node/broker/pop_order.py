"""What POP consumers that want a queue's messages in order have in hand (R: ConsumerOrderInfoManager).

The next messages of a queue are given out when all that were given before are acknowledged, or their time is over: then
those that are not come again. How far a group is, is its consumer offset, which acknowledgements move; nothing is put
into the log. What is in hand is known to the master alone: another one gives it out again, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from node.broker.pop_checkpoints import QueueOfGroup

__all__ = ["MAX_QUEUES_IN_ORDER", "OrderedQueues"]

MAX_QUEUES_IN_ORDER = 100_000
"""Queues of which a group has messages in hand; of further ones it gets none. A few hundred bytes each. At so many,
those whose time is over are forgotten: they are given out again anyhow."""
LOOK_MS = 1000
"""So often, at most, they are looked for: each look is at all of them."""


@dataclass(slots=True)
class _InHand:
    attempt: str
    pop_time_ms: int
    until_ms: int
    open: list[int]
    following: int
    """The offset that the group goes on from when all are acknowledged."""
    done: set[int]
    """Acknowledged before others that lie ahead of them."""
    tries: dict[int, int] = field(default_factory=dict)


class OrderedQueues:
    """By group and queue. Times are the loop's, in milliseconds, but for `pop_time_ms`."""

    def __init__(self) -> None:
        self._in_hand: dict[QueueOfGroup, _InHand] = {}
        self._next_look_ms = 0

    def clear(self) -> None:
        """This node is master anew: what was in hand is given out again."""
        self._in_hand.clear()

    def blocked_until_ms(self, queue: QueueOfGroup, attempt: str, now_ms: int) -> int:
        """From when on the queue's next messages may be given out; 0: now. Who asks again for the same attempt, because
        no answer came, gets the same."""
        held = self._in_hand.get(queue)
        if held is None:
            if len(self._in_hand) >= MAX_QUEUES_IN_ORDER and now_ms >= self._next_look_ms:
                # of groups that are gone it stays until somebody asks again
                self._in_hand = {each: other for each, other in self._in_hand.items() if other.until_ms > now_ms}
                self._next_look_ms = now_ms + LOOK_MS
            return 0 if len(self._in_hand) < MAX_QUEUES_IN_ORDER else self._next_look_ms
        return 0 if held.until_ms <= now_ms or (attempt and attempt == held.attempt) else held.until_ms

    def is_done(self, queue: QueueOfGroup, offset: int) -> bool:
        """Whether the message was acknowledged, while one that lies ahead of it was not."""
        held = self._in_hand.get(queue)
        return held is not None and offset in held.done

    def give(
        self, queue: QueueOfGroup, attempt: str, offsets: Iterable[int], pop_time_ms: int, until_ms: int
    ) -> dict[int, int]:
        """These messages are given out; how often each of them was before, where it was."""
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
        """A message is dealt with: the offset that the group goes on from, None where it was not in hand."""
        held = self._in_hand.get(queue)
        if held is None or held.pop_time_ms != pop_time_ms or offset not in held.open:
            return None
        held.open.remove(offset)
        held.done.add(offset)
        if held.open:
            return held.open[0]
        held.done = {each for each in held.done if each > held.following}
        held.until_ms = 0
        if not held.done:  # else it stays known of them, which were given out before with more than the last time
            del self._in_hand[queue]
        return held.following

    def postpone(self, queue: QueueOfGroup, offset: int, pop_time_ms: int, until_ms: int) -> bool:
        """What is in hand stays so until then; False where the message is not in hand."""
        held = self._in_hand.get(queue)
        if held is None or held.pop_time_ms != pop_time_ms or offset not in held.open:
            return False
        held.until_ms = until_ms
        return True
