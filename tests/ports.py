"""Ports on 127.0.0.1 for the servers of tests, which nothing else takes while a server is down.

A port that the system chose, once it is free again, may be chosen for the next connection of any program on the
machine: a test's server could not be restarted on it. The ports here lie below those from which Linux chooses (from
32768 on), and every process has its own block of them, which it holds until it ends.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Iterator

__all__ = ["free_port", "free_ports"]

_BLOCKS = range(20_000, 32_600, 300)


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on. A port is returned again after 298 others."""
    _, ports = _own_block()
    return list(itertools.islice(filter(_is_free, ports), count))


def free_port() -> int:
    """A port that nothing listens on."""
    return free_ports(1)[0]


@functools.cache
def _own_block() -> tuple[socket.socket, Iterator[int]]:
    """The socket that holds this process's block, and the block's ports in a cycle. The first port of a block is bound
    for UDP, so that other processes see that the block is taken."""
    at = os.getpid() % len(_BLOCKS)
    for first in (*_BLOCKS[at:], *_BLOCKS[:at]):
        holder = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
        else:
            return holder, itertools.cycle(range(first + 1, first + _BLOCKS.step))
    raise RuntimeError("every block of ports is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
