"""The line that shows how long a step has been running: only on a terminal, and erased at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.elapsed_line import elapsed_line
from tests.terminals import open_terminal

ROOT = Path(__file__).resolve().parents[2]
HISTORY = '{"process": 0, "type": "invoke", "f": "write", "value": 1}\n{"process": 0, "type": "ok", "f": "write"}\n'
FIRST = "import harness.elapsed_line as module; module.EVERY_S = 0.001; "


def run_on_terminal(code: str, *words: str) -> tuple[int, str, str]:
    """Run Python with a terminal as its standard error; returns its status, its output and what the terminal got."""
    ours, its = open_terminal()
    argv = [sys.executable, "-c", FIRST + code, *words]
    try:
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=its, text=True, timeout=60)
    finally:
        os.close(its)
    got = b""
    while chunk := _read(ours):
        got += chunk
    os.close(ours)
    return done.returncode, done.stdout, got.decode()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other end is closed
        return b""


def test_a_terminal_shows_the_elapsed_time_and_the_line_is_erased() -> None:
    code = "import time\nwith module.elapsed_line('counting'): time.sleep(0.1)"
    status, _, shown = run_on_terminal(code)
    assert status == 0
    assert shown.startswith("\rcounting: 0 s")
    assert shown.endswith(f"\r{' ' * len('counting: 0 s')}\r")


@pytest.mark.parametrize("files", [1, 2])
def test_check_shows_which_files_it_is_checking(tmp_path: Path, files: int) -> None:
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(files)]
    for path in paths:
        Path(path).write_text(HISTORY * 3000)
    code = "import sys; from harness.cli import main; sys.exit(main(['check', '--model', 'register', *sys.argv[1:]]))"
    status, output, shown = run_on_terminal(code, *paths)
    assert status == 0 and "valid" in output and "checking" not in output
    assert (f"\rchecking {paths[0]}: 0 s" if files == 1 else "\rchecking 2 files: 0 s") in shown
    assert shown.rstrip("\r").endswith(" ")


def test_nothing_is_printed_without_a_terminal() -> None:
    code = FIRST + "import time\nwith module.elapsed_line('counting'): time.sleep(0.1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_other_threads_and_a_foreign_alarm_handler_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = open_terminal()
    with open(its, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        failed: list[BaseException] = []

        def elsewhere() -> None:
            try:
                with elapsed_line("counting"):
                    pass
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert failed == []
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        try:
            with elapsed_line("counting"):
                assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGALRM, before)
    os.close(ours)
