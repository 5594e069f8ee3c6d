"""A Spark session for an analysis: embedded by default, on a cluster if a master is named.

The session ships `checker`, `spark_analysis` and further requested packages to the executors as one zip, so a cluster
needs only PySpark's requirements (Python, pandas, pyarrow) and nothing of ours. Spark's own output goes to a file in
the session's scratch directory unless `verbose` is set; errors are reported in one line.
"""

from __future__ import annotations

__all__ = [
    "ARCHIVE",
    "DEFAULT_MEMORY",
    "PARTITION_BYTES",
    "Session",
    "heap_bytes",
    "one_line",
    "open_session",
    "ship",
]

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import socketserver
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_analysis.errors import HOW_TO_GET_SPARK, AnalysisError
from spark_analysis.java import find_java, java_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MEMORY = "2g"
"""Memory of the embedded Spark's Java process: ample for tables of 20 million operations."""

SHIPPED = ("checker", "spark_analysis")

ARCHIVE = "splitbrain.zip"
"""Name of the zip of shipped packages, also on the executors."""

PARTITION_BYTES = 16 * 1024 * 1024
"""Size of the history files packed into one task: small enough for a Python worker to hold and for spreading tasks."""

BATCH_ROWS = 32
"""Rows passed to a Python worker at a time: here a row is a whole history file, or one key of a run."""

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark formats the plan of every query for the UI even if that is off: with all columns, an eighth of the CPU time
    # of a report on few runs.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.files.maxPartitionBytes": str(PARTITION_BYTES),
    "spark.sql.files.openCostInBytes": str(64 * 1024),
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.shuffle.partitions": "64",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS),
    "spark.python.worker.reuse": "true",
    "spark.sql.execution.pythonUDF.arrow.enabled": "false",
}


LOG = "spark.log"
"""File in the scratch directory with the output of Java and of the package resolver."""

MASTER_TIMEOUT_S = 10.0
"""Timeout of a connection to a standalone master."""

MAX_PORT = 65_535

EXECUTORS_AFTER_S = 30.0
"""Time in which a cluster with free resources starts an executor: it takes some 5 s, 20 s on a busy machine."""

_OUT_OF_MEMORY = "-XX:+ExitOnOutOfMemoryError"
"""Without it Java continues after losing a thread, and a task that ran in that thread waits forever."""

_JAVA_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", _OUT_OF_MEMORY)
"""For a Java process that lives some seconds, or that waits for a cluster: its second compiler and its parallel
collector would take half of the CPU time of a report without any gain."""


@dataclass(frozen=True, slots=True)
class Session:
    """An open session; `java` is a text that says which Java it runs on."""

    spark: SparkSession
    java: str


@contextlib.contextmanager
def open_session(
    *,
    master: str | None = None,
    memory: str = DEFAULT_MEMORY,
    verbose: bool = False,
    settings: Mapping[str, str] | None = None,
    name: str = "splitbrain",
    packages: Sequence[str] = (),
    distribution: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Session]:
    """A context manager for a session.

    `master` is Spark's (default: what spark-submit set, otherwise all cores of this machine); `memory` is that of
    the driver's Java; `settings` are passed to Spark unchanged; `packages` and `distribution` are as for `ship`;
    `say` is called, from another thread, if a cluster provides no executors. Raises AnalysisError if PySpark or Java
    is missing or Spark does not start.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise AnalysisError(f"this command needs PySpark: {HOW_TO_GET_SPARK}")
    _check_memory(memory)
    scratch = tempfile.mkdtemp(prefix=f"splitbrain-spark-{os.getpid()}-{_start_ticks()}-")
    try:
        with (
            contextlib.nullcontext() if verbose else _quiet_gateway(),
            _environment(scratch, embedded=_is_embedded(master)) as source,
        ):
            before = signal.getsignal(signal.SIGINT)
            _require_master(master)
            spark = _start(master, memory, verbose, dict(settings or {}), name, scratch)
            if threading.current_thread() is threading.main_thread():
                # PySpark's own handler first has Java cancel the jobs, which makes Ctrl-C look like a failed job.
                # Leaving the session ends the jobs as well.
                signal.signal(signal.SIGINT, before)
            try:
                try:
                    spark.sparkContext.setLogLevel("INFO" if verbose else "OFF")
                    ship(spark, scratch, packages, distribution)
                    if not verbose:
                        _silence_accumulators(spark)
                    _keep_classes(spark)
                except Exception as error:  # a cluster may reject us only after Spark believes that it has started
                    raise _not_started(master, scratch, error) from None
                with _watched(spark, say):
                    yield Session(spark, source)
            finally:
                with contextlib.suppress(Exception):  # stopping a driver that has died fails
                    spark.stop()
                _end_gateway()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _watched(spark: SparkSession, say: Callable[[str], None]) -> Iterator[None]:
    """Report once if tasks wait and the cluster has no executor for them: Spark itself waits forever, and mentions it
    only in logs that nobody sees."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EXECUTORS_AFTER_S):
            with contextlib.suppress(Exception):  # the session is ending
                if _lacks_executors(spark):
                    say(
                        f"waiting: {spark.sparkContext.master} has provided no executor for {EXECUTORS_AFTER_S:g} s. "
                        "Are its workers up, with a free core and enough memory for an executor (--conf "
                        "spark.executor.memory=SIZE, default 1g)?"
                    )
                    return

    if not spark.sparkContext.master.startswith("local"):
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _lacks_executors(spark: SparkSession) -> bool:
    context: Any = spark.sparkContext
    known = context._jsc.sc().statusTracker().getExecutorInfos()  # the driver is one of them
    return len(known) <= 1 and bool(context.statusTracker().getActiveStageIds())


