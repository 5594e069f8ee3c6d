"""The nemesis `promote`: the classic HA master is stopped, and an operator promotes a slave to master.

Classic HA has no elections. The slave with the longest log is restarted as the master, and every replica's
configuration names it; the former master comes back as a slave. Messages that only the former master had are given up,
so a run with an ASYNC_MASTER may well lose acknowledged messages: the checks report which.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from nemesis.forms import Form, FormNemesis, split_variant
from nemesis.operator import find_view, operator_of, views_of
from nemesis.process import judged_by_its_end, processes_of, prove_released
from nemesis.protocol import Injection, Proof
from nemesis.target import DOWN, Target

__all__ = ["PROMOTE", "Promote"]

STEP_TIMEOUT_S = 120.0
"""For each step: the promoted replica is shut down in an orderly way and started again."""

TAKES_WRITES_TIMEOUT_S = 60.0
"""Until the promoted replica takes writes: a Java broker takes half a minute to start on a busy machine."""

LOOK_TIMEOUT_S = 5.0
"""For the first slave to answer: slaves may be busy noticing that their master is gone."""

NEEDS = (("processes", "kill"), ("operator", "promote"))


class Promote(FormNemesis):
    """Ends the master and promotes a slave."""

    name = "promote"
    description = "the classic HA master is stopped, and an operator promotes a slave to master"
    step_timeout_s = STEP_TIMEOUT_S
    is_of_all = False
    """It gives up messages by design, so a run includes it only when asked to."""
    forms: Mapping[str, Form] = {
        "failover": Form(
            name="failover",
            description="SIGKILL to the master; the slave with the longest log is restarted as the master",
            needs=NEEDS,
            targets=("leader",),
        ),
        "switch": Form(
            name="switch",
            description="the same after an orderly shutdown of the master (SIGTERM)",
            needs=NEEDS,
            targets=("leader",),
        ),
    }

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Name the master; its successor is chosen once it has ended."""
        planned = await super().plan(target, rng, fault_id=fault_id, variant=variant)
        problem = planned.problem
        if problem is None and len(planned.value["hosts"]) != 1:
            problem = "only one master can be stopped at a time: use promote=failover@leader"
        return Injection(fault_id=fault_id, nemesis=self.name, variant=variant, value=planned.value, problem=problem)

    async def inject(self, target: Target, injection: Injection) -> None:
        """End the master, compare the slaves' logs, promote the slave with the longest. Raises RuntimeError when no
        slave answers, or when several do and none reports how far its log goes."""
        if injection.problem is not None:
            return
        [master] = injection.value["hosts"]
        form, _ = split_variant(injection.variant)
        signal_name = "KILL" if form == "failover" else "TERM"
        await processes_of(target).end(injection.fault_id, [master], signal_name=signal_name)
        best = await find_view(target, lambda view: view.host != master, timeout_s=LOOK_TIMEOUT_S)
        if best is None:
            raise RuntimeError("no slave answers")
        slaves = {view.host: view for view in (best, *await views_of(target)) if view.host != master}
        if len(slaves) > 1 and all(view.end < 0 for view in slaves.values()):
            raise RuntimeError(
                "no slave reports how far its log goes, so it is unknown which one to promote (plug-ins report it in "
                "Status(end=...))"
            )
        longest = max(slaves.values(), key=lambda view: (view.end, view.host))
        await operator_of(target).promote(injection.fault_id, longest.host)

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The former master is down, and another one takes writes. A master that needed a SIGKILL was not shut down in
        an orderly way, so that `switch` is not exercised."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        [former] = injection.value["hosts"]
        if (await processes_of(target).look(former)).state != DOWN:
            return Proof(proven=False, detail=f"{former} still runs", checked=1)
        view = await find_view(
            target, lambda view: view.takes_writes and view.host != former, timeout_s=TAKES_WRITES_TIMEOUT_S
        )
        if view is None:
            return Proof(proven=False, detail="no other replica accepts writes", checked=len(target.hosts))
        proof = Proof(
            proven=True, exercised=True, detail=f"{view.host} is the master, which was {former} before", checked=2
        )
        is_orderly = split_variant(injection.variant)[0] == "switch"
        return await judged_by_its_end(target, injection, proof) if is_orderly else proof

    async def heal(self, target: Target, injection: Injection) -> None:
        """Start the former master, as the slave that it is now. Idempotent."""
        await processes_of(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The former master runs, answers and leads nothing."""
        if injection.problem is not None:
            return Proof(proven=True, detail="nothing was changed")
        [former] = injection.value["hosts"]
        leading = [view.host for view in await views_of(target) if view.leads]
        if former in leading and len(leading) > 1:
            return Proof(proven=False, detail=f"{' and '.join(leading)} lead at the same time", checked=len(leading))
        return await prove_released(target, [former], in_force=in_force)


PROMOTE = Promote()
"""The instance that the registry returns; it is stateless."""
