"""Summaries of a store's runs, and their cache, which may be stale, damaged or unwritable but must not mislead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness.run_index as module
from harness.report.store_page import render_store
from harness.run_index import (
    STATES,
    RunSummary,
    SummaryCache,
    index_lock,
    read_index,
    read_summary,
    select,
    unreadable_words,
)
from harness.store import RunDir, RunStatus, Store, StoreError

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
TEST = {
    "system": "broker", "cluster": "sim", "nodes": 5, "workload": "register", "nemesis": ["partition=leader", "kill"],
    "seed": 7, "settings": {"read_mode": "unsafe"}, "nemesis_schedule": None,
}  # fmt: skip
FAULT = {"id": "f1", "nemesis": "partition", "proven": True, "exercised": True}
RESULTS: dict[str, Any] = {
    "valid": True, "reason": "all holds", "ops": {"invoke": 12, "ok": 10, "fail": 0, "info": 2}, "duration_s": 20.5,
    "faults": [FAULT, {**FAULT, "proven": False}, {**FAULT, "exercised": False}],
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def make(store: Store, *, minutes: int = 0, name: str = "broker-register-partition", **results: Any) -> RunDir:
    run = store.create(name, now=NOON + timedelta(minutes=minutes))
    run.write_test(TEST)
    run.write_results({**RESULTS, **results})
    run.finish()
    return run


def names(store: Store) -> list[str]:
    return [run.name for run in read_index(store).runs]


def test_the_summary_of_a_run_has_its_test_verdict_and_counts(store: Store) -> None:
    make(store)
    assert [run.to_json() for run in read_index(store).runs] == [
        {
            "name": "broker-register-partition/20260131T120000Z", "verdict": "valid", "reason": "all holds",
            "system": "broker", "workload": "register", "nemesis": "partition=leader,kill", "cluster": "sim",
            "settings": "read_mode=unsafe", "nodes": 5, "seed": 7, "ok": 10, "fail": 0, "info": 2,
            "faults": 3, "proven": 2, "unmet": 1, "duration_s": 20.5,
        }
    ]  # fmt: skip
    (run,) = read_index(store).runs
    assert (run.test, run.time, run.started_at) == ("broker-register-partition", "20260131T120000Z", NOON)
    assert run.age_s(NOON + timedelta(hours=1)) == 3600


def test_runs_are_listed_newest_first_and_a_missing_store_has_none(store: Store) -> None:
    assert read_index(store).runs == []
    runs = [make(store, minutes=minutes, name=name) for minutes, name in ((2, "a"), (0, "b"), (1, "a"), (1, "c"))]
    assert names(store) == [runs[i].name for i in (0, 3, 2, 1)]


@pytest.mark.parametrize("valid", ["unknown", None, 1, "true", [], {"valid": True}])
def test_only_true_counts_as_valid(store: Store, valid: Any) -> None:
    make(store, valid=valid)
    assert [run.verdict for run in read_index(store).runs] == ["unknown"]


def test_a_run_without_results_is_running_or_unfinished(store: Store) -> None:
    running = store.create("t", now=NOON)
    running.write_test(TEST)
    store.create("t", now=NOON + timedelta(minutes=1)).release()
    assert [(run.verdict, run.system) for run in read_index(store).runs] == [("unfinished", ""), ("running", "broker")]
    running.write_results(RESULTS)
    running.finish()
    assert [run.verdict for run in read_index(store).runs] == ["unfinished", "valid"]


def test_a_run_that_finishes_while_it_is_read_is_not_unfinished(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = store.create("t", now=NOON)
    run.write_test(TEST)

    def finish(run_dir: RunDir) -> RunStatus:
        run.write_results(RESULTS)
        run.finish()
        return run_dir.status

    monkeypatch.setattr(module, "_status", finish)
    assert [one.verdict for one in read_index(store).runs] == ["valid"]


def test_results_behind_a_symlink_are_not_read(store: Store, tmp_path: Path) -> None:
    run = make(store)
    run.results_path.rename(tmp_path / "elsewhere.json")
    run.results_path.symlink_to(tmp_path / "elsewhere.json")
    assert [one.verdict for one in read_index(store).runs] == ["unknown"]
    assert read_summary(store, run.name) == read_index(store).runs[0]


@pytest.mark.parametrize(
    "name", ["t", "t/", "/t", "../t", "t/..", "t/latest", "a/b/c", "t/20260131T120000Z\n", "", "x" * 300 + "/y"]
)
def test_invalid_run_names_have_no_summary(store: Store, name: str) -> None:
    make(store, name="t")
    assert read_summary(store, name) is None


def test_damaged_results_are_unknown_and_say_why(store: Store) -> None:
    make(store).results_path.write_text('{"valid": true')
    (run,) = read_index(store).runs
    assert run.verdict == "unknown" and "damaged" in run.reason


def test_an_unreadable_run_is_unknown_and_does_not_affect_other_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, other = make(store), make(store, minutes=1)
    is_run = module.is_run

    def refused(path: Path) -> bool:  # as Path.is_file does below a directory that may not be entered
        if path == hidden.path:
            raise PermissionError(13, "Permission denied", str(path / "test.json"))
        return is_run(path)

    monkeypatch.setattr(module, "is_run", refused)
    found = {run.name: run for run in read_index(store, is_kept=False).runs}
    assert found[other.name].verdict == "valid"
    assert found[hidden.name].verdict == "unknown"
    assert found[hidden.name].reason == f"cannot read {hidden.path}: Permission denied"
    assert read_summary(store, hidden.name) == found[hidden.name]


def test_a_run_in_an_unreadable_folder_is_unknown_with_the_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(store)

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refused)
    found = read_summary(store, run.name)
    assert found is not None and found.verdict == "unknown"
    assert found.reason == f"cannot read {run.path}: Permission denied"


@pytest.mark.parametrize("name", ["results.json", "test.json"])
def test_the_summary_of_an_unreadable_run_is_not_cached(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, other = make(store), make(store, minutes=1)
    read_bytes = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path == run.path / name:
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    known: SummaryCache = {}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        found = {one.name: one for one in read_index(store, known=known).runs}
    if name == "results.json":
        assert found[run.name].verdict == "unknown" and "Permission denied" in found[run.name].reason
    else:
        assert found[run.name].system == ""
    for again in (read_index(store, known=known), read_index(store)):
        whole = {one.name: one for one in again.runs}
        assert (whole[run.name].verdict, whole[run.name].system) == ("valid", "broker")
        assert whole[other.name] == found[other.name]


def test_new_results_of_a_run_are_read_again(store: Store) -> None:
    run = make(store)
    assert read_index(store).runs[0].verdict == "valid"
    run.write_results({**RESULTS, "valid": False})
    assert read_index(store).runs[0].verdict == "invalid"


def test_a_change_of_equal_size_is_detected_by_its_time(store: Store) -> None:
    run = make(store, reason="aaaa")
    read_index(store)
    text = run.results_path.read_text()
    run.results_path.write_text(text.replace("aaaa", "bbbb"))
    os.utime(run.results_path, ns=(1, 1))
    assert read_index(store).runs[0].reason == "bbbb"


def test_unchanged_results_are_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for minutes in range(3):
        make(store, minutes=minutes)
    before = read_index(store).runs
    read: list[str] = []
    monkeypatch.setattr(RunDir, "read_results", lambda self: read.append(self.name) or {})
    assert read_index(store).runs == before
    assert read == []


def test_a_removed_run_is_dropped_from_the_cache(store: Store) -> None:
    run = make(store)
    make(store, minutes=1)
    read_index(store)
    for name in ("results.json", "test.json"):
        (run.path / name).unlink()
    run.path.rmdir()
    assert len(names(store)) == 1
    assert run.name not in (store.root / module.CACHE).read_text()


def test_a_test_removed_during_the_listing_does_not_affect_other_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = make(store, name="b-kept"), make(store, name="a-gone")
    listed = module._folders

    def remove(path: Path) -> list[str]:
        found = listed(path)
        if path == store.root:
            shutil.rmtree(gone.path.parent)
        return found

    monkeypatch.setattr(module, "_folders", remove)
    assert names(store) == [kept.name]


def test_an_unreadable_folder_is_named_and_does_not_affect_other_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, hidden = make(store, name="b-kept"), make(store, name="a-hidden")
    listed = module._folders

    def refused(path: Path) -> list[str]:
        if path in (hidden.path.parent, *unreadable):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    unreadable: list[Path] = []
    monkeypatch.setattr(module, "_folders", refused)
    index = read_index(store)
    assert [run.name for run in index.runs] == [kept.name]
    assert unreadable_words(index) == "1 folder of the store cannot be read: a-hidden (Permission denied)"
    assert "a-hidden (Permission denied)" in render_store(store.root, index)
    for number in range(9):
        (store.root / f"c{number}").mkdir()
        unreadable.append(store.root / f"c{number}")
    assert unreadable_words(read_index(store)).endswith("c3 (Permission denied); and 5 more")
    unreadable.append(store.root)
    with pytest.raises(StoreError, match="cannot read the store"):
        read_index(store)


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"null", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000,
        b'{"format": 1, "fields": [], "runs": []}',
    ],
)  # fmt: skip
def test_a_damaged_cache_is_rebuilt(store: Store, damage: bytes) -> None:
    make(store)
    before = read_index(store).runs
    (store.root / module.CACHE).write_bytes(damage)
    assert read_index(store).runs == before
    assert json.loads((store.root / module.CACHE).read_bytes())["runs"]


@pytest.mark.parametrize(
    ("field", "value"), [("verdict", "fine"), ("reason", 5), ("ok", "many"), ("seed", True), ("duration_s", "long")]
)
def test_a_cache_entry_of_the_wrong_type_is_ignored(store: Store, field: str, value: Any) -> None:
    make(store)
    before = read_index(store).runs
    path = store.root / module.CACHE
    data = json.loads(path.read_bytes())
    data["runs"][0][2][data["fields"].index(field)] = value
    path.write_text(json.dumps(data))
    assert read_index(store).runs == before


def test_a_cache_that_is_too_large_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store, reason="true")
    read_index(store)
    path = store.root / module.CACHE
    path.write_text(path.read_text().replace("true", "lies"))
    assert read_index(store).runs[0].reason == "lies", "an entry counts while the results are those it was made from"
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 10)
    assert read_index(store).runs[0].reason == "true"


def test_the_number_of_runs_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = [make(store, minutes=minutes).name for minutes in range(5)][:2:-1]
    monkeypatch.setattr(module, "MAX_RUNS", 2)
    index = read_index(store)
    assert [run.name for run in index.runs] == newest
    assert index.left_out == 3


def test_symlinks_and_invalid_names_are_not_listed(store: Store, tmp_path: Path) -> None:
    kept = make(store)
    outside = make(Store(tmp_path / "other"))
    (store.root / "linked").symlink_to(outside.path.parent)
    (store.root / kept.path.parent.name / "linked").symlink_to(outside.path)
    odd = Path(os.fsdecode(os.fsencode(store.root) + b"/broker-\xff\n"))
    (odd / "20260131T120000Z").mkdir(parents=True)
    (odd / "20260131T120000Z" / "test.json").write_text("{}")
    (store.root / "empty" / "20260131T120000Z").mkdir(parents=True)
    assert names(store) == [kept.name]


def test_a_store_that_cannot_be_written_is_still_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "replace_file", refuse)
    assert len(names(store)) == 1
    assert not (store.root / module.CACHE).exists()


def test_concurrent_writers_leave_a_complete_cache(store: Store) -> None:
    code = (
        "import sys; from datetime import UTC, datetime; from harness.store import Store\n"
        "from harness.run_index import index_lock, read_index\n"
        "store = Store(sys.argv[1])\n"
        "for _ in range(10):\n"
        "    run = store.create('t', now=datetime(2026, 1, 1, tzinfo=UTC)); run.write_test({})\n"
        "    run.write_results({'valid': True}); run.finish()\n"
        "    with index_lock(store): read_index(store)\n"
    )
    cwd = Path(module.__file__).parents[1]
    command = [sys.executable, "-c", code, str(store.root)]
    processes = [subprocess.Popen(command, cwd=cwd) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    data = json.loads((store.root / module.CACHE).read_bytes())
    assert len(data["runs"]) == 30, "the last writer had seen the runs of all"
    assert not [path for path in store.root.iterdir() if path.name.startswith(".runs.json.")]


def test_a_lock_that_is_never_released_is_waited_for_only_briefly(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    passed = []
    with index_lock(store), index_lock(store):
        passed.append(True)
    assert passed == [True]


def summary(**changes: Any) -> RunSummary:
    return RunSummary(
        **{
            "name": "t/20260131T120000Z", "verdict": "valid", "reason": "", "system": "broker", "workload": "log",
            "nemesis": "none", "cluster": "sim", "settings": "", "nodes": 3, "seed": 1, "ok": 1, "fail": 0, "info": 0,
            "faults": 0, "proven": 0, "unmet": 0, "duration_s": 1.0, **changes,
        }
    )  # fmt: skip


def test_runs_are_selected_by_fields_and_by_words() -> None:
    runs = [
        summary(nemesis="partition=leader,kill", verdict="invalid", reason="Lost 7"),
        summary(nemesis="kill=sigkill", workload="queue"),
        summary(name="u/20260131T120000Z", system="etcd", cluster="netns", seed=77),
    ]
    assert select(runs) == runs
    assert select(runs, nemesis="kill") == runs[:2]
    assert select(runs, nemesis="kill=sigkill") == runs[1:2]
    assert select(runs, nemesis="partition", verdicts=["valid"]) == []
    assert select(runs, verdicts=["invalid", "valid"], workload="log") == [runs[0], runs[2]]
    own = [summary(system="../mine.py:Kv")]
    assert select(own, system="mine-Kv") == select(own, system="../mine.py:Kv") == own
    assert select(own, system="Kv") == []
    assert select(runs, test="u") == select(runs, system="etcd") == select(runs, cluster="netns") == runs[2:]
    assert select(runs, words="LOST  leader") == runs[:1]
    assert select(runs, words="77") == runs[2:]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    test=st.dictionaries(st.sampled_from([*TEST, "x"]), JSON),
    results=st.dictionaries(st.sampled_from([*RESULTS, "x"]), JSON),
)
def test_a_run_is_summarised_and_cached_whatever_its_files_hold(
    tmp_path_factory: pytest.TempPathFactory, test: Any, results: Any
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    run = store.create("t")
    run.test_path.write_text(json.dumps(test))
    run.results_path.write_text(json.dumps(results))
    run.finish()
    (found,) = read_index(store).runs
    assert found.verdict in STATES
    assert (found.verdict == "valid") == (results.get("valid") is True)
    assert all(value.isprintable() for value in found.to_json().values() if isinstance(value, str))
    assert list(read_index(store).runs) == [found]
    assert len(module._load(store.root)) == 1, "the cache that was written is accepted when read"
