"""Which file of a host a reported call is about, and what the call does to it."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass

from .filter import GROUPS, Call

__all__ = ["CHANGE", "CREATE", "CUT", "GROW", "READ", "RENAME", "SYNC", "UNLINK", "WRITE", "Effect", "Files", "Opening"]

WRITE, GROW, SYNC, READ = "write", "grow", "sync", "read"
"""What a call asks of the disk; GROW is a write that needs more space."""

CHANGE, CUT, CREATE, UNLINK, RENAME = "change", "cut", "create", "unlink", "rename"
"""What a write does to a file: changes bytes, sets the length, makes it, takes its name, gives it another name."""

_PATH_BYTES = 4096
_AT_FDCWD = -100
_MS_SYNC = 4
_UNLINK_DIRECTORY = 0x200
_PUNCH_HOLE, _COLLAPSE_RANGE, _INSERT_RANGE = 0x02, 0x08, 0x20
"""Of what fallocate may do with a range: free it, take it out of the file, put one in. The first two need no space."""
_VECTORS = 1024
"""IOV_MAX of Linux."""

_PATHS: dict[str, tuple[int | None, int]] = {
    "open": (None, 0), "openat": (0, 1), "openat2": (0, 1), "creat": (None, 0), "truncate": (None, 0),
    "rename": (None, 0), "renameat": (0, 1), "renameat2": (0, 1), "unlink": (None, 0), "unlinkat": (0, 1),
    "mkdir": (None, 0), "mkdirat": (0, 1), "rmdir": (None, 0), "link": (None, 1), "linkat": (2, 3),
    "symlink": (None, 1), "symlinkat": (1, 2),
}  # fmt: skip
"""Call -> the arguments that are the directory's descriptor and the path of the file that it concerns."""

_DESTINATIONS: dict[str, tuple[int | None, int]] = {"rename": (None, 1), "renameat": (2, 3), "renameat2": (2, 3)}

_COPIES: dict[str, tuple[int, int, int | None, int]] = {
    "copy_file_range": (0, 2, 3, 4),
    "splice": (0, 2, 3, 4),
    "sendfile": (1, 0, None, 3),
}
"""Call -> the arguments that are the descriptor it reads from, the one it writes to, the address of where it writes,
and the most that it copies."""

_WHERE_IT_STANDS = 2**64 - 1
"""As the offset of a write at a place: where the descriptor stands."""

_MAKING = ("mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat")


@dataclass(frozen=True, slots=True)
class Effect:
    """What a call would do. `path` opens the file, and may be one of /proc/PID/fd; `offset` and `length` are of a
    CHANGE, or `offset` the new length for CUT, or the place from which on all of the file moves; `new_path` is of a
    RENAME. `is_durable`: done means durable, as with O_DSYNC."""

    operation: str
    action: str = ""
    path: str = ""
    offset: int = 0
    length: int = 0
    new_path: str = ""
    is_durable: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """What a call that opens asks for; `path` is empty for a file elsewhere, `asked` is the path as the program has it,
    from the root on; `is_plain` is false where the call restricts how the path may be resolved, or where another
    process would find another file by it."""

    path: str
    asked: str
    flags: int
    mode: int
    is_plain: bool


class Files:
    """Which file a call is about: answers from /proc of the thread that waits in it."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def effect(self, call: Call, *, looks_closely: bool) -> Effect | None:
        """What the call does to a file under the root; None when it is about another file, or changes nothing, or the
        process is gone. `looks_closely`: where a write by descriptor goes, too, which takes two more looks. Raises
        PermissionError when the process may not be looked into."""
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
        """A sync of the file system that the root is on, by a descriptor of something else there."""
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
                    is_there = not path.endswith(" (deleted)")  # else it cannot be opened, and no name needs it
                    return Effect(SYNC, path=path if is_there else "") if self._is_under_root(path) else None
        return None

    def _extent(self, call: Call, effect: Effect) -> Effect:
        """The effect of a write by descriptor with where it goes."""
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
            # All that comes behind moves, and the length with it: durable as a truncation is, whatever `flags` say.
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
        """Where a copy writes, by default at `offset`, and how much at most."""
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
        """The path that a call names, from the root on: that of this process, where the thread has another one."""
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
            # Over what is there already it fails and makes nothing: so programs make sure of their directories.
            return Effect(GROW, "" if os.path.lexists(path) else CREATE, path)
        is_directory = name == "rmdir" or (name == "unlinkat" and arguments[2] & _UNLINK_DIRECTORY)
        if not is_directory and stat.S_ISDIR(os.lstat(path).st_mode):
            is_directory = True  # which fails: Go asks so before it removes a directory as one
        return Effect(WRITE, "" if is_directory else UNLINK, path)

    def opening(self, call: Call) -> Opening:
        """What a call that opens asks for. Raises OSError, struct.error."""
        flags, mode, is_plain = self._how(call)
        asked = self._asked(call, _PATHS[call.name])
        parent, name = os.path.split(asked)
        path = os.path.join(os.path.realpath(parent), name)
        is_ours_too = not asked.startswith("/proc/")
        return Opening(path if self._is_under_root(path) else "", asked, flags, mode, is_plain and is_ours_too)

    def flags(self, call: Call) -> int:
        """Those of a call that opens. Raises OSError, struct.error."""
        return self._how(call)[0]

    def has(self, link: str) -> bool:
        """Whether one of /proc/PID/fd is of a regular file under the root. Raises OSError."""
        return self._is_under_root(os.readlink(link)) and stat.S_ISREG(os.stat(link).st_mode)

    def _how(self, call: Call) -> tuple[int, int, bool]:
        """(flags, mode, whether that is all that the call asks for)"""
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
    """A descriptor as the kernel sees it: the low 32 bits of the argument, with a sign."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number & 1 << 31 else number
