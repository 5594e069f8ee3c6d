"""Sessions of Spark: exhausted memory, settings, files left behind, errors in one line."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
from py4j.clientserver import ClientServer, ClientServerConnection, JavaParameters, PythonParameters
from py4j.protocol import Py4JError

from spark_analysis.errors import AnalysisError
from spark_analysis.session import _complaint, _quiet_gateway, _without_names, one_line, open_session

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]

OUT_OF_MEMORY = """
import sys
from spark_analysis import analysis

def hungry(runs, *, exact_operations):
    runs.sparkSession.sql("select sequence(1, 400000000)").collect()

analysis.latency_quantiles = hungry
from harness.cli import main
sys.exit(main(sys.argv[1:]))
"""


def assert_report_is_incomplete(out: Path, said: str) -> None:
    """The report in `out` has what was computed before memory ended, and says that it lacks the rest."""
    assert "Traceback" not in said and "Exception" not in said
    assert "1 decided run" in said
    assert (out / "rates.parquet").is_dir()
    assert not (out / "latency.parquet").exists()
    assert "This report is incomplete." in (out / "report.html").read_text()


@pytest.mark.long
def test_the_report_is_incomplete_if_java_runs_out_of_memory(synthetic: ModuleType, tmp_path: Path) -> None:
    synthetic.make_run(tmp_path / "store", 1, operations=60)
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, "report", str(tmp_path / "store"), "--out", str(tmp_path / "out"),
         "--memory", "512m"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("incomplete: a step failed, and those after it were skipped: latency: "), done.stderr
    assert "ran out of memory; raise --memory" in last
    assert done.returncode == 255
    assert_report_is_incomplete(tmp_path / "out", done.stderr)


def test_the_report_is_incomplete_if_a_python_worker_runs_out_of_memory(
    spark: Any, synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from harness.cli import main
    from harness.commands import report
    from spark_analysis import analysis
    from spark_analysis.session import Session

    def hungry(runs: Any, *, exact_operations: int) -> Any:
        def die(batches: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does to the largest process
            yield from batches

        runs.select("run_id").mapInArrow(die, "run_id string").collect()

    sessions: list[Session] = []

    def session(arguments: object) -> Any:
        sessions.append(Session(spark, "the one of these tests"))
        return contextlib.nullcontext(sessions[-1])

    monkeypatch.setattr(analysis, "latency_quantiles", hungry)
    monkeypatch.setattr(report, "spark_session", session)
    synthetic.make_run(tmp_path / "store", 1, operations=60)
    assert main(["report", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 255
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith("incomplete: a step failed, and those after it were skipped: latency: "), said
    assert "this machine ran out of memory" in last
    assert_report_is_incomplete(tmp_path / "out", said)
    assert len(sessions) == 2, "a new session has written what was computed"


def test_a_connection_that_java_resets_is_not_logged_with_a_traceback(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether Java, at its end, closes or resets a connection depends on what that carries at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset() -> None:
            connection, _ = server.accept()
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        java = threading.Thread(target=reset)
        java.start()
        client = ClientServer(JavaParameters(port=server.getsockname()[1], auto_convert=True), PythonParameters(port=0))
        with _quiet_gateway(), pytest.raises(Py4JError):
            client.jvm.System.currentTimeMillis()
        java.join()
        client.shutdown()
    logging.getLogger().warning("of others")
    assert [record.getMessage() for record in caplog.records] == ["of others"]
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_closing_the_connection_to_java_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """After Ctrl-C: the awaited answer is on its way, and both ends close the connection."""
    caplog.set_level(logging.ERROR, logger="py4j")  # a session that other tests keep open silences it
    ours, javas = socket.socketpair()
    javas.close()
    connection = ClientServerConnection(JavaParameters(), PythonParameters(), SimpleNamespace(pool=None), None)
    with ours, ours.makefile("rb") as stream:
        connection.init_socket_from_python_server(ours, stream)
        for context, expected in ((_quiet_gateway(), 0), (contextlib.nullcontext(), 1)):
            with context:
                connection.shutdown_socket(1, 2)
            assert len(caplog.records) == expected


def scratch_of(pid: int, place: Path | None = None) -> list[Path]:
    return list((place or Path(os.environ.get("TMPDIR", "/tmp"))).glob(f"splitbrain-spark-{pid}-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_clean_removes_the_temporary_files_of_a_killed_report(
    store: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """In a directory of its own: other tests clean up after dead processes as well."""
    report = [sys.executable, "-m", "harness", "report", str(store), "--out", str(tmp_path / "out")]
    clean = [sys.executable, "-m", "harness", "clean"]
    place = tmp_path / "temporary"
    place.mkdir()
    environment = {**os.environ, "SPLITBRAIN_STATE_DIR": str(tmp_path / "states"), "TMPDIR": str(place)}
    process = subprocess.Popen(report, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any(line.startswith("reading") for line in process.stderr)
        live = subprocess.run(clean, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        (scratch,) = scratch_of(process.pid, place)
        assert str(scratch) not in live.stdout
        process.send_signal(number)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert bool(scratch_of(process.pid, place)) == (number == signal.SIGKILL)
    deadline = time.monotonic() + 60
    while scratch_of(process.pid, place) and time.monotonic() < deadline:  # its Java may still be putting files there
        subprocess.run(clean, cwd=ROOT, env=environment, check=False, capture_output=True, timeout=60)
    assert scratch_of(process.pid, place) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_servers_listen_at_127_0_0_1_if_localhost_cannot_be_resolved(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a root file system without /etc/hosts."""

    def look_up(name: str, port: Any) -> list[Any]:
        if not is_known:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    class Listener:
        family, places = socket.AF_INET, list[tuple[str, int]]()

        def bind(self, place: tuple[str, int]) -> None:
            self.places.append(place)

        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1", 4711)

    def bound(name: str) -> str:
        server = socketserver.TCPServer((name, 0), socketserver.BaseRequestHandler, bind_and_activate=False)
        server.socket.close()
        server.socket = listener = Listener()  # type: ignore[assignment]
        server.server_bind()
        return listener.places[-1][0]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with _without_names():
        assert bound("localhost") == ("localhost" if is_known else "127.0.0.1")
        assert bound("127.0.0.5") == "127.0.0.5"
    assert bound("localhost") == "localhost"


