"""Settings for every test.

The garbage collector runs rarely, not at all before the first test, and never looks at objects from before it:
traversing thousands of collected tests and all modules, again and again, took a twentieth of the processor time, and
an eighth of it during collection.

Tests of one `xdist_group` must not run at the same time, and would with incompatible versions of pytest-xdist and
pytest: these end the run.

Hypothesis has no deadline: tests assert no times, and a busy machine is no bug. If `CI` is set the examples are the
same on every run, so that a change is judged on its own; otherwise they are new each time, so that the search goes on.

Ctrl-C works even if the tests were started with `&` in a script, which makes its background processes ignore SIGINT:
tests send SIGINT to programs that they start.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("search"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "search")

GC_THRESHOLDS = (20_000, 20, 50)
"""As in a simulated run; Python's own are 700, 10 and 10 (up to 3.13)."""


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist 3.8 sets a test's group with this attribute, which pytest 9.2 no longer has and ignores.
    if getattr(config.option, "dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(
            f"pytest-xdist does not keep the tests of a group together with pytest {pytest.__version__}: "
            "pip install 'pytest<9.2'"
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.implementation.name == "cpython":
        gc.disable()  # until the tests are collected


def pytest_collection_finish() -> None:
    if sys.implementation.name == "cpython":
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        gc.enable()


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """The default handling of SIGHUP: programs that `nohup` starts inherit that it is ignored, and pass that on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def node_exceptions() -> Iterator[list[str]]:
    """What nodes log with a traceback while they live: closing a killed one's coroutines may raise."""
    from harness.clusters.sim.lane import LANE  # not needed by other tests

    found: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lane = LANE.get(None)
            if record.exc_info and (lane is None or not lane.is_dead):
                found.append(f"{record.getMessage()}: {record.exc_info[1]}")

    collecting, logger = Collecting(), logging.getLogger("node")
    logger.addHandler(collecting)
    yield found
    logger.removeHandler(collecting)
