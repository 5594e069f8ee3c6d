"""A minimal message broker in Python, as the reference for figures of the node on the same machine.

    python -m benchmarks._bare_server [--size-mb 1024]

It parses the frame of a send request (JSON header), packs the body into a record with a CRC, appends it to a mapped
file and answers with offset and queue offset. It does no dispatch, no recovery, no checks and no flush. A broker that
does more cannot be faster, so its rate as a share of this one is comparable between fast and slow machines. The server
prints its port and serves until it is killed. `measure` loads one with 64 senders that send one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any

__all__ = ["main", "measure"]

_HEAD = struct.Struct(">ii")
_RECORD = struct.Struct(">iiIiiqqiqiqiiqi")
"""Size, magic, CRC, queue id, flag, queue offset, physical offset, system flag, born timestamp, born host, store
timestamp, store host, reconsume times, prepared transaction offset, body size."""
_MAGIC = -626843481
_QUEUES = 8
BACKLOG_BYTES = 1 << 20
"""Buffer for an incomplete frame: larger than any that the load generator sends."""


class _Log:
    """A mapped file that is overwritten from the beginning when full, so that the disk does not limit the rate."""

    def __init__(self, size_bytes: int) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(size_bytes)
            self.memory = mmap.mmap(file.fileno(), size_bytes)
        self.size_bytes = size_bytes
        self.end = 0
        self.queue_ends = [0] * _QUEUES


class _Connection(asyncio.Protocol):
    def __init__(self, log: _Log) -> None:
        self._log = log
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, end, answers = 0, len(data), []
        while end - at >= 8:
            length, word = _HEAD.unpack_from(data, at)
            stop = at + 4 + length
            if stop > end:
                break
            body_at = at + 8 + (word & 0xFFFFFF)
            answers.append(self._append(json.loads(data[at + 8 : body_at]), data[body_at:stop]))
            at = stop
        self._rest = data[at:]
        assert self._transport is not None
        if len(self._rest) > BACKLOG_BYTES:
            self._transport.abort()
        else:
            self._transport.write(b"".join(answers))

    def _append(self, header: dict[str, Any], body: bytes) -> bytes:
        log, fields = self._log, header["extFields"]
        topic, properties = fields["b"].encode(), fields["i"].encode()
        queue_id, now_ms = int(fields["e"]), time.time_ns() // 1_000_000
        size = _RECORD.size + len(body) + 1 + len(topic) + 2 + len(properties)
        if log.end + size > log.size_bytes:
            log.end = 0
        offset, queue_offset = log.end, log.queue_ends[queue_id]
        head = _RECORD.pack(
            size, _MAGIC, zlib.crc32(body), queue_id, int(fields["f"]), queue_offset, offset, 0, int(fields["g"]), 0,
            now_ms, 0, 0, 0, len(body),
        )  # fmt: skip
        topic_part, property_part = bytes((len(topic),)) + topic, len(properties).to_bytes(2, "big") + properties
        log.memory[offset : offset + size] = b"".join((head, body, topic_part, property_part))
        log.end = offset + size
        log.queue_ends[queue_id] = queue_offset + 1
        answer = (
            f'{{"code":0,"extFields":{{"msgId":"{offset:032X}","queueId":"{queue_id}","queueOffset":"{queue_offset}"}},'
            f'"flag":1,"language":"PYTHON","opaque":{header["opaque"]},"serializeTypeCurrentRPC":"JSON","version":0}}'
        ).encode()
        return _HEAD.pack(4 + len(answer), len(answer)) + answer


def measure(duration_s: float) -> float:
    """Messages per second that a newly started bare server takes. Raises CalledProcessError if the load fails."""
    argv = [sys.executable, "-m", "benchmarks._bare_server"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"127.0.0.1:{int(server.stdout.readline())}"
            argv = [sys.executable, "-m", "benchmarks._load", "send", address, "--queues", str(_QUEUES)]
            out = subprocess.run([*argv, "--seconds", str(duration_s)], check=True, stdout=subprocess.PIPE).stdout
        finally:
            server.kill()
    return float(json.loads(out)["per_s"])


async def _serve(size_bytes: int) -> None:
    log = _Log(size_bytes)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(log), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--size-mb", type=int, default=1024)
    asyncio.run(_serve(parser.parse_args().size_mb << 20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
