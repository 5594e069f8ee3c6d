"""What it costs a program to be within reach of faults while none is in force.

    python -m benchmarks.fault_cost [fsync] [clock] [etcd] [--rounds 15]

fsync   a loop of fsync on a file system in memory, and on the disk: as it is, and reported to a supervisor
clock   a loop that reads the wall clock: as it is, and by a vDSO that was patched and restored
etcd    puts of one etcd on the disk (ETCD names the file), by 8 clients: as it is, under the launcher with what faults
        of syncs need, and with a clock that was moved and healed. What is compared is processor time a put, of etcd and
        of the launcher's helpers together, which other programs of the machine disturb less than puts a second

Every round runs all forms one after the other; what is printed are medians over the rounds, and of the differences
within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks._guests import GUESTS
from nemesis.mechanisms.launcher.control import parse_programs
from nemesis.mechanisms.launcher_archive import launcher_archive, launcher_command
from nemesis.mechanisms.shim import CONTROL_BYTES, HostFaults
from nemesis.target import ClockSkew

__all__ = ["main"]

FSYNC = """
import os, sys, time
fd = os.open(sys.argv[1] + "/file", os.O_RDWR | os.O_CREAT)
taken = []
for _ in range(int(sys.argv[2])):
    os.pwrite(fd, b"x" * 100, 0)
    begin = time.perf_counter()
    os.fsync(fd)
    taken.append(time.perf_counter() - begin)
