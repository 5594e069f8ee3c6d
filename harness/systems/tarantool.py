"""Tarantool from the distribution (2.6.0 on Debian 12): data in memory and in a log, on one primary and its replicas.

Version 2.6.0 has synchronous replication but no elections (`election_mode` came with 2.6.1): the first host is the
primary until an operator promotes another one (`--nemesis promote`).

A transaction of a synchronous space waits in the primary's queue until a quorum has it, or is rolled back after a
timeout. Meanwhile others see it: `reads=primary` returns values that may be rolled back, and `reads=local` what the
client's own host has. With `reads=confirmed` a read writes a row in its own transaction, and so waits for all that it
has seen.

Seen with 2.6.0:

- Now and then, without any fault, a transaction times out although both replicas wrote it at once. The primary's log
  then has a rollback from number 0 on, as if the transaction had no number yet when it was acknowledged. With
  `pipeline=off`, which starts a transaction only when the one before has ended, it is rolled back everywhere. With
  `pipeline=on` a later one may have been confirmed, and it with that one: the primary forgets it, its replicas do not.
- A restart recovers a log row by row (2.8.1 was the first to recover transactions): of a transaction with two rows that
  was rolled back, the first row is in force again (`rows=2`).
- A primary that restarts with transactions in its queue crashes when a replica acknowledges them (SIGSEGV in
  `txn_limbo_ack`), and has to be started again: `--nemesis kill=sigkill@leader`.
- With `wal_mode=write`, Tarantool's default, a power cut of all hosts (`--nemesis power=cut@all`) leaves nothing; with
  `wal_mode=fsync` it leaves everything. (Seen with `replication=asynchronous`, because of the crash above.)
"""

import asyncio
import json
from typing import Any

from harness.sdk import Client, Host, Refused, Status, System, apt, connection
from harness.systems.tarantool_script import SCRIPT, call, greeted

SYNCHRO_TIMEOUT_S = 2
CONNECT_TIMEOUT_S = 5
HEARTBEAT_S = 0.5
MEMORY_BYTES = 64 * 1024 * 1024
ASKING_TIMEOUT_S = 1.0
REPLICA_SET = "00000000-0000-4000-8000-ffffffffffff"


class Tarantool(System):
    """Tarantool 2.6: a primary whose replicas confirm its transactions, without elections; a C program with Lua."""

    install = apt("tarantool")
    ports = {"data": 3301, "console": 3302}
    settings = {
        "replication": ("synchronous", "asynchronous"),
        "reads": ("confirmed", "primary", "local"),
        "pipeline": ("off", "on"),
        "rows": ("1", "2"),
        "wal_mode": ("write", "fsync", "none"),
    }
    setting_descriptions = {
        "replication": "whether a transaction needs a quorum",
        "reads": "what a read returns: what a quorum has, what the primary has, or what the client's own host has",
        "pipeline": "whether a transaction may start while another one waits for its quorum",
        "rows": "how many rows a transaction writes",
        "wal_mode": "whether the log is written, also synced, or not kept",
    }
    stored = {"log": "*.xlog", "checkpoint": "*.snap"}

    def __init__(self) -> None:
        self.primary = "n1"

    def files(self, host: Host) -> dict[str, str]:
        box = {
            "listen": host.listen("data"),
            "replication": [each.address("data", host) for each in self.hosts],
            "read_only": host.name != self.primary,
            "instance_uuid": f"00000000-0000-4000-8000-{host.number:012d}",
            "replicaset_uuid": REPLICA_SET,
            "replication_synchro_quorum": len(self.hosts) // 2 + 1,
            "replication_synchro_timeout": SYNCHRO_TIMEOUT_S,
            "replication_timeout": HEARTBEAT_S,
            "replication_connect_timeout": CONNECT_TIMEOUT_S,
            "wal_mode": self.settings["wal_mode"],
            "memtx_memory": MEMORY_BYTES,
        }
        given = {
            "box": box,
            "console": host.listen("console"),
            "is_synchronous": self.settings["replication"] == "synchronous",
            "is_pipelined": self.settings["pipeline"] == "on",
            "rows": int(self.settings["rows"]),
            "patience": SYNCHRO_TIMEOUT_S,
        }
        return {"settings.json": json.dumps(given, indent=1), "init.lua": SCRIPT}

    def command(self, host: Host) -> list[str]:
        return ["tarantool", host.path("init.lua")]

    async def ready(self, host: Host) -> bool:
        """Whether it follows a majority: an "orphan" that does not takes no writes."""
        return (await self.status(host)).facts == {"status": "running"}

    async def status(self, host: Host) -> Status:
        async with connection(host.address("console")) as streams:
            found = await call(await greeted(streams), "status")
        return Status(leads=found["leads"], end=found["end"], facts={"status": found["status"]})

    async def promote(self, host: Host) -> None:
        self.primary = host.name

    async def state(self, host: Host) -> Any:
        async with connection(host.address("console")) as streams:
            return await call(await greeted(streams), "state")


class TarantoolClient(Client):
    """A client of the primary's console, or of its own host's for `reads=local`."""

    async def open(self) -> None:
        leads = await asyncio.gather(*map(self.is_primary, self.hosts))
        primaries = [host for host, yes in zip(self.hosts, leads, strict=True) if yes]
        if not primaries:
            raise Refused("no host takes writes")
        primary = primaries[self.process % len(primaries)]
        self.streams = self.reader = await greeted(await self.connect(self.address("console", primary)))
        if self.settings["reads"] == "local":
            self.reader = await greeted(await self.connect(self.address("console")))

    async def is_primary(self, host: Host) -> bool:
        try:
            async with asyncio.timeout(ASKING_TIMEOUT_S), connection(self.address("console", host)) as streams:
                return bool((await call(await greeted(streams), "status"))["leads"])
        except (Refused, OSError, EOFError):
            return False

    async def change(self, name: str, *arguments: int) -> Any:
        """Perform an operation as a transaction, whose commit waits for a quorum."""
        return await call(self.streams, "commit", name, self.process, *arguments)

    async def look(self, name: str, *arguments: int) -> Any:
        """Perform an operation that only reads."""
        if self.settings["reads"] == "confirmed":
            return await self.change(name, *arguments)
        return await call(self.reader, "look", name, *arguments)

    async def read(self, key: int) -> Any:
        return await self.look("read", key)

    async def write(self, key: int, value: int) -> None:
        await self.change("write", key, value)

    async def cas(self, key: int, old: int, new: int) -> Any:
        return await self.change("cas", key, old, new)

    async def add(self, value: int) -> None:
        await self.change("add", value)

    async def members(self) -> Any:
        return await self.look("members")

    async def increment(self, by: int) -> None:
        await self.change("fetch_add", by)

    async def fetch_add(self, by: int) -> Any:
        return await self.change("fetch_add", by)

    async def value(self) -> Any:
        return await self.look("value")
