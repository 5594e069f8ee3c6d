"""Budgets, reasons, keys, explanations, drawings and the command."""

from __future__ import annotations

import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from checker import (
    ILLEGAL,
    UNKNOWN,
    CASRegister,
    History,
    Model,
    ModelError,
    MultiRegister,
    Operation,
    Register,
    Verdict,
    check,
    check_transactions,
    parse_model,
)
from checker.cli import main
from checker.drawing import html, svg
from checker.nearest import nearest
from checker.testing.large import large_history


def ending_in_a_stale_read(operations: int, clients: int, crash: float) -> History:
    """A CAS history with crashes that ends in a stale read, which no order of the rest avoids."""
    history = [*large_history("cas-register", operations, clients, seed=4, crash=crash)]
    end = 2 * operations
    for f, value, result in (("write", 77, 77), ("write", 78, 78), ("read", None, 77)):
        history.append(Operation(process=-1, f=f, value=value, result=result, invoked=end, returned=end + 1))
        end += 2
    return History.from_operations(history)


def test_a_read_of_a_value_never_written_is_found_in_a_history_too_hard_to_search() -> None:
    history = large_history("cas-register", 3000, 12, seed=4, crash=0.05)
    row = max(row for row in range(3000) if history.f[row] == "read" and history.status[row] == "ok")
    history.result[row] = "never written"
    result = check(history, CASRegister(), timeout_s=20)
    assert result.verdict is Verdict.INVALID and "'never written', but no write" in result.reason


def hostile(events, concurrent: int) -> Any:
    """Concurrent writes of different registers, then a read that no order of them explains."""
    rows: list[tuple[Any, ...]] = [
        (process, "invoke", "txn", [("write", f"r{process}", 1)]) for process in range(concurrent)
    ]
    rows += [(process, "ok", "txn", [("write", f"r{process}", 1)]) for process in range(concurrent)]
    rows += [(0, "invoke", "txn", [("read", "r0", None)]), (0, "ok", "txn", [("read", "r0", 2)])]
    return events(*rows)


def test_an_exhausted_time_budget_is_unknown_and_reports_the_progress(events) -> None:
    result = check(hostile(events, 40), MultiRegister(), timeout_s=0.4)
    assert result.verdict is Verdict.UNKNOWN
    assert "time limit of 0.4 s" in result.reason and "returns explained" in result.reason


def test_an_exhausted_memory_budget_is_unknown(events) -> None:
    result = check(hostile(events, 40), MultiRegister(), timeout_s=60, memory_mb=3)
    assert result.verdict is Verdict.UNKNOWN and "memory limit of 3 MiB" in result.reason


def test_a_stale_read_after_many_crashes_is_found_with_a_witness_of_two_operations() -> None:
    result = check(ending_in_a_stale_read(3000, 12, 0.05), CASRegister(), timeout_s=60)
    assert result.verdict is Verdict.INVALID and result.witness is not None
    assert [operation.value for operation in result.witness.operations] == [78, None]


def test_stats_name_the_engine_and_why_others_did_not_apply(done) -> None:
    result = check(done((0, "write", 1, 1), (0, "write", 1, 1)), Register())
    assert result.stats["engines"] == {"A1 just-in-time search": 1}
    assert result.stats["not_applicable"] == {"A3 register zones": {"two writes write the same value": 1}}
    json.dumps(result.to_json())


def test_keys_are_checked_independently_with_one_job_or_two(events) -> None:
    rows: list[tuple[Any, ...]] = []
    for key in range(6):
        rows += [(key, "invoke", "write", 1, key), (key, "ok", "write", 1, key), (key, "invoke", "read", None, key)]
        rows += [(key, "ok", "read", 9 if key == 4 else 1, key)]
    for jobs in (1, 2):
        result = check(events(*rows), "cas-register", jobs=jobs)
        assert result.verdict is Verdict.INVALID
        assert result.stats["first_invalid_keys"] == [4] and result.witness is not None and result.witness.key == 4


