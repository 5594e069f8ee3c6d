"""Streams of random numbers that are named by text."""

from __future__ import annotations

import hashlib
import random
import secrets

__all__ = ["random_seed", "seeded"]


def seeded(name: str) -> random.Random:
    """The stream of `random.Random(name)`, the same everywhere. That hashes the name with a SHA-512 which is written in
    Python on PyPy and takes nearly a millisecond; a simulated cluster has some sixty streams."""
    data = name.encode()
    return random.Random(int.from_bytes(data + hashlib.sha512(data).digest(), "big"))


def random_seed() -> int:
    """A seed for a run that was given none; short enough to be typed again."""
    return secrets.randbelow(2**32)
