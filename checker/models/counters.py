"""Counters."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from checker.models.base import ILLEGAL, UNKNOWN, Model

__all__ = ["Counter", "FetchAndAdd"]


@dataclass(frozen=True, kw_only=True)
class Counter(Model):
    """``add(n)``, ``increment`` and ``decrement`` (by one if no value is given), ``read() -> sum``."""

    initial: int = 0

    name: ClassVar[str] = "counter"
    functions: ClassVar[frozenset[str]] = frozenset({"add", "increment", "decrement", "read"})
    pure: ClassVar[frozenset[str]] = frozenset({"read"})

    def start(self) -> Hashable:
        return self.initial

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "read":
            return state if result is UNKNOWN or result == state else ILLEGAL
        amount = 1 if value is None else value
        return state - amount if f == "decrement" else state + amount


@dataclass(frozen=True, kw_only=True)
class FetchAndAdd(Model):
    """``add(n) -> the sum before it``, ``read() -> sum``."""

    initial: int = 0

    name: ClassVar[str] = "fetch-and-add"
    functions: ClassVar[frozenset[str]] = frozenset({"add", "fetch-and-add", "read"})
    pure: ClassVar[frozenset[str]] = frozenset({"read"})

    def start(self) -> Hashable:
        return self.initial

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if result is not UNKNOWN and result != state:
            return ILLEGAL
        return state if f == "read" else state + (1 if value is None else value)

    def describe(self, f: str, value: Any, result: Any) -> str:
        if f == "read" or result is UNKNOWN:
            return super().describe(f, value, result)
        return f"{f}({1 if value is None else value!r}) -> {result!r}"
