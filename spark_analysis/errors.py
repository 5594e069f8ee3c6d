"""Errors of an analysis that its operator can fix."""

from __future__ import annotations

import shlex
import sys

__all__ = ["HOW_TO_GET_SPARK", "AnalysisError"]

HOW_TO_GET_SPARK = f"{shlex.quote(sys.executable)} -m pip install 'splitbrain[spark]'"
"""Installs PySpark, pandas and a Java for this Python; its splitbrain is installed already, so no index is queried."""


class AnalysisError(Exception):
    """One line with a problem and its remedy: no Java, an unreadable place, too little memory."""
