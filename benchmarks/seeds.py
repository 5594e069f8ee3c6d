"""Simulated seeds over every kind of replication; makes docs/seeds.md.

    python -m benchmarks.seeds                       # every campaign that is not complete yet
    python -m benchmarks.seeds ha dledger7 --jobs 2  # those with one of these in the name
    python -m benchmarks.seeds every-fault --jobs 2 --budget 28800   # 100,000 seeds, for so many seconds
    python -m benchmarks.seeds --page                # only make the page from docs/seeds.json

Each seed is a separate run: a random mix of every fault that simulation has, twenty seconds of load; the clients'
history is judged, the replicas are compared byte for byte, and the invariants are watched. Campaigns resume where they
ended. Those that take days run only if named, and on one commit: do not change the checkout meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._runs import checked_out_commit
from checker.workers import worker_pool
from harness.cli_options import SEARCHED_LOAD
from harness.exploration.rehearsal import SIMULATED, Rehearsal
from harness.exploration.search import Tally, explore
from harness.nursery import restart_with_nursery
from harness.test import ALL, NemesisChoice, Test

__all__ = ["CAMPAIGNS", "Campaign", "kept", "main", "render", "without_what_varies"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "seeds.md"
RESULTS = PAGE.with_suffix(".json")

CHUNK = 10
"""Seeds between two writes of the results."""
LONG_CHUNK = 200
"""The same for a campaign that takes days, since at the end of each chunk all processes wait for the last seed."""
REASON_CHARACTERS = 300
"""A run's reason is cut to this length; its seed reproduces the run with the full text."""
MAX_KEPT_FAILURES = 20
"""Most runs that are not valid kept with seed and reason; the rest are only counted."""
MAX_REASONS = 200
"""Most kinds of reasons that are counted separately, to limit the page; no campaign has had ten of them yet."""
OTHER_REASONS = "other reasons"


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A number of seeds of one kind of run. `nemesis` is as on the command line."""

    title: str
    seeds: int
    nodes: int
    workload: str
    nemesis: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    time_limit_s: float = 20.0
    rate: float = 100.0
    concurrency: int = 10
    operation_timeout_s: float = 3.0
    may_lose: str = ""
    """Why a seed may lose acknowledged messages; empty if every seed has to be valid."""
    is_long: bool = False
    """Whether it takes days: it then runs only if named, and on one commit."""

    def test(self) -> Test:
        """The test without its seed."""
        return Test(
            system="broker", cluster=SIMULATED, nodes=self.nodes, workload=self.workload,
            nemesis=tuple(NemesisChoice.parse(word) for word in self.nemesis), nemesis_interval_s=5.0,
            time_limit_s=self.time_limit_s, concurrency=self.concurrency, rate=self.rate, seed=0,
            settings=self.settings, operation_timeout_s=self.operation_timeout_s,
        )  # fmt: skip

    @property
    def faults(self) -> str:
        """The faults as text, for the page."""
        every = {
            IN_DLEDGER: "machines, disks, clocks, networks",
            IN_HA: "the same without bit-flip",
            (ALL,): "all kinds",
        }
        return every.get(self.nemesis) or ", ".join(self.nemesis)

    @property
    def command(self) -> str:
        """The equivalent command of the harness."""
        words = [f"harness explore --nodes {self.nodes} --workload {self.workload}"]
        words.append(f"--nemesis {','.join(self.nemesis)} --time-limit {self.time_limit_s:g}")
        test = self.test()
        words.append(f"--concurrency {test.concurrency} --operation-timeout {test.operation_timeout_s:g}")
        words.append(f"--rate {self.rate:g} --seed 0 --seeds {self.seeds}")
        words += [f"--set {name}={value}" for name, value in self.settings.items()]
        return " ".join(words)


SYNC, ASYNC = {"replication": "sync"}, {"replication": "async"}
OPERATORS = ("members", "transfer", "restart")
IN_HA = ("partition", "kill", "pause", "clock", "disk-stall", "disk-slow", "disk-full", "disk-error", "power", "link")
IN_DLEDGER = tuple(sorted((*IN_HA, "bit-flip")))
"""Faults of machines and networks. `bit-flip` damages files of DLedger only."""
CAMPAIGNS: Mapping[str, Campaign] = {
    "operators-dledger3": Campaign(
        title="DLedger", seeds=100, nodes=3, workload="log", nemesis=OPERATORS, time_limit_s=15.0
    ),
    "operators-dledger5": Campaign(
        title="DLedger", seeds=150, nodes=5, workload="log", nemesis=OPERATORS, time_limit_s=15.0
    ),
    "operators-and-faults": Campaign(
        title="DLedger",
        seeds=250,
        nodes=5,
        workload="log",
        nemesis=(*OPERATORS, "kill", "partition", "pause", "power"),
        time_limit_s=15.0,
    ),
    "sync-ha-promote": Campaign(
        title="SYNC_MASTER", seeds=50, nodes=3, workload="log", settings=SYNC, nemesis=("promote",)
    ),
    "async-ha-promote": Campaign(
        title="ASYNC_MASTER", seeds=50, nodes=3, workload="log", settings=ASYNC, nemesis=("promote",)
    ),
    "async-ha-slow-promote": Campaign(
        title="ASYNC_MASTER, slow links",
        seeds=25,
        nodes=3,
        workload="log",
        settings=ASYNC,
        nemesis=("promote", "link=delay"),
        may_lose="a slave takes over that lacks what the master has acknowledged",
    ),
    "async-ha-power": Campaign(
        title="ASYNC_MASTER, asynchronous flush",
        seeds=25,
        nodes=3,
        workload="log",
        settings={**ASYNC, "flush_mode": "async"},
        nemesis=("power=cut@leader",),
        may_lose="the power is cut before the flush",
    ),
    "dledger3-register": Campaign(title="DLedger", seeds=100, nodes=3, workload="register", nemesis=IN_DLEDGER),
    "dledger3-log": Campaign(title="DLedger", seeds=100, nodes=3, workload="log", nemesis=IN_DLEDGER),
    "dledger3-queue": Campaign(title="DLedger", seeds=50, nodes=3, workload="queue", nemesis=IN_DLEDGER),
    "dledger3-transactions": Campaign(title="DLedger", seeds=50, nodes=3, workload="transactions", nemesis=IN_DLEDGER),
    "dledger7-register": Campaign(title="DLedger", seeds=80, nodes=7, workload="register", nemesis=IN_DLEDGER),
    "dledger7-log": Campaign(title="DLedger", seeds=80, nodes=7, workload="log", nemesis=IN_DLEDGER),
    "dledger7-queue": Campaign(title="DLedger", seeds=40, nodes=7, workload="queue", nemesis=IN_DLEDGER),
    "sync-ha-log": Campaign(title="SYNC_MASTER", seeds=125, nodes=3, workload="log", settings=SYNC, nemesis=IN_HA),
    "sync-ha-register": Campaign(
        title="SYNC_MASTER", seeds=75, nodes=3, workload="register", settings=SYNC, nemesis=IN_HA
    ),
    "sync-ha-queue": Campaign(title="SYNC_MASTER", seeds=50, nodes=3, workload="queue", settings=SYNC, nemesis=IN_HA),
    "async-ha-log": Campaign(title="ASYNC_MASTER", seeds=125, nodes=3, workload="log", settings=ASYNC, nemesis=IN_HA),
    "async-ha-register": Campaign(
        title="ASYNC_MASTER", seeds=75, nodes=3, workload="register", settings=ASYNC, nemesis=IN_HA
    ),
    "async-ha-queue": Campaign(
        title="ASYNC_MASTER", seeds=50, nodes=3, workload="queue", settings=ASYNC, nemesis=IN_HA
    ),
    **{
        f"every-fault-{workload}": Campaign(
            title="DLedger", seeds=50_000, nodes=5, workload=workload, nemesis=(ALL,), is_long=True,
            time_limit_s=SEARCHED_LOAD["time_limit"], rate=SEARCHED_LOAD["rate"],
            concurrency=SEARCHED_LOAD["concurrency"], operation_timeout_s=SEARCHED_LOAD["operation_timeout"],
        )
        for workload in ("log", "register")
    },  # what `harness explore --nemesis all` does
}  # fmt: skip


class OtherCommit(Exception):
    """A campaign that must run on one commit was begun on another."""


def lost_by(reason: str) -> int:
    """The number of lost acknowledged messages named in a verdict's reason."""
    return sum(int(count) for count in re.findall(r"\(In all: (\d+) lost", reason))


