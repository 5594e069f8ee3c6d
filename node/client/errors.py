"""The errors in which a client call can end, and what they say about its effect.

`is_definite` is True if the request certainly had no effect and never will have one. The table for send
replies: 2, 13, 14, 16, 17 are refusals before anything was stored; 1 says nothing (RocketMQ folds "not the
leader" and "no quorum in time" into it); no reply at all says nothing either, unless no connection was made.
Replies 10, 11 and 12 are not errors: the message is stored on the master (`SendStatus`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from node.remoting import ResponseCode

__all__ = [
    "BadReply",
    "BrokerRefused",
    "ClientError",
    "NoRoute",
    "NotLeader",
    "NotSent",
    "OutcomeUnknown",
    "SendFailed",
    "error_from_reply",
]

DEFINITE_CODES: Final = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.VERSION_NOT_SUPPORTED,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    }
)
"""Codes with which a broker refuses before it does anything. Every other code leaves the outcome open."""

PASSING_CODES: Final = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE})
"""Codes of a broker that may do later what it refuses now. SYSTEM_ERROR is not one of them: it stands for what is
permanently gone, and for an unknown outcome."""

_NOT_LEADER = re.compile(r"NOT_LEADER\b")
_LEADER_ID = re.compile(r"\bleader=(\S+)")
_LEADER_ADDRESS = re.compile(r"\baddr=(\S+)")


class ClientError(Exception):
    """A call did not succeed.

    `code` is the broker's response code, None if there was no reply; `remark` is the broker's text or what
    happened instead; `address` is where the request went.
    """

    is_definite: bool = False
    may_pass: bool = True
    """Whether the same request may succeed later, perhaps on another broker. False: it was refused permanently."""

    def __init__(self, remark: str, *, address: str | None = None, code: int | None = None) -> None:
        super().__init__(remark)
        self.remark = remark
        self.address = address
        self.code = code

    def __str__(self) -> str:
        where = f"{self.address}: " if self.address else ""
        code = f"code {self.code}: " if self.code is not None else ""
        return f"{where}{code}{self.remark}"


class NotSent(ClientError):
    """No connection, or too many requests in flight: the request was never sent. Definite."""

    is_definite = True


class NoRoute(ClientError):
    """No name server knows who serves the topic, or none answers: no broker was asked. Definite. `code` is
    TOPIC_NOT_EXIST if a name server answered that."""

    is_definite = True


class OutcomeUnknown(ClientError):
    """No answer in time, or the connection closed while the request was in flight. Indefinite."""


class BadReply(ClientError):
    """The broker reported success, but its reply cannot be read. Indefinite."""


class BrokerRefused(ClientError):
    """The broker answered with a failure code; definite for the codes that mean "nothing was done"."""

    code: int

    def __init__(self, remark: str, *, address: str | None, code: int) -> None:
        super().__init__(remark, address=address, code=code)
        self.is_definite = code in DEFINITE_CODES
        self.may_pass = code in PASSING_CODES


class NotLeader(BrokerRefused):
    """The broker does not lead its group. `leader_id` and `leader_address` (where this client would dial it)
    are its hint, None if it knows none."""

    def __init__(
        self, remark: str, *, address: str | None, code: int, leader_id: str | None, leader_address: str | None
    ) -> None:
        super().__init__(remark, address=address, code=code)
        self.may_pass = True
        self.leader_id = leader_id
        self.leader_address = leader_address


class SendFailed(ClientError):
    """All attempts to send a message failed. `attempts` holds their errors in order; it is definite that the message is
    not stored only if every one of them is."""

    def __init__(self, attempts: Sequence[ClientError]) -> None:
        last = attempts[-1]
        times = "" if len(attempts) == 1 else f" ({len(attempts)} attempts)"
        super().__init__(f"{last.remark}{times}", address=last.address, code=last.code)
        self.attempts = tuple(attempts)
        self.is_definite = all(attempt.is_definite for attempt in attempts)


def error_from_reply(code: int, remark: str | None, address: str) -> BrokerRefused:
    """The error for a failure reply; a NotLeader if the remark begins with NOT_LEADER. The address in its hint is the
    one that the broker advertises."""
    text = remark or "no reason given"
    if _NOT_LEADER.match(text):
        return NotLeader(
            text,
            address=address,
            code=code,
            leader_id=_hint(_LEADER_ID, text),
            leader_address=_hint(_LEADER_ADDRESS, text),
        )
    return BrokerRefused(text, address=address, code=code)


def _hint(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match and match[1] != "-" else None
