"""Histories that tell the checker from mutants that once survived all tests (``benchmarks/checker_mutants.py``)."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from checker import (
    ILLEGAL,
    UNKNOWN,
    CASRegister,
    Counter,
    FetchAndAdd,
    FIFOQueue,
    FormatError,
    History,
    KeyValue,
    Log,
    Model,
    MultiRegister,
    Register,
    Result,
    Topic,
    UnorderedQueue,
    Verdict,
    check,
    check_delay,
    check_exclusion,
    check_log,
    check_sessions,
)
from checker.cli import main
from checker.codecs import read
from checker.codecs.edn import _balanced
from checker.codecs.source import FileEvents
from checker.drawing import svg
from checker.explain import _Part, _sentence
from checker.linearizability import engine, general
from checker.linearizability.wing_gong import is_linearizable as is_linearizable_as_published
from checker.models.registry import parse_model
from checker.online import OnlineGrowOnlySet, OnlineLog, OnlineRegister, OnlineVersionedRegister
from checker.testing.definitions.objects import make_object
from checker.testing.definitions.orders import is_linearizable, pair
from checker.workers import map_in_processes

Event = dict[str, Any]


def made(*lines: tuple[Any, ...]) -> list[Event]:
    """Events from (process, type, f, value)."""
    return [{"process": process, "type": kind, "f": f, "value": value} for process, kind, f, value in lines]


def done(process: int, f: str, value: Any, result: Any) -> list[tuple[Any, ...]]:
    """An operation that nothing overlaps."""
    return [(process, "invoke", f, value), (process, "ok", f, result)]


def crashed(process: int, f: str, value: Any) -> list[tuple[Any, ...]]:
    """An operation that ended info."""
    return [(process, "invoke", f, value), (process, "info", f, value)]


THREE_CRASHED = [*crashed(0, "write", 1), *crashed(1, "cas", [1, 2]), *crashed(2, "cas", [2, 3])]


@pytest.mark.parametrize(
    ("model", "options", "lines", "valid"),
    [
        pytest.param(
            Register,
            {},
            [
                (0, "invoke", "write", 7),
                (1, "invoke", "read", None),
                (0, "ok", "write", 7),
                *crashed(2, "write", 5),
                (1, "ok", "read", 5),
                *done(0, "read", None, 7),
            ],
            False,
            id="a crashed write took effect after it was invoked, between a write and a read of its value",
        ),
        pytest.param(
            Register,
            {},
            [*done(0, "read", None, 5), *crashed(1, "write", 5)],
            False,
            id="a crashed write was invoked after its value had been read",
        ),
        pytest.param(
            CASRegister,
            {},
            [*THREE_CRASHED, *done(3, "read", None, 3)],
            True,
            id="what was read shows three crashed operations, one by the other",
        ),
        pytest.param(
            CASRegister,
            {},
            [*done(3, "read", None, 3), *THREE_CRASHED],
            False,
            id="three crashed operations that all began after what they would explain",
        ),
        pytest.param(
            FIFOQueue,
            {},
            [
                *done(0, "enqueue", 1, 1),
                *done(0, "enqueue", 2, 2),
                *done(0, "dequeue", None, 2),
                *crashed(1, "dequeue", None),
            ],
            False,
            id="a crashed dequeue began after the value before it had to be gone",
        ),
        pytest.param(
            FIFOQueue,
            {},
            [
                *done(0, "enqueue", 1, 1),
                *done(0, "enqueue", 2, 2),
                *crashed(1, "dequeue", None),
                *done(0, "dequeue", None, 2),
            ],
            True,
            id="a crashed dequeue began in time",
        ),
        pytest.param(
            Register, {"initial": 0, "none_is_any": True}, done(0, "read", None, None), True, id="null says nothing"
        ),
        pytest.param(
            Register, {"initial": 0, "none_is_any": False}, done(0, "read", None, None), False, id="null is a value"
        ),
        pytest.param(
            CASRegister, {"initial": 0, "none_is_any": True}, done(0, "read", None, None), True, id="null too"
        ),
        pytest.param(
            UnorderedQueue,
            {},
            [
                *done(0, "enqueue", 1, 1),
                (1, "invoke", "dequeue", None),
                (2, "invoke", "dequeue", None),
                (1, "ok", "dequeue", None),
            ],
            True,
            id="a crashed dequeue began right before another found nothing",
        ),
        pytest.param(
            UnorderedQueue,
            {},
            [
                *crashed(2, "dequeue", None),
                *done(0, "enqueue", 1, 1),
                *done(1, "dequeue", None, None),
                *done(1, "dequeue", None, 1),
            ],
            False,
            id="a crashed dequeue does not explain that nothing was found where somebody took the value later",
        ),
        pytest.param(
            MultiRegister,
            {},
            [
                *done(0, "txn", [["write", "x", 1]], [["write", "x", 1]]),
                *done(0, "txn", [["read", "x", None]], [["read", "y", 1]]),
            ],
            False,
            id="an answer for another register",
        ),
        pytest.param(Log, {}, done(0, "append", 5, [-1, 5]), False, id="an offset below the first"),
        pytest.param(
            KeyValue,
            {},
            [(0, "invoke", "append", "ab"), (1, "invoke", "put", "a"), *done(2, "get", None, "aab")],
            True,
            id="one state by either of two crashed operations or both, and only both explain what was read",
        ),
        pytest.param(
            CASRegister,
            {"initial": 5},
            [
                *crashed(0, "write", 1),
                *crashed(1, "write", 2),
                *crashed(2, "cas", [2, 1]),
                *crashed(3, "cas", [5, 1]),
                *done(4, "read", None, 1),
                *(line for _ in range(2) for line in (*done(4, "write", 0, 0), *done(4, "read", None, 1))),
            ],
            True,
            id="one state in three ways by crashed operations, and only the last leaves those that are needed later",
        ),
        pytest.param(
            CASRegister,
            {"initial": 5},
            [
                *crashed(0, "write", 1),
                *crashed(1, "write", 2),
                *crashed(2, "cas", [2, 1]),
                *crashed(3, "cas", [5, 1]),
                *done(4, "write", 0, 0),
                *done(4, "read", None, 1),
                *(line for _ in range(2) for line in (*done(4, "write", 0, 0), *done(4, "read", None, 1))),
            ],
            False,
            id="the same where the last way is closed",
        ),
    ],
)
def test_histories_that_mutants_got_wrong_have_their_expected_verdicts(
    model: type[Model], options: dict[str, Any], lines: list[tuple[Any, ...]], valid: bool
) -> None:
    events = made(*lines)
    assert is_linearizable(pair(events), make_object(model.name, options)) is valid
    assert check(events, model(**options)).verdict is (Verdict.VALID if valid else Verdict.INVALID)


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        ([*done(0, "read", None, [2, "b"]), (0, "invoke", "read", None), (0, "info", "read", [1, "a"])], []),
        ([(0, "invoke", "write", "b"), (0, "info", "write", 5), *done(0, "write", "c", 3)], []),
        ([*done(0, "write", "a", 2), *done(0, "write", "b", 2)], ["monotonic-writes"]),
        ([*done(0, "read", None, [2, "b"]), *done(0, "write", "c", 2)], ["writes-follow-reads"]),
        ([*done(0, "read", None, [2, "b"]), *done(0, "read", None, [2, "b"])], []),
        ([*done(0, "write", "b", 2), *done(0, "read", None, [2, "b"])], []),
    ],
    ids=[
        "a crashed read says nothing",
        "a crashed write says nothing",
        "two writes at one place",
        "a write at the place that was read",
        "a value read twice",
        "a value read back",
    ],
)
def test_sessions_that_mutants_got_wrong_have_their_expected_anomalies(
    lines: list[tuple[Any, ...]], kinds: list[str]
) -> None:
    counts = check_sessions(made(*lines)).stats["counts"]
    assert [kind for kind, count in counts.items() if count] == kinds


def read_text(path: Path, text: str) -> History:
    path.write_text(text, encoding="utf-8")
    return read(str(path))


def test_an_array_with_an_element_that_is_not_an_event_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"array\.json"):
        read_text(tmp_path / "array.json", '[{"type": "invoke", "f": "read", "value": null},\n5]')


def test_the_error_of_a_bad_event_in_an_array_names_its_line(tmp_path: Path) -> None:
    good = '{"process": 0, "type": "invoke", "f": "read", "value": null}'
    with pytest.raises(FormatError) as caught:
        read_text(tmp_path / "array.json", f"[\n{good},\n\n{good.replace('invoke', 'finish')}\n]")
    assert caught.value.line == 4


def test_the_reason_says_how_late_a_message_was() -> None:
    message = {"message": "m", "delay_ms": 100}
    events = made(
        (0, "invoke", "send", message), (0, "ok", "send", message), (1, "invoke", "receive", None),
        (1, "ok", "receive", ["m"]),
    )  # fmt: skip
    times_ms = (0, 1, 2, 5000)
    timed = [{**event, "time": at_ms * 1_000_000} for event, at_ms in zip(events, times_ms, strict=True)]
    assert "4899.0 ms late" in check_delay(timed).reason


def test_every_element_lies_within_its_drawing() -> None:
    events = made(*done(0, "write", 1, 1), *done(1, "write", 2, 2), *done(2, "read", None, 1))
    witness = check(events, Register()).witness
    assert witness is not None
    root = ElementTree.fromstring(svg(witness))
    height, width = float(root.attrib["height"]), float(root.attrib["width"])
    drawn = [each for each in root.iter() if each.tag.rpartition("}")[2] in ("rect", "line", "text")]
    assert drawn
    for each in drawn:
        place = {name: float(each.attrib[name]) for name in each.attrib if name in ("x", "x2", "y", "y1", "y2")}
        bottom = max(place.get("y", 0) + float(each.get("height", 0)), place.get("y2", 0))
        assert 0 <= bottom <= height
        assert 0 <= max(place.get("x", 0), place.get("x2", 0)) <= width


def test_the_text_of_a_witness_has_no_blank_at_either_end() -> None:
    events = made(*done(0, "write", 1, 1), *done(0, "cas", [1, 2], [1, 2]), *done(0, "read", None, 1))
    witness = check(events, CASRegister()).witness
    assert witness is not None
    assert witness.text == witness.text.strip()


def test_unique_ids_accepts_operations_of_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.jsonl"
    lines = [json.dumps(event) for event in made(*done(0, "mint", None, 7), *done(1, "mint", None, 8))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["--model", "unique-ids", str(path)]) == 0
    assert "2" in capsys.readouterr().out


def test_only_first_ends_the_check_at_the_first_invalid_key() -> None:
    good, bad = done(0, "write", 1, 1), done(0, "read", None, 9)
    events = [
        {**event, "key": key}
        for key, lines in (("a", good), ("b", bad), ("c", good), ("d", bad))
        for event in made(*lines)
    ]
    result = check(events, Register(), first=True)
    assert result.verdict is Verdict.INVALID
    assert result.stats["ended_at_first"]
    whole = check(events, Register())
    assert whole.verdict is Verdict.INVALID
    assert "ended_at_first" not in whole.stats
    assert "first violation" not in whole.reason


def test_a_witness_names_its_starting_state() -> None:
    witness = check(made(*done(0, "get", None, "y")), KeyValue()).witness
    assert witness is not None
    assert "starting from" in witness.text


def test_monotonic_reads_compares_with_the_newest_version_read() -> None:
    reads = [line for version in (10, 20, 15, 17) for line in done(0, "read", None, [version, "v"])]
    assert check_sessions(made(*reads)).stats["counts"]["monotonic-reads"] == 2


def test_fetch_and_add_without_an_amount_adds_one() -> None:
    lines = [*done(0, "add", None, 0), *done(0, "add", None, 1), *done(0, "read", None, 2)]
    assert check(made(*lines), FetchAndAdd()).verdict is Verdict.VALID


def test_a_witness_of_fetch_and_add_shows_the_wrong_answer() -> None:
    witness = check(made(*done(0, "read", None, 5)), FetchAndAdd()).witness
    assert witness is not None
    assert "read() -> 5" in witness.text
    witness = check(made(*done(0, "add", 2, 5)), FetchAndAdd()).witness
    assert witness is not None
    assert "add(2) -> 5" in witness.text


def test_options_of_a_model_are_split_at_commas_outside_quotes() -> None:
    assert parse_model("register:initial=0,none_is_any=false") == Register(initial=0, none_is_any=False)
    assert parse_model('register:initial="a,b",none_is_any=true') == Register(initial="a,b", none_is_any=True)


def test_an_online_write_needs_a_version_above_the_initial_one() -> None:
    online = OnlineVersionedRegister(initial=0, initial_version=3)
    invoked, answered = made(*done(0, "write", 7, 3))
    assert online.feed(invoked) is None
    sentence = online.feed(answered)
    assert sentence is not None and "version 3" in sentence


def first_alarm(online: Any, events: list[Event]) -> int | None:
    """The number of the first event, from 1, at which an online checker reports a violation."""
    return next((number for number, event in enumerate(events, 1) if online.feed(event) is not None), None)


def test_a_write_that_fails_after_it_was_read_is_reported_at_once() -> None:
    events = made((0, "invoke", "write", 7), *done(1, "read", None, 7), (0, "fail", "write", 7))
    assert first_alarm(OnlineRegister(), events) == 4
    assert first_alarm(OnlineRegister(), [event for event in events if event["process"] == 0]) is None


def test_messages_beyond_the_tail_are_reported_at_once() -> None:
    view = {"offset": 0, "messages": [5], "tail": 0}
    events = made((0, "invoke", "append", 5), *done(1, "read", {"offset": 0}, view))
    assert first_alarm(OnlineLog(), events) == 3


def test_a_tail_above_the_number_of_appends_is_reported_at_once() -> None:
    events = made((0, "invoke", "append", 5), *done(1, "tail", None, 1), *done(1, "tail", None, 2))
    assert first_alarm(OnlineLog(), events) == 5


def test_the_reason_counts_the_holds_of_a_lock() -> None:
    events = made(*done(0, "acquire", None, None), *done(0, "release", None, None), *done(1, "acquire", None, None))
    assert check_exclusion(events).reason.startswith("2 holds")


def test_a_log_without_acknowledged_appends_is_valid() -> None:
    assert check_log(made(*crashed(0, "append", 5))).verdict is Verdict.VALID
    assert check_log(made(*done(0, "append", 5, [0, 5]))).verdict is Verdict.UNKNOWN


def test_a_step_of_fetch_and_add_adds_one_or_the_amount() -> None:
    assert FetchAndAdd().step(3, "add", None, 3) == 4
    assert FetchAndAdd().step(3, "add", 2, 3) == 5


def test_offsets_and_tails_may_be_whole_floats() -> None:
    lines = [*done(0, "append", 5, [0.0, 5]), *done(0, "tail", None, 1.0), *done(1, "append", 6, [1.0, 6])]
    view = {"offset": 0.0, "messages": [5, 6], "tail": 2.0}
    assert check_log(made(*lines, *done(1, "read", {"offset": 0}, view))).verdict is Verdict.VALID


def test_a_value_that_is_not_an_event_is_refused_after_events_without_a_process() -> None:
    file = FileEvents("array.json")
    file.feed_alone([{"type": "invoke", "f": "txn", "value": []}], [1])
    with pytest.raises(FormatError):
        file.feed_alone([5], [2])


@pytest.mark.parametrize(
    ("text", "balanced"),
    [("{:a 1", False), ("{:a [1 2", False), ("{:a [1 2]}", True), ("#{1 2", False), ("#{1 (2)}", True), ("1}", False)],
)
def test_an_edn_form_is_balanced_once_every_bracket_is_closed(text: str, balanced: bool) -> None:
    assert _balanced(text) is balanced


def test_an_undecided_key_makes_the_verdict_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two writes of one value leave key b to the search, which ends before it begins; key a needs none.
    monkeypatch.setattr(engine, "_search_in_rounds", lambda *_, **__: None)
    keyed = {
        "a": [*done(0, "write", 1, 1), *done(0, "read", None, 1)],
        "b": [*done(0, "write", 1, 1), *done(0, "write", 2, 2), *done(0, "write", 1, 1), *done(0, "read", None, 1)],
    }
    events = [{**event, "key": key} for key, lines in keyed.items() for event in made(*lines)]
    for first in (False, True):
        result = check(events, Register(), first=first, timeout_s=0.1)
        assert result.verdict is Verdict.UNKNOWN


def keyed(key: str, lines: list[tuple[Any, ...]]) -> list[Event]:
    """Events of operations on one key."""
    return [{**event, "key": key} for event in made(*lines)]


def shown_by(result: Result) -> list[tuple[Any, ...]]:
    """What the operations of a witness did, in order of invocation."""
    assert result.witness is not None
    return [(operation.process, operation.f, operation.result) for operation in result.witness.operations]


def test_a_violation_found_by_a_worker_process_is_explained() -> None:
    lines = [*done(0, "write", 1, 1), *done(0, "write", 2, 2), *done(0, "write", 1, 1), *done(1, "read", None, 2)]
    result = check([*keyed("a", lines), *keyed("b", lines)], CASRegister(), jobs=2)
    assert result.verdict is Verdict.INVALID
    assert shown_by(result) == [(0, "write", 1), (1, "read", 2)]


def test_the_witness_of_a_wrong_counter_read_leaves_out_later_operations() -> None:
    later = [line for _ in range(4) for line in done(0, "increment", 1, 1)]
    result = check(made(*done(0, "increment", 1, 1), *done(1, "read", None, 5), *later), Counter())
    assert shown_by(result) == [(0, "increment", 1), (1, "read", 5)]


def test_counter_bounds_find_an_impossible_read_after_an_ambiguous_one() -> None:
    beside = [(0, "invoke", "add", 1), *done(1, "read", None, 1), (0, "ok", "add", 1)]
    result = check(made(*beside, *done(1, "read", None, 7)), Counter())
    assert result.verdict is Verdict.INVALID
    assert result.stats["engines"] == {"A7 counter bounds": 1}
    within = check(made(*beside, *done(1, "read", None, 1)), Counter())
    assert within.verdict is Verdict.VALID
    assert within.stats["engines"] == {engine.GENERAL: 1}


class _Row(int):
    """A row that counts how often rows are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Row.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_wording_an_explanation_takes_linear_time() -> None:
    size = 500
    lines = [*(line for _ in range(size) for line in done(0, "add", 1, 1)), *done(1, "read", None, 7)]
    history = History.from_events(made(*lines))
    _Row.compared = 0
    rows = [_Row(row) for row in range(size)]
    text = _sentence(history, Counter(), _Part((*rows, size)), size, rows)
    assert f"and {size - 6} more returned before it was invoked" in text
    assert _Row.compared <= 10 * size


