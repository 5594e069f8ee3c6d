"""A stand-in for the harness on docker or ssh hosts: it starts programs, injects faults, and then is killed.

Usage: hosts_parent.py RUN_ID STATE_ROOT WORK_DIR docker|INVENTORY. Prints one JSON line when everything is up.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from harness.clusters.base import Program
from harness.run_state import RunState
from nemesis.mechanisms.shim import why_no_shim
from nemesis.target import ClockSkew, DiskFault, Link, LinkShape


async def main(run_id: str, state_root: str, work_dir: str, hosts: str) -> None:
    run = RunState.create(run_id, state_root=state_root)
    cluster: Any
    if hosts == "docker":
        from harness.clusters.docker import DockerCluster

        cluster = DockerCluster(node_count=2, run=run, work_dir=work_dir, ports=[7000], extra_hosts=["ns1"])
    else:
        from harness.clusters.ssh import SshCluster

        cluster = SshCluster(
            node_count=2, run=run, work_dir=work_dir, ports=[7000], extra_hosts=["ns1"], inventory=hosts
        )
    if why_no_shim() is None:
        stall = "stall" if hosts == "docker" else "freeze"  # a process that waits in a freeze cannot be killed
        cluster.prepare({("clocks", "wall"), ("disks", stall), ("disks", "power"), ("links", "delay")})
    await cluster.start()
    await cluster.spawn("n1", Program(name="sleep", argv=["sleep", "600"], log_name="sleep.log"))
    await cluster.network.cut("f1", {"n2": frozenset({"n1"})})
    if cluster.clocks is not None:
        await cluster.clocks.skew("f2", {"n1": ClockSkew(offset_ms=3_600_000)})
        await cluster.disks.impair("f3", {"n2": DiskFault(kind=stall)})
        await cluster.links.shape("f4", {Link("n1", "n2"): LinkShape(delay_ms=100)})
        # This program waits for its disk until it is killed.
        code = f"import os; os.open({cluster.data_dir('n2') + '/x'!r}, os.O_CREAT | os.O_WRONLY)"
        await cluster.spawn("n2", Program(name="w", argv=[cluster.python("n2"), "-c", code], log_name="w.log"))
    print(json.dumps({"up": True}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
