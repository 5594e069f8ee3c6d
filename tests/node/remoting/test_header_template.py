"""Headers read by a template: the result is that of the decoder, for any input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.remoting import Command, FrameError, FrameParser, decode, encode
from node.remoting.header_layout import LAYOUTS_OF_SIZE, MAX_SIZES
from node.remoting.header_template import MAX_TEXTS, TemplateRequest, VariableFields
from node.remoting.processing import size_of

VARIABLE = {
    310: VariableFields(("e", "g"), ("b", "i"), b"KEY\x01"),
    10: VariableFields(("queueId", "bornTimestamp"), ("topic", "properties"), b"KEY\x01"),
}
MADE = {
    310: {"a": "group", "b": "topic", "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 1700000000000, "h": 0,
        "i": "WAIT\x01true\x02", "j": 0, "k": False, "m": False},
    10: {"producerGroup": "group", "topic": "topic", "queueId": 1, "bornTimestamp": 17, "properties": "", "sysFlag": 0},
}  # fmt: skip


def frame(header: bytes, body: bytes = b"body", serializer: int = 0) -> bytes:
    word = serializer << 24 | len(header)
    return (4 + len(header) + len(body)).to_bytes(4, "big") + word.to_bytes(4, "big") + header + body


def seen(command: Command) -> tuple[Any, ...]:
    return (
        command.code, dict(command.ext_fields), command.body, command.opaque, command.flag, command.remark,
        command.language, command.version, command.serializer,
    )  # fmt: skip


def outcome(data: bytes, parser: FrameParser) -> list[tuple[Any, ...]] | str:
    try:
        return [seen(command) for command in parser.feed(data)]
    except FrameError as error:
        return str(error)


def trained(samples: list[bytes]) -> FrameParser:
    """A parser that has read each sample often enough to know its template, if it has one."""
    parser = FrameParser(variable=VARIABLE)
    for sample in samples:
        for _ in range(70):
            parser.feed(sample)
    return parser


TEXTS = st.one_of(
    st.sampled_from(["", "topic", "WAIT\x01true\x02", 'a"b', "back\\slash", "\\u0001", "é", "\ud800", "\x00", "\x7f"]),
    st.lists(st.sampled_from(["KEY", "\x01", "\x02", "v", '"', "\\", "u0001", "\n", ",", ":", "}"])).map("".join),
    st.text(max_size=10),
)
NUMBERS = st.one_of(
    st.integers(-5, 10**20).map(str), st.sampled_from(["", "00", "007", " 1", "1_0", "x", "-0", "1" * 18, "1" * 19])
)
OPAQUES = st.one_of(st.integers(0, 20), st.integers(-(2**31), 2**31 - 1))


@st.composite
def commands(draw: Any) -> Command:
    code = draw(st.sampled_from([310, 310, 10]))
    variable = VARIABLE[code]
    fields: dict[str, Any] = dict(MADE[code])
    for name in variable.numbers:
        fields[name] = draw(NUMBERS)
    for name in variable.texts:
        fields[name] = draw(TEXTS)
    if draw(st.integers(0, 5)) == 0:
        fields.pop(draw(st.sampled_from(sorted(fields))))
    if draw(st.integers(0, 5)) == 0:
        fields[draw(st.sampled_from(["k", "x"]))] = draw(TEXTS)
    command = Command.request(code, fields, draw(st.binary(max_size=5)))
    command.opaque = draw(OPAQUES)
    command.serializer = draw(st.sampled_from(["json", "binary"]))
    return command


def sample(code: int, serializer: str, without: str = "") -> bytes:
    fields: dict[str, Any] = {name: value for name, value in MADE[code].items() if name != without}
    command = Command.request(code, fields, b"x")
    command.serializer = serializer  # type: ignore[assignment]
    return encode(command)


KNOWN = trained([sample(code, serializer) for code in (310, 10) for serializer in ("json", "binary")])


@settings(max_examples=400, deadline=None)
@given(st.lists(commands(), min_size=1, max_size=5))
def test_templates_read_requests_as_the_decoder_does(sent: list[Command]) -> None:
    stream = b"".join(map(encode, sent))
    assert outcome(stream, KNOWN) == outcome(stream, FrameParser())


@st.composite
def similar_requests(draw: Any) -> list[Command]:
    """Consecutive requests of one client, with an occasional different one of the same size."""
    code, serializer = draw(st.sampled_from([310, 10])), draw(st.sampled_from(["json", "binary"]))
    (queue, born), (topic, text), name = VARIABLE[code]
    before, after = draw(st.sampled_from([("", "\x02WAIT\x01true\x02"), ("A\x01b\x02", ""), ("X", "\x02"), ("", "")]))
    sent = []
    for number in range(draw(st.integers(1, 12))):
        odd = draw(st.integers(0, 9))
        key = f"{name.decode()}{draw(st.sampled_from(['AB01', '9z9z']))}"
        fields: dict[str, Any] = {**MADE[code], queue: "3", born: str(17_000 + number), topic: "topic"}
        if odd == 1:
            key = draw(st.sampled_from(["NOK\x01AB01", "KEY\x01A\x02B1", "KEY\x01A-B1", "KEY\x01A\\B1", 'KEY\x01A"B1']))
        if odd == 2:
            name_of_odd = draw(st.sampled_from([queue, born, topic]))
            fields[name_of_odd] = draw(st.sampled_from(["0", "7", "x", "other", "00017"]))
        body = draw(st.sampled_from([b"body", b"four"]))
        command = Command.request(code, {**fields, text: before + key + after}, body)
        command.opaque = draw(st.sampled_from([5, 30])) if odd == 3 else 10 + number
        command.serializer = serializer
        sent.append(command)
    return sent


@settings(max_examples=300, deadline=None)
@given(similar_requests(), similar_requests(), st.integers(0, 300))
def test_streams_of_one_layout_are_read_as_by_the_decoder(
    trained_by: list[Command], sent: list[Command], damaged_at: int
) -> None:
    parser = trained([])
    for command in trained_by[:3]:
        for _ in range(4):
            outcome(encode(command), parser)
    for stream in (b"".join(map(encode, [*trained_by, *sent])), bytearray(b"".join(map(encode, sent)))):
        if isinstance(stream, bytearray):
            stream[min(8 + damaged_at, len(stream) - 1)] ^= 1
        assert outcome(bytes(stream), parser) == outcome(bytes(stream), FrameParser())
        if isinstance(outcome(bytes(stream), FrameParser()), str):
            return


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_requests_of_one_layout_share_their_common_part(serializer: str) -> None:
    """Even if a different request of the same size is among them."""

    def made(number: int, **changed: Any) -> bytes:
        fields = {**MADE[310], "i": f"KEY\x01{number:04X}\x02WAIT\x01true\x02", "b": f"topic{number % 3}", **changed}
        command = Command.request(310, fields, b"%04d" % number)
        command.opaque, command.serializer = 100 + number, serializer  # type: ignore[assignment]
        return encode(command)

    parser = trained([sample(310, serializer)])
    for number in range(3):
        parser.feed(made(number))
    read = parser.feed(b"".join([*map(made, range(20)), made(20, k=1.5), *map(made, range(21, 40))]))
    keyed = [request for request in read if isinstance(request, TemplateRequest)]
    assert len(read) == 40 and [request.key for request in keyed] == [b"%04X" % at for at in range(40) if at != 20]
    assert len({id(request.common) for request in keyed}) == 1
    assert [request.body for request in read] == [b"%04d" % at for at in range(40)]


def test_the_texts_and_layouts_that_a_parser_keeps_are_bounded() -> None:
    parser = trained([sample(310, "json")])
    for number in range(3 * MAX_TEXTS):
        command = Command.request(310, {**MADE[310], "b": f"topic{number}", "i": "KEY\x01A\x02" + "x" * (number % 100)})
        (read,) = parser.feed(encode(command))
        assert isinstance(read, TemplateRequest) and read.ext_fields == command.ext_fields
        assert 0 < len(read.template.texts) <= MAX_TEXTS
        assert 0 < len(parser.layouts) <= MAX_SIZES
        assert all(len(layouts) <= LAYOUTS_OF_SIZE for layouts in parser.layouts.values())


PIECES = [b"", b'"', b"\\", b"\\u0001", b"0", b"-", b",", b"\x00", b"\x80", b" ", b'":"']


@settings(max_examples=600, deadline=None)
@given(st.sampled_from([310, 10]), st.sampled_from(["json", "binary"]), st.data())
def test_templates_read_damaged_headers_as_the_decoder_does(code: int, serializer: str, data: st.DataObject) -> None:
    whole = bytearray(sample(code, serializer))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(8, len(whole) - 1))
        piece = data.draw(st.sampled_from(PIECES))
        whole[at : at + data.draw(st.integers(0, 3))] = piece
    header_size = max(int.from_bytes(whole[4:8], "big") & 0xFFFFFF, 0) + len(whole) - len(sample(code, serializer))
    whole[:8] = frame(bytes(max(header_size, 0)), bytes(len(whole) - 8 - header_size), serializer == "binary")[:8]
    assert outcome(bytes(whole), KNOWN) == outcome(bytes(whole), FrameParser())


@settings(max_examples=150, deadline=None)
@given(st.lists(commands(), min_size=1, max_size=3), st.lists(commands(), min_size=1, max_size=4))
def test_learned_templates_never_change_what_a_parser_reads(trained_by: list[Command], sent: list[Command]) -> None:
    parser = FrameParser(variable=VARIABLE)
    for command in trained_by:
        for _ in range(4):
            outcome(encode(command), parser)
    stream = b"".join(map(encode, sent))
    assert outcome(stream, parser) == outcome(stream, FrameParser())


HOSTILE = [
    b'{"code":310,"opaque":5,"extFields":{"x\\"e":"5","e":"6"}}',
    b'{"code":310,"opaque":5,"opaque":6,"extFields":{"e":"6"}}',
    b'{"code":310,"opaque":5,"extFields":{"e":"5","e":"6","b":"t"}}',
    b'{"code":310,"e":"5","opaque":5,"extFields":{"e":"6"}}',
    b'{"code":310,"extFields":{"e":5,"g":0,"b":"t","i":""},"opaque":0}',
    b'{"code":310,"extFields":{"e":5.5,"b":"\\"opaque\\":5"},"opaque":0}',
    b'{"code":310,"extFields":{"b":"x","i":"\\"b\\":\\"y\\""},"opaque":3}',
    b' {"code" : 310 , "opaque" : 12 , "extFields" : {"e" : "1" , "b" : "t"} } ',
    b'{"code":310,"opaque":5,"extFields":{"e":"6"},"remark":"r"}',
    b'{"code":310,"opaque":5,"flag":2,"extFields":{"e":"6"}}',
    b'{"code":"310","opaque":5,"extFields":{"e":"6","nested":{"e":"7"}}}',
]


@pytest.mark.parametrize("header", HOSTILE)
def test_templates_of_hostile_headers_never_change_what_is_read(header: bytes) -> None:
    parser = trained([frame(header)])
    variants = [header, header.replace(b"5", b"77"), header.replace(b'"6"', b'"0"'), header.replace(b'"t"', b'"\\""')]
    variants += [header.replace(b"6", b"6\\u0002"), header.replace(b"3", b"03"), header.replace(b"0}", b"00}")]
    for variant in variants:
        assert outcome(frame(variant), parser) == outcome(frame(variant), FrameParser()), variant


def test_the_headers_of_usual_clients_get_a_template() -> None:
    stamp = 1700000000001
    for code in (310, 10):
        for serializer in ("json", "binary"):
            numbers, texts, _ = VARIABLE[code]
            fields: dict[str, Any] = {**MADE[code], numbers[0]: 77, numbers[1]: stamp, texts[1]: "UNIQ_KEY\x01A0\x02"}
            command = Command.request(code, fields, b"y")
            command.opaque, command.serializer = 123456, serializer  # type: ignore[assignment]
            (read,) = KNOWN.feed(encode(command))
            assert isinstance(read, TemplateRequest)
            assert read.values == [b"77", str(stamp).encode(), b"topic", b"UNIQ_KEY\x01A0\x02"] or read.values == (
                b"77", str(stamp).encode(), b"topic", b"UNIQ_KEY\x01A0\x02"
            )  # fmt: skip
            assert seen(read) == seen(decode(encode(command)[4:]))
    as_fastjson = json.dumps(
        {"code": 310, "extFields": {**MADE[310], "e": "3"}, "flag": 0, "language": "JAVA", "opaque": 9, "version": 401}
    ).encode()
    parser = trained([frame(as_fastjson)])
    assert isinstance(parser.feed(frame(as_fastjson.replace(b": 9", b": 10")))[0], TemplateRequest)


def test_the_counted_size_of_a_request_covers_its_own_values() -> None:
    """Not those of the header that the template was made from: a sender could have far more held than is counted."""
    for serializer in ("json", "binary"):
        fields: dict[str, Any] = {**MADE[310], "i": "KEYS\x01" + 50_000 * "k" + "\x02"}
        command = Command.request(310, fields, 3000 * b"y")
        command.serializer = serializer  # type: ignore[assignment]
        (read,) = KNOWN.feed(encode(command))
        assert isinstance(read, TemplateRequest)
        assert 53_000 < size_of(read) < 2 * size_of(decode(encode(command)[4:]))


def test_a_template_may_lack_a_variable_field() -> None:
    for serializer in ("json", "binary"):
        data = sample(310, serializer, without="g")
        parser = trained([data])
        (read,) = parser.feed(data)
        assert isinstance(read, TemplateRequest) and read.values[1] is None
        assert seen(read) == seen(decode(data[4:]))


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_texts_that_differ_only_in_their_key_share_the_rest(serializer: str) -> None:
    def read(text: str) -> TemplateRequest:
        command = Command.request(310, {**MADE[310], "i": text}, b"y")
        command.serializer = serializer  # type: ignore[assignment]
        (request,) = parser.feed(encode(command))
        assert isinstance(request, TemplateRequest) and request.ext_fields["i"] == text
        return request

    parser = trained([sample(310, serializer)])
    read("A\x01b\x02KEY\x010A1B\x02WAIT\x01true\x02")  # the first text with a key
    first, second = (read(f"A\x01b\x02KEY\x01{key}\x02WAIT\x01true\x02") for key in ("0A1C", "FFFF"))
    assert (first.key, second.key) == (b"0A1C", b"FFFF")
    assert first.common is second.common and first.common == b"A\x01b\x02KEY\x01\x02WAIT\x01true\x02"
    for other in ("0A\x01B", "0A-B", "", "0A\x02KEY\x01B"):
        request = read(f"A\x01b\x02KEY\x01{other}\x02WAIT\x01true\x02")
        assert request.key is None and request.common is None
    assert read("A\x01b\x02KEY\x010A1D\x02WAIT\x01true\x02").key == b"0A1D"
    for _ in range(8):
        last = read("KEY\x01END1")
    assert last.key == b"END1" and last.common == b"KEY\x01"


@pytest.mark.parametrize("text", ["KEY\x01a\x02KEY\x01b\x02", "XKEY\x01a\x02", "KEY\x01\x02", "NOKEY\x02"])
def test_texts_without_one_plain_key_are_read_whole(text: str) -> None:
    parser = trained([sample(310, "json")])
    command = Command.request(310, {**MADE[310], "i": text}, b"y")
    for _ in range(5):
        (request,) = parser.feed(encode(command))
        assert isinstance(request, TemplateRequest) and request.key is None and request.ext_fields["i"] == text


def test_other_request_codes_get_no_template() -> None:
    parser = FrameParser(variable=VARIABLE)
    for _ in range(70):
        (read,) = parser.feed(encode(Command.request(11, {"e": 1})))
        assert type(read) is Command


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_a_header_marked_as_the_other_serializer_is_not_read_by_the_template(serializer: str) -> None:
    command = Command.request(10, MADE[10], b"body")
    command.serializer = serializer
    frame = encode(command)
    parser = trained([frame])
    other_kind = frame[:4] + bytes([frame[4] ^ 1]) + frame[5:]
    error = outcome(other_kind, parser)
    assert isinstance(error, str) and error == outcome(other_kind, FrameParser())