def test_the_reason_does_not_list_values_already_taken_from_a_bag() -> None:
    lines = [*done(0, "enqueue", 7, 7), *done(0, "dequeue", None, 7), *done(0, "enqueue", 1, 1)]
    result = check(made(*lines, *done(1, "dequeue", None, None), *crashed(2, "dequeue", None)), UnorderedQueue())
    assert "at least one of these was inside: 1." in result.reason


def test_a_topic_with_more_messages_than_sends_is_invalid_without_a_search() -> None:
    lines = [
        *crashed(0, "send", "a"),
        *done(1, "tail", {"queue": 0}, [0, 1]),
        *done(1, "tail", {"queue": 1}, [1, 2]),
    ]
    result = check(made(*lines), Topic(queues=2))
    assert result.verdict is Verdict.INVALID
    assert set(result.stats["engines"]) == {"A5 ranks from offsets"}


def test_a_witness_shows_only_operations_of_the_invalid_key() -> None:
    # Key b's empty dequeue would be wrong beside key a's messages.
    events = [
        *keyed("a", [line for value in (1, 2, 3) for line in done(0, "enqueue", value, value)]),
        *keyed("b", done(7, "dequeue", None, None)),
        *keyed("a", [*crashed(1, "dequeue", None), *done(0, "dequeue", None, 3)]),
    ]
    result = check(events, FIFOQueue())
    assert result.witness is not None and result.witness.key == "a"
    assert {operation.key for operation in result.witness.operations} == {"a"}


