"""A standalone Spark cluster on this machine, for benchmarks and tests: a master and workers of one core each."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyspark

from spark_analysis.java import find_java, java_environment

__all__ = ["SHORT_LIVED_JAVA", "SPARK_HOME", "StandaloneCluster", "standalone_cluster", "wait_for"]

SPARK_HOME = Path(pyspark.__file__).parent
SHORT_LIVED_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # see spark_analysis.session
READY_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class StandaloneCluster:
    """The master's URL, the workers' process ids, and the environment of all processes of the cluster."""

    url: str
    workers: tuple[int, ...]
    environment: dict[str, str]


Found = TypeVar("Found")


def wait_for(what: str, condition: Callable[[], Found]) -> Found:
    """Wait until the condition returns a true value; returns that."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {what} within {READY_TIMEOUT_S:g} s")


@contextlib.contextmanager
def standalone_cluster(scratch: Path, *, workers: int = 2) -> Iterator[StandaloneCluster]:
    """Run a cluster during a `with` block; everything that it writes is below `scratch`."""
    (scratch / "tmp").mkdir()
    environment = {
        **os.environ,
        **java_environment(find_java(pyspark.__version__), pyspark.__version__, str(scratch / "java")),
        "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(SPARK_HOME), "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(scratch / "local"), "TMPDIR": str(scratch / "tmp"),
        # Set by Spark's start scripts, but not for workers started directly by Java.
        "SPARK_SCALA_VERSION": next(SPARK_HOME.glob("jars/spark-core_*.jar")).name.split("_")[1].split("-")[0],
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    java = os.path.join(environment["JAVA_HOME"], "bin", "java")
    command = [java, "-cp", f"{SPARK_HOME}/jars/*", "-Xmx256m", *SHORT_LIVED_JAVA.split()]
    processes: list[subprocess.Popen[bytes]] = []
    with open(scratch / "cluster.log", "w+", encoding="utf-8") as log:

        def start(*words: str) -> int:
            process = subprocess.Popen([*command, *words], env=environment, stdout=log, stderr=log, cwd=scratch)
            processes.append(process)
            return process.pid

        def logged(text: str, times: int) -> bool:
            return (scratch / "cluster.log").read_text(errors="replace").count(text) >= times

        try:
            name = "org.apache.spark.deploy"
            start(f"{name}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
            wait_for("master", lambda: logged("I have been elected leader", 1))
            pids = [
                start(f"{name}.worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "1g",
                      "--webui-port", "0", "--work-dir", str(scratch / f"work{number}"), url)
                for number in range(1, workers + 1)
            ]  # fmt: skip
            wait_for("workers", lambda: logged("Successfully registered with master", workers))
            yield StandaloneCluster(url, tuple(pids), environment)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
