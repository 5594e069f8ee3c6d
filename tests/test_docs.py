"""The program accepts the commands that the pages name, and prints what they show."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import registry
from harness.cli_parser import build_parser
from harness.workloads.base import AlsoByCapability
from node.config import ConfigError, parse_broker_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(?: {4}|(?: {4})?\$ )harness (.+)$", re.MULTILINE)
PHASES = (
    "starting the cluster", "starting the system", "driving the load", "healing", "waiting for recovery", "final reads",
    "waiting for replicas to agree", "taking the cluster down", "checking the history",
)  # fmt: skip
FAULT = re.compile(r"^ *[\d.]+ s  fault f1 (begins: partition \S+: proven|ends: partition \S+: proven healed)$", re.M)
NAMED_PATH = re.compile(
    r"`((?:checker|nemesis|node|harness|spark_analysis|tests|scripts|benchmarks|examples)/[\w./-]+)`"
)
OF_A_WHEEL = {"harness/for_hosts"}
CHECK = re.compile(r"^ *(\S+)  (?:valid|invalid|unknown)  ", re.MULTILINE)


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for match in COMMAND.finditer(text):
            yield str(page.relative_to(ROOT)), shlex.split(match[1], comments=True)


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)


def harness(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def tutorial_blocks() -> list[str]:
    return (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").split("```")[1::2]


def test_the_pages_name_commands() -> None:
    assert len(list(commands())) > 30


def test_no_walk_through_the_code_crosses_more_than_twelve_files() -> None:
    page = (ROOT / "docs" / "whats-here.md").read_text(encoding="utf-8")
    walks = page.partition("\n## Four walks\n")[2].partition("\n## ")[0].split("\n\n1. ")[1:]
    assert len(walks) == 4
    for walk in walks:
        stops = re.findall(r"^(?:\d+\. )?`(\S+)`", walk.partition("\n\n")[0], re.MULTILINE)
        assert 5 < len(stops) <= 12
        assert [stop for stop in stops if not (ROOT / stop).exists()] == []


@pytest.mark.parametrize(("page", "words"), list(commands()))
def test_commands_of_the_pages_are_accepted(page: str, words: list[str]) -> None:
    if words[0] != "check":  # which has a parser of its own
        assert build_parser().parse_args(words).command == words[0], page


def test_every_option_is_named_on_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert set(options_of(build_parser())) - named - {"--help", "--version"} == set()


def test_methods_of_a_client_are_listed_with_the_workloads_that_need_them() -> None:
    page = (ROOT / "docs" / "clients-in-any-language.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines() if row.startswith("| `")]
    named = {method: row[-1] for row in rows for method in re.findall(r"`(\w+)`", row[0])}
    missing = []
    for name, workload in registry.load_all("workloads").items():
        form = workload.by_capability if isinstance(workload, AlsoByCapability) else workload
        missing += [(name, method) for method in form.capabilities if f"`{name}`" not in named.get(method, "")]
    assert missing == []


def test_every_key_of_a_broker_configuration_is_named_on_a_page() -> None:
    tables = ("", "[classic]", "[[topics]]", "[limits]", "[transactions]", "[acl]", "[[acl.accounts]]", "[tls]")
    told = [said for table in (*tables, "[dledger]") for said in problems_of(f"{table}\nzzz = 1")]
    keys = {(said.split(": ")[0], key) for said in told for key in said.partition("; known are ")[2].split(", ")}
    pages = ("node", "dledger", "classic-ha", "client")
    text = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in pages)
    assert len(keys) > 60
    assert {(place, key) for place, key in keys if not re.search(rf"(?<!\w){key}(?!\w)", text)} == set()


def problems_of(configuration: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_broker_config(configuration)
    return [problem for problem in caught.value.problems if "zzz: is no known key" in problem]


def test_files_that_pages_name_exist() -> None:
    named = {(page, path) for page in PAGES for path in NAMED_PATH.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 100
    gone = [(str(page.relative_to(ROOT)), path) for page, path in named if not (ROOT / path).exists()]
    gone = [(page, path) for page, path in gone if path not in OF_A_WHEEL and not (ROOT / f"{path}.py").exists()]
    assert gone == []


def test_errors_in_the_tutorial_are_what_the_program_prints(tmp_path: Path) -> None:
    transcripts = [block.strip().splitlines() for block in tutorial_blocks() if block.startswith("\n$ harness ")]
    assert transcripts
    for command, *printed in transcripts:
        done = harness(*shlex.split(command.removeprefix("$ harness ")), cwd=tmp_path)
        assert done.stderr.splitlines() == printed, command


def test_runs_in_the_tutorial_look_like_current_runs(tmp_path: Path) -> None:
    words = ["--time-limit", "6", "--nemesis", "partition=leader", "--nemesis-interval", "2", "--seed", "5"]
    done = harness("run", "--cluster", "sim", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert tuple(line for line in lines if line in PHASES) == PHASES
    assert len(FAULT.findall(done.stderr)) == 2
    assert "fault      how " in done.stderr
    checks = [name for name in CHECK.findall(done.stdout) if name != "invariants"]  # which only simulation has
    shown = [block for block in tutorial_blocks() if "checking the history" in block]
    assert len(shown) == 2
    for block in shown:
        assert tuple(line for line in block.splitlines() if line in PHASES) == PHASES
        assert len(FAULT.findall(block)) == 2
        assert block.splitlines()[2].startswith("fault      how ")
        assert CHECK.findall(block.partition("checking the history")[2]) == checks
