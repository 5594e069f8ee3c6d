"""`harness clean`: removes what killed harnesses left behind, and nothing else.

A run's leftovers are recorded in its state (see harness.run_state), and its processes carry the run's id in their
environment. Everything is verified to be ours before it is touched: a process by its start time, its environment or its
control group, a directory by its name and owner, a socket by its type, a mount by its source. Runs whose harness is
still alive are left alone. Cleaning is idempotent, and several processes may do it at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import stat
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import run_state
from harness.clusters.control_groups import cgroup_parents, remove_group
from harness.clusters.host_agent import ancestors, let_go, remove_tree
from harness.clusters.loop_devices import loop_devices_of, marked_devices, release_device
from harness.clusters.netns_calls import (
    NETNS_DIR,
    identity,
    namespace_path,
    remove_namespace,
    unmount,
)
from harness.clusters.remote_cleanup import REMOTE_REMOVERS, CannotRemove, Unreachable
from harness.process_table import (
    ProcessId,
    find_processes,
    is_in_group,
    is_in_namespace,
    kill_until_gone,
    marked_with,
    variable_of,
)
from harness.programs import find_program
from harness.run_state import Claim, RunRecord, StateError, load_run, runs_in, state_path
from harness.scratch import remove_scratch_of_the_dead
from nemesis.mechanisms.file_systems import thaw

__all__ = ["CleanReport", "clean"]

_KILL_TIMEOUT_S = 10.0
"""How long a killed process may take to exit; one that takes longer hangs in the kernel and is reported."""

_COMMAND_TIMEOUT_S = 10.0
_MAX_SAID = 200

_GROUP = re.compile(rf"{run_state.TEMP_PREFIX}(?P<run>.+)-(?:clients|ns\d+|n\d+)(?:-programs)?")
"""Name of a host's control group, or of the group of its programs within that."""

_DRAFT = re.compile(r"\..+\.(\d+)\.draft")


@dataclass(slots=True)
class CleanReport:
    """What `clean` did. Each entry is one line of text."""

    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What could not be removed, with the reason."""
    live: list[str] = field(default_factory=list)
    """Ids of runs that were left alone because their harness is still alive."""
    notes: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0 if nothing is left, 255 otherwise."""
        return 255 if self.left else 0


def clean(
    *,
    state_root: str | None = None,
    run_ids: Collection[str] | None = None,
    include_live: bool = False,
    forgets_unreachable: bool = False,
    report: Callable[[str], None],
) -> CleanReport:
    """Remove what dead runs left behind: of all runs, or of those in `run_ids`.

    Looks in `state_root`, or else in every place where this user's states may be. `include_live` also ends runs whose
    harness is still alive. With `forgets_unreachable`, machines and engines that do not answer are considered gone
    forever, and what they hold of a run is forgotten instead of being kept for the next time; a note lists it. `report`
    is called with a line for each thing removed, left or worth knowing, as it happens. A named run without a state here
    is still looked for by its processes, namespaces and control groups; it is left alone if its processes name a state
    elsewhere that shows its harness to be alive. Raises StateError if `state_root` cannot be read.
    """
    result = CleanReport()

    def tell(entries: list[str], line: str) -> None:
        entries.append(line)
        report(line)

    states: list[tuple[str, str]] = []
    roots = [os.path.abspath(state_root)] if state_root else run_state.state_roots()
    for root in roots:
        try:
            present = runs_in(root)
        except StateError as error:
            if state_root:
                raise
            tell(result.notes, str(error))
            continue
        _remove_drafts(root)
        states += [(run_id, state_path(run_id, root)) for run_id in present if run_ids is None or run_id in run_ids]
    known = {run_id for run_id, _ in states}
    states += [(run_id, state_path(run_id, roots[0])) for run_id in sorted(set(run_ids or ()) - known)]
    for run_id, path in states:
        try:
            record = load_run(path)
        except FileNotFoundError:
            elsewhere = None if include_live else _live_elsewhere(run_id)
            record = elsewhere or RunRecord(run_id=run_id, path=path, pid=0, start_ticks=0, boot_id="")
        except StateError as error:
            tell(result.left, str(error))
            continue
        is_live = record.is_live
        if not include_live and (is_live or (is_live is None and run_ids is None)):
            result.live.append(run_id)
            report(f"run {run_id}: left alone, {_why_live(record, is_live)}")
            continue
        _RunCleaner(
            record,
            removed=lambda line: tell(result.removed, line),
            left=lambda line: tell(result.left, line),
            forgotten=(lambda line: tell(result.notes, line)) if forgets_unreachable else None,
        ).run()
    if run_ids is None:
        remove_scratch_of_the_dead(
            removed=lambda line: tell(result.removed, line), left=lambda line: tell(result.left, line)
        )
    if run_ids is None and state_root is None:
        _release_devices_of_the_dead(roots, result, tell)
        _note_groups_without_state(roots, lambda line: tell(result.notes, line))
    for root in roots:
        run_state.remove_if_empty(root)
    if os.geteuid() != 0 and (line := _hint_at_root(run_ids)):
        tell(result.notes, line)
    return result


