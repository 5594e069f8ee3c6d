"""The nemesis `resources`: replicas that run out of processor time, memory, processes or descriptors.

The limits are the kernel's own, set on every process of a running replica. It is proved that the kernel enforces the
limit on each of these processes and on no other replica's. If the kernel counts how often a limit was hit (processor
time, memory, processes), the fault was exercised if that count has grown since it began. The kernel does not count
calls that fail for lack of a descriptor, but shows connections that a replica could not accept; for a replica that
listens nowhere it is unknown. When the fault is healed, replicas that ended under it are started again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.forms import Form, FormNemesis, hosts_of
from nemesis.impairments import Activity, hosts_kept_from
from nemesis.process import prove_released
from nemesis.protocol import Injection, Proof, told_apart
from nemesis.target import DOWN, ResourceLimit, Resources, ResourceUse, Target
from nemesis.words import plural, plural_with

__all__ = ["RESOURCES", "ResourcesNemesis"]

MIN_CPU_PERCENT, MAX_CPU_PERCENT = 2, 10
"""Percentage of one processor: a replica keeps running, slower by a factor of ten or more."""

MIN_SPARE_MIB, MAX_SPARE_MIB = 1, 4
"""Memory beyond a replica's own data at that moment: almost nothing for the page cache of its files."""


