"""How close `harness explain` comes to the step that each mutant breaks; makes docs/explain-mutants.md.

    python -m benchmarks.explain                     # the mutants that have a scenario and were not measured yet
    python -m benchmarks.explain NAME ... [--points 40] [--runs 30] [--jobs N]
    python -m benchmarks.explain --page              # only make the page from docs/explain.json

The first run of a mutant's scenario that fails is explained as by `harness explain`. When the mistake was made is found
in another way, without randomness: the run is continued unchanged, but with the mutant removed at some moment. If that
moment is early enough, the violation does not show; the mistake was made at the moment from which on removal is too
late. Results are kept in docs/explain.json, mutant by mutant, and the table is written from all results there. If a
run's violation shows only at its end, continuations are performed to their ends, which takes several times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any

import harness.systems.broker
import node.serving
from benchmarks._runs import checked_out_commit
from harness.execution import Parts
from harness.exploration.continuations import Branch, Intervention, Passage, follow
from harness.exploration.deciding import Deciding, Jump, Search, decide, violations_of
from harness.exploration.mutants import SCENARIOS, report_mutant
from harness.exploration.rehearsal import parts_of
from harness.exploration.symptoms import is_stuck
from harness.nursery import restart_with_nursery
from harness.store import Store
from node.dledger import DLedgerServer
from node.dledger.leadership import Leadership

__all__ = ["cure", "main", "measure", "mistake_between"]

DOCS = Path(__file__).parent.parent / "docs"

SEEDS = range(1, 11)
"""The first of these seeds whose run fails is explained, nearly always the very first."""
CUTS, PASSES = 8, 3
"""The time until the violation is divided into CUTS parts, then the part with the mistake again, PASSES times in all:
down to a five-hundredth."""

NEAR_S = 1.0
"""Largest distance that counts as near."""

CURVES = {Intervention.NONE: "planned", Intervention.HEAL: "healed", Intervention.END_LOAD: "load ended"}
"""The curves in the table."""


def cure() -> None:
    """Remove every mutant from this process, from running objects and from those created later.

    A mutant is an object whose class was replaced (node.mutants.parts), a stand-in for an object, or a stored bound
    method of either. Its effects stay: for example, a vote that was not written to disk is still missing there.
    """
    parts = gc.get_objects()
    right: dict[int, object] = {}
    wrong: list[object] = []
    for part in parts:
        kind = type(part)
        if _is_of_mutants(kind.__module__):
            while _is_of_mutants(kind.__module__):
                kind = kind.__mro__[1]
            if kind is object:  # a stand-in, which holds the object that it replaces
                wrong.append(part)
                right[id(part)] = next(iter(vars(part).values()))
            else:
                part.__class__ = kind  # its original class
    for part in parts:
        if isinstance(part, MethodType) and isinstance(part.__func__, FunctionType) and _is_of_mutants(part.__module__):
            method = getattr(type(part.__self__), part.__func__.__name__, None)
            if method is not None:
                wrong.append(part)
                right[id(part)] = MethodType(method, part.__self__)
    if wrong:
        for holder in gc.get_referrers(*wrong):
            _put_right(holder, right)
    for part in parts:
        if isinstance(part, DLedgerServer):
            part.store.writer._sync_each_group = part.config.flush_mode == "sync"
        elif isinstance(part, Leadership):
            _tell_times_again(part, parts)
    node.serving.mutate_broker = lambda name, broker: None  # type: ignore[attr-defined]
    harness.systems.broker.mutate_client = lambda name, client: None  # type: ignore[attr-defined]


def _tell_times_again(lead: Leadership, parts: Sequence[object]) -> None:
    """Correct the send times of answered and pending rounds that a leader has recorded by another clock, assuming that
    its rounds were one heartbeat interval apart.

    Otherwise such a time, which is in the future by its own clock, would make its lease last forever.
    """
    now_ns, every_ns = lead._clock.monotonic_ns(), lead._config.timing.heartbeat_interval_ms * 1_000_000

    def right(number: int, sent_ns: int) -> int:
        return sent_ns if sent_ns <= now_ns else lead.last_beat_ns - (lead._round - number) * every_ns

    stamps = lead._answered_sent_ns
    if max(stamps.values(), default=0) <= now_ns:
        return
    stamps.update({peer: right(lead._answered[peer], sent_ns) for peer, sent_ns in stamps.items()})
    for part in parts:
        if isinstance(part, partial) and part.func == lead._heard:
            peer, number, sent_ns, *rest = part.args
            part.__setstate__((part.func, (peer, number, right(number, sent_ns), *rest), {}, None))  # type: ignore[attr-defined]


def _is_of_mutants(module: object) -> bool:
    """Whether `module`, a part's `__module__`, is of the mutants; in some libraries it is None or a descriptor."""
    return isinstance(module, str) and module.startswith("node.mutants.")


