"""No operation of a damaged file is lost silently: every format, damaged at random.

The property: a damaged history never ends ``valid`` with fewer operations than it had, unless ``--lenient`` was given,
which reports how many were left out.  No line is deleted as a whole: a history without it would look complete, unless
it has an ``index`` (see ``test_a_gap_in_the_index_is_refused_unless_lenient``).
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from checker.cli import UNLIMITED, main

Event = dict[str, Any]


def write_json(event: Event) -> str:
    return json.dumps(event)


def write_edn(event: Event) -> str:
    def atom(name: str, value: Any) -> str:
        if value is None:
            return "nil"
        return f":{value}" if name in ("type", "f") else json.dumps(value)

    return "{" + ", ".join(f":{name} {atom(name, value)}" for name, value in event.items()) + "}"


def write_tuple(event: Event) -> str:
    value = "nil" if event["value"] is None else event["value"]
    return f"[{json.dumps(event['process'])} :{event['type']} :{event['f']} {value}]"


def write_log(event: Event) -> str:
    value = "nil" if event["value"] is None else event["value"]
    return f"INFO  jepsen.util - {event['process']}\t:{event['type']}\t:{event['f']}\t{value}"


def write_limo(event: Event) -> str:
    thread = event["process"]
    value = "empty" if event["value"] is None else event["value"]
    if event["type"] == "invoke":
        return f"[{thread}] call enq({value})" if event["f"] == "write" else f"[{thread}] call deq"
    return f"[{thread}] return" if event["f"] == "write" else f"[{thread}] return {value}"


def lines(write: Callable[[Event], str], *names: str) -> Callable[[list[Event]], str]:
    """A format with one event per line, each with only these names."""

    def text(events: list[Event]) -> str:
        return "".join(write({name: event[name] for name in names or event}) + "\n" for event in events)

    return text


def enclosed(write: Callable[[Event], str], between: str) -> Callable[[list[Event]], str]:
    return lambda events: "[" + between.join(map(write, events)) + "]\n"


PLAIN = ("process", "type", "f", "value")
FORMATS: dict[str, Callable[[list[Event]], str]] = {
    "jsonl": lines(write_json),
    "jsonl without index": lines(write_json, *PLAIN),
    "json": enclosed(write_json, ",\n"),
    "edn": lines(write_edn),
    "edn without index": lines(write_edn, *PLAIN),
    "edn in a vector": enclosed(write_edn, "\n"),
    "edn records": lines(lambda event: "#jepsen.history.Op" + write_edn(event)),
    "edn tuples": lines(write_tuple),
    "kv": lines(write_edn, "process", "type", "f", "key", "value"),
    "jepsen-log": lines(write_log),
    "limo": lambda events: "# @object atomic-queue\n" + lines(write_limo)(events),
}
NUMBERED = ("jepsen-log", "limo")
"""Formats in which a process is a number here."""


@st.composite
def histories(draw: st.DrawFn, named: bool) -> list[Event]:
    """Consecutive operations, some of which never return; every answer is right for a register and for a queue.

    A read returns the value written just before, and takes it out of the queue.
    """
    pool: list[Any] = ["client-1", "n2", 0, 7] if named else [0, 1, 12]
    free, value, events = list(pool), None, []
    for number in range(draw(st.integers(2, 6))):
        if not free:
            break
        process = draw(st.sampled_from(free))
        f = "read" if value is not None and draw(st.booleans()) else "write"
        is_last = draw(st.integers(0, 4)) == 0
        asked = None if f == "read" else number + 10
        if f == "write" and value is not None:
            continue  # one value in the queue at most, which is also the register's
        events.append({"process": process, "type": "invoke", "f": f, "value": asked})
        if is_last:
            free.remove(process)
            break
        events.append({"process": process, "type": "ok", "f": f, "value": value if f == "read" else asked})
        value = None if f == "read" else asked
    for index, event in enumerate(events):
        event |= {"index": index, "key": "k"}
    return events


@st.composite
def damages(draw: st.DrawFn, text: str, other: str) -> str:
    """The text with one of its lines damaged, or followed by a line of another format."""
    rows = text.split("\n")[:-1]
    at = draw(st.integers(0, len(rows) - 1))
    row = rows[at]
    how = draw(st.sampled_from(["delete", "swap", "join", "truncate", "duplicate", "move", "mix"]))
    first = draw(st.integers(0, len(row) - 1))
    second = draw(st.integers(first, len(row) - 1))
    if how == "delete":
        rows[at] = row[:first] + row[second + 1 :]
        assume(rows[at].strip(" \t,"))  # a deleted line is not a damaged one
    elif how == "swap":
        swapped = list(row)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        rows[at] = "".join(swapped)
    elif how == "join":
        rows[at : at + 2] = ["".join(rows[at : at + 2])]
    elif how == "truncate":
        assume(row[:first].strip(" \t,"))
        return "\n".join([*rows[:at], row[:first]])
    elif how == "duplicate":
        rows.insert(draw(st.integers(0, len(rows))), row)
    elif how == "move":
        rows.insert(draw(st.integers(0, len(rows) - 1)), rows.pop(at))
    else:
        rows[at + 1 :] = other.split("\n")[at + 1 : -1]
        assume(len(rows) == len(other.split("\n")) - 1)
    return "\n".join(rows) + "\n"


def checked(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main([str(path), "--json", *arguments])
    return status, json.loads(out.getvalue())


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_loses_an_operation_silently(tmp_path: Path, name: str, data: st.DataObject) -> None:
    events = data.draw(histories(named=name not in NUMBERED))
    operations = sum(event["type"] == "invoke" for event in events)
    model = ["--model", "fifo-queue" if name == "limo" else "register"]
    path = tmp_path / "history"
    text = FORMATS[name](events)
    path.write_text(text)
    status, told = checked(path, *model)
    assert status == 0 and told["stats"]["operations"] == operations, text
    other = FORMATS[data.draw(st.sampled_from(sorted(FORMATS.keys() - {"json", "edn in a vector", "limo"})))](events)
    damaged = data.draw(damages(text, "\n" + other if name == "limo" else other))  # aligned below limo's header
    path.write_text(damaged)
    status, told = checked(path, *model)
    if status == 0:
        stats = told["stats"]
        assert stats["events_left_out"] == stats["events_missing"] == 0, damaged
        cut = name in NUMBERED and any(
            "the last line does not end in a newline" in problem for problem in stats["problems"]
        )
        assert stats["operations"] >= operations or cut, damaged
    status, told = checked(path, *model, "--lenient")
    if status == 0:
        stats = told["stats"]
        shown = stats["events_left_out"] + stats["events_missing"] + len(stats["problems"])
        assert stats["operations"] >= operations or shown, damaged


@pytest.mark.parametrize("name", ["jsonl", "json", "edn", "edn in a vector"])
def test_a_gap_in_the_index_is_refused_unless_lenient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rows = [(process, kind) for process in range(3) for kind in ("invoke", "ok")]
    events = [
        {"index": index, "process": process, "type": kind, "f": "write", "value": process, "key": "k"}
        for index, (process, kind) in enumerate(rows)
    ]
    path = tmp_path / "history"
    path.write_text(FORMATS[name](events[:2] + events[4:]))
    assert main([str(path), "--model", "register"]) == 254
    assert "index 4 comes after index 1: 2 events are missing; use --lenient" in capsys.readouterr().err
    assert main([str(path), "--model", "register", "--lenient"]) == 0
    assert "2 operations were read, 0 events left out, 2 missing" in capsys.readouterr().out


def test_lenient_reading_counts_and_shows_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    rows = [
        {"process": "a", "type": "invoke", "f": "write", "value": 1},
        {"process": True, "type": "invoke", "f": "write", "value": 9},
        {"process": "a", "type": "ok", "f": "write"},
        {"process": "b", "type": "ok", "f": "read", "value": 9},
        {"process": "nemesis", "type": "info", "f": "start"},
        {"process": "a", "type": "invoke", "f": "read"},
        {"process": "a", "type": "invoke", "f": "read"},
        {"process": "a", "type": "ok", "f": "read", "value": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"process": "a", "ty')
    assert main([str(path), "--model", "register"]) == 254
    assert f"{path}:2: process must be" in capsys.readouterr().err  # the first problem is named
    assert main([str(path), "--model", "register", "--lenient"]) == 0
    out = capsys.readouterr().out
    assert "3 operations were read, 3 events left out, 1 missing" in out
    lost = "the completion of 'read' of process a is missing"
    cut = "the last line is cut short"
    for line, reason in ((2, "not True (bool)"), (4, "has no operation open"), (7, lost), (9, cut)):
        assert f"{path}:{line}: " in out and reason in out
    assert "nemesis events: 1" in out


def test_operations_unknown_to_the_checker_are_refused_unless_lenient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    rows = [{"process": 0, "type": kind, "f": f, "value": 7} for f in ("raed", "write") for kind in ("invoke", "ok")]
    rows += [{"process": 0, "type": kind, "f": "add", "value": 1} for kind in ("invoke", "ok")]
    rows += [{"process": 0, "type": kind, "f": "read", "value": [1]} for kind in ("invoke", "ok")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(path), "--model", "simple-set"]) == 254
    refused = "checker simple-set accepts add, read; the history has 'raed' (1), 'write' (1): first process 0's raed(7)"
    said = capsys.readouterr().err
    assert refused in said and "; use --lenient to check the rest" in said
    assert main([str(path), "--model", "simple-set", "--lenient"]) == 0
    assert "4 events left out" in capsys.readouterr().out


@pytest.mark.parametrize("lenient", [[], ["--lenient"]], ids=["", "lenient"])
@pytest.mark.parametrize("name", sorted(set(UNLIMITED) | {"log-losses"}))
def test_a_history_without_operations_of_the_checker_is_not_judged(
    name: str, lenient: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checker that finds nothing to judge gives no verdict; unique-ids takes ids from any operation."""
    path = tmp_path / "history.jsonl"
    rows = [{"process": 0, "type": kind, "f": "swap", "value": None} for kind in ("invoke", "ok")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = main([str(path), "--model", name, *lenient])
    said = capsys.readouterr()
    if name == "unique-ids":  # None is the id that this operation returned
        assert (status, "1 ids, all different" in said.out) == (0, True)
    elif name in ("long-fork", "sessions"):
        assert (status, ": unknown: no re" in said.out) == (2, True)
    else:
        assert (status, f"checker {name} accepts " in said.err, "the history has 'swap'" in said.err) == (
            254,
            True,
            True,
        )


def test_a_process_with_a_name_is_a_client(tmp_path: Path) -> None:
    """Its read of a value that was never written is a violation."""
    path = tmp_path / "history.jsonl"
    rows = [{"process": "client-1", "type": kind, "f": "read", "value": 7} for kind in ("invoke", "ok")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert checked(path, "--model", "register")[0] == 1
