"""Durations on the command line."""

from __future__ import annotations

import argparse
import re

__all__ = ["duration_s"]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """Seconds from "90", "90s", "5m" or "1h". Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 90s, 5m or 1h")
    return float(match[1]) * _UNITS_S[match[2] or "s"]
