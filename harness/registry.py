"""Workloads, nemeses, systems and clusters by name.

Everything that can be chosen by name is found through Python entry points, both built-in ones and those of other
distributions: a package that declares

    [project.entry-points."splitbrain.workloads"]
    bank = "my_package.bank:BankWorkload"

adds `--workload bank`. Looking up a name returns the object of the entry point, after checking that it conforms to the
protocol of its kind (`Workload`, `Nemesis`, `System`, `Cluster`) and to those of the optional abilities that it has.
All problems are reported, not only the first.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from harness.errors import OperatorError, nearest
from harness.plugin_files import is_file, split_file

__all__ = ["DEFAULT_SYSTEM", "KINDS", "Broken", "is_file", "load", "load_all", "names", "survey"]

DEFAULT_SYSTEM = "broker"
"""The default system under test: the reference system, which is installed with the harness. It is a plug-in like any
other, and nothing else in the harness names it."""

KINDS: Mapping[str, str] = {
    "workloads": "workload",
    "nemeses": "nemesis",
    "systems": "system",
    "clusters": "cluster",
}
"""Kind -> its singular."""


def short_name(system: str) -> str:
    """The name of a system in the folder names of runs: for one in a file, the file's name without directory."""
    path, class_name = split_file(system)
    name = os.path.basename(path).removesuffix(".py")
    return f"{name}-{class_name}" if class_name else name


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that cannot be used; `reason` is one line with all its problems."""

    reason: str


def _entry_points(kind: str) -> Mapping[str, EntryPoint]:
    return _declared(tuple(sys.path)).get(kind, {})


@functools.lru_cache(maxsize=1)
def _declared(path: tuple[str, ...]) -> Mapping[str, Mapping[str, EntryPoint]]:
    """Kind -> name -> entry point, for one `sys.path`. Cached: each lookup reads the metadata of every installed
    package, and the command-line parser alone asks for names some twenty times."""
    everything = entry_points()
    return {kind: {point.name: point for point in everything.select(group=f"splitbrain.{kind}")} for kind in KINDS}


def names(kind: str) -> list[str]:
    """The known names of a kind, sorted, usable or not; imports nothing."""
    return sorted(_entry_points(kind))


def load(kind: str, name: str) -> Any:
    """The object behind a name.

    Raises OperatorError if the name is unknown, cannot be imported, or does not conform to its kind.
    """
    if kind == "systems" and is_file(name):
        return _system_of_file(name)
    points = _entry_points(kind)
    singular = KINDS[kind]
    if name not in points:
        if not points:
            raise OperatorError(
                f"no {kind} are registered: splitbrain is not installed for {sys.executable}, which only sees its code "
                "(in a checkout: make setup)"
            )
        raise OperatorError(f"unknown {singular} {name!r}{nearest(name, points)}; known: {', '.join(sorted(points))}")
    found = _take(kind, points[name])
    if isinstance(found, Broken):
        raise OperatorError(found.reason)
    return found


def load_all(kind: str) -> dict[str, Any]:
    """Every object of a kind by name. Raises OperatorError like `load`, for all broken ones at once."""
    found = survey(kind)
    broken = [item.reason for item in found.values() if isinstance(item, Broken)]
    if broken:
        raise OperatorError("; ".join(broken))
    return found


def survey(kind: str) -> dict[str, Any]:
    """Every object of a kind by name, sorted, with `Broken` for unusable ones. Never raises."""
    return {name: _take(kind, point) for name, point in sorted(_entry_points(kind).items())}


def _take(kind: str, point: EntryPoint) -> Any:
    """The object of an entry point, or `Broken`."""
    title = f"{KINDS[kind]} {point.name!r} ({point.value})"
    try:
        found = _adapted(point.load(), point.name)
        problems = _problems(kind, found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third-party module may raise anything when it is imported or inspected
        said = " ".join(str(error).split())
        return Broken(f"{title} cannot be loaded: {type(error).__name__}{f': {said}' if said else ''}")
    return Broken(f"{title} is not a {KINDS[kind]}: {'; '.join(problems)}") if problems else found


def _adapted(found: Any, name: str) -> Any:
    """A system of `harness.sdk`, adapted to the harness's interface; anything else unchanged. Raises OperatorError."""
    from harness.sdk.system import System

    if not (isinstance(found, type) and issubclass(found, System)):
        return found
    from harness.sdk.plugin import plugin_of
    from harness.systems.guest import adapted

    return adapted(plugin_of(found, name))


def _system_of_file(name: str) -> Any:
    """The system in FILE.py, or FILE.py:CLASS. Raises OperatorError."""
    from harness.sdk.plugin import load_file
    from harness.systems.guest import adapted

    return adapted(load_file(name))


def _problems(kind: str, found: Any) -> list[str]:
    """All ways in which an object does not conform to its kind."""
    from harness.conformance import ability_problems, constructor_problem, protocol_problems

    protocol, abilities, made_with = _contract(kind)
    problems = protocol_problems(found, protocol)
    for ability in abilities:
        problems += [f"{problem} ({ability.__name__})" for problem in ability_problems(found, ability)]
    if not isinstance(getattr(found, "description", None), str):
        problems.append("lacks description")  # not in the protocol of clusters: only `list` needs it
    if made_with is not None and (problem := constructor_problem(found, made_with)) is not None:
        problems.append(problem)
    if made_with is None and isinstance(found, type):
        problems.append(f"is the class {found.__name__}, not an instance: name an instance in the module")
    return list(dict.fromkeys(problems))


def _contract(kind: str) -> tuple[type, Sequence[type], Sequence[str] | None]:
    """(protocol of a kind, its optional abilities, constructor keywords); the keywords are None if the harness does not
    create instances. Imported lazily: names alone are needed far more often."""
    if kind == "workloads":
        from harness.workloads.base import AlsoByCapability, ByCapability, TellsWrites, Workload

        return Workload, (AlsoByCapability, ByCapability, TellsWrites), ()
    if kind == "nemeses":
        from nemesis.forms import HasForms
        from nemesis.protocol import (
            AskedForByName,
            AsksForLeader,
            JudgesVariants,
            MakesRequest,
            Nemesis,
            StepTimeout,
            UsesAbilities,
        )

        optional = (AskedForByName, AsksForLeader, JudgesVariants, MakesRequest, StepTimeout, UsesAbilities)
        return Nemesis, (HasForms, *optional), None
    if kind == "systems":
        from harness.systems.base import Fetched, Operated, RefusesFaults, StoresFiles, System, TellsTime

        made_with = ("cluster", "settings", "keys", "log_dir", "operation_timeout_s")
        return System, (Fetched, Operated, RefusesFaults, StoresFiles, TellsTime), made_with
    from harness.clusters.abilities import LiveLogs, NamesLinkMechanism, OwnWorld, TakesOptions, Traced
    from harness.clusters.base import Cluster, HoldsFiles, SeesReplicas

    abilities = (HoldsFiles, LiveLogs, NamesLinkMechanism, OwnWorld, SeesReplicas, TakesOptions, Traced)
    return Cluster, abilities, ("node_count", "run", "work_dir", "ports", "extra_hosts")
