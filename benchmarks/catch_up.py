"""What a follower that is far behind costs: how fast it may catch up, and how much slower the senders are meanwhile.

    python -m benchmarks.catch_up [behind] [joins] [--behind-mb 400] [--log-mb 1000] [--seconds 10]

Real brokers of a DLedger group on loopback, fsync before each acknowledgement, default timings. Load generator and all
brokers share the machine.

`behind`: one of three is killed, the others get so many megabytes (10 KB a message, batches of 16), it starts again;
how far its log has come is asked every 50 ms. The leader's quota holds for as long as it is more than 300 MB behind.

`joins`: three brokers hold a log of so many megabytes, 16 senders send 128 bytes one by one; then a fresh fourth one is
added to the group, and they go on: at once, which is while it catches up, and once it has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.node_bench import QUEUES, READY_TIMEOUT_S, Group, _find_master
from node.remoting import Command, RemotingClient, RemotingError

__all__ = ["main"]

MB = 1_000_000
SENDERS = 16
FILL_BODY_BYTES = 10_000
FILL_BATCH = 16
FILLERS = 4
SAMPLE_S = 0.05
FIRST_MB = 100


class _Growing(Group):
    """A group of three that a fourth may join."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, nodes=4, flush_mode="sync", timing="default")
        self.everybody = list(self.ids)
        self.ids = self.ids[:3]

    def _replicated(self, node: str) -> list[str]:
        members = [*self.everybody[:3], *([node] if node not in self.everybody[:3] else [])]
        joins = ["joins = true"] if node not in self.everybody[:3] else []
        peers = [f'{other} = "{self._ledger[other]}"' for other in members]
        head = ["[dledger]", f'listen = "{self._ledger[node]}"', "members_may_change = true", *joins]
        return [*head, "[dledger.peers]", *peers]

    def add(self, node: str) -> None:
        """Have the group take a member in that has started. Raises CalledProcessError."""
        argv = [sys.executable, "-m", "node", "members", "--config", f"{self._directory}/{self.ids[0]}.toml"]
        subprocess.run([*argv, "--add", f"{node}={self._ledger[node]}"], check=True, capture_output=True)


async def _fill(client: RemotingClient, address: str, size_bytes: int) -> None:
    message = (22 + FILL_BODY_BYTES).to_bytes(4, "big") + bytes(12) + FILL_BODY_BYTES.to_bytes(4, "big")
    batch = (message + b"x" * FILL_BODY_BYTES + bytes(2)) * FILL_BATCH
    left = size_bytes

    async def fill(queue_id: int) -> None:
        nonlocal left
        while left > 0:
            left -= len(batch)
            request = Command.request(320, {"a": "bench", "b": "bench", "e": queue_id}, batch)
            reply = await client.invoke(address, request, timeout_ms=30_000)
            if reply.code != 0:
                raise RuntimeError(f"a batch was answered {reply.code}: {reply.remark}")

    await asyncio.gather(*(fill(number % QUEUES) for number in range(FILLERS)))


async def _table(client: RemotingClient, address: str) -> dict[str, str]:
    """What a broker knows of itself; nothing while it does not answer."""
    try:
        reply = await client.invoke(address, Command.request(28), timeout_ms=5000)
    except RemotingError:
        return {}
    table: dict[str, str] = json.loads(reply.body)["table"] if reply.code == 0 else {}
    return table


async def _wait(client: RemotingClient, address: str, is_so: Callable[[dict[str, str]], bool]) -> float:
    """Until a broker's table is as it should be; the time then."""
    async with asyncio.timeout(170):
        while True:
            table = await _table(client, address)
            if table and is_so(table):
                return time.perf_counter()
            await asyncio.sleep(SAMPLE_S)


def _position(table: dict[str, str]) -> int:
    return int(table.get("committedPos", 0))


