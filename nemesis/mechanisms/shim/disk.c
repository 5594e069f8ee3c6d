/* Disks that are slow, stuck, full or broken: the library's file calls as a program sees them.
 *
 * A fault affects calls on files under the root (see control.h) and nothing else. A call that has to wait sleeps here,
 * in the thread that made it, and can be killed; a call that fails has changed nothing. Programs that make system calls
 * without the library are not reached, so proofs check whether a program has mapped this shim.
 */
#define _GNU_SOURCE
#include "control.h"
#include "undo.h"

#include <aio.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define WAIT_NS 2000000l
#ifndef RWF_DSYNC
#define RWF_DSYNC 0x2
#define RWF_SYNC 0x4
#define RWF_APPEND 0x10
#endif
#ifndef FALLOC_FL_COLLAPSE_RANGE
#define FALLOC_FL_COLLAPSE_RANGE 0x08
#endif
#ifndef FALLOC_FL_INSERT_RANGE
#define FALLOC_FL_INSERT_RANGE 0x20
#endif
#ifndef RWF_NOAPPEND
#define RWF_NOAPPEND 0x20
#endif
#define REAL(name)                                                            \
    static __typeof__(&name) real;                                            \
    if (!real)                                                                \
    real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

enum operation { WRITE, GROW, SYNC, READ };

static int is_under_root(const char *path)
{
    const char *root = control_root();
    if (!root)
        return 0;
    size_t length = strlen(root);
    return strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int concerns_fd(int fd)
{
    char link[40], path[PATH_MAX];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length <= 0)
        return 0;
    path[length] = 0;
    return is_under_root(path);
}

/* The path of the file under the root that is mapped at an address, into `out`; 0 when there is none. */
static int mapped_at(const void *address, char out[PATH_MAX])
{
    int saved = errno, result = 0;
    char *line = NULL, *rest;
    size_t size = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && !result && getline(&line, &size, maps) > 0) {
        uintptr_t begin = strtoul(line, &rest, 16), end = strtoul(rest + 1, &rest, 16);
        if (begin > (uintptr_t)address)
            break;
        char *path = strchr(rest, '/');
        if ((uintptr_t)address >= end || !path)
            continue;
        path[strcspn(path, "\n")] = 0;
        result = is_under_root(path) && snprintf(out, PATH_MAX, "%s", path) < PATH_MAX;
    }
    free(line);
    if (maps)
        fclose(maps);
    errno = saved;
    return result;
}

/* The path with its directory resolved, into `out`; 0 when it is not under the root. */
static int concerns_path(int directory_fd, const char *path, char out[PATH_MAX])
{
    char joined[PATH_MAX], parent[PATH_MAX];
    int saved = errno, result = 0;
    if (path[0] == '/' || directory_fd == AT_FDCWD) {
        if (snprintf(joined, sizeof joined, "%s", path) >= (int)sizeof joined)
            return 0;
    } else {
        char link[40], base[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory_fd);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length <= 0)
            goto done;
        base[length] = 0;
        if (snprintf(joined, sizeof joined, "%s/%s", base, path) >= (int)sizeof joined)
            goto done;
    }
    char *slash = strrchr(joined, '/');
    const char *name = slash ? slash + 1 : joined;
    const char *directory = slash == joined ? "/" : slash ? joined : ".";
    if (slash)
        *slash = 0;
    if (!realpath(directory, parent))
        goto done;
    if (snprintf(out, PATH_MAX, "%s/%s", strcmp(parent, "/") ? parent : "", name) >= PATH_MAX)
        goto done;
    result = is_under_root(out);
done:
    errno = saved;
    return result;
}

#define COUNT_MET(field)                                                      \
    do {                                                                      \
        COUNT(field);                                                         \
        COUNT_PROGRAM(field);                                                 \
    } while (0)

static void count_call(enum operation operation)
{
    if (operation == SYNC)
        COUNT_PROGRAM(syncs);
    else if (operation == GROW)
        COUNT_PROGRAM(grows);
    else if (operation == WRITE)
        COUNT_PROGRAM(writes);
    else
        COUNT_PROGRAM(reads);
}

/* The count by kind of call comes first: a reader who sees the total also finds its part. */
static void count_failure(enum operation operation)
{
    if (operation == SYNC)
        COUNT_PROGRAM(failed_syncs);
    else if (operation == READ)
        COUNT_PROGRAM(failed_reads);
    else
        COUNT_PROGRAM(failed_writes);
    COUNT_MET(failed);
}

