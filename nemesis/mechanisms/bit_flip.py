"""Flipping a bit of a stored file: a short program that the host's own Python reads from standard input.

flip DATA FILES PLACE BIT        flips, and prints the file, the offset, the byte before and after, and the
                                 file's inode
restore PATH OFFSET BEFORE AFTER restores the byte, unless it has been changed since, and reads it back
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from nemesis.target import BitFlipped

__all__ = ["FLIP_SCRIPT", "FlippedBits", "flip_arguments", "parse_flip", "restore_arguments"]

FLIP_SCRIPT = r"""
import glob, os, sys
CHUNK = 1 << 20
def filled(path):
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        while end > 0:
            begin = max(0, end - CHUNK)
            file.seek(begin)
            left = len(file.read(end - begin).rstrip(b"\0"))
            if left:
                return begin + left
            end = begin
    return 0
def put(path, offset, value):
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(bytes([value]))
        os.fsync(file.fileno())
def get(path, offset):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(1)
def stored(data, files):
    # Of the run's own files alone: what a link or an absolute path leads to may be somebody's who is not under test.
    own = os.path.join(os.path.realpath(data), "")
    found = [path for path in sorted(glob.glob(os.path.join(data, files))) if os.path.isfile(path)]
    return [path for path in found if os.path.realpath(path).startswith(own)]
if sys.argv[1] == "flip":
    data, files, place, bit = sys.argv[2:]
    sizes = {path: filled(path) for path in stored(data, files)}
    path = max(sizes, key=sizes.get, default=None)
    if path is None or not sizes[path]:
        sys.exit("there is no %s in which a bit could be flipped" % files)
    offset = min(int(sizes[path] * float(place)), sizes[path] - 1)
    before = get(path, offset)[0]
    put(path, offset, before ^ 1 << int(bit))
    print(path, offset, before, get(path, offset)[0], os.stat(path).st_ino, sep="\t")
else:
    path, (offset, before, after) = sys.argv[2], map(int, sys.argv[3:])
    if os.path.isfile(path) and get(path, offset) == bytes([after]):
        put(path, offset, before)
        if (now := get(path, offset)) != bytes([before]):
            sys.exit("byte %d of %s is not %d again but %s" % (offset, path, before, list(now)))
"""


def flip_arguments(data_path: str, files: str, place: float, bit: int) -> list[str]:
    """The program's arguments for a flip."""
    return ["flip", data_path, files, repr(place), str(bit)]


class FlippedBits:
    """The bits that faults have flipped and not yet restored, oldest first.

    Two faults may flip bits of one byte, and either may end first: each restores its own bit and leaves the other's.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], BitFlipped] = {}
        """(fault, host) -> flipped byte."""

    def faults(self) -> list[str]:
        """The faults with a bit flipped."""
        return list(dict.fromkeys(fault_id for fault_id, _ in self._all))

    def of(self, fault_id: str) -> dict[str, BitFlipped]:
        """What a fault has flipped, by host."""
        return {host: flipped for (each, host), flipped in self._all.items() if each == fault_id}

    def on(self, host: str) -> dict[str, BitFlipped]:
        """What is flipped on a host, by fault."""
        return {fault_id: flipped for (fault_id, each), flipped in self._all.items() if each == host}

    def add(self, fault_id: str, host: str, flipped: BitFlipped) -> None:
        """Record the latest flip."""
        self._all[fault_id, host] = flipped

    def way_back(self, fault_id: str, host: str) -> BitFlipped | None:
        """How to restore a fault's bit: the byte should be `after` now, and has to become `before`. None if it was
        written between this flip and a later one."""
        own = self._all[fault_id, host]
        now = own.after
        for later in self._later(fault_id, host).values():
            if later.before != now:
                return None
            now = later.after
        return replace(own, before=now ^ own.before ^ own.after, after=now)

    def forget(self, fault_id: str, host: str) -> None:
        """Remove a fault whose bit was restored, and take that bit out of the values of later flips of the byte."""
        if self.way_back(fault_id, host) is not None:
            bit = self._all[fault_id, host].before ^ self._all[fault_id, host].after
            for other, later in self._later(fault_id, host).items():
                self._all[other, host] = replace(later, before=later.before ^ bit, after=later.after ^ bit)
        del self._all[fault_id, host]

    def _later(self, fault_id: str, host: str) -> dict[str, BitFlipped]:
        """Later flips of the same byte, by fault."""
        own, on_host = self._all[fault_id, host], self.on(host)
        after = list(on_host)[list(on_host).index(fault_id) + 1 :]
        where = (own.path, own.offset)
        return {each: on_host[each] for each in after if (on_host[each].path, on_host[each].offset) == where}


def restore_arguments(flipped: BitFlipped) -> list[str]:
    """The program's arguments to restore a byte."""
    return ["restore", flipped.path, str(flipped.offset), str(flipped.before), str(flipped.after)]


def parse_flip(output: str) -> BitFlipped:
    """The flip that the program reports. Raises ValueError."""
    words = output.rstrip("\n").split("\t")
    if len(words) != 5:
        raise ValueError(f"no word of a flipped bit: {shlex.quote(output[:200])}")
    return BitFlipped(words[0], *map(int, words[1:]))
