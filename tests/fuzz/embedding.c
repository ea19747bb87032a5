/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding.c: any ids, offsets, weights, padding and norm at peri_embedding_bag, in every mode, forward and backward.
 * What comes out is held against a model in double precision; input that makes no bags of rows is an error, after which
 * the matrix has its bits.
 */
#include <perilune/perilune.h>

#include "choices.h"

#include <math.h>
#include <string.h>

enum { IDS = 60, BAGS = 24, ROWS = 12, COLS = 40 };

static peri_device *device;

typedef struct scene {
    peri_embedding_bag_args a;
    int64_t n, bags, rows, cols, length; /* length: of the bags, without offsets */
    int64_t id[IDS], offset[BAGS + 1];
    float w[ROWS * COLS], x[IDS]; /* the matrix, after scaling; the ids' weights */
    bool weighted;
} scene;

static void fine(peri_status status, const char *what) { require(status == PERI_OK, what); }

static int64_t extreme(void)
{
    static const int64_t values[] = {-1, -2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, INT64_C(1) << 40, 1000};
    return values[pick(8)];
}

static float number(void) { return (float)(pick(65) - 32) / 8; }

static peri_tensor *tensor_of(const void *x, int32_t dtype, int32_t ndim, const int64_t *shape, int64_t n)
{
    peri_tensor *t = NULL;
    fine(peri_tensor_new(device, dtype, ndim, shape, &t), "a tensor");
    fine(peri_tensor_write(t, x, n * peri_dtype_size(dtype)), "a write");
    return t;
}

static peri_tensor *integers(const int64_t *x, int32_t ndim, const int64_t *shape, int64_t n)
{
    int32_t narrow[IDS + BAGS];
    bool fits = true;
    for (int64_t i = 0; i < n; i++) {
        fits = fits && x[i] >= INT32_MIN && x[i] <= INT32_MAX;
        narrow[i] = (int32_t)x[i];
    }
    return fits && pick(2) ? tensor_of(narrow, PERI_I32, ndim, shape, n) : tensor_of(x, PERI_I64, ndim, shape, n);
}

static void choose_bags(scene *s)
{
    bool spoil_ids = pick(4) == 3, spoil_offsets = pick(4) == 3;
    bool matrix = s->a.mode != PERI_POOLING_NONE && pick(3) == 2;
    s->bags = pick(BAGS + 1), s->length = pick(3);
    s->n = matrix ? s->bags * s->length : pick(IDS + 1);
    for (int64_t i = 0; i < s->n; i++) {
        s->id[i] = spoil_ids && pick(12) == 11 ? extreme() : s->rows ? pick(s->rows) : -1;
        s->x[i] = s->weighted ? number() : 1;
    }
    for (int64_t b = 0; b < s->bags; b++)
        s->offset[b + 1] = s->offset[b] + pick(s->n - s->offset[b] < 6 ? s->n - s->offset[b] + 1 : 6);
    s->a.include_last_offset = !matrix && s->a.mode != PERI_POOLING_NONE && pick(2);
    if (s->bags && (!s->a.include_last_offset || pick(8) != 7)) s->offset[s->bags] = s->n;
    if (spoil_offsets && !matrix && s->bags + s->a.include_last_offset)
        s->offset[pick(s->bags + s->a.include_last_offset)] = pick(2) ? extreme() : pick(IDS);
    for (int64_t b = 0; b <= s->bags && matrix; b++) s->offset[b] = b * s->length;
    int64_t shape[2] = {s->bags, s->length}, given = s->bags + s->a.include_last_offset;
    s->a.ids = matrix ? integers(s->id, 2, shape, s->n) : integers(s->id, 1, &s->n, s->n);
    if (!matrix && s->a.mode != PERI_POOLING_NONE) s->a.offsets = integers(s->offset, 1, &given, given);
    if (s->weighted) {
        s->a.weights = tensor_of(s->x, PERI_F32, matrix ? 2 : 1, matrix ? shape : &s->n, s->n);
        fine(peri_tensor_requires_grad_set(s->a.weights, true), "a leaf");
    }
}

