"""How soon a search without knowledge of a mutant finds it: random mixes of all faults, five nodes, no scenario.

A search runs seed after seed, or a guide's proposals (harness.exploration.guide), until a run reveals the mutant and
the same run without the mutant shows nothing, or until its budget of CPU time is used up. In the latter case it is
*censored*: it would have needed more seeds than it had. Medians and quantiles are therefore Kaplan-Meier estimates,
which account for censoring.

Every search is appended to a file of JSON lines when it ends, so that a measurement can be interrupted and resumed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks._runs import checked_out_commit
from checker.workers import worker_pool
from harness.cli_options import SEARCHED_LOAD
from harness.exploration.guide import Guide
from harness.exploration.mutants import gives_away
from harness.exploration.rehearsal import SIMULATED, rehearse_test, usable_choices
from harness.exploration.search import Candidate, mix_for
from harness.test import ALL, NemesisChoice, Test
from nemesis.schedule import Schedule
from node.mutants.catalogue import MUTANTS, NO_MUTANT
from node.mutants.switch import part_of

__all__ = [
    "COMPARED",
    "FULL",
    "GROUNDS",
    "LOADS",
    "MATTERS",
    "SEARCHED",
    "SMALL",
    "blind_search",
    "blind_table",
    "control_gives_away",
    "guide_table",
    "measure_blind",
    "quantile",
    "read_conditions",
    "read_results",
]

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "mutants-blind.jsonl"

SEARCHED, COMPARED, FULL, SMALL = "searched", "compared", "full", "small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of a search's runs."""

    nodes: int
    time_limit_s: float
    rate: float
    concurrency: int
    text: str


_DEFAULT = Load(
    nodes=5, time_limit_s=SEARCHED_LOAD["time_limit"], rate=SEARCHED_LOAD["rate"],
    concurrency=SEARCHED_LOAD["concurrency"], text="`harness explore --nodes 5`",
)  # fmt: skip
LOADS: Mapping[str, Load] = {
    SEARCHED: _DEFAULT,
    COMPARED: _DEFAULT,
    FULL: Load(
        nodes=5, time_limit_s=15.0, rate=100.0, concurrency=20,
        text="`harness explore --nodes 5 --time-limit 15 --rate 100`",
    ),
    SMALL: Load(
        nodes=3, time_limit_s=8.0, rate=60.0, concurrency=10,
        text="`harness explore --nodes 3 --time-limit 8 --rate 60 --concurrency 10`",
    ),
}  # fmt: skip
"""`SEARCHED` is the load of searches without a guide, `COMPARED` that of pairs with and without one: the same runs, but
kept apart because a pair has a longer budget, and both its searches are of one commit. `FULL` is the former default,
which takes three times the CPU time per seed; `SMALL` takes less than the default."""

FIRST_SEED = 910_000
LEAST_SEARCHES = 5
"""Least number of searches for a median and a quantile; fewer are listed individually."""

STRIDE = 1_000
"""Distance between the first seeds of two searches; many times what a budget allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A workload with settings to search on, and its nemeses, `all` by default."""

    workload: str
    settings: Mapping[str, str] = field(default_factory=dict)
    nemesis: tuple[str, ...] = (ALL,)

    def test_of(self, mutant: str, load: Load = LOADS[SEARCHED]) -> Test:
        """The test of every seed, as from `harness explore` with only these options."""
        return Test(
            system="broker", cluster=SIMULATED, nodes=load.nodes, workload=self.workload,
            nemesis=tuple(map(NemesisChoice.parse, self.nemesis)),
            nemesis_interval_s=5.0, time_limit_s=load.time_limit_s, rate=load.rate, concurrency=load.concurrency,
            operation_timeout_s=SEARCHED_LOAD["operation_timeout"], seed=0,
            settings={**self.settings, "mutant": mutant},
        )  # fmt: skip


GROUNDS: Mapping[str, Ground] = {
    "log": Ground(workload="log"),
    "register": Ground(workload="register"),
    "register, leases": Ground(workload="register", settings={"read_mode": "lease"}),
    "queue": Ground(workload="queue"),
    "queue by POP": Ground(workload="queue", settings={"consume": "pop"}),
    "delay": Ground(workload="delay"),
    "transactions": Ground(workload="transactions"),
    "classic HA, log": Ground(workload="log", settings={"replication": "sync"}),
    "classic HA, queue": Ground(workload="queue", settings={"replication": "sync"}),
    "classic HA, queue, promotions": Ground(
        workload="queue", settings={"replication": "sync"}, nemesis=(ALL, "promote")
    ),
}

_DLEDGER = ("log", "register", "queue", "transactions")

