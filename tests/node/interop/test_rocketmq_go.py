"""The Go client of RocketMQ (rocketmq-client-go), unmodified, against our broker and name server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.go,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("go") is None, reason="needs Go"),
]
TOPICS = {"plain": 4, "ordered": 1, "transfers": 2, "prices": 1, "difficult": 1, "later": 1, "numbers": 1}
QUICK_CHECKS = "[transactions]\ntimeout_s = 1\ncheck_interval_s = 1\n"
EXPECTED = {
    "send": {"sync": True, "async": True, "batch": True, "compressed": True},
    "consume by tag": sorted(["sync", "async", "batch-0", "batch-1", "0123456789" * 200]),
    "delay": ["late"],
    "ordered": [str(number) for number in range(20)],
    "retry": ["difficult"],
    "broadcast": ["price"],
    "transactions": ["committed", "orphan, yes"],
    "sql92": ["number-2", "number-3"],
}


def test_the_go_client_works_as_applications_use_it(
    serving: Any, run_peer: Any, go_client: Path, tmp_path: Path
) -> None:
    async def scenario() -> list[dict[str, Any]]:
        async with serving(TOPICS, extra=QUICK_CHECKS) as served:
            peer: list[dict[str, Any]] = await run_peer(
                str(go_client), served.name_server, cwd=tmp_path, env={"HOME": str(tmp_path)}
            )
            return peer

    lines = asyncio.run(scenario())
    assert [line for line in lines if "error" in line] == []
    assert {line["step"]: line["result"] for line in lines} == EXPECTED
