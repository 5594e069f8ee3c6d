"""`harness new system NAME`: writes a first version of a plug-in, which can be run at once."""

from __future__ import annotations

import argparse
import inspect
import keyword
import os
import re
import sys
from importlib import metadata

from harness.errors import OperatorError
from harness.plugin_files import OUR_PACKAGES
from harness.systems import starter

__all__ = ["new_command"]

TRY_WITH = "--nodes 3 --nemesis partition --time-limit 20"


def new_command(arguments: argparse.Namespace) -> int:
    """Write NAME.py into the current directory and print how to run it. Returns 0; raises OperatorError if the file
    exists, or if the name is not a valid module name or would hide another module."""
    name: str = arguments.name.removesuffix(".py")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise OperatorError(f"{name!r} is not a module name: use lower-case letters, digits and _, as in my_store")
    path = f"{name}.py"
    if not os.path.lexists(path) and (reason := _hidden_by(name)):
        raise OperatorError(f"{path} would hide {reason}: choose another name")
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115 (an existing file is not ours to remove)
    except FileExistsError:
        raise OperatorError(f"{path} already exists") from None
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
    try:
        with file:
            file.write(source_for(name))
    except OSError as error:
        os.unlink(path)
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}; run it with: harness run {path} {TRY_WITH}")
    return 0


def _hidden_by(name: str) -> str | None:
    """The name or module that a file of this name would hide from imports; None if nothing."""
    if _title(name) in vars(starter).keys() - {starter.Starter.__name__}:
        return f"{_title(name)}, which the file itself needs"
    if name in sys.stdlib_module_names or name in OUR_PACKAGES or name in metadata.packages_distributions():
        return f"the module {name} that this Python has"
    return None


def _title(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def source_for(name: str) -> str:
    """The source of the starter with its class and file renamed."""
    source = inspect.getsource(starter).replace("Starter", _title(name)).replace("starter.py", f"{name}.py")
    return source.replace(os.linesep, "\n")
