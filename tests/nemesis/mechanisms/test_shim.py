"""The shim in real programs: clocks and disks that are wrong, and the layout of the control file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemesis.mechanisms import shim
from nemesis.mechanisms.launcher.control import parse_programs
from nemesis.mechanisms.shim import (
    CLOCK_SLOTS,
    CONTROL_BYTES,
    HostFaults,
    ShimError,
    build_shim,
    parse_counters,
    shim_environment,
    why_no_shim,
)
from nemesis.target import ClockSkew, DiskFault
from tests.nemesis.mechanisms.launched import RARE_CALLS

NO_SHIM = why_no_shim()
needs_shim = pytest.mark.skipif(NO_SHIM is not None, reason=str(NO_SHIM))
COMPILER = shutil.which("cc") or shutil.which("gcc")

NUMBER = 66

CHILD = """
import ctypes, mmap, os, sys, time
root = sys.argv[1]
path = os.path.join(root, "file")
fd = os.open(path, os.O_RDWR | os.O_CREAT)
libc = ctypes.CDLL(None, use_errno=True)
def attempt(work):
    try:
        work()
        return "ok"
    except OSError as error:
        return error.strerror
def sync_file_system(path):
    fd = os.open(path, os.O_RDONLY)
    if libc.syncfs(fd):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
for line in sys.stdin:
    word = line.split()
    if word[0] == "clock":
        print(time.time_ns(), time.monotonic_ns(), flush=True)
    elif word[0] == "write":
        print(attempt(lambda: os.pwrite(fd, b"x" * 10, int(word[1]))), flush=True)
    elif word[0] == "sync":
        print(attempt(lambda: os.fsync(fd)), flush=True)
    elif word[0] == "punch":
        begin, length = map(ctypes.c_long, map(int, word[1:]))
        done = libc.fallocate(fd, 0x03, begin, length)  # a hole, and the length as it was
        print(os.strerror(ctypes.get_errno()) if done else "ok", flush=True)
    elif word[0] == "sync-file-system":
        print(attempt(lambda: sync_file_system(word[1] if word[1:] else path)), flush=True)
    elif word[0] == "sync-everything":
        print(attempt(os.sync), flush=True)
    elif word[0] == "map-sync":
        mapped = mmap.mmap(fd, 0)
        print(attempt(mapped.flush), flush=True)
    elif word[0] == "read":
        print(attempt(lambda: os.pread(fd, 10, 0)), flush=True)
    elif word[0] == "create":
        print(attempt(lambda: os.close(os.open(os.path.join(root, word[1]), os.O_CREAT | os.O_WRONLY))), flush=True)
    elif word[0] == "elsewhere":
        print(attempt(lambda: open(word[1], "w").write("x")), flush=True)
"""


class Child:
    """A Python program under the shim that executes commands, one per line."""

    def __init__(self, directory: Path, *, program: int = 0, script: str = CHILD) -> None:
        self.root = directory / "data"
        self.root.mkdir()
        self.control = directory / "control"
        library = directory / "shim.so"
        library.write_bytes(build_shim())
        self.faults = HostFaults()
        self.control.write_bytes(self.faults.pack().ljust(CONTROL_BYTES, b"\0"))
        environment: Mapping[str, str] = {
            **os.environ, **shim_environment(str(library), str(self.control), str(self.root), program=program)
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script, str(self.root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def apply(self) -> None:
        descriptor = os.open(self.control, os.O_WRONLY)
        os.pwrite(descriptor, self.faults.pack(), 0)
        os.close(descriptor)

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, words: str) -> str:
        self.tell(words)
        return self.answer()

    def offset_s(self) -> float:
        """The child's wall clock less ours."""
        before = time.time_ns()
        wall = int(self.ask("clock").split()[0])
        return (wall - (before + time.time_ns()) / 2) / 1e9

    def monotonic_s(self) -> float:
        return int(self.ask("clock").split()[1]) / 1e9

    def skew(self, fault_id: str, **skew: object) -> None:
        self.faults.add_skew(
            fault_id,
            ClockSkew(**skew),
            wall_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),  # type: ignore[arg-type]
        )
        self.apply()

    def unskew(self, fault_id: str) -> None:
        self.faults.remove_skew(fault_id, monotonic_ns=time.monotonic_ns(), margin_ns=50_000_000)
        self.apply()

    def impair(self, kind: str, delay_ms: int = 0) -> None:
        self.faults.add_disk_fault("d", DiskFault(kind=kind, delay_ms=delay_ms))
        self.apply()

    def mend(self) -> None:
        self.faults.remove_disk_fault("d")
        self.apply()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(tmp_path)
    made.ask("clock")  # it has started, and opened its file
    yield made
    made.process.kill()
    made.process.communicate()


