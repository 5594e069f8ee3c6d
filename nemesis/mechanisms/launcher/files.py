"""Which file of a host a reported call is about, and what the call does to it."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass

from .filter import GROUPS, Call

__all__ = ["CHANGE", "CREATE", "CUT", "GROW", "READ", "RENAME", "SYNC", "UNLINK", "WRITE", "Effect", "Files", "Opening"]

WRITE, GROW, SYNC, READ = "write", "grow", "sync", "read"
"""Kinds of disk operations; GROW is a write that needs more space."""

CHANGE, CUT, CREATE, UNLINK, RENAME = "change", "cut", "create", "unlink", "rename"
"""What a write does to a file: change bytes, set its length, create it, unlink it, rename it."""

_PATH_BYTES = 4096
_AT_FDCWD = -100
_MS_SYNC = 4
_UNLINK_DIRECTORY = 0x200
_PUNCH_HOLE, _COLLAPSE_RANGE, _INSERT_RANGE = 0x02, 0x08, 0x20
"""What fallocate can do with a range: free it, remove it from the file, insert one. The first two need no space."""
_VECTORS = 1024
"""IOV_MAX of Linux."""

_PATHS: dict[str, tuple[int | None, int]] = {
    "open": (None, 0), "openat": (0, 1), "openat2": (0, 1), "creat": (None, 0), "truncate": (None, 0),
    "rename": (None, 0), "renameat": (0, 1), "renameat2": (0, 1), "unlink": (None, 0), "unlinkat": (0, 1),
    "mkdir": (None, 0), "mkdirat": (0, 1), "rmdir": (None, 0), "link": (None, 1), "linkat": (2, 3),
    "symlink": (None, 1), "symlinkat": (1, 2),
}  # fmt: skip
"""Call -> the arguments with the directory's descriptor and the path of the file that it concerns."""

_DESTINATIONS: dict[str, tuple[int | None, int]] = {"rename": (None, 1), "renameat": (2, 3), "renameat2": (2, 3)}

_COPIES: dict[str, tuple[int, int, int | None, int]] = {
    "copy_file_range": (0, 2, 3, 4),
    "splice": (0, 2, 3, 4),
    "sendfile": (1, 0, None, 3),
}
"""Call -> the arguments with the source descriptor, the destination descriptor, the address of the destination offset,
and the maximum length."""

_WHERE_IT_STANDS = 2**64 - 1
"""As the offset argument of a write: the descriptor's current position."""

_MAKING = ("mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat")


