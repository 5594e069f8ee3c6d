"""A file system of the run's own on each host, for faults of whole file systems.

It is a sparse ext4 image on a loop device of its own, mounted on the host's data directory. It takes root's full
privileges, which machines give and containers do not. The commands that thaw and unmount it are stored on the host
before it is made, so that cleanup does not depend on the harness.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from harness.clusters.agent_link import AgentLink
from harness.clusters.agent_shim import UNDO_INSIDE
from harness.clusters.base import ClusterUnavailable
from harness.clusters.loop_devices import image_mark
from harness.clusters.threads import all_of, begin_in_thread
from harness.clusters.trials import TrialFailed, TrialUnfinished, run_trial
from harness.programs import find_program
from harness.scratch import scratch_directory
from nemesis.mechanisms import file_systems
from nemesis.mechanisms.file_systems import CALL_TIMEOUT_S, OPERATIONS
from nemesis.mechanisms.shell import ShellError

__all__ = ["IMAGE_BYTES", "AgentFileSystems", "FileSystemPlace", "why_no_file_systems"]

IMAGE_BYTES = 2 << 30
"""Size of one host's file system. Images are sparse: they take up only what is written."""

PROGRAMS = {"mkfs.ext4": "e2fsprogs", "mount": "mount", "losetup": "mount", "unshare": "util-linux"}

_BUSY_TIMEOUT_S = 10
"""Time (s) for the last user of a file system to be gone, once its programs were ended."""

_MAKE_TIMEOUT_S = 60.0
_TMPFS_SLACK_BYTES = 64 << 20

_TRIAL = """
set -e
truncate -s 2M "$1/trial.img"
mkfs.ext4 -q -F -m 0 "$1/trial.img"
mkdir "$1/mounted"
mount -o loop "$1/trial.img" "$1/mounted"
umount "$1/mounted"
"""

