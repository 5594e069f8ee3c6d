"""Damaged files of a member: every kind is repaired, locally or by the leader, or refused with a report.

Each case damages one file of a follower that is down while its group continues, and restarts the follower. Either it
refuses to start, names the file and changes no file; or it starts, never serves an entry other than the group's, and
ends with the leader's log, byte for byte. A member without its term and vote never takes part.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.dledger import LedgerCorrupt
from node.store.segments import SegmentError

DIRECTORY = "/data/dledger"
KINDS = ("data first", "data middle", "data last", "index first", "index last", "checkpoint", "member_state")
DAMAGES = ("truncated", "emptied", "zeroed", "flipped", "missing", "longer")
REFUSED = {
    *((f"data {which}", damage) for which in ("first", "middle", "last") for damage in DAMAGES),
    *(("member_state", damage) for damage in DAMAGES),
    *(("checkpoint", damage) for damage in DAMAGES),
} - {("data last", "longer"), ("checkpoint", "missing")}
"""Everything else is repaired: garbage after the last entry is cut off, an index is rebuilt from the entries, and
without a checkpoint the whole log is read."""


def path_of(disk: Any, kind: str) -> str:
    name, _, which = kind.partition(" ")
    if not which:
        return f"{DIRECTORY}/{name}"
    paths = sorted(path for path in disk.paths() if path.startswith(f"{DIRECTORY}/{name}/"))
    assert len(paths) >= 3
    return paths[{"first": 0, "middle": len(paths) // 2, "last": -1}[which]]


def damage_file(disk: Any, path: str, damage: str) -> None:
    content = bytes(disk.inode(path).cache)
    middle = len(content) // 2
    if damage == "missing":
        disk.unlink(path)
        return
    flipped = content[:middle] + bytes((content[middle] ^ 4,)) + content[middle + 1 :]
    changed = {
        "truncated": content[:middle], "emptied": b"", "zeroed": bytes(len(content)), "flipped": flipped,
        "longer": content + b"\x01garbage" * 9,
    }  # fmt: skip
    disk.put(path, changed[damage])


def files_of(disk: Any) -> dict[str, bytes]:
    return {path: bytes(disk.inode(path).cache) for path in disk.paths() if path.startswith(DIRECTORY)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_repaired_or_refused(simulate: Any, kind: str, damage: str) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        victim = next(name for name in group.names if name != leader)
        bodies = [b"%d " % number + bytes(number * 37 % 300) for number in range(80)]
        await group.append_all(leader, *bodies[:60])
        await group.converged()
        disk = group.hosts[victim].disk
        await group.until(lambda: disk.exists(f"{DIRECTORY}/checkpoint"))
        await asyncio.sleep(5)  # the index follows
        group.kill(victim)
        await group.append_all(leader, *bodies[60:])
        path = path_of(disk, kind)
        damage_file(disk, path, damage)
        before = files_of(disk)
        await group.start(victim)
        if (kind, damage) in REFUSED:
            error = group.ended[victim]
            assert isinstance(error, LedgerCorrupt | SegmentError) and path in str(error), error
            assert "\n" not in str(error)
            assert files_of(disk) == before, "a refused start must not change any file"
            assert [index async for index in append_more(group, leader, 5)], (
                "the rest of the group must keep committing"
            )
            return
        assert victim not in group.ended, group.ended
        truth = group.log(leader)
        store = group[victim].store
        for index in range(max(store.ledger_begin_index, 0), store.ledger_end_index + 1):
            entry = store.get(index)
            assert entry is not None and (entry.term, entry.body) == truth[index]
        await group.converged()
        assert [body for _, body in group.log(victim)] == [body for _, body in group.log(leader)]

    simulate(scenario)


async def append_more(group: Any, leader: str, count: int) -> Any:
    for index in await group.append_all(leader, *[b"more"] * count):
        yield index


def test_a_member_that_lost_its_vote_stays_down_and_elects_no_leader(simulate: Any) -> None:
    """Two of three members restart after a power failure, one of them without its vote: they elect no leader, rather
    than a second one of the same term. With the vote restored, they elect one."""

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"one", b"two")
        await group.converged()
        others = [name for name in group.names if name != leader]
        group.power_fail(*group.names)
        disk = group.hosts[others[0]].disk
        vote = bytes(disk.inode(f"{DIRECTORY}/member_state").cache)
        disk.unlink(f"{DIRECTORY}/member_state")
        await group.start(*others)
        assert "its vote is lost" in str(group.ended[others[0]])
        await asyncio.sleep(60)
        assert group.leaders() == []
        disk.put(f"{DIRECTORY}/member_state", vote)
        await group.start(others[0])
        elected = await group.leader()
        assert [body for _, body in group.log(elected) if body][:2] == [b"one", b"two"]

    simulate(scenario)
