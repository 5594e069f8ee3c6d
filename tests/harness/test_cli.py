"""The command line: what it refuses, in one line, with exit status 254 and without a traceback."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness import registry
from harness.cli import main
from harness.clusters.ssh_connection import require_paramiko
from harness.commands.report import require_spark
from harness.descriptors import require_descriptors, wanted_descriptors
from harness.errors import HarnessError, InterruptedStartError, OperatorError, SystemUnderTestError, how_to_get
from harness.pasteable import python_command
from harness.store import RunStatus, Store
from harness.test import Test

ROOT = Path(__file__).resolve().parents[2]
Here = Callable[..., subprocess.CompletedProcess[str]]


def harness(*words: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--workload", "registr"], "unknown workload 'registr' (did you mean register?)"),
        (["run", "--system", "brokr"], "unknown system 'brokr' (did you mean broker?)"),
        (["run", "--cluster", "lokal"], "unknown cluster 'lokal' (did you mean local?)"),
        (["run", "--cluster", "sim", "--system", "toy"], "--system toy: cluster sim simulates the broker"),
        (["run", "--nemesis", "partitoin"], "unknown nemesis 'partitoin' (did you mean partition?)"),
        (["run", "--nemesis", "partition=halfs"], "has no variant 'halfs' (did you mean halves?)"),
        (["run", "--nemesis", "partition,partition"], "given twice"),
        (["run", "--nodes", "0"], "--nodes must be 1 to"),
        (["run", "--nodes", "many"], "--nodes"),
        (["run", "--nodes", "2", "--cluster", "local", "--nemesis", "partition=majorities-ring"], "majorities-ring"),
        (["explore", "--seeds", "1", "--jobs", "9" * 30], "--jobs: must be 1 to 1024: each job is a separate process"),
        (["run", "--time-limit", "0"], "--time-limit must be above 0"),
        (["run", "--time-limit", "nan"], "--time-limit must be above 0"),
        (["run", "--concurrency", "-3"], "--concurrency must be 1 to"),
        (["run", "--rate", "-1"], "--rate must be 0"),
        (["run", "--seed", "x"], "--seed"),
        (["run", "--seed", "-1"], "--seed"),
        (["run", "--set", "read_mode"], "KEY=VALUE"),
        (["run", "--set", "read_mod=lease"], "unknown setting 'read_mod' (did you mean read_mode?)"),
        (["run", "--system", "toy", "--set", "read_mod=lease"], "unknown setting 'read_mod'; it has no settings"),
        (["run", "--set", "read_mode=fast"], "read_mode must be one of"),
        (["run", "--set", "flush_interval_ms=0"], "flush_interval_ms must be a whole number from 1 to 3600000"),
        (["run", "--set", "flush_least_pages=few"], "flush_least_pages must be a whole number from 0"),
        (["run", "--set", "timing=fast", "--set", "timing=default"], "given twice"),
        (["run", "--cluster", "local", "--nemesis", "partition", "--nemesis-interval", "90"], "--nemesis-interval"),
        (["run", "--frobnicate"], "--frobnicate"),
        (["run", "--time-limt", "3"], "harness run: unknown option --time-limt (did you mean --time-limit?)"),
        (["run", "--time", "3"], "unknown option --time (did you mean --time-limit?)"),
        (["run", "--log", "debug"], "unknown option --log; see harness run --help"),
        (["run", "--time-limit", "5m"], "argument --time-limit: not a number of seconds: '5m'"),
        (["run", "--nodes", "3.5"], "argument --nodes: not a whole number: '3.5'"),
        (["run", "--nemesis", ""], "--nemesis: the value is empty; use none for a run without faults"),
        (["run", "--nemesis", "none,kill"], "--nemesis: none cannot be combined with other nemeses"),
        (["clean", "extra"], "harness clean: unexpected argument 'extra'; see harness clean --help"),
        (["run", "partition"], "unexpected argument 'partition'"),
        (["run", "mine.py", "--system", "toy"], "mine.py and --system both name the system: leave one of them"),
        (["doctor", "--system=toy", "mine.py:Kv"], "mine.py:Kv and --system both name the system: leave one of"),
        (["replay", "schedule.json", "mine.py"], "(to use your own system: --system mine.py)"),
        (["run", "--replication", "sync"], "--replication is a setting of the system: --set replication=sync"),
        (["replay", "x", "--nemesis", "kill"], "harness replay: unknown option --nemesis"),  # set by the schedule
        (["replay", "x", "--nemesis-schedule", "y"], "harness replay: unknown option --nemesis-schedule"),
        (["replay", "x/s.json", "--cluster", "sim"], "'x/s.json' is neither a schedule file nor a run: "),
        (["replay", "x", "--flush-mode=async"], "--flush-mode is a setting of the system: --set flush_mode=async"),
        (["frobnicate"], "frobnicate"),
        (["rnu"], "unknown command 'rnu' (did you mean run?)"),
        (["cluster", "upp"], "unknown action 'upp' (did you mean up?)"),
        (["analyze", "nowhere/at-all"], "no store"),
        (["analyze", "latest"], "store"),
        (["clean", "--run", "../../etc"], "run id"),
        (["run", "--cluster", "sim", "--store="], "--store: the path is empty"),
        (["runs", "--store="], "--store: the path is empty"),
        (["analyze", "x" * 300], "cannot look for the run 'xxx"),
        (["runs", "--store", "x" * 300], "cannot read the store"),
        (["runs", "--store", "two\nlines\x1b[2J"], "two\\nlines\\x1b[2J: start a run first"),
        (["run", "--cluster", "sim", "--nemesis-schedule", "/dev/zero"], "a schedule file has at most"),
        (["run", "--cluster", "sim", "--matrix", "/dev/zero"], "are too large for a matrix"),
        (["run", "--cluster", "sim", "--junit="], "--junit '': must name a file"),
        (["run", "--cluster", "sim", "--junit", "/"], "--junit '/': must name a file"),
        (["run", "--cluster", "sim", "--step-summary", "/"], "--step-summary '/': Is a directory"),
        (["doctor", "--nodes", "1" + "0" * 20], "--nodes must be 1 to"),
        (["explore", "--cluster", "netns"], "unknown cluster 'netns'; known: sim"),
        (["explore", "--nemesis-interval", "2"], "unknown option --nemesis-interval"),
        (["audit", "--nemesis-schedule", "s.json"], "unknown option --nemesis-schedule"),
        (["explore", "--storage", "image"], "unknown option --storage"),
        (["explore", "--time-limit", "3"], "leaves no room for random faults"),
        (["audit", "--time-limit", "3"], "leaves no room for random faults"),
        (["explore", "--nemesis", "partition", "--store", "/dev/null/x"], "a part of the path is a file"),
        (["explore", "--set", "read_mode=fast"], "read_mode must be one of"),
        (["explore", "--workload", "stack"], "workload stack needs a client of harness.sdk"),
        (["explore", "--nemesis", "kill@first"], "unknown target 'first'"),
        (["explore", "--executor-python", "pypy3"], "--executor-python is for a cluster: add --master URL"),
        (["explore", "--memory", "4g"], "--memory is for a cluster: add --master URL"),
        (["explore", "--conf", "spark.ui.port=4050"], "--conf is for a cluster: add --master URL"),
        (["explore", "--verbose"], "--verbose is for a cluster: add --master URL"),
        (["explore", "--guide", "--time-limit", "3.2"], "give more than 3.2"),
        (["clean", "--forget-unreachable"], "with --run RUN_ID"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    words: list[str], expected: str, tmp_path: Path, harness_here: Here
) -> None:
    done = harness_here(*words, cwd=tmp_path)
    assert done.returncode == 254, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_a_store_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file stands in the way")
    done = harness("run", "--cluster", "local", "--time-limit", "1", cwd=tmp_path)
    assert done.returncode == 254
    assert "store" in done.stderr and "Traceback" not in done.stderr


def test_a_separate_process_refuses_bad_arguments_too(tmp_path: Path) -> None:
    done = harness("run", "--nodes", "0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (254, "")
    assert "--nodes must be 1 to" in done.stderr and len(done.stderr.splitlines()) == 1


def test_help_gives_the_default_time_limit_of_each_command(tmp_path: Path, harness_here: Here) -> None:
    for command, limit_s in (("run", 60), ("explore", 10), ("audit", 10)):
        assert f"put load on the system (default: {limit_s})" in " ".join(
            harness_here(command, "--help", cwd=tmp_path).stdout.split()
        )


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_goes_to_standard_output(words: list[str], tmp_path: Path, harness_here: Here) -> None:
    done = harness_here(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout and not done.stderr


def test_harness_without_arguments_prints_the_commands(tmp_path: Path) -> None:
    done = harness(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: harness" in done.stdout and "doctor" in done.stdout


def test_the_help_of_run_groups_its_options_and_lists_all_registered_names(tmp_path: Path, harness_here: Here) -> None:
    said = harness_here("run", "--help", cwd=tmp_path).stdout
    groups = ("system and hosts", "faults", "load", "checks and storage", "series of runs, and output")
    places = [said.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)
    plain = " ".join(said.split())
    for kind in registry.KINDS:
        assert ", ".join(registry.names(kind)) in plain, kind
    assert "--replication" not in said


def test_a_run_without_faults_says_so_first_and_faults_are_announced(tmp_path: Path) -> None:
    words = ("run", "--cluster", "sim", "--nodes", "3", "--time-limit", "2", "--rate", "20", "--seed", "1")
    calm = harness(*words, cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    assert calm.stderr.startswith("no faults are injected: use --nemesis partition ")
    assert "VALID: " in calm.stdout and "VALID" not in calm.stderr
    words = (*words, "--time-limit", "4", "--nemesis", "kill=sigkill@n1", "--nemesis-interval", "1")
    struck = harness(*words, cwd=tmp_path)
    assert "no faults" not in struck.stderr
    lines = struck.stderr.splitlines()
    begins = next(line for line in lines if "fault f1 begins: kill sigkill@n1 on n1: proven" in line)
    ends = next(line for line in lines if "fault f1 ends: kill sigkill@n1 on n1: proven healed" in line)
    assert lines.index(begins) < lines.index(ends)


def test_a_valid_run_is_not_shrunk(tmp_path: Path) -> None:
    assert harness("run", "--cluster", "sim", "--time-limit", "1", "--rate", "20", cwd=tmp_path).returncode == 0
    done = harness("shrink", "latest", cwd=tmp_path)
    assert done.returncode == 254
    assert "is valid: only a run that failed" in done.stderr and "True" not in done.stderr


def limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_a_low_open_file_limit_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", "--cluster", "local"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=limit_open_files, timeout=60,
    )  # fmt: skip
    assert done.returncode == 254
    assert "this run may need 428 open files and the limit is 64: ulimit -n 428" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_open_file_limit_is_raised_to_what_the_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    test = Test(
        system="broker", cluster="local", nodes=5, workload="register", nemesis=(), nemesis_interval_s=5,
        time_limit_s=5, concurrency=10, rate=1, seed=1,
    )  # fmt: skip
    require_descriptors(test)
    assert asked == [(wanted_descriptors(test), 4096)]


def test_a_closed_output_pipe_gives_status_255_and_the_run_is_still_judged(tmp_path: Path) -> None:
    words = "run --cluster local --nodes 3 --time-limit 3 --nemesis partition=one --nemesis-interval 0.7"
    pipe = f"{sys.executable} -m harness {words} 2>&1 | head -n 4; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", pipe], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=180,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[-1] == "255" and lines[3] == "starting the cluster", done.stdout
    (run_dir,) = Store(tmp_path / "store").runs()
    assert run_dir.status is RunStatus.FINISHED
    results = run_dir.read_results()
    assert results["valid"] is True, results["reason"]
    assert results["faults"] and all(fault["healed"] for fault in results["faults"])
    assert done.stderr == ""


def test_list_into_a_closed_pipe_exits_with_255(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "harness", "list"], cwd=tmp_path, stdout=nobody, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (255, "")


def test_list_names_the_registered_parts(tmp_path: Path, harness_here: Here) -> None:
    done = harness_here("list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("register", "log", "partition", "broker", "local", "netns"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (("read(self, key)", "write(self, key, value)", "add(self, value)"), "workloads: register"),
        (("add(self, value)",), "workloads: none (Talk lacks methods for each)"),
    ],
)
def test_list_says_which_workloads_a_client_supports(
    methods: Sequence[str], expected: str, tmp_path: Path, harness_here: Here
) -> None:
    client = "".join(f"    async def {method}:\n        return None\n" for method in methods)
    system = "class Mine(System):\n    def command(self, host):\n        return ['server']\n"
    source = f"from harness.sdk import Client, System\n{system}class Talk(Client):\n{client}"
    (tmp_path / "mine.py").write_text(source)
    done = harness_here("list", "mine.py", cwd=tmp_path)
    assert done.returncode == 0 and [line.strip() for line in done.stdout.splitlines()][2] == expected, done.stdout


@pytest.mark.parametrize(
    ("what", "titles", "names"),
    [
        ("clusters", ["clusters"], ["netns", "local"]),
        ("partition", ["nemeses"], ["partition"]),
        ("etcd", ["systems"], ["etcd"]),
    ],
)
def test_list_takes_a_kind_or_a_name(
    what: str, titles: list[str], names: list[str], tmp_path: Path, harness_here: Here
) -> None:
    done = harness_here("list", what, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first_words = [line.split()[0] for line in done.stdout.splitlines() if line.strip() and not line.startswith(" ")]
    assert [word for word in first_words if word in registry.KINDS] == titles
    assert set(names) <= set(first_words) and "register" not in first_words


def test_list_refuses_a_name_that_nothing_has(tmp_path: Path, harness_here: Here) -> None:
    done = harness_here("list", "partitoin", cwd=tmp_path)
    assert done.returncode == 254 and done.stderr.count("\n") == 1
    assert "nothing is named 'partitoin' (did you mean partition?)" in done.stderr


def test_cleaning_a_run_that_left_nothing_says_so(tmp_path: Path, harness_here: Here) -> None:
    result = harness_here("clean", "--run", "20200101T000000-nobody", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing of run 20200101T000000-nobody is on this machine" in result.stdout


def test_a_package_missing_on_pypy_points_to_cpython(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (f"{python_command()} -m pip install pyarrow", "use CPython, for pypy there are no wheels")
    assert how_to_get("pyarrow") in expected
    monkeypatch.setattr(sys.implementation, "name", "pypy")
    for package in ("pyarrow", "paramiko"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OperatorError, match="this command needs pyarrow: use CPython, for pypy there are no wheels"):
        require_spark()
    with pytest.raises(OperatorError, match="package paramiko is missing: use CPython, for pypy there are no wheels"):
        require_paramiko()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OperatorError("no\nroom"), 254, "harness: no\\nroom\n"),
        (SystemUnderTestError("no leader"), 255, "harness: no leader\n"),
        (InterruptedStartError("stopped"), 255, "harness: stopped\n"),
        (HarnessError("something is left"), 255, "harness: something is left\n"),
        (OSError(errno.EDQUOT, "quota", "a/b"), 254, "harness: cannot write a/b: quota; free some space\n"),
        (OSError(errno.EIO, "broken", "a/b"), 255, "harness: internal error: OSError: "),
        (BrokenPipeError(errno.EPIPE, "nobody reads"), 255, ""),
        (KeyboardInterrupt(), 255, "harness: interrupted\n"),
        (MemoryError(), 254, "harness: out of memory: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_one_line_and_its_status_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    said: str,
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("harness.commands.list.list_command", fail)
    assert main(["list"]) == status
    told = capsys.readouterr().err
    assert told.startswith(said) and told.count("\n") == bool(said)


@pytest.mark.parametrize("words", [["list"], ["clean", "--run", "never-was"]], ids=["long", "short"])
def test_output_that_does_not_fit_on_the_disk_is_no_success_and_no_verdict(tmp_path: Path, words: list[str]) -> None:
    """Short output is not written before the command has ended."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness", *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True,
            env={**environment, "PYTHONPATH": str(ROOT)}, timeout=60,
        )  # fmt: skip
    assert done.returncode == 254
    assert done.stderr.startswith("harness: cannot write ") and done.stderr.count("\n") == 1


