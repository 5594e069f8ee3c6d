"""Exploration: mixes are well-formed; failures are found, shrunk, stored and repeated."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cli
from harness.cli_options import SEARCHED_LOAD, duration_s
from harness.errors import HarnessError, OperatorError
from harness.execution import Parts, perform
from harness.exploration import shrinking
from harness.exploration.mixes import QUIET_END_S, Odds, random_mix
from harness.exploration.rehearsal import Rehearsal, parts_of, rehearse_test, usable_choices
from harness.exploration.search import Tally, explore, mix_for
from harness.exploration.shrinking import shrink
from harness.exploration.symptoms import failures_of
from harness.pasteable import harness_command
from harness.report import OutputConsole
from harness.store import RunDir, Store
from harness.test import NemesisChoice, Test
from nemesis.schedule import HEAL, INJECT, Schedule
from nemesis.triggers import TRIGGER_TIMEOUT_S

CHOICES = [("partition", ["halves", "leader"]), ("kill", ["sigkill@one", "sigkill@leader"]), ("pause", ["sigstop@one"])]


def make_test(**changes: object) -> Test:
    values = {
        "system": "broker", "cluster": "sim", "nodes": 3, "workload": "register", "nemesis": (),
        "nemesis_interval_s": 5.0, "time_limit_s": 4.0, "concurrency": 3, "rate": 50.0, "seed": 1, **changes,
    }  # fmt: skip
    return Test(**values)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**63), limit_s=st.floats(0.1, 120), events=st.none() | st.integers(2, 60))
def test_mixes_are_schedules_that_heal_in_time(seed: int, limit_s: float, events: int | None) -> None:
    schedule = random_mix(CHOICES, random.Random(seed), time_limit_s=limit_s, events=events)
    assert Schedule.from_json(schedule.to_json()) == schedule
    injected = {event.fault_id: event.at_s for event in schedule if event.action == INJECT}
    healed = {event.fault_id: event.at_s for event in schedule if event.action == HEAL}
    assert injected.keys() == healed.keys()
    assert all(injected[fault] < healed[fault] <= limit_s - QUIET_END_S + 0.2 for fault in injected)
    assert schedule == random_mix(CHOICES, random.Random(seed), time_limit_s=limit_s, events=events)
    if events is not None:
        assert len(schedule) <= 2 * (events // 2)  # as far as they fit beside each other
        if limit_s > 4 * events:
            assert len(schedule) == 2 * (events // 2)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**63), limit_s=st.floats(5.0, 30.0))
def test_every_mix_has_a_fault_that_begins_before_the_load_ends(seed: int, limit_s: float) -> None:
    schedule = random_mix(CHOICES, random.Random(seed), time_limit_s=limit_s)
    latest_s = [event.at_s + (TRIGGER_TIMEOUT_S if event.when else 0.0) for event in schedule if event.action == INJECT]
    assert min(latest_s) < limit_s


def test_a_mix_whose_only_fault_would_begin_after_the_load_is_drawn_again() -> None:
    names = (
        "partition", "kill", "pause", "clock", "disk-stall", "disk-slow", "disk-full", "disk-error", "power", "link"
    )  # fmt: skip
    test = make_test(
        workload="queue", nodes=3, time_limit_s=6.0, concurrency=10, rate=100.0, settings={"replication": "sync"},
        nemesis=tuple(NemesisChoice(name) for name in names),
    )  # fmt: skip
    rehearsal = rehearse_test(*mix_for(test, 555035, usable_choices(test)))
    assert (rehearsal.valid, rehearsal.faults) == (True, 1), rehearsal.reason


@pytest.mark.parametrize("replication", ["sync", "async", "dledger"])
def test_bit_flips_can_be_chosen_with_dledger_replication_only(replication: str) -> None:
    test = make_test(settings={"replication": replication})
    assert ("bit-flip" in dict(usable_choices(test))) == (replication == "dledger")


@given(seed=st.integers(0, 2**63))
def test_clock_and_disk_stall_faults_do_not_overlap_each_other_or_kills(seed: int) -> None:
    choices = [("kill", ["sigkill@one"]), ("clock", ["bump@one"]), ("disk-stall", ["all@one"]), ("link", ["loss@all"])]
    schedule = random_mix(choices, random.Random(seed), time_limit_s=30, events=60)
    in_force: dict[str, str] = {}
    for event in schedule:
        if event.action == HEAL:
            del in_force[event.fault_id]
            continue
        in_force[event.fault_id] = event.nemesis
        kinds = list(in_force.values())
        assert kinds.count("clock") + kinds.count("disk-stall") <= 1
        assert not ("kill" in kinds and ("clock" in kinds or "disk-stall" in kinds))


@given(seed=st.integers(0, 2**63))
def test_a_fault_aimed_at_the_leader_finds_a_majority_alive(seed: int) -> None:
    kills = {"sigkill@leader": 1, "sigkill@follower": 1, "sigkill@minority": 2, "sigkill@all": 5}
    choices = [("kill", list(kills)), ("partition", ["leader", "halves"])]
    schedule = random_mix(choices, random.Random(seed), time_limit_s=30, events=40)
    in_force: dict[str, str] = {}
    sizes = {**kills, "leader": 1, "halves": 2}
    for event in schedule:
        if event.action == HEAL:
            del in_force[event.fault_id]
            continue
        if "leader" in event.variant or "follower" in event.variant:
            assert sum(sizes[variant] for variant in in_force.values()) <= 2
        in_force[event.fault_id] = event.variant


def test_faults_of_a_mix_overlap_and_use_every_choice() -> None:
    schedule = random_mix(CHOICES, random.Random(3), time_limit_s=60, events=80)
    in_force, most = 0, 0
    for event in schedule:
        in_force += 1 if event.action == INJECT else -1
        most = max(most, in_force)
    assert most >= 3
    assert {event.nemesis for event in schedule} == {"partition", "kill", "pause"}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**63))
def test_faults_of_some_links_overlap_with_one_partition_at_most(seed: int) -> None:
    choices = [("partition", ["leader-minority", "halves"]), ("link", ["loss@minority", "delay@one", "loss@all"])]
    schedule = random_mix(choices, random.Random(seed), time_limit_s=20, events=40)
    in_force: dict[str, str] = {}
    for event in schedule:
        if event.action == HEAL:
            del in_force[event.fault_id]
            continue
        in_force[event.fault_id] = f"{event.nemesis} {event.variant}"
        links = [words for words in in_force.values() if words.startswith("link") and not words.endswith("@all")]
        partitions = [words for words in in_force.values() if words.startswith("partition")]
        assert not links or len(partitions) <= 1


@pytest.mark.parametrize("seed", range(30))
def test_a_mix_does_not_consist_of_read_errors_alone(seed: int) -> None:
    choices = [("disk-error", ["read@leader", "read@one"]), ("kill", ["sigkill@one"])]
    schedule = random_mix(choices, random.Random(seed), time_limit_s=5)
    assert "kill" in {event.nemesis for event in schedule}


def test_the_share_of_mixes_that_lose_a_leader_for_long_follows_the_odds() -> None:
    """A leader is lost for long if it is isolated for two seconds or more."""
    choices = [("partition", ["leader", "one"]), ("clock", ["bump@leader"]), ("link", ["loss@leader"])]

    def loses(schedule: Schedule) -> bool:
        begun = {
            event.fault_id: event.at_s for event in schedule if (event.action, event.variant) == (INJECT, "leader")
        }
        heals = [event for event in schedule if event.action == HEAL and event.fault_id in begun]
        return any(event.at_s - begun[event.fault_id] >= 2.0 for event in heals)

    for odds, least, most in ((Odds(lost=1.0), 200, 200), (Odds(lost=0.0), 0, 90)):
        mixes = [random_mix(choices, random.Random(seed), time_limit_s=10, odds=odds) for seed in range(200)]
        assert least <= sum(map(loses, mixes)) <= most


def test_about_half_of_the_faults_that_can_be_are_aimed_at_the_leader() -> None:
    choices = [("kill", ["sigkill@one", "sigkill@minority", "sigkill@leader", "terminate@one"])]
    variants = [
        event.variant
        for seed in range(200)
        for event in random_mix(choices, random.Random(seed), time_limit_s=30)
        if event.action == INJECT
    ]
    aimed = sum("leader" in variant for variant in variants)
    assert 0.3 < aimed / len(variants) < 0.7, "less than half fit beside the other faults"


def test_the_load_of_a_search_reveals_stale_reads_of_a_deposed_leader() -> None:
    """Clients that write to it wait for ever; some must be left that read from it what others have changed."""
    cut = [
        {"at_s": at_s, "action": action, "id": "f1", "nemesis": "partition", "variant": "leader"}
        for at_s, action in ((3.0, INJECT), (4.5, HEAL))
    ]
    test = make_test(
        nodes=5, workload="log", time_limit_s=8.0, rate=SEARCHED_LOAD["rate"],
        concurrency=SEARCHED_LOAD["concurrency"], operation_timeout_s=SEARCHED_LOAD["operation_timeout"],
        settings={"mutant": "stale-leader-reads"},
    )  # fmt: skip
    rehearsal = rehearse_test(test, Schedule.from_json(cut))
    assert "linearizable" in rehearsal.failed_checks, rehearsal.reason


def test_a_correct_system_explores_without_failures() -> None:
    heard: list[int] = []
    tally = explore(
        make_test(nemesis=(NemesisChoice("partition"), NemesisChoice("kill"))), seeds=iter((0, 2, 3)), jobs=1,
        budget_s=120, stop_at_first=False, on_result=lambda tally, rehearsal: heard.append(rehearsal.seed),
    )  # fmt: skip
    assert (tally.runs, tally.valid, tally.failures) == (3, 3, [])
    assert sorted(heard) == [0, 2, 3] and tally.operations > 100


def test_the_same_seed_is_the_same_run() -> None:
    test, schedule = mix_for(make_test(), 7, CHOICES)
    first, second = rehearse_test(test, schedule), rehearse_test(test, schedule)
    assert (first.valid, first.reason, first.operations) == (second.valid, second.reason, second.operations)


def test_a_clock_fault_before_a_kill_is_proven() -> None:
    faults = (("f1", "clock", "bump@leader", 0.5), ("f2", "kill", "sigkill@one", 2.0))
    schedule = Schedule.from_json(
        [
            {"at_s": at_s + after_s, "action": action, "id": fault, "nemesis": nemesis, "variant": variant}
            for fault, nemesis, variant, at_s in faults
            for action, after_s in ((INJECT, 0.0), (HEAL, 0.5))
        ]
    )
    rehearsal = rehearse_test(make_test(), schedule)
    assert (rehearsal.valid, rehearsal.faults) == (True, 2), rehearsal.reason


def test_a_failing_run_of_an_incorrect_system_is_shrunk() -> None:
    wrong = make_test(settings={"read_mode": "unsafe"}, time_limit_s=8.0, rate=100.0, concurrency=6)
    longer = random_mix(CHOICES, random.Random(5), time_limit_s=8.0, events=12)
    assert rehearse_test(wrong, longer).valid is False
    said: list[str] = []
    found = shrink(wrong, longer, jobs=1, budget_s=90, say=said.append)
    assert found.rehearsal.valid is False and "linearizable" in found.rehearsal.failed_checks
    assert len(found.schedule) < len(longer) and found.test.time_limit_s <= 8.0
    again = rehearse_test(found.test, found.schedule)
    assert (again.valid, again.reason) == (found.rehearsal.valid, found.rehearsal.reason)
    assert said


def test_a_run_that_does_not_fail_cannot_be_shrunk() -> None:
    with pytest.raises(OperatorError, match="does not fail in simulation"):
        shrink(make_test(), Schedule(()), jobs=1, budget_s=30, say=lambda line: None)


def stub_rehearsals(monkeypatch: pytest.MonkeyPatch, rules_of: Callable[[Schedule], tuple[str, ...]]) -> None:
    """Runs that break the invariants that `rules_of` gives for their schedule."""

    def rehearse(test: Test, schedule: Schedule) -> Rehearsal:
        failures = tuple(f"invariants: {rule}" for rule in rules_of(schedule))
        return Rehearsal(
            seed=test.seed, valid=False, reason=", ".join(failures), failed_checks=("invariants",), failures=failures,
            faults=len(schedule) // 2, operations=1, took_s=0.1,
        )  # fmt: skip

    monkeypatch.setattr(shrinking, "rehearse_test", rehearse)
    monkeypatch.setattr(shrinking, "worker_pool", ThreadPoolExecutor)
    monkeypatch.setattr(shrinking, "simplest_that_fails", lambda *_, **__: None)


def test_a_run_that_breaks_another_invariant_is_not_a_smaller_form(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = random_mix(CHOICES, random.Random(5), time_limit_s=4.0, events=4)
    stub_rehearsals(monkeypatch, lambda left: ("completeness", "quorum") if len(left) else ("election",))
    found = shrink(make_test(), schedule, jobs=1, budget_s=60, say=lambda line: None)
    assert "completeness" in found.rehearsal.reason and len(found.schedule) == 2


def test_stored_failures_that_the_simulation_does_not_show_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_rehearsals(monkeypatch, lambda left: ("quorum",))
    said: list[str] = []
    for stored in (["invariants: quorum"], ["invariants: election"]):
        shrink(make_test(), Schedule(()), jobs=1, budget_s=60, say=said.append, stored=stored)
    told = "in simulation the run shows invariants: quorum, not invariants: election as stored: "
    assert [line for line in said if "stored" in line] == [f"{told}shrinking what it shows"]


def test_failures_of_invariants_are_named_by_the_broken_rules() -> None:
    broken = [{"rule": rule, "time_s": 1.0, "text": "..."} for rule in ("quorum", "election", "quorum")]
    checks = {
        "log": {"valid": False, "reason": "lost"},
        "invariants": {"valid": False, "reason": "...", "violations": broken},
        "leaders": {"valid": True, "reason": "one each"},
    }
    assert failures_of({"checks": checks}) == ("log", "invariants: quorum", "invariants: election")


@pytest.mark.parametrize("checks", [None, 5, [], {"log": 5}, {"log": {}}, {"log": {"valid": True, "violations": 5}}])
def test_damaged_checks_of_results_are_ignored(checks: object) -> None:
    assert failures_of({"checks": checks}) == ()
    assert failures_of({"checks": {"log": {"valid": False, "violations": 5}, "other": checks}}) == ("log",)


def test_the_usable_choices_follow_the_requested_nemeses() -> None:
    names = {name for name, _ in usable_choices(make_test(nodes=5))}
    assert {"partition", "kill", "pause", "clock", "disk-stall", "power", "link"} <= names
    only = usable_choices(make_test(nemesis=(NemesisChoice("kill", "sigkill@leader"),)))
    assert only == [("kill", ["sigkill@leader"])]
    twice = (
        NemesisChoice("partition", "leader"),
        NemesisChoice("kill", "sigkill@one"),
        NemesisChoice("partition", "one"),
    )
    assert usable_choices(make_test(nemesis=twice)) == [("partition", ["leader", "one"]), ("kill", ["sigkill@one"])]
    classic = {"settings": {"replication": "sync"}}
    every = usable_choices(make_test(nemesis=(NemesisChoice("all"),), **classic))
    assert every == usable_choices(make_test(**classic)) and "promote" not in dict(every)
    more = usable_choices(make_test(nemesis=(NemesisChoice("promote", "failover"), NemesisChoice("all")), **classic))
    assert dict(more) == {**dict(every), "promote": ["failover@leader"]}
    with pytest.raises(OperatorError, match=r"all already includes kill: .* \(name-service, promote\)"):
        usable_choices(make_test(nemesis=(NemesisChoice("all"), NemesisChoice("kill"))))


@pytest.mark.parametrize("command", ["explore", "audit"])
def test_a_search_without_faults_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.cli import main

    assert main([command, "--nemesis", "none"]) == 254
    assert "--nemesis none leaves no faults to mix" in capsys.readouterr().err


def test_a_tally_tells_invalid_from_unknown() -> None:
    tally = Tally()
    for valid in (True, False, "unknown"):
        rehearsal = rehearse_test(make_test(time_limit_s=0.5), Schedule(()))

        tally.add(dataclasses.replace(rehearsal, valid=valid, failed_checks=("log",)), time_limit_s=0.5)
    assert (tally.runs, tally.valid, tally.invalid, tally.unknown) == (3, 1, 1, 1)


@pytest.mark.parametrize(
    ("by_reason", "interruption", "status"),
    [
        ({}, None, 0),
        ({"unknown: no operation succeeded": 1}, None, 2),
        ({"unknown: recovers": 1, "invalid: log": 1}, None, 1),
        ({}, KeyboardInterrupt(), 2),
        ({"invalid: log": 1}, KeyboardInterrupt(), 1),
    ],
)
def test_the_exit_status_of_a_search_is_that_of_its_worst_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_reason: dict[str, int], interruption: BaseException | None,
    status: int,
) -> None:  # fmt: skip
    def search(test: Any, arguments: Any, first: int, on_result: Any, *_: Any) -> Tally:
        tally = Tally(runs=5, valid=5 - sum(by_reason.values()), by_reason=by_reason)
        if interruption is not None:
            on_result(tally, SimpleNamespace(valid=True))
            raise interruption
        return tally

    monkeypatch.setattr("harness.commands.explore._explore", search)
    # It would ignore signals from then on.
    monkeypatch.setattr("harness.commands.explore.ignore_repeated_signals", lambda: None)
    assert cli.main(["explore", "--store", str(tmp_path), "--seeds", "5"]) == status


def test_a_violation_takes_the_place_of_an_unknown_run_that_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.exploration.search.MAX_KEPT_FAILURES", 2)
    tally = Tally()
    for number, valid in enumerate(("unknown", "unknown", "unknown", False, False, False)):
        found: Any = SimpleNamespace(seed=number, valid=valid, operations=1, faults=1, failed_checks=(), reason="why")
        tally.add(found, time_limit_s=1.0)
    assert [failure.seed for failure in tally.failures] == [4, 3], "the last unknown run is replaced first"
    assert (tally.invalid, tally.unknown) == (3, 3)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


def test_explore_shrink_and_replay_work_on_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.cli import main

    store = ["--store", str(tmp_path / "store")]
    options = ["--nodes", "3", "--time-limit", "6", "--set", "read_mode=unsafe", "--nemesis", "partition"]
    assert main(["explore", *options, *store, "--budget", "60s", "--seeds", "1", "--jobs", "1"]) == 1
    assert main(["shrink", "latest", *store, "--jobs", "1", "--budget", "60s"]) == 0
    told = capsys.readouterr()
    assert "; it fails without any faults\n" in told.err, "stale reads need none"
    line = told.out.strip().splitlines()[-1]
    words = shlex.split(line)
    assert [*shlex.split(harness_command()), "replay"] == words[:-3], "as it is called from here"
    words = words[-4:]
    assert words[0] == "replay" and Path(words[1]).parent.name == "shrunk"
    assert main([*words, *store]) == 1, "the shrunk run fails as well"
    assert "invalid in 1 of 1 runs" in capsys.readouterr().out
    shrunk = json.loads((Path(words[1]).parent / "test.json").read_text())
    run_dir = next(path for path in (tmp_path / "store").glob("*/latest") if path.name == "latest")
    again_path = os.readlink(run_dir)
    again = json.loads((run_dir / "test.json").read_text())
    for name in ("concurrency", "rate", "time_limit_s", "nodes", "seed", "settings"):
        assert again[name] == shrunk[name], name
    capsys.readouterr()
    assert main(["replay", "latest", *store]) == 1, "and so does the run itself, by its name"
    done = json.loads((run_dir / "test.json").read_text())
    assert done["nemesis_schedule"] == str(run_dir.parent / Path(again_path).name / "schedule.json")


def test_a_later_search_leaves_the_schedules_of_an_earlier_one_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seed under other faults is another schedule; the line that repeats the first run names its own."""
    from harness.cli import main

    store = tmp_path / "store"
    options = ["--nodes", "3", "--time-limit", "6", "--set", "read_mode=unsafe", "--seeds", "1", "--jobs", "1"]
    lines = []
    for nemesis in ("partition", "partition,kill"):
        assert main(["explore", *options, "--nemesis", nemesis, "--store", str(store)]) == 1
        said = capsys.readouterr().err.splitlines()
        lines += [line.split(maxsplit=1)[1] for line in said if line.strip().startswith("repeat")]
    first = min(path for path in store.glob("broker-*/*") if not path.is_symlink())
    words = shlex.split(lines[0])
    again = tmp_path / "again"
    assert main([*words[words.index("run") :], "--store", str(again)]) == 1
    assert (again / "latest" / "history.jsonl").read_bytes() == (first / "history.jsonl").read_bytes()


