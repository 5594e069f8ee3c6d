"""How many messages per second each consumer group receives, for tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["GroupRates"]

SPAN_S = 10.0
"""Span of a rate: this long, up to twice as long."""
MAX_GROUPS = 10_000
"""Groups that are counted; pulls of further ones are not. As many as may exist."""
MAX_GROUP_CHARACTERS = 255
"""No existing group has a longer name; a pull may name anything."""


@dataclass(slots=True)
class _Count:
    messages: int
    since_s: float
    """When `messages` began to be counted."""
    before: int
    before_since_s: float
    """The count and the start of the span before that one."""


class GroupRates:
    """Messages delivered to groups. `now_s` is a clock in seconds that never goes back, such as the loop's."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._counts: dict[str, _Count] = {}
        self._next_look_s = 0.0
        """From when on idle groups are dropped again, if there is no more room."""

    def given(self, group: str, messages: int) -> None:
        """A consumer of `group` got `messages` messages."""
        count = self._counts.get(group)
        if count is None:
            now_s = self._now_s()
            if len(self._counts) >= MAX_GROUPS and now_s >= self._next_look_s:
                self._counts = {name: each for name, each in self._counts.items() if now_s - each.since_s <= 2 * SPAN_S}
                self._next_look_s = now_s + SPAN_S
            if len(self._counts) < MAX_GROUPS and len(group) <= MAX_GROUP_CHARACTERS:
                self._counts[group] = _Count(messages, now_s, 0, now_s)
            return
        count.messages += messages
        if self._now_s() - count.since_s > SPAN_S:
            self._turn(count)

    def _turn(self, count: _Count) -> None:
        count.before, count.before_since_s = count.messages, count.since_s
        count.messages, count.since_s = 0, self._now_s()

    def per_second(self, group: str) -> float:
        """The rate of the last ten to twenty seconds; 0 for a group that got nothing."""
        count = self._counts.get(group)
        if count is None:
            return 0.0
        now_s = self._now_s()
        if now_s - count.since_s > 2 * SPAN_S:
            return 0.0
        past_s = now_s - count.before_since_s
        return (count.before + count.messages) / past_s if past_s > 0 else 0.0
