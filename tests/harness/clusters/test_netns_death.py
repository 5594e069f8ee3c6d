"""What a harness leaves behind when it is killed or interrupted, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.netns_trial import why_no_namespaces
from harness.process_table import find_processes, marked_with
from harness.run_state import RUN_VARIABLE, process_start_ticks

pytestmark = [pytest.mark.netns]

CHECKOUT = Path(__file__).resolve().parents[3]
PARENT = Path(__file__).with_name("netns_parent.py")
NOBODY = 65534
MINE = f"death{os.getpid()}"
"""Prefix of every run id: names of namespaces are shared with concurrent tests."""
A_RUN, B_RUN, O_RUN = (f"{MINE}-{letter}" for letter in "abo")
CLEAN = (
    "import sys; from harness.cleanup import clean\n"
    "report = clean(state_root=sys.argv[1], report=print)\n"
    "sys.exit(report.exit_status)"
)


@dataclass(frozen=True)
class User:
    """Who runs the harness: a prefix for command lines, and an interpreter that this user may execute."""

    prefix: list[str]
    python: str
    is_root: bool


def as_nobody(argv: list[str]) -> list[str]:
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *argv]


def can_run_our_modules(argv: list[str]) -> bool:
    probe = "import sys; assert sys.version_info >= (3, 11); import harness.clusters.netns"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
    with suppress(OSError):
        return subprocess.run([*argv, "-c", probe], capture_output=True, env=environment).returncode == 0
    return False


def ordinary_user() -> User | str:
    """An ordinary user who can run the harness in a user namespace; or why there is none."""
    if os.geteuid() != 0:
        why_not = why_no_namespaces(in_user_namespace=True)
        return why_not or User(prefix=[], python=sys.executable, is_root=False)
    if shutil.which("setpriv") is None:
        return "setpriv is not installed"
    if subprocess.run(as_nobody(["unshare", "--user", "--map-root-user", "true"]), capture_output=True).returncode:
        return "ordinary users may not make user namespaces"
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        # By way of env: setpriv itself may still execute what only root may.
        if python and can_run_our_modules(as_nobody(["env", python])):
            return User(prefix=as_nobody([]), python=python, is_root=False)
    return "no Python 3.11 that an ordinary user may execute can read this checkout"


def root_user() -> User | str:
    if os.geteuid() != 0:
        return "needs root"
    return why_no_namespaces(in_user_namespace=False) or User(prefix=[], python=sys.executable, is_root=True)


ROOT, ORDINARY = root_user(), ordinary_user()
USERS = [
    pytest.param(ROOT, id="root", marks=pytest.mark.skipif(isinstance(ROOT, str), reason=str(ROOT))),
    pytest.param(ORDINARY, id="ordinary", marks=pytest.mark.skipif(isinstance(ORDINARY, str), reason=str(ORDINARY))),
]


class Place:
    """Directories of one test, and the harness-like parents that run in them."""

    def __init__(self, base: Path, user: User, children: ExitStack) -> None:
        self.user = user
        self.base = base
        self.state = base / "state"
        self.temp = base / "temp"
        self._children = children
        for path in (base, self.temp):
            path.mkdir(exist_ok=True)
            if user.prefix:
                os.chown(path, NOBODY, NOBODY)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(CHECKOUT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.temp),
            "HOME": str(self.base),
        }

    def start(self, run_id: str) -> subprocess.Popen[str]:
        argv = [self.user.python, str(PARENT), run_id, str(self.state), str(self.base / run_id)]
        with open(self.base / f"{run_id}.err", "w") as errors:
            child = subprocess.Popen(
                [*self.user.prefix, *argv],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self.environment(),
                cwd=self.base,
                start_new_session=True,
            )
        self._children.enter_context(child)
        self._children.callback(child.kill)
        return child

    def facts(self, child: subprocess.Popen[str], run_id: str) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, (self.base / f"{run_id}.err").read_text()
        facts: dict[str, Any] = json.loads(line)
        return facts

    def clean(self) -> subprocess.CompletedProcess[str]:
        argv = [*self.user.prefix, self.user.python, "-c", CLEAN, str(self.state)]
        return subprocess.run(argv, capture_output=True, text=True, env=self.environment(), cwd=self.base, timeout=60)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Callable[[User], Place]]:
    """Places in a directory that every user can reach, which pytest's own is not; removed after the test."""
    with ExitStack() as stack:

        def make(user: User) -> Place:
            base = Path(f"/tmp/sb-test-{os.getpid()}-{random.randrange(10**9)}")
            stack.callback(shutil.rmtree, base)
            return Place(base, user, stack)

        yield make


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def namespaces_of(run_id: str) -> list[str]:
    with suppress(FileNotFoundError):
        return [name for name in os.listdir("/run/netns") if name.startswith(f"sb-{run_id}-")]
    return []


