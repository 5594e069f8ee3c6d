"""A minimal harness, for a test to kill in the middle of a partition on a `local` cluster."""

from __future__ import annotations

import asyncio
import sys

from harness.clusters.base import Program
from harness.clusters.local import LocalCluster
from harness.run_state import RunState


async def main(state_root: str, work_dir: str) -> None:
    run = RunState.create("parent", state_root=state_root)
    cluster = LocalCluster(node_count=3, run=run, work_dir=work_dir, ports=[21911])
    await cluster.start()
    sleeper = Program(name="sleeper", argv=[sys.executable, "-c", "import time; time.sleep(600)"], log_name="log")
    sleepers = [await cluster.spawn(host, sleeper) for host in cluster.hosts]
    daemonising = ["sh", "-c", "(env -i setsid sleep 601 &); exec sleep 600"]
    sleepers.append(await cluster.spawn("n1", Program(name="wrapper", argv=daemonising, log_name="log")))
    while not (strays := (await cluster.agent("n1").request("strays"))["strays"]):  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    await cluster.network.cut("f1", {"n1": frozenset({"n2"})})
    agents = [claim.ident for claim in run.claims if claim.kind == "process"]
    print(*agents, *(process.pid for process in sleepers), strays[0][0], flush=True)
    await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