@needs_shim
def test_wall_clocks_jump_and_monotonic_ones_do_not(child: Child) -> None:
    before_s = child.monotonic_s() - time.monotonic()
    assert abs(child.offset_s()) < 0.5
    child.skew("f1", offset_ms=3_600_000)
    assert 3599 < child.offset_s() < 3601
    child.skew("f2", offset_ms=-7_200_000)
    assert -3601 < child.offset_s() < -3599
    assert abs(child.monotonic_s() - time.monotonic() - before_s) < 0.5
    child.unskew("f1")
    assert -7201 < child.offset_s() < -7199
    child.unskew("f2")
    assert abs(child.offset_s()) < 0.5


@needs_shim
@pytest.mark.parametrize(("offset", "other_inode", "expected"), [(5, 0, 1), (10, 0, 0), (5, 1, 0)])
def test_reads_of_a_flipped_byte_are_counted(tmp_path: Path, offset: int, other_inode: int, expected: int) -> None:
    """The child reads the first ten bytes of its file, and no others."""
    child = Child(tmp_path, program=NUMBER)
    try:
        child.ask("write 0")
        inode = os.stat(child.root / "file").st_ino + other_inode
        child.faults.watch_flipped("f1", inode=inode, offset=offset)
        child.apply()
        assert child.ask("read") == "ok"
        assert parse_programs(child.control.read_bytes())[NUMBER].flipped_reads == expected
        child.faults.remove_disk_fault("f1")
        child.apply()
        child.ask("read")
        assert parse_programs(child.control.read_bytes())[NUMBER].flipped_reads == expected
    finally:
        child.process.kill()
        child.process.communicate()


@needs_shim
def test_wall_clocks_drift_and_strobe(child: Child) -> None:
    def look() -> tuple[float, float, float]:
        before_s = time.time()
        wall_s = int(child.ask("clock").split()[0]) / 1e9
        return before_s, wall_s, time.time()

    child.skew("drift", rate_ppm=500_000)
    first, deadline_s = look(), time.monotonic() + 30
    while True:  # until the elapsed time is known to a tenth: on a busy machine a look takes long
        last = look()
        least_s, most_s = last[0] - first[2], last[2] - first[0]
        if least_s > 0.4 and most_s < 1.1 * least_s:
            break
        assert time.monotonic() < deadline_s, (first, last)
    assert 1.5 * least_s - 0.001 <= last[1] - first[1] <= 1.5 * most_s + 0.001
    child.unskew("drift")
    child.skew("strobe", strobe_ms=-100_000, strobe_period_ms=20)
    deadline_s, seen = time.monotonic() + 10, set()
    while time.monotonic() < deadline_s and len(seen) < 2:
        seen.add(round(child.offset_s(), -1))
    assert seen == {0, -100}


@needs_shim
@pytest.mark.parametrize("rate_ppm", [-750_000, 2_000_000])
def test_monotonic_clocks_never_go_back_if_a_change_takes_effect_late(child: Child, rate_ppm: int) -> None:
    margin_ns = 10_000_000_000  # longer than all of this takes
    child.faults.add_skew(
        "m", ClockSkew(rate_ppm=rate_ppm, affects_monotonic=True),
        wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns(), margin_ns=margin_ns,
    )  # fmt: skip
    time.sleep(0.2)
    before_s = child.monotonic_s()
    child.apply()
    in_force_s = child.monotonic_s()
    child.faults.remove_skew("m", monotonic_ns=time.monotonic_ns(), margin_ns=margin_ns)
    time.sleep(0.2)
    at_end_s = child.monotonic_s()
    child.apply()
    assert before_s < in_force_s < at_end_s < child.monotonic_s()