def _start_ticks() -> int:
    """When this process started, in clock ticks since boot; 0 if the system does not tell. Together with the process id
    it identifies the owner in a directory's name: `harness clean` removes the directories of dead processes."""
    try:
        return int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


@contextlib.contextmanager
def _without_names() -> Iterator[None]:
    """Make PySpark, which listens on "localhost", use 127.0.0.1 if that name does not resolve: minimal container images
    may have no /etc/hosts."""
    bind = socketserver.TCPServer.server_bind

    def bind_by_number(server: socketserver.TCPServer) -> None:
        if server.server_address[0] == "localhost":
            server.server_address = ("127.0.0.1", int(server.server_address[1]))
        bind(server)

    try:
        socket.getaddrinfo("localhost", None)
    except OSError:
        socketserver.TCPServer.server_bind = bind_by_number  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        socketserver.TCPServer.server_bind = bind  # type: ignore[method-assign]


def _start(
    master: str | None, memory: str, verbose: bool, settings: dict[str, str], name: str, scratch: str
) -> Any:  # fmt: skip
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master is not None or not _submitted():
        builder = builder.master(master or "local[*]")
    wanted = {**_SETTINGS, "spark.driver.memory": memory, **settings}
    if _is_embedded(master):
        wanted.setdefault("spark.local.dir", scratch)
        wanted.setdefault("spark.driver.host", "127.0.0.1")
        wanted.setdefault("spark.driver.bindAddress", "127.0.0.1")
    else:
        wanted.setdefault("spark.executor.extraJavaOptions", _OUT_OF_MEMORY)
    # Java's temporary files (its own directory, unpacked libraries) would stay behind if it is killed.
    options = [*_JAVA_OPTIONS, f'"-Djava.io.tmpdir={scratch}"']
    if not verbose:
        log4j = Path(scratch) / "log4j2.properties"
        log4j.write_text("rootLogger.level = off\n", encoding="utf-8")
        options.append(f'"-Dlog4j.configurationFile={log4j}"')
    wanted.setdefault("spark.driver.extraJavaOptions", " ".join(options))
    for key, value in wanted.items():
        builder = builder.config(key, value)
    try:
        with contextlib.nullcontext() if verbose else _output_to(os.path.join(scratch, LOG)), _without_names():
            return builder.getOrCreate()
    except Exception as error:
        refusal = _not_started(master, scratch, error)
        _end_gateway()
        raise refusal from None


def _not_started(master: str | None, scratch: str, error: Exception) -> AnalysisError:
    """The error for a Spark that did not start, or ended before it could be used."""
    why = _complaint(os.path.join(scratch, LOG)) or one_line(error)
    return AnalysisError(f"Spark did not start ({master or 'local'}): {why}")


