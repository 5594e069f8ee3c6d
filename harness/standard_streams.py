"""Handling of standard streams that are closed, full, or too narrow."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

__all__ = ["complete_streams", "discard_output", "output_of_results", "say"]

LEAST_COLUMNS = 20
"""A smaller width, such as COLUMNS=0, is a mistake and ignored: nothing would be readable."""


def complete_streams() -> None:
    """Redirect closed standard streams to /dev/null before the first file is opened: that file would otherwise get the
    stream's descriptor, and output would be written to a history or a log.

    Characters that the encoding of standard output or error lacks (a dash in Latin-1, a path that is not UTF-8) are
    printed as escapes, so that a verdict is not lost.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < LEAST_COLUMNS:
        del os.environ["COLUMNS"]


@contextlib.contextmanager
def output_of_results(*, is_json: bool) -> Iterator[TextIO]:
    """Yields standard output for printing results. If they are JSON, whose reader parses everything, other output
    during the block, such as a plug-in's, goes to standard error."""
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        yield output


def say(line: str) -> None:
    """Print a line on standard error; if that fails, the exit status is the only report."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_output()


def discard_output() -> None:
    """Discard buffered output of streams that cannot be written, so that it does not fail at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