print(sorted(taken)[len(taken) // 2] * 1e6)
"""
CLOCK = """
import sys, time
sys.stdin.readline()
begin = time.perf_counter()
for _ in range(300000):
    time.time()
print((time.perf_counter() - begin) / 300000 * 1e6)
"""
PUTS_S = 6.0
CLIENTS = 8
DEADLINE_S = 30.0


class Launched:
    """A directory with what the launcher needs, and the commands that run programs under it."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.undo = directory / "undo"
        self.control = directory / "control"
        self.archive = directory / "launcher.pyz"
        self.faults = HostFaults()
        for path in (self.data, self.undo):
            path.mkdir()
        self.control.write_bytes(self.faults.pack().ljust(CONTROL_BYTES, b"\0"))
        self.archive.write_bytes(launcher_archive())

    def command(self, form: str, program: Sequence[str]) -> list[str]:
        """`program` in one of the forms."""
        if form == "plain":
            return list(program)
        return launcher_command(
            sys.executable, str(self.archive), str(self.control), program, root=str(self.data), number=1,
            traps={"sync": ("sync",), "all": ("sync", "write"), "clock": ()}[form],
            undo_path=str(self.undo) if form == "all" else None, moves_clock=form == "clock",
        )  # fmt: skip

    def move_clock_and_heal(self) -> None:
        """Skew the running program's clock, so that its vDSO is patched, and set it right again."""
        for is_on in (True, False):
            if is_on:
                self.faults.add_skew("f", ClockSkew(offset_ms=60_000), wall_ns=time.time_ns(), monotonic_ns=0)
            else:
                self.faults.remove_skew("f", monotonic_ns=0)
            with open(self.control, "r+b", buffering=0) as file:
                file.write(self.faults.pack())
            deadline_s = time.monotonic() + DEADLINE_S
            while parse_programs(self.control.read_bytes())[1].clock_generation < self.faults.generation:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the clock driver does nothing")
                time.sleep(0.01)


def fsync_us(parent: str, count: int) -> Callable[[str], float]:
    """Microseconds of an fsync after a write of 100 bytes, the median, by form. A mean would tell of the other programs
    of the machine, which get the processor whenever two processes hand it to each other."""

    def measure(form: str) -> float:
        with tempfile.TemporaryDirectory(dir=parent, prefix="fault-cost-") as directory:
            launched = Launched(Path(directory))
            program = [sys.executable, "-I", "-S", "-c", FSYNC, str(launched.data), str(count)]
            done = subprocess.run(launched.command(form, program), capture_output=True, text=True, check=True)
            return float(done.stdout)

    return measure


def clock_us(form: str) -> float:
    """Microseconds of a reading of the wall clock, by form."""
    with tempfile.TemporaryDirectory(prefix="fault-cost-") as directory:
        launched = Launched(Path(directory))
        argv = launched.command(form, [sys.executable, "-I", "-S", "-c", CLOCK])
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            if form == "clock":
                time.sleep(0.5)  # it executes the program meanwhile, whose vDSO is the one to be patched
                launched.move_clock_and_heal()
            return float(process.communicate("\n")[0])


def etcd_put_us(form: str) -> float:
    """Microseconds of processor time a put, by form."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="fault-cost-") as directory:
        launched = Launched(Path(directory))
        program, _ = GUESTS["etcd"].command(_OneHost(launched.data), "n1")
        with subprocess.Popen(launched.command(form, program), stderr=subprocess.DEVNULL) as process:
            try:
                return asyncio.run(_puts(process.pid, launched, moves_clock=form == "clock"))
            finally:
                process.kill()


class _OneHost:
    """As much of a cluster as a guest's command asks for."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def bind_address(self, host: str) -> str:
        return "127.0.0.1"

    def data_dir(self, host: str) -> str:
        return str(self._data)


def _processor_s(pid: int, control: Path) -> float:
    """What a process, and those that have the control file among their arguments, have used so far."""
    used = 0
    for name in os.listdir("/proc"):
        try:
            is_helper = name.isdigit() and str(control).encode() in Path(f"/proc/{name}/cmdline").read_bytes()
            if is_helper or name == str(pid):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                used += int(fields[11]) + int(fields[12])
        except OSError:
            continue  # it has ended
    return used / os.sysconf("SC_CLK_TCK")


async def _puts(pid: int, launched: Launched, *, moves_clock: bool) -> float:
    async with asyncio.timeout(DEADLINE_S):
        while not await _put():  # noqa: ASYNC110 - a program elsewhere
            await asyncio.sleep(0.05)
    if moves_clock:
        launched.move_clock_and_heal()
    count, end_s = 0, time.monotonic() + PUTS_S
    before_s = _processor_s(pid, launched.control)

    async def client() -> None:
        nonlocal count
        while time.monotonic() < end_s:
            count += await _put()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return (_processor_s(pid, launched.control) - before_s) / count * 1e6


async def _put() -> bool:
    try:
        await GUESTS["etcd"].write("127.0.0.1:2379")
    except (OSError, RuntimeError):
        return False
    return True


def compare(title: str, unit: str, forms: Sequence[str], measure: Callable[[str], float], rounds: int) -> None:
    """Measure all forms in alternation and print medians."""
    seen: Mapping[str, list[float]] = {form: [] for form in forms}
    for number in range(rounds):
        for form in (*forms[number % len(forms) :], *forms[: number % len(forms)]):
            seen[form].append(measure(form))
    plain = seen[forms[0]]
    for form in forms:
        more = statistics.median(other - base for other, base in zip(seen[form], plain, strict=True))
        ratio = statistics.median(other / base for other, base in zip(seen[form], plain, strict=True))
        middle = statistics.median(seen[form])
        print(f"{title:16} {form:6} {middle:10.1f} {unit}  {more:+9.1f}  {100 * (ratio - 1):+6.1f} %", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.fault_cost")
    parser.add_argument("parts", nargs="*", default=["fsync", "clock"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    if "fsync" in options.parts:
        compare("fsync in memory", "us", ["plain", "sync"], fsync_us("/dev/shm", 3000), options.rounds)
        compare("fsync on disk", "us", ["plain", "sync"], fsync_us("/var/tmp", 300), options.rounds)
    if "clock" in options.parts:
        compare("wall clock", "us", ["plain", "clock"], clock_us, options.rounds)
    if "etcd" in options.parts:
        if shutil.which(os.environ.get("ETCD", "etcd")) is None:
            raise SystemExit("etcd is not there: put it into PATH, or name its file by ETCD")
        compare("etcd put, CPU", "us", ["plain", "sync", "clock"], etcd_put_us, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
