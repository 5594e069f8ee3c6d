"""Clocks and disks of hosts, by means of the shim or the launcher: see nemesis.target.Clocks and Disks, and
nemesis.mechanisms.reach.

What a fault did to the replicas is known from the counts that the shim in them, or their supervisor, keeps in the
host's control file. Only programs started by the harness are considered, whatever else runs under the same faults.
"""

from __future__ import annotations

import asyncio
import json
import os.path
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from nemesis.mechanisms.bit_flip import FLIP_SCRIPT, FlippedBits, flip_arguments, parse_flip, restore_arguments
from nemesis.mechanisms.disk_probe import PROBE_SCRIPT, parse_probe
from nemesis.mechanisms.hosts import DIRECTORIES_SCRIPT, script_arguments
from nemesis.mechanisms.launcher.control import UNCOUNTED, ProgramCounts
from nemesis.mechanisms.reach import PRELOAD
from nemesis.mechanisms.shim import WATCHED_KINDS
from nemesis.mechanisms.shim_controls import ShimControls
from nemesis.mechanisms.undo_log import POWER_MODELS, take_back_script
from nemesis.target import BitFlipped, ClockReading, ClockSkew, DiskFault, DiskProbe, FaultMet, PowerCut
from nemesis.words import plural

__all__ = ["ShimClocks", "ShimDisks"]

MONOTONIC_MARGIN_NS = 200_000_000
"""How much later than planned a change may reach the host. A fast monotonic clock is credited this much when it is
released, and a slow one starts this much later."""

MAX_NAMED = 3
"""Limit on the files named in one line; a broker may have mapped hundreds."""

UNDO_TIMEOUT_S = 25.0
FLIP_TIMEOUT_S = 10.0

ACCOUNT_S = 2.0
"""How long before a power cut the account begins, for programs without one from their start. Each reported write costs
some 100 us, so it is not kept for longer. Files synced by a timer every second, as by Redis and most systems that sync
in the background, have unsynced data in this window at any moment. The kernel itself writes back data that a program
never syncs, but only after some 30 s."""

CLOCK_TIMEOUT_S = 10.0
"""For clock drivers to apply a skew, which takes some milliseconds."""
CLOCK_POLL_S = 0.02

_CALLS: Mapping[str, tuple[Sequence[str], str]] = {
    "stall-fsync": (("syncs",), "held_syncs"),
    "stall": (("syncs", "writes", "grows"), "held"),
    "slow": (("syncs", "writes", "grows"), "delayed"),
    "full": (("grows",), "refused_grows"),
    "error-write": (("writes", "grows"), "failed_writes"),
    "error-fsync": (("syncs",), "failed_syncs"),
    "error-read": (("reads",), "failed_reads"),
    # Faults of a whole file system: not every call meets them (a write to an allocated block needs no space).
    "fill": ((), "refused_by_disk"),
    "shutdown": ((), "failed_by_disk"),
}
"""Kind of disk fault -> columns of ProgramCounts with the calls that it applies to, and the column with its effect,
which does not count effects of other kinds on other calls of the same host."""


