"""Frames against bytes worked out by hand from the protocol, and round trips."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.remoting import Command, FrameError, RequestError, decode, encode
from node.remoting.codec import MAX_FRAME_BYTES

I32 = st.integers(-(2**31), 2**31 - 1)


def frame(word: int, header: bytes, body: bytes = b"") -> bytes:
    """A frame without its length prefix."""
    return word.to_bytes(4, "big") + header + body


def json_frame(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return frame(len(text), text, body)


# Golden frames


def test_binary_frame_by_hand() -> None:
    command = Command(105, {"topic": "T1"}, b"ab", opaque=7, flag=2, remark="hm", version=409, serializer="binary")
    by_hand = (
        "0000002a"  # length 42: 4 word + 36 header + 2 body
        "01000024"  # serializer 1, header length 36: 13 fixed, 4 + 2 remark, 4 + 13 fields
        "0069"  # code 105
        "03"  # PYTHON
        "0199"  # version 409
        "00000007"  # opaque
        "00000002"  # flag: one-way
        "00000002" "686d"  # remark
        "0000000d"  # 13 bytes of fields
        "0005" "746f706963" "00000002" "5431"  # topic = T1
        "6162"  # body
    )  # fmt: skip
    assert encode(command).hex() == by_hand
    assert decode(bytes.fromhex(by_hand)[4:]) == command


def test_binary_frame_without_remark_and_fields() -> None:
    by_hand = bytes.fromhex("0000001901000015000a00000100000001000000000000000000000000")
    command = decode(by_hand[4:])
    assert command == Command(10, opaque=1, language=0, version=1, serializer="binary")
    assert encode(command) == by_hand


def test_json_frame_by_hand() -> None:
    command = Command(105, {"topic": "Tä\x01"}, b"ab", opaque=7, version=409)
    header = (
        b'{"code":105,"flag":0,"language":"PYTHON","opaque":7,"serializeTypeCurrentRPC":"JSON","version":409'
        b',"extFields":{"topic":"T\\u00e4\\u0001"}}'
    )
    assert len(header) == 137
    by_hand = bytes.fromhex("0000008f00000089") + header + b"ab"  # 0x89 = 137, 0x8f = 137 + 4 + 2
    assert encode(command) == by_hand
    assert decode(by_hand[4:]) == command


def test_json_as_a_java_client_writes_it() -> None:
    command = decode(
        json_frame(
            b'{"code":310,"extFields":{"a":"g","b":"t","e":"3"},"flag":0,"language":"JAVA","opaque":12,'
            b'"serializeTypeCurrentRPC":"JSON","version":409}',
            b"body",
        )
    )
    assert (command.code, command.opaque, command.language, command.version) == (310, 12, 0, 409)
    assert command.ext_fields == {"a": "g", "b": "t", "e": "3"}
    assert (command.remark, command.body, command.serializer) == (None, b"body", "json")


# Leniency: what other clients send


def test_numbers_and_booleans_in_ext_fields_become_text_and_nulls_are_dropped() -> None:
    fields = {"queueId": 3, "batch": True, "unitMode": False, "rate": 1.5, "gone": None, "name": "x", "list": [1, 2]}
    command = decode(json_frame({"code": 10, "extFields": fields}))
    assert command.ext_fields == {
        "queueId": "3", "batch": "true", "unitMode": "false", "rate": "1.5", "name": "x", "list": "[1,2]"
    }  # fmt: skip
    assert command.get_int("queueId") == 3
    assert command.get_bool("batch") and not command.get_bool("unitMode")


def test_a_header_may_have_missing_keys_unknown_keys_and_white_space() -> None:
    command = decode(json_frame(b' {"code": "34", "language": "KOTLIN", "extFields": null, "surprise": {}}\n '))
    assert (command.code, command.opaque, command.flag, command.ext_fields) == (34, 0, 0, {})
    assert command.language == 7
    assert decode(json_frame({"code": 1, "language": 3})).language == 3


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False), ("no", False)])
def test_get_bool(text: str, expected: bool) -> None:
    assert Command(1, {"x": text}).get_bool("x", default=not expected) is expected


def test_getters_refuse_invalid_and_missing_fields() -> None:
    command = Command(1, {"n": "12x", "empty": ""})
    for get, name in (
        (command.get_int, "n"),
        (command.get_bool, "n"),
        (command.get_int, "empty"),
        (command.get_str, "missing"),
    ):
        with pytest.raises(RequestError, match=rf"\b{name}\b") as caught:
            get(name)
        assert caught.value.code == 1
    assert command.get_int("empty", 5) == 5
    assert command.get_str("missing", None) is None
    assert command.get_str("missing", "d") == "d"


# Refusals


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"7", b'"x"', b"null", b"{}", b'{"code":1}x', b'{"code":1}{', b'{"code":null}',
        b'{"code":1.5}', b'{"code":true}', b'{"code":[]}', b'{"code":2147483648}', b'{"code":"1e3"}',
        b'{"code":1,"opaque":"x"}', b'{"code":1,"flag":{}}', b'{"code":1,"extFields":[]}',
        b'{"code":1,"extFields":"x"}', b'{"code":' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"code":1,"x":"\xff"}',
        b'{"code":NaN}', b'{"code":Infinity}', b'{"code":1,"version":"x"}',
    ],
)  # fmt: skip
def test_an_invalid_json_header_is_refused(header: bytes) -> None:
    with pytest.raises(FrameError):
        decode(json_frame(header))


FIXED = "00010000010000000100000000"


@pytest.mark.parametrize(
    "header",
    [
        "", "0001", FIXED, FIXED + "00000005" "00000000", FIXED + "ffffffff" "00000000",
        FIXED + "00000000" "0000", FIXED + "00000000" "00000005" "00", FIXED + "00000000" "ffffffff",
        FIXED + "00000000" "00000001" "00", FIXED + "00000000" "00000008" "0005" "616263646566",
        FIXED + "00000000" "00000007" "0001" "61" "00000001", FIXED + "00000000" "00000007" "0001" "61" "ffffffff",
        FIXED + "00000000" "00000006" "ffff" "00000000", FIXED + "00000000" "00000008" "0001" "ff" "00000001" "61",
        FIXED + "00000001" "ff" "00000000", FIXED + "00000000" "00000000" "00",
    ],
)  # fmt: skip
def test_an_invalid_binary_header_is_refused(header: str) -> None:
    data = bytes.fromhex(header)
    with pytest.raises(FrameError):
        decode(frame(1 << 24 | len(data), data))


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\0\0\0\5abcd", b"\2\0\0\0", b"\xff\0\0\0"])
def test_an_invalid_header_word_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)


def test_commands_beyond_the_limits_are_not_encoded() -> None:
    with pytest.raises(FrameError, match="frame limit"):
        encode(Command(1, body=bytes(MAX_FRAME_BYTES)))
    with pytest.raises(FrameError, match="header limit"):
        encode(Command(1, {"x": "y" * 2**20}))
    with pytest.raises(FrameError, match="binary header"):
        encode(Command(51001, serializer="binary"))
    with pytest.raises(FrameError, match="binary header"):
        encode(Command(1, {"k" * 40000: ""}, serializer="binary"))
    assert FrameError("x").is_definite


# Properties

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FIELDS = st.dictionaries(TEXT, TEXT, max_size=5)


@given(
    code=st.integers(-(2**15), 2**15 - 1), fields=FIELDS, body=st.binary(max_size=50), opaque=I32, flag=I32,
    remark=st.none() | TEXT, language=st.integers(0, 11), version=st.integers(0, 2**15 - 1),
    binary=st.booleans(),
)  # fmt: skip
def test_round_trip(
    code: int, fields: dict[str, str], body: bytes, opaque: int, flag: int, remark: str | None, language: int,
    version: int, binary: bool,
) -> None:  # fmt: skip
    serializer = "binary" if binary else "json"
    command = Command(code, fields, body, opaque, flag, remark, language, version, serializer)  # type: ignore[arg-type]
    if binary and remark == "":
        command.remark = None  # the binary form has one way to say both
    data = encode(command)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert decode(data[4:]) == command


@given(fields=FIELDS, remark=TEXT, opaque=I32, code=I32)
def test_the_json_header_is_valid_json_with_the_commands_values(
    fields: dict[str, str], remark: str, opaque: int, code: int
) -> None:
    data = encode(Command(code, fields, opaque=opaque, remark=remark, language=99))
    values = json.loads(data[8:])
    assert values["extFields" if fields else "code"] == (fields or code)
    assert (values["remark"], values["opaque"], values["language"]) == (remark, opaque, "OTHER")


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_frame_error(data: bytes) -> None:
    try:
        command = decode(data)
    except FrameError:
        return
    assert isinstance(command, Command)


def test_lone_surrogates_survive_json_and_become_question_marks_in_binary() -> None:
    command = decode(json_frame(b'{"code":1,"extFields":{"x":"\\ud800"}}'))
    assert decode(encode(command)[4:]) == command
    command.serializer = "binary"
    assert decode(encode(command)[4:]).ext_fields == {"x": "?"}


def test_a_request_formats_its_fields_and_its_reply_matches_it() -> None:
    request = Command.request(10, {"s": "x", "i": 3, "t": True, "f": False}, b"b", oneway=True)
    assert request.ext_fields == {"s": "x", "i": "3", "t": "true", "f": "false"}
    assert request.is_oneway and not request.is_response
    request.opaque, request.serializer = 77, "binary"
    reply = request.reply(1, remark="no", fields={"n": 1}, body=b"r")
    assert (reply.opaque, reply.serializer, reply.code, reply.remark, reply.body) == (77, "binary", 1, "no", b"r")
    assert reply.is_response and not reply.is_oneway and reply.ext_fields == {"n": "1"}
