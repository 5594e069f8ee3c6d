"""Request headers read by their form: what a client's headers have in common is read once, the rest by a regular
expression.

The headers of one client's sends differ in a few places only (opaque, queue, time, properties). A form is made of one
such header that was read the long way: its bytes, with a place for each value that may differ. What matches it is read
by it; everything else, and everything unusual (escapes, signs, text beyond ASCII), is read the long way. Both read the
same: that the places lie where they seem to was proved by reading the header the long way with other values in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from node.remoting.command import Command
from node.remoting.errors import FrameError

__all__ = ["FormedRequest", "HeaderForm", "Places", "make_form"]

MAX_FORM_HEADER_BYTES: Final = 4096
"""Longer headers are read the long way: a form is for the many small ones, and the interpreter holds on to the last 512
patterns that it has compiled, some 20 kB each of the longest."""

FORMED_BYTES: Final = 512
"""What a request costs beside its text and body: the objects that hold it."""

_SEPARATORS: Final = ((b"\\u0001", b"\x01"), (b"\\u0002", b"\x02"))
_PROBE_OPAQUE: Final = 918_273_645
_PROBE_NUMBER: Final = b"718293645546"
_PROBE_TEXT: Final = b"zQ7~probe"
_JSON_OPAQUE: Final = re.compile(rb'"opaque"\s*:\s*(0|[1-9][0-9]{0,8})(?=\s*[,}])')
_BINARY_FIXED: Final = Struct(">hbhiiii")
_SHORT: Final = Struct(">h")
_INT: Final = Struct(">i")
_OPAQUE_AT, _FLAG_AT, _FIELDS_SIZE_AT = 5, 9, 17
_ABSENT: Final = b"(?:(?!)())?"
"""A group that is never found."""

Decode = Callable[[bytes], Command]
"""The long way: a header to its command, without a body. Raises FrameError."""


class Places(NamedTuple):
    """Names of the extension fields whose values differ between requests: whole numbers, and texts."""

    numbers: tuple[str, ...]
    texts: tuple[str, ...]


class HeaderForm:
    """Headers of one request code that differ in opaque and in the values of `places` only."""

    __slots__ = (
        "_fields", "_is_json", "_match", "_names", "_numbers", "_order", "code", "header_bytes", "language",
        "serializer", "version",
    )  # fmt: skip

    def __init__(
        self, sample: Command, places: Places, pattern: bytes, order: Sequence[int], header_bytes: int
    ) -> None:
        self.code = sample.code
        self.language = sample.language
        self.version = sample.version
        self.serializer = sample.serializer
        self.header_bytes = header_bytes
        """Length of the header that the form was made of."""
        self._fields: Mapping[str, str] = dict(sample.ext_fields)
        self._names = places.numbers + places.texts
        self._numbers = len(places.numbers)
        self._order = tuple(order)
        self._is_json = sample.serializer == "json"
        self._match = re.compile(pattern, re.DOTALL).fullmatch

    def read(self, data: bytes, start: int, end: int) -> tuple[int, Sequence[bytes | None]] | None:
        """Opaque and values of the header in `data[start:end]`; None where it is to be read the long way. Values are
        in the order of the places, None for those that the headers of this form do not have."""
        found = self._match(data, start, end)
        if found is None:
            return None
        if self._is_json:
            opaque, *values = found.group(*self._order)
            for at in range(self._numbers, len(values)):
                text = values[at]
                if text and b"\\" in text:
                    for escape, character in _SEPARATORS:
                        text = text.replace(escape, character)
                    if b"\\" in text:
                        return None
                    values[at] = text
            return int(opaque), values
        opaque, fields_bytes, *pairs = found.group(*self._order)
        if _INT.unpack(fields_bytes)[0] != end - start - _BINARY_FIXED.size:
            return None
        for at in range(0, len(pairs), 2):
            if pairs[at] is not None and int.from_bytes(pairs[at], "big") != len(pairs[at + 1]):
                return None
        return _INT.unpack(opaque)[0], pairs[1::2]

    def fields(self, values: Sequence[bytes | None]) -> dict[str, str]:
        """All fields of a header with these values in its places."""
        fields = dict(self._fields)
        for name, value in zip(self._names, values, strict=True):
            if value is not None:
                fields[name] = value.decode("ascii")
        return fields


class FormedRequest(Command):
    """A request that was read by its form: its fields are made when somebody asks for them."""

    __slots__ = ("_made", "form", "values")

    def __init__(self, form: HeaderForm, opaque: int, values: Sequence[bytes | None], body: bytes) -> None:
        self.code = form.code
        self.body = body
        self.opaque = opaque
        self.flag = 0
        self.remark = None
        self.language = form.language
        self.version = form.version
        self.serializer = form.serializer
        self.form = form
        self.values = values
        """Of the form's places: ASCII, digits where it is a number; None where there is no such field."""
        self._made: dict[str, str] | None = None

    @property
    def size_bytes(self) -> int:
        """About what it takes to hold it."""
        return self.form.header_bytes + sum(map(len, filter(None, self.values))) + len(self.body) + FORMED_BYTES

    @property
    def ext_fields(self) -> dict[str, str]:
        if self._made is None:
            self._made = self.form.fields(self.values)
        return self._made

    @ext_fields.setter
    def ext_fields(self, fields: dict[str, str]) -> None:
        self._made = fields


