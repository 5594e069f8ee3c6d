"""`harness export`: a stored run in the files of other tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checker.codecs.edn import parse_edn
from harness.commands import export

Here = Callable[..., subprocess.CompletedProcess[str]]

RUN = ("run", "--cluster", "sim", "--nodes", "3", "--nemesis", "partition=leader", "--nemesis-interval", "2",
       "--time-limit", "6", "--rate", "20", "--concurrency", "3", "--seed", "4", "--trace")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, harness_here: Here) -> Path:
    """The directory with the store of a traced run."""
    directory = tmp_path_factory.mktemp("made")
    done = harness_here(*RUN, cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The run's directory, copied into a store of this test alone."""
    shutil.copytree(made / "store", tmp_path / "store", symlinks=True)
    return next(tmp_path.glob("store/*/2*"))


def test_a_jepsen_store_is_judged_as_the_run_was(made: Path, harness_here: Here, tmp_path: Path) -> None:
    done = harness_here("export", "latest", "--format", "jepsen", "--out", str(tmp_path / "jepsen"), cwd=made)
    assert done.returncode == 0, done.stderr
    [place] = (tmp_path / "jepsen").glob("*/*Z")
    assert done.stdout == f"{place}\n" and place.parent.name == next(made.glob("store/*/2*")).parent.name
    [results] = parse_edn((place / "results.edn").read_text())
    assert results["valid?"] is True and results["linearizable"]["valid?"] is True
    checked = harness_here("check", str(place / "history.edn"), "--model", "register", "--json", cwd=made)
    assert checked.returncode == 0
    operations = json.loads((next(made.glob("store/*/2*")) / "results.json").read_text())["checks"]["linearizable"]
    assert f"{json.loads(checked.stdout)['stats']['operations']} operations" in operations["reason"]


def test_a_trace_for_perfetto_has_operations_faults_leaders_and_messages(
    copy: Path, harness_here: Here, tmp_path: Path
) -> None:
    done = harness_here("export", "latest", "--format", "perfetto", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == f"{copy / 'perfetto.json'}\n", done.stderr
    events = json.loads((copy / "perfetto.json").read_text())["traceEvents"]
    found = {(each["ph"], each.get("cat")) for each in events}
    assert {("X", "ok"), ("b", "fault"), ("e", "fault"), ("X", "message"), ("s", "message"), ("f", "message")} <= found
    assert "messages of the trace" in done.stderr
    assert any(each["ph"] == "i" and each["name"].startswith("leads term ") for each in events)
    returned = sum('"type":"invoke"' not in line for line in (copy / "history.jsonl").read_text().splitlines())
    assert sum(each["ph"] == "X" and each["cat"] != "message" for each in events) >= returned - 4  # of the nemesis


def test_a_run_without_a_trace_or_results_is_exported_as_far_as_it_goes(
    copy: Path, harness_here: Here, tmp_path: Path
) -> None:
    for name in ("trace.jsonl", "results.json"):
        (copy / name).unlink()
    history = copy / "history.jsonl"
    history.write_bytes(history.read_bytes()[:-5])
    done = harness_here("export", str(copy), "--format", "perfetto", "--out", "t.json", cwd=tmp_path)
    assert done.returncode == 0 and "the last line of the history was cut short" in done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    done = harness_here("export", str(copy), "--format", "jepsen", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == f"jepsen-store/{copy.parent.name}/{copy.name}\n"
    assert parse_edn((tmp_path / done.stdout.strip() / "results.edn").read_text())[0]["valid?"] == "unknown"


def test_messages_beyond_the_limit_are_left_out_and_counted(
    copy: Path, harness_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_MESSAGES", 50)
    done = harness_here("export", str(copy), "--format", "perfetto", cwd=tmp_path)
    assert done.stderr.startswith("50 messages of the trace; ") and done.stderr.endswith(" more were left out\n")


def test_what_cannot_be_exported_is_refused_in_one_line(copy: Path, harness_here: Here, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = harness_here("export", *words, cwd=tmp_path)
        assert done.returncode == 254 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "no run" in refused("nothing", "--format", "jepsen")
    (tmp_path / "file").write_text("")
    assert "file" in refused(str(copy), "--format", "jepsen", "--out", "file")
    assert "nowhere/t.json" in refused(str(copy), "--format", "perfetto", "--out", "nowhere/t.json")
    os.mkfifo(copy / "perfetto.json")
    assert "is not a regular file" in refused(str(copy), "--format", "perfetto")
    damaged = (copy / "history.jsonl").read_text().replace('"type":"ok"', '"type":"oh"', 1)
    (copy / "history.jsonl").write_text(damaged)
    (tmp_path / "older.json").write_text("older")
    assert "history.jsonl:" in refused(str(copy), "--format", "perfetto", "--out", "older.json")
    assert (tmp_path / "older.json").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "older.json", "store"]
    (copy / "history.jsonl").unlink()
    assert "has no history" in refused(str(copy), "--format", "jepsen")
