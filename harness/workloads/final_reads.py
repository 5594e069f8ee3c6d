"""Final reads of workloads by capability."""

from __future__ import annotations

from harness.generator import Calls, EachThread, Generator, Limit, Op, Stagger, UntilOk

__all__ = ["one_good_read_each"]

ATTEMPTS = 20
"""Of each thread. A system that answers none of them has been unwell for long after everything was healed."""

ATTEMPTS_PER_S = 10.0
"""So that the attempts of one thread take about two seconds."""


def one_good_read_each(read: Op) -> Generator:
    """Every thread does `read` until it is ok once, at most `ATTEMPTS` times."""
    return EachThread(Limit(ATTEMPTS, UntilOk(Stagger(ATTEMPTS_PER_S, Calls(lambda _: read)))))
