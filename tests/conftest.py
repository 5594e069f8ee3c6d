"""What holds for every test.

Cycles of garbage are looked for rarely, not at all before the first test, and what was there before it is not looked
through: thousands of collected tests and the modules of everything, again and again, were a twentieth of the processor
time, and while they came to be an eighth of it.

Tests of one `xdist_group` must not run at the same time, and would where pytest-xdist and pytest do not fit: that ends
the run.

Hypothesis has no deadline: tests assert no times, and a busy machine is no bug. Where `CI` is set the examples are the
same on every run, so that a change is judged by itself; elsewhere they are new each time, so that the search goes on.

Ctrl-C is heeded, also where the tests were started by `&` in a script, which has all that comes of it ignore SIGINT:
tests send it to programs that they start.
"""

from __future__ import annotations

import gc
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
    # By this attribute pytest-xdist 3.8 gives a test its group; pytest 9.2 has no such attribute and heeds none.
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
    """SIGHUP as a terminal leaves it: what `nohup` started has inherited that it is ignored, and keeps that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
