"""Names by which the hosts' programs find one another: a name service for each host, and the files that point to it.

Every program of a host sees private files in three places, in a mount namespace that ends with it: a resolv.conf that
names the host's service (name_server), an /etc/hosts with the machine's own names and the host's, and an nsswitch.conf
that has the C library use both. Nothing on the host itself is changed, so nothing needs to be restored.
A container may not mount, but its own files in these places end with it, so they are overwritten.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from harness.clusters.agent_access import get_file, put_file
from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper, HelperRefused
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.name_server import PORT
from harness.clusters.threads import all_of
from harness.clusters.trials import TrialFailed, TrialUnfinished, run_trial
from harness.programs import find_program
from harness.scratch import scratch_prefix
from nemesis.mechanisms.shell import ShellError
from nemesis.target import FaultMet, NameFault, NameLookup, ProcessMember

__all__ = ["HOSTS_FILE", "HostNames", "NamedHost", "hosts_file", "nsswitch_file", "why_no_names"]

HOSTS_FILE, RESOLVER_FILE, ORDER_FILE = "/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf"

_LEAST_HOSTS = "127.0.0.1\tlocalhost\n"

_GRACE_S = 10.0
"""Time for a helper to answer, in addition to the time that it was asked to wait."""

_TRIAL = """
set -e
for place in "$@"; do mount --bind "$0" "$place"; done
"""


@functools.cache
def why_no_names() -> str | None:
    """None when programs on this machine can be given private files in these places; otherwise why not, in one line
    that names the fix. Tried in a mount namespace that vanishes with the trial."""
    missing = [place for place in (HOSTS_FILE, RESOLVER_FILE) if not os.path.exists(place)]
    if missing:
        return f"a name service per host needs {missing[0]} on this machine: create it (it may be empty)"
    if os.geteuid() != 0:
        return "a name service per host needs a mount namespace: run as root, or use --cluster netns"
    with tempfile.NamedTemporaryFile(prefix=scratch_prefix("trial")) as file:
        command = [find_program("sh") or "/bin/sh", "-c", _TRIAL, file.name, HOSTS_FILE, RESOLVER_FILE]
        try:
            run_trial("bind mounts", ["--mount", "--propagation", "private"], command)
            return None
        except TrialUnfinished as error:
            return str(error)
        except TrialFailed as error:
            return f"a name service per host needs a mount namespace ({error}): run as root with CAP_SYS_ADMIN"


async def _text(link: AgentLink, path: str) -> str | None:
    """The content of a file of a host; None if it cannot be read."""
    try:
        return (await get_file(link, path)).decode(errors="replace")
    except ShellError:
        return None


def hosts_file(own: str, names: Mapping[str, str]) -> str:
    """A machine's own /etc/hosts (`own`), followed by these names with their addresses."""
    return "\n".join([own.rstrip("\n"), *(f"{address}\t{name}" for name, address in names.items())]) + "\n"


def nsswitch_file(text: str) -> str:
    """An nsswitch.conf that looks hosts up in /etc/hosts and then by DNS, and everything else as `text` does."""
    kept = [line for line in text.splitlines() if line.split(":")[0].strip() != "hosts"]
    return "\n".join([*kept, "hosts: files dns"]) + "\n"


@dataclass(frozen=True, slots=True)
class NamedHost:
    """A host with a name service: the link to its agent, the address that the service listens on, the host's own
    address, the names of the other hosts with the addresses at which it reaches them, and an address that nobody has.
    `owns_files`: its files in these places belong to the run and end with it, as in a container."""

    link: AgentLink
    _: KW_ONLY
    listen: str
    own: str
    names: Mapping[str, str]
    unused: str
    owns_files: bool = False

    def path(self, host: str, place: str) -> str:
        """The path of the file that this host's programs see in a place."""
        if self.owns_files:
            return place
        return os.path.join(self.link.directory, f"{host}.names.{os.path.basename(place)}")

    def served(self, replicas: Sequence[str]) -> dict[str, object]:
        """The configuration of its service (see name_server). A wrong address is the next replica's, or this host's."""
        addresses = [self.names[name] for name in replicas if name in self.names]
        # A host may reach one replica, or none: on `local` only replicas have links to the others.
        following = [*addresses[1:], addresses[0]] if len(addresses) > 1 else [self.own] * len(addresses)
        turned = dict(zip(addresses, following, strict=True))
        wrong = {name: turned.get(address, self.own) for name, address in self.names.items()}
        return {"listen": self.listen, "names": self.names, "wrong": wrong, "unused": self.unused}


