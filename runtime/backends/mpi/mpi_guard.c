/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_guard.c: calls of MPI that never wait, and a thread that sees when one of them does not come back.
 *
 * When a process of another machine is killed, Open MPI 4.1 can be caught within MPI_Test: its TCP transport finds the
 * connection broken while it sends, closes it, and then all the same adds the event of sending; the next message to
 * that process sets the event anew while libevent still has it in a list, which is a ring from then on. Nothing brings
 * such a thread back, and no deadline of this library is looked at. So another thread counts: it says what happened and
 * ends the process, which mpirun and the other ranks see.
 */
#include "mpi_internal.h"

#include <inttypes.h>
#include <time.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)
#define TICK   (SECOND / 4)
#define LEAST  (5 * SECOND)  /* that a call may take: a crowded machine, memory that is swapped out */
#define MOST   (15 * SECOND)
#define BUSY   (4 * SECOND)  /* of processor time that it may use: it copies some pieces of 1 GiB at most, each in less
                                than a second */

static struct {
    atomic_uint_least64_t calls; /* begun and returned: odd within one. Written by one thread at a time
                                    (MPI_THREAD_SERIALIZED) */
    atomic_int clock;            /* of the processor time of the thread that began the last one */
    atomic_int_least64_t limit;  /* ns; 0: the thread was not started */
} guard;

static void count_call(void)
{
    atomic_store_explicit(&guard.calls, atomic_load_explicit(&guard.calls, memory_order_relaxed) + 1,
                          memory_order_release);
}

static void begin_call(void)
{
    static _Thread_local clockid_t own; /* 0, the time of day, is no thread's */
    if (own == 0 && pthread_getcpuclockid(pthread_self(), &own)) own = 0;
    atomic_store_explicit(&guard.clock, own, memory_order_relaxed);
    count_call();
}

int peri__mpi_test_all(int n, MPI_Request *requests, int *flag, MPI_Status *statuses)
{
    begin_call();
    int code = MPI_Testall(n, requests, flag, statuses);
    count_call();
    return code;
}

int peri__mpi_test_one(MPI_Request *request, int *flag, MPI_Status *status)
{
    begin_call();
    int code = MPI_Test(request, flag, status);
    count_call();
    return code;
}

int peri__mpi_send(const void *data, int bytes, int to, int tag, MPI_Comm comm, MPI_Request *request)
{
    begin_call();
    int code = MPI_Isend(data, bytes, MPI_BYTE, to, tag, comm, request);
    count_call();
    return code;
}

/** Why, as far as this process had heard, and the end. Nobody writes what is read here: who would is caught. */
static void give_up(int64_t limit, const char *of_what)
{
    const char *why = "";
    uint64_t operation = 0;
    for (const mpi_group *g = peri__mpi.groups; g; g = g->next) {
        if (g->failed < 0) why = g->message;
        if (g->active) operation = g->active->op.sequence;
    }
    char host[48] = "", which[48] = "";
    gethostname(host, sizeof host - 1);
    if (operation) snprintf(which, sizeof which, " during operation %" PRIu64, operation);
    dprintf(STDERR_FILENO,
            "perilune: rank %d of the world (%s, process %lld): a call of MPI that never waits has not come back for "
            "%d s%s%s: the "
            "process at the other end of a connection was probably killed%s%s. This process ends.\n",
            peri__mpi.rank, host, (long long)getpid(), (int)(limit / SECOND), of_what, which, why[0] ? ": " : "", why);
    _exit(1);
}

/** The processor time of the thread that began the last call, or -1: it is no more. */
static int64_t processor_time(void)
{
    struct timespec t;
    clockid_t clock = atomic_load_explicit(&guard.clock, memory_order_relaxed);
    return clock && clock_gettime(clock, &t) == 0 ? t.tv_sec * SECOND + t.tv_nsec : -1;
}

/** Ticks are counted, not time: a stopped process has none. A thread that is caught does nothing but write about a
 *  connection, as fast as it can, into what may have to carry it to another machine: it is given less time than one
 *  that sleeps. */
static void *watch(void *unused)
{
    (void)unused;
    uint64_t last = 0;
    int64_t used = -1; /* by the thread when the call was first seen */
    for (int64_t ticks = 0;;) {
        struct timespec tick = {.tv_nsec = TICK};
        nanosleep(&tick, NULL);
        uint64_t now = atomic_load_explicit(&guard.calls, memory_order_acquire);
        bool same = now % 2 && now == last;
        ticks = same ? ticks + 1 : 0;
        last = now;
        if (now % 2 == 0) continue;
        int64_t time = processor_time(), limit = atomic_load(&guard.limit);
        if (!same || used < 0) used = time;
        if (ticks * TICK >= limit) give_up(limit, "");
        if (time >= 0 && time - used >= BUSY) give_up(BUSY, " of processor time");
    }
    return NULL;
}

peri_status peri__mpi_guard_start(int64_t timeout_ns)
{
    bool started = atomic_load(&guard.limit) != 0;
    atomic_store(&guard.limit, timeout_ns < LEAST ? LEAST : timeout_ns > MOST ? MOST : timeout_ns);
    if (started) return PERI_OK;
    pthread_t thread;
    int error = peri__mpi_host->thread_start(&thread, watch, NULL);
    if (error) {
        atomic_store(&guard.limit, 0);
        return FAIL(PERI_ENOMEM, "mpi: no thread could be started (error %d)", error);
    }
    pthread_detach(thread);
    return PERI_OK;
}
