/* SPDX-License-Identifier: Apache-2.0
 *
 * bags.c: what jt and kjt share: lengths and offsets, deriving one from the other, and checking them on their device.
 */
#include "jagged_internal.h"
#include "capture.h"
#include "../../kernels/jagged.h"

#include <stdio.h>

enum { GRAIN = 1 << 16, NAME = 256 }; /* elements that are worth a thread; a bag's name */

peri_status peri__move_pinned(peri_tensor *t, int32_t dtype, peri_device *device, peri_tensor **out)
{
    (void)dtype;
    return peri_tensor_pin(t, device, out);
}

peri_status peri__upload_i64(peri_device *device, const int64_t *host, int64_t n, peri_tensor **out)
{
    peri_tensor *t;
    if (peri__device_is_captured(device)) return peri__capture_constant(host, n, out);
    PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &n, &t));
    peri_status status = peri__copy(device, peri__data(t), host, n * 8, PERI_COPY_H2D_WORDS);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

/* -- setting up ---------------------------------------------------------------------------------------------------- */

static peri_status check_ids_tensor(const char *function, const char *what, const peri_tensor *t,
                                    const peri_tensor *values)
{
    char text[128];
    if (t->dtype != PERI_I32 && t->dtype != PERI_I64)
        return peri__fail(PERI_EINVAL, "%s: %s are %s, allowed: i32, i64", function, what,
                          peri__tensor_text(t, text, sizeof text));
    if (t->ndim != 1)
        return peri__fail(PERI_EINVAL, "%s: %s are %s, wanted 1 dimension", function, what,
                          peri__tensor_text(t, text, sizeof text));
    return peri__check_same_device(function, t, values);
}

peri_status peri__bags_init(const char *function, peri__bags *b, peri_tensor *lengths, peri_tensor *offsets,
                            const peri_tensor *values)
{
    if (!lengths && !offsets) return peri__fail(PERI_EINVAL, "%s: neither lengths nor offsets are given", function);
    if (lengths) PERI_TRY(check_ids_tensor(function, "lengths", lengths, values));
    if (offsets) PERI_TRY(check_ids_tensor(function, "offsets", offsets, values));
    if (offsets && offsets->shape[0] < 1)
        return peri__fail(PERI_EINVAL, "%s: offsets are empty; they have one entry more than there are bags", function);
    if (lengths && offsets && offsets->shape[0] != lengths->shape[0] + 1)
        return peri__fail(PERI_EINVAL, "%s: %lld offsets for %lld lengths, wanted %lld", function,
                          (long long)offsets->shape[0], (long long)lengths->shape[0], (long long)lengths->shape[0] + 1);
    int64_t bags = lengths ? lengths->shape[0] : offsets->shape[0] - 1, most = (int64_t)1 << 50;
    if (bags >= most || values->shape[0] >= most)
        return peri__fail(PERI_ERANGE, "%s: %lld bags of %lld values, allowed: less than 2^50 of each", function,
                          (long long)bags, (long long)values->shape[0]);
    *b = (peri__bags){.bags = bags,
                      .values = values->shape[0],
                      .given_lengths = lengths != NULL,
                      .given_offsets = offsets != NULL,
                      .longest = -1};
    if (lengths) PERI_TRY(peri_tensor_contiguous(lengths, &b->lengths));
    peri_status status = offsets ? peri_tensor_contiguous(offsets, &b->offsets) : PERI_OK;
    if (status < 0) peri__bags_fini(b);
    else b->version = peri__bags_version(b);
    return status;
}

void peri__bags_adopt(peri__bags *b, peri_tensor *lengths, peri_tensor *offsets, int64_t bags, int64_t values)
{
    *b = (peri__bags){.lengths = lengths,
                      .offsets = offsets,
                      .bags = bags,
                      .values = values,
                      .given_lengths = lengths != NULL,
                      .given_offsets = offsets != NULL,
                      .checked = true,
                      .longest = -1,
                      .version = -1};
    if (lengths) peri_tensor_retain(lengths);
    if (offsets) peri_tensor_retain(offsets);
}

bool peri__bags_changed(peri__bags *b)
{
    if (b->version < 0 || b->report || b->version == peri__bags_version(b)) return false;
    peri_tensor **derived = b->given_lengths ? &b->offsets : &b->lengths;
    if (!(b->given_lengths && b->given_offsets)) {
        peri_tensor_release(*derived);
        *derived = NULL;
    }
    b->version = peri__bags_version(b);
    b->checked = false;
    b->longest = -1;
    return true;
}