class ShimClocks:
    """See nemesis.target.Clocks."""

    def __init__(self, controls: ShimControls) -> None:
        self._controls = controls
        self._hosts: dict[str, dict[str, dict[int, ProgramCounts]]] = {}
        """fault -> host -> what its programs had done when the fault began"""
        self._skews: dict[str, dict[str, ClockSkew]] = {}
        self._unclear: set[tuple[str, str]] = set()
        """(fault, host) pairs whose host had another clock skewed too: the shim has one count for all clocks"""

    def mechanism(self, host: str) -> str:
        """The mechanism that skews the clock of the host's replica."""
        return "the preloaded shim" if self._controls.mechanism(host) == PRELOAD else "the patched vDSO"

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        """Skew clocks. Raises ValueError for an unknown host or an impossible skew, ShimError for too many,
        RuntimeError for a clock that cannot be skewed."""
        self._controls.require_known(skews)
        for host, skew in skews.items():
            if skew.affects_monotonic and self._controls.mechanism(host) != PRELOAD:
                raise RuntimeError(self._only_wall(host))
        begun = self._hosts[fault_id] = {host: {} for host in skews}
        for other, theirs in self._skews.items():
            for host in theirs.keys() & skews.keys():
                if theirs[host].affects_monotonic is not skews[host].affects_monotonic:
                    self._unclear |= {(fault_id, host), (other, host)}
        self._skews[fault_id] = dict(skews)

        async def set_one(host: str, skew: ClockSkew) -> None:
            begun[host] = await self._controls.counts(host)
            wall_ns, monotonic_ns = await self._controls.access.now(host)
            self._controls.faults[host].add_skew(
                fault_id, skew, wall_ns=wall_ns, monotonic_ns=monotonic_ns, margin_ns=MONOTONIC_MARGIN_NS
            )
            await self._apply(host)

        await asyncio.gather(*(set_one(host, skew) for host, skew in skews.items()))
        if any(skew.affects_monotonic and skew.rate_ppm < 0 for skew in skews.values()):
            await asyncio.sleep(MONOTONIC_MARGIN_NS / 1e9)

    async def release(self, fault_id: str) -> None:
        """Undo one fault."""

        async def release_one(host: str) -> None:
            _, monotonic_ns = await self._controls.access.now(host)
            self._controls.faults[host].remove_skew(fault_id, monotonic_ns=monotonic_ns, margin_ns=MONOTONIC_MARGIN_NS)
            await self._apply(host)

        await asyncio.gather(*(release_one(host) for host in self._hosts.get(fault_id, ())))
        self._hosts.pop(fault_id, None)
        self._skews.pop(fault_id, None)
        self._unclear = {(fault, host) for fault, host in self._unclear if fault != fault_id}

    async def _apply(self, host: str) -> None:
        """Write the skews to the host, and wait until its clock drivers have applied them. Raises RuntimeError."""
        await self._controls.write(host)
        generation = self._controls.faults[host].generation
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CLOCK_TIMEOUT_S
        while True:
            counts = await self._controls.counts(host)
            driven = {
                each.number: each
                for each in self._controls.running(host)
                if each.mechanism != PRELOAD and each.clock_problem is None
            }
            awaited = (
                each.may_be_starting if number not in counts else counts[number].clock_generation < generation
                for number, each in driven.items()
            )
            if not any(awaited):
                return
            if loop.time() > deadline_s:
                raise RuntimeError(f"the clock driver of the replica of {host} does not respond")
            await asyncio.sleep(CLOCK_POLL_S)

    async def release_all(self) -> None:
        """Undo every skew. Each is tried before the first error is raised."""
        await _each(self.release, list(self._hosts))

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        """None when the skew of the wall clock in force, or of the `monotonic` one, reaches the process and its
        children; otherwise why not."""
        if monotonic and self._controls.mechanism(host, pid) != PRELOAD:
            return self._only_wall(host)
        return await self._controls.reaches(host, pid, needs_clock=True)

    @staticmethod
    def _only_wall(host: str) -> str:
        return (
            f"the monotonic clock of {host} cannot be skewed: its replica is reached through the vDSO, which allows "
            "that for the wall clock only (--mechanism preload skews both, in programs that the shim reaches)"
        )

    async def read(
        self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0, timeout_s: float
    ) -> Sequence[ClockReading]:
        """The clocks read by a process under the same shim as the host's replica, or skewed by the offset in the
        replica's own vDSO, and the host's true clocks. Raises RuntimeError when nothing could be read."""
        access, place = self._controls.access, self._controls.places[host]
        pid, environment = 0, place.probe_environment()
        if self._controls.mechanism(host) != PRELOAD:
            pids = [each.pid for each in self._controls.running(host) if each.pid is not None]
            if not pids:
                raise RuntimeError(f"the replica of {host} is down: it reads no clock")
            pid, environment = pids[-1], {}
        words = [str(pid), str(apart_ms), *map(str, pauses_s)]
        argv = [access.python(host), "-I", "-S", place.launcher_path, "clock", *words]
        status, output, errors = await access.run(host, argv, timeout_s=timeout_s, environment=environment)
        try:
            readings = json.loads(output)
        except ValueError:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            raise RuntimeError(f"the clock of {host} cannot be read on behalf of its replica: {said}") from None
        return [_reading(*each) for each in readings]

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the programs of each host have read a skewed clock since a fault began; None for a host with a
        patched vDSO that does not count, and if they may have read a clock that only another fault has skewed."""

        async def of(host: str, before: Mapping[int, ProgramCounts]) -> FaultMet:
            now = await self._controls.counts(host)
            if any(counts.clock_reads == UNCOUNTED for counts in now.values()):
                return FaultMet(None, None)
            reads = _grown(("clock_reads",), before, now)
            return FaultMet(None, None if reads and (fault_id, host) in self._unclear else reads)

        hosts = self._hosts.get(fault_id, {})
        found = await asyncio.gather(*(of(host, before) for host, before in hosts.items()))
        return dict(zip(hosts, found, strict=True))


def _reading(
    before_ns: int, wall_ns: int, after_ns: int, steady_ns: int, monotonic_ns: int, later_ns: int
) -> ClockReading:
    return ClockReading(
        offset_ms=(wall_ns - (before_ns + after_ns) / 2) / 1e6,
        uncertainty_ms=(after_ns - before_ns) / 2e6,
        monotonic_s=monotonic_ns / 1e9,
        at_s=(steady_ns + later_ns) / 2e9,
    )


async def _each(release: Callable[[str], Awaitable[None]], fault_ids: Collection[str]) -> None:
    """Release faults one after the other, since two may be on the same host."""
    failure: Exception | None = None
    for fault_id in fault_ids:
        try:
            await release(fault_id)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _grown(columns: Sequence[str], before: Mapping[int, ProgramCounts], now: Mapping[int, ProgramCounts]) -> int:
    """The total growth of some counts over all programs; a program that is new since `before` started at 0."""
    none = ProgramCounts(id=0)
    return sum(
        getattr(counts, column) - getattr(before.get(number, none), column)
        for number, counts in now.items()
        for column in columns
    )


def _unseen(buffered: int) -> str:
    """A note on files opened for writing through the C library's own buffers, which bypass the shim."""
    openings = plural(buffered, "opening")
    return f"{openings} by the C library's fopen, whose buffers are not seen (--mechanism seccomp sees them)"


