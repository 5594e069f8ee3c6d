/* The undo log: what a power cut would lose.
 *
 * Before a program changes a file under the root, the old content goes into the undo log; when the program has synced
 * the file, or the directory for changes of names, the log records that everything up to then is durable. To "cut the
 * power", the harness kills the program and undoes, newest first, every change that was not made durable (see
 * nemesis/mechanisms/undo_log.py, which also defines what counts as durable). The log survives the program, so a killed
 * and restarted program's unsynced changes are still known.
 *
 * One process keeps the log and holds a lock on it. If another process of the same program writes as well, the account
 * is incomplete and the harness is told; the launcher's account has no such limit.
 *
 * A write that is durable when it returns is recorded afterwards: its bytes survive the undoing of older changes of
 * them, and it makes the file's name durable as a sync does.
 *
 * If a write and a sync of one file are concurrent, the write counts as the earlier one: programs that leave the order
 * open lose less than in the worst case. Writes through shared mappings are not seen.
 *
 * A record is `struct record`, then two paths and the old bytes. A torn record at the end is one whose change was not
 * made. System calls are made directly, because the library's functions are replaced by ours.
 */
#define _GNU_SOURCE
#include "undo.h"
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RECORD_MAGIC 0x4f444e55u
#define FIRST_LIMIT_BYTES (16u << 20)  /* the log is compacted beyond this, or beyond twice its last compacted size */
#define RESERVED_BYTES (4 << 20)       /* for the log: more than programs write that meet ENOSPC */
#define MAX_LOG_BYTES (1ull << 30)     /* beyond this the account is given up, and the harness is told */
#define CHUNK_BYTES (256u << 10)
#define DIRECT_BYTES 4096u             /* O_DIRECT reads whole blocks into aligned memory */
#define MAX_OBJECTS 8192               /* synced files and directories distinguished during a compaction */

enum kind { CHANGED = 1, CREATED, UNLINKED, RENAMED, SYNCED, BARRIER, WRITTEN_THROUGH, TRUNCATED };

