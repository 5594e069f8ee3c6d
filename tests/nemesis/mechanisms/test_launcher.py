"""Programs under the launcher: their calls are held, delayed and refused, and clocks moved, without a library."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemesis.mechanisms.launcher import vdso
from nemesis.mechanisms.launcher.control import UNCOUNTED, Control, parse_programs
from nemesis.mechanisms.launcher.tracing import ProcessTree
from nemesis.mechanisms.launcher.vdso import ClockDriver, read_offset_ns
from nemesis.mechanisms.launcher_archive import (
    launcher_archive,
    launcher_command,
    why_no_clock,
    why_no_traps,
    why_not_attached,
)
from nemesis.mechanisms.shim import CONTROL_BYTES, HostFaults
from nemesis.target import ClockSkew
from tests.nemesis.mechanisms.launched import DEADLINE_S, NUMBER, RARE_CALLS, Program, wait_until

needs_traps = pytest.mark.skipif(why_no_traps() is not None, reason=str(why_no_traps()))
needs_clock = pytest.mark.skipif(why_no_clock() is not None, reason=str(why_no_clock()))
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make a static program with")


@pytest.fixture(params=[False, True], ids=["from the start", "from the fault on"])
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    """A program whose calls are reported from its start, or from its first fault on."""
    if request.param and why_not_attached() is not None:
        pytest.skip(str(why_not_attached()))
    made = Program(tmp_path, attaches=request.param)
    assert made.do("clock")  # it has started, and created its file
    yield made
    made.close()
    wait_until(lambda: made.helpers() == {})


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path, clock=True)
    assert made.do("clock")
    yield made
    made.close()
    wait_until(lambda: made.helpers() == {})


@needs_traps
@pytest.mark.parametrize("call", ["sync", "data-sync", "thread-sync", "file-system-sync", "sync-everything"])
def test_a_stalled_sync_returns_when_the_fault_is_healed(program: Program, call: str) -> None:
    assert program.do(call) == "ok"
    assert program.count().met == 0
    program.impair("stall-fsync")
    program.ask(call)
    wait_until(lambda: program.count().met == 1)
    assert program.counters().held == 1
    program.mend()
    assert program.answer() == "ok"
    assert program.do(call) == "ok" and program.counters().held == 1


@needs_traps
def test_a_stall_of_fsync_lets_writes_through_and_a_stall_of_all_lets_reads_through(program: Program) -> None:
    program.impair("stall-fsync")
    assert program.do("write") == program.do("grow") == program.do("create new") == "ok"
    program.mend()
    program.impair("stall")
    assert program.do("read") == "ok"
    program.ask("write")
    wait_until(lambda: program.counters().held == 1)
    program.mend()
    assert program.answer() == "ok"


@needs_traps
def test_a_slow_disk_delays_calls_and_counts_them(program: Program) -> None:
    program.impair("slow", delay_ms=150)
    before_s = time.monotonic()
    assert program.do("sync") == "ok"
    assert time.monotonic() - before_s >= 0.15
    assert program.counters().delayed == program.count().met == 1


@needs_traps
@pytest.mark.parametrize(
    ("kind", "failing", "working"),
    [
        (
            "error-fsync",
            ["sync", "data-sync", "file-system-sync"],
            ["write", "grow", "read", "create new", "file-system-sync /proc"],
        ),
        ("error-write", ["write", "grow", "create new", "rename file"], ["sync", "read"]),
        ("error-read", ["read"], ["sync", "write"]),
    ],
)
def test_disk_errors_affect_only_the_calls_of_their_kind(
    program: Program, kind: str, failing: list[str], working: list[str]
) -> None:
    program.impair(kind)
    assert {program.do(call) for call in failing} == {"Input/output error"}
    assert {program.do(call) for call in working} == {"ok"}
    assert program.counters().failed == program.count().met == len(failing)
    program.mend()
    assert {program.do(call) for call in failing} == {"ok"}


@needs_traps
@pytest.mark.parametrize("attaches", [False, True])
@pytest.mark.parametrize("kind", ["error-write", "error-read"])
def test_disk_errors_affect_rare_calls_too(tmp_path: Path, kind: str, attaches: bool) -> None:
    if attaches and why_not_attached() is not None:
        pytest.skip(str(why_not_attached()))
    argv = [sys.executable, "-I", "-S", "-c", RARE_CALLS, str(tmp_path / "data")]
    program = Program(tmp_path, argv, attaches=attaches)
    try:
        assert program.do("nothing") == "{}"
        program.impair(kind)
        outcomes = json.loads(program.do(kind))
        assert set(outcomes.values()) == {"Input/output error"}, outcomes
        assert program.count().failed == len(outcomes)
    finally:
        program.close()
    wait_until(lambda: program.helpers() == {})


@needs_traps
def test_a_full_disk_refuses_growth_only(program: Program) -> None:
    can_give_back = program.do("give-back")
    program.impair("full")
    assert program.do("grow") == program.do("create new") == "No space left on device"
    assert program.do("write") == program.do("sync") == "ok" and program.do("give-back") == can_give_back
    assert program.counters().refused == 2


@needs_traps
def test_files_outside_the_data_directory_are_neither_affected_nor_counted(program: Program, tmp_path: Path) -> None:
    calls = program.count().calls
    program.impair("error-fsync")
    assert program.do(f"elsewhere {tmp_path / 'outside'}") == "ok"
    assert program.do(f"elsewhere {program.root}-beside") == "ok"
    assert program.count().calls == calls and program.count().met == 0


@needs_traps
def test_killing_the_supervisor_releases_held_calls(program: Program) -> None:
    program.impair("stall-fsync")
    program.ask("sync")
    wait_until(lambda: program.counters().held == 1)
    os.kill(program.helpers()["fault-calls"], signal.SIGKILL)
    assert program.answer() == "ok"
    assert program.do("sync") == program.do("write") == "ok"


@needs_traps
def test_a_killed_program_leaves_no_helper_behind(program: Program) -> None:
    assert program.do("sync") == "ok"
    wait_until(lambda: {"fault-calls", "fault-guardian"} <= program.helpers().keys())
    program.impair("stall-fsync")
    program.ask("sync")
    wait_until(lambda: program.counters().held == 1)
    program.process.kill()
    wait_until(lambda: program.helpers() == {})


STATIC = r"""
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <sys/time.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char line[100];
    struct timespec wall, coarse, steady;
    struct timeval micro;
    int fd = open(argv[1], O_RDWR | O_CREAT, 0600);
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "sync", 4) == 0) {
            puts(fsync(fd) == 0 ? "ok" : "failed");
        } else {
            clock_gettime(CLOCK_REALTIME, &wall);
            clock_gettime(CLOCK_REALTIME_COARSE, &coarse);
            clock_gettime(CLOCK_MONOTONIC, &steady);
            gettimeofday(&micro, NULL);
            printf("%ld %ld %ld %ld %ld %ld\n", (long)wall.tv_sec, (long)coarse.tv_sec, (long)micro.tv_sec,
                   (long)time(NULL), (long)wall.tv_nsec, (long)steady.tv_sec);
        }
        fflush(stdout);
    }
}
"""


def static_program(directory: Path) -> list[str]:
    (directory / "static.c").write_text(STATIC)
    built = directory / "static"
    subprocess.run([str(COMPILER), "-static", "-o", str(built), str(directory / "static.c")], check=True)
    return [str(built), str(directory / "data" / "file")]


@needs_compiler
@needs_traps
def test_a_static_program_is_reached(tmp_path: Path) -> None:
    program = Program(tmp_path, static_program(tmp_path))
    try:
        assert program.do("sync") == "ok"
        program.impair("error-fsync")
        assert program.do("sync") == "failed"
        program.mend()
        program.impair("stall-fsync")
        program.ask("sync")
        wait_until(lambda: program.count().met == 2)
        program.mend()
        assert program.answer() == "ok"
    finally:
        program.close()


@needs_compiler
@needs_clock
def test_every_clock_function_of_a_static_program_is_moved(tmp_path: Path) -> None:
    program = Program(tmp_path, static_program(tmp_path), clock=True)
    try:
        before = [int(word) for word in program.do("clock").split()]
        program.skew(ClockSkew(offset_ms=-7_200_500))
        moved = [int(word) for word in program.do("clock").split()]
        assert all(abs(after - earlier + 7200) < 600 for after, earlier in zip(moved[:4], before[:4], strict=True))
        assert 0 <= moved[4] < 1_000_000_000 and 0 <= moved[5] - before[5] < 600
        program.skew(None)
        healed = [int(word) for word in program.do("clock").split()]
        assert all(0 <= after - earlier < 600 for after, earlier in zip(healed[:4], before[:4], strict=True))
    finally:
        program.close()


def offset_s(program: Program, question: str = "clock") -> float:
    return (int(program.do(question).split()[0]) - time.time_ns()) / 1e9


@needs_clock
def test_a_clock_jumps_and_is_restored(clocked: Program) -> None:
    assert clocked.do("clock") and read_offset_ns(clocked.process.pid) is None
    steady_ns = int(clocked.do("clock").split()[1])
    for offset_ms in (3_600_000, -7_200_000):
        clocked.skew(ClockSkew(offset_ms=offset_ms))
        assert read_offset_ns(clocked.process.pid) == offset_ms * 1_000_000
        assert abs(offset_s(clocked) - offset_ms / 1000) < 600
        assert abs(offset_s(clocked, "fork-clock") - offset_ms / 1000) < 600
        assert abs(int(clocked.do("clock-us")) - time.time() - offset_ms / 1000) < 600
    later_ns = int(clocked.do("clock").split()[1])
    assert 0 < later_ns - steady_ns < 600 * 10**9
    clocked.skew(None)
    assert abs(offset_s(clocked)) < 600
    assert read_offset_ns(clocked.process.pid) is None, "the kernel's own code is back"
    clocked.skew(ClockSkew(offset_ms=-3_600_000))
    assert abs(offset_s(clocked) + 3600) < 600


@needs_clock
def test_readings_of_a_moved_clock_are_counted(clocked: Program) -> None:
    """Only those of the wall clock, and none while it is not moved."""
    assert clocked.do("clock") and clocked.count().clock_reads == 0
    clocked.skew(ClockSkew(offset_ms=3_600_000))
    before = clocked.count().clock_reads
    time.sleep(0.05)
    assert clocked.count().clock_reads == before, "only the driver reads the clock"
    for _ in range(20):
        clocked.do("clock")
    wait_until(lambda: clocked.count().clock_reads >= before + 20)
    assert clocked.count().clock_reads == before + 20
    clocked.skew(None)
    clocked.do("clock")
    assert clocked.count().clock_reads == before + 20


MANY_THREADS = """
import signal, sys, threading, time
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
def read():
    while True:
        time.time()
