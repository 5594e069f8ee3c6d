"""SQL clients, in statements that PostgreSQL and MariaDB both understand.

Keys are spread over several tables, as in an application. A database's own plug-in provides the wire protocol and the
few statements in which the dialects differ.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from harness.sdk import Client, Refused, Streams

__all__ = ["MAX_MESSAGE_BYTES", "ROWS", "TABLES", "SqlClient", "SqlError", "SqlSession", "rows_schema", "statement"]

T = TypeVar("T")

TABLES = 3
ROWS = ("rows0", "rows1")
"""Tables of rows by key; row numbers are unique, keys are not, so reading all rows of a key is a predicate read."""
MAX_MESSAGE_BYTES = 64 << 20
"""Limit of one server message. The longest are rows with lists of some kilobytes."""


class SqlError(OSError):
    """An error that the server returned. `code` is an SQLSTATE, or the server's own error number."""

    def __init__(self, code: str, said: str) -> None:
        super().__init__(f"{code} {said}")
        self.code = code


class SqlSession(abc.ABC):
    """A connection: one statement at a time, values as text."""

    changed: int
    """Rows that the last statement changed, as far as the server reports them."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams

    @abc.abstractmethod
    async def query(self, statement: str) -> list[list[Any]]:
        """Run a statement and return its rows. Raises SqlError, OSError, EOFError."""

    @abc.abstractmethod
    def is_definite(self, error: SqlError) -> bool:
        """Whether the statement and its transaction certainly had, and will have, no effect."""

    async def change(self, statement: str) -> list[list[Any]]:
        """Like `query`, but raises Refused if the statement certainly had no effect."""
        try:
            return await self.query(statement)
        except SqlError as error:
            if self.is_definite(error):
                raise Refused(str(error)) from None
            raise


def statement(kind: str, key: int, value: Any, upsert: str) -> str:
    """An upsert of a key: `w` writes a value, `append` appends it to a list, `add` adds it to a number. `upsert` is the
    dialect's clause, up to the column."""
    table = f"t{key % TABLES}"
    first, then = {
        "w": (value, f"'{value}'"),
        "append": (f"[{value}", f"CONCAT({table}.v, ',{value}')"),
        "add": (value, f"CONCAT(CAST({table}.v AS DECIMAL(20, 0)) + {value}, '')"),
    }[kind]
    return f"INSERT INTO {table} VALUES ({key}, '{first}') {upsert} v = {then}"


def rows_schema(database: str = "") -> list[str]:
    """Statements that create the tables of `ROWS`, with a database prefix ("name.") if one is needed."""
    return [
        made
        for table in ROWS
        for made in (
            f"CREATE TABLE IF NOT EXISTS {database}{table} (n int PRIMARY KEY, k int)",
            f"CREATE INDEX IF NOT EXISTS {table}_k ON {database}{table} (k)",
        )
    ]


async def _found(session: SqlSession, key: int) -> Any:
    rows = await session.query(f"SELECT v FROM t{key % TABLES} WHERE k = {key}")
    if not rows:
        return None
    value: str = rows[0][0]
    return json.loads(value + "]" if value.startswith("[") else value)


class SqlClient(Client):
    """A client with connections `session` for writes and `reader` for reads, set by `open`."""

    upsert: ClassVar[str]
    """The dialect's ON CONFLICT clause."""
    session: SqlSession
    reader: SqlSession

    async def read(self, key: int) -> Any:
        return await _found(self.reader, key)

    async def write(self, key: int, value: Any) -> None:
        await self.session.change(statement("w", key, json.dumps(value), self.upsert))

    async def cas(self, key: int, old: Any, new: Any) -> bool:
        values = f"SET v = '{json.dumps(new)}' WHERE k = {key} AND v = '{json.dumps(old)}'"
        await self.session.change(f"UPDATE t{key % TABLES} {values}")
        return self.session.changed > 0

    async def add(self, value: int) -> None:
        await self.session.change(f"INSERT INTO elements VALUES ({value})")

    async def members(self) -> list[int]:
        return [int(value) for [value] in await self.reader.query("SELECT v FROM elements")]

    async def increment(self, by: int) -> None:
        await self.session.change(statement("add", 0, by, self.upsert))

    async def value(self) -> int:
        return await _found(self.reader, 0) or 0

    async def enqueue(self, value: Any) -> None:
        await self.session.change(f"INSERT INTO jobs (v) VALUES ('{json.dumps(value)}')")

    async def transact(self, steps: list[list[Any]]) -> list[list[Any]]:
        session = self.reader if all(step[0] == "r" for step in steps) else self.session

        async def work() -> list[list[Any]]:
            for step in steps:
                kind, key, value = step
                if kind == "r":
                    step[2] = await _found(session, key)
                else:
                    await session.query(statement(kind, key, value, self.upsert))
            return steps

        return await _committed(session, work)

    async def insert_if_absent(self, key: int, table: int, row: int) -> bool:
        async def work() -> bool:
            for each in ROWS:
                if await self.session.query(f"SELECT n FROM {each} WHERE k = {key}"):
                    return False
            await self.session.query(f"INSERT INTO {ROWS[table]} (n, k) VALUES ({row}, {key})")
            return True

        return await _committed(self.session, work)

    async def rows(self, key: int) -> list[int]:
        found = await self.session.query(" UNION ALL ".join(f"SELECT n FROM {each} WHERE k = {key}" for each in ROWS))
        return [int(row) for [row] in found]


async def _committed(session: SqlSession, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` as one transaction and return its result. Raises Refused if it certainly did not commit; SqlError,
    OSError or EOFError if the outcome is unknown."""
    try:
        await session.query("BEGIN")
        result = await work()
    except (OSError, EOFError) as error:  # without a COMMIT it cannot commit
        is_over = isinstance(error, SqlError) and await _rolled_back(session)
        raise Refused(f"not committed: {error}", reopen=not is_over) from None
    try:
        await session.change("COMMIT")
    except Refused as refused:  # a server that rejects everything (1047) keeps the transaction, and BEGIN commits it
        refused.reopen = not await _rolled_back(session)
        raise
    return result


async def _rolled_back(session: SqlSession) -> bool:
    """Roll back; returns whether the server confirmed it, so that no transaction is open."""
    with contextlib.suppress(OSError, EOFError):
        return await session.query("ROLLBACK") == []
    return False
