"""Commands to bytes and back: the frame, the JSON header, the binary header.

A frame is a 4-byte length (not counting itself), a 4-byte word of serializer (high byte: 0 JSON, 1 binary)
and header length (low three bytes), the header, the body; all big-endian. This module is on the path of
every message, so the JSON header is written by hand and read by the bare C scanner.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from json.decoder import JSONDecoder
from json.encoder import encode_basestring_ascii as _quote
from json.scanner import c_make_scanner  # type: ignore[attr-defined]
from struct import Struct
from typing import Any, Final

from node.remoting.codes import PROTOCOL_VERSION, LanguageCode
from node.remoting.command import Command, FrameError
from node.remoting.header_layout import LayoutTable
from node.remoting.header_template import HeaderTemplate, TemplateRequest, VariableFields, make_template

__all__ = ["MAX_FRAME_BYTES", "MAX_HEADER_BYTES", "FrameParser", "decode", "encode"]

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""Largest value of a frame's length word: RocketMQ's own decoder stops here (R), and messages are 4 MB."""
MAX_HEADER_BYTES: Final = 1024 * 1024
"""Largest header. The largest honest one carries 32,767 bytes of message properties, at worst six bytes
each when escaped in JSON: 200 KB."""

_JSON: Final = 0
_BINARY: Final = 1
_PREFIX: Final = Struct(">iI")
_LENGTH: Final = Struct(">i")
_WORD: Final = Struct(">I")
_FIXED: Final = Struct(">hbhiii")  # code, language, version, opaque, flag, remark length
_BARE: Final = Struct(">iIhbhiiii")  # prefix and binary header of a command with neither remark nor fields
_BARE_HEADER: Final = Struct(">hbhiiii")  # the same without the prefix
_BARE_WORD: Final = 1 << 24 | _BARE_HEADER.size
_SHORT: Final = Struct(">h")
_INT: Final = Struct(">i")
_I32_MIN: Final = -(2**31)
_I32_MAX: Final = 2**31 - 1

_BARE_REST_BYTES: Final = 4 + _BARE_HEADER.size
_BARE_BYTES: Final = _BARE.size
_BARE_BODY_BYTES: Final = MAX_FRAME_BYTES - _BARE_REST_BYTES

MAX_TEMPLATES: Final = 8
"""Header templates that one parser keeps: a client uses one or two. The oldest is dropped when there are more."""
MAX_PIECES: Final = 16
"""Pieces of an incomplete frame that are kept as they are; of more, small ones are joined, so that a peer that sends
single bytes does not make each of them an object."""
LEARN_AT: Final = frozenset(2**power for power in range(1, 20))
"""A template is made from the second, fourth, eighth ... header that had to be decoded: making one costs as much as
decoding hundreds, and must stay cheap for a client whose headers have no template."""

_scan = JSONDecoder().scan_once if c_make_scanner is not None else None  # type: ignore[attr-defined]
"""None on PyPy, where the scanner is pure Python and json.loads is ten times as fast."""
_language_names: Final = {int(code): code.name for code in LanguageCode}
_language_codes: Final = {code.name: int(code) for code in LanguageCode}


def encode(command: Command) -> bytes:
    """The whole frame of a command. Raises FrameError when it does not fit the protocol's limits."""
    if command.serializer == "json":
        header = _json_header(command)
        word = len(header)
    elif not command.ext_fields and command.remark is None and len(command.body) < _BARE_BODY_BYTES:
        body = command.body  # nothing else: members of a group exchange such frames
        try:
            return (
                _BARE.pack(
                    _BARE_REST_BYTES + len(body), _BARE_WORD,
                    command.code, command.language, command.version, command.opaque, command.flag, 0, 0,
                )
                + body
            )  # fmt: skip
        except struct.error as error:
            raise FrameError(f"a command with code {command.code} does not fit the binary header: {error}") from None
    else:
        header = _binary_header(command)
        word = _BINARY << 24 | len(header)
    body = command.body
    length = 4 + len(header) + len(body)
    if length > MAX_FRAME_BYTES or len(header) > MAX_HEADER_BYTES:
        raise FrameError(
            f"a command of {length} bytes with a header of {len(header)} exceeds the frame limit of "
            f"{MAX_FRAME_BYTES} or the header limit of {MAX_HEADER_BYTES}"
        )
    return _PREFIX.pack(length, word) + header + body


