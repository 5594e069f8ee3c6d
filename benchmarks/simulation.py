"""How fast the simulation is: seconds of cluster time per second of CPU time, on one core.

    python -m benchmarks simulation            the figures
    python -m benchmarks.simulation --profile  where the time goes, by package and by function
    python -m benchmarks.simulation --searched what seeds of a search take: five nodes under random mixes of all faults

Five brokers, one name server and ten clients, as with `harness run --cluster sim`, without report and checks.

PyPy compiles while it runs, and it takes some minutes of cluster time until frequently run code is compiled. So on PyPy
the figures are taken after ten minutes of warm-up, which are shown too, because a process that runs few seeds runs at
the speed of the warm-up. PyPy's collector runs whenever the nursery is full; one larger than the default (4 MB) saves
much time, so the benchmark restarts itself with `PYPY_GC_NURSERY=64M`, as `harness` does, unless the variable is set.

The profile on CPython has no hot spot left (2026-11, Python 3.11): 25 % DLedger, 24 % the remoting protocol, 22 % the
simulation itself (loop, network, disk, invariant checks), 12 % the stores and brokers above the log, 10 % clients,
generator and history; the largest single function, the loop, is 5 %. An operation is 11 segments and 27 callbacks: an
append goes to four followers and five disks, a read takes one confirmation by a quorum. Every message is encoded,
framed and decoded as on a real network.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import hashlib
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.checker import calibration_ms
from harness.clusters.sim.cluster import SimCluster
from harness.clusters.sim.loop import SimLoop
from harness.history_writer import HistoryWriter
from harness.nursery import restart_with_nursery
from harness.runner import Run, SilentListener
from harness.runtime import harness_runtime
from harness.systems.broker import BrokerSystem
from harness.test import Test
from harness.workloads.register import RegisterWorkload
from nemesis.partition import PARTITION
from nemesis.schedule import Schedule, periodic
from node.mutants.catalogue import NO_MUTANT

__all__ = ["Figures", "main", "simulate"]

NODES = 5
CLIENTS = 10
SEEDS = (1, 2, 3)
RUN_S = 30.0
IDLE_S = 600.0
SEARCHED_SEEDS = range(3000, 3006)
WARM_UP_SEEDS = range(100, 110)
WARM_UP_S = 60.0
"""Cluster time of each warm-up run, for interpreters that compile while they run."""
COMPILES = sys.implementation.name == "pypy"
SAMPLE_S = 0.001
"""CPU time between two samples of the profile."""


class _Clock:
    """The history's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._zero_s: float | None = None

    def start(self) -> None:
        self._zero_s = self._loop.time()

    def now_ns(self) -> int:
        return 0 if self._zero_s is None else int((self._loop.time() - self._zero_s) * 1e9)


class Figures:
    """The cost and amount of work of one run."""

    def __init__(self, *, cluster_s: float, processor_s: float, steps: int, events: int, digest: str) -> None:
        self.cluster_s = cluster_s
        self.processor_s = processor_s
        self.steps = steps
        self.events = events
        self.digest = digest

    def __str__(self) -> str:
        return (
            f"{self.cluster_s:7.1f} s of cluster time in {self.processor_s:6.2f} s: "
            f"{self.cluster_s / self.processor_s:6.1f} times real time; {self.steps / self.processor_s:9,.0f} steps/s; "
            f"{self.steps / max(1, self.events / 2):6.0f} steps an operation"
        )


def simulate(*, seed: int, time_limit_s: float, rate: float, with_partitions: bool = False) -> Figures:
    """One run of the register workload; `rate` in operations per second."""
    with tempfile.TemporaryDirectory() as directory:
        return SimCluster.run_harness(_simulate(seed, time_limit_s, rate, with_partitions, directory), seed=seed)


async def _simulate(seed: int, time_limit_s: float, rate: float, with_partitions: bool, directory: str) -> Figures:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    cluster = SimCluster(
        node_count=NODES, run=None, work_dir=directory, ports=BrokerSystem.ports, extra_hosts=BrokerSystem.extra_hosts
    )
    workload: Any = RegisterWorkload()
    test = Test(
        system="broker",
        cluster="sim",
        nodes=NODES,
        workload="register",
        nemesis=(),
        nemesis_interval_s=3.0,
        time_limit_s=time_limit_s,
        concurrency=CLIENTS,
        rate=rate,
        seed=seed,
    )
    system = BrokerSystem(
        cluster=cluster,
        settings={},
        keys=workload.keys,
        log_dir=directory,
        operation_timeout_s=test.operation_timeout_s,
    )
    schedule = Schedule(())
    if with_partitions:
        rng = cluster.runtime().random
        schedule = periodic([("partition", PARTITION.variants)], rng, time_limit_s=time_limit_s, on_s=3.0, off_s=3.0)
    clock = _Clock(loop)
    history_path = Path(directory) / "history.jsonl"
    with HistoryWriter(history_path, clock.now_ns) as writer:
        run = Run(
            test=test,
            cluster=cluster,
            system=system,
            workload=workload,
            nemeses={"partition": PARTITION},
            schedule=schedule,
            writer=writer,
            clock=clock,
            listener=SilentListener(),
        )
        began_s, loop_began_s = time.process_time(), loop.time()
        await run.execute(wall_ms=harness_runtime(cluster).clock.wall_ms)
        processor_s, cluster_s = time.process_time() - began_s, loop.time() - loop_began_s
    return Figures(
        cluster_s=cluster_s,
        processor_s=processor_s,
        steps=loop.steps,
        events=writer.stats.events,
        digest=hashlib.sha256(history_path.read_bytes()).hexdigest(),
    )


