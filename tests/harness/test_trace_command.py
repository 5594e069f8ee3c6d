"""`--trace` and `harness trace`, from a simulated run to the picture."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


Here = Callable[..., subprocess.CompletedProcess[str]]


def harness(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the harness in a new process with an empty PATH."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


RUN = ("run", "--cluster", "sim", "--nodes", "3", "--nemesis", "partition=leader", "--nemesis-interval", "2",
       "--time-limit", "6", "--rate", "20", "--concurrency", "3", "--seed", "4")  # fmt: skip


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the store of a traced run."""
    directory = tmp_path_factory.mktemp("traced")
    done = harness(*RUN, "--trace", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_trace_records_connections_packets_and_rpcs(traced: Path) -> None:
    (path,) = traced.glob("store/*/2*/trace.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(events))
    assert events[0]["time"] < 0 < events[-1]["time"]
    assert {"syn", "accept", "send", "arrive", "lost", "again"} <= {event["kind"] for event in events}
    said = {rpc["rpc"] for event in events for rpc in event.get("rpcs", ())}
    assert {"vote", "heartbeat", "append", "send", "pull", "register broker"} <= said
    assert "answer" not in said, "every answer is known by its request"


def test_the_trace_records_the_log_positions_of_each_replica(traced: Path) -> None:
    (path,) = traced.glob("store/*/2*/trace.jsonl")
    states: dict[str, list[tuple[int, int]]] = {}
    for event in map(json.loads, path.read_text().splitlines()):
        if event["kind"] == "log":
            states.setdefault(event["host"], []).append((event["committed"], event["end"]))
    assert set(states) == {"n1", "n2", "n3"}
    for changes in states.values():
        assert all(committed <= end for committed, end in changes)
        assert all(a != b and a[0] <= b[0] for a, b in itertools.pairwise(changes)), "no replica was restarted"
    last = {changes[-1] for changes in states.values()}
    assert len(last) == 1 and last.pop()[0] > 30, "all replicas know at the end what is committed"


def test_tracing_does_not_change_the_run(traced: Path, tmp_path: Path, harness_here: Here) -> None:
    done = harness_here(*RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (with_trace,) = traced.glob("store/*/2*/history.jsonl")
    (without,) = tmp_path.glob("store/*/2*/history.jsonl")
    assert with_trace.read_bytes() == without.read_bytes()
    assert not (without.parent / "trace.jsonl").exists()
    refused = harness_here("trace", "latest", "--from", "0", "--to", "1", cwd=tmp_path)
    assert refused.returncode == 254 and "has no trace: run with --cluster sim --trace" in refused.stderr


def test_trace_draws_the_requested_window_and_hosts(traced: Path, harness_here: Here) -> None:
    (results,) = traced.glob("store/*/2*/results.json")
    elected = json.loads(results.read_text())["checks"]["leaders"]["terms"][-1]
    assert elected["start_ns"] > 2e9, "the partition from 2 s on brings a new leader"
    done = harness_here("trace", "latest", "--from", "1.9", "--to", str(elected["start_ns"] / 1e9 + 0.1), cwd=traced)
    assert done.returncode == 0, done.stderr
    page = Path(traced, done.stdout.strip()).read_text()
    assert (
        "f1 partition" in page and ">n3<" in page and "arrow lost" in page and f"leads term {elected['term']}" in page
    )
    done = harness_here(
        "trace", "latest", "--from", "-1", "--to", "0.2", "--hosts", "n2,n1", "--out", "a.svg", cwd=traced
    )
    assert done.returncode == 0, done.stderr
    drawing = (traced / "a.svg").read_text()
    assert drawing.startswith("<svg") and ">n3<" not in drawing and drawing.index(">n2<") < drawing.index(">n1<")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--cluster", "local", "--trace"], "--trace: the network of cluster local cannot be traced"),
        (["trace", "latest", "--from", "3", "--to", "2"], "--from 3 must be less than --to 2"),
        (["trace", "latest", "--from", "nan", "--to", "2"], "must be less than"),
        (["trace", "latest", "--from", "1", "--to", "1e300"], "--from 1 must be less than --to 1e+300"),
        (["trace", "latest", "--from", "900", "--to", "901"], "the trace covers"),
        (["trace", "latest", "--from", "0", "--to", "1", "--hosts", "n1,n7"], "n7 sent and received nothing"),
        (["trace", "latest", "--from", "0", "--to", "1", "--hosts", "n1"], "name at least two"),
        (["trace", "latest", "--from", "0", "--to", "1", "--out", "x.png"], "must end in .html or .svg"),
        (["trace", "latest", "--from", "0", "--to", "1", "--out", "no/where.svg"], "No such file"),
        (["trace", "latest", "--replay", "--from", "900", "--to", "901"], "the trace covers"),
        (["trace", "nothing-here", "--from", "0", "--to", "1"], "no run"),
        (["trace", "latest", "--from", "0"], "--to"),
    ],
)
def test_invalid_trace_requests_are_refused_in_one_line(
    traced: Path, words: list[str], expected: str, harness_here: Here
) -> None:
    done = harness_here(*words, cwd=traced)
    assert done.returncode == 254, done.stderr
    assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("name", "options"), [("trace.html", ["--from", "0", "--to", "1"]), ("replay.html", ["--replay"])]
)
def test_trace_keeps_the_old_drawing_on_a_full_disk(traced: Path, name: str, options: list[str]) -> None:
    (run,) = traced.glob("store/*/2*")
    (run / name).write_text("old")
    words = [sys.executable, "-m", "harness", "trace", "latest", *options]
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words],
        cwd=traced, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (254, f"harness: --out {run / name}: File too large\n")
    assert (run / name).read_text() == "old"
