"""Commands and paths as they can be pasted into the terminal in which the harness was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

__all__ = ["as_typed_here", "harness_command", "pasteable", "python_command"]


def pasteable(path: str) -> str:
    """A path as a word of a command line: relative where it lies in the current directory, quoted where it must be."""
    path = os.path.abspath(path)
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the directory is gone
        return shlex.quote(path)
    inside = path if here == "/" else path.removeprefix(here + "/")
    # A program is looked for in PATH where its name has no slash.
    return shlex.quote(inside if "/" in inside else os.path.join(".", inside) if inside != path else path)


def python_command() -> str:
    """The Python that runs this, which has the harness installed: `python3` where PATH leads to the same one."""
    return _by_name_or_path(sys.executable)


def harness_command() -> str:
    """How the harness is called from here: `harness` where PATH leads to this one, otherwise by its path."""
    script = os.path.join(os.path.dirname(sys.executable), "harness")
    return _by_name_or_path(script) if os.path.exists(script) else f"{python_command()} -m harness"


def as_typed_here(command: str) -> str:
    """A command line of the harness, as kept with a run (`harness run ...`), in the form that is found from here."""
    words = command.removeprefix("harness ")
    return command if words == command else f"{harness_command()} {words}"


def _by_name_or_path(path: str) -> str:
    name = os.path.basename(path)
    found = shutil.which(name)
    return name if found is not None and os.path.abspath(found) == os.path.abspath(path) else pasteable(path)
