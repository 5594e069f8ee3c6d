/* Finding and reading the control file. Uses bare system calls, because we replace the library's functions. */
#define _GNU_SOURCE
#include "control.h"

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile struct settings *shared;
static char root[PATH_MAX];
static struct program *program;
static uint64_t program_id;

/* The harness assigns a slot to one running program at a time; its first process gets here before it starts others. */
static void claim_program(void *mapped)
{
    const char *given = getenv("SPLITBRAIN_FAULTS_PROGRAM");
    uint64_t id = given ? strtoull(given, NULL, 10) : 0;
    if (!id)
        return;
    program = (struct program *)((char *)mapped + PROGRAMS_OFFSET) + id % PROGRAM_SLOTS;
    if (__atomic_load_n(&program->id, __ATOMIC_ACQUIRE) != id) {
        memset(program, 0, sizeof *program);
        __atomic_store_n(&program->id, id, __ATOMIC_RELEASE);
    }
    program_id = id;
}

__attribute__((constructor(101))) static void control_open(void)
{
    const char *path = getenv("SPLITBRAIN_FAULTS");
    const char *directory = getenv("SPLITBRAIN_FAULTS_ROOT");
    if (!path)
        return;
    if (directory && !realpath(directory, root))
        root[0] = 0;
    int fd = (int)bare(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    bare(SYS_close, fd);
    if (mapped == MAP_FAILED)
        return;
    if (((struct settings *)mapped)->magic != CONTROL_MAGIC) {
        munmap(mapped, CONTROL_BYTES);
        return;
    }
    claim_program(mapped);
    shared = mapped;
}

int control_read(struct settings *out)
{
    if (!shared)
        return 0;
    for (;;) {
        uint64_t begin = __atomic_load_n(&shared->begin, __ATOMIC_ACQUIRE);
        memcpy(out, (const void *)shared, sizeof *out);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        uint64_t again = __atomic_load_n(&shared->begin, __ATOMIC_ACQUIRE);
        if (begin == again && out->begin == begin && out->end == begin)
            return 1;
    }
}

int control_has_clock(void)
{
    return shared && __atomic_load_n(&shared->has_clock, __ATOMIC_RELAXED);
}

int control_has_disk(void)
{
    return shared && __atomic_load_n(&shared->has_disk, __ATOMIC_RELAXED);
}

struct counters *control_counters(void)
{
    return shared ? (struct counters *)((char *)shared + COUNTERS_OFFSET) : NULL;
}

struct program *control_program(void)
{
    return program && __atomic_load_n(&program->id, __ATOMIC_RELAXED) == program_id ? program : NULL;
}

const char *control_root(void)
{
    return shared && root[0] ? root : NULL;
}
