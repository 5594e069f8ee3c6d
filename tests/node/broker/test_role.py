"""The role switch: promotion waits, demotion does not, and queue offsets are never reused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.broker.ledger import Role
from node.broker.message_store import NotWritable
from node.store.record import decode_record
from node.store.record_batch import batch_of_one


def put(parts: Any, queue_id: int = 0) -> Any:
    return parts.store.put_one(batch_of_one(topic="t", queue_id=queue_id, body=b"x"))


def test_a_new_broker_is_a_slave_and_reports_it(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        await helpers.until(lambda: parts.changes == [False])
        with pytest.raises(NotWritable):
            put(parts)
        await parts.stop()

    asyncio.run(main())


@pytest.mark.mechanism("LEADER → changeToMaster")
def test_promotion_waits_until_the_old_log_is_committed_and_dispatched(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start()
        parts.ledger.commit_by_hand = True
        for _ in range(3):
            put(parts)
        parts.ledger.become(Role.FOLLOWER, 2)
        parts.ledger.become(Role.LEADER, 3)
        assert not parts.store.is_master
        parts.ledger.commit(3)
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 3)
        assert not parts.store.is_master
        parts.ledger.commit()
        await helpers.until(lambda: parts.store.is_master)
        assert put(parts).queue_offset == 3
        await parts.stop()

    asyncio.run(main())


def test_role_changes_are_handled_after_an_error_in_the_callback(
    make_parts: Any, helpers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        parts = make_parts()
        failures = iter([RuntimeError("an error of its own")])

        def changed() -> None:
            for failure in failures:
                raise failure

        parts.roles._on_changed = changed
        await parts.start(master=False)
        await helpers.until(lambda: "an error of its own" in caplog.text)
        parts.ledger.become(Role.LEADER, 1)
        await helpers.until(lambda: parts.store.is_master)
        await parts.stop()

    asyncio.run(main())


def test_a_leader_with_an_empty_log_is_promoted_at_once(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        parts.ledger.become(Role.LEADER, 1, noop=False)
        await helpers.until(lambda: parts.store.is_master)
        assert put(parts).queue_offset == 0
        await parts.stop()

    asyncio.run(main())


@pytest.mark.mechanism("CANDIDATE/FOLLOWER → changeToSlave")
def test_demotion_takes_effect_immediately(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start()
        parts.ledger.become(Role.CANDIDATE, 1)
        assert not parts.store.is_master
        with pytest.raises(NotWritable):
            put(parts)
        await parts.stop()

    asyncio.run(main())


def test_sends_are_refused_after_an_unreported_change_of_term(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start()
        parts.ledger.member_state.term = 2
        with pytest.raises(NotWritable):
            put(parts)
        await parts.stop()

    asyncio.run(main())


@pytest.mark.mechanism("LEADER → changeToMaster")
def test_queue_offsets_continue_after_those_of_another_master(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start()
        for _ in range(2):
            put(parts)
        parts.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        store = parts.ledger.store
        for number in (2, 3, 4):
            batch = batch_of_one(topic="t", queue_id=0, body=b"other")
            (record,) = batch.records((store.end_pos + 48,), queue_offset=number, store_timestamp_ms=1)
            store.add(2, record)
        parts.ledger.commit()
        parts.ledger.become(Role.LEADER, 3)
        await helpers.until(lambda: parts.store.is_master)
        put(parts)
        numbers = [decode_record(e.body)[0].queue_offset for e in store.entries if e.is_message]
        assert numbers == [0, 1, 2, 3, 4, 5]
        await parts.stop()

    asyncio.run(main())


@pytest.mark.mechanism("Role handler, single-thread queue")
def test_rapid_role_changes_end_in_the_last_role(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        for term in range(1, 50):
            parts.ledger.become(Role.LEADER, term)
            if term % 3 == 0:
                await asyncio.sleep(0)
            parts.ledger.become(Role.CANDIDATE, term)
            parts.ledger.become(Role.FOLLOWER, term, leader_id="n2")
        await helpers.until(lambda: parts.changes and parts.changes[-1] is False)
        assert not parts.store.is_master
        parts.ledger.become(Role.LEADER, 50)
        await helpers.until(lambda: parts.store.is_master and parts.changes[-1])
        await parts.stop()
        assert not parts.store.is_master

    asyncio.run(main())


@pytest.mark.mechanism("LEADER → changeToMaster")
def test_a_leader_that_is_deposed_while_waiting_stays_slave(make_parts: Any, helpers: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=False)
        parts.ledger.commit_by_hand = True
        parts.ledger.become(Role.LEADER, 1)
        await asyncio.sleep(0.01)
        parts.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        parts.ledger.commit()
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 0 and len(parts.changes) > 0)
        await asyncio.sleep(0.01)
        assert not parts.store.is_master and True not in parts.changes
        await parts.stop()

    asyncio.run(main())
