"""Messages dispatched in batches give the same bytes as singly dispatched ones; special messages stay single."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.broker import dispatcher, log_batches
from node.broker.delay import delay_source
from node.broker.dispatch_batch import DispatchBatch, QueuePart
from node.broker.dispatcher import Dispatcher
from node.broker.ledger import EntryBatch
from node.broker.pending_dispatch import PendingBatch
from node.dledger.entry import encode_entry
from node.dledger.entry_batch import parse_batches
from node.interpreter import IS_PYPY
from node.store import index_file, key_hash
from node.store.consume_queue import pack_unit
from node.store.index_file import keys_of
from node.store.queue_store import QueueStore
from node.store.record import Message, RecordSummary, tag_hash
from node.store.record_batch import encode_record


class Seen:
    """A derivation that records the special messages and the keys that it gets."""

    def __init__(self) -> None:
        self.records: list[RecordSummary] = []
        self.keys: list[tuple[str, bytes, int, int]] = []

    def dispatch(self, record: RecordSummary) -> None:
        if record.prepared_transaction_offset or record.sys_flag & 12 or record.topic.isupper():
            self.records.append(record)
        for key in keys_of(record.properties_text):
            self.keys.append((record.topic, key.encode(), record.physical_offset, record.store_timestamp_ms))

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        for topic, keys, offsets, stored_ms in batch.key_runs:
            self.keys += [(topic, key, offset, stored_ms) for key, offset in zip(keys, offsets, strict=True)]

    def snapshot(self) -> Any:
        return {}

    def restore(self, state: Any) -> None:
        return None

    async def flush(self) -> None:
        return None


messages = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["t", "t", "t", "u", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"]),
        "queue_id": st.integers(0, 2),
        "body": st.binary(max_size=20),
        "properties": st.sampled_from(
            [{}, {}, {"TAGS": "a"}, {"KEYS": "k l"}, {"UNIQ_KEY": "1", "WAIT": "true"}, {"TAGS": "b", "KEYS": "m"}]
        ),
        "sys_flag": st.sampled_from([0, 0, 0, 0, 4, 8, 12]),
        "born_host": st.sampled_from(["10.0.0.1:5"] * 5 + ["[::1]:5"]),
        "prepared_transaction_offset": st.sampled_from([0, 0, 0, 0, 0, delay_source(3, 5), 77]),
        "repeats": st.sampled_from([False] * 8 + [True]),
        "is_message": st.sampled_from([True] * 8 + [False]),
    }
)


def fill(ledger: Any, contents: list[dict[str, Any]]) -> None:
    """Fill a log: each message has the next offset of its queue, or the previous one again if it `repeats`."""
    numbers: dict[tuple[str, int], int] = {}
    for at, content in enumerate(contents):
        fields = dict(content)
        repeats, is_message = fields.pop("repeats"), fields.pop("is_message")
        if not is_message:
            ledger.store.add(1, b"", is_message=False)
            continue
        key = (fields["topic"], fields["queue_id"])
        number = numbers.get(key, 0)
        has_place = fields["sys_flag"] & 12 in (0, 8)
        if repeats and number and has_place:
            number -= 1
        elif has_place:
            numbers[key] = number + 1
        message = Message(
            **fields, queue_offset=number, physical_offset=ledger.store.end_pos + 48, store_timestamp_ms=1000 + at % 7
        )
        ledger.store.add(1, encode_record(message))
    ledger.store.committed_index = ledger.store.ledger_end_index


def read_batches(ledger: Any, first: int, last: int) -> list[EntryBatch]:
    raw, chain_crc = b"", 0
    for index in range(first, last + 1):
        each = ledger.store.get(index)
        entry = encode_entry(
            magic=1 if each.is_message else 2,
            index=index,
            term=each.term,
            pos=each.body_pos - 48,
            previous_chain_crc=chain_crc,
            body=each.body,
        )
        raw, chain_crc = raw + entry.raw, entry.chain_crc
    return parse_batches(raw)


def derived(parts: Any, until: Any, *, together: bool, prepare: Any = None) -> dict[str, Any]:
    """What a dispatcher derives from the log; `prepare` is called with it after its start."""
    ledger = parts.ledger

    async def main(directory: str) -> dict[str, Any]:
        queues = QueueStore(parts.runtime.disk, directory, units_per_file=7)
        arrived: set[tuple[str, int]] = set()
        seen = Seen()
        dispatcher = Dispatcher(
            ledger.store,
            queues,
            on_arrival=arrived.update,
            derivations={"seen": seen},
            read_batches=(lambda first, last: read_batches(ledger, first, last)) if together else None,
        )
        await dispatcher.start()
        if prepare is not None:
            await prepare(dispatcher)
        await until(
            lambda: dispatcher.dispatched_index == ledger.store.committed_index or dispatcher.failure is not None
        )
        found = {
            key: (queue.read(0, 1000), queue.read_crcs(0, 1000), queue.max_offset) for key, queue in queues.items()
        }
        mark = dispatcher._mark
        await dispatcher.stop()
        return {
            "queues": found,
            "arrived": arrived,
            "mark": mark,
            "failure": str(dispatcher.failure).replace(directory, ""),
            "repeated": dispatcher.repeated_total,
            "seen": sorted(seen.records),
            "keys": seen.keys,
        }

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(main(f"{directory}/queues"))


@st.composite
def uniform(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages whose records are of one size, nearly all of one kind."""
    content = draw(messages)
    count = draw(st.integers(4, 30))
    odd = draw(st.lists(st.tuples(st.integers(0, count - 1), messages), max_size=1))
    contents = [{**content, "queue_id": queue} for queue in draw(st.lists(st.integers(0, 2), min_size=count))]
    if draw(st.booleans()):
        for at, each in enumerate(contents):
            each["properties"] = {"UNIQ_KEY": f"{at:020}", "WAIT": "true", "TAGS": "a"}
    for at, other in odd:
        key = draw(st.sampled_from(["sys_flag", "prepared_transaction_offset", "repeats", "queue_id", "topic", "body"]))
        contents[at] = {**contents[at], key: other[key]}
    return contents


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(messages, min_size=1, max_size=40) | uniform(),
    damage=st.none() | st.tuples(st.integers(0, 39), st.integers(0, 900)),
)
def test_batched_and_single_dispatch_have_the_same_result(
    make_parts: Any, helpers: Any, contents: list[dict[str, Any]], damage: Any
) -> None:
    parts = make_parts()
    fill(parts.ledger, contents)
    if damage is not None and damage[0] <= parts.ledger.store.ledger_end_index:
        entry = parts.ledger.store.entries[damage[0]]
        if entry.body:
            body = bytearray(entry.body)
            body[damage[1] % len(body)] ^= 4
            entry.body = bytes(body)
    one_by_one = derived(parts, helpers.until, together=False)
    assert derived(parts, helpers.until, together=True) == one_by_one


