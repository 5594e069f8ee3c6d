"""How far and how fast failing schedules are shrunk (goal: from 50 events to 8 at most, in under 2 minutes).

    python -m benchmarks.shrinking [NAME ...] [--events 50] [--jobs N]

For each mutant, random faults are added to those of its scenario until there are `--events` events; the first seed
whose run reveals the mutant is shrunk. Results are printed, and kept in docs/shrinking.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from harness.exploration.mixes import random_mix
from harness.exploration.mutants import SCENARIOS, gives_away
from harness.exploration.rehearsal import rehearse_test, usable_choices
from harness.exploration.shrinking import shrink
from harness.nursery import restart_with_nursery
from harness.test import NemesisChoice, Test
from nemesis.schedule import INJECT, Schedule

__all__ = ["crowded", "main", "measure"]

DOCS = Path(__file__).parent.parent / "docs"
MUTANTS = (
    "vote-not-persisted", "quorum-off-by-one", "truncate-committed", "ack-before-quorum", "duplicate-apply",
    "no-step-down", "ack-before-fsync", "end-term-from-current-term",
)  # fmt: skip
MIXED_IN = ("kill=sigkill@one", "partition", "pause", "clock=bump@one", "disk-slow=mild@one", "link=delay@one")
MAX_SEEDS = 50


def crowded(name: str, seed: int, events: int) -> tuple[Test, Schedule]:
    """The run of a mutant's scenario, with random faults added up to `events` events in total."""
    test, schedule = SCENARIOS[name].run_of(name, seed)
    choices = []
    for text in MIXED_IN:
        choices += usable_choices(dataclasses.replace(test, nemesis=(NemesisChoice.parse(text),)))
    rng = random.Random(f"{seed}/crowd")
    others = random_mix(choices, rng, time_limit_s=test.time_limit_s, nodes=test.nodes, events=events - len(schedule))
    return test, Schedule(tuple(sorted((*schedule, *others), key=lambda event: event.at_s)))


def measure(name: str, *, events: int, jobs: int, budget_s: float) -> dict[str, Any]:
    """Shrink the first failing run of one mutant. Returns JSON data."""
    for seed in range(MAX_SEEDS):
        test, schedule = crowded(name, seed, events)
        if not gives_away(rehearse_test(test, schedule)):
            continue
        began_s = time.perf_counter()
        found = shrink(test, schedule, jobs=jobs, budget_s=budget_s, say=lambda line: None)
        return {
            "seed": seed,
            "events_before": len(schedule),
            "events_after": len(found.schedule),
            "left": [f"{event.nemesis}={event.variant}" for event in found.schedule if event.action == INJECT],
            "nodes": found.test.nodes,
            "concurrency": found.test.concurrency,
            "rate": found.test.rate,
            "time_limit_s": found.test.time_limit_s,
            "is_minimal": found.is_minimal,
            "runs": found.runs,
            "seconds": round(time.perf_counter() - began_s, 1),
            "symptoms": list(found.rehearsal.symptoms),
        }
    return {"seed": None}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shrinking", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"mutants; without one: {', '.join(MUTANTS)}")
    parser.add_argument("--events", type=int, default=50, help="events to begin with")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds at most for one")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no mutant is called {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}")
    path = DOCS / "shrinking.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in options.names or MUTANTS:
        result = results[name] = measure(name, events=options.events, jobs=options.jobs, budget_s=options.budget)
        if result["seed"] is None:
            print(f"{name:28} gives nothing away in {MAX_SEEDS} seeds", flush=True)
        else:
            print(
                f"{name:28} {result['events_before']} events -> {result['events_after']} in {result['seconds']:.0f} s "
                f"({result['runs']} runs): {', '.join(result['left'])}",
                flush=True,
            )
        path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.shrinking", *sys.argv[1:]])
    main()
