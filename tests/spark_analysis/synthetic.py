"""Synthetic runs for tests: a small system in simulated time, written by the harness's own writer and judge."""

from __future__ import annotations

import heapq
import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.history_parquet import RunIdentity, write_parquet
from harness.history_writer import HistoryWriter, read_history
from harness.judge import judge
from harness.runner import Observed
from harness.store import RunDir, Store
from harness.test import NemesisChoice, Test
from harness.workloads.log import LogWorkload
from harness.workloads.register import RegisterWorkload

BEGAN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NODES = ("n1", "n2", "n3")
WORKLOADS = {"register": RegisterWorkload, "log": LogWorkload}


def make_run(
    store: Path,
    number: int,
    *,
    workload: str = "register",
    settings: dict[str, str] | None = None,
    operations: int = 300,
    faults: int = 2,
    wrong: float = 0.0,
    seed: int | None = None,
    finished: bool = True,
) -> RunDir:
    """One run in `store`. `wrong` is the chance of a stale read or lost append; not `finished`: the harness died."""
    rng = random.Random(number if seed is None else seed)
    test = Test(
        system="broker", cluster="local", nodes=3, workload=workload,
        nemesis=(NemesisChoice("partition", "halves"),) if faults else (), nemesis_interval_s=1.0, time_limit_s=10.0,
        concurrency=5, rate=100.0, seed=number, settings=settings or {},
    )  # fmt: skip
    began = BEGAN + timedelta(minutes=number)
    run_dir = Store(store).create(test.name, now=began)
    run_dir.write_test(test.to_json())
    clock = [0]
    with HistoryWriter(run_dir.history_path, lambda: clock[0]) as writer:
        for time_ns, event in _events(rng, workload, operations, faults, wrong):
            clock[0] = time_ns
            writer.append(event)
    if not finished:
        run_dir.release()
        return run_dir
    observed = Observed()
    results = judge(test, WORKLOADS[workload](), list(read_history(run_dir.history_path)), observed)
    run_dir.write_results({**results, "run_id": f"run-{number}", "started_at": began.isoformat(), "version": "test"})
    identity = RunIdentity.of(test, run_id=f"run-{number}", started_at=began)
    write_parquet(run_dir.history_path, run_dir.parquet_path, identity)
    run_dir.finish()
    return run_dir


