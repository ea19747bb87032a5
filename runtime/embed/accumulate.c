/* SPDX-License-Identifier: Apache-2.0
 *
 * accumulate.c: gradients of several micro-batches, applied as those of one batch. They are kept as they came, ids and
 * upstream gradients, and concatenated when they are applied: summed per row earlier, they would round differently from
 * the large batch, and adaptive optimizers would have to hold back in any case.
 */
#include "embed_internal.h"
#include "../../kernels/convert.h"

/** A backward pass that was kept. All retained. */
typedef struct peri__kept {
    peri_tbe_input in;
    peri_tensor *grad;
    int64_t first_id, first_offset, first_grad; /* where it begins in the joined batch */
} peri__kept;

static void pass_fini(peri__kept *k)
{
    peri_tensor_release(k->in.ids);
    peri_tensor_release(k->in.offsets);
    peri_tensor_release(k->in.weights);
    peri_tensor_release(k->in.scale);
    peri_tbe_blocks_release(k->in.blocks);
    peri_tensor_release(k->grad);
}

/** Drop all kept backward passes. */
static void drop_passes(peri_tbe *tbe)
{
    for (int64_t i = 0; i < tbe->n_kept; i++) pass_fini(&tbe->kept[i]);
    tbe->n_kept = 0;
}

void peri__tbe_accumulated_free(peri_tbe *tbe)
{
    drop_passes(tbe);
    peri__free(tbe->kept);
    tbe->kept = NULL;
    tbe->room_kept = 0;
}

peri_status peri__tbe_accumulate_pass(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *grad)
{
    if (tbe->n_kept == tbe->room_kept) {
        int64_t room = tbe->room_kept ? 2 * tbe->room_kept : 8;
        peri__kept *more = peri__alloc(sizeof *more * (size_t)room);
        if (!more) return PERI_ENOMEM;
        if (tbe->n_kept) memcpy(more, tbe->kept, sizeof *more * (size_t)tbe->n_kept);
        peri__free(tbe->kept);
        tbe->kept = more;
        tbe->room_kept = room;
    }
    peri__kept *k = &tbe->kept[tbe->n_kept++];
    *k = (peri__kept){.in = *in, .grad = grad};
    peri_tensor_retain(in->ids);
    peri_tensor_retain(in->offsets);
    if (in->weights) peri_tensor_retain(in->weights);
    if (in->scale) peri_tensor_retain(in->scale);
    peri_tbe_blocks_retain(in->blocks);
    peri_tensor_retain(grad);
    return PERI_OK;
}

/* -- concatenation ------------------------------------------------------------------------------------------------- */

/** What all kept passes have together. */
typedef struct totals {
    int64_t ids, offsets, grad, blocks, longest; /* longest: most blocks of one */
    int32_t ids_dtype;
    bool weights, scale;
} totals;

/** Widest rows of blocks that do not pool. */
static int64_t widest_rows(const peri_tbe *tbe)
{
    int64_t most = 0;
    for (int64_t i = 0; i < tbe->n_kept; i++) {
        const peri_tbe_blocks *b = tbe->kept[i].in.blocks;
        for (int64_t k = 0; k < b->n && b->none; k++)
            if (tbe->layout[b->block[k].table].pooling == PERI_POOLING_NONE)
                most = peri__max(most, b->block[k].out_stride);
    }
    return most;
}

/** Place the passes one behind the other. Without pooling the gradient of id i lies at out_offset + i * out_stride, i
 *  in the joined ids, so gradients keep so much distance that no out_offset becomes negative. */
static totals place_passes(peri_tbe *tbe)
{
    totals all = {.ids_dtype = PERI_I32};
    int64_t stride = widest_rows(tbe);
    for (int64_t i = 0; i < tbe->n_kept; i++) {
        peri__kept *k = &tbe->kept[i];
        k->first_id = all.ids;
        k->first_offset = all.offsets;
        k->first_grad = peri__max(all.grad, all.ids * stride);
        all.ids += peri__numel(k->in.ids);
        all.offsets += peri__numel(k->in.offsets);
        all.grad = k->first_grad + peri__numel(k->grad);
        all.blocks += k->in.blocks->n;
        all.longest = peri__max(all.longest, k->in.blocks->n);
        all.weights = all.weights || k->in.weights;
        all.scale = all.scale || k->in.scale;
        if (k->in.ids->dtype != PERI_I32) all.ids_dtype = PERI_I64;
    }
    return all;
}

enum { PART_IDS, PART_WEIGHTS, PART_SCALE, PART_GRADIENT };

/** Copy part @which of @k to its place in @dst, ones where it has none. */
static peri_status join_part(const peri_tbe *tbe, const peri__kept *k, int which, peri_tensor *dst)
{
    peri_tensor *const parts[] = {k->in.ids, k->in.weights, k->in.scale, k->grad};
    const int64_t places[] = {k->first_id, k->first_id, k->first_offset, k->first_grad};
    peri_tensor *from = parts[which], *to = NULL, *flat = NULL;
    int64_t count = peri__numel(from ? from : which == PART_SCALE ? k->in.offsets : k->in.ids);
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_view(dst, 1, &count, NULL, places[which], &to), out);
    if (from) {
        PERI_TRY_GOTO(peri__tensor_view(from, 1, &count, NULL, from->offset, &flat), out);
        status = peri_tensor_copy(to, flat);
    } else {
        peri_k_fill_args ones = {.dst = peri__data(to), .dtype = PERI_F32, .value = 1};
        status = PERI_LAUNCH(tbe->device, fill, &ones, count, 1 << 14);
    }