def test_a_user_model_of_ten_lines_is_checked(done) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Toggle(Model):
        def start(self) -> bool:
            return False

        def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
            return (not state) if result is UNKNOWN or result == (not state) else ILLEGAL

    assert check(done((0, "toggle", None, True), (1, "toggle", None, False)), Toggle()).verdict is Verdict.VALID
    assert check(done((0, "toggle", None, True), (1, "toggle", None, True)), Toggle()).verdict is Verdict.INVALID


def test_models_are_parsed_from_names_and_options() -> None:
    assert parse_model("cas-register:initial=0") == CASRegister(initial=0)
    assert parse_model('multi-register:initial={"x": 0, "y": 1}').start() == frozenset({("x", 0), ("y", 1)})
    for name, hint in (("registr", "did you mean register"), ("register:colour=1", "no field 'colour'")):
        with pytest.raises(ModelError, match=hint):
            parse_model(name)


def test_an_operation_the_model_lacks_is_an_error(done) -> None:
    with pytest.raises(ModelError, match=r"accepts read, write; the history has 'cas': first process 0's cas"):
        check(done((0, "cas", [1, 2], [1, 2])), Register())


def test_explanations_name_processes_values_and_times(done) -> None:
    noise = [(process, "write", 100 + process, 100 + process) for process in range(40)]
    history = done(*noise, (1, "write", 1, 1), (2, "write", 2, 2), (3, "read", None, 1))
    for model in (Register(), CASRegister()):
        result = check(history, model)
        assert result.witness is not None and len(result.witness.operations) <= 3
        assert "process 3's read() -> 1 (0.084000 s to 0.085000 s)" in result.reason
        assert "process 2's write(2)" in result.reason
        assert len(json.dumps(result.to_json())) < 5000


def test_an_explanation_of_two_wrong_reads_names_only_the_one_in_its_witness(events) -> None:
    """The read that began last returned first; the history is cut off there."""
    adds = [(0, "invoke", "add", 5), (0, "ok", "add", 5), (1, "invoke", "read", None), (0, "invoke", "read", None)]
    result = check(events(*adds, (0, "ok", "read", 4), (1, "ok", "read", 3)), "counter")
    assert result.witness is not None
    assert [operation.result for operation in result.witness.operations] == [5, 4]
    assert "-> 3" not in result.reason and "is outside the range that additions allow: 5 to 5" in result.reason


def test_an_explanation_names_no_operation_outside_its_witness(events) -> None:
    """An append at offset 1 of an empty log is wrong without the read and the later append."""
    read = {"offset": 1, "messages": [103], "tail": 2}
    puts = [(1, "invoke", "append", 102), (1, "ok", "append", [1, 102]), (2, "invoke", "append", 103)]
    result = check(events(*puts, (1, "invoke", "read", {}), (1, "ok", "read", read)), "log")
    assert result.witness is not None
    assert [(operation.f, operation.value) for operation in result.witness.operations] == [("append", 102)]
    assert "read" not in result.reason and "103" not in result.reason


def test_drawings_are_small_and_well_formed(done) -> None:
    result = check(done((0, "write", "<&>", "<&>"), (1, "write", 2, 2), (2, "read", None, "<&>")), Register())
    assert result.witness is not None
    root = ElementTree.fromstring(svg(result.witness))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) == len(result.witness.operations)
    page = html(result)
    assert "invalid" in page and "<&>" not in page and len(page) < 20_000


def test_no_label_of_a_drawing_reaches_the_next_one_of_its_lane(done) -> None:
    long = [[0, "write", "a" * 20 + str(number), None] for number in range(3)]
    result = check(done(*long, (1, "read", None, long[0][2])), Register())
    assert result.witness is not None
    labels = [
        (int(each.attrib["y"]), int(each.attrib["x"]), len(each.text or ""))
        for each in ElementTree.fromstring(svg(result.witness)).iter()
        if each.get("class") == "label"
    ]
    lanes: dict[int, list[tuple[int, int]]] = {}
    for y, x, characters in labels:
        lanes.setdefault(y, []).append((x, characters))
    assert len(labels) == len(result.witness.operations) and max(map(len, lanes.values())) > 1
    for lane in lanes.values():
        lane.sort()
        assert all(x + 6 * characters < later for (x, characters), (later, _) in pairwise(lane))