def make_form(header: bytes, sample: Command, places: Places, decode: Decode) -> HeaderForm | None:
    """The form of a request's header, which reads as `sample`; None where it has none that is safe."""
    if sample.flag or sample.remark is not None or len(header) > MAX_FORM_HEADER_BYTES:
        return None
    found = (_json_spots if sample.serializer == "json" else _binary_spots)(header, places)
    if found is None:
        return None
    spots, probe = found
    expected = {**sample.ext_fields}
    for names, value in ((places.numbers, _PROBE_NUMBER), (places.texts, _PROBE_TEXT)):
        expected.update({name: value.decode() for name in names if name in expected})
    try:
        proof = decode(probe)
    except FrameError:
        return None
    if proof.ext_fields != expected or proof.opaque != _PROBE_OPAQUE or proof.code != sample.code or proof.flag:
        return None
    form = _formed(header, sample, places, spots)
    read = form.read(header, 0, len(header))
    if read is None or read[0] != sample.opaque or form.fields(read[1]) != sample.ext_fields:
        return None
    return form


class _Spot(NamedTuple):
    """A place in a header, what may stand there, what stands there in the proof, and what it is."""

    start: int
    end: int
    pattern: bytes
    probe: bytes
    key: str


def _formed(header: bytes, sample: Command, places: Places, spots: list[_Spot]) -> HeaderForm:
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
    for name in places.numbers + places.texts:
        keys += [f"={name}"] if sample.serializer == "json" else [f"#{name}", f"={name}"]
    return HeaderForm(sample, places, pattern, [group_of.get(key, absent) for key in keys], len(header))


def _probed(header: bytes, spots: list[_Spot]) -> bytes:
    probe, at = b"", 0
    for spot in spots:
        probe += header[at : spot.start] + spot.probe
        at = spot.end
    return probe + header[at:]


def _json_spots(header: bytes, places: Places) -> tuple[list[_Spot], bytes] | None:
    """The places of a JSON header, in the order of the header, and the header with other values in them."""
    opaque = _JSON_OPAQUE.search(header)
    if opaque is None:
        return None
    spots = [_Spot(*opaque.span(1), b"(0|[1-9][0-9]{0,8})", str(_PROBE_OPAQUE).encode(), "opaque")]
    for name in places.numbers:
        quoted = re.escape(name.encode())
        found = re.search(rb'"' + quoted + rb'"\s*:\s*(?:"([0-9]{1,18})"|(0|[1-9][0-9]{0,17})(?=\s*[,}]))', header)
        if found is not None:
            pattern = b"([0-9]{1,18})" if found[1] is not None else b"(0|[1-9][0-9]{0,17})"
            spots.append(_Spot(*found.span(found.lastindex or 0), pattern, _PROBE_NUMBER, f"={name}"))
    for name in places.texts:
        found = re.search(rb'"' + re.escape(name.encode()) + rb'"\s*:\s*"([^"]*)"', header)
        if found is not None:
            spots.append(_Spot(*found.span(1), rb'([^"\x00-\x1f\x7f-\xff]*)', _PROBE_TEXT, f"={name}"))
    spots.sort()
    return spots, _probed(header, spots)


def _binary_spots(header: bytes, places: Places) -> tuple[list[_Spot], bytes] | None:
    """The same for a binary header without a remark."""
    size = len(header)
    if size < _BINARY_FIXED.size or header[_FLAG_AT:_FIELDS_SIZE_AT] != bytes(_FIELDS_SIZE_AT - _FLAG_AT):
        return None
    spots = [_Spot(_OPAQUE_AT, _FLAG_AT, b"(.{4})", _INT.pack(_PROBE_OPAQUE), "opaque")]
    at, longer = _BINARY_FIXED.size, 0
    places_of = {
        **{name: (b"([0-9]{1,18})", _PROBE_NUMBER) for name in places.numbers},
        **{name: (b"([\x01\x02 -~]*)", _PROBE_TEXT) for name in places.texts},
    }
    while at < size:
        (name_size,) = _SHORT.unpack_from(header, at)
        name_end = at + 2 + name_size
        (value_size,) = _INT.unpack_from(header, name_end)
        end = name_end + 4 + value_size
        place = places_of.pop(header[at + 2 : name_end].decode(), None)
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
