"""The answers that senders get, and the slave reports that count: GroupTransferService, isSlaveOK, put statuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.ha import group_transfer as module
from node.ha.group_transfer import GroupTransferService

TRANSFER_MECHANISM = "GroupTransferService / WaitNotifyObject"
OK_MECHANISM = "isSlaveOK"
SYNC = ("SYNC_MASTER", "SLAVE")
NOT_AVAILABLE, TIMED_OUT = 11, 12


async def send_and_check(group: Any, code: int, number: int, **fields: Any) -> None:
    """Send a message; one that is not replicated in time is answered like any other, but for the code (S1)."""
    reply = await group.send(b"m%d" % number, **fields)
    assert (reply.code, reply.ext_fields["queueOffset"]) == (code, str(number)), reply.remark
    assert len(reply.ext_fields["msgId"]) == 32


@pytest.mark.mechanism(TRANSFER_MECHANISM)
@given(data=st.data(), positions=st.lists(st.integers(0, 100), max_size=30))
def test_a_report_releases_what_it_covers_and_nothing_else(data: st.DataObject, positions: list[int]) -> None:
    async def main() -> None:
        transfers = GroupTransferService(timeout_s=1000)
        waiting = [(position, transfers.wait_for(position)) for position in sorted(positions)]
        best = -1
        for report in data.draw(st.lists(st.integers(0, 100), max_size=10)):
            best = max(best, report)
            transfers.confirmed(report)
            for position, transferred in waiting:
                assert transferred.done() == (position <= best)
        transfers.close()
        assert [transferred.result() for _, transferred in waiting] == [position <= best for position, _ in waiting]

    asyncio.run(main())


@pytest.mark.mechanism(TRANSFER_MECHANISM)
def test_a_sync_master_answers_once_a_slave_has_the_message(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        bodies = await group.fill(20)
        assert group.ledger("n2").log.committed_position == group.ledger("n1").log.end_position
        assert group.ledger("n1").transfers.waiting_count == 0
        group.power_fail("n2")
        await group.start("n2", "SLAVE", "slave_read_enable=true")
        assert await group.bodies("n2") == bodies, "what a slave reports is as safe as its flush mode"

    ha(scenario, roles=SYNC)


@pytest.mark.mechanism(TRANSFER_MECHANISM)
def test_a_send_is_answered_with_a_timeout_if_no_slave_reports_in_time(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await send_and_check(group, 0, 0)
        group.hosts["n2"].pause()
        began_s = group.loop.time()
        await send_and_check(group, TIMED_OUT, 1)
        assert 2.99 < group.loop.time() - began_s < 3.1
        await send_and_check(group, 0, 2, i="WAIT\x01false\x02")
        group.hosts["n2"].resume()
        await send_and_check(group, 0, 3)

    ha(scenario, "slave_read_enable=true", roles=SYNC)


def test_slave_timeout_ms_sets_how_long_a_send_waits_for_slaves(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        group.hosts["n2"].pause()
        began_s = group.loop.time()
        await send_and_check(group, TIMED_OUT, 0)
        assert 4.99 < group.loop.time() - began_s < 5.1

    ha(scenario, "classic.slave_timeout_ms=5000", roles=SYNC)


@pytest.mark.mechanism(OK_MECHANISM)
def test_without_a_slave_a_message_is_stored_and_answered_as_not_available(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await send_and_check(group, 0, 0)
        group.kill("n2")
        await group.until(lambda: group.ledger("n1").service.connection_count == 0)
        began_s = group.loop.time()
        await send_and_check(group, NOT_AVAILABLE, 1)
        assert group.loop.time() - began_s < 0.1, "a send must not wait for an absent slave"
        assert await group.bodies("n1") == [b"m0", b"m1"]
        await group.start("n2", "SLAVE")
        await group.following("n2")
        await send_and_check(group, 0, 2)

    ha(scenario, roles=SYNC)


@pytest.mark.mechanism(OK_MECHANISM)
def test_a_slave_that_is_far_behind_does_not_count(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(5)
        await group.following("n2")
        group.hosts["n2"].pause()
        tasks = [asyncio.ensure_future(group.send(b"x" * 4000)) for _ in range(10)]
        codes = [(await task).code for task in tasks]
        assert codes[:4] == [TIMED_OUT] * 4 and codes[-4:] == [NOT_AVAILABLE] * 4
        group.hosts["n2"].resume()
        await group.following("n2")
        assert (await group.send(b"near again")).code == 0

    ha(scenario, "classic.ha_slave_fallbehind_max_bytes=20000", roles=SYNC)


@pytest.mark.mechanism(OK_MECHANISM)
def test_a_connection_without_a_request_does_not_count_as_a_slave(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        peer = await group.raw_peer()
        await group.until(lambda: group.ledger("n1").service.connection_count == 1)
        await send_and_check(group, NOT_AVAILABLE, 0)
        await peer.close()

    ha(scenario, roles=("SYNC_MASTER",))


def test_one_of_two_slaves_is_enough(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        group.hosts["n2"].pause()
        for number in range(5):
            await send_and_check(group, 0, number)
        group.hosts["n2"].resume()

    ha(scenario, roles=("SYNC_MASTER", "SLAVE", "SLAVE"))


@pytest.mark.mechanism("ASYNC_MASTER")
def test_an_async_master_waits_for_no_slave_and_may_lose_messages(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await send_and_check(group, 0, 0)
        await group.following("n2")
        await group.cut("n2")
        began_s = group.loop.time()
        await send_and_check(group, 0, 1)
        assert group.loop.time() - began_s < 0.1
        group.power_fail("n1")  # and never restarts
        await group.heal()
        await group.stop("n2")
        await group.start("n2", "ASYNC_MASTER")
        assert await group.bodies("n2") == [b"m0"]

    ha(scenario)


def test_no_acknowledged_message_is_lost_with_a_sync_master(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        bodies = await group.fill(30)
        group.power_fail("n1")  # and never restarts
        await group.stop("n2")
        await group.start("n2", "SYNC_MASTER")
        assert await group.bodies("n2") == bodies

    ha(scenario, "flush_mode=async", roles=SYNC)


@pytest.mark.parametrize("bogus", [1 << 40, -1, -(1 << 62), 0x4745542F20485454])
def test_a_bogus_offset_releases_no_waiting_send(ha: Any, bogus: int) -> None:
    """rocketmq#3015, #1155: the greatest offset ever received counted as confirmed by slaves."""

    async def scenario(group: Any) -> None:
        await send_and_check(group, 0, 0)
        await group.following("n2")
        group.hosts["n2"].pause()
        waiting = asyncio.ensure_future(group.send(b"m1"))
        await asyncio.sleep(0.1)
        asking, reporting = await group.raw_peer(), await group.raw_peer()
        await asking.report(bogus)
        await reporting.report(1)
        assert (await reporting.frame()) is not None
        await reporting.report(bogus)
        assert (await waiting).code == TIMED_OUT
        assert group.ledger("n1").service.push_to_slave_max_position < group.ledger("n1").log.end_position
        await send_and_check(group, TIMED_OUT, 2)
        while (frame := await asking.frame()) is not None:
            assert frame[1] == b""
        while await reporting.frame() is not None:
            pass
        group.hosts["n2"].resume()
        await send_and_check(group, 0, 3)
        assert "closing" in group.lines("n1") and "refused" in group.lines("n1")

    ha(scenario, roles=SYNC)