# Everything on a disk that has just been mounted is durable: the shim's account of unsynced writes starts empty, in a
# directory that is synced itself.
_BEGIN_UNDO = f"""
undo="$2/{UNDO_INSIDE}"
[ ! -e "$undo" ] || rm -rf "$undo"
[ -z "$tracks_writes" ] || {{ mkdir -m 1777 "$undo" && sync "$2"; }}
"""
# $1 image, $2 mount point, $3 bytes, $4 mark, $5 bytes of a tmpfs to hold the image, empty for none.
_MAKE = f"""
set -eC
[ -z "$5" ] || mount -t tmpfs -o size="$5",mode=700 splitbrain "$(dirname "$1")"
: > "$1"
truncate -s "$3" "$1"
mkfs.ext4 -q -F -m 0 "$1"
printf '%s\\n' "$4" 1<> "$1"
mount -o loop,noatime "$1" "$2"
{_BEGIN_UNDO}"""
# The loop device goes with the last mount; while the image is attached, a mount would find the same broken file system.
# A program with its own mount namespace has held a copy of this mount since it was started: on a machine of several
# hosts that is another host's program, which keeps running.
_UNMOUNT = """
end=$(($(date +%s) + $3))
while mountpoint -q "$2"; do
    umount "$2" 2>/dev/null && continue
    [ "$(date +%s)" -lt $end ] || { umount "$2"; exit 1; }
    sleep 0.05
done
while [ -n "$(losetup -j "$1")" ]; do
    [ "$(date +%s)" -lt $end ] || { echo "its loop device is still in use, by another mount namespace" >&2; exit 1; }
    stat -L -c '%i %n' /proc/[0-9]*/ns/mnt 2>/dev/null | sort -u -k 1,1 | while read -r _ namespace; do
        nsenter --mount="$namespace" -- sh -c 'mountpoint -q "$1" && umount -l "$1"' sh "$2" 2>/dev/null
    done
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


@functools.cache
def why_no_file_systems() -> str | None:
    """None when hosts on this machine can have file systems of their own; otherwise why not, in one line that names the
    fix. Makes one to find out, in a mount namespace that vanishes with the trial."""
    if os.geteuid() != 0:
        return "a file system per host needs root"
    missing = sorted({package for name, package in PROGRAMS.items() if find_program(name) is None})
    if missing:
        return f"a file system per host needs {' '.join(missing)} (apt-get install {' '.join(missing)})"
    with scratch_directory("trial") as directory:
        command = [find_program("sh") or "/bin/sh", "-c", _TRIAL, "trial", directory]
        try:
            run_trial("loop devices", ["--mount", "--propagation", "private"], command)
            return None
        except TrialUnfinished as error:
            return str(error)
        except TrialFailed as error:
            said = str(error).replace(f"{directory}/", "").rstrip(".")
    fix = "run as root outside any user namespace, with access to /dev/loop-control"
    return f"a file system per host needs loop devices ({said}): {fix}"


@dataclass(frozen=True, slots=True)
class FileSystemPlace:
    """Where the image of a host's file system is, and its mount point, as the host itself resolves them. `in_memory`:
    a tmpfs is mounted on the image's directory to hold it. `path_here` is the harness's own path to the mount point,
    if it has one."""

    image: str
    mount_point: str
    in_memory: bool = False
    path_here: str | None = None


class AgentFileSystems:
    """See harness.faults.file_system_disks.HostFileSystems.

    `end_programs` ends whatever runs on a host. `tracks_writes`: the shim keeps its account of unsynced writes on these
    file systems. The images are marked with `run_id` and the path of the run's state.
    """

    def __init__(
        self,
        links: Mapping[str, AgentLink],
        places: Mapping[str, FileSystemPlace],
        *,
        end_programs: Callable[[str], Awaitable[None]],
        tracks_writes: bool,
        run_id: str,
        state: str,
    ) -> None:
        self._links = dict(links)
        self._places = dict(places)
        self._end_programs = end_programs
        self._tracks_writes = tracks_writes
        self._mark = image_mark(run_id, state).rstrip(b"\0\n").decode()

    def mount_point(self, host: str) -> str:
        """The host's data directory."""
        return self._places[host].mount_point

    def _script(self, host: str, script: str, *arguments: str) -> list[str]:
        place = self._places[host]
        setting = f"tracks_writes={'yes' if self._tracks_writes else ''}\n"
        return ["sh", "-c", setting + script, "disk", place.image, place.mount_point, *arguments]

    def _operation(self, host: str, operation: str, *arguments: str) -> list[str]:
        return [self._links[host].python, "-I", "-S", "-", operation, self.mount_point(host), *arguments]

    async def create(self) -> None:
        """Make and mount them. Raises ClusterUnavailable when a host cannot have one, ShellError."""
        await all_of(self._create(host) for host in self._links)

    async def _create(self, host: str) -> None:
        link = self._links[host]
        unmount = {"argv": self._script(host, _UNMOUNT, str(_BUSY_TIMEOUT_S)), "stdin": ""}
        thaw = {"argv": self._operation(host, "thaw"), "stdin": _operations()}
        await link.request("undo", {"key": f"file system of {host}", **unmount})
        await link.request("undo", {"key": f"thaw {host}", **thaw})
        in_memory = str(IMAGE_BYTES + _TMPFS_SLACK_BYTES) if self._places[host].in_memory else ""
        make = self._script(host, _MAKE, str(IMAGE_BYTES), self._mark, in_memory)
        status, _, errors = await link.run(make, timeout_s=_MAKE_TIMEOUT_S)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            fix = "it needs loop devices and the packages e2fsprogs and mount"
            if os.strerror(errno.ENOSPC) in said:
                fix = f"free some space for {self._places[host].image}"
            raise ClusterUnavailable(
                f"{host} cannot have a file system of its own ({said}): {fix}; to run without one, list "
                "the nemeses with --nemesis and leave out freeze, fill, shutdown and crash"
            )

    async def perform(self, host: str, operation: str, *arguments: str) -> None:
        """Perform an operation of nemesis.mechanisms.file_systems; does nothing if none is mounted. Raises ShellError,
        or OSError, TimeoutError if the harness reaches the mount point and does it itself."""
        path = self._places[host].path_here
        if path is not None:
            if os.path.ismount(path):
                await self._call_here(host, operation, path, *arguments)
            return
        argv = self._operation(host, operation, *arguments)
        status, _, errors = await self._links[host].run(argv, stdin=_operations(), timeout_s=CALL_TIMEOUT_S)
        if status != 0:
            raise ShellError(host, [operation, self.mount_point(host)], status, errors)

    async def _call_here(self, host: str, operation: str, *arguments: str) -> None:
        try:
            await asyncio.wait_for(begin_in_thread(OPERATIONS[operation], *arguments), CALL_TIMEOUT_S)
        except TimeoutError:
            said = f"{operation} of the file system of {host} took longer than {CALL_TIMEOUT_S:g} s"
            raise TimeoutError(said) from None

    async def mount_again(self, host: str) -> None:
        """End the host's programs, unmount and mount. Raises RuntimeError when the file system stays in use."""
        await self._end_programs(host)
        argv = self._script(host, _MOUNT_AGAIN, str(_BUSY_TIMEOUT_S))
        status, _, errors = await self._links[host].run(argv, timeout_s=2.0 * _BUSY_TIMEOUT_S)
        if status != 0:
            raise RuntimeError(f"the file system of {host} cannot be mounted again: {' '.join(errors.split())[-200:]}")


def _operations() -> str:
    """The operations as a program for the host's Python; its arguments are operation, path and what that takes."""
    return inspect.getsource(file_systems) + _OPERATE
