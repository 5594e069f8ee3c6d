"""Deferred replies: sent before or after the connection attaches itself, and observed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.remoting import Command, DeferredReply


class Writer:
    """A connection that records what it is to send."""

    def __init__(self) -> None:
        self.sent: list[Command | bytes] = []

    def write_reply(self, requests: Sequence[Command], reply: Command | bytes) -> None:
        self.sent.append(reply)

    def end_deferred(self, deferred: DeferredReply, reply: Command | bytes) -> None:
        self.sent.append(reply)


@pytest.mark.parametrize(
    "steps",
    [
        "attach send observe",
        "send attach observe",
        "send observe attach",
        "observe send attach",
        "observe attach send",
        "attach observe send",
    ],
)
def test_an_observer_is_called_once_whenever_it_is_added(steps: str) -> None:
    request = Command(1)
    reply, writer = request.reply(0, body=b"done"), Writer()
    deferred, observed = DeferredReply((request,)), list[Command | bytes]()
    for step in steps.split():
        if step == "attach":
            deferred.attach(writer, 10)
        elif step == "send":
            deferred.send(reply)
        else:
            deferred.observe(observed.append)
    assert observed == writer.sent == [reply]
