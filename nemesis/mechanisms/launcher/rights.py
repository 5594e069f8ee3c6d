"""The rights with which a program opens files, and how a supervisor assumes them.

Whether a file may be opened depends on the thread that opens it: on its file-system user and groups, and on its
capabilities. A supervisor that runs as root gives one of its threads the program's rights for a single `open`, by raw
system calls, since the C library's functions would change all threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Rights", "assumed", "rights_of"]

_SETGROUPS, _SETFSUID, _SETFSGID, _CAPGET, _CAPSET = 116, 122, 123, 125, 126
"""x86-64: on other processors filters are not installed in running programs, so nothing is opened on their behalf."""
_CAPABILITIES_HEADER = struct.pack("=Ii", 0x20080522, 0)
"""_LINUX_CAPABILITY_VERSION_3, for this thread."""
_CAPABILITIES = struct.Struct("=6I")
"""Effective, permitted and inheritable capabilities: first their low halves, then their high halves."""
_CAP_SETGID, _CAP_SETUID = 1 << 6, 1 << 7
_NOBODY = 2**32 - 1
"""Makes setfsuid and setfsgid return the current id without changing it."""


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of one thread: file-system user and group, supplementary groups, effective capabilities, and the label
    given by a kernel security module. Also its umask, which is not a right, and its process."""

    user: int
    group: int
    groups: tuple[int, ...]
    capabilities: int
    label: bytes
    umask: int = field(default=0, compare=False)
    process: int = field(default=0, compare=False)

    def can_assume(self, other: Rights) -> bool:
        """Whether a thread with these rights can temporarily assume `other`."""
        if other == self:
            return True
        is_able = self.capabilities & _CAP_SETGID and self.capabilities & _CAP_SETUID
        return bool(is_able) and not other.capabilities & ~self.capabilities and other.label == self.label


def rights_of(thread: int | str) -> Rights:
    """The rights of a thread, or of "thread-self". Raises OSError."""
    with open(f"/proc/{thread}/status", "rb") as file:
        said = {name: words for name, _, words in (line.partition(b":") for line in file)}
    label = b""
    with contextlib.suppress(OSError), open(f"/proc/{thread}/attr/current", "rb") as file:
        label = file.read()
    return Rights(
        user=int(said[b"Uid"].split()[3]),
        group=int(said[b"Gid"].split()[3]),
        groups=tuple(map(int, said[b"Groups"].split())),
        capabilities=int(said[b"CapEff"], 16),
        label=label,
        umask=int(said[b"Umask"], 8),
        process=int(said[b"Tgid"]),
    )


@contextlib.contextmanager
def assumed(rights: Rights, own: Rights) -> Iterator[None]:
    """Give this thread, whose rights are `own`, other rights for the duration of the context. Raises OSError."""
    if rights == own:
        yield
        return
    try:
        _take(rights, own)
        yield
    finally:
        try:
            _take(own, own)
        except OSError:
            os._exit(1)  # it could no longer answer calls correctly; the guardian lets all of them go on


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _take(rights: Rights, own: Rights) -> None:
    libc = _libc()

    def call(number: int, *arguments: object) -> int:
        result = int(libc.syscall(number, *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def set_effective(capabilities: int) -> None:
        header = ctypes.create_string_buffer(_CAPABILITIES_HEADER)
        data = ctypes.create_string_buffer(_CAPABILITIES.size)
        call(_CAPGET, header, data)
        _, *low, _, permitted_high, inheritable_high = _CAPABILITIES.unpack(data.raw)
        low_half, high_half = capabilities & 0xFFFFFFFF, capabilities >> 32
        data.raw = _CAPABILITIES.pack(low_half, *low, high_half, permitted_high, inheritable_high)
        call(_CAPSET, header, data)

    set_effective(own.capabilities)  # so that the rest may be changed
    call(_SETGROUPS, len(rights.groups), (ctypes.c_uint32 * len(rights.groups))(*rights.groups))
    for number, wanted in ((_SETFSGID, rights.group), (_SETFSUID, rights.user)):
        call(number, wanted)
        if call(number, ctypes.c_uint32(_NOBODY)) != wanted:
            raise PermissionError(f"no supervisor thread can act as user or group {wanted} on files")
    set_effective(rights.capabilities)
