"""Batches of records: each record equals the one that its message would have alone."""

from __future__ import annotations

import zlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from node.store.record import Message, decode_record
from node.store.record_batch import RecordBatch, encode_record, record_maker

INT32 = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=("Cs",)), max_size=8)
UNIFORM = st.tuples(INT32, st.integers(0, 40), st.sampled_from([0, 0, 5])).flatmap(
    lambda kind: st.lists(
        st.tuples(
            st.just(kind[0]),
            st.binary(min_size=kind[1], max_size=kind[1]),
            st.text("abcdef", min_size=kind[2], max_size=kind[2]).map(lambda text: f"UNIQ_KEY\x01{text}\x02"),
        ),
        min_size=1,
        max_size=20,
    )
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["t", "a-longer-topic", "é"]), st.integers(0, 2**31 - 1), INT32,
    st.sampled_from(["10.0.0.1:5", "[::1]:70", "[fe80::1]:9"]), st.sampled_from(["10.77.0.1:10911", "[::2]:1"]),
    st.lists(st.tuples(INT32, st.binary(max_size=50), TEXTS.map(lambda text: f"k\x01{text}\x02")), min_size=1)
    | UNIFORM,
    st.integers(0, 2**40), st.integers(0, 2**62), st.sampled_from([0, 9, -7]),
)  # fmt: skip
def test_a_batch_encodes_each_message_as_it_would_be_alone(
    topic: str, queue_id: int, sys_flag: int, born: str, store: str, messages: Any, offset: int, position: int,
    prepared: int,
) -> None:  # fmt: skip
    flags, bodies, texts = zip(*[(flag, body, text.encode()) for flag, body, text in messages], strict=True)
    maker = record_maker(topic, queue_id, sys_flag, born, store)
    batch = RecordBatch(maker, flags, bodies, texts, 7, 3, prepared)
    positions = list(range(position, position + len(messages)))
    made = batch.records(positions, queue_offset=offset, store_timestamp_ms=9)
    for at, record in enumerate(made):
        name, _, value = messages[at][2].removesuffix("\x02").partition("\x01")
        expected = Message(
            topic=topic, queue_id=queue_id, body=bodies[at], properties={name: value}, queue_offset=offset + at,
            physical_offset=positions[at], sys_flag=maker.sys_flag, flag=flags[at], born_timestamp_ms=7,
            born_host=born, store_timestamp_ms=9, store_host=store, reconsume_times=3,
            prepared_transaction_offset=prepared, body_crc=zlib.crc32(bodies[at]) & 0x7FFFFFFF,
        )  # fmt: skip
        assert decode_record(record) == (expected, len(record))
        assert encode_record(expected) == record
    assert made.crcs == list(map(zlib.crc32, made))
    assert batch.sizes() == list(map(len, made))