def _why_live(record: RunRecord, is_live: bool | None) -> str:
    if is_live is None:
        return (
            "its harness runs in a container whose processes are not visible here: clean up there, or, if it is dead, "
            f"with `harness clean --run {record.run_id}`"
        )
    return f"its harness is still running (pid {record.pid})"


def _live_elsewhere(run_id: str) -> RunRecord | None:
    """The state that processes of a run name, if it shows that its harness is alive. Nothing else in it is trusted:
    anybody may start a process that names any file."""
    marked = find_processes(marked_with(run_state.RUN_VARIABLE, run_id))
    for path in {variable_of(process, run_state.STATE_VARIABLE) for process in marked}:
        try:
            record = load_run(path) if path is not None and os.path.isfile(path) else None
        except (OSError, StateError):
            continue
        if record is not None and record.run_id == run_id and record.is_live:
            return record
    return None


def _release_devices_of_the_dead(
    roots: Collection[str], result: CleanReport, tell: Callable[[list[str], str], None]
) -> None:
    """Release loop devices of dead runs whose state was lost. A run with a state is cleaned by that, including the
    users of its devices: those in `roots` already were, and the location of the others is reported."""
    for device, mark in marked_devices():
        if not mark.is_of_the_dead:
            continue
        what = f"run {mark.run_id}: loop device {device}"
        if mark.has_state:
            root = os.path.dirname(mark.state)
            if root not in roots:
                mend = f"remove it with {run_state.STATE_DIR_VARIABLE}={root} harness clean"
                tell(result.notes, f"{what} belongs to a dead run: {mend}")
            continue
        try:
            _release_device(device)
        except (OSError, subprocess.SubprocessError) as error:
            tell(result.left, f"{what}: {error}; remove what the run has left with `harness clean --run {mark.run_id}`")
        else:
            tell(result.removed, what)


def _groups(run_id: str | None = None) -> list[str]:
    """The control groups named like those of this run's hosts, or of any run's; inner ones first."""
    found: list[str] = []
    for parent in cgroup_parents():
        for directory, names, _ in os.walk(parent, topdown=True):
            runs = {name: _run_of_group(name) for name in names}
            names[:] = [name for name, its_run in runs.items() if its_run and run_id in (None, its_run)]
            found += [os.path.join(directory, name) for name in names]
    return found[::-1]


def _run_of_group(name: str) -> str | None:
    match = _GROUP.fullmatch(name)
    return match["run"] if match else None


def _note_groups_without_state(roots: Collection[str], note: Callable[[str], None]) -> None:
    """Report runs with empty control groups and no state in `roots`: either the state was lost, or it is kept elsewhere
    by a harness that has just started. The groups are left, as there is no telling which."""
    lost: dict[str, int] = {}
    for path in _groups():
        run_id = _run_of_group(os.path.basename(path))
        assert run_id is not None
        if not any(os.path.exists(state_path(run_id, root)) for root in roots) and _is_empty(path):
            lost[run_id] = lost.get(run_id, 0) + 1
    for run_id, count in sorted(lost.items()):
        note(
            f"run {run_id}: its control groups ({count}) are empty and it has no state here: if its harness is dead, "
            f"`harness clean --run {run_id}` removes them"
        )


def _is_empty(group: str) -> bool:
    try:
        with open(os.path.join(group, "cgroup.procs"), encoding="ascii") as file:
            return not file.read()
    except OSError:  # it is being removed
        return False


def _release_device(device: str) -> bool:
    release_device(device)
    return True


