"""Directories that killed reports left: an embedded Spark's scratch, `splitbrain-spark-<pid>-<start>-...`.

A directory says by its name whose it is, so that one is known from the moment it exists: the process id of the
report and its start time. It is removed when no such process runs any more.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable

from harness.run_state import process_start_ticks, temp_dir

__all__ = ["remove_spark_leftovers"]

_NAME = re.compile(r"splitbrain-spark-(\d+)-(\d+)-\w+")


def remove_spark_leftovers(report: Callable[[str], None]) -> bool:
    """Remove the scratch directories of reports that are dead, telling of each. True when there were none or all
    are gone."""
    clean = True
    for root in dict.fromkeys((temp_dir(), tempfile.gettempdir())):
        for path in _of_the_dead(root):
            try:
                shutil.rmtree(path)
                report(f"spark: directory {path}")
            except OSError as error:
                clean = False
                report(f"spark: left: directory {path}: {error.strerror}")
    return clean


def _of_the_dead(root: str) -> list[str]:
    found = []
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else ():
        match = _NAME.fullmatch(name)
        path = os.path.join(root, name)
        if match is None or process_start_ticks(int(match[1])) == int(match[2]):
            continue
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            found.append(path)
    return found
