"""Faults read from the nemesis's events: paired by id, proven only by a proof, even in a damaged history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker.faults import count_unmet, exercised_by, faults_of, is_proven

PROOF = {"proven": True, "detail": "seen"}


def event(f: str, kind: str, time_ns: int, value: Any) -> dict[str, Any]:
    return {"process": "nemesis", "type": kind, "f": f, "time": time_ns, "value": value}


def test_overlapping_faults_are_paired_by_their_ids() -> None:
    told = {"nemesis": "kill", "variant": "sigkill@n1", "hosts": ["n1"]}
    found = faults_of([
        event("inject", "invoke", 1, {"id": "f1", **told}),
        {"process": 0, "type": "invoke", "f": "read", "time": 2, "value": {"id": "f1"}},
        event("inject", "invoke", 3, {"id": "f2", **told}),
        event("inject", "info", 4, {"id": "f1", **told, "proof": PROOF}),
        event("inject", "info", 5, {"id": "f2", **told, "proof": {"proven": False}}),
        event("heal", "invoke", 6, {"id": "f1", **told}),
        event("heal", "info", 7, {"id": "f1", **told, "proof": PROOF}),
    ])  # fmt: skip
    assert found == [
        {"id": "f1", **told, "start_ns": 1, "end_ns": 7, "proven": True, "exercised": None, "healed": True,
         "proof": PROOF, "met": None, "heal_proof": PROOF},
        {"id": "f2", **told, "start_ns": 3, "end_ns": None, "proven": False, "exercised": None, "healed": False,
         "proof": {"proven": False}, "met": None, "heal_proof": None},
    ]  # fmt: skip


@pytest.mark.parametrize("proof", [None, True, "proven", [], {}, {"proven": "no"}, {"proven": 1}, {"proven": False}])
def test_only_a_proof_that_is_proven_proves_a_fault(proof: Any) -> None:
    assert not is_proven(proof)
    [fault] = faults_of([event("inject", "info", 1, {"id": "f1", "proof": proof})])
    assert fault["proven"] is False and fault["healed"] is False


@pytest.mark.parametrize(
    ("at_first", "met", "exercised"),
    [
        ({}, None, None),
        ({"exercised": True}, None, True),
        ({"exercised": None}, {"proven": True, "exercised": False}, False),
        ({"exercised": False}, {"proven": True, "exercised": True}, True),
        ({"exercised": True}, {"proven": True, "exercised": False}, True),
        ({"exercised": False}, {"proven": True}, None),
        ({"exercised": "no"}, None, None),
    ],
)
def test_a_fault_is_exercised_if_its_proof_or_its_final_check_says_so(at_first: Any, met: Any, exercised: Any) -> None:
    proof = {**PROOF, **at_first}
    healing = {"id": "f1"} if met is None else {"id": "f1", "met": met}
    [fault] = faults_of([
        event("inject", "invoke", 1, {"id": "f1"}), event("inject", "info", 2, {"id": "f1", "proof": proof}),
        event("heal", "invoke", 3, healing), event("heal", "info", 4, {**healing, "proof": PROOF}),
    ])  # fmt: skip
    assert fault["exercised"] is exercised is exercised_by(proof, met)
    assert fault["proven"] and fault["met"] == met
    assert count_unmet([fault, None, {}]) == (exercised is False)


def test_a_fault_that_did_not_last_is_not_proven() -> None:
    lapsed = {"proven": False, "detail": "n1->n2 carried 40 bytes"}
    [fault] = faults_of([
        event("inject", "info", 1, {"id": "f1", "proof": {**PROOF, "exercised": True}}),
        event("heal", "info", 2, {"id": "f1", "met": lapsed, "proof": PROOF}),
    ])  # fmt: skip
    assert fault["proven"] is False and fault["exercised"] is True and fault["healed"] is True


def test_a_final_check_does_not_make_up_for_a_failed_proof() -> None:
    [fault] = faults_of([
        event("inject", "info", 1, {"id": "f1", "proof": {**PROOF, "proven": False}}),
        event("heal", "info", 2, {"id": "f1", "met": PROOF, "proof": PROOF}),
    ])  # fmt: skip
    assert fault["proven"] is False and fault["healed"] is True


def test_only_a_healing_that_was_completed_has_an_end_and_a_proof() -> None:
    [fault] = faults_of([
        event("inject", "info", 1, {"id": "f1", "proof": PROOF}),
        event("heal", "invoke", 2, {"id": "f1", "proof": PROOF}),
    ])  # fmt: skip
    assert fault["healed"] is False and fault["end_ns"] is None


def test_fields_of_a_fault_do_not_make_it_proven_or_healed() -> None:
    [fault] = faults_of([event("inject", "invoke", 5, {"id": "f1", "proven": True, "healed": True, "start_ns": 0})])
    assert fault["proven"] is False and fault["healed"] is False and fault["start_ns"] == 5


NAMES = ["id", "proof", "met", "proven", "exercised", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=8,
)


@given(
    st.lists(
        st.builds(
            event, st.sampled_from(["inject", "heal", "?"]), st.sampled_from(["invoke", "info"]), st.integers(), JSON
        )
    )
)
def test_malformed_nemesis_events_raise_no_error(events: list[dict[str, Any]]) -> None:
    found = faults_of(events)
    values = [e["value"] for e in events if isinstance(e["value"], dict)]
    assert len(found) == len({str(value["id"]) for value in values if "id" in value})
    for fault in found:
        assert fault["proven"] is is_proven(fault["proof"]) and fault["healed"] is is_proven(fault["heal_proof"])
