/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/dense.h: the dense part of a model. All kernels take f32 or f64.
 */
#ifndef PERI_KERNELS_DENSE_H
#define PERI_KERNELS_DENSE_H

#include <perilune/base.h>

#define PERI_KERNELS_DENSE(X) X(axpy)

/** y[i] += alpha * x[i]. range: elements. y may be x. */
typedef struct peri_k_axpy_args {
    void *y;
    const void *x;
    int32_t dtype;
    double alpha;
} peri_k_axpy_args;

#endif
