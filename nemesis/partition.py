"""The nemesis `partition`: cuts links between hosts, in the shapes of `nemesis.shapes`.

Each cut and each heal is proved by probing every link between the hosts. A link that should be cut must
not pass; every other link, unless another fault cuts it, must. Both are needed: a probe that never passes
anything would prove every cut.

Probes are the harness's own traffic. If the network counts what the programs on the hosts send each other
(CountsTraffic), none of their bytes may have passed a cut link between the proof and the healing, and the cut was
exercised if some of their traffic ran into it. Nor may any of it have bypassed the cut (FindsBypasses).
"""

from __future__ import annotations

import asyncio
import difflib
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

from nemesis.protocol import Injection, Proof
from nemesis.shapes import SHAPES, named_grudge, named_problem
from nemesis.target import (
    CountsTraffic,
    FindsBypasses,
    Grudge,
    Link,
    LinkTraffic,
    Network,
    ProbeResult,
    Target,
    links_of,
)
from nemesis.victims import find_leader
from nemesis.words import plural, plural_with

__all__ = ["PARTITION", "Partition", "grudge_from_json", "grudge_to_json"]

CUT_TIMEOUT_S = 0.25
"""How long a probe of a cut link waits for bytes that should not come. A passing link answers in well under
a millisecond on one machine; `Partition.prove` waits longer if the uncut links took longer."""

SETTLE_S = 0.5
"""How long after the injection a link may still pass bytes that were in flight, before the cut has failed."""

PASS_TIMEOUT_S = 2.0
"""How long a link that should pass may take. Only a link that does not pass takes all of that time."""

HEAL_DEADLINE_S = 10.0
"""How long after the heal a link may need until it passes: TCP retransmits a packet that was lost several times
only after some seconds."""

_PASS = ("passes", "pass")


def grudge_to_json(grudge: Grudge) -> dict[str, list[str]]:
    """A grudge as JSON data: destination -> sources, both sorted; hosts that drop nothing are left out."""
    return {destination: sorted(grudge[destination]) for destination in sorted(grudge) if grudge[destination]}


def grudge_from_json(data: Mapping[str, Iterable[str]]) -> Grudge:
    """The inverse of `grudge_to_json`."""
    return {destination: frozenset(sources) for destination, sources in data.items()}


def _cut_by(injections: Iterable[Injection]) -> set[Link]:
    """The links that faults of any kind report as cut."""
    return {link for fault in injections for link in links_of(grudge_from_json(fault.value.get("grudge", {})))}


def _name(link: Link) -> str:
    return f"{link.source}->{link.destination}"


