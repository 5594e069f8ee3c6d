"""Histories as Parquet: every event, typed, with the identity of its run."""

import dataclasses
import json
import sys
from datetime import UTC, datetime

import pytest

if sys.implementation.name == "pypy":
    pytest.skip("PyPy has no pyarrow", allow_module_level=True)

import pyarrow as pa
import pyarrow.parquet as pq

import harness.history_parquet as module
from harness.history_parquet import HISTORY_SCHEMA, SCHEMA_VERSION, RunIdentity, write_parquet
from harness.history_writer import HistoryError, HistoryWriteError, HistoryWriter
from harness.parquet_reader import read_parquet
from harness.test import NemesisChoice, Test

STARTED = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
TEST = Test(
    system="broker",
    cluster="sim",
    nodes=5,
    workload="register",
    nemesis=(NemesisChoice("partition", "halves"),),
    nemesis_interval_s=5,
    time_limit_s=30,
    concurrency=5,
    rate=0,
    seed=7,
    settings={"read_mode": "lease"},
)
RUN = RunIdentity.of(TEST, run_id="r1", started_at=STARTED)
EVENTS = [
    {"process": 0, "type": "invoke", "f": "write", "key": 5, "value": 2},
    {"process": 0, "type": "ok", "f": "write", "key": 5, "value": 2, "node": "n1"},
    {"process": 1, "type": "invoke", "f": "read", "key": "a key", "value": None},
    {"process": "nemesis", "type": "invoke", "f": "inject", "value": {"id": "f1", "grudge": {"n1": ["n2"]}}},
    {"process": 1, "type": "info", "f": "read", "key": "a key", "value": [1, "x"], "error": "timeout \ud800"},
]


@pytest.fixture
def history(tmp_path):
    path = tmp_path / "history.jsonl"
    with HistoryWriter(path, iter(range(100, 1000, 100)).__next__) as writer:
        for event in EVENTS:
            writer.append(event)
    return path