@contextlib.contextmanager
def _sampled(functions: collections.Counter[str], packages: collections.Counter[str]) -> Iterator[None]:
    """Count which function is running, every SAMPLE_S of CPU time."""

    def sample(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            path = Path(frame.f_code.co_filename)
            functions[f"{path.name}:{frame.f_code.co_name}"] += 1
            packages[str(frame.f_globals.get("__name__", "?")).rpartition(".")[0] or path.stem] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _searched() -> None:
    """Run seeds as `harness explore --nodes 5` does, and print what each took."""
    # Imported here, since they need packages, and `--digest` must work without them.
    from benchmarks._blind import GROUNDS
    from harness.exploration.rehearsal import rehearse_test, usable_choices
    from harness.exploration.search import mix_for

    test = GROUNDS["log"].test_of(NO_MUTANT)
    choices = usable_choices(test)
    took_s = []
    for seed in SEARCHED_SEEDS:
        began_s = time.process_time()
        run = rehearse_test(*mix_for(test, seed, choices))
        took_s.append(time.process_time() - began_s)
        print(f"seed {seed}: {took_s[-1]:.2f} s, {run.operations} operations, {run.faults} faults", flush=True)
    print(f"{len(took_s)} seeds of {test.time_limit_s:g} s of load: {sum(took_s):.2f} s of processor time", end="; ")
    print(f"calibration {calibration_ms():.1f} ms")


def _profile(run: Callable[[], object]) -> None:
    functions: collections.Counter[str] = collections.Counter()
    packages: collections.Counter[str] = collections.Counter()
    _warm_up()
    with _sampled(functions, packages):
        run()
    total = sum(functions.values())
    for counter in (packages, functions):
        print()
        for name, count in counter.most_common(30):
            print(f"{100 * count / total:5.1f} %  {name}")


def _warm_up() -> None:
    if COMPILES:
        for seed in WARM_UP_SEEDS:
            _print("warm-up", seed, time_limit_s=WARM_UP_S, rate=100)


def _print(what: str, seed: int, *, time_limit_s: float, rate: float) -> float:
    """Run once and print the figures; returns the speed in cluster seconds per CPU second."""
    before_ms = calibration_ms()
    figures = simulate(seed=seed, time_limit_s=time_limit_s, rate=rate)
    name = f"{what}, seed {seed}"
    print(f"{name:25}  {figures}; calibration {before_ms:.1f}, {calibration_ms():.1f} ms", flush=True)
    return figures.cluster_s / figures.processor_s


def _healthy() -> None:
    print(simulate(seed=SEEDS[0], time_limit_s=RUN_S, rate=100))


def _figures() -> None:
    nursery = f", nursery {os.environ.get('PYPY_GC_NURSERY', 'as it comes')}" if COMPILES else ""
    print(f"{platform.python_implementation()} {'.'.join(map(str, sys.version_info[:3]))}{nursery}", end="")
    print(f"; after {len(WARM_UP_SEEDS) * WARM_UP_S:g} s of cluster time to warm up" if COMPILES else "", flush=True)
    _warm_up()
    speeds = [_print("100 operations/s", seed, time_limit_s=RUN_S, rate=100) for seed in SEEDS]
    print(f"median of {len(SEEDS)} seeds: {statistics.median(speeds):.1f} times real time")
    idle = _print("idle", SEEDS[0], time_limit_s=IDLE_S, rate=0.01)
    print(f"at that speed an idle hour takes {3600 / idle:.1f} s")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="where the time goes instead")
    parser.add_argument("--searched", action="store_true", help="seeds of a search instead; also with --profile")
    parser.add_argument("--digest", metavar="SEED", type=int, help="only the history's hash of a short run with faults")
    options = parser.parse_args(sys.argv[1:])
    if options.digest is not None:
        print(simulate(seed=options.digest, time_limit_s=10, rate=40, with_partitions=True).digest)
    elif options.profile:
        _profile(_searched if options.searched else _healthy)
    elif options.searched:
        _searched()
    else:
        _figures()


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.simulation", *sys.argv[1:]])
    main()