/* Waits while a fault stalls or delays the operation. Returns 0, or -1 with errno if a fault makes it fail. */
static int gate(enum operation operation)
{
    struct settings settings;
    const struct timespec pause = {0, WAIT_NS};
    int was_held = 0, saved = errno;
    count_call(operation);  /* first: a call that is counted meets every fault that was in force before */
    for (;;) {
        if (!control_has_disk() || !control_read(&settings))
            return 0;
        if (!(settings.stall_all && operation != READ) && !(settings.stall_sync && operation == SYNC))
            break;
        if (!was_held && operation == SYNC)
            COUNT_PROGRAM(held_syncs);
        if (!was_held)
            COUNT_MET(held);
        was_held = 1;
        bare(SYS_nanosleep, &pause, NULL);
    }
    if (settings.delay_ns > 0 && operation != READ) {
        struct timespec delay = {settings.delay_ns / 1000000000, settings.delay_ns % 1000000000};
        COUNT_MET(delayed);
        while (bare(SYS_nanosleep, &delay, &delay) != 0 && errno == EINTR)
            ;
    }
    if (settings.full && operation == GROW) {
        COUNT_PROGRAM(refused_grows);
        COUNT_MET(refused);
        errno = ENOSPC;
        return -1;
    }
    if ((settings.error_write && (operation == WRITE || operation == GROW)) ||
        (settings.error_sync && operation == SYNC) || (settings.error_read && operation == READ)) {
        count_failure(operation);
        errno = EIO;
        return -1;
    }
    errno = saved;
    return 0;
}

static int is_watched(void)
{
    return control_has_disk() || undo_is_on();
}

/* Counts an error of the disk itself like an injected one. */
static void count_refusal(void)
{
    if (errno == ENOSPC)
        COUNT_MET(refused);
    else if (errno == EIO || errno == EROFS)
        COUNT_MET(failed);
}

static ssize_t answered(int fd, ssize_t result)
{
    if (result < 0 && (errno == ENOSPC || errno == EIO || errno == EROFS) && control_has_disk() && concerns_fd(fd))
        count_refusal();
    return result;
}

/* Everything that precedes a write of `length` bytes; offset -1 is the descriptor's position. `flags` are those of
 * pwritev2. `through` receives what `wrote` needs afterwards. */
static int before_write_with(int fd, off_t offset, uint64_t length, int flags, struct undo_through *through)
{
    struct stat status;
    through->seq = 0;
    if (!is_watched() || !concerns_fd(fd) || fstat(fd, &status) != 0)
        return 0;
    int opened_as = (int)bare(SYS_fcntl, fd, F_GETFL);
    if (opened_as < 0)
        opened_as = 0;
    if ((flags & RWF_APPEND) || ((opened_as & O_APPEND) && !(flags & RWF_NOAPPEND)))
        offset = status.st_size;  /* whatever the offset of a pwrite */
    else if (offset < 0)
        offset = (off_t)bare(SYS_lseek, fd, 0, SEEK_CUR);
    if (gate(offset + (off_t)length > status.st_size ? GROW : WRITE) != 0)
        return -1;
    if ((opened_as & O_DSYNC) || (flags & (RWF_DSYNC | RWF_SYNC)))  /* O_SYNC has the bit of O_DSYNC */
        undo_before_write_through(fd, offset, through);
    else
        undo_before_write(fd, offset, length, 0);
    return 0;
}

static int before_write(int fd, off_t offset, uint64_t length, struct undo_through *through)
{
    return before_write_with(fd, offset, length, 0, through);
}

/* Everything that follows a write with this result. */
static ssize_t wrote(int fd, const struct undo_through *through, ssize_t result)
{
    if (result > 0)
        undo_after_write_through(through, (uint64_t)result);
    return answered(fd, result);
}

static uint64_t total(const struct iovec *pieces, int count)
{
    uint64_t sum = 0;
    for (int i = 0; i < count; i++)
        sum += pieces[i].iov_len;
    return sum;
}

