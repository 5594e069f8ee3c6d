"""Undoing unsynced changes: the power cut of hosts with an undo log.

The shim, or the launcher's supervisor, keeps an undo log per program: the old content for every change that is not
durable yet (see shim/undo.c and launcher/account.py). The script here applies the log; it runs on the host, with the
host's Python, after the replica was killed. It restores old bytes and lengths, restores the names of replaced and
removed files and removes new names, newest first, and leaves an empty log. It prints as JSON how many `operations` and
how many written `bytes` were lost, the inodes of the `files` (and directories) that lost any, and which of the mapped
files in its arguments are `kept`. A file that is gone has lost all of its bytes, including unlogged ones.

A sync of the whole file system (syncfs, sync) makes everything durable. A write with O_DSYNC, O_SYNC, RWF_DSYNC or
RWF_SYNC makes its own bytes durable, and for names it counts as a sync of the file. What else is durable depends on the
file system, so there are several models:

    ext4    a sync of a file makes its content, its length and its own name durable. Names are journaled in order, so
            every change of a name before the last change of the synced file's name or length is durable as well
            (ext4, xfs and btrfs guarantee at least that). A synchronous write also makes earlier truncations of the
            file durable, but no data that other writes left unsynced
    posix   a name is durable only once its directory was synced: the least that POSIX promises
    torn    names as in ext4; each 512-byte sector of unsynced data survives or not, at random and in any order, as if
            the disk had been writing it back
"""

from __future__ import annotations

__all__ = ["POWER_MODELS", "take_back_script"]

POWER_MODELS = ("ext4", "posix", "torn")
"""Models of what may be lost, the default first."""

