"""Draining queues at the end, without reporting as lost what was merely not received yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.generator import Context, Generator, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome

__all__ = ["DRAIN_LIMIT_S", "Drain", "TakeUntilQuiet", "unless_drained", "unless_left_inside", "unless_taken_unseen"]

DRAIN_LIMIT_S = 60.0
"""Limit of each thread's final receives. A group that has not caught up within it counts as not drained."""

PAUSE_NS = 50_000_000
"""Pause at the end after an attempt that found nothing or failed."""


@dataclass(frozen=True, slots=True)
class TakeUntilQuiet(Unpaced):
    """One thread's operations `f`, each taking a value, until none returned one for `quiet_s`; for at most
    `DRAIN_LIMIT_S`, or `quiet_s` if that is longer."""

    f: str
    quiet_s: float
    began_ns: int = -1
    found_ns: int = -1
    pause: bool = False

    def next(self, context: Context) -> tuple[Step, Generator]:
        now_ns = context.time_ns
        if self.began_ns < 0:
            return Op(self.f), replace(self, began_ns=now_ns, found_ns=now_ns)
        limit_s = max(self.quiet_s, DRAIN_LIMIT_S)
        if now_ns - self.found_ns > self.quiet_s * 1e9 or now_ns - self.began_ns > limit_s * 1e9:
            return None, self
        if self.pause:
            return Wait(now_ns + PAUSE_NS), replace(self, pause=False)
        return Op(self.f), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "invoke":
            return self
        if event["type"] == "ok" and event["value"] is not None:
            return replace(self, found_ns=context.time_ns, pause=False)
        return replace(self, pause=True)


@dataclass(frozen=True, slots=True)
class Drain(Unpaced):
    """One thread's final receives: `f` until the group has consumed everything, for at least `at_least_s`.

    After each empty receive the thread reads the group's `lag`; a lag of 0 ends it. A broker waits for messages before
    it returns none, but it refuses at once, so only failures are followed by a pause.
    """

    f: str
    at_least_s: float = 0.0
    began_ns: int = -1
    asks: bool = False
    is_done: bool = False
    due_ns: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        began_ns = context.time_ns if self.began_ns < 0 else self.began_ns
        if self.is_done or context.time_ns - began_ns > DRAIN_LIMIT_S * 1e9:
            return None, self
        if context.time_ns < self.due_ns:
            return Wait(self.due_ns), self
        if self.asks:
            return Op("lag"), replace(self, asks=False)
        return Op(self.f), replace(self, began_ns=began_ns)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] in ("fail", "info"):
            return replace(self, due_ns=context.time_ns + PAUSE_NS)
        if event["type"] != "ok":
            return self
        if event["f"] == "lag":
            waited_s = (context.time_ns - self.began_ns) / 1e9
            return replace(self, is_done=event["value"] == 0 and waited_s >= self.at_least_s)
        return replace(self, asks=True) if event["f"] == self.f and not event["value"] else self


def unless_drained(
    outcome: CheckOutcome, history: Sequence[Mapping[str, Any]], *, certain: Sequence[str]
) -> CheckOutcome:
    """`outcome` unchanged if the group was seen to have consumed everything (lag 0). Otherwise only anomalies of the
    kinds in `certain` count, which no further receive could remedy; without one of them the outcome is "unknown"."""
    lags = [event["value"] for event in history if event["f"] == "lag" and event["type"] == "ok"]
    if outcome.valid == "unknown" or (lags and lags[-1] == 0):
        return outcome
    counts = outcome.details["stats"]["counts"]
    if outcome.valid is False and any(counts.get(kind) for kind in certain):
        return outcome
    what = f"{lags[-1]} messages were" if lags else "no host could tell how many messages were"
    return CheckOutcome("unknown", f"{what} still to be received at the end", outcome.details)


def unless_taken_unseen(
    outcome: CheckOutcome,
    history: Sequence[Mapping[str, Any]],
    *,
    put: str,
    taken: str,
    lost: str,
    certain: Sequence[str],
    due_ms: float = 0.0,
) -> CheckOutcome:
    """`outcome`, or "unknown" if its only anomaly is missing values (the count `lost`) that operations `taken` of
    unknown outcome may have taken, or that nobody looked for from `due_ms` after the last `put` on, when the last value
    is available. Nonzero counts in `certain` are violations regardless."""
    if outcome.valid is not False:
        return outcome
    counts = outcome.details["stats"]["counts"]
    missing = counts[lost]
    if not missing or any(counts[kind] for kind in certain):
        return outcome
    unseen = sum(event["f"] == taken and event["type"] == "info" for event in history)
    if missing <= unseen:
        reason = f"{missing} values never came out, and {unseen} {taken}s of unknown outcome may have taken them"
        return CheckOutcome("unknown", reason, outcome.details)
    if not _was_found_empty(history, put, taken, due_ms):
        reason = f"{missing} values never came out, but nobody found the queue empty after the last put"
        return CheckOutcome("unknown", reason, outcome.details)
    return outcome


def unless_left_inside(
    outcome: CheckOutcome, history: Sequence[Mapping[str, Any]], *, put: str, taken: str
) -> CheckOutcome:
    """`outcome`, or "unknown" if it is valid although nobody found nothing left after the last `put`: the values that
    did not come out may have been lost."""
    if outcome.valid is not True or _was_found_empty(history, put, taken, 0.0):
        return outcome
    reason = f"{outcome.reason}; but no {taken} after the last {put} found nothing left, so that losses would not show"
    return CheckOutcome("unknown", reason, outcome.details)


def _was_found_empty(history: Sequence[Mapping[str, Any]], put: str, taken: str, due_ms: float) -> bool:
    """Whether some `taken` that began at least `due_ms` after the last acknowledged `put` found nothing."""
    asked: set[Any] = set()
    found = False
    due_ns = 0.0
    for event in history:
        if event["f"] == put:
            if event["type"] == "ok":
                asked.clear()
                found = False
                due_ns = event["time"] + due_ms * 1e6 if due_ms else 0.0
        elif event["type"] == "invoke":
            if not due_ns or event["time"] >= due_ns:
                asked.add(event["process"])
        elif event["type"] == "ok" and event["value"] is None and event["process"] in asked:
            found = True
    return found
