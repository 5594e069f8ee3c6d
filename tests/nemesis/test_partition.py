"""The partition nemesis proves its cuts, and reports cuts without effect as unproven."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nemesis.partition import (
    HEAL_DEADLINE_S,
    PARTITION,
    SETTLE_S,
    grudge_from_json,
    grudge_to_json,
)
from nemesis.protocol import Injection, usable_variants
from nemesis.shapes import SHAPES
from nemesis.target import Link, links_of
from nemesis.victims import LEADER_TIMEOUT_S

Run = Callable[[Any], Any]


def plan(target: Any, variant: str, fault_id: str = "f1", seed: int = 0) -> Any:
    return PARTITION.plan(target, random.Random(seed), fault_id=fault_id, variant=variant)


def links(injection: Injection) -> frozenset[Link]:
    return links_of(grudge_from_json(injection.value["grudge"]))


@pytest.mark.parametrize("variant", sorted(SHAPES))
def test_every_variant_is_proved_and_healed(variant: str, make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, variant)
        assert injection.value["id"] == "f1" and injection.value["variant"] == variant
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        assert proof.proven and proof.checked == 20 and not proof.failed, proof
        await PARTITION.heal(target, injection)
        healed = await PARTITION.prove_healed(target, injection)
        assert healed.proven and healed.checked == 20

    run_virtual(main())


def test_a_plan_neither_cuts_nor_probes_links(make_target: Any, run_virtual: Run) -> None:
    target = make_target(5)
    run_virtual(plan(target, "leader"))
    assert not target.fake_network.cuts and not target.fake_network.probed


def test_the_leader_variant_isolates_the_leader_that_the_system_reports(make_target: Any, run_virtual: Run) -> None:
    target = make_target(5, leader="n4")
    injection = run_virtual(plan(target, "leader"))
    assert injection.value["leader"] == "n4"
    assert injection.value["grudge"]["n4"] == ["n1", "n2", "n3", "n5"]


def test_a_plan_waits_for_a_leader(make_target: Any, run_virtual: Run) -> None:
    async def main() -> Injection:
        target = make_target(3, leader=None)
        asyncio.get_running_loop().call_later(LEADER_TIMEOUT_S / 2, setattr, target, "leader", "n2")
        return await plan(target, "leader")

    assert run_virtual(main()).value["leader"] == "n2"


def test_without_a_leader_nothing_is_injected_or_proven(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5, leader=None)
        injection = await plan(target, "leader-minority")
        assert injection.problem == "no leader found"
        assert asyncio.get_running_loop().time() == pytest.approx(LEADER_TIMEOUT_S, abs=0.3)
        await PARTITION.inject(target, injection)
        assert not target.fake_network.cuts
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven and proof.detail == "no leader found"

    run_virtual(main())


def test_a_system_that_does_not_answer_does_not_hang_the_plan(make_target: Any, run_virtual: Run) -> None:
    async def main() -> Injection:
        target = make_target(5)
        target.leaders = lambda: asyncio.sleep(3600)
        return await plan(target, "leader")

    assert run_virtual(main()).problem == "no leader found"


def test_an_ineffective_cut_is_not_proven_after_the_settle_time(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, "halves")
        leaking = sorted(links(injection))[0]
        target.fake_network.ineffective = {leaking}
        await PARTITION.inject(target, injection)
        begin_s = asyncio.get_running_loop().time()
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven
        assert proof.failed == [f"{leaking.source}->{leaking.destination} still passes"]
        assert asyncio.get_running_loop().time() - begin_s < 3 * SETTLE_S

    run_virtual(main())


def test_a_cut_link_that_passes_in_part_is_not_proven(make_target: Any, run_virtual: Run) -> None:
    """A cut that stops only new connections, say."""

    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, "halves")
        leaking = sorted(links(injection))[0]
        target.fake_network.ineffective = target.fake_network.partial = {leaking}
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven
        assert proof.failed == [f"{leaking.source}->{leaking.destination} still passes"]

    run_virtual(main())


def test_silence_of_a_host_that_can_send_nothing_proves_no_cut(make_target: Any, run_virtual: Run) -> None:
    """Its links seem cut, whether they are or not."""

    async def main() -> None:
        target = make_target(3)
        injection = await plan(target, "n1|n2+n3")
        target.fake_network.ineffective = {N1_N2, Link("n1", "n3")}
        target.fake_network.mute = {"n1"}
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven
        assert proof.failed == [f"nothing could be sent over n1->{host}, cut or not: no route" for host in ("n2", "n3")]

    run_virtual(main())


def test_a_cut_that_takes_effect_within_the_settle_time_is_proven(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, "one")
        target.fake_network.ineffective = set(links(injection))
        await PARTITION.inject(target, injection)
        asyncio.get_running_loop().call_later(SETTLE_S / 2, target.fake_network.ineffective.clear)
        assert (await PARTITION.prove(target, injection)).proven

    run_virtual(main())


@pytest.mark.parametrize("harm", ["broken", "partial"])
def test_links_outside_the_cut_must_pass_completely(harm: str, make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, "halves")  # n1, n2 | n3, n4, n5
        getattr(target.fake_network, harm).add(Link("n4", "n5"))
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven and proof.failed == ["n4->n5 should pass but does not"]

    run_virtual(main())


def test_a_network_where_nothing_ever_passes_proves_no_cut(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(3)
        injection = await plan(target, "one")
        target.fake_network.broken = {Link(a, b) for a in target.hosts for b in target.hosts if a != b}
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven and len(proof.failed) == 2
        assert all(problem.endswith("should pass but does not") for problem in proof.failed)

    run_virtual(main())


def test_probes_of_cut_links_wait_longer_where_answers_are_slow(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, "halves")
        target.fake_network.answer_s = 0.4  # longer than a cut link is listened to at first
        target.fake_network.ineffective = set(links(injection))
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        assert not proof.proven and len(proof.failed) == len(links(injection))
        assert all(problem.endswith(" still passes") for problem in proof.failed)

    run_virtual(main())


def test_a_grudge_without_links_is_not_proven(make_target: Any, run_virtual: Run) -> None:
    value = {"id": "f1", "nemesis": "partition", "variant": "one", "grudge": {"n1": []}}
    injection = Injection(fault_id="f1", nemesis="partition", variant="one", value=value)
    proof = run_virtual(PARTITION.prove(make_target(3), injection))
    assert not proof.proven and proof.detail == "the grudge cuts no link"


def test_overlapping_cuts_are_proved_and_healed_independently(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        first = await plan(target, "halves", "f1")
        second = await plan(target, "leader", "f2")
        await PARTITION.inject(target, first)
        await PARTITION.inject(target, second)
        assert (await PARTITION.prove(target, second, in_force=[first])).proven
        proof = await PARTITION.prove(target, second)  # f1's links do not pass
        assert not proof.proven and all(problem.endswith("should pass but does not") for problem in proof.failed)
        await PARTITION.heal(target, first)
        healed = await PARTITION.prove_healed(target, first)  # f2's links do not pass
        assert not healed.proven and all(problem.endswith(" does not pass") for problem in healed.failed)
        assert (await PARTITION.prove_healed(target, first, in_force=[second])).proven
        await PARTITION.heal(target, second)
        await PARTITION.heal(target, second)
        assert (await PARTITION.prove_healed(target, second)).proven

    run_virtual(main())


def test_healed_links_have_until_a_deadline_to_pass_again(make_target: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_target(5)
        injection = await plan(target, "one")
        loop = asyncio.get_running_loop()
        target.fake_network.broken = set(links(injection))
        loop.call_later(HEAL_DEADLINE_S - 3, target.fake_network.broken.clear)
        assert (await PARTITION.prove_healed(target, injection)).proven
        target.fake_network.broken = {Link("n1", "n2")}
        begin_s = loop.time()
        proof = await PARTITION.prove_healed(target, injection)
        assert proof.failed == ["n1->n2 does not pass"]
        assert loop.time() - begin_s == pytest.approx(HEAL_DEADLINE_S, abs=1)

    run_virtual(main())


def test_unmet_requirements_of_a_partition_are_named(make_target: Any) -> None:
    target = make_target(2)
    assert PARTITION.requires(target) == []
    assert PARTITION.requires(target, "bridge") == ["partition shape bridge needs at least 3 hosts, not 2"]
    assert "has no variant 'helves'" in PARTITION.requires(target, "helves")[0]
    assert usable_variants(PARTITION, target) == ["halves", "random-halves", "one", "one-way", "leader"]
    assert PARTITION.requires(make_target(1)) == ["partition needs at least 2 hosts, not 1"]
    target.network = None
    assert PARTITION.requires(target) == ["partition: this cluster has no network that can be cut"]


def test_an_unknown_variant_is_refused(make_target: Any, run_virtual: Run) -> None:
    with pytest.raises(ValueError, match="no variant 'nope'"):
        run_virtual(plan(make_target(5), "nope"))


def test_grudges_round_trip_through_json() -> None:
    grudge = {"n2": frozenset({"n3", "n1"}), "n1": frozenset[str]()}
    assert grudge_to_json(grudge) == {"n2": ["n1", "n3"]}
    assert grudge_from_json(grudge_to_json(grudge)) == {"n2": frozenset({"n1", "n3"})}


# Whether the system's own traffic ran into a cut, judged by counters of what it sends.

N1_N2, N2_N1, N3_N1 = Link("n1", "n2"), Link("n2", "n1"), Link("n3", "n1")


def prove_cut_under_traffic(
    make_target: Any, run_virtual: Run, before: Callable[[Any], None], during: Callable[[Any], None]
) -> Any:
    """(first proof, final check) of n1 cut from n2 and n3, with the system's traffic `before` and `during` the cut."""

    async def main() -> Any:
        target = make_target(3, is_counting=True)
        before(target.network)
        injection = await plan(target, "n1|n2+n3")
        await PARTITION.inject(target, injection)
        proof = await PARTITION.prove(target, injection)
        lasting = replace(injection, evidence={**injection.evidence, **proof.evidence})
        # As recorded in the history, and as the driver passes it on.
        lasting = replace(lasting, evidence=json.loads(json.dumps(lasting.evidence)))
        during(target.network)
        return proof, await PARTITION.prove_met(target, lasting)

    return run_virtual(main())


