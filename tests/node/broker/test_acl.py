"""Access control: signatures, permissions and addresses, request by request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from node.broker.acl import AccessControl, own_signature
from node.config import ConfigError, parse_broker_config
from node.remoting import Command, Credentials, RequestError
from node.security import AddressPattern
from node.store.record import decode_records

BASE = """
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "/tmp/nowhere"
[dledger]
listen = "127.0.0.1:0"
"""
ACL = """
[acl]
white_addresses = ["10.1.*.*"]
[[acl.accounts]]
access_key = "operator"
secret_key = "operator-secret"
admin = true
[[acl.accounts]]
access_key = "service"
secret_key = "service-secret"
white_address = "10.2.0.1"
default_topic_perm = "DENY"
default_group_perm = "SUB"
topics = { orders = "PUB|SUB", prices = "SUB", audit = "PUB" }
groups = { billing = "SUB", locked = "DENY" }
"""


class Peer:
    def __init__(self, remote_address: str = "10.3.0.7:4711") -> None:
        self.remote_address = remote_address
        self.state: dict[str, Any] = {}


def is_allowed(
    command: Command, *, key: str | None = "service", secret: str | None = None, peer: str = "10.3.0.7:1"
) -> bool:
    """Whether the request passes, signed with `key` unless that is None."""
    acl = parse_broker_config(BASE + ACL).acl
    assert acl is not None
    if key is not None:
        Credentials(access_key=key, secret_key=secret or f"{key}-secret").sign(command)
    try:
        AccessControl(acl).check(command, Peer(peer))  # type: ignore[arg-type]
    except RequestError as error:
        assert error.code == 16 and error.remark
        return False
    return True


def heartbeat(group: str, topics: Sequence[str]) -> Command:
    subscriptions = [{"topic": topic, "subString": "*"} for topic in topics]
    body = {"clientID": "c", "consumerDataSet": [{"groupName": group, "subscriptionDataSet": subscriptions}]}
    return Command.request(34, {}, json.dumps(body).encode())


def pull(topic: str, group: str) -> Command:
    return Command.request(11, {"topic": topic, "consumerGroup": group, "queueId": 0})


def popped(topic: str, group: str) -> Command:
    return Command.request(200050, {"topic": topic, "consumerGroup": group})


def test_access_control_is_off_without_an_acl_table() -> None:
    assert parse_broker_config(BASE).acl is None


def test_every_request_without_a_key_is_refused() -> None:
    for code in range(1, 400):
        assert not is_allowed(Command.request(code, {"topic": "orders", "consumerGroup": "billing"}), key=None), code


def test_a_request_needs_a_valid_signature_of_all_fields_and_the_body() -> None:
    assert is_allowed(pull("orders", "billing"))
    assert not is_allowed(pull("orders", "billing"), secret="service-secreT")
    assert not is_allowed(pull("orders", "billing"), key="stranger")
    request = pull("orders", "billing")
    Credentials(access_key="service", secret_key="service-secret").sign(request)
    assert is_allowed(request, key=None)
    for change in ({"topic": "prices"}, {"AccessKey": "operator"}, {"Signature": ""}, {"more": "x"}):
        changed = Command.request(11, request.ext_fields | change)
        assert not is_allowed(changed, key=None), change
    assert not is_allowed(Command.request(11, request.ext_fields, b"body"), key=None)


def test_a_field_that_old_clients_add_after_signing_is_accepted() -> None:
    request = Command.request(12, {"topic": "orders", "key": "k"})
    Credentials(access_key="service", secret_key="service-secret").sign(request)
    request.ext_fields["_UNIQUE_KEY_QUERY"] = "true"
    assert is_allowed(request, key=None)


def test_white_listed_addresses_need_no_signature() -> None:
    assert is_allowed(pull("anything", "any"), key=None, peer="10.1.2.3:999")
    assert not is_allowed(pull("orders", "billing"), key=None, peer="10.2.0.1:999")
    named = Command.request(17, {"topic": "new", "AccessKey": "service"})
    assert is_allowed(named, key=None, peer="10.2.0.1:999")
    assert not is_allowed(Command.request(17, named.ext_fields), key=None, peer="10.2.0.2:999")


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (Command.request(10, {"topic": "orders"}), True),
        (Command.request(10, {"topic": "prices"}), False),
        (Command.request(10, {"topic": "audit"}), True),
        (Command.request(10, {"topic": "unknown"}), False),
        (Command.request(310, {"b": "orders"}), True),
        (Command.request(310, {"b": "prices"}), False),
        (Command.request(10, {"topic": "orders", "b": "prices"}), False),  # the store reads "b"
        (Command.request(320, {"b": "orders", "m": "true"}), True),
        (Command.request(310, {"b": "%RETRY%billing"}), True),
        (Command.request(310, {"b": "%RETRY%locked"}), False),
        (Command.request(310, {"b": "RMQ_SYS_TRANS_HALF_TOPIC"}), False),
        (pull("orders", "billing"), True),
        (pull("orders", "other"), True),
        (pull("orders", "locked"), False),
        (pull("audit", "billing"), False),
        (pull("%RETRY%billing", "billing"), True),
        (pull("%DLQ%locked", "billing"), False),
        (pull("SCHEDULE_TOPIC_XXXX", "billing"), False),
        (Command.request(12, {"topic": "prices"}), True),
        (Command.request(12, {"topic": "audit"}), False),
        (Command.request(15, {"topic": "prices", "consumerGroup": "billing"}), True),
        (Command.request(15, {"topic": "prices", "consumerGroup": "locked"}), False),
        (Command.request(30, {"topic": "prices"}), True),
        (Command.request(30, {"topic": "audit"}), False),
        (Command.request(33, {"offset": "0"}), False),
        (Command.request(36, {"group": "billing"}), True),
        (Command.request(36, {"group": "locked"}), False),
        (Command.request(36, {"group": "locked", "consumerGroup": "billing"}), False),
        (Command.request(324, {"topic": "audit"}), True),
        (Command.request(325, {"b": "orders"}), True),
        (Command.request(325, {"b": "prices"}), False),
        (popped("prices", "billing"), True),
        (popped("audit", "billing"), False),
        (popped("%RETRY%billing_prices", "billing"), True),
        (popped("%RETRY%billing_audit", "billing"), False),  # for topic audit, or of a group billing_audit
        (popped("%RETRY%bill_prices", "billing"), True),  # of a group bill_prices
        (Command.request(35, {"clientID": "c", "producerGroup": "p"}), True),
        (Command.request(35, {"clientID": "c", "consumerGroup": "locked"}), False),
        (Command.request(35, {"clientID": "c", "consumerGroup": "locked", "group": "billing"}), False),
        (Command.request(38, {"consumerGroup": "billing"}), True),
        (Command.request(38, {"consumerGroup": "locked"}), False),
        (Command.request(38, {"consumerGroup": "locked", "group": "billing"}), False),
        (Command.request(41, {}, b'{"consumerGroup":"billing"}'), True),
        (Command.request(41, {}, b'{"consumerGroup":"locked"}'), False),
        (Command.request(41, {}, b"no json"), False),
        (heartbeat("billing", ["orders", "prices", "%RETRY%billing"]), True),
        (heartbeat("billing", ["orders", "audit"]), False),
        (heartbeat("locked", ["orders"]), False),
        (Command.request(34, {}, b'{"consumerDataSet":[7]}'), False),
        (Command.request(34, {}, b"[]"), False),
        (Command.request(34, {}, b'{"clientID":"c","producerDataSet":[{"groupName":"p"}]}'), True),
        (Command.request(37, {"producerGroup": "p"}), True),
        (Command.request(28), True),
        (Command.request(17, {"topic": "orders"}), False),
        (Command.request(43), False),
        (Command.request(9999), False),
    ],
)
def test_requests_are_allowed_by_topic_and_group_permissions(request_: Command, allowed: bool) -> None:
    again = Command.request(request_.code, request_.ext_fields, request_.body)
    assert is_allowed(request_) is allowed
    assert is_allowed(again, key="operator"), "an admin may do everything"


def test_sending_back_a_message_needs_permission_for_its_topic(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        async def ask(key: str, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
            request = Command.request(code, fields, body)
            Credentials(access_key=key, secret_key=f"{key}-secret").sign(request)
            reply: Command = await case.client.invoke(f"127.0.0.1:{case.broker.port}", request, timeout_ms=5000)
            return reply

        for topic in ("orders", "secrets"):
            assert (await ask("operator", 17, {"topic": topic})).code == 0
            sent = await ask("operator", 310, {"b": topic, "e": 0}, b"x")
            back = {"offset": int(sent.ext_fields["msgId"][-16:], 16), "group": "billing", "delayLevel": -1}
            assert (await ask("service", 36, back)).code == (0 if topic == "orders" else 16)
            assert (await ask("operator", 36, back)).code == 0
        dead = await ask("service", 11, {"topic": "%DLQ%billing", "consumerGroup": "billing", "queueId": 0,
                                         "queueOffset": 0, "sysFlag": 4})  # fmt: skip
        first = decode_records(dead.body)[0]
        assert (await ask("service", 36, {"offset": first.physical_offset, "group": "billing"})).code == 0

    accounts = """[
        {access_key = "operator", secret_key = "operator-secret", admin = true},
        {access_key = "service", secret_key = "service-secret", topics = {orders = "SUB"}, groups = {billing = "SUB"}},
    ]""".replace("\n", "")
    run_case(scenario, **{"acl.accounts": accounts})


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["1.2.3.4", "::1"], []),
        ("10.0.0.1", ["10.0.0.1", "::ffff:10.0.0.1"], ["10.0.0.2", "::1"]),
        ("10.0.0.0/8", ["10.9.9.9"], ["11.0.0.0"]),
        ("192.168.0.*", ["192.168.0.255"], ["192.168.1.0"]),
        ("192.168.*.*", ["192.168.7.255"], ["192.169.1.0"]),
        ("192.168.1-3.*", ["192.168.1.1", "192.168.3.9"], ["192.168.0.1", "192.168.4.1"]),
        ("192.168.0.{1,7}", ["192.168.0.1", "192.168.0.7"], ["192.168.0.2", "::1"]),
        ("fe80::/10", ["fe80::1%eth0"], ["10.0.0.1", "::1"]),
    ],
)
def test_an_address_pattern_matches_only_the_addresses_it_covers(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    assert [host for host in inside + outside if AddressPattern(pattern).matches(host)] == inside


@pytest.mark.parametrize(
    "pattern", ["", "10.0.0", "10.*", "10.0.0.{}", "10.0.0.9-1", "300.1.1.*", "10.0.0.0/40", "host"]
)
def test_an_invalid_address_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        AddressPattern(pattern)


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_broker_config(BASE + text)
    return list(caught.value.problems)


def test_every_problem_in_the_acl_table_is_named() -> None:
    text = (
        ACL.replace('"service"', '"op"', 1).replace("PUB|SUB", "PUT").replace("admin", "admim").replace("10.1.", "x.")
    )
    problems = "\n".join(problems_of(text))
    for part in ("access_key: must have at least 7", "topics: 'PUT' is no permission", "admim", "white_addresses:"):
        assert part in problems
    assert any("there are none" in problem for problem in problems_of("[acl]\n"))
    assert any("given twice" in problem for problem in problems_of(ACL.replace('"service"', '"operator"', 1)))
    assert any("array" in problem for problem in problems_of('[acl]\nwhite_addresses = "*"\n'))


def test_brokers_sign_their_own_requests_as_the_first_admin() -> None:
    acl: Any = parse_broker_config(BASE + ACL).acl
    sign = own_signature(acl)
    assert sign is not None and own_signature(None) is None
    request = Command.request(43)
    sign(request)
    assert is_allowed(request, key=None)
