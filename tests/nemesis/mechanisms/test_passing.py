"""The machine code that lets reported calls continue while no fault is in force, and lets no other call continue."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemesis.mechanisms.launcher.filter import SYSCALLS, Listener, Listeners, install_filter
from nemesis.mechanisms.launcher.passing import Passing
from nemesis.mechanisms.launcher_archive import why_no_traps, why_not_attached
from tests.nemesis.mechanisms.launched import Program

pytestmark = [
    pytest.mark.skipif(why_no_traps() is not None, reason=str(why_no_traps())),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are of x86-64"),
]
GENERATION = 7


class Reported:
    """A child whose syncs and writes are reported to a listener here; it does its work after `begin`."""

    def __init__(self, work: Callable[[], bool]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                descriptor = install_filter(["sync", "write"])
                socket.send_fds(theirs, [b"+"], [descriptor])
                os.close(descriptor)
                theirs.recv(1)
                status = 0 if work() else 1
            finally:
                os._exit(status)
        theirs.close()
        _, sent, _, _ = socket.recv_fds(ours, 1, 1)
        self.listener = Listener(sent[0], platform.machine())
        self.newest, self.generation = ctypes.c_uint64(0), ctypes.c_uint64(GENERATION)
        self._channel = ours

    def begin(self) -> None:
        self._channel.send(b"+")

    def watch(self, passing: Passing, others: list[int], timeout_s: float | None) -> None:
        passing.watch([self.listener], [ctypes.addressof(self.newest)], others, timeout_s)

    def serve(self, passing: Passing) -> tuple[int, bytearray] | None:
        return passing.serve(ctypes.addressof(self.generation), GENERATION)

    def worked(self) -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0

    def close(self) -> None:
        os.close(self.listener.descriptor)
        self._channel.close()


def syncs(path: Path, count: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    for _ in range(count):
        os.fsync(descriptor)
    return True


@pytest.fixture
def reported() -> Iterator[Callable[[Callable[[], bool]], Reported]]:
    made: list[Reported] = []

    def make(work: Callable[[], bool]) -> Reported:
        made.append(Reported(work))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_calls_continue_until_the_process_has_ended_and_the_newest_is_noted(
    reported: Callable[[Callable[[], bool]], Reported], tmp_path: Path
) -> None:
    child, passing = reported(lambda: syncs(tmp_path, 50)), Passing()
    child.watch(passing, [], None)
    child.begin()
    assert child.serve(passing) is None
    assert child.worked() and passing.count == 51  # the syncs, and the open
    assert child.newest.value != 0


def test_a_left_out_call_is_returned_unanswered(
    reported: Callable[[Callable[[], bool]], Reported], tmp_path: Path
) -> None:
    def work() -> bool:
        syncs(tmp_path, 3)
        try:
            os.rename(tmp_path / "a", tmp_path / "b")
        except OSError as error:
            return error.errno == errno.EUCLEAN and syncs(tmp_path, 2)
        return False

    child, passing = reported(work), Passing([SYSCALLS["x86_64"]["rename"]])
    child.watch(passing, [], None)
    child.begin()
    found = child.serve(passing)
    assert found is not None and found[0] == 0 and passing.count == 4
    call = child.listener.call(found[1])
    assert call.name == "rename" and call.thread == child.pid and call.id == child.newest.value
    child.listener.finish(call.id, errno.EUCLEAN)
    assert child.serve(passing) is None
    assert child.worked() and passing.count == 7


def test_no_call_continues_under_new_settings(
    reported: Callable[[Callable[[], bool]], Reported], tmp_path: Path
) -> None:
    child, passing = reported(lambda: syncs(tmp_path, 1)), Passing()
    child.watch(passing, [], None)
    child.generation.value = GENERATION + 1
    child.begin()
    found = child.serve(passing)
    assert found is not None and passing.count == 0
    child.listener.let_go_on(child.listener.identity(found[1]))
    child.generation.value = GENERATION
    assert child.serve(passing) is None
    assert child.worked() and passing.count == 1


def test_new_settings_and_wake_ups_end_the_wait_without_a_call(
    reported: Callable[[Callable[[], bool]], Reported],
) -> None:
    child, passing = reported(lambda: True), Passing()
    child.generation.value = GENERATION + 1
    child.watch(passing, [], 0.01)
    assert child.serve(passing) is None
    child.generation.value = GENERATION
    woken, wake = os.pipe()
    os.write(wake, b"!")
    child.watch(passing, [woken], None)
    assert child.serve(passing) is None
    os.close(woken)
    os.close(wake)
    child.begin()
    assert child.worked() and passing.count == 0


def test_a_repeating_timer_ends_every_wait_without_a_call(
    reported: Callable[[Callable[[], bool]], Reported],
) -> None:
    child, passing, listeners = reported(lambda: True), Passing(), Listeners()
    listeners.add(os.dup(child.listener.descriptor))
    before = listeners.changes
    listeners.wake_every(0.01)
    assert listeners.changes == before + 1 and len(listeners.woken) == 1
    child.watch(passing, [*listeners.woken], None)
    for _ in range(3):
        assert child.serve(passing) is None  # without the timer none of these would return
        assert listeners.wait(None) == []
    child.begin()
    assert child.worked() and passing.count == 0
    while listeners.wait(None) is not None:
        pass
    os.close(listeners.woken[0])


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A running program whose calls are not reported before its first fault."""
    made = Program(tmp_path, attaches=True)
    try:
        assert made.do("clock")
        yield made
    finally:
        made.close()


@pytest.mark.skipif(why_not_attached() is not None, reason=str(why_not_attached()))
def test_new_settings_between_faults_take_effect_even_while_no_call_is_made(program: Program) -> None:
    program.impair("error-fsync")
    assert program.do("sync") == "Input/output error"
    program.mend()
    assert program.do("sync") == "ok"
    for fault in ("error-fsync", "error-write"):
        program.impair(fault)  # waits until its supervisor says that it has followed
        program.mend()
    assert program.do("sync") == program.do("write") == "ok"


@pytest.mark.skipif(why_not_attached() is not None, reason=str(why_not_attached()))
def test_calls_between_faults_continue_and_the_next_fault_affects_the_first_call(program: Program) -> None:
    program.impair("error-fsync")
    assert program.do("sync") == "Input/output error"
    program.mend()
    assert {program.do(call) for call in ["sync", "write", "grow", "create new"] * 5} == {"ok"}
    before = program.count()
    program.impair("error-write")
    assert program.do("write") == program.do("create newer") == "Input/output error" and program.do("sync") == "ok"
    assert program.count().failed == before.failed + 2
    program.mend()
    assert program.do("write") == "ok"
    os.kill(program.helpers()["fault-calls"], signal.SIGKILL)
    assert program.do("write") == program.do("sync") == "ok"
