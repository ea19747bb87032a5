/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_arranged.c: tensors with a border, triangles of matrices, and attention, whose causal form hides one.
 */
#include "tensor_internal.h"
#include "../../kernels/elements.h"

#include <math.h>
#include <perilune/ops.h>

/* -- a border ------------------------------------------------------------------------------------------------------ */

/** The part of x that a padded tensor y has, as a window of x (x = true) or of y. pads[2 d] elements of dimension d
 *  come before it, pads[2 d + 1] behind; where they are negative, so many are cut off. */
static peri_status common_window(peri_tensor *t, const int64_t *pads, bool x, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS] = {0}, offset = t->offset;
    for (int32_t d = 0; d < t->ndim; d++) {
        const int64_t before = x ? -pads[2 * d] : pads[2 * d], behind = x ? -pads[2 * d + 1] : pads[2 * d + 1];
        shape[d] = t->shape[d] - peri__max(before, 0) - peri__max(behind, 0);
        offset += peri__max(before, 0) * t->stride[d];
    }
    return peri__tensor_view(t, t->ndim, shape, t->stride, offset, out);
}

/** *out (new) = @x with a border of @value. */
static peri_status padded(peri_tensor *x, const int64_t *pads, peri_tensor *value, double number, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS] = {0};
    bool grows = false;
    PERI__HELD peri_tensor *y = NULL, *from = NULL, *to = NULL;
    for (int32_t d = 0; d < x->ndim; d++) {
        shape[d] = x->shape[d] + pads[2 * d] + pads[2 * d + 1];
        grows = grows || pads[2 * d] > 0 || pads[2 * d + 1] > 0;
    }
    PERI_TRY(peri__tensor_like(x, x->ndim, shape, &y));
    if (grows && value) PERI_TRY(peri_tensor_copy(y, value));
    else if (grows) PERI_TRY(peri_tensor_fill(y, number));
    PERI_TRY(common_window(x, pads, true, &from));
    PERI_TRY(common_window(y, pads, false, &to));
    if (peri__numel(to) > 0) PERI_TRY(peri_tensor_copy(to, from));
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/** state: the pads; shape[0]: x's. */
static peri_status pad_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const int64_t *pads = node->state;
    int64_t back[2 * PERI_MAX_DIMS];
    for (int32_t d = 0; d < 2 * node->shape[0].ndim; d++) back[d] = -pads[d];
    return padded(grad_out[0], back, NULL, 0, &grad_in[0]);
}

static void pad_fini(peri__node *node)
{
    peri__free(node->state);
    node->state = NULL;
}

static const peri__node_vtab pad_vtab = {.name = "pad", .backward = pad_backward, .fini = pad_fini};

/** *all[2 d] and [2 d + 1]: what comes before and behind dimension d; @pads has those of the last dimension first. */
static peri_status all_pads(const char *function, const peri_tensor *x, const int64_t *pads, int32_t n, int64_t *all)
{
    char text[128];
    peri__words words;
    if (n < 0 || n % 2 || n > 2 * x->ndim)
        return peri__fail(PERI_EINVAL, "%s: %d numbers for %s, wanted two for each of at most %d dimensions", function,
                          n, peri__tensor_text(x, text, sizeof text), x->ndim);
    memset(all, 0, sizeof *all * 2 * PERI_MAX_DIMS);
    for (int32_t i = 0; i < n; i++) all[2 * (x->ndim - 1 - i / 2) + i % 2] = pads[i];
    for (int32_t d = 0; d < x->ndim; d++) {
        const int64_t before = all[2 * d], behind = all[2 * d + 1], size = x->shape[d];
        int64_t whole;
        if (__builtin_add_overflow(before, behind, &whole) || __builtin_add_overflow(whole, size, &whole) ||
            whole < 0 || before < -size || behind < -size)
            return peri__fail(PERI_EINVAL, "%s: %lld elements before and %lld behind %s of %s, which has only %lld",
                              function, (long long)before, (long long)behind, peri__dim_text(d, &words),
                              peri__tensor_text(x, text, sizeof text), (long long)size);
    }
    return PERI_OK;
}

peri_status peri_op_pad(peri_tensor *x, const int64_t *pads, int32_t n, peri_tensor *value, double number,
                        peri_tensor **out)
{
    static const char *const function = "peri_op_pad";
    int64_t all[2 * PERI_MAX_DIMS];
    peri__node *node;
    PERI__HELD peri_tensor *y = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "x", x, -1, -1));
    if (n > 0) PERI_NEED(pads);
    PERI_TRY(all_pads(function, x, pads, n, all));
    if (value) {
        PERI_TRY(peri__check_tensor(function, "value", value, x->dtype, 0));
        PERI_TRY(peri__check_same_device(function, x, value));
    }
    PERI_TRY(padded(x, all, value, number, &y));
    PERI_TRY(peri__attach(&pad_vtab, &x, 1, &y, 1, &node));
    if (node) {
        const size_t bytes = sizeof *all * 2 * (size_t)peri__max(x->ndim, 1);
        node->state = peri__alloc(bytes);
        if (!node->state) return PERI_ENOMEM;
        memcpy(node->state, all, bytes);
        node->shape[0] = peri__shape_of(x);
    }
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/* -- triangles ----------------------------------------------------------------------------------------------------- */

