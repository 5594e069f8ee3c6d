"""The `netns` cluster: every host is a network namespace, joined by a bridge in a namespace of its own.

    sb-<run>-n1 eth0 ----+
    sb-<run>-n2 eth0 ----+-- br0 in sb-<run>-net
    ...                  |
    sb-<run>-clients  ---+   (the harness itself is in here while the run lasts)

Each host has one address in 10.77.0.0/24, visible only to the hosts of its run, so any number of runs can go on
concurrently and nothing appears in the machine's own network. Packets between hosts go through the kernel's own
TCP/IP stack; cuts are nftables sets in the namespace of the host that drops (see nemesis.mechanisms.nft).

If the machine allows it, each replica's host also has a file system, a mount namespace and a control group:

    <work_dir>/<host>/disk.img     an ext4 image, sparse, on a loop device of its own
    <work_dir>/<host>/data         where it is mounted, in the host's mount namespace

The mount namespace is that of the host's agent. The disk never appears in the machine's own mount table, so no other
process can keep it busy by making a namespace of its own, and it is gone with the last process of the host; the
harness reaches it through /proc/<agent>/root. Every program of a host runs in that namespace, and in the control group
`splitbrain-<run>-<host>` of every hierarchy available. Images are on the disk that holds the run, or, on request, in
memory. When the cluster is stopped, the files are copied out of the image to the place where it was mounted, so that
later steps find them under the same paths.

Needs root, or a user namespace in which the harness is root (see harness.clusters.user_namespace).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from harness.clusters.agent_cluster import ClusterArguments
from harness.clusters.agent_file_systems import AgentFileSystems, FileSystemPlace, why_no_file_systems
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import CLIENTS_HOST, ClusterUnavailable
from harness.clusters.control_groups import cgroup_parents, limiting_controllers, remove_group
from harness.clusters.host_names import NamedHost
from harness.clusters.loop_devices import file_id, loop_devices_of, release_device
from harness.clusters.netns_calls import enter_namespace, namespace_path, open_current_namespace, remove_namespace
from harness.clusters.netns_trial import PROGRAMS, why_no_netem
from harness.clusters.options import MECHANISM_OPTION
from harness.clusters.own_machine import OwnMachineCluster
from harness.clusters.own_resources import GROUP_KINDS, group_names
from harness.clusters.shaped_links import NETEM, RELAY
from harness.clusters.threads import all_of, begin_in_thread, in_thread, renew_threads
from harness.errors import HarnessError
from harness.faults.file_system_disks import FILE_SYSTEM_KINDS
from harness.programs import require_programs
from harness.run_state import KIND_CGROUP, KIND_IMAGE, KIND_NETNS, Claim
from nemesis.mechanisms.file_systems import thaw
from nemesis.mechanisms.shell import ShellError

__all__ = ["DEVICE", "IMAGE", "MAX_HOSTS", "MEMORY", "SHARED", "NetnsCluster", "storage_for"]

MAX_HOSTS = 200
"""Largest number of replicas: the /24 also has room for the clients' host and those that the system adds."""

IMAGE, MEMORY, SHARED = "image", "memory", "shared"
"""Where hosts keep their files: in an image on disk, in an image in memory, or on the harness's own file system."""

DEVICE = "eth0"
"""A host's only device, through which it reaches every other host."""

_SUBNET = "10.77.0"
_NOBODY = f"{_SUBNET}.254"
"""An address that no host has."""
_NAME_SERVICE = "127.0.0.153"
"""Address of the name service of every host, each in its own network namespace."""
_PREFIX_BITS = 24
_BRIDGE_HOST = "net"
"""The namespace of the bridge; no program runs there."""

_CONTROLLER_OF = {"cpu": "cpu", "memory": "memory", "processes": "pids"}

_COMMAND_TIMEOUT_S = 20.0
_BUSY_TIMEOUT_S = 10.0
"""How long a control group may stay in use after its host's programs were ended."""

_DETACH_TIMEOUT_S = 2.0
"""Time for a loop device to be detached on its own after its last mount has gone."""

_POLL_S = 0.02
_KEPT = ".kept"


