"""Snapshots between members: a follower that fell behind gets the leader's, whatever interrupts the transfer."""

from __future__ import annotations

import asyncio
import hashlib
import random
import zlib
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.dledger import DLedgerCode, DLedgerError
from node.dledger.files import LedgerFiles
from node.dledger.messages import InstallSnapshotRequest, MalformedMessage
from node.dledger.snapshot import Snapshot, encode_snapshot

OPTIONS: dict[str, Any] = {
    "snapshot_threshold_entries": 40, "snapshot_removes_log": True, "max_pending_pushes": 10
}  # fmt: skip
"""Frequent snapshots, short logs, and few pushes in flight to a member that is cut off."""


def bodies(first: int, count: int) -> list[bytes]:
    return [b"key%d=%d" % (number % 7, number) + b"." * 120 for number in range(first, first + count)]


def others(group: Any, name: str) -> list[str]:
    return [other for other in group.names if other != name]


async def applied(group: Any, *names: str) -> None:
    """Wait until members have applied what any of them has committed."""
    await group.until(
        lambda: (
            len({group[name].tally.state for name in names}) == 1
            and len({group[name].store.committed_index for name in names}) == 1
            and group[names[0]].tally.next_index == group[names[0]].store.committed_index + 1
        )
    )


async def left_behind(group: Any, *, wiped: bool = False) -> tuple[str, str]:
    """A leader whose log begins after the end of the log of a follower that is down; both names."""
    await group.start()
    leader = await group.leader()
    behind = others(group, leader)[0]
    await group.append_all(leader, *bodies(0, 20))
    await applied(group, *group.names)
    group.kill(behind)
    for first in range(20, 200, 20):
        await group.append_all(leader, *bodies(first, 20))
    store = group[leader].store
    await group.until(lambda: store.ledger_begin_index > 30)
    if wiped:
        disk = group.hosts[behind].disk
        for path in disk.paths():
            if not path.endswith("member_state"):
                disk.unlink(path)
    return leader, behind


@pytest.mark.parametrize("wiped", [False, True])
def test_a_follower_that_fell_behind_installs_the_leaders_snapshot(simulate: Any, tallies: Any, wiped: bool) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        _, behind = await left_behind(group, wiped=wiped)
        await group.start(behind)
        await applied(group, *group.names)
        assert group[behind].snapshots.installed_total == 1
        assert group[behind].store.ledger_begin_index > 30
        group.kill(behind)
        await group.start(behind)
        await group.append_all(await group.leader(), *bodies(500, 30))
        await applied(group, *group.names)
        assert group[behind].snapshots.installed_total == 0 and truth.violations == []

    simulate(scenario, server=tallies.server(truth), **OPTIONS)