def test_malformed_settings_are_refused(tmp_path: Path) -> None:
    import argparse

    from harness.commands.report import spark_session
    from harness.errors import OperatorError

    def arguments(*conf: str) -> Any:
        return argparse.Namespace(master="local[1]", memory="512m", verbose=False, conf=conf)

    for text in ("spark.sql.shuffle.partitions", "fs.s3a.endpoint=x", "=1"):
        with pytest.raises(OperatorError, match="--conf takes KEY=VALUE"):
            spark_session(arguments(text))


def test_java_uses_the_temporary_directory_that_clean_removes(spark: Any) -> None:
    directory = Path(spark.sparkContext._jvm.java.lang.System.getProperty("java.io.tmpdir"))
    assert directory in scratch_of(os.getpid())


def test_java_classes_are_looked_up_once(spark: Any) -> None:
    java = spark.sparkContext._jvm
    for name in ("functions", "PythonUtils", "SparkSession"):
        assert getattr(java, name) is getattr(java, name)
    assert java.functions.lit(7).toString() == "7"


def test_spark_leaves_pythons_own_sigint_handler_in_place(spark: Any) -> None:
    """With PySpark's handler an analysis would end with whatever error Java gives for its job."""
    handler = signal.getsignal(signal.SIGINT)
    assert getattr(handler, "__module__", None) != "pyspark.context"
    assert handler is signal.default_int_handler


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "26/11/28 09:50:29 WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address\n"
            "26/11/28 09:50:34 ERROR SparkContext: Error initializing SparkContext.\n"
            "org.apache.spark.SparkException: Could not parse Master URL: 'sparkle://x'\n"
            "\tat org.apache.spark.A.b(A:1)\n",
            "Could not parse Master URL: 'sparkle://x'",
        ),
        (
            "Error occurred during initialization of VM\nCould not reserve enough space for 99KB object heap\n",
            "Could not reserve enough space for 99KB object heap: set --memory to a size that this machine has",
        ),
        (
            "26/11/28 09:52:23 WARN StandaloneAppClient$ClientEndpoint: Failed to connect to master h:1\n"
            "org.apache.spark.SparkException: Exception thrown in awaitResult: \n\tat org.apache.spark.A.b(A:1)\n"
            "Caused by: java.io.IOException: Failed to connect to h:1\n",
            "Failed to connect to h:1",
        ),
        ("Exception in thread \"main\" java.lang.Exception: spark.executor.cores should be\n",
         "spark.executor.cores should be"),
        ("all is well\n", ""),
    ],
)  # fmt: skip
def test_the_cause_of_a_failed_start_is_found_in_sparks_log(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "spark.log").write_text(log)
    assert _complaint(str(tmp_path / "spark.log")) == said