def test_ordinary_messages_are_not_dispatched_singly(make_parts: Any, helpers: Any, monkeypatch: Any) -> None:
    parts = make_parts()
    plain = {
        "topic": "t", "body": b"x", "properties": {"KEYS": "k"}, "repeats": False, "is_message": True
    }  # fmt: skip
    fill(parts.ledger, [{**plain, "queue_id": number % 2, "sys_flag": 0} for number in range(500)])
    asked: list[int] = []
    one_by_one = Dispatcher._dispatch
    monkeypatch.setattr(
        Dispatcher, "_dispatch", lambda self, arrived: asked.append(self._mark.index + 1) or one_by_one(self, arrived)
    )
    made = derived(parts, helpers.until, together=True)
    assert asked == [0, 1]  # the first message of each queue creates it
    assert made["queues"]["t", 1][2] == 250 and len(made["keys"]) == 500


def plain_messages(ledger: Any, count: int, queues: int) -> None:
    content = {"topic": "t", "body": b"body", "properties": {"TAGS": "a"}, "repeats": False, "is_message": True}
    fill(ledger, [{**content, "queue_id": number % queues, "sys_flag": 0} for number in range(count)])


@pytest.mark.skipif(IS_PYPY, reason="loops are faster there")
def test_uniform_messages_are_read_as_columns(make_parts: Any, helpers: Any, monkeypatch: Any) -> None:
    parts = make_parts()
    plain_messages(parts.ledger, 500, 3)
    counts: list[int] = []
    uniform = log_batches._read_uniform

    def count(entries: EntryBatch, first_index: int, queues: QueueStore) -> tuple[int, DispatchBatch] | None:
        found = uniform(entries, first_index, queues)
        counts.append(found[0] if found is not None else 0)
        return found

    monkeypatch.setattr(log_batches, "_read_uniform", count)
    made = derived(parts, helpers.until, together=True)
    assert counts == [0, 0, 0, 497]  # the first message of each queue creates it
    assert made == derived(parts, helpers.until, together=False)


