"""Tables made column by column, compared with `struct`, row by row."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.store.columns import pack_longs, pack_table, pack_words, progression, split_longs

words = st.integers(0, (1 << 32) - 1)


@given(st.lists(words), st.lists(st.integers(0, (1 << 64) - 1)))
def test_packing_numbers_together_equals_packing_them_singly(small: list[int], large: list[int]) -> None:
    assert pack_words(small) == b"".join(struct.pack(">I", number) for number in small)
    assert pack_longs(large) == b"".join(struct.pack(">Q", number) for number in large)
    upper, lower = split_longs(large)
    assert [high << 32 | low for high, low in zip(upper, lower, strict=True)] == large
    for pack in (pack_words, pack_longs, split_longs):
        with pytest.raises(OverflowError):
            pack([-1])
    with pytest.raises(OverflowError):
        pack_words([1 << 32])


@given(st.lists(words, min_size=1, max_size=9), st.integers(1, 7), st.data())
def test_pack_table_equals_packing_row_by_row(row: list[int], count: int, data: st.DataObject) -> None:
    numbers = data.draw(st.sets(st.integers(0, len(row) - 1)))
    columns = [(number, data.draw(st.lists(words, min_size=count, max_size=count))) for number in numbers]
    expected = b""
    for at in range(count):
        own = list(row)
        for number, values in columns:
            own[number] = values[at]
        expected += struct.pack(f">{len(own)}I", *own)
    assert pack_table(row, count, [(number, array("I", values)) for number, values in columns]) == expected


@given(
    st.integers(-5, 1 << 64) | st.integers((1 << 32) - 500, 1 << 32) | st.integers((1 << 63) - 50, 1 << 63),
    st.integers(1, 9), st.integers(1, 99),
)  # fmt: skip
def test_a_progression_yields_its_numbers_or_none_outside_its_range(first: int, count: int, step: int) -> None:
    numbers = [first + step * at for at in range(count)]
    found = progression(first, count, step)
    if found is None:
        assert first < 0 or numbers[-1] >= 1 << 63 or first >> 32 != numbers[-1] >> 32
    else:
        assert [found[0] << 32 | low for low in found[1]] == numbers and numbers[-1] < 1 << 63