def test_a_short_shrink_keeps_the_smaller_run_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli import main

    store = ["--store", str(tmp_path / "store")]
    options = ["--nodes", "3", "--time-limit", "6", "--set", "read_mode=unsafe", "--nemesis", "partition"]
    assert main(["explore", *options, *store, "--seeds", "1", "--jobs", "1"]) == 1
    assert main(["shrink", "latest", *store, "--jobs", "1", "--budget", "60s"]) == 0
    shrunk = tmp_path / "store" / "latest" / "shrunk"
    before = [(shrunk / name).read_bytes() for name in ("schedule.json", "test.json")]
    capsys.readouterr()
    assert main(["shrink", "latest", *store, "--jobs", "1", "--budget", "0.001s"]) == 0
    assert "an earlier search got further" in " ".join(capsys.readouterr().err.split())
    assert [(shrunk / name).read_bytes() for name in ("schedule.json", "test.json")] == before
    elsewhere = tmp_path / "elsewhere"  # a shrunk form of another run with this seed
    elsewhere.mkdir()
    (elsewhere / "schedule.json").write_bytes(before[0])
    (elsewhere / "test.json").write_text(json.dumps({**json.loads(before[1]), "operation_timeout_s": 1.5}))
    assert main(["shrink", "latest", *store, "--jobs", "1", "--budget", "0.001s", "--out", str(elsewhere)]) == 0
    assert json.loads((elsewhere / "test.json").read_text())["operation_timeout_s"] == 1.0
    (shrunk / "test.json").write_text((shrunk / "test.json").read_text().replace('"unsafe"', '"read_index"'))
    assert main(["shrink", "latest", *store, "--jobs", "1", "--budget", "0.001s"]) == 0
    assert (shrunk / "test.json").read_bytes() != before[1], "a run that does not fail is replaced"
    assert "unsafe" in (shrunk / "test.json").read_text()


