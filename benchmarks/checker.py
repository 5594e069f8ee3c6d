"""All performance goals of the checker, in one table.

    python benchmarks/checker.py [--quick] [--corpora DIR]

Times are CPU time of ``check`` alone (everything after parsing, without explaining) unless the row says otherwise,
for one process, the best of several runs: on an idle machine that equals the elapsed time, and on a busy one nearly
so.  Each large row runs in a separate process, so that its peak memory is its own.

Every row has a calibration: the time of a fixed small piece of pure Python right before and right after it. Machines
differ, and some change their speed from minute to minute, so figures should be compared by their ratio to it.

``--quick`` divides the large sizes, and their bars, by ten.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checker import (
    CASRegister,
    FIFOQueue,
    History,
    KeyValue,
    Log,
    Model,
    MultiRegister,
    Operation,
    PriorityQueue,
    Register,
    Stack,
    check,
    check_transactions,
)
from checker.cli import main as check_command
from checker.codecs import read
from checker.testing.large import large_history

ROOT = Path(__file__).resolve().parent.parent
CORPORA = Path(os.environ.get("SPLITBRAIN_CORPORA", ROOT.parent / "shared" / "corpora"))
MODELS: dict[str, Model] = {
    "cas-register": CASRegister(),
    "register": Register(),
    "log": Log(),
    "fifo-queue": FIFOQueue(),
    "stack": Stack(),
    "priority-queue": PriorityQueue(),
}
#: Title of a row, measured value, bar, and whether the bar is met.
Row = tuple[str, str, str, bool]
#: Seeds of the row that depends most on luck.
SEEDS = range(1, 61)


def model_of(name: str) -> Model:
    """The model that an ``expected.json`` names."""
    if name.startswith("cas-register"):
        return CASRegister(initial=0 if "init 0" in name else None)
    if name.startswith("multi-register"):
        return MultiRegister(initial={"x": 0, "y": 0})
    return KeyValue() if name.startswith("kv") else Register()


def search_ms(history: Any, model: Model, runs: int = 3) -> tuple[float, Any]:
    """The best search time (ms) of some runs, and the verdict."""
    times = []
    for _ in range(runs):
        begun = time.process_time()
        result = check(history, model, explained=False, timeout_s=60)
        times.append(time.process_time() - begun)
    return min(times) * 1000, result.valid


def calibration_ms() -> float:
    """CPU time (ms) of 300,000 steps of a loop over a small dict, best of three."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        sums: dict[int, int] = {}
        for number in range(300_000):
            sums[number % 977] = sums.get(number % 977, 0) + number
        times.append(time.process_time() - begun)
    return min(times) * 1000


def calibrated(rows: Iterable[Row]) -> Iterator[tuple[Row, float, float]]:
    """Each row with the calibration before and after it."""
    before = calibration_ms()
    for row in rows:
        after = calibration_ms()
        yield row, before, after
        before = after


def corpus_rows(corpora: Path) -> Iterator[Row]:
    """Totals over the recorded histories, with every verdict compared."""
    for title, folder, chosen, bar_ms, most_ms in (
        ("52 etcd logs", "porcupine", "jepsen/", 13.0, 3.0),
        ("61 Knossos histories", "knossos", "", 20.0, None),
        ("kv c50-ok", "porcupine", "kv/c50-ok", 15.0, None),
        ("kv, all five", "porcupine", "kv/", 25.0, None),
        ("4 Redis Sentinel runs", "redis-sentinel-jepsen", "", None, None),
    ):
        expected = json.loads((corpora / folder / "expected.json").read_text())
        times, wrong = [], 0
        for name, about in expected.items():
            if name.startswith(chosen):
                took, verdict = search_ms(read(corpora / folder / name), model_of(about["model"]), runs=5)
                times.append(took)
                wrong += verdict is not about["linearizable"]
        total, most = sum(times), max(times)
        fine = not wrong and (bar_ms is None or total <= bar_ms) and (most_ms is None or most <= most_ms)
        bar = "-" if bar_ms is None else f"{bar_ms:.0f} ms" + (f", each {most_ms:.0f}" if most_ms else "")
        yield title, f"{total:.1f} ms, max {most:.2f}, {wrong} wrong", bar, fine


