"""Histories and results of made-up runs, cheap and always the same."""

import random

import pytest

from harness.history_writer import HistoryWriter
from harness.store import Store

HOSTS = ["n1", "n2", "n3", "n4", "n5"]
SHAPES = ("halves", "one", "majorities-ring", "leader-alone")
GRUDGES = {
    "halves": {"n1": ["n3", "n4", "n5"], "n2": ["n3", "n4", "n5"]}
    | {host: ["n1", "n2"] for host in ("n3", "n4", "n5")},
    "one": {"n4": ["n1", "n2", "n3", "n5"]} | {host: ["n4"] for host in ("n1", "n2", "n3", "n5")},
    "majorities-ring": {"n1": ["n3", "n4"], "n2": ["n4", "n5"], "n3": ["n1", "n5"], "n4": ["n1", "n2"], "n5": ["n2"]},
    "leader-alone": {"n2": ["n1", "n3", "n4", "n5"]},
}
TEST = {
    "system": "broker",
    "cluster": "netns",
    "nodes": 5,
    "workload": "register",
    "nemesis": ["partition"],
    "time_limit_s": 60.0,
    "concurrency": 10,
    "rate": 0.0,
    "seed": 4711,
    "settings": {"read_mode": "read_index"},
}


def make_faults(seconds, interval=5):
    """Partitions of the cycling shapes, `interval` s on and off."""
    faults = []
    for number, start in enumerate(range(interval, seconds - interval + 1, 2 * interval)):
        shape = SHAPES[number % len(SHAPES)]
        faults.append(
            {
                "id": f"f{number + 1}",
                "nemesis": "partition",
                "variant": shape,
                "grudge": GRUDGES[shape],
                "start_ns": start * 10**9,
                "end_ns": (start + interval) * 10**9,
                "proven": True,
                "healed": True,
                "proof": {"proven": True, "links": 20, "failed": [], "detail": "12 links cut, 8 others pass"},
                "heal_proof": {"proven": True, "links": 20, "failed": [], "detail": "all 20 links pass"},
            }
        )
    return faults


def write_run(path, *, seconds=60, operations=6000, threads=10, faults=(), seed=1):
    """A register history whose latencies and outcomes get worse at the start of each fault."""
    rng = random.Random(seed)
    clock = [0]
    writer = HistoryWriter(path, lambda: clock[0])
    step_ns = seconds * 10**9 // max(1, operations)
    events = []
    processes, next_process, free_at = list(range(threads)), threads, [0] * threads
    for number in range(operations):
        now_ns = number * step_ns
        thread = number % threads
        if free_at[thread] > now_ns:
            continue  # this client still waits for an answer
        start_ns = now_ns
        young = any(0 <= start_ns - fault["start_ns"] < 1.2e9 for fault in faults)
        latency_ns = int(rng.lognormvariate(14.1, 0.45))
        kind, error = "ok", None
        if young:
            latency_ns = int(latency_ns * rng.uniform(5, 400))
            luck = rng.random()
            if luck < 0.3:
                kind, error, latency_ns = "info", "timeout", 3 * 10**9
            elif luck < 0.45:
                kind, error, latency_ns = "fail", "NOT_LEADER: this node follows n3", int(latency_ns / 30)
        f, key = ("write", "read")[rng.random() < 0.5], rng.randrange(8)
        operation = {"process": processes[thread], "f": f, "key": key, "value": number if f == "write" else None}
        events.append((start_ns, {**operation, "type": "invoke"}))
        done = {**operation, "type": kind}
        if kind == "ok":
            done |= {"node": rng.choice(HOSTS), "value": number if f == "write" else rng.randrange(number + 1)}
        else:
            done["error"] = error
        events.append((start_ns + latency_ns, done))
        free_at[thread] = start_ns + latency_ns + 1
        if kind == "info":
            processes[thread], next_process = next_process, next_process + 1
    for fault in faults:
        value = {name: fault[name] for name in ("id", "nemesis", "variant", "grudge")}
        for f, when, proof in (("inject", "start_ns", "proof"), ("heal", "end_ns", "heal_proof")):
            events.append((fault[when], {"process": "nemesis", "type": "invoke", "f": f, "value": value}))
            proven = {"process": "nemesis", "type": "info", "f": f, "value": {**value, "proof": fault[proof]}}
            events.append((fault[when] + 10**7, proven))
    events.sort(key=lambda item: item[0])
    for time_ns, event in events:
        clock[0] = time_ns
        writer.append(event)
    writer.close()


