"""Files of plug-ins: how a system is named that is in one (FILE.py, or FILE.py:CLASS), and which have others' code."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable

__all__ = ["OUR_PACKAGES", "is_file", "others_code_files", "split_file"]

OUR_PACKAGES = frozenset(("checker", "harness", "nemesis", "node", "spark_analysis"))
"""Those of a checkout, which need not be installed."""


def is_file(name: str) -> bool:
    """Whether the name of a system is that of a plug-in's file, FILE.py or FILE.py:CLASS."""
    return split_file(name)[0].endswith(".py")


def split_file(name: str) -> tuple[str, str]:
    """(FILE.py, CLASS) of FILE.py:CLASS; no class where none is named. Directories may have colons."""
    directory, base = os.path.split(name)
    path, _, class_name = base.partition(":")
    return os.path.join(directory, path), class_name


def others_code_files(parts: Iterable[object]) -> set[str]:
    """The files, as code objects name them, of the classes of these objects that are none of this project's packages,
    nor of Python's."""
    found = set[str]()
    for cls in {cls for part in parts for cls in type(part).__mro__}:
        package = cls.__module__.partition(".")[0]
        if package not in OUR_PACKAGES and package not in sys.stdlib_module_names:
            with contextlib.suppress(TypeError, OSError):  # a class without a file
                found.add(inspect.getfile(cls))
    return found
