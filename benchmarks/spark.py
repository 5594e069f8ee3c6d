"""How long `harness report` takes on a large store, and distributed checking compared with one process.

    python -m benchmarks spark                       20 and 1 million operations, and checking of 5 million
    python -c 'from benchmarks.spark import synthesise; synthesise("/tmp/store", operations=1_000_000, runs=20)'

The synthetic store has the harness's files (Parquet, test.json, results.json). Processes alternate invocations and
completions; a run has two faults and, at each, a second without success.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.history_parquet import HISTORY_SCHEMA, ROW_GROUP_EVENTS

PROCESSES = 10
KEYS = 8
VARIANTS = 10
"""Different histories in a store; the other runs repeat them, so that making the store takes less than reading it."""

CONFIGURATIONS = ("read_index", "lease", "log", "unsafe")
GOAL_S, GOAL_GB, GOAL_EXPONENT = 60.0, 6.0, 1.1
CHECK_GOAL_S = 45.0


def synthesise(store: str, *, operations: int, runs: int, keys: int = KEYS, seed: int = 1) -> None:
    """Write a store of `runs` runs with `operations` register operations in total."""
    rng = np.random.default_rng(seed)
    per_run = operations // runs
    histories = [_events(rng, per_run, keys) for _ in range(min(runs, VARIANTS))]
    for number in range(runs):
        began = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=number)
        folder = Path(store) / "broker-register-partition" / f"{began:%Y%m%dT%H%M%SZ}"
        folder.mkdir(parents=True)
        mode = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        _write_run(folder, histories[number % len(histories)], number, began, mode)


def _write_run(folder: Path, table: dict[str, Any], number: int, began: datetime, mode: str) -> None:
    settings = {"read_mode": mode}
    test = {
        "system": "broker", "cluster": "local", "nodes": 5, "workload": "register", "nemesis": ["partition"],
        "seed": number, "settings": settings, "concurrency": PROCESSES,
    }  # fmt: skip
    bad = mode == "unsafe" and number % 8 == 3
    results = {
        "valid": not bad, "reason": "synthetic", "run_id": f"run-{number}", "started_at": began.isoformat(),
        "checks": {"linearizable": {"valid": not bad, "reason": "", "stats": {"invalid_keys": int(bad)}}},
    }  # fmt: skip
    (folder / "test.json").write_text(json.dumps(test))
    (folder / "results.json").write_text(json.dumps(results))
    constants = {
        "run_id": f"run-{number}", "test_name": "broker-register-partition", "system": "broker",
        "workload": "register", "nemesis": "partition", "cluster": "local", "seed": number, "started_at": began,
        "configuration": json.dumps({"nodes": "5", **settings}, sort_keys=True),
    }  # fmt: skip
    arrays = [
        pa.repeat(pa.scalar(constants[column.name], column.type), len(table["index"]))
        if column.name in constants
        else pa.array(table[column.name], column.type)
        for column in HISTORY_SCHEMA
    ]
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=HISTORY_SCHEMA), folder / "history.parquet", compression="zstd",
        row_group_size=ROW_GROUP_EVENTS,
    )  # fmt: skip


def _events(rng: Any, operations: int, keys: int) -> dict[str, Any]:
    """The columns of one history of correct registers: reads return the last write before them."""
    step_ns = 1_000_000
    rounds = math.ceil(operations / PROCESSES)
    count = rounds * PROCESSES
    place = np.arange(count)
    invoked_ns = place * step_ns + rng.integers(0, step_ns // 2, count)
    gap_ns = PROCESSES * step_ns
    latency_ns = np.minimum(rng.lognormal(13.5, 0.6, count), gap_ns - step_ns).astype(np.int64) + 1
    status = rng.choice(np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], np.int8), count)
    pause_ns = 1_500_000_000
    faults = [(count // 4, count // 3), (count // 2, 2 * count // 3)]
    for start, _ in faults:  # an interval without success: open operations end `info`, later ones are shifted
        invoked_ns[start:] += pause_ns
        status[start - PROCESSES : start] = 2
        latency_ns[start - PROCESSES : start] = pause_ns - gap_ns
    is_read = rng.random(count) < 0.5
    key = place % keys if keys > PROCESSES else rng.integers(0, keys, count)
    # A read returns the last write of its key among operations that ended before the read began.
    completed_ns = invoked_ns + latency_ns
    value = _values(is_read, key, status, invoked_ns, completed_ns)
    times = np.concatenate((invoked_ns, completed_ns))
    order = np.argsort(times, kind="stable")
    operation = order % count
    is_invoke = order < count
    names = np.array(["ok", "fail", "info"], object)
    read = is_read[operation]
    text = np.where(read & (is_invoke | (status[operation] != 0)), None, value[operation].astype(str))
    text = np.where(read & ~is_invoke & (value[operation] < 0) & (status[operation] == 0), None, text)
    columns = {
        "time_ns": times[order],
        "process": operation % PROCESSES,
        "is_nemesis": np.zeros(2 * count, bool),
        "type": np.where(is_invoke, "invoke", names[status[operation]]),
        "f": np.where(read, "read", "write"),
        "key": key[operation].astype(str).astype(object),
        "value": text,
        "error": np.where(is_invoke | (status[operation] == 0), None, "no answer"),
        "node": np.where(is_invoke, None, np.array(["n1", "n2", "n3"], object)[operation % 3]),
    }
    return _with_faults(columns, [(int(invoked_ns[a]) - pause_ns, int(invoked_ns[b])) for a, b in faults])


def _values(is_read: Any, key: Any, status: Any, invoked_ns: Any, completed_ns: Any) -> Any:
    """Writes write their own number, and a successful read returns the last write of its key. Operations that would be
    concurrent with a successful one of the same key are made to fail, so that the order is unambiguous."""
    count = len(is_read)
    value = np.arange(count)
    order = np.lexsort((np.arange(count), key))
    last: dict[int, tuple[int, int]] = {}
    result = np.full(count, -1)
    for at in order.tolist():
        k = int(key[at])
        written, busy_until = last.get(k, (-1, -1))
        if status[at] == 0 and invoked_ns[at] <= busy_until:
            status[at] = 1  # it would be concurrent, so it fails: the history is linearizable by construction
        if status[at] == 0:
            if is_read[at]:
                result[at] = written
                last[k] = (written, int(completed_ns[at]))
            else:
                last[k] = (at, int(completed_ns[at]))
    return np.where(is_read, result, value)


def _with_faults(columns: dict[str, Any], faults: list[tuple[int, int]]) -> dict[str, Any]:
    rows = {name: [column] for name, column in columns.items()}
    for number, (start_ns, end_ns) in enumerate(faults):
        for f, kind, at in (("inject", "invoke", start_ns), ("inject", "info", start_ns + 1000),
                            ("heal", "invoke", end_ns - 1000), ("heal", "info", end_ns)):  # fmt: skip
            value = {"id": f"f{number}", "nemesis": "partition", "variant": "halves"}
            if kind == "info":
                value["proof"] = {"proven": True}  # type: ignore[assignment]
            event = {"time_ns": at, "process": -1, "is_nemesis": True, "type": kind, "f": f, "key": None,
                     "value": json.dumps(value), "error": None, "node": None}  # fmt: skip
            for name, item in event.items():
                piece = np.empty(1, columns[name].dtype if columns[name].dtype != object else object)
                piece = piece.astype(object) if isinstance(item, str) else piece
                piece[0] = item
                rows[name].append(piece)
    joined = {
        name: np.concatenate(
            [piece.astype(object) if any(p.dtype == object for p in pieces) else piece for piece in pieces]
        )
        for name, pieces in rows.items()
    }
    order = np.argsort(joined["time_ns"], kind="stable")
    joined = {name: column[order] for name, column in joined.items()}
    joined["index"] = np.arange(len(order))
    return joined


def measure(store: str) -> tuple[float, float, float, float]:
    """(total seconds, seconds without Spark's start, CPU seconds, peak GB) of analysing a store."""
    code = (
        "import sys,time,json;from spark_analysis.session import open_session;"
        "from spark_analysis.analysis import analyse,Options\n"
        "t=time.perf_counter()\n"
        "with open_session() as s:\n"
        "  u=time.perf_counter(); analyse(s.spark, sys.argv[1], Options()); print(time.perf_counter()-u)"
    )
    began_s = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, store], stdout=subprocess.PIPE, text=True)
    peak = 0
    ticks: dict[int, int] = {}
    while process.poll() is None:
        peak = max(peak, sum(_resident_bytes(process.pid, ticks)))
        time.sleep(0.2)
    assert process.stdout is not None
    inner_s = float(process.stdout.read().strip().splitlines()[-1])
    cpu_s = sum(ticks.values()) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - began_s, inner_s, cpu_s, peak / 1e9


