"""Equality of JSON values."""

from __future__ import annotations

from typing import Any

__all__ = ["canonical", "same"]


def canonical(value: Any) -> tuple[Any, ...]:
    """A hashable form that two values share exactly when they are equal as JSON values.

    ``true`` is not ``1`` and ``"1"`` is neither; ``1`` and ``1.0`` are one number; ``null`` is a value of its own;
    the members of an object have no order.
    """
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, int | float):
        return ("number", value)
    if isinstance(value, str):
        return ("string", value)
    if isinstance(value, list | tuple):
        return ("array", *(canonical(item) for item in value))
    if isinstance(value, dict):
        return ("object", frozenset((canonical(name), canonical(item)) for name, item in value.items()))
    raise TypeError(f"{type(value).__name__} is no JSON value")


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON values."""
    return canonical(one) == canonical(other)
