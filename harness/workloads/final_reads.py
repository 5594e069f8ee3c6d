"""Final reads of workloads by capability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from checker import History
from checker.last_reads import answered_since_changed
from harness.generator import (
    Calls,
    Context,
    EachThread,
    Generator,
    Limit,
    Op,
    Stagger,
    Step,
    Unpaced,
    UntilOk,
    Wait,
)
from harness.systems.base import CheckOutcome
from harness.workloads.queues import RETRY_NS

__all__ = [
    "InTurnUntilEqual",
    "ReadEachKey",
    "one_good_read_each",
    "unless_left",
    "unless_left_unanswered",
    "unless_registers_unread",
]

ATTEMPTS = 20
"""Attempts per thread. A system that answers none of them has not recovered long after everything was healed."""

ATTEMPTS_PER_S = 10.0
"""Makes the attempts of one thread take about two seconds."""

MAX_KEYS_NAMED = 5
"""Limit of unread keys named in a message."""


def one_good_read_each(read: Op) -> Generator:
    """Every thread repeats `read` until it is ok once, at most `ATTEMPTS` times."""
    return EachThread(Limit(ATTEMPTS, UntilOk(Stagger(ATTEMPTS_PER_S, Calls(lambda _: read)))))


@dataclass(frozen=True, slots=True)
class ReadEachKey(Unpaced):
    """One thread's read `f` of each of the `keys` keys from `first_key()` on, once around from a random one.
    Independent random keys would leave some unread if there are few threads, and losses there would go unnoticed.
    Unanswered reads are retried, `ATTEMPTS` times in all."""

    keys: int
    f: str = "read"
    first_key: Callable[[], int] = int
    begins: int = -1
    done: int = 0
    again: int = 0
    due_ns: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self.done == self.keys:
            return None, self
        if context.time_ns < self.due_ns:
            return Wait(self.due_ns), self
        begins = context.random.randrange(self.keys) if self.begins < 0 else self.begins
        key = self.first_key() + (begins + self.done) % self.keys
        return Op(self.f, key), replace(self, begins=begins, done=self.done + 1)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] not in ("fail", "info") or not self.done or self.again == ATTEMPTS:
            return self
        return replace(self, done=self.done - 1, again=self.again + 1, due_ns=context.time_ns + RETRY_NS)


def unless_left(outcome: CheckOutcome, left: Collection[Any], said: str) -> CheckOutcome:
    """`outcome`, or "unknown" if it is valid although something was `left` unread at the end, where a loss would not
    show. `said` is the message, with {} for the names and {count} for their number."""
    if outcome.valid is not True or not left:
        return outcome
    names = ", ".join(map(str, sorted(left)[:MAX_KEYS_NAMED])) + (", ..." if len(left) > MAX_KEYS_NAMED else "")
    reason = f"{outcome.reason}; but {said.format(names, count=len(left))} at the end of the run"
    return CheckOutcome("unknown", reason, outcome.details)


def unless_left_unanswered(outcome: CheckOutcome, reads: Iterable[tuple[Any, bool]], what: str) -> CheckOutcome:
    """`outcome`, or "unknown" if it is valid although no read of some key (or partition) was answered. `reads` are
    pairs of what was read and whether it was answered. `what` is the name for a key."""
    answered: dict[Any, bool] = {}
    for each, is_answered in reads:
        answered[each] = is_answered or answered.get(each, False)
    left = [each for each, is_answered in answered.items() if not is_answered]
    return unless_left(outcome, left, f"no read of {what} {{}} was answered")


def unless_registers_unread(
    outcome: CheckOutcome, history: History, among: Callable[[Any], bool] = lambda _: True, *, f: str = "read"
) -> CheckOutcome:
    """`outcome`, or "unknown" if it is valid although, for some register, reads `f` began after its last change was
    acknowledged but none was answered. `among` tells whether a key is read at the end."""
    answered = answered_since_changed(history, f)
    return unless_left_unanswered(outcome, [(key, answered[key]) for key in answered if among(key)], "key")


IN_TURN = 50
"""Threads that read in turn: one per host, as clients are assigned to hosts round-robin and no test has more hosts."""

EQUAL_WITHIN_S = 30.0
"""How long reads in turn may differ after all faults are over: much longer than anything in flight takes."""

TRIES = 3
"""Attempts of a thread in its turn if reads fail."""

_BETWEEN_ROUNDS_NS = 500_000_000
_POLL_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class InTurnUntilEqual(Unpaced):
    """Threads do `read` one after the other, in rounds, until all reads of a round return the same elements, or for at
    most `EQUAL_WITHIN_S`, or for as long as `one_good_read_each` tries if no read is answered.

    Concurrent reads have no order, so they cannot show that one host will never have what another has; reads in turn
    can. Only one operation may be in progress, so this must be a phase of its own.
    """

    read: Op
    turn: int = 0
    tries: int = 0
    is_open: bool = False
    began_ns: int = -1
    due_ns: int = 0
    first: frozenset[Any] | None = None
    """What the first read of this round found; None if it failed."""
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
