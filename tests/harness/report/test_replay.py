"""The replay of a run as data and as a page: what it takes from the run's files, how large it gets, what it escapes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import harness.report.replay as module
from harness.report.replay import collect_replay, replay_page
from harness.report.trace_window import TraceError
from harness.store import RunDir, Store

ROOT = Path(__file__).resolve().parents[3]
MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
MS = 1_000_000


Here = Callable[..., subprocess.CompletedProcess[str]]


def harness(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, without any program on its PATH."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def lines(*events: dict[str, Any]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def message(time_ns: int, kind: str, source: str, to: str, number: int, **more: Any) -> dict[str, Any]:
    return {"time": time_ns, "kind": kind, "from": source, "to": to, "connection": 1, "number": number, **more}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two replicas, an election, an append that arrives and one that is lost, a cut, an operation, a violation."""
    run = Store(tmp_path / "store").create("t", now=datetime(2026, 1, 1, tzinfo=UTC))
    run.write_test({"nodes": 2, "cluster": "sim"})
    read = {"process": 3, "f": "read", "key": 7, "value": None, "result": 91, "type": "ok", "node": "n1"}
    read |= {"invoked_ns": 30 * MS, "returned_ns": 42 * MS}
    run.write_results(
        {
            "valid": False,
            "reason": "stale",
            "checks": {
                "leaders": {"valid": True, "terms": [{"term": 1, "leader": "n1", "start_ns": 10 * MS}]},
                "linearizable": {
                    "valid": False,
                    "witness": {"text": "91 was stale", "operations": [read]},
                },
            },
        }
    )  # fmt: skip
    append = {"rpc": "append", "detail": "480"}
    run.trace_path.write_text(
        lines(
            message(20 * MS, "send", "n1", "n2", 1, size=9, rpcs=[append]),
            message(21 * MS, "arrive", "n1", "n2", 1),
            message(21 * MS, "send", "n2", "n1", 1, size=9, rpcs=[{**append, "reply": True, "detail": "ok 480"}]),
            message(22 * MS, "lost", "n2", "n1", 1),
            {"time": 8 * MS, "kind": "log", "host": "n1", "committed": 477, "end": 479},
            {"time": 20 * MS, "kind": "log", "host": "n1", "committed": 478, "end": 480},
            {"time": 48 * MS, "kind": "log", "host": "n1", "committed": 480, "end": 480},
            message(50 * MS, "send", "clients", "n1", 2, size=9, rpcs=[{"rpc": "pull", "detail": ""}]),
            message(51 * MS, "arrive", "clients", "n1", 2),
        )
    )
    fault = {"id": "f1", "nemesis": "partition", "variant": "leader", "grudge": {"n2": ["n1"]}, "hosts": ["n1"]}
    proven = {**fault, "proof": {"proven": True}}
    run.history_path.write_text(
        lines(
            {"time": 5 * MS, "process": "nemesis", "type": "invoke", "f": "inject", "value": fault},
            {"time": 6 * MS, "process": "nemesis", "type": "info", "f": "inject", "value": proven},
            {"time": 30 * MS, "process": 3, "type": "invoke", "f": "read", "key": 7, "value": None},
            {"time": 35 * MS, "process": 4, "type": "invoke", "f": "write", "key": 7, "value": 92},
            {"time": 42 * MS, "process": 3, "type": "ok", "f": "read", "key": 7, "value": 91, "node": "n1"},
            {"time": 60 * MS, "process": "nemesis", "type": "info", "f": "heal", "value": proven},
        )
    )  # fmt: skip
    log = run.nodes_path / "n1" / "broker.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "2026-01-01T00:00:00.113Z INFO node.dledger.role role_change self=n1 role=LEADER term=1\n"
        "2026-01-01T00:00:00.163Z INFO node.dledger.role role_change self=n1 role=CANDIDATE term=1\n"
        "not a line of a log\n2026-01-01T00:00:00.203Z INFO node stopped\n"
        "2026-01-01T00:00:00.213Z INFO node READY broker self_id=n1\n"
    )
    run.finish()
    return run


