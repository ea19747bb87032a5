/* SPDX-License-Identifier: Apache-2.0
 *
 * permute_pooled.c: the features' column blocks of a matrix of pooled embeddings in another order, with gradient.
 */
#include "sparse_internal.h"

/** state of the node. */
typedef struct blocks {
    int64_t features, n;  /* blocks of the source and of the result */
    int64_t *offsets;     /* features + 1 */
    int64_t *permute;     /* n; in the same block of memory */
} blocks;

static peri_status blocks_new(const int64_t *offsets, int64_t features, const int64_t *permute, int64_t n, blocks **out)
{
    blocks *b = peri__alloc(sizeof *b + sizeof(int64_t) * (size_t)(features + 1 + n));
    if (!b) return PERI_ENOMEM;
    b->features = features;
    b->n = n;
    b->offsets = (int64_t *)(b + 1);
    b->permute = b->offsets + features + 1;
    memcpy(b->offsets, offsets, sizeof(int64_t) * (size_t)(features + 1));
    memcpy(b->permute, permute, sizeof(int64_t) * (size_t)n);
    *out = b;
    return PERI_OK;
}

static int64_t block_columns(const blocks *b, int64_t p) { return b->offsets[p + 1] - b->offsets[p]; }

static void permute_fini(peri__node *node) /* called when the node is spent and when it is freed */
{
    peri__free(node->state);
    node->state = NULL;
}

/** Each block of the source: the sum of the gradients of its copies, in the order of the result. */
static peri_status permute_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const blocks *b = node->state;
    int64_t shape[2] = {grad_out[0]->shape[0], b->offsets[b->features]}, *first, *list, *to;
    peri__columns t = {0};
    peri_tensor *flat = NULL, *grad = NULL;
    first = peri__alloc_zero(sizeof *first * (size_t)(b->features + 1 + 2 * b->n + 1));
    if (!first) return PERI_ENOMEM;
    list = first + b->features + 1;
    to = list + b->n;
    for (int64_t i = 0, at = 0; i < b->n; i++) {
        to[i] = at;
        at += block_columns(b, b->permute[i]);
        first[b->permute[i] + 1]++;
    }
    for (int64_t p = 0; p < b->features; p++) first[p + 1] += first[p];
    /* each start moves to its end, the next one's start */
    for (int64_t i = 0; i < b->n; i++) list[first[b->permute[i]]++] = i;
    peri_status status;
    PERI_TRY_GOTO(peri__columns_rows(grad_out[0], &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 2, shape, &grad), out);
    PERI_TRY_GOTO(peri__columns_init(&t, b->features, b->n), out);
    for (int64_t p = 0; p < b->features; p++) {
        peri__columns_item(&t, grad, b->offsets[p], block_columns(b, p));
        for (int64_t i = p ? first[p - 1] : 0; i < first[p]; i++) peri__columns_source(&t, flat, to[list[i]]);
    }
    PERI_TRY_GOTO(peri__columns_run(&t, peri__device(flat), flat->dtype, shape[0]), out);
    grad_in[0] = grad;
    grad = NULL;
out:
    peri__columns_fini(&t);
    peri__free(first);
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    return status;
}

static const peri__node_vtab permute_vtab = {
    .name = "permute_pooled", .backward = permute_backward, .fini = permute_fini};

static peri_status check_args(const char *f, const peri_tensor *pooled, const int64_t *offsets, int64_t features,
                              const int64_t *permute, int64_t n)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "pooled", pooled, -1, 2));
    int32_t d = pooled->dtype;
    if (d != PERI_F32 && d != PERI_F64 && d != PERI_F16 && d != PERI_BF16)
        return peri__fail(PERI_EINVAL, "%s: pooled are %s, allowed: f32, f64, f16, bf16", f, peri_dtype_name(d));
    if (features < 0 || n < 0)
        return peri__fail(PERI_EINVAL, "%s: %lld features, %lld of them wanted", f, (long long)features, (long long)n);
    for (int64_t i = 0; i <= features; i++)
        if (i ? offsets[i] < offsets[i - 1] : offsets[0] != 0)
            return peri__fail(PERI_EINVAL, "%s: offset_dim_list[%lld] is %lld, wanted: 0 first, then not falling", f,
                              (long long)i, (long long)offsets[i]);
    if (offsets[features] != pooled->shape[1])
        return peri__fail(PERI_EINVAL, "%s: the last of offset_dim_list is %lld, but pooled are %s", f,
                          (long long)offsets[features], peri__tensor_text(pooled, text, sizeof text));
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        if (permute[i] < 0 || permute[i] >= features)
            return peri__fail(PERI_ERANGE, "%s: permute_list[%lld] is %lld, allowed: 0..%lld", f, (long long)i,
                              (long long)permute[i], (long long)features - 1);
        if (__builtin_add_overflow(total, offsets[permute[i] + 1] - offsets[permute[i]], &total))
            return peri__fail(PERI_ERANGE, "%s: the result has 2^63 columns or more", f);
    }
    return PERI_OK;
}

peri_status peri_sparse_permute_pooled(peri_tensor *pooled, const int64_t *offsets, int32_t features,
                                       const int64_t *permute, int32_t n, peri_tensor **out)
{
    PERI_NEED(offsets);
    static const char f[] = "peri_sparse_permute_pooled";
    PERI_TRY(check_args(f, pooled, offsets, features, permute, n));
    int64_t shape[2] = {pooled->shape[0], 0};
    for (int64_t i = 0; i < n; i++) shape[1] += offsets[permute[i] + 1] - offsets[permute[i]];
    peri_tensor *src = NULL, *result = NULL;
    peri__columns t = {0};
    blocks *b = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri__columns_rows(pooled, &src), out);
    PERI_TRY_GOTO(peri__tensor_like(src, 2, shape, &result), out);
    PERI_TRY_GOTO(peri__columns_init(&t, n, n), out);
    for (int64_t i = 0, at = 0; i < n; i++) {
        int64_t from = offsets[permute[i]], columns = offsets[permute[i] + 1] - from;
        peri__columns_item(&t, result, at, columns);
        peri__columns_source(&t, src, from);
        at += columns;
    }
    PERI_TRY_GOTO(peri__columns_run(&t, peri__device(src), src->dtype, shape[0]), out);
    if (peri__differentiable(src)) {
        PERI_TRY_GOTO(blocks_new(offsets, features, permute, n, &b), out);
        PERI_TRY_GOTO(peri__record(&permute_vtab, &src, 1, &result, 1, &node), out);
        node->state = b;
        b = NULL;
    }
    *out = result;
    result = NULL;
out:
    peri__free(b);
    peri__columns_fini(&t);
    peri_tensor_release(src);
    peri_tensor_release(result);
    return status;
}
