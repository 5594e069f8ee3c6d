"""A program under the launcher that executes a test's commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nemesis.mechanisms.launcher.control import ProgramCounts, parse_programs
from nemesis.mechanisms.launcher.marks import PROGRAM_VARIABLE
from nemesis.mechanisms.launcher_archive import launcher_archive, launcher_command
from nemesis.mechanisms.shim import CONTROL_BYTES, Counters, HostFaults, parse_counters
from nemesis.target import ClockSkew, DiskFault

DEADLINE_S = 60.0
NUMBER = 130

CHILD = """
import ctypes, os, subprocess, sys, threading, time
root = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
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
def sync_file_system(path):
    other = os.open(path or root, os.O_RDONLY)
    if libc.syncfs(other):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def grow():
    os.pwrite(fd, b"x" * 10, os.fstat(fd).st_size)
def give_back():
    place, length = ctypes.c_long(0), ctypes.c_long(10)
    if libc.fallocate(fd, 0x03, place, length):  # a hole, and the length as it was
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
DO = {
    "sync": lambda _: attempt(lambda: os.fsync(fd)),
    "data-sync": lambda _: attempt(lambda: os.fdatasync(fd)),
    "thread-sync": lambda _: in_thread(lambda: os.fsync(fd)),
    "file-system-sync": lambda path: attempt(lambda: sync_file_system(path)),
    "sync-everything": lambda _: attempt(os.sync),
    "write": lambda _: attempt(lambda: os.pwrite(fd, b"y" * 10, 0)),
    "grow": lambda _: attempt(grow),
    "give-back": lambda _: attempt(give_back),
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

RARE_CALLS = """
import ctypes, json, os, sys
root = sys.argv[1]
def at(name):
    return os.path.join(root, name)
for name in ("file", "other"):
    with open(at(name), "wb") as file:
        file.write(b"x" * 100)
os.mkdir(at("directory"))
libc = ctypes.CDLL(None, use_errno=True)
fd, other = os.open(at("file"), os.O_RDWR), os.open(at("other"), os.O_RDWR)
outside, nowhere = os.open(sys.executable, os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)
ours, theirs = os.pipe()
os.write(theirs, b"abc")
def checked(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
buffer = ctypes.create_string_buffer(8)
def rename():
    if libc.renameat2(-100, at("file").encode(), -100, at("renamed").encode(), 1):
        raise OSError(ctypes.get_errno(), "")
CALLS = {
    "error-write": {
        "sendfile": lambda: os.sendfile(fd, outside, 0, 3),
        "splice": lambda: os.splice(ours, fd, 3, offset_dst=0),
        "copy_file_range": lambda: os.copy_file_range(other, fd, 3, 0, 0),
        "pwritev2": lambda: os.pwritev(fd, [b"x"], 0, os.RWF_DSYNC),
        "truncate": lambda: os.truncate(at("file"), 50),
        "posix_fallocate": lambda: os.posix_fallocate(fd, 0, 200),
        "link": lambda: os.link(at("file"), at("linked")),
        "symlink": lambda: os.symlink("file", at("symbolic")),
        "rmdir": lambda: os.rmdir(at("directory")),
        "renameat2": rename,
        "__open_2": lambda: checked("__open_2", at("other").encode(), os.O_WRONLY | os.O_TRUNC),
        "__open64_2": lambda: checked("__open64_2", at("other").encode(), os.O_WRONLY | os.O_TRUNC),
        "__openat_2": lambda: checked("__openat_2", -100, at("other").encode(), os.O_WRONLY | os.O_TRUNC),
        "__openat64_2": lambda: checked("__openat64_2", -100, at("other").encode(), os.O_WRONLY | os.O_TRUNC),
    },
    "error-read": {
        "readv": lambda: os.readv(fd, [bytearray(4)]),
        "preadv": lambda: os.preadv(fd, [bytearray(4)], 0),
        "preadv2": lambda: os.preadv(fd, [bytearray(4)], 0, os.RWF_HIPRI),
        "sendfile": lambda: os.sendfile(nowhere, fd, 0, 3),
        "splice": lambda: os.splice(fd, theirs, 3, offset_src=0),
        "__read_chk": lambda: checked("__read_chk", fd, buffer, 8, 8),
        "__pread_chk": lambda: checked("__pread_chk", fd, buffer, 8, ctypes.c_long(0), ctypes.c_size_t(8)),
        "__pread64_chk": lambda: checked("__pread64_chk", fd, buffer, 8, ctypes.c_long(0), ctypes.c_size_t(8)),
    },
}
def attempt(work):
    try:
        work()
        return "ok"
    except OSError as error:
        return os.strerror(error.errno)
for line in sys.stdin:
    print(json.dumps({name: attempt(work) for name, work in CALLS.get(line.strip(), {}).items()}), flush=True)
"""
"""Makes rare calls, those that the fault named on standard input affects, and prints each one's result in JSON."""

OWN_FILTER = """
import ctypes
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("code", ctypes.POINTER(Instruction))]
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
allow = Instruction(6, 0, 0, 0x7FFF0000)
assert libc.prctl(22, 2, ctypes.byref(Filter(1, ctypes.pointer(allow)))) == 0
"""
"""A program that begins with this has its own seccomp filter, which allows every call."""


class Program:
    """A program under the launcher, and the control file of its host."""

    def __init__(
        self,
        directory: Path,
        argv: list[str] | None = None,
        *,
        clock: bool = False,
        attaches: bool = False,
        keeps_account: bool = False,
        inherited: Sequence[int] = (),
        mark: str | None = None,
    ) -> None:
        self._environment = os.environ if mark is None else {**os.environ, PROGRAM_VARIABLE: mark}
        self.root = directory / "data"
        self.root.mkdir()
        self.control = directory / "control"
        self.faults = HostFaults()
        self.control.write_bytes(self.faults.pack().ljust(CONTROL_BYTES, b"\0"))
        archive = directory / "launcher.pyz"
        archive.write_bytes(launcher_archive())
        program = argv or [sys.executable, "-I", "-S", "-c", CHILD, str(self.root)]
        self.undo = directory / "undo"
        self.undo.mkdir()
        traps = [] if clock and not attaches else ["sync", "write", "read"]
        self._inherited = inherited
        self._command = launcher_command(
            sys.executable, str(archive), str(self.control), program,
            root=str(self.root), traps=traps, attaches=attaches, moves_clock=clock, number=NUMBER,
            undo_path=str(self.undo) if keeps_account else None,
        )  # fmt: skip
        self.start()

    def start(self) -> Program:
        """Start it, the first time or after its end."""
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self._command, pass_fds=self._inherited, stdin=pipe, stdout=pipe, text=True, env=self._environment
        )
        return self

    def apply(self) -> None:
        descriptor = os.open(self.control, os.O_WRONLY)
        os.pwrite(descriptor, self.faults.pack(), 0)
        os.close(descriptor)

    def impair(self, kind: str, delay_ms: int = 0) -> None:
        """Impair the disk, and wait until the program's calls are reported or that has failed."""
        self.faults.add_disk_fault("fault", DiskFault(kind=kind, delay_ms=delay_ms))
        self.apply()
        wait_until(lambda: self.count().traps_generation >= self.faults.generation)

    def keep_account(self) -> None:
        """Start an account, and wait until it is kept."""
        self.faults.keep_account("account")
        self.apply()
        wait_until(lambda: self.count().traps_generation >= self.faults.generation)

    def mend(self) -> None:
        self.faults.remove_disk_fault("fault")
        self.apply()

    def skew(self, skew: ClockSkew | None) -> None:
        """Move the clock, and wait until the driver reports that it has moved."""
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
        assert time.monotonic() < deadline_s, "the condition did not hold in time"
        time.sleep(0.01)
