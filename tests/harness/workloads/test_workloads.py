"""The workloads against in-memory queues: correct histories are valid, incorrect ones are not."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.generator import Generator, Limit
from harness.systems.base import CheckOutcome
from harness.worker import Client, Workers
from harness.workloads.base import CheckContext
from harness.workloads.client_queue import ClientQueueWorkload
from harness.workloads.log import READ_MAX_MESSAGES, LogWorkload
from harness.workloads.queue import QueueWorkload
from harness.workloads.queues import MAX_FINAL_ATTEMPTS
from harness.workloads.register import RegisterWorkload
from harness.workloads.unique_ids import UniqueIdsWorkload

CONTEXT = CheckContext(timeout_s=20, memory_mb=512)


class Lost(Exception):
    is_definite = False


class Unreadable(Exception):
    is_definite = True


class Queues:
    """Append-only queues, with switches for what may go wrong."""

    def __init__(self, keys: int) -> None:
        self.queues: list[list[Any]] = [[] for _ in range(keys)]
        self.stale_by = 0
        self.drop_every = 0
        self.double_every = 0
        self.lose_answer_every = 0
        self.unreadable_from: dict[int, int] = {}
        """Queue -> the offset from which on reads fail."""
        self.appended = 0


class MemoryConnection:
    def __init__(self, queues: Queues) -> None:
        self.shared = queues
        self.node: str | None = "n1"
        self.durability: str | None = None

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def append(self, key: int, value: Any) -> int:
        shared = self.shared
        shared.appended += 1
        await asyncio.sleep(0)
        queue = shared.queues[key]
        offset = len(queue)
        if not (shared.drop_every and shared.appended % shared.drop_every == 0):
            queue.append(value)
        if shared.double_every and shared.appended % shared.double_every == 0:
            queue.append(value)
        await asyncio.sleep(0)
        if shared.lose_answer_every and shared.appended % shared.lose_answer_every == 0:
            raise Lost("the answer got lost")
        return offset

    def visible(self, key: int) -> list[Any]:
        queue = self.shared.queues[key]
        return queue[: max(0, len(queue) - self.shared.stale_by)]

    async def latest(self, key: int) -> Any:
        await asyncio.sleep(0)
        visible = self.visible(key)
        return visible[-1] if visible else None

    async def read(self, key: int, offset: int, max_messages: int) -> tuple[int, list[Any], int]:
        await asyncio.sleep(0)
        visible = self.visible(key)
        if offset >= self.shared.unreadable_from.get(key, math.inf):
            raise Unreadable("damaged")
        return offset, visible[offset : offset + max_messages], len(visible)

    async def tail(self, key: int) -> int:
        await asyncio.sleep(0)
        return len(self.visible(key))


class Recorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        recorded = {"index": len(self.events), "time": len(self.events) * 1000, **event}
        self.events.append(recorded)
        return recorded


def drive(
    workload: Any, prepare: Callable[[Queues], None] = lambda queues: None, operations: int = 600,
    before_final: Callable[[Queues], None] = lambda queues: None,
) -> tuple[list[dict[str, Any]], dict[str, CheckOutcome]]:  # fmt: skip
    queues = Queues(workload.keys)
    prepare(queues)
    recorder = Recorder()

    def make(process: int, thread: int) -> Client:
        client: Client = workload.client(MemoryConnection(queues))
        return client

    async def phase(generator: Generator, first_process: int) -> int:
        workers = Workers(
            generator=generator, threads=5, make_client=make, recorder=recorder,
            now_ns=lambda: int(asyncio.get_running_loop().time() * 1e9), random=random.Random(3),
            operation_timeout_s=5, first_process=first_process,
        )  # fmt: skip
        await workers.run()
        assert workers.unexpected_errors == {}
        return workers.next_process

    async def main() -> None:
        following = await phase(Limit(operations, workload.generator()), 0)
        before_final(queues)
        await phase(workload.final_generator(), following)

    asyncio.run(main())
    return recorder.events, dict(workload.check(recorder.events, CONTEXT))


@pytest.mark.parametrize("workload", [RegisterWorkload(keys=3), LogWorkload(keys=3)], ids=lambda w: w.name)
def test_a_correct_system_is_valid(workload: Any) -> None:
    events, checks = drive(workload)
    assert {name: outcome.valid for name, outcome in checks.items()} == dict.fromkeys(workload.check_names, True)
    assert sum(event["type"] == "ok" for event in events) >= 600


@pytest.mark.parametrize("workload", [RegisterWorkload(keys=3), LogWorkload(keys=3)], ids=lambda w: w.name)
def test_lost_answers_alone_are_no_violation(workload: Any) -> None:
    def prepare(queues: Queues) -> None:
        queues.lose_answer_every = 7

    events, checks = drive(workload, prepare)
    assert any(event["type"] == "info" for event in events)
    assert all(outcome.valid is True for outcome in checks.values())


@pytest.mark.parametrize("workload", [RegisterWorkload(keys=3), LogWorkload(keys=3)], ids=lambda w: w.name)
def test_stale_reads_are_found(workload: Any) -> None:
    def prepare(queues: Queues) -> None:
        queues.stale_by = 2

    def recovered(queues: Queues) -> None:
        queues.stale_by = 0

    _, checks = drive(workload, prepare, before_final=recovered)
    assert checks["linearizable"].valid is False
    assert checks["linearizable"].details["witness"]["operations"]


def test_a_lost_message_is_found() -> None:
    def prepare(queues: Queues) -> None:
        queues.drop_every = 50

    _, checks = drive(LogWorkload(keys=3), prepare)
    assert checks["log"].valid is False


def test_a_message_lost_at_the_end_is_found() -> None:
    def lose(queues: Queues) -> None:
        queues.queues[1].pop()

    _, checks = drive(LogWorkload(keys=3), before_final=lose)
    assert checks["log"].valid is False
    assert checks["log"].details["stats"]["counts"]["lost"] == 1


def test_a_queue_that_cannot_be_read_to_its_end_makes_the_verdict_unknown() -> None:
    """Its first final read reports its end, so that no message counts as never looked for."""

    def damage(queues: Queues) -> None:
        assert len(queues.queues[1]) > READ_MAX_MESSAGES
        queues.unreadable_from[1] = READ_MAX_MESSAGES

    events, checks = drive(LogWorkload(keys=3), before_final=damage)
    assert checks["log"].valid == "unknown"
    assert "but key 1 could not be read completely at the end of the run" in checks["log"].reason
    refused = [event for event in events if event["f"] == "read" and event["type"] == "fail"]
    assert len(refused) == MAX_FINAL_ATTEMPTS


def test_a_doubled_message_is_found() -> None:
    def prepare(queues: Queues) -> None:
        queues.double_every = 90

    _, checks = drive(LogWorkload(keys=3), prepare)
    assert checks["log"].valid is False
    assert checks["log"].details["stats"]["counts"]["duplicated"] > 0


def test_the_final_reads_see_every_message() -> None:
    events, _ = drive(LogWorkload(keys=3), operations=400)
    appended = {(e["key"], e["value"][1]) for e in events if e["type"] == "ok" and e["f"] == "append"}
    last_append = max(e["index"] for e in events if e["f"] == "append")
    seen = {
        (event["key"], value)
        for event in events
        if event["type"] == "ok" and event["f"] == "read" and event["index"] > last_append
        for value in event["value"]["messages"]
    }
    assert appended and appended <= seen


def test_written_values_are_distinct_over_the_run() -> None:
    events, _ = drive(RegisterWorkload(keys=3), operations=500)
    written = [event["value"] for event in events if event["type"] == "invoke" and event["f"] == "write"]
    assert len(written) == len(set(written)) > 100


FULL_READ = {"offset": 0, "messages": [7], "tail": 1, "final": True}
READ_LOG = [("append", "invoke", 7), ("append", "ok", [0, 7]),
            ("read", "invoke", {"offset": 0, "max": 2, "final": True}), ("read", "ok", FULL_READ)]  # fmt: skip


def test_a_check_that_runs_out_of_memory_is_unknown_and_the_other_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_too_much(history: Any, *, timeout_s: float, memory_mb: float) -> Any:
        raise MemoryError

    monkeypatch.setattr("harness.workloads.checks.check_log", takes_too_much)
    events = [
        {"index": at, "time": at, "process": 0, "type": kind, "f": f, "key": 0, "value": value}
        for at, (f, kind, value) in enumerate(READ_LOG)
    ]
    found = LogWorkload().check(events, CheckContext(10.0, 100))
    assert {name: outcome.valid for name, outcome in found.items()} == {"linearizable": True, "log": "unknown"}
    assert "no more memory" in found["log"].reason


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="only CPython can interrupt a thread")
@pytest.mark.parametrize(
    ("workload", "checker"),
    [(UniqueIdsWorkload(), "unique_ids.check_unique_ids"), (ClientQueueWorkload(), "client_queue.check_total_queue"),
     (QueueWorkload(), "queue.check_total_queue")],
    ids=["unique-ids", "client queue", "queue"],
)  # fmt: skip
def test_a_checker_that_ignores_its_limits_is_interrupted_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, workload: Any, checker: str
) -> None:
    def never_ends(history: Any, **_: Any) -> Any:
        until_s = time.monotonic() + 10.0
        while time.monotonic() < until_s:
            pass
        raise AssertionError("this checker was not interrupted")

    monkeypatch.setattr(f"harness.workloads.{checker}", never_ends)
    found = workload.check([], CheckContext(0.1, 100))
    outcome = found[checker.partition("check_")[2].replace("_", "-")]
    assert outcome.valid == "unknown"
    assert "the time limit of 0.1 s was reached" in outcome.reason
