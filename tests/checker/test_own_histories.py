"""Histories recorded by a user's own program: common mistakes are reported, and not misjudged."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checker.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recorded-histories.md"

Event = tuple[int, str, str, Any]
"""Process, type, f, value."""

PAIRS: Sequence[Event] = [
    *((0, "invoke", "write", ["x", 1]), (0, "ok", "write", ["x", 1])),
    *((0, "invoke", "write", ["y", 2]), (0, "ok", "write", ["y", 2])),
    *((1, "invoke", "read", ["x", None]), (1, "ok", "read", ["x", 1])),
]
"""Right for each of its two registers, and wrong for one register that holds pairs."""


def events_of(rows: Sequence[Event], **more: Any) -> list[dict[str, Any]]:
    return [{"process": process, "type": kind, "f": f, "value": value, **more} for process, kind, f, value in rows]


def write(path: Path, events: Sequence[dict[str, Any]]) -> str:
    lines = [json.dumps(event) for event in events]
    path.write_text(f"[{', '.join(lines)}]" if path.suffix == ".json" else "".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json"])
def test_pairs_of_key_and_value_are_split_in_json_as_in_edn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = write(tmp_path / name, events_of(PAIRS))
    assert main([path, "--model", "register"]) == 0
    assert "3 operations, 2 keys" in capsys.readouterr().out
    stale = [*PAIRS, (2, "invoke", "write", ["x", 3]), (2, "ok", "write", ["x", 3]), (1, "invoke", "read", ["x", None])]
    assert main([write(tmp_path / name, events_of([*stale, (1, "ok", "read", ["x", 1])])), "--model", "register"]) == 1
    assert "Key 'x'" in capsys.readouterr().out


def test_pairs_are_values_if_events_have_a_key_or_no_read_names_one(tmp_path: Path) -> None:
    whole = [(0, "invoke", "write", [1, 2]), (0, "ok", "write", [1, 2]), (1, "invoke", "read", None)]
    for answer, expected in (([1, 2], 0), ([1, 3], 1)):
        rows = [*whole, (1, "ok", "read", answer)]
        assert main([write(tmp_path / "plain.jsonl", events_of(rows)), "--model", "register"]) == expected
        assert main([write(tmp_path / "keyed.jsonl", events_of(rows, key="k")), "--model", "register"]) == expected


def test_concatenated_histories_of_several_clients_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the order of the lines, the read of client 1 begins after both writes; by their times, between them."""
    by_client = [
        *((0, "invoke", "write", 1, 10), (0, "ok", "write", 1, 20), (0, "invoke", "write", 2, 50)),
        *((0, "ok", "write", 2, 60), (1, "invoke", "read", None, 30), (1, "ok", "read", 1, 40)),
    ]
    events = [{"process": p, "type": t, "f": f, "value": value, "time": at} for p, t, f, value, at in by_client]
    path = write(tmp_path / "clients.jsonl", events)
    assert main([path, "--model", "register"]) == 254
    said = capsys.readouterr().err
    assert said.startswith(f"{path}:5: its time is 30 before that of an event above it") and "sort them by time" in said
    assert main([path, "--model", "register", "--lenient"]) == 1
    assert f"note: {path}:5: its time is 30 before" in capsys.readouterr().out
    assert main([write(tmp_path / "sorted.jsonl", sorted(events, key=lambda e: e["time"])), "--model", "register"]) == 0
    indexed = [{**event, "index": number} for number, event in enumerate(events)]
    assert main([write(tmp_path / "indexed.jsonl", indexed), "--model", "register"]) == 1, "an index gives the order"


def test_a_clock_that_is_slightly_behind_is_accepted(tmp_path: Path) -> None:
    times = [10, 200, 195, 400]
    rows = [(0, "invoke", "write", 1), (0, "ok", "write", 1), (1, "invoke", "read", None), (1, "ok", "read", 1)]
    events = [{**event, "time": time} for event, time in zip(events_of(rows), times, strict=True)]
    assert main([write(tmp_path / "history.jsonl", events), "--model", "register"]) == 0


def test_a_read_without_a_value_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = events_of([(0, "invoke", "write", 1), (0, "ok", "write", 1), (1, "invoke", "read", None)])
    answer = {"process": 1, "type": "ok", "f": "read", "result": 1}
    assert main([write(tmp_path / "history.jsonl", [*events, answer]), "--model", "register"]) == 1
    assert "note: 1 read ended ok without a 'value', which was taken for null" in capsys.readouterr().out
    assert main([write(tmp_path / "history.jsonl", [*events, {**answer, "value": 1}]), "--model", "register"]) == 0
    assert "note" not in capsys.readouterr().out


