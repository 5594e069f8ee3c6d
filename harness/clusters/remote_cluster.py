"""Hosts that are not on the harness's own machine or do not share its files: containers, and machines behind SSH.

All files of a run are in the agent's directory on each machine, which has a directory for each host.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Unpack

from harness.clusters.agent_access import fetch_directory
from harness.clusters.agent_cluster import AgentCluster, ClusterArguments
from harness.clusters.agent_file_systems import FileSystemPlace
from harness.clusters.agent_shim import UNDO_INSIDE
from harness.clusters.base import ClusterUnavailable
from harness.clusters.host_agent import CONTROL_FILE
from harness.clusters.host_names import NamedHost
from harness.clusters.threads import all_of
from harness.host_files import PROVISION, host_file
from nemesis.mechanisms.shim_controls import ShimPlace

__all__ = ["NEEDED_PROGRAMS", "RemoteCluster", "addresses_gained", "addresses_of_others", "sends_from_another"]

NEEDED_PROGRAMS: Mapping[str, str] = {"nft": "nftables", "ip": "iproute2", "sh": "dash", "mkdir": "coreutils"}
"""Programs that every host must have, and the Debian package that contains each."""

_WHICH_ARE_MISSING = "import shutil, sys; print(*(name for name in sys.argv[1:] if shutil.which(name) is None))"
"""Run by the host's Python, which also runs the agent, because there may be no shell."""

_MIN_PYTHON = (3, 11)

_REACH_TIMEOUT_S = 5.0

_NOBODY = "192.0.2.1"
"""An address that no machine has: it is reserved for documentation (RFC 5737)."""


class RemoteCluster(AgentCluster):
    """Data and logs of each host are fetched to `work_dir/<host>` when the cluster stops, or earlier by `fetch`."""

    _owns_files_of_names = False
    """Whether /etc/hosts and the other files of names are a host's own and end with it, so that we may change them."""

    _addresses_before: Mapping[str, str]
    """Machine -> output of `ip -json address` when its network was prepared."""

    _unfetched: set[str]
    """Hosts whose files could not be fetched last time."""

    def __init__(self, **given: Unpack[ClusterArguments]) -> None:
        super().__init__(**given)
        self._unfetched = set()

    @abstractmethod
    def _agent_dir(self, machine: str) -> str:
        """The directory of the agent on a machine."""

    @abstractmethod
    def _unreachable_hint(self) -> str:
        """What the operator can do if the clients cannot reach a host's address."""

    async def _learn_addresses(self) -> None:
        """Find out the hosts' addresses, if that takes asking the hosts. Raises ClusterUnavailable."""
        return

    async def _check_machines(self) -> None:
        await all_of(self._check_machine(machine) for machine in self._machines)
        await self._learn_addresses()
        await all_of(self._check_sends_from(machine) for machine in self._machines)
        await all_of(self._check_reachable(machine) for machine in self._machines)

    async def _check_machine(self, machine: str) -> None:
        link = self._links[machine]
        hello = await link.greet()
        if tuple(hello["python"][:2]) < _MIN_PYTHON:
            version = ".".join(map(str, hello["python"]))
            raise ClusterUnavailable(f"{machine} has Python {version}: 3.11 or newer is needed")
        _, missing, _ = await link.run([link.python, "-c", _WHICH_ARE_MISSING, *NEEDED_PROGRAMS])
        packages = [NEEDED_PROGRAMS[name] for name in missing.split()]
        if packages:
            names = " ".join(packages)
            raise ClusterUnavailable(f"{machine} lacks {names}: {self._how_to_add(names)} (apt-get install {names})")
        hosts = [host for host in self._all_hosts if self._machine(host) == machine]
        paths = [path for host in hosts for path in (self.data_dir(host), self._log_dir(host))]
        await self.shell.run(machine, ["mkdir", "-p", *paths])

    def _how_to_add(self, packages: str) -> str:
        """What to do about Debian packages that a machine lacks."""
        return f"run {host_file(PROVISION)} there"

    async def _ipv6_of_others(self) -> Mapping[str, str]:
        self._addresses_before = await self._shown_addresses()
        return {
            machine: f"ip6 saddr {{ {', '.join(sorted(their))} }}"
            for machine, their in addresses_of_others(await self._shown_addresses("-6")).items()
        }

    async def _further_of_others(self) -> Mapping[str, Collection[str]]:
        known = {self._address(machine) for machine in self._machines}
        others = addresses_of_others(await self._shown_addresses("-4"))
        return {machine: their - known for machine, their in others.items() if their - known}

    async def _addresses_gained(self) -> Mapping[str, Collection[str]]:
        return addresses_gained(self._addresses_before, await self._shown_addresses())

    async def _shown_addresses(self, *family: str) -> dict[str, str]:
        argv = ["ip", "-json", *family, "address"]
        shown = await asyncio.gather(*(self.shell.run(machine, argv) for machine in self._machines))
        return dict(zip(self._machines, shown, strict=True))

    async def _check_sends_from(self, machine: str) -> None:
        """Check that a machine sends to the others from its own address, because cuts match the source address."""
        own = self._address(machine)
        others = [self._address(other) for other in self._machines if other != machine]
        routes = 'for address; do ip -4 -oneline route get "$address"; done'
        _, shown, _ = await self.agent(machine).run(["sh", "-c", routes, "sh", *others])
        if (other := sends_from_another(shown, own)) is not None:
            raise ClusterUnavailable(
                f"{machine} sends to the other hosts from {other}, not from its address {own}, so cuts would miss what "
                f"it sends: set its address to {other}, or fix its routes to send from {own}"
            )

    async def _check_reachable(self, machine: str) -> None:
        """Check that a host answers the harness on a port of the run, if only by refusing: the clients run here."""
        if not self._ports:
            return
        address, port = self._address(machine), min(self._ports)
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address, port)
        except ConnectionRefusedError:
            return
        except (OSError, TimeoutError):
            hint = self._unreachable_hint()
            raise ClusterUnavailable(f"{machine} does not answer at {address}:{port} from here: {hint}") from None
        writer.close()
        raise ClusterUnavailable(f"port {port} of {machine} ({address}) is in use: stop the program that listens there")

    async def _collect(self) -> list[Exception]:
        return await self.fetch()

    async def fetch(self, hosts: Collection[str] | None = None) -> list[Exception]:
        """Copy the data and logs of these hosts, or all, to `work_dir/<host>`; returns what went wrong. If a host's
        data cannot be copied completely, none is left: a part would be taken for all that the host had."""

        async def fetch_one(host: str) -> None:
            local = os.path.join(self._work_dir, host)
            data = os.path.join(local, "data")
            self._unfetched.add(host)
            try:
                await self.agent(host).request("hello")  # a silent host must not cost the long timeout for packing
                await fetch_directory(self.agent(host), self.data_dir(host), data)
            except BaseException:
                shutil.rmtree(data, ignore_errors=True)
                raise
            await fetch_directory(self.agent(host), self._log_dir(host), local)
            self._unfetched.discard(host)

        outcomes = await asyncio.gather(*map(fetch_one, hosts or self._all_hosts), return_exceptions=True)
        return [outcome for outcome in outcomes if isinstance(outcome, Exception)]

    def _named_host(self, host: str) -> NamedHost:
        others = {other: self._address(other) for other in self._all_hosts if other != host}
        # One address per host, because hosts may share a machine.
        listen = f"127.0.53.{1 + self._all_hosts.index(host)}"
        return NamedHost(
            self.agent(host), listen=listen, own=self._address(host), names=others, unused=_NOBODY,
            owns_files=self._owns_files_of_names,
        )  # fmt: skip

    def _host_dir(self, host: str) -> str:
        return os.path.join(self._agent_dir(self._machine(host)), host)

    def _log_dir(self, host: str) -> str:
        return os.path.join(self._host_dir(host), "logs")

    def data_dir(self, host: str) -> str:
        """The data directory of a host, on that host. Raises KeyError for an unknown host."""
        if host not in self._all_hosts:
            raise KeyError(host)
        return os.path.join(self._host_dir(host), "data")

    def local_path(self, host: str, path: str) -> str:
        """The local copy of a path below a host's data directory, once fetched: below `work_dir/<host>/data`.

        Raises ValueError for any other path, since it is not fetched.
        """
        relative = os.path.relpath(path, self.data_dir(host))
        if relative.split(os.sep)[0] == os.pardir:
            raise ValueError(f"{path} of {host} is not in its data directory, so it is not fetched")
        return os.path.normpath(os.path.join(self._work_dir, host, "data", relative))

    def _true_dir(self, host: str) -> str:
        """A host's directory as the host itself resolves it."""
        return os.path.join(self.agent(host).directory, host)

    def _true_data(self, host: str) -> str:
        return os.path.join(self._true_dir(host), "data")

    def _file_system_place(self, host: str) -> FileSystemPlace:
        return FileSystemPlace(os.path.join(self._true_dir(host), "disk.img"), self._true_data(host))

    def _shim_place(self, host: str, *, undo_inside: bool) -> ShimPlace:
        directory, data_path = self._true_dir(host), self._true_data(host)
        undo_path = os.path.join(data_path, UNDO_INSIDE) if undo_inside else os.path.join(directory, "undo")
        return ShimPlace(
            library_path=os.path.join(directory, "faults.so"),
            launcher_path=os.path.join(directory, "launcher.pyz"),
            control_path=os.path.join(directory, CONTROL_FILE),
            data_path=data_path,
            undo_path=undo_path if self._tracks_writes else None,
        )


