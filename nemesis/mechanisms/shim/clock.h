/* Translation of deadlines by a skewed clock to the true one. */
#ifndef SPLITBRAIN_CLOCK_H
#define SPLITBRAIN_CLOCK_H

#include <time.h>

/* Stores in `out` the time of the kernel's own clock `id` at which the program will see that clock show `deadline`.
 * Returns `out`, or `deadline` if the clock is not skewed. */
const struct timespec *clock_true_deadline(clockid_t id, const struct timespec *deadline, struct timespec *out);

#endif
