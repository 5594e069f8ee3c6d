/* Waits until an absolute time, in programs whose clock is skewed.
 *
 * A program adds a duration to the time that its clock shows, and has the kernel wait until the sum. The kernel uses
 * its own clock. On a host whose clock really is an hour fast, that is the clock that the program has read; here it is
 * not, and the program would wait an hour longer than intended. So such deadlines are translated when a wait begins.
 * Once begun, a wait lasts as long as computed then, whatever happens to the clock.
 *
 * Only the creator of a condition variable knows its clock. No machine has been up for as many years as have passed
 * since 1970, so the value of the deadline shows which clock it is.
 *
 * Not translated: system calls that a program makes by its own instructions (calls.c handles the others),
 * timer_settime, message queues, joins of threads, the locks of <threads.h>.
 */
#define _GNU_SOURCE
#include "clock.h"
#include "control.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <sys/timerfd.h>
#include <time.h>

#define LONGEST_UPTIME_S 500000000ll

/* Newer than the oldest C library that this is built for. */
int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t id,
                           const struct timespec *deadline);
int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t id, const struct timespec *deadline);
int pthread_rwlock_clockrdlock(pthread_rwlock_t *lock, clockid_t id, const struct timespec *deadline);
int pthread_rwlock_clockwrlock(pthread_rwlock_t *lock, clockid_t id, const struct timespec *deadline);
int sem_clockwait(sem_t *semaphore, clockid_t id, const struct timespec *deadline);

#define REAL(name)                                                            \
    static __typeof__(&name) real;                                            \
    if (!real)                                                                \
    real = (__typeof__(&name))next(#name, NULL)

/* `version` selects one of two versions of a function; the other one is for programs built before 2003. */
static void *next(const char *name, const char *version)
{
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return found ? found : dlsym(RTLD_NEXT, name);
}

static const struct timespec *wall(const struct timespec *deadline, struct timespec *out)
{
    return clock_true_deadline(CLOCK_REALTIME, deadline, out);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline)
{
    static __typeof__(&pthread_cond_timedwait) real;
    struct timespec moved;
    if (!real)
        real = (__typeof__(&pthread_cond_timedwait))next("pthread_cond_timedwait", "GLIBC_2.3.2");
    clockid_t id = control_has_clock() && deadline->tv_sec < LONGEST_UPTIME_S ? CLOCK_MONOTONIC : CLOCK_REALTIME;
    return real(condition, mutex, clock_true_deadline(id, deadline, &moved));
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t id,
                           const struct timespec *deadline)
{
    REAL(pthread_cond_clockwait);
    struct timespec moved;
    return real ? real(condition, mutex, id, clock_true_deadline(id, deadline, &moved)) : EINVAL;
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline)
{
    REAL(pthread_mutex_timedlock);
    struct timespec moved;
    return real(mutex, wall(deadline, &moved));
}

int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t id, const struct timespec *deadline)
{
    REAL(pthread_mutex_clocklock);
    struct timespec moved;
    return real ? real(mutex, id, clock_true_deadline(id, deadline, &moved)) : EINVAL;
}

int pthread_rwlock_timedrdlock(pthread_rwlock_t *lock, const struct timespec *deadline)
{
    REAL(pthread_rwlock_timedrdlock);
    struct timespec moved;
    return real(lock, wall(deadline, &moved));
}

int pthread_rwlock_timedwrlock(pthread_rwlock_t *lock, const struct timespec *deadline)
{
    REAL(pthread_rwlock_timedwrlock);
    struct timespec moved;
    return real(lock, wall(deadline, &moved));
}

int pthread_rwlock_clockrdlock(pthread_rwlock_t *lock, clockid_t id, const struct timespec *deadline)
{
    REAL(pthread_rwlock_clockrdlock);
    struct timespec moved;
    return real ? real(lock, id, clock_true_deadline(id, deadline, &moved)) : EINVAL;
}

int pthread_rwlock_clockwrlock(pthread_rwlock_t *lock, clockid_t id, const struct timespec *deadline)
{
    REAL(pthread_rwlock_clockwrlock);
    struct timespec moved;
    return real ? real(lock, id, clock_true_deadline(id, deadline, &moved)) : EINVAL;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline)
{
    REAL(sem_timedwait);
    struct timespec moved;
    return real(semaphore, wall(deadline, &moved));
}

int sem_clockwait(sem_t *semaphore, clockid_t id, const struct timespec *deadline)
{
    REAL(sem_clockwait);
    struct timespec moved;
    if (real)
        return real(semaphore, id, clock_true_deadline(id, deadline, &moved));
    errno = EINVAL;
    return -1;
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *time, struct timespec *left)
{
    REAL(clock_nanosleep);
    struct timespec moved;
    return real(id, flags, flags & TIMER_ABSTIME ? clock_true_deadline(id, time, &moved) : time, left);
}

/* The clock of a timer, as shown by the kernel; -1 if it is not shown. */
static clockid_t clock_of(int fd)
{
    char path[48], line[128];
    int id = -1, saved = errno;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *shown = fopen(path, "re");
    while (shown && id < 0 && fgets(line, sizeof line, shown))
        if (sscanf(line, "clockid: %d", &id) != 1)
            id = -1;
    if (shown)
        fclose(shown);
    errno = saved;
    return id;
}

int timerfd_settime(int fd, int flags, const struct itimerspec *wanted, struct itimerspec *before)
{
    REAL(timerfd_settime);
    struct itimerspec moved;
    if (!(flags & TFD_TIMER_ABSTIME) || !control_has_clock() || !(wanted->it_value.tv_sec || wanted->it_value.tv_nsec))
        return real(fd, flags, wanted, before);
    moved = *wanted;
    const struct timespec *value = clock_true_deadline(clock_of(fd), &wanted->it_value, &moved.it_value);
    return real(fd, flags, value == &moved.it_value ? &moved : wanted, before);
}
