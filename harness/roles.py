"""Who led when, as the replicas themselves said when they were asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ROLES", "RoleLog", "read_roles"]

ROLES = "roles"
"""What the results call them, among what they say of the system: [time in ns, host, role, term] of every change."""

MAX_CHANGES = 10_000
"""Some of five replicas in half an hour with faults; what comes after so many is not kept."""


class RoleLog:
    """The changes of roles of a run: "leader", "follower", or "silent" where a replica did not answer."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, str, str, int]] = []
        self._last: dict[str, tuple[str, int]] = {}

    def note(self, time_ns: int, host: str, status: Mapping[str, str] | None) -> None:
        """What a replica answered (see `System.status`); None where it did not."""
        said = status or {}
        term = str(said.get("term", ""))
        role = "silent" if status is None else "leader" if said.get("leads") == "true" else "follower"
        now = (role, int(term) if term.isascii() and term.isdigit() and len(term) < 19 else 0)
        if self._last.get(host) != now and len(self.changes) < MAX_CHANGES:
            self.changes.append((time_ns, host, *now))
        self._last[host] = now

    def leading(self) -> Sequence[str]:
        """Hosts that said last that they lead, newest term first."""
        leading = [(term, host) for host, (role, term) in self._last.items() if role == "leader"]
        return [host for _, host in sorted(leading, key=lambda pair: -pair[0])]


def read_roles(results: Mapping[str, Any]) -> list[tuple[int, str, str, int]]:
    """What results say of roles; what is damaged is left out."""
    system = results.get("system")
    found = system.get(ROLES) if isinstance(system, Mapping) else None
    return [
        (change[0], change[1], change[2], change[3])
        for change in (found if isinstance(found, list) else [])
        if isinstance(change, list) and [type(each) for each in change] == [int, str, str, int]
    ]
