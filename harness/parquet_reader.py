"""Reads a run's history from its Parquet file, for `harness check`; the columns are those of `history_parquet`.

Separate because only this needs pyarrow, and only if a Parquet file is given.
"""

from __future__ import annotations

__all__ = ["read_parquet"]

import json
import os
from typing import Any

from checker.codecs import FormatError, with_keys
from checker.codecs.source import FileEvents
from checker.history import History, key_of_text
from checker.linearizability.budget import Budget
from harness.errors import how_to_get

SCHEMA_VERSION = 1
"""The newest schema version that this reader supports."""

BATCH_ROWS = 65_536
"""Rows converted to Python objects at a time."""

_REQUIRED = ("process", "type", "f")
_COLUMNS = ("index", "time_ns", "process", "is_nemesis", "type", "f", "key", "value", "error", "node")


def read_parquet(path: str, *, lenient: bool = False, budget: Budget | None = None) -> History:
    """The history of the single run in a Parquet file, with events in order of `index`.

    Columns are found by name; missing ones, except process, type and f, count as empty. Rows of the nemesis are
    counted. Invalid rows are refused or, if `lenient`, left out and counted; `budget` limits the memory. Raises
    FormatError, in one line that names the file, for files that are not such a history or hold several runs, and if
    pyarrow is not installed; MemoryLimitError beyond the budget.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        mend = how_to_get("pyarrow")
        raise FormatError(path, None, f"a Parquet file, which takes pyarrow to read: {mend}") from None
    try:
        source = pa.OSFile(os.fsencode(path))  # pyarrow rejects non-UTF-8 paths as str
        file = pq.ParquetFile(source, page_checksum_verification=True)
        names = file.schema_arrow.names
        _check_schema(path, file.schema_arrow)
        if "run_id" in names:
            runs = len(file.read(columns=["run_id"]).column("run_id").unique())
            if runs > 1:
                raise FormatError(path, None, f"holds {runs} runs; `harness analyze` checks many at once")
        table = file.read(columns=[name for name in _COLUMNS if name in names])
        if "index" in names:
            table = table.sort_by("index")
        events = FileEvents(path, lenient=lenient, budget=budget, is_table=True)
        first_row = 1
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            events.feed(_events(batch), range(first_row, first_row + batch.num_rows))
            first_row += batch.num_rows
        history = with_keys(events.finish(), path, lenient=lenient)
        if not _may_hold_booleans(table):
            history.booleans = False
        return history
    except (pa.ArrowException, UnicodeDecodeError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the file system, not from Arrow
            raise
        raise FormatError(path, None, f"not readable as Parquet: {str(error).splitlines()[0]}") from None


def _check_schema(path: str, schema: Any) -> None:
    version = (schema.metadata or {}).get(b"splitbrain.schema_version", b"1").decode(errors="replace")
    if not version.isdigit() or int(version) > SCHEMA_VERSION:
        raise FormatError(path, None, f"written with schema version {version}; this reader knows {SCHEMA_VERSION}")
    missing = [name for name in _REQUIRED if name not in schema.names]
    if missing:
        raise FormatError(path, None, f"not a history: it has no column {', '.join(missing)}")
    # Files of earlier versions do not list the columns they were written with.
    written = (schema.metadata or {}).get(b"splitbrain.columns", b"").decode(errors="replace").split(",")
    missing = [name for name in written if name and name not in schema.names]
    if missing:
        raise FormatError(path, None, f"damaged: its column {missing[0]} is missing")


def _may_hold_booleans(table: Any) -> bool:
    """Whether some key or value contains "true" or "false"; computed by Arrow, without an object per row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in ("key", "value"):
        if name not in table.column_names or pa.types.is_integer(table.schema.field(name).type):
            continue
        column = table.column(name)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            return True
        if any(pc.any(pc.match_substring(column, word)).as_py() for word in ("true", "false")):
            return True
    return False


def _events(batch: Any) -> list[dict[str, Any]]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    nemesis = columns.pop("is_nemesis", None)
    if nemesis is not None:
        columns["process"] = ["nemesis" if is_it else p for p, is_it in zip(columns["process"], nemesis, strict=True)]
    if "time_ns" in columns:
        columns["time"] = columns.pop("time_ns")
    for name, decode in (("value", _value), ("key", _key)):
        if name in columns:
            columns[name] = list(map(decode, columns[name]))
    names = tuple(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _value(text: Any) -> Any:
    """A value decoded from JSON; anything that is not JSON is returned unchanged."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _key(text: Any) -> Any:
    """The key that this text represents."""
    return key_of_text(text) if isinstance(text, str) else text
