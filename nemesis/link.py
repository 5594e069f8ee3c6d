"""The nemesis `link`: links between hosts that are late, lossy, doubled, out of order, narrow or damage packets.

The links are those between a victim and every other replica host, in both directions or in one. The proof sends the
harness's own probe packets: they must meet the fault on these links and not on any other link. Client traffic is not
affected. If the network counts what the system sends (CountsTraffic), the fault was exercised if any of that traffic
crossed the bad links after the proof; the form `corrupt`, if the receivers' kernels have refused some of the system's
packets since then (CountsRefusals).
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from typing import Any

from nemesis.forms import Form, FormNemesis, split_variant
from nemesis.protocol import Injection, Proof, told_apart
from nemesis.target import CountsRefusals, CountsTraffic, FindsBypasses, Link, LinkMeasure, Links, LinkShape, Target
from nemesis.words import plural, plural_with

__all__ = ["LINK", "LinkNemesis"]

PROBE_COUNT = 100
PROBE_BYTES = 64
BURST_COUNT = 50
BURST_BYTES = 1000
"""Packets sent back to back: 50 kB take half a second at the highest rate limit and almost no time without one.
Bursts also show reordering, which packets with long pauses between them do not."""

BURST_KINDS = ("rate", "reorder")

QUEUED_SHARE = 0.05
"""Least median delay that proves a rate limit, as a fraction of the time the burst needs at that rate. The median is
half of that time if all packets are sent at once. 26 ms or more for a full burst: healthy links never delay so much."""

WAIT_S = 1.5
"""How long to wait for the last probe packet, beyond the longest delay."""

MIN_DELAY_MS, MAX_DELAY_MS = 60.0, 160.0
"""From a delay that even a busy machine never shows without a fault to one between continents."""

HEAL_DEADLINE_S = 8.0

CORRUPT_BYTES = 400
"""Size of packets to be damaged: large enough that nearly every flipped bit is in the part that a probe can read."""

SEEN_SHARE = 0.8
"""Lower bound on the fraction of damaged probe packets that arrive: those with a bit flipped in a header, 42 bytes or
10 % of the packet, are dropped."""

_HEALTHY = LinkShape()

_WELL = ("is healthy", "are healthy")

Check = Callable[[LinkMeasure, LinkShape, LinkShape], str | None]


class LinkNemesis(FormNemesis):
    """Shapes links. See the module's docstring."""

    name = "link"
    description = "degrades links between hosts: latency, loss, duplication, reordering, low bandwidth, bit flips"
    forms: Mapping[str, Form] = {
        name: Form(name=name, description=description, needs=(("links", ability),), targets=targets)
        for name, description, ability, targets in (
            ("delay", "60 to 160 ms of latency, with 25 % jitter, in both directions", "delay",
             ("leader", "one", "minority", "all")),
            ("delay-out", "the same, but only for packets that the victims send", "delay", ("leader", "one")),
            ("delay-in", "the same, but only for packets that the victims receive", "delay", ("leader", "one")),
            ("loss", "10 to 40 % of the packets are lost, in both directions", "loss", ("leader", "minority", "all")),
            ("loss-out", "the same, but only for packets that the victims send", "loss", ("leader", "one")),
            ("loss-in", "the same, but only for packets that the victims receive", "loss", ("leader", "one")),
            ("duplicate", "20 to 60 % of the packets arrive twice", "duplicate", ("all", "leader")),
            ("reorder", "20 to 50 % of the packets overtake others by 10 to 30 ms", "reorder", ("all", "leader")),
            ("rate", "bandwidth limited to 32 to 96 kB/s", "rate", ("leader", "minority")),
            ("corrupt", "10 to 40 % of the packets have a bit flipped; the receiver's kernel drops them because of "
             "their checksums", "corrupt", ("leader", "minority")),
        )
    }  # fmt: skip

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        links = [
            link
            for link in (Link(source, destination) for source, destination in permutations(target.hosts, 2))
            if (link.source in hosts and not form.name.endswith("-in"))
            or (link.destination in hosts and not form.name.endswith("-out"))
        ]
        return {"links": [f"{link.source}->{link.destination}" for link in links], "shape": _shape(form.name, rng)}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Shape the links."""
        if injection.problem is None:
            shape = LinkShape(**injection.value["shape"])
            await _links(target).shape(injection.fault_id, dict.fromkeys(_links_of(injection), shape))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Probe packets meet the fault on its links and on no others, and none of the system's traffic bypasses these
        links. Links that other faults cut are left out."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        shaped = sorted(set(_links_of(injection)) - _cut(in_force))
        if not shaped:
            return Proof(proven=False, detail="other faults cut all of these links, so the effect cannot be observed")
        others = set(_all_links(target)) - set(_links_of(injection)) - _cut(in_force) - _shaped(in_force)
        shape, form = LinkShape(**injection.value["shape"]), split_variant(injection.variant)[0]
        measures = await _measure(target, [*shaped, *sorted(others)], form, shape)
        effect = _EFFECTS[_kind(form)]
        failed = [
            f"{_name(link)}: {problem}"
            for link in shaped
            if (problem := effect(measures[link], shape, _beside(link, in_force)))
        ]
        failed += [
            f"{_name(link)} should be healthy: {_seen(measures[link])}"
            for link in sorted(others)
            if measures[link].received == 0 or _shows(measures[link], form, shape)
        ]
        failed += await _bypasses(target, shaped)
        mechanism = _links(target).mechanism
        well = plural_with(len(others), "other", _WELL)
        detail = f"{plural(len(shaped), 'link')} via {mechanism}: {_seen(measures[shaped[0]])}; {well}"
        carried = await _carried(target, shaped)
        evidence: dict[str, Any] = {} if carried is None else {"carried_bytes": carried}
        if _kind(form) == "corrupt" and (refused := await _refused(target, shaped)) is not None:
            evidence["refused"] = refused
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(measures),
            failed=failed,
            evidence=evidence,
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """How much of the system's traffic has crossed the bad links since the proof, or was refused as damaged; still
        nothing bypasses these links."""
        if "refused" in injection.evidence:
            return await _prove_refused(target, injection)
        links = [Link(*name.split("->")) for name in injection.evidence.get("carried_bytes", ())]
        carried = await _carried(target, links)
        if not links or carried is None:
            return Proof(proven=True, detail="this network does not count the system's traffic")
        before = injection.evidence["carried_bytes"]
        used = {name: size_bytes - before[name] for name, size_bytes in carried.items() if size_bytes > before[name]}
        carried_bytes = plural(sum(used.values()), "byte")
        detail = f"{carried_bytes} of the system's traffic crossed {len(used)} of {plural(len(links), 'bad link')}"
        if failed := await _bypasses(target, links):
            detail = "; ".join(failed[:3])
        return Proof(proven=not failed, exercised=bool(used), detail=detail, checked=len(links), failed=failed)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Undo the shaping. Idempotent."""
        await _links(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Probe packets no longer meet the fault on its links. Links that other faults cut or shape are left out."""
        if injection.problem is not None:
            return Proof(proven=True, detail="nothing was shaped")
        mended = sorted(set(_links_of(injection)) - _cut(in_force) - _shaped(in_force))
        shape, form = LinkShape(**injection.value["shape"]), split_variant(injection.variant)[0]
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + HEAL_DEADLINE_S
        failed: list[str] = []
        while mended:
            measures = await _measure(target, mended, form, shape)
            failed = [
                f"{_name(link)}: {_seen(measure)}"
                for link, measure in measures.items()
                if measure.received == 0 or _shows(measure, form, shape)
            ]
            if not failed or loop.time() > deadline_s:
                break
            await asyncio.sleep(0.2)
        detail = "; ".join(failed[:3]) if failed else plural_with(len(mended), "link", _WELL)
        return Proof(proven=not failed, detail=detail, checked=len(mended), failed=failed)


async def _prove_refused(target: Target, injection: Injection) -> Proof:
    before: Mapping[str, int] = injection.evidence["refused"]
    now = await _refused_by(target, list(before)) or before
    counts = {host: now[host] - count for host, count in before.items()}
    hit = [host for host, count in counts.items() if count > 0]
    others = [fault for fault in injection.beside if "corrupt_percent" in fault.value.get("shape", ())]
    exercised, note = told_apart(counts, {link.destination for fault in others for link in _links_of(fault)})
    detail = f"{sum(counts.values())} damaged TCP segments were dropped by {', '.join(hit) or 'no host'}{note}"
    return Proof(proven=True, exercised=exercised, detail=detail, checked=len(before))


async def _refused(target: Target, links: Collection[Link]) -> dict[str, int] | None:
    """Segments refused so far by the kernels at the receiving ends of links; None if they are not counted."""
    return await _refused_by(target, sorted({link.destination for link in links}))


async def _refused_by(target: Target, hosts: Sequence[str]) -> dict[str, int] | None:
    return dict(await target.links.refused(hosts)) if isinstance(target.links, CountsRefusals) else None


async def _bypasses(target: Target, links: Collection[Link]) -> list[str]:
    """How the system bypasses these links, if the mechanism that shapes them allows for it."""
    return list(await target.links.bypasses(sorted(links))) if isinstance(target.links, FindsBypasses) else []


async def _carried(target: Target, links: Collection[Link]) -> dict[str, int] | None:
    """Link name -> bytes that the system has sent over the link so far; None if the network does not count them."""
    network = target.network
    if not isinstance(network, CountsTraffic):
        return None
    traffic = await network.traffic(sorted(links))
    return {_name(link): counted.passed_bytes + counted.stopped_bytes for link, counted in traffic.items()}


def _shape(form: str, rng: random.Random) -> dict[str, float]:
    """The shape of the links, as recorded in the history."""
    kind = _kind(form)
    if kind == "delay":
        delay_ms = round(rng.uniform(MIN_DELAY_MS, MAX_DELAY_MS), 1)
        return {"delay_ms": delay_ms, "jitter_ms": round(delay_ms / 4, 1)}
    if kind == "loss":
        return {"loss_percent": round(rng.uniform(10, 40), 1)}
    if kind == "duplicate":
        return {"duplicate_percent": round(rng.uniform(20, 60), 1)}
    if kind == "reorder":
        return {"delay_ms": round(rng.uniform(10, 30), 1), "reorder_percent": round(rng.uniform(20, 50), 1)}
    if kind == "corrupt":
        return {"corrupt_percent": round(rng.uniform(10, 40), 1)}
    return {"rate_bytes_per_s": float(rng.randrange(32_000, 96_001, 1000))}


def _kind(form: str) -> str:
    return form.removesuffix("-in").removesuffix("-out")


# Checks that a measure shows the fault: None if it does, otherwise what it shows instead. `beside` is what other
# faults do to the same link at that time.


def _is_late(measure: LinkMeasure, shape: LinkShape, beside: LinkShape) -> str | None:
    if not measure.delays_ms:
        return "nothing arrived"
    count = len(measure.delays_ms)
    late = sum(delay_ms >= shape.delay_ms - shape.jitter_ms for delay_ms in measure.delays_ms)
    # Packets that overtake others because of another fault are not held up by this delay either.
    if late >= min(count / 2, _least(count, 100 - beside.reorder_percent)):
        return None
    return f"{statistics.median(measure.delays_ms):.1f} ms late"


def _is_lossy(measure: LinkMeasure, shape: LinkShape, beside: LinkShape) -> str | None:
    lost = measure.sent - measure.received - measure.damaged
    if not measure.received:
        return "nothing arrived"
    return None if lost >= _least(measure.sent, shape.loss_percent) else f"{lost} of {measure.sent} lost"


def _is_doubled(measure: LinkMeasure, shape: LinkShape, beside: LinkShape) -> str | None:
    least = _least(measure.received, shape.duplicate_percent)
    return None if measure.duplicates >= least else f"{measure.duplicates} of {measure.received} arrived twice"


def _is_disordered(measure: LinkMeasure, shape: LinkShape, beside: LinkShape) -> str | None:
    # One overtaking packet shows as one or more packets out of order, so this is far below the expected number.
    least = max(1.0, measure.received * shape.reorder_percent / 100 / 10)
    return None if measure.out_of_order >= least else f"{measure.out_of_order} of {measure.received} out of order"


def _is_damaged(measure: LinkMeasure, shape: LinkShape, beside: LinkShape) -> str | None:
    least = _least(measure.sent, SEEN_SHARE * shape.corrupt_percent * (1 - beside.loss_percent / 100))
    if measure.damaged >= least:
        return None
    return f"{measure.damaged} of {measure.sent} arrived damaged"


def _is_narrow(measure: LinkMeasure, shape: LinkShape, beside: LinkShape) -> str | None:
    # The nodes' own traffic uses part of the rate; it can only make the probe slower. A full buffer drops the rest.
    # Packets must also have queued behind each other: a slow machine may take as long just to send them.
    needed_s = measure.received * BURST_BYTES / shape.rate_bytes_per_s
    median_ms = statistics.median(measure.delays_ms) if measure.delays_ms else 0.0
    if measure.received and measure.seconds >= 0.5 * needed_s and median_ms >= 1000 * QUEUED_SHARE * needed_s:
        return None
    return f"{measure.received} packets of {BURST_BYTES} bytes in {measure.seconds:.3f} s, {median_ms:.1f} ms late"


_EFFECTS: Mapping[str, Check] = {
    "delay": _is_late,
    "loss": _is_lossy,
    "duplicate": _is_doubled,
    "reorder": _is_disordered,
    "rate": _is_narrow,
    "corrupt": _is_damaged,
}


def _shows(measure: LinkMeasure, form: str, shape: LinkShape) -> bool:
    """Whether a link that should be healthy shows the fault. Once in some thousands of measures, one or two of fifty
    packets on a healthy link are late; the threshold for reordering is therefore higher here than in a proof."""
    if _kind(form) == "reorder":
        return measure.out_of_order >= max(1.0, measure.received * shape.reorder_percent / 100 / 4)
    if _kind(form) == "corrupt":
        return measure.damaged > 0
    return _EFFECTS[_kind(form)](measure, shape, _HEALTHY) is None


def _least(count: int, percent: float) -> float:
    """The fewest of `count` packets that `percent` hits in all but one case in a million (five sigma); at least 1."""
    share = percent / 100
    return max(1.0, count * share - 5 * math.sqrt(count * share * (1 - share)))


async def _measure(target: Target, links: Collection[Link], form: str, shape: LinkShape) -> Mapping[Link, LinkMeasure]:
    is_burst = _kind(form) in BURST_KINDS
    longest_s = (shape.delay_ms + shape.jitter_ms) / 1000
    if shape.rate_bytes_per_s:
        longest_s = 1.5 * BURST_COUNT * BURST_BYTES / shape.rate_bytes_per_s
    return await _links(target).measure(
        links,
        count=BURST_COUNT if is_burst else PROBE_COUNT,
        size_bytes=BURST_BYTES if is_burst else CORRUPT_BYTES if _kind(form) == "corrupt" else PROBE_BYTES,
        timeout_s=longest_s + WAIT_S,
    )


def _seen(measure: LinkMeasure) -> str:
    median_ms = statistics.median(measure.delays_ms) if measure.delays_ms else 0.0
    return (
        f"{measure.received} of {measure.sent} arrived, {median_ms:.1f} ms late, "
        f"{measure.duplicates} twice, {measure.out_of_order} out of order, {measure.damaged} damaged, "
        f"in {measure.seconds:.2f} s"
    )


def _links(target: Target) -> Links:
    if target.links is None:
        raise ValueError("this cluster has no links to act on")
    return target.links


def _all_links(target: Target) -> list[Link]:
    return [Link(source, destination) for source, destination in permutations(target.hosts, 2)]


def _links_of(injection: Injection) -> list[Link]:
    return [Link(*name.split("->")) for name in injection.value.get("links", ())]


def _beside(link: Link, in_force: Sequence[Injection]) -> LinkShape:
    """The combined shape that other faults give a link."""
    shape = LinkShape()
    for fault in in_force:
        if "shape" in fault.value and link in _links_of(fault):
            shape = LinkShape(**fault.value["shape"]).on_top_of(shape)
    return shape


def _cut(in_force: Sequence[Injection]) -> set[Link]:
    """Links that partitions cut."""
    return {
        Link(source, destination)
        for fault in in_force
        for destination, sources in fault.value.get("grudge", {}).items()
        for source in sources
    }


def _shaped(in_force: Sequence[Injection]) -> set[Link]:
    return {link for fault in in_force if fault.nemesis == "link" for link in _links_of(fault)}


def _name(link: Link) -> str:
    return f"{link.source}->{link.destination}"


LINK = LinkNemesis()
"""The instance that the registry returns; it is stateless."""
