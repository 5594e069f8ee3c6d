"""Taking back what was not synced: the power cut of hosts whose replicas run under the shim.

The shim keeps, in an undo log per host, what was there before every change that is not durable yet (see
shim/undo.c). The script here applies it: it runs on the host, by the host's Python, after the replica was killed. It
restores old bytes and lengths, gives replaced and removed files their names back and takes new names away, newest
first, and leaves an empty log. It prints how many operations and how many written bytes were lost.
"""

from __future__ import annotations

__all__ = ["take_back_script"]

_SCRIPT = r"""
import os, shutil, struct, sys
undo, data = sys.argv[1], sys.argv[2]
HEAD = struct.Struct("=2I8Q2I")
MAGIC, CHANGED, CREATED, UNLINKED, RENAMED, SYNCED = 0x4F444E55, 1, 2, 3, 4, 5

def records():
    with open(os.path.join(undo, "log"), "rb") as log:
        while len(head := log.read(HEAD.size)) == HEAD.size:
            magic, kind, seq, dev, ino, own, offset, length, size, count, first, second = HEAD.unpack(head)
            if magic != MAGIC:
                sys.exit("the undo log is damaged")
            rest = log.read(first + second)
            old_at = log.tell()
            log.seek(count, 1)
            if log.tell() > total:
                return
            path, other = os.fsdecode(rest[:first]), os.fsdecode(rest[first:])
            yield kind, seq, (dev, ino), own, offset, length, size, (old_at, count), path, other

try:
    total = os.path.getsize(os.path.join(undo, "log"))
except FileNotFoundError:
    print(0, 0)
    sys.exit()
durable, reborn, found = {}, {}, []
for record in records():
    kind, seq, key, own = record[:4]
    if kind == SYNCED:
        durable[key] = max(durable.get(key, 0), seq)
    else:
        found.append(record)
        if kind == CREATED and own:
            reborn[own] = seq
where = {}
def remember(path):
    try:
        where[os.lstat(path).st_ino] = path
    except FileNotFoundError:
        pass
for top in (undo, data):
    for directory, _, names in os.walk(top):
        for name in names:
            remember(os.path.join(directory, name))
def kept(seq):
    return os.path.join(undo, "k%d" % seq)
def inode(path):
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None
operations = size_bytes = 0
log = open(os.path.join(undo, "log"), "rb")
found.sort(key=lambda record: record[1])
for kind, seq, key, own, offset, length, size, (old_at, count), path, other in reversed(found):
    if seq < durable.get(key, 0):
        continue
    if kind == CHANGED:
        # A number of a file that is gone for good may have gone to a newer file.
        if own not in where or seq < reborn.get(own, 0):
            continue
        with open(where[own], "r+b") as file:
            log.seek(old_at)
            file.seek(offset)
            while count:
                piece = log.read(min(count, 1 << 20))
                file.write(piece)
                count -= len(piece)
            file.truncate(size)
        size_bytes += length
    elif kind == CREATED:
        # Who writes the log before a file is made does not know its number.
        if inode(path) is None or own and inode(path) != own:
            continue
        lost = os.path.join(undo, "lost%d" % seq)
        os.rename(path, lost)
        remember(lost)
    elif kind == UNLINKED:
        if inode(path) is not None or inode(kept(seq)) is None:
            continue
        os.rename(kept(seq), path)
        remember(path)
    elif kind == RENAMED:
        if inode(other) != own:
            continue
        os.rename(other, path)
        remember(path)
        if inode(kept(seq)) is not None:
            os.rename(kept(seq), other)
            remember(other)
    operations += 1
log.close()
for name in os.listdir(undo):
    path = os.path.join(undo, name)
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
print(operations, size_bytes)
"""


def take_back_script() -> str:
    """A Python script to be run on the host with two arguments: the undo directory and the data's directory."""
    return _SCRIPT
