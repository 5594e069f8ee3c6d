"""Request headers read by a template: what a client's headers have in common is parsed once, the rest by a regular
expression.

The headers of one client's sends differ in a few fields only (opaque, queue, time, properties). A template is made from
one such header that the decoder has read: its bytes, with a group for each value that may differ. Headers that match
are read by it; everything else, and everything unusual (escapes, signs, text beyond ASCII), takes the slow path, the
decoder. Both give the same result: decoding the header with probe values proved that the values are where they seem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from node.remoting.command import Command, FrameError

__all__ = ["HeaderTemplate", "TemplateRequest", "VariableFields", "make_template"]

MAX_TEMPLATE_HEADER_BYTES: Final = 4096
"""Longer headers are decoded: templates are for the many small ones, and the interpreter caches the last 512 patterns
that it has compiled, some 20 kB each for the longest."""

MAX_TEXTS: Final = 256
"""Values of texts (topics, in sends) that are remembered for layouts; all are dropped when there are more."""
MAX_TEXT_BYTES: Final = 255
"""Longer values are not remembered."""

REQUEST_BYTES: Final = 512
"""What a request costs besides its text and body: the objects that hold it."""

_SEPARATORS: Final = ((b"\\u0001", b"\x01"), (b"\\u0002", b"\x02"))
_VALUE_END: Final = b"\x02"
_PROBE_OPAQUE: Final = 918_273_645
_PROBE_NUMBER: Final = b"718293645546"
_PROBE_TEXT: Final = b"zQ7~probe"
_JSON_OPAQUE: Final = re.compile(rb'"opaque"\s*:\s*(0|[1-9][0-9]{0,8})(?=\s*[,}])')
_BINARY_FIXED: Final = Struct(">hbhiiii")
_SHORT: Final = Struct(">h")
_INT: Final = Struct(">i")
_OPAQUE_AT, _FLAG_AT, _FIELDS_SIZE_AT = 5, 9, 17
_ABSENT: Final = b"(?:(?!)())?"
"""A group that never matches."""

Decode = Callable[[bytes], Command]
"""The slow path: a header to its command, without a body. Raises FrameError."""


class VariableFields(NamedTuple):
    """Names of the extension fields whose values differ between requests: whole numbers, and texts."""

    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    key_name: bytes = b""
    """What precedes a key in the last of the texts, which is otherwise often the same; a key ends with \\x02."""


class HeaderTemplate:
    """Headers of one request code that differ only in opaque and in the values of `variable`."""

    __slots__ = (
        "_escapes", "_fields", "_key_end", "_key_name", "_match", "_names", "_order", "code", "is_json",
        "language", "number_count", "serializer", "texts", "version",
    )  # fmt: skip

    def __init__(self, sample: Command, variable: VariableFields, pattern: bytes, order: Sequence[int]) -> None:
        self.code = sample.code
        self.language = sample.language
        self.version = sample.version
        self.serializer = sample.serializer
        self._fields: Mapping[str, str] = dict(sample.ext_fields)
        self._names = variable.numbers + variable.texts
        self.number_count = len(variable.numbers)
        self._order = tuple(order)
        self.is_json = sample.serializer == "json"
        """Whether the serializer is JSON; the frame's word tells it, the header itself does not."""
        self._match = re.compile(pattern, re.DOTALL).fullmatch
        self._escapes = _SEPARATORS if self.is_json else ()
        self._key_name, self._key_end = variable.key_name, _VALUE_END
        for escape, character in self._escapes:
            self._key_name = self._key_name.replace(character, escape)
            self._key_end = self._key_end.replace(character, escape)
        self.texts: dict[bytes, bytes] = {}
        """Texts before the last one that were read and stand in the header unescaped: a layout accepts only these."""

    def request(self, data: bytes, start: int, body_at: int, end: int) -> TemplateRequest | None:
        """The request whose header is `data[start:body_at]` and whose body ends at `end`; None if it has to take the
        slow path."""
        found = self._match(data, start, body_at)
        if found is None:
            return None
        if self.is_json:
            opaque_text, *values = found.group(*self._order)
            opaque = int(opaque_text)
        else:
            opaque_bytes, fields_bytes, *pairs = found.group(*self._order)
            if not _sizes_agree(fields_bytes, pairs, body_at - start):
                return None
            (opaque,), values = _INT.unpack(opaque_bytes), pairs[1::2]
        for at in range(self.number_count, len(values)):
            raw = values[at]
            if raw is None:
                continue
            text = values[at] = self.plain(raw)
            if self.is_json and b"\\" in text:
                return None
            if text == raw and len(raw) <= MAX_TEXT_BYTES and at < len(values) - 1:
                if len(self.texts) >= MAX_TEXTS:
                    self.texts.clear()
                self.texts[raw] = text
        return TemplateRequest(self, opaque, values, None, None, data[body_at:end], end - start + REQUEST_BYTES)

    def plain(self, raw: bytes) -> bytes:
        """A text of a header without its escapes; only those that clients write are replaced."""
        for escape, character in self._escapes:
            raw = raw.replace(escape, character)
        return raw

    def spans(self, header: bytes) -> list[tuple[int, int]] | None:
        """Spans of opaque, numbers and texts in a header that was read; None if one is absent, or a number is unquoted
        and so could not begin with a zero."""
        found = self._match(header)
        places = self._order if self.is_json else (self._order[0], *self._order[3::2])
        spans = [found.span(place) for place in places] if found is not None else []
        numbers = spans[1 : self.number_count + 1]
        is_quoted = not self.is_json or all(header[start - 1 : start] == b'"' for start, _ in numbers)
        return spans if is_quoted and spans and (-1, -1) not in spans else None

    def key_span(self, raw: bytes) -> tuple[int, int] | None:
        """Span of the only key in a last text; None unless it is written there as clients do."""
        at = raw.find(self._key_name) if self._key_name else -1
        if at < 0 or not (at == 0 or raw[:at].endswith(self._key_end)) or raw.count(self._key_name) != 1:
            return None
        start = at + len(self._key_name)
        key = raw[start:].partition(self._key_end)[0]
        return (start, start + len(key)) if key.isalnum() else None

    def fields(self, values: Sequence[bytes | None]) -> dict[str, str]:
        """All fields of a header whose variable fields have these values."""
        fields = dict(self._fields)
        for name, value in zip(self._names, values, strict=True):
            if value is not None:
                fields[name] = value.decode("ascii")
        return fields


