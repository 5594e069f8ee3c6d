"""A series of runs: the combinations, the seeds, the exit status, how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.commands import series
from harness.errors import HarnessError, InterruptedStartError, OperatorError, SystemUnderTestError


def matrix(tmp_path: Path, text: str) -> str:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    return str(path)


def test_a_matrix_gives_every_combination_once(tmp_path: Path) -> None:
    path = matrix(tmp_path, 'nodes = [3, 5]\nnemesis = "partition"\n[set]\nread_mode = ["log", "unsafe"]\n')
    assert series.combinations(path) == [
        ["--nodes", str(nodes), "--nemesis", "partition", "--set", f"read_mode={mode}"]
        for nodes in (3, 5)
        for mode in ("log", "unsafe")
    ]


def test_settings_of_a_matrix_are_strings_and_may_have_dots(tmp_path: Path) -> None:
    path = matrix(tmp_path, '[set]\nworkload.keys = [2, 20]\nversion = ["3.1", "3.10"]\n')
    assert series.combinations(path) == [
        ["--set", f"workload.keys={keys}", "--set", f"version={version}"]
        for keys in (2, 20)
        for version in ("3.1", "3.10")
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[set]\nversion = ['3.1', '3.1']", "a value twice"),
        ("[set]\nworkload.keys.a = []", "workload.keys.a is an empty list"),
        ("[set]\nworkload = {}", "workload must list words or numbers"),
        ("nodes = [", "not TOML"),
        ("nodse = [3]", "did you mean nodes"),
        ("nodes = []", "empty list"),
        ("nodes = [3, 3]", "a value twice"),
        ("time-limit = [20, 20.0]", "a value twice"),
        ('nodes = [3, "3"]', "a value twice"),
        ("time_limit = [20]\ntime-limit = [30]", "time_limit and time-limit are the same option"),
        ('set = ["read_mode=log"]', r"set must be a table: \[set\]"),
        ("[set]\n" + "\n".join(f"s{n} = {list(range(40))}" for n in range(6)), "4,096,000,000 combinations"),
        ("nodes = [[3]]", "words or numbers"),
        ("", "lists no options"),
        ("seed = [1]", "'seed' is not one of"),
    ],
)
def test_an_invalid_matrix_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words) as caught:
        series.combinations(matrix(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_seeds_of_repetitions_derive_from_the_base_seed() -> None:
    seeds = [series.derived_seed(7, repetition) for repetition in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [series.derived_seed(7, repetition) for repetition in range(100)]
    assert set(seeds) & {series.derived_seed(8, repetition) for repetition in range(100)} == set()


class FakeRunDir:
    name = "test/time"


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces runs: the list of the tests that would have been run, and a list for their outcomes."""
    seen: list[Any] = []
    outcomes: list[Any] = []

    def perform(parts: Any, store: Any, console: Any) -> Any:
        seen.append(parts.test)
        outcome = outcomes[len(seen) - 1] if len(seen) <= len(outcomes) else True
        if isinstance(outcome, Exception):
            raise outcome
        return FakeRunDir(), {"valid": outcome if outcome != "stopped" else True,
                              "interrupted": "SIGINT" if outcome == "stopped" else None}  # fmt: skip

    monkeypatch.setattr(series, "perform", perform)
    return seen, outcomes


def run(tmp_path: Path, *words: str) -> int:
    path = matrix(tmp_path, '[set]\nread_mode = ["log", "unsafe"]\n')
    base = ["run", "--cluster", "local", "--nodes", "3", "--seed", "7", "--store", str(tmp_path / "store")]
    return cli.main([*base, "--matrix", path, *words])


def test_all_combinations_are_run_and_the_worst_verdict_is_the_status(tmp_path: Path, performed: Any) -> None:
    seen, outcomes = performed
    outcomes += [True, "unknown", True, False]
    assert run(tmp_path, "--test-count", "2") == 1
    assert [(test.settings["read_mode"], test.seed) for test in seen] == [
        (mode, series.derived_seed(7, repetition)) for repetition in range(2) for mode in ("log", "unsafe")
    ]
    outcomes[:] = [True] * 4 + [True, "unknown"]
    assert run(tmp_path) == 2
    outcomes[:] = [True] * 6
    assert run(tmp_path) == 0


