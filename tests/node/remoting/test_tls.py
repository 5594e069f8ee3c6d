"""TLS on the port: which peers are accepted, and that nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from node.client import BrokerClient, ClientError, Credentials
from node.config import ConfigError, parse_broker_config, parse_name_server_config
from node.remoting import (
    ClientLimits,
    Command,
    ConnectFailed,
    RemotingClient,
    RemotingError,
    RemotingServer,
    ServerLimits,
)
from node.remoting.codec import encode
from node.remoting.tls_handshake import TlsHandshake
from node.security import TlsConfig

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One authority with certificates for a server and a client, and an untrusted certificate."""
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem",
        )  # fmt: skip
    return directory


def tls(keys: Path, name: str = "server", **options: Any) -> TlsConfig:
    return TlsConfig(certificate=f"{keys}/{name}.pem", key=f"{keys}/{name}.key", **options)


def trusting(keys: Path, ca: str = "ca", own: str = "client") -> ssl.SSLContext:
    context = tls(keys, own, ca=f"{keys}/{ca}.pem").dialling_context()
    assert context is not None
    return context


async def echo(context: ssl.SSLContext | None, server_tls: ssl.SSLContext, body: bytes = b"hello") -> bytes:
    """The body that an echo server with TLS replies with. Raises RemotingError."""
    server = RemotingServer("127.0.0.1", 0, tls=server_tls, limits=ServerLimits(tls_handshake_timeout_s=1.0))
    server.register(1, lambda command, connection: command.reply(0, body=command.body))
    await server.start()
    client = RemotingClient(ClientLimits(connect_timeout_ms=2000, tls_handshake_timeout_s=1.0), tls=context)
    try:
        request = Command.request(1, body=body)
        return (await client.invoke(f"127.0.0.1:{server.port}", request, timeout_ms=3000)).body
    finally:
        await client.close()
        await server.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


def test_large_requests_and_replies_pass_through_tls(keys: Path) -> None:
    async def scenario() -> None:
        big = bytes(range(256)) * 20_000
        assert await echo(trusting(keys), tls(keys).server_context(), big) == big

    run(scenario)


def test_a_connection_with_an_untrusted_certificate_or_without_tls_fails(keys: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConnectFailed):
            await echo(trusting(keys, ca="stranger"), tls(keys).server_context())
        mutual = tls(keys, client_ca=f"{keys}/ca.pem").server_context()
        assert await echo(trusting(keys), mutual) == b"hello"
        with pytest.raises(RemotingError):
            await echo(trusting(keys, own="stranger"), mutual)
        with pytest.raises(RemotingError):
            await echo(None, tls(keys).server_context())

    run(scenario)


def test_unfinished_handshakes_count_as_connections_and_are_closed_first(keys: Path, until: Any) -> None:
    async def scenario() -> None:
        limits = ServerLimits(max_connections=2, tls_handshake_timeout_s=60.0)
        server = RemotingServer("127.0.0.1", 0, tls=tls(keys).server_context(), limits=limits)
        server.register(1, lambda command, connection: command.reply(0, body=command.body))
        await server.start()
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        for reader, _ in silent[:3]:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        assert server.connection_count == 2
        clients = [RemotingClient(tls=trusting(keys)) for _ in range(2)]
        for client in clients:
            reply = await client.invoke(f"127.0.0.1:{server.port}", Command.request(1, body=b"x"), timeout_ms=9000)
            assert reply.body == b"x" and server.connection_count == 2
        for reader, _ in silent[3:]:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 10) == b"", "both present connections have sent a request"
        for each in (writer, *(other for _, other in silent)):
            each.close()
        await clients[0].close()
        await until(lambda: server.connection_count == 1, "the client is gone")
        _, last = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: server.connection_count == 2, "a handshake is begun")
        await asyncio.wait_for(server.stop(), 10)
        assert server.connection_count == 0
        last.close()
        await clients[1].close()

    run(scenario)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(keys: Path) -> None:
    async def scenario() -> None:
        server = RemotingServer("127.0.0.1", 0, tls=tls(keys).server_context())
        server.register(1, lambda command, connection: command.reply(0, body=command.body))
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        come, going = ssl.MemoryBIO(), ssl.MemoryBIO()
        inside = trusting(keys).wrap_bio(come, going)
        while True:
            try:
                inside.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(going.read())
                come.write(await reader.read(1 << 16))
        inside.write(encode(Command.request(1, body=b"early")))
        writer.write(going.read())  # the end of the handshake and the request
        answer = b""
        while b"early" not in answer:
            come.write(await asyncio.wait_for(reader.read(1 << 16), 10))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += inside.read(1 << 16)
        writer.close()
        await server.stop()

    run(scenario)


