/* SPDX-License-Identifier: Apache-2.0
 *
 * base/base_internal.h (L0): what every other layer uses: failing, allocating, counting references, parallel ranges,
 * random numbers.
 */
#ifndef PERI_BASE_INTERNAL_H
#define PERI_BASE_INTERNAL_H

#include "border.h"

#include <perilune/base.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#define PERI__TEXT_OF(number) #number
#define PERI__TEXT(number) PERI__TEXT_OF(number)
#define PERI_VERSION_TEXT                                                                                              \
    PERI__TEXT(PERI_VERSION_MAJOR) "." PERI__TEXT(PERI_VERSION_MINOR) "." PERI__TEXT(PERI_VERSION_PATCH)

/* -- errors -------------------------------------------------------------------------------------------------------- */

/** Record a failure in this thread's error record (errno is preserved) and return @status. The message shape is
 *  "function: what was wrong, with the offending value and the allowed range". */
peri_status peri__fail_at(peri_status status, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
peri_status peri__fail_va(peri_status status, const char *file, int line, const char *format, va_list args);
/** A thread's error record. What must not touch it, such as a release, keeps it and restores it. */
typedef struct peri__error {
    peri_status status;
    char message[PERI_MESSAGE_MAX];
    char where[96];
} peri__error;
void peri__error_keep(peri__error *kept);
void peri__error_restore(const peri__error *kept);
#define peri__fail(status, ...) peri__fail_at((status), __FILE__, __LINE__, __VA_ARGS__)

/** Return from the enclosing function when @expr is an error (PERI_PENDING passes). */
#define PERI_TRY(expr)                                                                                                 \
    do {                                                                                                               \
        peri_status peri_try_ = (expr);                                                                                \
        if (peri_try_ < 0) return peri_try_;                                                                           \
    } while (0)

/** Set `status` and jump to @label when @expr is an error. */
#define PERI_TRY_GOTO(expr, label)                                                                                     \
    do {                                                                                                               \
        status = (expr);                                                                                               \
        if (status < 0) goto label;                                                                                    \
    } while (0)

/** Return from the enclosing public function with PERI_EINVAL if one of these arguments, at most five pointers, is
 *  NULL, or if a function of the program's calls it (border.h). */
#define PERI_NEED(...)                                                                                                 \
    do {                                                                                                               \
        PERI__NOT_AT_BORDER;                                                                                           \
        PERI__NEED_FIFTH(__VA_ARGS__, PERI__NEED_5, PERI__NEED_4, PERI__NEED_3, PERI__NEED_2, PERI__NEED_1, )          \
        (__VA_ARGS__);                                                                                                 \
    } while (0)
#define PERI__NEED_FIFTH(a, b, c, d, e, chosen, ...) chosen
#define PERI__NEED_1(a)                                                                                                \
    if (!(a)) return peri__fail(PERI_EINVAL, "%s: %s is missing", __func__, #a)
#define PERI__NEED_2(a, ...) PERI__NEED_1(a); PERI__NEED_1(__VA_ARGS__)
#define PERI__NEED_3(a, ...) PERI__NEED_1(a); PERI__NEED_2(__VA_ARGS__)
#define PERI__NEED_4(a, ...) PERI__NEED_1(a); PERI__NEED_3(__VA_ARGS__)
#define PERI__NEED_5(a, ...) PERI__NEED_1(a); PERI__NEED_4(__VA_ARGS__)

/** For a public function's argument @given, a pointer to a structure of @type that begins with its size: from here on a
 *  pointer to a copy that has all of today's members. */
#define PERI_TAKE(type, given)                                                                                         \
    type given##_now;                                                                                                  \
    PERI_TRY(peri__struct_take(&given##_now, sizeof(type), (given), __func__, #type));                                 \
    (given) = &given##_now
/** The result of a public function that fills in *@out, a structure of @type that begins with its size, with today's
 *  *@now. */
#define PERI_GIVE(type, out, now) peri__struct_give((out), (now), sizeof(type), __func__, #type)
/** Copy what the caller has of a structure, @given (NULL: PERI_EINVAL), to @now, @size bytes; what it has not becomes
 *  0. @function and
 *  @type: their names. */
peri_status peri__struct_take(void *now, size_t size, const void *given, const char *function, const char *type);
/** PERI_EINVAL unless @list, a caller's array called @name, is there and has 0 and more entries, or has none. */
peri_status peri__list_check(const char *function, const char *name, const void *list, int64_t n);
/** The @i-th of an array of such structures, which are as far apart as the size of the first one says. */
const void *peri__struct_at(const void *array, int64_t i);
/** Give the caller, whose structure *@out says how much room it has, of today's @now as much as it knows. */
peri_status peri__struct_give(void *out, const void *now, size_t size, const char *function, const char *type);

/** A bug of our own, checked in debug and sanitizer builds only. */
#if defined(PERI_DEBUG)
void peri__assert_failed(const char *file, int line, const char *what);
#define PERI_ASSERT(cond) ((cond) ? (void)0 : peri__assert_failed(__FILE__, __LINE__, #cond))
#else
#define PERI_ASSERT(cond) ((void)sizeof(cond))
#endif

void peri__log(int32_t level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/** Give lines to this function instead of stderr; NULL: print them. */
void peri__log_set(void (*log)(void *ctx, int32_t level, const char *text), void *ctx);
/** Whether lines of that level are printed. */
bool peri__log_shows(int32_t level);
/** The rank that log lines carry; -1 (the default) prints none. */
void peri__log_rank_set(int32_t rank);

/* -- memory -------------------------------------------------------------------------------------------------------- */

/** @size bytes (NULL: out of memory, error record set). Freed with peri__free. */
void *peri__alloc(size_t size);
/** As peri__alloc, zeroed. */
void *peri__alloc_zero(size_t size);
/** Grow or shrink; on failure NULL and @p stays valid. */
void *peri__realloc(void *p, size_t size);
/** As peri__realloc, for what is large for a short time (@p NULL: a new block): from 256 KiB on the block has pages of
 *  its own, so growing it copies nothing and leaves no holes in the heap, and freeing it gives the memory back to the
 *  system. */
void *peri__realloc_pages(void *p, size_t size);
/** Release; NULL is fine. Never touches errno or the error record. */
void peri__free(void *p);
/** Of a variable: what it points to is freed where its scope ends.
 *
 *      PERI__SCRATCH int64_t *counts = peri__alloc(...); */
#define PERI__SCRATCH __attribute__((cleanup(peri__scratch_end)))
static inline void peri__scratch_end(void *variable)
{
    void *p;
    memcpy(&p, variable, sizeof p);
    peri__free(p);
}
/** A copy of a text, or NULL. */
char *peri__strdup(const char *text);
/** Make the folders above @path that are missing; @itself: and @path. Failures show when something is made in them,
 *  which says that one is missing; why it could not be made is the number of the error that is returned (0: none). */
int peri__make_folders(const char *path, bool itself);
/** For descriptors that stay open, and files that are written: @fd itself, or in its place another descriptor of the
 *  same file if it is one of 0..2. A program that has closed those leaves them to others: what is printed to stderr
 *  would go into the file, and a program that opens its streams again (dup2) would close it. Negative, with errno: @fd
 *  is negative, or there is no other descriptor; then @fd is closed. */
int peri__fd_of_ours(int fd);
/** For programs of this repository, as the first thing: those of stdin, stdout and stderr that are closed become files
 *  that can be neither read nor written, so that nothing that is opened later gets their numbers. */
void peri__streams_hold(void);
/** Read @bytes bytes of an open file from byte @at on, in as many calls as it takes. Returns how many it has read; if
 *  those are fewer, errno says why: 0 at the end of the file. */
int64_t peri__read_at(int fd, void *to, int64_t bytes, int64_t at);
/** Write @bytes bytes of an open file from byte @at on, in as many calls as it takes. Returns how many it has written;
 *  if those are fewer, errno says why. */
int64_t peri__write_at(int fd, const void *from, int64_t bytes, int64_t at);
/** Is the file or link @path another user's, in a folder in which everybody may make files? */
bool peri__file_planted(const char *path);
/** Count device storage in peri_mem_live and, if positive, in peri_mem_debt. */
void peri__mem_count(int64_t bytes);
/** Count live objects (+1, -1). */
void peri__object_count(int64_t delta);

/** Replace the heap functions; only before the first allocation (host.h exposes it). */
peri_status peri__allocator_set(void *(*alloc)(size_t), void *(*realloc)(void *, size_t), void (*release)(void *));

/* -- reference counts ---------------------------------------------------------------------------------------------- */

typedef atomic_int_least32_t peri__refs;
static inline void peri__refs_init(peri__refs *refs) { atomic_init(refs, 1); }
static inline void peri__refs_add(peri__refs *refs) { atomic_fetch_add_explicit(refs, 1, memory_order_relaxed); }
/** Add a reference, unless the last one has gone already: then false. */
static inline bool peri__refs_try(peri__refs *refs)
{
    int32_t n = atomic_load(refs);
    while (n > 0 && !atomic_compare_exchange_weak(refs, &n, n + 1)) {}
    return n > 0;
}
/** True when the last reference went. A function of the program's gives none up (border.h). */
static inline bool peri__refs_drop(peri__refs *refs)
{
    if (peri__border_refuses("a release")) return false;
    return atomic_fetch_sub_explicit(refs, 1, memory_order_acq_rel) == 1;
}

/* -- parallel ranges ----------------------------------------------------------------------------------------------- */

/** Body over the half-open range [begin, end); must not fail and must not start another parallel range. */
typedef void (*peri_range_fn)(void *ctx, int64_t begin, int64_t end);
/** Split [0, n) into at most peri_threads() contiguous ranges of at least @grain and run them; returns when all are
 *  done.
 *  The split depends on n, grain and the number of threads only, so bodies must not let results depend on it. */
void peri__parallel_for(int64_t n, int64_t grain, peri_range_fn fn, void *ctx);

/** From now on dlclose leaves the shared object that holds this code where it is: threads, plugins and open devices
 *  need it. */
void peri__stay_loaded(void);
/** Start a thread. Signals are for the program's own threads: this one takes none. 0, or an errno. */
int peri__thread_start(pthread_t *thread, void *(*body)(void *), void *ctx);
/** From now on parallel ranges of the calling thread run in it alone, and leave the pool to those who compute. */
void peri__thread_alone(void);

/** Processors that the affinity mask leaves to process @pid; 0: nobody says. */
int32_t peri__processors_of(int pid);
/** Where control groups are, "/sys/fs/cgroup", and the file that says which are a process's, "/proc/self/cgroup". */
typedef struct peri__groups {
    const char *mount, *membership;
} peri__groups;
extern const peri__groups peri__own_groups;
typedef void (*peri__group_fn)(const char *folder, void *ctx);
/** Processors that the control groups' quotas leave to the process, rounded up; 0: there is no quota. */
int32_t peri__quota_of(const peri__groups *groups);
/** What peri_host_memory says of this process. @proc: "/proc". */
int64_t peri__memory_of(const peri__groups *groups, const char *proc, int64_t *available);
/** End the workers of the pool, which begins again with the next range. PERI_EINVAL while another thread computes. */
peri_status peri__threads_end(void);

/* -- fork ---------------------------------------------------------------------------------------------------------- */

/** How many forks lie between the first process and this one. What needs threads or connections of the process that
 *  made it keeps the number of that moment, and refuses to work under another one. */
int32_t peri__forks(void);
/** From now on a fork waits for @lock, which is one of the whole library, so that a child finds it free. Locks that are
 *  taken while others are held have higher numbers than those. */
void peri__fork_lock(pthread_mutex_t *lock, int32_t number);
/** The same of a backend's lock, a pthread_mutex_t. */
void peri__fork_leaf(void *lock);
/** Numbers of peri__fork_lock, in the order in which they are nested. */
enum {
    PERI__FORK_HOST,
    PERI__FORK_DEVICES,
    PERI__FORK_PLUGINS,
    PERI__FORK_TUNE,
    PERI__FORK_LISTED,
    PERI__FORK_STREAMS,
    PERI__FORK_PINNED,
    PERI__FORK_LATE, /* tests reports while it is held */
    PERI__FORK_REPORTS,
    PERI__FORK_STORAGES,
    PERI__FORK_LEAVES, /* of backends: nothing else is locked while one is held */
    PERI__FORK_POOL = PERI__FORK_LEAVES + 8,
    PERI__FORK_LOG,
    PERI__FORK_LOCKS
};
/** In the file of such a lock, before main (and at dlopen). */
#define PERI_FORK_LOCK(lock, number) \
    __attribute__((constructor)) static void fork_lock_(void) { peri__fork_lock(&(lock), (number)); }

/** An error if PERI_NUM_THREADS is set to what is no number of threads; PERI_LOG to what is no level. */
peri_status peri__threads_check(void);
peri_status peri__log_check(void);

/* -- random numbers ------------------------------------------------------------------------------------------------ */

/** The shortest text of @x that reads back as @x, in whatever locale. Returns @out. */
const char *peri__number_text(double x, char out[32]);
/** The number that @text [@bytes] is, in whatever locale. Returns false, and leaves @out as it is, where it is none. */
bool peri__number_of(const char *text, int64_t bytes, double *out);
/** As vsnprintf, in whatever locale. */
int peri__vprint_plain(char *text, size_t room, const char *format, va_list args) __attribute__((format(printf, 3, 0)));

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

/* -- fault points -------------------------------------------------------------------------------------------------- */

/** True when this passage of the fault point (base/fault.h) must fail. */
bool peri__fault(int32_t point);

/* -- small helpers ------------------------------------------------------------------------------------------------- */

static inline int64_t peri__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t peri__max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t peri__sum(const int64_t *list, int64_t n)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += list[i];
    return sum;
}
static inline int64_t peri__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/** The available bytes of peri_host_memory. */
int64_t peri__available_memory(void);

#endif
