"""A target whose replicas, clocks, disks and links are values, with switches that make faults do nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from nemesis.protocol import Injection
from nemesis.target import (
    DOWN,
    PAUSED,
    RUNNING,
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
    NameFault,
    NameLookup,
    PowerCut,
    ProcessMember,
    ProcessView,
    ResourceLimit,
    ResourceUse,
    SlowClient,
    UnreadAnswers,
)


class FakeProcesses:
    """`immune` hosts are not affected; `stuck` ones are not started again; `dead` ones exit as soon as they start."""

    def __init__(self) -> None:
        self.down: dict[str, set[str]] = {}
        self.paused: dict[str, set[str]] = {}
        self.crashing: dict[str, set[str]] = {}
        self.signals: list[str] = []
        self.immune: set[str] = set()
        self.stuck: set[str] = set()
        self.dead: set[str] = set()
        self.ended: set[str] = set()
        self.starts: dict[str, int] = {}
        self.pids: Sequence[int] = (1,)
        """Pids of the programs of each host."""
        self.astray: set[str] = set()
        """Hosts whose replica has a second process that faults do not reach."""
        self.waiting: dict[str, tuple[str, bool]] = {}
        """Hosts whose second process waits in the kernel: (state, whether it gets its signal before it runs on)."""
        self.deaf: set[str] = set()
        self.forced_total: Counter[str] = Counter()
        """Hosts whose replica ends only by SIGKILL."""

    async def members(self, host: str) -> Sequence[ProcessMember]:
        letter = {RUNNING: "S", PAUSED: "T", DOWN: "Z"}[self.state(host)]
        second, meets_signal = ("S", False) if host in self.astray else self.waiting.get(host, (letter, False))
        found = (ProcessMember(1, 100, letter, "main"), ProcessMember(2, 101, second, "io", meets_signal))
        return [member for member in found if member.letter != "Z"]

    async def end(self, fault_id: str, hosts: Collection[str], *, signal_name: str = "KILL") -> None:
        self.signals.append(signal_name)
        self.down[fault_id] = set(hosts)
        if signal_name == "TERM":
            self.forced_total.update(self.deaf & set(hosts))

    async def crash_loop(self, fault_id: str, hosts: Collection[str], *, up_s: float) -> None:
        assert up_s > 0
        self.crashing[fault_id] = set(hosts)

    async def pause(self, fault_id: str, hosts: Collection[str]) -> None:
        self.paused[fault_id] = set(hosts)

    async def release(self, fault_id: str) -> None:
        for host in self.down.get(fault_id, set()) - self.immune - self.stuck:
            self.starts[host] = self.starts.get(host, 1) + 1
        for held in (self.down, self.paused, self.crashing):
            held.pop(fault_id, None)

    async def release_all(self) -> None:
        for held in (self.down, self.paused, self.crashing):
            held.clear()

    async def revive(self, hosts: Collection[str]) -> Sequence[str]:
        back = sorted(self.ended & set(hosts))
        self.ended -= set(hosts)
        return back

    def state(self, host: str) -> str:
        if host in self.stuck or host in self.dead:
            return DOWN
        if host not in self.immune:
            if host in self.ended or any(host in hosts for hosts in self.down.values()):
                return DOWN
            if any(host in hosts for hosts in self.paused.values()):
                return PAUSED
        return RUNNING

    async def look(self, host: str) -> ProcessView:
        await asyncio.sleep(0.01)
        if host not in self.immune and any(host in hosts for hosts in self.crashing.values()):
            self.starts[host] = self.starts.get(host, 1) + 1
        state = self.state(host)
        starts, pids = self.starts.get(host, 1), () if state == DOWN else self.pids
        forced_total = self.forced_total[host]
        return ProcessView(host, state, starts, pids, host in self.dead, host in self.deaf, forced_total)


class FakeClocks:
    """Clocks that show what the skews imply at the loop's time."""

    def __init__(self) -> None:
        self.skews: dict[str, dict[str, tuple[ClockSkew, float]]] = {}
        self.immune: set[str] = set()
        self.wrong_by_ms: dict[str, float] = {}
        self.unreached: set[str | int | None] = set()
        """Hosts, or pids of programs on any host."""
        self.monotonic_unreached: set[str] = set()
        self.unreadable: set[str] = set()
        self.reads: int | None = 3
        self.unsure_ms = 0.01

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        now_s = asyncio.get_running_loop().time()
        self.skews[fault_id] = {host: (skew, now_s) for host, skew in skews.items() if host not in self.immune}

    async def release(self, fault_id: str) -> None:
        self.skews.pop(fault_id, None)

    async def release_all(self) -> None:
        self.skews.clear()

    def mechanism(self, host: str) -> str:
        return "the tests"

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        if monotonic and host in self.monotonic_unreached:
            return f"the monotonic clock of {host} is out of reach"
        return f"{host} is out of reach" if self.unreached & {host, pid} else None

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        return {host: FaultMet(None, self.reads) for host in self.skews.get(fault_id, ())}

    async def read(
        self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0, timeout_s: float
    ) -> Sequence[ClockReading]:
        if host in self.unreadable:
            raise RuntimeError(f"the clock of {host} is out of sight")
        readings = [self.now(host, self.unsure_ms)]
        for pause_s in pauses_s:
            offsets_ms = [reading.offset_ms for reading in readings]
            if 0 < apart_ms <= max(offsets_ms) - min(offsets_ms):
                break
            await asyncio.sleep(pause_s)
            readings.append(self.now(host, self.unsure_ms))
        return readings

    def now(self, host: str, unsure_ms: float = 1.0) -> ClockReading:
        now_s = asyncio.get_running_loop().time()
        offset_ms, monotonic_s = self.wrong_by_ms.get(host, 0.0), now_s
        for by_host in self.skews.values():
            if host not in by_host:
                continue
            skew, since_s = by_host[host]
            if skew.affects_monotonic:
                monotonic_s += (now_s - since_s) * skew.rate_ppm / 1e6
                continue
            offset_ms += skew.offset_ms + skew.gained_ms(now_s - since_s)
            if skew.strobe_period_ms and int((now_s - since_s) * 2000 / skew.strobe_period_ms) % 2:
                offset_ms += skew.strobe_ms
        return ClockReading(offset_ms, unsure_ms, monotonic_s, now_s)


