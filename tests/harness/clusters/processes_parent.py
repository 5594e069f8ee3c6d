"""A harness in small, for a test to kill: starts two children and waits."""

from __future__ import annotations

import asyncio
import sys

from harness.clusters.base import Program
from harness.clusters.processes import Processes
from harness.run_state import RunState


async def main(state_root: str, work_dir: str) -> None:
    processes = Processes(RunState.create("parent", state_root=state_root), work_dir)
    sleeper = Program(name="sleeper", argv=[sys.executable, "-c", "import time; time.sleep(600)"], log_name="log")
    direct = await processes.spawn("n1", sleeper)
    prefixed = await processes.spawn("n2", sleeper, argv_prefix=["env", "A=1"])
    print(direct.pid, prefixed.pid, flush=True)
    await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
