"""`harness new system NAME`: the first lines of a plug-in, which can be run at once."""

from __future__ import annotations

import argparse
import inspect
import keyword
import os
import re

from harness.errors import OperatorError
from harness.systems import starter

__all__ = ["new_command"]

TRY_WITH = "--nodes 3 --nemesis partition --time-limit 20"


def new_command(arguments: argparse.Namespace) -> int:
    """Write NAME.py into the current directory and say what to do with it. Returns 0; raises OperatorError when there
    is such a file, or the name is none for a Python module."""
    name: str = arguments.name.removesuffix(".py")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise OperatorError(f"{name!r} is no name for a module: small letters, digits and _, such as my_store")
    path = f"{name}.py"
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115 (what was there already is not ours to remove)
    except FileExistsError:
        raise OperatorError(f"{path} is already there") from None
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
    try:
        with file:
            file.write(source_for(name))
    except OSError as error:
        os.unlink(path)
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}, which can be run as it stands: harness run {path} {TRY_WITH}")
    return 0


def source_for(name: str) -> str:
    """The source of the starter, under another name."""
    title = "".join(word.capitalize() for word in name.split("_"))
    source = inspect.getsource(starter).replace("Starter", title).replace("starter.py", f"{name}.py")
    return source.replace(os.linesep, "\n")
