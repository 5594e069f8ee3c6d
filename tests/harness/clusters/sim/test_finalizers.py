"""A run that is over leaves no objects behind, whatever the interpreter's garbage collector."""

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
"""Finalizers of objects that hold one another take a collection of PyPy's each; a run has some of them."""


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


def test_nothing_of_a_cluster_stays() -> None:
    before = {id(loop): loop for loop in closed_loops()}  # which tests before may still hold
    assert rehearse_test(TEST, Schedule(())).valid is True
    for _ in range(COLLECTIONS):
        gc.collect()
    assert [loop for loop in closed_loops() if id(loop) not in before] == []


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="what a run does with the collector is CPython's")
def test_a_run_leaves_nothing_to_those_that_follow_it() -> None:
    """A worker performs one run after the other, with nothing between them that would look for garbage."""
    here = gc.get_threshold()
    assert here == GC_THRESHOLDS, "otherwise each run goes through all that tests/conftest.py has set aside"
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()  # what was there before all tests
    before = {id(loop): loop for loop in closed_loops()}
    for _ in range(3):
        assert rehearse_test(TEST, Schedule(())).valid is True
    left = [loop for loop in closed_loops() if id(loop) not in before]
    gc.freeze()
    gc.set_threshold(*here)
    assert left == []


def test_what_asyncio_asks_of_its_classes_holds() -> None:
    assert asyncio.isfuture(SimFuture.__new__(SimFuture)) and asyncio.isfuture(SimTask.__new__(SimTask))


def test_a_class_is_made_anew_with_its_super_and_without_its_finalizer(monkeypatch: pytest.MonkeyPatch) -> None:
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
