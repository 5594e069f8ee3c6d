"""Writing and reading a history; misuse and full disks raise different errors."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness.history_writer as module
from harness.errors import HarnessError
from harness.history_writer import HistoryError, HistoryWriteError, HistoryWriter, read_history
from harness.live_stats import RATE_SECONDS, LiveStats, quantile

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


class Clock:
    """A clock in nanoseconds that only the test advances."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def invoke(process=0, f="write", **fields):
    return {"process": process, "type": "invoke", "f": f, "value": 1, **fields}


def complete(process=0, f="write", kind="ok", **fields):
    return {"process": process, "type": kind, "f": f, "value": 1, **fields}


def fault(f, kind, ident="f1", **value):
    value = {"id": ident, "nemesis": "partition", "variant": "halves", **value}
    return {"process": "nemesis", "type": kind, "f": f, "value": value}


@given(operations=st.lists(st.tuples(st.text(min_size=1), JSON, JSON, *[st.none() | st.text()] * 3)))
def test_read_history_returns_the_events_that_were_written(tmp_path_factory, operations):
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    returned = []
    with HistoryWriter(path, Clock()) as writer:
        for f, key, value, error, node, durability in operations:
            event = {"process": 3, "type": "invoke", "f": f, "key": key, "value": value}
            returned.append(writer.append(event))
            told = {"error": error, "node": node, "durability": durability}
            returned.append(writer.append({**event, "type": "info", **told}))
    absent_when_null = ("key", "error", "node", "durability")
    expected = [{k: v for k, v in e.items() if v is not None or k not in absent_when_null} for e in returned]
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert list(read_history(path)) == expected
    assert [event["index"] for event in expected] == list(range(len(expected)))


def test_append_adds_index_and_time_without_changing_the_given_event(tmp_path):
    clock = Clock()
    clock.now_ns = 42
    with HistoryWriter(tmp_path / "h", clock) as writer:
        event = invoke()
        assert writer.append(event) == {"index": 0, "time": 42, **event}
        assert "index" not in event


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([invoke(3), invoke(3, "read")], r"process 3 invoked read while its write \(event 0\) is still open"),
        ([complete(3)], "process 3 completed write as ok without having invoked it"),
        ([invoke(3), complete(3), complete(3)], "without having invoked"),
        ([invoke(3), complete(3, "read")], "completed read as ok, but it had invoked write"),
        ([invoke(3), complete(3, kind="done")], "type is one of"),
        ([invoke("three")], "a process is a number"),
        ([invoke(-1)], "a process is a number"),
        ([invoke(True)], "a process is a number"),
        ([invoke(value={1, 2})], "holds what JSON cannot"),
        ([invoke(value=[float("nan")])], "holds what JSON cannot"),
        ([invoke(value=10**5000)], "holds what JSON cannot"),
    ],
)
def test_misuse_raises_a_harness_error_and_is_not_recorded(tmp_path, events, message):
    with HistoryWriter(tmp_path / "h", Clock()) as writer:
        for event in events[:-1]:
            writer.append(event)
        with pytest.raises(HarnessError, match=message):
            writer.append(events[-1])
        assert writer.stats.events == len(events) - 1
    assert len(list(read_history(tmp_path / "h"))) == len(events) - 1


def test_faults_of_the_nemesis_may_overlap(tmp_path):
    with HistoryWriter(tmp_path / "h", Clock()) as writer:
        for event in (fault("inject", "invoke"), fault("inject", "invoke", "f2"), fault("heal", "info", "f9")):
            writer.append(event)
    assert len(list(read_history(tmp_path / "h"))) == 3


def test_events_are_flushed_by_count_by_time_and_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_EVENTS", 4)
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.01)
    path = tmp_path / "h"

    def on_disk():
        return path.read_bytes().count(b"\n")

    writer = HistoryWriter(path, Clock())
    for process in range(3):
        writer.append(invoke(process))
    assert on_disk() == 0
    writer.append(invoke(3))
    assert on_disk() == 4
    writer.append(invoke(4))
    writer.flush()
    assert on_disk() == 5

    async def by_time():
        writer.append(invoke(5))
        async with asyncio.timeout(10):
            while on_disk() < 6:  # noqa: ASYNC110 (the file system has no event to wait for)
                await asyncio.sleep(0.005)

    asyncio.run(by_time())
    writer.close()
    writer.close()
    with pytest.raises(HarnessError, match="closed"):
        writer.append(invoke(6))


