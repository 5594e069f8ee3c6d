"""Statements for databases of any dialect."""

from __future__ import annotations

from harness.systems.sql import TABLES, statement

UPSERT = "ON CONFLICT (k) DO UPDATE SET"


def test_keys_lie_in_several_tables() -> None:
    found = {statement("w", key, 1, UPSERT).split()[2] for key in range(5)}
    assert found == {f"t{number}" for number in range(TABLES)}


def test_a_change_says_what_it_is_where_the_key_is_new_and_where_it_is_not() -> None:
    assert statement("w", 5, 7, UPSERT) == f"INSERT INTO t2 VALUES (5, '7') {UPSERT} v = '7'"
    assert statement("append", 5, 7, UPSERT) == f"INSERT INTO t2 VALUES (5, '[7') {UPSERT} v = CONCAT(t2.v, ',7')"
    assert statement("add", 5, -2, UPSERT).endswith("v = CONCAT(CAST(t2.v AS DECIMAL(20, 0)) + -2, '')")
