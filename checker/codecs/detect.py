"""Detects the format of a file and reads it."""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from checker.codecs.jsonl import Readable, not_utf8, read_json_array, read_jsonl_stream
from checker.codecs.pairs import with_keys
from checker.codecs.source import FileEvents, FormatError
from checker.history import History
from checker.linearizability.budget import Budget

__all__ = ["FORMATS", "detect_format", "is_parquet", "read", "read_bytes", "read_rows"]

#: Formats by the name the command line takes; ``auto`` looks at the first lines.
FORMATS = ("auto", "jsonl", "json", "edn", "edn-keyed", "jepsen-log", "kv", "limo")

_HEAD_BYTES = 4096
#: Bytes read at a time from a file that is parsed as a whole.
_PIECE_BYTES = 1 << 24
_PARQUET = b"PAR1"
#: Advice for a file that takes more than the standard library.
PARQUET_HINT = (
    "a Parquet file, which `harness check` reads from a file, not from a pipe; in Python, pass its rows to "
    "checker.codecs.read_rows"
)
#: First bytes of UTF-16 text and gzip files.
_OTHER_FILES = (b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b")
_COMMENT = re.compile(r"\s*(;|#\s)")
_LIMO = re.compile(r"^\[\d+\]\s+(call|return)", re.M)
_LOG = re.compile(r"\d\s+:(invoke|ok|fail|info)\s+:", re.M)


def detect_format(head: str) -> str:
    """The format of a file that begins with ``head``; ``edn`` if nothing else fits."""
    text = "\n".join(line for line in head.split("\n") if line.strip() and not _COMMENT.match(line)).lstrip()
    if _LIMO.search(text):
        return "limo"
    if text.startswith("[") and re.match(r'\[\s*(\{\s*"|\])', text):
        return "json"
    if re.match(r'\{\s*"', text) or not text:
        return "jsonl"
    if text[0] not in "{[(#" and _LOG.search(text):
        return "jepsen-log"
    return "edn"


def read(path: str | Path, format: str = "auto", *, lenient: bool = False, budget: Budget | None = None) -> History:
    """Read a history file.

    Nothing is left out silently.  Anything that is not an event, or does not fit the events before it, is refused;
    ``lenient`` leaves it out, counts it in ``History.skipped_events`` (events known to be missing in
    ``History.missing_events``) and says why in ``History.problems``.  ``budget`` bounds the memory that reading takes.

    Raises :class:`FormatError` with file, line and reason for a file that does not parse, :class:`MemoryLimitError`
    past the budget, ``ValueError`` for an unknown format name, ``OSError`` for a file that cannot be opened.
    """
    if format not in FORMATS:
        raise ValueError(f"no format {format!r}; known: {', '.join(FORMATS)}")
    source = str(path)
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES) if format == "auto" else b""
        if format == "auto":
            format = _format_of(head, source)
        whole = _Whole(head, file)
        if format == "jsonl":
            return read_jsonl_stream(whole, source=source, lenient=lenient, budget=budget)
        events = FileEvents(source, lenient=lenient, budget=budget)
        content = _content(whole, events)
    text = _decoded(content, format, source)
    events.check_memory("the decoding of its text")
    return _without_booleans(_read_text(text, format, events), text)


class _Whole:
    """A file whose head has been read already, since the head of a pipe cannot be read again."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        if not self._head:
            return self._rest.read(size)
        head, self._head = self._head[:size], self._head[size:]
        return head


def _content(file: Readable, events: FileEvents) -> bytes:
    """The bytes of a file, read in pieces so that the memory budget is checked meanwhile."""
    pieces, size = [], 0
    while piece := file.read(_PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        events.check_memory(f"byte {size:,}")
    return b"".join(pieces)


def read_bytes(content: bytes, *, source: str, lenient: bool = False) -> History:
    """Read a history from bytes, such as a file on another machine or in an archive; the format is ``auto``.

    ``source`` names it in errors.  Raises :class:`FormatError` as :func:`read` does.
    """
    format = _format_of(content[:_HEAD_BYTES], source)
    if format == "jsonl":
        return read_jsonl_stream(io.BytesIO(content), source=source, lenient=lenient)
    text = _decoded(content, format, source)
    return _without_booleans(_read_text(text, format, FileEvents(source, lenient=lenient)), text)


def _without_booleans(history: History, text: str) -> History:
    """The history, marked as free of booleans if its text shows that, which saves inspecting every value later."""
    if "true" not in text and "false" not in text:
        history.booleans = False
    return history


def is_parquet(path: str | Path) -> bool:
    """Whether a file begins as Parquet files do.  Raises ``OSError`` if it cannot be opened.

    Nothing is read from a pipe, since its content would be lost for the real reader.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _format_of(head: bytes, source: str) -> str:
    if head.startswith(_PARQUET):
        raise FormatError(source, None, PARQUET_HINT)
    if head[:2] in _OTHER_FILES:
        raise not_utf8([head], source)
    if b"\0" in head:
        raise FormatError(source, head.count(b"\n", 0, head.index(b"\0")) + 1, "not text: holds a zero byte")
    return detect_format(head.decode("utf-8", "surrogateescape").removeprefix("\ufeff"))


def _decoded(content: bytes, format: str, source: str) -> str:
    try:
        # Other output in a log is skipped, so it need not be UTF-8.
        text = content.decode("utf-8", "surrogateescape" if format == "jepsen-log" else "strict")
    except UnicodeDecodeError as error:
        raise not_utf8(content.split(b"\n"), source) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _read_text(text: str, format: str, events: FileEvents) -> History:
    """Read any format except JSONL, which is read line by line."""
    if format == "json":
        return with_keys(read_json_array(text, events), events.source, lenient=events.lenient)
    # Imported here: runs only need JSONL, and should not wait for the import of other tools' parsers.
    from checker.codecs.edn import read_edn_text
    from checker.codecs.lines import read_jepsen_log_text, read_limo_text

    if format == "jepsen-log":
        return with_keys(read_jepsen_log_text(text, events), events.source, lenient=events.lenient)
    if format == "limo":
        return read_limo_text(text, events)
    keyed = {"edn-keyed": True, "kv": False}.get(format)
    return read_edn_text(text, events, keyed=keyed)


def read_rows(rows: Iterable[Mapping[str, Any]], *, json_columns: Iterable[str] = ("value",)) -> History:
    """A history from the rows of a table (Parquet, Spark), in order of ``index`` if all rows have one.

    Columns are those of the history format.  ``process`` may be text; columns named in ``json_columns`` hold JSON text
    (anything else is taken as it is).  Raises :class:`HistoryError` for rows that do not pair.
    """
    decoded = list(json_columns)
    events = []
    for row in rows:
        event = dict(row)
        process = event.get("process")
        if isinstance(process, str) and process.lstrip("-").isdigit():
            event["process"] = int(process)
        for name in decoded:
            text = event.get(name)
            if isinstance(text, str):
                try:
                    event[name] = json.loads(text)
                except ValueError:
                    pass
        events.append(event)
    if all(event.get("index") is not None for event in events):
        events.sort(key=lambda event: event["index"])
    return with_keys(History.from_events(events), "rows", lenient=False)
