"""What the plug-in of Tarantool has its instances run, and calls of it through their text console.

The console takes a line of Lua and answers in YAML. Each function of the script returns one text of JSON, so that the
answer is a list of one quoted text.
"""

from __future__ import annotations

import json
from typing import Any

from harness.sdk import Refused, Streams

__all__ = ["SCRIPT", "call", "greeted"]

SCRIPT = """
local fiber, fio, json = require('fiber'), require('fio'), require('json')
local file = fio.open('settings.json', {'O_RDONLY'})
local given = json.decode(file:read())
file:close()

-- A new instance waits for all others, so that they become one replica set; later a majority is enough.
local count = #given.box.replication
local is_new = #fio.glob('*.snap') == 0
given.box.replication_connect_quorum = is_new and count or math.floor(count / 2) + 1
box.cfg(given.box)

local spaces = {'registers', 'elements', 'counters', 'marks'}

if not given.box.read_only then
    if box.space.marks == nil then
        box.schema.user.grant('guest', 'replication')
        for _, name in ipairs(spaces) do
            box.schema.space.create(name, {is_sync = given.is_synchronous}):create_index('primary')
        end
    end
    box.ctl.clear_synchro_queue()  -- of the primary before: confirms what a quorum has, rolls back the rest
end

-- Each returns its result, and whether it has written a row.
local operations = {}

function operations.read(key)
    local found = box.space.registers:get(key)
    return found and found[2], false
end

function operations.write(key, value)
    box.space.registers:replace({key, value})
    return nil, true
end

function operations.cas(key, old, new)
    if operations.read(key) ~= old then
        return false, false
    end
    operations.write(key, new)
    return true, true
end

function operations.add(value)
    box.space.elements:replace({value})
    return nil, true
end

function operations.members()
    local found = setmetatable({}, {__serialize = 'seq'})
    for _, each in box.space.elements:pairs() do
        table.insert(found, each[1])
    end
    return found, false
end

function operations.value()
    local found = box.space.counters:get(0)
    return found and found[2] or 0, false
end

function operations.fetch_add(by)
    local found = operations.value()
    box.space.counters:replace({0, found + by})
    return found, true
end

-- After these errors a transaction is not in force, and never will be.
local refusals = {
    [box.error.READONLY] = true,
    [box.error.SYNC_QUORUM_TIMEOUT] = true,
    [box.error.SYNC_ROLLBACK] = true,
}

local function answer(is_ok, result)
    if is_ok then
        return json.encode({result = result == nil and json.NULL or result})
    end
    local code = type(result) == 'cdata' and result.code
    return json.encode({[refusals[code] and 'refusal' or 'failure'] = tostring(result)})
end

local function transaction(name, process, ...)
    local result, has_written = operations[name](...)
    if not has_written or given.rows == 2 then
        box.space.marks:replace({process})
    end
    return result
end

local turn = fiber.channel(1)
turn:put(true)

function commit(...)
    if given.is_pipelined then
        return answer(pcall(box.atomic, transaction, ...))
    end
    if turn:get(given.patience) == nil then
        return json.encode({refusal = 'another transaction still waits'})
    end
    local said = answer(pcall(box.atomic, transaction, ...))
    turn:put(true)
    return said
end

function look(name, ...)
    return answer(pcall(operations[name], ...))
end

function status()
    local info = box.info
    return answer(true, {leads = not info.ro, status = info.status, ['end'] = tonumber(info.signature)})
end

-- The number of rows of each space, and a checksum of them.
function state()
    local found = {}
    for _, name in ipairs(spaces) do
        local digest = require('digest').crc32.new()
        for _, each in box.space[name]:pairs() do
            digest:update(json.encode(each))
        end
        found[name] = {box.space[name]:len(), digest:result()}
    end
    return answer(true, found)
end

require('console').listen(given.console)
"""
BEGIN, QUOTE, END = b"---\n- '", b"'", b"\n...\n"


async def greeted(streams: Streams) -> Streams:
    """The connection after the two lines with which a console begins. Raises EOFError."""
    for _ in range(2):
        if not (await streams[0].readline()).endswith(b"\n"):
            raise EOFError("the console has closed the connection")
    return streams


async def call(streams: Streams, name: str, *arguments: str | int) -> Any:
    """The result of a function of the script. Raises Refused if a transaction is not in force and never will be, and
    OSError or EOFError if that is unknown."""
    streams[1].write(f"return {name}({', '.join(map(json.dumps, arguments))})\n".encode())
    said = await streams[0].readuntil(END)
    if not (said.startswith(BEGIN) and said.endswith(QUOTE + END)):  # an error outside of the script's functions
        raise OSError(f"the console answers {said.decode()}")
    # In a quoted text YAML breaks long lines at a space and doubles quotes.
    text = said[len(BEGIN) : -len(QUOTE + END)].decode().replace("\n  ", " ").replace("''", "'")
    answer = json.loads(text)
    if "refusal" in answer:
        raise Refused(answer["refusal"])
    if "failure" in answer:
        raise OSError(answer["failure"])
    return answer["result"]