@pytest.mark.parametrize("row_group", [1, 2, 100])
def test_every_event_is_a_typed_row(history, tmp_path, monkeypatch, row_group):
    monkeypatch.setattr(module, "ROW_GROUP_EVENTS", row_group)
    assert write_parquet(history, tmp_path / "h.parquet", RUN) == 5
    table = pq.read_table(tmp_path / "h.parquet")
    assert table.schema.equals(HISTORY_SCHEMA)
    assert table.schema.metadata[b"splitbrain.schema_version"] == SCHEMA_VERSION.encode()
    assert table["index"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["time_ns"].to_pylist() == [100, 200, 300, 400, 500]
    assert table["process"].to_pylist() == [0, 0, 1, -1, 1]
    assert table["is_nemesis"].to_pylist() == [False, False, False, True, False]
    assert table["key"].to_pylist() == ["5", "5", "a key", None, "a key"]
    assert table["value"].to_pylist()[:3] == ["2", "2", None]
    assert [json.loads(text) for text in table["value"].to_pylist()[3:]] == [EVENTS[3]["value"], [1, "x"]]
    assert table["error"].to_pylist()[4] == "timeout \\ud800"
    assert table["node"].to_pylist() == [None, "n1", None, None, None]
    assert set(table["started_at"].to_pylist()) == {STARTED}
    row = table.select(["system", "workload", "nemesis", "cluster", "seed", "test_name", "run_id"]).to_pylist()[4]
    assert row == {
        "system": "broker",
        "workload": "register",
        "nemesis": "partition=halves",
        "cluster": "sim",
        "seed": 7,
        "test_name": "broker-register-partition",
        "run_id": "r1",
    }
    assert json.loads(table["configuration"][0].as_py()) == {"nodes": "5", "read_mode": "lease"}
    assert pq.ParquetFile(tmp_path / "h.parquet").num_row_groups == -(-5 // row_group)


def test_a_cut_history_is_converted_up_to_the_cut_and_an_empty_one_to_no_rows(history, tmp_path):
    history.write_bytes(history.read_bytes()[:-10])
    assert write_parquet(history, tmp_path / "h.parquet", RUN) == 4
    history.write_bytes(b"")
    assert write_parquet(history, tmp_path / "h.parquet", RUN) == 0
    assert pq.read_table(tmp_path / "h.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("garbage", "history.jsonl:6: not JSON"),
        ('{"time":1,"process":0,"type":"ok","f":"w"}', "no 'index'"),
        ('{"index":5,"time":99999999999999999999,"process":0,"type":"ok","f":"w"}', "time is at most .* of 20 digits"),
        ('{"index":99999999999999999999,"time":5,"process":0,"type":"ok","f":"w"}', "'index' does not fit int64"),
    ],
)
def test_a_damaged_history_leaves_no_partial_file(history, tmp_path, line, message):
    history.write_text(history.read_text() + line + "\n")
    with pytest.raises(HistoryError, match=message):
        write_parquet(history, tmp_path / "h.parquet", RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.jsonl"]


@pytest.mark.parametrize("name", ["not UTF-8 \udcff", "a%20b?#c", "s3:x"])
def test_parquet_is_written_in_directories_with_unusual_names(history, tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    assert write_parquet(history, place / "h.parquet", RUN) == len(EVENTS)
    assert len(read_parquet(str(place / "h.parquet"))) == 2
    assert [path.name for path in place.iterdir()] == ["h.parquet"]


def test_a_path_that_cannot_be_written_is_reported_in_one_line(history, tmp_path):
    with pytest.raises(HistoryWriteError, match=r"cannot write .*h\.parquet: ") as caught:
        write_parquet(history, tmp_path / "missing" / "h.parquet", RUN)
    assert "\n" not in str(caught.value)


def test_an_identity_needs_a_time_zone_and_a_64_bit_seed():
    with pytest.raises(ValueError, match="time zone"):
        RunIdentity.of(TEST, run_id="r", started_at=datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="64-bit"):
        RunIdentity(
            run_id="r",
            test_name="t",
            system="s",
            workload="w",
            nemesis="n",
            cluster="c",
            seed=2**63,
            started_at=STARTED,
        )


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"nemesis": ()}, "none"),
        ({"nemesis": (NemesisChoice("partition", "halves"), NemesisChoice("kill", None))}, "partition=halves+kill"),
        ({"nemesis": (), "nemesis_schedule": "schedules/cut-leader.json"}, "schedule=cut-leader.json"),
    ],
)
def test_parquet_and_spark_tables_name_the_faults_alike(options, faults):
    pytest.importorskip("pandas", reason="the spark extra is not installed")
    from spark_analysis.outcomes import outcome_of_test

    test = dataclasses.replace(TEST, **options)
    identity = RunIdentity.of(test, run_id="r", started_at=STARTED)
    outcome = outcome_of_test(json.dumps(test.to_json()).encode())
    assert identity.nemesis == outcome["nemesis"] == faults
    assert identity.test_name == outcome["test_name"] == test.name


def test_every_flipped_bit_of_a_page_is_detected_or_harmless(history, tmp_path):
    path = tmp_path / "h.parquet"
    write_parquet(history, path, RUN)
    whole = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    seen = 4
    for number in range(group.num_columns):
        chunk = group.column(number)
        assert (chunk.dictionary_page_offset or chunk.data_page_offset) == seen  # no byte lies between them
        # With another column: a page with too few values is noticed only beside another one.
        names = [chunk.path_in_schema, group.column((number or group.num_columns) - 1).path_in_schema]
        before = pq.ParquetFile(path).read(names)
        for at in range(seen, seen + chunk.total_compressed_size):
            changed = pa.BufferReader(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                after = pq.ParquetFile(changed, page_checksum_verification=True).read(names)
            except (OSError, ValueError):
                continue
            assert after.equals(before), (names, at)
        seen += chunk.total_compressed_size
    assert seen == len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
