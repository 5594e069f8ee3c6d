"""Background tasks log an unexpected error and continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from node.broker import delay, slave_sync, transactions
from node.broker.delay import DelayService
from node.broker.lazy_file import LazyFile
from node.broker.registration import NameServerRegistrar
from node.broker.slave_sync import SlaveSynchronize
from node.broker.transactions import TransactionChecks
from node.real_runtime import RealDisk, real_runtime
from node.remoting import RemotingClient, RemotingServer

LOGGED = "met an error of its own"


def once_failing(real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, except that the first call raises."""
    failures = iter([RuntimeError("an unexpected error")])

    def call(*args: Any, **kwargs: Any) -> Any:
        for failure in failures:
            raise failure
        return real(*args, **kwargs)

    return call


def test_a_delayed_message_is_delivered_after_an_unexpected_error(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delay, "RECHECK_S", 0.005)
    monkeypatch.setattr(delay, "RETRY_S", 0.005)
    monkeypatch.setattr(DelayService, "_deliver", once_failing(DelayService._deliver))

    async def scenario(case: Any) -> None:
        assert (await case.ask(310, {"b": "t", "e": 1, "i": "DELAY\x011\x02"}, b"late")).code == 0
        case.clock.now_ms += 1000
        await helpers.until(lambda: case.broker.store.queues.find("t", 1) is not None)
        assert LOGGED in caplog.text

    run_case(scenario)


@pytest.mark.parametrize("what", ["_check", "barrier"])
def test_producers_are_asked_after_an_unexpected_error(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    monkeypatch.setattr(transactions, "RECHECK_S", 0.005)
    asked: list[int] = []

    def note(checks: Any, offset: int, half: Any, now_ms: int) -> None:
        asked.append(offset)
        half.due_ms = now_ms + 60_000

    monkeypatch.setattr(TransactionChecks, "_check", once_failing(note) if what == "_check" else note)

    async def scenario(case: Any) -> None:
        if what == "barrier":
            case.ledger.read_barrier = once_failing(case.ledger.read_barrier)
        half = {"b": "t", "e": 1, "f": 4, "i": "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01K\x02"}
        assert (await case.ask(310, half, b"half")).code == 0
        case.clock.now_ms += 6000
        await helpers.until(lambda: LOGGED in caplog.text)
        case.clock.now_ms += transactions.RETRY_MS
        await helpers.until(lambda: len(asked) == 1)

    run_case(scenario)


def test_a_lead_that_is_not_confirmed_in_time_is_logged_with_the_timeout(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transactions, "BARRIER_TIMEOUT_S", 0.05)

    async def scenario(case: Any) -> None:
        case.ledger.read_barrier = lambda mode: asyncio.sleep(3600)
        half = {"b": "t", "e": 1, "f": 4, "i": "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01K\x02"}
        assert (await case.ask(310, half, b"half")).code == 0
        case.clock.now_ms += 6000
        await helpers.until(lambda: "nobody is asked about transactions" in caplog.text)
        assert "transactions: no majority confirmed the lead within 0.05 s" in caplog.text

    run_case(scenario)


def test_a_broker_registers_after_an_unexpected_error(
    helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node.broker.registration.RETRY_INTERVAL_S", 0.005)

    async def main() -> None:
        server, client = RemotingServer("127.0.0.1", 0), RemotingClient()
        for code in (103, 104):
            server.register(code, lambda command, connection: command.reply(0))
        await server.start()
        address = f"127.0.0.1:{server.port}"
        describe = once_failing(lambda: ({"brokerName": "b", "brokerId": 0}, b"{}"))
        registrar = NameServerRegistrar(client=client, name_servers=[address], interval_s=60, describe=describe)
        registrar.start()
        await helpers.until(lambda: registrar.registered[address])
        assert LOGGED in caplog.text
        await registrar.stop()
        await client.close()
        await server.stop()

    asyncio.run(main())


def test_a_slave_copies_the_tables_after_an_unexpected_error(
    helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slave_sync, "FIRST_AFTER_S", {"fast": 0.0})
    monkeypatch.setattr(slave_sync, "INTERVAL_S", {"fast": 0.005})

    async def copied(sync: SlaveSynchronize, address: str) -> None:
        assert address == "master"

    monkeypatch.setattr(SlaveSynchronize, "_copy_all", once_failing(copied))

    async def main() -> None:
        unused: Any = SimpleNamespace(note_taken=lambda is_on: None)
        sync = SlaveSynchronize(
            client=unused,
            master=lambda: "master",
            ask_for_master=lambda: None,
            may_copy=lambda: True,
            may_give_back=lambda: False,
            topics=unused,
            offsets=unused,
            groups=unused,
            queues=unused,
            ends=unused,
            disk=unused,
            delay_path="",
            timing="fast",
        )
        sync.start()
        await helpers.until(lambda: sync.rounds_total >= 2)
        assert LOGGED in caplog.text
        sync.stop()

    asyncio.run(main())


def test_a_table_is_written_after_an_unexpected_error(
    tmp_path: Any, helpers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"

    async def main() -> None:
        disk = real_runtime(1).disk
        file = LazyFile(disk, str(path), delay_s=0.001, render=once_failing(lambda: {"a": 1}))
        file.touch()
        await helpers.until(path.exists)
        assert json.loads(path.read_text())["a"] == 1
        assert LOGGED in caplog.text
        await file.stop()
        assert isinstance(disk, RealDisk)
        disk.close()

    asyncio.run(main())
