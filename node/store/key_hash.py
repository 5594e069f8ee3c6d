"""The hash of a key in the message index: Java's String.hashCode of "topic#key", made positive (R: IndexFile).

A client's unique keys differ in their last characters: 16 bytes in hexadecimal, of which the first ten are its
address, process and class loader, then come the time and a counter. The hash is a polynomial, so it is put together of
that of the beginning and those of three groups of four characters, all of which repeat and are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from node.store.record import java_string_hash

__all__ = ["key_hash", "key_hashes"]

GROUP_CHARS = 4
TAIL_CHARS = 3 * GROUP_CHARS
MAX_GROUPS = 1 << 17
"""Groups of characters remembered: all of four hexadecimal digits, and as many again. Some 100 bytes each."""
MAX_BEGINNINGS = 4096
"""Beginnings of keys remembered: one for each topic and client."""

_MASK = 0xFFFFFFFF
_HALF = 1 << 31
_CLIENT_POWER, _UPPER_POWER, _MIDDLE_POWER = (
    pow(31, exponent, 1 << 32) for exponent in (3 * GROUP_CHARS, 2 * GROUP_CHARS, GROUP_CHARS)
)


def key_hash(topic: str, key: str) -> int:
    """The hash under which a key of a topic is filed."""
    return _positive(java_string_hash(f"{topic}#{key}") & _MASK)


def key_hashes(topic: str, keys: Sequence[bytes]) -> list[int]:
    """The same for keys in UTF-8."""
    size = len(keys[0]) if keys else 0
    together = b"".join(keys)
    if size < TAIL_CHARS or list(map(len, keys)).count(size) != len(keys) or not together.isascii():
        return [key_hash(topic, key.decode()) for key in keys]
    groups = _groups.__getitem__
    beginnings, lowers = zip(*_layout(size - GROUP_CHARS).iter_unpack(together), strict=True)
    sums: list[int] = []
    last = last_upper = b""
    of_upper = same = 0
    for beginning, lower in zip(beginnings, map(groups, lowers), strict=True):
        if beginning != last:  # keys of one millisecond differ in their last group only
            last, upper = beginning, beginning[:-GROUP_CHARS]
            if upper != last_upper:
                last_upper = upper
                of_upper = _client(topic, upper[:-GROUP_CHARS]) * _CLIENT_POWER
                of_upper += groups(upper[-GROUP_CHARS:]) * _UPPER_POWER
            same = of_upper + groups(beginning[-GROUP_CHARS:]) * _MIDDLE_POWER
        sums.append(same + lower & _MASK)
    return [number if number < _HALF else (_MASK + 1 - number) & (_HALF - 1) for number in sums]


def _positive(unsigned: int) -> int:
    """Math.abs of a signed 32-bit number, 0 for the one that has none (R)."""
    return unsigned if unsigned < _HALF else (_MASK + 1 - unsigned) & (_HALF - 1)


class _Groups(dict[bytes, int]):
    """The hashes of groups of four characters."""

    def __missing__(self, text: bytes) -> int:
        if len(self) >= MAX_GROUPS:
            self.clear()
        first, second, third, fourth = text
        value = self[text] = ((first * 31 + second) * 31 + third) * 31 + fourth
        return value


_groups = _Groups()


@lru_cache(maxsize=MAX_BEGINNINGS)
def _client(topic: str, text: bytes) -> int:
    return java_string_hash(f"{topic}#{text.decode()}") & _MASK


@lru_cache(maxsize=64)
def _layout(size: int) -> Struct:
    return Struct(f"{size}s{GROUP_CHARS}s")