class NetnsCluster(OwnMachineCluster):
    """Hosts as network namespaces, for one run. See harness.clusters.base.Cluster.

    Start and stop it on the same thread: that thread is in the clients' namespace in between.
    """

    name = "netns"
    description = "a network namespace per host on a bridge; cuts by nftables; needs root or a user namespace"
    max_hosts = MAX_HOSTS
    options: Sequence[str] = ("storage", MECHANISM_OPTION)
    storage: str | None = None
    """The operator's choice, on a class made by `configured`."""

    def __init__(self, *, storage: str | None = None, **given: Unpack[ClusterArguments]) -> None:
        super().__init__(**given)
        self._addresses = {host: f"{_SUBNET}.{number}" for number, host in enumerate(self._hosts, 1)}
        for number, host in enumerate((*self._extra_hosts, CLIENTS_HOST), MAX_HOSTS + 1):
            self._addresses[host] = f"{_SUBNET}.{number}"
        self._names = {host: f"sb-{self._run.run_id}-{host}" for host in (_BRIDGE_HOST, *self._addresses)}
        self._programs: Mapping[str, str] = {}
        self._home = -1
        self._storage = storage_for(storage or self.storage)
        self._cgroups: dict[str, list[str]] = {}
        self._program_groups: dict[str, list[str]] = {}
        """Groups inside these, for the programs without the agent, if the run limits resources."""
        self._pids: dict[str, int] = {}
        """Host -> pid of its agent."""
        self._image_ids: dict[str, list[int]] = {}
        self._images: dict[str, FileSystemPlace] = {}
        self._kept: list[str] = []
        self._in_place: set[str] = set()
        """Hosts whose files were copied to the path where their disk was mounted."""
        self._left: set[str] = set()
        """Hosts whose images are left, because their files could not be copied."""

    @classmethod
    def configured(cls, *, storage: str | None = None, extra_hosts: Sequence[str] = ()) -> type[NetnsCluster]:
        """The class with these options, on which to call `missing`. Raises ClusterUnavailable."""
        return type(cls.__name__, (cls,), {"storage": storage_for(storage)})

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can."""
        if interface == "resources" and ability in GROUP_KINDS:
            why_not = "--storage shared" if cls.storage == SHARED else why_no_file_systems()
            if why_not is not None:
                return f"hosts without disks of their own have no control groups either ({why_not})"
            if _CONTROLLER_OF[ability] not in limiting_controllers():
                return f"the harness cannot create control groups for {ability} on this machine: run it as root"
            return None
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            if cls.storage == SHARED and why_no_file_systems() is None:
                return "--storage shared: hosts have no file systems of their own"
            return why_no_file_systems()
        return super().missing(interface, ability)

    @staticmethod
    def link_mechanism() -> str:
        """The mechanism that shapes links on this machine, for `harness doctor`."""
        why_not = why_no_netem()
        return NETEM if why_not is None else f"{RELAY}, as {why_not}"

    @property
    def _machines(self) -> list[str]:
        return list(self._addresses)

    def _address(self, host: str) -> str:
        return self._addresses[host]

    def _named_host(self, host: str) -> NamedHost:
        others = {other: self._addresses[other] for other in self._all_hosts if other != host}
        return NamedHost(
            self.agent(host), listen=_NAME_SERVICE, own=self._addresses[host], names=others, unused=_NOBODY
        )

    async def _ipv6_of_others(self) -> Mapping[str, str]:
        return dict.fromkeys(self._machines, f'iifname "{DEVICE}" meta nfproto ipv6')

    # Making hosts

    async def start(self) -> None:
        """Create namespaces, bridge and rules, and enter the clients' namespace.

        Raises ClusterUnavailable when this machine or user cannot; what was created by then is removed.
        """
        await super().start()
        try:
            self._enter_clients()
        except BaseException:
            await self._stop_after_failure()
            raise

    async def _make_hosts(self) -> None:
        self._programs = require_programs(PROGRAMS)
        self._start_agents()
        if self._storage != SHARED:
            self._make_groups()

    async def _check_machines(self) -> None:
        """Make the namespaces while the agents start up; then move the agents into them."""
        await all_of([self._make_namespaces(), *map(self._greet_one, self._machines)])
        await all_of(map(self._settle, self._machines))

    async def _greet_one(self, host: str) -> None:
        self._pids[host] = int((await self._links[host].greet())["pid"])

    async def _make_namespaces(self) -> None:
        self._run.claim_all(Claim(KIND_NETNS, name, {}) for name in self._names.values())
        ip = self._programs["ip"]
        try:
            await self._batch([ip], [f"netns add {name}" for name in self._names.values()])
            bridge = ["link add br0 type bridge", "link set br0 up"]
            for host in self._addresses:
                bridge.append(f"link add {host} type veth peer name {DEVICE} netns {self._names[host]}")
                bridge.append(f"link set {host} master br0 up")
            await self._batch([ip, "-netns", self._names[_BRIDGE_HOST]], bridge)
        except ShellError as error:
            raise ClusterUnavailable(f"netns: {error}; needs root or unprivileged user namespaces") from None

    async def _settle(self, host: str) -> None:
        """Move a host's agent into the host's namespaces and groups, and give the host its address."""
        await self._links[host].request(
            "enter",
            {
                "network": namespace_path(self._names[host]),
                "device": DEVICE,
                "address": f"{self._addresses[host]}/{_PREFIX_BITS}",
                "groups": self._cgroups.get(host, []),
                "has_mounts": self._storage != SHARED and host in self._hosts,
            },
        )

    def _make_groups(self) -> None:
        parents = cgroup_parents()
        for host in self._hosts:
            name = self._group_name(host)
            self._cgroups[host] = [os.path.join(parent, name) for parent in parents]
            if any(interface == "resources" for interface, _ in self._capabilities):
                self._program_groups[host] = [os.path.join(group, f"{name}-programs") for group in self._cgroups[host]]
        made = (*self._cgroups.values(), *self._program_groups.values())
        paths = [path for paths in made for path in paths]
        self._run.claim_all(Claim(KIND_CGROUP, path, {}) for path in paths)
        for path in paths:
            os.mkdir(path)

    def _group_name(self, host: str) -> str:
        return f"splitbrain-{self._run.run_id}-{host}"

    def _limit_groups(self) -> Mapping[str, Mapping[str, str]]:
        return {host: group_names(groups) for host, groups in self._program_groups.items()}

    async def _batch(self, ip: Sequence[str], lines: Sequence[str]) -> None:
        """Run many `ip` commands in one process. Raises ShellError."""
        argv = [*ip, "-batch", "-"]
        done = await in_thread(
            subprocess.run,
            argv,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            env={**os.environ, **self._run.environment},
            start_new_session=True,
        )
        if done.returncode != 0:
            raise ShellError("netns", argv, done.returncode, done.stderr)

    async def _make_file_systems(self, agents: Mapping[str, AgentLink]) -> AgentFileSystems | None:
        """Make them in every run, whatever its faults, so that hosts do not differ; none if storage is shared."""
        if self._storage == SHARED:
            return None
        self._images = {host: self._file_system_place(host) for host in self._hosts}
        self._run.claim_all(
            Claim(KIND_IMAGE, place.image, {"point": place.mount_point}) for place in self._images.values()
        )
        for place in self._images.values():
            os.makedirs(os.path.dirname(place.image), exist_ok=True)
        made = await self._create_file_systems(agents, self._images)
        for host, place in self._images.items():
            self._image_ids[host] = file_id(self._seen_by(host, place.image))
            self._run.claim(KIND_IMAGE, place.image, point=place.mount_point, file_id=self._image_ids[host])
        return made

    def _file_system_place(self, host: str) -> FileSystemPlace:
        place = super()._file_system_place(host)
        if self._storage == MEMORY:
            image = os.path.join(os.path.dirname(place.image), "memory", "disk.img")
            place = replace(place, image=image, in_memory=True)
        return replace(place, path_here=self._seen_by(host, place.mount_point))

    def _seen_by(self, host: str, path: str) -> str:
        """The harness's own path to what the host's programs see at `path`."""
        return f"/proc/{self._pids[host]}/root{path}"

    def _enter_clients(self) -> None:
        self._home = open_current_namespace()
        clients = os.open(namespace_path(self._names[CLIENTS_HOST]), os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_namespace(clients)
        finally:
            os.close(clients)
        renew_threads()

    # The end

    async def stop(self) -> None:
        """End every process, go back to where `start` was called, remove the namespaces.

        Their rules and devices go with them. Idempotent; safe after a partial start. Raises HarnessError when something
        cannot be removed, after everything was tried: it then stays in the run's state.
        """
        try:
            await super().stop()
        finally:
            if not self._links:
                self._hide_empty_places()
            if self._home >= 0:
                try:
                    enter_namespace(self._home)
                finally:
                    os.close(self._home)
                    self._home = -1
                renew_threads()

    def _hide_empty_places(self) -> None:
        """Remove the empty data directory of each host whose files were not copied: it would be taken for the data that
        the host had."""
        for host in self._images.keys() - self._in_place:
            with contextlib.suppress(OSError):
                os.rmdir(self._images[host].mount_point)

    async def _collect(self) -> list[Exception]:
        problems = await super()._collect()
        for host, place in self._images.items():
            source, kept = place.path_here, f"{place.mount_point}{_KEPT}"
            if source is None or host not in self._image_ids:
                continue  # the start did not get this far
            try:
                if not os.path.ismount(source):
                    raise FileNotFoundError("its file system is no longer mounted")
                await begin_in_thread(_keep_files, source, kept)
                self._kept.append(host)
            except OSError as error:
                shutil.rmtree(kept, ignore_errors=True)
                problems.append(self._leave_image(host, place, error))
        return problems

    def _leave_image(self, host: str, place: FileSystemPlace, error: OSError) -> HarnessError:
        """Leave the image of a host whose files could not be copied; returns the problem to report."""
        said = f"the files of {host} could not be kept: {_in_a_line(error)}"
        if place.in_memory:
            return HarnessError(f"{said}; they were in memory, and are lost")
        self._left.add(host)
        return HarnessError(f"{said}; they are in the image {place.image} (as root: mount -o loop IMAGE DIRECTORY)")

    async def _remove_places(self) -> list[Exception]:
        """Remove namespaces, images and control groups; returns what went wrong."""
        problems: list[Exception] = []
        claimed = {(claim.kind, claim.ident) for claim in self._run.claims}
        for name in self._names.values():
            if (KIND_NETNS, name) in claimed:
                try:
                    remove_namespace(name)
                    self._run.release(KIND_NETNS, name)
                except OSError as error:
                    problems.append(error)
        for host, place in self._images.items():
            try:
                await self._remove_image(host, place, is_claimed=(KIND_IMAGE, place.image) in claimed)
            except (OSError, subprocess.SubprocessError) as error:
                problems.append(error)
        inner_first = (*self._program_groups.values(), *self._cgroups.values())
        for path in (path for paths in inner_first for path in paths if (KIND_CGROUP, path) in claimed):
            try:
                await begin_in_thread(remove_group, path, timeout_s=_BUSY_TIMEOUT_S)
                self._run.release(KIND_CGROUP, path)
            except OSError as error:
                problems.append(error)
        return problems

    async def _remove_image(self, host: str, place: FileSystemPlace, *, is_claimed: bool) -> None:
        """Remove the image of a host once its loop device has gone with the last mount; a frozen file system keeps the
        device, and is thawed here. Raises OSError when the image stays attached."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _DETACH_TIMEOUT_S
        # The kernel sends no notification when it releases a device.
        image_id, run_id = self._image_ids.get(host, []), self._run.run_id
        while (devices := loop_devices_of(image_id, run_id)) and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        try:
            for device in devices:
                await begin_in_thread(release_device, device)
        finally:
            self._put_in_place(host, place)
        if is_claimed:
            if host not in self._left:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place.image)
            if place.in_memory and os.path.isdir(os.path.dirname(place.image)):
                os.rmdir(os.path.dirname(place.image))
            self._run.release(KIND_IMAGE, place.image)

    def _put_in_place(self, host: str, place: FileSystemPlace) -> None:
        if host in self._kept:
            os.rmdir(place.mount_point)
            os.rename(f"{place.mount_point}{_KEPT}", place.mount_point)
            self._kept.remove(host)
            self._in_place.add(host)

    # Files

    def local_path(self, host: str, path: str) -> str:
        """`path` itself if hosts share the harness's file system or have stopped; else through /proc/<agent>/root."""
        place, data_dir = self._images.get(host), self.data_dir(host)
        if place is None or place.path_here is None or not self._links:
            return path
        if os.path.commonpath([path, data_dir]) != data_dir:
            return path
        return os.path.normpath(os.path.join(place.path_here, os.path.relpath(path, data_dir)))


