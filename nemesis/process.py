"""The nemeses `kill` and `pause`: replicas that end, and replicas that are stopped.

A killed replica is gone: its process has ended and nobody answers on its port; when the fault is healed the
same program is started again with the same configuration and the same files. A paused replica still exists but does
not run: the kernel holds it (state T), its connections stay open, and it does not notice the time that passes.

Both are proved on every process of the replica that its host shows, children included, when the fault begins and
again right before it is healed. A replica that had ended on its own before its kill has not met the fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemesis.forms import Form, FormNemesis, hosts_of, split_variant
from nemesis.impairments import Activity, hosts_kept_from
from nemesis.protocol import Injection, Proof
from nemesis.target import DOWN, PAUSED, RUNNING, Processes, ProcessView, SeesMembers, Target
from nemesis.words import plural_with

__all__ = [
    "KILL",
    "PAUSE",
    "Kill",
    "Pause",
    "forced_words",
    "judged_by_its_end",
    "processes_of",
    "prove_released",
    "prove_stopped",
    "why_unreached",
]

_ENDED_LETTERS, _STOPPED_LETTERS = frozenset("ZX"), frozenset("ZXTt")
"""States in /proc of processes that no longer run: ended; ended or stopped."""

_MAX_MEMBERS = 50
"""Limit on the processes of a replica that the history names."""

SILENCE_S = 0.5
"""How long to wait for a replica that should not answer. A healthy one answers in a few milliseconds."""

BACK_TIMEOUT_S = 20.0
"""How long a replica may take from its start to its first answer, on a busy machine."""

RETRY_S = 0.1

SETTLE_S = 0.5
"""A replica that stays up for this much longer than a crash loop lets it live is no longer being killed."""

CRASH_TIMEOUT_S = 20.0
"""How long a crash loop may take to restart a replica twice."""

MIN_UP_S, MAX_UP_S = 0.5, 1.5
"""How long a replica in a crash loop lives each time: from not yet serving to serving for a moment."""


def processes_of(target: Target) -> Processes:
    """The target's processes. Raises ValueError if it has none to act on."""
    if target.processes is None:
        raise ValueError("this cluster has no processes to act on")
    return target.processes


async def why_unreached(target: Target, host: str, reaches: Callable[[str, int], Awaitable[str | None]]) -> str | None:
    """Why some program of a host's replica would not feel a fault; None if each would, or the replica is down, since it
    feels the fault once it is back. `reaches(host, pid)` answers that for the program whose first process is `pid`."""
    if target.processes is None:
        return None
    for pid in (await target.processes.look(host)).pids:
        problem = await reaches(host, pid)
        # A process that has ended meanwhile could not be inspected.
        if problem is not None and pid in (await target.processes.look(host)).pids:
            return problem
    return None


def _downed(in_force: Sequence[Injection]) -> frozenset[str]:
    """Hosts that other faults keep from running."""
    return hosts_kept_from(Activity.RUN, in_force)


async def prove_released(target: Target, hosts: Sequence[str], *, in_force: Sequence[Injection]) -> Proof:
    """Prove that nothing holds the replicas of `hosts` any more, waiting until they run and answer. Those that another
    fault keeps from running are left out; those that any other fault hits need only run, since it may keep them from
    answering.

    A replica that was restarted and ended on its own, or runs without answering, is free of the fault all the same:
    that it does not come back is the system's doing, and the check `recovers` judges that. The proof names it.
    """
    silent, held = await _wait_for_answers(target, hosts, in_force)
    checked = sum(host not in _downed(in_force) for host in hosts)
    detail = "; ".join([*held, *silent][:3]) or _running(checked)
    return Proof(proven=not held, detail=detail, checked=checked, failed=held)


async def _wait_for_answers(
    target: Target, hosts: Sequence[str], in_force: Sequence[Injection]
) -> tuple[list[str], list[str]]:
    """(problems of replicas that do not come back, problems of replicas that something still holds down)."""
    processes = processes_of(target)
    disturbed = hosts_of(in_force)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + BACK_TIMEOUT_S

    silent: list[str] = []
    held: list[str] = []

    async def wait_for(host: str) -> None:
        while True:
            view = await processes.look(host)
            if view.state == RUNNING:
                if host in disturbed or await target.answers(host, timeout_s=2.0):
                    return
                found, kind = f"{host} runs but does not answer", silent
            elif view.ended_by_itself:
                found, kind = f"{host} was started but exited on its own", silent
            else:
                found, kind = f"{host} is {view.state}", held
            if loop.time() > deadline_s:
                kind.append(found)
                return
            await asyncio.sleep(RETRY_S)

    await asyncio.gather(*(wait_for(host) for host in hosts if host not in _downed(in_force)))
    return sorted(silent), sorted(held)


