"""Trials of what a machine allows a cluster to do, in namespaces that vanish with the trial."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from harness.programs import SYSTEM_PATH, find_program

__all__ = ["TrialFailed", "TrialUnfinished", "run_trial"]

_TIMEOUT_S = 20.0
"""A trial takes some 20 ms."""


class TrialFailed(Exception):
    """What was tried is not available; the text is the first line that the trial printed."""


class TrialUnfinished(Exception):
    """The trial itself did not begin or end, so nothing is known of what was to be tried; the text is one line."""


def run_trial(what: str, namespaces: Sequence[str], command: Sequence[str], *, stdin: str | None = None) -> None:
    """Run a command in new namespaces, given as options of unshare(1). Raises TrialFailed and TrialUnfinished."""
    try:
        trial = subprocess.run(
            [find_program("unshare") or "unshare", *namespaces, "--", *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={"PATH": SYSTEM_PATH, "LC_ALL": "C"},
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrialUnfinished(f"the trial of {what} did not finish: {error}") from error
    if trial.returncode != 0:
        raise TrialFailed((trial.stderr.strip().splitlines() or ["no output"])[0])
