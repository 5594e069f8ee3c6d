"""Replaces single methods of single objects, so that the code itself has no branches for mutants.

The object gets a new subclass of its class, in which the named attributes are replaced. Other objects of the class,
such as those of another node of the same simulation, stay as they are.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

__all__ = ["MissingPart", "copy_of", "replace"]


class MissingPart(Exception):
    """What a mutant replaces no longer exists; the text names it. A mutant must never silently do nothing."""


def replace(part: object, **attributes: Any) -> None:
    """Replace methods or properties of one object, by name. Raises MissingPart if one does not exist."""
    kind = type(part)
    for name in attributes:
        if not hasattr(kind, name):
            raise MissingPart(f"{kind.__name__} has no {name}: the mutant must be brought up to date")
    part.__class__ = type(f"Mutant{kind.__name__}", (kind,), attributes)


def copy_of(name: str) -> ModuleType:
    """A second copy of a module, whose functions can be changed without changing those of other nodes."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise MissingPart(f"there is no module {name}: the mutant must be brought up to date")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
