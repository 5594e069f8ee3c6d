"""Find where a follower's log diverges from the leader's: the decisions of COMPARE (S0, S2), as a pure search.

Two logs agree up to some index and, if both continue, differ from the next one on (log matching). The search asks for
single entries and keeps what it has learnt: the largest index known to agree, the smallest known to differ.

    the follower's log and the leader's have no index in common      rewrite at the leader's begin
    agrees, and is the follower's last                               append from there
    agrees, and the next one is not the leader's or known to differ  truncate there
    beyond the follower's end                                        ask for its end
    before the follower's begin, or differs at the floor             rewrite at the leader's begin
    otherwise                                                        ask further down, or in between

DLedger asks one index further down each time. This search doubles its steps while going down and bisects the rest
once it has found agreement: a difference of a thousand entries takes some twenty requests instead of a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.dledger.rpc import PushType

__all__ = ["Comparison", "Decision"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next: COMPARE at an index, TRUNCATE there, or APPEND what follows it."""

    type: PushType
    index: int


class Comparison:
    """One search against one follower, for a leader whose log goes from `begin` to `end`."""

    def __init__(self, *, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._agrees = begin - 1
        self._differs = end + 1
        self._step = 1

    @property
    def first(self) -> int:
        """The index to ask for first: the leader's last."""
        return self._end

    @property
    def found_nothing(self) -> bool:
        """Whether no index is known to agree. If the search then ends with TRUNCATE, the two logs share no entry."""
        return self._agrees < self._begin

    def decide(self, index: int, *, is_same: bool, follower_begin: int, follower_end: int) -> Decision:
        """Decide from the answer for `index` and from the first and last index of the follower's log in that answer."""
        if follower_end < self._begin or follower_begin > self._end:
            return Decision(PushType.TRUNCATE, self._begin)
        if is_same:
            self._agrees = max(self._agrees, index)
            if index == follower_end:
                return Decision(PushType.APPEND, index)
            return self._between(follower_end)
        if index > follower_end:
            return Decision(PushType.COMPARE, follower_end)
        self._differs = min(self._differs, index)
        if self._agrees >= self._begin:
            return self._between(follower_end)
        floor = max(self._begin, follower_begin)
        if index <= floor:
            return Decision(PushType.TRUNCATE, self._begin)
        self._step *= 2
        return Decision(PushType.COMPARE, max(index - self._step // 2, floor))

    def _between(self, follower_end: int) -> Decision:
        """Halve the range between agreement and difference; once it is empty, append or truncate."""
        differs = min(self._differs, follower_end + 1)
        if differs <= self._agrees + 1:
            if self._agrees == follower_end:
                return Decision(PushType.APPEND, self._agrees)
            return Decision(PushType.TRUNCATE, self._agrees)
        return Decision(PushType.COMPARE, (self._agrees + differs) // 2)
