"""A harness that is killed (SIGKILL) at random moments under every nemesis, and `harness clean` after it.

Nothing of the run may be left, and what belongs to others must be as it was. Two kills a cluster by default; more,
and other moments, by the environment:

    SPLITBRAIN_KILLS=30 SPLITBRAIN_KILLS_SEED=7 pytest -s tests/harness/test_killed_runs.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.clusters.agent_file_systems import why_no_file_systems
from harness.clusters.control_groups import cgroup_parents
from harness.clusters.netns_trial import why_no_namespaces
from harness.process_table import find_processes, marked_with
from harness.run_state import KIND_CGROUP, KIND_FILE, KIND_MOUNT, KIND_NETNS, RUN_VARIABLE, STATE_DIR_VARIABLE, RunState
from nemesis.mechanisms.shim import why_no_shim

WHY_NOT = (
    "needs root" if os.geteuid() != 0 else why_no_namespaces(in_user_namespace=False) or why_no_file_systems()
) or why_no_shim()

KILLS = int(os.environ.get("SPLITBRAIN_KILLS", "2"))

pytestmark = [
    pytest.mark.timeout(90 * max(2, KILLS)),
    pytest.mark.root,
    pytest.mark.netns,
    pytest.mark.cluster,
    pytest.mark.serial,
    pytest.mark.xdist_group("clean"),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"not every fault is available: {WHY_NOT}"),
]

SEED = int(os.environ.get("SPLITBRAIN_KILLS_SEED", "1"))
STAGES = ("start", "run", "load", *(f"event {number}" for number in range(1, 25, 2)))
"""The stage from which the delay of a kill counts: the start, a state, a history, or a number of fault events.
Delays from the start alone would be too short on a busy machine and too long on an idle one."""

WAYS = (
    ("all", "auto"),
    ("disk-stall,disk-slow,disk-error,disk-full,power,clock", "seccomp"),
    ("resources,name-service,slow-client,clock=slew,clock=step", "auto"),
    ("clock,disk-stall=fsync,name-service,resources=memory", "seccomp"),
)
"""The nemeses and the mechanism of successive kills: all of them, and more often those that have helper processes or
set limits."""

MAX_DELAY_S = 1.5
"""How long the harness runs after that stage, at most."""

TIMEOUT_S = 120.0


def lines_of(path: str) -> set[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return set(file.read().splitlines())


def output_of(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def left_of(words: list[str]) -> list[str]:
    """The machine's namespaces, mounts, loop devices, control groups, rules and network devices whose text has one of
    these words: ids or directories of runs."""
    found = set(os.listdir("/run/netns")) | set(os.listdir("/sys/class/net"))
    found |= {f"mounted: {line.split()[4]}" for line in lines_of("/proc/self/mountinfo")}
    found |= {f"loop: {line}" for line in output_of("losetup", "--all").splitlines()}
    found |= {os.path.join(parent, name) for parent in cgroup_parents() for name in os.listdir(parent)}
    found |= {f"rule: {line}" for line in output_of("nft", "list", "ruleset").splitlines()}
    return sorted(text for text in found if any(word in text for word in words))


class Foreign:
    """Another run, alive because it belongs to this process, with one resource of each kind."""

    def __init__(self, base: Path, state: str) -> None:
        name = f"foreign{os.getpid()}"
        self.run = RunState.create(name, state_root=state)
        self.namespace = f"sb-{name}-n1"
        self.file = base / "faults.control"
        self.mounted = base / "mounted"
        self.group = os.path.join(cgroup_parents()[0], f"splitbrain-{name}-n1")
        self.run.claim(KIND_NETNS, self.namespace)
        output_of("ip", "netns", "add", self.namespace)
        rules = "table inet splitbrain { chain input { type filter hook input priority 0; ip saddr 10.77.0.9 drop; }; }"
        output_of("ip", "netns", "exec", self.namespace, "nft", rules)
        self.run.claim(KIND_FILE, str(self.file))
        self.file.write_text("a skewed clock")
        self.run.claim(KIND_MOUNT, str(self.mounted))
        self.mounted.mkdir()
        image = base / "disk.img"
        image.write_bytes(bytes(1 << 20))
        output_of("mkfs.ext4", "-q", "-F", str(image))
        output_of("mount", "-o", "loop", str(image), str(self.mounted))
        self.run.claim(KIND_CGROUP, self.group)
        os.mkdir(self.group)
        self.process = subprocess.Popen(["sleep", "3600"], env={**os.environ, **self.run.environment})
        self.run.claim_process(self.process.pid)
        self.before = self.looks()

    def looks(self) -> dict[str, object]:
        rules = output_of("nsenter", f"--net=/run/netns/{self.namespace}", "nft", "list", "ruleset")
        is_there = left_of([self.run.run_id, str(self.mounted.parent)])
        return {"rules": rules, "file": self.file.read_text(), "status": self.process.poll(), "is": is_there}

    def remove(self) -> None:
        self.process.kill()
        self.process.wait()
        output_of("umount", str(self.mounted))
        output_of("ip", "netns", "del", self.namespace)
        os.rmdir(self.group)


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    (tmp_path / "foreign").mkdir()
    thing = Foreign(tmp_path / "foreign", str(tmp_path / "state"))
    try:
        yield thing
    finally:
        thing.remove()


def last_fault(store: Path) -> str:
    """What the nemesis was doing when the harness was killed, according to the history."""
    for history in store.glob("*/*/history.jsonl"):
        lines = history.read_text(errors="replace").splitlines()
        for line in reversed(lines):
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the last line may be half a line
            if event["process"] == "nemesis":
                value = event["value"]
                return f"{event['f']} {event['type']} {value['nemesis']}={value['variant']}"
        return "no fault yet" if lines else "no load yet"
    return "no run yet"


def has_reached(stage: str, store: Path, state: Path, foreign: str) -> bool:
    if stage == "start":
        return True
    if stage == "run":
        return any(path.stem != foreign for path in state.glob("*.jsonl"))
    [history, *_] = [*store.glob("*/*/history.jsonl"), None]
    if history is None:
        return False
    events = history.read_text(errors="replace").count('"process":"nemesis"')
    return stage == "load" or events >= int(stage.split()[1])


@pytest.mark.parametrize("cluster", ["netns", "local"])
def test_clean_removes_everything_that_a_killed_harness_left(cluster: str, tmp_path: Path, foreign: Foreign) -> None:
    rng = random.Random(f"{SEED}/{cluster}")
    environment = {**os.environ, STATE_DIR_VARIABLE: str(tmp_path / "state"), "TMPDIR": str(tmp_path / "temp")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    (tmp_path / "temp").mkdir()
    harness = [sys.executable, "-m", "harness"]
    for number in range(KILLS):
        store = tmp_path / f"store{number}"
        stage, rest_s = rng.choice(STAGES), rng.uniform(0, MAX_DELAY_S)
        nemesis, mechanism = WAYS[number % len(WAYS)]
        if cluster == "netns" and nemesis != "all":
            nemesis += ",link=corrupt"  # the local cluster proxies streams and cannot corrupt packets
        if cluster == "local":
            nemesis = nemesis.replace(",resources=memory", "")  # its hosts have no control groups
        words = ["run", "--cluster", cluster, "--nodes", "3", "--nemesis", nemesis, "--nemesis-interval", "1"]
        words += ["--mechanism", mechanism]
        words += ["--time-limit", "60", "--rate", "50", "--seed", str(rng.getrandbits(32)), "--store", str(store)]
        with open(tmp_path / f"run{number}.log", "wb") as log:
            child = subprocess.Popen([*harness, *words], env=environment, stdout=log, stderr=log, cwd=tmp_path)
            try:
                deadline_s = time.monotonic() + TIMEOUT_S
                while not has_reached(stage, store, tmp_path / "state", foreign.run.run_id):
                    assert child.poll() is None, (tmp_path / f"run{number}.log").read_text()
                    assert time.monotonic() < deadline_s, f"{stage} was never reached"
                    time.sleep(0.02)
                with pytest.raises(subprocess.TimeoutExpired):
                    child.wait(timeout=rest_s)
            finally:
                child.send_signal(signal.SIGKILL)
                child.wait()
        at = last_fault(store)
        runs = [path.stem for path in (tmp_path / "state").glob("*.jsonl") if path.stem != foreign.run.run_id]
        cleaned = subprocess.run(
            [*harness, "clean"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        removed = len(cleaned.stdout.splitlines()) + len(cleaned.stderr.splitlines())
        when = f"{mechanism}, {stage}, killed {rest_s:.1f} s later ({at})"
        print(f"{cluster} {number}: {when}; clean removed {removed}", flush=True)
        assert cleaned.returncode == 0, cleaned.stdout + cleaned.stderr
        assert len(runs) <= 1
        for run in runs:
            assert find_processes(marked_with(RUN_VARIABLE, run)) == []
        assert left_of([*runs, str(store), str(tmp_path / "temp")]) == []
        assert [path.name for path in (tmp_path / "state").iterdir()] == [f"{foreign.run.run_id}.jsonl"]
        assert foreign.looks() == foreign.before
        assert [path for path in store.rglob("*") if path.name in ("faults.so", "faults.control", "disk.img")] == []
        deadline_s = time.monotonic() + TIMEOUT_S
        while left := list((tmp_path / "temp").iterdir()):  # a compiler removes its own files when it ends
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)
        shutil.rmtree(store, ignore_errors=True)
    assert abs((time.time() - time.monotonic()) - WALL_ZERO_S) < 60, "the machine's own clock was touched"


WALL_ZERO_S = time.time() - time.monotonic()
