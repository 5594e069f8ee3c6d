"""Registers and the lock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from checker.models.base import ILLEGAL, UNKNOWN, Model, shortened
from checker.values import FALSE

__all__ = ["CASRegister", "MultiRegister", "Mutex", "Register", "VersionedRegister", "is_refused"]


class _Other:
    """A register value that no operation of the history mentions."""

    def __repr__(self) -> str:
        return "some other value"


_OTHER = _Other()


@dataclass(frozen=True, kw_only=True)
class Register(Model):
    """``write(v)``, ``read() -> v``; holds ``initial`` at first.

    ``none_is_any``: a read of ``None`` carries no value and fits any state, which is Knossos' convention.  By default
    that is so exactly if ``initial`` is not ``None``: if ``None`` is the initial value, it means "empty".
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
        """Whether a read of ``None`` means that the register held ``None``."""
        return self.initial is None if self.none_is_any is None else not self.none_is_any

    def _says_nothing(self, result: Any) -> bool:
        return result is UNKNOWN or (result is None and not self.reads_of_none_count())

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable]:
        return [*{result for f, _, result in operations if f == "read"}, _OTHER]


@dataclass(frozen=True, kw_only=True)
class CASRegister(Register):
    """A register with ``cas([old, new])``, which returns ``False`` when the register does not hold ``old``.

    Such an operation completed (``ok``) and made a comparison; any other result means that ``new`` was written.  An
    operation that failed (``fail``) did not happen, and tells nothing about the state.
    """

    name: ClassVar[str] = "cas-register"
    functions: ClassVar[frozenset[str]] = frozenset({"read", "write", "cas"})

    answers: ClassVar[frozenset[str]] = frozenset({"cas"})

    def is_pure(self, f: str, value: Any, result: Any) -> bool:
        return f == "read" or (f == "cas" and (result is False or result is FALSE or value[0] == value[1]))

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "write":
            return value
        if f == "cas":
            old, new = value
            if result is False or result is FALSE:
                return ILLEGAL if state == old else state
            return new if state == old else ILLEGAL
        return state if result == state or self._says_nothing(result) else ILLEGAL

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable]:
        observed = {result for f, _, result in operations if f == "read"}
        observed.update(value[0] for f, value, _ in operations if f == "cas")
        return [*observed, _OTHER]

    def describe(self, f: str, value: Any, result: Any) -> str:
        return super().describe(f, value, result) + (" -> False" if is_refused(f, result) else "")


def is_refused(f: str, result: Any) -> bool:
    """Whether this is a compare-and-set that completed after finding another value."""
    return f == "cas" and (result is False or result is FALSE)


@dataclass(frozen=True, kw_only=True)
class MultiRegister(Model):
    """Several registers read and written together, atomically, by small transactions.

    ``f`` is ``txn``, its value a list of ``[read, k, v]`` and ``[write, k, v]``, applied in order; the completion
    carries the values read.  ``initial`` maps names to initial values (default: ``None``).
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
            elif kind not in ("read", "r"):
                raise ValueError(f"a step is a read or a write, and {shortened(kind)} is neither")
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
    """A register in which every write gets the next version: ``write(v) -> version``, ``read() -> [version, v]``.

    Versions count up by one from ``initial_version``, the version of ``initial``.  A write that returns ``None`` got no
    version.
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
            return (version, value) if result is UNKNOWN or result is None or result == version else ILLEGAL
        if result is UNKNOWN:
            return state
        return state if isinstance(result, (list, tuple)) and tuple(result) == state else ILLEGAL

    def describe(self, f: str, value: Any, result: Any) -> str:
        version = "" if f == "read" or result is UNKNOWN or result is None else f" -> version {shortened(result)}"
        return super().describe(f, value, result) + version


@dataclass(frozen=True, kw_only=True)
class Mutex(Model):
    """``acquire()`` succeeds when the lock is free, ``release()`` when it is held, by whatever process."""

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