def without_what_varies(reason: str) -> str:
    """A verdict's reason without numbers and hosts, which vary between runs, so that equal reasons can be counted."""
    return _short(re.sub(r"\d+(,\d{3})*", "#", re.sub(r"\bn\d+\b", "n#", reason)))


def _short(reason: str) -> str:
    """The beginning of a verdict's reason, cut after a word."""
    return reason if len(reason) <= REASON_CHARACTERS else reason[:REASON_CHARACTERS].rpartition(" ")[0] + " ..."


def run(name: str, results: dict[str, Any], *, jobs: int, pool: Executor, path: Path, deadline_s: float) -> None:
    """Run the rest of a campaign until `deadline_s`; `results` is written after every chunk of seeds. The pool's
    processes are reused, because some interpreters compile while they run. Raises OtherCommit."""
    campaign = CAMPAIGNS[name]
    known = results.setdefault(
        name,
        {
            "commit": checked_out_commit(),
            **dict.fromkeys(("seeds", "valid", "invalid", "unknown", "operations", "faults", "took_s"), 0),
            "failures": [],
            "reasons": {},
        },
    )

    if campaign.is_long and known["commit"] != checked_out_commit():
        raise OtherCommit(
            f"{name}: its first {known['seeds']} seeds are of commit {known['commit']}: go on there, or begin --again"
        )

    reasons: dict[str, int] = known.setdefault("reasons", {})

    def tell(tally: Tally, rehearsal: Rehearsal) -> None:
        known["took_s"] = round(known["took_s"] + rehearsal.took_s, 1)
        known["lost"] = known.get("lost", 0) + lost_by(rehearsal.reason)
        if rehearsal.valid is not True:
            kind = f"{'invalid' if rehearsal.valid is False else 'unknown'}: {without_what_varies(rehearsal.reason)}"
            kind = kind if kind in reasons or len(reasons) < MAX_REASONS else OTHER_REASONS
            reasons[kind] = reasons.get(kind, 0) + 1
            print(f"{name}, seed {rehearsal.seed}: {rehearsal.valid}: {rehearsal.reason}", flush=True)

    while known["seeds"] < campaign.seeds and (left_s := deadline_s - time.monotonic()) > 0:
        first = known["seeds"]
        count = min(LONG_CHUNK if campaign.is_long else CHUNK, campaign.seeds - first)
        tally = explore(
            campaign.test(), seeds=iter(range(first, first + count)), jobs=jobs, budget_s=left_s,
            stop_at_first=False, on_result=tell, pool=pool,
        )  # fmt: skip
        known["seeds"] += tally.runs
        for word in ("valid", "invalid", "unknown", "operations", "faults"):
            known[word] += getattr(tally, word)
        failures = [{"seed": each.seed, "valid": each.valid, "reason": _short(each.reason)} for each in tally.failures]
        known["failures"] = kept([*known["failures"], *failures])
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {known['seeds']} of {campaign.seeds} seeds, {known['valid']} valid", flush=True)


