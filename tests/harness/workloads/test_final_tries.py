"""Final requests of a run that fail, or are answered late: how often they are sent, and with which pauses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from harness.generator import Context, Generator, Limit, Op, Unpaced, Wait
from harness.workloads.base import CheckContext
from harness.workloads.cas_register import CasRegisterWorkload
from harness.workloads.client_delay import ClientDelayWorkload
from harness.workloads.client_log import ClientLogWorkload
from harness.workloads.client_register import ClientRegisterWorkload
from harness.workloads.consumer_progress import ConsumerProgressWorkload
from harness.workloads.delay import DelayWorkload
from harness.workloads.draining import DRAIN_LIMIT_S, PAUSE_NS, Drain
from harness.workloads.final_reads import EQUAL_WITHIN_S, TRIES, ReadEachKey
from harness.workloads.key_value import KeyValueWorkload
from harness.workloads.list_append import ListAppendWorkload
from harness.workloads.log import LogWorkload
from harness.workloads.queues import BEHIND_RETRY_NS, BEHIND_S, MAX_FINAL_ATTEMPTS, RETRY_NS
from harness.workloads.register import RegisterWorkload
from harness.workloads.sets import SetWorkload
from harness.workloads.stack import StackWorkload
from harness.workloads.versioned_register import VersionedRegisterWorkload
from harness.workloads.write_skew import WriteSkewWorkload

THREADS = 3
TAKES_NS = 1_000_000
"""From a call to its refusal."""
BEGAN_NS = 300_000_000_000
"""When the final operations begin: after a load that took longer than they may."""

Answer = Callable[[Op, int], dict[str, Any]]
"""(operation, nanoseconds since the beginning) -> its outcome"""


def refused(op: Op, time_ns: int) -> dict[str, Any]:
    return {"type": "fail", "value": op.value, "error": "nobody leads"}


def drive(generator: Generator, answer: Answer, *, threads: int = THREADS) -> list[tuple[int, int, Op]]:
    """(thread, nanoseconds since the start, operation) of every operation sent; each thread has its own time."""
    asked = []
    context = Context(random.Random(0), threads=threads)
    times_ns = dict.fromkeys(range(threads), BEGAN_NS)
    while times_ns:
        thread = min(times_ns, key=lambda each: (times_ns[each], each))
        context.thread, context.time_ns = thread, times_ns[thread]
        step, generator = generator.next(context)
        if step is None:
            del times_ns[thread]
        elif isinstance(step, Wait):
            assert step.until_ns > times_ns[thread]
            times_ns[thread] = step.until_ns
        else:
            asked.append((thread, times_ns[thread] - BEGAN_NS, step))
            told = {"process": thread, "f": step.f, "key": step.key, "value": step.value}
            generator = generator.update(context, {**told, "type": "invoke"})
            times_ns[thread] += TAKES_NS
            context.time_ns = times_ns[thread]
            generator = generator.update(context, told | answer(step, times_ns[thread] - BEGAN_NS))
    return asked


def times_of(asked: list[tuple[int, int, Op]], key: int) -> list[int]:
    return [time_ns for _, time_ns, op in asked if op.key == key]


def test_a_final_read_that_is_always_refused_is_retried_for_two_seconds() -> None:
    asked = drive(LogWorkload(keys=5).final_generator(), refused)
    for key in range(5):
        times_ns = times_of(asked, key)
        assert len(times_ns) == MAX_FINAL_ATTEMPTS
        assert all(later - sooner >= RETRY_NS for sooner, later in pairwise(times_ns))
    assert asked[-1][1] < 2.5e9, "a thread waits for its two queues at the same time"


def test_after_an_answer_reading_continues_without_a_pause() -> None:
    def read(op: Op, time_ns: int) -> dict[str, Any]:
        if time_ns < 0.35e9:
            return refused(op, time_ns)
        offset = op.value["offset"]
        return {"type": "ok", "value": {"offset": offset, "messages": list(range(32)), "tail": 320}}

    asked = drive(LogWorkload(keys=1).final_generator(), read)
    assert [op.value["offset"] for _, _, op in asked] == [0, 0, 0, 0, *range(0, 320, 32)]
    answered_ns = [time_ns for _, time_ns, _ in asked[4:]]
    assert answered_ns[-1] - answered_ns[0] == 9 * TAKES_NS


def test_an_answer_without_progress_counts_as_an_attempt() -> None:
    def empty(op: Op, time_ns: int) -> dict[str, Any]:
        return {"type": "ok", "value": {"offset": op.value["offset"], "messages": [], "tail": 7}}

    assert len(drive(LogWorkload(keys=1).final_generator(), empty)) == MAX_FINAL_ATTEMPTS


def test_a_final_fetch_that_is_always_refused_is_retried_for_two_seconds() -> None:
    asked = drive(ConsumerProgressWorkload().final_generator(), refused)
    assert len(asked) == THREADS * MAX_FINAL_ATTEMPTS
    assert 1.9e9 < asked[-1][1] < 2.5e9


def test_a_committed_offset_is_fetched_after_an_election() -> None:
    def elects(op: Op, time_ns: int) -> dict[str, Any]:
        return refused(op, time_ns) if time_ns < 1e9 else {"type": "ok", "value": {**op.value, "offset": 3}}

    asked = drive(ConsumerProgressWorkload().final_generator(), elects)
    assert len([op for _, time_ns, op in asked if time_ns + TAKES_NS >= 1e9]) == 2 * THREADS


def test_final_fetches_cover_the_partitions_in_use_last() -> None:
    """After a commit of unknown outcome its thread continues with another partition."""

    def now_and_then_unknown(op: Op, time_ns: int) -> dict[str, Any]:
        return {"type": "info" if time_ns % (7 * TAKES_NS) == 0 else "ok", "value": op.value}

    workload = ConsumerProgressWorkload()
    asked = drive(Limit(100, workload.generator()), now_and_then_unknown)
    used = {op.value["queue"] for _, _, op in asked if op.f == "commit"}
    last = drive(workload.final_generator(), lambda op, _: {"type": "ok", "value": op.value})
    assert len(used) > THREADS
    assert used <= {op.value["queue"] for _, _, op in last}


@pytest.mark.parametrize("kind", ["fail", "info"])
def test_draining_a_group_that_fails_pauses_between_attempts(kind: str) -> None:
    asked = drive(DelayWorkload().final_generator(), lambda op, _: {"type": kind, "value": None})
    assert asked[-1][1] <= DRAIN_LIMIT_S * 1e9
    assert THREADS <= len(asked) <= THREADS * DRAIN_LIMIT_S * 1e9 / 50_000_000


def test_draining_waits_for_the_longest_delay() -> None:
    """Beyond the usual limit of a minute, since nothing may be due before."""
    late = ClientDelayWorkload({"longest_ms": "60000", "drain_s": "3"})
    asked = drive(late.final_generator(), lambda op, _: {"type": "ok", "value": None})
    assert 62.5e9 < asked[-1][1] <= 63e9


def drained(at_least_s: float, lag: Callable[[int], int]) -> list[tuple[int, str]]:
    """(nanoseconds, operation) of one thread's receives until the lag at that time is 0: three, and then none."""
    left = [3]

    def receive(op: Op, time_ns: int) -> dict[str, Any]:
        if op.f == "lag":
            return {"type": "ok", "value": lag(time_ns)}
        left[0] -= 1
        return {"type": "ok", "value": [7] if left[0] >= 0 else []}

    asked = drive(Drain("receive", at_least_s), receive, threads=1)
    return [(time_ns, op.f) for _, time_ns, op in asked]


