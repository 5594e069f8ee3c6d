"""Statements for databases of any dialect."""

from __future__ import annotations

from harness.systems.sql import TABLES, statement

UPSERT = "ON CONFLICT (k) DO UPDATE SET"


def test_keys_are_spread_over_all_tables() -> None:
    found = {statement("w", key, 1, UPSERT).split()[2] for key in range(5)}
    assert found == {f"t{number}" for number in range(TABLES)}


def test_a_change_inserts_a_new_key_and_updates_an_existing_one() -> None:
    assert statement("w", 5, 7, UPSERT) == f"INSERT INTO t2 VALUES (5, '7') {UPSERT} v = '7'"
    assert statement("append", 5, 7, UPSERT) == f"INSERT INTO t2 VALUES (5, '[7') {UPSERT} v = CONCAT(t2.v, ',7')"
    assert statement("add", 5, -2, UPSERT).endswith("v = CONCAT(CAST(t2.v AS DECIMAL(20, 0)) + -2, '')")
