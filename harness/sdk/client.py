"""What a client of a system is to a plug-in: one logical client, with a connection of its own.

The methods that a client has decide which workloads it fits:

    read(key), write(key, value)        registers
    cas(key, old, new) -> bool          registers with compare-and-set
    add(value), members()               a set
    increment(by), value()              a counter
    append(key, value) -> offset,
        poll(key, offset, max_messages)    a log: the values from an offset on, fewer only at its end
    enqueue(value), dequeue()           a queue; with ack(value), where it shows a value until then
    lock(name), unlock(name)            mutexes
    transact(micro_operations)          transactions
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

__all__ = ["CAPABILITIES", "Client", "Refused", "Streams", "connection"]

CAPABILITIES: Mapping[str, Sequence[str]] = {
    "read": ("key",),
    "write": ("key", "value"),
    "cas": ("key", "old", "new"),
    "add": ("value",),
    "members": (),
    "increment": ("by",),
    "value": (),
    "append": ("key", "value"),
    "poll": ("key", "offset", "max_messages"),
    "enqueue": ("value",),
    "dequeue": (),
    "ack": ("value",),
    "lock": ("name",),
    "unlock": ("name",),
    "transact": ("micro_operations",),
    "generate": (),
}
"""What a client may be able to do: method -> what it is called with, and the fields of an `invoke` in JSON lines."""


class Refused(Exception):
    """The operation certainly did not happen, and will not: the system said so, or it was never sent."""

    is_definite = True


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[Streams]:
    """A TCP connection to "ip:port" for as long as the block lasts. Raises Refused: nothing was sent yet."""
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
        raise Refused(f"cannot connect to {address}: {error.strerror or error}") from None


class Client:
    """One logical client. Everything below is set before `open` is called; a subclass needs no constructor."""

    host: Host
    """The host that this client belongs to: clients are spread over the replicas' hosts in turn."""
    hosts: Sequence[Host]
    """All replicas' hosts."""
    process: int
    """The number of this logical client, never used twice in a run."""
    settings: Mapping[str, str]
    """The system's settings, defaults included."""
    environment: Mapping[str, str]
    """What programs that a client starts need in their environment, so that `harness clean` finds them."""
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
        """A TCP connection to "ip:port", closed with the client. Raises Refused: nothing was sent yet."""
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
