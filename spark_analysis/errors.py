"""What can go wrong with an analysis that its operator can mend."""

from __future__ import annotations

__all__ = ["AnalysisError"]


class AnalysisError(Exception):
    """One line that says what is wrong and what mends it: no Java, an unreadable place, too little memory."""