class ResourcesNemesis(FormNemesis):
    """Limits what replicas may use. See the module's docstring."""

    name = "resources"
    description = "replicas run out of CPU time, memory, processes or file descriptors"
    forms: Mapping[str, Form] = {
        form.name: form
        for form in (
            Form(
                name="cpu",
                description="all processes of a replica share 2 to 10 % of one CPU",
                needs=(("resources", "cpu"),),
                targets=("leader", "one", "minority"),
            ),
            Form(
                name="memory",
                description="a limit of 1 to 4 MiB above the data that the replica holds, and at most what it uses: "
                "the kernel reclaims what it can, and kills when nothing is left to reclaim",
                needs=(("resources", "memory"),),
                targets=("leader", "one"),
            ),
            Form(
                name="processes",
                description="no processes or threads beyond those that exist: fork and clone fail with EAGAIN",
                needs=(("resources", "processes"),),
                targets=("leader", "one"),
                is_cycled=False,  # most systems start all that they need when they are started
            ),
            Form(
                name="descriptors",
                description="no file descriptors beyond those in use: open, accept and connect fail with EMFILE",
                needs=(("resources", "descriptors"),),
                targets=("leader", "one", "minority"),
            ),
        )
    }

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        if form.name == "cpu":
            return {"percent": rng.randint(MIN_CPU_PERCENT, MAX_CPU_PERCENT)}
        return {"spare_mib": rng.randint(MIN_SPARE_MIB, MAX_SPARE_MIB)} if form.name == "memory" else {}

    async def _seen_before(self, form: Form, target: Target, hosts: Sequence[str]) -> Mapping[str, Any]:
        """How often a limit of this kind was hit on each victim before this fault."""
        if target.resources is None or not hosts:
            return {}
        used = await self._uses(target, form.name, hosts)
        return {"met": {host: use.met for host, use in used.items()}}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Set the limits on the victims' processes. Replicas that are down are not limited once they are back."""
        if injection.problem is None:
            limit = ResourceLimit(
                kind=self._form_of(injection),
                percent=injection.value.get("percent", 0),
                spare_mib=injection.value.get("spare_mib", 0),
            )
            await _resources(target).limit(injection.fault_id, dict.fromkeys(injection.value["hosts"], limit))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The kernel has set the limit on every process of the victims, and none on the others' processes."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        kind, down = self._form_of(injection), hosts_kept_from(Activity.RUN, in_force)
        victims = [host for host in injection.value["hosts"] if host not in down]
        if not victims:
            return Proof(proven=False, detail="every victim is kept down by another fault")
        limited = self._limited_by(in_force, kind)
        others = [host for host in target.hosts if host not in {*injection.value["hosts"], *down, *limited}]
        used = await self._uses(target, kind, [*victims, *others])
        failed = [problem for host in victims if (problem := _not_limited(host, used[host])) is not None]
        failed += [f"{host} is limited too: {used[host].detail}" for host in others if used[host].is_limited]
        detail = "; ".join(f"{host}: {used[host].detail}" for host in victims[:4])
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(used),
            failed=failed,
            evidence={"starts": await _starts(target, victims)},
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The limits are still set on replicas that have not ended or restarted since; how often they were hit. If
        another fault limited the same resource of a host meanwhile, it is unknown which of the limits was hit."""
        starts, before = injection.evidence.get("starts", {}), injection.evidence.get("met", {})
        same = [host for host, number in (await _starts(target, list(starts))).items() if number == starts[host]]
        used = await self._uses(target, self._form_of(injection), list(before))
        failed = [f"{host} is no longer limited: {used[host].detail}" for host in same if not used[host].is_limited]
        counts = {
            host: now_met - then_met
            for host, then_met in before.items()
            if (now_met := used[host].met) is not None and then_met is not None
        }
        exercised, note = told_apart(counts, self._limited_by(injection.beside, self._form_of(injection)))
        detail = f"limit hit {plural(sum(counts.values()), 'time')} on {plural(len(counts), 'replica')}{note}"
        if not counts:
            detail = "; ".join(f"hits on {host} are not counted: {used[host].detail}" for host in before)
        if exercised is False and (not counts or len(counts) < len(before)):
            exercised = None
        return Proof(
            proven=not failed,
            exercised=exercised,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(before),
            failed=failed,
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Lift the limits, and start replicas that ended under them. Idempotent."""
        await _resources(target).release(injection.fault_id)
        if target.processes is not None:
            await target.processes.revive(injection.value.get("hosts", ()))

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """No limit of this kind is left on the victims, except those of other faults, and their replicas run and
        answer."""
        kind = self._form_of(injection)
        limited = self._limited_by(in_force, kind)
        freed = [host for host in injection.value["hosts"] if host not in limited]
        running = await prove_released(target, injection.value["hosts"], in_force=in_force)
        used = await self._uses(target, kind, freed)
        failed = [f"{host} is still limited: {use.detail}" for host, use in used.items() if use.is_limited]
        failed += running.failed
        free = plural_with(len(freed), "replica", ("is no longer limited", "are no longer limited"))
        detail = "; ".join(failed[:3]) if failed else f"{free}; {running.detail}"
        return Proof(proven=not failed, detail=detail, checked=len(freed) + running.checked, failed=failed)

    def _limited_by(self, faults: Sequence[Injection], kind: str) -> frozenset[str]:
        """The hosts that one of these faults limits in the same way."""
        return hosts_of([fault for fault in faults if fault.nemesis == self.name and self._form_of(fault) == kind])

    async def _uses(self, target: Target, kind: str, hosts: Sequence[str]) -> dict[str, ResourceUse]:
        resources = _resources(target)
        return dict(zip(hosts, await asyncio.gather(*(resources.usage(host, kind) for host in hosts)), strict=True))


def _not_limited(host: str, use: ResourceUse) -> str | None:
    if use.astray:
        return f"{use.astray[0]} of {host} is not under the limit"
    return None if use.is_limited else f"{host} is not limited: {use.detail}"


async def _starts(target: Target, hosts: Sequence[str]) -> dict[str, int]:
    """How often each of these replicas was started; those that are down are left out."""
    if target.processes is None:
        return {}
    views = await asyncio.gather(*map(target.processes.look, hosts))
    return {view.host: view.starts for view in views if view.state != DOWN}


def _resources(target: Target) -> Resources:
    if target.resources is None:
        raise ValueError("this cluster has no resources to act on")
    return target.resources


RESOURCES = ResourcesNemesis()
"""The instance that the registry returns; it is stateless."""