void peri__bags_fini(peri__bags *b)
{
    peri_tensor_release(b->lengths);
    peri_tensor_release(b->offsets);
    peri__report_return(b->report);
    *b = (peri__bags){0};
}

/* -- deriving ------------------------------------------------------------------------------------------------------ */

static peri_device *device_of_bags(const peri__bags *b) { return peri__device(b->lengths ? b->lengths : b->offsets); }

peri_status peri__complete_sum(const peri_tensor *lengths, int64_t limit, peri_tensor *offsets)
{
    peri_op_cumsum args = {.x = peri__data(lengths),
                           .y = peri__data(offsets),
                           .rows = 1,
                           .cols = peri__numel(lengths),
                           .limit = limit,
                           .x_dtype = lengths->dtype,
                           .y_dtype = offsets->dtype,
                           .mode = PERI_CUMSUM_COMPLETE};
    return PERI_RUN(peri__device(lengths), cumsum, &args);
}

static peri_status offsets_new(const peri__bags *b, peri_tensor **out)
{
    int64_t n = b->bags + 1;
    return peri_tensor_new(device_of_bags(b), PERI_I64, 1, &n, out);
}

peri_status peri__bags_offsets(peri__bags *b)
{
    if (b->offsets) return PERI_OK;
    peri_tensor *offsets;
    PERI_TRY(offsets_new(b, &offsets));
    peri_status status = peri__complete_sum(b->lengths, b->values, offsets);
    if (status < 0) peri_tensor_release(offsets);
    else b->offsets = offsets;
    return status;
}

peri_status peri__share(peri_tensor *t, peri_tensor **out)
{
    if (t) peri_tensor_retain(t);
    *out = t;
    return PERI_OK;
}

peri_status peri__room(const peri_tensor *t, peri_device *device, peri_tensor **out)
{
    *out = NULL;
    return t ? peri_tensor_new(device, t->dtype, t->ndim, t->shape, out) : PERI_OK;
}

peri_status peri__bags_lengths(peri__bags *b)
{
    if (b->lengths) return PERI_OK;
    peri_tensor *lengths;
    PERI_TRY(peri__tensor_like(b->offsets, 1, &b->bags, &lengths));
    peri_k_jagged_lengths_args args = {.offsets = peri__data(b->offsets),
                                       .out = peri__data(lengths),
                                       .offsets_dtype = b->offsets->dtype,
                                       .out_dtype = lengths->dtype};
    peri_status status = PERI_LAUNCH(device_of_bags(b), jagged_lengths, &args, b->bags, GRAIN);
    if (status < 0) peri_tensor_release(lengths);
    else b->lengths = lengths;
    return status;
}

/* -- checking ------------------------------------------------------------------------------------------------------ */

/** Queue a report on @b. Its offsets are made on the way if they come from the lengths and are not there yet; and
 *  replaced, if they are to be @safe. */
static peri_status report_into(peri__bags *b, const peri_tensor *bounds, int64_t step, int64_t n_bounds, bool safe,
                               peri_tensor *found)
{
    peri_tensor *made = NULL;
    if (!b->offsets || safe) PERI_TRY(offsets_new(b, &made));
    const peri_tensor *offsets = b->offsets ? b->offsets : made, *lengths = b->given_lengths ? b->lengths : NULL;
    int32_t look = b->checked ? PERI_BAGS_SOUND : b->given_offsets ? PERI_BAGS_OFFSETS : PERI_BAGS_LENGTHS;
    peri_op_bags_report args = {.lengths = lengths ? peri__data(lengths) : NULL,
                                .offsets = peri__data(offsets),
                                .sums = made ? peri__data(made) : NULL,
                                .bounds = bounds ? peri__data(bounds) : NULL,
                                .report = peri__data(found),
                                .bags = b->bags,
                                .values = b->values,
                                .step = step,
                                .n_bounds = n_bounds,
                                .lengths_dtype = lengths ? lengths->dtype : 0,
                                .offsets_dtype = offsets->dtype,
                                .look = look};
    peri_status status = PERI_RUN(device_of_bags(b), bags_report, &args);
    if (status >= 0 && made) {
        peri_tensor_release(b->offsets);
        b->offsets = made;
        made = NULL;
    }
    peri_tensor_release(made);
    return status;
}

