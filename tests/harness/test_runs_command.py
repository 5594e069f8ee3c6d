"""`harness runs`: the table, its filters, and what it says about runs that are not shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.commands import runs as module
from harness.run_index import RunIndex
from harness.store import Store

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


Runs = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def runs(harness_here: Callable[..., subprocess.CompletedProcess[str]]) -> Runs:
    """A function that runs `harness runs WORDS` in a directory, on a terminal of some columns."""

    def perform(*words: str, cwd: Path, columns: int = 80) -> subprocess.CompletedProcess[str]:
        return harness_here("runs", *words, cwd=cwd, environment={"COLUMNS": str(columns)})

    return perform


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Five runs, one of each state, from valid (the oldest) to unfinished (the newest)."""
    store = Store(tmp_path / "store")
    for minutes, valid in enumerate((True, False, "unknown", None, None)):
        nemesis = ["kill" if minutes % 2 else "partition=leader"]
        test = f"broker-register-{nemesis[0].partition('=')[0]}"
        run = store.create(test, now=NOON + timedelta(minutes=minutes))
        names = {"system": "broker", "workload": "register", "cluster": "sim"}
        run.write_test({**names, "nemesis": nemesis, "seed": minutes})
        if valid is not None:
            faults = [{"id": "f1", "nemesis": nemesis[0], "proven": valid != "unknown", "exercised": minutes != 1}]
            ops = {"ok": 1000 + minutes, "fail": 0, "info": 3}
            run.write_results({"valid": valid, "reason": "so", "ops": ops, "faults": faults, "duration_s": 12.5})
            run.finish()
        elif minutes == 4:
            run.release()
        else:
            RUNNING.append(run)
    return tmp_path


RUNNING: list[Any] = []
"""Runs whose lock is to be held as long as this process lives."""


def test_the_table_shows_the_test_and_the_outcome_of_each_run(place: Path, runs: Runs) -> None:
    done = runs(cwd=place, columns=170)
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["verdict", "age", "run", "what", "operations", "faults", "took", "seed"]
    assert [line.split()[0] for line in lines] == ["UNFINISHED", "RUNNING", "UNKNOWN", "INVALID", "VALID"]
    valid, invalid, unknown = lines[4], lines[3], lines[2]
    assert "broker-register-partition/20260131T120000Z" in valid
    assert "broker register partition=leader on sim" in valid
    assert "1,000 ok, 3 info" in valid and "1 proven" in valid and "12.5 s" in valid and valid.rstrip().endswith("0")
    assert "1 proven, 1 not exercised" in invalid
    assert "0 of 1 proven" in unknown


def test_nothing_is_cut_at_80_columns(place: Path, runs: Runs) -> None:
    done = runs(cwd=place)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "VALID       broker-register-partition/20260131T120000Z" in [line.rstrip() for line in lines]
    assert "seed 0" in " ".join(done.stdout.split())
    assert "register kill on sim; seed" in " ".join(done.stdout.split()), "nothing is said of what is not known"
    assert "–" not in done.stdout


@pytest.mark.parametrize("columns", [80, 150, 170])
def test_the_name_of_a_run_is_never_wrapped(place: Path, runs: Runs, columns: int) -> None:
    done = runs(cwd=place, columns=columns)
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "broker-register-partition/20260131T120000Z" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--verdict", "valid"], ["VALID"]),
        (["--verdict", "invalid,unknown"], ["UNKNOWN", "INVALID"]),
        (["--nemesis", "partition"], ["UNFINISHED", "UNKNOWN", "VALID"]),
        (["--test", "broker-register-kill"], ["RUNNING", "INVALID"]),
        (["--system", "broker", "--workload", "register", "--limit", "1"], ["UNFINISHED"]),
        (["--cluster", "netns"], []),
    ],
)
def test_options_select_the_runs_that_are_shown(place: Path, runs: Runs, words: list[str], expected: list[str]) -> None:
    done = runs(*words, cwd=place, columns=170)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if "/2026" in line]
    assert rows == expected


def test_runs_that_are_not_shown_are_counted(place: Path, runs: Runs) -> None:
    said = runs("--limit", "2", "--nemesis", "partition", cwd=place).stdout
    assert "1 older run not shown: --limit 3 shows all" in said
    assert "2 non-matching runs not shown" in said
    nothing = runs("--workload", "log", cwd=place).stdout
    assert nothing.splitlines() == ["no matching runs", "the store has 5 runs"]


def test_a_name_that_only_a_run_of_the_store_has_is_known(place: Path, runs: Runs) -> None:
    """It was made with a plug-in that is not installed here, or is a file."""
    run = Store(place / "store").create("mine-feed-flood")
    run.write_test({"system": "plugins/mine.py", "workload": "feed", "nemesis": ["flood=all"], "cluster": "cloud"})
    run.release()
    for words in (["--workload", "feed"], ["--nemesis", "flood"], ["--system", "mine"], ["--cluster", "cloud"]):
        assert "mine-feed-flood/2" in runs(*words, cwd=place).stdout, words
    for words in (["--system", "other.py"], ["--nemesis", "none"], ["--workload", "log"]):
        assert "no matching runs" in runs(*words, cwd=place).stdout, words


def test_runs_are_printed_as_json(place: Path, runs: Runs) -> None:
    data = json.loads(runs("--json", "--limit", "2", cwd=place).stdout)
    assert [run["verdict"] for run in data["runs"]] == ["unfinished", "running"]
    assert (data["older_not_shown"], data["other_runs"], data["not_read"]) == (3, 0, 0)


def test_folders_that_cannot_be_read_are_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "read_index", lambda store: RunIndex([], unreadable=["hidden (Permission denied)"]))
    assert cli.main(["runs", "--store", str(place / "store")]) == 0
    said = capsys.readouterr().out
    assert said == "no matching runs\n1 folder of the store cannot be read: hidden (Permission denied)\n"
    assert cli.main(["runs", "--store", str(place / "store"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreadable"] == ["hidden (Permission denied)"]


def test_markup_in_a_test_is_printed_as_text(tmp_path: Path, runs: Runs) -> None:
    run = Store(tmp_path / "store").create("t")
    run.write_test({"system": "[red]x[/red]", "workload": "\x1b[31mred"})
    run.release()
    said = runs(cwd=tmp_path, columns=200).stdout
    assert "[red]x[/red]" in said and "\x1b" not in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--store", "nowhere"], "there is no store at"),
        (["--verdict", "vald"], "unknown verdict 'vald' (did you mean valid?)"),
        (["--limit", "0"], "must be at least 1"),
        (["--workload", "regster"], "unknown workload 'regster' (did you mean register?): none of that name is inst"),
        (["--nemesis", "kil=sigkill"], "unknown nemesis 'kil' (did you mean kill?): "),
        (["--system", "brokr", "--json"], "unknown system 'brokr' (did you mean broker?): "),
        (["--cluster", "netnss"], "unknown cluster 'netnss' (did you mean netns?): "),
    ],
)
def test_invalid_options_are_refused_in_one_line(place: Path, runs: Runs, words: list[str], expected: str) -> None:
    done = runs(*words, cwd=place)
    assert done.returncode == 254
    assert expected in done.stderr and len(done.stderr.splitlines()) == 1