class HostNames:
    """See nemesis.target.Names. Made by `prepared`. `members` lists every process of a host's programs."""

    def __init__(
        self,
        hosts: Mapping[str, NamedHost],
        helpers: Mapping[AgentLink, AgentHelper],
        *,
        members: Callable[[str], Awaitable[Sequence[ProcessMember]]],
    ) -> None:
        self._hosts = dict(hosts)
        self._helpers = dict(helpers)
        self._members = members
        self._places: dict[str, dict[str, str]] = {}
        """host -> place -> content of the file that its programs see there"""

    @classmethod
    async def prepared(
        cls,
        hosts: Mapping[str, NamedHost],
        replicas: Sequence[str],
        *,
        import_path: str | None,
        members: Callable[[str], Awaitable[Sequence[ProcessMember]]],
    ) -> HostNames:
        """Start the services and write the files. Without an `import_path`, the modules are copied to the hosts. Raises
        ClusterUnavailable when a host cannot have private mounts or the port is taken, ShellError."""
        links = list(dict.fromkeys(named.link for named in hosts.values()))
        helpers = {
            link: AgentHelper(link, module="harness.clusters.name_server", import_path=import_path) for link in links
        }

        async def start(link: AgentLink) -> None:
            served = {host: named.served(replicas) for host, named in hosts.items() if named.link is link}
            needs_mounts = any(not hosts[host].owns_files for host in served)
            status, _, errors = await link.run(["unshare", "--mount", "true"]) if needs_mounts else (0, "", "")
            if status != 0:
                said = errors.strip() or f"status {status}"
                raise ClusterUnavailable(f"{link.host}: cannot create a mount namespace for the name service: {said}")
            if import_path is None:
                await AgentHelper.bring(link)
            await helpers[link].start()
            try:
                await helpers[link].request("open", hosts=served, listens_within_s=START_TIMEOUT_S)
            except HelperRefused as error:
                raise ClusterUnavailable(
                    f"cannot start a name service for {', '.join(served)} ({error.reply.get('error')}): stop the "
                    f"program there that listens on port {PORT} on all addresses"
                ) from None

        await all_of(map(start, links))
        made = cls(hosts, helpers, members=members)
        await all_of(made._write_files(host) for host in hosts)
        return made

    async def _write_files(self, host: str) -> None:
        named = self._hosts[host]
        texts = {
            HOSTS_FILE: hosts_file(await _text(named.link, HOSTS_FILE) or _LEAST_HOSTS, {host: named.own}),
            # No search domain of the machine is appended to a name, and the timeout leaves room for late answers.
            RESOLVER_FILE: f"nameserver {named.listen}\nsearch .\noptions timeout:5 attempts:2\n",
        }
        order = await _text(named.link, ORDER_FILE)
        if order is not None:
            texts[ORDER_FILE] = nsswitch_file(order)
        self._places[host] = texts
        for place, text in texts.items():
            await put_file(named.link, named.path(host, place), text.encode())

    def mounts(self, host: str) -> Sequence[tuple[str, str]]:
        """(file, place) pairs: the programs of a host must see the file in that place."""
        if self._hosts[host].owns_files:
            return ()
        return [(self._hosts[host].path(host, place), place) for place in self._places.get(host, ())]

    def _helper(self, host: str) -> AgentHelper:
        return self._helpers[self._hosts[host].link]

    async def disturb(self, fault_id: str, faults: Mapping[str, NameFault]) -> None:
        """Apply faults. Raises ShellError."""
        for host, fault in faults.items():
            wanted = {"kind": fault.kind, "delay_ms": fault.delay_ms}
            await self._helper(host).request("disturb", fault=fault_id, hosts={host: wanted})

    async def look_up(self, host: str, *, timeout_s: float) -> Sequence[NameLookup]:
        """Ask a host's service for every other host. Raises RuntimeError."""
        named = self._hosts[host]
        addresses = {*named.names.values(), named.own}
        try:
            answer = await self._helper(host).request(
                "look_up", host=host, wait_s=timeout_s, timeout_s=timeout_s + _GRACE_S
            )
        except ShellError as error:
            raise RuntimeError(f"cannot query its name service: {error}") from None
        return [
            NameLookup(
                name=name, found=found, right=named.names[name], leads_to_host=found in addresses, seconds=seconds
            )
            for name, found, seconds in answer["lookups"]
        ]

    async def reaches(self, host: str) -> str | None:
        """None when every process of the host's programs sees the files as they were written; otherwise why not."""
        members = await self._members(host)
        for place, text in self._places[host].items():
            file = self._hosts[host].path(host, place)
            answer = await self._helper(host).request(
                "sees", pids=[member.pid for member in members], path=place, file=file, text=text
            )
            if answer["is_changed"]:
                return f"{place} of {host} was modified by something else"
            if answer["astray"]:
                stray = next(str(member) for member in members if member.pid == answer["astray"][0])
                return f"{stray} of {host} sees a different {place}"
        return None

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How many lookups programs have made since a fault began, and how many met it. Raises ShellError."""
        found: dict[str, FaultMet] = {}
        for helper in self._helpers.values():
            answer = await helper.request("met", fault=fault_id)
            found |= {host: FaultMet(asked, met) for host, (asked, met) in answer["hosts"].items()}
        return found

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Every host is tried before the first error is raised (ShellError)."""
        await all_of([helper.request("release", fault=fault_id) for helper in self._helpers.values()])

    async def release_all(self) -> None:
        """Undo every fault. Every host is tried before the first error is raised (ShellError)."""
        await all_of([helper.request("release_all") for helper in self._helpers.values()])
