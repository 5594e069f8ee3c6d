"""A file system of the run's own on each host with an agent, for faults of whole file systems.

    <host's directory>/disk.img    an ext4 image, sparse, on a loop device of its own
    <host's directory>/data        where it is mounted

It takes root's full rights, which machines give and containers do not. What thaws and unmounts it is written down on
the host before it is made, so that cleaning needs nothing that the harness knows.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping

from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.loop_devices import image_mark
from harness.clusters.node_disks import IMAGE_BYTES
from harness.clusters.threads import all_of
from harness.faults.shim_hosts import UNDO_INSIDE
from nemesis.mechanisms import file_systems
from nemesis.mechanisms.file_systems import CALL_TIMEOUT_S
from nemesis.mechanisms.shell import ShellError

__all__ = ["AgentFileSystems"]

_BUSY_TIMEOUT_S = 10
"""For the last user of a file system to be gone, once its programs were ended."""

_MAKE_TIMEOUT_S = 60.0

# What is on a disk that has just been mounted has been written: the shim's account of what was not begins anew, and is
# itself there for good.
_BEGIN_UNDO = f"""
undo="$2/{UNDO_INSIDE}"
rm -rf "$undo" && mkdir "$undo" && sync "$2"
"""
_MAKE = f"""
set -e
truncate -s "$3" "$1"
mkfs.ext4 -q -F -m 0 "$1"
printf '%s\\n' "$4" | dd of="$1" conv=notrunc status=none
mount -o loop,noatime "$1" "$2"
chmod 755 "$2"
{_BEGIN_UNDO}"""
# The loop device goes with the last mount; while the image is attached, a mount would find the same broken file system.
_UNMOUNT = """
left=$((20 * $3))
while grep -qF " $2 " /proc/self/mountinfo; do
    umount "$2" 2>/dev/null && continue
    [ $((left -= 1)) -gt 0 ] || { umount "$2"; exit 1; }
    sleep 0.05
done
while [ -n "$(losetup -j "$1")" ]; do
    [ $((left -= 1)) -gt 0 ] || { echo "its loop device is still in use" >&2; exit 1; }
    sleep 0.05
done
"""
_MOUNT_AGAIN = f"""
{_UNMOUNT}
mount -o loop,noatime "$1" "$2" || exit 1
{_BEGIN_UNDO}"""

_OPERATE = """
import sys
operation, path, *arguments = sys.argv[1:]
try:
    if os.path.ismount(path):
        OPERATIONS[operation](path, *arguments)
except OSError as error:
    sys.exit(error.strerror)
"""


class AgentFileSystems:
    """See harness.faults.file_system_disks.HostFileSystems.

    `directories` has each host's directory there, as the host itself resolves it; `end_programs` ends whatever runs on
    a host. `run_id` and the path of the run's state are marked in the images.
    """

    def __init__(
        self,
        links: Mapping[str, AgentLink],
        directories: Mapping[str, str],
        pythons: Mapping[str, str],
        *,
        end_programs: Callable[[str], Awaitable[None]],
        run_id: str,
        state: str,
    ) -> None:
        self._links = dict(links)
        self._directories = dict(directories)
        self._pythons = dict(pythons)
        self._end_programs = end_programs
        self._mark = image_mark(run_id, state).rstrip(b"\0\n").decode()

    def mount_point(self, host: str) -> str:
        """The host's data directory."""
        return os.path.join(self._directories[host], "data")

    def _script(self, host: str, script: str, *arguments: str) -> list[str]:
        image = os.path.join(self._directories[host], "disk.img")
        return ["sh", "-c", script, "disk", image, self.mount_point(host), *arguments]

    def _operation(self, host: str, operation: str, *arguments: str) -> list[str]:
        return [self._pythons[host], "-I", "-S", "-", operation, self.mount_point(host), *arguments]

    async def create(self) -> None:
        """Make and mount them. Raises ClusterUnavailable when a host cannot have one, ShellError."""
        await all_of(self._create(host) for host in self._links)

    async def _create(self, host: str) -> None:
        link = self._links[host]
        unmount = {"argv": self._script(host, _UNMOUNT, str(_BUSY_TIMEOUT_S)), "stdin": ""}
        thaw = {"argv": self._operation(host, "thaw"), "stdin": _operations()}
        await link.request("undo", {"key": f"file system of {host}", **unmount})
        await link.request("undo", {"key": f"thaw {host}", **thaw})
        make = self._script(host, _MAKE, str(IMAGE_BYTES), self._mark)
        status, _, errors = await link.run(make, timeout_s=_MAKE_TIMEOUT_S)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            raise ClusterUnavailable(
                f"{host} cannot have a file system of its own ({said}): it takes loop devices and the packages "
                "e2fsprogs and mount; without, name the nemeses and leave freeze, fill, shutdown and crash out"
            )

    async def perform(self, host: str, operation: str, *arguments: str) -> None:
        """An operation of nemesis.mechanisms.file_systems; nothing where none is mounted. Raises ShellError."""
        argv = self._operation(host, operation, *arguments)
        status, _, errors = await self._links[host].run(argv, stdin=_operations(), timeout_s=CALL_TIMEOUT_S)
        if status != 0:
            raise ShellError(host, [operation, self.mount_point(host)], status, errors)

    async def mount_again(self, host: str) -> None:
        """End the host's programs, unmount and mount. Raises RuntimeError when something keeps the file system."""
        await self._end_programs(host)
        argv = self._script(host, _MOUNT_AGAIN, str(_BUSY_TIMEOUT_S))
        status, _, errors = await self._links[host].run(argv, timeout_s=2.0 * _BUSY_TIMEOUT_S)
        if status != 0:
            raise RuntimeError(f"the file system of {host} cannot be mounted again: {' '.join(errors.split())[-200:]}")


def _operations() -> str:
    """The operations as a program for the host's Python: operation, path and more as arguments."""
    return inspect.getsource(file_systems) + _OPERATE
