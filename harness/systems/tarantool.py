"""Tarantool from the distribution (2.6.0 on Debian 12): spaces in memory with a log on disk, written by one primary.

Version 2.6.0 has synchronous replication, but no elections yet: `election_mode` came with 2.6.1. The first host is the
primary until an operator promotes another one (`--nemesis promote`).

A transaction in a synchronous space is in force once a quorum has written it, and is rolled back if that takes too
long. Other transactions see it before: `reads=primary` returns values that are rolled back later, and `reads=local`
those that the client's own host has received. With `reads=confirmed` a read also writes a row of its own, in the same
transaction, and so waits until everything that it has seen is in force.
"""

import asyncio
import json
from typing import Any

from harness.sdk import Client, Host, Refused, Status, Streams, System, apt, connection

SYNCHRO_TIMEOUT_S = 2
ASKING_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 1 << 24
SCRIPT = """
local fio, json = require('fio'), require('json')
local settings = json.decode([[{settings}]])
local hosts = #settings.replication
local is_new = #fio.glob(fio.pathjoin(settings.wal_dir, '*.snap')) == 0
settings.replication_connect_quorum = is_new and hosts or math.floor(hosts / 2) + 1
box.cfg(settings)

local function space(name)
    local made = box.schema.space.create(name, {{is_sync = {is_sync}}})
    made:create_index('primary')
end

if not settings.read_only then
    if box.space.marks == nil then
        box.schema.user.grant('guest', 'replication')
        for _, name in ipairs({{'registers', 'elements', 'counters', 'marks'}}) do
            space(name)
        end
    end
    box.ctl.clear_synchro_queue()
end

local operations = {{}}

function operations.read(key)
    local found = box.space.registers:get(key)
    return found and found[2]
end

function operations.write(key, value)
    box.space.registers:replace({{key, value}})
end

function operations.cas(key, old, new)
    if operations.read(key) ~= old then
        return false
    end
    operations.write(key, new)
    return true
end

function operations.add(value)
    box.space.elements:replace({{value}})
end

function operations.members()
    local found = setmetatable({{}}, {{__serialize = 'seq'}})
    for _, each in box.space.elements:pairs() do
        table.insert(found, each[1])
    end
    return found
end

function operations.value()
    local found = box.space.counters:get(0)
    return found and found[2] or 0
end

function operations.fetch_add(by)
    local found = operations.value()
    box.space.counters:replace({{0, found + by}})
    return found
end

local function confirmed(name, process, ...)
    local result = operations[name](...)
    box.space.marks:replace({{process}})
    return result
end

local refusals = {{
    [box.error.READONLY] = true,
    [box.error.SYNC_QUORUM_TIMEOUT] = true,
    [box.error.SYNC_ROLLBACK] = true,
}}

local function answer(is_ok, result)
    if is_ok then
        return json.encode({{result = result == nil and json.NULL or result}})
    end
    local code = type(result) == 'cdata' and result.code
    return json.encode({{[refusals[code] and 'refusal' or 'failure'] = tostring(result)}})
end

function at_once(name, ...)
    return answer(pcall(operations[name], ...))
end

function together(name, process, ...)
    return answer(pcall(box.atomic, confirmed, name, process, ...))
end

function state()
    local digest = require('digest').crc32.new()
    for _, name in ipairs({{'registers', 'elements', 'counters'}}) do
        for _, each in box.space[name]:pairs() do
            digest:update(json.encode(each))
        end
    end
    return answer(true, digest:result())
end

function status()
    local info = box.info
    return answer(true, {{leads = not info.ro, status = info.status, signature = tonumber(info.signature)}})
end

require('console').listen('{console}')
"""


