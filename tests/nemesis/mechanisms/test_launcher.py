"""Programs under the launcher: calls held, delayed and refused, and clocks moved, without a library."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemesis.mechanisms.launcher import vdso
from nemesis.mechanisms.launcher.control import UNCOUNTED, Control, ProgramCounts, parse_programs
from nemesis.mechanisms.launcher.vdso import ClockDriver, read_offset_ns
from nemesis.mechanisms.launcher_archive import launcher_archive, launcher_command, why_no_clock, why_no_traps
from nemesis.mechanisms.shim import CONTROL_BYTES, Counters, HostFaults, parse_counters, trial_control
from nemesis.target import ClockSkew, DiskFault

needs_traps = pytest.mark.skipif(why_no_traps() is not None, reason=str(why_no_traps()))
needs_clock = pytest.mark.skipif(why_no_clock() is not None, reason=str(why_no_clock()))
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make a static program with")
DEADLINE_S = 60.0
NUMBER = 130

CHILD = """
import ctypes, os, subprocess, sys, threading, time
root = sys.argv[1]
fd = os.open(os.path.join(root, "file"), os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"x" * 100, 0)
def attempt(work):
    try:
        work()
        return "ok"
    except OSError as error:
        return error.strerror
def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(attempt(work)))
    thread.start()
    thread.join()
    return found[0]
def grow():
    os.pwrite(fd, b"x" * 10, os.fstat(fd).st_size)
DO = {
    "sync": lambda _: attempt(lambda: os.fsync(fd)),
    "data-sync": lambda _: attempt(lambda: os.fdatasync(fd)),
    "thread-sync": lambda _: in_thread(lambda: os.fsync(fd)),
    "write": lambda _: attempt(lambda: os.pwrite(fd, b"y" * 10, 0)),
    "grow": lambda _: attempt(grow),
    "read": lambda _: attempt(lambda: os.pread(fd, 10, 0)),
    "create": lambda name: attempt(lambda: os.close(os.open(os.path.join(root, name), os.O_CREAT | os.O_WRONLY))),
    "rename": lambda name: attempt(lambda: os.rename(os.path.join(root, name), os.path.join(root, name + "2"))),
    "elsewhere": lambda path: attempt(lambda: os.fsync(os.open(path, os.O_CREAT | os.O_RDWR))),
    "clock": lambda _: f"{time.time_ns()} {time.monotonic_ns()}",
    "clock-us": lambda _: str(ctypes.CDLL(None).time(None)),
    "child-clock": lambda _: subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         "import time\\nt = time.monotonic()\\nwhile abs(time.time() - %s) > 600 and time.monotonic() - t < 30: "
         "time.sleep(0.01)\\nprint(int(time.time()))" % _],
        stdout=subprocess.PIPE, text=True).stdout.strip(),
    "fork-clock": lambda _: fork_clock(),
}
def fork_clock():
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.write(theirs, str(time.time_ns()).encode())
        os._exit(0)
    os.wait()
    return os.read(ours, 100).decode()
for line in sys.stdin:
    name, _, argument = line.strip().partition(" ")
    print(DO[name](argument), flush=True)
"""


class Program:
    """A program under the launcher, and the control file of its host."""

    def __init__(self, directory: Path, argv: list[str] | None = None, *, clock: bool = False) -> None:
        self.root = directory / "data"
        self.root.mkdir()
        self.control = directory / "control"
        self.faults = HostFaults()
        self.control.write_bytes(self.faults.pack().ljust(CONTROL_BYTES, b"\0"))
        archive = directory / "launcher.pyz"
        archive.write_bytes(launcher_archive())
        program = argv or [sys.executable, "-I", "-S", "-c", CHILD, str(self.root)]
        traps = [] if clock else ["sync", "write", "read"]
        self.process = subprocess.Popen(
            launcher_command(
                sys.executable, str(archive), str(self.control), program,
                root=str(self.root), traps=traps, moves_clock=clock, number=NUMBER,
            ),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def apply(self) -> None:
        descriptor = os.open(self.control, os.O_WRONLY)
        os.pwrite(descriptor, self.faults.pack(), 0)
        os.close(descriptor)

    def impair(self, kind: str, delay_ms: int = 0) -> None:
        self.faults.add_disk_fault("fault", DiskFault(kind=kind, delay_ms=delay_ms))
        self.apply()

    def mend(self) -> None:
        self.faults.remove_disk_fault("fault")
        self.apply()

    def skew(self, skew: ClockSkew | None) -> None:
        """Move the clock, and wait until the driver says that it has."""
        if skew is None:
            self.faults.remove_skew("fault", monotonic_ns=0)
        else:
            self.faults.add_skew("fault", skew, wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
        self.apply()
        generation = self.faults.generation
        wait_until(lambda: self.count().clock_generation == generation)

    def read(self) -> bytes:
        return self.control.read_bytes()

    def counters(self) -> Counters:
        return parse_counters(self.read())

    def count(self) -> ProgramCounts:
        return parse_programs(self.read())[NUMBER]

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, line: str) -> str:
        self.ask(line)
        return self.answer()

    def helpers(self) -> dict[str, int]:
        """The launcher's own processes for this program, by name."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    command = Path("/proc", name, "cmdline").read_bytes()
                    if str(self.control).encode() in command and int(name) != self.process.pid:
                        found[Path("/proc", name, "comm").read_text().strip()] = int(name)
                except OSError:
                    continue
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.01)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    assert made.do("clock")  # it has started, and made its file
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
@pytest.mark.parametrize("call", ["sync", "data-sync", "thread-sync"])
def test_a_stalled_sync_returns_when_the_fault_is_over(program: Program, call: str) -> None:
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
def test_a_slow_disk_takes_its_time_and_is_counted(program: Program) -> None:
    program.impair("slow", delay_ms=150)
    before_s = time.monotonic()
    assert program.do("sync") == "ok"
    assert time.monotonic() - before_s >= 0.15
    assert program.counters().delayed == program.count().met == 1