def _sizes_agree(fields_bytes: bytes, pairs: Sequence[bytes | None], header_bytes: int) -> bool:
    """Whether the sizes in a binary header match its contents; `pairs` are sizes and values."""
    if _INT.unpack(fields_bytes)[0] != header_bytes - _BINARY_FIXED.size:
        return False
    for size, value in zip(pairs[::2], pairs[1::2], strict=True):
        if size is not None and value is not None and int.from_bytes(size, "big") != len(value):
            return False
    return True


class TemplateRequest(Command):
    """A request that was read by its template: its fields are built when first used."""

    __slots__ = ("_made", "common", "key", "size_bytes", "template", "values")

    flag = 0
    remark = None

    def __init__(
        self,
        template: HeaderTemplate,
        opaque: int,
        values: Sequence[bytes | None],
        common: bytes | None,
        key: bytes | None,
        body: bytes,
        size_bytes: int,
    ) -> None:
        self.code = template.code
        self.body = body
        self.opaque = opaque
        self.language = template.language
        self.version = template.version
        self.serializer = template.serializer
        self.template = template
        self.values = values
        """Values of the variable fields: ASCII, only digits for a number; None if there is no such field."""
        self.common = common
        """The last of the values without its key, the same object for many requests; None if that is not known."""
        self.key = key
        """The key: letters and digits."""
        self.size_bytes = size_bytes
        """About how many bytes it takes to hold the request."""
        self._made: dict[str, str] | None = None

    @property
    def ext_fields(self) -> dict[str, str]:
        if self._made is None:
            self._made = self.template.fields(self.values)
        return self._made

    @ext_fields.setter
    def ext_fields(self, fields: dict[str, str]) -> None:
        self._made = fields


def make_template(header: bytes, sample: Command, variable: VariableFields, decode: Decode) -> HeaderTemplate | None:
    """The template of a request's header, which decodes to `sample`; None if it has none that is safe."""
    if sample.flag or sample.remark is not None or len(header) > MAX_TEMPLATE_HEADER_BYTES:
        return None
    found = (_json_spots if sample.serializer == "json" else _binary_spots)(header, variable)
    if found is None:
        return None
    spots, probe = found
    expected = {**sample.ext_fields}
    for names, value in ((variable.numbers, _PROBE_NUMBER), (variable.texts, _PROBE_TEXT)):
        expected.update({name: value.decode() for name in names if name in expected})
    try:
        proof = decode(probe)
    except FrameError:
        return None
    if proof.ext_fields != expected or proof.opaque != _PROBE_OPAQUE or proof.code != sample.code or proof.flag:
        return None
    template = _template_of(header, sample, variable, spots)
    read = template.request(header, 0, len(header), len(header))
    if read is None or read.opaque != sample.opaque or read.ext_fields != sample.ext_fields:
        return None
    return template


