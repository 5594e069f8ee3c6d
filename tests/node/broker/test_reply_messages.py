"""Requests and their replies, beyond what the table of request codes covers for 324 and 325."""

from __future__ import annotations

import json
from typing import Any

from node.remoting import Command
from node.store.record import decode_records

HEARTBEAT = json.dumps({"clientID": "c@1", "producerDataSet": [{"groupName": "p"}]}).encode()
REPLY = {
    "a": "q", "b": "splitbrain_REPLY_TOPIC", "e": -1,
    "i": "REPLY_TO_CLIENT\x01c@1\x02CORRELATION_ID\x017\x02MSG_TYPE\x01reply\x02",
}  # fmt: skip


async def ask(case: Any, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
    address = f"127.0.0.1:{case.broker.port}"
    reply: Command = await case.client.invoke(address, Command.request(code, fields, body), timeout_ms=5000)
    return reply


async def replies_stored(case: Any) -> list[bytes]:
    pulled = await case.pull(0, "splitbrain_REPLY_TOPIC", 0)
    return [message.body for message in decode_records(pulled.body)]


def test_a_request_message_gets_the_name_of_the_cluster(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number, extra in enumerate(("REPLY_TO_CLIENT\x01c@1\x02CLUSTER\x01elsewhere\x02", "")):
            sent = await ask(case, 310, {"a": "p", "b": "t", "e": 1, "i": f"KEYS\x01k{number}\x02{extra}"}, b"?")
            assert sent.code == 0, sent.remark
        wanting, other = decode_records((await case.pull(0, "t", 1)).body)
        assert dict(wanting.properties) == {"KEYS": "k0", "REPLY_TO_CLIENT": "c@1", "CLUSTER": "splitbrain"}
        assert dict(other.properties) == {"KEYS": "k1"}

    run_case(scenario)


def test_a_reply_that_no_client_accepts_is_stored_and_gets_an_error(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        gone = await ask(case, 325, REPLY, b"to nobody")
        assert gone.code == 1 and "'c@1' is not here" in str(gone.remark)
        case.client.register(326, lambda command, connection: command.reply(1, remark="not mine"))
        assert (await ask(case, 34, {}, HEARTBEAT)).code == 0
        refused = await ask(case, 325, REPLY, b"refused")
        assert refused.code == 1 and "did not take the reply: code 1" in str(refused.remark)
        assert await replies_stored(case) == [b"to nobody", b"refused"]

    run_case(scenario)


def test_a_reply_that_cannot_be_stored_is_not_forwarded(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        pushed: list[Command] = []
        case.client.register(326, lambda command, connection: pushed.append(command))
        assert (await ask(case, 34, {}, HEARTBEAT)).code == 0
        case.broker.store.demote()
        refused = await ask(case, 325, REPLY, b"too late")
        assert refused.code == 14 and pushed == []

    run_case(scenario)
