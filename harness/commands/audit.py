"""`harness audit`: each seed twice in simulation, in processes that differ in what must not matter."""

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
from harness.exploration.audit import Parting, audit_seed
from harness.exploration.rehearsal import require_faults, require_simulated, usable_choices
from harness.report import OutputConsole

__all__ = ["audit_command"]


def audit_command(arguments: argparse.Namespace) -> int:
    """Audit seeds. Returns 0 when every seed gave the same run twice, 1 when one did not."""
    require_simulated(arguments.system, "only what is simulated is the same twice by its seed")
    test = test_from(arguments)
    require_faults(test)
    usable_choices(test)  # what cannot be simulated is said once and here, not by each child
    other = sys.executable if arguments.python is None else shutil.which(arguments.python)
    if other is None:
        raise OperatorError(f"--python {arguments.python}: there is no such interpreter")
    first = 0 if arguments.seed is None else arguments.seed
    console = OutputConsole(stderr=True) if arguments.json else OutputConsole()
    events = 0
    partings: list[Parting] = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs or os.cpu_count() or 1) as pool:
        seeds = range(first, first + arguments.seeds)
        for audited in pool.map(lambda seed: audit_seed(test, seed, (sys.executable, other)), seeds):
            events += audited.events
            if audited.parting is not None:
                partings.append(audited.parting)
                _show(audited.parting, console)
    counted = "1 seed" if arguments.seeds == 1 else f"{arguments.seeds} seeds"
    verdict = f"{len(partings)} not the same twice" if partings else "the same twice, each"
    console.print(f"{counted}, {events:,} network events: {verdict}", highlight=False)
    if arguments.json:
        found = [dataclasses.asdict(parting) for parting in partings]
        print(json.dumps({"seeds": arguments.seeds, "events": events, "partings": found}))
    return 1 if partings else 0


def _show(parting: Parting, console: OutputConsole) -> None:
    """Both events, and both stacks where they differ."""
    lines = [f"seed {parting.seed}: the two runs part at event {parting.number} of the {parting.what}"]
    for word, event in zip(("first ", "second"), parting.events, strict=True):
        lines.append(f"  {word}  {event}")
    stacks = parting.stacks if parting.stacks[0] != parting.stacks[1] else parting.stacks[:1]
    for word, stack in zip(("first", "second"), stacks, strict=False):
        lines.append(f"  where the {word} was" if len(stacks) > 1 else "  where both were")
        lines += [f"    {line}" for line in stack.splitlines()]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
