/* What a deadline by a clock that is wrong means by the true one. */
#ifndef SPLITBRAIN_CLOCK_H
#define SPLITBRAIN_CLOCK_H

#include <time.h>

/* When, by the kernel's own clock `id`, a program sees that clock at `deadline`, into `out`. Returns `out`, or `deadline`
 * where the clock is not wrong. */
const struct timespec *clock_true_deadline(clockid_t id, const struct timespec *deadline, struct timespec *out);

#endif
