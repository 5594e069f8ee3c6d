"""Apache's own store as a judge of stores written by this project: what it finds when it opens them.

`pad` turns our log, as it is on disk, into a store that Apache's code takes for its own after a crash: files padded
with zeros, and `abort` beside them. Nothing is truncated or repaired, so Apache's recovery decides what is a record.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._apache_broker import apache_classpath
from harness.systems.rocketmq import OPENED

__all__ = ["QUEUE_FILE_UNITS", "ask_apache_store", "pad", "queues_of"]

SOURCE = Path(__file__).resolve().parent.parent / "tests" / "node" / "interop" / "java" / "StoreOracle.java"
QUEUE_FILE_UNITS = 1000
"""Units per file of the consume queues that the oracle makes."""


def ask_apache_store(directories: Sequence[Path], *, segment_size_bytes: int) -> list[dict[str, Any]]:
    """What Apache's store finds in each: `end`, `queues` as [first, next, SHA-256 of units, of records]; or `error`.

    It modifies the directories, as its own stores. Raises AssertionError if the program fails.
    """
    command = [
        *("java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={directories[0]}"),
        f"-Djava.io.tmpdir={directories[0]}",
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
        *("-cp", apache_classpath(), str(SOURCE), str(segment_size_bytes), *map(str, directories)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"directory"')]
    assert done.returncode == 0 and len(lines) == len(directories), (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in lines]


def pad(files: Mapping[str, bytes], target: Path, *, segment_size_bytes: int, durable_ms: int) -> None:
    """Write the files of a log, by name, to `target` as Apache's store of a killed broker. Messages with a store
    timestamp of at most `durable_ms` (ms since the epoch) were durable (0: unknown)."""
    log = target / "commitlog"
    log.mkdir(parents=True)
    for name, data in files.items():
        (log / name).write_bytes(data.ljust(segment_size_bytes, b"\0"))
    (target / "abort").touch()
    if durable_ms:
        (target / "checkpoint").write_bytes(durable_ms.to_bytes(8, "big").ljust(4096, b"\0"))


def queues_of(data_dir: Path) -> dict[str, list[Any]]:
    """The queues of our store after an orderly stop, in the oracle's format; this reads the files without our code."""
    log = b"".join(path.read_bytes() for path in sorted((data_dir / "commitlog").iterdir()))
    begin = int(min(path.name for path in (data_dir / "commitlog").iterdir()))
    found: dict[str, list[Any]] = {}
    for directory in sorted((data_dir / "consumequeue").glob("*/*")):
        units = b"".join(path.read_bytes() for path in sorted(directory.iterdir()))
        records = hashlib.sha256()
        for position, size_bytes, _ in struct.iter_unpack(">qiq", units):
            records.update(log[position - begin : position - begin + size_bytes])
        name = f"{directory.parent.name}/{directory.name}"
        found[name] = [0, len(units) // 20, hashlib.sha256(units).hexdigest(), records.hexdigest()]
    return found


def remove_all(directories: Sequence[Path]) -> None:
    """Remove the oracle's stores, whose preallocated files take 100 MB even for a few messages."""
    for directory in directories:
        shutil.rmtree(directory)
