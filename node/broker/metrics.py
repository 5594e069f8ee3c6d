"""Metrics for Prometheus: a latency histogram, and everything that the status request reports.

The endpoint is a few lines of HTTP on a port of its own (`metrics_listen`), off unless configured. It answers
GET /metrics in the text format 0.0.4 and closes the connection.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from node.config import split_address
from node.listening import listening

__all__ = ["LATENCY_BOUNDS_S", "Histogram", "MetricsServer", "render"]

LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SLOW_PUT_S = 0.5
"""A put that takes longer is counted as slow (S1: warned about above 500 ms)."""
MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 16
"""Scrapers at once; further ones are closed."""
_PREFIX = "splitbrain_"


class Histogram:
    """Durations, counted by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.max_s = 0.0
        self.slow_total = 0

    def observe(self, duration_s: float, count: int = 1) -> None:
        """Count a duration in seconds, `count` times."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, duration_s)] += count
        self.sum_s += duration_s * count
        if duration_s > self.max_s:
            self.max_s = duration_s
        if duration_s > SLOW_PUT_S:
            self.slow_total += count

    def lines(self, name: str) -> list[str]:
        """Lines of the text format; buckets are cumulative."""
        lines, total = [f"# TYPE {_PREFIX}{name} histogram"], 0
        for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{_PREFIX}{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{_PREFIX}{name}_sum {self.sum_s:.6f}", f"{_PREFIX}{name}_count {total}"]


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render(table: Mapping[str, Any], puts: Histogram, topic_puts: Mapping[str, int]) -> bytes:
    """The metrics of a node: numbers of the status table as gauges and counters (those that end in Total), its texts
    as labels of one `info` line, the histogram, and puts by topic."""
    lines: list[str] = []
    texts: list[str] = []
    for name, value in table.items():
        if isinstance(value, int | float):
            kind = "counter" if name.endswith("Total") else "gauge"
            lines += [f"# TYPE {_PREFIX}{_snake(name)} {kind}", f"{_PREFIX}{_snake(name)} {value:d}" if isinstance(
                value, int) else f"{_PREFIX}{_snake(name)} {value:.6f}"]  # fmt: skip
        else:
            texts.append(f'{_snake(name)}="{_escaped(str(value))}"')
    lines += [f"# TYPE {_PREFIX}info gauge", f"{_PREFIX}info{{{','.join(texts)}}} 1"]
    lines += puts.lines("put_seconds")
    lines.append(f"# TYPE {_PREFIX}topic_puts_total counter")
    lines += [f'{_PREFIX}topic_puts_total{{topic="{_escaped(topic)}"}} {count}' for topic, count in topic_puts.items()]
    return ("\n".join(lines) + "\n").encode()


class MetricsServer:
    """Serves `render()` to scrapers at `address`."""

    def __init__(self, address: str, render: Callable[[], bytes]) -> None:
        self._host, self._wanted_port = split_address(address)
        self._render = render
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def port(self) -> int:
        """The port listened on; known once started."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Open the port. Raises OSError."""
        with listening("metrics_listen"):
            self._server = await asyncio.start_server(
                self._accepted, self._host, self._wanted_port, limit=MAX_REQUEST_BYTES
            )

    async def stop(self) -> None:
        """Close the port and whatever is connected."""
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._server = None

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_S)
            parts = request.split(b"\r\n", 1)[0].split(b" ")
            found = len(parts) == 3 and parts[0] in (b"GET", b"HEAD") and parts[1].split(b"?")[0] == b"/metrics"
            body = self._render() if found else b"not found; the figures are at /metrics\n"
            head = (
                f"HTTP/1.1 {'200 OK' if found else '404 Not Found'}\r\n"
                "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + (b"" if parts[0] == b"HEAD" else body))
            writer.close()  # after everything written, as far as the peer takes it
            await asyncio.wait_for(writer.wait_closed(), REQUEST_TIMEOUT_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # such a request gets no answer
        finally:
            writer.transport.abort()
