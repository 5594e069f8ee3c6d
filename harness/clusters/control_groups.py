"""The control groups of hosts on this machine: in which hierarchies there can be any, and how they go."""

from __future__ import annotations

import os
import time

__all__ = ["cgroup_parents", "remove_group"]

_CONTROLLERS = frozenset({"cgroup2", "cpu", "memory", "blkio", "pids"})
"""The hierarchies in which hosts get groups: those that account for and limit what a host uses."""

_POLL_S = 0.05


def cgroup_parents() -> list[str]:
    """The control group that this process is in, as a directory, in every hierarchy where it may make groups.

    Hosts' groups lie inside it, so that limits on the harness hold for its hosts too. A hierarchy that is mounted more
    than once, as for a chroot, counts once.
    """
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own |= dict.fromkeys(controllers.split(",") if controllers else ["cgroup2"], path)
    found: dict[str, str] = {}
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
                    found.setdefault(device, path)
    return list(found.values())


def remove_group(path: str, *, timeout_s: float) -> None:
    """Remove a control group once its last process is no zombie any more. Raises OSError."""
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
