"""Consumer groups as clients use them: heartbeats, lists, changes, locks, offsets, subscription groups."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from node.broker import consumer_offsets, subscription_groups
from node.broker.client_manager import CLIENT_EXPIRY_S, ClientManager
from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.heartbeat import Heartbeat
from node.broker.rebalance_locks import LEASE_S, MessageQueue, RebalanceLocks
from node.remoting import Command, RemotingClient, RequestError


def heartbeat(client_id: str, group: str = "g", *, producers: tuple[str, ...] = (), **subscription: Any) -> bytes:
    consumers = [
        {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [{"topic": "t", "subString": "a", "subVersion": 7, **subscription}],
            "unitMode": False,
        }
    ]
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": name} for name in producers],
        "consumerDataSet": consumers if group else [],
    }
    return json.dumps(body).encode()


class Listener:
    """A second client that records notices of changed groups."""

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self.client = RemotingClient()
        self.changed: list[str] = []
        self.client.register(40, self._note)

    def _note(self, command: Command, connection: Any) -> None:
        self.changed.append(command.ext_fields["consumerGroup"])

    async def ask(self, code: int, fields: dict[str, Any] | None = None, body: bytes = b"") -> Command:
        return await self.client.invoke(self._address, Command.request(code, fields or {}, body), timeout_ms=5000)


def test_repeated_requests_of_clients_are_logged_once_at_most(run_case: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each client of a group whose retry topic cannot be made sends a heartbeat every few seconds, and a producer may
    end a transaction as unknown as often as it likes."""

    async def scenario(case: Any) -> None:
        unknown = {"producerGroup": "p", "commitOrRollback": 0, "commitLogOffset": 0, "tranStateTableOffset": 0}
        for number in range(20):
            assert (await case.ask(34, body=heartbeat("c", f"a@{number}"))).code == 0
            await case.client.send_oneway(f"127.0.0.1:{case.broker.port}", Command.request(37, unknown, oneway=True))
        assert (await case.ask(34, body=heartbeat("c", "g"))).code == 0
        assert caplog.text.count("was not made") == 1 and "does not know" not in caplog.text

    caplog.set_level("INFO")
    run_case(scenario)


@pytest.mark.mechanism("Idle connection close (120 s R)")
def test_consumers_are_listed_and_notified_of_changes_until_they_leave(run_case: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(38, {"consumerGroup": "g"})).code == 1
        first, second = Listener(case.broker.port), Listener(case.broker.port)
        try:
            assert (await first.ask(34, body=heartbeat("c1"))).code == 0
            assert (await second.ask(34, body=heartbeat("c2"))).code == 0
            await helpers.until(lambda: len(first.changed) == 2)
            listed = json.loads((await case.ask(38, {"consumerGroup": "g"})).body)
            assert listed == {"consumerIdList": ["c1", "c2"]}
            before = len(first.changed)
            assert (await first.ask(34, body=heartbeat("c1"))).code == 0
            assert (await first.ask(38, {"consumerGroup": "g"})).code == 0
            assert len(first.changed) == before, "an unchanged heartbeat notifies nobody"
            await second.client.close()
            await helpers.until(lambda: len(first.changed) == before + 1)
            assert json.loads((await case.ask(38, {"consumerGroup": "g"})).body) == {"consumerIdList": ["c1"]}
            assert (await first.ask(35, {"clientID": "c1", "consumerGroup": "g"})).code == 0
            assert (await case.ask(38, {"consumerGroup": "g"})).code == 1
        finally:
            await first.client.close()
            await second.client.close()

    run_case(scenario)


def test_a_heartbeat_creates_the_group_and_its_retry_topic(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(34, body=heartbeat("c1", "orders", producers=("p",)))).code == 0
        topics = json.loads((await case.ask(21)).body)["topicConfigTable"]
        assert topics["%RETRY%orders"]["readQueueNums"] == 1
        groups = json.loads((await case.ask(201)).body)["subscriptionGroupTable"]
        assert groups["orders"]["retryMaxTimes"] == 16
        table = await case.table()
        assert (table["producers"], table["consumers"]) == ("1", "1")

    run_case(scenario)


