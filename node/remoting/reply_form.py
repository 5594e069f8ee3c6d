"""Frames of replies that differ in little: those to sends, of which a broker gives tens of thousands a second.

A form is a successful reply without body and remark whose fields have the same names each time, the last ones the same
values too. Its frames are those that `encode` makes of such a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as _quote
from struct import Struct

from node.remoting.codec import encode
from node.remoting.codes import ResponseCode
from node.remoting.command import FLAG_RESPONSE, Command

__all__ = ["ReplyForm"]

_OPAQUE = 1_234_567_890
"""Stands for the opaque in the frame that a form is cut out of."""
_BINARY_HEAD = Struct(">iIhbhiiii")  # prefix, fixed part of the header with an empty remark, size of the fields
_SHORT = Struct(">h")
_INT = Struct(">i")
_PREFIX = Struct(">iI")
_BINARY_WORD = 1 << 24
_BINARY_FIXED_BYTES = _BINARY_HEAD.size - _PREFIX.size


class ReplyForm:
    """Replies with fields `names`, plain words, whose values are given each time, and with `told` behind them."""

    def __init__(self, names: Sequence[str], told: Mapping[str, str]) -> None:
        sample = Command(ResponseCode.SUCCESS, {**dict.fromkeys(names, ""), **told}, b"", _OPAQUE, FLAG_RESPONSE)
        self._language, self._version = sample.language, sample.version
        text = encode(sample)[_PREFIX.size :].decode("ascii").replace("%", "%%")
        text = text.replace(f'"opaque":{_OPAQUE}', '"opaque":%d')
        for name in names:
            text = text.replace(f'"{name}":""', f'"{name}":%s', 1)
        self._json = text
        self._names = [_SHORT.pack(len(name.encode())) + name.encode() for name in names]
        self._told = b"".join(
            _SHORT.pack(len(name.encode())) + name.encode() + _INT.pack(len(value.encode())) + value.encode()
            for name, value in told.items()
        )

    def frame(self, command: Command, values: Sequence[str]) -> bytes:
        """The frame of the reply to `command` with these values."""
        if command.serializer == "json":
            return self.json_frame(command.opaque, values)
        return self.binary_frame(command.opaque, values)

    def json_frame(self, opaque: int, values: Sequence[str]) -> bytes:
        """The frame with a JSON header."""
        header = (self._json % (opaque, *map(_quote, values))).encode("ascii")
        return _PREFIX.pack(4 + len(header), len(header)) + header

    def binary_frame(self, opaque: int, values: Sequence[str]) -> bytes:
        """The frame with a binary header."""
        parts = [b""]
        for name, value in zip(self._names, values, strict=True):
            data = value.encode("utf-8", "replace")
            parts += (name, _INT.pack(len(data)), data)
        parts.append(self._told)
        size = sum(map(len, parts))
        header_size = _BINARY_FIXED_BYTES + size
        parts[0] = _BINARY_HEAD.pack(
            4 + header_size, _BINARY_WORD | header_size, ResponseCode.SUCCESS, self._language, self._version, opaque,
            FLAG_RESPONSE, 0, size,
        )  # fmt: skip
        return b"".join(parts)
