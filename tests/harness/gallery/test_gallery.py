"""The gallery: the outcome of a run, its record, the page, the exit status."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli, registry
from harness.cli_parser import build_parser
from harness.commands import gallery
from harness.commands.run import prepare
from harness.errors import InterruptedStartError, OperatorError, SystemUnderTestError
from harness.gallery import performing
from harness.gallery.finding import FOUND as IS_FOUND
from harness.gallery.finding import SIDES, Finding, is_met, outcome_of
from harness.gallery.findings import FINDINGS
from harness.gallery.page import pages, write_pages
from harness.gallery.recording import load, record_of, run_of, save, statistics_of

ROOT = Path(__file__).resolve().parents[3]

FINDING = Finding(
    name="toy-forgets",
    title="A register in memory is gone when its process is killed",
    version="toy 1",
    options="--system toy --nodes 1 --workload register --time-limit 3 --cluster local",
    finding="--nemesis kill=sigkill --nemesis-interval 1",
    control="--nemesis none",
    control_says="nobody is killed",
    check="linearizable",
    names=("read",),
    promised="Nothing.",
    reported="nobody",
    link="https://example.org",
)
OPERATION = {"process": 1, "f": "add", "value": 5, "status": "ok", "invoked_ns": 10**9, "returned_ns": 2 * 10**9}
READ = {**OPERATION, "process": 2, "f": "read", "value": None, "invoked_ns": 3 * 10**9, "returned_ns": 4 * 10**9}
FAULT = {"id": "f1", "nemesis": "kill", "variant": "sigkill@n1", "start_ns": 25 * 10**8, "end_ns": 35 * 10**8,
         "proven": True, "healed": True}  # fmt: skip


def results(valid: Any, *, lost: int = 0, check: str = "set-full", reason: str = "words") -> dict[str, Any]:
    checks = {check: {"valid": valid, "reason": reason, "stats": {"counts": {"lost": lost, "stale": 0}},
                      "witness": {"operations": [OPERATION, READ], "text": "5 was lost"}}}  # fmt: skip
    return {"valid": valid, "reason": reason, "checks": checks, "faults": [FAULT], "ops": {"ok": 1234}, "seed": 7}


LOSES = replace(FINDING, check="set-full", names=("lost",))


@pytest.mark.parametrize(
    ("came", "outcome"),
    [
        (results(True), "valid"),
        (results("unknown", lost=3), "unknown"),
        (results(False, lost=3), "found"),
        (results(False, lost=0, reason="5 was lost"), "invalid"),  # the kind is counted, and its count is 0
        (results(False, lost=3, check="recovers"), "invalid"),
    ],
)
def test_a_run_is_found_only_if_the_named_check_has_the_named_anomaly(came: Mapping[str, Any], outcome: str) -> None:
    assert outcome_of(LOSES, came) == outcome


def test_an_anomaly_that_is_not_counted_is_looked_for_in_the_reason() -> None:
    stale = replace(LOSES, names=("read() ->", "nothing like it"))
    assert outcome_of(stale, results(False, reason="Key 1: read() -> 3 is not possible")) == "found"
    assert outcome_of(stale, results(False, reason="Key 1: write(3) is not possible")) == "invalid"


def test_the_place_of_the_store_is_not_published() -> None:
    said = "NodeID in /srv/kept/kv-set-power/20260131T000000Z/nodes/n1/data/node-id is invalid"
    kept = run_of(LOSES, results(False, reason=said))["reason"]
    assert kept.endswith("NodeID in nodes/n1/data/node-id is invalid") and "/srv" not in kept


def test_a_finding_is_met_by_four_of_five_runs_and_a_control_by_all() -> None:
    assert is_met("finding", {"found": 4, "valid": 1}) and not is_met("finding", {"found": 3, "valid": 1})
    assert is_met("control", {"valid": 5}) and not is_met("control", {"valid": 4, "unknown": 1})
    assert not is_met("finding", {}) and not is_met("control", {})


def test_the_options_of_every_finding_are_accepted() -> None:
    known = {kind: set(registry.names(kind)) for kind in ("systems", "workloads")}
    for finding in FINDINGS.values():
        for side in SIDES:
            arguments = build_parser().parse_args(["run", *finding.words(side), "--seed", "1"])
            assert arguments.system in known["systems"] and arguments.workload in known["workloads"]
            try:
                run = prepare(build_parser().parse_args(["run", *finding.words(side), "--cluster", "local"]))
            except OperatorError as error:
                assert "use --cluster netns" in str(error), "no other error is expected"
            else:
                assert run.parts.test.system == arguments.system
        assert finding.words("finding") != finding.words("control"), finding.name
        assert finding.link.startswith("https://") and not finding.title.endswith(".")


def record(found: int = 1, clean: int = 1, finding: Finding = LOSES) -> dict[str, Any]:
    runs = {
        "finding": [run_of(finding, results(False, lost=2 + n)) for n in range(found)],
        "control": [run_of(finding, results(True)) for _ in range(clean)],
    }
    return record_of(finding, runs, day="2026-01-31", cluster="netns", shown=results(False, lost=2))


def test_the_page_has_counts_a_picture_and_the_commands(tmp_path: Path) -> None:
    unrun = replace(LOSES, name="unrun")
    made = pages({LOSES.name: LOSES, "unrun": unrun}, {LOSES.name: record(5, 5)})
    page = made["gallery.md"]
    assert "| [toy-forgets](#toy-forgets) | toy 1 | 5 of 5 | 5 of 5 | 2026-01-31 |" in page
    assert "| [unrun](#unrun) | toy 1 | not run yet |  |  |" in page
    assert "found in 5 of 5 runs (2 to 6 lost)" in page and "12,340 operations" in page
    assert f"    {LOSES.line('finding')}\n    {LOSES.line('control')}" in page
    drawn = ElementTree.fromstring(made["gallery/toy-forgets.svg"])
    texts = " ".join("".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text"))
    assert "add" in texts and "process 2" in texts and "sigkill@n1" in texts


def test_pictures_of_removed_findings_are_deleted_and_other_files_stay(tmp_path: Path) -> None:
    gone = replace(LOSES, name="gone")
    write_pages(str(tmp_path), pages({LOSES.name: LOSES, "gone": gone}, {LOSES.name: record(), "gone": record()}))
    (tmp_path / "gallery" / "mine.svg").write_text("drawn by hand")
    assert (tmp_path / "gallery" / "gone.svg").exists()
    write_pages(str(tmp_path), pages({LOSES.name: LOSES}, {LOSES.name: record()}))
    assert sorted(path.name for path in (tmp_path / "gallery").iterdir()) == ["mine.svg", "toy-forgets.svg"]


def test_the_page_shows_outcomes_that_are_not_as_expected() -> None:
    known = record(2, 2)
    known["runs"]["control"][0] = {"seed": 3, "outcome": "invalid", "reason": "it lost two", "counts": {}, "ok": 1,
                                   "faults": 1, "proven": 1}  # fmt: skip
    changed = replace(LOSES, control="--nemesis pause")
    page = pages({LOSES.name: changed}, {LOSES.name: known})["gallery.md"]
    assert "2 of 2 (not as expected) | 1 of 2 | 2026-01-31, changed since |" in page
    assert "- Control, seed 3: invalid: it lost two" in page


def test_records_are_kept_and_a_malformed_file_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "gallery.json")
    assert load(path) == {}
    save(path, {LOSES.name: record()})
    assert statistics_of(load(path)[LOSES.name]) == ("1 of 1", "1 of 1", True)
    Path(path).write_text('{"toy-forgets": 5}')
    with pytest.raises(OperatorError, match="is not a gallery results file"):
        load(path)


def damaged(place: list[Any], value: Any) -> Any:
    """A record in which the field at `place` has another value; `DELETED` for none."""
    found: Any = json.loads(json.dumps(record()))
    inner = found
    for step in place[:-1]:
        inner = inner[step]
    if value == DELETED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return found


DELETED = "there is no such field"


@pytest.mark.parametrize("value", [DELETED, 5.5, [], {}, "text", [{}], {"a": "b"}], ids=repr)
@pytest.mark.parametrize(
    "place",
    [["version"], ["day"], ["cluster"], ["lines"], ["runs"], ["witness"], ["runs", "finding"], ["runs", "control"],
     ["runs", "finding", 0], *(["runs", "finding", 0, name] for name in record()["runs"]["finding"][0])],
    ids=repr,
)  # fmt: skip
def test_a_record_with_any_field_damaged_is_refused_or_makes_a_page(
    tmp_path: Path, place: list[Any], value: Any
) -> None:
    path = tmp_path / "gallery.json"
    path.write_text(json.dumps({LOSES.name: damaged(place, value)}))
    try:
        records = load(str(path))
    except OperatorError as error:
        assert "is not a gallery results file (toy-forgets: " in str(error)
    else:
        assert pages({LOSES.name: LOSES}, records)["gallery.md"]


def test_the_published_page_is_made_from_the_published_records() -> None:
    records = load(str(ROOT / "docs" / "gallery.json"))
    for path, text in pages(FINDINGS, records).items():
        assert (ROOT / "docs" / path).read_text(encoding="utf-8") == text, f"{path}: harness gallery page"


Performs = Callable[..., int]


@pytest.fixture
def run_gallery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Performs:
    """`harness gallery run` over findings of the toy, whose runs have the given results or raise the given error."""

    def perform_all(outcomes: Mapping[str, list[Any]], *words: str, findings: tuple[Finding, ...] = (FINDING,)) -> int:
        left = {side: list(came) for side, came in outcomes.items()}

        class RunDir:
            name = "toy/time"

        def perform(parts: Any, store: Any, console: Any) -> Any:
            came = left["finding" if parts.test.nemesis else "control"].pop(0)
            if isinstance(came, Exception):
                raise came
            return RunDir(), came

        monkeypatch.setattr(performing, "perform", perform)
        monkeypatch.setattr(gallery, "FINDINGS", {each.name: each for each in findings})
        return cli.main(["gallery", "run", *words, "--results", str(tmp_path / "gallery.json"), "--seed", "7"])

    return perform_all


FOUND = results(False, check="linearizable", reason="read() -> 3 is not possible")
VALID = results(True, check="linearizable")
UNKNOWN = results("unknown", check="linearizable")
OTHER = results(False, check="recovers")


@pytest.mark.parametrize(
    ("found", "clean", "status"),
    [
        ([FOUND] * 5, [VALID] * 5, 0),
        ([FOUND] * 4 + [VALID], [VALID] * 5, 0),
        ([FOUND] * 3 + [VALID] * 2, [VALID] * 5, 1),
        ([OTHER] * 5, [VALID] * 5, 1),
        ([FOUND] * 5, [VALID] * 4 + [FOUND], 1),
        ([FOUND] * 5, [VALID] * 4 + [UNKNOWN], 2),
        ([UNKNOWN] * 5, [VALID] * 5, 2),
        ([SystemUnderTestError("no room")] * 5, [VALID] * 5, 2),
    ],
)
def test_the_exit_status_is_0_only_when_everything_is_as_expected(
    run_gallery: Performs, tmp_path: Path, found: list[Any], clean: list[Any], status: int
) -> None:
    assert run_gallery({"finding": found, "control": clean}, "toy-forgets", "--times", "5") == status
    kept = json.loads((tmp_path / "gallery.json").read_text())["toy-forgets"]
    assert [len(kept["runs"][side]) for side in SIDES] == [5, 5]


def test_a_finding_that_cannot_be_run_is_reported_and_the_others_are_run(
    run_gallery: Performs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(FINDING, name="absent", options=FINDING.options.replace("toy", "nosuch"))
    status = run_gallery({"finding": [FOUND], "control": [VALID]}, "--all", findings=(absent, FINDING))
    assert status == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "absent not run unknown system 'nosuch'" in said
    assert "toy-forgets 1 of 1 1 of 1 as expected" in said
    assert list(load(str(tmp_path / "gallery.json"))) == ["toy-forgets"]


def test_a_finding_that_is_not_as_expected_outweighs_one_that_cannot_be_run(run_gallery: Performs) -> None:
    absent = replace(FINDING, name="absent", options=FINDING.options.replace("toy", "nosuch"))
    assert run_gallery({"finding": [OTHER], "control": [VALID]}, "--all", findings=(absent, FINDING)) == 1


def test_an_interrupt_while_a_system_starts_ends_the_command_without_a_record(
    run_gallery: Performs, tmp_path: Path
) -> None:
    interrupted = InterruptedStartError("interrupted before the system had started")
    assert run_gallery({"finding": [interrupted], "control": []}, "toy-forgets") == 2
    assert load(str(tmp_path / "gallery.json")) == {}


def test_an_interrupted_finding_is_not_recorded(run_gallery: Performs, tmp_path: Path) -> None:
    assert run_gallery({"finding": [{**FOUND, "interrupted": "SIGINT"}], "control": []}, "toy-forgets") == 2
    assert load(str(tmp_path / "gallery.json")) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "no findings named: give --all, or some of"),
        (["run", "--all", "redis-failover-loss"], "no findings named"),
        (["run", "redis-failover-los"], "did you mean redis-failover-loss?"),
        (["run", "--all", "--cluster", "dokcer"], "unknown cluster 'dokcer' (did you mean docker?)"),
        (["page", "--results", "nowhere.json"], "nowhere.json does not exist: create it with harness gallery run"),
    ],
)
def test_usage_errors_are_reported_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gallery", *words]) == 254
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zookeeper-empty-snapshot", "not recovered after 60 s: program zookeeper of n2 ended with status 1"),
        (
            "rocketmq-topics-power-loss",
            "3 hosts served after 0.3 s, but none of 90 final operations succeeded within 9 s",
        ),
    ],
)
def test_a_finding_matches_the_reasons_of_today_and_of_the_kept_results(name: str, reason: str) -> None:
    kept = json.loads((ROOT / "docs" / "gallery.json").read_text(encoding="utf-8"))[name]["runs"]["finding"]
    reasons = [run["reason"].removeprefix("recovers: ") for run in kept if run["outcome"] == IS_FOUND]
    assert len(reasons) >= 3
    for each in (reason, *reasons):
        results = {"valid": False, "checks": {"recovers": {"valid": False, "reason": each}}}
        assert outcome_of(FINDINGS[name], results) == IS_FOUND, each
    partly = "3 hosts served after 0.3 s, but none of the final operations on key 1 succeeded within 9 s"
    other = {"valid": False, "checks": {"recovers": {"valid": False, "reason": partly}}}
    assert outcome_of(FINDINGS[name], other) == "invalid"