static void choose(scene *s)
{
    static const int64_t cols[] = {1, 2, 3, 7, 8, 16, 17, 33, 40};
    static const double types[] = {1, 2, 3, INFINITY};
    s->rows = pick(ROWS + 1), s->cols = cols[pick(9)];
    for (int64_t i = 0; i < s->rows * s->cols; i++) s->w[i] = number();
    s->a.mode = (int32_t)pick(4);
    s->a.padded = s->rows && pick(2);
    s->a.padding_idx = s->a.padded ? pick(s->rows) : 0;
    if (pick(4) == 3) s->a.max_norm = 3;
    s->a.norm_type = types[pick(4)];
    s->weighted = s->a.mode == PERI_POOLING_SUM && pick(2);
    s->a.weight = tensor_of(s->w, PERI_F32, 2, (int64_t[]){s->rows, s->cols}, s->rows * s->cols);
    fine(peri_tensor_requires_grad_set(s->a.weight, true), "a leaf");
    choose_bags(s);
}

/* -- the model ----------------------------------------------------------------------------------------------------- */

/** Each id lies in one bag. */
static bool whole(const scene *s)
{
    if (!s->a.offsets) return true;
    if (s->bags == 0 && s->n > 0) return false;
    if ((s->bags > 0 || s->a.include_last_offset) && s->offset[0] != 0) return false;
    for (int64_t b = 0; b < s->bags; b++)
        if (s->offset[b + 1] < s->offset[b]) return false;
    return s->offset[s->bags] == s->n;
}

static bool good(const scene *s)
{
    if (s->a.mode == PERI_POOLING_NONE) {
        for (int64_t i = 0; i < s->n; i++)
            if (s->id[i] < -1 || s->id[i] >= s->rows) return false;
        return true;
    }
    for (int64_t b = 0; b < s->bags; b++)
        for (int64_t i = s->offset[b]; i < s->offset[b + 1]; i++)
            if (s->id[i] < -1 || s->id[i] >= s->rows) return false;
    return true;
}

/** Scale the model's rows. */
static void scale_rows(scene *s)
{
    bool asked[ROWS] = {false};
    for (int64_t i = 0; i < s->n && s->a.max_norm > 0; i++)
        if (s->id[i] >= 0 && s->id[i] < s->rows) asked[s->id[i]] = true;
    for (int64_t r = 0; r < s->rows; r++) {
        double norm = 0, p = s->a.norm_type;
        for (int64_t d = 0; d < s->cols; d++) {
            double size = fabs((double)s->w[r * s->cols + d]);
            norm = isinf(p) ? fmax(norm, size) : norm + pow(size, p);
        }
        norm = isinf(p) ? norm : pow(norm, 1 / p);
        if (!asked[r] || !(norm > s->a.max_norm * (1 + 1e-12))) continue;
        for (int64_t d = 0; d < s->cols; d++)
            s->w[r * s->cols + d] = (float)((double)s->w[r * s->cols + d] * (s->a.max_norm / (norm + 1e-7)));
    }
}

/** Column d of bag b (mode NONE: id b), and what its gradient g adds to the rows' and the ids' weights'. */
static double model(const scene *s, int64_t b, int64_t d, double g, double *rows, double *weights)
{
    bool none = s->a.mode == PERI_POOLING_NONE, mean = s->a.mode == PERI_POOLING_MEAN;
    int64_t from = none ? b : s->offset[b], past = none ? b + 1 : s->offset[b + 1], counted = 0, best = -1;
    double sum = 0, most = 0;
    for (int64_t i = from; i < past; i++) counted += !s->a.padded || s->id[i] != s->a.padding_idx;
    for (int64_t i = from; i < past; i++) {
        bool padding = s->a.padded && s->id[i] == s->a.padding_idx;
        if (s->id[i] < 0 || (padding && !none)) continue;
        double x = (double)s->w[s->id[i] * s->cols + d], factor = (mean ? 1 / (double)counted : 1);
        sum += factor * x * (double)s->x[i];
        if (best < 0 || x > most) best = i, most = x;
        if (s->a.mode == PERI_POOLING_MAX || padding) continue;
        rows[s->id[i] * s->cols + d] += g * factor * (double)s->x[i];
        weights[i] += g * x;
    }
    if (s->a.mode != PERI_POOLING_MAX) return sum;
    if (best >= 0) rows[s->id[best] * s->cols + d] += g;
    return best < 0 ? 0 : most;
}

