"""The log store: what it holds, what it refuses, and how it recovers from crashes and disk faults."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.dledger import DLedgerCode, DLedgerError, LedgerCorrupt
from node.dledger.entry import HEADER_SIZE_BYTES, Entry, encode_entry
from node.dledger.entry_batch import EntryBatch, parse_batches


def batches(entries: list[Entry]) -> list[EntryBatch]:
    return parse_batches(b"".join(entry.raw for entry in entries))


@pytest.mark.mechanism("Log numbering...")
def test_indices_and_positions_are_consecutive_across_files(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        assert (store.ledger_begin_index, store.ledger_end_index, store.end_pos) == (-1, -1, 0)
        entries = bench.append(store, *(bytes(100 * n) for n in range(30)))
        await bench.flushed(store)
        assert [entry.index for entry in entries] == list(range(30))
        position = 0
        for entry in entries:
            if position % 4096 + entry.size_bytes + 8 > 4096:
                position += 4096 - position % 4096  # the rest of the file is a blank
            assert entry.pos == position
            position = entry.end_pos
        assert [store.get(index) for index in range(30)] == entries
        assert store.get(-1) is None and store.get(30) is None
        data = bench.content("n1", "/data/dledger/data")
        assert all(data[entry.pos : entry.end_pos] == entry.raw for entry in entries)

    bench(scenario)


def test_encode_body_gets_the_position_of_the_body(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        positions: list[int] = []

        def encode(position: int) -> bytes:
            positions.append(position)
            return b"12345"

        for _ in range(3):
            bench.on("n1", lambda: store.append_as_leader(1, 5, encode))
        assert positions == [store.get(index).pos + HEADER_SIZE_BYTES for index in range(3)]
        with pytest.raises(ValueError, match=r"other sizes than \(5,\), which were announced"):
            bench.on("n1", lambda: store.append_as_leader(1, 5, lambda _: b"1234"))
        with pytest.raises(DLedgerError) as caught:
            bench.append(store, bytes(4096 - 8 - HEADER_SIZE_BYTES + 1))
        assert caught.value.code is DLedgerCode.UNEXPECTED_ARGUMENT
        assert store.ledger_end_index == 2
        assert bench.append(store, bytes(4096 - 8 - HEADER_SIZE_BYTES))[0].pos == 4096

    bench(scenario)


def test_many_appends_share_one_flush(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[b"x"] * 40)
        assert store.acked_index == -1
        await bench.flushed(store)
        assert (store.writer.group_total, store.acked_index) == (1, 39)

    bench(scenario, data_segment_size_bytes=1 << 20)


def test_the_flush_mode_decides_whether_acknowledgement_waits_for_the_sync(bench: Any) -> None:
    async def scenario(bench: Any) -> tuple[int, int, int]:
        store = await bench.open()
        bench.append(store, b"first")
        await bench.flushed(store)
        bench.disk.stall(("sync",))
        bench.append(store, b"second")
        await asyncio.sleep(1.0)
        return store.written_index, store.durable_index, store.acked_index

    assert bench(scenario, flush_mode="sync") == (0, 0, 0)
    assert bench(scenario, flush_mode="async") == (1, 0, 1)


def test_reopening_finds_the_same_log_and_the_committed_index(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        entries = bench.append(store, *(b"%d" % n * n for n in range(50)))
        await bench.flushed(store)
        store.update_committed_index(40)
        position = store.committed_pos
        assert position == entries[40].end_pos
        await bench.close(store)
        bench.kill()
        again = await bench.open()
        assert [again.get(index) for index in range(50)] == entries
        assert (again.committed_index, again.committed_pos) == (40, position)
        assert (again.ledger_end_term, again.end_chain_crc) == (1, entries[-1].chain_crc)
        bench.append(again, b"next", term=2)
        assert again.get(50).index == 50

    bench(scenario)


@pytest.mark.mechanism("Committed checkpoint")
def test_after_a_kill_the_committed_index_is_that_of_the_last_checkpoint(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[b"entry"] * 20)
        await bench.flushed(store)
        store.update_committed_index(5)
        await asyncio.sleep(4)  # a checkpoint every three seconds
        store.update_committed_index(15)
        bench.kill()
        again = await bench.open()
        assert again.committed_index == 5
        assert again.ledger_end_index == 19

    bench(scenario)


@pytest.mark.mechanism("updateCommittedIndex")
def test_the_committed_index_only_advances_and_stops_at_the_end_of_the_log(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        heard: list[int] = []
        store.add_commit_listener(lambda: heard.append(store.committed_index))
        assert not store.update_committed_index(3)  # the log is empty
        bench.append(store, *[b"entry"] * 5)
        assert not store.update_committed_index(-1)
        assert store.update_committed_index(2)
        assert not store.update_committed_index(2)
        assert not store.update_committed_index(1)  # never backwards
        assert store.update_committed_index(99)  # never beyond the end
        assert heard == [2, 4]

    bench(scenario)


@pytest.mark.mechanism("TRUNCATE")
def test_truncate_keeps_the_entry_it_names_and_survives_a_power_cut(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        entries = bench.append(store, *(bytes(200) for _ in range(60)))
        await bench.flushed(store)
        await bench.on("n1", lambda: store.truncate(33))
        assert (store.ledger_end_index, store.get(33), store.get(34)) == (33, entries[33], None)
        assert (store.durable_index, store.end_pos) == (33, entries[33].end_pos)
        await bench.on("n1", lambda: store.truncate(33))  # end == index
        bench.power_fail()
        store = await bench.open()
        assert (store.ledger_end_index, store.get(34)) == (33, None)
        (new,) = bench.append(store, b"other", term=2)
        await bench.flushed(store)
        bench.power_fail()
        store = await bench.open()
        assert [store.get(index) for index in range(35)] == [*entries[:34], new]

    bench(scenario)


def test_truncate_of_entries_that_are_still_in_memory(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        first = bench.append(store, *[b"flushed"] * 5)
        await bench.flushed(store)
        bench.disk.stall()
        bench.append(store, *[b"in flight"] * 5)
        await asyncio.sleep(0.1)
        bench.append(store, *[b"queued"] * 5)
        done = bench.on("n1", lambda: store.truncate(6))
        replaced = bench.append(store, *[b"replacement"] * 3, term=2)
        await asyncio.sleep(0.1)
        assert not done.done() and store.durable_index == 4
        bench.disk.unstall()
        await done
        await bench.flushed(store)
        bench.power_fail()
        again = await bench.open()
        found = [again.get(index).body for index in range(again.ledger_end_index + 1)]
        assert found == [b"flushed"] * 5 + [b"in flight"] * 2 + [b"replacement"] * 3
        assert again.get(9) == replaced[2] and again.get(0) == first[0]

    bench(scenario)


@pytest.mark.mechanism("TRUNCATE")
def test_truncate_never_crosses_the_committed_index(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        entries = bench.append(store, *[b"entry"] * 10)
        store.update_committed_index(6)
        with pytest.raises(DLedgerError, match="6 is committed") as caught:
            store.truncate(5)
        assert caught.value.code is DLedgerCode.INCONSISTENT_STATE
        assert store.ledger_end_index == 9
        other = encode_entry(magic=1, index=3, term=2, pos=4096, previous_chain_crc=0, body=b"")
        with pytest.raises(DLedgerError, match="6 is committed"):
            store.reset(other)
        bench.on("n1", lambda: store.truncate(6))
        assert store.get(6) == entries[6]

    bench(scenario)


def test_reset_begins_at_the_leaders_first_entry(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[bytes(500)] * 20)
        await bench.flushed(store)
        first = encode_entry(magic=1, index=100, term=3, pos=8192 * 4, previous_chain_crc=77, body=b"first")
        await bench.on("n1", lambda: store.reset(first))
        bench.append(store, b"second", term=3)
        await bench.flushed(store)
        assert (store.ledger_begin_index, store.ledger_end_index, store.committed_index) == (100, 101, 99)
        bench.power_fail()
        again = await bench.open()
        assert (again.ledger_begin_index, again.ledger_end_index) == (100, 101)
        assert again.get(100) == first and again.get(101).body == b"second" and again.get(5) is None
        with pytest.raises(DLedgerError, match="cannot begin at 32769"):
            again.reset(encode_entry(magic=1, index=200, term=3, pos=32769, previous_chain_crc=0, body=b""))

    bench(scenario)


def test_follower_appends_only_what_continues_its_log(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        leader = [encode_entry(magic=1, index=0, term=1, pos=0, previous_chain_crc=0, body=b"zero")]
        for index in range(1, 4):
            before = leader[-1]
            leader.append(
                encode_entry(
                    magic=1, index=index, term=1, pos=before.end_pos, previous_chain_crc=before.chain_crc, body=b"x"
                )
            )
        store = await bench.open()
        with pytest.raises(DLedgerError, match="cannot follow -1"):
            store.append_as_follower(batches(leader[1:]))
        bench.on("n1", lambda: store.append_as_follower(batches(leader[:2])))
        with pytest.raises(DLedgerError, match="cannot follow 1"):
            store.append_as_follower(batches(leader[3:]))
        stranger = encode_entry(magic=1, index=2, term=1, pos=leader[2].pos, previous_chain_crc=5, body=b"x")
        with pytest.raises(DLedgerError, match="chain CRC"):
            store.append_as_follower(batches([stranger]))
        elsewhere = encode_entry(magic=1, index=2, term=1, pos=4096, previous_chain_crc=leader[1].chain_crc, body=b"x")
        with pytest.raises(DLedgerError, match="data_segment_size_bytes the same"):
            store.append_as_follower(batches([elsewhere]))
        bench.on("n1", lambda: store.append_as_follower(batches(leader[2:])))
        assert [store.get(index) for index in range(4)] == leader

    bench(scenario)


def test_bodies_are_read_by_position_from_memory_and_disk(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        entries = bench.append(store, *(b"%04d" % n * 50 for n in range(100)))

        def check() -> None:
            for entry in entries:
                assert store.read_bytes(entry.body_pos, 200) == entry.body
                assert store.read_bytes(entry.body_pos, 7) == entry.body[:7]

        check()
        await bench.flushed(store)
        await bench.close(store)
        store = await bench.open()
        check()
        for position in (entries[3].body_pos + 1, entries[3].pos, 0, -5, store.end_pos + 48):
            with pytest.raises(OSError):
                store.read_bytes(position, 4)
        with pytest.raises(OSError) as caught:
            store.read_bytes(store.end_pos + 1000, 4)
        assert caught.value.errno == errno.EINVAL

    bench(scenario, max_cached_bytes=2000)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 900), st.integers(1, 5)),
            st.tuples(st.just("truncate"), st.floats(0, 1)),
            st.tuples(st.just("commit"), st.floats(0, 1)),
            st.tuples(st.just("flush")),
            st.tuples(st.just("stall")),
            st.tuples(st.just("refuse")),
            st.tuples(st.just("kill")),
            st.tuples(st.just("power")),
        ),
        max_size=20,
    ),
    seed=st.integers(0, 10_000),
)
def test_the_store_agrees_with_a_list_and_keeps_durable_entries_after_crashes(
    bench: Any, operations: list[Any], seed: int
) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        model: list[Any] = []
        committed = -1
        for kind, *arguments in operations:
            if kind == "append":
                model += bench.append(store, *[bytes(arguments[0])] * arguments[1], term=len(operations))
            elif kind == "truncate" and model:
                index = committed + int((len(model) - 1 - committed) * arguments[0])
                if index >= 0:
                    bench.on("n1", partial(store.truncate, index))
                    del model[index + 1 :]
            elif kind == "commit":
                index = int((store.durable_index + 1) * arguments[0]) - 1
                store.update_committed_index(index)
                committed = max(committed, index)
            elif kind == "flush":
                bench.disk.heal()
                await bench.flushed(store)
            elif kind in ("stall", "refuse"):
                bench.disk.stall() if kind == "stall" else bench.disk.fail("write")
                await asyncio.sleep(0.01)
            elif kind in ("kill", "power"):
                durable = store.durable_index
                bench.disk.heal()
                bench.kill() if kind == "kill" else bench.power_fail()
                store = await bench.open()
                assert store.ledger_end_index >= durable
                assert -1 <= store.committed_index <= committed
                found = [store.get(index) for index in range(store.ledger_end_index + 1)]
                assert found[: durable + 1] == model[: durable + 1]
                model, committed = found, store.committed_index
            assert store.ledger_end_index == len(model) - 1
            assert store.committed_index == committed
            assert [store.get(index) for index in range(len(model))] == model
            read: list[Entry] = []
            while len(read) < len(model):
                read += store.read_entries(len(read), max_entries=7, max_bytes=4096)
            assert read == model

    bench(scenario, seed=seed, max_cached_bytes=500)


def test_a_corruption_error_is_one_line_with_path_offset_and_reason() -> None:
    error = LedgerCorrupt("/data/dledger/data/00000000000000000000", 17, "there is no entry")
    assert str(error) == "/data/dledger/data/00000000000000000000 is damaged at byte 17: there is no entry"
    assert isinstance(error, OSError) and error.errno == errno.EBADMSG
