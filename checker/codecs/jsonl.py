"""Our own format: one JSON object per line, in the order in which events happened; and JSON arrays of such events.

:class:`JsonLines` is the only reader of such lines, for histories and traces, complete or still growing.  Lines are
parsed in batches, as one JSON array each, which is about twice as fast as line by line; a batch that does not parse, or
in which an object may have a name twice, is read again line by line to find the line at fault.  Damaged lines are
always returned: the caller refuses or counts them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

from checker.codecs.pairs import with_keys
from checker.codecs.source import BATCH_LINES, FileEvents, FormatError
from checker.history import History
from checker.linearizability.budget import Budget, no_collection

__all__ = [
    "DamagedLine",
    "FormatError",
    "JsonBatch",
    "JsonLines",
    "Readable",
    "not_utf8",
    "read_batches",
    "read_json_array",
    "read_jsonl",
    "read_jsonl_stream",
]

#: Bytes read at a time: some ten thousand events, whose dicts (about 0.5 KB each) take a few megabytes.
CHUNK_BYTES = 1 << 20
#: The longest line, so that a file without line ends does not fill memory.  A log read has a few kilobytes.
MAX_LINE_BYTES = 64 << 20
#: Bytes of a damaged line that are kept for display.
SHOWN_BYTES = 120
#: First bytes of files of other kinds -> what to do with them.
_OTHER_FILES = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8 first",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(eq=False)
class DamagedLine(ValueError):
    """A line (numbered from 1) that is not valid JSON, with its size and the beginning of its text.

    ``is_cut``: it is the file's last line and has no line end, as a killed writer leaves it.
    """

    number: int
    reason: str
    text: bytes
    size_bytes: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class JsonBatch:
    """The objects of some lines, the line number of each, and the lines that could not be read."""

    objects: list[Any]
    numbers: Sequence[int]
    damaged: Sequence[DamagedLine] = ()

    def whole(self) -> Iterator[tuple[int, Any]]:
        """(line number, object) of each line.  Raises the first :class:`DamagedLine` when it is reached."""
        if not self.damaged:
            yield from zip(self.numbers, self.objects, strict=True)
            return
        first = self.damaged[0]
        for number, found in zip(self.numbers, self.objects, strict=True):
            if number > first.number:
                break
            yield number, found
        raise first


class JsonLines:
    """Reads JSON lines from bytes, as they arrive.

    A line whose object has a name twice is damaged: two lines were merged, or one was changed, and there is no telling
    which of the two values is right.  ``max_line_bytes`` bounds the memory for a line without an end; such a line is
    damaged, and the last one read.
    """

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()
        self._next_line = 1
        self._is_over = False

    def feed(self, data: bytes) -> JsonBatch:
        """The objects of the lines that end within ``data``."""
        cut = data.rfind(b"\n") + 1
        if not cut or self._is_over:
            self._rest += data
            return self._without_an_end()
        chunk = bytes(self._rest) + data[:cut] if self._rest else data[:cut]
        self._rest[:] = data[cut:]
        first, self._next_line = self._next_line, self._next_line + chunk.count(b"\n")
        batch = self._parse(chunk, first)
        late = self._without_an_end()
        return JsonBatch(batch.objects, batch.numbers, [*batch.damaged, *late.damaged]) if late.damaged else batch

    def finish(self) -> JsonBatch:
        """The object of the text after the last line end, if any."""
        if self._is_over or not self._rest:
            return JsonBatch([], ())
        batch = self._parse(bytes(self._rest), self._next_line)
        self._rest.clear()
        for line in batch.damaged:
            line.reason, line.is_cut = f"the last line is cut short, as a killed writer leaves it ({line.reason})", True
        return batch

    def _without_an_end(self) -> JsonBatch:
        if self._is_over:
            self._rest.clear()
        if len(self._rest) < self._max_line_bytes:
            return JsonBatch([], ())
        self._is_over = True
        return JsonBatch([], (), [self._damaged(self._next_line, bytes(self._rest), "not JSON")])

    def _damaged(self, number: int, line: bytes, reason: str) -> DamagedLine:
        if len(line) >= self._max_line_bytes:
            reason = f"the line is longer than {self._max_line_bytes} bytes"
        return DamagedLine(number, reason, line[:SHOWN_BYTES], len(line))

    def _parse(self, chunk: bytes, first: int) -> JsonBatch:
        if first == 1:
            chunk = chunk.removeprefix(_BYTE_ORDER_MARK)
        lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
        with contextlib.suppress(UnicodeDecodeError), no_collection():
            text = chunk.decode()
            # The line ends stay, so that a string broken by a line end is still an error.
            joined = text.removesuffix("\n").replace("\n", "\n,")
            objects = _all_at_once(joined)
            if objects is not None and len(objects) == lines:
                return JsonBatch(objects, range(first, first + lines))
        return self._one_by_one(chunk, first)

    def _one_by_one(self, chunk: bytes, first: int) -> JsonBatch:
        objects, numbers, damaged = [], [], []
        for number, line in enumerate(chunk.split(b"\n"), first):
            if not line or line.isspace():
                continue
            try:
                found = _decode_with_care(line.decode())
            except (ValueError, RecursionError) as error:
                damaged.append(self._damaged(number, line, _why(line, error)))
            else:
                objects.append(found)
                numbers.append(number)
        return JsonBatch(objects, numbers, damaged)


class Readable(Protocol):
    """The part of an open file's interface that is used."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        ...