def test_a_slaves_request_acknowledges_nothing(ha: Any) -> None:
    """A slave that has just connected is compared first; until then it confirms nothing."""

    async def scenario(group: Any) -> None:
        await group.fill(10)
        group.power_fail("n2")
        group.kill("n1")
        await group.start("n1", "SYNC_MASTER")
        peer = await group.raw_peer()
        await peer.report(group.ledger("n1").log.end_position)
        assert await peer.frame() == (group.ledger("n1").log.end_position, b"")
        assert group.ledger("n1").service.push_to_slave_max_position == 0
        await send_and_check(group, TIMED_OUT, 10)

    ha(scenario, roles=SYNC)


def test_a_slave_does_not_report_what_is_not_durable(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await send_and_check(group, 0, 0)
        disk = group.hosts["n2"].disk
        disk.stall(("sync",))
        await send_and_check(group, TIMED_OUT, 1)
        disk.unstall(("sync",))
        await send_and_check(group, 0, 2)

    ha(scenario, roles=SYNC)


def test_sends_above_the_limit_on_waiting_ones_are_refused_and_not_stored(ha: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)

    async def scenario(group: Any) -> None:
        group.hosts["n2"].pause()
        tasks = [asyncio.ensure_future(group.send(b"x")) for _ in range(6)]
        codes = sorted([(await task).code for task in tasks])
        assert codes == [2, 2, 2, TIMED_OUT, TIMED_OUT, TIMED_OUT]
        assert len(await group.bodies("n1")) == 3

    ha(scenario, roles=SYNC)


def test_a_disk_error_is_answered_without_waiting_for_slaves(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await send_and_check(group, 0, 0)
        group.hosts["n1"].disk.fail("sync")
        began_s = group.loop.time()
        assert (await group.send(b"m1")).code == 1, "the outcome is unknown"
        assert group.loop.time() - began_s < 0.5
        assert (await group.send(b"m2")).code == 2, "refused before anything was stored"
        group.hosts["n1"].disk.heal()
        await asyncio.sleep(3)
        assert (await group.send(b"m3")).code == 0
        assert await group.bodies("n1") == [b"m0", b"m1", b"m3"]
        await group.following("n2")

    ha(scenario, roles=SYNC)


@pytest.mark.mechanism("END reply: 10/11/12-type put statuses count as SUCCESS")
def test_committing_a_transaction_without_a_slave_succeeds(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        group.kill("n2")
        await group.until(lambda: group.ledger("n1").service.connection_count == 0)
        half = await group.send(b"half", i="TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01u\x02")
        assert half.code == NOT_AVAILABLE
        offset = int(half.ext_fields["msgId"][16:], 16)
        end = await group.ask(
            "n1", 37,
            {
                "producerGroup": "p", "tranStateTableOffset": half.ext_fields["queueOffset"],
                "commitLogOffset": offset, "commitOrRollback": 8,
            },
        )  # fmt: skip
        assert end.code == 0
        assert await group.bodies("n1") == [b"half"]

    ha(scenario, roles=SYNC)