@dataclass(frozen=True, slots=True)
class Effect:
    """What a call would do. `path` opens the file, and may be one of /proc/PID/fd. A CHANGE has `offset` and `length`.
    A CUT has an `offset`: the new length, or the position from which the rest of the file moves. A RENAME has
    `new_path`. `is_durable`: durable when the call returns, as with O_DSYNC."""

    operation: str
    action: str = ""
    path: str = ""
    offset: int = 0
    length: int = 0
    new_path: str = ""
    is_durable: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments of a call that opens a file. `path` is empty for a file outside the root; `asked` is the path as
    the program gave it, made absolute. `is_plain` is False if the call restricts how the path is resolved, or if the
    path leads another process to another file."""

    path: str
    asked: str
    flags: int
    mode: int
    is_plain: bool


class Files:
    """Finds the file that a call is about, from /proc of the thread that waits in the call."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def effect(self, call: Call, *, looks_closely: bool) -> Effect | None:
        """What the call does to a file under the root; None when it is about another file, or changes nothing, or the
        process is gone. `looks_closely`: also find the extent of a write by descriptor, which takes two more lookups.
        Raises PermissionError when the process may not be inspected."""
        try:
            if call.name == "msync":
                return self._mapped(call.thread, call.arguments)
            if call.name == "sync":
                return Effect(SYNC, path=self._root)
            if call.name in GROUPS["sync"]:
                effect = self._by_descriptor(call, 0, SYNC)
                return self._whole(call) if effect is None and call.name == "syncfs" else effect
            if call.name in GROUPS["read"] and call.name not in _COPIES:
                return self._by_descriptor(call, 0, READ)
            if call.name in _PATHS:
                return self._by_path(call)
            source, destination, _, _ = _COPIES.get(call.name, (None, 0, None, 0))
            effect = self._by_descriptor(call, destination, WRITE)
            if effect is None:
                return None if source is None else self._by_descriptor(call, source, READ)
            return self._extent(call, effect) if looks_closely else effect
        except PermissionError:
            raise
        except (OSError, ValueError, KeyError, struct.error):
            return None

    def _is_under_root(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    def _by_descriptor(self, call: Call, argument: int, operation: str) -> Effect | None:
        path = f"/proc/{call.thread}/fd/{_signed(call.arguments[argument])}"
        return Effect(operation, path=path) if self._is_under_root(os.readlink(path)) else None

    def _whole(self, call: Call) -> Effect | None:
        """The effect of syncing the root's file system through a descriptor of another file on it."""
        path = f"/proc/{call.thread}/fd/{_signed(call.arguments[0])}"
        return Effect(SYNC, path=self._root) if os.stat(path).st_dev == os.stat(self._root).st_dev else None

    def _mapped(self, thread: int, arguments: tuple[int, ...]) -> Effect | None:
        if not arguments[2] & _MS_SYNC:
            return None
        with open(f"/proc/{thread}/maps", "rb") as maps:
            for line in maps:
                words = line.rstrip(b"\n").split(maxsplit=5)
                begin, end = (int(part, 16) for part in words[0].split(b"-"))
                if begin <= arguments[0] < end:
                    path = os.fsdecode(words[5]) if len(words) == 6 else ""
                    is_there = not path.endswith(" (deleted)")  # a deleted file cannot be opened, and has no name
                    return Effect(SYNC, path=path if is_there else "") if self._is_under_root(path) else None
        return None

    def _extent(self, call: Call, effect: Effect) -> Effect:
        """The effect of a write by descriptor, with its offset and length."""
        name, arguments = call.name, call.arguments
        size_bytes = os.stat(effect.path).st_size
        if name == "ftruncate":
            return Effect(GROW if arguments[1] > size_bytes else WRITE, CUT, effect.path, arguments[1])
        with open(effect.path.replace("/fd/", "/fdinfo/"), "rb") as info:
            fields = dict(line.split(b":", 1) for line in info.read().splitlines() if b":" in line)
        flags, offset = int(fields[b"flags"], 8), int(fields[b"pos"])
        how = arguments[5] if name == "pwritev2" else 0
        is_durable = bool(flags & os.O_DSYNC or how & (os.RWF_DSYNC | os.RWF_SYNC))  # O_SYNC has the bit of O_DSYNC
        if name == "fallocate" and arguments[1] & (_COLLAPSE_RANGE | _INSERT_RANGE):
            # The rest of the file moves and its length changes: durable like a truncation, whatever the flags.
            operation = GROW if arguments[1] & _INSERT_RANGE else WRITE
            return Effect(operation, CUT, effect.path, arguments[2])
        if name == "fallocate":
            operation = WRITE if arguments[1] & _PUNCH_HOLE else GROW
            return Effect(operation, CHANGE, effect.path, arguments[2], arguments[3], is_durable=is_durable)
        if flags & os.O_APPEND or how & os.RWF_APPEND:
            offset = size_bytes
        elif name in ("pwrite64", "pwritev", "pwritev2") and arguments[3] != _WHERE_IT_STANDS:
            offset = arguments[3]
        if name in ("writev", "pwritev", "pwritev2"):
            length = self._vector_bytes(call.thread, arguments[1], arguments[2])
        elif name in _COPIES:
            offset, length = self._copied(call, offset)
        else:
            length = arguments[2]
        operation = GROW if offset + length > size_bytes else WRITE
        return Effect(operation, CHANGE, effect.path, offset, length, is_durable=is_durable)

    def _copied(self, call: Call, offset: int) -> tuple[int, int]:
        """(offset, length) of what a copy writes at most; `offset` is the default."""
        source, _, at, most = _COPIES[call.name]
        if at is not None and call.arguments[at]:
            [offset] = struct.unpack("=Q", self._memory(call.thread, call.arguments[at], 8))
        status = os.stat(f"/proc/{call.thread}/fd/{_signed(call.arguments[source])}")
        length = call.arguments[most]
        return offset, min(length, status.st_size) if stat.S_ISREG(status.st_mode) else length

    def _memory(self, thread: int, address: int, length: int) -> bytes:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)

    def _vector_bytes(self, thread: int, address: int, count: int) -> int:
        raw = self._memory(thread, address, 16 * min(count, _VECTORS))
        return sum(length for _, length in struct.iter_unpack("=2Q", raw))

    def _text(self, thread: int, address: int) -> str:
        text = b""
        while len(text) < _PATH_BYTES and b"\0" not in text:
            at = address + len(text)
            piece = self._memory(thread, at, min(256, 4096 - at % 4096))
            if not piece:
                break
            text += piece
        return os.fsdecode(text.partition(b"\0")[0])

    def _path(self, call: Call, where: tuple[int | None, int]) -> str:
        """The path that a call names, its directory resolved as the thread sees it."""
        parent, name = os.path.split(self._asked(call, where))
        return os.path.join(os.path.realpath(parent), name)

    def _asked(self, call: Call, where: tuple[int | None, int]) -> str:
        """The path that a call names, made absolute for this process, whose root may differ from the thread's."""
        directory, argument = where
        path = self._text(call.thread, call.arguments[argument])
        if path.startswith("/"):
            root = os.readlink(f"/proc/{call.thread}/root")
            path = path if root == "/" else root + path
        else:
            descriptor = _AT_FDCWD if directory is None else _signed(call.arguments[directory])
            link = "cwd" if descriptor == _AT_FDCWD else f"fd/{descriptor}"
            path = os.path.join(os.readlink(f"/proc/{call.thread}/{link}"), path)
        return path

    def _by_path(self, call: Call) -> Effect | None:
        name, arguments = call.name, call.arguments
        path = self._path(call, _PATHS[name])
        if not self._is_under_root(path):
            return None
        if name in ("open", "openat", "openat2", "creat"):
            return self._opening(call, path)
        if name in _DESTINATIONS:
            return Effect(WRITE, RENAME, path, new_path=self._path(call, _DESTINATIONS[name]))
        if name == "truncate":
            operation = GROW if arguments[1] > os.stat(path).st_size else WRITE
            return Effect(operation, CUT, path, arguments[1])
        if name in _MAKING:
            # If the name exists, the call fails and creates nothing: programs often ensure directories like that.
            return Effect(GROW, "" if os.path.lexists(path) else CREATE, path)
        is_directory = name == "rmdir" or (name == "unlinkat" and arguments[2] & _UNLINK_DIRECTORY)
        if not is_directory and stat.S_ISDIR(os.lstat(path).st_mode):
            is_directory = True  # this fails: Go tries unlink before rmdir
        return Effect(WRITE, "" if is_directory else UNLINK, path)

    def opening(self, call: Call) -> Opening:
        """The arguments of a call that opens a file. Raises OSError, struct.error."""
        flags, mode, is_plain = self._how(call)
        asked = self._asked(call, _PATHS[call.name])
        parent, name = os.path.split(asked)
        path = os.path.join(os.path.realpath(parent), name)
        is_ours_too = not asked.startswith("/proc/")
        return Opening(path if self._is_under_root(path) else "", asked, flags, mode, is_plain and is_ours_too)

    def flags(self, call: Call) -> int:
        """The flags of a call that opens a file. Raises OSError, struct.error."""
        return self._how(call)[0]

    def has(self, link: str) -> bool:
        """Whether a link in /proc/PID/fd leads to a regular file under the root. Raises OSError."""
        return self._is_under_root(os.readlink(link)) and stat.S_ISREG(os.stat(link).st_mode)

    def _how(self, call: Call) -> tuple[int, int, bool]:
        """(flags, mode, whether the call restricts nothing else)"""
        arguments = call.arguments
        if call.name == "creat":
            return os.O_CREAT | os.O_TRUNC | os.O_WRONLY, arguments[1], True
        if call.name == "openat2":
            raw = self._memory(call.thread, arguments[2], min(arguments[3], 24)).ljust(24, b"\0")
            flags, mode, resolve = struct.unpack("=3Q", raw)
            return flags, mode, not resolve
        at = 2 if call.name == "openat" else 1
        return arguments[at] & 0xFFFFFFFF, arguments[at + 1] & 0o7777, True

    def _opening(self, call: Call, path: str) -> Effect | None:
        flags, _, _ = self._how(call)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return Effect(GROW, CREATE, path) if flags & os.O_CREAT else None
        return Effect(WRITE, CUT, path) if flags & os.O_TRUNC and stat.S_ISREG(status.st_mode) else None


def _signed(number: int) -> int:
    """A descriptor as the kernel sees it: the low 32 bits of the argument, signed."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number & 1 << 31 else number
