"""The guard: simulated code that reaches for the real world is detected."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
import threading
import time
import types
from typing import Any

import pytest

from harness.clusters.sim.errors import NotSimulated
from harness.clusters.sim.guard import guarded
from harness.clusters.sim.simulation import run_simulated


def as_node_code(source: str, **names: Any) -> Any:
    """Run source as if it were in a module of the package `node`."""
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
        ("import time; time.clock_gettime(time.CLOCK_MONOTONIC)", "clock_gettime"),
        ("import random; random.random()", "random"),
        ("import random; random.shuffle([1, 2])", "shuffle"),
        ("import os; os.urandom(4)", "urandom"),
        ("import uuid; uuid.uuid4()", "uuid4"),
        ("import secrets; secrets.token_hex()", "urandom"),
        ("import random; random.SystemRandom().random()", "urandom"),
        ("import random; random.Random()", "seed"),
        ("open('/dev/null')", "open"),
        ("import io; io.open('/dev/null')", "open"),
        ("import os; os.open('/dev/null', os.O_RDONLY)", "open"),
        ("import os; os.path.exists('/')", "stat"),
        ("import pathlib; pathlib.Path('/dev/null').read_bytes()", "open"),
        ("import tempfile; tempfile.mkdtemp()", "(getpid|seed|mkdtemp)"),
        ("import shutil; shutil.rmtree('/nowhere')", "rmtree"),
        ("import mmap; mmap.mmap(-1, 1)", "mmap"),
        ("import fcntl; fcntl.flock(0, fcntl.LOCK_UN)", "fcntl"),
        ("import os; os.listdir('/')", "listdir"),
        ("import socket; socket.socket()", "socket"),
        ("import socket; socket.socketpair()", "socket"),
        ("import _socket; _socket.socket()", "socket"),
        ("import socket; socket.gethostbyname('localhost')", "socket"),
        ("import subprocess; subprocess.run(['true'])", "Popen"),
        ("import os; os.system('true')", "os.system"),
        ("import os; os.fork()", "os.fork"),
        ("import os; os.kill(0, 0)", "os.kill"),
        ("import os; os.chmod('/nowhere', 0)", "os.chmod"),
        ("import pathlib; pathlib.Path('/nowhere').rmdir()", "os.rmdir"),
        ("import os; os.getpid()", "getpid"),
        ("import threading; threading.Thread(target=print).start()", "start"),
        ("import _thread; _thread.start_new_thread(print, ())", "start_new_thread"),
        ("import concurrent.futures as f; f.ThreadPoolExecutor(1).submit(print)", "start"),
    ],
)
def test_real_world_calls_of_node_code_are_refused(source: str, what: str) -> None:
    with pytest.raises(NotSimulated, match=rf"node/offender\.py:1 calls .*{what}"), guarded():
        as_node_code(source)


SILENT = pytest.mark.skipif(
    sys.implementation.name == "pypy",
    reason="PyPy raises no audit events for functions of os; test_architecture keeps the node from importing it",
)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("take('/dev/null')", "open"),
        pytest.param("listdir('/')", "listdir", marks=SILENT),
        ("connect(('127.0.0.1', 9))", "socket"),
    ],
)
def test_functions_bound_before_the_guard_was_installed_are_refused_too(source: str, what: str) -> None:
    with socket.socket() as unconnected:
        taken = {"take": open, "listdir": os.listdir, "connect": unconnected.connect}
        with pytest.raises(NotSimulated, match=rf"node/offender\.py:1 calls .*{what}"), guarded():
            as_node_code(source, **taken)


@pytest.mark.parametrize(
    "call",
    [
        "await asyncio.to_thread(print)",
        "await asyncio.open_unix_connection('/nowhere')",
        "await asyncio.create_subprocess_exec('true')",
        "asyncio.get_running_loop().add_reader(0, print)",
        "await asyncio.get_running_loop().sock_recv(None, 1)",
    ],
)
def test_a_simulated_loop_refuses_unsupported_calls(call: str) -> None:
    source = f"import asyncio\nasync def work():\n    {call}\nresult = work"
    with pytest.raises(NotSimulated, match="in simulation"):
        run_simulated(as_node_code(source)(), seed=1)


def test_the_guard_allows_the_harness_logging_and_seeded_randomness() -> None:
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


def test_a_refusal_that_the_node_swallowed_is_raised_at_the_end() -> None:
    before = time.time
    with pytest.raises(NotSimulated, match=r"time\.time"), guarded() as guard:
        as_node_code("import time\ntry:\n    time.time()\nexcept Exception:\n    pass")
        assert len(guard.violations) == 1
    assert time.time is before


def test_real_world_calls_in_coroutines_of_the_node_are_refused() -> None:
    source = "import time\nasync def work():\n    return time.time()\nresult = work"
    with pytest.raises(NotSimulated), guarded():
        asyncio.run(as_node_code(source)())