def _json_header(command: Command) -> bytes:
    language = _language_names.get(command.language, "OTHER")
    text = (
        f'{{"code":{command.code},"flag":{command.flag},"language":"{language}","opaque":{command.opaque},'
        f'"serializeTypeCurrentRPC":"JSON","version":{command.version}'
    )
    fields = command.ext_fields
    if fields:
        pairs = ",".join([_quote(name) + ":" + _quote(value) for name, value in fields.items()])
        text = f'{text},"extFields":{{{pairs}}}'
    if command.remark is not None:
        text = f'{text},"remark":{_quote(command.remark)}'
    return (text + "}").encode("ascii")


def _binary_header(command: Command) -> bytes:
    # "replace": a lone surrogate can arrive through a JSON escape but cannot be encoded in UTF-8.
    remark = (command.remark or "").encode("utf-8", "replace")
    parts: list[bytes] = []
    try:
        for name, value in command.ext_fields.items():
            key = name.encode("utf-8", "replace")
            data = value.encode("utf-8", "replace")
            parts += (_SHORT.pack(len(key)), key, _INT.pack(len(data)), data)
        fields = b"".join(parts)
        fixed = _FIXED.pack(command.code, command.language, command.version, command.opaque, command.flag, len(remark))
    except struct.error as error:
        raise FrameError(f"a command with code {command.code} does not fit the binary header: {error}") from None
    return b"%b%b%b%b" % (fixed, remark, _INT.pack(len(fields)), fields)


def decode(frame: bytes) -> Command:
    """The command in a frame without its length prefix: serializer word, header, body. Raises FrameError."""
    if len(frame) < 4:
        raise FrameError(f"a frame of {len(frame)} bytes has no header word")
    (word,) = _WORD.unpack_from(frame)
    header_end = 4 + (word & 0xFFFFFF)
    if header_end > len(frame):
        raise FrameError(f"a header of {word & 0xFFFFFF} bytes in a frame of {len(frame)}")
    return _decode_header(word >> 24, frame[4:header_end], frame[header_end:])


def _decode_header(serializer: int, header: bytes, body: bytes) -> Command:
    if serializer == _JSON:
        return _decode_json(header, body)
    if serializer == _BINARY:
        return _decode_binary(header, body)
    raise FrameError(f"unknown serializer {serializer}")


def _decode_json(header: bytes, body: bytes) -> Command:
    try:
        text = header.decode()
        try:
            values, end = _scan(text, 0) if _scan is not None else (json.loads(text), len(text))
        except StopIteration:
            values, end = json.loads(text), len(text)  # leading white space, or an error worth its message
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is no JSON: {str(error)[:120]}") from None
    if values.__class__ is not dict:
        raise FrameError("the header is no JSON object")
    if end != len(text) and text[end:].strip():
        raise FrameError("bytes behind the header's JSON object")
    get = values.get
    code = get("code")
    opaque = get("opaque", 0)
    flag = get("flag", 0)
    version = get("version", PROTOCOL_VERSION)
    if code.__class__ is not int or not _I32_MIN <= code <= _I32_MAX:
        code = _whole_number("code", code)
    if opaque.__class__ is not int or not _I32_MIN <= opaque <= _I32_MAX:
        opaque = _whole_number("opaque", opaque)
    if flag.__class__ is not int or not _I32_MIN <= flag <= _I32_MAX:
        flag = _whole_number("flag", flag)
    if version.__class__ is not int or not 0 <= version <= 0x7FFF:
        version = _whole_number("version", version) & 0x7FFF
    language = get("language")
    number = _language_codes.get(language) if language.__class__ is str else None
    if number is None:
        number = language if language.__class__ is int and language in _language_names else LanguageCode.OTHER.value
    remark = get("remark")
    if remark is not None and remark.__class__ is not str:
        remark = _json_text(remark)
    fields = get("extFields")
    if fields is None:
        fields = {}
    elif fields.__class__ is not dict:
        raise FrameError("extFields is no JSON object")
    else:
        try:
            "".join(fields.values())  # the quickest check that all are strings
        except TypeError:
            fields = {
                name: value if value.__class__ is str else _json_text(value)
                for name, value in fields.items()
                if value is not None
            }
    return Command(code, fields, body, opaque, flag, remark, number, version, "json")


