"""Carries out a schedule on a target and records what happened.

For every fault the history gets four events of process "nemesis": an `invoke` before and an `info` after the
injection, and the same for the healing. Both `info` events carry the proof, and those of the healing also what
was `met` while the fault lasted, if the nemesis can tell (`ProvesToTheEnd`). Whatever goes wrong with a fault
becomes a failed proof, never an exception out of the driver; and every fault that may be in force is healed,
even when the driver is cancelled or an injection failed half-way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from nemesis.protocol import Injection, MakesRequest, Nemesis, Proof, ProvesToTheEnd, StepTimeout
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule
from nemesis.target import Target
from nemesis.triggers import TRIGGER_TIMEOUT_S, Trigger

__all__ = ["Record", "fault_rng", "run_schedule"]

Record = Callable[[dict[str, Any]], None]
"""Takes one history event (process, type, f, value); index and time are the recorder's to add."""

PLAN_TIMEOUT_S = 1.0
"""How long a plan may take before due healings go ahead of it; with a leader, planning takes milliseconds."""

STEP_TIMEOUT_S = 30.0
"""How long one step of one fault may take. Longer than any step's own deadline, so it ends only hung steps."""

CANCEL_GRACE_S = 5.0
"""How long a cancelled step may take to end: a user's own nemesis may swallow the cancellation."""

_T = TypeVar("_T")


def fault_rng(run_key: int, fault_id: str) -> random.Random:
    """The randomness of one fault. It depends on the run and the fault's id only, so that dropping another
    fault from a schedule changes nothing about this one."""
    return random.Random(f"{run_key}/{fault_id}")  # a str is hashed with SHA-512, the same everywhere


async def run_schedule(
    schedule: Schedule,
    *,
    target: Target,
    nemeses: Mapping[str, Nemesis],
    rng: random.Random,
    record: Record,
    clock: Callable[[], float] | None = None,
) -> None:
    """Inject, prove, heal and prove again, as the schedule says; returns when everything is healed.

    `nemeses` has every nemesis of the schedule by name; `rng` is used once, for a key from which the
    randomness of each fault is derived. `clock` gives the seconds since the schedule's zero (default: since
    this call, by the running loop). Late events, after a long proof or a wait for a leader, follow as soon as
    possible. An operator's request (`is_request`) runs concurrently with later events, because it may wait for
    one of them. Faults that the schedule never heals are healed at its end.

    When cancelled, it finishes the current step, heals what is in force, records all that, and then raises
    CancelledError. Raises KeyError, before anything is injected, for a nemesis that is not in `nemeses`; and,
    once everything is healed, what `record` raised.
    """
    for event in schedule:
        if event.nemesis not in nemeses:
            raise KeyError(f"the schedule names {event.nemesis!r}, which is not among the nemeses of this run")
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    now_s = clock or (lambda: loop.time() - begin_s)
    driver = _Driver(target=target, nemeses=nemeses, run_key=rng.getrandbits(64), record=record)
    try:
        since_s = begin_s
        events = deque(schedule)
        while events:
            event = events.popleft()
            wait_s = event.at_s - now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if event.when is not None:
                await driver.await_trigger(event, event.when, since_s)
            since_s = loop.time()
            if event.action == INJECT:
                # A plan touches nothing and may be cancelled; once a fault begins, its proof is worth having.
                injection = await driver.plan_beside(event, events, now_s)
                await _to_the_end(driver.carry_out(event, driver.inject(injection)))
            else:
                await _to_the_end(driver.carry_out(event, driver.heal(event.fault_id)))
            driver.raise_if_not_recorded()
    finally:
        await _to_the_end(driver.heal_all())
    driver.raise_if_not_recorded()