for _ in range(4):
    threading.Thread(target=read, daemon=True).start()
for line in sys.stdin:
    print(time.time_ns(), flush=True)
"""


@needs_clock
def test_a_busy_program_with_threads_and_signals_is_patched_repeatedly(tmp_path: Path) -> None:
    """Its threads are stopped at any instruction; its first one is interrupted in a system call."""
    program = Program(tmp_path, [sys.executable, "-I", "-S", "-c", MANY_THREADS], clock=True)
    try:
        program.do("clock")
        for number in range(10):
            program.skew(ClockSkew(offset_ms=3_600_000))
            assert abs(offset_s(program) - 3600) < 600, number
            program.skew(None)
            assert abs(offset_s(program)) < 600, number
        assert program.count().clock_reads != UNCOUNTED and program.count().clock_reads > 20
    finally:
        program.close()


@needs_clock
def test_a_clock_with_a_read_only_vdso_is_moved_and_its_readings_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vdso, "_make_writable", lambda *_, **__: False)
    path = tmp_path / "control"
    faults = HostFaults()
    faults.add_skew("f1", ClockSkew(offset_ms=-3_600_000), wall_ns=0, monotonic_ns=0)
    path.write_bytes(faults.pack().ljust(CONTROL_BYTES, b"\0"))
    control = Control(str(path))
    control.claim(NUMBER)
    code = "import sys, time\nfor line in sys.stdin: print(time.time(), flush=True)"
    argv = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:

        def clock_s() -> float:
            assert running.stdin is not None and running.stdout is not None
            running.stdin.write("\n")
            running.stdin.flush()
            return float(running.stdout.readline())

        clock_s()  # by now it is executed: before that it has no vDSO, and the driver would have to retry
        driver = ClockDriver(control, running.pid)
        for _ in range(2):
            driver._apply(*control.wall_clock_slots())
            assert abs(clock_s() - time.time() + 3600) < 600
        running.stdin.close()
    assert parse_programs(path.read_bytes())[NUMBER].clock_reads == UNCOUNTED


@needs_clock
def test_a_program_executed_during_a_skew_has_the_skew_too(clocked: Program) -> None:
    clocked.skew(ClockSkew(offset_ms=86_400_000))
    expected_s = int(time.time()) + 86_400
    assert abs(int(clocked.do(f"child-clock {expected_s}")) - expected_s) < 600


@needs_clock
def test_a_drift_accumulates_and_a_strobe_alternates(clocked: Program) -> None:
    clocked.skew(ClockSkew(rate_ppm=500_000))
    first_s = offset_s(clocked)
    wait_until(lambda: offset_s(clocked) > first_s + 0.2)
    clocked.skew(ClockSkew(strobe_ms=3_600_000, strobe_period_ms=400))
    wait_until(lambda: offset_s(clocked) > 3000)
    wait_until(lambda: offset_s(clocked) < 600)
    assert clocked.count().clock_failed == 0


WITH_A_HELPER = """
import ctypes, os, time
def child(name):
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
        os.write(done, b"+")
        time.sleep(600)
    os.read(ready, 1)
    return pid