def test_a_cut_is_exercised_if_system_traffic_ran_into_it(make_target: Any, run_virtual: Run) -> None:
    proof, met = prove_cut_under_traffic(
        make_target, run_virtual, before=lambda n: n.send(N1_N2, N2_N1), during=lambda n: n.send(N1_N2, N3_N1)
    )
    assert proof.proven and proof.exercised is None
    assert met.proven and met.exercised is True
    assert met.detail == "200 bytes of the system's traffic ran into the cut, on 2 of 4 links"


def test_a_cut_is_not_exercised_if_no_system_traffic_ran_into_it(make_target: Any, run_virtual: Run) -> None:
    """Traffic over its links before the cut, and over other links during it, does not count."""
    _, met = prove_cut_under_traffic(
        make_target,
        run_virtual,
        before=lambda n: n.send(N1_N2, N2_N1),
        during=lambda n: n.send(Link("n2", "n3"), Link("n3", "n2")),
    )
    assert met.proven and met.exercised is False
    assert met.detail == ("none of the system's traffic ran into the cut of 4 links; none has ever used n1->n3, n3->n1")


def test_traffic_that_an_earlier_cut_stopped_has_not_met_this_one(make_target: Any, run_virtual: Run) -> None:
    def stop(network: Any) -> None:
        network.broken = {N1_N2}
        network.send(N1_N2)
        network.broken = set()

    _, met = prove_cut_under_traffic(make_target, run_virtual, before=stop, during=lambda n: None)
    assert met.proven and met.exercised is False
    assert met.detail.startswith("none of the system's traffic ran into the cut of 4 links")


