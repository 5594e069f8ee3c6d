"""A small HTTP client for systems that speak JSON over HTTP: one connection, one request at a time.

A request during an operation of a client carries its `traceparent`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from harness.sdk.client import Unreachable
from harness.tracing import current_traceparent

__all__ = ["HttpError", "JsonHttp", "get", "post"]

MAX_BODY_BYTES = 16 << 20
"""Limit of one answer. A system that sends more is faulty, and the harness must not run out of memory."""


class HttpError(Exception):
    """The answer has a status of 400 or more. The caller must know whether the request may have taken effect."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"HTTP {status}: {str(body)[:200]}")
        self.status = status
        self.body = body
        """Parsed JSON, or the text."""


class JsonHttp:
    """Requests to one server at "http://ip:port", over a connection that is opened on demand and kept."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._name, self._port = parts.hostname or "", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> Any:
        """As `request`."""
        return await self.request("GET", path)

    async def post(self, path: str, body: Any) -> Any:
        """As `request`."""
        return await self.request("POST", path, body)

    async def put(self, path: str, body: Any) -> Any:
        """As `request`."""
        return await self.request("PUT", path, body)

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the answer's body: parsed JSON, else the text. The request has no body if that is
        None; bytes are sent as they are, anything else as JSON.

        Raises Unreachable if no connection could be made, HttpError for a status of 400 or more, ConnectionError or
        ValueError if no complete or valid answer came.
        """
        return _parsed(await self._exchange(method, path, body, MAX_BODY_BYTES))

    async def text(self, path: str, *, max_bytes: int = MAX_BODY_BYTES) -> str:
        """The body at a path as text, whatever it is, of at most so many bytes. Raises what `request` does."""
        return (await self._exchange("GET", path, None, max_bytes)).decode("utf-8", "replace")

    async def _exchange(self, method: str, path: str, body: Any, max_bytes: int) -> bytes:
        reader, writer = await self._connected()
        try:
            is_json = body is not None and not isinstance(body, bytes)
            content = json.dumps(body).encode() if is_json else body or b""
            head = f"{method} {path} HTTP/1.1\r\nHost: {self._name}:{self._port}\r\nContent-Length: {len(content)}\r\n"
            kind = "Content-Type: application/json\r\n" if is_json else ""
            parent = current_traceparent()
            trace = f"traceparent: {parent}\r\n" if parent else ""
            writer.write(f"{head}{kind}{trace}\r\n".encode() + content)
            await writer.drain()
            status, headers = await self._head(reader)
            raw = await self._body(reader, headers, max_bytes)
        except asyncio.IncompleteReadError:
            await self.close()
            raise ConnectionError("the server closed the connection before its answer was complete") from None
        except BaseException:
            await self.close()  # the rest of this answer must not be taken for the next one
            raise
        if headers["connection"] == "close":
            await self.close()
        if status >= 400:
            raise HttpError(status, _parsed(raw))
        return raw

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            await self.close()
            try:
                self._streams = await asyncio.open_connection(self._name, self._port)
            except OSError as error:
                raise Unreachable(f"cannot connect to {self._name}:{self._port}: {error.strerror or error}") from None
        return self._streams

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = lines[0].split()
        if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
            raise ValueError(f"no HTTP answer: {lines[0][:80]!r}")
        found = {"connection": "close" if words[0] == "HTTP/1.0" else ""}  # the default
        headers = (line.partition(":") for line in lines[1:] if line)
        found |= {name.strip().lower(): value.strip() for name, _, value in headers}
        found["connection"] = found["connection"].lower()
        return int(words[1]), found

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str], max_bytes: int) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            if "content-length" not in headers and headers["connection"] == "close":  # RFC 9112, 6.3: up to its end
                return await self._rest(reader, max_bytes)
            return await reader.readexactly(_bounded(int(headers.get("content-length", "0")), max_bytes))
        pieces, size_bytes = [], 0
        while count := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            size_bytes = _bounded(size_bytes + count, max_bytes)
            pieces.append((await reader.readexactly(count + 2))[:-2])
        await reader.readuntil(b"\r\n")
        return b"".join(pieces)

    async def _rest(self, reader: asyncio.StreamReader, max_bytes: int) -> bytes:
        pieces, size_bytes = [], 0
        while piece := await reader.read(65536):
            size_bytes = _bounded(size_bytes + len(piece), max_bytes)
            pieces.append(piece)
        return b"".join(pieces)


async def get(url: str) -> Any:
    """One request over a new connection. Returns and raises what `JsonHttp.request` does."""
    return await _once("GET", url, None)


async def post(url: str, body: Any) -> Any:
    """Like `get`, with a body."""
    return await _once("POST", url, body)


async def _once(method: str, url: str, body: Any) -> Any:
    parts = urlsplit(url)
    server = JsonHttp(f"http://{parts.netloc}")
    try:
        return await server.request(method, parts._replace(scheme="", netloc="").geturl() or "/", body)
    finally:
        await server.close()


def _bounded(size_bytes: int, max_bytes: int) -> int:
    if size_bytes > max_bytes:
        raise ValueError(f"an answer of more than {max_bytes} bytes")
    return size_bytes


def _parsed(raw: bytes) -> Any:
    text = raw.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
