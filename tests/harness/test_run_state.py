"""The state of a run: it must survive the death of the harness, and tell dead processes from living ones."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import run_state
from harness.pidfds import pidfd_open
from harness.process_table import find_processes, is_in_namespace, kill_until_gone, marked_with
from harness.run_state import (
    KIND_DIRECTORY,
    KIND_NETNS,
    Claim,
    RunState,
    StateError,
    default_state_root,
    load_run,
    process_start_ticks,
    runs_in,
    state_path,
    state_roots,
    temp_dir,
)
from tests.headless import HEADLESS


def test_a_new_state_describes_a_live_run_of_this_process(tmp_path: Path) -> None:
    run = RunState.create("r1", state_root=str(tmp_path))
    record = load_run(run.path)
    assert (record.run_id, record.pid, record.claims) == ("r1", os.getpid(), ())
    assert record.is_live
    assert runs_in(str(tmp_path)) == ["r1"]
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o600


def test_claims_are_written_before_the_call_returns_and_removed_by_releases(tmp_path: Path) -> None:
    run = RunState.create("r1", state_root=str(tmp_path))
    run.claim(KIND_NETNS, "sb-r1-n1", colour="blue")
    run.claim_all([Claim(KIND_DIRECTORY, "/tmp/x y\nz", {}), Claim(KIND_NETNS, "sb-r1-n2", {})])
    assert load_run(run.path).claims == run.claims
    run.release(KIND_NETNS, "sb-r1-n1")
    run.release(KIND_NETNS, "never claimed")
    assert load_run(run.path).claims == (
        Claim(KIND_DIRECTORY, "/tmp/x y\nz", {}),
        Claim(KIND_NETNS, "sb-r1-n2", {}),
    )


def test_a_temporarily_full_disk_damages_no_state_and_prevents_no_release(tmp_path: Path) -> None:
    run = RunState.create("r1", state_root=str(tmp_path))
    run.claim(KIND_NETNS, "sb-r1-n1")
    run.claim(KIND_NETNS, "sb-r1-n2")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    room_for_half_a_line = os.stat(run.path).st_size + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_for_half_a_line, before[1]))
    try:
        with pytest.raises(StateError, match="cannot write"):
            run.claim(KIND_DIRECTORY, "/tmp/never-made")
        run.release(KIND_NETNS, "sb-r1-n1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [claim.ident for claim in run.claims] == ["sb-r1-n2"]
    run.claim(KIND_NETNS, "sb-r1-n3")
    assert [claim.ident for claim in load_run(run.path).claims] == ["sb-r1-n1", "sb-r1-n2", "sb-r1-n3"]
    run.release(KIND_NETNS, "sb-r1-n2")
    run.release(KIND_NETNS, "sb-r1-n3")
    assert run.close() and not os.path.exists(run.path)


def test_close_removes_the_state_only_when_nothing_is_claimed(tmp_path: Path) -> None:
    run = RunState.create("r1", state_root=str(tmp_path))
    run.claim(KIND_NETNS, "sb-r1-n1")
    assert not run.close()
    assert os.path.exists(run.path)
    other = RunState.create("r2", state_root=str(tmp_path))
    other.claim(KIND_NETNS, "sb-r2-n1")
    other.release(KIND_NETNS, "sb-r2-n1")
    assert other.close()
    assert other.close()
    assert runs_in(str(tmp_path)) == ["r1"]
    with pytest.raises(StateError, match="closed"):
        other.claim(KIND_NETNS, "late")


def test_only_claims_that_may_outlive_a_reboot_are_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    run = RunState.create("r1", state_root=str(tmp_path))
    assert len(synced) == 2, "the state and its name in the directory"
    synced.clear()
    run.claim(KIND_NETNS, "sb-r1-n1")
    assert synced == []
    run.claim(KIND_DIRECTORY, str(tmp_path / "splitbrain-r1-x"))
    run.claim("a-kind-of-tomorrow", "x")
    assert len(synced) == 2
    run.claim_all([Claim(KIND_NETNS, "sb-r1-n2", {}), Claim(KIND_DIRECTORY, str(tmp_path / "splitbrain-r1-y"), {})])
    assert len(synced) == 3


def test_a_run_id_can_have_only_one_state(tmp_path: Path) -> None:
    run, descriptors = RunState.create("r1", state_root=str(tmp_path)), os.listdir("/proc/self/fd")
    with pytest.raises(StateError, match="harness clean"):
        RunState.create("r1", state_root=str(tmp_path))
    assert os.listdir(tmp_path) == ["r1.jsonl"] and load_run(run.path).is_live
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "a b", ".hidden", "x" * 65, "a\n"])
def test_invalid_run_ids_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(StateError, match="bad run id"):
        RunState.create(run_id, state_root=str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_run_whose_harness_was_killed_is_dead_even_if_its_pid_is_reused(
    tmp_path: Path,
) -> None:
    script = (
        "import sys, time; from harness.run_state import RunState\n"
        f"run = RunState.create('r1', state_root={str(tmp_path)!r}); run.claim('netns', 'sb-r1-n1')\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        path = state_path("r1", str(tmp_path))
        assert load_run(path).is_live
        child.send_signal(signal.SIGKILL)
        child.wait()
    record = load_run(path)
    assert not record.is_live
    assert [claim.ident for claim in record.claims] == ["sb-r1-n1"]
    # This process, another one with its pid, and a process from before a reboot.
    here = process_start_ticks(os.getpid())
    assert here is not None
    lines = Path(path).read_text().splitlines()
    header = json.loads(lines[0]) | {"pid": os.getpid()}
    for change, expected in (
        ({"start_ticks": here}, True),
        ({"start_ticks": here + 1}, False),
        ({"start_ticks": here, "boot_id": "another"}, False),
    ):
        Path(path).write_text("\n".join([json.dumps(header | change), *lines[1:]]) + "\n")
        assert load_run(path).is_live is expected


def test_a_zombie_counts_as_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()
        descriptor = pidfd_open(child.pid)
        select.select([descriptor], [], [])  # until it has ended; nobody has waited for it
        os.close(descriptor)
        assert os.path.exists(f"/proc/{child.pid}")
        assert process_start_ticks(child.pid) is None


@pytest.mark.parametrize(("sees_all", "expected"), [(True, False), (False, None)])
def test_a_process_of_a_pid_namespace_that_is_not_to_be_seen_is_dead_only_where_all_are(
    sees_all: bool, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_FIRST_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino if sees_all else 1)
    assert run_state.process_is_live(os.getpid(), 1, 7) is expected, "no namespace has the inode 7"


def test_a_process_whose_first_thread_has_ended_counts_as_live(tmp_path: Path) -> None:
    environment = {**os.environ, "COLOUR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"headless %d\n" % child.pid
            assert process_start_ticks(child.pid) is not None
            network = os.stat("/proc/self/ns/net")
            for matches in (marked_with("COLOUR", str(tmp_path)), is_in_namespace((network.st_dev, network.st_ino))):
                assert child.pid in [process.pid for process in find_processes(matches)]
            [process] = kill_until_gone(lambda: find_processes(marked_with("COLOUR", str(tmp_path))), timeout_s=30.0)
            assert process.pid == child.pid and child.wait() == -signal.SIGKILL
            assert process_start_ticks(child.pid) is None
        finally:
            child.kill()


@given(
    entries=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["netns", "mount"]), st.sampled_from("abc"), st.integers()),
        max_size=12,
    ),
    cut_bytes=st.integers(min_value=0, max_value=200),
)
def test_a_truncated_state_has_the_claims_of_its_complete_lines(
    entries: list[tuple[bool, str, str, int]], cut_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = RunState.create("r1", state_root=root)
        sizes = [os.path.getsize(run.path)]
        expected: list[tuple[Claim, ...]] = [()]
        for is_claim, kind, ident, detail in entries:
            run.claim(kind, ident, detail=detail) if is_claim else run.release(kind, ident)
            sizes.append(os.path.getsize(run.path))
            expected.append(run.claims)
        run.close()
        size = max(sizes[0], sizes[-1] - cut_bytes)
        if not os.path.exists(run.path):
            assert expected[-1] == ()
            return
        os.truncate(run.path, size)
        complete = max(index for index, end in enumerate(sizes) if end <= size)
        assert load_run(run.path).claims == expected[complete]


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"garbage\n", b'{"format": 99}\n', b"\xff\xfe\n"])
def test_a_file_that_is_not_a_state_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(StateError) as caught:
        load_run(str(path))
    assert "\n" not in str(caught.value)


def test_a_state_of_another_version_is_refused_as_such(tmp_path: Path) -> None:
    path = RunState.create("r1", state_root=str(tmp_path)).path
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | {"format": 99}) + "\n")
    with pytest.raises(StateError, match="another version of the harness: clean with that one"):
        load_run(path)


def test_only_names_of_runs_are_taken_for_states(tmp_path: Path) -> None:
    RunState.create("r1", state_root=str(tmp_path))
    for name in (".r2.jsonl", ".r3.7.draft", "r4.json"):
        (tmp_path / name).touch()
    assert runs_in(str(tmp_path)) == ["r1"]


def test_the_default_state_directory_depends_on_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(run_state.STATE_DIR_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "relative")
    assert temp_dir() == "/tmp"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    assert temp_dir() == "/tmp"
    (tmp_path / "t").mkdir()
    assert temp_dir() == str(tmp_path / "t")
    in_temp = str(tmp_path / "t" / f"splitbrain-{os.geteuid()}")
    in_tmp = f"/tmp/splitbrain-{os.geteuid()}"
    assert default_state_root() == in_temp
    assert state_roots()[:2] == [in_temp, in_tmp]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert in_temp in state_roots() and str(tmp_path / "absent" / "splitbrain") not in state_roots()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "here")
    assert default_state_root() == in_temp, "of a relative path it is not known what it was relative to"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_state_root() == str(tmp_path / "splitbrain")
    assert {in_temp, in_tmp} <= set(state_roots())
    monkeypatch.setenv(run_state.STATE_DIR_VARIABLE, str(tmp_path / "here"))
    assert state_roots() == [str(tmp_path / "here")]


def test_the_state_directory_is_made_private_and_must_not_be_a_link_or_a_file(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    for number, mode in enumerate((0o777, 0o770, 0o701)):
        root.chmod(mode)
        RunState.create(f"r{number}", state_root=str(root))
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(StateError, match="not a directory"):
        RunState.create("r9", state_root=str(link))
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot keep states"):
        RunState.create("r2", state_root=str(tmp_path / "file"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_the_state_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    os.chown(root, 65534, 65534)
    with pytest.raises(StateError, match="belongs to user 65534"):
        RunState.create("r1", state_root=str(root))
    with pytest.raises(StateError, match="belongs to user 65534"):
        runs_in(str(root))


def test_a_temporary_directory_is_claimed_unless_it_existed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = RunState.create("r1", state_root=str(tmp_path / "state"))
    path = run.make_temp_dir("disk")
    assert os.path.isdir(path)
    assert os.path.basename(path) == "splitbrain-r1-disk" and stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert load_run(run.path).claims == (Claim(KIND_DIRECTORY, path, {}),)
    with pytest.raises(StateError, match="already"):
        run.make_temp_dir("disk")
    foreign = tmp_path / "splitbrain-r1-foreign"
    foreign.mkdir()
    with pytest.raises(StateError, match="File exists"):
        run.make_temp_dir("foreign")
    assert load_run(run.path).claims == (Claim(KIND_DIRECTORY, path, {}),), "a directory that existed is not claimed"


def test_the_default_state_directory_is_removed_with_its_last_state(tmp_path: Path) -> None:
    own, given, alike = (tmp_path / name for name in (f"splitbrain-{os.geteuid()}", "given", "splitbrain-given"))
    for root, survives in ((own, False), (given, True), (alike, True)):
        first, second = (RunState.create(name, state_root=str(root)) for name in ("r1", "r2"))
        first.close()
        assert root.exists()
        second.close()
        assert root.exists() is survives
        assert RunState.create("r3", state_root=str(root)).close()


@pytest.mark.parametrize("step", ["path.isdir", "lstat", "chmod", "open"])
def test_a_state_directory_that_vanishes_during_creation_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As when another run ends between two steps, here twice before the directory is examined or written to."""
    root = tmp_path / "splitbrain"
    module, name = (os.path, "isdir") if step == "path.isdir" else (os, step)
    real, left = getattr(module, name), [2]

    def late(path: str, *arguments: int, **options: int) -> Any:
        if os.fspath(path).startswith(str(root)) and left[0]:
            left[0] -= 1
            os.rmdir(root)
        return real(path, *arguments, **options)

    if step in ("path.isdir", "chmod"):  # called only on an existing directory
        made, opened = os.makedirs, os.chmod

        def makedirs(path: str, **options: Any) -> None:
            made(root, exist_ok=True)
            opened(root, 0o755)
            made(path, **options)

        monkeypatch.setattr(os, "makedirs", makedirs)
    monkeypatch.setattr(module, name, late)
    run = RunState.create("r1", state_root=str(root))
    assert left == [0]
    assert load_run(run.path).is_live
    assert os.listdir(root) == ["r1.jsonl"]


