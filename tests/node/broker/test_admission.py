"""What precedes a send: dispatch by code, hooks, the fast port, the start time of sends, free disk space."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from node.broker import disk_watch as watch_module
from node.broker.disk_watch import DiskWatch
from node.broker.send_hooks import SendContext
from node.remoting import Command, RequestError, ResponseCode
from node.store.record import decode_records

SEND_MECHANISM = "Send processor for 10/310/320/36, before/after hooks, fast port"
CHECKS_MECHANISM = (
    "Pre-checks: start-accept time, msgCheck, queueId<0→random, transaction-reject flag, REGION/TRACE reply fields"
)


def batch_of(*bodies: bytes) -> bytes:
    """Messages in the batch format of section 3: total, magic, CRC, flag, body length, body, properties length."""
    return b"".join(
        (22 + len(body)).to_bytes(4, "big") + bytes(12) + len(body).to_bytes(4, "big") + body + bytes(2)
        for body in bodies
    )


@pytest.mark.mechanism(SEND_MECHANISM)
@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_each_send_code_accepts_long_and_short_field_names_in_both_serializers(run_case: Any, serializer: Any) -> None:
    async def scenario(case: Any) -> None:
        address = f"127.0.0.1:{case.broker.port}"

        async def ask(code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
            request = replace(Command.request(code, fields, body), serializer=serializer)
            reply: Command = await case.client.invoke(address, request, timeout_ms=5000)
            assert reply.serializer == serializer
            return reply

        long = {"topic": "t", "queueId": 0, "producerGroup": "p", "flag": 7}
        short = {"b": "t", "e": 0, "a": "p", "h": 7}
        places = []
        for code in (10, 310):
            for fields in (long, short):
                reply = await ask(code, fields, b"one")
                places.append(reply.ext_fields["queueOffset"])
                assert reply.code == 0 and len(reply.ext_fields["msgId"]) == 32
        for code, fields in ((320, short), (320, long), (310, short | {"m": True}), (10, long | {"batch": "true"})):
            reply = await ask(code, fields, batch_of(b"two", b"three"))
            places.append(reply.ext_fields["queueOffset"])
            assert reply.code == 0 and len(reply.ext_fields["msgId"].split(",")) == 2
        assert places == ["0", "1", "2", "3", "4", "6", "8", "10"]
        pulled = await ask(11, {"topic": "t", "queueId": 0, "queueOffset": 0, "consumerGroup": "g", "sysFlag": 4})
        messages = decode_records(pulled.body)
        assert [message.body for message in messages] == [b"one"] * 4 + [b"two", b"three"] * 4
        assert [message.flag for message in messages[:4]] == [7] * 4
        back = {"offset": messages[0].physical_offset, "group": "g", "delayLevel": -1, "originMsgId": "x"}
        assert (await ask(36, back)).code == 0
        dead = decode_records((await ask(11, {"topic": "%DLQ%g", "queueId": 0, "queueOffset": 0})).body)
        assert [message.body for message in dead] == [b"one"]

    run_case(scenario)


class Recorder:
    """A hook that records its calls, and refuses bodies of one byte."""

    def __init__(self) -> None:
        self.before_: list[SendContext] = []
        self.after_: list[tuple[str, int]] = []

    def before(self, context: SendContext) -> None:
        self.before_.append(context)
        if context.body_size_bytes == 1:
            raise RequestError(ResponseCode.NO_PERMISSION, "too small for this hook")

    def after(self, context: SendContext, reply: Command) -> None:
        self.after_.append((context.topic, reply.code))


class Broken:
    def before(self, context: SendContext) -> None:
        raise ZeroDivisionError

    def after(self, context: SendContext, reply: Command) -> None:
        raise RequestError(1, "too late")


@pytest.mark.mechanism(SEND_MECHANISM)
def test_hooks_are_called_around_every_send(run_case: Any, caplog: Any) -> None:
    async def scenario(case: Any) -> None:
        hook = Recorder()
        case.broker.send_hooks.add(Broken())
        case.broker.send_hooks.add(hook)
        fields = {"b": "t", "e": 0, "a": "producers"}
        assert (await case.ask(310, fields, b"good")).code == 0
        refused = await case.ask(310, fields, b"1")
        assert (refused.code, refused.remark) == (16, "too small for this hook")
        assert (await case.ask(310, fields | {"b": "unknown"}, b"good")).code == 17
        created = {"b": "made", "e": 0, "c": "TBW102", "d": 4}
        assert (await case.ask(310, created, b"good")).code == 0
        assert (await case.ask(320, fields, batch_of(b"a", b"b"))).code == 0
        assert [context.topic for context in hook.before_] == ["t", "t", "unknown", "made", "t"]
        assert hook.before_[0].producer_group == "producers"
        assert hook.before_[0].born_host.startswith("127.0.0.1:")
        assert hook.after_ == [("t", 0), ("t", 16), ("unknown", 17), ("made", 0), ("t", 0)]
        assert decode_records((await case.pull(0)).body)[0].body == b"good"

    run_case(scenario)
    assert "a hook around sending failed" in caplog.text
    assert "refused a message that is answered already" in caplog.text


@pytest.mark.mechanism(SEND_MECHANISM)
def test_the_fast_port_refuses_pulls_and_serves_other_requests(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert case.broker.fast_port is not None
        fast = f"127.0.0.1:{case.broker.fast_port}"

        async def ask(code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
            reply: Command = await case.client.invoke(fast, Command.request(code, fields, body), timeout_ms=5000)
            return reply

        assert (await ask(310, {"b": "t", "e": 0}, b"fast")).code == 0
        assert (await ask(30, {"topic": "t", "queueId": 0})).ext_fields["offset"] == "1"
        assert (await ask(11, {"topic": "t", "queueId": 0, "queueOffset": 0})).code == 3
        assert decode_records((await case.pull(0)).body)[0].body == b"fast"

    run_case(scenario, fast_port="true")


def test_access_control_applies_to_the_fast_port(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for port in (case.broker.port, case.broker.fast_port):
            request = Command.request(310, {"b": "t", "e": 0}, b"unsigned")
            reply = await case.client.invoke(f"127.0.0.1:{port}", request, timeout_ms=5000)
            assert reply.code == 16, port

    account = '[{access_key = "operator", secret_key = "operator-secret", admin = true}]'
    run_case(scenario, fast_port="true", **{"acl.accounts": account})


def test_the_fast_port_is_off_by_default(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert case.broker.fast_port is None

    run_case(scenario)


@pytest.mark.mechanism(CHECKS_MECHANISM)
def test_sends_are_refused_before_the_configured_start_time(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for code, fields in ((310, {"b": "t", "e": 0}), (10, {"topic": "t", "queueId": 0})):
            reply = await case.ask(code, fields, b"early")
            assert (reply.code, reply.remark) == (1, "no messages are taken before 1700000000500 ms of the epoch")
        assert (await case.ask(30, {"topic": "t", "queueId": 0})).ext_fields["offset"] == "0"
        case.clock.now_ms += 500
        assert (await case.send()).code == 0

    run_case(scenario, start_accept_send_timestamp_ms="1700000000500")


@pytest.mark.mechanism(CHECKS_MECHANISM)
def test_every_send_reply_has_the_region_and_trace_fields(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for reply in (
            await case.send(),
            await case.send(topic="unknown"),
            await case.send(queue_id=99),
            await case.ask(320, {"b": "t", "e": 0}, b"no batch"),
        ):
            assert (reply.ext_fields["MSG_REGION"], reply.ext_fields["TRACE_ON"]) == ("north", "false"), reply

    run_case(scenario, region_id="north", trace_on="false")


@pytest.mark.mechanism(CHECKS_MECHANISM)
def test_a_send_to_a_negative_queue_id_goes_to_any_queue(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        chosen = {(await case.send(queue_id=-1)).ext_fields["queueId"] for _ in range(40)}
        assert chosen == {"0", "1"}

    run_case(scenario)


@pytest.mark.mechanism(
    "putMessage refusals: shutdown, SLAVE, not writeable → SERVICE_NOT_AVAILABLE; topic >127 → "
    "MESSAGE_ILLEGAL; properties >32767 → PROPERTIES_SIZE_EXCEEDED; page-cache busy"
)
def test_sends_are_refused_while_the_disk_is_full(run_case: Any, helpers: Any, monkeypatch: Any, caplog: Any) -> None:
    """R: above 90 % in use puts are refused as not writable."""
    monkeypatch.setattr(watch_module, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watch_module, "FULL_CHECK_INTERVAL_S", 0.01)

    async def scenario(case: Any) -> None:
        disk = case.broker._runtime.disk
        assert (await case.send(b"before")).code == 0
        offset = decode_records((await case.pull(0)).body)[0].physical_offset
        disk.used_ratio = 0.9
        await helpers.until(lambda: case.broker._disk_watch.is_full)
        reply = await case.send(b"refused")
        assert (reply.code, reply.remark) == (14, "nothing was stored: DISK_FULL: the disk is full")
        back = await case.ask(36, {"offset": offset, "group": "g", "delayLevel": 0})
        assert back.code == 2
        assert len(decode_records((await case.pull(0)).body)) == 1, "reads continue"
        table = await case.table()
        assert (table["commitLogDiskRatio"], table["diskFull"]) == ("0.9", "1")
        disk.used_ratio = 0.899
        await helpers.until(lambda: not case.broker._disk_watch.is_full)
        assert (await case.send(b"after")).code == 0

    run_case(scenario)
    assert "90.0 % full: taking no more messages" in caplog.text and "taking messages again" in caplog.text


def test_rates_are_averages_over_the_last_10_60_and_600_seconds(helpers: Any, tmp_path: Any) -> None:
    counts = [0, 0]

    async def scenario() -> None:
        watch = DiskWatch(helpers.PlainDisk(), str(tmp_path), full_percent=90, counters=lambda: (counts[0], counts[1]))
        loop = asyncio.get_running_loop()
        began_s, now_s = loop.time(), 0.0
        loop.time = lambda: began_s + now_s  # type: ignore[method-assign]
        for second in range(0, 600, 10):
            now_s = float(second)
            watch.start()
            watch.stop()
            counts[0] += 1000
            counts[1] += 10 if second < 580 else 500
        now_s = 600.0
        puts, gets = watch.rates()
        assert puts == pytest.approx((100.0, 100.0, 100.0))
        assert gets[0] == pytest.approx(50.0) and gets[1] == pytest.approx((4 * 10 + 2 * 500) / 60)
        assert gets[2] == pytest.approx((58 * 10 + 2 * 500) / 600)

    asyncio.run(scenario())


def test_the_status_has_the_keys_that_rocketmqs_tools_read(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.table())["earliestMessageTimeStamp"] == "-1"
        await case.send(b"x")
        await case.pull(0)
        table = await case.table()
        assert table["earliestMessageTimeStamp"] == str(case.clock.now_ms)
        assert len(table["putTps"].split(" ")) == len(table["getTransferedTps"].split(" ")) == 3
        assert table["brokerVersionDesc"].startswith("splitbrain ")
        for name in ("sendThreadPoolQueueSize", "pullThreadPoolQueueHeadWaitTimeMills", "pageCacheLockTimeMills"):
            assert table[name] == "0"
        assert 0 <= float(table["commitLogDiskRatio"]) <= 1
        assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("1", "1")

    run_case(scenario)
