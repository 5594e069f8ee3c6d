"""Keeping a run with a generated schedule in the store. The schedule is stored as a file, which the command that
repeats the run names."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.atomic_files import replace_file
from harness.errors import OperatorError
from harness.execution import perform
from harness.exploration.rehearsal import parts_of
from harness.report import OutputConsole
from harness.store import RunDir, Store
from harness.test import Test
from nemesis.schedule import Schedule, schedule_text

__all__ = ["keep_run"]

FOLDER = "schedules"
"""Folder of the store for the schedules of all kept runs."""

DIGEST_CHARS = 12
"""Length of the digest of a schedule's content in its file name."""


def keep_run(
    test: Test, schedule: Schedule, store: Store, *, name: str, has_trace: bool = False
) -> tuple[RunDir, str, Mapping[str, Any]]:
    """Write `schedule` to schedules/<name>-<digest>.json in the store, and perform the simulated run of `test` with it.

    The digest is of the content: another search may have other faults for the same seed, and the command that repeats
    an earlier run must not get those.

    Returns the run, the command that repeats it and its results. Raises OperatorError if the schedule cannot be
    written, and whatever `perform` raises.
    """
    text = schedule_text(schedule).encode()
    digest = hashlib.sha256(text).hexdigest()[:DIGEST_CHARS]
    path = Path(store.root) / FOLDER / f"{name}-{digest}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise OperatorError(f"seed {test.seed} cannot be stored: {path}: {error.strerror}") from None
    kept = dataclasses.replace(test, nemesis=(), nemesis_schedule=str(path))
    parts = dataclasses.replace(parts_of(kept, schedule), has_trace=has_trace)
    run_dir, results = perform(parts, store, OutputConsole(file=io.StringIO(), quiet=True))
    return run_dir, kept.replay_line(), results
