/* SPDX-License-Identifier: Apache-2.0
 *
 * segment.c: sums of segments, with gradient.
 */
#include "sparse_internal.h"
#include "../../kernels/sparse.h"

static int64_t segments_per_thread(int64_t segments, int64_t n)
{
    return peri__max(1, segments * PERI_INT_GRAIN / peri__max(1, peri__max(n, segments)));
}

enum { KEPT_STEP, KEPT_ELEMENTS }; /* elements: of values */

/** saved[0]: offsets. */
static peri_status sum_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const peri_tensor *offsets = node->saved[0];
    int64_t n = node->kept[KEPT_ELEMENTS], segments = offsets->shape[0] - 1;
    peri_tensor *flat, *grad = NULL;
    PERI_TRY(peri_tensor_contiguous(grad_out[0], &flat));
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &n, &grad), out);
    if (segments == 0) PERI_TRY_GOTO(peri__tensor_zero(grad), out);
    peri_k_segment_spread_args args = {.out = peri__data(grad),
                                       .grad = peri__data(flat),
                                       .offsets = peri__data(offsets),
                                       .step = node->kept[KEPT_STEP],
                                       .segments = segments,
                                       .n = n,
                                       .dtype = flat->dtype,
                                       .offsets_dtype = offsets->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), segment_spread, &args, segments, segments_per_thread(segments, n)),
                  out);
    grad_in[0] = grad;
    grad = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    return status;
}

static const peri__node_vtab sum_vtab = {.name = "segment_sum", .backward = sum_backward};

static peri_status check_args(const char *f, const peri_tensor *values, const peri_tensor *offsets, int64_t step)
{
    PERI_TRY(peri__check_tensor(f, "values", values, -1, 1));
    PERI_TRY(peri__check_ints(f, "offsets", offsets, 1, values));
    int32_t d = values->dtype;
    if (d != PERI_F32 && d != PERI_F64 && d != PERI_I32 && d != PERI_I64)
        return peri__fail(PERI_EINVAL, "%s: values are %s, allowed: f32, f64, i32, i64", f, peri_dtype_name(d));
    if (step < 1) return peri__fail(PERI_EINVAL, "%s: batch size %lld, allowed: 1 and more", f, (long long)step);
    if (values->shape[0] % step)
        return peri__fail(PERI_EINVAL, "%s: %lld values, wanted a multiple of the batch size %lld", f,
                          (long long)values->shape[0], (long long)step);
    return PERI_OK;
}

peri_status peri_sparse_segment_sum(peri_tensor *values, peri_tensor *offsets, int64_t step, peri_tensor **out)
{
    static const char f[] = "peri_sparse_segment_sum";
    PERI_TRY(check_args(f, values, offsets, step));
    int64_t n = values->shape[0], segments = offsets->shape[0] - 1;
    peri_tensor *flat = NULL, *ends = NULL, *sums = NULL;
    peri__bags bags = {0};
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(values, &flat), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(offsets, &ends), out);
    PERI_TRY_GOTO(peri__bags_of(f, "offsets", &bags, NULL, ends, n / step, 0), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &segments, &sums), out);
    peri_k_segment_sum_args args = {.out = peri__data(sums),
                                    .values = peri__data(flat),
                                    .offsets = peri__data(ends),
                                    .step = step,
                                    .dtype = flat->dtype,
                                    .offsets_dtype = ends->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), segment_sum, &args, segments, segments_per_thread(segments, n)), out);
    if (peri__differentiable(flat)) {
        PERI_TRY_GOTO(peri__record(&sum_vtab, &flat, 1, &sums, 1, &node), out);
        peri__node_save(node, 0, ends);
        node->kept[KEPT_STEP] = step;
        node->kept[KEPT_ELEMENTS] = n;
    }
    *out = sums;
    sums = NULL;
out:
    peri__bags_fini(&bags);
    peri_tensor_release(flat);
    peri_tensor_release(ends);
    peri_tensor_release(sums);
    return status;
}
