"""From the bytes of one history file to runs: the store's Parquet, JSONL, and foreign formats.

Runs inside executors. A file that cannot be used raises `UnreadableRunError` with the reason in one line, and
affects no other file. Parquet of older and newer harnesses is read by column name: missing optional columns
are null, unknown ones are ignored, and numbers of another width are widened.
"""

from __future__ import annotations

__all__ = ["SCHEMA_VERSION", "read_runs"]

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from checker.codecs import FormatError, read_bytes, with_keys
from checker.codecs.jsonl import DamagedLine, read_batches
from checker.faults import NEMESIS, FaultPairing
from checker.history import NEVER as CHECKER_NEVER
from checker.history import History, HistoryError, key_text, plain
from spark_analysis.cutting import whole
from spark_analysis.operations import (
    NEVER,
    STATUS_NAMES,
    Fault,
    Identity,
    Ints,
    Names,
    RunData,
    UnreadableRunError,
    in_utf8,
    pair,
)

SCHEMA_VERSION = 1
"""The newest version of the store's Parquet that this reader knows; columns of newer ones may have other meanings."""

_REQUIRED = ("time_ns", "process", "type", "f")
_BASE = ("index", "time_ns", "process", "is_nemesis", "type", "f", "key", "node")
_IDENTITY = ("run_id", "test_name", "system", "workload", "nemesis", "cluster", "seed", "configuration", "started_at")
_DICTIONARIES = ["type", "f", "key", "node", *_IDENTITY]
_TYPES: dict[str, Any] = {
    "index": pa.int64(), "time_ns": pa.int64(), "process": pa.int64(), "is_nemesis": pa.bool_(), "seed": pa.int64(),
}  # fmt: skip
_EVENT_TYPES = ("invoke", *STATUS_NAMES)


def read_runs(name: str, content: Any, *, with_values: bool = False) -> Iterator[RunData]:
    """The runs of one file (a compacted Parquet file holds several); the suffix of `name` selects the format.

    `content` is bytes, an Arrow buffer, or the error of reading the file. `with_values` adds values, results and
    errors, which only checking needs, and splits pairs of key and value as `harness check` does. Raises
    UnreadableRunError, and FormatError for a result of another key than the operation's.
    """
    if isinstance(content, UnreadableRunError):
        raise content
    if not len(content):
        raise UnreadableRunError("the file is empty")
    if name.endswith(".parquet"):
        for run in _read_parquet(content, with_values, may_be_empty=name.startswith("part-")):
            yield _with_keys(run, name)
        return
    text = content if isinstance(content, bytes) else content.to_pybytes()
    if name.endswith(".jsonl"):
        yield _with_keys(_from_events(*_read_jsonl(text), with_values), name)
    else:
        yield _from_history(_read_foreign(name, text), with_values)


def _read_parquet(content: Any, with_values: bool, *, may_be_empty: bool) -> Iterator[RunData]:
    """With `may_be_empty` a file without rows is no error: Spark writes such files."""
    try:
        schema = pq.read_schema(pa.BufferReader(content))
        _check_schema(schema)
        repeated = [
            name for name in _DICTIONARIES if name in schema.names and pa.types.is_string(schema.field(name).type)
        ]
        file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=repeated, page_checksum_verification=True)
        table = _base_table(file, with_values)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableRunError(f"not readable as Parquet: {_first_line(error)}") from None
    if table.num_rows == 0 and may_be_empty:
        return
    if table.num_rows == 0:
        raise UnreadableRunError("the history has no events")
    codes = _names(table, "run_id").codes
    edges = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), table.num_rows]
    seen: set[int] = set()
    for start, end in itertools.pairwise(edges):
        if int(codes[start]) in seen:
            raise UnreadableRunError("the events of one run are not contiguous in the file")
        seen.add(int(codes[start]))
        yield _from_table(table if end - start == table.num_rows else table.slice(start, end - start), with_values)