def test_a_search_stops_at_its_limit_of_steps() -> None:
    lines = [(process, kind, "write", process % 2) for kind in ("invoke", "ok") for process in range(8)]
    history = History.of(made(*lines, *done(9, "read", None, 5)))
    search = general.Search(history, range(len(history)), CASRegister())
    assert search.run_until(3, math.inf) is None
    assert 0 < search.steps <= 4


def test_growing_states_reach_the_memory_limit_before_the_next_regular_check() -> None:
    # A thousand steps make a thousand strings, 500 MB in all; the next regular check is after 4,096 steps.
    text = "x" * 1_000
    lines = [line for _ in range(1_000) for line in done(0, "append", text, text)]
    history = History.of(made(*lines, *done(0, "get", None, text * 1_000)))
    result = check(history, KeyValue(), memory_mb=32)
    assert result.verdict is Verdict.UNKNOWN and "the memory limit of 32 MiB was reached" in result.reason
    assert check(history, KeyValue()).verdict is Verdict.VALID


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="only CPython can interrupt a step")
def test_the_time_limit_interrupts_a_step_that_would_not_end() -> None:
    # Every send makes four times as many topics possible: 40 of them more than any machine holds.
    lines = [line for value in range(40) for line in done(0, "send", value, None)]
    read = done(0, "read", {"queue": 0, "offset": 0}, {"queue": 0, "offset": 0, "messages": [0], "tail": 1})
    result = check(made(*lines, *read), Topic(), timeout_s=0.5)
    assert result.verdict is Verdict.UNKNOWN and "the time limit of 0.5 s was reached" in result.reason