class FakeDisks:
    """Disks that do what the faults say; `unreached` replicas would not be affected."""

    def __init__(self) -> None:
        self.faults: dict[str, dict[str, DiskFault]] = {}
        self.immune: set[str] = set()
        self.broken: set[str] = set()
        self.unreached: set[str | int | None] = set()
        """Hosts, or pids of programs on any host."""
        self.calls: int | None = 5
        self.calls_that_met: int | None = 5
        self.recorded: int | None = 7
        self.flipped_reads: int | None = None
        self.account_s = 0.0
        self.probes_start_s = 0.0
        self.expected: dict[str, list[str]] = {}
        self.cuts: dict[str, dict[str, PowerCut]] = {}
        self.flips: dict[str, dict[str, BitFlipped]] = {}

    async def impair(self, fault_id: str, faults: Mapping[str, DiskFault]) -> None:
        self.faults[fault_id] = dict(faults)

    async def expect_cut(self, fault_id: str, hosts: Collection[str]) -> float:
        self.expected[fault_id] = list(hosts)
        return self.account_s

    async def cut_power(self, fault_id: str, host: str, *, kind: str = "ext4", seed: int = 0) -> PowerCut:
        cut = PowerCut(3, 100, "3 unsynced operations, 100 bytes", self.recorded)
        if kind == "crash":
            cut = PowerCut(None, None, "what the kernel had not written")
        if host not in self.immune:
            self.cuts.setdefault(fault_id, {})[host] = cut
        return cut

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        return dict(self.cuts.get(fault_id, {}))

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        if host in self.broken:
            raise RuntimeError(f"{host} has no {files}")
        flipped = BitFlipped(f"/{host}/{files}", int(1000 * place), 0, 1 << bit)
        if host not in self.immune:
            self.flips.setdefault(fault_id, {})[host] = flipped
        return flipped

    def flipped(self, fault_id: str) -> Mapping[str, BitFlipped]:
        return dict(self.flips.get(fault_id, {}))

    async def release(self, fault_id: str) -> None:
        self.faults.pop(fault_id, None)
        self.cuts.pop(fault_id, None)
        self.flips.pop(fault_id, None)

    async def release_all(self) -> None:
        self.faults.clear()

    async def probe(self, host: str, *, timeout_s: float) -> DiskProbe:
        kinds = {faults[host].kind for faults in self.faults.values() if host in faults and host not in self.immune}
        delay_s = sum(f[host].delay_ms for f in self.faults.values() if host in f and host not in self.immune) / 1000
        write = sync = read = DiskStep("ok", 0.001 + delay_s)
        if host in self.broken or kinds & {"error-write", "shutdown"}:
            write = DiskStep("EIO")
        if kinds & {"full", "fill"}:
            write = DiskStep("ENOSPC")
        if "error-fsync" in kinds:
            sync = DiskStep("EIO")
        if "error-read" in kinds:
            read = DiskStep("EIO")
        if "stall-fsync" in kinds:
            sync, read = DiskStep("no answer", timeout_s), DiskStep("not tried")
        if kinds & {"stall", "freeze"}:
            write, sync, read = DiskStep("no answer", timeout_s), DiskStep("not tried"), DiskStep("not tried")
        if timeout_s < self.probes_start_s:
            write = sync = read = DiskStep("not tried")
        return DiskProbe(host, write, sync, read)

    async def reaches(self, host: str, pid: int | None) -> str | None:
        return f"{host} is out of reach" if self.unreached & {host, pid} else None

    def mechanism(self, host: str) -> str:
        return "the tests"

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        read = {host: FaultMet(None, self.flipped_reads) for host in self.flips.get(fault_id, ())}
        return read | {host: FaultMet(self.calls, self.calls_that_met) for host in self.faults.get(fault_id, ())}


