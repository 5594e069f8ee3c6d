"""What takes minutes or hours, in virtual time: delays and transactions across restarts, idle clients."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.broker.internal_topics import DELAY_LEVELS_MS
from node.config import parse_broker_config
from node.remoting import Command, Connection, FrameParser, RemotingClient, RemotingError, encode
from node.serving import serve_broker
from node.store.record import Message, decode_records

LEVELS = range(1, len(DELAY_LEVELS_MS) + 1)
CONFIG = """
self_id = "n1"
listen = "10.0.0.1:10911"
data_dir = "/data"
{ledger}
[limits]
index_slots = 64
index_entries = 1000
[[topics]]
name = "t"
queues = 18
[[topics]]
name = "TRANS_CHECK_MAX_TIME_TOPIC"
queues = 1
"""
WAYS_TO_END = ("stop", "kill", "power")
LEDGERS = {"classic": "[classic]", "dledger": '[dledger]\nlisten = "10.0.0.1:10912"'}


class Stage:
    """A broker on a host of its own, and a client on another."""

    address = "10.0.0.1:10911"

    def __init__(self, loop: SimLoop, ledger: str) -> None:
        network = SimNetwork(loop)
        self.loop = loop
        self.host = SimHost(loop, network, "broker", "10.0.0.1")
        self.user = SimHost(loop, network, "user", "10.0.0.2")
        self._config = parse_broker_config(CONFIG.format(ledger=LEDGERS[ledger]))
        self.down: list[tuple[float, float]] = []
        """When the broker did not serve, by the hosts' clocks in milliseconds."""

    async def _serve(self, process: Incarnation) -> int:
        return 1 if await serve_broker(self._config, process.runtime, process.stop_requested) else 0

    async def restart(self, how: str) -> None:
        """End the broker's process in one of three ways, and start another after two seconds."""
        began_ms = self.host.clock.wall_ms()
        if how == "stop":
            self.host.terminate()
            assert self.host.process is not None
            await self.host.process.wait()
        elif how == "kill":
            self.host.kill()
        else:
            self.host.power_fail()
        await asyncio.sleep(2)
        self.host.boot()
        await self.start()
        self.down.append((began_ms, self.host.clock.wall_ms()))

    async def start(self) -> None:
        """Start the broker and wait until it takes messages."""
        self.host.start(self._serve)

        async def knock(client: RemotingClient) -> None:
            while True:
                try:
                    table = json.loads((await self.ask(client, 28)).body)["table"]
                    if table["brokerRole"] == "SYNC_MASTER":
                        return
                except (RemotingError, ValueError):
                    pass
                await asyncio.sleep(0.05)

        await self.run(knock)

    async def ask(
        self, client: RemotingClient, code: int, fields: dict[str, Any] | None = None, body: bytes = b""
    ) -> Command:
        return await client.invoke(self.address, Command.request(code, fields or {}, body), timeout_ms=10_000)

    async def run(self, work: Callable[[RemotingClient], Awaitable[Any]]) -> Any:
        """Do something as a client."""
        result: asyncio.Future[Any] = self.loop.create_future()

        async def program(process: Incarnation) -> None:
            client = RemotingClient()
            try:
                result.set_result(await work(client))
            except Exception as error:
                result.set_exception(error)
            finally:
                await client.close()

        process = self.user.start(program)
        value = await result
        await process.wait()
        return value

    async def read(self, client: RemotingClient, topic: str, queue_id: int) -> list[Message]:
        found: list[Message] = []
        while True:
            fields = {"topic": topic, "queueId": queue_id, "queueOffset": len(found)}
            reply = await self.ask(client, 11, fields)
            if reply.code != 0:
                assert reply.code == 19, reply
                return found
            found += decode_records(reply.body)


