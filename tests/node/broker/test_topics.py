"""The topic table: configured and created topics, persistence, damage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from node.broker import topics as topics_module
from node.broker.internal_topics import system_topics
from node.broker.topics import TopicTable, TopicTableFull
from node.config import TopicConfig, parse_broker_config


def table(disk: Any, path: Any, *configured: TopicConfig) -> TopicTable:
    result = TopicTable(disk, f"{path}/topics.json", configured)
    result.load()
    return result


def test_created_topics_survive_a_restart(helpers: Any, tmp_path: Any) -> None:
    disk = helpers.PlainDisk()
    first = table(disk, tmp_path, TopicConfig(name="a", queues=2))
    typed = TopicConfig(name="b", queues=7, perm=4, message_type="FIFO")
    asyncio.run(first.put(typed))
    again = table(disk, tmp_path, TopicConfig(name="a", queues=2))
    clients_own = [topic for topic in again if topic not in system_topics()]
    assert sorted(topic.name for topic in clients_own) == ["a", "b"] and again.get("b") == typed
    assert again.data_version == 1
    assert again.get("c") is None


def test_a_change_of_a_configured_topic_stays_until_the_configuration_changes(helpers: Any, tmp_path: Any) -> None:
    disk, configured = helpers.PlainDisk(), TopicConfig(name="a", queues=2)
    changed = TopicConfig(name="a", queues=4, perm=4)
    asyncio.run(table(disk, tmp_path, configured).put(changed))
    assert table(disk, tmp_path, configured).get("a") == changed
    assert table(disk, tmp_path).get("a") == changed
    anew = TopicConfig(name="a", queues=3)
    assert table(disk, tmp_path, anew).get("a") == anew
    back = table(disk, tmp_path, configured)
    asyncio.run(back.put(configured))
    assert list(back.document()) == ["topicConfigTable", "dataVersion"]
    assert table(disk, tmp_path, anew).get("a") == anew


def test_a_member_that_takes_the_table_over_gets_a_changed_topic(helpers: Any, tmp_path: Any) -> None:
    """Unless its own configuration of the topic has changed, as in a rolling change of all members."""
    disk, configured = helpers.PlainDisk(), TopicConfig(name="a", queues=2)
    paths = {name: tmp_path / name for name in ("leader", "same", "anew", "none", "last")}
    for path in paths.values():
        path.mkdir()
    leader = table(disk, paths["leader"], configured)
    asyncio.run(leader.put(TopicConfig(name="a", queues=4)))
    has = {"same": (configured,), "anew": (TopicConfig(name="a", queues=3),), "none": ()}
    followers = {name: table(disk, paths[name], *topics) for name, topics in has.items()}
    assert all(
        asyncio.run(follower.replace(leader.document())) for name, follower in followers.items() if name != "anew"
    )
    assert not asyncio.run(followers["anew"].replace(leader.document()))
    queues = {name: follower.get("a").queues for name, follower in followers.items()}  # type: ignore[union-attr]
    assert queues == {"same": 4, "anew": 3, "none": 4}
    # A member that does not configure the topic passes on what others need to know.
    last = table(disk, paths["last"], configured)
    asyncio.run(last.replace(followers["none"].document()))
    assert last.get("a") == TopicConfig(name="a", queues=4)
    for name, topics in has.items():
        assert table(disk, paths[name], *topics).get("a") == followers[name].get("a")


def test_concurrent_creations_all_survive(helpers: Any, tmp_path: Any) -> None:
    async def main() -> None:
        topics = table(helpers.PlainDisk(), tmp_path)
        await asyncio.gather(*(topics.put(TopicConfig(name=f"t{number}")) for number in range(20)))

    asyncio.run(main())
    assert len(table(helpers.PlainDisk(), tmp_path)) == 20 + len(system_topics())


def test_the_table_is_bounded(helpers: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "MAX_TOPICS", 1)
    topics = table(helpers.PlainDisk(), tmp_path)
    asyncio.run(topics.put(TopicConfig(name="a")))
    asyncio.run(topics.put(TopicConfig(name="a", queues=5)))
    with pytest.raises(TopicTableFull):
        asyncio.run(topics.put(TopicConfig(name="b")))


def test_a_failed_write_changes_nothing(helpers: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = helpers.PlainDisk()

    async def fail(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "other").mkdir()
    topics, other = table(disk, tmp_path), table(disk, tmp_path / "other")
    asyncio.run(other.put(TopicConfig(name="b")))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file_atomic", fail)
        with pytest.raises(OSError, match="No space"):
            asyncio.run(topics.put(TopicConfig(name="a")))
        with pytest.raises(OSError, match="No space"):
            asyncio.run(topics.replace(other.document()))
        assert topics.get("a") is topics.get("b") is None and topics.data_version == 0
    assert asyncio.run(topics.replace(other.document())) and not asyncio.run(topics.replace(other.document()))
    assert topics.get("b") == table(disk, tmp_path).get("b") == TopicConfig(name="b")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"topicConfigTable": {"a": {}}, "dataVersion": {"counter": 1}}),
        json.dumps(
            {
                "topicConfigTable": {"a": {"topicName": "../a", "writeQueueNums": 1, "perm": 6}},
                "dataVersion": {"counter": 1},
            }
        ),
        json.dumps(
            {
                "topicConfigTable": {"a": {"topicName": "a", "writeQueueNums": 0, "perm": 6}},
                "dataVersion": {"counter": 1},
            }
        ),
    ],
)
def test_a_damaged_table_is_named(helpers: Any, tmp_path: Any, content: str) -> None:
    (tmp_path / "topics.json").write_text(content)
    with pytest.raises(ValueError, match=r"topics\.json is (damaged|no topic table)"):
        table(helpers.PlainDisk(), tmp_path)


def test_read_and_write_queue_counts_may_differ(run_case: Any) -> None:
    """As a topic shrinks, its last queues are still read, but producers no longer choose them."""

    async def scenario(case: Any) -> None:
        fields = {"topic": "shrinking", "readQueueNums": 8, "writeQueueNums": 2, "perm": 6, "order": True}
        assert (await case.ask(17, fields | {"topicSysFlag": 3})).code == 0
        entry = json.loads((await case.ask(21)).body)["topicConfigTable"]["shrinking"]
        assert (entry["readQueueNums"], entry["writeQueueNums"]) == (8, 2)
        assert (entry["order"], entry["topicSysFlag"]) == (True, 3)
        chosen = {(await case.send(topic="shrinking", queue_id=-1)).ext_fields["queueId"] for _ in range(64)}
        assert chosen == {"0", "1"}
        assert (await case.send(topic="shrinking", queue_id=7)).code == 0, "accepted by number while it is read"
        assert (await case.send(topic="shrinking", queue_id=8)).code == 1
        assert (await case.pull(topic="shrinking", queue_id=7)).code == 0
        assert (await case.pull(topic="shrinking", queue_id=8)).code == 1
        growing = {"topic": "growing", "readQueueNums": 2, "writeQueueNums": 4}
        assert (await case.ask(17, growing)).code == 0
        assert (await case.send(topic="growing", queue_id=3)).code == 0
        assert (await case.pull(topic="growing", queue_id=3)).code == 1, "not readable yet"
        for wrong in ({"readQueueNums": -1}, {"readQueueNums": 70_000}, {"topicSysFlag": -1}, {"perm": 8}):
            assert (await case.ask(17, fields | wrong)).code == 1
        for internal in ("RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX"):
            assert (await case.ask(17, fields | {"topic": internal})).code == 1

    run_case(scenario)


def test_the_message_type_of_a_topic_is_stored_and_reported(run_case: Any) -> None:
    """As RocketMQ 5 changes it (a field of code 17) and its proxy asks for it (code 351)."""

    async def scenario(case: Any) -> None:
        async def attributes() -> Any:
            topic = json.loads((await case.ask(351, {"topic": "typed"})).body)
            assert topic["topicName"] == "typed"
            return topic.get("attributes")

        for changes, expected in (
            ("", None), ("+message.type=FIFO", {"message.type": "FIFO"}), ("", {"message.type": "FIFO"}),
            ("-message.type,+message.type=MIXED", {"message.type": "MIXED"}), ("-message.type", None),
            ("+message.type=DELAY", {"message.type": "DELAY"}),
        ):  # fmt: skip
            assert (await case.ask(17, {"topic": "typed", "attributes": changes})).code == 0
            assert await attributes() == expected, changes
        for wrong in ("+message.type=LATE", "message.type=FIFO", "+message.type", "+queue.type=BatchCQ", "+", "=,+"):
            reply = await case.ask(17, {"topic": "typed", "attributes": wrong})
            assert reply.code == 1, wrong
        assert (await case.ask(351, {"topic": "nobody"})).code == 17

    run_case(scenario)


def test_queue_counts_are_configured_and_announced(helpers: Any) -> None:
    text = CONFIGURED
    config = parse_broker_config(text)
    assert config.topics == (TopicConfig(name="a", queues=2, read_queues=6), TopicConfig(name="b", queues=3))
    assert config.topics[1].read_queues == 3 and config.topics[0].all_queues == 6
    announced = TopicTable(helpers.PlainDisk(), "/nowhere", config.topics)
    announced.load()
    assert [announced.announced()["a"][name] for name in ("readQueueNums", "writeQueueNums")] == [6, 2]


CONFIGURED = """
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "/data"
[dledger]
listen = "127.0.0.1:20911"
[[topics]]
name = "a"
queues = 2
read_queues = 6
[[topics]]
name = "b"
queues = 3

"""
