"""Membership changes: which members count when, and that no acknowledged entry is lost meanwhile."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from node.dledger import DLedgerCode, DLedgerError, ReadMode
from node.dledger.entry import BadEntry, encode_entry
from node.dledger.membership import Membership, decode_members, encode_members


async def add(group: Any, leader: str, member: str) -> DLedgerCode | None:
    """Have `leader` add `member`; returns the code if that is refused."""
    return await change(group, leader, lambda: group[leader].add_member(member, group.addresses[member]))


async def remove(group: Any, leader: str, member: str) -> DLedgerCode | None:
    return await change(group, leader, lambda: group[leader].remove_member(member))


async def change(group: Any, leader: str, call: Any) -> DLedgerCode | None:
    try:
        await group.run(leader, call)
    except DLedgerError as error:
        return error.code
    return None


def members_of(group: Any, name: str) -> list[str]:
    return list(group[name].member_state.member_ids)


def test_a_new_member_gets_the_whole_log_and_counts_towards_the_quorum(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *[b"%d" % number for number in range(50)])
        await group.start("n4")
        await asyncio.sleep(5)
        assert group["n4"].store.ledger_end_index == -1 and not group["n4"].member_state.is_leader
        term = group[leader].member_state.term
        assert await add(group, leader, "n4") is None
        everybody = ["n1", "n2", "n3", "n4"]
        await group.converged(*everybody)
        assert all(members_of(group, name) == everybody for name in everybody)
        assert group.leaders() == [leader] and group[leader].member_state.term == term  # no election
        others = [name for name in group.names if name != leader]
        group.kill(others[0])
        await group.append_all(leader, b"three of four")
        group.kill(others[1])
        doubtful = group.append(leader, b"two of four")
        with pytest.raises(DLedgerError):
            await doubtful

    simulate(scenario, members_may_change=True, joining=1)


def test_a_leader_logs_which_address_it_dials_if_a_member_rejoins_at_another(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        member = next(name for name in group.names if name != leader)
        assert await remove(group, leader, member) is None
        line = f"{leader} dials {member} at {group.addresses[member]}, as its configuration says, not at 10.9.9.9:1"
        assert await change(group, leader, lambda: group[leader].add_member(member, "10.9.9.9:1")) is None
        assert line in group.lines(leader)

    simulate(scenario, members_may_change=True)


def test_a_member_is_added_while_another_is_down(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        down, left = (name for name in group.names if name != leader)
        group.kill(down)
        await group.start("n4")
        await asyncio.sleep(5)
        term = group[leader].member_state.term
        assert await add(group, leader, "n4") is None
        await group.append_all(leader, b"three of four")
        await group.converged(leader, left, "n4")
        assert group.leaders() == [leader] and group[leader].member_state.term == term

    simulate(scenario, members_may_change=True, joining=1)


def test_a_group_grows_from_one_member_to_five(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"alone")
        for number in range(2, 6):
            await group.start(f"n{number}")
            assert await add(group, leader, f"n{number}") is None
            await group.append_all(leader, b"%d" % number)
        await group.converged("n1", "n2", "n3", "n4", "n5")
        group.kill("n1", "n2")
        leader = await group.leader("n3", "n4", "n5")
        await group.append_all(leader, b"without the first two")

    simulate(scenario, members_may_change=True, size=1, joining=4)


def test_a_removed_member_neither_counts_nor_disrupts_the_group(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        gone, left = (name for name in group.names if name != leader)
        assert await remove(group, leader, gone) is None
        term = group[leader].member_state.term
        await asyncio.sleep(20)
        assert group.leaders() == [leader] and group[leader].member_state.term == term
        await group.append_all(leader, b"without it")
        assert group[gone].store.ledger_end_index < group[leader].store.ledger_end_index
        group.kill(left)  # the group has two members now and needs both
        with pytest.raises(DLedgerError):
            await group.append(leader, b"alone")

    simulate(scenario, members_may_change=True)


def test_the_only_member_left_respects_the_removed_leaders_lease_after_a_restart(simulate: Any) -> None:
    """It alone is a quorum, but the old leader does not know that yet and serves lease reads."""

    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        (left,) = (name for name in group.names if name != old)
        await group.append_all(old, b"before")
        await group.converged()
        await group.network.cut("test", {old: frozenset((left,))})  # what `left` answers does not arrive
        removed = asyncio.ensure_future(remove(group, old, old))
        store = group[left].store
        await group.until(lambda: members_of(group, left) == [left] and store.durable_index == store.ledger_end_index)
        group.kill(left)
        await group.start(left)
        (acknowledged,) = await group.append_all(await group.leader(left), b"behind")
        with pytest.raises(DLedgerError):
            seen = await group.barrier(old, ReadMode.LEASE)
            assert seen >= acknowledged, "a lease read misses an acknowledged entry"
        removed.cancel()

    simulate(scenario, size=2, members_may_change=True)


def test_a_leader_may_remove_itself(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        await group.append_all(old, b"before")
        assert await remove(group, old, old) is None
        rest = [name for name in group.names if name != old]
        new = await group.leader(*rest)
        assert not group[old].member_state.is_leader
        await group.append_all(new, b"after")
        await asyncio.sleep(20)
        assert group.leaders() == [new]
        with pytest.raises(DLedgerError) as caught:
            group.append(old, b"refused")
        assert caught.value.code is DLedgerCode.NOT_LEADER

    simulate(scenario, members_may_change=True)


@pytest.mark.parametrize(("size", "down"), [(2, 0), (4, 1)])
def test_a_removed_leader_that_restarts_replicates_its_removal_to_the_others(
    simulate: Any, size: int, down: int
) -> None:
    """Of two, or of four of which one is down, the others are no majority of the group that they know. The removed
    leader has the longest log, and does not vote for them."""

    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        await group.append_all(old, b"before")
        await group.converged(*group.names)
        rest = [name for name in group.names if name != old]
        await group.cut(old)
        removal = asyncio.create_task(remove(group, old, old))
        store = group[old].store
        await group.until(lambda: store.committed_index < group[old].member_state.members.index <= store.durable_index)
        group.power_fail(old)  # what it has sent is lost as well
        group.kill(*rest[:down])
        removal.cancel()
        await group.heal()
        await group.start(old)
        assert members_of(group, old) == rest
        present = rest[down:]
        new = await group.leader(*present)
        await group.append_all(new, b"after")
        assert members_of(group, new) == rest
        await asyncio.sleep(20)
        assert group.leaders() == [new]

    simulate(scenario, size=size, members_may_change=True)


def test_every_member_can_be_replaced_one_by_one(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.append_all(await group.leader(), b"first")
        present = ["n1", "n2", "n3"]
        for old, new in (("n1", "n4"), ("n2", "n5"), ("n3", "n6")):
            await group.start(new)
            assert await add(group, await group.leader(*present), new) is None
            present.append(new)
            await group.converged(*present)
            assert await remove(group, await group.leader(*present), old) is None
            present.remove(old)
            await group.append_all(await group.leader(*present), b"without " + old.encode())
            group.kill(old)
        leader = await group.leader(*present)
        await group.converged(*present)
        bodies = [body for _, body in group.log(leader)]
        assert [body for body in bodies if body[:1] in b"fw" and body] == [
            b"first", b"without n1", b"without n2", b"without n3",
        ]  # fmt: skip
        group.power_fail(*present)
        await group.start(*present)
        leader = await group.leader()
        assert members_of(group, leader) == present
        await group.append_all(leader, b"after a restart of all")

    simulate(scenario, members_may_change=True, joining=3)


@pytest.mark.parametrize("how", ["kill", "power_fail"])
def test_membership_survives_a_restart_of_all_members(simulate: Any, how: str) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.start("n4")
        leader = await group.leader()
        assert await add(group, leader, "n4") is None
        everybody = ["n1", "n2", "n3", "n4"]
        await group.append_all(leader, *[b"x" * 500] * 40)  # beyond what a file holds
        await group.converged(*everybody)
        await asyncio.sleep(4)  # a checkpoint
        getattr(group, how)(*everybody)
        await group.start(*everybody)
        leader = await group.leader()
        assert all(members_of(group, name) == everybody for name in everybody)
        group.kill(*[name for name in everybody if name != leader][:2])
        await asyncio.sleep(3)
        assert group.leaders() == []  # two of four are no quorum, though they would be of three

    simulate(scenario, members_may_change=True, joining=1)


def test_a_truncated_membership_change_is_undone(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        await group.append_all(old, b"before")
        await group.converged()
        rest = [name for name in group.names if name != old]
        await group.cut(" ".join(rest))
        lost = asyncio.ensure_future(remove(group, old, rest[0]))
        await asyncio.sleep(0.05)
        assert members_of(group, old) == sorted([old, rest[1]])
        new = await group.leader(*rest)
        await group.append_all(new, b"after")
        await group.heal()
        await group.converged()
        assert await lost in (DLedgerCode.TERM_CHANGED, DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT)
        assert members_of(group, old) == ["n1", "n2", "n3"]

    simulate(scenario, members_may_change=True)


def test_the_previous_membership_is_kept_while_a_checkpoint_may_need_it(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.start("n4")
        leader = await group.leader()
        assert await add(group, leader, "n4") is None
        await group.append_all(leader, b"between")
        store, members = group[leader].store, group[leader].member_state.members
        await group.until(lambda: store.durable_index == store.committed_index)
        group.hosts[leader].disk.stall()
        gone = next(name for name in group.names if name != leader)
        assert await remove(group, leader, gone) is None
        assert store.durable_index < members.index <= store.committed_index
        ((_, peers),) = members.snapshot(store.durable_index)
        assert sorted(peers) == ["n1", "n2", "n3", "n4"]

    simulate(scenario, members_may_change=True, joining=1)


def test_the_previous_membership_is_kept_while_a_snapshot_may_need_it(simulate: Any, tallies: Any) -> None:
    """Fewer entries may be applied than are committed; after a start, all are applied again."""

    async def scenario(group: Any) -> None:
        await group.start()
        await group.start("n4", "n5")
        leader = await group.leader()
        assert await add(group, leader, "n4") is None
        members = group[leader].member_state.members
        first = members.index
        assert await add(group, leader, "n5") is None
        await group.append_all(leader, b"key=value")
        assert members.at(members.index - 1) == (
            first,
            {name: group.addresses[name] for name in ("n1", "n2", "n3", "n4")},
        )
        assert await group.run(leader, group[leader].snapshots.save)
        await group.append_all(leader, b"key=value")
        assert members.at(members.index - 1) == (-1, {})

    simulate(scenario, members_may_change=True, joining=2, server=tallies.server(tallies.Truth()))


def test_changes_are_refused_while_one_is_pending_or_before_the_terms_own_commit(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        others = [name for name in group.names if name != leader]
        assert await add(group, others[0], "n4") is DLedgerCode.NOT_LEADER
        assert await add(group, leader, others[0]) is DLedgerCode.UNEXPECTED_ARGUMENT
        assert await remove(group, leader, "n4") is DLedgerCode.UNEXPECTED_ARGUMENT
        group.kill(*others)
        first = asyncio.ensure_future(add(group, leader, "n4"))
        await asyncio.sleep(0.05)
        assert await remove(group, leader, others[0]) is DLedgerCode.INCONSISTENT_STATE
        await group.start(*others)
        await first
        leader = await group.leader()
        with pytest.raises(DLedgerError) as caught:
            group[leader].members.check_may_change(99)
        assert caught.value.code is DLedgerCode.INCONSISTENT_STATE

    simulate(scenario, members_may_change=True, joining=1)


def test_the_last_member_cannot_be_removed(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        assert await remove(group, await group.leader(), "n1") is DLedgerCode.UNEXPECTED_ARGUMENT

    simulate(scenario, members_may_change=True, size=1)


def test_a_fixed_group_refuses_removals_and_joining_members(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        assert await remove(group, await group.leader(), "n1") is DLedgerCode.UNEXPECTED_ARGUMENT

    simulate(scenario)
    with pytest.raises(ValueError, match="joins is for groups"):
        simulate(scenario, joining=1)


@pytest.mark.parametrize("seed", range(12))
def test_no_acknowledged_entry_is_lost_while_members_are_added_and_removed(simulate: Any, seed: int) -> None:
    async def scenario(group: Any) -> None:
        draw = random.Random(seed)
        everybody = [f"n{number}" for number in range(1, 6)]
        await group.start()
        await group.start("n4", "n5")
        acked: list[bytes] = []
        changes = 0
        is_over = False

        async def produce() -> None:
            number = 0
            while not is_over:
                body = b"m%d" % number
                number += 1
                for name in group.leaders():
                    try:
                        await asyncio.wait_for(group.append(name, body), 3)  # its process may be killed meanwhile
                        acked.append(body)
                    except (DLedgerError, KeyError, TimeoutError):
                        pass
                await asyncio.sleep(0.01)

        producer = asyncio.get_running_loop().create_task(produce())
        down: list[str] = []
        for _ in range(12):
            await asyncio.sleep(draw.uniform(0.05, 0.4))
            act = draw.random()
            leaders = group.leaders()
            if act < 0.5 and leaders:
                leader = draw.choice(leaders)
                member = draw.choice(everybody)
                present = members_of(group, leader)
                wanted = remove if member in present else add
                if wanted is add or len(present) > 2:
                    try:
                        changes += await asyncio.wait_for(wanted(group, leader, member), 10) is None
                    except TimeoutError:
                        pass  # its process was killed meanwhile
            elif act < 0.65 and not down:
                down = [draw.choice(everybody)]
                draw.choice((group.kill, group.power_fail))(*down)
            elif act < 0.8 and down:
                await group.start(*down)
                down = []
            elif act < 0.9:
                side = draw.sample(everybody, draw.choice((1, 2)))
                group.names = tuple(everybody)
                await group.cut(" ".join(side), " ".join(name for name in everybody if name not in side))
            else:
                await group.heal()
        await group.heal()
        if down:
            await group.start(*down)
        appended = len(acked)
        await group.until(lambda: len(acked) > appended + 5)
        is_over = True
        await producer
        leader = await group.leader()
        present = members_of(group, leader)
        await group.converged(*present)
        bodies = [body for _, body in group.log(leader)]
        assert set(acked) <= set(bodies)
        assert all(members_of(group, name) == present for name in present)
        assert changes >= 1 and len(acked) > 50
        terms: dict[int, set[str]] = {}
        for _, name, term, role in group.roles:
            if role == "LEADER":
                terms.setdefault(term, set()).add(name)
        assert all(len(names) == 1 for names in terms.values())

    simulate(scenario, members_may_change=True, size=3, joining=2, seed=seed, data_segment_size_bytes=16384)


def entry_of(peers: Any, index: int = 0, magic: int = 3) -> Any:
    body = encode_members(peers) if isinstance(peers, dict) else peers
    return encode_entry(magic=magic, index=index, term=1, pos=0, previous_chain_crc=0, body=body)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"peers": {}}', b'{"peers": {"n1": 7}}', b'{"peers": ["n1"]}', b"\xff",
     encode_members({f"n{number}": "a:1" for number in range(16)})],
)  # fmt: skip
def test_an_entry_without_a_valid_membership_is_refused(content: bytes) -> None:
    with pytest.raises(BadEntry, match="does not say who belongs"):
        decode_members(entry_of(content))
    with pytest.raises(BadEntry, match="does not say who belongs"):
        decode_members(entry_of({"n1": "a:1"}, magic=1))


def test_membership_history_follows_put_cut_and_restore() -> None:
    heard: list[tuple[str, ...]] = []
    members = Membership("n1", {"n1": "a:1", "n2": "b:1", "n3": "c:1"})
    members.add_listener(lambda: heard.append(members.ids))
    members.put(entry_of({"n1": "a:1", "n2": "b:1", "n3": "c:1", "n4": "d:1"}, 5))
    members.put(entry_of({"n2": "b:1", "n3": "c:1", "n4": "d:1"}, 9))
    assert (members.index, members.quorum_size, members.includes_self, members.others_needed) == (9, 2, False, 2)
    assert members.knows("n1") and members.address("n4") == "d:1" and not members.knows("n9")
    assert members.snapshot(8) == ((5, {"n1": "a:1", "n2": "b:1", "n3": "c:1", "n4": "d:1"}),)
    members.cut(9)
    assert (members.index, members.quorum_size, members.others_needed) == (5, 3, 2)
    members.cut(0)
    assert members.index == -1 and members.ids == ("n1", "n2", "n3")
    assert heard == [("n1", "n2", "n3", "n4"), ("n2", "n3", "n4"), ("n1", "n2", "n3", "n4"), ("n1", "n2", "n3")]
    members.put(entry_of({"n1": "a:1"}, 3))
    members.put(entry_of({"n1": "a:1", "n5": "e:1"}, 7))
    members.forget_before(6)
    members.cut(7)
    assert members.ids == ("n1",)
    again = Membership("n1", {"n1": "a:1", "n2": "b:1"}, joins=True)
    assert again.ids == ("n2",) and not again.includes_self and again.address("n1") == "a:1"
    again.restore([(7, {"n1": "a:1", "n2": "b:1"}), (3, {"n2": "b:1"})], 7)
    assert again.ids == ("n1", "n2")
    again.cut(5)
    assert again.ids == ("n2",)


def test_only_committed_membership_survives_the_loss_of_the_log() -> None:
    heard: list[tuple[str, ...]] = []
    members = Membership("n1", {"n1": "a:1"})
    members.put(entry_of({"n1": "a:1", "n2": "b:1"}, 3))
    members.put(entry_of({"n2": "b:1"}, 7))
    members.add_listener(lambda: heard.append(members.ids))
    members.log_is_gone(6)
    assert heard == [("n1", "n2")] and members.snapshot(-1) == ((3, {"n1": "a:1", "n2": "b:1"}),)
    members.cut(0)
    members.put(entry_of({"n1": "a:1"}, 2))  # from the new log, which is still shorter
    assert members.ids == ("n1", "n2")
    members.adopt(9, {"n1": "a:1", "n3": "c:1"})
    members.put(entry_of({"n1": "a:1"}, 8))
    members.cut(0)
    assert (members.index, members.ids) == (9, ("n1", "n3"))
    members.adopt(4, {"n9": "i:1"})  # an older snapshot is ignored
    members.put(entry_of({"n1": "a:1"}, 12))
    again = Membership("n1", {"n1": "a:1"})
    again.restore(members.snapshot(5), 5)  # a checkpoint of a log that ends there
    again.cut(0)
    assert (again.index, again.ids) == (9, ("n1", "n3")) and members.ids == ("n1",)
    only = Membership("n1", {"n1": "a:1", "n2": "b:1"})
    only.put(entry_of({"n1": "a:1"}, 7))
    only.add_listener(lambda: heard.append(only.ids))
    only.log_is_gone(-1)
    assert heard[-1] == only.ids == ("n1", "n2") and only.snapshot(-1) == ()
