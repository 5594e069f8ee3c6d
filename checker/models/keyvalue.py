"""A string per key, with append."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker.models.base import ILLEGAL, UNKNOWN, Model

__all__ = ["KeyValue"]

#: Stands for all strings that no read of the history can still see: they all behave in the same way.
_DEAD = "\0unobservable"


@dataclass(frozen=True, kw_only=True)
class KeyValue(Model):
    """One key's string: ``put(s)`` replaces it, ``append(s)`` extends it, ``get() -> string``.

    Operations of different keys are distinguished by the key of the history, so a state is one string.
    """

    initial: str = ""

    name: ClassVar[str] = "key-value"
    functions: ClassVar[frozenset[str]] = frozenset({"put", "append", "get"})
    pure: ClassVar[frozenset[str]] = frozenset({"get"})

    def start(self) -> Hashable:
        return self.initial

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "get":
            return state if _may_show(result, state) else ILLEGAL
        return value if f == "put" else state + value

    def specialised(self, operations: Sequence[tuple[str, Any, Any]]) -> Model:
        return _Observed(initial=self.initial, reads=tuple(sorted(_strings_read(operations))))

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable]:
        reads = _strings_read(operations)
        states: set[str] = set(reads)
        for token in {value for f, value, _ in operations if f == "append"}:
            for read in reads:
                at = read.find(token)
                while at >= 0:
                    states.add(read[:at])
                    at = read.find(token, at + 1)
        return [*sorted(states), _DEAD]


def _may_show(result: Any, state: str) -> bool:
    """Whether a read of this string can have had this result; ``None`` means an empty string."""
    return result is UNKNOWN or result == state or (result is None and not state)


def _strings_read(operations: Sequence[tuple[str, Any, Any]]) -> set[str]:
    """Every string that some read shows; a read cannot show anything but a string."""
    shown = ("" if result is None else result for f, _, result in operations if f == "get")
    return {result for result in shown if isinstance(result, str)}


@dataclass(frozen=True, kw_only=True)
class _Observed(KeyValue):
    """As `KeyValue`, with every string that is not a prefix of a read string merged into one dead state."""

    reads: tuple[str, ...] = ()

    def start(self) -> Hashable:
        return self._merged(self.initial)

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "get":
            # As in _may_show, without a call: half of all steps of a search are reads.
            return state if result == state or result is UNKNOWN or (result is None and not state) else ILLEGAL
        if f == "put":
            return self._merged(value)
        return _DEAD if state is _DEAD else self._merged(state + value)

    def _merged(self, text: str) -> str:
        at = bisect_left(self.reads, text)
        return text if at < len(self.reads) and self.reads[at].startswith(text) else _DEAD

    def specialised(self, operations: Sequence[tuple[str, Any, Any]]) -> Model:
        return self
