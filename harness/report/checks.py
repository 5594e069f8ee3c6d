"""The checks of a run as sections: verdict, sentence, counts and lists, from the results of any checker.

Checks may come from other distributions, so values are shown by their shape: numbers and strings become facts,
lists of flat maps and maps of numbers become tables. Witnesses and the terms of leaders are drawn elsewhere.
"""

from __future__ import annotations

__all__ = ["CheckSection", "Table", "anchor_of", "check_sections", "terms_of", "timed_violations", "with_times"]

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.units import MAX_TIME_NS, clip, count, duration, instant

MAX_FACTS = 24
"""Most facts shown for one check."""

MAX_ROWS = 12
"""Most rows shown of a table; results.json has them all."""

MAX_COLUMNS = 8
MAX_TABLES = 4

_DRAWN_ELSEWHERE = ("valid", "reason", "witness", "explanation", "text")
_TITLES = {
    "linearizable": "Linearizability",
    "log": "Log: nothing lost or duplicated",
    "replicas": "Replicas agree",
    "leaders": "One leader per term",
    "trace": "Trace: a model explains what the replicas logged",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts and its heading; `left_out` counts the rows that only results.json has."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0


@dataclass(slots=True)
class CheckSection:
    """One check: `verdict` is valid, invalid or unknown."""

    name: str
    anchor: str
    """Its id on the page"""
    title: str
    verdict: str
    reason: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def verdict_word(valid: Any) -> str:
    """results.json's `valid` as a word; anything but true and false is unknown."""
    return "valid" if valid is True else "invalid" if valid is False else "unknown"


def check_sections(checks: Any, limit: int) -> list[CheckSection]:
    """Sections for at most `limit` checks: first those that failed, then those that are unknown."""
    if not isinstance(checks, Mapping):
        return []
    named = [(str(name), check) for name, check in checks.items() if isinstance(check, Mapping)]
    order = {"invalid": 0, "unknown": 1, "valid": 2}
    named.sort(key=lambda item: order[verdict_word(item[1].get("valid"))])
    return [_section(name, check) for name, check in named[:limit]]


def anchor_of(name: str) -> str:
    """The HTML id of a check's section, valid for any name."""
    return "check-" + re.sub(r"[^a-z0-9-]+", "-", name[:60].lower())


def timed_violations(checks: Any) -> list[tuple[int, str, str]]:
    """Violations that an invalid check reports with a time of their own (`time_s`), as the check of simulated replicas
    does: time (ns), check, text."""
    found = []
    for name, check in checks.items() if isinstance(checks, Mapping) else ():
        violations = check.get("violations") if isinstance(check, Mapping) and check.get("valid") is False else None
        for one in violations if isinstance(violations, list) else ():
            time_s = one.get("time_s") if isinstance(one, Mapping) else None
            if time_s is not None and _is_time(time_s, 10**9):
                found.append((round(time_s * 10**9), str(name), f"{one.get('rule', '')}: {one.get('text', '')}"))
    return found


def _section(name: str, check: Mapping[str, Any]) -> CheckSection:
    section = CheckSection(
        name=clip(name, 40),
        anchor=anchor_of(name),
        title=_TITLES.get(name, clip(name[:100].replace("_", " ").replace("-", " ").capitalize(), 60)),
        verdict=verdict_word(check.get("valid")),
        reason=clip(check.get("reason") or check.get("explanation") or ""),
    )
    for key, value in check.items():
        if key not in _DRAWN_ELSEWHERE:
            _add(section, str(key), value, depth=0)
    return section


def _add(section: CheckSection, key: str, value: Any, depth: int) -> None:
    title = clip(key.replace("_", " "), 40)
    if value is None or value in ([], {}, ""):
        return
    if isinstance(value, Mapping):
        if key == "engines":
            section.facts.append(("decided by", _engines(value)))
        elif key == "examples":
            for kind, examples in value.items():
                _add(section, f"examples: {kind}", examples, depth + 1)
        elif all(_is_number(item) for item in value.values()) and (depth == 0 or len(value) > 3):
            _add_table(section, _table_of_numbers(title, value))
        elif depth < 2:
            for name, item in value.items():
                _add(section, str(name) if depth == 0 and key == "stats" else f"{key} {name}", item, depth + 1)
    elif isinstance(value, list):
        if all(isinstance(item, Mapping) for item in value):
            _add_table(section, _table_of(title, value))
        elif len(section.facts) < MAX_FACTS:
            section.facts.append((title, clip(", ".join(str(item) for item in value[:MAX_ROWS]), 160)))
    elif len(section.facts) < MAX_FACTS:
        if key.endswith("_s") and _is_time(value, 10**9):
            section.facts.append((title.removesuffix(" s"), duration(value * 10**9)))
        else:
            section.facts.append((title, _shown(value)))


def _engines(engines: Mapping[Any, Any]) -> str:
    """The engines that decided, by their names in docs/checking.md, and for how many keys."""
    names = [(re.sub(r"^A\d+ ", "", str(name)), number) for name, number in engines.items()]
    return clip(", ".join(f"{name} ({_shown(number)} keys)" if number != 1 else name for name, number in names), 160)


def _add_table(section: CheckSection, table: Table) -> None:
    if len(section.tables) < MAX_TABLES:
        section.tables.append(table)


def _table_of(title: str, items: Sequence[Mapping[str, Any]]) -> Table:
    names: dict[str, None] = {}
    if all(_is_number(item.get("start_ns")) for item in items):
        items = sorted(items, key=lambda item: item["start_ns"])
    for item in items[:MAX_ROWS]:
        names.update(dict.fromkeys(map(str, item)))
    columns = list(names)[:MAX_COLUMNS]
    rows = [[_cell(name, item.get(name)) for name in columns] for item in items[:MAX_ROWS]]
    heads = [clip(re.sub("_n?s$", "", name).replace("_", " "), 30) for name in columns]
    return Table(title, heads, rows, max(0, len(items) - MAX_ROWS))


def _cell(name: str, value: Any) -> str:
    if name.endswith(("_ns", "_s")):
        unit_ns = 1 if name.endswith("_ns") else 10**9
        if _is_time(value, unit_ns):
            return instant(value * unit_ns)
    return _shown(value)


def _table_of_numbers(title: str, value: Mapping[Any, Any]) -> Table:
    """Up to `MAX_COLUMNS` numbers side by side, more in a column."""
    pairs = [(clip(name, 60), _shown(item)) for name, item in value.items()]
    if len(pairs) <= MAX_COLUMNS:
        return Table(title, [name for name, _ in pairs], [[shown for _, shown in pairs]])
    return Table(title, ("", title), pairs[:MAX_ROWS], max(0, len(pairs) - MAX_ROWS))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_time(value: Any, unit_ns: int) -> bool:
    """Whether `value`, in units of `unit_ns`, can be a time of a run; if not, it is shown as a plain number."""
    return _is_number(value) and abs(value) <= MAX_TIME_NS // unit_ns


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value) if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else clip(value, 120)


def terms_of(checks: Any) -> list[Mapping[str, Any]]:
    """The terms and their leaders as listed by the check `leaders`; [] if it lists none."""
    leaders = checks.get("leaders") if isinstance(checks, Mapping) else None
    terms = leaders.get("terms") if isinstance(leaders, Mapping) else None
    return [with_times(term) for term in terms if isinstance(term, Mapping)] if isinstance(terms, list) else []


def with_times(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A fault or a term without impossible start and end times, since the charts are drawn to scale."""
    return {
        name: value for name, value in entry.items() if name not in ("start_ns", "end_ns") or _is_time(value, unit_ns=1)
    }