class Partition:
    """Cuts links between hosts; variants are the shapes, and cuts named by their hosts such as `n1+n2|n3` (see
    nemesis.shapes.named_problem). See the module's docstring for what is proved."""

    name = "partition"
    description = "cuts the network between hosts, in both directions or in one"
    variants: Sequence[str] = tuple(SHAPES)

    def variant_problem(self, variant: str) -> str | None:
        """Why there is no such variant, as one line; None if it exists."""
        if variant in SHAPES:
            return None
        if "|" in variant or ">" in variant:
            return named_problem(variant)
        near = difflib.get_close_matches(variant, SHAPES, n=1, cutoff=0.55)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = f"{', '.join(SHAPES)}, or hosts by name as in n1+n2|n3 or n1>n2"
        return f"nemesis partition has no variant {variant!r}{hint}; known: {known}"

    def needs_leader(self, variant: str) -> bool:
        """Whether a shape depends on who leads."""
        return variant in SHAPES and SHAPES[variant].needs_leader

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """The problems: no network to cut, or too few hosts for the shape (without a variant: for every shape)."""
        problems = []
        if target.network is None:
            problems.append("partition: this cluster has no network that can be cut")
        if variant is not None and variant not in SHAPES:
            problem = self.variant_problem(variant) or named_problem(variant, target.hosts)
            return problems if problem is None else [*problems, problem]
        host_count = len(target.hosts)
        shapes = list(SHAPES.values()) if variant is None else [SHAPES[variant]]
        unfit = [shape.problem(host_count) for shape in shapes]
        if variant is not None:
            problems.extend(problem for problem in unfit if problem is not None)
        elif all(unfit):
            problems.append(f"partition needs at least 2 hosts, not {host_count}")
        return problems

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Choose the grudge; shapes that depend on the leader wait for one (see find_leader).

        If there is none in time, the injection has an empty grudge and the problem "no leader found".
        Raises ValueError (ShapeError) for an unknown variant or too few hosts.
        """
        shape = SHAPES.get(variant)
        if shape is None:
            problem = self.variant_problem(variant) or named_problem(variant, target.hosts)
            if problem is not None:
                raise ValueError(problem)
            grudge = grudge_to_json(named_grudge(variant))
            named = {"id": fault_id, "nemesis": self.name, "variant": variant, "grudge": grudge}
            seen = await _before(target, grudge)
            return Injection(fault_id=fault_id, nemesis=self.name, variant=variant, value=named, evidence=seen)
        value: dict[str, Any] = {"id": fault_id, "nemesis": self.name, "variant": variant, "grudge": {}}
        leader, problem = None, None
        if shape.needs_leader:
            leader = await find_leader(target)
            value["leader"] = leader
            if leader is None:
                problem = "no leader found"
        if problem is None:
            value["grudge"] = grudge_to_json(shape.grudge(target.hosts, rng, leader))
        return Injection(
            fault_id=fault_id,
            nemesis=self.name,
            variant=variant,
            value=value,
            problem=problem,
            evidence=await _before(target, value["grudge"]),
        )

    async def inject(self, target: Target, injection: Injection) -> None:
        """Cut what was planned; nothing when the plan has a problem."""
        if injection.problem is None:
            await _network(target).cut(injection.fault_id, grudge_from_json(injection.value["grudge"]))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Probe every link between the hosts: those of the grudge must not pass, the others must.

        Links that other faults in force cut are left out unless they are also in this grudge. A link of the
        grudge that passes is probed again until SETTLE_S after the first probes; if it still passes, the fault is
        not proven. Nor is it if a source can send nothing, which is not the cut's doing. A link that should pass is
        not probed again: nothing has touched it. Nor may the system's programs have connections that bypass the cut.
        """
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        network = _network(target)
        cut = _cut_by([injection])
        if not cut:
            return Proof(proven=False, detail="the grudge cuts no link")
        whole = set(_links_between(target.hosts)) - cut - _cut_by(in_force)
        passed_s, (still_passing, not_passing), unsent = await _timed_probe(network, cut, whole)
        # If passing links are slow on this machine, such a short silence would prove nothing.
        timeout_s = max(CUT_TIMEOUT_S, 2 * passed_s)
        if timeout_s > CUT_TIMEOUT_S:
            still_passing |= _passing(await network.probe(sorted(cut), timeout_s=timeout_s))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SETTLE_S
        while still_passing and loop.time() < deadline_s:
            await asyncio.sleep(SETTLE_S / 10)
            still_passing = _passing(await network.probe(sorted(still_passing), timeout_s=timeout_s))
        failed = [f"{_name(link)} still passes" for link in sorted(still_passing)]
        failed += [
            f"nothing could be sent over {_name(link)}, cut or not: {why}" for link, why in sorted(unsent.items())
        ]
        failed += [f"{_name(link)} should pass but does not" for link in sorted(not_passing)]
        failed += await _bypasses(network, cut)
        as_planned = f"{plural(len(cut), 'link')} cut, {plural_with(len(whole), 'other', _PASS)}"
        detail = "; ".join(failed[:3]) if failed else as_planned
        counted = _to_json(await _traffic(network, cut))
        evidence = {"at_proof": counted} if counted else {}
        return Proof(proven=not failed, detail=detail, checked=len(cut) + len(whole), failed=failed, evidence=evidence)

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """None of the system's traffic has passed a cut link since the proof. The cut was exercised if some ran into
        it. If none did and other faults cut all of the same links, that is unknown: theirs may have stopped it."""
        network = _network(target)
        cut = _cut_by([injection])
        now = await _traffic(network, cut)
        if not now:
            return Proof(proven=True, detail="this network does not count the system's traffic", checked=len(cut))
        at_proof, before = (_from_json(injection.evidence.get(name, {})) for name in ("at_proof", "before"))
        since_proof = {link: now[link].since(at_proof.get(link, LinkTraffic())) for link in cut}
        failed = [
            f"{_name(link)} carried {traffic.passed_bytes} bytes of the system's traffic while it was cut"
            for link, traffic in sorted(since_proof.items())
            if traffic.passed_bytes
        ]
        failed += await _bypasses(network, cut)
        stopped = {link: now[link].since(before.get(link, LinkTraffic())) for link in cut}
        met = {link: traffic for link, traffic in stopped.items() if traffic.ran_into_cut}
        exercised: bool | None = True
        if met:
            detail = _stopped_in_words(met, cut)
        else:
            exercised = None if cut <= _cut_by(in_force) else False
            unused = sorted(link for link in cut if not now[link].was_used)
            detail = f"none of the system's traffic ran into the cut of {plural(len(cut), 'link')}"
            if unused:
                detail += f"; none has ever used {', '.join(map(_name, unused[:3]))}"
                detail += f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        return Proof(
            proven=not failed,
            exercised=exercised,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(cut),
            failed=failed,
            evidence={"at_end": _to_json(now)},
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Undo this fault's cut; links that other faults cut stay cut. Idempotent."""
        await _network(target).heal(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Every link between the hosts must pass, except those that other faults in force cut.

        A link that does not pass yet is probed again until HEAL_DEADLINE_S after the first probe.
        """
        network = _network(target)
        whole = set(_links_between(target.hosts)) - _cut_by(in_force)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + HEAL_DEADLINE_S
        missing = whole
        while True:
            left_s = deadline_s - loop.time()
            timeout_s = min(PASS_TIMEOUT_S, max(left_s, CUT_TIMEOUT_S))
            missing = _not_whole(await network.probe(sorted(missing), timeout_s=timeout_s))
            if not missing or loop.time() >= deadline_s:
                break
            await asyncio.sleep(0.1)
        failed = [f"{_name(link)} does not pass" for link in sorted(missing)]
        detail = plural_with(len(whole), "link", _PASS) if not failed else "; ".join(failed[:3])
        return Proof(proven=not failed, detail=detail, checked=len(whole), failed=failed)


def _network(target: Target) -> Network:
    network = target.network
    if network is None:
        raise ValueError("partition: this cluster has no network that can be cut")
    return network


async def _traffic(network: Network, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
    """What the system has sent over these links so far; empty if the network does not count that."""
    return await network.traffic(sorted(links)) if isinstance(network, CountsTraffic) else {}


async def _before(target: Target, grudge: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The evidence of a plan: the traffic so far on the links to be cut."""
    links = links_of(grudge_from_json(grudge))
    if target.network is None or not links:
        return {}
    counted = _to_json(await _traffic(target.network, links))
    return {"before": counted} if counted else {}


async def _bypasses(network: Network, links: Collection[Link]) -> list[str]:
    return list(await network.bypasses(sorted(links))) if isinstance(network, FindsBypasses) else []


def _to_json(traffic: Mapping[Link, LinkTraffic]) -> dict[str, list[int]]:
    """Counters as recorded in the history: link -> [bytes passed, bytes stopped, connections stopped]."""
    return {
        _name(link): [counted.passed_bytes, counted.stopped_bytes, counted.stopped_connections]
        for link, counted in sorted(traffic.items())
    }


def _from_json(data: Mapping[str, Sequence[int]]) -> dict[Link, LinkTraffic]:
    return {
        Link(*name.split("->")): LinkTraffic(
            passed_bytes=passed_bytes, stopped_bytes=stopped_bytes, stopped_connections=stopped_connections
        )
        for name, (passed_bytes, stopped_bytes, stopped_connections) in data.items()
    }


def _stopped_in_words(met: Mapping[Link, LinkTraffic], cut: Collection[Link]) -> str:
    stopped_bytes = sum(traffic.stopped_bytes for traffic in met.values())
    connections = sum(traffic.stopped_connections for traffic in met.values())
    counts = {"byte": stopped_bytes, "connection": connections}
    words = [plural(number, noun) for noun, number in counts.items() if number]
    return f"{' and '.join(words)} of the system's traffic ran into the cut, on {len(met)} of {len(cut)} links"


def _links_between(hosts: Sequence[str]) -> list[Link]:
    return [Link(source, destination) for source, destination in permutations(hosts, 2)]


def _passing(results: Sequence[ProbeResult]) -> set[Link]:
    return {result.link for result in results if result.passed}


def _not_whole(results: Sequence[ProbeResult]) -> set[Link]:
    """Links that do not pass, or pass only partly; a partly passing link is neither cut nor whole."""
    return {result.link for result in results if result.partial or not result.passed}


async def _timed_probe(
    network: Network, cut: Collection[Link], whole: Collection[Link]
) -> tuple[float, tuple[set[Link], set[Link]], dict[Link, str]]:
    """Probe both sets at once. Returns (seconds the whole links took, (cut that pass, whole that do not), those cut
    over which nothing could be sent, with the reason)."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def probe_whole() -> tuple[float, set[Link]]:
        missing = _not_whole(await network.probe(sorted(whole), timeout_s=PASS_TIMEOUT_S))
        return (0.0 if missing else loop.time() - begin_s), missing

    cut_results, (passed_s, missing) = await asyncio.gather(
        network.probe(sorted(cut), timeout_s=CUT_TIMEOUT_S), probe_whole()
    )
    unsent = {result.link: result.detail for result in cut_results if not result.was_sent}
    return passed_s, (_passing(cut_results), missing), unsent


PARTITION = Partition()
"""The instance that the registry returns; it is stateless."""
