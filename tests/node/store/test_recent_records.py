"""The newest records in memory: the last ones are found by their positions, and memory is bounded."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from node.store.recent_records import RecentRecords


@given(st.lists(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), min_size=1, max_size=40))
def test_the_newest_records_are_found_and_memory_is_bounded(batches: list[list[bytes]]) -> None:
    recent, known, end = RecentRecords(64), [], 100
    for records in batches:
        positions = list(accumulate(map(len, records[:-1]), initial=end))
        size_bytes = sum(map(len, records))
        recent.add(positions, b"".join(records))
        known.append((end, dict(zip(positions, records, strict=True)), size_bytes))
        end += size_bytes
    every = {position: record for _, found, _ in known for position, record in found.items()}
    held = [position for position in range(90, end + 9) if recent.get(position) is not None]
    assert all(recent.get(position) == every[position] for position in held)
    assert set(known[-1][1]) <= set(held), "the newest batch is always held"
    first_held = held[0]
    assert held == [position for position in every if position >= first_held], "the oldest records are dropped first"
    assert end - first_held <= max(64, known[-1][2])
    unknown = sum(size for _, _, size in known)
    assert unknown > 64 or first_held == 100, "nothing is dropped below the limit"
    recent.clear()
    assert recent.get(held[-1]) is None
