/* Logging unsynced changes, so that a power cut can undo them.
 *
 * The functions do nothing unless SPLITBRAIN_FAULTS_UNDO names a directory (on the file system of the data). See
 * undo.c for what is logged, and nemesis/mechanisms/undo_log.py for how it is used.
 */
#ifndef SPLITBRAIN_UNDO_H
#define SPLITBRAIN_UNDO_H

#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

int undo_is_on(void);

/* Before a change of a file's bytes [offset, offset + length), or of its length to `offset` (is_truncate). */
void undo_before_write(int fd, off_t offset, uint64_t length, int is_truncate);

/* Before the length of the file at a path becomes `length`. */
void undo_before_truncate(const char *path, off_t length);

/* Before and after a write that is durable when it returns (O_DSYNC, O_SYNC, RWF_DSYNC, RWF_SYNC) and wrote `length`
 * bytes. The first function fills in `through` for the second; its seq is 0 if there is nothing to record. */
struct undo_through {
    uint64_t seq, dev, ino, offset, old_size;
};
void undo_before_write_through(int fd, off_t offset, struct undo_through *through);
void undo_after_write_through(const struct undo_through *through, uint64_t length);

/* Before and after a sync of a file or directory, or of everything under the root if `status` is NULL. */
uint64_t undo_before_sync(void);
void undo_after_sync(const struct stat *status, uint64_t begun);

/* Something becomes durable at an unknown time: the account is incomplete from now on, and the harness is told. */
void undo_lost_sight(void);

/* After a file or directory was created; `is_new` is 0 for another name of an existing file. */
void undo_after_create(const char *path, int is_new);

/* Before a name is removed or replaced: the file is kept under another name. */
void undo_before_unlink(const char *path);
void undo_before_rename(const char *from, const char *to);

#endif
