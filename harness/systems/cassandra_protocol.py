"""The part of Cassandra's native protocol (version 4) that a client of the harness needs: one statement at a time.

Nothing is retried and nothing is prepared, so each operation is one request to one coordinator and has its outcome. The
timestamp of a write is that of the coordinator's clock. Messages are described in native_protocol_v4.spec of the
repository apache/cassandra.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from harness.sdk import Refused, Streams
from harness.systems.answer_fields import FieldReader

__all__ = ["INVALID", "CqlError", "Session", "opened"]

MAX_FRAME_BYTES = 16 << 20
"""Limit of one answer: the members of a set of some hundred thousand."""

REQUEST_VERSION, ANSWER_VERSION = 0x04, 0x84
HEADER = struct.Struct(">BBhBi")
"""Before each message: version, flags, number of the stream, type, length."""

ERROR, STARTUP, READY, QUERY, RESULT = 0x00, 0x01, 0x02, 0x07, 0x08
"""Types of messages."""

LEVELS = {"ONE": 1, "QUORUM": 4, "ALL": 5, "SERIAL": 8}
"""Consistency levels. A transaction's own, for its Paxos rounds, is SERIAL unless the request says otherwise."""

UNAVAILABLE, SYNTAX, UNAUTHORIZED, INVALID = 0x1000, 0x2000, 0x2100, 0x2200
ROWS = 2
"""Kind of a result that has rows."""

GLOBAL_TABLE, MORE_PAGES, NO_METADATA = 1, 2, 4
"""Flags of rows: all columns are of one table, there are further pages, the columns are not described."""

BIGINT, BOOLEAN, COUNTER, INT = 0x02, 0x04, 0x05, 0x09
"""Types of columns."""
NUMBERS = frozenset({BIGINT, COUNTER, INT})

Row = list[int | None]


class CqlError(OSError):
    """A coordinator answered with an error. A write may have taken effect."""

    def __init__(self, code: int, message: str, level: int | None = None) -> None:
        super().__init__(f"error 0x{code:04x}: {message}")
        self.code = code
        self.level = level
        """The consistency level for which there were too few replicas (UNAVAILABLE)."""


class Reader(FieldReader):
    """Strings and values as Cassandra encodes them."""

    def text(self) -> str:
        return self.take(self.number("H")).decode()

    def data(self) -> bytes | None:
        size = self.number("i")
        return None if size < 0 else self.take(size)


class Session:
    """A connection to a coordinator. Use `opened`."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams

    async def ask(self, kind: int, body: bytes) -> tuple[int, Reader]:
        """Send a request; returns the type of its answer, and the answer. Raises CqlError, EOFError, OSError."""
        self.writer.write(HEADER.pack(REQUEST_VERSION, 0, 0, kind, len(body)) + body)
        version, flags, stream, answer, size = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        if (version, stream) != (ANSWER_VERSION, 0) or not 0 <= size <= MAX_FRAME_BYTES:
            raise OSError(f"an answer of version {version:#x} on stream {stream} with {size} bytes")
        reader = Reader(await self.reader.readexactly(size))
        if flags & 0x08:  # warnings come before the answer itself
            for _ in range(reader.number("H")):
                reader.text()
        if answer == ERROR:
            code, message = reader.number("i"), reader.text()
            raise CqlError(code, message, reader.number("H") if code == UNAVAILABLE else None)
        return answer, reader

    async def query(self, statement: str, level: str) -> Sequence[Row]:
        """Perform a statement; returns its rows. Raises CqlError, EOFError, OSError, ValueError."""
        text = statement.encode()
        body = struct.pack(">i", len(text)) + text + struct.pack(">HB", LEVELS[level], 0)
        kind, reader = await self.ask(QUERY, body)
        if kind != RESULT:
            raise OSError(f"an answer of type {kind} to a statement")
        return rows_of(reader) if reader.number("i") == ROWS else []

    async def change(self, statement: str, level: str) -> Sequence[Row]:
        """Perform a statement that writes. Raises Refused if nothing was sent to any replica."""
        try:
            return await self.query(statement, level)
        except CqlError as error:
            if is_definite(error, is_transaction=False):
                raise Refused(str(error)) from None
            raise

    async def apply(self, statement: str) -> bool:
        """Perform a lightweight transaction; returns whether its condition was met. Raises Refused if it was proposed
        to no replica."""
        try:
            rows = await self.query(statement, "QUORUM")
        except CqlError as error:
            if is_definite(error, is_transaction=True):
                raise Refused(str(error)) from None
            raise
        return bool(rows[0][0])


def is_definite(error: CqlError, *, is_transaction: bool) -> bool:
    """Whether a write certainly did not happen after this error.

    A coordinator counts the live replicas before it sends a plain write. A transaction counts them before each round of
    Paxos, for SERIAL, and again before the commit of what was accepted, for the level of the write: only the first is
    definite. (A proposal that some replica may have accepted ends with a timeout or "unknown", never with a new round.)
    "Overloaded" is not definite: some replicas may have been sent the write.
    """
    if error.code == UNAVAILABLE:
        return not is_transaction or error.level == LEVELS["SERIAL"]
    return error.code in (SYNTAX, UNAUTHORIZED, INVALID)


def rows_of(reader: Reader) -> list[Row]:
    """The values of the rows of a result. Raises ValueError for what no table or request here has."""
    flags, columns = reader.number("i"), reader.number("i")
    if flags & (MORE_PAGES | NO_METADATA):
        raise ValueError(f"rows with flags {flags}")
    if flags & GLOBAL_TABLE:
        reader.text(), reader.text()
    kinds = []
    for _ in range(columns):
        if not flags & GLOBAL_TABLE:
            reader.text(), reader.text()
        reader.text()
        kinds.append(reader.number("H"))
    return [[value_of(kind, reader.data()) for kind in kinds] for _ in range(reader.number("i"))]


def value_of(kind: int, data: bytes | None) -> int | None:
    """The value of a column. Raises ValueError for a type that no table here has."""
    if kind not in NUMBERS and kind != BOOLEAN:
        raise ValueError(f"a column of type {kind}")
    if data is None:
        return None
    return data != b"\0" if kind == BOOLEAN else int.from_bytes(data, "big", signed=True)


async def opened(streams: Streams) -> Session:
    """A session on a connection. Raises Refused if the coordinator does not accept it: nothing was asked yet."""
    session = Session(streams)
    options = {"CQL_VERSION": "3.0.0"}
    pairs = b"".join(struct.pack(">H", len(each)) + each.encode() for pair in options.items() for each in pair)
    kind, _ = await session.ask(STARTUP, struct.pack(">H", len(options)) + pairs)
    if kind != READY:
        raise Refused(f"an answer of type {kind} to the start", reopen=True)
    return session
