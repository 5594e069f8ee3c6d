"""Settling a Python worker of Spark saves work of every task, and imports still work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]


def in_a_task(numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    import gc
    import importlib
    import sys
    from zipimport import zipimporter

    from spark_analysis.workers import settle

    def known() -> list[str]:
        return [path for path, finder in sys.path_importer_cache.items() if isinstance(finder, zipimporter)]

    for _ in numbers:
        before, frozen = known(), gc.get_freeze_count()
        settle()
        after = known()
        sys.modules.pop("pyspark.statcounter", None)
        found = importlib.import_module("pyspark.statcounter").__file__
        yield {"before": before, "after": after, "found": found, "frozen": (frozen, gc.get_freeze_count())}


def test_settling_drops_the_cached_archives_and_freezes_objects_once(spark: Any) -> None:
    context = spark.sparkContext
    tasks = [task for _ in range(3) for task in context.parallelize([0], 1).mapPartitions(in_a_task).collect()]
    assert any(task["before"] for task in tasks), "there is something to settle"
    for task in tasks:
        assert task["after"] == []
        assert ".zip/" in task["found"], "what is in an archive is still found"
        before, after = task["frozen"]
        assert 0 < after <= (before or after), "once, so that later garbage is found"


def test_settling_outside_of_a_task_changes_nothing() -> None:
    from spark_analysis.workers import settle

    known, frozen = dict(sys.path_importer_cache), gc.get_freeze_count()
    settle()
    assert (sys.path_importer_cache, gc.get_freeze_count()) == (known, frozen)
