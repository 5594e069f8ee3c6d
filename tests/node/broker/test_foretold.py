"""What is foretold of rows that are put together: each by itself, by the log's own way of numbering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from node.broker.foretold import Foretold, append_rows
from node.broker.message_store import MessageRow, MessageStore
from node.store.consume_queue import UNIT_SIZE_BYTES, pack_units
from node.store.record import tag_hash
from node.store.record_row import record_maker

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

    def append_row(
        self, sizes: Sequence[int], encode: Callable[[Sequence[int]], Sequence[bytes]], then: Any
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
    """Queues that are told of units, and have them."""

    def __init__(self) -> None:
        self.units: dict[tuple[str, int], bytes] = {}

    def items(self) -> list[Any]:
        return []

    def find(self, topic: str, queue_id: int) -> Any:
        held = self.units.get((topic, queue_id), b"")
        return SimpleNamespace(max_offset=len(held) // UNIT_SIZE_BYTES)

    def append_row(self, topic: str, queue_id: int, offset: int, units: bytes, crcs: bytes) -> bool:
        held = self.units.get((topic, queue_id), b"")
        assert offset * UNIT_SIZE_BYTES == len(held) and len(crcs) * 5 == len(units)
        self.units[topic, queue_id] = held + units
        return True


@pytest.mark.parametrize("is_counted", [True, False])
def test_rows_that_were_put_together_are_foretold_one_by_one(is_counted: bool) -> None:
    log, queues, foretold = Log(is_counted), Queues(), Foretold()
    store = MessageStore(
        ledger=log, queues=queues, clock=SimpleNamespace(wall_ms=lambda: 5), foretold=foretold  # type: ignore[arg-type]
    )
    store.promote(3, last_store_timestamp_ms=0)
    texts = (["", "", ""], ["TAGS\x01a\x02", "KEYS\x01k\x02"], ["", ""])
    rows = [
        MessageRow(
            record_maker("t", queue_id, 0, "10.0.0.1:5", "10.0.0.2:6"),
            [(0, b"body", text.encode()) for text in own],
            own, 7, 0,
        )
        for queue_id, own in zip((1, 0, 1), texts, strict=True)
    ]  # fmt: skip
    placed = store.put_rows(rows, lambda error: None)
    assert [put.queue_offset for put in placed] == [0, 0, 3] and store.put_total == 7
    positions = [position for put in placed for position in put.positions]
    sizes = list(map(len, log.bodies))
    ends = [2, 4, 6] if is_counted else [positions[at] + sizes[at] - 1 for at in (2, 4, 6)]
    begin = 0 if is_counted else 1000
    found = []
    for end in ends:  # as if each had been committed alone
        (row,) = foretold.take(begin - 1, end)
        assert (row.first_index, row.last_index, row.term, row.store_timestamp_ms) == (begin, end, 3, 5)
        assert append_rows(queues, [row])  # type: ignore[arg-type]
        found.append(row)
        begin = end + 1
    assert not foretold
    assert [summary.queue_offset for row in found for summary in row.summaries] == [1]
    hashes = [0, 0, 0, tag_hash("a"), 0, 0, 0]
    units = [pack_units([positions[at]], [sizes[at]], [hashes[at]], [0])[0] for at in range(7)]
    assert queues.units == {("t", 1): b"".join(units[:3] + units[5:]), ("t", 0): b"".join(units[3:5])}
