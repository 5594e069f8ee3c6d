"""JUnit files and step summaries, read back by a parser."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cli
from harness.errors import OperatorError
from harness.report.junit import Case, case_of, write_junit
from harness.report.step_summary import summary

VERDICTS = {"valid": None, "invalid": "failure", "unknown": "error", "did-not-run": "error"}


def read(path: Path) -> dict[str, ElementTree.Element]:
    return {str(case.get("name")): case for case in ElementTree.parse(path).getroot().iter("testcase")}


def test_a_parser_tells_verdicts_apart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "junit.xml"
    cases = [Case(verdict, verdict, f"because {verdict}", properties={"seed": "7"}) for verdict in VERDICTS]
    write_junit(str(path), cases)
    found = read(path)
    for verdict, tag in VERDICTS.items():
        children = [child for child in found[verdict] if child.tag != "properties"]
        problems = [(child.tag, child.get("type"), child.get("message")) for child in children]
        assert problems == ([] if tag is None else [(tag, verdict, f"because {verdict}")])
        told = {each.get("name"): each.get("value") for each in found[verdict].iter("property")}
        assert told == {"verdict": verdict, "seed": "7"}
    root = ElementTree.parse(path).getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "1", "2")


RESULTS = {
    "reason": "a fault was not proven", "doubts": ["fault f1 was not effective"], "seed": 7, "replay": "harness run",
    "checks": {"log": {"valid": True, "reason": "fine"}, "replicas": {"valid": "unknown", "reason": "n3 is silent"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("valid", "verdict"),
    [(True, "valid"), (False, "invalid"), ("unknown", "unknown"), (None, "unknown"), (1, "unknown"), ("x", "unknown")],
)
def test_a_case_has_the_verdict_of_its_run_and_all_that_speaks_against_it(valid: object, verdict: str) -> None:
    case = case_of({**RESULTS, "valid": valid}, {"cluster": "sim"}, name="run", report_path="report.html")
    assert (case.verdict, case.reason) == (verdict, "a fault was not proven")
    assert case.text.splitlines() == [
        "log: valid: fine", "replicas: unknown: n3 is silent", "doubt: fault f1 was not effective",
    ]  # fmt: skip


def test_the_summary_marks_every_verdict_and_says_how_to_repeat_all_but_valid_runs() -> None:
    cases = [Case(f"case-{verdict}", verdict, "why", properties={"repeat": f"again {verdict}"}) for verdict in VERDICTS]
    lines = summary(cases).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:6]] == [
        "✅ valid", "❌ invalid", "❔ unknown", "⚠️ did-not-run",
    ]  # fmt: skip
    assert [line.strip() for line in lines if line.startswith("    ")] == [
        "again invalid", "again unknown", "again did-not-run",
    ]  # fmt: skip


@given(text=st.text(), name=st.text())
def test_any_text_makes_a_well_formed_file(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.xml"
    write_junit(str(path), [Case(name, "invalid", text, text=text, properties={"repeat": text})])
    case = next(iter(ElementTree.parse(path).getroot().iter("testcase")))
    assert case.find("failure") is not None
    table = summary([Case(name, "invalid", text, properties={"seed": "1"})])
    assert len(table.splitlines()) == 3


def test_a_file_that_cannot_be_written_is_an_operator_error(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"--junit '/.*': must name a file"):
        write_junit(str(tmp_path), [])


def test_the_verdict_is_printed_even_if_the_file_cannot_be_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--cluster", "sim", "--nodes", "3", "--time-limit", "0.2", "--seed", "1", "--junit", "/dev/full/x"]
    monkeypatch.setattr("harness.commands.run.require_junit_path", lambda path: None)  # it was there at the start
    assert cli.main([*words, "--store", str(tmp_path / "store")]) == 254
    said = capsys.readouterr()
    assert "VALID" in said.out and re.search(r"\nrepeat  \S*harness run", said.out)
    assert said.err.splitlines()[-1].startswith("harness: --junit /dev/full/x: ")


@pytest.mark.cluster
def test_harness_run_writes_the_junit_file_and_the_step_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit, table = tmp_path / "junit.xml", tmp_path / "summary.md"
    table.write_text("before\n")
    words = ["run", "--system", "toy", "--cluster", "local", "--nodes", "2", "--time-limit", "1.5", "--seed", "5"]
    words += ["--store", str(tmp_path / "store"), "--junit", str(junit), "--step-summary", str(table)]
    assert cli.main(words) == 0
    (case,) = read(junit).values()
    told = {str(each.get("name")): str(each.get("value")) for each in case.iter("property")}
    assert told["verdict"] == "valid" and told["seed"] == "5" and "--seed 5" in told["repeat"]
    assert Path(told["report"]).is_file() and float(str(case.get("time"))) > 0
    assert table.read_text().startswith("before\n| run | verdict |") and "✅ valid" in table.read_text()
    assert cli.main([*words, "--test-count", "2"]) == 0
    assert len(read(junit)) == 2
    assert cli.main([*words, "--workload", "set"]) == 254
    (case,) = read(junit).values()
    error = case.find("error")
    assert error is not None and error.get("type") == "did-not-run"
    assert "workload set needs the methods add, members" in str(error.get("message"))
    junit.unlink()
    assert cli.main([*words, "--workload", "set", "--test-count", "2"]) == 254  # a series writes the file as well
    assert [case.find("error") is not None for case in read(junit).values()] == [True]
    capsys.readouterr()
