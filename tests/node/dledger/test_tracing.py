"""What a member writes into its trace: everything that a model needs to judge it, and nothing at all if it is off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from node.dledger import DLedgerServer
from node.dledger.tracing import INCOMPLETE, trace_member
from node.mutants import election, replication

SMALL_LOGS: dict[str, Any] = {
    "snapshot_threshold_entries": 40, "snapshot_removes_log": True, "max_pending_pushes": 10
}  # fmt: skip


def server_of(*changes: Callable[[DLedgerServer], None]) -> type[DLedgerServer]:
    """Members to which these functions are applied before they start."""

    class ChangedServer(DLedgerServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for change in changes:
                change(self)

    return ChangedServer


def lines(group: Any, name: str, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in group.hosts[name].line_files[path]]


def kinds(group: Any, path: str) -> Counter[str]:
    return Counter(line["event"] for name in group.hosts for line in lines(group, name, path))


async def overwritten(group: Any) -> str:
    """A leader that is cut off gets entries that the others do not, and truncates them when it is back; its name."""
    await group.start()
    old = await group.leader()
    await group.append_all(old, b"a=1")
    others = [name for name in group.names if name != old]
    await group.cut(old, " ".join(others))
    for number in range(4):
        group.append(old, b"lost=%d" % number).add_done_callback(lambda future: future.exception())
    new = await group.leader(*others)
    await group.append_all(new, b"b=2")
    await group.heal()
    await group.converged()
    return str(old)


def test_a_correct_group_is_explained_through_elections_truncations_and_crashes(simulate: Any, tracing: Any) -> None:
    async def scenario(group: Any) -> None:
        old = await overwritten(group)
        group.kill(old)
        await group.start(old)
        group.power_fail(*group.names)
        await group.start()
        await group.append_all(await group.leader(), b"c=3")
        await group.converged()
        found = kinds(group, tracing.path)
        for kind in ("start", "vote", "stand", "granted", "lead", "follow", "candidate", "append", "truncate", "cut"):
            assert found[kind], kind
        for kind in ("sync", "ack", "acked", "commit", "answer"):
            assert found[kind], kind
        result = tracing.judge(group)
        assert result.valid is True, result.reason
        assert result.stats["explained"] == sum(found.values())

    simulate(scenario, server=server_of(tracing.traced))


def test_a_log_that_begins_again_and_snapshots_are_explained(simulate: Any, tallies: Any, tracing: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        behind = next(name for name in group.names if name != leader)
        await group.append_all(leader, b"a=1")
        group.kill(behind)
        for _ in range(10):
            await group.append_all(leader, *(b"key=%d" % number + b"." * 120 for number in range(20)))
        await group.until(lambda: group[leader].store.ledger_begin_index > 30)
        await group.start(behind)
        await group.until(lambda: group[behind].snapshots.installed_total == 1)
        await group.until(lambda: group[behind].store.committed_index == group[leader].store.committed_index)
        group.kill(behind)
        await group.start(behind)
        await group.append_all(leader, b"b=2")
        found = kinds(group, tracing.path)
        assert found["reset"] and found["snapshot"]
        result = tracing.judge(group)
        assert result.valid is True, result.reason

    simulate(scenario, server=tallies.server(tallies.Truth(), tracing.traced), **SMALL_LOGS)


def test_changes_of_the_group_name_its_members(simulate: Any, tracing: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        out = next(name for name in group.names if name != leader)
        index = await group.run(leader, lambda: group[leader].remove_member(out))
        rest = sorted(name for name in group.names if name != out)
        (change,) = [line for line in lines(group, leader, tracing.path) if "groups" in line]
        assert change["groups"] == {str(index): rest}
        group.kill(leader)
        await group.start(leader)
        start = [line for line in lines(group, leader, tracing.path) if line["event"] == "start"][-1]
        assert (start["group"], start["group_index"], start["may_change"]) == (rest, index, True)
        await group.append_all(await group.leader(), b"a=1")
        assert tracing.judge(group).valid is True

    simulate(scenario, server=server_of(tracing.traced), members_may_change=True)


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (election.vote_not_persisted, "without its vote of term"),
        (replication.ack_before_quorum, "tells a client that entry"),
        (replication.ack_before_fsync, "but has synced only up to"),
        (replication.quorum_off_by_one, "are known to have"),
    ],
)
def test_a_mutant_is_seen_through_the_same_trace(simulate: Any, tracing: Any, mutate: Any, said: str) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.append_all(await group.leader(), b"a=1")
        group.kill(*group.names)
        await group.start()
        result = tracing.judge(group)
        assert result.valid is False and said in result.reason

    simulate(scenario, server=server_of(mutate, tracing.traced))


def test_a_run_is_the_same_with_and_without_its_trace(simulate: Any, tracing: Any) -> None:
    def run(server: type[DLedgerServer]) -> Any:
        async def scenario(group: Any) -> Any:
            await overwritten(group)
            return group.loop.time(), group.roles, [group.content(name, "/data") for name in group.names]

        return simulate(scenario, server=server)

    assert run(server_of(tracing.traced)) == run(DLedgerServer)


def test_a_trace_ends_at_its_limit_and_says_so(simulate: Any, tracing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.dledger.tracing.MAX_TRACE_BYTES", 2_000)

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *[b"a=1"] * 40)
        found = lines(group, leader, tracing.path)
        assert found[-1]["event"] == "full" and sum(len(json.dumps(line)) for line in found) < 2_600
        result = tracing.judge(group)
        assert result.valid == "unknown" and "it has reached its limit" in result.reason

    simulate(scenario, server=server_of(tracing.traced))


def test_a_line_that_cannot_be_written_leaves_a_gap_and_a_complaint(simulate: Any, tracing: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"a=1")
        whole = files[leader].append
        files[leader].append = refuse
        await group.append_all(leader, b"b=2")
        files[leader].append = whole
        await group.append_all(leader, b"c=3")
        result = tracing.judge(group)
        assert result.valid == "unknown" and "missing" in result.reason
        assert group.lines(leader).count(f"node.dledger.trace {INCOMPLETE}: No space left on device") == 1

    def refuse(line: str) -> None:
        raise OSError(28, "No space left on device")

    def keep(member: DLedgerServer) -> None:
        assert member.runtime.open_lines is not None
        kept = files[member.config.self_id] = member.runtime.open_lines(tracing.path)
        trace_member(member, kept)

    files: dict[str, Any] = {}

    simulate(scenario, server=server_of(keep))
