"""Distributed checking: the same verdicts and witnesses as on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checker import Log, Register, check, check_log, read_jsonl

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.serial, pytest.mark.timeout(900)]

CORPORA = Path(__file__).resolve().parents[2].parent / "shared" / "corpora"


def checked(spark: Any, place: str, plan: Any, include: tuple[str, ...] = ()) -> dict[tuple[str, str], dict[str, Any]]:
    from spark_analysis.checking import check_runs, run_verdicts
    from spark_analysis.ingest import ingest, list_runs

    listing = list_runs(spark, place, include=include)
    runs = ingest(spark, listing, unavailable_after_ns=10**9)
    found = run_verdicts(check_runs(spark, listing, runs, plan).collect())
    return {(run_dir.removeprefix("file:"), name): verdict for (run_dir, name), verdict in found.items()}


def without_times(witness: dict[str, Any] | None) -> Any:
    return witness and {**witness, "note": ""}


def test_every_run_as_the_local_checker_sees_it(spark: Any, store: Path) -> None:
    from spark_analysis.checking import CheckPlan

    found = checked(spark, str(store), CheckPlan())
    verdicts = set()
    wanted = set()
    for test in store.glob("*/2*/test.json"):
        workload = json.loads(test.read_text())["workload"]
        history = read_jsonl(test.parent / "history.jsonl")
        if workload == "register":
            local = {"register": check(history, Register())}
        else:
            local = {"log": check(history, Log()), "log contents": check_log(history)}
        for name, result in local.items():
            wanted.add((str(test.parent), name))
            mine = found[str(test.parent), name]
            verdicts.add((name, result.verdict.value))
            assert mine["verdict"] == result.verdict.value, test.parent
            witness = result.to_json()["witness"]
            assert (mine["witness"] is None) == (witness is None)
            if witness is not None:
                assert without_times(json.loads(mine["witness"])) == without_times(witness)
            if name == "log contents":
                assert json.loads(mine["counts"]) == result.stats["counts"]
    assert found.keys() == wanted
    assert verdicts >= {("register", "valid"), ("register", "invalid"), ("log contents", "invalid")}


def test_one_hot_key_among_small_ones(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    from spark_analysis.checking import CheckPlan

    big = synthetic.make_run(tmp_path, 1, operations=6_000, faults=0, wrong=0.001, seed=3)
    for number in range(2, 5):
        synthetic.make_run(tmp_path, number, operations=40, faults=0)
    found = checked(spark, str(tmp_path), CheckPlan())
    assert len(found) == 4
    local = check(read_jsonl(big.history_path), Register())
    assert found[str(big.path), "register"]["verdict"] == local.verdict.value == "invalid"


def test_a_budget_that_runs_out_is_unknown(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    from spark_analysis.checking import CheckPlan

    run = synthetic.make_run(tmp_path, 1, workload="log", operations=300, faults=0)
    found = checked(spark, str(tmp_path), CheckPlan(timeout_s=1e-9))
    assert found[str(run.path), "log contents"]["verdict"] == "unknown"
    assert found[str(run.path), "log contents"]["unknown_keys"] > 0
    wrong_model = checked(spark, str(tmp_path), CheckPlan(model="fifo-queue"))
    assert wrong_model[str(run.path), "fifo-queue"]["verdict"] == "unknown"


@pytest.mark.corpora
@pytest.mark.skipif(not CORPORA.is_dir(), reason="no recorded histories beside the checkout")
@pytest.mark.parametrize(
    ("corpus", "include", "model_of"),
    [
        ("knossos/cas-register", (), "cas-register:initial=0"),
        ("knossos/multi-register", (), 'multi-register:initial={"x":0,"y":0}'),
        ("porcupine/jepsen", ("*.log",), "cas-register"),
        ("porcupine/kv", ("*.txt",), "key-value"),
        ("limo", ("*.log",), "fifo-queue"),
        ("redis-sentinel-jepsen", (), "register"),
    ],
)
def test_corpora_have_the_local_verdicts(spark: Any, corpus: str, include: tuple[str, ...], model_of: str) -> None:
    from checker.codecs import read
    from spark_analysis.checking import CheckPlan

    found = checked(spark, str(CORPORA / corpus), CheckPlan(model=model_of, timeout_s=30), include)
    assert found
    verdicts = set()
    for (path, name), mine in found.items():
        local = check(read(path), name, timeout_s=30)
        verdicts.add(local.verdict.value)
        assert mine["verdict"] == local.verdict.value, path
    assert verdicts <= {"valid", "invalid"}
    assert verdicts == {"valid", "invalid"} or corpus in ("limo", "knossos/multi-register")
