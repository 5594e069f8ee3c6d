"""Worker processes: what is lost with one that is killed, and that none outlives the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checker.cli import main
from checker.linearizability import engine, parallel
from checker.linearizability.check import check
from checker.verdict import Verdict
from checker.workers import map_in_processes, worker_pool

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="workers are killed with their parent only on Linux"
)


def square_or_die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def refuse(number: int) -> int:
    raise ValueError(f"not {number}")


def test_answers_are_in_the_order_of_their_inputs() -> None:
    assert map_in_processes(square_or_die, [5, 1, 4], 2) == [25, 1, 16]


def test_the_answer_of_a_killed_process_is_none() -> None:
    answers = map_in_processes(square_or_die, [1, 2, 3], 1)
    assert answers == [1, 4, None]


def test_an_error_in_a_worker_is_raised_in_the_caller() -> None:
    with pytest.raises(ValueError, match="not 1"):
        map_in_processes(refuse, [1, 2, 3, 4], 2)


ROWS = [
    {"process": 0, "type": kind, "f": f, "value": value, "key": key, "time": time}
    for key in (1, 2)
    for time, (kind, f, value) in enumerate(
        [("invoke", "write", 1), ("ok", "write", 1), ("invoke", "read", None), ("ok", "read", 1)]
    )
]


def test_the_keys_of_a_killed_process_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(history: object, groups: dict[object, object], *rest: object, **options: object) -> list[object]:
        if 2 in groups:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(history, groups, *rest, **options)  # type: ignore[arg-type, return-value]

    real = engine.decide
    monkeypatch.setattr(parallel, "decide", decide)
    result = check(ROWS, "register", jobs=2)
    assert result.verdict is Verdict.UNKNOWN and "killed" in result.reason


def test_a_file_whose_process_is_killed_is_undecided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(job: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("checker.cli._read_and_check", die)
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert main([*files, "--model", "register", "--jobs", "2"]) == 2
    assert capsys.readouterr().out.count("killed") == 2


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    marks = tmp_path / "pids"
    code = (
        "import os, sys, time\n"
        "from checker.workers import map_in_processes\n"
        "def work(number):\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(600)\n"
        "map_in_processes(work, [1, 2], 2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(marks)])
    try:
        while not marks.exists() or len(marks.read_text().split()) < 2:
            assert parent.poll() is None
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    for pid in map(int, marks.read_text().split()):
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(") ")[1][:1]:
            time.sleep(0.02)


ENDED = """
import os, signal, sys, time
from checker.workers import map_in_processes, worker_pool

def work(number):
    if number == 1:
        return number
    if sys.argv[1] == "interrupted":
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)

try:
    map_in_processes(work, [1, 2], 2, until=lambda answer: sys.argv[1] == "answered")
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize("how", ["answered", "interrupted"])
def test_work_left_over_after_an_answer_or_an_interrupt_is_not_waited_for(how: str) -> None:
    assert subprocess.run([sys.executable, "-c", ENDED, how], timeout=60, check=False).returncode == 0


IMPATIENT = """
import os, signal, sys, threading, time
from checker.workers import worker_pool

def work(number):
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

def interrupt_twice():
    while len(open(sys.argv[1]).read().split()) < 2:
        time.sleep(0.02)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

open(sys.argv[1], "w").close()
threading.Thread(target=interrupt_twice, daemon=True).start()
try:
    with worker_pool(2) as pool:
        list(pool.map(work, [1, 2]))
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_second_interrupt_ends_the_program_and_its_workers(tmp_path: Path) -> None:
    """The standard library's pool loses its own thread when an interrupt comes while it waits for that: the program
    then waits for its processes, and they for work, forever."""
    marks = tmp_path / "pids"
    done = subprocess.run([sys.executable, "-c", IMPATIENT, str(marks)], timeout=60, check=False)
    assert done.returncode == 7
    assert not [pid for pid in marks.read_text().split() if Path(f"/proc/{pid}").exists()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_work_is_submitted_leaves_a_pool_that_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deferred until then: half-submitted work would never run, and be waited for forever."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        with worker_pool(1) as pool:
            assert pool.submit(handler_of, number).result() == (repr(interrupt) if number == signal.SIGTERM else "1")
            put = pool._work_ids.put

            def interrupted(item: int) -> None:
                signal.raise_signal(number)
                put(item)

            monkeypatch.setattr(pool._work_ids, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.submit(square_or_die, 2)
            assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def handler_of(number: int) -> str:
    found = signal.getsignal(number)
    return "1" if found is signal.SIG_IGN else repr(found)


def test_only_the_answer_of_the_killed_process_is_lost() -> None:
    assert map_in_processes(square_or_die, [3, 1, 2, 4, 5], 2) == [None, 1, 4, 16, 25]