def make_results(faults=(), **changes):
    """results.json's content for a valid run."""
    terms = [{"term": 1, "leader": "n2", "start_ns": -(10**9)}]
    terms += [
        {"term": number + 2, "leader": HOSTS[(number * 2) % 5], "start_ns": fault["start_ns"] + 7 * 10**8}
        for number, fault in enumerate(faults)
    ]
    return {
        "valid": True,
        "reason": "",
        "ops": {"invoke": 6000, "ok": 5900, "fail": 40, "info": 60},
        "faults": list(faults),
        "checks": {
            "linearizable": {
                "valid": True,
                "reason": "8 keys, each linearizable",
                "stats": {"engines": {"A3 register zones": 8}, "operations": 6000, "keys": 8},
                "witness": None,
            },
            "replicas": {
                "valid": True,
                "reason": "5 replicas hold the same 1834008 committed bytes",
                "committed_bytes": dict.fromkeys(HOSTS, 1_834_008),
                "compared_from": 0,
                "compared_to": 1_834_008,
                "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            },
            "leaders": {
                "valid": True,
                "reason": f"{len(terms)} terms with a leader, one each",
                "terms_with_leader": len(terms),
                "terms": terms,
            },
        },
        "doubts": [],
        "hosts": HOSTS,
        "seed": 4711,
        "replay": "harness run --cluster netns --system broker --nodes 5 --workload register --nemesis partition "
        "--nemesis-interval 5 --time-limit 60 --concurrency 10 --rate 0 --seed 4711",
        "git_commit": "0353ef61c1b2a3d4e5f60718293a4b5c6d7e8f90",
        "git_dirty": False,
        "started_at": "2026-01-31T12:00:00+00:00",
        "duration_s": 71.25,
        "cluster_detail": "running as root, a namespace for each node",
        **changes,
    }


def make_witness():
    """A stale read as the checker reports it."""

    def operation(process, f, value, result, start_ms, end_ms, kind="ok", node="n3"):
        return {
            "index": start_ms,
            "process": process,
            "f": f,
            "type": kind,
            "key": 5,
            "value": value,
            **({"result": result, "node": node} if kind == "ok" else {"error": "timeout"}),
            "invoked": start_ms,
            "returned": end_ms,
            "invoked_ns": start_ms * 10**6,
            "returned_ns": end_ms * 10**6,
        }

    return {
        "text": "Process 7 read 17 from n2 at 36.412 s, but write 18 had completed at 35.981 s and read 18 before it "
        "began: the value 17 had already been replaced.",
        "key": 5,
        "minimal": True,
        "note": "",
        "operations": [
            operation(3, "write", 17, 17, 34900, 34903, node="n2"),
            operation(0, "write", 18, 18, 35870, 35981, node="n4"),
            operation(12, "read", None, 18, 36100, 36104, node="n4"),
            operation(7, "read", None, 17, 36409, 36412, node="n2"),
        ],
        "edges": [
            {"source": 0, "target": 1, "kind": "realtime", "reason": "write 17 returned before write 18 was invoked"},
            {"source": 1, "target": 2, "kind": "wr", "reason": "the read returned what write 18 wrote"},
            {"source": 2, "target": 3, "kind": "realtime", "reason": "the read of 18 returned before the other began"},
            {"source": 3, "target": 1, "kind": "rw", "reason": "a read of 17 must come before 18 replaces it"},
        ],
    }


@pytest.fixture
def run(tmp_path):
    """A run's directory in a store, without content."""
    return Store(tmp_path / "store").create("broker-register-partition")
