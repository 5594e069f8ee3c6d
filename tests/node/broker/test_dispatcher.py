"""Dispatch: committed entries only, in order, once, also across restarts; damage stops it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from typing import Any

import pytest

from node.broker import dispatcher as dispatcher_module
from node.broker.dispatcher import DispatchFailed
from node.store.record import Message
from node.store.record_batch import batch_of_one, encode_record


def add(parts: Any, queue_id: int, number: int, *, topic: str = "t", sys_flag: int = 0, **changes: Any) -> None:
    store = parts.ledger.store
    message = Message(
        topic=topic,
        queue_id=queue_id,
        body=b"%d" % number,
        properties={"TAGS": "a"},
        queue_offset=number,
        physical_offset=changes.get("physical_offset", store.end_pos + 48),
        sys_flag=sys_flag,
        store_timestamp_ms=1000 + number,
    )
    store.add(1, encode_record(message))


def offsets(parts: Any) -> dict[tuple[str, int], int]:
    return {key: queue.max_offset for key, queue in parts.queues.items()}


def files(directory: str) -> dict[str, bytes]:
    found = {}
    for path, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(path, name), "rb") as file:
                found[os.path.relpath(os.path.join(path, name), directory)] = file.read()
    return found


def test_only_committed_entries_reach_the_queues(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for number in range(3):
            add(parts, 0, number)
        parts.ledger.commit(1)
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 1)
        assert offsets(parts) == {("t", 0): 2}
        assert parts.dispatcher.last_store_timestamp_ms == 1001
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 2)
        assert offsets(parts) == {("t", 0): 3}
        await parts.stop()

    asyncio.run(main())


def test_no_ops_half_messages_and_rollbacks_enter_no_queue(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        parts.ledger.store.add(1, b"", is_message=False)
        add(parts, 0, 0, sys_flag=4)
        add(parts, 0, 0, sys_flag=12)
        add(parts, 0, 0, sys_flag=8)
        add(parts, 0, 1)
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 4)
        units = parts.queues.find("t", 0).read(0, 10)
        assert [unit.physical_offset for unit in units] == [
            parts.ledger.store.get(3).body_pos,
            parts.ledger.store.get(4).body_pos,
        ]
        await parts.stop()

    asyncio.run(main())


def test_waiters_are_woken_at_their_index_and_not_before(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for number in range(4):
            add(parts, 0, number)
        late, early = parts.dispatcher.wait_for(3), parts.dispatcher.wait_for(1)
        assert parts.dispatcher.wait_for(-1) is None
        parts.ledger.commit(1)
        await asyncio.wait_for(early, 5)
        assert not late.done()
        parts.ledger.commit()
        await asyncio.wait_for(late, 5)
        assert parts.dispatcher.wait_for(3) is None
        await parts.stop()

    asyncio.run(main())


def test_waiters_are_bounded_and_abandoned_ones_make_room(make_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(dispatcher_module, "MAX_WAITERS", 3)
        parts = make_parts()
        await parts.start(master=False)
        waiting = [parts.dispatcher.wait_for(9) for _ in range(3)]
        with pytest.raises(DispatchFailed, match="3 requests wait"):
            parts.dispatcher.wait_for(9)
        waiting[0].cancel()
        assert parts.dispatcher.wait_for(9) is not None
        await parts.stop()
        with pytest.raises(DispatchFailed, match="shutting down"):
            await waiting[1]

    asyncio.run(main())


def test_dispatch_yields_to_the_event_loop_between_portions(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for number in range(1000):
            add(parts, number % 3, number // 3)
        seen = []

        def note_index() -> None:
            seen.append(parts.dispatcher.dispatched_index)
            if seen[-1] < 999:
                asyncio.get_running_loop().call_soon(note_index)

        parts.ledger.commit()
        note_index()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 999)
        assert 255 in seen and 511 in seen
        await parts.stop()

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [True, False])
def test_dispatch_continues_after_a_restart_and_rebuilds_deleted_queues(
    make_parts: Any, helpers: Any, orderly: bool
) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        queue_dir = f"{parts.data_dir}/consumequeue"
        for number in range(40):
            add(parts, number % 2, number // 2)
        parts.ledger.commit(29)
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 29)
        if orderly:
            await parts.stop()
        again = make_parts(parts.ledger)
        await again.start(master=False)
        assert again.dispatcher.dispatched_index == (29 if orderly else -1)
        again.ledger.commit()
        await helpers.until(lambda: again.dispatcher.dispatched_index == 39)
        assert offsets(again) == {("t", 0): 20, ("t", 1): 20}
        await again.stop()
        expected = files(queue_dir)
        assert sum(map(len, expected.values())) == 40 * 20

        shutil.rmtree(queue_dir)
        rebuilt = make_parts(parts.ledger)
        await rebuilt.start(master=False)
        await helpers.until(lambda: rebuilt.dispatcher.dispatched_index == 39)
        await rebuilt.stop()
        assert files(queue_dir) == expected
        assert rebuilt.dispatcher.repeated_total == again.dispatcher.repeated_total == 0

    asyncio.run(main())


def test_queues_of_a_log_that_lost_its_tail_are_rebuilt(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for number in range(10):
            add(parts, 0, number)
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 9)
        await parts.stop()
        store = parts.ledger.store
        del store.entries[6:]
        store.end_pos = store.entries[-1].body_pos + len(store.entries[-1].body)
        parts.ledger.commit()
        again = make_parts(parts.ledger)
        await again.start(master=False)
        await helpers.until(lambda: again.dispatcher.dispatched_index == 5)
        assert offsets(again) == {("t", 0): 6}
        await again.stop()

    asyncio.run(main())


def test_queues_begin_with_the_first_message_that_the_log_still_has(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        parts.ledger.store.ledger_begin_index = 100
        for number in (50, 51, 52):
            add(parts, 0, number)
        parts.ledger.commit()
        await parts.start(master=False)
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 102)
        queue = parts.queues.find("t", 0)
        assert (queue.min_offset, queue.max_offset) == (50, 53)
        await parts.stop()

    asyncio.run(main())


def test_a_repeated_queue_offset_is_counted_and_changes_nothing(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for number in (0, 1, 1, 2):
            add(parts, 0, number)
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 3)
        assert parts.dispatcher.repeated_total == 1
        units = parts.queues.find("t", 0).read(0, 10)
        assert [unit.physical_offset for unit in units] == [
            parts.ledger.store.get(index).body_pos for index in (0, 1, 3)
        ]
        await parts.stop()

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["flipped bit", "gap", "wrong place", "no record", "unreadable", "bad topic"])
def test_damage_stops_dispatch_and_is_named(make_parts: Any, helpers: Any, damage: str) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        store = parts.ledger.store
        add(parts, 0, 0)
        add(
            parts,
            0,
            7 if damage == "gap" else 1,
            topic="../x" if damage == "bad topic" else "t",
            **({"physical_offset": 1} if damage == "wrong place" else {}),
        )
        add(parts, 0, 2)
        if damage == "flipped bit":
            store.entries[1].body = store.entries[1].body[:88] + b"\xff" + store.entries[1].body[89:]
        elif damage == "no record":
            store.entries[1].body = b"garbage"
        elif damage == "unreadable":
            store.entries[1] = None
        waiter = parts.dispatcher.wait_for(2)
        store.committed_index = 2
        parts.dispatcher.notify()
        await asyncio.wait_for(parts.dispatcher.failed.wait(), 5)
        assert parts.dispatcher.dispatched_index == 0
        assert offsets(parts)["t", 0] == 1
        assert "log entry 1:" in str(parts.dispatcher.failure)
        for fails in (lambda: waiter.result(), lambda: parts.dispatcher.wait_for(0)):
            with pytest.raises(DispatchFailed, match="log entry 1"):
                fails()
        await parts.stop()

    asyncio.run(main())


def test_dispatch_retries_a_failed_read(make_parts: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(dispatcher_module, "RETRY_INTERVAL_S", 0.01)
        parts = make_parts()
        await parts.start(master=False)
        for number in range(3):
            add(parts, 0, number)
        failures = [OSError(5, "Input/output error")] * 2
        get = parts.ledger.store.get

        def flaky(index: int) -> Any:
            if index == 1 and failures:
                raise failures.pop()
            return get(index)

        monkeypatch.setattr(parts.ledger.store, "get", flaky)
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 2)
        assert not failures and parts.dispatcher.failure is None
        assert offsets(parts) == {("t", 0): 3}
        await parts.stop()

    asyncio.run(main())


def test_damage_reported_by_the_log_stops_dispatch(make_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        add(parts, 0, 0)

        def damaged(index: int) -> Any:
            raise OSError(errno.EBADMSG, "data/000 is damaged at byte 7")

        monkeypatch.setattr(parts.ledger.store, "get", damaged)
        parts.ledger.commit()
        await asyncio.wait_for(parts.dispatcher.failed.wait(), 5)
        assert "damaged at byte 7" in str(parts.dispatcher.failure)
        await parts.stop()

    asyncio.run(main())


def test_dispatch_waits_for_the_disk_when_too_much_is_unflushed(
    make_parts: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(dispatcher_module, "PORTION_ENTRIES", 10)
        monkeypatch.setattr(dispatcher_module, "URGENT_UNFLUSHED_BYTES", 100 * 24)
        monkeypatch.setattr(dispatcher_module, "MAX_UNFLUSHED_BYTES", 100 * 24)
        parts = make_parts()
        await parts.start(master=False)
        seen = []
        flush = parts.queues.checkpoint

        async def slow(mark: Any, *more: Any) -> None:
            for _ in range(50):
                await asyncio.sleep(0)
                seen.append(parts.queues.unflushed_bytes)
            await flush(mark, *more)

        monkeypatch.setattr(parts.queues, "checkpoint", slow)
        for number in range(1000):
            add(parts, 0, number)
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 999)
        assert max(seen) == 100 * 24
        await parts.stop()

    asyncio.run(main())


@pytest.mark.mechanism("Reput dispatch (confirmOffset if duplication)")
def test_nothing_is_dispatched_before_the_queues_are_restored(make_parts: Any, monkeypatch: Any) -> None:
    """The log reports progress while it recovers; entries dispatched then would enter queues twice."""

    async def scenario() -> None:
        parts = make_parts()
        await parts.start()
        for number in range(5):
            record = batch_of_one(topic="t", queue_id=0, body=b"%d" % number)
            await parts.store.put_one(record).committed
        await parts.stop()
        again = make_parts(parts.ledger)
        restore = again.queues.restore

        async def slowly(is_in_log: Any) -> Any:
            again.dispatcher.notify()
            await asyncio.sleep(0.01)
            assert again.dispatcher.dispatched_index == -1
            return await restore(is_in_log)

        monkeypatch.setattr(again.queues, "restore", slowly)
        again.dispatcher.notify()
        await asyncio.sleep(0)
        await again.dispatcher.start()
        await asyncio.sleep(0.01)
        assert again.dispatcher.dispatched_index == parts.ledger.store.committed_index
        assert again.dispatcher.repeated_total == 0
        assert again.queues.find("t", 0).max_offset == 5
        await again.stop()

    asyncio.run(scenario())


def test_dispatch_pauses_while_the_log_is_truncated_and_drops_removed_entries(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for number in range(4):
            add(parts, 0, number)
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 3)
        parts.dispatcher.pause()
        add(parts, 1, 0)
        parts.ledger.commit()
        await asyncio.sleep(0.01)
        assert parts.dispatcher.dispatched_index == 3, "a log that is being truncated is not read"
        del parts.ledger.store.entries[2:]
        parts.ledger.store.end_pos = parts.ledger.store.entries[-1].body_pos + len(parts.ledger.store.entries[-1].body)
        parts.ledger.store.committed_index = 1
        await parts.dispatcher.resume()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 1)
        assert offsets(parts) == {("t", 0): 2}
        add(parts, 0, 2)
        parts.ledger.commit()
        await helpers.until(lambda: offsets(parts) == {("t", 0): 3})
        assert parts.dispatcher.failure is None
        await parts.stop()

    asyncio.run(main())


def test_checkpoints_continue_after_an_error_in_a_derivation(
    make_parts: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without checkpoints, dispatch would silently stop once too much waits for one."""
    monkeypatch.setattr(dispatcher_module, "CHECKPOINT_INTERVAL_S", 0.02)
    failures = 1

    class Derived:
        def dispatch(self, record: Any) -> None: ...

        def dispatch_batch(self, batch: Any) -> None: ...

        def snapshot(self) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise RuntimeError("an error of its own")
            return {}

        def restore(self, state: Any) -> None: ...

        async def flush(self) -> None: ...

    async def main() -> None:
        parts = make_parts()
        dispatcher = dispatcher_module.Dispatcher(
            parts.ledger.store, parts.queues, on_arrival=parts.holds.wake, derivations={"derived": Derived()}
        )
        parts.ledger.add_commit_listener(dispatcher.notify)
        await dispatcher.start()
        add(parts, 0, 0)
        parts.ledger.commit()
        await helpers.until(lambda: dispatcher.checkpointed_index == 0)
        assert "an error of its own" in caplog.text
        await dispatcher.stop()

    asyncio.run(main())