def write_run(
    store: Path, number: int, events: list[dict[str, Any]], *, workload: str, settings: dict[str, str] | None = None
) -> RunDir:
    """A run in `store` with these events, never judged."""
    test = Test(
        system="broker", cluster="local", nodes=3, workload=workload, nemesis=(), nemesis_interval_s=1.0,
        time_limit_s=10.0, concurrency=5, rate=100.0, seed=number, settings=settings or {},
    )  # fmt: skip
    began = BEGAN + timedelta(minutes=number)
    run_dir = Store(store).create(test.name, now=began)
    run_dir.write_test(test.to_json())
    with open(run_dir.history_path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    write_parquet(
        run_dir.history_path, run_dir.parquet_path, RunIdentity.of(test, run_id=f"run-{number}", started_at=began)
    )
    run_dir.finish()
    return run_dir


def _events(
    rng: random.Random, workload: str, operations: int, faults: int, wrong: float
) -> list[tuple[int, dict[str, Any]]]:
    """Every event in order. While a fault holds, most operations hang, and then end unknown or fail."""
    step_ns = 10_000_000
    length_ns = operations * step_ns
    windows = [
        (length_ns * (2 * i + 1) // (2 * faults + 1), length_ns * (2 * i + 2) // (2 * faults + 1))
        for i in range(faults)
    ]
    found: list[tuple[int, int, dict[str, Any]]] = []
    order = 0

    def add(time_ns: int, event: dict[str, Any]) -> None:
        nonlocal order
        found.append((time_ns, order, event))
        order += 1

    for at, (start_ns, end_ns) in enumerate(windows):
        value = {"id": f"f{at}", "nemesis": "partition", "variant": "halves"}
        proof = {"proven": True, "links": 4, "failed": [], "detail": ""}
        for f, kind, when in (("inject", "invoke", start_ns), ("inject", "info", start_ns + 1_000),
                              ("heal", "invoke", end_ns - 1_000), ("heal", "info", end_ns)):  # fmt: skip
            extra = {"proof": proof} if kind == "info" else {}
            if f == "heal" and at % 3:  # every third heal has no `met`, like histories from before it existed
                extra["met"] = {**proof, "exercised": at % 3 == 2}
            add(when, {"process": "nemesis", "type": kind, "f": f, "value": {**value, **extra}})

    system = _Registers(rng, wrong) if workload == "register" else _Logs(rng, wrong)
    free: list[tuple[int, int]] = [(0, process) for process in range(5)]
    next_process = 5
    for number in range(operations):
        ready_ns, process = heapq.heappop(free)
        start_ns = max(ready_ns, number * step_ns + rng.randrange(step_ns // 2)) + 1
        op = system.invoke(number)
        add(start_ns, {"process": process, "type": "invoke", **op})
        hurt = any(a <= start_ns < b for a, b in windows) and rng.random() < 0.97
        latency_ns = int(rng.lognormvariate(14.5, 0.7)) + 1
        kind = "ok"
        if hurt:
            kind = rng.choice(("info", "info", "fail"))
            latency_ns += rng.randrange(700_000_000, 1_600_000_000)
        elif rng.random() < 0.03:
            kind = "fail"
        end_ns = start_ns + latency_ns
        done: dict[str, Any] = {"process": process, "type": kind, "f": op["f"], "key": op["key"], "value": op["value"]}
        if kind == "ok":
            # The system acts at the moment of the answer, in order of answers: see below.
            done["node"] = rng.choice(NODES)
        else:
            done["error"] = "no answer"
        add(end_ns, done)
        if kind == "info":
            heapq.heappush(free, (end_ns, next_process))
            next_process += 1
        else:
            heapq.heappush(free, (end_ns, process))
    found.sort(key=lambda item: (item[0], item[1]))
    for _, _, event in found:
        if event["type"] == "ok":
            event["value"] = system.answer(event)
    return [(time_ns, event) for time_ns, _, event in found]


class _Registers:
    def __init__(self, rng: random.Random, wrong: float) -> None:
        self.rng, self.wrong = rng, wrong
        self.values: dict[int, list[int]] = {}

    def invoke(self, number: int) -> dict[str, Any]:
        key = self.rng.randrange(4)
        if self.rng.random() < 0.5:
            return {"f": "write", "key": key, "value": number}
        return {"f": "read", "key": key, "value": None}

    def answer(self, event: dict[str, Any]) -> Any:
        values = self.values.setdefault(event["key"], [])
        if event["f"] == "write":
            values.append(event["value"])
            return event["value"]
        if len(values) > 6 and self.rng.random() < self.wrong:
            return values[-6]
        return values[-1] if values else None


class _Logs:
    def __init__(self, rng: random.Random, wrong: float) -> None:
        self.rng, self.wrong = rng, wrong
        self.queues: dict[int, list[int]] = {}

    def invoke(self, number: int) -> dict[str, Any]:
        key = self.rng.randrange(3)
        draw = self.rng.random()
        if draw < 0.5:
            return {"f": "append", "key": key, "value": number}
        if draw < 0.8:
            return {"f": "read", "key": key, "value": {"offset": self.rng.randrange(10), "max": 32}}
        return {"f": "tail", "key": key, "value": None}

    def answer(self, event: dict[str, Any]) -> Any:
        queue = self.queues.setdefault(event["key"], [])
        if event["f"] == "append":
            queue.append(event["value"])
            offset = len(queue) - 1
            if self.rng.random() < self.wrong:
                queue.pop()
            return [offset, event["value"]]
        if event["f"] == "tail":
            return len(queue)
        offset = event["value"]["offset"]
        return {"offset": offset, "messages": queue[offset : offset + 32], "tail": len(queue)}
