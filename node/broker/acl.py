"""Access control: who may do what, checked before any processor sees a request.

RocketMQ's plain ACL (R: PlainAccessValidator, PlainPermissionManager). A request from a white-listed address passes.
Any other must name an account and carry its signature; then the topics and consumer groups that the request touches
are checked against the account's permissions. A refusal is NO_PERMISSION, before anything was done.

Stricter than R in a few places, so that a key for one topic does not open others: viewing a message by its
offset needs SUB on all topics, sending one back (36) needs SUB on its topic, internal topics need an admin, and so
does every code that this module does not know.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from node.remoting import Command, Connection, RequestCode, RequestError, ResponseCode
from node.remoting.signature import ACCESS_KEY, SIGNATURE, Credentials, signature_of
from node.security import PERM_PUB, PERM_SUB, AccountConfig, AclConfig

__all__ = ["AccessControl", "needs_of", "own_signature"]

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
INTERNAL_PREFIXES: Final = ("RMQ_SYS_", "rmq_sys_", "SCHEDULE_TOPIC_XXXX")
"""Topics that hold other topics' messages (half and delayed ones), or what was delivered to consumers."""
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""A field that clients up to 4.9.3 add to a query after they have signed it (R)."""
MAX_CHECKED_RESOURCES: Final = 10_000
"""Topics and groups that one heartbeat may name."""

_ACCOUNT_KEY: Final = "acl_account"
_ANY_TOPIC: Final = "*"
_PUB_CODES: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    }
)
_SUB_CODES: Final = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.QUERY_MESSAGE,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_TOPIC_STATS_INFO,
    }
)
_POP_CODES: Final = frozenset(
    {RequestCode.POP_MESSAGE, RequestCode.ACK_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME}
)
_GROUP_CODES: Final = {
    RequestCode.CONSUMER_SEND_MSG_BACK: "group",
    RequestCode.UNREGISTER_CLIENT: "consumerGroup",
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: "consumerGroup",
}
"""Codes, each with the field from which its processor takes the group."""
_LOCK_CODES: Final = frozenset({RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ})
_KEY_IS_ENOUGH: Final = frozenset({RequestCode.END_TRANSACTION, RequestCode.GET_BROKER_RUNTIME_INFO})
"""Codes that name no topic: a transaction's end is checked by its own processor, against the half message and the
permission for its topic."""


class Need(NamedTuple):
    """A permission that a request needs: on a topic, or (`is_group`) on a consumer group."""

    name: str
    perm: int
    is_group: bool


class AccessControl:
    """Guards the requests of one broker: `RemotingServer.register_guard(AccessControl(config).check)`."""

    def __init__(self, config: AclConfig) -> None:
        self._accounts = {account.access_key: account for account in config.accounts}
        self._white_addresses = config.white_addresses

    def check(self, command: Command, connection: Connection) -> None:
        """Return if the request may be processed. Raises RequestError (NO_PERMISSION) with the reason."""
        account = self._limited_account(command, connection)
        if command.code == RequestCode.HEART_BEAT:
            connection.state[_ACCOUNT_KEY] = account
        if account is not None:
            needs = needs_of(command)
            if needs is None:
                raise _refused(f"request code {command.code} needs an admin, {account.access_key!r} is none")
            self._check_permissions(needs, account)

    def check_read(self, command: Command, connection: Connection, topic: str, group: str) -> None:
        """Return if the sender of the request may read a message of `topic` for `group`. For requests that name a
        message by its offset: only their processor learns the topic. Raises RequestError (NO_PERMISSION)."""
        account = self._limited_account(command, connection)
        if account is not None:
            self._check_permissions(_read_needs(topic, group), account)

    def check_write(self, command: Command, connection: Connection, topic: str) -> None:
        """Return if the sender of the request may send messages to `topic`. For transactions, whose processor learns
        the topic from the half message. Raises RequestError (NO_PERMISSION)."""
        account = self._limited_account(command, connection)
        if account is not None:
            self._check_permissions(_topic_needs(topic, PERM_PUB), account)

    def may_be_asked(self, connection: Connection, topic: str) -> bool:
        """Whether a producer behind this connection may be shown a half message of `topic`: anybody can claim to be in
        a producer group."""
        account: AccountConfig | None = connection.state.get(_ACCOUNT_KEY)
        try:
            if account is not None:
                self._check_permissions(_topic_needs(topic, PERM_PUB), account)
        except RequestError:
            return False
        return True

    def _limited_account(self, command: Command, connection: Connection) -> AccountConfig | None:
        """The account against whose permissions the request is checked, None if it may do everything. Raises
        RequestError (NO_PERMISSION) if it names no account, or the signature is wrong."""
        host = connection.remote_address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        if any(pattern.matches(host) for pattern in self._white_addresses):
            return None
        fields = command.ext_fields
        access_key = fields.get(ACCESS_KEY)
        if not access_key:
            raise _refused("no access key is given; this broker takes signed requests only")
        account = self._accounts.get(access_key)
        if account is None:
            raise _refused(f"the access key {access_key[:40]!r} is not known")
        if account.white_address is not None and account.white_address.matches(host):
            return None
        if not _is_signed(command, account):
            raise _refused(f"the signature for the access key {access_key!r} is wrong")
        return None if account.admin else account

    def _check_permissions(self, needs: Iterable[Need], account: AccountConfig) -> None:
        for need in needs:
            if need.name.startswith(INTERNAL_PREFIXES) and not need.is_group:
                raise _refused(f"topic {need.name} needs an admin, {account.access_key!r} is none")
            if need.is_group:
                granted = account.groups.get(need.name, account.default_group_perm)
            else:
                granted = account.topics.get(need.name, account.default_topic_perm)
            if need.perm & ~granted:
                kind = "group" if need.is_group else "topic"
                verb = "PUB" if need.perm == PERM_PUB else "SUB"
                raise _refused(f"{account.access_key!r} has no {verb} permission for {kind} {need.name!r}")


def own_signature(config: AclConfig | None) -> Callable[[Command], None] | None:
    """The function that signs this broker's own requests to other brokers of its group, as the first admin account."""
    account = config.own_account if config is not None else None
    if account is None:
        return None
    return Credentials(access_key=account.access_key, secret_key=account.secret_key).sign