ssize_t write(int fd, const void *data, size_t length)
{
    REAL(write);
    struct undo_through through;
    return before_write(fd, -1, length, &through) ? -1 : wrote(fd, &through, real(fd, data, length));
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    REAL(pwrite);
    struct undo_through through;
    return before_write(fd, offset, length, &through) ? -1 : wrote(fd, &through, real(fd, data, length, offset));
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset)
{
    REAL(pwrite64);
    struct undo_through through;
    return before_write(fd, offset, length, &through) ? -1 : wrote(fd, &through, real(fd, data, length, offset));
}

ssize_t writev(int fd, const struct iovec *pieces, int count)
{
    REAL(writev);
    struct undo_through through;
    return before_write(fd, -1, total(pieces, count), &through) ? -1 : wrote(fd, &through, real(fd, pieces, count));
}

ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset)
{
    REAL(pwritev);
    struct undo_through through;
    if (before_write(fd, offset, total(pieces, count), &through))
        return -1;
    return wrote(fd, &through, real(fd, pieces, count, offset));
}

ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t offset)
{
    REAL(pwritev64);
    struct undo_through through;
    if (before_write(fd, offset, total(pieces, count), &through))
        return -1;
    return wrote(fd, &through, real(fd, pieces, count, offset));
}

ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    struct undo_through through;
    if (before_write_with(fd, offset, total(pieces, count), flags, &through))
        return -1;
    return wrote(fd, &through, bare(SYS_pwritev2, fd, pieces, (long)count, offset, 0l, (long)flags));
}

ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off64_t offset, int flags)
{
    return pwritev2(fd, pieces, count, offset, flags);
}

static int before_read(int fd)
{
    return control_has_disk() && concerns_fd(fd) ? gate(READ) : 0;
}

/* After a read from `offset` (-1: the descriptor's previous position): counts it if it includes a flipped byte. */
static ssize_t has_read(int fd, off_t offset, ssize_t result)
{
    struct settings settings;
    struct stat status;
    int saved = errno;
    if (result > 0 && control_has_disk() && control_read(&settings) && settings.flipped_inode &&
        fstat(fd, &status) == 0 && (uint64_t)status.st_ino == settings.flipped_inode && concerns_fd(fd)) {
        if (offset < 0)
            offset = (off_t)bare(SYS_lseek, fd, 0, SEEK_CUR) - result;
        if (settings.flipped_offset >= offset && settings.flipped_offset < offset + result)
            COUNT_PROGRAM(flipped_reads);
    }
    errno = saved;
    return answered(fd, result);
}

ssize_t read(int fd, void *data, size_t length)
{
    REAL(read);
    return before_read(fd) ? -1 : has_read(fd, -1, real(fd, data, length));
}

ssize_t pread(int fd, void *data, size_t length, off_t offset)
{
    REAL(pread);
    return before_read(fd) ? -1 : has_read(fd, offset, real(fd, data, length, offset));
}

ssize_t pread64(int fd, void *data, size_t length, off64_t offset)
{
    REAL(pread64);
    return before_read(fd) ? -1 : has_read(fd, offset, real(fd, data, length, offset));
}

/* The compiler replaces the calls with these under _FORTIFY_SOURCE, which distributions build with; the C library
 * aborts a program that reads more than its buffer holds. */
ssize_t __read_chk(int fd, void *data, size_t length, size_t size);
ssize_t __pread_chk(int fd, void *data, size_t length, off_t offset, size_t size);
ssize_t __pread64_chk(int fd, void *data, size_t length, off64_t offset, size_t size);

ssize_t __read_chk(int fd, void *data, size_t length, size_t size)
{
    REAL(__read_chk);
    return before_read(fd) ? -1 : has_read(fd, -1, real(fd, data, length, size));
}

ssize_t __pread_chk(int fd, void *data, size_t length, off_t offset, size_t size)
{
    REAL(__pread_chk);
    return before_read(fd) ? -1 : has_read(fd, offset, real(fd, data, length, offset, size));
}

ssize_t __pread64_chk(int fd, void *data, size_t length, off64_t offset, size_t size)
{
    REAL(__pread64_chk);
    return before_read(fd) ? -1 : has_read(fd, offset, real(fd, data, length, offset, size));
}

ssize_t readv(int fd, const struct iovec *pieces, int count)
{
    REAL(readv);
    return before_read(fd) ? -1 : has_read(fd, -1, real(fd, pieces, count));
}

ssize_t preadv(int fd, const struct iovec *pieces, int count, off_t offset)
{
    REAL(preadv);
    return before_read(fd) ? -1 : has_read(fd, offset, real(fd, pieces, count, offset));
}

