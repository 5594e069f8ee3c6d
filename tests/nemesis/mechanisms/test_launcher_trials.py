"""The trials that decide whether the launcher works here, against what the kernel itself offers.

Most tests of the launcher are skipped where its trials fail. So a launcher that does not work any more would go
unnoticed, if nothing else said that this machine has what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nemesis.mechanisms.launcher_archive import why_no_clock, why_no_traps, why_not_attached

_PTRACE_SEIZE, _PTRACE_DETACH, _PTRACE_INTERRUPT = 0x4206, 17, 0x4207
_PIDFD_GETFD = 438
_WALL = 0x40000000


def is_offered() -> bool:
    """Whether this kernel reports system calls, and lets this process trace others and take their descriptors."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if not actions.exists() or "user_notif" not in actions.read_text().split():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            descriptor = os.pidfd_open(child.pid)
            taken = int(libc.syscall(_PIDFD_GETFD, descriptor, 1, 0))
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.close(taken)
            is_traced = libc.ptrace(_PTRACE_SEIZE, child.pid, None, None) == 0
            if is_traced and libc.ptrace(_PTRACE_INTERRUPT, child.pid, None, None) == 0:
                os.waitpid(child.pid, _WALL)
                libc.ptrace(_PTRACE_DETACH, child.pid, None, None)
            return taken >= 0 and is_traced
        finally:
            child.kill()


@pytest.mark.skipif(not is_offered(), reason="this kernel does not offer what the launcher needs")
def test_every_trial_succeeds_on_a_kernel_that_offers_what_the_launcher_needs() -> None:
    assert {why_no_traps(), why_not_attached(), why_no_clock()} == {None}
