"""Receiving until nothing is left, and not calling lost what was merely not reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.generator import Context, Generator, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome

__all__ = ["DRAIN_LIMIT_S", "Drain", "TakeUntilQuiet", "unless_drained", "unless_taken_unseen"]

DRAIN_LIMIT_S = 60.0
"""Patience of each thread. A group that has not caught up a minute after the last heal stays behind, and shows."""

PAUSE_NS = 50_000_000
"""Between two attempts at the end, the first of which found nothing, or was refused."""


@dataclass(frozen=True, slots=True)
class TakeUntilQuiet(Unpaced):
    """One thread's operations `f`, which take what is there, until none brought anything for `quiet_s`; for no longer
    than `DRAIN_LIMIT_S`, or `quiet_s` where that is longer."""

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
    """One thread's final receives: `f` until the group is done, at least for `at_least_s`.

    After each receive that brought nothing it asks for the group's `lag`; a lag of 0 ends the thread. A broker waits
    for messages before it answers that there are none, but what it refuses it refuses at once.
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
    """`outcome` as it is when the group was seen to have dealt with everything; else only the kinds of anomalies in
    `certain` count, which no further receive could have cured, and without one of them the answer is "unknown"."""
    lags = [event["value"] for event in history if event["f"] == "lag" and event["type"] == "ok"]
    if outcome.valid == "unknown" or (lags and lags[-1] == 0):
        return outcome
    counts = outcome.details["stats"]["counts"]
    if outcome.valid is False and any(counts.get(kind) for kind in certain):
        return outcome
    what = f"{lags[-1]} messages were" if lags else "nobody could say how many messages were"
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
    """`outcome`, unless it only says (under the count `lost`) that values are missing which operations `taken` of
    unknown outcome may have taken, or which nobody looked for after the last `put`, and `due_ms` after it, when the
    last value is there to be taken. Counts in `certain` are wrong all the same."""
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
        reason = f"{missing} values never came out, but nobody found the queue empty after the last one was put in"
        return CheckOutcome("unknown", reason, outcome.details)
    return outcome


def _was_found_empty(history: Sequence[Mapping[str, Any]], put: str, taken: str, due_ms: float) -> bool:
    """Whether a `taken` that began `due_ms` or more after the last acknowledged `put` found nothing."""
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