class Tarantool(System):
    """Tarantool 2.6: spaces in memory, replicated synchronously from one primary; a program in C and Lua."""

    install = apt("tarantool")
    ports = {"data": 3301, "console": 3302}
    settings = {
        "replication": ("synchronous", "asynchronous"),
        "reads": ("confirmed", "primary", "local"),
        "wal_mode": ("write", "fsync", "none"),
    }
    setting_descriptions = {
        "replication": "whether a change is in force only once a quorum has it",
        "reads": "what reads return: only what a quorum has, what the primary has, or what the client's own host has",
        "wal_mode": "whether the log is written, also synced, or not kept at all",
    }
    stored = {"log": "*.xlog", "checkpoint": "*.snap"}

    def __init__(self) -> None:
        self.primary = "n1"

    def files(self, host: Host) -> dict[str, str]:
        number = f"{host.number:012d}"
        settings = {
            "listen": host.listen("data"),
            "replication": [each.address("data", host) for each in self.hosts],
            "read_only": host.name != self.primary,
            "instance_uuid": f"00000000-0000-4000-8000-{number}",
            "replicaset_uuid": "00000000-0000-4000-8000-ffffffffffff",
            "replication_synchro_quorum": len(self.hosts) // 2 + 1,
            "replication_synchro_timeout": SYNCHRO_TIMEOUT_S,
            "replication_timeout": 0.5,
            "replication_connect_timeout": 5,
            "wal_mode": self.settings["wal_mode"],
            "wal_dir": host.data,
            "memtx_dir": host.data,
            "vinyl_dir": host.data,
            "memtx_memory": 64 * 1024 * 1024,
        }
        is_sync = str(self.settings["replication"] == "synchronous").lower()
        script = SCRIPT.format(settings=json.dumps(settings), is_sync=is_sync, console=host.listen("console"))
        return {"init.lua": script}

    def command(self, host: Host) -> list[str]:
        return ["tarantool", host.path("init.lua")]

    async def status(self, host: Host) -> Status:
        async with connection(host.address("console")) as streams:
            found = await call(await greeted(streams), "status()")
        return Status(leads=found["leads"], end=found["signature"], facts={"status": found["status"]})

    async def promote(self, host: Host) -> None:
        self.primary = host.name

    async def state(self, host: Host) -> Any:
        async with connection(host.address("console")) as streams:
            return await call(await greeted(streams), "state()")


class TarantoolClient(Client):
    async def open(self) -> None:
        """Connect to the host that takes writes."""
        leads = await asyncio.gather(*map(self.is_primary, self.hosts))
        primaries = [host for host, yes in zip(self.hosts, leads, strict=True) if yes]
        if not primaries:
            raise Refused("no host takes writes")
        primary = primaries[self.process % len(primaries)]
        self.streams = self.reader = await greeted(await self.connect(self.address("console", primary)))
        self.node = primary.name
        if self.settings["reads"] == "local":
            self.reader = await greeted(await self.connect(self.address("console")))

    async def is_primary(self, host: Host) -> bool:
        try:
            async with asyncio.timeout(ASKING_TIMEOUT_S), connection(self.address("console", host)) as streams:
                return bool((await call(await greeted(streams), "status()"))["leads"])
        except (Refused, OSError, EOFError):
            return False

    async def look(self, name: str, *arguments: Any) -> Any:
        """The result of an operation that only reads."""
        if self.settings["reads"] == "confirmed":
            return await self.change(name, *arguments)
        return await call(self.reader, f"at_once({lua(name, *arguments)})")

    async def change(self, name: str, *arguments: Any) -> Any:
        return await call(self.streams, f"together({lua(name, self.process, *arguments)})")

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


def lua(*arguments: Any) -> str:
    """Arguments of a call in Lua. Raises TypeError for values that are no numbers and no plain words."""
    return ", ".join(map(json.dumps, arguments))


async def greeted(streams: Streams) -> Streams:
    """The connection, after the two lines with which a console begins."""
    for _ in range(2):
        if not await streams[0].readline():
            raise EOFError("the console has closed the connection")
    return streams


async def call(streams: Streams, expression: str) -> Any:
    """The result of a Lua function of the script. The console answers in YAML: a list whose only element is a text, in
    which the function has put JSON. Raises Refused, OSError, EOFError."""
    streams[1].write(f"return {expression}\n".encode())
    said = (await streams[0].readuntil(b"\n...\n")).decode()
    text = said.removeprefix("---\n- '").removesuffix("'\n...\n")
    answer = json.loads(text.replace("\n  ", " ").replace("''", "'"))
    if "refusal" in answer:
        raise Refused(answer["refusal"])
    if "failure" in answer:
        raise OSError(answer["failure"])
    return answer.get("result")