def storage_for(choice: str | None) -> str:
    """Where hosts keep their files: the given choice, or the best one available. Raises ClusterUnavailable."""
    if choice is None:
        return IMAGE if why_no_file_systems() is None else SHARED
    if choice not in (IMAGE, MEMORY, SHARED):
        raise ClusterUnavailable(f"--storage must be {IMAGE}, {MEMORY} or {SHARED}, not {choice!r}")
    if choice != SHARED and (problem := why_no_file_systems()) is not None:
        raise ClusterUnavailable(f"--storage {choice}: {problem}")
    return choice


def _in_a_line(error: OSError) -> str:
    """The error in one line; for a copy of many files, its first error."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][2])
    return str(error)


def _keep_files(source: str, destination: str) -> None:
    """Thaw a disk and copy its files: holes stay holes, and files that belong to fault mechanisms or hold no data are
    left out. Raises OSError."""
    thaw(source)
    shutil.rmtree(destination, ignore_errors=True)
    shutil.copytree(source, destination, symlinks=True, ignore=_not_kept, copy_function=_copy_sparse)


def _not_kept(directory: str, names: list[str]) -> list[str]:
    """The names to leave out: files of the file system itself or of fault mechanisms, sockets, which cannot be opened,
    and pipes and devices, which may be read forever."""
    ours = {name for name in names if name == "lost+found" or name.startswith(".splitbrain-")}
    return [name for name in names if name in ours or not _holds_data(os.path.join(directory, name))]


def _holds_data(path: str) -> bool:
    mode = os.lstat(path).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _copy_sparse(source: str, destination: str) -> str:
    """Copy a file and keep its holes as holes."""
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
                at += os.pwrite(writing.fileno(), piece, at)  # less than all if the disk has just become full
    return destination