def test_a_shrink_does_not_keep_the_smaller_run_of_another_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both shrink into one --out with the same seed, but with different settings."""
    from harness.cli import main

    out = tmp_path / "out"
    options = ["--nodes", "3", "--time-limit", "6", "--set", "read_mode=unsafe", "--nemesis", "partition"]
    for name, setting, budget in (("one", "sync", "60s"), ("other", "async", "0.001s")):
        store = ["--store", str(tmp_path / name)]
        mode = ["--set", f"flush_mode={setting}"]
        assert main(["explore", *options, *mode, *store, "--seeds", "1", "--jobs", "1"]) == 1
        assert main(["shrink", "latest", *store, "--jobs", "1", "--budget", budget, "--out", str(out)]) == 0
    assert json.loads((out / "test.json").read_text())["settings"]["flush_mode"] == "async"
    whole = tmp_path / "other" / "latest" / "schedule.json"
    assert json.loads((out / "schedule.json").read_text()) == json.loads(whole.read_text())
    assert "an earlier search" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_rehearsal_ends_the_shrink(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A run handles Ctrl-C by ending its load. `shrink` used to go on with the run that was cut short."""

    def with_interrupt(*arguments: Any) -> Parts:
        def on_made(*_: object) -> None:
            asyncio.get_running_loop().call_later(3.0, signal.raise_signal, number)

        return dataclasses.replace(parts_of(*arguments), on_made=on_made)

    monkeypatch.setattr("harness.exploration.rehearsal.parts_of", with_interrupt)
    test = make_test(time_limit_s=20.0)
    with pytest.raises(KeyboardInterrupt):
        shrink(test, Schedule(()), jobs=1, budget_s=60, say=lambda _: None)


