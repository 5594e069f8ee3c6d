"""Cuts by nftables: every host drops packets from the peers that its grudge names.

Packets are dropped before any other processing, so that forwarded packets are cut, too: those to a replica in a network
of its own, behind a port that its host publishes. Dropping at the destination makes each cut one-way ({b: {a}} leaves
b -> a alone) and silent: the sender sees nothing, not even an error, as with a switch that lost a port. Dropping at the
sender's output would return EPERM to its sockets. The peers are a set, replaced in one transaction, so no packet sees a
state between two cuts.

Several faults may cut at once. Each keeps its grudge here; a host's set is the union over them, so healing one
fault leaves the cuts of the others.

Cuts, counters and shaped links are defined by IPv4 addresses. To rule out a bypass, the hosts of a run reach each other
over IPv4 only: IPv6 packets from other hosts are dropped while the run lasts.

A separate table counts what the programs on the hosts send each other, at each destination, once before the cut and
once after it: packets that arrived and did not pass were stopped. The counting is independent of the rules that cut, so
that a rule that fails to match shows as packets that passed; so does a rule that lets IPv6 through. Packets from other
IPv4 addresses of a host, say on a second network, are counted as well: no cut stops these.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence

from nemesis.mechanisms.shell import HostShell
from nemesis.target import Grudge, Link, LinkTraffic

__all__ = [
    "COUNTERS_TABLE",
    "TABLE",
    "NftCounters",
    "NftCuts",
    "counters_script",
    "install_script",
    "parse_counter",
    "parse_counters",
    "remove_script",
    "replace_peers_script",
]

TABLE = "inet splitbrain"
"""Family and name of our table on a host."""

COUNTERS_TABLE = "inet splitbrain_counters"
"""The table that counts; it is created once per run and never replaced."""

_IPV6 = "ipv6"
_FURTHER = "further"
"""Counters of traffic that bypasses cuts."""

_SSH_PORT = 22
"""A host may be a jump host to another one (ProxyJump), carrying the harness's own traffic."""

_MAX_NAMED = 4
"""Limit on the addresses named in one line."""

_SET = "peers"
_FILTER_PRIORITY = -300
"""Before connection tracking and before any filter that the host itself may have."""


def install_script(ipv6: str = "") -> str:
    """The nft script that creates our table with an empty set of peers, replacing one that was left over. `ipv6`, if
    not empty, is the match for IPv6 packets from other hosts."""
    return (
        f"add table {TABLE}\n"
        f"delete table {TABLE}\n"
        f"add table {TABLE}\n"
        f"add set {TABLE} {_SET} {{ type ipv4_addr; }}\n"
        f"add chain {TABLE} input {{ type filter hook prerouting priority {_FILTER_PRIORITY}; policy accept; }}\n"
        f"add rule {TABLE} input ip saddr @{_SET} counter drop\n"
        + (f"add rule {TABLE} input {ipv6} counter drop\n" if ipv6 else "")
    )


def remove_script() -> str:
    """The nft script that removes our tables if they exist."""
    return "".join(f"add table {table}\ndelete table {table}\n" for table in (TABLE, COUNTERS_TABLE))


