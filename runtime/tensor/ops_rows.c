/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_rows.c: the cosine of the angle between the rows of two tensors.
 */
#include "tensor_internal.h"
#include "../../kernels/elements.h"

#include <perilune/ops.h>

enum { A, B, SIZES, COSINE }; /* what a cosine saves */

static peri_status cosine_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *const *saved = node->saved;
    const peri_tensor *a = saved[A];
    const int64_t cols = a->shape[a->ndim - 1];
    PERI__HELD peri_tensor *g = NULL, *da = NULL, *db = NULL;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    if (peri__needs(node, A)) PERI_TRY(peri__tensor_like(a, a->ndim, a->shape, &da));
    if (peri__needs(node, B)) PERI_TRY(peri__tensor_like(a, a->ndim, a->shape, &db));
    peri_k_cosine_grad_args args = {.da = da ? peri__data(da) : NULL,
                                    .db = db ? peri__data(db) : NULL,
                                    .dy = peri__data(g),
                                    .y = peri__data(saved[COSINE]),
                                    .a = peri__data(a),
                                    .b = peri__data(saved[B]),
                                    .sizes = peri__data(saved[SIZES]),
                                    .dtype = a->dtype,
                                    .cols = cols};
    PERI_TRY(PERI_LAUNCH(peri__device(a), cosine_grad, &args, peri__numel(g),
                         peri__ceil_div(PERI_ELEMENT_GRAIN, 2 * peri__max(cols, 1))));
    grad_in[A] = peri__hand_over(&da);
    grad_in[B] = peri__hand_over(&db);
    return PERI_OK;
}

static const peri__node_vtab cosine_vtab = {.name = "cosine_similarity", .backward = cosine_backward};

/** *out (new, recorded) = the cosine of the rows of @in[2], which are of one shape and dtype: without its last size. */
static peri_status cosine_rows(peri_tensor *const *in, double eps, double added, peri_tensor **out)
{
    const peri_tensor *a = in[A];
    const int32_t left = a->ndim - 1;
    int64_t cols = a->shape[left], rows = 1;
    peri__node *node;
    PERI__HELD peri_tensor *x = NULL, *z = NULL, *y = NULL, *sizes = NULL;
    for (int32_t d = 0; d < left; d++) rows *= a->shape[d];
    const int64_t four[2] = {rows, 4};
    PERI_TRY(peri__contiguous_of(a, &x));
    PERI_TRY(peri__contiguous_of(in[B], &z));
    PERI_TRY(peri__tensor_like(a, left, a->shape, &y));
    PERI_TRY(peri_tensor_new(peri__device(a), PERI_F64, 2, four, &sizes));
    peri_k_cosine_args args = {.y = peri__data(y), .sizes = peri__data(sizes), .a = peri__data(x), .b = peri__data(z),
                               .dtype = a->dtype, .eps = eps, .added = added, .cols = cols};
    PERI_TRY(PERI_LAUNCH(peri__device(a), cosine, &args, rows,
                         peri__ceil_div(PERI_ELEMENT_GRAIN, 2 * peri__max(cols, 1))));
    PERI_TRY(peri__attach(&cosine_vtab, in, 2, &y, 1, &node));
    if (node) {
        peri_tensor *const saved[] = {[A] = x, [B] = z, [SIZES] = sizes, [COSINE] = y};
        for (int32_t i = 0; i < 4; i++) PERI_TRY(peri__node_save_output(node, i, saved[i]));
    }
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/** *out (new, recorded) = @t repeated to @shape[ndim], its dimension @d at the end; @t itself where it is that. */
static peri_status rows_along(peri_tensor *t, int32_t ndim, const int64_t *shape, int32_t d, peri_tensor **out)
{
    PERI__HELD peri_tensor *wide = NULL;
    if (ndim == 0) return peri_tensor_reshape(t, 1, (int64_t[]){1}, out);
    const bool same = t->ndim == ndim && !memcmp(t->shape, shape, sizeof *shape * (size_t)ndim);
    if (same) return peri__exchange_last(t, d, out);
    PERI_TRY(peri_tensor_expand(t, ndim, shape, &wide));
    return peri__exchange_last(wide, d, out);
}

static peri_status cosine_along(const char *function, peri_tensor *a, peri_tensor *b, int32_t dim, double eps,
                                double added, peri_tensor **out)
{
    int32_t ndim, d, left = 0;
    int64_t sizes[PERI_MAX_DIMS];
    peri_tensor all = *a;
    PERI__HELD peri_tensor *x = NULL, *z = NULL, *rows = NULL, *y = NULL, *turned = NULL;
    PERI_TRY(peri__broadcast_shape(function, a, b, &ndim, sizes));
    memcpy(all.shape, sizes, sizeof sizes);
    all.ndim = ndim;
    PERI_TRY(peri__along(function, &all, dim, &d));
    PERI_TRY(rows_along(a, ndim, sizes, d, &x));
    PERI_TRY(rows_along(b, ndim, sizes, d, &z));
    PERI_TRY(cosine_rows((peri_tensor *[]){x, z}, eps, added, &rows));
    if (d >= ndim - 1) { /* the last one, or there was none */
        *out = peri__hand_over(&rows);
        return PERI_OK;
    }
    PERI_TRY(peri_tensor_unsqueeze(rows, -1, &y));
    PERI_TRY(peri_tensor_transpose(y, d, -1, &turned));
    for (int32_t i = 0; i < ndim; i++)
        if (i != d) sizes[left++] = sizes[i];
    return peri_tensor_reshape(turned, left, sizes, out);
}

peri_status peri_op_cosine_similarity(peri_tensor *a, peri_tensor *b, int32_t dim, double eps, double added,
                                      peri_tensor **out)
{
    static const char *const function = "peri_op_cosine_similarity";
    char text[300];
    peri_tensor *const in[2] = {a, b};
    peri__operands o;
    PERI__HELD peri_tensor *x = NULL, *z = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "a", a, -1, -1));
    PERI_TRY(peri__check_tensor(function, "b", b, -1, -1));
    PERI_TRY(peri__check_same_device(function, a, b));
    const int32_t dtype = peri__common_dtype(in, 2);
    if (dtype < 0 || dtype == PERI_C64 || dtype == PERI_C128 || peri__is_integer(dtype))
        return peri__fail(PERI_EINVAL, "%s: a and b are %s, allowed: floats; cast them (in Lua t:to \"f32\")", function,
                          peri__pair_text(a, b, text, sizeof text));
    PERI_TRY(peri_tensor_to(a, dtype, NULL, &x));
    PERI_TRY(peri_tensor_to(b, dtype, NULL, &z));
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, (peri_tensor *[]){x, z}, 2));
    return peri__narrow(&o, cosine_along(function, o.in[0], o.in[1], dim, eps, added, &o.out), out);
}
