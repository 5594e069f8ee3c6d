"""The disk's own thread: quick operations are done on return, slow ones leave the loop free."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from node.disk_thread import DiskThread
from node.real_runtime import RealDisk


def _wait(release: threading.Event) -> None:
    assert release.wait(20)


def _nothing() -> None:
    return None


def test_a_quick_operation_is_done_in_the_thread_before_the_call_returns() -> None:
    thread = DiskThread()
    ran_in: list[int] = []
    try:
        while not thread.run_blocking(lambda: ran_in.append(threading.get_ident())):
            thread.wait()  # on a busy machine nothing is quick
        assert ran_in and threading.get_ident() not in ran_in
    finally:
        thread.close()


def test_errors_of_the_operation_are_raised() -> None:
    thread = DiskThread()

    def fail() -> None:
        raise OSError(28, "full")

    try:
        for _ in range(3):
            with pytest.raises(OSError, match="full"):
                if not thread.run_blocking(fail):
                    thread.wait()
    finally:
        thread.close()


def test_a_stalled_write_leaves_the_loop_free_and_other_writes_use_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()
    real_pwrite = os.pwrite
    threads: list[str] = []

    def stall(descriptor: int, data: bytes, offset: int) -> int:
        threads.append(threading.current_thread().name)
        if offset == 0:
            started.set()
            assert release.wait(20)
        return real_pwrite(descriptor, data, offset)

    async def main() -> None:
        disk = RealDisk()
        file = await disk.create(str(tmp_path / "file"))
        monkeypatch.setattr(os, "pwrite", stall)
        stalled = asyncio.ensure_future(file.write(0, b"a"))
        assert await asyncio.to_thread(started.wait, 20)
        await file.write(1, b"b")
        assert not stalled.done()
        assert threads[0] == "disk-own" and threads[1].startswith("disk_")
        release.set()
        await stalled
        assert file.read(0, 2) == b"ab"
        file.close()
        disk.close()

    asyncio.run(main())


def test_the_outcome_is_taken_before_another_operation_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread waits: an operation that the loop begins meanwhile must not get this operation's error."""
    thread = DiskThread()
    release = threading.Event()
    free_when_taken: list[bool] = []
    real_outcome = thread._hand.outcome

    def outcome() -> None:
        free_when_taken.append(thread.is_free)
        real_outcome()

    def fail() -> None:
        assert release.wait(20)
        raise OSError(28, "full")

    monkeypatch.setattr(thread._hand, "outcome", outcome)
    try:
        assert not thread.run_blocking(fail)
        release.set()
        with pytest.raises(OSError, match="full"):
            thread.wait()
        assert free_when_taken == [False] and thread.is_free
    finally:
        thread.close()


def test_after_a_slow_operation_the_loop_does_not_block_on_the_next() -> None:
    thread = DiskThread()
    release = threading.Event()
    try:
        assert not thread.run_blocking(lambda: _wait(release))
        assert not thread.is_quick
        release.set()
        thread.wait()
        assert not thread.is_quick  # for REST_S
    finally:
        thread.close()


def test_a_sync_leaves_the_loop_free_and_its_error_is_raised() -> None:
    async def main() -> None:
        thread = DiskThread()
        release = threading.Event()
        running = asyncio.ensure_future(thread.run(_nothing, lambda: _wait(release)))
        await asyncio.sleep(0)
        assert not thread.is_free and not running.done()
        release.set()
        await running
        assert thread.is_free

        def fail() -> None:
            raise OSError(5, "broken")

        with pytest.raises(OSError, match="broken"):
            await thread.run(_nothing, fail)
        with pytest.raises(OSError, match="broken"):
            await thread.run(fail, _nothing)
        assert thread.is_free
        thread.close()

    asyncio.run(main())


def test_a_cancelled_waiter_waits_until_the_operation_ends() -> None:
    async def main() -> None:
        thread = DiskThread()
        release = threading.Event()
        running = asyncio.ensure_future(thread.run(lambda: _wait(release), _nothing))
        for _ in range(3):
            await asyncio.sleep(0)
            running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert thread.is_free
        thread.close()

    asyncio.run(main())
