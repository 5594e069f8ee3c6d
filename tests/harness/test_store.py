"""The store: runs are made without collisions, found by name, and told apart by how they ended."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

import harness.store as module
from harness import cli
from harness.errors import OperatorError
from harness.history_writer import read_history
from harness.store import RunStatus, Store, StoreError, require_writable
from harness.test import NemesisChoice, Test

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def make(store, name="broker-register-partition", now=NOON):
    run = store.create(name, now=now)
    run.write_test({"seed": 7})
    return run


def one_line(caught):
    return "\n" not in str(caught.value)


def test_a_run_has_its_directory_and_both_links(store):
    run = make(store)
    assert run.path == store.root / "broker-register-partition" / "20260131T120000Z"
    assert run.name == "broker-register-partition/20260131T120000Z"
    for link in (store.root / "latest", store.root / "broker-register-partition" / "latest"):
        assert link.is_symlink()
        assert not os.path.isabs(os.readlink(link))
        assert link.resolve() == run.path
    assert run.nodes_path == run.path / "nodes"
    assert run.read_test() == {"seed": 7}


def test_the_name_of_a_run_is_in_utc(store):
    local = datetime(2026, 1, 31, 14, 0, 0, tzinfo=timezone(timedelta(hours=2)))
    assert make(store, now=local).path.name == "20260131T120000Z"


def test_runs_of_one_second_get_distinct_names_in_order(store):
    runs = [make(store) for _ in range(12)]
    assert [run.path.name for run in runs][:3] == ["20260131T120000Z", "20260131T120000Z-2", "20260131T120000Z-3"]
    assert [run.name for run in store.runs()] == [run.name for run in runs]
    assert store.find("latest").path == runs[-1].path


def test_runs_are_bounded_per_second(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_RUNS_PER_SECOND", 2)
    make(store)
    make(store)
    with pytest.raises(StoreError, match="already holds 2 runs"):
        make(store)


def test_processes_that_start_together_never_share_a_directory(store):
    code = (
        "import sys; from datetime import UTC, datetime; from harness.store import Store\n"
        "for _ in range(10): print(Store(sys.argv[1]).create('t', now=datetime(2026, 1, 1, tzinfo=UTC)).path)"
    )
    cwd = Path(module.__file__).parents[1]
    command = [sys.executable, "-c", code, str(store.root)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd) for _ in range(3)]
    paths = [line for process in processes for line in process.communicate(timeout=60)[0].splitlines()]
    assert len(paths) == len(set(paths)) == 30
    assert store.find("latest").path.is_dir()


@pytest.mark.parametrize("name", ["", "latest", "../up", "a/b", ".hidden", "a\nb"])
def test_invalid_test_names_are_refused(store, name):
    with pytest.raises(StoreError, match="is not a valid name for a test"):
        store.create(name)


@pytest.mark.parametrize(
    ("file", "name"),
    [("my kv ü.py", "my_kv__-register-none"), ("_kv.py:Kv", "kv-Kv-register-none"), ("kv.py", "kv-register-none")],
)
def test_a_system_in_a_file_of_any_name_has_a_folder(store, file, name):
    test = Test(
        system=file, cluster="local", nodes=3, workload="register", nemesis=(), nemesis_interval_s=5,
        time_limit_s=10, concurrency=1, rate=10, seed=1,
    )  # fmt: skip
    assert store.create(test.name).name.partition("/")[0] == name


def test_a_folder_names_a_nemesis_once_even_if_several_of_its_forms_were_asked_for():
    words = ("power=cut", "kill", "power=crash")
    test = Test(
        system="kv", cluster="local", nodes=3, workload="set", nemesis=tuple(map(NemesisChoice.parse, words)),
        nemesis_interval_s=5, time_limit_s=10, concurrency=1, rate=10, seed=1,
    )  # fmt: skip
    assert test.name == "kv-set-power+kill"


def test_find_accepts_latest_tests_runs_and_paths(store):
    old = make(store)
    other = make(store, "broker-log-partition", NOON + timedelta(seconds=1))
    new = make(store, now=NOON + timedelta(seconds=2))
    assert store.find("latest").path == new.path
    assert store.find("broker-register-partition/latest").path == new.path
    assert store.find("broker-register-partition").path == new.path
    assert store.find("broker-log-partition").path == other.path
    assert store.find(old.name).path == old.path
    assert store.find(str(old.path)).path == old.path
    assert store.find(str(old.test_path)).path == old.path
    with pytest.raises(StoreError, match=r"no run 'broker-log-partitoin'.*mean broker-log-partition\?") as caught:
        store.find("broker-log-partitoin")
    assert one_line(caught)


def test_latest_refers_to_the_given_store_whatever_the_current_directory(store, tmp_path, monkeypatch):
    here = make(Store(tmp_path / "here"))
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StoreError, match="there is no store at"):
        store.find("latest")
    there = make(store, now=NOON + timedelta(seconds=1))
    (store.root / "latest").unlink()
    assert store.find("latest").path == there.path
    assert store.find(here.name).path == here.path  # relative to the current directory
    make(store)
    assert store.find(here.name).path == store.root / here.name


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("replay", "latest"),  # a path may be replayed into a store that does not exist yet
        *itertools.product(
            ["analyze", "explain", "shrink", "trace"], ["latest", "broker-register-partition/20260131T120000Z"]
        ),
    ],
)
def test_a_missing_store_given_on_the_command_line_is_an_error(tmp_path, monkeypatch, capsys, command, text):
    run = make(Store(tmp_path / "here"))
    run.schedule_path.write_text("[]")
    monkeypatch.chdir(tmp_path / "here")
    words = ["--replay"] if command == "trace" else []
    assert cli.main([command, text, "--store", str(tmp_path / "none"), *words]) == 254
    error = capsys.readouterr().err
    assert f"there is no store at {tmp_path / 'none'}: " in error and error.count("\n") == 1


def test_find_works_without_the_latest_links(store):
    make(store)
    new = make(store, "broker-log-partition", NOON + timedelta(seconds=1))
    (store.root / "latest").unlink()
    (store.root / "broker-log-partition" / "latest").unlink()
    (store.root / "broker-log-partition" / "latest").symlink_to("gone")
    assert store.find("latest").path == new.path
    assert store.find("broker-log-partition/latest").path == new.path


def test_removing_a_run_moves_the_latest_links_to_the_remaining_runs(store):
    first = make(store)
    other = make(store, "broker-log-partition", NOON + timedelta(seconds=1))
    last = make(store, now=NOON + timedelta(seconds=2))
    store.remove(last)
    assert (store.root / "latest").resolve() == other.path
    assert (last.path.parent / "latest").resolve() == first.path
    store.remove(other)
    assert not other.path.parent.exists()
    assert (store.root / "latest").resolve() == first.path
    store.remove(first)
    assert list(store.root.iterdir()) == [] and store.runs() == []


def test_a_run_is_created_although_the_last_run_of_its_test_is_removed_meanwhile(store, monkeypatch):
    first = make(store)
    real, left = module._make_unique, [first]

    def make_late(folder, stamp):
        while left:
            store.remove(left.pop())
        assert not folder.exists()
        return real(folder, stamp)

    monkeypatch.setattr(module, "_make_unique", make_late)
    second = make(store, now=NOON + timedelta(seconds=1))
    assert [run.path for run in store.runs()] == [second.path]
    assert (store.root / "latest").resolve() == second.path


def test_a_missing_store_and_an_empty_store_are_reported(tmp_path):
    with pytest.raises(StoreError, match=r"there is no store at .*--store DIR"):
        Store(tmp_path / "none").find("latest")
    assert Store(tmp_path / "none").runs() == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="has no runs yet"):
        Store(tmp_path / "empty").find("latest")


def test_results_are_written_completely_or_not_at_all(store, monkeypatch):
    run = make(store)
    with pytest.raises(
        StoreError, match=r"ended before it had a results\.json: create one with `harness analyze"
    ) as caught:
        run.read_results()
    assert one_line(caught)
    run.write_results({"valid": True})

    def no_space(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", no_space)
    with pytest.raises(StoreError, match=r"cannot write .*results\.json: no space left") as caught:
        run.write_results({"valid": False})
    assert one_line(caught)
    assert run.read_results() == {"valid": True}
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_results_with_values_that_json_lacks_are_still_written(store):
    run = make(store)
    run.write_results({"valid": False, "a": {3, 1}, "b": math.inf, 7: NOON, "t": (1, [2.5])})
    assert run.read_results() == {"valid": False, "a": [1, 3], "b": None, "7": str(NOON), "t": [1, [2.5]]}


@pytest.mark.parametrize("content", ["", '{"valid": tr', "[1, 2]", "\udcff", "[" * 100_000])
def test_a_damaged_results_file_is_named(store, content):
    run = make(store)
    run.results_path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(StoreError, match=r"results\.json is damaged") as caught:
        run.read_results()
    assert one_line(caught)


def test_an_oversized_json_file_is_refused(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_JSON_BYTES", 10)
    with pytest.raises(StoreError, match="larger than 10 bytes"):
        make(store).read_test()


@pytest.fixture
def lock_away(monkeypatch):
    """A function that makes a directory unreadable, even for root."""
    is_run, directories = module.is_run, module._directories

    def refuse(path, above):
        if path.is_relative_to(above):
            raise PermissionError(13, "Permission denied", str(path))

    def lock(above):
        def is_run_refused(path):
            refuse(path, above)
            return is_run(path)

        def directories_refused(path):
            refuse(path, above)
            return directories(path)

        monkeypatch.setattr(module, "is_run", is_run_refused)
        monkeypatch.setattr(module, "_directories", directories_refused)

    return lock


def test_an_unreadable_run_hides_no_other_but_may_leave_the_newest_undecided(store, lock_away):
    minutes = [NOON + timedelta(minutes=each) for each in range(4)]
    first, hidden, last = (make(store, now=now) for now in minutes[:3])
    other = make(store, "broker-log-partition", now=minutes[3])
    (store.root / "latest").unlink()
    (last.path.parent / "latest").unlink()
    lock_away(hidden.path)
    assert [run.path for run in store.runs()] == [first.path, last.path, other.path]
    assert store.find("broker-register-partition").path == last.path
    assert store.find("latest").path == other.path
    with pytest.raises(
        StoreError, match=f"no run 'typo' in .*; 1 of its folders cannot be read, such as {hidden.path}"
    ):
        store.find("typo")
    store.remove(last)
    with pytest.raises(StoreError, match=f"cannot tell which .* newest: cannot read {hidden.path}: Permission denied"):
        store.find("broker-register-partition")


def test_an_unreadable_test_hides_no_other_test(store, lock_away):
    hidden, other = make(store), make(store, "broker-log-partition")
    (store.root / "latest").unlink()
    lock_away(hidden.path.parent)
    assert [run.path for run in store.runs()] == [other.path]
    assert store.find("broker-log-partition").path == other.path
    with pytest.raises(StoreError, match=f"cannot tell .* cannot read {hidden.path.parent}: Permission denied"):
        store.find("latest")


def test_a_named_pipe_in_place_of_a_file_is_refused_without_blocking(store):
    run = make(store)
    for path in (run.test_path, run.results_path, run.history_path):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    for read in (run.read_test, run.read_results, lambda: next(iter(read_history(run.history_path)))):
        with pytest.raises(OperatorError, match=r"not a (regular )?file") as caught:
            read()
        assert one_line(caught)


def test_a_run_is_running_until_it_is_finished_or_broken(store):
    run = make(store)
    again = store.find("latest")
    assert (run.status, again.status) == (RunStatus.RUNNING, RunStatus.RUNNING)
    run.release()
    assert again.status is RunStatus.BROKEN
    run = make(store)
    run.write_results({"valid": True})
    run.finish()
    run.finish()
    assert store.find("latest").status is RunStatus.FINISHED
    run.results_path.unlink()
    assert store.find("latest").status is RunStatus.BROKEN


def test_a_killed_harness_leaves_a_broken_run(store):
    code = (
        "import sys, time; from harness.store import Store\n"
        "run = Store(sys.argv[1]).create('t'); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(module.__file__).parents[1],
    )
    assert process.stdout.readline() == "ready\n"
    run = store.find("t")
    assert run.status is RunStatus.RUNNING
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert run.status is RunStatus.BROKEN


def test_a_store_that_cannot_be_written_is_reported_in_one_line(store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot store runs in .*a part of the path is a file") as caught:
        Store(tmp_path / "file" / "store").create("t")
    assert one_line(caught)

    def refuse(self, *args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="read-only; choose another place with --store DIR") as caught:
        store.create("t")
    assert one_line(caught)


def test_require_writable_refuses_an_unwritable_store_and_creates_nothing(tmp_path, monkeypatch):
    require_writable(tmp_path / "not" / "there" / "yet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="a part of the path is a file"):
        require_writable(tmp_path / "file" / "store")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match="permission denied; choose another place with --store DIR"):
        require_writable(tmp_path / "store")
    with pytest.raises(StoreError, match="permission denied; choose another place with --out DIR"):
        require_writable(tmp_path / "store", "choose another place with --out DIR")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_without_write_permission_is_refused(store):
    store.root.mkdir()
    store.root.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied; choose another place with --store DIR"):
        store.create("t")


def test_a_directory_in_place_of_the_latest_link_is_reported(store):
    (store.root / "latest").mkdir(parents=True)
    with pytest.raises(StoreError, match="is a directory, not a link"):
        store.create("t")


def test_runs_ignores_what_is_not_a_run(store):
    run = make(store)
    (store.root / "notes").mkdir()
    (store.root / "notes" / "todo").mkdir()
    (store.root / "readme.txt").write_text("hello")
    assert [found.path for found in store.runs()] == [run.path]
    assert json.loads(run.test_path.read_text()) == {"seed": 7}


def test_concurrent_updates_of_the_latest_link_do_not_fail(store, monkeypatch):
    """As by threads of a program, or by containers that share a store and have the same pids."""
    store.root.mkdir()
    both_are_about_to = threading.Barrier(2, timeout=10)
    replace = os.replace

    def replace_together(source, target):
        both_are_about_to.wait()
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", replace_together)
    with ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(module._point, store.root / "latest", target) for target in ("t/1", "t/2")]:
            made.result()
    assert [path.name for path in store.root.iterdir()] == ["latest"]
    assert os.readlink(store.root / "latest") in ("t/1", "t/2")
