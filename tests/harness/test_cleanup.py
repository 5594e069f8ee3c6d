"""`harness clean` removes everything that dead runs left, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from harness import cleanup, run_state
from harness.cleanup import CleanReport, clean
from harness.clusters import host_agent
from harness.clusters.control_groups import cgroup_parents
from harness.clusters.host_agent import CONTROL_FILE
from harness.clusters.loop_devices import ImageMark
from harness.run_state import (
    KIND_CGROUP,
    KIND_CONTAINER,
    KIND_DIRECTORY,
    KIND_FILE,
    KIND_IMAGE,
    KIND_MOUNT,
    KIND_NETNS,
    KIND_SOCKET,
    KIND_SSH_HOST,
    KIND_VETH,
    RUN_VARIABLE,
    STATE_VARIABLE,
    RunState,
    StateError,
    harness_process,
    process_start_ticks,
    runs_in,
    state_path,
)
from nemesis.mechanisms.launcher.control import parse_programs
from nemesis.mechanisms.shim import CONTROL_BYTES, HostFaults, build_shim, shim_environment, why_no_shim
from nemesis.target import DiskFault
from tests.mounts import IS_PLAIN_CHROOT

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes mounts and network namespaces")
MINE = f"tc{os.getpid()}"
"""Prefix of every run id here: tests that run in parallel share names of namespaces and marks of processes."""

ROOT = Path(__file__).resolve().parents[2]
R1 = f"{MINE}-r1"
DEVICES = f"{MINE}-devices"
DEAD_PID = 2**22 - 1  # above every pid that a kernel assigns by default


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory for the code under test: `clean` also removes what others have left in the machine's."""
    (tmp_path / "temp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    return tmp_path / "temp"


@pytest.fixture
def state(tmp_path: Path, temp: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def children() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(
    children: ExitStack, run_id: str | None = None, *, argv: list[str] | None = None, more: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process that sleeps, marked as one of a run, with `more` in its environment; ended after the test."""
    environment = os.environ | ({RUN_VARIABLE: run_id} if run_id else {}) | (more or {})
    child = subprocess.Popen(
        argv or ["sleep", "600"], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    children.enter_context(child)
    children.callback(child.kill)
    return child


def die(run: RunState) -> None:
    """Make it look as if the harness of `run` had been killed."""
    lines = Path(run.path).read_text().splitlines()
    header = json.loads(lines[0]) | {"pid": DEAD_PID}
    Path(run.path).write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")


def cleaned(
    state_root: str, run_ids: list[str] | None = None, *, include_live: bool = False, forgets_unreachable: bool = False
) -> CleanReport:
    lines: list[str] = []
    forgetting = {"forgets_unreachable": True} if forgets_unreachable else {}
    report = clean(state_root=state_root, run_ids=run_ids, include_live=include_live, report=lines.append, **forgetting)
    assert all("\n" not in line for line in lines)
    assert len(lines) == len(report.removed) + len(report.left) + len(report.live) + len(report.notes)
    return report


def test_clean_without_runs_removes_nothing(state: str) -> None:
    report = cleaned(state)
    assert (report.removed, report.left, report.exit_status) == ([], [], 0)
    assert cleaned(state, ["never-was"]).removed == []


def test_claimed_and_marked_processes_of_a_dead_run_are_killed(state: str, children: ExitStack) -> None:
    run = RunState.create(R1, state_root=state)
    claimed, marked, foreign, other = start(children), start(children, R1), start(children), start(children, R1 + "1")
    stopped = start(children, R1)
    stopped.send_signal(signal.SIGSTOP)
    run.claim_process(claimed.pid)
    die(run)
    report = cleaned(state)
    assert report.exit_status == 0
    assert sorted(p.wait() for p in (claimed, marked, stopped)) == [-signal.SIGKILL] * 3
    assert (foreign.poll(), other.poll()) == (None, None)
    assert len(report.removed) == 4  # three processes, the state
    assert runs_in(state) == []
    assert cleaned(state).removed == []


def test_a_process_that_reuses_a_claimed_pid_is_left_alone(state: str, children: ExitStack) -> None:
    run = RunState.create(R1, state_root=state)
    foreign = start(children)
    start_ticks = process_start_ticks(foreign.pid)
    assert start_ticks is not None
    run.claim("process", str(foreign.pid), start_ticks=start_ticks - 1)
    run.claim("process", "no number", start_ticks=start_ticks)
    run.claim("process", str(os.getpid()), start_ticks=process_start_ticks(os.getpid()))
    die(run)
    assert cleaned(state).exit_status == 0
    assert foreign.poll() is None


def test_a_process_that_does_not_end_is_reported_and_stays_on_record(
    state: str, children: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunState.create(R1, state_root=state)
    hanging = start(children, R1)
    die(run)
    with monkeypatch.context() as patched:
        patched.setattr(cleanup, "kill_until_gone", lambda find, *, timeout_s: [])
        report = cleaned(state)
    assert len(report.left) == 1 and f"left: process {hanging.pid} " in report.left[0]
    assert runs_in(state) == [R1]
    assert cleaned(state).exit_status == 0


def test_a_process_claimed_before_a_reboot_is_left_alone(state: str, children: ExitStack) -> None:
    """A pid and a start time may mean another process now."""
    run = RunState.create(R1, state_root=state)
    foreign = start(children)
    run.claim_process(foreign.pid)
    header, *claims = Path(run.path).read_text().splitlines()
    same_number = {"pid": foreign.pid, "start_ticks": process_start_ticks(foreign.pid), "boot_id": "earlier"}
    Path(run.path).write_text("\n".join([json.dumps(json.loads(header) | same_number), *claims]) + "\n")
    assert cleaned(state).exit_status == 0
    assert foreign.poll() is None and runs_in(state) == []


_BEGINS_A_RUN = """
import sys
from harness.run_state import RunState
RunState.create(sys.argv[1], state_root=sys.argv[2])
print("begun", flush=True)
sys.stdin.read()
"""

_CLEANS = """
import json, sys
from harness import cleanup
cleanup.remove_scratch_of_the_dead = lambda **_: None  # other processes of the machine are not visible here
lines = []
report = cleanup.clean(state_root=sys.argv[1], report=lines.append)
assert all("left alone, its harness runs in a container" in line for line in lines), lines
print(json.dumps([report.live, len(report.removed)]))
"""


@ROOT_ONLY
@pytest.mark.root
def test_a_run_is_left_alone_while_its_harness_lives_in_a_container(
    state: str, temp: Path, children: ExitStack
) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no pid namespace here, as in a plain chroot ({tried.stderr.strip()})")
    apart = [*unshare, sys.executable, "-c"]

    def cleaned_in_another_container() -> list[object]:
        argv = [*apart, _CLEANS, state]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
        return list(json.loads(done.stdout))

    with subprocess.Popen(
        [*apart, _BEGINS_A_RUN, R1, state], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as harness:
        assert harness.stdout is not None and harness.stdin is not None
        assert harness.stdout.readline() == "begun\n"
        program = start(children, R1)
        for named in (None, [R1]):
            lines: list[str] = []
            report = clean(state_root=state, run_ids=named, report=lines.append)
            assert (report.live, report.removed, program.poll()) == ([R1], [], None)
            assert lines[0].startswith(f"run {R1}: left alone, its harness is still running (pid ")
        assert cleaned_in_another_container() == [[R1], 0], "another container cannot tell whether the harness lives"
        harness.stdin.close()
    assert cleaned_in_another_container() == [[R1], 0], "nor that it has ended"
    assert cleaned(state, [R1]).removed[-1].startswith(f"run {R1}: state ") and program.wait() == -signal.SIGKILL


_PRINTS_NAMESPACE_AND_START = 'stat -Lc %i /proc/self/ns/pid; cut -d " " -f 22 /proc/1/stat; read -r _'


@ROOT_ONLY
@pytest.mark.root
def test_pid_1_of_a_later_container_is_not_taken_for_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reuses the numbers of pid namespaces, and the first process of each has pid 1."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no pid namespace here, as in a plain chroot ({tried.stderr.strip()})")
    with subprocess.Popen(
        [*unshare, "sh", "-c", _PRINTS_NAMESPACE_AND_START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as later:
        assert later.stdin is not None and later.stdout is not None
        namespace, start_ticks = int(later.stdout.readline()), int(later.stdout.readline())
        found = [run_state.process_is_live(1, ticks, namespace) for ticks in (start_ticks, start_ticks - 100)]
        # Some of its processes are visible, so all are, also from a container.
        monkeypatch.setattr(run_state, "_FIRST_PID_NAMESPACE", 1)
        found.append(run_state.process_is_live(2, start_ticks, namespace))
        later.stdin.close()
    assert found == [True, False, False]


@ROOT_ONLY
@pytest.mark.root
def test_a_harness_in_a_time_namespace_is_told_by_its_number_alone() -> None:
    """Its clock was set differently, so the start time in its state is not the one that is shown here."""
    unshare = ["unshare", "--time", "--boottime", "100000", "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no time namespace here ({tried.stderr.strip()})")
    with subprocess.Popen(
        [*unshare, "sh", "-c", _PRINTS_NAMESPACE_AND_START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as inside:
        assert inside.stdin is not None and inside.stdout is not None
        namespace, start_ticks = int(inside.stdout.readline()), int(inside.stdout.readline())
        found = [run_state.process_is_live(number, start_ticks, namespace) for number in (1, 7)]
        inside.stdin.close()
    assert found == [True, False]


@pytest.mark.parametrize("named", ["its own state", "another run's state", "another file", "nothing"])
def test_a_run_with_its_state_elsewhere_is_live_only_if_its_processes_name_that_state(
    state: str, tmp_path: Path, children: ExitStack, named: str
) -> None:
    run = RunState.create(R1, state_root=str(tmp_path / "elsewhere"))
    other = RunState.create(R1 + "1", state_root=str(tmp_path / "elsewhere"))
    no_state = tmp_path / "none"
    no_state.write_text("nothing\n")
    paths = {"its own state": run.path, "another run's state": other.path, "another file": str(no_state)}
    assert run.environment[STATE_VARIABLE] == run.path
    process = start(children, R1, more={STATE_VARIABLE: paths[named]} if named in paths else {})
    report = cleaned(state, [R1])
    if named == "its own state":
        assert (report.live, report.removed, report.exit_status, process.poll()) == ([R1], [], 0, None)
        die(run)
        report = cleaned(state, [R1])
    assert report.live == [] and len(report.removed) == 1 and process.wait() == -signal.SIGKILL
    assert Path(run.path).exists(), "a state that only a process names is not removed"


def test_a_pipe_that_a_process_names_as_its_state_is_not_opened(
    state: str, tmp_path: Path, children: ExitStack
) -> None:
    """Anybody may start such a process, and opening the pipe would wait for somebody who writes to it."""
    os.mkfifo(tmp_path / "pipe")
    writer = start(children, R1, more={STATE_VARIABLE: str(tmp_path / "pipe")})
    report: list[CleanReport] = []
    cleaning = threading.Thread(target=lambda: report.append(cleaned(state, [R1])), daemon=True)
    cleaning.start()
    cleaning.join(timeout=30)
    assert report and report[0].exit_status == 0 and writer.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("package", "kind", "said"),
    [
        ("paramiko", KIND_SSH_HOST, ["admin@127.0.0.1:1 may still have", "files below /var/lib/splitbrain"]),
        ("docker", KIND_CONTAINER, ["no engine answers at unix:///nowhere/docker.sock", "it may still exist there"]),
    ],
)
def test_an_unreachable_host_or_container_stays_on_record_until_it_is_forgotten(
    state: str, tmp_path: Path, package: str, kind: str, said: list[str]
) -> None:
    pytest.importorskip(package)
    known_hosts = tmp_path / "known_hosts"
    known_hosts.touch()
    host = {"name": "n1", "hostname": "127.0.0.1", "port": 1, "user": "admin", "known_hosts": str(known_hosts)}
    run = RunState.create(R1, state_root=state)
    run.claim(kind, "n1", **({"host": host} if kind == KIND_SSH_HOST else {"engine": "unix:///nowhere/docker.sock"}))
    die(run)
    for _ in range(2):
        report = cleaned(state)
        assert report.exit_status == 255 and len(report.left) == 1
        assert f"--run {R1} --forget-unreachable" in report.left[0] and runs_in(state) == [R1]
    report = cleaned(state, [R1], forgets_unreachable=True)
    assert (report.left, report.exit_status, len(report.notes)) == ([], 0, 1)
    assert f"forgotten: {kind} n1" in report.notes[0] and all(words in report.notes[0] for words in said)
    assert runs_in(state) == []


def test_a_host_that_closes_the_connection_is_forgotten_without_a_traceback(state: str, tmp_path: Path) -> None:
    pytest.importorskip("paramiko")
    (tmp_path / "known_hosts").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            server.accept()[0].close()

        answering = threading.Thread(target=hang_up)
        answering.start()
        port, known_hosts = server.getsockname()[1], str(tmp_path / "known_hosts")
        host = {"name": "n1", "hostname": "127.0.0.1", "port": port, "user": "admin", "known_hosts": known_hosts}
        run = RunState.create(R1, state_root=state)
        run.claim(KIND_SSH_HOST, "n1", host=host)
        die(run)
        done = subprocess.run(
            [sys.executable, "-m", "harness", "clean", "--run", R1, "--forget-unreachable"],
            env={**os.environ, run_state.STATE_DIR_VARIABLE: state}, capture_output=True, text=True,
        )  # fmt: skip
        answering.join()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"run {R1}: forgotten: ssh-host n1" in done.stdout and runs_in(state) == []


def test_a_host_entry_that_cannot_be_parsed_is_not_forgotten(state: str) -> None:
    run = RunState.create(R1, state_root=state)
    run.claim(KIND_SSH_HOST, "n1", host={"name": "n1", "moved_to": "elsewhere"})
    die(run)
    report = cleaned(state, [R1], forgets_unreachable=True)
    assert report.exit_status == 255 and report.notes == [] and runs_in(state) == [R1]


def test_processes_that_keep_forking_are_killed_too(state: str, children: ExitStack) -> None:
    run = RunState.create(R1, state_root=state)
    forker = start(children, R1, argv=["sh", "-c", "echo ready; while :; do sleep 0.01 & sleep 600 & wait $!; done"])
    assert forker.stdout is not None and forker.stdout.readline() == "ready\n"
    die(run)
    assert cleaned(state).exit_status == 0
    assert cleaned(state, [R1]).removed == []


def test_a_live_run_is_left_alone_unless_live_runs_are_included(state: str, children: ExitStack) -> None:
    script = (
        "import time; from harness.run_state import RunState\n"
        f"run = RunState.create({R1!r}, state_root={state!r}); print('ready', flush=True); time.sleep(600)"
    )
    harness = start(children, argv=[sys.executable, "-c", script])
    assert harness.stdout is not None and harness.stdout.readline() == "ready\n"
    node = start(children, R1)
    for report in (cleaned(state), cleaned(state, [R1])):
        assert (report.live, report.removed, report.exit_status) == ([R1], [], 0)
    assert (harness.poll(), node.poll()) == (None, None)
    assert cleaned(state, [R1], include_live=True).exit_status == 0
    assert (harness.wait(), node.wait()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_clean_called_from_within_a_run_does_not_kill_itself(state: str, children: ExitStack) -> None:
    RunState.create(R1, state_root=state)
    script = (
        "from harness.cleanup import clean\n"
        f"print(clean(state_root={state!r}, include_live=True, report=lambda line: None).exit_status)"
    )
    # This process is the harness of r1 and an ancestor of the cleaner, which carries the mark itself.
    cleaner = start(children, R1, argv=[sys.executable, "-c", script])
    assert cleaner.communicate(timeout=60)[0] == "0\n"
    assert cleaner.returncode == 0


def test_only_named_runs_are_cleaned(state: str, children: ExitStack) -> None:
    runs = [RunState.create(name, state_root=state) for name in (MINE, MINE + "-b", MINE + "c")]
    processes = [start(children, run.run_id) for run in runs]
    for run in runs:
        die(run)
    assert cleaned(state, [MINE]).exit_status == 0
    assert processes[0].wait() == -signal.SIGKILL
    assert [p.poll() for p in processes[1:]] == [None, None]
    assert runs_in(state) == [MINE + "-b", MINE + "c"]


def test_claimed_files_are_removed_and_foreign_ones_stay(state: str, temp: Path) -> None:
    run = RunState.create(R1, state_root=state)
    ours = Path(run.make_temp_dir("disk"))
    (ours / "deep").mkdir()
    (ours / "deep" / "file").write_text("x")
    outside = temp / "outside"
    outside.mkdir()
    (ours / "link").symlink_to(outside)
    (outside / "keep").write_text("x")
    (outside / CONTROL_FILE).write_bytes(b"\xff" * CONTROL_BYTES)
    named_otherwise, of_other_run = temp / "precious", temp / "splitbrain-r2-disk"
    for foreign in (named_otherwise, of_other_run):
        foreign.mkdir()
        run.claim(KIND_DIRECTORY, str(foreign))
    link = temp / f"splitbrain-{R1}-link"
    link.symlink_to(outside)
    run.claim(KIND_DIRECTORY, str(link))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(temp / "control"))
    run.claim(KIND_SOCKET, str(temp / "control"))
    (temp / "not-a-socket").write_text("x")
    run.claim(KIND_SOCKET, str(temp / "not-a-socket"))
    (temp / "image").write_text("x")
    run.claim(KIND_FILE, str(temp / "image"))
    run.claim(KIND_DIRECTORY, str(temp / f"splitbrain-{R1}-never-made"))
    (temp / "splitbrain-r2-n1").mkdir()
    run.claim(KIND_CGROUP, str(temp / "splitbrain-r2-n1"))
    die(run)
    report = cleaned(state)
    assert not ours.exists() and not (temp / "control").exists() and not (temp / "image").exists()
    assert (outside / "keep").exists() and link.is_symlink()
    assert (outside / CONTROL_FILE).read_bytes() == b"\xff" * CONTROL_BYTES, "no fault of somebody else was ended"
    assert named_otherwise.exists() and of_other_run.exists() and (temp / "not-a-socket").exists()
    assert (temp / "splitbrain-r2-n1").exists()
    assert len(report.left) == 5
    assert report.exit_status == 255
    assert runs_in(state) == [R1], "what is left stays on record"


def test_what_another_clean_removes_at_the_same_time_is_not_left(
    state: str, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is always a moment earlier."""
    run = RunState.create(R1, state_root=state)
    inner = Path(run.make_temp_dir("disk")) / "inner"
    inner.mkdir()
    for directory in (inner.parent, inner):
        for name in ("a", "b", CONTROL_FILE):
            (directory / name).write_bytes(bytes(CONTROL_BYTES))
    run.claim(KIND_FILE, str(temp / "image"))
    (temp / "image").touch()
    (Path(state) / f".{R1}.{DEAD_PID}.draft").touch()
    scratch = temp / f"splitbrain-trial-{DEAD_PID}-7-gone"
    scratch.mkdir()
    for name in ("a", "b"):
        (scratch / name).touch()
    die(run)

    def too_late(remove: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            for _ in range(2):
                remove(path, dir_fd=dir_fd)

        return call

    def let_go(directory: str) -> None:
        host_agent.let_go(directory)
        raise FileNotFoundError(directory)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", too_late(os.unlink))
        patched.setattr(os, "rmdir", too_late(os.rmdir))
        patched.setattr(cleanup, "let_go", let_go)
        report = cleaned(state)
    assert (report.left, report.exit_status, list(temp.iterdir())) == ([], 0, [])
    assert not Path(state).exists() or list(Path(state).iterdir()) == []


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.parametrize("kind", [KIND_DIRECTORY, KIND_FILE, KIND_SOCKET])
def test_what_belongs_to_another_user_by_now_is_left_alone(state: str, temp: Path, kind: str) -> None:
    run = RunState.create(R1, state_root=state)
    path = temp / f"splitbrain-{R1}-theirs"
    if kind == KIND_DIRECTORY:
        path.mkdir()
    elif kind == KIND_FILE:
        path.touch()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    os.chown(path, 12345, -1)
    run.claim(kind, str(path))
    die(run)
    report = cleaned(state)
    assert path.exists() and len(report.left) == 1 and "of this user" in report.left[0]
    os.chown(path, os.geteuid(), -1)
    report = cleaned(state)
    assert report.exit_status == 0 and not path.exists()
    assert report.removed == [f"run {R1}: {kind} {path}", f"run {R1}: state {run.path}"]


def test_what_was_claimed_and_never_made_is_not_reported_as_removed(state: str, temp: Path) -> None:
    run = RunState.create(R1, state_root=state)
    for kind in (KIND_CGROUP, KIND_DIRECTORY, KIND_FILE, KIND_IMAGE, KIND_MOUNT, KIND_NETNS, KIND_SOCKET):
        run.claim(kind, f"sb-{R1}-n1" if kind == KIND_NETNS else str(temp / f"splitbrain-{R1}-{kind}"))
    run.claim(KIND_VETH, "sbv0", netns=f"sb-{R1}-n1")
    run.claim(KIND_VETH, f"sbv{os.getpid()}")
    die(run)
    report = cleaned(state)
    assert (report.removed, report.left) == ([f"run {R1}: state {run.path}"], [])


def test_a_device_that_is_there_cannot_be_removed_without_ip(
    state: str, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunState.create(R1, state_root=state)
    run.claim(KIND_VETH, "lo")
    die(run)
    monkeypatch.setattr("harness.cleanup.find_program", lambda name: None)
    report = cleaned(state)
    assert len(report.left) == 1 and "install iproute2" in report.left[0]


@pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))
def test_a_stalled_process_without_a_mark_is_released(state: str, temp: Path, children: ExitStack) -> None:
    """The preloaded library holds its fsync; nothing shows that the process belongs to the run."""
    run = RunState.create(R1, state_root=state)
    directory = Path(run.make_temp_dir("agents")) / "n1"
    directory.mkdir()
    control, data = directory / CONTROL_FILE, temp / "data"
    data.mkdir()
    faults = HostFaults()
    faults.add_disk_fault("f1", DiskFault(kind="stall"))
    control.write_bytes(faults.pack().ljust(CONTROL_BYTES, b"\0"))
    library = temp / "shim.so"
    library.write_bytes(build_shim())
    script = "import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY)); print('synced')"
    environment = {**os.environ, **shim_environment(str(library), str(control), str(data), program=1)}
    waiting = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script, str(data)], env=environment, stdout=subprocess.PIPE, text=True
    )
    children.enter_context(waiting)
    children.callback(waiting.kill)
    deadline_s = time.monotonic() + 30
    while not (counts := parse_programs(control.read_bytes())) or not counts[1].held:
        assert time.monotonic() < deadline_s and waiting.poll() is None
        time.sleep(0.01)
    die(run)
    assert cleaned(state).exit_status == 0 and not directory.exists()
    assert waiting.communicate(timeout=30)[0] == "synced\n"


def test_states_are_found_in_every_state_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [str(tmp_path / name) for name in ("x", "y", "z")]
    monkeypatch.setattr(run_state, "state_roots", lambda: places)
    for run_id, place in zip(("a", "b", "c"), places, strict=True):
        run = RunState.create(run_id, state_root=place)
        die(run)
    (tmp_path / "w").write_text("not a directory")
    places.append(str(tmp_path / "w"))
    report = clean(run_ids=["b"], report=lambda line: None)
    assert [runs_in(place) for place in places[:3]] == [["a"], [], ["c"]]
    assert len(report.notes) == 1 and "cannot read" in report.notes[0]
    assert clean(report=lambda line: None).exit_status == 0
    assert [runs_in(place) for place in places[:3]] == [[], [], []]


@ROOT_ONLY
@pytest.mark.root
def test_states_in_another_users_directory_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: ExitStack
) -> None:
    planted = tmp_path / "splitbrain-0"
    run = RunState.create(R1, state_root=str(planted))
    victim = start(children)
    run.claim_process(victim.pid)
    die(run)
    os.chown(planted, 65534, 65534)
    monkeypatch.setattr(run_state, "state_roots", lambda: [str(planted)])
    monkeypatch.setattr(cleanup, "marked_devices", list)  # those of dead runs of parallel tests would be noted too
    monkeypatch.setattr(cleanup, "_note_groups_without_state", lambda roots, note: None)  # likewise
    report = clean(report=lambda line: None)
    assert (report.removed, len(report.notes), victim.poll()) == ([], 1, None)


