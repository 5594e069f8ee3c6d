"""The plug-in of Tarantool: what its instances are told, and its client against a console that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from harness.sdk import Host, Refused, Status
from harness.systems import tarantool
from harness.systems.planned_hosts import PlannedHosts
from harness.systems.tarantool import Tarantool, TarantoolClient
from harness.systems.tarantool_script import SCRIPT, call, greeted
from tests.harness.systems.served import over_a_connection

GREETING = b"Tarantool 2.6.0 (Lua console)\ntype 'help' for interactive help\n"
"""As 2.6.0 sends it, without the spaces that fill its lines."""


def said(content: Any) -> bytes:
    """An answer of the console, whose text YAML has quoted."""
    return b"---\n- '%s'\n...\n" % json.dumps(content, separators=(",", ":")).replace("'", "''").encode()


def with_console(answers: Sequence[bytes], scenario: Callable[[Any], Awaitable[Any]]) -> tuple[Any, list[str]]:
    """The result of `scenario` with a connection to a console that gives these answers, and the lines it was sent."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        for answer in answers:
            asked.append((await reader.readline()).decode().rstrip())
            writer.write(answer)
        writer.close()

    return over_a_connection(serve, greeted, scenario), asked


def with_client(
    settings: dict[str, str], answers: Sequence[bytes], scenario: Callable[[TarantoolClient], Awaitable[Any]]
) -> tuple[Any, list[str]]:
    async def performed(streams: Any) -> Any:
        client = TarantoolClient()
        client.settings, client.process, client.streams, client.reader = settings, 4, streams, streams
        return await scenario(client)

    return with_console(answers, performed)


def system_of(**settings: str) -> Tarantool:
    system = Tarantool()
    system.settings = {name: choices[0] for name, choices in Tarantool.settings.items()} | settings
    system.hosts = [
        Host(f"n{number}", number, PlannedHosts(()), Tarantool.ports, lambda host, name: name)  # type: ignore[arg-type]
        for number in (1, 2, 3)
    ]
    return system


def test_an_answer_is_a_quoted_text_whose_long_lines_are_broken_at_a_space() -> None:
    """As 2.6.0 answers `return json.encode({result = "it's ..."})`, with 100 characters before the second word."""
    broken = b"---\n- '{\"result\":\"it''s" + b"s" * 100 + b"\n  long\"}'\n...\n"
    found, asked = with_console([broken], lambda streams: call(streams, "look", "read", 3))
    assert found == f"it's{'s' * 100} long"
    assert asked == ['return look("read", 3)']


def test_an_answer_may_be_longer_than_the_lines_that_asyncio_reads_by_default() -> None:
    members = [*range(50_000)]
    found, _ = with_console([said({"result": members})], lambda streams: call(streams, "look", "members"))
    assert found == members


def test_only_what_the_script_calls_a_refusal_certainly_did_not_happen() -> None:
    async def write(client: TarantoolClient) -> None:
        await client.write(1, 2)

    settings = {"reads": "confirmed"}
    with pytest.raises(Refused, match="timed out"):
        with_client(settings, [said({"refusal": "Quorum collection timed out"})], write)
    for answer in (said({"failure": "Failed to write to disk"}), b"---\n- error: 'attempt to call a nil value'\n...\n"):
        with pytest.raises(OSError, match="to ") as caught:
            with_client(settings, [answer], write)
        assert not isinstance(caught.value, Refused)
    with pytest.raises(EOFError):
        with_client(settings, [said({"result": None})[:-1]], write)


def test_a_confirmed_read_is_a_transaction_and_other_reads_are_not() -> None:
    async def scenario(client: TarantoolClient) -> Any:
        await client.write(1, 7)
        assert await client.cas(1, 7, 8) is True
        return await client.read(1), await client.members(), await client.value()

    results: Sequence[Any] = (None, True, 8, [], 0)
    answers = [said({"result": each}) for each in results]
    found, asked = with_client({"reads": "confirmed"}, answers, scenario)
    assert found == (8, [], 0)
    assert asked[:2] == ['return commit("write", 4, 1, 7)', 'return commit("cas", 4, 1, 7, 8)']
    assert asked[2:] == ['return commit("read", 4, 1)', 'return commit("members", 4)', 'return commit("value", 4)']
    for weak in ("primary", "local"):
        _, asked = with_client({"reads": weak}, answers, scenario)
        assert asked[2:] == ['return look("read", 1)', 'return look("members")', 'return look("value")']


def test_a_counter_is_changed_by_one_transaction() -> None:
    async def scenario(client: TarantoolClient) -> Any:
        await client.increment(2)
        await client.add(9)
        return await client.fetch_add(3)

    found, asked = with_client({"reads": "primary"}, [said({"result": each}) for each in (0, None, 2)], scenario)
    assert found == 2
    assert asked == [f"return commit({words})" for words in ('"fetch_add", 4, 2', '"add", 4, 9', '"fetch_add", 4, 3')]


def test_the_promoted_host_is_the_only_one_that_may_write() -> None:
    system = system_of(pipeline="on", rows="2")

    def given(number: int) -> Any:
        files = system.files(system.hosts[number - 1])
        assert files["init.lua"] == SCRIPT
        return json.loads(files["settings.json"])

    def writers() -> list[bool]:
        return [not given(number)["box"]["read_only"] for number in (1, 2, 3)]

    assert writers() == [True, False, False]
    asyncio.run(system.promote(system.hosts[2]))
    assert writers() == [False, False, True]
    assert given(2)["is_synchronous"] and given(2)["is_pipelined"] and given(2)["rows"] == 2
    box = given(2)["box"]
    assert box["replication"] == ["127.0.0.1:3301", "127.0.0.2:3301", "127.0.0.3:3301"]
    assert box["replication_synchro_quorum"] == 2
    assert box["listen"] == "127.0.0.2:3301" and box["instance_uuid"].endswith("002")


def test_a_client_connects_to_the_host_that_takes_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []
    client = TarantoolClient()
    client.hosts = system_of().hosts
    client.host, client.process, client.settings = client.hosts[0], 0, {"reads": "local"}
    leaders = {"n2"}

    async def is_primary(host: Host) -> bool:
        return host.name in leaders

    async def connect(address: str) -> Any:
        connected.append(address)
        return address

    async def greeting(streams: Any) -> Any:
        return streams

    monkeypatch.setattr(client, "is_primary", is_primary)
    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(client, "address", lambda port, host=None: f"{(host or client.host).name}:{port}")
    monkeypatch.setattr(tarantool, "greeted", greeting)
    asyncio.run(client.open())
    assert connected == ["n2:console", "n1:console"]
    leaders.clear()
    with pytest.raises(Refused, match="no host takes writes"):
        asyncio.run(client.open())


def test_the_status_of_a_host_is_what_its_console_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def status(streams: Any) -> Any:
        @contextlib.asynccontextmanager
        async def connection(address: str) -> Any:
            assert address == "console"
            yield streams

        async def greeting(streams: Any) -> Any:
            return streams

        monkeypatch.setattr(tarantool, "connection", connection)
        monkeypatch.setattr(tarantool, "greeted", greeting)
        host: Any = SimpleNamespace(address=lambda port: port)
        return await Tarantool().status(host)

    answer = said({"result": {"leads": False, "status": "orphan", "end": 71}})
    found, asked = with_console([answer], status)
    assert found == Status(leads=False, end=71, facts={"status": "orphan"})
    assert asked == ["return status()"]
