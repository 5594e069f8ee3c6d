"""Forks harnesses that start a cluster with file systems, inject disk faults and stop it, each of which kills itself
(SIGKILL) at a given step. After each, `clean` runs, and a line of JSON says what is left.

    kill_steps_parent.py RUN_ID DIRECTORY STORAGE STEP ...

A step is a write to the run's state, a request to an agent, a command of the harness's own, an operation on a file
system or the start of the agents; a harness can be killed before it, after it, and, for requests, in its middle. Step 0
is never reached: that harness runs to its end and writes the list of steps to the file `steps`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.cleanup import clean
from harness.clusters.agent_link import AgentLink
from harness.clusters.control_groups import cgroup_parents
from harness.clusters.loop_devices import marked_devices
from harness.clusters.netns import NetnsCluster
from harness.clusters.own_machine import LocalAgents
from harness.process_table import find_processes, marked_with
from harness.run_state import RUN_VARIABLE, RunState
from nemesis.mechanisms import file_systems
from nemesis.target import DiskFault

MIDDLE_S = 0.002
"""How long a command runs before its harness is killed in the middle: mkfs, mount and ip take some milliseconds."""


class Steps:
    """Counts steps, and kills this process at the given one."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.names: list[str] = []

    def reached(self, name: str) -> bool:
        self.names.append(name)
        return len(self.names) == self.fatal

    def at(self, name: str) -> None:
        if self.reached(name):
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def counted(steps: Steps, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        steps.at(f"before {name}")
        result = function(*args, **kwargs)
        steps.at(f"after {name}")
        return result

    return call


def count_steps(steps: Steps) -> None:
    ask, append, batch = AgentLink.request, RunState._append, NetnsCluster._batch

    async def request(self: AgentLink, op: str, arguments: Any = None, **options: Any) -> Any:
        name = f"{self.host}: {op} {arguments}"[:60]
        steps.at(f"before {name}")
        dies_in_the_middle = steps.reached(f"in the middle of {name}")
        work = asyncio.ensure_future(ask(self, op, arguments, **options))
        if dies_in_the_middle:
            await asyncio.sleep(MIDDLE_S)
            die()
        result = await work
        steps.at(f"after {name}")
        return result

    def written(self: RunState, entries: Any, *, sync: bool) -> None:
        kinds = ",".join(sorted({f"{entry['op']} {entry['kind']}" for entry in entries}))
        steps.at(f"before writing {kinds}")
        append(self, entries, sync=sync)
        steps.at(f"after writing {kinds}")

    async def batched(self: NetnsCluster, ip: Any, lines: Any) -> None:
        steps.at(f"before {lines[0]}")
        await batch(self, ip, lines)
        steps.at(f"after {lines[0]}")

    setattr(AgentLink, "request", request)  # noqa: B010 - mypy takes it for a declaration otherwise
    setattr(RunState, "_append", written)  # noqa: B010
    setattr(NetnsCluster, "_batch", batched)  # noqa: B010
    setattr(LocalAgents, "start", counted(steps, "start of the agents", LocalAgents.start))  # noqa: B010
    operations: dict[str, Callable[..., Any]] = file_systems.OPERATIONS  # type: ignore[assignment]
    for name, operation in list(operations.items()):
        operations[name] = counted(steps, name, operation)


async def live(run: RunState, directory: Path, storage: str) -> None:
    cluster = NetnsCluster(node_count=1, run=run, work_dir=str(directory), ports=[7000], storage=storage)
    cluster.prepare({("disks", kind) for kind in ("freeze", "fill", "shutdown", "crash")})
    await cluster.start()
    disks = cluster.disks
    assert disks is not None
    for kind in ("freeze", "fill", "shutdown"):
        await disks.impair(kind, {"n1": DiskFault(kind=kind)})
        await disks.release(kind)
    await disks.cut_power("crash", "n1", kind="crash")
    await disks.release("crash")
    await disks.impair("again", {"n1": DiskFault(kind="freeze")})
    await cluster.stop()


def one(run_id: str, directory: Path, storage: str, step: int) -> None:
    steps = Steps(step)
    count_steps(steps)
    run = RunState.create(run_id, state_root=str(directory / "state"))
    asyncio.run(live(run, directory / "run", storage))
    assert run.close()
    (directory / "steps").write_text(json.dumps(steps.names))


def left(run_id: str, directory: Path) -> list[str]:
    """Mounts, namespaces, processes and files that a run has left behind."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found = [f"mount {line.split()[4]}" for line in mounts if str(directory) in line or run_id in line]
    found += [f"namespace {name}" for name in os.listdir("/run/netns") if run_id in name]
    found += [f"group {name}" for parent in cgroup_parents() for name in os.listdir(parent) if run_id in name]
    found += [f"process {process}" for process in find_processes(marked_with(RUN_VARIABLE, run_id))]
    found += [f"image {path}" for path in directory.rglob("disk.img")]
    found += [f"state {path}" for path in (directory / "state").glob("*")]
    deadline_s = time.monotonic() + 5
    while (devices := [name for name, mark in marked_devices() if mark.run_id == run_id]) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.02)  # the kernel releases a device a moment after its last mount
    return found + [f"device {name}" for name in devices]


def main() -> None:
    run_id, where, storage, *numbers = sys.argv[1:]
    for number in map(int, numbers):
        directory = Path(where) / str(number)
        directory.mkdir()
        name = f"{run_id}-{number}"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                one(name, directory, storage, number)
            except BaseException as error:
                print(f"step {number}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lines: list[str] = []
        report = clean(state_root=str(directory / "state"), report=lines.append)
        line = {"step": number, "status": status, "removed": len(report.removed), "said": report.left}
        steps = directory / "steps"
        line["steps"] = json.loads(steps.read_text()) if steps.exists() else []
        print(json.dumps({**line, "left": left(name, directory)}), flush=True)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
