"""The workloads over producers and consumer groups, against an in-memory group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.clusters.sim.loop import START_S
from harness.clusters.sim.simulation import run_simulated
from harness.generator import Context, Generator, Limit, Op, Step, Wait
from harness.systems.base import CheckOutcome
from harness.worker import Client, Workers
from harness.workloads.base import CheckContext
from harness.workloads.delay import DelayWorkload
from harness.workloads.draining import DRAIN_LIMIT_S, Drain
from harness.workloads.queue import QueueWorkload
from harness.workloads.transactions import TransactionsWorkload, as_prepare_and_end

CONTEXT = CheckContext(timeout_s=20, memory_mb=512)
EVENT_MS = 10.0
"""The test's clock advances by this with every event, and by the waits in virtual time."""

WORKLOADS = [QueueWorkload(keys=2), DelayWorkload(keys=2), TransactionsWorkload(keys=2)]


class Lost(Exception):
    is_definite = False


class Undecided(Exception):
    is_definite = False
    is_decided = False


class Refused(Exception):
    is_definite = True


@dataclass
class Group:
    """One topic and its consumer group, with switches for what may go wrong. `due` holds the undelivered messages:
    (the time from which it may be received, the value)."""

    now_ms: Callable[[], float] = lambda: 0.0
    due: list[tuple[float, Any]] = field(default_factory=list)
    sent: int = 0
    drop_every: int = 0
    double_every: int = 0
    lose_answer_every: int = 0
    invented: list[Any] = field(default_factory=list)
    early_ms: float = 0.0
    shows_rolled_back: bool = False
    halves: int = 0
    shows_halves_every: int = 0
    hidden: int = 0
    """Messages that the group never delivers."""
    is_silent_about_lag: bool = False


class MemoryMessaging:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.node: str | None = "n1"

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def send(self, value: Any, *, delay_ms: int = 0) -> None:
        await asyncio.sleep(0)
        group = self.group
        group.sent += 1
        at_ms = group.now_ms() + max(0.0, delay_ms - group.early_ms if delay_ms else 0)
        if not (group.drop_every and group.sent % group.drop_every == 0):
            group.due.append((at_ms, value))
        if group.double_every and group.sent % group.double_every == 0:
            group.due.append((at_ms, value))
        await asyncio.sleep(0)
        if group.lose_answer_every and group.sent % group.lose_answer_every == 0:
            raise Lost("the answer got lost")

    async def send_in_transaction(self, value: Any, *, commit: bool, tell: bool) -> None:
        self.group.halves += 1
        if self.group.shows_halves_every and self.group.halves % self.group.shows_halves_every == 0:
            await self.send(value)
            raise Undecided("the answer got lost")
        if commit or self.group.shows_rolled_back:
            await self.send(value, delay_ms=0 if tell else 50)

    async def receive(self, max_messages: int) -> list[Any]:
        await asyncio.sleep(0)
        group = self.group
        if group.invented:
            return [group.invented.pop()]
        ready = [item for item in group.due if item[0] <= group.now_ms()][:max_messages]
        for item in ready:
            group.due.remove(item)
        return [value for _, value in ready]

    async def lag(self) -> int:
        await asyncio.sleep(0)
        if self.group.is_silent_about_lag:
            raise Refused("nobody knows")
        return len(self.group.due) + self.group.hidden


class Recorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def now_ns(self) -> int:
        return int(len(self.events) * EVENT_MS * 1e6 + (asyncio.get_running_loop().time() - START_S) * 1e9)

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        recorded = {"index": len(self.events), "time": self.now_ns(), **event}
        self.events.append(recorded)
        return recorded


def drive(workload: Any, group: Group) -> tuple[list[dict[str, Any]], CheckOutcome]:
    recorder = Recorder()
    group.now_ms = lambda: recorder.now_ns() / 1e6

    def make(process: int, thread: int) -> Client:
        client: Client = workload.client(MemoryMessaging(group))
        return client

    async def phase(generator: Generator, first_process: int) -> int:
        workers = Workers(
            generator=generator, threads=4, make_client=make, recorder=recorder, now_ns=recorder.now_ns,
            random=random.Random(3), operation_timeout_s=5, first_process=first_process,
        )  # fmt: skip
        await workers.run()
        assert workers.unexpected_errors == {}
        return workers.next_process

    async def main() -> None:
        await phase(workload.final_generator(), await phase(Limit(400, workload.generator()), 0))

    run_simulated(main(), seed=1)
    checks = dict(workload.check(recorder.events, CONTEXT))
    assert tuple(checks) == workload.check_names
    return recorder.events, checks[workload.check_names[0]]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_a_correct_system_is_valid(workload: Any) -> None:
    events, outcome = drive(workload, Group())
    assert outcome.valid is True, outcome.reason
    assert sum(event["type"] == "ok" for event in events) > 400


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_lost_answers_and_duplicates_are_no_violation(workload: Any) -> None:
    events, outcome = drive(workload, Group(lose_answer_every=7, double_every=5))
    assert any(event["type"] == "info" for event in events)
    assert outcome.valid is True, outcome.reason


@pytest.mark.parametrize(
    ("workload", "kind"),
    list(zip(WORKLOADS, ("lost", "lost", "committed-lost"), strict=True)),
    ids=["queue", "delay", "transactions"],
)
def test_lost_messages_are_found(workload: Any, kind: str) -> None:
    _, outcome = drive(workload, Group(drop_every=20))
    assert outcome.valid is False
    assert outcome.details["stats"]["counts"][kind] > 0


