"""`make test` and the CI's script: every stage runs, and the command fails at the end if one of them did."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAMPS = (".runtime-done", ".setup-done", ".spark-done", ".tested-done", ".docs-done")
INSTALL = "-m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable"
STAGES_SCRIPT = "scripts/run_tests.py"
REAL_STAGES = f'case "$1" in {STAGES_SCRIPT}) exec {sys.executable} "$@";; esac'
STAGES = ["many-at-a-time", "whole-runs", "remote-hosts", "spark", "computed"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed (apt-get install make)")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is set up, whose Python notes its arguments; pytest fails if they contain $FAIL."""
    for name in ("Makefile", "pyproject.toml", STAGES_SCRIPT):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    choice = 'case "$*" in *pytest*"${FAIL-nothing}"*) exit 1;; *build_shims*) exit "${SHIM-0}";; esac'
    script(tmp_path / ".venv" / "bin" / "python", f'{REAL_STAGES}; echo "$@" >>asked; {choice}')
    for name in ("ruff", "mypy", "mkdocs"):
        script(tmp_path / ".venv" / "bin" / name, f'echo {name} >>asked; [ "${{FAIL-}}" != {name} ]')
    script(tmp_path / "scripts" / "setup-host.sh", "")
    for stamp in STAMPS:
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def run(directory: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(argv, cwd=directory, env={**kept, **environment}, capture_output=True, text=True, timeout=60)


def asked(directory: Path) -> list[str]:
    return (directory / "asked").read_text().splitlines()


def stages(directory: Path) -> list[str]:
    """The commands of pytest, sorted: stages run in parallel."""
    return sorted(line for line in asked(directory) if "pytest" in line and "--collect-only" not in line)


@pytest.mark.parametrize(
    ("words", "failed"),
    [
        ("-m not (", "many-at-a-time"), ("-m spark", "spark"), ("-m serial", "whole-runs"),
        ("-m computed", "computed"), ("-m (ssh", "remote-hosts"), ("-q", "*"),
    ],
)  # fmt: skip
def test_every_stage_runs_even_if_one_fails_and_the_command_fails_at_the_end(
    checkout: Path, words: str, failed: str
) -> None:
    done = run(checkout, "make", "test", FAIL=words)
    assert done.returncode != 0
    assert len(stages(checkout)) == len(STAGES)
    assert f"make test: failed stages: {' '.join(STAGES) if failed == '*' else failed}" in done.stderr


def test_make_test_succeeds_if_every_stage_passes(checkout: Path) -> None:
    done = run(checkout, "make", "test")
    assert done.returncode == 0 and "failed" not in done.stdout + done.stderr
    markers = {line.partition("-m ")[2].partition(" -m ")[2].partition(" -")[0] for line in stages(checkout)}
    assert markers == {
        "not (ssh or docker or serial or spark or computed or long)",
        "(ssh or docker) and not serial and not long", "spark and not long", "computed and not long",
        "serial and not systems and not long",
    }, "every test is in one stage, or in make test-long or make test-systems"  # fmt: skip


def heed_interrupts() -> None:
    """As a command started from a terminal; one started in the background ignores interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("beside", "other"), [("spark", "not ("), ("computed", "serial")])
def test_an_interrupt_ends_the_stage_that_runs_in_parallel(checkout: Path, beside: str, other: str) -> None:
    stage = "echo $$ >beside.new; mv beside.new beside; exec sleep 600"
    choice = f'case "$*" in *"-m {beside}"*) {stage};; *"-m {other}"*) exec sleep 600;; esac'
    script(checkout / ".venv" / "bin" / "python", f"{REAL_STAGES}; {choice}")
    with make_test(checkout) as make:
        while not (checkout / "beside").exists():
            time.sleep(0.01)
        beside = os.pidfd_open(int((checkout / "beside").read_text()))
        os.killpg(make.pid, signal.SIGINT)
        assert make.wait(timeout=60) != 0
    try:
        assert select.select([beside], [], [], 60)[0], "the stage still runs"
    finally:
        os.close(beside)


def make_test(checkout: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["make", "test"], cwd=checkout, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=heed_interrupts
    )


def test_an_interrupt_at_any_moment_ends_the_stages(checkout: Path) -> None:
    """Also between the fork and the exec of a stage: a shell loses it there, and waits for the stage. Make does so
    where it starts the script, which is therefore started without make."""
    script(checkout / ".venv" / "bin" / "python", 'case "$*" in *-n*-m*) exec sleep 600;; esac')
    for number in range(20):
        with stages_of(checkout) as command:
            time.sleep(0.02 * number)
            os.killpg(command.pid, signal.SIGINT)
            assert command.wait(timeout=60) != 0, f"after {20 * number} ms"
            with contextlib.suppress(ProcessLookupError):
                while True:  # until no process is left
                    os.killpg(command.pid, 0)
                    time.sleep(0.01)


def stages_of(checkout: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, STAGES_SCRIPT, ".venv/bin/python"]
    return subprocess.Popen(
        argv, cwd=checkout, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=heed_interrupts
    )


def test_terminating_the_command_lets_its_stages_take_down_what_they_started(checkout: Path) -> None:
    stage = "trap 'echo taken down >>ended; exit 2' INT; echo >>begun; while :; do sleep 0.05; done"
    script(checkout / ".venv" / "bin" / "python", f'case "$*" in *-n*-m*) {stage};; esac')
    with stages_of(checkout) as command:
        while not (checkout / "begun").exists() or (checkout / "begun").read_text() != "\n\n":
            time.sleep(0.01)
        command.terminate()
        assert command.wait(timeout=60) == 130
    assert (checkout / "ended").read_text() == "taken down\n" * 2


WORKER = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print(flush=True)
signal.sigwait({signal.SIGINT})
print("down")
"""
STAGE_WITH_WORKER = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True)
worker.stdout.readline()
try:
    open("begun", "a").write("x")
    worker.wait()
