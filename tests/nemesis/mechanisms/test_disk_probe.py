"""The disk probe whose parent is killed while a fault stalls it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemesis.mechanisms.disk_probe import PROBE_SCRIPT
from nemesis.mechanisms.launcher_archive import launcher_archive, launcher_command, why_no_traps
from nemesis.mechanisms.shim import (
    CONTROL_BYTES,
    HostFaults,
    build_shim,
    parse_counters,
    shim_environment,
    why_no_shim,
)
from nemesis.target import DiskFault

PROBLEMS = [why_no_shim(), why_no_traps()]
pytestmark = pytest.mark.skipif(any(PROBLEMS), reason=str(PROBLEMS))

DEADLINE_S = 60.0
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[2:], stdin=open(sys.argv[1]), stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("mechanism", ["preload", "seccomp"])
def test_a_probe_of_a_stalled_disk_ends_with_its_parent(tmp_path: Path, mechanism: str) -> None:
    data, control, script, tool = (tmp_path / name for name in ("data", "control", "script", "tool"))
    data.mkdir()
    script.write_text(PROBE_SCRIPT)
    faults = HostFaults()
    faults.add_disk_fault("f", DiskFault(kind="stall"))
    control.write_bytes(faults.pack().ljust(CONTROL_BYTES, b"\0"))
    argv, environment = [sys.executable, "-I", "-S", "-", str(data)], dict(os.environ)
    if mechanism == "preload":
        tool.write_bytes(build_shim())
        environment |= shim_environment(str(tool), str(control), str(data))
    else:
        tool.write_bytes(launcher_archive())
        argv = launcher_command(sys.executable, str(tool), str(control), argv, root=str(data), traps=["sync", "write"])
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PARENT, str(script), *argv],
        stdout=subprocess.PIPE, text=True, env=environment,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        probe = int(parent.stdout.readline())
        deadline_s = time.monotonic() + DEADLINE_S
        try:
            while parse_counters(control.read_bytes()).held == 0:
                assert time.monotonic() < deadline_s, "the probe did not reach the disk"
                time.sleep(0.01)
            parent.kill()
            while is_alive(probe):
                assert time.monotonic() < deadline_s, "the probe waits for ever"
                time.sleep(0.01)
        finally:
            parent.kill()
            if is_alive(probe):
                os.kill(probe, 9)
