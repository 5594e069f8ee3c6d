"""Reads a place that holds runs into one table with one row per run.

Spark lists the place, so any file system known to Hadoop will do; local file systems are listed here instead, as Spark
silently skips some names. files.py opens the files where the tasks run, and Python workers turn each file into the
run's digest. Files are processed independently, so a damaged one only adds a line to `problems`. Many small files
share a task.

A directory with files of the harness's names is a run. Its history is the Parquet file, or the JSONL if there is none
(the run died before writing it). Other histories (.edn and so on) are each a run of their own.
"""

from __future__ import annotations

__all__ = [
    "COMPACTED",
    "COMPACTED_OUTCOMES",
    "GROUP",
    "LATEST",
    "PARQUET",
    "Listing",
    "RunFiles",
    "compacted_run_dir",
    "history_files",
    "ingest",
    "list_runs",
    "outcomes_of",
    "run_dir_of",
]

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from spark_analysis.digest import RUN_TYPE, digest
from spark_analysis.errors import AnalysisError
from spark_analysis.files import Content, contents, escaped, is_local, largest_file, local_path, opened
from spark_analysis.operations import Identity, RunData, UnreadableRunError, in_utf8
from spark_analysis.outcomes import OUTCOME_TYPE, outcome_of_results, outcome_of_test
from spark_analysis.reading import read_runs
from spark_analysis.session import one_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GROUP = ("system", "configuration", "workload", "nemesis", "cluster")
"""Columns that must be equal for runs to be comparable; every table is grouped by these first."""

PARQUET, JSONL, RESULTS, TEST = "history.parquet", "history.jsonl", "results.json", "test.json"
MARKER = "running"
"""File in the folder of an unfinished run, which its harness keeps locked while it is alive."""

COMPACTED, COMPACTED_OUTCOMES = "compacted-events", "compacted-outcomes"
"""Folders of a compacted store; their files have Spark's names."""

OUTCOME_BYTES = 64 * 1024
"""Size of a results.json for the packing of tasks, whatever its real size: opening it is most of the work."""

PART = "part-*.parquet"
FOREIGN = ("*.edn",)
JEPSEN_RESULTS = "results.edn"

LATEST = "latest"
"""The name of a store's links to its newest runs."""

UNFINISHED_BY_HADOOP = "_temporary"

_IDENTITY = pa.struct(
    [
        (name, pa.int64() if name == "seed" else pa.string())
        for name in ("run_id", "test_name", *GROUP, "seed", "started_at")
    ]
)
_DIGEST_SCHEMA = pa.schema(
    [
        ("run_dir", pa.string()),
        ("file", pa.string()),
        ("source", pa.string()),
        ("problem", pa.string()),
        ("notes", pa.list_(pa.string())),
        ("identity", _IDENTITY),
        ("fingerprint", pa.string()),  # identifies copies of a history that names no run
        ("run", RUN_TYPE),
    ]
)
_OUTCOME_SCHEMA = pa.schema(
    [("run_dir", pa.string()), ("file", pa.string()), ("problem", pa.string()), ("outcome", OUTCOME_TYPE)]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The full paths of one run's files; None if a file does not exist."""

    run_dir: str
    history: str | None = None
    results: str | None = None
    test: str | None = None
    size_bytes: int = 0


@dataclass(slots=True)
class Listing:
    """The contents of a place: runs, compacted files, and what could not be used."""

    place: str
    runs: list[RunFiles] = field(default_factory=list)
    compacted: list[tuple[str, int]] = field(default_factory=list)
    """Files with their sizes in bytes."""
    compacted_outcomes: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)
    at_work: list[tuple[str, str]] = field(default_factory=list)
    """Unfinished runs, each with a remark: they are in no figure, but are no problem either."""


