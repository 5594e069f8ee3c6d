/* The control file: how the harness steers the shim inside a program.
 *
 * The file is mapped shared. The harness writes its first part, `struct settings`, in one write whenever the faults
 * of the host change; the shim reads it and never writes there. `begin` and `end` carry the same number, which
 * grows with every change: a reader that finds them different, or changing, met a write half-way and looks again.
 * The second part, at COUNTERS_OFFSET, is the shim's: how often each fault was felt.
 *
 * nemesis/mechanisms/shim.py packs the same layout. All fields are 64 bits wide, in the machine's byte order.
 */
#ifndef SPLITBRAIN_CONTROL_H
#define SPLITBRAIN_CONTROL_H

#include <stdint.h>

#define CONTROL_MAGIC 0x3154554146425053ull
#define CONTROL_BYTES 4096
#define COUNTERS_OFFSET 2048
#define CLOCK_SLOTS 16

struct clock_slot {
    int64_t offset_ns;
    int64_t rate_ppb;         /* gained per second since `since_ns`, in billionths */
    int64_t since_ns;         /* by the true clock */
    int64_t strobe_ns;        /* added in every second half of a period */
    int64_t period_ns;
    int64_t is_monotonic;     /* moves the monotonic clock instead of the wall clock */
};

struct settings {
    uint64_t magic;
    uint64_t begin;
    uint64_t has_clock;       /* any slot is in use */
    uint64_t has_disk;        /* any disk fault is in force */
    uint64_t stall_sync;
    uint64_t stall_all;
    uint64_t full;
    uint64_t error_write;
    uint64_t error_sync;
    uint64_t error_read;
    int64_t delay_ns;
    struct clock_slot clocks[CLOCK_SLOTS];
    uint64_t end;
};

struct counters {
    uint64_t held;            /* operations that waited for a stalled disk */
    uint64_t delayed;
    uint64_t refused;         /* for want of space */
    uint64_t failed;          /* with an input/output error */
    uint64_t undo_overflow;   /* what was written could not be kept track of */
};

/* The settings as they are now; returns 0 and leaves `out` alone when this program is not under control. */
int control_read(struct settings *out);

/* Quick looks at single fields, right to within one change. */
int control_has_clock(void);
int control_has_disk(void);

/* The shim's own part; NULL when this program is not under control. */
struct counters *control_counters(void);

#define COUNT(field)                                                          \
    do {                                                                      \
        struct counters *counters_ = control_counters();                      \
        if (counters_)                                                        \
            __atomic_add_fetch(&counters_->field, 1, __ATOMIC_RELAXED);       \
    } while (0)

/* The directory whose files have faults, resolved, without a slash at its end; NULL when there is none. */
const char *control_root(void);

#endif
