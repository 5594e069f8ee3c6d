"""A long backlog: its cost in memory, and how much a consumer that reads it from the beginning slows the senders.

    python -m benchmarks.backlog [--megabytes 512] [--seconds 5]

One broker process with a log of its own, asynchronous flush, and no memory assumed to hold the log. It is filled with
messages of 10 KB; then 16 senders send 128 bytes one by one, first alone, then while a consumer repeatedly reads
everything from offset 0, as fast as it is served. Load generator and broker share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from node.remoting import Command, RemotingClient

__all__ = ["main"]

SENDERS = 16
QUEUES = 4
FILL_BODY_BYTES = 10_000
FILL_BATCH = 16
CONFIG = """
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "{data_dir}"
flush_mode = "async"
[classic]
[limits]
segment_size_bytes = 134217728
in_memory_percent = 0
[[topics]]
name = "t"
queues = 5
"""


def _start(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    config, log = directory / "broker.toml", directory / "log"
    config.write_text(CONFIG.format(data_dir=directory / "data"), encoding="utf-8")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "node", "broker", "--config", str(config)], stdout=output, stderr=output
        )
    while process.poll() is None:
        for line in log.read_text(encoding="utf-8").splitlines():
            if "READY" in line:
                return process, line.split("listen=")[1].split()[0]
        time.sleep(0.02)
    raise RuntimeError(f"the broker ended: {log.read_text(encoding='utf-8')}")


def _memory_mb(process: subprocess.Popen[bytes]) -> float:
    for line in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError("the broker is gone")


async def _fill(address: str, size_bytes: int) -> None:
    client = RemotingClient()
    message = (22 + FILL_BODY_BYTES).to_bytes(4, "big") + bytes(12) + FILL_BODY_BYTES.to_bytes(4, "big")
    batch = (message + b"x" * FILL_BODY_BYTES + bytes(2)) * FILL_BATCH
    sent = 0
    while sent < size_bytes:
        for queue_id in range(QUEUES):
            request = Command.request(320, {"b": "t", "e": queue_id}, batch)
            assert (await client.invoke(address, request, timeout_ms=30_000)).code == 0
            sent += len(batch)
    await client.close()


async def _send(address: str, seconds: float) -> tuple[float, float]:
    """Messages per second, and the median of their latency (ms)."""
    client = RemotingClient()
    times: list[float] = []
    end_s = time.monotonic() + seconds

    async def sender() -> None:
        request_body = b"x" * 128
        while (began_s := time.monotonic()) < end_s:
            request = Command.request(310, {"b": "t", "e": QUEUES}, request_body)
            assert (await client.invoke(address, request, timeout_ms=30_000)).code == 0
            times.append(time.monotonic() - began_s)

    await asyncio.gather(*(sender() for _ in range(SENDERS)))
    await client.close()
    return len(times) / seconds, sorted(times)[len(times) // 2] * 1000


async def _read_forever(address: str, counts: list[int]) -> None:
    client = RemotingClient()
    try:
        while True:
            for queue_id in range(QUEUES):
                offset = 0
                while True:
                    fields: dict[str, str | int] = {
                        "topic": "t", "queueId": queue_id, "queueOffset": offset, "maxMsgNums": 32,
                    }  # fmt: skip
                    reply = await client.invoke(address, Command.request(11, fields), timeout_ms=30_000)
                    if reply.code != 0:
                        break
                    counts[0] += len(reply.body)
                    offset = int(reply.ext_fields["nextBeginOffset"])
    finally:
        await client.close()


async def _measure(process: subprocess.Popen[bytes], address: str, size_bytes: int, seconds: float) -> None:
    print(f"memory of the empty broker           {_memory_mb(process):8.0f} MB")
    await _fill(address, size_bytes)
    print(f"memory with {size_bytes / 1e6:6.0f} MB of messages    {_memory_mb(process):8.0f} MB")
    rate, median_ms = await _send(address, seconds)
    print(f"sends, {SENDERS} senders, nobody reads        {rate:8.0f} /s, median {median_ms:.2f} ms")
    counts = [0]
    reading = asyncio.create_task(_read_forever(address, counts))
    rate, median_ms = await _send(address, seconds)
    print(f"sends while the backlog is read      {rate:8.0f} /s, median {median_ms:.2f} ms")
    print(f"the backlog is read at               {counts[0] / seconds / 1e6:8.0f} MB/s")
    print(f"memory while it is read              {_memory_mb(process):8.0f} MB")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitbrain-backlog-") as directory:
        process, address = _start(Path(directory))
        try:
            asyncio.run(_measure(process, address, options.megabytes * 1_000_000, options.seconds))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