def test_a_given_state_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=f"cannot read {tmp_path}/file: Not a directory"):
        cleaned(str(tmp_path / "file"))


def mark_of(run_id: str, *, is_live: bool = False, state: str = "") -> ImageMark:
    process = harness_process() if is_live else {**harness_process(), "pid": DEAD_PID}
    return ImageMark(run_id=run_id, state=state, **process)


def test_only_a_device_of_a_dead_run_without_a_state_is_released_and_only_if_no_run_is_named(
    tmp_path: Path, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = str(tmp_path / "states")
    monkeypatch.setenv(run_state.STATE_DIR_VARIABLE, state)
    monkeypatch.setattr(cleanup, "_note_groups_without_state", lambda roots, note: None)  # those of other tests
    elsewhere = tmp_path / "elsewhere" / f"{R1}.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.touch()
    devices = [
        ("/dev/loop901", mark_of(R1)),
        ("/dev/loop902", mark_of(R1, is_live=True)),
        ("/dev/loop903", mark_of(R1, state=str(elsewhere))),
        ("/dev/loop904", mark_of(R1, state=str(tmp_path / "gone.jsonl"))),
    ]
    released: list[str] = []
    monkeypatch.setattr(cleanup, "marked_devices", lambda: devices)
    monkeypatch.setattr(cleanup, "release_device", released.append)
    clean(run_ids=[R1 + "1"], report=lambda line: None)
    clean(state_root=state, report=lambda line: None)
    assert released == [], "neither of another run, nor by the states of another directory"
    report = clean(report=lambda line: None)
    assert released == ["/dev/loop901", "/dev/loop904"] and len(report.removed) == 2
    assert report.notes == [
        f"run {R1}: loop device /dev/loop903 belongs to a dead run: remove it with "
        f"SPLITBRAIN_STATE_DIR={elsewhere.parent} harness clean"
    ]


def test_a_run_is_cleaned_of_its_own_devices_only_and_of_those_that_stay_in_use_it_is_said(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [("/dev/loop901", mark_of(R1)), ("/dev/loop902", mark_of(R1 + "1")), ("/dev/loop903", mark_of(R1))]
    released: list[str] = []

    def release(device: str) -> None:
        if device == "/dev/loop903":
            raise OSError(f"{device} is still in use")
        released.append(device)

    monkeypatch.setattr(cleanup, "marked_devices", lambda: devices)
    monkeypatch.setattr(cleanup, "release_device", release)
    run = RunState.create(R1, state_root=state)
    die(run)
    report = cleaned(state, [R1])
    assert released == ["/dev/loop901"] and report.removed == [f"run {R1}: loop device /dev/loop901"]
    assert report.left == [f"run {R1}: left: loop device /dev/loop903: /dev/loop903 is still in use"]
    assert report.exit_status == 255 and runs_in(state) == [R1], "what is left stays on record"


def test_cleaning_named_runs_leaves_the_scratch_of_other_processes(state: str, temp: Path) -> None:
    scratch = temp / f"splitbrain-trial-{DEAD_PID}-7-gone"
    scratch.mkdir()
    cleaned(state, [R1])
    assert scratch.exists()
    assert cleaned(state).removed == [f"{scratch}, of a process that is gone"] and not scratch.exists()


def test_a_claim_of_an_unknown_kind_stays_on_record(state: str) -> None:
    run = RunState.create(R1, state_root=state)
    run.claim("quantum-link", "q7")
    die(run)
    report = cleaned(state)
    assert "quantum-link q7" in report.left[0]
    assert runs_in(state) == [R1]


def test_a_damaged_state_is_reported_and_the_others_are_cleaned(state: str) -> None:
    run = RunState.create("b", state_root=state)
    die(run)
    Path(state_path("a", state)).write_text("garbage\n")
    report = cleaned(state)
    assert "damaged" in report.left[0]
    assert runs_in(state) == ["a"]


def test_drafts_of_dead_processes_are_removed_and_those_of_live_ones_stay(state: str) -> None:
    RunState.create("x", state_root=state).close()
    dead, live = Path(state) / f".{R1}.{DEAD_PID}.draft", Path(state) / f".r2.{os.getpid()}.draft"
    dead.write_text("")
    live.write_text("")
    cleaned(state)
    assert (dead.exists(), live.exists()) == (False, True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Names of network namespaces that are removed after the test if they are still there."""
    names: list[str] = []
    yield names
    for name in names:
        if os.path.exists(f"/run/netns/{name}"):
            subprocess.run(["ip", "netns", "delete", name], check=True)


def add_namespace(namespaces: list[str], name: str) -> None:
    namespaces.append(name)
    subprocess.run(["ip", "netns", "add", name], check=True)


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.netns
def test_namespaces_are_removed_and_the_processes_in_them_killed(
    state: str, children: ExitStack, namespaces: list[str]
) -> None:
    run = RunState.create(R1, state_root=state)
    for name in (f"sb-{R1}-n1", f"sb-{R1}-unclaimed", f"sb-{R1}-n2", f"sb-{R1}-x-n1", f"{MINE}-foreign"):
        add_namespace(namespaces, name)
    run.claim(KIND_NETNS, f"sb-{R1}-n1")
    run.claim(KIND_NETNS, f"sb-{R1}-n7")  # claimed, never made
    inside = start(children, argv=["nsenter", f"--net=/run/netns/sb-{R1}-n1", "sleep", "600"])
    elsewhere = start(children, argv=["nsenter", f"--net=/run/netns/{MINE}-foreign", "sleep", "600"])
    wait_until_in(inside.pid, f"sb-{R1}-n1")
    wait_until_in(elsewhere.pid, f"{MINE}-foreign")
    Path(f"/run/netns/sb-{R1}-n8").touch()  # as `ip netns add` leaves it when it is killed half-way
    namespaces.append(f"sb-{R1}-n8")
    die(run)
    report = cleaned(state)
    assert report.left == []
    assert inside.wait() == -signal.SIGKILL
    assert elsewhere.poll() is None
    left = {name for name in os.listdir("/run/netns") if name in namespaces}
    # n2 and n8 follow this run's pattern; the others belong to nobody or to another run.
    assert left == {f"sb-{R1}-unclaimed", f"sb-{R1}-x-n1", f"{MINE}-foreign"}
    assert not any(f"sb-{R1}-n" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


@pytest.mark.parametrize(
    "name", ["n1", "net", "clients", "ns1", "sb-n1", "sb-{run}n1", "sb-{run}-n1-x", "x-sb-{run}-n1"]
)
def test_a_namespace_without_the_whole_prefix_of_a_run_belongs_to_somebody_else(name: str) -> None:
    assert cleanup._host_of(f"sb-{R1}-n1", R1) == "n1"
    assert cleanup._host_of(name.format(run=R1), R1) is None


def wait_until_in(pid: int, namespace: str) -> None:
    deadline = time.monotonic() + 10
    while os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat(f"/run/netns/{namespace}").st_ino:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def lost_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The control groups of a run that has no state in the state directories."""
    monkeypatch.setenv(run_state.STATE_DIR_VARIABLE, str(tmp_path / "states"))
    outer = [os.path.join(parent, f"splitbrain-{R1}-{host}") for parent in cgroup_parents() for host in ("n1", "n12")]
    groups = [path for group in outer for path in (group, f"{group}/{os.path.basename(group)}-programs")]
    foreign = [f"{group}-of-others" for group in outer]
    for path in (*groups, *foreign):
        os.mkdir(path)
    yield groups
    assert all(os.path.isdir(path) for path in foreign)
    for path in (*groups[::-1], *foreign):
        with suppress(FileNotFoundError):
            os.rmdir(path)


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.skipif(not cgroup_parents(), reason="no control groups can be made here")
def test_control_groups_without_a_state_are_noted_and_removed_by_run_id(lost_groups: list[str]) -> None:
    [note] = [note for note in clean(report=lambda line: None).notes if R1 in note]
    assert f"({len(lost_groups)})" in note and f"`harness clean --run {R1}` removes them" in note
    assert all(os.path.isdir(path) for path in lost_groups)
    run = RunState.create(R1)
    assert not [note for note in clean(report=lambda line: None).notes if R1 in note], "it has a state"
    Path(run.path).unlink()
    report = clean(run_ids=[R1], report=lambda line: None)
    assert (len(report.removed), report.left) == (len(lost_groups), [])
    assert not any(os.path.exists(path) for path in lost_groups)


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.skipif(not cgroup_parents(), reason="no control groups can be made here")
def test_control_groups_with_processes_are_not_counted_as_lost(lost_groups: list[str], children: ExitStack) -> None:
    child = start(children)
    for group in lost_groups:
        Path(group, "cgroup.procs").write_text(str(child.pid))
        [note] = [note for note in clean(report=lambda line: None).notes if R1 in note]
        assert f"({len(lost_groups) - len(groups_of(child.pid, lost_groups))})" in note
    child.kill()
    child.wait()


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.skipif(not cgroup_parents(), reason="no control groups can be made here")
def test_unmarked_processes_in_a_runs_control_group_are_killed(lost_groups: list[str], children: ExitStack) -> None:
    child, other = start(children), start(children)
    for group in lost_groups:
        Path(group, "cgroup.procs").write_text(str(child.pid))
    Path(f"{cgroup_parents()[0]}/splitbrain-{R1}-n1-of-others/cgroup.procs").write_text(str(other.pid))
    report = clean(run_ids=[R1], report=lambda line: None)
    assert report.left == [] and other.poll() is None
    assert child.wait() == -signal.SIGKILL
    assert not any(os.path.exists(path) for path in lost_groups)
    other.kill()
    other.wait()


def groups_of(pid: int, groups: list[str]) -> list[str]:
    return [group for group in groups if str(pid) in Path(group, "cgroup.procs").read_text().split()]


@ROOT_ONLY
@pytest.mark.root
def test_nested_mounts_are_unmounted_and_foreign_mounts_stay(state: str, temp: Path) -> None:
    run = RunState.create(R1, state_root=state)
    base = Path(run.make_temp_dir("mounts"))
    outer, foreign = base / "outer with blank", temp / "foreign"
    outer.mkdir()
    foreign.mkdir()
    mount(run, outer, "splitbrain-outer")
    (outer / "inner").mkdir()
    mount(run, outer / "inner", "splitbrain-inner")
    twice = temp / "twice"
    twice.mkdir()
    for _ in range(2):
        mount(run, twice, "splitbrain-twice")
    (base / "unclaimed").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "x", str(base / "unclaimed")], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "somebody-elses", str(foreign)], check=True)
    try:
        run.claim(KIND_MOUNT, str(foreign), source="splitbrain-n1")
        die(run)
        report = cleaned(state)
        mounts = Path("/proc/self/mountinfo").read_text()
        assert str(base).replace(" ", "\\040") not in mounts
        assert not base.exists() and str(twice) not in mounts
        assert str(foreign) in mounts
        assert len(report.left) == 1 and "somebody-elses is mounted there" in report.left[0]
    finally:
        subprocess.run(["umount", str(foreign)], check=True)


