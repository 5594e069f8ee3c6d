/* Skewed clocks: clock_gettime, gettimeofday, time and timespec_get as a program sees them.
 *
 * Only times that a program gets from the library are skewed. Timestamps of files and packets are the kernel's and stay
 * true; so do sleeps and timeouts, which are durations. Deadlines by the skewed clock are translated (waits.c).
 */
#define _GNU_SOURCE
#include "clock.h"
#include "control.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ll
#define FOREVER_S 5000000000ll  /* deadlines after the year 2128 mean "never" */

typedef int (*gettime_fn)(clockid_t, struct timespec *);

static gettime_fn real_gettime;

/* Looked up early, as in calls.c: allocators read the clock. */
__attribute__((constructor(101))) static void clock_open(void)
{
    real_gettime = (gettime_fn)dlsym(RTLD_NEXT, "clock_gettime");
}

static int true_time(clockid_t id, struct timespec *out)
{
    return real_gettime ? real_gettime(id, out) : (int)bare(SYS_clock_gettime, id, out);
}

static int is_wall(clockid_t id)
{
    return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI;
}

static int is_monotonic(clockid_t id)
{
    return id == CLOCK_MONOTONIC || id == CLOCK_MONOTONIC_RAW || id == CLOCK_MONOTONIC_COARSE || id == CLOCK_BOOTTIME;
}

/* By how much a clock is ahead of CLOCK_MONOTONIC, the clock of `since_ns` in skews of monotonic clocks: CLOCK_BOOTTIME
 * includes suspended time, and CLOCK_MONOTONIC_RAW is not slewed. Read only once, because neither must go back. */
