"""Message properties: the separators, and the variants that other clients write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.store.properties import PropertyError, decode_properties, encode_properties, property_value


def test_every_encoded_pair_ends_with_a_separator() -> None:
    assert encode_properties({"TAGS": "a", "KEYS": "k1 k2"}) == "TAGS\x01a\x02KEYS\x01k1 k2\x02"
    assert encode_properties({}) == ""


@pytest.mark.parametrize(
    "text",
    [
        "TAGS\x01a\x02KEYS\x01k",
        "TAGS\x01a\x02KEYS\x01k\x02",
        "TAGS\x01a\x02KEYS\x01k\x02\x02",
        "\x02TAGS\x01a\x02\x02KEYS\x01k",
    ],
)
def test_missing_and_extra_separators_decode_alike(text: str) -> None:
    assert decode_properties(text) == {"TAGS": "a", "KEYS": "k"}


def test_a_name_without_value_is_dropped_and_an_empty_value_kept() -> None:
    assert decode_properties("lonely\x02a\x01\x02\x01v\x02") == {"a": ""}


def test_a_value_may_hold_the_inner_separator_when_read() -> None:
    assert decode_properties("a\x01b\x01c\x02") == {"a": "b\x01c"}


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a": "b\x02"}, {"": "b"}])
def test_properties_that_would_not_read_back_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(PropertyError):
        encode_properties(properties)


names = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=("Cs",)), min_size=1, max_size=8)


@given(st.dictionaries(names, names, max_size=5))
def test_round_trip(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@given(st.text(st.sampled_from("ab\x01\x02"), max_size=30), st.sampled_from(["a", "b", "ab"]))
def test_one_property_agrees_with_decoding_all(text: str, name: str) -> None:
    assert property_value(text, name) == decode_properties(text).get(name)
