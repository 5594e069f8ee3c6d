"""Triggers: every kind fires, and a waiter sees one that fired shortly before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.clusters.sim.simulation import run_simulated
from harness.clusters.sim.triggers import SimTriggers
from harness.clusters.sim.watch import ReplicaWatch
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import rehearse_test
from nemesis.triggers import KINDS, Occurrence, Trigger


def test_every_kind_of_trigger_occurs_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    note = SimTriggers._note

    def noted(self: SimTriggers, kind: str, host: str) -> None:
        seen.add(kind)
        note(self, kind, host)

    monkeypatch.setattr(SimTriggers, "_note", noted)
    run = rehearse_test(*SCENARIOS["truncate-committed"].run_of("none", 1))
    assert run.symptoms == ()
    assert seen == set(KINDS)


def test_waiting_returns_past_and_future_occurrences_or_times_out() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch = ReplicaWatch()
        triggers = SimTriggers(watch, now_s=loop.time)

        def tell(kind: str, host: str) -> None:
            for listener in watch.tell.occurrence:
                listener(kind, host)

        async def wait(word: str, since_s: float) -> Any:
            return await triggers.wait(Trigger.parse(word), since_s=since_s, timeout_s=2.0)

        begin_s = loop.time()
        tell("elected", "n1")
        await asyncio.sleep(1.0)
        assert await wait("elected", begin_s) == Occurrence(kind="elected", host="n1", at_s=begin_s)
        assert loop.time() == begin_s + 1.0
        loop.call_later(0.5, tell, "elected", "n1")
        loop.call_later(0.7, tell, "elected", "n2")
        found = await wait("elected@n2+9", begin_s)
        assert found is not None and found.at_s == pytest.approx(begin_s + 1.7)
        assert await wait("voted", begin_s) is None
        assert loop.time() == pytest.approx(begin_s + 3.7)

    run_simulated(main(), seed=1)
