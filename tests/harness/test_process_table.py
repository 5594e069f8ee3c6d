"""Which run a process belongs to, by its environment, whatever state the process is in."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.clusters import host_agent
from harness.process_table import marked_with
from nemesis.mechanisms.launcher import marks

VARIABLE = "SPLITBRAIN_PROGRAM"

READERS: dict[str, Callable[[int], bool]] = {
    "harness": marked_with(VARIABLE, "of-a-test"),
    "agent": lambda pid: host_agent._mark_of(pid) == b"of-a-test",
    "launcher": lambda pid: marks.mark_of(pid) == f"{VARIABLE}=of-a-test".encode(),
}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: "of-a-test"}) as child:
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