@pytest.mark.parametrize("checks", [[], {"invariants": 3}, {"invariants": {"valid": False, "violations": [1]}}])
def test_failures_are_read_from_results_of_any_form(checks: object) -> None:
    """Shrinking reads them from a file."""
    assert failures_of({"checks": checks}) == (("invariants",) if "valid" in str(checks) else ())


def test_a_shrink_keeps_the_shortest_run_if_a_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    test = make_test(settings={"read_mode": "unsafe"}, time_limit_s=6.0, concurrency=20, rate=25.0, seed=0)
    seeded, schedule = mix_for(test, 0, CHOICES[:1])
    monkeypatch.setattr(shrinking, "worker_pool", lambda jobs: _Dying(1))
    said: list[str] = []
    found = shrink(seeded, schedule, jobs=1, budget_s=60, say=said.append)
    assert said[-1].endswith("was killed, perhaps because memory ran out; the shortest run so far is kept")
    assert found.runs == 1 and not found.is_minimal and found.rehearsal.failed_checks
    assert (found.test, found.schedule) != (seeded, schedule)
    monkeypatch.setattr(shrinking, "worker_pool", lambda jobs: _Dying(0))
    with pytest.raises(HarnessError, match="try --jobs 1"):
        shrink(seeded, schedule, jobs=2, budget_s=60, say=said.append)