class _Driver:
    """The faults in force, and how they come and go."""

    def __init__(self, *, target: Target, nemeses: Mapping[str, Nemesis], run_key: int, record: Record) -> None:
        self._target = target
        self._nemeses = nemeses
        self._run_key = run_key
        self._record = record
        self._not_recorded: Exception | None = None
        self._in_force: dict[str, Injection] = {}
        self._beside: dict[str, list[Injection]] = {}
        """fault -> the others that have been in force with it, including those that are over by now"""
        self._met: dict[str, Proof | None] = {}
        """fault -> what had met it right before its first healing; a repeated healing would find less"""
        self._occurrences: dict[tuple[str, str], str | None] = {}
        """(fault, action) -> the occurrence of the trigger that it waited for, None when there was none."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """fault -> the request that runs beside the schedule, in order of their start"""

    async def carry_out(self, event: FaultEvent, step: Coroutine[Any, Any, None]) -> None:
        """Run a step to its end. A step of a request only starts, after the previous step of the same fault."""
        nemesis = self._nemeses[event.nemesis]
        if not isinstance(nemesis, MakesRequest) or not nemesis.is_request:
            await step
            return
        before = self._asking.get(event.fault_id)

        async def in_turn() -> None:
            if before is not None:
                await before
            await step

        self._asking[event.fault_id] = asyncio.get_running_loop().create_task(in_turn(), name=f"{event.fault_id} asks")

    async def await_trigger(self, event: FaultEvent, when: str, since_s: float) -> None:
        """Wait for the trigger of an event; see nemesis.triggers."""
        occurrence = None
        if self._target.triggers is not None:
            loop = asyncio.get_running_loop()
            trigger = Trigger.parse(when)
            occurrence = await self._target.triggers.wait(trigger, since_s=since_s, timeout_s=TRIGGER_TIMEOUT_S)
            if occurrence is not None and (left_s := occurrence.at_s + trigger.delay_s - loop.time()) > 0:
                await asyncio.sleep(left_s)
        self._occurrences[event.fault_id, event.action] = None if occurrence is None else str(occurrence)

    async def plan_beside(self, event: FaultEvent, events: deque[FaultEvent], now_s: Callable[[], float]) -> Injection:
        """Decide who is hit. If that takes long, because there is no leader yet, faults that become due for healing
        meanwhile are healed and removed from `events`: one of them may be what prevents an election."""
        plan = asyncio.ensure_future(self.plan(event))
        try:
            await asyncio.wait((plan,), timeout=PLAN_TIMEOUT_S)
            while not plan.done():
                coming = _next_healing(events, event.fault_id)
                await asyncio.wait((plan,), timeout=None if coming is None else max(0.0, coming.at_s - now_s()))
                if coming is not None and not plan.done():
                    events.remove(coming)
                    await _to_the_end(self.carry_out(coming, self.heal(coming.fault_id)))
            return plan.result()
        finally:
            plan.cancel()

    async def plan(self, event: FaultEvent) -> Injection:
        """Decide who is hit. A plan that fails becomes an injection with that problem."""
        planned = await _attempt(
            self._nemeses[event.nemesis].plan(
                self._target,
                fault_rng(self._run_key, event.fault_id),
                fault_id=event.fault_id,
                variant=event.variant,
            )
        )
        if not isinstance(planned, _Failure):
            return planned
        return Injection(
            fault_id=event.fault_id,
            nemesis=event.nemesis,
            variant=event.variant,
            value={"id": event.fault_id, "nemesis": event.nemesis, "variant": event.variant, "hosts": []},
            problem=f"could not be planned: {planned}",
        )

    async def inject(self, injection: Injection) -> None:
        """Inject one fault and prove it. A fault that cannot be injected is only recorded."""
        nemesis = self._nemeses[injection.nemesis]
        self._note("invoke", INJECT, injection)
        self._in_force[injection.fault_id] = injection  # first, because the injection may fail half-way
        self._beside[injection.fault_id] = list(self._others(injection.fault_id))
        for other in self._beside[injection.fault_id]:
            self._beside[other.fault_id].append(injection)
        if injection.problem is None:
            failure = await self._step(nemesis, nemesis.inject(self._target, injection))
            if isinstance(failure, _Failure):
                injection = replace(injection, problem=f"could not be injected: {failure}")
                self._in_force[injection.fault_id] = injection
        if injection.problem is not None:
            proof = Proof(proven=False, detail=injection.problem)
        else:
            others = self._others(injection.fault_id)
            proof = _proof_of(await self._step(nemesis, nemesis.prove(self._target, injection, in_force=others)))
            proof = replace(proof, evidence={**injection.evidence, **proof.evidence})
            self._in_force[injection.fault_id] = replace(injection, evidence=proof.evidence)
        if not proof.proven:
            self._met[injection.fault_id] = None
        self._note("info", INJECT, injection, proof)

    async def heal(self, fault_id: str) -> None:
        """Heal one fault and prove it; does nothing when it is not in force. A fault whose healing fails is
        assumed to be still in force, and healing is tried again at the end."""
        injection = self._in_force.get(fault_id)
        if injection is None:
            return
        nemesis = self._nemeses[injection.nemesis]
        await self._look_what_was_met(nemesis, injection)
        self._note("invoke", HEAL, injection)
        failure = await self._step(nemesis, nemesis.heal(self._target, injection))
        if isinstance(failure, _Failure):
            proof = Proof(proven=False, detail=f"could not be healed: {failure}")
        else:
            del self._in_force[fault_id]
            others = tuple(self._in_force.values())
            proved = self._step(nemesis, nemesis.prove_healed(self._target, injection, in_force=others))
            proof = _proof_of(await proved)
        self._note("info", HEAL, injection, proof)

    async def _look_what_was_met(self, nemesis: Nemesis, injection: Injection) -> None:
        """Ask the nemesis what has met the fault: once for each proven fault, right before it is healed."""
        if injection.fault_id in self._met or not isinstance(nemesis, ProvesToTheEnd):
            return
        others = self._others(injection.fault_id)
        injection = replace(injection, beside=tuple(self._beside[injection.fault_id]))
        seen = await self._step(nemesis, nemesis.prove_met(self._target, injection, in_force=others))
        self._met[injection.fault_id] = _proof_of(seen)

    async def heal_all(self) -> None:
        """Heal everything in force, the newest fault first; requests come last, since they may be waiting for the other
        faults to be healed."""
        for fault_id in reversed(list(self._in_force)):
            if fault_id not in self._asking:
                await self.heal(fault_id)
        for fault_id in reversed(list(self._asking)):
            await self._asking[fault_id]
            await self.heal(fault_id)

    def raise_if_not_recorded(self) -> None:
        """Raise what the recorder raised; deferred until here, because healing comes first."""
        if self._not_recorded is not None:
            raise self._not_recorded

    async def _step(self, nemesis: Nemesis, step: Awaitable[_T]) -> _T | _Failure:
        timeout_s = nemesis.step_timeout_s if isinstance(nemesis, StepTimeout) else STEP_TIMEOUT_S
        return await _attempt(step, timeout_s)

    def _others(self, fault_id: str) -> tuple[Injection, ...]:
        return tuple(fault for fault in self._in_force.values() if fault.fault_id != fault_id)

    def _note(self, kind: str, f: str, injection: Injection, proof: Proof | None = None) -> None:
        value = dict(injection.value)
        if (injection.fault_id, f) in self._occurrences:
            value["trigger"] = self._occurrences[injection.fault_id, f]
        if f == HEAL and (met := self._met.get(injection.fault_id)) is not None:
            value["met"] = met.to_json()
        if proof is not None:
            value["proof"] = proof.to_json()
        try:
            self._record({"process": "nemesis", "type": kind, "f": f, "value": value})
        except Exception as error:
            self._not_recorded = self._not_recorded or error


def _next_healing(events: Iterable[FaultEvent], waiting: str) -> FaultEvent | None:
    """The next healing of a fault in force, other than the `waiting` one. Injections scheduled before it are late
    anyway, and so are their healings."""
    not_begun = {waiting}
    for event in events:
        if event.action == INJECT:
            not_begun.add(event.fault_id)
        elif event.when is None and event.fault_id not in not_begun:
            return event
    return None


class _Failure(str):
    """Why a step failed, in one line."""

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        """The text of `error`, after its type, which a RuntimeError does not need: it was raised for its text."""
        return cls(str(error) if type(error) is RuntimeError and str(error) else f"{type(error).__name__}: {error}")


async def _attempt(step: Awaitable[_T], timeout_s: float = STEP_TIMEOUT_S) -> _T | _Failure:
    """The result of a step, or why it failed. Only the driver's own cancellation and Ctrl-C are raised."""
    running = _Running(_answer_of(step))
    late = f"took longer than {timeout_s:g} s"
    try:
        result = await asyncio.wait_for(running, timeout_s)
    except TimeoutError as error:  # ours has no message, one of the step's own may have one
        went_on = f", and {CANCEL_GRACE_S:g} s more after it was cancelled" if running.was_closed else ""
        return _Failure(f"{str(error) or late}{went_on}")
    except Exception as error:
        return _Failure.of(error)
    if not running.was_cancelled:
        return result
    if _is_asked_to_end():  # the step has swallowed the driver's own cancellation
        raise asyncio.CancelledError
    return _Failure(late)


