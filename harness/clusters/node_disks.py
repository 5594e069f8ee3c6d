"""A file system, a mount namespace and a control group for each host of a cluster on this machine. Needs root.

    <work_dir>/<host>/disk.img     an ext4 image, sparse, on a loop device of its own
    <work_dir>/<host>/data         where it is mounted, for the harness and for the host's own programs

Every program of a host gets a mount namespace in which the other hosts' disks are not there, and is put into the
control group `splitbrain-<run>-<host>` of every hierarchy that there is. Images lie on the disk that the run is kept
on, or, on request, in memory. When the cluster is stopped the files are copied out of the image to the place where it
was mounted, so that everything after finds them under the same paths.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import glob
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence

from harness.clusters.base import ClusterUnavailable
from harness.clusters.netns_calls import unmount
from harness.clusters.netns_shell import run_command
from harness.programs import SYSTEM_PATH, find_program
from harness.run_state import KIND_CGROUP, KIND_IMAGE, KIND_MOUNT, Claim, RunState
from nemesis.mechanisms.file_systems import CALL_TIMEOUT_S, OPERATIONS, thaw
from nemesis.mechanisms.shell import ShellError

__all__ = [
    "IMAGE",
    "MEMORY",
    "SHARED",
    "NodeDisks",
    "cgroup_parents",
    "detach",
    "loop_devices_of",
    "remove_group",
    "storage_for",
    "why_no_file_systems",
]

IMAGE, MEMORY, SHARED = "image", "memory", "shared"
"""Where hosts keep their files: in an image on disk, in one in memory, or on the harness's own file system."""

IMAGE_BYTES = 2 << 30
"""Of one host's file system. Images are sparse: they take what is written."""

PROGRAMS = {"mkfs.ext4": "e2fsprogs", "mount": "mount", "unshare": "util-linux"}

_TRIAL = """
set -e
truncate -s 2M "$1/trial.img"
mkfs.ext4 -q -F -m 0 "$1/trial.img"
mkdir "$1/mounted"
mount -o loop "$1/trial.img" "$1/mounted"
umount "$1/mounted"
"""
_TRIAL_TIMEOUT_S = 20.0

_TMPFS_SLACK_BYTES = 64 << 20

BUSY_TIMEOUT_S = 10.0
"""How long an image may stay in use after it was unmounted: others who had made a mount namespace meanwhile."""

_POLL_S = 0.05

_LOOP_CLR_FD = 0x4C01

_CONTROLLERS = frozenset({"cgroup2", "cpu", "memory", "blkio", "pids"})
"""The hierarchies in which hosts get groups: those that account for and limit what a host uses."""

_CONFINE = """
for group in $SPLITBRAIN_CGROUPS; do echo $$ > "$group/cgroup.procs" || exit 125; done
for disk in $SPLITBRAIN_HIDDEN; do umount -l "$disk" || exit 125; done
exec "$@"
"""
"""What a program's start goes through, inside its new mount namespace."""


