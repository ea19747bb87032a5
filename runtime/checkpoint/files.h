/* SPDX-License-Identifier: Apache-2.0
 *
 * files.h: the system calls of checkpoints, with errors that name the file: writing, syncing, renaming, waiting for
 * what arrives late.
 */
#ifndef PERI_CHECKPOINT_FILES_H
#define PERI_CHECKPOINT_FILES_H

#include "../base/base_internal.h"

enum { PERI__IO_BLOCK = 4 << 20 }; /* bytes of one read or write */

/** For how long a name that another host made is waited for: on network file systems names appear late. */
#define PERI__LATE_SECONDS 30.0

/** The time (peri_time_ns) until which such a name is waited for, from now on. */
int64_t peri__late_deadline(void);
/** Pause for @milliseconds, after which the caller looks again; false, without a pause, if @deadline is over. */
bool peri__look_again(int64_t deadline, int milliseconds);
/** The status for errno @why of a call that opens or reads. PERI_ENOMEM: this process lacks memory or file descriptors,
 *  so nothing is known of the file. */
peri_status peri__status_of_errno(int why);
/** The folder that @path is in, in @out of PATH_MAX bytes. */
void peri__parent_of(const char *path, char *out);
/** "@folder/@name" in @out of PATH_MAX bytes. */
peri_status peri__path_join(const char *folder, const char *name, char *out);
/** A new file, which must not be there. @fd: open for writing. */
peri_status peri__file_create(const char *path, int *fd);
/** Write all bytes at @at. */
peri_status peri__file_put(int fd, const char *path, const void *data, int64_t bytes, int64_t at);
/** A file that is being written from its first byte on. */
typedef struct peri__growing {
    const char *path;
    int fd;
    int64_t bytes; /* so far */
} peri__growing;
/** Write the next bytes of the peri__growing @file. */
peri_status peri__growing_put(void *file, const char *data, int64_t bytes);
/** Read exactly these bytes; PERI_EFORMAT if the file ends before. */
peri_status peri__file_get(int fd, const char *path, void *out, int64_t bytes, int64_t at);
/** Sync a file to the disk, and close it in any case. */
peri_status peri__file_finish(int fd, const char *path);
/** Sync a folder, so that the names in it last. Where the file system has no such call, a line of the log says so, once
 *  a process. */
peri_status peri__folder_sync(const char *path);
/** Wait until file @name is there with @bytes bytes in @folder, which this process has made, at most
 *  PERI__LATE_SECONDS. If the folder is gone nothing is waited for: its name cannot be late here. */
peri_status peri__file_await(const char *folder, const char *name, int64_t bytes);
/** Open file @name of the open folder @folder for reading; PERI_EFORMAT if it is no regular file, or has more than
 *  @most bytes. @path: the file's, for errors. */
peri_status peri__file_open(int folder, const char *name, const char *path, int64_t most, int *fd, int64_t *bytes);
/** Whether @path is the folder that is open as @fd, and not a link to it. */
bool peri__same_folder(const char *path, int fd);
/** Whether a checkpoint may have the path @path, which is an error if not. */
peri_status peri__checkpoint_name(const char *path);
/** The name of a save's folder for checkpoint @path, ".NAME.saving-0123456789abcdef" beside it with digits drawn anew,
 *  in @out of PATH_MAX bytes. What has such a name and is not locked is swept by later saves. */
peri_status peri__saving_name(const char *path, char *out);
/** Lock the folder in which @path lies: until @lock is closed no other save, compaction or removal gives or takes names
 *  in it, so what was found there is still so when it is acted on. Waits for others, at most PERI__LATE_SECONDS. On
 *  file systems without locks nobody waits. */
peri_status peri__names_lock(const char *path, int *lock);
/** What a Saver's name, save-NUMBER-step-STEP, says; false: @path ends with another name. */
bool peri__saver_name(const char *path, int64_t *number, int64_t *step);
/** Remove a save's folder @path, unless somebody has it locked: then a later save sweeps it. */
void peri__saving_remove(const char *path);
/** Whether @path ends with the name of a save's folder. */
bool peri__is_saving(const char *path);
/** Whether a save writes files of that name. */
bool peri__is_saved(const char *name);

#endif
