"""Resource limits for replicas on the harness's own machine: control groups of both versions, and prlimit.

Every program of a host is put into a control group as soon as it is started; the host's agent stays outside, because no
limit may reach it. A limit is one value of that group. Descriptors are limited per process (prlimit): each may have no
descriptor number above its lowest free one. The kernel does not count calls that fail for lack of a descriptor; so the
harness opens probe connections to every port that a process listens on and that it can reach, and keeps them open: a
process that cannot accept leaves them in the accept queue, where the kernel shows them. If the process has a free
descriptor, it merely has not accepted yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.clusters.host_agent import socket_end, sockets_of
from harness.run_state import living_thread
from nemesis.target import ProcessMember, ResourceLimit, ResourceUse

__all__ = ["GROUP_KINDS", "OwnResources", "group_names"]

GROUP_KINDS = ("cpu", "memory", "processes")
"""The kinds of resources that control groups limit."""

DESCRIPTORS = "descriptors"

_PROBES_PER_PORT, _MAX_PROBES = 2, 32
"""Probe connections per port at a time, and per host in total."""

_LOOKS, _LOOK_AGAIN_S = 5, 0.02
"""How often, and at what interval, open descriptors are counted before the limit is final: some are short-lived."""

_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""

_CONTROLLERS = {"cpu": "cpu", "memory": "memory", "processes": "pids"}
_PERIOD_US = 100_000
"""Period over which a group's CPU quota applies; the kernel's default."""
_MIN_QUOTA_US = 1000
"""The kernel's minimum."""
_MIB = 1 << 20
_SQUEEZE_TRIES = 20
"""Attempts at a memory limit, each 1 MiB higher than the last."""
_ENDING_LOOKS, _ENDING_PAUSE_S = 10, 0.05
"""How often, and how far apart, a process that its group does not list is looked for again: one that is ending is not
listed any more, and on a busy machine it takes a moment until it is gone."""
_NONE_V1 = 1 << 60
"""From this value on, version 1 means no memory limit."""


@dataclass(slots=True)
class _Lowered:
    """The soft limit on descriptors of a limited process, before (`was`), and the highest that it has been lowered to:
    what the process started meanwhile may have inherited any."""

    was: int
    highest: int


