"""Removal of the oldest log files, restarts after it, and followers that fell behind the new begin of the log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.dledger import DLedgerError
from node.dledger.rpc import DLedgerCode


async def filled(bench: Any, count: int = 60) -> Any:
    """A store of several small files, everything committed and durable."""
    store = await bench.open()
    bench.append(store, *[b"%03d" % number + b"x" * 200 for number in range(count)])
    await bench.flushed(store)
    bench.on("n1", lambda: store.update_committed_index(count - 1))
    return store


async def remove_oldest_file(bench: Any, store: Any) -> bool:
    first = bench.on("n1", store.first_of_next_file)
    return first is not None and await bench.run("n1", lambda: store.remove_before(first))


def test_removing_the_oldest_files_leaves_the_rest_unchanged(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        kept = {index: store.get(index) for index in range(60)}
        assert await remove_oldest_file(bench, store) and await remove_oldest_file(bench, store)
        begin = store.ledger_begin_index
        assert begin == 32 and store.begin_pos == 8192 == kept[begin].pos
        assert (store.ledger_end_index, store.committed_index) == (59, 59)
        assert [store.get(index) for index in range(begin)] == [None] * begin
        assert {index: store.get(index) for index in range(begin, 60)} == {i: kept[i] for i in range(begin, 60)}
        assert store.term_at(begin - 1) == -1 and store.read_entries(begin - 1, max_entries=9, max_bytes=999) == []
        with pytest.raises(OSError, match="holds no body"):
            store.read_bytes(kept[0].body_pos, 3)
        assert not [path for path in bench.disk.paths() if path.endswith(f"data/{0:020d}")]

    bench(scenario)


@pytest.mark.parametrize("end", ["close", "kill", "power_fail"])
def test_the_begin_of_a_trimmed_log_survives_a_restart(bench: Any, end: str) -> None:
    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        assert await remove_oldest_file(bench, store)
        begin, last = store.ledger_begin_index, store.get(59)
        if end == "close":
            await bench.close(store)
        else:
            getattr(bench, end)()
        store = await bench.open()
        assert (store.ledger_begin_index, store.ledger_end_index, store.committed_index) == (begin, 59, 59)
        assert store.get(59) == last and store.get(begin).index == begin
        bench.append(store, b"goes on")
        await bench.flushed(store)

    bench(scenario)


@pytest.mark.parametrize("which", range(4))
def test_a_power_failure_during_file_removal_loses_no_other_entries(bench: Any, which: int) -> None:
    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        first = bench.on("n1", store.first_of_next_file)
        task = bench.on("n1", lambda: asyncio.get_running_loop().create_task(store.remove_before(first)))
        for _ in range(which):  # each await of the disk is a point of interruption
            await asyncio.sleep(0.0007)
        bench.power_fail()  # the task ends with its process
        assert which == 0 or not task.done()
        store = await bench.open()
        assert store.ledger_begin_index in (0, first.index) and store.ledger_end_index == 59
        assert store.get(first.index) == first

    bench(scenario)


@pytest.mark.parametrize("which", range(8))
def test_a_cancelled_file_removal_loses_no_other_entries(bench: Any, which: int) -> None:
    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        first = bench.on("n1", store.first_of_next_file)
        task = bench.on("n1", lambda: asyncio.get_running_loop().create_task(store.remove_before(first)))
        for _ in range(which):
            await asyncio.sleep(0.0007)
        task.cancel()
        await asyncio.wait((task,))
        bench.append(store, b"one more")
        await bench.close(store)
        store = await bench.open()
        assert store.ledger_begin_index in (0, first.index) and store.ledger_end_index == 60
        assert store.get(first.index) == first

    bench(scenario)


def test_on_begin_is_called_before_files_are_removed(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        first = bench.on("n1", store.first_of_next_file)
        calls: list[tuple[int, bool]] = []
        oldest = bench.path(0)

        def on_begin(position: int) -> None:
            calls.append((position, oldest in bench.disk.paths()))

        assert await bench.run("n1", lambda: store.remove_before(first, on_begin=on_begin))
        assert calls == [(first.pos, True)] and oldest not in bench.disk.paths()

    bench(scenario)


def test_only_committed_entries_are_removed(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        assert store.first_of_next_file() is None
        bench.append(store, *[b"%03d" % number + b"x" * 200 for number in range(60)])
        await bench.flushed(store)
        assert not await remove_oldest_file(bench, store)
        bench.on("n1", lambda: store.update_committed_index(20))
        assert await remove_oldest_file(bench, store) and not await remove_oldest_file(bench, store)
        assert store.ledger_begin_index <= 20

    bench(scenario)


def test_a_file_with_a_damaged_first_entry_does_not_prevent_removal(bench: Any) -> None:
    """Removal ends at the next file with an intact first entry; the newest file stays, damaged or not."""

    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        await bench.close(store)
        bench.kill()
        store = await bench.open()  # the cache is empty now
        second = bench.config.data_segment_size_bytes
        bench.flip(second + 100)
        assert await remove_oldest_file(bench, store)
        assert store.begin_pos == 2 * second and store.get(store.ledger_begin_index).pos == 2 * second
        while await remove_oldest_file(bench, store):
            pass
        bench.kill()
        store = await bench.open()
        assert (store.begin_pos, store.ledger_end_index) == (store.get(59).pos // second * second, 59)

    bench(scenario)


def test_a_missing_first_file_is_damage_even_after_a_removal(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await filled(bench)
        assert await remove_oldest_file(bench, store)
        begin_pos = store.begin_pos
        await bench.close(store)
        bench.kill()
        bench.disk.unlink(bench.path(begin_pos))
        with pytest.raises(OSError, match="the file is missing"):
            await bench.open()

    bench(scenario)


async def expire(group: Any, name: str) -> int:
    """Remove all files but the newest of a member's log; returns its new first index."""
    store = group[name].store
    while (first := group.on(name, store.first_of_next_file)) is not None:
        if not await group.run(name, lambda first=first: store.remove_before(first)):
            break
    return int(store.ledger_begin_index)


