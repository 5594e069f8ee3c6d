"""MariaDB with Galera from the distribution (10.11 with Galera 26.4 on Debian 12): every host accepts writes.

A transaction runs on one host; at commit its changed rows are sent to all hosts in one total order, and each host
certifies locally whether an earlier transaction changed the same rows. So a commit may be refused, and reads show what
the host has applied: with `--set sync_wait=on` a host waits before a read until it has applied what the group had by
then. With `--set writes=first` all clients use the first host, as behind a proxy with one writer.

There is no leader. A killed host recovers the end of its log before it starts, as the distribution's service does
(`--wsrep-recover`), and gets what it missed from another host; the group re-forms on its own once all are back.

Not on `--cluster local`, where every link is a proxy: Galera's members exchange the addresses at which they know each
other, and a member that meets another one under a second address exits ("A node with the same UUID already exists in
the cluster").
"""

import json
from typing import Any

from harness.sdk import Host, Streams, System, apt, connection
from harness.systems.sql import MAX_MESSAGE_BYTES, ROWS, TABLES, SqlClient, SqlError, SqlSession, rows_schema

# A statement that the server retries on its own is answered with the rows of both attempts: after a conflict with
# another host, DELETE ... RETURNING of one row returns the row of the failed attempt and the row that was deleted.
# Native AIO is io_uring, whose writes would bypass disk faults and the tracking of unsynced writes for power cuts. The
# socket path is relative to the data directory: an absolute one could exceed the limit of 107 bytes.
CONFIGURATION = """
[mariadbd]
basedir = {usr}
lc_messages_dir = {usr}/share/mysql
datadir = {datadir}
socket = socket
pid_file = {pid_file}
bind_address = {ip}
skip_name_resolve
skip_grant_tables
sql_mode = NO_BACKSLASH_ESCAPES,STRICT_TRANS_TABLES
transaction_isolation = {isolation}
innodb_buffer_pool_size = 32M
innodb_log_file_size = 16M
innodb_use_native_aio = OFF
innodb_flush_log_at_trx_commit = {flush}
innodb_autoinc_lock_mode = 2
innodb_lock_wait_timeout = 5
binlog_format = ROW
wsrep_on = ON
wsrep_provider = {provider}
wsrep_cluster_name = splitbrain
wsrep_cluster_address = gcomm://{members}
wsrep_node_name = {name}
wsrep_node_address = {ip}
wsrep_sst_method = rsync
wsrep_sst_receive_address = {ip}:4444
wsrep_sync_wait = {sync_wait}
wsrep_retry_autocommit = 0
wsrep_provider_options = "gmcast.listen_addr=tcp://{ip}:4567;ist.recv_addr={ip}:4568;gcache.size=64M"
"""
RUN = """
cd "$1"
if [ -e new-cluster ]; then
    rm new-cluster && sync -f . && exec mariadbd --defaults-file=server.conf --wsrep-new-cluster
fi
recover="--wsrep-recover --log-error=$1/recover.log"
test ! -e data/ibdata1 || mariadbd --defaults-file=server.conf $recover
at="$(sed -n 's/.*Recovered position: *//p' recover.log 2>&- | tail -n 1)"
rm -f recover.log
exec mariadbd --defaults-file=server.conf ${at:+--wsrep_start_position=$at}
"""
SCHEMA = [
    "CREATE DATABASE IF NOT EXISTS splitbrain",
    *(f"CREATE TABLE IF NOT EXISTS splitbrain.t{n} (k int PRIMARY KEY, v text)" for n in range(TABLES)),
    "CREATE TABLE IF NOT EXISTS splitbrain.elements (v int PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS splitbrain.jobs (n bigint PRIMARY KEY AUTO_INCREMENT, v text)",
    "CREATE TABLE IF NOT EXISTS splitbrain.ids (n bigint PRIMARY KEY AUTO_INCREMENT)",
    *rows_schema("splitbrain."),
]
STATE = "SHOW STATUS WHERE Variable_name IN ('wsrep_ready', 'wsrep_cluster_status', 'wsrep_cluster_size')"
DIGEST = ", ".join(
    f"(SELECT MD5(COALESCE(GROUP_CONCAT({row} ORDER BY {key}), '')) FROM splitbrain.{table})"
    for table, key, row in (
        *((f"t{n}", "k", "k, ' ', v") for n in range(TABLES)),
        *((each, "n", "n, ' ', k") for each in ROWS),
    )
)
DEFINITE = ("1047", "1062", "1205", "1213")
"""Errors after which a transaction did not happen: no primary component, duplicate key, lock wait timeout, deadlock or
refused commit."""
NULL = 0xFB