def _remove_drafts(root: str) -> None:
    """Remove drafts of states, left by processes that died while creating them."""
    try:
        names = os.listdir(root)
    except OSError:
        return
    for name in names:
        match = _DRAFT.fullmatch(name)
        if match and run_state.process_start_ticks(int(match[1])) is None:
            with contextlib.suppress(FileNotFoundError):  # another process is cleaning too
                os.unlink(os.path.join(root, name))


def _hint_at_root(run_ids: Collection[str] | None) -> str | None:
    """A hint for an unprivileged user about root's runs, which only root can clean."""
    try:
        names = os.listdir(NETNS_DIR)
    except OSError:
        return None
    ours = [name for name in names if name.startswith("sb-") and (run_ids is None or _belongs_to_any(name, run_ids))]
    if not ours:
        return None
    return f"{len(ours)} namespaces belong to runs of root ({min(ours)}, ...): remove them with `sudo harness clean`"


def _belongs_to_any(namespace: str, run_ids: Collection[str]) -> bool:
    return any(_host_of(namespace, run_id) for run_id in run_ids)


def _host_of(namespace: str, run_id: str) -> str | None:
    """The host part of a namespace's name `sb-<run id>-<host>`; None if it is not of this run."""
    prefix = f"sb-{run_id}-"
    host = namespace.removeprefix(prefix)
    return host if namespace.startswith(prefix) and re.fullmatch(r"net|clients|ns\d+|n\d+", host) else None


