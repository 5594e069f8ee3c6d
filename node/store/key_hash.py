"""The hash of a key in the message index: Java's String.hashCode of "topic#key", made positive (R: IndexFile).

The hash is a polynomial of the characters. For keys of one size it is computed column by column: a big number has 64
bits for each key, into which the terms of all characters are added; its lower words are the hashes. A client's unique
keys begin alike (address, process, class loader, and most of the time): only their last characters are columns.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from node.interpreter import least_rows
from node.store.record import java_string_hash

__all__ = ["key_hash", "key_hashes"]

ENDING_CHARS = 12
"""Characters in which a client's keys differ: four bytes of the time and two of a counter, in hexadecimal."""
LEAST_TOGETHER = least_rows(8)
"""Fewest keys that are hashed together; for fewer a loop over their last characters is as quick."""
MAX_KEY_CHARS = 1024
"""Longest keys whose terms, of 39 bits each, are added: the sum has to fit into 64 bits."""

_MASK = 0xFFFFFFFF
_MAX_INT = 0x7FFFFFFF
_LEAST_INT = b"\0\0\0\x80"
_POWERS = [pow(31, exponent, 1 << 32) for exponent in range(MAX_KEY_CHARS, -1, -1)]


def key_hash(topic: str, key: str) -> int:
    """The hash under which a key of a topic is indexed."""
    return _positive(java_string_hash(f"{topic}#{key}"))


def _positive(number: int) -> int:
    """Math.abs of the lowest 32 bits as a signed number; 0 for the one that has no positive counterpart (R)."""
    unsigned = number & _MASK
    return unsigned if unsigned <= _MAX_INT else -unsigned & _MAX_INT


def key_hashes(topic: str, keys: Sequence[bytes]) -> list[int]:
    """The `key_hash` of each key; keys are UTF-8."""
    count, size, together = len(keys), len(keys[0]) if keys else 0, b"".join(keys)
    if not count or size > MAX_KEY_CHARS or set(map(len, keys)) != {size} or not together.isascii():
        return [key_hash(topic, key.decode()) for key in keys]
    least, greatest = min(keys), max(keys)
    begin = 0
    while begin < size - ENDING_CHARS and least[begin] == greatest[begin]:
        begin += 1
    same = java_string_hash(f"{topic}#{least[:begin].decode()}")
    if count < LEAST_TOGETHER:
        return _hashes_one_by_one(same, [key[begin:] for key in keys])
    powers = _POWERS[MAX_KEY_CHARS - (size - begin) :]
    same *= powers[0]
    sums, digits = 0, bytearray(8 * count)
    for at, power in enumerate(powers[1:], begin):
        column = together[at::size]
        if column == column[:1] * count:
            same += column[0] * power
        else:
            digits[::8] = column
            sums += int.from_bytes(digits, "little") * power
    sums += int.from_bytes((same & _MASK).to_bytes(8, "little") * count, "little")
    words = sums.to_bytes(8 * count, "little")
    hashes = array("i", words)[::2]
    if sys.byteorder == "big":
        hashes.byteswap()
    positive = list(map(abs, hashes))
    return [_positive(number) for number in positive] if _LEAST_INT in words else positive


def _hashes_one_by_one(same: int, endings: Sequence[bytes]) -> list[int]:
    """The hashes of keys with these endings, after a beginning whose hash is `same`."""
    hashes = []
    for ending in endings:
        hashed = same
        for char in ending:
            hashed = (hashed * 31 + char) & _MASK
        hashes.append(_positive(hashed))
    return hashes
