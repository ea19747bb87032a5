/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c: the store of tables in memory.
 */
#include "../tensor/jagged_internal.h"
#include "../tensor/report.h"
#include "embed_internal.h"

/* -- lookups and updates ------------------------------------------------------------------------------------------- */

/** Within a call: queue a copy of the report of a batch to the host. */
static peri_status send_report(const peri_tbe_batch *b, peri__report **out)
{
    peri__report *found;
    PERI_TRY(peri__report_take(b->tbe->device, PERI__REPORT_WORDS, &found));
    peri_status status = peri__report_post(found, peri__data(b->report), PERI__REPORT_WORDS);
    if (status < 0) peri__report_return(found);
    else *out = found;
    return status;
}

static peri_status judge_words(const char *function, const int64_t *words, void *tbe)
{
    peri_k_tbe_report report;
    memcpy(&report, words, sizeof report);
    return peri__tbe_status(tbe, function, &report);
}

/** Within a call: what the report of a batch says: at once, which waits for the report alone, or @later, so that nobody
 *  waits for the device. */
static peri_status act_on_report(const char *function, const peri_tbe_batch *b, bool later)
{
    peri_tbe *tbe = b->tbe;
    peri__report *found;
    PERI_TRY(send_report(b, &found));
    peri_status status;
    if (later) {
        status = peri__late_add(found, &(peri__late_what){.of = &tbe->unheard,
                                                          .turn = atomic_load(&tbe->unheard.passes),
                                                          .function = function,
                                                          .judge = judge_words,
                                                          .with = tbe});
        if (status >= 0) return PERI_OK;
    } else {
        status = peri__report_wait(found);
        if (status >= 0) status = judge_words(function, found->words, tbe);
    }
    peri__report_return(found);
    return status;
}

static peri_status memory_forward(const char *function, peri_tbe_batch *b, peri_tensor *out)
{
    peri_tbe *tbe = b->tbe;
    bool check = tbe->bounds_check != PERI_BOUNDS_NONE;
    /* Lookups of this step may still be queued; those that a backward pass has followed are waited for. */
    if (check) PERI_TRY(peri__late_of(&tbe->unheard, atomic_load(&tbe->unheard.passes)));
    PERI_TRY(peri__batch_enter(function, b, false));
    peri_status status = peri__tbe_forward(b, out, check);
    if (status >= 0 && check && tbe->bounds_check != PERI_BOUNDS_IGNORE)
        status = act_on_report(function, b, !peri__immediate(tbe->device) && peri__unheard_take(&tbe->unheard));
    return peri__batch_leave(b, false, status);
}

/** Within a call: the check of @b alone. */
static peri_status check_alone(peri_tbe_batch *b)
{
    peri_k_tbe_check_args args = {0};
    PERI_TRY(peri__batch_report(b, &args.report));
    PERI_TRY(peri__batch_kernel_list(b, false, &args.list));
    PERI_TRY(PERI_RUN(b->tbe->device, tbe_check, &args));
    peri_k_tbe_report_args describe = {.list = args.list, .report = args.report};
    return PERI_RUN(b->tbe->device, tbe_report, &describe);
}

peri_status peri__memory_queue_lookup(const char *function, peri_tbe_batch *b, peri_tensor *out, peri__report **found)
{
    PERI_TRY(peri__batch_enter(function, b, false));
    peri_status status = out ? peri__tbe_forward(b, out, true) : check_alone(b);
    if (status >= 0) status = send_report(b, found);
    return peri__batch_leave(b, false, status);
}

