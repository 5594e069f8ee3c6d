"""State machines: every committed entry is applied once, in order, after a snapshot if the log begins later."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.dledger import LedgerCorrupt
from node.dledger.snapshot import Snapshot, encode_snapshot
from node.dledger.snapshot_manager import SnapshotManager
from node.dledger.state_machine import StateMachineCaller


class Member:
    """A store with a tally on one host, assembled as in a server, without a group."""

    def __init__(self, bench: Any, tallies: Any, truth: Any) -> None:
        self.bench = bench
        self.tally = tallies.Tally(truth)

    async def open(self) -> Member:
        self.store = await self.bench.open()
        bench, store = self.bench, self.store
        self.snapshots = SnapshotManager(bench.config, bench.runtime.disk, store, store.members)
        self.caller = StateMachineCaller(self.tally, store, self.snapshots)
        self.snapshots.attach(self.caller)
        bench.on("n1", self.caller.start)
        await bench.run("n1", self.snapshots.open)
        return self

    async def put(self, *bodies: bytes, term: int = 1) -> None:
        """Append, commit and apply."""
        self.bench.append(self.store, *bodies, term=term)
        await self.bench.flushed(self.store)
        self.commit(self.store.ledger_end_index)
        await self.applied()

    def commit(self, index: int) -> None:
        self.bench.on("n1", lambda: self.store.update_committed_index(index))

    async def applied(self) -> None:
        await self.bench.until(lambda: self.caller.applied_index >= self.store.committed_index)

    async def save(self) -> bool:
        return bool(await self.bench.run("n1", self.snapshots.save))


BODIES = [b"key%d=%d" % (number % 7, number) + b"." * 150 for number in range(100)]


def test_a_restart_applies_only_what_follows_the_snapshot(bench: Any, tallies: Any) -> None:
    async def scenario(bench: Any) -> None:
        truth = tallies.Truth()
        member = await Member(bench, tallies, truth).open()
        await member.put(*BODIES[:60])
        assert await member.save() and not await member.save()
        await member.put(*BODIES[60:])
        state = member.tally.state
        bench.power_fail()
        again = await Member(bench, tallies, truth).open()
        assert again.caller.applied_index == 59 == again.snapshots.newest_index
        applied: list[int] = []
        apply = again.tally.apply
        again.tally.apply = lambda entry: (applied.append(entry.index), apply(entry))
        again.commit(99)
        await again.applied()
        assert applied == list(range(60, 100)) and again.tally.state == state and truth.violations == []

    bench(scenario, snapshot_threshold_entries=0)


def test_log_files_are_removed_only_once_a_snapshot_covers_them(bench: Any, tallies: Any) -> None:
    async def scenario(bench: Any) -> None:
        member = await Member(bench, tallies, tallies.Truth()).open()
        await member.put(*BODIES[:60])
        begin = member.store.first_of_next_file().index
        assert not member.snapshots.may_remove(begin) and member.store.ledger_begin_index == 0
        await member.save()
        assert begin <= member.store.ledger_begin_index <= 60 - bench.config.snapshot_log_kept_entries
        await member.put(*BODIES[60:])
        state = member.tally.state
        bench.kill()
        again = await Member(bench, tallies, member.tally.truth).open()
        again.commit(99)
        await again.applied()
        assert again.tally.state == state and again.tally.truth.violations == []

    bench(scenario, snapshot_threshold_entries=0, snapshot_removes_log=True)


def test_snapshots_follow_the_entry_threshold_and_the_newest_are_kept(bench: Any, tallies: Any) -> None:
    async def scenario(bench: Any) -> None:
        member = await Member(bench, tallies, tallies.Truth()).open()
        for body in BODIES:
            await member.put(body)
            await asyncio.sleep(0.05)
        names = member.snapshots.files.names()
        assert len(names) == 2 and member.snapshots.saved_total >= 4
        taken = [int(name.split("-")[0]) for name in names]
        assert all(second - first >= 20 for first, second in itertools.pairwise(taken))

    bench(scenario, snapshot_threshold_entries=20, snapshots_kept=2)


@pytest.mark.parametrize("begins_later", [False, True])
def test_a_damaged_snapshot_is_never_loaded(bench: Any, tallies: Any, begins_later: bool) -> None:
    async def scenario(bench: Any) -> None:
        truth = tallies.Truth()
        member = await Member(bench, tallies, truth).open()
        await member.put(*BODIES[:60])
        await member.save()
        path = f"{member.snapshots.files.directory}/{member.snapshots.files.names()[0]}"
        bench.kill()
        bench.disk.flip_bit(path, len(bench.disk.inode(path).cache) - 3, 2)
        if begins_later:
            with pytest.raises(LedgerCorrupt, match="no other snapshot reaches entry") as caught:
                await Member(bench, tallies, truth).open()
            assert caught.value.path == path
            return
        again = await Member(bench, tallies, truth).open()
        assert again.caller.applied_index == -1
        again.commit(59)
        await again.applied()
        assert truth.violations == []

    bench(scenario, snapshot_threshold_entries=0, snapshot_removes_log=begins_later)


def test_a_snapshot_that_contradicts_the_log_is_not_loaded(bench: Any, tallies: Any) -> None:
    async def scenario(bench: Any) -> None:
        truth = tallies.Truth()
        member = await Member(bench, tallies, truth).open()
        await member.put(*BODIES[:60], term=3)
        foreign = Snapshot(index=40, term=2, files={"numbers": b"41 7", "values": b"{}"})
        await bench.run("n1", lambda: member.snapshots.files.save(foreign, encode_snapshot(foreign)))
        bench.kill()
        again = await Member(bench, tallies, truth).open()
        assert again.caller.applied_index == -1
        again.commit(59)
        await again.applied()
        assert truth.violations == [] and again.tally.state == member.tally.state

    bench(scenario, snapshot_threshold_entries=0)


def test_a_snapshots_term_is_checked_when_its_entry_arrives_later(bench: Any, tallies: Any) -> None:
    async def scenario(bench: Any) -> None:
        member = await Member(bench, tallies, tallies.Truth()).open()
        foreign = Snapshot(index=40, term=2, files={"numbers": b"41 7", "values": b"{}"})
        await bench.run("n1", lambda: member.snapshots.files.save(foreign, encode_snapshot(foreign)))
        bench.kill()
        again = await Member(bench, tallies, tallies.Truth()).open()
        assert again.caller.applied_index == 40
        again.bench.append(again.store, *BODIES[:60], term=3)
        await bench.flushed(again.store)
        again.commit(59)
        await bench.until(lambda: again.caller.failure is not None)
        with pytest.raises(ValueError, match="entry 40 is of term 3, of 2 in the snapshot"):
            await again.caller.wait_for(59)

    bench(scenario, snapshot_threshold_entries=0)


def test_wait_for_returns_once_the_entry_is_applied(bench: Any, tallies: Any) -> None:
    async def scenario(bench: Any) -> None:
        member = await Member(bench, tallies, tallies.Truth()).open()
        waiting = bench.on("n1", lambda: asyncio.get_running_loop().create_task(member.caller.wait_for(59)))
        await member.put(*BODIES[:50])
        assert not waiting.done()
        await member.put(*BODIES[50:60])
        await waiting
        await member.caller.wait_for(59)

    bench(scenario)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.binary(max_size=3), min_size=1, max_size=80),
    st.lists(st.sampled_from(("save", "kill", "power_fail", "put", "put", "put")), max_size=12),
    st.booleans(),
)
def test_a_snapshot_and_the_rest_of_the_log_yield_the_state_of_the_whole_log(
    bench: Any, tallies: Any, values: list[bytes], steps: list[str], removes_log: bool
) -> None:
    bodies = [b"%d=" % (number % 5) + value.hex().encode() + b"." * 90 for number, value in enumerate(values)]

    async def scenario(bench: Any) -> None:
        truth = tallies.Truth()
        member = await Member(bench, tallies, truth).open()
        left = list(bodies)
        for step in steps:
            if step == "save":
                await member.save()
            elif step == "put":
                some, left = left[:15], left[15:]
                await member.put(*some)
            else:
                getattr(bench, step)()
                committed = member.store.ledger_end_index
                member = await Member(bench, tallies, truth).open()
                if committed >= 0:
                    member.commit(committed)
                    await member.applied()
        await member.put(*left)
        oracle: dict[str, str] = {}
        for body in bodies:
            key, _, value = body.decode().partition("=")
            oracle[key] = value
        assert member.tally.values == oracle and member.tally.next_index == len(bodies)
        assert truth.violations == []

    bench(scenario, snapshot_threshold_entries=0, snapshot_removes_log=removes_log, snapshot_log_kept_entries=0)
