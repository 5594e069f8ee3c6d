"""Faults with an expected outcome, on real brokers and one on etcd, for docs/fault-trials.md.

    python -m benchmarks.fault_trials [stall] [hour] [lease] [read-index] [etcd] [--cluster netns] [--seed 1]

stall        the leader's disk hangs for 8 s, in three ways: another replica takes over, nothing is lost
hour         the wall clocks of each minority of five are off by an hour: reads stay linearizable
lease        a leader with a slow monotonic clock is cut off, with lease reads: it serves stale reads
read-index   the same with reads by ReadIndex: it serves none
etcd         syncs hang on all members of etcd for 10 s, three times: no write is acknowledged meanwhile
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._runs import perform_run, timed_faults

__all__ = ["main"]

HOSTS = ("n1", "n2", "n3", "n4", "n5")


def _event(at_s: float, action: str, fault_id: str, nemesis: str, variant: str) -> dict[str, Any]:
    return {"at_s": at_s, "action": action, "id": fault_id, "nemesis": nemesis, "variant": variant}


STALL = timed_faults(
    [("disk-stall", f"{form}@leader") for form in ("fsync", "all", "freeze")], begin_s=4.0, on_s=8.0, off_s=6.0
)
MINORITIES = ["+".join(chosen) for size in (1, 2) for chosen in itertools.combinations(HOSTS, size)]
HOUR = timed_faults([("clock", f"hour@{minority}") for minority in MINORITIES], begin_s=3.0, on_s=2.5, off_s=2.0)
DRIFT = [
    _event(3, "inject", "c0", "clock", "slow-monotonic@leader"),
    _event(16, "inject", "p0", "partition", "leader"),
    _event(34, "heal", "p0", "partition", "leader"),
    _event(36, "heal", "c0", "clock", "slow-monotonic@leader"),
]
_DRIFTING = "--nodes 3 --workload register --time-limit 40 --rate 30 --concurrency 12 --operation-timeout 2"
TRIALS: dict[str, tuple[str, list[Any], dict[str, str]]] = {
    "stall": ("--nodes 5 --workload log --time-limit 46 --rate 40", STALL, {}),
    "hour": ("--nodes 5 --workload register --time-limit 71 --rate 25", HOUR, {}),
    "lease": (_DRIFTING, DRIFT, {"read_mode": "lease", "timing": "default"}),
    "etcd": (
        "--system etcd --nodes 3 --workload register --time-limit 55 --rate 60 --concurrency 12 --operation-timeout 3",
        timed_faults([("disk-stall", "fsync@all")] * 3, begin_s=5.0, on_s=10.0, off_s=6.0),
        {},
    ),
    "read-index": (_DRIFTING, DRIFT, {"read_mode": "read_index", "timing": "default"}),
}


def acknowledged_meanwhile(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """For each fault of a history (events in order): the number of writes invoked while it was in force, and how many
    of these were acknowledged before its heal began."""
    found: list[tuple[int, int]] = []
    asked: set[Any] = set()
    is_in_force, count, acknowledged = False, 0, 0
    for event in events:
        process, kind, what = event["process"], event["type"], event["f"]
        if process == "nemesis":
            if what == "inject" and kind != "invoke":
                is_in_force, count, acknowledged = True, 0, 0
                asked.clear()
            elif what == "heal" and kind == "invoke":
                is_in_force = False
                found.append((count, acknowledged))
        elif is_in_force and what == "write":
            if kind == "invoke":
                asked.add(process)
                count += 1
            elif process in asked:
                asked.discard(process)
                acknowledged += kind == "ok"
    return found


def main() -> None:
    """Print, for each trial, the verdict, the faults and who led when."""
    parser = argparse.ArgumentParser(prog="fault_trials", description="faults with an expected outcome")
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(TRIALS)} (default: all)")
    parser.add_argument("--cluster", default="netns")
    parser.add_argument("--seed", default="1")
    arguments = parser.parse_args(sys.argv[1:])
    unknown = [name for name in arguments.trials if name not in TRIALS]
    if unknown:
        parser.error(f"unknown trial {unknown[0]!r}; known: {', '.join(TRIALS)}")
    for name in arguments.trials or TRIALS:
        words, schedule, settings = TRIALS[name]
        with tempfile.TemporaryDirectory(prefix="splitbrain-fault-trials-") as directory:
            results = perform_run(
                Path(directory),
                *("--cluster", arguments.cluster, "--seed", arguments.seed, *words.split()),
                schedule=schedule,
                settings=settings,
            )
            meanwhile = [
                acknowledged_meanwhile(map(json.loads, history.read_text(encoding="utf-8").splitlines()))
                for history in Path(directory).glob("store/*/2*/history.jsonl")
            ]
        print(f"{name}: {results['valid']}: {results['reason']}")
        print(f"    (writes asked for under each fault, acknowledged before its end): {meanwhile}")
        for fault in results["faults"]:
            state = "proven and healed" if fault["proven"] and fault["healed"] else "NOT PROVEN"
            when = f"{fault['start_ns'] / 1e9:6.2f} s to {fault['end_ns'] / 1e9:6.2f} s"
            print(f"    {when}  {fault['nemesis']} {fault['variant']}: {state}: {(fault['proof'] or {}).get('detail')}")
        for term in results["checks"].get("leaders", {}).get("terms", ()):
            print(f"    {term['start_ns'] / 1e9:6.2f} s  {term['leader']} leads term {term['term']}")
        print(flush=True)


if __name__ == "__main__":
    main()
