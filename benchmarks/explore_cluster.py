"""How many seeds two workers of a Spark cluster run in the time of one core: the goal is 1.7 times as many.

    python -m benchmarks explore_cluster [--seeds 60] [--pairs 2]

In alternation: `harness explore --jobs 1` on this machine, and `--master` with a standalone cluster of two workers of
one core each, which is started for it. Both run the same seeds, with five nodes, every fault, and the load of a search.
Speeds are seeds per second from the end of the first to the end of the last; Spark's start, which does not matter in a
search of hours, is reported separately. Two cores have to be idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._standalone_spark import SHORT_LIVED_JAVA, standalone_cluster
from benchmarks.checker import calibration_ms
from harness.cli_parser import build_parser
from harness.commands.explore_cluster import explore_on_cluster
from harness.commands.run import test_from
from harness.exploration.rehearsal import Rehearsal
from harness.exploration.search import Tally, explore

__all__ = ["main"]

WORKERS = 2
FIRST_SEED = 500

OnResult = Callable[[Tally, Rehearsal], None]


class _Timed:
    """Records when the seeds of one search ended."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.ends_s: list[float] = []
        self.valid: dict[int, bool | str] = {}

    def heard(self, tally: Tally, rehearsal: Rehearsal) -> None:
        """Record the end of one seed."""
        self.ends_s.append(time.monotonic())
        self.valid[rehearsal.seed] = rehearsal.valid

    @property
    def seeds_per_s(self) -> float:
        """Speed from the end of the first seed to the end of the last."""
        return (len(self.ends_s) - 1) / (self.ends_s[-1] - self.ends_s[0])

    @property
    def first_s(self) -> float:
        """Time (s) until the end of the first seed."""
        return self.ends_s[0] - self.began_s


def _arguments(seeds: int, *words: str) -> argparse.Namespace:
    arguments = build_parser().parse_args(
        ["explore", "--nodes", "5", "--nemesis", "all", "--seed", str(FIRST_SEED), "--seeds", str(seeds),
         "--budget", "1h", *words]
    )  # fmt: skip
    arguments.cluster = "sim"
    return arguments


def one_core(seeds: int, on_result: OnResult) -> None:
    """Run the seeds in this machine's processes, one after the other."""
    explore(
        test_from(_arguments(seeds)), seeds=iter(range(FIRST_SEED, FIRST_SEED + seeds)), jobs=1, budget_s=3600.0,
        stop_at_first=False, on_result=on_result,
    )  # fmt: skip


def two_workers(url: str, seeds: int, on_result: OnResult) -> None:
    """Run the seeds on the cluster."""
    settings = ("spark.driver.host=127.0.0.1", f"spark.executor.extraJavaOptions={SHORT_LIVED_JAVA}")
    words = [word for setting in settings for word in ("--conf", setting)]
    arguments = _arguments(seeds, "--master", url, "--executor-python", sys.executable, *words)
    explore_on_cluster(test_from(arguments), arguments, first=FIRST_SEED, on_result=on_result, say=print)


@contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="explore_cluster", description="seeds on two workers beside one core")
    parser.add_argument("--seeds", type=int, default=60, help="of each search")
    parser.add_argument("--pairs", type=int, default=2, help="of searches, in alternation")
    options = parser.parse_args(sys.argv[1:])
    ratios = []
    with (
        tempfile.TemporaryDirectory(prefix="splitbrain-cluster-") as scratch,
        standalone_cluster(Path(scratch), workers=WORKERS) as cluster,
        _environment(cluster.environment),
    ):
        for _ in range(options.pairs):
            found = []
            for name, search in (
                ("one core", one_core),
                (f"{WORKERS} workers", lambda seeds, heard: two_workers(cluster.url, seeds, heard)),
            ):
                before_ms = calibration_ms()
                timed = _Timed()
                search(options.seeds, timed.heard)
                found.append(timed)
                print(
                    f"{name:10}  {timed.seeds_per_s:6.3f} seeds/s, the first after {timed.first_s:.1f} s; calibration "
                    f"{before_ms:.1f}, {calibration_ms():.1f} ms; load {os.getloadavg()[0]:.1f}", flush=True,
                )  # fmt: skip
            here, there = found
            assert here.valid == there.valid, "verdicts differ"
            ratios.append(there.seeds_per_s / here.seeds_per_s)
    print(f"median of {len(ratios)} pairs: {statistics.median(ratios):.2f} times the seeds of one core, same verdicts")


if __name__ == "__main__":
    main()
