"""Registers and the lock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from checker.models.base import FAILED, ILLEGAL, UNKNOWN, Model, shortened

__all__ = ["CASRegister", "MultiRegister", "Mutex", "Register", "VersionedRegister"]


class _Other:
    """A register value that no operation of the history mentions."""

    def __repr__(self) -> str:
        return "some other value"


_OTHER = _Other()


@dataclass(frozen=True, kw_only=True)
class Register(Model):
    """``write(v)``, ``read() -> v``; holds ``initial`` at first.

    ``none_is_any`` says that a read of ``None`` carries no value and fits any state, which is Knossos' convention.  By
    default it holds exactly when ``initial`` is not ``None``: where ``None`` is the first value, it means "empty".
    """

    initial: Hashable = None
    none_is_any: bool | None = None

    name: ClassVar[str] = "register"
    functions: ClassVar[frozenset[str]] = frozenset({"read", "write"})
    pure: ClassVar[frozenset[str]] = frozenset({"read"})

    def start(self) -> Hashable:
        return self.initial

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "write":
            return value
        return state if result == state or self._says_nothing(result) else ILLEGAL

    def reads_of_none_count(self) -> bool:
        """Whether a read of ``None`` says that the register held ``None``."""
        return self.initial is None if self.none_is_any is None else not self.none_is_any

    def _says_nothing(self, result: Any) -> bool:
        return result is UNKNOWN or (result is None and not self.reads_of_none_count())

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable]:
        return [*{result for f, _, result in operations if f == "read"}, _OTHER]


@dataclass(frozen=True, kw_only=True)
class CASRegister(Register):
    """A register with ``cas([old, new])``, which fails, and is recorded as ``fail``, when it does not hold ``old``.

    With ``failed_cas_asserts`` a failed ``cas`` with no recorded error says that the register did not hold ``old``; one
    with an error (a refused connection, say) merely did not happen.  Like ``none_is_any`` it follows from ``initial``
    unless given: Knossos, whose histories start from a number, takes every failure as "did not happen".
    """

    failed_cas_asserts: bool | None = None

    name: ClassVar[str] = "cas-register"
    functions: ClassVar[frozenset[str]] = frozenset({"read", "write", "cas"})

    def failures_that_assert(self) -> frozenset[str]:
        asserts = self.initial is None if self.failed_cas_asserts is None else self.failed_cas_asserts
        return frozenset({"cas"}) if asserts else frozenset()

    def is_pure(self, f: str, value: Any, result: Any) -> bool:
        return f == "read" or result is FAILED or (f == "cas" and value[0] == value[1])

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "write":
            return value
        if f == "cas":
            old, new = value
            if result is FAILED:
                return ILLEGAL if state == old else state
            return new if state == old else ILLEGAL
        return state if result == state or self._says_nothing(result) else ILLEGAL

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable]:
        observed = {result for f, _, result in operations if f == "read"}
        observed.update(value[0] for f, value, _ in operations if f == "cas")
        return [*observed, _OTHER]


@dataclass(frozen=True, kw_only=True)
class MultiRegister(Model):
    """Several registers read and written together, atomically, by small transactions.

    ``f`` is ``txn``, its value a list of ``[read, k, v]`` and ``[write, k, v]``, applied in order; the completion
    carries the values read.  ``initial`` maps names to first values (``None`` where it has no entry).
    """

    initial: Mapping[Any, Hashable] = field(default_factory=dict)

    name: ClassVar[str] = "multi-register"
    functions: ClassVar[frozenset[str]] = frozenset({"txn", "read", "write"})

    def start(self) -> Hashable:
        return frozenset(self.initial.items())

    def is_pure(self, f: str, value: Any, result: Any) -> bool:
        return all(_kind(step) == "read" for step in value)

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        registers = dict(state)
        known = result is not UNKNOWN and result is not None
        if known and len(result) != len(value):
            return ILLEGAL
        for at, (kind, k, v) in enumerate(value):
            if kind in ("write", "w"):
                registers[k] = v
            elif known and (result[at][1] != k or registers.get(k) != result[at][2]):
                return ILLEGAL
        return frozenset(registers.items())

    def describe(self, f: str, value: Any, result: Any) -> str:
        steps = value if result is UNKNOWN or result is None else result
        more = f", and {len(steps) - 6} more" if len(steps) > 6 else ""
        return ", ".join(f"{_kind(step)} {shortened(step[1])}={shortened(step[2])}" for step in steps[:6]) + more


def _kind(step: Sequence[Any]) -> str:
    return {"r": "read", "w": "write"}.get(step[0], str(step[0]))


@dataclass(frozen=True, kw_only=True)
class VersionedRegister(Model):
    """A register whose every write gets the next version: ``write(v) -> version``, ``read() -> [version, v]``.

    Versions count up by one from ``initial_version``, which belongs to ``initial``.
    """

    initial: Hashable = None
    initial_version: int = 0

    name: ClassVar[str] = "versioned-register"
    functions: ClassVar[frozenset[str]] = frozenset({"read", "write"})
    pure: ClassVar[frozenset[str]] = frozenset({"read"})

    def start(self) -> Hashable:
        return (self.initial_version, self.initial)

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "write":
            version = state[0] + 1
            return (version, value) if result is UNKNOWN or result == version else ILLEGAL
        return state if result is UNKNOWN or tuple(result) == state else ILLEGAL


@dataclass(frozen=True, kw_only=True)
class Mutex(Model):
    """``acquire()`` succeeds when the lock is free, ``release()`` when it is held; nobody asks by whom."""

    held: bool = False

    name: ClassVar[str] = "mutex"
    functions: ClassVar[frozenset[str]] = frozenset({"acquire", "release"})

    def start(self) -> Hashable:
        return self.held

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "acquire":
            return ILLEGAL if state else True
        return False if state else ILLEGAL

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable]:
        return [False, True]

    def describe(self, f: str, value: Any, result: Any) -> str:
        return f
