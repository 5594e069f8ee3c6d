"""What the runs of findings came to, kept as one JSON file: by finding, both sides, each run with its seed.

    {"nats-power-loss": {"day": "2026-11-23", "cluster": "netns", "lines": {"finding": "harness run ...", ...},
                         "runs": {"finding": [{"seed": 7, "outcome": "found", ...}], "control": [...]},
                         "witness": {...}}}

The runs of a finding replace those that were known of it. Where a finding's options have been changed since, the
record says so by its lines.
"""

from __future__ import annotations

import json
import os
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
"""Of the faults that are kept with a witness: those that a picture of one moment can show."""

Record = Mapping[str, Any]


def run_of(finding: Finding, results: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one run, from its results.json."""
    faults = results["faults"]
    counts = (results["checks"].get(finding.check) or {}).get("stats", {}).get("counts")
    kept = {name: number for name, number in counts.items() if number} if isinstance(counts, Mapping) else {}
    return {
        "seed": results["seed"],
        "outcome": outcome_of(finding, results),
        "reason": results["reason"],
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
    """The check with its witness alone, and the faults at its time."""
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
    """How often each outcome was had."""
    return Counter(run["outcome"] for run in record["runs"][side])


def is_of(record: Record, finding: Finding) -> bool:
    """Whether the record is of the finding as it is defined now."""
    lines = {side: finding.line(side) for side in SIDES}
    return bool(record["lines"] == lines and record["version"] == finding.version)


def statistics_of(record: Record) -> tuple[str, str, bool]:
    """ "4 of 5" for the finding, "5 of 5" for the control, and whether both are as expected."""
    found, clean = outcomes_of(record, "finding"), outcomes_of(record, "control")
    words = (f"{found[FOUND]} of {found.total()}", f"{clean['valid']} of {clean.total()}")
    return (*words, is_met("finding", found) and is_met("control", clean))


def load(path: str) -> dict[str, Any]:
    """The records by finding; none where there is no file. Raises OperatorError for a file that is none of ours."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict) or not all(isinstance(each, dict) and "runs" in each for each in data.values()):
        raise OperatorError(f"{path} is no record of a gallery: take the file that harness gallery run has written")
    return data


def save(path: str, records: Mapping[str, Any]) -> None:
    """Write the records, whole or not at all. Raises OperatorError."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        replace_file(Path(path), (json.dumps(records, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
