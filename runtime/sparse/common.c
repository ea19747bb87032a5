/* SPDX-License-Identifier: Apache-2.0
 *
 * common.c: checks that read back what they found, cumulative sums, sorting.
 */
#include "sparse_internal.h"
#include "../../kernels/jagged.h"
#include "../../kernels/sparse.h"
#include "../../kernels/lookup.h"

#include <stdio.h>

peri_status peri__flat(peri_tensor *t, peri_tensor **out)
{
    int64_t n = peri__numel(t), one = 1;
    return peri__tensor_view(t, 1, &n, &one, t->offset, out);
}

/* -- checks -------------------------------------------------------------------------------------------------------- */

peri_status peri__check_ints(const char *function, const char *what, const peri_tensor *t, int32_t ndim,
                             const peri_tensor *like)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, what, t, -1, ndim));
    if (t->dtype != PERI_I32 && t->dtype != PERI_I64)
        return peri__fail(PERI_EINVAL, "%s: %s is %s, allowed: i32, i64", function, what,
                          peri__tensor_text(t, text, sizeof text));
    return like ? peri__check_same_device(function, t, like) : PERI_OK;
}

/** The findings of index_check about @t, on their way to the host: the first bad place, or the extent; to be given
 *  back. @safe: or NULL, gets the operation's `safe`. */
static peri_status inspect_indices(const peri_tensor *t, int64_t limit, bool extent, const peri_tensor *safe,
                                   peri__report **out)
{
    int64_t words = extent ? 2 : 1;
    peri_device *device = peri__device(t);
    peri_tensor *found;
    peri__report *report = NULL;
    PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &words, &found));
    peri_op_index_check args = {.x = peri__data(t),
                                .bad = extent ? NULL : peri__data(found),
                                .extent = extent ? peri__data(found) : NULL,
                                .safe = safe ? peri__data(safe) : NULL,
                                .n = peri__numel(t),
                                .limit = limit,
                                .dtype = t->dtype};
    peri_status status;
    PERI_TRY_GOTO(PERI_RUN(device, index_check, &args), out);
    PERI_TRY_GOTO(peri__report_take(device, words, &report), out);
    status = peri__report_post(report, peri__data(found), words);
out:
    peri_tensor_release(found);
    if (status < 0) peri__report_return(report);
    else *out = report;
    return status;
}

peri_status peri__word_at(const peri_tensor *t, int64_t i, int64_t *out)
{
    peri__report *report;
    PERI_TRY(peri__report_take(peri__device(t), 1, &report));
    peri_status status = peri__report_post(report, (int64_t *)peri__data(t) + i, 1);
    if (status >= 0) status = peri__report_wait(report);
    if (status >= 0) *out = report->words[0];
    peri__report_return(report);
    return status;
}

peri_status peri__int_at(const peri_tensor *t, int64_t i, int64_t *out)
{
    const int64_t one = 1;
    peri_tensor *view, *wide = NULL;
    PERI_TRY(peri__tensor_view((peri_tensor *)t, 1, &one, &one, t->offset + i, &view));
    peri_status status = peri_tensor_to(view, PERI_I64, NULL, &wide);
    if (status >= 0) status = peri_tensor_read(wide, out, 8);
    peri_tensor_release(wide);
    peri_tensor_release(view);
    return status;
}

/** What @report (given back) says of the indices @t. Waits. */
static peri_status judge_indices(const char *function, const char *what, const peri_tensor *t, int64_t limit,
                                 peri__report *report)
{
    peri_status status = peri__report_wait(report);
    int64_t bad = report->words[0], value;
    peri__report_return(report);
    if (status < 0 || bad == INT64_MAX) return status;
    PERI_TRY(peri__int_at(t, bad, &value));
    if (limit == 0)
        return peri__fail(PERI_ERANGE, "%s: %s[%lld] is %lld, and nothing is allowed", function, what, (long long)bad,
                          (long long)value);
    return peri__fail(PERI_ERANGE, "%s: %s[%lld] is %lld, allowed: 0..%lld", function, what, (long long)bad,
                      (long long)value, (long long)limit - 1);
}

peri_status peri__check_indices(const char *function, const char *what, const peri_tensor *t, int64_t limit)
{
    peri__report *report;
    PERI_TRY(inspect_indices(t, limit, false, NULL, &report));
    return judge_indices(function, what, t, limit, report);
}