ssize_t preadv64(int fd, const struct iovec *pieces, int count, off64_t offset)
{
    return preadv(fd, pieces, count, offset);
}

ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    if (before_read(fd))
        return -1;
    return has_read(fd, offset, bare(SYS_preadv2, fd, pieces, (long)count, offset, 0l, (long)flags));
}

ssize_t preadv64v2(int fd, const struct iovec *pieces, int count, off64_t offset, int flags)
{
    return preadv2(fd, pieces, count, offset, flags);
}

/* Everything that precedes a copy of at most `length` bytes from one descriptor to another; either may refer to a file
 * under the root. A NULL offset is the descriptor's position. */
static int before_copy(int in, const off_t *in_offset, int out, const off_t *out_offset, uint64_t length,
                       struct undo_through *through)
{
    struct stat status;
    through->seq = 0;
    if (!is_watched())
        return 0;
    if (fstat(in, &status) == 0 && S_ISREG(status.st_mode)) {
        off_t left = status.st_size - (in_offset ? *in_offset : (off_t)bare(SYS_lseek, in, 0, SEEK_CUR));
        if (left < 0 || length > (uint64_t)left)
            length = left < 0 ? 0 : (uint64_t)left;
    }
    return before_read(in) || before_write(out, out_offset ? *out_offset : -1, length, through) ? -1 : 0;
}

ssize_t sendfile(int out, int in, off_t *offset, size_t length)
{
    off_t from = offset ? *offset : -1;
    struct undo_through through;
    if (before_copy(in, offset, out, NULL, length, &through))
        return -1;
    return has_read(in, from, wrote(out, &through, bare(SYS_sendfile, out, in, offset, length)));
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t length)
{
    return sendfile(out, in, offset, length);
}

ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t length, unsigned flags)
{
    off_t from = in_offset ? *in_offset : -1;
    struct undo_through through;
    if (before_copy(in, in_offset, out, out_offset, length, &through))
        return -1;
    ssize_t result = bare(SYS_copy_file_range, in, in_offset, out, out_offset, length, (long)flags);
    return has_read(in, from, wrote(out, &through, result));
}

ssize_t splice(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t length, unsigned flags)
{
    off_t from = in_offset ? *in_offset : -1;
    struct undo_through through;
    if (before_copy(in, in_offset, out, out_offset, length, &through))
        return -1;
    ssize_t result = bare(SYS_splice, in, in_offset, out, out_offset, length, (long)flags);
    return has_read(in, from, wrote(out, &through, result));
}

static int synced(int fd, int (*real)(int))
{
    if (!is_watched() || !concerns_fd(fd))
        return real(fd);
    if (gate(SYNC) != 0)
        return -1;
    struct stat status;
    uint64_t begun = undo_before_sync();
    int result = real(fd);
    if (result == 0 && fstat(fd, &status) == 0)
        undo_after_sync(&status, begun);
    return (int)answered(fd, result);
}

int fsync(int fd)
{
    REAL(fsync);
    return synced(fd, real);
}

int fdatasync(int fd)
{
    REAL(fdatasync);
    return synced(fd, real);
}

/* Any descriptor on the root's file system will do; everything below the root is taken to be on that file system. */
int syncfs(int fd)
{
    REAL(syncfs);
    struct stat given, own;
    const char *root = control_root();
    if (!root || !is_watched() ||
        (!concerns_fd(fd) && (fstat(fd, &given) != 0 || stat(root, &own) != 0 || given.st_dev != own.st_dev)))
        return real(fd);
    if (gate(SYNC) != 0)
        return -1;
    uint64_t begun = undo_before_sync();
    int result = real(fd);
    if (result == 0)
        undo_after_sync(NULL, begun);
    if (result < 0 && control_has_disk())
        count_refusal();
    return result;
}

/* The shim does not learn when an asynchronous sync is done, or whether it succeeded. */
static int synced_later(int operation, struct aiocb *asked, int (*real)(int, struct aiocb *))
{
    if (undo_is_on() && concerns_fd(asked->aio_fildes))
        undo_lost_sight();
    return real(operation, asked);
}

int aio_fsync(int operation, struct aiocb *asked)
{
    REAL(aio_fsync);
    return synced_later(operation, asked, real);
}

int aio_fsync64(int operation, struct aiocb64 *asked)
{
    REAL(aio_fsync64);
    return synced_later(operation, (struct aiocb *)asked, (int (*)(int, struct aiocb *))real);
}

