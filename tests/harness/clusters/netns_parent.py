"""A stand-in for the harness: creates a netns cluster, injects a fault, then waits to be ended.

Usage: netns_parent.py RUN_ID STATE_ROOT WORK_DIR. Without root it first enters a user namespace. Prints one
JSON line when everything is up. On SIGINT it takes everything down and exits with status 42.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from harness.clusters import user_namespace
from harness.clusters.base import Program
from harness.clusters.netns import NetnsCluster
from harness.clusters.select import choose
from harness.run_state import RunState
from nemesis.target import Link


async def main(run_id: str, state_root: str, work_dir: str) -> int:
    run = RunState.create(run_id, state_root=state_root)
    scratch = run.make_temp_dir("scratch")
    cluster = NetnsCluster(node_count=2, run=run, work_dir=work_dir, ports=[9], extra_hosts=["ns1"])
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    await cluster.start()
    try:
        sleep = Program(name="sleep", argv=["sleep", "600"], log_name="sleep.log")
        processes = [await cluster.spawn(host, sleep) for host in ("n1", "n2", "ns1")]
        await cluster.network.cut("f1", {"n2": frozenset({"n1"})})
        links = [Link("n1", "n2"), Link("n2", "n1"), Link("clients", "n2")]
        probes = await cluster.network.probe(links, timeout_s=1.0)
        facts = {
            "pid": os.getpid(),
            "inside": user_namespace.inside(),
            "scratch": scratch,
            "processes": [process.pid for process in processes],
            "passed": [probe.passed for probe in probes],
        }
        print(json.dumps(facts), flush=True)
        await interrupted.wait()
    finally:
        await cluster.stop()
        os.rmdir(scratch)
        run.release("directory", scratch)
        run.close()
    return 42


if __name__ == "__main__":
    if choose("netns").in_user_namespace:
        user_namespace.reexec([sys.executable, *sys.argv])
    sys.exit(asyncio.run(main(*sys.argv[1:])))