class _RunCleaner:
    """Cleans one run, in dependency order: processes, namespaces, mounts, files."""

    def __init__(
        self,
        record: RunRecord,
        *,
        removed: Callable[[str], None],
        left: Callable[[str], None],
        forgotten: Callable[[str], None] | None,
    ) -> None:
        self._record = record
        self._run_id = record.run_id
        self._removed_line = removed
        self._left_line = left
        self._forgotten_line = forgotten
        """None if what is on unreachable machines stays in the state."""
        self._spared = ancestors()
        self._is_clean = True

    def run(self) -> None:
        """Remove everything, and then the state if nothing is left."""
        for claim in self._claims(run_state.KIND_IMAGE):
            self._thaw(claim)
        self._kill(self._harness)  # first (if live runs are cleaned too), or it would restart what we end
        # Hosts that clean themselves come before processes: theirs may be visible here, waiting for a thaw by the host.
        remote = {kind: functools.partial(remove, self._run_id) for kind, remove in REMOTE_REMOVERS.items()}
        self._remove_claims(remote)
        self._end_processes()
        for name in self._namespaces():
            self._attempt(run_state.KIND_NETNS, name, self._remove_namespace)
        removers: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
            run_state.KIND_VETH: self._remove_veth,
            run_state.KIND_MOUNT: self._remove_mount,
            run_state.KIND_IMAGE: self._remove_image,
            run_state.KIND_CGROUP: self._remove_cgroup,
            run_state.KIND_SOCKET: self._remove_socket,
            run_state.KIND_FILE: self._remove_file,
            run_state.KIND_DIRECTORY: self._remove_directory,
        }
        self._remove_claims(removers)
        for path in _groups(self._run_id):
            self._attempt(run_state.KIND_CGROUP, path, self._remove_cgroup, {})
        for device, mark in marked_devices():
            if mark.run_id == self._run_id:
                self._attempt("loop device", device, _release_device)
        for claim in self._record.claims:
            if claim.kind not in (*remote, *removers, run_state.KIND_PROCESS, run_state.KIND_NETNS):
                self._leave(f"{claim.kind} {claim.ident}: this version of the harness cannot remove it")
        if self._is_clean:
            try:
                os.unlink(self._record.path)
            except FileNotFoundError:
                return
            self._removed_line(f"run {self._run_id}: state {self._record.path}")

    def _remove_claims(self, removers: Mapping[str, Callable[[str, Mapping[str, Any]], bool]]) -> None:
        for kind, remove in removers.items():
            # Latest first: a mount inside a mount goes before the outer one.
            for claim in reversed(self._claims(kind)):
                self._attempt(kind, claim.ident, remove, claim.details)

    def _claims(self, kind: str) -> list[Claim]:
        return [claim for claim in self._record.claims if claim.kind == kind]

    def _leave(self, what: str) -> None:
        self._is_clean = False
        self._left_line(f"run {self._run_id}: left: {what}")

    def _attempt(
        self, kind: str, ident: str, remove: Callable[..., bool], details: Mapping[str, Any] | None = None
    ) -> None:
        """Remove one thing and report it if it existed, or report the failure."""
        try:
            was_there = remove(ident) if details is None else remove(ident, details)
        except Unreachable as error:
            if self._forgotten_line is not None:
                self._forgotten_line(f"run {self._run_id}: forgotten: {kind} {ident}: {error}; {error.may_be_left}")
            else:
                mend = f"if it no longer exists: harness clean --run {self._run_id} --forget-unreachable"
                self._leave(f"{kind} {ident}: {error} ({mend})")
            return
        except (OSError, subprocess.SubprocessError, CannotRemove, _NotOurs) as error:
            self._leave(f"{kind} {ident}: {error}")
            return
        if was_there:
            self._removed_line(f"run {self._run_id}: {kind} {ident}")

    # Processes

    def _end_processes(self) -> None:
        self._kill(self._marked_or_claimed)
        for process in self._marked_or_claimed():
            self._leave(f"process {process.pid} ({process.command}): it cannot be killed: it hangs in the kernel")

    def _kill(self, find: Callable[[], list[ProcessId]]) -> None:
        commands = {process: process.command for process in find()}
        try:
            killed = kill_until_gone(find, timeout_s=_KILL_TIMEOUT_S)
        except PermissionError as error:
            self._leave(f"processes: {error}")
            return
        for process in killed:
            if not process.exists:
                self._removed_line(f"run {self._run_id}: process {process.pid} ({commands.get(process, '')})")

    def _harness(self) -> list[ProcessId]:
        record = self._record
        if not record.is_live or record.pid in self._spared:
            return []
        return [ProcessId(record.pid, record.start_ticks)]

    def _marked_or_claimed(self) -> list[ProcessId]:
        in_groups = is_in_group(lambda name: _run_of_group(name) == self._run_id)
        marked = marked_with(run_state.RUN_VARIABLE, self._run_id)
        found = find_processes(lambda pid: marked(pid) or in_groups(pid))
        if self._record.same_boot:
            for claim in self._claims(run_state.KIND_PROCESS):
                start_ticks = claim.details.get("start_ticks")
                if claim.ident.isdigit() and isinstance(start_ticks, int):
                    found.append(ProcessId(int(claim.ident), start_ticks))
        return [process for process in dict.fromkeys(found) if process.exists and process.pid not in self._spared]

    # Namespaces and devices

    def _namespaces(self) -> list[str]:
        """Claimed namespaces, and those in the directory whose names match this run."""
        claimed = [claim.ident for claim in self._claims(run_state.KIND_NETNS)]
        try:
            present = sorted(os.listdir(NETNS_DIR)) if os.geteuid() == 0 else []
        except OSError:
            present = []
        return list(dict.fromkeys([*claimed, *(name for name in present if _host_of(name, self._run_id))]))

    def _remove_namespace(self, name: str) -> bool:
        if _host_of(name, self._run_id) is None:
            raise _NotOurs("its name does not belong to this run")
        path = namespace_path(name)
        try:
            there = identity(path)
        except FileNotFoundError:
            return False
        # A name that was created and not yet mounted has no namespace: no process has its identity.
        self._kill(
            lambda: [p for p in find_processes(is_in_namespace(there)) if p.pid not in self._spared],
        )
        removed = remove_namespace(name)
        for process in find_processes(is_in_namespace(there)):
            self._leave(f"process {process.pid} ({process.command}) in namespace {name}")
        return removed

    def _remove_veth(self, name: str, details: Mapping[str, Any]) -> bool:
        """Remove a device created outside our namespaces; `details["netns"]` is its namespace, by default this one."""
        namespace = details.get("netns")
        if not (_has_device(name) if namespace is None else os.path.exists(namespace_path(namespace))):
            return False
        ip = find_program("ip")
        if ip is None:
            raise _NotOurs("`ip` is not installed: install iproute2")
        prefix = [ip] if namespace is None else [ip, "-netns", namespace]
        shown = subprocess.run(
            [*prefix, "-d", "link", "show", "dev", name], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
        if shown.returncode != 0:
            if not re.search(r"does not exist|find device", shown.stderr):
                raise _NotOurs(f"it cannot be inspected: {shown.stderr.strip()[:_MAX_SAID]}")
            return False
        if "veth" not in shown.stdout:
            raise _NotOurs("it is not a veth device")
        subprocess.run([*prefix, "link", "delete", "dev", name], check=True, timeout=_COMMAND_TIMEOUT_S)
        return True

    # Mounts and files

    def _thaw(self, claim: Claim) -> None:
        """Thaw what a fault has frozen: processes that wait for it could not even be killed."""
        point = str(claim.details.get("point", ""))
        for process in self._marked_or_claimed():
            path = f"/proc/{process.pid}/root{point}"
            try:
                if os.path.ismount(path) and thaw(path):
                    self._removed_line(f"run {self._run_id}: freeze of {claim.ident}")
            except OSError:
                continue  # it has exited, or nothing can be frozen here: whatever is left is reported later

    def _remove_image(self, path: str, details: Mapping[str, Any]) -> bool:
        """Detach and remove the image of a file system, which is already unmounted."""
        devices = loop_devices_of(details.get("file_id", ()), self._run_id)
        for device in devices:
            release_device(device)
        return self._remove_file(path, details) or bool(devices)

    def _remove_cgroup(self, path: str, details: Mapping[str, Any]) -> bool:
        if not os.path.basename(path).startswith(f"{run_state.TEMP_PREFIX}{self._run_id}-"):
            raise _NotOurs("its name does not belong to this run")
        if not os.path.isdir(path):
            return False
        remove_group(path, timeout_s=_KILL_TIMEOUT_S)
        return True

    def _remove_mount(self, path: str, details: Mapping[str, Any]) -> bool:
        """Unmount everything of ours that is mounted at `path`."""
        removed, where = False, _resolved(path)
        while mounted := [source for point, source in _mounts() if point == where]:
            source = details.get("source")
            if source is not None and mounted[-1] != source:
                raise _NotOurs(f"{mounted[-1]} is mounted there, not {source}")
            if not unmount(path):
                break
            removed = True
        return removed

    def _remove_socket(self, path: str, details: Mapping[str, Any]) -> bool:
        return self._unlink(path, stat.S_ISSOCK, "a socket")

    def _remove_file(self, path: str, details: Mapping[str, Any]) -> bool:
        return self._unlink(path, stat.S_ISREG, "a file")

    def _unlink(self, path: str, is_right: Callable[[int], bool], what: str) -> bool:
        status = _status(path)
        if status is None:
            return False
        if not is_right(status.st_mode) or status.st_uid != os.geteuid():
            raise _NotOurs(f"it is no longer {what} of this user")
        try:
            os.unlink(path)
        except FileNotFoundError:  # another process is cleaning too
            return False
        return True

    def _remove_directory(self, path: str, details: Mapping[str, Any]) -> bool:
        status = _status(path)
        if status is None:
            return False
        if not os.path.basename(path).startswith(f"{run_state.TEMP_PREFIX}{self._run_id}-"):
            raise _NotOurs("its name does not belong to this run")
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise _NotOurs("it is no longer a directory of this user")
        for point in reversed(_mounted_in(path)):
            unmount(point)
        if _mounted_in(path):
            raise _NotOurs("something is still mounted in it")
        with contextlib.suppress(FileNotFoundError):  # another process is cleaning too, and has let go of all of it
            let_go(path)
        remove_tree(path)
        return True


class _NotOurs(Exception):
    """Something is not what the run's state claims, or cannot be verified, so it is not touched."""


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _resolved(path: str) -> str:
    """A path as the kernel lists mounts: links are followed on the way to it, as $TMPDIR may be one, not at its end."""
    directory, name = os.path.split(path)
    return os.path.join(os.path.realpath(directory), name)


def _mounted_in(directory: str) -> list[str]:
    """The mount points at or below a directory, outer ones first."""
    where = _resolved(directory)
    return [point for point, _ in _mounts() if point == where or point.startswith(where + "/")]


def _mounts() -> list[tuple[str, str]]:
    """(mount point, source) of every mount visible to this process, oldest first."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            found.append((_unescape(before.split()[4]), _unescape(after.split()[1])))
    return found


def _unescape(text: str) -> str:
    """Undo the octal escapes (space, tab, newline, backslash) of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _has_device(name: str) -> bool:
    """Whether this process's network namespace has a device of that name."""
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True