class OwnResources:
    """See nemesis.target.Resources. `groups` are the control groups of each host's programs, by controller (cpu,
    memory, pids); empty if there are none. `members` lists every process of a host's programs; `address` is that of a
    host, which is on the loopback interface if its programs share the harness's network."""

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, str]],
        *,
        members: Callable[[str], Awaitable[Sequence[ProcessMember]]],
        address: Callable[[str], str] = lambda host: "127.0.0.1",
    ) -> None:
        self._groups = {host: dict(by_controller) for host, by_controller in groups.items()}
        self._members = members
        self._address = address
        self._faults: dict[str, Mapping[str, ResourceLimit]] = {}
        self._ended: dict[str, dict[str, ResourceLimit]] = {}
        """Fault that was released -> host whose programs may still have its limit -> that limit"""
        self._lowered: dict[str, dict[tuple[int, int], _Lowered]] = {}
        self._probes: dict[str, list[socket.socket]] = {}
        """host -> probe connections to its programs' ports, while their descriptors are limited"""
        self._waited: dict[str, int] = {}
        """host -> how many sockets had a probe connection left in their queue at the end of a fault, over all faults"""
        self._lock = asyncio.Lock()

    def adopt(self, host: str, pid: int) -> None:
        """Put a process that was just started, and what it starts from now on, into its host's groups."""
        for path in self._groups.get(host, {}).values():
            with contextlib.suppress(ProcessLookupError):
                Path(path, "cgroup.procs").write_text(str(pid), encoding="ascii")

    async def limit(self, fault_id: str, limits: Mapping[str, ResourceLimit]) -> None:
        """Limit the resources of hosts' programs until released. Raises OSError; KeyError if there is no group."""
        async with self._lock:
            self._faults[fault_id] = dict(limits)
            for host, limit in limits.items():
                if limit.kind == DESCRIPTORS:
                    await self._lower_descriptors(host)
                    self._open_probes(host, await self._members(host))
                else:
                    for member in await self._members(host):  # some may have started before their parent was put there
                        self.adopt(host, member.pid)
                    self._set_group(host, limit.kind)

    async def release(self, fault_id: str) -> None:
        """Undo one fault; limits of other faults stay. Idempotent: repeated, it undoes what failed the first time.
        Every host is tried before the first error is raised (OSError, ShellError)."""
        failure: Exception | None = None
        async with self._lock:
            ended = self._ended.setdefault(fault_id, {})
            ended |= self._faults.pop(fault_id, {})
            for host, limit in list(ended.items()):
                try:
                    await self._undo(host, limit.kind)
                    del ended[host]
                except Exception as error:
                    failure = failure or error
            if not ended:
                del self._ended[fault_id]
        if failure is not None:
            raise failure

    async def _undo(self, host: str, kind: str) -> None:
        if kind != DESCRIPTORS:
            self._set_group(host, kind)
        elif not self._limits(host, DESCRIPTORS):
            self._close_probes(host, await self._members(host))
            await self._raise_descriptors(host)

    async def release_all(self) -> None:
        """Undo every limit. Idempotent. Every fault is tried before the first error is raised."""
        failure: Exception | None = None
        for fault_id in list({**self._faults, **self._ended}):
            try:
                await self.release(fault_id)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def usage(self, host: str, kind: str) -> ResourceUse:
        """What the kernel reports; see nemesis.target.Resources. Raises OSError."""
        members = await self._members(host)
        if kind == DESCRIPTORS:
            return self._descriptor_usage(host, members)
        path = self._group(host, kind)
        inside = set(Path(path, "cgroup.procs").read_text(encoding="ascii").split())
        outside = {member[:2]: member for member in members if str(member.pid) not in inside}
        looks = 0
        while outside and looks < _ENDING_LOOKS:  # those that are ending, their group does not list
            outside = {member[:2]: member for member in await self._members(host) if member[:2] in outside}
            looks += 1
            await asyncio.sleep(_ENDING_PAUSE_S if outside else 0)
        astray = list(map(str, outside.values()))
        limit, words = _read_limit(path, kind)
        return ResourceUse(is_limited=limit is not None, met=_times_met(path, kind), astray=astray, detail=words)

    def _open_probes(self, host: str, members: Sequence[ProcessMember]) -> None:
        """Connect to every port that these processes listen on, more than once: a process that was waiting in accept
        when it was limited has a descriptor already, so it may accept the first connection."""
        probes = self._probes.setdefault(host, [])
        for listener in _listeners(members) * _PROBES_PER_PORT:
            if len(probes) == _MAX_PROBES:
                return
            reachable_at = listener.reachable_at(self._address(host))
            if reachable_at is None:
                continue
            probe = socket.socket()
            probe.setblocking(False)
            # After an orderly close, TIME_WAIT would look like a connection that bypassed the proxies of `local`.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if probe.connect_ex((reachable_at, listener.port)) in (0, errno.EINPROGRESS):
                probes.append(probe)
            else:
                probe.close()

    def _close_probes(self, host: str, members: Sequence[ProcessMember]) -> None:
        self._waited[host] = self._waited.get(host, 0) + _waiting(members)
        for probe in self._probes.pop(host, ()):
            probe.close()

    def _limits(self, host: str, kind: str) -> list[ResourceLimit]:
        return [
            limit
            for limits in self._faults.values()
            for of_host, limit in limits.items()
            if of_host == host and limit.kind == kind
        ]

    def _group(self, host: str, kind: str) -> str:
        return self._groups[host][_CONTROLLERS[kind]]

    def _set_group(self, host: str, kind: str) -> None:
        """Set a host's group to the lowest limit of all faults in force, or to none."""
        path, limits = self._group(host, kind), self._limits(host, kind)
        if kind == "cpu":
            quota_us = None
            if limits:
                quota_us = max(_MIN_QUOTA_US, min(limit.percent for limit in limits) * _PERIOD_US // 100)
            _write_cpu(path, quota_us)
        elif kind == "memory":
            if limits:
                _squeeze(path, min(limit.spare_mib for limit in limits))
            else:
                _write_memory(path, None)
        else:
            count = _read_text(path, "pids.current") if limits else "max"
            _write_text(path, "pids.max", count)

    async def _lower_descriptors(self, host: str) -> None:
        for look in range(_LOOKS):
            if look:
                await asyncio.sleep(_LOOK_AGAIN_S)
            self._lower_to_lowest_free(host, await self._members(host))

    def _lower_to_lowest_free(self, host: str, members: Sequence[ProcessMember]) -> None:
        lowered = self._lowered.setdefault(host, {})
        highest = _highest(lowered)
        for member in members:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                soft, hard = resource.prlimit(member.pid, resource.RLIMIT_NOFILE)
                number = min(_lowest_free(member.pid), soft)
                # One that was started meanwhile has inherited its limit.
                new = next(iter(lowered.values())) if soft <= highest else _Lowered(soft, number)
                before = lowered.get((member.pid, member.start_ticks), new)
                resource.prlimit(member.pid, resource.RLIMIT_NOFILE, (number, hard))
                lowered[member.pid, member.start_ticks] = _Lowered(before.was, max(before.highest, number))

    async def _raise_descriptors(self, host: str) -> None:
        """Restore the limits, also of processes that were started meanwhile and inherited theirs."""
        lowered = self._lowered.get(host, {})
        if not lowered:
            return
        highest = _highest(lowered)
        anyone = next(iter(lowered.values()))
        for member in await self._members(host):
            with contextlib.suppress(ProcessLookupError):
                soft, hard = resource.prlimit(member.pid, resource.RLIMIT_NOFILE)
                if soft <= highest:
                    was = lowered.get((member.pid, member.start_ticks), anyone).was
                    resource.prlimit(member.pid, resource.RLIMIT_NOFILE, (was, hard))
        del self._lowered[host]

    def _descriptor_usage(self, host: str, members: Sequence[ProcessMember]) -> ResourceUse:
        lowered = self._lowered.get(host, {})
        highest = _highest(lowered)
        limits: dict[ProcessMember, int] = {}
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                limits[member] = resource.prlimit(member.pid, resource.RLIMIT_NOFILE)[0]
        astray = [str(member) for member, soft in limits.items() if soft > highest] if lowered else []
        words = ", ".join(f"{member} may open {soft} descriptors" for member, soft in list(limits.items())[:3])
        if lowered and not limits:  # and it is not known why they ended
            return ResourceUse(is_limited=True, met=None, detail="all limited processes have exited")
        is_limited = any(soft <= highest for soft in limits.values())
        met = None
        if not lowered or self._probes.get(host):
            waiting = _waiting(members) if lowered else 0
            met = self._waited.get(host, 0) + waiting
            if lowered and not waiting:
                self._open_probes(host, members)  # all were accepted; the next look will show whether more are
        return ResourceUse(is_limited=is_limited, met=met, astray=astray, detail=words or "no process is running")


def _highest(lowered: Mapping[tuple[int, int], _Lowered]) -> int:
    """The highest limit that any of these processes has been lowered to; -1 if there are none."""
    return max((one.highest for one in lowered.values()), default=-1)


def _write_cpu(path: str, quota_us: int | None) -> None:
    if os.path.exists(os.path.join(path, "cpu.max")):
        _write_text(path, "cpu.max", f"{'max' if quota_us is None else quota_us} {_PERIOD_US}")
        return
    _write_text(path, "cpu.cfs_period_us", str(_PERIOD_US))
    _write_text(path, "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))


def _squeeze(path: str, spare_mib: int) -> None:
    """Limit a group's memory to what its processes hold plus `spare_mib`, but no more than they use now, or as little
    above that as the kernel can reclaim. Raises OSError."""
    for more_mib in range(_SQUEEZE_TRIES):
        try:
            limit_bytes = min(_used_bytes(path), _held_bytes(path) + spare_mib * _MIB) + more_mib * _MIB
            _write_memory(path, limit_bytes)
            return
        except OSError as error:
            # Not enough can be reclaimed, and they may hold more by now.
            if error.errno != errno.EBUSY or more_mib == _SQUEEZE_TRIES - 1:
                raise


def _write_memory(path: str, limit_bytes: int | None) -> None:
    name = "memory.max" if os.path.exists(os.path.join(path, "memory.max")) else "memory.limit_in_bytes"
    if limit_bytes is not None:
        _write_text(path, name, str(limit_bytes))
    else:
        _write_text(path, name, "max" if name == "memory.max" else "-1")


def _read_limit(path: str, kind: str) -> tuple[int | None, str]:
    """(the limit in force or None, limit and use in words)."""
    if kind == "cpu":
        if os.path.exists(os.path.join(path, "cpu.max")):
            quota, period = _read_text(path, "cpu.max").split()
        else:
            quota, period = _read_text(path, "cpu.cfs_quota_us"), _read_text(path, "cpu.cfs_period_us")
        if quota in ("max", "-1"):
            return None, "unlimited CPU time"
        return int(quota), f"{int(quota) / 1000:g} ms of CPU time every {int(period) / 1000:g} ms"
    if kind == "memory":
        is_v2 = os.path.exists(os.path.join(path, "memory.max"))
        most = _read_text(path, "memory.max" if is_v2 else "memory.limit_in_bytes")
        used_mib = _used_bytes(path) / _MIB
        if most == "max" or int(most) >= _NONE_V1:
            return None, f"{used_mib:.1f} MiB, no limit"
        return int(most), f"{used_mib:.1f} of {int(most) / _MIB:.1f} MiB"
    most, used = _read_text(path, "pids.max"), _read_text(path, "pids.current")
    return (None, f"{used} threads, no limit") if most == "max" else (int(most), f"{used} of {most} threads")


def _times_met(path: str, kind: str) -> int:
    """How often the kernel has enforced this limit."""
    if kind == "cpu":
        return _field(path, "cpu.stat", "nr_throttled")
    if kind == "processes":
        return _field(path, "pids.events", "max")
    if os.path.exists(os.path.join(path, "memory.events")):
        return _field(path, "memory.events", "max")
    return int(_read_text(path, "memory.failcnt"))


def _used_bytes(path: str) -> int:
    """The memory charged to a group, including the page cache of files that it has read or written."""
    is_v2 = os.path.exists(os.path.join(path, "memory.max"))
    return int(_read_text(path, "memory.current" if is_v2 else "memory.usage_in_bytes"))


def _held_bytes(path: str) -> int:
    """The memory that a group's processes hold and that cannot be written back to files."""
    is_v2 = os.path.exists(os.path.join(path, "memory.max"))
    return sum(_field(path, "memory.stat", name) for name in (("anon", "kernel") if is_v2 else ("total_rss",)))


def _field(path: str, name: str, wanted: str) -> int:
    for line in _read_text(path, name).splitlines():
        key, _, value = line.partition(" ")
        if key == wanted:
            return int(value)
    return 0


@dataclass(frozen=True, slots=True)
class _Listener:
    """A socket that processes listen on; `waiting` connections wait there to be accepted."""

    address: str
    port: int
    waiting: int
    pids: list[int]

    def reachable_at(self, own: str) -> str | None:
        """Where the harness reaches it on a host with this address; None if it is on the loopback interface of the host
        alone, or accepts IPv6 alone."""
        if self.address in ("0.0.0.0", "::"):
            return own
        is_reachable = ":" not in self.address and (own.startswith("127.") or not self.address.startswith("127."))
        return self.address if is_reachable else None


def _listeners(members: Sequence[ProcessMember]) -> list[_Listener]:
    """The TCP sockets that processes listen on in their own network namespace."""
    found: dict[str, _Listener] = {}
    for member in members:
        open_here = sockets_of(member.pid)
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{member.pid}/net", name).read_text(encoding="ascii").splitlines()[1:]:
                    _, local, _, state, queues, _, _, _, _, inode, *_ = line.split()
                    if state == _LISTEN and int(inode) in open_here:
                        waiting = int(queues.partition(":")[2], 16)
                        one = _Listener(*socket_end(local), waiting, [])
                        found.setdefault(inode, one).pids.append(member.pid)
    return list(found.values())


def _waiting(members: Sequence[ProcessMember]) -> int:
    """How many sockets have a waiting connection that none of their processes can accept."""
    return sum(listener.waiting > 0 and all(map(_is_short, listener.pids)) for listener in _listeners(members))


def _is_short(pid: int) -> bool:
    """Whether a process cannot open another descriptor; False if it has ended."""
    try:
        return _lowest_free(pid) >= resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def _lowest_free(pid: int) -> int:
    """The lowest descriptor number that a process can open. Raises OSError, ProcessLookupError if it has ended."""
    thread = living_thread(pid)
    if thread is None:  # until it is reaped, what it has open is nothing to root, and forbidden to others
        raise ProcessLookupError(f"process {pid} has ended")
    taken = set(map(int, os.listdir(f"/proc/{thread}/fd")))
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _read_text(path: str, name: str) -> str:
    return Path(path, name).read_text(encoding="ascii").strip()


def _write_text(path: str, name: str, text: str) -> None:
    Path(path, name).write_text(text, encoding="ascii")


def group_names(groups: Collection[str]) -> dict[str, str]:
    """Controller -> the one of these control groups that limits it, recognised by its files."""
    found: dict[str, str] = {}
    for path in groups:
        for controller, names in (
            ("cpu", ("cpu.max", "cpu.cfs_quota_us")),
            ("memory", ("memory.max", "memory.limit_in_bytes")),
            ("pids", ("pids.max",)),
        ):
            if any(os.path.exists(os.path.join(path, name)) for name in names):
                found[controller] = path
    return found
