"""What each guarantee costs and buys: six failures of the leader's machine, two flush modes, five kinds of replication.

    python -m benchmarks.guarantees [--runs 10] [--cells TEXT ...] [--cluster local] [--page]

Each cell is a number of runs of the broker system with producers that resend what was not acknowledged. One failure
strikes the leader under load, and what an operator would do about it is done (start it again, give it a new disk,
promote a slave). In the end every queue is read completely from the current master. Results are kept in
`docs/guarantees.json`, cell by cell, and `--page` makes `docs/guarantees.md` from them.

Simulation fills the grid. On real hosts (`--cluster local`) all failures but a crash of the operating system can be
repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from harness import registry
from harness.clusters.base import run_harness
from harness.clusters.sim.cluster import SimCluster
from harness.run_state import RunState
from harness.systems.broker import BrokerSystem
from nemesis.target import Link, LinkShape
from spark_analysis.statistics import wilson

__all__ = ["FAILURES", "FLUSHES", "REPLICATIONS", "Cell", "main", "render"]

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "guarantees.json"
PAGE = RESULTS.with_suffix(".md")

FAILURES = {
    "stop": "orderly stop, started again after 2 s",
    "crash": "crash of the process, started again after 2 s",
    "os": "crash of the operating system, up again after 5 s",
    "power": "loss of power, back after 5 s",
    "machine": "machine lost permanently",
    "disk": "disk lost, replaced by an empty one after 5 s",
}
BACK_AFTER_S = {"stop": 2.0, "crash": 2.0, "os": 5.0, "power": 5.0, "disk": 5.0}
OPERATOR_S = 5.0
"""Time from the failure until the operator promotes a slave, if that is needed."""
FLUSHES = ("sync", "async")
REPLICATIONS = {"none": (1, "async"), "async": (2, "async"), "sync": (2, "sync"), "dledger3": (3, "dledger"),
                "dledger5": (5, "dledger")}  # fmt: skip
"""Kind of replication -> number of replicas, and the system's setting."""
REAL = ("stop", "crash", "power", "machine", "disk")
"""Failures that can be applied to real processes: the shim cuts power; for a dead machine the broker is not started
again, for a dead disk its files are removed. Losing the kernel's unwritten data would need a file system per host."""
POWER = "power"
"""The id of the power cut."""

QUEUES, WRITERS, PAUSE_S = 4, 4, 0.02
BEFORE_S, AFTER_S = 3.0, 12.0
SETTLE_S = 30.0
OPERATION_TIMEOUT_S = 2.0
NETWORK = LinkShape(delay_ms=5.0, loss_percent=1.0)
"""Each direction between the simulated replicas: machines of one region on a network that drops a packet now and then.
On a perfect network an acknowledged message is already on its way to the slave, and nothing is ever lost."""
ROCKETMQ_FLUSH = {"flush_interval_ms": "500", "flush_least_pages": "4", "flush_thorough_interval_ms": "10000"}