def list_runs(spark: SparkSession, place: str, *, include: Sequence[str] = ()) -> Listing:
    """Every run below `place` (a path or URI). `include` are patterns of file names to take as foreign histories, too.

    Raises AnalysisError if the place cannot be read or holds nothing.
    """
    listing = Listing(place)
    patterns = (PARQUET, JSONL, RESULTS, TEST, MARKER, PART, *FOREIGN, *include)
    local = _local_place(place)
    sizes = _listed_sizes(spark, place, patterns) if local is None else _local_sizes(listing, local, patterns)
    limit_bytes = largest_file(spark, place)
    by_dir: dict[str, dict[str, tuple[str, int]]] = {}
    for path, length in sorted(sizes.items()):
        folder, _, name = path.rpartition("/")
        if fnmatch.fnmatch(name, PART):
            if folder.endswith("/" + COMPACTED):
                listing.compacted.append((path, length))
            elif folder.endswith("/" + COMPACTED_OUTCOMES):
                listing.compacted_outcomes.append(path)
        else:
            by_dir.setdefault(folder, {})[name] = (path, length)
    runs = {folder for folder, names in by_dir.items() if names.keys() & {PARQUET, JSONL, RESULTS, TEST}}
    # `harness shrink` leaves a test with its schedule in a run's folder, which was not run itself.
    runs -= {folder for folder in runs if by_dir[folder].keys() == {TEST} and _parents(folder) & runs}
    for folder, names in by_dir.items():
        if folder in runs and (state := _at_work(folder, names)) is not None:
            listing.at_work.append((folder, state))
        elif folder in runs:
            _add_run(listing, folder, names, limit_bytes)
        elif not _parents(folder) & runs:
            for name, (path, length) in names.items():
                if _is_foreign(name, include):
                    _add(listing, limit_bytes, RunFiles(run_dir=path, history=path, size_bytes=length))
    if not (listing.runs or listing.compacted or listing.problems or listing.at_work):
        raise AnalysisError(
            f"{place} has no runs: create some with `harness run --store DIR`, or choose another directory or URI"
        )
    return listing


def _is_foreign(name: str, include: Sequence[str]) -> bool:
    """Whether a file is a history of another tool. Jepsen's results.edn, which lies beside it, is not."""
    if any(fnmatch.fnmatch(name, pattern) for pattern in include):
        return True
    return name != JEPSEN_RESULTS and any(fnmatch.fnmatch(name, pattern) for pattern in FOREIGN)


def _listed_sizes(spark: SparkSession, place: str, patterns: Sequence[str]) -> dict[str, int]:
    """Sizes (bytes) of the files of these names at a place of another file system, as listed by Spark. Raises
    AnalysisError."""
    try:
        files = (
            spark.read.format("binaryFile")
            .option("recursiveFileLookup", "true")
            .option("pathGlobFilter", "{" + ",".join(patterns) + "}")
            .load(escaped(place))
        )
        sizes = {row.path: row.length for row in files.select("path", "length").collect()}
        # Spark's rows silently omit empty files; its list of names includes them.
        listed = [re.sub("^file:///", "file:/", unquote(path)) for path in files.inputFiles()]
        sizes |= {path: 0 for path in listed if path not in sizes}
    except Exception as error:
        raise AnalysisError(f"cannot read {place}: {_why(error)}") from None
    prefix = len(_prefix(place, list(sizes)))
    # Leave out copies of the store's links to its newest runs, which would be counted twice.
    return {path: size for path, size in sizes.items() if LATEST not in path[prefix:].split("/")[:-1]}


def _local_place(place: str) -> str | None:
    """The path of a place on a local file system; None for a place elsewhere."""
    if place.startswith("file:"):
        return "/" + re.sub("^file:(//[^/]*)?", "", place).strip("/")
    return None if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place) else os.path.abspath(place)


