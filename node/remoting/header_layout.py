"""Many requests parsed at once by one struct: those of a template whose values all have the same sizes.

The requests that a client sends in a row are even more alike than their template says: every value has the same size as
before, and the properties differ in one key. So each value has a fixed offset, the bytes between values are constant,
and both are checked column by column over all requests. A layout is made from one header that the template has read; it
accepts only headers that the template would accept, and reads them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from struct import Struct
from typing import Final

from node.interpreter import least_rows
from node.remoting.header_template import REQUEST_BYTES, HeaderTemplate, TemplateRequest

__all__ = ["HeaderLayout", "LayoutTable"]

MAX_HEADER_BYTES: Final = 1024
"""Longer headers are left to their templates; clients send headers of some 300 to 400 bytes."""
MAX_SIZES: Final = 32
"""Header sizes for which a connection keeps layouts, a few kB each. All are dropped when there are more."""
LAYOUTS_OF_SIZE: Final = 2
"""Layouts tried per header size: with a longer queue number and a shorter opaque a header has the same size."""
MAX_STRUCTS: Final = 512
"""Layouts with a body size that are cached, over all connections together."""

MAX_TOGETHER: Final = 64
"""Requests that are parsed at once."""
LEAST_TOGETHER: Final = least_rows(4)
"""Fewest requests that are parsed as columns; below that, columns cost more."""

_PREFIX_BYTES: Final = 8
_INT: Final = Struct(">i")
_struct_of = lru_cache(maxsize=MAX_STRUCTS)(Struct)


class HeaderLayout:
    """Headers of one template that differ only in opaque, numbers, texts before the last one, and one key in the last
    text, if there is one; each of these has a fixed size."""

    __slots__ = (
        "_after", "_before", "_common", "_constants", "_is_json", "_least_opaque", "_numbers", "_pick", "_struct",
        "_template",
    )  # fmt: skip

    def __init__(self, template: HeaderTemplate, header: bytes, spans: Sequence[tuple[int, int]]) -> None:
        """`spans` are those of opaque, numbers and texts. `header` is one that the template has read."""
        *places, (start, end) = spans
        raw = header[start:end]
        self._template = template
        self._is_json = template.serializer == "json"
        self._numbers = template.number_count
        self._common: bytes | None = None
        """The last text without its key; None if the whole text is the same each time. `_before` and `_after` are what
        surrounds the key."""
        self._before, self._after = template.plain(raw), b""
        key = template.key_span(raw)
        if key is not None:
            places.append((start + key[0], start + key[1]))
            self._before, self._after = template.plain(raw[: key[0]]), template.plain(raw[key[1] :])
            self._common = self._before + self._after
        ordered, layout, at = sorted(places), f">{_PREFIX_BYTES}x", 0
        for start, end in ordered:
            layout += f"{start - at}s{end - start}s"
            at = end
        self._struct = Struct(f"{layout}{len(header) - at}s")
        """A frame without its body: constant parts at even positions, values at odd ones."""
        self._constants = self._struct.unpack(bytes(_PREFIX_BYTES) + header)[::2]
        self._pick = itemgetter(*[2 * ordered.index(place) + 1 for place in places])
        opaque_bytes = places[0][1] - places[0][0]
        self._least_opaque = 10 ** (opaque_bytes - 1) if self._is_json and opaque_bytes > 1 else 0

    def requests(self, data: bytes, at: int, frame_bytes: int, count: int) -> list[TemplateRequest] | None:
        """The requests of `count` frames from offset `at` on, all of size `frame_bytes`; only the first one below
        LEAST_TOGETHER. None if one of them does not fit the layout: the template has to read it."""
        body_at = self._struct.size
        if count < LEAST_TOGETHER:
            return self._request(self._struct.unpack_from(data, at), data[at + body_at : at + frame_bytes])
        rows = _struct_of(f"{self._struct.format}{frame_bytes - body_at}s")
        columns = list(zip(*rows.iter_unpack(data[at : at + count * frame_bytes]), strict=True))
        for column, constant in zip(columns[::2], self._constants, strict=True):
            if column.count(constant) != count:
                return None
        digits, *values = self._pick(columns)
        before, after, common, template = self._before, self._after, self._common, self._template
        keys: Sequence[bytes | None]
        if common is None:
            keys, texts = (None,) * count, [before] * count
        else:
            keys = own = values.pop()
            if not b"".join(own).isalnum():
                return None
            texts = [before + key + after for key in own]
        for at in range(self._numbers, len(values)):
            known = values[at] = list(map(template.texts.get, values[at]))
            if None in known:
                return None
        numbers = sum(values[: self._numbers], digits if self._is_json else ())
        if not b"".join(numbers).isdigit():
            return None
        opaques = list(map(int, digits)) if self._is_json else _ints(digits)
        if min(opaques) < self._least_opaque:
            return None
        size_bytes, bodies = frame_bytes + REQUEST_BYTES, columns[-1]
        return [
            TemplateRequest(template, opaque, own, common, key, body, size_bytes)
            for opaque, own, key, body in zip(opaques, zip(*values, texts, strict=True), keys, bodies, strict=True)
        ]

    def _request(self, parts: tuple[bytes, ...], body: bytes) -> list[TemplateRequest] | None:
        """The request of one frame that is unpacked into `parts`; None as in `requests`."""
        if parts[::2] != self._constants:
            return None
        digits, *values = self._pick(parts)
        key, text, template = None, self._before, self._template
        if self._common is not None:
            key = values.pop()
            if not key.isalnum():
                return None
            text = self._before + key + self._after
        for at, value in enumerate(values):
            if at >= self._numbers:
                if (value := template.texts.get(value)) is None:
                    return None
                values[at] = value
            elif not value.isdigit():
                return None
        if not self._is_json:
            (opaque,) = _INT.unpack(digits)
        elif not digits.isdigit() or (opaque := int(digits)) < self._least_opaque:
            return None
        values.append(text)
        size_bytes = self._struct.size + len(body) + REQUEST_BYTES
        return [TemplateRequest(template, opaque, values, self._common, key, body, size_bytes)]


def _ints(digits: Sequence[bytes]) -> list[int]:
    return [number for (number,) in map(_INT.unpack, digits)]


class LayoutTable(dict[bytes, Sequence[HeaderLayout]]):
    """The layouts that one parser knows, by the word before their headers: serializer and header size."""

    def __init__(self) -> None:
        super().__init__()
        self._misses: dict[bytes, int] = {}
        self._most = MAX_TOGETHER
        """Requests that are tried at once: halved after a try in vain, doubled again after a success."""

    def requests(self, data: bytes, at: int, end: int) -> list[TemplateRequest]:
        """Requests of the frame from `at` to `end` and of the frames after it that start with the same two words; empty
        if no layout reads them."""
        prefix, frame_bytes, count = data[at : at + _PREFIX_BYTES], end - at, 1
        layouts = self.get(prefix[4:])
        if layouts is None:
            return []
        most = min(self._most, (len(data) - at) // frame_bytes)
        while count < most and data.startswith(prefix, at + count * frame_bytes):
            count += 1
        for layout in layouts:
            requests = layout.requests(data, at, frame_bytes, count)
            if requests is not None:
                if count == self._most:
                    self._most = min(2 * count, MAX_TOGETHER)
                return requests
        self._most = max(count // 2, 1)
        return []

    def learn(self, word: bytes, template: HeaderTemplate, header: bytes) -> None:
        """Make a layout of a header that this template, but no layout, has read; only at misses 1, 2, 4, 8 ... of its
        size: headers may differ in more than a layout allows, and each new one would be in vain."""
        if len(header) > MAX_HEADER_BYTES:
            return
        misses = self._misses[word] = self._misses.get(word, 0) + 1
        spans = None if misses & (misses - 1) else template.spans(header)
        if spans is None:
            return
        if len(self) >= MAX_SIZES and word not in self:
            self.clear()
            self._misses.clear()
        self[word] = [HeaderLayout(template, header, spans), *self.get(word, ())][:LAYOUTS_OF_SIZE]
