"""Disks of hosts that have a file system of their own: see nemesis.target.Disks and nemesis.mechanisms.file_systems.

Faults that the run's shim can inject are passed on to it; the kinds `freeze`, `fill`, `shutdown` and `crash` affect the
whole file system. A host's file system can have one of these at a time: a second one is rejected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from harness.clusters.threads import all_of
from nemesis.mechanisms.disk_probe import PROBE_SCRIPT, parse_probe
from nemesis.mechanisms.hosts import HostAccess
from nemesis.mechanisms.shim import WATCHED_KINDS
from nemesis.mechanisms.shim_faults import ShimDisks
from nemesis.target import BitFlipped, DiskFault, DiskProbe, FaultMet, PowerCut
from nemesis.words import plural

__all__ = ["FILE_SYSTEM_KINDS", "FileSystemDisks", "HostFileSystems"]

FILE_SYSTEM_KINDS = frozenset({"freeze", "fill", "shutdown", "crash"})
"""The kinds of disk faults that need a file system per host."""

_MOUNTINFO_ESCAPES = {ord(character): f"\\{ord(character):03o}" for character in " \t\n\\"}
"""How the kernel escapes characters that would end a field or a line of mountinfo."""

_REACH_TIMEOUT_S = 10.0

_WAITING_SCRIPT = """
import os, sys, time
def waiting():
    found = {}
    for pid in sys.argv[1:]:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                    letter = file.read().rpartition(b")")[2].split()[0]
                with open(f"/proc/{pid}/task/{thread}/wchan", "rb") as file:
                    place = file.read()
            except OSError:
                continue
            if letter == b"D" and (place in (b"", b"0") or b"percpu" in place):
                found[thread] = b"percpu" in place
    return found
first = waiting()
time.sleep(0.1)
second = waiting()
both = [is_frozen for thread, is_frozen in first.items() if second.get(thread) is is_frozen]
print(both.count(True), both.count(False))
"""
"""Prints how many threads of the processes wait for a thaw (percpu_rwsem_wait, before Linux 5.6 __percpu_down_read),
and how many for something that the kernel does not show."""


class HostFileSystems(Protocol):
    """File systems of the hosts, one each."""

    def mount_point(self, host: str) -> str:
        """Where the host's file system is mounted, as a path on the host."""
        ...

    async def perform(self, host: str, operation: str, *arguments: str) -> None:
        """Perform an operation of nemesis.mechanisms.file_systems on the host's file system. Raises OSError,
        ShellError, TimeoutError when the kernel does not finish it in time; it cannot be cancelled then."""
        ...

    async def mount_again(self, host: str) -> None:
        """End the programs that use the host's file system, unmount it and mount it again, which replays the journal.
        Raises RuntimeError when the file system stays in use."""
        ...


