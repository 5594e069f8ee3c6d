"""What the plug-in of Redis writes for its watchers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.systems.redis import Redis


def test_watchers_know_from_the_beginning_whom_they_may_promote() -> None:
    """They ask the primary every 10 s who follows it: one that is cut off before the second time had no successor."""
    hosts: list[Any] = [
        SimpleNamespace(name=f"n{number}", number=number, ip=f"10.0.0.{number}", data="/data") for number in (1, 2, 3)
    ]
    system = Redis()
    system.hosts, system.settings = hosts, {name: choices[0] for name, choices in Redis.settings.items()}
    for host in hosts:
        lines = system.files(host)["sentinel.conf"].splitlines()
        assert [line for line in lines if "known" in line] == [
            f"sentinel known-replica main 10.0.0.{number} 6379" for number in (2, 3)
        ]
        assert lines.index("sentinel monitor main 10.0.0.1 6379 2") < len(lines) - 2, (
            "known ones are of a watched primary"
        )