def test_uniform_messages_yield_the_same_in_a_loop(make_parts: Any, helpers: Any, monkeypatch: Any) -> None:
    parts = make_parts()
    plain_messages(parts.ledger, 500, 3)
    as_columns = derived(parts, helpers.until, together=True)
    for module, name in (
        (log_batches, "LEAST_UNIFORM"), (index_file, "LEAST_TOGETHER"), (key_hash, "LEAST_TOGETHER"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, sys.maxsize)
    assert derived(parts, helpers.until, together=True) == as_columns


def pending(ledger: Any, first: int, last: int) -> PendingBatch:
    units, crcs = [], []
    for index in range(first, last + 1):
        entry = ledger.store.get(index)
        unit, crc = pack_unit(entry.body_pos, len(entry.body), tag_hash("a"), zlib.crc32(entry.body))
        units.append(unit)
        crcs.append(crc)
    part = QueuePart(("t", 0), first, b"".join(units), b"".join(crcs))
    return PendingBatch(first, last, 1, DispatchBatch(last - first + 1, (part,), 1000 + 6, ()))


def test_after_a_commit_within_a_pending_batch_only_that_batch_is_read(
    make_parts: Any, helpers: Any, monkeypatch: Any
) -> None:
    parts = make_parts()
    ledger = parts.ledger
    plain_messages(ledger, 60, 1)
    read: list[int] = []

    def note(entries: EntryBatch, first_index: int, queues: QueueStore) -> tuple[int, DispatchBatch]:
        count, batch = log_batches.read_batch(entries, first_index, queues)
        read.extend(range(first_index, first_index + count))
        return count, batch

    monkeypatch.setattr(dispatcher, "read_batch", note)
    asked: list[int] = []
    one_by_one = Dispatcher._dispatch
    monkeypatch.setattr(
        Dispatcher, "_dispatch", lambda self, arrived: asked.append(self._mark.index + 1) or one_by_one(self, arrived)
    )
    expected = derived(parts, helpers.until, together=False)
    asked.clear()
    ledger.store.committed_index = 9

    async def commit(each: Dispatcher) -> None:
        await helpers.until(lambda: each.dispatched_index == 9)
        read.clear()
        asked.clear()
        for first in range(10, 60, 10):
            each.pending.add(pending(ledger, first, first + 9))
        for committed in (24, 59):
            ledger.store.committed_index = committed
            each.notify()
            await helpers.until(lambda: each.dispatched_index == ledger.store.committed_index)

    made = derived(parts, helpers.until, together=True, prepare=commit)
    assert (read, asked) == (list(range(20, 30)), []), "only the batch that holds entry 24"
    assert made == expected
