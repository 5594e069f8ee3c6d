"""Tables of numbers, built column by column: what a loop does for each row, a built-in does for a whole column.

A row has a fixed number of 32-bit words, most of them equal in all rows.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

__all__ = ["WORD_MASK", "pack_longs", "pack_table", "pack_words", "progression", "split_longs"]

_IS_LITTLE = sys.byteorder == "little"
WORD_MASK = 0xFFFFFFFF


def pack_words(words: Sequence[int]) -> bytes:
    """Unsigned numbers of 32 bits, big-endian. Raises OverflowError for others."""
    packed = array("I", words)
    if _IS_LITTLE:
        packed.byteswap()
    return packed.tobytes()


def pack_longs(numbers: Sequence[int]) -> bytes:
    """Unsigned numbers of 64 bits, big-endian. Raises OverflowError for others."""
    packed = array("Q", numbers)
    if _IS_LITTLE:
        packed.byteswap()
    return packed.tobytes()


def pack_table(row: Sequence[int], count: int, columns: Sequence[tuple[int, array[int]]]) -> bytes:
    """`count` times `row`, unsigned numbers of 32 bits, with some columns replaced (number of the word, and its `count`
    values, as an array of type "I"); big-endian. Raises OverflowError for other numbers."""
    width = len(row)
    table = array("I", row) * count
    for word, values in columns:
        table[word::width] = values
    if _IS_LITTLE:
        table.byteswap()
    return table.tobytes()


def progression(first: int, count: int, step: int) -> tuple[int, array[int]] | None:
    """The upper word of `first`, `first + step` and so on, `count` numbers of 63 bits, and their lower words. None if
    their upper words differ, or they are no such numbers."""
    upper = first >> 32
    last = first + (count - 1) * step
    if not 0 <= upper < 1 << 31 or last >> 32 != upper:
        return None
    low = first & WORD_MASK
    return upper, array("I", range(low, low + count * step, step))


def split_longs(numbers: Sequence[int]) -> tuple[array[int], array[int]]:
    """The upper and the lower words of unsigned numbers of 64 bits. Raises OverflowError for others."""
    words = array("I", array("Q", numbers).tobytes())
    return (words[1::2], words[0::2]) if _IS_LITTLE else (words[0::2], words[1::2])
