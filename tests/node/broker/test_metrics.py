"""Metrics: histogram, text format, the endpoint, statistics of puts, administration of topics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.broker import message_store as store_module
from node.broker import metrics as module
from node.broker.metrics import Histogram, MetricsServer, render


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram()
    for duration_s in (0.0001, 0.0005, 0.0006, 0.7, 100.0):
        histogram.observe(duration_s)
    lines = histogram.lines("x")
    assert 'splitbrain_x_bucket{le="0.0005"} 2' in lines and 'splitbrain_x_bucket{le="1.0"} 4' in lines
    assert 'splitbrain_x_bucket{le="+Inf"} 5' in lines and "splitbrain_x_count 5" in lines
    assert (histogram.max_s, histogram.slow_total) == (100.0, 2)


def test_the_text_format_has_types_and_escaped_labels() -> None:
    text = render({"putTotal": 3, "lagS": 0.5, "selfId": 'a"\n'}, Histogram(), {"t": 2}).decode()
    assert "# TYPE splitbrain_put_total counter\nsplitbrain_put_total 3\n" in text
    assert "# TYPE splitbrain_lag_s gauge\nsplitbrain_lag_s 0.500000\n" in text
    assert 'splitbrain_info{self_id="a\\"\\n"} 1' in text
    assert 'splitbrain_topic_puts_total{topic="t"} 2' in text


async def http(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.mechanism(
    "mmap page-cache reads; optional warm-up/unlock; per-topic put counters, max put time; warn >500 ms"
)
def test_the_endpoint_serves_metrics_and_put_statistics(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for _ in range(3):
            assert (await case.send()).code == 0
        port = case.broker.metrics.port
        answer = (await http(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).decode()
        assert answer.startswith("HTTP/1.1 200 OK\r\n") and "version=0.0.4" in answer
        for line in ("splitbrain_put_total 3", "splitbrain_put_seconds_count 3", "splitbrain_dispatch_behind 0",
                     'splitbrain_topic_puts_total{topic="t"} 3', "splitbrain_held_pulls 0", "splitbrain_get_total 0",
                     "splitbrain_flush_behind 0", "splitbrain_term 1", "splitbrain_takes_writes 1",
                     "splitbrain_ledger_begin_index 0", "splitbrain_ledger_end_index 3",
                     "splitbrain_committed_index 3", "splitbrain_dispatched_index 3"):  # fmt: skip
            assert f"\n{line}\n" in answer, line
        for name in ("puts_per_second", "gets_per_second", "disk_full", "put_max_seconds"):
            assert f"\nsplitbrain_{name} " in answer, name
        assert 'role="LEADER"' in answer and 'leader_id="n3"' in answer
        assert (await http(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert await http(port, b"x" * 20_000) == b""

    run_case(scenario, metrics_listen="127.0.0.1:0")


def test_the_number_of_scrapers_is_bounded(run_case: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)

    async def scenario(case: Any) -> None:
        port = case.broker.metrics.port
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.05)
        assert await http(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        silent.close()

    run_case(scenario, metrics_listen="127.0.0.1:0")


def test_a_scraper_that_does_not_read_is_disconnected(monkeypatch: Any) -> None:
    """However much is unsent: no data is kept for a peer that only holds the connection open."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.1)
    body = bytes(32 << 20)

    async def scenario() -> None:
        server = MetricsServer("127.0.0.1:0", lambda: body)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await reader.readline()
        while server._tasks:
            await asyncio.gather(*server._tasks)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(len(body)), 10)
        writer.close()
        await server.stop()

    asyncio.run(scenario())


def test_topic_statistics_are_reported_and_topics_deleted(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send(queue_id=1)
        body = (await case.ask(202, {"topic": "t"})).body.decode()
        assert body == (  # the keys are objects, as fastjson writes them and Java's tools read them
            '{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:'
            '{"lastUpdateTimestamp":0,"maxOffset":0,"minOffset":0},'
            '{"brokerName":"broker-a","queueId":1,"topic":"t"}:'
            f'{{"lastUpdateTimestamp":{case.clock.now_ms},"maxOffset":1,"minOffset":0}}}}}}'
        )
        assert (await case.ask(202, {"topic": "none"})).code == 17
        assert (await case.ask(17, {"topic": "new"})).code == 0
        assert (await case.ask(215, {"topic": "new"})).code == 0
        assert (await case.send(topic="new")).code == 17
        assert (await case.ask(215, {"topic": "t"})).code == 1

    run_case(scenario)


@pytest.mark.mechanism(
    "mmap page-cache reads; optional warm-up/unlock; per-topic put counters, max put time; warn >500 ms"
)
def test_a_slow_put_is_counted_and_logged(run_case: Any, helpers: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(module, "SLOW_PUT_S", 0.02)
    monkeypatch.setattr(store_module, "SLOW_PUT_S", 0.02)

    async def scenario(case: Any) -> None:
        assert (await case.send()).code == 0
        case.ledger.commit_by_hand = True
        slow = asyncio.ensure_future(case.send())
        await helpers.until(lambda: bool(case.ledger._pending))
        await asyncio.sleep(0.03)
        case.ledger.commit()
        assert (await slow).code == 0
        table = await case.table()
        assert table["putSlowTotal"] == "1" and float(table["putMaxSeconds"]) >= 0.03

    run_case(scenario)
    assert "ms to be stored" in caplog.text
