"""The sentences about the curves of `harness explain`, even for a malformed file."""

from __future__ import annotations

from typing import Any

import pytest

from harness.report.deciding import deciding_view, jump_of, sentences_of


def point(at_s: float, fails: int, holds: int, *, intervention: str = "heal") -> dict[str, Any]:
    return {"at_s": at_s, "intervention": intervention, "fails": fails, "holds": holds, "undecided": 0}


VIOLATION = {"text": "n1 has lost it"}


@pytest.mark.parametrize(
    ("explanation", "said"),
    [
        (
            {"points": [point(-0.05, 9, 1), point(0.0, 2, 8, intervention="none")], "jump": None},
            "No moment decides it: without any faults, 9 of 10 runs fail from the start.",
        ),
        (
            {"points": [point(-0.05, 10, 0), point(-0.05, 9, 1, intervention="end-load")], "jump": None},
            "No moment decides it: without faults and load, 9 of 10 runs fail from the start.",
        ),
        (
            {"points": [point(-0.05, 10, 0)], "jump": None, "is_cut_short": True},
            "No deciding moment was found within the limit of moments to examine. Raise --points.",
        ),
        (
            {
                "points": [
                    point(-0.05, 10, 0),
                    *(point(at_s, at_s, 10 - at_s, intervention="end-load") for at_s in range(7)),
                ],
                "jump": None,
            },
            "No moment decides it: 0 of 10 runs fail at first, 6 of 10 at last, without a jump.",
        ),
        (
            {"points": [point(0.0, 1, 9), point(4.0, 3, 7)], "jump": None, "is_cut_short": False},
            "No moment decides it: 1 of 10 runs fail at first, 3 of 10 at last, without a jump.",
        ),
        (
            {"points": [point(0.0, 0, 10)], "jump": None, "is_cut_short": True},
            "No deciding moment was found within the limit of moments to examine. Raise --points.",
        ),
        (
            {"points": [point(0.0, 1, 0)], "jump": None, "is_cut_short": False},
            "Too few runs to tell: without any faults, 1 of 1 runs fail from the start. Raise --runs.",
        ),
        (
            {"points": [point(0.0, 0, 10), point(2.0, 1, 9), point(4.0, 9, 1)], "jump": None, "is_interrupted": True},
            "Interrupted after examining 3 moments: the steepest rise so far, from 1 of 10 failing runs to 9 of "
            "10, lies between 2.0000 s and 4.0000 s.",
        ),
        (
            {"points": [point(0.0, 10, 0, intervention="none")], "jump": None, "is_interrupted": True},
            "Interrupted after examining 1 moment: no deciding moment found so far.",
        ),
        ({"points": [], "jump": None, "is_interrupted": True}, "No continuations were run."),
        ({"points": [], "jump": None}, "No continuations were run."),
        ({"points": "odd", "jump": 7}, "No continuations were run."),
    ],
)
def test_the_sentence_says_why_there_is_no_deciding_moment(explanation: dict[str, Any], said: str) -> None:
    assert sentences_of({"violation": VIOLATION, **explanation}) == ["Violation explained: n1 has lost it", said]


def test_a_moment_before_the_load_is_called_so_everywhere() -> None:
    explanation = {
        "violation": {**VIOLATION, "at_s": 1.5},
        "points": [point(-0.1, 0, 10), point(-0.05, 10, 0)],
        "jump": {"before_s": -0.1, "after_s": -0.05, "intervention": "heal"},
        "account": [{"at_s": -0.075, "text": "n1 leads"}, {"at_s": 1.25, "text": "n1 loses it"}],
    }
    view = deciding_view(explanation)
    assert view is not None
    assert view["sentences"][0] == "Violation explained, seen at 1.5000 s: n1 has lost it"
    assert view["sentences"][-1].startswith("Decided between 0.1000 s before the load and 0.0500 s before the load")
    assert view["account"] == [("0.075000 s before the load", "n1 leads"), ("1.250000 s", "n1 loses it")]


@pytest.mark.parametrize(("fails", "holds"), [(0, 10), (5, 5), (2, 0)])
def test_faults_that_do_not_always_cause_the_violation_are_not_said_to_decide_it(fails: int, holds: int) -> None:
    points = [point(0.0, fails, holds, intervention="none"), point(0.0, 0, 10), point(1.5, 1, 9), point(1.75, 10, 0)]
    explanation = {"points": points, "jump": {"before_s": 1.5, "after_s": 1.75, "intervention": "heal"}}
    assert sentences_of(explanation)[0] == (
        f"With the same faults and a different seed from the start, {fails} of {fails + holds} runs fail, and no "
        "deciding moment was found."
    )


