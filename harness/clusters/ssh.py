"""The `ssh` cluster: hosts are existing machines, named by an inventory.

A machine is claimed by one run at a time (a file in its directory names the run), so that the cuts and programs of two
runs never meet. The harness needs a user that is root or may use sudo without a password; it installs nothing: what a
host must have is in docs/hosts.md and scripts/provision.sh. All files of a run are in one directory of the host, which
is removed at the end.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import socket
from collections.abc import Callable, Sequence
from typing import ClassVar, Self, Unpack

from harness.clusters.agent_cluster import ClusterArguments
from harness.clusters.agent_link import ByteStream
from harness.clusters.base import ClusterUnavailable
from harness.clusters.host_agent import KEPT
from harness.clusters.options import MECHANISM_OPTION
from harness.clusters.remote_cluster import RemoteCluster
from harness.clusters.ssh_connection import (
    HostNotTaken,
    clean_host,
    connect_relay,
    require_paramiko,
    take_host,
    why_no_file_systems,
)
from harness.clusters.ssh_inventory import REAL_CLOCK, SshHost, load_inventory
from harness.clusters.threads import all_of, in_thread
from harness.errors import HarnessError, OperatorError
from harness.faults.file_system_disks import FILE_SYSTEM_KINDS
from harness.pages import page
from harness.run_state import KIND_SSH_HOST, Claim

__all__ = ["MAX_HOSTS", "SshCluster"]

MAX_HOSTS = 50
"""Largest number of replicas; each takes a connection and a thread."""


class SshCluster(RemoteCluster):
    """Hosts as machines behind SSH, for one run. See harness.clusters.base.Cluster and RemoteCluster.

    `inventory` is a file (see ssh_inventory) or the hosts themselves. Raises OperatorError for a bad one.
    """

    name = "ssh"
    description = "the machines of an inventory, reached over SSH; cuts by nftables there; needs root or sudo on them"
    max_hosts = MAX_HOSTS
    options: Sequence[str] = ("inventory", MECHANISM_OPTION)
    _why_no_file_systems: ClassVar[Callable[[], str | None] | None] = None

    def __init__(self, *, inventory: str | Sequence[SshHost] | None = None, **given: Unpack[ClusterArguments]) -> None:
        super().__init__(**given)
        self._ssh_hosts, self._machine_of = _assign(self._hosts, self._extra_hosts, _hosts_of(inventory))
        self._addresses: dict[str, str] = {}

    @classmethod
    def require(cls, *, inventory: str | None = None) -> None:
        """Raise ClusterUnavailable or OperatorError when paramiko is missing or the inventory is bad."""
        require_paramiko()
        _hosts_of(inventory)

    @classmethod
    def configured(cls, *, inventory: str | None = None, extra_hosts: Sequence[str] = ()) -> type[SshCluster]:
        """The class for these machines, on which to call `missing`. Raises OperatorError for a bad inventory."""
        hosts = _hosts_of(inventory)
        return cls._asking(lambda: hosts, extra_hosts)

    @classmethod
    def _asking(cls, hosts: Callable[[], Sequence[SshHost]], extra_hosts: Sequence[str]) -> type[Self]:
        """The class bound to its machines, which are asked only once, when a fault first needs to know."""

        @functools.cache
        def why_not() -> str | None:
            try:
                machines = hosts()
            except OperatorError:
                return None  # it is reported when the cluster is made
            return why_no_file_systems([host for host in machines if host.name not in extra_hosts])

        return type(cls.__name__, (cls,), {"_why_no_file_systems": staticmethod(why_not)})

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """See RemoteCluster; a class made by `configured` asks the machines themselves for loop devices."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS and cls._why_no_file_systems is not None:
            return cls._why_no_file_systems()
        return super().missing(interface, ability)

    async def _make_hosts(self) -> None:
        require_paramiko()
        for machine in self._machines:
            host = self._ssh_hosts[machine]
            self._run.claim_all([Claim(KIND_SSH_HOST, machine, {"host": host.to_json()})])

        async def take(machine: str) -> None:
            try:
                await in_thread(take_host, self._ssh_hosts[machine], self._run.run_id)
            except HostNotTaken:
                self._run.release(KIND_SSH_HOST, machine)  # nothing was changed there, so there is nothing to clean up
                raise

        await all_of(take(machine) for machine in self._machines)

    async def _remove_hosts(self) -> list[Exception]:
        claimed = {claim.ident for claim in self._run.claims if claim.kind == KIND_SSH_HOST}

        async def give_back(machine: str) -> None:
            keep = sorted(host for host in self._unfetched if self._machine(host) == machine)
            _, left = await in_thread(clean_host, self._ssh_hosts[machine], self._run.run_id, keep)
            if left:
                raise HarnessError(f"{machine}: could not clean up: {'; '.join(left)}")
            self._run.release(KIND_SSH_HOST, machine)
            if keep:
                place = f"{self._agent_dir(machine)}{KEPT}"
                raise HarnessError(
                    f"{machine}: the files of {', '.join(keep)} could not be fetched and are still there, in {place}"
                )

        outcomes = await asyncio.gather(
            *(give_back(machine) for machine in self._machines if machine in claimed), return_exceptions=True
        )
        return [outcome for outcome in outcomes if isinstance(outcome, Exception)]

    async def _check_machine(self, machine: str) -> None:
        await super()._check_machine(machine)
        link, directory = self._links[machine], self._agent_dir(machine)
        # Only once our own agent runs: of two runs that start at the same time, at least one then sees the other.
        _, shown, _ = await link.run([link.python, f"{directory}/agent.py", "others", directory])
        for line in shown.splitlines():
            run_id, _, directory = line.partition(" ")
            if run_id == self._run.run_id:
                raise ClusterUnavailable(
                    f"{machine} is already in this run under another name: list every machine once"
                )
            raise ClusterUnavailable(
                f"{machine}: the host is in use by run {run_id}, whose files are in {directory} there: if that run is "
                "dead, run `harness clean`"
            )

    async def _learn_addresses(self) -> None:
        async def learn(machine: str) -> None:
            host = self._ssh_hosts[machine]
            if host.address is not None:
                self._addresses[machine] = host.address
            elif host.network is not None:
                self._addresses[machine] = await self._address_in(machine, host.network)
            else:
                self._addresses[machine] = await in_thread(_resolve, host)

        await all_of(learn(machine) for machine in self._machines)
        shared = [m for m in self._machines if list(self._addresses.values()).count(self._addresses[m]) > 1]
        if shared:
            raise ClusterUnavailable(f"{' and '.join(shared)} have the same address {self._addresses[shared[0]]}")

    async def _address_in(self, machine: str, network: str) -> str:
        """The machine's address in a network, as the machine itself reports it."""
        status, output, errors = await self.agent(machine).run(["ip", "-json", "-4", "address"])
        if status != 0:
            raise ClusterUnavailable(f"{machine}: ip address: {errors.strip()}")
        wanted = ipaddress.IPv4Network(network)
        for device in json.loads(output):
            for entry in device.get("addr_info", []):
                if "local" in entry and ipaddress.IPv4Address(entry["local"]) in wanted:
                    return str(entry["local"])
        raise ClusterUnavailable(f"{self._ssh_hosts[machine].name} has no address in {network}: set address or network")

    def _connect(self, machine: str) -> ByteStream:
        return connect_relay(self._ssh_hosts[machine], self._agent_dir(machine))

    def _machine(self, host: str) -> str:
        return self._machine_of[host]

    def _may_set_clock(self, host: str) -> bool:
        return self._ssh_hosts[host].clock == REAL_CLOCK

    def _agent_dir(self, machine: str) -> str:
        return f"{self._ssh_hosts[machine].directory}/{self._run.run_id}"

    def _address(self, host: str) -> str:
        return self._addresses[self._machine(host)]

    def _unreachable_hint(self) -> str:
        return "set its address to one that the other hosts and this machine can reach, and open its ports"


