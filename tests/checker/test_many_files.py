"""`harness check` of several files, within a limit of memory, and up to the first violation."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from checker import KeyValue, Result, Verdict, check, read_jsonl
from checker import cli as module
from checker.cli import main
from checker.codecs import MemoryLimitError, read
from checker.linearizability.budget import Budget, LimitReached, _limit_reached_by, _Watch
from checker.testing.large import large_history

INTERRUPTED = pytest.mark.skipif(sys.implementation.name != "cpython", reason="only CPython can interrupt a thread")

FINE = [("invoke", "write", 1), ("ok", "write", 1), ("invoke", "read", None), ("ok", "read", 1)]
WRONG = [("invoke", "write", 1), ("ok", "write", 1), ("invoke", "read", None), ("ok", "read", 2)]


def write(path: Path, rows: list[tuple[str, str, object]], keys: int = 0) -> str:
    events = [
        {"process": 0, "type": kind, "f": f, "value": value, **({"key": key} if keys else {})}
        for key in range(max(1, keys))
        for kind, f, value in rows
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(path)


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["fine", "bad"], 254),
        (["bad", "fine", "wrong"], 1),
        (["fine", "wrong", "none"], 1),
        (["fine", "none", "bad"], 254),
        (["fine", "fine"], 0),
    ],
)
def test_a_bad_file_does_not_affect_the_verdicts_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], status: int, jobs: str
) -> None:
    files = {
        "fine": write(tmp_path / "fine.jsonl", FINE),
        "wrong": write(tmp_path / "wrong.jsonl", WRONG),
        "bad": write(tmp_path / "bad.jsonl", FINE[1:]),
        "none": str(tmp_path / "none.jsonl"),
    }
    own = {"fine": 0, "wrong": 1, "bad": 254, "none": 254}
    arguments = [*(files[name] for name in names), "--model", "register", "--jobs", jobs]
    assert main(arguments) == status
    told = capsys.readouterr()
    for name in names:
        assert (f"{files[name]}: " in told.out) is (own[name] != 254)
    assert told.err.count("\n") == sum(own[name] == 254 for name in names)
    assert main([*arguments, "--json"]) == status
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["file"], row["exit_status"]) for row in rows] == [(files[name], own[name]) for name in names]
    assert all(("error" in row) is (row["exit_status"] == 254) for row in rows)


@pytest.mark.parametrize(("names", "status"), [(["wrong"], 1), (["fine", "wrong", "bad"], 1), (["fine"], 254)])
def test_a_page_that_cannot_be_written_hides_no_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], status: int
) -> None:
    rows = {"fine": FINE, "wrong": WRONG, "bad": FINE[1:]}
    files = [write(tmp_path / f"{name}.jsonl", rows[name]) for name in names]
    assert main([*files, "--model", "register", "--html", str(tmp_path)]) == status
    assert capsys.readouterr().err.splitlines()[-1] == f"{tmp_path}: Is a directory"


def _deep_and_wrong(path: Path) -> str:
    """A read of a value nested 700 levels deep, which was never written."""
    value: object = 1
    for _ in range(700):
        value = [value]
    return write(path, [*WRONG[:3], ("ok", "read", value)])


def test_a_violation_of_deeply_nested_values_is_printed_as_text_json_and_html(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep, fine = _deep_and_wrong(tmp_path / "deep.jsonl"), write(tmp_path / "fine.jsonl", FINE)
    page = tmp_path / "page.html"
    assert main([deep, "--model", "register", "--json", "--html", str(page)]) == 1
    told = capsys.readouterr()
    row = json.loads(told.out)
    assert row["exit_status"] == 1 and row["valid"] is False and told.err == ""
    assert row["witness"]["operations"][0]["result"].startswith("[[[[") and "<svg" in page.read_text()
    assert main([deep, fine, "--model", "register", "--jobs", "2"]) == 1
    assert f"{deep}: invalid: " in capsys.readouterr().out
    assert sys.getrecursionlimit() < module._DEPTH_OF_RESULTS  # restored


def test_a_violation_whose_witness_cannot_be_printed_stays_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How deep is too deep depends on the version of Python."""

    def too_deep(_: Result) -> dict[str, Any]:
        raise RecursionError

    monkeypatch.setattr(Result, "to_json", too_deep)
    deep = _deep_and_wrong(tmp_path / "deep.jsonl")
    assert main([deep, "--model", "register", "--json"]) == 1
    told = capsys.readouterr()
    row = json.loads(told.out)
    assert told.err == f"{deep}: a value is nested too deeply\n"
    assert (row["exit_status"], row["valid"], row["error"]) == (1, False, told.err.strip())


