"""Keys found for many messages at once equal those found for each message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.store.index_file import keys_of
from node.store.key_hash import key_hash, key_hashes
from node.store.properties import decode_properties
from node.store.record import java_string_hash
from node.store.unique_keys import common_text, unique_key, unique_key_span

PAIRS = st.lists(
    st.tuples(
        st.sampled_from(["UNIQ_KEY", "KEYS", "TAGS", "MY_UNIQ_KEY", "OWN"]),
        st.sampled_from(["", "a", "b", "a b", "é", "UNIQ_KEY"]),
    ),
    max_size=4,
)
TEXTS = st.one_of(
    PAIRS.map(lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs)),
    PAIRS.map(lambda pairs: "\x02".join(f"{name}\x01{value}" for name, value in pairs)),
    st.text("UNIQ_KEYS\x01\x02a", max_size=30),
)


@given(TEXTS)
def test_the_span_of_a_unique_key_is_the_only_key_of_its_message(text: str) -> None:
    data = text.encode()
    span = unique_key_span(data)
    assert unique_key(data) == (None if span is None else data[span[0] : span[1]])
    if span is not None:
        assert [data[span[0] : span[1]].decode()] == keys_of(text) == [decode_properties(text)["UNIQ_KEY"]]


@given(st.data(), TEXTS, TEXTS)
def test_the_common_text_and_keys_agree_with_each_text(data: st.DataObject, before: str, after: str) -> None:
    keys = data.draw(st.lists(st.text("ab\x01\x02", min_size=2, max_size=2), min_size=2, max_size=4))
    texts = [f"{before}UNIQ_KEY\x01{key}\x02{after}" for key in keys]
    if data.draw(st.booleans()):
        texts[-1] = texts[-1].replace("TAGS", "OWNS")
    common = common_text([text.encode() for text in texts])
    if common is not None:
        assert [[] if common.keys is None else [key.decode()] for key in common.keys or texts] == list(
            map(keys_of, texts)
        )
        for text in texts:
            others = {name: value for name, value in decode_properties(text).items() if name != "UNIQ_KEY"}
            known = decode_properties(common.text.decode())
            assert others == {name: value for name, value in known.items() if name != "UNIQ_KEY"}


def test_the_properties_that_clients_send_share_a_common_text() -> None:
    texts = [f"UNIQ_KEY\x01{number:032X}\x02WAIT\x01true\x02TAGS\x01t\x02".encode() for number in range(9)]
    common = common_text(texts)
    assert common is not None and common.text == b"UNIQ_KEY\x01\x02WAIT\x01true\x02TAGS\x01t\x02"
    assert common.keys == tuple(b"%032X" % number for number in range(9))
    assert common_text([b"TAGS\x01t\x02"] * 3) == (b"TAGS\x01t\x02", None)
    assert common_text([*texts, texts[0].replace(b"WAIT", b"KEYS")]) is None
    assert common_text([b"KEYS\x01k\x02"] * 3) is None


@given(
    st.sampled_from(["t", "a#topic", "é"]),
    st.lists(st.one_of(st.binary(min_size=16, max_size=16).map(bytes.hex), st.text(max_size=20)), max_size=12),
)
def test_key_hashes_match_those_of_java(topic: str, keys: list[str]) -> None:
    expected = []
    for key in keys:
        value = java_string_hash(f"{topic}#{key}")
        expected.append(0 if value == -(1 << 31) else abs(value))
    assert key_hashes(topic, [key.encode("utf-8", "replace") for key in keys]) == expected or any(
        "\ud800" <= character <= "\udfff" for key in keys for character in key
    )
    assert [key_hash(topic, key) for key in keys] == expected


def test_hashes_of_keys_with_a_common_prefix_and_of_one_without_absolute_value() -> None:
    keys = [f"7F00000100014E25A3B1{number // 3:08X}{number:04X}" for number in range(20)]
    for some in (keys, keys[:3], keys[:1]):
        assert key_hashes("t", [key.encode() for key in some]) == [key_hash("t", key) for key in some]
    assert java_string_hash("t#03L?C4I3") == -(1 << 31) and key_hash("", "") == java_string_hash("#")
    for few in (1, 6):
        assert key_hashes("t", [b"03L?C4I3", b"03L?C4I2"] * few) == [0, (1 << 31) - 1] * few


@given(
    st.text("0aZ", max_size=3),
    st.integers(1, 14).flatmap(lambda size: st.lists(st.text("09AFz\x7f", min_size=size, max_size=size), min_size=1)),
)
def test_hashing_keys_of_one_size_together_equals_hashing_them_singly(beginning: str, endings: list[str]) -> None:
    keys = [beginning + ending for ending in endings]
    assert key_hashes("t", [key.encode() for key in keys]) == [key_hash("t", key) for key in keys]
