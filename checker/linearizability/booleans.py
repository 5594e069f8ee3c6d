"""Histories in which booleans and numbers must be distinguished, which Python does not (see ``checker.values``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from checker.history import History
from checker.linearizability.steps import is_ours
from checker.models.base import Model
from checker.values import NUMBERS, exact, holds_boolean, truth

__all__ = ["distinguished", "exact_model", "mixes_booleans"]


@runtime_checkable
class HasInitial(Protocol):
    """A model whose initial state is a value given by the user."""

    initial: Any


def mixes_booleans(history: History, model: Model) -> bool:
    """Whether a boolean occurs where it could be mistaken for a number.

    That excludes results of the model's ``answers`` if they are booleans and none of them is a number.  Inspects every
    value once, or none if the history is marked as free of booleans.
    """
    if isinstance(model, HasInitial) and holds_boolean([model.initial]):
        return True
    if history.booleans is False:
        return False
    if history.keyed and holds_boolean(history.key):
        return True
    return holds_boolean(history.value) or holds_boolean(_results(history, model))


def _results(history: History, model: Model) -> list[Any]:
    """All results except yes-or-no answers, unless there are numbers among the answers."""
    if not model.answers:
        return history.result
    answers: list[Any] = []
    others: list[Any] = []
    for f, result in zip(history.f, history.result, strict=True):
        (answers if f in model.answers else others).append(result)
    if any(isinstance(answer, NUMBERS) and truth(answer) is None for answer in answers):
        return history.result
    return others + [answer for answer in answers if truth(answer) is None]


def distinguished(history: History, model: Model) -> tuple[History, Model]:
    """The same history and model with exact values; for a model that is not ours, only with exact keys.

    The ``step`` of a user's model sees values as recorded; the search distinguishes them, and the states.
    """
    keys = list(map(exact, history.key)) if history.keyed else history.key
    if not is_ours(model):
        return replace(history, key=keys, booleans=True), model
    values, results = list(map(exact, history.value)), list(map(exact, history.result))
    return replace(history, key=keys, value=values, result=results, booleans=False), exact_model(model)


def exact_model(model: Model) -> Model:
    """The same built-in model with an exact initial value, if it has one."""
    if not isinstance(model, HasInitial):
        return model
    changed: Model = replace(model, initial=exact(model.initial))  # type: ignore[call-arg]
    return changed
