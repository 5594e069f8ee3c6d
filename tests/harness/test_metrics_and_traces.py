"""A whole run of a system that has a page of metrics and records the `traceparent` of every request."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.metrics.samples import read_samples

Here = Callable[..., subprocess.CompletedProcess[str]]

PLUGIN = '''
"""Traced."""

from harness.sdk import Client, Host, JsonHttp, System

SERVER = """
import http.server, json, sys
data, heard = {}, {"writes": 0}
class Serve(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/metrics":
            text = f"# TYPE kv_writes_total counter\\\\nkv_writes_total {heard['writes']}\\\\n"
            return self.say(text + 'kv_requests{kind="a"} 1\\\\nkv_requests{kind="b"} 2\\\\n')
        self.note()
        self.say(json.dumps(data.get(self.path)))
    def do_PUT(self):
        self.note()
        data[self.path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        heard["writes"] += 1
        self.say("null")
    def note(self):
        print(f"{self.headers['traceparent']} {self.headers['x-own']}", flush=True)
    def say(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer((sys.argv[1], 7000), Serve).serve_forever()
"""


class Traced(System):
    ports = {"client": 7000}
    metrics = {"client/metrics": {"rate(kv_writes_total)": "Writes per second", "kv_gone": "Gone"}}

    def files(self, host: Host) -> dict[str, str]:
        return {"server.py": SERVER}

    def command(self, host: Host) -> list[str]:
        return [host.python, host.path("server.py"), host.ip]


class TracedClient(Client):
    async def open(self) -> None:
        self.http = JsonHttp(self.url("client", self.hosts[0]))

    async def close(self) -> None:
        await self.http.close()

    async def read(self, key):
        return await self.http.get(f"/{key}")

    async def write(self, key, value):
        assert self.traceparent is not None
        await self.http.put(f"/{key}", value)
'''

RUN = ("run", "mine.py", "--cluster", "local", "--nodes", "2", "--rate", "30", "--concurrency", "3")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, harness_here: Here) -> Path:
    """The directory with the store of one run, with a kill of the host that serves nobody."""
    directory = tmp_path_factory.mktemp("made")
    (directory / "mine.py").write_text(PLUGIN)
    words = ("--time-limit", "8", "--nemesis", "kill=sigkill@n2", "--nemesis-interval", "3")
    done = harness_here(*RUN, *words, "--metrics", 'kv_requests{kind="b"}', "--metrics", "kv_requests", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory / "out").write_text(done.stdout)
    return directory


def run_of(made: Path) -> Path:
    return next(made.glob("store/*/2*"))


def test_the_metrics_of_a_run_are_stored_drawn_and_summed_up(made: Path) -> None:
    run = run_of(made)
    samples = read_samples(run / "metrics.jsonl")
    assert samples is not None and samples.damaged == 0
    assert [lane.text for lane in samples.lanes] == [
        "rate(kv_writes_total)", "kv_gone", 'kv_requests{kind="b"}', "kv_requests",
    ]  # fmt: skip
    writes, gone, one, both = samples.lanes
    assert max(value or 0.0 for _, value in writes.lines["n1"].points()) > 0
    assert gone.is_empty
    assert {value for _, value in one.lines["n1"].points()} - {None} == {2.0}
    assert {value for _, value in both.lines["n1"].points()} - {None} == {3.0}
    assert None in {value for _, value in samples.answers["n2"].points()}  # while it was killed
    assert 1.0 in {value for _, value in samples.answers["n2"].points()}
    printed = " ".join((made / "out").read_text().split()).partition(" metrics ")[2]  # a narrow terminal wraps
    assert "from 2 hosts" in printed and re.search(r"without an answer \(.*n2 \d", printed), printed
    assert "on no page: kv_gone" in printed
    page = (run / "report.html").read_text()
    assert "Writes per second" in page and "On no page of metrics that any host sent: kv_gone." in page
    test = json.loads((run / "test.json").read_text())
    assert test["metrics"] == ['kv_requests{kind="b"}', "kv_requests"]
    results = json.loads((run / "results.json").read_text())
    assert "--metrics 'kv_requests{kind=\"b\"}' --metrics kv_requests" in results["replay"]


def test_spans_have_the_ids_that_the_system_under_test_was_sent(made: Path, harness_here: Here, tmp_path: Path) -> None:
    run = run_of(made)
    out = tmp_path / "spans.jsonl"
    done = harness_here("export", "latest", "--format", "otlp", "--out", str(out), cwd=made)
    assert done.returncode == 0 and done.stdout == f"{out}\n" and done.stderr == ""
    spans: list[dict[str, Any]] = [
        span
        for line in out.read_text().splitlines()
        for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]
    operations = {f"00-{span['traceId']}-{span['spanId']}-01": span for span in spans if span["kind"] == 3}
    log = next((run / "nodes" / "n1").glob("mine.log")).read_text()
    heard = re.findall(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", log)  # threads may print on one line
    assert len(heard) > 50 and set(heard) <= set(operations)
    assert len(set(heard)) == len(heard)  # each operation sends one request
    completed = {header for header, span in operations.items() if "status" not in span}
    assert completed <= set(heard)
    began_ns = json.loads((run / "results.json").read_text())["load_began_wall_ms"] * 1_000_000
    assert all(began_ns <= int(span["startTimeUnixNano"]) < began_ns + 60_000_000_000 for span in operations.values())


def test_a_run_without_a_verdict_has_the_same_ids(made: Path, harness_here: Here, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    run = run_of(made)
    assert harness_here("export", str(run), "--format", "otlp", "--out", str(whole), cwd=made).returncode == 0
    (run / "results.json").rename(run / "hidden.json")
    try:
        done = harness_here("export", str(run), "--format", "otlp", "--out", str(killed), cwd=made)
    finally:
        (run / "hidden.json").rename(run / "results.json")
    assert done.returncode == 0 and "when the load began was not stored" in done.stderr

    def ids(path: Path) -> list[str]:
        return [part[:32] for line in path.read_text().splitlines() for part in line.split('"traceId":"')[1:]]

    assert ids(whole) == ids(killed)


def test_metrics_can_be_turned_off(made: Path, harness_here: Here, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    done = harness_here(*RUN, "--time-limit", "1.5", "--metrics", "none", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("store/*/2*/metrics.jsonl")) and "metrics " not in done.stdout.replace(
        "--metrics", ""
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--metrics", "rate("), "--metrics: 'rate(' is not a series"),
        (("--metrics", "none", "--metrics", "up"), "--metrics none cannot be combined with other values"),
        (("--system", "toy", "--metrics", "up"), "system toy declares no page of metrics"),
        (("--system", "broker", "--cluster", "sim", "--metrics", "up"), "simulated hosts have no page of metrics"),
    ],
)
def test_a_wrong_option_is_one_line(harness_here: Here, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    name = () if "--system" in words else ("mine.py",)
    done = harness_here("run", *name, "--cluster", "local", "--nodes", "2", *words, cwd=tmp_path)
    assert done.returncode == 254 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_list_of_a_system_shows_its_metrics(harness_here: Here, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "bare.py").write_text(PLUGIN.replace("metrics = {", "metrics = {} and {"))
    shown = " ".join(harness_here("list", "mine.py", cwd=tmp_path).stdout.split())
    assert "metrics: rate(kv_writes_total) (client/metrics), kv_gone (client/metrics)" in shown
    assert "metrics" not in harness_here("list", "bare.py", cwd=tmp_path).stdout


def test_a_plug_in_with_wrong_metrics_is_told_which(harness_here: Here, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN.replace('"client/metrics"', '"clint/metrics"'))
    done = harness_here("list", "mine.py", cwd=tmp_path)
    assert done.returncode == 254 and "metrics has 'clint/metrics', not \"PORT/PATH\"" in done.stderr
