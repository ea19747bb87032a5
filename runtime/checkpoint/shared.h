/* SPDX-License-Identifier: Apache-2.0
 *
 * shared.h: blocks of a checkpoint's files that one process of this machine has read past the page cache, and others of
 * the same job take over instead of reading them again.
 *
 *     process 0   read block 0 -> slot | lay its columns | take block 1 from the slot, lay | read block 2 -> slot ...
 *     process 1   take block 0, lay    | read block 1 -> slot | lay                        | ...
 *
 * Nobody depends on anybody: who does not find a block, or waits too long for it, reads it by itself. So a process may
 * come later, want other bytes, fail or die. A slot is free again when all processes have used it.
 */
#ifndef PERI_CHECKPOINT_SHARED_H
#define PERI_CHECKPOINT_SHARED_H

#include "file_jobs.h"

typedef struct peri__shared peri__shared;

/** Which bytes a block has. */
typedef struct peri__shared_key {
    uint64_t device, inode; /* of the file */
    int64_t at, bytes;
} peri__shared_key;

/** Meet the processes of this machine, @processes of them, that give the same @name (letters, digits and '-'). NULL in
 *  @out: the machine has no memory to meet in. @out new. */
peri_status peri__shared_open(const char *name, int64_t processes, peri__shared **out);
/** Leave; NULL is fine. */
void peri__shared_close(peri__shared *s);
/** A block that another process has read, of @key->bytes bytes; it stays as it is until peri__shared_done(*slot). NULL:
 *  the caller reads it, and then calls peri__shared_give or, if that failed, peri__shared_drop, unless *@slot is -1. */
const char *peri__shared_take(peri__shared *s, const peri__shared_key *key, int32_t *slot);
void peri__shared_done(peri__shared *s, int32_t slot);
void peri__shared_give(peri__shared *s, int32_t slot, const char *data);
void peri__shared_drop(peri__shared *s, int32_t slot);

#endif
