"""Judging a run while it goes on: to show what is found so far, and so that the load can end at the first violation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.worker import Recorder
from harness.workloads.base import OnlineChecker

__all__ = ["WatchedRecorder"]


class WatchedRecorder:
    """A recorder whose events also go to an online checker, in the order in which they are recorded.

    `on_violation(words, time_ns)` is called once, for the first violation; nothing is checked after it, because what
    follows a violation says nothing new and the full checkers read the whole history anyway.
    """

    def __init__(self, recorder: Recorder, checker: OnlineChecker, on_violation: Callable[[str, int], None]) -> None:
        self._recorder = recorder
        self._checker: OnlineChecker | None = checker
        self._on_violation = on_violation

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        """Record an event and check it. Returns the completed event; raises as the recorder does."""
        recorded = self._recorder.append(event)
        if self._checker is not None:
            violation = self._checker.feed(recorded)
            if violation is not None:
                self._checker = None
                self._on_violation(violation, recorded["time"])
        return recorded
