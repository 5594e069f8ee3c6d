"""Waiting briefly for a thread: what is quick is done on return, what is not leaves the loop free."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from node.brief_wait import BriefWait
from node.real_runtime import RealDisk


def test_what_is_quick_is_done_in_the_thread_before_the_call_returns() -> None:
    brief = BriefWait()
    ran_in: list[int] = []
    try:
        while not brief.run(lambda: ran_in.append(threading.get_ident())):
            brief.wait()  # on a busy machine nothing is quick
        assert ran_in and threading.get_ident() not in ran_in
    finally:
        brief.close()


def test_errors_are_those_of_the_operation() -> None:
    brief = BriefWait()

    def fail() -> None:
        raise OSError(28, "full")

    try:
        for _ in range(3):
            with pytest.raises(OSError, match="full"):
                if not brief.run(fail):
                    brief.wait()
    finally:
        brief.close()


def test_a_stalled_write_leaves_the_loop_free_and_others_go_through_the_pool(
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
        assert threads[0] == "disk-brief" and threads[1].startswith("disk_")
        release.set()
        await stalled
        assert file.read(0, 2) == b"ab"
        file.close()
        disk.close()

    asyncio.run(main())


def test_the_loop_does_not_wait_again_at_once() -> None:
    brief = BriefWait()
    release = threading.Event()
    try:
        assert not brief.run(release.wait)  # type: ignore[arg-type]
        assert not brief.is_ready
        release.set()
        brief.wait()
        assert not brief.is_ready  # it rests
    finally:
        brief.close()