def _put_right(holder: object, right: Mapping[int, object]) -> None:
    """Replace parts in an object that holds them; `right` maps the id of each replaced part to its replacement."""
    if isinstance(holder, CellType):
        holder.cell_contents = right[id(holder.cell_contents)]
    elif isinstance(holder, dict):
        holder.update({name: right[id(value)] for name, value in holder.items() if id(value) in right})
    elif isinstance(holder, list):
        holder[:] = [right.get(id(value), value) for value in holder]
    elif isinstance(holder, asyncio.Handle):
        holder._callback = right[id(holder._callback)]  # type: ignore[attr-defined]
    elif hasattr(holder, "__dict__"):
        for name, value in list(vars(holder).items()):
            if id(value) in right:
                setattr(holder, name, right[id(value)])


def mistake_between(parts: Parts, found: Deciding, *, jobs: int) -> tuple[float, float] | None:
    """The interval (s) in which the mistake was made; None if removing the mutant never prevents the violation."""
    symptom = found.violation.symptom
    zero_s = follow(parts, Passage(symptom=symptom)).zero_s
    low_s, high_s = found.begin_s, found.end_s
    for number in range(PASSES):
        width_s = (high_s - low_s) / CUTS
        moments = [low_s + width_s * place for place in range(CUTS + 1)]
        branches = [Branch(at_s=at_s, seeds=(None,), act=cure) for at_s in moments]
        course = follow(parts, Passage(symptom=symptom, branches=branches, zero_s=zero_s, jobs=jobs))
        shows = {fate.branch: fate.fails for fate in course.fates}
        if number == 0 and shows[0]:
            return None
        last = max(place for place, fails in shows.items() if fails is False)
        low_s, high_s = moments[last], moments[min(last + 1, CUTS)]
    return low_s, high_s


def measure(name: str, *, points: int, runs: int, jobs: int) -> dict[str, Any]:
    """Explain one mutant's run. Returns the data for the table, as JSON data."""
    with tempfile.TemporaryDirectory() as directory:
        for seed in SEEDS:
            run_dir = report_mutant(name, seed, Store(directory))
            results = run_dir.read_results()
            if results["valid"] is False or is_stuck(results):
                break
        else:
            return {"reason": f"nothing to explain: no run of seeds {SEEDS[0]} to {SEEDS[-1]} fails"}
        parts = parts_of(*SCENARIOS[name].run_of(name, seed))
        violations = violations_of(parts, results, run_dir.history_path)
        began_s, used_s = time.monotonic(), _used_s()
        search = Search(seed=seed, points=points, runs=runs, jobs=jobs, say=lambda line: print(f"  {line}", flush=True))
        found = decide(parts, violations, run_dir.history_path, search)
    took = {"wall_s": round(time.monotonic() - began_s, 1), "processor_s": round(_used_s() - used_s, 1)}
    result: dict[str, Any] = {
        "commit": checked_out_commit(), "seed": seed, **took, "points": len(found.points), "most": points, "runs": runs,
        "curves": _curves(found), "begin_s": found.begin_s,
        "text": found.violation.text[:120], "seen_s": found.violation.at_s, "check": found.violation.check,
        "continuations": sum(point.runs + point.undecided for point in found.points),
    }  # fmt: skip
    mistake = mistake_between(parts, found, jobs=jobs)
    result["mistake_s"] = mistake
    if found.jump is not None:
        one, other = found.jump.before, found.jump.after
        result |= {
            "jump_s": [one.at_s, other.at_s], "intervention": one.intervention, "fails": [one.fails, other.fails],
            "account": [happening.text for happening in found.account],
        }  # fmt: skip
        if mistake is not None:
            result["between"] = _between(found, found.jump, mistake[1])
    return result


