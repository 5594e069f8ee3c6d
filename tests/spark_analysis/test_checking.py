"""Distributed checking: the same verdicts and witnesses as by the local checker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checker import Log, Register, check, check_log, check_sequential, check_transactions, read_jsonl
from checker.cli import PROPERTIES
from checker.codecs import read
from harness.workloads.base import CheckContext
from harness.workloads.client_log import ClientLogWorkload
from harness.workloads.log import LogWorkload
from harness.workloads.register import RegisterWorkload

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

CORPORA = Path(os.environ.get("SPLITBRAIN_CORPORA", Path(__file__).resolve().parents[3] / "shared" / "corpora"))


WORDS: dict[Any, str] = {True: "valid", False: "invalid", "unknown": "unknown"}


def checked(spark: Any, place: str, plan: Any, include: tuple[str, ...] = ()) -> dict[tuple[str, str], dict[str, Any]]:
    from spark_analysis.checking import check_runs, run_verdicts
    from spark_analysis.ingest import ingest, list_runs

    listing = list_runs(spark, place, include=include)
    runs = ingest(spark, listing, unavailable_after_ns=10**9)
    found = run_verdicts(check_runs(spark, listing, runs, plan))
    return {(run_dir.removeprefix("file:"), name): verdict for (run_dir, name), verdict in found.items()}


def without_times(witness: dict[str, Any] | None) -> Any:
    return witness and {**witness, "note": ""}


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["sent as keys", "where they are read"])
def test_every_run_has_the_verdicts_and_witnesses_of_the_local_checker(
    spark: Any, store: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    from spark_analysis import checking

    monkeypatch.setattr(checking, "WHOLE_SHARE", share)
    found = checked(spark, str(store), checking.CheckPlan())
    verdicts = set()
    wanted = set()
    for test in store.glob("*/2*/test.json"):
        workload = json.loads(test.read_text())["workload"]
        # As Spark reads a store: what a killed writer has left of a last line is counted and left out.
        history = read_jsonl(test.parent / "history.jsonl", lenient=True)
        own: Any = RegisterWorkload() if workload == "register" else LogWorkload()
        names = {"linearizable": workload, "log": "log contents"}
        for check_name, outcome in own.check(history, CheckContext(60.0, 1024)).items():
            name = names[check_name]
            wanted.add((str(test.parent), name))
            mine = found[str(test.parent), name]
            verdicts.add((name, WORDS[outcome.valid]))
            assert mine["verdict"] == WORDS[outcome.valid], test.parent
            witness = outcome.details["witness"]
            assert (mine["witness"] is None) == (witness is None)
            if witness is not None:
                assert without_times(json.loads(mine["witness"])) == without_times(witness)
            if name == "log contents":
                assert json.loads(mine["counts"]) == outcome.details["stats"]["counts"]
    assert found.keys() == wanted
    assert verdicts >= {("register", "valid"), ("register", "invalid"), ("log contents", "invalid")}


def test_a_large_run_among_small_ones_has_its_local_verdict(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    from spark_analysis.checking import CheckPlan

    big = synthetic.make_run(tmp_path, 1, operations=6_000, faults=0, wrong=0.001, seed=3)
    for number in range(2, 5):
        synthetic.make_run(tmp_path, number, operations=40, faults=0)
    found = checked(spark, str(tmp_path), CheckPlan())
    assert len(found) == 4
    local = check(read_jsonl(big.history_path), Register())
    assert found[str(big.path), "register"]["verdict"] == local.verdict.value == "invalid"


def test_an_exhausted_budget_and_an_unsuitable_model_are_unknown(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
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
def test_recorded_histories_have_their_local_verdicts(
    spark: Any, corpus: str, include: tuple[str, ...], model_of: str
) -> None:
    from spark_analysis.checking import CheckPlan

    found = checked(spark, str(CORPORA / corpus), CheckPlan(model=model_of, timeout_s=30), include)
    assert found.keys() == {(str(path), model_of) for path in (CORPORA / corpus).rglob("*") if is_history(path)}
    verdicts = set()
    for (path, name), mine in found.items():
        local = check(read(path), name, timeout_s=30)
        verdicts.add(local.verdict.value)
        assert mine["verdict"] == local.verdict.value, path
    assert verdicts <= {"valid", "invalid"}
    assert verdicts == {"valid", "invalid"} or corpus in ("limo", "knossos/multi-register")


def is_history(path: Path) -> bool:
    return path.is_file() and path.name != "expected.json"


PROPERTY_OF = {"counter": "counter-bounds"}  # the corpus's name of a property, where ours is another


@pytest.mark.corpora
@pytest.mark.skipif(not CORPORA.is_dir(), reason="no recorded histories beside the checkout")
def test_recorded_transactions_have_their_local_verdicts(spark: Any) -> None:
    """Every property on every history, whether it was made for it or not."""
    from spark_analysis.checking import CheckPlan, check_runs, run_verdicts
    from spark_analysis.ingest import ingest, list_runs

    folder = CORPORA / "elle-cli"
    expected = json.loads((folder / "expected.json").read_text())
    # Elle only looks for cycles, and accepts the read of a 3 that was never written.
    expected["histories/elle/rw-register.edn"]["valid"] = False
    listing = list_runs(spark, str(folder / "histories"), include=("*.json",))
    runs = ingest(spark, listing, unavailable_after_ns=10**9).persist()
    histories = {str(path): read(path) for path in (folder / "histories").rglob("*") if is_history(path)}
    recorded = 0
    try:
        for name in ("list-append", "rw-register", "bank", "counter-bounds", "set-full", "long-fork"):
            rows = check_runs(spark, listing, runs, CheckPlan(model=name, timeout_s=30))
            found = {path.removeprefix("file:"): verdict for (path, _), verdict in run_verdicts(rows).items()}
            assert found.keys() == histories.keys()
            for path, mine in found.items():
                try:
                    local = PROPERTIES[name](histories[path], 30.0, None)
                except (ValueError, TypeError):
                    assert mine["verdict"] == "unknown" and mine["reason"].startswith(f"cannot be checked as {name}:")
                    continue
                assert (mine["verdict"], mine["reason"]) == (local.verdict.value, local.reason), path
                witness = local.to_json()["witness"]
                assert without_times(json.loads(mine["witness"] or "null")) == without_times(witness)
                about = expected.get(str(Path(path).relative_to(folder)))
                if about is not None and PROPERTY_OF.get(about["model"], about["model"]) == name:
                    assert (mine["verdict"] == "valid") is about["valid"]
                    recorded += 1
    finally:
        runs.unpersist()
    assert recorded == len(expected)


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["sent as keys", "where they are read"])
def test_transactions_of_a_store_have_their_local_verdicts(
    spark: Any, synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Read as JSON from Parquet, next to a model with keys, for runs that are cut by key and for whole ones."""
    from spark_analysis import checking

    monkeypatch.setattr(checking, "WHOLE_SHARE", share)
    run = synthetic.make_run(tmp_path, 1, workload="log", operations=200, faults=0, wrong=0.05)
    lost_update = [
        (0, "invoke", [["r", 1, None], ["append", 1, 1]]),
        (1, "invoke", [["r", 1, None], ["append", 1, 2]]),
        (0, "ok", [["r", 1, []], ["append", 1, 1]]),
        (1, "ok", [["r", 1, []], ["append", 1, 2]]),
        (0, "invoke", [["r", 1, None]]),
        (0, "ok", [["r", 1, [1, 2]]]),
    ]
    events = [
        {"index": at, "time": at, "process": process, "type": kind, "f": "txn", "value": value}
        for at, (process, kind, value) in enumerate(lost_update)
    ]
    transactions = synthetic.write_run(tmp_path, 2, events, workload="txn")
    plan = checking.CheckPlan(
        by_workload={"log": ("log", "sequential:log", "log contents"), "txn": ("list-append",)}, timeout_s=30
    )
    found = checked(spark, str(tmp_path), plan)
    history = read_jsonl(run.history_path)
    local = {
        (str(run.path), "log"): check(history, Log()),
        (str(run.path), "sequential:log"): check_sequential(history, Log(), timeout_s=30),
        (str(run.path), "log contents"): check_log(history),
        (str(transactions.path), "list-append"): check_transactions(events, "list-append"),
    }
    assert {place: row["verdict"] for place, row in found.items()} == {
        place: result.verdict.value for place, result in local.items()
    }
    assert {row["verdict"] for row in found.values()} == {"invalid"}
    assert "lost-update" in found[str(transactions.path), "list-append"]["counts"]


