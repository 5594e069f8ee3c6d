"""How soon `harness serve` shows a store of 10,000 runs, and a new run.

    python -m benchmarks.serve [--runs 10000]

Measured over HTTP on a separate server: the time from its start to its first page, with and without the cached
summaries; further pages; the time from the beginning of a run (when its directory exists) until the list shows it, and
from an event in its history until the live view shows it. Goals: pages within a second, news within a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.run_index import CACHE
from harness.store import Store

__all__ = ["main", "make_store"]

REPEATS = 9
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = (("kill", True), ("partition", False), ("pause", "unknown"), ("clock", True))
TIMEOUT_S = 60.0
POLL_S = 0.01
"""Time between two polls of the list: far below the goal."""


def make_store(root: Path, runs: int) -> None:
    """Make a store of `runs` finished runs, a minute apart, with small files like those of real runs."""
    for number in range(runs):
        nemesis, valid = KINDS[number % len(KINDS)]
        started = FIRST + timedelta(minutes=number)
        directory = root / f"broker-register-{nemesis}" / f"{started:%Y%m%dT%H%M%SZ}"
        directory.mkdir(parents=True)
        test = {
            "system": "broker", "workload": "register", "nemesis": [nemesis], "cluster": "sim", "seed": number,
            "nodes": 5, "settings": {}, "time_limit_s": 60.0, "concurrency": 10, "rate": 200.0,
        }  # fmt: skip
        fault = {"id": "f1", "nemesis": nemesis, "variant": "any", "proven": True, "healed": True, "start_ns": 10**9}
        results = {
            "valid": valid, "reason": "made for a measurement", "ops": {"ok": 11_000, "fail": 3, "info": 60},
            "duration_s": 4.5, "faults": [fault] * 6, "started_at": started.isoformat(), "seed": number,
            "checks": {"linearizable": {"valid": valid, "reason": "8 keys"}}, "ops_by_f": {"read": {"ok": 11_000}},
        }  # fmt: skip
        (directory / "test.json").write_text(json.dumps(test))
        (directory / "results.json").write_text(json.dumps(results))
        (directory / "history.jsonl").write_text("")


@contextmanager
def _server(root: Path) -> Iterator[tuple[int, float]]:
    """Run a server; yields its port, and the time (s) until it reported it."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "serve", "--store", str(root), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found is not None, "the server has not started"
        yield int(found[1]), time.monotonic() - began_s
    finally:
        process.terminate()
        process.wait()


def _page(port: int, path: str = "/") -> tuple[float, str]:
    """The time (s) that a page takes, and its text."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, f"{path}: {answer.status}"
    return time.monotonic() - began_s, text


def _until_shown(port: int, store: Store) -> float:
    """The time (s) from the beginning of a run until the list shows it as running."""
    run = store.create("broker-register-live")
    began_s = time.monotonic()
    try:
        run.write_test({"system": "broker", "workload": "register", "nemesis": [], "cluster": "local", "seed": 1})
        while run.path.name not in (_page(port, "/?verdict=running")[1]):
            assert time.monotonic() - began_s < TIMEOUT_S, "the run is never shown"
            time.sleep(POLL_S)
        return time.monotonic() - began_s
    finally:
        run.finish()


def _until_live(port: int, store: Store) -> float:
    """The time (s) from an event in the history of a running run until its live view shows it."""
    run = store.create("broker-register-live")
    try:
        run.write_test({"system": "broker", "workload": "register", "nemesis": [], "cluster": "local", "seed": 1})
        run.history_path.write_text("")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        connection.request("GET", f"/runs/{run.name}/events")
        stream = connection.getresponse()
        stream.readline()
        event = {"index": 0, "time": 1, "process": 0, "type": "invoke", "f": "read", "value": None}
        lines = [event, {**event, "index": 1, "time": 2_000_000, "type": "ok"}]
        began_s = time.monotonic()
        run.history_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        while b'"ok": 1' not in stream.readline():
            assert time.monotonic() - began_s < TIMEOUT_S, "the event is never shown"
        took_s = time.monotonic() - began_s
        connection.close()
        return took_s
    finally:
        run.finish()


def _say(what: str, measured_s: list[float]) -> None:
    print(f"{what:62} median {statistics.median(measured_s):7.3f} s   most {max(measured_s):7.3f} s", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "store"
        make_store(root, count)
        store = Store(root)
        print(f"a store of {count:,} runs")
        for what in ("start, nothing kept yet", "start, with the summaries kept"):
            with _server(root) as (port, took_s):
                _say(what, [took_s])
                _say("  its first page", [_page(port)[0]])
        assert (root / CACHE).exists()
        with _server(root) as (port, _):
            paths = {
                "the list": "/", "a filter": "/?verdict=invalid", "words": "/?words=partition+1234",
                "the last page": f"/?page={max(1, count // 100)}",
            }  # fmt: skip
            for what, path in paths.items():
                _say(what, [_page(port, path)[0] for _ in range(REPEATS)])
            looks: dict[str, Callable[[int, Store], float]] = {
                "a run that begins, until the list shows it": _until_shown,
                "an event of a run at work, until the live view says it": _until_live,
            }
            for what, look in looks.items():
                _say(what, [look(port, store) for _ in range(REPEATS)])


if __name__ == "__main__":
    main()
