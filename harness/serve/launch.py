"""Starts a run from a form: known names and numbers within bounds become the argument list of a new process.

No shell is involved, no option takes a path, and only one run at a time is started. When the server ends, the run ends
as with Ctrl-C: its load stops, everything is healed, and it is judged.
"""

from __future__ import annotations

__all__ = ["Form", "Launch", "Launcher", "form_choices", "read_form"]

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import harness
from harness import registry
from harness.errors import OperatorError
from harness.systems.base import setting_problems
from harness.test import ALL, NemesisChoice, Test
from harness.units import clip
from harness.workloads.choice import make_workload, require_capabilities

MAX_OUTPUT_LINES = 200
MAX_LINE = 400
MAX_NAMED = 60
"""Characters of a form's word in a message about it."""

MAX_LAUNCHES = 20
"""The newest launches, which the page shows."""

STOP_TIMEOUT_S = 90.0
"""How long the server's shutdown waits for a run to heal its faults and be judged."""

NUMBERS: Mapping[str, tuple[str, str]] = {
    "nodes": ("Nodes", "5"),
    "time_limit": ("Load, in seconds", "30"),
    "nemesis_interval": ("Duration of each fault, in seconds", "5"),
    "rate": ("Operations per second", "200"),
    "concurrency": ("Clients", "10"),
    "seed": ("Seed (empty: random)", ""),
}
"""Numeric field -> its title and initial value."""


@dataclass(frozen=True, slots=True)
class Form:
    """The validated content of a form, as command-line words."""

    words: Sequence[str]


@dataclass(slots=True)
class Launch:
    """A run that was started here."""

    words: Sequence[str]
    process: subprocess.Popen[bytes]
    output: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_OUTPUT_LINES))

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self.process.poll()


def form_choices() -> dict[str, list[str]]:
    """Field -> the names that can be chosen."""
    return {
        "system": sorted(registry.names("systems")),
        "workload": sorted(registry.names("workloads")),
        "cluster": ["auto", *sorted(registry.names("clusters"))],
        "nemesis": [ALL, *sorted(registry.names("nemeses"))],
    }


def read_form(fields: Mapping[str, Sequence[str]]) -> Form:
    """The command line for a form's fields. Raises OperatorError with all problems."""
    choices = form_choices()
    problems = []
    chosen: dict[str, str] = {}
    for name in ("system", "workload", "cluster"):
        value = _only(fields, name)
        if value not in choices[name]:
            problems.append(f"unknown {name}")
        chosen[name] = value
    nemeses = list(fields.get("nemesis", ()))
    if any(name not in choices["nemesis"] for name in nemeses) or len(set(nemeses)) != len(nemeses):
        problems.append("unknown nemesis")
    numbers: dict[str, float] = {}
    for name in NUMBERS:
        text = _only(fields, name)
        try:
            if text or name != "seed":
                numbers[name] = int(text) if name in ("nodes", "concurrency", "seed") else float(text)
        except ValueError:
            problems.append(f"{NUMBERS[name][0]}: not a number")
    settings = _read_settings(_only(fields, "settings"), problems)
    if problems:
        raise OperatorError("; ".join(problems))
    test = Test(
        system=chosen["system"], workload=chosen["workload"], cluster=chosen["cluster"],
        nemesis=tuple(NemesisChoice(name) for name in nemeses), settings=settings,
        nodes=int(numbers["nodes"]), concurrency=int(numbers["concurrency"]), rate=numbers["rate"],
        time_limit_s=numbers["time_limit"], nemesis_interval_s=numbers["nemesis_interval"],
        seed=int(numbers.get("seed", 0)),
    )  # fmt: skip
    problems += _setting_problems(test)
    problems += test.problems()
    problems += test.nemesis_problems(registry.load_all("nemeses"))
    if problems:
        raise OperatorError("; ".join(problems))
    words = [f"--{name}={chosen[name]}" for name in chosen]
    words.append(f"--nemesis={','.join(nemeses) or 'none'}")
    words += [f"--{name.replace('_', '-')}={_digits(number)}" for name, number in numbers.items() if name != "seed"]
    words += [f"--seed={test.seed}"] if "seed" in numbers else []
    words += [f"--set={key}={value}" for key, value in settings.items()]
    return Form(words)


