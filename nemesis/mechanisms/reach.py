"""By which mechanism a program meets the faults of its host's control file, and whether it is within its reach.

    preload   the shim, a library that is preloaded (shim.py): programs that are linked dynamically and call the C
              library
    seccomp   the launcher (launcher_archive.py): the kernel reports the program's system calls to a supervisor, and its
              clock is moved in its own copy of the vDSO; any program

The first is cheaper, and moves monotonic clocks as well; so it is taken for programs that it reaches for certain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nemesis.mechanisms.launcher.programs import DYNAMIC, GO, OTHER, SCRIPT, STATIC

__all__ = ["AUTO", "MECHANISMS", "PRELOAD", "SECCOMP", "kind_in_words", "mechanism_for", "unreached", "wanted_traps"]

AUTO, PRELOAD, SECCOMP = "auto", "preload", "seccomp"
MECHANISMS = (AUTO, PRELOAD, SECCOMP)
"""What can be asked for by name; AUTO chooses by the program."""

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
    GO: "a Go program, which makes its system calls by itself",
    SCRIPT: "a script or a wrapper, of which it cannot be known what it will execute",
    OTHER: "no 64-bit program of this processor",
}


def kind_in_words(kind: str) -> str:
    """What a kind of program (launcher/programs.py) is, for people."""
    return _IN_WORDS.get(kind, "of a kind that is not known")


def mechanism_for(kind: str) -> str:
    """PRELOAD for programs that it reaches for certain, else SECCOMP."""
    return PRELOAD if kind == DYNAMIC else SECCOMP


def wanted_traps(capabilities: Collection[tuple[str, str]]) -> frozenset[str]:
    """The groups of calls that have to be reported for what a run will use."""
    abilities = {ability for interface, ability in capabilities if interface == "disks"}
    return frozenset(group for ability in abilities for group in _TRAPS.get(ability, ()))


def unreached(
    mechanism: str, looked: Sequence[Mapping[str, Any]], *, needed_files: Collection[str], needs_clock: bool
) -> str | None:
    """Why faults would not be met by a program, of which `looked` is what was seen of its processes
    (launcher/programs.look); None when they would. `needed_files` must be mapped by a program that meets them by the
    shim; `needs_clock`: by the launcher, its clock must be moved, else its calls must be reported by a filter."""
    if not looked:
        return "it has ended"
    for each in looked:
        name = f"process {each['pid']} ({each['program'] or 'unknown'})"
        if each["unseen"] and not needs_clock:
            said = " and ".join(each["unseen"])
            return f"{name} may read and write by {said}, past every disk fault: have it do without"
        if mechanism == SECCOMP:
            if needs_clock and each["clock"] is None:
                return f"the clock of {name} is not moved{': ' + each['problem'] if each['problem'] else ''}"
            if not needs_clock and each["filters"] == 0:
                return f"the calls of {name} are not reported: its program gave it away before it could be seen"
            continue
        if each["problem"] and not each["maps"]:
            return f"{name} cannot be looked into: {each['problem']}"
        if each["kind"] != DYNAMIC:
            return f"{name} is {kind_in_words(each['kind'])}: the preloaded shim is of no use (--mechanism seccomp)"
        if any(path not in each["maps"] for path in needed_files):
            return f"{name} has not loaded the fault shim (--mechanism seccomp reaches any program)"
        if each["root"] and not needs_clock:
            # It finds its files by /proc, which there shows other paths, or nothing.
            return f"{name} has a root of its own (chroot), where the shim finds no file (--mechanism seccomp)"
    return None
