"""Which anomalies in a run's results are counted, and which its workload allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from checker import check_total_queue

pytest.importorskip("pandas", reason="the spark extra is not installed")


def outcome_of(check: dict[str, Any]) -> dict[str, Any]:
    from spark_analysis.outcomes import outcome_of_results

    return outcome_of_results(json.dumps({"valid": check["valid"], "checks": {"total-queue": check}}).encode())


def of_a_queue(puts: list[int], takes: list[int], *, allow_duplicates: bool = True) -> dict[str, Any]:
    operations: list[tuple[str, int | None, int | None]] = [("enqueue", value, value) for value in puts]
    operations += [("dequeue", None, value) for value in [*takes, None]]
    events = [
        {"process": 0, "type": kind, "f": f, "value": value}
        for f, asked, answered in operations
        for kind, value in (("invoke", asked), ("ok", answered))
    ]
    return check_total_queue(events, allow_duplicates=allow_duplicates).to_json()


@pytest.mark.parametrize("names_what_it_notes", [True, False])
def test_duplicates_that_a_queue_allows_are_no_anomalies(names_what_it_notes: bool) -> None:
    check = of_a_queue([1, 2], [1, 1, 2])
    assert check["valid"] is True and check["stats"]["counts"]["duplicated"] == 1
    if not names_what_it_notes:  # as an older harness has left it
        del check["stats"]["noted"]
    found = outcome_of(check)
    assert found["anomalies"] == [] and found["lost"] == 0 and found["duplicated"] is None
    assert found["acknowledged"] == 2


def test_only_the_violations_of_an_invalid_queue_are_counted() -> None:
    found = outcome_of(of_a_queue([1, 2], [1, 1]))
    assert found["anomalies"] == [{"check": "total-queue", "kind": "lost", "count": 1}]
    assert found["lost"] == 1 and found["duplicated"] is None


def test_duplicates_of_a_queue_that_delivers_once_are_anomalies() -> None:
    found = outcome_of(of_a_queue([1], [1, 1], allow_duplicates=False))
    assert found["anomalies"] == [{"check": "total-queue", "kind": "duplicated", "count": 1}]
    assert found["lost"] == 0 and found["duplicated"] == 1


def test_the_losses_of_an_unknown_verdict_are_not_counted() -> None:
    found = outcome_of({**of_a_queue([1, 2], [1]), "valid": "unknown"})
    assert found["anomalies"] == [] and found["lost"] is None


def results(valid: object, **checks: dict[str, Any]) -> dict[str, Any]:
    from spark_analysis.outcomes import outcome_of_results

    return outcome_of_results(json.dumps({"valid": valid, "reason": "as seen", "checks": checks}).encode())


def test_the_verdict_is_the_one_recorded() -> None:
    from spark_analysis.operations import UnreadableRunError

    assert [results(valid)["verdict"] for valid in (True, False, "unknown")] == ["valid", "invalid", "unknown"]
    for odd in (None, 1, 0, "valid", "true", [True], {}):
        with pytest.raises(UnreadableRunError, match=r"results\.json has no verdict"):
            results(odd)


def test_an_invalid_check_without_counts_is_an_anomaly_and_the_earliest_violation_is_the_first() -> None:
    def check(valid: object, ended_ns: int, index: int, **stats: int) -> dict[str, Any]:
        operations = [{"index": index, "invoked_ns": 1, "returned_ns": ended_ns}]
        return {"valid": valid, "stats": stats, "witness": {"operations": operations}}

    found = results(
        False, linearizable=check(False, 900, 8, invalid_keys=3), recovers=check(False, 500, 4),
        replicas=check("unknown", 100, 0), leaders=check(True, 100, 0),
    )  # fmt: skip
    assert [(each["check"], each["count"]) for each in found["anomalies"]] == [("linearizable", 3), ("recovers", 1)]
    assert (found["earliest_witness_ns"], found["earliest_witness_operations"]) == (500, 5)


def test_counts_of_several_checks_are_added_and_odd_ones_are_none() -> None:
    def counting(acknowledged: object, **counts: object) -> dict[str, Any]:
        return {"valid": False, "stats": {"acknowledged": acknowledged, "counts": counts}}

    found = results(
        False, log=counting(3, lost=1, duplicated=True, stale=-1), queue=counting(4, lost=2, stale=2**53, gap=1.0),
        keys={"valid": False, "stats": {"invalid_keys": 0}}, odd="not a check",
    )  # fmt: skip
    assert (found["acknowledged"], found["lost"], found["duplicated"]) == (7, 3, None)
    assert [(each["check"], each["kind"], each["count"]) for each in found["anomalies"]] == [
        ("log", "lost", 1), ("queue", "lost", 2), ("keys", "keys", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("operations", "first"),
    [
        ([{"index": 4, "returned_ns": 70}, {"index": 9, "returned_ns": 50}], (70, 10)),
        ([{"index": 2, "invoked_ns": 30, "returned_ns": None}], (30, 3)),  # a write without a completion
        ([{"index": 0}], (0, 1)),  # a history without times
        ([{"returned_ns": 70}], (None, None)),
        ([{"index": -2, "returned_ns": 70}], (None, None)),
        ([{"index": 4, "returned_ns": -1}], (None, None)),
        ([{"index": 4, "returned_ns": 2**63}], (None, None)),
        (["text"], (None, None)),
        ([], (None, None)),
    ],
)
def test_a_witness_is_complete_with_the_end_of_its_last_operation(
    operations: list[Any], first: tuple[Any, Any]
) -> None:
    found = results(False, linearizable={"valid": False, "witness": {"operations": operations}})
    assert (found["earliest_witness_ns"], found["earliest_witness_operations"]) == first


def identity(**test: Any) -> dict[str, Any]:
    from spark_analysis.outcomes import outcome_of_test

    return outcome_of_test(json.dumps(test).encode())


def test_a_run_is_identified_by_the_options_of_its_test() -> None:
    test = {
        "system": "broker", "workload": "log", "cluster": "sim", "seed": 7, "nodes": 5,
        "nemesis": ["kill=sigkill@leader", "partition"], "settings": {"read_mode": "unsafe"},
    }  # fmt: skip
    found = identity(**test)
    assert {name: value for name, value in found.items() if value is not None} == {
        "system": "broker", "workload": "log", "cluster": "sim", "seed": 7, "test_name": "broker-log-kill+partition",
        "nemesis": "kill=sigkill@leader+partition", "configuration": '{"nodes": "5", "read_mode": "unsafe"}',
    }  # fmt: skip
    scheduled = identity(**test, nemesis_schedule="schedules/cut.json")
    assert (scheduled["nemesis"], scheduled["test_name"]) == ("schedule=cut.json", "broker-log-schedule")
    calm = identity(**{**test, "nemesis": []})
    assert (calm["nemesis"], calm["test_name"]) == ("none", "broker-log-none")


def test_a_test_that_says_nothing_has_no_identity_of_its_own() -> None:
    """Empty texts give way to what the results or the history say."""
    empty = {"system": "", "workload": "", "cluster": "", "nemesis": "none", "seed": None}
    for said in ({}, dict.fromkeys(("system", "workload", "cluster", "seed")), {"nemesis": 7, "settings": [1]}):
        assert {name: identity(**said)[name] for name in empty} == empty


@pytest.mark.parametrize(
    ("seed", "read"), [(2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)), (2**63, None), (-(2**63) - 1, None), (True, None)]
)
def test_a_seed_beyond_64_bits_is_not_read(seed: int, read: int | None) -> None:
    assert identity(seed=seed)["seed"] == read


@pytest.mark.parametrize("content", [b"[]", b"7", b"{", b"\xff", b"[" * 100_000])
def test_files_that_are_no_json_objects_are_damaged(content: bytes) -> None:
    from spark_analysis.operations import UnreadableRunError
    from spark_analysis.outcomes import outcome_of_results, outcome_of_test

    for read, name in ((outcome_of_test, "test.json"), (outcome_of_results, "results.json")):
        with pytest.raises(UnreadableRunError, match=f"{name} is damaged: ") as caught:
            read(content)
        assert "\n" not in str(caught.value)


def test_a_long_reason_is_cut_and_events_are_added_up() -> None:
    from spark_analysis.outcomes import MAX_REASON, outcome_of_results

    def of(**more: Any) -> dict[str, Any]:
        return outcome_of_results(json.dumps({"valid": True, **more}).encode())

    assert of(reason="r" * 2_000)["reason"] == "r" * MAX_REASON
    assert of(ops={"invoke": 5, "ok": 3, "fail": 1, "info": 0})["events"] == 9
    assert of(ops={})["events"] is None and of(ops=None)["events"] is None
    assert of(ops={"invoke": 0})["events"] == 0
