"""Clocks, disks and links of a simulated cluster as a nemesis acts on them (nemesis.target)."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from harness.clusters.sim.disk import CHANGED, READ, SYNC, WRITE, SimDisk, flipped_key
from harness.clusters.sim.process_disk import Operation, ProcessDisk
from nemesis.mechanisms.bit_flip import FlippedBits
from nemesis.mechanisms.undo_log import POWER_MODELS
from nemesis.target import (
    BitFlipped,
    ClockReading,
    ClockSkew,
    DiskFault,
    DiskProbe,
    DiskStep,
    FaultMet,
    Link,
    LinkMeasure,
    LinkShape,
    PowerCut,
)
from nemesis.words import plural

if TYPE_CHECKING:
    from harness.clusters.sim.host import SimHost
    from harness.clusters.sim.lane import Lane
    from harness.clusters.sim.loop import SimLoop
    from harness.clusters.sim.network import SimNetwork

__all__ = ["DISK_ABILITIES", "SimClocks", "SimDisks", "SimLinks"]

PROBE_NAME = ".disk-probe"
"""The small file that a disk probe writes and then removes."""

PACKET_INTERVAL_S = 0.001
"""Interval between two packets of a measurement: longer than a healthy link takes, so that only bad ones reorder."""


class SimClocks:
    """See nemesis.target.Clocks."""

    def __init__(self, hosts: Mapping[str, SimHost]) -> None:
        self._hosts = hosts
        self._begun: dict[str, dict[str, tuple[bool, int]]] = {}
        """fault -> host -> whether it skews the monotonic clock, and how often that clock had been read before"""

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        """Skew the clocks of hosts. Raises KeyError for an unknown host, ValueError for an impossible rate."""
        for host, skew in skews.items():
            self._hosts[host].clock.skew(fault_id, skew)
        self._begun[fault_id] = {
            host: (skew.affects_monotonic, self._reads(host, skew.affects_monotonic)) for host, skew in skews.items()
        }

    def _reads(self, host: str, of_monotonic: bool) -> int:
        clock = self._hosts[host].clock
        return clock.skewed_monotonic_reads if of_monotonic else clock.skewed_reads

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent."""
        self._begun.pop(fault_id, None)
        for host in self._hosts.values():
            host.clock.release(fault_id)

    async def release_all(self) -> None:
        """Undo every skew. Idempotent."""
        for host in self._hosts.values():
            host.clock.release_all()

    def mechanism(self, host: str) -> str:
        """What skews the clocks."""
        return "the simulated clock"

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        """None, since a simulated process has no clock other than its host's."""
        return None

    async def read(
        self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0, timeout_s: float
    ) -> Sequence[ClockReading]:
        """Read the host's clocks, the only ones that a process there can read."""
        readings = [self._read(host)]
        for pause_s in pauses_s:
            offsets_ms = [reading.offset_ms for reading in readings]
            if 0 < apart_ms <= max(offsets_ms) - min(offsets_ms):
                break
            await asyncio.sleep(pause_s)
            readings.append(self._read(host))
        return readings

    def _read(self, host: str) -> ClockReading:
        clock = self._hosts[host].clock
        now_s = asyncio.get_running_loop().time()
        return ClockReading(clock.offset_ms, 0.0, clock.shown_monotonic_ns() / 1e9, now_s)

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the processes of each host have read the clock that a fault skews since it began."""
        return {
            host: FaultMet(None, self._reads(host, of_monotonic) - before)
            for host, (of_monotonic, before) in self._begun.get(fault_id, {}).items()
        }


class _Uncounted(SimDisk):
    """A host's disk as the harness itself uses it: the same state, but nothing is counted."""

    is_counted = False

    def __init__(self, device: SimDisk) -> None:
        self.__dict__ = device.__dict__


class _ProbeDisk(ProcessDisk):
    """A disk for a probe, which does not end with the host's processes: without `give_up`, an operation under way when
    the power fails would wait forever."""

    def __init__(self, device: SimDisk, loop: SimLoop, lane: Lane) -> None:
        super().__init__(_Uncounted(device), loop, lane)
        self._operations: list[Operation] = []

    @property
    def is_busy(self) -> bool:
        return any(not operation.is_done for operation in self._operations)

    def new_operation(self) -> Operation:
        operation = super().new_operation()
        self._operations.append(operation)
        return operation

    def give_up(self) -> None:
        """Fail whatever is under way, because the power has failed."""
        for operation in self._operations:
            if not operation.is_done:
                operation.finish(error=OSError(errno.EIO, "the power was cut"))


