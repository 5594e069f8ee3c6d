"""Checkers that are fed while the test runs and stop it at the first violation.

Each takes the events of one history in order and answers ``None`` or a sentence.  They never cry wolf, and on objects
whose values differ they find a violation at the event that completes it.  What they hold is bounded by the number of
keys and of open operations (those of unknown outcome stay open) and by a window for what returned beside them; what a
bounded memory cannot see, the full check at the end does.
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
