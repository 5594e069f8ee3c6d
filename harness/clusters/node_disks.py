"""A file system, a mount namespace and a control group for each host of a cluster on this machine. Needs root.

    <work_dir>/<host>/disk.img     an ext4 image, sparse, on a loop device of its own
    <work_dir>/<host>/data         where it is mounted, in the host's mount namespace

The mount namespace belongs to a process that sleeps, the host's keeper. The machine's own table of mounts never has the
disk in it, so nobody else can come to hold it by making a namespace of their own, and it is gone with the last process
of the host; the harness looks at it by way of /proc/<keeper>/root. Every program of a host runs in that namespace, and
in the control group `splitbrain-<run>-<host>` of every hierarchy that there is. Images lie on the disk that the run is
kept on, or, on request, in memory. When the cluster is stopped the files are copied out of the image to the place where
it was mounted, so that everything after finds them under the same paths.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence

from harness.clusters.base import ClusterUnavailable, Program
from harness.clusters.loop_devices import file_id, image_mark, loop_devices_of, release_device
from harness.clusters.netns_calls import identity
from harness.clusters.netns_shell import run_command
from harness.clusters.processes import Processes
from harness.clusters.trials import TrialFailed, TrialUnfinished, run_trial
from harness.faults.shim_hosts import UNDO_INSIDE
from harness.programs import SYSTEM_PATH, find_program
from harness.run_state import KIND_CGROUP, KIND_IMAGE, TEMP_PREFIX, Claim, RunState
from nemesis.mechanisms.file_systems import CALL_TIMEOUT_S, OPERATIONS, thaw
from nemesis.mechanisms.shell import ShellError

__all__ = [
    "IMAGE",
    "MEMORY",
    "SHARED",
    "NodeDisks",
    "cgroup_parents",
    "remove_group",
    "storage_for",
    "why_no_file_systems",
]

IMAGE, MEMORY, SHARED = "image", "memory", "shared"
"""Where hosts keep their files: in an image on disk, in one in memory, or on the harness's own file system."""

IMAGE_BYTES = 2 << 30
"""Of one host's file system. Images are sparse: they take what is written."""

PROGRAMS = {"mkfs.ext4": "e2fsprogs", "mount": "mount", "unshare": "util-linux", "nsenter": "util-linux"}

_TRIAL = """
set -e
truncate -s 2M "$1/trial.img"
mkfs.ext4 -q -F -m 0 "$1/trial.img"
mkdir "$1/mounted"
mount -o loop "$1/trial.img" "$1/mounted"
umount "$1/mounted"
"""

_TMPFS_SLACK_BYTES = 64 << 20

BUSY_TIMEOUT_S = 10.0
"""How long an image may stay in use after its host's programs were ended, and a control group after that."""

_DETACH_TIMEOUT_S = 2.0
"""For a loop device to go by itself after the last mount has gone."""

_POLL_S = 0.05

_CONTROLLERS = frozenset({"cgroup2", "cpu", "memory", "blkio", "pids"})
"""The hierarchies in which hosts get groups: those that account for and limit what a host uses."""

_CONFINE = """
for group in $SPLITBRAIN_CGROUPS; do echo $$ > "$group/cgroup.procs" || exit 125; done
exec "$@"
"""
"""What a program's start goes through, inside its host's mount namespace."""

_KEPT = ".kept"


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
    with tempfile.TemporaryDirectory(prefix=f"{TEMP_PREFIX}trial-{os.getpid()}-") as directory:
        command = [find_program("sh") or "/bin/sh", "-c", _TRIAL, "trial", directory]
        try:
            run_trial("a loop device", ["--mount", "--propagation", "private"], command)
            return None
        except TrialUnfinished as error:
            return str(error)
        except TrialFailed as error:
            said = str(error).replace(f"{directory}/", "").rstrip(".")
    return f"a file system per host needs loop devices ({said}): run as root of the machine, with /dev/loop-control"


