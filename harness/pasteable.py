"""Formats commands and paths so that they can be pasted into the terminal in which the harness was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

__all__ = ["as_typed_here", "harness_command", "pasteable", "python_command"]


def pasteable(path: str) -> str:
    """A path as a command-line word: relative if it is in the current directory, quoted if necessary."""
    path = os.path.abspath(path)
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the directory is gone
        return shlex.quote(path)
    inside = path if here == "/" else path.removeprefix(here + "/")
    # A program name without a slash would be looked up in PATH.
    return shlex.quote(inside if "/" in inside else os.path.join(".", inside) if inside != path else path)


def python_command() -> str:
    """This process's Python, which has the harness installed: `python3` if PATH resolves to it, else its path."""
    return _by_name_or_path(sys.executable)


def harness_command() -> str:
    """The command for this harness: `harness` if PATH resolves to it, else its path."""
    script = os.path.join(os.path.dirname(sys.executable), "harness")
    return _by_name_or_path(script) if os.path.exists(script) else f"{python_command()} -m harness"


def as_typed_here(command: str) -> str:
    """A command line as stored with a run (`harness run ...`), with the command that works from here."""
    words = command.removeprefix("harness ")
    return command if words == command else f"{harness_command()} {words}"


def _by_name_or_path(path: str) -> str:
    name = os.path.basename(path)
    found = shutil.which(name)
    return name if found is not None and os.path.abspath(found) == os.path.abspath(path) else pasteable(path)