def test_a_new_or_wiped_member_gets_the_snapshot_and_the_group_from_it(simulate: Any, tallies: Any) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        for first in range(0, 200, 20):
            await group.append_all(leader, *bodies(first, 20))
        await group.until(lambda: group[leader].store.ledger_begin_index > 30)
        await group.start("n4")
        await group.run(leader, lambda: group[leader].add_member("n4", group.addresses["n4"]))
        await applied(group, "n1", "n2", "n3", "n4")
        assert group["n4"].snapshots.installed_total == 1
        for first in range(200, 400, 20):  # until the entry that added n4 is gone from the log
            await group.append_all(leader, *bodies(first, 20))
        await group.until(lambda: group[leader].store.ledger_begin_index > 230)
        away = others(group, leader)[0]
        group.kill(away)
        disk = group.hosts[away].disk
        for path in disk.paths():
            if not path.endswith("member_state"):
                disk.unlink(path)
        await group.start(away)
        await applied(group, "n1", "n2", "n3", "n4")
        assert list(group[away].member_state.member_ids) == ["n1", "n2", "n3", "n4"]
        group.kill(away)
        await group.start(away)
        assert list(group[away].member_state.member_ids) == ["n1", "n2", "n3", "n4"]
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), joining=1, members_may_change=True, **OPTIONS)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("lost", ["remove another", "remove itself", "add"])
def test_an_uncommitted_membership_change_is_undone_when_the_log_is_reset(
    simulate: Any, tallies: Any, lost: str, restarts: bool
) -> None:
    """A leader that is cut off appends a membership change. When it rejoins, the logs do not overlap any more, so no
    TRUNCATE removes the entry."""
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        rest = others(group, old)
        await group.append_all(old, *bodies(0, 20))
        await group.converged()
        await group.cut(" ".join(rest))
        member = {"remove another": rest[0], "remove itself": old, "add": "n9"}[lost]
        change = group[old].add_member(member, "10.0.0.9:1") if lost == "add" else group[old].remove_member(member)
        lost_change = group.on(old, lambda: asyncio.get_running_loop().create_task(change))
        await group.until(lambda: len(group[old].member_state.member_ids) != 3)
        new = await group.leader(*rest)
        if restarts:
            await asyncio.sleep(4)  # until a checkpoint holds the change
            group.kill(old)
        for first in range(20, 200, 20):
            await group.append_all(new, *bodies(first, 20))
        await group.until(lambda: group[new].store.ledger_begin_index > 40)
        await group.heal()
        if restarts:
            await group.start(old)
        await applied(group, *group.names)
        for _ in range(2):
            assert group[old].member_state.member_ids == ("n1", "n2", "n3")
            group.kill(old)
            await group.start(old)
        assert lost_change.cancelled() or not lost_change.done() or lost_change.exception() is not None
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), members_may_change=True, **OPTIONS)


def test_a_member_that_stops_during_a_log_reset_still_knows_the_group(
    simulate: Any, tallies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began alone and would lead alone; only the snapshot tells it that there are four members by now."""
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        for name in ("n2", "n3", "n4"):
            await group.start(name)
        for name in ("n2", "n3"):
            await group.run("n1", partial(group["n1"].add_member, name, group.addresses[name]))
        group.names = ("n1", "n2", "n3", "n4")
        await group.converged("n1", "n2", "n3")
        await asyncio.sleep(4)  # until a checkpoint holds the group of three
        await group.cut("n2 n3 n4")
        leader = await group.leader("n2", "n3")
        await group.run(leader, partial(group[leader].add_member, "n4", group.addresses["n4"]))
        for first in range(0, 200, 20):
            await group.append_all(leader, *bodies(first, 20))
        await group.until(lambda: group[leader].store.ledger_begin_index > 60)
        reset, is_empty = LedgerFiles.reset, asyncio.Event()

        async def reset_and_wait(self: LedgerFiles, *arguments: Any) -> None:
            await reset(self, *arguments)
            is_empty.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(LedgerFiles, "reset", reset_and_wait)
        await group.heal()
        await is_empty.wait()
        monkeypatch.undo()
        group.power_fail("n1")
        await group.cut("n2 n3 n4")
        for _ in range(2):
            await group.start("n1")
            assert group["n1"].member_state.member_ids == group.names
            assert group["n1"].store.ledger_end_index == -1
            await asyncio.sleep(5)
            assert not group["n1"].member_state.is_leader
            group.kill("n1")
        await group.start("n1")
        await group.heal()
        await applied(group, *group.names)
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), size=1, joining=3, members_may_change=True, **OPTIONS)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are sent in pieces of 64 bytes."""
    monkeypatch.setattr("node.dledger.snapshot_transfer.MAX_PIECE_BYTES", 64)


def incoming(group: Any, name: str) -> list[str]:
    return [path for path in group.hosts[name].disk.paths() if "/snapshot/incoming-" in path]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("end", ["kill", "power_fail"])
@pytest.mark.parametrize("which", ["leader", "behind"])
def test_an_interrupted_installation_completes_after_a_restart(
    simulate: Any, tallies: Any, end: str, which: str
) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        leader, behind = await left_behind(group)
        await group.start(behind)
        await group.until(lambda: bool(incoming(group, behind)))
        struck = leader if which == "leader" else behind
        getattr(group, end)(struck)
        await asyncio.sleep(0.01)
        await group.start(struck)
        await group.append_all(await group.leader(), *bodies(500, 30))
        await applied(group, *group.names)
        assert group[behind].snapshots.newest_index >= 0 and not incoming(group, behind)
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), **OPTIONS)


