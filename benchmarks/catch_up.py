"""The cost of a follower that is far behind: how fast it can catch up, and how much slower senders are meanwhile.

    python -m benchmarks.catch_up [behind] [fresh] [joins] [--behind-mb 410] [--log-mb 1000] [--seconds 10]
                                  [--rate N] [--times 1] [--paired] [--directory DIR]

Real brokers of a DLedger group on loopback, fsync before each acknowledgement, default timings. The load generator and
all brokers share the machine. A directory given with `--directory` is kept, and logs that exist in it are reused, so
that they can be made while the machine is busy: `--fill` makes them and measures nothing.

`behind`: two of three members get `--behind-mb` (10 KB per message, batches of 16), then the third starts; its position
is sampled every 50 ms. The leader's quota applies while that member is more than 300 MB behind.

`fresh`: two of three members hold a log of `--log-mb`, and 16 senders send 128 bytes one by one. Then the third starts
empty, and the senders are measured while it catches up and after that. Two members acknowledge throughout.

`joins`: the same with three brokers and an empty fourth one, which is added to the group. From then on three of four
have to acknowledge. All members share one machine and one disk, so that a further member slows senders permanently: the
cost of catching up is the difference to the rate after it.

The machine's own speed varies within such a run by more than the effect to be measured. With `--paired` the newcomer is
stopped (SIGSTOP) for every other measurement of a few seconds while it catches up. So senders are measured with and
without it in alternation, and the difference is its catching up. It is stopped for less time than a follower waits
before it stands for election.

With `--rate` the senders send that many messages per second instead of as many as possible, which shows whether rate or
latency suffer while the machine is not saturated. `--times` repeats the measurement of a newcomer on the same logs,
each time with an empty member.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from benchmarks.checker import calibration_ms
from benchmarks.node_bench import QUEUES, READY_TIMEOUT_S, Group, find_master
from node.remoting import Command, RemotingClient, RemotingError

__all__ = ["main"]

MB = 1_000_000
SENDERS = 16
FILL_BODY_BYTES = 10_000
FILL_BATCH = 16
FILLERS = 4
SAMPLE_S = 0.05
FIRST_MB = 100
WAIT_S = 600
HELD_S = 2.0
"""With `--paired`: a follower that is stopped for 3 s, including the start of the load, has missed one heartbeat of
2 s, and it stands for election after three."""
SETTLE_S = 2.0
"""Time for the newcomer to write its queues."""


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
        """Add a running broker to the group. Raises CalledProcessError."""
        self._change("--add", f"{node}={self._ledger[node]}")

    def remove(self, node: str) -> None:
        """Remove a member from the group. Raises CalledProcessError."""
        self._change("--remove", node)

    def _change(self, *change: str) -> None:
        argv = [sys.executable, "-m", "node", "members", "--config", f"{self._directory}/{self.ids[0]}.toml"]
        subprocess.run([*argv, *change], check=True, capture_output=True)


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
    """A broker's runtime information; {} while it does not answer."""
    try:
        reply = await client.invoke(address, Command.request(28), timeout_ms=5000)
    except RemotingError:
        return {}
    table: dict[str, str] = json.loads(reply.body)["table"] if reply.code == 0 else {}
    return table


async def _wait(client: RemotingClient, address: str, is_so: Callable[[dict[str, str]], bool]) -> float:
    """Wait until a broker's table satisfies `is_so`; returns the time then."""
    async with asyncio.timeout(WAIT_S):
        while True:
            table = await _table(client, address)
            if table and is_so(table):
                return time.perf_counter()
            await asyncio.sleep(SAMPLE_S)


def _position(table: dict[str, str]) -> int:
    return int(table.get("committedPos", 0))