@ROOT_ONLY
@pytest.mark.root
def test_a_directory_with_a_mount_that_stays_is_not_removed(
    state: str, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files belong to somebody else."""
    run = RunState.create(R1, state_root=state)
    base = Path(run.make_temp_dir("mounts"))
    (base / "theirs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "somebody-elses", str(base / "theirs")], check=True)
    try:
        (base / "theirs" / "keep").touch()
        die(run)
        with monkeypatch.context() as patched:
            patched.setattr(cleanup, "unmount", lambda path: False)
            report = cleaned(state)
        assert (base / "theirs" / "keep").exists()
        assert len(report.left) == 1 and "something is still mounted in it" in report.left[0]
    finally:
        subprocess.run(["umount", str(base / "theirs")], check=True)


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.parametrize(("is_ours", "inside"), [(True, "inside"), (False, "inside"), (False, ".")])
def test_mounts_are_found_if_the_temporary_directory_is_reached_by_a_link(
    state: str, temp: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool, inside: str
) -> None:
    """The kernel lists them by their real paths. What is mounted is unmounted, and never emptied."""
    theirs = temp.parent / "theirs"
    theirs.mkdir()
    (theirs / "keep").touch()
    link = temp.parent / "link"
    link.symlink_to(temp)
    monkeypatch.setenv("TMPDIR", str(link))
    run = RunState.create(R1, state_root=state)
    base = Path(run.make_temp_dir("mounts"))
    assert base.parent == link
    (base / inside).mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", str(theirs), str(base / inside)], check=True)
    try:
        if is_ours:
            run.claim(KIND_MOUNT, str(base / inside))
        die(run)
        report = cleaned(state)
        assert report.left == [] and not base.exists() and (theirs / "keep").exists()
        assert (f"run {R1}: mount {base / inside}" in report.removed) is is_ours
    finally:
        subprocess.run(["umount", str(temp / base.name / inside)], capture_output=True)


def mount(run: RunState, path: Path, source: str) -> None:
    run.claim(KIND_MOUNT, str(path), source=source)
    subprocess.run(["mount", "-t", "tmpfs", source, str(path)], check=True)


@ROOT_ONLY
@pytest.mark.skipif(IS_PLAIN_CHROOT, reason="ip(8) cannot enter a namespace in a chroot")
@pytest.mark.root
@pytest.mark.netns
def test_claimed_devices_are_removed_only_if_they_are_veths(state: str, namespaces: list[str]) -> None:
    run = RunState.create(R1, state_root=state)
    add_namespace(namespaces, DEVICES)
    ip = ["ip", "-netns", DEVICES]
    subprocess.run([*ip, "link", "add", "sbv0", "type", "veth", "peer", "name", "sbv1"], check=True)
    subprocess.run([*ip, "link", "add", "br0", "type", "bridge"], check=True)
    for device in ("sbv0", "br0", "never-made"):
        run.claim(KIND_VETH, device, netns=DEVICES)
    run.claim(KIND_VETH, "sbv9", netns="no-such-namespace")
    die(run)
    report = cleaned(state)
    shown = subprocess.run([*ip, "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "sbv0" not in shown and "sbv1" not in shown and "br0" in shown
    assert len(report.left) == 1 and "not a veth" in report.left[0]


@pytest.mark.parametrize(
    ("said", "is_left"),
    [
        ('Device "lo" does not exist.', False),
        ("ip: can't find device 'lo'", False),
        ("RTNETLINK answers: Operation not permitted", True),
    ],
)
def test_a_device_that_cannot_be_inspected_stays_on_record(
    state: str, temp: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_left: bool
) -> None:
    ip = temp / "ip"
    ip.write_text(f'#!/bin/sh\necho "{said}" >&2; exit 1\n'.replace('"lo"', '\\"lo\\"'))
    ip.chmod(0o755)
    monkeypatch.setattr(cleanup, "find_program", lambda name: str(ip))
    run = RunState.create(R1, state_root=state)
    run.claim(KIND_VETH, "lo")
    die(run)
    report = cleaned(state)
    assert report.left == ([f"run {R1}: left: veth lo: it cannot be inspected: {said}"] if is_left else [])
    assert runs_in(state) == ([R1] if is_left else [])


@ROOT_ONLY
@pytest.mark.root
@pytest.mark.netns
def test_clean_without_root_points_to_sudo_for_roots_runs(
    tmp_path: Path, temp: Path, namespaces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_namespace(namespaces, f"sb-{R1}-n1")
    assert cleaned(str(tmp_path / "none")).notes == [], "root needs no sudo"
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    report = cleaned(str(tmp_path / "none"), [R1])
    assert len(report.notes) == 1 and "sudo harness clean" in report.notes[0]
    assert cleaned(str(tmp_path / "none"), [MINE]).notes == []
    assert os.path.exists(f"/run/netns/sb-{R1}-n1")