@pytest.mark.usefixtures("small_pieces")
def test_a_restarted_follower_resumes_the_transfer_where_it_stopped(simulate: Any, tallies: Any) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        leader, behind = await left_behind(group)
        asked: list[tuple[int, int]] = []
        install = group[leader].peers.install
        paused = asyncio.Event()
        resume = asyncio.Event()

        async def recorded(peer: str, request: InstallSnapshotRequest) -> Any:
            asked.append((request.offset, len(request.data)))
            if len(asked) == 4:
                paused.set()
                await resume.wait()
            return await install(peer, request)

        group[leader].peers.install = recorded
        await group.start(behind)
        await paused.wait()
        group.kill(behind)
        resume.set()
        await asyncio.sleep(1)
        had = len(group.hosts[behind].disk.inode(incoming(group, behind)[0]).cache)
        asked.clear()
        await group.start(behind)
        await applied(group, *group.names)
        sent = [offset for offset, size in asked if size]
        assert had > 0 and sent[-1] > had and min(offset for offset in sent if offset) >= had
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), **OPTIONS)


@pytest.mark.usefixtures("small_pieces")
def test_a_snapshot_damaged_during_its_transfer_is_discarded_and_sent_again(simulate: Any, tallies: Any) -> None:
    """The disk returns other bytes than were written: the whole snapshot is discarded and sent again."""
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        _, behind = await left_behind(group)
        await group.start(behind)
        await group.until(lambda: bool(incoming(group, behind)))
        path = incoming(group, behind)[0]
        await group.until(lambda: len(group.hosts[behind].disk.inode(path).cache) > 64)
        group.hosts[behind].disk.flip_bit(path, 30, 3)
        await applied(group, *group.names)
        assert "cannot be used: it is not what the leader has" in group.lines(behind)
        assert group[behind].snapshots.installed_total == 1 and truth.violations == []

    simulate(scenario, server=tallies.server(truth), **OPTIONS)


def test_a_follower_does_not_reset_its_log_without_the_snapshot(simulate: Any, tallies: Any) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        leader, behind = await left_behind(group)

        async def skip_sending(*_: Any) -> bool:
            return True

        group[leader].pusher.snapshot_sender.send = skip_sending
        await group.start(behind)
        end = group[behind].store.ledger_end_index
        await asyncio.sleep(5)
        assert group[behind].store.ledger_end_index == end and group[behind].tally.next_index <= end + 1
        assert "no snapshot here goes so far" in group.lines(behind)
        del group[leader].pusher.snapshot_sender.send
        await applied(group, *group.names)
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), **OPTIONS)


