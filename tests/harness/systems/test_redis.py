"""The configuration that the plug-in of Redis writes for its sentinels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.systems.redis import Redis


def test_sentinels_know_the_replicas_from_the_start() -> None:
    """They ask the primary for replicas every 10 s: one that is cut off before would have no successor."""
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
            "known replicas belong to a monitored primary"
        )