def test_a_checkpoint_excludes_the_entry_at_which_dispatch_failed(make_parts: Any, helpers: Any) -> None:
    """Its unit is in the queue, its derived state may not exist; a restart must create both."""

    class Derived:
        fails = True
        seen = 0

        def dispatch(self, record: Any) -> None:
            if self.fails and record.queue_offset == 1:
                raise RuntimeError("an error of its own")
            self.seen += 1

        def dispatch_batch(self, batch: Any) -> None: ...

        def snapshot(self) -> Any:
            return self.seen

        def restore(self, state: Any) -> None:
            self.seen = state or 0

        async def flush(self) -> None: ...

    async def main() -> None:
        parts, derived = make_parts(), Derived()
        for _ in range(2):
            dispatcher = dispatcher_module.Dispatcher(
                parts.ledger.store, parts.queues, on_arrival=parts.holds.wake, derivations={"derived": derived}
            )
            parts.ledger.add_commit_listener(dispatcher.notify)
            await dispatcher.start()
            if derived.fails:
                add(parts, 0, 0)
                add(parts, 0, 1)
                parts.ledger.commit()
                await asyncio.wait_for(dispatcher.failed.wait(), 5)
            else:
                await helpers.until(lambda: dispatcher.dispatched_index == 1)  # noqa: B023
            await dispatcher.stop()
            derived.fails = False
        assert (derived.seen, dispatcher.repeated_total, offsets(parts)) == (2, 0, {("t", 0): 2})

    asyncio.run(main())


