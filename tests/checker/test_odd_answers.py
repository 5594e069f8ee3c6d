"""Answers that are slightly wrong, and values that look alike, as no real object and few tests produce them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from checker import (
    Counter,
    FetchAndAdd,
    GrowOnlySet,
    History,
    Model,
    Operation,
    Set,
    Topic,
    Verdict,
    check,
    check_counter,
    check_set,
    check_set_full,
)
from checker.history import freeze
from checker.testing import SAMPLED_MODELS, linearizable_by_force, random_history

HISTORIES = 300
CONTAINERS = ("fifo-queue", "stack", "unordered-queue")


def nudged(answer: Any, rng: random.Random) -> Any:
    """An answer with one of its numbers a little smaller or larger."""
    if answer is None:
        return rng.choice([None, -1, 0, 1])
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer + rng.choice([-5, -2, -1, 1, 2])
    if isinstance(answer, list) and answer:
        at = rng.randrange(len(answer))
        return [*answer[:at], nudged(answer[at], rng), *answer[at + 1 :]]
    if isinstance(answer, dict):
        name = rng.choice(sorted(answer))
        return {**answer, name: nudged(answer[name], rng)}
    return answer


def odd_history(name: str, rng: random.Random) -> History:
    history = random_history(
        name, rng, operations=rng.randrange(2, 8), processes=rng.randrange(1, 5), spread=rng.choice([0, 0, 2, 3]),
        crash=rng.choice([0, 0.1, 0.4]), lie=rng.choice([0, 0.2, 0.5]),
    )  # fmt: skip
    row = rng.randrange(len(history))
    results = [*history.result[:row], nudged(history.result[row], rng), *history.result[row + 1 :]]
    history = replace(history, result=results)
    late = rng.randrange(len(history))
    operations = [
        replace(operation, returned=operation.returned + 2) if index == late and operation.returned else operation
        for index, operation in enumerate(history)
    ]
    return History.from_operations(operations)


@pytest.mark.parametrize("name", SAMPLED_MODELS)
def test_engines_agree_with_brute_force_on_slightly_wrong_answers(name: str) -> None:
    rng = random.Random(5)
    model = SAMPLED_MODELS[name][0]
    verdicts = set()
    for number in range(HISTORIES):
        history = odd_history(name, rng)
        truth = linearizable_by_force(history, model)
        result = check(history, model)
        verdicts.add(result.verdict)
        if result.verdict is not Verdict.UNKNOWN:
            assert (result.verdict is Verdict.VALID) == truth, f"{name} {number}: {result.reason}"
        if result.witness is not None:
            alone = History.from_operations(result.witness.operations)
            assert not linearizable_by_force(alone, model), f"{name} {number}: the witness alone is valid"
    assert verdicts >= {Verdict.VALID, Verdict.INVALID}


def sent(value: int, begun: int, queue: int = 0, offset: int = 0, *, crashed: bool = False) -> Operation:
    if crashed:
        return Operation(process=value, f="send", value=value, status="info", invoked=begun)
    return Operation(process=value, f="send", value=value, result=[queue, offset], invoked=begun, returned=begun + 1)


@pytest.mark.parametrize(("crashed", "begun", "truth"), [(1, 0, False), (2, 0, True), (2, 50, False)])
def test_a_send_of_unknown_outcome_fills_one_offset_of_one_queue(crashed: int, begun: int, truth: bool) -> None:
    """Both queues miss their first message; `begun` is when the last crashed send was invoked."""
    history = History.from_operations(
        [
            *(sent(number, begun if number == crashed else 0, crashed=True) for number in range(1, crashed + 1)),
            sent(8, 10, 0, 1),
            sent(9, 20, 1, 1),
        ]
    )
    model = Topic(queues=2)
    assert linearizable_by_force(history, model) is truth
    assert check(history, model).verdict is (Verdict.VALID if truth else Verdict.INVALID)


@pytest.mark.parametrize("seed", range(3))
def test_topics_with_unread_offsets_agree_with_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    model = Topic(queues=2)
    verdicts = []
    for _ in range(200):
        ends = [0, 0]
        operations = []
        for number in range(rng.randrange(2, 7)):
            begun = rng.randrange(12)
            if rng.random() < 0.4:
                operations.append(sent(number, begun, crashed=True))
                continue
            queue = rng.randrange(2)
            ends[queue] += rng.choice([0, 0, 1, 1, 2])
            ends[queue] += 1
            operations.append(sent(number, begun + 2 * number, queue, ends[queue] - 1))
        history = History.from_operations(operations)
        truth = linearizable_by_force(history, model)
        verdicts.append(truth)
        assert check(history, model).verdict is (Verdict.VALID if truth else Verdict.INVALID), operations
    assert 10 < verdicts.count(True) < 190


@pytest.mark.parametrize("seed", range(3))
def test_topics_with_reads_without_a_tail_agree_with_brute_force(seed: int) -> None:
    """A read that is answered with as many messages as it asked for may have a null tail, or none."""
    rng = random.Random(seed)
    model = Topic(queues=2)
    verdicts = []
    for _ in range(200):
        held: list[list[int]] = [[], []]
        operations = []
        for number in range(rng.randrange(2, 7)):
            begun, queue = 10 * number - rng.randrange(12), rng.randrange(2)
            if rng.random() < 0.5:
                is_crashed = rng.random() < 0.4
                if not is_crashed or rng.random() < 0.6:
                    held[queue].append(number)
                offset = len(held[queue]) - 1
                operations.append(
                    sent(number, begun, crashed=True) if is_crashed else sent(number, begun + 5, queue, offset)
                )
                continue
            shown = list(held[queue])
            if shown and rng.random() < 0.3:
                shown.pop(rng.randrange(len(shown)))
            answer = {"queue": queue, "offset": 0, "messages": shown, "tail": rng.choice([None, None, len(shown)])}
            if answer["tail"] is None and rng.random() < 0.5:
                del answer["tail"]
            asked = {"queue": queue, "offset": 0}
            times = {"invoked": begun + 5, "returned": begun + 8}
            operations.append(Operation(process=number, f="read", value=asked, result=answer, **times))
        history = History.from_operations(operations)
        truth = linearizable_by_force(history, model)
        verdicts.append(truth)
        assert check(history, model).verdict is (Verdict.VALID if truth else Verdict.INVALID), operations
    assert 10 < verdicts.count(True) < 195


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_mixed_values_agree_with_brute_force(name: str) -> None:
    rng = random.Random(7)
    model = SAMPLED_MODELS[name][0]
    values = [-1, 0, -7, "", "a", (1, 2), 3.5, 1 << 70, [1], {"a": 1}]
    for _ in range(200):
        history = random_history(name, rng, operations=7, processes=3, crash=0.2, lie=0.2, spread=rng.choice([0, 3]))
        chosen = {number: rng.choice(values) for number in range(1, 8)}
        asked, told = ([chosen.get(value, value) for value in column] for column in (history.value, history.result))
        history = replace(history, value=asked, result=told)
        frozen = replace(history, value=list(map(freeze, asked)), result=list(map(freeze, told)))
        truth = linearizable_by_force(frozen, model)
        assert check(history, model).verdict is (Verdict.VALID if truth else Verdict.INVALID)


FLOATS = [0.1, 0.2, -0.3, 0.7, 1e300, -1e300, 1]


@pytest.mark.parametrize("model", [Counter(), Counter(initial=0.7), FetchAndAdd(), FetchAndAdd(initial=1e300)])
def test_counters_of_floats_agree_with_brute_force(model: Any) -> None:
    """Their sum depends on the order of the additions, and a small amount may leave it as it is."""
    rng = random.Random(7)
    verdicts = set()
    for _ in range(100):
        total, operations = model.initial, []
        for at in range(5):
            amount = rng.choice(FLOATS)
            answer = total if isinstance(model, FetchAndAdd) else None
            total += amount
            operations += [("add", amount, answer), ("read", None, rng.choice([total] * 9 + [total + 1]))][: 1 + at % 2]
        history = History.from_operations(
            Operation(process=at, f=f, value=value, result=result, invoked=2 * at, returned=2 * at + 1 + at % 3)
            for at, (f, value, result) in enumerate(operations)
        )
        truth = linearizable_by_force(history, model)
        verdicts.add(truth)
        assert check(history, model).valid is truth
    assert verdicts == {True, False}


def test_a_counter_of_floats_is_summed_in_the_order_of_its_additions() -> None:
    """Positive and negative amounts, summed apart, round differently than the counter did."""
    steps = [("add", 0.1), ("add", -0.3), ("add", 0.2), ("read", None)]
    history = History.from_operations(
        Operation(process=0, f=f, value=value, result=0.1 - 0.3 + 0.2, invoked=2 * at, returned=2 * at + 1)
        for at, (f, value) in enumerate(steps)
    )
    assert linearizable_by_force(history, Counter())
    assert check(history, Counter()).verdict is Verdict.VALID


@pytest.mark.parametrize(("off", "valid"), [(0.0, True), (1e-9, False), (-1e-9, False)])
def test_counter_bounds_of_floats_allow_for_rounding_and_no_more(off: float, valid: bool) -> None:
    steps = [("add", 0.1), ("add", -0.3), ("increment", None), ("add", 0.2), ("read", None)]
    history = History.from_operations(
        Operation(process=0, f=f, value=value, result=0.1 - 0.3 + 1 + 0.2 + off, invoked=2 * at, returned=2 * at + 1)
        for at, (f, value) in enumerate(steps)
    )
    assert check_counter(history).valid is valid
    whole = [replace(one, value=None if one.value is None else round(10 * one.value), result=1) for one in history]
    assert check_counter(History.from_operations(whole)).valid is True


@pytest.mark.parametrize("answer", ["1", "", {"1": 2}, 1])
@pytest.mark.parametrize("of", [Set(), GrowOnlySet(), check_set, check_set_full])
def test_a_read_of_a_set_that_is_not_a_list_is_refused(of: Any, answer: Any) -> None:
    """The characters of a string and the keys of a map are not elements."""
    history = History.from_operations(
        [
            Operation(process=0, f="add", value="1", result=True, invoked=0, returned=1),
            Operation(process=0, f="read", value=None, result=answer, invoked=2, returned=3),
        ]
    )
    with pytest.raises(ValueError, match="a read of a set must show a list, not"):
        check(history, of) if isinstance(of, Model) else of(history)
