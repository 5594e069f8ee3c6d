"""The launcher as one file: what is copied to a host to run programs there under faults without a library.

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

from nemesis.mechanisms.launcher.control import CONTROL_BYTES, parse_programs
from nemesis.mechanisms.launcher.vdso import ClockError, read_offset_ns
from nemesis.mechanisms.shim import HostFaults
from nemesis.target import ClockSkew

__all__ = ["launcher_archive", "launcher_command", "why_no_clock", "why_no_traps"]

_TRIAL_TIMEOUT_S = 20.0
_TRIAL_NUMBER = 1

_PACKAGE = "splitbrain_launcher"
_START = f"import sys\nfrom {_PACKAGE}.__main__ import main\nmain(sys.argv[1:])\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.cache
def launcher_archive() -> bytes:
    """A zip file that Python runs. The same sources give the same bytes."""
    directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(os.listdir(directory)):
            if name.endswith(".py"):
                with open(os.path.join(directory, name), "rb") as file:
                    archive.writestr(zipfile.ZipInfo(f"{_PACKAGE}/{name}", _EPOCH), file.read())
        archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), _START)
    return content.getvalue()


def launcher_command(
    python: str,
    archive_path: str,
    control_path: str,
    program: Sequence[str],
    *,
    root: str | None = None,
    traps: Collection[str] = (),
    undo_path: str | None = None,
    moves_clock: bool = False,
    number: int = 0,
) -> list[str]:
    """The command that runs `program` under the faults of a control file. `traps` are groups of system calls (see
    launcher/filter.py) on files below `root` that can be held, delayed and refused; `undo_path` is the directory of
    an undo log; `moves_clock`: its wall clock can be moved. What it does is counted under `number`, where that is not
    0."""
    command = [python, "-I", "-S", archive_path, "--control", control_path]
    if number:
        command += ["--program", str(number)]
    if traps:
        if root is None:
            raise ValueError("traps are about files below a root")
        command += ["--root", root, *(word for group in sorted(traps) for word in ("--trap", group))]
    if undo_path is not None:
        command += ["--undo", undo_path]
    if moves_clock:
        command.append("--clock")
    return [*command, "--", *program]


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
def why_no_clock() -> str | None:
    """None when a program's clock can be moved by its vDSO here; otherwise why not, in one line."""

    def judge(process: subprocess.Popen[str], control: Path) -> str | None:
        deadline_s = time.monotonic() + _TRIAL_TIMEOUT_S
        failed = 0
        while process.poll() is None and time.monotonic() < deadline_s:
            for counts in parse_programs(control.read_bytes()).values():
                failed = counts.clock_failed  # may be once, while the program is executed
                try:
                    if counts.clock_reached and read_offset_ns(process.pid) == -3_600_000_000_000:
                        return None
                except (OSError, ClockError):
                    pass  # it is about to execute the program
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
    moves_clock: bool = False,
) -> str | None:
    if not sys.platform.startswith("linux"):
        return "the launcher is for Linux"
    with tempfile.TemporaryDirectory(prefix="splitbrain-launcher-") as directory:
        archive, control = Path(directory, "launcher.pyz"), Path(directory, "control")
        archive.write_bytes(launcher_archive())
        faults = HostFaults()
        if moves_clock:
            faults.add_skew("trial", ClockSkew(offset_ms=-3_600_000), wall_ns=0, monotonic_ns=0)
        control.write_bytes(faults.pack().ljust(CONTROL_BYTES, b"\0"))
        program = [sys.executable, "-I", "-S", "-c", script, directory]
        argv = launcher_command(
            *(sys.executable, str(archive), str(control), program),
            root=directory, traps=traps, moves_clock=moves_clock, number=_TRIAL_NUMBER,
        )  # fmt: skip
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                return judge(process, control)
            except subprocess.TimeoutExpired:
                return "a reported call was not answered"
            finally:
                process.kill()