@dataclass(frozen=True, kw_only=True)
class Dial(Model):
    """Turned by one or two of three positions; every turn fits every state, and leads elsewhere from each."""

    functions = frozenset({"turn", "look"})
    pure = frozenset({"look"})

    def start(self) -> int:
        return 0

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "turn":
            return (state + value) % 3
        return state if result is UNKNOWN or result == state else ILLEGAL


def turns(rng: random.Random) -> list[Event]:
    """Events of turns and looks at random, of which any number may be wrong."""
    lines: list[tuple[Any, ...]] = []
    begun: dict[int, tuple[str, Any]] = {}
    left = rng.randint(5, 9)
    while left or begun:
        process = rng.randrange(4)
        if process in begun:
            f, value = begun.pop(process)
            lines.append((process, "ok", f, rng.randrange(3) if f == "look" else value))
        elif left:
            left -= 1
            f = rng.choice(["turn", "turn", "look"])
            begun[process] = f, rng.randint(1, 2) if f == "turn" else None
            lines.append((process, "invoke", *begun[process]))
    return made(*lines)


def test_the_search_is_right_about_operations_that_fit_and_change_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ("NAIVE_PATIENCE_STEPS", "PATIENCE_STEPS", "BLIND_PATIENCE_STEPS", "EASE_STEPS"):
        monkeypatch.setattr(general, steps, 1)
    verdicts = []
    for seed in range(100):
        history = History.of(turns(random.Random(seed)))
        verdicts.append(is_linearizable_as_published(history, Dial()))
        search = general.Search(history, range(len(history)), Dial())
        assert search.run(100_000) is verdicts[-1], seed
    assert set(verdicts) == {True, False}