def test_the_exit_status_of_an_undecided_file_ranks_between_valid_and_bad(tmp_path: Path) -> None:
    fine, bad = write(tmp_path / "fine.jsonl", FINE), write(tmp_path / "bad.jsonl", FINE[1:])
    hard = large_history("cas-register", 3_000, 40, seed=1, crash=0.2)
    path = tmp_path / "hard.jsonl"
    events = []
    for row, (invoked, returned) in enumerate(zip(hard.invoked, hard.returned, strict=True)):
        about = {"process": row, "f": hard.f[row]}
        events.append((invoked, {**about, "type": "invoke", "value": hard.value[row]}))
        if hard.status[row] != "info":
            events.append((returned, {**about, "type": hard.status[row], "value": hard.result[row]}))
    events.sort(key=lambda event: event[0])
    path.write_text("".join(json.dumps(event) + "\n" for _, event in events))
    options = ["--model", "cas-register", "--timeout", "0.000001"]
    assert main([str(path), *options]) == 2
    assert main([fine, str(path), *options]) == 2
    assert main([bad, str(path), *options]) == 254


def test_reading_stops_at_the_memory_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says how far it got, and the command's verdict is unknown."""
    rows = [
        {"index": 2 * at + later, "process": at, "type": ("invoke", "ok")[later], "f": "write", "value": f"{at:0200}"}
        for at in range(150_000)
        for later in (0, 1)
    ]
    jsonl, edn = tmp_path / "history.jsonl", tmp_path / "history.edn"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = '{{:index {index}, :process {process}, :type :{type}, :f :write, :value "{value}"}}\n'
    edn.write_text("".join(form.format(**row) for row in rows))
    for path in (jsonl, edn):
        with pytest.raises(MemoryLimitError, match=r"the memory limit of 20 MiB was reached while .* was read, at"):
            read(path, budget=Budget(memory_mb=20))
        assert main([str(path), "--model", "register", "--memory", "20", "--json"]) == 2
        told = json.loads(capsys.readouterr().out)
        assert told["valid"] == "unknown" and "the memory limit of 20 MiB was reached" in told["reason"]
    assert len(read_jsonl(jsonl)) == 150_000
    # A vector on one line, as a program prints it, is parsed as one text. Its short values take far more memory than
    # the text, so that the limit is reached while it is parsed.
    one_line = tmp_path / "one_line.edn"
    one_line.write_text(f"[{' '.join(form.format(**{**row, 'value': '1'}).strip() for row in rows)}]")
    with pytest.raises(MemoryLimitError, match="at line 1, with 0 operations"):
        read(one_line, budget=Budget(memory_mb=120))


@INTERRUPTED
def test_the_memory_limit_applies_to_measured_and_not_estimated_memory() -> None:
    """The general search is estimated at 71 MiB for this history, and takes half of the 55 allowed here."""
    history = large_history("cas-register", 60_000, 5)
    assert check(history, "cas-register", explained=False, memory_mb=55).verdict is Verdict.VALID


@INTERRUPTED
def test_watched_work_stops_at_the_memory_limit() -> None:
    held: list[bytes] = []
    budget = Budget(memory_mb=30)
    with pytest.raises(LimitReached, match="the memory limit of 30 MiB"), budget.watched(1 << 40):
        while True:
            held.append(bytes(bytearray(b"x" * 10_000)))
    assert sum(map(len, held)) < 1 << 30
    with budget.watched(1):
        assert budget.exhausted() is not None  # work with a small estimate is not watched


@INTERRUPTED
def test_a_watch_does_not_interrupt_work_that_ends_in_time() -> None:
    budget = Budget(memory_mb=1, timeout_s=600)
    ended = 0
    for _ in range(50):
        with budget.watched(1 << 40):
            ended += 1
    assert ended == 50


