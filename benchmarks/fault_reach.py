"""Which faults reach which programs, by running them: what docs/fault-reach.md shows.

    python -m benchmarks.fault_reach [etcd] [nats] [python] [--cluster netns] [--page docs/fault-reach.md]

For each program and each fault: the program runs on a host of its own beside one that is spared, somebody writes to it
all the time, the fault is injected, proven, looked at again before it is healed, and healed. Then the same with the
mechanism sabotaged: the program is started without it. No fault may be proven and met then.

With `--page` what was seen is kept in a JSON file beside the page, in the place of what was seen before of the same
cells, and the page is written anew from all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._fault_reach_page import write_page
from benchmarks._guests import GUESTS, Guest
from checker.faults import faults_of
from harness import registry
from harness.clusters.agent_shim import AgentShim
from harness.clusters.base import HostProcess, Program, run_harness
from harness.faults.target import RunTarget
from harness.run_state import RunState
from nemesis.driver import run_schedule
from nemesis.forms import needs_of
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

__all__ = ["main"]

FAULTS: Sequence[tuple[str, str]] = (
    ("disk-stall", "fsync"),
    ("disk-stall", "all"),
    ("disk-slow", "severe"),
    ("disk-error", "fsync"),
    ("disk-error", "write"),
    ("disk-full", "full"),
    ("power", "cut"),
    ("clock", "bump"),
    ("clock", "drift"),
    ("clock", "strobe"),
)
VICTIM = "n1"
LASTS_S = 2.5
"""From the proof to the heal, at least."""
STARTS_S = 60.0
WRITE_TIMEOUT_S = 2.0
SETTLE_S = 0.3


@dataclass(slots=True)
class GuestSystem:
    """One program on each host, by itself. Just enough of harness.systems.base.System for faults."""

    guest: Guest
    cluster: Any
    given_settings: Mapping[str, str] = field(default_factory=dict)
    _processes: dict[str, HostProcess] = field(default_factory=dict)

    async def start(self) -> None:
        """Start the program on every host and wait until it takes a write. Raises TimeoutError."""
        for host in self.cluster.hosts:
            await self.guest.prepare(self.cluster, host)
            await self.restart(host)
        async with asyncio.timeout(STARTS_S):
            for host in self.cluster.hosts:
                while not await self.writes(host):  # noqa: ASYNC110 - a program elsewhere
                    await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """End everything."""
        for process in self._processes.values():
            await process.kill()

    async def writes(self, host: str) -> bool:
        """Whether one write is acknowledged in time."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self.guest.write(self.cluster.address_from("clients", host, self.guest.port))
        except (OSError, EOFError, RuntimeError):
            return False
        return True

    async def leaders(self) -> Sequence[str]:
        """Nobody leads."""
        return ()

    def process(self, host: str) -> HostProcess | None:
        """The program of a host."""
        return self._processes.get(host)

    async def restart(self, host: str) -> None:
        """Start the program of a host, unless it runs."""
        process = self._processes.get(host)
        if process is None or process.exit_status() is not None:
            argv, environment = self.guest.command(self.cluster, host)
            self._processes[host] = await self.cluster.spawn(
                host, Program(self.guest.name, argv, f"{self.guest.name}.log", environment)
            )

    async def renew(self, host: str) -> None:
        """Start the program of a host anew, whatever a fault has made of it. Raises TimeoutError."""
        await self._processes[host].kill()
        await self.restart(host)
        async with asyncio.timeout(STARTS_S):
            while not await self.writes(host):
                await self.restart(host)
                await asyncio.sleep(0.2)

    async def status(self, host: str, *, timeout_s: float) -> Mapping[str, str] | None:
        """Something, where a write is acknowledged."""
        return {"writes": "yes"} if await self.writes(host) else None


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of one fault on one program."""

    guest: str
    cluster: str
    fault: str
    proven: bool
    exercised: bool | None
    healed: bool
    detail: str
    sabotaged: bool

    @property
    def is_met(self) -> bool:
        """Whether the harness says that the program met it."""
        return self.proven and self.exercised is not False

    @property
    def word(self) -> str:
        """For the table."""
        if not self.proven:
            return "not proven"
        return {True: "proven, met", False: "met by nobody", None: "proven"}[self.exercised]


async def _load(system: GuestSystem) -> None:
    while True:
        await system.writes(VICTIM)
        await asyncio.sleep(0.01)


async def _try_faults(
    guest: Guest, cluster_name: str, mechanism: str, faults: Sequence[tuple[str, str]], directory: str, sabotaged: bool
) -> list[Cell]:
    nemeses = {name: registry.load("nemeses", name) for name, _ in faults}
    state = RunState.create(f"reach-{guest.name}-{random.randrange(10**6):06d}")
    cells: list[Cell] = []
    try:
        cluster = registry.load("clusters", cluster_name)(
            node_count=2, run=state, work_dir=directory, ports=[guest.port], mechanism=mechanism
        )
        cluster.prepare(frozenset().union(*(needs_of(nemeses[name], [f"{form}@{VICTIM}"]) for name, form in faults)))
        await cluster.start()
        system = GuestSystem(guest, cluster)
        try:
            await system.start()
            for number, (name, form) in enumerate(faults):
                cells.append(await _try_fault(system, nemeses[name], f"f{number}", name, form, sabotaged))
                print(f"  {'sabotaged ' if sabotaged else ''}{cells[-1].fault}: {cells[-1].word}: {cells[-1].detail}")
                await system.renew(VICTIM)
        finally:
            await system.stop()
            await cluster.stop()
    finally:
        state.close()
    return cells


async def _try_fault(
    system: GuestSystem, nemesis: Any, fault_id: str, name: str, form: str, sabotaged: bool
) -> Cell:
    variant = f"{form}@{VICTIM}"
    events: list[dict[str, Any]] = []
    load = asyncio.create_task(_load(system))
    try:
        await asyncio.sleep(SETTLE_S)
        await run_schedule(
            Schedule((
                FaultEvent(at_s=0, action=INJECT, fault_id=fault_id, nemesis=name, variant=variant),
                FaultEvent(at_s=LASTS_S, action=HEAL, fault_id=fault_id, nemesis=name, variant=variant),
            )),
            target=RunTarget(system.cluster, system),  # type: ignore[arg-type]
            nemeses={name: nemesis},
            rng=random.Random(f"{name}={form}"),
            record=lambda event: events.append({**event, "time": 0}),
        )  # fmt: skip
    finally:
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
    [fault] = faults_of(events)
    words = [(proof or {}).get("detail", "") for proof in (fault["proof"], fault.get("met"))]
    if not fault["healed"]:
        words.append(f"NOT HEALED: {(fault['heal_proof'] or {}).get('detail')}")
    return Cell(
        guest=system.guest.name,
        cluster=system.cluster.name,
        fault=f"{name}={form}",
        proven=fault["proven"],
        exercised=fault["exercised"],
        healed=fault["healed"],
        detail="; ".join(filter(None, words)),
        sabotaged=sabotaged,
    )


@contextlib.contextmanager
def _sabotage() -> Any:
    """Programs are started without the mechanism that makes them meet faults; everything else is as ever."""
    real = AgentShim.prepared

    async def prepared(self: AgentShim, host: str, program: Program) -> Any:
        _, started = await real(self, host, program)
        return program, started

    AgentShim.prepared = prepared  # type: ignore[method-assign]
    try:
        yield
    finally:
        AgentShim.prepared = real  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    """Run the cells that were asked for; 1 where one is falsely proven, or proven and not healed."""
    parser = argparse.ArgumentParser(prog="benchmarks.fault_reach")
    parser.add_argument("guests", nargs="*", default=sorted(GUESTS), help=f"of {', '.join(sorted(GUESTS))}")
    parser.add_argument("--cluster", default="netns")
    parser.add_argument("--mechanism", default="auto")
    parser.add_argument("--fault", action="append", help="NEMESIS=FORM; may be given several times (default: all)")
    parser.add_argument("--no-control", action="store_true", help="leave out the runs with the mechanism sabotaged")
    parser.add_argument("--page", metavar="FILE", help="the page to keep up to date")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not options.fault or "=".join(fault) in options.fault]
    cells: list[Cell] = []
    for name in options.guests:
        for sabotaged in (False, True) if not options.no_control else (False,):
            directory = tempfile.mkdtemp(prefix="fault-reach-", dir="/tmp")
            os.chmod(directory, 0o755)
            print(f"{name} on {options.cluster}{', sabotaged' if sabotaged else ''}", flush=True)
            try:
                with _sabotage() if sabotaged else contextlib.nullcontext():
                    cells += run_harness(
                        registry.load("clusters", options.cluster),
                        _try_faults(GUESTS[name], options.cluster, options.mechanism, faults, directory, sabotaged),
                        seed=1,
                    )
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    wrong = [cell for cell in cells if (cell.sabotaged and cell.is_met) or not cell.healed]
    for cell in wrong:
        print(f"WRONG: {cell}")
    if options.page is not None:
        write_page(options.page, [dataclasses.asdict(cell) | {"word": cell.word} for cell in cells])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