def test_a_group_is_drained_when_a_receive_in_vain_is_followed_by_a_lag_of_none() -> None:
    assert [f for _, f in drained(0.0, lambda _: 0)] == ["receive"] * 4 + ["lag"]
    late = drained(0.0, lambda time_ns: 0 if time_ns > 1e9 else 5)
    assert [f for _, f in late] == ["receive"] * 3 + ["receive", "lag"] * ((len(late) - 3) // 2)
    assert 1e9 <= late[-1][0] + TAKES_NS <= 1e9 + 2 * TAKES_NS
    patient = drained(2.0, lambda _: 0)
    assert 2e9 <= patient[-1][0] + TAKES_NS <= 2e9 + 2 * TAKES_NS


@pytest.mark.parametrize(("last_s", "ends_s"), [(0.0, 3.0), (5.0, 8.0), (90.0, DRAIN_LIMIT_S)])
def test_taking_ends_when_nothing_has_come_for_a_while_or_after_a_minute(last_s: float, ends_s: float) -> None:
    """Values are there in the first 60 ms of every second up to `last_s`; each attempt takes one."""

    def take(op: Op, time_ns: int) -> dict[str, Any]:
        is_there = time_ns <= last_s * 1e9 + 6e7 and time_ns % 10**9 <= 6 * 10**7
        return {"type": "ok", "value": 7 if is_there else None}

    asked = drive(StackWorkload({"drain_s": "3"}).final_generator(), take)
    for thread in range(THREADS):
        times_ns = [time_ns for each, time_ns, _ in asked if each == thread]
        assert abs(times_ns[-1] - ends_s * 1e9) <= 1.2e8
        pauses_ns = [later - sooner - TAKES_NS for sooner, later in pairwise(times_ns)]
        assert set(pauses_ns) == {0, PAUSE_NS}, "after an attempt in vain, and only then"
        assert pauses_ns.count(0) >= min(last_s, ends_s)


def test_refused_attempts_to_take_pause_and_are_no_values() -> None:
    for kind in ("fail", "info"):
        asked = drive(StackWorkload({"drain_s": "3"}).final_generator(), lambda op, _, k=kind: {"type": k, "value": 7})
        assert 2.9e9 <= asked[-1][1] <= 3e9
        assert len(asked) <= THREADS * 3e9 / PAUSE_NS


def rounds(answer: Callable[[int, int], list[int] | None]) -> list[tuple[int, int]]:
    """(thread, nanoseconds) of the final reads of a set, answered by `answer(thread, nanoseconds)`; None: refused."""
    turn = [0]

    def read(op: Op, time_ns: int) -> dict[str, Any]:
        found = answer(turn[0], time_ns)
        return refused(op, time_ns) if found is None else {"type": "ok", "value": found}

    class Turns(Unpaced):
        """Notes whose turn it is."""

        def __init__(self, inner: Generator) -> None:
            self.inner = inner

        def next(self, context: Context) -> tuple[Any, Generator]:
            step, inner = self.inner.next(context)
            if isinstance(step, Op):
                turn[0] = context.thread
            return step, Turns(inner)

        def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
            return Turns(self.inner.update(context, event))

    return [(thread, time_ns) for thread, time_ns, _ in drive(Turns(SetWorkload().final_generator()), read)]


def test_reads_in_turn_end_with_the_first_round_that_is_equal() -> None:
    asked = rounds(lambda thread, _: [[1, 2], [2, 1], [1, 2, 2]][thread])
    assert [thread for thread, _ in asked] == [0, 1, 2]
    late = rounds(lambda thread, time_ns: [1, 2] if thread != 1 or time_ns > 5e9 else [1])
    assert [thread for thread, _ in late] == [0, 1, 2] * (len(late) // 3)
    assert 5e9 < late[-1][1] < 6e9


@pytest.mark.parametrize(("odd", "seen"), [(1, [1]), (2, [1]), (2, [1, 2, 3]), (0, []), (2, None)])
def test_reads_in_turn_that_differ_are_repeated_for_half_a_minute(odd: int, seen: list[int] | None) -> None:
    """A host that answers nothing to one thread counts as different."""
    asked = rounds(lambda thread, _: seen if thread == odd else [1, 2])
    assert EQUAL_WITHIN_S <= asked[-1][1] / 1e9 <= EQUAL_WITHIN_S + 1
    begins_ns = [time_ns for thread, time_ns in asked if thread == 0]
    assert all(later - sooner >= 500_000_000 for sooner, later in pairwise(begins_ns))


def test_reads_in_turn_that_nobody_answers_end_after_two_seconds() -> None:
    asked = rounds(lambda thread, _: None)
    assert [thread for thread, _ in asked[: 3 * TRIES]] == [thread for thread in range(3) for _ in range(TRIES)]
    assert 2e9 <= asked[-1][1] <= 3.5e9


def test_a_thread_may_fail_twice_in_its_turn() -> None:
    fails = Counter({0: TRIES - 1, 2: TRIES - 1})

    def now_and_then(thread: int, time_ns: int) -> list[int] | None:
        fails[thread] -= 1
        return None if fails[thread] >= 0 else [1]

    assert [thread for thread, _ in rounds(now_and_then)] == [0, 0, 0, 1, 2, 2, 2]


def test_reads_in_turn_wait_for_the_one_in_progress() -> None:
    context = Context(random.Random(0), threads=THREADS, thread=0)
    step, generator = SetWorkload().final_generator().next(context)
    assert step == Op("read")
    for thread in range(THREADS):
        context.thread = thread
        assert isinstance(generator.next(context)[0], Wait)
    context.thread = 1
    generator = generator.update(context, {"process": 0, "type": "invoke", "f": "read", "value": None})
    assert isinstance(generator.next(context)[0], Wait), "an invocation is no answer"


def transactions_at_the_end() -> tuple[int, Generator]:
    """The number of keys in use, and the final reads of them."""
    workload, context = ListAppendWorkload({"writes_per_key": "2"}), Context(random.Random(1))
    keys = 0
    for _ in range(50):
        step, _ = workload.generator().next(context)
        assert isinstance(step, Op)
        keys = max(keys, *(key + 1 for f, key, _ in step.value if f == "append"), 0)
    return keys, workload.final_generator()


@pytest.mark.parametrize("kind", ["fail", "info"])
def test_every_key_of_transactions_is_read_even_if_the_first_attempts_fail(kind: str) -> None:
    keys, final = transactions_at_the_end()

    def elects(op: Op, time_ns: int) -> dict[str, Any]:
        return {"type": "ok" if time_ns > 1e9 else kind, "value": op.value}

    read = [step[1] for _, time_ns, op in drive(final, elects) if time_ns + TAKES_NS > 1e9 for step in op.value]
    assert sorted(read) == list(range(len(read))) and len(read) >= keys > 20


def test_refused_reads_of_transaction_keys_stop_after_the_maximum_of_attempts() -> None:
    asked = drive(transactions_at_the_end()[1], refused)
    tries = Counter(op.value[0][1] for _, _, op in asked)
    assert set(tries.values()) == {MAX_FINAL_ATTEMPTS} and asked[-1][1] > 1.8e9


def test_a_log_behind_its_known_end_is_read_for_half_a_minute_if_polls_may_be_stale() -> None:
    def empty(op: Op, time_ns: int) -> dict[str, Any]:
        found = {"offset": op.value["offset"], "messages": [], "tail": op.value["offset"], "final": True}
        return {"type": "ok", "value": found}

    for polls, least_s in (("eventual", BEHIND_S), ("linearizable", 0.0)):
        workload = ClientLogWorkload({"polls": polls})
        appended = {"process": 0, "type": "ok", "f": "append", "key": 2, "value": [9, 77]}
        workload.generator().update(Context(random.Random(0), threads=THREADS), appended)
        asked = drive(workload.final_generator(), empty)
        assert len(times_of(asked, 1)) == 1
        took_ns = times_of(asked, 2)[-1] - times_of(asked, 2)[0]
        assert abs(took_ns - least_s * 1e9) <= BEHIND_RETRY_NS


REGISTERS = [
    RegisterWorkload(keys=8), ClientRegisterWorkload(), CasRegisterWorkload(), KeyValueWorkload(),
    VersionedRegisterWorkload(),
]  # fmt: skip


@pytest.mark.parametrize("workload", REGISTERS, ids=lambda each: type(each).__name__)
def test_every_thread_reads_every_register_even_if_the_first_attempts_fail(workload: Any) -> None:
    def elects(op: Op, time_ns: int) -> dict[str, Any]:
        return {"type": "ok" if time_ns > 1e9 else "fail", "value": None}

    asked = drive(workload.final_generator(), elects)
    for thread in range(THREADS):
        answered = [op.key for each, time_ns, op in asked if each == thread and time_ns + TAKES_NS > 1e9]
        assert sorted(answered) == list(range(workload.keys))
    assert len(drive(workload.final_generator(), refused)) == THREADS * (20 + workload.keys)


def test_every_key_is_read_once_wherever_a_thread_begins() -> None:
    begins = set()
    for seed in range(30):
        context, read = Context(random.Random(seed)), []
        step, generator = ReadEachKey(keys=3, first_key=lambda: 7).next(context)
        while isinstance(step, Op):
            read.append(step.key)
            step, generator = generator.update(context, {"type": "ok", "f": "read"}).next(context)
        assert step is None and sorted(read) == [7, 8, 9]
        begins.add(read[0])
    assert begins == {7, 8, 9}


def done(f: str, key: int | None, value: Any, kind: str = "ok") -> list[dict[str, Any]]:
    """An operation without concurrent ones, as two events without times."""
    told = {"process": 0, "f": f, "key": key, "value": value}
    return [{**told, "type": "invoke"}, {**told, "type": kind}]


CONTEXT = CheckContext(timeout_s=10.0, memory_mb=512)
VERSIONED = [
    {"process": 0, "f": "write", "key": 3, "value": 7, "type": "invoke"},
    {"process": 0, "f": "write", "key": 3, "value": 1, "type": "ok"},
]
OFFSETS = {"group": "group", "queue": 1}
SKEWED = [
    *({"process": each, "f": "insert", "key": 0, "value": [each, None], "type": "invoke"} for each in (0, 1)),
    {"process": 0, "f": "insert", "key": 0, "value": [0, None], "type": "ok"},
    {"process": 1, "f": "insert", "key": 0, "value": [1, None], "type": "info"},
]


@pytest.mark.parametrize(
    ("workload", "load", "f", "key", "asked", "answer"),
    [
        *((each, done("write", 3, 7), "read", 3, None, 7) for each in REGISTERS[:3]),
        (KeyValueWorkload(), done("put", 3, "7 "), "get", 3, None, "7 "),
        *((VersionedRegisterWorkload({"check": check}), VERSIONED, "read", 3, None, [1, 7])
          for check in ("linearizable", "sessions")),
        (ConsumerProgressWorkload(), done("commit", None, {**OFFSETS, "offset": 5}), "fetch", None,
         {**OFFSETS, "final": True}, {**OFFSETS, "final": True, "offset": 5}),
        (WriteSkewWorkload(), SKEWED, "read", 0, None, [0]),
    ],
    ids=lambda each: type(each).__name__ if hasattr(each, "check") else "",
)  # fmt: skip
def test_a_key_whose_final_reads_all_failed_makes_the_verdict_unknown(
    workload: Any, load: list[dict[str, Any]], f: str, key: int | None, asked: Any, answer: Any
) -> None:
    def verdict(*reads: list[dict[str, Any]]) -> Any:
        events = [event for part in (load, *reads) for event in part]
        history = [{**event, "time": at} for at, event in enumerate(events)]
        [found] = workload.check(history, CONTEXT).values()
        return found.valid

    answered = done(f, key, asked)
    answered[1]["value"] = answer
    assert verdict(answered) is True
    assert verdict(done(f, key, asked, "fail"), answered) is True
    assert verdict(done(f, key, asked, "fail"), done(f, key, asked, "fail")) == "unknown"


def test_a_register_that_was_replaced_needs_no_final_read() -> None:
    """No write to its successor was acknowledged, as behind a lasting partition."""
    workload = CasRegisterWorkload()
    behind = [*done("write", 3, 7), *done("read", 3, None, "fail")]
    newest = [*done("write", 5, 8, "info"), *done("read", 5, None)]
    history = [{**event, "time": at} for at, event in enumerate([*behind, *newest])]
    assert workload.check(history, CONTEXT)["linearizable"].valid is True
    assert workload.check(history[: len(behind)], CONTEXT)["linearizable"].valid == "unknown"
