"""What the supervisor decides about a reported call, and what it reports of that, without a program."""

from __future__ import annotations

import errno
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from nemesis.mechanisms.launcher import supervisor
from nemesis.mechanisms.launcher.account import AccountError
from nemesis.mechanisms.launcher.control import DELAYED, FAILED, HELD, REFUSED, UNDO_OVERFLOW, Settings
from nemesis.mechanisms.launcher.files import CHANGE, GROW, READ, SYNC, WRITE, Effect
from nemesis.mechanisms.launcher.filter import Call
from nemesis.mechanisms.launcher.supervisor import Ledger, Pending, Supervisor

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter for this machine")


class Listener:
    """Notes the answers: "go on", or an errno."""

    descriptor = 99

    def __init__(self) -> None:
        self.answers: dict[int, str | int] = {}

    def let_go_on(self, identity: int) -> None:
        assert identity not in self.answers
        self.answers[identity] = "go on"

    def finish(self, identity: int, error_number: int) -> None:
        assert identity not in self.answers
        self.answers[identity] = error_number


class Control:
    def __init__(self) -> None:
        self.now = Settings()
        self.met: list[tuple[int, str]] = []
        self.counters: list[int] = []
        self.recorded = 0

    def settings(self) -> Settings:
        return self.now

    def count_met(self, column: int, operation: str) -> None:
        self.met.append((column, operation))

    def add_to_counter(self, column: int) -> None:
        self.counters.append(column)

    def count_recorded(self) -> None:
        self.recorded += 1


