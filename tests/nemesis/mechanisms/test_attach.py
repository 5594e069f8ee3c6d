"""Programs whose calls are reported from their first disk fault on: until then they run untouched."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.clusters import host_agent
from nemesis.mechanisms.launcher import attach, marks
from nemesis.mechanisms.launcher.control import Control
from nemesis.mechanisms.launcher.filter import FilterError
from nemesis.mechanisms.launcher.programs import look
from nemesis.mechanisms.launcher.supervisor import Ledger, guard
from nemesis.mechanisms.launcher.tracing import ProcessTree, TracingError
from nemesis.mechanisms.launcher_archive import why_no_clock, why_not_attached
from nemesis.mechanisms.reach import SECCOMP, unreached
from nemesis.mechanisms.shim import CONTROL_BYTES, HostFaults
from nemesis.target import ClockSkew, DiskFault
from tests.nemesis.mechanisms.launched import CHILD, NUMBER, OWN_FILTER, Program, wait_until

pytestmark = pytest.mark.skipif(why_not_attached() is not None, reason=str(why_not_attached()))
needs_clock = pytest.mark.skipif(why_no_clock() is not None, reason=str(why_no_clock()))


def filters(pid: int) -> list[bytes]:
    return [line for line in Path(f"/proc/{pid}/status").read_bytes().splitlines() if line.startswith(b"Seccomp")]


def is_traced(pid: int) -> bool:
    return b"TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_bytes()


def started(directory: Path, argv: list[str] | None = None) -> Program:
    program = Program(directory, argv, attaches=True)
    assert program.do("clock")  # it runs by now
    return program


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = started(tmp_path)
    yield made
    made.close()
    wait_until(lambda: made.helpers() == {})


def test_a_program_is_untouched_before_its_first_fault_and_only_has_a_filter_after(program: Program) -> None:
    pid = program.process.pid
    mapped, open_files = Path(f"/proc/{pid}/maps").read_bytes(), os.listdir(f"/proc/{pid}/fd")
    assert program.do("sync") == "ok" and program.count().calls == 0
    assert filters(pid) == filters(os.getpid()) and not is_traced(pid)
    program.impair("error-fsync")
    counts = program.count()
    assert (counts.traps_generation, counts.traps_reached, counts.traps_failed) == (program.faults.generation, 1, 0)
    assert program.do("sync") == "Input/output error" and program.count().syncs == program.count().failed == 1
    assert filters(pid) != filters(os.getpid()) and not is_traced(pid)
    assert Path(f"/proc/{pid}/maps").read_bytes().count(b"\n") == mapped.count(b"\n")
    assert os.listdir(f"/proc/{pid}/fd") == open_files


BUSY = """
import os, signal, subprocess, sys, threading, time
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
path = os.path.join(sys.argv[1], "file")
fd = os.open(path, os.O_RDWR | os.O_CREAT)
wrong = []
def compute():
    while True:
        if sum(range(1000)) != 499500 or bytes(1000).count(0) != 1000:
            wrong.append("sum")
def sleep():
    while True:
        begin = time.monotonic()
        time.sleep(0.002)
        if time.monotonic() - begin < 0.002:
            wrong.append("sleep")
def start():
    while True:
        if subprocess.run(["/bin/sh", "-c", "exit 7"]).returncode != 7:
            wrong.append("child")
for work in (compute, sleep, sleep, start):
    threading.Thread(target=work, daemon=True).start()
SYNC = "import os, sys, time\\nfd = os.open(sys.argv[1], os.O_RDWR)\\nwhile True: time.sleep(0.001); os.fsync(fd)"
children = [subprocess.Popen([sys.executable, "-I", "-S", "-c", SYNC, path]) for _ in range(3)]
for line in sys.stdin:
    print(wrong or [child.pid for child in children if child.poll() is None], flush=True)
"""


def test_all_processes_and_threads_of_a_busy_program_are_reached(tmp_path: Path) -> None:
    """It computes, sleeps, is sent signals and starts children all the time, and none of that goes wrong."""
    program = started(tmp_path, [sys.executable, "-I", "-S", "-c", BUSY, str(tmp_path / "data")])
    try:
        program.impair("slow", delay_ms=1)
        counts = program.count()
        assert counts.traps_failed == 0 and counts.traps_reached >= 4
        children = [int(word) for word in program.do("").strip("[]").split(",")]
        reached = filters(program.process.pid)
        assert len(children) == 3 and reached != filters(os.getpid())
        assert all(filters(child) == reached for child in children)
        threads = os.listdir(f"/proc/{program.process.pid}/task")
        assert len(threads) >= 5 and all(filters(int(thread)) == reached for thread in threads)
        program.impair("error-fsync")
        wait_until(lambda: program.do("") == "[]")  # each child ends of its first failing sync
        assert program.count().met >= 3
    finally:
        program.close()
    wait_until(lambda: program.helpers() == {})


DAEMON = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        fd = os.open(os.path.join(sys.argv[1], "file"), os.O_RDWR | os.O_CREAT)
        print(os.getpid(), flush=True)
        for _ in sys.stdin:
            try:
                print(os.fsync(fd) or "ok", flush=True)
            except OSError as error:
                print(error.strerror, flush=True)
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""Its work is done by a process whose parent ends at once."""


