"""The published search is the specification: on histories too long for brute force the engines agree with it."""

from __future__ import annotations

import random

import pytest

from checker import History, Verdict, check
from checker.linearizability.budget import Budget
from checker.linearizability.engine import decide
from checker.linearizability.wing_gong import is_linearizable
from checker.testing import SAMPLED_MODELS, random_history
from checker.testing.oracle import linearizable_by_force


@pytest.mark.parametrize("name", SAMPLED_MODELS)
def test_engines_agree_with_the_published_search(name: str) -> None:
    rng = random.Random(31)
    verdicts = []
    model = SAMPLED_MODELS[name][0]
    for _ in range(40):
        history = random_history(
            name, rng, operations=rng.randrange(8, 17), processes=3, spread=rng.choice([0, 3]), crash=0.08, lie=0.08
        )
        truth = is_linearizable(_hashable(history), model)
        verdicts.append(truth)
        assert check(history, model).valid is truth, list(history)
        for outcome in decide(history, history.rows_by_key(), model, Budget(), general_only=True):
            assert outcome.verdict is (Verdict.VALID if truth else Verdict.INVALID), list(history)
    assert len(set(verdicts)) == 2


def _hashable(history: History) -> History:
    history.result = [tuple(result) if isinstance(result, list) else result for result in history.result]
    return history


@pytest.mark.parametrize("name", ["cas-register", "unordered-queue", "log"])
def test_the_published_search_agrees_with_brute_force(name: str) -> None:
    rng = random.Random(32)
    model = SAMPLED_MODELS[name][0]
    verdicts = []
    for _ in range(150):
        history = _hashable(random_history(name, rng, operations=6, crash=0.3, lie=0.4, spread=rng.choice([0, 3])))
        truth = linearizable_by_force(history, model)
        verdicts.append(truth)
        assert is_linearizable(history, model) is truth, list(history)
    assert len(set(verdicts)) == 2
