"""Inject, prove and heal every form of the nemesis link on a netns cluster without a system. Needs Linux and root.

    python scripts/prove_links.py [--nodes N] [--form NAME ...]

Meant for machines too slow for a system under test, such as an emulated one with another kernel. Prints the mechanism
that shapes the links and, while each fault is in force, the kernel's own queues and what probe packets measure.
Exit status 1 when a form was not proven or not healed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.clusters.netns import DEVICE, NetnsCluster
from harness.run_state import RunState
from nemesis.link import LINK
from nemesis.protocol import Injection
from nemesis.target import Target


def _queues(names: list[str]) -> str:
    """The netem queues that tc shows for one host's device."""
    shown = subprocess.run(["tc", "-n", names[0], "qdisc", "show", "dev", DEVICE], capture_output=True, text=True)
    return "; ".join(line for line in shown.stdout.splitlines() if "netem" in line) or "no netem"


async def _prove(nodes: int, forms: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="prove-links-") as directory:
        state = RunState.create(f"links-{Path(directory).name[-8:]}", state_root=str(Path(directory) / "state"))
        cluster = NetnsCluster(node_count=nodes, run=state, work_dir=directory, ports=[4711], storage="shared")
        cluster.prepare({("links", "delay")})
        await cluster.start()
        is_good = True
        try:
            target = cast(Target, SimpleNamespace(hosts=cluster.hosts, links=cluster.links, network=cluster.network))
            print(f"links are shaped by: {NetnsCluster.link_mechanism()}", flush=True)
            for form in forms:
                begin_s = time.monotonic()
                rng = random.Random(f"prove/{form}")
                details: dict[str, Any] = LINK._details(LINK.forms[form], target, rng, ["n1"])
                value = {"hosts": ["n1"], **details}
                injection = Injection(nemesis="link", variant=f"{form}@n1", fault_id=form, value=value)
                await LINK.inject(target, injection)
                shown = _queues([f"sb-{state.run_id}-n1"])
                proof = await LINK.prove(target, injection)
                await LINK.heal(target, injection)
                healed = await LINK.prove_healed(target, injection)
                after = _queues([f"sb-{state.run_id}-n1"])
                is_good = is_good and proof.proven and healed.proven
                words = ("proven" if proof.proven else "NOT PROVEN", "healed" if healed.proven else "NOT HEALED")
                print(f"{form}: {words[0]}: {proof.detail}", flush=True)
                print(f"    n1 meanwhile: {shown}", flush=True)
                print(f"    {words[1]}: {healed.detail}; n1: {after}; {time.monotonic() - begin_s:.1f} s", flush=True)
        finally:
            await cluster.stop()
            state.close()
        return is_good


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="hosts (default: 3)")
    parser.add_argument("--form", action="append", choices=sorted(LINK.forms), help="only these (default: all)")
    options = parser.parse_args()
    return 0 if asyncio.run(_prove(options.nodes, options.form or list(LINK.forms))) else 1


if __name__ == "__main__":
    sys.exit(main())
