/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_pooled.c: exchanges of pooled embeddings: which part of inputs and results is whose.
 */
#include "exchange.h"

#include <perilune/ops.h>

peri_status peri__check_counts(const char *f, const char *what, const int64_t *list, int64_t n, uint64_t *hash)
{
    if (!list && n) return peri__fail(PERI_EINVAL, "%s: no %s", f, what);
    for (int64_t i = 0; i < n; i++) {
        if (list[i] < 0 || list[i] > (int64_t)1 << 40)
            return peri__fail(PERI_EINVAL, "%s: %s[%lld] is %lld, allowed: 0..2^40", f, what, (long long)i,
                              (long long)list[i]);
        *hash = peri__hash_mix(*hash, (uint64_t)list[i]);
    }
    return PERI_OK;
}

static peri_status check_rows(const char *f, const char *what, const peri_tensor *t, int64_t rows)
{
    char text[128];
    if (t->ndim >= 1 && t->shape[0] == rows) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: the input is %s, the %s take %lld rows", f,
                      peri__tensor_text(t, text, sizeof text), what, (long long)rows);
}

/* -- all to all ---------------------------------------------------------------------------------------------------- */

peri_status peri_exchange_alltoall_pooled(peri_group *g, peri_tensor *input, const int64_t *batch, const int64_t *dims,
                                          const peri_exchange_args *options, peri_work **out)
{
    static const char f[] = "peri_exchange_alltoall_pooled";
    char text[128];
    peri__exchange *x;
    peri__exchange_call c = {.function = f, .group = g, .input = input, .kind = PERI_COLL_ALL_TO_ALL, .dims = {0, 1},
                             .options = options};
    PERI_TRY(peri__group_check(f, g));
    PERI_TRY(peri__check_tensor(f, "the input", input, -1, 2));
    PERI_TRY(peri__check_counts(f, "batch_size_per_rank", batch, g->size, &c.alike));
    PERI_TRY(peri__check_counts(f, "dim_sum_per_rank", dims, g->size, &c.alike));
    PERI_TRY(check_rows(f, "batch sizes", input, peri__sum(batch, g->size)));
    if (input->shape[1] != dims[g->rank])
        return peri__fail(PERI_EINVAL, "%s: the input is %s, dim_sum_per_rank[%d] is %lld", f,
                          peri__tensor_text(input, text, sizeof text), g->rank, (long long)dims[g->rank]);
    PERI_TRY(peri__exchange_new(&c, &x));
    const int64_t shape[2] = {batch[g->rank], peri__sum(dims, g->size)};
    peri__side_shape(&x->sides[1], 0, 2, shape);
    for (int32_t i = 0; i < g->size; i++) {
        peri__side_add_piece(&x->sides[0], i, batch[i]);
        peri__side_add_piece(&x->sides[1], i, dims[i]);
    }
    return peri__exchange_post(x, &input, NULL, true, out);
}

peri_status peri_exchange_variable_batch_alltoall_pooled(peri_group *g, peri_tensor *input,
                                                         const peri_variable_batch_args *v,
                                                         const peri_exchange_args *options, peri_work **out)
{
    static const char f[] = "peri_exchange_variable_batch_alltoall_pooled";
    peri__exchange *x;
    peri__exchange_call c = {
        .function = f, .group = g, .input = input, .kind = PERI_COLL_ALL_TO_ALL, .options = options};
    uint64_t own = 0;
    int64_t features = 0, first = 0, at = 0;
    PERI_TRY(peri__group_check(f, g));
    PERI_TRY(peri__check_tensor(f, "the input", input, -1, 1));
    if (!v || !v->features_per_rank) return peri__fail(PERI_EINVAL, "%s: no features_per_rank", f);
    for (int32_t r = 0; r < g->size; r++) {
        if (v->features_per_rank[r] < 0)
            return peri__fail(PERI_EINVAL, "%s: features_per_rank[%d] is %d", f, r, v->features_per_rank[r]);
        if (r == g->rank) first = features;
        features += v->features_per_rank[r];
    }
    int64_t mine = v->features_per_rank[g->rank];
    PERI_TRY(
        peri__check_counts(f, "emb_dim_per_rank_per_feature", v->emb_dim_per_rank_per_feature, features, &c.alike));
    PERI_TRY(peri__check_counts(f, "batch_size_per_rank_per_feature", v->batch_size_per_rank_per_feature,
                                g->size * mine, &own));
    PERI_TRY(
        peri__check_counts(f, "batch_size_per_feature_pre_a2a", v->batch_size_per_feature_pre_a2a, features, &own));
    PERI_TRY(peri__exchange_new(&c, &x));
    for (int32_t r = 0; r < g->size; r++) {
        int64_t sent = 0, received = 0;
        for (int64_t i = 0; i < mine; i++)
            sent += v->batch_size_per_rank_per_feature[r * mine + i] * v->emb_dim_per_rank_per_feature[first + i];
        for (int32_t i = 0; i < v->features_per_rank[r]; i++, at++)
            received += v->batch_size_per_feature_pre_a2a[at] * v->emb_dim_per_rank_per_feature[at];
        peri__side_add_piece(&x->sides[0], r, sent);
        peri__side_add_piece(&x->sides[1], r, received);
    }
    peri__side_shape(&x->sides[1], 0, 1, &x->sides[1].cut);
    peri_status status = check_rows(f, "batch sizes and dims", input, x->sides[0].cut);
    if (status < 0) peri__trip_release(&x->trip);
    else status = peri__exchange_post(x, &input, NULL, true, out);
    return status;
}

