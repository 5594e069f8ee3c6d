"""The search for an order of events that a model explains, compared with brute force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checker.models.base import ModelError
from checker.testing.trace_oracle import explained_by_force
from checker.trace import Event, Trace, TraceModel, check_traces
from checker.verdict import Verdict


class Lock(TraceModel):
    """A lock with a lease: whoever holds it may lose it at any time, and nobody logs that."""

    name = "lock"

    def __init__(self, *, has_lease: bool = False) -> None:
        self._has_lease = has_lease

    def init(self, nodes: Sequence[str]) -> Iterable[str]:
        return [""]

    def next(self, state: str, event: Event) -> Iterable[str]:
        if event.name == "acquire":
            return [event.node] if not state else []
        return [""] if state == event.node else []

    def hidden(self, state: str) -> Iterable[str]:
        return [""] if self._has_lease and state else []

    def why(self, state: str, event: Event) -> str:
        return f"{event.node} cannot {event.name}: {state or 'nobody'} holds the lock"


class Odd(TraceModel):
    """Any machine: what an event does to a state is drawn at random."""

    name = "odd"

    def __init__(self, steps: dict[tuple[int, str], list[int]], hidden: dict[int, list[int]]) -> None:
        self._steps, self._hidden = steps, hidden

    def init(self, nodes: Sequence[str]) -> Iterable[int]:
        return [0, 1]

    def next(self, state: int, event: Event) -> Iterable[int]:
        return self._steps.get((state, event.name), [])

    def hidden(self, state: int) -> Iterable[int]:
        return self._hidden.get(state, [])


class Counted(TraceModel):
    """Messages that are sent and received; events only add to what is known, so they commute."""

    name = "counted"

    def init(self, nodes: Sequence[str]) -> Iterable[frozenset[str]]:
        return [frozenset()]

    def next(self, state: frozenset[str], event: Event) -> Iterable[frozenset[str]]:
        if event.name == "send":
            return [state | {event["what"]}]
        return [state] if event["what"] in state else []

    def commutes(self, event: Event) -> bool:
        return True


def traces_of(*words: str, times: Sequence[Sequence[float]] | None = None) -> list[Trace]:
    """A trace for each text, whose words are events."""
    found = []
    for number, text in enumerate(words):
        node = f"n{number + 1}"
        events = [
            Event(node, word, line=line, time=None if times is None else times[number][line - 1])
            for line, word in enumerate(text.split(), 1)
        ]
        found.append(Trace(node, events))
    return found


def test_events_of_two_replicas_are_put_into_an_order_that_the_model_allows() -> None:
    result = check_traces(Lock(), traces_of("acquire release acquire release", "acquire release"))
    assert result.verdict is Verdict.VALID
    assert result.stats["explained"] == result.stats["events"] == 6


def test_an_event_that_no_order_explains_is_named_with_the_state_before_it() -> None:
    result = check_traces(Lock(), traces_of("acquire release acquire", "acquire release acquire"))
    assert result.verdict is Verdict.INVALID
    assert result.stats["explained"] == 5
    (stuck,) = result.stats["then_impossible"]
    assert stuck["line"] == 3 and "holds the lock" in stuck["why"] and stuck["why"] in result.reason
    assert result.stats["explained_last"][-1]["event"] == "acquire"


def test_a_step_that_nobody_logs_may_explain_what_follows() -> None:
    traces = traces_of("acquire", "acquire")
    assert check_traces(Lock(), traces).verdict is Verdict.INVALID
    assert check_traces(Lock(has_lease=True), traces).verdict is Verdict.VALID


def test_times_are_tried_first_and_never_believed() -> None:
    wrong = [[5.0, 6.0], [1.0, 7.0]]
    result = check_traces(Lock(), traces_of("acquire release", "acquire release", times=wrong))
    assert result.verdict is Verdict.VALID


def test_a_message_is_received_after_it_was_sent() -> None:
    sent = Event("n1", "acquire", ident="m1", line=1)
    received = Event("n2", "acquire", after=("m1",), line=1)
    done = Event("n2", "release", line=2)
    traces = [Trace("n1", [sent, Event("n1", "release", line=2)]), Trace("n2", [received, done])]
    assert check_traces(Lock(), traces).verdict is Verdict.VALID
    back = Event("n1", "acquire", ident="m1", after=("m2",), line=1)
    circle = [Trace("n1", [back]), Trace("n2", [Event("n2", "acquire", ident="m2", after=("m1",), line=1)])]
    result = check_traces(Lock(has_lease=True), circle)
    assert result.verdict is Verdict.INVALID and "it came after n2, line 1" in result.reason


@pytest.mark.parametrize("words", [("acquire release", "acquire release"), ("acquire", "acquire")])
def test_an_incomplete_trace_is_unknown_whatever_is_found(words: tuple[str, str]) -> None:
    first, second = traces_of(*words)
    result = check_traces(Lock(), [first, Trace("n2", second.events, "line 3 is missing")])
    assert result.verdict is Verdict.UNKNOWN and "n2: line 3 is missing" in result.reason


def test_a_message_that_nobody_sent_makes_the_traces_incomplete() -> None:
    result = check_traces(Lock(), [Trace("n1", [Event("n1", "acquire", after=("m9",), line=1)])])
    assert result.verdict is Verdict.UNKNOWN and "'m9'" in result.reason


def test_no_events_are_no_proof() -> None:
    assert check_traces(Lock(), [Trace("n1", [])]).verdict is Verdict.UNKNOWN


def test_too_many_states_are_unknown() -> None:
    words = ["acquire release " * 3 + "release"] + ["acquire release " * 3] * 3
    assert check_traces(Lock(), traces_of(*words)).verdict is Verdict.INVALID
    result = check_traces(Lock(), traces_of(*words), max_states=20)
    assert result.verdict is Verdict.UNKNOWN and "20 states" in result.reason


def test_time_is_limited() -> None:
    class Endless(Lock):
        def hidden(self, state: Any) -> Iterable[Any]:
            return [f"{state}x"]

    result = check_traces(Endless(), traces_of("release"), timeout_s=0.0, max_states=10**9)
    assert result.verdict is Verdict.UNKNOWN and "time limit" in result.reason


def test_a_state_that_is_no_value_is_the_models_fault() -> None:
    class Listed(Lock):
        def init(self, nodes: Sequence[str]) -> Iterable[Any]:
            return [[]]

        def next(self, state: Any, event: Event) -> Iterable[Any]:
            return [[*state, event.name], [*state, event.node]]

    with pytest.raises(ModelError, match="not hashable"):
        check_traces(Listed(), traces_of("acquire release"))


@pytest.mark.parametrize("method", ["init", "next", "hidden"])
@pytest.mark.parametrize("found", [None, "n1", ("n1", 3)])
def test_a_single_state_in_place_of_a_list_is_the_models_fault(method: str, found: Any) -> None:
    model = Lock()
    setattr(model, method, lambda *_: found)
    with pytest.raises(ModelError, match=f"model lock: {method} returned .*, not a list of states"):
        check_traces(model, traces_of("acquire"))
    setattr(model, method, lambda *_: iter([""]))
    assert check_traces(model, traces_of("acquire")).verdict is Verdict.VALID


def test_events_that_commute_are_judged_in_one_pass() -> None:
    node = [Event("n1", "send", {"what": str(number)}, line=number) for number in range(200)]
    other = [Event("n2", "receive", {"what": str(number)}, line=number) for number in range(200)]
    third = [Event("n3", "receive", {"what": "199"}, line=number) for number in range(200)]
    traces = [Trace("n3", third), Trace("n2", other), Trace("n1", node)]
    result = check_traces(Counted(), traces, max_states=0)
    assert result.verdict is Verdict.VALID and result.stats["states"] == 0


def test_an_event_that_can_never_happen_is_named_first() -> None:
    class Knows(Lock):
        def never(self, state: str, event: Event) -> bool:
            return event.name == "explode"

    result = check_traces(Knows(), traces_of("acquire", "acquire", "explode"))
    assert result.verdict is Verdict.INVALID and "n3, line 1" in result.reason
    assert "nor can any other" not in result.reason


def test_of_events_that_wait_for_each_other_the_earliest_is_named_first() -> None:
    words = traces_of("release", "release", times=[[5.0], [1.0]])
    assert check_traces(Lock(), words).reason.startswith("n2 cannot release")
    later = traces_of("release", "release", times=[[5.0], [9.0]])
    assert check_traces(Lock(), later).reason.startswith("n1 cannot release")


small = st.lists(st.lists(st.sampled_from("abc"), max_size=4), min_size=1, max_size=3)
states = st.lists(st.integers(0, 3), max_size=2)
steps = st.dictionaries(st.tuples(st.integers(0, 3), st.sampled_from("abc")), states, min_size=4)
times = st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=3, max_size=3)


@settings(max_examples=300, deadline=None)
@given(small, steps, st.dictionaries(st.integers(0, 3), states, max_size=3), times)
def test_the_search_and_brute_force_agree(
    words: list[list[str]],
    steps: dict[tuple[int, str], list[int]],
    hidden: dict[int, list[int]],
    times: list[list[float]],
) -> None:
    traces = traces_of(*map(" ".join, words), times=times)
    if not any(words):
        return
    model = Odd(steps, hidden)
    result = check_traces(model, traces)
    assert (result.verdict is Verdict.VALID) == explained_by_force(model, traces)
    assert result.verdict is not Verdict.UNKNOWN
    is_whole = result.stats["explained"] == result.stats["events"]
    assert is_whole == (result.verdict is Verdict.VALID)


messages = st.lists(
    st.lists(st.tuples(st.sampled_from(["send", "receive"]), st.sampled_from("xyz")), max_size=4),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(messages)
def test_taking_what_commutes_at_once_changes_no_verdict(words: list[list[tuple[str, str]]]) -> None:
    traces = [
        Trace(f"n{of}", [Event(f"n{of}", name, {"what": what}, line=at) for at, (name, what) in enumerate(each)])
        for of, each in enumerate(words)
    ]
    if any(words):
        assert check_traces(Counted(), traces).valid is explained_by_force(Counted(), traces)
