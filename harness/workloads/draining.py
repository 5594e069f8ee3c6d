"""Receiving until nothing is left, and not calling lost what was merely not reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.generator import Context, Generator, Op, Step, Unpaced
from harness.systems.base import CheckOutcome

__all__ = ["DRAIN_LIMIT_S", "Drain", "unless_drained"]

DRAIN_LIMIT_S = 60.0
"""Patience of each thread. A group that has not caught up a minute after the last heal stays behind, and shows."""


@dataclass(frozen=True, slots=True)
class Drain(Unpaced):
    """One thread's final receives: `f` until the group is done, at least for `at_least_s`.

    After each receive that brought nothing it asks for the group's `lag`; a lag of 0 ends the thread.
    """

    f: str
    at_least_s: float = 0.0
    began_ns: int = -1
    asks: bool = False
    is_done: bool = False

    def next(self, context: Context) -> tuple[Step, Generator]:
        began_ns = context.time_ns if self.began_ns < 0 else self.began_ns
        if self.is_done or context.time_ns - began_ns > DRAIN_LIMIT_S * 1e9:
            return None, self
        if self.asks:
            return Op("lag"), replace(self, asks=False)
        return Op(self.f), replace(self, began_ns=began_ns)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
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
    if lags and lags[-1] == 0:
        return outcome
    counts = outcome.details["stats"]["counts"]
    if outcome.valid is False and any(counts.get(kind) for kind in certain):
        return outcome
    what = f"{lags[-1]} messages were" if lags else "nobody could say how many messages were"
    return CheckOutcome("unknown", f"{what} still to be received at the end", outcome.details)
