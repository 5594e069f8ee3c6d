"""Generators of the clients' operations, as pure values.

A generator is an immutable value with two methods. `next(context)` returns what the thread in the context should do
now, as a step, and the generator for the next call:

    Op        do this operation now
    Wait      nothing to do before `until_ns`; ask again then
    None      exhausted for this thread

`update(context, event)` returns the generator after an event (an invocation or a completion). Because generators are
values, they compose: a time limit around a stagger around a mix is three small objects, and a failed composition can be
printed. Randomness comes from the context's seeded random generator, so that a seed determines the sequence of steps.

The vocabulary (mix, limit, time limit, stagger, phases, each thread, reserve, until ok) is Jepsen's. Threads pull their
next step themselves, so there is no central interpreter between two operations, and a step costs a few microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Calls",
    "Context",
    "EachThread",
    "FlipFlop",
    "Generator",
    "IgnoresEvents",
    "Limit",
    "Mix",
    "Nothing",
    "Op",
    "Phases",
    "Reserve",
    "Stagger",
    "Step",
    "TimeLimit",
    "Unpaced",
    "UntilOk",
    "Wait",
]

Event = Mapping[str, Any]


class Op(NamedTuple):
    """An operation to invoke: function, independent key (None: none) and value. With `with_next` the next operation is
    due at the same moment, for another thread."""

    f: str
    key: Any = None
    value: Any = None
    with_next: bool = False


class Wait(NamedTuple):
    """Nothing to do before `until_ns` (nanoseconds since the test began). With `everyone` that holds for every thread,
    so that not each of them has to ask."""

    until_ns: int
    everyone: bool = False


@dataclass(slots=True)
class Context:
    """The asking thread and the time. One context object is reused for all calls of a run."""

    random: random.Random
    time_ns: int = 0
    thread: int = 0
    process: int = 0
    threads: int = 1


Step = Op | Wait | None


class Generator(Protocol):
    """See the module docstring."""

    def next(self, context: Context) -> tuple[Step, Generator]: ...

    def update(self, context: Context, event: Event) -> Generator: ...

    def idle_until_ns(self, now_ns: int) -> int | None:
        """Until when it would make every thread wait, if that is known without calling `next`, for which a thread would
        have to wake up. None if it is unknown, or if it would not make all wait."""
        ...


class Unpaced:
    """A generator whose waits are only known by calling `next`."""

    __slots__ = ()

    def idle_until_ns(self, now_ns: int) -> int | None:
        """Never known."""
        return None


class IgnoresEvents(Unpaced):
    """A generator that ignores events."""

    __slots__ = ()

    def update(self, context: Context, event: Event) -> Any:
        return self


@dataclass(frozen=True, slots=True)
class Nothing(IgnoresEvents):
    """Exhausted from the start."""

    def next(self, context: Context) -> tuple[Step, Generator]:
        return None, self


@dataclass(frozen=True, slots=True)
class Calls(IgnoresEvents):
    """Repeats the result of `function(context)`, an Op, forever."""

    function: Callable[[Context], Op]

    def next(self, context: Context) -> tuple[Step, Generator]:
        return self.function(context), self


@dataclass(frozen=True, slots=True)
class Limit(Unpaced):
    """At most `count` operations of `inner`."""

    count: int
    inner: Generator

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self.count <= 0:
            return None, self
        step, inner = self.inner.next(context)
        spent = 1 if isinstance(step, Op) else 0
        return step, Limit(self.count - spent, inner)

    def update(self, context: Context, event: Event) -> Generator:
        inner = self.inner.update(context, event)
        return self if inner is self.inner else Limit(self.count, inner)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """`inner` for `seconds` after the first call of `next`; `on_cut` is called if it had more for a thread to do."""

    seconds: float
    inner: Generator
    end_ns: int | None = None
    on_cut: Callable[[], None] | None = None

    def next(self, context: Context) -> tuple[Step, Generator]:
        end_ns = self.end_ns if self.end_ns is not None else context.time_ns + int(self.seconds * 1e9)
        if context.time_ns >= end_ns:
            if self.on_cut is not None and self.inner.next(context)[0] is not None:
                self.on_cut()
            return None, self
        step, inner = self.inner.next(context)
        if isinstance(step, Wait) and step.until_ns > end_ns:
            step = step._replace(until_ns=end_ns)
        if inner is self.inner and end_ns == self.end_ns:
            return step, self
        return step, TimeLimit(self.seconds, inner, end_ns, self.on_cut)

    def update(self, context: Context, event: Event) -> Generator:
        inner = self.inner.update(context, event)
        return self if inner is self.inner else TimeLimit(self.seconds, inner, self.end_ns, self.on_cut)

    def idle_until_ns(self, now_ns: int) -> int | None:
        """Like `inner`, but not beyond the end."""
        if self.end_ns is None or self.end_ns <= now_ns:
            return None
        inner_ns = self.inner.idle_until_ns(now_ns)
        return None if inner_ns is None else min(inner_ns, self.end_ns)


@dataclass(frozen=True, slots=True)
class Stagger:
    """Operations of `inner` at `rate` per second over all threads, exponentially spaced (a Poisson stream).

    If the threads fall behind (all are waiting for replies) the missed operations are not made up for in a burst: the
    next one is due at once and the stream continues from there. Operations that are due together are followed by one
    gap for each of them.
    """

    rate: float
    inner: Generator
    due_ns: int | None = None
    owed_ns: int = 0
    """Accumulated gaps of operations that were due together with the next one."""

    def next(self, context: Context) -> tuple[Step, Generator]:
        now_ns = context.time_ns
        due_ns = self.due_ns if self.due_ns is not None else now_ns
        if due_ns > now_ns:
            return Wait(due_ns, everyone=True), self
        step, inner = self.inner.next(context)
        owed_ns = self.owed_ns
        if isinstance(step, Op):
            owed_ns += int(context.random.expovariate(self.rate) * 1e9)
            # Lateness up to 50 ms is due to the timer and is made up for; more is due to the system and is not.
            due_ns = due_ns if now_ns - due_ns < 50_000_000 else now_ns
            if not step.with_next:
                due_ns, owed_ns = due_ns + owed_ns, 0
        return step, Stagger(self.rate, inner, due_ns, owed_ns)

    def update(self, context: Context, event: Event) -> Generator:
        inner = self.inner.update(context, event)
        return self if inner is self.inner else Stagger(self.rate, inner, self.due_ns, self.owed_ns)

    def idle_until_ns(self, now_ns: int) -> int | None:
        """Until the next operation is due."""
        return self.due_ns if self.due_ns is not None and self.due_ns > now_ns else None


@dataclass(frozen=True, slots=True)
class Mix(Unpaced):
    """At each step one of `choices` at random, by weight; exhausted choices are left out."""

    choices: tuple[tuple[float, Generator], ...]

    def next(self, context: Context) -> tuple[Step, Generator]:
        choices = self.choices
        while choices:
            index = _pick(choices, context.random.random())
            weight, inner = choices[index]
            step, after = inner.next(context)
            step = _for_this_thread(step)
            if step is not None:
                if after is inner:
                    return step, self if choices is self.choices else Mix(choices)
                return step, Mix((*choices[:index], (weight, after), *choices[index + 1 :]))
            choices = (*choices[:index], *choices[index + 1 :])
        return None, Mix(())

    def update(self, context: Context, event: Event) -> Generator:
        changed: list[tuple[float, Generator]] | None = None
        for index, (weight, inner) in enumerate(self.choices):
            after = inner.update(context, event)
            if after is not inner:
                if changed is None:
                    changed = list(self.choices)
                changed[index] = weight, after
        return self if changed is None else Mix(tuple(changed))


def _for_this_thread(step: Step) -> Step:
    """The step for this thread only: a wait of one of several generators does not apply to threads of the others."""
    return step._replace(everyone=False) if isinstance(step, Wait) and step.everyone else step


def _pick(choices: tuple[tuple[float, Generator], ...], fraction: float) -> int:
    target = fraction * sum([weight for weight, _ in choices])
    for index, (weight, _) in enumerate(choices):
        target -= weight
        if target < 0:
            return index
    return len(choices) - 1


@dataclass(frozen=True, slots=True)
class FlipFlop(Unpaced):
    """`inner` generators in turn, one operation each, forever; exhausted as soon as one of them is."""

    inner: tuple[Generator, ...]
    index: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        step, after = self.inner[self.index].next(context)
        inner = (*self.inner[: self.index], after, *self.inner[self.index + 1 :])
        index = (self.index + 1) % len(inner) if isinstance(step, Op) else self.index
        return _for_this_thread(step), FlipFlop(inner, index)

    def update(self, context: Context, event: Event) -> Generator:
        return replace(self, inner=tuple(g.update(context, event) for g in self.inner))


@dataclass(frozen=True, slots=True)
class Phases(Unpaced):
    """One generator after the other; the next begins when the previous one is exhausted and has no operation open."""

    remaining: tuple[Generator, ...]
    open_threads: frozenset[int] = frozenset()
    draining: bool = False

    POLL_NS = 10_000_000

    def next(self, context: Context) -> tuple[Step, Generator]:
        if not self.remaining:
            return None, self
        if not self.draining:
            step, first = self.remaining[0].next(context)
            if isinstance(step, Op):
                opened = self.open_threads | {context.thread}
                return step, Phases((first, *self.remaining[1:]), opened)
            if step is not None:
                return step, Phases((first, *self.remaining[1:]), self.open_threads)
        if self.open_threads:
            return Wait(context.time_ns + self.POLL_NS), replace(self, draining=True)
        return Phases(self.remaining[1:]).next(context)

    def update(self, context: Context, event: Event) -> Generator:
        if not self.remaining:
            return self
        first = self.remaining[0].update(context, event)
        still_open = self.open_threads
        if event["type"] != "invoke":
            still_open = still_open - {context.thread}
        return replace(self, remaining=(first, *self.remaining[1:]), open_threads=still_open)


@dataclass(frozen=True, slots=True)
class EachThread(Unpaced):
    """An independent copy of `template` for every thread."""

    template: Generator
    copies: Mapping[int, Generator] = field(default_factory=dict)

    def next(self, context: Context) -> tuple[Step, Generator]:
        step, after = self.copies.get(context.thread, self.template).next(context)
        return _for_this_thread(step), EachThread(self.template, {**self.copies, context.thread: after})

    def update(self, context: Context, event: Event) -> Generator:
        current = self.copies.get(context.thread, self.template)
        after = current.update(context, event)
        if after is current:
            return self
        return EachThread(self.template, {**self.copies, context.thread: after})


@dataclass(frozen=True, slots=True)
class Reserve(Unpaced):
    """The first `count` threads run `reserved`, the others `rest`."""

    count: int
    reserved: Generator
    rest: Generator

    def next(self, context: Context) -> tuple[Step, Generator]:
        if context.thread < self.count:
            step, after = self.reserved.next(context)
            return _for_this_thread(step), replace(self, reserved=after)
        step, after = self.rest.next(context)
        return _for_this_thread(step), replace(self, rest=after)

    def update(self, context: Context, event: Event) -> Generator:
        if context.thread < self.count:
            return replace(self, reserved=self.reserved.update(context, event))
        return replace(self, rest=self.rest.update(context, event))


@dataclass(frozen=True, slots=True)
class UntilOk(Unpaced):
    """`inner` until one of its operations is ok (in any thread), then exhausted."""

    inner: Generator
    done: bool = False

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self.done:
            return None, self
        step, inner = self.inner.next(context)
        return step, UntilOk(inner)

    def update(self, context: Context, event: Event) -> Generator:
        if self.done or event["type"] == "ok":
            return UntilOk(self.inner, done=True)
        return UntilOk(self.inner.update(context, event))
