"""The guard: simulated code that reaches for the real world is found out."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
import time
import types
from typing import Any

import pytest

from harness.clusters.sim.errors import NotSimulated
from harness.clusters.sim.guard import guarded


def as_node_code(source: str, **names: Any) -> Any:
    """Run source as if it stood in a module of the package `node`."""
    module = types.ModuleType("node.offender")
    module.__dict__.update(names)
    exec(compile(source, "node/offender.py", "exec"), module.__dict__)
    return module.__dict__.get("result")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import time; time.time()", "time.time"),
        ("import time; time.monotonic_ns()", "time.monotonic_ns"),
        ("import time; time.sleep(0)", "time.sleep"),
        ("import random; random.random()", "random"),
        ("import random; random.shuffle([1, 2])", "shuffle"),
        ("import os; os.urandom(4)", "urandom"),
        ("import uuid; uuid.uuid4()", "uuid4"),
        ("open('/dev/null')", "open"),
        ("import os; os.listdir('/')", "listdir"),
        ("import socket; socket.socket()", "socket"),
        ("import threading; threading.Thread(target=print).start()", "start"),
    ],
)
def test_node_code_is_refused(source: str, what: str) -> None:
    with pytest.raises(NotSimulated, match=rf"node/offender\.py:1 calls .*{what}"), guarded():
        as_node_code(source)


def test_the_harness_and_what_logging_does_pass() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("node.guard-test")
    logger.addHandler(handler)
    with guarded() as guard:
        assert time.time() > 0 and random.random() < 1 and len(os.urandom(2)) == 2
        socket.socket().close()
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        as_node_code("logger.warning('written by the node')", logger=logger)
        result = as_node_code("import random; result = random.Random(1).random()")
    assert guard.violations == []
    assert [record.getMessage() for record in records] == ["written by the node"]
    assert result == random.Random(1).random()


def test_an_attempt_that_was_swallowed_still_shows() -> None:
    before = time.time
    with pytest.raises(NotSimulated, match=r"time\.time"), guarded() as guard:
        as_node_code("import time\ntry:\n    time.time()\nexcept Exception:\n    pass")
        assert len(guard.violations) == 1
    assert time.time is before


def test_coroutines_of_the_node_are_watched_too() -> None:
    source = "import time\nasync def work():\n    return time.time()\nresult = work"
    with pytest.raises(NotSimulated), guarded():
        asyncio.run(as_node_code(source)())
