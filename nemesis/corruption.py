"""The nemesis `bit-flip`: a bit of a stored file changes silently.

A replica is killed, one bit of one of its files is flipped, and the replica is started again, as after bit rot on disk.
How the replica reacts is its own affair: it may refuse to start, or do without the file. It must not serve what it did
not store; the checkers look for that. The replica has met the fault once it has read the byte, if reads are counted
(the shim counts them, except reads through a mapping). Healing kills the replica again, restores the bit, as from a
backup, and starts it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.disk import disks_of
from nemesis.forms import Form, FormNemesis, split_variant
from nemesis.process import processes_of, prove_released
from nemesis.protocol import Injection, Proof
from nemesis.target import Target
from nemesis.words import plural

__all__ = ["BIT_FLIP", "BitFlip"]

MIN_PLACE, MAX_PLACE = 0.05, 0.75
"""Position in a file as a fraction of its length. Not near the end: an unfinished last write may be truncated."""

READ_TIMEOUT_S = 10.0
"""For a replica that has just started to read its files, which takes seconds on a busy machine. A byte that it reads
only later is looked for at the end of the fault."""
READ_POLL_S = 0.1


class BitFlip(FormNemesis):
    """Flips a bit in a file of a replica while the replica is briefly down."""

    name = "bit-flip"
    description = "flips a bit of a stored file while the replica is down; healing restores it"
    forms: Mapping[str, Form] = {
        name: Form(
            name=name,
            description=description,
            needs=(("processes", "kill"), ("disks", "flip")),
            targets=targets,
            is_cycled=name != "checkpoint",  # a replica that has just started has none yet
        )
        for name, description, targets in (
            ("log", "a bit of the replicated log, outside its last quarter", ("one", "leader")),
            ("vote", "a bit of the file that stores the term and the vote", ("one",)),
            ("checkpoint", "a bit of the log's checkpoint, a file that is written some time after the start", ("one",)),
        )
    }

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """As for every `FormNemesis`; each form also needs stored files of its name, which the system declares."""
        problems = super().requires(target, variant)
        if problems:
            return problems
        if not any(target.stored_files(form) for form in self.forms):
            return [f"{self.name}: with these settings, the system declares no stored files that may be damaged"]
        form = None if variant is None else split_variant(variant)[0]
        if form is not None and target.stored_files(form) is None:
            return [f"{self.name}: with these settings, the system declares no {form} file that may be damaged"]
        return []

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"place": round(rng.uniform(MIN_PLACE, MAX_PLACE), 6), "bit": rng.randrange(8)}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Kill the victims, flip a bit on each, start them. Raises RuntimeError when there is nothing to flip."""
        if injection.problem is not None:
            return
        processes, disks, value = processes_of(target), disks_of(target), injection.value
        form = self._form_of(injection)
        files = target.stored_files(form)
        if files is None:
            raise RuntimeError(f"the system declares no {form} file that may be damaged")
        await processes.end(injection.fault_id, value["hosts"])
        for host in value["hosts"]:
            await disks.flip_bit(injection.fault_id, host, files=files, place=value["place"], bit=value["bit"])
        await processes.release(injection.fault_id)

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """A bit was flipped on each victim, as read back from its disk."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        flipped = disks_of(target).flipped(injection.fault_id)
        hosts: Sequence[str] = injection.value["hosts"]
        failed = [f"no bit was flipped on {host}" for host in hosts if host not in flipped]
        failed += [f"{host}: {bits}" for host, bits in flipped.items() if bits.before == bits.after]
        detail = "; ".join(failed) if failed else "; ".join(f"{host}: {flipped[host]}" for host in hosts)
        exercised, words = await _read(target, injection, timeout_s=0.0 if failed else READ_TIMEOUT_S)
        return Proof(
            proven=not failed, exercised=exercised, detail=f"{detail}{words}", checked=len(hosts), failed=failed
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Whether a replica has read a flipped byte so far."""
        exercised, words = await _read(target, injection)
        return Proof(
            proven=True,
            exercised=exercised,
            detail=words.removeprefix("; ") or "it is not known whether a replica has read the byte",
            checked=len(injection.value["hosts"]),
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Kill the victims, restore the bits, start them. Idempotent."""
        hosts = injection.value.get("hosts", ())
        await processes_of(target).end(injection.fault_id, hosts)
        await disks_of(target).release(injection.fault_id)
        await processes_of(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The bits are as they were, and the replicas run and answer."""
        flipped = disks_of(target).flipped(injection.fault_id)
        if flipped:
            failed = [f"{host}: {flipped[host]}" for host in sorted(flipped)]
            return Proof(proven=False, detail="; ".join(failed), checked=len(failed), failed=failed)
        return await prove_released(target, injection.value["hosts"], in_force=in_force)


async def _read(target: Target, injection: Injection, *, timeout_s: float = 0.0) -> tuple[bool | None, str]:
    """(True if a replica has read a flipped byte since the flip, None if that is not known; the same as text). Waits
    for a read if reads are counted."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        met = await disks_of(target).met(injection.fault_id)
        if not met or any(seen.met for seen in met.values()) or loop.time() >= deadline_s:
            break
        await asyncio.sleep(READ_POLL_S)
    words = ", ".join(f"{host} {plural(seen.met, 'time')}" for host, seen in sorted(met.items()) if seen.met)
    return (True, f"; read by {words}") if words else (None, "")


BIT_FLIP = BitFlip()
"""The instance that the registry returns; it is stateless."""