@pytest.mark.parametrize(("nemesis", "down_us"), [("partition", None), ("kill", 5_000), ("power", 6_000)])
def test_a_replica_is_down_from_the_request_to_kill_it_or_from_the_power_cut_itself(
    run: RunDir, nemesis: str, down_us: int | None
) -> None:
    """Before the cut its unsynced data is counted for a while, and it still answers."""
    run.history_path.write_text(run.history_path.read_text().replace("partition", nemesis))
    (fault,) = collect_replay(run).faults
    assert (fault["start"], fault["down"]) == (5_000, down_us)


def test_a_replay_is_collected_from_the_files_of_a_run(run: RunDir) -> None:
    replay = collect_replay(run)
    assert (replay.verdict, replay.replicas, replay.others) == ("invalid", ["n1", "n2"], ["clients"])
    assert [(m.source, m.destination, m.sent_ns, m.arrived_ns, m.losses) for m in replay.messages] == [
        ("n1", "n2", 20 * MS, 21 * MS, 0), ("n2", "n1", 21 * MS, None, 1), ("clients", "n1", 50 * MS, 51 * MS, 0),
    ]  # fmt: skip
    assert replay.operations == [
        (3, 30_000, 42_000, "ok", "key 7: read → 91 on n1"), (4, 35_000, None, "info", "key 7: write 92 → ?"),
    ]  # fmt: skip
    assert replay.roles == [
        (10_000, "n1", "leader", 1),
        (60_000, "n1", "candidate", 1),
        (100_000, "n1", "stopped", 0),
        (110_000, "n1", "started", 0),
    ]
    (fault,) = replay.faults
    assert (fault["start"], fault["cuts"], fault["hosts"], fault["proven"]) == (5_000, [["n1", "n2"]], ["n1"], True)
    (violation,) = replay.violations
    assert violation == {"at": 42_000, "text": "linearizable: 91 was stale", "operations": [[3, 30_000]]}
    assert replay.notes == []


def test_only_violations_with_a_time_are_in_the_replay(run: RunDir) -> None:
    invariants = {
        "valid": False,
        "violations": [{"rule": "log", "time_s": 0.041, "text": "lost 7"}, {"rule": "x", "time_s": "soon"}, "odd"],
    }
    held = {**invariants, "valid": True}
    run.write_results(
        {"valid": False, "checks": {"invariants": invariants, "held": held, "replicas": {"valid": False}}}
    )
    replay = collect_replay(run)
    assert replay.violations == [{"at": 41_000, "text": "invariants: log: lost 7", "operations": []}]


def test_a_failure_to_recover_is_placed_at_the_end_of_the_run(run: RunDir) -> None:
    recovers = {"valid": False, "reason": "nobody takes writes"}
    leaders = run.read_results()["checks"]["leaders"]  # by which the logs' times are known
    run.write_results({"valid": False, "checks": {"recovers": recovers, "leaders": leaders}})
    assert collect_replay(run).violations[0]["at"] == 99_999, "just before the replicas are stopped"
    run.write_results({"valid": False, "checks": {"recovers": recovers}})
    replay = collect_replay(run)
    (violation,) = replay.violations
    assert violation == {"at": 60_000, "text": "recovers: nobody takes writes", "operations": []}
    assert collect_replay(run, to_ns=50 * MS).violations == [], "which is not in this part"
    run.write_results({"valid": True, "checks": {"recovers": {"valid": True, "reason": "back"}}})
    assert collect_replay(run).violations == []


def test_a_part_begins_with_the_state_of_the_logs_at_its_start(run: RunDir) -> None:
    replay = collect_replay(run, from_ns=21 * MS, to_ns=49 * MS)
    assert replay.logs == [(20 * MS, "n1", 478, 480), (48 * MS, "n1", 480, 480)]
    columns = data_of(replay_page(replay))["logs"]
    assert columns == {"at": [20_000, 28_000], "host": [0, 0], "committed": [478, 480], "ahead": [2, 0]}


