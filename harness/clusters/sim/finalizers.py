"""Classes without `__del__`, where the interpreter's collector cannot cope with many of them.

PyPy calls the finalizers of objects that lead to one another one per collection, and keeps all that they lead to until
then. The futures and tasks of a simulated cluster lead to each other and to everything that it has in memory: runs that
were over stayed, 70 MB each, for hundreds of collections. All that asyncio does there is complain of errors that
nobody has asked for, at a time that is the collector's choice.
"""

from __future__ import annotations

import sys
from types import CellType, FunctionType
from typing import Any

__all__ = ["without_finalizer"]

_NOT_COPIED = ("__del__", "__dict__", "__weakref__")


def without_finalizer(original: type, base: type) -> type:
    """On PyPy, where asyncio's classes are Python, the same class on top of `base` with no `__del__`; else `original`.

    Its methods are made anew, because `super()` finds its class in the function.
    """
    if sys.implementation.name != "pypy":
        return original
    own_class = CellType()
    members = {name: _made_anew(value, own_class) for name, value in vars(original).items() if name not in _NOT_COPIED}
    own_class.cell_contents = made = type(original)(original.__name__, (base,), members)
    return made


def _made_anew(value: Any, own_class: CellType) -> Any:
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    closure = tuple(
        own_class if name == "__class__" else cell
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    )
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    made.__kwdefaults__ = value.__kwdefaults__
    return made