def test_a_base_exception_exits_with_255_not_with_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit status would be 1, which means an invalid run."""

    def cancelled(*_: object) -> int:
        raise asyncio.CancelledError("why")

    monkeypatch.setattr("harness.commands.list.list_command", cancelled)
    assert main(["list"]) == 255
    assert "internal error: CancelledError: why" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "said"),
    [(KeyboardInterrupt, "harness: interrupted"), (asyncio.CancelledError, "internal error: CancelledError")],
)
def test_what_a_plug_in_raises_while_the_words_are_parsed_is_no_verdict_either(
    raised: type[BaseException],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The parser imports the file, for the settings in its help."""
    (tmp_path / "mine.py").write_text("from harness.sdk import System\n\n\nclass Mine(System):\n    pass\n")

    def imported(name: str) -> object:
        raise raised

    monkeypatch.setattr(registry, "_system_of_file", imported)
    assert main(["run", str(tmp_path / "mine.py")]) == 255
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.parametrize("entry", ["-m", "script"])
def test_an_interrupt_during_the_imports_is_one_line_too(tmp_path: Path, entry: str) -> None:
    """Raised in a string of code, as those of dataclasses are, which CPython answers by SIGINT even if it is caught."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["harness"].partition(":")
    start = "import runpy; runpy.run_module('harness', run_name='__main__')"
    if entry == "script":
        start = f"from {module} import {function}; sys.exit({function}())"
    interrupts = """
import sys
import tomllib
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "harness.cli":
            exec("raise KeyboardInterrupt")
sys.meta_path.insert(0, Interrupts())
"""
    done = subprocess.run(
        [sys.executable, "-c", interrupts + start], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (255, "harness: interrupted\n")