def test_a_state_directory_that_vanishes_every_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(path: str, *arguments: int, **options: int) -> Any:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "lstat", vanish)
    with pytest.raises(StateError, match="states keeps being removed"):
        RunState.create("r1", state_root=str(tmp_path / "states"))


def test_a_directory_that_is_removed_while_it_is_examined_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exists for mkdir, not right after, again when it is examined, and not at a second look."""
    root = tmp_path / "states"
    makedirs, lstat = os.makedirs, os.lstat
    steps = iter(["makedirs", "lstat"])

    def exists_for_mkdir(path: str, **options: Any) -> None:
        if next(steps, None) == "makedirs":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        makedirs(path, **options)

    def exists_for_one_look(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(root) and next(steps, None) == "lstat":
            root.mkdir()
            seen = lstat(path)
            root.rmdir()
            return seen
        return lstat(path, **options)

    monkeypatch.setattr(os, "makedirs", exists_for_mkdir)
    monkeypatch.setattr(os, "lstat", exists_for_one_look)
    assert RunState.create("one", state_root=str(root)).close()
    assert next(steps, None) is None


def test_concurrently_created_and_closed_states_do_not_disturb_one_another(tmp_path: Path) -> None:
    """The last state removes the directory, the first one makes it. In memory, where they are likely to collide."""
    script = (
        "import sys; from harness.run_state import RunState\n"
        "for number in range(1000): assert RunState.create(f'{sys.argv[2]}-{number}', state_root=sys.argv[1]).close()"
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        root = os.path.join(directory, "splitbrain")
        runs = [subprocess.Popen([sys.executable, "-c", script, root, name]) for name in ("a", "b", "c")]
        assert [run.wait(timeout=120) for run in runs] == [0, 0, 0]
        assert not os.path.exists(root)
