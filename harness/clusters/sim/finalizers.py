"""Classes without `__del__`, for interpreters whose garbage collector cannot cope with many finalizers.

If objects refer to one another, PyPy calls only one of their finalizers per collection, and keeps everything that they
refer to until then. The futures and tasks of a simulated cluster refer to each other and to everything that it has in
memory: finished runs stayed, 70 MB each, for hundreds of collections. All that asyncio's finalizers do is report errors
that nobody has retrieved, at a time that the collector chooses.
"""

from __future__ import annotations

import sys
from types import CellType, FunctionType
from typing import Any

__all__ = ["without_finalizer"]

_NOT_COPIED = ("__del__", "__dict__", "__weakref__")


def without_finalizer(original: type, base: type) -> type:
    """On PyPy, where asyncio's classes are Python, the same class on top of `base` without `__del__`; else `original`.

    Its methods are copied, because `super()` finds its class in the function's closure.
    """
    if sys.implementation.name != "pypy":
        return original
    own_class = CellType()
    members = {name: _copied(value, own_class) for name, value in vars(original).items() if name not in _NOT_COPIED}
    own_class.cell_contents = made = type(original)(original.__name__, (base,), members)
    return made


def _copied(value: Any, own_class: CellType) -> Any:
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    closure = tuple(
        own_class if name == "__class__" else cell
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    )
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    made.__kwdefaults__ = value.__kwdefaults__
    return made
