"""Runs of the harness by its command line, for benchmarks that make many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["checked_out_commit", "kept_of", "perform_run", "timed_faults", "verdict_of"]

RUN_TIMEOUT_S = 600.0
"""Timeout of one run including setup and checks; the longest loads here take three minutes."""


def checked_out_commit() -> str:
    """The commit of the project that is checked out; "unknown" outside a checkout."""
    try:
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def timed_faults(faults: Sequence[tuple[str, str]], *, begin_s: float, on_s: float, off_s: float) -> list[Any]:
    """The content of a schedule file: (nemesis, variant) pairs one after the other, each for `on_s` seconds."""
    events: list[dict[str, Any]] = []
    for number, (nemesis, variant) in enumerate(faults):
        at_s, fault_id = begin_s + number * (on_s + off_s), f"f{number + 1}"
        events.append({"at_s": at_s, "action": "inject", "id": fault_id, "nemesis": nemesis, "variant": variant})
        events.append({"at_s": at_s + on_s, "action": "heal", "id": fault_id})
    return events


def perform_run(
    directory: Path,
    *words: str,
    schedule: Sequence[Any] | None = None,
    settings: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Perform one `harness run` with its store in `directory`; returns its results. `prefix` is put before its command,
    to run it as another user or elsewhere; `environment` is added to ours.

    Raises RuntimeError with the command's output if there are no results.
    """
    argv = [*prefix, python, "-m", "harness", "run", "--json", "--store", str(directory / "store"), *words]
    if schedule is not None:
        path = directory / "schedule.json"
        path.write_text(json.dumps(schedule))
        argv += ["--nemesis-schedule", str(path)]
    for name, value in (settings or {}).items():
        argv += ["--set", f"{name}={value}"]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env=variables)
    try:
        results: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-2000:]}") from None
    return results


def kept_of(perform: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of a run's results to keep, with the machine's load at its begin and at its end."""
    began_load = os.getloadavg()[0]
    results = perform()
    faults = results["faults"]
    return {
        "valid": results["valid"],
        "reason": results["reason"],
        "ops": results["ops"],
        "faults": len(faults),
        "proven": sum(bool(fault["proven"] and fault["healed"]) for fault in faults),
        "machine_load": [round(began_load, 1), round(os.getloadavg()[0], 1)],
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def verdict_of(run: Mapping[str, Any]) -> str:
    """The verdict of a kept run as a word."""
    return {True: "valid", False: "**invalid**"}.get(run["valid"], "unknown")