static int64_t ahead_ns(clockid_t id)
{
    static int64_t known[2];  /* 0: not yet */
    struct timespec own, steady;
    int64_t *ahead = &known[id == CLOCK_BOOTTIME], none = 0;
    if (id != CLOCK_BOOTTIME && id != CLOCK_MONOTONIC_RAW)
        return 0;
    if (!__atomic_load_n(ahead, __ATOMIC_RELAXED) && true_time(id, &own) == 0 &&
        true_time(CLOCK_MONOTONIC, &steady) == 0) {
        int64_t found = (int64_t)(own.tv_sec - steady.tv_sec) * SECOND_NS + own.tv_nsec - steady.tv_nsec;
        __atomic_compare_exchange_n(ahead, &none, found ? found : 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
    return __atomic_load_n(ahead, __ATOMIC_RELAXED);
}

static int64_t skew_of(const struct settings *settings, int64_t now_ns, int want_monotonic)
{
    int64_t sum = 0;
    for (int i = 0; i < CLOCK_SLOTS; i++) {
        const struct clock_slot *slot = &settings->clocks[i];
        if (!!slot->is_monotonic != want_monotonic)
            continue;
        sum += slot->offset_ns;
        if (slot->rate_ppb && now_ns > slot->since_ns) {
            int64_t gained_ns = (int64_t)((__int128)(now_ns - slot->since_ns) * slot->rate_ppb / SECOND_NS);
            sum += slot->step_ns > 0 ? gained_ns % slot->step_ns : gained_ns;
        }
        if (slot->period_ns > 0 && ((now_ns - slot->since_ns) / (slot->period_ns / 2 + 1)) % 2)
            sum += slot->strobe_ns;
    }
    return sum;
}

static int64_t skew_ns(int64_t now_ns, int want_monotonic)
{
    struct settings settings;
    return control_read(&settings) ? skew_of(&settings, now_ns, want_monotonic) : 0;
}

/* The true time at which the clock shows `deadline_ns`, at its rate from the true time `from_ns` on; at least that. */
static int64_t shows_at(const struct settings *settings, int64_t from_ns, int64_t deadline_ns, int want_monotonic)
{
    int64_t left_ns = deadline_ns - (from_ns + skew_of(settings, from_ns, want_monotonic)), rate_ppb = SECOND_NS;
    for (int i = 0; i < CLOCK_SLOTS; i++) {
        const struct clock_slot *slot = &settings->clocks[i];
        if (!!slot->is_monotonic == want_monotonic && from_ns > slot->since_ns)
            rate_ppb += slot->rate_ppb;
    }
    if (left_ns <= 0)
        return from_ns;
    return from_ns + (rate_ppb > 0 ? (int64_t)((__int128)left_ns * SECOND_NS / rate_ppb) : left_ns);
}

const struct timespec *clock_true_deadline(clockid_t id, const struct timespec *deadline, struct timespec *out)
{
    struct settings settings;
    struct timespec now;
    int want_monotonic = is_monotonic(id), is_used = 0;
    if (!control_has_clock() || !(is_wall(id) || want_monotonic) || !deadline || deadline->tv_nsec < 0 ||
        deadline->tv_nsec >= SECOND_NS || deadline->tv_sec < 0 || deadline->tv_sec > FOREVER_S ||
        !control_read(&settings) || true_time(id, &now) != 0)
        return deadline;
    int64_t ahead = ahead_ns(id);
    int64_t now_ns = (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec - ahead;
    int64_t deadline_ns = (int64_t)deadline->tv_sec * SECOND_NS + deadline->tv_nsec - ahead;
    int64_t until_ns = shows_at(&settings, now_ns, deadline_ns, want_monotonic);
    for (int i = 0; i < CLOCK_SLOTS; i++) {
        const struct clock_slot *slot = &settings.clocks[i];
        if (!!slot->is_monotonic != want_monotonic)
            continue;
        is_used |= slot->offset_ns || slot->rate_ppb || slot->period_ns > 0;
        if (slot->period_ns > 0) {  /* the clock will jump, and may reach the deadline earlier */
            int64_t half_ns = slot->period_ns / 2 + 1;
            int64_t jump_ns = now_ns + half_ns - (now_ns - slot->since_ns) % half_ns;
            int64_t then_ns = shows_at(&settings, jump_ns, deadline_ns, want_monotonic);
            until_ns = then_ns < until_ns ? then_ns : until_ns;
        }
    }
    if (!is_used)
        return deadline;
    until_ns += ahead;
    *out = (struct timespec){until_ns / SECOND_NS, until_ns % SECOND_NS};
    return out;
}

static void move(clockid_t id, struct timespec *time)
{
    if (!control_has_clock() || !(is_wall(id) || is_monotonic(id)))
        return;
    int64_t now_ns = (int64_t)time->tv_sec * SECOND_NS + time->tv_nsec;
    int64_t skew = skew_ns(now_ns - ahead_ns(id), is_monotonic(id));
    if (skew)
        COUNT_PROGRAM(clock_reads);
    now_ns += skew;
    if (now_ns < 0)
        now_ns = 0;
    time->tv_sec = now_ns / SECOND_NS;
    time->tv_nsec = now_ns % SECOND_NS;
}

int clock_gettime(clockid_t id, struct timespec *out)
{
    int result = true_time(id, out);
    if (result == 0)
        move(id, out);
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    struct timespec now;
    struct timeval *volatile wanted = out;  /* declared non-null, but some callers only want the zone */
    int result = zone ? (int)bare(SYS_gettimeofday, NULL, zone) : 0;
    if (result == 0 && wanted && (result = clock_gettime(CLOCK_REALTIME, &now)) == 0) {
        out->tv_sec = now.tv_sec;
        out->tv_usec = now.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *out, int base)
{
    static int (*real)(struct timespec *, int);
    if (base == TIME_UTC)
        return clock_gettime(CLOCK_REALTIME, out) == 0 ? base : 0;
    if (!real)  /* newer C libraries have other clocks as well */
        real = (int (*)(struct timespec *, int))dlsym(RTLD_NEXT, "timespec_get");
    return real ? real(out, base) : 0;
}
