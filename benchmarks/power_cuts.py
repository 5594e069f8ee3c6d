"""Acknowledged messages lost in power cuts, with a synchronous and with an asynchronous flush.

    python -m benchmarks.power_cuts [--cuts 50] [--from 0] [--cluster local] [--flush sync async] [--model ext4]
                                    [--set NAME=VALUE]

Real brokers, the workload `log`, ten cuts per run, every other one of the whole cluster. A message is lost if its
append was acknowledged and no replica has it in the end. The asynchronous flush is RocketMQ's: every 500 ms if four
pages are unsynced, and after 10 s in any case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._runs import perform_run, timed_faults
from nemesis.power import KINDS

__all__ = ["main"]

CUTS_PER_RUN = 10
TARGETS = ("all", "leader", "all", "minority", "all", "majority")
ROCKETMQ_FLUSH = {"flush_interval_ms": "500", "flush_least_pages": "4", "flush_thorough_interval_ms": "10000"}
BEGIN_S, ON_S, OFF_S = 3.0, 1.0, 3.0


def trial(
    flush_mode: str, *, cluster: str, cuts: int, first: int, settings: dict[str, str], model: str = "ext4"
) -> dict[str, Any]:
    """One run of `cuts` cuts, the first of which is number `first` over all runs. Returns its counts."""
    form = next(form for form, of_form in KINDS.items() if of_form == model)
    faults = [("power", f"{form}@{TARGETS[(first + number) % len(TARGETS)]}") for number in range(cuts)]
    schedule = timed_faults(faults, begin_s=BEGIN_S, on_s=ON_S, off_s=OFF_S)
    with tempfile.TemporaryDirectory(prefix="splitbrain-power-cuts-") as directory:
        results = perform_run(
            Path(directory),
            *("--cluster", cluster, "--nodes", "3", "--workload", "log", "--rate", "100"),
            *("--seed", str(first), "--time-limit", str(BEGIN_S + cuts * (ON_S + OFF_S))),
            schedule=schedule,
            settings={"flush_mode": flush_mode, **settings},
        )
    proofs = [fault["proof"] or {} for fault in results["faults"]]
    return {
        "cuts": len(results["faults"]),
        "proven": sum(fault["proven"] and fault["healed"] for fault in results["faults"]),
        "hosts": sum(proof.get("detail", "").count(" lost ") for proof in proofs),
        "acked": results["ops_by_f"].get("append", {}).get("ok", 0),
        "lost": results["checks"]["log"].get("stats", {}).get("counts", {}).get("lost"),  # None: could not be counted
        "valid": results["valid"],
        "reason": results["reason"],
    }


def main() -> None:
    """Print a line for each run and one for each flush mode."""
    parser = argparse.ArgumentParser(prog="power_cuts", description="acknowledged messages lost in power cuts")
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="the first cut's number, a seed")
    parser.add_argument("--cluster", default="local")
    parser.add_argument("--flush", nargs="+", default=["sync", "async"], choices=["sync", "async"])
    parser.add_argument("--model", nargs="+", default=["ext4"], choices=["ext4", "posix", "torn"])
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args(sys.argv[1:])
    given = dict(text.partition("=")[::2] for text in arguments.settings)
    for flush_mode, model in product(arguments.flush, arguments.model):
        settings = {**(ROCKETMQ_FLUSH if flush_mode == "async" else {}), **given}
        runs = []
        end = arguments.first + arguments.cuts
        for first in range(arguments.first, end, CUTS_PER_RUN):
            cuts = min(CUTS_PER_RUN, end - first)
            run = trial(flush_mode, cluster=arguments.cluster, cuts=cuts, first=first, settings=settings, model=model)
            runs.append(run)
            print(f"{flush_mode}, {model}: {run}", flush=True)
        print(f"{flush_mode} flush, {model}: {summary(runs)}", flush=True)


def summary(runs: list[dict[str, Any]]) -> str:
    """The totals of some runs as text. A run that could not count its losses adds neither appends nor losses."""
    total = {name: sum(run[name] for run in runs) for name in ("cuts", "proven", "hosts")}
    counted = [run for run in runs if run["lost"] is not None]
    uncounted = f" ({len(runs) - len(counted)} runs could not count their losses)" if len(counted) < len(runs) else ""
    return (
        f"{total['cuts']} cuts ({total['proven']} proven and healed, {total['hosts']} hosts), "
        f"{sum(run['acked'] for run in counted)} appends acknowledged, {sum(run['lost'] for run in counted)} of them "
        f"lost{uncounted}; verdicts {', '.join(str(run['valid']) for run in runs)}"
    )


if __name__ == "__main__":
    main()
