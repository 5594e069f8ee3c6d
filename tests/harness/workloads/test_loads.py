"""The loads of the workloads contain the operations without which their checks would have nothing to find."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from harness.generator import Context, Generator, Op, Wait
from harness.workloads.bank import BankWorkload
from harness.workloads.cas_register import CasRegisterWorkload
from harness.workloads.client_delay import SHORTER, ClientDelayWorkload
from harness.workloads.client_log import ClientLogWorkload
from harness.workloads.client_queue import ClientQueueWorkload
from harness.workloads.client_register import ClientRegisterWorkload
from harness.workloads.client_transactions import ClientTransactionsWorkload
from harness.workloads.consumer_progress import MAX_ADVANCE, ConsumerProgressWorkload
from harness.workloads.counter import CounterWorkload
from harness.workloads.delay import DELAYS_MS, DelayWorkload
from harness.workloads.fetch_and_add import FetchAndAddWorkload
from harness.workloads.key_value import KeyValueWorkload
from harness.workloads.list_append import ListAppendWorkload
from harness.workloads.log import READ_MAX_MESSAGES, LogWorkload
from harness.workloads.long_fork import READS_PER_KEY, LongForkWorkload
from harness.workloads.mini_txn import MiniTxnWorkload
from harness.workloads.multi_register import MultiRegisterWorkload
from harness.workloads.mutex import MutexWorkload
from harness.workloads.priority_queue import PriorityQueueWorkload
from harness.workloads.queue import QueueWorkload
from harness.workloads.queues import MAX_FINAL_ATTEMPTS, RETRY_NS
from harness.workloads.register import RegisterWorkload
from harness.workloads.rw_register import RwRegisterWorkload
from harness.workloads.sets import SetWorkload
from harness.workloads.stack import StackWorkload
from harness.workloads.topic import NEAR_END, TopicWorkload
from harness.workloads.transacting import FINAL_KEYS
from harness.workloads.transactions import TransactionsWorkload
from harness.workloads.unique_ids import UniqueIdsWorkload
from harness.workloads.versioned_register import VersionedRegisterWorkload
from harness.workloads.write_skew import LAST_KEYS, TABLES, WriteSkewWorkload

COUNT = 6000
NEARLY = 0.03
"""Of a share; more than four standard deviations of the share of an event in `COUNT` independent draws."""


def operations(generator: Generator, *, count: int = COUNT, answer: Any = None) -> Iterator[Op]:
    """The first operations of a load. `answer` makes the value of the acknowledgement from the operation; without it,
    and where it returns None, the operation fails."""
    context = Context(random.Random(5))
    for _ in range(count):
        op, generator = generator.next(context)
        assert isinstance(op, Op)
        yield op
        event = {"process": 0, "f": op.f, "key": op.key, "value": op.value}
        generator = generator.update(context, {**event, "type": "invoke"})
        value = answer(op) if answer else None
        changes: dict[str, Any] = {"type": "fail"} if value is None else {"type": "ok", "value": value}
        generator = generator.update(context, {**event, **changes})
        context.time_ns += 1_000_000


@pytest.mark.parametrize(
    ("workload", "shares"),
    [
        (BankWorkload(), {"transfer": 0.5, "read": 0.5}),
        (ClientDelayWorkload(), {"send": 0.4, "receive": 0.6}),
        (ClientLogWorkload(), {"append": 0.5, "read": 0.5}),
        (ClientQueueWorkload(), {"enqueue": 0.45, "dequeue": 0.55}),
        (ClientQueueWorkload({"dequeues": "20"}), {"enqueue": 0.8, "dequeue": 0.2}),
        (ClientRegisterWorkload(), {"write": 0.5, "read": 0.5}),
        (ClientTransactionsWorkload(), {"transact": 0.36, "prepare": 0.04, "receive": 0.6}),
        (CounterWorkload(), {"add": 0.5, "read": 0.5}),
        (DelayWorkload(), {"send": 0.4, "receive": 0.6}),
        (FetchAndAddWorkload(), {"add": 0.667, "read": 0.333}),
        (KeyValueWorkload(), {"put": 0.05, "append": 0.45, "get": 0.5}),
        (LogWorkload(), {"append": 0.5, "read": 0.35, "tail": 0.15}),
        (PriorityQueueWorkload(), {"insert": 0.5, "extract": 0.5}),
        (QueueWorkload(), {"enqueue": 0.45, "dequeue": 0.55}),
        (RegisterWorkload(), {"write": 0.5, "read": 0.5}),
        (StackWorkload(), {"push": 0.5, "pop": 0.5}),
        (TopicWorkload(), {"send": 0.5, "read": 0.5}),
        (TransactionsWorkload(), {"transact": 0.4, "receive": 0.6}),
        (UniqueIdsWorkload(), {"generate": 1.0}),
        (VersionedRegisterWorkload(), {"write": 0.5, "read": 0.5}),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
def test_a_load_has_the_shares_of_operations_that_it_is_described_with(
    workload: Any, shares: Mapping[str, float]
) -> None:
    counts = Counter(op.f for op in operations(workload.generator()))
    assert {f: count / COUNT for f, count in counts.items()} == pytest.approx(shares, abs=NEARLY)


@pytest.mark.parametrize(
    ("workload", "f"),
    [
        (ClientLogWorkload(), "append"),
        (ClientRegisterWorkload(), "write"),
        (KeyValueWorkload(), "append"),
        (LogWorkload(keys=3), "append"),
        (RegisterWorkload(keys=4), "write"),
        (VersionedRegisterWorkload(), "write"),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
def test_every_key_gets_values_that_are_used_once(workload: Any, f: str) -> None:
    done = list(operations(workload.generator()))
    written = [op for op in done if op.f == f]
    keys: int = workload.keys
    counts = Counter(op.key for op in written)
    assert sorted(counts) == list(range(keys))
    assert min(counts.values()) > len(written) / keys / 2, counts
    assert len({op.value for op in written}) == len(written)
    assert {op.key for op in done if op.f in ("read", "get")} == set(range(keys))


@pytest.mark.parametrize(
    ("workload", "f"),
    [
        (ClientQueueWorkload(), "enqueue"),
        (PriorityQueueWorkload(), "insert"),
        (QueueWorkload(), "enqueue"),
        (SetWorkload(), "add"),
        (StackWorkload(), "push"),
        (TopicWorkload(), "send"),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
def test_every_message_is_used_once(workload: Any, f: str) -> None:
    values = [repr(op.value) for op in operations(workload.generator()) if op.f == f]
    assert len(values) > COUNT / 5
    assert len(set(values)) == len(values)


def test_values_of_a_priority_queue_do_not_arrive_in_their_order() -> None:
    values = [op.value for op in operations(PriorityQueueWorkload().generator()) if op.f == "insert"]
    rises = sum(later > earlier for earlier, later in pairwise(values))
    assert 0.2 < rises / len(values) < 0.8


def test_compare_and_sets_expect_what_was_last_seen_and_registers_are_replaced() -> None:
    workload = CasRegisterWorkload({"keys": "3", "operations_per_key": "50"})
    state: dict[int, int] = {}
    seen: dict[int, int] = {}

    def answer(op: Op) -> Any:
        if op.f == "cas":
            assert op.value[0] == seen[op.key], "it must have a chance of succeeding"
            if state[op.key] != op.value[0]:
                return False
            state[op.key] = op.value[1]
            return True
        if op.f == "write":
            state[op.key] = op.value
        value = state.get(op.key)
        if value is not None:
            seen[op.key] = value
        return value

    done = list(operations(workload.generator(), answer=answer))
    counts = Counter(op.f for op in done)
    assert counts["read"] / COUNT == pytest.approx(0.4, abs=NEARLY)
    assert counts["cas"] / COUNT == pytest.approx(0.4, abs=NEARLY)
    assert counts["write"] / COUNT == pytest.approx(0.2, abs=NEARLY)
    for at in range(0, COUNT, 150):
        assert {op.key for op in done[at : at + 150]} == {at // 50, at // 50 + 1, at // 50 + 2}


def test_a_register_that_nobody_has_seen_is_written_not_compared() -> None:
    load = CasRegisterWorkload({"keys": "3", "operations_per_key": "50"}).generator()
    assert Counter(op.f for op in operations(load))["cas"] == 0


def test_transfers_are_between_two_accounts_and_within_the_limit() -> None:
    workload = BankWorkload({"accounts": "4", "max_amount": "7"})
    transfers = [op.value for op in operations(workload.generator()) if op.f == "transfer"]
    pairs = {(each["from"], each["to"]) for each in transfers}
    assert pairs == {(source, target) for source in range(4) for target in range(4) if source != target}
    assert {each["amount"] for each in transfers} == set(range(1, 8))


@pytest.mark.parametrize("workload", [CounterWorkload(), FetchAndAddWorkload()], ids=["counter", "fetch-and-add"])
def test_additions_change_the_counter(workload: Any) -> None:
    assert {op.value for op in operations(workload.generator()) if op.f == "add"} == {1, 2, 3, 4, 5}


def test_delays_of_all_lengths_are_sent() -> None:
    sends = Counter(op.value["delay_ms"] for op in operations(DelayWorkload().generator()) if op.f == "send")
    assert set(sends) == set(DELAYS_MS)
    assert min(sends.values()) > sum(sends.values()) / 5


def test_transactions_of_messages_end_in_all_ways() -> None:
    own = [op.value for op in operations(TransactionsWorkload().generator()) if op.f == "transact"]
    ways = Counter((each["commit"], each["tell"]) for each in own)
    found = {way: count / len(own) for way, count in ways.items()}
    expected = {(True, True): 0.455, (True, False): 0.195, (False, True): 0.245, (False, False): 0.105}
    assert found == pytest.approx(expected, abs=2 * NEARLY)
    client = [op for op in operations(ClientTransactionsWorkload().generator()) if op.f != "receive"]
    rolled_back = sum(op.f == "transact" and not op.value["commit"] for op in client)
    assert rolled_back / len(client) == pytest.approx(0.3, abs=2 * NEARLY)


def test_delays_of_a_client_are_none_short_and_the_longest() -> None:
    workload = ClientDelayWorkload({"longest_ms": "2000"})
    delays = Counter(op.value["delay_ms"] for op in operations(workload.generator()) if op.f == "send")
    assert set(delays) == {0, 2000 // SHORTER, 2000}
    assert min(delays.values()) > sum(delays.values()) / 5


@pytest.mark.parametrize("workload", [ListAppendWorkload(), RwRegisterWorkload()], ids=["list-append", "rw-register"])
def test_transactions_read_and_write_and_their_keys_are_replaced(workload: Any) -> None:
    steps_of = [op.value for op in operations(workload.generator())]
    steps = [step for each in steps_of for step in each]
    reads = [step for step in steps if step[0] == "r"]
    writes = [step for step in steps if step[0] != "r"]
    assert len(reads) / len(steps) == pytest.approx(0.5, abs=NEARLY)
    assert {len(each) for each in steps_of} == set(range(1, workload.number("max_length") + 1))
    assert len({value for _, _, value in writes}) == len(writes)
    counts = Counter(key for _, key, _ in writes)
    assert max(counts.values()) == workload.number("writes_per_key")
    assert sum(count < workload.number("writes_per_key") for count in counts.values()) <= workload.number("keys")
    assert {key for _, key, _ in reads} >= set(counts) - set(sorted(counts)[-workload.number("keys") :])


def test_mini_transactions_read_what_they_write_and_show_the_order_of_all_versions() -> None:
    workload = MiniTxnWorkload()
    steps_of = [op.value for op in operations(workload.generator())]
    kinds = Counter(tuple(f for f, _, _ in steps) for steps in steps_of)
    assert set(kinds) == {tuple(each) for each in ("r", "rw", "rr", "rrw", "rwr", "rrww", "rwrw")}
    for steps in steps_of:
        reads = [key for f, key, _ in steps if f == "r"]
        assert len(set(reads)) == len(reads)
        assert all(["r", key, None] in steps[:at] for at, (f, key, _) in enumerate(steps) if f == "w")
    writes = [step for steps in steps_of for step in steps if step[0] == "w"]
    assert len({value for _, _, value in writes}) == len(writes)
    assert max(Counter(key for _, key, _ in writes).values()) == workload.number("writes_per_key")
    alone = [op.value for op in operations(MiniTxnWorkload({"keys": "1"}).generator())]
    assert {len({key for _, key, _ in steps}) for steps in alone} == {1}


def test_transactions_over_registers_are_of_all_sizes_and_half_only_read() -> None:
    done = [op.value for op in operations(MultiRegisterWorkload({"registers": "3"}).generator())]
    written = [value for steps in done for f, _, value in steps if f == "w"]
    assert {len(steps) for steps in done} == {1, 2, 3}
    assert all(len({register for _, register, _ in steps}) == len(steps) for steps in done)
    assert len(set(written)) == len(written)
    reading = [steps for steps in done if len(steps) == 3 and all(f == "r" for f, _, _ in steps)]
    whole = [steps for steps in done if len(steps) == 3]
    assert len(reading) / len(whole) == pytest.approx(0.5 + 0.5 / 8, abs=2 * NEARLY)


def test_every_key_of_a_group_is_written_once_between_reads_of_the_whole_group() -> None:
    size = 3
    groups: defaultdict[int, list[Any]] = defaultdict(list)
    for op in operations(LongForkWorkload({"group_size": str(size)}).generator()):
        groups[op.value[0][1] // size].append(op.value)
    last = max(groups)
    split = 0
    for group, done in groups.items():
        keys = set(range(group * size, (group + 1) * size))
        reads = [steps for steps in done if steps[0][0] == "r"]
        assert all({key for _, key, _ in steps} == keys for steps in reads)
        if group < last:
            assert sorted(steps[0][1] for steps in done if steps[0][0] == "w") == sorted(keys)
            assert len(reads) >= READS_PER_KEY * size
        places = [at for at, steps in enumerate(done) if steps[0][0] == "w"]
        split += any(later > earlier + 1 for earlier, later in pairwise(places))
    assert split > len(groups) * 0.8, "reads between the writes are those that can see only some of them"


def test_inserts_of_a_key_are_due_together_and_alternate_between_the_tables() -> None:
    workload = WriteSkewWorkload()
    attempts = workload.number("attempts")
    done = list(operations(workload.generator(), count=attempts * 50))
    for key in range(50):
        own = done[key * attempts : (key + 1) * attempts]
        assert {op.key for op in own} == {key}
        assert [op.with_next for op in own] == [True] * (attempts - 1) + [False]
        tables = [next(table for table, row in enumerate(op.value) if row is not None) for op in own]
        assert tables == [turn % TABLES for turn in range(attempts)]
    rows = [row for op in done for row in op.value if row is not None]
    assert rows == list(range(len(done)))


def test_a_lock_is_held_for_about_its_time_and_until_its_release_is_not_refused() -> None:
    context = Context(random.Random(5))
    generator = MutexWorkload({"locks": "2", "hold_ms": "10"}).generator()
    locks = set()
    held_ms = []
    for _ in range(200):
        op, generator = generator.next(context)
        assert isinstance(op, Op) and op.f == "acquire"
        locks.add(op.key)
        event = {"process": 0, "f": "acquire", "key": op.key, "value": None}
        generator = generator.update(context, {**event, "type": "invoke"})
        generator = generator.update(context, {**event, "type": "ok"})
        wait, generator = generator.next(context)
        assert isinstance(wait, Wait)
        held_ms.append((wait.until_ns - context.time_ns) / 1e6)
        context.time_ns = wait.until_ns
        for outcome in ("fail", "fail", "ok"):
            released, generator = generator.next(context)
            assert released == Op("release", op.key)
            generator = generator.update(context, {**event, "f": "release", "type": "invoke"})
            generator = generator.update(context, {**event, "f": "release", "type": outcome})
    assert locks == {"lock0", "lock1"}
    assert 5 <= min(held_ms) < 6 and 14 < max(held_ms) <= 15


@pytest.mark.parametrize("outcome", ["fail", "info"])
def test_a_lock_whose_acquisition_was_not_acknowledged_is_not_released(outcome: str) -> None:
    context = Context(random.Random(5))
    generator = MutexWorkload().generator()
    for _ in range(3):
        op, generator = generator.next(context)
        assert isinstance(op, Op) and op.f == "acquire"
        event = {"process": 0, "f": "acquire", "key": op.key, "value": None, "type": outcome}
        generator = generator.update(context, event)


def test_reads_of_a_log_are_mostly_near_its_end() -> None:
    ends: Counter[int] = Counter()
    behind: list[int] = []

    def answer(op: Op) -> Any:
        if op.f == "append":
            ends[op.key] += 1
            return [ends[op.key] - 1, 0]
        if op.f == "tail":
            return ends[op.key]
        assert op.value["max"] == READ_MAX_MESSAGES
        behind.append(ends[op.key] - op.value["offset"])
        return {"tail": ends[op.key], "messages": []}

    for _ in operations(LogWorkload(keys=2).generator(), answer=answer):
        pass
    late = behind[200:]
    assert all(each >= 0 for each in late)
    near = sum(each < 8 for each in late) / len(late)
    assert 0.7 < near < 0.82
    assert max(late) > 500


def test_elements_of_a_set_are_read_half_the_time_at_first_and_then_as_rarely_as_its_size_demands() -> None:
    workload = SetWorkload({"elements_per_operation": "10"})
    done = list(operations(workload.generator(), count=20_000))
    assert sum(op.f == "read" for op in done[:20]) >= 4
    size = read = 0
    for op in done:
        read += size if op.f == "read" else 0
        size += op.f == "add"
    assert read / len(done) == pytest.approx(10, rel=0.2)


def test_a_register_that_was_read_before_its_first_write_is_written() -> None:
    context = Context(random.Random(5))
    generator = CasRegisterWorkload({"keys": "1"}).generator()
    for _ in range(200):
        op, generator = generator.next(context)
        assert isinstance(op, Op) and op.f != "cas"
        changes = {"type": "ok", "value": None} if op.f == "read" else {"type": "info"}
        event = {"process": 0, "f": op.f, "key": op.key, "value": op.value}
        generator = generator.update(context, {**event, **changes})


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("workload", [ClientLogWorkload({"keys": "2"}), TopicWorkload({"partitions": "2"})])
def test_polls_are_near_the_largest_end_that_was_seen(workload: Any, is_stale: bool) -> None:
    """Also after the answer of a replica that has less."""
    is_topic = isinstance(workload, TopicWorkload)
    ends = [0, 0]
    seen = [0, 0]
    behind = []

    def answer(op: Op) -> Any:
        if op.f in ("append", "send"):
            queue = op.value % 2 if is_topic else op.key
            offset, ends[queue] = ends[queue], ends[queue] + 1
            if op.value % 3 == 0:
                return None  # stored, but not acknowledged: the end is known from reads only
            seen[queue] = ends[queue]
            return [queue, offset] if is_topic else [offset, op.value]
        queue = op.value["queue"] if is_topic else op.key
        offset = op.value["offset"]
        behind.append(seen[queue] - offset)
        count = 0 if is_stale else ends[queue] - offset
        if not is_stale:
            seen[queue] = max(seen[queue], ends[queue])
        return {**op.value, "messages": [[offset + each, 0] for each in range(count)]}

    for _ in operations(workload.generator(), answer=answer):
        pass
    assert set(behind[100:]) == set(range(NEAR_END))


def test_a_queue_that_the_topic_does_not_have_is_no_end_to_read_near() -> None:
    """A client that reports one is told so elsewhere."""
    context = Context(random.Random(5))
    generator = TopicWorkload({"partitions": "2"}).generator()
    event = {"process": 0, "type": "ok", "f": "send", "key": None, "value": [2, 700]}
    after = generator.update(context, event)
    for _ in range(100):
        op, after = after.next(context)
        assert isinstance(op, Op)
        assert op.f == "send" or (op.value["queue"] < 2 and op.value["offset"] == 0)


@pytest.mark.parametrize("workload", [ListAppendWorkload, RwRegisterWorkload])
def test_final_transactions_read_every_key_until_it_is_answered_or_attempts_run_out(workload: Any) -> None:
    own = workload({"keys": "3", "writes_per_key": "2"})
    for _ in operations(own.generator(), count=40):
        pass
    keys = own.generator().next_key
    generator = own.final_generator()
    context = Context(random.Random(5))
    asked: Counter[int] = Counter()
    done: Counter[int] = Counter()
    waits = 0
    while True:
        step, generator = generator.next(context)
        if step is None:
            break
        if isinstance(step, Wait):
            assert 0 < step.until_ns - context.time_ns <= RETRY_NS
            context.time_ns = step.until_ns
            waits += 1
            continue
        read = [key for _, key, _ in step.value]
        assert {f for f, _, _ in step.value} == {"r"}
        asked.update(read)
        outcome = "ok"
        if 0 in read:
            outcome = "fail" if asked[0] % 2 else "info"  # never answered
        elif FINAL_KEYS in read and asked[FINAL_KEYS] == 1:
            outcome = "fail"
        if outcome == "ok":
            done.update(read)
        event = {"process": 0, "f": "txn", "key": None, "value": step.value, "type": outcome}
        generator = generator.update(context, event)
    assert keys > 2 * FINAL_KEYS
    assert set(asked) == set(range(keys))
    assert set(done) == set(range(FINAL_KEYS, keys)) and set(done.values()) == {1}
    assert asked[0] == MAX_FINAL_ATTEMPTS and asked[FINAL_KEYS] == 2
    assert waits >= MAX_FINAL_ATTEMPTS - 1


def test_keys_whose_inserts_have_unknown_outcomes_are_read_at_the_end() -> None:
    workload = WriteSkewWorkload()
    attempts = workload.number("attempts")
    context = Context(random.Random(5))
    generator = workload.generator()
    for _ in range(attempts * 400):
        op, generator = generator.next(context)
        assert isinstance(op, Op)
        outcome = {3: "info", 5: "fail"}.get(op.key, "ok")
        generator = generator.update(
            context, {"process": 0, "f": "insert", "key": op.key, "value": op.value, "type": outcome}
        )
    final = workload.final_generator()
    read: defaultdict[int, list[int]] = defaultdict(list)
    """When each key was read (ns)."""
    while True:
        step, final = final.next(context)
        if step is None:
            break
        if isinstance(step, Wait):
            context.time_ns = step.until_ns
            continue
        assert step.f == "read"
        read[step.key].append(context.time_ns)
        event = {"process": 0, "f": "read", "key": step.key, "value": [], "type": "invoke"}
        final = final.update(context, event)
        if step.key == 3:
            outcome = "info" if len(read[3]) % 2 else "fail"  # never answered
        else:
            outcome = "fail" if step.key == 399 and len(read[399]) == 1 else "ok"
        final = final.update(context, {**event, "type": outcome})
    assert sorted(read) == [3, *range(400 - LAST_KEYS, 400)]
    counts = {key: len(times_ns) for key, times_ns in read.items() if len(times_ns) > 1}
    assert counts == {3: MAX_FINAL_ATTEMPTS, 399: 2}
    for key in counts:
        assert min(later - earlier for earlier, later in pairwise(read[key])) >= RETRY_NS


class ConsumerGroup:
    """The consumers of consumer-progress, `THREADS` of them, asked in turn."""

    def __init__(self) -> None:
        self.context = Context(random.Random(5), threads=THREADS)
        self.times_ns: list[int] = []
        """When each operation of the last call was invoked."""

    def asked(self, generator: Generator, outcomes: Mapping[tuple[str, int, int], str]) -> tuple[list[Any], Generator]:
        """What the threads do in `COUNT` steps or until they end: (thread, operation). `outcomes` are those other than
        "ok", by function, thread and queue."""
        done: list[Any] = []
        self.times_ns = []
        for turn in range(COUNT):
            self.context.thread = self.context.process = turn % THREADS
            step, generator = generator.next(self.context)
            self.context.time_ns += 1_000_000
            if not isinstance(step, Op):
                continue
            done.append((self.context.thread, step))
            self.times_ns.append(self.context.time_ns)
            event = {"process": self.context.process, "f": step.f, "key": None, "value": step.value}
            outcome = outcomes.get((step.f, self.context.thread, step.value["queue"]), "ok")
            for kind in ("invoke", outcome):
                generator = generator.update(self.context, {**event, "type": kind})
        return done, generator


THREADS = 3


def test_offsets_are_committed_in_order_and_a_partition_is_left_after_an_unknown_outcome() -> None:
    group, workload = ConsumerGroup(), ConsumerProgressWorkload()
    done, _ = group.asked(workload.generator(), {("commit", 1, 1): "info", ("fetch", 0, 0): "info"})
    queues = {
        thread: {op.value["queue"] for who, op in done if who == thread and op.f == "commit"} for thread in (0, 1, 2)
    }
    assert queues == {0: {0}, 1: {1, 4}, 2: {2}}
    assert sum(op.f == "commit" and op.value["queue"] == 1 for _, op in done) == 1
    for queue in (0, 2, 4):
        offsets = [op.value["offset"] for _, op in done if op.f == "commit" and op.value["queue"] == queue]
        assert {later - earlier for earlier, later in pairwise([0, *offsets])} == set(range(1, MAX_ADVANCE + 1))
    fetched = Counter(op.value["queue"] for who, op in done if who == 1 and op.f == "fetch")
    assert set(fetched) - {0, 1, 2} == {3, 4, 5}
    assert sum(op.f == "fetch" for _, op in done) / COUNT == pytest.approx(0.5, abs=NEARLY)


def test_at_the_end_every_partition_of_the_consumers_is_read_until_it_is_answered_or_attempts_run_out() -> None:
    group, workload = ConsumerGroup(), ConsumerProgressWorkload()
    group.asked(workload.generator(), {("commit", 1, 1): "info"})
    done, generator = group.asked(workload.final_generator(), {("fetch", 2, 2): "fail"})
    assert all(op.f == "fetch" and op.value["final"] is True for _, op in done)
    own = {thread: [op.value["queue"] for who, op in done if who == thread] for thread in range(THREADS)}
    assert own[0] == [0, 4], "its own, and the latest of the next thread"
    assert own[1] == [4, 1, 2]
    assert own[2] == [2] * MAX_FINAL_ATTEMPTS
    times_ns = [time_ns for (who, _), time_ns in zip(done, group.times_ns, strict=True) if who == 2]
    assert min(later - earlier for earlier, later in pairwise(times_ns)) >= RETRY_NS
    for group.context.thread in range(THREADS):
        assert generator.next(group.context)[0] is None
