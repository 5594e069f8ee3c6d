"""`harness audit`: simulates each seed twice, in processes that differ only in what must not affect the run."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import shutil
import sys

from harness.commands.run import test_from
from harness.errors import OperatorError
from harness.exploration.audit import Parting, audit_seed, require_interpreter
from harness.exploration.rehearsal import require_faults, require_simulated, usable_choices
from harness.exploration.search import require_room
from harness.report import OutputConsole
from harness.signals import interrupted_by_signals
from harness.units import plural

__all__ = ["audit_command"]


def audit_command(arguments: argparse.Namespace) -> int:
    """Audit seeds. Returns 0 if every seed gave the same run twice, 1 if one did not, else 2 if the audit was
    interrupted."""
    require_simulated(arguments.system, "only a simulated run is reproducible from its seed")
    test = test_from(arguments)
    require_faults(test)
    require_room(test)
    usable_choices(test)  # report once what cannot be simulated, not from each child
    other = sys.executable if arguments.python is None else shutil.which(arguments.python)
    if other is None:
        raise OperatorError(f"--python {arguments.python}: there is no such interpreter")
    if arguments.python is not None:
        require_interpreter(other)
    first = 0 if arguments.seed is None else arguments.seed
    console = OutputConsole(stderr=True) if arguments.json else OutputConsole()
    compared = events = 0
    partings: list[Parting] = []
    is_interrupted = False
    try:
        with (
            interrupted_by_signals(),
            concurrent.futures.ThreadPoolExecutor(arguments.jobs or os.cpu_count() or 1) as pool,
        ):
            seeds = range(first, first + arguments.seeds)
            for audited in pool.map(lambda seed: audit_seed(test, seed, (sys.executable, other)), seeds):
                compared += 1
                events += audited.events
                if audited.parting is not None:
                    partings.append(audited.parting)
                    _show(audited.parting, console)
    except KeyboardInterrupt:
        if not compared:
            raise
        is_interrupted = True
        console.print_line(f"interrupted; {compared} of {arguments.seeds} seeds compared")
    verdict = f"{len(partings)} not reproducible" if partings else "all reproducible"
    console.print_line(f"{plural(compared, 'seed')}, {events:,} network events: {verdict}")
    if arguments.json:
        found = [dataclasses.asdict(parting) for parting in partings]
        print(json.dumps({"seeds": compared, "events": events, "partings": found, "interrupted": is_interrupted}))
    return 1 if partings else 2 if is_interrupted else 0


def _show(parting: Parting, console: OutputConsole) -> None:
    """Print both events, and the stacks: both if they differ."""
    lines = [f"seed {parting.seed}: the two runs diverge at event {parting.number} of the {parting.what}"]
    for word, event in zip(("first ", "second"), parting.events, strict=True):
        lines.append(f"  {word}  {event}")
    if parting.what == "network" and not any(parting.stacks):
        lines.append(
            "  no stacks: repeated, the two runs do not diverge at these events; the cause is the clock, an id() or "
            "chance, not the hash seed or the interpreter alone"
        )
    stacks = parting.stacks if parting.stacks[0] != parting.stacks[1] else parting.stacks[:1]
    for word, stack in zip(("first", "second"), stacks if any(stacks) else (), strict=False):
        lines.append(f"  stack of the {word} run" if len(stacks) > 1 else "  stack of both runs")
        lines += [f"    {line}" for line in stack.splitlines()]
    for line in lines:
        console.print_line(line)
