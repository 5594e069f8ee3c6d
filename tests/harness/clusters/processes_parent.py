"""A minimal harness, for a test to kill: starts two programs through agents and waits."""

from __future__ import annotations

import asyncio
import sys

from harness.clusters.agent_link import AgentLink
from harness.clusters.own_machine import LocalAgents
from harness.run_state import RunState


async def main(state_root: str, work_dir: str) -> None:
    run = RunState.create("parent", state_root=state_root)
    agents = LocalAgents(["n1", "n2"], run=run, directory=f"{work_dir}/agents", log_path=f"{work_dir}/agents.log")
    agents.start()
    pids = []
    for host in ("n1", "n2"):
        link = AgentLink(host, lambda host=host: agents.connect(host), lambda event: None)  # type: ignore[misc]
        link.open("parent")
        pids.append((await link.request("hello"))["pid"])
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        answer = await link.request("spawn", {"argv": argv, "environment": {}, "log": f"{work_dir}/{host}.log"})
        pids.append(answer["pid"])
    print(*pids, flush=True)
    await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