@pytest.mark.parametrize("latest", ["latest", "broker-register-schedule/latest"])
def test_a_schedule_below_latest_is_resolved_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], latest: str
) -> None:
    """`latest` points elsewhere once the first of the runs has begun."""
    from harness.cli import main

    schedule, store = tmp_path / "cut.json", tmp_path / "store"
    schedule.write_text(
        '[{"at_s": 0.5, "action": "inject", "id": "f1", "nemesis": "partition", "variant": "leader"},'
        ' {"at_s": 1.5, "action": "heal", "id": "f1", "nemesis": "partition", "variant": "leader"}]'
    )
    load = ["--cluster", "sim", "--nodes", "3", "--time-limit", "3", "--rate", "20", "--store", str(store)]
    assert main(["run", *load, "--nemesis-schedule", str(schedule), "--seed", "1"]) == 0
    shrunk = store / "latest" / "shrunk"
    shrunk.mkdir()
    made = shrunk.resolve() / "schedule.json"
    shutil.copy(schedule, made)
    capsys.readouterr()
    assert main(["replay", str(store / latest / "shrunk" / "schedule.json"), *load, "--times", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("repeat")]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        assert words[words.index("--nemesis-schedule") + 1] == str(made)


UNSAFE = [
    "explore", "--nodes", "3", "--time-limit", "6", "--set", "read_mode=unsafe", "--nemesis", "partition",
    "--jobs", "1", "--json",
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "nor can 1 other failure: No space left on device"),
        (
            OperatorError("cannot write /store: no space left"),
            "seed 0 cannot be stored, nor can 1 other failure: cannot write /store",
        ),
        (HarnessError("interrupted while the history was checked"), "other failure: interrupted while"),
        (KeyboardInterrupt(), "other failure: interrupted\n"),
    ],
)
def test_a_failure_that_cannot_be_stored_is_reported_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    from harness.cli import main

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("harness.exploration.keeping.perform", fail)
    assert main([*UNSAFE, "--seeds", "2", "--store", str(tmp_path / "store")]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["invalid"], found["kept"]) == (2, [])
    assert said in captured.err
    assert "seed 1 cannot" not in captured.err


