"""The nemesis `name-service`: host names cannot be resolved, or resolve slowly or to wrong addresses.

Every program of a host has a resolv.conf that names the host's own name service, which knows the other hosts, and an
/etc/hosts without them. Programs that resolve names through the C library, Go's own resolver or Java's therefore ask
that service, unless they have cached an earlier answer: Java caches an address for 30 s and a failure for 10 s, Go and
the C library cache nothing. It is proved that the service of every victim answers as the fault says, that every process
of the victim's replica uses this service, and that the services of all other hosts answer correctly. The fault was
exercised if the replica's programs asked the service for another host while it lasted; no other programs use the
service, and the harness's own queries are not counted.

Replicas look up a name when they connect; open connections need none. The form `cold` therefore restarts the replica
while no name can be resolved. The other forms are met when another fault ends connections, or by systems that reconnect
all the time, as etcd does. A system that is given only addresses makes no lookups and never meets the fault: for
the built-in broker, which is one, a run with this nemesis alone is refused.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.forms import Form, FormNemesis, hosts_of
from nemesis.process import processes_of, prove_released
from nemesis.protocol import Injection, Proof
from nemesis.target import NameFault, NameLookup, Names, Target
from nemesis.words import plural

__all__ = ["NAME_SERVICE", "NameServiceNemesis"]

COLD = "cold"

MIN_DELAY_MS, MAX_DELAY_MS = 1500, 3500
"""Delay of a slow answer: above ANSWER_S, and below the 5 s that resolvers wait."""

ANSWER_S = 1.0
"""An answer within this time counts as immediate, even on a busy machine; a later one is slow or missing."""

EARLY_MS = 50
"""A delayed answer may be early by this much: clocks of event loops are coarse."""


class NameServiceNemesis(FormNemesis):
    """Makes some hosts unable to resolve the others' names, or to do so correctly. See the module's docstring."""

    name = "name-service"
    description = "host names cannot be resolved, or resolve slowly or to wrong addresses"
    is_of_all = False  # it requires that replicas get each other's host names, not addresses as in other runs
    forms: Mapping[str, Form] = {
        form.name: form
        for form in (
            Form(
                name="gone",
                description="no host name resolves: the name service answers NXDOMAIN",
                needs=(("names", "gone"),),
                targets=("all", "one", "leader"),
            ),
            Form(
                name="cold",
                description="no host name resolves (NXDOMAIN), and the replica is killed and restarted meanwhile",
                needs=(("names", "gone"), ("processes", "kill")),
                targets=("one", "leader"),
            ),
            Form(
                name="silent",
                description="the name service does not answer, so lookups end when the resolver times out",
                needs=(("names", "silent"),),
                targets=("all", "one"),
            ),
            Form(
                name="slow",
                description="every answer arrives 1.5 to 3.5 s late",
                needs=(("names", "slow"),),
                targets=("all", "minority"),
            ),
            Form(
                name="wrong",
                description="every name resolves to the address of another host",
                needs=(("names", "wrong"),),
                targets=("one", "minority"),
            ),
            Form(
                name="unused",
                description="every name resolves to an address that no host has",
                needs=(("names", "unused"),),
                targets=("one", "minority"),
            ),
        )
    }

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """As for every `FormNemesis`, and a second host whose name can be looked up."""
        problems = super().requires(target, variant)
        return (
            problems
            if len(target.hosts) > 1
            else [*problems, f"{self.name}: needs at least 2 hosts: a single host looks up no names"]
        )

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"delay_ms": rng.randint(MIN_DELAY_MS, MAX_DELAY_MS)} if form.name == "slow" else {}

    async def _seen_before(self, form: Form, target: Target, hosts: Sequence[str]) -> Mapping[str, Any]:
        """How often each victim of `cold` was started before."""
        return {"starts": await _starts(target, hosts)} if form.name == COLD else {}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Have the victims' services answer as the fault says from now on; `cold` then kills and starts the victims."""
        if injection.problem is not None:
            return
        hosts = injection.value["hosts"]
        fault = NameFault(kind=self._kind_of(injection), delay_ms=injection.value.get("delay_ms", 0))
        await _names(target).disturb(injection.fault_id, dict.fromkeys(hosts, fault))
        if self._form_of(injection) == COLD:
            processes = processes_of(target)
            await processes.end(injection.fault_id, hosts)
            await processes.release(injection.fault_id)

    def _kind_of(self, injection: Injection) -> str:
        """The ability of `Names` that the fault uses."""
        form = self._form_of(injection)
        return "gone" if form == COLD else form

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The service of every victim, queried for every other host, answers as the fault says, and every process of
        the victim's replica uses that service; the services of all other hosts answer correctly and at once. For
        `cold`, every victim was also started again."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        disturbed = self._disturbed(in_force)
        victims = [host for host in injection.value["hosts"] if host not in disturbed]
        if not victims:
            return Proof(proven=False, detail="another fault already disturbs the names of every victim")
        others = [host for host in target.hosts if host not in {*injection.value["hosts"], *disturbed}]
        kind, delay_ms = self._kind_of(injection), int(injection.value.get("delay_ms", 0))
        expected = {**dict.fromkeys(victims, (kind, delay_ms)), **dict.fromkeys(others, ("", 0))}
        found = await asyncio.gather(*(_problems(target, host, *wanted) for host, wanted in expected.items()))
        failed = [problem for problems in found for problem in problems]
        before: Mapping[str, int] = injection.evidence.get("starts", {})
        now = await _starts(target, list(before))
        failed += [f"{host} was not restarted" for host in before if now[host] <= before[host]]
        names = len(target.hosts) - 1
        detail = f"{kind}: {names} names each on {', '.join(victims)}; names resolve correctly on {len(others)} others"
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(expected),
            failed=failed,
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The replicas still use these services; how often their own queries got such an answer."""
        names, hosts = _names(target), list(injection.value["hosts"])
        failed = [problem for host in hosts if (problem := await names.reaches(host)) is not None]
        found = await names.met(injection.fault_id)
        failed += [
            f"{each.calls} lookups by {host} were answered correctly despite the fault"
            for host, each in sorted(found.items())
            if each.calls and not each.met
        ]
        met = sum(each.met or 0 for each in found.values())
        if met:
            detail = f"{', '.join(host for host in hosts if host in found and found[host].met)} got {met} such answers"
        else:
            detail = (
                f"the programs of {', '.join(hosts)} looked up no name: they do when they connect, as after a start "
                "(name-service=cold), if the plug-in gives them host.advertise(port) instead of addresses"
            )
        return Proof(
            proven=not failed,
            exercised=met > 0,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(hosts),
            failed=failed,
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Have the services answer correctly, and start replicas that ended for lack of a name. Idempotent."""
        await _names(target).release(injection.fault_id)
        if target.processes is not None:
            await target.processes.release(injection.fault_id)
            await target.processes.revive(injection.value.get("hosts", ()))

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The services of the victims answer correctly and at once, except those that another fault disturbs, and the
        replicas run and answer."""
        hosts: Sequence[str] = injection.value["hosts"]
        disturbed = self._disturbed(in_force)
        freed = [host for host in hosts if host not in disturbed]
        running = await prove_released(target, hosts, in_force=in_force)
        found = await asyncio.gather(*(_problems(target, host, "", 0) for host in freed))
        failed = [*(problem for problems in found for problem in problems), *running.failed]
        hosts_right = plural(len(freed), "host")
        detail = "; ".join(failed[:3]) if failed else f"names resolve correctly on {hosts_right}; {running.detail}"
        return Proof(proven=not failed, detail=detail, checked=len(freed) + running.checked, failed=failed)

    def _disturbed(self, in_force: Sequence[Injection]) -> frozenset[str]:
        """The hosts whose names another fault of this kind disturbs."""
        return hosts_of([fault for fault in in_force if fault.nemesis == self.name])


async def _starts(target: Target, hosts: Sequence[str]) -> dict[str, int]:
    """How often the replica of each host was started so far."""
    if target.processes is None:
        return {}
    views = await asyncio.gather(*map(target.processes.look, hosts))
    return {view.host: view.starts for view in views}


async def _problems(target: Target, host: str, kind: str, delay_ms: int) -> list[str]:
    """How the service of `host` differs from what a fault of this kind ("": no fault) makes it do."""
    names = _names(target)
    try:
        lookups = await names.look_up(host, timeout_s=ANSWER_S + delay_ms / 1000)
    except RuntimeError as error:
        return [f"{host}: {error}"]
    problems = [f"{host} {problem}" for each in lookups if (problem := _difference(each, kind, delay_ms)) is not None]
    if not lookups:
        problems.append(f"{host} has a name service that knows no hosts")
    astray = await names.reaches(host)
    return problems if astray is None else [*problems, astray]


def _difference(lookup: NameLookup, kind: str, delay_ms: int) -> str | None:
    """How an answer differs from what a fault of this kind ("": no fault) makes it; None when it does not."""
    took_ms = lookup.seconds * 1000
    said = f"resolves {lookup.name} to {lookup.found} after {took_ms:.0f} ms"
    if lookup.found in ("gone", "silent"):
        said = f"gets no address for {lookup.name} ({lookup.found})"
        return None if lookup.found == kind else said
    is_right = lookup.found == lookup.right
    if kind in ("wrong", "unused"):
        return said if is_right or lookup.leads_to_host is (kind == "unused") else None
    if kind == "slow":
        return None if is_right and took_ms >= delay_ms - EARLY_MS else said
    return None if not kind and is_right and lookup.seconds < ANSWER_S else said


def _names(target: Target) -> Names:
    if target.names is None:
        raise ValueError("the hosts of this cluster have no names to act on")
    return target.names


NAME_SERVICE = NameServiceNemesis()
"""The instance that the registry returns; it is stateless."""
