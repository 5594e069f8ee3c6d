"""The nemesis `restart`: a rolling restart by an operator, one replica after the other, as for an upgrade.

Each replica gets a SIGTERM, is started again, and must answer before the next one is restarted, so that a group of
three or more never lacks more than one. No data may be lost, and clients should notice no more than an election.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.forms import Form, FormNemesis
from nemesis.operator import find_view
from nemesis.process import forced_words, processes_of, prove_released
from nemesis.protocol import Injection, Proof
from nemesis.target import RUNNING, Target
from nemesis.words import plural

__all__ = ["RESTART", "Restart"]

BACK_TIMEOUT_S = 10.0
"""How long one replica may take to answer again before the next one is restarted anyway."""

STEP_TIMEOUT_S = 180.0
"""Enough for fifteen replicas, each with the time that it may take."""

RETRY_S = 0.1


class Restart(FormNemesis):
    """Restarts replicas one after the other."""

    name = "restart"
    description = "an operator restarts the replicas one after the other"
    step_timeout_s = STEP_TIMEOUT_S
    forms: Mapping[str, Form] = {
        "rolling": Form(
            name="rolling",
            description="SIGTERM and start, then the next replica once this one serves again; the seed decides the "
            "order",
            needs=(("processes", "kill"),),
            targets=("all",),
        )
    }

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"order": rng.sample(hosts, len(hosts))}

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Choose the order, and note how often each replica was started, and needed a SIGKILL, so far."""
        planned = await super().plan(target, rng, fault_id=fault_id, variant=variant)
        processes = processes_of(target)
        views = [await processes.look(host) for host in planned.value["hosts"]]
        return Injection(
            fault_id=fault_id,
            nemesis=self.name,
            variant=variant,
            value={**planned.value, "starts": {view.host: view.starts for view in views}},
            evidence={"forced": {view.host: view.forced_total for view in views}},
            problem=planned.problem,
        )

    async def inject(self, target: Target, injection: Injection) -> None:
        """Restart one replica after the other. Raises RuntimeError when one does not end."""
        if injection.problem is not None:
            return
        for host in injection.value["order"]:
            await self._restart(target, injection.fault_id, host)

    async def _restart(self, target: Target, fault_id: str, host: str) -> None:
        processes = processes_of(target)
        try:
            await processes.end(fault_id, [host], signal_name="TERM")
        finally:
            await processes.release(fault_id)
        if (await processes.look(host)).state != RUNNING:
            return  # another fault holds it; the proof will report that
        if target.operator is not None:
            await find_view(
                target,
                lambda view: view.host == host and (view.follows or view.takes_writes),
                timeout_s=BACK_TIMEOUT_S,
            )
            return
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BACK_TIMEOUT_S
        while loop.time() < deadline_s:
            if await target.answers(host, timeout_s=1.0):
                return
            await asyncio.sleep(RETRY_S)

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Every replica was started at least once more, and nothing keeps it from running; whether it then serves is up
        to the system. The proof names the replicas that needed a SIGKILL; if all did, no orderly restart has
        happened."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        processes, before = processes_of(target), injection.value["starts"]
        views = [await processes.look(host) for host in before]
        failed = [f"{view.host} was not restarted" for view in views if view.starts <= before[view.host]]
        if failed:
            return Proof(proven=False, detail="; ".join(failed[:3]), checked=len(before), failed=failed)
        proof = await prove_released(target, list(before), in_force=in_force)
        forced = [view.host for view in views if view.forced_total > injection.evidence["forced"][view.host]]
        detail = f"{plural(len(before), 'replica')} restarted; {proof.detail}{forced_words(forced)}"
        is_met = len(forced) < len(before)
        return Proof(proven=proof.proven, exercised=is_met, detail=detail, checked=len(before), failed=proof.failed)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Start what is down, including a replica that another fault kept from starting. Idempotent."""
        processes = processes_of(target)
        await processes.release(injection.fault_id)
        await processes.revive(injection.value.get("hosts", ()))

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The replicas run and answer."""
        return await prove_released(target, injection.value["hosts"], in_force=in_force)


RESTART = Restart()
"""The instance that the registry returns; it is stateless."""
