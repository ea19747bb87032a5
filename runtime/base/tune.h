/* SPDX-License-Identifier: Apache-2.0
 *
 * base/tune.h (L0): what uses the choices of perilune/tune.h, and who measures them.
 */
#ifndef PERI_BASE_TUNE_H
#define PERI_BASE_TUNE_H

#include "base_internal.h"

#include <perilune/tune.h>

/** The choices, in the order of tune.def. */
enum {
#define CHOICE(name, ...) PERI__TUNE_##name,
#include "tune.def"
#undef CHOICE
    PERI__TUNE_CHOICES
};

/** Choices that one meter measures. NONE: nothing measures it. */
enum { PERI__TUNE_LOOKUP, PERI__TUNE_UPDATE, PERI__TUNE_SORT, PERI__TUNE_COPY, PERI__TUNE_NONE, PERI__TUNE_GROUPS };

/** The number of the way in use: see tune.def. One atomic load. */
int64_t peri__tune(int32_t choice);
/** Whether that way is about the first-level cache ("l1-..."). */
bool peri__tune_near(int32_t choice);

/** How the choices of a group are measured. */
typedef struct peri__tune_meter {
    /* Make what the passes work on; *state goes to the others. */
    peri_status (*open)(void **state);
    /* Nanoseconds of one pass, the way of every choice being what peri__tune says now; 0: nothing to be seen with so
     * few threads; -1: it failed. */
    int64_t (*pass)(void *state, int32_t choice);
    void (*close)(void *state);
} peri__tune_meter;

/** Bytes of a working set that the caches do not hold: measurements are of rows in memory. */
static inline int64_t peri__tune_working_set(int64_t cache_bytes) { return peri__max(64 << 20, 2 * cache_bytes); }
/** peri_cache_bytes for processors 0, 1, ... of which used[i] says whether they are this process's, by the files under
 *  @root. */
int64_t peri__cache_bytes_of(const char *root, const bool *used, int32_t n);
/** Bytes of the second-level cache of a processor; 0: the system does not say. */
int64_t peri__own_cache_bytes(void);
/** PERI_EINVAL if PERI_CACHE_BYTES is no number of bytes. */
peri_status peri__caches_check(void);
/** Zeros to measure on, on huge pages, first written by all threads. An error unless twice @bytes are free: what
 *  measures takes no memory that programs need. */
peri_status peri__tune_memory(size_t bytes, char **out);
/** Zeros, written by all threads. */
void peri__tune_zero(char *at, size_t bytes);
/** NULL is fine. */
void peri__tune_memory_free(char *memory, size_t bytes);

/** The meter of a group; static. Called before main. */
void peri__tune_offer(int32_t group, const peri__tune_meter *meter);

/** A file's lines: the way of each choice (-1: not there) and its times. */
typedef struct peri__tune_lines {
    int32_t way[PERI__TUNE_CHOICES];
    int64_t ns[PERI__TUNE_CHOICES][PERI_TUNE_WAYS];
} peri__tune_lines;

/** Read the @length bytes of a file of processor @key. PERI_EFORMAT: it is damaged, or of another kind; says how. */
peri_status peri__tune_parse(const char *text, size_t length, const char *key, peri__tune_lines *out);
/** The text of such a file; returns its length, and writes @room bytes at most. */
size_t peri__tune_print(const peri__tune_lines *lines, const char *key, char *text, size_t room);
/** An error if PERI_TUNE asks for a choice or a way that is not there. Changes nothing. */
peri_status peri__tune_check(void);
/** Take in PERI_TUNE and the file again (tests). */
void peri__tune_reload(void);

#endif
