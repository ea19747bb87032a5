/* SPDX-License-Identifier: Apache-2.0
 *
 * places.c (ref): places and times of members: see kernels/sequence.h.
 */

static void ref_sequence_positions(const void *args, int64_t begin, int64_t end)
{
    const peri_k_sequence_positions_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        int64_t number = peri_k_sequence_of(a->offsets, a->sequences, r);
        peri_k_sequence s = peri_k_sequence_at(a->offsets, a->targets, number);
        int64_t history = s.n - s.t, i = r - s.first, from = history - (i < history ? i : history);
        a->out[r] = a->number ? number : from < a->most ? from : a->most - 1;
    }
}

static double ref_time_between(const void *times, int64_t last, int64_t i, int32_t dtype)
{
    switch (dtype) {
    case PERI_I64: return peri_k_time_between(((const int64_t *)times)[last], ((const int64_t *)times)[i]);
    case PERI_I32: return (double)((const int32_t *)times)[last] - (double)((const int32_t *)times)[i];
    case PERI_F32: return (double)((const float *)times)[last] - (double)((const float *)times)[i];
    default: return ((const double *)times)[last] - ((const double *)times)[i];
    }
}

static void ref_time_buckets(const void *args, int64_t begin, int64_t end)
{
    const peri_k_time_buckets_args *a = args;
    for (int64_t r = begin; r < end; r++) {
        int64_t last = a->offsets[peri_k_sequence_of(a->offsets, a->sequences, r) + 1] - 1;
        double d = ref_time_between(a->times, last, r, a->dtype), x = (d > 1e-6 ? d : 1e-6) / a->increment;
        x = a->log ? log(x) : sqrt(x);
        a->out[r] = !(x > 0) ? 0 : x < (double)a->most ? (int64_t)x : a->most;
    }
}
