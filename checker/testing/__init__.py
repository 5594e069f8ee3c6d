"""Tools for testing a checker: a brute-force oracle and random histories, for tests and for your own models."""

from __future__ import annotations

from checker.testing.oracle import linearizable_by_force
from checker.testing.samples import SAMPLED_MODELS, random_history

__all__ = ["SAMPLED_MODELS", "linearizable_by_force", "random_history"]