def _local_sizes(listing: Listing, place: str, patterns: Sequence[str]) -> dict[str, int]:
    """Sizes (bytes) of the files of these names at a path, by their paths as Spark writes them. Raises AnalysisError.

    Spark would silently skip names that begin with `_`, and names that the locale of its Java cannot represent. The
    target of a link counts once; links named `latest` are not followed.
    """
    if not os.path.exists(place):
        raise AnalysisError(f"cannot read {listing.place}: it does not exist")
    if not os.path.isdir(place):
        return {f"file:{place}": os.path.getsize(place)}
    named = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns))
    sizes: dict[str, int] = {}
    linked: dict[str, str] = {}
    for folder, names in _folders(listing, place):
        found = [name for name in names if named.match(name)]
        if found and in_utf8(folder) != folder:
            shown = os.fsencode(folder).decode(errors="backslashreplace")
            listing.problems.append((f"file:{shown}", "its path is not valid UTF-8, which Spark requires: rename it"))
            continue
        for name in filter(lambda name: in_utf8(name) == name, found):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # a dangling link, or a file that has just been removed
                status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    continue
                sizes[f"file:{path}"] = status.st_size
                if os.path.islink(path):
                    linked[path] = os.path.realpath(path)
    if linked:
        paths = [path.removeprefix("file:") for path in sizes]
        known = {os.path.realpath(path) for path in paths if path not in linked}
        for path, target in linked.items():
            if os.path.basename(path) not in (PARQUET, JSONL, RESULTS, TEST):
                if target in known:
                    del sizes[f"file:{path}"]
                known.add(target)
    return sizes