def _running(count: int) -> str:
    return plural_with(count, "replica", ("runs and answers", "run and answer"))


async def prove_stopped(target: Target, injection: Injection, state: str, in_force: Sequence[Injection]) -> Proof:
    """Every victim must be in `state` and silent. Every other replica must run, unless a fault keeps it from running or
    it had crashed before this fault was planned."""
    processes = processes_of(target)
    victims: Sequence[str] = injection.value["hosts"]
    others = [host for host in target.hosts if host not in victims and host not in _downed(in_force)]
    held_by_others, hit_by_others = _downed(in_force), hosts_of(in_force)
    ended_before = [host for host in injection.evidence.get("ended", ()) if host in others]
    views: list[ProcessView] = []

    async def victim_problem(host: str) -> str | None:
        view = await processes.look(host)
        views.append(view)
        if view.state != state and not (host in held_by_others and view.state != RUNNING):
            return f"{host} is {view.state}, not {state}"
        astray = await _astray(processes, host, view.state)
        if astray:
            return astray
        if await target.answers(host, timeout_s=SILENCE_S):
            return (
                f"{host} is {view.state}, yet something answers for it: check that the plug-in's status() asks "
                f"{host} itself"
            )
        return None

    async def other_problem(host: str) -> str | None:
        view = await processes.look(host)
        # Another fault may have made it end: some systems' replicas exit when removed from their group.
        has_ended = view.ended_by_itself and (host in hit_by_others or host in ended_before)
        return None if view.state == RUNNING or has_ended else f"{host} should run but is {view.state}"

    found = await asyncio.gather(*map(victim_problem, victims), *map(other_problem, others))
    failed = [problem for problem in found if problem is not None]
    beside = plural_with(len(others) - len(ended_before), "other", ("runs", "run"))
    if ended_before:
        beside += (
            f", {', '.join(ended_before)} had already exited on {'its' if len(ended_before) == 1 else 'their'} own"
        )
    stopped = sum(map(len, injection.evidence.get("processes", {}).values()))
    counted = f" ({stopped} processes)" if stopped > len(victims) else ""
    detail = f"{', '.join(victims)} {state} and silent{counted}, {beside}"
    exercised = False if all(map(_had_ended, views)) else None
    # A replica that another fault had ended or stopped before met nothing of this one.
    if not failed and any(view.host not in held_by_others and not _had_ended(view) for view in views):
        exercised = True
    starts = {view.host: view.starts for view in views if view.state == state == PAUSED}
    return Proof(
        proven=not failed,
        exercised=exercised,
        detail="; ".join(failed[:3]) if failed else detail,
        checked=len(victims) + len(others),
        failed=failed,
        evidence={"starts": starts} if starts else {},
    )


def _had_ended(view: ProcessView) -> bool:
    """Whether a victim that is down had ended on its own, so that there was nothing to kill or pause."""
    return view.state == DOWN and view.ended_by_itself


async def _seen_at_plan(target: Target, victims: Sequence[str]) -> Mapping[str, Any]:
    """The evidence of a plan: `processes`, every process of the victims, as [pid, start in ticks, name]; `ended`, the
    other replicas that have already ended on their own."""
    processes = target.processes
    if processes is None:
        return {}
    evidence: dict[str, Any] = {}
    if isinstance(processes, SeesMembers):
        lists = await asyncio.gather(*map(processes.members, victims))
        evidence["processes"] = {
            host: [[member.pid, member.start_ticks, member.name] for member in members[:_MAX_MEMBERS]]
            for host, members in zip(victims, lists, strict=True)
            if members
        }
    views = await asyncio.gather(*(processes.look(host) for host in target.hosts if host not in victims))
    evidence["ended"] = [view.host for view in views if _had_ended(view)]
    return {name: found for name, found in evidence.items() if found}


