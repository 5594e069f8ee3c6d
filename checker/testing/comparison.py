"""Compares the checker with the definitions on many histories, and minimises the histories they disagree on.

A disagreement is a verdict that differs, an error, a refusal of a history that makes sense, or a witness that is no
violation on its own.  ``unknown`` is no disagreement; it is counted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from checker import (
    HistoryError,
    ModelError,
    OnlineFetchAndAdd,
    OnlineGrowOnlySet,
    OnlineLog,
    OnlineRegister,
    OnlineVersionedRegister,
    Result,
    Verdict,
    Witness,
    check,
    check_log,
    check_sequential,
    check_transactions,
)
from checker.cli import UNLIMITED
from checker.models import MODELS
from checker.online import Online
from checker.testing.definitions.objects import OBJECTS
from checker.testing.definitions.orders import NEVER, Call, first_invalid_prefix, is_linearizable, is_sequential, pair
from checker.testing.definitions.properties import PROPERTIES
from checker.testing.definitions.property_samples import PROPERTY_OPTIONS, draw_property
from checker.testing.definitions.samples import OPTIONS, Sample, draw_sample
from checker.testing.definitions.transaction_samples import draw_transactions
from checker.testing.definitions.transactions import LEVELS, has_repeated_writes, is_possible, reads_of_nobody
from checker.testing.definitions.values import canonical, same

__all__ = ["PARTS", "Comparison", "Judgement", "Row", "compare", "minimised", "rows"]

TIMEOUT_S = 20.0
"""For one history: thousands of times what one takes, so that only an engine that never ends is cut off."""

MOST_SHOWN = 3
"""Histories shown of each kind of disagreement; more would add nothing new, and all are counted."""

Event = dict[str, Any]
Judge = Callable[[Sample], "Judgement"]


@dataclass(frozen=True)
class Judgement:
    """The two answers about one history; ``kind`` is that of the disagreement, empty if there is none."""

    truth: str
    answer: str
    kind: str = ""


@dataclass
class Comparison:
    """Counts over many histories; ``shown`` maps each kind of disagreement to minimised samples."""

    verdicts: Counter[str] = field(default_factory=Counter)
    undecided: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    shown: dict[str, list[tuple[Sample, Judgement]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table: histories of one object with one set of options, judged in one way.

    ``options`` are None if each history draws its own.
    """

    part: str
    name: str
    options: dict[str, Any] | None = None

    def __str__(self) -> str:
        answer = ",".join(f"{field}={json.dumps(value)}" for field, value in (self.options or {}).items())
        return f"{self.part} {self.name}{':' if answer else ''}{answer}"


def rows(parts: Sequence[str] = (), names: Sequence[str] = ()) -> list[Row]:
    """All rows of those parts and names; an empty sequence stands for all."""
    found = []
    for part in PARTS:
        for name, options in _subjects(part):
            if (not parts or part in parts) and (not names or name in names):
                found.append(Row(part, name, options))
    return found


