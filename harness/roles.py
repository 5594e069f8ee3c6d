"""Which replica led when, as the replicas reported when polled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ROLES", "RoleLog", "read_roles"]

ROLES = "roles"
"""Key among the system's facts in the results: [time in ns, host, role, term] of every change."""

MAX_CHANGES = 10_000
"""Limit of changes kept: more than five replicas have in half an hour with faults."""


class RoleLog:
    """The role changes of a run: "leader", "follower", or "silent" for a replica that did not answer."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, str, str, int]] = []
        self._last: dict[str, tuple[str, int]] = {}

    def note(self, time_ns: int, host: str, status: Mapping[str, str] | None) -> None:
        """Record the status of a replica (see `System.status`); None if it did not answer."""
        said = status or {}
        term = str(said.get("term", ""))
        role = "silent" if status is None else "leader" if said.get("leads") == "true" else "follower"
        now = (role, int(term) if term.isascii() and term.isdigit() and len(term) < 19 else 0)
        if self._last.get(host) != now and len(self.changes) < MAX_CHANGES:
            self.changes.append((time_ns, host, *now))
        self._last[host] = now

    def leading(self) -> Sequence[str]:
        """Hosts whose last reported role is leader, newest term first."""
        leading = [(term, host) for host, (role, term) in self._last.items() if role == "leader"]
        return [host for _, host in sorted(leading, key=lambda pair: -pair[0])]


def read_roles(results: Mapping[str, Any]) -> list[tuple[int, str, str, int]]:
    """The role changes in results; malformed ones are left out."""
    system = results.get("system")
    found = system.get(ROLES) if isinstance(system, Mapping) else None
    return [
        (change[0], change[1], change[2], change[3])
        for change in (found if isinstance(found, list) else [])
        if isinstance(change, list) and [type(each) for each in change] == [int, str, str, int]
    ]