/** Rows of rank @r when @rows are dealt as evenly as possible. */
static int64_t even_rows(int64_t rows, int32_t size, int32_t r) { return rows / size + (r < rows % size); }

peri_status peri_exchange_alltoallv(peri_group *g, peri_tensor *const *inputs, int32_t n, const int64_t *dims,
                                    const peri_exchange_args *options, peri_work **out)
{
    PERI_NEED(inputs);
    static const char f[] = "peri_exchange_alltoallv";
    peri__exchange *x;
    peri__exchange_call c = {.function = f, .group = g, .kind = PERI_COLL_ALL_TO_ALL, .dims = {0, PERI__LIST},
                             .division = PERI_DIVISION_OFF, .options = options};
    int64_t columns = 0;
    PERI_TRY(peri__group_check(f, g));
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d inputs, at least one is needed", f, n);
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri__check_tensor(f, "an input", inputs[i], -1, 2));
        PERI_TRY(check_rows(f, "first input", inputs[i], inputs[0]->shape[0]));
        columns += inputs[i]->shape[1];
    }
    PERI_TRY(peri__check_counts(f, "dim_sum_per_rank", dims, g->size, &c.alike));
    if (columns != dims[g->rank])
        return peri__fail(PERI_EINVAL, "%s: the inputs have %lld columns, dim_sum_per_rank[%d] is %lld", f,
                          (long long)columns, g->rank, (long long)dims[g->rank]);
    const int64_t rows = inputs[0]->shape[0];
    c.alike = peri__hash_mix(c.alike, (uint64_t)rows);
    PERI__HELD peri_tensor *whole = NULL;
    if (n > 1) PERI_TRY(peri_op_cat(inputs, n, 1, &whole));
    else peri_tensor_retain(whole = inputs[0]);
    c.input = whole;
    PERI_TRY(peri__exchange_new(&c, &x));
    for (int32_t i = 0; i < g->size; i++) {
        const int64_t shape[2] = {even_rows(rows, g->size, g->rank), dims[i]};
        peri__side_shape(&x->sides[1], i, 2, shape);
        peri__side_add_piece(&x->sides[0], i, even_rows(rows, g->size, i));
    }
    return peri__exchange_post(x, &whole, NULL, true, out);
}

/* -- reduce-scatter, all-gather ------------------------------------------------------------------------------------ */

/** Parts of @rows[i] rows of @input; NULL: parts that are alike. */
static peri_status exchange_scatter(const char *f, peri_group *g, peri_tensor *input, const int64_t *rows,
                           const peri_exchange_args *options, peri_work **out)
{
    peri__exchange *x;
    const peri__exchange_call c = {
        .function = f, .group = g, .input = input, .kind = PERI_COLL_REDUCE_SCATTER, .options = options};
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, input->shape, sizeof shape);
    shape[0] = rows ? rows[g->rank] : input->shape[0] / g->size;
    PERI_TRY(peri__exchange_new(&c, &x));
    peri__side_shape(&x->sides[1], 0, input->ndim, shape);
    for (int32_t i = 0; i < g->size; i++) {
        peri__side_add_piece(&x->sides[0], i, rows ? rows[i] : shape[0]);
        peri__side_add_piece(&x->sides[1], i, shape[0]);
    }
    return peri__exchange_post(x, &input, NULL, true, out);
}

static peri_status check_scatter(const char *f, peri_group *g, const peri_tensor *input)
{
    PERI_TRY(peri__group_check(f, g));
    PERI_TRY(peri__check_float(f, "the input", input));
    return input->ndim ? PERI_OK : peri__fail(PERI_EINVAL, "%s: the input is a scalar", f);
}

