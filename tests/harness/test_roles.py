"""Who led when, in a run of a system whose logs are not parsed: polled, recorded, and shown in the replay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import harness.runner
from harness.report.replay import collect_replay, replay_page
from harness.roles import MAX_CHANGES, RoleLog, read_roles
from harness.systems.base import CheckOutcome

LEADS, FOLLOWS = {"leads": "true", "term": "1"}, {"leads": "false", "term": "1"}


def test_only_changes_of_roles_are_recorded() -> None:
    roles = RoleLog()
    for time_ns, host, status in (
        (1, "n1", LEADS), (1, "n2", FOLLOWS), (2, "n1", LEADS), (2, "n2", None), (3, "n1", None), (3, "n2", None),
        (4, "n2", {**LEADS, "term": "2"}), (5, "n1", LEADS), (6, "n1", {"leads": "true", "term": "of the plug-in"}),
    ):  # fmt: skip
        roles.note(time_ns, host, status)
    assert roles.changes == [
        (1, "n1", "leader", 1), (1, "n2", "follower", 1), (2, "n2", "silent", 0), (3, "n1", "silent", 0),
        (4, "n2", "leader", 2), (5, "n1", "leader", 1), (6, "n1", "leader", 0),
    ]  # fmt: skip
    assert roles.leading() == ["n2", "n1"]


def test_recorded_changes_of_roles_are_bounded() -> None:
    roles = RoleLog()
    for number in range(MAX_CHANGES + 10):
        roles.note(number, "n1", {"leads": "true", "term": str(number)})
    assert len(roles.changes) == MAX_CHANGES


def test_damaged_results_have_no_roles() -> None:
    for system in (None, 7, {"roles": 7}, {"roles": [7, [1, "n1", "leader"], [1, "n1", "leader", "one"]]}):
        assert read_roles({"system": system}) == []


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_system_that_reports_its_leader_is_polled_during_the_load(
    memory_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_watched: bool
) -> None:
    """With and without a live panel; the replay shows the roles."""
    monkeypatch.setattr(harness.runner, "LEADER_INTERVAL_S", 0.05)
    asked: list[str] = []

    def telling(system: Any) -> None:
        async def status(host: str, *, timeout_s: float) -> Mapping[str, str] | None:
            asked.append(host)
            leader = "n1" if len(asked) <= 10 else "n2"
            if host == "n4":
                raise OSError("it is down")
            return None if host == "n3" else {"leads": str(host == leader).lower(), "term": leader[1:]}

        system.cannot, system.tells_leader, system.status = {}, True, status

    run_dir, results, _ = memory_run(system=telling, terminal=is_watched)
    changes = [change[1:] for change in results["system"]["roles"]]
    assert [change for change in changes if change[1] == "leader"] == [["n1", "leader", 1], ["n2", "leader", 2]]
    assert ["n3", "silent", 0] in changes and ["n4", "silent", 0] in changes
    replay = collect_replay(run_dir)
    assert [(host, role, term) for _, host, role, term in replay.roles] == [tuple(change) for change in changes]
    assert all(0 <= at_us <= 60_000_000 for at_us, *_ in replay.roles)
    assert "roles are those that the replicas reported when polled once a second" in replay.notes
    assert '"leader"' in replay_page(replay)


def test_a_leader_elected_after_the_load_is_recorded_too(memory_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.runner, "LEADER_INTERVAL_S", 0.05)
    leader = "n1"

    def electing(system: Any) -> None:
        async def status(host: str, *, timeout_s: float) -> Mapping[str, str] | None:
            return {"leads": str(host == leader).lower()}

        async def recover(*, timeout_s: float) -> CheckOutcome:
            nonlocal leader
            leader = "n2"
            await asyncio.sleep(0.5)
            return CheckOutcome(True, "it is back")

        system.cannot, system.tells_leader, system.status, system.recover = {}, True, status, recover

    _, results, _ = memory_run(system=electing)
    assert results["valid"] is True, results["reason"]
    assert [change[1:] for change in results["system"]["roles"]][-2:] == [["n1", "follower", 0], ["n2", "leader", 0]]


def test_an_error_while_tracking_the_leader_is_trouble(memory_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(system: Any) -> None:
        def note(self: RoleLog, *about: Any) -> None:
            raise ValueError("no room")

        monkeypatch.setattr(RoleLog, "note", note)
        system.cannot, system.tells_leader = {}, True

    _, results, _ = memory_run(system=broken)
    assert results["valid"] == "unknown"
    assert "tracking the leader: ValueError: no room" in results["trouble"]


def test_a_system_that_does_not_report_its_leader_is_not_polled(memory_run: Any) -> None:
    def silent(system: Any) -> None:
        async def status(host: str, *, timeout_s: float) -> Mapping[str, str] | None:
            raise AssertionError("it was asked")

        system.cannot, system.tells_leader, system.status = {}, False, status

    run_dir, results, _ = memory_run(system=silent)
    assert "roles" not in results["system"]
    assert any(note.startswith("no roles") for note in collect_replay(run_dir).notes)