def _is_asked_to_end() -> bool:
    """Whether this task has been cancelled and not uncancelled since, as a step's own `asyncio.timeout` does.
    A CancelledError alone does not tell: it also comes from a task that a step has cancelled and awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Running(Generic[_T]):
    """Awaits a step, but closes it if it runs for longer than `CANCEL_GRACE_S` after it was cancelled. It runs in the
    task of its awaiter: a task of its own would take more turns of a simulated loop."""

    def __init__(self, step: Coroutine[Any, Any, _T]) -> None:
        self._step = step
        self.was_cancelled = False
        """The step returned a result although it had been cancelled."""
        self.was_closed = False

    def __await__(self) -> Generator[Any, Any, _T]:
        resume, given = self._step.send, None
        closing: asyncio.TimerHandle | None = None
        try:
            while True:
                try:
                    awaited = resume(given)
                except StopIteration as ended:
                    self.was_cancelled = _is_asked_to_end()
                    return ended.value  # type: ignore[no-any-return]
                try:
                    given, resume = (yield awaited), self._step.send
                except BaseException as error:
                    given, resume = error, self._step.throw
                    if self.was_closed:
                        self._close()
                        raise
                    if isinstance(error, asyncio.CancelledError) and _is_asked_to_end():
                        if closing is not None:
                            closing.cancel()
                        closing = self._close_later()
        finally:
            if closing is not None:
                closing.cancel()

    def _close_later(self) -> asyncio.TimerHandle:
        task = asyncio.current_task()
        assert task is not None

        def close() -> None:
            if task.cancelling():  # otherwise it was a timeout of the step's own, which is over
                self.was_closed = True
                task.cancel()

        return asyncio.get_running_loop().call_later(CANCEL_GRACE_S, close)

    def _close(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # that was ours
        with contextlib.suppress(Exception):  # errors of a step that resists closing are of no use
            self._step.close()


async def _answer_of(step: Awaitable[_T]) -> _T | _Failure:
    """Await a step. A step that itself raises a BaseException has failed as well: sys.exit would end the harness with
    an exit status that stands for a verdict, and CancelledError, of a task of the step's own, all later faults."""
    task = asyncio.current_task()
    asked = 0 if task is None else task.cancelling()
    try:
        return await step
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > asked:
            raise
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        return _Failure.of(error)


def _proof_of(outcome: Proof | _Failure) -> Proof:
    return outcome if isinstance(outcome, Proof) else Proof(proven=False, detail=f"could not be proved: {outcome}")


async def _to_the_end(work: Awaitable[None]) -> None:
    """Await `work` to its end even when this task is cancelled meanwhile; then raise the cancellation.

    Every step of the work has a deadline, so this ends.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