peri_status peri__indices_queue(const char *function, const peri__indices *indices, peri_tensor **safe,
                                peri__report **report)
{
    peri_tensor *t = (peri_tensor *)indices->t;
    if (peri_device_host_access(peri__device(t)) || indices->limit == 0) {
        PERI_TRY(peri__check_indices(function, indices->what, t, indices->limit));
        return *report = NULL, peri__share(t, safe);
    }
    peri_tensor *made;
    PERI_TRY(peri__tensor_like(t, t->ndim, t->shape, &made));
    peri_status status = inspect_indices(t, indices->limit, false, made, report);
    if (status < 0) peri_tensor_release(made);
    else *safe = made;
    return status;
}

peri_status peri__indices_settle(const char *function, const peri__indices *indices, peri__report **report)
{
    peri__report *found = *report;
    *report = NULL;
    return found ? judge_indices(function, indices->what, indices->t, indices->limit, found) : PERI_OK;
}

peri_status peri__extent(const peri_tensor *t, int64_t *least, int64_t *most)
{
    peri__report *report;
    PERI_TRY(inspect_indices(t, 0, true, NULL, &report));
    peri_status status = peri__report_wait(report);
    *least = report->words[0];
    *most = report->words[1];
    peri__report_return(report);
    return status;
}

void peri__bag_name(const void *owner, int64_t bag, char *text, size_t len)
{
    snprintf(text, len, "%s, bag %lld", (const char *)owner, (long long)bag);
}

static void bag_text(const void *owner, int64_t bag, char *text, size_t len)
{
    const peri__bag_names *n = owner;
    if (n->columns > 0)
        snprintf(text, len, "%s, row %lld, column %lld", n->what, (long long)(bag / n->columns),
                 (long long)(bag % n->columns));
    else if (n->columns < 0) snprintf(text, len, "%s %lld", n->what, (long long)bag);
    else snprintf(text, len, "%s, bag %lld", n->what, (long long)bag);
}

static peri_status bags_start(const char *function, peri__bags *b, peri_tensor *lengths, peri_tensor *offsets,
                              int64_t rows)
{
    peri_tensor limit = lengths ? *lengths : *offsets; /* a stand-in with as many rows as there are values */
    limit.shape[0] = rows;
    return peri__bags_init(function, b, lengths, offsets, &limit);
}

static peri_status bags_post(const char *function, peri__bags *b, peri_tensor *lengths, peri_tensor *offsets,
                             int64_t rows)
{
    PERI_TRY(bags_start(function, b, lengths, offsets, rows));
    peri_status status = peri__bags_post(b, NULL, 0, 0); /* makes the offsets on its way */
    if (status < 0) peri__bags_fini(b);
    return status;
}

peri_status peri__bags_settle(const char *function, const peri__bag_names *names, peri__bags *b)
{
    peri_status status = peri__report_wait(b->report);
    if (status >= 0) status = peri__bags_judge(b, function, bag_text, names);
    if (status < 0) peri__bags_fini(b);
    return status;
}

peri_status peri__bags_queue(const char *function, const peri__bag_names *names, peri__bags *b, peri_tensor *lengths,
                             peri_tensor *offsets, int64_t rows)
{
    const peri_device *device = peri__device(lengths ? lengths : offsets);
    PERI_TRY(bags_start(function, b, lengths, offsets, rows));
    bool now = peri_device_host_access(device) || b->bags == 0;
    peri_status status = now ? peri__bags_post(b, NULL, 0, 0) : peri__bags_post_safe(b);
    if (status >= 0) return now ? peri__bags_settle(function, names, b) : PERI_OK;
    peri__bags_fini(b);
    return status;
}

peri_status peri__bags_of(const char *function, const char *what, peri__bags *b, peri_tensor *lengths,
                          peri_tensor *offsets, int64_t rows, int64_t columns)
{
    PERI_TRY(bags_post(function, b, lengths, offsets, rows));
    return peri__bags_settle(function, &(peri__bag_names){what, columns}, b);
}