def read_batches(file: Readable, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[JsonBatch]:
    """The content of a file, batch by batch; see :class:`JsonLines`.  Raises ``OSError``."""
    lines = JsonLines(max_line_bytes=max_line_bytes)
    while data := file.read(CHUNK_BYTES):
        yield lines.feed(data)
    yield lines.finish()


def _why(line: bytes, error: Exception) -> str:
    """Why a line could not be parsed."""
    if isinstance(error, RecursionError):
        return "not JSON: nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: byte 0x{line[error.start]:02x} at column {error.start + 1}"
    return f"not JSON: {error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _refuse(name: str) -> Any:
    raise ValueError(f"not JSON: {name} is not a JSON number")


def _finite(text: str) -> float:
    """The number.  Raises ``ValueError`` for one so large that it could not be distinguished from others."""
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"not JSON: {text[:SHOWN_BYTES]} is too large: it would be read as infinity")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these pairs.  Raises ``ValueError`` if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r} twice")
    return found


_decode = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).decode
#: Twice as slow, but detects a name that occurs twice in an object.
_decode_with_care = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object).decode


def _all_at_once(text: str) -> list[Any] | None:
    """Parse objects separated by commas; ``None`` if the text does not parse, or an object has a name twice."""
    try:
        whole = f"[{text}]"
        objects: list[Any] = _decode(whole)
        return objects if _has_names_once(text, objects) else _decode_with_care(whole)
    except (ValueError, RecursionError):
        return None


def _has_names_once(text: str, objects: list[Any]) -> bool:
    """Whether it is certain that no object of a text has a name twice.

    Each name of an object is followed by a quote and a colon.  Within a string a quote has a backslash before it, so
    that the names can be counted; of a name that occurred twice, the parser has kept only one.  Nothing is certain if a
    name is followed by space or ends with a backslash.  (Each test scans the whole text; those for one character are
    fast.)
    """
    if "\t" in text or "\r" in text or (" " in text and '" :' in text):
        return False
    names = text.count('":')
    if "\\" in text:
        if '\\\\":' in text:
            return False
        names -= text.count('\\":')
    if set(map(type, objects)) != {dict}:
        return False
    at_top = sum(map(len, objects))
    if names == at_top:
        return True
    # Nested objects of an event are usually in its value, so looking only there first is faster.
    values = [value for value in map(_VALUE, objects) if value.__class__ in _HOLDERS]
    return names == at_top + sum(map(_names_in, values)) or names == sum(map(_names_in, objects))


def _names_in(value: Any) -> int:
    """The number of names of all objects in a value.  Raises ``RecursionError`` if it is nested too deeply."""
    if value.__class__ is dict:
        return len(value) + sum(_names_in(item) for item in value.values() if item.__class__ in _HOLDERS)
    return sum(_names_in(item) for item in value if item.__class__ in _HOLDERS) if value.__class__ is list else 0


_HOLDERS = frozenset({dict, list})
_VALUE = methodcaller("get", "value")


