/* SPDX-License-Identifier: Apache-2.0
 *
 * jagged_lookup.c: rows of ids as one tensor for each key. Their gradients come key by key, each in memory of its own,
 * and the update reads them there: to put them next to each other first would be to read and write all of them once
 * more.
 */
#include "../../kernels/sequence.h"
#include "../tensor/jagged_internal.h"
#include "embed_internal.h"

/** The node's state. */
typedef struct parts {
    peri_tbe_batch *batch; /* retained */
    int64_t at[];          /* where the rows of each key begin, and where the last ones end */
} parts;

/* -- gradients where they lie -------------------------------------------------------------------------------------- */

static int64_t data_address(const peri_tensor *t) { return (int64_t)(uintptr_t)peri__data(t); }

/** The part that lies first in memory; -1: there is none, or some part is not there or not as rows of f32. */
static int32_t first_in_memory(const peri_tbe_batch *b, const int64_t *at, peri_tensor *const *grad, int32_t n)
{
    int32_t first = -1;
    for (int32_t p = 0; p < n; p++) {
        if (at[p] == at[p + 1]) continue;
        if (!grad[p] || grad[p]->dtype != PERI_F32 || !peri__contiguous(grad[p]) ||
            peri__device(grad[p]) != b->tbe->device)
            return -1;
        if (first < 0 || data_address(grad[p]) < data_address(grad[first])) first = p;
    }
    return first;
}

/** Gradients of keys. */
typedef struct keys {
    const int64_t *at; /* where the rows of each begin, and where the last ones end */
    peri_tensor *const *grad;
    int32_t n, first;  /* first: the one that addresses are counted from */
} keys;

/** Where the gradients of a block's rows lie; false: it has rows of several keys, or of none. */
static bool gradient_spot(const keys *k, const peri_tbe_batch *b, const peri_k_tbe_block *block, peri__spot *spot)
{
    int64_t begin = peri__batch_offset(b, block->first_bag),
            end = peri__batch_offset(b, block->first_bag + block->bags);
    *spot = (peri__spot){.offset = block->out_offset, .stride = block->out_stride};
    if (begin < 0 || end < begin || end > peri__numel(b->in.ids)) return false;
    if (begin == end) return true;
    const int64_t p = peri_k_sequence_of(k->at, k->n, begin); /* the key that has the first row */
    if (end > k->at[p + 1]) return false;
    int64_t away = (data_address(k->grad[p]) - data_address(k->grad[k->first])) / (int64_t)sizeof(float),
            cols = b->in.blocks->row_cols;
    spot->offset = away - k->at[p] * cols;
    spot->past = away + (k->at[p + 1] - k->at[p]) * cols;
    return true;
}

/** Lets the update read the gradients of all blocks where they lie. *redirected false: one of them cannot be read
 *  there, and nothing was changed. */
static peri_status redirect_to_parts(const keys *k, peri_tbe_batch *b, bool *redirected)
{
    const peri_tbe_blocks *l = b->in.blocks;
    peri__spot *spots = peri__alloc(sizeof *spots * (size_t)peri__max(l->n, 1));
    peri_tbe_blocks *there;
    *redirected = true;
    if (!spots) return PERI_ENOMEM;
    for (int64_t i = 0; i < l->n && *redirected; i++) *redirected = gradient_spot(k, b, &l->block[i], &spots[i]);
    peri_status status = *redirected ? peri__tbe_blocks_moved(b->tbe, l, spots, &there) : PERI_OK;
    peri__free(spots);
    if (status < 0 || !*redirected) return status;
    status = peri__batch_redirect(b, there, &(peri__bag_places){0}, redirected);
    peri_tbe_blocks_release(there);
    return status;
}

/** Update from the gradients where they lie. *done false: they have to be put together. */
static peri_status update_in_parts(const peri__node *node, const parts *s, peri_tensor *const *grad, bool *done)
{
    peri_tbe_batch *b = s->batch;
    keys k = {.at = s->at, .grad = grad, .n = node->n_out};
    *done = false;
    if (!peri__may_redirect(node, b->tbe) || !peri__batch_readable(b)) return PERI_OK;
    k.first = first_in_memory(b, s->at, grad, node->n_out);
    if (k.first < 0) return PERI_OK;
    PERI_TRY(redirect_to_parts(&k, b, done));
    if (!*done) return PERI_OK;
    peri_status status = peri_tbe_batch_backward(b, grad[k.first], NULL);
    peri__batch_redirect_end(b);
    return status;
}

/* -- on the tape --------------------------------------------------------------------------------------------------- */

static void parts_fini(peri__node *node)
{
    parts *s = node->state;
    if (s) peri_tbe_batch_release(s->batch);
    peri__free(s);
    node->state = NULL;
}

static peri_status parts_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const parts *s = node->state;
    bool done;
    PERI_TRY(update_in_parts(node, s, grad_out, &done));
    if (done) return PERI_OK;
    peri_tensor *grad;
    PERI_TRY(peri__rows_join(grad_out, s->at, node->n_out, &grad));
    return grad ? peri__lookup_backward(node, s->batch, grad, grad_in) : PERI_OK;
}

static const peri__node_vtab parts_vtab = {
    .name = "tbe_lookup", .acts = PERI__UPDATES, .backward = parts_backward, .fini = parts_fini};

static peri_status record_lookup(peri_tbe_batch *b, const int64_t *at, int32_t n, peri_tensor *const *rows)
{
    parts *s = peri__alloc(sizeof *s + sizeof *at * (size_t)(n + 1));
    if (!s) return PERI_ENOMEM;
    peri__node *node;
    peri_status status = peri__lookup_record(&parts_vtab, b, rows, n, &node);
    if (!node) {
        peri__free(s);
        return status;
    }
    memcpy(s->at, at, sizeof *at * (size_t)(n + 1));
    s->batch = b;
    peri_tbe_batch_retain(b);
    node->state = s;
    return PERI_OK;
}

peri_status peri_tbe_batch_lookup_jagged(peri_tbe_batch *b, peri_kjt *kjt, bool indices, peri_jt **out)
{
    static const char f[] = "peri_tbe_batch_lookup_jagged";
    PERI_NEED(b);
    PERI_NEED(kjt);
    PERI_NEED(out);
    int64_t cols = b->in.blocks->row_cols, ids = peri__numel(b->in.ids);
    if (!cols)
        return peri__fail(PERI_EINVAL, "%s: the blocks do not write rows of one width at the places of their ids", f);
    if (kjt->values->shape[0] != ids)
        return peri__fail(PERI_EINVAL, "%s: the batch has %lld ids, the kjt %lld", f, (long long)ids,
                          (long long)kjt->values->shape[0]);
    PERI_TRY(peri_kjt_sync(kjt));
    PERI_TRY(peri__bags_lengths(&kjt->bags));
    int32_t n = kjt->keys->count;
    peri_tensor *rows = NULL, **part = peri__alloc(sizeof *part * (size_t)peri__max(n, 1));
    peri_status status = part ? peri__lookup_rows(f, b, 2, (int64_t[]){ids, cols}, &rows) : PERI_ENOMEM;
    if (status >= 0) status = peri__rows_views(rows, kjt->offset_per_key, n, part);
    if (status >= 0) {
        if (n > 0 && peri_grad_enabled()) status = record_lookup(b, kjt->offset_per_key, n, part);
        if (status >= 0) status = peri__kjt_cut(kjt, part, indices, out);
        for (int32_t i = 0; i < n; i++) peri_tensor_release(part[i]);
    }
    peri_tensor_release(rows);
    peri__free(part);
    return status;
}
