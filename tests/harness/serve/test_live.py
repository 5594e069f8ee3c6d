"""A run in progress, seen from a page: its history is followed as it grows, whatever it holds."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.history_writer import HistoryWriter
from harness.live_stats import LiveStats
from harness.serve import app, live
from harness.serve.live import HistoryTail, snapshot
from harness.store import Store

from .conftest import DEADLINE_S, Client, make_run

FAULT = {"id": "f1", "nemesis": "partition", "variant": "leader"}


def record(writer: HistoryWriter, clock: list[int], operations: int, first: int = 0) -> None:
    """Operations of 2 ms, one every 10 ms."""
    for number in range(first, first + operations):
        clock[0] = number * 10_000_000
        writer.append({"process": 0, "type": "invoke", "f": "write", "value": number})
        clock[0] += 2_000_000
        kind = "info" if number % 50 == 49 else "ok"
        writer.append({"process": 0, "type": kind, "f": "write", "value": number})


@pytest.fixture
def history(tmp_path: Path) -> Iterator[tuple[HistoryWriter, list[int], HistoryTail]]:
    """The writer of a history, its clock in ns, and a tail that follows it."""
    clock = [0]
    tail = HistoryTail(tmp_path, ["history.jsonl"])
    with HistoryWriter(tmp_path / "history.jsonl", lambda: clock[0]) as writer:
        yield writer, clock, tail
    tail.close()


def read_all(tail: HistoryTail) -> None:
    while tail.read_on():
        pass


def test_a_followed_history_has_the_same_statistics_as_its_writer(
    history: tuple[HistoryWriter, list[int], HistoryTail],
) -> None:
    writer, clock, tail = history
    for part in range(5):
        record(writer, clock, 100, first=100 * part)
        writer.flush()
        read_all(tail)
    seen, own = tail.stats, writer.stats
    assert (seen.events, seen.counts, seen.open) == (own.events, own.counts, own.open)
    assert seen.rates(clock[0]) == own.rates(clock[0])
    shown = snapshot(tail, is_real_time=False)
    assert (shown["ok"], shown["info"], shown["open"], shown["median_ms"]) == (490, 10, 0, 2.0)
    assert shown["rate_per_s"] == 100 and shown["time_s"] == 5.0 and shown["faults"] == []


def test_the_state_of_a_fault_follows_its_events(history: tuple[HistoryWriter, list[int], HistoryTail]) -> None:
    writer, clock, tail = history

    def nemesis(kind: str, f: str, **more: Any) -> list[tuple[str, str]]:
        clock[0] += 10**9
        writer.append({"process": "nemesis", "type": kind, "f": f, "value": {**FAULT, **more}})
        writer.flush()
        read_all(tail)
        return [(fault["name"], fault["state"]) for fault in snapshot(tail, is_real_time=False)["faults"]]

    assert nemesis("invoke", "inject") == [("partition leader", "injecting")]
    assert nemesis("info", "inject", proof={"proven": True}) == [("partition leader", "proven")]
    assert nemesis("invoke", "heal") == [("partition leader", "healing")]
    assert nemesis("info", "heal", proof={"proven": False}) == [("partition leader", "not proven healed")]
    assert nemesis("info", "heal", proof={"proven": True}) == []


def test_the_oldest_faults_are_shown_and_the_others_counted(
    history: tuple[HistoryWriter, list[int], HistoryTail],
) -> None:
    writer, clock, tail = history
    for number in range(live.MAX_FAULTS + 2):
        clock[0] = number * 10**9
        assert snapshot(tail, is_real_time=False)["more_faults"] == max(0, number - live.MAX_FAULTS)
        fault = {"id": f"f{number}", "nemesis": "kill", "variant": f"v{number}"}
        writer.append({"process": "nemesis", "type": "invoke", "f": "inject", "value": fault})
        writer.flush()
        read_all(tail)
    shown = snapshot(tail, is_real_time=False)
    assert [fault["name"] for fault in shown["faults"]] == [f"kill v{number}" for number in range(live.MAX_FAULTS)]
    assert [fault["for_s"] for fault in shown["faults"][:2]] == [13.0, 12.0] and shown["more_faults"] == 2


def test_a_closed_view_has_its_history_open_no_more(history: tuple[HistoryWriter, list[int], HistoryTail]) -> None:
    writer, clock, tail = history
    record(writer, clock, 1)
    writer.flush()
    read_all(tail)
    assert tail._fd is not None and os.fstat(tail._fd).st_ino == os.stat(writer.path).st_ino
    descriptor = tail._fd
    for _ in range(2):
        tail.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_in_real_time_the_shown_time_advances_without_events(tmp_path: Path) -> None:
    now_s = [100.0]
    line = {"index": 0, "time": 5 * 10**9, "process": 0, "type": "invoke", "f": "read", "value": None}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    tail = HistoryTail(tmp_path, ["history.jsonl"], clock_s=lambda: now_s[0])
    tail.read_on()
    now_s[0] += 3
    assert snapshot(tail, is_real_time=True)["time_s"] == 8.0
    assert snapshot(tail, is_real_time=False)["time_s"] == 5.0
    tail.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"not JSON\n", "not JSON"),
        (b"[" * 1_900 + b"\n", "not JSON"),
        (b"{}\n", "without 'process'"),
        (b'{"process":0,"type":"<b>","f":"x","time":0}\n', "one of invoke"),
        (b'{"process":[],"type":"ok","f":"x","time":0}\n', "a process is"),
        (b"x" * 3_000, "longer than"),
    ],
)
def test_an_invalid_history_is_reported_as_damaged(
    tmp_path: Path, data: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_LINE_BYTES", 2_000)
    (tmp_path / "history.jsonl").write_bytes(data)
    tail = HistoryTail(tmp_path, ["history.jsonl"])
    read_all(tail)
    assert said in str(snapshot(tail, is_real_time=True)["damage"])
    assert not tail.read_on()
    tail.close()


def test_the_number_of_separate_counts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_FUNCTIONS", 3)
    monkeypatch.setattr(live, "MAX_OPEN", 4)
    lines = [{"time": n, "process": n, "type": "invoke", "f": f"f{n}", "value": None} for n in range(100)]
    lines.append({"time": 100, "process": 0, "type": "ok", "f": "f0", "value": None})
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tail = HistoryTail(tmp_path, ["history.jsonl"])
    read_all(tail)
    assert (len(tail.stats.counts), tail.stats.open_operations, tail.stats.events) == (3, 3, 101)
    assert tail.stats.counts["f0"] == {"invoke": 1, "ok": 1, "fail": 0, "info": 0}, "those in it are still counted"
    tail.close()


EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "time": st.integers(-(10**12), 2**63 - 1),
            "process": st.integers(0, 3) | st.just("nemesis"),
            "type": st.sampled_from(["invoke", "ok", "fail", "info"]),
            "f": st.sampled_from(["read", "inject", "heal"]),
            "value": st.none() | st.fixed_dictionaries({"id": st.text(max_size=3), "variant": st.text(max_size=3)}),
        }
    ),
    max_size=30,
)


@given(events=EVENTS, cuts=st.lists(st.integers(1, 40), min_size=1))
def test_a_history_read_in_any_pieces_gives_the_same_snapshot(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]], cuts: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("history")
    data = "".join(json.dumps(event) + "\n" for event in events).encode()
    whole, pieces = (HistoryTail(directory, [name]) for name in ("whole", "pieces"))
    (directory / "whole").write_bytes(data)
    read_all(whole)
    with open(directory / "pieces", "wb", buffering=0) as file:
        position = 0
        while position < len(data):
            size = cuts[position % len(cuts)]
            file.write(data[position : position + size])
            position += size
            read_all(pieces)
    assert whole.damage is None and isinstance(whole.stats, LiveStats)
    assert snapshot(whole, is_real_time=False) == snapshot(pieces, is_real_time=False)
    assert json.loads(json.dumps(snapshot(whole, is_real_time=False)))["events"] == len(events)
    whole.close()
    pieces.close()


class Stream:
    """Server-sent events of one run."""

    def __init__(self, client: Client, name: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
        self._connection.request("GET", f"/runs/{name}/events")
        self._answer = self._connection.getresponse()
        self.status = self._answer.status

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event: its name and data."""
        name = self._answer.readline().decode().strip()
        data = self._answer.readline().decode().strip()
        assert self._answer.readline() == b"\n"
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def test_a_stream_shows_a_run_from_its_beginning_to_its_verdict(store: Store, serve: Callable[..., Client]) -> None:
    run = store.create("t")
    run.write_test({"cluster": "sim"})
    client = serve()
    assert "/live" in client.page("/")
    stream = Stream(client, run.name)
    assert stream.next()[1]["events"] == 0
    clock = [0]
    with HistoryWriter(run.history_path, lambda: clock[0]) as writer:
        record(writer, clock, 10)
        writer.flush()
        while (event := stream.next())[1]["events"] < 20:
            pass
        assert event[0] == "state" and event[1]["ok"] == 10
        writer.append({"process": "nemesis", "type": "invoke", "f": "inject", "value": FAULT})
        writer.flush()
        while not (event := stream.next())[1]["faults"]:
            pass
        assert event[1]["faults"][0]["name"] == "partition leader"
    run.write_results({"valid": False, "reason": "stale"})
    run.finish()
    while (event := stream.next())[0] == "state":
        pass
    assert event == ("end", {"verdict": "invalid", "reason": "stale"})
    stream.close()


