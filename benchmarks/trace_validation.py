"""What trace validation finds among the mutants of DLedger, and whether it is silent without one.

    python -m benchmarks.trace_validation mutants [NAME ...] [--seeds 5] [--blind-seeds 20] [--jobs N]
    python -m benchmarks.trace_validation controls [--jobs N] [--first 0] [--seeds 250]
    python -m benchmarks.trace_validation page

Every run is simulated, with `--set trace=on`. A mutant with a scenario is run under it, one without under a random mix
of all faults. Its row counts the runs in which the trace is invalid, and how many of those the clients' checks, the
checks of the replicas' final state, and the simulation's invariants call valid. The controls are runs of the unmutated
node under random mixes of all faults. Results are kept in docs/trace-validation.json, and the tables in
docs/trace-validation.md are written from them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._runs import checked_out_commit
from checker.workers import worker_pool
from harness.cli_options import SEARCHED_LOAD
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import SIMULATED, Rehearsal, rehearse_test, usable_choices
from harness.exploration.search import mix_for
from harness.nursery import restart_with_nursery
from harness.test import ALL, NemesisChoice, Test
from nemesis.schedule import Schedule
from node.mutants.catalogue import MUTANTS, NO_MUTANT
from node.mutants.switch import part_of

__all__ = ["main", "table"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "trace-validation.md"
RESULTS = PAGE.with_suffix(".json")

IN_DLEDGER = ("election", "replication", "group", "leases", "storage")
"""The modules of node.mutants whose mutants are in DLedger's members, and not in what is built on their log."""

TRACE, INVARIANTS = "trace", "invariants"

CONTROLS: Mapping[str, tuple[int, str, tuple[str, ...], float]] = {
    "log": (3, "log", (ALL,), 15.0),
    "register": (5, "register", (ALL,), 15.0),
    "operators": (5, "log", ("members", "transfer", "restart", "kill", "partition", "pause", "power"), 15.0),
    "queue": (7, "queue", (ALL,), 15.0),
}
"""Runs without a mutant: replicas, workload, nemeses, seconds under load."""

_SAID = re.compile(r"(?:^|; )trace: (.*?) \((?:n\d+), line \d+")


def run_of(mutant: str, of: str, seed: int) -> tuple[Test, Schedule]:
    """A run under the scenario of the mutant `of`, or under a random mix of faults if it has none."""
    if of in SCENARIOS:
        test, schedule = SCENARIOS[of].run_of(mutant, seed)
        return dataclasses.replace(test, settings={**test.settings, "trace": "on"}), schedule
    return mix_run(5, "log", (ALL,), SEARCHED_LOAD["time_limit"], mutant, seed)


def mix_run(
    nodes: int, workload: str, nemesis: Sequence[str], time_limit_s: float, mutant: str, seed: int
) -> tuple[Test, Schedule]:
    """A run under a random mix of faults."""
    test = Test(
        system="broker", cluster=SIMULATED, nodes=nodes, workload=workload,
        nemesis=tuple(map(NemesisChoice.parse, nemesis)), nemesis_interval_s=5.0, time_limit_s=time_limit_s,
        rate=SEARCHED_LOAD["rate"], concurrency=SEARCHED_LOAD["concurrency"],
        operation_timeout_s=SEARCHED_LOAD["operation_timeout"], seed=seed,
        settings={"mutant": mutant, "trace": "on"},
    )  # fmt: skip
    return mix_for(test, seed, usable_choices(test))


def summary_of(run: Rehearsal) -> dict[str, Any]:
    """What a run's checks said, in groups: the trace, the clients' history, the replicas' final state, invariants."""
    of_the_run = set(run.checks_of_the_run)
    final = of_the_run - {TRACE, INVARIANTS}

    def worst(names: set[str]) -> bool | str:
        found = [run.checks[name] for name in sorted(names)]
        return False if False in found else "unknown" if any(each is not True for each in found) else True

    said = _SAID.search(run.reason)
    return {
        "seed": run.seed,
        "trace": run.checks.get(TRACE, "unknown"),
        "clients": worst(set(run.checks) - of_the_run),
        "final": worst(final),
        "invariants": run.checks.get(INVARIANTS, "unknown"),
        "said": said.group(1) if said else "",
        "reason": run.reason[:300],
    }


def measured_run(mutant: str, of: str, seed: int) -> dict[str, Any]:
    """One run with a mutant, or its control."""
    return summary_of(rehearse_test(*run_of(mutant, of, seed)))


def control_run(name: str, seed: int) -> dict[str, Any]:
    """One run without a mutant under a random mix."""
    nodes, workload, nemesis, time_limit_s = CONTROLS[name]
    run = rehearse_test(*mix_run(nodes, workload, nemesis, time_limit_s, NO_MUTANT, seed))
    return {**summary_of(run), "operations": run.operations, "faults": run.faults}


def mutants_in_dledger() -> list[str]:
    """The mutants of DLedger, in the catalogue's order."""
    return [name for name in MUTANTS if part_of(name) in IN_DLEDGER]


def measure_mutants(names: Sequence[str], *, seeds: int, blind_seeds: int, jobs: int) -> None:
    """Run mutants and their controls, and keep the results."""
    results = read_results()
    with worker_pool(jobs) as pool:
        for name in names:
            numbers = range(seeds if name in SCENARIOS else blind_seeds)
            runs = [pool.submit(measured_run, name, name, seed) for seed in numbers]
            controls = [pool.submit(measured_run, NO_MUTANT, name, seed) for seed in numbers]
            concurrent.futures.wait([*runs, *controls])
            results.setdefault("mutants", {})[name] = {
                "commit": checked_out_commit(),
                "is_scripted": name in SCENARIOS,
                "runs": [run.result() for run in runs],
                "controls": [{"seed": each["seed"], "trace": each["trace"]} for each in (c.result() for c in controls)],
            }
            write_results(results)
            print(_row(name, results["mutants"][name]), flush=True)


