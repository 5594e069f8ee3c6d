"""What Spark does in its Python workers between two tasks, and what of it each can be spared."""

from __future__ import annotations

__all__ = ["settle"]

import gc
import sys
from zipimport import zipimporter

_frozen = False


def settle() -> None:
    """To be called by whatever runs in a Python worker, as it begins; elsewhere it does nothing.

    Before every task PySpark has each known path looked through again for modules. Up to Python 3.11 an archive is read
    anew for that, once for every package of it that was imported: two thirds of what a small task takes. A path that is
    not known is not looked through, and is known again, without being read, as soon as something is imported from it.
    After every task PySpark looks for cycles of garbage, among all of pandas as well: a quarter of such a task. What is
    there in the first task stays to the end.
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
