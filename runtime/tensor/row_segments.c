/* SPDX-License-Identifier: Apache-2.0
 *
 * row_segments.c: whole segments of rows: joining tensors, cutting one, and permutations whose sizes the host knows;
 * all with gradient.
 */
#include "jagged_internal.h"
#include "../../kernels/jagged.h"

peri_status peri__rows_like(const peri_tensor *t, int64_t rows, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[0] = rows;
    return peri__tensor_like(t, t->ndim, shape, out);
}

/** Rows [begin, end) of a contiguous tensor, not recorded. */
static peri_status rows_view(peri_tensor *t, int64_t begin, int64_t end, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape);
    shape[0] = end - begin;
    return peri__tensor_view(t, t->ndim, shape, t->stride, t->offset + begin * t->stride[0], out);
}

/* -- joining ------------------------------------------------------------------------------------------------------- */

/** state: int64_t[n_in + 1], where each part begins. */
static peri_status cat_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int64_t *at = node->state;
    peri_tensor *flat;
    PERI_TRY(peri_tensor_contiguous(grad_out[0], &flat));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < node->n_in && status >= 0; i++)
        if (peri__needs(node, i)) status = rows_view(flat, at[i], at[i + 1], &grad_in[i]);
    peri_tensor_release(flat);
    return status;
}

static void free_state(peri__node *node) /* called when the node is spent and when it is freed */
{
    peri__free(node->state);
    node->state = NULL;
}

static const peri__node_vtab cat_vtab = {.name = "rows_cat", .backward = cat_backward, .fini = free_state};

static peri_status check_parts(const char *function, peri_tensor *const *parts, int32_t n, int64_t *rows)
{
    char a[128], b[128];
    const peri_tensor *first = parts[0];
    *rows = 0;
    for (int32_t i = 0; i < n; i++) {
        const peri_tensor *t = parts[i];
        bool same = t->dtype == first->dtype && t->ndim == first->ndim && t->ndim > 0;
        for (int32_t d = 1; same && d < t->ndim; d++) same = t->shape[d] == first->shape[d];
        if (!same)
            return peri__fail(PERI_EINVAL, "%s: part %d is %s, part 0 %s", function, i,
                              peri__tensor_text(t, a, sizeof a), peri__tensor_text(first, b, sizeof b));
        PERI_TRY(peri__check_same_device(function, t, first));
        *rows += t->shape[0];
    }
    return PERI_OK;
}

static peri_status record_cat(peri_tensor *const *parts, int32_t n, peri_tensor *result)
{
    int64_t *at = peri__alloc(sizeof *at * (size_t)(n + 1));
    if (!at) return PERI_ENOMEM;
    at[0] = 0;
    for (int32_t i = 0; i < n; i++) at[i + 1] = at[i] + parts[i]->shape[0];
    peri__node *node;
    peri_status status = peri__record(&cat_vtab, parts, n, &result, 1, &node);
    if (status < 0) peri__free(at);
    else node->state = at;
    return status;
}

peri_status peri__rows_cat(const char *function, peri_tensor *const *parts, int32_t n, peri_tensor **out)
{
    int64_t rows, at = 0;
    PERI_TRY(check_parts(function, parts, n, &rows));
    peri_tensor *result;
    PERI_TRY(peri__rows_like(parts[0], rows, &result));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        peri_tensor *window;
        status = rows_view(result, at, at + parts[i]->shape[0], &window);
        if (status >= 0) status = peri_tensor_copy(window, parts[i]);
        if (status >= 0) peri_tensor_release(window);
        at += parts[i]->shape[0];
    }
    if (status >= 0 && peri__recording(parts, n)) status = record_cat(parts, n, result);
    if (status < 0) peri_tensor_release(result);
    else *out = result;
    return status;
}

/* -- cutting ------------------------------------------------------------------------------------------------------- */