def cgroup_parents() -> list[str]:
    """The control group that this process is in, as a directory, in every hierarchy where it may make groups.

    Hosts' groups lie inside it, so that limits on the harness hold for its hosts too. A hierarchy that is mounted more
    than once, as for a chroot, counts once.
    """
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own |= dict.fromkeys(controllers.split(",") if controllers else ["cgroup2"], path)
    found: dict[str, str] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            device, root, point = before.split()[2:5]
            kind, _, options = after.split()[:3]
            names = ["cgroup2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
            inside = next((os.path.relpath(own[name], root) for name in names if name in own), None)
            if inside is not None and not inside.startswith("..") and _CONTROLLERS & set(names):
                path = os.path.normpath(os.path.join(point, inside))
                if os.access(path, os.W_OK):
                    found.setdefault(device, path)
    return list(found.values())


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
        self._in_memory = in_memory
        self._end_programs = end_programs
        self._keepers = Processes(run=run, log_dir=self._work_dir)
        self._keeper_pids: dict[str, int] = {}
        self._image_ids: dict[str, list[int]] = {}
        self._cgroups: dict[str, list[str]] = {}

    def mount_point(self, host: str) -> str:
        """`work_dir/<host>/data`, without links in it: as the kernel's table of mounts has it."""
        return os.path.join(self._work_dir, host, "data")

    def path(self, host: str, inside: str | None = None) -> str:
        """Where the harness finds what the host's programs call `inside` (default: the mount point)."""
        inside = inside or self.mount_point(host)
        return f"/proc/{self._keeper_pids[host]}/root{inside}" if host in self._keeper_pids else inside

    def image(self, host: str) -> str:
        """The image's file, as the host's programs would see it."""
        if self._in_memory:
            return os.path.join(self._work_dir, host, "memory", "disk.img")
        return os.path.join(self._work_dir, host, "disk.img")

    async def create(self) -> None:
        """Make mount namespaces, images and control groups. Raises ShellError, OSError, OperatorError."""
        claims = [Claim(KIND_IMAGE, self.image(host), {"point": self.mount_point(host)}) for host in self._hosts]
        parents = cgroup_parents()
        for host in self._hosts:
            self._cgroups[host] = [os.path.join(parent, f"splitbrain-{self._run.run_id}-{host}") for parent in parents]
        claims += [Claim(KIND_CGROUP, path, {}) for paths in self._cgroups.values() for path in paths]
        self._run.claim_all(claims)
        for paths in self._cgroups.values():
            for path in paths:
                os.mkdir(path)
        for outcome in await asyncio.gather(*map(self._create, self._hosts), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _create(self, host: str) -> None:
        image, point = self.image(host), self.mount_point(host)
        os.makedirs(point, exist_ok=True)
        os.makedirs(os.path.dirname(image), exist_ok=True)
        await self._start_keeper(host)
        size_bytes = IMAGE_BYTES + _TMPFS_SLACK_BYTES
        memory = f"mount -t tmpfs -o size={size_bytes},mode=700 splitbrain {shlex.quote(os.path.dirname(image))}"
        quoted = shlex.quote(image)
        await self._inside(
            host,
            f"{memory if self._in_memory else ':'}; set -C; : > {quoted}; truncate -s {IMAGE_BYTES} {quoted}; "
            f"mkfs.ext4 -q -F -m 0 {quoted}",
        )
        with open(self.path(host, image), "r+b") as file:
            file.write(image_mark(self._run.run_id, self._run.path))
        self._image_ids[host] = file_id(self.path(host, image))
        self._run.claim(KIND_IMAGE, image, point=point, file_id=self._image_ids[host])
        await self._inside(host, f"{self._mount_line(host)}; chmod 755 {shlex.quote(point)}")
        self._begin_undo(host)

    async def _start_keeper(self, host: str) -> None:
        """The process whose mount namespace is the host's. It dies with the harness, and the mounts with it."""
        sleep = Program(name="mounts", argv=[find_program("sleep") or "sleep", "infinity"], log_name="mounts.log")
        unshare = [find_program("unshare") or "unshare", "--mount", "--propagation", "private", "--"]
        keeper = await self._keepers.spawn(host, sleep, argv_prefix=unshare)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BUSY_TIMEOUT_S
        while identity("/proc/self/ns/mnt") == identity(f"/proc/{keeper.pid}/ns/mnt"):
            if keeper.exit_status() is not None or loop.time() > deadline_s:
                raise OSError(f"no mount namespace for {host}")
            await asyncio.sleep(_POLL_S / 10)
        self._keeper_pids[host] = keeper.pid

    def _mount_line(self, host: str) -> str:
        return f"mount -o loop,noatime {shlex.quote(self.image(host))} {shlex.quote(self.mount_point(host))}"

    def _begin_undo(self, host: str) -> None:
        """An empty undo log for the shim, durably there: whatever is on the disk now has been synced."""
        undo = os.path.join(self.path(host), UNDO_INSIDE)
        shutil.rmtree(undo, ignore_errors=True)
        os.mkdir(undo)
        parent = os.open(self.path(host), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    async def _inside(self, host: str, script: str) -> None:
        """Run a shell script in the host's mount namespace. Raises ShellError."""
        argv = [*self.enter(host), find_program("sh") or "/bin/sh", "-ec", script]
        environment = {**self._run.environment, "PATH": SYSTEM_PATH}
        await run_command(host, argv, environment=environment)

    def enter(self, host: str) -> list[str]:
        """What to put before a command line to run it where the host's disk is mounted."""
        if host not in self._keeper_pids:
            return []
        return [find_program("nsenter") or "nsenter", f"--mount=/proc/{self._keeper_pids[host]}/ns/mnt", "--"]

    async def mount_again(self, host: str) -> None:
        """End the host's programs, unmount and mount. Raises RuntimeError when something keeps the file system."""
        point = shlex.quote(self.mount_point(host))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BUSY_TIMEOUT_S
        await self._end_programs(host)
        problem = "it is still attached"
        # Mounted again too early it would be the same broken file system.
        while os.path.ismount(self.path(host)) or loop_devices_of(self._image_ids[host]):
            try:
                if os.path.ismount(self.path(host)):
                    await self._inside(host, f"umount {point}")
            except ShellError as error:  # a program that was killed has not let go yet
                problem = str(error)
            if loop.time() > deadline_s:
                raise RuntimeError(f"the file system of {host} is still in use: {problem}")
            await asyncio.sleep(_POLL_S)
        try:
            await self._inside(host, self._mount_line(host))
        except ShellError as error:
            raise RuntimeError(f"the file system of {host} cannot be mounted again: {error}") from None
        self._begin_undo(host)

    async def perform(self, host: str, operation: str, *arguments: str) -> None:
        """One of nemesis.mechanisms.file_systems' operations; nothing where no disk is mounted. Raises OSError,
        TimeoutError."""
        path = self.path(host)
        if os.path.ismount(path):
            await asyncio.wait_for(asyncio.to_thread(OPERATIONS[operation], path, *arguments), CALL_TIMEOUT_S)

    def prefix(self, host: str) -> list[str]:
        """What to put before a command line to run it in the host's mount namespace and control groups."""
        groups = " ".join(map(shlex.quote, self._cgroups.get(host, [])))
        script = _CONFINE.replace("$SPLITBRAIN_CGROUPS", groups)
        return [*self.enter(host), find_program("sh") or "/bin/sh", "-c", script, "confine"]

    async def remove(self) -> None:
        """Keep the files, unmount, remove images and control groups. The hosts' programs must have ended.

        Idempotent; safe after half a `create`. Raises OSError for what cannot be removed, after everything was tried.
        """
        claimed = {claim.ident for claim in self._run.claims if claim.kind in (KIND_IMAGE, KIND_CGROUP)}
        failures: list[OSError] = []
        kept: list[str] = []
        for host in self._hosts:
            if host in self._keeper_pids and os.path.ismount(self.path(host)):
                try:
                    await asyncio.to_thread(self._keep_files, host)
                    kept.append(host)
                except OSError as error:
                    failures.append(error)
        self._keeper_pids.clear()
        await self._keepers.stop_all()
        for host in self._hosts:
            point, image = self.mount_point(host), self.image(host)
            try:
                await self._see_detached(host)
                if host in kept:
                    os.rmdir(point)
                    os.rename(f"{point}{_KEPT}", point)
                if image in claimed:
                    if os.path.lexists(image):
                        os.unlink(image)
                    if self._in_memory and os.path.isdir(os.path.dirname(image)):
                        os.rmdir(os.path.dirname(image))
                    self._run.release(KIND_IMAGE, image)
            except OSError as error:
                failures.append(error)
        for path in (path for paths in self._cgroups.values() for path in paths if path in claimed):
            try:
                await asyncio.to_thread(remove_group, path, timeout_s=BUSY_TIMEOUT_S)
                self._run.release(KIND_CGROUP, path)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _see_detached(self, host: str) -> None:
        """The loop device goes with the last mount, but for a file system that is frozen: that one is thawed here.
        Raises OSError when the image stays attached."""
        image_id = self._image_ids.get(host, [])
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _DETACH_TIMEOUT_S
        # The kernel tells nobody when it lets a device go.
        while (devices := loop_devices_of(image_id)) and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        for device in devices:
            await asyncio.to_thread(release_device, device)

    def _keep_files(self, host: str) -> None:
        """Copy what is on the disk to where it will be looked for: holes stay holes, and what is only the
        mechanisms' stays behind."""
        source, destination = self.path(host), f"{self.mount_point(host)}{_KEPT}"
        thaw(source)
        shutil.rmtree(destination, ignore_errors=True)
        shutil.copytree(source, destination, symlinks=True, ignore=_not_ours, copy_function=_copy_sparse)


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


def storage_for(choice: str | None) -> str:
    """Where hosts keep their files: what was asked for, or the best that can be had. Raises ClusterUnavailable."""
    if choice is None:
        return IMAGE if why_no_file_systems() is None else SHARED
    if choice not in (IMAGE, MEMORY, SHARED):
        raise ClusterUnavailable(f"--storage must be {IMAGE}, {MEMORY} or {SHARED}, not {choice!r}")
    if choice != SHARED and (problem := why_no_file_systems()) is not None:
        raise ClusterUnavailable(f"--storage {choice}: {problem}")
    return choice