@needs_traps
@pytest.mark.parametrize(
    ("kind", "failing", "working"),
    [
        ("error-fsync", ["sync", "data-sync"], ["write", "grow", "read", "create new"]),
        ("error-write", ["write", "grow", "create new", "rename file"], ["sync", "read"]),
        ("error-read", ["read"], ["sync", "write"]),
    ],
)
def test_errors_hit_their_calls_only(program: Program, kind: str, failing: list[str], working: list[str]) -> None:
    program.impair(kind)
    assert {program.do(call) for call in failing} == {"Input/output error"}
    assert {program.do(call) for call in working} == {"ok"}
    assert program.counters().failed == program.count().met == len(failing)
    program.mend()
    assert {program.do(call) for call in failing} == {"ok"}


@needs_traps
def test_a_full_disk_refuses_growth_only(program: Program) -> None:
    program.impair("full")
    assert program.do("grow") == program.do("create new") == "No space left on device"
    assert program.do("write") == program.do("sync") == "ok"
    assert program.counters().refused == 2


@needs_traps
def test_files_elsewhere_are_not_touched_nor_counted(program: Program, tmp_path: Path) -> None:
    calls = program.count().calls
    program.impair("error-fsync")
    assert program.do(f"elsewhere {tmp_path / 'outside'}") == "ok"
    assert program.do(f"elsewhere {program.root}-beside") == "ok"
    assert program.count().calls == calls and program.count().met == 0


@needs_traps
def test_a_killed_supervisor_holds_nobody_up(program: Program) -> None:
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
def test_a_clock_jumps_and_comes_back(clocked: Program) -> None:
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
    """Those of the wall clock, by all processes, and none while nothing is moved."""
    assert clocked.do("clock") and clocked.count().clock_reads == 0
    clocked.skew(ClockSkew(offset_ms=3_600_000))
    before = clocked.count().clock_reads
    time.sleep(0.05)
    assert clocked.count().clock_reads == before, "nobody reads the clock but the driver"
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
def test_a_busy_program_of_many_threads_and_signals_is_patched_again_and_again(tmp_path: Path) -> None:
    """Its threads stand anywhere when they are stopped; its first one is interrupted in a system call."""
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
def test_a_vdso_that_the_program_may_not_write_to_is_moved_and_not_counted(
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

        clock_s()  # by then it is executed: before, there is no vDSO, which the driver would come back for
        driver = ClockDriver(control, running.pid)
        for _ in range(2):
            driver._apply(*control.wall_clock_slots())
            assert abs(clock_s() - time.time() + 3600) < 600
        running.stdin.close()
    assert parse_programs(path.read_bytes())[NUMBER].clock_reads == UNCOUNTED


@needs_clock
def test_a_program_that_is_executed_meanwhile_has_the_skew_too(clocked: Program) -> None:
    clocked.skew(ClockSkew(offset_ms=86_400_000))
    expected_s = int(time.time()) + 86_400
    assert abs(int(clocked.do(f"child-clock {expected_s}")) - expected_s) < 600


@needs_clock
def test_a_drift_adds_up_and_a_strobe_comes_and_goes(clocked: Program) -> None:
    clocked.skew(ClockSkew(rate_ppm=500_000))
    first_s = offset_s(clocked)
    wait_until(lambda: offset_s(clocked) > first_s + 0.2)
    clocked.skew(ClockSkew(strobe_ms=3_600_000, strobe_period_ms=400))
    wait_until(lambda: offset_s(clocked) > 3000)
    wait_until(lambda: offset_s(clocked) < 600)


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
def test_a_driver_waits_for_the_program_and_not_for_the_launcher_s_own_processes(tmp_path: Path) -> None:
    """They are the program's children until who forked them has ended, which takes long on a busy machine. One that
    watched itself never ended."""
    control_path = tmp_path / "control"
    control_path.write_bytes(trial_control())
    running = subprocess.Popen([sys.executable, "-c", WITH_A_HELPER], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert running.stdout is not None
        helper, ordinary = map(int, running.stdout.readline().split())
        driver = ClockDriver(Control(str(control_path)), running.pid)
        for _ in range(2):
            driver._look_for_children()
        assert ordinary in driver._processes and helper not in driver._processes
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


@needs_clock
def test_a_driver_that_is_killed_leaves_the_program_alone(clocked: Program) -> None:
    clocked.skew(ClockSkew(offset_ms=3_600_000))
    os.kill(clocked.helpers()["fault-clock"], signal.SIGKILL)
    assert abs(offset_s(clocked) - 3600) < 600


def test_wrong_arguments_are_said_in_one_line(tmp_path: Path) -> None:
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
