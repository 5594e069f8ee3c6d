"""Frames of replies that differ little: those to sends, of which a broker gives tens of thousands a second.

A template is a reply without a body: its fields always have the same names, and the last ones the same values too. Its
frames are those that `encode` makes of such a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as _quote
from struct import Struct

from node.remoting.codec import encode
from node.remoting.codes import ResponseCode
from node.remoting.command import FLAG_RESPONSE, Command

__all__ = ["ReplyTemplate", "framed"]

_OPAQUE = 1_234_567_890
"""Stands for the opaque in the encoded sample from which a template is made."""
_SHORT = Struct(">h")
_INT = Struct(">i")
_PREFIX = Struct(">iI")
_BINARY_FIXED = Struct(">hbhii")
"""Code, language, version, opaque, flag; remark and fields follow."""
_BINARY_WORD = 1 << 24


def framed(header: bytes) -> tuple[bytes, bytes]:
    """The frame of a JSON header without a body, in two pieces."""
    return _PREFIX.pack(4 + len(header), len(header)), header


class ReplyTemplate:
    """Replies with fields `names`, plain words, whose values vary, followed by the constant fields `common`."""

    def __init__(
        self,
        names: Sequence[str],
        common: Mapping[str, str],
        *,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
    ) -> None:
        fields = {**dict.fromkeys(names, ""), **common}
        sample = Command(code, fields, b"", _OPAQUE, FLAG_RESPONSE, remark)
        self._code, self._language, self._version = code, sample.language, sample.version
        text = encode(sample)[_PREFIX.size :].decode("ascii").replace("%", "%%")
        text = text.replace(f'"opaque":{_OPAQUE}', '"opaque":%s')
        for name in names:
            text = text.replace(f'"{name}":""', f'"{name}":%s', 1)
        self._json = text
        self._names = [_SHORT.pack(len(name.encode())) + name.encode() for name in names]
        self._common = b"".join(
            _SHORT.pack(len(name.encode())) + name.encode() + _INT.pack(len(value.encode())) + value.encode()
            for name, value in common.items()
        )
        written = (remark or "").encode("utf-8", "replace")
        self._remark = _INT.pack(len(written)) + written

    def frame(self, command: Command, values: Sequence[str]) -> bytes:
        """The frame of the reply to `command` with these values."""
        if command.serializer == "json":
            return self.json_frame(command.opaque, values)
        return self.binary_frame(command.opaque, values)

    def json_frame(self, opaque: int, values: Sequence[str]) -> bytes:
        """The frame with a JSON header."""
        return b"".join(framed((self._json % (opaque, *map(_quote, values))).encode("ascii")))

    def json_format(self, patterns: Sequence[str]) -> bytes:
        """A JSON header as a %-format: for the opaque, a number, and for what `patterns`, the formats of the values,
        take; no value may need an escape. `framed` makes a frame of the result."""
        return (self._json.replace("%%", "%%%%") % ("%d", *[f'"{pattern}"' for pattern in patterns])).encode("ascii")

    def binary_frame(self, opaque: int, values: Sequence[str]) -> bytes:
        """The frame with a binary header."""
        fields = [b""]
        for name, value in zip(self._names, values, strict=True):
            data = value.encode("utf-8", "replace")
            fields += (name, _INT.pack(len(data)), data)
        fields.append(self._common)
        size = sum(map(len, fields))
        fields[0] = (
            _BINARY_FIXED.pack(self._code, self._language, self._version, opaque, FLAG_RESPONSE)
            + self._remark + _INT.pack(size)
        )  # fmt: skip
        header_size = len(fields[0]) + size
        return _PREFIX.pack(4 + header_size, _BINARY_WORD | header_size) + b"".join(fields)