@pytest.mark.parametrize("jobs", [1, 3])
def test_first_stops_at_the_first_invalid_key(tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int) -> None:
    path = write(tmp_path / "keys.jsonl", WRONG, keys=30)
    history = read(path)
    every = check(history, "register")
    assert every.stats["invalid_keys"] == 30
    first = check(history, "register", first=True, jobs=jobs)
    assert first.verdict is Verdict.INVALID and 1 <= first.stats["invalid_keys"] <= jobs
    assert first.witness is not None and "stopped at this first violation" in first.reason
    assert main([path, "--model", "register", "--first", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["stats"]["invalid_keys"] == 1


def test_first_stops_the_general_search_at_the_first_invalid_key(tmp_path: Path) -> None:
    rows = [("invoke", "append", "a"), ("ok", "append", "a"), ("invoke", "get", None), ("ok", "get", "b")]
    history = read(write(tmp_path / "keys.jsonl", rows, keys=20))  # type: ignore[arg-type]
    assert check(history, KeyValue()).stats["invalid_keys"] == 20
    assert check(history, KeyValue(), first=True).stats["keys"] == 1


def test_first_changes_no_verdict_of_a_valid_history(tmp_path: Path) -> None:
    history = read(write(tmp_path / "keys.jsonl", FINE, keys=5))
    result = check(history, "register", first=True)
    assert result.verdict is Verdict.VALID and result.stats["keys"] == 5


@INTERRUPTED
@pytest.mark.parametrize(
    ("limit", "said"), [(["--timeout", "0.1"], "time limit of 0.1 s"), (["--memory", "16"], "memory limit of 16 MiB")]
)
def test_checkers_without_limits_of_their_own_stop_at_the_limits_of_the_command(
    limit: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def endless(history: Any, *, total: int | None = None) -> Result:
        held: list[bytes] = []
        until = time.monotonic() + 20
        while time.monotonic() < until:
            held.append(bytes(100_000))
            if len(held) > 2_000:
                held.clear()
        return Result(verdict=Verdict.VALID)

    monkeypatch.setitem(module.UNLIMITED, "bank", endless)
    path = write(tmp_path / "history.jsonl", [("invoke", "read", None), ("ok", "read", [])])
    assert main([path, "--model", "bank:total=1", *limit]) == 2
    assert said in capsys.readouterr().out


@INTERRUPTED
@pytest.mark.parametrize("has_told", [True, False], ids=["as the work ends", "at its end"])
def test_a_limit_reached_as_the_work_ends_is_raised_with_its_reason(has_told: bool) -> None:
    """Another thread raises it, at any instruction, also while the watch is being ended."""
    reason = "the time limit of 3 s was reached"

    class Lock:
        """A lock in which the error arrives."""

        arrived = False

        def __enter__(self) -> None:
            if not self.arrived:
                self.arrived = True
                raise _limit_reached_by(reason)

        def __exit__(self, *_: object) -> None: ...

    def work() -> None:
        with watch:
            watch._lock, watch._reason = cast(Any, Lock()), reason
            if has_told:
                raise _limit_reached_by(reason)

    watch = _Watch(lambda: None)
    with pytest.raises(LimitReached, match=reason):
        work()
    assert watch._over.is_set()


@INTERRUPTED
def test_a_limit_whose_error_is_swallowed_is_raised_again() -> None:
    """Python ignores what is raised in a callback of gc, or in __del__."""

    def run_until(until_s: float) -> None:
        while time.monotonic() < until_s:
            pass
        raise AssertionError("the limit did not interrupt it")

    with pytest.raises(LimitReached, match=r"the time limit of 0\.01 s"), Budget(timeout_s=0.01).watched_anyway():
        with contextlib.suppress(LimitReached):
            run_until(time.monotonic() + 30)
        run_until(time.monotonic() + 30)


@INTERRUPTED
def test_a_watch_ends_with_its_work_and_work_goes_on_if_none_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def watches() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "budget watch"]

    with Budget(timeout_s=10.0).watched_anyway():
        assert len(watches()) == 1
    assert not watches(), "a fork must leave no thread behind"

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Budget(timeout_s=10.0).watched_anyway():
        assert not watches()