def test_the_error_names_the_key_of_an_invalid_certificate_file(keys: Path) -> None:
    missing = TlsConfig(certificate=f"{keys}/no.pem", key=f"{keys}/no.key")
    swapped = TlsConfig(certificate=f"{keys}/server.pem", key=f"{keys}/client.key")
    for config in (missing, swapped):
        with pytest.raises(ConfigError, match=r"tls\.certificate"):
            config.server_context()
    with pytest.raises(ConfigError, match=r"tls\.client_ca"):
        tls(keys, client_ca=f"{keys}/server.key").server_context()
    with pytest.raises(ConfigError, match="certificate: is required"):
        parse_name_server_config('listen = "127.0.0.1:0"\n[tls]\nkey = "/k"\n')
    with pytest.raises(ConfigError, match="ca: is no known key"):
        parse_name_server_config('listen = "127.0.0.1:0"\n[tls]\ncertificate = "/c"\nkey = "/k"\nca = "/a"\n')
    assert (
        parse_broker_config('self_id="n1"\nlisten="1.1.1.1:1"\ndata_dir="/d"\n[dledger]\nlisten="1.1.1.1:2"').tls
        is None
    )


def test_a_name_server_a_broker_and_a_client_work_inside_tls(serving: Any, keys: Path) -> None:
    """With certificates and signatures; a plain-text client fails."""
    extra = f"""
[tls]
certificate = "{keys}/server.pem"
key = "{keys}/server.key"
ca = "{keys}/ca.pem"
[acl]
[[acl.accounts]]
access_key = "operator"
secret_key = "operator-secret"
admin = true
"""
    options = {
        "tls": trusting(keys),
        "credentials": Credentials(access_key="operator", secret_key="operator-secret"),
    }

    async def scenario() -> None:
        context = tls(keys).server_context()
        async with serving({"t": 1}, extra=extra, name_server_tls=context, client_options=options) as served:
            async with BrokerClient(name_servers=[served.name_server], runtime=served.runtime, **options) as client:
                await client.send("t", 0, b"hidden")
                assert (await client.pull("t", 0, 0, 1)).messages[0].body == b"hidden"
            async with BrokerClient(name_servers=[], runtime=served.runtime, request_timeout_ms=1000) as plain:
                with pytest.raises(ClientError):
                    await plain.max_offset("t", 0, address=served.address)

    run(scenario)


def test_bytes_read_before_the_handshake_begins_are_part_of_it(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop reads from a new connection before it runs the task of the handshake."""
    open_now, received = TlsHandshake.connection_made, TlsHandshake.data_received
    unopened: dict[TlsHandshake, asyncio.BaseTransport] = {}
    opened: list[TlsHandshake] = []

    def hold(self: TlsHandshake, transport: asyncio.BaseTransport) -> None:
        unopened[self] = transport

    def open_once_something_was_read(self: TlsHandshake, data: bytes) -> None:
        received(self, data)
        if self in unopened:
            opened.append(self)
            open_now(self, unopened.pop(self))

    monkeypatch.setattr(TlsHandshake, "connection_made", hold)
    monkeypatch.setattr(TlsHandshake, "data_received", open_once_something_was_read)

    async def scenario() -> None:
        big = bytes(range(256)) * 2_000
        assert await echo(trusting(keys), tls(keys).server_context(), big) == big

    run(scenario)
    assert len(opened) == 1