def test_the_faults_may_decide_it_from_the_beginning_of_the_load() -> None:
    planned = [point(-0.1, 3, 7, intervention="none"), point(0.0, 10, 0, intervention="none")]
    points = [*planned, point(-0.1, 0, 10), point(1.5, 1, 9), point(1.75, 10, 0)]
    explanation = {"points": points, "jump": {"before_s": 1.5, "after_s": 1.75, "intervention": "heal"}}
    assert sentences_of(explanation)[0] == (
        "The faults decide it: with the same faults and a different seed from the beginning of the load, 10 of 10 "
        "runs fail; "
        "from the start, 3 of 10."
    )


def test_the_faults_may_decide_it_from_the_start() -> None:
    points = [point(0.0, 10, 0, intervention="none"), point(0.0, 0, 10), point(1.5, 1, 9), point(1.75, 10, 0)]
    explanation = {"points": points, "jump": {"before_s": 1.5, "after_s": 1.75, "intervention": "heal"}}
    assert sentences_of(explanation) == [
        "The faults decide it: with the same faults and a different seed from the start, 10 of 10 runs fail.",
        "Decided between 1.5000 s and 1.7500 s: of the runs that repeat this one up to the first moment and continue "
        "with a different seed and no faults, 1 of 10 fail; from the second moment, 10 of 10.",
    ]
    view = deciding_view(explanation)
    assert view is not None
    assert view["curves"] == ["planned", "healed"]
    assert [name for name, _ in view["drawings"]] == ["Until the violation", "Around the moment"]


@pytest.mark.parametrize(
    ("healed", "said"),
    [
        ([point(-0.1, 10, 0)], "The load alone decides it: without any faults, 10 of 10 runs fail from the start."),
        ([point(-0.1, 3, 0)], "Without any faults, 3 of 3 runs fail from the start."),
        (
            [point(-0.1, 6, 4), point(0.75, 8, 2)],
            "Without any faults, 6 of 10 runs fail from the start, and no deciding moment was found.",
        ),
    ],
)
def test_the_load_may_decide_it(healed: list[dict[str, Any]], said: str) -> None:
    ended = [point(at_s, fails, 10 - fails, intervention="end-load") for at_s, fails in ((0.5, 0), (0.75, 10))]
    explanation = {
        "points": [*healed, point(-0.1, 0, 10, intervention="end-load"), *ended],
        "jump": {"before_s": 0.5, "after_s": 0.75, "intervention": "end-load"},
    }
    assert sentences_of(explanation) == [
        said,
        "Decided between 0.5000 s and 0.7500 s: of the runs that repeat this one up to the first moment and continue "
        "with a different seed and neither faults nor further operations, 0 of 10 fail; from the second moment, 10 of "
        "10.",
    ]
    view = deciding_view(explanation)
    assert view is not None and view["curves"] == ["healed", "no-load"]


def test_explanations_that_say_only_whether_there_were_faults_are_shown() -> None:
    points = [point(0.0, 10, 0, intervention="none"), point(0.0, 0, 10), point(1.5, 1, 9), point(1.75, 10, 0)]
    jump = {"before_s": 1.5, "after_s": 1.75, "intervention": "heal"}

    def as_before(one: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in one.items() if name != "intervention"} | {
            "has_faults": one["intervention"] == "none"
        }

    former = {"points": list(map(as_before, points)), "jump": as_before(jump)}
    assert sentences_of(former) == sentences_of({"points": points, "jump": jump})


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e300, True, "1", None])
@pytest.mark.parametrize("name", ["at_s", "fails", "holds"])
def test_numbers_that_no_search_can_have_written_are_left_out(odd: Any, name: str) -> None:
    good = [point(0.0, 1, 9), point(4.0, 9, 1)]
    jump = {"before_s": 0.0, "after_s": 4.0, "intervention": "heal"}
    explanation = {"points": [*good, {**point(2.0, 5, 5), name: odd}, point(3.0, -1, 2)], "jump": jump}
    assert sentences_of(explanation) == sentences_of({"points": good, "jump": jump})
    view = deciding_view({**explanation, "account": [{"at_s": odd, "text": "t"}, {"at_s": 1.0, "text": "t"}]})
    assert view is not None and len(view["account"]) == 1
    for end in ("before_s", "after_s"):
        assert jump_of({"jump": {**jump, end: odd}}) is None
