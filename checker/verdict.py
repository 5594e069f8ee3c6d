"""The result of a checker: a verdict, the smallest evidence for it, and how it was reached.

``unknown`` is the honest third answer: a budget of time or memory ran out, or the history holds too little for a
judgement.  Nothing in this package turns ``unknown`` into either of the other two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from checker.history import Operation, plain

__all__ = ["Edge", "Result", "Verdict", "Witness", "bounded", "worst"]


class Verdict(StrEnum):
    """Valid, invalid or unknown; also usable as the plain strings."""

    VALID = "valid"
    INVALID = "invalid"
    UNKNOWN = "unknown"

    @property
    def exit_status(self) -> int:
        """Process exit status of a command that ends in this verdict: 0 valid, 1 invalid, 2 unknown."""
        return _EXIT_STATUS[self]

    @property
    def as_json(self) -> bool | str:
        """``True``, ``False`` or ``"unknown"``: the form results files use."""
        return "unknown" if self is Verdict.UNKNOWN else self is Verdict.VALID


_EXIT_STATUS = {Verdict.VALID: 0, Verdict.INVALID: 1, Verdict.UNKNOWN: 2}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The combined verdict of several parts: invalid if any part is, else unknown if any is, else valid."""
    seen = set(verdicts)
    if Verdict.INVALID in seen:
        return Verdict.INVALID
    return Verdict.UNKNOWN if Verdict.UNKNOWN in seen else Verdict.VALID


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A reason why one operation of a witness must come before another.

    ``source`` and ``target`` are positions in ``Witness.operations``; ``kind`` is one of ``realtime``,
    ``process``, ``ww``, ``wr``, ``rw``, ``value``; ``reason`` is the sentence a reader needs.
    """

    source: int
    target: int
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """The operations that contradict each other, and why.

    ``minimal`` means that no sound reduction of the model removes another operation; if it is false, the
    witness is correct but may contain more than needed, and ``note`` says why.
    """

    operations: tuple[Operation, ...]
    text: str
    key: Any = None
    edges: tuple[Edge, ...] = ()
    minimal: bool = True
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {
            "text": self.text,
            "key": bounded(plain(self.key)),
            "minimal": self.minimal,
            "note": self.note,
            "operations": [
                {name: bounded(value) for name, value in operation.to_json().items()} for operation in self.operations
            ],
            "edges": [{"source": e.source, "target": e.target, "kind": e.kind, "reason": e.reason} for e in self.edges],
        }


#: Maximum characters of one value in a report, so that even the longest witness stays below a megabyte.
MAX_VALUE_CHARS = 1_000


def bounded(value: Any) -> Any:
    """``value``, or the beginning and end of its ``repr`` if that is longer than ``MAX_VALUE_CHARS``."""
    text = repr(value)
    if len(text) <= MAX_VALUE_CHARS:
        return value
    return f"{text[: MAX_VALUE_CHARS // 2]}...{text[-MAX_VALUE_CHARS // 3 :]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of one check.

    ``reason`` is one sentence or paragraph: for ``invalid`` what is contradictory, for ``unknown`` how far the
    check got and what ended it, for ``valid`` what was established.  ``stats`` holds plain JSON values: the engine
    that decided, why a faster one did not apply, counts, examples.
    """

    verdict: Verdict
    witness: Witness | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    def __bool__(self) -> bool:
        """True only for a valid history."""
        return self.verdict is Verdict.VALID

    @property
    def valid(self) -> bool | str:
        """``True``, ``False`` or ``"unknown"``."""
        return self.verdict.as_json

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form: ``valid``, ``reason``, ``stats``, ``witness``."""
        return {
            "valid": self.verdict.as_json,
            "reason": self.reason,
            "stats": plain(dict(self.stats)),
            "witness": None if self.witness is None else self.witness.to_json(),
        }
