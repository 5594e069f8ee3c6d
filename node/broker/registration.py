"""Registering at the name servers: who this broker is, which role it has, which topics it serves.

One task per name server registers at the start, at once when the role or the topics change, and every
`interval_s` in between (seed S1: 30 s). A name server that does not answer neither disturbs the others nor is
given up. The registration carries the log's term, so that a name server can tell a deposed master from its
successor whatever order their registrations arrive in.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from node.logs import LogLimiter
from node.remoting import Command, RemotingClient, RemotingError, RequestCode, ResponseCode

__all__ = ["Identity", "NameServerRegistrar", "registration_body"]

logger = logging.getLogger("node.broker")

REGISTER_TIMEOUT_MS = 3000
"""Timeout of one registration (R: 6 s, with a 30 s interval)."""
UNREGISTER_TIMEOUT_MS = 1000
"""At shutdown nobody waits long: the entry expires on its own."""
RETRY_INTERVAL_S = 1.0
"""Delay after a failed registration, unless the regular interval is shorter."""

Identity = dict[str, str | int | bool]
"""The fields of a registration: brokerName, brokerAddr, clusterName, haServerAddr, brokerId, dledgerTerm."""


def registration_body(topics: dict[str, Any], data_version: int, *, started_ms: int) -> bytes:
    """The body of a registration (R: RegisterBrokerBody): topic table, its version, no filter servers. The broker's
    start time is part of the version: its configuration may give other topics than before."""
    return json.dumps(
        {
            "topicConfigSerializeWrapper": {
                "topicConfigTable": topics,
                "dataVersion": {"timestamp": started_ms, "counter": data_version},
            },
            "filterServerList": [],
        },
        separators=(",", ":"),
    ).encode()


class NameServerRegistrar:
    """Keeps one broker registered at all its name servers. `describe` returns the current fields and body;
    `on_registered` gets the fields of each answer, which tell a slave its master (R)."""

    def __init__(
        self,
        *,
        client: RemotingClient,
        name_servers: tuple[str, ...],
        interval_s: float,
        describe: Callable[[], tuple[Identity, bytes]],
        on_registered: Callable[[Mapping[str, str]], None] = lambda fields: None,
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._describe = describe
        self._on_registered = on_registered
        self._news = {address: asyncio.Event() for address in name_servers}
        self._tasks: list[asyncio.Task[None]] = []
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.registered: dict[str, bool] = dict.fromkeys(name_servers, False)
        """Whether the last registration at each name server succeeded."""

    def start(self) -> None:
        """Register now, and keep registering."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_registered(address)) for address in self._news]

    def announce(self) -> None:
        """Role or topics have changed: register at once."""
        for event in self._news.values():
            event.set()

    async def stop(self) -> None:
        """Stop registering and unregister everywhere, in parallel; failures are only logged."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            fields, _ = self._describe()
            await asyncio.gather(*(self._unregister(address, fields) for address in self._news))

    async def _keep_registered(self, address: str) -> None:
        news = self._news[address]
        while True:
            news.clear()
            try:
                succeeded = await self._register(address)
            except Exception:
                logger.exception("the registration at %s met an error of its own", address)
                succeeded = False
            if succeeded != self.registered[address]:
                logger.info("%s at name server %s", "registered" if succeeded else "not registered", address)
                self.registered[address] = succeeded
            pause_s = self._interval_s if succeeded else min(self._interval_s, RETRY_INTERVAL_S)
            try:
                async with asyncio.timeout(pause_s):  # wait_for of Python 3.11 can swallow a cancellation
                    await news.wait()
            except TimeoutError:
                pass

    async def _register(self, address: str) -> bool:
        fields, body = self._describe()
        fields = fields | {"compressed": False, "bodyCrc32": zlib.crc32(body) & 0x7FFFFFFF}
        reply = await self._call(address, RequestCode.REGISTER_BROKER, fields, body, REGISTER_TIMEOUT_MS)
        if reply is not None:
            self._on_registered(reply.ext_fields)
        return reply is not None

    async def _unregister(self, address: str, fields: Identity) -> None:
        await self._call(address, RequestCode.UNREGISTER_BROKER, fields, b"", UNREGISTER_TIMEOUT_MS)

    async def _call(self, address: str, code: int, fields: Identity, body: bytes, timeout_ms: int) -> Command | None:
        try:
            reply = await self._client.invoke(address, Command.request(code, fields, body), timeout_ms=timeout_ms)
        except RemotingError as error:
            self._complaints.warning(logger, address, "name server %s: %s", address, error)
            return None
        if reply.code != ResponseCode.SUCCESS:
            self._complaints.warning(
                logger, address, "name server %s answered %d: %s", address, reply.code, reply.remark
            )
            return None
        return reply
