"""`harness check` on the Parquet that a run leaves behind."""

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest

if sys.implementation.name == "pypy":
    pytest.skip("PyPy has no pyarrow", allow_module_level=True)

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checker import FormatError, read_jsonl
from harness.cli import main
from harness.history_parquet import RunIdentity, write_parquet
from harness.history_writer import HistoryWriter
from harness.parquet_reader import read_parquet

RUN = RunIdentity(
    run_id="r1", test_name="t", system="broker", workload="register", nemesis="none", cluster="sim", seed=1,
    started_at=datetime(2026, 1, 31, tzinfo=UTC),
)  # fmt: skip
EVENTS = [
    {"process": 0, "type": "invoke", "f": "write", "key": 5, "value": 2},
    {"process": "nemesis", "type": "invoke", "f": "inject", "value": {"id": "f1"}},
    {"process": 0, "type": "ok", "f": "write", "key": 5, "value": 2, "node": "n1"},
    {"process": 1, "type": "invoke", "f": "read", "key": "a key", "value": None},
    {"process": 1, "type": "fail", "f": "read", "key": "a key", "value": None, "error": "refused"},
    {"process": 2, "type": "invoke", "f": "read", "key": 5, "value": None},
    {"process": 2, "type": "ok", "f": "read", "key": 5, "value": 2},
]


@pytest.fixture
def paths(tmp_path):
    jsonl, parquet = tmp_path / "history.jsonl", tmp_path / "history.parquet"
    with HistoryWriter(jsonl, iter(range(100, 10_000, 100)).__next__) as writer:
        for event in EVENTS:
            writer.append(event)
    write_parquet(jsonl, parquet, RUN)
    return jsonl, parquet


def test_parquet_and_jsonl_give_the_same_history(paths):
    jsonl, parquet = paths
    assert list(read_parquet(str(parquet))) == list(read_jsonl(jsonl))


def test_key_value_pairs_are_split_as_in_jsonl(tmp_path):
    steps = [("write", [0, 1], [0, 1]), ("write", [1, 2], [1, 2]), ("read", [0, None], [0, 1])]
    with HistoryWriter(tmp_path / "history.jsonl", iter(range(100, 10_000, 100)).__next__) as writer:
        for f, asked, answered in steps:
            writer.append({"process": 0, "type": "invoke", "f": f, "value": asked})
            writer.append({"process": 0, "type": "ok", "f": f, "value": answered})
    write_parquet(tmp_path / "history.jsonl", tmp_path / "history.parquet", RUN)
    history = read_parquet(str(tmp_path / "history.parquet"))
    assert list(history) == list(read_jsonl(tmp_path / "history.jsonl")) and history.keyed


def test_rows_are_read_in_index_order(paths):
    jsonl, parquet = paths
    table = pq.read_table(parquet)
    pq.write_table(table.take(pc.sort_indices(table, [("index", "descending")])), parquet)
    assert list(read_parquet(str(parquet))) == list(read_jsonl(jsonl))


def test_booleans_are_ruled_out_if_the_file_has_none(paths):
    _, parquet = paths
    assert read_parquet(str(parquet)).booleans is False
    table = pq.read_table(parquet)
    values = ["[1, true]" if v and at == 6 else v for at, v in enumerate(table["value"].to_pylist())]
    pq.write_table(table.set_column(table.column_names.index("value"), "value", pa.array(values)), parquet)
    assert read_parquet(str(parquet)).booleans is None


def test_check_accepts_parquet_files(paths, capsys):
    _, parquet = paths
    assert main(["check", str(parquet), "--model", "register"]) == 0
    assert capsys.readouterr().out.startswith(f"{parquet}: valid")
    table = pq.read_table(parquet)
    values = [json.dumps(3) if v and at == 6 else v for at, v in enumerate(table["value"].to_pylist())]
    pq.write_table(table.set_column(table.column_names.index("value"), "value", pa.array(values)), parquet)
    assert main(["check", str(parquet), str(parquet), "--model", "register", "--jobs", "2"]) == 1


def damage(kind, parquet):
    table = pq.read_table(parquet)
    if kind == "cut":
        parquet.write_bytes(parquet.read_bytes()[:-100])
    elif kind == "other":
        pq.write_table(pa.table({"x": [1]}), parquet)
    elif kind == "newer":
        pq.write_table(table.replace_schema_metadata({"splitbrain.schema_version": "9"}), parquet)
    elif kind == "runs":
        second = table.set_column(0, table.schema.field(0), pa.array(["r2"] * len(table)))
        pq.write_table(pa.concat_tables([table, second]), parquet)
    else:
        pq.write_table(table.slice(2), parquet)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cut", "not readable as Parquet"),
        ("other", "not a history: it has no column process, type, f"),
        ("newer", "written with schema version 9; this reader knows 1"),
        ("runs", "holds 2 runs; `harness analyze` checks many at once"),
        ("orphan", "row 1: the first index is 2: 2 events are missing"),
    ],
)
def test_parquet_that_is_not_a_history_is_refused_in_one_line(paths, capsys, kind, reason):
    _, parquet = paths
    damage(kind, parquet)
    assert main(["check", str(parquet), "--model", "register"]) == 254
    error = capsys.readouterr().err
    assert error.startswith(f"{parquet}: {reason}") and error.count("\n") == 1


def test_reading_without_pyarrow_says_how_to_install_it(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FormatError, match=r"which takes pyarrow to read: .*python.* -m pip install pyarrow"):
        read_parquet(str(paths[1]))


def test_check_of_jsonl_does_not_import_pyarrow(paths):
    code = "import sys; from harness.cli import main; print(main(sys.argv[1:]), 'pyarrow' in sys.modules)"
    command = [sys.executable, "-c", code, "check", str(paths[0]), "--model", "register"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.splitlines()[-1] == "0 False"


MIXED_KEYS = (
    1,
    "1",
    "01",
    "--5",
    "²",
    "٣",
    -3,
    "-3",
    "-0",
    True,
    "true",
    1.5,
    "1.5",
    '"a"',
    "a",
    "null",
    "[1]",
    "10.0.0.1",
)


def test_keys_that_differ_in_the_jsonl_differ_in_parquet(tmp_path):
    jsonl, parquet = tmp_path / "history.jsonl", tmp_path / "history.parquet"
    with HistoryWriter(jsonl, iter(range(100, 10_000, 100)).__next__) as writer:
        for key in MIXED_KEYS:
            for kind in ("invoke", "ok"):
                writer.append({"process": 0, "type": kind, "f": "write", "key": key, "value": 2})
    write_parquet(jsonl, parquet, RUN)
    keys = read_parquet(str(parquet)).key
    assert len(set(map(repr, keys))) == len(MIXED_KEYS)
    strings = [(found, key) for found, key in zip(keys, MIXED_KEYS, strict=True) if isinstance(key, str)]
    assert all(found == key for found, key in strings)
    assert (
        pq.read_table(parquet).column("key").to_pylist()[-2:] == ["10.0.0.1"] * 2
    )  # a plain string is stored as it is
