"""Which mechanism reaches a program: determined from its file before it is started, and from /proc while it runs.

A preloaded library reaches dynamically linked programs that call the C library. Statically linked programs never load
it; Go programs may load it but make their system calls themselves. What a script or a shell will execute cannot be
known beforehand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Sequence
from typing import Any

from .marks import is_helper, living_thread, mark_of, marked
from .vdso import ClockError, read_offset_ns

__all__ = ["DYNAMIC", "GO", "OTHER", "SCRIPT", "STATIC", "judge", "look", "program_kind"]

DYNAMIC, STATIC, GO, SCRIPT, OTHER = "dynamic", "static", "go", "script", "other"
"""Kinds of programs. OTHER is not a native program of this machine: 32 bits, another processor, or no ELF file."""

_PT_INTERP, _PT_NOTE = 3, 4
_MACHINES = {"x86_64": 62, "aarch64": 183}
_NOTES_BYTES = 1 << 16
_GO_SECTIONS = (b".gopclntab", b".go.buildinfo", b".note.go.buildid")

_RING = "anon_inode:[io_uring]"
"""The kernel's name of an io_uring ring among descriptors and mappings."""
_AIO_RING = "/[aio] (deleted)"
"""The kernel's name, among mappings, of the io_submit results ring of a process that has called io_setup."""

_WRAPPERS = frozenset(
    {"env", "nice", "ionice", "taskset", "chrt", "setpriv", "runuser", "gosu", "tini", "setsid", "stdbuf", "unshare"}
    | {"timeout", "nohup", "numactl", "prlimit", "dumb-init", "su-exec"}
)
"""Programs that execute another program named in their arguments."""

_WITHOUT_ENVIRONMENT = frozenset({"-", "-i", "--ignore-environment"})
"""Options of env(1) that start the program with an empty environment, without LD_PRELOAD."""

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox", "su", "sudo"})


def program_kind(path: str) -> str:
    """The kind of a program's file. Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:2] == b"#!":
            return SCRIPT
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return OTHER
        if _MACHINES.get(os.uname().machine) != struct.unpack_from("=H", head, 18)[0]:
            return OTHER
        headers_at, sections_at = struct.unpack_from("=2Q", head, 32)
        header_bytes, header_count, section_bytes, section_count, names_index = struct.unpack_from("=5H", head, 54)
        interpreter = b""
        for position in range(header_count):
            kind, _, at, _, _, length = struct.unpack_from("=2I4Q", _at(file, headers_at + position * header_bytes, 56))
            if kind == _PT_INTERP:
                interpreter = _at(file, at, min(length, 4096))
            elif kind == _PT_NOTE and b"\x04\0\0\0Go\0\0" in _at(file, at, min(length, _NOTES_BYTES)):
                return GO
        names = _section_names(file, sections_at, section_bytes, section_count, names_index)
    if any(section in names for section in _GO_SECTIONS):
        return GO
    # The library is built for the GNU C library; another one's loader may refuse it.
    return DYNAMIC if interpreter and b"musl" not in interpreter else STATIC


def _at(file: Any, offset: int, length: int) -> bytes:
    file.seek(offset)
    content: bytes = file.read(length)
    return content


def _section_names(file: Any, at: int, each_bytes: int, count: int, names_index: int) -> bytes:
    """The section name string table; empty if it was stripped."""
    if not at or names_index >= count:
        return b""
    _, _, _, _, names_at, length = struct.unpack_from("=2I4Q", _at(file, at + names_index * each_bytes, 64))
    return _at(file, names_at, min(length, _NOTES_BYTES))


def judge(argv: Sequence[str]) -> dict[str, str]:
    """The `path` of the file that a command would execute, and its `kind`; for a wrapper those of the program behind it
    if that can be known, otherwise SCRIPT. If the file cannot be read, `error` says why, and there is no `kind`."""
    words = list(argv)
    path = shutil.which(words[0]) or words[0]
    name = os.path.basename(path)
    if name in _WRAPPERS:
        behind = next((word for word in words[1:] if "/" in word and os.path.isfile(word)), None)
        if behind is None or (name == "env" and not _WITHOUT_ENVIRONMENT.isdisjoint(words[1 : words.index(behind)])):
            return {"path": path, "kind": SCRIPT}
        return judge(words[words.index(behind) :])
    if name in _SHELLS:
        return {"path": path, "kind": SCRIPT}
    try:
        return {"path": path, "kind": program_kind(path)}
    except OSError as error:
        return {"path": path, "error": error.strerror or str(error)}


def look(pid: int) -> list[dict[str, Any]]:
    """What reaches a process, and after it each other process of its program: `pid`; the path of the `program` and its
    `kind`; the paths that it has mapped (`maps`); by how many nanoseconds its vDSO shifts the `clock` (None: not
    patched); how many more seccomp `filters` it has than this process (None: not known before Linux 5.9); interfaces
    by which it may read and write unreported (`unseen`: io_uring, io_submit); the files that it has mapped shared and
    writable (`written`); whether its `root` directory differs from this process's (chroot). `problem` says what could
    not be determined. Processes that have ended are left out."""
    mark = mark_of(pid)
    pids = dict.fromkeys([*_descendants(pid), *(marked(mark) if mark is not None else ())])
    own = _filters(os.getpid())
    seen = [_look_at(each, own) for each in pids if each == pid or not is_helper(each)]
    return [found for found in seen if found is not None]


def _filters(pid: int) -> int | None:
    with open(f"/proc/{pid}/status", "rb") as file:
        counts = [int(line.split()[1]) for line in file if line.startswith(b"Seccomp_filters:")]
    return counts[0] if counts else None


def _look_at(pid: int, own_filters: int | None) -> dict[str, Any] | None:
    found: dict[str, Any] = {"pid": pid, "program": "", "kind": "", "maps": [], "clock": None, "problem": ""}
    found |= {"filters": None, "unseen": [], "written": [], "root": False}
    thread = living_thread(pid)
    if thread is None:
        return None
    try:
        found["program"] = os.readlink(f"/proc/{thread}/exe")
        found["root"] = os.readlink(f"/proc/{thread}/root") != os.readlink("/proc/self/root")
        found["kind"] = program_kind(f"/proc/{thread}/exe")
        with open(f"/proc/{thread}/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = (line.rstrip("\n").split(maxsplit=5) for line in file)
            mapped = {(words[5], words[1]) for words in lines if len(words) == 6}
        found["maps"] = sorted({path for path, _ in mapped if path.startswith("/")})
        found["written"] = sorted({path for path, rights in mapped if path.startswith("/") and {*"ws"} <= {*rights}})
        names = {path for path, _ in mapped}
        found["unseen"] = ["io_submit"] if _AIO_RING in names else []
        if _RING in names or _has_open(thread, _RING):
            found["unseen"].append("io_uring")
        filters = _filters(thread)
        found["filters"] = None if filters is None or own_filters is None else filters - own_filters
        found["clock"] = read_offset_ns(thread)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ClockError) as error:
        found["problem"] = str(error)
    return found


def _has_open(thread: int, name: str) -> bool:
    """Whether a descriptor of a process refers to a file of that name. Raises OSError."""
    for descriptor in os.listdir(f"/proc/{thread}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/{thread}/fd/{descriptor}") == name:
                return True
    return False


def _descendants(pid: int) -> list[int]:
    """A process and all its descendants that have not detached themselves."""
    found, open_ends = [pid], [pid]
    while open_ends:
        parent = open_ends.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            open_ends += children
    return found
