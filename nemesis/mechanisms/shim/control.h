/* The control file: how the harness controls the shim inside a program.
 *
 * The file is mapped shared. The harness writes its first part, `struct settings`, in one write whenever the faults
 * of the host change; the shim reads it and never writes there. `begin` and `end` carry the same number, which
 * grows with every change: a reader that finds them different, or changing, has seen half a write and reads again.
 * The second part, at COUNTERS_OFFSET, is the shim's: how often each fault was met. The third, at PROGRAMS_OFFSET, has
 * the counts of each program that the harness started, its children included: SPLITBRAIN_FAULTS_PROGRAM is its number,
 * which also determines its slot.
 *
 * nemesis/mechanisms/shim.py and launcher/control.py share this layout. All fields have 64 bits, in native byte order.
 */
#ifndef SPLITBRAIN_CONTROL_H
#define SPLITBRAIN_CONTROL_H

#include <stdint.h>

/* The real syscall(); programs that call syscall() get the shim's version (calls.c). */
__attribute__((visibility("hidden"))) long bare(long number, ...);

#define CONTROL_MAGIC 0x3154554146425053ull
#define CONTROL_BYTES 20480
#define COUNTERS_OFFSET 2048
#define PROGRAMS_OFFSET 4096
#define PROGRAM_SLOTS 64
#define PROGRAM_BYTES 256
#define CLOCK_SLOTS 16

struct clock_slot {
    int64_t offset_ns;
    int64_t rate_ppb;         /* gained per second since `since_ns`, in billionths */
    int64_t since_ns;         /* by the true clock */
    int64_t strobe_ns;        /* added in every second half of a period */
    int64_t period_ns;
    int64_t is_monotonic;     /* skews the monotonic clock instead of the wall clock */
    int64_t step_ns;          /* above 0: the offset gained by the rate is reset each time it reaches this */
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
    uint64_t flipped_inode;   /* of the file with a bit flipped at rest; 0: none */
    int64_t flipped_offset;
    uint64_t account;         /* launcher only: unsynced changes have to be logged from now on */
    struct clock_slot clocks[CLOCK_SLOTS];
    uint64_t end;
};

struct counters {
    uint64_t held;            /* operations that waited for a stalled disk */
    uint64_t delayed;
    uint64_t refused;         /* for lack of space */
    uint64_t failed;          /* with an input/output error */
    uint64_t undo_overflow;   /* times that unsynced changes could no longer be logged */
};

struct program {
    uint64_t id;              /* 0: unused; otherwise the slot is id % PROGRAM_SLOTS */
    uint64_t syncs;           /* calls on files under the root while a disk fault is in force or changes are recorded */
    uint64_t writes;
    uint64_t grows;           /* writes that need more space */
    uint64_t reads;
    uint64_t held, delayed, refused, failed;
    uint64_t recorded;        /* changes in the account of unsynced data */
    uint64_t clock_reads;     /* of a skewed clock */
    /* launcher only: calls about files that it may not inspect, the progress of its clock driver,
     * and whether its supervisor was lost */
    uint64_t unseen, clock_generation, clock_reached, clock_failed, lost;
    uint64_t flipped_reads;   /* of a byte with a flipped bit; shim only */
    /* launcher only: for how many processes calls are reported, and why not for others (errno) */
    uint64_t traps_generation, traps_reached, traps_failed, traps_error;
    uint64_t passed;          /* launcher only: descriptors of files whose calls are not, or were not, reported */
    uint64_t buffered;        /* files opened for writing through the C library's own buffers; shim only */
    /* the part of `held`, `refused` and `failed` due to a fault of the shim or launcher itself, by kind of call:
     * the totals are shared by all faults of a host */
    uint64_t held_syncs, refused_grows, failed_writes, failed_syncs, failed_reads;
    uint64_t unused[4];
};

/* Reads the current settings; returns 0 and leaves `out` unchanged when this program is not under control. */
int control_read(struct settings *out);

/* Fast reads of single fields, which may lag one change behind. */
int control_has_clock(void);
int control_has_disk(void);

/* The shim's own part of the control file; NULL when this program is not under control. */
struct counters *control_counters(void);

/* This program's own counts; NULL when it has none, or has lost them to another program. */
struct program *control_program(void);

#define COUNT_PROGRAM(field)                                                  \
    do {                                                                      \
        struct program *program_ = control_program();                         \
        if (program_)                                                         \
            __atomic_add_fetch(&program_->field, 1, __ATOMIC_RELAXED);        \
    } while (0)

#define COUNT(field)                                                          \
    do {                                                                      \
        struct counters *counters_ = control_counters();                      \
        if (counters_)                                                        \
            __atomic_add_fetch(&counters_->field, 1, __ATOMIC_RELAXED);       \
    } while (0)

/* The directory whose files have faults, resolved, without a trailing slash; NULL when there is none. */
const char *control_root(void);

#endif