def _subjects(part: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The names and options in a part."""
    if part == "transactions":
        yield from (("list-append", None), ("rw-register", None))
    elif part == "properties":
        yield from ((name, options) for name, choices in PROPERTY_OPTIONS.items() for options in choices)
    elif part == "online":
        yield from ((name, options) for name, (_, choices) in ONLINE.items() for options in choices)
    else:
        yield from ((name, options) for name in OBJECTS for options in OPTIONS.get(name, ({},)))


def compare(row: Row, *, histories: int, seed: int) -> Comparison:
    """Draw that many histories of the row from ``seed``, and judge each."""
    comparison = Comparison()
    judge = PARTS[row.part]
    for number in range(histories):
        sample = _drawn(row, random.Random(f"{row} {seed} {number}"))
        judgement = judge(sample)
        comparison.verdicts[judgement.truth] += 1
        comparison.undecided += judgement.answer == Verdict.UNKNOWN
        if judgement.kind:
            comparison.kinds[judgement.kind] += 1
            shown = comparison.shown.setdefault(judgement.kind, [])
            if len(shown) < MOST_SHOWN:
                small = minimised(sample, judge, judgement.kind)
                shown.append((small, judge(small)))
    return comparison


def _drawn(row: Row, rng: random.Random) -> Sample:
    if row.part == "transactions":
        return draw_transactions(row.name, rng)
    if row.part == "properties":
        return draw_property(row.name, rng, options=row.options)
    return draw_sample(row.name, rng, options=row.options)


def answer_of(checking: Callable[[], Result]) -> tuple[str, Result | None]:
    """The verdict in a word, or how the check ended without one."""
    try:
        result = checking()
    except (HistoryError, ModelError) as error:
        return f"refused ({error})", None
    except Exception as error:  # whatever it is, it is reported with the history
        return f"error ({type(error).__name__}: {error})", None
    return str(result.verdict), result


def _kind(truth: bool, answer: str) -> str:
    """The kind of the disagreement, without details that differ between histories."""
    if answer in (Verdict.UNKNOWN, Verdict.VALID if truth else Verdict.INVALID):
        return ""
    if answer.startswith("error"):
        return f"error {answer[7:].partition(':')[0]} where {_word(truth)}"
    return f"{answer.partition(' ')[0]} where {_word(truth)}"


def _word(truth: bool) -> str:
    return "valid" if truth else "invalid"


def _model_of(sample: Sample) -> Any:
    return MODELS[sample.name](**sample.options)


def calls_of_witness(witness: Witness, calls: Sequence[Call]) -> list[Call]:
    """The calls of the history that a witness consists of; those whose return the witness leaves out never return."""
    return [
        replace(calls[operation.index], returned=NEVER) if operation.returned is None else calls[operation.index]
        for operation in witness.operations
    ]


def judge_linearizable(sample: Sample) -> Judgement:
    """``check`` with the engine that it chooses, and its witness."""
    specification = sample.specification()
    calls = pair(sample.events)
    truth = is_linearizable(calls, specification)
    answer, result = answer_of(lambda: check(list(sample.events), _model_of(sample), timeout_s=TIMEOUT_S))
    kind = _kind(truth, answer)
    if not kind and result is not None and result.witness is not None:
        if is_linearizable(calls_of_witness(result.witness, calls), specification):
            kind = "witness that is valid by itself"
    elif not kind and answer == Verdict.INVALID:
        kind = "invalid without a witness"
    return Judgement(_word(truth), answer, kind)


@contextlib.contextmanager
def _general_engine_only() -> Iterator[None]:
    """Make ``check`` decide without its special engines."""
    facade = sys.modules["checker.linearizability.check"]
    chosen = vars(facade)["decide"]
    vars(facade)["decide"] = functools.partial(chosen, general_only=True)
    try:
        yield
    finally:
        vars(facade)["decide"] = chosen


def judge_general(sample: Sample) -> Judgement:
    """``check`` with the general engine alone."""
    truth = is_linearizable(pair(sample.events), sample.specification())
    with _general_engine_only():
        answer, _ = answer_of(
            lambda: check(list(sample.events), _model_of(sample), timeout_s=TIMEOUT_S, explained=False)
        )
    return Judgement(_word(truth), answer, _kind(truth, answer))


def judge_sequential(sample: Sample) -> Judgement:
    """``check_sequential``."""
    truth = is_sequential(pair(sample.events), sample.specification())
    answer, _ = answer_of(lambda: check_sequential(list(sample.events), _model_of(sample), timeout_s=TIMEOUT_S))
    return Judgement(_word(truth), answer, _kind(truth, answer))


def judge_transactions(sample: Sample) -> Judgement:
    """``check_transactions`` at every level, each in a check of its own."""
    calls = pair(sample.events)
    lists = sample.name == "list-append"
    if has_repeated_writes(calls):
        answer, _ = answer_of(lambda: check_transactions(list(sample.events), sample.name))
        kind = "" if answer == Verdict.UNKNOWN else f"{answer} where unclear"
        return Judgement("a value written twice", answer, kind)
    possible, disagreements = "nothing", [("", "")]
    answer = ""
    for level in (*LEVELS[:3], "causal", *LEVELS[3:]):
        strict = is_possible(calls, level, lists=lists)
        lenient = strict or is_possible(calls, level, lists=lists, strict=False)
        check_level = functools.partial(check_transactions, level=level, timeout_s=TIMEOUT_S)
        answer, _ = answer_of(functools.partial(check_level, list(sample.events), sample.name))
        possible = level if strict else possible
        if kind := _kind_at(level, strict, lenient, answer):
            suffix = ", reading what nobody wrote" if reads_of_nobody(calls) else ""
            disagreements.append((kind + suffix, answer))
    if possible == LEVELS[-1] and not lists:
        # An order of all transactions that respects real time gives one for each key.
        consistent = functools.partial(check_transactions, linearizable_keys=True, sequential_keys=True)
        answer_of_keys, _ = answer_of(lambda: consistent(list(sample.events), sample.name, timeout_s=TIMEOUT_S))
        if kind := _kind(True, answer_of_keys):
            disagreements.append((f"{possible}, keys consistent by themselves: {kind}", answer_of_keys))
    kind, answer_there = disagreements[-1]
    return Judgement(possible, answer_there or answer, kind)


def _kind_at(level: str, strict: bool, lenient: bool, answer: str) -> str:
    """The kind of the disagreement at a level; none if either verdict is right there."""
    if answer == Verdict.UNKNOWN or (strict != lenient and answer in (Verdict.VALID, Verdict.INVALID)):
        return ""
    kind = _kind(strict, answer)
    return f"{level}: {kind}" if kind else ""


ONLINE: dict[str, tuple[Callable[..., Online], tuple[dict[str, Any], ...]]] = {
    "register": (OnlineRegister, ({}, {"initial": 0})),
    "log": (OnlineLog, ({},)),
    "versioned-register": (OnlineVersionedRegister, ({}, {"initial": 0, "initial_version": 3})),
    "fetch-and-add": (OnlineFetchAndAdd, ({}, {"initial": 3})),
    "grow-only-set": (OnlineGrowOnlySet, ({},)),
}
"""The online checkers, each with the options that it is sampled with."""


def judge_online(sample: Sample) -> Judgement:
    """The online checker, fed event by event: never before the first invalid prefix; right there if it promises so."""
    first = first_invalid_prefix(sample.events, sample.specification())
    truth = _word(first is None)
    online = ONLINE[sample.name][0](**sample.options)
    for number, event in enumerate(sample.events, 1):
        try:
            sentence = online.feed(event)
        except Exception as error:  # whatever it is, it is reported with the history
            return Judgement(truth, f"{type(error).__name__}: {error}", f"error {type(error).__name__} where {truth}")
        if sentence is not None:
            answer = f"{sentence} (at event {number})"
            if first is None or number < first:
                return Judgement(truth, answer, "false alarm")
            return Judgement(truth, answer, "late" if number > first and _speaks_at_once(sample) else "")
    return Judgement(truth, "silent", "silent where invalid" if first is not None and _speaks_at_once(sample) else "")


def _speaks_at_once(sample: Sample) -> bool:
    """Whether the online checker promises to report such a history at its first invalid prefix."""
    asked = [event for event in sample.events if event["type"] == "invoke"]
    if sample.name == "fetch-and-add":
        return all(same(event["value"], 1) for event in asked if event["f"] != "read")
    initial = sample.options.get("initial")
    is_initial_written = any(same(event["value"], initial) for event in asked if event["f"] == "write")
    return sample.is_distinct and not is_initial_written and not _has_untold_places(sample)


def _has_untold_places(sample: Sample) -> bool:
    """Whether an append or write was answered without its offset or version, which counts as open online."""
    return any(
        event["type"] == "ok"
        and event["f"] in ("append", "write")
        and (event["value"] is None or (sample.name == "log" and event["value"][0] is None))
        for event in sample.events
        if sample.name in ("log", "versioned-register")
    )


CHECKERS: dict[str, Callable[..., Result]] = {**UNLIMITED, "log-losses": check_log}


def judge_property(sample: Sample) -> Judgement:
    """A checker other than linearizability; if its documentation leaves a case open, either verdict is right."""
    right = PROPERTIES[sample.name](sample.events, **sample.options)
    answer, _ = answer_of(lambda: CHECKERS[sample.name](list(sample.events), **sample.options))
    truth = " or ".join(sorted(right))
    return Judgement(truth, answer, "" if answer in right else f"{answer.partition(' ')[0]} where {truth}")


PARTS: dict[str, Judge] = {
    "linearizable": judge_linearizable,
    "general": judge_general,
    "sequential": judge_sequential,
    "online": judge_online,
    "transactions": judge_transactions,
    "properties": judge_property,
}
"""Ways to judge: ``check`` with the engines it chooses and with the general one alone, and the other checkers."""


def minimised(sample: Sample, judge: Judge, kind: str) -> Sample:
    """The sample without everything that the same kind of disagreement does not need."""
    events = sample.events
    while True:
        for smaller in _smaller(events):
            candidate = Sample(sample.name, sample.options, smaller, sample.is_distinct)
            if judge(candidate).kind == kind:
                events = smaller
                break
        else:
            return Sample(sample.name, sample.options, events, sample.is_distinct)


def _smaller(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events without one operation, one completion, all keys or all errors, or with one completion earlier."""
    completion_of: dict[int, int | None] = {}
    running: dict[Any, int] = {}
    for place, event in enumerate(events):
        process = canonical(event["process"])
        if event["type"] == "invoke":
            running[process] = place
            completion_of[place] = None
        else:
            completion_of[running.pop(process)] = place
    for begin, end in completion_of.items():
        without = [event for place, event in enumerate(events) if place not in (begin, end)]
        if without:
            yield without
    last_of: dict[Any, int] = {canonical(events[begin]["process"]): begin for begin in completion_of}
    for begin, end in completion_of.items():
        if end is not None and last_of[canonical(events[begin]["process"])] == begin:
            yield [event for place, event in enumerate(events) if place != end]
    for name in ("key", "error"):
        if any(name in event for event in events):
            yield [{field: value for field, value in event.items() if field != name} for event in events]
    for place in range(1, len(events)):
        earlier, later = events[place - 1], events[place]
        if (
            earlier["type"] == "invoke"
            and later["type"] != "invoke"
            and canonical(earlier["process"]) != canonical(later["process"])
        ):
            yield [*events[: place - 1], later, earlier, *events[place + 1 :]]