@needs_shim
@pytest.mark.parametrize("rate_ppm", [-500_000, 500_000])
def test_monotonic_clocks_change_their_rate_and_never_go_back(child: Child, rate_ppm: int) -> None:
    seen: list[float] = []

    def look() -> tuple[float, float, float]:
        before_s = time.monotonic()
        seen.append(child.monotonic_s())
        return before_s, seen[-1], time.monotonic()

    def watch() -> tuple[float, float]:
        """The least and the greatest rate that two looks, 0.4 s apart, leave open."""
        first, last = look(), look()
        while last[0] < first[0] + 0.4:
            last = look()
        gained_s = last[1] - first[1]
        return gained_s / (last[2] - first[0]), gained_s / (last[0] - first[2])

    child.skew("m", rate_ppm=rate_ppm, affects_monotonic=True)
    least, greatest = watch()
    assert least - 0.01 <= 1 + rate_ppm / 1e6 <= greatest + 0.01
    assert abs(child.offset_s()) < 0.5
    child.unskew("m")
    least, greatest = watch()
    assert least - 0.01 <= 1 <= greatest + 0.01
    assert seen == sorted(seen)


@needs_shim
def test_a_build_removes_the_directories_of_killed_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"splitbrain-shim-{dead.pid}-x", f"splitbrain-shim-{os.getpid()}-x", "splitbrain-shim-mine"):
        (tmp_path / name).mkdir()
    build_shim.__wrapped__()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([f"splitbrain-shim-{os.getpid()}-x", "splitbrain-shim-mine"])


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shim's sources, without a prebuilt shim."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name, content in shim.shim_sources().items():
        (copy / name).write_bytes(content)
    monkeypatch.setattr(shim, "_DIRECTORY", str(copy))
    return copy


def test_without_a_compiler_the_error_names_the_remedy(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sources))
    with pytest.raises(ShimError, match=r"apt-get install gcc libc6-dev; without root, in a checkout: make shim"):
        build_shim.__wrapped__()


