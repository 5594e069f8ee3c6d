"""Files of plug-ins: names of the form FILE.py or FILE.py:CLASS, and the files with third-party code."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable

__all__ = ["OUR_PACKAGES", "is_file", "others_code_files", "split_file"]

OUR_PACKAGES = frozenset(("checker", "harness", "nemesis", "node", "spark_analysis"))
"""The packages of a checkout, which need not be installed."""


def is_file(name: str) -> bool:
    """Whether a system's name has the form FILE.py or FILE.py:CLASS."""
    return split_file(name)[0].endswith(".py")


def split_file(name: str) -> tuple[str, str]:
    """(FILE.py, CLASS) of FILE.py:CLASS; CLASS is empty if none is named. Directories may contain colons."""
    directory, base = os.path.split(name)
    path, _, class_name = base.partition(":")
    return os.path.join(directory, path), class_name


def others_code_files(parts: Iterable[object]) -> set[str]:
    """The files, as code objects name them, of the classes of these objects that belong neither to this project nor to
    the standard library."""
    found = set[str]()
    for cls in {cls for part in parts for cls in type(part).__mro__}:
        package = cls.__module__.partition(".")[0]
        if package not in OUR_PACKAGES and package not in sys.stdlib_module_names:
            with contextlib.suppress(TypeError, OSError):  # a class without a file
                found.add(inspect.getfile(cls))
    return found
