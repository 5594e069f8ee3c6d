"""Files where the tasks run: a table of paths with contents, packed into tasks by size.

A file of the machine's own file system (`file:`) is opened by the Python worker that wants it, and none of it goes
through Java: that is quicker, and memory is needed once. Of any other file system Spark reads whole files (its source
`binaryFile`) and hands them to the worker, so Java must be able to hold them. Either way a file that cannot be read
is that file's problem: `opened` says so in its place.
"""

from __future__ import annotations

__all__ = ["Content", "contents", "escaped", "is_local", "largest_file", "local_path", "opened"]

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from spark_analysis.operations import UnreadableRunError
from spark_analysis.session import PARTITION_BYTES, heap_bytes
from spark_analysis.workers import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_FILE_BYTES = 1_500_000_000
"""The largest file: Java's arrays end at 2^31 bytes, and so do Arrow's columns of text."""

Content: TypeAlias = pa.Buffer | UnreadableRunError
"""Of a file: its bytes, or why there are none."""

COPIES_IN_JAVA = 4
"""Times that Spark holds a file at once while it reads and hands it over: a buffer that doubles, array, row."""


def contents(spark: SparkSession, sizes: Mapping[str, int]) -> DataFrame:
    """The files of these paths (with their sizes in bytes) as rows (path, content) for `opened`.

    Tasks are about equally large. A file of another file system that cannot be read has no row.
    """
    if not sizes:
        return spark.createDataFrame([], "path string, content binary")
    if not all(map(is_local, sizes)):
        reader = spark.read.format("binaryFile").option("ignoreMissingFiles", "true")
        return reader.option("ignoreCorruptFiles", "true").load(list(map(escaped, sizes))).select("path", "content")
    bins = _packed(sizes, spark.sparkContext.defaultParallelism)
    rows = spark.sparkContext.parallelize(bins, len(bins)).flatMap(_rows)
    return spark.createDataFrame(rows, "path string, content binary")


def opened(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, Content]]:
    """The files of a table that `contents` made, one after the other: path, and the content or why there is none."""
    settle()
    for batch in batches:
        for path, content in zip(batch.column(0), batch.column(1), strict=True):
            if content.is_valid:
                yield path.as_py(), content.as_buffer()
                continue
            try:
                with open(local_path(path.as_py()), "rb") as file:
                    yield path.as_py(), pa.py_buffer(file.read())
            except OSError as error:
                yield path.as_py(), UnreadableRunError(f"cannot be read: {error.strerror}")


def _rows(paths: list[str]) -> list[tuple[str, None]]:
    settle()
    return [(path, None) for path in paths]


def _packed(sizes: Mapping[str, int], cores: int) -> list[list[str]]:
    """Paths in tasks of at most `PARTITION_BYTES`, or a core's share if that is less; a larger file is one task's."""
    room = min(PARTITION_BYTES, max(1, sum(sizes.values()) // cores))
    bins: list[list[str]] = []
    held = 0
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        if not bins or held + sizes[path] > room:
            bins.append([])
            held = 0
        bins[-1].append(path)
        held += sizes[path]
    return bins


def is_local(path: str) -> bool:
    """Whether a path, as Spark writes it, is of this machine's own file systems."""
    return path.startswith("file:/")


def local_path(path: str) -> str:
    """The path of a `file:` URI as Spark writes it: with one slash or three, and not encoded."""
    return "/" + path.removeprefix("file:").lstrip("/")


def escaped(path: str) -> str:
    """A path of which no character is a pattern."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def largest_file(spark: SparkSession, place: str) -> int:
    """Bytes that a file at `place` may have to be read."""
    context = spark.sparkContext
    scheme = re.match(r"([a-z][a-z0-9+.-]*):", place)
    if (scheme is None or scheme[1] == "file") or not context.master.startswith("local"):
        return MAX_FILE_BYTES
    room = heap_bytes(spark) // (COPIES_IN_JAVA * int(context.defaultParallelism))
    return min(MAX_FILE_BYTES, room)
