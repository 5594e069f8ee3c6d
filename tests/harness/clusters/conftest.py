"""A run state in a directory of the test's own, and waiting on conditions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from harness.run_state import RunState


@pytest.fixture
def run_state(tmp_path: Path) -> Iterator[RunState]:
    run = RunState.create(f"test-{tmp_path.name}", state_root=str(tmp_path / "states"))
    yield run
    run.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds; fails after a deadline that no healthy machine needs."""

    async def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        while not condition():
            assert loop.time() < end_s, "the condition did not come true"
            await asyncio.sleep(0.01)

    return wait_until