def _curves(found: Deciding) -> dict[str, str]:
    """The number of failing and of all continuations, by the moment (s) at which they branch off."""
    return {
        name: ", ".join(f"{each.at_s:.4f}: {each.fails}/{each.runs}" for each in found.curve(intervention))
        for intervention, name in CURVES.items()
    }


def _between(found: Deciding, jump: Jump, mistake_s: float) -> dict[str, int]:
    """The outcomes of continuations that branch off after the mistake and no later than the begin of the jump."""
    points = found.curve(jump.before.intervention)
    inside = [point for point in points if mistake_s <= point.at_s <= jump.before.at_s]
    return {"runs": sum(point.runs for point in inside), "fails": sum(point.fails for point in inside)}


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def distance_s(result: Mapping[str, Any]) -> float | None:
    """The largest possible distance (s) between jump and mistake, given their intervals, so that a wide interval does
    not count as near. None if one of them was not found."""
    jump, mistake = result.get("jump_s"), result.get("mistake_s")
    if jump is None or mistake is None:
        return None
    return float(max(jump[1] - mistake[0], mistake[1] - jump[0]))


def after_start_s(result: Mapping[str, Any]) -> float | None:
    """If nearly every run fails without faults and load, how long (s) after the run's beginning the mistake was made at
    the latest: then the start of the program decides. None for other runs."""
    if result.get("jump_s") is not None or result.get("mistake_s") is None or "begin_s" not in result:
        return None
    return float(result["mistake_s"][1] - result["begin_s"]) if _fails_always(result) else None


def _fails_always(result: Mapping[str, Any]) -> bool:
    """Whether nothing was examined but the beginnings of the curves without faults and without load."""
    return result.get("jump_s") is None and int(result["points"]) <= 2


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The document."""
    lines = [
        "# How close `harness explain` comes",
        "",
        "<!-- made by: python -m benchmarks.explain -->",
        "",
        "Each [mutant](mutants.md) is run under its scenario and [explained](explain.md), with its first failing seed,",
        "which is 1 unless given. *Mistake*: the latest moment at which removing the mutant from the run, all else",
        "being equal, still prevents the violation; found by bisection, without other randomness. *Decided*: where the",
        "curve jumps, with the planned faults, with faults healed, or with the load ended too. *Apart*: the largest",
        "possible distance between these two, wherever in their intervals they lie. Times are seconds of the run;",
        "processor times are of one core. Rows without figures were not run.",
        "",
        "| mutant | violation | seen | mistake | decided | curve | apart | continuations | core s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    near = started = judged = 0
    for name in SCENARIOS:
        result = results.get(name)
        if result is None or "reason" in result:
            lines.append(f"| {name} | {'not measured' if result is None else result['reason']} | | | | | | | |")
            continue
        apart = distance_s(result)
        judged += 1
        near += apart is not None and apart <= NEAR_S
        after_s = after_start_s(result)
        started += after_s is not None and after_s <= NEAR_S
        jump, mistake = result.get("jump_s"), result.get("mistake_s")
        which = name if result.get("seed", SEEDS[0]) == SEEDS[0] else f"{name}, seed {result['seed']}"
        lines.append(
            f"| {which} | {result['text'][:80].replace('|', '/')} "
            f"| {'at its end' if result['seen_s'] is None else format(result['seen_s'], '.3f')} "
            f"| {'from the start' if mistake is None else f'{mistake[0]:.3f}–{mistake[1]:.3f}'} "
            f"| {'no moment' if jump is None else f'{jump[0]:.4f}–{jump[1]:.4f}'} "
            f"| {'' if jump is None else CURVES[Intervention(result['intervention'])]} "
            f"| {'' if apart is None else f'{apart:.3f} s'} | {result['continuations']} | {result['processor_s']:.0f} |"
        )
    lines += ["", f"Within a second of the mistake: {near} of {judged}."]
    if started:
        lines[-1] += (
            f" In {started} more nearly every run fails without faults and load: the only deciding moment is the start"
            f" of the program, which is also within a second of the mistake; with them {near + started} of {judged}."
        )
    lines += [*_reasons(results), ""]
    return "\n".join([*lines, *_measured_on(results), ""])


def _measured_on(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each commit with its rows and their limits."""
    by_commit: dict[str, list[str]] = {}
    for name in SCENARIOS:
        if name in results and "reason" not in results[name]:
            commit = results[name].get("commit", "")
            most = results[name].get("most")
            limits = f"{'' if most is None else f'at most {most} moments, '}{results[name]['runs']} runs each"
            which = f"commit {commit[:12]}" if commit else "an unrecorded commit"
            by_commit.setdefault(f"At {which}, {limits}", []).append(name)
    lines = [f"- {which}: {', '.join(names)}." for which, names in by_commit.items()]
    walls = {name: result["wall_s"] for name, result in results.items() if "wall_s" in result}
    if walls:
        longest = max(walls, key=walls.__getitem__)
        middle_s = statistics.median(walls.values())
        lines += [
            "",
            f"The search for a moment took {middle_s:.0f} s in the median, {walls[longest]:.0f} s at most ({longest}).",
        ]
    return lines