@pytest.mark.parametrize(("valid", "failed", "is_told"), [("unknown", (), False), (False, ("linearizable",), True)])
def test_a_shrink_command_is_shown_only_for_runs_that_it_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    valid: bool | str, failed: tuple[str, ...], is_told: bool,
) -> None:  # fmt: skip
    from harness.cli import main

    def found(test: Test, schedule: Schedule) -> Rehearsal:
        seen = rehearse_test(test, schedule)
        return dataclasses.replace(seen, valid=valid, failed_checks=failed, failures=failed, is_stuck=False)

    monkeypatch.setattr("harness.exploration.search.rehearse_test", found)
    main([*UNSAFE, "--seeds", "1", "--store", str(tmp_path / "store")])
    said = capsys.readouterr().err
    assert "  repeat  " in said
    assert ("  shrink  " in said) is is_told


class _Dying(Executor):
    """Runs the first calls as they are submitted; the processes of all others were killed."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._left -= 1
        if self._left >= 0:
            future.set_result(call(*arguments, **named))
        else:
            future.set_exception(BrokenProcessPool())
        if self._left < -20:  # the pool has noticed
            raise BrokenProcessPool
        return future


def test_failures_are_stored_even_if_a_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli import main

    monkeypatch.setattr("harness.commands.explore.explore", partial(explore, pool=_Dying(1)))
    options = ["--nodes", "3", "--time-limit", "6", "--set", "read_mode=unsafe", "--nemesis", "partition"]
    line = ["explore", *options, "--seeds", "5", "--jobs", "1", "--store", str(tmp_path / "store"), "--json"]
    assert main(line) == 1, "a violation is certain, however the search ended"
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["runs"], found["invalid"], found["interrupted"]) == (1, 1, True)
    (kept,) = found["kept"]
    assert RunDir(Path(kept)).read_results()["valid"] is False
    assert said.err.strip().endswith("perhaps because memory ran out: continue with --seed 1"), "there is no --jobs 0"


@pytest.mark.parametrize("left", [0, -15])
def test_a_search_can_be_continued_from_the_first_seed_that_was_not_run(left: int) -> None:
    """All processes of a pool end with one of them, and are reported in any order."""
    with pytest.raises(HarnessError, match="continue with --jobs 7 --seed 0"):
        explore(
            make_test(nemesis=(NemesisChoice("partition"),)), seeds=iter(range(8)), jobs=8, budget_s=60,
            stop_at_first=False, on_result=lambda *_: None, pool=_Dying(left),
        )  # fmt: skip


def test_runs_that_had_ended_when_a_process_was_killed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the pool reports them."""

    def failing(test: Test, schedule: Schedule) -> Rehearsal:
        return Rehearsal(
            seed=test.seed, valid=False, reason="wrong", failed_checks=("log",), faults=1, operations=1, took_s=0.0
        )

    monkeypatch.setattr("harness.exploration.search.rehearse_test", failing)
    heard: list[int] = []
    with pytest.raises(HarnessError, match=r"continue with .*--seed 31"):
        explore(
            make_test(nemesis=(NemesisChoice("partition"),)), seeds=iter(range(32)), jobs=32, budget_s=60,
            stop_at_first=False, on_result=lambda _, found: heard.append(found.seed), pool=_Dying(31),
        )  # fmt: skip
    assert sorted(heard) == list(range(31))