peri_status peri__indices_and_bags(const char *function, const peri__indices *indices, const char *what, peri__bags *b,
                                   peri_tensor *lengths, peri_tensor *offsets, int64_t rows, int64_t columns)
{
    peri__report *found;
    PERI_TRY(inspect_indices(indices->t, indices->limit, false, NULL, &found));
    peri_status bags = bags_post(function, b, lengths, offsets, rows);
    peri_status status = judge_indices(function, indices->what, indices->t, indices->limit, found);
    if (status >= 0 && bags >= 0) return peri__bags_settle(function, &(peri__bag_names){what, columns}, b);
    if (bags >= 0) peri__bags_fini(b);
    return status < 0 ? status : bags;
}

peri_status peri__offsets_post(const char *function, const char *what, peri_tensor *offsets, int64_t rows,
                               peri__bags *b)
{
    char name[128];
    snprintf(name, sizeof name, "%s: %s", function, what);
    return bags_post(name, b, NULL, offsets, rows);
}

peri_status peri__offsets_judge(const char *function, const char *what, const char *part, peri__bags *b)
{
    char name[128];
    snprintf(name, sizeof name, "%s: %s", function, what);
    PERI_TRY(peri__bags_settle(name, &(peri__bag_names){part, -1}, b));
    peri__bags_fini(b);
    return PERI_OK;
}

peri_status peri__check_offsets(const char *function, const char *what, const char *part, peri_tensor *offsets,
                                int64_t rows)
{
    peri__bags bags = {0};
    PERI_TRY(peri__offsets_post(function, what, offsets, rows, &bags));
    return peri__offsets_judge(function, what, part, &bags);
}

/* -- ids of several tables ----------------------------------------------------------------------------------------- */

peri_status peri__bag_at(const peri_tensor *offsets, int64_t i, int64_t *bag)
{
    int64_t low = 0, high = offsets->shape[0] - 1, first;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        PERI_TRY(peri__int_at(offsets, middle, &first));
        if (first <= i) low = middle;
        else high = middle;
    }
    *bag = low;
    return PERI_OK;
}

/** The error about id number @i. */
static peri_status fail_missing_id(const peri__tables *t, int64_t i)
{
    int64_t id, bag, step = peri__max(t->step, 1), start, end;
    char where[96];
    PERI_TRY(peri__int_at(t->ids, i, &id));
    PERI_TRY(peri__bag_at(t->offsets, i, &bag));
    PERI_TRY(peri__int_at(t->starts, bag / step, &start));
    PERI_TRY(peri__int_at(t->starts, bag / step + 1, &end));
    int length = snprintf(where, sizeof where, "%s %lld", t->table, (long long)(bag / step));
    if (t->step) snprintf(where + length, sizeof where - (size_t)length, ", sample %lld", (long long)(bag % step));
    if (start == end)
        return peri__fail(PERI_ERANGE, "%s: %s[%lld] is %lld (%s), %s", t->function, t->what, (long long)i,
                          (long long)id, where,
                          t->remap ? "allowed: 0 and more, or -1 for none" : "and nothing is allowed");
    return peri__fail(PERI_ERANGE, "%s: %s[%lld] is %lld (%s), allowed: 0..%lld%s", t->function, t->what, (long long)i,
                      (long long)id, where, (long long)(end - start - 1), t->remap ? ", or -1 for none" : "");
}

peri_status peri__table_rows(const peri__tables *t, int32_t dtype, peri_tensor **rows, peri_tensor **bag)
{
    peri_device *device = peri__device(t->ids);
    int64_t n = peri__numel(t->ids), one = 1, first;
    peri_tensor *out = NULL, *bags = NULL, *bad = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(device, dtype, 1, &n, &out), out);
    if (bag) PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &n, &bags), out);
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &one, &bad), out);
    peri_k_table_rows_args args = {.ids = peri__data(t->ids),
                                   .offsets = peri__data(t->offsets),
                                   .starts = peri__data(t->starts),
                                   .remap = t->remap ? peri__data(t->remap) : NULL,
                                   .out = peri__data(out),
                                   .bag = bag ? peri__data(bags) : NULL,
                                   .bad = peri__data(bad),
                                   .n = n,
                                   .tables = t->tables,
                                   .step = peri__max(t->step, 1),
                                   .ids_dtype = t->ids->dtype,
                                   .offsets_dtype = t->offsets->dtype,
                                   .starts_dtype = t->starts->dtype,
                                   .remap_dtype = t->remap ? t->remap->dtype : PERI_I64,
                                   .out_dtype = dtype};
    PERI_TRY_GOTO(PERI_RUN(device, table_rows, &args), out);
    PERI_TRY_GOTO(peri__word_at(bad, 0, &first), out);
    if (first != INT64_MAX) PERI_TRY_GOTO(fail_missing_id(t, first), out);
    *rows = out;
    out = NULL;
    if (bag) *bag = bags;
    bags = NULL;
