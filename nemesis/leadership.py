"""The nemesis `transfer`: an operator asks the leader to transfer leadership to another replica.

It is not a fault. It may break what every change of leader may break: messages in flight, reads that a former leader
still answers, a successor that lacks entries. The candidates are tried in an order decided by the seed; one that
cannot take over at the moment is skipped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.forms import Form, FormNemesis
from nemesis.operator import find_view, insist, operator_of, views_of
from nemesis.protocol import Injection, Proof
from nemesis.target import Target
from nemesis.victims import LEADER_TIMEOUT_S

__all__ = ["TRANSFER", "Transfer"]


class Transfer(FormNemesis):
    """Requests leadership transfers."""

    name = "transfer"
    description = "an operator transfers leadership to another replica"
    is_request = True
    forms: Mapping[str, Form] = {
        "to": Form(
            name="to",
            description="the leader hands over to one of these, by the system's own request",
            needs=(("operator", "transfer"),),
            targets=("followers",),
        )
    }

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Choose the candidates and their order, and note the current term."""
        chosen = await super().plan(target, rng, fault_id=fault_id, variant=variant)
        candidates = list(chosen.value["hosts"])
        rng.shuffle(candidates)
        leader = await find_view(target, lambda view: view.leads, timeout_s=LEADER_TIMEOUT_S)
        leading = [view for view in await views_of(target) if view.leads]
        leader = max(leading, key=lambda view: view.term, default=leader)
        value: dict[str, Any] = {name: item for name, item in chosen.value.items() if name != "hosts"}
        value["candidates"] = [host for host in candidates if leader is None or host != leader.host]
        problem = chosen.problem
        if leader is None:
            problem = "no leader found"
        else:
            value |= {"leader": leader.host, "term": leader.term}
            if not value["candidates"]:
                problem = f"{leader.host} is already the leader"
        return Injection(fault_id=fault_id, nemesis=self.name, variant=variant, value=value, problem=problem)

    async def inject(self, target: Target, injection: Injection) -> None:
        """Request a transfer to one candidate after the other until one of them leads. Raises RuntimeError."""
        if injection.problem is not None:
            return
        operator, turns = operator_of(target), list(injection.value["candidates"])

        async def ask() -> None:
            turns.append(turns.pop(0))
            await operator.transfer(injection.fault_id, turns[-1])

        await insist(ask)

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """A candidate has reported that it leads, in a later term than the previous leader."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        value = injection.value
        done = operator_of(target).transferred(injection.fault_id)
        if done is None:
            return Proof(proven=False, detail="no replica took over leadership", checked=1)
        host, term = done
        is_right = host in value["candidates"] and term > value["term"]
        detail = f"{host} leads term {term}, {value['leader']} led term {value['term']}"
        failed = [] if is_right else [detail]
        return Proof(proven=is_right, exercised=is_right or None, detail=detail, checked=1, failed=failed)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Does nothing: leadership is not given back."""

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """A leader accepts writes. Not checked while other faults are in force, which may prevent that."""
        if in_force:
            return Proof(proven=True, detail="nothing to heal")
        view = await find_view(target, lambda view: view.takes_writes)
        if view is None:
            return Proof(proven=False, detail="no replica accepts writes", checked=len(target.hosts))
        return Proof(proven=True, detail=f"{view.host} leads term {view.term} and accepts writes", checked=1)


TRANSFER = Transfer()
"""The instance that the registry returns; it is stateless."""