class MariaDB(System):
    """MariaDB with Galera: a database that accepts writes on every host; a C++ program of many threads."""

    install = apt("mariadb-server", "galera-4", "rsync")
    ports = {"client": 3306, "group": 4567, "catch-up": 4568, "copy": 4444}
    settings = {
        "isolation": ("repeatable-read", "serializable", "read-committed"),
        "sync_wait": ("on", "off"),
        "writes": ("own", "first"),
        "flush": ("1", "0"),
    }
    setting_descriptions = {
        "isolation": "isolation level of transactions",
        "sync_wait": "whether a host, before a read, applies what the group had by then",
        "writes": "where clients write: each on its own host, or all on the first",
        "flush": "innodb_flush_log_at_trx_commit: 1 syncs the log at each commit, 0 once a second",
    }
    user = "nobody"
    stored = {"log": "data/ib_logfile0"}
    ready_timeout_s = 120.0
    recovery_timeout_s = 120.0

    def files(self, host: Host) -> dict[str, str]:
        configuration = CONFIGURATION.format(
            usr=host.installed("usr/share/mysql").removesuffix("/share/mysql"),
            provider=host.installed("usr/lib/galera/libgalera_smm.so"),
            datadir=host.path("data"), pid_file=host.path("pid"),
            ip=host.ip, name=host.name, members=",".join(each.advertise("group") for each in self.hosts),
            isolation=self.settings["isolation"].upper(), flush=self.settings["flush"],
            sync_wait=7 if self.settings["sync_wait"] == "on" else 0,
        )  # fmt: skip
        return {"server.conf": configuration}

    async def setup(self, host: Host) -> None:
        """The first host creates the system tables; the others start empty and receive a copy of its data."""
        await host.run("mkdir", host.path("data"))
        if host.number == 1:
            usr = host.installed("usr/share/mysql").removesuffix("/share/mysql")
            await host.run(
                "mariadb-install-db", "--no-defaults", f"--basedir={usr}", f"--datadir={host.path('data')}",
                "--auth-root-authentication-method=normal", "--skip-test-db", "--force", "--skip-name-resolve",
                "--innodb-log-file-size=16M",
            )  # fmt: skip
            await host.run("touch", host.path("new-cluster"))
            await host.run("sync", "-f", host.data)

    def command(self, host: Host) -> list[str]:
        return ["sh", "-c", RUN, "sh", host.data]

    async def ready(self, host: Host) -> bool:
        """Whether it is in the primary component and synced with the group."""
        return (await self.words_of(host)).get("wsrep_ready") == "ON"

    async def words_of(self, host: Host) -> dict[str, str]:
        async with connection(host.address("client")) as streams:
            return {name: value for name, value in await (await opened(streams)).query(STATE)}

    async def start_together(self) -> None:
        """Create the tables once all hosts are in the group; DDL statements are part of the total order too."""
        for host in self.hosts:
            if (await self.words_of(host))["wsrep_cluster_size"] != str(len(self.hosts)):
                raise LookupError(f"{host.name} does not know all hosts yet")
        async with connection(self.hosts[0].address("client")) as streams:
            session = await opened(streams)
            for sql in SCHEMA:
                await session.query(sql)

    async def state(self, host: Host) -> Any:
        async with connection(host.address("client")) as streams:
            return await (await opened(streams)).query(f"SELECT {DIGEST}")


