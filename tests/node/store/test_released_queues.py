"""Queues of deleted topics: released once they are empty, and continued where they ended."""

from __future__ import annotations

import asyncio
from typing import Any

from node.store.queue_store import DispatchMark, QueueStore

PER_FILE = 4


def store_on(disk: Any, *, deleted: set[str]) -> QueueStore:
    store = QueueStore(disk, "/q", units_per_file=PER_FILE)
    store.is_deleted = deleted.__contains__
    return store


def fill(store: QueueStore, topic: str, numbers: range) -> None:
    for number in numbers:
        assert store.append(topic, 0, number, physical_offset=number, size_bytes=100, tag_hash=7, crc=number)


async def checkpoint(store: QueueStore, index: int) -> None:
    await store.checkpoint(DispatchMark(index=index, term=1, store_timestamp_ms=1))


def held(store: QueueStore) -> list[str]:
    return [topic for (topic, _), _ in store.items()]


def files_of(disk: Any, topic: str) -> list[str]:
    return [path for path in disk.files if f"/{topic}/" in path]


async def restored(disk: Any, deleted: set[str]) -> QueueStore:
    store = store_on(disk, deleted=deleted)
    assert (await store.restore(lambda index, term: True)).index >= 0
    return store


def test_an_empty_queue_of_a_deleted_topic_is_released_and_continues_where_it_ended(disk: Any) -> None:
    async def scenario() -> None:
        deleted: set[str] = set()
        store = store_on(disk, deleted=deleted)
        fill(store, "gone", range(6))
        fill(store, "kept", range(6))
        await checkpoint(store, 1)
        deleted.add("gone")
        await checkpoint(store, 2)
        assert held(store) == ["gone", "kept"], "its messages are still in the log"
        store.trim(6)
        await checkpoint(store, 3)
        assert held(store) == ["kept"] and not files_of(disk, "gone") and files_of(disk, "kept")
        assert dict(store.ends()) == {("gone", 0): 6, ("kept", 0): 6}
        again = await restored(disk, deleted)
        assert dict(again.ends()) == dict(store.ends()), "the checkpoint has its end"
        await checkpoint(again, 4)
        assert held(again) == ["kept"]
        for each in (store, again):
            queue = each.find("gone", 0)
            assert queue is not None and (queue.min_offset, queue.max_offset) == (6, 6)
            assert each.find("other", 0) is None

    asyncio.run(scenario())


def test_messages_of_a_topic_that_is_made_again_follow_and_survive_a_restart(disk: Any) -> None:
    async def scenario() -> None:
        deleted = {"t"}
        store = store_on(disk, deleted=deleted)
        fill(store, "t", range(6))
        store.trim(6)
        await checkpoint(store, 1)
        assert held(store) == []
        await checkpoint(store, 2)
        deleted.clear()
        fill(store, "t", range(6, 11))
        assert not store.append("t", 0, 3, physical_offset=3, size_bytes=100, tag_hash=7), "that number was given"
        await checkpoint(store, 3)
        again = await restored(disk, deleted)
        for each in (store, again):
            queue = each.find("t", 0)
            assert queue is not None and (queue.min_offset, queue.max_offset) == (6, 11)
            assert [unit.physical_offset for unit in queue.read(6, 9)] == [*range(6, 11)]
            assert list(queue.read_crcs(6, 9)) == [*range(6, 11)]

    asyncio.run(scenario())


def test_packed_units_are_added_to_a_released_queue(disk: Any) -> None:
    async def scenario() -> None:
        store = store_on(disk, deleted={"t"})
        fill(store, "t", range(3))
        store.trim(3)
        await checkpoint(store, 1)
        assert held(store) == [] and store.append_units("t", 0, 3, bytes(20), bytes(4))
        assert dict(store.ends()) == {("t", 0): 4}
        store.presume("t", 0, 9)
        assert dict(store.ends()) == {("t", 0): 9}

    asyncio.run(scenario())


def test_a_message_that_comes_while_the_files_are_removed_is_kept(disk: Any) -> None:
    async def scenario() -> None:
        store = store_on(disk, deleted={"t"})
        fill(store, "t", range(6))
        store.trim(6)
        remove = disk.remove

        async def remove_slowly(path: str) -> None:
            if store.find("t", 0) is not None and dict(store.ends()) == {("t", 0): 6}:
                fill(store, "t", range(6, 7))
            await remove(path)

        disk.remove = remove_slowly
        await checkpoint(store, 1)
        disk.remove = remove
        await checkpoint(store, 2)
        again = await restored(disk, set())
        queue = again.find("t", 0)
        assert queue is not None and [unit.physical_offset for unit in queue.read(6, 9)] == [6]

    asyncio.run(scenario())
