/* SPDX-License-Identifier: Apache-2.0
 *
 * base/internal.h (L0): what every other layer uses: failing, allocating, counting references, parallel ranges, random numbers.
 */
#ifndef PERI_BASE_INTERNAL_H
#define PERI_BASE_INTERNAL_H

#include "fault.h"

#include <perilune/base.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#define PERI_VERSION_TEXT "0.1.0"

/* -- errors -------------------------------------------------------------------------------------------------------------------- */

/** Record a failure in this thread's error record (errno is preserved) and return @status. The message shape is
 *  "function: what was wrong, with the offending value and the allowed range". */
peri_status peri__fail_at(peri_status status, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
peri_status peri__fail_va(peri_status status, const char *file, int line, const char *format, va_list args);
#define peri__fail(status, ...) peri__fail_at((status), __FILE__, __LINE__, __VA_ARGS__)

/** Return from the enclosing function when @expr is an error (PERI_PENDING passes). */
#define PERI_TRY(expr)                                                                                                                \
    do {                                                                                                                              \
        peri_status peri_try_ = (expr);                                                                                               \
        if (peri_try_ < 0) return peri_try_;                                                                                          \
    } while (0)

/** Set `status` and jump to @label when @expr is an error. */
#define PERI_TRY_GOTO(expr, label)                                                                                                    \
    do {                                                                                                                              \
        status = (expr);                                                                                                              \
        if (status < 0) goto label;                                                                                                   \
    } while (0)

/** Return from the enclosing public function with PERI_EINVAL if pointer @argument is NULL. */
#define PERI_NEED(argument)                                                                                                                \
    do {                                                                                                                                   \
        if (!(argument)) return peri__fail(PERI_EINVAL, "%s: %s is missing", __func__, #argument);                                         \
    } while (0)

/** A bug of our own, checked in debug and sanitizer builds only. */
#if defined(PERI_DEBUG)
void peri__assert_failed(const char *file, int line, const char *what);
#define PERI_ASSERT(cond) ((cond) ? (void)0 : peri__assert_failed(__FILE__, __LINE__, #cond))
#else
#define PERI_ASSERT(cond) ((void)sizeof(cond))
#endif

void peri__log(int32_t level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/** Whether lines of that level are printed. */
bool peri__log_shows(int32_t level);
/** The rank that log lines carry; -1 (the default) prints none. */
void peri__log_rank_set(int32_t rank);

/* -- memory -------------------------------------------------------------------------------------------------------------------- */

/** @size bytes (NULL: out of memory, error record set). Freed with peri__free. */
void *peri__alloc(size_t size);
/** The same, zeroed. */
void *peri__alloc_zero(size_t size);
/** Grow or shrink; on failure NULL and @p stays valid. */
void *peri__realloc(void *p, size_t size);
/** Release; NULL is fine. Never touches errno or the error record. */
void peri__free(void *p);
/** A copy of a text, or NULL. */
char *peri__strdup(const char *text);
/** Make the folders above @path that are missing; @itself: and @path. Failures show when something is made in them. */
void peri__make_folders(const char *path, bool itself);
/** Count device storage in peri_mem_live and, if positive, in peri_mem_debt. */
void peri__mem_count(int64_t bytes);
/** Count live objects (+1, -1). */
void peri__object_count(int64_t delta);

/** Replace the heap functions; only before the first allocation (host.h exposes it). */
peri_status peri__allocator_set(void *(*alloc)(size_t), void *(*realloc)(void *, size_t), void (*release)(void *));

/* -- reference counts ---------------------------------------------------------------------------------------------------------- */

typedef atomic_int_least32_t peri__refs;
static inline void peri__refs_init(peri__refs *refs) { atomic_init(refs, 1); }
static inline void peri__refs_add(peri__refs *refs) { atomic_fetch_add_explicit(refs, 1, memory_order_relaxed); }
/** True when the last reference went. */
static inline bool peri__refs_drop(peri__refs *refs)
{
    return atomic_fetch_sub_explicit(refs, 1, memory_order_acq_rel) == 1;
}

/* -- parallel ranges ----------------------------------------------------------------------------------------------------------- */

/** Body over the half-open range [begin, end); must not fail and must not start another parallel range. */
typedef void (*peri_range_fn)(void *ctx, int64_t begin, int64_t end);
/** Split [0, n) into at most peri_threads() contiguous ranges of at least @grain and run them; returns when all are done.
 *  The split depends on n, grain and the number of threads only, so bodies must not let results depend on it. */
void peri__parallel_for(int64_t n, int64_t grain, peri_range_fn fn, void *ctx);

/** Start a thread. Signals are for the program's own threads: this one takes none. 0, or an errno. */
int peri__thread_start(pthread_t *thread, void *(*body)(void *), void *ctx);
/** From now on parallel ranges of the calling thread run in it alone, and leave the pool to those who compute. */
void peri__thread_alone(void);

/** An error if PERI_NUM_THREADS is set to what is no number of threads; PERI_LOG to what is no level. */
peri_status peri__threads_check(void);
peri_status peri__log_check(void);

/* -- random numbers ------------------------------------------------------------------------------------------------------------ */

/** Hash of a text, stable across builds and machines (keys of the counter-based generator, key lists on the wire). */
uint64_t peri__hash_text(const char *text);
/** Mix a value into a hash: the finaliser of splitmix64 (Steele, Lea, Flood 2014) over the running hash. */
static inline uint64_t peri__hash_mix(uint64_t hash, uint64_t value)
{
    uint64_t z = (hash ^ value) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* -- fault points -------------------------------------------------------------------------------------------------------------- */

/** True when this passage of the fault point must fail. */
bool peri__fault(int32_t point);

/* -- small helpers ------------------------------------------------------------------------------------------------------------- */

static inline int64_t peri__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t peri__max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t peri__sum(const int64_t *list, int64_t n)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += list[i];
    return sum;
}
static inline int64_t peri__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/** Memory that can be had without pushing others out: of the machine, or of this container if that is less. */
int64_t peri__available_memory(void);

#endif
