"""The small HTTP client: complete answers, definite refusals, and no answer taken for that of another request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from harness.sdk import HttpError, JsonHttp, Refused, connection, get, post
from harness.tracing import Operation, ids_of, operation_under_way

Reply = bytes


def with_server(reply: Reply, work: Callable[[str], Awaitable[None]]) -> list[bytes]:
    """Do something with a server that answers every request with `reply`, or hangs up if that is empty; returns what it
    received."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(65536):
            heard.append(head)
            if not reply:
                break
            writer.write(reply)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await work(f"http://127.0.0.1:{port}")
        server.close()

    asyncio.run(main())
    return heard


def test_requests_and_answers_are_json() -> None:
    async def work(url: str) -> None:
        server = JsonHttp(url)
        assert await server.post("/kv", {"key": 1}) == {"ok": True}
        assert await server.get("/kv") == {"ok": True}
        await server.close()

    first, second = with_server(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"ok":true}', work)
    assert first.startswith(b"POST /kv HTTP/1.1\r\n") and first.endswith(b'\r\n\r\n{"key": 1}')
    assert second.startswith(b"GET /kv HTTP/1.1\r\n") and b"Content-Type" not in second


def test_bytes_are_sent_as_they_are() -> None:
    async def work(url: str) -> None:
        await post(f"{url}/form", b"name=a&password=")

    (heard,) = with_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", work)
    assert heard.endswith(b"Content-Length: 16\r\n\r\nname=a&password=")


def test_a_request_of_an_operation_carries_its_traceparent_and_another_none() -> None:
    async def work(url: str) -> None:
        await get(f"{url}/before")
        operation_under_way.set(Operation("r1", 7))
        await asyncio.create_task(get(f"{url}/during"))
        operation_under_way.set(None)

    before, during = with_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", work)
    ids = ids_of("r1", 7)
    assert b"traceparent" not in before
    assert f"\r\ntraceparent: 00-{ids.trace}-{ids.span}-01\r\n".encode() in during


def test_a_text_is_returned_as_it_is_and_no_longer_than_asked_for() -> None:
    async def work(url: str) -> None:
        server = JsonHttp(url)
        assert await server.text("/metrics", max_bytes=11) == '{"ok":true}'
        with pytest.raises(ValueError, match="more than 10 bytes"):
            await server.text("/metrics", max_bytes=10)

    with_server(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"ok":true}', work)


def test_a_chunked_answer_is_decoded() -> None:
    async def work(url: str) -> None:
        assert await post(f"{url}/x", {}) == [1, 2]

    with_server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n3\r\n 2]\r\n0\r\n\r\n", work)


def test_a_status_of_400_or_more_raises_with_the_answer() -> None:
    async def work(url: str) -> None:
        with pytest.raises(HttpError) as caught:
            await post(f"{url}/x", {})
        assert (caught.value.status, caught.value.body) == (503, "no leader")

    with_server(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 9\r\n\r\nno leader", work)


def test_a_failed_connection_is_a_refusal_and_a_broken_one_is_not() -> None:
    async def work(url: str) -> None:
        with pytest.raises(ConnectionError, match="before its answer was complete"):
            await post(f"{url}/x", {})
        with pytest.raises(Refused, match=r"cannot connect to 127\.0\.0\.1:1:"):
            await post("http://127.0.0.1:1/x", {})

    with_server(b"", work)


def test_an_unreachable_host_can_be_skipped_by_catching_connection_errors() -> None:
    """As by a client that tries one host after the other, or by a plug-in that looks for the leader."""

    async def work(url: str) -> None:
        found = []
        for address in ("127.0.0.1:1", url.removeprefix("http://")):
            with contextlib.suppress(OSError):
                await post(f"http://{address}/x", {})
                found.append(address)
            with contextlib.suppress(ConnectionError):
                async with connection(address):
                    found.append(address)
        assert found == [url.removeprefix("http://")] * 2

    with_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", work)


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-OpenSSH_9\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"]
)
def test_an_invalid_or_oversized_answer_is_an_error(reply: bytes) -> None:
    async def work(url: str) -> None:
        with pytest.raises(ValueError, match=r"no HTTP answer|an answer of more than"):
            await post(f"{url}/x", {})

    with_server(reply, work)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def work(url: str) -> None:
        server = JsonHttp(url)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.get("/slow"), 0.05)
        assert server._streams is None

    with_server(b"HTTP/1.1 200 OK\r\n", work)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: Close\r\n"])
def test_an_answer_without_a_length_ends_with_its_connection(head: bytes) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"\r\n[1,")
            await writer.drain()
            writer.write(b" 2]")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        kept = JsonHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert [await kept.get("/"), await kept.get("/")] == [[1, 2], [1, 2]]
        server.close()

    asyncio.run(main())