except KeyboardInterrupt:
    open("ended", "a").write(worker.communicate()[0])
"""


def test_terminating_the_command_lets_the_workers_of_its_stages_take_down_what_they_started(checkout: Path) -> None:
    (checkout / "stage.py").write_text(STAGE_WITH_WORKER)
    script(checkout / ".venv" / "bin" / "python", f'case "$*" in *-n*-m*) exec {sys.executable} stage.py;; esac')
    with stages_of(checkout) as command:
        while not (checkout / "begun").exists() or (checkout / "begun").read_text() != "xx":
            time.sleep(0.01)
        command.terminate()
        assert command.wait(timeout=60) == 130
    assert (checkout / "ended").read_text() == "down\n" * 2


@pytest.mark.parametrize("mark", ["spark", "serial", "computed", "long"])
def test_a_stage_is_given_the_files_with_its_mark_and_no_others(checkout: Path, mark: str) -> None:
    for name, text in (("with", f"pytestmark = pytest.mark.{mark}"), ("without", f"pytest.mark.{mark}_other")):
        (checkout / "tests").mkdir(exist_ok=True)
        (checkout / "tests" / f"test_{name}.py").write_text(text + "\n")
    assert run(checkout, "make", "test-long" if mark == "long" else "test").returncode == 0
    [stage] = [line for line in asked(checkout) if re.search(rf"-m {mark}( |$)", line)]
    assert stage.endswith(" tests/test_with.py")


def test_make_test_long_runs_the_long_tests(checkout: Path) -> None:
    assert run(checkout, "make", "test-long").returncode == 0
    assert asked(checkout) == ["-m pytest -q -n 2 --dist loadgroup -m long and not systems"]


def test_make_test_systems_runs_the_tests_of_fetched_systems(checkout: Path) -> None:
    done = run(checkout, "make", "test-systems")
    assert done.returncode == 0
    assert asked(checkout) == ["-m pytest -q -rs -m systems"], "skipped tests are named with their reasons"


def test_a_shim_that_cannot_be_built_is_reported_and_the_tests_run(checkout: Path) -> None:
    done = run(checkout, "make", "test", SHIM="1")
    assert done.returncode == 0
    assert "tests of clock and disk faults will be skipped" in done.stderr
    assert len(stages(checkout)) == len(STAGES)


def test_the_demo_installs_no_development_tools(checkout: Path) -> None:
    for stamp in STAMPS:
        (checkout / ".venv" / stamp).unlink()
    done = run(checkout, "make", "demo", PYTHON="true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("make demo ") and "minute" in done.stdout.splitlines()[0]
    assert [line for line in asked(checkout) if "install" in line] == [f"{INSTALL} ."]
    assert asked(checkout)[-1] == "scripts/demo.py"


def test_one_pip_install_sets_up_a_new_checkout_for_the_tests(checkout: Path) -> None:
    for stamp in STAMPS:
        (checkout / ".venv" / stamp).unlink()
    for target in ("test", "lint", "spark"):
        assert run(checkout, "make", target).returncode == 0
    installed = INSTALL.replace(" --config", " --no-compile --config")
    assert [line for line in asked(checkout) if "install" in line] == [f"{installed} .[test,lint,serve,spark]"]
    assert [line.split()[:3] for line in asked(checkout) if "-m compileall" in line] == [["-m", "compileall", "-qq"]]


@pytest.mark.parametrize(
    ("fails_at", "needed"), [("-c ", "Python 3.11 or newer is needed"), ("-m venv ", "python3-venv is needed")]
)
def test_a_failed_setup_names_what_is_needed_every_time(checkout: Path, fails_at: str, needed: str) -> None:
    shutil.rmtree(checkout / ".venv")
    leaves_half = 'case "$*" in "-m venv "*) mkdir -p .venv/bin; touch .venv/bin/python;; esac'
    script(checkout / "python", f'{leaves_half}\ncase "$*" in "{fails_at}"*) exit 1;; esac')
    for _ in range(2):
        done = run(checkout, "make", "test", PYTHON=str(checkout / "python"))
        assert done.returncode != 0 and needed in done.stderr


@pytest.mark.parametrize(("fail", "status"), [("ruff", 1), ("mkdocs", 1), ("-m spark", 1), ("nothing", 0)])
def test_the_ci_runs_lint_docs_and_tests_even_if_one_fails(checkout: Path, fail: str, status: int) -> None:
    (checkout / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    done = run(checkout, str(checkout / ".ci" / "run"), FAIL=fail)
    assert done.returncode == status, done.stderr
    assert {"ruff", "mkdocs"} <= set(asked(checkout))
    assert len(stages(checkout)) == len(STAGES)
