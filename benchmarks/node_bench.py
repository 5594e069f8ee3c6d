"""How fast the node is: a group of real broker processes on loopback, and this process as their clients.

    python benchmarks/node_bench.py [--nodes 3] [--seconds 5] [--timing fast] [--json FILE]

For each kind of replication (DLedger; classic HA with one slave less than nodes, as SYNC_MASTER and as ASYNC_MASTER; a
single broker), flush mode and number of senders: acknowledged messages per second and the percentiles of their latency,
messages of 128 bytes sent one by one, every sender waiting for its answer before it sends the next. Then the time
from kill -9 of the leader to the first message acknowledged by another. The load generator runs on the same
machine and takes its share of it; the figures say what a machine does as a whole.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from node.remoting import ClientLimits, Command, RemotingClient, RemotingError

__all__ = ["Failover", "Throughput", "main", "measure_failover", "measure_throughput"]

BODY_SIZE_BYTES = 128
QUEUES = 8
READY_TIMEOUT_S = 60.0
SEND_TIMEOUT_MS = 5000
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One row: latencies in milliseconds, of acknowledged messages only."""

    replication: str
    flush_mode: str
    senders: int
    messages_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """Times from kill -9 of the leader to the first acknowledged message, in milliseconds."""

    timing: str
    times_ms: tuple[float, ...]


class Group:
    """Broker processes of one group on 127.0.0.1; a single one where `replication` says so."""

    def __init__(
        self, directory: str, *, nodes: int, flush_mode: str, timing: str, replication: str = "dledger"
    ) -> None:
        self._directory = directory
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
        with open(os.path.join(self._directory, f"{node}.log"), "ab") as log:
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", "node", "broker", "--config", config], stdout=log, stderr=log
            )

    def kill(self, node: str) -> None:
        """kill -9 one member and wait until it is gone."""
        process = self._processes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait()

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


def _send(number: int) -> Command:
    return Command.request(310, {"a": "bench", "b": "bench", "e": number % QUEUES}, b"x" * BODY_SIZE_BYTES)


async def _find_master(client: RemotingClient, group: Group, *, timeout_s: float) -> str:
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


async def _load(group: Group, *, senders: int, duration_s: float) -> tuple[list[float], int, float]:
    """Latencies in ms of acknowledged messages, the number of errors, and the seconds it took."""
    client = RemotingClient(name="bench")
    try:
        address = group.addresses[await _find_master(client, group, timeout_s=READY_TIMEOUT_S)]
        latencies: list[float] = []
        errors = 0

        async def send_until(end_s: float, number: int) -> None:
            nonlocal errors
            while (began_s := time.perf_counter()) < end_s:
                try:
                    reply = await client.invoke(address, _send(number), timeout_ms=SEND_TIMEOUT_MS)
                except RemotingError:
                    errors += 1
                    continue
                if reply.code == 0:
                    latencies.append((time.perf_counter() - began_s) * 1000)
                else:
                    errors += 1
                    await asyncio.sleep(0.01)

        async def phase(seconds: float) -> float:
            began_s = time.perf_counter()
            await asyncio.gather(*(send_until(began_s + seconds, number) for number in range(senders)))
            return time.perf_counter() - began_s

        await phase(WARM_UP_S)
        latencies.clear()
        errors = 0
        took_s = await phase(duration_s)
        return latencies, errors, took_s
    finally:
        await client.close()


def measure_throughput(
    *, nodes: int, flush_mode: str, senders: int, duration_s: float, replication: str = "dledger"
) -> Throughput:
    """Run one group under load. Raises TimeoutError when no member becomes master."""
    directory = tempfile.mkdtemp(prefix="splitbrain-bench-")
    group = Group(directory, nodes=nodes, flush_mode=flush_mode, timing="fast", replication=replication)
    try:
        for node in group.ids:
            group.start(node)
        latencies, errors, took_s = asyncio.run(_load(group, senders=senders, duration_s=duration_s))
    finally:
        group.stop()
        shutil.rmtree(directory)
    ordered = sorted(latencies) or [float("nan")]
    return Throughput(
        replication=replication,
        flush_mode=flush_mode,
        senders=senders,
        messages_per_s=len(latencies) / took_s,
        p50_ms=_percentile(ordered, 0.5),
        p90_ms=_percentile(ordered, 0.9),
        p99_ms=_percentile(ordered, 0.99),
        p999_ms=_percentile(ordered, 0.999),
        max_ms=ordered[-1],
        errors=errors,
    )


async def _kill_and_wait(group: Group, client: RemotingClient, number: int) -> float:
    """Kill the leader, send to all others until one acknowledges; restart the killed one. Returns ms."""
    leader = await _find_master(client, group, timeout_s=READY_TIMEOUT_S)
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
    await asyncio.sleep(1.0)  # the restarted member catches up, so that each kill finds a whole group
    return took_ms


def measure_failover(*, nodes: int, timing: str, kills: int) -> Failover:
    """Kill the leader `kills` times. Raises TimeoutError when no member becomes master."""
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
        "--replication", default="dledger", help="of dledger, sync, async, single, comma-separated (default dledger)"
    )
    parser.add_argument("--timing", default="fast,default", help="failover timings, comma-separated")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)

    print(f"{options.nodes} nodes on this machine ({os.cpu_count()} CPUs), {BODY_SIZE_BYTES}-byte messages one by one")
    print(
        " ".join(
            f"{name:>8}"
            for name in ("replica.", "flush", "senders", "msg/s", "p50 ms", "p90", "p99", "p99.9", "max", "errors")
        )
    )
    rows = []
    for replication, flush_mode, senders in itertools.product(
        options.replication.split(","), ("sync", "async"), (1, 64)
    ):
        row = measure_throughput(
            nodes=options.nodes,
            flush_mode=flush_mode,
            senders=senders,
            duration_s=options.seconds,
            replication=replication,
        )
        rows.append(row)
        percentiles = (row.p50_ms, row.p90_ms, row.p99_ms, row.p999_ms, row.max_ms)
        print(
            f"{row.replication:>8} {row.flush_mode:>8} {row.senders:8} {row.messages_per_s:8.0f}",
            *(f"{figure:8.2f}" for figure in percentiles),
            f"{row.errors:8}",
            flush=True,
        )
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
        figures = {"throughput": [asdict(row) for row in rows], "failover": [asdict(each) for each in failovers]}
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
