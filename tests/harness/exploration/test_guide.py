"""Guided search: its proposals follow from seeds and results alone, its memory is bounded, and it finds failures."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.exploration import guide as module
from harness.exploration.guide import FIRST_RUNS, MAX_CORPUS, Guide
from harness.exploration.mutating import OPERATORS
from harness.exploration.rehearsal import Rehearsal, rehearse_test, usable_choices
from harness.exploration.search import Candidate, mix_for
from harness.test import NemesisChoice, Test
from nemesis.schedule import load_schedule

CHOICES = [("partition", ["one", "leader"]), ("kill", ["sigkill@one", "sigkill@leader"]), ("pause", ["sigstop@one"])]


def make_test(**changes: object) -> Test:
    values = {
        "system": "broker", "cluster": "sim", "nodes": 3, "workload": "log", "nemesis": (), "nemesis_interval_s": 5.0,
        "time_limit_s": 15.0, "concurrency": 3, "rate": 50.0, "seed": 1, "settings": {}, **changes,
    }  # fmt: skip
    return Test(**values)  # type: ignore[arg-type]


def result(candidate: Candidate, facts: Sequence[tuple[int, float]] | None = None) -> Rehearsal:
    """A run whose facts follow from the candidate; some of them are common."""
    rng = random.Random(f"{candidate.test.seed}{candidate.schedule.to_json()}")
    found = facts or [(int(rng.expovariate(0.005)), rng.uniform(1.0, 12.0)) for _ in range(30)]
    return Rehearsal(
        seed=candidate.test.seed, valid=True, reason="", failed_checks=(), faults=1, operations=1, took_s=0.0,
        facts=tuple(dict(found).items()),
    )  # fmt: skip


def search(runs: int, lag: int, rng: random.Random) -> list[Candidate]:
    """A search whose runs end in an order that `rng` draws."""
    guide = Guide(make_test(), choices=CHOICES, lag=lag)
    made: list[Candidate] = []
    running: list[Candidate] = []
    while len(made) < runs or running:
        while len(made) < runs and len(running) < lag and guide.may_propose():
            made.append(guide.propose(100 + len(made)))
            running.append(made[-1])
        ended = running.pop(rng.randrange(len(running)))
        guide.note(ended, result(ended))
    return made


@pytest.mark.parametrize("lag", [1, 3])
def test_the_order_in_which_runs_end_does_not_change_the_search(lag: int) -> None:
    first = search(60, lag, random.Random(1))
    assert first == search(60, lag, random.Random(2))
    assert any(candidate.operators for candidate in first)


def test_the_first_runs_and_some_others_are_those_of_an_unguided_search() -> None:
    made = search(200, 1, random.Random(1))
    mixes = [candidate.number for candidate in made if not candidate.operators]
    assert mixes[:FIRST_RUNS] == list(range(FIRST_RUNS)) and 30 < len(mixes) < 80
    for number in mixes:
        assert (made[number].test, made[number].schedule) == mix_for(make_test(), 100 + number, CHOICES)


def test_no_run_is_proposed_twice() -> None:
    made = search(400, 1, random.Random(1))
    assert len({(candidate.test.seed, candidate.schedule) for candidate in made}) == len(made)
    assert sum(candidate.test.seed != 100 + candidate.number for candidate in made) > 20, (
        "some keep the seed of their origin"
    )


def test_the_memory_of_earlier_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.exploration.guide.MAX_MADE", 3)
    guide = Guide(make_test(), choices=CHOICES, lag=1)
    for number in range(8):
        candidate = guide.propose(number)
        guide.note(candidate, result(candidate))
    assert len(guide._made) == 3


def test_the_corpus_is_bounded_and_keeps_runs_with_rare_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Guide(make_test(), choices=CHOICES, lag=1)
    for number in range(3 * MAX_CORPUS):
        candidate = guide.propose(number)
        common = [(fact, 2.0) for fact in range(10)]
        guide.note(candidate, result(candidate, [*common, (1000 + number, 3.0)]))
    guide.propose(9999)
    summary = guide.summary()
    assert summary["corpus"] == MAX_CORPUS and summary["facts"] == 10 + 3 * MAX_CORPUS
    monkeypatch.setattr(module, "MAX_CORPUS", 2)
    guide = Guide(make_test(), choices=CHOICES, lag=1)
    for number in range(8):
        facts = [(fact, 2.0) for fact in range(500 * number, 500 * number + (60 if number == 3 else 1))]
        candidate = guide.propose(number)
        guide.note(candidate, result(candidate, facts))
    assert 3 in {kept.number for kept in guide._corpus}


def test_operators_that_find_new_facts_are_drawn_more_often() -> None:
    guide = Guide(make_test(), choices=CHOICES, lag=1)
    for number in range(300):
        candidate = guide.propose(number)
        new = [(200 * number + more, 2.0) for more in range(100)] if "stretch" in candidate.operators else [(1, 2.0)]
        guide.note(candidate, result(candidate, new))
    shares = guide.summary()["operators"]
    assert isinstance(shares, dict) and list(shares) == list(OPERATORS)
    assert max(shares, key=lambda name: shares[name]) == "stretch"


def test_a_mutation_that_keeps_the_seed_of_its_origin_keeps_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST_RUNS", 1), ("RANDOM_RATIO", 0.0), ("SAME_SEED_RATIO", 1.0)):
        monkeypatch.setattr(module, name, value)
    test = make_test(time_limit_s=6.0, nemesis=tuple(NemesisChoice(name) for name in ("kill", "partition", "pause")))
    guide = Guide(test, choices=usable_choices(test), lag=1)
    seen: list[tuple[Candidate, Rehearsal]] = []
    for number in range(10):
        candidate = guide.propose(number)
        origin = next((each for each in seen if each[0].test.seed == candidate.test.seed), None)
        run = rehearse_test(candidate.test, candidate.schedule, with_facts=True)
        if origin is not None:
            pairs = zip(origin[0].schedule, candidate.schedule, strict=False)
            apart_s = min((min(a.at_s, b.at_s) for a, b in pairs if a != b), default=6.0)
            both = [[fact for fact in each.facts if fact[1] < apart_s] for each in (origin[1], run)]
            assert both[0] == both[1] and both[0]
            return
        seen.append((candidate, run))
        guide.note(candidate, run)
    pytest.fail("none of 10 runs kept the seed of another one")


def test_a_guided_search_finds_failures_that_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.cli import main

    monkeypatch.setattr(module, "FIRST_RUNS", 1)
    monkeypatch.setattr(module, "RANDOM_RATIO", 0.0)
    store = ["--store", str(tmp_path / "store")]
    options = ["explore", "--guide", "--workload", "log", "--nodes", "3", "--time-limit", "4", "--rate", "60"]
    options += ["--concurrency", "6", "--jobs", "1", "--json", "--nemesis", "partition,kill"]
    options += ["--set", "mutant=ack-before-fsync", "--seeds", "3"]
    assert main([*options, *store]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["runs"] == 3 and found["guide"]["corpus"] > 0
    lines = [text for text in captured.err.splitlines() if text.strip().startswith("repeat")]
    assert len(lines) == len(set(lines)) == found["invalid"] == len(found["kept"])
    words = shlex.split(lines[-1])[2:]
    seed, path = (words[words.index(option) + 1] for option in ("--seed", "--nemesis-schedule"))
    kinds = tuple(NemesisChoice(name) for name in ("partition", "kill"))
    test = make_test(time_limit_s=4.0, nemesis=kinds)
    assert load_schedule(path) != mix_for(test, int(seed), usable_choices(test))[1], (
        "the last is a mutation of earlier ones"
    )
    assert main([*words, *store]) == 1, lines[-1]


def test_a_guide_is_refused_with_classic_replication_and_on_a_spark_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli import main

    words = ["explore", "--guide", "--set", "replication=sync", "--store", str(tmp_path / "store")]
    assert main([*words, "--workload", "log", "--nemesis", "kill", "--seeds", "1"]) == 254
    assert "classic replication" in capsys.readouterr().err
    assert main(["explore", "--guide", "--master", "spark://nowhere:1", "--store", str(tmp_path / "store")]) == 254
    assert "omit --guide or --master" in capsys.readouterr().err
