"""The plug-in of PostgreSQL: its protocol against a fake server, its configuration, its installation."""

from __future__ import annotations

import asyncio
import io
import lzma
import tarfile
import zipfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.sdk import Host, Refused
from harness.sdk.install import find_file
from harness.systems import postgres
from harness.systems.planned_hosts import PlannedHosts
from harness.systems.postgres import Archive, PostgresClient, Session, opened, values_of
from harness.systems.sql import SqlError, statement
from tests.harness.systems.served import over_a_connection

READY = b"Z\0\0\0\5I"


def message(kind: bytes, content: bytes) -> bytes:
    return kind + (len(content) + 4).to_bytes(4, "big") + content


def row(*values: bytes | None) -> bytes:
    packed = (b"\xff\xff\xff\xff" if value is None else len(value).to_bytes(4, "big") + value for value in values)
    return message(b"D", len(values).to_bytes(2, "big") + b"".join(packed))


def error(code: bytes, severity: bytes = b"ERROR") -> bytes:
    return message(b"E", b"S" + severity + b"\0C" + code + b"\0Mno such luck\0\0")


def with_server(
    answers: Sequence[bytes | None], scenario: Callable[[Session], Awaitable[Any]]
) -> tuple[Any, list[str]]:
    """The result of `scenario` with a server that gives these answers, one per statement (None: it closes), and the
    statements."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        assert (await reader.readexactly(size - 4))[:4] == (196608).to_bytes(4, "big")
        writer.write(message(b"R", bytes(4)) + message(b"S", b"a\0b\0") + READY)
        for answer in answers:
            assert await reader.readexactly(1) == b"Q"
            size = int.from_bytes(await reader.readexactly(4), "big")
            asked.append((await reader.readexactly(size - 4)).rstrip(b"\0").decode())
            if answer is None:
                break
            writer.write(answer)
        writer.close()

    return over_a_connection(serve, opened, scenario), asked


def test_values_of_a_row_are_decoded_as_text_or_none() -> None:
    assert values_of(row(b"7", None, b"")[5:]) == ["7", None, ""]


def test_a_statement_returns_its_rows_and_an_error_is_raised_once_the_server_is_ready() -> None:
    async def scenario(session: Session) -> Any:
        rows = await session.query("SELECT 1")
        with pytest.raises(SqlError, match="42P01 no such luck"):
            await session.query("SELECT 2")
        return rows, await session.query("SELECT 3")

    answers = [row(b"1") + row(b"2") + READY, error(b"42P01") + READY, READY]
    found, asked = with_server(answers, scenario)
    assert found == ([["1"], ["2"]], []) and asked == ["SELECT 1", "SELECT 2", "SELECT 3"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error(b"40001") + READY, Refused),
        (error(b"23505") + READY, Refused),
        (error(b"40003") + READY, SqlError),
        (error(b"58030") + READY, SqlError),
        (error(b"57P01", b"FATAL"), SqlError),
        (None, EOFError),
    ],
)
def test_only_errors_that_rule_out_the_change_are_refusals(answer: bytes | None, expected: type[Exception]) -> None:
    async def scenario(session: Session) -> Any:
        with pytest.raises((Refused, SqlError, EOFError)) as caught:
            await session.change("COMMIT")
        return caught.type

    found, _ = with_server([answer], scenario)
    assert issubclass(found, expected)


def transacting(answers: Sequence[bytes | None], steps: list[list[Any]]) -> tuple[Any, list[str]]:
    """What `transact` returned or raised, and the statements."""

    async def scenario(session: Session) -> Any:
        client = PostgresClient()
        client.session = client.reader = session
        try:
            return await client.transact(steps)
        except Exception as raised:
            return raised

    return with_server(answers, scenario)


def test_a_transaction_is_sent_step_by_step_and_committed() -> None:
    done, asked = transacting([READY, row(b"[1,2") + READY, READY, READY], [["r", 4, None], ["append", 4, 3]])
    assert done == [["r", 4, [1, 2]], ["append", 4, 3]]
    appended = statement("append", 4, 3, PostgresClient.upsert)
    assert asked == ["BEGIN", "SELECT v FROM t1 WHERE k = 4", appended, "COMMIT"]


def test_a_transaction_that_fails_before_its_commit_is_refused() -> None:
    steps = [["append", 4, 3]]
    refused, asked = transacting([READY, error(b"40001") + READY, READY], steps)
    assert isinstance(refused, Refused) and not refused.reopen and asked[-1] == "ROLLBACK"
    for answers in ([READY, None], [READY, error(b"57P01", b"FATAL")], [None]):
        refused, asked = transacting(answers, steps)
        assert isinstance(refused, Refused) and refused.reopen, (answers, refused)
        assert "COMMIT" not in asked


def test_a_commit_without_an_answer_leaves_the_outcome_unknown() -> None:
    lost, asked = transacting([READY, READY, None], [["append", 4, 3]])
    assert not isinstance(lost, Refused) and isinstance(lost, EOFError) and asked[-1] == "COMMIT"


def inserting(answers: Sequence[bytes | None]) -> tuple[Any, list[str]]:
    """What `insert_if_absent` returned or raised, and the statements."""

    async def scenario(session: Session) -> Any:
        client = PostgresClient()
        client.session = session
        try:
            return await client.insert_if_absent(4, 1, 9)
        except Exception as raised:
            return raised

    return with_server(answers, scenario)


def test_a_row_is_inserted_only_if_no_table_has_one_of_the_same_key() -> None:
    looks = [f"SELECT n FROM rows{number} WHERE k = 4" for number in range(2)]
    insert = "INSERT INTO rows1 (n, k) VALUES (9, 4)"
    assert inserting([READY] * 5) == (True, ["BEGIN", *looks, insert, "COMMIT"])
    assert inserting([READY, READY, row(b"8") + READY, READY]) == (False, ["BEGIN", *looks, "COMMIT"])
    assert inserting([READY, row(b"8") + READY, READY]) == (False, ["BEGIN", looks[0], "COMMIT"])


def test_the_outcome_of_an_insert_is_unknown_only_once_its_commit_was_sent() -> None:
    refused, asked = inserting([*[READY] * 3, error(b"40001") + READY, READY])
    assert isinstance(refused, Refused) and not refused.reopen and asked[-1] == "ROLLBACK"
    refused, _ = inserting([*[READY] * 4, error(b"40001") + READY])
    assert isinstance(refused, Refused)
    lost, asked = inserting([*[READY] * 4, None])
    assert isinstance(lost, EOFError) and asked[-1] == "COMMIT"


def test_the_rows_of_a_key_are_read_from_both_tables_in_one_statement() -> None:
    async def scenario(session: Session) -> Any:
        client = PostgresClient()
        client.session = session
        return await client.rows(4)

    found, asked = with_server([row(b"8") + row(b"9") + READY], scenario)
    assert found == [8, 9]
    assert asked == ["SELECT n FROM rows0 WHERE k = 4 UNION ALL SELECT n FROM rows1 WHERE k = 4"]


def test_a_compare_and_set_succeeds_if_it_changed_a_row() -> None:
    async def scenario(session: Session) -> Any:
        client = PostgresClient()
        client.session = session
        return [await client.cas(4, 1, 2) for _ in range(2)]

    answers = [message(b"C", b"UPDATE 1\0") + READY, message(b"C", b"UPDATE 0\0") + READY]
    assert with_server(answers, scenario) == ([True, False], ["UPDATE t1 SET v = '2' WHERE k = 4 AND v = '1'"] * 2)


def test_the_archive_in_the_jar_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        program = tarfile.TarInfo("bin/postgres")
        program.size, program.mode = 4, 0o755
        archive.addfile(program, io.BytesIO(b"\x7fELF"))

    class Fetched:
        def fetch(self, directory: str) -> None:
            Path(directory, "lib").mkdir()
            with zipfile.ZipFile(Path(directory, "lib", "x.jar"), "w") as jar:
                jar.writestr("postgres-linux-x86_64.txz", lzma.compress(tar.getvalue()))

    monkeypatch.setattr(postgres, "maven", lambda *what: Fetched())
    Archive(("group:artifact:1",)).fetch(str(tmp_path))
    assert find_file(str(tmp_path), "postgres", []) == str(tmp_path / "bin" / "postgres")
    assert not list(tmp_path.glob("lib/*.jar"))


def test_standbys_follow_the_first_host_and_use_repeatable_read() -> None:
    system = postgres.Postgres()
    cluster: Any = PlannedHosts(())
    system.hosts = [Host(f"n{n}", n, cluster, {"client": 5432}, lambda host, name: name) for n in (1, 2)]
    system.settings = {"isolation": "serializable", "synchronous_commit": "off"}
    first, second = (system.files(host)["server.conf"] for host in system.hosts)
    assert "default_transaction_isolation = 'serializable'" in first and "primary_conninfo" not in first
    assert "default_transaction_isolation = 'repeatable read'" in second
    assert "host=127.0.0.1 port=5432 user=postgres application_name=n2" in second
    assert "synchronous_commit = off" in first