/* Makes neither lengths nor names durable, so it is not a sync for the account. */
int sync_file_range(int fd, off64_t offset, off64_t length, unsigned flags)
{
    REAL(sync_file_range);
    if (is_watched() && concerns_fd(fd) && gate(SYNC) != 0)
        return -1;
    return (int)answered(fd, real(fd, offset, length, flags));
}

/* Reports no errors: if a fault makes it fail, everything stays unsynced. */
void sync(void)
{
    int is_ours = control_root() && is_watched(), saved = errno;
    if (!is_ours || gate(SYNC) == 0) {
        uint64_t begun = undo_before_sync();
        bare(SYS_sync);
        if (is_ours)
            undo_after_sync(NULL, begun);
    }
    errno = saved;
}

/* Counts as a sync of the whole file, although the kernel promises less for data written elsewhere in it. */
int msync(void *address, size_t length, int flags)
{
    REAL(msync);
    char path[PATH_MAX];
    struct stat status;
    if (!(flags & MS_SYNC) || !is_watched() || !mapped_at(address, path))
        return real(address, length, flags);
    if (gate(SYNC) != 0)
        return -1;
    int saved = errno, has_name = stat(path, &status) == 0;
    errno = saved;
    uint64_t begun = undo_before_sync();
    int result = real(address, length, flags);
    if (result == 0 && has_name)
        undo_after_sync(&status, begun);
    if (result < 0 && control_has_disk())
        count_refusal();
    return result;
}

static int before_truncate(int fd, off_t length)
{
    struct stat status;
    if (!is_watched() || !concerns_fd(fd) || fstat(fd, &status) != 0)
        return 0;
    if (gate(length > status.st_size ? GROW : WRITE) != 0)
        return -1;
    undo_before_write(fd, length, 0, 1);
    return 0;
}

int ftruncate(int fd, off_t length)
{
    REAL(ftruncate);
    return before_truncate(fd, length) ? -1 : (int)answered(fd, real(fd, length));
}

int ftruncate64(int fd, off64_t length)
{
    REAL(ftruncate64);
    return before_truncate(fd, length) ? -1 : (int)answered(fd, real(fd, length));
}

int truncate(const char *path, off_t length)
{
    char resolved[PATH_MAX];
    struct stat status;
    int saved = errno, is_ours = is_watched() && concerns_path(AT_FDCWD, path, resolved) && stat(path, &status) == 0;
    errno = saved;
    if (is_ours) {
        if (gate(length > status.st_size ? GROW : WRITE) != 0)
            return -1;
        undo_before_truncate(resolved, length);
    }
    int result = (int)bare(SYS_truncate, path, length);
    if (result < 0 && is_ours && control_has_disk())
        count_refusal();
    return result;
}

int truncate64(const char *path, off64_t length)
{
    return truncate(path, length);
}

/* A range is removed from a file or inserted into it: the rest of the file moves and its length changes. Durable like a
 * truncation, whatever the descriptor's flags. */
static int before_shift(int fd, off_t offset, enum operation operation)
{
    if (!is_watched() || !concerns_fd(fd))
        return 0;
    if (gate(operation) != 0)
        return -1;
    undo_before_write(fd, offset, 0, 1);
    return 0;
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    REAL(fallocate);
    struct undo_through through;
    struct stat status;
    uint64_t changed = (uint64_t)length;
    off_t from = offset;
    if (mode & (FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE)) {
        if (before_shift(fd, offset, mode & FALLOC_FL_INSERT_RANGE ? GROW : WRITE))
            return -1;
        return (int)answered(fd, real(fd, mode, offset, length));
    }
    /* A hole needs no space, and its part beyond the end of the file changes nothing. */
    if ((mode & FALLOC_FL_PUNCH_HOLE) && is_watched() && fstat(fd, &status) == 0) {
        from = offset > status.st_size ? status.st_size : offset;
        changed = length > status.st_size - from ? (uint64_t)(status.st_size - from) : (uint64_t)length;
    }
    if (before_write_with(fd, from, changed, RWF_NOAPPEND, &through))
        return -1;
    int result = real(fd, mode, offset, length);
    if (result == 0)
        undo_after_write_through(&through, changed);
    return (int)answered(fd, result);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length)
{
    return fallocate(fd, mode, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    REAL(posix_fallocate);
    struct undo_through through;
    if (before_write_with(fd, offset, (uint64_t)length, RWF_NOAPPEND, &through))
        return errno;
    int result = real(fd, offset, length), saved = errno;
    if (result == 0)
        undo_after_write_through(&through, (uint64_t)length);
    errno = result;
    answered(fd, result ? -1 : 0);
    errno = saved;
    return result;
}

int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    return posix_fallocate(fd, offset, length);
}

