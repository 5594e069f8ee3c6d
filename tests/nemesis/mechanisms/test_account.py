"""The account of an attached program's unsynced data: it begins shortly before a power cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemesis.mechanisms.launcher_archive import why_not_attached
from nemesis.mechanisms.undo_log import take_back_script
from tests.nemesis.mechanisms.launched import Program, wait_until

pytestmark = pytest.mark.skipif(why_not_attached() is not None, reason=str(why_not_attached()))

CHILD = """
import os, sys
root = sys.argv[1]
def at(name):
    return os.path.join(root, name)
opened = {name: os.open(at(name), os.O_RDWR | os.O_CREAT) for name in ("old", "log")}
DO = {
    "open": lambda name: opened.setdefault(name, os.open(at(name), os.O_CREAT | os.O_RDWR)),
    "open-through": lambda name: opened.setdefault(name, os.open(at(name), os.O_CREAT | os.O_RDWR | os.O_DSYNC)),
    "duplicate": lambda name: os.dup2(os.dup(opened[name]), 600),
    "append": lambda name, text: os.pwrite(opened[name], text.encode(), os.fstat(opened[name]).st_size),
    "sync": lambda name: os.fsync(opened[name]),
    "unlink": lambda name: os.unlink(at(name)),
    "rename": lambda name, other: os.rename(at(name), at(other)),
}
for line in sys.stdin:
    name, *arguments = line.split()
    DO[name](*arguments)
    print("ok", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(tmp_path / "data")]
    made = Program(tmp_path, argv, attaches=True, keeps_account=True)
    do(made, "append old before")
    yield made
    made.close()
    wait_until(lambda: made.helpers() == {})


def do(program: Program, *lines: str) -> None:
    for line in lines:
        assert program.do(line) == "ok"


def content(program: Program) -> dict[str, str]:
    return {path.name: path.read_text() for path in program.root.iterdir()}


def cut(program: Program, model: str) -> tuple[int, int, int]:
    """Cut the power; returns the lost (operations, bytes, files)."""
    program.close()
    argv = [sys.executable, "-I", "-S", "-", str(program.undo), str(program.root), model, "7"]
    done = subprocess.run(argv, input=take_back_script(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["operations"], found["bytes"], len(found["files"])


@pytest.mark.parametrize("model", ["ext4", "posix", "torn"])
def test_writes_before_the_account_are_durable_and_later_unsynced_ones_are_lost(program: Program, model: str) -> None:
    do(program, "open gone", "append gone whole")
    program.keep_account()
    assert program.count().recorded == 0 and program.count().traps_reached == 1
    do(program, "append log kept", "sync log", "append old after", "open new", "append new young", "unlink gone")
    assert program.count().recorded == 5
    lost = cut(program, model)
    left = content(program)
    assert left["log"] == "kept" and left["gone"] == "whole" and left["old"].startswith("before")
    if model == "torn":
        assert left["old"] in ("before", "beforeafter")
    else:
        assert left == {"log": "kept", "gone": "whole", "old": "before"}
        assert lost == (4, 10, 3) and os.listdir(program.undo) == []


def test_a_synchronous_write_makes_the_name_of_a_new_file_durable(program: Program) -> None:
    program.keep_account()
    do(program, "open-through new", "append new kept", "open other", "append other lost")
    cut(program, "ext4")
    assert content(program) == {"old": "before", "log": "", "new": "kept"}


def test_duplicating_a_descriptor_is_no_change_of_its_file(program: Program) -> None:
    program.keep_account()
    do(program, "duplicate log")
    assert program.count().recorded == 0
    cut(program, "ext4")


def test_an_ended_account_undoes_nothing_and_the_next_one_starts_empty(program: Program) -> None:
    program.keep_account()
    do(program, "append old first")
    program.mend()
    wait_until(lambda: os.path.getsize(program.undo / "log") > 0)
    program.faults.remove_disk_fault("account")
    program.apply()
    wait_until(lambda: program.count().traps_generation >= program.faults.generation)
    assert os.path.getsize(program.undo / "log") == 0
    do(program, "append old second", "rename old renamed")
    program.keep_account()
    do(program, "append old third")
    cut(program, "ext4")
    assert content(program) == {"log": "", "renamed": "beforefirstsecond"}


def test_a_write_fault_before_and_during_an_account_does_not_affect_it(program: Program) -> None:
    program.impair("slow", delay_ms=1)
    do(program, "append log slow", "open new")
    program.keep_account()
    do(program, "append old lost", "append new lost")
    program.mend()
    do(program, "append log lost")
    assert cut(program, "ext4") == (3, 12, 3)
    assert content(program) == {"log": "slow", "new": "", "old": "before"}


def test_an_account_whose_supervisor_was_killed_is_void(program: Program) -> None:
    program.keep_account()
    do(program, "append old recorded")
    os.kill(program.helpers()["fault-calls"], signal.SIGKILL)
    do(program, "append old unseen")
    wait_until(lambda: program.counters().undo_overflow == 1 and program.count().lost == 1)


def test_a_program_started_while_an_account_is_kept_is_recorded_from_its_start(tmp_path: Path) -> None:
    """As after another fault ended it just before the cut. Unsynced writes of the previous process are lost too."""
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(tmp_path / "data")]
    first = Program(tmp_path, argv, attaches=True, keeps_account=True)
    do(first, "append old before")
    first.keep_account()
    do(first, "append old first")
    first.close()
    second = first.start()
    try:
        do(second, "append old second")
        assert second.count().recorded == 1
    finally:
        cut(second, "ext4")
    assert content(second) == {"old": "before", "log": ""}
    wait_until(lambda: second.helpers() == {})
