/* SPDX-License-Identifier: Apache-2.0
 *
 * expand.c: from the pooled rows of distinct bags to the full batch. It is a lookup: the pooled rows are tables, the inverse indices ids
 * of bags of one id each; its gradient sums what goes back to the same row, in the order of the batch.
 */
#include "internal.h"

#include <stdio.h>

static peri_status check_args(const peri_tbe_expand_args *a)
{
    char text[128];
    PERI_TRY(peri__check_tensor("peri_tbe_expand", "pooled", a->pooled, PERI_F32, -1));
    PERI_TRY(peri__check_tensor("peri_tbe_expand", "inverse", a->inverse, -1, 2));
    if (a->inverse->dtype != PERI_I64 && a->inverse->dtype != PERI_I32)
        return peri__fail(PERI_EINVAL, "peri_tbe_expand: inverse is %s, allowed: i64, i32",
                          peri__tensor_text(a->inverse, text, sizeof text));
    PERI_TRY(peri__check_same_device("peri_tbe_expand", a->pooled, a->inverse));
    if (!peri__contiguous(a->pooled) || !peri__contiguous(a->inverse))
        return peri__fail(PERI_EINVAL, "peri_tbe_expand: pooled and inverse must be contiguous");
    int64_t elements = 0;
    for (int64_t f = 0; f < a->features; f++) {
        if (a->rows[f] < 0 || a->cols[f] < 1)
            return peri__fail(PERI_EINVAL, "peri_tbe_expand: feature %lld has %lld rows of %lld columns", (long long)f,
                              (long long)a->rows[f], (long long)a->cols[f]);
        if (a->inverse_row[f] < 0 || a->inverse_row[f] >= a->inverse->shape[0])
            return peri__fail(PERI_ERANGE, "peri_tbe_expand: feature %lld uses row %lld of the inverse indices, allowed: 0..%lld",
                              (long long)f, (long long)a->inverse_row[f], (long long)a->inverse->shape[0] - 1);
        if (!a->names || !a->names[f]) return peri__fail(PERI_EINVAL, "peri_tbe_expand: feature %lld has no name", (long long)f);
        elements += a->rows[f] * a->cols[f];
    }
    if (elements == peri__numel(a->pooled)) return PERI_OK;
    return peri__fail(PERI_EINVAL, "peri_tbe_expand: pooled is %s, the features have %lld elements",
                      peri__tensor_text(a->pooled, text, sizeof text), (long long)elements);
}

/** The pooled rows as a table batch, and the columns of the output as its blocks. */
static peri_status as_tables(const peri_tbe_expand_args *a, peri_tbe **tbe, peri_tbe_blocks **blocks, int64_t *width)
{
    int64_t batch = a->inverse->shape[1], column = 0;
    peri_table_config *tables = peri__alloc_zero(sizeof *tables * (size_t)peri__max(a->features, 1));
    peri_tbe_block *list = peri__alloc_zero(sizeof *list * (size_t)peri__max(a->features, 1));
    peri_status status = PERI_ENOMEM;
    if (!tables || !list) goto out;
    for (int64_t f = 0; f < a->features; f++) *width += a->cols[f];
    for (int64_t f = 0; f < a->features; f++) {
        tables[f] = (peri_table_config){.name = a->names[f], .rows = a->rows[f], .cols = a->cols[f], .init = PERI_INIT_NONE};
        list[f] = (peri_tbe_block){.first_bag = a->inverse_row[f] * batch,
                                   .bags = batch,
                                   .out_offset = column,
                                   .out_stride = *width,
                                   .table = (int32_t)f,
                                   .feature = -1};
        column += a->cols[f];
    }
    peri_tbe_config config = {.device = peri__device(a->pooled), .dtype = PERI_F32, .n_tables = a->features, .tables = tables};
    PERI_TRY_GOTO(peri__tbe_over(&config, a->pooled, tbe), out);
    status = peri_tbe_blocks_new(*tbe, list, a->features, blocks);
    if (status < 0) {
        peri_tbe_release(*tbe);
        *tbe = NULL;
    }
out:
    peri__free(tables);
    peri__free(list);
    return status;
}