def test_changes_of_logs_beyond_the_limit_are_thinned_out_with_a_note(run: RunDir, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_LOG_STATES", 2)
    replay = collect_replay(run)
    assert [state.committed for state in replay.logs] == [477, 480]
    assert "log ends and committed indexes are shown for only one change in 2" in replay.notes


def test_a_damaged_line_of_the_trace_is_named(run: RunDir) -> None:
    with run.trace_path.open("a") as trace:
        trace.write(lines({"time": 1, "kind": "log", "host": "n1", "committed": "some", "end": 3}))
    with pytest.raises(TraceError, match=r"trace\.jsonl:10: not a line of a trace"):
        collect_replay(run)


def test_pipes_and_directories_in_the_place_of_files_do_not_block(run: RunDir) -> None:
    roles = collect_replay(run).roles
    os.mkfifo(run.nodes_path / "n1" / "a-pipe.log")
    (run.nodes_path / "n1" / "z-directory.log").mkdir()
    assert roles and collect_replay(run).roles == roles
    for put in (os.mkfifo, os.mkdir):
        run.trace_path.unlink()
        put(run.trace_path)
        with pytest.raises(TraceError, match="is not a regular file"):
            collect_replay(run)


@pytest.mark.parametrize(
    ("name", "words"), [("trace.html", ["--from", "0", "--to", "1"]), ("replay.html", ["--replay"])]
)
def test_a_pipe_in_the_place_of_the_page_is_refused_and_does_not_block(
    run: RunDir, name: str, words: list[str], harness_here: Here
) -> None:
    os.mkfifo(run.path / name)
    done = harness_here("trace", "latest", *words, cwd=run.path.parents[2])
    assert done.returncode == 254 and f"{name} is not a regular file: move it away" in done.stderr


def test_the_page_holds_the_replay_as_columns(run: RunDir) -> None:
    data = data_of(replay_page(collect_replay(run)))
    columns = data["messages"]
    assert (columns["sent"], columns["flight"]) == ([20_000, 1_000, 29_000], [1_000, -1, 1_000])
    hosts = data["hosts"]
    pairs = [(hosts[pair // len(hosts)], hosts[pair % len(hosts)]) for pair in columns["pair"]]
    assert pairs == [("n1", "n2"), ("n2", "n1"), ("clients", "n1")]
    assert [(data["kinds"][kind // 2], kind % 2) for kind in columns["kind"]] == [
        ("append", 0),
        ("append", 1),
        ("pull", 0),
    ]
    assert [data["details"][detail] for detail in columns["detail"]] == ["480", "ok 480", ""]
    assert columns["losses"] == [1, 1]
    assert (data["operations"]["start"], data["operations"]["length"]) == ([30_000, 5_000], [12_000, -1])


def test_the_legend_names_the_marks_that_the_page_has(run: RunDir) -> None:
    run.write_results({"valid": False, "checks": {"recovers": {"valid": False, "reason": "nobody takes writes"}}})
    replay = collect_replay(run)
    shown = {"violation": bool(replay.violations), "where it was decided": False}
    for decided in (None, (10_000, 20_000)):
        replay.decided, shown["where it was decided"] = decided, decided is not None
        legend = re.findall(r'<li><i class="key \w+"></i>([^<]+)</li>', replay_page(replay))
        assert {name: name in legend for name in shown} == shown
    run.write_results({"valid": True, "checks": {}})
    assert "</i>violation</li>" not in replay_page(collect_replay(run))


def test_the_replay_of_a_part_has_only_its_messages_and_operations(run: RunDir) -> None:
    replay = collect_replay(run, from_ns=45 * MS, to_ns=70 * MS)
    assert [m.source for m in replay.messages] == ["clients"]
    assert [operation[0] for operation in replay.operations] == [4]


def test_a_part_without_messages_shows_its_operations_and_faults(run: RunDir) -> None:
    kept = [line for line in run.trace_path.read_text().splitlines(keepends=True) if '"clients"' not in line]
    run.trace_path.write_text("".join(kept))
    part = collect_replay(run, from_ns=52 * MS, to_ns=70 * MS)
    assert part.messages == [] and [operation[0] for operation in part.operations] == [4] and part.faults
    assert "no messages: nothing was sent in this part" in part.notes
    assert data_of(replay_page(part))["part"] == [52_000, 70_000]
    with pytest.raises(TraceError, match="nothing was sent between --from 500 and --to 600: the trace covers"):
        collect_replay(run, from_ns=500_000 * MS, to_ns=600_000 * MS)


def test_a_part_outside_a_run_without_a_trace_is_refused(run: RunDir) -> None:
    run.trace_path.unlink()
    assert collect_replay(run, from_ns=36 * MS, to_ns=50 * MS).operations
    with pytest.raises(TraceError, match=r"its history ends at 0\.060 s"):
        collect_replay(run, from_ns=500_000 * MS, to_ns=600_000 * MS)
    run.history_path.write_text("")
    assert collect_replay(run).operations == [], "a run that died early has a page all the same"


def test_the_page_of_a_part_shows_nothing_outside_of_it(run: RunDir) -> None:
    """There are no messages and no operations there, which would look like silence."""
    part = collect_replay(run, from_ns=45 * MS, to_ns=70 * MS)
    assert (part.violations, [fault["name"] for fault in part.faults]) == ([], ["f1 partition leader"])
    assert part.notes[0] == "a part of the run: from 0.045 s to 0.070 s"
    assert "1 violation outside this part" in part.notes
    assert data_of(replay_page(part))["part"] == [45_000, 70_000]
    assert data_of(replay_page(collect_replay(run, to_ns=24 * MS)))["part"] == [None, 24_000]
    whole = data_of(replay_page(collect_replay(run)))
    assert whole["part"] == [None, None] and len(whole["violations"]) == 1


def test_faults_and_violations_beyond_the_limits_are_counted_for_each_part(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAULTS", 2)
    monkeypatch.setattr(module, "MAX_VIOLATIONS", 1)
    run.trace_path.unlink()
    with run.history_path.open("a") as history:
        for number in range(2, 6):
            fault = {"id": f"f{number}", "nemesis": "kill", "hosts": ["n1"]}
            for f, time_ms in (("inject", 100 * number), ("heal", 100 * number + 50)):
                event = {"time": time_ms * MS, "process": "nemesis", "type": "info", "f": f, "value": fault}
                history.write(lines({**event, "type": "invoke"}, event))
    results = run.read_results()
    times = [{"time_s": second, "rule": "leaders", "text": "two"} for second in (0.1, 0.2, 0.4)]
    results["checks"]["replicas"] = {"valid": False, "violations": times}
    run.write_results(results)
    whole, part = collect_replay(run), collect_replay(run, from_ns=390 * MS, to_ns=600 * MS)
    assert [fault["name"] for fault in whole.faults] == ["f1 partition leader", "f2 kill"]
    assert {"the last 3 faults left out", "the last 3 violations left out"} <= set(whole.notes)
    assert [fault["name"] for fault in part.faults] == ["f4 kill", "f5 kill"]
    assert [one["at"] for one in part.violations] == [400_000] and "3 violations outside this part" in part.notes
    assert not [note for note in part.notes if "left out" in note]


def test_a_trace_that_reached_its_size_limit_is_noted(run: RunDir) -> None:
    with run.trace_path.open("a") as trace:
        trace.write(lines({"time": 52 * MS, "kind": "limit", "events": 9}))
    words = "no messages and no logs after 0.052 s: the trace reached its size limit"
    assert words in collect_replay(run).notes
    assert words not in collect_replay(run, to_ns=51 * MS).notes


def test_the_replay_of_a_run_without_a_trace_says_so(run: RunDir) -> None:
    run.trace_path.unlink()
    html = replay_page(collect_replay(run))
    assert "no messages: the run was made without --cluster sim --trace" in html
    assert data_of(html)["messages"]["sent"] == [] and data_of(html)["operations"]["start"]


def test_logs_that_cannot_be_placed_in_time_give_no_roles(run: RunDir) -> None:
    run.write_results({"valid": True, "checks": {}})
    replay = collect_replay(run)
    assert replay.roles == [] and replay.notes == ["no roles: no log shows when a leader was elected"]
    assert "what the replicas logged" not in replay_page(replay)


def test_the_texts_of_a_run_are_escaped(run: RunDir) -> None:
    run.write_results(
        {"valid": False, "reason": MARKUP, "checks": {MARKUP: {"valid": False, "witness": [{"f": MARKUP}]}}}
    )
    run.trace_path.write_text(
        lines(message(1, "send", MARKUP, "n1", 1, size=1, rpcs=[{"rpc": MARKUP, "detail": MARKUP}]))
    )
    event = {"time": 0, "process": 0, "type": "invoke", "f": MARKUP, "key": MARKUP, "value": MARKUP}
    run.history_path.write_text(lines(event))
    html = replay_page(collect_replay(run))
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html
    assert MARKUP in data_of(html)["hosts"]


def test_a_page_beyond_its_size_limit_leaves_out_the_least_telling_messages(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    for number in range(4000):
        rpc = {"rpc": "vote" if number % 10 == 0 else "route", "detail": f"number {number}"}
        events.append(message(number * MS, "send", "n1", "n2", number, size=1, rpcs=[rpc]))
    run.trace_path.write_text(lines(*events))
    size_bytes = len(replay_page(collect_replay(run)).encode())
    monkeypatch.setattr(module, "MAX_REPLAY_BYTES", size_bytes - 1)
    html = replay_page(collect_replay(run))
    data = data_of(html)
    kinds = [data["kinds"][kind // 2] for kind in data["messages"]["kind"]]
    assert len(html.encode()) < size_bytes
    assert kinds.count("vote") == 400 and len(kinds) == 2000
    assert "2,000 messages left out" in html
    monkeypatch.setattr(module, "MAX_REPLAY_BYTES", 1_000)
    with pytest.raises(TraceError, match="choose a part of it with --from and --to"):
        replay_page(collect_replay(run))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--replay", "--from", "2", "--to", "1"], "--from must be less than --to"),
        (["--replay", "--from", "nan"], "--from must be less than --to"),
        (["--replay", "--from", "1e300"], "--from must be less than --to"),
        (["--replay", "--hosts", "n1,n2"], "a replay always shows all hosts"),
        (["--replay", "--out", "x.svg"], "must end in .html"),
        (["--replay", "--out", "nowhere/x.html"], "--out nowhere/x.html: No such file or directory"),
        ([], "give --from and --to for what to draw, or --replay"),
    ],
)
def test_operator_errors_are_reported_in_one_line(
    run: RunDir, words: list[str], expected: str, harness_here: Here
) -> None:
    done = harness_here("trace", "latest", *words, cwd=run.path.parents[2])
    assert done.returncode == 254 and expected in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_simulated_run_is_replayed_from_the_command_line(tmp_path: Path) -> None:
    words = (
        "--nodes",
        "3",
        "--nemesis",
        "partition=leader",
        "--nemesis-interval",
        "2",
        "--time-limit",
        "6",
        "--seed",
        "4",
    )
    done = harness("run", "--cluster", "sim", *words, "--rate", "20", "--trace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = harness("trace", "latest", "--replay", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    data = data_of(Path(drawn.stdout.strip()).read_text())
    (results,) = tmp_path.glob("store/*/2*/results.json")
    terms = json.loads(results.read_text())["checks"]["leaders"]["terms"]
    elected = [[time, host, term] for time, host, role, term in data["roles"] if role == "leader"]
    assert elected == [[term["start_ns"] // 1000, term["leader"], term["term"]] for term in terms]
    assert data["hosts"][:4] == ["n1", "n2", "n3", "clients"] and len(data["faults"]) == 1
    assert {"append", "vote", "heartbeat", "send"} <= set(data["kinds"])