def test_the_table_and_the_junit_file_have_every_run_with_its_own_verdict(
    tmp_path: Path, performed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, outcomes = performed
    outcomes += [True, "unknown", SystemUnderTestError("no leader"), False, True, "unknown"]
    judged = series.perform

    def whole(parts: Any, store: Any, console: Any) -> Any:
        run_dir, results = judged(parts, store, console)
        run_dir.report_path = "report.html"
        return run_dir, {**results, "reason": "as seen", "checks": {}, "seed": 7, "replay": "harness run"}

    monkeypatch.setattr(series, "perform", whole)
    junit = tmp_path / "junit.xml"
    assert run(tmp_path, "--test-count", "3", "--junit", str(junit)) == 1
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[-3:] == [
        ["configuration", "valid", "invalid", "unknown", "not", "started"],
        ["read_mode=log", "2", "0", "0", "1"],
        ["read_mode=unsafe", "0", "1", "2", "0"],
    ]
    assert [line.split(": ")[1].split()[0] for line in said.err.splitlines() if line.startswith("run ")] == [
        "valid", "unknown", "did", "invalid", "valid", "unknown",
    ]  # fmt: skip
    assert re.findall('name="verdict" value="([a-z-]+)"', junit.read_text()) == [
        "valid", "unknown", "did-not-run", "invalid", "valid", "unknown",
    ]  # fmt: skip


def test_an_operator_error_ends_the_series_and_names_the_run(
    tmp_path: Path, performed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, outcomes = performed
    outcomes += [True, OperatorError("the disk is full")]
    assert run(tmp_path, "--test-count", "3") == 254
    assert len(seen) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == "harness: run 2 of 6, read_mode=unsafe, seed 7: the disk is full (1 earlier run kept)"


@pytest.mark.parametrize("error", [OperatorError("the disk is full"), HarnessError("interrupted while checking")])
def test_an_error_after_an_invalid_run_ends_the_series_with_the_status_of_the_violation(
    tmp_path: Path, performed: Any, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    _, outcomes = performed
    outcomes += [False, error]
    assert run(tmp_path) == 1
    assert str(error) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("verdict", "status"), [(True, 255), ("unknown", 255), (False, 1)])
def test_three_failed_starts_in_a_row_end_the_series(
    tmp_path: Path, performed: Any, capsys: pytest.CaptureFixture[str], verdict: bool | str, status: int
) -> None:
    seen, outcomes = performed
    outcomes += [SystemUnderTestError("no leader"), verdict, *[SystemUnderTestError("no leader")] * 3]
    assert run(tmp_path, "--test-count", "5") == status, "a violation is certain, whatever the other runs come to"
    assert len(seen) == 5
    assert "stopped: 3 runs in a row did not start; 5 runs left" in capsys.readouterr().err


def test_an_interruption_ends_the_series(tmp_path: Path, performed: Any) -> None:
    seen, outcomes = performed
    outcomes += [True, "stopped"]
    assert run(tmp_path, "--test-count", "5") == 0
    assert len(seen) == 2


def test_an_interruption_while_a_system_starts_ends_the_series_too(
    tmp_path: Path, performed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, outcomes = performed
    outcomes += [True, InterruptedStartError("interrupted before the system had started")]
    assert run(tmp_path, "--test-count", "5") == 255
    assert len(seen) == 2
    assert "stopped; 8 runs left" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OperatorError("the disk is full"), SystemUnderTestError("no leader")])
def test_json_results_of_earlier_runs_are_printed_if_an_error_ends_the_series(
    tmp_path: Path, performed: Any, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    _, outcomes = performed
    outcomes += [False, *[error] * 3]
    assert run(tmp_path, "--test-count", "5", "--json") == 1
    assert [results["valid"] for results in json.loads(capsys.readouterr().out)] == [False]


def test_all_combinations_are_validated_before_the_first_run(
    tmp_path: Path, performed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, _ = performed
    path = matrix(tmp_path, '[set]\nread_mode = ["log", "hopeful"]\n')
    assert cli.main(["run", "--cluster", "local", "--matrix", path]) == 254
    assert seen == []
    assert "read_mode=hopeful: --set (system broker): read_mode must be one of" in capsys.readouterr().err
