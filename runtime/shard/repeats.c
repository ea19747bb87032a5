/* SPDX-License-Identifier: Apache-2.0
 *
 * repeats.c: rows that are in place (rows.h) in a variable batch, where several samples may have the same bag. Its row
 * is written where the first of them wants it, and copied to the others; its gradient is read there if no other has it,
 * and else a sum that is made beside. So only what repeats is moved twice: through the buffers it would be everything.
 *
 * Sums stand in rows as wide as the gradient's, so that one number says where a bag's gradient is: a row of the one or
 * of the other.
 */
#include "rows.h"
#include "../../kernels/route.h"

/** A sample whose bag another one before it has too. */
typedef struct repeat {
    int32_t sample, first; /* first: the first one that has the bag */
    int32_t bag;           /* of the feature */
    int32_t sum;           /* number of the bag's sum among the feature's */
    bool more;             /* it is not the first repeat of its bag */
} repeat;

struct peri__repeats {
    const peri__home *h;
    peri_tensor *rows_of, *list; /* backing of what follows */
    int32_t *row_of;             /* by bag of the input: see peri__repeats_rows */
    repeat *repeats; /* of each feature from begin[feature] on */
    int64_t *begin, *n, *sums, *unused; /* by feature; repeats, sums, and bags that no sample has; backing: begin */
    int64_t n_bags;  /* of the input */
    const int64_t *inverse;
    peri_tensor *summed; /* room for the sums; NULL: there are none */
    int64_t past;        /* one past the last row that a bag's gradient may have, once there are sums; 0: they lie too
                            far away */
    const peri__rows *rows; /* whose rows are copied */
    float *data;         /* of the result, or of its gradient */
    float *sum;          /* a row of zeros, then the sums */
};

/** The repeats of a bag get the number of its sum; meanwhile that is -2 - its row. */
static int64_t number_sums(repeat *first, const repeat *past, int32_t *row_of)
{
    int32_t n = 0;
    for (repeat *x = first; x < past; x++) {
        x->more = row_of[x->bag] < 0;
        if (!x->more) row_of[x->bag] = -2 - n++;
        x->sum = -2 - row_of[x->bag];
    }
    for (repeat *x = first; x < past; x++) row_of[x->bag] = x->first;
    return n;
}

/** peri_range_fn: what repeats in features [from, to). */
static void find_repeats(void *ctx, int64_t from, int64_t to)
{
    peri__repeats *r = ctx;
    const int64_t rows = r->h->rows;
    for (int64_t f = from; f < to; f++) {
        const int64_t *inverse = r->inverse + r->h->feature_inverse[f], bags = r->h->feature_rows[f];
        int32_t *row_of = r->row_of + r->h->feature_first[f];
        repeat *first = r->repeats + r->begin[f], *past = first;
        if (r->begin[f] == r->begin[f + 1]) continue;
        for (int64_t b = 0; b < bags; b++) row_of[b] = -1;
        for (int64_t s = 0; s < rows; s++) {
            const int64_t bag = inverse[s];
            if (row_of[bag] < 0) row_of[bag] = (int32_t)s;
            else *past++ = (repeat){.sample = (int32_t)s, .first = row_of[bag], .bag = (int32_t)bag};
        }
        r->n[f] = past - first;
        r->sums[f] = number_sums(first, past, row_of);
        for (int64_t b = 0; b < bags; b++) {
            r->unused[f] += row_of[b] < 0;
            if (row_of[b] < 0) row_of[b] = (int32_t)rows;
        }
    }
}

