"""Which run a process belongs to, by its environment, whatever state the process is in."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import process_table
from harness.clusters import host_agent
from harness.process_table import (
    ProcessId,
    find_processes,
    is_in_group,
    is_in_namespace,
    kill_until_gone,
    marked_with,
    variable_of,
)
from harness.run_state import living_thread, process_start_ticks
from nemesis.mechanisms.launcher import marks

VARIABLE = "SPLITBRAIN_PROGRAM"
MARK = f"of-a-test-{os.getpid()}"

READERS: dict[str, Callable[[int], bool]] = {
    "harness": marked_with(VARIABLE, MARK),
    "agent": lambda pid: host_agent._mark_of(pid) == MARK.encode(),
    "launcher": lambda pid: marks.mark_of(pid) == f"{VARIABLE}={MARK}".encode(),
}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: MARK}) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("ends_before", ["environ", "stat"])
@pytest.mark.parametrize("reads_in_exec", [1, 5])
def test_a_process_in_the_middle_of_an_exec_is_read_again_until_it_shows_its_mark(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, name: str, ends_before: str, reads_in_exec: int
) -> None:
    """In the middle of an exec the kernel shows no environment, and no address of one. About one in a thousand new
    processes is read in that state, so the test simulates it. If the exec ends after the environment was read as empty
    and before `stat` is read, `stat` has the address of an environment that can be read by then.
    """
    left = [reads_in_exec]

    def as_in_exec(path: str, shown: bytes) -> bytes:
        if left[0] and path == f"/proc/{process.pid}/environ":
            left[0] -= 1
            return b""
        if path == f"/proc/{process.pid}/stat" and (left[0] or ends_before == "environ"):
            before, bracket, after = shown.rpartition(b")")
            fields = after.split()
            return before + bracket + b" " + b" ".join([*fields[:45], b"0", b"0", b"0", b"0", *fields[49:]])
        return shown

    read_bytes, real_open = Path.read_bytes, open

    def opened(path: Any, *arguments: Any, **more: Any) -> Any:
        with real_open(path, *arguments, **more) as file:
            return io.BytesIO(as_in_exec(str(path), file.read()))

    monkeypatch.setattr(Path, "read_bytes", lambda path: as_in_exec(str(path), read_bytes(path)))
    monkeypatch.setattr(marks, "open", opened, raising=False)
    assert READERS[name](process.pid)
    assert left == [0]


@pytest.mark.parametrize("name", READERS)
def test_a_new_process_shows_its_mark_at_once(process: subprocess.Popen[bytes], name: str) -> None:
    assert READERS[name](process.pid)


@pytest.mark.parametrize("name", READERS)
def test_a_process_without_an_environment_has_no_mark(name: str) -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as child:
        try:
            assert not READERS[name](child.pid)
        finally:
            child.kill()
        child.wait()
        assert not READERS[name](child.pid), "nor has a process that has ended"


def test_a_process_that_is_gone_is_in_no_namespace_and_in_no_group() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert not is_in_group(lambda name: True)(child.pid)
    own = os.stat("/proc/self/ns/net")
    assert is_in_namespace((own.st_dev, own.st_ino))(os.getpid())
    assert not is_in_namespace((own.st_dev, own.st_ino))(child.pid)


def test_a_process_that_survives_is_waited_for_only_until_the_time_is_up(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in the kernel does."""
    start_ticks = process_start_ticks(process.pid)
    assert start_ticks is not None
    survivor = ProcessId(process.pid, start_ticks)
    asked: list[ProcessId] = []
    monkeypatch.setattr(process_table, "_kill", asked.append)
    assert kill_until_gone(lambda: [survivor], timeout_s=0.2) == [survivor]
    assert set(asked) == {survivor} and survivor.exists


_FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("begun", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_the_environment_of_a_process_whose_first_thread_has_ended_is_that_of_another_thread() -> None:
    environment = {**os.environ, VARIABLE: MARK}
    argv = [sys.executable, "-c", _FIRST_THREAD_ENDS]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "begun\n"
            deadline_s = time.monotonic() + 30
            while living_thread(child.pid) == child.pid:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            [found] = find_processes(marked_with(VARIABLE, MARK))
            assert found.pid == child.pid and variable_of(found, VARIABLE) == MARK
        finally:
            child.kill()
