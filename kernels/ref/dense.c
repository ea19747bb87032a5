/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.c (ref): see kernels/dense.h.
 */

static void ref_axpy(const void *args, int64_t begin, int64_t end)
{
    const peri_k_axpy_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        if (a->dtype == PERI_F32) ((float *)a->y)[i] += (float)a->alpha * ((const float *)a->x)[i];
        else ((double *)a->y)[i] += a->alpha * ((const double *)a->x)[i];
    }
}
