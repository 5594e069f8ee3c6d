"""Standard streams that are closed, full or of width 0: no status is a false verdict, no output ends up in a file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from harness.cli import main
from harness.report import OutputConsole
from harness.store import RunStatus, Store

ROOT = Path(__file__).resolve().parents[2]
RUN = "-m harness run --cluster sim --nodes 3 --time-limit 0.3 --seed 1"

NO_ROOM = "harness: cannot write the store or the output: No space left on device; free some space"


def shell(words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a shell, which closes and redirects its streams."""
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} {words}"], cwd=cwd, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (f"{RUN} 2>/dev/full", 254),
        ("-m harness list nothing.py 2>/dev/full", 254),
        ("-m harness run --nodes x 2>/dev/full", 254),
        ("-m harness check --model nosuch x 2>/dev/full", 254),
        ("-m node broker --config nothing 2>/dev/full", 254),
        ("-m node frobnicate 2>/dev/full", 254),
    ],
)
def test_a_full_standard_error_is_never_exit_status_1(tmp_path: Path, words: str, status: int) -> None:
    done = shell(words, tmp_path)
    assert (done.returncode, done.stdout) == (status, "")


@pytest.mark.parametrize("words", ["list", f"{RUN[11:]} --json"])
def test_a_full_standard_output_is_reported_in_one_line(tmp_path: Path, words: str) -> None:
    done = shell(f"-m harness {words} >/dev/full", tmp_path)
    assert done.returncode == 254
    assert done.stderr.splitlines()[-1] == NO_ROOM


def test_a_run_whose_verdict_cannot_be_printed_is_kept_and_says_so(tmp_path: Path) -> None:
    done = shell(f"{RUN} >/dev/full", tmp_path)
    assert done.returncode == 254, "the verdict was never shown"
    assert done.stderr.splitlines()[-1] == NO_ROOM
    assert Store(tmp_path / "store").find("latest").read_results()["valid"] is True


def test_a_console_that_cannot_print_is_silent_if_no_reader_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(console: Console) -> None:
        console._buffer.clear()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Console, "_write_buffer", full)
    console = OutputConsole()
    with console.without_reader():
        console.print("a word")
        console.print("another one")
    assert console.reader_is_gone
    with pytest.raises(OSError, match="No space left"):
        OutputConsole().print("a word")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_behave_like_dev_null(tmp_path: Path, closed: str) -> None:
    done = shell(f"{RUN} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    run = Store(tmp_path / "store").find("latest")
    lines = run.history_path.read_text().splitlines()
    assert all(line.startswith('{"index":') for line in lines), "no word of the output is in the history"


def test_characters_that_the_output_cannot_encode_are_escaped(tmp_path: Path) -> None:
    place = tmp_path / "not UTF-8 \udcff"
    place.mkdir()
    done = shell(RUN, place)
    assert done.returncode == 0, done.stderr
    assert Store(place / "store").find("latest").status is RunStatus.FINISHED
    Store(place / "store").create("t").release()  # of which nothing is known: dashes
    done = shell("-m harness runs", place, PYTHONIOENCODING="ascii", COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "") and "\\u2013" in done.stdout
    done = shell("-m harness runs --store ./missing", place)
    assert done.returncode == 254 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("harness: there is no store at")


def test_a_terminal_width_of_0_is_ignored(tmp_path: Path) -> None:
    script = "import sys; from rich.console import Console; from harness.standard_streams import complete_streams; "
    script += "complete_streams(); print(Console().width)"
    widths = [shell(f"-c '{script}'", tmp_path, COLUMNS=columns).stdout for columns in ("80", "0")]
    assert widths == ["80\n"] * 2
    assert len(shell("-m harness list", tmp_path, COLUMNS="0").stdout.splitlines()) > 20


@pytest.mark.parametrize("words", ["runs", "analyze latest", RUN[11:]])
def test_a_removed_current_directory_is_reported_in_one_line(tmp_path: Path, words: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["bash", "-c", f"rmdir {gone}; exec {sys.executable} -m harness {words}"], cwd=gone, capture_output=True,
        text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 254
    assert done.stderr == "harness: the current directory no longer exists: change to one that does\n"


def test_a_command_that_runs_out_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starve(arguments: object) -> int:
        raise MemoryError

    monkeypatch.setattr("harness.cli._perform", starve)
    assert main(["runs", "--store", str(tmp_path)]) == 254
    assert capsys.readouterr().err.startswith("harness: out of memory: ")


CHATTY = """
from harness.sdk import Client, System

print("imported")

class Chatty(System):
    ports = {"client": 7000}

    def command(self, host):
        print("a command")
        return ["sleep", "600"]

    async def ready(self, host):
        return True

class Talk(Client):
    held = {}

    async def read(self, key):
        print("a read")
        return self.held.get(key)

    async def write(self, key, value):
        self.held[key] = value
"""


@pytest.mark.parametrize("more", ["", "--test-count 2"])
def test_output_of_a_plug_in_does_not_mix_with_results_in_json(tmp_path: Path, more: str) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    words = "-m harness run chatty.py --cluster local --nodes 1 --nemesis none --time-limit 1 --workload register"
    done = shell(f"{words} --json {more}", tmp_path)
    results = json.loads(done.stdout)
    assert ["valid" in each for each in (results if more else [results])] == [True] * (2 if more else 1)
    assert all(said in done.stderr for said in ("imported", "a command", "a read"))
