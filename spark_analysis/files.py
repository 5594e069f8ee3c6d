"""Files where the tasks run: a table of paths with contents, packed into tasks by size.

A local file (`file:`) is opened by the Python worker that needs it and does not go through Java, which is quicker and
needs memory only once. From any other file system Spark reads whole files (its source `binaryFile`) and passes them to
the worker, so Java must be able to hold them. A local file that cannot be read is reported in its place by `opened`.
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
"""The largest file: Java's arrays are limited to 2^31 bytes, and so are Arrow's columns of text."""

Content: TypeAlias = pa.Buffer | UnreadableRunError
"""The bytes of a file, or why it cannot be read."""

COPIES_IN_JAVA = 4
"""Copies of a file that Spark holds at once while it reads and passes it on: a buffer that doubles, an array, a row."""


def contents(spark: SparkSession, sizes: Mapping[str, int]) -> DataFrame:
    """The files of these paths (with their sizes in bytes) as rows (path, content) for `opened`.

    Tasks are of about equal size. A file of another file system that cannot be read has no row.
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
    """The files of a table from `contents`, one after the other: path, and the content or why it cannot be read."""
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
    """Paths packed into tasks of at most `PARTITION_BYTES`, or a core's share if that is less; a larger file gets a
    task of its own."""
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
    """Whether a path, as Spark writes it, is on a local file system."""
    return path.startswith("file:/")


def local_path(path: str) -> str:
    """The path of a `file:` URI as Spark writes it: with one slash or three, and without percent-encoding."""
    return "/" + path.removeprefix("file:").lstrip("/")


def escaped(path: str) -> str:
    """A path with Hadoop's glob characters escaped."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def largest_file(spark: SparkSession, place: str) -> int:
    """The size (bytes) up to which a file at `place` can be read."""
    context = spark.sparkContext
    scheme = re.match(r"([a-z][a-z0-9+.-]*):", place)
    if (scheme is None or scheme[1] == "file") or not context.master.startswith("local"):
        return MAX_FILE_BYTES
    room = heap_bytes(spark) // (COPIES_IN_JAVA * int(context.defaultParallelism))
    return min(MAX_FILE_BYTES, room)