def test_an_interrupted_run_is_not_stored_as_the_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a failure is kept ends the load of that run, as it does with any."""
    from harness.cli import main

    def cut_short(parts: Parts, store: Store, console: OutputConsole) -> tuple[RunDir, dict[str, object]]:
        run_dir, results = perform(parts, store, console)
        return run_dir, {**results, "valid": "unknown", "interrupted": "SIGINT after 2.1 s"}

    monkeypatch.setattr("harness.exploration.keeping.perform", cut_short)
    assert main([*UNSAFE, "--seeds", "2", "--store", str(tmp_path / "store")]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["invalid"], found["kept"], found["interrupted"]) == (2, [], True)
    assert "nor can 1 other failure: interrupted by SIGINT after 2.1 s" in captured.err


def test_a_stored_run_that_does_not_fail_again_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own workload may depend on a clock: the stored run is then not the one that failed."""
    from harness.cli import main

    def holds(parts: Parts, store: Store, console: OutputConsole) -> tuple[RunDir, dict[str, object]]:
        run_dir, results = perform(parts, store, console)
        return run_dir, {**results, "valid": True}

    for number, again in enumerate((perform, holds)):
        monkeypatch.setattr("harness.exploration.keeping.perform", again)
        assert main([*UNSAFE, "--seeds", "1", "--store", str(tmp_path / "store")]) == 1
        said = capsys.readouterr().err
        assert ("repeated, it was valid, not invalid" in said.lower()) is bool(number)


