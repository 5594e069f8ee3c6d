"""Whether a system comes back once every fault is gone: the check `recovers`.

valid     it served again, with equal replicas, within the time that it declares for itself
invalid   it was reached and did not, although every fault was proven healed: a finding
unknown   nobody can tell: a fault was not proven healed, something of the run itself failed, or the harness
          was kept from running itself, so that the system may have been as well
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.systems.base import CheckOutcome, System

__all__ = ["RECOVERS", "judge_recovery", "wait_for_recovery", "with_last_words"]

RECOVERS = "recovers"

MAX_STALL_S = 2.0
"""How long the harness may be kept from running at a stretch. A replica that shares the machine may fare the same then,
and what it did not do in its time is no evidence."""

_TICK_S = 0.1


@dataclass(slots=True)
class _Stalls:
    longest_s: float = 0.0


@contextlib.asynccontextmanager
async def _watch_stalls() -> AsyncIterator[_Stalls]:
    """How long this event loop was kept from running, at most, while the block lasted."""
    loop, stalls = asyncio.get_running_loop(), _Stalls()

    async def tick() -> None:
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            stalls.longest_s = max(stalls.longest_s, loop.time() - due_s)

    task = loop.create_task(tick(), name="stalls")
    try:
        yield stalls
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def wait_for_recovery(system: System, *, timeout_s: float | None) -> CheckOutcome:
    """Wait for a system whose faults are all gone, for `timeout_s` seconds or as long as it declares (None)."""
    async with _watch_stalls() as stalls:
        outcome = await system.recover(timeout_s=system.recovery_timeout_s if timeout_s is None else timeout_s)
    if outcome.valid is False and stalls.longest_s > MAX_STALL_S:
        reason = f"{outcome.reason}; but the harness itself did not run for {stalls.longest_s:.1f} s meanwhile"
        return dataclasses.replace(outcome, valid="unknown", reason=reason)
    return outcome


def with_last_words(outcome: CheckOutcome, system: System) -> CheckOutcome:
    """The same with the last lines of those that did not come back, as `last_words` of its details."""
    missing: Sequence[str] = outcome.details.get("missing", ())
    words = {host: list(lines) for host in missing if (lines := system.last_words(host))}
    if not words:
        return outcome
    last = "; ".join(f"{host}'s last words: {lines[-1]}" for host, lines in words.items())
    details = {**outcome.details, "last_words": words}
    return dataclasses.replace(outcome, reason=f"{outcome.reason} ({last})", details=details)


def judge_recovery(outcome: CheckOutcome, faults: Sequence[Mapping[str, Any]], trouble: Sequence[str]) -> CheckOutcome:
    """The check's outcome in the light of the run: only a run whose every fault is gone can blame the system."""
    if outcome.valid is not False:
        return outcome
    unhealed = [f"{fault['id']} ({fault['nemesis']} {fault['variant']})" for fault in faults if not fault["healed"]]
    if unhealed:
        why = f"fault {', '.join(unhealed)} was not proven healed"
    elif trouble:
        why = f"of the run itself something failed: {trouble[0]}"
    else:
        return outcome
    return dataclasses.replace(outcome, valid="unknown", reason=f"{outcome.reason}; whose doing it is is open: {why}")
