"""One file at a time: what is read, and what is reported about what cannot be."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas", reason="the spark extra is not installed")

NEMESIS = {"process": "nemesis", "type": "invoke", "f": "inject", "time": 1, "value": {"id": "f0"}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("jepsen.edn", b"[{:process :nemesis, :type :info, :f :isolate, :value nil}]"),
        ("history.jsonl", json.dumps(NEMESIS).encode() + b"\n"),
    ],
)
def test_a_run_without_client_operations_has_empty_figures(name: str, content: bytes) -> None:
    from spark_analysis.cutting import cut_by_key, whole
    from spark_analysis.digest import digest
    from spark_analysis.reading import read_runs

    (run,) = read_runs(name, content, with_values=True)
    assert len(run) == 0 == run.end_ns
    figures = digest(run, unavailable_after_ns=10**9)
    assert (figures["operations"], figures["counts"], figures["spans"], figures["latencies"]) == (0, [], [], [])
    assert list(cut_by_key(run)) == []
    assert len(whole(run).history) == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("jepsen.edn", b"[]\n", "no events"),
        ("jepsen.edn", b"; nothing\n", "line 1: not JSON"),
        ("jepsen.edn", b"{:process 0 :type :ok :f :read}", "line 1: "),
        ("jepsen.edn", b"{:process 0 :type\n", "line 1: "),
        ("other.json", b'[{"process": 0, "type"', "line 1: not JSON"),
        ("history.jsonl", b"\n\n", "no events"),
        ("history.parquet", b"", "empty"),
        ("history.parquet", b"PAR1", "not readable as Parquet"),
    ],
)
def test_the_error_of_an_unusable_file_says_why(name: str, content: bytes, words: str) -> None:
    from spark_analysis.operations import UnreadableRunError
    from spark_analysis.reading import read_runs

    with pytest.raises(UnreadableRunError, match=words) as caught:
        list(read_runs(name, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["test.json"], "no history: the run ended before its load began"),
        (["test.json", "results.json"], "no history: the run was judged, but its history has been removed"),
        (["test.json", "results.json", "history.jsonl"], "its history is empty"),
    ],
)
def test_a_run_without_a_history_is_reported_with_the_cause(names: list[str], words: str) -> None:
    from spark_analysis import ingest

    listing = ingest.Listing("store")
    ingest._add_run(listing, "store/t/1", {name: (f"store/t/1/{name}", 0) for name in names}, 1 << 30)
    assert listing.problems == [("store/t/1", words)]


def _content(tmp_path: Path, ending: str, events: list[dict[str, Any]]) -> bytes:
    """The history file of a run with these events."""
    from harness.history_parquet import RunIdentity, write_parquet

    jsonl = tmp_path / "history.jsonl"
    jsonl.write_text("".join(json.dumps({"index": at, "time": at, **event}) + "\n" for at, event in enumerate(events)))
    identity = RunIdentity(
        run_id="r1", test_name="t", system="s", workload="register", nemesis="none", cluster="sim", seed=1,
        started_at=datetime(2026, 1, 31, tzinfo=UTC),
    )  # fmt: skip
    write_parquet(jsonl, tmp_path / "history.parquet", identity)
    return (tmp_path / f"history.{ending}").read_bytes()


@pytest.mark.parametrize(
    "keys", [(1, "1"), (True, "true"), (1.5, "1.5"), ([1], "[1]"), ("01", "1"), ("²", "2"), ("--5", "-5")]
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_keys_that_differ_are_checked_apart(tmp_path: Path, keys: tuple[Any, Any], ending: str) -> None:
    """If both had one text, a read of the first key would find what was written to the second."""
    from checker import Register, check
    from spark_analysis.cutting import cut_by_key
    from spark_analysis.reading import read_runs

    calls = (("write", keys[0], 5, 5), ("write", keys[1], 6, 6), ("read", keys[0], None, 5))
    events = [
        {"process": 0, "type": kind, "f": f, "key": key, "value": value}
        for f, key, *values in calls
        for kind, value in zip(("invoke", "ok"), values, strict=True)
    ]
    (run,) = read_runs(f"history.{ending}", _content(tmp_path, ending, events), with_values=True)
    cuts = list(cut_by_key(run))
    assert [len(cut.rows) for cut in cuts] == [2, 1]
    assert {check(cut.history, Register()).verdict.value for cut in cuts} == {"valid"}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_pairs_of_key_and_value_are_split_and_checked_by_key(tmp_path: Path, ending: str) -> None:
    """As by `harness check`: as values of one register, Jepsen's independent keys would look invalid."""
    from checker import Register, check
    from checker.codecs import FormatError
    from spark_analysis.cutting import cut_by_key, whole
    from spark_analysis.reading import read_runs

    def content(*calls: tuple[str, Any, Any]) -> bytes:
        events = [
            {"process": 0, "type": kind, "f": f, "value": value}
            for f, *values in calls
            for kind, value in zip(("invoke", "ok"), values, strict=True)
        ]
        return _content(tmp_path, ending, events)

    calls = (("write", ["a", 1], ["a", 1]), ("write", ["b", 2], ["b", 2]), ("read", ["a", None], ["a", 1]))
    (run,) = read_runs(f"history.{ending}", content(*calls), with_values=True)
    cuts = list(cut_by_key(run))
    assert [(cut.key, cut.rows.tolist()) for cut in cuts] == [("a", [0, 2]), ("b", [1])]
    assert {check(cut.history, Register()).verdict.value for cut in cuts} == {"valid"}
    assert whole(run).history.key == ["a", "b", "a"] and whole(run).history.value == [1, 2, None]
    with pytest.raises(FormatError, match="invoked on key 'a', and completed with key 'b'"):
        list(read_runs(f"history.{ending}", content(("read", ["a", None], ["b", 1])), with_values=True))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_errors_of_operations_stay_with_them_when_a_run_is_cut(tmp_path: Path, ending: str) -> None:
    from spark_analysis.cutting import cut_by_key, whole
    from spark_analysis.reading import read_runs

    calls = [("a", "ok"), ("b", "fail"), ("a", "info"), ("b", "ok"), ("a", "fail"), ("c", "ok")]
    events: list[dict[str, Any]] = []
    for process, (key, kind) in enumerate(calls):
        told = {"process": process, "f": "write", "key": key, "value": process}
        said = {} if kind == "ok" else {"error": f"{kind} of {process}"}
        events += [{**told, "type": "invoke"}, {**told, "type": kind, **said}]
    (run,) = read_runs(f"history.{ending}", _content(tmp_path, ending, events), with_values=True)
    assert whole(run).history.errors == {1: "fail of 1", 2: "info of 2", 4: "fail of 4"}
    cuts = {cut.key: cut.history for cut in cut_by_key(run)}
    assert {key: history.errors for key, history in cuts.items()} == {
        "a": {1: "info of 2", 2: "fail of 4"}, "b": {0: "fail of 1"}, "c": {},
    }  # fmt: skip
    assert [(list(history.value), list(history.status)) for history in cuts.values()] == [
        ([0, 2, 4], ["ok", "info", "fail"]), ([1, 3], ["fail", "ok"]), ([5], ["ok"]),
    ]  # fmt: skip
    without_values = next(read_runs(f"history.{ending}", _content(tmp_path, ending, events)))
    assert (without_values.values, without_values.errors, len(without_values)) == (None, None, 6)


