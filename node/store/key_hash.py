"""The hash of a key in the message index: Java's String.hashCode of "topic#key", made positive (R: IndexFile).

A client's unique keys differ in their last characters: 16 bytes in hexadecimal, of which the first ten are its
address, process and class loader, then come four of the time and two of a counter. The hash is a polynomial, so it is
put together of that of the beginning, with the upper half of the time, and those of two groups of four characters, all
of which repeat and are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add
from struct import Struct

from node.store.record import java_string_hash

__all__ = ["key_hash", "key_hashes"]

GROUP_CHARS = 4
LAST_CHARS = 2 * GROUP_CHARS
MAX_GROUPS = 1 << 17
"""Groups of characters remembered: all of four hexadecimal digits, and as many again. Some 100 bytes each."""
MAX_TOPICS = 64
"""Topics of which the beginnings of keys are remembered."""
MAX_BEGINNINGS = 1024
"""Of one topic: a client has a new one each minute. Some 100 bytes each."""

_MASK = 0xFFFFFFFF
_HALF = 1 << 31


def key_hash(topic: str, key: str) -> int:
    """The hash under which a key of a topic is filed."""
    return _positive(java_string_hash(f"{topic}#{key}") & _MASK)


def key_hashes(topic: str, keys: Sequence[bytes]) -> list[int]:
    """The same for keys in UTF-8."""
    size = len(keys[0]) if keys else 0
    together = b"".join(keys)
    if size < LAST_CHARS or set(map(len, keys)) != {size} or not together.isascii():
        return [key_hash(topic, key.decode()) for key in keys]
    beginnings, middles, lasts = zip(*_layout(size - LAST_CHARS).iter_unpack(together), strict=True)
    before = map(add, map(_beginnings(topic).__getitem__, beginnings), map(_middles.__getitem__, middles))
    sums = map(add, before, map(_lasts.__getitem__, lasts))
    return [number if (number := each & _MASK) < _HALF else (_MASK + 1 - number) & (_HALF - 1) for each in sums]


def _positive(unsigned: int) -> int:
    """Math.abs of a signed 32-bit number, 0 for the one that has none (R)."""
    return unsigned if unsigned < _HALF else (_MASK + 1 - unsigned) & (_HALF - 1)


class _Groups(dict[bytes, int]):
    """What groups of four characters add to a hash, so many characters before its end."""

    def __init__(self, before_end: int) -> None:
        super().__init__()
        self._power = pow(31, before_end, _MASK + 1)

    def __missing__(self, text: bytes) -> int:
        if len(self) >= MAX_GROUPS:
            self.clear()
        first, second, third, fourth = text
        value = self[text] = (((first * 31 + second) * 31 + third) * 31 + fourth) * self._power & _MASK
        return value


_middles, _lasts = _Groups(GROUP_CHARS), _Groups(0)


class _Beginnings(dict[bytes, int]):
    """What topic and beginning of a key add to its hash."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self._topic = topic

    def __missing__(self, text: bytes) -> int:
        if len(self) >= MAX_BEGINNINGS:
            self.clear()
        value = self[text] = java_string_hash(f"{self._topic}#{text.decode()}") * pow(31, LAST_CHARS, _MASK + 1) & _MASK
        return value


_beginnings = lru_cache(maxsize=MAX_TOPICS)(_Beginnings)


@lru_cache(maxsize=64)
def _layout(size: int) -> Struct:
    return Struct(f"{size}s{GROUP_CHARS}s{GROUP_CHARS}s")