/* The argument of openat2 (linux/openat2.h, which older build systems lack). */
struct how {
    uint64_t flags, mode, resolve;
};

/* Opens a file, which may create or truncate it. `how` is not NULL for openat2. */
static int opened_how(int directory_fd, const char *path, int flags, mode_t mode, const struct how *how, size_t size)
{
    char resolved[PATH_MAX];
    int is_ours = (flags & (O_CREAT | O_TRUNC)) && is_watched() && concerns_path(directory_fd, path, resolved);
    int is_new = 0, is_cut = 0;
    if (is_ours) {
        int saved = errno;
        is_new = bare(SYS_faccessat, AT_FDCWD, resolved, F_OK) != 0;
        is_cut = !is_new && (flags & O_TRUNC);
        errno = saved;
        if ((is_new || is_cut) && gate(is_new ? GROW : WRITE) != 0)
            return -1;
        if (is_cut)
            undo_before_truncate(resolved, 0);
    }
#ifdef SYS_openat2
    int fd = (int)(how ? bare(SYS_openat2, directory_fd, path, how, size)
                       : bare(SYS_openat, directory_fd, path, flags, mode));
#else
    int fd = (int)bare(SYS_openat, directory_fd, path, flags, mode);
#endif
    if (fd >= 0 && is_new)
        undo_after_create(resolved, 1);
    if (fd < 0 && is_ours && control_has_disk())
        count_refusal();
    return fd;
}

static int opened(int directory_fd, const char *path, int flags, mode_t mode)
{
    return opened_how(directory_fd, path, flags, mode, NULL, 0);
}

#ifdef SYS_openat2
/* Named differently in C: newer C libraries declare openat2 with a type that older ones lack. */
int open_how(int directory_fd, const char *path, const struct how *how, size_t size) __asm__("openat2");

int open_how(int directory_fd, const char *path, const struct how *how, size_t size)
{
    if (!how || size < sizeof *how)
        return (int)bare(SYS_openat2, directory_fd, path, how, size);
    return opened_how(directory_fd, path, (int)how->flags, (mode_t)how->mode, how, size);
}
#endif

#define OPEN_MODE(flags)                                                      \
    mode_t mode = 0;                                                          \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                  \
        va_list rest;                                                         \
        va_start(rest, flags);                                                \
        mode = va_arg(rest, mode_t);                                          \
        va_end(rest);                                                         \
    }