/** Room for what repeats: as many samples as there are, of each feature of an output. */
static peri_status make_room(peri__repeats *r)
{
    const peri__home *h = r->h;
    const int32_t n = r->h->e->routes->n_features;
    r->begin = peri__alloc_zero(sizeof *r->begin * (size_t)(4 * n + 1));
    if (!r->begin) return PERI_ENOMEM;
    r->n = r->begin + n + 1;
    r->sums = r->n + n;
    r->unused = r->sums + n;
    for (int32_t i = 0; i < h->n_outputs; i++) r->begin[h->output_feature[i] + 1] = peri__max(1, h->rows);
    for (int32_t f = 0; f < n; f++) {
        if (r->begin[f + 1]) r->n_bags = peri__max(r->n_bags, h->feature_first[f] + h->feature_rows[f]);
        r->begin[f + 1] += r->begin[f];
    }
    const int64_t bytes = (int64_t)sizeof *r->repeats * r->begin[n];
    PERI_TRY(peri_tensor_new(r->h->e->device, PERI_I32, 1, &r->n_bags, &r->rows_of));
    PERI_TRY(peri_tensor_new(r->h->e->device, PERI_U8, 1, &bytes, &r->list));
    r->row_of = peri__data(r->rows_of);
    r->repeats = peri__data(r->list);
    return PERI_OK;
}

peri_status peri__repeats_new(const peri__home *h, const peri_tensor *inverse, peri__repeats **out)
{
    if (h->rows >= INT32_MAX || h->most_bags >= INT32_MAX) return PERI_OK;
    peri__repeats *r = peri__alloc_zero(sizeof *r);
    if (!r) return PERI_ENOMEM;
    r->h = h;
    r->inverse = peri__data(inverse);
    peri_status status = make_room(r);
    if (status >= 0) peri__parallel_for(h->e->routes->n_features, 1, find_repeats, r);
    if (status < 0) peri__repeats_free(r);
    else *out = r;
    return status;
}

