"""The nemesis `power`: replicas that lose power, and with it everything that they had not synced.

A killed process loses nothing that it wrote, since the kernel still has it; a host that loses power does. Here the
replica is killed and then what it had not synced is taken from its disk; healing starts it again on what is left.
`cut` takes everything back that was not synced, by an account that the shim keeps: the worst that POSIX allows. `crash`
leaves it to a real file system: it is shut down as it is and mounted again, and what the kernel had written by then is
there, so that it loses less and counts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from nemesis.disk import disks_of
from nemesis.forms import Form, FormNemesis, split_variant
from nemesis.process import processes_of, prove_running, prove_stopped
from nemesis.protocol import Injection, Proof
from nemesis.target import DOWN, Target

__all__ = ["POWER", "Power"]

KINDS: Mapping[str, str] = {"cut": "power", "crash": "crash"}
"""Form -> which of the disks' power cuts it is."""


class Power(FormNemesis):
    """Kills replicas and takes what they had not synced."""

    name = "power"
    description = "replicas lose power: they are killed, and what they had not synced is gone"
    forms: Mapping[str, Form] = {
        "cut": Form(
            name="cut",
            description="SIGKILL, then every change that was not synced is taken back",
            needs=(("processes", "kill"), ("disks", "power")),
            targets=("one", "leader", "minority", "all"),
        ),
        "crash": Form(
            name="crash",
            description="SIGKILL, and the file system is shut down and mounted again without what was not written",
            needs=(("processes", "kill"), ("disks", "crash")),
            targets=("one", "leader", "all"),
        ),
    }

    async def inject(self, target: Target, injection: Injection) -> None:
        """Cut the power of the victims; returns when they are down and their losses are counted.

        Raises RuntimeError when a loss cannot be vouched for.
        """
        if injection.problem is not None:
            return
        processes, disks = processes_of(target), disks_of(target)
        hosts: Sequence[str] = injection.value["hosts"]
        for host in hosts:
            view = await processes.look(host)
            unreached = await disks.reaches(host, view.pid) if view.pid is not None else None
            if unreached is not None:
                raise RuntimeError(unreached)
        await processes.end(injection.fault_id, hosts)
        kind = KINDS[split_variant(injection.variant)[0]]
        await asyncio.gather(*(disks.cut_power(injection.fault_id, host, kind=kind) for host in hosts))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The victims are down and silent, and what each has lost was counted."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        stopped = await prove_stopped(target, injection, DOWN, in_force)
        lost = disks_of(target).lost(injection.fault_id)
        failed = [*stopped.failed, *(f"{host} kept its power" for host in injection.value["hosts"] if host not in lost)]
        detail = "; ".join(f"{host} lost {cut.detail}" for host, cut in sorted(lost.items()))
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=stopped.checked + len(lost),
            failed=failed,
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Give the power back: start the replicas that no other fault keeps down. Idempotent."""
        await disks_of(target).release(injection.fault_id)
        await processes_of(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The replicas run and answer."""
        return await prove_running(target, injection.value["hosts"], in_force=in_force)


POWER = Power()
"""The one instance that the registry hands out; it holds no state."""
