/* SPDX-License-Identifier: Apache-2.0
 *
 * jt_dense.c: jagged to padded rows and back, with gradient; JaggedTensors from dense ones, moving and comparing them.
 */
#include "jagged_internal.h"
#include "../../kernels/convert.h"
#include "../../kernels/jagged.h"

/* -- padded rows --------------------------------------------------------------------------------------------------- */

/** Arguments for both directions; @values and @padded agree in dtype and row shape. */
static peri_k_jagged_padded_args padded_args(const peri_tensor *values, const peri_tensor *padded,
                                             const peri_tensor *offsets)
{
    return (peri_k_jagged_padded_args){.padded = peri__data(padded),
                                       .values = peri__data(values),
                                       .offsets = peri__data(offsets),
                                       .max = padded->shape[1],
                                       .width = peri__row_bytes(values),
                                       .element = peri_dtype_size(values->dtype),
                                       .offsets_dtype = offsets->dtype};
}

static int64_t padded_row_grain(const peri_k_jagged_padded_args *a)
{
    return peri__row_grain(a->max * a->width);
}

enum { KEPT_SIZE }; /* what the gradient needs: of the way to padded rows the rows of the values, of the way back the
                       padded columns */

/** saved[0]: offsets. */
static peri_status to_padded_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    return peri__from_padded(grad_out[0], node->saved[0], node->kept[KEPT_SIZE], &grad_in[0]);
}

static const peri__node_vtab to_padded_vtab = {.name = "jagged_to_padded", .backward = to_padded_backward};

/** saved[0]: offsets. */
static peri_status from_padded_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *flat;
    PERI_TRY(peri_tensor_contiguous(grad_out[0], &flat));
    peri_status status = peri__to_padded(flat, node->saved[0], node->kept[KEPT_SIZE], 0, &grad_in[0]);
    peri_tensor_release(flat);
    return status;
}

static const peri__node_vtab from_padded_vtab = {.name = "jagged_from_padded", .backward = from_padded_backward};

static peri_status record_with_offsets(const peri__node_vtab *vtab, peri_tensor *in, peri_tensor *out,
                                       peri_tensor *offsets, int64_t number)
{
    if (!peri__differentiable(in)) return PERI_OK;
    peri__node *node;
    PERI_TRY(peri__record(vtab, &in, 1, &out, 1, &node));
    peri__node_save(node, 0, offsets);
    node->kept[KEPT_SIZE] = number;
    return PERI_OK;
}

peri_status peri__to_padded(peri_tensor *values, peri_tensor *offsets, int64_t max, double padding, peri_tensor **out)
{
    char text[128];
    int64_t shape[PERI_MAX_DIMS], bags = offsets->shape[0] - 1;
    if (values->ndim + 1 > PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "jagged to padded: %s has too many dimensions",
                          peri__tensor_text(values, text, sizeof text));
    shape[0] = bags;
    shape[1] = max;
    for (int32_t d = 1; d < values->ndim; d++) shape[d + 1] = values->shape[d];
    peri_tensor *padded;
    PERI_TRY(peri__tensor_like(values, values->ndim + 1, shape, &padded));
    peri_k_jagged_padded_args args = padded_args(values, padded, offsets);
    peri_k_convert_args element = {
        .dst = args.padding, .src = &padding, .dst_dtype = values->dtype, .src_dtype = PERI_F64, .ndim = 0};
    peri_kernels_get()->fn[PERI_K_convert](&element, 0, 1);
    peri_status status = PERI_OK;
    if (args.width && max)
        status = PERI_LAUNCH(peri__device(values), jagged_to_padded, &args, bags, padded_row_grain(&args));
    if (status >= 0) status = record_with_offsets(&to_padded_vtab, values, padded, offsets, values->shape[0]);
    if (status < 0) peri_tensor_release(padded);
    else *out = padded;
    return status;
}

peri_status peri__from_padded(peri_tensor *padded, peri_tensor *offsets, int64_t rows, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS], bags = offsets->shape[0] - 1;
    shape[0] = rows;
    for (int32_t d = 2; d < padded->ndim; d++) shape[d - 1] = padded->shape[d];
    peri_tensor *flat, *values = NULL;
    PERI_TRY(peri_tensor_contiguous(padded, &flat));
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_like(padded, padded->ndim - 1, shape, &values), out);
    peri_k_jagged_padded_args args = padded_args(values, flat, offsets);
    if (args.width)
        PERI_TRY_GOTO(PERI_LAUNCH(peri__device(values), jagged_from_padded, &args, bags, padded_row_grain(&args)), out);
    PERI_TRY_GOTO(record_with_offsets(&from_padded_vtab, flat, values, offsets, padded->shape[1]), out);
    *out = values;
    values = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(values);
    return status;
}

