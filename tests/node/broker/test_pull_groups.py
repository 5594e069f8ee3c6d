"""Pulls over the network: sizes of replies from memory and disk, redirection to slaves, permissions of groups."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from node.store.record import decode_records


def test_replies_from_the_disk_are_smaller(run_case: Any) -> None:
    """R: 32 messages and 256 KB from memory, 8 and 64 KB from the disk."""

    async def pulled(case: Any, offset: int = 0, **fields: Any) -> list[bytes]:
        reply = await case.pull(offset, **fields)
        return [message.body for message in decode_records(reply.body)]

    async def from_disk(case: Any) -> None:
        for number in range(20):
            await case.send(b"%d" % number)
        assert await pulled(case) == [b"%d" % number for number in range(8)]
        assert await pulled(case, maxMsgNums=3) == [b"0", b"1", b"2"]
        assert len(await pulled(case, 15)) == 5
        for _ in range(4):
            await case.send(b"x" * 30_000, queue_id=1)
        assert len(await pulled(case, queue_id=1)) == 2
        await case.send(b"x" * 100_000, queue_id=1)
        await case.send(b"y", queue_id=1)
        assert await pulled(case, 4, queue_id=1) == [b"x" * 100_000], "one message is returned however large it is"

    run_case(from_disk, **{"limits.in_memory_percent": "0"})


def test_replies_from_memory_are_larger(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number in range(40):
            await case.send(b"%d" % number)
        assert len(decode_records((await case.pull(0)).body)) == 32
        for _ in range(12):
            await case.send(b"x" * 30_000, queue_id=1)
        assert len(decode_records((await case.pull(0, queue_id=1)).body)) == 8

    run_case(scenario)


REDIRECT_MECHANISM = "Slave redirect on backlog"


@pytest.mark.mechanism(REDIRECT_MECHANISM)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_consumer_that_lags_beyond_memory_is_redirected_to_a_slave(run_case: Any, enabled: bool) -> None:
    """No memory is counted, so all but the newest message are taken to be on disk."""

    async def scenario(case: Any) -> None:
        for _ in range(3):
            await case.send(b"x" * 100)
        group = {"groupName": "g", "whichBrokerWhenConsumeSlowly": 2}
        assert (await case.ask(200, body=json.dumps(group).encode())).code == 0
        reply = await case.pull(0, maxMsgNums=1, consumerGroup="g", sysFlag=4)
        assert reply.ext_fields["suggestWhichBrokerId"] == ("2" if enabled else "0")
        reply = await case.pull(0, maxMsgNums=1, consumerGroup="other", sysFlag=4)
        assert reply.ext_fields["suggestWhichBrokerId"] == ("1" if enabled else "0")
        assert (await case.pull(3)).ext_fields["suggestWhichBrokerId"] == "0", "there is nothing to read"

    changes = {"limits.in_memory_percent": "0", "slave_read_enable": "true" if enabled else "false"}
    run_case(scenario, **changes)


@pytest.mark.mechanism(REDIRECT_MECHANISM)
def test_a_consumer_that_keeps_up_stays_at_the_master(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send(b"x")
        assert (await case.pull(0)).ext_fields["suggestWhichBrokerId"] == "0"

    run_case(scenario, slave_read_enable="true")


REVOCATIONS = {
    "the topic": (17, {"topic": "t", "readQueueNums": 4, "writeQueueNums": 4, "perm": 2}, b"", 16),
    "a queue": (17, {"topic": "t", "readQueueNums": 1, "writeQueueNums": 4, "perm": 6}, b"", 1),
    "the group": (200, {}, json.dumps({"groupName": "g", "consumeEnable": False}).encode(), 16),
    "the broker": (25, {}, b"brokerPermission=2", 16),
}


@pytest.mark.parametrize("what", REVOCATIONS)
@pytest.mark.parametrize("code", [11, 200_050])
def test_a_held_request_is_refused_once_it_may_no_longer_read_the_queue(
    run_case: Any, helpers: Any, code: int, what: str
) -> None:
    """The next message wakes the held request, which is then checked like a new one."""
    pull = {"queueId": 1, "queueOffset": 0, "sysFlag": 6, "suspendTimeoutMillis": 10_000, "subscription": "*"}
    pop = {"queueId": 1, "maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": 10_000, "bornTime": 0, "initMode": 1}

    async def scenario(case: Any) -> None:
        fields = {"consumerGroup": "g", "topic": "t", **(pull if code == 11 else pop)}
        waiting = asyncio.create_task(case.ask(code, fields))
        await helpers.until(lambda: case.broker._holds.count == 1)
        change, options, body, expected = REVOCATIONS[what]
        assert (await case.ask(change, options, body)).code == 0
        assert (await case.send(b"x", queue_id=1)).code == 0
        reply = await waiting
        assert (reply.code, reply.body) == (expected if what != "a queue" or code == 11 else 29, b"")

    run_case(scenario)


def test_a_group_may_be_denied_broadcast_consumption(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        group = {"groupName": "g", "consumeBroadcastEnable": False}
        assert (await case.ask(200, body=json.dumps(group).encode())).code == 0
        for model, code in (("CLUSTERING", 19), ("BROADCASTING", 16)):
            consumer = {"groupName": "g", "messageModel": model, "subscriptionDataSet": [{"topic": "t"}]}
            beat = {"clientID": "c", "consumerDataSet": [consumer]}
            assert (await case.ask(34, body=json.dumps(beat).encode())).code == 0
            assert (await case.pull(0, consumerGroup="g", sysFlag=4)).code == code

    run_case(scenario)


def test_pulls_without_a_subscription_use_that_of_the_heartbeat(run_case: Any) -> None:
    """Codes 24, 25 and 26 of section 3: no subscription, not the latest, no such group."""

    async def scenario(case: Any) -> None:
        await case.ask(310, {"b": "t", "e": 0, "i": "TAGS\x01a\x02"}, b"a")
        await case.ask(310, {"b": "t", "e": 0, "i": "TAGS\x01b\x02"}, b"b")
        assert (await case.pull(0, consumerGroup="unknown")).code == 26
        assert (await case.ask(36, {"offset": 0, "group": "unknown"})).code == 26
        group = {"groupName": "g"}
        assert (await case.ask(200, body=json.dumps(group).encode())).code == 0
        assert (await case.pull(0, consumerGroup="g")).code == 24
        subscription = {"topic": "t", "subString": "b", "subVersion": 7}
        beat = {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [subscription]}]}
        assert (await case.ask(34, body=json.dumps(beat).encode())).code == 0
        assert (await case.pull(0, consumerGroup="g", subVersion=8)).code == 25
        reply = await case.pull(0, consumerGroup="g", subVersion=7)
        assert [message.body for message in decode_records(reply.body)] == [b"b"]

    run_case(scenario, auto_create_groups="false")
