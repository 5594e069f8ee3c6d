"""Histories that need more memory than is free: unknown, with counts, and valid on a machine with more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import cli, large_history
from harness.history_writer import read_history
from harness.judge import judge
from harness.large_history import BYTES_PER_BYTE, LEAST_CHECK_MB, TooLarge, too_large_to_judge
from harness.runner import Observed
from harness.store import Store
from harness.systems.base import CheckOutcome
from harness.test import Test
from harness.workloads.base import CheckContext
from harness.workloads.register import RegisterWorkload

RUN = ("run", "--cluster", "sim", "--nodes", "3", "--nemesis", "partition=leader", "--time-limit", "3", "--seed", "1")


def test_a_run_whose_history_is_too_large_ends_with_results_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(large_history, "free_bytes", lambda: 100_000)
    store = str(tmp_path / "store")
    words = [*RUN, "--nemesis-interval", "1", "--store", store]
    assert cli.main(words) == 2
    run_dir = Store(store).find("latest")
    results = run_dir.read_results()
    assert results["valid"] == "unknown"
    assert "not judged: " in results["checks"]["linearizable"]["reason"]
    assert "0.00 GB are free: run harness analyze on a machine with more" in results["reason"]
    assert results["checks"]["replicas"]["valid"] is True, "the check of the replicas needs no history"
    assert results["faults"] and all(fault["proven"] for fault in results["faults"])
    assert "not judged" in run_dir.report_path.read_text()
    assert cli.main(["analyze", str(run_dir.path), "--store", store]) == 2
    assert run_dir.read_results()["trouble"] == results["trouble"], "the history is not reported as truncated"
    monkeypatch.undo()
    assert cli.main(["analyze", str(run_dir.path), "--store", store]) == 0
    text = run_dir.history_path.read_text()
    monkeypatch.setattr(large_history, "free_bytes", lambda: 100_000)
    run_dir.history_path.write_text(text[: text.rindex("\n", 0, -1) + 1])
    assert cli.main(["analyze", str(run_dir.path), "--store", store]) == 2
    monkeypatch.undo()
    assert cli.main(["analyze", str(run_dir.path), "--store", store]) == 2, "it has lost an event since it was judged"
    assert "the history has lost its end: only " in run_dir.read_results()["reason"]
    run_dir.history_path.write_text(text)
    run_dir.write_results(results)
    assert cli.main(["analyze", str(run_dir.path), "--store", store]) == 0
    judged = run_dir.read_results()
    for name in ("ops", "ops_by_f", "faults"):
        assert judged[name] == results[name], name
    capsys.readouterr()


def test_a_history_is_too_large_if_it_needs_more_memory_than_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"index":0,"time":0,"process":0,"type":"invoke","f":"read","key":1,"value":null}\n')
    needed = path.stat().st_size * BYTES_PER_BYTE
    for free, fits in ((needed, True), (needed - 1, False), (None, True)):
        monkeypatch.setattr(large_history, "free_bytes", lambda free=free: free)
        found = too_large_to_judge(read_history(path))
        assert (found is None) is fits
    monkeypatch.setattr(large_history, "free_bytes", lambda: 0)
    found = too_large_to_judge(read_history(path))
    assert found is not None and dict(found.ops) == {"invoke": 1} and found.ops_by_f == {}
    assert too_large_to_judge(read_history(tmp_path / "nothing")) is None, "reading the file reports that"


TOO_LARGE = TooLarge(reason="not judged: too large", ops={"invoke": 1, "ok": 1}, ops_by_f={"write": {"ok": 1}})


@pytest.mark.parametrize("declared", [("linearizable",), ()])
def test_a_history_that_is_too_large_is_unknown_even_if_the_workload_declares_no_checks(declared: Any) -> None:
    class Declaring(RegisterWorkload):
        check_names = declared

    results = judge(TEST, Declaring(), [], Observed(), too_large=TOO_LARGE)
    assert results["valid"] == "unknown" and "not judged: too large" in results["reason"]


TEST = Test(
    system="broker", cluster="local", nodes=3, workload="register", nemesis=(), nemesis_interval_s=5,
    time_limit_s=10, concurrency=1, rate=10, seed=1, checker_memory_mb=2048,
)  # fmt: skip


def test_a_check_gets_no_more_memory_than_is_free_beside_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Noting(RegisterWorkload):
        def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
            given.append(context.memory_mb)
            return {"linearizable": CheckOutcome(True, "holds")}

    for free in (400 << 20, 0, 1 << 40, None):
        monkeypatch.setattr(large_history, "free_bytes", lambda free=free: free)
        judge(TEST, Noting(), [], Observed())
    assert given == [300, LEAST_CHECK_MB, 2048, 2048]


def test_a_check_that_runs_out_of_memory_is_unknown() -> None:
    class Hungry(RegisterWorkload):
        def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
            raise MemoryError

    results = judge(TEST, Hungry(), [], Observed())
    assert results["valid"] == "unknown" and "gave no more memory" in results["checks"]["linearizable"]["reason"]