static peri_status post_check(peri__bags *b, const peri_tensor *bounds, int64_t step, int64_t n_bounds, bool safe)
{
    if (b->report) return PERI_OK;
    peri_device *device = device_of_bags(b);
    int64_t words = PERI_REPORT_HEADER + n_bounds;
    peri_tensor *found = NULL;
    peri__report *report = NULL;
    peri_status status;
    if (b->checked) PERI_TRY(peri__bags_offsets(b));
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_I64, 1, &words, &found), out);
    PERI_TRY_GOTO(report_into(b, bounds, step, n_bounds, safe, found), out);
    PERI_TRY_GOTO(peri__report_take(device, words, &report), out);
    PERI_TRY_GOTO(peri__report_post(report, peri__data(found), words), out);
    b->report = report;
    report = NULL;
out:
    peri__report_return(report);
    peri_tensor_release(found);
    return status;
}

peri_status peri__bags_post(peri__bags *b, const peri_tensor *bounds, int64_t step, int64_t n_bounds)
{
    return post_check(b, bounds, step, n_bounds, false);
}

peri_status peri__bags_post_safe(peri__bags *b) { return post_check(b, NULL, 0, 0, b->given_offsets && !b->checked); }

/** "key 'f2', sample 17 ends at 12": the first bag that lies beyond the values, for lengths with too large a sum. */
static void overflowing_bag(peri__bags *b, peri__bag_text_fn text, const void *owner, char *out, size_t len)
{
    int64_t size = peri_dtype_size(b->lengths->dtype) * b->bags, sum = 0;
    char *host = peri__alloc((size_t)peri__max(size, 1)), name[NAME];
    out[0] = 0;
    if (host && peri_tensor_read(b->lengths, host, size) >= 0)
        for (int64_t i = 0; i < b->bags; i++) {
            int64_t length = b->lengths->dtype == PERI_I32 ? ((int32_t *)host)[i] : ((int64_t *)host)[i];
            sum += peri__min(length, b->values + 1);
            if (sum <= b->values) continue;
            text(owner, i, name, sizeof name);
            snprintf(out, len, ": %s ends at %lld", name, (long long)sum);
            break;
        }
    peri__free(host);
}

static peri_status judge_bag(const peri__bags *b, const char *function, const int64_t *w, const char *name)
{
    long long length = w[PERI_REPORT_LENGTH], from = w[PERI_REPORT_BEGIN], to = w[PERI_REPORT_END], n = b->values;
    if (b->given_offsets) {
        if (from < 0 || from > n)
            return peri__fail(PERI_EINVAL, "%s: %s: it begins at offset %lld, allowed: 0..%lld (the number of values)",
                              function, name, from, n);
        if (to < from)
            return peri__fail(PERI_EINVAL, "%s: %s: its offsets are %lld and %lld, they must not decrease", function,
                              name, from, to);
        if (to > n)
            return peri__fail(PERI_EINVAL, "%s: %s: it ends at offset %lld, allowed: 0..%lld (the number of values)",
                              function, name, to, n);
        return peri__fail(PERI_EINVAL, "%s: %s: length %lld, but its offsets %lld and %lld say %lld", function, name,
                          length, from, to, to - from);
    }
    if (length < 0) return peri__fail(PERI_EINVAL, "%s: %s: length %lld, allowed: 0 or more", function, name, length);
    return peri__fail(PERI_EINVAL, "%s: %s: length %lld, but there are only %lld values", function, name, length, n);
}

peri_status peri__bags_judge(peri__bags *b, const char *function, peri__bag_text_fn text, const void *owner)
{
    const int64_t *w = b->report->words;
    char name[NAME + 64];
    if (b->checked) return PERI_OK;
    if (b->given_offsets && w[PERI_REPORT_FIRST] != 0)
        return peri__fail(PERI_EINVAL, "%s: the first offset is %lld, wanted 0", function,
                          (long long)w[PERI_REPORT_FIRST]);
    if (w[PERI_REPORT_BAD] >= 0) {
        text(owner, w[PERI_REPORT_BAD], name, sizeof name);
        return judge_bag(b, function, w, name);
    }
    long long total = w[PERI_REPORT_TOTAL], n = b->values;
    if (total != n && b->given_offsets)
        return peri__fail(PERI_EINVAL, "%s: the last offset is %lld, but there are %lld values", function, total, n);
    if (total != n) {
        name[0] = 0;
        if (total > n) overflowing_bag(b, text, owner, name, sizeof name);
        return peri__fail(PERI_EINVAL, "%s: the lengths sum to %lld, but there are %lld values%s", function, total, n,
                          name);
    }
    b->longest = w[PERI_REPORT_MOST];
    b->checked = true;
    return PERI_OK;
}
