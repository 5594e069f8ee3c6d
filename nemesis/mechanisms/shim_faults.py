"""Clocks and disks of hosts, by way of the shim: see nemesis.target.Clocks and Disks, and nemesis.mechanisms.shim."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nemesis.mechanisms.bit_flip import FLIP_SCRIPT, flip_arguments, parse_flip, restore_arguments
from nemesis.mechanisms.disk_probe import PROBE_SCRIPT, parse_probe
from nemesis.mechanisms.hosts import HostAccess
from nemesis.mechanisms.shim import CONTROL_BYTES, Counters, HostFaults, parse_counters, shim_environment
from nemesis.mechanisms.undo_log import POWER_MODELS, take_back_script
from nemesis.target import BitFlipped, ClockSkew, DiskFault, DiskProbe, PowerCut

__all__ = ["ShimClocks", "ShimControls", "ShimDisks", "ShimPlace"]

MONOTONIC_MARGIN_NS = 200_000_000
"""How much later than planned a change may reach the host; a fast monotonic clock is released this far ahead."""

REACH_TIMEOUT_S = 10.0
UNDO_TIMEOUT_S = 25.0
FLIP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimPlace:
    """Where the shim and its files are on one host. `undo_path` is None where nothing is kept track of; `preloaded`
    is what is preloaded into programs there anyway."""

    library_path: str
    control_path: str
    data_path: str
    undo_path: str | None = None
    preloaded: str | None = None

    def environment(self) -> dict[str, str]:
        """What to add to the environment of the host's replica."""
        return shim_environment(
            self.library_path, self.control_path, self.data_path, undo_path=self.undo_path, preloaded=self.preloaded
        )

    def probe_environment(self) -> dict[str, str]:
        """What to add to the environment of a probe: the same faults, nothing kept track of."""
        return shim_environment(self.library_path, self.control_path, self.data_path, preloaded=self.preloaded)


