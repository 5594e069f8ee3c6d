"""How the benchmark of `harness explain` removes a mutant from a running test, and what its page says."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

import pytest

import harness.systems.broker
import node.serving
from benchmarks.explain import cure, table
from harness.clusters.sim.cluster import SimCluster
from harness.execution import TestClock, rehearse
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import parts_of
from harness.report import OutputConsole
from nemesis.schedule import Schedule
from node.client import BrokerClient
from node.client.errors import OutcomeUnknown
from node.client.results import SendResult
from node.dledger import FAST_TIMING, DLedgerServer
from node.dledger.leadership import Leadership
from node.mutants.client import mutate_client
from node.real_runtime import real_runtime

LOAD_S = 1.0


def _traces_of_mutants() -> list[object]:
    """Objects of a mutant's classes, and objects that hold a mutant's replacement or method."""

    def is_of_mutants(module: object) -> bool:
        # Classes written in C may have a descriptor there.
        return isinstance(module, str) and module.startswith("node.mutants.")

    found: list[object] = []
    wrong: list[object] = []
    for each in gc.get_objects():
        if is_of_mutants(type(each).__module__):
            (found if type(each).__mro__[1] is not object else wrong).append(each)
        elif isinstance(each, MethodType) and is_of_mutants(each.__module__):
            wrong.append(each)
    holders = gc.get_referrers(*wrong) if wrong else []
    return found + [each for each in holders if not isinstance(each, list | FrameType)]  # such as those here


@pytest.mark.parametrize(
    "mutant",
    [
        "end-term-from-current-term",  # replaces the log
        "ack-before-quorum",  # its methods are held by the watch over replicas
        "compare-index-only",  # and here by a function that wraps one
        "ack-before-fsync",  # and a switch of the writer's
        "lease-on-wall-clock",  # parts that are created later
    ],
)
def test_a_cured_run_has_nothing_left_of_its_mutant(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((node.serving, "mutate_broker"), (harness.systems.broker, "mutate_client")):
        monkeypatch.setattr(module, name, vars(module)[name])  # `cure` replaces it, which is undone afterwards
    gc.collect()
    seen: dict[str, Any] = {}

    def act() -> None:
        seen["before"] = len(_traces_of_mutants())
        cure()
        seen["after"] = _traces_of_mutants()
        ledgers = [each for each in gc.get_objects() if isinstance(each, DLedgerServer)]
        seen["syncs"] = [each.store.writer._sync_each_group for each in ledgers]

    def made(cluster: SimCluster, clock: TestClock) -> None:
        asyncio.get_running_loop().call_later(LOAD_S / 2, act)

    test, _ = SCENARIOS[mutant].run_of(mutant, 1)
    parts = parts_of(dataclasses.replace(test, time_limit_s=LOAD_S), Schedule(()))
    rehearse(dataclasses.replace(parts, on_made=made), str(tmp_path), OutputConsole(file=io.StringIO(), quiet=True))
    assert seen["before"] > 0
    assert seen["after"] == []
    assert len(seen["syncs"]) >= test.nodes
    assert all(seen["syncs"])


def test_a_cure_ignores_classes_whose_module_is_not_a_string(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((node.serving, "mutate_broker"), (harness.systems.broker, "mutate_client")):
        monkeypatch.setattr(module, name, vars(module)[name])
    odd = type("Odd", (), {"__module__": property(str)})()
    assert not isinstance(type(odd).__module__, str)
    cure()
    assert type(odd).__name__ == "Odd"


def test_a_cured_leader_measures_time_by_its_own_clock_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((node.serving, "mutate_broker"), (harness.systems.broker, "mutate_client")):
        monkeypatch.setattr(module, name, vars(module)[name])
    heard_before_s: list[float] = []

    def made(cluster: SimCluster, clock: TestClock) -> None:
        loop = asyncio.get_running_loop()

        def look(lead: Leadership) -> None:
            heard_before_s.append((lead._clock.monotonic_ns() - lead.quorum_sent_ns()) / 1e9)

        def act(lead: Leadership) -> None:
            if not any(lead._unanswered.values()):  # pending answers carry the wrong time too
                loop.call_later(0.0001, act, lead)
                return
            cure()
            for number in range(40):
                loop.call_later(number / 100, look, lead)

        def find() -> None:
            act(next(each for each in gc.get_objects() if isinstance(each, Leadership) and not each._ended))

        loop.call_later(LOAD_S / 2, find)

    test, _ = SCENARIOS["lease-on-wall-clock"].run_of("lease-on-wall-clock", 1)
    parts = parts_of(dataclasses.replace(test, time_limit_s=LOAD_S), Schedule(()))
    rehearse(dataclasses.replace(parts, on_made=made), str(tmp_path), OutputConsole(file=io.StringIO(), quiet=True))
    every_s = FAST_TIMING.heartbeat_interval_ms / 1000
    assert len(heard_before_s) == 40
    assert all(0 <= before_s <= 2 * every_s for before_s in heard_before_s)


def test_a_cured_client_reports_the_true_outcome_of_a_pending_send(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((node.serving, "mutate_broker"), (harness.systems.broker, "mutate_client")):
        monkeypatch.setattr(module, name, vars(module)[name])

    async def times_out(self: BrokerClient, *arguments: Any, **options: Any) -> SendResult:
        await asyncio.sleep(0)
        raise OutcomeUnknown("no answer")

    async def is_definite(act: Callable[[], None]) -> bool:
        client = BrokerClient(name_servers=[], runtime=real_runtime(1))
        mutate_client("indefinite-as-definite", client)
        sending = asyncio.ensure_future(client.send())  # type: ignore[call-arg]
        await asyncio.sleep(0)
        act()
        with pytest.raises(OutcomeUnknown) as caught:
            await sending
        return caught.value.is_definite

    monkeypatch.setattr(BrokerClient, "send", times_out)
    assert asyncio.run(is_definite(lambda: None)) is True
    assert asyncio.run(is_definite(cure)) is False


def _result(**more: Any) -> Mapping[str, Any]:
    return {
        "text": "votes: twice", "seen_s": 3.0, "mistake_s": [0.1, 0.2], "jump_s": [2.0, 2.1], "intervention": "heal",
        "account": ["n1 votes", "fault f1 kill begins"], "fails": [0, 30], "runs": 30, "continuations": 800,
        "processor_s": 9.0, "points": 40, **more,
    }  # fmt: skip


def test_the_page_explains_a_jump_that_is_far_from_the_mistake_if_the_curve_does() -> None:
    page = table({"vote-not-persisted": _result(between={"runs": 120, "fails": 0})})
    assert "Within a second of the mistake: 0 of 1." in page
    assert "Of 120 continuations with faults healed" in page
    assert "before the jump 0, after it 30 of 30 fail. Events there: fault f1 kill begins; n1 votes." in page
    before = table({"accept-gap": _result(mistake_s=[4.0, 4.1], intervention="none")})
    assert "with faults as planned the failure is decided before the mistake" in before
    assert "Of 120" not in table({"vote-not-persisted": _result(jump_s=[0.9, 1.0], between={"runs": 120, "fails": 0})})


def test_the_page_distinguishes_certain_failure_from_a_moment_that_was_not_found() -> None:
    shown_at_once = _result(jump_s=None, mistake_s=[2.9, 2.95], points=1)
    assert "no moment decides it" in table({"ack-before-fsync": shown_at_once})
    assert "no moment decides it" not in table({"ack-before-fsync": {**shown_at_once, "points": 40}})


def test_a_violation_that_shows_only_at_the_end_of_a_run_has_a_row() -> None:
    page = table({"timers-forgotten": _result(seen_s=None, jump_s=[0.2, 0.3], text="0 never arrived")})
    assert "| timers-forgotten | 0 never arrived | at its end | 0.100–0.200 | 0.2000–0.3000 |" in page
    assert "Within a second of the mistake: 1 of 1." in page
    always = table({"timers-forgotten": _result(seen_s=None, jump_s=None, points=1)})
    assert "no moment decides it: nearly every run fails without faults and load, at its end." in always


def test_a_wide_jump_is_not_counted_as_near_the_mistake() -> None:
    wide = _result(jump_s=[0.0, 10.5], mistake_s=[3.2, 3.4], between={"runs": 0, "fails": 0})
    assert "| 7.300 s |" in table({"ha-never-compares": wide})
    assert "Within a second of the mistake: 0 of 1." in table({"ha-never-compares": wide})
    assert "the mistake lies within the rise, which is 10.500 s long with faults healed" in table({"accept-gap": wide})


def test_the_page_names_the_commit_of_its_rows() -> None:
    page = table({"no-step-down": _result(commit="0123456789abcdef", most=30), "accept-gap": _result()})
    assert "- At commit 0123456789ab, at most 30 moments, 30 runs each: no-step-down." in page
    assert "- At an unrecorded commit, 30 runs each: accept-gap." in page


def test_a_failure_from_the_start_is_counted_apart_and_is_near_an_early_mistake() -> None:
    always = _result(jump_s=None, mistake_s=[0.5, 0.6], points=2, begin_s=-0.1)
    page = table({"ack-before-fsync": always, "accept-gap": _result(mistake_s=[1.9, 2.0])})
    assert "Within a second of the mistake: 1 of 2. In 1 more nearly every run fails without faults and load" in page
    assert "with them 2 of 2." in page and "The mistake happens at the latest 0.700 s after the start." in page
    late = table({"ack-before-fsync": {**always, "mistake_s": [0.9, 1.0]}})
    assert "Within a second of the mistake: 0 of 1.\n" in late and "1.100 s after the start" in late
