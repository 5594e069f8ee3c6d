"""Final reads of workloads by capability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.generator import Calls, Context, EachThread, Generator, Limit, Op, Stagger, Step, Unpaced, UntilOk, Wait

__all__ = ["InTurnUntilEqual", "one_good_read_each"]

ATTEMPTS = 20
"""Of each thread. A system that answers none of them has been unwell for long after everything was healed."""

ATTEMPTS_PER_S = 10.0
"""So that the attempts of one thread take about two seconds."""


def one_good_read_each(read: Op) -> Generator:
    """Every thread does `read` until it is ok once, at most `ATTEMPTS` times."""
    return EachThread(Limit(ATTEMPTS, UntilOk(Stagger(ATTEMPTS_PER_S, Calls(lambda _: read)))))


IN_TURN = 50
"""Threads that read in turn: one for each host, as clients belong to the hosts in turn; no test has more hosts."""

EQUAL_WITHIN_S = 30.0
"""How long reads in turn may differ, when all faults are over: much longer than anything takes that is on its way."""

TRIES = 3
"""Of a thread in its turn, where a read fails."""

_BETWEEN_ROUNDS_NS = 500_000_000
_POLL_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class InTurnUntilEqual(Unpaced):
    """Threads do `read` one after the other, in rounds, until all of a round have read the same elements, or it has
    taken `EQUAL_WITHIN_S`, or as long as `one_good_read_each` tries where nobody is answered.

    Of reads at the same time none is later than another, so that they do not show that one host will never have what
    another one has; reads in turn do. Only one thing may be in progress: to be a phase of its own.
    """

    read: Op
    turn: int = 0
    tries: int = 0
    is_open: bool = False
    began_ns: int = -1
    due_ns: int = 0
    first: frozenset[Any] | None = None
    """What the first read of this round found; None where it failed."""
    is_equal: bool = True
    is_answered: bool = False
    """Whether a read of this round succeeded."""
    is_done: bool = False

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self.is_done:
            return None, self
        began_ns = context.time_ns if self.began_ns < 0 else self.began_ns
        if self.turn >= min(context.threads, IN_TURN):
            limit_s = EQUAL_WITHIN_S if self.is_answered else ATTEMPTS / ATTEMPTS_PER_S
            if self.is_equal or context.time_ns - began_ns > limit_s * 1e9:
                return None, replace(self, is_done=True)
            again = replace(
                self, turn=0, due_ns=context.time_ns + _BETWEEN_ROUNDS_NS, first=None, is_equal=True, is_answered=False
            )
            return Wait(again.due_ns), again
        if self.is_open or context.thread != self.turn or context.time_ns < self.due_ns:
            return Wait(max(self.due_ns, context.time_ns + _POLL_NS)), replace(self, began_ns=began_ns)
        return self.read, replace(self, is_open=True, began_ns=began_ns)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] not in ("ok", "fail", "info"):
            return self
        found = frozenset(event["value"]) if event["type"] == "ok" else None
        if found is None and self.tries < TRIES - 1:
            return replace(self, tries=self.tries + 1, is_open=False, due_ns=context.time_ns + 10 * _POLL_NS)
        first = found if self.turn == 0 else self.first
        is_equal = self.is_equal and found is not None and found == first
        is_answered = self.is_answered or found is not None
        return replace(
            self, turn=self.turn + 1, tries=0, is_open=False, first=first, is_equal=is_equal, is_answered=is_answered
        )