def test_an_existing_file_and_a_missing_directory_are_refused(tmp_path):
    (tmp_path / "h").write_text("precious")
    with pytest.raises(HistoryWriteError, match="File exists"):
        HistoryWriter(tmp_path / "h", Clock())
    with pytest.raises(HistoryWriteError, match="No such file"):
        HistoryWriter(tmp_path / "missing" / "h", Clock())
    assert (tmp_path / "h").read_text() == "precious"


FULL_DISK = """
import resource, signal, sys
from harness.history_writer import HistoryWriter, HistoryWriteError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
writer = HistoryWriter(sys.argv[1], lambda: 0)
for number in range(10_000):
    try:
        writer.append({"process": number, "type": "invoke", "f": "write", "value": number})
    except HistoryWriteError as error:
        first = str(error)
        break
for again in (writer.flush, lambda: writer.append({"process": 0, "type": "invoke", "f": "w", "value": 1})):
    try:
        again()
    except HistoryWriteError as error:
        assert str(error) == first
    else:
        raise SystemExit("no error the second time")
writer.close()
print(first)
"""


def test_a_file_that_cannot_grow_gives_one_clear_error_and_stays_readable(tmp_path):
    path = tmp_path / "history.jsonl"
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(module.__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"cannot write {path}: File too large; what it holds is readable")
    reader = read_history(path)
    events = list(reader)
    assert reader.truncated
    assert len(events) > 1000
    assert [event["value"] for event in events] == list(range(len(events)))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this machine has no /dev/full")
def test_a_write_error_of_the_flush_timer_is_raised_by_close(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.001)

    async def run():
        writer = HistoryWriter(tmp_path / "h", Clock())
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer._fd)
        os.close(full)
        writer.append(invoke())
        async with asyncio.timeout(10):
            while writer._fd is not None:  # noqa: ASYNC110 (the timer has no event to wait for)
                await asyncio.sleep(0.001)
        with pytest.raises(HistoryWriteError, match="No space left"):
            writer.close()
        writer.close()

    asyncio.run(run())


def write_lines(path, *lines, end="\n"):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end.encode())
    return path


GOOD = '{"index":0,"time":5,"process":0,"type":"invoke","f":"write","value":1}'


@pytest.mark.parametrize("kept", range(1, len(GOOD)))
def test_a_last_line_cut_anywhere_is_dropped_and_reported(tmp_path, kept):
    reader = read_history(write_lines(tmp_path / "h", GOOD, GOOD[:kept], end=""))
    assert len(list(reader)) == 1
    assert (reader.truncated, reader.events, reader.dropped) == (True, 1, GOOD[:kept][:80])


def test_a_complete_last_line_without_a_newline_is_read(tmp_path):
    reader = read_history(write_lines(tmp_path / "h", GOOD, GOOD, end=""))
    assert len(list(reader)) == 2
    assert not reader.truncated


def test_a_tail_of_zero_bytes_counts_as_truncated(tmp_path):
    reader = read_history(write_lines(tmp_path / "h", GOOD, b"\0" * 4096, end=""))
    assert len(list(reader)) == 1
    assert reader.truncated