def _refused(reason: str) -> RequestError:
    return RequestError(ResponseCode.NO_PERMISSION, reason)


def _is_signed(command: Command, account: AccountConfig) -> bool:
    fields = command.ext_fields
    given = fields.get(SIGNATURE, "").encode("utf-8", "replace")
    if hmac.compare_digest(given, signature_of(fields, command.body, account.secret_key).encode()):
        return True
    if UNIQUE_KEY_QUERY not in fields:
        return False
    signed = {name: value for name, value in fields.items() if name != UNIQUE_KEY_QUERY}
    return hmac.compare_digest(given, signature_of(signed, command.body, account.secret_key).encode())


def needs_of(command: Command) -> Iterable[Need] | None:
    """The permissions that a request needs; None if only an admin may send it. Raises RequestError if it lacks the
    fields that name what it touches."""
    code, fields = command.code, command.ext_fields
    if code in _PUB_CODES:
        topic = fields["b"] if "b" in fields else command.get_str("topic")
        return _topic_needs(topic, PERM_PUB)
    if code in _SUB_CODES:
        needs = list(_topic_needs(command.get_str("topic"), PERM_SUB))
        group = command.get_str("consumerGroup", "")
        if group or code in (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE):
            needs.append(Need(group, PERM_SUB, True))
        return needs
    if code in _POP_CODES:
        group = command.get_str("consumerGroup")
        return [Need(group, PERM_SUB, True), *_read_needs(command.get_str("topic"), group)]
    if code == RequestCode.BATCH_ACK_MESSAGE:
        return _ack_needs(_body_of(command))
    if code == RequestCode.QUERY_ASSIGNMENT:
        body = _body_of(command)
        return [
            Need(str(body.get("consumerGroup", "")), PERM_SUB, True),
            *_topic_needs(str(body.get("topic", "")), PERM_SUB),
        ]
    if code in _GROUP_CODES:
        group = command.get_str(_GROUP_CODES[RequestCode(code)], "")
        return [Need(group, PERM_SUB, True)] if group else []
    if code in _LOCK_CODES:
        return [Need(str(_body_of(command).get("consumerGroup", "")), PERM_SUB, True)]
    if code == RequestCode.HEART_BEAT:
        return _heartbeat_needs(_body_of(command))
    if code == RequestCode.CHECK_CLIENT_CONFIG:
        return _subscription_needs(_body_of(command))
    if code == RequestCode.VIEW_MESSAGE_BY_ID:
        return [Need(_ANY_TOPIC, PERM_SUB, False)]
    if code in _KEY_IS_ENOUGH:
        return []
    return None


def _topic_needs(topic: str, perm: int) -> Iterator[Need]:
    """A group's retry and dead letter topics belong to the group: reading and writing them needs SUB on the group."""
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if topic.startswith(prefix):
            yield Need(topic.removeprefix(prefix), PERM_SUB, True)
            return
    yield Need(topic, perm, False)


def _read_needs(topic: str, group: str) -> Iterator[Need]:
    """What a group's consumer needs to receive messages of a topic. Messages redelivered to POP consumers need it on
    their own topic: the retry topic's name alone does not tell where the group's ends (group a, or group a_b)."""
    yield from _topic_needs(topic.removeprefix(f"{RETRY_PREFIX}{group}_"), PERM_SUB)


def _body_of(command: Command) -> dict[str, Any]:
    try:
        body = json.loads(command.body)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the body of request {command.code} cannot be read: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise _refused(f"the body of request {command.code} is no JSON object")
    return body


def _ack_needs(body: dict[str, Any]) -> list[Need]:
    acks = body.get("acks")
    if not isinstance(acks, list) or len(acks) > MAX_CHECKED_RESOURCES:
        raise _refused("the acknowledgements cannot be read")
    needs: list[Need] = []
    for each in acks:
        if not isinstance(each, dict):
            raise _refused("the acknowledgements cannot be read")
        needs += (Need(str(each.get("c", "")), PERM_SUB, True), *_topic_needs(str(each.get("t", "")), PERM_SUB))
    return needs


def _heartbeat_needs(body: dict[str, Any]) -> list[Need]:
    needs: list[Need] = []
    try:
        for consumer in body.get("consumerDataSet") or ():
            needs.append(Need(str(consumer["groupName"]), PERM_SUB, True))
            for subscription in consumer.get("subscriptionDataSet") or ():
                needs.extend(_topic_needs(str(subscription["topic"]), PERM_SUB))
            if len(needs) > MAX_CHECKED_RESOURCES:
                raise _refused(f"a heartbeat names more than {MAX_CHECKED_RESOURCES} topics and groups")
    except (KeyError, TypeError, AttributeError) as error:
        raise _refused(f"the heartbeat cannot be read: {error!r}") from None
    return needs


def _subscription_needs(body: dict[str, Any]) -> list[Need]:
    try:
        topic, group = str(body["subscriptionData"]["topic"]), str(body.get("group", ""))
    except (KeyError, TypeError) as error:
        raise _refused(f"the subscription cannot be read: {error!r}") from None
    return [*_topic_needs(topic, PERM_SUB), Need(group, PERM_SUB, True)]
