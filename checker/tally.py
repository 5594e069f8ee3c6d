"""Counts of anomalies by kind, with a few examples of each: shared by the checkers other than linearizability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checker.history import History, Operation
from checker.verdict import Result, Verdict, Witness
from checker.words import short

__all__ = ["MAX_EXAMPLES", "Events", "Tally"]

#: What every checker takes: a history, its events, or its operations.
Events = History | Iterable[Mapping[str, Any]] | Iterable[Operation]

#: Examples kept of each kind; counts are exact.
MAX_EXAMPLES = 5


class Tally:
    """Counts, examples and the verdict that follows from them.

    ``wrong`` names the kinds that make a history invalid, gravest first; ``noted`` those that are only counted.  Each
    key is judged on its own, unless the property ``spans_keys``.
    """

    def __init__(
        self,
        name: str,
        history: History,
        *,
        wrong: Sequence[str],
        noted: Sequence[str] = (),
        spans_keys: bool = False,
    ) -> None:
        self.name = name
        self.history = history
        self.counts = dict.fromkeys((*wrong, *noted), 0)
        self.examples: dict[str, list[str]] = {}
        self.extra: dict[str, Any] = {}
        self._wrong = tuple(wrong)
        self._noted = tuple(noted)
        self._spans_keys = spans_keys
        self._first: dict[str, tuple[tuple[int, ...], str]] = {}

    def wants(self, kind: str) -> bool:
        """Whether another example of this kind would be kept; the text of a large read is built only then."""
        return len(self.examples.get(kind, ())) < MAX_EXAMPLES

    def add(self, kind: str, rows: Sequence[int], text: str) -> None:
        """Count one of ``kind``, shown by ``rows``; their key is prepended to the text."""
        self.counts[kind] += 1
        if (key := self._key_of(rows)) is not None:
            text = f"Key {short(key)}: {text}"
        examples = self.examples.setdefault(kind, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(text)
            self._first.setdefault(kind, (tuple(rows), text))

    def _key_of(self, rows: Sequence[int]) -> Any:
        return self.history.key[rows[0]] if rows and not self._spans_keys else None

    def result(self, *, fine: str, unknown: str | None = None) -> Result:
        """Invalid if anything wrong was counted; else unknown for the reason given; else valid."""
        stats = {
            "model": self.name,
            "operations": len(self.history),
            "engines": {self.name: 1},
            "counts": self.counts,
            "noted": list(self._noted),  # the kinds among those counts that are allowed
            "examples": self.examples,
            **self.extra,
        }
        for kind in self._wrong:
            if self.counts[kind]:
                rows, text = self._first[kind]
                found = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
                witness = Witness(operations=self.history.operations(rows), text=text, key=self._key_of(rows))
                return Result(
                    verdict=Verdict.INVALID, witness=witness, stats=stats, reason=f"{text}. (In all: {found}.)"
                )
        if unknown is not None:
            return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=unknown)
        return Result(verdict=Verdict.VALID, stats=stats, reason=fine)