def test_the_edges_of_a_register_witness_are_true_of_its_operations() -> None:
    # Neither value can come first: a stale read, the usual form, does not fit, as the writes are concurrent.
    lines = [(0, "invoke", "write", 1), (1, "invoke", "write", 2), (0, "ok", "write", 1), (1, "ok", "write", 2)]
    result = check(made(*lines, *(line for seen in (1, 2, 1, 2) for line in done(2, "read", None, seen))), Register())
    assert result.witness is not None
    shown = result.witness.operations
    reasons = [(shown[edge.source], shown[edge.target]) for edge in result.witness.edges if edge.kind == "realtime"]
    assert len(reasons) == 2
    for before, after in reasons:
        assert before.returned is not None and before.returned < after.invoked
        assert {before.result, after.result} == {1, 2}


def test_a_stale_read_is_explained_by_the_register_engine() -> None:
    lines = [*done(0, "write", 1, 1), *done(0, "write", 2, 2), *done(1, "read", None, 1)]
    witness = check(made(*lines), Register()).witness
    assert witness is not None and "was stale" in witness.text
    assert [edge.kind for edge in witness.edges] == ["realtime", "value", "realtime"]


def test_a_stale_read_of_the_initial_value_is_explained_without_a_write_of_it() -> None:
    witness = check(made(*done(0, "write", 1, 1), *done(1, "read", None, None)), Register()).witness
    assert witness is not None and "was stale" in witness.text


