/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/tune.h: choices between ways to do the same that processors differ about: how far ahead rows are asked for,
 * what is written past the caches, who copies. They change times, never a bit of a result, and ranks may choose
 * differently.
 *
 * A choice comes from, in this order: PERI_TUNE (or peri_tune_set); what peri_tune_measure found in this process; the
 * file of this kind of processor in the user's cache folder, which peri_tune_save writes; the default. Nothing is
 * measured unless it is asked for: `perilune calibrate` does.
 *
 * Threads: any.
 */
#ifndef PERILUNE_TUNE_H
#define PERILUNE_TUNE_H

#include <perilune/base.h>

/** Where a choice comes from. */
enum {
    PERI_TUNE_DEFAULT = 0,  /* not measured so far, or not at all */
    PERI_TUNE_MEASURED = 1, /* by this process */
    PERI_TUNE_KEPT = 2,     /* in the file */
    PERI_TUNE_GIVEN = 3     /* by PERI_TUNE or peri_tune_set */
};

enum { PERI_TUNE_WAYS = 8 }; /* most ways of a choice */

/** A choice. All texts are static. */
typedef struct peri_tune_info {
    int64_t size; /* sizeof(peri_tune_info) */
    const char *name;               /* "lookup_prefetch" */
    const char *text;               /* what is chosen, one sentence */
    const char *ways[PERI_TUNE_WAYS]; /* allowed words; NULL behind the last */
    int64_t ns[PERI_TUNE_WAYS];     /* of each: time of one measured pass, nanoseconds; 0: not measured */
    double noise;                   /* of this process's measurement: of the pairs of passes of the default that
                                       followed each other, three of four differed by less than this share; 0: not
                                       measured */
    int32_t way, usual;             /* places in `ways` of the one in use and of the default */
    int32_t source;                 /* PERI_TUNE_* */
    bool measured;                  /* whether it can be measured; the others keep their default unless they are
                                       given */
} peri_tune_info;

/** Bytes of the last level of caches that the processors of this process have together, each cache counted once; 32 MiB
 *  where the system does not say; what PERI_CACHE_BYTES says where it is set. Asked once. */
PERI_API int64_t peri_cache_bytes(void);
/** Number of choices. */
PERI_API int32_t peri_tune_count(void);
/** Choice @index, 0..peri_tune_count() - 1. Local. */
PERI_API peri_status peri_tune_describe(int32_t index, peri_tune_info *out);
/** Use way @word of choice @name in this process from now on, as PERI_TUNE="name=word" does; NULL: forget that. Local;
 *  not while another thread computes. Some ways are taken when a group of ranks is made, as `copy_near`, on which its
 *  ranks agree: those of the first rank hold then. */
PERI_API peri_status peri_tune_set(const char *name, const char *word);
/** Measure choice @name now, @rounds times each way in turns, with all threads, each between two passes of the default.
 *  The fastest is used of the ways that were faster than both by more than 3 % in three of four turns, and in the
 *  median by more than the noise; else, with fewer than 5 rounds, and at a noise of more than 25 %, the default. What
 *  it works on is larger than the caches (peri_cache_bytes). A choice that is given keeps its way and gets its times.
 *  Takes some @rounds milliseconds, and as long again for each 100 MB of cache. Local. PERI_EUNSUPPORTED: it cannot be
 *  measured; PERI_ENOMEM: there is no room for it.
 */
PERI_API peri_status peri_tune_measure(const char *name, int32_t rounds);
/** Write what is measured into the file, beside what is there of other choices; what was measured at a noise of more
 *  than 25 % is not written. PERI_EIO: it could not be written. Local. */
PERI_API peri_status peri_tune_save(void);
/** The file's path; "": there is none (no home folder, or PERI_TUNE has the word off). Borrowed. */
PERI_API const char *peri_tune_path(void);

#endif