ASKED: dict[str, Any] = {"offset": 0, "max": 4, "final": True}
FINAL: dict[str, Any] = {**ASKED, "messages": [7, 8], "tail": 2}
STALE: dict[str, Any] = {"offset": 0, "max": 4, "messages": [7], "tail": 1}
APPENDS = [*(("append", kind, value) for at, number in enumerate((7, 8))
             for kind, value in (("invoke", number), ("ok", [at, number])))]  # fmt: skip
SEEN = [("read", "invoke", {"offset": 0, "max": 4}), ("read", "ok", {**FINAL, "final": False})]
FULL: dict[str, Any] = {"offset": 0, "max": 1, "messages": [7], "tail": None}


@pytest.mark.parametrize(
    ("workload", "settings", "steps", "verdicts"),
    [
        ("register", {}, [("write", "invoke", 7), ("write", "ok", 7), ("read", "invoke", None), ("read", "fail", None)],
         {"linearizable": "unknown"}),
        ("register", {}, [("write", "invoke", 7), ("write", "ok", 7), ("read", "invoke", None), ("read", "ok", 7)],
         {"linearizable": "valid"}),
        ("log", {}, [*APPENDS, *SEEN, ("read", "invoke", ASKED), ("read", "fail", ASKED)],
         {"linearizable": "valid", "log": "unknown"}),
        ("log", {}, [*APPENDS, ("read", "invoke", {"offset": 0, "max": 1}), ("read", "ok", FULL),
                     ("read", "invoke", ASKED), ("read", "ok", FINAL)],
         {"linearizable": "valid", "log": "valid"}),
        ("log", {"workload.polls": "eventual"}, [*APPENDS, ("read", "invoke", {"offset": 0, "max": 4}),
                 ("read", "ok", STALE), ("read", "invoke", ASKED), ("read", "ok", FINAL)],
         {"log": "valid"}),
        ("log", {"workload.polls": "eventual"}, [*APPENDS, *SEEN, ("read", "invoke", ASKED), ("read", "info", ASKED)],
         {"log": "unknown"}),
    ],
    ids=["unread register", "register", "unread log", "full poll", "stale poll", "unread log with stale polls"],
)  # fmt: skip
def test_the_rules_of_the_workload_apply_to_distributed_checks(
    spark: Any, synthetic: ModuleType, tmp_path: Path, workload: str, settings: dict[str, str], steps: Any,
    verdicts: dict[str, str],
) -> None:  # fmt: skip
    from spark_analysis.checking import EVENTUAL_CONTENTS, LOG_CONTENTS, CheckPlan

    events = [
        {"index": at, "time": at, "process": 0, "type": kind, "f": f, "key": 3, "value": value}
        for at, (f, kind, value) in enumerate(steps)
    ]
    own = ClientLogWorkload({"polls": settings.get("workload.polls", "linearizable")})
    local = (RegisterWorkload() if workload == "register" else own).check(events, CheckContext(10.0, 100))
    assert {name: WORDS[outcome.valid] for name, outcome in local.items()} == verdicts
    synthetic.write_run(tmp_path, 1, events, workload=workload, settings=settings)
    found = checked(spark, str(tmp_path), CheckPlan())
    contents = EVENTUAL_CONTENTS if settings else LOG_CONTENTS
    named = {"linearizable": workload, "log": contents}
    assert {name: row["verdict"] for (_, name), row in found.items()} == {
        named[name]: verdict for name, verdict in verdicts.items()
    }
    assert all("was over" in row["reason"] for row in found.values() if row["verdict"] == "unknown")


