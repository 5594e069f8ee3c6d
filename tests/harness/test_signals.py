"""Signals that end a command: what it has found is kept, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from harness import cli
from harness.cli_parser import build_parser
from harness.commands import run
from harness.report.console import _keys_unseen
from harness.signals import REPEAT_WINDOW_S, ended_by_signals, fork, ignore_repeated_signals, interrupted_by_signals
from tests.terminals import open_terminal

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_exit_or_interrupt_and_their_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match=str(128 + number)), ended_by_signals():
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt_the_preparation_of_a_run(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Trials of what this machine supports create files, which they remove when interrupted."""

    def heard(*_: object, **__: object) -> NoReturn:
        assert signal.getsignal(number) is not signal.SIG_DFL  # which would end this process
        os.kill(os.getpid(), number)
        raise AssertionError("it goes on")

    monkeypatch.setattr(run, "prepare_test", heard)
    with pytest.raises(KeyboardInterrupt):
        run.prepare(build_parser().parse_args(["run"]))


def test_a_hangup_ignored_by_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals(), interrupted_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_in_the_hooks_of_a_fork_interrupts_after_the_fork(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wanted: list[int] = []
    pids: list[int] = []
    really_fork = os.fork

    def signalled() -> None:
        if wanted:
            os.kill(os.getpid(), wanted.pop())

    def noted() -> int:
        pids.append(really_fork())
        return pids[-1]

    os.register_at_fork(after_in_parent=signalled)
    monkeypatch.setattr(os, "fork", noted)
    waits = threading.Event()
    other = threading.Thread(target=waits.wait)  # which receives the signals that this one blocks
    other.start()
    request.addfinalizer(waits.set)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    for number in (signal.SIGINT, signal.SIGTERM):
        wanted.append(number)
        with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
            if fork() == 0:
                signal.pause()  # until it is killed
        assert not wanted
        with pytest.raises(ChildProcessError):
            os.waitpid(pids[-1], os.WNOHANG)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_a_command_may_be_called_in_another_thread_whose_signals_stay_as_they_are() -> None:
    """Only the main thread can set handlers."""
    before, seen = signal.getsignal(signal.SIGTERM), list[object]()

    def command() -> None:
        with ended_by_signals(), interrupted_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=command)
    thread.start()
    thread.join()
    assert seen == [before]


_FORKS = """
import os, signal
from harness.signals import fork, interrupted_by_signals
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
with interrupted_by_signals():
    try:
        pid = fork()
    except KeyboardInterrupt:
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_signal_that_reaches_a_forked_child_interrupts_only_the_child() -> None:
    forking = subprocess.run(
        [sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert (forking.returncode, forking.stdout) == (0, "7\n"), forking.stderr


@pytest.mark.usefixtures("hears_hangups")
def test_repeated_signals_right_after_the_first_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed_again(wait_s: float) -> None:
        assert wait_s == REPEAT_WINDOW_S
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(time, "sleep", pressed_again)
    with interrupted_by_signals():
        ignore_repeated_signals()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_while_the_first_is_reported_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def interrupted(*words: object) -> NoReturn:
        said.append(str(words))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_perform", interrupted)
    monkeypatch.setattr(cli, "say", interrupted)
    assert cli.main(["list"]) == cli.EXIT_HARNESS_FAILED
    assert "harness: interrupted" in said[-1]


def test_a_closed_terminal_is_no_error_when_its_mode_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = open_terminal()
    with open(its, "rb", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with _keys_unseen():
            os.close(ours)
        with pytest.raises(termios.error):
            termios.tcgetattr(its)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A search that has found a failure and is still running."""
    words = ["explore", "--nodes", "3", "--nemesis", "partition", "--set", "read_mode=unsafe", "--budget", "10m",
             "--time-limit", "6", "--jobs", "1", "--json", "--store", str(tmp_path / "store")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and "INVALID" not in line:
            pass
        assert line
        yield process


def _is_kept(store: Path) -> bool:
    return bool(list((store / "schedules").glob("*.json")) and list(store.glob("*/*/results.json")))


@pytest.mark.timeout(300)
def test_an_interrupted_search_keeps_its_failures(tmp_path: Path, search: subprocess.Popen[str]) -> None:
    assert search.stdout is not None and search.stderr is not None
    search.send_signal(signal.SIGTERM)
    said, summary = search.stderr.read(), search.stdout.read()
    assert search.wait() == 1, said
    assert "interrupted; results so far are kept" in said
    assert '"interrupted": true' in summary
    assert _is_kept(tmp_path / "store")


@pytest.mark.timeout(120)
def test_a_search_interrupted_twice_keeps_its_failures(tmp_path: Path, search: subprocess.Popen[str]) -> None:
    assert search.stdout is not None and search.stderr is not None
    search.send_signal(signal.SIGINT)
    time.sleep(0.1)
    search.send_signal(signal.SIGINT)
    said, summary = search.stderr.read(), search.stdout.read()
    assert search.wait() == 1, said
    assert '"interrupted": true' in summary
    assert _is_kept(tmp_path / "store")


@pytest.mark.timeout(300)
def test_a_search_whose_error_stream_is_closed_keeps_its_failures(
    tmp_path: Path, search: subprocess.Popen[str]
) -> None:
    assert search.stdout is not None and search.stderr is not None
    search.stderr.close()
    assert search.stdout.read() == ""
    assert search.wait() == 255
    assert _is_kept(tmp_path / "store")
