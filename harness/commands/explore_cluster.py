"""`harness explore --master URL`: the seeds on the executors of a Spark cluster.

Each task asks a process beside Spark's Python worker, which may be PyPy, for one seed after the other. Everything that
it needs goes with the session: the executors need nothing of ours, nor rich and jinja2.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from harness.commands.report import require_spark, spark_session
from harness.errors import OperatorError
from harness.exploration.rehearsal import Rehearsal, usable_choices
from harness.exploration.remote_seeds import MODULE, question_for, rehearsal_of
from harness.exploration.search import Tally
from harness.exploration.spreading import explore_spread
from harness.nursery import NURSERY, VARIABLE
from harness.test import Test

if TYPE_CHECKING:
    from spark_analysis.programs import Answers

__all__ = ["explore_on_cluster"]

PACKAGES = ("nemesis", "node", "harness", "rich", "jinja2", "markupsafe")
"""What a simulation imports beside `checker`."""

DISTRIBUTION = "splitbrain"


def explore_on_cluster(
    test: Test,
    arguments: argparse.Namespace,
    *,
    first: int,
    on_result: Callable[[Tally, Rehearsal], None],
    say: Callable[[str], None],
) -> Tally:
    """Explore as `exploration.search.explore` does. `say` hears of what simulated where, at the end.

    Raises OperatorError when the test names what simulation does not have, and for whatever Spark or an executor says
    that it lacks, with the seed from which to go on.
    """
    require_spark()
    usable_choices(test)  # what is wrong with the test is said before a cluster is asked
    from spark_analysis.errors import AnalysisError
    from spark_analysis.programs import Program, ask

    program = Program(
        module=MODULE, python=arguments.executor_python or "", environment={VARIABLE: NURSERY}
    )  # fmt: skip
    found = _Found(first)
    try:
        with spark_session(arguments, packages=PACKAGES, distribution=DISTRIBUTION) as session:
            spark = session.spark

            def run_seeds(seeds: Sequence[int], budget_s: float) -> Sequence[Rehearsal]:
                answers = ask(spark, program, [question_for(test, seed) for seed in seeds], budget_s=budget_s)
                return found.take(answers)

            def places() -> int:
                return int(arguments.jobs or spark.sparkContext.defaultParallelism)

            with _cancelled(spark.sparkContext.cancelAllJobs):
                return explore_spread(
                    test, run_seeds, first=first, count=arguments.seeds, places=places, budget_s=arguments.budget,
                    stop_at_first=arguments.stop_at_first, on_result=found.noting(on_result),
                )  # fmt: skip
    except AnalysisError as error:
        further = f"; --seed {found.first_missing} goes on from here" if found.runs else ""
        raise OperatorError(f"{error}{further}") from None
    finally:
        for line in found.lines():
            say(line)


@contextlib.contextmanager
def _cancelled(cancel: Callable[[], None]) -> Iterator[None]:
    """Whatever ends the exploration, no task goes on."""
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # a driver that has died has no tasks any more
            cancel()


class _Found:
    """Who simulated how many seeds, and which seed has not been run yet."""

    def __init__(self, first: int) -> None:
        self.first_missing = first
        self.runs = 0
        self._beyond: set[int] = set()
        self._by_place: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()

    def take(self, answers: Answers) -> list[Rehearsal]:
        """What came of a task's seeds. Raises OperatorError where they were refused."""
        rehearsals = [rehearsal_of(answer) for answer in answers.answers]
        with self._lock:  # tasks are taken each in a thread of its own
            self._by_place[answers.host, answers.python] += len(rehearsals)
        return rehearsals

    def noting(self, on_result: Callable[[Tally, Rehearsal], None]) -> Callable[[Tally, Rehearsal], None]:
        """`on_result`, and the seed is noted."""

        def noted(tally: Tally, rehearsal: Rehearsal) -> None:
            self.runs += 1
            self._beyond.add(rehearsal.seed)
            while self.first_missing in self._beyond:
                self._beyond.remove(self.first_missing)
                self.first_missing += 1
            on_result(tally, rehearsal)

        return noted

    def lines(self) -> list[str]:
        """A line for each interpreter of each host."""
        return [f"{host}: {runs} seeds by {python}" for (host, python), runs in sorted(self._by_place.items())]
