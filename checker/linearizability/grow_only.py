"""Grow-only sets with reads of the whole set: the sets that were read form a chain, and each element was added where
the chain first shows it.

So operations have ranks (see ``ranks``), and a violation consists of one, two or three of them: a read of an element
that nobody had added; two reads, each of which lacks an element that the other shows; a read that lacks an element that
an earlier operation shows or adds.  Linear in the size of what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from checker.history import FAIL, NEVER, OK, History
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.ranks import rank_conflict
from checker.models.collections import GrowOnlySet, elements_shown
from checker.words import named_row, short

__all__ = ["check_grow_only_set"]


def check_grow_only_set(history: History, rows: Sequence[int], model: GrowOnlySet) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`GrowOnlySet`.

    Raises :class:`NotApplicable` if an element is added twice.
    """
    adds: dict[Any, int] = {}
    reads: list[tuple[frozenset[Any], int]] = []
    count = 0
    for row in rows:
        f, status = history.f[row], history.status[row]
        if status == FAIL:
            continue
        if f == "add":
            count += 1
            adds[history.value[row]] = row
        elif status == OK:
            reads.append((frozenset(elements_shown(history.result[row])), row))
    if len(adds) != count:
        raise NotApplicable("an element is added twice")
    reads.sort(key=lambda read: len(read[0]))
    return _Chain(history, adds, model).violation(reads)


class _Chain:
    """Operations by rank: 2n for reads that show the n-th set of the chain, 2n - 1 for additions of elements that this
    set shows first."""

    def __init__(self, history: History, adds: dict[Any, int], model: GrowOnlySet) -> None:
        self._history = history
        self._adds = adds
        self._model = model
        self._last_invoke: dict[int, int] = {}
        self._first_return: dict[int, int] = {}
        #: The n-th set of the chain, and a read of it.
        self._shown: list[tuple[frozenset[Any], int]] = [(frozenset(), -1)]

    def violation(self, reads: Sequence[tuple[frozenset[Any], int]]) -> Violation | None:
        for elements, row in reads:
            last, last_row = self._shown[-1]
            if not last <= elements:
                return self._apart(last_row, last - elements, row, elements - last)
            if len(elements) > len(last):
                self._shown.append((elements, row))
                for element in elements - last:
                    if element not in self._adds:
                        text = f"{self._named(row)} shows {short(element)}, which nobody had added."
                        return Violation(rows=(row,), text=text)
                    self._place(2 * len(self._shown) - 3, self._adds[element])
            self._place(2 * len(self._shown) - 2, row)
        largest = self._shown[-1][0]
        for element, row in self._adds.items():
            if element not in largest and self._history.returned[row] != NEVER:
                self._place(2 * len(self._shown) - 1, row)
        conflict = rank_conflict(self._first_return, self._last_invoke)
        return None if conflict is None else self._out_of_order(*conflict)

    def _place(self, rank: int, row: int) -> None:
        invoked, returned = self._history.invoked[row], self._history.returned[row]
        self._last_invoke[rank] = max(self._last_invoke.get(rank, -1), invoked)
        self._first_return[rank] = min(self._first_return.get(rank, NEVER), returned)

    def _out_of_order(self, low: int, high: int) -> Violation:
        """The violation: an operation of rank ``high`` returned before one of the lower rank ``low`` was invoked."""
        history = self._history
        early = history.returned.index(self._first_return[high])
        late = history.invoked.index(self._last_invoke[low])
        before = f"{self._named(early)} returned before {self._named(late)} was invoked"
        # The set that lacks what `high` shows or adds, and that shows what `low` adds.
        smaller, smaller_row = self._shown[(low + 1) // 2]
        rows = {early, late}
        if high % 2:
            element = history.value[early]
            if low % 2:
                rows.add(smaller_row)
                text = f"{before}, but {self._named(smaller_row)} shows {short(history.value[late])} without it."
            else:
                text = f"{before}, which lacks {short(element)}."
        elif low % 2:
            text = f"{before}, and shows {short(history.value[late])} already."
        else:
            lacking = self._shown[high // 2][0] - smaller
            text = f"{before}, which lacks {_one_of(lacking)}, which the former shows."
        return Violation(rows=tuple(sorted(rows)), text=text)

    def _apart(self, one: int, only_one: Iterable[Any], other: int, only_other: Iterable[Any]) -> Violation:
        """The violation: two reads, each of which shows an element that the other lacks."""
        text = (
            f"{self._named(one)} shows {_one_of(only_one)} and lacks {_one_of(only_other)}; {self._named(other)} shows "
            "the latter and lacks the former."
        )
        return Violation(rows=tuple(sorted((one, other))), text=text)

    def _named(self, row: int) -> str:
        return named_row(self._history, row, self._model)


def _one_of(elements: Iterable[Any]) -> str:
    """One element, the same in every process."""
    return min(map(short, elements), key=lambda text: (len(text), text))