def sends_from_another(shown: str, own: str) -> str | None:
    """The address that a machine sends from if that is not its `own`, by the output of `ip -oneline route get` for each
    of the others there; None if it is. Routes to the machine itself and missing routes are ignored."""
    routes = [line for line in shown.splitlines() if not line.startswith("local ")]
    found = [match[1] for line in routes if (match := re.search(r" src ([0-9.]+)", line)) is not None]
    return next((address for address in found if address != own), None)


def addresses_gained(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, set[str]]:
    """Machine -> addresses that it has now and did not have before, by the output of `ip -json address`. Those of new
    devices do not count: a container's device, or its bridge, leads to no other machine."""
    found = {}
    for machine, output in now.items():
        known = _addresses_by_device(before.get(machine, ""))
        had = set[str]().union(*known.values())
        found[machine] = {
            address for device, own in _addresses_by_device(output).items() if device in known for address in own - had
        }
    return {machine: own for machine, own in found.items() if own}


def _addresses_by_device(shown: str) -> dict[str, set[str]]:
    """Device name -> its addresses, except those of host scope."""
    found = dict[str, set[str]]()
    for device in json.loads(shown or "[]"):
        own = found.setdefault(str(device.get("ifname")), set())
        infos = device.get("addr_info", ())
        own.update(str(info["local"]) for info in infos if "local" in info and info.get("scope") != "host")
    return found


def addresses_of_others(shown: Mapping[str, str]) -> dict[str, set[str]]:
    """Machine -> the others' addresses, by the output of `ip -json address` on each; no entry if the others have none.
    Addresses that the machine has itself are left out."""
    found = dict[str, set[str]]()
    for machine, output in shown.items():
        found[machine] = set[str]().union(*_addresses_by_device(output).values())
    others = {machine: set[str]().union(*found.values()) - own for machine, own in found.items()}
    return {machine: their for machine, their in others.items() if their}
