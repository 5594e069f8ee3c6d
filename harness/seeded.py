"""Random streams identified by name."""

from __future__ import annotations

import hashlib
import random
import secrets
import weakref

__all__ = ["MAX_SEED", "Streams", "random_seed", "seeded"]

MAX_SEED = 2**63 - 1
"""Limit of a run's seed: tables of many runs have a 64-bit column for it."""


def seeded(name: str) -> random.Random:
    """The same stream as `random.Random(name)`, on every interpreter. Random itself would hash the name with SHA-512,
    which on PyPy is written in Python and takes nearly a millisecond; a simulated cluster has about sixty streams."""
    data = name.encode()
    return random.Random(int.from_bytes(data + hashlib.sha512(data).digest(), "big"))


class Streams:
    """The random streams of one run, derived from their names and the run's seed. All can be reseeded at once; their
    users keep the same objects and draw new numbers from then on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._living: weakref.WeakKeyDictionary[random.Random, str] = weakref.WeakKeyDictionary()

    def get(self, name: str) -> random.Random:
        """A new stream, which starts like every stream with this name and seed."""
        stream = seeded(f"{self.seed}/{name}")
        self._living[stream] = name
        return stream

    def reseed(self, seed: int) -> None:
        """Restart every stream that is still referenced with another seed."""
        self.seed = seed
        for stream, name in self._living.items():
            stream.setstate(seeded(f"{seed}/{name}").getstate())


def random_seed() -> int:
    """A random seed for a run; short enough to be typed."""
    return secrets.randbelow(2**32)