def _whole_number(name: str, value: object) -> int:
    """A header number that is not a plain JSON int: digits in a string pass, as does null for zero."""
    if value is None and name != "code":
        return 0
    if isinstance(value, str) and len(value) <= 11:
        try:
            value = int(value)
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool) and _I32_MIN <= value <= _I32_MAX:
        return value
    raise FrameError(f"the header's {name} is no 32-bit number: {str(value)[:40]!r}")


def _json_text(value: Any) -> str:
    """Text of a JSON value found where a string is expected: numbers in decimal, true and false, and
    anything else as compact JSON (which is what RocketMQ's own JSON library makes of it)."""
    if value is True:
        return "true"
    if value is False:
        return "false"
    try:
        return json.dumps(value, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header value cannot be read: {str(error)[:120]}") from None


def _decode_binary(header: bytes, body: bytes) -> Command:
    size = len(header)
    if size < _FIXED.size:
        raise FrameError(f"a binary header of {size} bytes")
    code, language, version, opaque, flag, remark_size = _FIXED.unpack_from(header)
    at = _FIXED.size
    if not 0 <= remark_size <= size - at:
        raise FrameError(f"a remark of {remark_size} bytes in a binary header of {size}")
    fields: dict[str, str] = {}
    try:
        remark = header[at : at + remark_size].decode() if remark_size else None
        at += remark_size
        if size - at >= 4:  # a peer with neither remark nor fields may leave the field length out
            (fields_size,) = _INT.unpack_from(header, at)
            at += 4
            if fields_size != size - at:
                raise FrameError(f"fields of {fields_size} bytes where {size - at} are left of the header")
        elif size != at:
            raise FrameError("a binary header ends inside its field length")
        while at < size:
            at = _read_field(header, at, size, fields)
    except UnicodeDecodeError as error:
        raise FrameError(f"a binary header holds text that is no UTF-8: {error.reason}") from None
    return Command(code, fields, body, opaque, flag, remark, language, version, "binary")


def _read_field(header: bytes, at: int, size: int, fields: dict[str, str]) -> int:
    if size - at < 2:
        raise FrameError("a binary header ends inside a field name's length")
    (key_size,) = _SHORT.unpack_from(header, at)
    at += 2
    if not 0 <= key_size <= size - at - 4:
        raise FrameError(f"a field name of {key_size} bytes where {size - at} are left of the header")
    key_end = at + key_size
    (value_size,) = _INT.unpack_from(header, key_end)
    value_at = key_end + 4
    if not 0 <= value_size <= size - value_at:
        raise FrameError(f"a field value of {value_size} bytes where {size - value_at} are left of the header")
    value_end: int = value_at + value_size
    fields[header[at:key_end].decode()] = header[value_at:value_end].decode()
    return value_end


class FrameParser:
    """Turns a byte stream, cut anywhere, into commands.

    It holds at most one unfinished frame, and of that only the bytes that really arrived: a length word
    reserves nothing. Lengths are checked as soon as they arrive, before the frame is complete.

    For requests whose codes are in `variable` it learns `header_template`s and their layouts; requests read by
    these are returned as TemplateRequests.
    """

    __slots__ = (
        "_max_bare_bytes",
        "_max_frame_bytes",
        "_max_header_bytes",
        "_needed_bytes",
        "_pieces",
        "_templates",
        "_variable",
        "_without_template",
        "layouts",
        "pending_bytes",
    )  # fmt: skip

    def __init__(
        self,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_header_bytes: int = MAX_HEADER_BYTES,
        variable: Mapping[int, VariableFields] | None = None,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._max_header_bytes = max_header_bytes
        self._max_bare_bytes = max_frame_bytes if max_header_bytes >= _BARE_HEADER.size else 0
        self._variable: Mapping[int, VariableFields] = {} if variable is None else variable
        self._templates: list[HeaderTemplate] = []
        self.layouts = LayoutTable()
        """Layouts of headers that are much alike; others may only read it."""
        self._without_template = 0
        self._pieces: list[bytes] = []
        """A frame that is not complete yet, as it was received: appending to a bytearray costs PyPy ten times as much
        as joining what a frame consists of."""
        self.pending_bytes = 0
        """Bytes held of a frame that is not complete yet; others may only read it."""
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[Command]:
        """Take the next bytes; return the commands that they complete, in order.

        Raises FrameError on bytes that cannot be a frame, with the commands before them in its `commands`;
        the stream has no known frame boundary after that, so the parser must not be fed again.
        """
        if self.pending_bytes:
            self._add_piece(data)
            if self.pending_bytes < self._needed_bytes:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
            self.pending_bytes = 0
        size = len(data)
        if size >= _BARE_BYTES and not self._templates:
            length, word, code, language, version, opaque, flag, remark_size, fields_size = _BARE.unpack_from(data)
            if (
                word == _BARE_WORD and length == size - 4 and not remark_size and not fields_size
                and length <= self._max_bare_bytes
            ):  # fmt: skip
                body = data[_BARE_BYTES:]  # nearly all that members of a group send each other is one such frame
                return [Command(code, {}, body, opaque, flag, None, language, version, "binary")]
        commands: list[Command] = []
        at = 0
        try:
            while size - at >= 8:
                length, word = _PREFIX.unpack_from(data, at)
                header_size = word & 0xFFFFFF
                if not 4 <= length <= self._max_frame_bytes:
                    raise FrameError(f"a frame length of {length}")
                if header_size > length - 4:
                    raise FrameError(f"a header of {header_size} bytes in a frame of {length}")
                if header_size > self._max_header_bytes:
                    raise FrameError(f"a header of {header_size} bytes")
                serializer = word >> 24
                if serializer > _BINARY:
                    raise FrameError(f"unknown serializer {serializer}")
                end = at + 4 + length
                if end > size:
                    break
                body_at = at + 8 + header_size
                if self._templates:
                    requests = self.layouts.requests(data, at, end) or self._by_template(
                        serializer, data, at + 8, body_at, end
                    )
                    if requests:
                        commands += requests
                        at += (end - at) * len(requests)
                        continue
                if word == _BARE_WORD:
                    code, language, version, opaque, flag, remark_size, fields_size = _BARE_HEADER.unpack_from(
                        data, at + 8
                    )
                    if not remark_size and not fields_size:
                        body = data[body_at:end]
                        commands.append(Command(code, {}, body, opaque, flag, None, language, version, "binary"))
                        at = end
                        continue
                command = _decode_header(serializer, data[at + 8 : body_at], data[body_at:end])
                commands.append(command)
                if command.code in self._variable:
                    self._learn(serializer, data[at + 8 : body_at], command)
                at = end
            if at < size:
                self._keep(data, at, size)
        except FrameError as error:
            error.commands = commands
            raise
        return commands

    def _by_template(self, serializer: int, data: bytes, start: int, body_at: int, end: int) -> list[TemplateRequest]:
        for template in self._templates:
            if template.is_json == (serializer == _BINARY):
                continue
            request = template.request(data, start, body_at, end)
            if request is not None:
                self.layouts.learn(data[start - 4 : start], template, data[start:body_at])
                return [request]
        return []

    def _learn(self, serializer: int, header: bytes, command: Command) -> None:
        self._without_template += 1
        if self._without_template in LEARN_AT:
            variable = self._variable[command.code]
            template = make_template(header, command, variable, lambda other: _decode_header(serializer, other, b""))
            if template is not None:
                self._templates = [template, *self._templates[: MAX_TEMPLATES - 1]]

    def _keep(self, data: bytes, at: int, size: int) -> None:
        rest = size - at
        if rest < 4:
            self._needed_bytes = 4
        else:
            (length,) = _LENGTH.unpack_from(data, at)
            if not 4 <= length <= self._max_frame_bytes:
                raise FrameError(f"a frame length of {length}")
            self._needed_bytes = 8 if rest < 8 else 4 + length
        self._add_piece(data[at:] if at else data)

    def _add_piece(self, data: bytes) -> None:
        pieces = self._pieces
        pieces.append(data)
        self.pending_bytes += len(data)
        if len(pieces) > MAX_PIECES:  # each byte is copied once for every doubling of the rest
            while len(pieces) > 1 and len(pieces[-2]) <= 2 * len(pieces[-1]):
                pieces[-2:] = [pieces[-2] + pieces[-1]]