def _numbered(*numbers: object) -> list[dict[str, Any]]:
    """Events with these indexes, whose times and processes are in order."""
    kinds = ("invoke", "ok")
    return [
        {"index": number, "time": at, "process": at // 2, "type": kinds[at % 2], "f": "read", "value": None}
        for at, number in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 1, 2, 3), None),
        ((1, 2, 3, 4), None),  # of other tools
        ((2, 3, 4, 5), "the first index is 2: 2 events are missing"),
        ((0, 1, 3, 4), "index 3 comes after index 1: 1 event is missing"),
        ((1, 2, 5, 6), "index 5 comes after index 2: 2 events are missing"),
        ((0, 2, 1, 3), "index 2 comes after index 0: 1 event is missing"),
        ((0, 1, 1, 2), "index 1 comes after index 1: events must be in order, none twice"),
        ((0, 1, 0, 1), "index 0 comes after index 1: events must be in order, none twice"),
        ((-1, 0, 1, 2), "the first index is -1: events must be in order, none twice"),
        ((0, 1, None, 3), "some events have an index, but one has none or one that is not an integer"),
        ((0, 1, 2**70, 3), "some events have an index, but one has none or one that is not an integer"),
    ],
)
def test_a_history_is_whole_if_its_events_are_numbered_without_a_gap(numbers: Any, words: str | None) -> None:
    from spark_analysis.operations import UnreadableRunError
    from spark_analysis.reading import read_runs

    content = "".join(json.dumps(event) + "\n" for event in _numbered(*numbers)).encode()
    if words is None:
        (run,) = read_runs("history.jsonl", content)
        assert len(run) == 2
    else:
        with pytest.raises(UnreadableRunError) as caught:
            list(read_runs("history.jsonl", content))
        assert str(caught.value) == words


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (((4, "invoke"), (5, "ok")), "process 5 completes an operation that it has not invoked (event 1)"),
        (((4, "ok"), (4, "invoke")), "process 4 completes an operation that it has not invoked (event 0)"),
        (((4, "invoke"), (4, "ok"), (4, "ok")), "process 4 completes an operation that it has not invoked (event 2)"),
        (
            ((4, "invoke"), (3, "invoke"), (4, "invoke")),
            "process 4 invokes an operation while another is open (event 2)",
        ),
    ],
)
def test_events_that_do_not_pair_make_a_history_unusable(steps: Any, words: str) -> None:
    from spark_analysis.operations import UnreadableRunError
    from spark_analysis.reading import read_runs

    events = [{"process": process, "type": kind, "f": "read", "time": at} for at, (process, kind) in enumerate(steps)]
    with pytest.raises(UnreadableRunError) as caught:
        list(read_runs("history.jsonl", "".join(json.dumps(event) + "\n" for event in events).encode()))
    assert str(caught.value) == words


