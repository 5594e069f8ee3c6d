"""What a run has put into the world, written down before it is put there.

A harness that is killed with SIGKILL cannot tidy up. So that `harness clean` can, every run keeps a small
file, its *state*: a header that says which process the harness is, then one JSON line for each thing that it
is about to create (a *claim*) and for each thing that it has removed again (a *release*). A claim goes to
the file before the thing is created, so whatever exists is written down; a claim of a thing that was never
created is harmless. Kinds of things that can outlive a reboot are also fsynced; processes, namespaces,
mounts and sockets end with the machine, so for those it is enough that the kernel has the line.

A run is *live* while the process in its header exists: same boot, same pid, same start time, so a pid that
was given to another process later does not pass for the harness. A harness in a container has its pid there, and
whether it lives can be told only where the container's processes are seen.
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
"""Environment variable in which every process of a run has the path of the run's state."""

STATE_DIR_VARIABLE = "SPLITBRAIN_STATE_DIR"
"""Environment variable that overrides where states are kept."""

TEMP_PREFIX = "splitbrain-"
"""Every temporary directory of a run is called `splitbrain-<run id>-...`; `clean` removes no other."""

KIND_PROCESS = "process"
KIND_NETNS = "netns"
KIND_MOUNT = "mount"
KIND_VETH = "veth"
KIND_SOCKET = "socket"
KIND_DIRECTORY = "directory"
KIND_FILE = "file"
KIND_IMAGE = "image"
"""A file with a file system in it, which may be attached to a loop device."""
KIND_CGROUP = "cgroup"
"""A control group, by its directory."""
KIND_CONTAINER = "container"
KIND_NETWORK = "network"
KIND_SSH_HOST = "ssh-host"
"""A machine that a run has taken over SSH; the details say how it is reached."""

_ENDS_WITH_THE_MACHINE = frozenset({KIND_PROCESS, KIND_NETNS, KIND_MOUNT, KIND_VETH, KIND_SOCKET, KIND_CGROUP})
_ENDED = (b"Z", b"X")
"""States in /proc/PID/stat of what has ended."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".jsonl"
_FORMAT = 1
_TEMP_DIR = "/tmp"
_OWN_ROOT = re.compile(r"splitbrain(-\d+)?")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace in which all processes are seen (PROC_PID_INIT_INO, linux/proc_ns.h)."""
_CREATE_ATTEMPTS = 10
"""Tries to begin a state while others that end remove the directory: each needs another one to end in between."""


class StateError(OperatorError):
    """The state of a run cannot be kept or read. The message is one line for the operator."""


class Claim(NamedTuple):
    """One thing that a run may have created. `ident` names it among its `kind`."""

    kind: str
    ident: str
    details: Mapping[str, Any]


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none, or nothing of it but a zombie."""
    shown = _stat_of(pid)
    if shown is None or (shown[0] in _ENDED and living_thread(pid) is None):
        return None
    return int(shown[19])


def living_thread(pid: int) -> int | None:
    """A thread of a process that has not ended; None when there is none. It is the first one, whose number is `pid`,
    unless that has ended before others: then /proc/PID is that of a zombie, without environment and namespaces."""
    shown = _stat_of(pid)
    if shown is not None and shown[0] not in _ENDED:
        return pid
    try:
        others = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return None
    return next((thread for thread in others if (of := _stat_of(thread)) is not None and of[0] not in _ENDED), None)


def _stat_of(pid: int) -> list[bytes] | None:
    """What /proc/PID/stat has of a process or a thread behind its name, from its state on; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return after_name if len(after_name) >= 20 else None


def harness_process() -> dict[str, Any]:
    """This process, so that whoever reads it later can tell whether it still runs: see `harness_is_live`."""
    return {
        "pid": os.getpid(),
        "start_ticks": process_start_ticks(os.getpid()),
        "boot_id": _boot_id(),
        "pid_namespace": pid_namespace_of("self"),
    }


def harness_is_live(pid: int, start_ticks: int, boot_id: str, pid_namespace: int | None = None) -> bool | None:
    """Whether a process runs on this machine, in the same boot and since the same time. None where nobody can tell from
    here: it ran in a pid namespace (by its inode; None is this one) that may be there and is not seen."""
    return boot_id == _boot_id() and process_is_live(pid, start_ticks, pid_namespace)