class FakeResources:
    """Limits that are hit once more at each reading; `immune` replicas are not limited, `astray` ones only in part."""

    def __init__(self) -> None:
        self.faults: dict[str, Mapping[str, ResourceLimit]] = {}
        self.immune: set[str] = set()
        self.astray: set[str] = set()
        self.counts: dict[str, int] = {}
        self.is_met = True

    async def limit(self, fault_id: str, limits: Mapping[str, ResourceLimit]) -> None:
        self.faults[fault_id] = limits

    async def usage(self, host: str, kind: str) -> ResourceUse:
        limits = [of[host] for of in self.faults.values() if host in of and of[host].kind == kind]
        is_limited = bool(limits) and host not in self.immune
        self.counts[host] = self.counts.get(host, 0) + (is_limited and self.is_met)
        met = None if kind == "descriptors" else self.counts[host]
        astray = ["process 7 (io)"] if host in self.astray else []
        return ResourceUse(is_limited=is_limited, met=met, astray=astray, detail="little" if is_limited else "plenty")

    async def release(self, fault_id: str) -> None:
        self.faults.pop(fault_id, None)

    async def release_all(self) -> None:
        self.faults.clear()


class FakeClients:
    """Clients that fill the send queue of the server they are connected to; those of `immune` hosts read it all."""

    def __init__(self) -> None:
        self.faults: dict[str, Mapping[str, SlowClient]] = {}
        self.gone: set[str] = set()
        self.immune: set[str] = set()
        self.lingering = False

    async def connect(self, fault_id: str, clients: Mapping[str, SlowClient]) -> None:
        self.faults[fault_id] = clients

    async def unread(self, fault_id: str) -> Mapping[str, UnreadAnswers]:
        found = {}
        for host, client in self.faults.get(fault_id, {}).items():
            count = client.connections if fault_id not in self.gone or self.lingering else 0
            is_read = host in self.immune
            found[host] = UnreadAnswers(
                connections=count,
                stuck=0 if is_read else count,
                queued_bytes=0 if is_read else 1000 * count,
                read_bytes=9999 if is_read else 10,
                may_read_bytes=100,
            )
        return found

    async def release(self, fault_id: str) -> None:
        self.gone.add(fault_id)

    async def release_all(self) -> None:
        self.gone |= self.faults.keys()


