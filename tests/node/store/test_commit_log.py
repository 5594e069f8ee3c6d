"""The classic commit log: roll-over, flushing, recovery after every kind of end, a busy and a failing disk."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import struct
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.real_runtime import real_runtime
from node.store import commit_log as module
from node.store.commit_log import DEFAULT_FLUSH, CommitLog, FlushPolicy, LogDamaged, LogRefuses, NotYetDurable
from node.store.flushing import settle
from node.store.record import Message
from node.store.record_batch import batch_of_one, encode_record

SEGMENT = 400


def new_log(
    directory: Path,
    *,
    disk: Any = None,
    mode: str = "sync",
    segment: int = SEGMENT,
    flush: FlushPolicy = DEFAULT_FLUSH,
) -> CommitLog:
    return CommitLog(
        disk or real_runtime(1).disk,
        str(directory),
        segment_size_bytes=segment,
        flush_mode=mode,
        flush=flush,
        on_progress=lambda: None,
    )


def put(log: CommitLog, body: bytes, number: int = 0) -> tuple[int, asyncio.Future[None]]:
    batch = batch_of_one(topic="t", queue_id=0, body=body)
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    (position,) = log.append_batch(
        batch.sizes(),
        lambda positions: batch.records(positions, queue_offset=number, store_timestamp_ms=1000 + number),
        partial(settle, stored),
    )
    return position, stored


def independent_parse(directory: Path, segment: int = SEGMENT) -> list[tuple[int, bytes]]:
    """Positions and bodies, read with nothing but the description of the format."""
    found = []
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at + 8 <= len(data):
            total, magic = struct.unpack_from(">II", data, at)
            if magic == 0xCBD43194:
                assert at + total == segment
                break
            assert magic == 0xDAA320A7
            position = struct.unpack_from(">q", data, at + 28)[0]
            assert position == int(path.name) + at
            size = struct.unpack_from(">i", data, at + 84)[0]
            found.append((position, data[at + 88 : at + 88 + size]))
            at += total
    return found


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@pytest.mark.mechanism("MappedFile, 1 GB (R), named by 20-digit offset")
@pytest.mark.mechanism(
    "END_OF_FILE: msgLen+8>space ⇒ BLANK record, retry in new file; CREATE_MAPEDFILE_FAILED otherwise"
)
def test_no_record_straddles_two_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = new_log(tmp_path)
        await log.open(durable_position=0, is_clean=False)
        # 91 + 1 + body: 300 leaves 100, of which a record of 92 would leave exactly 8
        sizes = [208, 0, 200, 8, 1, 300, 0, 100, 0]
        placed = [put(log, bytes([65 + number]) * size, number) for number, size in enumerate(sizes)]
        await asyncio.gather(*(stored for _, stored in placed))
        assert log.synced_position == log.end_position == log.committed_position
        await log.close()
        bodies = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
        assert independent_parse(tmp_path) == [(at, body) for (at, _), body in zip(placed, bodies, strict=True)]
        assert placed[1][0] == 300, "a record that leaves room for a blank's head stays"
        assert sorted(path.name for path in tmp_path.iterdir())[:2] == ["0" * 20, f"{SEGMENT:020d}"]
        with pytest.raises(LogRefuses, match="closing"):
            put(log, b"x")

    run(scenario)


def test_a_record_that_fits_into_no_file_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = new_log(tmp_path)
        await log.open(durable_position=0, is_clean=False)
        with pytest.raises(LogRefuses, match="does not fit"):
            put(log, b"x" * (SEGMENT - 92 - 7))
        await put(log, b"x" * (SEGMENT - 92 - 8))[1]
        await log.close()

    run(scenario)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 290), min_size=1, max_size=12),
    synced=st.integers(0, 12),
    cut=st.integers(0, 3000),
    damage=st.sampled_from(["cut", "zero", "flip"]),
)
def test_recovery_keeps_the_whole_records_before_the_first_broken_one(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], synced: int, cut: int, damage: str
) -> None:
    directory = tmp_path_factory.mktemp("log")
    positions: list[int] = []

    async def write() -> int:
        log = new_log(directory)
        await log.open(durable_position=0, is_clean=False)
        ends = [0]
        for number, size in enumerate(sizes):
            at, stored = put(log, bytes([number]) * size, number)
            await stored
            positions.append(at)
            ends.append(log.end_position)
        await log.close()
        return ends[min(synced, len(sizes))]

    durable = asyncio.run(write())
    paths = sorted(directory.iterdir())
    whole = sum(path.stat().st_size for path in paths)
    cut = min(max(cut, durable), whole)
    for path in paths:
        base = int(path.name)
        at = max(cut - base, 0)
        if at >= path.stat().st_size:
            continue
        if damage == "cut":
            if at:
                os.truncate(path, at)
            else:
                path.unlink()
        elif base <= cut:
            data = bytearray(path.read_bytes())
            data[at] = data[at] ^ 0x10 if damage == "flip" else 0
            path.write_bytes(data)

    async def recover() -> list[bytes]:
        log = new_log(directory)
        await log.open(durable_position=durable, is_clean=False)
        at, stored = put(log, b"new", 99)
        await stored
        await log.close()
        return [body for position, body in independent_parse(directory) if position < at]

    bodies = asyncio.run(recover())
    assert bodies == [bytes([number]) * size for number, size in enumerate(sizes)][: len(bodies)]
    ends = [*positions[1:], whole]
    untouched = sum(1 for end in ends if end <= cut)
    assert len(bodies) >= untouched, "a whole record before the damage was lost"
    shutil.rmtree(directory)


def test_a_log_that_lacks_durable_bytes_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = new_log(tmp_path)
        await log.open(durable_position=0, is_clean=False)
        await put(log, b"x" * 50)[1]
        end = log.end_position
        await log.close()
        os.truncate(tmp_path / ("0" * 20), end - 1)
        with pytest.raises(LogDamaged, match=r"0{20}.*1 bytes of the log that were durable are missing"):
            await new_log(tmp_path).open(durable_position=end, is_clean=True)

    run(scenario)


class SlowDisk:
    """The real disk, whose writes and syncs wait for `gate` and fail with `error` when that is set."""

    def __init__(self) -> None:
        self._disk = real_runtime(1).disk
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    async def create(self, path: str) -> Any:
        return SlowFile(await self._disk.create(path), self)


class SlowFile:
    def __init__(self, file: Any, disk: SlowDisk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def write(self, offset: int, data: bytes, *, sync: bool = False) -> None:
        await self._disk.gate.wait()
        if self._disk.error is not None:
            raise self._disk.error
        self._disk.syncs += sync
        await self._file.write(offset, data, sync=sync)

    async def sync(self) -> None:
        await self._disk.gate.wait()
        self._disk.syncs += 1
        await self._file.sync()


@pytest.mark.mechanism("Sync flush GroupCommit: swapped queues, batch, two tries, 10 ms wait")
def test_one_sync_serves_a_whole_group(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = SlowDisk()
        log = new_log(tmp_path, disk=disk, segment=1 << 20)
        await log.open(durable_position=0, is_clean=False)
        first = put(log, b"first")[1]
        await asyncio.sleep(0)
        await first
        disk.gate.clear()
        group = [put(log, b"%d" % number)[1] for number in range(500)]
        before = disk.syncs
        disk.gate.set()
        await asyncio.gather(*group)
        assert 1 <= disk.syncs - before <= 3
        await log.close()

    run(scenario)


@pytest.mark.mechanism("OS page cache busy")
@pytest.mark.mechanism("Sync flush GroupCommit: swapped queues, batch, two tries, 10 ms wait")
def test_a_stalled_sync_fails_waiting_appends_and_refuses_new_ones_as_busy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "BUSY_S", 0.05)

    async def scenario() -> None:
        disk = SlowDisk()
        log = new_log(tmp_path, disk=disk)
        await log.open(durable_position=0, is_clean=False)
        disk.gate.clear()
        stored = put(log, b"late")[1]
        with pytest.raises(NotYetDurable):
            await asyncio.wait_for(stored, 5)
        await asyncio.sleep(0.02)
        with pytest.raises(LogRefuses, match="busy"):
            put(log, b"x")
        disk.gate.set()
        deadline = asyncio.get_running_loop().time() + 5
        while log.committed_position < log.end_position:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        await put(log, b"fine again")[1]
        await log.close()
        assert [body for _, body in independent_parse(tmp_path)] == [b"late", b"fine again"]

    run(scenario)


def test_appends_fail_while_the_disk_fails_and_succeed_once_it_recovers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)

    async def scenario() -> None:
        disk = SlowDisk()
        log = new_log(tmp_path, disk=disk)
        await log.open(durable_position=0, is_clean=False)
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(OSError, match="No space"):
            await put(log, b"kept")[1]
        with pytest.raises(LogRefuses, match="No space"):
            put(log, b"x")
        disk.error = None
        deadline = asyncio.get_running_loop().time() + 5
        while log.failure is not None:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        await put(log, b"next")[1]
        await log.close()
        assert [body for _, body in independent_parse(tmp_path)] == [b"kept", b"next"]

    run(scenario)


@pytest.mark.mechanism("Async FlushRealTime: 500 ms, ≥4 pages, thorough 10 s (R)")
@pytest.mark.parametrize("mode", ["sync", "async", "transient"])
def test_an_unexpected_error_does_not_end_writing(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)

    async def scenario() -> None:
        disk = SlowDisk()
        disk.error = RuntimeError("an error of its own")
        log = new_log(tmp_path, disk=disk, mode=mode)
        await log.open(durable_position=0, is_clean=False)
        stored = put(log, b"kept")[1]
        while "an error of its own" not in caplog.text:  # noqa: ASYNC110  # a log line sets no event
            await asyncio.sleep(0.005)
        assert stored.done() == (mode == "transient")
        disk.error = None
        await asyncio.wait_for(stored, 5)
        await asyncio.wait_for(put(log, b"next")[1], 5)
        await log.close()
        assert [body for _, body in independent_parse(tmp_path)] == [b"kept", b"next"]

    run(scenario)


def test_an_error_in_one_callback_does_not_block_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)

    def raises(error: Exception | None) -> None:
        raise RuntimeError("an error of its own")

    async def scenario() -> None:
        log = new_log(tmp_path)
        await log.open(durable_position=0, is_clean=False)
        log.append_batch((8,), lambda at: (b"12345678",), raises)
        position, stored = put(log, b"together with it")
        await asyncio.wait_for(stored, 5)
        assert log.synced_position == log.end_position > position
        await log.close()

    run(scenario)


def test_an_unexpected_error_does_not_end_the_asynchronous_flush(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)

    async def scenario() -> None:
        log = new_log(tmp_path, mode="async", flush=FlushPolicy(interval_ms=5, least_pages=0))
        await log.open(durable_position=0, is_clean=False)
        real, failures = log._segments.sync, iter([RuntimeError("an error of its own")])

        async def sync() -> None:
            for failure in failures:
                raise failure
            await real()

        monkeypatch.setattr(log._segments, "sync", sync)
        await put(log, b"one")[1]
        deadline = asyncio.get_running_loop().time() + 5
        while log.synced_position < log.end_position:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        assert "an error of its own" in caplog.text
        await log.close()

    run(scenario)


def test_an_asynchronous_flush_waits_for_the_interval_and_four_pages(tmp_path: Path) -> None:
    assert FlushPolicy(interval_ms=500, least_pages=4, thorough_interval_ms=10_000) == DEFAULT_FLUSH

    async def scenario() -> None:
        log = new_log(tmp_path, mode="async", segment=1 << 20, flush=FlushPolicy(interval_ms=20))
        await log.open(durable_position=0, is_clean=False)
        await put(log, b"little")[1]
        assert log.written_position == log.end_position > log.synced_position
        await asyncio.sleep(0.1)
        assert log.synced_position == 0, "less than four pages waits for the thorough flush"
        await put(log, b"x" * 20_000)[1]
        deadline = asyncio.get_running_loop().time() + 5
        while log.synced_position < log.end_position:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        await log.close()

    run(scenario)


@pytest.mark.mechanism("Async FlushRealTime: 500 ms, ≥4 pages, thorough 10 s (R)")
def test_the_thorough_flush_syncs_less_than_the_least_pages_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        flush = FlushPolicy(interval_ms=10, least_pages=1000, thorough_interval_ms=30)
        log = new_log(tmp_path, mode="async", segment=1 << 20, flush=flush)
        await log.open(durable_position=0, is_clean=False)
        await put(log, b"little")[1]
        deadline = asyncio.get_running_loop().time() + 5
        while log.synced_position < log.end_position:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        await log.close()

    run(scenario)


@pytest.mark.mechanism("CommitRealTime + transient pool")
def test_the_transient_buffer_is_written_after_its_append_is_acknowledged(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "COMMIT_INTERVAL_S", 0.05)

    async def scenario() -> None:
        log = new_log(tmp_path, mode="transient", segment=1 << 20)
        await log.open(durable_position=0, is_clean=False)
        at, stored = put(log, b"in memory")
        assert stored.done() and log.committed_position == log.end_position > log.written_position == 0
        assert log.record_at(at)[0].endswith(b"t\x00\x00")
        deadline = asyncio.get_running_loop().time() + 5
        while log.written_position < log.end_position:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        put(log, b"written by the orderly stop")
        await log.close()
        assert [body for _, body in independent_parse(tmp_path, 1 << 20)][1:] == [b"written by the orderly stop"]

    run(scenario)


@pytest.mark.mechanism("Orderly shutdown flush")
@pytest.mark.parametrize("mode", ["sync", "async", "transient"])
def test_closing_retries_once_what_the_disk_refused(tmp_path: Path, mode: str) -> None:
    """The disk recovers before the retry is due; in mode `transient` the append is already acknowledged."""

    async def scenario() -> None:
        disk = SlowDisk()
        log = new_log(tmp_path, disk=disk, mode=mode)
        await log.open(durable_position=0, is_clean=False)
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        put(log, b"refused at first")[1].add_done_callback(lambda stored: stored.exception())
        deadline = asyncio.get_running_loop().time() + 5
        while log.failure is None:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)
        disk.error = None
        await log.close()
        assert [body for _, body in independent_parse(tmp_path)] == [b"refused at first"]
        assert log.synced_position == log.end_position, "an orderly stop syncs the whole log"

    run(scenario)


def test_closing_ends_although_the_disk_still_refuses(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = SlowDisk()
        log = new_log(tmp_path, disk=disk)
        await log.open(durable_position=0, is_clean=False)
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(OSError, match="No space"):
            await put(log, b"refused")[1]
        async with asyncio.timeout(5):
            await log.close()
        assert log.synced_position < log.end_position

    run(scenario)


def test_reading_where_no_record_begins_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = new_log(tmp_path)
        await log.open(durable_position=0, is_clean=False)
        at, stored = put(log, b"x")
        await stored
        for wrong in (-1, log.end_position, log.end_position + 5):
            with pytest.raises(OSError, match="holds nothing"):
                log.read(wrong, 4)
        with pytest.raises(OSError, match="is damaged at byte 3") as caught:
            log.record_at(at + 3)
        assert caught.value.errno == errno.EBADMSG
        await log.close()

    run(scenario)


def records_of(log: CommitLog) -> list[bytes]:
    """Every record, blanks included, from the log's begin to its end."""
    found, at = [], log.begin_position
    while at < log.end_position:
        found.append(log.record_at(at)[0])
        at += len(found[-1])
    return found


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=20), data=st.data())
@settings(max_examples=30)
def test_a_copy_that_is_cut_and_continued_has_the_same_records(
    tmp_path_factory: Any, sizes: list[int], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("copy")

    async def main() -> None:
        master, slave = new_log(directory / "master"), new_log(directory / "slave")
        for log in (master, slave):
            await log.open(durable_position=0, is_clean=False)
        await asyncio.gather(*(put(master, b"x" * size, number)[1] for number, size in enumerate(sizes)))
        records = records_of(master)
        for record in records:
            slave.append_copy(record)
        cut_at = data.draw(st.integers(0, len(records)))
        await slave.cut(sum(map(len, records[:cut_at])))
        assert records_of(slave) == records[:cut_at]
        assert slave.committed_position == slave.synced_position == slave.end_position
        for record in records[cut_at:]:
            slave.append_copy(record)
        somewhere = data.draw(st.integers(0, master.end_position - 1))
        begin = master.record_before(somewhere)
        assert begin <= somewhere < begin + len(master.record_at(begin)[0])
        assert (
            master.read_range(somewhere, 50)
            == b"".join(records)[somewhere : somewhere + 50][: SEGMENT - somewhere % SEGMENT]
        )
        for log in (master, slave):
            await log.close()

    asyncio.run(main())
    assert independent_parse(directory / "slave") == independent_parse(directory / "master")


def test_a_copy_may_begin_at_a_later_position(tmp_path: Path) -> None:
    async def main() -> None:
        slave = new_log(tmp_path / "log")
        await slave.open(durable_position=0, is_clean=False)
        await slave.cut(2 * SEGMENT)
        message = Message(topic="t", queue_id=0, body=b"x", properties={}, queue_offset=9, physical_offset=2 * SEGMENT)
        record = encode_record(message)
        slave.append_copy(record)
        await slave.close()
        assert (slave.begin_position, slave.committed_position) == (2 * SEGMENT, 2 * SEGMENT + len(record))
        again = new_log(tmp_path / "log")
        await again.open(durable_position=0, is_clean=False)
        assert again.end_position == slave.end_position
        await again.close()

    asyncio.run(main())
