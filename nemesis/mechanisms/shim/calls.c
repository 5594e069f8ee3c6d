/* System calls that a program makes by number: syscall(SYS_fsync, fd).
 *
 * Calls for which the shim has a function are passed to it, so that a program may mix names and numbers: an account
 * that saw its writes but not its syncs would undo durable data. A program's own system call instructions are not seen.
 */
#define _GNU_SOURCE
#include "clock.h"
#include "control.h"
#include "undo.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Newer than the oldest C library that this is built for. */
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t length, unsigned flags);
int open_how(int directory_fd, const char *path, const void *how, size_t size) __asm__("openat2");
ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags);
ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags);

struct arguments {
    long a, b, c, d, e, f;
};

/* The maximum number of arguments; those that a call does not have are undefined values, as in the C library. */
#define ARGUMENTS(number)                                                     \
    struct arguments given;                                                   \
    va_list rest;                                                             \
    va_start(rest, number);                                                   \
    given.a = va_arg(rest, long);                                             \
    given.b = va_arg(rest, long);                                             \
    given.c = va_arg(rest, long);                                             \
    given.d = va_arg(rest, long);                                             \
    given.e = va_arg(rest, long);                                             \
    given.f = va_arg(rest, long);                                             \
    va_end(rest);

static long (*real_syscall)(long, ...);

/* Looked up early: older C libraries allocate memory for a symbol lookup, and if the caller is the allocator, it would
 * deadlock with itself. Calls before this go to the kernel directly. */
__attribute__((constructor(101))) static void calls_open(void)
{
    real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
}

/* The system call instruction; on processors for which the shim is not prebuilt, the C library's function. */
static long made(long number, const struct arguments *given)
{
#if defined __x86_64__
    long result;
    register long d __asm__("r10") = given->d, e __asm__("r8") = given->e, f __asm__("r9") = given->f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(given->a), "S"(given->b), "d"(given->c), "r"(d), "r"(e), "r"(f)
                     : "rcx", "r11", "memory");
#elif defined __aarch64__
    register long asked __asm__("x8") = number, result __asm__("x0") = given->a, b __asm__("x1") = given->b;
    register long c __asm__("x2") = given->c, d __asm__("x3") = given->d;
    register long e __asm__("x4") = given->e, f __asm__("x5") = given->f;
    __asm__ volatile("svc #0" : "+r"(result) : "r"(asked), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f) : "memory");
#else
    if (!real_syscall)
        calls_open();
    return real_syscall(number, given->a, given->b, given->c, given->d, given->e, given->f);
#endif
#if defined __x86_64__ || defined __aarch64__
    if (result >= 0 || result < -4095)
        return result;
    errno = (int)-result;
    return -1;
#endif
}

static long passed_on(long number, const struct arguments *given)
{
    if (!real_syscall)
        return made(number, given);
    return real_syscall(number, given->a, given->b, given->c, given->d, given->e, given->f);
}

long bare(long number, ...)
{
    ARGUMENTS(number)
    return made(number, &given);
}

#define FD(argument) ((int)given->argument)
#define PATH(argument) ((const char *)given->argument)
#define TIME(argument) ((const struct timespec *)given->argument)
#define CALL(name, ...)                                                       \
    case SYS_##name:                                                          \
        *result = name(__VA_ARGS__);                                          \
        return 1

/* Older calls that newer architectures do not have. */
static int by_older_name(long number, const struct arguments *given, long *result)
{
    switch (number) {
#ifdef SYS_open
        CALL(open, PATH(a), FD(b), (mode_t)given->c);
        CALL(creat, PATH(a), (mode_t)given->b);
        CALL(rename, PATH(a), PATH(b));
        CALL(link, PATH(a), PATH(b));
        CALL(symlink, PATH(a), PATH(b));
        CALL(unlink, PATH(a));
        CALL(mkdir, PATH(a), (mode_t)given->b);
        CALL(rmdir, PATH(a));
#endif
#ifdef SYS_renameat
        CALL(renameat, FD(a), PATH(b), FD(c), PATH(d));
#endif
    }
    return 0;
}

