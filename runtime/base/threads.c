/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.c: the fixed worker pool behind peri__parallel_for, the clock, pauses, hashes.
 *
 * The pool holds peri_threads() - 1 workers; the caller is the last one. A job is published under a mutex and each
 * worker takes the range of its own index, so there is no stealing and no dependence of results on timing. Workers spin
 * briefly, then sleep.
 */
#include "between.h"
#include "floats.h"
#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, SPIN = 2000, YIELDS = 20000 }; /* pauses that yield, some 10 ms, before one sleeps */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    _Atomic int32_t count;      /* threads wanted, the caller included; 0 until first use */
    int32_t started;            /* workers running */
    atomic_uint_least64_t round; /* one more per job (and per shutdown) */
    atomic_int unfinished;      /* workers that have not finished the current job */
    bool stop;                  /* workers leave at the next round */
    peri_range_fn fn;           /* the job */
    void *ctx;
    int64_t n;
    int32_t parts;
    peri__pool_run run;         /* the program's own threads; NULL: the workers above */
    void *run_ctx;
    atomic_bool taken[MAX_THREADS]; /* of the program's threads: parts that somebody computes */
    int32_t processors[MAX_THREADS], n_processors; /* that workers are bound to, one after the other; 0: to none */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/** True in a thread that already runs inside a parallel range: nested ranges run serially. */
static _Thread_local bool inside;
/** Only one thread at a time uses the pool; others run their range serially. */
static atomic_flag busy = ATOMIC_FLAG_INIT;

int64_t peri_time_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* some ten nanoseconds; "yield" takes no time on most of these processors */
#endif
}

/** What this thread does between operations. */
static _Thread_local struct {
    const peri__between_vtab *vtab; /* NULL: nothing */
    void *ctx;
    bool held; /* peri__between does nothing */
} between;

void peri__between(void)
{
    if (between.vtab && !between.held) between.vtab->progress(between.ctx);
}

void peri__between_hold(bool on) { between.held = on; }

bool peri__between_poll(peri_status (*queued)(void *ctx), void *ctx, peri_status *status)
{
    if (!between.vtab || !between.vtab->queued(between.ctx)) return false;
    const int64_t since = peri_time_ns();
    for (int64_t round = 0; (*status = queued(ctx)) == PERI_PENDING; round++) {
        peri__between();
        if (between.vtab->still_queued(between.ctx, since)) peri_pause(round);
    }
    (void)between.vtab->still_queued(between.ctx, since); /* what ended last may have ended because it failed */
    peri__between();
    peri_status lost = between.vtab->lost(between.ctx);
    if (*status >= 0) *status = lost;
    return true;
}

peri_status peri__between_idle(void)
{
    if (!between.vtab || !between.vtab->queued(between.ctx)) return PERI_OK;
    const int64_t since = peri_time_ns();
    for (int64_t round = 0; between.vtab->still_queued(between.ctx, since); round++) {
        peri__between();
        peri_pause(round);
    }
    return between.vtab->lost(between.ctx);
}

void peri__between_set(const peri__between_vtab *vtab, void *ctx)
{
    between.vtab = vtab;
    between.ctx = ctx;
}

void peri__between_drop(const void *ctx)
{
    if (between.ctx == ctx) peri__between_set(NULL, NULL);
}

void peri_pause(int64_t round)
{
    if (round < 64) {
        for (int i = 0; i < 8; i++) relax();
    } else if (round < YIELDS) {
        sched_yield();
    } else {
        int64_t us = peri__min((round - YIELDS) / 4 + 10, 200);
        nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
    }
}

static void run_part(int32_t i)
{
    int64_t begin = pool.n * i / pool.parts, end = pool.n * (i + 1) / pool.parts;
    if (begin < end) pool.fn(pool.ctx, begin, end);
}

