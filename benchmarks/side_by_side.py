"""Apache RocketMQ and our broker side by side; makes docs/rocketmq-side-by-side.md.

    python -m benchmarks.side_by_side                   # one more run of every cell that has fewer than three
    python -m benchmarks.side_by_side --times 1         # until every cell has one
    python -m benchmarks.side_by_side --page            # only make the page from docs/rocketmq-side-by-side.json

Each cell is a fault and a kind of replication. Both systems run it with the same workload, the same clients
(`node.client`), the same number of brokers and the same seeds, and the same checker judges both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._runs import perform_run
from spark_analysis.statistics import wilson

__all__ = ["CELLS", "longest_away", "main", "render"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rocketmq-side-by-side.md"
RESULTS = PAGE.with_suffix(".json")

SYSTEMS: Mapping[str, str] = {
    "apache": "--system rocketmq",
    "ours": str(Path(__file__).parent / "plugins" / "our_broker.py") + ":OurBroker",
}
FAULTS: Mapping[str, str] = {
    "kill": "kill=sigkill@leader",
    "partition": "partition=leader",
    "pause": "pause=sigstop@leader",
    "late": "link=delay@leader",
    "promote": "promote=failover@leader",
}
"""Faults as on the command line. `promote` kills the master and promotes a slave."""

REPLICATIONS = ("async", "sync", "dledger")
CELLS: Sequence[tuple[str, str]] = [
    (fault, replication)
    for fault in FAULTS
    for replication in REPLICATIONS
    if (fault, replication) != ("promote", "dledger")  # DLedger elects its leaders
]
TIMES = 3
FAULT_S = 8
LOAD_S = 40
"""One fault lasts from the eighth second to the sixteenth; a Java broker needs the rest to recover."""


def words_of(system: str, fault: str, replication: str, seed: int) -> list[str]:
    """The run's options."""
    return (
        f"{SYSTEMS[system]} --nodes 3 --workload log --set workload.polls=eventual --set replication={replication} "
        f"--nemesis {FAULTS[fault]} --nemesis-interval {FAULT_S} --time-limit {LOAD_S} --rate 100 --concurrency 8 "
        f"--seed {seed}"
    ).split()


def longest_away(history: Iterator[Mapping[str, Any]]) -> tuple[float, bool]:
    """The longest time (s) in which no append succeeded, between the first and the last invocation; and whether it
    lasted until the end, so that it might have been longer."""
    first = last = None
    succeeded: list[int] = []
    for event in history:
        if event["f"] != "append":
            continue
        if event["type"] == "invoke":
            first = event["time"] if first is None else first
            last = event["time"]
        elif event["type"] == "ok":
            succeeded.append(event["time"])
    if first is None or last is None:
        return 0.0, False
    end = max(last, *succeeded, first)
    longest_ns, until = max((later - earlier, later) for earlier, later in pairwise(sorted([first, *succeeded, end])))
    return longest_ns / 1e9, until == end and until not in succeeded