out:
    peri_tensor_release(out);
    peri_tensor_release(bags);
    peri_tensor_release(bad);
    return status;
}

/* -- cumulative sums ----------------------------------------------------------------------------------------------- */

/** @y = sums of @x by rows of @cols. @found (checked sums; else NULL): what is outside [0, limit], then the sum of each
 *  row. */
static peri_status sum_into(const peri_tensor *x, int64_t rows, int64_t cols, int64_t limit, int32_t mode,
                            peri_tensor *y, int64_t *found)
{
    peri_op_cumsum args = {.x = peri__data(x),
                           .y = peri__data(y),
                           .bad = found,
                           .total = found ? found + 1 : NULL,
                           .rows = rows,
                           .cols = cols,
                           .limit = limit,
                           .x_dtype = x->dtype,
                           .y_dtype = y->dtype,
                           .mode = mode};
    return PERI_RUN(peri__device(x), cumsum, &args);
}

/** Queue a sum whose elements are mostly not negative and small, as lengths are, and a report for sum_judge. */
static peri_status sum_post(const peri_tensor *x, int64_t rows, int64_t cols, int64_t limit, int32_t mode,
                            peri_tensor *y, peri__report **out)
{
    int64_t words = rows + 1;
    peri_tensor *found;
    peri__report *report = NULL;
    PERI_TRY(peri_tensor_new(peri__device(x), PERI_I64, 1, &words, &found));
    peri_status status;
    PERI_TRY_GOTO(sum_into(x, rows, cols, limit, mode, y, peri__data(found)), out);
    PERI_TRY_GOTO(peri__report_take(peri__device(x), words, &report), out);
    status = peri__report_post(report, peri__data(found), words);
out:
    peri_tensor_release(found);
    if (status < 0) peri__report_return(report);
    else *out = report;
    return status;
}

/** What @report (given back) says: *fits, whether all elements were in [0, @limit], and no row's sum exceeds it.
 *  Waits. */
static peri_status sum_judge(peri__report *report, int64_t rows, int64_t limit, int64_t *last, bool *fits)
{
    peri_status status = peri__report_wait(report);
    if (status >= 0) {
        *fits = report->words[0] == INT64_MAX;
        *last = report->words[rows];
        for (int64_t r = 1; r <= rows; r++)
            if (report->words[r] > limit) *fits = false;
    }
    peri__report_return(report);
    return status;
}

static const int64_t total_most = ((int64_t)1 << 50) - 1;