class ShimDisks:
    """See nemesis.target.Disks."""

    def __init__(self, controls: ShimControls) -> None:
        self._controls = controls
        self._faults: dict[str, dict[str, DiskFault]] = {}
        self._before: dict[str, dict[str, dict[int, ProgramCounts]]] = {}
        """fault -> host -> the same before the fault began: a program may meet it at once, and end"""
        self._begun: dict[str, dict[str, dict[int, ProgramCounts]]] = {}
        """fault -> host -> the same once the fault was in force: calls counted after that have met it"""
        self._lost: dict[str, dict[str, PowerCut]] = {}
        self._flipped = FlippedBits()
        self._looked_until: dict[str, dict[str, dict[int, ProgramCounts]]] = {}
        """fault -> host -> what its programs had done when the shim began to watch another flipped bit"""
        self._accounts_of: dict[str, list[str]] = {}
        """fault -> hosts whose account was begun for its power cut"""
        self._at_cut: dict[str, Mapping[int, ProgramCounts]] = {}
        """host -> what its programs had done at its last power cut"""
        self._forgiven: dict[str, int] = {}
        """host -> how often its log had overflowed when its account last restarted"""

    async def impair(self, fault_id: str, faults: Mapping[str, DiskFault]) -> None:
        """Impair disks. Raises ValueError for an unknown host or kind, RuntimeError when a supervisor does nothing."""
        self._controls.require_known(faults)
        self._before[fault_id] = await self._counts(faults)
        for host, fault in faults.items():
            self._controls.faults[host].add_disk_fault(fault_id, fault)
        self._faults[fault_id] = dict(faults)
        await asyncio.gather(*(self._controls.write(host) for host in faults))
        await asyncio.gather(*(self._controls.attached(host) for host in faults))
        self._begun[fault_id] = await self._counts(faults)

    async def count_from_now(self, fault_id: str) -> None:
        """Restart the counting of a fault that is injected elsewhere: it is in force now."""
        self._begun[fault_id] = await self._counts(self._begun[fault_id])

    async def _counts(self, hosts: Collection[str]) -> dict[str, dict[int, ProgramCounts]]:
        found = await asyncio.gather(*(self._controls.counts(host) for host in hosts))
        return dict(zip(hosts, found, strict=True))

    async def expect_cut(self, fault_id: str, hosts: Collection[str]) -> float:
        """Begin the accounts of programs that have none from their start. Returns how many seconds they should be kept
        before the cut; 0 if all have one. Raises RuntimeError when a supervisor does nothing."""
        kept = [host for host in hosts if self._controls.places[host].undo_path is not None]
        begun = [host for host in kept if any(each.attaches for each in self._controls.running(host))]
        for host in begun:
            self._forgiven[host] = (await self._controls.counters(host)).undo_overflow
            self._controls.faults[host].keep_account(fault_id)
        self._accounts_of[fault_id] = begun
        await asyncio.gather(*(self._controls.write(host) for host in begun))
        await asyncio.gather(*(self._controls.attached(host) for host in begun))
        return ACCOUNT_S if begun else 0.0

    async def cut_power(self, fault_id: str, host: str, *, kind: str = POWER_MODELS[0], seed: int = 0) -> PowerCut:
        """Undo what the host's replica wrote and did not sync, by a model of `POWER_MODELS`. Raises RuntimeError,
        ValueError for another model."""
        if kind not in POWER_MODELS:
            raise ValueError(f"unknown model of power loss {kind!r}; known: {', '.join(POWER_MODELS)}")
        place = self._controls.places[host]
        if place.undo_path is None:
            raise RuntimeError(f"the writes of the replica of {host} are not tracked in this run")
        if (await self._controls.counters(host)).undo_overflow > self._forgiven.get(host, 0):
            raise RuntimeError(
                f"not all writes of the replica of {host} could be tracked: they were too many, several processes "
                "wrote, or it synced by aio_fsync (--mechanism seccomp tracks all processes of a program)"
            )
        operations, size_bytes = 0, 0
        files: set[int] = set()
        mapped = sorted(self._controls.take_written(host))
        for account in await self._accounts(host, place.undo_path):
            argv = [self._controls.access.python(host), "-I", "-S", "-", account, place.data_path, kind, str(seed)]
            found = json.loads(await self._run_at_cut(host, [*argv, *mapped], stdin=take_back_script()))
            operations += found["operations"]
            size_bytes += found["bytes"]
            files.update(found["files"])  # several programs may have written to one
            mapped = found["kept"]
        buffered = _grown(("buffered",), self._at_cut.get(host, {}), await self._controls.counts(host))
        recorded = await self.recorded(host) or 0
        detail = (
            f"{plural(operations, 'operation')}, {plural(size_bytes, 'byte')} in {plural(len(files), 'file')}, "
            f"of {plural(recorded, 'change')} that {self.mechanism(host)} has seen"
        )
        if host in self._accounts_of.get(fault_id, ()):
            detail += f" in the last {ACCOUNT_S:g} s; everything before is assumed to be durable"
        if kept := sorted(os.path.relpath(path, place.data_path) for path in mapped):
            more = f" and {len(kept) - MAX_NAMED} more" if len(kept) > MAX_NAMED else ""
            detail += f"; what it wrote through mappings is kept: {', '.join(kept[:MAX_NAMED])}{more}"
        if buffered:
            detail += f"; {_unseen(buffered)}"
        cut = PowerCut(operations, size_bytes, detail, recorded)
        self._lost.setdefault(fault_id, {})[host] = cut
        return cut

    async def _accounts(self, host: str, undo_path: str) -> Sequence[str]:
        """The directories of the accounts of the host's programs; each program's account covers its own writes."""
        argv = script_arguments(self._controls.access.python(host), DIRECTORIES_SCRIPT, undo_path)
        return (await self._run_at_cut(host, argv)).splitlines()

    async def _run_at_cut(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        """The output of a command that a power cut needs. Raises RuntimeError if it fails."""
        status, output, errors = await self._controls.access.run(host, argv, stdin=stdin, timeout_s=UNDO_TIMEOUT_S)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            raise RuntimeError(f"unsynced changes of {host} could not be undone: {said}")
        return output

    async def recorded(self, host: str) -> int | None:
        """How many changes by the host's replica were logged since the previous cut; None if no account is kept."""
        if self._controls.places[host].undo_path is None:
            return None
        counts = await self._controls.counts(host)
        recorded = _grown(("recorded",), self._at_cut.get(host, {}), counts)
        self._at_cut[host] = counts
        return recorded

    async def begin_account(self, host: str) -> None:
        """Note that everything on the host's disk is durable and its undo log empty, so that earlier gaps in the
        account no longer matter. Its replica must be down."""
        self._forgiven[host] = (await self._controls.counters(host)).undo_overflow

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        """What the power cuts of a fault removed."""
        return dict(self._lost.get(fault_id, {}))

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        """Flip a bit of a file at rest. Raises RuntimeError when there is none to flip."""
        output = await self._flip(host, flip_arguments(self._controls.places[host].data_path, files, place, bit))
        flipped = parse_flip(output)
        earlier = self._flipped.on(host)
        self._flipped.add(fault_id, host, flipped)
        counts = self._begun.setdefault(fault_id, {})[host] = await self._controls.counts(host)
        for each in earlier:  # from now on reads of this bit are counted, and no longer those of earlier ones
            self._looked_until.setdefault(each, {}).setdefault(host, counts)
        self._controls.faults[host].watch_flipped(fault_id, inode=flipped.inode, offset=flipped.offset)
        await self._controls.write(host)
        return flipped

    def flipped(self, fault_id: str) -> Mapping[str, BitFlipped]:
        """The bits that a fault has flipped, by host."""
        return self._flipped.of(fault_id)

    async def _flip(self, host: str, arguments: list[str]) -> str:
        access = self._controls.access
        argv = [access.python(host), "-I", "-S", "-", *arguments]
        status, output, errors = await access.run(host, argv, stdin=FLIP_SCRIPT, timeout_s=FLIP_TIMEOUT_S)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            what = "no bit could be flipped" if arguments[0] == "flip" else "a flipped bit was not restored"
            raise RuntimeError(f"{what} on {host}: {said}")
        return output

    async def release(self, fault_id: str) -> None:
        """Undo one fault."""
        self._lost.pop(fault_id, None)
        flipped = self._flipped.of(fault_id)
        for host in flipped:
            if (way_back := self._flipped.way_back(fault_id, host)) is not None:
                await self._flip(host, restore_arguments(way_back))
        for host in flipped:
            self._flipped.forget(fault_id, host)
        hosts = [*self._faults.get(fault_id, ()), *flipped, *self._accounts_of.get(fault_id, ())]
        for host in hosts:
            self._controls.faults[host].remove_disk_fault(fault_id)
        await asyncio.gather(*(self._controls.write(host) for host in hosts))
        for noted in (self._faults, self._accounts_of, self._before, self._begun, self._looked_until):
            noted.pop(fault_id, None)

    async def release_all(self) -> None:
        """Undo every fault. Each is tried before the first error is raised."""
        await _each(self.release, list(dict.fromkeys([*self._faults, *self._flipped.faults(), *self._accounts_of])))

    async def probe(self, host: str, *, timeout_s: float) -> DiskProbe:
        """Write, sync and read a file in the data's directory, by the same mechanism as the host's replica."""
        access, place = self._controls.access, self._controls.places[host]
        argv, environment = self._controls.probe_command(host, [access.python(host), "-I", "-S", "-", place.data_path])
        _, output, _ = await access.run(host, argv, stdin=PROBE_SCRIPT, timeout_s=timeout_s, environment=environment)
        return parse_probe(host, output, waited_s=timeout_s)

    def mechanism(self, host: str) -> str:
        """The mechanism that injects faults into the host's replica."""
        return "the preloaded shim" if self._controls.mechanism(host) == PRELOAD else "seccomp"

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None when faults reach the process and its children; otherwise why not."""
        return await self._controls.reaches(host, pid)

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the programs of each host have met a fault since it began."""
        faults, before, begun = self._faults.get(fault_id, {}), self._before, self._begun
        found = {}
        for host, counts in (await self._counts(begun.get(fault_id, {}))).items():
            if host not in faults:
                if self._controls.mechanism(host) == PRELOAD:
                    counts = self._looked_until.get(fault_id, {}).get(host, counts)
                    reads = _grown(("flipped_reads",), begun[fault_id][host], counts)
                    found[host] = FaultMet(None, reads or None)  # not 0: it may have read the byte by a mapping
                continue
            kind = faults[host].kind
            columns, effect = _CALLS[kind]
            if kind in WATCHED_KINDS and self._controls.mechanism(host) != PRELOAD:
                # A supervisor does not see the results of calls. A sync of a file system that is shut down is certain
                # to fail; for other calls, and for a full file system, the result is not known.
                syncs = _grown(("syncs",), begun[fault_id][host], counts) if kind == "shutdown" else 0
                found[host] = FaultMet(None, syncs or None)
                continue
            buffered = 0 if kind in (*WATCHED_KINDS, "error-read") else _grown(("buffered",), {}, counts)
            found[host] = FaultMet(
                calls=_grown(columns, begun[fault_id][host], counts) if columns else None,
                met=_grown((effect,), before[fault_id][host], counts),
                past=_unseen(buffered) if buffered else "",
            )
        return found