peri_status peri__rows_join(peri_tensor *const *parts, const int64_t *at, int32_t n, peri_tensor **out)
{
    const peri_tensor *any = NULL;
    for (int32_t i = 0; i < n && !any; i++) any = parts[i];
    *out = NULL;
    if (!any) return PERI_OK;
    peri_tensor *base;
    PERI_TRY(peri__rows_like(any, at[n], &base));
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < n && status >= 0; i++) {
        peri_tensor *window;
        if (at[i] == at[i + 1]) continue;
        status = rows_view(base, at[i], at[i + 1], &window);
        if (status < 0) break;
        status = parts[i] ? peri_tensor_copy(window, parts[i]) : peri__tensor_zero(window);
        peri_tensor_release(window);
    }
    if (status < 0) peri_tensor_release(base);
    else *out = base;
    return status;
}

/** state: int64_t[n_out + 1], where each part begins. */
static peri_status split_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    return peri__rows_join(grad_out, node->state, node->n_out, grad_in);
}

static const peri__node_vtab split_vtab = {.name = "rows_split", .backward = split_backward, .fini = free_state};

static peri_status record_split(peri_tensor *t, const int64_t *at, int32_t n, peri_tensor *const *parts)
{
    size_t bytes = sizeof *at * (size_t)(n + 1);
    int64_t *copy = peri__alloc(bytes);
    if (!copy) return PERI_ENOMEM;
    memcpy(copy, at, bytes);
    peri__node *node;
    peri_status status = peri__record(&split_vtab, &t, 1, parts, n, &node);
    if (status < 0) peri__free(copy);
    else node->state = copy;
    return status;
}

peri_status peri__rows_views(peri_tensor *t, const int64_t *at, int32_t n, peri_tensor **out)
{
    int32_t made = 0;
    peri_status status = PERI_OK;
    for (; made < n && status >= 0; made += status >= 0) status = rows_view(t, at[made], at[made + 1], &out[made]);
    while (status < 0 && made > 0) peri_tensor_release(out[--made]);
    return status;
}

peri_status peri__rows_split(peri_tensor *t, const int64_t *at, int32_t n, peri_tensor **out)
{
    PERI_TRY(peri__rows_views(t, at, n, out));
    if (n == 0 || !peri__recording(&t, 1)) return PERI_OK;
    peri_status status = record_split(t, at, n, out);
    for (int32_t i = 0; i < n && status < 0; i++) peri_tensor_release(out[i]);
    return status;
}

/* -- permuting ----------------------------------------------------------------------------------------------------- */

peri_status peri__rows_plan_init(peri__rows_plan *p, peri_device *device, const int64_t *offsets, int64_t parts,
                                 const int32_t *index, int64_t n)
{
    *p = (peri__rows_plan){.parts = parts, .n = n};
    p->starts = peri__alloc(sizeof *p->starts * (size_t)(3 * n + 1 + parts + 1));
    if (!p->starts) return PERI_ENOMEM;
    p->out_offsets = p->starts + n;
    p->index = p->out_offsets + n + 1;
    p->offsets = p->index + n;
    memcpy(p->offsets, offsets, sizeof *offsets * (size_t)(parts + 1));
    p->out_offsets[0] = 0;
    for (int64_t t = 0; t < n; t++) {
        p->index[t] = index[t];
        p->starts[t] = offsets[index[t]];
        p->out_offsets[t + 1] = p->out_offsets[t] + offsets[index[t] + 1] - offsets[index[t]];
    }
    p->rows = p->out_offsets[n];
    peri_status status = peri__upload_i64(device, p->starts, 2 * n + 1, &p->table);
    if (status < 0) peri__rows_plan_fini(p);
    return status;
}

void peri__rows_plan_fini(peri__rows_plan *p)
{
    peri_tensor_release(p->table);
    peri__free(p->starts);
    *p = (peri__rows_plan){0};
}

enum { KEPT_PARTS, KEPT_N, KEPT_ROWS }; /* segments of the source and of the result; rows of the source */

