"""The pytest plug-in, used as its users do: verdicts as outcomes, what a failing test prints, JUnit, xdist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.embedding import judged_run
from harness.errors import OperatorError
from harness.sdk import Client, System

HEAD = '''
import pytest
from harness.sdk import Client, Host, System, path
from harness.systems.toy import Toy, ToyClient

class Stale(ToyClient):
    """Reads return a value that was never written."""
    async def read(self, key):
        return -7

class Silent(ToyClient):
    async def read(self, key):
        raise ConnectionError("no")
    async def write(self, key, value):
        raise ConnectionError("no")

class ExitsAtOnce(Toy):
    """A system whose program ends at once."""
    def command(self, host):
        return ["false"]
    ready_timeout_s = 5.0

pytestmark = pytest.mark.splitbrain(nodes=2, time_limit=1.5, cluster="local", rate=50, concurrency=3)
'''


@pytest.fixture
def session(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run_pytest(folder: Path, body: str, *words: str) -> tuple[int, str]:
    """Run pytest on a file with this body in a new process; returns its status and output."""
    (folder / "test_kv.py").write_text(HEAD + body)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml", "junit.xml", *words, "test_kv.py"],
        cwd=folder, capture_output=True, text=True, timeout=170, env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def cases(folder: Path) -> dict[str, ElementTree.Element]:
    root = ElementTree.parse(folder / "junit.xml").getroot()
    return {str(case.get("name")): case for case in root.iter("testcase")}


def properties(case: ElementTree.Element) -> dict[str, str]:
    return {str(each.get("name")): str(each.get("value")) for each in case.iter("property")}


@pytest.mark.cluster
def test_verdicts_become_distinct_outcomes_in_junit(session: Path) -> None:
    status, said = run_pytest(session, """
def test_valid(splitbrain):
    run = splitbrain.run(Toy(), ToyClient)
    run.assert_valid()
    assert run.valid is True and run.results["ops"]["ok"] > 0

def test_invalid(splitbrain):
    splitbrain.run(Toy, Stale).assert_valid()

def test_unknown(splitbrain):
    splitbrain.run(Toy, Silent).assert_valid()

def test_does_not_start(splitbrain):
    splitbrain.run(ExitsAtOnce, ToyClient).assert_valid()

def test_seed_is_invalid(splitbrain):
    splitbrain.run(Toy, ToyClient, seed="first")

def test_cannot_be_run(splitbrain):
    splitbrain.run(Toy, ToyClient, workload="set").assert_valid()

def test_expected_to_be_invalid(splitbrain):
    splitbrain.run(Toy, Stale, workload="register").assert_invalid()
""")  # fmt: skip
    assert status == 1 and "1 failed, 2 passed, 4 errors" in said, said
    found = cases(session)
    kinds = {name: [child.tag for child in case if child.tag in ("failure", "error")] for name, case in found.items()}
    assert kinds == {
        "test_valid": [], "test_invalid": ["failure"], "test_unknown": ["error"], "test_does_not_start": ["error"],
        "test_cannot_be_run": ["error"], "test_seed_is_invalid": ["error"], "test_expected_to_be_invalid": [],
    }  # fmt: skip
    verdicts = {name: properties(case)["splitbrain.verdict"] for name, case in found.items()}
    assert verdicts == {
        "test_valid": "valid", "test_invalid": "invalid", "test_unknown": "unknown",
        "test_does_not_start": "did-not-run", "test_cannot_be_run": "did-not-run",
        "test_seed_is_invalid": "did-not-run", "test_expected_to_be_invalid": "invalid",
    }  # fmt: skip
    assert "workload set needs the methods add, members, which client ToyClient lacks" in said
    for name in ("test_invalid", "test_unknown"):
        report = Path(properties(found[name])["splitbrain.report"])
        assert report.is_file() and report.is_relative_to(session / "splitbrain-store")
    kept = list((session / "splitbrain-store").glob("*/2*/results.json"))
    assert len(kept) == 3  # the valid run of the passing test is not kept
    assert (session / "splitbrain-store" / "latest").is_dir()


@pytest.mark.cluster
def test_a_failing_test_prints_verdict_seed_command_and_report_first(session: Path) -> None:
    body = """