peri_status peri_jt_to_padded_dense(peri_jt *jt, int64_t desired, double padding, bool weights, peri_tensor **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    if (weights && !jt->weights) return peri__fail(PERI_EINVAL, "peri_jt_to_padded_dense: there are no weights");
    int64_t longest; /* also: checked */
    PERI_TRY(peri_jt_longest(jt, &longest));
    PERI_TRY(peri__bags_offsets(&jt->bags));
    return peri__to_padded(weights ? jt->weights : jt->values, jt->bags.offsets, desired >= 0 ? desired : longest,
                           padding, out);
}

/* -- from dense ---------------------------------------------------------------------------------------------------- */

static const char *const from_dense_name = "peri_jt_from_dense";

peri_status peri_jt_from_dense(peri_tensor *const *values, peri_tensor *const *weights, int32_t n, peri_jt **out)
{
    PERI_NEED(values);
    PERI_NEED(out);
    if (n < 1) return peri__fail(PERI_EINVAL, "%s: %d tensors, wanted at least 1", from_dense_name, n);
    PERI_TRY(peri__check_list(from_dense_name, "the values", values, n));
    if (weights) PERI_TRY(peri__check_list(from_dense_name, "the weights", weights, n));
    peri_tensor *all = NULL, *all_weights = NULL, *lengths = NULL;
    int64_t count = n;
    int32_t *host = peri__alloc(sizeof *host * (size_t)n);
    if (!host) return PERI_ENOMEM;
    peri_status status;
    PERI_TRY_GOTO(peri__rows_cat(from_dense_name, values, n, &all), out);
    if (weights) PERI_TRY_GOTO(peri__rows_cat(from_dense_name, weights, n, &all_weights), out);
    for (int32_t i = 0; i < n; i++) {
        if (values[i]->shape[0] > INT32_MAX || (weights && weights[i]->shape[0] != values[i]->shape[0]))
            PERI_TRY_GOTO(peri__fail(PERI_EINVAL, "%s: tensor %d has %lld rows and %lld weights", from_dense_name, i,
                                     (long long)values[i]->shape[0], (long long)(weights ? weights[i]->shape[0] : 0)),
                          out);
        host[i] = (int32_t)values[i]->shape[0];
    }
    PERI_TRY_GOTO(peri_tensor_new(peri__device(values[0]), PERI_I32, 1, &count, &lengths), out);
    PERI_TRY_GOTO(peri__copy(peri__device(lengths), peri__data(lengths), host, count * 4, PERI_COPY_H2D), out);
    status = peri__jt_adopt(all, all_weights, lengths, NULL, out);
out:
    peri__free(host);
    peri_tensor_release(all);
    peri_tensor_release(all_weights);
    peri_tensor_release(lengths);
    return status;
}

static const char *const dense_lengths_name = "peri_jt_from_dense_lengths";

static peri_status check_dense(const peri_tensor *values, const peri_tensor *lengths, const peri_tensor *weights)
{
    char text[128];
    PERI_TRY(peri__check_tensor(dense_lengths_name, "values", values, -1, -1));
    PERI_TRY(peri__check_tensor(dense_lengths_name, "lengths", lengths, -1, 1));
    if (values->ndim < 2 || values->shape[0] != lengths->shape[0])
        return peri__fail(PERI_EINVAL, "%s: values are %s for %lld lengths, wanted a row each", dense_lengths_name,
                          peri__tensor_text(values, text, sizeof text), (long long)lengths->shape[0]);
    if (weights &&
        (weights->ndim < 2 || weights->shape[0] != values->shape[0] || weights->shape[1] != values->shape[1]))
        return peri__fail(PERI_EINVAL, "%s: weights are %s for values of [%lld, %lld]", dense_lengths_name,
                          peri__tensor_text(weights, text, sizeof text), (long long)values->shape[0],
                          (long long)values->shape[1]);
    return weights ? peri__check_same_device(dense_lengths_name, values, weights) : PERI_OK;
}

