"""What the replicas of a simulated run do, for schedules that wait for it (nemesis.target.Triggers)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from harness.clusters.sim.watch import ReplicaWatch
from nemesis.triggers import Occurrence, Trigger

__all__ = ["SimTriggers"]

MAX_REMEMBERED = 500
"""Past occurrences that a schedule can still find; those since its previous step span a second at most."""


class SimTriggers:
    """See nemesis.target.Triggers."""

    def __init__(self, watch: ReplicaWatch, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._past: deque[tuple[str, str, float]] = deque(maxlen=MAX_REMEMBERED)
        """(kind, host, time), converted to an Occurrence on demand."""
        self._waiting: list[tuple[Trigger, asyncio.Future[Occurrence]]] = []
        watch.tell.occurrence.append(self._note)

    def _note(self, kind: str, host: str) -> None:
        at_s = self._now_s()
        self._past.append((kind, host, at_s))
        if not self._waiting:
            return
        occurrence = Occurrence(kind=kind, host=host, at_s=at_s)
        for waiting in [each for each in self._waiting if each[0].matches(occurrence)]:
            self._waiting.remove(waiting)
            if not waiting[1].done():
                waiting[1].set_result(occurrence)

    async def wait(self, trigger: Trigger, *, since_s: float, timeout_s: float) -> Occurrence | None:
        """The trigger's first occurrence since a time of the loop; None if there is none within `timeout_s` seconds."""
        for kind, host, at_s in self._past:
            occurrence = Occurrence(kind=kind, host=host, at_s=at_s)
            if at_s >= since_s and trigger.matches(occurrence):
                return occurrence
        due: asyncio.Future[Occurrence] = asyncio.get_running_loop().create_future()
        waiting = (trigger, due)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                return await due
        except TimeoutError:
            return None
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
