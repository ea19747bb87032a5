/* SPDX-License-Identifier: Apache-2.0
 *
 * unique.c: distinct ids in ascending order, where each id went, and how many there are of each. Ids of a narrow range are marked in an
 * array over it; others are sorted.
 */
#include "internal.h"

/** Marks are worth their scan up to so many places per id, and up to so many in all (their places are met at random). */
enum { MARKS_PER_ID = 32 };
static const int64_t most_marks = (int64_t)1 << 28;

/** What has been asked for. */
typedef struct request {
    peri_tensor *ids; /* contiguous, n > 0 */
    int64_t n, least, most;
    bool inverse, counts;
} request;

static void release(peri_unique_result *r)
{
    peri_tensor_release(r->unique);
    peri_tensor_release(r->inverse);
    peri_tensor_release(r->counts);
}

static peri_status i64_new(const request *q, int64_t n, peri_tensor **out)
{
    return peri_tensor_new(peri__device(q->ids), PERI_I64, 1, &n, out);
}

/** The results, room for @total distinct ids. */
static peri_status allocate(const request *q, int64_t total, peri_unique_result *r)
{
    PERI_TRY(peri__tensor_like(q->ids, 1, &total, &r->unique));
    if (q->inverse) PERI_TRY(i64_new(q, q->n, &r->inverse));
    if (q->counts) PERI_TRY(i64_new(q, total, &r->counts));
    return PERI_OK;
}

/* -- by marks -------------------------------------------------------------------------------------------------------------------- */

/** What marking needs beside the results. */
typedef struct scratch {
    peri_tensor *bits, *ranks, *sums;
} scratch;

static void scratch_fini(scratch *s)
{
    peri_tensor_release(s->bits);
    peri_tensor_release(s->ranks);
    peri_tensor_release(s->sums);
}

static peri_status by_marks(const request *q, peri_unique_result *r)
{
    peri_device *device = peri__device(q->ids);
    int64_t size = q->most - q->least + 1, words = peri__ceil_div(size, 64), blocks = peri__ceil_div(words, 64);
    peri_k_mark_args args = {.x = peri__data(q->ids), .n = q->n, .base = q->least, .size = size, .dtype = q->ids->dtype};
    scratch s = {0};
    peri_status status;
    PERI_TRY_GOTO(i64_new(q, words, &s.bits), out);
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I32, 1, &words, &s.ranks), out);
    PERI_TRY_GOTO(i64_new(q, blocks + 1, &s.sums), out);
    args.words = peri__data(s.bits);
    args.ranks = peri__data(s.ranks);
    args.sums = peri__data(s.sums);
    PERI_TRY_GOTO(PERI_RUN(device, mark, &args), out);
    PERI_TRY_GOTO(peri__word_at(s.sums, blocks, &args.total), out);
    PERI_TRY_GOTO(allocate(q, args.total, r), out);
    args.unique = peri__data(r->unique);
    PERI_TRY_GOTO(PERI_LAUNCH(device, mark_write, &args, blocks, PERI_BLOCK_GRAIN), out);
    if (q->inverse) args.inverse = peri__data(r->inverse);
    if (q->counts) args.counts = peri__data(r->counts);
    if (q->inverse || q->counts) status = PERI_RUN(device, mark_find, &args);
out:
    scratch_fini(&s);
    return status;
}

/* -- by sorting ------------------------------------------------------------------------------------------------------------------ */

static peri_status by_sorting(const request *q, peri_unique_result *r)
{
    peri_device *device = peri__device(q->ids);
    int64_t blocks = peri__ceil_div(q->n, PERI_JAGGED_BLOCK), total;
    peri_tensor *order = NULL, *sorted = NULL, *sums = NULL, *starts = NULL;
    peri_status status;
    PERI_TRY_GOTO(i64_new(q, q->n, &order), out);
    peri_op_sort sort = {.x = peri__data(q->ids), .order = peri__data(order), .n = q->n, .least = q->least, .most = q->most,
                         .dtype = q->ids->dtype};
    PERI_TRY_GOTO(PERI_RUN(device, sort, &sort), out);
    PERI_TRY_GOTO(peri__tensor_like(q->ids, 1, &q->n, &sorted), out);
    PERI_TRY_GOTO(i64_new(q, blocks + 1, &sums), out);
    peri_k_unique_args args = {.x = peri__data(q->ids), .order = peri__data(order), .sorted = peri__data(sorted), .sums = peri__data(sums),
                               .n = q->n, .dtype = q->ids->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(device, unique_count, &args, blocks, PERI_BLOCK_GRAIN), out);
    PERI_TRY_GOTO(peri__scan(sums, blocks, &total), out);
    PERI_TRY_GOTO(allocate(q, total, r), out);
    args.unique = peri__data(r->unique);
    if (q->inverse) args.inverse = peri__data(r->inverse);
    if (q->counts) {
        PERI_TRY_GOTO(i64_new(q, total + 1, &starts), out);
        args.starts = peri__data(starts);
        args.counts = peri__data(r->counts);
    }
    PERI_TRY_GOTO(PERI_LAUNCH(device, unique_write, &args, blocks, PERI_BLOCK_GRAIN), out);
    if (q->counts) status = PERI_LAUNCH(device, unique_counts, &args, total, PERI_INT_GRAIN);
out:
    peri_tensor_release(order);
    peri_tensor_release(sorted);
    peri_tensor_release(sums);
    peri_tensor_release(starts);
    return status;
}

peri_status peri_sparse_unique(peri_tensor *ids, bool inverse, bool counts, peri_unique_result *out)
{
    static const char f[] = "peri_sparse_unique";
    PERI_TRY(peri__check_ints(f, "ids", ids, 1, NULL));
    request q = {.n = ids->shape[0], .inverse = inverse, .counts = counts};
    if (q.n > UINT32_MAX) return peri__fail(PERI_ERANGE, "%s: %lld ids, allowed: less than 2^32", f, (long long)q.n);
    peri_unique_result r = {0};
    PERI_TRY(peri_tensor_contiguous(ids, &q.ids));
    peri_status status;
    if (q.n == 0) {
        status = allocate(&q, 0, &r);
    } else {
        PERI_TRY_GOTO(peri__extent(q.ids, &q.least, &q.most), out);
        uint64_t spread = (uint64_t)q.most - (uint64_t)q.least;
        bool narrow = spread < (uint64_t)peri__min(most_marks, q.n * MARKS_PER_ID + PERI_JAGGED_BLOCK);
        status = narrow ? by_marks(&q, &r) : by_sorting(&q, &r);
    }
out:
    peri_tensor_release(q.ids);
    if (status < 0) release(&r);
    else *out = r;
    return status;
}
