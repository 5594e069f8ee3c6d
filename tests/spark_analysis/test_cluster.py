"""A standalone cluster of two workers on this machine gives the same results as embedded Spark."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from benchmarks._standalone_spark import (
    SHORT_LIVED_JAVA,
    SPARK_HOME,
    StandaloneCluster,
    standalone_cluster,
    wait_for,
)

pytestmark = [
    pytest.mark.java,
    pytest.mark.spark,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("spark cluster"),  # one cluster for all of them
]

ROOT = Path(__file__).resolve().parents[2]
FEW_PARTITIONS = "spark.sql.shuffle.partitions=2"  # for five small runs: every partition is a task
TABLES = ("rates", "anomalies", "outcomes", "availability", "latency", "checks", "problems")


def executors(of: Sequence[int]) -> list[int]:
    """Process ids of executors that are children of these workers."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if not entry.name.isdigit():
                continue
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in of and b"CoarseGrainedExecutorBackend" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def small_store(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cluster-store") / "store"
    for number in range(4):
        synthetic.make_run(
            root, number, settings={"read_mode": ("log", "unsafe")[number % 2]}, wrong=0.02 * (number % 2)
        )
    synthetic.make_run(root, 4, workload="log", wrong=0.05)
    return root


@pytest.fixture(scope="module")
def embedded(spark: Any, small_store: Path) -> dict[str, Any]:
    """The tables of an embedded Spark, as the command prints them."""
    from spark_analysis.analysis import Options, analyse
    from spark_analysis.checking import CheckPlan
    from spark_analysis.tables import as_json

    return comparable(json.loads(as_json(analyse(spark, str(small_store), Options(check=CheckPlan())).tables)))


def report(command: list[str], store: Path, environment: dict[str, str]) -> dict[str, Any]:
    out = store.parent / f"out{time.monotonic_ns()}"
    done = subprocess.run(
        [*command, "report", str(store), "--out", str(out), "--json", "--check", "--conf", FEW_PARTITIONS],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (out / "report.html").stat().st_size > 10_000
    assert "{" in done.stdout, (done.stdout[:500], done.stderr[-3000:])
    return comparable(json.loads(done.stdout[done.stdout.index("{") :]))  # spark-submit may speak first


def comparable(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables without the time that each check took."""
    for row in tables["checks"]:
        row.pop("search_s")
    return {name: tables[name] for name in TABLES}


@pytest.mark.long
def test_spark_submit_gives_the_same_tables(
    cluster: StandaloneCluster, small_store: Path, embedded: dict[str, Any]
) -> None:
    url, environment = cluster.url, cluster.environment
    submit = [
        str(SPARK_HOME / "bin" / "spark-submit"), "--master", url, "--conf", "spark.driver.host=127.0.0.1",
        "--conf", "spark.executor.memory=512m", "--conf", f"spark.executor.extraJavaOptions={SHORT_LIVED_JAVA}",
        "--driver-java-options", SHORT_LIVED_JAVA,
        str(ROOT / "harness" / "__main__.py"),
    ]  # fmt: skip
    found = report(submit, small_store, {**environment, "PYTHONPATH": str(ROOT)})
    assert found == embedded
    assert {row["verdict"] for row in found["checks"]} == {"valid", "invalid"}


@pytest.mark.long
def test_killed_executors_change_no_table(
    cluster: StandaloneCluster, small_store: Path, embedded: dict[str, Any], tmp_path: Path
) -> None:
    url, workers = cluster.url, cluster.workers
    script = (
        "import json, os, signal, sys, time\n"
        "from spark_analysis.analysis import Options, analyse\n"
        "from spark_analysis.checking import CheckPlan\n"
        "from spark_analysis.session import open_session\n"
        "from spark_analysis.tables import as_json\n"
        "def phase(text):\n"
        "    print(text, file=sys.stderr, flush=True)\n"
        "    if text in ('latency', 'checking'): sys.stdin.readline()\n"
        "settings = {'spark.driver.host': '127.0.0.1', 'spark.executor.memory': '512m',\n"
        f"            'spark.executor.extraJavaOptions': {SHORT_LIVED_JAVA!r}, 'spark.sql.shuffle.partitions': '2'}}\n"
        "with open_session(master=sys.argv[1], settings=settings) as session:\n"
        "    text = as_json(analyse(session.spark, sys.argv[2], Options(check=CheckPlan()), phase).tables)\n"
        "    open(sys.argv[3], 'w').write(text)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, url, str(small_store), str(tmp_path / "tables.json")],
        cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    killed = []
    try:
        assert process.stderr is not None and process.stdin is not None
        for line in process.stderr:
            if line.strip() in ("latency", "checking"):
                victim = wait_for("executor", lambda: executors(workers))[0]
                os.kill(victim, signal.SIGKILL)  # it held read runs, which have to be read again elsewhere
                killed.append(victim)
                process.stdin.write("\n")
                process.stdin.flush()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert len(set(killed)) == 2
    assert comparable(json.loads((tmp_path / "tables.json").read_text())) == embedded


@pytest.mark.long
def test_a_cluster_without_room_for_an_executor_is_reported(cluster: StandaloneCluster) -> None:
    script = (
        "import os, signal, sys\n"
        "from spark_analysis import session\n"
        "session.EXECUTORS_AFTER_S = 1.0\n"
        "def say(line):\n"
        "    print(line, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "settings = {'spark.driver.host': '127.0.0.1', 'spark.executor.memory': sys.argv[2]}\n"
        "with session.open_session(master=sys.argv[1], settings=settings, say=say) as opened:\n"
        "    print(opened.spark.range(5).count(), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, cluster.url, "64g"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith(f"waiting: {cluster.url} has provided no executor for 1 s."), done.stderr
    assert done.stdout.count("\n") == 1 and "KeyboardInterrupt" in done.stderr


SEARCHED = (
    "--nodes", "3", "--workload", "register", "--nemesis", "partition,kill", "--time-limit", "4", "--rate", "10",
    "--set", "read_mode=unsafe", "--jobs", "2", "--json",
)  # fmt: skip


def simulation_pids(environment: dict[str, str]) -> list[int]:
    """Process ids of simulations for executors of this cluster, whatever their parents are now."""
    found = []
    mark = f"TMPDIR={environment['TMPDIR']}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"harness.exploration.remote_seeds" in words and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def exploring(words: tuple[str, ...], environment: dict[str, str], store: Path) -> subprocess.Popen[str]:
    settings = ("spark.driver.host=127.0.0.1", "spark.executor.memory=512m",
                f"spark.executor.extraJavaOptions={SHORT_LIVED_JAVA}")  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "explore", *SEARCHED, "--store", str(store), *words,
         *(word for setting in settings for word in ("--conf", setting))],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_exploring_on_a_cluster_finds_the_same_failures_even_if_an_executor_dies(
    cluster: StandaloneCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli import main

    url, workers, environment = cluster.url, cluster.workers, cluster.environment
    seeds = ("--seed", "2", "--seeds", "3")
    process = exploring((*seeds, "--master", url), environment, tmp_path / "far")
    try:
        # A simulation that is still loading its modules has answered nothing yet.
        wait_for("simulation", lambda: simulation_pids(environment))
        os.kill(wait_for("executor", lambda: executors(workers))[0], signal.SIGKILL)
        out, said = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, said
    assert main(["explore", *SEARCHED, *seeds, "--store", str(tmp_path / "here")]) == 1
    far, here = json.loads(out), json.loads(capsys.readouterr().out)
    assert far["runs"] == 3 and 0 < far["invalid"] < 3
    for found in (far, here):
        found["failures"].sort(key=lambda failure: failure["seed"])
        assert all((Path(place) / "history.jsonl").exists() for place in found.pop("kept"))
    assert far == here
    wait_for("end of simulations", lambda: not simulation_pids(environment))
    assert list(Path(environment["TMPDIR"]).glob("splitbrain-*")) == []


@pytest.mark.long
def test_ctrl_c_leaves_no_processes_or_files_on_the_cluster(cluster: StandaloneCluster, tmp_path: Path) -> None:
    url, workers, environment = cluster.url, cluster.workers, cluster.environment
    process = exploring(("--seed", "0", "--budget", "10m", "--master", url), environment, tmp_path)
    try:
        wait_for("two simulations", lambda: len(simulation_pids(environment)) == 2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 255 and "harness: interrupted" in said and "Traceback" not in said
    wait_for("end of executors", lambda: not executors(workers))
    wait_for("end of simulations", lambda: not simulation_pids(environment))
    assert list(Path(environment["TMPDIR"]).glob("splitbrain-*")) == []
