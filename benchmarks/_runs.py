"""Runs of the harness from outside, as an operator starts them, for benchmarks that make many."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["perform_run", "timed_faults"]

RUN_TIMEOUT_S = 600.0
"""For one run with everything around it: the longest here drive their load for three minutes."""


def timed_faults(faults: Sequence[tuple[str, str]], *, begin_s: float, on_s: float, off_s: float) -> list[Any]:
    """A schedule file's content: (nemesis, variant) pairs one after the other, each for `on_s` seconds."""
    events: list[dict[str, Any]] = []
    for number, (nemesis, variant) in enumerate(faults):
        at_s, fault_id = begin_s + number * (on_s + off_s), f"f{number + 1}"
        events.append({"at_s": at_s, "action": "inject", "id": fault_id, "nemesis": nemesis, "variant": variant})
        events.append({"at_s": at_s + on_s, "action": "heal", "id": fault_id})
    return events


def perform_run(
    directory: Path, *words: str, schedule: Sequence[Any] | None = None, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One `harness run` with its store in `directory`; returns its results.

    Raises RuntimeError with what it said when it has none.
    """
    argv = [sys.executable, "-m", "harness", "run", "--json", "--store", str(directory / "store"), *words]
    if schedule is not None:
        path = directory / "schedule.json"
        path.write_text(json.dumps(schedule))
        argv += ["--nemesis-schedule", str(path)]
    for name, value in (settings or {}).items():
        argv += ["--set", f"{name}={value}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    try:
        results: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-2000:]}") from None
    return results
