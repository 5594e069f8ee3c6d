"""The nemeses `disk-stall`, `disk-slow`, `disk-full` and `disk-error`: disks that fail.

Each is proved by a probe that writes, syncs and reads a file beside the replica's data, through the same mechanism as
the replica: the probe must meet the fault on the victims and on no other host. The mechanism must also reach the
replica itself and every process that it has started. The replica's own calls are counted where they are made: if it
made calls that the fault applies to and none met the fault, the proof fails; if it made none, it has not exercised the
fault. Healing restarts replicas that ended under the fault, as an operator would once the disk is repaired.

The forms `freeze`, `fill` and `shutdown` need a file system per host and act on it in the kernel. Every access to the
file system meets the fault, a process killed during a freeze stays until the thaw, and healing may have to end the
replica, mount the file system again and start the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from nemesis.forms import Form, FormNemesis, split_variant
from nemesis.impairments import Activity, hosts_kept_from
from nemesis.process import prove_released, why_unreached
from nemesis.protocol import Injection, Proof
from nemesis.target import DiskFault, DiskProbe, Disks, DiskStep, Target
from nemesis.words import plural, plural_with

__all__ = ["DISK_ERROR", "DISK_FULL", "DISK_SLOW", "DISK_STALL", "DiskNemesis"]

STALL_WATCHES_S = (1.5, 6.0)
"""How long to wait for an operation that should not return, including the start of the probe. The first is a hundred
times what the operation takes on a working disk; if the machine is too busy for the probe to reach the operation by
then, the probe is run once more and watched for longer."""

PROBE_TIMEOUT_S = 12.0
"""Limit for a probe that should end, on a slow disk of a busy machine."""

HEAL_TIMEOUT_S = 8.0
"""How long a disk may stay slow after it was healed: on a busy disk an occasional sync is as slow as the mild fault
makes every sync. One fast sync shows that the fault is over."""

HEAL_PAUSE_S = 0.1

MET_LOOKS, MET_PAUSE_S = 3, 0.1
"""Number of checks whether the replica's calls have met the fault, and the pause between them."""

FILE_SYSTEM_KINDS = ("freeze", "fill", "shutdown")
"""The kinds that affect a whole file system, whichever mechanism reaches the replica."""

STALLS = ("stall", "stall-fsync", "freeze")
"""The kinds under which some operation does not return."""

MILD_MS, SEVERE_MS = 20, 250
"""Extra time for each write and sync: like a busy disk, and like one that is about to fail."""


class DiskNemesis(FormNemesis):
    """One kind of disk fault; `kinds` maps its forms to the fault that the target injects."""

    def __init__(self, *, name: str, description: str, forms: Sequence[Form], kinds: Mapping[str, DiskFault]) -> None:
        self.name = name
        self.description = description
        self.forms = {form.name: form for form in forms}
        self._kinds = dict(kinds)

    async def inject(self, target: Target, injection: Injection) -> None:
        """Impair the victims' disks."""
        if injection.problem is None:
            fault = self._fault_of(injection)
            await disks_of(target).impair(injection.fault_id, dict.fromkeys(injection.value["hosts"], fault))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """A probe meets the fault on every victim and on no other host, and the mechanism reaches the replicas."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        fault = self._fault_of(injection)
        victims: Sequence[str] = injection.value["hosts"]
        also_impaired = _impaired_by(in_force)
        others = [host for host in target.hosts if host not in victims and host not in also_impaired]

        async def on_victim(host: str) -> str | None:
            unreached = await why_unreached(target, host, disks_of(target).reaches)
            if unreached is not None:
                return unreached
            is_stall = fault.kind in STALLS or host in also_impaired
            probe = await _probe(target, host, fault.kind if is_stall else None)
            if host in also_impaired:  # there is no telling which of the two faults a step met
                return f"the disk of {host} works" if _trouble(probe) is None else None
            return _not_met(fault, probe)

        found = await asyncio.gather(*map(on_victim, victims), *(_works(target, host) for host in others))
        failed = [problem for problem in found if problem is not None]
        by = " and ".join(sorted({disks_of(target).mechanism(host) for host in victims}))
        means = "" if fault.kind in FILE_SYSTEM_KINDS else f" via {by}"
        exercised, met_words, unmet = await _met(target, injection, also_impaired)
        failed += unmet
        well = plural_with(len(others), "other disk", ("works", "work"))
        detail = f"{', '.join(victims)}: {_in_words(fault)}{means}; {well}{met_words if exercised else ''}"
        return Proof(
            proven=not failed,
            # None so far, not False: such a call may still come.
            exercised=exercised or None,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(found),
            failed=failed,
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The mechanism still reaches the replicas; how often their own calls have met the fault so far."""
        victims: Sequence[str] = injection.value["hosts"]
        unreached = await asyncio.gather(*(why_unreached(target, host, disks_of(target).reaches) for host in victims))
        failed = [problem for problem in unreached if problem is not None]
        exercised, met_words, unmet = await _met(target, injection, _impaired_by(in_force))
        failed += unmet
        detail = "; ".join(failed[:3]) if failed else met_words.removeprefix("; ")
        return Proof(proven=not failed, exercised=exercised, detail=detail, checked=len(victims), failed=failed)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Repair the disks, and start replicas that ended because of them. Idempotent."""
        await disks_of(target).release(injection.fault_id)
        if target.processes is not None:
            await target.processes.revive(injection.value.get("hosts", ()))

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Disks that no other fault impairs work again, and the victims' replicas run and answer."""
        mended = [host for host in injection.value["hosts"] if host not in _impaired_by(in_force)]
        slow_ms = self._fault_of(injection).delay_ms
        found = await asyncio.gather(
            *(_works(target, host, timeout_s=HEAL_TIMEOUT_S, slow_ms=slow_ms) for host in mended)
        )
        failed = [problem for problem in found if problem is not None]
        running = await prove_released(target, injection.value["hosts"], in_force=in_force)
        failed += running.failed
        work = plural_with(len(mended), "disk", ("works", "work"))
        detail = "; ".join(failed[:3]) if failed else f"{work} again; {running.detail}"
        return Proof(proven=not failed, detail=detail, checked=len(found) + running.checked, failed=failed)

    def _fault_of(self, injection: Injection) -> DiskFault:
        return self._kinds[split_variant(injection.variant)[0]]


