"""Our own format: one JSON object a line, in the order events happened; and JSON arrays of the same events.

Lines are parsed in batches, as one JSON array each, which is about twice as fast as line by line; a batch that does
not parse is read again line by line to name the line at fault.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from checker.codecs.source import BATCH_LINES, FileEvents, FormatError
from checker.history import History
from checker.linearizability.budget import Budget

__all__ = ["FormatError", "not_utf8", "read_json_array", "read_jsonl", "read_jsonl_lines"]


def _refuse(name: str) -> Any:
    raise ValueError(f"not JSON: {name} is no number that JSON has")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of those pairs; where a name stands twice, two lines became one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r} twice")
    return found


_decode = json.JSONDecoder(parse_constant=_refuse).decode
#: Twice as slow, and the only one that sees a name that stands twice in an object.
_decode_with_care = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object).decode
#: Names that every event has: where they stand as often as there are events, no event has one of them twice.
_NAMES_OF_ALL = ('"process"', '"type"')


def read_jsonl(path: str | Path, *, lenient: bool = False, budget: Budget | None = None) -> History:
    """Read a JSONL history.

    ``lenient`` leaves out lines that are no events, the half line of a killed writer among them, and events that do
    not fit those before them; ``History.skipped_events`` counts them and ``History.problems`` says why.  ``budget``
    bounds the memory.  Raises :class:`FormatError` for a bad line unless lenient, :class:`MemoryLimitError` at the
    bound, ``OSError`` for a file that cannot be read.
    """
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return read_jsonl_lines(file, source=str(path), lenient=lenient, budget=budget)
    except UnicodeDecodeError as error:
        with open(path, "rb") as content:
            raise not_utf8(content, str(path)) from error


def not_utf8(lines: Iterable[bytes], source: str) -> FormatError:
    """Which line is not UTF-8, and what the whole may be instead."""
    number = 0
    for number, line in enumerate(lines, 1):
        if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return FormatError(source, None, "UTF-16 text; convert it to UTF-8 first")
        if number == 1 and line[:2] == b"\x1f\x8b":
            return FormatError(source, None, "compressed by gzip; unpack it first")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = line[error.start]
            return FormatError(source, number, f"not UTF-8 text: byte 0x{byte:02x} at column {error.start + 1}")
    return FormatError(source, number, "not UTF-8 text")


def read_jsonl_lines(
    lines: Iterable[str], *, source: str = "<lines>", lenient: bool = False, budget: Budget | None = None
) -> History:
    """The same from any iterable of lines (with or without their newline)."""
    file = FileEvents(source, lenient=lenient, budget=budget)
    iterator = iter(lines)
    first_line = 1
    collecting = gc.isenabled()
    gc.disable()
    try:
        while batch := list(islice(iterator, BATCH_LINES)):
            _feed(file, batch, first_line)
            first_line += len(batch)
    finally:
        if collecting:
            gc.enable()
    return file.finish()


def _feed(file: FileEvents, batch: list[str], first_line: int) -> None:
    if first_line == 1 and batch[0][:1] == "\ufeff":
        batch[0] = batch[0][1:]
    events = _all_at_once(",".join(batch), len(batch))
    if events is not None:
        file.feed(events, range(first_line, first_line + len(batch)))
        return
    parsed = list(_one_by_one(file, batch, first_line))
    file.feed([event for _, event in parsed], [number for number, _ in parsed])


def _all_at_once(text: str, count: int | None) -> list[Any] | None:
    """Events with commas between them, so many if a number is given; ``None`` where they are not surely that."""
    try:
        events: list[Any] = _decode(f"[{text}]")
        # Two lines that became one leave a gap in the index; where there is none, they are looked for.
        if not _has_index(events) and any(text.count(name) != len(events) for name in _NAMES_OF_ALL):
            events = _decode_with_care(f"[{text}]")
    except (ValueError, RecursionError):
        return None
    return events if count is None or len(events) == count else None


def _has_index(events: list[Any]) -> bool:
    return bool(events) and isinstance(events[0], dict) and "index" in events[0]


def _one_by_one(file: FileEvents, batch: list[str], first_line: int) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(batch, first_line):
        if not line.strip():
            continue
        try:
            event = _decode_with_care(line)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"not JSON: {error.msg} at column {error.colno}"
                if number == first_line + len(batch) - 1 and not line.endswith("\n"):
                    reason = f"the last line is cut short, as a killed writer leaves it ({reason})"
            file.refuse(number, reason, error)
            continue
        yield number, event


def read_json_array(text: str, file: FileEvents) -> History:
    """A JSON array of events, as elle-cli writes them.

    Parsed in parts that end with a line, so that few events are objects at a time, and from the first part that does
    not end with an event on, one event after the other.  Raises :class:`FormatError`; what is no JSON cannot be left
    out by a lenient reader either.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        at = len(text) - len(text.lstrip()) + 1
        line = 1 + text.count("\n", 0, at)
        while text[at - 1 : at] in ("[", ","):
            cut = text.find("\n", at + _PART_CHARS)
            part = text[at : cut if cut >= 0 else len(text)].rstrip()
            events = _all_at_once(part[:-1], None) if part[-1:] == ("," if cut >= 0 else "]") else None
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
    finally:
        if collecting:
            gc.enable()
    return file.finish()


_PART_CHARS = 1 << 21
"""Text of an array that is parsed at a time: some twenty thousand events."""

_decode_one = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object).raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")


def _elements(text: str, at: int, line: int, source: str) -> Iterator[tuple[Any, int]]:
    """The elements of an array behind its ``[`` or a comma at ``at - 1``, each with the line on which it begins."""
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
        raise FormatError(source, line + text.count("\n", at, behind), "text behind the end of the array")