class _Spot(NamedTuple):
    """A span of a header, the pattern of its values, its value in the probe, and a key for what it holds."""

    start: int
    end: int
    pattern: bytes
    probe: bytes
    key: str


def _template_of(header: bytes, sample: Command, variable: VariableFields, spots: list[_Spot]) -> HeaderTemplate:
    pattern, at, group_of = b"", 0, {}
    for number, spot in enumerate(spots, 1):
        pattern += re.escape(header[at : spot.start]) + spot.pattern
        at = spot.end
        group_of[spot.key] = number
    pattern += re.escape(header[at:]) + _ABSENT
    absent = len(spots) + 1
    keys = ["opaque"]
    if sample.serializer != "json":
        keys.append("fields")
    for name in variable.numbers + variable.texts:
        keys += [f"={name}"] if sample.serializer == "json" else [f"#{name}", f"={name}"]
    return HeaderTemplate(sample, variable, pattern, [group_of.get(key, absent) for key in keys])


def _probed(header: bytes, spots: list[_Spot]) -> bytes:
    probe, at = b"", 0
    for spot in spots:
        probe += header[at : spot.start] + spot.probe
        at = spot.end
    return probe + header[at:]


def _json_spots(header: bytes, variable: VariableFields) -> tuple[list[_Spot], bytes] | None:
    """The variable fields of a JSON header, in the order of the header, and the header with probe values in them."""
    opaque = _JSON_OPAQUE.search(header)
    if opaque is None:
        return None
    spots = [_Spot(*opaque.span(1), b"(0|[1-9][0-9]{0,8})", str(_PROBE_OPAQUE).encode(), "opaque")]
    for name in variable.numbers:
        quoted = re.escape(name.encode())
        found = re.search(rb'"' + quoted + rb'"\s*:\s*(?:"([0-9]{1,18})"|(0|[1-9][0-9]{0,17})(?=\s*[,}]))', header)
        if found is not None:
            pattern = b"([0-9]{1,18})" if found[1] is not None else b"(0|[1-9][0-9]{0,17})"
            spots.append(_Spot(*found.span(found.lastindex or 0), pattern, _PROBE_NUMBER, f"={name}"))
    for name in variable.texts:
        found = re.search(rb'"' + re.escape(name.encode()) + rb'"\s*:\s*"([^"]*)"', header)
        if found is not None:
            spots.append(_Spot(*found.span(1), rb'([^"\x00-\x1f\x7f-\xff]*)', _PROBE_TEXT, f"={name}"))
    spots.sort()
    return spots, _probed(header, spots)


def _binary_spots(header: bytes, variable: VariableFields) -> tuple[list[_Spot], bytes] | None:
    """The same for a binary header without a remark."""
    size = len(header)
    if size < _BINARY_FIXED.size or header[_FLAG_AT:_FIELDS_SIZE_AT] != bytes(_FIELDS_SIZE_AT - _FLAG_AT):
        return None
    spots = [_Spot(_OPAQUE_AT, _FLAG_AT, b"(.{4})", _INT.pack(_PROBE_OPAQUE), "opaque")]
    at, longer = _BINARY_FIXED.size, 0
    variable_of = {
        **{name: (b"([0-9]{1,18})", _PROBE_NUMBER) for name in variable.numbers},
        **{name: (b"([\x01\x02 -~]*)", _PROBE_TEXT) for name in variable.texts},
    }
    while at < size:
        (name_size,) = _SHORT.unpack_from(header, at)
        name_end = at + 2 + name_size
        (value_size,) = _INT.unpack_from(header, name_end)
        end = name_end + 4 + value_size
        place = variable_of.pop(header[at + 2 : name_end].decode(), None)
        if place is not None:
            pattern, probe = place
            name = header[at + 2 : name_end].decode()
            spots.append(_Spot(name_end, name_end + 4, b"(.{4})", _INT.pack(len(probe)), f"#{name}"))
            spots.append(_Spot(name_end + 4, end, pattern, probe, f"={name}"))
            longer += len(probe) - value_size
        at = end
    spots.append(
        _Spot(_FIELDS_SIZE_AT, _BINARY_FIXED.size, b"(.{4})", _INT.pack(size - _BINARY_FIXED.size + longer), "fields")
    )
    spots.sort()
    return spots, _probed(header, spots)
