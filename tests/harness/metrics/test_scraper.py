"""Reading pages beside a run: whatever a host sends or does not send is a sample or a gap, and never an error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.metrics import scraper as module
from harness.metrics.expression import Metric, Page, metric_of
from harness.metrics.scraper import MAX_SAMPLES_OF_A_HOST, Scraper, values_of

PAGE = Page("client", "/metrics")
METRICS = [metric_of(text, PAGE) for text in ("up", "rate(writes_total)", "mean(fsync_seconds)", "absent")]
TEXT = "# TYPE up gauge\nup 1\nwrites_total 7\nfsync_seconds_sum 0.5\nfsync_seconds_count 4\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(body: str, head: str = "HTTP/1.1 200 OK") -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(f"{head}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode())

    return serve


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        writer.write(b'up{a="1"} 1\n' * 10_000)
        await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def read(
    path: Path, *servers: Serve | None, until: Callable[[Scraper], bool], metrics: list[Metric] = METRICS
) -> tuple[Scraper, list[dict[str, Any]]]:
    """Read the metrics of hosts, each with a server (None: nobody listens), until a condition holds."""
    hosts = [f"n{number}" for number in range(1, len(servers) + 1)]

    async def main() -> Scraper:
        started = [
            None if serve is None else await asyncio.start_server(_tolerant(serve), "127.0.0.1", 0) for serve in servers
        ]
        ports = [1 if each is None else each.sockets[0].getsockname()[1] for each in started]
        urls = {host: f"http://127.0.0.1:{port}" for host, port in zip(hosts, ports, strict=True)}
        loop = asyncio.get_running_loop()
        scraper = Scraper(
            metrics, hosts, lambda host, _: urls[host], lambda: int(loop.time() * 1e9), str(path), time_limit_s=60.0
        )
        task = asyncio.create_task(scraper.run())
        async with asyncio.timeout(60):
            while not until(scraper) and not task.done():
                await asyncio.wait({task}, timeout=0.01)
        task.cancel()
        for error in await asyncio.gather(task, return_exceptions=True):
            assert error is None or isinstance(error, asyncio.CancelledError), error
        for each in started:
            if each is not None:
                each.close()
        return scraper

    found = asyncio.run(main())
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return found, lines


def _tolerant(serve: Serve) -> Serve:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return served


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.05)


def total(counts: dict[str, int], hosts: int) -> int:
    return min(counts.values()) if len(counts) == hosts else 0


def test_each_host_has_its_samples_beside_one_that_is_down_and_one_that_hangs(tmp_path: Path) -> None:
    found, (header, *lines) = read(
        tmp_path / "m.jsonl", answering(TEXT), None, silent, until=lambda s: total(s.summary()["unanswered"], 2) >= 2
    )
    assert [metric["text"] for metric in header["metrics"]] == [metric.text for metric in METRICS]
    assert header["hosts"] == ["n1", "n2", "n3"] and header["pages"] == ["client/metrics"]
    of_n1 = [line for line in lines if line["host"] == "n1"]
    assert len(of_n1) >= 3 and all(line["values"] == [1, 7, [0.5, 4], None] for line in of_n1)
    assert [line["time"] for line in of_n1] == sorted(line["time"] for line in of_n1)
    assert "cannot connect to" in next(line for line in lines if line["host"] == "n2")["error"]
    assert next(line for line in lines if line["host"] == "n3")["error"] == "no answer within 1 s"
    summary = found.summary()
    assert summary["never_seen"] == ["absent"] and summary["reads"]["n1"] >= len(of_n1)
    assert "n1" not in summary["unanswered"]


def test_a_series_on_one_of_two_pages_is_not_missed(tmp_path: Path) -> None:
    both = [metric_of("up", PAGE), metric_of("up", Page("client", "/other")), metric_of("gone", PAGE)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            body = b"up 1\n" if b"/metrics" in head else b"other 1\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    found, lines = read(
        tmp_path / "m.jsonl", serve, until=lambda s: s.summary()["reads"].get("n1", 0) >= 6, metrics=both
    )
    assert found.summary()["never_seen"] == ["gone"] and found.summary()["metrics"] == ["up", "gone"]
    assert {(line["page"], str(line["values"])) for line in lines[1:]} == {(0, "[1.0, None]"), (1, "[None]")}


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (answering("no\n", "HTTP/1.1 503 No"), "HTTP 503"),
        (answering("hello"), "not a page of metrics"),
        (answering("up one\n"), "not a number"),
        (answering("x" * 100, "SSH-2.0-x"), "no HTTP answer"),
        (answering("up 1\n" * 2_000_000), "more than 8388608 bytes"),
        (endless, "more than 8388608 bytes|no answer within"),
    ],
)
def test_garbage_and_endless_pages_are_gaps_with_their_reason(tmp_path: Path, serve: Serve, said: str) -> None:
    _, lines = read(tmp_path / "m.jsonl", serve, until=lambda s: total(s.summary()["unanswered"], 1) >= 2)
    errors = [line["error"] for line in lines[1:]]
    assert len(errors) >= 2
    assert all(re.search(said, error) for error in errors), errors


def test_a_host_that_comes_back_is_read_again(tmp_path: Path) -> None:
    calls = iter(range(1_000_000))

    async def flapping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if next(calls) % 2:
            await answering(TEXT)(reader, writer)

    _, lines = read(tmp_path / "m.jsonl", flapping, until=lambda s: s.summary()["reads"].get("n1", 0) >= 5)
    assert "error" in lines[1] and "values" in lines[2]


def test_a_file_that_is_full_ends_the_reading_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2_000)
    found, _ = read(tmp_path / "m.jsonl", answering(TEXT), answering(TEXT), until=lambda s: False)
    assert found.stopped == "more than 0 MB of samples"
    assert (tmp_path / "m.jsonl").stat().st_size < 2_500


def test_a_full_disk_ends_the_reading_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODE", "w")  # a device exists already
    found, _ = read(Path("/dev/full"), answering(TEXT), until=lambda s: False)
    assert found.stopped == "cannot write full: No space left on device"


def test_a_file_that_cannot_be_created_ends_the_reading_and_not_the_run(tmp_path: Path) -> None:
    found, _ = read(tmp_path / "nowhere" / "m.jsonl", answering(TEXT), until=lambda s: False)
    assert found.stopped == "cannot write m.jsonl: No such file or directory"


def test_a_long_run_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    week_s = 7 * 86400.0
    one = Scraper(METRICS, ["n1"], lambda *_: "", lambda: 0, "", time_limit_s=week_s)
    assert one.interval_s * MAX_SAMPLES_OF_A_HOST == week_s
    assert Scraper(METRICS, ["n1"], lambda *_: "", lambda: 0, "", time_limit_s=60.0).interval_s == 1.0


def test_pages_are_read_for_their_own_metrics() -> None:
    assert values_of(TEXT, METRICS[1:3]) == [7.0, [0.5, 4.0]]
    assert values_of("fsync_seconds_sum 1\n", [METRICS[2]]) == [None]
