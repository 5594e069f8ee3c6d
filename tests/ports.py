"""Ports on 127.0.0.1 for the servers of tests, which nobody else takes while a server is down.

A port that the system chose, and that is free again, is also what it chooses for the next connection of any program on
the machine: a server of a test could not be started again where it had been. The ports here lie below those of which
Linux chooses (from 32768 on), and every process has a block of them for itself, which it holds until it ends.
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
    """Ports that nobody listens on, each another one. A port comes again after 298 others."""
    _, ports = _own_block()
    return list(itertools.islice(filter(_is_free, ports), count))


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


@functools.cache
def _own_block() -> tuple[socket.socket, Iterator[int]]:
    """What holds the block of this process, and its ports, over and over. The first port of a block is held for UDP, by
    which other processes see that the block is taken."""
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
