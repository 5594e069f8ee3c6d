"""What the interpreter is good at: built-in functions that handle a whole column, or loops over rows.

CPython interprets a loop, so many messages of one kind are handled column by column: `node.store.columns`,
`node.dledger.uniform_entries`, `node.remoting.header_layout`. PyPy compiles loops to machine code, and takes 0.4 to
0.7 times as long for the same messages row by row. Both ways give the same results.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["IS_PYPY", "least_rows"]

IS_PYPY: Final = sys.implementation.name == "pypy"


def least_rows(count: int) -> int:
    """The fewest rows that are handled column by column: `count`, or, where loops are compiled, more than there are
    ever."""
    return sys.maxsize if IS_PYPY else count