class SimDisks:
    """See nemesis.target.Disks. `directories` maps a host to the directory of its data."""

    def __init__(self, loop: SimLoop, hosts: Mapping[str, SimHost], directories: Mapping[str, str]) -> None:
        self._loop = loop
        self._hosts = hosts
        self._directories = directories
        self._faults: dict[str, dict[str, DiskFault]] = {}
        self._begun: dict[str, dict[str, tuple[int, bool]]] = {}
        """fault -> host -> how often its kind had been met when it began, and whether an operation waited already"""
        self._at_cut: dict[str, int] = {}
        """host -> how many changes processes had made when its power was last cut"""
        self._lost: dict[str, dict[str, PowerCut]] = {}
        self._flipped = FlippedBits()
        self._abandoned: dict[asyncio.Task[Any], None] = {}
        """Probe steps that timed out; they end when the disk lets them, or when its power fails."""
        self._probes: dict[str, list[_ProbeDisk]] = {}

    async def impair(self, fault_id: str, faults: Mapping[str, DiskFault]) -> None:
        """Put disk faults in force. Raises KeyError for an unknown host, ValueError for an unknown kind."""
        for host, fault in faults.items():
            if host not in self._hosts:
                raise KeyError(host)
            if fault.kind not in _EFFECTS:
                raise ValueError(f"a simulated disk has no fault {fault.kind!r}; it has: {', '.join(_EFFECTS)}")
        self._faults[fault_id] = dict(faults)
        self._begun[fault_id] = {
            host: (self._noted(host, fault.kind), self._hosts[host].disk.waits(_EFFECTS[fault.kind].get("stall", ())))
            for host, fault in faults.items()
        }
        self._apply()

    def _noted(self, host: str, kind: str) -> int:
        """How often processes of a host have met a kind of fault."""
        effects = _EFFECTS[kind]
        keys = [f"{effect}-{operation}" for effect in effects for operation in effects[effect]] or [kind]
        return sum(self._hosts[host].disk.noted.get(key, 0) for key in keys)

    async def release(self, fault_id: str) -> None:
        """Undo one fault; what a power cut took stays lost. Idempotent."""
        self._lost.pop(fault_id, None)
        self._begun.pop(fault_id, None)
        self._put_back(fault_id)
        if self._faults.pop(fault_id, None) is not None:
            self._apply()

    async def release_all(self) -> None:
        """Undo every fault. Idempotent."""
        self._lost.clear()
        for fault_id in self._flipped.faults():
            self._put_back(fault_id)
        self._faults.clear()
        self._apply()

    def _apply(self) -> None:
        """Put every disk in the state that all faults together call for."""
        for name, host in self._hosts.items():
            disk = host.disk
            faults = [faults[name] for faults in self._faults.values() if name in faults]
            kinds = {fault.kind for fault in faults}
            stalled = {kind for fault_kind in kinds for kind in _EFFECTS[fault_kind].get("stall", ())}
            failing = {kind for fault_kind in kinds for kind in _EFFECTS[fault_kind].get("fail", ())}
            disk.delay_s = sum(fault.delay_ms for fault in faults if fault.kind == "slow") / 1000
            disk.capacity_bytes = None
            if "full" in kinds:
                disk.fill_up()
            for kind in (READ, WRITE, SYNC):
                disk.fail(kind, 1.0 if kind in failing else 0.0)
            disk.stall(sorted(stalled))
            disk.unstall([kind for kind in (WRITE, SYNC) if kind not in stalled])

    async def expect_cut(self, fault_id: str, hosts: Collection[str]) -> float:
        """0, since a simulated disk knows at any moment what is not synced."""
        return 0.0

    async def cut_power(self, fault_id: str, host: str, *, kind: str = "ext4", seed: int = 0) -> PowerCut:
        """Lose what `host` has not synced, by one of `POWER_MODELS`; the disk's own random stream is used, not `seed`.
        Raises ValueError for another kind, RuntimeError while its replica runs."""
        if kind not in POWER_MODELS:
            raise ValueError(f"a simulated power cut is one of {', '.join(POWER_MODELS)}, not {kind!r}")
        if self._hosts[host].is_running:
            raise RuntimeError(f"the power of {host} cannot be cut while its replica runs: it would not notice")
        lost_bytes = self._hosts[host].disk.power_fail(kind)
        for probe in self._probes.pop(host, ()):
            probe.give_up()
        changes = self._hosts[host].disk.noted.get(CHANGED, 0)
        recorded, self._at_cut[host] = changes - self._at_cut.get(host, 0), changes
        detail = f"{plural(lost_bytes, 'byte')}, of {plural(recorded, 'change')} since the last power cut"
        cut = PowerCut(lost_operations=None, lost_bytes=lost_bytes, detail=detail, recorded=recorded)
        self._lost.setdefault(fault_id, {})[host] = cut
        return cut

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        """What the power cuts of a fault took, by host; until it is released."""
        return self._lost.get(fault_id, {})

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        """Flip a bit at rest. Raises RuntimeError while the replica runs, and when there is no such file."""
        if self._hosts[host].is_running:
            raise RuntimeError(f"cannot flip a bit at rest on {host} while its replica runs")
        disk = self._hosts[host].disk
        pattern = f"{self._directories[host]}/{files}"
        found = {path: len(disk.inode(path).cache.rstrip(b"\0")) for path in disk.paths() if fnmatch(path, pattern)}
        path = max(found, key=lambda each: found[each], default=None)
        if path is None or not found[path]:
            raise RuntimeError(f"{host} has no {files} to flip a bit in")
        offset = min(int(found[path] * place), found[path] - 1)
        before = disk.inode(path).cache[offset]
        disk.flip_bit(path, offset, bit)
        after = disk.inode(path).cache[offset]
        disk.watched.setdefault(disk.inode(path), {})[fault_id] = (offset, before ^ after, (before ^ after) & after)
        flipped = BitFlipped(path, offset, before, after)
        self._flipped.add(fault_id, host, flipped)
        return flipped

    def flipped(self, fault_id: str) -> Mapping[str, BitFlipped]:
        """The bits that a fault has flipped, by host."""
        return self._flipped.of(fault_id)

    def _put_back(self, fault_id: str) -> None:
        for host, flipped in self._flipped.of(fault_id).items():
            disk = self._hosts[host].disk
            way_back, at = self._flipped.way_back(fault_id, host), flipped.offset
            self._flipped.forget(fault_id, host)
            for bits in disk.watched.values():
                bits.pop(fault_id, None)
            disk.watched = {inode: bits for inode, bits in disk.watched.items() if bits}
            disk.noted.pop(flipped_key(fault_id), None)
            inode = disk.get(flipped.path)
            if inode is not None and way_back is not None and inode.cache[at : at + 1] == bytes((way_back.after,)):
                inode.flip_bit(at, (flipped.before ^ flipped.after).bit_length() - 1)

    async def probe(self, host: str, *, timeout_s: float) -> DiskProbe:
        """Write, sync and read a small file beside the replica's data."""
        disk = _ProbeDisk(self._hosts[host].disk, self._loop, self._loop.root)
        self._probes.setdefault(host, []).append(disk)
        try:
            return await self._probe(host, disk, timeout_s)
        finally:
            self._probes[host] = [probe for probe in self._probes[host] if probe.is_busy]

    async def _probe(self, host: str, disk: ProcessDisk, timeout_s: float) -> DiskProbe:
        path = os.path.join(self._directories[host], PROBE_NAME)
        if self._hosts[host].disk.get(path) is not None:  # left by a probe that the disk resumed after its timeout
            self._hosts[host].disk.unlink(path)
        deadline_s = self._loop.time() + timeout_s

        async def write() -> None:
            disk.make_dirs(self._directories[host])
            await disk.open(path).write(0, b"probe")

        async def sync() -> None:
            await disk.open(path).sync()

        async def read() -> None:
            disk.read_file(path)

        steps = {"write": DiskStep("not tried"), "sync": DiskStep("not tried"), "read": DiskStep("not tried")}
        for name, work in (("write", write), ("sync", sync), ("read", read)):
            steps[name] = await self._step(asyncio.ensure_future(work()), deadline_s)
            if steps[name].outcome == "no answer":
                break
        if self._hosts[host].disk.get(path) is not None:
            self._hosts[host].disk.unlink(path)
        return DiskProbe(host=host, **steps)

    async def _step(self, task: asyncio.Task[None], deadline_s: float) -> DiskStep:
        began_s = self._loop.time()
        await asyncio.wait((task,), timeout=max(0.0, deadline_s - began_s))
        took_s = self._loop.time() - began_s
        if not task.done():
            self._abandoned[task] = None
            task.add_done_callback(self._forget)
            return DiskStep("no answer", took_s)
        error = task.exception()
        if error is None:
            return DiskStep("ok", took_s)
        if not isinstance(error, OSError):
            raise error
        return DiskStep(errno.errorcode.get(error.errno or 0, str(error)), took_s)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.pop(task, None)
        if not task.cancelled():
            task.exception()

    def mechanism(self, host: str) -> str:
        """What makes replicas meet disk faults."""
        return "the simulated disk"

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None, since a simulated process has no disk other than its host's."""
        return None

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the processes of each host have met a fault since it began; of flipped bits, how often they have
        read one."""
        faults = self._faults.get(fault_id, {})
        found = {}
        for host, fault in faults.items():
            before, has_waited = self._begun[fault_id][host]
            met = self._noted(host, fault.kind) - before
            # An operation that waited before may wait for this fault as well, or belong to a process killed since.
            found[host] = FaultMet(None, met if met or not has_waited else None)
        for host in self._flipped.of(fault_id):
            found[host] = FaultMet(None, self._hosts[host].disk.noted.get(flipped_key(fault_id), 0))
        return found


_EFFECTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "stall-fsync": {"stall": (SYNC,)},
    "stall": {"stall": (WRITE, SYNC)},
    "slow": {},
    "full": {},
    "error-write": {"fail": (WRITE,)},
    "error-fsync": {"fail": (SYNC,)},
    "error-read": {"fail": (READ,)},
}
"""Kind of fault -> the operations that it stalls or makes fail."""

DISK_ABILITIES = (*_EFFECTS, "power", "flip")
"""The nemesis.target.ABILITIES that a simulated disk has."""


class SimLinks:
    """See nemesis.target.Links."""

    mechanism = "the simulated network"

    def __init__(self, loop: SimLoop, network: SimNetwork) -> None:
        self._loop = loop
        self._network = network

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Shape directed links. Raises ValueError for an unknown link."""
        self._network.shape(fault_id, shapes)

    async def release(self, fault_id: str) -> None:
        """Undo one fault's shaping. Idempotent."""
        self._network.unshape(fault_id)

    async def release_all(self) -> None:
        """Undo all shaping. Idempotent."""
        self._network.unshape_all()

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Send single packets along each link, one every PACKET_INTERVAL_S."""
        measures = [asyncio.ensure_future(self._measure(link, count, size_bytes, timeout_s)) for link in links]
        return {measure.link: measure for measure in await asyncio.gather(*measures)}

    async def _measure(self, key: Link, count: int, size_bytes: int, timeout_s: float) -> LinkMeasure:
        link = self._network.link(*key)
        began_s = self._loop.time()
        delays_ms: dict[int, float] = {}
        arrived: list[int] = []
        duplicates = 0
        last_arrival_s = began_s
        outstanding = 0
        idle = asyncio.Event()

        def arrive(number: int, sent_s: float) -> None:
            nonlocal duplicates, last_arrival_s, outstanding
            outstanding -= 1
            if outstanding == 0:
                idle.set()
            if link.cut_by or not self._network.has_power(link.destination):
                return
            last_arrival_s = self._loop.time()
            if number in delays_ms:
                duplicates += 1
                return
            delays_ms[number] = (self._loop.time() - sent_s) * 1000
            arrived.append(number)

        for number in range(count):
            now_s = self._loop.time()
            if self._network.has_power(link.source):
                for when_s in link.packet_arrivals_s(now_s, size_bytes):
                    outstanding += 1
                    idle.clear()
                    self._loop.event_at(when_s, arrive, number, now_s)
            await asyncio.sleep(PACKET_INTERVAL_S)
        if outstanding:
            try:
                async with asyncio.timeout(timeout_s):
                    await idle.wait()
            except TimeoutError:
                pass  # what has not arrived by now counts as lost
        newest = -1
        out_of_order = 0
        for number in arrived:
            out_of_order += number < newest
            newest = max(newest, number)
        return LinkMeasure(
            link=key,
            sent=count,
            received=len(arrived),
            duplicates=duplicates,
            out_of_order=out_of_order,
            delays_ms=[delays_ms[number] for number in sorted(delays_ms)],
            seconds=last_arrival_s - began_s,
        )
