"""Exploring seeds in tasks that run elsewhere: as many tasks at a time as there are places, each with several seeds.

A task is a blocking call in a thread of its own, so the caller decides what a place is (for `harness explore --master`,
a core of a Spark cluster). A task gets a batch of seeds that takes some seconds: long enough to outweigh the task's
start, short enough that a lost task costs little.
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
"""Intended duration of a task, which is lost if the task is. Its start takes some hundredths of a second."""

MAX_BATCH = 100
"""Most seeds of a task; with five replicas a seed takes at least half a second."""

MAX_TASKS = 1_000
"""Most tasks at a time; for each a thread waits here."""

POLL_INTERVAL_S = 1.0
"""How often the number of places is read: machines come and go."""

Task = Callable[[Sequence[int], float], Sequence[Rehearsal]]
"""Runs seeds one after the other and returns their results in order. It begins none after the given number of seconds,
so the last results may be missing."""


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
    """Run `count` seeds from `first` on, or until the time is used up; `on_result` is called after each run.

    `places` returns how many tasks to run at a time. With `stop_at_first` the first run that is not valid ends the
    exploration. Raises what a task raises, without waiting for the other tasks.
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
        """The seeds of the next task; [] if no more may be begun."""
        if self._is_over or time.monotonic() >= self._deadline_s:
            return []
        each_s = self._took_s / self._tally.runs if self._tally.runs else BATCH_S
        size = max(1, min(MAX_BATCH, round(BATCH_S / max(each_s, 1e-3))))
        if self._end is not None:  # smaller batches towards the end, so that all places finish at about the same time
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