def _check_schema(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(b"splitbrain.schema_version", b"1").decode(errors="replace")
    if not version.isdigit() or int(version) > SCHEMA_VERSION:
        raise UnreadableRunError(
            f"written with schema version {version}, but this reader supports up to {SCHEMA_VERSION}: "
            "analyse it with a newer splitbrain"
        )
    missing = [name for name in _REQUIRED if name not in schema.names]
    if missing:
        raise UnreadableRunError(f"not a history: it has no column {', '.join(missing)}")
    # Files of earlier versions do not list the columns with which they were written.
    written = (schema.metadata or {}).get(b"splitbrain.columns", b"").decode(errors="replace").split(",")
    missing = [name for name in written if name and name not in schema.names]
    if missing:
        raise UnreadableRunError(f"damaged: its column {missing[0]} is missing")
    for name in written:
        if name and not _is_of_its_kind(name, schema.field(name).type):
            raise UnreadableRunError(f"damaged: its column {name} is of type {schema.field(name).type}")


def _is_of_its_kind(name: str, type: Any) -> bool:
    """Whether a column has a type that a column of its name may have in the harness's files."""
    if name in _TYPES:
        return bool(pa.types.is_boolean(type) if name == "is_nemesis" else pa.types.is_integer(type))
    if name == "started_at" and pa.types.is_timestamp(type):
        return bool(type == pa.timestamp("us", tz="UTC"))
    return name not in (*_DICTIONARIES, "value", "error") or bool(pa.types.is_string(type))


def _base_table(file: pq.ParquetFile, with_values: bool) -> pa.Table:
    """The required columns; without `with_values`, `value` is null except in the nemesis's rows."""
    names = file.schema_arrow.names
    wanted = [name for name in (*_BASE, *_IDENTITY) if name in names]
    if with_values:
        wanted += [name for name in ("value", "error") if name in names]
    pieces = []
    for group in range(file.num_row_groups):
        piece = file.read_row_group(group, columns=wanted, use_threads=False)
        if not with_values and "value" in names:
            piece = piece.append_column("value", _nemesis_values(file, group, piece))
        pieces.append(piece)
    if not pieces:
        return file.schema_arrow.empty_table()
    table = pa.concat_tables(pieces, promote_options="default").unify_dictionaries().combine_chunks()
    for name, kind in _TYPES.items():
        if name in table.column_names and table.column(name).type != kind:
            table = table.set_column(table.column_names.index(name), name, _plain_column(table, name).cast(kind))
    return table


def _nemesis_values(file: pq.ParquetFile, group: int, piece: pa.Table) -> pa.Array:
    rows = np.flatnonzero(_is_nemesis(piece))
    if not len(rows):
        return pa.nulls(piece.num_rows, pa.string())
    values = file.read_row_group(group, columns=["value"], use_threads=False).column("value")
    places = np.full(piece.num_rows, -1)
    places[rows] = np.arange(len(rows))
    return values.take(pa.array(rows)).combine_chunks().take(pa.array(places, mask=places < 0)).cast(pa.string())


def _is_nemesis(table: pa.Table) -> Any:
    if "is_nemesis" in table.column_names:
        return _plain_column(table, "is_nemesis").to_numpy(zero_copy_only=False).astype(bool)
    return _numbers(table, "process") < 0


def _plain_column(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _numbers(table: pa.Table, name: str) -> Any:
    column = _plain_column(table, name)
    if column.null_count:
        have = "1 event has" if column.null_count == 1 else f"{column.null_count} events have"
        raise UnreadableRunError(f"{have} no {name!r}")
    return column.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _names(table: pa.Table, name: str) -> Names:
    """A string column, dictionary-encoded; a missing column is all null."""
    if name not in table.column_names:
        return Names(np.full(table.num_rows, -1, np.int32), [])
    column = table.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    return Names(codes, [str(text) for text in column.dictionary.to_pylist()])


def _from_table(table: pa.Table, with_values: bool) -> RunData:
    if "index" in table.column_names:
        index = _numbers(table, "index")
        if (np.diff(index) <= 0).any():
            order = np.argsort(index, kind="stable")
            table, index = table.take(pa.array(order)), index[order]
            if (np.diff(index) == 0).any():
                raise UnreadableRunError("two events have the same index")
        _check_whole(index)
    nemesis = _is_nemesis(table)
    faults = []
    rows = np.flatnonzero(nemesis)
    if len(rows) and "value" in table.column_names:
        part = table.take(pa.array(rows))
        values = _plain_column(part, "value").to_pylist()
        kinds, calls, times = _names(part, "type"), _names(part, "f"), _numbers(part, "time_ns")
        faults = _faults(
            (kinds.at(at) or "", calls.at(at) or "", int(times[at]), _json_or_none(text))
            for at, text in enumerate(values)
        )
    identity = _identity_of(table)
    clients = table.filter(pa.array(~nemesis)) if len(rows) else table
    types = _names(clients, "type")
    translation = np.array([_type_code(name) for name in types.names] or [0], np.int8)
    kind = translation[types.codes]
    return _assemble(
        identity=identity,
        kind=kind,
        process=_numbers(clients, "process"),
        time_ns=_numbers(clients, "time_ns"),
        f=_names(clients, "f"),
        key=_names(clients, "key"),
        node=_names(clients, "node"),
        faults=faults,
        problems=[],
        values=_strings(clients, "value") if with_values else None,
        errors=_strings(clients, "error") if with_values else None,
    )


def _check_whole(index: Ints) -> None:
    """Raise UnreadableRunError if events are missing, going by their numbers, which increase by one from 0 (or, with
    other tools, from 1): for a part of a history no figure and no verdict would be right."""
    if not len(index):
        return
    before = np.concatenate(([index[0] - 1 if index[0] in (0, 1) else -1], index[:-1]))
    gaps = np.flatnonzero(index - before != 1)
    if len(gaps):
        last, found = int(before[gaps[0]]), int(index[gaps[0]])
        where = f"index {found} comes after index {last}" if last >= 0 else f"the first index is {found}"
        missing = int((index - before)[gaps[0]]) - 1
        if missing < 0:
            raise UnreadableRunError(f"{where}: events must be in order, none twice")
        raise UnreadableRunError(f"{where}: {'1 event is' if missing == 1 else f'{missing} events are'} missing")


def _strings(table: pa.Table, name: str) -> pa.Array:
    if name not in table.column_names:
        return pa.nulls(table.num_rows, pa.string())
    return _plain_column(table, name).cast(pa.string())


def _type_code(name: str) -> int:
    try:
        return _EVENT_TYPES.index(name)
    except ValueError:
        raise UnreadableRunError(f"an event's type is one of invoke, ok, fail, info, not {name!r}") from None


def _identity_of(table: pa.Table) -> Identity:
    found: dict[str, Any] = {}
    for name in _IDENTITY:
        if name in table.column_names:
            value = table.column(name)[0].as_py()
            if name == "seed":
                found[name] = value
            else:
                found[name] = _utc_text(value) if isinstance(value, datetime) else str(value or "")
    return Identity(**found)


def _utc_text(moment: datetime) -> str:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


def _assemble(
    *, identity: Identity, kind: Any, process: Any, time_ns: Any, f: Names, key: Names, node: Names,
    faults: list[Fault], problems: list[str], values: Any, errors: Any,
) -> RunData:  # fmt: skip
    """Pair client events into operations."""
    invocation, completion = pair(process, kind == 0)
    known = completion >= 0
    safe = np.where(known, completion, 0)
    status = np.where(known, kind[safe] - 1 if len(kind) else 0, 2).astype(np.int8)
    completed_ns = np.where(known, time_ns[safe] if len(kind) else 0, NEVER)
    node_codes = np.where(known, node.codes[safe] if len(kind) else -1, -1).astype(np.int32)
    results = None
    taken = pa.array(safe, mask=~known)
    if values is not None:
        results = values.take(taken)
        values = values.take(pa.array(invocation))
    if errors is not None:
        errors = errors.take(taken)
    return RunData(
        identity=identity,
        process=process[invocation],
        f=f.take(invocation),
        key=key.take(invocation),
        node=Names(node_codes, node.names),
        status=status,
        invoked_ns=time_ns[invocation],
        completed_ns=completed_ns,
        invoked=invocation,
        completed=completion,
        end_ns=int(time_ns.max()) if len(time_ns) else 0,
        faults=faults,
        problems=problems,
        values=values,
        results=results,
        errors=errors,
    )


def _faults(events: Iterator[tuple[str, str, int, Any]]) -> list[Fault]:
    """Faults from the nemesis's events (type, f, time, value), paired as in the harness's own report."""
    pairing = FaultPairing()
    for event in events:
        pairing.add(*event)
    return [
        Fault(
            fault_id=str(fault["id"]),
            nemesis=str(fault.get("nemesis") or ""),
            variant=str(fault.get("variant") or ""),
            start_ns=fault["start_ns"],
            end_ns=fault["end_ns"],
            proven=fault["proven"],
            healed=fault["healed"],
            exercised=fault["exercised"],
        )
        for fault in pairing.faults()
        if fault["start_ns"] is not None
    ]


def _json_or_none(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def _read_jsonl(content: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        for batch in read_batches(io.BytesIO(content)):
            for number, event in batch.whole():
                if (problem := _event_problem(event)) is not None:
                    raise UnreadableRunError(f"line {number} is not an event: {problem}")
                events.append(event)
    except DamagedLine as line:
        if not line.is_cut:
            shown = line.text.decode(errors="replace")
            raise UnreadableRunError(f"line {line.number}: {line.reason}: {shown}") from None
        problems.append(f"the last line was cut short and is ignored ({line.size_bytes} bytes)")
    if not events:
        raise UnreadableRunError("the history has no events")
    if any("index" in event for event in events):
        try:
            _check_whole(np.array([event["index"] for event in events], np.int64))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UnreadableRunError(
                "some events have an index, but one has none or one that is not an integer"
            ) from None
    return events, problems


def _event_problem(event: Any) -> str | None:
    """Why an object is no event; None if it is one. Booleans and floats are not accepted as process or time."""
    if not isinstance(event, dict):
        return "it is not an object"
    missing = [name for name in ("process", "type", "f", "time") if name not in event]
    if missing:
        return f"it has no {', '.join(missing)}"
    if type(event["process"]) is not int and event["process"] != NEMESIS:
        return f"its process is {event['process']!r}"
    if type(event["time"]) is not int:
        return f"its time is {event['time']!r}"
    if type(event["f"]) is not str:
        return f"its f is {event['f']!r}"
    return None


def _from_events(events: list[dict[str, Any]], problems: list[str], with_values: bool) -> RunData:
    faults = _faults(
        (event["type"], event["f"], event["time"], event.get("value"))
        for event in events
        if event["process"] == NEMESIS
    )
    clients = [event for event in events if event["process"] != NEMESIS]
    try:
        return _assemble(
            identity=Identity(),
            kind=np.array([_type_code(event["type"]) for event in clients], np.int8),
            process=np.array([event["process"] for event in clients], np.int64),
            time_ns=np.array([event["time"] for event in clients], np.int64),
            f=_encode([event["f"] for event in clients]),
            key=_encode([_text(key_text(event.get("key"))) for event in clients]),
            node=_encode([_text(event.get("node")) for event in clients]),
            faults=faults,
            problems=problems,
            values=pa.array([_value_text(event.get("value")) for event in clients], pa.string())
            if with_values
            else None,
            errors=pa.array([_text(event.get("error")) for event in clients], pa.string()) if with_values else None,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableRunError(f"an event does not fit the history format: {_first_line(error)}") from None


def _encode(texts: list[str | None]) -> Names:
    codes: dict[str, int] = {}
    column = [-1 if text is None else codes.setdefault(text, len(codes)) for text in texts]
    return Names(np.array(column, np.int32), [in_utf8(name) for name in codes])


def _text(value: Any) -> str | None:
    return in_utf8(value) if isinstance(value, str) else None if value is None else json.dumps(plain(value))


def _value_text(value: Any) -> str | None:
    return None if value is None else json.dumps(plain(value), separators=(",", ":"))


def _read_foreign(name: str, content: bytes) -> History:
    try:
        return read_bytes(content, source=name)
    except FormatError as error:
        raise UnreadableRunError(f"line {error.line}: {error.reason}" if error.line else error.reason) from None
    except (HistoryError, ValueError, RecursionError) as error:
        raise UnreadableRunError(_first_line(error)) from None


def _with_keys(run: RunData, source: str) -> RunData:
    """The run with keys taken from its values, if it names no keys and its values are pairs of key and value."""
    if run.values is None or not len(run) or bool((run.key.codes >= 0).any()):
        return run
    first = run.values[0].as_py()
    if first is None or first[:1] != "[" or first[1:2] in ("[", "{"):  # no pair with a key: done
        return run
    history = with_keys(whole(run).history, source, lenient=False)
    if not history.keyed:
        return run
    keys, key_objects = _encode_keys(history.key)
    return replace(run, key=keys, key_objects=key_objects, values=history.value, results=history.result)


def _encode_keys(column: Sequence[Any]) -> tuple[Names, list[Any]]:
    """Keys encoded by their text, and the original keys by code."""
    keys = _encode([_text(key_text(key)) for key in column])
    key_objects: list[Any] = [None] * len(keys.names)
    for code, key in zip(keys.codes.tolist(), column, strict=True):
        if code >= 0:
            key_objects[code] = key
    return keys, key_objects


def _from_history(history: History, with_values: bool) -> RunData:
    """The run of a foreign history, whose operations the checker's codec has already paired."""
    count = len(history)
    if not count and not history.nemesis_events:
        raise UnreadableRunError("the history has no events")
    numbers: dict[str, int] = {}
    process = [p if type(p) is int else numbers.setdefault(str(p), -2 - len(numbers)) for p in history.process]
    timed = all(time_ns is not None for time_ns in history.invoked_ns)
    started = [0 if time_ns is None else time_ns for time_ns in history.invoked_ns]
    ended = [NEVER if time_ns is None else time_ns for time_ns in history.returned_ns]
    positions = np.array(history.returned, np.int64)
    keys, key_objects = _encode_keys(history.key)
    return RunData(
        identity=Identity(),
        process=np.array(process, np.int64),
        f=_encode(list(history.f)),
        key=keys,
        node=_encode(list(history.node)),
        status=np.array([STATUS_NAMES.index(status) for status in history.status], np.int8),
        invoked_ns=np.array(started, np.int64),
        completed_ns=np.array(ended, np.int64),
        invoked=np.array(history.invoked, np.int64),
        completed=np.where(positions >= CHECKER_NEVER, NEVER, positions),
        end_ns=max((*started, *ended), default=0),
        problems=list(history.problems),
        values=list(history.value) if with_values else None,
        results=list(history.result) if with_values else None,
        errors=pa.array([_text(history.errors.get(row)) for row in range(count)], pa.string()) if with_values else None,
        key_objects=key_objects,
        processes=list(history.process),
        history=history if with_values else None,
        timed=timed,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