async def _astray(processes: Processes, host: str, state: str) -> str | None:
    """The problem that processes of a DOWN or PAUSED replica still run; None if none do. A process waiting in the
    kernel (state D) does not count if it will take its signal before it runs again."""
    members = await processes.members(host) if isinstance(processes, SeesMembers) else None
    held = _STOPPED_LETTERS if state == PAUSED else _ENDED_LETTERS
    running = [member for member in members or () if member.letter not in held and not member.meets_signal]
    if not running:
        return None
    more = f" and {len(running) - 1} more" if len(running) > 1 else ""
    return f"{running[0]} of {host} still runs (state {running[0].letter}){more}"


async def _prove_still_stopped(target: Target, injection: Injection) -> Proof:
    """No process of the victims runs at the end of the fault. A paused replica that another fault has ended meanwhile
    was continued to take its SIGTERM; the proof names it."""
    processes = processes_of(target)
    hosts: Sequence[str] = injection.value["hosts"]
    views = await asyncio.gather(*map(processes.look, hosts))

    async def problem(view: ProcessView) -> str | None:
        if view.state == RUNNING:
            return f"{view.host} was running again before it was healed"
        return await _astray(processes, view.host, view.state)

    failed = [found for found in await asyncio.gather(*map(problem, views)) if found is not None]
    starts: Mapping[str, int] = injection.evidence.get("starts", {})
    ended = [
        view.host
        for view in views
        if view.host in starts
        and (view.starts != starts[view.host] or (view.state == DOWN and not view.ended_by_itself))
    ]
    stayed = ", ".join(host for host in hosts if host not in ended)
    words = [f"no process of {stayed} ran until the end"] if stayed else []
    words += [f"{host} did not stay paused until the end: another fault ended it meanwhile" for host in ended]
    detail = "; ".join(failed[:3] or words)
    exercised = False if all(map(_had_ended, views)) else None
    return Proof(proven=not failed, exercised=exercised, detail=detail, checked=len(hosts), failed=failed)


