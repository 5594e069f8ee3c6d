"""The broker as its clients see it, on a real socket, with a fake log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from node.broker.ledger import Role
from node.remoting import Command, RemotingServer
from node.store.record import decode_records


@pytest.fixture
def run(run_case: Any) -> Callable[..., None]:
    return run_case  # type: ignore[no-any-return]


def test_a_message_is_pulled_byte_for_byte_as_sent(run: Any) -> None:
    async def scenario(case: Any) -> None:
        body = bytes(range(256)) * 40
        sent = await case.send(body, queue_id=1)
        assert (sent.code, sent.ext_fields["queueOffset"]) == (0, "0")
        pulled = await case.pull(queue_id=1)
        (message,) = decode_records(pulled.body)
        assert message.body == body
        assert message.message_id == sent.ext_fields["msgId"]
        assert message.store_host == f"127.0.0.1:{case.broker.port}"

    run(scenario)


def test_minimum_and_maximum_offsets_are_reported_by_queue(run: Any) -> None:
    async def scenario(case: Any) -> None:
        for _ in range(3):
            await case.send()
        for code, queue_id, offset in ((30, 0, "3"), (31, 0, "0"), (30, 1, "0"), (31, 1, "0")):
            reply = await case.ask(code, {"topic": "t", "queueId": queue_id})
            assert (reply.code, reply.ext_fields) == (0, {"offset": offset})

    run(scenario)


def test_a_slave_refuses_requests_and_names_the_leader(run: Any) -> None:
    async def scenario(case: Any) -> None:
        for leader, hint in (
            (None, "NOT_LEADER leader=- addr=-"),
            ("n2", "NOT_LEADER leader=n2 addr=192.0.2.2:10911"),
            ("n3", f"NOT_READY leader=n3 addr=127.0.0.1:{case.broker.port}"),
        ):
            case.ledger.member_state.leader_id = leader
            for reply in (
                await case.send(),
                await case.pull(),
                await case.ask(30, {"topic": "t", "queueId": 0}),
            ):
                assert (reply.code, reply.remark) == (14, hint)

    run(scenario, master=False)


def test_a_slave_answers_unsafe_reads(run: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send(b"kept")
        case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        assert (await case.send()).code == 14
        (message,) = decode_records((await case.pull()).body)
        assert message.body == b"kept"

    run(scenario, read_mode="unsafe")


def test_a_long_poll_ends_when_the_lead_is_lost(run: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        held = asyncio.ensure_future(case.pull(sysFlag=2, suspendTimeoutMillis=30_000))
        await helpers.until(lambda: case.broker.runtime_table()["heldPulls"] == 1)
        assert (await case.send(queue_id=1)).code == 0  # answered past the held pull, on the same connection
        case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        assert (await held).code == 14

    run(scenario)


@pytest.mark.mechanism("Multiplexing by opaque")
def test_a_long_poll_is_answered_by_the_message_it_waits_for(run: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        held = asyncio.ensure_future(case.pull(sysFlag=2, suspendTimeoutMillis=30_000))
        await helpers.until(lambda: case.broker.runtime_table()["heldPulls"] == 1)
        await case.send(b"awaited")
        (message,) = decode_records((await held).body)
        assert message.body == b"awaited"

    run(scenario)


def test_a_shutdown_answers_held_pulls_and_pending_sends(run: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        case.ledger.commit_by_hand = True
        held = asyncio.ensure_future(case.pull(queue_id=1, sysFlag=2, suspendTimeoutMillis=30_000))
        sent = asyncio.ensure_future(case.send())
        await helpers.until(lambda: case.broker.runtime_table()["heldPulls"] == 1)
        await helpers.until(lambda: case.broker.store.put_total == 1)
        stopping = asyncio.ensure_future(case.broker.stop())
        assert (await held).code == 19
        assert (await case.send()).code == 14
        case.ledger.commit()
        assert (await sent).code == 0
        await stopping

    run(scenario)


def test_the_status_reports_role_log_positions_and_counters(run: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send()
        await case.pull()
        table = await case.table()
        expected = {
            "selfId": "n3",
            "brokerRole": "SYNC_MASTER",
            "brokerId": "0",
            "role": "LEADER",
            "term": "1",
            "leaderId": "n3",
            "ledgerBeginIndex": "0",
            "ledgerEndIndex": "1",
            "committedIndex": "1",
            "dispatchedIndex": "1",
            "wallClockMs": "1700000000000",
            "putTotal": "1",
            "putCommittedTotal": "1",
            "getTotal": "1",
            "readMode": "read_index",
            "flushMode": "sync",
            "dispatchFailure": "",
            "dispatchRepeated": "0",
            "topics": "11",
        }
        assert expected.items() <= table.items()
        case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        table = await case.table()
        assert (table["brokerRole"], table["brokerId"], table["role"]) == ("SLAVE", "4", "FOLLOWER")

    run(scenario)


def test_topics_can_be_created_and_are_saved(run: Any, tmp_path: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.send(topic="new")).code == 17
        fields = {"topic": "new", "readQueueNums": 3, "writeQueueNums": 3, "perm": 6, "topicFilterType": "SINGLE_TAG"}
        assert (await case.ask(17, fields)).code == 0
        assert (await case.send(topic="new", queue_id=2)).code == 0
        for wrong in ({"topic": "a/b"}, {"perm": 9}, {"writeQueueNums": 0, "readQueueNums": 0}):
            assert (await case.ask(17, fields | wrong)).code == 1

    run(scenario)
    assert json.loads((tmp_path / "data" / "topics.json").read_text())["topicConfigTable"]["new"]["writeQueueNums"] == 3


def test_unknown_codes_are_unsupported(run: Any) -> None:
    async def scenario(case: Any) -> None:
        for code in (0, 999, 30001):
            assert (await case.ask(code)).code == 3

    run(scenario)


def test_damage_found_by_dispatch_ends_the_broker(run: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send(b"good")
        case.ledger.store.add(1, b"not a record")
        case.ledger.commit()
        reason = await asyncio.wait_for(case.broker.wait_failed(), 5)
        assert "is damaged: log entry 2" in reason
        assert (await case.pull()).code == 1
        assert "log entry 2" in (await case.table())["dispatchFailure"]

    run(scenario)


def test_every_role_change_is_registered_at_the_name_server(helpers: Any, new_broker: Any) -> None:
    seen: list[dict[str, Any]] = []

    def note(command: Command, connection: object) -> Command:
        topics = json.loads(command.body)["topicConfigSerializeWrapper"] if command.body else {}
        seen.append({"code": command.code, **command.ext_fields, "topics": topics.get("topicConfigTable")})
        return command.reply(0)

    async def main() -> None:
        server = RemotingServer("127.0.0.1", 0)
        for code in (103, 104):
            server.register(code, note)
        await server.start()
        broker, ledger = new_broker(name_servers=f'"127.0.0.1:{server.port}"')
        await broker.start()
        await helpers.until(lambda: len(seen) >= 1)
        ledger.become(Role.LEADER, 5)
        await helpers.until(lambda: seen[-1]["brokerId"] == "0")
        ledger.become(Role.FOLLOWER, 6, leader_id="n2")
        await helpers.until(lambda: seen[-1]["brokerId"] == "4")
        await broker.stop()
        await server.stop()

    asyncio.run(main())
    assert seen[0]["brokerId"] == "4" and seen[0]["dledgerTerm"] == "0"
    assert any(each["brokerId"] == "0" and each["dledgerTerm"] == "5" for each in seen)
    assert seen[-1]["code"] == 104 and seen[-1]["dledgerTerm"] == "6"
    assert seen[0]["topics"]["t"] == {
        "topicName": "t",
        "readQueueNums": 2,
        "writeQueueNums": 2,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }


def test_a_port_in_use_is_reported_before_the_log_or_data_is_touched(new_broker: Any, tmp_path: Any) -> None:
    async def main() -> None:
        taken = RemotingServer("127.0.0.1", 0)
        await taken.start()
        broker, ledger = new_broker(listen=f"127.0.0.1:{taken.port}")
        with pytest.raises(OSError, match=str(taken.port)):
            await broker.start()
        assert not ledger.started and not (tmp_path / "data").exists()
        await taken.stop()

    asyncio.run(main())
