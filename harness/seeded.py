"""Streams of random numbers that are named by text."""

from __future__ import annotations

import hashlib
import random
import secrets
import weakref

__all__ = ["MAX_SEED", "Streams", "random_seed", "seeded"]

MAX_SEED = 2**63 - 1
"""Of a run: tables of many runs have a column of 64 bits for it."""


def seeded(name: str) -> random.Random:
    """The stream of `random.Random(name)`, the same everywhere. That hashes the name with a SHA-512 which is written in
    Python on PyPy and takes nearly a millisecond; a simulated cluster has some sixty streams."""
    data = name.encode()
    return random.Random(int.from_bytes(data + hashlib.sha512(data).digest(), "big"))


class Streams:
    """The streams of one run, each by its name and the run's seed, so that all can be seeded anew at once: whoever has
    one keeps it, and draws other numbers from there on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._living: weakref.WeakKeyDictionary[random.Random, str] = weakref.WeakKeyDictionary()

    def get(self, name: str) -> random.Random:
        """A new stream of this name, which begins as all of that name and seed do."""
        stream = seeded(f"{self.seed}/{name}")
        self._living[stream] = name
        return stream

    def reseed(self, seed: int) -> None:
        """Let every stream that somebody still has begin anew, as those of another seed do."""
        self.seed = seed
        for stream, name in self._living.items():
            stream.setstate(seeded(f"{seed}/{name}").getstate())


def random_seed() -> int:
    """A seed for a run that was given none; short enough to be typed again."""
    return secrets.randbelow(2**32)