print(child(b"fault-calls"), child(b"ordinary"), flush=True)
time.sleep(600)
"""


@needs_clock
def test_a_process_tree_excludes_the_launcher_s_own_processes() -> None:
    """They are the program's children until the process that forked them has ended, which takes long on a busy
    machine. A clock driver that watched itself would never end."""
    running = subprocess.Popen([sys.executable, "-c", WITH_A_HELPER], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert running.stdout is not None
        helper, ordinary = map(int, running.stdout.readline().split())
        tree = ProcessTree(running.pid)
        tree.look()
        assert ordinary in tree.processes and helper not in tree.processes
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


DAEMON_CLOCK = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        for _ in sys.stdin:
            print(int(time.time()), flush=True)
    os._exit(0)
os.wait()
time.sleep(600)
"""


@needs_clock
def test_the_clock_of_a_daemon_that_was_orphaned_at_once_is_moved(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-S", "-c", DAEMON_CLOCK]
    program = Program(tmp_path, argv, clock=True, mark="test-daemon-clock")
    daemon = int(program.answer())
    try:
        assert abs(int(program.do("")) - time.time()) < 600
        program.skew(ClockSkew(offset_ms=3_600_000))
        assert abs(int(program.do("")) - time.time() - 3600) < 600
        program.skew(None)
        assert abs(int(program.do("")) - time.time()) < 600
    finally:
        os.kill(daemon, signal.SIGKILL)  # otherwise it would run until the end of its input
        program.close()


@needs_clock
def test_a_program_keeps_its_skew_when_the_clock_driver_is_killed(clocked: Program) -> None:
    clocked.skew(ClockSkew(offset_ms=3_600_000))
    os.kill(clocked.helpers()["fault-clock"], signal.SIGKILL)
    assert abs(offset_s(clocked) - 3600) < 600


def test_errors_of_the_launcher_are_reported_in_one_line(tmp_path: Path) -> None:
    archive = tmp_path / "launcher.pyz"
    archive.write_bytes(launcher_archive())
    control = tmp_path / "control"
    control.write_bytes(b"rubbish".ljust(CONTROL_BYTES, b"\0"))
    for command, status, said in (
        (launcher_command(sys.executable, str(archive), str(control), ["true"]), 126, "is not a control file"),
        (launcher_command(sys.executable, str(archive), str(tmp_path / "none"), ["true"]), 126, "No such file"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == 1
    control.write_bytes(HostFaults().pack().ljust(CONTROL_BYTES, b"\0"))
    command = launcher_command(sys.executable, str(archive), str(control), [str(tmp_path / "no-such-program")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 127 and "no-such-program: No such file" in done.stderr