def disks_of(target: Target) -> Disks:
    """The target's disks. Raises ValueError if it has none to act on."""
    if target.disks is None:
        raise ValueError("this cluster has no disks to act on")
    return target.disks


def _impaired_by(in_force: Sequence[Injection]) -> frozenset[str]:
    return hosts_kept_from(Activity.USE_DISK, in_force)


async def _met(
    target: Target, injection: Injection, also_impaired: frozenset[str]
) -> tuple[bool | None, str, list[str]]:
    """(whether the victims' replicas have met the fault since it began, None if that cannot be known; the same as text;
    a problem for each replica that made calls the fault applies to without meeting it)."""
    unmet: dict[str, str] = {}
    for attempt in range(MET_LOOKS):
        await asyncio.sleep(MET_PAUSE_S if attempt else 0.0)  # a call is counted before it meets anything
        met = await disks_of(target).met(injection.fault_id)
        unmet = {
            host: f"{host} made {plural(seen.calls, 'call')} that the fault applies to, but none of them was hit"
            for host, seen in met.items()
            if seen.calls and not seen.met and host not in also_impaired
        }
        if not unmet:
            break
    counted = {host: seen for host, seen in met.items() if seen.met is not None}
    if not counted or len(counted) < len(met):
        return None, "", list(unmet.values())
    words = ", ".join(f"{plural(seen.met, 'call')} of {host}" for host, seen in sorted(counted.items()) if seen.met)
    exercised = any(seen.met for seen in counted.values())
    past = "".join(f"; on {host}, {seen.past}" for host, seen in sorted(counted.items()) if seen.past)
    met_words = f"; hit {words}" if exercised else "; no replica has made such a call"
    return exercised, f"{met_words}{past}", list(unmet.values())


async def _probe(target: Target, host: str, stall: str | None) -> DiskProbe:
    """What a probe meets. Under a stall of some kind, a probe that has reached the operation that should not return."""
    if stall is None:
        return await disks_of(target).probe(host, timeout_s=PROBE_TIMEOUT_S)
    for timeout_s in STALL_WATCHES_S:
        probe = await disks_of(target).probe(host, timeout_s=timeout_s)
        if (probe.sync if stall == "stall-fsync" else probe.write).outcome != "not tried":
            break
    return probe


