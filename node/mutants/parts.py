"""Replacing single methods of single objects, so that code without a mutant has no branch for it.

The object's class is exchanged for a subclass made for it, in which the named attributes are others. Other objects of
the class, such as those of another node of the same simulation, stay as they are.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MissingPart", "replace"]


class MissingPart(Exception):
    """What a mutant replaces is not there any more; the text names it. A mutant must never silently do nothing."""


def replace(part: object, **attributes: Any) -> None:
    """Give one object other methods or properties, by name. Raises MissingPart where there is none of a name."""
    kind = type(part)
    for name in attributes:
        if not hasattr(kind, name):
            raise MissingPart(f"{kind.__name__} has no {name}: the mutant must be brought up to date")
    part.__class__ = type(f"Mutant{kind.__name__}", (kind,), attributes)