def _read_settings(text: str, problems: list[str]) -> dict[str, str]:
    """Parse NAME=VALUE words separated by spaces; problems are appended to `problems`."""
    settings: dict[str, str] = {}
    for word in text.split():
        name, separator, value = word.partition("=")
        if not separator or not name:
            problems.append(f"settings: {clip(word, MAX_NAMED)} is not NAME=VALUE")
        elif settings.setdefault(name, value) != value:
            problems.append(f"settings: {clip(name, MAX_NAMED)} is given twice with different values")
    return settings


def _setting_problems(test: Test) -> list[str]:
    """Problems of a test's system and workload settings, and of the combination of system and workload."""
    system_class = registry.load("systems", test.system)
    problems = setting_problems(system_class.settings, test.system_settings)
    try:
        found = make_workload(test.workload, system_class=system_class, system=test.system, settings=test.settings)
        require_capabilities(found, system_class)
    except OperatorError as error:
        problems.append(str(error))
    return problems


def _digits(number: float) -> str:
    """A number with all its digits, so that the run gets exactly the validated number."""
    return str(int(number)) if number == int(number) else repr(number)


def _only(fields: Mapping[str, Sequence[str]], name: str) -> str:
    values = fields.get(name, ())
    return values[0].strip() if len(values) == 1 else ""


class Launcher:
    """The runs that this server started, at most one of them still running."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.launches: deque[Launch] = deque(maxlen=MAX_LAUNCHES)

    def start(self, form: Form) -> Launch:
        """Start a run. Raises OperatorError while another one runs, or if no process can be started."""
        with self._lock:
            if self.launches and self.launches[-1].status is None:
                raise OperatorError("a run that was started here is still running: wait until it has ended")
            words = ["run", f"--store={self._store}", *form.words]
            package = Path(harness.__file__).resolve().parent.parent
            search = filter(None, (str(package), os.environ.get("PYTHONPATH")))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search)}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "harness", *words],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise OperatorError(f"cannot start a run: {error.strerror}") from None
            launch = Launch(words, process)
            self.launches.append(launch)
        threading.Thread(target=_keep_output, args=(launch,), name="output of a run", daemon=True).start()
        return launch

    def stop(self, say: Callable[[str], None]) -> None:
        """End the current run as Ctrl-C does, and wait; `say` gets a message about waiting, and about a run that does
        not end in time. Each further Ctrl-C is passed on to the run, which stops waiting at the third.

        If the server was started with SIGINT ignored, as by `&` in a script, its runs ignore it too and get SIGTERM.
        """
        with self._lock:
            launch = self.launches[-1] if self.launches else None
        if launch is None or launch.status is not None:
            return
        named = f"the run that was started here (process {launch.process.pid})"
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        is_told = False
        while True:
            try:
                if not is_told:
                    is_told = True
                    launch.process.send_signal(signal.SIGTERM if is_ignored else signal.SIGINT)
                    say(f"waiting for {named} to end: it is healed and judged")
                launch.process.wait(max(0.0, deadline_s - time.monotonic()))
                return
            except KeyboardInterrupt:
                is_told = False
            except subprocess.TimeoutExpired:
                say(f"{named} is still running")
                return
            except SystemExit:  # on SIGTERM the server does not wait
                say(f"{named} is still running, and was asked to end")
                raise


def _keep_output(launch: Launch) -> None:
    assert launch.process.stdout is not None
    with launch.process.stdout as stream:
        while line := stream.readline(MAX_LINE):
            launch.output.append(clip(line.decode("utf-8", "replace").rstrip("\n"), MAX_LINE))
