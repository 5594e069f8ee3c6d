"""How many operations per second clients of `harness.sdk` do against a system that does nothing.

In Python through the SDK, on one core: goal 20,000/s. As programs that speak JSON lines, on two cores: goal 5,000/s in
total, including their own work. Both use the whole path: generator, workers, history on disk.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.generator import Limit
from harness.history_writer import HistoryWriter
from harness.json_lines import client_program
from harness.sdk import Client
from harness.seeded import seeded
from harness.worker import Client as WorkerClient
from harness.worker import Workers
from harness.workloads.client_register import ClientRegisterWorkload

SDK_OPERATIONS = 100_000
SDK_GOAL_OPS_PER_S = 20_000
PROGRAM_OPERATIONS = 30_000
PROGRAM_GOAL_OPS_PER_S = 5_000

NO_OP_PROGRAM = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    reply = {"id": message["id"], "type": "ok", "value": 1}
    if message["type"] == "hello":
        reply = {"id": message["id"], "type": "hello", "capabilities": ["read", "write"]}
    sys.stdout.write(json.dumps(reply) + "\\n")
    sys.stdout.flush()
"""


class NoOpClient(Client):
    """Answers immediately, without I/O."""

    async def read(self, key: Any) -> Any:
        return 1

    async def write(self, key: Any, value: Any) -> None:
        pass


class NoHost:
    """Stands for a host: there is no system."""

    name = "n1"
    port_names = ()


def operations_per_s(client_class: Callable[[], Client], *, threads: int, operations: int) -> tuple[float, float]:
    """Run the workload `register` with `threads` logical clients. Returns operations per second, and operations per
    second of the harness's own CPU time, which other programs of the machine disturb less."""
    workload = ClientRegisterWorkload()

    def make(process: int, thread: int) -> WorkerClient:
        client = client_class()
        host: Any = NoHost()
        client.host, client.hosts, client.process, client.timeout_s = host, [host], process, 30.0
        client.settings = client.environment = {}
        return workload.client(client)

    async def run(path: Path) -> tuple[float, float]:
        loop = asyncio.get_running_loop()

        def now_ns() -> int:
            return int(loop.time() * 1e9)

        with HistoryWriter(path, now_ns) as writer:
            workers = Workers(
                generator=Limit(operations, workload.generator()),
                threads=threads,
                make_client=make,
                recorder=writer,
                now_ns=now_ns,
                random=seeded("clients"),
                operation_timeout_s=60.0,
            )
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            await workers.run()
            return operations / (time.perf_counter() - began_s), operations / (time.process_time() - began_cpu_s)

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(run(Path(directory) / "history.jsonl"))


def print_rates(threads: int, per_s: float, per_cpu_s: float) -> None:
    """Print one line of figures."""
    print(f"  {threads:4d} clients  {per_s:9,.0f} operations/s  {per_cpu_s:9,.0f} per second of the harness's own time")


def main() -> None:
    """Print one line per number of logical clients."""
    cores = sorted(os.sched_getaffinity(0))
    print(f"through the SDK on one core, {SDK_OPERATIONS} operations (goal: {SDK_GOAL_OPS_PER_S}/s)")
    os.sched_setaffinity(0, cores[:1])
    try:
        for threads in (1, 10, 100):
            print_rates(threads, *operations_per_s(NoOpClient, threads=threads, operations=SDK_OPERATIONS))
    finally:
        os.sched_setaffinity(0, cores)
    print(f"JSON lines on {len(cores)} cores, {PROGRAM_OPERATIONS} operations (goal: {PROGRAM_GOAL_OPS_PER_S}/s)")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "no_op.py"
        path.write_text(NO_OP_PROGRAM, encoding="utf-8")
        program = client_program(f"{sys.executable} {path}")
        for threads in (1, 5, 10, 20):
            print_rates(threads, *operations_per_s(program, threads=threads, operations=PROGRAM_OPERATIONS))


if __name__ == "__main__":
    main()
