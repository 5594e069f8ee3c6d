"""The launcher as one file, which is copied to a host to run programs there under faults without a library.

See nemesis/mechanisms/launcher/__main__.py for what it does.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from nemesis.mechanisms.archives import FIXED_TIME, add_module
from nemesis.mechanisms.launcher.control import CONTROL_BYTES, ProgramCounts, parse_programs
from nemesis.mechanisms.launcher.vdso import ClockError, read_offset_ns
from nemesis.mechanisms.shim import HostFaults
from nemesis.target import ClockSkew, DiskFault

__all__ = [
    "ATTACH_TRIAL_PROCESSES",
    "attach_trial",
    "launcher_archive",
    "launcher_command",
    "why_no_clock",
    "why_no_traps",
    "why_not_attached",
]

_TRIAL_TIMEOUT_S = 20.0
_TRIAL_NUMBER = 1

_PACKAGE = "splitbrain_launcher"
_START = f"import sys\nfrom {_PACKAGE}.__main__ import main\nmain(sys.argv[1:])\n"


@functools.cache
def launcher_archive() -> bytes:
    """A zip file that Python can run. The same sources and Python give the same bytes."""
    directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in sorted(os.listdir(directory)):
            if name.endswith(".py"):
                with open(os.path.join(directory, name), "rb") as file:
                    add_module(archive, f"{_PACKAGE}/{name}", file.read())
        archive.writestr(zipfile.ZipInfo("__main__.py", FIXED_TIME), _START)
    return content.getvalue()


def launcher_command(
    python: str,
    archive_path: str,
    control_path: str,
    program: Sequence[str],
    *,
    root: str | None = None,
    traps: Collection[str] = (),
    attaches: bool = False,
    undo_path: str | None = None,
    moves_clock: bool = False,
    number: int = 0,
) -> list[str]:
    """The command that runs `program` under the faults of a control file. `traps` are groups of system calls (see
    launcher/filter.py) on files below `root` that can be held, delayed and refused; they are reported from the start
    or, with `attaches`, from the first disk fault on. `undo_path` is the directory of an undo log, kept from the start
    or, with `attaches`, while the control file asks for an account. `moves_clock`: the program's wall clock can be
    skewed. What the program does is counted under `number`, unless that is 0."""
    command = [python, "-I", "-S", archive_path, "--control", control_path]
    if number:
        command += ["--program", str(number)]
    if traps:
        if root is None:
            raise ValueError("traps are about files below a root")
        command += ["--root", root, *(word for group in sorted(traps) for word in ("--trap", group))]
    if traps and attaches:
        command.append("--attach")
    if undo_path is not None:
        command += ["--undo", undo_path]
    if moves_clock:
        command.append("--clock")
    return [*command, "--", *program]


ATTACH_TRIAL_PROCESSES = 2
"""The program of `attach_trial` and its child."""


def attach_trial() -> str:
    """A Python script that tests whether the calls of a running program and its children can be reported. Its arguments
    are a directory and the control file that it is under. It brings a disk fault into force, waits until its child has
    a filter, and has the child sync once."""
    faults = HostFaults()
    faults.add_disk_fault("trial", DiskFault(kind="slow", delay_ms=1))
    faults.pack()  # a generation that differs from that of a new file
    return f"""
import os, sys, time
deadline = time.monotonic() + {_TRIAL_TIMEOUT_S / 2}
def filters():
    with open("/proc/self/status") as status:
        return [line for line in status if line.startswith("Seccomp")]
before = filters()
if os.fork():
    with open(sys.argv[2], "r+b", buffering=0) as control:
        control.write(bytes.fromhex("{faults.pack().hex()}"))
    os.wait()
else:
    while filters() == before and time.monotonic() < deadline:
        time.sleep(0.002)
    if filters() != before:
        os.fsync(os.open(sys.argv[1], os.O_RDONLY))
"""


@functools.cache
def why_no_traps() -> str | None:
    """None when system calls can be reported and answered here; otherwise why not, in one line."""
    script = "import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY))"

    def judge(process: subprocess.Popen[str], control: Path) -> str | None:
        _, errors = process.communicate(timeout=_TRIAL_TIMEOUT_S)
        counted = parse_programs(control.read_bytes()).get(_TRIAL_NUMBER)
        if process.returncode == 0 and counted is not None and counted.syncs == 1:
            return None
        return " ".join(errors.split())[:200] or "a reported call was not counted"

    return _trial(script, judge, traps=("sync",))


@functools.cache
def why_not_attached() -> str | None:
    """None when the calls of a program can be reported here from its first disk fault on; otherwise why not, in one
    line. They are then reported from its start."""

    def judge(process: subprocess.Popen[str], control: Path) -> str | None:
        _, errors = process.communicate(timeout=_TRIAL_TIMEOUT_S)
        counted = parse_programs(control.read_bytes()).get(_TRIAL_NUMBER, ProgramCounts(id=0))
        if counted.syncs == 1 and counted.traps_reached == ATTACH_TRIAL_PROCESSES:
            return None
        said = os.strerror(counted.traps_error)
        return " ".join(errors.split())[:200] or f"no filter for a running program: {said}"

    return _trial(attach_trial(), judge, traps=("sync",), attaches=True)


@functools.cache
def why_no_clock() -> str | None:
    """None when a program's clock can be skewed through its vDSO here; otherwise why not, in one line."""

    def judge(process: subprocess.Popen[str], control: Path) -> str | None:
        deadline_s = time.monotonic() + _TRIAL_TIMEOUT_S
        failed = 0
        while process.poll() is None and time.monotonic() < deadline_s:
            for counts in parse_programs(control.read_bytes()).values():
                failed = counts.clock_failed  # may fail once, during the program's exec
                try:
                    if counts.clock_reached and read_offset_ns(process.pid) == -3_600_000_000_000:
                        return None
                except (OSError, ClockError):
                    pass  # the exec of the program is not over yet
            time.sleep(0.01)
        if process.poll() is None:
            return "the program's vDSO cannot be written to" if failed else "the program's clock did not move"
        return " ".join(process.communicate()[1].split())[:200] or "the program ended"

    return _trial("import sys; sys.stdin.read()", judge, moves_clock=True)


def _trial(
    script: str,
    judge: Callable[[subprocess.Popen[str], Path], str | None],
    *,
    traps: Collection[str] = (),
    attaches: bool = False,
    moves_clock: bool = False,
) -> str | None:
    if not sys.platform.startswith("linux"):
        return "the launcher is for Linux"
    with tempfile.TemporaryDirectory(prefix=f"splitbrain-launcher-{os.getpid()}-") as directory:
        archive, control = Path(directory, "launcher.pyz"), Path(directory, "control")
        archive.write_bytes(launcher_archive())
        faults = HostFaults()
        if moves_clock:
            faults.add_skew("trial", ClockSkew(offset_ms=-3_600_000), wall_ns=0, monotonic_ns=0)
        control.write_bytes(faults.pack().ljust(CONTROL_BYTES, b"\0"))
        program = [sys.executable, "-I", "-S", "-c", script, directory, str(control)]
        argv = launcher_command(
            *(sys.executable, str(archive), str(control), program),
            root=directory, traps=traps, attaches=attaches, moves_clock=moves_clock, number=_TRIAL_NUMBER,
        )  # fmt: skip
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                return judge(process, control)
            except subprocess.TimeoutExpired:
                return "a reported call was not answered"
            finally:
                process.kill()
