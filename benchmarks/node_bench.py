"""How fast the node is: broker processes on loopback, and a load generator in a process of its own.

    python -m benchmarks.node_bench [--nodes 3] [--seconds 5] [--replication single,async,sync,dledger] [--json FILE]

For each kind of replication (a single broker; classic HA with a master and slaves on the other nodes, as ASYNC_MASTER
and as SYNC_MASTER; DLedger) and flush mode, it measures acknowledged messages of 128 bytes per second, and percentiles
of their latency: one by one and in batches of 32, from 64 senders and from one, each waiting for its answer before it
sends the next. Every message has its own UNIQ_KEY, as from RocketMQ's clients; one row of batches has no properties, as
all rows had formerly. The generator is lean (`benchmarks/_load.py`): its frames are built in advance. Rows named
`client` use this project's own remoting client instead. Each row also has the master's CPU time per message, and the
number of messages per fsync and per push to a follower. It then reports the ratios, and the share of a bare server's
rate (`benchmarks/_bare_server.py`); pulls and the wake-up of a held pull on the single broker; and the time from kill
-9 of the leader to the first message acknowledged by another. Everything shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import _bare_server
from benchmarks._node_page import ratios, share_of_bare
from node.remoting import ClientLimits, Command, RemotingClient, RemotingError

__all__ = ["Failover", "Load", "Throughput", "main", "measure_failover", "measure_reading", "measure_throughput"]

BODY_SIZE_BYTES = 128
QUEUES = 8
READY_TIMEOUT_S = 60.0
SETTLE_S = 1.0
"""Time for slaves to connect, or for sent messages to be dispatched."""
SEND_TIMEOUT_MS = 5000
WARM_UP_S = 1.0


_requests = itertools.count()


def _send(number: int) -> Command:
    properties = f"UNIQ_KEY\x017F00000100014E25A3B1{next(_requests):012X}\x02WAIT\x01true\x02"
    fields: dict[str, str | int | bool] = {"a": "bench", "b": "bench", "e": number % QUEUES, "i": properties}
    return Command.request(310, fields, b"x" * BODY_SIZE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The messages to send, and their senders."""

    senders: int
    batch: int = 1
    connections: int = 4
    generator: str = "lean"
    properties: str = "keys"
    """The properties that `_load` puts into each message: "keys" as all clients do, or "none"."""


