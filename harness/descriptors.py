"""Whether a run has enough open files: found out before it starts, not when the first one cannot be opened."""

from __future__ import annotations

import resource

from harness.errors import OperatorError
from harness.test import Test

__all__ = ["require_descriptors", "wanted_descriptors"]

BASE = 128
"""For programs, logs, control connections and what Python itself has open."""


def wanted_descriptors(test: Test) -> int:
    """Open files that a run may come to need in one process, with room to spare: each client has a connection to every
    node, and where links go through proxies each pair of nodes has two streams of two ends."""
    return BASE + test.concurrency * (test.nodes + 1) + 8 * test.nodes * (test.nodes + 1)


def require_descriptors(test: Test) -> None:
    """Raise this process's limit of open files as far as the run needs it. Raises OperatorError where that is more than
    it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted_descriptors(test)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OperatorError(
            f"this run may need {wanted} open files and the limit is {hard}: ulimit -n {wanted}, "
            "or fewer --nodes and less --concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
