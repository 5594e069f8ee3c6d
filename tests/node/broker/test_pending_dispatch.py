"""Batches that wait to be committed, in logs that number entries by count and by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from node.broker.dispatch_batch import append_parts
from node.broker.message_store import MessageStore
from node.broker.pending_dispatch import PendingDispatch
from node.store.consume_queue import UNIT_SIZE_BYTES, pack_units
from node.store.record import tag_hash
from node.store.record_batch import RecordBatch, record_maker

HEADER_BYTES = 48


class Log:
    """Bodies one behind the other; an entry's index is its number, or the position of its last byte."""

    def __init__(self, is_counted: bool) -> None:
        self.member_state = SimpleNamespace(is_leader=True, term=3)
        self.is_counted = is_counted
        self.bodies: list[bytes] = []
        self.end = 1000

    def takes_together(self, count: int, size_bytes: int) -> bool:
        return True

    def append_batch(
        self, sizes: Sequence[int], encode: Callable[[Sequence[int]], Sequence[bytes]], on_done: Any
    ) -> tuple[int, int, int]:
        between = HEADER_BYTES if self.is_counted else 0
        positions = []
        for size in sizes:
            positions.append(self.end + between)
            self.end += between + size
        first = len(self.bodies)
        self.bodies += encode(positions)
        return (first, len(self.bodies) - 1, 3) if self.is_counted else (positions[0], self.end - 1, 3)


class Queues:
    """Queues that keep the units appended to them."""

    def __init__(self) -> None:
        self.units: dict[tuple[str, int], bytes] = {}

    def items(self) -> list[Any]:
        return []

    def ends(self) -> list[Any]:
        return []

    def find(self, topic: str, queue_id: int) -> Any:
        held = self.units.get((topic, queue_id), b"")
        return SimpleNamespace(max_offset=len(held) // UNIT_SIZE_BYTES)

    def append_units(self, topic: str, queue_id: int, offset: int, units: bytes, crcs: bytes) -> bool:
        held = self.units.get((topic, queue_id), b"")
        assert offset * UNIT_SIZE_BYTES == len(held) and len(crcs) * 5 == len(units)
        self.units[topic, queue_id] = held + units
        return True


@pytest.mark.parametrize("is_counted", [True, False])
def test_batches_put_together_are_taken_only_when_all_are_committed(is_counted: bool) -> None:
    log, queues, pending = Log(is_counted), Queues(), PendingDispatch()
    store = MessageStore(
        ledger=log,
        queues=queues,
        clock=SimpleNamespace(wall_ms=lambda: 5),
        pending=pending,  # type: ignore[arg-type]
    )
    store.promote(3, last_store_timestamp_ms=0)
    key = "UNIQ_KEY\x01%032X\x02"
    texts = ([key % 1, key % 2, key % 3], ["TAGS\x01a\x02", "KEYS\x01k l\x02"], ["", ""])
    batches = [
        RecordBatch(
            record_maker("t", queue_id, 0, "10.0.0.1:5", "10.0.0.2:6"),
            [0] * len(own), [b"body"] * len(own), [text.encode() for text in own], 7,
        )
        for queue_id, own in zip((1, 0, 1), texts, strict=True)
    ]  # fmt: skip
    placed = store.put(batches, lambda error: None)
    assert [queue_offset for queue_offset, _ in placed] == [0, 0, 3] and store.put_total == 7
    positions = [position for _, own in placed for position in own]
    sizes = list(map(len, log.bodies))
    begin, end = (0, 6) if is_counted else (1000, positions[-1] + sizes[-1] - 1)
    assert pending.take(begin - 1, end - 1) == [], "not yet committed as a whole"
    (found,) = pending.take(begin - 1, end)
    assert (found.first_index, found.last_index, found.term) == (begin, end, 3) and not pending
    assert (found.batch.count, found.batch.store_timestamp_ms) == (7, 5)
    assert append_parts(queues, [found.batch]) == {("t", 1): None, ("t", 0): None}  # type: ignore[arg-type]
    filed = [(key, at) for run in found.batch.key_runs for key, at in zip(run.keys, run.physical_offsets, strict=True)]
    own = [(b"%032X" % number, positions[number - 1]) for number in (1, 2, 3)]
    assert filed == [*own, (b"k", positions[4]), (b"l", positions[4])]
    hashes = [0, 0, 0, tag_hash("a"), 0, 0, 0]
    units = [pack_units([positions[at]], [sizes[at]], [hashes[at]], [0])[0] for at in range(7)]
    assert queues.units == {("t", 1): b"".join(units[:3] + units[5:]), ("t", 0): b"".join(units[3:5])}


@pytest.mark.parametrize("special", [{"topic": "SCHEDULE_TOPIC_XXXX"}, {"sys_flag": 8}, {"prepared": -33}])
def test_special_messages_are_not_added_to_the_pending_batches(special: dict[str, Any]) -> None:
    pending = PendingDispatch()
    clock = SimpleNamespace(wall_ms=lambda: 5)
    store = MessageStore(ledger=Log(True), queues=Queues(), clock=clock, pending=pending)  # type: ignore[arg-type]
    store.promote(3, last_store_timestamp_ms=0)
    fields: dict[str, Any] = {"topic": "t", "sys_flag": 0, "prepared": 0}
    for changed in (special, {}):
        now = {**fields, **changed}
        maker = record_maker(now["topic"], 1, now["sys_flag"], "10.0.0.1:5", "10.0.0.2:6")
        store.put([RecordBatch(maker, [0], [b"body"], [b""], 7, 0, now["prepared"])], lambda error: None)
        assert bool(pending) is not bool(changed)
