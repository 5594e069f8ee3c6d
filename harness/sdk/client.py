"""Base class for a plug-in's client: one logical client with its own connection.

A client's methods decide which workloads it can run:

    read(key), write(key, value)        registers
    cas(key, old, new) -> bool          registers with compare-and-set
    add(value), members()               a set
    increment(by), value()              a counter
    fetch_add(by), value()              a counter whose additions return the previous value
    read_version(key),
        write_version(key, value)       registers that count their writes
    get(key), put(key, text),
        concat(key, text)               strings by key
    append(key, value) -> offset,
        poll(key, offset, max_messages)    a log: the values from an offset on, fewer only at its end
    publish(value) -> [partition, offset],
        fetch(partition, offset, max_messages)   a topic of several logs
    commit_offset(partition, offset),
        committed_offset(partition)     the offsets of a consumer group
    enqueue(value), dequeue()           a queue; with ack(value) if it redelivers until then
    schedule(value, delay_ms)           values that come out of a queue later
    prepare(value), commit(value),
        rollback(value)                 values that come out of a queue if they were committed
    push(value), pop()                  a stack
    insert(value), extract()            a priority queue
    lock(name), unlock(name)            mutexes
    transact(micro_operations)          transactions
    insert_if_absent(key, table, row) -> bool,
        rows(key)                       rows, at most one inserted for each key
    generate()                          unique ids

docs/workloads describes what each workload requires of them.

How a call ends determines the outcome of the operation. If it returns, the operation happened. If it raises `Refused`,
the operation certainly did not happen and will not. After any other exception, a read failed, and the outcome of a
write is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from harness.sdk.host import Host
from harness.tracing import current_traceparent

__all__ = ["CAPABILITIES", "TOGETHER", "Client", "Refused", "Streams", "connection"]

CAPABILITIES: Mapping[str, Sequence[str]] = {
    "read": ("key",),
    "write": ("key", "value"),
    "cas": ("key", "old", "new"),
    "add": ("value",),
    "members": (),
    "increment": ("by",),
    "value": (),
    "fetch_add": ("by",),
    "read_version": ("key",),
    "write_version": ("key", "value"),
    "get": ("key",),
    "put": ("key", "text"),
    "concat": ("key", "text"),
    "append": ("key", "value"),
    "poll": ("key", "offset", "max_messages"),
    "enqueue": ("value",),
    "dequeue": (),
    "ack": ("value",),
    "schedule": ("value", "delay_ms"),
    "prepare": ("value",),
    "commit": ("value",),
    "rollback": ("value",),
    "publish": ("value",),
    "fetch": ("partition", "offset", "max_messages"),
    "commit_offset": ("partition", "offset"),
    "committed_offset": ("partition",),
    "push": ("value",),
    "pop": (),
    "insert": ("value",),
    "extract": (),
    "lock": ("name",),
    "unlock": ("name",),
    "transact": ("micro_operations",),
    "insert_if_absent": ("key", "table", "row"),
    "rows": ("key",),
    "generate": (),
}
"""Method that a client may have -> its arguments, which are also the fields of an `invoke` in JSON lines."""

TOGETHER = (
    frozenset({"get", "put", "concat"}),
    frozenset({"prepare", "commit", "rollback"}),
    frozenset({"publish", "fetch"}),
    frozenset({"push", "pop"}),
    frozenset({"insert", "extract"}),
    frozenset({"insert_if_absent", "rows"}),
)
"""Groups of methods with names so common that a client may use one for something else: they count as capabilities only
if the client has the whole group."""


class Refused(Exception):
    """The operation certainly did not happen, and will not: the system refused it, or it was never sent. With `reopen`
    the client is unusable and the next operation opens a new one."""

    is_definite = True

    def __init__(self, *words: object, reopen: bool = False) -> None:
        super().__init__(*words)
        self.reopen = reopen


class Unreachable(Refused, ConnectionError):
    """No connection could be made, so nothing was sent. Also a ConnectionError, which code that tries the next host
    expects for one that does not answer."""


MAX_LINE_BYTES = 1 << 24
"""Of what `readline` and `readuntil` of a connection return. asyncio's default of 64 KiB is less than the members of a
set take after a few minutes."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[Streams]:
    """A TCP connection to "ip:port", closed at the end of the block. Raises Unreachable: nothing was sent yet."""
    streams = await _connected(address)
    try:
        yield streams
    finally:
        streams[1].close()


async def _connected(address: str) -> Streams:
    name, _, number = address.rpartition(":")
    try:
        return await asyncio.open_connection(name, int(number), limit=MAX_LINE_BYTES)
    except OSError as error:
        raise Unreachable(f"cannot connect to {address}: {error.strerror or error}") from None


class Client:
    """One logical client. Everything below is set before `open` is called; a subclass needs no constructor."""

    host: Host
    """The home host of this client: clients are assigned to the replicas' hosts round-robin."""
    hosts: Sequence[Host]
    """All replicas' hosts."""
    others: Mapping[str, Host]
    """The hosts of the system's `extra_hosts`, by name."""
    process: int
    """The number of this logical client, never used twice in a run."""
    settings: Mapping[str, str]
    """The system's settings, defaults included."""
    environment: Mapping[str, str]
    """Environment variables for programs that a client starts, by which they are ended with the run or by `harness
    clean`."""
    node: str | None = None
    """Set it to the name of the host that answered, if known: the report shows it with the operation. An unknown host
    name is a mistake of the client, which makes the verdict unknown."""
    timeout_s: float
    """How long one operation may take before the harness cancels the call."""

    @property
    def traceparent(self) -> str | None:
        """The W3C Trace Context header of the operation under way, with the ids that `harness export --format otlp`
        gives it; None outside of an operation. `JsonHttp` sends it by itself."""
        return current_traceparent()

    def address(self, port: str, host: Host | None = None) -> str:
        """ "ip:port" at which clients reach a port (its name in `System.ports`) of `host`, by default of the client's
        own. Raises KeyError."""
        return (host or self.host).address(port)

    def url(self, port: str, host: Host | None = None) -> str:
        """Like `address`, as "http://ip:port"."""
        return (host or self.host).url(port)

    def dialled(self, address: str) -> str:
        """The address at which clients reach what the system itself calls `address` ("ip:port", as from
        `Host.advertise`). It differs only if every link is a proxy. An address of no host is returned unchanged."""
        for host in self.hosts:
            for name in host.port_names:
                if address in (host.advertise(name), host.listen(name)):
                    return host.address(name)
        return address

    async def connect(self, address: str) -> Streams:
        """A TCP connection to "ip:port", closed with the client. Raises Unreachable: nothing was sent yet."""
        streams = await _connected(address)
        self.__dict__.setdefault("_opened", []).append(streams[1])
        return streams

    async def open(self) -> None:
        """Connect. If this raises, the operation that needed the connection was not sent."""

    async def close(self) -> None:
        """Release what `open` acquired; called after a failed open too. Closes what `connect` opened."""
        for writer in self.__dict__.pop("_opened", []):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
