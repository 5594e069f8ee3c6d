"""Checks before a run that enough files can be opened, so that it does not fail in the middle."""

from __future__ import annotations

import resource

from harness.errors import OperatorError
from harness.test import Test

__all__ = ["require_descriptors", "wanted_descriptors"]

BASE = 128
"""For programs, logs, control connections and what Python itself has open."""


def wanted_descriptors(test: Test) -> int:
    """Open files that a run may need in one process, with a margin: each client has a connection to every node, and if
    links go through proxies each pair of nodes has two streams with two ends."""
    return BASE + test.concurrency * (test.nodes + 1) + 8 * test.nodes * (test.nodes + 1)


def require_descriptors(test: Test) -> None:
    """Raise the limit of open files to what the run needs. Raises OperatorError if the hard limit is lower."""
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
