"""The nemesis `bit-flip`: a bit of a stored file changes while nobody looks.

A replica is killed, one bit of one of its files is flipped, and it is started again, as after a disk has lost a bit at
rest. What a replica should do then is its own affair: refuse to start, or do without the file. What it must not
do is serve what it did not store, and that is for the checks to see. It has met the fault once it has read the byte,
where reads are counted (by the shim, and not those of a mapping). Healing kills it again, puts the bit back, as from a
copy, and starts it.
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
"""Where in a file, as part of its length. Not at its end: what was written last may be cut off as unfinished."""

READ_TIMEOUT_S = 10.0
"""For a replica that was just started to read its files: seconds on a busy machine. What it needs only
later it may read later: that is looked for in the end."""
READ_POLL_S = 0.1


class BitFlip(FormNemesis):
    """Flips a bit of a file of a replica that is down for a moment."""

    name = "bit-flip"
    description = "a bit of a stored file changes while the replica is down; healing puts it back"
    forms: Mapping[str, Form] = {
        name: Form(
            name=name,
            description=description,
            needs=(("processes", "kill"), ("disks", "flip")),
            targets=targets,
            is_cycled=name != "checkpoint",  # a replica that has just started has none yet
        )
        for name, description, targets in (
            ("log", "a bit of the replicated log, not in its last quarter", ("one", "leader")),
            ("vote", "a bit of the file that holds term and vote", ("one",)),
            ("checkpoint", "a bit of the log's checkpoint, which is there a while after the start", ("one",)),
        )
    }

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """As for every nemesis of forms; and each form needs files of its own name, which the system declares."""
        problems = super().requires(target, variant)
        if problems:
            return problems
        if not any(target.stored_files(form) for form in self.forms):
            return [f"{self.name}: the system, with these settings, names no stored files that may be damaged"]
        form = None if variant is None else split_variant(variant)[0]
        if form is not None and target.stored_files(form) is None:
            return [f"{self.name}: the system, with these settings, names no {form} file that may be damaged"]
        return []

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"place": round(rng.uniform(MIN_PLACE, MAX_PLACE), 6), "bit": rng.randrange(8)}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Kill the victims, flip a bit of each, start them. Raises RuntimeError when there is nothing to flip."""
        if injection.problem is not None:
            return
        processes, disks, value = processes_of(target), disks_of(target), injection.value
        form = self._form_of(injection)
        files = target.stored_files(form)
        if files is None:
            raise RuntimeError(f"the system names no {form} file that may be damaged")
        await processes.end(injection.fault_id, value["hosts"])
        for host in value["hosts"]:
            await disks.flip_bit(injection.fault_id, host, files=files, place=value["place"], bit=value["bit"])
        await processes.release(injection.fault_id)

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """A bit of each victim was flipped, as read back from its disk."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        flipped = disks_of(target).flipped(injection.fault_id)
        hosts: Sequence[str] = injection.value["hosts"]
        failed = [f"no bit of {host} was flipped" for host in hosts if host not in flipped]
        failed += [f"{host}: {bits}" for host, bits in flipped.items() if bits.before == bits.after]
        detail = "; ".join(failed) if failed else "; ".join(f"{host}: {flipped[host]}" for host in hosts)
        exercised, words = await _read(target, injection, timeout_s=0.0 if failed else READ_TIMEOUT_S)
        return Proof(
            proven=not failed, exercised=exercised, detail=f"{detail}{words}", checked=len(hosts), failed=failed
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Whether a replica has read a flipped byte by now."""
        exercised, words = await _read(target, injection)
        return Proof(
            proven=True,
            exercised=exercised,
            detail=words.removeprefix("; ") or "whether a replica has read the byte is not known",
            checked=len(injection.value["hosts"]),
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Kill the victims, put the bits back, start them. Idempotent."""
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
    """(True once a replica has read a flipped byte since, None where that is not known; the same in words). Where reads
    are counted, waits for one."""
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
"""The one instance that the registry hands out; it holds no state."""
