"""A file's durability, compared with a model that keeps whole copies instead of layers of differences."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.clusters.sim.inode import BLOCK_BYTES, SECTOR_BYTES, Inode, Layer

OFFSETS = st.integers(0, 5 * BLOCK_BYTES)
SIZES = st.one_of(st.integers(1, 600), st.integers(1, 3 * BLOCK_BYTES))


class Model:
    """Whole contents: now, durable, and at the start of each sync under way."""

    def __init__(self) -> None:
        self.now = b""
        self.durable = b""
        self.syncing: list[bytes] = []

    def write(self, offset: int, data: bytes) -> None:
        padded = self.now.ljust(offset, b"\0")
        self.now = padded[:offset] + data + padded[offset + len(data) :]

    def truncate(self, size: int) -> None:
        self.now = self.now[:size].ljust(size, b"\0")


class InodeMachine(RuleBasedStateMachine):
    """Any order of writes, truncations, overlapping syncs and power cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.inode = Inode()
        self.model = Model()
        self.layers: list[Layer] = []
        self.mark = 0

    def _data(self, size: int) -> bytes:
        self.mark = self.mark % 250 + 1
        return bytes([self.mark]) * size

    @rule(offset=OFFSETS, size=SIZES)
    def write(self, offset: int, size: int) -> None:
        data = self._data(size)
        self.inode.write(offset, data)
        self.model.write(offset, data)

    @rule(size=SIZES)
    def append(self, size: int) -> None:
        self.write(len(self.model.now), size)

    @rule(size=OFFSETS)
    def truncate(self, size: int) -> None:
        self.inode.truncate(size)
        self.model.truncate(size)

    @rule()
    def begin_sync(self) -> None:
        self.layers.append(self.inode.begin_sync())
        self.model.syncing.append(self.model.now)

    @precondition(lambda self: self.layers)
    @rule(data=st.data())
    def end_sync(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.layers) - 1))
        self.inode.end_sync(self.layers[which])
        self.model.durable = self.model.syncing[which]
        # Syncs that began earlier have nothing to add when they end.
        del self.layers[: which + 1], self.model.syncing[: which + 1]

    @rule(seed=st.integers(0, 10_000), tears=st.booleans())
    def power_fail(self, seed: int, tears: bool) -> None:
        before, durable = self.model.now, self.model.durable
        self.inode.power_fail(random.Random(seed), tears=tears)
        after = bytes(self.inode.cache)
        assert_possible_after_power_cut(after, now=before, durable=durable)
        self.model.now = self.model.durable = after
        self.layers.clear()
        self.model.syncing.clear()

    @invariant()
    def same_content(self) -> None:
        assert bytes(self.inode.cache) == self.model.now
        assert self.inode.durable_content() == self.model.durable
        for layer, content in zip(self.layers, self.model.syncing, strict=True):
            assert bytes(layer.content(self.inode.cache)) == content
        if self.inode.is_durable:
            assert self.model.now == self.model.durable

    @rule(offset=OFFSETS, size=SIZES)
    def read(self, offset: int, size: int) -> None:
        assert self.inode.read(offset, size) == self.model.now[offset : offset + size]


def assert_possible_after_power_cut(after: bytes, *, now: bytes, durable: bytes) -> None:
    """Every sector has its durable or its newest content, up to a length between the two. Blocks that were only
    truncated are not written: if the file keeps its length, they are unchanged."""
    assert min(len(now), len(durable)) <= len(after) <= max(len(now), len(durable))
    for start in range(0, len(after), SECTOR_BYTES):
        length = min(SECTOR_BYTES, len(after) - start)
        contents = (durable,) if start // BLOCK_BYTES * BLOCK_BYTES >= len(now) else (now, durable)
        candidates = [content[start : start + length].ljust(length, b"\0") for content in contents]
        assert after[start : start + length] in candidates


InodeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_an_inode_behaves_like_its_model = InodeMachine.TestCase


@settings(max_examples=150, deadline=None)
@given(
    written=st.lists(st.tuples(OFFSETS, SIZES), max_size=5),
    meanwhile=st.lists(st.tuples(OFFSETS, SIZES), max_size=3),
    after_failure=st.lists(st.tuples(OFFSETS, SIZES), max_size=5),
    seed=st.integers(0, 1_000),
)
def test_blocks_of_a_failed_sync_are_lost_unless_written_again(
    written: list[tuple[int, int]], meanwhile: list[tuple[int, int]], after_failure: list[tuple[int, int]], seed: int
) -> None:
    """A write counts if it came after the sync began, even before the sync failed."""
    inode = Inode()
    inode.write(0, b"d" * (2 * BLOCK_BYTES))
    inode.make_durable()
    for offset, size in written:
        inode.write(offset, b"w" * size)
    lost = set(inode.unsynced_blocks())
    failing = inode.begin_sync()
    for number, (offset, size) in enumerate((*meanwhile, *after_failure)):
        if number == len(meanwhile):
            inode.fail_sync(failing)
        begin = min(offset, len(inode.cache))  # a gap is written, too
        inode.write(offset, b"x" * size)
        lost -= set(range(begin // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)))
    inode.fail_sync(failing)
    kept = bytes(inode.cache)
    inode.end_sync(inode.begin_sync())
    inode.power_fail(random.Random(seed), tears=True)
    after = bytes(inode.cache)
    assert len(after) == len(kept)
    for block in range(-(-len(after) // BLOCK_BYTES)):
        start, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        if block not in lost:
            assert after[start:end] == kept[start:end]
        else:
            assert b"w" not in after[start:end]
