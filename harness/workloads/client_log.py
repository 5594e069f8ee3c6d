"""Workload `log` for any client: `append(key, value)` and `poll(key, offset, max_messages)`.

Every key is an append-only log whose offsets count up from 0 without gaps. `append` returns the offset that the
value got. `poll` returns the values at `offset`, `offset + 1` and so on, at most `max_messages`, and fewer only if the
log has no more, which marks its end. A client that cannot tell must raise instead.

At the end every log is read whole and each acknowledged value is accounted for: lost, duplicated, phantom, reordered or
stored under two offsets. With `polls=linearizable` a log must also be linearizable, so a poll that misses a value
acknowledged before it is a violation. With `polls=eventual` only the last poll of a log must have everything: final
polls are repeated, for 30 s at most, until they have what the load has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from checker import History, Log
from checker.last_reads import last_final_reads, without_earlier_tails, without_full_polls
from harness.generator import Context, Generator, Mix, Op, Unpaced
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, is_whole_number, numbers_from
from harness.workloads.checks import linearizable, log_contents
from harness.workloads.final_reads import unless_left
from harness.workloads.queues import ReadWhole, distinct_writes

__all__ = [
    "POLL_MAX_MESSAGES",
    "ClientLogWorkload",
    "ReadToTheEnd",
    "polled",
    "unless_left_unread",
]

POLL_MAX_MESSAGES = 32
"""Maximum values per poll."""


async def _append(client: Any, value: Any, key: Any) -> Any:
    offset = await client.append(key, value)
    if not is_whole_number(offset, least=0):
        raise ClientMistake(f"append returned {offset!r:.80}: it must return the offset that the value got, from 0 on")
    return [offset, value]


async def _poll(client: Any, value: Any, key: Any) -> Any:
    return polled("poll", await client.poll(key, value["offset"], value["max"]), value)


def polled(method: str, messages: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a log read, from the client's answer to `asked`. Raises ClientMistake for an invalid answer."""
    offset, most = asked["offset"], asked["max"]
    if not isinstance(messages, (list, tuple)):
        raise ClientMistake(f"{method} returned {messages!r:.80}: it must return a list of values")
    if len(messages) > most:
        raise ClientMistake(f"{method} returned {len(messages)} values where at most {most} were asked for")
    # A full answer leaves the tail unknown (None): there may be more.
    tail = offset + len(messages) if len(messages) < most else None
    found = {"offset": offset, "messages": numbers_from(method, messages), "tail": tail}
    return {**found, "final": True} if asked.get("final") else found


@dataclass(frozen=True, slots=True)
class _Polls(Unpaced):
    """Polls near the last seen end, where stale replicas give themselves away. The ends are also recorded in `seen`."""

    keys: int
    tails: tuple[int, ...]
    seen: dict[int, int]

    def next(self, context: Context) -> tuple[Op, Generator]:
        key = context.random.randrange(self.keys)
        offset = max(0, self.tails[key] - context.random.randrange(8))
        return Op("read", key, {"offset": offset, "max": POLL_MAX_MESSAGES}), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] != "ok":
            return self
        key, value = event["key"], event["value"]
        tail = value[0] + 1 if event["f"] == "append" else value["offset"] + len(value["messages"])
        if tail <= self.tails[key]:
            return self
        self.seen[key] = tail
        return replace(self, tails=(*self.tails[:key], tail, *self.tails[key + 1 :]))


@dataclass(frozen=True, slots=True)
class ReadToTheEnd(Unpaced):
    """`ReadWhole` for polls, whose answer shows the end only if it is not full."""

    inner: Generator

    def next(self, context: Context) -> tuple[Any, Generator]:
        step, inner = self.inner.next(context)
        return step, ReadToTheEnd(inner)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "ok" and event["f"] == "read" and event["value"]["tail"] is None:
            more = event["value"]["offset"] + len(event["value"]["messages"]) + 1
            event = {**event, "value": {**event["value"], "tail": more}}
        return ReadToTheEnd(self.inner.update(context, event))


class ClientLogWorkload(CapabilityWorkload):
    """Appends, and polls near the end, over `keys` logs."""

    name = "log"
    description = "Append-only logs with offsets, which are read completely at the end."
    capabilities = ("append", "poll")
    settings = (
        Setting("keys", "4", "number of logs", bounds=(1, 1000)),
        Setting("polls", "linearizable", "eventual: a poll may miss values that were acknowledged before it",
                ("linearizable", "eventual")),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {
        "append": Call("append", _append),
        "read": Call("poll", _poll, is_read=True),
    }
    check_names = ("linearizable", "log")

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._seen: dict[int, int] = {}
        """Log -> the end that the load has seen."""

    def generator(self) -> Generator:
        polls = _Polls(self.keys, (0,) * self.keys, self._seen)
        return Mix(((1.0, distinct_writes("append", self.keys)), (1.0, polls)))

    def final_generator(self) -> Generator:
        """Every log from its beginning to its end."""
        known = self._seen if self.text("polls") == "eventual" else {}
        return ReadToTheEnd(ReadWhole(self.keys, POLL_MAX_MESSAGES, known))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        recorded = History.of(history)
        if self.text("polls") == "eventual":
            contents = log_contents(without_earlier_tails(recorded), context)
            return {"log": unless_left_unread(contents, recorded, "key")}
        return {
            "linearizable": linearizable(without_full_polls(recorded), Log(), context),
            "log": unless_left_unread(log_contents(recorded, context), recorded, "key"),
        }


def unless_left_unread(outcome: CheckOutcome, history: History, what: str) -> CheckOutcome:
    """`outcome`, or unknown if it is valid although the final reads did not reach the end of some log: what the load
    has seen of it may have been lost since. `what` is the name for a log."""
    left = [log for log, row in last_final_reads(history).items() if row is None]
    return unless_left(outcome, left, f"{what} {{}} could not be read completely")