def on_stage(ledger: str, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stage = Stage(loop, ledger)
        await stage.start()
        await scenario(stage)

    run_simulated(main(), seed=20)


DELAY_MECHANISM = (
    "Delay levels 1s 5s 10s 30s 1m..10m 20m 30m 1h 2h (R); clamp to max; SCHEDULE_TOPIC, queue=level−1;"
    " REAL_TOPIC/REAL_QID; first run 1 s, 100 ms poll, 10 s on failure; offsets persisted 10 s; clock correction"
)


@pytest.mark.mechanism(DELAY_MECHANISM)
@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("how", ["", "stop", "kill", "power"])
def test_delayed_messages_of_all_levels_are_delivered_once_in_order_and_on_time(ledger: str, how: str) -> None:
    """Never early by the broker's clock, and at most a second late while it is up; with a restart between the sends and
    three while messages wait, nothing is lost or duplicated."""

    async def scenario(stage: Stage) -> None:
        rng = random.Random(4)
        levels = [*LEVELS, *(rng.choice(LEVELS) for _ in range(1000 - len(LEVELS)))]
        rng.shuffle(levels)
        sent: list[bytes] = []

        def sender(wanted: list[int]) -> Callable[[RemotingClient], Awaitable[None]]:
            async def send(client: RemotingClient) -> None:
                for level in wanted:
                    body = b"%d of level %d" % (len(sent), level)
                    fields = {"b": "t", "e": level - 1, "i": f"DELAY\x01{level}\x02"}
                    assert (await stage.ask(client, 310, fields, body)).code == 0
                    sent.append(body)
                    await asyncio.sleep(rng.expovariate(20))

            return send

        await stage.run(sender(levels[:500]))
        if how:
            await stage.restart(how)
        await stage.run(sender(levels[500:]))
        for pause_s in (60, 700, 3000):
            await asyncio.sleep(pause_s)
            if how:
                await stage.restart(how)
        await asyncio.sleep(7300)

        async def look(client: RemotingClient) -> None:
            bodies: list[bytes] = []
            for level in LEVELS:
                waited = await stage.read(client, "SCHEDULE_TOPIC_XXXX", level - 1)
                delivered = await stage.read(client, "t", level - 1)
                assert [message.body for message in delivered] == [message.body for message in waited], (
                    "in order, each once"
                )
                for before, after in zip(waited, delivered, strict=True):
                    due_ms = before.store_timestamp_ms + DELAY_LEVELS_MS[level - 1]
                    late_ms = after.store_timestamp_ms - due_ms
                    assert late_ms >= 0, f"level {level} was delivered {-late_ms} ms early"
                    up_ms = max([end for begin, end in stage.down if begin - 1000 <= due_ms <= end], default=due_ms)
                    assert after.store_timestamp_ms <= up_ms + 1000, f"level {level} was delivered {late_ms} ms late"
                bodies += [message.body for message in delivered]
            assert sorted(bodies) == sorted(sent) and len(sent) == 1000

        await stage.run(look)

    on_stage(ledger, scenario)


@pytest.mark.parametrize("ledger", ["classic", pytest.param("dledger", marks=pytest.mark.long)])
def test_timer_messages_of_up_to_three_days_are_delivered_once_across_restarts(ledger: str) -> None:
    """The broker ends in every way after sends, and again after pauses, within one run of three days."""

    async def scenario(stage: Stage) -> None:
        rng = random.Random(5)
        wanted = [round(10 ** rng.uniform(0, 8.41)) for _ in range(150)]  # ms, up to almost three days
        portion = len(wanted) // len(WAYS_TO_END)
        for first, how in zip(range(0, len(wanted), portion), WAYS_TO_END, strict=True):

            async def send(client: RemotingClient, first: int = first) -> None:
                for number, delay_ms in enumerate(wanted[first : first + portion], first):
                    properties = f"TIMER_DELIVER_MS\x01{stage.host.clock.wall_ms() + delay_ms}\x02"
                    fields = {"b": "t", "e": 0, "i": properties}
                    assert (await stage.ask(client, 310, fields, b"%d" % number)).code == 0

            await stage.run(send)
            await stage.restart(how)
            await asyncio.sleep(5)
        for pause_s in (5, 300, 40_000):
            await asyncio.sleep(pause_s)
            for how in WAYS_TO_END:
                await stage.restart(how)
                await asyncio.sleep(5)
        await asyncio.sleep(3 * 24 * 3600)

        async def look(client: RemotingClient) -> None:
            delivered = await stage.read(client, "t", 0)
            assert sorted(int(message.body) for message in delivered) == list(range(len(wanted))), "each once"
            for message in delivered:
                due_ms = int(message.properties.get("TIMER_OUT_MS", message.store_timestamp_ms))
                up_ms = max([end for begin, end in stage.down if begin - 1000 <= due_ms <= end], default=due_ms)
                assert due_ms <= message.store_timestamp_ms <= up_ms + 1000

        await stage.run(look)

    on_stage(ledger, scenario)


FATES = ("commit", "rollback", "late commit", "late rollback", "asked", "asked no", "unknown")
TRANSACTION_MECHANISM = (
    "Transactions: prepared/rollback never queued; END checks group, tranStateTableOffset, commitLogOffset;"
    " commit writes a copy; rollback empties body; unknown → no reply"
)


@pytest.mark.mechanism(TRANSACTION_MECHANISM)
@pytest.mark.mechanism("Check-back")
@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("how", WAYS_TO_END)
def test_transactions_end_once_with_their_outcome_across_restarts(ledger: str, how: str) -> None:
    """Half messages are never visible; a committed one is delivered once, a rolled back one never; open ones end as
    their producer answers a check; those that stay unknown are given up after fifteen checks."""

    async def scenario(stage: Stage) -> None:
        rng = random.Random(5)
        fates: dict[bytes, str] = {}
        halves: dict[bytes, dict[str, Any]] = {}
        asked: dict[bytes, int] = {}

        async def begin(client: RemotingClient) -> None:
            for number in range(200):
                fate = rng.choice(FATES)
                body = b"%s %d" % (fate.encode(), number)
                properties = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01u{number}\x02"
                reply = await stage.ask(client, 310, {"b": "t", "e": number % 4, "f": 4, "i": properties}, body)
                assert reply.code == 0
                fates[body] = fate
                halves[body] = {
                    "producerGroup": "p",
                    "tranStateTableOffset": reply.ext_fields["queueOffset"],
                    "commitLogOffset": int(reply.ext_fields["msgId"][16:], 16),
                }
                if fate in ("commit", "rollback"):
                    await end(client, body, 8 if fate == "commit" else 12)

        async def end(client: RemotingClient, body: bytes, verdict: int) -> None:
            reply = await stage.ask(client, 37, halves[body] | {"commitOrRollback": verdict})
            assert reply.code == 0, reply

        async def visible(client: RemotingClient) -> list[bytes]:
            return [message.body for queue_id in range(4) for message in await stage.read(client, "t", queue_id)]

        def fated(*names: str) -> list[bytes]:
            return sorted(body for body, fate in fates.items() if fate in names)

        await stage.run(begin)
        await stage.restart(how)

        async def late(client: RemotingClient) -> None:
            assert sorted(await visible(client)) == fated("commit")
            for body in fated("late commit"):
                await end(client, body, 8)
            for body in fated("late rollback"):
                await end(client, body, 12)
            for body in fated("commit", "rollback")[:5]:
                again = await stage.ask(client, 37, halves[body] | {"commitOrRollback": 8})
                assert again.code == 1, "it has ended already"

        await stage.run(late)
        await stage.restart(how)

        def answering(seconds: float) -> Callable[[RemotingClient], Awaitable[None]]:
            async def answer(client: RemotingClient) -> None:
                def check(command: Command, connection: Connection) -> None:
                    (message,) = decode_records(command.body)
                    asked[message.body] = asked.get(message.body, 0) + 1
                    assert message.topic == "t" and fates[message.body] in ("asked", "asked no", "unknown")
                    verdict = {"asked": 8, "asked no": 12, "unknown": 0}[fates[message.body]]
                    fields = {name: command.ext_fields[name] for name in ("tranStateTableOffset", "commitLogOffset")}
                    fields |= {"producerGroup": "p", "commitOrRollback": str(verdict), "fromTransactionCheck": "true"}
                    connection.send(Command.request(37, fields, oneway=True))

                client.register(39, check)
                deadline_s = stage.loop.time() + seconds
                while stage.loop.time() < deadline_s:
                    beat = json.dumps({"clientID": "c", "producerDataSet": [{"groupName": "p"}]}).encode()
                    assert (await stage.ask(client, 34, body=beat)).code == 0
                    await asyncio.sleep(10)

            return answer

        await stage.run(answering(100))
        await stage.restart(how)
        await stage.run(answering(40 * 60))

        async def look(client: RemotingClient) -> None:
            seen = await visible(client)
            assert sorted(seen) == fated("commit", "late commit", "asked"), "each once, and nothing else"
            given_up = [message.body for message in await stage.read(client, "TRANS_CHECK_MAX_TIME_TOPIC", 0)]
            assert sorted(given_up) == fated("unknown")
            assert set(asked) == set(fated("asked", "asked no", "unknown"))
            assert all(15 <= asked[body] <= 17 for body in fated("unknown")), "a restart may forget a check or two"
            table = json.loads((await stage.ask(client, 28)).body)["table"]
            assert table["openTransactions"] == "0"

        await stage.run(look)

    on_stage(ledger, scenario)


@pytest.mark.mechanism("Idle connection close (120 s R)")
@pytest.mark.parametrize("how", ["silent", "heartbeats only"])
def test_a_client_that_is_silent_for_two_minutes_is_disconnected_and_unregistered(how: str) -> None:
    """Its connection is closed, its registration removed and the rest of its group notified."""

    async def scenario(stage: Stage) -> None:
        def beat(client_id: str) -> bytes:
            consumer = {"groupName": "g", "subscriptionDataSet": [{"topic": "t", "subString": "*"}]}
            return json.dumps({"clientID": client_id, "consumerDataSet": [consumer]}).encode()

        async def look(client: RemotingClient) -> None:
            notices_s: list[float] = []
            client.register(40, lambda command, connection: notices_s.append(stage.loop.time()))
            reader, writer = await asyncio.open_connection("10.0.0.1", 10911)
            began_s = stage.loop.time()
            writer.write(encode(Command.request(34, {}, beat("other"))))
            parser, closed_s = FrameParser(), 0.0

            async def read() -> None:
                nonlocal closed_s
                while data := await reader.read(4096):
                    parser.feed(data)
                closed_s = stage.loop.time() - began_s

            reading = asyncio.create_task(read())
            for second in range(0, 300, 10):
                assert (await stage.ask(client, 34, body=beat("watcher"))).code == 0
                if how != "silent" and second <= 150:
                    writer.write(encode(Command.request(34, {}, beat("other"))))
                ids = json.loads((await stage.ask(client, 38, {"consumerGroup": "g"})).body)["consumerIdList"]
                last_s = 0 if how == "silent" else 150
                if second <= last_s + 110:
                    assert sorted(ids) == ["other", "watcher"], second
                if second >= last_s + 140:
                    assert ids == ["watcher"], second
                await asyncio.sleep(10)
            await reading
            assert last_s + 119 <= closed_s <= last_s + 131
            assert len(notices_s) >= 2 and last_s + 119 <= notices_s[-1] - began_s <= last_s + 131
            writer.close()

        await stage.run(look)

    on_stage("classic", scenario)


POP = {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 8, "invisibleTime": 30_000, "pollTime": 0}


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("how", WAYS_TO_END)
def test_popped_messages_are_redelivered_across_restarts_until_acknowledged(ledger: str, how: str) -> None:
    """The consumer acknowledges some of the messages that it pops; the others are redelivered, and an acknowledged one
    never."""
    acknowledged: set[bytes] = set()

    async def scenario(stage: Stage) -> None:
        rng = random.Random(6)

        async def send(client: RemotingClient) -> None:
            for number in range(200):
                fields = {"b": "t", "e": number % 18, "i": ""}
                assert (await stage.ask(client, 310, fields, b"%d" % number)).code == 0

        def consume(share: float) -> Callable[[RemotingClient], Awaitable[None]]:
            async def work(client: RemotingClient) -> None:
                while (reply := await stage.ask(client, 200050, POP)).code == 0:
                    starts = {part.rpartition(" ")[0]: part for part in reply.get_str("startOffsetInfo").split(";")}
                    for message in decode_records(reply.body):
                        assert message.body not in acknowledged
                        mark = f"{int(message.topic != 't')} {message.queue_id}"
                        extra = (starts[mark].rpartition(" ")[2], reply.get_str("popTime"), "30000", "0")
                        fields = {"consumerGroup": "g", "topic": message.topic, "queueId": message.queue_id}
                        fields |= {"offset": message.queue_offset, "extraInfo": " ".join(extra)}
                        if rng.random() < share:
                            assert (await stage.ask(client, 200051, fields)).code == 0
                            acknowledged.add(message.body)

            return work

        await stage.run(send)
        for share in (0.2, 0.5, 0.5):
            await stage.run(consume(share))
            await stage.restart(how)
            await asyncio.sleep(29)
        await stage.run(consume(0.5))
        await asyncio.sleep(31)
        await stage.run(consume(1))
        assert acknowledged == {b"%d" % number for number in range(200)}
        await asyncio.sleep(31)
        reply = await stage.run(lambda client: stage.ask(client, 200050, POP))
        assert reply.code == 210 and not reply.body

    on_stage(ledger, scenario)
