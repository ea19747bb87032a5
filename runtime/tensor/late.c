/* SPDX-License-Identifier: Apache-2.0
 *
 * late.c: reports that are judged after the call that asked for them, so that no call waits for its device.
 */
#include "capture.h"
#include "report.h"

#include <perilune/device.h>

#include <pthread.h>
#include <stdio.h>

/** A report that has not been judged. */
typedef struct late {
    struct late *next;
    peri__report *report;
    peri__late_what what;
    const void *thread; /* who asked for it: a thread, and for whom it worked then (peri_late_owner) */
    uint64_t owner;
} late;

static struct {
    pthread_mutex_t lock;
    late *first, **last;
    atomic_int_least64_t n;
} list = {.lock = PTHREAD_MUTEX_INITIALIZER, .last = &list.first};
PERI_FORK_LOCK(list.lock, PERI__FORK_LATE)

static _Thread_local uint64_t working_for;

uint64_t peri_late_owner(uint64_t owner)
{
    const uint64_t before = working_for;
    working_for = owner;
    return before;
}

peri_status peri__late_add(peri__report *report, const peri__late_what *what)
{
    late *l = peri__alloc(sizeof *l);
    if (!l) return PERI_ENOMEM;
    *l = (late){.report = report, .what = *what, .thread = &working_for, .owner = working_for};
    pthread_mutex_lock(&list.lock);
    *list.last = l;
    list.last = &l->next;
    atomic_fetch_add_explicit(&list.n, 1, memory_order_relaxed);
    pthread_mutex_unlock(&list.lock);
    return PERI_OK;
}

/** Whose reports are taken. */
typedef struct wanted {
    const peri_device *device; /* NULL: of all devices */
    const peri__unheard *of;   /* NULL: of all */
    int64_t before;            /* reports of earlier turns are taken whether they are there or not */
    bool all_askers;           /* not only this thread's */
} wanted;

static bool report_is_wanted(const late *l, const wanted *w)
{
    if (!w->all_askers && (l->thread != &working_for || l->owner != working_for)) return false;
    if ((w->of && l->what.of != w->of) || (w->device && l->report->device != w->device)) return false;
    return l->what.turn < w->before || peri__report_test(l->report) == PERI_OK;
}

/** Take the oldest that matches off the list; NULL: none does. */
static late *take(const wanted *w)
{
    late *found = NULL;
    if (atomic_load_explicit(&list.n, memory_order_relaxed) == 0) return NULL;
    pthread_mutex_lock(&list.lock);
    for (late **at = &list.first; *at; at = &(*at)->next) {
        if (!report_is_wanted(*at, w)) continue;
        found = *at;
        *at = found->next;
        if (!found->next) list.last = at;
        atomic_fetch_sub_explicit(&list.n, 1, memory_order_relaxed);
        break;
    }
    pthread_mutex_unlock(&list.lock);
    return found;
}

static peri_status judge_report(late *l)
{
    peri_status status = peri__report_wait(l->report);
    const peri__late_what *what = &l->what;
    if (status >= 0) status = what->judge(what->function, l->report->words, what->with);
    if (what->fini) what->fini(what->with);
    peri__report_return(l->report);
    peri__free(l);
    return status;
}

static peri_status judge_reports(const wanted *w)
{
    peri_status status = PERI_OK;
    for (late *l; status >= 0 && (l = take(w));) status = judge_report(l);
    if (status >= 0) return PERI_OK;
    char text[PERI_MESSAGE_MAX];
    snprintf(text, sizeof text, "%s", peri_error_message());
    return peri__fail(status, "%s (of an earlier lookup)", text);
}

peri_status peri__late_of(const peri__unheard *of, int64_t before)
{
    return judge_reports(&(wanted){.of = of, .before = before});
}

peri_status peri__late_on(const peri_device *device)
{
    if (peri__device_is_captured(device)) return PERI_OK; /* asking the device is no part of a recording */
    return judge_reports(&(wanted){.device = device, .before = INT64_MIN});
}

void peri__late_drop(const peri__unheard *of)
{
    const wanted w = {.of = of, .before = INT64_MAX, .all_askers = true};
    for (late *l; (l = take(&w));) {
        peri__error kept;
        peri__error_keep(&kept);
        if (judge_report(l) < 0)
            peri__log(PERI_LOG_WARN, "%s (of the last lookup in these tables, which nobody asked about again)",
                      peri_error_message());
        peri__error_restore(&kept);
    }
}

/* -- how many ------------------------------------------------------------------------------------------------------ */

bool peri__unheard_take(peri__unheard *unheard)
{
    int32_t left = atomic_load(&unheard->left);
    while (left > 0 && !atomic_compare_exchange_weak(&unheard->left, &left, left - 1)) continue;
    return left > 0;
}

void peri__unheard_passed(peri__unheard *unheard)
{
    enum { MOST = 64 }; /* lookups in a step, of which none waits */
    atomic_fetch_add(&unheard->passes, 1);
    int32_t left = atomic_load(&unheard->left);
    while (left < MOST && !atomic_compare_exchange_weak(&unheard->left, &left, left + 1)) continue;
}

/* -- waiting ------------------------------------------------------------------------------------------------------- */

peri_status peri_stream_synchronize(peri_stream *stream)
{
    PERI_NEED(stream);
    PERI_TRY(peri__stream_dry(stream));
    return peri__late_on(stream->device);
}

peri_status peri_device_synchronize(peri_device *device)
{
    PERI_NEED(device);
    PERI_TRY(peri__device_dry(device));
    return peri__late_on(device);
}
