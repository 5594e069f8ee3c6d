"""Recomputes every figure of the tables from history.jsonl and results.json, in plain Python over plain events.

Written from the definitions in docs/spark.md and sharing no code with spark_analysis: slow and obvious.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


class RecountedRun:
    """One run's figures."""

    def __init__(self, folder: Path, away_ns: int) -> None:
        self.folder = folder
        self.test = json.loads((folder / "test.json").read_text())
        results = folder / "results.json"
        self.results = json.loads(results.read_text()) if results.exists() else None
        events = []
        for line in (folder / "history.jsonl").read_text().split("\n"):
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
        self.clients = [event for event in events if event["process"] != "nemesis"]
        self.faults = self._faults([event for event in events if event["process"] == "nemesis"])
        self.end_ns = self.clients[-1]["time"]
        self.operations = self._operations()
        self.spans = self._spans(away_ns)

    @property
    def group(self) -> tuple[str, ...]:
        test = self.test
        configuration = json.dumps({"nodes": str(test["nodes"]), **test["settings"]}, sort_keys=True)
        return (test["system"], configuration, test["workload"], "+".join(test["nemesis"]) or "none", test["cluster"])

    @property
    def verdict(self) -> str:
        if self.results is None:
            return "unknown"
        return {True: "valid", False: "invalid"}.get(self.results["valid"], "unknown")

    def _faults(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        faults: dict[str, dict[str, Any]] = {}
        for event in events:
            fault = faults.setdefault(event["value"]["id"], {"start": None, "end": None, "nemesis": "", "variant": ""})
            fault["unmet"] = event["value"].get("met", {}).get("exercised") is False
            fault["nemesis"] = event["value"].get("nemesis") or fault["nemesis"]
            fault["variant"] = event["value"].get("variant") or fault["variant"]
            if event["f"] == "inject" and event["type"] == "invoke":
                fault["start"] = event["time"]
            if event["f"] == "heal" and event["type"] != "invoke":
                fault["end"] = event["time"]
        return list(faults.values())

    def _operations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        open_now: dict[int, dict[str, Any]] = {}
        for event in self.clients:
            if event["type"] == "invoke":
                op = {"f": event["f"], "start": event["time"], "end": None, "outcome": "info", "node": None}
                open_now[event["process"]] = op
                found.append(op)
            else:
                op = open_now.pop(event["process"])
                op.update(end=event["time"], outcome=event["type"], node=event.get("node"))
        for op in found:
            op["in_fault"] = any(self.affects(f, op) for f in self.faults)
            began = any(f["start"] <= op["start"] for f in self.faults)
            op["phase"] = "during" if op["in_fault"] else "after" if began else "before"
        return found

    @staticmethod
    def affects(fault: dict[str, Any], op: dict[str, Any]) -> bool:
        """Whether an operation was invoked while a fault was in force."""
        return fault["start"] <= op["start"] and (fault["end"] is None or op["start"] < fault["end"])

    def _end_of(self, fault: dict[str, Any]) -> int:
        return min(self.end_ns if fault["end"] is None else fault["end"], self.end_ns)

    def during_ns(self) -> int:
        """Time in which some fault held, by sweeping over the ends of all of them."""
        edges = sorted(
            {0, self.end_ns, *(min(f["start"], self.end_ns) for f in self.faults), *map(self._end_of, self.faults)}
        )
        total = 0
        for a, b in itertools.pairwise(edges):
            if any(f["start"] <= a and b <= self._end_of(f) for f in self.faults):
                total += b - a
        return total

    def _spans(self, away_ns: int) -> list[tuple[int, int, bool]]:
        """Walk the events: a stretch runs from a success (or, if nothing was open then, from the next invocation) to
        the next success."""
        found = []
        open_count = 0
        begin: int | None = None
        for at, event in enumerate(self.clients):
            time = event["time"]
            if begin is None:
                begin = time
            open_count += 1 if event["type"] == "invoke" else -1
            last = at + 1 == len(self.clients)
            lull = last or (open_count == 0 and self.clients[at + 1]["time"] - time >= away_ns)
            success = event["type"] == "ok"
            if success or lull:
                if time - begin >= away_ns:
                    found.append((begin, time, success))
                begin = None if open_count == 0 else time
        return found

    def recoveries(self) -> tuple[list[int | None], list[int | None]]:
        """(after start, after heal) of every fault; None: not recovered."""
        after_start: list[int | None] = []
        after_heal: list[int | None] = []
        for fault in self.faults:
            start, end = fault["start"], fault["end"]
            hit = [s for s in self.spans if s[1] > start and (end is None or s[0] < end)]
            after_start.append(0 if not hit else hit[0][1] - start if hit[0][2] else None)
            if end is None:
                after_heal.append(None)
                continue
            held = [s for s in self.spans if s[0] <= end < s[1]]
            after_heal.append(0 if not held else held[0][1] - end if held[0][2] else None)
        return after_start, after_heal

    def anomalies(self) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for name, check in self._checks().items():
            stats = check.get("stats", {})
            if check["valid"] is not False:
                continue
            kinds = stats.get("counts", {name: stats.get("invalid_keys") or 1})
            found |= {(name, k): number for k, number in kinds.items() if number and k not in stats.get("noted", ())}
        return found

    def _checks(self) -> dict[str, Any]:
        return (self.results or {"checks": {}})["checks"]  # type: ignore[no-any-return]

    def earliest_witness(self) -> tuple[int, int] | None:
        found = []
        for check in self._checks().values():
            witness = check.get("witness")
            if check["valid"] is False and witness:
                ended = [op.get("returned_ns") or op["invoked_ns"] for op in witness["operations"]]
                found.append((max(ended), max(op["index"] for op in witness["operations"]) + 1))
        return min(found) if found else None

    def count_of(self, kind: str) -> int | None:
        """How many, if that is known and the workload forbids it."""
        numbers = []
        for check in self._checks().values():
            stats = check.get("stats", {})
            number = stats.get("counts", {}).get(kind)
            if number is not None and kind not in stats.get("noted", ()) and (check["valid"] is False or number == 0):
                numbers.append(number)
        return sum(numbers) if numbers else None


def recount(store: Path, away_ns: int = 1_000_000_000) -> list[RecountedRun]:
    """Every run of a store."""
    return [
        RecountedRun(path.parent, away_ns)
        for path in sorted(store.glob("*/*/test.json"))
        if path.parent.name != "latest"
    ]


def grouped(runs: list[RecountedRun]) -> dict[tuple[str, ...], list[RecountedRun]]:
    found: dict[tuple[str, ...], list[RecountedRun]] = defaultdict(list)
    for run in runs:
        found[run.group].append(run)
    return dict(found)


def quantiles(values: list[int]) -> dict[str, int | None]:
    """Nearest rank, with fractions in whole numbers: the smallest value that covers the share."""
    ordered = sorted(values)
    if not ordered:
        return {"min": None, **dict.fromkeys(QUANTILES), "max": None}
    found: dict[str, int | None] = {"min": ordered[0]}
    for name, share in QUANTILES.items():
        found[name] = next(v for at, v in enumerate(ordered, 1) if at * 1000 >= round(share * 1000) * len(ordered))
    found["max"] = ordered[-1]
    return found


def wilson_by_search(hits: int, trials: int) -> tuple[float, float]:
    """The interval's ends by bisection on its definition: where the score test gives exactly 5 %."""
    z = 1.959963984540054
    if trials == 0:
        return 0.0, 1.0

    def score(p: float) -> float:
        return (hits / trials - p) ** 2 * trials - z * z * p * (1 - p)

    def root(low: float, high: float) -> float:
        for _ in range(200):
            middle = (low + high) / 2
            if math.copysign(1, score(middle)) == math.copysign(1, score(low)):
                low = middle
            else:
                high = middle
        return (low + high) / 2

    share = hits / trials
    return (
        0.0 if hits == 0 else root(1e-18, min(share, 1 - 1e-12)),
        1.0 if hits == trials else root(max(share, 1e-12), 1 - 1e-18),
    )