def read_jsonl(path: str | Path, *, lenient: bool = False, budget: Budget | None = None) -> History:
    """Read a JSONL history.

    ``lenient`` leaves out lines that are not events, including the half line of a killed writer, and events that do
    not fit those before them; ``History.skipped_events`` counts them and ``History.problems`` says why.  ``budget``
    bounds the memory.  Raises :class:`FormatError` for a bad line unless lenient, :class:`MemoryLimitError` at the
    bound, ``OSError`` for a file that cannot be read.
    """
    with open(path, "rb") as file:
        return read_jsonl_stream(file, source=str(path), lenient=lenient, budget=budget)


def read_jsonl_stream(file: Readable, *, source: str, lenient: bool = False, budget: Budget | None = None) -> History:
    """As `read_jsonl`, for an open file; ``source`` names it in errors."""
    events = FileEvents(source, lenient=lenient, budget=budget)
    with no_collection():
        for batch in read_batches(file):
            fed = 0
            for line in batch.damaged:  # in order, so that the first error is reported
                if line.number == 1 and line.text[:2] in _OTHER_FILES:
                    raise FormatError(source, None, _OTHER_FILES[line.text[:2]])
                before = bisect_left(batch.numbers, line.number)
                events.feed(batch.objects[fed:before], batch.numbers[fed:before])
                events.refuse(line.number, line.reason)
                fed = before
            events.feed(batch.objects[fed:], batch.numbers[fed:])
    return with_keys(events.finish(), source, lenient=lenient)


def not_utf8(lines: Iterable[bytes], source: str) -> FormatError:
    """An error that names the line that is not UTF-8, or what the file seems to be instead."""
    number = 0
    for number, line in enumerate(lines, 1):
        if number == 1 and line[:2] in _OTHER_FILES:
            return FormatError(source, None, _OTHER_FILES[line[:2]])
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return FormatError(source, number, _why(line, error))
    return FormatError(source, number, "not UTF-8 text")


def read_json_array(text: str, file: FileEvents) -> History:
    """A JSON array of events, as elle-cli writes them.

    It is parsed in parts that end with a line, so that few events are objects at a time; from the first part that does
    not end with an event on, it is parsed event by event.  Raises :class:`FormatError`; invalid JSON cannot be left out
    even by a lenient reader.
    """
    with no_collection():
        at = len(text) - len(text.lstrip()) + 1
        line = 1 + text.count("\n", 0, at)
        while text[at - 1 : at] in ("[", ","):
            cut = text.find("\n", at + _PART_CHARS)
            part = text[at : cut if cut >= 0 else len(text)].rstrip()
            is_whole = part[-1:] == ("," if cut >= 0 else "]") and '"\n:' not in part
            events = _all_at_once(part[:-1]) if is_whole else None
            if events is None:
                break
            lines = [number for number, row in enumerate(part.split("\n"), line) if row.strip(" \t\r[],")]
            file.feed_alone(events, lines if len(lines) == len(events) else [line] * len(events))
            if cut < 0:
                return file.finish()
            line += part.count("\n")
            at += len(part)
        elements = _elements(text, at, line, file.source)
        while batch := list(islice(elements, BATCH_LINES)):
            file.feed_alone([event for event, _ in batch], [number for _, number in batch])
    return file.finish()


_PART_CHARS = 1 << 21
"""Characters of an array that are parsed at a time: some twenty thousand events."""

_decode_one = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object).raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")


def _elements(text: str, at: int, line: int, source: str) -> Iterator[tuple[Any, int]]:
    """The elements of an array after its ``[`` or a comma at ``at - 1``, each with the line on which it begins."""
    end, is_first = at, True
    while True:
        at = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        line += text.count("\n", end, at)
        if text[at : at + 1] == "]" and (is_first or text[end - 1 : end] != ","):
            break
        if not is_first and text[end - 1 : end] != ",":
            raise FormatError(source, line, "not JSON: expecting ',' or ']'")
        try:
            element, end = _decode_one(text, at)
        except json.JSONDecodeError as error:
            raise FormatError(source, error.lineno, f"not JSON: {error.msg} at column {error.colno}") from error
        except ValueError as error:
            raise FormatError(source, line, str(error)) from error
        except RecursionError as error:
            raise FormatError(source, line, "JSON nested too deeply") from error
        yield element, line
        comma = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        line += text.count("\n", at, comma)
        end = comma + (text[comma : comma + 1] == ",")
        is_first = False
    if text[at + 1 :].strip():
        behind = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        raise FormatError(source, line + text.count("\n", at, behind), "text after the end of the array")
