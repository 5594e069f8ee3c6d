"""Open checkpoints of POP consumers: the oldest unacknowledged message is the one that a full scan finds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.broker import pop_checkpoints
from node.broker.internal_topics import REVIVE_PREFIX
from node.broker.pop_checkpoints import Checkpoint, CheckpointKey, OpenCheckpoints, QueueOfGroup
from node.store.record import RecordSummary

QUEUE: QueueOfGroup = ("g", "t", 0)


def opened(checkpoints: OpenCheckpoints, number: int, offsets: list[int]) -> CheckpointKey:
    """Add a checkpoint, as dispatch does."""
    key = CheckpointKey("t", 0, min(offsets), "g", number)
    checkpoints._add(Checkpoint(number, key, 1000, tuple(offsets), (1 << len(offsets)) - 1))
    return key


def scanned(checkpoints: OpenCheckpoints) -> int:
    """The oracle: scans every open checkpoint."""
    first = (each.first_open_offset() for each in checkpoints.by_number.values())
    return min(first, default=checkpoints.next_offsets[QUEUE])


OFFSETS = st.sets(st.integers(0, 40), min_size=1, max_size=5).map(sorted)
STEPS = st.lists(st.one_of(OFFSETS, st.tuples(st.integers(0, 30), st.sets(st.integers(0, 40)))), max_size=40)


@given(STEPS)
def test_the_oldest_open_offset_equals_that_of_a_full_scan_and_moves_are_reported(
    steps: list[list[int] | tuple[int, set[int]]],
) -> None:
    checkpoints, reported = OpenCheckpoints(), [0]
    keys: list[CheckpointKey] = []
    checkpoints.on_consumed = lambda queue, offset: reported.append(offset)
    for step in steps:
        if isinstance(step, list):
            keys.append(opened(checkpoints, len(keys), step))
            assert checkpoints._consumed(QUEUE) == scanned(checkpoints)
        elif keys:
            number, offsets = step
            before = scanned(checkpoints)
            del reported[1:]
            checkpoints._acknowledged(keys[number % len(keys)], offsets)
            after = scanned(checkpoints)
            assert checkpoints._consumed(QUEUE) == after
            assert reported[1:] == ([after] if after != before else [])
    if keys:
        assert list(checkpoints.consumed()) == [(QUEUE, scanned(checkpoints))]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_an_acknowledgement_reads_few_checkpoints_and_closed_ones_are_dropped(
    keeps_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = 0, Checkpoint.first_open_offset

    def counted(checkpoint: Checkpoint) -> int:
        nonlocal reads
        reads += 1
        return read(checkpoint)

    checkpoints, count = OpenCheckpoints(), 2000
    keys = [opened(checkpoints, number, [2 * number, 2 * number + 1]) for number in range(count)]
    monkeypatch.setattr(Checkpoint, "first_open_offset", counted)
    for number in range(int(keeps_first), count):
        checkpoints._acknowledged(keys[number], [2 * number])
        checkpoints._acknowledged(keys[number], [2 * number + 1])
    assert reads < 20 * count
    assert checkpoints._consumed(QUEUE) == (0 if keeps_first else 2 * count)
    assert len(checkpoints._of_queue[QUEUE]._heap) <= 2


def test_forgetting_a_queue_scans_few_even_if_nearly_all_have_open_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pop_checkpoints, "MAX_QUEUES_OF_GROUPS", 2000)
    reads, read = 0, pop_checkpoints._InHand.first_open_offset

    def counted(in_hand: pop_checkpoints._InHand) -> int | None:
        nonlocal reads
        reads += 1
        return read(in_hand)

    def given(number: int) -> CheckpointKey:
        key = CheckpointKey("t", number, 0, "g", number)
        checkpoints._add(Checkpoint(number, key, 1000, (0,), 1))
        return key

    checkpoints = OpenCheckpoints()
    in_hand = [given(number) for number in range(1999)]
    monkeypatch.setattr(pop_checkpoints._InHand, "first_open_offset", counted)
    for number in range(2000, 2100):
        before = reads
        key = given(number)
        assert reads - before <= pop_checkpoints.FORGET_LOOKS + 1
        checkpoints._acknowledged(key, [0])
    assert len(checkpoints.next_offsets) <= 2100
    for key in in_hand:
        assert checkpoints.by_key[key].open == 1
        checkpoints._acknowledged(key, [0])
    given(3000)
    assert len(checkpoints.next_offsets) == len(checkpoints._of_queue) == 2000


def test_a_checkpoint_without_messages_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = OpenCheckpoints()
    key = {"t": "t", "q": 0, "so": 5, "c": "g", "pt": 1}
    for number, (tags, more) in enumerate(
        [("ck", {"it": 1000, "d": []}), ("ack", {"ao": 5}), ("ck", {"it": 1, "d": [0]})]
    ):
        body = json.dumps({**key, **more}).encode()
        checkpoints.dispatch(RecordSummary(f"{REVIVE_PREFIX}c", 0, number, 0, 0, 0, tags, "", 0, body))
    assert "a checkpoint of no message" in caplog.text and len(caplog.records) == 1
    assert list(checkpoints.by_number) == [2] and list(checkpoints.consumed()) == [(QUEUE, 5)]
