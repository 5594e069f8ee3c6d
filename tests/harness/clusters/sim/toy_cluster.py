"""A toy cluster whose run is hashed: run by test_determinism in several processes. Prints one hash.

Arguments: the seed, how many objects to allocate first, "sets" or "lists"."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import sys
from typing import Any

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from nemesis.target import ClockSkew, Link, LinkShape

HOSTS = ("n1", "n2", "n3", "n4", "n5")
logger = logging.getLogger("node.toy")


async def gossip(process: Incarnation, *, sets: bool) -> None:
    """Gossip with random peers and log what was heard to disk, by way of tasks, timeouts and sets."""
    loop = asyncio.get_running_loop()
    runtime = process.runtime
    me = process.host.name
    heard: set[str] = set()
    runtime.disk.make_dirs("/data")
    log = await runtime.disk.create("/data/log")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for line in reader:
                heard.add(line.decode().strip())
                await log.write(log.size_bytes(), line, sync=runtime.random.random() < 0.5)
                writer.write(b"ok\n")
        except ConnectionError as error:
            logger.info("lost: %s", error)
        writer.close()

    async def tell(peer: int) -> None:
        async def talk() -> None:
            reader, writer = await asyncio.open_connection(f"10.0.0.{peer}", 1)
            try:
                writer.write(f"{me} {runtime.clock.wall_ms()} {len(heard)}\n".encode())
                await reader.readline()
            finally:  # versions of Python differ in when they close a stream that is left open
                writer.close()

        try:
            await asyncio.wait_for(talk(), 0.5)
        except (OSError, TimeoutError) as error:
            logger.info("peer %d: %s", peer, type(error).__name__)

    await asyncio.start_server(serve, process.address, 1)
    while True:
        await asyncio.sleep(runtime.random.uniform(0.01, 0.1))
        tasks = [loop.create_task(tell(runtime.random.randint(1, 5))) for _ in range(3)]
        peers = set(tasks) if sets else tasks
        try:
            async with asyncio.timeout(0.2), asyncio.TaskGroup() as group:
                for task in peers:  # in set order, on purpose
                    group.create_task(asyncio.wait_for(task, 1))
        except* (TimeoutError, asyncio.CancelledError):
            logger.info("slow round")


async def main(*, sets: bool) -> str:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    network = SimNetwork(loop)
    digest = hashlib.sha256()
    network.trace = lambda event: digest.update(repr(event).encode())
    hosts = {name: SimHost(loop, network, name, f"10.0.0.{n}") for n, name in enumerate(HOSTS, 1)}
    for host in hosts.values():
        host.start(functools.partial(gossip, sets=sets))
    await asyncio.sleep(2)
    await network.cut("f1", {"n1": frozenset({"n2", "n3"}), "n4": frozenset({"n1"})})
    network.shape("f2", {Link("n5", "n2"): LinkShape(loss_percent=20, delay_ms=5, jitter_ms=5)})
    await asyncio.sleep(1)
    hosts["n2"].kill()
    hosts["n3"].pause()
    hosts["n4"].power_fail()
    hosts["n5"].clock.skew("f3", ClockSkew(strobe_ms=100, strobe_period_ms=50))
    hosts["n1"].disk.delay_s = 0.01
    await asyncio.sleep(1)
    await network.heal_all()
    hosts["n2"].restart()
    hosts["n3"].resume()
    hosts["n4"].restart()
    await asyncio.sleep(2)
    for host in hosts.values():
        digest.update(host.log.text().encode())
        for path in host.disk.paths():
            digest.update(path.encode() + bytes(host.disk.inode(path).cache))
    return f"{digest.hexdigest()} {loop.time()!r} {sum(len(h.log.lines()) for h in hosts.values())}"


def run(seed: int, *, sets: bool = True, **options: Any) -> str:
    """The hash of one run, its end and how many lines were logged. `sets`: whether the hosts' programs iterate over
    sets of tasks, whose order is the same in every process, but different on PyPy."""
    return run_simulated(main(sets=sets), seed=seed, **options)


if __name__ == "__main__":
    garbage = [object() for _ in range(int(sys.argv[2]))]  # changes addresses and garbage collections
    print(run(int(sys.argv[1]), sets=sys.argv[3] == "sets"))