def test_a_killed_compiler_leaves_no_files(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose caller is interrupted does not remove its temporary files."""
    (sources / "temporary").mkdir()
    (sources / "cc").write_text('#!/bin/sh\n: > "${TMPDIR:-/tmp}/cc1.o"\nkill -9 $$\n')
    (sources / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(sources), prepend=":")
    monkeypatch.setenv("TMPDIR", str(sources / "temporary"))
    with pytest.raises(ShimError, match="cannot build"):
        build_shim.__wrapped__()
    assert [path.name for path in (sources / "temporary").iterdir()] == []


@needs_shim
def test_a_prebuilt_shim_needs_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_shim()
    monkeypatch.setenv("PATH", str(sources))
    (sources / "built").mkdir()
    (sources / "built" / shim.prebuilt_name(os.uname().machine)).write_bytes(library)
    assert build_shim.__wrapped__() == library
    monkeypatch.setattr(shim, "build_shim", build_shim.__wrapped__)
    assert why_no_shim.__wrapped__() is None


def test_a_shim_prebuilt_from_other_sources_is_not_used(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "built").mkdir()
    name = shim.prebuilt_name(os.uname().machine)
    (sources / "built" / name).write_bytes(b"old")
    with open(sources / "clock.c", "a") as file:
        file.write("/* changed */\n")
    shim._source_digest.cache_clear()
    try:
        assert shim.prebuilt_name(os.uname().machine) != name
        assert shim.prebuilt_shim(os.uname().machine) is None
    finally:
        shim._source_digest.cache_clear()


@needs_shim
@pytest.mark.parametrize(
    ("kind", "outcomes"),
    [
        ("full", {"write 0": "ok", "write 1000": "No space left on device", "sync": "ok", "read": "ok",
                  "create new": "No space left on device"}),
        ("error-write", {"write 0": "Input/output error", "sync": "ok", "map-sync": "ok", "read": "ok"}),
        ("error-fsync", {"write 0": "ok", "sync": "Input/output error", "map-sync": "Input/output error",
                         "sync-file-system": "Input/output error", "read": "ok"}),
        ("error-read", {"write 0": "ok", "sync": "ok", "read": "Input/output error"}),
    ],
)  # fmt: skip
def test_disk_faults_affect_only_the_operations_of_their_kind(
    child: Child, tmp_path: Path, kind: str, outcomes: dict[str, str]
) -> None:
    assert child.ask("write 0") == "ok"
    child.impair(kind)
    assert {words: child.ask(words) for words in outcomes} == outcomes
    assert child.ask(f"elsewhere {tmp_path / 'outside'}") == "ok"
    child.mend()
    assert all(child.ask(words) == "ok" for words in outcomes)
    counters = parse_counters(child.control.read_bytes())
    assert counters.refused + counters.failed == sum(outcome != "ok" for outcome in outcomes.values())


@needs_shim
@pytest.mark.parametrize("kind", ["error-write", "error-read"])
def test_disk_errors_affect_rare_calls_too(tmp_path: Path, kind: str) -> None:
    child = Child(tmp_path, script=RARE_CALLS)
    try:
        assert child.ask("nothing") == "{}"
        child.impair(kind)
        outcomes = json.loads(child.ask(kind))
        assert set(outcomes.values()) == {"Input/output error"}, outcomes
        assert parse_counters(child.control.read_bytes()).failed == len(outcomes)
    finally:
        child.process.kill()
        child.process.communicate()


@needs_shim
@pytest.mark.parametrize(
    ("kind", "stuck", "free"),
    [
        *(("stall-fsync", sync, "write 0") for sync in ("sync", "map-sync", "sync-file-system", "sync-everything")),
        ("stall", "write 0", "read"),
    ],
)
def test_a_stalled_operation_completes_when_the_fault_is_healed(child: Child, kind: str, stuck: str, free: str) -> None:
    assert child.ask("write 0") == "ok"
    child.impair(kind)
    assert child.ask(free) == "ok"
    child.tell(stuck)
    deadline_s = time.monotonic() + 10
    while parse_counters(child.control.read_bytes()).held == 0:
        assert time.monotonic() < deadline_s, "the operation did not reach the disk"
        time.sleep(0.005)
    child.mend()
    assert child.answer() == "ok"


@needs_shim
def test_syncs_of_other_file_systems_are_left_alone(child: Child) -> None:
    """And sync() cannot return an error: where syncs fail it is counted as failed."""
    child.impair("error-fsync")
    assert child.ask("sync-file-system /proc") == "ok"
    assert parse_counters(child.control.read_bytes()).failed == 0
    assert child.ask(f"sync-file-system {child.control}") == "Input/output error", (
        "it is on the file system of the data directory"
    )
    assert child.ask("sync-everything") == "ok"
    assert parse_counters(child.control.read_bytes()).failed == 2


@needs_shim
def test_a_stalled_program_can_be_killed(child: Child) -> None:
    child.impair("stall")
    child.tell("write 0")
    child.process.kill()
    assert child.process.wait(timeout=10) == -9


@needs_shim
def test_a_slow_disk_delays_calls_and_counts_them(child: Child) -> None:
    child.impair("slow", delay_ms=120)
    begin_s = time.monotonic()
    assert child.ask("sync") == "ok"
    assert time.monotonic() - begin_s >= 0.12
    assert parse_counters(child.control.read_bytes()).delayed == 1


@needs_shim
def test_asyncio_timers_are_unaffected_by_a_wrong_wall_clock(tmp_path: Path) -> None:
    """Timers use the monotonic clock: a program whose wall clock is hours behind sleeps as long as requested."""
    child = Child(tmp_path)
    child.process.kill()
    child.process.communicate()
    child.skew("f", offset_ms=-10_000_000)
    script = (
        "import asyncio, time\n"
        "async def main():\n"
        "    begin = time.monotonic()\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(time.monotonic() - begin)\n"
        "asyncio.run(main())"
    )
    environment = shim_environment(str(tmp_path / "shim.so"), str(child.control), str(child.root))

    async def main() -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        return (await asyncio.wait_for(process.communicate(), 20))[0].decode()

    assert 0.09 < float(asyncio.run(main())) < 5


WAITS = """
import ctypes, os, sys, threading, time
libc, out = ctypes.CDLL(None, use_errno=True), {}
class Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
class Timer(ctypes.Structure):
    _fields_ = [("every", Time), ("value", Time)]
def at(seconds, clock=time.CLOCK_REALTIME):
    return Time(*divmod(time.clock_gettime_ns(clock) + int(seconds * 1e9), 10**9))
def zeros():
    return ctypes.create_string_buffer(256)
def condition(deadline, *id):
    mutex, cond = zeros(), zeros()
    libc.pthread_mutex_lock(mutex)
    name = libc.pthread_cond_clockwait if id else libc.pthread_cond_timedwait
    return name(cond, mutex, *id, ctypes.byref(deadline))
def monotonic_condition(deadline):
    mutex, cond, attributes = zeros(), zeros(), zeros()
    libc.pthread_condattr_init(attributes)
    libc.pthread_condattr_setclock(attributes, time.CLOCK_MONOTONIC)
    libc.pthread_cond_init(cond, attributes)
    libc.pthread_mutex_lock(mutex)
    return libc.pthread_cond_timedwait(cond, mutex, ctypes.byref(deadline))
def lock(kind, take, wait, *id):
    made = zeros()
    other = threading.Thread(target=getattr(libc, "pthread_" + take), args=[made])
    other.start()
    other.join()
    return getattr(libc, "pthread_" + wait)(made, *id, ctypes.byref(deadline))
def timer(deadline, id):
    fd = libc.timerfd_create(id, 0)
    libc.timerfd_settime(fd, 1, ctypes.byref(Timer(Time(0, 0), deadline)), None)
    return len(os.read(fd, 8))
def semaphore(name, *id):
    made = zeros()
    libc.sem_init(made, 0, 0)
    return name(made, *id, ctypes.byref(deadline))
def futex(deadline, by_wall):
    number = {"x86_64": 202, "aarch64": 98}[os.uname().machine]  # FUTEX_WAIT_BITSET, perhaps by the wall clock
    return libc.syscall(number, zeros(), 9 | 256 * by_wall, 0, ctypes.byref(deadline), None, -1)
WALL, STEADY = time.CLOCK_REALTIME, time.CLOCK_MONOTONIC
if sys.argv[1] == "wall":
    calls = {
        "condition": lambda: condition(deadline), "condition by clock": lambda: condition(deadline, WALL),
        "mutex": lambda: lock("mutex", "mutex_lock", "mutex_timedlock"),
        "mutex by clock": lambda: lock("mutex", "mutex_lock", "mutex_clocklock", WALL),
        "read lock": lambda: lock("rwlock", "rwlock_wrlock", "rwlock_timedrdlock"),
        "write lock": lambda: lock("rwlock", "rwlock_rdlock", "rwlock_timedwrlock"),
        "semaphore": lambda: semaphore(libc.sem_timedwait),
        "sleep": lambda: libc.clock_nanosleep(WALL, 1, ctypes.byref(deadline), None),
        "timer": lambda: timer(deadline, WALL),
        "futex": lambda: futex(deadline, True),
    }
else:
    calls = {
        "condition": lambda: monotonic_condition(deadline),
        "condition by clock": lambda: condition(deadline, STEADY),
        "semaphore by clock": lambda: semaphore(libc.sem_clockwait, STEADY),
        "sleep": lambda: libc.clock_nanosleep(STEADY, 1, ctypes.byref(deadline), None),
        "timer": lambda: timer(deadline, STEADY),
        "futex": lambda: futex(deadline, False),
    }
for name, call in calls.items():
    deadline = at(0.2, WALL if sys.argv[1] == "wall" else STEADY)
    begin = os.times().elapsed
    call()
    print(name, os.times().elapsed - begin, flush=True)
"""


@needs_shim
@pytest.mark.parametrize(
    ("clock", "skew"),
    [
        ("wall", {"offset_ms": 3_600_000}),
        ("wall", {"offset_ms": -3_600_000}),
        ("wall", {"offset_ms": 0, "rate_ppm": 500_000}),
        ("monotonic", {"rate_ppm": 2_000_000, "affects_monotonic": True}),
        ("monotonic", {"rate_ppm": -500_000, "affects_monotonic": True}),
    ],
)
def test_a_wait_until_a_time_of_a_skewed_clock_ends_when_that_clock_shows_it(
    tmp_path: Path, clock: str, skew: dict[str, object]
) -> None:
    """By the kernel's clock, which is right, the wait would be too long or too short by the skew."""
    child = Child(tmp_path)
    child.process.kill()
    child.process.communicate()
    child.skew("f", **skew)
    if clock == "monotonic":
        time.sleep(3)  # by which time its clock is 6 s ahead, or 1.5 s behind
    environment = shim_environment(str(tmp_path / "shim.so"), str(child.control), str(child.root))
    done = subprocess.run(
        [sys.executable, "-c", WAITS, clock],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=40, check=True,
    )  # fmt: skip
    lasted = {name: float(seconds) for name, _, seconds in (line.rpartition(" ") for line in done.stdout.splitlines())}
    assert len(lasted) == (10 if clock == "wall" else 6)
    expected_s = 0.2 / (1 + float(str(skew.get("rate_ppm", 0))) / 1e6)
    # A failure is an hour, or the 6 s that the fast clock is ahead; anything less is a busy machine.
    assert {name: s for name, s in lasted.items() if not expected_s - 0.02 <= s < expected_s + 4} == {}


def run_under_shim(child: Child, script: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program under the shim to its end, and capture its output."""
    environment = shim_environment(str(child.control.with_name("shim.so")), str(child.control), str(child.root))
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


@needs_shim
def test_clock_system_calls_by_number_are_skewed_too(child: Child) -> None:
    """Even without a disk fault and an account."""
    child.skew("f", offset_ms=-3_600_000)
    script = (
        "import ctypes, os\n"
        # clock_gettime, gettimeofday and, where it is, time
        "numbers = {'x86_64': [228, 96, 201], 'aarch64': [113, 169]}[os.uname().machine]\n"
        "libc, shown = ctypes.CDLL(None), (ctypes.c_long * 2)()\n"
        "for number, words in zip(numbers, [(0, shown), (shown, None), (shown,)]):\n"
        "    shown[0] = 0\n"
        "    libc.syscall(number, *words)\n"
        "    print(shown[0])\n"
    )
    done = run_under_shim(child, script)
    behind_s = [time.time() - int(shown) for shown in done.stdout.split()]
    assert len(behind_s) >= 2 and all(3590 < seconds < 3700 for seconds in behind_s), behind_s


@needs_shim
def test_gettimeofday_may_be_called_for_the_time_zone_alone(child: Child) -> None:
    script = (
        "import ctypes\n"
        "zone = ctypes.create_string_buffer(b'x' * 8, 8)\n"
        "print(ctypes.CDLL(None).gettimeofday(None, zone), zone.raw != b'x' * 8)"
    )
    done = run_under_shim(child, script)
    assert (done.returncode, done.stdout) == (0, "0 True\n")


@needs_shim
@pytest.mark.parametrize("where", ["0 10", "0 1000", "1000 10"])
def test_a_full_disk_lets_a_program_punch_holes(child: Child, where: str) -> None:
    """Even one that reaches beyond the end of the file."""
    child.ask("write 0")
    before = child.ask(f"punch {where}")
    child.impair("full")
    assert child.ask(f"punch {where}") == before
    assert child.ask("write 1000") == "No space left on device"


@needs_shim
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_posix_fallocate_that_returns_enospc_is_counted(child: Child, tmp_path: Path) -> None:
    """It returns the error number instead of setting errno."""
    source, library = tmp_path / "full.c", tmp_path / "full.so"
    text = "#include <errno.h>\n#include <fcntl.h>\n"
    for name in ("posix_fallocate", "posix_fallocate64"):
        text += f"int {name}(int fd, off_t offset, off_t length) {{ return fd + offset + length ? ENOSPC : 0; }}\n"
    source.write_text(text)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", library, source], check=True)
    child.impair("fill")
    script = "import os, sys; os.posix_fallocate(os.open(sys.argv[1], os.O_RDWR), 0, 9)"
    environment = shim_environment(
        str(tmp_path / "shim.so"), str(child.control), str(child.root), preloaded=str(library)
    )
    child.ask("clock")  # it has created its file
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, child.root / "file"],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert "No space left on device" in done.stderr
    assert parse_counters(child.control.read_bytes()).refused == 1


OLDER_C_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char memory[1 << 20] __attribute__((aligned(16)));
static size_t used;
static int is_beginning, has_begun;

/* As jemalloc: when it begins it reads a setting past the C library's functions, and asks for the time. */
void *malloc(size_t size)
{
    char text[8];
    struct timespec now;
    if (is_beginning)
        _exit(7);
    if (!has_begun) {
        is_beginning = 1;
        int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC, 0);
        if (syscall(SYS_read, fd, text, sizeof text) < 2 || clock_gettime(CLOCK_MONOTONIC, &now) != 0)
            _exit(8);
        syscall(SYS_close, fd);
        is_beginning = 0, has_begun = 1;
    }
    used += (size + 15) / 16 * 16;
    return used > sizeof memory ? NULL : memory + used - (size + 15) / 16 * 16;
}

void *calloc(size_t count, size_t size) { return malloc(count * size); }
void free(void *at) { (void)at; }

/* As that of glibc until 2.33 in a thread's first call. */
void *dlsym(void *handle, const char *name)
{
    static const char *const versions[] = {"GLIBC_2.2.5", "GLIBC_2.3.2", "GLIBC_2.17", "GLIBC_2.34"};
    static __thread int has_memory;
    void *found = NULL;
    if (!has_memory)
        has_memory = 1, calloc(1, 32);
    for (size_t i = 0; i < sizeof versions / sizeof *versions && !found; i++)
        found = dlvsym(handle, name, versions[i]);
    return found;
}

__attribute__((constructor)) static void first(void) { malloc(1); }
"""


@needs_shim
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_an_allocator_that_makes_system_calls_starts_under_an_older_c_library(tmp_path: Path) -> None:
    child = Child(tmp_path)
    child.process.kill()
    child.process.communicate()
    source, library, program = tmp_path / "before.c", tmp_path / "before.so", tmp_path / "program"
    source.write_text(OLDER_C_LIBRARY)
    flags = ["-O1", "-fno-builtin", "-Wno-unused-result"]
    subprocess.run([str(COMPILER), *flags, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    source.write_text("#include <stdlib.h>\nint main(void) { return malloc(9) ? 0 : 1; }\n")
    subprocess.run([str(COMPILER), *flags, "-o", program, source], check=True)
    environment = shim_environment(
        str(tmp_path / "shim.so"), str(child.control), str(child.root), preloaded=str(library)
    )
    assert subprocess.run([program], env={**os.environ, **environment}, timeout=30).returncode == 0


@needs_shim
def test_a_wait_ends_when_a_strobing_clock_first_shows_its_deadline(tmp_path: Path) -> None:
    child = Child(tmp_path)
    child.process.kill()
    child.process.communicate()
    child.skew("f", strobe_ms=100_000, strobe_period_ms=600)
    script = (
        "import ctypes, os, time\n"
        "libc = ctypes.CDLL(None)\n"
        "class Time(ctypes.Structure):\n"
        "    _fields_ = [('s', ctypes.c_long), ('ns', ctypes.c_long)]\n"
        "right = time.time()\n"
        "while abs(time.time() - right) < 50: pass\n"
        "ahead = max(time.time(), right)\n"
        "while time.time() > ahead - 50: pass\n"
        "deadline, begin = Time(int(ahead), 0), time.monotonic()\n"
        "libc.clock_nanosleep(time.CLOCK_REALTIME, 1, ctypes.byref(deadline), None)\n"
        "print(time.monotonic() - begin)"
    )
    environment = shim_environment(str(tmp_path / "shim.so"), str(child.control), str(child.root))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=40, check=True,
    )  # fmt: skip
    assert 0.1 < float(done.stdout) < 5


def test_too_many_clock_faults_are_refused() -> None:
    faults = HostFaults()
    for number in range(CLOCK_SLOTS - 1):
        faults.add_skew(f"f{number}", ClockSkew(offset_ms=1), wall_ns=0, monotonic_ns=0)
    with pytest.raises(ShimError, match="in force on one host already"):
        faults.add_skew("one more", ClockSkew(offset_ms=1), wall_ns=0, monotonic_ns=0)


@pytest.mark.parametrize("skew", [ClockSkew(offset_ms=1, affects_monotonic=True), ClockSkew(rate_ppm=-1_000_000)])
def test_skews_that_would_stop_or_set_back_a_clock_are_refused(skew: ClockSkew) -> None:
    with pytest.raises(ValueError, match=r"clock"):
        HostFaults().add_skew("f", skew, wall_ns=0, monotonic_ns=0)


SLEPT = ["unshare", "--time", "--fork", "--boottime", "100000"]


@needs_shim
@pytest.mark.skipif(
    subprocess.run([*SLEPT, "true"], capture_output=True).returncode != 0, reason="there are no time namespaces here"
)
def test_the_boottime_clock_is_skewed_from_the_start_of_the_fault(tmp_path: Path) -> None:
    """As if the machine had slept for a day: at a quarter of its rate in that time, the clock would go back."""
    child = Child(tmp_path)
    child.process.kill()
    child.process.communicate()
    child.skew("m", rate_ppm=-750_000, affects_monotonic=True)
    script = "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC))"
    environment = shim_environment(str(tmp_path / "shim.so"), str(child.control), str(child.root))
    done = subprocess.run(
        [*SLEPT, sys.executable, "-I", "-S", "-c", script],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    true_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() + 100_000
    assert abs(float(done.stdout) - true_s) < 1


@pytest.mark.parametrize(("rate_ppm", "beside_ppm", "sum_ppm"), [(-600_000, 500_000, -1_200_000),
                                                                  (1_500_000, -600_000, +3_000_000)])  # fmt: skip
def test_monotonic_skews_whose_sum_exceeds_the_bounds_are_refused(rate_ppm: int, beside_ppm: int, sum_ppm: int) -> None:
    """Even if a third fault compensates for them: it may be healed first."""
    faults = HostFaults()
    first, beside = (ClockSkew(rate_ppm=each, affects_monotonic=True) for each in (rate_ppm, beside_ppm))
    faults.add_skew("first", first, wall_ns=0, monotonic_ns=0)
    faults.add_skew("beside", beside, wall_ns=0, monotonic_ns=0)
    with pytest.raises(ValueError, match=rf"at most .* ppm wrong, not \{sum_ppm:+} ppm by all faults that make it"):
        faults.add_skew("second", first, wall_ns=0, monotonic_ns=0)
    faults.remove_skew("first", monotonic_ns=0)
    faults.add_skew("second", first, wall_ns=0, monotonic_ns=0)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 5), st.integers(-(10**9), 10**9))))
def test_clock_faults_of_a_host_begin_and_end_in_any_order(steps: list[tuple[str, int, int]]) -> None:
    faults, expected, generations = HostFaults(), {}, []
    for action, number, offset_ms in steps:
        if action == "add":
            faults.add_skew(f"f{number}", ClockSkew(offset_ms=offset_ms), wall_ns=0, monotonic_ns=0)
            expected[f"f{number}"] = offset_ms
        else:
            faults.remove_skew(f"f{number}", monotonic_ns=0)
            expected.pop(f"f{number}", None)
        packed = faults.pack()
        generations.append(int.from_bytes(packed[8:16], sys.byteorder))
        assert packed[8:16] == packed[-8:]
        assert len(packed) <= 2048, "the settings reach into the counters"
    assert faults.fault_ids == expected.keys()
    assert generations == sorted(set(generations))
