"""The content of one file: what programs see (the page cache), and how much of it would survive a power cut.

Only one copy is held. A *layer* records how the durable content differs from the cache: its length, and the old
bytes of the blocks that were changed since. So appending to a file costs nothing beyond the append. A sync that is
under way is a second layer, from the moment it began; when it is done, it becomes the durable one.
"""

from __future__ import annotations

import random

__all__ = ["BLOCK_BYTES", "SECTOR_BYTES", "Inode", "Layer"]

BLOCK_BYTES = 4096
"""The unit in which the page cache writes back; blocks reach the disk in any order."""

SECTOR_BYTES = 512
"""The unit in which a disk writes: a block that a power cut interrupts is torn at a multiple of this."""

LOSE_ALL_RATIO = 0.3
"""Fraction of power cuts that lose everything unsynced; the simplest case, so it is frequent."""

KEEP_ALL_RATIO = 0.15
"""Fraction of power cuts that come just after everything was written back."""


class Layer:
    """An earlier content of the file: `size_bytes` long, equal to the cache except for the blocks in `saved`."""

    __slots__ = ("saved", "size_bytes")

    def __init__(self, size_bytes: int, saved: dict[int, bytes]) -> None:
        self.size_bytes = size_bytes
        self.saved = saved

    def protect(self, cache: bytearray, start: int, end: int) -> None:
        """Save what `cache` holds between two positions before it changes."""
        saved, size_bytes = self.saved, self.size_bytes
        if end > size_bytes:
            end = size_bytes
        block = start // BLOCK_BYTES
        at = block * BLOCK_BYTES
        while at < end:
            if block not in saved:
                saved[block] = bytes(cache[at : min(at + BLOCK_BYTES, size_bytes)])
            block += 1
            at += BLOCK_BYTES

    def content(self, cache: bytearray) -> bytearray:
        """The whole content of this layer."""
        content = cache[: self.size_bytes]
        content.extend(bytes(self.size_bytes - len(content)))
        for block, data in self.saved.items():
            _put_block(content, block, data)
        return content


def _put_block(content: bytearray, block: int, data: bytes) -> None:
    """Set one block, padded with zeros, as far as it is within the content."""
    start = block * BLOCK_BYTES
    length = min(BLOCK_BYTES, len(content) - start)
    if length > 0:
        content[start : start + length] = data[:length].ljust(length, b"\0")


