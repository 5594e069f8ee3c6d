"""The mechanisms by which faults reach a system's programs on this machine, for `harness doctor --system NAME`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import HarnessError
from harness.systems.base import NamesPrograms
from nemesis.mechanisms.launcher.programs import judge
from nemesis.mechanisms.launcher_archive import why_no_clock, why_no_traps, why_not_attached
from nemesis.mechanisms.reach import AUTO, PRELOAD, kind_in_words, mechanism_for
from nemesis.mechanisms.shim import why_no_shim

__all__ = ["mechanism_lines"]


def mechanism_lines(system_class: Any, settings: Mapping[str, str], mechanism: str = AUTO) -> list[str]:
    """A line for each program of the system; `mechanism` is the requested one."""
    name = system_class.name
    if not isinstance(system_class, NamesPrograms):
        return [f"{name}: what its replicas run is known only once they are started; every proof names the mechanism"]
    try:
        commands = system_class.program_commands(settings)
    except HarnessError as error:
        return [f"{name}: cannot find out what its replicas run: {error}"]
    if not commands:
        return [
            f"{name}: the programs of its replicas are not on this machine yet: whether disk, power and clock faults "
            "reach them is known once the first run has fetched them"
        ]
    return [_line(program, argv, mechanism) for program, argv in commands.items()]


def _line(program: str, argv: Sequence[str], asked: str) -> str:
    found = judge(argv)
    if "kind" not in found:
        return f"{program}: {found['path']}: {found['error']}"
    mechanism = mechanism_for(found["kind"]) if asked == AUTO else asked
    what = f"{program}: {found['path']} is {kind_in_words(found['kind'])}"
    if mechanism == PRELOAD:
        if mechanism_for(found["kind"]) != PRELOAD:
            return f"{what}: the preloaded shim (--mechanism preload) is not guaranteed to reach it"
        return f"{what}: disk, power and clock faults by {_if_possible('the preloaded shim', why_no_shim())}"
    traps = _if_possible("seccomp", why_no_traps())
    if why_no_traps() is None and (why_not := why_not_attached()) is not None:
        traps += f", attached when it starts, not at the first fault ({why_not})"
    return f"{what}: disk and power faults by {traps}; wall clocks by {_if_possible('the vDSO', why_no_clock())}"


def _if_possible(mechanism: str, why_not: str | None) -> str:
    return mechanism if why_not is None else f"{mechanism}, which is not available here: {why_not}"
