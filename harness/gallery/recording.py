"""The outcomes of the runs of findings, kept as one JSON file: by finding and side, each run with its seed.

    {"nats-power-loss": {"day": "2026-11-23", "cluster": "netns", "lines": {"finding": "harness run ...", ...},
                         "runs": {"finding": [{"seed": 7, "outcome": "found", ...}], "control": [...]},
                         "witness": {...}}}

New runs of a finding replace its earlier ones. A record's lines show whether the finding's options have changed since.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.atomic_files import replace_file
from harness.errors import OperatorError
from harness.gallery.finding import FOUND, SIDES, Finding, is_met, outcome_of
from harness.report.witness import MAX_OPERATIONS

__all__ = ["RESULTS_NAME", "is_of", "load", "outcomes_of", "record_of", "run_of", "save", "statistics_of"]

RESULTS_NAME = "gallery.json"

MAX_FAULTS = 16
"""Most faults kept with a witness; a picture of one moment cannot show more."""

_WHAT_TO_DO = "use one written by harness gallery run"
_TEXTS = ("version", "day", "cluster")
_RUN_TEXTS, _RUN_NUMBERS = ("outcome", "reason"), ("ok", "faults", "proven")

_PLACE = re.compile(r"/\S*/(?=nodes/)")
"""Where a run was stored, in front of a file of a node. Only the part behind it means anything to others."""

Record = Mapping[str, Any]


def run_of(finding: Finding, results: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one run, from its results.json."""
    faults = results["faults"]
    counts = (results["checks"].get(finding.check) or {}).get("stats", {}).get("counts")
    kept = {name: number for name, number in counts.items() if number} if isinstance(counts, Mapping) else {}
    return {
        "seed": results["seed"],
        "outcome": outcome_of(finding, results),
        "reason": _PLACE.sub("", results["reason"]),
        "ok": results["ops"]["ok"],
        "faults": len(faults),
        "proven": sum(bool(fault["proven"] and fault["healed"]) for fault in faults),
        "counts": kept,
    }


def record_of(
    finding: Finding, runs: Mapping[str, Sequence[Record]], *, day: str, cluster: str, shown: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The record of a finding. `shown` is results.json of a run that found it, for the picture."""
    return {
        "version": finding.version,
        "day": day,
        "cluster": cluster,
        "lines": {side: finding.line(side) for side in SIDES},
        "runs": {side: list(runs[side]) for side in SIDES},
        "witness": None if shown is None else _witness(shown["checks"][finding.check], shown["faults"]),
    }


def _witness(check: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The check reduced to its reason and witness, and the run's first faults."""
    witness = check.get("witness")
    if not isinstance(witness, Mapping):
        return None
    operations = witness.get("operations") or []
    times = ("id", "nemesis", "variant", "start_ns", "end_ns")
    return {
        "check": {"reason": check["reason"], "witness": {**witness, "operations": operations[:MAX_OPERATIONS]}},
        "faults": [{name: fault.get(name) for name in times} for fault in faults[:MAX_FAULTS]],
    }


def outcomes_of(record: Record, side: str) -> Counter[str]:
    """How often each outcome occurred."""
    return Counter(run["outcome"] for run in record["runs"][side])


def is_of(record: Record, finding: Finding) -> bool:
    """Whether the record matches the current definition of the finding."""
    lines = {side: finding.line(side) for side in SIDES}
    return bool(record["lines"] == lines and record["version"] == finding.version)


def statistics_of(record: Record) -> tuple[str, str, bool]:
    """ "4 of 5" for the finding, "5 of 5" for the control, and whether both are as expected."""
    found, clean = outcomes_of(record, "finding"), outcomes_of(record, "control")
    words = (f"{found[FOUND]} of {found.total()}", f"{clean['valid']} of {clean.total()}")
    return (*words, is_met("finding", found) and is_met("control", clean))


def load(path: str) -> dict[str, Any]:
    """The records by finding; {} if there is no file. Raises OperatorError for a file that is not such a record."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise OperatorError(f"{path} is not a gallery results file: {_WHAT_TO_DO}")
    for name, each in data.items():
        if (damaged := _damage(each)) is not None:
            raise OperatorError(
                f"{path} is not a gallery results file ({name}: {damaged} is missing or damaged): {_WHAT_TO_DO}"
            )
    return data


def _damage(record: Any) -> str | None:
    """The first field of a record that is not as `record_of` writes it; None if all are."""
    if not isinstance(record, dict):
        return "the record"
    lines, runs, witness = record.get("lines"), record.get("runs"), record.get("witness", 0)
    for name in _TEXTS:
        if not isinstance(record.get(name), str):
            return name
    if not isinstance(lines, dict):
        return "lines"
    if not isinstance(runs, dict) or runs.keys() != {*SIDES}:
        return "runs"
    for side in SIDES:
        if not isinstance(runs[side], list) or not all(map(_is_run, runs[side])):
            return f"runs of {side}"
    return None if witness is None or _is_witness(witness) else "witness"


def _is_run(run: Any) -> bool:
    """Whether `run` is as `run_of` returns it; a run that did not start has no numbers."""
    if not isinstance(run, dict) or "seed" not in run or not all(isinstance(run.get(name), str) for name in _RUN_TEXTS):
        return False
    if "faults" not in run and run["outcome"] not in (FOUND, "valid"):
        return True
    counts = run.get("counts")
    numbers = [run.get(name) for name in _RUN_NUMBERS]
    return isinstance(counts, dict) and all(isinstance(each, int) for each in (*numbers, *counts.values()))


def _is_witness(witness: Any) -> bool:
    check, faults = (witness.get("check"), witness.get("faults")) if isinstance(witness, dict) else (None, None)
    if not isinstance(check, dict) or not isinstance(check.get("reason"), str) or not isinstance(faults, list):
        return False
    return all(
        isinstance(fault, dict) and all(isinstance(fault.get(name), int | None) for name in ("start_ns", "end_ns"))
        for fault in faults
    )


def save(path: str, records: Mapping[str, Any]) -> None:
    """Write the records, whole or not at all. Raises OperatorError."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        replace_file(Path(path), (json.dumps(records, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