static peri_status memory_backward(const char *function, peri_tbe_batch *b, peri_tensor *grad,
                                   peri_tensor *grad_weights)
{
    bool alone = b->tbe->optimizer.kind != PERI_TBE_NONE; /* without an optimizer nothing of the table batch changes */
    PERI_TRY(peri__late_of(&b->tbe->unheard, INT64_MIN)); /* of what is known already nothing is learnt */
    PERI_TRY(peri__batch_enter(function, b, alone));
    return peri__batch_leave(b, alone, peri__tbe_backward(b, grad, grad_weights));
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static peri_status memory_read(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst);
static peri_status memory_write(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src);

/** A view of rows [row, row + rows of @like) of a part. */
static peri_status rows_view(const char *function, const peri_tbe *tbe, int64_t table, int32_t part, int64_t row,
                             const peri_tensor *like, peri_tensor **out)
{
    char text[128];
    peri_tensor *whole;
    PERI_TRY(peri__state_view(tbe, table, part, &whole));
    peri_status status = PERI_OK;
    int64_t n = like->ndim ? like->shape[0] : 0;
    if (like->ndim != whole->ndim || (whole->ndim == 2 && like->shape[1] != whole->shape[1]))
        status = peri__fail(PERI_EINVAL, "%s: %s for rows of '%s' of table '%s', which has %d dimensions%s%lld",
                            function, peri__tensor_text(like, text, sizeof text), tbe->state[part].name,
                            tbe->tables[table].name, whole->ndim,
                            whole->ndim == 2 ? " and columns: " : "; rows: ", (long long)whole->shape[whole->ndim - 1]);
    else if (row < 0 || row > whole->shape[0] - n)
        status = peri__fail(PERI_ERANGE, "%s: rows %lld .. %lld of table '%s', allowed: 0..%lld", function,
                            (long long)row, (long long)(row + n), tbe->tables[table].name, (long long)whole->shape[0]);
    if (status >= 0) {
        int64_t shape[2] = {n, whole->shape[1]};
        status =
            peri__tensor_view(whole, whole->ndim, shape, whole->stride, whole->offset + row * whole->stride[0], out);
    }
    peri_tensor_release(whole);
    return status;
}

/** @t is rows of @table's numbers. */
static peri_status check_numbers(const char *function, const peri_tbe *tbe, int64_t table, const peri_tensor *t)
{
    char text[128];
    int64_t cols = tbe->layout[table].cols;
    if (t->ndim == 2 && t->shape[1] == cols) return PERI_OK;
    return peri__fail(PERI_EINVAL,
                      "%s: %s for rows of table '%s', which has %lld columns (or, as u8, %lld bytes a row)", function,
                      peri__tensor_text(t, text, sizeof text), tbe->tables[table].name, (long long)cols,
                      (long long)tbe->layout[table].stride);
}

static peri_status read_numbers(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst)
{
    PERI_TRY(check_numbers("peri_tbe_read", tbe, table, dst));
    const peri_row_format format = peri__tbe_row_format(tbe->dtype);
    peri_tensor *bytes = NULL, *numbers = NULL;
    peri_status status;
    PERI_TRY_GOTO(
        peri_tensor_new(tbe->device, PERI_U8, 2, (int64_t[]){dst->shape[0], tbe->layout[table].stride}, &bytes), out);
    PERI_TRY_GOTO(memory_read(tbe, table, part, row, bytes), out);
    PERI_TRY_GOTO(peri_quantize_restore(bytes, &format, dst->shape[1], PERI_F32, &numbers), out);
    status = peri_tensor_copy(dst, numbers);
out:
    peri_tensor_release(bytes);
    peri_tensor_release(numbers);
    return status;
}

static peri_status write_numbers(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src)
{
    PERI_TRY(check_numbers("peri_tbe_write", tbe, table, src));
    peri_tensor *bytes = NULL, *numbers = NULL;
    peri_status status;
    const peri__rows_place place = {
        .who = "peri_tbe_write", .table = tbe->tables[table].name, .dtype = tbe->dtype, .row = row};
    PERI_TRY_GOTO(peri_tensor_new(tbe->device, PERI_F32, 2, src->shape, &numbers), out);
    PERI_TRY_GOTO(peri_tensor_copy(numbers, src), out);
    PERI_TRY_GOTO(peri__encode_rows(&place, numbers, &bytes), out);
    status = memory_write(tbe, table, part, row, bytes);
out:
    peri_tensor_release(bytes);
    peri_tensor_release(numbers);
    return status;
}

static peri_status memory_read(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst)
{
    peri_tensor *view;
    if (peri__rows_are_bytes(tbe->dtype) && dst->dtype != PERI_U8) return read_numbers(tbe, table, part, row, dst);
    PERI_TRY(rows_view("peri_tbe_read", tbe, table, part, row, dst, &view));
    peri_status status = peri_tensor_copy(dst, view);
    peri_tensor_release(view);
    return status;
}

static peri_status memory_write(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src)
{
    peri_tensor *view;
    if (peri__rows_are_bytes(tbe->dtype) && src->dtype != PERI_U8) return write_numbers(tbe, table, part, row, src);
    PERI_TRY(rows_view("peri_tbe_write", tbe, table, part, row, src, &view));
    peri_status status = peri_tensor_copy(view, src);
    peri_tensor_release(view);
    return status;
}

const peri__store peri__memory = {.name = "memory",
                                  .whole = true,
                                  .forward = memory_forward,
                                  .backward = memory_backward,
                                  .read = memory_read,
                                  .write = memory_write,
                                  .reset = peri__memory_reset};
