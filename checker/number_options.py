"""What the command lines say of an option whose value is no number."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["NumberOptions"]

SECONDS = ("S", "SECONDS")
"""How the help calls the values of options that are times in seconds."""


class NumberOptions(argparse.ArgumentParser):
    """A parser whose messages call for a number, not for a type of Python's."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in (int, float):
                raise
        what = "a whole number" if action.type is int else "a number"
        unit = " of seconds" if action.metavar in SECONDS else ""
        raise argparse.ArgumentError(action, f"not {what}{unit}: {arg_string!r}")
