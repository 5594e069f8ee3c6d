"""A stand-in for the harness on docker or ssh hosts: a program runs, a fault is in force, and then it is killed.

Usage: hosts_parent.py RUN_ID STATE_ROOT WORK_DIR docker|INVENTORY. Prints one JSON line when everything is up.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from harness.clusters.base import Program
from harness.run_state import RunState


async def main(run_id: str, state_root: str, work_dir: str, hosts: str) -> None:
    run = RunState.create(run_id, state_root=state_root)
    cluster: Any
    if hosts == "docker":
        from harness.clusters.docker import DockerCluster

        cluster = DockerCluster(node_count=2, run=run, work_dir=work_dir, ports=[7000])
    else:
        from harness.clusters.ssh import SshCluster

        cluster = SshCluster(node_count=2, run=run, work_dir=work_dir, ports=[7000], inventory=hosts)
    await cluster.start()
    await cluster.spawn("n1", Program(name="sleep", argv=["sleep", "600"], log_name="sleep.log"))
    await cluster.network.cut("f1", {"n2": frozenset({"n1"})})
    print(json.dumps({"up": True}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