def test_the_reason_of_an_impossible_tail_gives_the_number_it_implies() -> None:
    online = OnlineLog()
    said = [online.feed(event) for event in made((0, "invoke", "append", 5), *done(1, "tail", None, 2))]
    assert said[-1] is not None and "implies 2 messages, more than there can be" in said[-1]


def test_two_set_reads_that_each_lack_the_others_element_are_reported_at_once() -> None:
    added = [(process, kind, "add", process) for kind in ("invoke",) for process in (0, 1)]
    reads = [(2, "invoke", "read", None), (3, "invoke", "read", None), (2, "ok", "read", [0]), (3, "ok", "read", [1])]
    assert first_alarm(OnlineGrowOnlySet(), made(*added, *reads)) == 6


def die_once(folder: Path, number: int) -> int:
    """Returns the number; the first process that is asked kills itself instead."""
    if not any(folder.iterdir()):
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are killed with their parent only on Linux")
def test_a_retried_answer_that_is_the_awaited_one_ends_the_work(tmp_path: Path) -> None:
    answers = map_in_processes(partial(die_once, tmp_path), [4, 5, 6], 1, until=lambda answer: answer == 5)
    assert answers == [4, 5, None]


def test_no_steps_are_counted_without_a_search() -> None:
    assert check(made(*done(0, "write", 1, 1)), Register()).stats["steps"] == 0