def test_a_system_that_cannot_be_simulated_is_refused_with_an_alternative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli import main

    run_dir = tmp_path / "store" / "toy-register-none" / "20260131T120000Z"
    run_dir.mkdir(parents=True)
    test = Test(
        system="toy", cluster="local", nodes=1, workload="register", nemesis=(), nemesis_interval_s=1.0,
        time_limit_s=1.0, concurrency=1, rate=1.0, seed=1,
    )  # fmt: skip
    (run_dir / "test.json").write_text(json.dumps(test.to_json()))
    refused = "harness: cluster sim simulates the broker and cannot run other systems; "
    for words, instead in (
        (["explore", "--system", "toy", "--budget", "1s"], "harness run --system toy --test-count 10 makes many runs"),
        (["audit", "--system", "toy"], "only a simulated run is reproducible"),
        (["shrink", "latest", "--store", str(tmp_path / "store")], "harness replay "),
    ):
        assert main(words) == 254
        told = capsys.readouterr().err
        assert told.startswith(refused + instead) and told.count("\n") == 1, told


def test_warnings_of_a_rehearsal_are_not_written_to_the_console() -> None:
    script = (
        "import logging\nfrom harness.exploration import rehearsal\n"
        "warn = logging.getLogger('harness.faults').warning\n"
        "rehearsal._rehearse = lambda test, schedule, with_facts: warn('n1 ended by itself')\n"
        "rehearsal.rehearse_test(None, None); warn('beside a rehearsal')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "beside a rehearsal\n"