peri_status peri_exchange_reduce_scatter_pooled(peri_group *g, peri_tensor *const *inputs,
                                                const peri_exchange_args *options, peri_work **out)
{
    PERI_NEED(inputs, out);
    static const char f[] = "peri_exchange_reduce_scatter_pooled";
    PERI_TRY(peri__group_check(f, g));
    for (int32_t i = 0; i < g->size; i++) PERI_TRY(check_scatter(f, g, inputs[i]));
    PERI__HELD peri_tensor *joined = NULL;
    PERI_TRY(peri_op_cat(inputs, g->size, 0, &joined));
    PERI__SCRATCH int64_t *rows = peri__alloc(sizeof *rows * (size_t)g->size);
    if (!rows) return PERI_ENOMEM;
    for (int32_t i = 0; i < g->size; i++) rows[i] = inputs[i]->shape[0];
    return exchange_scatter(f, g, joined, rows, options, out);
}

peri_status peri_exchange_reduce_scatter_base_pooled(peri_group *g, peri_tensor *input,
                                                     const peri_exchange_args *options, peri_work **out)
{
    PERI_NEED(out);
    static const char f[] = "peri_exchange_reduce_scatter_base_pooled";
    char text[128];
    PERI_TRY(check_scatter(f, g, input));
    if (input->shape[0] % g->size)
        return peri__fail(PERI_EINVAL, "%s: the input is %s, allowed: rows divisible by %d", f,
                          peri__tensor_text(input, text, sizeof text), g->size);
    return exchange_scatter(f, g, input, NULL, options, out);
}

peri_status peri_exchange_reduce_scatter_v_pooled(peri_group *g, peri_tensor *input, const int64_t *input_splits,
                                                  const peri_exchange_args *options, peri_work **out)
{
    static const char f[] = "peri_exchange_reduce_scatter_v_pooled";
    uint64_t hash = 0;
    PERI_TRY(check_scatter(f, g, input));
    PERI_TRY(peri__check_counts(f, "input_splits", input_splits, g->size, &hash));
    PERI_TRY(check_rows(f, "input_splits", input, peri__sum(input_splits, g->size)));
    return exchange_scatter(f, g, input, input_splits, options, out);
}

peri_status peri_exchange_reduce_scatter_v_per_feature_pooled(peri_group *g, peri_tensor *input, int32_t n_features,
                                                              const int64_t *batch, const int64_t *dims,
                                                              const peri_exchange_args *options, peri_work **out)
{
    static const char f[] = "peri_exchange_reduce_scatter_v_per_feature_pooled";
    uint64_t hash = 0;
    PERI_TRY(check_scatter(f, g, input));
    PERI_TRY(peri__check_tensor(f, "the input", input, -1, 1));
    if (n_features < 0) return peri__fail(PERI_EINVAL, "%s: %d features", f, n_features);
    PERI_TRY(peri__check_counts(f, "batch_size_per_rank_per_feature", batch, (int64_t)g->size * n_features, &hash));
    PERI_TRY(peri__check_counts(f, "embedding_dims", dims, n_features, &hash));
    PERI__SCRATCH int64_t *parts = peri__alloc_zero(sizeof *parts * (size_t)g->size);
    if (!parts) return PERI_ENOMEM;
    for (int32_t i = 0; i < g->size; i++)
        for (int32_t k = 0; k < n_features; k++) parts[i] += batch[(int64_t)i * n_features + k] * dims[k];
    PERI_TRY(check_rows(f, "batch sizes and dims", input, peri__sum(parts, g->size)));
    return exchange_scatter(f, g, input, parts, options, out);
}

peri_status peri_exchange_all_gather_base_pooled(peri_group *g, peri_tensor *input, const peri_exchange_args *options,
                                                 peri_work **out)
{
    PERI_NEED(g, input, out);
    static const char f[] = "peri_exchange_all_gather_base_pooled";
    peri__exchange *x;
    const peri__exchange_call c = {
        .function = f, .group = g, .input = input, .kind = PERI_COLL_ALL_GATHER, .options = options};
    PERI_TRY(check_scatter(f, g, input));
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, input->shape, sizeof shape);
    shape[0] *= g->size;
    PERI_TRY(peri__exchange_new(&c, &x));
    peri__side_shape(&x->sides[1], 0, input->ndim, shape);
    for (int32_t i = 0; i < g->size; i++)
        for (int side = 0; side < 2; side++) peri__side_add_piece(&x->sides[side], i, input->shape[0]);
    return peri__exchange_post(x, &input, NULL, true, out);
}
