"""Where a group continues: code 14 and its rule for groups without an offset, code 15 and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from node.broker import consumer_offsets
from node.broker.heartbeat import MAX_EXPRESSION_CHARACTERS

ASK = {"consumerGroup": "g", "topic": "t", "queueId": 0}


def test_a_new_group_starts_at_offset_0_while_the_queue_is_in_memory(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(14, ASK)).ext_fields["offset"] == "0"
        await case.send()
        assert (await case.ask(14, ASK)).ext_fields["offset"] == "0"

    run_case(scenario)


def test_a_new_group_gets_no_offset_once_the_start_of_the_queue_is_on_disk_only(run_case: Any) -> None:
    """R: checkInDiskByConsumeOffset. The client then asks for the end."""

    async def scenario(case: Any) -> None:
        assert (await case.ask(14, ASK)).code == 0, "an empty queue has nothing on disk"
        await case.send()
        assert (await case.ask(14, ASK)).code == 22
        assert (await case.ask(15, ASK | {"commitOffset": 1})).code == 0
        assert (await case.ask(14, ASK)).ext_fields["offset"] == "1"

    run_case(scenario, **{"limits.in_memory_percent": "0"})


def test_offsets_of_queues_that_do_not_exist_are_not_kept(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.ask(15, ASK | {"commitOffset": 1, "topic": "x" * 100_000})).code == 17
        for queue_id in (-1, 2, 1 << 40):
            assert (await case.ask(15, ASK | {"commitOffset": 1, "queueId": queue_id})).code == 1
        assert (await case.ask(15, ASK | {"commitOffset": -1})).code == 0, "the client knows no offset yet"
        assert json.loads((await case.ask(43)).body) == {"offsetTable": {}}

    run_case(scenario)


def test_a_subscription_longer_than_the_limit_is_refused(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for size, code in ((MAX_EXPRESSION_CHARACTERS, 0), (MAX_EXPRESSION_CHARACTERS + 1, 1)):
            subscription = {"topic": "t", "subString": "x" * size}
            beat = {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [subscription]}]}
            assert (await case.ask(34, body=json.dumps(beat).encode())).code == code

    run_case(scenario)


def test_a_group_with_the_separator_in_its_name_has_its_own_offsets(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for group, offset in (("b", 3), ("a@b", 5)):
            assert (await case.ask(15, ASK | {"consumerGroup": group, "commitOffset": offset})).code == 0
        assert case.broker.offsets.topics_of("a@b") == case.broker.offsets.topics_of("b") == ["t"]
        assert (await case.ask(207, {"groupName": "b", "removeOffset": "true"})).code == 0
        assert case.broker.offsets.find("a@b", "t", 0) == 5 and case.broker.offsets.find("b", "t", 0) is None

    run_case(scenario)


def test_a_report_of_all_groups_progress_reads_each_offset_once(run_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, split = 0, consumer_offsets.split_key

    def counted(key: str) -> tuple[str, str]:
        nonlocal reads
        reads += 1
        return split(key)

    async def scenario(case: Any) -> None:
        for number in range(8):
            assert (await case.ask(17, {"topic": f"t{number}", "writeQueueNums": 1, "order": number % 2})).code == 0
            for group in ("a", "b"):
                case.broker.offsets.commit(group, f"t{number}", 0, 0)
        case.broker.offsets.commit("a", "gone", 0, 0)
        monkeypatch.setattr(consumer_offsets, "split_key", counted)
        for ordered, topics in (("false", range(8)), ("true", range(1, 8, 2))):
            text = (await case.ask(317, {"isOrder": ordered})).body.decode()
            assert [text.count(f'"topic":"t{number}"') for number in topics] == [2] * len(topics)
            assert text.count('"topic"') == 2 * len(topics)
        assert reads == 2 * 17

    run_case(scenario)