LOADS = (
    Load(senders=64),
    Load(senders=64, batch=32),
    Load(senders=64, batch=32, properties="none"),
    Load(senders=64, generator="client"),
    Load(senders=1, connections=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One row of figures. Latencies (ms) are of acknowledged requests only; ratios with a divisor of 0 are NaN."""

    replication: str
    flush_mode: str
    generator: str
    senders: int
    batch: int
    properties: str
    messages_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    errors: int
    cpu_us: float
    """CPU time (µs) of the master's process per message."""
    per_fsync: float
    """Messages per fsync of the master's log."""
    per_push: float
    """Messages per push to a follower (DLedger)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """Times (ms) from kill -9 of the leader to the first acknowledged message."""

    timing: str
    times_ms: tuple[float, ...]


class Group:
    """Broker processes of one group on 127.0.0.1, or a single broker, depending on `replication`. They run the code in
    `tree`, or that in the current directory."""

    def __init__(
        self,
        directory: str,
        *,
        nodes: int,
        flush_mode: str,
        timing: str,
        replication: str = "dledger",
        tree: str | None = None,
        python: str = sys.executable,
    ) -> None:
        self._directory = directory
        self._tree = tree
        self._python = python
        self._replication = replication
        nodes = 1 if replication == "single" else nodes
        self.ids = [f"n{number}" for number in range(1, nodes + 1)]
        ports = _free_ports(2 * nodes)
        self.addresses = {node: f"127.0.0.1:{port}" for node, port in zip(self.ids, ports[:nodes], strict=True)}
        self._ledger = {node: f"127.0.0.1:{port}" for node, port in zip(self.ids, ports[nodes:], strict=True)}
        self._flush_mode = flush_mode
        self._timing = timing
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        """Start one member; its output goes to a file of its own."""
        config = os.path.join(self._directory, f"{node}.toml")
        Path(config).write_text(self._config(node), encoding="utf-8")
        argv, environment = self._command(node, config)
        with open(os.path.join(self._directory, f"{node}.log"), "ab") as log:
            self._processes[node] = subprocess.Popen(
                argv, stdout=log, stderr=log, cwd=self._tree, env={**os.environ, **environment}
            )

    def _command(self, node: str, config: str) -> tuple[list[str], Mapping[str, str]]:
        """The command that starts a member, and additional environment variables."""
        return [self._python, "-m", "node", "broker", "--config", config], {}

    def kill(self, node: str) -> None:
        """kill -9 one member and wait until it is gone."""
        process = self._processes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def cpu_s(self, node: str) -> float:
        """CPU time (s) that one member's process has used so far."""
        fields = Path(f"/proc/{self._processes[node].pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Stop all members (SIGSTOP) until `resume`."""
        for process in self._processes.values():
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all members run again."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill every member."""
        for node in list(self._processes):
            self.kill(node)

    def _config(self, node: str) -> str:
        lines = [
            f'self_id = "{node}"',
            f'listen = "{self.addresses[node]}"',
            f'data_dir = "{self._directory}/{node}"',
            f'flush_mode = "{self._flush_mode}"',
            f'timing = "{self._timing}"',
            'log_level = "warning"',
            *self._replicated(node),
            "[[topics]]",
            'name = "bench"',
            f"queues = {QUEUES}",
        ]
        return "\n".join(lines)

    def _replicated(self, node: str) -> list[str]:
        own = self._ledger[node]
        if self._replication == "dledger":
            peers = [f'{other} = "{address}"' for other, address in self._ledger.items()]
            return ["[dledger]", f'listen = "{own}"', "[dledger.peers]", *peers]
        if self._replication == "single":
            return ["[classic]"]
        master, ha_port = self.ids[0], own.rpartition(":")[2]
        if node == master:
            return ["[classic]", f'broker_role = "{self._replication.upper()}_MASTER"', f"ha_listen_port = {ha_port}"]
        return [
            "[classic]",
            'broker_role = "SLAVE"',
            f"broker_id = {self.ids.index(node)}",
            f'ha_master_address = "{self._ledger[master]}"',
        ]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def find_master(client: RemotingClient, group: Group, *, timeout_s: float) -> str:
    """The member that takes messages. Raises TimeoutError."""

    async def is_master(node: str) -> bool:
        try:
            reply = await client.invoke(group.addresses[node], Command.request(28), timeout_ms=500)
        except RemotingError:
            return False
        return bool(json.loads(reply.body)["table"]["takesWrites"] == "true") if reply.code == 0 else False

    async with asyncio.timeout(timeout_s):
        while True:
            answers = await asyncio.gather(*(is_master(node) for node in group.ids))
            if any(answers):
                return group.ids[answers.index(True)]
            await asyncio.sleep(0.05)


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


async def _status(client: RemotingClient, address: str) -> dict[str, Any]:
    reply = await client.invoke(address, Command.request(28), timeout_ms=5000)
    table: dict[str, Any] = json.loads(reply.body)["table"]
    return table


def run_load(mode: str, address: str, *words: object) -> dict[str, float]:
    """Run the load generator once. Raises CalledProcessError if it fails."""
    argv = [sys.executable, "-m", "benchmarks._load", mode, address, "--queues", str(QUEUES), *map(str, words)]
    figures: dict[str, float] = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    return figures


async def _send_with_client(address: str, senders: int, duration_s: float) -> dict[str, float]:
    """The same load from this project's own remoting client, over a single connection."""
    client = RemotingClient(name="bench")
    latencies: list[float] = []
    errors = 0

    async def send_until(begin_s: float, end_s: float, number: int) -> None:
        nonlocal errors
        while (began_s := time.perf_counter()) < end_s:
            try:
                reply = await client.invoke(address, _send(number), timeout_ms=SEND_TIMEOUT_MS)
            except RemotingError:
                errors += 1
                continue
            if reply.code != 0:
                errors += 1
            elif began_s >= begin_s:
                latencies.append((time.perf_counter() - began_s) * 1000)

    begin_s = time.perf_counter() + WARM_UP_S
    try:
        await asyncio.gather(*(send_until(begin_s, begin_s + duration_s, number) for number in range(senders)))
        took_s = time.perf_counter() - begin_s
    finally:
        await client.close()
    ordered = sorted(latencies) or [math.nan]
    return {
        "per_s": len(latencies) / took_s,
        "p50_ms": _percentile(ordered, 0.5),
        "p90_ms": _percentile(ordered, 0.9),
        "p99_ms": _percentile(ordered, 0.99),
        "p999_ms": _percentile(ordered, 0.999),
        "max_ms": ordered[-1],
        "errors": errors,
    }


def _ratio(amount: float, number: float) -> float:
    return amount / number if number else math.nan


async def _measure_rows(
    group: Group, replication: str, flush_mode: str, loads: Sequence[Load], duration_s: float
) -> AsyncIterator[Throughput]:
    client = RemotingClient(name="bench")
    try:
        master = await find_master(client, group, timeout_s=READY_TIMEOUT_S)
        address = group.addresses[master]
        await asyncio.sleep(SETTLE_S)
        for load in loads:
            before, cpu_before_s = await _status(client, address), group.cpu_s(master)
            if load.generator == "client":
                figures = await _send_with_client(address, load.senders, duration_s)
            else:
                figures = await asyncio.to_thread(
                    run_load, "send", address, "--senders", load.senders, "--batch", load.batch, "--connections",
                    load.connections, "--seconds", duration_s, "--properties", load.properties,
                )  # fmt: skip
            after, cpu_s = await _status(client, address), group.cpu_s(master) - cpu_before_s
            grown = {
                name: float(after.get(name, 0)) - float(before.get(name, 0))
                for name in ("putTotal", "logFlushTotal", "logPushTotal", "logPushedTotal")
            }
            yield Throughput(
                replication=replication,
                flush_mode=flush_mode,
                generator=load.generator,
                senders=load.senders,
                batch=load.batch,
                properties=load.properties,
                messages_per_s=figures["per_s"],
                p50_ms=figures.get("p50_ms", math.nan),
                p90_ms=figures.get("p90_ms", math.nan),
                p99_ms=figures.get("p99_ms", math.nan),
                p999_ms=figures.get("p999_ms", math.nan),
                max_ms=figures.get("max_ms", math.nan),
                errors=int(figures["errors"]),
                cpu_us=_ratio(cpu_s * 1e6, grown["putTotal"]),
                per_fsync=_ratio(grown["putTotal"], grown["logFlushTotal"]) if flush_mode == "sync" else math.nan,
                per_push=_ratio(grown["logPushedTotal"], grown["logPushTotal"]),
            )
    finally:
        await client.close()


def measure_throughput(
    *, nodes: int, flush_mode: str, loads: Sequence[Load], duration_s: float, replication: str = "dledger"
) -> list[Throughput]:
    """Run one group under each load. Raises TimeoutError if no member becomes master."""
    directory = tempfile.mkdtemp(prefix="splitbrain-bench-")
    group = Group(directory, nodes=nodes, flush_mode=flush_mode, timing="fast", replication=replication)

    async def run() -> list[Throughput]:
        rows = []
        async for row in _measure_rows(group, replication, flush_mode, loads, duration_s):
            rows.append(row)
            print(_line(row), flush=True)
        return rows

    try:
        for node in group.ids:
            group.start(node)
        return asyncio.run(run())
    finally:
        group.stop()
        shutil.rmtree(directory)


def measure_reading(*, duration_s: float) -> dict[str, dict[str, float]]:
    """Pulls of 32 messages and the wake-up of a held pull, on a single broker."""
    directory = tempfile.mkdtemp(prefix="splitbrain-bench-")
    group = Group(directory, nodes=1, flush_mode="async", timing="fast", replication="single")
    (address,) = group.addresses.values()

    async def wait() -> None:
        client = RemotingClient(name="bench")
        await find_master(client, group, timeout_s=READY_TIMEOUT_S)
        await client.close()

    try:
        group.start(group.ids[0])
        asyncio.run(wait())
        run_load("send", address, "--batch", 32, "--seconds", 2)
        time.sleep(SETTLE_S)
        return {
            "pull": run_load("pull", address, "--senders", QUEUES, "--seconds", duration_s),
            "wake": run_load("wake", address, "--seconds", duration_s),
        }
    finally:
        group.stop()
        shutil.rmtree(directory)


COLUMNS = ("replica.", "flush", "load", "senders", "batch", "props", "msg/s", "p50 ms", "p90", "p99", "p99.9", "max",
    "errors", "cpu us", "/fsync", "/push")  # fmt: skip


def _line(row: Throughput) -> str:
    load = (row.replication, row.flush_mode, row.generator, str(row.senders), str(row.batch), row.properties)
    words = (*load, f"{row.messages_per_s:.0f}")
    times = (row.p50_ms, row.p90_ms, row.p99_ms, row.p999_ms, row.max_ms)
    shares = ("-" if math.isnan(share) else f"{share:.1f}" for share in (row.cpu_us, row.per_fsync, row.per_push))
    return " ".join(
        f"{word:>8}" for word in (*words, *(f"{time_ms:.2f}" for time_ms in times), str(row.errors), *shares)
    )


async def _kill_and_wait(group: Group, client: RemotingClient, number: int) -> float:
    """Kill the leader, send to the others until one acknowledges, and restart the leader. Returns the time (ms)."""
    leader = await find_master(client, group, timeout_s=READY_TIMEOUT_S)
    others = [node for node in group.ids if node != leader]
    group.kill(leader)
    began_s = time.perf_counter()

    async def send_until_ok(node: str) -> None:
        while True:
            try:
                reply = await client.invoke(group.addresses[node], _send(number), timeout_ms=1000)
            except RemotingError:
                reply = None
            if reply is not None and reply.code == 0:
                return
            await asyncio.sleep(0.005)

    tasks = [asyncio.ensure_future(send_until_ok(node)) for node in others]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=READY_TIMEOUT_S)
    took_ms = (time.perf_counter() - began_s) * 1000
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    group.start(leader)
    await _wait_until_whole(client, group, timeout_s=READY_TIMEOUT_S)
    return took_ms


async def _wait_until_whole(client: RemotingClient, group: Group, *, timeout_s: float) -> None:
    """Wait until every member answers, all have committed the same, and one takes messages, so that each kill strikes a
    complete group, however long a start takes on a busy machine. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            answers = await asyncio.gather(
                *(_status(client, group.addresses[node]) for node in group.ids), return_exceptions=True
            )
            tables = [answer for answer in answers if isinstance(answer, dict)]
            if (
                len(tables) == len(group.ids)
                and any(table["takesWrites"] == "true" for table in tables)
                and len({table["committedIndex"] for table in tables}) == 1
            ):
                return
            await asyncio.sleep(0.05)


def measure_failover(*, nodes: int, timing: str, kills: int) -> Failover:
    """Kill the leader `kills` times. Raises TimeoutError if no member becomes master."""
    directory = tempfile.mkdtemp(prefix="splitbrain-bench-")
    group = Group(directory, nodes=nodes, flush_mode="sync", timing=timing)

    async def run() -> list[float]:
        client = RemotingClient(ClientLimits(connect_timeout_ms=200), name="bench")
        try:
            return [await _kill_and_wait(group, client, number) for number in range(kills)]
        finally:
            await client.close()

    try:
        for node in group.ids:
            group.start(node)
        times_ms = asyncio.run(run())
    finally:
        group.stop()
        shutil.rmtree(directory)
    return Failover(timing=timing, times_ms=tuple(times_ms))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Benchmark a group of brokers on this machine.")
    parser.add_argument("--nodes", type=int, default=3, help="members of the group (default 3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="load for each row (default 5)")
    parser.add_argument("--kills", type=int, default=5, help="leaders killed for each timing (default 5)")
    parser.add_argument(
        "--replication",
        default="single,async,sync,dledger",
        help="of single, async, sync, dledger, comma-separated (default all)",
    )
    parser.add_argument("--flush", default="async,sync", help="flush modes, comma-separated (default async,sync)")
    parser.add_argument("--timing", default="fast,default", help="failover timings, comma-separated")
    parser.add_argument("--reading", action="store_true", help="also measure pulls and wake-ups")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)

    print(f"{options.nodes} nodes on this machine ({os.cpu_count()} CPUs), messages of {BODY_SIZE_BYTES} bytes")
    print(" ".join(f"{name:>8}" for name in COLUMNS))
    rows: list[Throughput] = []
    bare: list[float] = []
    for replication, flush_mode in itertools.product(options.replication.split(","), options.flush.split(",")):
        if replication == "single":
            bare.append(_bare_server.measure(options.seconds))
        rows += measure_throughput(
            nodes=options.nodes, flush_mode=flush_mode, loads=LOADS, duration_s=options.seconds, replication=replication
        )
    print("\n".join([*ratios([asdict(row) for row in rows]), *share_of_bare([asdict(row) for row in rows], bare)]))
    reading = measure_reading(duration_s=options.seconds) if options.reading else {}
    if reading:
        pull, wake = reading["pull"], reading["wake"]
        print(f"pull: {pull['per_s']:.0f} messages/s, {pull['pulls_per_s']:.0f} pulls/s")
        print(f"wake-up: median {wake['p50_ms']:.2f} ms, p99 {wake['p99_ms']:.2f}, {wake['max_ms']:.2f} at most")
    failovers = []
    for timing in options.timing.split(",") if options.kills else ():
        failover = measure_failover(nodes=options.nodes, timing=timing, kills=options.kills)
        failovers.append(failover)
        ordered = sorted(failover.times_ms)
        print(
            f"failover, timing {timing}: median {_percentile(ordered, 0.5):.0f} ms,"
            f" {ordered[0]:.0f} to {ordered[-1]:.0f} ms in {len(ordered)} kills",
            flush=True,
        )
    if options.json:
        figures = {
            "conditions": {
                **{"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[2]},
                **{"loop": "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"},
                **{"nodes": options.nodes, "seconds": options.seconds},
            },
            "bare": bare,
            "reading": reading,
            "throughput": [asdict(row) for row in rows],
            "failover": [asdict(each) for each in failovers],
        }
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
