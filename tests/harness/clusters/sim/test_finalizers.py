"""A finished run leaves no objects behind, whatever the interpreter's garbage collector."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from harness.clusters.sim.finalizers import without_finalizer
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.primitives import SimFuture, SimTask
from harness.clusters.sim.simulation import GC_THRESHOLDS
from harness.exploration.rehearsal import rehearse_test
from harness.test import Test
from nemesis.schedule import Schedule

COLLECTIONS = 8
"""PyPy needs one collection per finalizer of objects that reference one another; a run has several."""


def closed_loops() -> list[SimLoop]:
    return [each for each in gc.get_objects() if type(each) is SimLoop and each.is_closed()]


TEST = Test(
    system="broker",
    cluster="sim",
    nodes=3,
    workload="queue",
    nemesis=(),
    nemesis_interval_s=1.0,
    time_limit_s=1.0,
    concurrency=5,
    rate=50.0,
    seed=1,
)


def test_the_loop_of_a_finished_run_is_garbage_collected() -> None:
    before = {id(loop): loop for loop in closed_loops()}  # earlier tests may still hold these
    assert rehearse_test(TEST, Schedule(())).valid is True
    for _ in range(COLLECTIONS):
        gc.collect()
    assert [loop for loop in closed_loops() if id(loop) not in before] == []


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="a run collects garbage on CPython only")
def test_a_run_collects_its_garbage_at_its_end() -> None:
    """A worker performs one run after another and collects no garbage in between."""
    here = gc.get_threshold()
    assert here == GC_THRESHOLDS, "otherwise each run would collect all that tests/conftest.py has frozen"
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()  # the objects that were frozen before all tests
    before = {id(loop): loop for loop in closed_loops()}
    for _ in range(3):
        assert rehearse_test(TEST, Schedule(())).valid is True
    left = [loop for loop in closed_loops() if id(loop) not in before]
    gc.freeze()
    gc.set_threshold(*here)
    assert left == []


def test_simulated_futures_and_tasks_count_as_asyncio_futures() -> None:
    assert asyncio.isfuture(SimFuture.__new__(SimFuture)) and asyncio.isfuture(SimTask.__new__(SimTask))


def test_a_class_without_its_finalizer_keeps_its_methods_and_super(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def told(self, word: str = "base") -> str:
            return word

    class Original(Base):
        def told(self, word: str = "original") -> str:
            return f"{word} on {super().told()}"

        def __del__(self) -> None:
            raise AssertionError("called")

    assert without_finalizer(Original, Base) is Original or not hasattr(without_finalizer(Original, Base), "__del__")
    monkeypatch.setattr("sys.implementation.name", "pypy")
    made = without_finalizer(Original, Base)
    assert made is not Original and not hasattr(made, "__del__")
    assert made().told() == "original on base"
