"""The state of a run: a record of every resource that it creates, written before its creation.

A harness that is killed with SIGKILL cannot clean up. So that `harness clean` can, every run keeps a small file, its
*state*: a header that identifies the harness's process, then one JSON line for each thing that it is about to create (a
*claim*) and for each thing that it has removed (a *release*). A claim is written before the thing is created, so
everything that exists is recorded; a claim of a thing that was never created is harmless. Kinds of things that survive
a reboot are also fsynced; processes, namespaces, mounts and sockets do not, so for those it is enough that the kernel
has the line.

A run is *live* while the process in its header exists: same boot, same pid, same start time, so a reused pid is not
mistaken for the harness. The pid of a harness in a container is that in the container, so whether it is alive can be
told only where the container's processes are visible.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.atomic_files import sync_directory, write_all
from harness.errors import OperatorError

__all__ = [
    "KIND_CGROUP",
    "KIND_CONTAINER",
    "KIND_DIRECTORY",
    "KIND_FILE",
    "KIND_IMAGE",
    "KIND_MOUNT",
    "KIND_NETNS",
    "KIND_NETWORK",
    "KIND_PROCESS",
    "KIND_SOCKET",
    "KIND_SSH_HOST",
    "KIND_VETH",
    "RUN_VARIABLE",
    "STATE_DIR_VARIABLE",
    "STATE_VARIABLE",
    "TEMP_PREFIX",
    "Claim",
    "RunRecord",
    "RunState",
    "StateError",
    "default_state_root",
    "harness_is_live",
    "harness_process",
    "living_thread",
    "load_run",
    "pid_namespace_of",
    "process_is_live",
    "process_start_ticks",
    "remove_if_empty",
    "runs_in",
    "state_path",
    "state_roots",
    "temp_dir",
]

logger = logging.getLogger(__name__)

RUN_VARIABLE = "SPLITBRAIN_RUN"
"""Environment variable that marks every process of a run with the run's id."""

STATE_VARIABLE = "SPLITBRAIN_STATE"
"""Environment variable that gives every process of a run the path of the run's state."""

STATE_DIR_VARIABLE = "SPLITBRAIN_STATE_DIR"
"""Environment variable that overrides where states are kept."""

TEMP_PREFIX = "splitbrain-"
"""Every temporary directory of a run is named `splitbrain-<run id>-...`; `clean` removes no others."""

KIND_PROCESS = "process"
KIND_NETNS = "netns"
KIND_MOUNT = "mount"
KIND_VETH = "veth"
KIND_SOCKET = "socket"
KIND_DIRECTORY = "directory"
KIND_FILE = "file"
KIND_IMAGE = "image"
"""A file system image, which may be attached to a loop device."""
KIND_CGROUP = "cgroup"
"""A control group, by its directory."""
KIND_CONTAINER = "container"
KIND_NETWORK = "network"
KIND_SSH_HOST = "ssh-host"
"""A machine that a run uses over SSH; the details are its connection parameters."""

_ENDS_WITH_THE_MACHINE = frozenset({KIND_PROCESS, KIND_NETNS, KIND_MOUNT, KIND_VETH, KIND_SOCKET, KIND_CGROUP})
_ENDED = (b"Z", b"X")
"""States in /proc/PID/stat of ended processes."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".jsonl"
_FORMAT = 1
_TEMP_DIR = "/tmp"
_OWN_ROOT = re.compile(r"splitbrain(-\d+)?")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial pid namespace, in which all processes are visible (PROC_PID_INIT_INO, linux/proc_ns.h)."""
_CREATE_ATTEMPTS = 10
"""Attempts to create a state while runs that end remove the directory: each failure needs another such run."""


class StateError(OperatorError):
    """The state of a run cannot be kept or read. The message is one line for the operator."""


class Claim(NamedTuple):
    """One thing that a run may have created. `ident` names it among its `kind`."""

    kind: str
    ident: str
    details: Mapping[str, Any]


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it does not exist or is only a zombie."""
    shown = _stat_of(pid)
    if shown is None or (shown[0] in _ENDED and living_thread(pid) is None):
        return None
    return int(shown[19])


def living_thread(pid: int) -> int | None:
    """The id of a live thread of a process; None if there is none. That is the first one, whose id is `pid`, unless it
    has ended before others: then /proc/PID is a zombie's, without environment and namespaces."""
    shown = _stat_of(pid)
    if shown is not None and shown[0] not in _ENDED:
        return pid
    try:
        others = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return None
    return next((thread for thread in others if (of := _stat_of(thread)) is not None and of[0] not in _ENDED), None)


