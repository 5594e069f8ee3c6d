"""Exploring seeds in tasks that run elsewhere: as many at a time as there are places, several seeds in each.

A task is a blocking call in a thread of its own, so what the places are is the caller's affair (`harness explore
--master` has the cores of a Spark cluster). Seeds are handed out in batches that take some seconds: a task costs its
start, a lost one its seeds.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence

from harness.exploration.rehearsal import Rehearsal
from harness.exploration.search import Tally
from harness.test import Test

__all__ = ["BATCH_S", "MAX_TASKS", "explore_spread"]

BATCH_S = 5.0
"""What a task is to take. Its start costs some hundredths of a second; a task that is lost costs so much."""

MAX_BATCH = 100
"""Seeds of a task: those of five replicas take half a second each at best."""

MAX_TASKS = 1_000
"""At a time: each has a thread here that waits."""

POLL_INTERVAL_S = 1.0
"""Between two looks at how many places there are: machines come and go."""

Task = Callable[[Sequence[int], float], Sequence[Rehearsal]]
"""Runs seeds, one after the other; gives what came of them, in their order. None is begun after so many seconds, so the
last may be missing."""


def explore_spread(
    test: Test,
    run_seeds: Task,
    *,
    first: int,
    count: int | None,
    places: Callable[[], int],
    budget_s: float,
    stop_at_first: bool,
    on_result: Callable[[Tally, Rehearsal], None],
) -> Tally:
    """Run seeds from `first` on, `count` of them or until the time is used up; `on_result` hears of each run.

    `places` says how many tasks are worth having at a time. With `stop_at_first` the first run that is not valid ends
    it. Raises what a task raises; what is under way is not waited for then.
    """
    return _Spread(test, run_seeds, first, count, budget_s, stop_at_first, on_result).explore(places)


class _Spread:
    """One exploration."""

    def __init__(
        self, test: Test, run_seeds: Task, first: int, count: int | None, budget_s: float, stop_at_first: bool,
        on_result: Callable[[Tally, Rehearsal], None],
    ) -> None:  # fmt: skip
        self._test, self._run_seeds, self._on_result = test, run_seeds, on_result
        self._next = first
        self._end = None if count is None else first + count
        self._deadline_s = time.monotonic() + budget_s
        self._stop_at_first = stop_at_first
        self._tally = Tally()
        self._took_s = 0.0
        self._is_over = False

    def explore(self, places: Callable[[], int]) -> Tally:
        """See `explore_spread`."""
        workers = concurrent.futures.ThreadPoolExecutor(max_workers=MAX_TASKS, thread_name_prefix="seeds")
        running: set[concurrent.futures.Future[Sequence[Rehearsal]]] = set()
        try:
            while True:
                at_a_time = min(MAX_TASKS, max(1, places()))
                while len(running) < at_a_time and (batch := self._batch(at_a_time)):
                    running.add(workers.submit(self._run_seeds, batch, self._deadline_s - time.monotonic()))
                if not running or self._is_over:
                    return self._tally
                done, running = concurrent.futures.wait(
                    running, timeout=POLL_INTERVAL_S, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    self._count(future.result())
        finally:
            workers.shutdown(wait=False, cancel_futures=True)

    def _batch(self, at_a_time: int) -> list[int]:
        """The seeds of the next task; none where there is nothing more to begin."""
        if self._is_over or time.monotonic() >= self._deadline_s:
            return []
        each_s = self._took_s / self._tally.runs if self._tally.runs else BATCH_S
        size = max(1, min(MAX_BATCH, round(BATCH_S / max(each_s, 1e-3))))
        if self._end is not None:  # at the end small ones, so that all places are done at about the same time
            size = min(self._end - self._next, max(1, min(size, (self._end - self._next) // (2 * at_a_time))))
        batch = list(range(self._next, self._next + size))
        self._next += size
        return batch

    def _count(self, rehearsals: Sequence[Rehearsal]) -> None:
        for rehearsal in rehearsals:
            if self._is_over:
                return
            self._took_s += rehearsal.took_s
            self._tally.add(rehearsal, time_limit_s=self._test.time_limit_s)
            self._on_result(self._tally, rehearsal)
            self._is_over = self._stop_at_first and rehearsal.valid is not True