peri_status peri__total_queue(const peri_tensor *lengths, peri_tensor **out, peri__report **report)
{
    int64_t n = lengths->shape[0], size = n + 1;
    peri_tensor *y;
    PERI_TRY(peri_tensor_new(peri__device(lengths), PERI_I64, 1, &size, &y));
    peri_status status = sum_post(lengths, 1, n, total_most, PERI_CUMSUM_COMPLETE, y, report);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri__total_settle(const char *function, peri__report **report, int64_t *total)
{
    peri__report *found = *report;
    bool fits = false;
    *report = NULL;
    PERI_TRY(sum_judge(found, 1, total_most, total, &fits));
    return fits ? PERI_OK : peri__fail(PERI_ERANGE, "%s: the result would have 2^50 values or more", function);
}

peri_status peri__total_offsets(const char *function, const peri_tensor *lengths, peri_tensor **out, int64_t *total)
{
    peri__report *report;
    peri_tensor *y;
    PERI_TRY(peri__total_queue(lengths, &y, &report));
    peri_status status = peri__total_settle(function, &report, total);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

/** Whether the sums of any numbers fit in @x's dtype, added up on the host: those that the result holds, of which an
 *  exclusive one has no last. */
static peri_status check_sums(const peri_tensor *x, int64_t rows, int64_t cols, int32_t mode)
{
    int64_t held = mode == PERI_CUMSUM_EXCLUSIVE ? cols - 1 : cols;
    int64_t n = rows * cols, *host = peri__alloc(sizeof *host * (size_t)peri__max(n, 1)), sum;
    if (!host) return PERI_ENOMEM;
    peri_tensor *wide = NULL;
    peri_status status = peri_tensor_to((peri_tensor *)x, PERI_I64, NULL, &wide);
    if (status >= 0) status = peri_tensor_read(wide, host, n * 8);
    for (int64_t r = 0; r < rows && status >= 0; r++) {
        sum = 0;
        for (int64_t i = r * cols; i < r * cols + held && status >= 0; i++) {
            bool over = __builtin_add_overflow(sum, host[i], &sum);
            if (x->dtype == PERI_I32) over = over || sum > INT32_MAX || sum < INT32_MIN;
            if (over)
                status =
                    peri__fail(PERI_ERANGE, "peri_sparse_cumsum: the sum up to element %lld (%lld) does not fit in %s",
                               (long long)i, (long long)host[i], peri_dtype_name(x->dtype));
        }
    }
    peri_tensor_release(wide);
    peri__free(host);
    return status;
}

peri_status peri_sparse_cumsum(peri_tensor *x, int32_t mode, peri_tensor **out)
{
    PERI_NEED(out);
    static const char f[] = "peri_sparse_cumsum";
    char text[128];
    PERI_TRY(peri__check_ints(f, "x", x, -1, NULL));
    if (x->ndim < 1 || x->ndim > 2)
        return peri__fail(PERI_EINVAL, "%s: x is %s, wanted 1 or 2 dimensions", f,
                          peri__tensor_text(x, text, sizeof text));
    if (mode < PERI_CUMSUM_COMPLETE || mode > PERI_CUMSUM_INCLUSIVE)
        return peri__fail(PERI_EINVAL, "%s: mode %d, allowed: 0..2", f, mode);
    int64_t rows = x->ndim == 2 ? x->shape[0] : 1, cols = x->shape[x->ndim - 1], last = 0;
    int64_t shape[2] = {x->shape[0], cols + 1}, limit = x->dtype == PERI_I32 ? INT32_MAX : ((int64_t)1 << 50) - 1;
    if (mode != PERI_CUMSUM_COMPLETE) shape[1] = cols;
    bool fits = false;
    peri_tensor *flat, *y = NULL;
    PERI_TRY(peri_tensor_contiguous(x, &flat));
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(peri__device(x), x->dtype, x->ndim, x->ndim == 2 ? shape : shape + 1, &y), out);
    if (rows > 0) {
        peri__report *report;
        PERI_TRY_GOTO(sum_post(flat, rows, cols, limit, mode, y, &report), out);
        PERI_TRY_GOTO(sum_judge(report, rows, limit, &last, &fits), out);
    }
    if (rows > 0 && !fits) {
        PERI_TRY_GOTO(check_sums(flat, rows, cols, mode), out);
        PERI_TRY_GOTO(sum_into(flat, rows, cols, -1, mode, y, NULL), out);
    }
    *out = y;
    y = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(y);
    return status;
}

/* -- sorting ------------------------------------------------------------------------------------------------------- */

peri_status peri__lists_of(const peri_tensor *x, int64_t lists, peri_tensor **list, peri_tensor **offsets)
{
    peri_device *device = peri__device(x);
    int64_t n = peri__numel(x), ends = lists + 1;
    if (n > UINT32_MAX) return peri__fail(PERI_ERANGE, "sorting %lld ids, allowed: less than 2^32", (long long)n);
    if (peri__bits(n) + peri__bits(lists) > 64)
        return peri__fail(PERI_ERANGE, "lists of %lld places by %lld numbers, allowed: a product below 2^64",
                          (long long)n, (long long)lists);
    peri_tensor *places = NULL, *bounds = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &n, &places), out);
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &ends, &bounds), out);
    peri_op_lists args = {.x = peri__data(x),
                          .list = peri__data(places),
                          .offsets = peri__data(bounds),
                          .n = n,
                          .lists = lists,
                          .dtype = x->dtype};
    PERI_TRY_GOTO(PERI_RUN(device, lists, &args), out);
    *list = places;
    *offsets = bounds;
    places = bounds = NULL;
out:
    peri_tensor_release(places);
    peri_tensor_release(bounds);
    return status;
}
