"""What a client of a system is to a plug-in: one logical client, with a connection of its own.

The methods that a client has decide which workloads it fits:

    read(key), write(key, value)        registers
    cas(key, old, new) -> bool          registers with compare-and-set
    add(value), members()               a set
    increment(by), value()              a counter
    fetch_add(by), value()              a counter whose additions answer with what was there before
    read_version(key),
        write_version(key, value)       registers that count their writes
    get(key), put(key, text),
        concat(key, text)               texts by key
    append(key, value) -> offset,
        poll(key, offset, max_messages)    a log: the values from an offset on, fewer only at its end
    publish(value) -> [partition, offset],
        fetch(partition, offset, max_messages)   a topic of several logs
    commit_offset(partition, offset),
        committed_offset(partition)     the offsets of a consumer group
    enqueue(value), dequeue()           a queue; with ack(value), where it shows a value until then
    schedule(value, delay_ms)           values that come out of a queue later
    prepare(value), commit(value),
        rollback(value)                 values that come out of a queue if they were committed
    push(value), pop()                  a stack
    insert(value), extract()            a priority queue
    lock(name), unlock(name)            mutexes
    transact(micro_operations)          transactions
    insert_if_absent(key, table, row) -> bool,
        rows(key)                       rows, of which a key gets one only while it has none
    generate()                          unique ids

docs/workloads says what each workload asks of them.

How a call ends says what is known of the operation. It returned: it happened. It raised `Refused`: it certainly did not
happen, nor will it. It raised anything else: a call that only reads failed, of one that writes nobody knows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from harness.sdk.host import Host

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
"""What a client may be able to do: method -> what it is called with, and the fields of an `invoke` in JSON lines."""

TOGETHER = (
    frozenset({"get", "put", "concat"}),
    frozenset({"prepare", "commit", "rollback"}),
    frozenset({"publish", "fetch"}),
    frozenset({"push", "pop"}),
    frozenset({"insert", "extract"}),
    frozenset({"insert_if_absent", "rows"}),
)
"""Methods whose names are so common that a client may mean something else by one of them: they say what it can do only
where it has all of a group."""


class Refused(Exception):
    """The operation certainly did not happen, and will not: the system said so, or it was never sent. With `reopen` the
    client is of no more use: the next operation opens a new one."""

    is_definite = True

    def __init__(self, *words: object, reopen: bool = False) -> None:
        super().__init__(*words)
        self.reopen = reopen


class Unreachable(Refused, ConnectionError):
    """No connection could be made, so that nothing was sent. A ConnectionError too, as whoever goes on to the next host
    expects of one that does not answer."""


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[Streams]:
    """A TCP connection to "ip:port" for as long as the block lasts. Raises Unreachable: nothing was sent yet."""
    streams = await _connected(address)
    try:
        yield streams
    finally:
        streams[1].close()


async def _connected(address: str) -> Streams:
    name, _, number = address.rpartition(":")
    try:
        return await asyncio.open_connection(name, int(number))
    except OSError as error:
        raise Unreachable(f"cannot connect to {address}: {error.strerror or error}") from None


class Client:
    """One logical client. Everything below is set before `open` is called; a subclass needs no constructor."""

    host: Host
    """The host that this client belongs to: clients are spread over the replicas' hosts in turn."""
    hosts: Sequence[Host]
    """All replicas' hosts."""
    others: Mapping[str, Host]
    """The hosts of the system's `extra_hosts`, by name."""
    process: int
    """The number of this logical client, never used twice in a run."""
    settings: Mapping[str, str]
    """The system's settings, defaults included."""
    environment: Mapping[str, str]
    """What programs that a client starts need in their environment, so that they are ended with the run, or by `harness
    clean`."""
    node: str | None = None
    """Set it to the name of the host that answers, where the client knows: the report shows it beside what it did. A
    name that no host has is a mistake of the client, which makes the verdict unknown."""
    timeout_s: float
    """How long one operation may take. The harness ends the call then, by cancelling it."""

    def address(self, port: str, host: Host | None = None) -> str:
        """ "ip:port" at which clients reach a port, by its name in `System.ports`, of `host` or of the client's own.
        Raises KeyError."""
        return (host or self.host).address(port)

    def url(self, port: str, host: Host | None = None) -> str:
        """The same as "http://ip:port"."""
        return (host or self.host).url(port)

    def dialled(self, address: str) -> str:
        """Where clients reach what the system itself calls `address` ("ip:port", as `Host.advertise` gives it): the
        same, but where every link is a proxy. An address that is no host's is returned as it is."""
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
        """Connect. What this raises says that the operation which needed the connection was not sent."""

    async def close(self) -> None:
        """Let go of what `open` took; called after an open that failed, too. This one closes what `connect` opened."""
        for writer in self.__dict__.pop("_opened", []):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