int open(const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

int openat(int directory_fd, const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return opened(directory_fd, path, flags, mode);
}

int openat64(int directory_fd, const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return opened(directory_fd, path, flags | O_LARGEFILE, mode);
}

/* The same under _FORTIFY_SOURCE, without a mode: the C library aborts a program that gives no mode for a file that may
 * have to be created. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int directory_fd, const char *path, int flags);
int __openat64_2(int directory_fd, const char *path, int flags);

static int needs_mode(int flags)
{
    return (flags & O_CREAT) || (flags & __O_TMPFILE) == __O_TMPFILE;
}

int __open_2(const char *path, int flags)
{
    REAL(__open_2);
    return needs_mode(flags) ? real(path, flags) : opened(AT_FDCWD, path, flags, 0);
}

int __open64_2(const char *path, int flags)
{
    REAL(__open64_2);
    return needs_mode(flags) ? real(path, flags) : opened(AT_FDCWD, path, flags | O_LARGEFILE, 0);
}

int __openat_2(int directory_fd, const char *path, int flags)
{
    REAL(__openat_2);
    return needs_mode(flags) ? real(directory_fd, path, flags) : opened(directory_fd, path, flags, 0);
}

int __openat64_2(int directory_fd, const char *path, int flags)
{
    REAL(__openat64_2);
    return needs_mode(flags) ? real(directory_fd, path, flags) : opened(directory_fd, path, flags | O_LARGEFILE, 0);
}

int creat(const char *path, mode_t mode)
{
    return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

int creat64(const char *path, mode_t mode)
{
    return creat(path, mode);
}

/* Files written through the C library's own buffers, which does not call our functions. They are counted, so that an
 * account can report what it may lack. C++ streams are opened by fopen as well, but written by write. */
static int writes_by_buffers(const char *mode, const void *caller)
{
    Dl_info found;
    if (!control_root() || !(mode[0] == 'w' || mode[0] == 'a' || memchr(mode, '+', strcspn(mode, ","))))
        return 0;
    return !(dladdr(caller, &found) && found.dli_fname && strstr(found.dli_fname, "libstdc++"));
}

static FILE *buffered(FILE *stream)
{
    int saved = errno;
    if (stream && concerns_fd(fileno(stream)))
        COUNT_PROGRAM(buffered);
    errno = saved;
    return stream;
}

#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))

FILE *fopen(const char *path, const char *mode)
{
    REAL(fopen);
    FILE *stream = real(path, mode);
    return writes_by_buffers(mode, CALLER) ? buffered(stream) : stream;
}

FILE *fopen64(const char *path, const char *mode)
{
    REAL(fopen64);
    FILE *stream = real(path, mode);
    return writes_by_buffers(mode, CALLER) ? buffered(stream) : stream;
}

FILE *freopen(const char *path, const char *mode, FILE *before)
{
    REAL(freopen);
    FILE *stream = real(path, mode, before);
    return writes_by_buffers(mode, CALLER) ? buffered(stream) : stream;
}

FILE *freopen64(const char *path, const char *mode, FILE *before)
{
    REAL(freopen64);
    FILE *stream = real(path, mode, before);
    return writes_by_buffers(mode, CALLER) ? buffered(stream) : stream;
}

FILE *fdopen(int fd, const char *mode)
{
    REAL(fdopen);
    FILE *stream = real(fd, mode);
    return writes_by_buffers(mode, CALLER) ? buffered(stream) : stream;
}

/* Before and after a call, other than an open, that creates a name. `resolved` is empty for names outside the root. */
static int before_name(int directory_fd, const char *path, char resolved[PATH_MAX])
{
    if (is_watched() && concerns_path(directory_fd, path, resolved))
        return gate(GROW);
    resolved[0] = 0;
    return 0;
}

static int has_name(int result, const char *resolved, int is_new)
{
    if (result == 0 && resolved[0])
        undo_after_create(resolved, is_new);
    if (result < 0 && resolved[0] && control_has_disk())
        count_refusal();
    return result;
}

int mkdirat(int directory_fd, const char *path, mode_t mode)
{
    char resolved[PATH_MAX];
    if (before_name(directory_fd, path, resolved))
        return -1;
    return has_name((int)bare(SYS_mkdirat, directory_fd, path, mode), resolved, 1);
}

int symlinkat(const char *target, int directory_fd, const char *path)
{
    char resolved[PATH_MAX];
    if (before_name(directory_fd, path, resolved))
        return -1;
    return has_name((int)bare(SYS_symlinkat, target, directory_fd, path), resolved, 1);
}

int symlink(const char *target, const char *path)
{
    return symlinkat(target, AT_FDCWD, path);
}

int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags)
{
    char resolved[PATH_MAX];
    if (before_name(to_fd, to, resolved))
        return -1;
    return has_name((int)bare(SYS_linkat, from_fd, from, to_fd, to, flags), resolved, 0);
}

int link(const char *from, const char *to)
{
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}

int unlinkat(int directory_fd, const char *path, int flags)
{
    char resolved[PATH_MAX];
    if (is_watched() && concerns_path(directory_fd, path, resolved)) {
        if (gate(WRITE) != 0)
            return -1;
        if (!(flags & AT_REMOVEDIR))
            undo_before_unlink(resolved);
    }
    return (int)bare(SYS_unlinkat, directory_fd, path, flags);
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    char old_path[PATH_MAX], new_path[PATH_MAX];
    if (is_watched() && concerns_path(from_fd, from, old_path) && concerns_path(to_fd, to, new_path)) {
        if (gate(WRITE) != 0)
            return -1;
        undo_before_rename(old_path, new_path);
    }
    return (int)bare(SYS_renameat2, from_fd, from, to_fd, to, (long)flags);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    return renameat2(from_fd, from, to_fd, to, 0);
}

int rename(const char *from, const char *to)
{
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