async def _works(target: Target, host: str, *, timeout_s: float = 0.0, slow_ms: int = 0) -> str | None:
    """None when a probe of the disk succeeds, with a sync of less than `slow_ms` milliseconds if that is above 0;
    otherwise the problem of the last probe, begun when `timeout_s` seconds had passed."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        probe = await disks_of(target).probe(host, timeout_s=PROBE_TIMEOUT_S)
        trouble = _trouble(probe)
        if trouble is None and slow_ms and probe.sync.seconds * 1000 >= slow_ms:
            trouble = f"sync: {probe.sync.seconds * 1000:.0f} ms"
        if trouble is None:
            return None
        if loop.time() >= deadline_s:
            return f"the disk of {host} should work: {trouble}"
        await asyncio.sleep(HEAL_PAUSE_S)


def _trouble(probe: DiskProbe) -> str | None:
    for name, step in (("write", probe.write), ("sync", probe.sync), ("read", probe.read)):
        if step.outcome != "ok":
            return f"{name}: {step.outcome}"
    return None


def _not_met(fault: DiskFault, probe: DiskProbe) -> str | None:
    """None when the probe met the fault as it should; otherwise what it saw instead."""
    expected: dict[str, tuple[DiskStep, str]] = {
        "stall-fsync": (probe.sync, "no answer"),
        "stall": (probe.write, "no answer"),
        "freeze": (probe.write, "no answer"),
        "full": (probe.write, "ENOSPC"),
        "fill": (probe.write, "ENOSPC"),
        "shutdown": (probe.write, "EIO"),
        "error-write": (probe.write, "EIO"),
        "error-fsync": (probe.sync, "EIO"),
        "error-read": (probe.read, "EIO"),
    }
    if fault.kind == "slow":
        if probe.sync.outcome == "ok" and probe.sync.seconds * 1000 >= fault.delay_ms:
            return None
        return f"a sync on {probe.host} took {probe.sync.seconds * 1000:.0f} ms ({probe.sync.outcome})"
    step, outcome = expected[fault.kind]
    if step.outcome == outcome and (fault.kind != "stall-fsync" or probe.write.outcome == "ok"):
        return None
    outcomes = f"write {probe.write.outcome}, sync {probe.sync.outcome}, read {probe.read.outcome}"
    return f"{fault.kind} on {probe.host}: {outcomes}"


def _in_words(fault: DiskFault) -> str:
    words = {
        "stall-fsync": "syncs do not return",
        "stall": "writes do not return",
        "freeze": "the file system is frozen",
        "full": "no space left",
        "fill": "the file system is full",
        "shutdown": "the file system is shut down",
        "error-write": "writes fail with EIO",
        "error-fsync": "syncs fail with EIO",
        "error-read": "reads fail with EIO",
    }
    return words.get(fault.kind, f"{fault.delay_ms} ms slower")


def _form(name: str, description: str, ability: str, *targets: str) -> Form:
    return Form(name=name, description=description, needs=(("disks", ability),), targets=targets)


DISK_STALL = DiskNemesis(
    name="disk-stall",
    description="disks that hang: only syncs, or everything that writes",
    forms=(
        _form(
            "fsync", "fsync, msync, sync and similar calls do not return", "stall-fsync", "leader", "one", "minority"
        ),
        _form(
            "all",
            "calls that change the file system do not return; reads still work",
            "stall",
            "leader",
            "one",
            "minority",
        ),
        _form("freeze", "the host's file system is frozen in the kernel", "freeze", "leader", "one", "minority"),
    ),
    kinds={
        "fsync": DiskFault(kind="stall-fsync"),
        "all": DiskFault(kind="stall"),
        "freeze": DiskFault(kind="freeze"),
    },
)
DISK_SLOW = DiskNemesis(
    name="disk-slow",
    description="disks on which every write and sync takes longer",
    forms=(
        _form("mild", f"{MILD_MS} ms longer, as on a busy disk", "slow", "all", "leader", "minority"),
        _form("severe", f"{SEVERE_MS} ms longer, as on a dying one", "slow", "leader", "one", "minority"),
    ),
    kinds={
        "mild": DiskFault(kind="slow", delay_ms=MILD_MS),
        "severe": DiskFault(kind="slow", delay_ms=SEVERE_MS),
    },
)
DISK_FULL = DiskNemesis(
    name="disk-full",
    description="disks with no space left",
    forms=(
        _form("full", "calls that need more space fail with ENOSPC", "full", "one", "leader", "minority"),
        _form("fill", "a file takes every free block of the host's file system", "fill", "one", "leader", "minority"),
    ),
    kinds={"full": DiskFault(kind="full"), "fill": DiskFault(kind="fill")},
)
DISK_ERROR = DiskNemesis(
    name="disk-error",
    description="disks whose operations fail with an input/output error",
    forms=(
        _form("write", "writes fail with EIO and change nothing", "error-write", "one", "leader"),
        _form("fsync", "syncs fail with EIO", "error-fsync", "one", "leader"),
        _form("read", "reads fail with EIO", "error-read", "one", "leader"),
        _form("shutdown", "every access to the host's file system fails with EIO", "shutdown", "one", "leader"),
    ),
    kinds={
        "write": DiskFault(kind="error-write"),
        "fsync": DiskFault(kind="error-fsync"),
        "read": DiskFault(kind="error-read"),
        "shutdown": DiskFault(kind="shutdown"),
    },
)