class FakeNames:
    """A name service on each host; `immune` ones answer correctly whatever the faults say. Programs have sent `asked`
    queries, and `met_by_programs` of them were answered as the faults say."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.right = {host: f"10.0.0.{number}" for number, host in enumerate(hosts, 1)}
        self.faults: dict[str, Mapping[str, NameFault]] = {}
        self.immune: set[str] = set()
        self.unreached: set[str] = set()
        self.asked, self.met_by_programs = 3, 3

    async def disturb(self, fault_id: str, faults: Mapping[str, NameFault]) -> None:
        self.faults[fault_id] = faults

    async def look_up(self, host: str, *, timeout_s: float) -> Sequence[NameLookup]:
        mine = [of[host] for of in self.faults.values() if host in of and host not in self.immune]
        fault = mine[0] if mine else NameFault(kind="")
        found = []
        for name, right in self.right.items():
            said = {"gone": "gone", "silent": "silent", "wrong": self.right[host], "unused": "10.0.0.254"}
            if name != host:
                seconds = timeout_s if fault.kind == "silent" else fault.delay_ms / 1000
                address = said.get(fault.kind, right)
                is_host = address in self.right.values()
                found.append(NameLookup(name=name, found=address, right=right, leads_to_host=is_host, seconds=seconds))
        return found

    async def reaches(self, host: str) -> str | None:
        return f"process 7 (io) of {host} sees a different /etc/resolv.conf" if host in self.unreached else None

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        return {host: FaultMet(self.asked, self.met_by_programs) for host in self.faults.get(fault_id, ())}

    async def release(self, fault_id: str) -> None:
        self.faults.pop(fault_id, None)

    async def release_all(self) -> None:
        self.faults.clear()


class FakeLinks:
    """Links that affect exactly the share of packets that their shape says."""

    mechanism = "the tests"

    def __init__(self) -> None:
        self.shapes: dict[str, dict[Link, LinkShape]] = {}
        self.immune: set[Link] = set()
        self.dead: set[Link] = set()
        self.always: dict[Link, LinkShape] = {}

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        self.shapes[fault_id] = dict(shapes)

    async def release(self, fault_id: str) -> None:
        self.shapes.pop(fault_id, None)

    async def release_all(self) -> None:
        self.shapes.clear()

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        await asyncio.sleep(0.1)
        return {link: self._measure(link, count, size_bytes) for link in links}

    def _measure(self, link: Link, count: int, size_bytes: int) -> LinkMeasure:
        shape = self.always.get(link, LinkShape())
        for shapes in self.shapes.values():
            if link in shapes and link not in self.immune:
                shape = shapes[link].on_top_of(shape)
        arrived = 0 if link in self.dead else round(count * (1 - shape.loss_percent / 100))
        damaged = round(arrived * shape.corrupt_percent / 100)
        received = arrived - damaged
        # Packets that overtake others skip every delay.
        overtakes = round(received * shape.reorder_percent / 100)
        queued_ms = 1000 * size_bytes / shape.rate_bytes_per_s if shape.rate_bytes_per_s else 0.0
        seconds = 0.01 + (received * size_bytes / shape.rate_bytes_per_s if shape.rate_bytes_per_s else 0)
        return LinkMeasure(
            link=link,
            sent=count,
            received=received,
            duplicates=round(received * shape.duplicate_percent / 100),
            out_of_order=overtakes,
            delays_ms=[0.1 + number * queued_ms for number in range(overtakes)]
            + [0.1 + shape.delay_ms + number * queued_ms for number in range(overtakes, received)],
            seconds=seconds,
            damaged=damaged,
        )


class FaultTarget:
    """Hosts n1..nN with everything that faults can affect; `lacks` are (interface, ability) pairs that are missing."""

    def __init__(self, count: int = 5, leader: str | None = "n2") -> None:
        self.hosts: Sequence[str] = [f"n{number}" for number in range(1, count + 1)]
        self.network: Any = object()
        self.processes = FakeProcesses()
        self.clocks = FakeClocks()
        self.disks = FakeDisks()
        self.links = FakeLinks()
        self.resources = FakeResources()
        self.clients = FakeClients()
        self.names = FakeNames(self.hosts)
        self.triggers = None
        self.operator: Any = None
        self.leader = leader
        self.lacks: dict[tuple[str, str], str] = {}
        self.files = {"log": "log/*", "vote": "vote", "checkpoint": "checkpoint"}
        self.mute: set[str] = set()
        self.talkative: set[str] = set()

    def missing(self, interface: str, ability: str) -> str | None:
        return self.lacks.get((interface, ability))

    def stored_files(self, role: str) -> str | None:
        return self.files.get(role)

    async def leaders(self) -> Sequence[str]:
        return [] if self.leader is None else [self.leader]

    async def answers(self, host: str, *, timeout_s: float) -> bool:
        is_up = host in self.talkative or (host not in self.mute and self.processes.state(host) == RUNNING)
        await asyncio.sleep(0.001 if is_up else timeout_s)
        return is_up

    tells_time = True

    async def read_clock(self, host: str, *, timeout_s: float) -> ClockReading | None:
        await asyncio.sleep(0.001)
        return None if host in self.mute else self.clocks.now(host)


@pytest.fixture
def make_fault_target() -> type[FaultTarget]:
    return FaultTarget


@pytest.fixture
def plan_fault() -> Any:
    """Plans one fault: `await plan_fault(nemesis, target, variant)`."""

    async def plan(nemesis: Any, target: Any, variant: str, *, fault_id: str = "f1", seed: int = 1) -> Injection:
        injection: Injection = await nemesis.plan(target, random.Random(seed), fault_id=fault_id, variant=variant)
        return injection

    return plan
