"""The requests that one side of a connection has sent and the other has not answered yet.

One timer serves all of them: it is armed for the earliest deadline, looks at all requests when it fires, and is armed
again for the earliest that is left. So a request needs no timer of its own, which it would nearly always cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.remoting.command import Command
from node.remoting.errors import RemotingError, RequestTimeout

__all__ = ["Outcome", "OutcomeCallback", "Outstanding", "settle"]

Outcome = Command | RemotingError
OutcomeCallback = Callable[[Outcome], object]
"""Called once, with the reply or with the error that took its place. Must not raise."""

OPAQUE_MASK = 0x7FFFFFFF

TIMER_STEP_S = 0.005
"""The timer fires at most this often, so that thousands of unanswered requests with different deadlines are not scanned
thousands of times. A request times out late by no more than this."""

TIMER_SLACK_S = 0.001
"""Deadlines within this are due: clocks and timers are rounded."""


def settle(future: asyncio.Future[Command], outcome: Outcome) -> None:
    """Pass an outcome to a future whose owner may have given it up."""
    if future.done():
        return
    if isinstance(outcome, Command):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


class Outstanding:
    """`on_timeouts(count)` is called after requests have timed out; `peer` names the other side in their errors."""

    __slots__ = ("_loop", "_next_opaque", "_on_timeouts", "_peer", "_timer", "_timer_s", "waiting")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: Callable[[], str], on_timeouts: Callable[[int], None]
    ) -> None:
        self._loop = loop
        self._peer = peer
        self._on_timeouts = on_timeouts
        self.waiting: dict[int, tuple[OutcomeCallback, float, float]] = {}
        """By opaque; others may only read it."""
        self._next_opaque = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def next_opaque(self) -> int:
        """An opaque that no open request has."""
        opaque = self._next_opaque
        while opaque in self.waiting:  # only after 2^31 requests can one from the last round still be open
            opaque = (opaque + 1) & OPAQUE_MASK
        self._next_opaque = (opaque + 1) & OPAQUE_MASK
        return opaque

    def add(self, opaque: int, timeout_ms: float, on_done: OutcomeCallback) -> None:
        """A request was sent."""
        deadline_s = self._loop.time() + timeout_ms / 1000
        self.waiting[opaque] = on_done, deadline_s, timeout_ms
        if self._timer is None:
            self._arm(deadline_s)
        elif deadline_s < self._timer_s:
            self._timer.cancel()
            self._arm(deadline_s)

    def answered(self, reply: Command) -> None:
        """A reply has come; it is dropped if its request was given up."""
        entry = self.waiting.pop(reply.opaque, None)
        if entry is not None:
            entry[0](reply)

    def fail_all(self, error: Callable[[], RemotingError]) -> None:
        """End every request with `error()`: nothing will be answered any more."""
        waiting, self.waiting = self.waiting, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for on_done, _, _ in waiting.values():
            on_done(error())

    def _arm(self, when_s: float) -> None:
        self._timer_s = when_s
        self._timer = self._loop.call_at(when_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        waiting = self.waiting
        if not waiting:
            return
        now_s = self._loop.time()
        due = [opaque for opaque, (_, deadline_s, _) in waiting.items() if deadline_s <= now_s + TIMER_SLACK_S]
        for opaque in due:
            entry = waiting.pop(opaque, None)
            if entry is not None:
                on_done, _, timeout_ms = entry
                on_done(RequestTimeout(f"no answer from {self._peer()} within {timeout_ms:g} ms"))
        if due:
            self._on_timeouts(len(due))
        if self.waiting and self._timer is None:
            earliest_s = min(deadline_s for _, deadline_s, _ in self.waiting.values())
            self._arm(max(earliest_s, now_s + TIMER_STEP_S))