def test_opposite_arrows_of_a_drawing_do_not_coincide() -> None:
    skew = check_transactions(
        [
            {"process": 0, "type": "invoke", "f": "txn", "value": [["append", "x", 1], ["r", "y", None]]},
            {"process": 1, "type": "invoke", "f": "txn", "value": [["append", "y", 1], ["r", "x", None]]},
            {"process": 0, "type": "ok", "f": "txn", "value": [["append", "x", 1], ["r", "y", []]]},
            {"process": 1, "type": "ok", "f": "txn", "value": [["append", "y", 1], ["r", "x", []]]},
        ]
    )
    assert skew.witness is not None and len(skew.witness.edges) == 2
    paths = ElementTree.fromstring(svg(skew.witness)).findall(".//{http://www.w3.org/2000/svg}path[@class='edge']")
    ends = [[tuple(map(int, point.split())) for point in path.attrib["d"][1:].split("L")] for path in paths]
    assert len(ends) == 2 and sorted(ends[0]) != sorted(ends[1])


def test_a_page_names_its_file_and_shows_figures_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [("invoke", "write", 1), ("ok", "write", 1), ("invoke", "read", None), ("ok", "read", 2)]
    stale = write(tmp_path / "stale <1>.jsonl", [{"process": 0, "type": t, "f": f, "value": v} for t, f, v in said])
    page = tmp_path / "page.html"
    assert main([stale, "--model", "register", "--html", str(page)]) == 1
    text = page.read_text()
    assert "stale &lt;1&gt;.jsonl" in text and "<td>engines</td><td>A3 register zones: 1</td>" in text
    assert "{" not in text.partition("<table>")[2] and "problems" not in text


def test_a_stale_read_of_the_initial_value_is_told_in_two_sentences(done) -> None:
    result = check(done((0, "write", 1, None), (1, "read", None, None)), Register())
    assert result.reason.endswith("had returned; None is the initial value.")


@pytest.mark.parametrize("name", ["register", "log", "fifo-queue", "set", "multi-register", "key-value"])
def test_reports_of_huge_values_stay_small(done, name: str) -> None:
    long = "x" * 500_000
    lies = {
        "register": [(0, "write", long, None), (1, "read", None, long + "y")],
        "log": [(0, "append", long, [0, long]), (1, "read", {"offset": 0}, {"offset": 0, "messages": [1], "tail": 1})],
        "fifo-queue": [(0, "enqueue", long, None), (1, "dequeue", None, None)],
        "set": [(0, "add", long, True), (1, "contains", long, False)],
        "multi-register": [(0, "txn", [("write", long, long)], None)] + 2 * [(1, "txn", *2 * [[("read", long, 1)]])],
        "key-value": [(0, "put", long, None), (1, "get", None, "y")],
    }
    result = check(done(*lies[name]), name)
    assert result.verdict is Verdict.INVALID
    assert len(json.dumps(result.to_json())) < 20_000 and len(html(result)) < 30_000


def write(path: Path, history: list[dict[str, Any]], extra: str = "") -> str:
    path.write_text("".join(json.dumps(event) + "\n" for event in history) + extra)
    return str(path)


