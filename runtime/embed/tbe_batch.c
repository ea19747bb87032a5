/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_batch.c: batches on their way through a table batch: an input, and what lookup, prefetch and update compute
 * from it once.
 */
#include "embed_internal.h"
#include "../tensor/capture.h"

enum { MOST_IDLE_SORTED = 4 }; /* kept for later batches; the rest is freed */

/* -- taking and giving --------------------------------------------------------------------------------------------- */

static void batch_free(peri_tbe_batch *b)
{
    if (!b) return;
    peri__free_after(&b->spans, b->done);
    peri__free_after(&b->report, b->done);
    peri_event_release(b->done);
    peri__object_count(-1);
    peri__free(b);
}

static peri_status batch_make(peri_tbe *tbe, peri_tbe_batch **out)
{
    peri_tbe_batch *b = peri__alloc_zero(sizeof *b);
    if (!b) return PERI_ENOMEM;
    peri__object_count(1);
    b->tbe = tbe;
    atomic_flag_clear(&b->busy);
    peri_status status = peri_event_new(tbe->device, &b->done);
    if (status < 0) batch_free(b);
    else *out = b;
    return status;
}

peri_status peri__batch_acquire(peri_tbe *tbe, const peri_tbe_input *in, peri_tbe_batch **out)
{
    pthread_mutex_lock(&tbe->small);
    peri_tbe_batch *b = tbe->idle;
    if (b) tbe->idle = b->next;
    pthread_mutex_unlock(&tbe->small);
    if (!b) PERI_TRY(batch_make(tbe, &b));
    peri__refs_init(&b->refs);
    b->next = NULL;
    b->in = *in;
    b->prepared = false;
    b->alike = NULL;
    b->there = NULL;
    peri_tensor_retain(in->ids);
    peri_tensor_retain(in->offsets);
    if (in->weights) peri_tensor_retain(in->weights);
    if (in->scale) peri_tensor_retain(in->scale);
    peri_tbe_blocks_retain(in->blocks);
    *out = b;
    return PERI_OK;
}

void peri__batch_recycle(peri_tbe_batch *b)
{
    if (!b) return;
    peri_tbe *tbe = b->tbe;
    (void)peri__tbe_wait_event(tbe,
                               b->done); /* a tier's own batches are used within others' calls, on the stream that is
                                         current now */
    (void)peri__tbe_record_event(tbe, b->done);
    peri__batch_redirect_end(b);
    peri_tensor_release(b->in.ids);
    peri_tensor_release(b->in.offsets);
    peri_tensor_release(b->in.weights);
    peri_tensor_release(b->in.scale);
    /* The list's memory is freed in the order of the stream that made it. */
    if (!peri__device_is_captured(tbe->device))
        (void)tbe->device->vtab->stream_wait(tbe->device->ctx, b->in.blocks->copy->storage->home->ctx, b->done->ctx);
    peri_tbe_blocks_release(b->in.blocks);
    b->in = (peri_tbe_input){0};
    pthread_mutex_lock(&tbe->small); /* all are kept: as many callers at once allocate nothing the next time */
    b->next = tbe->idle;
    tbe->idle = b;
    pthread_mutex_unlock(&tbe->small);
}

static void sorted_free(peri__sorted *s)
{
    if (!s) return;
    for (int i = 0; i < PERI__SORT_ROOMS; i++) peri__free_after(&s->room[i], s->done);
    peri_event_release(s->done);
    peri__free(s);
}

peri_status peri__sorted_acquire(peri_tbe *tbe, peri__sorted **out)
{
    pthread_mutex_lock(&tbe->small);
    peri__sorted *s = tbe->idle_sorted;
    if (s) {
        tbe->idle_sorted = s->next;
        tbe->n_idle_sorted--;
    }
    pthread_mutex_unlock(&tbe->small);
    peri_status status = PERI_OK;
    if (!s) {
        s = peri__alloc_zero(sizeof *s);
        if (!s) return PERI_ENOMEM;
        status = peri_event_new(tbe->device, &s->done);
    }
    if (status >= 0) status = peri__tbe_wait_event(tbe, s->done);
    if (status < 0) sorted_free(s);
    else *out = s;
    return status;
}

void peri__sorted_recycle(peri_tbe_batch *b)
{
    peri__sorted *s = b->sorted;
    peri_tbe *tbe = b->tbe;
    if (!s) return;
    b->sorted = NULL;
    /* Within a call its kernels are on the current stream; else they are before `done`. */
    (void)peri__tbe_wait_event(tbe, b->done);
    (void)peri__tbe_record_event(tbe, s->done);
    pthread_mutex_lock(&tbe->small);
    bool keep = tbe->n_idle_sorted < MOST_IDLE_SORTED;
    if (keep) {
        s->next = tbe->idle_sorted;
        tbe->idle_sorted = s;
        tbe->n_idle_sorted++;
    }
    pthread_mutex_unlock(&tbe->small);
    if (!keep) sorted_free(s);
}

void peri__calls_fini(peri_tbe *tbe)
{
    for (peri_tbe_batch *b = tbe->idle, *next; b; b = next) {
        next = b->next;
        batch_free(b);
    }
    for (peri__sorted *s = tbe->idle_sorted, *next; s; s = next) {
        next = s->next;
        sorted_free(s);
    }
    peri_event_release(tbe->changed);
    peri_event_release(tbe->looked);
    peri_event_release(tbe->counted);
    pthread_mutex_destroy(&tbe->small);
    pthread_rwlock_destroy(&tbe->lock);
}

