"""Our own format: one JSON object a line, in the order events happened.

Lines are parsed in batches, as one JSON array each, which is about twice as fast as line by line; a batch that does
not parse is read again line by line to name the line at fault.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from checker.history import History, HistoryBuilder, HistoryError

__all__ = ["FormatError", "not_utf8", "read_jsonl", "read_jsonl_lines"]

#: Lines parsed at a time: large enough that the per-batch cost vanishes, small enough that the dicts of a batch
#: (about 0.5 KB each) never weigh more than some tens of megabytes.
BATCH_LINES = 20_000


def _refuse(name: str) -> Any:
    raise ValueError(f"not JSON: {name} is no number that JSON has")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


class FormatError(HistoryError):
    """A file that is not what it should be; says which file, which line (from 1) and why."""

    def __init__(self, source: str, line: int | None, reason: str) -> None:
        where = source if line is None else f"{source}:{line}"
        super().__init__(f"{where}: {reason}")
        self.source = source
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return FormatError, (self.source, self.line, self.reason)


def read_jsonl(path: str | Path, *, strict: bool = False) -> History:
    """Read a JSONL history.

    A last line without an end that does not parse is what a killed writer leaves: it is dropped and reported in
    ``History.problems``, unless ``strict``.  Raises :class:`FormatError` for any other bad line, ``OSError`` for a
    file that cannot be read.
    """
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return read_jsonl_lines(file, source=str(path), strict=strict)
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


def read_jsonl_lines(lines: Iterable[str], *, source: str = "<lines>", strict: bool = False) -> History:
    """The same from any iterable of lines (with or without their newline)."""
    builder = HistoryBuilder()
    problems: list[str] = []
    iterator = iter(lines)
    first_line = 1
    collecting = gc.isenabled()
    gc.disable()
    try:
        batch = list(islice(iterator, BATCH_LINES))
        while batch:
            following = list(islice(iterator, BATCH_LINES))
            _feed(builder, batch, first_line, source, strict or bool(following), problems)
            first_line += len(batch)
            batch = following
    finally:
        if collecting:
            gc.enable()
    history = builder.finish()
    history.problems.extend(problems)
    return history


def _feed(
    builder: HistoryBuilder, batch: list[str], first_line: int, source: str, strict: bool, problems: list[str]
) -> None:
    before = builder.events
    numbers: list[int] | range = range(first_line, first_line + len(batch))
    if first_line == 1 and batch[0][:1] == "\ufeff":
        batch[0] = batch[0][1:]
    try:
        events = _decode("[" + ",".join(batch) + "]")
    except (ValueError, RecursionError):
        events = None
    if events is None or len(events) != len(batch):
        parsed = list(_one_by_one(batch, first_line, source, strict, problems))
        numbers = [number for number, _ in parsed]
        events = [event for _, event in parsed]
    try:
        builder.feed(events)
    except FormatError:
        raise
    except HistoryError as error:
        offset = (error.event or before) - before
        raise FormatError(source, numbers[offset], error.reason) from error


def _one_by_one(
    batch: list[str], first_line: int, source: str, strict: bool, problems: list[str]
) -> Iterator[tuple[int, Any]]:
    last = len(batch) - 1
    for number, line in enumerate(batch):
        if not line.strip():
            continue
        try:
            event = _decode(line)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"not JSON: {error.msg} at column {error.colno}"
            if number == last and not line.endswith("\n") and not strict:
                problems.append(f"{source}:{first_line + number}: the last line is cut short and was left out")
                return
            raise FormatError(source, first_line + number, reason) from error
        yield first_line + number, event
