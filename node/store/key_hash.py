"""The hash of a key in the message index: Java's String.hashCode of "topic#key", made positive (R: IndexFile).

The hash is a polynomial of the characters. For keys of one size it is counted column by column: a big number has 64
bits for each key, in which the terms of all characters are added, and its lower words are the hashes. A client's unique
keys begin alike (address, process, class loader, and most of the time): only their last characters have columns.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from node.store.record import java_string_hash

__all__ = ["key_hash", "key_hashes"]

MAX_KEY_CHARS = 1024
"""Of keys whose terms, of 39 bits, are added: the sum has to fit into 64."""

_MASK = 0xFFFFFFFF
_MAX_INT = 0x7FFFFFFF
_LEAST_INT = b"\0\0\0\x80"


def key_hash(topic: str, key: str) -> int:
    """The hash under which a key of a topic is filed: Math.abs of it, 0 for the one number that has none (R)."""
    return abs(java_string_hash(f"{topic}#{key}")) & _MAX_INT


def key_hashes(topic: str, keys: Sequence[bytes]) -> list[int]:
    """The same for keys in UTF-8."""
    count, size, together = len(keys), len(keys[0]) if keys else 0, b"".join(keys)
    if count < 2 or size > MAX_KEY_CHARS or set(map(len, keys)) != {size} or not together.isascii():
        return [key_hash(topic, key.decode()) for key in keys]
    least, greatest = min(keys), max(keys)
    begin = 0
    while begin < size and least[begin] == greatest[begin]:
        begin += 1
    same, sums, power, digits = 0, 0, 1, bytearray(8 * count)
    for at in range(size - 1, begin - 1, -1):
        column = together[at::size]
        if column == column[:1] * count:
            same += column[0] * power
        else:
            digits[::8] = column
            sums += int.from_bytes(digits, "little") * power
        power = power * 31 & _MASK
    same = same + java_string_hash(f"{topic}#{least[:begin].decode()}") * power & _MASK
    sums += int.from_bytes(same.to_bytes(8, "little") * count, "little")
    words = sums.to_bytes(8 * count, "little")
    hashes = array("i", words)[::2]
    if sys.byteorder == "big":
        hashes.byteswap()
    positive = list(map(abs, hashes))
    return [number & _MAX_INT for number in positive] if _LEAST_INT in words else positive
