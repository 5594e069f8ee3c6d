"""The record format, against bytes laid out by hand from its specification."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.store import record as record_module
from node.store.record import (
    FIXED_SIZE_BYTES,
    Message,
    RecordError,
    body_crc,
    decode_record,
    decode_records,
    java_string_hash,
    message_id,
    summarize_record,
    tag_hash,
)
from node.store.record_batch import batch_of_one, encode_record

# "hello" in topic "T", queue 3, queue offset 7, physical offset 0x1000; every field written out.
GOLDEN = bytes.fromhex(
    "0000006b"  # total: 91 + 5 (body) + 1 (topic) + 10 (properties)
    "daa320a7"  # magic
    "3610a686"  # crc32("hello") = 0x3610a686, top bit clear
    "00000003"  # queue id
    "00000009"  # flag
    "0000000000000007"  # queue offset
    "0000000000001000"  # physical offset
    "00000000"  # system flag
    "0000018bcfe56800"  # born 1700000000000
    "7f000001" "0000c350"  # born host 127.0.0.1:50000
    "0000018bcfe56801"  # stored a millisecond later
    "0a4d0001" "00002a9f"  # store host 10.77.0.1:10911
    "00000002"  # reconsume times
    "0000000000000000"  # prepared transaction offset
    "00000005" "68656c6c6f"  # body "hello"
    "01" "54"  # topic "T"
    "000a" "54414753" "01" "74616741" "02"  # TAGS = tagA
)  # fmt: skip

MESSAGE = Message(
    topic="T",
    queue_id=3,
    body=b"hello",
    properties={"TAGS": "tagA"},
    queue_offset=7,
    physical_offset=0x1000,
    flag=9,
    born_timestamp_ms=1_700_000_000_000,
    born_host="127.0.0.1:50000",
    store_timestamp_ms=1_700_000_000_001,
    store_host="10.77.0.1:10911",
    reconsume_times=2,
    body_crc=0x3610A686,
)


def test_golden_record_encodes_and_decodes() -> None:
    assert len(GOLDEN) == 107 == FIXED_SIZE_BYTES + 5 + 1 + 10
    assert encode_record(MESSAGE) == GOLDEN
    assert decode_record(GOLDEN) == (MESSAGE, 107)


def test_golden_record_with_ipv6_hosts() -> None:
    golden = bytes.fromhex(
        "00000074"  # 91 + 2 * 12 longer hosts + 0 + 1 + 0
        "daa320a7" "00000000" "00000000" "00000000"
        "0000000000000000" "0000000000000000"
        "00000030"  # both IPv6 bits
        "0000000000000000"
        "00000000000000000000000000000001" "00000001"  # [::1]:1
        "0000000000000000"
        "20010db8000000000000000000000002" "0000ffff"  # [2001:db8::2]:65535
        "00000000" "0000000000000000"
        "00000000" "01" "78" "0000"
    )  # fmt: skip
    message = Message(
        topic="x", queue_id=0, body=b"", properties={}, born_host="[::1]:1", store_host="[2001:db8::2]:65535"
    )
    assert encode_record(message) == golden
    decoded, end = decode_record(golden)
    assert (decoded.born_host, decoded.store_host, decoded.sys_flag) == ("[::1]:1", "[2001:db8::2]:65535", 48)
    assert end == len(golden) == 116
    assert decoded.message_id == "20010DB80000000000000000000000020000FFFF0000000000000000"


def test_message_id_is_host_and_physical_offset_in_hex() -> None:
    assert MESSAGE.message_id == "0A4D000100002A9F0000000000001000"
    assert message_id("127.0.0.1:1", -1) == "7F00000100000001FFFFFFFFFFFFFFFF"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("a", 97),
        ("tagA", 116 * 31**3 + 97 * 31**2 + 103 * 31 + 65),
        ("hello", 99_162_322),
        ("polygenelubricants", -(2**31)),  # the best-known string that hashes to MIN_VALUE
        ("\U0001f600", 0xD83D * 31 + 0xDE00),  # two UTF-16 units
    ],
)
def test_java_string_hash(text: str, value: int) -> None:
    assert java_string_hash(text) == value


def test_tag_hash_of_no_tags_is_zero() -> None:
    assert tag_hash(None) == tag_hash("") == 0
    assert tag_hash("a") == 97


def test_body_crc_clears_the_sign_bit() -> None:
    body = next(bytes([n]) for n in range(256) if zlib.crc32(bytes([n])) & 0x80000000)
    assert body_crc(body) == zlib.crc32(body) - 0x80000000
    decoded, _ = decode_record(encode_record(Message(topic="t", queue_id=0, body=body, properties={})))
    assert decoded.body_crc == body_crc(body)


def test_a_summary_holds_the_fields_and_extra_bytes_are_refused() -> None:
    fields = summarize_record(GOLDEN)
    assert fields == ("T", 3, 7, 0x1000, 0, 1_700_000_000_001, "tagA", "TAGS\x01tagA\x02", 0, b"")
    with pytest.raises(RecordError, match="behind the record"):
        summarize_record(GOLDEN + b"\0")


def test_every_single_bit_flip_in_the_body_is_detected() -> None:
    for bit in range(88 * 8, 93 * 8):
        damaged = bytearray(GOLDEN)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError, match="CRC"):
            decode_record(bytes(damaged))
        with pytest.raises(RecordError, match="CRC"):
            summarize_record(bytes(damaged))


def test_every_truncation_is_refused() -> None:
    for size in range(1, len(GOLDEN)):
        with pytest.raises(RecordError):
            decode_records(GOLDEN[:size])
    assert decode_records(b"") == []


def test_consecutive_records_decode_and_the_error_names_the_bad_ones_position() -> None:
    assert decode_records(GOLDEN * 3) == [MESSAGE] * 3
    with pytest.raises(RecordError, match="offset 107: magic") as caught:
        decode_records(GOLDEN + b"\0" * 107)
    assert caught.value.position == 107


@pytest.mark.parametrize(
    ("field_at", "value", "reason"),
    [
        (0, struct.pack(">I", 90), "total size"),
        (0, struct.pack(">I", 108), "total size"),
        (4, struct.pack(">I", 0xCBD43194), "magic"),
        (84, struct.pack(">i", -1), "body length"),
        (84, struct.pack(">i", 100), "body length"),
        (93, b"\x80", "topic length"),
        (95, struct.pack(">h", -1), "properties length"),
        (95, struct.pack(">h", 9), "properties length"),
        (36, struct.pack(">i", 48), "too short for its hosts"),
        (94, b"\xff", "UTF-8"),
    ],
)
def test_the_error_names_the_bad_field(field_at: int, value: bytes, reason: str) -> None:
    damaged = bytearray(GOLDEN)
    damaged[field_at : field_at + len(value)] = value
    with pytest.raises(RecordError, match=reason):
        decode_record(bytes(damaged))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topic": "t" * 128}, "topic of 128"),
        ({"topic": ""}, "topic of 0"),
        ({"topic": "é" * 64}, "topic of 128"),
        ({"properties_text": "x" * 32768}, "properties of 32768"),
        ({"born_host": "nowhere"}, "ip:port"),
        ({"store_host": "127.0.0.1"}, "ip:port"),
    ],
)
def test_messages_with_oversized_or_invalid_fields_are_refused(changes: dict[str, str], reason: str) -> None:
    fields: dict[str, object] = {"topic": "t", "queue_id": 0, "body": b""} | changes
    with pytest.raises(RecordError, match=reason):
        batch_of_one(**fields)  # type: ignore[arg-type]


def test_longest_topic_and_properties_fit() -> None:
    message = Message(topic="t" * 127, queue_id=0, body=b"", properties={"k": "v" * 32764})
    message, _ = decode_record(encode_record(message))
    assert len(message.topic) == 127
    assert message.properties == {"k": "v" * 32764}


texts = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=("Cs",)), min_size=1, max_size=20)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
hosts = st.one_of(
    st.builds(lambda a, p: f"{a}:{p}", st.ip_addresses(v=4), st.integers(0, 65535)),
    st.builds(lambda a, p: f"[{a}]:{p}", st.ip_addresses(v=6), st.integers(0, 65535)),
)


@given(
    topic=texts,
    body=st.binary(max_size=300),
    properties=st.dictionaries(texts, texts, max_size=4),
    numbers=st.tuples(int32, int32, int64, int64, int64, int64, int32, int64),
    sys_flag=st.sampled_from([0, 1, 4, 8, 12, 13]),
    born=hosts,
    store=hosts,
)
def test_round_trip(
    topic: str,
    body: bytes,
    properties: dict[str, str],
    numbers: tuple[int, int, int, int, int, int, int, int],
    sys_flag: int,
    born: str,
    store: str,
) -> None:
    message = Message(
        topic=topic, queue_id=numbers[0], body=body, properties=properties, flag=numbers[1],
        queue_offset=numbers[2], physical_offset=numbers[3], born_timestamp_ms=numbers[4],
        store_timestamp_ms=numbers[5], reconsume_times=numbers[6], prepared_transaction_offset=numbers[7],
        sys_flag=sys_flag, born_host=born, store_host=store,
    )  # fmt: skip
    data = encode_record(message)
    decoded, end = decode_record(b"pad" + data, 3)
    assert end == len(data) + 3
    assert encode_record(decoded) == data
    for name in ("topic", "body", "properties", "queue_offset", "physical_offset", "store_timestamp_ms"):
        assert getattr(decoded, name) == getattr(message, name)
    assert decoded.sys_flag & 15 == sys_flag
    fields = summarize_record(data)
    assert (fields.topic, fields.queue_id, fields.tags) == (topic, numbers[0], message.tags)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    if data:
        with pytest.raises(RecordError):
            decode_records(data)


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_leaves_the_body_intact(at: int, mask: int) -> None:
    damaged = bytearray(GOLDEN)
    damaged[at] ^= mask
    try:
        message, end = decode_record(bytes(damaged))
    except RecordError:
        return
    assert message.body == b"hello" and end == len(GOLDEN)


@settings(max_examples=400, deadline=None)
@given(
    st.binary(max_size=30), st.sampled_from(["", "TAGS\x01a\x02", "TAGS\x01a\x02TAGS\x01b\x02", "x", "é\x01ü\x02"]),
    st.sampled_from(["t", "é", "a" * 127]), st.sampled_from(["1.2.3.4:5", "[::1]:5"]), st.integers(-(2**63), 2**63 - 1),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2), st.integers(-3, 3),
)  # fmt: skip
def test_the_fast_path_of_the_summary_agrees_with_the_slow_path(
    body: bytes, text: str, topic: str, host: str, number: int, changes: list[tuple[int, int]], longer: int
) -> None:
    """For intact records, and for records with bytes changed, cut off or added."""
    batch = batch_of_one(
        topic=topic, queue_id=3, body=body, properties_text=text, born_host=host, prepared_transaction_offset=number
    )
    (made,) = batch.records((number,), queue_offset=7, store_timestamp_ms=number)
    data = bytearray(made)
    for at, value in changes:
        data[at % len(data)] = value
    data = data[:longer] if longer < 0 else data + bytes(longer)
    outcomes = []
    for summarize in (summarize_record, record_module._summarize_any):
        try:
            outcomes.append(summarize(bytes(data)))
        except RecordError as error:
            outcomes.append((error.reason, error.position))
    assert outcomes[0] == outcomes[1]
