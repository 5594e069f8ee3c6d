"""Which queues a consumer of RocketMQ 5 reads: codes 400 and 401."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.broker import assignments as assignments_module
from node.broker.assignments import _popped, _shared

SUBSCRIBER: dict[str, Any] = {
    "groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING", "unitMode": False,
    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [],
}  # fmt: skip


async def assigned(case: Any, client: str, **changes: Any) -> list[tuple[int, str]]:
    question = {"topic": "t", "consumerGroup": "g", "clientId": client, "strategyName": "AVG"} | changes
    reply = await case.ask(400, body=json.dumps({"messageModel": "CLUSTERING", **question}).encode())
    assert reply.code == 0
    found = json.loads(reply.body)["messageQueueAssignments"]
    return [(each["messageQueue"]["queueId"], each["mode"]) for each in found]


async def set_mode(case: Any, **changes: Any) -> int:
    content = {"topic": "t", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0} | changes
    code: int = (await case.ask(401, body=json.dumps(content).encode())).code
    return code


async def join(case: Any, *clients: str) -> None:
    for client in clients:
        beat = {"clientID": client, "producerDataSet": [], "consumerDataSet": [SUBSCRIBER]}
        assert (await case.ask(34, body=json.dumps(beat).encode())).code == 0


def test_assignments_switch_from_pull_to_pop_and_the_mode_survives_a_restart(run_case: Any, helpers: Any) -> None:
    ledger = helpers.FakeLedger()

    async def first(case: Any) -> None:
        await join(case, "a", "b")
        assert await assigned(case, "a") == [(0, "PULL")] and await assigned(case, "b") == [(1, "PULL")]
        assert await assigned(case, "stranger") == []
        assert await assigned(case, "stranger", messageModel="BROADCASTING") == [(0, "PULL"), (1, "PULL")]
        assert await set_mode(case) == 0
        assert await assigned(case, "a") == [(-1, "POP")] == await assigned(case, "b")
        assert await set_mode(case, popShareQueueNum=1) == 0
        assert sorted(await assigned(case, "a")) == [(0, "POP"), (1, "POP")]

    async def second(case: Any) -> None:
        await join(case, "a")
        assert await assigned(case, "a") == [(0, "POP"), (1, "POP")]

    run_case(first, ledger=ledger)
    run_case(second, ledger=ledger)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"mode": "PUSH"}, 29), ({"topic": "%RETRY%g"}, 16), ({"popShareQueueNum": "x"}, 29), ({"topic": "u"}, 2),
        ({"topic": "t" * 128}, 29), ({"topic": ""}, 29), ({"consumerGroup": "g" * 256}, 29),
        ({"consumerGroup": ""}, 29), ({"popShareQueueNum": 1 << 31}, 29), ({"popShareQueueNum": float("inf")}, 29),
    ],
)  # fmt: skip
def test_an_invalid_mode_is_refused_and_the_previous_one_kept(
    run_case: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr(assignments_module, "MAX_MODES", 1)

    async def scenario(case: Any) -> None:
        assert await set_mode(case) == 0
        assert await set_mode(case, **changes) == code
        for body in (b"", b"[]", b"{}", b"[" * 5000):
            assert (await case.ask(401, body=body)).code == 29 == (await case.ask(400, body=body)).code
        await join(case, "a")
        assert await assigned(case, "a") == [(-1, "POP")]

    run_case(scenario)


NAMES = st.lists(st.text("abc", min_size=1), min_size=1, max_size=9, unique=True)


@given(NAMES, st.integers(0, 12), st.booleans())
def test_a_pull_assignment_gives_out_every_queue_once_and_evenly(
    members: list[str], queues: int, by_circle: bool
) -> None:
    places = [("broker-a", number) for number in range(queues)]
    shares = [_shared(places, members, member, by_circle) for member in members]
    assert sorted(place for share in shares for place in share) == places
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(NAMES, st.integers(1, 12), st.integers(0, 9), st.booleans())
def test_a_pop_assignment_gives_every_member_a_queue_and_every_queue_a_member(
    members: list[str], queues: int, share: int, by_circle: bool
) -> None:
    places = [("broker-a", number) for number in range(queues)]
    shares = [_popped(places, members, member, share, by_circle) for member in members]
    assert all(shares)
    wanted = {("broker-a", -1)} if share == 0 else set(places)
    assert {place for each in shares for place in each} == wanted