class FileSystemDisks:
    """Disks with both kinds of faults; `shim` is None in runs that do not use it."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        file_systems: HostFileSystems,
        shim: ShimDisks | None,
        access: HostAccess,
        members: Callable[[str], Awaitable[Sequence[int]]],
    ) -> None:
        """`members` returns the pids of a host's programs."""
        self._hosts = tuple(hosts)
        self._file_systems = file_systems
        self._shim = shim
        self._access = access
        self._members = members
        self._faults: dict[str, dict[str, str]] = {}
        """fault id -> host -> kind"""
        self._lost: dict[str, dict[str, PowerCut]] = {}

    async def impair(self, fault_id: str, faults: Mapping[str, DiskFault]) -> None:
        """Impair disks. Raises ValueError for an unknown host or kind, RuntimeError for a second fault of a file
        system, OSError."""
        self._require_known(faults)
        shimmed = {host: fault for host, fault in faults.items() if fault.kind not in FILE_SYSTEM_KINDS}
        if shimmed:
            await self._require_shim().impair(fault_id, shimmed)
        watched = {host: fault for host, fault in faults.items() if fault.kind in WATCHED_KINDS}
        if watched and self._shim is not None:
            await self._shim.impair(fault_id, watched)
        for host in faults.keys() - shimmed.keys():
            self._hold(fault_id, host, faults[host].kind)
        await self._everywhere(
            self._faults.get(fault_id, {}), lambda host: self._begin(fault_id, host, self._faults[fault_id][host])
        )
        if watched and self._shim is not None:
            await self._shim.count_from_now(fault_id)

    async def expect_cut(self, fault_id: str, hosts: Collection[str]) -> float:
        """Begin the shim's account, if it is kept only for the cut; returns for how many seconds to keep it first.
        For a crash, it also shows whether the replica wrote anything."""
        return 0.0 if self._shim is None else await self._shim.expect_cut(fault_id, hosts)

    async def cut_power(self, fault_id: str, host: str, *, kind: str = "ext4", seed: int = 0) -> PowerCut:
        """Lose what is not synced: by the shim's account, or for kind `crash` by what the kernel had not written."""
        if kind != "crash":
            return await self._require_shim().cut_power(fault_id, host, kind=kind, seed=seed)
        self._require_known([host])
        self._hold(fault_id, host, "crash")
        await self._file_systems.perform(host, "shut_down")
        await self._mount_again(host)
        self._let_go(fault_id, host)
        recorded = None if self._shim is None else await self._shim.recorded(host)
        seen = "" if recorded is None else f", of {plural(recorded, 'change')} that {self.mechanism(host)} has seen"
        cut = PowerCut(None, None, f"what the kernel had not written{seen}", recorded)
        self._lost.setdefault(fault_id, {})[host] = cut
        return cut

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        """What the power cuts of a fault took, by host."""
        by_shim = {} if self._shim is None else self._shim.lost(fault_id)
        return {**by_shim, **self._lost.get(fault_id, {})}

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        """Flip a bit of a file at rest, as the shim's disks do."""
        return await self._require_shim().flip_bit(fault_id, host, files=files, place=place, bit=bit)

    def flipped(self, fault_id: str) -> Mapping[str, BitFlipped]:
        """The bits that a fault has flipped, by host."""
        return {} if self._shim is None else self._shim.flipped(fault_id)

    async def release(self, fault_id: str) -> None:
        """Undo one fault. A file system that was shut down is mounted again, after ending its host's programs."""
        self._lost.pop(fault_id, None)
        if self._shim is not None:
            await self._shim.release(fault_id)
        await self._everywhere(
            self._faults.get(fault_id, {}), lambda host: self._end(fault_id, host, self._faults[fault_id][host])
        )
        self._faults.pop(fault_id, None)

    async def release_all(self) -> None:
        """Undo every fault; thaw every file system, even if no freeze is known."""
        steps: list[Callable[[], Awaitable[None]]] = [partial(self.release, fault_id) for fault_id in self._faults]
        if self._shim is not None:
            steps.append(self._shim.release_all)
        steps += [partial(self._file_systems.perform, host, "thaw") for host in self._hosts]
        failure: Exception | None = None
        for step in steps:
            try:
                await step()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def probe(self, host: str, *, timeout_s: float) -> DiskProbe:
        """Write, sync and read a file on the host's file system, through the shim if the run uses it."""
        if self._shim is not None:
            return await self._shim.probe(host, timeout_s=timeout_s)
        argv = [self._access.python(host), "-I", "-S", "-", self._file_systems.mount_point(host)]
        _, output, _ = await self._access.run(host, argv, stdin=PROBE_SCRIPT, timeout_s=timeout_s)
        return parse_probe(host, output, waited_s=timeout_s)

    def mechanism(self, host: str) -> str:
        """What applies the faults that do not affect the whole file system to the replica."""
        return "the file system" if self._shim is None else self._shim.mechanism(host)

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """What the replicas have met of a fault. If it affects a whole file system, the shim counts the errors that the
        replicas get from it; for a freeze, their waiting threads are counted."""
        kinds = self._faults.get(fault_id, {})
        found = dict.fromkeys(kinds, FaultMet(None, None))
        for host in (host for host, kind in kinds.items() if kind == "freeze"):
            found[host] = await self._waiting(host)
        return found if self._shim is None else {**found, **await self._shim.met(fault_id)}

    async def _waiting(self, host: str) -> FaultMet:
        """Count the threads of the replica that wait for a thaw at both of two looks. On a frozen file system every
        call that changes it waits, so if no thread waits, none has met the fault. Threads may also wait in the kernel
        for other reasons, such as vfork; if the kernel does not show the reason, the count is unknown."""
        pids = [str(pid) for pid in await self._members(host)]
        argv = [self._access.python(host), "-I", "-S", "-c", _WAITING_SCRIPT, *pids]
        status, output, _ = await self._access.run(host, argv, timeout_s=_REACH_TIMEOUT_S)
        if status != 0:
            return FaultMet(None, None)
        frozen, unknown = map(int, output.split())
        return FaultMet(None, None) if unknown and not frozen else FaultMet(calls=frozen, met=frozen)

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None when the process sees the host's file system mounted, and is under the shim if the run uses it."""
        if pid is None:
            return f"the replica of {host} is down"
        if self._shim is not None and (problem := await self._shim.reaches(host, pid)) is not None:
            return problem
        mount_point = self._file_systems.mount_point(host)
        argv = ["cat", f"/proc/{pid}/mountinfo"]
        status, shown, errors = await self._access.run(host, argv, timeout_s=_REACH_TIMEOUT_S)
        if status != 0:
            return f"cannot inspect the replica of {host}: {errors.strip() or status}"
        points = {line.split()[4] for line in shown.splitlines()}
        if mount_point.translate(_MOUNTINFO_ESCAPES) in points:
            return None
        return f"the replica of {host} does not see {mount_point}"

    def _require_known(self, hosts: Mapping[str, object] | Sequence[str]) -> None:
        unknown = set(hosts) - set(self._hosts)
        if unknown:
            raise ValueError(f"no replica runs on {', '.join(sorted(unknown))}")

    def _require_shim(self) -> ShimDisks:
        if self._shim is None:
            raise ValueError("this run was not prepared for the disk shim")
        return self._shim

    def _hold(self, fault_id: str, host: str, kind: str) -> None:
        if any(host in held for held in self._faults.values()):
            raise RuntimeError(f"the file system of {host} is already held by another fault")
        self._faults.setdefault(fault_id, {})[host] = kind

    def _let_go(self, fault_id: str, host: str) -> None:
        held = self._faults.get(fault_id, {})
        held.pop(host, None)
        if not held:
            self._faults.pop(fault_id, None)

    async def _begin(self, fault_id: str, host: str, kind: str) -> None:
        if kind == "freeze":
            await self._file_systems.perform(host, "freeze")
        elif kind == "fill":
            await self._file_systems.perform(host, "fill", fault_id)
        else:
            await self._file_systems.perform(host, "shut_down")

    async def _end(self, fault_id: str, host: str, kind: str) -> None:
        if kind == "freeze":
            await self._file_systems.perform(host, "thaw")
        elif kind == "fill":
            await self._file_systems.perform(host, "remove_ballast", fault_id)
        else:
            await self._mount_again(host)

    async def _mount_again(self, host: str) -> None:
        await self._file_systems.mount_again(host)
        if self._shim is not None:
            await self._shim.begin_account(host)

    async def _everywhere(self, hosts: Mapping[str, str], work: Callable[[str], Awaitable[None]]) -> None:
        """Do `work` on all hosts at once; every host is tried before the first error is raised."""
        await all_of([work(host) for host in hosts])