def _resident_bytes(root: int, ticks: dict[int, int]) -> Iterator[int]:
    """Proportional memory of a process and its descendants (shared pages count once); `ticks` gets their CPU times."""
    parents: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            times[int(entry.name)] = int(fields[11]) + int(fields[12])
    todo = [root]
    while todo:
        pid = todo.pop()
        ticks[pid] = times.get(pid, 0)
        todo += parents.get(pid, [])
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    yield int(line.split()[1]) * 1024
        except OSError:
            continue


def measure_checking(store: str) -> tuple[float, float, float]:
    """Seconds to check every key of a store: (Spark in total, Spark without its start, one process)."""
    distributed = (
        "import sys,time;from spark_analysis.session import open_session;"
        "from spark_analysis.ingest import ingest,list_runs;from spark_analysis.checking import *\n"
        "with open_session() as s:\n"
        "  u=time.perf_counter(); l=list_runs(s.spark, sys.argv[1])\n"
        "  runs=ingest(s.spark,l,unavailable_after_ns=10**9)\n"
        "  rows=check_runs(s.spark,l,runs,CheckPlan())\n"
        "  assert {r['verdict'] for r in rows}=={'valid'}, {r['verdict'] for r in rows}\n"
        "  print(time.perf_counter()-u)"
    )
    alone = (
        "import sys,time,glob;u=time.perf_counter()\n"
        "from spark_analysis.reading import read_runs;from spark_analysis.cutting import cut_by_key\n"
        "from checker import check,Register\n"
        "for p in glob.glob(sys.argv[1]+'/*/*/history.parquet'):\n"
        "  for run in read_runs(p, open(p,'rb').read(), with_values=True):\n"
        "    for cut in cut_by_key(run):\n"
        "      assert check(cut.history, Register())\n"
        "print(time.perf_counter()-u)"
    )
    began_s = time.perf_counter()
    inner_s = _timed(distributed, store)
    whole_s = time.perf_counter() - began_s
    return whole_s, inner_s, _timed(alone, store)


