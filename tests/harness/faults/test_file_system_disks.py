"""What file systems of hosts show of a fault: who sees them, and who waits for a thaw."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from harness.faults.file_system_disks import FileSystemDisks
from nemesis.target import DiskFault, FaultMet


class FileSystems:
    """File systems on which every operation succeeds."""

    def mount_point(self, host: str) -> str:
        return f"/run of {host}/data"

    async def perform(self, host: str, operation: str, *arguments: str) -> None:
        pass

    async def mount_again(self, host: str) -> None:
        raise AssertionError(host)


class Access:
    """Hosts on which every command prints the same; `commands` are all that were run."""

    def __init__(self, output: str, status: int = 0) -> None:
        self.commands: list[Sequence[str]] = []
        self._output = output
        self._status = status

    async def run(self, host: str, argv: Sequence[str], **_: Any) -> tuple[int, str, str]:
        self.commands.append(argv)
        return self._status, self._output, "no such process\n"

    def python(self, host: str) -> str:
        return "python3"


def disks_on(access: Any) -> FileSystemDisks:
    async def members(host: str) -> list[int]:
        return [7, 8]

    return FileSystemDisks(["n1", "n2"], file_systems=FileSystems(), shim=None, access=access, members=members)


OWN = "36 28 7:1 / /run\\040of\\040n1/data rw - ext4 /dev/loop1 rw\n"
OTHERS = "37 28 7:2 / /run\\040of\\040n2/data rw - ext4 /dev/loop2 rw\n"
BELOW = "38 28 7:3 / /run\\040of\\040n1/data/sub rw - ext4 /dev/loop3 rw\n"


@pytest.mark.parametrize(
    ("shown", "status", "problem"),
    [
        (OWN + OTHERS, 0, None),
        (OTHERS + BELOW, 0, "the replica of n1 does not see /run of n1/data"),
        ("", 1, "cannot inspect the replica of n1: no such process"),
    ],
)
def test_a_replica_is_reached_if_its_own_mounts_have_the_file_system_of_its_host(
    shown: str, status: int, problem: str | None
) -> None:
    access = Access(shown, status)
    assert asyncio.run(disks_on(access).reaches("n1", 7)) == problem
    assert access.commands == [["cat", "/proc/7/mountinfo"]]


def test_a_replica_that_is_down_is_not_reached() -> None:
    assert asyncio.run(disks_on(Access(OWN)).reaches("n1", None)) == "the replica of n1 is down"


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        ("2 0\n", 0, FaultMet(2, 2)),
        ("2 1\n", 0, FaultMet(2, 2)),
        ("0 0\n", 0, FaultMet(0, 0)),
        ("0 1\n", 0, FaultMet(None, None)),
        ("", 1, FaultMet(None, None)),
    ],
    ids=["some wait", "some wait, another for something unknown", "none waits", "for something unknown", "no answer"],
)
def test_a_freeze_is_met_by_threads_of_the_replica_that_wait_for_the_thaw(
    output: str, status: int, expected: FaultMet
) -> None:
    access = Access(output, status)

    async def scenario() -> FaultMet:
        disks = disks_on(access)
        await disks.impair("f1", {"n1": DiskFault(kind="freeze")})
        return (await disks.met("f1"))["n1"]

    assert asyncio.run(scenario()) == expected
    assert access.commands[-1][-2:] == ["7", "8"], "of the programs of the host, and no others"
