"""A history as Parquet: one typed row per event, each with the identity of its run.

This is what Spark reads: the files of many runs form one table, so every row has its run's identity, system, workload,
nemesis, cluster and configuration. The columns are defined only in `HISTORY_SCHEMA`; a file's metadata contains
`SCHEMA_VERSION`, so that a reader of many runs can tell old files from new ones.

Separate from the history writer because importing pyarrow takes a noticeable fraction of a second, and only the end of
a run needs it.
"""

from __future__ import annotations

__all__ = ["HISTORY_SCHEMA", "ROW_GROUP_EVENTS", "SCHEMA_VERSION", "RunIdentity", "write_parquet"]

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from checker.faults import NEMESIS
from checker.history import key_text
from harness.arrow_arrays import array_of, repeated
from harness.history_writer import HistoryError, HistoryWriteError, read_history
from harness.test import Test

SCHEMA_VERSION = "1"
"""Increased when a column changes its meaning or type, not when columns are added."""

ROW_GROUP_EVENTS = 65_536
"""Events in memory during conversion, and per row group: about 40 MB, and a size by which Spark can skip or split."""

NEMESIS_PROCESS = -1
"""`process` of the nemesis, which has no number; `is_nemesis` is also set."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

HISTORY_SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("test_name", pa.string(), nullable=False),
        pa.field("system", pa.string(), nullable=False),
        pa.field("workload", pa.string(), nullable=False),
        pa.field("nemesis", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("configuration", pa.string(), nullable=False),  # JSON with sorted keys: equal text, equal settings
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("process", pa.int64(), nullable=False),
        pa.field("is_nemesis", pa.bool_(), nullable=False),
        pa.field("type", pa.string(), nullable=False),
        pa.field("f", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("value", pa.string()),  # JSON
        pa.field("error", pa.string()),
        pa.field("node", pa.string()),
    ],
    metadata={"splitbrain.schema_version": SCHEMA_VERSION},
)
HISTORY_SCHEMA = HISTORY_SCHEMA.with_metadata(
    # Pages have checksums, but the schema has none: a corrupted column name would look like a column that an older
    # harness did not have.
    {**HISTORY_SCHEMA.metadata, b"splitbrain.columns": ",".join(HISTORY_SCHEMA.names).encode()}
)
"""The columns of a history, in order. Times are nanoseconds since the test began, `started_at` is UTC."""

_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The columns that identify a row's run. `started_at` has a time zone; `nemesis` is `Test.faults`."""

    run_id: str
    test_name: str
    system: str
    workload: str
    nemesis: str
    cluster: str
    seed: int
    started_at: datetime
    configuration: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.started_at.tzinfo is None:
            raise ValueError("started_at needs a time zone: a store may collect runs of several places")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"a seed is a 64-bit number, not {self.seed}")

    @classmethod
    def of(cls, test: Test, *, run_id: str, started_at: datetime) -> RunIdentity:
        """The identity of a run of `test`; its node count and settings are the configuration."""
        return cls(
            run_id=run_id,
            test_name=test.name,
            system=test.system,
            workload=test.workload,
            nemesis=test.faults,
            cluster=test.cluster,
            seed=test.seed,
            started_at=started_at,
            configuration={"nodes": str(test.nodes), **test.settings},
        )


def write_parquet(history_path: str | os.PathLike[str], parquet_path: str | os.PathLike[str], run: RunIdentity) -> int:
    """Convert a JSONL history to one Parquet file and return its number of rows.

    Streams: at most `ROW_GROUP_EVENTS` events are in memory. The file is created atomically; a truncated last line is
    left out, as `read_history` does. Raises HistoryError if the history cannot be read, HistoryWriteError if the
    Parquet file cannot be written.
    """
    target = os.fspath(parquet_path)
    temporary = f"{target}.partial"
    events = iter(read_history(history_path))
    rows = 0
    try:
        constants: dict[str, pa.Array] = {}
        with (
            pa.OSFile(os.fsencode(temporary), "wb") as file,  # pyarrow rejects non-UTF-8 paths as str
            pq.ParquetWriter(file, HISTORY_SCHEMA, compression="zstd", write_page_checksum=True) as writer,
        ):
            while batch := _batch(events, run, constants):
                writer.write_batch(batch, row_group_size=ROW_GROUP_EVENTS)
                rows += batch.num_rows
        os.replace(temporary, target)
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise HistoryWriteError(f"cannot write {target}: {reason}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return rows


def _batch(events: Iterator[dict[str, Any]], run: RunIdentity, constants: dict[str, pa.Array]) -> pa.RecordBatch | None:
    """The next row group; None at the end. The first and largest one fills `constants` with the run's columns."""
    chunk = list(islice(events, ROW_GROUP_EVENTS))
    if not chunk:
        return None
    count = len(chunk)
    columns: dict[str, list[Any]] = {
        "index": [event.get("index") for event in chunk],
        "time_ns": [event["time"] for event in chunk],
        "process": [_process(event["process"]) for event in chunk],
        "is_nemesis": [event["process"] == NEMESIS for event in chunk],
        "type": [event["type"] for event in chunk],
        "f": [event["f"] for event in chunk],
        "key": [key_text(event.get("key")) for event in chunk],
        "value": [_value(event.get("value")) for event in chunk],
        "error": [_string(event.get("error")) for event in chunk],
        "node": [_string(event.get("node")) for event in chunk],
    }
    if not constants:
        constants.update(_constants(run, count))
    arrays = [
        constants[column.name].slice(0, count) if column.name in constants else _array(columns[column.name], column)
        for column in HISTORY_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=HISTORY_SCHEMA)


def _constants(run: RunIdentity, count: int) -> dict[str, pa.Array]:
    values = {
        **asdict(run),
        "configuration": json.dumps(dict(run.configuration), sort_keys=True),
        "started_at": (run.started_at - EPOCH) // timedelta(microseconds=1),
    }
    return {name: repeated(value, HISTORY_SCHEMA.field(name).type, count) for name, value in values.items()}


def _array(values: list[Any], column: pa.Field) -> pa.Array:
    if not column.nullable and None in values:
        raise HistoryError(f"an event of the history has no {column.name!r}")
    try:
        return array_of(values, column.type)
    except (TypeError, OverflowError) as error:
        raise HistoryError(f"an event's {column.name!r} does not fit {column.type}: {error}") from error


def _process(process: int | str) -> int:
    return NEMESIS_PROCESS if process == NEMESIS else int(process)


def _string(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _encode_json(value)


def _value(value: Any) -> str | None:
    if type(value) is int:
        return str(value)
    return None if value is None else _encode_json(value)