def ten_bad_keys(path: Path) -> History:
    """The history of a key-value file, with a value that was never written in one result of each key."""
    history = read(path)
    for rows in history.rows_by_key().values():
        gets = [row for row in rows if history.f[row] == "get" and history.status[row] == "ok"]
        history.result[gets[len(gets) * 9 // 10]] += "x 99 99 y"
    return history


def first_rows(corpora: Path) -> Iterator[Row]:
    """Histories with several invalid keys, checked up to the first: bars are half of Porcupine 1.0.2's time on one
    thread."""
    folder = corpora / "porcupine" / "kv"
    for title, history, bar_ms in (
        ("kv c10-bad, eight of ten keys invalid, --first", read(folder / "c10-bad.txt"), 0.46),
        ("kv c50-ok with ten keys spoiled, --first", ten_bad_keys(folder / "c50-ok.txt"), 72.0),
    ):
        times = []
        for _ in range(7):
            begun = time.process_time()
            result = check(history, KeyValue(), explained=False, first=True)
            times.append(time.process_time() - begun)
        took = min(times) * 1000
        shown = f"{took:.2f} ms, {result.verdict}, {result.stats['keys']} keys decided"
        yield title, shown, f"{bar_ms:.2f} ms", result.valid is False and took <= bar_ms


def _large(kind: str, operations: int, clients: int) -> dict[str, Any]:
    history = large_history(kind, operations, clients)
    times, results = [], []
    for _ in range(3):
        begun = time.process_time()
        if kind == "list-append":
            results.append(check_transactions(history))
        else:
            results.append(check(history, MODELS[kind], explained=False, memory_mb=900))
        times.append(time.process_time() - begun)
    return {
        "s": min(times),
        "verdict": str(results[0].verdict),
        "engine": ", ".join(results[0].stats["engines"]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _seeds(operations: int, clients: int) -> list[float]:
    """Search times (ms) of CAS histories of many seeds, sorted; infinite for those undecided after 20 s."""
    out = []
    for seed in SEEDS:
        history = large_history("cas-register", operations, clients, seed=seed)
        begun = time.process_time()
        decided = check(history, CASRegister(), explained=False, timeout_s=20).valid is True
        out.append((time.process_time() - begun) * 1000 if decided else float("inf"))
    return sorted(out)


def _spoiled(how: str, seed: int) -> History:
    """A history of 10,000 CAS operations by ten clients, 1 % with unknown outcome, with one kind of error."""
    history = large_history("cas-register", 10_000, 10, seed=seed, crash=0.01)
    reads = [row for row in range(len(history)) if history.f[row] == "read" and history.status[row] == "ok"]
    if how == "unwritten":
        history.result[reads[len(reads) * 9 // 10]] = "never written"
    elif how == "flipped":
        for row in random.Random(seed).sample(reads, 3):
            history.result[row] = ((history.result[row] or 0) + 1) % 5
    else:
        operations, end = [*history], 2 * len(history)
        for f, value, result in (("write", 77, 77), ("write", 78, 78), ("read", None, 77)):
            operations.append(Operation(process=-1, f=f, value=value, result=result, invoked=end, returned=end + 1))
            end += 2
        history = History.from_operations(operations)
    return history


def _crashes(how: str, seeds: int, timeout_s: float) -> dict[str, Any]:
    """Verdicts, elapsed times (explanation included) and peak memory of `_spoiled` histories."""
    took, verdicts = [], []
    for seed in range(1, seeds + 1):
        history = _spoiled(how, seed)
        started = time.perf_counter()
        verdicts.append(str(check(history, CASRegister(), timeout_s=timeout_s, memory_mb=900).verdict))
        took.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"took": sorted(took), "verdicts": verdicts, "peak_mib": peak}


#: Transactions that overlap in the middle of a valid history; for G1a the first of them fails.
PLANTED: dict[str, list[list[tuple[str, str, Any]]]] = {
    "G0": [
        [("append", "x", 1), ("append", "y", 1)],
        [("append", "x", 2), ("append", "y", 2)],
        [("r", "x", [1, 2]), ("r", "y", [2, 1])],
    ],
    "G1a": [[("append", "x", 1)], [("r", "x", [1])]],
    "G1b": [[("append", "x", 1), ("append", "x", 2)], [("r", "x", [1])]],
    "G1c": [[("append", "x", 1), ("r", "y", [1])], [("append", "y", 1), ("r", "x", [1])]],
    "internal": [[("append", "x", 1), ("r", "x", [])]],
    "incompatible-order": [[("append", "x", 1)], [("append", "x", 2)], [("r", "x", [1, 2])], [("r", "x", [2, 1])]],
    "garbage-read": [[("r", "x", [9])]],
    "lost-update": [[("r", "x", []), ("append", "x", 1)], [("r", "x", []), ("append", "x", 2)]],
    "G-single": [[("append", "x", 1), ("append", "y", 1)], [("r", "x", []), ("r", "y", [1])]],
    "G-nonadjacent": [
        [("append", "x", 1)],
        [("append", "y", 1)],
        [("r", "x", [1]), ("r", "y", [])],
        [("r", "x", []), ("r", "y", [1])],
    ],
    "G2": [[("r", "x", []), ("append", "y", 1)], [("r", "y", []), ("append", "x", 1)]],
    "stale read": [],
    "read of the first state at the end": [],
}


def _planted(kind: str, operations: int) -> History:
    """A list-append history that is valid except for one anomaly."""
    history = large_history("list-append", operations, 5)
    added = PLANTED[kind]
    if kind == "stale read":
        reads = [step for row in history.result for step in row if step[0] == "r" and len(step[2]) > 5]
        reads[len(reads) // 2][2] = reads[len(reads) // 2][2][:-4]
    elif not added:
        first = next(step[1] for row in history.result for step in row if step[0] == "append")
        history.result[-1] = [["r", first, []]]
    middle = operations // 2
    begun = history.invoked[middle]
    for column in (history.invoked, history.returned):
        column[:] = [position + 2 * len(added) * (position >= begun) for position in column]
    for number, transaction in enumerate(added):
        steps = [[f, f"planted {key}", value] for f, key, value in transaction]
        row = {
            "process": f"planted {number}",
            "f": "txn",
            "value": steps,
            "result": steps,
            "status": "fail" if kind == "G1a" and not number else "ok",
            "invoked": begun + number,
            "returned": begun + len(added) + number,
        }
        for name in ("process", "f", "key", "value", "result", "status", "invoked", "returned"):
            getattr(history, name).insert(middle + number, row.get(name))
        for times in (history.invoked_ns, history.returned_ns, history.node):
            times.insert(middle + number, None)
    return history


def _anomaly(kind: str, operations: int) -> dict[str, Any]:
    """Best times, measured in alternation and with explanation, of a valid history and the same with one anomaly."""
    histories = [large_history("list-append", operations, 5), _planted(kind, operations)]
    times: list[list[float]] = [[], []]
    level = "strict-serializable" if kind == "G2" or not PLANTED[kind] else "snapshot-isolation"
    result = None
    for _ in range(3):
        for history, took in zip(histories, times, strict=True):
            begun = time.process_time()
            result = check_transactions(history, level=level)
            took.append(time.process_time() - begun)
    assert result is not None
    found = set(result.stats["anomalies"])
    return {"valid_s": min(times[0]), "s": min(times[1]), "verdict": str(result.verdict), "found": sorted(found)}


def anomaly_rows(scale: int) -> Iterator[Row]:
    """Transactions with an anomaly: at most twice the time of as many valid ones."""
    operations = 100_000 // scale
    bar_s = 1.5 / scale
    for kind in PLANTED:
        out = alone(_anomaly, kind, operations)
        wanted = kind if PLANTED[kind] else "G-single"
        is_found = out["verdict"] == "invalid" and any(name.startswith(wanted) for name in out["found"])
        ratio = out["s"] / out["valid_s"]
        shown = f"{out['s'] * 1000:.0f} ms, valid {out['valid_s'] * 1000:.0f}, {ratio:.2f} times, "
        shown += ", ".join(out["found"])
        fine = is_found and ratio <= 2 and out["valid_s"] <= bar_s
        bar = f"2 times, valid {bar_s * 1000:.0f} ms"
        yield f"list-append, {operations:,} transactions, one {kind}", shown, bar, fine


def _all_open(operations: int) -> dict[str, Any]:
    """Check reads and writes of five values, all open at once, within 5 s and 200 MiB."""
    rng = random.Random(1)
    events = [
        {"process": process, "type": "invoke", "f": "write" if process % 2 else "read", "value": rng.randrange(5)}
        for process in range(operations)
    ]
    events += [{**event, "type": "ok", "value": rng.randrange(5)} for event in events]
    history = History.of(events)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    result = check(history, Register(), timeout_s=5, memory_mb=200)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"s": time.perf_counter() - started, "verdict": str(result.verdict), "grown_mib": grown}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, computed in a separate process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def large_rows(scale: int) -> Iterator[Row]:
    """Random valid histories of growing size."""
    for kind, operations, clients, bar_s in (
        ("cas-register", 10_000, 5, 0.035),
        ("cas-register", 10_000, 10, 0.060),
        ("cas-register", 10_000, 20, 0.250),
        ("cas-register", 100_000, 5, 0.700),
        ("register", 1_000_000, 5, 0.700),
        ("fifo-queue", 1_000_000, 5, 1.200),
        ("log", 1_000_000, 5, 0.600),
        ("stack", 100_000, 5, None),
        ("priority-queue", 100_000, 5, None),
        ("list-append", 100_000, 5, 1.200),
    ):
        big = operations >= 100_000
        size = operations // scale if big else operations
        out = alone(_large, kind, size, clients)
        bar = None if bar_s is None else bar_s / (scale if big else 1)
        fine = out["verdict"] == "valid" and (bar is None or out["s"] <= bar) and out["peak_mib"] <= 1024
        shown = f"{out['s'] * 1000:.0f} ms, {out['verdict']}, peak {out['peak_mib']:.0f} MiB, {out['engine']}"
        limit = "- " if bar is None else f"{bar * 1000:.0f} ms"
        yield f"{kind}, {size:,} operations, {clients} clients", shown, f"{limit}, 1024 MiB", fine
    times = alone(_seeds, 1_000, 50)
    middle, most = times[len(times) // 2], times[len(times) * 9 // 10]
    shown = f"median {middle:.1f} ms, nine of ten {most:.1f}, worst {times[-1]:.0f} of {len(times)} seeds"
    yield "cas-register, 1,000 operations, 50 clients", shown, "30 ms, nine of ten", most <= 30
    for what, how, seeds in (
        ("a read of what nobody wrote", "unwritten", 4),
        ("a stale read at the end", "stale", 4),
        ("three reads changed at random", "flipped", 8),
    ):
        out = alone(_crashes, how, seeds, 4.0)
        decided = sum(verdict != "unknown" for verdict in out["verdicts"])
        fine = out["took"][-1] <= 5 and out["peak_mib"] <= 1024 and (how == "flipped" or decided == seeds)
        shown = f"{decided} of {seeds} decided, median {out['took'][seeds // 2]:.2f} s, longest {out['took'][-1]:.2f} s"
        shown += f", peak {out['peak_mib']:.0f} MiB"
        yield f"CAS, 10,000 operations, 10 clients, 1 % crashed, {what}", shown, "4 s and 900 MiB kept", fine
    out = alone(_all_open, 20_000)
    shown = f"{out['verdict']} after {out['s']:.1f} s, {out['grown_mib']:.0f} MiB more"
    fine = out["s"] <= 6 and out["grown_mib"] <= 200
    yield "register, 20,000 operations all open at once", shown, "5 s and 200 MiB kept", fine


def _write_jsonl(path: str, operations: int) -> None:
    history = large_history("register", operations, 5)
    with open(path, "w", encoding="utf-8") as file:
        events = [(position, row, 0) for row, position in enumerate(history.invoked)]
        events += [(position, row, 1) for row, position in enumerate(history.returned)]
        events.sort()
        for index, (_, row, returned) in enumerate(events):
            event = {"index": index, "time": index * 1000, "process": history.process[row]}
            event |= {"type": "ok" if returned else "invoke", "f": history.f[row]}
            event["value"] = history.result[row] if returned else history.value[row]
            file.write(json.dumps(event) + "\n")


def _command(path: str) -> tuple[float, float, float, int]:
    started, begun = time.perf_counter(), time.process_time()
    status = check_command([path, "--model", "register"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return time.process_time() - begun, time.perf_counter() - started, peak, status


def _parse(path: str) -> float:
    begun = time.process_time()
    history = read(path)
    return 2 * len(history) / (time.process_time() - begun)


def end_to_end_rows(scale: int, corpora: Path) -> Iterator[Row]:
    """The command on a large file, and parsing alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "history.jsonl")
        operations = 1_000_000 // scale
        alone(_write_jsonl, path, operations)
        took, wall, peak, status = alone(_command, path)
        shown = f"{wall:.2f} s by the clock, {took:.2f} s of processor, peak {peak:.0f} MiB, status {status}"
        fine = wall <= 6 and peak <= 1536 and status == 0
        yield f"harness check, register, {operations:,} operations of JSONL", shown, "6 s, 1536 MiB", fine
        speed = max(alone(_parse, path) for _ in range(2))
        yield "parsing JSONL", f"{speed:,.0f} events/s", "400,000 events/s", speed >= 400_000
    if corpora.is_dir():
        edn = corpora / "redis-sentinel-jepsen"
        largest = max(edn.rglob("*.edn"), key=lambda file: file.stat().st_size)
        speed = max(_parse(str(largest)) for _ in range(5))
        yield "parsing EDN", f"{speed:,.0f} events/s", "150,000 events/s", speed >= 150_000


def main() -> int:
    """Print the table; status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Benchmarks of the checker")
    parser.add_argument("--quick", action="store_true", help="a tenth of the large sizes")
    parser.add_argument("--corpora", type=Path, default=CORPORA, help="folder of recorded histories")
    options = parser.parse_args()
    scale = 10 if options.quick else 1
    corpus = options.corpora.is_dir()
    if not corpus:
        print(f"no recorded histories at {options.corpora}: those rows are left out")
    parts = [corpus_rows(options.corpora), first_rows(options.corpora)] if corpus else []
    parts += [large_rows(scale), anomaly_rows(scale), end_to_end_rows(scale, options.corpora)]
    rows = list(calibrated(chain.from_iterable(parts)))
    width = max(len(row[0]) for row, _, _ in rows)
    for (what, seen, bar, fine), before, after in rows:
        shown = f"calibration {before:.0f}, {after:.0f} ms"
        print(f"{'ok  ' if fine else 'MISS'}  {what:<{width}}  {seen}  (bar: {bar}; {shown})")
    return 0 if all(row[3] for row, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