def test_stale(splitbrain):
    splitbrain.run(Toy, Stale).assert_valid()
"""
    _, said = run_pytest(session, body, "--splitbrain-seed", "77")
    headline = re.search(r"^_+ test_stale _+$", said, re.MULTILINE)
    assert headline is not None
    lines = said[headline.end() :].strip().splitlines()
    assert lines[0].startswith("INVALID: linearizable: ") and len(lines[0]) < 500
    assert lines[1] == "seed    77"
    assert lines[2] == "repeat  pytest test_kv.py::test_stale --splitbrain-seed 77"
    assert lines[3].startswith(f"report  {session}/splitbrain-store/") and Path(lines[3].split()[1]).is_file()
    assert re.fullmatch(r"at      test_kv\.py:\d+", lines[4])


SIMULATED = """
STALE = {"cluster": "sim", "nodes": 3, "time_limit": 5, "nemesis": "partition=leader", "nemesis_interval": 1,
         "seed": 8, "settings": {"read_mode": "unsafe"}}
QUICK = {"cluster": "sim", "nodes": 3, "time_limit": 1}
"""


def test_a_verdict_that_the_test_does_not_check_is_asserted_and_its_run_is_kept(session: Path) -> None:
    status, said = run_pytest(session, SIMULATED + """
def test_checks_nothing(splitbrain):
    splitbrain.run("broker", **STALE)

def test_skips_itself(splitbrain):
    splitbrain.run("broker", **STALE)
    pytest.skip("enough seen")

def test_undecided(splitbrain):
    splitbrain.run("broker", **QUICK, operation_timeout=1e-6)

def test_checks_nothing_and_is_valid(splitbrain):
    splitbrain.run("broker", **QUICK)

def test_checks_the_verdict(splitbrain):
    assert splitbrain.run("broker", **STALE).verdict == "invalid"

def test_checks_the_results(splitbrain):
    assert splitbrain.run("broker", **STALE).results["valid"] is False
""")  # fmt: skip
    assert status == 1 and "2 failed, 3 passed, 1 error" in said, said
    assert "INVALID: linearizable: " in said and "UNKNOWN: " in said
    found = {name: properties(case) for name, case in cases(session).items()}
    kept = {name for name, each in found.items() if Path(each["splitbrain.report"]).is_file()}
    assert kept == found.keys() - {"test_checks_nothing_and_is_valid"}


def test_a_seed_given_to_run_overrides_the_marker_and_the_option(session: Path) -> None:
    body = """
@pytest.mark.splitbrain(seed=5, **QUICK)
def test_seeds(splitbrain):
    print("SEEDS", *(splitbrain.run("broker", **given).seed for given in ({"seed": 8}, {"seed": 8}, {}, {"seed": 9})))

@pytest.mark.splitbrain(seed=5, **QUICK)
def test_of_the_marker(splitbrain):
    print("MARKER", *(splitbrain.run("broker", **given).seed for given in ({}, {"seed": 9}, {})))
"""
    _, said = run_pytest(session, SIMULATED + body, "-s")
    seeds = re.search(r"SEEDS 8 8 (\d+) 9$", said, re.MULTILINE)
    marker = re.search(r"MARKER 5 9 (\d+)$", said, re.MULTILINE)
    assert seeds is not None and marker is not None, said
    _, again = run_pytest(session, SIMULATED + body, "-s", "--splitbrain-seed", "8")
    assert seeds[0] in again and "MARKER 8 9" in again  # the line that repeats the first test


@pytest.mark.long
def test_the_repeat_line_is_relative_to_where_pytest_was_called(session: Path) -> None:
    folder = session / "tests" / "chaos"
    folder.mkdir(parents=True)
    status, said = run_pytest(folder, """
def test_cannot_be_run(splitbrain):
    splitbrain.run(Toy, ToyClient, workload="none", seed=7)
""")  # fmt: skip
    assert status == 1
    assert "repeat  pytest test_kv.py::test_cannot_be_run --splitbrain-seed 7\n" in said, said
    assert f"store   {session / 'splitbrain-store'}\nat      test_kv.py:" in said


@pytest.mark.cluster
def test_runs_work_in_parallel_under_xdist_and_inside_event_loops(session: Path) -> None:
    status, said = run_pytest(session, """