def _folders(listing: Listing, place: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder below a path with the names of its files, each once: first the real ones, then those reached only
    through links. Skips hidden ones, as `harness runs` does, and what Hadoop has not finished writing."""

    def unreadable(error: OSError) -> None:
        listing.problems.append((f"file:{in_utf8(str(error.filename))}", f"cannot be read: {error.strerror}"))

    seen: set[str] = set()
    waiting = [place]
    while waiting:
        for folder, folders, names in os.walk(waiting.pop(0), onerror=unreadable):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != UNFINISHED_BY_HADOOP)
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            waiting += [os.path.join(folder, name) for name in links if name != LATEST]
            folders[:] = [name for name in folders if name not in links]
            yield folder, [name for name in names if not name.startswith(".")]


def _prefix(place: str, paths: list[str]) -> str:
    """The prefix of listed paths that is the place itself."""
    bare = re.sub(r"^[a-z][a-z0-9+.-]*:(//[^/]*)?", "", place.rstrip("/"))
    for path in paths:
        at = path.find(bare)
        if at >= 0:
            return path[: at + len(bare)]
    return ""


def _parents(folder: str) -> set[str]:
    parts = folder.split("/")
    return {"/".join(parts[:size]) for size in range(1, len(parts))}


def _at_work(folder: str, names: Collection[str]) -> str | None:
    """The remark about an unfinished run; None for a run that has ended or was killed. The lock that distinguishes
    running from killed runs can be tested only on local file systems."""
    if MARKER not in names or RESULTS in names or not is_local(folder):
        return None
    try:
        marker = os.open(local_path(f"{folder}/{MARKER}"), os.O_RDONLY)
    except FileNotFoundError:
        return "it ended while the runs were being listed: not counted this time"
    except OSError:
        return None
    try:
        fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "it is still running: not counted"
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(marker)
    return None


def _add_run(listing: Listing, folder: str, names: dict[str, tuple[str, int]], limit_bytes: int) -> None:
    histories = [names[name] for name in (PARQUET, JSONL) if name in names]
    history = next((found for found in histories if found[1]), None)
    if history is None:
        ended = "no history: the run ended before its load began"
        gone = "no history: the run was judged, but its history has been removed"
        reason = "its history is empty" if histories else gone if RESULTS in names else ended
        listing.problems.append((folder, reason))
        return
    _add(
        listing,
        limit_bytes,
        RunFiles(
            run_dir=folder,
            history=history[0],
            results=names[RESULTS][0] if RESULTS in names else None,
            test=names[TEST][0] if TEST in names else None,
            size_bytes=history[1],
        ),
    )


def _add(listing: Listing, limit_bytes: int, run: RunFiles) -> None:
    if not run.size_bytes:
        listing.problems.append((run.run_dir, "the file is empty"))
        return
    if run.size_bytes > limit_bytes:
        listing.problems.append(
            (
                run.run_dir,
                f"its history is {run.size_bytes / 1e6:,.0f} MB, but Spark's memory allows files of at most "
                f"{limit_bytes / 1e6:,.0f} MB: raise --memory",
            )
        )
        return
    listing.runs.append(run)


def _why(error: BaseException) -> str:
    text = one_line(error)
    if "PATH_NOT_FOUND" in text or "does not exist" in text:
        return "it does not exist"
    text = re.sub(r"^\[[A-Z_]+\]\s*", "", text)
    if re.search(r"No FileSystem for scheme|ClassNotFoundException: Class \S*\.fs\.", text):
        text += " (add a missing connector with --conf spark.jars.packages=GROUP:NAME:VERSION)"
    return text


def history_files(spark: SparkSession, listing: Listing, paths: Sequence[str] | None = None) -> DataFrame:
    """The histories, or those of `paths`, as returned by `contents`."""
    known = {run.history: run.size_bytes for run in listing.runs if run.history is not None}
    known |= {path: size for path, size in listing.compacted}
    return contents(spark, known if paths is None else {path: known[path] for path in paths})


def ingest(spark: SparkSession, listing: Listing, *, unavailable_after_ns: int) -> DataFrame:
    """One row per run: run_dir, the history's file, problem, notes, the identity columns, verdict and anomalies,
    and the fields of its digest (null if the history is unusable).

    A run without results counts as unknown; one without a usable history has its problem but no figures.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    def digests(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for path, content in opened(batches):
            rows = list(_digest_rows(path, content, unavailable_after_ns))
            yield pa.RecordBatch.from_pylist(rows, schema=_DIGEST_SCHEMA)

    digested = history_files(spark, listing).mapInArrow(digests, from_arrow_schema(_DIGEST_SCHEMA))
    judged = outcomes_of(spark, listing)
    if listing.compacted_outcomes:
        schema = from_arrow_schema(_OUTCOME_SCHEMA)  # columns that an earlier version did not write are null
        compacted = spark.read.schema(schema).parquet(*[escaped(path) for path in listing.compacted_outcomes])
        judged = judged.unionByName(compacted)
    merged = judged.groupBy("run_dir").agg(
        F.first(F.when(F.col("file") == RESULTS, F.struct("outcome", "problem")), True).alias("results"),
        F.first(F.when(F.col("file") == TEST, F.struct("outcome", "problem")), True).alias("test"),
    )
    return _joined(digested, merged)


def outcomes_of(spark: SparkSession, listing: Listing) -> DataFrame:
    """The contents of every test.json and results.json: run_dir, file, problem, outcome."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def outcomes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = [_outcome_row(path, content) for path, content in opened(batches)]
        yield pa.RecordBatch.from_pylist(rows, schema=_OUTCOME_SCHEMA)

    small = {path: OUTCOME_BYTES for run in listing.runs for path in (run.results, run.test) if path is not None}
    return contents(spark, small).mapInArrow(outcomes, from_arrow_schema(_OUTCOME_SCHEMA))


def _joined(digested: DataFrame, merged: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    def first(name: str) -> Any:
        """The first known value of test.json, results.json and the history itself; "unknown" for columns of GROUP."""
        sources = [F.col(f"test.outcome.{name}"), F.col(f"results.outcome.{name}"), F.col(f"identity.{name}")]
        given = [F.when(source != "", source) if name != "seed" else source for source in sources]
        if name in GROUP:
            given.append(F.lit("unknown"))
        return F.coalesce(*given).alias(name)

    notes = F.filter(
        F.concat(
            F.coalesce(F.col("notes"), F.array().cast("array<string>")),
            F.array(
                F.when(F.col("results.problem").isNotNull(), F.col("results.problem")),
                F.when(F.col("test.problem").isNotNull(), F.col("test.problem")),
                F.when(
                    F.col("results").isNull() & F.col("problem").isNull() & (F.col("source") == "store"),
                    F.lit("no results: counted as unknown"),
                ),
            ),
        ),
        lambda note: note.isNotNull(),
    )
    left, judged = F.col("run.events"), F.col("results.outcome.events")
    lost = F.concat(
        F.lit("the history has lost its end: only "), left.cast("string"), F.lit(" of "), judged.cast("string"),
        F.lit(" client events are left"),
    )  # fmt: skip
    return digested.join(F.broadcast(merged), "run_dir", "left").select(
        "run_dir",
        "file",
        "source",
        "fingerprint",
        F.coalesce("problem", F.when(left < judged, lost)).alias("problem"),
        notes.alias("notes"),
        F.coalesce(
            F.col("results.outcome.run_id"), F.when(F.col("identity.run_id") != "", F.col("identity.run_id")), "run_dir"
        ).alias("run_id"),
        *[first(name) for name in ("test_name", *GROUP, "seed", "started_at")],
        F.coalesce(F.col("results.outcome.verdict"), F.lit("unknown")).alias("verdict"),
        *[
            F.col(f"results.outcome.{name}").alias(name)
            for name in (
                "reason", "version", "anomalies", "earliest_witness_ns", "earliest_witness_operations", "acknowledged",
                "lost", "duplicated",
            )
        ],
        "run.*",
    )  # fmt: skip


def run_dir_of(path: str, run_id: str = "") -> str:
    """The name of a run: its folder; for a foreign history the file; in a compacted file derived from the run's id."""
    folder, _, name = path.rpartition("/")
    if name in (PARQUET, JSONL):
        return folder
    return compacted_run_dir(run_id) if run_id and folder.endswith("/" + COMPACTED) else path


def compacted_run_dir(run_id: str) -> str:
    """The name of a run of a compacted store, which has no folder of its own."""
    return f"compacted:{run_id}"


def _digest_rows(path: str, content: Content, unavailable_after_ns: int) -> Iterator[dict[str, Any]]:
    folder, _, name = path.rpartition("/")
    compacted = folder.endswith("/" + COMPACTED)
    whole = run_dir_of(path)
    source = "compacted" if compacted else "foreign" if whole == path else "store"
    unusable: dict[str, Any] = {**dict.fromkeys(_DIGEST_SCHEMA.names), "run_dir": whole, "file": path, "source": source}
    fingerprint = None
    if name == JSONL and not isinstance(content, UnreadableRunError):
        fingerprint = hashlib.sha256(content).hexdigest()
    try:
        for run in read_runs(name, content):
            yield {
                "run_dir": run_dir_of(path, run.identity.run_id),
                "file": path,
                "source": source,
                "problem": None,
                "notes": _notes(run, name),
                "identity": _identity(run.identity),
                "fingerprint": fingerprint,
                "run": digest(run, unavailable_after_ns=unavailable_after_ns),
            }
    except UnreadableRunError as error:
        yield {**unusable, "notes": [], "problem": f"{name}: {error}"}
    except Exception as error:  # any error of a library on unexpected bytes is a problem of this file alone
        yield {**unusable, "notes": [], "problem": f"{name}: {type(error).__name__}: {one_line(error)}"}


def _notes(run: RunData, name: str) -> list[str]:
    notes = list(run.problems)
    if name == JSONL:
        notes.append("read from history.jsonl: the run has no history.parquet")
    if not run.timed:
        notes.append("without times: no latency, no availability")
    return notes


def _identity(identity: Identity) -> dict[str, Any]:
    return {name: getattr(identity, name) for name in (field.name for field in _IDENTITY)}


def _outcome_row(path: str, content: Content) -> dict[str, Any]:
    folder, _, name = path.rpartition("/")
    try:
        if isinstance(content, UnreadableRunError):
            raise UnreadableRunError(f"{name}: {content}")
        text = content.to_pybytes()
        outcome = outcome_of_results(text) if name == RESULTS else outcome_of_test(text)
        return {"run_dir": folder, "file": name, "problem": None, "outcome": outcome}
    except UnreadableRunError as error:
        return {"run_dir": folder, "file": name, "problem": str(error), "outcome": None}
