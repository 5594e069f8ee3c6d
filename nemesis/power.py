"""The nemesis `power`: replicas that lose power, and with it everything that they had not synced.

A killed process loses nothing that it wrote, since the kernel still has it; a host that loses power does. Here the
replica is killed and its unsynced changes are removed from the disk; healing starts it again on what is left.

The forms `cut`, `cut-posix` and `cut-torn` undo unsynced changes from a log of them, each under a different model of
what a sync makes durable (nemesis.mechanisms.undo_log). `cut` keeps what ext4, xfs and btrfs keep: a program that loses
data under it has not synced that data. `cut-posix` also loses names whose directory was not synced, which those file
systems would have kept; a finding under `cut-posix` alone has to be read with that in mind. For programs that the
preloaded shim reaches the log is kept from their start; for others (mechanism seccomp) from two seconds before a cut,
because it costs them more than half of their throughput. What these wrote earlier is taken as durable, as if the
kernel had written it back; the proof says so. `crash` uses a real file system: it is shut down as it is and mounted
again. Whatever the kernel had written by then is kept, so that this form loses less, and losses are not counted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.disk import disks_of
from nemesis.forms import Form, FormNemesis, split_variant
from nemesis.process import processes_of, prove_released, prove_stopped
from nemesis.protocol import Injection, Proof
from nemesis.target import DOWN, Target

__all__ = ["POWER", "Power"]

KINDS: Mapping[str, str] = {"cut": "ext4", "cut-posix": "posix", "cut-torn": "torn", "crash": "crash"}
"""Form -> the `kind` of `Disks.cut_power`."""

SEEDS = 1 << 32


class Power(FormNemesis):
    """Kills replicas and removes what they had not synced."""

    name = "power"
    description = "replicas lose power: they are killed, and what they had not synced is lost"
    forms: Mapping[str, Form] = {
        "cut": Form(
            name="cut",
            description="SIGKILL, then unsynced changes are undone, as ext4, xfs and btrfs may lose them",
            needs=(("processes", "kill"), ("disks", "power")),
            targets=("one", "leader", "minority", "all"),
        ),
        "cut-torn": Form(
            name="cut-torn",
            description="the same, but with torn writes: of unsynced data, some sectors survive and others do not",
            needs=(("processes", "kill"), ("disks", "power")),
            targets=("one", "leader"),
        ),
        "cut-posix": Form(
            name="cut-posix",
            description="the same as cut, and file names in unsynced directories are lost, too: everything that "
            "POSIX allows",
            needs=(("processes", "kill"), ("disks", "power")),
            targets=("one", "leader", "all"),
            is_cycled=False,
        ),
        "crash": Form(
            name="crash",
            description="SIGKILL, then the file system is shut down and mounted again without the data that was not "
            "yet written",
            needs=(("processes", "kill"), ("disks", "crash")),
            targets=("one", "leader", "all"),
        ),
    }

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"model": KINDS[form.name]} | ({"seed": rng.randrange(SEEDS)} if form.name == "cut-torn" else {})

    async def inject(self, target: Target, injection: Injection) -> None:
        """Cut the power of the victims; returns when they are down and their losses are counted.

        Raises RuntimeError when the mechanism does not reach a victim, so that its losses could not be known.
        """
        if injection.problem is not None:
            return
        processes, disks = processes_of(target), disks_of(target)
        hosts: Sequence[str] = injection.value["hosts"]
        kind, seed = KINDS[split_variant(injection.variant)[0]], int(injection.value.get("seed", 0))
        running = [host for host in hosts if (await processes.look(host)).pids]
        lead_s = await disks.expect_cut(injection.fault_id, running)
        await asyncio.sleep(lead_s)
        for host in hosts:
            for pid in (await processes.look(host)).pids:
                unreached = await disks.reaches(host, pid)
                if unreached is not None:
                    raise RuntimeError(unreached)
        await processes.end(injection.fault_id, hosts)
        await asyncio.gather(*(disks.cut_power(injection.fault_id, host, kind=kind, seed=seed) for host in hosts))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The victims are down and silent, and the losses of each were counted. A victim without a single change in the
        log of unsynced data has lost nothing because it wrote nothing."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        stopped = await prove_stopped(target, injection, DOWN, in_force)
        lost = disks_of(target).lost(injection.fault_id)
        failed = [
            *stopped.failed,
            *(f"{host} did not lose power" for host in injection.value["hosts"] if host not in lost),
        ]
        detail = "; ".join(f"{host} lost {cut.detail}" for host, cut in sorted(lost.items()))
        recorded = [cut.recorded for cut in lost.values()]
        return Proof(
            proven=not failed,
            exercised=None if None in recorded else any(recorded),
            detail="; ".join(failed[:3]) if failed else detail,
            checked=stopped.checked + len(lost),
            failed=failed,
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Restore power: start the replicas that no other fault keeps down. Idempotent."""
        await disks_of(target).release(injection.fault_id)
        await processes_of(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The replicas run and answer."""
        return await prove_released(target, injection.value["hosts"], in_force=in_force)


POWER = Power()
"""The instance that the registry returns; it is stateless."""