def perform(system: str, fault: str, replication: str, seed: int) -> dict[str, Any]:
    """Perform one run; returns what is kept of it."""
    began_load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="splitbrain-side-by-side-") as directory:
        results = perform_run(Path(directory), *words_of(system, fault, replication, seed))
        [history] = Path(directory).glob("store/*/2*/history.jsonl")
        with history.open(encoding="utf-8") as lines:
            away_s, until_end = longest_away(json.loads(line) for line in lines if not line.isspace())
    stats = results["checks"]["log"].get("stats", {})
    return {
        "seed": seed,
        "valid": results["valid"],
        "reason": results["reason"],
        "acknowledged": stats.get("acknowledged", 0),
        "counts": {name: number for name, number in stats.get("counts", {}).items() if number},
        "away_s": round(away_s, 2),
        "until_end": until_end,
        "faults": len(results["faults"]),
        "proven": sum(bool(fault["proven"] and fault["healed"]) for fault in results["faults"]),
        "machine_load": [round(began_load, 1), round(os.getloadavg()[0], 1)],
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def name_of(system: str, fault: str, replication: str) -> str:
    """The key of one system's runs of a cell."""
    return f"{system}/{replication}/{fault}"


def render(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page."""
    runs = [run for each in results.values() for run in each]
    loads = [load for run in runs for load in run["machine_load"]]
    lines = [
        "# Apache RocketMQ and ours, side by side",
        "",
        "<!-- made by: python -m benchmarks.side_by_side -->",
        "",
        "Apache RocketMQ 4.9.7 and the broker of this repository under the same faults, workload, clients "
        f"(`node.client`), seeds and checker: three brokers and a name server on netns, {LOAD_S} s of appends to and "
        f"reads of four queues, one fault on the leader after {FAULT_S} s for {FAULT_S} s. Files are synced before an "
        "acknowledgement (SYNC_FLUSH), with RocketMQ's default timings. Only SEND_OK counts as acknowledged.",
        "",
        f"The machine has two cores and was busy with other work (load {min(loads, default=0)} to "
        f"{max(loads, default=0)}): losses are valid, times are upper bounds.",
        "",
        f"{len(runs)} runs so far, of {TIMES * len(CELLS) * len(SYSTEMS)}: {TIMES} of each system in each cell.",
        "",
        "| fault | replication | Apache: lost in | messages | away | ours: lost in | messages | away |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault, replication in CELLS:
        sides = [_side(results.get(name_of(system, fault, replication), ())) for system in SYSTEMS]
        lines.append(f"| {fault} | {replication} | {' | '.join(sides)} |")
    lines += [
        "",
        "`lost in`: runs in which acknowledged messages were lost, out of the runs that the checker decided, with the "
        "95 % interval of their share (Wilson). `messages`: lost out of acknowledged ones. `away`: the longest time "
        "without a successful append, as median and range over the runs; `>` if none succeeded until the end of the "
        "load.",
        "",
        *(f"- `{fault}`: `--nemesis {words}`" for fault, words in FAULTS.items()),
        "",
        *_remarks(results),
        "The command of one run:",
        "",
        f"    harness run {' '.join(words_of('apache', 'kill', 'async', 1))}",
    ]
    return "\n".join(lines) + "\n"


def _side(runs: Sequence[Mapping[str, Any]]) -> str:
    answered = [run for run in runs if run["valid"] != "unknown"]
    if not answered:
        return f"{'no answer' if runs else 'not run'} | |"
    losing = sum(bool(run["counts"].get("lost")) for run in answered)
    share = wilson(losing, len(answered))
    lost = sum(run["counts"].get("lost", 0) for run in answered)
    away = sorted((run["away_s"], run["until_end"]) for run in answered)
    least, middle, most = (f"{'> ' * late}{away_s:g}" for away_s, late in (away[0], away[len(away) // 2], away[-1]))
    times = f"{middle} s ({least} to {most})" if len(away) > 1 else f"{middle} s"
    return (
        f"{losing} of {len(answered)} ({share.low:.0%} to {share.high:.0%}) | "
        f"{lost:,} of {sum(run['acknowledged'] for run in answered):,} | {times}"
    )


def _remarks(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Every run that is not valid for a reason other than lost messages."""
    found = [
        f"- {name}, seed {run['seed']}: {run['reason'][:300]}"
        for name, runs in results.items()
        for run in runs
        if run["valid"] is not True and not run["counts"].get("lost")
    ]
    if found:
        yield from ("Runs that are undecided, or invalid without a loss:", "", *found, "")


def main() -> None:
    """Perform runs, keep their results, make the page."""
    parser = argparse.ArgumentParser(prog="side_by_side", description="Apache RocketMQ and ours under the same faults")
    parser.add_argument("--times", type=int, default=TIMES, metavar="N", help=f"runs of each cell (default: {TIMES})")
    parser.add_argument("--page", action="store_true", help="only make the page")
    arguments = parser.parse_args(sys.argv[1:])
    results: dict[str, list[Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in range(1, 1 + (0 if arguments.page else arguments.times)):
        for fault, replication in CELLS:
            for system in SYSTEMS:
                runs = results.setdefault(name_of(system, fault, replication), [])
                if len(runs) >= seed:
                    continue
                try:
                    runs.append(perform(system, fault, replication, seed))
                except RuntimeError as error:
                    print(f"{name_of(system, fault, replication)}: {error}", flush=True)
                    continue
                print(f"{name_of(system, fault, replication)} seed {seed}: {runs[-1]['valid']} {runs[-1]['counts']} "
                      f"away {runs[-1]['away_s']} s", flush=True)  # fmt: skip
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                PAGE.write_text(render(results))
    PAGE.write_text(render(results))


if __name__ == "__main__":
    main()
