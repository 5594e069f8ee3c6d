"""A larger nursery for PyPy's collector, which looks through what is new whenever the nursery is full.

With its own 4 MB a simulation takes about twice as long as with 64. PyPy reads the size when it starts and never again,
so the process has to begin anew; those that it starts then inherit it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["NURSERY", "VARIABLE", "restart_with_nursery"]

VARIABLE = "PYPY_GC_NURSERY"
NURSERY = "64M"


def restart_with_nursery(argv: Sequence[str]) -> None:
    """On PyPy, run `argv` in the place of this process, with the nursery set; does not return then. Does nothing where
    somebody has set the size, and on other interpreters. For the beginning of a program, before it has done anything.
    """
    if sys.implementation.name == "pypy" and VARIABLE not in os.environ:
        os.execve(argv[0], list(argv), {**os.environ, VARIABLE: NURSERY})
