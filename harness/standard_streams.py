"""Standard streams as a command finds them: closed, full, or without room for a word."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

__all__ = ["complete_streams", "discard_output", "output_of_results", "say"]

LEAST_COLUMNS = 20
"""A width below this, as COLUMNS=0, is a mistake of whoever set it: nothing could be read in it."""


def complete_streams() -> None:
    """Have whatever of standard input, output and error is closed lead nowhere, before the first file is opened: that
    one would be taken for it, and what a program prints would come to stand in a history or a log.

    What the encoding of standard output and error does not have (a dash in Latin-1, a path that is not UTF-8) is
    printed as its number: a verdict is not lost over a letter.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, so this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open to the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < LEAST_COLUMNS:
        del os.environ["COLUMNS"]


@contextlib.contextmanager
def output_of_results(*, is_json: bool) -> Iterator[TextIO]:
    """Standard output, to print results to. Where these are JSON nobody else does, as whoever reads it reads all of it:
    what a plug-in prints while the block lasts goes to standard error."""
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        yield output


def say(line: str) -> None:
    """Print a line on standard error; where that cannot be written, the exit status has to say it alone."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_output()


def discard_output() -> None:
    """What is still on its way to where nothing can be written goes nowhere, instead of failing at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
