"""A broker that is killed or loses power repeatedly under load: does it lose anything?

    python -m benchmarks.crash_loop [--rounds 200] [--seconds 280] [--state FILE]          kill -9, a real process
    python -m benchmarks.crash_loop --sim [--rounds 1000] [--seconds 280] [--state FILE]   power cuts, simulated

A single master with synchronous flush (a log of its own, or with --dledger a group of one) takes messages of every
kind: single, in batches, delayed, transactional, with tags and keys. It dies at a random moment, often while it is
still starting. After every round this is verified on copies of its data: it must recover; every acknowledged
message must be at the offset that the answer named, every committed transaction must be present, nothing may be
duplicated; and the consume queues and the index must be byte for byte those built from the log alone. The store
itself is left untouched, so that the next start also recovers from a crash; after some rounds a new store begins. In
simulation a power cut keeps a random part of the unsynced data.

With `--state` the figures of several calls are added up in a file, so that the work can be done in pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.broker.controller import BrokerController
from node.config import parse_broker_config
from node.real_runtime import RealDisk, real_runtime
from node.remoting import Command, RemotingClient, RemotingError
from node.serving import serve_broker
from node.store.record import decode_records

__all__ = ["Expected", "kill_rounds", "main", "power_cut_rounds"]

QUEUES = 4
SENDERS = 8
ROUNDS_PER_STORE = 10
DELAY_QUEUE = ("SCHEDULE_TOPIC_XXXX", 17)
DERIVED = ("consumequeue/", "consumequeue.crc/", "index/")
CONFIG = """
self_id = "n1"
listen = "{listen}"
data_dir = "{data_dir}"
flush_mode = "sync"
uvloop = "off"
timing = "fast"
{ledger}
[limits]
segment_size_bytes = 262144
max_message_size_bytes = 100000
queue_file_units = 100
index_slots = 256
index_entries = 1000
[[topics]]
name = "t"
queues = 4
"""


def _config(listen: str, data_dir: object, *, dledger: bool) -> str:
    port = _free_port() if listen.endswith(":0") else 10912
    ledger = f'[dledger]\nlisten = "{listen.rpartition(":")[0]}:{port}"' if dledger else "[classic]"
    return CONFIG.format(listen=listen, data_dir=data_dir, ledger=ledger)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_master(address: str) -> None:
    """Wait until the broker is up and takes messages."""
    for _ in range(3000):
        client = RemotingClient()
        try:
            reply = await client.invoke(address, Command.request(28), timeout_ms=1000)
            if reply.code == 0 and json.loads(reply.body)["table"]["brokerRole"] == "SYNC_MASTER":
                return
        except RemotingError:
            pass
        finally:
            await client.close()
        await asyncio.sleep(0.01)
    raise AssertionError("the broker does not come up")


class Expected:
    """What the broker has acknowledged."""

    def __init__(self) -> None:
        self.placed: dict[tuple[str, int, int], bytes] = {}
        """Bodies by topic, queue and offset."""
        self.somewhere: dict[bytes, None] = {}
        """Bodies of committed transactions, whose offset no answer names."""
        self.sent = 0
        self._number = 0

    def next_body(self, rng: random.Random) -> bytes:
        """A body that no other message has."""
        self._number += 1
        return b"%d " % self._number + b"x" * int(rng.paretovariate(1.2) * 20 % 3000)


def _batch(bodies: list[bytes]) -> bytes:
    parts = []
    for body in bodies:
        total = 22 + len(body)
        parts.append(total.to_bytes(4, "big") + bytes(12) + len(body).to_bytes(4, "big") + body + bytes(2))
    return b"".join(parts)


async def _send(client: RemotingClient, address: str, expected: Expected, rng: random.Random) -> None:
    """Send one message, batch or transaction. Raises RemotingError."""

    async def ask(code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        expected.sent += 1
        return await client.invoke(address, Command.request(code, fields, body), timeout_ms=10_000)

    def note(reply: Command, topic: str, bodies: list[bytes]) -> None:
        if reply.code == 0:
            at = int(reply.ext_fields["queueOffset"])
            for offset, body in enumerate(bodies, at):
                expected.placed[topic, int(reply.ext_fields["queueId"]), offset] = body

    queue_id = rng.randrange(QUEUES)
    body = expected.next_body(rng)
    tags_and_keys = f"TAGS\x01tag-{queue_id}\x02KEYS\x01k{rng.randrange(50)} all\x02UNIQ_KEY\x01{body[:9].decode()}\x02"
    kind = rng.random()
    if kind < 0.7:
        note(await ask(310, {"b": "t", "e": queue_id, "i": tags_and_keys}, body), "t", [body])
    elif kind < 0.8:
        bodies = [expected.next_body(rng) for _ in range(rng.randrange(1, 5))]
        note(await ask(320, {"b": "t", "e": queue_id}, _batch(bodies)), "t", bodies)
    elif kind < 0.9:
        reply = await ask(310, {"b": "t", "e": queue_id, "i": tags_and_keys + "DELAY\x0118\x02"}, body)
        if reply.code == 0:
            expected.placed[(*DELAY_QUEUE, int(reply.ext_fields["queueOffset"]))] = body
    else:
        half = tags_and_keys + "TRAN_MSG\x01true\x02PGROUP\x01p\x02"
        reply = await ask(310, {"b": "t", "e": queue_id, "f": 4, "i": half}, body)
        if reply.code == 0 and rng.random() < 0.7:
            fields = {
                "producerGroup": "p",
                "tranStateTableOffset": reply.ext_fields["queueOffset"],
                "commitLogOffset": int(reply.ext_fields["msgId"][16:], 16),
                "commitOrRollback": rng.choice((8, 8, 12)),
            }
            ended = await ask(37, fields)
            if ended.code == 0 and fields["commitOrRollback"] == 8:
                expected.somewhere[body] = None


async def load(address: str, expected: Expected, rng: random.Random, *, pause_s: float, senders: int = SENDERS) -> None:
    """Send until cancelled, or until the broker is gone."""
    client = RemotingClient()

    async def send_forever() -> None:
        with contextlib.suppress(RemotingError):
            while True:
                await _send(client, address, expected, rng)
                if pause_s:
                    await asyncio.sleep(rng.expovariate(1 / pause_s))

    try:
        await asyncio.gather(*(send_forever() for _ in range(senders)))
    finally:
        await client.close()


async def check(address: str, expected: Expected) -> list[str]:
    """Read everything; returns what is wrong."""
    client = RemotingClient()
    found: dict[tuple[str, int, int], bytes] = {}
    try:
        for topic, queue_id in (*(("t", number) for number in range(QUEUES)), DELAY_QUEUE):
            offset = 0
            while True:
                fields: dict[str, str | int] = {
                    "topic": topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": 32,
                }  # fmt: skip
                reply = await client.invoke(address, Command.request(11, fields), timeout_ms=10_000)
                if reply.code == 19:
                    break
                if reply.code != 0:
                    return [f"pulling {topic}/{queue_id} at {offset}: {reply.code} {reply.remark}"]
                for message in decode_records(reply.body):
                    found[topic, queue_id, message.queue_offset] = message.body
                offset = int(reply.ext_fields["nextBeginOffset"])
    finally:
        await client.close()
    problems = [
        f"acknowledged at {place}: {'lost' if place not in found else 'another message is there'}"
        for place, body in expected.placed.items()
        if found.get(place) != body
    ]
    counts = Counter(found.values())
    problems += [f"transaction {body[:20]!r} committed and lost" for body in expected.somewhere if not counts[body]]
    problems += [f"{body[:20]!r} is there {count} times" for body, count in counts.items() if count > 1]
    return problems


def _compare(kept: Mapping[str, bytes], rebuilt: Mapping[str, bytes]) -> list[str]:
    return [
        f"{path} is not as it is rebuilt from the log"
        for path in sorted(kept.keys() | rebuilt.keys())
        if kept.get(path) != rebuilt.get(path)
    ]


# A real process, killed


@contextlib.asynccontextmanager
async def _serving(directory: Path, *, dledger: bool) -> AsyncIterator[str]:
    """Run a broker on a data directory in this process; yields its address."""
    runtime = real_runtime()
    config = parse_broker_config(_config("127.0.0.1:0", directory, dledger=dledger))
    broker = BrokerController(config, runtime)
    await broker.start()
    try:
        await wait_master(f"127.0.0.1:{broker.port}")
        yield f"127.0.0.1:{broker.port}"
    finally:
        await broker.stop()
        assert isinstance(runtime.disk, RealDisk)
        runtime.disk.close()


def _verify(data: Path, expected: Expected, *, dledger: bool) -> list[str]:
    """Recover on copies of `data`, once unchanged and once without the files derived from the log."""
    derived: list[dict[str, bytes]] = []
    for is_rebuilt in (False, True):
        with tempfile.TemporaryDirectory(prefix="splitbrain-crash-") as scratch:
            copy = Path(scratch, "data")
            shutil.copytree(data, copy)
            if is_rebuilt:
                for path in copy.iterdir():
                    if path.name.startswith(("consumequeue", "index")):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

            async def look(copy: Path = copy) -> list[str]:
                async with _serving(copy, dledger=dledger) as address:
                    return await check(address, expected)

            problems = asyncio.run(look())
            if problems:
                return [f"{'rebuilt' if is_rebuilt else 'recovered'}: {problem}" for problem in problems]
            derived.append(
                {
                    str(path.relative_to(copy)): path.read_bytes()
                    for path in copy.rglob("*")
                    if path.is_file() and str(path.relative_to(copy)).startswith(DERIVED)
                }
            )
    return _compare(*derived)


def wait_ready(log: Path, process: subprocess.Popen[bytes], seen: int) -> str:
    """The listening address that the process logs. Raises RuntimeError if it ends instead."""
    while True:
        for line in log.read_text(encoding="utf-8")[seen:].splitlines():
            if "READY" in line and "listen=" in line:
                return line.split("listen=")[1].split()[0]
        if process.poll() is not None:
            raise RuntimeError(f"the broker ended with status {process.returncode}: {log.read_text()[seen:][-2000:]}")
        time.sleep(0.01)


def _kill_once(directory: Path, expected: Expected, rng: random.Random, *, dledger: bool) -> None:
    """Start the broker, let it run for a random time, and kill it."""
    data, log, config = directory / "data", directory / "log", directory / "broker.toml"
    config.write_text(_config("127.0.0.1:0", data, dledger=dledger), encoding="utf-8")
    seen = len(log.read_text(encoding="utf-8")) if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "node", "broker", "--config", str(config)], stdout=output, stderr=output
        )
    try:
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.6)  # while it starts and recovers
            return
        address = wait_ready(log, process, seen)
        # Every tenth round is long enough for a checkpoint, which is written every 10 s.
        lasts_s = rng.uniform(10, 13) if rng.random() < 0.1 else rng.expovariate(1 / 0.4)
        pause_s = 0.02 if lasts_s > 10 else 0.0

        async def bounded() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lasts_s + 5):
                    await load(address, expected, rng, pause_s=pause_s)

        async def run() -> None:
            await wait_master(address)
            loading = asyncio.create_task(bounded())
            await asyncio.sleep(lasts_s)
            process.send_signal(signal.SIGKILL)
            await loading

        asyncio.run(run())
    finally:
        process.kill()
        process.wait()


def kill_rounds(rounds: int, *, seconds: float, seed: int, dledger: bool = False) -> dict[str, int]:
    """Kill a real broker `rounds` times, or for `seconds`. Raises AssertionError that names what is wrong."""
    rng = random.Random(seed)
    began_s, done, acknowledged, sent = time.monotonic(), 0, 0, 0
    while done < rounds and time.monotonic() - began_s < seconds:
        expected = Expected()
        with tempfile.TemporaryDirectory(prefix="splitbrain-crash-") as directory:
            for _ in range(ROUNDS_PER_STORE):
                if done >= rounds or time.monotonic() - began_s >= seconds:
                    break
                _kill_once(Path(directory), expected, rng, dledger=dledger)
                if Path(directory, "data").exists():
                    problems = _verify(Path(directory, "data"), expected, dledger=dledger)
                    assert not problems, f"seed {seed}, round {done}: {problems[:10]}"
                done += 1
        acknowledged += len(expected.placed) + len(expected.somewhere)
        sent += expected.sent
    return {"rounds": done, "sent": sent, "acknowledged": acknowledged}


# A simulated host that loses its power


async def run_on(host: SimHost, work: Callable[[Incarnation], Awaitable[Any]]) -> Any:
    """Run `work` as a process of `host`; returns its result."""
    result: asyncio.Future[Any] = host.loop.create_future()

    async def program(process: Incarnation) -> None:
        try:
            result.set_result(await work(process))
        except Exception as error:
            result.set_exception(error)

    process = host.start(program)
    value = await result
    await process.wait()
    return value


async def _check_from(address: str, expected: Expected, _: Incarnation) -> list[str]:
    return await check(address, expected)


def _broker_program(address: str, dledger: bool) -> Callable[[Incarnation], Any]:
    config = parse_broker_config(_config(f"{address}:10911", "/data", dledger=dledger))

    async def program(process: Incarnation) -> int:
        failure = await serve_broker(config, process.runtime, process.stop_requested)
        return 1 if failure else 0

    return program


async def wait_listening(user: SimHost, address: str) -> None:
    await run_on(user, lambda _: wait_master(address))


async def _simulated(cuts: int, rng: random.Random, *, dledger: bool) -> dict[str, int]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    network = SimNetwork(loop)
    broker = SimHost(loop, network, "broker", "10.0.0.1")
    user = SimHost(loop, network, "user", "10.0.0.2")
    address = f"{broker.address}:10911"
    expected = Expected()
    lost_bytes = 0
    for cut in range(cuts):
        broker.boot()
        process = broker.start(_broker_program(broker.address, dledger))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.02)  # while it starts and recovers
        else:
            await wait_listening(user, address)
            lasts_s = rng.choice((0.1, 2.0, 25.0)) * rng.random()

            async def send(_: Incarnation, pause_s: float = max(lasts_s / 40, 0.002)) -> None:
                await load(address, expected, rng, pause_s=pause_s, senders=4)

            sending = asyncio.create_task(run_on(user, send))
            await asyncio.sleep(lasts_s)
            user.kill()
            sending.cancel()
        assert process.exit_status() is None, f"cut {cut}: the broker has ended by itself"
        network.power_lost(broker.name, [process])
        broker.kill()
        lost_bytes += broker.disk.power_fail()
        left = {path: bytes(broker.disk.inode(path).cache) for path in broker.disk.paths()}
        derived = []
        for number, is_rebuilt in enumerate((False, True)):
            copy = SimHost(loop, network, f"copy{cut}-{number}", f"10.{1 + number}.{cut // 250}.{1 + cut % 250}")
            for path, content in left.items():
                if not (is_rebuilt and path.startswith(("/data/consumequeue", "/data/index"))):
                    copy.disk.put(path, content)
            running = copy.start(_broker_program(copy.address, dledger))
            await wait_listening(user, f"{copy.address}:10911")
            problems = await run_on(user, partial(_check_from, f"{copy.address}:10911", expected))
            assert not problems, f"cut {cut}, {'rebuilt' if is_rebuilt else 'recovered'}: {problems[:10]}"
            copy.terminate()
            assert await running.wait() == 0
            derived.append(
                {
                    path: bytes(copy.disk.inode(path).cache)
                    for path in copy.disk.paths()
                    if path.removeprefix("/data/").startswith(DERIVED)
                }
            )
        problems = _compare(*derived)
        assert not problems, f"cut {cut}: {problems[:10]}"
    return {
        "rounds": cuts,
        "sent": expected.sent,
        "acknowledged": len(expected.placed) + len(expected.somewhere),
        "lost_unsynced_bytes": lost_bytes,
    }


def power_cut_rounds(rounds: int, *, seconds: float, seed: int, dledger: bool = False) -> dict[str, int]:
    """Cut the power of a simulated broker `rounds` times, or for `seconds` of real time, with a new simulation every
    few rounds. Raises AssertionError that names what is wrong, and the seed that reproduces it."""
    began_s, totals = time.monotonic(), Counter[str]()
    while totals["rounds"] < rounds and time.monotonic() - began_s < seconds:
        cuts = min(ROUNDS_PER_STORE, rounds - totals["rounds"])
        world_seed = seed + totals["rounds"]
        try:
            world = _simulated(cuts, random.Random(f"crash/{world_seed}"), dledger=dledger)
            totals.update(run_simulated(world, seed=world_seed))
        except Exception as error:
            raise AssertionError(f"seed {world_seed}: {error!r}") from error
    return dict(totals)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sim", action="store_true", help="power cuts in simulation instead of kill -9")
    parser.add_argument("--rounds", type=int, default=None, help="200 kills, or 1000 power cuts")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dledger", action="store_true", help="a group of one instead of a log of its own")
    parser.add_argument("--state", type=Path, help="file that adds up several calls")
    options = parser.parse_args()
    wanted = options.rounds or (1000 if options.sim else 200)
    before: Counter[str] = Counter()
    if options.state is not None and options.state.exists():
        before.update(json.loads(options.state.read_text(encoding="utf-8")))
    run = power_cut_rounds if options.sim else kill_rounds
    began_s = time.monotonic()
    left, seed = wanted - before["rounds"], options.seed + before["rounds"]
    before.update(run(left, seconds=options.seconds, seed=seed, dledger=options.dledger))
    before.update(seconds=round(time.monotonic() - began_s))
    if options.state is not None:
        options.state.write_text(json.dumps(before), encoding="utf-8")
    what = "power cuts in simulation" if options.sim else "kills of a real process"
    print(f"{before['rounds']} {what}, {before['sent']} requests, {before['acknowledged']} messages acknowledged;")
    print(f"nothing acknowledged was lost or doubled, queues and index as rebuilt ({before['seconds']} s)")
    if options.sim:
        print(f"{before['lost_unsynced_bytes']} bytes that were not synced were lost")


if __name__ == "__main__":
    main()
