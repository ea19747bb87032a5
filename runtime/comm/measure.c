/* SPDX-License-Identifier: Apache-2.0
 *
 * measure.c: the choices about copies between ranks of one machine, measured: each thread stands for a rank, and the
 * system's calls are those of ranks, from this process to itself. Ranks of one thread that measure at the same time see
 * each other's traffic.
 */
#include "../base/tune.h"

#include "../../kernels/route.h"
#include "../../kernels/work.h"

#include <sys/uio.h>
#include <unistd.h>

/* Bytes of a huge page; that all threads copy in a pass, of as many they read; that are copied in a pass about who
 * copies, by each thread: they stay in caches; of one call, as a rank claims them. */
enum { HUGE_PAGE = 2 << 20, ALL_BYTES = 24 << 20, NEAR_BYTES = 1 << 20, CLAIM = 1 << 20, MOST_THREADS = 64 };
/* Rows: bytes; of which that many come in one call. */
enum { ROW = 2 << 10, MOST_ROWS = 512 };

typedef struct copies {
    char *block, *from, *to, *bounce;
    size_t bytes;
    int32_t threads;
    int64_t part;   /* bytes of a thread */
    int32_t choice; /* that is measured */
    char *room[2];      /* where `from` and `to` are of the first pass */
    int64_t turn, turns; /* passes copy other bytes, and begin anew only when the caches hold none of the first any
                            more */
    int64_t past, rows, step;
    bool by_sender, fill;
    atomic_int failed;
} copies;

static peri_status copies_open(void **state)
{
    copies *m = peri__alloc_zero(sizeof *m);
    if (!m) return PERI_ENOMEM;
    *state = m;
    m->threads = (int32_t)peri__min(peri_threads(), MOST_THREADS);
    m->part = ALL_BYTES / m->threads & ~(int64_t)4095;
    m->turns = peri__max(1, (peri__tune_working_set(peri_cache_bytes()) + 2 * ALL_BYTES - 1) / (2 * ALL_BYTES));
    size_t half = (size_t)ALL_BYTES * (size_t)m->turns;
    m->bytes = 2 * half + (size_t)(m->threads + 1) * HUGE_PAGE;
    PERI_TRY(peri__tune_memory(m->bytes, &m->block));
    m->from = m->room[0] = m->block;
    m->to = m->room[1] = m->from + half;
    m->bounce = (char *)(((uintptr_t)m->to + half + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    return PERI_OK;
}

static void copies_close(void *state)
{
    copies *m = state;
    if (m) peri__tune_memory_free(m->block, m->bytes);
    peri__free(m);
}

/** One call of the system. */
static bool copy_by_system(bool read, char *here, const char *there, int64_t bytes)
{
    struct iovec a = {here, (size_t)bytes}, b = {(void *)(uintptr_t)there, (size_t)bytes};
    return (read ? process_vm_readv(getpid(), &a, 1, &b, 1, 0) : process_vm_writev(getpid(), &a, 1, &b, 1, 0)) == bytes;
}

/** Thread @i receives its part: in one copy, or through a block from which streaming stores take it. */
static bool receive_part(const copies *m, int64_t i)
{
    const char *from = m->from + i * m->part;
    char *to = m->to + i * m->part, *bounce = m->bounce + i * HUGE_PAGE;
    for (int64_t at = 0, n; at < m->part; at += n) {
        n = peri__min(m->part - at, m->past ? m->step : CLAIM);
        if (!copy_by_system(true, m->past ? bounce : to + at, from + at, n)) return false;
        if (!m->past) continue;
        peri_k_run whole = {.n = n};
        peri_k_route_place_args args = {.dst = to + at, .received = bounce, .runs = &whole, .width = 1, .past = true};
        peri_kernels_get()->fn[PERI_K_route_place](&args, 0, 1);
    }
    return true;
}

/** Thread @i receives its part as every other row of a result: in their places, or through a block. */
static bool receive_rows(const copies *m, int64_t i)
{
    const int64_t part = m->part / (2 * ROW) * ROW, most = m->rows ? m->step : MOST_ROWS * ROW;
    const char *from = m->from + i * m->part;
    char *to = m->to + i * m->part, *bounce = m->bounce + i * HUGE_PAGE;
    for (int64_t at = 0, n; at < part; at += n) {
        n = peri__min(part - at, most);
        peri_k_run lines = {.n = ROW};
        peri_k_route_place_args args = {.dst = to + 2 * at,
                                        .received = bounce,
                                        .runs = &lines,
                                        .width = 1,
                                        .lines = n / ROW,
                                        .step = 2 * ROW,
                                        .past = m->rows == 2};
        if (m->rows) {
            if (!copy_by_system(true, bounce, from + at, n)) return false;
            peri_kernels_get()->fn[PERI_K_route_place](&args, 0, n / ROW);
            continue;
        }
        struct iovec there = {(void *)(uintptr_t)(from + at), (size_t)n}, here[MOST_ROWS];
        for (int64_t k = 0; k < n / ROW; k++) here[k] = (struct iovec){to + 2 * (at + k * ROW), ROW};
        if (process_vm_readv(getpid(), here, (size_t)(n / ROW), &there, 1, 0) != n) return false;
    }
    return true;
}

/** Thread @i writes what it will send, or copies: what comes from the next thread, or what goes to it. */
static bool send_part(const copies *m, int64_t i)
{
    int64_t next = (i + 1) % m->threads;
    if (m->fill) {
        memset(m->from + i * m->part, (int)i, NEAR_BYTES);
        memset(m->to + i * m->part, (int)i, NEAR_BYTES);
        return true;
    }
    if (m->by_sender) return copy_by_system(false, m->from + i * m->part, m->to + next * m->part, NEAR_BYTES);
    return copy_by_system(true, m->to + i * m->part, m->from + next * m->part, NEAR_BYTES);
}

static void copies_range(void *ctx, int64_t begin, int64_t end)
{
    copies *m = ctx;
    for (int64_t i = begin; i < end; i++) {
        bool ok = m->choice == PERI__TUNE_copy_by     ? send_part(m, i)
                  : m->choice == PERI__TUNE_copy_rows ? receive_rows(m, i)
                                                      : receive_part(m, i);
        if (!ok) atomic_store(&m->failed, 1);
    }
}

static int64_t copies_pass(void *state, int32_t choice)
{
    copies *m = state;
    m->choice = choice;
    int64_t at = choice == PERI__TUNE_copy_by ? 0 : m->turn++ % m->turns * ALL_BYTES;
    m->from = m->room[0] + at;
    m->to = m->room[1] + at;
    m->past = choice == PERI__TUNE_copy_block ? 1 : peri__tune(PERI__TUNE_copy_past);
    m->step = peri__tune(PERI__TUNE_copy_block);
    m->rows = peri__tune(PERI__TUNE_copy_rows);
    m->by_sender = peri__tune(PERI__TUNE_copy_by) == 1;
    if (choice == PERI__TUNE_copy_by) {
        if (m->threads < 2 || m->part < NEAR_BYTES) return 0;
        m->fill = true;
        peri__parallel_for(m->threads, 1, copies_range, m);
        m->fill = false;
    }
    int64_t from = peri_time_ns();
    peri__parallel_for(m->threads, 1, copies_range, m);
    int64_t ns = peri_time_ns() - from;
    return atomic_load(&m->failed) ? -1 : peri__max(ns, 1);
}

__attribute__((constructor)) static void offer_meter(void)
{
    static const peri__tune_meter meter = {copies_open, copies_pass, copies_close};
    peri__tune_offer(PERI__TUNE_COPY, &meter);
}
