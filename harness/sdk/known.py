"""Ports, settings and hosts that a plug-in looks up by name: the error for an unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NoReturn, TypeVar

from harness.errors import nearest

__all__ = ["Known"]

Value = TypeVar("Value")


class _Plain(str):
    """Text that a KeyError, which shows the `repr` of its argument, shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Known(dict[str, Value], Generic[Value]):
    """A mapping whose KeyError lists the known names and suggests the nearest one."""

    def __init__(self, what: str, values: Mapping[str, Value]) -> None:
        super().__init__(values)
        self._what = what

    def __missing__(self, name: str) -> NoReturn:
        names = f"there are {', '.join(self)}" if self else "there are none"
        raise KeyError(_Plain(f"there is no {self._what} {name!r}{nearest(str(name), self)}; {names}"))