/** saved[0]: offsets of the source's segments, of the result's, and for each of the former the list of the latter. */
static peri_status permute_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    int64_t parts = node->kept[KEPT_PARTS], n = node->kept[KEPT_N], rows = node->kept[KEPT_ROWS];
    const int64_t *words = peri__data(node->saved[0]);
    peri_tensor *flat = NULL, *grad = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__summands(grad_out[0], &flat), out);
    PERI_TRY_GOTO(peri__rows_like(flat, rows, &grad), out);
    int64_t width = peri__row_bytes(flat);
    peri_k_jagged_sum_args args = {.dst = peri__data(grad),
                                   .src = peri__data(flat),
                                   .in_offsets = words,
                                   .out_offsets = words + parts + 1,
                                   .list_offsets = words + parts + 1 + n + 1,
                                   .list = words + 2 * (parts + 1) + n + 1,
                                   .columns = width / peri_dtype_size(flat->dtype),
                                   .segments = parts,
                                   .dtype = flat->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), jagged_sum, &args, rows, peri__row_grain(width)), out);
    PERI_TRY_GOTO(peri__cast(grad, grad_out[0]->dtype, &grad_in[0]), out);
out:
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    return status;
}

static const peri__node_vtab permute_vtab = {.name = "rows_permute", .backward = permute_backward};

static peri_status record_permute(peri_tensor *src, const peri__rows_plan *p, peri_tensor *result)
{
    int64_t size = 2 * (p->parts + 1) + 2 * p->n + 1;
    int64_t *words = peri__alloc_zero(sizeof *words * (size_t)size);
    if (!words) return PERI_ENOMEM;
    int64_t *first = words + p->parts + 1 + p->n + 1, *list = first + p->parts + 1;
    memcpy(words, p->offsets, sizeof *words * (size_t)(p->parts + 1));
    memcpy(words + p->parts + 1, p->out_offsets, sizeof *words * (size_t)(p->n + 1));
    for (int64_t t = 0; t < p->n; t++) first[p->index[t] + 1]++;
    for (int64_t i = 0; i < p->parts; i++) first[i + 1] += first[i];
    for (int64_t t = 0; t < p->n; t++) list[first[p->index[t]]++] = t;
    for (int64_t i = p->parts; i > 0; i--) first[i] = first[i - 1]; /* filling moved each start to its end */
    first[0] = 0;
    peri_tensor *table = NULL;
    peri__node *node;
    peri_status status = peri__upload_i64(peri__device(src), words, size, &table);
    if (status >= 0) status = peri__record(&permute_vtab, &src, 1, &result, 1, &node);
    if (status >= 0) {
        peri__node_save(node, 0, table);
        node->kept[KEPT_PARTS] = p->parts;
        node->kept[KEPT_N] = p->n;
        node->kept[KEPT_ROWS] = src->shape[0];
    }
    peri_tensor_release(table);
    peri__free(words);
    return status;
}

peri_status peri__rows_permute(peri_tensor *src, const peri__rows_plan *p, peri_tensor **out)
{
    peri_tensor *result;
    PERI_TRY(peri__rows_like(src, p->rows, &result));
    const int64_t *words = peri__data(p->table);
    int64_t width = peri__row_bytes(src);
    peri_k_jagged_copy_args args = {.dst = peri__data(result),
                                    .src = peri__data(src),
                                    .out_offsets = words + p->n,
                                    .in_offsets = words,
                                    .width = width,
                                    .segments = p->n,
                                    .out_dtype = PERI_I64,
                                    .in_dtype = PERI_I64};
    peri_status status =
        PERI_LAUNCH(peri__device(src), jagged_copy, &args, width ? p->rows : 0, peri__row_grain(width));
    if (status >= 0 && peri__recording(&src, 1)) status = record_permute(src, p, result);
    if (status < 0) peri_tensor_release(result);
    else *out = result;
    return status;
}
