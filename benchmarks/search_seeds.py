"""Which load and mix of faults make a search effective: the CPU time in which blind seeds find mutants.

    python -m benchmarks search_seeds [--way TEXT ...] [--seeds 12] [--jobs N] [--json FILE]

Five nodes, random mixes of all faults, and mutants that only some seeds find. All ways use the same seeds, but each
mutant has others, since two mutants under one schedule are hardly two trials. A finding counts only if the same run
without the mutant shows nothing. The ways are compared by findings per 1,000 core seconds of searching, without the
controls. `harness explore` uses the best load (`SEARCHED_LOAD`) and the best mix (`ODDS`); see
docs/simulation-speed.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._blind import GROUNDS, LOADS, SEARCHED, Load, control_gives_away
from checker.workers import worker_pool
from harness.exploration.mixes import ODDS, Odds
from harness.exploration.mutants import gives_away
from harness.exploration.rehearsal import rehearse_test, usable_choices
from harness.exploration.search import mix_for
from harness.nursery import restart_with_nursery

__all__ = ["WAYS", "Trial", "Way", "main", "table", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A load and a mix of faults to compare with others."""

    load: Load = LOADS[SEARCHED]
    odds: Odds = ODDS


WAYS: Mapping[str, Way] = {
    "as it is": Way(),
    "half as often a lost leader": Way(odds=replace(ODDS, lost=ODDS.lost / 2)),
    "always a lost leader": Way(odds=replace(ODDS, lost=1.0)),
    "twice the faults": Way(odds=replace(ODDS, faults_per_s=2 * ODDS.faults_per_s)),
    **{
        f"{rate:g}/s, {concurrency}, {time_limit_s:g} s": Way(
            load=Load(nodes=5, rate=rate, concurrency=concurrency, time_limit_s=time_limit_s, text="")
        )
        for rate, concurrency, time_limit_s in (
            (100.0, 20, 15.0), (25.0, 20, 15.0), (12.0, 10, 15.0), (25.0, 20, 30.0), (25.0, 20, 7.0)
        )
    },
}  # fmt: skip
"""Ways to search. Loads are named by operations per second, clients and seconds."""

MUTANTS: Sequence[tuple[str, str]] = (
    ("accept-gap", "log"),
    ("commit-beyond-end", "log"),
    ("compare-index-only", "log"),
    ("early-promotion", "log"),
    ("lease-on-wall-clock", "register, leases"),
    ("no-step-down", "log"),
    ("queue-offset-reuse", "log"),
    ("stale-leader-reads", "register"),
    ("truncate-committed", "log"),
    ("truncate-not-persisted", "log"),
    ("vote-for-shorter-log", "log"),
    ("vote-not-persisted", "log"),
    ("vote-without-fsync", "log"),
)
"""Mutant and ground: mutants of DLedger that some blind search finds, but not every seed."""

FIRST_SEED = 870_000


@dataclass(frozen=True, slots=True)
class Trial:
    """One seed of one mutant, searched in one way; `core_s` is the CPU time (s) without the control."""

    mutant: str
    way: str
    seed: int
    is_found: bool
    core_s: float


def trial(mutant: str, ground: str, way: str, seed: int) -> Trial:
    """Run one trial, and its control if the run shows something."""
    test = GROUNDS[ground].test_of(mutant, WAYS[way].load)
    seeded, schedule = mix_for(test, seed, usable_choices(test), odds=WAYS[way].odds)
    began_s = time.process_time()
    is_found = gives_away(rehearse_test(seeded, schedule))
    core_s = time.process_time() - began_s
    if is_found:
        is_found = not control_gives_away(seeded, schedule)
    return Trial(mutant=mutant, way=way, seed=seed, is_found=is_found, core_s=core_s)


def table(trials: Sequence[Trial]) -> list[str]:
    """A row for each mutant and one for all: how many seeds found it, and core seconds per seed."""
    ways = [way for way in WAYS if any(each.way == way for each in trials)]
    lines = [f"| mutant | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
    for name in dict.fromkeys(each.mutant for each in trials):
        lines.append(_row(name, [[t for t in trials if (t.mutant, t.way) == (name, way)] for way in ways]))
    lines.append(_row("all", [[t for t in trials if t.way == way] for way in ways]))
    rates = []
    for way in ways:
        mine = [each for each in trials if each.way == way]
        rates.append(f"{1000 * sum(t.is_found for t in mine) / sum(t.core_s for t in mine):.0f}")
    lines.append(f"| findings in 1,000 core s | {' | '.join(rates)} |")
    return lines


def _row(name: str, cells: Sequence[Sequence[Trial]]) -> str:
    said = [
        f"{sum(t.is_found for t in cell)} of {len(cell)}, {sum(t.core_s for t in cell) / len(cell):.2f} s"
        if cell
        else "-"
        for cell in cells
    ]
    return f"| {name} | {' | '.join(said)} |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="search_seeds", description="what a searched seed should be")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be given again")
    parser.add_argument("--seeds", type=int, default=12, help="of each mutant in each way")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, help="keep every trial in this file")
    arguments = parser.parse_args(sys.argv[1:])
    with worker_pool(arguments.jobs) as pool:
        asked = [
            pool.submit(trial, mutant, ground, way, FIRST_SEED + number * len(MUTANTS) + place)
            for number in range(arguments.seeds)
            for place, (mutant, ground) in enumerate(MUTANTS)
            for way in arguments.way or WAYS
        ]
        trials = [future.result() for future in asked]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(each) for each in trials]) + "\n")
    print("\n".join(table(trials)))


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.search_seeds", *sys.argv[1:]])
    main()
