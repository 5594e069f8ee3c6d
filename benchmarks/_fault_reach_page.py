"""The page on which faults reach which programs, from the results of trying them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._guests import GUESTS

__all__ = ["write_costs", "write_page"]

_HEAD = """# Which faults reach which programs

Made by `python -m benchmarks.fault_reach`, which runs every cell: a system on its own hosts, a client that constantly
writes to the first host, and one fault after another that strikes only this host: injected, proven, checked again
right before it is healed, and healed. A partition is between this host and the others. No cell is filled in by hand;
combinations that were not run are missing.

- **met**: the fault was in force, and the program met it, by the count of its own calls; for a partition, something
  that the system sent ran into the cut.
- **in force**: the fault was in force in the program, but whether the program met it is unknown (a vDSO to which the
  program may not write does not count readings of the clock).
- **not met**: the fault was in force, but the program made no such call while it lasted.
- **not proven**: the run would be `unknown`.

*Control* is the same run with the mechanism sabotaged: the program is started without it, a cut cuts nothing, and
everything else is unchanged. There nothing may be proven; a cell in which something was reads **FALSE**.
"""

_WORDS = {"proven, met": "met", "proven": "in force", "met by nobody": "not met"}


def write_page(path: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """Add cells to those kept beside the page, and rewrite the page."""
    kept_path = Path(os.path.splitext(path)[0] + ".json")
    kept = json.loads(kept_path.read_text()) if kept_path.exists() else []
    key = ("guest", "cluster", "fault", "sabotaged")
    by_key = {tuple(cell[name] for name in key): _without_directories(cell) for cell in (*kept, *cells)}
    found = sorted(by_key.values(), key=lambda cell: [str(cell[name]) for name in key])
    kept_path.write_text(json.dumps(found, indent=1) + "\n")
    Path(path).write_text(_page(found, _kept_costs(path)))


def write_costs(path: str, costs: Sequence[Mapping[str, Any]]) -> None:
    """Keep the overhead of fault readiness beside the page, replacing the same figures and forms; rewrite the page."""
    measured = {(cost["figure"], cost["form"]) for cost in costs}
    kept = [*(cost for cost in _kept_costs(path) if (cost["figure"], cost["form"]) not in measured), *costs]
    figures = list(dict.fromkeys(cost["figure"] for cost in kept))
    kept.sort(key=lambda cost: (figures.index(cost["figure"]), [*_FORMS].index(cost["form"])))
    _costs_path(path).write_text(json.dumps(kept, indent=1) + "\n")
    write_page(path, [])


def _costs_path(path: str) -> Path:
    return Path(os.path.dirname(path), "fault-cost.json")


def _kept_costs(path: str) -> list[Mapping[str, Any]]:
    kept = _costs_path(path)
    return list(json.loads(kept.read_text())) if kept.exists() else []


def _without_directories(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The cell without the directories of programs and files on the machine."""
    return {**cell, "detail": re.sub(r"(?<![\w/])/(?:[^\s/()]+/)+", "", cell["detail"])}


def _page(cells: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]]) -> str:
    words = {(cell["guest"], cell["cluster"], cell["fault"], cell["sabotaged"]): cell for cell in cells}
    faults = list(dict.fromkeys(cell["fault"] for cell in cells))
    lines = [_HEAD]
    for cluster in dict.fromkeys(cell["cluster"] for cell in cells):
        guests = [name for name in GUESTS if any(key[:2] == (name, cluster) for key in words)]
        lines.append(f"## {cluster}\n")
        lines.append("| fault | " + " | ".join(f"{guest} | control" for guest in guests) + " |")
        lines.append("|---" * (1 + 2 * len(guests)) + "|")
        for fault in faults:
            shown = (
                _shown(words.get((guest, cluster, fault, is_sabotaged)), is_sabotaged)
                for guest in guests
                for is_sabotaged in (False, True)
            )
            lines.append(f"| `{fault}` | {' | '.join(shown)} |")
        lines.append("")
    lines.append("## The systems\n")
    for name, guest in GUESTS.items():
        lines.append(f"- {name}: {guest.description}")
    if costs:
        lines += _cost_lines(costs)
    return "\n".join(lines) + "\n"


_FORMS = {
    "plain": "as it is",
    "before": "before the first disk fault",
    "healed-sync": "after a fault of syncs was healed",
    "healed-write": "after a fault of syncs and writes was healed",
    "sync": "syncs reported from the start",
    "account": "while the account of what is not synced is kept (2 s before each `power=cut`)",
    "all": "syncs and writes reported, and the account kept, from the start (if a running one can have no filter)",
    "clock": "clock moved, and healed again",
}


def _cost_lines(costs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "\n## What it costs to be within reach\n",
        "Made by `python -m benchmarks.fault_cost fsync clock etcd --page docs/fault-reach.md`, without a fault in",
        "force: all forms in every round, in random order, on a shared machine with two processors. Of etcd, and of",
        "the loop of writes and syncs, one instance in each form runs all the time; one of them is used while the",
        "others wait. *More* and *change* are medians of the differences within a round to the program *as it is*;",
        "*middle half* is the interquartile range of the change. A form that was measured separately has the program",
        "*as it is* measured beside it again. *Load* is the machine's load average over one minute.\n",
        "| figure | form | median | more | change | middle half | rounds | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cost in costs:
        low, high = cost["middle_half"]
        change = ("", "", "")
        if cost["form"] != "plain":
            change = (f"{cost['more']:+,}", f"{cost['percent']:+,} %", f"{low:+,} to {high:+,} %")
        words = (cost["figure"], _FORMS[cost["form"]], f"{cost['median']:,}", *change, cost["rounds"], cost["load"])
        lines.append(f"| {' | '.join(map(str, words))} |")
    return lines


def _shown(cell: Mapping[str, Any] | None, is_sabotaged: bool) -> str:
    if cell is None:
        return "not tried"
    word: str = _WORDS.get(cell["word"], cell["word"])
    if is_sabotaged and cell["proven"] and cell["exercised"] is not False:
        return "**FALSE**"
    return word if cell["healed"] else f"{word}, **not healed**"
