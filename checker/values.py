"""Values compared as in JSON: ``true`` is not ``1``, ``1`` is ``1.0``, a list is not a map.

In Python, ``True == 1`` and both have the same hash, so dictionaries and sets do not distinguish them.  :func:`exact`
converts a value into a hashable one that equals another exactly if their JSON values are equal; :data:`TRUE` and
:data:`FALSE` stand for the booleans.  That costs time for every value, so :func:`holds_boolean` tells first whether
there is any boolean at all: without one, Python's equality is JSON's.
"""

from __future__ import annotations

import decimal
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

__all__ = [
    "FALSE", "MAX_DECIMAL_PLACES", "NUMBERS", "TRUE", "ExactDecimal", "FrozenMap", "exact", "holds_boolean", "number",
    "truth",
]  # fmt: skip


#: Below this, every whole number has an exact float.
_EXACT_FLOATS = 1 << 53

#: Characters shown of a value that is refused.
_SHOWN_CHARS = 80


class _Truth:
    """A boolean that equals only itself."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name.capitalize()

    def __bool__(self) -> bool:
        return self is TRUE

    def __reduce__(self) -> str:
        return self._name


TRUE: Any = _Truth("TRUE")
FALSE: Any = _Truth("FALSE")


#: Maximum decimal places of an :class:`ExactDecimal`, before as well as after its point.
MAX_DECIMAL_PLACES = 1_000
#: Whole numbers that are added to these may have any number of digits.
_EXACT = decimal.Context(prec=decimal.MAX_PREC, traps=[decimal.Inexact, decimal.InvalidOperation])


class ExactDecimal(decimal.Decimal):
    """A decimal fraction (Clojure's ``0.1M``), whose sums are exact; combined with a float it yields a float, as in
    Clojure."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        if isinstance(other, float):
            return float(self) + other
        return ExactDecimal(_EXACT.add(self, other)) if isinstance(other, (int, decimal.Decimal)) else NotImplemented

    __radd__ = __add__

    def __neg__(self) -> ExactDecimal:
        return ExactDecimal(self.copy_negate())

    def __abs__(self) -> ExactDecimal:
        return ExactDecimal(self.copy_abs())

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, (int, float, decimal.Decimal)) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return float(self) * other if isinstance(other, float) else super().__mul__(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return float(self) / other if isinstance(other, float) else super().__truediv__(other)

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> Any:
        return ExactDecimal, (str(self),)


#: The classes of numbers in histories.
NUMBERS = (int, float, ExactDecimal)


class FrozenMap(dict[Any, Any]):
    """A hashable map; it must not be changed once it is built."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def exact(value: Any) -> Any:
    """A hashable value that equals ``exact(other)`` if and only if JSON's ``value`` equals ``other``.

    Whole numbers become ints, lists tuples, sets frozensets, maps :class:`FrozenMap`; :data:`TRUE` and :data:`FALSE`
    stand for booleans.
    """
    kind = value.__class__
    if kind is int or kind is str or value is None:
        return value
    if kind is bool:
        return TRUE if value else FALSE
    if isinstance(value, (list, tuple)):
        return tuple(map(exact, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(exact, value))
    if isinstance(value, Mapping):
        pairs = [(exact(name), exact(held)) for name, held in value.items()]
        return FrozenMap(sorted(pairs, key=lambda pair: repr(pair[0])))
    if kind is float and value.is_integer() and abs(value) < _EXACT_FLOATS:
        return int(value)
    return value


def truth(value: Any) -> bool | None:
    """The boolean that ``value`` is, exact or not; ``None`` for anything else."""
    if value is True or value is TRUE:
        return True
    if value is False or value is FALSE:
        return False
    return None


def number(value: Any) -> Any:
    """``value``, checked to be a number.  Raises TypeError for anything else, including a boolean."""
    if truth(value) is not None:
        raise TypeError(f"{str(truth(value)).lower()} is not a number")
    if not isinstance(value, NUMBERS):
        raise TypeError(f"{repr(value)[:_SHOWN_CHARS]} is not a number")
    return value


def holds_boolean(values: Iterable[Any]) -> bool:
    """Whether there is a boolean among these values, or nested anywhere inside them."""
    level = values if isinstance(values, list) else list(values)
    while level:
        kinds = set(map(type, level))
        if bool in kinds:
            return True
        inner: list[Any] = []
        for kind in kinds:
            if issubclass(kind, Mapping):
                maps = [value for value in level if value.__class__ is kind]
                inner.extend(chain.from_iterable(maps))
                inner.extend(chain.from_iterable(held.values() for held in maps))
            elif issubclass(kind, (list, tuple, set, frozenset)):
                inner.extend(chain.from_iterable(value for value in level if value.__class__ is kind))
        level = inner
    return False
