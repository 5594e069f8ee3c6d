"""Snapshot files: which are kept, which are found again, and that damage is always detected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger import DLedgerConfig
from node.dledger.document import encode_document
from node.dledger.snapshot import DamagedSnapshot, Snapshot, SnapshotFiles, decode_snapshot, encode_snapshot

SNAPSHOTS = st.builds(
    Snapshot,
    index=st.integers(0, 1 << 62),
    term=st.integers(0, 1 << 62),
    files=st.dictionaries(st.text(min_size=1, max_size=20), st.binary(max_size=200), max_size=4),
    members_index=st.integers(-1, 1 << 62),
    members=st.dictionaries(st.text(max_size=5), st.text(min_size=1, max_size=20), max_size=4),
)


def snapshot(index: int = 7, term: int = 2, **files: bytes) -> Snapshot:
    return Snapshot(index=index, term=term, files=files or {"a": b"one", "b": b""})


@given(SNAPSHOTS)
def test_round_trip(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


@given(SNAPSHOTS, st.data())
def test_any_damage_is_detected(snapshot: Snapshot, data: Any) -> None:
    whole = encode_snapshot(snapshot)
    kind = data.draw(st.sampled_from(("flip", "cut", "more")))
    if kind == "flip":
        at = data.draw(st.integers(0, len(whole) * 8 - 1))
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
    elif kind == "cut":
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        damaged = bytearray(whole + data.draw(st.binary(min_size=1, max_size=9)))
    try:
        found = decode_snapshot(bytes(damaged))
    except DamagedSnapshot:
        return
    assert found == snapshot, "undetected damage may only change the letter case of a CRC"


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedSnapshot):
        decode_snapshot(data)


HEAD = {"last_included_index": 3, "last_included_term": 1, "members_index": -1, "members": {}, "files": []}


@pytest.mark.parametrize(
    "changed",
    [
        {"last_included_index": -1}, {"last_included_term": -1}, {"last_included_index": "3"}, {"members_index": -2},
        {"last_included_index": 1 << 63}, {"last_included_index": True}, {"members": []}, {"members": {"n1": 3}},
        {"members": None}, {"files": {}}, {"files": [["a"]]}, {"files": [["a", -1, 0]]}, {"files": [["", 0, 0]]},
        {"files": [["a", 0, 0], ["a", 0, 0]]}, {"files": [["a", 0, 0]] * 2000}, {"files": [["a", 1 << 40, 0]]},
    ],
)  # fmt: skip
def test_an_invalid_head_is_refused(changed: dict[str, Any]) -> None:
    assert decode_snapshot(encode_document(HEAD)).index == 3
    with pytest.raises(DamagedSnapshot):
        decode_snapshot(encode_document(HEAD | changed))


def test_a_snapshot_above_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.dledger.snapshot.MAX_SNAPSHOT_BYTES", 1000)
    with pytest.raises(ValueError, match="1000 are possible"):
        encode_snapshot(snapshot(a=b"x" * 1001))


@pytest.mark.parametrize("key", ["snapshots_kept", "snapshot_threshold_entries", "snapshot_log_kept_entries"])
def test_a_snapshot_option_below_its_minimum_is_refused(key: str) -> None:
    options: dict[str, Any] = {"group": "g", "self_id": "n1", "peers": {"n1": "a"}, "listen": "a", "data_dir": "/d"}
    options[key] = 0 if key == "snapshots_kept" else -1
    with pytest.raises(ValueError, match=f"{key} is below"):
        DLedgerConfig(**options)


def files_of(bench: Any, kept: int = 3) -> SnapshotFiles:
    return SnapshotFiles(bench.runtime.disk, "/data/dledger/snapshot", kept=kept)


async def save(bench: Any, files: SnapshotFiles, *snapshots: Snapshot) -> None:
    for each in snapshots:
        await bench.run("n1", lambda each=each: files.save(each, encode_snapshot(each)))


def indices(files: SnapshotFiles) -> list[int]:
    return [each.index for each, _ in files.readable()]


def test_only_the_newest_snapshots_are_kept(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        files = files_of(bench)
        await save(bench, files, *[snapshot(index) for index in (10, 200, 1000, 3000, 20)])
        assert indices(files) == [3000, 1000, 200]
        assert bench.on("n1", lambda: next(iter(files.readable())))[0] == snapshot(3000)

    bench(scenario)


def test_a_damaged_snapshot_is_skipped_and_removed_by_the_next_save(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        files = files_of(bench)
        await save(bench, files, snapshot(10), snapshot(20), snapshot(30))
        bench.disk.flip_bit(f"{files.directory}/{files.names()[-1]}", 20, 1)
        bench.disk.unlink(f"{files.directory}/{files.names()[0]}")
        assert indices(files) == [20] and files.damaged == [f"{files.directory}/{30:020d}-2"]
        await save(bench, files, snapshot(40))
        assert indices(files) == [40, 20] and files.damaged == [] and len(files.names()) == 2

    bench(scenario)


def test_a_snapshot_under_a_wrong_file_name_is_ignored(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        files = files_of(bench)
        await save(bench, files, snapshot(10))
        data = bench.runtime.disk.read_file(f"{files.directory}/{10:020d}-2")
        await bench.run("n1", lambda: bench.runtime.disk.write_file_atomic(f"{files.directory}/{11:020d}-2", data))
        assert indices(files) == [10]

    bench(scenario)


@pytest.mark.parametrize("end", ["kill", "power_fail"])
@pytest.mark.parametrize("step", range(12))
def test_an_interrupted_save_leaves_the_old_snapshot_or_the_new_one(bench: Any, end: str, step: int) -> None:
    async def scenario(bench: Any) -> None:
        files = files_of(bench, kept=1)
        await save(bench, files, snapshot(10))
        new = snapshot(20, a=b"x" * 5000)
        bench.on("n1", lambda: asyncio.get_running_loop().create_task(files.save(new, encode_snapshot(new))))
        await asyncio.sleep(0.0003 * step)
        getattr(bench, end)()
        found = indices(files_of(bench))
        assert found in ([10], [20], [20, 10])

    bench(scenario)


def test_confirm_makes_a_snapshot_durable_whose_file_name_was_not_synced(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        files = files_of(bench)
        await save(bench, files, snapshot(10))
        path = f"{files.directory}/{20:020d}-2"
        await bench.killed_before_the_name_is_synced(path, lambda: save(bench, files, snapshot(20)))
        files = files_of(bench)
        await bench.run("n1", files.confirm)
        assert indices(files) == [20, 10]
        bench.power_fail()
        assert indices(files_of(bench)) == [20, 10]

    for seed in range(10):
        bench(scenario, seed=seed)
