"""Tables in files: every flipped bit is detected, and the predecessor is used instead."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.real_runtime import real_runtime
from node.store.table_file import TableDamaged, decode_table, encode_table, read_table, write_table

TABLE = {"offsetTable": {"t@g": {"0": 17, "1": 170}}, "dataVersion": {"counter": 3}}
DISK = real_runtime(1).disk


def write(path: Path, table: dict[str, Any]) -> None:
    asyncio.run(write_table(DISK, str(path), table))


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.dictionaries(st.text(), st.integers()), min_size=1))
def test_an_encoded_table_decodes_to_itself(table: dict[str, Any]) -> None:
    table.pop("crc32", None)
    if table:
        assert decode_table(encode_table(table)) == table


def test_an_unreadable_table_is_an_error_and_not_replaced_by_its_predecessor(disk: Any) -> None:
    """The next read may succeed; a later write replaces the table in any case."""
    for number in (1, 2):
        asyncio.run(write_table(disk, "/t", {"n": number}))
    disk.bad_paths.add("/t")
    with pytest.raises(OSError, match="Input/output error"):
        read_table(disk, "/t")
    asyncio.run(write_table(disk, "/t", {"n": 3}))
    disk.bad_paths.discard("/t")
    assert read_table(disk, "/t") == {"n": 3}


def test_no_flipped_bit_gives_another_table() -> None:
    data = encode_table(TABLE)
    detected = 0
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                assert decode_table(bytes(damaged)).items() >= TABLE.items(), (at, bit)
            except TableDamaged:
                detected += 1
    assert detected >= 8 * (len(data) - len(b',"crc32":"00000000"}')), "only flips in the checksum's name may pass"


def test_a_table_of_rocketmq_without_a_checksum_is_accepted() -> None:
    assert decode_table(json.dumps(TABLE, indent=2).encode()) == TABLE


@pytest.mark.parametrize("damage", ["flip", "cut", "zero", "empty", "gone", "list"])
def test_a_damaged_table_is_replaced_by_its_predecessor(tmp_path: Path, damage: str, caplog: Any) -> None:
    path = tmp_path / "table.json"
    write(path, {"n": 1})
    assert not (tmp_path / "table.json.bak").exists()
    write(path, {"n": 2})
    write(path, {"n": 2})
    assert read_table(DISK, str(path)) == {"n": 2}
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "flip": data.replace(b"2,", b"3,"),
                "cut": data[:-1],
                "zero": bytes(len(data)),
                "empty": b"",
                "list": b"[]",
            }[damage]
        )
    assert read_table(DISK, str(path)) == {"n": 1}
    assert "going on with its predecessor" in caplog.text
    write(path, {"n": 3})
    assert read_table(DISK, str(path)) == {"n": 3}
    assert decode_table((tmp_path / "table.json.bak").read_bytes()) == {"n": 1}, (
        "a damaged table must not become the predecessor"
    )


def test_damage_without_an_intact_predecessor_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert read_table(DISK, str(path)) is None
    path.write_bytes(b"{")
    with pytest.raises(TableDamaged, match="restore it, or remove it to start empty"):
        read_table(DISK, str(path))
    (tmp_path / "table.json.bak").write_bytes(b"{")
    with pytest.raises(TableDamaged, match=r"and so is .*table\.json\.bak"):
        read_table(DISK, str(path))