class ShimControls:
    """The control files of all hosts, and what is in force on each. The files exist before replicas start."""

    def __init__(self, access: HostAccess, places: Mapping[str, ShimPlace]) -> None:
        self.access = access
        self.places = dict(places)
        self.faults = {host: HostFaults() for host in places}
        self._locks = {host: asyncio.Lock() for host in places}

    def initial_content(self, host: str) -> bytes:
        """What the control file of a host begins as."""
        return self.faults[host].pack().ljust(CONTROL_BYTES, b"\0")

    def require_known(self, hosts: Collection[str]) -> None:
        """Raises ValueError for a host that has no control file."""
        unknown = set(hosts) - self.places.keys()
        if unknown:
            raise ValueError(f"no replica runs on {', '.join(sorted(unknown))}")

    async def write(self, host: str) -> None:
        """Bring what is in force to the host."""
        async with self._locks[host]:
            await self.access.overwrite(host, self.places[host].control_path, self.faults[host].pack())

    async def counters(self, host: str) -> Counters:
        """How often the host's processes felt disk faults so far."""
        return parse_counters(await self.access.read(host, self.places[host].control_path, CONTROL_BYTES))

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None when process `pid` of the host has mapped the shim and its control file."""
        if pid is None:
            return f"the replica of {host} is down"
        place = self.places[host]
        status, maps, errors = await self.access.run(host, ["cat", f"/proc/{pid}/maps"], timeout_s=REACH_TIMEOUT_S)
        if status != 0:
            return f"the replica of {host} cannot be looked into: {errors.strip() or status}"
        if place.library_path not in maps or place.control_path not in maps:
            return f"the replica of {host} has not loaded the fault shim (is it statically linked?)"
        return None


class ShimClocks:
    """See nemesis.target.Clocks."""

    def __init__(self, controls: ShimControls) -> None:
        self._controls = controls
        self._hosts: dict[str, tuple[str, ...]] = {}

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        """Skew clocks. Raises ValueError for an unknown host or an impossible skew, ShimError for too many."""
        self._controls.require_known(skews)
        self._hosts[fault_id] = tuple(skews)

        async def set_one(host: str, skew: ClockSkew) -> None:
            wall_ns, monotonic_ns = await self._controls.access.now(host)
            self._controls.faults[host].add_skew(fault_id, skew, wall_ns=wall_ns, monotonic_ns=monotonic_ns)
            await self._controls.write(host)

        await asyncio.gather(*(set_one(host, skew) for host, skew in skews.items()))

    async def release(self, fault_id: str) -> None:
        """Undo one fault."""

        async def release_one(host: str) -> None:
            _, monotonic_ns = await self._controls.access.now(host)
            self._controls.faults[host].remove_skew(fault_id, monotonic_ns=monotonic_ns, margin_ns=MONOTONIC_MARGIN_NS)
            await self._controls.write(host)

        await asyncio.gather(*(release_one(host) for host in self._hosts.get(fault_id, ())))
        self._hosts.pop(fault_id, None)

    async def release_all(self) -> None:
        """Undo every skew."""
        for fault_id in list(self._hosts):
            await self.release(fault_id)


class ShimDisks:
    """See nemesis.target.Disks."""

    def __init__(self, controls: ShimControls) -> None:
        self._controls = controls
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._lost: dict[str, dict[str, PowerCut]] = {}
        self._flipped: dict[str, dict[str, BitFlipped]] = {}
        self._forgiven: dict[str, int] = {}
        """host -> how often its log had overflowed when its account began anew"""

    async def impair(self, fault_id: str, faults: Mapping[str, DiskFault]) -> None:
        """Impair disks. Raises ValueError for an unknown host or kind."""
        self._controls.require_known(faults)
        for host, fault in faults.items():
            self._controls.faults[host].add_disk_fault(fault_id, fault)
        self._hosts[fault_id] = tuple(faults)
        await asyncio.gather(*(self._controls.write(host) for host in faults))

    async def cut_power(self, fault_id: str, host: str, *, kind: str = POWER_MODELS[0], seed: int = 0) -> PowerCut:
        """Take back what the host's replica wrote and did not sync, by a model of `POWER_MODELS`. Raises
        RuntimeError, ValueError for another model."""
        if kind not in POWER_MODELS:
            raise ValueError(f"what is not synced is not taken back by the model {kind!r}")
        place = self._controls.places[host]
        if place.undo_path is None:
            raise RuntimeError(f"what the replica of {host} writes is not kept track of in this run")
        if (await self._controls.counters(host)).undo_overflow > self._forgiven.get(host, 0):
            raise RuntimeError(f"the replica of {host} wrote more than could be kept track of")
        access = self._controls.access
        argv = [access.python(host), "-I", "-S", "-", place.undo_path, place.data_path, kind, str(seed)]
        status, output, errors = await access.run(host, argv, stdin=take_back_script(), timeout_s=UNDO_TIMEOUT_S)
        words = output.split()
        if status != 0 or len(words) != 3:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            raise RuntimeError(f"what {host} had not synced could not be taken back: {said}")
        operations, size_bytes, files = map(int, words)
        cut = PowerCut(operations, size_bytes, f"{operations} operations, {size_bytes:,} bytes in {files} files")
        self._lost.setdefault(fault_id, {})[host] = cut
        return cut

    async def begin_account(self, host: str) -> None:
        """Everything on the host's disk is durable and its undo log is empty: what could not be kept track of before
        does not matter any more. Its replica must be down."""
        self._forgiven[host] = (await self._controls.counters(host)).undo_overflow

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        """What the power cuts of a fault took."""
        return dict(self._lost.get(fault_id, {}))

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        """Flip a bit of a file at rest. Raises RuntimeError when there is none to flip."""
        output = await self._flip(host, flip_arguments(self._controls.places[host].data_path, files, place, bit))
        flipped = parse_flip(output)
        self._flipped.setdefault(fault_id, {})[host] = flipped
        return flipped

    def flipped(self, fault_id: str) -> Mapping[str, BitFlipped]:
        """The bits that a fault has flipped, by host."""
        return dict(self._flipped.get(fault_id, {}))

    async def _flip(self, host: str, arguments: list[str]) -> str:
        access = self._controls.access
        argv = [access.python(host), "-I", "-S", "-", *arguments]
        status, output, errors = await access.run(host, argv, stdin=FLIP_SCRIPT, timeout_s=FLIP_TIMEOUT_S)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            raise RuntimeError(f"no bit of {host} could be flipped: {said}")
        return output

    async def release(self, fault_id: str) -> None:
        """Undo one fault."""
        self._lost.pop(fault_id, None)
        flipped = self._flipped.get(fault_id, {})
        for host in list(flipped):
            await self._flip(host, restore_arguments(flipped[host]))
            del flipped[host]
        self._flipped.pop(fault_id, None)
        hosts = self._hosts.get(fault_id, ())
        for host in hosts:
            self._controls.faults[host].remove_disk_fault(fault_id)
        await asyncio.gather(*(self._controls.write(host) for host in hosts))
        self._hosts.pop(fault_id, None)

    async def release_all(self) -> None:
        """Undo every fault."""
        for fault_id in [*self._hosts, *(each for each in self._flipped if each not in self._hosts)]:
            await self.release(fault_id)

    async def probe(self, host: str, *, timeout_s: float) -> DiskProbe:
        """Write, sync and read a file in the data's directory, through the same shim."""
        access, place = self._controls.access, self._controls.places[host]
        _, output, _ = await access.run(
            host,
            [access.python(host), "-I", "-S", "-", place.data_path],
            stdin=PROBE_SCRIPT,
            timeout_s=timeout_s,
            environment=place.probe_environment(),
        )
        return parse_probe(host, output, waited_s=timeout_s)

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None when the process has the shim."""
        return await self._controls.reaches(host, pid)

    async def felt(self, host: str) -> Counters:
        """How often the host's processes felt disk faults so far."""
        return await self._controls.counters(host)
