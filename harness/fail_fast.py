"""Judges a run while it is in progress, to show the first violation at once, and so that the load can end there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.worker import Recorder
from harness.workloads.base import OnlineChecker

__all__ = ["WatchedRecorder"]


class WatchedRecorder:
    """A recorder that also feeds its events to an online checker, in recording order.

    `on_violation(message, time_ns)` is called once, for the first violation. Nothing is checked after it: later
    violations add nothing, and the full checkers read the whole history anyway.
    """

    def __init__(self, recorder: Recorder, checker: OnlineChecker, on_violation: Callable[[str, int], None]) -> None:
        self._recorder = recorder
        self._checker: OnlineChecker | None = checker
        self._on_violation = on_violation

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        """Record an event and check it. Returns the recorded event; raises like the recorder."""
        recorded = self._recorder.append(event)
        if self._checker is not None:
            violation = self._checker.feed(recorded)
            if violation is not None:
                self._checker = None
                self._on_violation(violation, recorded["time"])
        return recorded
