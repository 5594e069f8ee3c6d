"""Workload `mutex`: `lock(name)` and `unlock(name)`.

A client holds a lock from the return of `lock` to the call of `unlock`; no two clients may hold it at once. `lock`
raises `Refused`, or returns False, if it did not get the lock. Each thread acquires a lock, holds it for a while and
releases it; if `unlock` fails it retries.

A client whose `lock` or `unlock` has an unknown outcome is replaced, and the lock may stay held forever if locks do not
expire in the system: set more `locks` then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from checker import Mutex, check_exclusion
from harness.generator import Context, EachThread, Generator, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake
from harness.workloads.checks import judged, linearizable

__all__ = ["MutexWorkload"]


class _NotTaken(Exception):
    """`lock` returned False: another client holds the lock."""

    is_definite = True


async def _lock(client: Any, value: Any, key: Any) -> Any:
    answer = await client.lock(key)
    if answer is False:
        raise _NotTaken("the lock was not free")
    if _may_say_no(answer):
        due = "it must return False where somebody else holds the lock, and True or nothing where it was taken"
        raise ClientMistake(f"lock returned {answer!r:.80}: {due}")
    return None


def _may_say_no(answer: Any) -> bool:
    """Whether an answer other than False may mean "not acquired": 0, an empty string, "false". Counted as acquired, it
    would make a correct system look wrong. Leases, which many systems return, mean that the lock was acquired."""
    if isinstance(answer, str):
        return answer.strip().lower() in ("", "0", "false")
    return answer is not None and not answer


async def _unlock(client: Any, value: Any, key: Any) -> Any:
    await client.unlock(key)
    return None


@dataclass(frozen=True, slots=True)
class _Holder(Unpaced):
    """One thread: acquires a lock, holds it, releases it."""

    locks: int
    hold_ms: int
    held: str | None = None
    until_ns: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self.held is None:
            return Op("acquire", f"lock{context.random.randrange(self.locks)}"), self
        if context.time_ns < self.until_ns:
            return Wait(self.until_ns), self
        return Op("release", self.held), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        kind = event["type"]
        if kind == "invoke":
            return self
        if event["f"] == "acquire" and kind == "ok":
            held_ns = int(self.hold_ms * 1e6 * context.random.uniform(0.5, 1.5))
            return replace(self, held=event["key"], until_ns=context.time_ns + held_ns)
        if kind == "fail" and event["f"] == "release":
            return self  # still held
        return replace(self, held=None)


class MutexWorkload(CapabilityWorkload):
    """Every thread acquires and releases one of `locks` locks at a time."""

    name = "mutex"
    description = "Locks: no two clients hold the same one."
    capabilities = ("lock", "unlock")
    settings = (
        Setting("locks", "3", "number of locks", bounds=(1, 1000)),
        Setting("hold_ms", "20", "how long a lock is held on average, in milliseconds", bounds=(0, 60_000)),
        Setting("check", "exclusion", "linearizable: also check that only a held lock is released",
                ("exclusion", "linearizable")),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {"acquire": Call("lock", _lock), "release": Call("unlock", _unlock)}
    check_names = ("exclusion", "linearizable")

    def generator(self) -> Generator:
        return EachThread(_Holder(self.number("locks"), self.number("hold_ms")))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        history = with_final_releases(history)
        found = {"exclusion": judged(check_exclusion, history, context)}
        if self.text("check") == "linearizable":
            found["linearizable"] = linearizable(history, Mutex(), context)
        return found


def with_final_releases(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The history with a release of unknown outcome for every lock that is still held after the last invocation:
    clients are closed then, one after the other, and closing the holder's session may free a lock that another client's
    pending request then acquires."""
    last = max((at for at, event in enumerate(history) if event["type"] == "invoke"), default=-1)
    found: list[dict[str, Any]] = []
    held: dict[Any, Mapping[str, Any]] = {}
    busy: set[Any] = set()
    for at, event in enumerate(history):
        found.append({**event, "index": len(found)})
        process, kind = event["process"], event["type"]
        (busy.add if kind == "invoke" else busy.discard)(process)
        if event["f"] == "acquire" and kind == "ok":
            held[process] = event
        elif event["f"] == "release" and kind in ("ok", "info"):
            held.pop(process, None)
        for holder in [each for each in held if each not in busy] if at >= last else ():
            taken = held.pop(holder)
            release = {**taken, "type": "invoke", "f": "release", "value": None, "index": len(found)}
            found.append({**release, "time": event["time"]} if "time" in event else release)
    return found
