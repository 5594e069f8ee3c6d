"""The mechanism by which a program meets the faults of its host's control file, and whether it reaches the program.

    preload   the shim, a preloaded library (shim.py): for dynamically linked programs that call the C library
    seccomp   the launcher (launcher_archive.py): the kernel reports the program's system calls to a supervisor, and its
              clock is skewed in its own copy of the vDSO; for any program

The first is cheaper, and can also skew monotonic clocks; so it is used for programs that it is certain to reach.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nemesis.mechanisms.launcher.programs import DYNAMIC, GO, OTHER, SCRIPT, STATIC

__all__ = ["AUTO", "MECHANISMS", "PRELOAD", "SECCOMP", "kind_in_words", "mechanism_for", "unreached", "wanted_traps"]

AUTO, PRELOAD, SECCOMP = "auto", "preload", "seccomp"
MECHANISMS = (AUTO, PRELOAD, SECCOMP)
"""Names of the mechanisms to choose from; AUTO decides by the program."""

_TRAPS: Mapping[str, Collection[str]] = {
    "stall-fsync": ("sync",),
    "error-fsync": ("sync",),
    "stall": ("sync", "write"),
    "slow": ("sync", "write"),
    "full": ("write",),
    "error-write": ("write",),
    "error-read": ("read",),
    "shutdown": ("sync",),
    "power": ("sync", "write"),
    "crash": ("sync", "write"),
}
"""Ability of disks -> the groups of calls (launcher/filter.py) that have to be reported for it."""

_IN_WORDS: Mapping[str, str] = {
    DYNAMIC: "linked dynamically",
    STATIC: "linked statically",
    GO: "a Go program, which makes its system calls directly",
    SCRIPT: "a script or a wrapper, which may execute any kind of program",
    OTHER: "not a 64-bit program for this CPU",
}


def kind_in_words(kind: str) -> str:
    """A kind of program (launcher/programs.py) as text."""
    return _IN_WORDS.get(kind, "of an unknown kind")


def mechanism_for(kind: str) -> str:
    """PRELOAD for programs that it is certain to reach, otherwise SECCOMP."""
    return PRELOAD if kind == DYNAMIC else SECCOMP


def wanted_traps(capabilities: Collection[tuple[str, str]]) -> frozenset[str]:
    """The groups of calls that have to be reported for the capabilities that a run will use."""
    abilities = {ability for interface, ability in capabilities if interface == "disks"}
    return frozenset(group for ability in abilities for group in _TRAPS.get(ability, ()))


def unreached(
    mechanism: str, looked: Sequence[Mapping[str, Any]], *, needed_files: Collection[str], needs_clock: bool
) -> str | None:
    """Why a program would not meet faults; None when it would. `looked` is what launcher/programs.look reported about
    its processes. With the shim, the program must have mapped `needed_files`. With the launcher, its clock must be
    skewed if `needs_clock`, otherwise a filter must report its calls."""
    if not looked:
        return "it has ended"
    for each in looked:
        name = f"process {each['pid']} ({each['program'] or 'unknown'})"
        if each["unseen"] and not needs_clock:
            said = " and ".join(each["unseen"])
            return f"{name} may read and write by {said}, which bypasses every disk fault: configure it not to"
        if mechanism == SECCOMP:
            if needs_clock and each["clock"] is None:
                return f"the clock of {name} is not skewed{': ' + each['problem'] if each['problem'] else ''}"
            if not needs_clock and each["filters"] == 0:
                return f"the calls of {name} are not reported: it left its program before it could be seen"
            continue
        if each["problem"] and not each["maps"]:
            return f"{name} cannot be inspected: {each['problem']}"
        if each["kind"] != DYNAMIC:
            return (
                f"{name} is {kind_in_words(each['kind'])}: the preloaded shim does not work for it (use --mechanism "
                "seccomp)"
            )
        if any(path not in each["maps"] for path in needed_files):
            return f"{name} has not loaded the fault shim (--mechanism seccomp reaches any program)"
        if each["root"] and not needs_clock:
            # The shim finds files through /proc, which shows other paths there, or nothing.
            return f"{name} has its own root (chroot), where the shim finds no file (use --mechanism seccomp)"
    return None
