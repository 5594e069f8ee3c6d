"""Generators are values: what they ask for, in which order, and when they end."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.generator import (
    Calls,
    Context,
    EachThread,
    FlipFlop,
    Generator,
    Limit,
    Mix,
    Nothing,
    Op,
    Phases,
    Reserve,
    Stagger,
    TimeLimit,
    UntilOk,
    Wait,
)

READS = Calls(lambda context: Op("read"))
WRITES = Calls(lambda context: Op("write", value=context.random.random()))


def context(thread: int = 0, time_ns: int = 0, threads: int = 1, seed: int = 0) -> Context:
    return Context(random=random.Random(seed), thread=thread, process=thread, time_ns=time_ns, threads=threads)


def drain(generator: Generator, ctx: Context, most: int = 30_000) -> list[Op]:
    """Ask until exhausted, waiting as requested; every operation completes ok at once."""
    ops: list[Op] = []
    for _ in range(most):
        step, generator = generator.next(ctx)
        if step is None:
            return ops
        if isinstance(step, Wait):
            assert step.until_ns > ctx.time_ns, "a wait must be for later, or the asker spins"
            ctx.time_ns = step.until_ns
            continue
        for kind in ("invoke", "ok"):
            generator = generator.update(ctx, {"type": kind, "f": step.f, "key": step.key, "value": step.value})
        ops.append(step)
    raise AssertionError("the generator did not end")


def test_limit_counts_operations_only() -> None:
    ctx = context()
    assert len(drain(Limit(3, READS), ctx)) == 3
    assert drain(Limit(0, READS), ctx) == []
    waiting = Stagger(1000.0, READS, due_ns=5_000_000)
    assert len(drain(Limit(2, waiting), ctx)) == 2


def test_time_limit_starts_when_the_generator_is_first_asked() -> None:
    generator: Generator = TimeLimit(1.0, READS)
    step, generator = generator.next(context(time_ns=5_000_000_000))
    assert step == Op("read")
    step, generator = generator.next(context(time_ns=5_999_999_999))
    assert step == Op("read")
    step, generator = generator.next(context(time_ns=6_000_000_000))
    assert step is None


def test_time_limit_cuts_a_wait_short() -> None:
    generator = TimeLimit(1.0, Stagger(1.0, READS, due_ns=10_000_000_000))
    step, _ = generator.next(context(time_ns=0))
    assert step == Wait(1_000_000_000, everyone=True)


@pytest.mark.parametrize(
    "several",
    [
        Mix(((1.0, Stagger(1.0, READS, due_ns=9)),)),
        FlipFlop((Stagger(1.0, READS, due_ns=9),)),
        EachThread(Stagger(1.0, READS, due_ns=9)),
        Reserve(1, Stagger(1.0, READS, due_ns=9), READS),
        Reserve(0, READS, Stagger(1.0, READS, due_ns=9)),
    ],
)
def test_a_wait_of_one_of_several_generators_is_not_for_everyone(several: Generator) -> None:
    assert several.next(context(time_ns=0))[0] == Wait(9)


def test_stagger_keeps_its_rate_over_time() -> None:
    ctx = context(seed=7)
    ops = drain(TimeLimit(100.0, Stagger(50.0, READS)), ctx)
    assert 4500 < len(ops) < 5500  # 5000 expected, standard deviation 71


def test_stagger_does_not_make_up_for_an_outage() -> None:
    generator: Generator = Stagger(1000.0, READS)
    ctx = context()
    step, generator = generator.next(ctx)
    assert isinstance(step, Op)
    ctx.time_ns = 60_000_000_000  # nothing was asked for a minute
    burst = 0
    while isinstance(step, Op):
        step, generator = generator.next(ctx)
        burst += isinstance(step, Op)
    assert burst <= 3


def test_operations_grouped_by_with_next_do_not_change_the_rate() -> None:
    def pairs(context: Context) -> Op:
        return Op("insert", with_next=context.random.random() < 0.5)

    ctx = context(seed=7)
    generator: Generator = TimeLimit(100.0, Stagger(50.0, Calls(pairs)))
    ops, was_together, step = 0, False, None
    while True:
        step, generator = generator.next(ctx)
        if step is None:
            break
        if isinstance(step, Wait):
            assert not was_together, "an operation that follows `with_next` must not wait"
            ctx.time_ns = step.until_ns
        else:
            ops, was_together = ops + 1, step.with_next
    assert 4500 < ops < 5500  # as many as one by one: 5000 expected, with a standard deviation of about 110


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(0, 2**32))
def test_mix_uses_every_choice_by_weight(weights: list[float], seed: int) -> None:
    choices = tuple((w, Calls(lambda c, i=i: Op(str(i)))) for i, w in enumerate(weights))  # type: ignore[misc]
    ctx = context(seed=seed)
    count = 3000
    seen = Counter(op.f for op in drain(Limit(count, Mix(choices)), ctx))
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(seen[str(index)] - count * share) <= 6 * deviation + 1


def test_mix_drops_exhausted_choices() -> None:
    mix = Mix(((1.0, Limit(2, READS)), (1.0, Limit(3, WRITES)), (1.0, Nothing())))
    seen = Counter(op.f for op in drain(mix, context()))
    assert seen == {"read": 2, "write": 3}


def test_flip_flop_alternates() -> None:
    ops = drain(Limit(5, FlipFlop((READS, WRITES))), context())
    assert [op.f for op in ops] == ["read", "write", "read", "write", "read"]


def test_phases_wait_for_operations_that_are_still_open() -> None:
    generator: Generator = Phases((Limit(1, READS), Limit(1, WRITES)))
    first, second = context(thread=0, threads=2), context(thread=1, threads=2)
    step, generator = generator.next(first)
    assert step == Op("read")
    generator = generator.update(first, {"type": "invoke", "f": "read"})
    step, generator = generator.next(second)
    assert isinstance(step, Wait), "the second phase must not begin while a read is open"
    generator = generator.update(first, {"type": "info", "f": "read"})
    second.time_ns = step.until_ns
    step, generator = generator.next(second)
    assert isinstance(step, Op) and step.f == "write"


def test_each_thread_has_its_own_copy_of_the_generator() -> None:
    generator: Generator = EachThread(Limit(2, READS))
    asked: Counter[int] = Counter()
    for thread in (0, 1, 0, 1, 0, 1, 2):
        step, generator = generator.next(context(thread=thread, threads=3))
        asked[thread] += isinstance(step, Op)
    assert asked == {0: 2, 1: 2, 2: 1}


def test_reserve_splits_the_threads() -> None:
    generator: Generator = Reserve(1, WRITES, READS)
    seen = {}
    for thread in range(3):
        step, generator = generator.next(context(thread=thread, threads=3))
        assert isinstance(step, Op)
        seen[thread] = step.f
    assert seen == {0: "write", 1: "read", 2: "read"}


def test_until_ok_ends_with_the_first_success() -> None:
    generator: Generator = UntilOk(READS)
    ctx = context()
    for outcome in ("fail", "info", "ok"):
        step, generator = generator.next(ctx)
        assert isinstance(step, Op), f"it must go on before {outcome}"
        generator = generator.update(ctx, {"type": outcome, "f": "read"})
    step, generator = generator.next(ctx)
    assert step is None


@given(st.integers(0, 2**64))
def test_the_same_seed_gives_the_same_operations(seed: int) -> None:
    def once() -> list[Any]:
        mix = Mix(((2.0, WRITES), (1.0, READS)))
        return drain(TimeLimit(0.5, Stagger(200.0, mix)), context(seed=seed))

    assert once() == once()


def test_idle_until_ns_predicts_a_wait_for_everyone() -> None:
    asked = context(seed=1)
    load: Generator = TimeLimit(1.0, Stagger(100, READS))
    assert load.idle_until_ns(0) is None  # it has not been asked yet
    while True:
        until_ns = load.idle_until_ns(asked.time_ns)
        step, load = load.next(asked)
        if step is None:
            break
        if isinstance(step, Wait):
            assert until_ns is not None and step == Wait(until_ns, everyone=True)
            asked.time_ns = step.until_ns
        else:
            assert until_ns is None
    assert asked.time_ns == 1_000_000_000
    assert load.idle_until_ns(asked.time_ns) is None
    assert READS.idle_until_ns(0) is None


@given(outer_s=st.floats(0.01, 2.0), inner_s=st.floats(0.01, 2.0), rate=st.floats(1.0, 500.0), seed=st.integers(0, 99))
def test_idle_until_ns_of_nested_limits_agrees_with_next(
    outer_s: float, inner_s: float, rate: float, seed: int
) -> None:
    """`idle_until_ns` is what `next` then returns, however deeply the stagger is nested."""
    asked = context(seed=seed)
    load: Generator = TimeLimit(outer_s, TimeLimit(inner_s, Stagger(rate, READS)))
    told = 0
    while True:
        until_ns = load.idle_until_ns(asked.time_ns)
        step, load = load.next(asked)
        if until_ns is not None:
            told += 1
            assert step == Wait(until_ns, everyone=True)
        if step is None:
            break
        if isinstance(step, Wait):
            assert until_ns == step.until_ns
            asked.time_ns = step.until_ns
    assert told >= 1


def test_a_time_limit_tells_whether_there_was_more_to_do() -> None:
    three = Limit(3, READS)
    for seconds, is_cut in ((10.0, False), (0.0, True)):
        cuts: list[str] = []
        drain(TimeLimit(seconds, three, on_cut=lambda cuts=cuts: cuts.append("cut")), context())
        assert bool(cuts) is is_cut
    ctx = context()
    cuts = []
    generator: Generator = TimeLimit(1.0, three, on_cut=lambda: cuts.append("cut"))
    for _ in range(3):
        _, generator = generator.next(ctx)
    ctx.time_ns = 2_000_000_000
    assert generator.next(ctx)[0] is None and not cuts, "everything had been asked before the end"