static void same(peri_tensor *t, const double *want, int64_t n, const char *what)
{
    float got[IDS * COLS];
    fine(peri_tensor_read(t, got, 4 * n), "a read");
    for (int64_t i = 0; i < n; i++) require(fabs((double)got[i] - want[i]) <= 1e-4 * (1 + fabs(want[i])), what);
}

static void judge(scene *s, peri_tensor *out)
{
    static double want[IDS * COLS], rows[ROWS * COLS], weights[IDS];
    static float g[IDS * COLS];
    int64_t lines = s->a.mode == PERI_POOLING_NONE ? s->n : s->bags;
    peri_tensor *upstream, *grad = NULL;
    peri_tensor_info desc = {.size = sizeof desc};
    memset(rows, 0, sizeof rows);
    memset(weights, 0, sizeof weights);
    peri_tensor_describe(out, &desc);
    require(desc.ndim == 2 && desc.shape[0] == lines && desc.shape[1] == s->cols, "the shape of the output");
    for (int64_t i = 0; i < lines * s->cols; i++) {
        g[i] = number();
        want[i] = model(s, i / s->cols, i % s->cols, (double)g[i], rows, weights);
    }
    same(out, want, lines * s->cols, "an output that its bag does not have");
    upstream = tensor_of(g, PERI_F32, 2, desc.shape, lines * s->cols);
    fine(peri_tensor_backward(out, upstream), "a backward pass");
    fine(peri_tensor_grad(s->a.weight, &grad), "a gradient");
    same(grad, rows, s->rows * s->cols, "a gradient of the matrix");
    peri_tensor_release(grad);
    if (s->weighted) {
        fine(peri_tensor_grad(s->a.weights, &grad), "a gradient");
        same(grad, weights, s->n, "a gradient of the ids' weights");
        peri_tensor_release(grad);
    }
    peri_tensor_release(upstream);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static scene s;
    static double rows[ROWS * COLS];
    peri_tensor *out = NULL;
    bytes = data;
    left = size;
    memset(&s, 0, sizeof s);
    s.a.size = sizeof s.a;
    int64_t live = peri_mem_objects();
    require(peri_device_get(pick(6) == 5 ? "opaque" : "cpu", &device) == PERI_OK, "a device");
    choose(&s);
    peri_status status = peri_embedding_bag(&s.a, &out);
    bool in_bags = whole(&s);
    require(status == (!in_bags ? PERI_EINVAL : good(&s) ? PERI_OK : PERI_ERANGE), "the status");
    if (status == PERI_OK) scale_rows(&s);
    else
        require(strstr(peri_error_message(), in_bags ? "table 'weight', sample " : "offset") != NULL,
                "a message without the place");
    for (int64_t i = 0; i < s.rows * s.cols; i++) rows[i] = (double)s.w[i];
    same(s.a.weight, rows, s.rows * s.cols, "the matrix afterwards");
    /* which element is the largest depends on every bit */
    fine(peri_tensor_read(s.a.weight, s.w, 4 * s.rows * s.cols), "a read");
    if (status == PERI_OK) judge(&s, out);
    peri_tensor *own[] = {out, s.a.weight, s.a.ids, s.a.offsets, s.a.weights};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) peri_tensor_release(own[i]);
    fine(peri_device_synchronize(device), "a device");
    require(peri_mem_objects() == live, "objects that were not released");
    return 0;
}