@dataclass(slots=True)
class Cell:
    """The results of the runs of one cell."""

    runs: int = 0
    acknowledged: int = 0
    """Acknowledged with SUCCESS."""
    lost: int = 0
    runs_with_loss: int = 0
    acknowledged_local: int = 0
    """Acknowledged as stored only on the master."""
    lost_local: int = 0
    duplicates: int = 0
    unavailable_s: list[float] = field(default_factory=list)
    """For each run, the longest time without an acknowledgement after the failure; up to its end if none came."""

    def add(self, other: Cell) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class _Trial:
    """One run of one cell."""

    def __init__(self, cluster: Any, system: BrokerSystem, failure: str, replication: str, seed: int) -> None:
        self._cluster, self._system = cluster, system
        self._failure, self._replication = failure, replication
        self._random = random.Random(f"guarantees/{seed}")
        self._loop = asyncio.get_running_loop()
        self._acks: list[tuple[float, int, int, bool]] = []  # time, queue, value, local
        self._writing = True
        self._background: list[asyncio.Task[None]] = []

    async def run(self) -> Cell:
        system = self._system
        if isinstance(self._cluster, SimCluster):
            links = [Link(*pair) for pair in itertools.permutations(self._cluster.hosts, 2)]
            await self._cluster.links.shape("network", dict.fromkeys(links, NETWORK))
        await system.start()
        writers = [self._loop.create_task(self._write(number)) for number in range(WRITERS)]
        await asyncio.sleep(BEFORE_S + self._random.random())
        victim = (await system.leaders())[0]
        failed_s = self._loop.time()
        await self._fail(victim)
        await asyncio.sleep(AFTER_S)
        self._writing = False
        await asyncio.gather(*writers)
        ended_s = self._loop.time()
        for task in self._background:
            await task
        found = await self._read_all()
        return self._count(found, failed_s, ended_s)

    async def _write(self, number: int) -> None:
        """Append values, retrying each until it is acknowledged, as a producer does."""
        connection: Any = self._system.connection("queue", process=number, thread=number)
        value = number
        while self._writing:
            try:
                await connection.append(number % QUEUES, value)
                self._acks.append((self._loop.time(), number % QUEUES, value, connection.durability is not None))
                value += WRITERS
            except Exception:
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(PAUSE_S)
        await connection.close()

    async def _fail(self, victim: str) -> None:
        process = self._system.process(victim)
        assert process is not None
        machine = self._cluster.machine(victim) if isinstance(self._cluster, SimCluster) else None
        if self._failure == "stop":
            await process.terminate()
        elif machine is None or self._failure == "crash":
            await process.kill()
        else:
            machine.power_fail()
        if machine is None and self._failure == "power":
            await self._cluster.disks.cut_power(POWER, victim)
        self._background.append(self._loop.create_task(self._mend(victim, machine)))

    async def _mend(self, victim: str, machine: Any) -> None:
        is_for_good = self._failure in ("machine", "disk")
        if is_for_good and self._replication in ("sync", "async"):
            await asyncio.sleep(OPERATOR_S)
            await self._system.promote(next(host for host in self._cluster.hosts if host != victim))
        elif self._failure in BACK_AFTER_S:
            await asyncio.sleep(BACK_AFTER_S[self._failure])
        if self._failure in BACK_AFTER_S:
            if self._failure == "disk":
                self._empty_disk(victim, machine)
            if machine is not None:
                machine.boot()
            await self._system.restart(victim)

    def _empty_disk(self, victim: str, machine: Any) -> None:
        """Remove everything but the configuration."""
        if machine is None:
            shutil.rmtree(self._cluster.local_path(victim, f"{self._cluster.data_dir(victim)}/data"))
            return
        for path in machine.disk.paths():
            if not path.endswith("/broker.toml"):
                machine.disk.unlink(path)

    async def _read_all(self) -> dict[int, Counter[int]]:
        """Read every queue from begin to end; {} if there is no master to read from."""
        deadline_s = self._loop.time() + SETTLE_S
        while not any(status.takes_writes for status in (await self._system.statuses()).values()):
            if self._loop.time() > deadline_s:
                return {}
            await asyncio.sleep(0.1)
        for home in itertools.count():  # if reading fails, try from another home: the link may have been reset
            connection: Any = self._system.connection("queue", process=999 + home, thread=home)
            try:
                return await self._read_at(connection)
            except Exception as error:
                if not hasattr(error, "is_definite") or self._loop.time() > deadline_s:
                    raise
            finally:
                await connection.close()
        raise AssertionError("counting ends")

    async def _read_at(self, connection: Any) -> dict[int, Counter[int]]:
        found: dict[int, Counter[int]] = {}
        for queue in range(QUEUES):
            values: list[int] = []
            tail = 1
            while len(values) < tail:
                _, more, tail = await connection.read(queue, len(values), 32)
                values += more
                if not more:
                    break
            found[queue] = Counter(values)
        return found

    def _count(self, found: dict[int, Counter[int]], failed_s: float, ended_s: float) -> Cell:
        lost = [ack for ack in self._acks if not found.get(ack[1], Counter())[ack[2]]]
        times = [failed_s, *(time for time, *_ in self._acks if time >= failed_s), ended_s]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Cell(
            runs=1,
            acknowledged=sum(not ack[3] for ack in self._acks),
            lost=sum(not ack[3] for ack in lost),
            runs_with_loss=int(any(not ack[3] for ack in lost)),
            acknowledged_local=sum(ack[3] for ack in self._acks),
            lost_local=sum(ack[3] for ack in lost),
            duplicates=sum(count - 1 for values in found.values() for count in values.values() if count > 1),
            unavailable_s=[round(max(gaps), 3)],
        )