@pytest.mark.parametrize("how", ["down", "cut off", "wiped"])
def test_a_follower_that_fell_behind_restarts_its_log_at_the_leaders_begin(simulate: Any, how: str) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        behind = next(name for name in group.names if name != leader)
        await group.append_all(leader, *[b"%03d" % number + b"x" * 100 for number in range(10)])
        await group.converged()
        if how == "cut off":
            await group.cut(" ".join(name for name in group.names if name != behind))
        else:
            group.kill(behind)
        await group.append_all(leader, *[b"%03d" % number + b"x" * 100 for number in range(10, 90)])
        others = [name for name in group.names if name != behind]
        await group.converged(*others)
        begins = {name: await expire(group, name) for name in others}
        begin = begins[leader]
        assert begin > 30 and len(set(begins.values())) == 1
        if how == "cut off":
            await group.heal()
        else:
            if how == "wiped":
                disk = group.hosts[behind].disk
                for path in disk.paths():
                    if not path.endswith("member_state"):
                        disk.unlink(path)
            await group.start(behind)
        leader = await group.leader()
        await group.append_all(leader, b"goes on")
        await group.until(lambda: group[behind].store.committed_index == group[leader].store.committed_index)
        assert group[behind].store.ledger_begin_index == begin
        assert group.log(behind) == group.log(leader) != []
        group.kill(behind)
        await group.start(behind)
        await group.append_all(leader, b"and after a restart")
        await group.until(lambda: group[behind].store.committed_index == group[leader].store.committed_index)

    simulate(scenario, max_pending_pushes=10)  # what is on its way to a follower that is cut off still arrives


def test_a_follower_may_begin_later_or_earlier_than_its_leader(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *[b"%03d" % number + b"x" * 100 for number in range(90)])
        await group.converged()
        short = next(name for name in group.names if name != leader)
        begin = await expire(group, short)
        assert begin > 30 and group[leader].store.ledger_begin_index == 0
        await group.append_all(leader, b"goes on")
        await group.run(leader, lambda: group[leader].transfer_leadership(short))
        await group.append_all(short, b"led by the shorter log")
        await group.until(lambda: len({group[name].store.committed_index for name in group.names}) == 1)
        with pytest.raises(DLedgerError) as caught:
            group.append(leader, b"refused")
        assert caught.value.code is DLedgerCode.NOT_LEADER

    simulate(scenario)
