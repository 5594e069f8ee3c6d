"""The checkpoint of the consume queues: what survives, and what is rebuilt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.store.queue_store import NOTHING_DISPATCHED, DispatchMark, QueueStore

MARK = DispatchMark(index=41, term=3, store_timestamp_ms=1_700_000_000_000)
CHECKPOINT = "/q.checkpoint"


def always(index: int, term: int) -> bool:
    return True


def make(disk: Any, *, units_per_file: int = 4) -> QueueStore:
    return QueueStore(disk, "/q", units_per_file=units_per_file)


def append(store: QueueStore, topic: str, queue_id: int, count: int) -> None:
    queue = store.find(topic, queue_id)
    start = queue.max_offset if queue else 0
    for number in range(start, start + count):
        assert store.append(topic, queue_id, number, physical_offset=number, size_bytes=100, tag_hash=0)


def contents(disk: Any) -> dict[str, bytes]:
    return {path: bytes(content) for path, content in disk.files.items() if path != CHECKPOINT}


def bounds(store: QueueStore) -> dict[tuple[str, int], int]:
    return {key: queue.max_offset for key, queue in store.items()}


def filled(disk: Any) -> QueueStore:
    store = make(disk)
    append(store, "a", 0, 5)
    append(store, "a", 1, 1)
    append(store, "b", 7, 9)
    asyncio.run(store.checkpoint(MARK))
    return store


def test_restoring_returns_to_the_checkpoint_with_and_without_a_power_cut(disk: Any) -> None:
    store = filled(disk)
    at_checkpoint = contents(disk)
    append(store, "a", 0, 3)
    append(store, "c", 0, 3)
    for _, queue in store.items():
        asyncio.run(queue.flush())
    asked: list[tuple[int, int]] = []
    for power in ("on", "off"):
        if power == "off":
            disk.cut_power()
        again = make(disk)
        assert asyncio.run(again.restore(lambda *entry: asked.append(entry) is None)) == MARK
        assert bounds(again) == {("a", 0): 5, ("a", 1): 1, ("b", 7): 9}
        assert contents(disk) == at_checkpoint
    assert asked == [(41, 3), (41, 3)]


def test_appends_during_a_checkpoint_belong_to_the_next_one(disk: Any) -> None:
    store = make(disk)
    append(store, "a", 0, 2)
    appended: list[int] = []

    def more(path: str) -> None:
        if not appended:
            appended.append(1)
            append(store, "a", 0, 1)
            append(store, "new", 0, 1)

    disk.before_sync = more
    asyncio.run(store.checkpoint(MARK))
    again = make(disk)
    assert asyncio.run(again.restore(always)) == MARK
    assert bounds(again) == {("a", 0): 2}
    assert store.unflushed_bytes == sum(queue.unflushed_bytes for _, queue in store.items())


def test_without_a_checkpoint_everything_is_rebuilt(disk: Any) -> None:
    filled(disk)
    asyncio.run(disk.remove(CHECKPOINT))
    again = make(disk)
    assert asyncio.run(again.restore(always)) == NOTHING_DISPATCHED
    assert bounds(again) == {} and contents(disk) == {}


@pytest.mark.parametrize(
    "damage", ["entry not in log", "flipped bit", "truncated checkpoint", "missing file", "short file", "file size",
               "flipped unit", "bad sector", "bad sector of the checkpoint"]
)  # fmt: skip
def test_queues_that_do_not_match_the_checkpoint_are_rebuilt(disk: Any, damage: str) -> None:
    filled(disk)
    content = disk.files[CHECKPOINT]
    if damage == "flipped bit":
        content[len(content) // 2] ^= 1
    elif damage == "truncated checkpoint":
        del content[len(content) // 2 :]
    elif damage == "missing file":
        del disk.files["/q/b/7/00000000000000000000"]
    elif damage == "short file":
        del disk.files["/q/b/7/00000000000000000160"][5:]
    elif damage == "flipped unit":
        disk.files["/q/b/7/00000000000000000080"][70] ^= 4
    elif damage == "bad sector":
        disk.bad_paths.add("/q/b/7/00000000000000000080")
    elif damage == "bad sector of the checkpoint":
        disk.bad_paths.add(CHECKPOINT)
    again = make(disk, units_per_file=5 if damage == "file size" else 4)
    mark = asyncio.run(again.restore(lambda index, term: damage != "entry not in log"))
    assert mark == NOTHING_DISPATCHED
    assert bounds(again) == {} and contents(disk) == {} and CHECKPOINT not in disk.files
    append(again, "a", 0, 5)
    append(again, "a", 1, 1)
    append(again, "b", 7, 9)
    asyncio.run(again.checkpoint(MARK))
    assert bounds(again) == {("a", 0): 5, ("a", 1): 1, ("b", 7): 9}


def test_the_same_appends_give_the_same_bytes(disk: Any, new_disk: Any) -> None:
    filled(disk)
    other = new_disk()
    filled(other)
    assert contents(disk) == contents(other) != {}


def test_a_checkpoint_refused_by_a_full_disk_keeps_its_units_for_the_next(disk: Any) -> None:
    store = filled(disk)
    append(store, "a", 0, 2)
    disk.fail_writes = True
    with pytest.raises(OSError, match="No space"):
        asyncio.run(store.checkpoint(DispatchMark(index=43, term=3, store_timestamp_ms=0)))
    assert store.unflushed_bytes == 48
    disk.fail_writes = False
    later = DispatchMark(index=43, term=3, store_timestamp_ms=0)
    asyncio.run(store.checkpoint(later))
    assert store.unflushed_bytes == 0
    assert asyncio.run(make(disk).restore(always)) == later


def test_after_a_failed_fsync_no_later_checkpoint_is_used(disk: Any) -> None:
    store = filled(disk)
    append(store, "a", 0, 2)
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        asyncio.run(store.checkpoint(DispatchMark(index=43, term=3, store_timestamp_ms=0)))
    disk.fail_syncs = False
    asyncio.run(store.checkpoint(DispatchMark(index=44, term=3, store_timestamp_ms=0)))
    assert store.unflushed_bytes == 0
    assert asyncio.run(make(disk).restore(always)) == MARK


def test_an_idle_checkpoint_syncs_no_queue(disk: Any) -> None:
    store = filled(disk)
    before = disk.sync_count
    asyncio.run(store.checkpoint(MARK))
    assert disk.sync_count == before
    append(store, "a", 1, 1)
    asyncio.run(store.checkpoint(MARK))
    assert disk.sync_count == before + 2, "units and CRCs"


def test_an_appended_message_or_batch_ends_the_presumption_about_its_queue(disk: Any) -> None:
    for in_batch in (False, True):
        store = make(disk)
        store.presume("a", 0, 7)
        assert store.presumed == [("a", 0)]
        if in_batch:
            assert store.append_units("a", 0, 7, bytes(20), bytes(4))
        else:
            assert store.append("a", 0, 7, physical_offset=0, size_bytes=0, tag_hash=0)
        assert store.presumed == []


def test_a_checkpoint_under_way_is_void_once_its_queues_are_distrusted(disk: Any) -> None:
    store = filled(disk)
    append(store, "a", 0, 1)
    write = disk.write_file_atomic

    async def interrupted(path: str, data: bytes) -> None:
        await store.distrust()
        await write(path, data)

    disk.write_file_atomic = interrupted
    asyncio.run(store.checkpoint(MARK))
    disk.write_file_atomic = write
    assert asyncio.run(make(disk).restore(always)) == NOTHING_DISPATCHED


def bases(disk: Any, directory: str) -> list[int]:
    """The first offsets of the files of queue a/0."""
    return [int(name) // {"/q": 20, "/q.crc": 4}[directory] for name in disk.list(f"{directory}/a/0")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["trim", "checkpoint", "restore"])), max_size=20))
def test_files_before_the_trimmed_offset_are_removed_with_the_next_checkpoint(new_disk: Any, steps: list[Any]) -> None:
    """But never the last one; the others left are those that the checkpoint needs."""
    disk = new_disk()
    store, recorded = make(disk), (0, 0)
    append(store, "a", 0, 1)
    for step in [*steps, "checkpoint"]:
        queue = store.find("a", 0)
        assert queue is not None
        if step == "trim":
            store.trim((queue.min_offset + queue.max_offset + 1) // 2)
        elif step == "checkpoint":
            asyncio.run(store.checkpoint(MARK))
            recorded = queue.min_offset, queue.max_offset
            least = min(recorded[0] // 4 * 4, (recorded[1] - 1) // 4 * 4)
            for directory in ("/q", "/q.crc"):  # `restore` leaves no file of a queue that holds nothing
                assert min(bases(disk, directory), default=least) == least
            after_a_power_cut = new_disk()
            after_a_power_cut.files = {path: bytearray(content) for path, content in disk.synced.items()}
            again = make(after_a_power_cut)
            assert asyncio.run(again.restore(always)) == MARK
            restored = again.find("a", 0)
            assert restored is not None and (restored.min_offset, restored.max_offset) == recorded
            assert [unit.physical_offset for unit in restored.read(recorded[0], 999)] == list(range(*recorded))
        elif step == "restore" and recorded != (0, 0):
            store = make(disk)
            assert asyncio.run(store.restore(always)) == MARK
        elif isinstance(step, int):
            append(store, "a", 0, step)


def test_a_removal_may_be_interrupted_after_any_file(disk: Any, new_disk: Any, caplog: Any) -> None:
    store = make(disk)
    append(store, "a", 0, 23)
    asyncio.run(store.checkpoint(MARK))
    read = store.find("a", 0)
    assert read is not None and store.trim(17) == 17
    remove, states = disk.remove, []

    async def watched(path: str) -> None:
        await remove(path)
        states.append(dict(disk.synced))
        assert [unit.physical_offset for unit in read.read(17, 99)] == list(range(17, 23))
        if len(states) == 5:
            raise OSError(5, "Input/output error", path)

    disk.remove = watched
    asyncio.run(store.checkpoint(MARK))
    assert "could not be removed" in caplog.text
    assert (bases(disk, "/q"), bases(disk, "/q.crc")) == ([16, 20], [4, 8, 12, 16, 20])
    asyncio.run(store.checkpoint(MARK))
    assert bases(disk, "/q") == bases(disk, "/q.crc") == [16, 20] and len(states) == 8
    for state in states:
        copy = new_disk()
        copy.files = {path: bytearray(content) for path, content in state.items()}
        again = make(copy)
        assert asyncio.run(again.restore(always)) == MARK and bounds(again) == {("a", 0): 23}
        assert bases(copy, "/q") == bases(copy, "/q.crc") == [16, 20]
    store.close()
    assert disk.open_handles == 0


def test_no_file_is_removed_before_the_checkpoint_is_durable(disk: Any) -> None:
    store = make(disk)
    append(store, "a", 0, 23)
    asyncio.run(store.checkpoint(MARK))
    store.trim(17)
    write = disk.write_file_atomic

    async def refused(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device", path)

    disk.write_file_atomic = refused
    with pytest.raises(OSError, match="No space"):
        asyncio.run(store.checkpoint(MARK))
    assert bases(disk, "/q") == [0, 4, 8, 12, 16, 20]
    disk.write_file_atomic = write
    asyncio.run(store.checkpoint(MARK))
    assert bases(disk, "/q") == [16, 20]
