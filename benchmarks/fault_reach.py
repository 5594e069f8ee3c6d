"""Which faults reach which programs, found by running them; makes docs/fault-reach.md.

    python -m benchmarks.fault_reach [etcd] [nats] [zookeeper] [postgres] [python] [--cluster netns]
        [--page docs/fault-reach.md]

For each system and fault: the system runs on its own hosts, and a client constantly writes to the first of them. The
fault strikes only that host, is proven, checked again before the heal, and healed. Then the same is done with the
mechanism sabotaged: the program is started without it, and a cut cuts nothing. Then no fault may be proven and met.

With `--page` the results are kept in a JSON file beside the page, replacing earlier results of the same cells, and the
page is rewritten from all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import pwd
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from benchmarks._fault_reach_page import write_page
from benchmarks._guests import GUESTS, Guest
from checker.faults import faults_of
from harness import registry
from harness.clusters.agent_shim import AgentShim
from harness.clusters.base import Program, run_harness
from harness.faults.target import RunTarget
from harness.run_state import RunState
from harness.sdk import Refused
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
    ("partition", "partition"),
)
VICTIM = "n1"
VALUE = "v" * 1000
"""Large enough for files to grow while a disk is full, even if they are preallocated in pieces."""
LASTS_S = 2.5
"""Least time from the proof to the heal."""
STARTS_S = 60.0
WRITE_TIMEOUT_S = 2.0
SETTLE_S = 0.3


@dataclass(slots=True)
class Load:
    """A client of the struck host that performs one write after the other."""

    system: Any
    _client: Any = None
    _written: int = 0

    async def write(self) -> bool:
        """Whether one write is acknowledged in time."""
        self._written += 1
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                if self._client is None:
                    self._client = self.system.connection("client", process=0, thread=0)
                    await self._client.open()
                if isinstance(self._client, Writes):
                    await self._client.write(self._written, VALUE)
                else:
                    await self._client.append(0, VALUE)
        except (OSError, EOFError, Refused):
            await self.close()
            return False
        return True

    async def run(self) -> None:
        """Write until it is cancelled."""
        while True:
            await self.write()
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Close the client."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(OSError, EOFError):
                await client.close()

    async def renew(self) -> None:
        """Restart the program of the struck host, whatever state a fault has left it in. Raises TimeoutError."""
        await self.system.process(VICTIM).kill()
        await self.close()
        async with asyncio.timeout(STARTS_S):
            while True:
                await self.system.restart(VICTIM)
                if await self.write():
                    return
                await asyncio.sleep(0.2)


@runtime_checkable
class Writes(Protocol):
    """A client of registers."""

    async def write(self, key: int, value: str) -> None:
        """Set a register."""
        ...


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one fault on one program."""

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
        """Whether the harness reports that the program met the fault."""
        return self.proven and self.exercised is not False

    @property
    def word(self) -> str:
        """The result as text for the table."""
        if not self.proven:
            return "not proven"
        return {True: "proven, met", False: "met by nobody", None: "proven"}[self.exercised]


def _variant(name: str, form: str, hosts: Sequence[str]) -> str:
    """The variant that strikes only the victim; a cut separates it from the others."""
    others = "+".join(host for host in hosts if host != VICTIM)
    return f"{VICTIM}|{others}" if name == "partition" else f"{form}@{VICTIM}"