class Inode:
    """One file's content. Nothing here takes time; see disk.py."""

    __slots__ = ("_lost", "cache", "layers", "name_serial")

    def __init__(self) -> None:
        self.cache = bytearray()
        self.layers = [Layer(0, {})]
        """The durable content, then those of the syncs under way, in the order they began."""
        self.name_serial = 0
        """Serial number of the last name change that a sync of this file brings to disk with a journal (disk.py)."""
        self._lost: dict[int, bytes] = {}
        """Blocks that a failed sync gave up, with their durable content: no later sync writes them until rewritten."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` bytes from `offset`."""
        if size_bytes < BLOCK_BYTES:
            return bytes(self.cache[offset : offset + size_bytes])
        with memoryview(self.cache) as view:
            return bytes(view[offset : offset + size_bytes])

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`, filling a gap with zeros."""
        cache = self.cache
        size = len(cache)
        start = offset if offset < size else size
        end = offset + len(data)
        for layer in self.layers:
            if start < layer.size_bytes:
                layer.protect(cache, start, end)
        if self._lost:
            self._rewritten(start, end)
        if offset > size:
            cache.extend(bytes(offset - size))
        if offset >= size:
            cache.extend(data)  # `+=` is slow on PyPy
        else:
            cache[offset:end] = data

    def truncate(self, size_bytes: int) -> None:
        """Cut or zero-extend to a length."""
        cache = self.cache
        size = len(cache)
        start = min(size_bytes, size)
        for layer in self.layers:
            if start < layer.size_bytes:
                layer.protect(cache, start, max(size, layer.size_bytes))
        if self._lost:
            self._rewritten(start, max(size, size_bytes))
        if size_bytes < size:
            del cache[size_bytes:]
        else:
            cache.extend(bytes(size_bytes - size))

    def _rewritten(self, start: int, end: int) -> None:
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self._lost.pop(block, None)

    def begin_sync(self) -> Layer:
        """Begin a sync, which will make the present content durable."""
        layer = Layer(len(self.cache), dict(self._lost))
        self.layers.append(layer)
        return layer

    def end_sync(self, layer: Layer) -> None:
        """Complete a sync: its content is durable."""
        layers = self.layers
        if layer in layers:  # else a later sync was done before and covers it
            del layers[: layers.index(layer)]

    def drop_sync(self, layer: Layer) -> None:
        """Cancel a sync that never began after all."""
        if layer in self.layers and layer is not self.layers[0]:
            self.layers.remove(layer)

    def fail_sync(self, layer: Layer) -> None:
        """Fail a sync. As on Linux, the blocks that it could not write count as clean afterwards: they stay in
        the cache, and no later sync writes them. What was written since it began stays dirty."""
        if layer not in self.layers or layer is self.layers[0]:
            return
        self.drop_sync(layer)
        durable = self.layers[0]
        has_grown = len(self.cache) > layer.size_bytes
        first_new = layer.size_bytes // BLOCK_BYTES if has_grown else -(-layer.size_bytes // BLOCK_BYTES)
        for block in self.unsynced_blocks():
            if block in layer.saved or block >= first_new:
                continue
            start = block * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, durable.size_bytes)
            self._lost.setdefault(block, durable.saved.get(block, bytes(self.cache[start : max(start, end)])))

    def unsynced_blocks(self) -> list[int]:
        """Numbers of the blocks whose content is not durable, in order."""
        durable = self.layers[0]
        blocks = set(durable.saved)
        if len(self.cache) > durable.size_bytes:
            blocks.update(range(durable.size_bytes // BLOCK_BYTES, -(-len(self.cache) // BLOCK_BYTES)))
        return sorted(blocks)

    @property
    def is_durable(self) -> bool:
        """Whether a power cut would change nothing."""
        durable = self.layers[0]
        return not durable.saved and durable.size_bytes == len(self.cache)

    def durable_content(self) -> bytes:
        """The content after a power cut at this moment, if nothing had been written back beyond the syncs."""
        return bytes(self.layers[0].content(self.cache))

    def make_durable(self) -> None:
        """Sync in no time, for files that the harness itself puts there."""
        self.layers = [Layer(len(self.cache), {})]
        self._lost.clear()

    def power_fail(self, rng: random.Random, *, tears: bool) -> int:
        """Lose or keep every block that was not durable, and the change of length, each independently; with `tears`
        some blocks are torn.

        Returns how many bytes have changed, counted in blocks.
        """
        if self.is_durable:
            self.layers = self.layers[:1]
            return 0
        fate = rng.random()
        cache = self.cache
        content = self.layers[0].content(cache)
        if fate >= LOSE_ALL_RATIO:
            keeps_all = fate < LOSE_ALL_RATIO + KEEP_ALL_RATIO
            # A truncation writes zeros after the new end only in that block; later blocks are only given up with the
            # length. If the file keeps its old length, they hold what they held.
            blocks = [block for block in self.unsynced_blocks() if block not in self._lost]
            blocks = [block for block in blocks if block * BLOCK_BYTES < len(cache)]
            size = self._size_after(rng, len(content), keeps_all)
            del content[size:]
            content.extend(bytes(size - len(content)))
            for block in blocks:
                old = bytes(content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
                new = bytes(cache[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
                outcome = 1.0 if keeps_all else rng.random()
                if outcome >= 0.55:
                    _put_block(content, block, new)
                elif tears and outcome >= 0.45:
                    cut = rng.randrange(0, BLOCK_BYTES, SECTOR_BYTES)
                    _put_block(content, block, new[:cut].ljust(cut, b"\0") + old[cut:])
        common = min(len(cache), len(content))
        changed_bytes = max(len(cache), len(content)) - common
        for block in self.unsynced_blocks():
            start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, common)
            if start < end and content[start:end] != cache[start:end]:
                changed_bytes += end - start
        self.cache = content
        self.make_durable()
        return changed_bytes

    def _size_after(self, rng: random.Random, durable_size: int, keeps_all: bool) -> int:
        size = len(self.cache)
        if keeps_all or size == durable_size:
            return size
        if size > durable_size and rng.random() < 0.4:
            return rng.randrange(durable_size, size)
        return size if rng.random() < 0.5 else durable_size

    def flip_bit(self, offset: int, bit: int) -> None:
        """Flip one bit of a byte as programs see it, and on the medium if that has the same byte."""
        block, within = divmod(offset, BLOCK_BYTES)
        before = self.cache[offset]
        after = before ^ 1 << bit
        for saved in (*(layer.saved for layer in self.layers), self._lost):
            data = saved.get(block, b"")
            if data[within : within + 1] == bytes((before,)):
                saved[block] = data[:within] + bytes((after,)) + data[within + 1 :]
        self.cache[offset] = after
