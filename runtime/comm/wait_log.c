/* SPDX-License-Identifier: Apache-2.0
 *
 * wait_log.c: what a rank waits for. While a world is watched every operation that ends is noted, and every stretch of
 * time in which the rank could not go on, with the operation whose end ended it. Numbers of operations are equal on all
 * ranks, so that these can find out afterwards who came last.
 *
 * A wait begins when a loop that can do nothing but test says so. It ends with the first operation found complete by a
 * test of that loop: outside of any step, or in the step of the work that it waits for, whose phases are so told apart.
 * What else completes meanwhile, in steps of other works, ends no wait.
 */
#include "../base/buffer.h"
#include "comm_internal.h"

void peri__watch_waits(peri__comm *comm, const peri_work *awaited)
{
    peri__watch *w = &comm->watch;
    if (!w->on || w->from) return;
    w->from = peri_time_ns();
    w->awaited = awaited;
}

int64_t peri__watch_ended(peri_group *group, uint64_t sequence, int32_t channel, int64_t bytes, int64_t posted_ns)
{
    peri__watch *w = &group->comm->watch;
    if (!w->on || !posted_ns) return 0;
    /* without memory for more: what is noted is what there is */
    w->on = peri__grow((void **)&w->ops, &w->room_ops, w->n_ops + 1, sizeof *w->ops) >= 0;
    if (!w->on) return 0;
    w->ops[w->n_ops++] = (peri_watched_op){.group = group->tag,
                                           .sequence = sequence,
                                           .posted_ns = posted_ns,
                                           .done_ns = peri_time_ns(),
                                           .bytes = bytes,
                                           .channel = channel};
    return w->before + w->n_ops;
}

/** The wait of now ends with operation @number, unless that was complete before or is not noted. */
static void close_wait(peri__watch *w, int64_t number)
{
    if (!w->from || number <= w->before) return;
    const int64_t op = number - w->before - 1, done = w->ops[op].done_ns;
    if (done < w->from) return;
    w->on = peri__grow((void **)&w->waits, &w->room_waits, w->n_waits + 1, sizeof *w->waits) >= 0;
    if (w->on) w->waits[w->n_waits++] = (peri_watched_wait){.from_ns = w->from, .to_ns = done, .op = op};
    w->from = 0;
}

void peri__watch_found(peri__comm *comm, const peri_work *work)
{
    peri__watch *w = &comm->watch;
    w->seen = peri__max(w->seen, work->ended_by);
    const bool waiter = !comm->stepping && comm->within == 0;
    if (w->within || waiter) close_wait(w, work->ended_by);
    if (waiter && work == w->awaited) w->from = 0;
}

void peri__watch_fini(peri__watch *w)
{
    peri__free(w->ops);
    peri__free(w->waits);
    *w = (peri__watch){0};
}

peri_status peri_group_watch_set(peri_group *group, bool on)
{
    PERI_NEED(group);
    peri__watch *w = &group->comm->watch;
    if (on && !w->on) {
        w->before += w->n_ops;
        w->n_ops = w->n_waits = 0;
    }
    w->on = on;
    w->from = 0;
    return PERI_OK;
}

void peri_group_watched(const peri_group *group, const peri_watched_op **ops, int64_t *n_ops,
                        const peri_watched_wait **waits, int64_t *n_waits)
{
    static const peri__watch none;
    const peri__watch *w = group ? &group->comm->watch : &none;
    if (ops) *ops = w->ops;
    if (n_ops) *n_ops = w->n_ops;
    if (waits) *waits = w->waits;
    if (n_waits) *n_waits = w->n_waits;
}

void peri_group_waits(peri_group *group) { if (group) peri__watch_waits(group->comm, NULL); }
void peri_work_waits(peri_work *work) { if (work) peri__watch_waits(work->group->comm, work); }