def counters_script(peers: Collection[str], ipv6: str = "", further: Collection[str] = ()) -> str:
    """The nft script that starts counting, replacing a table that was left over. It counts the traffic that arrives
    from each of the addresses `peers` (IPv4), and how much of it passes; IPv6 traffic of other hosts that passes, by
    the match `ipv6` of `install_script`; and unicast traffic to this host from `further` addresses (IPv4). Packets to
    a port in the set `own` are the harness's and not counted, nor is ICMP."""
    table, addresses = COUNTERS_TABLE, ", ".join(sorted(peers))
    script = f"add table {table}\ndelete table {table}\nadd table {table}\n"
    script += f"add set {table} own {{ type inet_service; }}\n"
    if not peers:
        return script
    for name, priority in (("arrived", _FILTER_PRIORITY - 1), ("passed", _FILTER_PRIORITY + 1)):
        script += (
            f"add set {table} {name} {{ type ipv4_addr; size {len(peers)}; flags dynamic; }}\n"
            f"add chain {table} {name} {{ type filter hook prerouting priority {priority}; policy accept; }}\n"
            f"add rule {table} {name} ip protocol icmp accept\n"
            f"add rule {table} {name} udp dport @own accept\n"
            f"add rule {table} {name} ip saddr {{ {addresses} }} update @{name} {{ ip saddr counter }}\n"
        )
    if ipv6:
        script += f"add counter {table} {_IPV6}\n"
        script += f"insert rule {table} passed {ipv6} meta l4proto != icmpv6 counter name {_IPV6}\n"
    if further:
        script += f"add counter {table} {_FURTHER}\n"
        sources = f"ip saddr {{ {', '.join(sorted(further))} }}"
        counted = f"meta pkttype host meta l4proto {{ tcp, udp }} counter name {_FURTHER}"
        # Each rule is inserted before the previous one. A single rule with two "!=" fails: nft merges them into an OR.
        for what in (counted, f"tcp sport {_SSH_PORT} accept", f"tcp dport {_SSH_PORT} accept"):
            script += f"insert rule {table} passed {sources} {what}\n"
    return script


_COUNTED_SET = re.compile(r"set (arrived|passed) \{(.*?)\n\t\}", re.DOTALL)
_COUNTER = re.compile(r"([0-9.]+) counter packets (\d+) bytes (\d+)")


def parse_counters(listing: str) -> Mapping[str, tuple[int, int]]:
    """Address -> (bytes that arrived, bytes that passed), from nft's listing of the counting table."""
    found: dict[str, dict[str, int]] = {"arrived": {}, "passed": {}}
    for name, body in _COUNTED_SET.findall(listing):
        found[name] = {address: int(size_bytes) for address, _, size_bytes in _COUNTER.findall(body)}
    return {address: (size_bytes, found["passed"].get(address, 0)) for address, size_bytes in found["arrived"].items()}


def parse_counter(listing: str, name: str) -> int:
    """The bytes counted by the named counter, from the same listing; 0 if there is no such counter."""
    found = re.search(rf"counter {name} \{{\s*packets \d+ bytes (\d+)", listing)
    return int(found[1]) if found else 0


def replace_peers_script(addresses: Collection[str]) -> str:
    """The nft script that makes `addresses` (IPv4) exactly the peers whose packets are dropped."""
    script = f"flush set {TABLE} {_SET}\n"
    if addresses:
        script += f"add element {TABLE} {_SET} {{ {', '.join(sorted(addresses))} }}\n"
    return script