def measure(failure: str, flush: str, replication: str, *, cluster_name: str, seed: int) -> Cell:
    """Perform one run."""
    cluster_class = registry.load("clusters", cluster_name)
    nodes, setting = REPLICATIONS[replication]
    settings = {"replication": setting, "flush_mode": flush, **(ROCKETMQ_FLUSH if flush == "async" else {})}
    if setting != "dledger":
        settings["ha_mismatch"] = "heal"

    async def main(directory: str) -> Cell:
        state = None if cluster_class is SimCluster else RunState.create(f"guarantees-{secrets.token_hex(4)}")
        cluster = cluster_class(
            node_count=nodes, run=state, work_dir=directory, ports=BrokerSystem.ports,
            extra_hosts=BrokerSystem.extra_hosts,
        )  # fmt: skip
        system = BrokerSystem(
            cluster=cluster, settings=settings, keys=QUEUES, log_dir=directory,
            operation_timeout_s=OPERATION_TIMEOUT_S,
        )  # fmt: skip
        if failure == "power" and cluster_class is not SimCluster:
            cluster.prepare({("disks", "power")})
        await cluster.start()
        try:
            return await _Trial(cluster, system, failure, replication, seed).run()
        finally:
            await system.stop()
            await cluster.stop()
            if state is not None:
                state.close()

    with tempfile.TemporaryDirectory(prefix="splitbrain-guarantees-") as directory:
        cell: Cell = run_harness(cluster_class, main(directory), seed=seed)
        return cell


def cells(cluster_name: str) -> Iterator[tuple[str, str, str]]:
    """Every cell of the grid that can be measured on this cluster."""
    for failure in FAILURES if cluster_name == "sim" else REAL:
        for flush in FLUSHES:
            for replication in REPLICATIONS:
                yield failure, flush, replication


