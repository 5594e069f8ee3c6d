"""Requests taken apart by one struct, many at once: those of a template whose values all have the same sizes.

The requests that a client sends one behind the other are even more alike than their template says: every value has the
size that it had before, and the properties differ in one key. So each value has its place, what lies between is the
same, and all of it is looked at column by column. A layout is made of one header that the template has read; it reads
what the template would, and nothing that the template would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from struct import Struct
from typing import Final

from node.remoting.header_template import REQUEST_BYTES, HeaderTemplate, TemplateRequest

__all__ = ["HeaderLayout", "LayoutTable"]

MAX_HEADER_BYTES: Final = 1024
"""Longer headers are left to their templates; what clients send has some 300 to 400 bytes."""
MAX_SIZES: Final = 32
"""Sizes of headers for which a connection has layouts, a few kB each. All are forgotten when there are more."""
LAYOUTS_OF_SIZE: Final = 2
"""Layouts of headers of one size that are tried: the number of a queue may be longer, and the opaque shorter."""
MAX_STRUCTS: Final = 512
"""Layouts with a size of body that are remembered, of all connections together."""

MAX_TOGETHER: Final = 64
"""Requests that are taken apart at once."""
LEAST_TOGETHER: Final = 4
"""Requests; below these columns cost more."""

_PREFIX_BYTES: Final = 8
_INT: Final = Struct(">i")
_struct_of = lru_cache(maxsize=MAX_STRUCTS)(Struct)


class HeaderLayout:
    """Headers of one template that are the same but for opaque, numbers, texts before the last one, and one key in the
    last text, if there is one; of a size that each of these has."""

    __slots__ = (
        "_after", "_before", "_common", "_constants", "_is_json", "_least_opaque", "_numbers", "_pick", "_struct",
        "_template",
    )  # fmt: skip

    def __init__(self, template: HeaderTemplate, header: bytes, spans: Sequence[tuple[int, int]]) -> None:
        """`spans` are those of opaque, numbers and texts. `header` is one that the template reads."""
        *places, (start, end) = spans
        raw = header[start:end]
        self._template = template
        self._is_json = template.serializer == "json"
        self._numbers = template.number_count
        self._common: bytes | None = None
        """The last text without its key, None where the whole text is the same each time; what stands around the key
        follows."""
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
        """A frame without its body: what all have in common at even places, values at odd ones."""
        self._constants = self._struct.unpack(bytes(_PREFIX_BYTES) + header)[::2]
        self._pick = itemgetter(*[2 * ordered.index(place) + 1 for place in places])
        opaque_bytes = places[0][1] - places[0][0]
        self._least_opaque = 10 ** (opaque_bytes - 1) if self._is_json and opaque_bytes > 1 else 0

    def requests(self, data: bytes, at: int, frame_bytes: int, count: int) -> list[TemplateRequest] | None:
        """The requests of that many frames, the first of which begins at `at`, all of this size and with headers of the
        layout's, or the first one; None where the template has to read one of them."""
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
        """The same for one."""
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
    """The layouts that one parser knows, by the word that stands before their headers: serializer and size."""

    def __init__(self) -> None:
        super().__init__()
        self._misses: dict[bytes, int] = {}
        self._most = MAX_TOGETHER
        """Requests that are tried at once: fewer after each try in vain, and then more again."""

    def requests(self, data: bytes, at: int, end: int) -> list[TemplateRequest]:
        """Those of the frame from `at` to `end` and of frames behind it whose lengths are the same; none where no
        layout reads them."""
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
        """A header that no layout has read and this template has. Not each time: where they differ in more than a
        layout can tell, it would be in vain."""
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
