"""Triggers read from the brokers' logs: every kind is seen, once it is logged."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from harness.clusters.local import LocalCluster
from harness.clusters.sim.cluster import SimCluster
from harness.execution import rehearse
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import parts_of
from harness.faults.triggers import count_triggers, kinds_seen, not_waited_for
from harness.history_writer import read_history
from harness.systems.broker import BrokerSystem
from harness.systems.broker_triggers import LOGGED_KINDS, LogTriggers, occurrence_of
from nemesis.schedule import Schedule
from nemesis.triggers import KINDS, Trigger

QUIET = Console(file=io.StringIO(), quiet=True)
ELECTED = "2026-01-01T00:00:00.000Z INFO node.dledger.role role_change self=n2 role=LEADER term=7\n"
MATCHED = "2026-01-01T00:00:00.000Z INFO node.dledger.pusher push to n3: COMPARE -> APPEND at 41\n"


@pytest.mark.parametrize(
    ("line", "occurrence"),
    [
        (ELECTED, ("elected", "n2")),
        (MATCHED, ("matched", "n3")),
        (MATCHED.replace("at 41", "at -1"), None),
        (MATCHED.replace("APPEND", "TRUNCATE"), ("truncating", "n3")),
        (ELECTED.replace("LEADER", "CANDIDATE"), None),
        ("x INFO node.broker.append_errors a message says role_change self=n2 role=LEADER term=7", None),
    ],
)
def test_lines_and_their_triggers(line: str, occurrence: tuple[str, str] | None) -> None:
    assert occurrence_of("n2", line.rstrip()) == occurrence


def test_a_broker_logs_every_kind_that_is_looked_for(tmp_path: Path) -> None:
    """What the lines look like is the node's choice: this holds the two together."""
    rehearse(parts_of(*SCENARIOS["truncate-committed"].run_of("none", 1)), str(tmp_path), QUIET)
    seen = set()
    for path in tmp_path.glob("*/2*/nodes/n*/broker.log"):
        seen |= {found for line in path.read_text().splitlines() if (found := occurrence_of(path.parent.name, line))}
    assert {kind for kind, _ in seen} == LOGGED_KINDS
    assert {host for _, host in seen} <= {"n1", "n2", "n3"}
    assert set(KINDS) > LOGGED_KINDS


def test_waiting_for_what_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    log.write_text(ELECTED)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        triggers = LogTriggers({"n2": log, "n3": tmp_path / "not-yet.log"}, now_s=loop.time)

        async def wait(word: str, timeout_s: float = 30.0) -> str:
            found = await triggers.wait(Trigger.parse(word), since_s=begin_s, timeout_s=timeout_s)
            return str(found)

        async with triggers.watch():
            begin_s = loop.time()
            assert await wait("elected", 0.05) == "None", "what was there before does not count"
            assert await wait("storing") == "None", "nobody waits for what is not logged"
            waiting = asyncio.create_task(wait("elected"))
            await asyncio.sleep(0.01)
            with log.open("a") as file:
                file.write(MATCHED + ELECTED[:-20])
                file.flush()
                await asyncio.sleep(0.02)
                assert not waiting.done(), "half a line is none"
                file.write(ELECTED[-20:])
            assert await waiting == "elected@n2"
            assert await wait("matched@n3+5") == "matched@n3", "it came a little before"
            assert await wait("matched@n2", 0.01) == "None"
            (tmp_path / "not-yet.log").write_text(ELECTED)
            assert await wait("elected@n3") == "elected@n3"

    asyncio.run(main())


def test_what_a_cluster_cannot_see_is_said() -> None:
    events = [
        {"at_s": 1.0, "action": "inject", "id": "f1", "nemesis": "kill", "variant": "sigkill@n1", "when": "storing"},
        {"at_s": 2.0, "action": "heal", "id": "f1", "when": "elected@n2+0.1"},
    ]
    schedule = Schedule.from_json(events)
    assert not_waited_for(schedule, SimCluster, BrokerSystem) is None
    assert kinds_seen(SimCluster, BrokerSystem) == set(KINDS)
    line = not_waited_for(schedule, LocalCluster, BrokerSystem)
    assert (
        line is not None
        and "local cannot observe storing" in line
        and line.endswith("at their scheduled times only: inject f1")
    )


@pytest.mark.long
def test_triggers_that_occurred_are_counted(tmp_path: Path) -> None:
    rehearse(parts_of(*SCENARIOS["truncate-not-persisted"].run_of("none", 1)), str(tmp_path), QUIET)
    (history,) = tmp_path.glob("*/2*/history.jsonl")
    came, waited = count_triggers(read_history(history))
    assert waited == 4 and 2 <= came <= 4
