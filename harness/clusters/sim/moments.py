"""Moments of a simulated run, for schedules that wait for them (nemesis.target.Moments)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from harness.clusters.sim.watch import ReplicaWatch
from nemesis.moments import Moment, MomentWord

__all__ = ["SimMoments"]

MAX_REMEMBERED = 500
"""Moments that a schedule can still find afterwards: those of the step before take a second at most."""


class SimMoments:
    """See nemesis.target.Moments."""

    def __init__(self, watch: ReplicaWatch, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._past: deque[tuple[str, str, float]] = deque(maxlen=MAX_REMEMBERED)
        """Kind, host and time; made a Moment of when somebody asks."""
        self._waiting: list[tuple[MomentWord, asyncio.Future[Moment]]] = []
        watch.tell.moment.append(self._note)

    def _note(self, kind: str, host: str) -> None:
        at_s = self._now_s()
        self._past.append((kind, host, at_s))
        if not self._waiting:
            return
        moment = Moment(kind=kind, host=host, at_s=at_s)
        for waiting in [each for each in self._waiting if each[0].matches(moment)]:
            self._waiting.remove(waiting)
            if not waiting[1].done():
                waiting[1].set_result(moment)

    async def wait(self, word: MomentWord, *, since_s: float, timeout_s: float) -> Moment | None:
        """The first such moment since a time of the loop; None when none comes within `timeout_s` seconds."""
        for kind, host, at_s in self._past:
            moment = Moment(kind=kind, host=host, at_s=at_s)
            if at_s >= since_s and word.matches(moment):
                return moment
        due: asyncio.Future[Moment] = asyncio.get_running_loop().create_future()
        waiting = (word, due)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                return await due
        except TimeoutError:
            return None
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