def test_system_traffic_that_passes_disproves_a_cut_that_stops_probes(make_target: Any, run_virtual: Run) -> None:
    def leak(network: Any) -> None:
        network.leaks = {N2_N1}
        network.send(N2_N1, N1_N2)

    proof, met = prove_cut_under_traffic(make_target, run_virtual, before=lambda n: None, during=leak)
    assert proof.proven
    assert not met.proven and met.failed == ["n2->n1 carried 100 bytes of the system's traffic while it was cut"]


def test_connections_that_bypass_a_cut_disprove_it(make_target: Any, run_virtual: Run) -> None:
    def dial(network: Any) -> None:
        network.bypassing_connections = ["n1 reaches n2, bypassing the proxies"]

    proof, _ = prove_cut_under_traffic(make_target, run_virtual, before=dial, during=lambda n: None)
    assert not proof.proven and "bypassing the proxies" in proof.detail
    proof, met = prove_cut_under_traffic(make_target, run_virtual, before=lambda n: None, during=dial)
    assert proof.proven and not met.proven and "bypassing the proxies" in met.detail


def test_whether_a_cut_was_exercised_is_unknown_if_another_fault_cuts_its_links(
    make_target: Any, run_virtual: Run
) -> None:
    async def main() -> Any:
        target = make_target(3, is_counting=True)
        other, mine = await plan(target, "n1|n2+n3", "f1"), await plan(target, "n1|n2", "f2")
        await PARTITION.inject(target, other)
        await PARTITION.inject(target, mine)
        return await PARTITION.prove_met(target, mine, in_force=[other])

    assert run_virtual(main()).exercised is None


def test_a_reset_of_the_traffic_counters_is_an_error(make_target: Any, run_virtual: Run) -> None:
    with pytest.raises(ValueError, match="were reset"):
        prove_cut_under_traffic(
            make_target, run_virtual, before=lambda n: n.send(N1_N2), during=lambda n: n.counted.clear()
        )