@functools.cache
def why_no_file_systems() -> str | None:
    """None when hosts can have file systems of their own here; otherwise why not, in one line that names the mend.

    Found out by making one, in a mount namespace that vanishes with the trial.
    """
    if os.geteuid() != 0:
        return "a file system per host needs root"
    missing = sorted({package for name, package in PROGRAMS.items() if find_program(name) is None})
    if missing:
        return f"a file system per host needs {' '.join(missing)} (apt-get install {' '.join(missing)})"
    with tempfile.TemporaryDirectory(prefix="splitbrain-trial-") as directory:
        argv = [find_program("unshare") or "unshare", "--mount", "--propagation", "private"]
        try:
            trial = subprocess.run(
                [*argv, "--", find_program("sh") or "/bin/sh", "-c", _TRIAL, "trial", directory],
                capture_output=True,
                text=True,
                timeout=_TRIAL_TIMEOUT_S,
                env={"PATH": SYSTEM_PATH, "LC_ALL": "C"},
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the trial of a loop device did not end: {error}"
    if trial.returncode == 0:
        return None
    said = (trial.stderr.strip().splitlines() or ["no output"])[0]
    return f"a file system per host needs loop devices ({said}): run as root of the machine, with /dev/loop-control"


def cgroup_parents() -> list[str]:
    """The control group that this process is in, as a directory, in every hierarchy where it may make groups.

    Hosts' groups lie inside it, so that limits on the harness hold for its hosts too.
    """
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own |= dict.fromkeys(controllers.split(",") if controllers else ["cgroup2"], path)
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            root, point = before.split()[3:5]
            kind, _, options = after.split()[:3]
            names = ["cgroup2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
            inside = next((os.path.relpath(own[name], root) for name in names if name in own), None)
            if inside is not None and not inside.startswith("..") and _CONTROLLERS & set(names):
                found.append(os.path.normpath(os.path.join(point, inside)))
    return [path for path in found if os.access(path, os.W_OK)]


def loop_devices_of(image: str) -> list[str]:
    """The loop devices, as /dev/loopN, that an image file is attached to."""
    found = []
    for path in glob.glob("/sys/block/loop*/loop/backing_file"):
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                backing = file.read().rstrip("\n").removesuffix(" (deleted)")
        except OSError:
            continue  # it was detached meanwhile
        if backing == image:
            found.append(f"/dev/{path.split('/')[3]}")
    return found


class NodeDisks:
    """See the module's text. Implements harness.faults.file_system_disks.HostFileSystems.

    `end_programs` ends whatever runs on a host.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        run: RunState,
        work_dir: str,
        in_memory: bool,
        end_programs: Callable[[str], Awaitable[None]],
    ) -> None:
        self._hosts = tuple(hosts)
        self._run = run
        self._work_dir = os.path.realpath(work_dir)
        self._memory = os.path.join(self._work_dir, ".memory") if in_memory else None
        self._end_programs = end_programs
        self._cgroups: dict[str, list[str]] = {}

    def mount_point(self, host: str) -> str:
        """`work_dir/<host>/data`, without links in it: as the kernel's table of mounts has it."""
        return os.path.join(self._work_dir, host, "data")

    def image(self, host: str) -> str:
        """The image's file."""
        if self._memory is not None:
            return os.path.join(self._memory, f"{host}.img")
        return os.path.join(self._work_dir, host, "disk.img")

    async def create(self) -> None:
        """Make images, mount them, make control groups. Raises ClusterUnavailable, ShellError, OSError."""
        claims = [Claim(KIND_MOUNT, self.mount_point(host), {"freezable": True}) for host in self._hosts]
        if self._memory is None:
            claims += [Claim(KIND_IMAGE, self.image(host), {}) for host in self._hosts]
        else:
            claims.insert(0, Claim(KIND_MOUNT, self._memory, {"source": self._source}))
        parents = cgroup_parents()
        for host in self._hosts:
            self._cgroups[host] = [os.path.join(parent, f"splitbrain-{self._run.run_id}-{host}") for parent in parents]
        claims += [Claim(KIND_CGROUP, path, {}) for paths in self._cgroups.values() for path in paths]
        self._run.claim_all(claims)
        for paths in self._cgroups.values():
            for path in paths:
                os.mkdir(path)
        if self._memory is not None:
            os.makedirs(self._memory, exist_ok=True)
            size_bytes = IMAGE_BYTES * len(self._hosts) + _TMPFS_SLACK_BYTES
            await self._command("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", self._source, self._memory)
        for outcome in await asyncio.gather(*map(self._create, self._hosts), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    @property
    def _source(self) -> str:
        return f"splitbrain-{self._run.run_id}"

    async def _create(self, host: str) -> None:
        image, point = self.image(host), self.mount_point(host)
        os.makedirs(point, exist_ok=True)
        with open(image, "xb") as file:
            file.truncate(IMAGE_BYTES)
        await self._command("mkfs.ext4", "-q", "-F", "-m", "0", image)
        await self._mount(host)
        os.chmod(point, 0o755)

    async def _mount(self, host: str) -> None:
        await self._command("mount", "-o", "loop,noatime", self.image(host), self.mount_point(host))

    async def _command(self, name: str, *arguments: str) -> None:
        await run_command("netns", [find_program(name) or name, *arguments], environment=self._run.environment)

    async def perform(self, host: str, operation: str, *arguments: str) -> None:
        """An operation of nemesis.mechanisms.file_systems; before the start and after the stop there is nothing to
        perform it on, and nothing happens. Raises OSError, TimeoutError."""
        point = self.mount_point(host)
        if os.path.ismount(point):
            call = functools.partial(OPERATIONS[operation], point, *arguments)
            await asyncio.wait_for(asyncio.to_thread(call), CALL_TIMEOUT_S)

    async def mount_again(self, host: str) -> None:
        """End the host's programs, unmount and mount. Raises RuntimeError when something keeps the file system."""
        point = self.mount_point(host)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BUSY_TIMEOUT_S
        await self._end_programs(host)
        while os.path.ismount(point) and unmount(point):
            pass
        # Mounted again too early it would be the same broken file system.
        while loop_devices_of(self.image(host)):
            if loop.time() > deadline_s:
                raise RuntimeError(f"the file system of {host} is still in use, perhaps in another mount namespace")
            await asyncio.sleep(_POLL_S)
        try:
            await self._mount(host)
        except ShellError as error:
            raise RuntimeError(f"the file system of {host} cannot be mounted again: {error}") from None

    def prefix(self, host: str) -> list[str]:
        """What to put before a command line to run it with the host's own view of disks, in its control groups."""
        hidden = [self.mount_point(other) for other in self._hosts if other != host]
        groups = self._cgroups.get(host, [])
        script = _CONFINE.replace("$SPLITBRAIN_CGROUPS", " ".join(map(shlex.quote, groups)))
        script = script.replace("$SPLITBRAIN_HIDDEN", " ".join(map(shlex.quote, hidden)))
        unshare = find_program("unshare") or "unshare"
        shell = find_program("sh") or "/bin/sh"
        return [unshare, "--mount", "--propagation", "private", "--", shell, "-c", script, "confine"]

    async def remove(self) -> None:
        """Keep the files, unmount, remove images and control groups. The hosts' programs must have ended.

        Idempotent; safe after half a `create`. Raises OSError for what cannot be removed, after everything was tried.
        """
        claimed = {claim.ident: claim.kind for claim in self._run.claims}
        failures: list[OSError] = []
        for host in self._hosts:
            if self.mount_point(host) in claimed:
                try:
                    await asyncio.to_thread(self._take_down, host)
                except OSError as error:
                    failures.append(error)
        if self._memory is not None and self._memory in claimed and not failures:
            while os.path.ismount(self._memory) and unmount(self._memory):
                pass
            self._run.release(KIND_MOUNT, self._memory)
            os.rmdir(self._memory)
        for paths in self._cgroups.values():
            for path in paths:
                try:
                    await asyncio.to_thread(remove_group, path, timeout_s=BUSY_TIMEOUT_S)
                    self._run.release(KIND_CGROUP, path)
                except OSError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _take_down(self, host: str) -> None:
        point, image = self.mount_point(host), self.image(host)
        if os.path.ismount(point):
            thaw(point)
            kept = f"{point}.kept"
            shutil.rmtree(kept, ignore_errors=True)
            # Holes stay holes, and what is only the mechanism's is left behind.
            shutil.copytree(point, kept, symlinks=True, ignore=_not_ours, copy_function=_copy_sparse)
            while os.path.ismount(point) and unmount(point):
                pass
            os.rmdir(point)
            os.rename(kept, point)
        self._run.release(KIND_MOUNT, point)
        if self._memory is None:
            if os.path.exists(image):
                os.unlink(image)
            self._run.release(KIND_IMAGE, image)


def _not_ours(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "lost+found" or name.startswith(".splitbrain-")]


def _copy_sparse(source: str, destination: str) -> str:
    """Copy a file, without its holes."""
    with open(source, "rb") as reading, open(destination, "wb") as writing:
        size_bytes = os.fstat(reading.fileno()).st_size
        os.ftruncate(writing.fileno(), size_bytes)
        at = 0
        while at < size_bytes:
            try:
                at = os.lseek(reading.fileno(), at, os.SEEK_DATA)
            except OSError:
                break  # nothing but a hole is left
            end = os.lseek(reading.fileno(), at, os.SEEK_HOLE)
            while at < end:
                piece = os.pread(reading.fileno(), min(1 << 20, end - at), at)
                if not piece:
                    return destination
                os.pwrite(writing.fileno(), piece, at)
                at += len(piece)
    return destination


def remove_group(path: str, *, timeout_s: float) -> None:
    """Remove a control group once its last process is no zombie any more. Raises OSError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_POLL_S)


def detach(device: str) -> None:
    """Detach a loop device from its file, at once or when its last user lets it go. Raises OSError."""
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _LOOP_CLR_FD)
    finally:
        os.close(descriptor)


def storage_for(choice: str | None) -> str:
    """Where hosts keep their files: what was asked for, or the best that can be had. Raises ClusterUnavailable."""
    if choice is None:
        return IMAGE if why_no_file_systems() is None else SHARED
    if choice not in (IMAGE, MEMORY, SHARED):
        raise ClusterUnavailable(f"--storage must be {IMAGE}, {MEMORY} or {SHARED}, not {choice!r}")
    if choice != SHARED and (problem := why_no_file_systems()) is not None:
        raise ClusterUnavailable(f"--storage {choice}: {problem}")
    return choice
