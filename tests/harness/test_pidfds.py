"""Process descriptors, by Python's functions and by system calls."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from harness.pidfds import pidfd_open, pidfd_send_signal


@pytest.fixture(params=["functions", "system calls"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "system calls":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)


def is_readable(descriptor: int, within_ms: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_ms))


def test_a_descriptor_is_readable_once_its_process_ends_and_signals_no_other() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        descriptor = pidfd_open(child.pid)
        try:
            assert not os.get_inheritable(descriptor)
            assert not is_readable(descriptor, 50)
            pidfd_send_signal(descriptor, signal.SIGKILL)
            assert is_readable(descriptor, 10_000)
            assert child.wait() == -signal.SIGKILL
            with pytest.raises(ProcessLookupError):
                pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        with pytest.raises(ProcessLookupError):
            pidfd_open(child.pid)


def test_an_invalid_descriptor_or_pid_raises_os_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        pidfd_send_signal(-1, signal.SIGKILL)
    with pytest.raises(OSError, match="Invalid argument"):
        pidfd_open(-1)