def _require_master(master: str | None) -> None:
    """Raise AnalysisError if no address of a standalone master accepts connections: Spark would retry for a minute, and
    report little."""
    if not (master or "").startswith("spark://"):
        return
    refusals = []
    for address in str(master).removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > MAX_PORT:
            raise AnalysisError(
                f"--master {master}: an address must be HOST:PORT, as in spark://host:7077, not {address!r}"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), MASTER_TIMEOUT_S).close()
            return
        except OSError as error:
            refusals.append(f"{address}: {error.strerror or error}")
    raise AnalysisError(f"no Spark master answers at {'; '.join(refusals)}: start it, or name another with --master")


def _keep_classes(spark: SparkSession) -> None:
    """Cache the Java classes that PySpark looks up by short name for every column; each lookup makes Java search some
    250 archives for the class, in one package after the other."""
    java: Any = spark.sparkContext._jvm
    for name in ("functions", "PythonUtils", "SparkSession"):
        setattr(java, name, getattr(java, name))


def _silence_accumulators(spark: SparkSession) -> None:
    """Suppress the traceback of PySpark's accumulator server when Java ends; that is reported in one line elsewhere."""
    server: Any = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda request, client_address: None


@contextlib.contextmanager
def _quiet_gateway() -> Iterator[None]:
    """Suppress tracebacks logged by py4j, which are reported in one line elsewhere: through the root logger if an ended
    Java reset its connection instead of closing it, which depends on timing, and through its own logger if Ctrl-C comes
    while it waits for an answer."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return Path(record.pathname).parent.name != "py4j"

    root, own = logging.getLogger(), logging.getLogger("py4j")
    before = own.level
    root.addFilter(is_of_others)
    own.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        root.removeFilter(is_of_others)
        own.setLevel(before)


def heap_bytes(spark: SparkSession) -> int:
    """The largest heap that the driver's Java may use."""
    context: Any = spark.sparkContext
    return int(context._jvm.java.lang.Runtime.getRuntime().maxMemory())


def _submitted() -> bool:
    """Whether spark-submit started this process, and with it the Java side."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _is_embedded(master: str | None) -> bool:
    return (master or "local").startswith("local") and not _submitted()


def _check_memory(memory: str) -> None:
    match = re.fullmatch(r"(\d+)([mg])", memory.lower())
    if match is None:
        raise AnalysisError(f"memory must be a number followed by m or g, such as {DEFAULT_MEMORY}, not {memory!r}")
    if int(match.group(1)) * (1 if match.group(2) == "m" else 1024) < 512:
        raise AnalysisError(f"Spark needs at least 512m of memory, not {memory}")


@contextlib.contextmanager
def _environment(scratch: str, *, embedded: bool) -> Iterator[str]:
    """Set the environment variables that Spark reads, and restore them. Yields where the Java was found."""
    import pyspark

    before = dict(os.environ)
    try:
        source = "the Java of spark-submit"
        if not _submitted():
            java = find_java(pyspark.__version__)
            os.environ.update(java_environment(java, pyspark.__version__, os.path.join(scratch, "java")))
            source = f"Java {java.version} from {java.source}"
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        if embedded:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        yield source
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Redirect standard output and error to a file while the Java process is started, which inherits them and keeps
    them: the package resolver writes to the one, Java to the other."""
    sys.stdout.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for number in kept:
            os.dup2(log, number)
        yield
    finally:
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(log)


_EMPTY_WORDS = re.compile(r"Error initializing SparkContext|thrown in awaitResult|occurred during initialization of VM")
"""Matches lines that report an error but not its cause."""


def _complaint(path: str) -> str:
    """The first line of a log that names the cause of an error, without log prefix and names of Java classes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if re.search(r"error|exception|could not|invalid", line, re.I)]
    except OSError:
        return ""
    telling = [line for line in lines if not _EMPTY_WORDS.search(line)] or lines[:1]
    if not telling:
        return ""
    if "object heap" in telling[0] or "heap size" in telling[0]:
        return f"{telling[0][:300]}: set --memory to a size that this machine has"
    said = re.sub(r"^\d\S* \S+ [A-Z]+ \S+: ", "", telling[0])
    return re.sub(r'^(Exception in thread "\S+" |Caused by: )?[\w.$]+(Exception|Error): ', "", said)[:300]


def _end_gateway() -> None:
    """End the Java process: PySpark keeps it for the next session, which a command does not have."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # After Java has died these could not be reset properly; a later session would take them for its own.
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None
    gateway = SparkContext._gateway
    if gateway is None or _submitted():
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    process = getattr(gateway, "proc", None)
    if process is not None:
        with contextlib.suppress(Exception):
            process.stdin.close()
            process.wait(timeout=10)
    SparkContext._gateway = None
    SparkContext._jvm = None


