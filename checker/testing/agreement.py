"""One history judged by the oracle, by the engine that ``check`` chooses, and by the general one."""

from __future__ import annotations

import random

from checker.history import History
from checker.linearizability.budget import Budget
from checker.linearizability.check import check
from checker.linearizability.engine import decide
from checker.models.base import Model
from checker.testing.oracle import linearizable_by_force
from checker.testing.samples import random_history
from checker.verdict import Verdict

__all__ = ["draw_history", "judge"]


def draw_history(name: str, rng: random.Random) -> History:
    """A small random history of the model called ``name``: two to eight operations, with crashes and lies."""
    return random_history(
        name,
        rng,
        operations=rng.randrange(2, 9),
        processes=rng.randrange(1, 5),
        spread=rng.choice([0, 0, 2, 3]),
        crash=rng.choice([0, 0.1, 0.4]),
        lie=rng.choice([0, 0.2, 0.5]),
    )


def judge(history: History, model: Model, label: str) -> tuple[bool, str | None]:
    """Whether a small history is linearizable, and the engine that decided it, ``None`` if the verdict was unknown.

    Raises AssertionError, which begins with ``label``, if engines and oracle disagree, or if the witness of an
    invalid history is valid on its own.
    """
    truth = linearizable_by_force(history, model)
    result = check(history, model)
    decided: str | None = None
    if result.verdict is not Verdict.UNKNOWN:
        if (result.verdict is Verdict.VALID) != truth:
            raise AssertionError(f"{label}: {result.reason}")
        decided = next(iter(result.stats["engines"]), "nothing to decide")
    if result.witness is not None:
        alone = History.from_operations(result.witness.operations)
        if linearizable_by_force(alone, model):
            raise AssertionError(f"{label}: the witness alone is valid")
    for outcome in decide(history, history.rows_by_key(), model, Budget(), general_only=True):
        if outcome.verdict is not Verdict.UNKNOWN and (outcome.verdict is Verdict.VALID) != truth:
            raise AssertionError(f"{label}: general engine")
    return truth, decided
