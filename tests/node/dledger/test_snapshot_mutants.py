"""Mutants of snapshots: each script must fail with the mutant and pass without it."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from typing import Any

import pytest

from node.dledger.messages import InstallSnapshotRequest
from node.dledger.snapshot import Snapshot, encode_snapshot
from node.mutants.snapshots import (
    install_goes_back,
    log_removed_before_snapshot,
    snapshot_term_ignored,
    snapshot_unverified,
)

OPTIONS: dict[str, Any] = {"snapshot_threshold_entries": 40, "snapshot_removes_log": True, "max_pending_pushes": 10}


def bodies(first: int, count: int) -> list[bytes]:
    return [b"key%d=%d" % (number % 7, number) + b"." * 120 for number in range(first, first + count)]


async def applied(group: Any, *names: str) -> None:
    await group.until(
        lambda: all(group[name].tally.next_index == group[names[0]].store.committed_index + 1 for name in names)
    )


def others(group: Any, name: str) -> list[str]:
    return [other for other in group.names if other != name]


async def start_single_member(group: Any) -> None:
    """A group of one that has applied thirty entries."""
    await group.start()
    await group.leader()
    await group.append_all("n1", *bodies(0, 30))
    await applied(group, "n1")


async def restart(group: Any) -> None:
    await group.start("n1")
    await group.append_all(await group.leader(), *bodies(100, 5))
    await applied(group, "n1")


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_damaged_snapshot_is_not_loaded(simulate: Any, tallies: Any, is_mutated: bool) -> None:
    """One digit of a value is changed in the newest snapshot of a single member, which then restarts."""
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await start_single_member(group)
        await group.run("n1", group["n1"].snapshots.save)
        files = group["n1"].snapshots.files
        path = f"{files.directory}/{files.names()[-1]}"
        group.kill("n1")
        disk = group.hosts["n1"].disk
        disk.flip_bit(path, bytes(disk.inode(path).cache).rindex(b"29") + 1, 0)
        await restart(group)

    server = tallies.server(truth, snapshot_unverified if is_mutated else None)
    simulate(scenario, server=server, size=1, snapshot_threshold_entries=0)
    assert bool(truth.violations) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_power_cut_during_a_save_does_not_prevent_the_next_start(
    simulate: Any, tallies: Any, is_mutated: bool
) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> int:
        await group.start()
        await group.leader()
        gone = 0
        for step in range(25):
            name = group.names[0]
            leader = await group.leader()
            await group.append_all(leader, *bodies(40 * step, 40))
            await applied(group, *group.names)
            group.on(name, lambda: asyncio.get_running_loop().create_task(group["n1"].snapshots.save()))
            await asyncio.sleep(0.0002 * (step + 1))
            group.power_fail(name)
            await group.start(name)
            if name in group.ended:
                assert "no other snapshot reaches" in str(group.ended[name])
                return 1
        return gone

    server = tallies.server(truth, log_removed_before_snapshot if is_mutated else None)
    lost = simulate(scenario, server=server, snapshot_threshold_entries=0, snapshot_removes_log=True)
    assert bool(lost) is is_mutated and truth.violations == []


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_snapshot_whose_term_differs_from_the_log_is_not_loaded(
    simulate: Any, tallies: Any, is_mutated: bool
) -> None:
    """A member finds a snapshot whose last entry has another term in its log: from another group, say."""
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await start_single_member(group)
        files, term = group["n1"].snapshots.files, group["n1"].member_state.term
        foreign = Snapshot(index=20, term=term + 7, files={"numbers": b"21 7", "values": b"{}"})
        await group.run("n1", lambda: files.save(foreign, encode_snapshot(foreign)))
        group.kill("n1")
        await restart(group)

    server = tallies.server(truth, snapshot_term_ignored if is_mutated else None)
    simulate(scenario, server=server, size=1, snapshot_threshold_entries=0)
    assert bool(truth.violations) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_delayed_installation_does_not_move_the_state_back(simulate: Any, tallies: Any, is_mutated: bool) -> None:
    """A leader's snapshot reaches a follower that has already applied later entries."""
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        follower = others(group, leader)[0]
        await group.append_all(leader, *bodies(0, 30))
        await applied(group, *group.names)
        await group.run(leader, group[leader].snapshots.save)
        files = group[leader].snapshots.files
        snapshot, data = files.read(files.names()[-1])
        await group.append_all(leader, *bodies(30, 30))
        await applied(group, *group.names)
        state = group[follower].member_state
        request = InstallSnapshotRequest(
            group="g", remote_id=follower, local_id=leader, term=state.term, leader_id=leader,
            last_included_index=snapshot.index, last_included_term=snapshot.term, size_bytes=len(data),
            digest=hashlib.sha256(data).hexdigest(), offset=0, data_crc=zlib.crc32(data), data=data,
        )  # fmt: skip
        answer = await group.run(leader, lambda: group[leader].peers.install(follower, request))
        assert answer.offset == len(data)
        await group.append_all(leader, *bodies(60, 5))
        await group.until(lambda: group[follower].tally.next_index > 60)

    server = tallies.server(truth, install_goes_back if is_mutated else None)
    simulate(scenario, server=server, snapshot_threshold_entries=0)
    assert bool(truth.violations) is is_mutated