def _rewritten(tmp_path: Path, change: Any) -> bytes:
    """A Parquet history of two operations after a change to its table."""
    import pyarrow.parquet as pq

    _content(tmp_path, "parquet", _numbered(0, 1, 2, 3))
    table = pq.read_table(tmp_path / "history.parquet")
    pq.write_table(change(table), tmp_path / "history.parquet")
    return (tmp_path / "history.parquet").read_bytes()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("index", [0, 1, 3, 4], "index 3 comes after index 1: 1 event is missing"),
        ("index", [0, 1, 1, 2], "two events have the same index"),
        ("index", ["0", "1", "2", "3"], "damaged: its column index is of type string"),
        ("is_nemesis", [0, 0, 0, 0], "damaged: its column is_nemesis is of type int64"),
        ("f", [1, 2, 3, 4], "damaged: its column f is of type int64"),
        ("started_at", [1, 2, 3, 4], "damaged: its column started_at is of type int64"),
        ("time_ns", [0, None, 2, 3], "1 event has no 'time_ns'"),
        ("process", [None, None, 1, 1], "2 events have no 'process'"),
        ("type", ["invoke", "ok", "invoke", "done"], "an event's type is one of invoke, ok, fail, info, not 'done'"),
    ],
)
def test_a_parquet_history_with_a_damaged_column_is_unusable(
    tmp_path: Path, name: str, values: list[Any], words: str
) -> None:
    import pyarrow as pa

    from spark_analysis.operations import UnreadableRunError
    from spark_analysis.reading import read_runs

    content = _rewritten(tmp_path, lambda t: t.set_column(t.column_names.index(name), name, pa.array(values)))
    with pytest.raises(UnreadableRunError) as caught:
        list(read_runs("history.parquet", content))
    assert str(caught.value) == words


def test_events_of_a_parquet_history_are_put_into_the_order_of_their_indexes(tmp_path: Path) -> None:
    from spark_analysis.reading import read_runs

    (run,) = read_runs("history.parquet", _rewritten(tmp_path, lambda t: t.take([3, 0, 2, 1])))
    assert (run.invoked_ns.tolist(), run.completed_ns.tolist()) == ([0, 2], [1, 3])