async def _try_faults(
    guest: Guest, cluster_name: str, mechanism: str, faults: Sequence[tuple[str, str]], directory: str, sabotaged: bool
) -> list[Cell]:
    nemeses = {name: registry.load("nemeses", name) for name, _ in faults}
    system_class = registry.load("systems", guest.system)
    system_class.fetch(print, guest.settings)
    state = RunState.create(f"reach-{guest.name}-{random.randrange(10**6):06d}")
    cells: list[Cell] = []
    try:
        cluster = registry.load("clusters", cluster_name)(
            node_count=guest.hosts, run=state, work_dir=directory, ports=system_class.ports, mechanism=mechanism
        )
        cluster.prepare(
            frozenset().union(
                *(needs_of(nemeses[name], [_variant(name, form, cluster.hosts)]) for name, form in faults)
            )
        )
        await cluster.start()
        if sabotaged:
            cluster.network.cut = _cut_nothing
        system = system_class(
            cluster=cluster, settings=guest.settings, keys=1, log_dir=directory, operation_timeout_s=WRITE_TIMEOUT_S
        )
        try:
            await system.start()
            _require_user(guest, system.process(VICTIM))
            load = Load(system)
            await load.renew()
            for number, (name, form) in enumerate(faults):
                cells.append(await _try_fault(guest, load, cluster, nemeses[name], f"f{number}", form, sabotaged))
                said = f"{cells[-1].fault}: {cells[-1].word}: {cells[-1].detail}"
                print(f"  {'sabotaged ' if sabotaged else ''}{said}", flush=True)
                await load.renew()
            await load.close()
        finally:
            await system.stop()
            await cluster.stop()
    finally:
        state.close()
    return cells


def _require_user(guest: Guest, process: Any) -> None:
    """Exit if a program that must run as another user does not, as far as that can be seen from here."""
    if guest.runs_as is None or process.pid is None:
        return
    uid = os.stat(f"/proc/{process.pid}").st_uid
    if uid != pwd.getpwnam(guest.runs_as).pw_uid:
        raise SystemExit(
            f"{guest.name} runs as user {uid} and not as {guest.runs_as}: have SPLITBRAIN_CACHE where all may enter"
        )


async def _try_fault(
    guest: Guest, load: Load, cluster: Any, nemesis: Any, fault_id: str, form: str, sabotaged: bool
) -> Cell:
    name, variant = nemesis.name, _variant(nemesis.name, form, cluster.hosts)
    events: list[dict[str, Any]] = []
    writing = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(SETTLE_S)
        await run_schedule(
            Schedule((
                FaultEvent(at_s=0, action=INJECT, fault_id=fault_id, nemesis=name, variant=variant),
                FaultEvent(at_s=LASTS_S, action=HEAL, fault_id=fault_id, nemesis=name, variant=variant),
            )),
            target=RunTarget(cluster, load.system),
            nemeses={name: nemesis},
            rng=random.Random(f"{name}={form}"),
            record=lambda event: events.append({**event, "time": 0}),
        )  # fmt: skip
    finally:
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
    [fault] = faults_of(events)
    words = [(proof or {}).get("detail", "") for proof in (fault["proof"], fault.get("met"))]
    if not fault["healed"]:
        words.append(f"NOT HEALED: {(fault['heal_proof'] or {}).get('detail')}")
    return Cell(
        guest=guest.name,
        cluster=cluster.name,
        fault=name if name == form else f"{name}={form}",
        proven=fault["proven"],
        exercised=fault["exercised"],
        healed=fault["healed"],
        detail="; ".join(filter(None, words)),
        sabotaged=sabotaged,
    )


async def _cut_nothing(fault_id: str, grudge: Any) -> None:
    """Replaces the method that cuts links."""


@contextlib.contextmanager
def _sabotage() -> Any:
    """Start programs without the mechanism that makes them meet faults; everything else is unchanged."""
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
    """Run the requested cells; returns 1 if a sabotaged fault counts as met, or if a fault was not healed."""
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
            print(f"{name} on {options.cluster}{', sabotaged' if sabotaged else ''}", flush=True)
            directory = tempfile.mkdtemp(prefix="fault-reach-", dir="/tmp")
            os.chmod(directory, 0o755)
            try:
                with _sabotage() if sabotaged else contextlib.nullcontext():
                    cells += run_harness(
                        registry.load("clusters", options.cluster),
                        _try_faults(GUESTS[name], options.cluster, options.mechanism, faults, directory, sabotaged),
                        seed=1,
                    )
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            if options.page is not None:  # now, since the next system may fail to start here
                write_page(options.page, [dataclasses.asdict(cell) | {"word": cell.word} for cell in cells])
    wrong = [cell for cell in cells if (cell.sabotaged and cell.is_met) or not cell.healed]
    for cell in wrong:
        print(f"WRONG: {cell}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