def _cpu_s(group: Group, node: str) -> float:
    """CPU time (s) that a broker has used since it started."""
    with open(f"/proc/{group._processes[node].pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _filled(client: RemotingClient, group: Group, size_bytes: int) -> tuple[str, int]:
    """Fill the log to at least `size_bytes`; returns the master and the end of its log."""
    master = await find_master(client, group, timeout_s=READY_TIMEOUT_S)
    address = group.addresses[master]
    end = _position(await _table(client, address))
    if end < size_bytes:
        await _fill(client, address, size_bytes - end)
    await asyncio.sleep(2)  # time for queues and index to be written
    return master, _position(await _table(client, address))


async def _behind(group: Group, options: argparse.Namespace) -> dict[str, Any]:
    client = RemotingClient(name="bench")
    master, end = await _filled(client, group, options.behind_mb * MB)
    if options.fill:
        await client.close()
        return {"log_mb": end / MB}
    shutil.rmtree(os.path.join(group._directory, "n3"), ignore_errors=True)
    group.start("n3")
    cpu_s = _cpu_s(group, master)
    address, at = group.addresses["n3"], FIRST_MB * MB
    first_s = await _wait(client, address, lambda table: _position(table) > 0)
    hundred_s = await _wait(client, address, lambda table: _position(table) >= at)
    last_s = await _wait(client, address, lambda table: _position(table) >= end)
    await client.close()
    rest_mb = (end - at) / MB
    return {
        "behind_mb": end / MB,
        "first_100_mb_s": hundred_s - first_s,
        "rest_mb": rest_mb,
        "rest_s": last_s - hundred_s,
        "rest_mb_per_s": rest_mb / (last_s - hundred_s),
        "leader_cpu_s": _cpu_s(group, master) - cpu_s,
        "follower_cpu_s": _cpu_s(group, "n3"),
    }


@contextlib.contextmanager
def _held(group: Group, node: str) -> Iterator[None]:
    """Stop one member's process (SIGSTOP) during the block."""
    group._processes[node].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        group._processes[node].send_signal(signal.SIGCONT)


async def _load(address: str, seconds: float, rate: float | None) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks._load", "send", address, "--senders", str(SENDERS)]
    if rate is not None:
        argv += ["--rate", str(rate)]
    process = await asyncio.create_subprocess_exec(*argv, "--seconds", str(seconds), stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the load ended with status {process.returncode}")
    result: dict[str, float] = json.loads(output)
    return result


async def _joins(group: Group, newcomer: str, options: argparse.Namespace) -> dict[str, Any]:
    client = RemotingClient(name="bench")
    master, end = await _filled(client, group, options.log_mb * MB)
    if options.fill:
        await client.close()
        return {"log_mb": end / MB}
    results = []
    for _ in range(options.times):
        results.append(await _join_once(client, group, master, newcomer, end, options))
    await client.close()
    summary: dict[str, Any] = {f"run {number}": result for number, result in enumerate(results, 1)}
    for key in ("slower_than_before_percent", *(["slower_than_while_held_percent"] if options.paired else [])):
        slower = sorted(result[key] for result in results)
        summary[key] = {"median": statistics.median(slower), "least": slower[0], "most": slower[-1]}
    return {"log_mb": end / MB, **summary}


async def _join_once(
    client: RemotingClient, group: Group, master: str, newcomer: str, end: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure an empty newcomer, which is removed again afterwards."""
    _put_aside(group, newcomer)
    address = group.addresses[master]
    calibration = calibration_ms()
    before = await _load(address, options.seconds, options.rate)
    group.start(newcomer)
    await _wait(client, group.addresses[newcomer], lambda table: True)
    if isinstance(group, _Growing):
        await asyncio.to_thread(group.add, newcomer)
    began_s = time.perf_counter()
    caught_up = asyncio.create_task(_wait(client, group.addresses[newcomer], lambda table: _position(table) >= end))
    rounds: list[dict[str, float]] = []
    held: list[dict[str, float]] = []
    while not caught_up.done():
        if options.paired and len(held) <= len(rounds):
            with _held(group, newcomer):
                held.append(await _load(address, HELD_S, options.rate))
        else:
            rounds.append(await _load(address, HELD_S if options.paired else min(options.seconds, 5.0), options.rate))
    took_s = await caught_up - began_s
    whole = [each for number, each in enumerate(rounds) if number < len(rounds) - 1 or len(rounds) == 1]
    await asyncio.sleep(SETTLE_S)
    after = await _load(address, options.seconds, options.rate)
    if isinstance(group, _Growing):
        await asyncio.to_thread(group.remove, newcomer)
    group.kill(newcomer)
    during = _mean(whole)
    result = {
        "calibration_ms": [round(calibration, 1), round(calibration_ms(), 1)],
        "caught_up_s": took_s,
        "before": _short(before),
        "during": _short(during),
        "after": _short(after),
        "slower_than_before_percent": (1 - during["per_s"] / before["per_s"]) * 100,
        "slower_than_after_percent": (1 - during["per_s"] / after["per_s"]) * 100,
    }
    if held:
        without = _mean(held[: len(whole)])
        result["while_held"] = _short(without)
        pairs = zip(held, whole, strict=False)
        result["pairs"] = [(round(one["per_s"]), round(other["per_s"])) for one, other in pairs]
        result["slower_than_while_held_percent"] = (1 - during["per_s"] / without["per_s"]) * 100
    return result


def _mean(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(each[key] for each in rounds) for key in ("per_s", "p50_ms", "p99_ms", "errors")}


def _put_aside(group: Group, node: str) -> None:
    """Make a member start empty. Its old data is deleted only with the whole directory: a file system that discards
    deleted blocks would keep the disk busy with a gigabyte of them during the measurement."""
    path = os.path.join(group._directory, node)
    if os.path.exists(path):
        os.rename(path, tempfile.mkdtemp(prefix="aside-", dir=group._directory))


def _short(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(figures[key], 1) for key in ("per_s", "p50_ms", "p99_ms", "errors")}


def _print(name: str, result: dict[str, Any]) -> None:
    print(f"{name}:")
    for key, value in result.items():
        shown = f"{value:.1f}" if isinstance(value, float) else json.dumps(value)
        print(f"    {key:18} {shown}", flush=True)


def _run(
    group: Group, nodes: list[str], measure: Callable[[], Awaitable[dict[str, Any]]], *, keep: bool
) -> dict[str, Any]:
    try:
        for node in nodes:
            group.start(node)

        async def run() -> dict[str, Any]:
            return await measure()

        return asyncio.run(run())
    finally:
        group.stop()
        if not keep:
            shutil.rmtree(group._directory)


def _directory(options: argparse.Namespace, name: str) -> str:
    if options.directory is None:
        return tempfile.mkdtemp(prefix="splitbrain-bench-")
    path = os.path.join(options.directory, name)
    os.makedirs(path, exist_ok=True)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", default=["behind", "fresh", "joins"])
    parser.add_argument("--behind-mb", type=int, default=410)
    parser.add_argument("--log-mb", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, help="messages per second, instead of as many as get an answer")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--paired", action="store_true", help="hold the newcomer for every other measurement")
    parser.add_argument("--directory")
    parser.add_argument("--fill", action="store_true")
    options = parser.parse_args(arguments)
    keep = options.directory is not None
    if "behind" in options.what:
        group = Group(_directory(options, "behind"), nodes=3, flush_mode="sync", timing="default")
        _print("behind", _run(group, group.ids[:2], lambda: _behind(group, options), keep=keep))
    if "fresh" in options.what:
        group = Group(_directory(options, "fresh"), nodes=3, flush_mode="sync", timing="default")
        _print("fresh", _run(group, group.ids[:2], lambda: _joins(group, "n3", options), keep=keep))
    if "joins" in options.what:
        growing = _Growing(_directory(options, "joins"))
        _print("joins", _run(growing, growing.ids, lambda: _joins(growing, "n4", options), keep=keep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
