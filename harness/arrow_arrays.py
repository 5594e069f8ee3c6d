"""Builds Arrow arrays from Python lists through raw buffers.

`pyarrow.array` and `pyarrow.scalar` import pandas if it is installed, to check for pandas objects: half a second of
processor time at the end of every run.
"""

from __future__ import annotations

__all__ = ["array_of", "repeated"]

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An array of int64, timestamps (as integers), booleans or strings; None is null.

    Lone surrogates, which JSON can represent and UTF-8 cannot, are written as escapes. Raises TypeError for a value of
    another type, OverflowError for one that does not fit, or for 2 GiB of text.
    """
    nulls = values.count(None)
    validity = _bits([value is not None for value in values]) if nulls else None
    if pa.types.is_string(kind):
        buffers = _text(["" if value is None else value for value in values] if nulls else values)
    elif pa.types.is_boolean(kind):
        buffers = [_bits(values)]
    else:
        buffers = [_numbers([0 if value is None else value for value in values] if nulls else values)]
    return pa.Array.from_buffers(kind, len(values), [validity, *buffers], null_count=nulls)


def repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """`array_of` of one value `count` times."""
    if not pa.types.is_string(kind):
        return array_of([value] * count, kind)
    data = _encoded(value)
    offsets = array("i", range(0, len(data) * count + 1, len(data)) if data else [0] * (count + 1))
    return pa.Array.from_buffers(kind, count, [None, *map(pa.py_buffer, (offsets, data * count))], null_count=0)


def _text(values: Sequence[str]) -> list[pa.Buffer]:
    """The offsets buffer and the data buffer of strings."""
    together = "".join(values)
    lengths: Iterable[int] = map(len, values)
    data = _encoded(together)
    if len(data) != len(together):
        lengths = [len(_encoded(value)) for value in values]
    return [pa.py_buffer(array("i", accumulate(lengths, initial=0))), pa.py_buffer(data)]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _numbers(values: Sequence[int]) -> pa.Buffer:
    if not set(map(type, values)) <= {int}:
        raise TypeError("it is no whole number")
    return pa.py_buffer(array("q", values))


def _bits(values: Sequence[bool]) -> pa.Buffer:
    """A bitmap, eight values per byte, least significant bit first."""
    digits = "".join(["1" if value else "0" for value in values])[::-1]
    return pa.py_buffer(int(digits or "0", 2).to_bytes(-(-len(values) // 8), "little"))