MATTERS: Mapping[str, Sequence[str]] = {
    "election": ("log", "register", "register, leases", "queue", "transactions"),
    "leases": ("register, leases", "register", "log"),
    "replication": _DLEDGER,
    "storage": _DLEDGER,
    "group": ("log", "register", "register, leases", "queue", "transactions"),
    "serving": (*_DLEDGER, "queue by POP", "delay"),
    "client": _DLEDGER,
    "ha": ("classic HA, log", "classic HA, queue", "classic HA, queue, promotions"),
}
"""The part of the program that contains a mutant -> the grounds on which the mutant can have an effect."""


def blind_search(
    mutant: str, ground: str, *, number: int, budget_s: float, is_guided: bool = False, load: str = SEARCHED
) -> dict[str, Any]:
    """One search for `mutant`, the `number`th (from 0) on this ground, for `budget_s` core seconds of runs with the
    mutant and of the guide. Controls are run only for findings and do not count."""
    first_seed = FIRST_SEED + number * STRIDE
    test = GROUNDS[ground].test_of(mutant, LOADS[load])
    choices = usable_choices(test)
    guide = Guide(test, choices=choices, lag=1) if is_guided else None
    found: dict[str, Any] = {
        "mutant": mutant, "ground": ground, "number": number, "guided": is_guided, "load": load,
        "first_seed": first_seed, "budget_s": budget_s, "found": False, "seeds": 0, "core_s": 0.0, "unclean": [],
    }  # fmt: skip
    while found["core_s"] < budget_s and found["seeds"] < STRIDE:
        seed = first_seed + found["seeds"]
        began_s = time.process_time()
        if guide is None:
            seeded, schedule = mix_for(test, seed, choices)
            candidate = Candidate(number=seed, test=seeded, schedule=schedule)
        else:
            candidate = guide.propose(seed)
        run = rehearse_test(candidate.test, candidate.schedule, with_facts=is_guided)
        if guide is not None:
            guide.note(candidate, run)
        found["core_s"] += time.process_time() - began_s
        found["seeds"] += 1
        if not gives_away(run):
            continue
        if control_gives_away(candidate.test, candidate.schedule):
            found["unclean"].append(seed)
            continue
        found |= {"found": True, "checks": list(run.symptoms), "mutated": bool(candidate.operators)}
        break
    return {**found, "core_s": round(found["core_s"], 2)}


def control_gives_away(test: Test, schedule: Schedule) -> bool:
    """Whether the same run without the mutant shows something too, so that the finding does not count."""
    control = dataclasses.replace(test, settings={**test.settings, "mutant": NO_MUTANT})
    return gives_away(rehearse_test(control, schedule))


def measure_blind(
    names: Sequence[str],
    *,
    searches: int,
    budget_s: float,
    jobs: int,
    path: Path = RESULTS,
    ways: Sequence[bool] = (False,),
    load: str = SEARCHED,
    grounds: Sequence[str] = (),
    until_s: float = math.inf,
) -> None:
    """Make the searches that are not in the file at `path` yet: the first of every mutant on its first ground, the
    first on the other grounds, then the second of each, and so on. Each is made in all `ways`, guided or not, one
    right after the other; if `grounds` is given, others are left out. Each records its commit (those of the first
    measurements do not). None is begun after `until_s` of the monotonic clock."""
    commit = checked_out_commit()
    known = _made(read_results(path), ways, commit)
    depth = max(len(found) for found in MATTERS.values())
    wanted = [
        (name, MATTERS[part_of(name)][place], number, is_guided, load)
        for number in range(searches)
        for place in range(depth)
        for name in names
        if place < len(MATTERS[part_of(name)])
        for is_guided in ways
    ]
    waiting = [each for each in wanted if each not in known and (not grounds or each[1] in grounds)]
    with worker_pool(jobs) as pool, open(path, "a", encoding="utf-8") as file:
        for start in range(0, len(waiting), jobs):
            if time.monotonic() >= until_s:
                break
            asked = [
                pool.submit(blind_search, *each[:2], number=each[2], budget_s=budget_s, is_guided=each[3], load=each[4])
                for each in waiting[start : start + jobs]
            ]
            for future in asked:
                result = {**future.result(), "commit": commit}
                file.write(json.dumps(result) + "\n")
                file.flush()
                print(_line(result), flush=True)


def _key(search: Mapping[str, Any]) -> tuple[str, str, int, bool, str]:
    """The identity of a search. Those of the first measurement record neither way nor load."""
    return (
        search["mutant"], search["ground"], search["number"], search.get("guided", False), search.get("load", FULL)
    )  # fmt: skip