def process_is_live(pid: int, start_ticks: int, pid_namespace: int | None) -> bool | None:
    """As `harness_is_live`, of a process in this boot."""
    own = pid_namespace_of("self")
    if pid_namespace in (None, own):
        return process_start_ticks(pid) == start_ticks
    of_that_namespace = [
        name for name in os.listdir("/proc") if name.isdigit() and pid_namespace_of(name) == pid_namespace
    ]
    # Its number may have been given to another namespace by now, where the first process has the same pid again.
    if any(_number_inside(name) == pid and _may_have_begun_at(name, start_ticks) for name in of_that_namespace):
        return True
    return False if of_that_namespace or own == _FIRST_PID_NAMESPACE else None


def pid_namespace_of(process: str) -> int | None:
    """The inode of a process's pid namespace; None where it is gone, or not ours to look at."""
    return _namespace_of(process, "pid")


def _namespace_of(process: str, kind: str) -> int | None:
    try:
        return os.stat(f"/proc/{process}/ns/{kind}").st_ino
    except OSError:
        return None


def _may_have_begun_at(process: str, start_ticks: int) -> bool:
    """Whether a process has this start time, or counts the machine's time otherwise than we do."""
    is_it = process_start_ticks(int(process)) == start_ticks
    return is_it or _namespace_of(process, "time") != _namespace_of("self", "time")


def _number_inside(process: str) -> int | None:
    """The pid of a process in the pid namespace that it runs in; None where it has ended."""
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
    """Make sure that `path` is a directory of our own with mode 0700.

    Raises StateError, and FileNotFoundError where another run ended meanwhile and took the empty directory with it.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        is_blocked = os.path.lexists(path) and not os.path.isdir(path)
        if isinstance(error, FileExistsError) and error.filename == path and not is_blocked:
            raise FileNotFoundError(path) from None  # it was there for mkdir, then no more, and by now maybe again
        raise StateError(f"cannot keep states in {path}: {error.strerror}; set {STATE_DIR_VARIABLE}") from None
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise StateError(f"{path} is not a directory: move it away or set {STATE_DIR_VARIABLE}")
    if status.st_uid != os.geteuid():
        raise StateError(f"{path} belongs to user {status.st_uid}: remove it or set {STATE_DIR_VARIABLE}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(path, 0o700)


def state_roots() -> list[str]:
    """Where states may be, the place for new ones first; creates nothing.

    $SPLITBRAIN_STATE_DIR, and no other place, when it is set. Else `splitbrain` in $XDG_RUNTIME_DIR when that is
    ours and writable, then `splitbrain-<uid>` in the temporary directory. Which of these a harness used hangs on
    how its user had logged in, so `clean` looks in all of them, also in the places for other environments.
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
    """Where temporary directories go: $TMPDIR when that can be written to, else /tmp.

    Not `tempfile.gettempdir`, which tries a place by writing a file to it: a harness that is killed in that moment
    would leave a file that nobody can tell as ours.
    """
    chosen = os.environ.get("TMPDIR", "")
    return chosen if os.path.isabs(chosen) and os.access(chosen, os.W_OK | os.X_OK) else _TEMP_DIR


def _is_ours(directory: str) -> bool:
    try:
        return os.stat(directory).st_uid == os.geteuid() and os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        return False


def default_state_root() -> str:
    """Where new states are kept when nothing else is said: the first of `state_roots`."""
    return state_roots()[0]