def test_an_empty_history_has_no_events(tmp_path):
    (tmp_path / "h").touch()
    reader = read_history(tmp_path / "h")
    assert list(reader) == []
    assert not reader.truncated


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (GOOD[:30], "not JSON"),
        ("[1]", "not a JSON object"),
        ("7", "not a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        ("[" * 100_000, "not JSON"),
        (GOOD.replace('"time":5,', ""), "an event without 'time'"),
        (GOOD.replace('"f":"write",', ""), "an event without 'f'"),
        (GOOD.replace("invoke", "begun"), "type is one of"),
        (GOOD.replace('"invoke"', "[]"), "type is one of"),
        (GOOD.replace('"write"', "7"), "f is a word"),
        (GOOD.replace('"value":1', '"value":NaN'), "NaN is not a JSON number"),
        (GOOD[:-1] + "," + GOOD[1:], "an object has 'index' twice"),
        (GOOD.replace('"time":5', f'"time":{1 << 63}'), "time is at most 9223372036854775807 nanoseconds"),
        (GOOD.replace('"time":5', f'"time":{10**40}'), "one of 41 digits is none"),
        (GOOD.replace('"time":5', '"time":5.5'), "number of nanoseconds"),
        (GOOD.replace('"process":0', '"process":"p"'), "a process is a number"),
    ],
)
def test_a_damaged_line_in_the_middle_is_reported_with_its_number(tmp_path, line, reason):
    path = write_lines(tmp_path / "h", GOOD, line, GOOD)
    with pytest.raises(HistoryError, match=reason) as caught:
        list(read_history(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_a_missing_history_cannot_be_read(tmp_path):
    with pytest.raises(HistoryError, match=r"cannot read .*nothing: No such file"):
        list(read_history(tmp_path / "nothing"))


def test_events_share_equal_strings_up_to_a_bound(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    line = '{"time":1,"process":0,"type":"ok","f":"%s","node":"n1"}\n'
    path.write_text("".join(line % f for f in ("read", "read", "write", "write")))
    events = list(read_history(path))
    for name in ("type", "f", "node"):
        assert events[0][name] is events[1][name]
    monkeypatch.setattr(module, "MAX_SHARED_WORDS", 3)
    events = list(read_history(path))
    assert events[0]["f"] is events[1]["f"]
    assert [event["f"] for event in events] == ["read", "read", "write", "write"]


def test_an_overlong_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    path = write_lines(tmp_path / "h", GOOD, "x" * 5000)
    with pytest.raises(HistoryError, match=":2: the line is longer than 1000 bytes"):
        list(read_history(path))


def test_live_stats_follow_the_history(tmp_path):
    clock = Clock()
    with HistoryWriter(tmp_path / "h", clock) as writer:
        for number in range(10):
            clock.now_ns = number * 500_000_000
            writer.append(invoke(number))
            clock.now_ns += 1_000_000 * (number + 1)
            writer.append(complete(number, kind="fail" if number == 9 else "ok"))
        writer.append(invoke(99, "read"))
        stats = writer.stats
        assert stats.by_type == {"invoke": 11, "ok": 9, "fail": 1, "info": 0}
        assert stats.counts["write"]["ok"] == 9
        assert (stats.completed, stats.open_operations, stats.events) == (10, 1, 21)
        assert stats.rates(6_000_000_000) == [2, 2, 2, 2, 2, 0]
        assert stats.rate_per_s(6_000_000_000, window_s=2) == 1.0
        assert [stats.rate_per_s(now_ns) for now_ns in (-1, 0, 800_000_000, 1_000_000_000)] == [0.0, 0.0, 2.5, 2.0]
        assert stats.latency_quantiles_ns((0.5, 1.0)) == [5_000_000, 9_000_000]


def test_live_stats_have_the_faults_in_force_and_their_proof(tmp_path):
    with HistoryWriter(tmp_path / "h", Clock()) as writer:
        states = []
        for event in (
            fault("inject", "invoke"),
            fault("inject", "info", proof={"proven": True}),
            fault("inject", "invoke", "f2"),
            fault("inject", "info", "f2", proof={"proven": False}),
            fault("heal", "invoke"),
            fault("heal", "info", proof={"proven": True}),
        ):
            writer.append(event)
            states.append({ident: status.state for ident, status in writer.stats.faults.items()})
    assert states == [
        {"f1": "injecting"},
        {"f1": "proven"},
        {"f1": "proven", "f2": "injecting"},
        {"f1": "proven", "f2": "unproven"},
        {"f1": "healing", "f2": "unproven"},
        {"f2": "unproven"},
    ]


@given(st.lists(st.integers(0, 400_000_000_000), max_size=60).map(sorted), st.integers(1, RATE_SECONDS - 1))
def test_rates_agree_with_a_count_of_each_second(times_ns, seconds):
    stats = LiveStats()
    for time_ns in times_ns:
        stats.completion("ok", 0, time_ns)
    now_ns = times_ns[-1] + 1 if times_ns else 0
    this_second = now_ns // 10**9
    expected = [
        sum(time_ns // 10**9 == second for time_ns in times_ns)
        for second in range(max(0, this_second - seconds), this_second)
    ]
    assert stats.rates(now_ns, seconds=seconds) == expected


@given(st.lists(st.integers(), min_size=1), st.floats(0, 1))
def test_a_quantile_has_its_share_at_or_below_it(values, q):
    ordered = sorted(values)
    found = quantile(ordered, q)
    assert sum(value <= found for value in values) >= q * len(values)
    assert found == ordered[0] or sum(value < found for value in values) < q * len(values)