void peri__batch_redirect_end(peri_tbe_batch *b)
{
    peri__sorted_recycle(b); /* if the pass failed: other gradients lie elsewhere */
    if (!b->there) return;
    if (!peri__device_is_captured(b->tbe->device))
        (void)peri_stream_wait(b->there->copy->storage->home, b->done); /* in its order the list's memory is freed */
    peri_tbe_blocks_release(b->there);
    b->there = NULL;
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

peri_status peri__batch_enter(const char *function, peri_tbe_batch *b, bool alone)
{
    if (atomic_flag_test_and_set_explicit(&b->busy, memory_order_acquire))
        return peri__fail(PERI_EINVAL,
                          "%s: another thread is in a call with this batch; threads want batches of their own",
                          function);
    peri_status status = peri__tbe_enter(b->tbe, alone);
    if (status >= 0) {
        status = peri__tbe_wait_event(b->tbe, b->done);
        if (status < 0) status = peri__tbe_leave(b->tbe, alone, status);
    }
    if (status < 0) atomic_flag_clear_explicit(&b->busy, memory_order_release);
    return status;
}

peri_status peri__batch_leave(peri_tbe_batch *b, bool alone, peri_status status)
{
    status = peri__batch_out_of_memory(b, status);
    peri_status left = peri__tbe_record_event(b->tbe, b->done);
    status = peri__tbe_leave(b->tbe, alone, status < 0 ? status : left < 0 ? left : status);
    atomic_flag_clear_explicit(&b->busy, memory_order_release);
    return status;
}

void peri__batch_share_spans(peri_tbe_batch *b, peri_tbe_batch *other)
{
    const peri_tbe_blocks *x = b->in.blocks, *y = other->in.blocks;
    if (b == other || b->alike || b->tbe != other->tbe || b->in.offsets != other->in.offsets ||
        peri__numel(b->in.ids) != peri__numel(other->in.ids) || x->n != y->n || x->multiplicity != y->multiplicity)
        return;
    for (int64_t k = 0; k < x->n; k++)
        if (x->block[k].first_bag != y->block[k].first_bag || x->block[k].bags != y->block[k].bags ||
            x->block[k].table != y->block[k].table)
            return;
    peri__refs_add(&other->refs);
    b->alike = other;
}

/** Within a call that is alone in the table batch, which all later calls follow: exchange the spans of a batch that has
 *  none yet with those of the one that is alike, if that has some. */
static peri_status take_spans(peri_tbe_batch *b)
{
    peri_tbe_batch *from = b->alike;
    if (!from || !peri__tbe_in_call_alone(b->tbe) ||
        atomic_flag_test_and_set_explicit(&from->busy, memory_order_acquire))
        return PERI_OK;
    peri_status status = from->prepared ? peri__tbe_wait_event(b->tbe, from->done) : PERI_OK;
    if (from->prepared && status >= 0) {
        peri_tensor *spans = b->spans;
        b->spans = from->spans;
        from->spans = spans;
        b->prepared = true;
        from->prepared = false;
    }
    atomic_flag_clear_explicit(&from->busy, memory_order_release);
    return status;
}

peri_status peri__batch_kernel_list(peri_tbe_batch *b, bool count, peri_k_tbe_list *out)
{
    peri_tbe *tbe = b->tbe;
    const peri_tbe_input *in = &b->in;
    const peri_tbe_blocks *l = in->blocks;
    const peri_tbe_blocks *there = b->there ? b->there : l;
    const peri__bag_places places = b->there ? b->bag_places : (peri__bag_places){0};
    const peri_k_tbe_block *blocks = peri__data(there->copy);
    int64_t n_ids = peri__numel(in->ids);
    void *spans;
    if (!count && !b->prepared) PERI_TRY(take_spans(b));
    PERI_TRY(
        peri__reserve(tbe->device, &b->spans, b->done, PERI_U8, (int64_t)sizeof(peri_k_tbe_span) * (l->n + 1), &spans));
    *out = (peri_k_tbe_list){.ids = peri__data(in->ids),
                               .offsets = peri__data(in->offsets),
                               .weights = in->weights ? peri__data(in->weights) : NULL,
                               .scale = in->scale ? peri__data(in->scale) : NULL,
                               .tables = peri__data(tbe->layout_tensor),
                               .blocks = blocks,
                               .ordered = blocks,
                               .spans = spans,
                               .n_ids = n_ids,
                               .n_bags = peri__numel(in->offsets) - 1,
                               .n_tables = tbe->n_tables,
                               .n_blocks = l->n,
                               .capacity = n_ids * l->multiplicity,
                               .ids_dtype = in->ids->dtype,
                               .offsets_dtype = in->offsets->dtype,
                               .places = places.place,
                               .first_placed = places.first,
                               .n_placed = places.n,
                               .all_bags = l->total_bags,
                               .most_bags = l->largest,
                               .width = l->width};
    if (b->there) PERI_TRY(peri__tbe_wait_event(tbe, there->copied));
    if (b->prepared && !count) return PERI_OK;
    peri_k_tbe_prepare_args args = {.list = *out, .totals = count ? peri__data(tbe->counters) : NULL};
    PERI_TRY(peri__tbe_wait_event(tbe, l->copied));
    PERI_TRY(count ? peri__tbe_queue_counting(tbe, PERI_OP_tbe_prepare, &args, sizeof args)
                   : PERI_RUN(tbe->device, tbe_prepare, &args));
    b->prepared = true;
    return PERI_OK;
}

peri_status peri__batch_report(peri_tbe_batch *b, peri_k_tbe_report **out)
{
    int64_t words = PERI__REPORT_WORDS;
    if (!b->report) PERI_TRY(peri_tensor_new(b->tbe->device, PERI_I64, 1, &words, &b->report));
    *out = peri__data(b->report);
    return peri__report_reset(b->report);
}