@pytest.mark.parametrize(("cluster", "is_real_time"), [("sim", False), ("local", True)])
def test_time_passes_between_the_events_of_a_stream_unless_the_run_is_simulated(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, cluster: str, is_real_time: bool
) -> None:
    asked: list[bool] = []

    def noted(tail: HistoryTail, *, is_real_time: bool) -> dict[str, Any]:
        asked.append(is_real_time)
        return snapshot(tail, is_real_time=is_real_time)

    monkeypatch.setattr(app, "snapshot", noted)
    run = store.create("t")
    run.write_test({"cluster": cluster})
    stream = Stream(serve(), run.name)
    stream.next()
    stream.close()
    assert set(asked) == {is_real_time}


def test_a_stream_says_that_it_is_behind_until_it_has_caught_up(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "READ_BYTES", 2_000)
    run = store.create("t")
    clock = [0]
    with HistoryWriter(run.history_path, lambda: clock[0]) as writer:
        record(writer, clock, 50)
    stream = Stream(serve(), run.name)
    behind = []
    while (state := stream.next()[1])["events"] < 100:
        behind.append(state["is_behind"])
    assert len(behind) > 1 and all(behind) and not stream.next()[1]["is_behind"]
    stream.close()
    run.release()


def test_a_run_that_dies_ends_its_stream(store: Store, serve: Callable[..., Client]) -> None:
    run = store.create("t")
    stream = Stream(serve(), run.name)
    stream.next()
    run.release()
    while (event := stream.next())[0] == "state":
        pass
    assert event[1]["verdict"] == "unfinished"
    stream.close()


def test_removing_a_run_ends_its_stream_with_an_unknown_verdict(store: Store, serve: Callable[..., Client]) -> None:
    run = store.create("t")
    stream = Stream(serve(), run.name)
    stream.next()
    run.path.rename(store.root / "elsewhere")
    while (event := stream.next())[0] == "state":
        pass
    assert event == ("end", {"verdict": "unknown", "reason": "the run is no longer in the store"})
    stream.close()
    run.release()


def test_the_number_of_streams_is_bounded_and_a_closed_one_makes_room(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 1)
    run, over = store.create("t"), make_run(store)
    client = serve()
    first = Stream(client, run.name)
    first.next()
    assert Stream(client, run.name).status == 429
    assert client.ask(f"/runs/{run.name}/events", method="HEAD")[0] == 429
    first.close()
    deadline = threading.Event()
    for _ in range(DEADLINE_S * 10):
        if (again := Stream(client, over.name)).status == 200:
            break
        deadline.wait(0.1)
    assert again.status == 200 and again.next()[0] == "state"
    again.close()
    run.release()