def ship(spark: SparkSession, directory: str, packages: Sequence[str] = (), distribution: str | None = None) -> str:
    """Zip `checker` and `spark_analysis` into `directory` and ship the zip to the executors. Returns its path.

    `packages` are further packages to include, only their Python files; `distribution` is one whose entry points are
    to be available there.
    """
    path = os.path.join(directory, ARCHIVE)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (*SHIPPED, *packages):
            spec = importlib.util.find_spec(package)
            assert spec is not None and spec.submodule_search_locations is not None
            root = Path(next(iter(spec.submodule_search_locations)))
            for file in sorted(root.rglob("*.py")):
                archive.write(file, str(Path(package) / file.relative_to(root)))
        if distribution is not None:
            found = importlib.metadata.distribution(distribution)
            place = f"{distribution}-{found.version}.dist-info"
            about = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {found.version}\n"
            archive.writestr(f"{place}/METADATA", about)
            archive.writestr(f"{place}/entry_points.txt", found.read_text("entry_points.txt") or "")
    spark.sparkContext.addPyFile(path)
    return path


_JAVA_ENDED = "Spark's Java process ended: most likely it ran out of memory; raise --memory"
_PYTHON_OF_WORKERS = "set the Python of Spark's workers with PYSPARK_PYTHON or --conf spark.pyspark.python=PATH"


def one_line(error: BaseException) -> str:
    """The message of a Spark error, without the stack traces of two languages."""
    try:
        text = str(error)
    except Exception:  # a Java error gets its text from Java, which may have ended
        return _JAVA_ENDED
    if "OutOfMemoryError" in text or "Java heap space" in text:
        return "Spark ran out of memory: raise --memory"
    is_gone = isinstance(error, (ConnectionError, EOFError)) or type(error).__name__ == "Py4JNetworkError"
    if is_gone or "Answer from Java side is empty" in text:
        return _JAVA_ENDED
    if "Python worker exited unexpectedly" in text:
        return "a Python worker of Spark was killed: most likely this machine ran out of memory; use fewer cores, " \
               "as with --master 'local[1]'"  # fmt: skip
    if (line := _worker_error(text)) is not None:
        return line
    match = re.search(r"(\w+(?:Exception|Error)): ([^\n]+)", text)
    if match and "Py4JJavaError" in type(error).__name__:
        inner = [m for m in re.finditer(r"Caused by: [\w.$]*?(\w+(?:Exception|Error)): ([^\n]+)", text)]
        match = inner[-1] if inner else match
        return f"{match.group(1)}: {match.group(2)}"[:400]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__


def _worker_error(text: str) -> str | None:
    """The error of a worker's Python, or of code that ran there; None if the cause is another."""
    if (match := re.search(r'Cannot run program "([^"]+)".*error=\d+, ([^\n]+)', text)) is not None:
        return f"cannot run {match[1]}: {match[2]} ({_PYTHON_OF_WORKERS})"
    if "snappyjava" in text or "Failed to load native" in text:
        return "Spark could not unpack a library into the temporary directory: it is full, or mounted noexec; " \
               "choose another with TMPDIR"  # fmt: skip
    if "Traceback (most recent call last)" not in text:
        return None
    said = re.findall(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception|Interrupt|Exit)): ([^\n]+)", text, re.M)
    if not said:
        return None
    name, words = said[-1]
    if name == "ModuleNotFoundError" or "PYTHON_VERSION_MISMATCH" in words:
        words = f"{words.removeprefix('[PYTHON_VERSION_MISMATCH] ')} ({_PYTHON_OF_WORKERS})"
    return f"{name}: {words}"[:400]
