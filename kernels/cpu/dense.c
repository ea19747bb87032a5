/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.c (cpu): see kernels/dense.h.
 */

static void cpu_axpy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_axpy_args *a = args;
    if (a->dtype == PERI_F32) {
        float *y = a->y, alpha = (float)a->alpha;
        const float *x = a->x;
        for (int64_t i = begin; i < end; i++) y[i] += alpha * x[i];
    } else {
        double *y = a->y;
        const double *x = a->x;
        for (int64_t i = begin; i < end; i++) y[i] += a->alpha * x[i];
    }
}

#define K_CPU_DENSE [PERI_K_axpy] = cpu_axpy,
