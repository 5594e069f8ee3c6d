"""The incremental parser: any split of the stream gives the same commands; garbage is detected at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.remoting import Command, FrameError, FrameParser, encode
from node.remoting.codec import MAX_PIECES

COMMANDS = st.lists(
    st.builds(
        Command,
        code=st.integers(0, 400),
        ext_fields=st.dictionaries(st.text("abc", max_size=3), st.text("xyz", max_size=9), max_size=3),
        body=st.binary(max_size=300),
        opaque=st.integers(0, 1000),
        serializer=st.sampled_from(["json", "binary"]),
    ),
    max_size=8,
)


@given(COMMANDS, st.data())
def test_any_chunks_give_the_same_commands(commands: list[Command], data: st.DataObject) -> None:
    stream = b"".join(map(encode, commands))
    parser = FrameParser()
    seen: list[Command] = []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, min(len(stream) - at, 400)))
        seen += parser.feed(stream[at : at + size])
        at += size
        assert parser.pending_bytes == at - sum(len(encode(command)) for command in seen)
    assert seen == commands
    assert parser.pending_bytes == 0


def test_a_stream_fed_byte_by_byte_gives_the_same_commands() -> None:
    commands = [Command(code, {"n": str(code)}, b"x" * code) for code in range(20)]
    parser = FrameParser()
    stream = b"".join(map(encode, commands))
    assert [c for i in range(len(stream)) for c in parser.feed(stream[i : i + 1])] == commands


@given(st.lists(st.integers(1, 3000), min_size=1), st.integers(1, 200))
def test_an_incomplete_frame_is_held_in_few_pieces(sizes: list[int], repeats: int) -> None:
    command = Command(7, body=b"x" * 200_000)
    stream, parser = encode(command), FrameParser()
    at = 0
    for size in sizes * repeats:
        if at + size >= len(stream):
            break
        assert parser.feed(stream[at : at + size]) == []
        at += size
        assert len(parser._pieces) <= MAX_PIECES + 20 and sum(map(len, parser._pieces)) == parser.pending_bytes == at
    assert parser.feed(stream[at:]) == [command]


@pytest.mark.parametrize("start", ["00000003", "00000000", "ffffffff", "80000000", "01000001", "7fffffff"])
def test_an_impossible_length_is_refused_as_soon_as_its_four_bytes_are_read(start: str) -> None:
    data = bytes.fromhex(start)
    parser = FrameParser()
    assert parser.feed(data[:3]) == []
    with pytest.raises(FrameError, match="frame length"):
        parser.feed(data[3:])


@pytest.mark.parametrize(
    "start",
    [
        "00000010" "0000000d",  # header of 13 in a frame of 16 (12 would fit)
        "00000010" "02000004",  # serializer 2
        "00000010" "ff000004",
        "00ffffff" "00100001",  # header over one mebibyte
    ],
)  # fmt: skip
def test_impossible_header_words_are_refused_before_the_frame_is_complete(start: str) -> None:
    with pytest.raises(FrameError):
        FrameParser().feed(bytes.fromhex(start))


def test_the_largest_frame_length_is_accepted_and_reserves_nothing() -> None:
    parser = FrameParser()
    assert parser.feed(bytes.fromhex("010000000000000a") + b"x") == []
    assert parser.pending_bytes == 9


def test_commands_before_garbage_are_not_lost() -> None:
    good = [Command(1, opaque=1), Command(2, opaque=2)]
    parser = FrameParser()
    with pytest.raises(FrameError) as caught:
        parser.feed(b"".join(map(encode, good)) + b"GET / HTTP/1.1\r\n\r\n")
    assert caught.value.commands == good


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_garbage_raises_only_frame_error_and_buffers_no_more_than_was_fed(chunks: list[bytes]) -> None:
    parser = FrameParser(max_frame_bytes=1000)
    fed_bytes = 0
    for chunk in chunks:
        fed_bytes += len(chunk)
        try:
            parser.feed(chunk)
        except FrameError:
            return
        assert parser.pending_bytes <= min(fed_bytes, 1004)