def _stat_of(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat of a process or thread after the name, from the state on; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return after_name if len(after_name) >= 20 else None


def harness_process() -> dict[str, Any]:
    """The identity of this process, by which `harness_is_live` can later tell whether it still runs."""
    return {
        "pid": os.getpid(),
        "start_ticks": process_start_ticks(os.getpid()),
        "boot_id": _boot_id(),
        "pid_namespace": pid_namespace_of("self"),
    }


def harness_is_live(pid: int, start_ticks: int, boot_id: str, pid_namespace: int | None = None) -> bool | None:
    """Whether a process runs on this machine, with the same boot and start time. None if that cannot be determined: it
    ran in a pid namespace (given by inode; None is this one) that may exist but is not visible from here."""
    return boot_id == _boot_id() and process_is_live(pid, start_ticks, pid_namespace)


def process_is_live(pid: int, start_ticks: int, pid_namespace: int | None) -> bool | None:
    """Like `harness_is_live`, for a process of this boot."""
    own = pid_namespace_of("self")
    if pid_namespace in (None, own):
        return process_start_ticks(pid) == start_ticks
    of_that_namespace = [
        name for name in os.listdir("/proc") if name.isdigit() and pid_namespace_of(name) == pid_namespace
    ]
    # The inode may have been reused for another namespace, whose first process has the same pid again.
    if any(_number_inside(name) == pid and _may_have_begun_at(name, start_ticks) for name in of_that_namespace):
        return True
    return False if of_that_namespace or own == _FIRST_PID_NAMESPACE else None


def pid_namespace_of(process: str) -> int | None:
    """The inode of a process's pid namespace; None if the process is gone or may not be inspected."""
    return _namespace_of(process, "pid")


def _namespace_of(process: str, kind: str) -> int | None:
    try:
        return os.stat(f"/proc/{process}/ns/{kind}").st_ino
    except OSError:
        return None


def _may_have_begun_at(process: str, start_ticks: int) -> bool:
    """Whether a process has this start time, or is in another time namespace, where start times differ from ours."""
    is_it = process_start_ticks(int(process)) == start_ticks
    return is_it or _namespace_of(process, "time") != _namespace_of("self", "time")


def _number_inside(process: str) -> int | None:
    """The pid of a process in its own pid namespace; None if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:") and living_thread(int(process)) is not None:
                return int(line.split()[-1])
    return None


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _claim_directory(path: str) -> None:
    """Ensure that `path` is a directory that we own, with mode 0700.

    Raises StateError, and FileNotFoundError if another run ended meanwhile and removed the empty directory.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and error.filename == path and not _is_in_the_way(path):
            raise FileNotFoundError(path) from None  # it existed for mkdir, then not, and perhaps again by now
        raise StateError(f"cannot keep states in {path}: {error.strerror}; set {STATE_DIR_VARIABLE}") from None
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise StateError(f"{path} is not a directory: move it away or set {STATE_DIR_VARIABLE}")
    if status.st_uid != os.geteuid():
        raise StateError(f"{path} belongs to user {status.st_uid}: remove it or set {STATE_DIR_VARIABLE}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(path, 0o700)


def _is_in_the_way(path: str) -> bool:
    """Whether `path` exists and is no directory: decided by one look, between two of which it may come or go."""
    try:
        return not stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def state_roots() -> list[str]:
    """Directories where states may be, the one for new states first; creates nothing.

    Only $SPLITBRAIN_STATE_DIR if it is set. Otherwise `splitbrain` in $XDG_RUNTIME_DIR if that is ours and writable,
    then `splitbrain-<uid>` in the temporary directory. Which of these a harness used depends on how its user had logged
    in, so `clean` looks in all of them, including those for other environments.
    """
    explicit = os.environ.get(STATE_DIR_VARIABLE)
    if explicit:
        return [os.path.abspath(explicit)]
    uid = os.geteuid()
    places = []
    for runtime_dir in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"):
        if runtime_dir and os.path.isabs(runtime_dir) and _is_ours(runtime_dir):
            places.append(os.path.join(runtime_dir, "splitbrain"))
    in_temp = [os.path.join(directory, f"splitbrain-{uid}") for directory in (temp_dir(), _TEMP_DIR)]
    if os.environ.get("XDG_RUNTIME_DIR"):
        places += in_temp
    else:
        places = [*in_temp, *places]
    return list(dict.fromkeys(places))


def temp_dir() -> str:
    """The directory for temporary directories: $TMPDIR if it is writable, else /tmp.

    Not `tempfile.gettempdir`, which tests a directory by writing a file to it: a harness killed at that moment would
    leave a file that cannot be recognised as ours.
    """
    chosen = os.environ.get("TMPDIR", "")
    return chosen if os.path.isabs(chosen) and os.access(chosen, os.W_OK | os.X_OK) else _TEMP_DIR


def _is_ours(directory: str) -> bool:
    try:
        return os.stat(directory).st_uid == os.geteuid() and os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        return False


def default_state_root() -> str:
    """The default directory for new states: the first of `state_roots`."""
    return state_roots()[0]


def state_path(run_id: str, state_root: str) -> str:
    """Path of the state of `run_id` in `state_root`. Raises StateError for an invalid id."""
    if not _RUN_ID.fullmatch(run_id):
        raise StateError(f"bad run id {run_id!r}: letters, digits, '.', '_' and '-' only, 64 at most")
    return os.path.join(state_root, run_id + _SUFFIX)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The state of a run as read from its file."""

    run_id: str
    path: str
    pid: int
    start_ticks: int
    boot_id: str
    claims: tuple[Claim, ...] = field(default=())
    pid_namespace: int | None = None
    """Inode of the pid namespace of the harness's pid; None is this one."""

    @property
    def same_boot(self) -> bool:
        """Whether the machine has not rebooted since the run began: pids of an earlier boot mean nothing."""
        return self.boot_id == _boot_id()

    @property
    def is_live(self) -> bool | None:
        """Whether the harness of this run is still alive; None if that cannot be determined from here."""
        return harness_is_live(self.pid, self.start_ticks, self.boot_id, self.pid_namespace)


def load_run(path: str) -> RunRecord:
    """Read a state. A torn last line is ignored: what it would have claimed was not created yet.

    Raises StateError if the file is not a state, FileNotFoundError if it does not exist.
    """
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    claims: dict[tuple[str, str], Claim] = {}
    try:
        header = json.loads(lines[0])
        if header["format"] != _FORMAT:
            raise StateError(f"{path} was written by another version of the harness: clean with that one")
        run_id, pid = str(header["run_id"]), int(header["pid"])
        start_ticks, boot_id = int(header["start_ticks"]), str(header["boot_id"])
        pid_namespace = None if header.get("pid_namespace") is None else int(header["pid_namespace"])
        for line in lines[1:]:
            entry = json.loads(line)
            key = (str(entry["kind"]), str(entry["id"]))
            if entry["op"] == "claim":
                claims[key] = Claim(*key, entry.get("details", {}))
            else:
                claims.pop(key, None)
    except (ValueError, KeyError, IndexError, TypeError):
        raise StateError(f"{path} is not the state of a run, or it is damaged") from None
    return RunRecord(
        run_id=run_id,
        path=path,
        pid=pid,
        start_ticks=start_ticks,
        boot_id=boot_id,
        claims=tuple(claims.values()),
        pid_namespace=pid_namespace,
    )


def runs_in(state_root: str) -> list[str]:
    """Run ids that have a state in `state_root`, sorted; empty if there is no such directory.

    Raises StateError if the directory cannot be read, or belongs to another user, whose files cannot be trusted.
    """
    try:
        owner = os.lstat(state_root).st_uid
        names = os.listdir(state_root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(f"cannot read {state_root}: {error.strerror}") from None
    if owner != os.geteuid():
        raise StateError(f"{state_root} belongs to user {owner}: its states are not ours")
    return sorted(name[: -len(_SUFFIX)] for name in names if name.endswith(_SUFFIX) and not name.startswith("."))


def remove_if_empty(state_root: str) -> None:
    """Remove a state directory if it is empty and is one that harnesses create on their own."""
    if _OWN_ROOT.fullmatch(os.path.basename(state_root)):
        try:
            os.rmdir(state_root)
        except OSError:
            pass  # in use, or gone


class RunState:
    """The state of the run whose harness is this process. Created by `RunState.create`."""

    def __init__(self, *, run_id: str, path: str, fd: int) -> None:
        self.run_id = run_id
        self.path = path
        """The state's file."""
        self._fd = fd
        self._claims: dict[tuple[str, str], Claim] = {}

    @classmethod
    def create(cls, run_id: str, *, state_root: str | None = None) -> RunState:
        """Create the state of a run whose harness is this process.

        `run_id` becomes part of file and namespace names: letters, digits, '.', '_', '-'. Raises StateError if the
        directory is not usable or the run already has a state.
        """
        root = os.path.abspath(state_root) if state_root else default_state_root()
        path = state_path(run_id, root)
        header = {"format": _FORMAT, "run_id": run_id, **harness_process()}
        for _ in range(_CREATE_ATTEMPTS):
            try:
                _claim_directory(root)
                fd = _begin(path, header)
            except FileNotFoundError:
                continue  # another run just ended and removed the empty directory
            except FileExistsError:
                raise StateError(
                    f"run {run_id} already has a state ({path}): if it is dead, run `harness clean`"
                ) from None
            except OSError as error:
                raise StateError(f"cannot write the run's state in {root}: {error.strerror}") from None
            return cls(run_id=run_id, path=path, fd=fd)
        raise StateError(f"cannot write the run's state: {root} keeps being removed")

    @property
    def claims(self) -> Sequence[Claim]:
        """The current claims, oldest first."""
        return tuple(self._claims.values())

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for every process of this run, which identify the run and its harness."""
        return {RUN_VARIABLE: self.run_id, STATE_VARIABLE: self.path}

    def claim(self, kind: str, ident: str, **details: Any) -> None:
        """Record that `ident` of `kind` is about to be created. `details` must be JSON data.

        Claiming a thing again replaces its details. Raises StateError if it cannot be written; do not create the thing
        then.
        """
        self.claim_all([Claim(kind, ident, details)])

    def claim_all(self, claims: Iterable[Claim]) -> None:
        """Claim several things with one write and at most one fsync. Raises StateError."""
        claims = list(claims)
        entries = [
            {
                "op": "claim",
                "kind": c.kind,
                "id": c.ident,
                **({"details": dict(c.details)} if c.details else {}),
            }
            for c in claims
        ]
        self._append(entries, sync=any(c.kind not in _ENDS_WITH_THE_MACHINE for c in claims))
        for claim in claims:
            self._claims[(claim.kind, claim.ident)] = claim

    def claim_process(self, pid: int) -> None:
        """Claim a child process that was just started, with its start time.

        A process cannot be claimed before it has a pid; until then `environment` marks it as ours.
        """
        self.claim(KIND_PROCESS, str(pid), start_ticks=process_start_ticks(pid))

    def release(self, kind: str, ident: str) -> None:
        """Record that a claimed thing is gone. Releasing what is not claimed does nothing. If it cannot be written the
        file still names the thing, which is harmless: there is nothing for `clean` to remove."""
        if self._claims.pop((kind, ident), None) is None:
            return
        try:
            self._append([{"op": "release", "kind": kind, "id": ident}], sync=False)
        except StateError as error:
            logger.warning("%s %s is gone and stays named in the run's state: %s", kind, ident, error)

    def release_process(self, pid: int) -> None:
        """Record that a claimed process has been reaped."""
        self.release(KIND_PROCESS, str(pid))

    def make_temp_dir(self, purpose: str) -> str:
        """Claim and create a temporary directory (mode 0700) that `harness clean` may remove.

        `purpose` becomes part of its name. Raises StateError.
        """
        path = os.path.join(temp_dir(), f"{TEMP_PREFIX}{self.run_id}-{purpose}")
        if (KIND_DIRECTORY, path) in self._claims:
            raise StateError(f"the run already has {path}")
        self.claim(KIND_DIRECTORY, path)
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            self.release(KIND_DIRECTORY, path)
            raise StateError(f"cannot create {path}: {error.strerror}") from None
        return path

    def close(self) -> bool:
        """Close the state. Removes the file and returns True if nothing is claimed any more; otherwise keeps the file
        for `harness clean` and returns False. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if not self._claims:
                try:
                    os.unlink(self.path)
                except FileNotFoundError:
                    pass
                remove_if_empty(os.path.dirname(self.path))
        return not self._claims

    def _append(self, entries: Iterable[Mapping[str, Any]], *, sync: bool) -> None:
        if self._fd < 0:
            raise StateError(f"the state of run {self.run_id} is closed")
        data = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries).encode()
        size_bytes = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data)
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):  # further lines must not follow one torn by a full disk
                os.ftruncate(self._fd, size_bytes)
            raise StateError(f"cannot write the run's state {self.path}: {error.strerror}") from None


def _begin(path: str, header: Mapping[str, Any]) -> int:
    """Create the state at `path` with its header; returns a descriptor for appending. Raises OSError.

    Readers never see a state without its header: it is written under another name and then linked.
    """
    root, name = os.path.split(path)
    draft = os.path.join(root, f".{name.removesuffix(_SUFFIX)}.{os.getpid()}.draft")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, (json.dumps(header) + "\n").encode())
        os.fsync(fd)
        os.link(draft, path)
        sync_directory(root)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(draft)
    return fd
