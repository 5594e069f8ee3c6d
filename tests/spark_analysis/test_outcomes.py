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