def test_a_daemon_that_was_orphaned_at_once_is_found_by_its_mark(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-S", "-c", DAEMON, str(tmp_path / "data")]
    program = Program(tmp_path, argv, attaches=True, mark="test-daemon")
    daemon = int(program.answer())
    try:
        assert program.do("") == "ok"
        (whole, (shell,)) = look(program.process.pid), [each for each in look(daemon) if each["pid"] == daemon]
        assert {each["pid"] for each in whole} == {program.process.pid, daemon} and shell["filters"] == 0
        problem = unreached(SECCOMP, whole, needed_files=(), needs_clock=False)
        assert problem is not None and "are not reported" in problem
        program.impair("error-fsync")
        assert program.count().traps_reached == 2 and program.do("") == "Input/output error"
        assert unreached(SECCOMP, look(program.process.pid), needed_files=(), needs_clock=False) is None
    finally:
        os.kill(daemon, signal.SIGKILL)  # otherwise it would run until the end of its input
        program.close()
    wait_until(lambda: program.helpers() == {})


def test_the_launcher_uses_the_same_mark_as_host_agents() -> None:
    assert marks.PROGRAM_VARIABLE == host_agent.PROGRAM_VARIABLE and host_agent.HELPERS.encode() == marks.HELPERS


def test_a_stopped_program_is_reached_and_stays_stopped(program: Program) -> None:
    program.process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{program.process.pid}/stat")
    wait_until(lambda: stat.read_bytes().rpartition(b")")[2].split()[0] == b"T")
    program.impair("error-fsync")
    program.ask("sync")
    time.sleep(0.05)
    assert stat.read_bytes().rpartition(b")")[2].split()[0] == b"T" and program.count().syncs == 0
    program.process.send_signal(signal.SIGCONT)
    assert program.answer() == "Input/output error"


def test_a_program_with_its_own_filters_is_left_alone_and_reported(tmp_path: Path) -> None:
    """They might kill it for the calls that attaching makes it perform."""
    program = started(tmp_path, [sys.executable, "-I", "-S", "-c", OWN_FILTER + CHILD, str(tmp_path / "data")])
    try:
        program.impair("error-fsync")
        counts = program.count()
        assert (counts.traps_reached, counts.traps_failed, counts.traps_error) == (0, 1, errno.EEXIST)
        assert program.do("sync") == "ok" and program.count().calls == 0
    finally:
        program.close()
    wait_until(lambda: program.helpers() == {})


def test_a_program_traced_by_another_process_is_reached_only_after_its_detach(program: Program) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(0x4206, program.process.pid, None, None) == 0, "PTRACE_SEIZE"
    try:
        program.impair("error-fsync")
        assert (program.count().traps_failed, program.count().traps_error) == (1, errno.EPERM)
    finally:
        libc.ptrace(0x4207, program.process.pid, None, None)
        os.waitpid(program.process.pid, os.WUNTRACED)
        assert libc.ptrace(17, program.process.pid, None, None) == 0, "PTRACE_DETACH"
    assert program.do("sync") == "ok"
    program.impair("stall-fsync")
    assert program.count().traps_reached == 1


@needs_clock
def test_moving_the_clock_and_attaching_do_not_interfere(tmp_path: Path) -> None:
    """Both stop the program, and only one can trace it at a time."""
    program = Program(tmp_path, attaches=True, clock=True)
    try:
        assert program.do("clock")
        program.faults.add_skew("skew", ClockSkew(offset_ms=3_600_000), wall_ns=0, monotonic_ns=0)
        program.impair("error-fsync")
        wait_until(lambda: program.count().clock_generation >= program.faults.generation)
        assert (program.count().traps_failed, program.count().clock_failed) == (0, 0)
        assert program.do("sync") == "Input/output error"
        assert int(program.do("clock").split()[0]) > time.time_ns() + 3000 * 10**9
    finally:
        program.close()


def test_a_supervisor_killed_before_the_fault_is_counted_as_lost(program: Program) -> None:
    os.kill(program.helpers()["fault-calls"], signal.SIGKILL)
    wait_until(lambda: program.count().lost == 1)
    assert program.do("sync") == "ok"


def test_a_supervisor_killed_at_any_moment_of_attaching_leaves_the_program_running(
    tmp_path: Path,
) -> None:
    """The tracer continues without it, or never starts."""
    rng = random.Random(7)
    for number in range(8):
        directory = tmp_path / str(number)
        directory.mkdir()
        program = started(directory)
        supervisor = program.helpers()["fault-calls"]
        try:
            program.faults.add_disk_fault("fault", DiskFault(kind="error-fsync"))
            program.apply()
            time.sleep(rng.uniform(0, 0.08))
            os.kill(supervisor, signal.SIGKILL)
            wait_until(lambda: program.helpers().keys() <= {"fault-guardian"})  # noqa: B023
            assert {program.do(call) for call in ("sync", "write", "grow", "read")} == {"ok"}
        finally:
            program.close()


@pytest.mark.parametrize("at", ["before the filter", "after the filter", "with its listener"])
def test_a_listener_whose_tracer_was_killed_is_found(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its reported calls would wait for ever."""
    path = tmp_path / "control"
    faults = HostFaults()
    faults.add_disk_fault("fault", DiskFault(kind="error-fsync"))
    path.write_bytes(faults.pack().ljust(CONTROL_BYTES, b"\0"))
    control = Control(str(path))
    control.claim(NUMBER)
    (tmp_path / "data").mkdir()
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(tmp_path / "data")]
    running = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdin is not None and running.stdout is not None
    running.stdin.write("clock\n")
    running.stdin.flush()
    assert running.stdout.readline()
    real_take, real_install = attach.take_descriptor, attach.install

    def killed(*_: object, **__: object) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return -1

    def install(*arguments: Any, **keywords: Any) -> tuple[int, bool]:
        made = real_install(*arguments, **keywords)
        monkeypatch.setattr(attach, "take_descriptor", killed)
        return made

    def close_after(pid: int, descriptor: int) -> int:
        taken = real_take(pid, descriptor)
        monkeypatch.setattr(attach.Stopped, "call", killed)
        return taken

    if at == "before the filter":
        monkeypatch.setattr(attach, "install", killed)
    elif at == "after the filter":
        monkeypatch.setattr(attach, "install", install)
    else:
        monkeypatch.setattr(attach, "install", lambda *a, **k: (real_install(*a, **k), later())[0])

        def later() -> None:
            monkeypatch.setattr(attach, "take_descriptor", close_after)

    guardian, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The patched functions run only in the tracer, a child of this process.
    attached = attach._attach_in_a_child(control, ProcessTree(running.pid), ["sync"], guardian)
    listeners = attached.listeners
    assert (attached.failed, attached.error_number) == (1, errno.ECHILD)
    assert len([*listeners]) == (0 if at == "before the filter" else 1)
    guard_pid = os.fork()
    if guard_pid == 0:
        guardian.close()
        for listener in listeners:
            os.close(listener.descriptor)
        guard(theirs, Ledger(), lambda: False, lambda: None)
        os._exit(0)
    theirs.close()
    guardian.close()
    for listener in listeners:
        os.close(listener.descriptor)
    try:
        running.stdin.write("sync\n")
        running.stdin.flush()
        assert running.stdout.readline() == "ok\n"
    finally:
        running.kill()
        running.communicate()
        os.waitpid(guard_pid, 0)


FORKED = "import os, sys; os.fork(); print(os.getpid(), flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("problem", "error_number"),
    [
        (FilterError("the kernel refuses it", errno.EINVAL), errno.EINVAL),
        (PermissionError(errno.EPERM, "it may not be traced"), errno.EPERM),
        (TracingError("it keeps receiving signals"), errno.EBUSY),
    ],
)
def test_a_process_that_could_not_be_given_a_filter_after_others_were_is_counted(
    tmp_path: Path, problem: Exception, error_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault would not meet it, even though it meets the others."""
    (tmp_path / "control").write_bytes(HostFaults().pack().ljust(CONTROL_BYTES, b"\0"))
    control = Control(str(tmp_path / "control"))
    argv = [sys.executable, "-I", "-S", "-c", FORKED]
    running = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    guardian, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    real_install, installed = attach.install, list[int]()

    def install(*arguments: Any, **keywords: Any) -> tuple[int, bool]:
        if installed:
            raise problem
        installed.append(1)
        return real_install(*arguments, **keywords)

    monkeypatch.setattr(attach, "install", install)
    try:
        assert running.stdout is not None
        assert running.pid in {int(running.stdout.readline()) for _ in range(2)}
        tree = ProcessTree(running.pid)
        tree.look()
        attached = attach._attach_in_a_child(control, tree, ["sync"], guardian)
        assert (attached.failed, attached.error_number) == (1, error_number)
        assert len([*attached.listeners]) == 1
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        guardian.close()
        theirs.close()
    for listener in attached.listeners:
        os.close(listener.descriptor)