@pytest.mark.parametrize("seed", range(12))
def test_every_state_matches_the_log_under_random_faults(simulate: Any, tallies: Any, seed: int) -> None:
    """Members are killed, cut off, lose their power or their files, and lead in turn, while snapshots are taken, sent
    and loaded. Every state that any of them ever had must be the one that the log yields."""
    truth = tallies.Truth()
    chance = random.Random(seed)

    async def scenario(group: Any) -> None:
        await group.start()
        number, doubtful = 0, []
        for _ in range(12):
            leader = await group.leader()
            struck = chance.choice(group.names)
            kind = chance.choice(("kill", "power_fail", "cut", "wipe", "transfer", "nothing"))
            if kind == "wipe":
                await applied(group, *group.names)  # otherwise entries that it acknowledged might be lost
            if kind == "cut":
                await group.cut(" ".join(others(group, struck)))
            elif kind == "transfer":
                if struck != leader:
                    task = group.on(leader, lambda: asyncio.get_running_loop().create_task(
                        group[leader].transfer_leadership(struck)  # noqa: B023
                    ))  # fmt: skip
                    await asyncio.wait([task])
            elif kind != "nothing":
                getattr(group, "kill" if kind == "wipe" else kind)(struck)
                if kind == "wipe":
                    disk = group.hosts[struck].disk
                    for path in disk.paths():
                        if not path.endswith("member_state"):
                            disk.unlink(path)
            up = [name for name in group.names if name in group.members and (kind != "cut" or name != struck)]
            leader = await group.leader(*up)
            for _ in range(chance.randrange(1, 8)):
                try:
                    doubtful += [group.append(leader, body) for body in bodies(number, 20)]
                except DLedgerError:
                    break  # it does not lead any more
                number += 20
                await asyncio.sleep(chance.choice((0.001, 0.01, 0.1)))
            if kind == "cut":
                await group.heal()
            elif kind not in ("transfer", "nothing"):
                await group.start(struck)
            if kind == "wipe":
                await group.append_all(await group.leader(), b"wiped=1")
                await applied(group, *group.names)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.05)
        done, _ = await asyncio.wait(doubtful, timeout=5)  # appends at killed members never complete
        await group.append_all(await group.leader(), b"end=1")
        await applied(group, *group.names)
        assert truth.violations == []
        acked = [each.result().index for each in done if each.exception() is None]
        assert len(acked) > 100 and all(index in truth.after for index in acked) and not group.ended

    simulate(scenario, seed=seed, server=tallies.server(truth), **OPTIONS)


# Requests that no correct leader sends


NUMBERS = st.one_of(st.integers(-1, 5), st.integers(-1, (1 << 63) - 1))
REQUESTS = st.builds(
    InstallSnapshotRequest,
    group=st.just("g"),
    remote_id=st.just("n1"),
    local_id=st.sampled_from(("n2", "n3", "nobody")),
    term=NUMBERS,
    leader_id=st.sampled_from(("n1", "n2", "n3", "")),
    last_included_index=NUMBERS,
    last_included_term=NUMBERS,
    size_bytes=NUMBERS,
    digest=st.one_of(st.just("0" * 64), st.text(alphabet="0123456789abcdefg/.", max_size=70)),
    offset=NUMBERS,
    data_crc=NUMBERS,
    data=st.binary(max_size=64),
)


@given(REQUESTS)
def test_an_install_request_survives_the_round_trip(request: InstallSnapshotRequest) -> None:
    assert InstallSnapshotRequest.from_body(request.to_body()) == request


@given(st.binary(max_size=300))
def test_random_bytes_are_a_malformed_install_request(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        InstallSnapshotRequest.from_body(b"\1" + data)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUESTS, min_size=20, max_size=40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_random_install_requests_change_nothing(
    simulate: Any, tallies: Any, requests: list[InstallSnapshotRequest], crcs: list[bool]
) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *bodies(0, 10))
        await applied(group, *group.names)
        follower = others(group, leader)[0]
        member = group[follower]
        for request, has_crc in zip(requests, crcs, strict=False):
            request.leader_id, request.term = leader, member.member_state.term
            if has_crc:
                request.data_crc = zlib.crc32(request.data)
            code, offset = await group.run(follower, lambda request=request: member.snapshot_receiver.handle(request))
            assert code in (DLedgerCode.SUCCESS, DLedgerCode.UNEXPECTED_ARGUMENT) and offset <= request.size_bytes
        assert member.snapshots.newest_index == -1 and len(incoming(group, follower)) <= 1
        await group.append_all(await group.leader(), b"end=1")
        await applied(group, *group.names)
        assert truth.violations == []

    simulate(scenario, server=tallies.server(truth), snapshot_threshold_entries=0)