def test_a_heartbeat_creates_no_group_if_auto_create_groups_is_off(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(34, body=heartbeat("c1"))).code == 0
        assert json.loads((await case.ask(201)).body)["subscriptionGroupTable"] == {}
        assert (await case.pull(consumerGroup="g", sysFlag=4)).code == 26
        made = await case.ask(200, body=json.dumps({"groupName": "g", "consumeEnable": False}).encode())
        assert made.code == 0
        assert (await case.pull(consumerGroup="g", sysFlag=4)).code == 16

    run_case(scenario, auto_create_groups="false")


def test_a_group_change_that_cannot_be_saved_takes_effect_and_the_reply_warns(
    run_case: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_groups, "PERSIST_INTERVAL_S", 1000)

    def kept() -> Any:
        path = tmp_path / "data" / "subscriptionGroup.json"
        return list(json.loads(path.read_text())["subscriptionGroupTable"]) if path.exists() else None

    async def scenario(case: Any) -> None:
        async def fail(path: str, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        change = (200, {}, json.dumps({"groupName": "g", "consumeEnable": False}).encode())
        remove = (207, {"groupName": "g"}, b"")
        steps = ((change, "changed", 0, None, ["g"]), (remove, "removed", 26, ["g"], []))
        for asked, word, code, before, after in steps:
            with monkeypatch.context() as patch:
                patch.setattr(case.broker._runtime.disk, "write_file_atomic", fail)
                reply = await case.ask(*asked)
            wanted = f"the group is {word}, and a restart may forget that: [Errno 28] No space left on device"
            assert (reply.code, reply.remark) == (1, wanted)
            assert ((await case.ask(352, {"group": "g"})).code, kept()) == (code, before)
            assert (await case.ask(*asked)).code == 0
            assert kept() == after, "answered before it is durable"

    run_case(scenario)


def test_a_pull_without_subscription_uses_that_of_the_heartbeat(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.ask(310, {"b": "t", "e": 0, "i": "TAGS\x01a\x02"}, b"wanted")
        await case.ask(310, {"b": "t", "e": 0, "i": "TAGS\x01b\x02"}, b"other")
        assert (await case.pull(consumerGroup="g")).code == 24
        await case.ask(34, body=heartbeat("c1"))
        pulled = await case.pull(consumerGroup="g", subVersion=7)
        assert pulled.code == 0 and b"wanted" in pulled.body and b"other" not in pulled.body
        assert (await case.pull(consumerGroup="g", subVersion=8)).code == 25
        assert (await case.pull(consumerGroup="g", topic="TBW102")).code == 24

    run_case(scenario)


def test_offsets_are_kept_across_a_restart(run_case: Any) -> None:
    place = {"consumerGroup": "g", "topic": "t", "queueId": 1}

    async def commit(case: Any) -> None:
        assert (await case.ask(14, place)).ext_fields == {"offset": "0"}
        assert (await case.ask(15, {**place, "commitOffset": -1})).code == 0
        assert (await case.ask(14, place)).ext_fields == {"offset": "0"}
        assert (await case.ask(15, {**place, "commitOffset": 12})).code == 0
        pulled = await case.pull(queue_id=0, sysFlag=5, consumerGroup="g", commitOffset=3)
        assert pulled.code == 19
        assert json.loads((await case.ask(43)).body) == {"offsetTable": {"t@g": {"1": 12, "0": 3}}}

    async def ask_again(case: Any) -> None:
        assert (await case.ask(14, place)).ext_fields == {"offset": "12"}
        assert (await case.ask(14, {**place, "queueId": 0})).ext_fields == {"offset": "3"}

    run_case(commit)
    run_case(ask_again)


def test_offsets_of_deleted_topics_are_dropped_when_room_is_needed(run_case: Any, monkeypatch: Any) -> None:
    """They are kept in case the topic is created again, but no other offset is refused because of them."""
    monkeypatch.setattr(consumer_offsets, "MAX_CONSUMER_OFFSETS", 6)

    async def scenario(case: Any) -> None:
        async def commit(topic: str, queue_id: int = 0) -> int:
            fields = {"consumerGroup": "g", "topic": topic, "queueId": queue_id, "commitOffset": 7}
            return int((await case.ask(15, fields)).code)

        for name, queues in (("short0", 1), ("short1", 1), ("wide", 9)):
            topic = {"topic": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
            assert (await case.ask(17, topic)).code == 0
        assert [await commit(name) for name in ("short0", "short1")] == [0, 0]
        assert (await case.ask(215, {"topic": "short0"})).code == 0
        assert [await commit("wide", queue_id) for queue_id in range(4)] == [0] * 4
        assert case.broker.offsets.find("g", "short0", 0) == 7
        assert await commit("wide", 4) == 0
        assert [case.broker.offsets.find("g", name, 0) for name in ("short0", "short1")] == [None, 7]
        assert [await commit("wide", queue_id) for queue_id in (5, 4)] == [1, 0]
        assert (await case.ask(215, {"topic": "short1"})).code == 0
        assert [await commit("wide", queue_id) for queue_id in (5, 6)] == [0, 1]

    run_case(scenario)


def test_offsets_are_saved_periodically(tmp_path: Any, helpers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.consumer_offsets.PERSIST_INTERVAL_S", 0.01)

    async def main() -> None:
        path = tmp_path / "consumerOffset.json"
        offsets = ConsumerOffsets(helpers.PlainDisk(), str(path))
        for offset in range(100):
            offsets.commit("g", "t", 0, offset)
        await helpers.until(path.exists)
        other = ConsumerOffsets(helpers.PlainDisk(), str(path))
        other.load()
        assert other.find("g", "t", 0) == 99

    asyncio.run(main())


def test_an_unknown_offset_of_a_queue_that_lost_its_beginning_is_not_found(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send()
        queue = case.broker.queues.find("t", 0)
        queue.min_offset = 1
        assert (await case.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 0})).code == 22

    run_case(scenario)


def test_a_slave_refuses_requests_for_offsets_and_locks(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        place = {"consumerGroup": "g", "topic": "t", "queueId": 1}
        assert (await case.ask(14, place)).code == 14
        assert (await case.ask(15, {**place, "commitOffset": 1})).code == 14
        body = json.dumps({"consumerGroup": "g", "clientId": "c", "mqSet": []}).encode()
        assert (await case.ask(41, body=body)).code == 14

    run_case(scenario, master=False)


def test_a_queue_is_locked_by_one_client_at_a_time(run_case: Any) -> None:
    def lock(client: str, *queues: int) -> bytes:
        entries = [{"topic": "t", "brokerName": "broker-a", "queueId": queue} for queue in queues]
        return json.dumps({"consumerGroup": "g", "clientId": client, "mqSet": entries}).encode()

    async def scenario(case: Any) -> None:
        async def owned(client: str, *queues: int) -> list[int]:
            reply = await case.ask(41, body=lock(client, *queues))
            return [entry["queueId"] for entry in json.loads(reply.body)["lockOKMQSet"]]

        assert await owned("c1", 0, 1) == [0, 1]
        assert await owned("c2", 1, 2) == [2]
        assert (await case.ask(42, body=lock("c1", 1))).code == 0
        assert await owned("c2", 1, 0) == [1]

    run_case(scenario)


def test_a_lock_expires_a_minute_after_its_last_renewal() -> None:
    now = 0.0
    locks = RebalanceLocks(lambda: now)
    queue = MessageQueue("t", "b", 0)
    assert locks.lock("g", "c1", [queue]) == [queue]
    now = LEASE_S - 1
    assert locks.lock("g", "c2", [queue]) == []
    assert locks.lock("g", "c1", [queue]) == [queue]
    now += LEASE_S - 1
    assert locks.lock("g", "c2", [queue]) == []
    now += 1
    assert locks.lock("g", "c2", [queue]) == [queue]
    assert LEASE_S == 60


def test_locks_are_bounded_and_expired_ones_make_room(monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.rebalance_locks.MAX_LOCKS", 2)
    now = 0.0
    locks = RebalanceLocks(lambda: now)
    queues = [MessageQueue("t", "b", number) for number in range(3)]
    assert locks.lock("g", "c", queues) == queues[:2]
    now = LEASE_S
    assert locks.lock("h", "c", queues) == queues[:2]
    locks.unlock("h", "c", queues)
    assert locks.lock("i", "c", queues) == queues[:2]


def test_a_request_for_many_locks_looks_for_expired_ones_once(monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.rebalance_locks.MAX_LOCKS", 100)
    searches, drop = 0, RebalanceLocks._drop_expired

    def counted(locks: RebalanceLocks, now: float) -> Any:
        nonlocal searches
        searches += 1
        return drop(locks, now)

    monkeypatch.setattr(RebalanceLocks, "_drop_expired", counted)
    now = 0.0
    locks = RebalanceLocks(lambda: now)
    queues = [MessageQueue("t", "b", number) for number in range(300)]
    assert locks.lock("g", "c", queues) == queues[:100] and searches == 1
    assert locks.lock("h", "c", queues) == [] and searches == 2
    now = LEASE_S
    assert locks.lock("h", "c", queues) == queues[:100] and searches == 3


def test_a_silent_client_expires(helpers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.client_manager.CLIENT_EXPIRY_S", 0.05)
    assert CLIENT_EXPIRY_S == 120

    async def main() -> None:
        clients = ClientManager(may_notify=lambda group: False)
        clients.heartbeat(Heartbeat.of(heartbeat("c1", producers=("p",))), helpers.FakeConnection())
        assert (clients.consumer_ids("g"), clients.producer_count) == (["c1"], 1)
        await helpers.until(lambda: clients.consumer_ids("g") == [] and clients.producer_count == 0)
        clients.stop()

    asyncio.run(main())


def test_a_client_over_the_limit_is_not_registered_and_the_others_stay(helpers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.client_manager.MAX_REGISTRATIONS", 2)

    async def main() -> None:
        clients = ClientManager(may_notify=lambda group: False)
        clients.heartbeat(Heartbeat.of(heartbeat("c1", "g", producers=("p",))), helpers.FakeConnection())
        for number in range(3):
            for body in (heartbeat("c2", f"g{number}"), heartbeat("c2", "", producers=(f"p{number}",))):
                with pytest.raises(RequestError, match="2 clients are registered, no more are taken"):
                    clients.heartbeat(Heartbeat.of(body), helpers.FakeConnection())
        assert [name for name, _ in clients.consumer_groups()] == ["g"]
        assert [name for name, _ in clients.producer_groups()] == ["p"]
        clients.heartbeat(Heartbeat.of(heartbeat("c1", "g", producers=("p",))), helpers.FakeConnection())
        clients.unregister("c1", "p", "")
        clients.heartbeat(Heartbeat.of(heartbeat("c2", "h")), helpers.FakeConnection())
        assert [name for name, _ in clients.consumer_groups()] == ["g", "h"]
        clients.stop()

    asyncio.run(main())


def test_the_total_size_of_subscriptions_is_bounded(helpers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("node.broker.client_manager.MAX_SUBSCRIBED_BYTES", 16_600)

    def beat(group: str, size: int, version: int = 1) -> Heartbeat:
        subscription = {"topic": "t", "subString": "x" * size, "subVersion": version}
        consumer = {"groupName": group, "subscriptionDataSet": [subscription]}
        return Heartbeat.of(json.dumps({"clientID": "c", "consumerDataSet": [consumer]}).encode())

    async def main() -> None:
        clients, connection = ClientManager(may_notify=lambda group: False), helpers.FakeConnection()
        for group in ("a", "b"):
            clients.heartbeat(beat(group, 8000), connection)
        for group in ("c", "a"):
            with pytest.raises(RequestError, match="no more are taken"):
                clients.heartbeat(beat(group, 8192, 2), connection)
        assert [name for name, _ in clients.consumer_groups()] == ["a", "b"]
        clients.heartbeat(beat("a", 10, 2), connection)
        clients.heartbeat(beat("c", 7000), connection)
        clients.unregister("c", "", "b")
        clients.heartbeat(beat("d", 8000), connection)
        connection.close()
        for group in ("a", "b"):
            clients.heartbeat(beat(group, 8000, 3), helpers.FakeConnection())
        clients.stop()

    asyncio.run(main())


def test_producers_are_chosen_round_robin(helpers: Any) -> None:
    async def main() -> None:
        clients = ClientManager(may_notify=lambda group: False)
        connections = [helpers.FakeConnection() for _ in range(3)]
        for number, connection in enumerate(connections):
            clients.heartbeat(Heartbeat.of(heartbeat(f"c{number}", "", producers=("p",))), connection)
        asked = [clients.next_producer("p") for _ in range(6)]
        assert asked == connections * 2
        connections[0].close()
        assert [clients.next_producer("p") for _ in range(2)] in (connections[1:], connections[:0:-1])
        assert clients.next_producer("q") is None
        clients.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"consumeType": 1, "messageModel": "0", "consumeFromWhere": 4}, ("CONSUME_PASSIVELY", "BROADCASTING")),
        ({"consumeType": "pull", "messageModel": "clustering"}, ("CONSUME_ACTIVELY", "CLUSTERING")),
        ({"consumeType": None, "messageModel": "", "unknown": [1]}, ("CONSUME_PASSIVELY", "CLUSTERING")),
    ],
)
def test_enumerations_are_read_by_name_and_by_number(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    body = {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": None, **changes}]}
    (consumer,) = Heartbeat.of(json.dumps(body).encode()).consumers
    assert (consumer.consume_type, consumer.message_model) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"clientID": ""}',
        b'{"clientID":"c","consumerDataSet":3}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":9}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{"topic":"t","subVersion":"x"}]}]}',
        b'{"clientID":"c","producerDataSet":[{}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":"' + b"1" * 5000 + b'"}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{"topic":"t","subVersion":'
        + b"1" * 400 + b"}]}]}",
    ],
)  # fmt: skip
def test_a_malformed_heartbeat_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        Heartbeat.of(body)
    assert caught.value.code == 1


@pytest.mark.mechanism("Send processor for 10/310/320/36, before/after hooks, fast port")
def test_a_send_creates_a_topic_from_the_default_topic(run_case: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(310, {"b": "new", "e": 0}, b"x")).code == 17
        assert (await case.ask(310, {"b": "new", "c": "t", "d": 4, "e": 0}, b"x")).code == 17
        assert (await case.ask(310, {"b": "new", "c": "TBW102", "d": 3, "e": 2}, b"x")).code == 0
        assert (await case.ask(10, {"topic": "many", "defaultTopic": "TBW102", "defaultTopicQueueNums": 99,
                                    "queueId": 7}, b"x")).code == 0  # fmt: skip
        assert (await case.pull(topic="new", queue_id=2, sysFlag=4)).code == 0
        table = json.loads((await case.ask(21)).body)["topicConfigTable"]
        made = [(table[name]["writeQueueNums"], table[name]["perm"]) for name in ("new", "many", "TBW102")]
        assert made == [(3, 6), (8, 6), (8, 7)]
        assert (await case.ask(310, {"b": "bad name", "c": "TBW102", "e": 0}, b"x")).code == 17

    run_case(scenario)


def test_clients_may_not_send_to_or_pull_from_internal_topics(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for topic in ("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"):
            assert (await case.send(topic=topic)).code == 16
        assert (await case.pull(topic="RMQ_SYS_TRANS_HALF_TOPIC")).code == 16

    run_case(scenario)


def test_a_send_creates_no_topic_if_auto_create_topics_is_off(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(310, {"b": "new", "c": "TBW102", "d": 3, "e": 2}, b"x")).code == 17

    run_case(scenario, auto_create_topics="false")
