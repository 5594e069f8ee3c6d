"""Schedules are values: generated from a seed, saved, loaded, and refused with all problems at once."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemesis.schedule import (
    HEAL,
    INJECT,
    FaultEvent,
    Schedule,
    ScheduleError,
    load_schedule,
    periodic,
    save_schedule,
)

CHOICES = [("partition", ["halves", "one", "bridge"]), ("kill", ["leader", "one"])]


def problems_of(data: Any, **known: list[str]) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_json(data, known=known or None)
    return caught.value.problems


def entry(at_s: float, action: str, fault_id: str = "f1", **more: Any) -> dict[str, Any]:
    named = {"nemesis": "partition", "variant": "halves"} if action == INJECT else {}
    return {"at_s": at_s, "action": action, "id": fault_id, **named, **more}


@given(
    st.integers(0, 2**32),
    st.floats(0.1, 30),
    st.floats(0, 30),
    st.floats(0, 30),
    st.floats(1, 600),
)
def test_periodic_faults_begin_after_a_quiet_time_never_overlap_and_are_all_healed(
    seed: int, on_s: float, off_s: float, quiet_s: float, limit_s: float
) -> None:
    def make() -> Schedule:
        rng = random.Random(seed)
        return periodic(CHOICES, rng, time_limit_s=limit_s, on_s=on_s, off_s=off_s, quiet_start_s=quiet_s)

    if limit_s < quiet_s + on_s - 1e-6:
        with pytest.raises(ScheduleError, match="is too short for a fault"):
            make()
        return
    if limit_s < quiet_s + on_s + 1e-6:
        return  # exactly one fault, up to rounding
    schedule = make()
    assert schedule == make()
    events = list(schedule)
    assert [event.action for event in events] == [INJECT, HEAL] * (len(events) // 2)
    assert events[0].at_s == pytest.approx(quiet_s, abs=1e-5)
    assert schedule.end_s <= limit_s + 1e-5 < schedule.end_s + on_s + off_s + 2e-5
    for inject, heal in zip(events[::2], events[1::2], strict=True):
        assert (inject.fault_id, inject.nemesis, inject.variant) == (heal.fault_id, heal.nemesis, heal.variant)
        assert heal.at_s - inject.at_s == pytest.approx(on_s, abs=1e-5)
    assert all(a.at_s <= b.at_s for a, b in pairwise(events))


@given(st.integers(0, 2**32))
def test_every_variant_is_used_once_before_any_is_repeated(seed: int) -> None:
    schedule = periodic(CHOICES, random.Random(seed), time_limit_s=125.0)
    faults = [(event.nemesis, event.variant) for event in schedule if event.action == INJECT]
    assert len(faults) == 12
    for nemesis, variants in CHOICES:
        chosen = [variant for name, variant in faults if name == nemesis]
        assert len(chosen) == 6  # the two nemeses take turns
        whole = len(chosen) // len(variants) * len(variants)
        for start in range(0, whole, len(variants)):
            assert sorted(chosen[start : start + len(variants)]) == sorted(variants)


def test_different_seeds_give_different_orders() -> None:
    orders = {tuple(e.variant for e in periodic(CHOICES, random.Random(s), time_limit_s=60)) for s in range(20)}
    assert len(orders) > 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"time_limit_s": 9.9}, "5 s of quiet and 5 s of fault need 10 s"),
        ({"time_limit_s": 60, "on_s": 0}, "on_s must be above 0"),
        ({"time_limit_s": 60, "off_s": -1}, "off_s must be 0 or more"),
        ({"time_limit_s": 60, "quiet_start_s": float("nan")}, "quiet_start_s must be"),
        ({"time_limit_s": 1e9, "on_s": 0.01, "off_s": 0}, "at most 50000 faults"),
    ],
)
def test_periodic_refuses_invalid_times(arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        periodic(CHOICES, random.Random(0), **arguments)


def test_periodic_refuses_empty_choices() -> None:
    with pytest.raises(ScheduleError, match="no nemesis"):
        periodic([], random.Random(0), time_limit_s=60)
    with pytest.raises(ScheduleError, match="kill has no variant"):
        periodic([("kill", [])], random.Random(0), time_limit_s=60)


def test_a_schedule_round_trips_through_a_file(tmp_path: Path) -> None:
    schedule = periodic(CHOICES, random.Random(4), time_limit_s=100)
    path = str(tmp_path / "schedule.json")
    save_schedule(schedule, path)
    assert load_schedule(path, known={"partition": CHOICES[0][1], "kill": CHOICES[1][1]}) == schedule
    assert len(Path(path).read_text().splitlines()) == len(schedule)


def test_an_empty_schedule_round_trips_through_a_file(tmp_path: Path) -> None:
    save_schedule(Schedule(()), str(tmp_path / "s"))
    assert load_schedule(str(tmp_path / "s")).end_s == 0


def test_events_are_sorted_and_heals_inherit_nemesis_and_variant() -> None:
    schedule = Schedule.from_json([entry(9, HEAL), entry(3, INJECT)])
    assert [(event.at_s, event.action) for event in schedule] == [(3, INJECT), (9, HEAL)]
    assert schedule.events[1] == FaultEvent(at_s=9, action=HEAL, fault_id="f1", nemesis="partition", variant="halves")


def test_a_schedule_without_some_faults_keeps_the_others() -> None:
    schedule = periodic(CHOICES, random.Random(5), time_limit_s=45)
    kept = schedule.without(frozenset({"f1", "f3"}))
    assert {event.fault_id for event in kept} == {"f2", "f4"}
    assert all(event in schedule.events for event in kept)


def test_every_problem_is_listed() -> None:
    found = problems_of(
        [
            entry(-1, INJECT),
            entry(1, "break"),
            7,
            {"at_s": 1, "action": INJECT, "nemesis": 3, "variant": "x", "colour": "red"},
            entry(True, INJECT),
            entry(float("inf"), INJECT),
        ]
    )
    text = "\n".join(found)
    for expected in (
        "event 1: at_s must be a number of seconds, 0 or more, not -1",
        "event 2: action must be inject or heal, not 'break'",
        "event 3: an event must be an object, not int",
        "event 4: unknown field 'colour'",
        "event 4: id must be a name for the fault",
        "event 4: nemesis must be a name, not 3",
        "event 5: at_s must be",
        "event 6: at_s must be",
    ):
        assert expected in text


def test_injects_and_heals_must_pair_up() -> None:
    found = problems_of(
        [
            entry(1, HEAL, "f0"),
            entry(1, INJECT, "f1"),
            entry(2, INJECT, "f1"),
            entry(3, HEAL, "f1", nemesis="kill"),
            entry(4, HEAL, "f1"),
        ]
    )
    assert found == [
        "event 1: fault f0 is healed before it is injected",
        "event 3: fault f1 is injected twice; give it another id",
        "event 4: fault f1 was injected with nemesis partition, not kill",
        "event 5: fault f1 is healed twice",
    ]


def test_nemeses_and_variants_are_checked_against_the_known_ones() -> None:
    data = [entry(1, INJECT, variant="helves"), entry(2, INJECT, "f2", nemesis="fire")]
    found = problems_of(data, partition=["halves", "one"])
    assert found == [
        "event 1: partition has no variant 'helves'; it has: halves, one",
        "event 2: unknown nemesis 'fire'; known: partition",
    ]
    assert len(Schedule.from_json(data)) == 2


def test_only_the_first_50_problems_are_listed_and_the_rest_are_counted() -> None:
    found = problems_of([0] * 1000)
    assert len(found) == 51 and found[-1] == "and 950 more problems"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "is not JSON"), (b"{}", "a schedule must be a list"), (b"\xff\xfe", "is not JSON"), (b"[" * 99999, "JSON")],
)
def test_an_invalid_file_is_reported_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ScheduleError, match=reason) as caught:
        load_schedule(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="No such file"):
        load_schedule(str(tmp_path / "none.json"))


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=8)
    | st.lists(
        st.dictionaries(
            st.sampled_from(["at_s", "action", "id", "nemesis", "variant", "x"]),
            st.sampled_from([0, 1.5, -1, "inject", "heal", "f1", "f2", "partition", "halves", None, [], {}]),
        ),
        max_size=6,
    )
)
def test_any_json_is_a_schedule_or_a_list_of_problems(data: Any) -> None:
    try:
        schedule = Schedule.from_json(data)
    except ScheduleError as error:
        assert error.problems
    else:
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