/** Offsets of bags of one id each. */
static peri_status unit_offsets(peri_device *device, int64_t bags, peri_tensor **out)
{
    int64_t *host = peri__alloc(sizeof *host * (size_t)(bags + 1)), n = bags + 1;
    if (!host) return PERI_ENOMEM;
    for (int64_t b = 0; b <= bags; b++) host[b] = b;
    peri_tensor *t = NULL;
    peri_status status = peri_tensor_new(device, PERI_I64, 1, &n, &t);
    if (status >= 0) status = peri_tensor_write(t, host, n * 8);
    peri__free(host);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

typedef struct expand_state {
    peri_tbe *tbe;
    peri_tbe_blocks *blocks;
} expand_state;

enum { SAVED_IDS, SAVED_OFFSETS };

static void expand_fini(peri__node *node)
{
    expand_state *state = node->state;
    if (!state) return;
    peri_tbe_release(state->tbe);
    peri_tbe_blocks_release(state->blocks);
    peri__free(state);
    node->state = NULL;
}

/** integer: the shape of pooled. */
static peri_status expand_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    expand_state *state = node->state;
    peri_tbe_input in = {.ids = node->saved[SAVED_IDS], .offsets = node->saved[SAVED_OFFSETS], .blocks = state->blocks};
    peri_tensor *grad = NULL, *dense = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(grad_out[0], &grad), out);
    PERI_TRY_GOTO(peri_tbe_gradient(state->tbe, &in, grad, NULL, &dense), out);
    status = peri__tensor_view(dense, (int32_t)node->integer[0], node->integer + 1, NULL, 0, &grad_in[0]);
out:
    peri_tensor_release(grad);
    peri_tensor_release(dense);
    return status;
}

static const peri__node_vtab expand_vtab = {.name = "tbe_expand", .backward = expand_backward, .fini = expand_fini};

/** Record the lookup @in of @pooled; *state is taken on success. */
static peri_status expand_record(peri_tensor *pooled, const peri_tbe_input *in, expand_state *state, peri_tensor *out)
{
    peri__node *node;
    expand_state *kept = peri__alloc(sizeof *kept);
    if (!kept) return PERI_ENOMEM;
    peri_status status = peri__record(&expand_vtab, &pooled, 1, &out, 1, &node);
    if (status < 0) {
        peri__free(kept);
        return status;
    }
    *kept = *state;
    *state = (expand_state){0};
    node->state = kept;
    node->integer[0] = pooled->ndim;
    memcpy(node->integer + 1, pooled->shape, sizeof *pooled->shape * (size_t)pooled->ndim);
    peri__node_save(node, SAVED_IDS, in->ids);
    peri__node_save(node, SAVED_OFFSETS, in->offsets);
    return PERI_OK;
}

peri_status peri_tbe_expand(const peri_tbe_expand_args *a, peri_tensor **out)
{
    PERI_TRY(check_args(a));
    int64_t batch = a->inverse->shape[1], bags = a->inverse->shape[0] * batch, width = 0;
    peri_tensor *ids = NULL, *offsets = NULL, *rows = NULL;
    expand_state state = {0};
    peri_status status;
    PERI_TRY_GOTO(as_tables(a, &state.tbe, &state.blocks, &width), out);
    PERI_TRY_GOTO(peri__tensor_view(a->inverse, 1, &bags, NULL, a->inverse->offset, &ids), out);
    PERI_TRY_GOTO(unit_offsets(peri__device(a->pooled), bags, &offsets), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(a->pooled), PERI_F32, 2, (int64_t[]){batch, width}, &rows), out);
    peri_tbe_input in = {.ids = ids, .offsets = offsets, .blocks = state.blocks};
    PERI_TRY_GOTO(peri__tbe_checked_forward("peri_tbe_expand", state.tbe, &in, rows), out);
    if (peri__recording(&(peri_tensor *){a->pooled}, 1)) PERI_TRY_GOTO(expand_record(a->pooled, &in, &state, rows), out);
    *out = rows;
    rows = NULL;
out:
    peri_tensor_release(ids);
    peri_tensor_release(offsets);
    peri_tensor_release(rows);
    peri_tbe_release(state.tbe);
    peri_tbe_blocks_release(state.blocks);
    return status;
}
