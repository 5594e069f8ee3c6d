"""Batches of seeds spread over places, which are threads here and need no cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.exploration.rehearsal import Rehearsal
from harness.exploration.search import Tally
from harness.exploration.spreading import BATCH_S, MAX_BATCH, explore_spread
from harness.test import Test

TEST = Test(
    system="broker", cluster="sim", nodes=3, workload="register", nemesis=(), nemesis_interval_s=5.0,
    time_limit_s=15.0, concurrency=4, rate=50.0, seed=0,
)  # fmt: skip


def rehearsal(seed: int, *, took_s: float = 1.0) -> Rehearsal:
    """Invalid for every fourth seed."""
    valid = seed % 4 != 3
    return Rehearsal(
        seed=seed, valid=valid, reason="", failed_checks=() if valid else ("log",), faults=1, operations=10,
        took_s=took_s,
    )  # fmt: skip


def explore(
    run_seeds: Callable[[Sequence[int], float], Sequence[Rehearsal]],
    *,
    count: int | None,
    places: int = 2,
    budget_s: float = 600.0,
    stop_at_first: bool = False,
) -> tuple[Tally, list[int]]:
    """The tally, and the seeds in the order in which they were reported."""
    heard: list[int] = []
    tally = explore_spread(
        TEST, run_seeds, first=100, count=count, places=lambda: places, budget_s=budget_s, stop_at_first=stop_at_first,
        on_result=lambda _, found: heard.append(found.seed),
    )  # fmt: skip
    return tally, heard


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 120), places=st.integers(1, 7), took_s=st.sampled_from((0.001, 0.5, 4.0, 90.0)))
def test_every_seed_is_run_once(count: int, places: int, took_s: float) -> None:
    batches: list[int] = []

    def run_seeds(seeds: Sequence[int], budget_s: float) -> Sequence[Rehearsal]:
        batches.append(len(seeds))
        return [rehearsal(seed, took_s=took_s) for seed in seeds]

    tally, heard = explore(run_seeds, count=count, places=places)
    assert sorted(heard) == list(range(100, 100 + count))
    assert tally.runs == count and tally.invalid == sum(seed % 4 == 3 for seed in heard)
    assert batches[0] == 1  # until it is known how long a seed takes
    assert max(batches) <= max(1, min(MAX_BATCH, round(BATCH_S / took_s)))


def test_as_many_tasks_run_at_a_time_as_there_are_places() -> None:
    all_there = threading.Barrier(3)

    def run_seeds(seeds: Sequence[int], budget_s: float) -> Sequence[Rehearsal]:
        all_there.wait(timeout=60)  # broken, and raises, if fewer come
        return [rehearsal(seed, took_s=BATCH_S) for seed in seeds]

    tally, _ = explore(run_seeds, count=6, places=3)
    assert tally.runs == 6


def test_the_first_failure_ends_the_search_if_requested() -> None:
    more = threading.Event()

    def run_seeds(seeds: Sequence[int], budget_s: float) -> Sequence[Rehearsal]:
        if seeds[0] == 100:
            more.wait(timeout=60)
        return [rehearsal(seed) for seed in seeds]

    try:
        tally, heard = explore(run_seeds, count=None, stop_at_first=True)
    finally:
        more.set()
    assert tally.invalid == 1 and heard[-1] % 4 == 3 and 100 not in heard  # the search does not wait for that one


def test_an_error_in_a_task_ends_the_search() -> None:
    def run_seeds(seeds: Sequence[int], budget_s: float) -> Sequence[Rehearsal]:
        raise LookupError("no such place")

    with pytest.raises(LookupError, match="no such place"):
        explore(run_seeds, count=5)


def test_no_task_starts_once_the_budget_is_used_up() -> None:
    tally, heard = explore(lambda seeds, budget_s: pytest.fail("a task was started"), count=5, budget_s=0.0)
    assert tally.runs == 0 and heard == []


def test_a_task_may_leave_out_seeds_for_which_it_had_no_time() -> None:
    def run_seeds(seeds: Sequence[int], budget_s: float) -> Sequence[Rehearsal]:
        assert 0 < budget_s <= 600.0
        return [rehearsal(seed, took_s=0.01) for seed in seeds[:1]]

    tally, heard = explore(run_seeds, count=40)
    assert tally.runs == len(heard) == len(set(heard)) < 40
