"""How fast each mutant is found, in seeds and in simulated seconds; makes the table of docs/mutants.md.

    python -m benchmarks.mutants [NAME ...] [--detections 10] [--seeds 200] [--budget SECONDS] [--jobs N]

Each mutant is run seed after seed under its scenario until it was found so many times, or until seeds or time are
used up; every finding counts only if the same seed without the mutant is valid. Results are kept in
docs/mutants.json, mutant by mutant, and the table is written from all that are there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.exploration.mutants import SCENARIOS, gives_away, rehearse_mutant
from node.mutants.catalogue import MUTANTS

__all__ = ["main", "measure", "table"]

DOCS = Path(__file__).parent.parent / "docs"


def measure(name: str, *, detections: int, seeds: int, budget_s: float) -> dict[str, Any]:
    """Look for one mutant. Returns what the table needs, as JSON data."""
    deadline_s = time.monotonic() + budget_s
    limit_s = SCENARIOS[name].time_limit_s
    gaps: list[int] = []
    simulated: list[float] = []
    checks: Counter[str] = Counter()
    runs = controls = spoiled = gap = 0
    passed_s = 0.0
    for seed in range(seeds):
        if len(gaps) >= detections or time.monotonic() >= deadline_s:
            break
        run = rehearse_mutant(name, seed)
        runs, gap = runs + 1, gap + 1
        if not gives_away(run):
            passed_s += limit_s
            continue
        control = rehearse_mutant(name, seed, is_control=True)
        controls += 1
        if gives_away(control):
            spoiled += 1
            continue
        checks.update(run.symptoms)
        gaps.append(gap)
        seen_s = limit_s if run.violation_s is None else max(run.violation_s, 0.0)
        simulated.append(passed_s + min(seen_s, limit_s))
        gap, passed_s = 0, 0.0
    return {
        "runs": runs,
        "found": len(gaps),
        "controls": controls,
        "controls_not_valid": spoiled,
        "median_seeds": statistics.median(gaps) if gaps else None,
        "median_simulated_s": round(statistics.median(simulated), 1) if gaps else None,
        "first_seed": gaps[0] - 1 if gaps else None,
        "checks": dict(checks.most_common()),
    }


def table(results: dict[str, Any]) -> str:
    """The document, from the results of `measure` by mutant."""
    lines = [
        "# Mutants",
        "",
        "<!-- made by: python -m benchmarks.mutants -->",
        "",
        "A mutant is a known mistake that `--set mutant=NAME` puts into a node or a client (`node/mutants`). It",
        "replaces methods at the start; the code that runs without it has no branch for it. Each has a scenario",
        "(`harness/exploration/mutants.py`), run in simulation seed after seed. It is found when a run shows a",
        "violation, or replicas that do not come back and become equal after all faults are healed (`stuck`), and the",
        "same seed without the mutant shows neither. *Found* is findings of runs; the medians are of seeds and of",
        "simulated seconds from one finding to the next, the one that finds included. `linearizable` and `log` judge",
        "the clients' history, `replicas` and `leaders` what the replicas leave behind, `invariants` what they do",
        "(`harness/clusters/sim/invariants.py`, in simulation only).",
        "",
        "| mutant | what it does | origin | workload, faults, settings | found by | found | median seeds | median s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, mutant in MUTANTS.items():
        scenario, result = SCENARIOS[name], results.get(name)
        faults = scenario.faults.replace("|", "\\|")
        load = f"{scenario.rate:g} op/s of {scenario.concurrency} clients"
        where = f"{scenario.workload}, {scenario.nodes} nodes, {load}: {faults}"
        where += "".join(f"; {key}={value}" for key, value in scenario.settings.items())
        if result is None:
            found = "| | not measured | | |"
        elif not result["found"]:
            found = f"| not found | 0 of {result['runs']} | | |"
        else:
            checks = ", ".join(f"{check} ({count})" for check, count in result["checks"].items())
            found = (
                f"| {checks} | {result['found']} of {result['runs']} | {result['median_seeds']:g} "
                f"| {result['median_simulated_s']:g} |"
            )
        lines.append(f"| {name} | {mutant.does} | {mutant.origin} | {where} {found}")
    controls = sum(result["controls"] for result in results.values())
    spoiled = sum(result["controls_not_valid"] for result in results.values())
    lines += ["", f"Controls, the same seeds without the mutant: {controls} run, {controls - spoiled} clean.", ""]
    notes = DOCS / "mutants-notes.md"
    if notes.exists():
        lines.append(notes.read_text(encoding="utf-8"))
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all without one")
    parser.add_argument("--detections", type=int, default=10, help="findings after which a mutant is done")
    parser.add_argument("--seeds", type=int, default=200, help="seeds at most")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds at most for one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--table-only", action="store_true", help="write the table from the kept results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in MUTANTS]
    if unknown:
        parser.error(f"no mutant is called {', '.join(unknown)}; there are: {', '.join(MUTANTS)}")
    path = DOCS / "mutants.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = [] if options.table_only else options.names or list(MUTANTS)
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(max_workers=options.jobs, mp_context=context) as pool:
        limits = {"detections": options.detections, "seeds": options.seeds, "budget_s": options.budget}
        waiting = {pool.submit(measure, name, **limits): name for name in names}
        for future in concurrent.futures.as_completed(waiting):
            name = waiting[future]
            results[name] = future.result()
            print(f"{name:28} {results[name]}", flush=True)
            path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (DOCS / "mutants.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
