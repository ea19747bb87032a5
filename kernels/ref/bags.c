/* SPDX-License-Identifier: Apache-2.0
 *
 * bags.c (ref): see kernels/bags.h.
 */

static int64_t ref_bag_int(const void *x, int64_t i, int32_t dtype)
{
    return dtype == PERI_I32 ? ((const int32_t *)x)[i] : ((const int64_t *)x)[i];
}

/** Bag @b: [*begin, the result). */
static int64_t ref_bag_range(const peri_k_bags *s, int64_t b, int64_t *begin)
{
    int64_t from = ref_bag_int(s->offsets, b, s->offsets_dtype), to = ref_bag_int(s->offsets, b + 1, s->offsets_dtype);
    *begin = from < 0 ? 0 : from > s->n_ids ? s->n_ids : from;
    return to < *begin ? *begin : to > s->n_ids ? s->n_ids : to;
}

static void ref_bag_pad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bag_pad_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t id = ref_bag_int(a->ids, i, a->dtype);
        if (id == a->padding) id = -1;
        if (a->dtype == PERI_I32) ((int32_t *)a->out)[i] = (int32_t)id;
        else ((int64_t *)a->out)[i] = id;
    }
}

static void ref_bag_scale(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bag_scale_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        int64_t i, n = 0, past = ref_bag_range(&a->bags, b, &i);
        for (; i < past; i++) n += ref_bag_int(a->bags.ids, i, a->bags.ids_dtype) != a->padding;
        a->scale[b] = n ? 1 / (float)n : 1;
    }
}

static void ref_bag_max(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bag_max_args *a = args;
    for (int64_t b = begin; b < end; b++) {
        float *out = a->out + b * a->bags.cols;
        int32_t *places = a->places + b * a->bags.cols;
        int64_t first, past = ref_bag_range(&a->bags, b, &first);
        for (int64_t d = 0; d < a->bags.cols; d++) {
            float most = 0;
            int32_t place = -1;
            for (int64_t i = first; i < past; i++) {
                int64_t id = ref_bag_int(a->bags.ids, i, a->bags.ids_dtype);
                if (id < 0 || id >= a->bags.rows) continue;
                float x = a->x[id * a->bags.cols + d];
                if (place < 0 || (most == most && !(x <= most))) most = x, place = (int32_t)(i - first);
            }
            out[d] = most;
            places[d] = place;
        }
    }
}

static void ref_bag_max_grad(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bag_max_grad_args *a = args;
    const int64_t cols = a->bags.cols, from = begin * PERI_K_BAG_COLUMNS;
    const int64_t to = end * PERI_K_BAG_COLUMNS < cols ? end * PERI_K_BAG_COLUMNS : cols;
    for (int64_t b = 0; b < a->n; b++) {
        int64_t first, past = ref_bag_range(&a->bags, b, &first);
        for (int64_t d = from; d < to; d++) {
            int64_t i = first + a->places[b * cols + d];
            if (i < first || i >= past) continue;
            int64_t id = ref_bag_int(a->bags.ids, i, a->bags.ids_dtype);
            if (id >= 0 && id < a->bags.rows) a->dx[id * cols + d] += a->grad[b * cols + d];
        }
    }
}

static double ref_bag_norm(const float *x, int64_t n, double p)
{
    double sum = 0;
    for (int64_t d = 0; d < n; d++) {
        double size = fabs((double)x[d]);
        if (isinf(p)) sum = size > sum || size != size ? size : sum;
        else sum += p == 2 ? size * size : p == 1 ? size : pow(size, p);
    }
    return p == 2 ? sqrt(sum) : isinf(p) || p == 1 ? sum : pow(sum, 1 / p);
}

static void ref_bag_renorm(const void *args, int64_t begin, int64_t end)
{
    const peri_k_bag_renorm_args *a = args;
    for (int64_t i = begin; i < end; i++) {
        int64_t id = ref_bag_int(a->ids, i, a->dtype);
        if (id < 0 || id >= a->rows) continue;
        float *x = a->x + id * a->cols;
        double norm = ref_bag_norm(x, a->cols, a->norm_type);
        for (int64_t d = 0; d < a->cols && norm > a->max_norm; d++)
            x[d] = (float)((double)x[d] * (a->max_norm / (norm + 1e-7)));
    }
}
