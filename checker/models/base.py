"""The base class of models, and the special values of a model's ``step``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["ILLEGAL", "UNKNOWN", "Model", "ModelError", "shortened"]


class ModelError(ValueError):
    """A model does not exist, was given a wrong field, or lacks an operation of the history."""


class _Sentinel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


#: Result of an operation that crashed: any result that the model allows will do.
UNKNOWN: Any = _Sentinel("UNKNOWN")
#: What ``step`` returns when the operation could not have had that result in that state.
ILLEGAL: Any = _Sentinel("ILLEGAL")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A deterministic sequential object.

    A subclass defines ``start`` and ``step``, and lists in ``pure`` the names of operations that never change the
    state (the engines drop those that crashed, and place the others as soon as they fit).  States must be hashable.
    """

    name: ClassVar[str] = "model"
    #: Names of the operations that this model knows; empty means any, and ``step`` decides.
    functions: ClassVar[frozenset[str]] = frozenset()
    #: Names of operations that never change the state.
    pure: ClassVar[frozenset[str]] = frozenset()
    #: States that are ``None`` or a boolean although ``start`` is not: a ``step`` that returns one not listed here is
    #: assumed to lack a ``return``, or to mean :data:`ILLEGAL`.
    unusual_states: ClassVar[tuple[Any, ...]] = ()
    #: Names of operations whose boolean result is about the operation itself, and never a value of the object.
    answers: ClassVar[frozenset[str]] = frozenset()

    def start(self) -> Hashable:
        """The state before the first operation."""
        return None

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        """The state after ``f(value)`` returned ``result`` in ``state``, or :data:`ILLEGAL`.

        ``result`` is :data:`UNKNOWN` for an operation that crashed.
        """
        raise TypeError(f"model {type(self).__name__} has no step")

    def is_pure(self, f: str, value: Any, result: Any) -> bool:
        """Whether this operation leaves every state in which it is legal unchanged."""
        return f in self.pure

    def outcomes(self, f: str, value: Any, operations: Sequence[tuple[str, Any, Any]]) -> Sequence[Any]:
        """The results that a crashed operation may have had, if they lead to different states.

        ``step`` gets one of them; by default :data:`UNKNOWN`, for operations whose effect does not depend on their
        result.  ``operations`` are all ``(f, value, result)`` of the history: only a value that was put can be taken.
        """
        return (UNKNOWN,)

    def specialised(self, operations: Sequence[tuple[str, Any, Any]]) -> Model:
        """A model that agrees with this one on any history of just these ``(f, value, result)``.

        It may merge states that none of the operations can distinguish, which keeps a search small.
        """
        return self

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable] | None:
        """States that represent all possible ones as far as these operations can tell them apart; ``None`` if too many.

        Used to explain a violation by the end of a history alone: a part that fits no starting state at all
        contradicts itself whatever came before.
        """
        return None

    def describe(self, f: str, value: Any, result: Any) -> str:
        """The operation in a few words, for explanations."""
        if result is UNKNOWN:
            return f"{f}({shortened(value)})" if value is not None else f"{f}()"
        if f in self.pure or value is None:
            return f"{f}() -> {shortened(result)}"
        return f"{f}({shortened(value)})"


def shortened(value: Any, limit: int = 60) -> str:
    """``repr``, cut in the middle beyond ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit // 2] + "..." + text[-limit // 3 :]