def test_the_command_prints_verdicts_and_exits_with_their_status(
    tmp_path: Path, done, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.jsonl", done((0, "write", 1, 1), (1, "read", None, 1)))
    bad = write(tmp_path / "bad.jsonl", done((0, "write", 1, 1), (1, "read", None, None)))
    assert main([good, "--model", "register"]) == 0
    assert main([bad, good, "--model", "register", "--jobs", "2"]) == 1
    assert "decided by A3 register zones" in capsys.readouterr().out
    assert main([bad, "--model", "register", "--json", "--html", str(tmp_path / "page.html")]) == 1
    assert json.loads(capsys.readouterr().out)["valid"] is False
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert main([bad, "--model", "sequential:register"]) == 0
    assert main([good, "--model", "log-losses"]) == 254


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_verdict_can_be_printed_in_any_encoding(tmp_path: Path, done, monkeypatch, encoding: str) -> None:
    history = write(tmp_path / "b\udcff.jsonl", done((0, "write", "\u2603", None), (1, "read", None, "\u2603\ud800")))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding, write_through=True))
    assert main([history, "--model", "register"]) == 1
    said = printed.getvalue().decode(encoding)
    assert "b\\udcff.jsonl: invalid: " in said and "\\ud800" in said
    assert ("\u2603" in said) == (encoding == "utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{good}"], "--model"),
        (["{good}", "--model", "registr"], "did you mean register"),
        (["{good}", "--model", "register", "--jobs", "0"], "--jobs must be positive"),
        (["{good}", "--model", "register", "--memory", "inf"], "--memory must be positive and finite"),
        (["{good}", "--model", "register", "--timeout", "nan"], "--timeout must be positive and finite"),
        (["{good}", "--model", "register", "--html", ""], "--html: the path is empty"),
        (["{good}", "--model", "register:initial=" + "[" * 10_000], "initial is nested too deeply"),
        (["{good}", "--model", "register:initial=1,initial=2"], "initial is given twice"),
        (["{good}", "--model", "register", "--format", "edn"], "; omit --format if the file is not edn"),
        (["{good}", "--model", "register", "--format", "xml"], "unknown format 'xml'; known: auto, jsonl"),
        (["{good}", "--model", "register", "--format", "jsonn"], "unknown format 'jsonn' (did you mean json?)"),
        (["{good}", "--modle", "register"], "unknown option --modle (did you mean --model?)"),
        (["{good}", "--model", "register", "--lenientt"], "unknown option --lenientt (did you mean --lenient?)"),
        (["{good}", "--model", "list-apend"], "no model 'list-apend' (did you mean list-append?)"),
        (["{good}", "--model", "sequential:registr"], "no model 'registr' (did you mean register?)"),
        (["{good}", "--model", "xylophone"], "no model 'xylophone'; known: register, cas-register, "),
        (["{good}", "--model", "xylophone"], ", list-append, rw-register, log-losses, "),
        (["{good}", "--model", "sequential:bank"], "sequential:bank: bank is not a model; known: register, "),
        (["missing.jsonl", "--model", "register"], "missing.jsonl: No such file"),
        (["{broken}", "--model", "register"], "broken.jsonl:3: not JSON"),
    ],
)
def test_bad_arguments_are_reported_in_one_line_with_status_254(
    tmp_path, done, capsys, arguments: list[str], message: str
) -> None:
    history = done((0, "write", 1, 1))
    good = write(tmp_path / "good.jsonl", history)
    broken = write(tmp_path / "broken.jsonl", history, "{oops\n")
    assert main([argument.format(good=good, broken=broken) for argument in arguments]) == 254
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["history.jsonl", "history.edn"])
def test_the_history_in_a_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([str(tmp_path), "--model", "register"]) == 254
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory\n"
    (tmp_path / name).touch()
    assert main([str(tmp_path), "--model", "register"]) == 254
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory; give {tmp_path / name}\n"


def test_a_dash_is_told_how_to_read_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-", "--model", "register"]) == 254
    assert capsys.readouterr().err == "-: No such file or directory; give /dev/stdin to read standard input\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--time", " (did you mean --time-limit?)"),
        ("--seeed", " (did you mean --seed?)"),
        ("--log", ""),
        ("--quiet", ""),
        ("--", ""),
        ("", ""),
    ],
)
def test_a_hint_ignores_the_dashes_that_all_options_share(word: str, hint: str) -> None:
    assert nearest(word, ["--storage", "--junit", "--set", "--seed", "--time-limit"]) == hint