def _timed(code: str, store: str) -> float:
    done = subprocess.run([sys.executable, "-c", code, store], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print the figures with their goals."""
    place = tempfile.mkdtemp(prefix="splitbrain-bench-")
    try:
        took: dict[int, float] = {}
        for operations, runs in ((1_000_000, 20), (20_000_000, 400)):
            store = os.path.join(place, str(operations))
            synthesise(store, operations=operations, runs=runs)
            whole_s, inner_s, cpu_s, peak_gb = measure(store)
            took[operations] = inner_s
            print(f"  {operations:>11,} operations, {runs} runs: {whole_s:.1f} s ({inner_s:.1f} s after Spark's "
                  f"start, {cpu_s:.1f} s of CPU), {peak_gb:.1f} GB at most", flush=True)  # fmt: skip
            shutil.rmtree(store)
        exponent = math.log(took[20_000_000] / took[1_000_000]) / math.log(20)
        print(f"  cost exponent {exponent:.2f} (goals: {GOAL_S:g} s, {GOAL_GB:g} GB, {GOAL_EXPONENT})", flush=True)
        for operations, runs, keys in ((250_000, 10, 50), (1_000_000, 10, 50), (5_000_000, 10, 50)):
            store = os.path.join(place, "check")
            synthesise(store, operations=operations, runs=runs, keys=keys)
            whole_s, inner_s, alone_s = measure_checking(store)
            print(f"  checking {operations:>9,} operations over {runs * keys} keys: Spark {whole_s:.1f} s "
                  f"({inner_s:.1f} s after its start), one process {alone_s:.1f} s, ratio {alone_s / whole_s:.2f}",
                  flush=True)  # fmt: skip
            shutil.rmtree(store)
        print(f"  (goal: {CHECK_GOAL_S:g} s for 5,000,000)")
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
