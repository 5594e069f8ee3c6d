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
    assert (found["first_anomaly_ns"], found["first_anomaly_operations"]) == (500, 5)
