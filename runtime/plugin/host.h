/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin/host.h (L1): what the core lends to a backend. Plugins do not link libperilune: everything they need comes in
 * through this table, so the same plugin works under the shared library, a static host and the launcher.
 */
#ifndef PERI_PLUGIN_HOST_H
#define PERI_PLUGIN_HOST_H

#include <perilune/base.h>

/** The contracts of this header. What is added goes to the end of a table, so that older backends need not know it, and
 *  raises the number; what changes raises the lowest number as well. */
enum { PERI_PLUGIN_HOST_ABI = 3 };

typedef struct peri_plugin_host {
    uint32_t size, abi; /* sizeof this struct; PERI_PLUGIN_HOST_ABI */
    /* Record a failure in the calling thread's error record and return the status. */
    peri_status (*fail)(peri_status status, const char *file, int line, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
    /* The calling thread's last error message. */
    const char *(*error_message)(void);
    /* One log line. */
    void (*log)(int32_t level, const char *format, ...) __attribute__((format(printf, 2, 3)));
    /* The accounted heap. */
    void *(*alloc)(size_t size);
    void *(*alloc_zero)(size_t size);
    void (*free)(void *p);
    /* Split [0, n) over the worker pool; see peri__parallel_for. */
    void (*parallel_for)(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx);
    /* The CPU's kernel or step @name whose argument struct is @args (PERI_WORK_ARGS), of the chosen instruction set;
     * NULL: this core has none that takes these. Backends ask once and keep it: their numbers (PERI_K_*) may be other
     * kernels' here. */
    void (*(*kernel)(const char *name, int64_t args))(const void *args, int64_t begin, int64_t end);
    /* True when this passage of a fault point (PERI_FAULT_*, plugin/fault.h) must fail. */
    bool (*fault)(int32_t point);
    int64_t (*time_ns)(void);
    void (*pause)(int64_t round);
    /* The number of the way in use of one of PERI_HOST_COPY_*; see base/tune.def. */
    int64_t (*copy_choice)(int32_t choice);
    /* Threads among which parallel_for splits at most. */
    int32_t (*threads)(void);
    /* Keys that are worth one more thread of a sort; see base/tune.def. */
    int64_t (*sort_keys)(void);
    /* A fork waits for this pthread_mutex_t of the backend, so that the child finds it free. Nothing else is locked
     * while it is held. */
    void (*fork_lock)(void *lock);
    /* Since contract 3. Start a thread of the library's into this pthread_t: it takes no signals, which are for the
     * program's threads. 0, or an errno. */
    int (*thread_start)(void *thread, void *(*body)(void *), void *ctx);
    /* The file @fd, or a copy of it above stdin, stdout and stderr where these are closed, so that no printed line gets
     * into it; -1 with errno. */
    int (*own_file)(int fd);
} peri_plugin_host;

/** Whether a host has all that is in this header. A backend that needs it refuses an older one. */
static inline bool peri_plugin_host_has_all(const peri_plugin_host *host)
{
    return host->size >= sizeof *host;
}

/** @lent serves the backend from now on, through @own; false: a copy of the core has come that lies in the same process
 *  beside the one that serves it, and cannot, since the backend has one state. */
static inline bool peri_plugin_host_take(const peri_plugin_host **own, const peri_plugin_host *lent)
{
    if (!*own) *own = lent;
    return *own == lent;
}

/** Choices of perilune/tune.h about copies between ranks. */
enum {
    PERI_HOST_COPY_PAST = 0,  /* bytes exchanged by all ranks of a machine at once, 0: never. Ask where there are
                                 PERI_HOST_COPY_LARGE */
    PERI_HOST_COPY_BLOCK = 1, /* bytes, PERI_HOST_COPY_BLOCK_MOST at most */
    PERI_HOST_COPY_BY = 2,    /* 0: the receiver, 1: the sender */
    PERI_HOST_COPY_NEAR = 3,  /* bytes; the ranks of a world have to agree */
    PERI_HOST_COPY_ROWS = 4,  /* 0: in their places, 1: through a block, 2: through a block and past the caches. Ask as
                                 for PAST */
    PERI_HOST_COPY_CHOICES = 5,
    PERI_HOST_COPY_LARGE = 24 << 20,
    PERI_HOST_COPY_BLOCK_MOST = 1 << 20
};

/** Inside a backend with a `static const peri_plugin_host *host`. */
#define PERI_HOST_FAIL(host, status, ...) ((host)->fail((status), __FILE__, __LINE__, __VA_ARGS__))

#endif