def is_trial_of_tempfile(path: Path) -> bool:
    """Whether Python was killed between writing and removing the few bytes by which it tries a temporary directory."""
    return path.is_file() and path.stat().st_size <= 4 and path.read_bytes() in (b"", b"blat")


def remains(place: Place, run_id: str) -> list[str]:
    """Everything of a run that can still be found."""
    found = [f"process {process}" for process in find_processes(marked_with(RUN_VARIABLE, run_id))]
    found += namespaces_of(run_id)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"sb-{run_id}-" in line]
    found += [str(path) for path in place.temp.iterdir() if not is_trial_of_tempfile(path)]
    found += [name for name in os.listdir(place.state) if run_id in name]
    return found


@pytest.mark.parametrize("user", USERS)
def test_clean_removes_what_a_killed_harness_left_and_leaves_a_live_one_alone(
    place: Callable[[User], Place], user: User
) -> None:
    here = place(user)
    victim, survivor = here.start(A_RUN), here.start(B_RUN)
    facts, survivor_facts = here.facts(victim, A_RUN), here.facts(survivor, B_RUN)
    assert facts["inside"] is not user.is_root
    assert facts["pid"] == victim.pid, "the command line and the inner harness are one process"
    assert facts["passed"] == survivor_facts["passed"] == [False, True, True]
    assert len(namespaces_of(A_RUN)) == (5 if user.is_root else 0)

    victim.send_signal(signal.SIGKILL)
    victim.wait()
    # The kernel ends the hosts' processes with their parent, before `clean` runs.
    until(lambda: all(process_start_ticks(pid) is None for pid in facts["processes"]))
    assert remains(here, A_RUN) != []
    done = here.clean()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"directory {facts['scratch']}" in done.stdout
    assert f"run {B_RUN}: left alone" in done.stdout
    assert B_RUN not in done.stdout.replace(f"run {B_RUN}: left alone", "")
    assert [thing for thing in remains(here, A_RUN) if B_RUN not in thing] == []
    assert survivor.poll() is None
    assert all(process_start_ticks(pid) is not None for pid in survivor_facts["processes"])
    assert os.path.isdir(survivor_facts["scratch"])

    survivor.send_signal(signal.SIGINT)
    assert survivor.wait(timeout=30) == 42, "Ctrl-C reaches the inner harness, and its exit status is returned"
    assert remains(here, B_RUN) == []
    assert f"run {MINE}" not in here.clean().stdout
    assert os.listdir(here.state) == []


@pytest.mark.parametrize("user", USERS)
def test_clean_leaves_nothing_of_a_harness_killed_at_any_moment(place: Callable[[User], Place], user: User) -> None:
    here = place(user)
    rng = random.Random(7)
    for number in range(6):
        run_id = f"{MINE}-m{number}"
        victim = here.start(run_id)
        if number == 0:
            here.facts(victim, run_id)
        else:
            with suppress(subprocess.TimeoutExpired):
                victim.wait(timeout=rng.uniform(0.05, 0.6))
        victim.kill()
        victim.wait()
        done = here.clean()
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert remains(here, run_id) == []


@pytest.mark.parametrize("user", USERS)
def test_processes_that_outlive_the_harness_are_found_by_their_mark(place: Callable[[User], Place], user: User) -> None:
    """As when the death signal of the kernel was lost, for example because a program cleared it."""
    here = place(user)
    victim = here.start(O_RUN)
    facts = here.facts(victim, O_RUN)
    # A child of a host's process, in that host's namespace, that has no such signal set.
    target = str(facts["processes"][0])
    enter = ["nsenter", f"--target={target}", "--net", "--"]
    if not user.is_root:
        enter = ["nsenter", f"--target={target}", "--user", "--preserve-credentials", "--net", "--mount", "--"]
    stray = subprocess.Popen([*user.prefix, *enter, "sleep", "600"], env=here.environment() | {RUN_VARIABLE: O_RUN})
    try:
        until(lambda: Path(f"/proc/{stray.pid}/cmdline").read_bytes().startswith(b"sleep"))
        victim.kill()
        victim.wait()
        done = here.clean()
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert stray.wait(timeout=10) == -signal.SIGKILL
        assert remains(here, O_RUN) == []
    finally:
        stray.kill()
        stray.wait()