def load() -> dict[str, dict[str, Any]]:
    """Results so far: cluster -> cell -> figures."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def main() -> None:
    """Measure cells and keep the results, or make the page."""
    parser = argparse.ArgumentParser(prog="guarantees", description="what each guarantee costs and buys")
    parser.add_argument("--runs", type=int, default=10, help="runs of each cell in all; what is there already counts")
    parser.add_argument(
        "--cells", nargs="*", default=[], metavar="TEXT", help="only cells with one of these in the name"
    )
    parser.add_argument("--cluster", default="sim", choices=["sim", "local"])
    parser.add_argument("--again", action="store_true", help="forget what is there")
    parser.add_argument("--page", action="store_true", help="only make the page")
    arguments = parser.parse_args(sys.argv[1:])
    results = load()
    known = results.setdefault(arguments.cluster, {})
    if arguments.again:
        known.clear()
    for wanted, names in itertools.product(range(1, arguments.runs + 1), list(cells(arguments.cluster))):
        name = "/".join(names)
        cell = Cell(**known[name]) if name in known else Cell()
        is_chosen = not arguments.cells or any(text in name for text in arguments.cells)
        if arguments.page or not is_chosen or cell.runs >= wanted:
            continue
        one = measure(*names, cluster_name=arguments.cluster, seed=wanted)
        print(f"{name}, run {wanted}: {one}", flush=True)
        cell.add(one)
        known[name] = asdict(cell)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(results))


def render(results: dict[str, dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# What each guarantee costs and buys",
        "",
        "Made by `python -m benchmarks.guarantees` from runs with one failure of the leader's machine each. "
        f"{WRITERS} producers resend each message until it is acknowledged. The first column gives the failure and the "
        f"repair; besides, in classic HA an operator promotes the slave {OPERATOR_S:g} s after a machine or a disk "
        f"has died. Simulated replicas are {NETWORK.delay_ms:g} ms apart, and {NETWORK.loss_percent:g} % of the "
        "packets between them are lost.",
        "",
        "A cell holds: acknowledged messages that were lost, out of all acknowledged ones; runs in which any was lost, "
        "with a 95 % interval (Wilson) of how often to expect that; the median of the seconds without an "
        "acknowledgement; and duplicates. Messages acknowledged as stored on the master only (FLUSH_DISK_TIMEOUT, "
        "FLUSH_SLAVE_TIMEOUT, SLAVE_NOT_AVAILABLE) are counted separately.",
    ]
    promised = {
        "none": "S1: failures 1 to 4 lose nothing under a synchronous flush, a little under an asynchronous one; "
        "5 and 6 lose everything",
        "async": "S1: about 99 % of the messages survive failures 5 and 6",
        "sync": "S1: every acknowledged message survives failures 5 and 6",
        "dledger3": "S2, S3: no acknowledged message is lost while a majority lives; a new leader without an operator",
        "dledger5": "the same, with two machines to spare",
    }
    lines += ["", "| replication | what the articles promise |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in promised.items()]
    lines += ["", _agreement(results)] if results.get("local") else []
    for cluster_name, title in (("sim", "Simulated"), ("local", "Repeated with real processes")):
        known = results.get(cluster_name, {})
        for flush in FLUSHES:
            rows = [failure for failure in FAILURES if any(f"{failure}/{flush}/" in name for name in known)]
            if not rows:
                continue
            lines += ["", f"## {title}, {'synchronous' if flush == 'sync' else 'asynchronous'} flush", ""]
            lines += ["| failure | " + " | ".join(REPLICATIONS) + " |", "|---|" + "---|" * len(REPLICATIONS)]
            for failure in rows:
                shown = [_show(known.get(f"{failure}/{flush}/{replication}")) for replication in REPLICATIONS]
                lines.append(f"| {FAILURES[failure]} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _agreement(results: dict[str, dict[str, Any]]) -> str:
    """A text on whether real cells lose messages where simulated ones do."""
    real, simulated = results["local"], results.get("sim", {})
    both = [name for name in real if name in simulated]
    apart = []
    for name in both:
        one, other = (Cell(**cells[name]) for cells in (real, simulated))
        intervals = [wilson(cell.runs_with_loss, cell.runs) for cell in (one, other)]
        if max(each.low for each in intervals) > min(each.high for each in intervals):
            shares = f"{one.runs_with_loss} of {one.runs} real runs, {other.runs_with_loss} of {other.runs} simulated"
            apart.append(f"{name} ({shares})")
    runs = sum(real[name]["runs"] for name in both)
    said = f"{len(both)} cells were repeated with real processes ({runs} runs), at the end of this page. "
    if apart:
        return said + "The intervals of how often anything is lost do not overlap in: " + "; ".join(apart) + "."
    return said + "In each of them the interval of how often anything is lost overlaps that of the simulation."


def _show(content: dict[str, Any] | None) -> str:
    if content is None:
        return "not measured"
    cell = Cell(**content)
    interval = wilson(cell.runs_with_loss, cell.runs)
    median = sorted(cell.unavailable_s)[len(cell.unavailable_s) // 2]
    parts = [
        f"**{cell.lost}** of {cell.acknowledged}",
        f"{cell.runs_with_loss} of {cell.runs} runs ({interval.low:.0%} to {interval.high:.0%})",
        f"{median:.1f} s",
        f"{cell.duplicates} duplicates",
    ]
    if cell.acknowledged_local:
        parts.insert(1, f"on the master only: {cell.lost_local} of {cell.acknowledged_local}")
    return "<br>".join(parts)


if __name__ == "__main__":
    main()