def _made(
    results: Sequence[Mapping[str, Any]], ways: Sequence[bool], commit: str
) -> set[tuple[str, str, int, bool, str]]:
    """The searches that need not be made: those of this commit, and those made in all ways on a single other one."""
    by_key = {_key(each): each for each in results}

    def is_made(key: tuple[str, str, int, bool, str]) -> bool:
        both = [by_key.get((*key[:3], way, key[4])) for way in ways]
        commits = {None if each is None else each.get("commit", "") for each in both}
        return by_key[key].get("commit") == commit or (len(commits) == 1 and None not in commits)

    return {key for key in by_key if is_made(key)}


def read_results(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The searches in a file; [] if it does not exist. Raises ValueError for a line that is not JSON."""
    return [each for each in _lines_of(path) if "mutant" in each]


def read_conditions(path: Path = RESULTS) -> dict[str, list[str]]:
    """Notes in a file about the machine and its other work, by the load of the runs: lines of the form
    {"conditions": "...", "load": "small"}, added by hand after a measurement; the load defaults to FULL."""
    found: dict[str, list[str]] = {}
    for each in _lines_of(path):
        if "conditions" in each:
            found.setdefault(each.get("load", FULL), []).append(each["conditions"])
    return found


def _lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _line(result: Mapping[str, Any]) -> str:
    outcome = f"found by {', '.join(result['checks'])}" if result["found"] else "not found"
    took = f"{result['seeds']} seeds, {result['core_s']:.1f} core seconds"
    way = "guided" if result.get("guided") else "random"
    return f"{result['mutant']:28} {result['ground']:18} {way} search {result['number']}: {outcome} after {took}"


def quantile(ends: Iterable[tuple[float, bool]], ratio: float) -> float | None:
    """The value by which a share `ratio` of the searches have found something, by Kaplan and Meier; None if fewer have.
    `ends` are the cost of each search, and whether it found something or was censored."""
    left = 1.0
    ordered = sorted(ends, key=lambda end: (end[0], not end[1]))
    for number, (value, is_found) in enumerate(ordered):
        if is_found:
            left *= 1 - 1 / (len(ordered) - number)
            if left <= 1 - ratio + 1e-9:
                return value
    return None


def blind_table(
    results: Sequence[Mapping[str, Any]], conditions: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[str]:
    """The page's lines on random searches, beginning with the default load of `explore`, and then on the comparison
    with a guide; [] without results."""
    lines: list[str] = []
    for load in (SEARCHED, FULL):
        mine = [each for each in results if _key(each)[3:] == (False, load)]
        if mine:
            lines += _searches_with(LOADS[load], mine)
            lines += [line for text in conditions.get(load, ()) for line in ("", text)]
            unclean = sum(len(each["unclean"]) for each in mine)
            lines += ["", f"Control runs (without a mutant) that showed a violation: {unclean}."]
    if lines:
        lines = [
            "",
            "## Without a hint",
            "",
            "The same mutants, searched for with no knowledge of them: `python -m benchmarks mutants --blind`.",
            "A search runs seed after seed of random mixes of all faults, until a run gives the mutant away and the",
            "same run without the mutant does not. The workloads on which a mutant can matter (*searched in*) follow",
            "from the part of the program that it changes (`benchmarks/_blind.py`). A search that finds nothing",
            "counts as censored (Kaplan and Meier). `>` means that too many searches found nothing for such a figure;",
            f"it is followed by the most that one of them used. With fewer than {LEAST_SEARCHES} searches each is",
            "listed.",
            *lines,
        ]
    return [*lines, *guide_table(results, conditions)]


def _searches_with(load: Load, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the searches with one load."""
    budget = " or ".join(f"{each:g}" for each in sorted({each["budget_s"] for each in results}))
    found = {each["mutant"] for each in results if each["found"]}
    searched = {each["mutant"] for each in results}
    lines = [
        "",
        f"Runs of {load.text}, {load.time_limit_s:g} s each at {load.rate:g} operations a second; a search has",
        f"{budget} seconds of one core.",
        "",
        f"{len(found)} of {len(searched)} mutants were found in at least one workload."
        f" Found in none: {', '.join(name for name in MUTANTS if name in searched - found) or 'none'}.",
        "",
        "| mutant | searched in | found | seeds, median (90 %) | core s, median (90 %) | found by |",
        "|---|---|---|---|---|---|",
    ]
    for name in MUTANTS:
        for ground in GROUNDS:
            mine = [each for each in results if (each["mutant"], each["ground"]) == (name, ground)]
            if mine:
                lines.append(f"| {name} | {ground} {_cells(mine)}")
    return lines


def guide_table(
    results: Sequence[Mapping[str, Any]], conditions: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[str]:
    """The lines on guided compared with random searches: only mutants, grounds and loads that were searched both ways,
    and of these only searches made both ways on one commit, since the time of a seed may differ between commits."""
    lines: list[str] = []
    for load, size in LOADS.items():
        pairs = _pairs(results, load)
        if not pairs:
            continue
        lines += [
            "",
            f"Runs of {size.text}, searches of both kinds from the same seeds, of {_budgets(pairs.values())} core s:",
            "",
            "| mutant | searched in | random: found | core s, median | mean to the budget | guided: found "
            "| core s, median | mean to the budget | times sooner (95 %) |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for (name, ground), both in pairs.items():
            cells = [
                cell for way in both for cell in (f"{_hits(way)} of {len(way)}", _median(way), f"{_mean(way):.0f}")
            ]
            factor = _interval([both], _mean) if len(both[0]) >= LEAST_SEARCHES else ""
            lines.append(f"| {name} | {ground} | {' | '.join(cells)} | {factor} |")
        every = [both for both in pairs.values() if len(both[0]) >= LEAST_SEARCHES] or list(pairs.values())
        count = sum(len(one) for one, _ in every)
        hits = [sum(_hits(both[way]) for both in every) for way in (0, 1)]
        lines += ["", f"Together: found by {hits[0]} of {count} random and {hits[1]} of {count} guided searches."]
        lines += [f"Times sooner by the means: {_interval(every, _mean)}; by the medians: {_interval(every, _middle)}."]
        if load in (COMPARED, SMALL):
            lines += [line for text in conditions.get(load, ()) for line in ("", text)]
    if not lines:
        return []
    return [
        "",
        "### With a guide",
        "",
        "The same searches with `harness explore --guide` ([exploration.md](exploration.md#a-guided-search)), with",
        "equal seconds of one core. *Mean to the budget* is the mean time of a search, in which a search that found",
        "nothing counts with its budget (the restricted mean). *Times sooner* is the mean of random searches divided",
        f"by that of guided ones; for several mutants it is the geometric mean. Its interval comes from {RESAMPLES:,}",
        f"bootstrap samples of the searches and is given for mutants with at least {LEAST_SEARCHES} searches; only",
        "these mutants count in the totals below the table, if there are any. Censored searches count as if they had",
        "found the mutant at the budget, so the factor is nearer to 1 than the truth.",
        *lines,
    ]


RESAMPLES = 2_000

Both = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""Random searches, guided ones."""


def _pairs(results: Sequence[Mapping[str, Any]], load: str) -> dict[tuple[str, str], Both]:
    found: dict[tuple[str, str], Both] = {}
    by_key = {_key(each): each for each in results if _key(each)[4] == load}
    for name, ground in itertools.product(MUTANTS, GROUNDS):
        mine = sorted({key[2] for key in by_key if key[:2] == (name, ground)})
        sides = [[by_key.get((name, ground, number, way, load)) for number in mine] for way in (False, True)]
        both = [
            (one, two)
            for one, two in zip(*sides, strict=True)
            if one is not None and two is not None and one.get("commit") == two.get("commit")
        ]
        if both:
            found[name, ground] = [one for one, _ in both], [two for _, two in both]
    return found


def _budgets(pairs: Iterable[Both]) -> str:
    """The budgets of searches in core seconds, such as "30 or 60"."""
    return " or ".join(f"{each:g}" for each in sorted({one["budget_s"] for both in pairs for one in both[0]}))


def _hits(searches: Sequence[Mapping[str, Any]]) -> int:
    return sum(bool(each["found"]) for each in searches)


def _median(searches: Sequence[Mapping[str, Any]]) -> str:
    at = quantile([(float(each["core_s"]), bool(each["found"])) for each in searches], 0.5)
    return f"> {max(each['core_s'] for each in searches):.0f}" if at is None else f"{at:.0f}"


def _took_s(search: Mapping[str, Any]) -> float:
    """The core seconds of a search; its budget if it found nothing or its last run exceeded the budget."""
    return min(float(search["core_s"]), float(search["budget_s"])) if search["found"] else float(search["budget_s"])


def _mean(searches: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(map(_took_s, searches))


def _middle(searches: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(map(_took_s, searches))


def _interval(pairs: Sequence[Both], statistic: Callable[[Sequence[Mapping[str, Any]]], float]) -> str:
    """The factor by which guided searches took less, with a 95 % bootstrap interval; resampled within each mutant."""

    def factor(sample: Sequence[Both]) -> float:
        return math.exp(sum(math.log(statistic(one) / statistic(two)) for one, two in sample) / len(sample))

    rng = random.Random("bootstrap")
    drawn = sorted(
        factor([(rng.choices(one, k=len(one)), rng.choices(two, k=len(two))) for one, two in pairs])
        for _ in range(RESAMPLES)
    )
    low, high = drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]
    return f"{factor(pairs):.2f} ({low:.2f} to {high:.2f})"


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
