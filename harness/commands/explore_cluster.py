"""`harness explore --master URL`: explores the seeds on the executors of a Spark cluster.

Each task runs its seeds one after the other in a separate process next to Spark's Python worker, which may be PyPy. The
session ships everything that this process needs: executors need neither our packages nor rich and jinja2.
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
"""Packages that a simulation imports besides `checker`."""

DISTRIBUTION = "splitbrain"


def explore_on_cluster(
    test: Test,
    arguments: argparse.Namespace,
    *,
    first: int,
    on_result: Callable[[Tally, Rehearsal], None],
    say: Callable[[str], None],
) -> Tally:
    """Explore as `exploration.search.explore` does. At the end `say` gets a line per host and interpreter.

    Raises OperatorError if the test names what simulation lacks, and for errors of Spark or an executor, with the seed
    from which to continue.
    """
    require_spark()
    usable_choices(test)  # report problems of the test before a cluster is contacted
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
        further = f"; continue with --seed {found.first_missing}" if found.runs else ""
        raise OperatorError(f"{error}{further}") from None
    finally:
        for line in found.lines():
            say(line)


@contextlib.contextmanager
def _cancelled(cancel: Callable[[], None]) -> Iterator[None]:
    """Cancel the tasks however the exploration ends."""
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # a dead driver has no tasks
            cancel()


class _Found:
    """Counts seeds by host and interpreter, and tracks the first seed that was not run."""

    def __init__(self, first: int) -> None:
        self.first_missing = first
        self.runs = 0
        self._beyond: set[int] = set()
        self._by_place: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()

    def take(self, answers: Answers) -> list[Rehearsal]:
        """The results of a task's seeds. Raises OperatorError if they were refused."""
        rehearsals = [rehearsal_of(answer) for answer in answers.answers]
        with self._lock:  # each task has its own thread
            self._by_place[answers.host, answers.python] += len(rehearsals)
        return rehearsals

    def noting(self, on_result: Callable[[Tally, Rehearsal], None]) -> Callable[[Tally, Rehearsal], None]:
        """Wraps `on_result` to record the seed too."""

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
        return [f"{host}: {runs} seeds with {python}" for (host, python), runs in sorted(self._by_place.items())]