class NftCuts:
    """The cuts in force on a set of hosts, applied through a shell on each.

    `addresses` maps every host to the IPv4 address that its packets come from, `ipv6` to the match for IPv6 packets
    from other hosts (see `install_script`).
    """

    def __init__(self, shell: HostShell, addresses: Mapping[str, str], ipv6: Mapping[str, str] | None = None) -> None:
        self._shell = shell
        self._addresses = dict(addresses)
        self._ipv6 = dict(ipv6 or {})
        self._argv = ("nft", "-f", "-")
        self._grudges: dict[str, dict[str, frozenset[str]]] = {}
        # What each host is known to drop; None, or no entry, if that is not known.
        self._applied: dict[str, frozenset[str] | None] = {}
        self._lock = asyncio.Lock()

    async def install(self) -> None:
        """Create our table anew on every host, with the cuts in force. Raises ShellError."""
        async with self._lock:
            self._applied.clear()
            await self._apply()

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets as `grudge` says, on top of what other faults cut, until `heal(fault_id)`.

        A second cut under the same id replaces the first. Raises ValueError for an unknown host; ShellError when a
        host could not be changed: others may have been changed, and `heal` undoes those.
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
        """Undo every cut on every host, whatever its assumed state. Idempotent. Raises ShellError."""
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
        """Apply the cuts in force to every host whose set is not known to be right."""
        wanted = {host: self._wanted(host) for host in self._addresses}
        scripts = {}
        for host, peers in wanted.items():
            known = self._applied.get(host)
            if known is None:
                scripts[host] = install_script(self._ipv6.get(host, "")) + replace_peers_script(peers)
            elif known != peers:
                scripts[host] = replace_peers_script(peers)
        # Unknown until the command has returned: if it fails or is cancelled, the next change repairs the host.
        self._applied.update(dict.fromkeys(scripts))
        await self._on_all(scripts)
        self._applied.update({host: wanted[host] for host in scripts})

    async def _on_all(self, scripts: Mapping[str, str]) -> None:
        """Run a script on each host concurrently; all are tried before the first error is raised."""
        outcomes = await asyncio.gather(
            *(self._shell.run(host, self._argv, stdin=script) for host, script in scripts.items()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


class NftCounters:
    """Counts what the hosts' programs send each other. `addresses` and `ipv6` are those of NftCuts; `further` maps each
    host to the additional IPv4 addresses of the other hosts."""

    def __init__(
        self,
        shell: HostShell,
        addresses: Mapping[str, str],
        ipv6: Mapping[str, str] | None = None,
        further: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._shell = shell
        self._addresses = dict(addresses)
        self._ipv6 = dict(ipv6 or {})
        self._further = dict(further or {})

    async def install(self) -> None:
        """Start counting on every host. Raises ShellError."""

        async def install_on(host: str) -> None:
            peers = set(self._addresses.values()) - {self._addresses[host]}
            script = counters_script(peers, self._ipv6.get(host, ""), self._further.get(host, ()))
            await self._shell.run(host, ("nft", "-f", "-"), stdin=script)

        await asyncio.gather(*map(install_on, self._addresses))

    async def leave_out(self, ports: Mapping[str, int]) -> None:
        """Stop counting packets to the given UDP port of each host, which is the harness's. Raises ShellError."""
        await asyncio.gather(
            *(
                self._shell.run(host, ("nft", "-f", "-"), stdin=f"add element {COUNTERS_TABLE} own {{ {port} }}\n")
                for host, port in ports.items()
            )
        )

    async def read(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        """The traffic on these links since counting started. Raises ShellError."""
        listings = await self._listings({link.destination for link in links})
        counted = {host: parse_counters(listing) for host, listing in listings.items()}
        traffic = {}
        for link in links:
            arrived, passed = counted[link.destination].get(self._addresses[link.source], (0, 0))
            # The two are not read at the same instant.
            traffic[link] = LinkTraffic(passed_bytes=passed, stopped_bytes=max(0, arrived - passed))
        return traffic

    async def bypasses(self, hosts: Collection[str]) -> Sequence[str]:
        """Traffic that reached these hosts from others over paths that no cut affects, one line each. Raises
        ShellError."""
        found = []
        for host, listing in sorted((await self._listings(hosts)).items()):
            if size_bytes := parse_counter(listing, _IPV6):
                said = f"{size_bytes} bytes from other hosts reached {host} over IPv6"
                found.append(f"{said}, which should be blocked between hosts")
            if size_bytes := parse_counter(listing, _FURTHER):
                said = f"{size_bytes} bytes from other hosts reached {host} from addresses that no cut applies to"
                sources = ", ".join(sorted(self._further[host])[:_MAX_NAMED])
                own = f"{self._addresses[host]} of {host}"
                found.append(f"{said} ({sources}): have them use only the addresses of the run, such as {own}")
        return found

    async def _listings(self, hosts: Collection[str]) -> dict[str, str]:
        argv = ("nft", "list", "table", *COUNTERS_TABLE.split())
        listings = await asyncio.gather(*(self._shell.run(host, argv) for host in hosts))
        return dict(zip(hosts, listings, strict=True))