async def _behind(group: Group, options: argparse.Namespace) -> dict[str, Any]:
    client = RemotingClient(name="bench")
    master = await _find_master(client, group, timeout_s=READY_TIMEOUT_S)
    address = group.addresses[master]
    follower = next(node for node in group.ids if node != master)
    await _fill(client, address, 10 * MB)
    begin = _position(await _table(client, address))
    await _wait(client, group.addresses[follower], lambda table: _position(table) >= begin)
    group.kill(follower)
    began_s = time.perf_counter()
    await _fill(client, address, options.behind_mb * MB)
    filled_s = time.perf_counter() - began_s
    end = _position(await _table(client, address))
    group.start(follower)
    first_s = await _wait(client, group.addresses[follower], lambda table: _position(table) > begin)
    at = begin + FIRST_MB * MB
    hundred_s = await _wait(client, group.addresses[follower], lambda table: _position(table) >= at)
    last_s = await _wait(client, group.addresses[follower], lambda table: _position(table) >= end)
    await client.close()
    rest_mb = (end - at) / MB
    return {
        "behind_mb": (end - begin) / MB,
        "filled_mb_per_s": (end - begin) / MB / filled_s,
        "first_100_mb_s": hundred_s - first_s,
        "rest_mb": rest_mb,
        "rest_s": last_s - hundred_s,
        "rest_mb_per_s": rest_mb / (last_s - hundred_s),
    }


async def _load(address: str, seconds: float) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks._load", "send", address, "--senders", str(SENDERS)]
    process = await asyncio.create_subprocess_exec(
        *argv, "--seconds", str(seconds), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    result: dict[str, float] = json.loads(output)
    return result


async def _joins(group: _Growing, options: argparse.Namespace) -> dict[str, Any]:
    client = RemotingClient(name="bench")
    master = await _find_master(client, group, timeout_s=READY_TIMEOUT_S)
    address = group.addresses[master]
    await _fill(client, address, options.log_mb * MB)
    end = _position(await _table(client, address))
    await asyncio.sleep(2)  # until queues and index are written
    before = await _load(address, options.seconds)
    group.start("n4")
    await _wait(client, group.addresses["n4"], lambda table: True)
    await asyncio.to_thread(group.add, "n4")
    began_s = time.perf_counter()
    caught_up = asyncio.create_task(_wait(client, group.addresses["n4"], lambda table: _position(table) >= end))
    rounds = []
    while not caught_up.done():
        rounds.append(await _load(address, min(options.seconds, 5.0)))
    took_s = await caught_up - began_s
    whole = [each for number, each in enumerate(rounds) if number < len(rounds) - 1 or len(rounds) == 1]
    after = await _load(address, options.seconds)
    await client.close()
    during = sum(each["per_s"] for each in whole) / len(whole)
    return {
        "log_mb": end / MB,
        "caught_up_s": took_s,
        "before": before,
        "rounds": rounds,
        "during_per_s": during,
        "after": after,
        "slower_percent": (1 - during / before["per_s"]) * 100,
    }


def _print(name: str, result: dict[str, Any]) -> None:
    print(f"{name}:")
    for key, value in result.items():
        shown = f"{value:.1f}" if isinstance(value, float) else json.dumps(value)
        print(f"    {key:18} {shown}", flush=True)


def _run(group: Group, measure: Callable[[], Awaitable[dict[str, Any]]], directory: str) -> dict[str, Any]:
    try:
        for node in group.ids:
            group.start(node)

        async def run() -> dict[str, Any]:
            return await measure()

        return asyncio.run(run())
    finally:
        group.stop()
        shutil.rmtree(directory)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", default=["behind", "joins"])
    parser.add_argument("--behind-mb", type=int, default=400)
    parser.add_argument("--log-mb", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args(arguments)
    if "behind" in options.what:
        directory = tempfile.mkdtemp(prefix="splitbrain-bench-")
        group = Group(directory, nodes=3, flush_mode="sync", timing="default")
        _print("behind", _run(group, lambda: _behind(group, options), directory))
    if "joins" in options.what:
        directory = tempfile.mkdtemp(prefix="splitbrain-bench-")
        growing = _Growing(directory)
        _print("joins", _run(growing, lambda: _joins(growing, options), directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
