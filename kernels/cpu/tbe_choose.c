/* SPDX-License-Identifier: Apache-2.0
 *
 * tbe_choose.c: the kernels of table batches whose work is that of other units: lookups by the format of rows, updates
 * by the optimizer.
 */
#include "tbe_forward.h"
#include "tbe_update.h"

static void cpu_tbe_forward(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_forward_args *a = args;
    const peri_k_tbe_list *s = &a->list;
    tbe_place at = tbe_seek(s, begin, a->chunks), stop = tbe_seek(s, end, a->chunks);
    tbe_walk w = {.a = a};
    w.past_caches = a->out_dtype == PERI_F32 && (uintptr_t)a->out % TBE_LINE == 0 && a->reach.past > 0 &&
                    s->spans[s->n_blocks].cost * tbe_unit(a->weight_dtype) >= a->reach.past;
    switch (a->weight_dtype) {
#define X(name)                                                                                                        \
    case TBE_FORMAT_##name: K_SHARED(tbe_forward_##name)(&w, at, stop); break;
        TBE_FORMATS(X)
#undef X
    default: break;
    }
    if (w.past_caches) _mm_sfence();
    if (a->report) tbe_count_merge(a->report, &w.count);
}

/** Whose function updates the rows. */
static int32_t tbe_function_of(int32_t kind)
{
    return kind == PERI_TBE_ROWWISE_ADAGRAD_WITH_COUNTER ? PERI_TBE_ROWWISE_RMSPROP_AR : kind;
}

static void cpu_tbe_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_update_args *a = args;
    switch (tbe_function_of(a->optimizer.kind)) {
#define X(kind)                                                                                                        \
    case PERI_TBE_##kind: K_SHARED(tbe_update_##kind)(a, begin, end); break;
        TBE_KINDS(X, X)
#undef X
    default: break;
    }
}

static void cpu_tbe_dense_update(const void *args, int64_t begin, int64_t end)
{
    const peri_k_tbe_dense_update_args *a = args;
    switch (tbe_function_of(a->optimizer.kind)) {
#define NOTHING(kind)
#define X(kind)                                                                                                        \
    case PERI_TBE_##kind: K_SHARED(tbe_dense_##kind)(a, begin, end); break;
        TBE_KINDS(X, NOTHING)
#undef X
#undef NOTHING
    default: break;
    }
}

tbe_batches *tbe_batches_of(const peri_k_tbe_update_args *a, const peri_k_tbe_table *t)
{
    const peri_k_tbe_optimizer *o = &a->optimizer;
    if (o->exact || o->decay == PERI_DECAY_L2 || o->max_norm > 0) return NULL;
    if (t->col_offset % 32 != 0 && a->rows.weight_dtype != PERI_F32) return NULL;
    switch (a->rows.weight_dtype) {
    case PERI_F16: return K_SHARED(tbe_batches_f16)(o->kind, t->cols);
    case PERI_BF16: return K_SHARED(tbe_batches_bf16)(o->kind, t->cols);
    default: return K_SHARED(tbe_batches_f32)(o->kind, t->cols);
    }
}
