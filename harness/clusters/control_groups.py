"""Control groups for hosts on this machine: the hierarchies in which they can be made, and their removal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cgroup_parents", "limiting_controllers", "remove_group"]

_CONTROLLERS = frozenset({"cgroup2", "cpu", "memory", "blkio", "pids"})
"""The hierarchies in which hosts get groups: those that account for and limit a host's resources."""

_POLL_S = 0.05


def cgroup_parents() -> list[str]:
    """The directory of this process's control group in every hierarchy where it may make groups.

    Hosts' groups are made inside it, so that limits on the harness also apply to its hosts. A hierarchy that is mounted
    more than once, as for a chroot, counts once.
    """
    return [path for path, _ in _parents()]


def limiting_controllers() -> frozenset[str]:
    """The controllers (cpu, memory, pids, ...) that can limit the groups that this process may make."""
    found: set[str] = set()
    for path, names in _parents():
        if "cgroup2" in names:
            # Only those that the parent delegates to its groups.
            with contextlib.suppress(OSError):
                found |= set(Path(path, "cgroup.subtree_control").read_text(encoding="ascii").split())
        else:
            found |= set(names)
    return frozenset(found)


def _parents() -> list[tuple[str, Sequence[str]]]:
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own |= dict.fromkeys(controllers.split(",") if controllers else ["cgroup2"], path)
    found: dict[str, tuple[str, Sequence[str]]] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            device, root, point = before.split()[2:5]
            kind, _, options = after.split()[:3]
            names = ["cgroup2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
            inside = next((os.path.relpath(own[name], root) for name in names if name in own), None)
            if inside is not None and not inside.startswith("..") and _CONTROLLERS & set(names):
                path = os.path.normpath(os.path.join(point, inside))
                if os.access(path, os.W_OK):
                    found.setdefault(device, (path, names))
    return list(found.values())


def remove_group(path: str, *, timeout_s: float) -> None:
    """Remove a control group, waiting until its last process was reaped. Raises OSError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_POLL_S)