@pytest.mark.parametrize(
    ("master", "said"),
    [
        ("spark://127.0.0.1:PORT", r"no Spark master answers at 127.0.0.1:\d+: Connection refused"),
        ("spark://127.0.0.1:PORT,127.0.0.2:PORT", r"at 127.0.0.1:\d+: Connection refused; 127.0.0.2:\d+: Connection"),
        ("spark://127.0.0.1", "an address must be HOST:PORT, as in spark://host:7077, not '127.0.0.1'"),
        ("spark://127.0.0.1:70000", "an address must be HOST:PORT"),
    ],
)
def test_a_master_that_does_not_answer_is_reported_at_once(
    master: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark itself, which would try for a minute, is not started."""
    monkeypatch.setattr("spark_analysis.session._start", lambda *_: pytest.fail("Spark was started"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free from now on
    before = scratch_of(os.getpid())
    with pytest.raises(AnalysisError, match=said), open_session(master=master.replace("PORT", str(port))):
        pass
    assert scratch_of(os.getpid()) == before


class GoneJavaError(Exception):
    """As py4j's: its text comes from Java, which has ended by the time that it is needed."""

    def __str__(self) -> str:
        raise ConnectionRefusedError


def worker_failed(last_lines: str) -> Exception:
    return Exception(
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
        f'Traceback (most recent call last):\n  File "worker.py", line 1, in main\n    import pyarrow\n{last_lines}\n'
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GoneJavaError(), "Spark's Java process ended"),
        (worker_failed("ModuleNotFoundError: No module named 'pyarrow'"),
         "ModuleNotFoundError: No module named 'pyarrow' (set the Python of Spark's workers with PYSPARK_PYTHON"),
        (worker_failed("pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker "
                       "has different version (3, 12) than that in driver 3.11.\nPlease check environment variables"),
         "PySparkRuntimeError: Python in worker has different version (3, 12) than that in driver 3.11. (set the"),
        (worker_failed("ValueError: no number"), "ValueError: no number"),
        (Exception('Caused by: java.io.IOException: Cannot run program "/no/python": error=2, No such file\n'
                   "Caused by: java.io.IOException: error=2, No such file"),
         "cannot run /no/python: No such file (set the Python of Spark's workers with PYSPARK_PYTHON"),
        (Exception("java.lang.UnsatisfiedLinkError: no snappyjava in java.library.path: /usr/lib"), "with TMPDIR"),
    ],
)  # fmt: skip
def test_errors_of_java_and_of_workers_are_one_line_that_names_the_remedy(error: Exception, said: str) -> None:
    assert said in one_line(error)
    assert "\n" not in one_line(error)


def test_a_session_that_ends_as_soon_as_it_has_started_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_analysis import session

    class Started:
        @property
        def sparkContext(self) -> Any:
            raise GoneJavaError

        def stop(self) -> None:
            raise GoneJavaError

    monkeypatch.setattr(session, "_start", lambda *arguments: Started())
    monkeypatch.setattr(session, "_end_gateway", lambda: None)
    with pytest.raises(AnalysisError, match=r"Spark did not start \(yarn\): Spark's Java process ended"):
        session.open_session(master="yarn").__enter__()