def state_path(run_id: str, state_root: str) -> str:
    """Path of the state of `run_id` in `state_root`. Raises StateError for an id that is no file name."""
    if not _RUN_ID.fullmatch(run_id):
        raise StateError(f"bad run id {run_id!r}: letters, digits, '.', '_' and '-' only, 64 at most")
    return os.path.join(state_root, run_id + _SUFFIX)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The state of a run as read back from its file."""

    run_id: str
    path: str
    pid: int
    start_ticks: int
    boot_id: str
    claims: tuple[Claim, ...] = field(default=())
    pid_namespace: int | None = None
    """In which the harness has its pid, by its inode; None is this one."""

    @property
    def same_boot(self) -> bool:
        """Whether the machine has been up since the run began: pids of an earlier boot mean nothing."""
        return self.boot_id == _boot_id()

    @property
    def is_live(self) -> bool | None:
        """Whether the harness of this run still runs; None where nobody can tell from here."""
        return harness_is_live(self.pid, self.start_ticks, self.boot_id, self.pid_namespace)


def load_run(path: str) -> RunRecord:
    """Read a state. A torn last line is ignored: what it would have claimed was not created yet.

    Raises StateError when the file is not a state, FileNotFoundError when it is not there.
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
    """Run ids that have a state in `state_root`, sorted; empty when there is no such directory.

    Raises StateError when the directory cannot be read, or is another user's: what is written there is not
    to be trusted.
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
    """Remove a directory of states that has none any more, if it is one that harnesses make by themselves."""
    if _OWN_ROOT.fullmatch(os.path.basename(state_root)):
        try:
            os.rmdir(state_root)
        except OSError:
            pass  # in use, or not there


class RunState:
    """The state of the run that this process is the harness of. Make it with `RunState.create`."""

    def __init__(self, *, run_id: str, path: str, fd: int) -> None:
        self.run_id = run_id
        self.path = path
        """The state's file."""
        self._fd = fd
        self._claims: dict[tuple[str, str], Claim] = {}

    @classmethod
    def create(cls, run_id: str, *, state_root: str | None = None) -> RunState:
        """Begin the state of a run whose harness is this process.

        `run_id` becomes part of file and namespace names: letters, digits, '.', '_', '-'. Raises StateError
        when the directory is not usable or the run has a state already.
        """
        root = os.path.abspath(state_root) if state_root else default_state_root()
        path = state_path(run_id, root)
        header = {"format": _FORMAT, "run_id": run_id, **harness_process()}
        for _ in range(_CREATE_ATTEMPTS):
            try:
                _claim_directory(root)
                fd = _begin(path, header)
            except FileNotFoundError:
                continue  # another run ended just now and took the empty directory with it
            except FileExistsError:
                raise StateError(f"run {run_id} has a state ({path}): if dead, `harness clean`") from None
            except OSError as error:
                raise StateError(f"cannot write the run's state in {root}: {error.strerror}") from None
            return cls(run_id=run_id, path=path, fd=fd)
        raise StateError(f"cannot write the run's state: {root} is removed again and again")

    @property
    def claims(self) -> Sequence[Claim]:
        """What is claimed now, oldest first."""
        return tuple(self._claims.values())

    @property
    def environment(self) -> dict[str, str]:
        """What to add to the environment of every process of this run, so that it can be recognised as ours, and be
        seen whether its harness lives."""
        return {RUN_VARIABLE: self.run_id, STATE_VARIABLE: self.path}

    def claim(self, kind: str, ident: str, **details: Any) -> None:
        """Write down that `ident` of `kind` is about to be created. `details` must fit JSON.

        Claiming a thing again replaces its details. Raises StateError when it cannot be written: then
        do not create the thing.
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
        """Write down that a claimed thing is gone. Releasing what is not claimed does nothing. Where it cannot be
        written the file still names the thing, which does no harm: there is nothing that `clean` could remove."""
        if self._claims.pop((kind, ident), None) is None:
            return
        try:
            self._append([{"op": "release", "kind": kind, "id": ident}], sync=False)
        except StateError as error:
            logger.warning("%s %s is gone and stays named in the run's state: %s", kind, ident, error)

    def release_process(self, pid: int) -> None:
        """Write down that a claimed process has been waited for."""
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
        """End the state. Removes the file and returns True when nothing is claimed any more; otherwise the
        file stays for `harness clean` and False is returned. Idempotent."""
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
            with contextlib.suppress(OSError):  # a line that a full disk has torn would have others written behind it
                os.ftruncate(self._fd, size_bytes)
            raise StateError(f"cannot write the run's state {self.path}: {error.strerror}") from None


def _begin(path: str, header: Mapping[str, Any]) -> int:
    """Create the state at `path` with its header; returns a descriptor to append to. Raises OSError.

    Readers never see a state without its header: it is written under another name and linked in whole.
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
