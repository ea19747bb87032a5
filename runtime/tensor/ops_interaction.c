/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_interaction.c: pairwise dot products of dense and sparse features (DLRM).
 */
#include "tensor_internal.h"
#include "../../kernels/dense.h"

#include <perilune/ops.h>

enum { SAMPLE_GRAIN = 16 }; /* samples that are worth a thread */

/** @t itself if its last dimension is contiguous, else a contiguous copy. @out new. */
static peri_status rows_of(peri_tensor *t, peri_tensor **out)
{
    if (t->stride[t->ndim - 1] != 1 && t->shape[t->ndim - 1] != 1) return peri__contiguous_of(t, out);
    peri_tensor_retain(t);
    *out = t;
    return PERI_OK;
}

/** saved: dense, sparse, as the kernel takes them. */
static peri_status interaction_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *dense = node->saved[0], *sparse = node->saved[1], *g, *d[2] = {NULL};
    peri_status status;
    PERI_TRY(rows_of(grad_out[0], &g));
    for (int32_t i = 0; i < 2; i++)
        if (peri__needs(node, i))
            PERI_TRY_GOTO(peri__tensor_like(node->saved[i], node->saved[i]->ndim, node->saved[i]->shape, &d[i]), out);
    peri_k_interaction_grad_args args = {.ddense = d[0] ? peri__data(d[0]) : NULL,
                                         .dsparse = d[1] ? peri__data(d[1]) : NULL,
                                         .dy = peri__data(g),
                                         .dense = peri__data(dense),
                                         .sparse = peri__data(sparse),
                                         .dtype = dense->dtype,
                                         .features = sparse->shape[1],
                                         .dim = sparse->shape[2],
                                         .dy_stride = g->stride[0],
                                         .dense_stride = dense->stride[0],
                                         .sparse_stride = sparse->stride[0],
                                         .feature_stride = sparse->stride[1]};
    status = PERI_LAUNCH(peri__device(g), interaction_grad, &args, dense->shape[0], SAMPLE_GRAIN);
out:
    peri_tensor_release(g);
    for (int32_t i = 0; i < 2; i++) {
        if (status < 0) peri_tensor_release(d[i]);
        else grad_in[i] = d[i];
    }
    return status;
}

static const peri__node_vtab interaction_vtab = {.name = "interaction", .backward = interaction_backward};

static peri_status interaction(peri_tensor *dense, peri_tensor *sparse, peri_tensor **out)
{
    static const char *const function = "peri_op_interaction";
    char text[300];
    PERI_TRY(peri__check_float(function, "dense", dense));
    PERI_TRY(peri__check_tensor(function, "dense", dense, -1, 2));
    PERI_TRY(peri__check_tensor(function, "sparse", sparse, dense->dtype, 3));
    PERI_TRY(peri__check_same_device(function, dense, sparse));
    if (dense->shape[0] != sparse->shape[0] || dense->shape[1] != sparse->shape[2])
        return peri__fail(PERI_EINVAL, "%s: dense and sparse are %s; wanted [B, D] and [B, F, D]", function,
                          peri__pair_text(dense, sparse, text, sizeof text));
    int64_t f = sparse->shape[1], shape[2] = {dense->shape[0], dense->shape[1] + f * (f + 1) / 2};
    peri_tensor *in[2] = {dense, sparse}, *saved[2] = {NULL}, *y = NULL;
    peri__node *node;
    peri_status status;
    for (int32_t i = 0; i < 2; i++) PERI_TRY_GOTO(rows_of(in[i], &saved[i]), out);
    PERI_TRY_GOTO(peri__tensor_like(dense, 2, shape, &y), out);
    peri_k_interaction_args args = {.y = peri__data(y),
                                    .dense = peri__data(saved[0]),
                                    .sparse = peri__data(saved[1]),
                                    .dtype = dense->dtype,
                                    .features = f,
                                    .dim = dense->shape[1],
                                    .dense_stride = saved[0]->stride[0],
                                    .sparse_stride = saved[1]->stride[0],
                                    .feature_stride = saved[1]->stride[1]};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(dense), interaction, &args, shape[0], SAMPLE_GRAIN), out);
    PERI_TRY_GOTO(peri__attach(&interaction_vtab, in, 2, &y, 1, &node), out);
    if (node)
        for (int32_t i = 0; i < 2 && status >= 0; i++) status = peri__node_save_output(node, i, saved[i]);
out:
    for (int32_t i = 0; i < 2; i++) peri_tensor_release(saved[i]);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** In an autocast region the products are of numbers of its dtype, as those of matmul. */
peri_status peri_op_interaction(peri_tensor *dense, peri_tensor *sparse, peri_tensor **out)
{
    peri_tensor *in[2] = {dense, sparse}, *cast[2] = {NULL};
    const int32_t low = dense ? peri__autocast(peri__device(dense)) : -1;
    peri__operands o;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < 2 && status >= 0; i++) {
        if (low >= 0 && in[i] && in[i]->dtype != PERI_F64) status = peri_tensor_to(in[i], low, NULL, &cast[i]);
        else if (in[i]) peri_tensor_retain(cast[i] = in[i]);
    }
    if (status >= 0) status = peri__widen_operands(&o, PERI__IN_ANY, cast, 2);
    for (int32_t i = 0; i < 2; i++) peri_tensor_release(cast[i]);
    PERI_TRY(status);
    return peri__narrow(&o, interaction(o.in[0], o.in[1], out ? &o.out : NULL), out);
}