ODD: Sequence[tuple[str, Sequence[dict[str, Any]], str]] = [
    (
        "keys",
        [
            *({"process": 0, "type": kind, "f": "write", "key": "x", "value": 1} for kind in ("invoke", "ok")),
            *({"process": 1, "type": kind, "f": "read", "value": None} for kind in ("invoke", "ok")),
        ],
        "1 of 2 operations have no 'key': where keys are checked separately, these count as one more key",
    ),
    (
        "times",
        [{"process": 0, "type": kind, "f": "write", "value": 1, "time": "8s"} for kind in ("invoke", "ok")],
        "2 events have a 'time' that is not a number of nanoseconds (one is '8s'): it was ignored",
    ),
    (
        "process",
        [
            {"process": process, "type": kind, "f": "write", "value": value}
            for value, process in enumerate((0, 1, 0, 1, 2))
            for kind in ("invoke", "ok" if process == 2 else "info")
        ],
        "process 0 (and 1 more) goes on after an operation that ended info: two processes may share one number",
    ),
]
"""Allowed, but mostly a mistake of the program that recorded it."""


@pytest.mark.parametrize(("events", "note"), [odd[1:] for odd in ODD], ids=[odd[0] for odd in ODD])
def test_a_likely_mistake_of_the_recorder_is_noted(
    events: Sequence[dict[str, Any]], note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "history.jsonl", events), "--model", "register"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [f"  note: {note}"]


def test_events_without_an_f_are_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"process": 0, "type": kind, "value": 1} for kind in ("invoke", "ok")]
    assert main([write(tmp_path / "history.jsonl", events), "--model", "register"]) == 254
    refused = "the history has 'txn', which stands for events without an 'f': first process 0's txn(1) "
    assert refused in capsys.readouterr().err


TXN: Sequence[Event] = [
    *((0, "invoke", "txn", [["append", "x", 1]]), (1, "invoke", "txn", [["r", "x", None], ["append", "y", 1]])),
    *((1, "ok", "txn", [["r", "x", []], ["append", "y", 1]]), (0, "ok", "txn", [["append", "x", 1]])),
    *((2, "invoke", "txn", [["r", "y", None], ["r", "x", None]]), (2, "ok", "txn", [["r", "y", [1]], ["r", "x", []]])),
]
"""The last begins after the append to x returned, and does not see it: serializable, but not strict serializable."""


def test_an_isolation_level_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "txn.jsonl", events_of(TXN))
    assert main([path, "--model", "list-append"]) == 1
    assert main([path, "--model", "list-append:level=serializable"]) == 0
    assert "serializable" in capsys.readouterr().out


def test_options_of_property_checkers_are_applied(tmp_path: Path) -> None:
    twice: list[Event] = [(0, "invoke", "enqueue", 1), (0, "ok", "enqueue", 1)]
    twice += [each for _ in range(2) for each in ((1, "invoke", "dequeue", None), (1, "ok", "dequeue", 1))]
    path = write(tmp_path / "queue.jsonl", events_of(twice))
    assert main([path, "--model", "total-queue"]) == 0
    assert main([path, "--model", "total-queue:allow_duplicates=false"]) == 1
    rows = [(0, "invoke", "read", None), (0, "ok", "read", {"a": 5, "b": 5})]
    bank = write(tmp_path / "bank.jsonl", events_of(rows))
    assert main([bank, "--model", "bank"]) == 0 and main([bank, "--model", "bank:total=11"]) == 1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("list-append:level=serialisable", "level must be one of read-uncommitted, "),
        ("list-append:isolation=serializable", "has no field 'isolation'; it has: level, linearizable_keys, "),
        ("total-queue:allow_duplicates=1", "allow_duplicates must be true or false, not 1"),
        ("bank:total=all", "total must be a number, not 'all'"),
        ("sessions:reads=read", "reads must be a list of names"),
        ("unique-ids:x=1", "checker unique-ids has no field 'x'; it has: none"),
        ("register:initial", "model register: initial needs a value: register:initial=..."),
        ("bank:total=8,total", "checker bank: total needs a value: bank:total=..."),
    ],
)
def test_an_unknown_or_invalid_checker_option_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, said: str
) -> None:
    assert main([write(tmp_path / "txn.jsonl", events_of(TXN)), "--model", model]) == 254
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_command_prints_what_the_page_shows_for_its_histories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    statuses = {"history.jsonl": 1, "history.edn": 0}
    for recorded, transcript in zip(blocks[::2], blocks[1::2], strict=True):
        command, _, printed = transcript.partition("\n")
        words = shlex.split(command.removeprefix("$ harness check "))
        Path(words[0]).write_text(recorded)
        assert main(words) == statuses.pop(words[0])
        assert capsys.readouterr().out == printed
    assert not statuses
