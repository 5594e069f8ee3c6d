"""Triggers that are read from the logs of brokers."""

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
def test_log_lines_are_recognised_as_triggers(line: str, occurrence: tuple[str, str] | None) -> None:
    assert occurrence_of("n2", line.rstrip()) == occurrence


def test_a_broker_logs_every_kind_of_trigger_that_is_read_from_logs(tmp_path: Path) -> None:
    """The node decides the format of these lines; this test keeps both sides in agreement."""
    rehearse(parts_of(*SCENARIOS["truncate-committed"].run_of("none", 1)), str(tmp_path), QUIET)
    seen = set()
    for path in tmp_path.glob("*/2*/nodes/n*/broker.log"):
        seen |= {found for line in path.read_text().splitlines() if (found := occurrence_of(path.parent.name, line))}
    assert {kind for kind, _ in seen} == LOGGED_KINDS
    assert {host for _, host in seen} <= {"n1", "n2", "n3"}
    assert set(KINDS) > LOGGED_KINDS


def test_waiting_for_a_trigger_reads_new_and_complete_lines_of_the_log(tmp_path: Path) -> None:
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
            assert await wait("elected", 0.05) == "None", "lines from before do not count"
            assert await wait("storing") == "None", "a kind that is not logged is not waited for"
            waiting = asyncio.create_task(wait("elected"))
            await asyncio.sleep(0.01)
            with log.open("a") as file:
                file.write(MATCHED + ELECTED[:-20])
                file.flush()
                await asyncio.sleep(0.02)
                assert not waiting.done(), "half a line does not count"
                file.write(ELECTED[-20:])
            assert await waiting == "elected@n2"
            assert await wait("matched@n3+5") == "matched@n3", "it occurred shortly before"
            assert await wait("matched@n2", 0.01) == "None"
            (tmp_path / "not-yet.log").write_text(ELECTED)
            assert await wait("elected@n3") == "elected@n3"

    asyncio.run(main())


def test_triggers_that_a_cluster_cannot_observe_are_reported() -> None:
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