_SCRIPT = r"""
import bisect, fcntl, json, os, random, shutil, stat, struct, sys, time
undo, data, model = sys.argv[1], sys.argv[2], sys.argv[3]
chance = random.Random(sys.argv[4])
HEAD = struct.Struct("=2I8Q2I")
MAGIC = 0x4F444E55
CHANGED, CREATED, UNLINKED, RENAMED, SYNCED, BARRIER, WRITTEN_THROUGH, TRUNCATED = range(1, 9)
SECTOR, ENDLESS = 512, 1 << 64

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

def inode(path):
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None
mapped = [inode(path) for path in sys.argv[5:]]
def finish(operations, size_bytes, files):
    # A mapped file may have an earlier name again. A file without content has kept nothing of what was written to it.
    accounts, left = os.stat(os.path.dirname(os.path.abspath(undo))), {}
    for directory, directories, names in os.walk(data if mapped else ""):
        if os.path.samestat(os.stat(directory), accounts):
            directories.clear()
            continue
        for path in (os.path.join(directory, name) for name in names):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size:
                left.setdefault(status.st_ino, path)
    kept = [left[number] for number in mapped if number in left]
    print(json.dumps({"operations": operations, "bytes": size_bytes, "files": sorted(files), "kept": kept}))

# The keeper of the log holds a lock on it, and may still be working for a program that has just been killed.
deadline_s = time.monotonic() + 15
while True:
    try:
        held = os.open(os.path.join(undo, "log"), os.O_RDWR)
    except FileNotFoundError:
        finish(0, 0, ())
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
durable, reborn, found, barrier = {}, {}, [], 0
# For each file: its last write that was durable when it returned, its last truncation, and when it got a name.
through, cut, named = {}, {}, {}
for record in records():
    kind, seq, key, own, offset, length, size = record[:7]
    if kind == WRITTEN_THROUGH:
        through[own] = max(through.get(own, 0), seq)
        if offset + length > size:
            barrier = max(barrier, seq)
    elif kind == TRUNCATED:
        cut[own] = max(cut.get(own, 0), seq)
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
# The name change up to which the journal is on disk: a sync advances it to the file's last change of name or length.
holder = {}
for kind, seq, key, own, offset, length, size, _, path, other in reversed(found):
    if kind in (UNLINKED, RENAMED):
        holder[path] = own
        if kind == RENAMED and inode(kept(seq)) is not None:
            holder[other] = inode(kept(seq))
    elif kind == CREATED:
        own = own or holder.pop(path, None) or inode(path)
        named[own] = max(named.get(own, 0), seq)
    elif kind == WRITTEN_THROUGH or kind == CHANGED and (not length or offset + length <= size):
        continue
    # A synchronous write does not make the growth by other writes durable.
    by_write = 0 if kind == CHANGED else through.get(own, 0)
    if seq < max(durable.get(key, 0), durable.get((key[0], own), 0), by_write):
        barrier = max(barrier, seq)
if model == "posix":
    barrier = 0
where, present_bytes = {}, {}
def stored_bytes(status):
    # Without holes: a file may have been extended without anything being written to it.
    return min(status.st_size, 512 * status.st_blocks)
def remember(path):
    # Remember where a file, or every file of a directory, is now, and how many bytes it held at first.
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    where[status.st_ino] = path
    if stat.S_ISREG(status.st_mode):
        present_bytes.setdefault(status.st_ino, stored_bytes(status))
    for directory, _, names in os.walk(path):
        for name in names:
            remember(os.path.join(directory, name))
remember(undo)
remember(data)
# For each file: the byte ranges that are durable and must stay, sorted and disjoint, and the least length it must keep.
ranges, unsorted, reach = {}, {}, {}
def protect(own, begin, end):
    unsorted.setdefault(own, []).append((begin, end))
    reach[own] = max(reach.get(own, 0), end)
def insert(kept_ranges, begin, end):
    first = bisect.bisect_left(kept_ranges, (begin, 0))
    if first and kept_ranges[first - 1][1] >= begin:
        first -= 1
    last = first
    while last < len(kept_ranges) and kept_ranges[last][0] <= end:
        begin, end = min(begin, kept_ranges[last][0]), max(end, kept_ranges[last][1])
        last += 1
    kept_ranges[first:last] = [(begin, end)]
def sorted_ranges(own):
    # Sorted lazily: files with synchronous writes only never need it, and many single insertions would be slow.
    kept_ranges, more = ranges.setdefault(own, []), unsorted.pop(own, ())
    if len(more) > 100:
        more = sorted([*kept_ranges, *more])
        kept_ranges.clear()
    for begin, end in more:
        insert(kept_ranges, begin, end)
    return kept_ranges
def unprotected(own, begin, end):
    kept_ranges = sorted_ranges(own)
    place = bisect.bisect_right(kept_ranges, (begin, ENDLESS))
    if place:
        begin = max(begin, kept_ranges[place - 1][1])
    while begin < end:
        stop = min(kept_ranges[place][0], end) if place < len(kept_ranges) else end
        yield begin, stop
        begin = kept_ranges[place][1] if place < len(kept_ranges) else end
        place += 1
for kind, seq, key, own, offset, length, *_ in found:
    # A file extended by a synchronous write stays that long, even if a concurrent write recorded the earlier length.
    if kind == WRITTEN_THROUGH and seq > max(cut.get(own, 0), reborn.get(own, 0), named.get(own, 0)):
        reach[own] = max(reach.get(own, 0), offset + length)
def shorten(own, file, size, present):
    file.truncate(present if reach.get(own, 0) == ENDLESS else max(size, min(reach.get(own, 0), present)))
def clear(file, begin, end):
    # Holes are skipped: a file may have been allocated far more space than was ever written.
    while begin < end:
        try:
            begin = os.lseek(file.fileno(), begin, os.SEEK_DATA)
            hole = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
        except OSError:
            return
        while begin < min(hole, end):
            begin += os.pwrite(file.fileno(), bytes(min(hole, end, begin + (1 << 20)) - begin), begin)
def restore(own, file, offset, length, size, old_at, count):
    # Undoes a change of `length` bytes; the log has `count` old bytes.
    present = os.fstat(file.fileno()).st_size
    for begin, end in unprotected(own, offset, offset + count):
        while begin < end:
            log.seek(old_at + begin - offset)
            begin += os.pwrite(file.fileno(), log.read(min(end - begin, 1 << 20)), begin)
    for begin, end in unprotected(own, offset + count, min(offset + length, reach.get(own, 0), present)):
        clear(file, begin, end)
    shorten(own, file, size, present)
# Torn files: the sectors that survived.
survived = {}
def tear(own, file, offset, length, old, size):
    # Undoes a write of `length` bytes over `old`, each sector at random.
    present = os.fstat(file.fileno()).st_size
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
            for begin, stop in unprotected(own, at, end):
                os.pwrite(file.fileno(), old[begin - offset : stop - offset].ljust(stop - begin, b"\0"), begin)
                lost += stop - begin
        at = end
    shorten(own, file, size, present)
    return lost
def give_back(name, path):
    # The directory may have been removed after the file; that removal is undone, too, since it came after a change that
    # is not on disk.
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.rename(name, path)
    remember(path)
operations = 0
files = set()
# For each file: the bytes of the writes that were undone, how many were lost, and the length before the oldest write.
written, lost_bytes, begun_bytes = {}, {}, {}
def count_bytes(own, size, length, lost):
    begun_bytes[own] = size
    written[own] = written.get(own, 0) + length
    lost_bytes[own] = lost_bytes.get(own, 0) + lost
log = open(os.path.join(undo, "log"), "rb")
for kind, seq, key, own, offset, length, size, (old_at, count), path, other in reversed(found):
    if kind == WRITTEN_THROUGH:
        protect(own, offset, offset + length)
        continue
    if seq < durable.get(key, 0) or kind not in (CHANGED, TRUNCATED) and seq <= barrier:
        continue
    if kind in (CHANGED, TRUNCATED):
        # The inode number of a removed file may have been reused by a newer file.
        if own not in where or seq < reborn.get(own, 0):
            continue
        if model != "posix" and kind == TRUNCATED and seq < through.get(own, 0):
            protect(own, offset, ENDLESS)
            continue
        with open(where[own], "r+b") as file:
            if model == "torn" and length and length < 1 << 26:
                log.seek(old_at)
                lost = tear(own, file, offset, length, log.read(count), size)
            else:
                restore(own, file, offset, length, size, old_at, count)
                lost = length
        count_bytes(own, size, length, lost)
    elif kind == CREATED:
        # The launcher logs a creation in advance, when the inode number is not known yet.
        number = inode(path)
        if number is None or own and number != own:
            continue
        own = number
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
    files.add(own)
log.close()
# Files that have no name left, including those in a directory that is gone.
links, gone = {}, {}
for entry in os.scandir(undo):
    paths = [entry.path]
    paths += [os.path.join(directory, name) for directory, _, names in os.walk(entry.path) for name in names]
    for path in paths:
        status = os.lstat(path)
        links[status.st_ino] = links.get(status.st_ino, 0) + 1
        if stat.S_ISREG(status.st_mode) and entry.name.startswith("lost"):
            gone[status.st_ino] = status
for own, status in gone.items():
    if links[own] == status.st_nlink:
        left_bytes = min(begun_bytes.get(own, status.st_size), stored_bytes(status))
        lost_bytes[own] = max(written.get(own, 0) + left_bytes, present_bytes.get(own, 0))
        files.add(own)
for name in os.listdir(undo):
    path = os.path.join(undo, name)
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
finish(operations, sum(lost_bytes.values()), files)
"""


def take_back_script() -> str:
    """A Python script to be run on the host with four arguments: the undo directory, the data directory, one of
    `POWER_MODELS`, and a seed for random choices; then the paths of files that were mapped shared and writable."""
    return _SCRIPT