/** A report on lengths that may be anything: their sum and the longest, or an error that names the first outside [0,
 *  columns]. */
static peri_status measure(peri_tensor *lengths, const peri_tensor *values, peri__bags *bags, int64_t *total)
{
    peri_tensor limit = *values; /* a stand-in whose rows are the columns: no length exceeds them */
    limit.shape[0] = values->shape[1];
    PERI_TRY(peri__bags_init(dense_lengths_name, bags, lengths, NULL, &limit));
    PERI_TRY(peri__bags_post(bags, NULL, 0, 0));
    PERI_TRY(peri__report_wait(bags->report));
    const int64_t *w = bags->report->words;
    if (w[PERI_REPORT_BAD] >= 0)
        return peri__fail(PERI_EINVAL, "%s: row %lld: length %lld, allowed: 0..%lld (the columns of values)",
                          dense_lengths_name, (long long)w[PERI_REPORT_BAD], (long long)w[PERI_REPORT_LENGTH],
                          (long long)values->shape[1]);
    *total = w[PERI_REPORT_TOTAL];
    return PERI_OK;
}

peri_status peri_jt_from_dense_lengths(peri_tensor *values, peri_tensor *lengths, peri_tensor *weights, peri_jt **out)
{
    PERI__NOT_AT_BORDER;
    PERI_TRY(check_dense(values, lengths, weights));
    peri__bags found = {0}, bags = {0};
    peri_tensor *rows = NULL, *row_weights = NULL;
    int64_t total = 0;
    peri_status status;
    PERI_TRY_GOTO(measure(lengths, values, &found, &total), out);
    peri__bags_adopt(&bags, found.lengths, NULL, lengths->shape[0], total);
    PERI_TRY_GOTO(peri__bags_offsets(&bags), out);
    PERI_TRY_GOTO(peri__from_padded(values, bags.offsets, total, &rows), out);
    if (weights) PERI_TRY_GOTO(peri__from_padded(weights, bags.offsets, total, &row_weights), out);
    status = peri__jt_adopt(rows, row_weights, bags.lengths, bags.offsets, out);
out:
    peri__bags_fini(&found);
    peri__bags_fini(&bags);
    peri_tensor_release(rows);
    peri_tensor_release(row_weights);
    return status;
}

/* -- moving and comparing ------------------------------------------------------------------------------------------ */

/** The same container of tensors that @move has made. */
static peri_status moved(peri_jt *jt, peri_device *device, peri__move_fn move, peri_jt **out)
{
    peri_jt_config a = {.size = sizeof a};
    peri_status status;
    PERI_TRY_GOTO(move(jt->values, -1, device, &a.values), out);
    if (jt->weights) PERI_TRY_GOTO(move(jt->weights, -1, device, &a.weights), out);
    if (jt->bags.given_lengths) PERI_TRY_GOTO(move(jt->bags.lengths, -1, device, &a.lengths), out);
    if (jt->bags.given_offsets) PERI_TRY_GOTO(move(jt->bags.offsets, -1, device, &a.offsets), out);
    status = peri_jt_new(&a, out);
out:
    peri_tensor_release(a.values);
    peri_tensor_release(a.weights);
    peri_tensor_release(a.lengths);
    peri_tensor_release(a.offsets);
    return status;
}

static peri_status move_jt(const char *function, peri_jt *jt, peri_device *device, peri__move_fn move, peri_jt **out)
{
    if (!device) return peri__fail(PERI_EINVAL, "%s: no device", function);
    if (device == peri__device(jt->values)) {
        peri_jt_retain(jt);
        *out = jt;
        return PERI_OK;
    }
    return moved(jt, device, move, out);
}

peri_status peri_jt_to(peri_jt *jt, peri_device *device, peri_jt **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    return move_jt("peri_jt_to", jt, device, peri_tensor_to, out);
}

peri_status peri_jt_upload(peri_jt *jt, peri_device *device, peri_jt **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    return move_jt("peri_jt_upload", jt, device, peri_tensor_upload, out);
}

peri_status peri_jt_pin(peri_jt *jt, peri_device *device, peri_jt **out)
{
    PERI_NEED(jt);
    PERI_NEED(device);
    PERI_NEED(out);
    return moved(jt, device, peri__move_pinned, out);
}