def test_a_crashed_dequeue_does_not_excuse_a_loss_if_the_group_redelivers() -> None:
    lines = [(0, "invoke", "enqueue", 1), (0, "ok", "enqueue", 1), (1, "invoke", "dequeue", None),
             (1, "info", "dequeue", None), (2, "invoke", "dequeue", None), (2, "ok", "dequeue", None),
             (2, "invoke", "lag", None), (2, "ok", "lag", 0)]  # fmt: skip
    events = [
        {"index": index, "time": index, "process": process, "type": kind, "f": f, "value": value, "key": 0}
        for index, (process, kind, f, value) in enumerate(lines)
    ]
    found = QueueWorkload(keys=1).check(events, CONTEXT)["total-queue"]
    assert found.valid is False and found.details["stats"]["counts"]["lost"] == 1


@pytest.mark.parametrize(
    "group", [Group(drop_every=20, hidden=3), Group(drop_every=20, is_silent_about_lag=True)], ids=["behind", "silent"]
)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_a_message_that_may_still_be_received_is_not_called_lost(workload: Any, group: Group) -> None:
    _, outcome = drive(workload, group)
    assert outcome.valid == "unknown"
    assert "still to be received" in outcome.reason


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("hidden", [0, 3])
def test_messages_that_were_never_sent_are_found_even_if_the_group_lags(workload: Any, hidden: int) -> None:
    _, outcome = drive(workload, Group(invented=[987654], hidden=hidden))
    assert outcome.valid is False
    assert outcome.details["stats"]["counts"]["unexpected"] == 1


def test_early_messages_are_found() -> None:
    assert drive(DelayWorkload(keys=2), Group(early_ms=0.9))[1].valid is True
    _, outcome = drive(DelayWorkload(keys=2), Group(early_ms=900))
    assert outcome.valid is False
    assert outcome.details["stats"]["counts"]["early"] > 0


def test_rolled_back_messages_are_found() -> None:
    _, outcome = drive(TransactionsWorkload(keys=2), Group(shows_rolled_back=True))
    assert outcome.valid is False
    assert outcome.details["stats"]["counts"]["rolled-back-seen"] > 0


def test_a_transaction_becomes_a_concurrent_prepare_and_end() -> None:
    value = {"message": 4, "commit": False, "tell": True}
    events = [
        {"index": 0, "time": 5, "type": "invoke", "process": 3, "f": "transact", "value": value},
        {"index": 1, "time": 6, "type": "ok", "process": 9, "f": "lag", "value": 0},
        {"index": 2, "time": 9, "type": "info", "process": 3, "f": "transact", "value": value},
    ]
    told = [(e["index"], e["time"], e["type"], e["process"], e["f"], e["value"]) for e in as_prepare_and_end(events)]
    assert told == [
        (0, 5, "invoke", 6, "prepare", 4),
        (1, 5, "invoke", 7, "rollback", 4),
        (2, 9, "info", 6, "prepare", 4),
        (3, 9, "info", 7, "rollback", 4),
    ]


def test_an_end_that_was_never_requested_has_failed() -> None:
    value = {"message": 4, "commit": True, "tell": True}
    events = [
        {"index": 0, "time": 5, "type": "invoke", "process": 3, "f": "transact", "value": value},
        {"index": 1, "time": 9, "type": "info", "process": 3, "f": "transact", "value": {**value, "ended": False}},
    ]
    told = [(e["type"], e["process"], e["f"]) for e in as_prepare_and_end(events)]
    assert told == [
        ("invoke", 6, "prepare"), ("invoke", 7, "commit"), ("info", 6, "prepare"), ("fail", 7, "commit"),
    ]  # fmt: skip


def test_a_half_message_of_unknown_outcome_must_never_be_seen() -> None:
    events, outcome = drive(TransactionsWorkload(keys=2), Group(shows_halves_every=20))
    assert outcome.valid is False
    assert outcome.details["stats"]["counts"]["prepared-seen"] > 0
    assert any(event["type"] == "info" and event["value"]["ended"] is False for event in events)


def test_draining_ends_only_once_the_group_has_no_lag() -> None:
    context = Context(random=random.Random(1))
    drain: Generator = Drain("receive", at_least_s=2.0)

    def ask(time_s: float) -> Step:
        nonlocal drain
        context.time_ns = int(time_s * 1e9)
        step, drain = drain.next(context)
        return step

    def tell(f: str, value: Any, type_: str = "ok") -> None:
        nonlocal drain
        drain = drain.update(context, {"type": type_, "f": f, "value": value})

    assert ask(100) == Op("receive")
    tell("receive", [1])
    assert ask(100.5) == Op("receive")
    tell("receive", [])
    assert ask(101) == Op("lag")
    tell("lag", 0)
    assert ask(101) == Op("receive"), "the least time is not over"
    tell("receive", [])
    assert ask(103) == Op("lag")
    tell("lag", 4)
    assert ask(103) == Op("receive")
    tell("receive", [], "info")
    assert ask(103) == Wait(103_050_000_000), "a failed receive is not retried at once"
    assert ask(103.05) == Op("receive")
    tell("receive", [])
    assert ask(104) == Op("lag")
    tell("lag", 0)
    assert ask(104) is None
    assert ask(104 + 2 * DRAIN_LIMIT_S) is None


def test_draining_ends_at_its_time_limit() -> None:
    context = Context(random=random.Random(1))
    _, drain = Drain("receive").next(context)
    context.time_ns = int((DRAIN_LIMIT_S + 1) * 1e9)
    assert drain.next(context)[0] is None
