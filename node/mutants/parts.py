"""Replaces single methods of single objects, so that the code itself has no branches for mutants.

The object gets a new subclass of its class, in which the named attributes are replaced. Other objects of the class,
such as those of another node of the same simulation, stay as they are.
"""

from __future__ import annotations

import importlib.util
import inspect
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["MissingPart", "copy_of", "replace"]


class MissingPart(Exception):
    """What a mutant replaces no longer exists, or is called in another way; the text names it. A mutant must never
    silently do nothing, nor be found by an exception of its own."""


_REST = _BY_POSITION, _BY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def replace(part: object, **attributes: Any) -> None:
    """Replace methods or properties of one object, by name. Raises MissingPart if one does not exist or its replacement
    takes other parameters or returns something else."""
    kind = type(part)
    for name, new in attributes.items():
        old = getattr(kind, name, None)
        if old is None:
            raise MissingPart(f"{kind.__name__} has no {name}: the mutant must be brought up to date")
        if isinstance(old, FunctionType) and isinstance(new, FunctionType):
            _require_same_calls(f"{kind.__name__}.{name}", inspect.signature(old), inspect.signature(new))
    part.__class__ = type(f"Mutant{kind.__name__}", (kind,), attributes)


def _require_same_calls(what: str, old: inspect.Signature, new: inspect.Signature) -> None:
    """Raise MissingPart unless `new` takes the parameters of `old` and, if it is annotated, returns the same. `*rest`
    and `**options` stand for any further parameters."""
    rest = {one.kind for one in new.parameters.values()} & {*_REST}
    named = [(one.name, one.kind) for one in new.parameters.values() if one.kind not in rest]
    taken = [
        (one.name, one.kind)
        for one in old.parameters.values()
        if (one.name in new.parameters and one.kind not in rest)
        or (_BY_NAME if one.kind in (one.KEYWORD_ONLY, _BY_NAME) else _BY_POSITION) not in rest
    ]
    is_annotated = new.return_annotation is not inspect.Signature.empty
    if named != taken or (is_annotated and old.return_annotation != new.return_annotation):
        raise MissingPart(f"{what} is {old} now, not {new}: the mutant must be brought up to date")


def copy_of(name: str) -> ModuleType:
    """A second copy of a module, whose functions can be changed without changing those of other nodes."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise MissingPart(f"there is no module {name}: the mutant must be brought up to date")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