peri_status peri_jt_copy(peri_jt *dst, peri_jt *src)
{
    PERI_NEED(dst);
    PERI_NEED(src);
    if (dst == src) return PERI_OK;
    if (dst->bags.bags != src->bags.bags || dst->bags.values != src->bags.values || !dst->weights != !src->weights)
        return peri__fail(PERI_EINVAL, "peri_jt_copy: %lld bags of %lld values%s into room for %lld of %lld%s",
                          (long long)src->bags.bags, (long long)src->bags.values, src->weights ? ", weighted" : "",
                          (long long)dst->bags.bags, (long long)dst->bags.values, dst->weights ? ", weighted" : "");
    if (dst->bags.lengths) PERI_TRY(peri__bags_lengths(&src->bags));
    if (dst->bags.offsets) PERI_TRY(peri__bags_offsets(&src->bags));
    peri__free(dst->host_offsets);
    dst->host_offsets = NULL;
    dst->bags.longest = -1;
    dst->bags.checked = false;
    PERI_TRY(peri_tensor_copy(dst->values, src->values));
    if (dst->weights) PERI_TRY(peri_tensor_copy(dst->weights, src->weights));
    if (dst->bags.lengths) PERI_TRY(peri_tensor_copy(dst->bags.lengths, src->bags.lengths));
    if (dst->bags.offsets) PERI_TRY(peri_tensor_copy(dst->bags.offsets, src->bags.offsets));
    if (dst->bags.version >= 0) dst->bags.version = peri__bags_version(&dst->bags);
    return peri_device_host_access(peri__device(dst->values)) ? peri_jt_validate(dst) : PERI_OK;
}

peri_status peri_jt_empty_like(peri_jt *jt, peri_device *device, peri_jt **out)
{
    PERI_NEED(jt);
    PERI_NEED(out);
    if (!device) device = peri__device(jt->values);
    peri_tensor *values = NULL, *weights = NULL, *lengths = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__bags_lengths(&jt->bags), out);
    PERI_TRY_GOTO(peri__room(jt->values, device, &values), out);
    PERI_TRY_GOTO(peri__room(jt->weights, device, &weights), out);
    PERI_TRY_GOTO(peri__room(jt->bags.lengths, device, &lengths), out);
    PERI_TRY_GOTO(peri__tensor_zero(lengths), out);
    status = peri__jt_adopt(values, weights, lengths, NULL, out);
out:
    peri_tensor_release(values);
    peri_tensor_release(weights);
    peri_tensor_release(lengths);
    return status;
}

peri_status peri__tensors_equal(const peri_tensor *a, const peri_tensor *b, bool *same)
{
    *same = !a == !b;
    if (!a || !b) return PERI_OK;
    *same =
        a->dtype == b->dtype && a->ndim == b->ndim && !memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim);
    int64_t bytes = peri__numel(a) * peri_dtype_size(a->dtype);
    if (!*same || bytes == 0) return PERI_OK;
    char *host = peri__alloc((size_t)bytes * 2);
    if (!host) return PERI_ENOMEM;
    peri_status status = peri_tensor_read(a, host, bytes);
    if (status >= 0) status = peri_tensor_read(b, host + bytes, bytes);
    if (status >= 0) *same = !memcmp(host, host + bytes, (size_t)bytes);
    peri__free(host);
    return status;
}

peri_status peri_jt_equal(peri_jt *a, peri_jt *b, bool *out)
{
    PERI_NEED(a);
    PERI_NEED(b);
    PERI_NEED(out);
    bool same;
    PERI_TRY(peri__bags_lengths(&a->bags));
    PERI_TRY(peri__bags_lengths(&b->bags));
    PERI_TRY(peri__tensors_equal(a->bags.lengths, b->bags.lengths, &same));
    if (same) PERI_TRY(peri__tensors_equal(a->values, b->values, &same));
    if (same) PERI_TRY(peri__tensors_equal(a->weights, b->weights, &same));
    *out = same;
    return PERI_OK;
}

int64_t peri_jt_bytes(const peri_jt *jt)
{
    if (!jt) return 0;
    return peri__tensor_bytes(jt->values) + peri__tensor_bytes(jt->weights) + peri__tensor_bytes(jt->bags.lengths) +
           peri__tensor_bytes(jt->bags.offsets);
}