out:
    peri_tensor_release(to);
    peri_tensor_release(flat);
    return status;
}

/** Part @which of all passes, in n elements. */
static peri_status join_passes(const peri_tbe *tbe, int32_t dtype, int64_t n, int which, peri_tensor **out)
{
    PERI_TRY(peri_tensor_new(tbe->device, dtype, 1, &n, out));
    for (int64_t i = 0; i < tbe->n_kept; i++) PERI_TRY(join_part(tbe, &tbe->kept[i], which, *out));
    return PERI_OK;
}

/** Offsets into the joined ids: pass i has as many bags as entries, of which the last, between two passes, is
 *  nobody's. */
static peri_status join_offsets(const peri_tbe *tbe, const totals *all, peri_tensor **out)
{
    int64_t n = all->offsets + 1;
    PERI_TRY(peri_tensor_full(tbe->device, PERI_I64, 1, &n, (double)all->ids, out));
    for (int64_t i = 0; i < tbe->n_kept; i++) {
        const peri__kept *k = &tbe->kept[i];
        peri_k_tbe_shift_args args = {.src = peri__data(k->in.offsets),
                                      .dst = (int64_t *)peri__data(*out) + k->first_offset,
                                      .dtype = k->in.offsets->dtype,
                                      .most = peri__numel(k->in.ids),
                                      .add = k->first_id};
        PERI_TRY(PERI_LAUNCH(tbe->device, tbe_shift, &args, peri__numel(k->in.offsets), 1 << 14));
    }
    return PERI_OK;
}

/** Blocks of the joined batch: block k of every pass, then block k + 1, as in the large batch. */
static peri_status join_blocks(const peri_tbe *tbe, const totals *all, peri_tbe_blocks **out)
{
    if (all->blocks > INT32_MAX)
        return peri__fail(PERI_EINVAL, "peri_tbe_accumulated_apply: the passes have %lld blocks, allowed: %d",
                          (long long)all->blocks, INT32_MAX);
    peri_tbe_block *list = peri__alloc(sizeof *list * (size_t)peri__max(all->blocks, 1));
    if (!list) return PERI_ENOMEM;
    int32_t n = 0;
    for (int64_t k = 0; k < all->longest; k++)
        for (int64_t i = 0; i < tbe->n_kept; i++) {
            const peri__kept *kept = &tbe->kept[i];
            if (k >= kept->in.blocks->n) continue;
            memcpy(&list[n], &kept->in.blocks->block[k], sizeof *list);
            bool none = tbe->layout[list[n].table].pooling == PERI_POOLING_NONE;
            list[n].first_bag += kept->first_offset;
            list[n].out_offset += kept->first_grad - (none ? kept->first_id * list[n].out_stride : 0);
            n++;
        }
    peri_status status = peri_tbe_blocks_new(tbe, list, n, out);
    peri__free(list);
    return status;
}

/* -- the public face ----------------------------------------------------------------------------------------------- */

peri_status peri_tbe_accumulate_set(peri_tbe *tbe, bool on)
{
    PERI_NEED(tbe);
    if (on && !tbe->store->whole)
        return peri__fail(PERI_EUNSUPPORTED, "peri_tbe_accumulate_set: cached tables update with every backward pass");
    tbe->accumulate = on;
    return PERI_OK;
}

int64_t peri_tbe_accumulated(const peri_tbe *tbe) { return tbe ? tbe->n_kept : 0; }

peri_status peri_tbe_accumulated_apply(peri_tbe *tbe)
{
    PERI_NEED(tbe);
    if (tbe->n_kept == 0) return PERI_OK;
    totals all = place_passes(tbe);
    peri_tbe_input in = {0};
    peri_tbe_batch *batch = NULL;
    peri_tensor *grad = NULL;
    bool before = peri__grad_swap(false);
    peri_status status;
    PERI_TRY_GOTO(join_passes(tbe, all.ids_dtype, all.ids, PART_IDS, &in.ids), out);
    if (all.weights) PERI_TRY_GOTO(join_passes(tbe, PERI_F32, all.ids, PART_WEIGHTS, &in.weights), out);
    if (all.scale) PERI_TRY_GOTO(join_passes(tbe, PERI_F32, all.offsets, PART_SCALE, &in.scale), out);
    PERI_TRY_GOTO(join_passes(tbe, PERI_F32, all.grad, PART_GRADIENT, &grad), out);
    PERI_TRY_GOTO(join_offsets(tbe, &all, &in.offsets), out);
    PERI_TRY_GOTO(join_blocks(tbe, &all, &in.blocks), out);
    PERI_TRY_GOTO(peri__batch_acquire(tbe, &in, &batch), out);
    PERI_TRY_GOTO(peri__batch_enter("peri_tbe_accumulated_apply", batch, true), out);
    status = peri__tbe_backward(batch, grad, NULL);
    if (status >= 0) drop_passes(tbe);
    status = peri__batch_leave(batch, true, status);
out:
    peri__batch_recycle(batch);
    peri__grad_swap(before);
    pass_fini(&(peri__kept){.in = in, .grad = grad});
    return status;
}