@pytest.mark.parametrize("where", ["derivation", "arrival"])
def test_an_unexpected_error_is_logged_and_leaves_no_reader_waiting(
    make_parts: Any, helpers: Any, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """An error in a derivation ends dispatch, and so the broker; one in the arrival callback ends nothing."""

    class Derived:
        def dispatch(self, record: Any) -> None:
            if where == "derivation":
                raise RuntimeError("an error of its own")

        dispatch_batch = dispatch

        def snapshot(self) -> Any:
            return {}

        def restore(self, state: Any) -> None: ...

        async def flush(self) -> None: ...

    def arrived(queues: Any) -> None:
        raise RuntimeError("an error of its own")

    async def main() -> None:
        parts = make_parts()
        dispatcher = dispatcher_module.Dispatcher(
            parts.ledger.store,
            parts.queues,
            on_arrival=arrived if where == "arrival" else parts.holds.wake,
            derivations={"derived": Derived()},
        )
        parts.ledger.add_commit_listener(dispatcher.notify)
        await dispatcher.start()
        waiting = dispatcher.wait_for(0)
        add(parts, 0, 0)
        parts.ledger.commit()
        if where == "arrival":
            await asyncio.wait_for(waiting, 5)
            assert dispatcher.failure is None
        else:
            with pytest.raises(DispatchFailed, match="an error of its own"):
                await asyncio.wait_for(waiting, 5)
            assert dispatcher.failed.is_set()
        assert "an error of its own" in caplog.text
        await dispatcher.stop()

    asyncio.run(main())
