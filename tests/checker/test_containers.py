"""Containers of values: the near-linear engines against the general one, and their explanations."""

from __future__ import annotations

import random

import pytest

from checker import FIFOQueue, History, Model, Operation, PriorityQueue, Stack, UnorderedQueue, Verdict, check
from checker.history import HistoryError
from checker.linearizability.budget import Budget
from checker.linearizability.engine import GENERAL, decide
from checker.linearizability.trees import Cover, MaxTree
from checker.testing import SAMPLED_MODELS, linearizable_by_force, random_history
from checker.testing.large import large_history

CONTAINERS = ("fifo-queue", "stack", "priority-queue", "unordered-queue")
#: Time limit of each engine; an undecided history is not compared.
TIMEOUT_S = 0.2


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_engines_agree_with_the_general_engine_on_longer_histories(name: str) -> None:
    model = SAMPLED_MODELS[name][0]
    rng = random.Random(11)
    seen: set[tuple[bool, Verdict]] = set()
    for number in range(150):
        history = random_history(
            name,
            rng,
            operations=rng.randrange(9, 36),
            processes=rng.randrange(2, 6),
            spread=0,
            crash=rng.choice([0, 0, 0.05]),
            lie=rng.choice([0, 0.05, 0.1]),
        )
        groups = history.rows_by_key()
        chosen = decide(history, groups, model, Budget(timeout_s=TIMEOUT_S))[0]
        general = decide(history, groups, model, Budget(timeout_s=TIMEOUT_S), general_only=True)[0]
        if Verdict.UNKNOWN not in (chosen.verdict, general.verdict):
            assert chosen.verdict is general.verdict, f"{name} {number}: {chosen.engine}"
            seen.add((chosen.engine == GENERAL, chosen.verdict))
    assert {(False, Verdict.VALID), (False, Verdict.INVALID)} <= seen


@pytest.mark.parametrize(("kind", "model"), [("stack", Stack()), ("priority-queue", PriorityQueue())])
def test_two_swapped_takes_are_explained_by_at_most_six_operations(kind: str, model: Model) -> None:
    rng = random.Random(1)
    found = 0
    for seed in range(8):
        history = large_history(kind, 3000, 5, seed=seed)
        assert check(history, model).verdict is Verdict.VALID
        put = {history.value[row]: row for row in range(3000) if history.value[row] is not None}
        takes = [row for row in range(3000) if row not in put.values() and history.result[row] in put]
        pairs = (rng.sample(takes, 2) for _ in range(1000))
        a, b = next(
            (a, b)
            for a, b in pairs
            if max(history.returned[put[history.result[row]]] for row in (a, b))
            < min(history.invoked[row] for row in (a, b))
        )
        history.result[a], history.result[b] = history.result[b], history.result[a]
        result = check(history, model)
        if result.verdict is Verdict.INVALID:
            found += 1
            assert result.witness is not None and len(result.witness.operations) <= 6
            alone = History.from_operations(result.witness.operations)
            assert not linearizable_by_force(alone, model)
    assert found


def test_a_take_of_unknown_outcome_may_have_emptied_a_container(events) -> None:
    put = [(0, "invoke", "enqueue", 1), (0, "ok", "enqueue", 1), (1, "invoke", "dequeue", None)]
    empty = [(2, "invoke", "dequeue", None), (2, "ok", "dequeue", None)]
    for model in (UnorderedQueue(), FIFOQueue(), Stack(), PriorityQueue()):
        assert check(events(*put, (1, "info", "dequeue", None), *empty), model).verdict is Verdict.VALID
        assert check(events(*put[:2], *empty, put[2]), model).verdict is Verdict.INVALID
    two = [(0, "invoke", "enqueue", 2), (0, "ok", "enqueue", 2)]
    result = check(events(*put, *two, *empty), UnorderedQueue())
    assert result.verdict is Verdict.INVALID and result.stats["engines"] == {"A7 bag coverage": 1}


def test_a_bag_tells_a_map_from_the_list_of_its_pairs(events) -> None:
    held, pairs = {"a": 1}, [["a", 1]]
    put = [(0, kind, "enqueue", value) for value in (held, pairs) for kind in ("invoke", "ok")]
    crashed = [(1, "invoke", "dequeue", None), (1, "info", "dequeue", None)]

    def taken(value: object) -> list[tuple]:
        return [(2, "invoke", "dequeue", None), (2, "ok", "dequeue", value)]

    for first in (held, pairs):
        assert check(events(*put, *crashed, *taken(first), *taken(None)), UnorderedQueue()).verdict is Verdict.VALID
    both = [*taken(held), *taken(pairs)]
    assert check(events(*put, *both, *taken(None)), UnorderedQueue()).verdict is Verdict.VALID
    assert check(events(*put, *both, *taken(pairs)), UnorderedQueue()).verdict is Verdict.INVALID


def test_a_crashed_take_accounts_for_only_one_of_two_equal_values(events) -> None:
    twice = [(0, "invoke", "enqueue", 1), (0, "ok", "enqueue", 1)] * 2
    crashed = [(1, "invoke", "dequeue", None), (1, "info", "dequeue", None)]
    empty = [(2, "invoke", "dequeue", None), (2, "ok", "dequeue", None)]
    again = [(3, "invoke", "dequeue", None), (3, "info", "dequeue", None)]
    assert check(events(*twice, *crashed, *empty), UnorderedQueue()).verdict is Verdict.INVALID
    assert check(events(*twice, *crashed, *again, *empty), UnorderedQueue()).verdict is Verdict.VALID


def test_trees_agree_with_plain_lists() -> None:
    rng = random.Random(3)
    for _ in range(60):
        size = rng.randrange(1, 40)
        numbers = [rng.randrange(20) for _ in range(size)]
        tree = MaxTree(numbers, least=-1)
        intervals = []
        for _ in range(rng.randrange(1, 12)):
            start = rng.randrange(size)
            intervals.append((start, rng.randrange(start, size) + 1))
        cover = Cover(size, intervals)
        bare: set[int] = set()
        while intervals:
            start, end = intervals.pop(rng.randrange(len(intervals)))
            stretches = cover.stretches(0, size)
            covered = {piece for first, last in stretches for piece in range(first, last)}
            naked = {p for p in range(size) if not any(a <= p < b for a, b in [*intervals, (start, end)])}
            assert set(range(size)) - covered == naked - bare
            bare |= naked
            cover.remove(start, end)
            index = rng.randrange(size)
            numbers[index] = rng.randrange(20)
            tree.set(index, numbers[index])
            low, high = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
            assert tree.value(tree.argmax(low, high)) == max(numbers[low:high], default=-1)


@pytest.mark.parametrize("model", [FIFOQueue(), Stack(), PriorityQueue(), UnorderedQueue()])
@pytest.mark.parametrize("status", ["ok", "info"])
def test_a_null_put_into_a_container_is_refused(model: Model, status: str) -> None:
    """A take of it would look like a take from an empty container."""
    put, take = ("push", "pop") if isinstance(model, Stack) else ("enqueue", "dequeue")
    history = History.from_operations(
        [
            Operation(process=0, f=put, value=None, status=status, invoked=0, returned=1 if status == "ok" else None),
            Operation(process=1, f=take, invoked=2, returned=3),
        ]
    )
    with pytest.raises(HistoryError, match="null was put in"):
        check(history, model)
