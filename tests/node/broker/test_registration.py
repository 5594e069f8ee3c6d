"""Registration: at once after a change, otherwise periodically, at each name server independently."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import pytest

from node.broker import registration
from node.broker.registration import NameServerRegistrar, registration_body
from node.remoting import Command, RemotingClient, RemotingServer


class FakeNameServer:
    """Records its requests; replies with `code`."""

    def __init__(self) -> None:
        self.server = RemotingServer("127.0.0.1", 0)
        self.requests: list[Command] = []
        self.code = 0
        for code in (103, 104):
            self.server.register(code, self._answer)

    def _answer(self, command: Command, connection: object) -> Command:
        self.requests.append(command)
        return command.reply(self.code, remark=None if self.code == 0 else "refused\nforged line")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def codes(self) -> list[int]:
        return [request.code for request in self.requests]


BODY = registration_body({"t": {"topicName": "t"}}, 3, started_ms=1234)


def make(client: RemotingClient, *addresses: str, interval_s: float = 60, broker_id: int = 0) -> NameServerRegistrar:
    return NameServerRegistrar(
        client=client,
        name_servers=addresses,
        interval_s=interval_s,
        describe=lambda: ({"brokerName": "b", "brokerId": broker_id, "dledgerTerm": 7}, BODY),
    )


def test_the_registration_body_has_the_format_that_name_servers_read() -> None:
    assert json.loads(BODY) == {
        "topicConfigSerializeWrapper": {
            "topicConfigTable": {"t": {"topicName": "t"}},
            "dataVersion": {"timestamp": 1234, "counter": 3},
        },
        "filterServerList": [],
    }


def test_a_broker_registers_at_start_and_on_changes_and_unregisters_on_stop(helpers: Any) -> None:
    async def main() -> None:
        servers = [FakeNameServer(), FakeNameServer()]
        for server in servers:
            await server.server.start()
        client = RemotingClient()
        registrar = make(client, *(server.address for server in servers))
        registrar.start()
        await helpers.until(lambda: all(registrar.registered.values()))
        registrar.announce()
        await helpers.until(lambda: all(server.codes() == [103, 103] for server in servers))
        await registrar.stop()
        for server in servers:
            assert server.codes() == [103, 103, 104]
            first = server.requests[0]
            assert first.body == BODY
            assert first.ext_fields == {
                "brokerName": "b",
                "brokerId": "0",
                "dledgerTerm": "7",
                "compressed": "false",
                "bodyCrc32": str(zlib.crc32(BODY) & 0x7FFFFFFF),
            }
            await server.server.stop()
        await client.close()

    asyncio.run(main())


def test_a_broker_registers_again_after_the_interval(helpers: Any) -> None:
    async def main() -> None:
        server, client = FakeNameServer(), RemotingClient()
        await server.server.start()
        registrar = make(client, server.address, interval_s=0.02)
        registrar.start()
        await helpers.until(lambda: len(server.requests) >= 4)
        await registrar.stop()
        await client.close()
        await server.server.stop()

    asyncio.run(main())


def test_a_dead_name_server_is_retried_without_delaying_the_others(
    helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(registration, "RETRY_INTERVAL_S", 0.02)
        alive, late, client = FakeNameServer(), FakeNameServer(), RemotingClient()
        await alive.server.start()
        await late.server.start()
        address = late.address
        await late.server.stop()
        registrar = make(client, address, alive.address)
        registrar.start()
        await helpers.until(lambda: registrar.registered[alive.address])
        assert not registrar.registered[address]
        await late.server.start()
        await helpers.until(lambda: registrar.registered[address])
        await registrar.stop()
        await client.close()
        for server in (alive, late):
            await server.server.stop()

    asyncio.run(main())


def test_a_refusal_is_logged_as_one_line_and_tried_again(
    helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        monkeypatch.setattr(registration, "RETRY_INTERVAL_S", 0.01)
        server, client = FakeNameServer(), RemotingClient()
        server.code = 1
        await server.server.start()
        registrar = make(client, server.address)
        registrar.start()
        await helpers.until(lambda: len(server.requests) >= 5)
        assert not registrar.registered[server.address]
        server.code = 0
        await helpers.until(lambda: registrar.registered[server.address])
        await registrar.stop()
        await client.close()
        await server.server.stop()

    asyncio.run(main())
    assert len([record for record in caplog.records if "answered 1: refused" in record.getMessage()]) == 1