/** *out (new) = the triangle of contiguous @x, with @fill, an element, elsewhere. */
static peri_status triangle(const peri_tensor *x, int64_t k, bool upper, const void *fill, peri_tensor **out)
{
    const int32_t n = x->ndim;
    const int64_t rows = x->shape[n - 2], cols = x->shape[n - 1], most = INT64_C(1) << 62;
    PERI__HELD peri_tensor *y = NULL;
    PERI_TRY(peri__tensor_like(x, n, x->shape, &y));
    peri_k_triangle_args args = {.dst = peri__data(y), .x = peri__data(x), .width = (int32_t)peri_dtype_size(x->dtype),
                                 .upper = upper, .rows = rows, .cols = cols,
                                 .k = peri__max(-most, peri__min(k, most))};
    if (fill) memcpy(args.fill, fill, (size_t)args.width);
    if (peri__numel(y) > 0)
        PERI_TRY(PERI_LAUNCH(peri__device(x), triangle, &args, peri__numel(y) / cols,
                             peri__ceil_div(PERI_ELEMENT_GRAIN, cols)));
    *out = peri__hand_over(&y);
    return PERI_OK;
}

enum { KEPT_K, KEPT_UPPER };

static peri_status triangle_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    PERI__HELD peri_tensor *g = NULL;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    return triangle(g, node->kept[KEPT_K], node->kept[KEPT_UPPER], NULL, &grad_in[0]);
}

static const peri__node_vtab triangle_vtab = {.name = "triangle", .backward = triangle_backward};

/** The same of @x, which need not be contiguous; recorded. */
static peri_status record_triangle(peri_tensor *x, int64_t k, bool upper, const void *fill, peri_tensor **out)
{
    peri__node *node;
    PERI__HELD peri_tensor *flat = NULL, *y = NULL;
    PERI_TRY(peri__contiguous_of(x, &flat));
    PERI_TRY(triangle(flat, k, upper, fill, &y));
    PERI_TRY(peri__attach(&triangle_vtab, &x, 1, &y, 1, &node));
    if (node) node->kept[KEPT_K] = k, node->kept[KEPT_UPPER] = upper;
    *out = peri__hand_over(&y);
    return PERI_OK;
}

peri_status peri_op_triangle(peri_tensor *x, int64_t k, bool upper, peri_tensor **out)
{
    static const char *const function = "peri_op_triangle";
    char text[128];
    PERI_NEED(out);
    PERI_TRY(peri__check_tensor(function, "x", x, -1, -1));
    if (x->ndim < 2)
        return peri__fail(PERI_EINVAL, "%s: x is %s, wanted two dimensions or more", function,
                          peri__tensor_text(x, text, sizeof text));
    return record_triangle(x, k, upper, NULL, out);
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

/** *scores (taken, recorded) = it with -infinity where @mask, bool, is false; or it plus @mask, numbers. */
static peri_status masked(const char *function, peri_tensor **scores, peri_tensor *mask)
{
    PERI__HELD peri_tensor *all = *scores, *low = NULL;
    *scores = NULL;
    if (mask->dtype != PERI_BOOL) return peri_op_add(all, mask, scores);
    PERI_TRY(peri__check_same_device(function, all, mask));
    PERI_TRY(peri_tensor_full(peri__device(all), all->dtype, 0, NULL, -INFINITY, &low));
    return peri_op_where(mask, all, low, scores);
}

/** *scores (taken, recorded), of floats = it with -infinity right of the diagonal. */
static peri_status causal(peri_tensor **scores)
{
    PERI__HELD peri_tensor *all = *scores;
    const float narrow = -INFINITY;
    const double wide = -INFINITY;
    const uint16_t f16 = 0xfc00, bf16 = 0xff80;
    *scores = NULL;
    const void *fill = all->dtype == PERI_F64 ? (const void *)&wide
        : all->dtype == PERI_F16              ? (const void *)&f16
        : all->dtype == PERI_BF16             ? (const void *)&bf16
                                              : (const void *)&narrow;
    return record_triangle(all, 0, false, fill, scores);
}

peri_status peri_op_scaled_dot_product_attention(peri_tensor *q, peri_tensor *k, peri_tensor *v, peri_tensor *mask,
                                                 bool is_causal, double scale, peri_tensor **out)
{
    static const char *const function = "peri_op_scaled_dot_product_attention";
    PERI__HELD peri_tensor *columns = NULL, *products = NULL, *scores = NULL, *weights = NULL;
    PERI_NEED(out);
    PERI_TRY(peri__check_real(function, "q", q));
    PERI_TRY(peri__check_real(function, "k", k));
    PERI_TRY(peri__check_real(function, "v", v));
    if (mask) PERI_TRY(peri__check_tensor(function, "mask", mask, -1, -1));
    if (q->ndim < 2 || k->ndim < 2 || v->ndim < 2)
        return peri__fail(PERI_EINVAL, "%s: q, k and v have %d, %d and %d dimensions, wanted two or more", function,
                          q->ndim, k->ndim, v->ndim);
    PERI_TRY(peri_tensor_transpose(k, -1, -2, &columns));
    PERI_TRY(peri_op_matmul(q, columns, &products));
    PERI_TRY(peri_op_affine(products, scale, 0, &scores));
    if (is_causal) PERI_TRY(causal(&scores));
    if (mask) PERI_TRY(masked(function, &scores, mask));
    PERI_TRY(peri__attention_weights(function, scores, &weights));
    return peri_op_matmul(weights, v, out);
}
