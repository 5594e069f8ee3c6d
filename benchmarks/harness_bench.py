"""How many operations per second the harness itself can generate, run and record, with a client that does nothing.

This bounds what a test can measure: a saturated harness measures only itself.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from harness.generator import Limit, Op
from harness.history_writer import HistoryWriter
from harness.worker import Client, Outcome, Workers
from harness.workloads.register import RegisterWorkload

OPERATIONS = 200_000
GOAL_OPS_PER_S = 40_000


class NoOpClient:
    """Answers immediately, without I/O."""

    async def open(self) -> None:
        pass

    async def invoke(self, op: Op) -> Outcome:
        return Outcome("ok", op.value)

    async def close(self) -> None:
        pass


def operations_per_s(threads: int) -> float:
    """The whole path: generator, worker, history on disk."""

    async def run(path: Path) -> float:
        loop = asyncio.get_running_loop()

        def now_ns() -> int:
            return int(loop.time() * 1e9)

        def make(process: int, thread: int) -> Client:
            return NoOpClient()

        with HistoryWriter(path, now_ns) as writer:
            workers = Workers(
                generator=Limit(OPERATIONS, RegisterWorkload().generator()),
                threads=threads,
                make_client=make,
                recorder=writer,
                now_ns=now_ns,
                random=random.Random(1),
                operation_timeout_s=5.0,
            )
            began_s = time.perf_counter()
            await workers.run()
            return OPERATIONS / (time.perf_counter() - began_s)

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(run(Path(directory) / "history.jsonl"))


def main() -> None:
    """Print one line per number of threads."""
    print(f"harness against a no-op client, {OPERATIONS} operations (goal: {GOAL_OPS_PER_S}/s on one core)")
    for threads in (1, 10, 100):
        print(f"  {threads:4d} threads  {operations_per_s(threads):9,.0f} operations/s")


if __name__ == "__main__":
    main()
