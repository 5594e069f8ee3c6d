"""Cuts by nftables: every host drops, at its own input, the packets of the peers that its grudge names.

Dropping at the destination's input makes a cut one-way by nature ({b: {a}} leaves b -> a alone) and silent:
the sender sees nothing, not even an error, as with a switch that lost a port. Dropping at the sender's output
would return EPERM to its sockets. The peers are a set, replaced in one transaction, so no packet sees a
state between two cuts.

Several faults may cut at once. Each keeps its grudge here; a host's set is the union over them, so healing one
fault leaves what another still cuts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from nemesis.mechanisms.shell import HostShell
from nemesis.target import Grudge

__all__ = ["TABLE", "NftCuts", "install_script", "remove_script", "replace_peers_script"]

TABLE = "inet splitbrain"
"""Family and name of the one table that is ours on a host."""

_SET = "peers"
_FILTER_PRIORITY = -300
"""Before connection tracking and before any filter that the host itself may have."""


def install_script() -> str:
    """The nft script that creates our table with an empty set of peers; replaces a table left over."""
    return (
        f"add table {TABLE}\n"
        f"delete table {TABLE}\n"
        f"add table {TABLE}\n"
        f"add set {TABLE} {_SET} {{ type ipv4_addr; }}\n"
        f"add chain {TABLE} input {{ type filter hook input priority {_FILTER_PRIORITY}; policy accept; }}\n"
        f"add rule {TABLE} input ip saddr @{_SET} counter drop\n"
    )


def remove_script() -> str:
    """The nft script that removes our table, whether it is there or not."""
    return f"add table {TABLE}\ndelete table {TABLE}\n"


def replace_peers_script(addresses: Collection[str]) -> str:
    """The nft script that makes `addresses` (IPv4) exactly the peers whose packets are dropped."""
    script = f"flush set {TABLE} {_SET}\n"
    if addresses:
        script += f"add element {TABLE} {_SET} {{ {', '.join(sorted(addresses))} }}\n"
    return script


class NftCuts:
    """The cuts in force on a set of hosts, applied through a shell on each.

    `addresses` maps every host to the IPv4 address that its packets come from.
    """

    def __init__(self, shell: HostShell, addresses: Mapping[str, str]) -> None:
        self._shell = shell
        self._addresses = dict(addresses)
        self._argv = ("nft", "-f", "-")
        self._grudges: dict[str, dict[str, frozenset[str]]] = {}
        # What each host is known to drop; None, or no entry, where that is not known.
        self._applied: dict[str, frozenset[str] | None] = {}
        self._lock = asyncio.Lock()

    async def install(self) -> None:
        """Create our table anew on every host, with what the faults cut. Raises ShellError."""
        async with self._lock:
            self._applied.clear()
            await self._apply()

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets as `grudge` says, on top of what other faults cut, until `heal(fault_id)`.

        A second cut under the same id takes the place of the first. Raises ValueError for an unknown host;
        ShellError when a host could not be changed: others may have been, `heal` undoes those.
        """
        unknown = {*grudge, *(source for sources in grudge.values() for source in sources)} - self._addresses.keys()
        if unknown:
            raise ValueError(f"a grudge names hosts that are not in this cluster: {', '.join(sorted(unknown))}")
        async with self._lock:
            self._grudges[fault_id] = {host: frozenset(sources) for host, sources in grudge.items()}
            await self._apply()

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; links that another fault also cuts stay cut. Idempotent. Raises ShellError."""
        async with self._lock:
            self._grudges.pop(fault_id, None)
            await self._apply()

    async def heal_all(self) -> None:
        """Cut nothing on any host, whatever state it is thought to be in. Idempotent. Raises ShellError."""
        async with self._lock:
            self._grudges.clear()
            self._applied.clear()
            await self._apply()

    def _wanted(self, host: str) -> frozenset[str]:
        """The addresses whose packets `host` drops: the union over all faults."""
        return frozenset(
            self._addresses[source] for grudge in self._grudges.values() for source in grudge.get(host, ())
        )

    async def _apply(self) -> None:
        """Bring every host whose set is not known to be right to what the faults want."""
        wanted = {host: self._wanted(host) for host in self._addresses}
        scripts = {}
        for host, peers in wanted.items():
            known = self._applied.get(host)
            if known is None:
                scripts[host] = install_script() + replace_peers_script(peers)
            elif known != peers:
                scripts[host] = replace_peers_script(peers)
        # Unknown until the command has returned: should it fail or be cancelled, the next change repairs it.
        self._applied.update(dict.fromkeys(scripts))
        await self._on_all(scripts)
        self._applied.update({host: wanted[host] for host in scripts})

    async def _on_all(self, scripts: Mapping[str, str]) -> None:
        """Run a script on each host, all at once; every one is tried before the first error is raised."""
        outcomes = await asyncio.gather(
            *(self._shell.run(host, self._argv, stdin=script) for host, script in scripts.items()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