class MariaDBClient(SqlClient):
    upsert = "ON DUPLICATE KEY UPDATE"

    async def open(self) -> None:
        host = self.hosts[0] if self.settings["writes"] == "first" else self.host
        self.session = self.reader = await opened(await self.connect(self.address("client", host)))
        await self.session.query("USE splitbrain")

    async def dequeue(self) -> Any:
        taken = await self.only_row("DELETE FROM jobs ORDER BY n LIMIT 1 RETURNING v")
        return json.loads(taken[0]) if taken else None

    async def generate(self) -> int:
        return int((await self.only_row("INSERT INTO ids () VALUES () RETURNING n"))[0])

    async def only_row(self, statement: str) -> list[Any]:
        """The row that a statement changed; empty if there was none. Raises OSError if there are several."""
        rows = await self.session.change(statement)
        if len(rows) > 1:
            raise OSError(f"{len(rows)} rows of one")
        return rows[0] if rows else []


class Session(SqlSession):
    """A connection, by the text protocol of COM_QUERY (MariaDB knowledge base, "Client/Server Protocol")."""

    async def packet(self) -> bytes:
        head = await self.reader.readexactly(4)
        size = int.from_bytes(head[:3], "little")
        self.number = head[3] + 1
        if size > MAX_MESSAGE_BYTES:
            raise OSError(f"a packet of {size} bytes")
        return await self.reader.readexactly(size)

    def send(self, content: bytes, number: int) -> None:
        self.writer.write(len(content).to_bytes(3, "little") + bytes([number & 255]) + content)

    async def answer(self) -> bytes:
        """The next packet. Raises SqlError if it is an error packet."""
        packet = await self.packet()
        if packet[:1] == b"\xff":
            words = packet[3:].removeprefix(b"#").decode("utf-8", "replace")
            raise SqlError(str(int.from_bytes(packet[1:3], "little")), words)
        return packet

    async def query(self, statement: str) -> list[list[Any]]:
        self.send(b"\x03" + statement.encode(), 0)
        first = await self.answer()
        self.changed = 0
        if first[:1] == b"\0":
            self.changed, _ = length_at(first, 1)
            return []
        columns, _ = length_at(first, 0)
        for _ in range(columns + 1):  # column definitions, then the EOF after them
            await self.answer()
        rows = []
        while not is_end(packet := await self.answer()):
            values, end = values_of(packet, columns)
            if end != len(packet):  # an OK packet ends the rows of a statement that Galera replayed at commit
                break
            rows.append(values)
        return rows

    def is_definite(self, error: SqlError) -> bool:
        return error.code in DEFINITE


async def opened(streams: Streams) -> Session:
    """A connection without authentication, which `skip_grant_tables` allows. Raises SqlError."""
    session = Session(streams)
    greeting = await session.answer()
    if greeting[:1] != b"\x0a":
        raise OSError(f"a greeting of version {greeting[:1].hex()}")
    # Capabilities: 4.1 protocol, affected rows count found rows, transactions, authentication plug-ins.
    flags, longest, utf8mb4 = 0x1 | 0x2 | 0x200 | 0x2000 | 0x8000 | 0x80000, 1 << 24, 45
    session.send(
        flags.to_bytes(4, "little") + longest.to_bytes(4, "little") + bytes([utf8mb4]) + bytes(23)
        + b"root\0" + b"\0" + b"mysql_native_password\0",
        session.number,
    )  # fmt: skip
    if (await session.answer())[:1] == b"\xfe":  # asks for another authentication method: there is no password
        session.send(b"", session.number)
        await session.answer()
    return session


def is_end(packet: bytes) -> bool:
    """Whether a packet is EOF, which is shorter than any text value that begins with this byte."""
    return packet[:1] == b"\xfe" and len(packet) < 9


def length_at(packet: bytes, position: int) -> tuple[int, int]:
    """A length-encoded integer of one, three, four or nine bytes, and the position of its end."""
    kind = packet[position]
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(kind, 0)
    end = position + 1 + size
    return (int.from_bytes(packet[position + 1 : end], "little") if size else kind), end


def values_of(packet: bytes, columns: int) -> tuple[list[Any], int]:
    """The values of a row, and the position of its end."""
    values: list[Any] = []
    position = 0
    for _ in range(columns):
        if packet[position] == NULL:
            values.append(None)
            position += 1
        else:
            size, position = length_at(packet, position)
            values.append(packet[position : position + size].decode())
            position += size
    return values, position