def kept(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The failures to keep: the first ones, invalid ones before others."""
    return sorted(failures, key=lambda each: (each["valid"] is not False, each["seed"]))[:MAX_KEPT_FAILURES]


def render(results: Mapping[str, Any]) -> str:
    """The page."""
    lines = [
        "# Simulated seeds",
        "",
        "<!-- made by: python -m benchmarks.seeds -->",
        "",
        "Every seed is a simulated run with a random mix of faults. It is judged by the clients' history, by the "
        "invariants and by the replicas, which must become equal byte for byte soon after the last fault (30 s, later "
        "60 s) ([exploration.md](exploration.md)). Seeds count from 0. *Lost* counts acknowledged messages that are "
        "gone.",
        "",
        "DLedger and SYNC_MASTER have to be valid throughout. An ASYNC_MASTER promises less: it loses what its slaves "
        "lack if it is abandoned, and what it has not synced if the power is cut under an asynchronous flush.",
        "",
        "| replication | replicas | workload | kinds of faults | seeds | valid | invalid | unknown | operations "
        "| faults | lost |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, campaign in CAMPAIGNS.items():
        known = results.get(name)
        if known is None:
            continue
        cells = [campaign.title, campaign.nodes, campaign.workload, campaign.faults]
        cells += [f"{known['seeds']} of {campaign.seeds}"]
        cells += [known[word] for word in ("valid", "invalid", "unknown")]
        cells += [f"{known[word]:,}" for word in ("operations", "faults")] + [known.get("lost", 0)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for name, campaign in CAMPAIGNS.items():
        failures = results.get(name, {}).get("failures", ())
        if failures and campaign.may_lose:
            known = results[name]
            lines += ["", f"{name}: {known['invalid']} of {known['seeds']} seeds lose messages, because "
                      f"{campaign.may_lose}; seed {failures[0]['seed']} is one of them."]  # fmt: skip
        elif failures:
            lines += ["", f"{name}, seeds that were not valid:", ""]
            lines += [
                f"- seed {each['seed']}: {'invalid' if each['valid'] is False else 'unknown'}: {each['reason']}"
                + (f" ({each['note']})" if "note" in each else "")  # the outcome of its analysis, added by hand
                for each in failures
            ]
        if reasons := results.get(name, {}).get("reasons"):
            lines += ["", f"{name}, all seeds that were not valid, by reason (# stands for varying parts):", ""]
            lines += [f"- {count} {kind}" for kind, count in sorted(reasons.items(), key=lambda each: -each[1])]
        for paragraph in results.get(name, {}).get("explained", ()):  # by hand
            lines += ["", paragraph]
    lines += ["", *_measured_on(results)]
    lines += ["", "The commands of these campaigns:", ""]
    lines += [f"    {CAMPAIGNS[name].command}" for name in CAMPAIGNS if name in results]
    return "\n".join(lines) + "\n"


def _measured_on(results: Mapping[str, Any]) -> list[str]:
    """A line for each commit with its campaigns: on another commit the same seeds may have other runs."""
    by_commit: dict[str, list[str]] = {}
    for name in CAMPAIGNS:
        if name in results:
            by_commit.setdefault(results[name].get("commit", ""), []).append(name)
    lines = []
    for commit, names in by_commit.items():
        took_s = sum(results[name]["took_s"] for name in names)
        which = f"At commit {commit[:12]}" if commit else "At an unrecorded commit, when mixes had fewer faults"
        lines.append(f"{which}: {', '.join(names)}; all runs took {took_s:,.0f} s, some beside other programs.")
    for name in CAMPAIGNS:
        first = 0
        for until in results.get(name, {}).get("began_on", ()):  # added by hand if code had to be fixed meanwhile
            of = f"Seeds {first:,} to {until['seeds'] - 1:,} of {name} were run on commit {until['commit'][:12]}"
            lines += ["", f"{of}: {until['why']}"]
            first = until["seeds"]
        for again in results.get(name, {}).get("again", ()):  # by hand too, until it covers all earlier seeds
            last = again["first"] + again["seeds"] - 1
            lines += [
                "",
                f"Seeds {again['first']:,} to {last:,} of {name} were run again on commit {again['commit'][:12]}: "
                f"{again['valid']:,} valid, {again['invalid']} invalid, {again['stuck']} stuck, "
                f"{again['unknown']} unknown, {again['operations']:,} operations under {again['faults']:,} faults.",
            ]
            reasons = sorted(again.get("reasons", {}).items(), key=lambda each: -each[1])
            lines += [""] * bool(reasons) + [f"- {count} {kind}" for kind, count in reasons]
    return lines


def main() -> None:
    """Run campaigns, keep their results, make the page."""
    parser = argparse.ArgumentParser(prog="seeds", description="simulated seeds over every kind of replication")
    parser.add_argument("campaigns", nargs="*", metavar="TEXT", help="only campaigns with one of these in the name")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--budget", type=float, default=86_400.0, help="seconds after which no seed is begun")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where they are kept, the page beside it")
    parser.add_argument("--again", action="store_true", help="forget what is there of the chosen campaigns")
    parser.add_argument("--page", action="store_true", help="only make the page")
    arguments = parser.parse_args(sys.argv[1:])
    results: dict[str, Any] = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    chosen = [
        name
        for name, campaign in CAMPAIGNS.items()
        if (not arguments.campaigns and not campaign.is_long) or any(text in name for text in arguments.campaigns)
    ]
    if not chosen:
        parser.error(f"no campaign is called so; there are: {', '.join(CAMPAIGNS)}")
    deadline_s = time.monotonic() + arguments.budget
    with worker_pool(arguments.jobs) as pool:
        for name in [] if arguments.page else chosen:
            if arguments.again:
                results.pop(name, None)
            began_s = time.monotonic()
            try:
                run(name, results, jobs=arguments.jobs, pool=pool, path=arguments.results, deadline_s=deadline_s)
            except OtherCommit as error:
                parser.error(str(error))
            print(f"{name}: {results[name]['seeds']} seeds in {time.monotonic() - began_s:.0f} s", flush=True)
    arguments.results.with_suffix(".md").write_text(render(results))


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.seeds", *sys.argv[1:]])
    main()