def test_an_unknown_model_is_refused_in_one_line(spark: Any) -> None:
    from spark_analysis.checking import CheckPlan
    from spark_analysis.errors import AnalysisError

    for model in ("registr", "sequential:nothing", "register:colour=1"):
        with pytest.raises(AnalysisError, match="--model") as caught:
            CheckPlan(model=model)
        assert "\n" not in str(caught.value)


def of_a_key(place: int, verdict: str, *, check: str = "register", operations: int = 5, **more: Any) -> dict[str, Any]:
    return {
        "run_dir": "r", "place": place, "key": f"k{place}", "check": check, "operations": operations,
        "verdict": verdict, "reason": f"{verdict} for k{place}", "counts": None, "witness": None, "search_s": 0.5,
        **more,
    }  # fmt: skip


def test_the_verdicts_of_the_keys_become_that_of_the_run() -> None:
    from spark_analysis.checking import run_verdicts

    def together(*rows: dict[str, Any]) -> dict[str, Any]:
        (found,) = run_verdicts(list(rows)).values()
        return found

    valid = together(of_a_key(1, "valid"), of_a_key(0, "valid", operations=7))
    assert (valid["verdict"], valid["keys"], valid["operations"], valid["search_s"]) == ("valid", 2, 12, 1.0)
    assert valid["reason"] == "valid for k0 (key k0, the first of 2, which are all valid)"
    assert together(of_a_key(0, "valid"))["reason"] == "valid for k0"
    unknown = together(of_a_key(2, "unknown"), of_a_key(0, "valid"), of_a_key(1, "unknown"))
    assert (unknown["verdict"], unknown["reason"]) == ("unknown", "unknown for k1")
    assert (unknown["invalid_keys"], unknown["unknown_keys"]) == (0, 2)
    invalid = together(
        of_a_key(0, "unknown"), of_a_key(1, "invalid", operations=9), of_a_key(2, "invalid", witness="w2"),
        of_a_key(3, "invalid"),
    )  # fmt: skip
    assert (invalid["verdict"], invalid["reason"], invalid["witness"]) == ("invalid", "invalid for k2", "w2")
    assert (invalid["invalid_keys"], invalid["unknown_keys"], invalid["counts"]) == (3, 1, None)


@pytest.mark.parametrize("name", ["log contents", "log contents (polls=eventual)"])
def test_the_key_with_the_gravest_anomaly_is_shown_and_all_are_counted(name: str) -> None:
    from spark_analysis.checking import run_verdicts

    counts = [{"lost": 0, "gap": 2}, {"lost": 1, "gap": 0}, {"lost": 3, "gap": 0}]
    rows = [
        of_a_key(at, "invalid", check=name, operations=9 - at, counts=json.dumps(each))
        for at, each in enumerate(counts)
    ]
    found = run_verdicts(rows)["r", name]
    assert found["reason"] == "invalid for k1"
    assert json.loads(found["counts"]) == {"lost": 4, "gap": 2}