def measure_controls(names: Sequence[str], *, first: int, seeds: int, jobs: int) -> None:
    """Run the unmutated node under random mixes, and keep what was not valid."""
    results = read_results()
    with worker_pool(jobs) as pool:
        for name in names:
            waiting = [pool.submit(control_run, name, seed) for seed in range(first, first + seeds)]
            runs = [each.result() for each in concurrent.futures.as_completed(waiting)]
            odd = sorted((each for each in runs if each["trace"] is not True), key=lambda each: int(each["seed"]))
            results.setdefault("controls", {})[name] = {
                "commit": checked_out_commit(), "first": first, "seeds": seeds,
                "operations": sum(each["operations"] for each in runs), "faults": sum(each["faults"] for each in runs),
                "valid": sum(each["trace"] is True for each in runs),
                "invalid": sum(each["trace"] is False for each in runs),
                "others_invalid": sum(False in (each["clients"], each["final"], each["invariants"]) for each in runs),
                "odd": odd[:20],
            }  # fmt: skip
            write_results(results)
            print(name, results["controls"][name], flush=True)


def read_results() -> dict[str, Any]:
    """The kept results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def write_results(results: Mapping[str, Any]) -> None:
    """Keep results."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _row(name: str, result: Mapping[str, Any]) -> str:
    found = [run for run in result["runs"] if run["trace"] is False]

    def valid(group: str) -> int:
        return sum(run[group] is True for run in found)

    shown = [str(len(result["runs"])), str(len(found))]
    shown += [str(valid(group)) if found else "" for group in ("clients", "final", "invariants")]
    said = found[0]["said"] if found else ""
    return "| " + " | ".join([name, MUTANTS[name].does, *shown, said.replace("|", "\\|")]) + " |"


def table(results: Mapping[str, Any]) -> str:
    """The tables of the page."""
    mutants: Mapping[str, Any] = results.get("mutants", {})
    lines = [
        "| mutant | what it does | runs | trace invalid | of these: clients valid | final state valid "
        "| invariants valid | what the trace shows (first such run) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, mutants[name]) for name in mutants_in_dledger() if name in mutants]
    found = [run for each in mutants.values() for run in each["runs"] if run["trace"] is False]
    seen = [name for name, each in mutants.items() if any(run["trace"] is False for run in each["runs"])]
    hidden = sum(run["clients"] is True for run in found)
    only = sum(run["clients"] is True and run["final"] is True for run in found)
    controls = [run for each in mutants.values() for run in each["controls"]]
    alarms = sum(run["trace"] is not True for run in controls)
    total = sum(len(each["runs"]) for each in mutants.values())
    lines += [
        "",
        f"In all: {len(seen)} of {len(mutants)} mutants, in {len(found)} of {total} runs. In {hidden} of these "
        f"{len(found)} the clients' checks of the same run say valid, in {only} the checks of the replicas' final "
        f"state do so too. The same {len(controls)} runs without the mutant: {len(controls) - alarms} traces valid.",
        "",
        "Without a mutant, under random mixes:",
        "",
        "| replicas | workload | faults | seeds | operations | faults injected | trace valid | invalid |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, known in results.get("controls", {}).items():
        nodes, workload, nemesis, _ = CONTROLS[name]
        cells = [
            nodes,
            workload,
            ", ".join(nemesis),
            known["seeds"],
            f"{known['operations']:,}",
            f"{known['faults']:,}",
        ]
        lines.append("| " + " | ".join(map(str, [*cells, known["valid"], known["invalid"]])) + " |")
    for what, kept in (("Mutants", mutants), ("Runs without a mutant", results.get("controls", {}))):
        commits = dict.fromkeys(each["commit"][:12] for each in kept.values())
        lines += ["", f"{what}: measured at commit {', '.join(commits)}."]
    return "\n".join(lines)


def write_page() -> None:
    """Put the tables into the page, between its marks."""
    begin, end = "<!-- made by: python -m benchmarks.trace_validation page -->", "<!-- end -->"
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    PAGE.write_text(f"{head}{begin}\n\n{table(read_results())}\n\n{end}{tail}", encoding="utf-8")


def main() -> None:
    """Measure, or make the page."""
    parser = argparse.ArgumentParser(prog="trace_validation", description="what trace validation finds")
    parser.add_argument("what", choices=["mutants", "controls", "page"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants or kinds of controls")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each")
    parser.add_argument("--blind-seeds", type=int, default=20, help="runs of a mutant without a scenario")
    parser.add_argument("--first", type=int, default=0, help="first seed of the controls")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args(sys.argv[1:])
    known = {"mutants": mutants_in_dledger(), "controls": list(CONTROLS), "page": []}[options.what]
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    names = options.names or known
    if options.what == "mutants":
        measure_mutants(names, seeds=options.seeds, blind_seeds=options.blind_seeds, jobs=options.jobs)
    elif options.what == "controls":
        measure_controls(names, first=options.first, seeds=options.seeds, jobs=options.jobs)
    if PAGE.exists():
        write_page()


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.trace_validation", *sys.argv[1:]])
    main()
