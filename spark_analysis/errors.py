"""What can go wrong with an analysis that its operator can mend."""

from __future__ import annotations

import shlex
import sys

__all__ = ["HOW_TO_GET_SPARK", "AnalysisError"]

HOW_TO_GET_SPARK = f"{shlex.quote(sys.executable)} -m pip install 'splitbrain[spark]'"
"""PySpark, pandas and a Java, for this very Python: its splitbrain is there already, so no index is asked for it."""


class AnalysisError(Exception):
    """One line that says what is wrong and what mends it: no Java, an unreadable place, too little memory."""