import asyncio

@pytest.mark.parametrize("number", range(2))
def test_kv(splitbrain, number):
    async def within_a_loop():
        return splitbrain.run(Toy, ToyClient, time_limit=3)
    run = asyncio.run(within_a_loop()) if number % 2 else splitbrain.run(Toy, ToyClient, time_limit=3)
    run.assert_valid()
""", "-n", "2", "--splitbrain-keep")  # fmt: skip
    assert status == 0 and "2 passed" in said, said
    found = [properties(case) for case in cases(session).values()]
    assert len({each["splitbrain.seed"] for each in found}) == 2
    assert len({each["splitbrain.report"] for each in found}) == 2
    assert all(Path(each["splitbrain.report"]).is_file() for each in found)


def test_the_plug_in_imports_little_unless_the_fixture_is_used(session: Path) -> None:
    (session / "test_plain.py").write_text(
        "import sys\ndef test_plain():\n    assert 'harness.pytest_plugin' in sys.modules\n"
        "    assert not [name for name in sys.modules if name.startswith(('rich', 'harness.e', 'harness.c'))]\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "test_plain.py"],
        cwd=session, capture_output=True, text=True, timeout=170, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def _typed(source: str) -> Any:
    """A class as if typed at a prompt, in a module that has no file."""
    names = {"System": System, "Client": Client, "__name__": "prompt"}
    exec(compile(source, "<stdin>", "exec"), names)
    return names["Typed"]


@pytest.mark.parametrize(
    ("system", "client", "options", "said"),
    [
        ("toy", None, {"nods": 3}, "no option 'nods' (did you mean nodes?)"),
        ("toi", None, {}, "unknown system 'toi' (did you mean toy?)"),
        (3, None, {}, "3 is neither a harness.sdk.System nor the name of a system"),
        ("toy", 3, {}, "3 is neither a harness.sdk.Client"),
        ("broker", "true", {}, "system broker has its own clients"),
        (
            _typed("class Typed(System):\n    def command(self, host):\n        return []"),
            None,
            {},
            "Typed is not defined in a file: move it",
        ),
        ("toy", _typed("class Typed(Client):\n    pass"), {}, "Typed is not defined in a file: move it"),
        ("toy", None, {"nodes": 0}, "--nodes must be 1 to 15"),
        ("toy", None, {"nodes": 2.5}, "nodes must be a whole number, not 2.5"),
        ("toy", None, {"time_limit": None}, "time_limit must be a number, not None"),
        ("toy", None, {"fail_fast": "false"}, "fail_fast must be True or False, not 'false'"),
        ("toy", None, {"settings": "workload.keys=20"}, "settings must be a dict, not 'workload.keys=20'"),
        ("toy", None, {"seed": True}, "seed must be a whole number, not True"),
        ("toy", None, {"metrics": "up"}, "metrics must be a list of strings, not 'up'"),
        ("toy", None, {"metrics": ["up"]}, "system toy declares no page of metrics"),
        ("toy", None, {"seed": 2**63}, "--seed must be 0 to 9223372036854775807, not 9223372036854775808"),
        ("toy", None, {"nemesis": "quake"}, "unknown nemesis 'quake'"),
    ],
)
def test_judged_run_refuses_invalid_arguments_with_a_reason(
    tmp_path: Path, system: object, client: object, options: dict[str, object], said: str
) -> None:
    with pytest.raises(OperatorError) as caught:
        judged_run(system, client, **{"store": str(tmp_path), **options})
    assert said in str(caught.value)


@pytest.mark.parametrize("where", ["marker", "run"])
def test_a_store_is_given_on_the_command_line_alone(session: Path, where: str) -> None:
    marker, given = ('@pytest.mark.splitbrain(store="there")', "") if where == "marker" else ("", ', store="there"')
    status, said = run_pytest(session, f"""
{marker}
def test_stores(splitbrain):
    splitbrain.run("broker"{given})
""")  # fmt: skip
    assert status == 1 and "DID NOT RUN: store is an option of pytest's command line: --splitbrain-store DIR" in said
