"""Hooks around sending: called before a message is checked and after it was answered (S1: SendMessageHook).

Code that embeds a broker adds them to `BrokerController.send_hooks`: to count, to trace, to refuse. They cost nothing
while there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from node.broker.send_request import names_of
from node.remoting import Command, Connection, DeferredReply, RequestError, decode

__all__ = ["Answer", "SendContext", "SendHook", "SendHooks", "SendRefused"]

logger = logging.getLogger("node.broker")

Answer = Command | DeferredReply | Awaitable[Command | DeferredReply]


class SendContext(NamedTuple):
    """One send request, as its hooks see it."""

    command: Command
    producer_group: str
    topic: str
    born_host: str
    body_size_bytes: int


class SendRefused(Exception):
    """A hook has refused the request, with this reply."""

    def __init__(self, reply: Command) -> None:
        super().__init__(reply.remark)
        self.reply = reply


class SendHook(Protocol):
    """Called around every send."""

    def before(self, context: SendContext) -> None:
        """The request has arrived. A RequestError raised here is its answer; any other error is logged."""
        ...

    def after(self, context: SendContext, reply: Command) -> None:
        """The request is answered with `reply`: stored, refused, or of unknown outcome. Errors raised are logged."""
        ...


class SendHooks:
    """The hooks of one broker, called in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[SendHook] = []

    def add(self, hook: SendHook) -> None:
        """Have `hook` called from the next request on."""
        self._hooks.append(hook)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def before(self, command: Command, connection: Connection) -> SendContext:
        """Call the hooks before a request is checked. Raises SendRefused if one of them refuses."""
        names = names_of(command)
        context = SendContext(
            command,
            command.get_str(names["producerGroup"], ""),
            command.get_str(names["topic"], ""),
            connection.remote_address,
            len(command.body),
        )
        try:
            for hook in self._hooks:
                self._call(hook.before, context)
        except RequestError as error:
            raise SendRefused(self._after(context, command.reply(error.code, remark=error.remark))) from error
        return context

    def watch(self, context: SendContext, answer: Answer) -> Answer:
        """Call the hooks after the request is answered."""
        if isinstance(answer, Command):
            return self._after(context, answer)
        if isinstance(answer, DeferredReply):
            answer.observe(lambda reply: self._replied(context, reply))
            return answer
        return self._await(context, answer)

    async def _await(self, context: SendContext, answer: Awaitable[Command | DeferredReply]) -> Command | DeferredReply:
        reply = self.watch(context, await answer)
        assert isinstance(reply, Command | DeferredReply)
        return reply

    def _replied(self, context: SendContext, reply: Command | bytes) -> None:
        self._after(context, reply if isinstance(reply, Command) else decode(reply[4:]))

    def _after(self, context: SendContext, reply: Command) -> Command:
        for hook in self._hooks:
            self._call(hook.after, context, reply)
        return reply

    def _call(self, method: Callable[..., None], *arguments: object) -> None:
        try:
            method(*arguments)
        except (RequestError, asyncio.CancelledError):
            if len(arguments) == 1:
                raise
            logger.exception("a hook refused a message that is answered already")
        except Exception:
            logger.exception("a hook around sending failed")
