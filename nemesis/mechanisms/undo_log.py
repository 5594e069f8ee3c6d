"""Taking back what was not synced: the power cut of hosts whose replicas' changes are kept track of.

The shim, or the launcher's supervisor, keeps an undo log per host: what was there before every change that is not
durable yet (see shim/undo.c and launcher/account.py). The script here applies it: it runs on the host, by the host's
Python, after the replica was killed. It restores old bytes and lengths, gives replaced and removed files their names
back and takes new names away, newest first, and leaves an empty log. It prints how many operations and how many
written bytes were lost, and of how many files.

A sync of the whole file system (syncfs, sync) makes everything durable. What else counts as durable is a matter of the
file system, so there are models:

    ext4    a sync of a file makes its content, its length and its own name durable; names come in the order of a
    journal, so
            with the last change of name or length of the synced file every earlier change of a name is durable
            (ext4, xfs and btrfs do at least that)
    posix   a name is durable only once its directory was synced: the least that POSIX promises
    torn    names as in ext4; of data that was not synced every sector of 512 bytes is there or not, by chance, in any
    order,
            as when the disk was writing it back
"""

from __future__ import annotations

__all__ = ["POWER_MODELS", "take_back_script"]

POWER_MODELS = ("ext4", "posix", "torn")
"""What may be lost, the default first."""

_SCRIPT = r"""
import fcntl, os, random, shutil, struct, sys, time
undo, data, model = sys.argv[1], sys.argv[2], sys.argv[3]
chance = random.Random(sys.argv[4])
HEAD = struct.Struct("=2I8Q2I")
MAGIC, CHANGED, CREATED, UNLINKED, RENAMED, SYNCED, BARRIER = 0x4F444E55, 1, 2, 3, 4, 5, 6
SECTOR = 512

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

# Whoever keeps the log has it locked, and may still be at work for a program that was killed just now.
deadline_s = time.monotonic() + 15
while True:
    try:
        held = os.open(os.path.join(undo, "log"), os.O_RDWR)
    except FileNotFoundError:
        print(0, 0, 0)
        sys.exit()
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(os.path.join(undo, "log"))):
            break
    except (BlockingIOError, FileNotFoundError):
        time.sleep(0.01)
    os.close(held)
    if time.monotonic() > deadline_s:
        sys.exit("a program that writes there has not ended")
total = os.path.getsize(os.path.join(undo, "log"))
def inode(path):
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None
durable, reborn, found, barrier = {}, {}, [], 0
for record in records():
    kind, seq, key, own = record[:4]
    if kind == SYNCED:
        durable[key] = max(durable.get(key, 0), seq)
    elif kind == BARRIER:
        barrier = max(barrier, seq)
    else:
        found.append(record)
        if kind == CREATED and own:
            reborn[own] = seq
everything = durable.get((0, 0), 0)
found = sorted((record for record in found if record[1] >= everything), key=lambda record: record[1])
def kept(seq):
    return os.path.join(undo, "k%d" % seq)
# Up to which change of a name the journal is on disk: a sync takes it to the last change of the file's name or length.
holder = {}
for kind, seq, key, own, offset, length, size, _, path, other in reversed(found):
    if kind in (UNLINKED, RENAMED):
        holder[path] = own
        if kind == RENAMED and inode(kept(seq)) is not None:
            holder[other] = inode(kept(seq))
    elif kind == CREATED:
        own = own or holder.pop(path, None) or inode(path)
    elif length and offset + length <= size:
        continue
    if seq < max(durable.get(key, 0), durable.get((key[0], own), 0)):
        barrier = max(barrier, seq)
if model == "posix":
    barrier = 0
where = {}
def remember(path):
    # Where a file is now, or every file of a directory.
    try:
        where[os.lstat(path).st_ino] = path
    except FileNotFoundError:
        return
    for directory, _, names in os.walk(path):
        for name in names:
            remember(os.path.join(directory, name))
remember(undo)
remember(data)
# Torn files: the sectors that survived, and how far the last of them reaches.
survived, reach = {}, {}
def tear(own, file, offset, length, old, size):
    # Takes back by chance, sector by sector, a write of `length` bytes over `old`.
    decided = survived.setdefault(own, set())
    lost = 0
    at = offset
    while at < offset + length:
        sector = at // SECTOR
        end = min((sector + 1) * SECTOR, offset + length)
        if sector not in decided and chance.random() < 0.5:
            decided.add(sector)
            reach[own] = max(reach.get(own, 0), end)
        elif sector not in decided:
            file.seek(at)
            file.write(old[at - offset : end - offset].ljust(end - at, b"\0"))
            lost += end - at
        at = end
    file.truncate(max(size, reach.get(own, 0)))
    return lost
def give_back(name, path):
    # The directory may have been removed after the file was: what came later than a change that is not on disk is not
    # there either.
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.rename(name, path)
    remember(path)
operations = size_bytes = 0
files = set()
log = open(os.path.join(undo, "log"), "rb")
for kind, seq, key, own, offset, length, size, (old_at, count), path, other in reversed(found):
    if seq < durable.get(key, 0) or kind != CHANGED and seq <= barrier:
        continue
    if kind == CHANGED:
        # A number of a file that is gone for good may have gone to a newer file.
        if own not in where or seq < reborn.get(own, 0):
            continue
        files.add(own)
        with open(where[own], "r+b") as file:
            log.seek(old_at)
            if model == "torn" and length and length < 1 << 26:
                size_bytes += tear(own, file, offset, length, log.read(count), size)
                operations += 1
                continue
            file.seek(offset)
            while count:
                piece = log.read(min(count, 1 << 20))
                file.write(piece)
                count -= len(piece)
            file.truncate(max(size, reach.get(own, 0)))
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
        give_back(kept(seq), path)
    elif kind == RENAMED:
        if inode(other) != own:
            continue
        give_back(other, path)
        if inode(kept(seq)) is not None:
            give_back(kept(seq), other)
    operations += 1
    if kind != CHANGED:
        files.add(path)
log.close()
for name in os.listdir(undo):
    path = os.path.join(undo, name)
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
print(operations, size_bytes, len(files))
"""


def take_back_script() -> str:
    """A Python script to be run on the host with four arguments: the undo directory, the data's directory,
    one of `POWER_MODELS`, and a seed for what is left to chance."""
    return _SCRIPT
