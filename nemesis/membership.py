"""The nemesis `members`: an operator removes a replica from its group and adds it again later.

The removed replica keeps running without belonging to a group, or exits on its own, as etcd's does. It must neither
lead nor disturb the others, and what it reports does not count. A leader has to commit its own removal and then step
down. Healing adds the replica again, with the data that it has, or with none if the system requires that; it must
catch up with the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence

from nemesis.forms import Form, FormNemesis, hosts_of
from nemesis.operator import find_view, insist, operator_of
from nemesis.protocol import Injection, Proof
from nemesis.target import ReplicaView, Target

__all__ = ["MEMBERS", "Members"]

LEAST_MEMBERS = 3
"""Removing one of two members would leave a group of one, which replicates nothing."""


class Members(FormNemesis):
    """Removes one replica from the group at a time."""

    name = "members"
    description = "an operator removes a replica from its group and adds it again"
    is_request = True
    forms: Mapping[str, Form] = {
        "remove": Form(
            name="remove",
            description="one of these is removed from the group, by the system's own request; its process keeps "
            "running",
            needs=(("operator", "members"),),
            targets=("followers", "leader"),
        )
    }

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """As for every `FormNemesis`, and a member that the group can spare."""
        problems = super().requires(target, variant)
        if len(target.hosts) < LEAST_MEMBERS:
            problems.append(
                f"{self.name}: a group of {len(target.hosts)} cannot spare a member: it needs at least "
                f"{LEAST_MEMBERS} hosts"
            )
        return problems

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Choose one replica."""
        chosen = await super().plan(target, rng, fault_id=fault_id, variant=variant)
        hosts: Sequence[str] = chosen.value["hosts"]
        value = {**chosen.value, "hosts": [rng.choice(hosts)] if hosts else []}
        return Injection(fault_id=fault_id, nemesis=self.name, variant=variant, value=value, problem=chosen.problem)

    async def inject(self, target: Target, injection: Injection) -> None:
        """Ask the leader to remove the victim, retrying while that is refused. Raises RuntimeError."""
        if injection.problem is None:
            operator, [victim] = operator_of(target), injection.value["hosts"]
            await insist(lambda: operator.remove(injection.fault_id, victim))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The committed members that a leader reports do not include the victim. If another fault had removed it
        before, it is unknown whether the system did anything for this one."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        [victim] = injection.value["hosts"]
        view = await _committed_view(target, lambda view: victim not in view.members)
        if view is None:
            failed = [f"no leader reports a group without {victim}"]
            return Proof(proven=False, detail=failed[0], checked=len(target.hosts), failed=failed)
        was_out = victim in hosts_of([fault for fault in in_force if fault.nemesis == self.name])
        return Proof(
            proven=True,
            exercised=None if was_out else True,
            detail=f"{view.host} leads the group {_list(view.members)}",
            checked=1,
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Ask the leader to add the victim again, retrying until it does. Idempotent. Raises RuntimeError."""
        operator = operator_of(target)
        await insist(lambda: operator.let_in(injection.fault_id))

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """A leader reports the victim among the committed members. So does the victim, unless another fault has hit
        it."""
        if injection.problem is not None:
            return Proof(proven=True, detail="nothing was changed")
        [victim] = injection.value["hosts"]
        if victim in hosts_of([fault for fault in in_force if fault.nemesis == self.name]):
            return Proof(proven=True, detail=f"another fault keeps {victim} out")
        view = await _committed_view(target, lambda view: victim in view.members)
        if view is None:
            return Proof(proven=False, detail=f"no leader reports a group with {victim}", checked=len(target.hosts))
        if victim not in hosts_of(in_force) and not _is_cut(victim, in_force):
            own = await find_view(target, lambda own: own.host == victim and victim in own.members)
            if own is None:
                return Proof(proven=False, detail=f"{victim} does not list itself as a member of the group", checked=2)
        return Proof(proven=True, detail=f"{view.host} leads the group {_list(view.members)}", checked=2)


async def _committed_view(target: Target, is_it: Callable[[ReplicaView], bool]) -> ReplicaView | None:
    """The view of a leader whose member list is committed and meets the condition; None if none does in time."""
    return await find_view(target, lambda view: view.leads and view.members_committed and is_it(view))


def _is_cut(host: str, in_force: Collection[Injection]) -> bool:
    """Whether another fault cuts a link to or from `host`."""
    return any(
        host == destination or host in sources
        for fault in in_force
        for destination, sources in fault.value.get("grudge", {}).items()
    )


def _list(members: Collection[str]) -> str:
    return ", ".join(sorted(members))


MEMBERS = Members()
"""The instance that the registry returns; it is stateless."""
