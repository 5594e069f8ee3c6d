"""What POP consumers have in hand: the oldest such message is the one that a full scan finds."""

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
    """A checkpoint as the log tells of it."""
    key = CheckpointKey("t", 0, min(offsets), "g", number)
    checkpoints._add(Checkpoint(number, key, 1000, tuple(offsets), (1 << len(offsets)) - 1))
    return key


def looked_up(checkpoints: OpenCheckpoints) -> int:
    """The simple form, which looks at every open checkpoint."""
    first = (each.first_open_offset() for each in checkpoints.by_number.values())
    return min(first, default=checkpoints.next_offsets[QUEUE])


OFFSETS = st.sets(st.integers(0, 40), min_size=1, max_size=5).map(sorted)
STEPS = st.lists(st.one_of(OFFSETS, st.tuples(st.integers(0, 30), st.sets(st.integers(0, 40)))), max_size=40)


@given(STEPS)
def test_the_oldest_in_hand_is_that_of_all_and_told_when_it_moves(
    steps: list[list[int] | tuple[int, set[int]]],
) -> None:
    checkpoints, told = OpenCheckpoints(), [0]
    keys: list[CheckpointKey] = []
    checkpoints.on_consumed = lambda queue, offset: told.append(offset)
    for step in steps:
        if isinstance(step, list):
            keys.append(opened(checkpoints, len(keys), step))
            assert checkpoints._consumed(QUEUE) == looked_up(checkpoints)
        elif keys:
            number, offsets = step
            before = looked_up(checkpoints)
            del told[1:]
            checkpoints._acknowledged(keys[number % len(keys)], offsets)
            after = looked_up(checkpoints)
            assert checkpoints._consumed(QUEUE) == after
            assert told[1:] == ([after] if after != before else [])
    if keys:
        assert list(checkpoints.consumed()) == [(QUEUE, looked_up(checkpoints))]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_an_acknowledgement_looks_at_few_checkpoints_and_closed_ones_are_forgotten(
    keeps_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = 0, Checkpoint.first_open_offset

    def counted(checkpoint: Checkpoint) -> int:
        nonlocal looks
        looks += 1
        return look(checkpoint)

    checkpoints, count = OpenCheckpoints(), 2000
    keys = [opened(checkpoints, number, [2 * number, 2 * number + 1]) for number in range(count)]
    monkeypatch.setattr(Checkpoint, "first_open_offset", counted)
    for number in range(int(keeps_first), count):
        checkpoints._acknowledged(keys[number], [2 * number])
        checkpoints._acknowledged(keys[number], [2 * number + 1])
    assert looks < 20 * count
    assert checkpoints._consumed(QUEUE) == (0 if keeps_first else 2 * count)
    assert len(checkpoints._of_queue[QUEUE]._heap) <= 2


def test_where_nearly_every_queue_is_in_hand_few_are_looked_at_for_one_to_forget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pop_checkpoints, "MAX_QUEUES_OF_GROUPS", 2000)
    looks, look = 0, pop_checkpoints._InHand.first_open_offset

    def counted(in_hand: pop_checkpoints._InHand) -> int | None:
        nonlocal looks
        looks += 1
        return look(in_hand)

    def given(number: int) -> CheckpointKey:
        key = CheckpointKey("t", number, 0, "g", number)
        checkpoints._add(Checkpoint(number, key, 1000, (0,), 1))
        return key

    checkpoints = OpenCheckpoints()
    in_hand = [given(number) for number in range(1999)]
    monkeypatch.setattr(pop_checkpoints._InHand, "first_open_offset", counted)
    for number in range(2000, 2100):
        before = looks
        key = given(number)
        assert looks - before <= pop_checkpoints.FORGET_LOOKS + 1
        checkpoints._acknowledged(key, [0])
    assert len(checkpoints.next_offsets) <= 2100
    for key in in_hand:
        assert checkpoints.by_key[key].open == 1
        checkpoints._acknowledged(key, [0])
    given(3000)
    assert len(checkpoints.next_offsets) == len(checkpoints._of_queue) == 2000


def test_a_checkpoint_of_no_message_is_none(caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = OpenCheckpoints()
    key = {"t": "t", "q": 0, "so": 5, "c": "g", "pt": 1}
    for number, (tags, more) in enumerate(
        [("ck", {"it": 1000, "d": []}), ("ack", {"ao": 5}), ("ck", {"it": 1, "d": [0]})]
    ):
        body = json.dumps({**key, **more}).encode()
        checkpoints.dispatch(RecordSummary(f"{REVIVE_PREFIX}c", 0, number, 0, 0, 0, tags, "", 0, body))
    assert "a checkpoint of no message" in caplog.text and len(caplog.records) == 1
    assert list(checkpoints.by_number) == [2] and list(checkpoints.consumed()) == [(QUEUE, 5)]
