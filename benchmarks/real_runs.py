"""Half an hour of faults on real brokers; makes docs/real-runs.md.

    python -m benchmarks.real_runs           # every run that is not recorded yet, two and a half minutes each
    python -m benchmarks.real_runs 3 7       # these
    python -m benchmarks.real_runs --page    # only make the page from docs/real-runs.json

DLedger with three and five replicas under alternating partitions, kills, pauses and power cuts, on processes with link
proxies and in network namespaces. Each run must be valid, whatever the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._runs import kept_of, perform_run, verdict_of

__all__ = ["RUNS", "main", "render"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "real-runs.md"
RESULTS = PAGE.with_suffix(".json")

LOAD_S = 150
FAULTS = "partition,kill,pause,power"
FAULT_S = 4
"""Length of each fault, and of the pause after it."""
RUNS: Sequence[tuple[str, int, str]] = (
    ("local", 3, "register"),
    ("netns", 5, "log"),
    ("local", 5, "log"),
    ("netns", 3, "queue"),
    ("local", 3, "log"),
    ("netns", 5, "register"),
    ("local", 5, "register"),
    ("netns", 3, "log"),
    ("local", 5, "queue"),
    ("netns", 3, "register"),
    ("local", 3, "transactions"),
    ("netns", 5, "log"),
)
"""Cluster, replicas, workload; the number of a run, from 1, is its seed."""


SYSTEM_CHECKS = ("replicas", "leaders")
"""The checks of the replicas in every run; the others belong to the workload."""


def words_of(number: int) -> list[str]:
    """The run's options."""
    cluster, nodes, workload = RUNS[number - 1]
    return (
        f"--cluster {cluster} --nodes {nodes} --workload {workload} --nemesis {FAULTS} --nemesis-interval {FAULT_S}"
        f" --time-limit {LOAD_S} --rate 60 --concurrency 8 --seed {number}"
    ).split()


def perform(number: int) -> dict[str, Any]:
    """Perform one run; returns what is kept of it."""
    checks: dict[str, dict[str, Any]] = {}

    def run() -> dict[str, Any]:
        results = perform_run(Path(directory), *words_of(number))
        for name, check in results["checks"].items():
            checks[name] = {"valid": check["valid"], "reason": check["reason"]}
        return results

    with tempfile.TemporaryDirectory(prefix="splitbrain-real-runs-") as directory:
        return {**kept_of(run), "checks": checks}


def render(results: Mapping[str, Any]) -> str:
    """The page."""
    done = [number for number in range(1, len(RUNS) + 1) if str(number) in results]
    kept = [results[str(number)] for number in done]
    lines = [
        "# Half an hour of faults on real brokers",
        "",
        "<!-- made by: python -m benchmarks.real_runs -->",
        "",
        f"DLedger, fast timings, fsync before every acknowledgement, {LOAD_S} s of load a run; partitions, kills, "
        f"pauses and power cuts in turn, each for {FAULT_S} s with {FAULT_S} s of calm after it. `local` means "
        "processes with link proxies, `netns` network namespaces. The machine has two cores and was busy with other "
        "work, as its load shows: verdicts are valid, times would not be.",
        "",
        "| run | cluster | replicas | workload | verdict | operations | faults proven | finding | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, known in zip(done, kept, strict=True):
        cluster, nodes, workload = RUNS[number - 1]
        said = {name: check["reason"] for name, check in known["checks"].items() if name not in SYSTEM_CHECKS}
        what = next((text for name, text in said.items() if name != "linearizable"), said.get("linearizable"))
        low, high = sorted(known["machine_load"])
        lines.append(
            f"| {number} | {cluster} | {nodes} | {workload} | {verdict_of(known)} | {known['ops']['ok']:,} "
            f"| {known['proven']} of {known['faults']} | {what} | {low} to {high} |"
        )
    valid = sum(known["valid"] is True for known in kept)
    lines += [
        "",
        f"{len(kept)} runs, {len(kept) * LOAD_S / 60:g} minutes of load, {sum(known['ops']['ok'] for known in kept):,} "
        f"operations, {sum(known['proven'] for known in kept)} faults proven and healed: {valid} valid.",
    ]
    if "note" in results:
        lines.append(results["note"])
    notes = [f"- Run {n}: {known['reason']}" for n, known in zip(done, kept, strict=True) if known["valid"] is not True]
    lines += ["", *notes] if notes else []
    lines += ["", "The command of one run:", "", f"    harness run {' '.join(words_of(1))}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Perform runs, keep their results, make the page."""
    parser = argparse.ArgumentParser(prog="real_runs", description="half an hour of faults on real brokers")
    parser.add_argument("runs", nargs="*", type=int, metavar="NUMBER", help=f"1 to {len(RUNS)} (default: all)")
    parser.add_argument("--page", action="store_true", help="only make the page")
    arguments = parser.parse_args(sys.argv[1:])
    if any(not 1 <= number <= len(RUNS) for number in arguments.runs):
        parser.error(f"runs are numbered from 1 to {len(RUNS)}")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = arguments.runs or [number for number in range(1, len(RUNS) + 1) if str(number) not in results]
    for number in [] if arguments.page else wanted:
        results[str(number)] = perform(number)
        print(f"run {number} {RUNS[number - 1]}: {results[str(number)]['valid']}: {results[str(number)]['reason']}")
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(render(results))


if __name__ == "__main__":
    main()
