"""Checkers that are fed while the test runs and stop it at the first violation.

Each takes the events of one history in order and returns ``None`` or a sentence.  They never report a false violation,
and for objects with distinct values they find a violation at the event that completes it.  Their memory is bounded by
the number of keys and open operations (those of unknown outcome stay open), and by a window of operations that returned
concurrently; violations beyond that are left to the full check at the end.
"""

from __future__ import annotations

from checker.online.log import OnlineLog, OnlineVersionedRegister
from checker.online.pairs import WINDOW, Call, Judge, Online
from checker.online.register import OnlineRegister
from checker.online.sets import OnlineGrowOnlySet
from checker.online.sums import OnlineFetchAndAdd

__all__ = [
    "WINDOW",
    "Call",
    "Judge",
    "Online",
    "OnlineFetchAndAdd",
    "OnlineGrowOnlySet",
    "OnlineLog",
    "OnlineRegister",
    "OnlineVersionedRegister",
]
