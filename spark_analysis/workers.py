"""Avoiding work that PySpark does in its Python workers before and after every task."""

from __future__ import annotations

__all__ = ["settle"]

import gc
import sys
from zipimport import zipimporter

_frozen = False


def settle() -> None:
    """Call this at the start of all code that runs in a Python worker; elsewhere it does nothing.

    Before every task PySpark invalidates the import caches. Up to Python 3.11 this reads an archive again, once for
    every package imported from it: two thirds of the time of a small task. Paths without a cache entry are skipped, and
    get one again, without being read, at the next import from them. After every task PySpark collects garbage, which
    traverses all of pandas as well: a quarter of such a task. So the objects that exist in the first task are frozen.
    """
    global _frozen
    contexts = sys.modules.get("pyspark.taskcontext")
    if contexts is None or contexts.TaskContext.get() is None:
        return
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]
    if not _frozen:
        gc.freeze()
        _frozen = True
