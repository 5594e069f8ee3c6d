"""Whose a process is, by its environment, whatever state it is in."""

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

LOOKS: dict[str, Callable[[int], bool]] = {
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


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("ends_before", ["environ", "stat"])
@pytest.mark.parametrize("looks_in_exec", [1, 5])
def test_a_process_that_becomes_another_program_is_looked_at_when_it_has(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, name: str, ends_before: str, looks_in_exec: int
) -> None:
    """In the middle of an exec the kernel shows no environment, and no place of one. Such a moment cannot be had on
    purpose: one of some thousand new processes is met in it, as soon as its parent goes on. Where the exec ends before
    `stat` is read, after which nothing had been shown, that has the place of an environment that is there to be read.
    """
    left = [looks_in_exec]

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
    assert LOOKS[name](process.pid)
    assert left == [0]


@pytest.mark.parametrize("name", LOOKS)
def test_a_process_is_its_programs_as_soon_as_it_has_begun(process: subprocess.Popen[bytes], name: str) -> None:
    assert LOOKS[name](process.pid)


@pytest.mark.parametrize("name", LOOKS)
def test_a_process_with_no_environment_is_nobodys(name: str) -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as child:
        try:
            assert not LOOKS[name](child.pid)
        finally:
            child.kill()
        child.wait()
        assert not LOOKS[name](child.pid), "nor is one that is gone"