def _hosts_of(inventory: str | Sequence[SshHost] | None) -> list[SshHost]:
    if inventory is None:
        raise OperatorError(f"the ssh cluster needs --inventory FILE ({page('hosts.md')} shows one)")
    return load_inventory(inventory) if isinstance(inventory, str) else list(inventory)


def _assign(
    hosts: Sequence[str], extra_hosts: Sequence[str], available: Sequence[SshHost]
) -> tuple[dict[str, SshHost], dict[str, str]]:
    """(how each machine is reached, which machine each host is on). Raises OperatorError.

    An extra host gets the machine of the same name, else one that is left over, else the first replica's.
    """
    own = {host.name: host for host in available if host.name in extra_hosts}
    others = [host for host in available if host.name not in own]
    if len(others) < len(hosts):
        raise OperatorError(f"--nodes {len(hosts)}: the inventory has only {len(others)} hosts for replicas")
    machines = dict(zip(hosts, others, strict=False))
    machine_of = {host: host for host in hosts}
    spare = others[len(hosts) :]
    for extra in extra_hosts:
        if extra in own or spare:
            machines[extra] = own[extra] if extra in own else spare.pop(0)
            machine_of[extra] = extra
        else:
            machine_of[extra] = hosts[0]
    return machines, machine_of


def _resolve(host: SshHost) -> str:
    try:
        address = socket.gethostbyname(host.hostname)
    except OSError as error:
        raise ClusterUnavailable(f"{host.name}: {host.hostname} has no IPv4 address ({error})") from None
    if ipaddress.IPv4Address(address).is_loopback:
        raise ClusterUnavailable(
            f"{host.name}: {host.hostname} is {address}, which other hosts cannot use: set address or network"
        )
    return address