class Kill(FormNemesis):
    """Ends replicas and starts them again when healed."""

    name = "kill"
    description = "kills replicas by signal and starts them again"
    forms: Mapping[str, Form] = {
        form.name: form
        for form in (
            Form(
                name="sigkill",
                description="SIGKILL: the process ends at once; what it wrote stays in the page cache",
                needs=(("processes", "kill"),),
                targets=("one", "minority", "leader", "majority", "all"),
            ),
            Form(
                name="terminate",
                description="SIGTERM: an orderly shutdown; a replica that has not ended after 8 s gets a SIGKILL "
                "and does not count as hit",
                needs=(("processes", "kill"),),
                targets=("leader", "one"),
            ),
            Form(
                name="crash-loop",
                description="SIGKILL, start, SIGKILL again shortly afterwards, and so on until healed",
                needs=(("processes", "kill"),),
                targets=("one", "leader"),
            ),
        )
    }

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"up_s": round(rng.uniform(MIN_UP_S, MAX_UP_S), 3)} if form.name == "crash-loop" else {}

    async def _seen_before(self, form: Form, target: Target, hosts: Sequence[str]) -> Mapping[str, Any]:
        return await _seen_at_plan(target, hosts)

    async def inject(self, target: Target, injection: Injection) -> None:
        """End the planned replicas; returns once they are gone (crash loop: once it has begun)."""
        if injection.problem is not None:
            return
        processes, hosts = processes_of(target), injection.value["hosts"]
        form, _ = split_variant(injection.variant)
        if form == "crash-loop":
            await processes.crash_loop(injection.fault_id, hosts, up_s=injection.value["up_s"])
        else:
            signal_name = "TERM" if form == "terminate" else "KILL"
            await processes.end(injection.fault_id, hosts, signal_name=signal_name)

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The processes are gone and nobody answers for them, while the others run. For a crash loop: each victim
        was started and killed again while watched. SIGTERM is not exercised if every victim needed a SIGKILL."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        if split_variant(injection.variant)[0] == "crash-loop":
            return await _prove_crashing(target, injection.value["hosts"], in_force)
        proof = await prove_stopped(target, injection, DOWN, in_force)
        if split_variant(injection.variant)[0] == "terminate":
            return await judged_by_its_end(target, injection, proof)
        return proof

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """No process of the victims runs yet. For a crash loop, whose victims come and go, the first proof stands."""
        if split_variant(injection.variant)[0] == "crash-loop":
            return Proof(proven=True, detail="a crash loop is proven only once, when it begins")
        proof = await _prove_still_stopped(target, injection)
        if split_variant(injection.variant)[0] == "terminate":
            return await judged_by_its_end(target, injection, proof)
        return proof

    async def heal(self, target: Target, injection: Injection) -> None:
        """Start again what no other fault keeps down. Idempotent."""
        await processes_of(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The replicas run and answer, or have failed to come back on their own. After a crash loop, they must also not
        be restarted for longer than the loop let them live."""
        hosts: Sequence[str] = injection.value["hosts"]
        proof = await prove_released(target, hosts, in_force=in_force)
        if not proof.proven or split_variant(injection.variant)[0] != "crash-loop":
            return proof
        processes = processes_of(target)
        watched = [host for host in hosts if host not in _downed(in_force)]
        before = {host: (await processes.look(host)).starts for host in watched}
        await asyncio.sleep(injection.value["up_s"] + SETTLE_S)
        after = {host: (await processes.look(host)).starts for host in watched}
        failed = [f"{host} is still being killed" for host in watched if after[host] > before[host]]
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else f"{proof.detail}, and stay up",
            checked=proof.checked,
            failed=failed,
        )


class Pause(FormNemesis):
    """Stops replicas and continues them when healed."""

    name = "pause"
    description = "pauses replicas (SIGSTOP) and resumes them"
    forms: Mapping[str, Form] = {
        "sigstop": Form(
            name="sigstop",
            description="SIGSTOP: connections stay open, nothing is answered, and the replica does not notice time "
            "passing",
            needs=(("processes", "pause"),),
            targets=("one", "leader", "minority", "followers", "all"),
        )
    }

    async def _seen_before(self, form: Form, target: Target, hosts: Sequence[str]) -> Mapping[str, Any]:
        return await _seen_at_plan(target, hosts)

    async def inject(self, target: Target, injection: Injection) -> None:
        """Stop the planned replicas; returns once the kernel holds them."""
        if injection.problem is None:
            await processes_of(target).pause(injection.fault_id, injection.value["hosts"])

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The processes are in state T and answer nothing, while the others run."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        return await prove_stopped(target, injection, PAUSED, in_force)

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """No process of the victims runs yet."""
        return await _prove_still_stopped(target, injection)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Continue what no other fault pauses. Idempotent."""
        await processes_of(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The replicas run and answer, or stay silent on their own account."""
        return await prove_released(target, injection.value["hosts"], in_force=in_force)


def forced_words(hosts: Sequence[str]) -> str:
    """What a proof adds about victims that needed a SIGKILL; empty if there are none."""
    return f"; {', '.join(hosts)} did not end in time after SIGTERM and needed a SIGKILL" if hosts else ""


async def judged_by_its_end(target: Target, injection: Injection, proof: Proof) -> Proof:
    """The proof of an orderly end, naming the victims that needed a SIGKILL: those have not done what a program does
    on shutdown."""
    processes, hosts = processes_of(target), injection.value["hosts"]
    views = [await processes.look(host) for host in hosts]
    forced = [view.host for view in views if view.was_forced]
    if not forced or not proof.proven:
        return proof
    detail = f"{proof.detail}{forced_words(forced)}"
    is_met = not all(view.was_forced or _had_ended(view) for view in views)
    return replace(proof, detail=detail, exercised=proof.exercised if is_met else False)


async def _prove_crashing(target: Target, victims: Sequence[str], in_force: Sequence[Injection]) -> Proof:
    """Every victim that no other fault keeps down is started at least twice more while watched."""
    processes = processes_of(target)
    watched = [host for host in victims if host not in _downed(in_force)]
    if not watched:
        return Proof(proven=False, detail="every victim is kept down by another fault")
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + CRASH_TIMEOUT_S
    before = {host: (await processes.look(host)).starts for host in watched}
    starts = dict(before)
    while loop.time() < deadline_s and any(starts[host] < before[host] + 2 for host in watched):
        await asyncio.sleep(RETRY_S)
        starts = {host: (await processes.look(host)).starts for host in watched}
    failed = [
        f"{host} was started {starts[host] - before[host]} times" for host in watched if starts[host] < before[host] + 2
    ]
    detail = f"{', '.join(watched)} killed and started again while watched"
    return Proof(
        proven=not failed,
        exercised=None if failed else True,
        detail="; ".join(failed[:3]) if failed else detail,
        checked=len(watched),
        failed=failed,
    )


KILL = Kill()
PAUSE = Pause()