def _reasons(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why a jump is further away than `NEAR_S`, or there is none, as far as the measurement itself shows."""
    lines: list[str] = []
    for name in SCENARIOS:
        result = results.get(name, {"reason": "not measured"})
        mistake, between = result.get("mistake_s"), result.get("between")
        if "reason" in result or mistake is None:
            continue
        apart = distance_s(result)
        if apart is None:
            if _fails_always(result):
                lines += ["", f"{name}: {_without_moment(result, mistake)}"]
        elif apart > NEAR_S:
            until = {"none": "as planned", "heal": "healed", "end-load": "healed and the load ended"}[
                result["intervention"]
            ]
            faults_first = sorted(result["account"], key=lambda words: not words.startswith("fault "))
            at_jump = f"before the jump {result['fails'][0]}, after it {result['fails'][1]} of {result['runs']} fail"
            there = f"Events there: {'; '.join(faults_first[:3])}."
            if mistake[1] <= result["jump_s"][0] and between is not None:
                why = (
                    f"the mistake comes first and does not decide the failure. Of {between['runs']} continuations with "
                    f"faults {until} that diverge after the mistake and before the jump, {between['fails']} fail; "
                    f"{at_jump}. "
                )
            elif result["jump_s"][1] <= mistake[0]:
                why = f"with faults {until} the failure is decided before the mistake: {at_jump}. "
            else:
                took_s = result["jump_s"][1] - result["jump_s"][0]
                why = f"the mistake lies within the rise, which is {took_s:.3f} s long with faults {until}: {at_jump}. "
            lines += ["", f"{name}: {why}{there}"]
    return lines


def _without_moment(result: Mapping[str, Any], mistake: Sequence[float]) -> str:
    shown = "at its end"
    if result["seen_s"] is not None:
        shown = f"{(result['seen_s'] - mistake[0]) * 1000:.1f} ms after the mistake"
    words = f"no moment decides it: nearly every run fails without faults and load, {shown}."
    after_s = after_start_s(result)
    return words if after_s is None else f"{words} The mistake happens at the latest {after_s:.3f} s after the start."


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explain", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants (default: those not yet measured)")
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", action="store_true", help="measure nothing, make the page of what is there")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario is written for {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}")
    path = DOCS / "explain.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = options.names or [name for name in SCENARIOS if name not in results]
    for name in [] if options.page else names:
        results[name] = measure(name, points=options.points, runs=options.runs, jobs=options.jobs)
        print(f"{name:28} {json.dumps(results[name])}", flush=True)
        path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (DOCS / "explain-mutants.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    restart_with_nursery([sys.executable, "-m", "benchmarks.explain", *sys.argv[1:]])
    main()
