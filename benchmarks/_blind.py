"""How soon a search finds each mutant that knows nothing of it: random mixes of all faults, five nodes, no scenario.

A search runs seed after seed, or what a guide makes of them, until a run gives the mutant away and the same run without
the mutant does not, or until its budget of processor time is used up. One that ends so is *censored*: the seeds that it
would have needed are more than those that it had. Medians and quantiles are therefore those of Kaplan and Meier, who
take from each search what it says.

Every search is appended to a file of JSON lines when it ends, so that a measurement can be interrupted and resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checker.workers import worker_pool
from harness.cli_options import SEARCHED_LOAD
from harness.exploration.mutants import gives_away
from harness.exploration.rehearsal import SIMULATED, rehearse_test, usable_choices
from harness.exploration.search import mix_for
from harness.test import Test
from node.mutants.catalogue import MUTANTS, NO_MUTANT
from node.mutants.switch import part_of

__all__ = [
    "GROUNDS",
    "MATTERS",
    "blind_search",
    "blind_table",
    "measure_blind",
    "quantile",
    "read_conditions",
    "read_results",
]

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "mutants-blind.jsonl"

NODES = 5
FIRST_SEED = 910_000
LEAST_SEARCHES = 5
"""For a median and a quantile; of fewer each is given."""

STRIDE = 1_000
"""Between the first seeds of two searches; many times what a budget allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What is searched: a workload and the system's settings."""

    workload: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def test_of(self, mutant: str) -> Test:
        """The test of every seed, as `harness explore` has it where nothing is asked for but this."""
        return Test(
            system="broker", cluster=SIMULATED, nodes=NODES, workload=self.workload, nemesis=(),
            nemesis_interval_s=5.0, time_limit_s=SEARCHED_LOAD["time_limit"], rate=SEARCHED_LOAD["rate"],
            concurrency=SEARCHED_LOAD["concurrency"], operation_timeout_s=SEARCHED_LOAD["operation_timeout"],
            seed=0, settings={**self.settings, "mutant": mutant},
        )  # fmt: skip


GROUNDS: Mapping[str, Ground] = {
    "log": Ground(workload="log"),
    "register": Ground(workload="register"),
    "register, leases": Ground(workload="register", settings={"read_mode": "lease"}),
    "queue": Ground(workload="queue"),
    "transactions": Ground(workload="transactions"),
    "classic HA, log": Ground(workload="log", settings={"replication": "sync"}),
    "classic HA, queue": Ground(workload="queue", settings={"replication": "sync"}),
}

_DLEDGER = ("log", "register", "queue", "transactions")

MATTERS: Mapping[str, Sequence[str]] = {
    "election": ("log", "register", "register, leases", "queue", "transactions"),
    "leases": ("register, leases", "register", "log"),
    "replication": _DLEDGER,
    "storage": _DLEDGER,
    "group": ("log", "register", "register, leases", "queue", "transactions"),
    "serving": _DLEDGER,
    "client": _DLEDGER,
    "ha": ("classic HA, log", "classic HA, queue"),
}
"""The part of the program that a mutant is put into -> where it can matter, by workload and settings."""


def blind_search(mutant: str, ground: str, *, number: int, budget_s: float) -> dict[str, Any]:
    """One search for `mutant`, the `number`th (from 0) on this ground, for `budget_s` seconds of one core: the runs
    with the mutant. Controls are run for findings only and do not count."""
    first_seed = FIRST_SEED + number * STRIDE
    test, control = GROUNDS[ground].test_of(mutant), GROUNDS[ground].test_of(NO_MUTANT)
    choices = usable_choices(test)
    found: dict[str, Any] = {
        "mutant": mutant, "ground": ground, "number": number, "first_seed": first_seed, "budget_s": budget_s,
        "found": False, "seeds": 0, "core_s": 0.0, "unclean": [],
    }  # fmt: skip
    while found["core_s"] < budget_s and found["seeds"] < STRIDE:
        seed = first_seed + found["seeds"]
        began_s = time.process_time()
        run = rehearse_test(*mix_for(test, seed, choices))
        found["core_s"] += time.process_time() - began_s
        found["seeds"] += 1
        if not gives_away(run):
            continue
        if gives_away(rehearse_test(*mix_for(control, seed, choices))):
            found["unclean"].append(seed)
            continue
        found |= {"found": True, "checks": list(run.symptoms)}
        break
    return {**found, "core_s": round(found["core_s"], 2)}