void peri__repeats_free(peri__repeats *r)
{
    if (!r) return;
    peri_tensor_release(r->rows_of);
    peri_tensor_release(r->list);
    peri_tensor_release(r->summed);
    peri__free(r->begin);
    peri__free(r);
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

/** peri_range_fn: rows of outputs [from, to) to all samples that repeat. */
static void copy_rows(void *ctx, int64_t from, int64_t to)
{
    const peri__repeats *r = ctx;
    const int64_t stride = r->h->e->cols;
    const peri_k_output *outputs = peri__upload_at(&r->h->up, r->h->outputs);
    for (int64_t i = from; i < to; i++) {
        const peri_k_output *x = &outputs[i];
        const int32_t feature = r->h->output_feature[i];
        const repeat *first = r->repeats + r->begin[feature];
        float *column = r->data + x->column;
        const peri__line line = peri__home_line(r->h, (int32_t)x->first_piece);
        if (!peri__rows_in_place(r->rows, &line)) continue;
        for (const repeat *k = first; k < first + r->n[feature]; k++)
            memcpy(column + k->sample * stride, column + k->first * stride, sizeof *column * (size_t)x->cols);
    }
}

void peri__repeats_copy(peri__repeats *r, const peri__rows *rows)
{
    r->data = peri__data(rows->ends[0]);
    r->rows = rows;
    peri__parallel_for(r->h->n_outputs, 1, copy_rows, r);
}

/* -- gradients ----------------------------------------------------------------------------------------------------- */

static void add_rows(float *restrict to, const float *restrict from, const float *restrict more, int64_t n)
{
    for (int64_t c = 0; c < n; c++) to[c] = 0.0f + from[c] + more[c];
}

static void add_row(float *restrict to, const float *restrict from, int64_t n)
{
    for (int64_t c = 0; c < n; c++) to[c] += from[c];
}

/** Ask for a row that is read in a while: no hardware guesses which. */
static void prefetch_row(const float *row, int64_t cols)
{
    for (int64_t c = 0; c < cols; c += 16) __builtin_prefetch(row + c);
}

/** peri_range_fn: sums of outputs [from, to): from 0, sample after sample. */
static void add_up_outputs(void *ctx, int64_t from, int64_t to)
{
    enum { AHEAD = 8 };
    const peri__repeats *r = ctx;
    const int64_t stride = r->h->e->cols;
    const peri_k_output *outputs = peri__upload_at(&r->h->up, r->h->outputs);
    for (int64_t i = from; i < to; i++) {
        const peri_k_output *x = &outputs[i];
        const int32_t feature = r->h->output_feature[i];
        const repeat *first = r->repeats + r->begin[feature];
        const float *grad = r->data + x->column;
        float *zero = r->sum + x->column, *sums = zero + stride;
        if (r->unused[feature]) memset(zero, 0, sizeof *zero * (size_t)x->cols);
        for (const repeat *k = first, *past = first + r->n[feature]; k < past; k++) {
            const repeat *next = k + AHEAD;
            if (next < past && !next->more) prefetch_row(grad + next->first * stride, x->cols);
            if (next < past) prefetch_row(grad + next->sample * stride, x->cols);
            if (k->more) add_row(sums + k->sum * stride, grad + k->sample * stride, x->cols);
            else add_rows(sums + k->sum * stride, grad + k->first * stride, grad + k->sample * stride, x->cols);
        }
    }
}

/** Where sums are made: a whole number of rows, *away, from the gradient. */
static peri_status allocate_sums(peri__repeats *r, int64_t *away)
{
    const int64_t row = (int64_t)sizeof(float) * r->h->e->cols, grad = (int64_t)(uintptr_t)r->data;
    int64_t most = 0;
    for (int32_t f = 0; f < r->h->e->routes->n_features; f++) most = peri__max(most, r->sums[f]);
    const int64_t n =
        (most + 2) * r->h->e->cols; /* the row of zeros; and one that is left, in parts, before and behind */
    PERI_TRY(peri_tensor_new(r->h->e->device, PERI_F32, 1, &n, &r->summed));
    const int64_t from = (int64_t)(uintptr_t)peri__data(r->summed) - grad, rest = ((from % row) + row) % row;
    r->sum = (float *)peri__data(r->summed) + (rest ? row - rest : 0) / (int64_t)sizeof(float);
    *away = (from + (rest ? row - rest : 0)) / row;
    r->past = peri__max(*away + most + 1, r->h->rows);
    return PERI_OK;
}

peri_status peri__repeats_add_up(peri__repeats *r, peri_tensor *grad)
{
    int64_t away;
    r->data = peri__data(grad);
    PERI_TRY(allocate_sums(r, &away));
    if (away < INT32_MIN || r->past > INT32_MAX) {
        r->past = 0;
        return PERI_OK;
    }
    peri__parallel_for(r->h->n_outputs, 1, add_up_outputs, r);
    for (int32_t f = 0; f < r->h->e->routes->n_features; f++) {
        int32_t *row_of = r->row_of + r->h->feature_first[f];
        const repeat *first = r->repeats + r->begin[f];
        for (int64_t b = 0; r->unused[f] && b < r->h->feature_rows[f]; b++)
            if (row_of[b] == r->h->rows) row_of[b] = (int32_t)away;
        for (const repeat *k = first; k < first + r->n[f]; k++) row_of[k->bag] = (int32_t)(away + 1) + k->sum;
    }
    return PERI_OK;
}

peri_tensor *peri__repeats_sums(const peri__repeats *r, int64_t *past)
{
    *past = r->past;
    return r->past ? r->summed : NULL;
}

peri_tensor *peri__repeats_rows(const peri__repeats *r) { return r->rows_of; }

peri_status peri__repeats_own(const peri__repeats *r, peri_tensor **out)
{
    const peri__routes *routes = r->h->e->routes;
    const int32_t first = routes->rank_wire[r->h->e->rank], end = routes->rank_wire[r->h->e->rank + 1];
    int64_t n = 0;
    for (int32_t w = first; w < end; w++) n += r->h->feature_rows[routes->wire_feature[w]];
    PERI_TRY(peri_tensor_new(r->h->e->device, PERI_I32, 1, &n, out));
    int32_t *to = peri__data(*out);
    for (int32_t w = first; w < end; w++) {
        const int32_t f = routes->wire_feature[w];
        memcpy(to, r->row_of + r->h->feature_first[f], sizeof *to * (size_t)r->h->feature_rows[f]);
        to += r->h->feature_rows[f];
    }
    return PERI_OK;
}