static int by_name(long number, const struct arguments *given, long *result)
{
    switch (number) {
        CALL(linkat, FD(a), PATH(b), FD(c), PATH(d), FD(e));
        CALL(symlinkat, PATH(a), FD(b), PATH(c));
        CALL(unlinkat, FD(a), PATH(b), FD(c));
        CALL(mkdirat, FD(a), PATH(b), (mode_t)given->c);
        CALL(truncate, PATH(a), given->b);
        CALL(openat, FD(a), PATH(b), FD(c), (mode_t)given->d);
#ifdef SYS_openat2
    case SYS_openat2:
        *result = open_how(FD(a), PATH(b), (const void *)given->c, (size_t)given->d);
        return 1;
#endif
    case SYS_renameat2:
        *result = renameat2(FD(a), PATH(b), FD(c), PATH(d), (unsigned)given->e);
        return 1;
    }
    return by_older_name(number, given, result);
}

static int by_descriptor(long number, const struct arguments *given, long *result)
{
    switch (number) {
        CALL(read, FD(a), (void *)given->b, (size_t)given->c);
        CALL(write, FD(a), (const void *)given->b, (size_t)given->c);
        CALL(pread64, FD(a), (void *)given->b, (size_t)given->c, given->d);
        CALL(pwrite64, FD(a), (const void *)given->b, (size_t)given->c, given->d);
        CALL(readv, FD(a), (const struct iovec *)given->b, FD(c));
        CALL(writev, FD(a), (const struct iovec *)given->b, FD(c));
        CALL(preadv, FD(a), (const struct iovec *)given->b, FD(c), given->d);
        CALL(pwritev, FD(a), (const struct iovec *)given->b, FD(c), given->d);
        CALL(sendfile, FD(a), FD(b), (off_t *)given->c, (size_t)given->d);
        CALL(splice, FD(a), (off64_t *)given->b, FD(c), (off64_t *)given->d, (size_t)given->e, (unsigned)given->f);
        CALL(fsync, FD(a));
        CALL(fdatasync, FD(a));
        CALL(syncfs, FD(a));
        CALL(msync, (void *)given->a, (size_t)given->b, FD(c));
        CALL(ftruncate, FD(a), given->b);
        CALL(fallocate, FD(a), FD(b), given->c, given->d);
#ifdef SYS_sync_file_range
        CALL(sync_file_range, FD(a), given->b, given->c, (unsigned)given->d);
#endif
#ifdef SYS_copy_file_range
    case SYS_copy_file_range:
        *result = copy_file_range(FD(a), (off64_t *)given->b, FD(c), (off64_t *)given->d, (size_t)given->e,
                                  (unsigned)given->f);
        return 1;
#endif
#ifdef SYS_preadv2
        CALL(preadv2, FD(a), (const struct iovec *)given->b, FD(c), given->d, FD(f));
        CALL(pwritev2, FD(a), (const struct iovec *)given->b, FD(c), given->d, FD(f));
#endif
    case SYS_sync:
        sync();
        *result = 0;
        return 1;
    }
    return 0;
}

/* Clock reads, and waits until a deadline. For futexes, only the operation that Rust and C++ libraries wait with. */
static int by_clock(long number, const struct arguments *given, long *result)
{
    struct arguments moved = *given;
    struct timespec until;
    clockid_t id;
    int error;
    switch (number) {
        CALL(clock_gettime, (clockid_t)given->a, (struct timespec *)given->b);
        CALL(gettimeofday, (struct timeval *)given->a, (void *)given->b);
#ifdef SYS_time
        CALL(time, (time_t *)given->a);
#endif
    case SYS_timerfd_settime:
        *result = timerfd_settime(FD(a), FD(b), (const struct itimerspec *)given->c, (struct itimerspec *)given->d);
        return 1;
    case SYS_clock_nanosleep:
        error = clock_nanosleep((clockid_t)given->a, FD(b), TIME(c), (struct timespec *)given->d);
        errno = error ? error : errno;
        *result = error ? -1 : 0;
        return 1;
    case SYS_futex:
        if ((FD(b) & FUTEX_CMD_MASK) != FUTEX_WAIT_BITSET)
            return 0;
        id = FD(b) & FUTEX_CLOCK_REALTIME ? CLOCK_REALTIME : CLOCK_MONOTONIC;
        moved.d = (long)clock_true_deadline(id, TIME(d), &until);
        *result = passed_on(number, &moved);
        return 1;
    }
    return 0;
}

long syscall(long number, ...)
{
    long result;
    ARGUMENTS(number)
    if ((control_has_clock() && by_clock(number, &given, &result)) ||
        ((control_has_disk() || undo_is_on()) &&
         (by_descriptor(number, &given, &result) || by_name(number, &given, &result))))
        return result;
    return passed_on(number, &given);
}
