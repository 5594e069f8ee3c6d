"""The report as a file: verdict first, complete, escaped, and bounded in size."""

import html
import html.parser
import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness.report.checks import check_sections
from harness.report.console import print_summary
from harness.report.page import MAX_REPORT_BYTES, write_report
from harness.store import StoreError

spec = importlib.util.spec_from_file_location("report_runs", Path(__file__).parent / "conftest.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
    """Checks that elements are properly nested and gathers text, tags and attributes."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def report(run, results, *, test=runs.TEST, **history):
    if not run.history_path.exists():
        runs.write_run(run.history_path, **history)
    path = write_report(run.path, test, results, run.history_path)
    assert path == run.report_path
    source = path.read_bytes()
    assert len(source) <= MAX_REPORT_BYTES
    return Page(source.decode())


def headline(page):
    match = re.search(r"<h1><strong>(\w+)</strong>.*<span class=\"sentence\">(.*)</span></h1>", page.source)
    return match[1], html.unescape(match[2])


def test_the_page_of_a_valid_run_shows_verdict_faults_charts_and_checks(run):
    faults = runs.make_faults(60)
    page = report(run, runs.make_results(faults), faults=faults, operations=2000)
    verdict, sentence = headline(page)
    assert verdict == "VALID"
    assert re.fullmatch(r"1,\d{3} operations, 6 faults, all proven", sentence)
    assert ("body", "class", "valid") in page.attributes
    assert "majorities-ring" in page.text
    assert "n1 n2 | n3 n4 n5" in page.text
    assert page.text.count("12 links cut, 8 others pass") == 6
    assert "Latency of write" in page.text and "Latency of read" in page.text
    assert "Leader by node and term" in page.text
    assert "5 replicas hold the same 1834008 committed bytes" in page.text
    assert "--seed 4711" in page.text
    assert "0353ef61c1b2" in page.text
    assert "The contradiction" not in page.text


def test_the_bands_of_faults_are_drawn_at_their_times(run):
    faults = runs.make_faults(60)
    report(run, runs.make_results(faults), faults=faults, operations=1000)
    source = run.report_path.read_text()
    bands = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" y="0" height="100%" class="band tint0"/>', source)
    end_ns = max(json.loads(line)["time"] for line in run.history_path.read_text().splitlines())
    expected = [(100 * f["start_ns"] / end_ns, 100 * (f["end_ns"] - f["start_ns"]) / end_ns) for f in faults]
    assert len(bands) % len(faults) == 0 and len(bands) >= 4 * len(faults)  # in every panel
    for (x, width), (start, length) in zip(bands[: len(faults)], expected, strict=True):
        assert float(x) == pytest.approx(start, abs=0.01)
        assert float(width) == pytest.approx(length, abs=0.01)


def invalid_results(faults=(), **changes):
    results = runs.make_results(faults, valid=False, reason="linearizable: key 5 is not linearizable")
    results["checks"]["linearizable"] = {"valid": False, "reason": "stale", "witness": runs.make_witness(), **changes}
    return results


@pytest.mark.parametrize(("start_s", "is_said"), [(36.413, True), (36.412, False), (36.2, False), (5, False)], ids=str)
def test_a_contradiction_before_any_fault_is_said_to_need_none(run, start_s, is_said):
    faults = [{**runs.make_faults(60)[0], "start_ns": round(start_s * 1e9), "end_ns": 40 * 10**9}]
    results = invalid_results(faults)
    page = report(run, results, faults=faults)
    assert ("No fault had a part in it: the first one began at 36.413 s." in page.text) is is_said
    print_summary(results, Console(file=(said := io.StringIO()), width=200))
    words = "1 fault, 1 proven; linearizable failed before the first one, which began at 36.413 s"
    assert (words in said.getvalue()) is is_said
    results["checks"]["linearizable"]["witness"]["operations"][0]["returned_ns"] = None
    assert "No fault had a part" not in report(run, results, faults=faults).text, "a write without an answer"


def test_an_invalid_run_shows_the_contradiction(run):
    faults = runs.make_faults(60)
    page = report(run, invalid_results(faults), faults=faults, operations=4000)
    verdict, sentence = headline(page)
    assert verdict == "INVALID"
    assert sentence.startswith("Process 7 read 17 from n2 at 36.412 s")
    assert "The contradiction on key 5" in page.text
    for words in ("write 17", "write 18", "read → 18", "read → 17", "36.409 s", "36.412 s", "leader-alone"):
        assert words in page.text
    assert "the read of 18 returned before the other began" in page.text
    assert [a for a in page.attributes if a[1] == "marker-end"] == [("line", "marker-end", "url(#arrow)")] * 4
    assert ("marker", "id", "arrow") in page.attributes
    assert page.text.index("The contradiction") < page.text.index("Over time")


def test_what_an_operation_returned_is_not_split_by_the_end_of_a_line(run):
    witness = runs.make_witness()
    witness["text"] = "process 7's read() -> 17 was stale"
    witness["edges"][0]["reason"] = "the read() -> 18 returned first"
    page = report(run, invalid_results(witness=witness), operations=4000)
    assert headline(page)[1] == "Process 7's read() → 17 was stale"
    assert "the read() → 18 returned first" in page.text and "->" not in page.text


def test_an_explained_violation_is_told_apart_from_the_contradiction(run):
    points = [{"at_s": at_s, "intervention": "heal", "fails": at_s, "holds": 9 - at_s} for at_s in (0, 9)]
    (run.path / "explain.json").write_text(json.dumps({"points": points, "jump": None}))
    note = "need not be the contradiction below"
    assert note in report(run, invalid_results(())).text
    assert note not in report(run, runs.make_results()).text


def test_a_witness_may_be_a_plain_list_of_operations(run):
    operations = [
        {"process": 0, "f": "write", "key": 1, "value": 8, "type": "ok", "invoke_time_ns": 10, "complete_time_ns": 20},
        {"process": 1, "f": "read", "key": 1, "output": 7, "type": "ok", "invoke_time_ns": 30, "complete_time_ns": 40},
    ]
    results = invalid_results(witness=operations, explanation="the read of 7 comes after 8 was written")
    page = report(run, results, operations=10)
    assert headline(page) == ("INVALID", "The read of 7 comes after 8 was written")
    assert "read → 7" in page.text
    assert sum(attribute[1] == "marker-end" for attribute in page.attributes) == 1  # found from the times


def test_the_drawing_leaves_room_for_the_longest_name_of_a_process(run):
    witness = runs.make_witness()
    witness["operations"][0]["process"] = 123_456
    page = report(run, invalid_results(witness=witness))
    assert '<div class="panel lanes" style="--letters: 6">' in page.source


def test_the_longest_latency_is_shown_exactly(run):
    lines = [
        {"index": 0, "time": 0, "process": 0, "type": "invoke", "f": "read", "value": None},
        {"index": 1, "time": 31_317_259, "process": 0, "type": "ok", "f": "read", "value": 1},
    ]
    run.history_path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "read 1 " + "30.7 ms " * 3 + "31.3 ms" in report(run, runs.make_results()).text


def test_rates_and_latencies_are_drawn_where_the_operations_ended(run):
    failed_ns, last = 55_300_000_000, 1210
    events = [
        {"process": process, "type": kind, "f": "write", "value": step, "time": time_ns}
        for step in range(last)
        for process, outcome in ((0, "ok"), (1, "fail"))
        if process == 0 or step * 50_000_000 == failed_ns - 50_000_000
        for kind, time_ns in (("invoke", step * 50_000_000), (outcome, (step + 1) * 50_000_000))
    ]
    events.sort(key=lambda event: event["time"])
    run.history_path.write_text("".join(json.dumps(event) + "\n" for event in events))
    page = report(run, runs.make_results())
    readout, end_ns = readout_of(page), last * 50_000_000
    assert end_ns % readout["window"]  # the last window ends after the run
    plots = [
        (float(plot[1]), plot[2])
        for plot in re.finditer(r'<svg viewBox="0 0 ([\d.]+) \d+"[^>]*class="plot">(.*?)</svg>', page.source)
    ]
    ((width, plot),) = [each for each in plots if "line rate fail" in each[1]]
    path = re.search('d="([^"]*)" class="line rate fail"', plot)[1]
    heights = [int(height) for height in re.findall(r"V(\d+)H", path)]
    (window,) = [place for place, height in enumerate(heights) if height < 1000]
    assert window * end_ns / width <= failed_ns < (window + 1) * end_ns / width
    assert width * readout["window"] == pytest.approx(end_ns, rel=1e-5)
    column_ns = readout["least"] / 16
    others = [width for width, plot in plots if "dots" in plot or "q0" in plot]
    assert len(others) == 2 and others == pytest.approx([end_ns / column_ns] * 2, rel=1e-5)


def test_the_rate_of_a_slow_run_has_decimals(run):
    page = report(run, runs.make_results(), operations=20)
    assert re.search(r"<dd>\d\d</dd><dd class=\"remark\">0\.3\d per second</dd>", page.source)


@pytest.mark.parametrize(("leaders", "said"), [(15, ""), (20, ", 15 of 20 nodes that led")])
def test_leaders_without_a_row_are_counted(run, leaders, said):
    results = runs.make_results()
    terms = [{"term": n, "leader": f"n{n}", "start_ns": n * 10**9} for n in range(1, leaders + 1)]
    results["checks"]["leaders"]["terms"] = terms
    page = report(run, results, operations=500)
    assert f'<div class="caption">Leader by node and term{said}</div>' in page.source


def test_the_legend_names_every_nemesis_beside_its_colour(run):
    names = ["link", "clock", "disk-error", "members", "pause", "disk-slow", "kill"]
    faults = [{**fault, "nemesis": name} for name, fault in zip(names, runs.make_faults(75), strict=True)]
    page = report(run, runs.make_results(faults), faults=faults, operations=500)
    legend = re.findall(r'class="band tint(\d)"/></svg>([^<]*)</li>', page.source)
    names = ["link, disk-slow", "clock, kill", "disk-error", "members", "pause"]
    assert legend == [(str(tint), shared) for tint, shared in enumerate(names)]


def test_the_operations_have_a_node_column_only_if_a_node_is_known(run):
    witness = runs.make_witness()
    assert ("td", "data-label", "Node") in report(run, invalid_results(witness=witness), operations=10).attributes
    nameless = [{name: word for name, word in one.items() if name != "node"} for one in witness["operations"]]
    page = report(run, invalid_results(witness={**witness, "operations": nameless}), operations=10)
    labels = {value for tag, name, value in page.attributes if (tag, name) == ("td", "data-label")}
    assert "Completed" in labels and "Node" not in labels


def test_an_unknown_run_never_looks_valid(run):
    faults = runs.make_faults(60)
    faults[2] = {**faults[2], "proven": False, "proof": {"proven": False, "failed": ["n1->n3 still passes"]}}
    reason = "fault f3 was not effective: n1->n3 still passes"
    page = report(run, runs.make_results(faults, valid="unknown", reason=reason), faults=faults, operations=500)
    assert headline(page) == ("UNKNOWN", "Fault f3 was not effective: n1->n3 still passes")
    assert ("body", "class", "unknown") in page.attributes
    assert page.text.count("not proven") == 1
    assert "5 of 6" in page.text
    assert "unproven" in " ".join(value for _, name, value in page.attributes if name == "class")


def test_the_checks_that_are_left_out_of_a_page_are_the_valid_ones():
    checks = {f"fine{number}": {"valid": True, "reason": ""} for number in range(5)}
    checks |= {"open": {"valid": "unknown", "reason": ""}, "broken": {"valid": False, "reason": ""}}
    assert [(each.name, each.verdict) for each in check_sections(checks, 3)] == [
        ("broken", "invalid"), ("open", "unknown"), ("fine0", "valid"),
    ]  # fmt: skip


@pytest.mark.parametrize("valid", ["unknown", False])
def test_doubts_that_are_left_out_are_counted(run, valid):
    doubts = [f"fault f{number} was not proven healed" for number in range(14)]
    page = report(run, runs.make_results([], valid=valid, reason="as seen", doubts=doubts))
    assert doubts[11] in page.text and doubts[12] not in page.text
    assert "and 2 more: results.json has all" in page.text
    page = report(run, runs.make_results([], valid=valid, reason="as seen", doubts=doubts[:12]))
    assert doubts[11] in page.text and "more: results.json" not in page.text


def test_a_fault_that_was_not_exercised_is_shown_with_the_reason(run):
    faults = runs.make_faults(60)
    met = {"proven": True, "exercised": False, "detail": "no packet ran into the cut"}
    faults[2] = {**faults[2], "exercised": False, "met": met}
    faults[3] = {**faults[3], "exercised": True, "met": {"proven": True, "exercised": True, "detail": "7 packets"}}
    page = report(run, runs.make_results(faults), faults=faults, operations=500)
    assert headline(page)[1].endswith("6 faults, all proven, 1 not exercised")
    assert page.text.count("no packet ran into the cut") == page.text.count("7 packets") == 1
    assert page.text.count("not exercised") >= 3  # in the headline, the tile and the row


@pytest.mark.parametrize("valid", [None, 0, 1, "true", "valid", [], {}])
def test_anything_but_true_and_false_is_unknown(run, valid):
    assert headline(report(run, runs.make_results(valid=valid), operations=10))[0] == "UNKNOWN"


ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>\x1b[31m\u202e\ud800"


def test_no_text_of_a_node_or_an_operator_becomes_markup(run):
    with open(run.history_path, "w") as file:
        for number in range(20):
            operation = {"process": number, "f": ATTACK, "key": ATTACK, "value": ATTACK}
            done = {**operation, "type": ("ok", "fail", "info")[number % 3], "error": ATTACK, "node": ATTACK}
            for event in ({**operation, "type": "invoke"}, done):
                file.write(json.dumps({"index": 0, "time": number * 10**9 + len(event), **event}) + "\n")
    fault = {
        "id": ATTACK,
        "nemesis": ATTACK,
        "variant": ATTACK,
        "grudge": {ATTACK: [ATTACK, "n1"]},
        "leader": ATTACK,
        "start_ns": 10**9,
        "end_ns": 2 * 10**9,
        "proven": False,
        "proof": {"detail": ATTACK},
        "heal_proof": {"failed": [ATTACK]},
    }
    operation = {"process": ATTACK, "f": ATTACK, "key": ATTACK, "value": ATTACK, "result": [ATTACK], "type": ATTACK}
    operation |= {"node": ATTACK, "error": ATTACK, "invoked_ns": 1, "returned_ns": 19 * 10**9}
    edge = {"source": 0, "target": 1, "kind": ATTACK, "reason": ATTACK}
    witness = {"text": ATTACK, "key": ATTACK, "note": ATTACK, "operations": [operation, operation], "edges": [edge]}
    check = {"valid": False, "reason": ATTACK, "witness": witness, ATTACK: ATTACK, "list": [{ATTACK: ATTACK}]}
    terms = [{"term": ATTACK, "leader": ATTACK, "start_ns": 0}]
    names = ("reason", "replay", "git_commit", "started_at", "cluster_detail", "version", "run_id", "interrupted")
    results = dict.fromkeys(names, ATTACK) | {
        "valid": False,
        "faults": [fault],
        "checks": {ATTACK: check, "leaders": {"valid": ATTACK, "terms": terms}},
        "hosts": [ATTACK],
        "doubts": [ATTACK, ATTACK],
        "unexpected_errors": {ATTACK: ATTACK},
        "timeouts": {ATTACK: ATTACK},
        "seed": ATTACK,
    }
    test = {name: ATTACK for name in runs.TEST} | {"nemesis": [ATTACK], "settings": {ATTACK: ATTACK}}
    (run.path / "nodes" / "n1").mkdir(parents=True)
    (run.path / "nodes" / "n1" / "<img src=x onerror=alert(2)>.log").touch()
    page = report(run, results, test=test)
    assert page.tags.count("script") == 2, "ours, and the data of the charts"
    assert ("script", "type", "application/json") in page.attributes
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "alert(1)" in page.text
    source = run.report_path.read_bytes()
    assert b"\x1b" not in source and "\u202e".encode() not in source


def test_the_page_is_self_contained(run):
    page = report(run, invalid_results(runs.make_faults(60)), operations=100)
    addresses = [(tag, value) for tag, name, value in page.attributes if name in ("src", "href", "data", "action")]
    assert addresses and all(tag == "a" and "//" not in value for tag, value in addresses)
    source = run.report_path.read_text()
    assert "@import" not in source
    assert set(re.findall(r"url\(([^)]*)\)", source)) <= {"#arrow"}
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_the_page_links_to_the_files_of_the_run(run):
    for name in ("results.json", "test.json", "schedule.json", "harness.log"):
        (run.path / name).write_text("{}")
    (run.nodes_path / "n1").mkdir(parents=True)
    (run.nodes_path / "n1" / "broker 1.log").write_text("")
    page = report(run, runs.make_results(), operations=10)
    links = {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}
    assert {
        "results.json",
        "test.json",
        "schedule.json",
        "history.jsonl",
        "harness.log",
        "nodes/n1/broker%201.log",
    } <= links


def readout_of(page):
    return json.loads(re.search(r'<script type="application/json" id="readout">(.*?)</script>', page.source)[1])


def test_the_readout_of_the_charts_agrees_with_the_history(run):
    faults = runs.make_faults(60)
    results = invalid_results(faults)
    terms = [("n2", -5), ("n<3>", 20 * 10**9)]
    results["checks"]["leaders"] = {
        "terms": [{"term": term, "leader": host, "start_ns": at} for term, (host, at) in enumerate(terms, 1)]
    }
    page = report(run, results, faults=faults, operations=6000)
    said = readout_of(page)
    events = [json.loads(line) for line in run.history_path.read_text().splitlines()]
    assert said["end"] == max(event["time"] for event in events)
    assert said["spans"][0][:2] == pytest.approx([5e9, 10e9], abs=1e3)
    assert [text for *_, text in said["spans"]] == [
        *(f"fault {number}: partition {fault['variant']}" for number, fault in enumerate(faults, 1)),
        "leader n2, term 1", "leader n<3>, term 2",
    ]  # fmt: skip
    assert said["spans"][-2][:2] == [-5, 20 * 10**9] and said["spans"][-1][1] == said["end"]
    window = 20
    lines = said["windows"][window]
    of_window = [e for e in events if e["time"] // said["window"] == window and e["process"] != "nemesis"]
    reads = sum(event["f"] == "read" and event["type"] == "ok" for event in of_window)
    rate = next(line for line in lines if line.startswith("read: "))
    assert rate.startswith(f"read: {reads / (said['window'] / 1e9):,.0f} ok/s, median ")
    assert [text for _, text in said["moments"]] == ["violation: linearizable"]
    assert len(said["windows"]) * said["window"] >= said["end"] > (len(said["windows"]) - 1) * said["window"]


def test_timed_violations_are_marked_in_the_charts_and_stated_once(run):
    results = runs.make_results((), valid=False, reason="invariants: votes: n1 voted twice")
    violations = [{"rule": "votes", "time_s": 2.0 + n, "text": "n1 voted twice"} for n in range(30)]
    results["checks"]["invariants"] = {"valid": False, "reason": "votes: n1 voted twice", "violations": violations}
    page = report(run, results, operations=1000)
    moments = readout_of(page)["moments"]
    assert moments[0] == [2_000_000_000, "violation: invariants: votes: n1 voted twice"]
    assert len(moments) == 8 and 'class="moment"' in page.source
    hero = re.search(r'id="verdict".*?</section>', page.source, re.DOTALL)[0]
    assert hero.count("n1 voted twice") == 1


def test_a_fault_without_a_cut_is_shown_with_the_hosts_that_it_struck(run):
    fault = {**runs.make_faults(60)[0], "nemesis": "kill", "variant": "sigkill@minority", "hosts": ["n4", "n5"]}
    del fault["grudge"]
    page = report(run, runs.make_results([fault]), operations=100)
    assert '<span class="cutwords">n4 n5</span>' in page.source


def test_names_in_the_charts_are_whole_or_hidden(run):
    faults = [
        {**fault, "variant": variant, "start_ns": 10**9 * start, "end_ns": 10**9 * (start + 1)}
        for fault, variant, start in zip(
            runs.make_faults(60)[:3], ("a-rather-long-name", "next", "last"), (1, 3, 50), strict=True
        )
    ]
    report(run, runs.make_results(faults), faults=faults, operations=1000)
    names = re.findall(r'<text x="\d+"( display="none")? [^>]*class="name">([^<]*)<', run.report_path.read_text())
    assert names == [(' display="none"', "a-rather-long-name"), ("", "next"), ("", "last")]


def test_errors_are_grouped_by_kind_and_one_is_shown_whole(run):
    with open(run.history_path, "w") as file:
        for number in range(40):
            error = f"entry {number} of term 3" if number < 39 else "it fell down 7 stairs"
            for kind in ({"type": "invoke"}, {"type": "info", "error": error}):
                event = {"time": number * 10**8 + len(kind), "process": number, "f": "write", "value": 1}
                file.write(json.dumps(event | kind) + "\n")
    page = report(run, runs.make_results())
    assert "39 write info entry # of term # first: entry 0 of term 3" in page.text
    assert "1 write info it fell down 7 stairs" in page.text


def test_the_page_of_a_run_without_faults_and_operations_says_so(run):
    run.history_path.touch()
    page = report(run, {"valid": "unknown", "reason": "no operation succeeded, so nothing was tested"})
    assert headline(page)[0] == "UNKNOWN"
    assert "No faults were injected." in page.text
    assert "The history contains no completed operation" in page.text
    assert "No check produced a result." in page.text
    assert "Longest silence" in page.text and "0 ns" not in page.text, "without an operation there is none"


def test_a_valid_run_without_faults_says_so(run):
    page = report(run, runs.make_results(), operations=100)
    assert headline(page) == ("VALID", "100 operations, no faults")


def test_a_truncated_history_is_shown_and_reported(run):
    runs.write_run(run.history_path, operations=300)
    run.history_path.write_bytes(run.history_path.read_bytes()[:-5])
    page = report(run, runs.make_results())
    assert "The history is incomplete. Its last line was cut short" in page.text
    assert "1 operation had no answer when the history ended." in page.text


def test_a_damaged_or_missing_history_is_reported(run):
    runs.write_run(run.history_path, operations=300)
    lines = run.history_path.read_text().splitlines()
    lines[100] = "garbage"
    run.history_path.write_text("\n".join(lines))
    page = report(run, runs.make_results())
    assert re.search(r"history\.jsonl:101: not JSON: .* shows the 100 events before that", page.text)
    run.history_path.unlink()
    page = Page(write_report(run.path, runs.TEST, runs.make_results(), run.history_path).read_text())
    assert "No such file or directory" in page.text


@pytest.mark.parametrize(
    "results",
    [
        {},
        {"valid": True, "faults": "none", "checks": [1, 2], "doubts": "x", "hosts": 7},
        {"valid": False, "checks": {"a": None, "b": {"valid": False, "witness": {"operations": [1, {}]}}}},
        {"valid": False, "checks": {"b": {"valid": False, "witness": [{}, {"process": None, "f": None}]}}},
        {"valid": True, "faults": [{}, {"start_ns": 5, "grudge": {"n1": None}}, {"start_ns": -1, "end_ns": "x"}, 3]},
        {"valid": True, "checks": {"leaders": {"terms": [{"leader": "n1"}, {"leader": "n2", "start_ns": 1e9}, 5]}}},
        {"valid": True, "checks": {"x": {"deep": {"er": {"still": {"more": 1}}}, "mixed": [1, {"a": 2}], "f": 1e300}}},
    ],
)
def test_malformed_results_still_make_a_page(run, results):
    page = report(run, results, operations=50, test={})
    assert headline(page)[0] in ("VALID", "INVALID", "UNKNOWN")


HUGE = 10**400


@pytest.mark.parametrize("number", [HUGE, -HUGE, 1e308, float("inf"), float("nan")], ids=lambda number: str(number)[:6])
def test_numbers_that_are_no_time_still_make_a_page(run, number):
    faults = runs.make_faults(30)
    faults[0]["end_ns"] = faults[1]["start_ns"] = number
    witness = runs.make_witness()
    witness["operations"][1]["returned_ns"] = witness["operations"][1]["end_ns"] = number
    results = runs.make_results(faults, valid=False, duration_s=number)
    results["checks"]["linearizable"] |= {"valid": False, "witness": witness, "search_s": number}
    results["checks"]["leaders"]["terms"].append({"term": 9, "leader": "n1", "start_ns": number})
    results["checks"]["mine"] = {"valid": False, "violations": [{"time_s": number, "rule": "r", "text": "t"}]}
    page = report(run, results, test={**runs.TEST, "rate": number, "time_limit_s": number})
    assert headline(page)[0] == "INVALID"
    print_summary(results, Console(file=(said := io.StringIO())), test=runs.TEST)
    assert "INVALID" in said.getvalue()


@pytest.mark.parametrize("odd", [{}, [[]], 7, None, "x"])
def test_a_malformed_witness_still_makes_a_page(run, odd):
    witness = runs.make_witness()
    witness["operations"][0]["process"] = odd
    witness["edges"][0]["source"] = odd
    results = invalid_results()
    results["checks"]["linearizable"]["witness"] = witness
    assert headline(report(run, results))[0] == "INVALID"
    witness["edges"] = odd
    assert headline(report(run, {**results, "replay": odd}))[0] == "INVALID"
    said = io.StringIO()
    print_summary({**results, "replay": odd}, Console(file=said))
    assert "INVALID" in said.getvalue()


def test_a_path_that_cannot_be_written_is_reported_in_one_line(run, tmp_path):
    runs.write_run(run.history_path, operations=10)
    with pytest.raises(StoreError, match=r"cannot write .*report\.html: No such file") as caught:
        write_report(tmp_path / "nowhere", runs.TEST, runs.make_results(), run.history_path)
    assert "\n" not in str(caught.value)


def test_the_report_of_a_large_run_is_small(run):
    """The number of dots is bounded by the grid, not by the run: 60,000 operations stand for any number."""
    faults = runs.make_faults(600)
    page = report(run, invalid_results(faults), faults=faults, operations=60_000, seconds=600, threads=50)
    assert run.report_path.stat().st_size < 500_000
    assert page.text.count("links cut") == len(faults) == 60


def test_a_page_with_long_names_of_wide_characters_still_fits(run):
    """The data of the charts is ASCII: such a character takes twelve bytes there."""
    name = "\U0001f9e8" * 100
    runs.write_run(run.history_path, operations=500)
    events = [json.loads(line) for line in run.history_path.read_text().splitlines()]
    lines = [json.dumps({**event, "f": f"{name[:23]}{number % 5}"}) for number, event in enumerate(events)]
    run.history_path.write_text("\n".join(lines) + "\n")
    fault = {"id": name, "nemesis": name, "variant": name, "proof": {"detail": name}}
    faults = [{**fault, "start_ns": n * 10**8, "end_ns": (n + 1) * 10**8} for n in range(400)]
    results = runs.make_results(faults, valid=False, reason=name)
    terms = [{"term": n, "leader": name[:20], "start_ns": n * 10**7} for n in range(3000)]
    results["checks"]["leaders"]["terms"] = terms
    page = report(run, results)
    assert "faults not drawn" in page.text and "(first 60 of 3000)" in page.text


def test_a_page_with_long_texts_everywhere_still_fits(run):
    shout = "<&\"'" * 2000
    runs.write_run(run.history_path, operations=3000)
    operation = {"process": shout, "f": shout, "value": shout, "result": shout, "node": shout, "error": shout}
    operations = [{**operation, "invoked_ns": n, "returned_ns": n + 5, "process": f"{n}{shout}"} for n in range(100)]
    edges = [{"source": n, "target": n + 1, "kind": "wr", "reason": shout} for n in range(99)]
    witness = {"text": shout, "operations": operations, "edges": edges, "key": shout}
    rows = [{f"{shout}{n}": shout for n in range(20)}] * 100
    check = {"valid": False, "reason": shout, "witness": witness} | {f"{n}{shout}": rows for n in range(10)}
    fault = {"id": shout, "nemesis": shout, "variant": shout, "start_ns": 10**9, "proof": {"detail": shout}}
    fault["grudge"] = {f"n{n}": [f"n{m}" for m in range(15)] for n in range(15)}
    results = runs.make_results([fault] * 3000, valid=False, reason=shout, replay=shout, doubts=[shout] * 50)
    results["checks"] = {f"{n}": check for n in range(200)}
    page = report(run, results)
    assert headline(page)[0] == "INVALID"
    assert "more checks in results.json" in page.text
    assert "more faults in results.json" in page.text
