"""Workloads, nemeses, systems and clusters by name.

Everything that can be chosen by name is found through Python entry points, the built-in ones as well as
those of other distributions: a package that declares, say,

    [project.entry-points."splitbrain.workloads"]
    bank = "my_package.bank:BankWorkload"

adds `--workload bank`. Looking a name up gives the object behind the entry point, checked for the
attributes its kind must have; every problem found is reported, not only the first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from harness.errors import OperatorError, nearest

__all__ = ["KINDS", "load", "load_all", "names"]

KINDS: Mapping[str, tuple[str, ...]] = {
    "workloads": ("name", "description", "requires", "generator", "final_generator", "client", "check"),
    "nemeses": ("name", "description", "variants", "requires", "inject", "prove", "heal", "prove_healed"),
    "systems": ("name", "description", "offers", "settings", "ports", "start", "stop", "leaders"),
    "clusters": ("name", "description", "start", "stop", "spawn", "hosts", "network"),
}
"""Kind -> the attributes that an object of that kind must have."""


def _entry_points(kind: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"splitbrain.{kind}")}


def names(kind: str) -> list[str]:
    """The known names of a kind, sorted."""
    return sorted(_entry_points(kind))


def load(kind: str, name: str) -> Any:
    """The object behind a name.

    Raises OperatorError when the name is unknown, when it cannot be imported, or when it lacks what its kind
    must have.
    """
    points = _entry_points(kind)
    singular = {"workloads": "workload", "nemeses": "nemesis", "systems": "system", "clusters": "cluster"}[kind]
    if name not in points:
        if not points:
            raise OperatorError(
                f"no {kind} are registered: splitbrain is not installed for {sys.executable}, only its code is there "
                "(in a checkout: make setup)"
            )
        raise OperatorError(f"unknown {singular} {name!r}{nearest(name, points)}; known: {', '.join(sorted(points))}")
    try:
        found = points[name].load()
    except ImportError as error:
        raise OperatorError(f"{singular} {name!r} cannot be loaded: {error}") from error
    missing = [attribute for attribute in KINDS[kind] if not hasattr(found, attribute)]
    if missing:
        raise OperatorError(f"{singular} {name!r} ({points[name].value}) lacks: {', '.join(missing)}")
    return found


def load_all(kind: str) -> dict[str, Any]:
    """Every object of a kind by name. Raises OperatorError as `load`."""
    return {name: load(kind, name) for name in names(kind)}
