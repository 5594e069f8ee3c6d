"""Whether a system comes back once every fault is healed: the check `recovers`.

valid     it served again, with equal replicas, within its declared time
invalid   it was reached and did not, although every fault was proven healed: a finding; or its hosts listened but
          answered no client, or none about a key that they served under load
unknown   it cannot be determined: a fault was not proven healed, something in the run itself failed or ended it
          early, the clients have a bug, or the harness itself was stalled, so that the system may have been too
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.systems.base import CLIENTS_DECIDE, CheckOutcome, System
from harness.units import clip

__all__ = ["RECOVERS", "Answers", "judge_recovery", "read_until_answered", "wait_for_recovery", "with_last_words"]

RECOVERS = "recovers"

MAX_STALL_S = 2.0
"""Longest tolerated stall of the harness. A replica on the same machine may be stalled too, so a missed deadline is no
evidence then."""

_TICK_S = 0.1

MAX_FAILURE_CHARACTERS = 200
"""Limit of a failure quoted in a reason; the history has all of it."""

_AGAIN_S = 0.5
"""Pause between two rounds of final reads, in case the system refuses them at once."""


@dataclass(slots=True)
class _Stalls:
    longest_s: float = 0.0


@contextlib.asynccontextmanager
async def _watch_stalls() -> AsyncIterator[_Stalls]:
    """Yields the longest stall of this event loop during the block."""
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


async def wait_for_recovery(system: System, *, timeout_s: float) -> CheckOutcome:
    """Wait for a system whose faults are all healed, for at most `timeout_s` seconds."""
    async with _watch_stalls() as stalls:
        outcome = await system.recover(timeout_s=timeout_s)
    return _unless_stalled(outcome, stalls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The results of a round of final reads."""

    asked: int
    succeeded: int
    should_succeed: bool
    """Whether such operations succeeded under load, so that client and workload are not to blame if none does now."""
    is_last: bool
    """Whether the run was asked to end, so that there must be no further round."""
    has_mistakes: bool
    """Whether some failed in a way that only a bug in the client explains."""
    answered: Collection[int | str]
    """The keys with a successful operation."""
    failures: Mapping[int | str | None, str]
    """For each key with successful operations under load, and for all keys together (None): the last unsuccessful
    operation, if any, and how it ended."""


async def read_until_answered(
    read: Callable[[], Awaitable[Answers]], outcome: CheckOutcome, *, timeout_s: float
) -> CheckOutcome:
    """Perform the final reads, repeatedly for at most `timeout_s` seconds while none of them succeeds, or none for some
    key that was served under load.

    Returns the updated `outcome` of waiting for the system: if its hosts listen but answer no client, or none about
    some key, it has not come back. That is unknown if the run was asked to end before the time was over, or if the
    client has a bug.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    is_open = outcome.valid is True or bool(outcome.details.get(CLIENTS_DECIDE))
    answers = await read()
    asked, is_answered = answers.asked, answers.succeeded > 0
    failures = dict(answers.failures)
    unread = {key for key in failures if key is not None and key not in answers.answered}
    if is_answered and not unread:
        return outcome
    async with _watch_stalls() as stalls:
        while (unread or not is_answered) and answers.should_succeed and is_open:
            if answers.is_last or answers.has_mistakes or loop.time() - began_s > timeout_s:
                break
            await asyncio.sleep(_AGAIN_S)
            answers = await read()
            asked, is_answered = asked + answers.asked, is_answered or answers.succeeded > 0
            failures.update(answers.failures)
            unread.difference_update(answers.answered)
        else:
            if unread or not is_answered:
                return outcome
            late = f"{outcome.reason}; the final operations succeeded after another {loop.time() - began_s:.1f} s"
            return dataclasses.replace(outcome, reason=late)
    within = f"within {loop.time() - began_s:.0f} s"
    if is_answered:
        first, *more = sorted(unread, key=str)
        which = f"key {first}" + (f" (and {len(more)} more)" if more else "")
        reason, last = f"{outcome.reason}, but none of the final operations on {which} succeeded {within}", first
    else:
        reason = f"{outcome.reason}, but none of {asked} final operations succeeded {within}"
        last = None
    if failure := failures.get(last):
        reason += f" (last error: {clip(' '.join(failure.split()), MAX_FAILURE_CHARACTERS)})"
    valid: bool | str = "unknown" if answers.is_last or answers.has_mistakes else False
    if answers.has_mistakes:
        reason += "; the clients failed with unexpected errors"
    elif answers.is_last:
        reason += "; the run was interrupted before the time for recovery was over"
    return _unless_stalled(dataclasses.replace(outcome, valid=valid, reason=reason), stalls)


def _unless_stalled(outcome: CheckOutcome, stalls: _Stalls) -> CheckOutcome:
    """The outcome, but unknown if it blames the system although the harness itself was stalled."""
    if outcome.valid is not False or stalls.longest_s <= MAX_STALL_S:
        return outcome
    reason = f"{outcome.reason}; but the harness itself was stalled for {stalls.longest_s:.1f} s meanwhile"
    return dataclasses.replace(outcome, valid="unknown", reason=reason)


def with_last_words(outcome: CheckOutcome, system: System) -> CheckOutcome:
    """The outcome with the last log lines of the hosts that did not come back, as `last_words` in its details."""
    missing: Sequence[str] = outcome.details.get("missing", ())
    words = {host: list(lines) for host in missing if (lines := system.last_words(host))}
    if not words:
        return outcome
    last = "; ".join(f"last log line of {host}: {lines[-1]}" for host, lines in words.items())
    details = {**outcome.details, "last_words": words}
    return dataclasses.replace(outcome, reason=f"{outcome.reason} ({last})", details=details)


def judge_recovery(outcome: CheckOutcome, faults: Sequence[Mapping[str, Any]], trouble: Sequence[str]) -> CheckOutcome:
    """The check's final outcome: the system can only be blamed if every fault was healed and nothing else failed."""
    if outcome.valid is not False:
        return outcome
    unhealed = [f"{fault['id']} ({fault['nemesis']} {fault['variant']})" for fault in faults if not fault["healed"]]
    if unhealed:
        why = f"fault {', '.join(unhealed)} was not proven healed"
    elif trouble:
        why = f"part of the run itself failed: {trouble[0]}"
    else:
        return outcome
    return dataclasses.replace(outcome, valid="unknown", reason=f"{outcome.reason}; the cause is unclear: {why}")
