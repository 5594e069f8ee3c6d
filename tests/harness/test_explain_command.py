"""`harness explain`, from a simulated run to the report and the replay."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCENARIO = ("run", "--cluster", "sim", "--nodes", "3", "--workload", "log", "--time-limit", "4", "--rate", "100",
            "--concurrency", "6", "--seed", "3")  # fmt: skip
SCHEDULE = [
    {"at_s": 1.0, "action": "inject", "id": "f1", "nemesis": "partition", "variant": "leader"},
    {"at_s": 3.5, "action": "heal", "id": "f1", "nemesis": "partition", "variant": "leader"},
]
FEW = ("--points", "24", "--runs", "3", "--jobs", "2")


Here = Callable[..., subprocess.CompletedProcess[str]]


def harness(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the harness in a new process with an empty PATH."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the store of one invalid run, in which a leader that is cut off does not step down."""
    directory = tmp_path_factory.mktemp("explained")
    (directory / "faults.json").write_text(json.dumps(SCHEDULE))
    done = harness(*SCENARIO, "--nemesis-schedule", "faults.json", "--set", "mutant=no-step-down", cwd=directory)
    assert done.returncode == 1, done.stderr
    return directory


@pytest.fixture(scope="module")
def explained(place: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    done = harness("explain", "latest", *FEW, cwd=place)
    assert done.returncode == 0, done.stderr
    (run,) = place.glob("store/*/2*")
    return run, done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_explain_interrupted_by_a_signal_leaves_no_files(place: Path, tmp_path: Path, number: int) -> None:
    (run,) = place.glob("store/*/2*")
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "explain", str(run), "--points", "40", "--runs", "100", "--jobs", "1"],
        env={"PYTHONPATH": str(ROOT), "PATH": "", "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    assert "invariants: " in process.stderr.readline(), "the run was repeated once, and continuations begin"
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert rest.splitlines()[-1] == "harness: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_explain_prints_the_deciding_interval_and_the_events_in_it(
    explained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, done = explained
    data = json.loads((run / "explain.json").read_text())
    jump = data["jump"]
    assert 1.0 < jump["before_s"] < jump["after_s"] < data["end_s"] < 4.0, "after the cut, before the violation shows"
    said = " ".join(done.stdout.split())
    assert f"Decided between {jump['before_s']:.4f} s and {jump['after_s']:.4f} s" in said
    assert "0 of 3 fail; from the second moment, 3 of 3." in said
    assert re.search(r"^ +\d\.\d{6} s  \S", done.stdout, re.MULTILINE), "the events in the interval"
    assert "seed    3" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_printed_repeat_command_gives_the_same_explanation(
    place: Path, explained: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    run, done = explained
    before = (run / "explain.json").read_text()
    line = next(line for line in done.stdout.splitlines() if line.startswith("repeat"))
    words = line.split(" explain ", 1)[1].split()
    again = harness("explain", *words, "--jobs", "1", "--json", cwd=place)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(before)
    assert (run / "explain.json").read_text() == before


def test_report_and_replay_show_the_deciding_interval(
    place: Path, explained: tuple[Path, subprocess.CompletedProcess[str]], harness_here: Here
) -> None:
    run, _ = explained
    page = (run / "report.html").read_text()
    assert page.index('id="decided"') < page.index('id="faults"')
    assert "no faults from this moment on" in page
    assert page.count('class="share healed"') > 8
    done = harness_here("trace", "latest", "--replay", cwd=place)
    assert done.returncode == 0, done.stderr
    jump = json.loads((run / "explain.json").read_text())["jump"]
    packed = re.search(r'"decided":\[(\d+),(\d+)\]', (run / "replay.html").read_text())
    assert packed is not None
    assert [int(one) for one in packed.groups()] == [round(jump[name] * 1e6) for name in ("before_s", "after_s")]


@pytest.mark.long
def test_the_result_is_printed_if_the_report_cannot_be_written(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "place", symlinks=True)
    (run,) = tmp_path.glob("place/store/*/2*")
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    done = harness("explain", str(run), *FEW, cwd=tmp_path / "place")
    assert done.returncode == 254
    assert "Decided between" in done.stdout
    assert done.stderr.splitlines()[-1] == f"harness: cannot write {run / 'report.html'}: Is a directory"


def test_an_interrupted_search_is_stored_unless_an_earlier_result_exists(
    explained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    run, _ = explained
    fresh = tmp_path / "fresh"
    shutil.copytree(run, fresh)
    (fresh / "explain.json").unlink()
    for directory, kept in ((fresh, None), (run, (run / "explain.json").read_text())):
        process = subprocess.Popen(
            [sys.executable, "-m", "harness", "explain", str(directory), "--points", "40", "--runs", "9"],
            env={"PYTHONPATH": str(ROOT), "PATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        while "moments: from" not in process.stderr.readline():
            assert process.poll() is None
        process.terminate()
        said, rest = process.communicate(timeout=60)
        assert process.returncode == 2, rest
        assert "the steepest rise so far, from 0 of 3 failing runs to 3 of 3" in " ".join(said.split())
        assert ("the report keeps the moment found earlier" in rest) is (kept is not None)
        if kept is None:
            assert json.loads((directory / "explain.json").read_text())["is_interrupted"] is True
            assert "Interrupted after" in (directory / "report.html").read_text()
        else:
            assert (directory / "explain.json").read_text() == kept


def changed(place: Path, name: str, **changes: object) -> str:
    """Copy the run and change values in one of its files; returns the path of the copy."""
    (run,) = place.glob("store/*/2*")
    copy = place / "copies" / f"{name}-{'-'.join(changes)}"
    shutil.copytree(run, copy)
    data = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps({**data, **changes}))
    return str(copy)


def test_a_terminated_search_removes_its_scratch_directory(place: Path, tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    searching = subprocess.Popen(
        [sys.executable, "-m", "harness", "explain", "latest", "--points", "100", "--runs", "100", "--jobs", "1"],
        cwd=place, env={"PYTHONPATH": str(ROOT), "PATH": "", "TMPDIR": str(tmp_path / "temp")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while not list((tmp_path / "temp").glob("splitbrain-course-*/*")) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert searching.poll() is None
    searching.terminate()
    _, said = searching.communicate(timeout=60)
    assert searching.returncode == 255
    assert said.splitlines()[-1] == "harness: interrupted"
    assert list((tmp_path / "temp").iterdir()) == []


def test_runs_that_cannot_be_explained_are_refused_in_one_line(place: Path, harness_here: Here) -> None:
    (run,) = place.glob("store/*/2*")
    cases = [
        ((changed(place, "results.json", valid=True),), "the run is not invalid"),
        (
            (changed(place, "test.json", cluster="local"),),
            "ran on cluster local, where a seed does not reproduce a run: only runs of --cluster sim can be explained; "
            "harness ",
        ),
        ((changed(place, "test.json", seed=4),), "this version does not reproduce the run: event"),
        (
            (str(run), "--check", "bank"),
            "--check bank: the run has no violation of it to explain; checks with violations: invariants",
        ),
        ((str(run), "--points", "1000", "--runs", "1000"), "at most 100,000 continuations"),
        ((str(run), "--runs", "1"), "--runs 1 is too few to tell a deciding moment from chance: give at least 2"),
        (("nowhere",), "no run 'nowhere'"),
    ]
    for words, text in cases:
        done = harness_here("explain", *words, cwd=place)
        assert done.returncode == 254, done.stderr
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("harness: "), line
        assert text in line
        assert "Traceback" not in done.stderr