def piece(member: Any, data: bytes, offset: int, size: int, **changed: Any) -> InstallSnapshotRequest:
    state = member.member_state
    fields = {
        "group": "g", "remote_id": state.self_id, "local_id": state.leader_id, "term": state.term,
        "leader_id": state.leader_id, "last_included_index": 500, "last_included_term": 1, "size_bytes": len(data),
        "digest": hashlib.sha256(data).hexdigest(), "offset": offset, "data": data[offset : offset + size],
        "data_crc": zlib.crc32(data[offset : offset + size]),
    }  # fmt: skip
    return InstallSnapshotRequest(**(fields | changed))


def test_only_a_complete_newer_snapshot_of_the_current_leader_is_installed(simulate: Any, tallies: Any) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *bodies(0, 10))
        await applied(group, *group.names)
        follower, third = others(group, leader)
        member = group[follower]
        whole = encode_snapshot(Snapshot(index=500, term=1, files={"numbers": b"501 1", "values": b"{}"}))

        async def send(size: int = 1000, **changed: Any) -> tuple[DLedgerCode, int]:
            request = piece(member, whole, 0, size, **changed)
            response = await group.run(follower, lambda: member._handle_install_snapshot(request))
            return response.code, response.offset

        term = member.member_state.term
        assert (await send(term=term - 1))[0] is DLedgerCode.EXPIRED_TERM
        assert (await send(leader_id=third))[0] is DLedgerCode.INCONSISTENT_LEADER
        assert (await send(leader_id="stranger"))[0] is DLedgerCode.UNKNOWN_MEMBER
        assert (await send(last_included_term=term + 1))[0] is DLedgerCode.UNEXPECTED_ARGUMENT
        assert (await send(data_crc=5))[0] is DLedgerCode.UNEXPECTED_ARGUMENT
        assert await send(10) == (DLedgerCode.SUCCESS, 10)
        assert await send(20, digest="0" * 64) == (
            DLedgerCode.SUCCESS,
            20,
        )  # another snapshot: the first one is dropped
        assert await send(0) == (DLedgerCode.SUCCESS, 0)
        assert await send(digest="0" * 64) == (DLedgerCode.SUCCESS, 0)
        assert await send(last_included_index=499) == (DLedgerCode.SUCCESS, 0)
        assert member.snapshots.newest_index == -1
        assert await send() == (DLedgerCode.SUCCESS, len(whole))
        assert member.snapshots.newest_index == 500
        older = encode_snapshot(Snapshot(index=9, term=1, files={}))
        request = piece(member, older, 0, 1000, last_included_index=9)
        response = await group.run(follower, lambda: member._handle_install_snapshot(request))
        assert (response.code, response.offset) == (
            DLedgerCode.SUCCESS,
            len(older),
        )  # answered as complete, and ignored
        assert member.snapshots.newest_index == 500 and incoming(group, follower) == []

    simulate(scenario, server=tallies.server(truth), snapshot_threshold_entries=0)


def test_snapshots_continue_after_an_error_in_the_state_machine(simulate: Any, tallies: Any) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        server = group[leader]
        real, failures = server.tally.save, iter([RuntimeError("an error of its own")])

        def save() -> Any:
            for failure in failures:
                raise failure
            return real()

        server.tally.save = save
        began_s = group.loop.time()
        for first in range(0, 200, 20):
            await group.append_all(leader, *bodies(first, 20))
        assert "met an error of its own" in group.lines(leader) and server.snapshots.saved_total == 0
        await asyncio.sleep(began_s + 15 - group.loop.time())
        await group.append_all(leader, *bodies(200, 20))
        await group.until(lambda: server.snapshots.saved_total > 0)

    simulate(scenario, server=tallies.server(truth), snapshot_threshold_entries=40)
    assert not truth.violations