static void *worker_thread(void *arg)
{
    int32_t index = (int32_t)(intptr_t)arg;
    uint64_t seen = 0;
    inside = true;
    for (;;) {
        for (int i = 0; i < SPIN && atomic_load_explicit(&pool.round, memory_order_acquire) == seen; i++) relax();
        if (atomic_load_explicit(&pool.round, memory_order_acquire) == seen) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load_explicit(&pool.round, memory_order_acquire);
        if (pool.stop) return NULL;
        if (index < pool.parts) run_part(index);
        atomic_fetch_sub_explicit(&pool.unfinished, 1, memory_order_release);
    }
}

static void publish_job(void)
{
    atomic_store_explicit(&pool.unfinished, pool.started, memory_order_relaxed);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add_explicit(&pool.round, 1, memory_order_release);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

static void shut_down(void)
{
    if (!pool.started) return;
    pool.stop = true;
    publish_job();
    for (int32_t i = 1; i <= pool.started; i++) pthread_join(pool.threads[i], NULL);
    pool.started = 0;
    pool.stop = false;
    atomic_store(&pool.round, 0);
}

/** The threads that PERI_NUM_THREADS asks for; 0: it is not set, or empty; -1: it is no number of threads. */
static int32_t count_asked(const char **text)
{
    char *end;
    *text = secure_getenv("PERI_NUM_THREADS");
    if (!*text || !**text) return 0;
    long n = strtol(*text, &end, 10);
    return *end || n < 1 || n > MAX_THREADS ? -1 : (int32_t)n;
}

peri_status peri__threads_check(void)
{
    const char *text;
    if (count_asked(&text) >= 0) return PERI_OK;
    return peri__fail(PERI_EINVAL, "PERI_NUM_THREADS is '%.40s', allowed: whole numbers 1..%d", text, MAX_THREADS);
}

static int32_t count_from_environment(const char *const *names)
{
    for (; *names; names++) {
        const char *text = secure_getenv(*names);
        if (text && atoi(text) > 0) return (int32_t)peri__min(atoi(text), MAX_THREADS);
    }
    return 0;
}

/** Threads where nobody says how many: processors and quota that this process, or this rank, has. */
static int32_t usual_count(void)
{
    int32_t cpus = peri__processors_of(0), quota = peri__quota_of(&peri__own_groups),
            ranks = count_from_environment(
                (const char *const[]){"OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "LOCAL_WORLD_SIZE", NULL});
    /* mpirun may bind a rank to processors of its own, fewer than mpirun itself has: then they are not shared with the
     * others. */
    bool bound = cpus < ranks && cpus < peri__processors_of(getppid());
    if (ranks > 1 && !bound) cpus /= ranks;
    /* More threads than the quota is worth would run, and then all of them would wait for its next period. */
    if (quota > 0) cpus = (int32_t)peri__min(cpus, ranks > 1 ? quota / ranks : quota);
    return (int32_t)peri__max(1, peri__min(cpus, MAX_THREADS));
}

int32_t peri_threads(void)
{
    const char *text;
    int32_t known = atomic_load_explicit(&pool.count, memory_order_relaxed);
    if (known > 0) return known;
    int32_t n = count_asked(&text); /* what is no number fails where devices are opened */
    if (n <= 0) n = usual_count();
    known = 0; /* threads that ask at the same time, and one that sets it meanwhile, agree */
    return atomic_compare_exchange_strong(&pool.count, &known, n) ? n : known;
}

peri_status peri_threads_set(int32_t threads)
{
    PERI__NOT_AT_BORDER;
    if (threads < 1 || threads > MAX_THREADS)
        return peri__fail(PERI_EINVAL, "peri_threads_set: %d threads, allowed: 1..%d", threads, MAX_THREADS);
    if (atomic_flag_test_and_set(&busy))
        return peri__fail(PERI_EINVAL, "peri_threads_set: another thread is computing");
    shut_down();
    pool.count = threads;
    atomic_flag_clear(&busy);
    return PERI_OK;
}

peri_status peri__pool_set(int32_t threads, peri__pool_run run, void *ctx)
{
    if (run && (threads < 1 || threads > MAX_THREADS))
        return peri__fail(PERI_EINVAL, "peri_host_pool_set: %d threads, allowed: 1..%d", threads, MAX_THREADS);
    if (inside || atomic_flag_test_and_set(&busy))
        return peri__fail(PERI_EINVAL, "peri_host_pool_set: a thread is computing");
    shut_down();
    pool.run = run;
    pool.run_ctx = ctx;
    pool.count = run ? threads : 0;
    atomic_flag_clear(&busy);
    return PERI_OK;
}

peri_status peri__affinity_set(const int32_t *processors, int32_t n)
{
    if (n < 0 || n > MAX_THREADS)
        return peri__fail(PERI_EINVAL, "peri_host_affinity_set: %d processors, allowed: 0..%d", n, MAX_THREADS);
    for (int32_t i = 0; i < n; i++)
        if (processors[i] < 0 || processors[i] >= CPU_SETSIZE)
            return peri__fail(PERI_EINVAL, "peri_host_affinity_set: processor %d, allowed: 0..%d", processors[i],
                              CPU_SETSIZE - 1);
    if (inside || atomic_flag_test_and_set(&busy))
        return peri__fail(PERI_EINVAL, "peri_host_affinity_set: a thread is computing");
    shut_down();
    if (n > 0) memcpy(pool.processors, processors, (size_t)n * sizeof *processors);
    pool.n_processors = n;
    atomic_flag_clear(&busy);
    return PERI_OK;
}

/** Bind worker @index; who is not allowed to stays where the system puts him. */
static void bind(int32_t index)
{
    cpu_set_t set;
    if (pool.n_processors == 0) return;
    CPU_ZERO(&set);
    CPU_SET((size_t)pool.processors[(index - 1) % pool.n_processors], &set);
    (void)pthread_setaffinity_np(pool.threads[index], sizeof set, &set);
}

peri_status peri__threads_end(void)
{
    if (atomic_flag_test_and_set(&busy))
        return peri__fail(PERI_EINVAL, "peri_host_shutdown: another thread is computing");
    shut_down();
    pool.run = NULL;
    pool.n_processors = 0;
    atomic_flag_clear(&busy);
    return PERI_OK;
}

/** The shared library is linked so that it stays (nodelete); a shared object of somebody else's that holds
 *  libperilune.a is not. */
static void pin(void)
{
    Dl_info own, program;
    /* a program that nobody loads libraries for */
    if (getauxval(AT_BASE) == 0 || !dladdr(&pool, &own) || !own.dli_fname) return;
    if (dladdr((void *)getauxval(AT_PHDR), &program) && program.dli_fbase == own.dli_fbase) return;
    if (dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE))
        peri__log(PERI_LOG_DEBUG, "%s stays loaded from now on", own.dli_fname);
}

void peri__stay_loaded(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, pin);
}

int peri__thread_start(pthread_t *thread, void *(*body)(void *), void *ctx)
{
    peri__stay_loaded();
    sigset_t all, before;
    sigfillset(&all);
    /* of what the thread itself does: handlers must see them */
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    PERI__OWN_FLOATS; /* a new thread begins with those of the one that makes it */
    int problem = pthread_create(thread, NULL, body, ctx);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (problem == 0) pthread_setname_np(*thread, "perilune");
    return problem;
}

/* -- fork: a child has the calling thread only --------------------------------------------------------------------- */

static pthread_mutex_t *fork_locks[PERI__FORK_LOCKS]; /* those that are there, by number */
static int32_t forks;

int32_t peri__forks(void) { return forks; }

void peri__fork_lock(pthread_mutex_t *lock, int32_t number) { fork_locks[number] = lock; }

void peri__fork_leaf(void *lock)
{
    int32_t i = PERI__FORK_LEAVES;
    while (i < PERI__FORK_POOL - 1 && fork_locks[i] && fork_locks[i] != lock) i++;
    fork_locks[i] = lock;
}

/** A function of the program's may fork to run another program, while this thread holds any of the locks. */
static void before_fork(void)
{
    if (peri__at_border()) return;
    for (int i = 0; i < PERI__FORK_LOCKS; i++)
        if (fork_locks[i]) pthread_mutex_lock(fork_locks[i]);
}

static void after_fork(void)
{
    if (peri__at_border()) return;
    for (int i = PERI__FORK_LOCKS - 1; i >= 0; i--)
        if (fork_locks[i]) pthread_mutex_unlock(fork_locks[i]);
}

/** The workers are gone, and so is whoever was computing; new ones start with the next range. */
static void in_child(void)
{
    after_fork();
    forks++;
    if (peri__at_border()) atomic_store(&peri__border_forked, true);
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER; /* workers of the parent wait for its own */
    pool.started = 0;
    pool.stop = false;
    pool.run = NULL; /* the program's threads are gone too */
    atomic_store(&pool.round, 0);
    atomic_store(&pool.unfinished, 0);
    atomic_flag_clear(&busy);
}

__attribute__((constructor)) static void watch_forks(void)
{
    peri__fork_lock(&pool.lock, PERI__FORK_POOL);
    pthread_atfork(before_fork, after_fork, in_child);
}

void peri__thread_alone(void) { inside = true; }

/** Part @i on one of the program's threads: once, whatever its pool calls. */
static void foreign_part(void *arg, int32_t i)
{
    (void)arg;
    if (i < 0 || i >= pool.parts || atomic_exchange(&pool.taken[i], true)) return;
    const bool before = inside;
    PERI__OWN_FLOATS;
    inside = true;
    peri__border_part(run_part, i);
    inside = before;
}

/** The same ranges on the program's own threads. What its pool leaves out is computed here. */
static void run_foreign(int64_t n, int64_t parts, peri_range_fn fn, void *ctx)
{
    pool.fn = fn;
    pool.ctx = ctx;
    pool.n = n;
    pool.parts = (int32_t)parts;
    for (int32_t i = 0; i < pool.parts; i++) atomic_store(&pool.taken[i], false);
    inside = true;
    PERI__AT_BORDER("peri_host_pool_set", pool.run(pool.run_ctx, pool.parts, foreign_part, NULL));
    for (int32_t i = 0; i < pool.parts; i++) foreign_part(NULL, i);
    inside = false;
    atomic_flag_clear_explicit(&busy, memory_order_release);
}

void peri__parallel_for(int64_t n, int64_t grain, peri_range_fn fn, void *ctx)
{
    if (n <= 0) return;
    PERI__OWN_FLOATS;
    int64_t parts = peri__min(peri_threads(), n / peri__max(grain, 1));
    if (parts <= 1 || inside || atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
        fn(ctx, 0, n);
        return;
    }
    if (pool.run) {
        run_foreign(n, parts, fn, ctx);
        return;
    }
    /* once: later workers would see an old round as new */
    for (intptr_t index = 1; !pool.started || index > 1; index++) {
        if (index >= pool.count || peri__thread_start(&pool.threads[index], worker_thread, (void *)index) != 0) break;
        pool.started++;
        bind((int32_t)index);
    }
    pool.fn = fn;
    pool.ctx = ctx;
    pool.n = n;
    pool.parts = (int32_t)peri__min(parts, pool.started + 1);
    publish_job();
    inside = true;
    run_part(0);
    inside = false;
    for (int64_t round = 0; atomic_load_explicit(&pool.unfinished, memory_order_acquire) > 0; round++)
        peri_pause(round);
    atomic_flag_clear_explicit(&busy, memory_order_release);
}

/* -- hashes -------------------------------------------------------------------------------------------------------- */

uint64_t peri__hash_text(const char *text)
{
    uint64_t hash = strlen(text);
    for (; *text; text++) hash = peri__hash_mix(hash, (unsigned char)*text);
    return hash;
}