struct record {
    uint32_t magic, kind;
    uint64_t seq;
    uint64_t dev, ino;        /* whose sync makes it durable: the file, or the name's directory; SYNCED: 0 for all */
    uint64_t own_ino;         /* the file itself; CREATED: 0 if not known, or if the file is older than this name */
    uint64_t offset, length;  /* what was written; TRUNCATED: the new length, and 0 */
    uint64_t old_size;
    uint64_t data_bytes;      /* old bytes from `offset` on that follow the paths */
    uint32_t path_bytes, other_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t mask;  /* the previous signal mask of the thread that holds the lock */
static int log_fd = -1;
static pid_t keeper;  /* the process that keeps the log; 0 if it is another program's */
static dev_t log_device;
static ino_t log_inode;
static char undo_path[PATH_MAX - 64];
static uint64_t next_seq = 1, log_bytes, limit_bytes = FIRST_LIMIT_BYTES;

struct object {
    uint64_t dev, ino, durable_seq;
    uint64_t through_seq;  /* its last write that was durable when it returned */
    int is_pending;        /* it has changes that are not durable */
};

static void give_up(void)
{
    COUNT(undo_overflow);
    log_fd = -1;
}

/* Reserves space for the log to grow while the file system is full: a full disk must not end the account of it. Not
 * every file system supports this; without it the log may have to be given up, and the harness is told. */
static void reserve(int fd)
{
    bare(SYS_fallocate, fd, FALLOC_FL_KEEP_SIZE, (off_t)0, (off_t)RESERVED_BYTES);
}

/* The program may change its user, or start one that does. Fails if another user owns the log, who has shared it. */
static void share(int fd)
{
    bare(SYS_fchmod, fd, 0666);
}

/* Avoids descriptors 0 to 2: a program that has closed these may still write to them, which must not reach the log. */
static int open_apart(const char *path, int flags)
{
    int fd = (int)bare(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int other = (int)bare(SYS_fcntl, fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    bare(SYS_close, fd);
    return other;
}

static int read_at(int fd, void *data, size_t length, uint64_t offset)
{
    char *at = data;
    while (length) {
        ssize_t got = bare(SYS_pread64, fd, at, length, offset);
        if (got <= 0)
            return -1;
        at += got, offset += (uint64_t)got, length -= (size_t)got;
    }
    return 0;
}

static int write_all(int fd, const void *data, size_t length)
{
    const char *at = data;
    while (length) {
        ssize_t put = bare(SYS_write, fd, at, length);
        if (put <= 0)
            return -1;
        at += put, length -= (size_t)put;
    }
    return 0;
}

static uint64_t size_of(const struct record *record)
{
    return sizeof *record + record->path_bytes + record->other_bytes + record->data_bytes;
}

/* Reads the record at `offset`; 0 at the end and for a torn one. */
static int record_at(uint64_t offset, struct record *record)
{
    return offset + sizeof *record <= log_bytes && read_at(log_fd, record, sizeof *record, offset) == 0 &&
           record->magic == RECORD_MAGIC && offset + size_of(record) <= log_bytes;
}

static void kept_name(uint64_t seq, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%s/k%llu", undo_path, (unsigned long long)seq);
}

static char chunk[CHUNK_BYTES] __attribute__((aligned(DIRECT_BYTES)));  /* protected by the lock */

static int copy_bytes(int from_fd, uint64_t offset, uint64_t length, int to_fd)
{
    while (length) {
        size_t size = length < CHUNK_BYTES ? (size_t)length : CHUNK_BYTES;
        if (read_at(from_fd, chunk, size, offset) || write_all(to_fd, chunk, size))
            return -1;
        offset += size, length -= size;
    }
    return 0;
}

/* The same from an O_DIRECT descriptor. May have written a part if it fails. */
static int copy_direct(int from_fd, uint64_t offset, uint64_t length, int to_fd)
{
    while (length) {
        size_t before = (size_t)(offset % DIRECT_BYTES);
        ssize_t got = bare(SYS_pread64, from_fd, chunk, (size_t)CHUNK_BYTES, offset - before);
        if (got <= (ssize_t)before)
            return -1;
        uint64_t size = (uint64_t)got - before < length ? (uint64_t)got - before : length;
        if (write_all(to_fd, chunk + before, (size_t)size))
            return -1;
        offset += size, length -= size;
    }
    return 0;
}

/* The same for a file that none of the program's descriptors can read. Closing a descriptor would release all locks
 * that the process has on the file (man 2 fcntl), so another process opens and closes it: a bare clone, not the
 * library's fork, whose end sends the program no signal and is not seen by its wait(). It ends with the program;
 * otherwise a restarted program would find the log still locked, and being written to. */
static int copy_by_another(const char *path, uint64_t offset, uint64_t length, int to_fd)
{
    int status = -1;
    long pid = bare(SYS_clone, 0l, 0l, 0l, 0l, 0l), ended;
    if (pid == 0) {
        bare(SYS_prctl, (long)PR_SET_PDEATHSIG, (long)SIGKILL, 0l, 0l, 0l);
        int is_orphan = (pid_t)bare(SYS_getppid) != keeper;
        int fd = is_orphan ? -1 : (int)bare(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
        bare(SYS_exit_group, (long)(fd < 0 || copy_bytes(fd, offset, length, to_fd) != 0));
    }
    do
        ended = pid < 0 ? -1 : bare(SYS_wait4, pid, &status, (long)__WALL, NULL);
    while (ended < 0 && pid > 0 && errno == EINTR);
    return ended == pid && status == 0 ? 0 : -1;
}

/* The index of an object among those that were synced; `count` if it is not there. Index 0 is everything. */
static size_t object_at(const struct object *objects, size_t count, uint64_t dev, uint64_t ino)
{
    size_t i = 0;
    while (i < count && (objects[i].dev != dev || objects[i].ino != ino))
        i++;
    return i;
}

/* The sequence number before which all changes of an object were synced; 0 if none were. */
static uint64_t durable_seq(const struct object *objects, size_t count, uint64_t dev, uint64_t ino)
{
    uint64_t all = objects[0].durable_seq;
    size_t i = object_at(objects, count, dev, ino);
    return i < count && objects[i].durable_seq > all ? objects[i].durable_seq : all;
}

/* Collects the synced objects, and up to which change, into zeroed memory; returns how many. Index 0 is everything. */
static size_t synced_objects(struct object *objects)
{
    struct record record;
    size_t count = 1;
    for (uint64_t offset = 0; record_at(offset, &record); offset += size_of(&record)) {
        if (record.kind != SYNCED && record.kind != WRITTEN_THROUGH)
            continue;
        size_t i = object_at(objects, count, record.dev, record.ino);
        if (i == MAX_OBJECTS)
            continue;  /* its records are kept: more than necessary, never less */
        if (i == count)
            objects[count++] = (struct object){.dev = record.dev, .ino = record.ino};
        uint64_t *seq = record.kind == SYNCED ? &objects[i].durable_seq : &objects[i].through_seq;
        if (record.seq > *seq)
            *seq = record.seq;
    }
    return count;
}

/* Marks files that have both writes that were durable when they returned and changes that are not durable. */
static void find_pending(struct object *objects, size_t count)
{
    struct record record;
    for (uint64_t offset = 0; record_at(offset, &record); offset += size_of(&record)) {
        int is_change = record.kind == CHANGED || record.kind == TRUNCATED;
        size_t i = is_change ? object_at(objects, count, record.dev, record.ino) : count;
        if (i < count && objects[i].through_seq && record.seq >= durable_seq(objects, count, record.dev, record.ino))
            objects[i].is_pending = 1;
    }
}

/* Whether a sync of the same file or directory has covered a change of a name or length. A write that was durable when
 * it returned covers both as well, but not the growth of the file by other writes. */
static int is_journaled(const struct object *objects, size_t count, const struct record *record)
{
    if (record->seq < durable_seq(objects, count, record->dev, record->ino) ||
        record->seq < durable_seq(objects, count, record->dev, record->own_ino))
        return 1;
    size_t i = object_at(objects, count, record->dev, record->own_ino);
    return i < count && record->kind != CHANGED && record->seq < objects[i].through_seq;
}

/* The last change of a name or length that a sync of the same file or directory has covered: with a journal, everything
 * before it is on disk as well. It is recorded, because the records that show it may be dropped. */
static struct record journal_barrier(const struct object *objects, size_t count)
{
    struct record record, barrier = {.magic = RECORD_MAGIC, .kind = BARRIER};
    for (uint64_t offset = 0; record_at(offset, &record); offset += size_of(&record)) {
        int is_write = record.kind == CHANGED || record.kind == WRITTEN_THROUGH;
        if (record.kind == SYNCED ||
            (is_write && (!record.length || record.offset + record.length <= record.old_size)))
            continue;
        if (record.seq > barrier.seq && (record.kind == BARRIER || record.kind == WRITTEN_THROUGH ||
                                         is_journaled(objects, count, &record)))
            barrier.seq = record.seq;
    }
    return barrier;
}

/* Whether a record is no longer needed; for names, this also removes the kept file. The last sync of every object is
 * kept, and its last write that was durable when it returned: they may make the file's own name durable, whose record
 * belongs to the directory. Earlier such writes of a file are kept while other changes of it may be undone. */
static int is_durable(const struct object *objects, size_t count, const struct record *record)
{
    uint64_t durable = durable_seq(objects, count, record->dev, record->ino);
    size_t i = object_at(objects, count, record->dev, record->ino);
    if (record->kind == BARRIER)
        return 1;
    if (record->kind == WRITTEN_THROUGH && i < count && !objects[i].is_pending && record->seq < objects[i].through_seq)
        return 1;
    if (!durable || record->seq >= durable)
        return 0;
    if (record->kind == UNLINKED || record->kind == RENAMED) {
        char kept[PATH_MAX];
        kept_name(record->seq, kept);
        bare(SYS_unlinkat, AT_FDCWD, kept, 0);
    }
    return 1;
}

/* Remembers the identity of the log's file. */
static int know(int fd)
{
    struct stat status;
    if (fstat(fd, &status) != 0)
        return -1;
    log_device = status.st_dev, log_inode = status.st_ino;
    return 0;
}

/* Makes sure that the descriptor still refers to the log: some programs close all descriptors that they have not
 * opened, and the next file that they open gets its number. Then the log is reopened. Called with the lock held. */
static void find_again(void)
{
    struct stat status;
    char path[PATH_MAX];
    if (log_fd < 0 || (fstat(log_fd, &status) == 0 && status.st_dev == log_device && status.st_ino == log_inode))
        return;
    snprintf(path, sizeof path, "%s/log", undo_path);
    log_fd = open_apart(path, 0);
    if (log_fd >= 0 && fstat(log_fd, &status) == 0 && status.st_dev == log_device && status.st_ino == log_inode &&
        bare(SYS_flock, log_fd, LOCK_EX | LOCK_NB) == 0 && bare(SYS_lseek, log_fd, (off_t)log_bytes, SEEK_SET) >= 0)
        return;
    if (log_fd >= 0)
        bare(SYS_close, log_fd);
    give_up();
}

/* Rewrites the log without records of changes that have become durable. Called with the lock held. */
static void compact(void)
{
    struct object *objects = calloc(MAX_OBJECTS, sizeof *objects);
    struct record record;
    char fresh_path[PATH_MAX], path[PATH_MAX];
    if (!objects)
        return;
    size_t count = synced_objects(objects);
    find_pending(objects, count);
    struct record barrier = journal_barrier(objects, count);
    snprintf(fresh_path, sizeof fresh_path, "%s/log.new", undo_path);
    snprintf(path, sizeof path, "%s/log", undo_path);
    int fresh = open_apart(fresh_path, O_CREAT | O_TRUNC);
    uint64_t kept_bytes = sizeof barrier;
    int failed = fresh < 0;
    if (!failed) {
        share(fresh);
        bare(SYS_flock, fresh, LOCK_EX | LOCK_NB);
        reserve(fresh);
        failed = write_all(fresh, &barrier, sizeof barrier);
    }
    for (uint64_t offset = 0; !failed && record_at(offset, &record); offset += size_of(&record)) {
        if (is_durable(objects, count, &record))
            continue;
        failed = copy_bytes(log_fd, offset, size_of(&record), fresh);
        kept_bytes += size_of(&record);
    }
    free(objects);
    if (failed || bare(SYS_renameat2, AT_FDCWD, fresh_path, AT_FDCWD, path, 0) != 0) {
        if (fresh >= 0)
            bare(SYS_close, fresh);
        give_up();
        return;
    }
    bare(SYS_close, log_fd);
    log_fd = fresh;
    if (know(fresh) != 0)
        give_up();
    log_bytes = kept_bytes;
    limit_bytes = 2 * kept_bytes > FIRST_LIMIT_BYTES ? 2 * kept_bytes : FIRST_LIMIT_BYTES;
}

/* Takes the lock; 0 if no log is kept. Two cases would deadlock and are excluded: a process that was forked while
 * another thread held the lock, and a signal handler in the thread that holds it. */
static int locked(void)
{
    if (!undo_is_on())
        return 0;
    if (keeper != (pid_t)bare(SYS_getpid)) {
        give_up();
        return 0;
    }
    uint64_t every = ~0ull, before;
    bare(SYS_rt_sigprocmask, SIG_SETMASK, &every, &before, sizeof before);
    pthread_mutex_lock(&lock);
    mask = before;
    find_again();
    return 1;
}

static void unlock(void)
{
    uint64_t before = mask;
    pthread_mutex_unlock(&lock);
    bare(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
}

/* Appends the old bytes of a record, from the file at `path`, or from that of `data_fd` if it is not -1. */
static int append_data(const struct record *record, const char *path, int data_fd)
{
    char link[40];
    int flags = data_fd < 0 ? O_WRONLY : (int)bare(SYS_fcntl, data_fd, F_GETFL);
    off_t end = (off_t)(log_bytes + sizeof *record + record->path_bytes + record->other_bytes);
    if ((flags & O_ACCMODE) == O_RDWR && !(flags & O_DIRECT))
        return copy_bytes(data_fd, record->offset, record->data_bytes, log_fd);
    if ((flags & O_ACCMODE) == O_RDWR && copy_direct(data_fd, record->offset, record->data_bytes, log_fd) == 0)
        return 0;
    /* The remains of a direct copy are overwritten, not truncated: that would also release the reserved space. */
    if (bare(SYS_lseek, log_fd, end, SEEK_SET) != end)
        return -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", data_fd);
    return copy_by_another(data_fd < 0 ? path : link, record->offset, record->data_bytes, log_fd);
}

/* Appends a record and the old bytes, read through `data_fd`. Called with the lock held. */
static void append(struct record *record, const char *path, const char *other, int data_fd)
{
    if (log_fd < 0)
        return;
    record->magic = RECORD_MAGIC;
    record->path_bytes = (uint32_t)strlen(path);
    record->other_bytes = (uint32_t)strlen(other);
    if (log_bytes + size_of(record) > MAX_LOG_BYTES || write_all(log_fd, record, sizeof *record) ||
        write_all(log_fd, path, record->path_bytes) || write_all(log_fd, other, record->other_bytes) ||
        (record->data_bytes && append_data(record, path, data_fd))) {
        give_up();
        return;
    }
    log_bytes += size_of(record);
    if (record->kind != SYNCED)
        COUNT_PROGRAM(recorded);
    if (log_bytes > limit_bytes)
        compact();
}

__attribute__((constructor(102))) static void undo_open(void)
{
    const char *directory = getenv("SPLITBRAIN_FAULTS_UNDO");
    char path[PATH_MAX];
    struct stat status;
    struct record record;
    if (!directory || !control_root() || snprintf(undo_path, sizeof undo_path, "%s", directory) >= (int)sizeof undo_path)
        return;
    snprintf(path, sizeof path, "%s/log", undo_path);
    log_fd = open_apart(path, O_CREAT);
    share(log_fd);
    if (log_fd < 0 || fstat(log_fd, &status) != 0) {
        give_up();
        return;
    }
    if (bare(SYS_flock, log_fd, LOCK_EX | LOCK_NB) != 0)
        return;
    keeper = (pid_t)bare(SYS_getpid);
    log_bytes = (uint64_t)status.st_size;
    uint64_t offset = 0;
    for (; record_at(offset, &record); offset += size_of(&record))
        if (record.seq >= next_seq)
            next_seq = record.seq + 1;
    log_bytes = offset;  /* without a torn record */
    if (bare(SYS_ftruncate, log_fd, offset) != 0 || bare(SYS_lseek, log_fd, offset, SEEK_SET) < 0 ||
        know(log_fd) != 0)
        give_up();
    else
        reserve(log_fd);
}

int undo_is_on(void)
{
    return log_fd >= 0;
}

static int parent_of(const char *path, struct stat *status)
{
    char directory[PATH_MAX];
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (!slash)
        return -1;
    *slash = 0;
    return stat(directory[0] ? directory : "/", status);
}

/* Before a change of the file at `path`, which the program has open as `fd` (-1: not open). */
static void before_change(const char *path, int fd, const struct stat *status, off_t offset, uint64_t length,
                          int is_truncate)
{
    uint64_t begin = (uint64_t)offset, size = (uint64_t)status->st_size;
    uint64_t end = is_truncate || begin + length > size ? size : begin + length;
    struct record record = {
        .kind = is_truncate ? TRUNCATED : CHANGED,
        .dev = status->st_dev,
        .ino = status->st_ino,
        .own_ino = status->st_ino,
        .offset = begin,
        .length = is_truncate ? 0 : length,
        .old_size = size,
        .data_bytes = end > begin ? end - begin : 0,
    };
    if (locked()) {
        record.seq = next_seq++;
        append(&record, path, "", fd);
        unlock();
    }
}

void undo_before_write(int fd, off_t offset, uint64_t length, int is_truncate)
{
    struct stat status;
    char link[40], path[PATH_MAX];
    int saved = errno;
    if (!undo_is_on() || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode))
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t path_bytes = readlink(link, path, sizeof path - 1);
    path[path_bytes > 0 ? path_bytes : 0] = 0;
    before_change(path, fd, &status, offset, length, is_truncate);
    errno = saved;
}

void undo_before_truncate(const char *path, off_t length)
{
    struct stat status;
    int saved = errno;
    if (undo_is_on() && stat(path, &status) == 0 && S_ISREG(status.st_mode))
        before_change(path, -1, &status, length, 0, 1);
    errno = saved;
}

void undo_before_write_through(int fd, off_t offset, struct undo_through *through)
{
    struct stat status;
    int saved = errno;
    if (undo_is_on() && fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && locked()) {
        *through = (struct undo_through){.dev = status.st_dev,
                                         .ino = status.st_ino,
                                         .offset = (uint64_t)offset,
                                         .old_size = (uint64_t)status.st_size};
        through->seq = next_seq++;
        unlock();
    }
    errno = saved;
}

void undo_after_write_through(const struct undo_through *through, uint64_t length)
{
    int saved = errno;
    if (through->seq && length && locked()) {
        struct record record = {
            .kind = WRITTEN_THROUGH,
            .seq = through->seq,
            .dev = through->dev,
            .ino = through->ino,
            .own_ino = through->ino,
            .offset = through->offset,
            .length = length,
            .old_size = through->old_size,
        };
        append(&record, "", "", -1);
        unlock();
    }
    errno = saved;
}

uint64_t undo_before_sync(void)
{
    if (!locked())
        return 0;
    uint64_t begun = next_seq;
    unlock();
    return begun;
}

void undo_after_sync(const struct stat *status, uint64_t begun)
{
    int saved = errno;
    if (begun && locked()) {
        struct record record = {.kind = SYNCED, .seq = begun};  /* of everything */
        if (status)
            record.dev = status->st_dev, record.ino = status->st_ino;
        append(&record, "", "", -1);
        unlock();
    }
    errno = saved;
}

void undo_lost_sight(void)
{
    int saved = errno;
    if (locked()) {
        give_up();
        unlock();
    }
    errno = saved;
}

void undo_after_create(const char *path, int is_new)
{
    struct stat own, parent;
    int saved = errno;
    if (undo_is_on() && lstat(path, &own) == 0 && parent_of(path, &parent) == 0 && locked()) {
        struct record record = {
            .kind = CREATED, .dev = parent.st_dev, .ino = parent.st_ino, .own_ino = is_new ? own.st_ino : 0};
        record.seq = next_seq++;
        append(&record, path, "", -1);
        unlock();
    }
    errno = saved;
}

/* Keeps the file at `path` under another name until its removal is durable. Called with the lock held. */
static void keep(const char *path, uint64_t seq)
{
    char kept[PATH_MAX];
    kept_name(seq, kept);
    if (bare(SYS_linkat, AT_FDCWD, path, AT_FDCWD, kept, 0) != 0 && errno != EEXIST)
        give_up();
}

void undo_before_unlink(const char *path)
{
    struct stat own, parent;
    int saved = errno;
    /* For a directory it fails; some programs try unlink before rmdir. */
    if (undo_is_on() && lstat(path, &own) == 0 && !S_ISDIR(own.st_mode) && parent_of(path, &parent) == 0 && locked()) {
        struct record record = {
            .kind = UNLINKED, .dev = parent.st_dev, .ino = parent.st_ino, .own_ino = own.st_ino};
        record.seq = next_seq++;
        keep(path, record.seq);
        append(&record, path, "", -1);
        unlock();
    }
    errno = saved;
}

void undo_before_rename(const char *from, const char *to)
{
    struct stat own, parent, replaced;
    int saved = errno;
    if (undo_is_on() && lstat(from, &own) == 0 && parent_of(to, &parent) == 0 && locked()) {
        struct record record = {
            .kind = RENAMED, .dev = parent.st_dev, .ino = parent.st_ino, .own_ino = own.st_ino};
        record.seq = next_seq++;
        if (lstat(to, &replaced) == 0 && S_ISREG(replaced.st_mode))
            keep(to, record.seq);
        append(&record, from, to, -1);
        unlock();
    }
    errno = saved;
}