class Account:
    """Notes what is recorded, or fails."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.recorded: list[Any] = []
        self._problem = problem

    def _note(self, *what: Any) -> None:
        if self._problem is not None:
            raise self._problem
        self.recorded.append(what)

    def changing(self, path: str, offset: int, length: int, *, is_cut: bool = False) -> None:
        self._note("changing", path, offset, length)

    def synced(self, status: os.stat_result, begun: int) -> None:
        self._note("synced", begun)

    def synced_everything(self, begun: int) -> None:
        self._note("synced everything", begun)


class Bench:
    """A supervisor whose calls are given by the test."""

    def __init__(self, account: Account | None = None, **more: Any) -> None:
        self.listener, self.control, self.account = Listener(), Control(), account
        self.supervisor = Supervisor(None, self.control, None, Ledger(), account, **more)  # type: ignore[arg-type]
        if account is not None:
            self.supervisor._syncs = object()  # type: ignore[assignment]  # there are threads for syncs
        self._calls = 0

    def call(self, operation: str, *, name: str = "write", action: str = "") -> int:
        """Make a call in a thread of its own; returns its identity."""
        return self.decide(Pending(self.listener, self._next(name), Effect(operation, action, "/data/file")))  # type: ignore[arg-type]

    def _next(self, name: str) -> Call:
        self._calls += 1
        return Call(self._calls, self._calls, name, ())

    def decide(self, pending: Pending) -> int:
        self.supervisor._decide(pending)
        return pending.call.id

    def synced(self, *, name: str, error_number: int) -> int:
        """A sync that began at 5 has ended."""
        pending = Pending(self.listener, self._next(name), Effect(SYNC, "", "/data/file"))  # type: ignore[arg-type]
        self.supervisor._synced(pending, 5, os.stat("/"), error_number)
        return pending.call.id


@pytest.mark.parametrize(
    ("settings", "fails", "error_number"),
    [
        (Settings(full=True), {GROW}, errno.ENOSPC),
        (Settings(error_write=True), {WRITE, GROW}, errno.EIO),
        (Settings(error_sync=True), {SYNC}, errno.EIO),
        (Settings(error_read=True), {READ}, errno.EIO),
        (Settings(), set[str](), 0),
    ],
)
def test_a_disk_fault_fails_its_own_kinds_of_calls_and_no_others(
    settings: Settings, fails: set[str], error_number: int
) -> None:
    bench = Bench()
    bench.control.now = settings
    for operation in (WRITE, GROW, READ, SYNC):
        before = len(bench.control.met)
        identity = bench.call(operation)
        is_failing = operation in fails
        assert bench.listener.answers[identity] == (error_number if is_failing else "go on")
        assert len(bench.control.met) - before == is_failing, "only what met a fault is counted as that"
    assert {column for column, _ in bench.control.met} <= {REFUSED if settings.full else FAILED}


@pytest.mark.parametrize(
    ("settings", "held", "column"),
    [
        (Settings(stall_sync=True), {SYNC}, HELD),
        (Settings(stall_all=True), {SYNC, WRITE, GROW}, HELD),
        (Settings(delay_ns=10**15), {SYNC, WRITE, GROW}, DELAYED),
    ],
)
def test_calls_wait_until_the_fault_is_healed_and_are_counted_once(
    settings: Settings, held: set[str], column: int
) -> None:
    bench = Bench()
    bench.control.now = settings
    made = {operation: bench.call(operation) for operation in (WRITE, GROW, READ, SYNC)}
    assert {operation for operation, each in made.items() if each not in bench.listener.answers} == held
    bench.supervisor._look_again()
    for pending in [*bench.supervisor.waiting.values()]:
        # A signal has interrupted the call, and the kernel has restarted it.
        bench.supervisor.ledger.answered(pending.call.id)
        bench.decide(pending)
    assert [met for met, _ in bench.control.met] == [column] * len(held)
    assert set(made.values()) <= set(bench.supervisor.ledger.unanswered()) | set(bench.listener.answers)
    bench.control.now = Settings()
    bench.supervisor._look_again()
    assert set(bench.listener.answers.values()) == {"go on"} and len(bench.listener.answers) == len(made)
    assert bench.supervisor.ledger.unanswered() == []


def test_a_call_that_cannot_be_held_goes_on_and_has_met_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.supervisor.ledger, "hold", lambda identity: False)
    bench.control.now = Settings(stall_all=True)
    assert bench.listener.answers[bench.call(WRITE)] == "go on" and bench.control.met == []


@pytest.mark.parametrize("problem", [AccountError("too much is unsynced"), OSError(errno.ENOSPC, "no space")])
def test_a_change_that_cannot_be_recorded_voids_the_account(problem: Exception) -> None:
    bench = Bench(Account(problem))
    assert bench.listener.answers[bench.call(WRITE, action=CHANGE)] == "go on"
    assert bench.control.counters == [UNDO_OVERFLOW] and bench.supervisor.account is None
    assert bench.control.recorded == 0


@pytest.mark.parametrize("problem", [FileNotFoundError(), NotADirectoryError()])
def test_a_call_about_a_missing_file_changes_nothing_and_leaves_the_account_as_it_is(problem: Exception) -> None:
    bench = Bench(Account(problem))
    bench.call(WRITE, action=CHANGE)
    assert bench.control.counters == [] and bench.supervisor.account is bench.account


def test_a_change_is_recorded_before_the_call_goes_on_unless_it_fails(tmp_path: Path) -> None:
    account = Account()
    bench = Bench(account)
    seen: list[int] = []
    bench.listener.let_go_on = lambda identity: seen.append(len(account.recorded))  # type: ignore[method-assign]
    bench.call(WRITE, action=CHANGE)
    assert seen == [1] and bench.control.recorded == 1
    bench.control.now = Settings(error_write=True)
    bench.call(WRITE, action=CHANGE)
    assert len(account.recorded) == 1, "what a fault has refused was not written"


def test_changes_beside_another_program_s_account_void_it_once() -> None:
    bench = Bench(has_foreign_account=True)
    bench.call(READ)
    assert bench.control.counters == []
    for _ in range(2):
        bench.call(WRITE, action=CHANGE)
    assert bench.control.counters == [UNDO_OVERFLOW]


def test_only_a_sync_that_succeeded_makes_anything_durable() -> None:
    account = Account()
    bench = Bench(account)
    assert bench.listener.answers[bench.synced(name="fsync", error_number=errno.EIO)] == errno.EIO
    assert account.recorded == []
    for name in ("fsync", "sync"):
        assert bench.listener.answers[bench.synced(name=name, error_number=0)] == 0
    assert account.recorded == [("synced", 5), ("synced everything", 5)]


def test_a_sync_that_cannot_be_recorded_voids_the_account() -> None:
    bench = Bench(Account(AccountError("too long")))
    assert bench.listener.answers[bench.synced(name="fsync", error_number=0)] == 0
    assert bench.control.counters == [UNDO_OVERFLOW]


def test_a_sync_reports_the_error_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "quota")

    assert supervisor._sync(str(tmp_path / "file"), "fsync")[1] == 0
    assert supervisor._sync(str(tmp_path / "gone"), "fsync") == (None, errno.ENOENT)
    monkeypatch.setitem(supervisor._SYNCS, "fsync", fail)  # type: ignore[arg-type]
    assert supervisor._sync(str(tmp_path / "file"), "fsync") == (None, errno.EDQUOT)
