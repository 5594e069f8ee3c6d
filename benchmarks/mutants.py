"""How fast each mutant is found, in seeds, cluster time and CPU time; makes docs/mutants.md.

    python -m benchmarks.mutants [NAME ...] [--searches 10] [--seeds 200] [--budget SECONDS] [--jobs N]
    python -m benchmarks.mutants [NAME ...] --power-models [--searches 10] [--seeds 200] [--jobs N]
    python -m benchmarks.mutants [NAME ...] --reports STORE
    python -m benchmarks.mutants [NAME ...] --blind [--guide] [--small] [--searches 10] [--budget 60] [--jobs N]

A search runs a mutant's scenario seed after seed until one run reveals the mutant. Searches begin at seeds far apart,
so they are independent of each other. Every seed is also run without the mutant: a finding counts only if that control
shows nothing. Results are kept in docs/mutants.json, mutant by mutant, and the table is written from all results there.
With --power-models, mutants whose scenario cuts power are searched under every model of what a sync makes durable
(nemesis/power.py), with results in docs/mutants-power.json. With --reports nothing is measured: the first seed of each
mutant is run once, and leaves its report and trace. With --blind each mutant is searched without its scenario
(`benchmarks/_blind.py`); an interrupted measurement is resumed. With --guide each such search is made twice, at random
and with a guide that learns; with --small, with shorter runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._blind import (
    COMPARED,
    GROUNDS,
    SEARCHED,
    SMALL,
    blind_table,
    measure_blind,
    read_conditions,
    read_results,
)
from benchmarks._runs import checked_out_commit
from checker.workers import worker_pool
from harness.exploration.mutants import SCENARIOS, gives_away, rehearse_mutant, report_mutant
from harness.nursery import restart_with_nursery
from harness.store import Store
from nemesis.mechanisms.undo_log import POWER_MODELS
from nemesis.power import KINDS
from node.mutants.catalogue import MUTANTS

__all__ = ["main", "measure", "search", "table"]

DOCS = Path(__file__).parent.parent / "docs"
POWER_RESULTS = DOCS / "mutants-power.json"
POWER_FORMS = {model: form for form, model in KINDS.items() if model in POWER_MODELS}
"""Model of what a sync makes durable -> the form of the nemesis `power` that cuts by it."""

WHY_NONE = {
    "vote-after-restart": "the next leader's first round waits 300 to 460 ms for the partitioned one, whose lease ends "
    "350 to 450 ms after the partition: the member has to restart within some 50 ms of that round's beginning",
    "lease-from-answer": "an answer is given up after 400 ms, and no election ends within 850 ms of the heartbeat",
    "read-confirmed-before": "a member that has answered a heartbeat votes for nobody else for 500 ms, and an answer "
    "is given up after 400: another check applies before this one",
    "verified-forever": "no leader sends a committed index before it has compared logs: another check applies before "
    "this one",
    "watermark-outlives-term": "the next leader has more entries than the former leader's tail by the time the former "
    "leader can lead again",
    "durable-mark-stays": "the next leader's entries have overtaken the tail before its former leader is back; still, "
    "one blind search in thirty finds it",
    "checkpoint-ahead": "a checkpoint takes two syncs, which also make the entries that it names durable",
}
"""Why a mutant has no scenario, with the fast timings (node.dledger.config)."""

SEARCH_STRIDE = 1000
"""Distance between the first seeds of two searches; more than the seeds that one may use."""


BUDGET_S = 3600.0
BLIND_BUDGET_S = 60.0
"""CPU time of a search: about 20 seeds."""


def search(
    name: str, *, first_seed: int, seeds: int, deadline_s: float, power_form: str | None = None
) -> dict[str, Any]:
    """Run a mutant from `first_seed` on until it is found, for `seeds` seeds at most or until `deadline_s` of the
    monotonic clock; power cuts have the form `power_form`, or for None that of the scenario. In the result, `cluster_s`
    is the simulated time under load until the violation shows (to the end of the load, if it shows only afterwards),
    and `processor_s` the CPU time of the runs with the mutant.
    """
    limit_s = SCENARIOS[name].time_limit_s
    found: dict[str, Any] = {"first_seed": first_seed, "found": False, "seeds": 0, "cluster_s": 0.0, "processor_s": 0.0}
    controls, unclean = 0, []
    for seed in range(first_seed, first_seed + seeds):
        if time.monotonic() >= deadline_s:
            break
        began_s = time.process_time()
        run = rehearse_mutant(name, seed, power_form=power_form)
        found["processor_s"] += time.process_time() - began_s
        found["seeds"] += 1
        is_clean = not gives_away(rehearse_mutant(name, seed, is_control=True, power_form=power_form))
        controls += 1
        if not is_clean:
            unclean.append(seed)
        if gives_away(run) and is_clean:
            seen_s = limit_s if run.violation_s is None else run.violation_s
            found["cluster_s"] += min(max(seen_s, 0.0), limit_s)
            found |= {"found": True, "checks": list(run.symptoms)}
            break
        found["cluster_s"] += limit_s
    rounded = {key: round(found[key], 2) for key in ("cluster_s", "processor_s")}
    return {**found, **rounded, "controls": controls, "unclean_controls": unclean}


def measure(name: str, *, searches: int, seeds: int, budget_s: float, power_form: str | None = None) -> dict[str, Any]:
    """Search for one mutant `searches` times. Returns the data for the table, as JSON data."""
    deadline_s = time.monotonic() + budget_s
    done = []
    for number in range(searches):
        if time.monotonic() >= deadline_s:
            break
        first_seed = number * SEARCH_STRIDE
        done.append(search(name, first_seed=first_seed, seeds=seeds, deadline_s=deadline_s, power_form=power_form))
    hits = [each for each in done if each["found"]]
    checks: Counter[str] = Counter(check for each in hits for check in each["checks"])

    def median(key: str) -> float | None:
        return round(statistics.median(each[key] for each in hits), 1) if hits else None

    return {
        "commit": checked_out_commit(),
        "interpreter": interpreter(),
        "searches": done,
        "found": len(hits),
        "seeds_per_search": seeds,
        "runs": sum(each["seeds"] for each in done),
        "controls": sum(each["controls"] for each in done),
        "controls_not_clean": sum(len(each["unclean_controls"]) for each in done),
        "median_seeds": median("seeds"),
        "most_seeds": max((each["seeds"] for each in hits), default=None),
        "median_cluster_s": median("cluster_s"),
        "median_processor_s": median("processor_s"),
        "checks": dict(checks.most_common()),
    }


def interpreter() -> str:
    """The Python that runs this, on which CPU times depend: "CPython 3.11"."""
    return f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"


def table(results: dict[str, Any]) -> str:
    """The document, from the results of `measure` by mutant."""
    lines = [
        "# Mutants",
        "",
        "<!-- made by: python -m benchmarks.mutants -->",
        "",
        "A mutant is a known mistake that `--set mutant=NAME` injects into a node or a client (`node/mutants`). It",
        "replaces methods at the start; without it the code has no branch for it. Each has a scenario",
        "(`harness/exploration/mutants.py`), run in simulation seed after seed. A mutant is found when a run shows a",
        "violation, or replicas that do not recover and become equal after all faults are healed (`stuck`), and the",
        "same seed without the mutant shows neither. *Found* counts the searches that found it, out of all searches;",
        "each begins at another seed and has at most 200 seeds. The figures after it are medians over the searches:",
        "seeds (and the most that a search took), seconds of the cluster under load until the violation shows, and",
        "seconds of one core for the runs, from the start of the first to the verdict of the last. `linearizable` and",
        "`log` judge the clients' history, `replicas` and `leaders` the replicas' final state, `invariants` each of",
        "their steps (`harness/clusters/sim/invariants.py`, in simulation only). Violations at 0 cluster seconds show",
        "before the load begins. If a cell counts runs, searches followed one another from the first seed on, a",
        "control was run for findings only, and the core was not timed.",
        "",
        "| mutant | what it does | origin | workload, faults, settings | found by | found | seeds (most) | cluster s "
        "| core s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, scenario in SCENARIOS.items():
        mutant, result = MUTANTS[name], results.get(name)
        faults = scenario.faults.replace("|", "\\|")
        load = f"{scenario.rate:g} op/s of {scenario.concurrency} clients"
        where = f"{scenario.workload}, {scenario.nodes} nodes, {load}: {faults}"
        where += "".join(f"; {key}={value}" for key, value in scenario.settings.items())
        found = "| | not measured | | | |" if result is None else _cells(result)
        lines.append(f"| {name} | {mutant.does} | {mutant.origin} | {where} {found}")
    controls = sum(result["controls"] for result in results.values())
    spoiled = sum(result.get("controls_not_clean", result.get("controls_not_valid", 0)) for result in results.values())
    lines += ["", f"Controls (the same seeds without the mutant): {controls} run, {controls - spoiled} clean.", ""]
    lines += _measured_on(results)
    lines += power_table(json.loads(POWER_RESULTS.read_text(encoding="utf-8")) if POWER_RESULTS.exists() else {})
    lines += _unscripted()
    lines += blind_table(read_results(), read_conditions())
    notes = DOCS / "mutants-notes.md"
    if notes.exists():
        lines.append(notes.read_text(encoding="utf-8"))
    return "\n".join(lines).rstrip() + "\n"


def _measured_on(results: dict[str, Any]) -> list[str]:
    """A line for each commit and Python with its mutants: on another commit the same seeds may have other runs, and
    another Python has other times."""
    by_conditions: dict[str, list[str]] = {}
    for name in SCENARIOS:
        if name in results:
            by_conditions.setdefault(_conditions(results[name]), []).append(name)
    return [
        f"At {conditions}: {'all' if len(names) == len(results) else ', '.join(names)}."
        for conditions, names in by_conditions.items()
    ]


def _conditions(result: dict[str, Any]) -> str:
    """The commit and the Python of a result, as far as they were recorded."""
    commit, python = result.get("commit", ""), result.get("interpreter", "")
    of = f"commit {commit[:12]}" if commit else "an unrecorded commit"
    return f"{of}, run with {python}" if python else of


def power_table(results: dict[str, Any]) -> list[str]:
    """The part of the page on models of a power cut, from the results of `measure` by mutant and model."""
    if not results:
        return []
    lines = [
        "",
        "## Under each model of a power cut",
        "",
        "<!-- made by: python -m benchmarks.mutants --power-models -->",
        "",
        "Which data a power cut loses depends on a model ([power](nemeses/power.md)): `ext4` is the one used in the",
        "table above unless a fault there names another one (`power=cut-posix`), `posix` also loses names whose",
        "directory was not synced, `torn` tears unsynced data into sectors. The table has the mutants whose scenario",
        "cuts power, searched for under each model with the same seeds; the controls are the broker without a mutant",
        "under the same faults.",
        "",
        "| mutant | model | found by | found | seeds (most) | cluster s | core s | controls, clean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_model in results.items():
        for model, result in by_model.items():
            clean = result["controls"] - result["controls_not_clean"]
            lines.append(f"| {name} | `{model}` {_cells(result)} {result['controls']}, {clean} |")
    return [*lines, "", *_measured_on({name: next(iter(by_model.values())) for name, by_model in results.items()})]


def measure_power_models(names: Sequence[str], *, jobs: int, **limits: Any) -> None:
    """Search for mutants whose scenario cuts power under every model, and keep the results."""
    cut = [name for name in names if "power=cut" in SCENARIOS[name].faults]
    results: dict[str, Any] = json.loads(POWER_RESULTS.read_text(encoding="utf-8")) if POWER_RESULTS.exists() else {}
    with worker_pool(jobs) as pool:
        waiting = {
            pool.submit(measure, name, power_form=form, **limits): (name, model)
            for name in cut
            for model, form in POWER_FORMS.items()
        }
        for future in concurrent.futures.as_completed(waiting):
            name, model = waiting[future]
            results.setdefault(name, {})[model] = future.result()
            print(f"{name:28} {model:6} {_line(results[name][model])}", flush=True)
            in_order = {
                each: {model: results[each][model] for model in POWER_FORMS if model in results[each]}
                for each in SCENARIOS
                if each in results
            }
            POWER_RESULTS.write_text(json.dumps(in_order, indent=2) + "\n", encoding="utf-8")


def _unscripted() -> list[str]:
    """The part of the page on mutants without a scenario."""
    lines = [
        "",
        "## Without a scenario",
        "",
        "These mutants need several things at once: two faults in the right order, a race, a pause at the wrong",
        "moment. Scenarios for them were sought after the searches without a hint (below); the table says why none was",
        "found. `tests/node/dledger/test_unscripted_mutants.py` shows by hand what each mechanism prevents.",
        "",
        "| mutant | what it does | origin | why no scenario shows it |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each.does} | {each.origin} | {WHY_NONE[name]} |"
        for name, each in MUTANTS.items()
        if each.is_unscripted
    ]
    return lines


def _cells(result: dict[str, Any]) -> str:
    """The columns from "found by" on. Results in the old format have no `searches`."""
    if not result["found"]:
        return f"| not found | 0 of {len(result.get('searches', ()))} | | | |"
    ordered = sorted(result["checks"].items(), key=lambda each: -each[1])
    checks = ", ".join(f"{check} ({count})" for check, count in ordered)
    if "searches" not in result:
        return (
            f"| {checks} | {result['found']} of {result['runs']} runs | {result['median_seeds']:g} "
            f"| {result['median_simulated_s']:g} | |"
        )
    return (
        f"| {checks} | {result['found']} of {len(result['searches'])} "
        f"| {result['median_seeds']:g} ({result['most_seeds']}) | {result['median_cluster_s']:g} "
        f"| {result['median_processor_s']:g} |"
    )


def _line(result: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in result.items() if key != "searches")


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all without one")
    parser.add_argument("--searches", type=int, default=10, help="searches for each mutant")
    parser.add_argument("--seeds", type=int, default=200, help="seeds at most in one search")
    parser.add_argument("--budget", type=float, help="seconds at most for one mutant (3600), blind for a search (60)")
    parser.add_argument("--blind", action="store_true", help="look for each without its scenario")
    parser.add_argument(
        "--power-models", action="store_true", help="look for those whose scenario cuts power, by model"
    )
    parser.add_argument("--guide", action="store_true", help="with --blind: each search at random and guided")
    parser.add_argument("--small", action="store_true", help="with --blind: three nodes, 8 s, 60 operations a second")
    parser.add_argument("--ground", action="append", default=[], choices=GROUNDS, help="with --blind: only there")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="S", help="begin no blind search then")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--table-only", action="store_true", help="write the table from the kept results")
    parser.add_argument("--reports", metavar="STORE", help="leave a report of each in this store, and measure nothing")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in MUTANTS]
    if unknown:
        parser.error(f"no mutant is called {', '.join(unknown)}; there are: {', '.join(MUTANTS)}")
    unscripted = [name for name in options.names if name not in SCENARIOS and not options.blind]
    if unscripted:
        parser.error(f"no scenario is written for {', '.join(unscripted)}: look for it with --blind")
    if options.blind and not options.table_only:
        budget_s = options.budget or BLIND_BUDGET_S
        names = options.names or list(MUTANTS)
        measure_blind(
            names,
            searches=options.searches,
            budget_s=budget_s,
            jobs=options.jobs,
            ways=(False, True) if options.guide else (False,),
            load=SMALL if options.small else COMPARED if options.guide else SEARCHED,
            grounds=options.ground,
            until_s=time.monotonic() + options.stop_after,
        )
    if options.reports:
        for name in options.names or SCENARIOS:
            print(report_mutant(name, 1, Store(options.reports)).report_path, flush=True)
        return
    path = DOCS / "mutants.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    limits = {"searches": options.searches, "seeds": options.seeds, "budget_s": options.budget or BUDGET_S}
    is_measured = not (options.table_only or options.blind or options.power_models)
    names = (options.names or list(SCENARIOS)) if is_measured else []
    if not 1 <= options.seeds <= SEARCH_STRIDE or options.searches < 1:
        parser.error(f"--searches must be 1 or more, --seeds 1 to {SEARCH_STRIDE}")
    if options.power_models:
        measure_power_models(options.names or list(SCENARIOS), jobs=options.jobs, **limits)
    with worker_pool(options.jobs) as pool:
        waiting = {pool.submit(measure, name, **limits): name for name in names}
        for future in concurrent.futures.as_completed(waiting):
            name = waiting[future]
            results[name] = future.result()
            print(f"{name:28} {_line(results[name])}", flush=True)
            path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (DOCS / "mutants.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.mutants", *sys.argv[1:]])
    main()