def measure_blind(names: Sequence[str], *, searches: int, budget_s: float, jobs: int, path: Path = RESULTS) -> None:
    """Make the searches that are not in the file at `path` yet: the first of every mutant on its first ground, the
    first on the other grounds, then the second of each, and so on."""
    known = {(each["mutant"], each["ground"], each["number"]) for each in read_results(path)}
    depth = max(len(grounds) for grounds in MATTERS.values())
    wanted = [
        (name, MATTERS[part_of(name)][place], number)
        for number in range(searches)
        for place in range(depth)
        for name in names
        if place < len(MATTERS[part_of(name)])
    ]
    waiting = [each for each in wanted if each not in known]
    with worker_pool(jobs) as pool, open(path, "a", encoding="utf-8") as file:
        asked = [pool.submit(blind_search, *each[:2], number=each[2], budget_s=budget_s) for each in waiting]
        for future in asked:
            result = future.result()
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(_line(result), flush=True)


def read_results(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The searches that are in a file, none where there is no file. Raises ValueError for a line that is no JSON."""
    return [each for each in _lines_of(path) if "mutant" in each]


def read_conditions(path: Path = RESULTS) -> list[str]:
    """What a file says of the machine and what else it did meanwhile: lines of the form {"conditions": "..."}, which
    whoever measures adds by hand."""
    return [each["conditions"] for each in _lines_of(path) if "conditions" in each]


def _lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _line(result: Mapping[str, Any]) -> str:
    outcome = f"found by {', '.join(result['checks'])}" if result["found"] else "not found"
    took = f"{result['seeds']} seeds, {result['core_s']:.1f} core seconds"
    return f"{result['mutant']:28} {result['ground']:18} search {result['number']}: {outcome} after {took}"


def quantile(ends: Iterable[tuple[float, bool]], ratio: float) -> float | None:
    """The value below which `ratio` of the searches have found something, by Kaplan and Meier; None where so many have
    not. `ends` are what each search took, and whether it has found anything or was censored then."""
    left = 1.0
    ordered = sorted(ends, key=lambda end: (end[0], not end[1]))
    for number, (value, is_found) in enumerate(ordered):
        if is_found:
            left *= 1 - 1 / (len(ordered) - number)
            if left <= 1 - ratio + 1e-9:
                return value
    return None


def blind_table(results: Sequence[Mapping[str, Any]], conditions: Sequence[str] = ()) -> list[str]:
    """The lines of the page, of which there are none without results."""
    if not results:
        return []
    budgets = sorted({each["budget_s"] for each in results})
    budget = " or ".join(f"{each:g}" for each in budgets)
    found = {each["mutant"] for each in results if each["found"]}
    searched = {each["mutant"] for each in results}
    lines = [
        "",
        "## Without a hint",
        "",
        "The same mutants, looked for by who knows nothing of them: `python -m benchmarks mutants --blind`. A",
        "search is what `harness explore --nodes 5` does, seed after seed of random mixes of all faults, 15 s each,",
        "until a run gives the mutant away and the same run without the mutant does not. Where a mutant can matter",
        "follows from the part of the program that it is put into (`benchmarks/_blind.py`). A search has",
        f"{budget} seconds of one core. One that finds nothing counts for what it says, that it takes more (Kaplan and",
        "Meier); `>` stands where so many searches found nothing that there is no such figure, with the most that one",
        f"of them had. Of fewer than {LEAST_SEARCHES} searches each is given instead.",
        "",
        f"{len(found)} of {len(searched)} mutants were found on some ground."
        f" Not found on any: {', '.join(name for name in MUTANTS if name in searched - found) or 'none'}.",
        "",
        "| mutant | searched in | found | seeds, median (90 %) | core s, median (90 %) | found by |",
        "|---|---|---|---|---|---|",
    ]
    for name in MUTANTS:
        for ground in GROUNDS:
            mine = [each for each in results if (each["mutant"], each["ground"]) == (name, ground)]
            if mine:
                lines.append(f"| {name} | {ground} {_cells(mine)}")
    unclean = sum(len(each["unclean"]) for each in results)
    lines += [line for text in conditions for line in ("", text)]
    lines += ["", f"Runs of the node as it is that gave something away: {unclean}."]
    return lines


def _cells(searches: Sequence[Mapping[str, Any]]) -> str:
    hits = [each for each in searches if each["found"]]
    checks = sorted({check for each in hits for check in each["checks"]})

    def figures(key: str) -> str:
        if len(searches) < LEAST_SEARCHES:
            return ", ".join(f"{'' if each['found'] else '> '}{each[key]:.0f}" for each in searches)
        ends = [(float(each[key]), bool(each["found"])) for each in searches]
        most = max(value for value, _ in ends)
        words = [f"> {most:.0f}" if at is None else f"{at:.0f}" for at in (quantile(ends, 0.5), quantile(ends, 0.9))]
        return f"{words[0]} ({words[1]})"

    return f"| {len(hits)} of {len(searches)} | {figures('seeds')} | {figures('core_s')} | {', '.join(checks)} |"
