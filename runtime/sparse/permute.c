/* SPDX-License-Identifier: Apache-2.0
 *
 * permute.c: segments and rows in another order, with gradient; permutations turned around and spread out.
 */
#include "sparse_internal.h"
#include "../../kernels/jagged.h"
#include "../../kernels/sparse.h"

/* -- rows moved by a permutation that is on the device ------------------------------------------------------------- */

/** Segment t of the result is segment permute[t] of the source; bounds are complete offsets, i64, NULL: segments of one
 *  row. Without permute segments stay in their order, and `in` is where each begins. */
typedef struct moves {
    peri_tensor *permute, *in, *out; /* contiguous */
    int64_t parts, n, rows;          /* segments of the source and of the result; rows of the result */
} moves;

/** saved: permute, and with segments of several rows their bounds. */
enum { SAVED_PERMUTE, SAVED_IN, SAVED_OUT };
enum { KEPT_SEGMENTS, KEPT_ROWS }; /* of the source */

/** *out (new) = the sums of rows of @src that have one number in @permute, those of @parts segments, @rows in all;
 *  @in, @out_offsets: as in moves, NULL: segments of one row. In the order of src. */
static peri_status summed_rows(peri_tensor *src, peri_tensor *permute, peri_tensor *in, peri_tensor *out_offsets,
                               int64_t parts, int64_t rows, peri_tensor **out)
{
    peri_tensor *flat = NULL, *grad = NULL, *list = NULL, *first = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__summands(src, &flat), out);
    PERI_TRY_GOTO(peri__rows_like(flat, rows, &grad), out);
    int64_t width = peri__row_bytes(flat);
    if (width && rows) {
        PERI_TRY_GOTO(peri__lists_of(permute, parts, &list, &first), out);
        peri_k_jagged_sum_args args = {.dst = peri__data(grad),
                                       .src = peri__data(flat),
                                       .list_offsets = peri__data(first),
                                       .list = peri__data(list),
                                       .columns = width / peri_dtype_size(flat->dtype),
                                       .segments = parts,
                                       .dtype = flat->dtype};
        if (in) args.in_offsets = peri__data(in);
        if (out_offsets) args.out_offsets = peri__data(out_offsets);
        PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), jagged_sum, &args, rows, peri__row_grain(width)), out);
    }
    status = peri__cast(grad, src->dtype, out);
out:
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    peri_tensor_release(list);
    peri_tensor_release(first);
    return status;
}

/** The gradient of each row of the source: the sum of those of its copies, in the order of the result. */
static peri_status move_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    return summed_rows(grad_out[0], node->saved[SAVED_PERMUTE], node->saved[SAVED_IN], node->saved[SAVED_OUT],
                       node->kept[KEPT_SEGMENTS], node->kept[KEPT_ROWS], &grad_in[0]);
}

static const peri__node_vtab move_vtab = {.name = "sparse_permute", .backward = move_backward};

/** out[row] = place of each row of the segments that @out_offsets cuts: see jagged_places. */
static peri_status row_places(const peri_tensor *like, const peri_tensor *out_offsets, const peri_tensor *in_offsets,
                              const peri_tensor *permute, int64_t rows, peri_tensor **out)
{
    peri_tensor *result;
    PERI_TRY(peri_tensor_new(peri__device(like), like->dtype, 1, &rows, &result));
    peri_k_jagged_places_args args = {.out = peri__data(result),
                                      .out_offsets = peri__data(out_offsets),
                                      .segments = out_offsets->shape[0] - 1,
                                      .dtype = like->dtype,
                                      .out_dtype = out_offsets->dtype};
    if (in_offsets) {
        args.in_offsets = peri__data(in_offsets);
        args.in_dtype = in_offsets->dtype;
    }
    if (permute) {
        args.permute = peri__data(permute);
        args.permute_dtype = permute->dtype;
    }
    peri_status status = PERI_LAUNCH(peri__device(like), jagged_places, &args, rows, PERI_INT_GRAIN);
    if (status < 0) peri_tensor_release(result);
    else *out = result;
    return status;
}

/** What the gradient of @m's move needs. Without permute: that of a selection of single rows. */
static peri_status save_moves(const moves *m, peri__node *node)
{
    if (!m->permute) {
        peri_tensor *chosen;
        PERI_TRY(row_places(m->out, m->out, m->in, NULL, m->rows, &chosen));
        peri__node_save(node, SAVED_PERMUTE, chosen);
        peri_tensor_release(chosen);
        return PERI_OK;
    }
    peri__node_save(node, SAVED_PERMUTE, m->permute);
    if (m->in) peri__node_save(node, SAVED_IN, m->in);
    if (m->out) peri__node_save(node, SAVED_OUT, m->out);
    return PERI_OK;
}

/** Rows of @src, which is contiguous, as @m says. */
static peri_status move_rows(const moves *m, peri_tensor *src, peri_tensor **out)
{
    peri_tensor *result;
    PERI_TRY(peri__rows_like(src, m->rows, &result));
    int64_t width = peri__row_bytes(src);
    peri_k_jagged_copy_args args = {.dst = peri__data(result),
                                    .src = peri__data(src),
                                    .width = width,
                                    .segments = m->n,
                                    .out_step = 1,
                                    .in_step = 1,
                                    .out_dtype = PERI_I64,
                                    .in_dtype = PERI_I64};
    if (m->permute) {
        args.permute = peri__data(m->permute);
        args.permute_dtype = m->permute->dtype;
    }
    if (m->out) args.out_offsets = peri__data(m->out);
    if (m->in) args.in_offsets = peri__data(m->in);
    peri_status status =
        PERI_LAUNCH(peri__device(src), jagged_copy, &args, width ? m->rows : 0, peri__row_grain(width));
    if (status >= 0 && peri__differentiable(src)) {
        peri__node *node;
        status = peri__record(&move_vtab, &src, 1, &result, 1, &node);
        if (status >= 0) {
            node->kept[KEPT_SEGMENTS] = m->permute ? m->parts : src->shape[0];
            node->kept[KEPT_ROWS] = src->shape[0];
            status = save_moves(m, node);
        }
    }
    if (status < 0) peri_tensor_release(result);
    else *out = result;
    return status;
}

peri_status peri__rows_pick(peri_tensor *src, peri_tensor *out_offsets, peri_tensor *starts, int64_t rows,
                            peri_tensor **out)
{
    moves m = {.in = starts, .out = out_offsets, .n = out_offsets->shape[0] - 1, .rows = rows};
    return move_rows(&m, src, out);
}

/* -- whole rows ---------------------------------------------------------------------------------------------------- */

peri_status peri_sparse_index_select(peri_tensor *values, peri_tensor *indices, peri_tensor **out)
{
    static const char f[] = "peri_sparse_index_select";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "values", values, -1, -1));
    PERI_TRY(peri__check_ints(f, "indices", indices, 1, values));
    if (values->ndim < 1)
        return peri__fail(PERI_EINVAL, "%s: values are %s, wanted rows", f,
                          peri__tensor_text(values, text, sizeof text));
    moves m = {.parts = values->shape[0], .n = indices->shape[0], .rows = indices->shape[0]};
    peri_tensor *src = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(indices, &m.permute), out);
    PERI_TRY_GOTO(peri__check_indices(f, "indices", m.permute, m.parts), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(values, &src), out);
    status = move_rows(&m, src, out);
out:
    peri_tensor_release(m.permute);
    peri_tensor_release(src);
    return status;
}

/** saved: the ids. */
static peri_status sum_by_id_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *rows;
    PERI_TRY(peri_tensor_contiguous(grad_out[0], &rows));
    peri_status status = peri_sparse_index_select(rows, node->saved[SAVED_PERMUTE], &grad_in[0]);
    peri_tensor_release(rows);
    return status;
}

static const peri__node_vtab sum_by_id_vtab = {.name = "sum_by_id", .backward = sum_by_id_backward};

peri_status peri_sparse_sum_by_id(peri_tensor *values, peri_tensor *ids, int64_t rows, peri_tensor **out)
{
    static const char f[] = "peri_sparse_sum_by_id";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "values", values, -1, -1));
    PERI_TRY(peri__check_real(f, "values", values));
    PERI_TRY(peri__check_ints(f, "ids", ids, 1, values));
    if (values->ndim < 1 || values->shape[0] != ids->shape[0])
        return peri__fail(PERI_EINVAL, "%s: values are %s, wanted a row for each of %lld ids", f,
                          peri__tensor_text(values, text, sizeof text), (long long)ids->shape[0]);
    if (rows < 0) return peri__fail(PERI_ERANGE, "%s: %lld rows, allowed: 0 and more", f, (long long)rows);
    peri_tensor *to = NULL, *sums = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(ids, &to), out);
    PERI_TRY_GOTO(peri__check_indices(f, "ids", to, rows), out);
    PERI_TRY_GOTO(summed_rows(values, to, NULL, NULL, rows, rows, &sums), out);
    PERI_TRY_GOTO(peri__attach(&sum_by_id_vtab, &values, 1, &sums, 1, &node), out);
    if (node) peri__node_save(node, SAVED_PERMUTE, to);
out:
    peri_tensor_release(to);
    if (status < 0) peri_tensor_release(sums);
    else *out = sums;
    return status;
}

/* -- segments ------------------------------------------------------------------------------------------------------ */

static peri_status check_permute(const char *f, const peri_tensor *permute, const peri_tensor *lengths,
                                 const peri_tensor *values, const peri_tensor *weights)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "values", values, -1, -1));
    PERI_TRY(peri__check_ints(f, "permute", permute, 1, values));
    PERI_TRY(peri__check_ints(f, "lengths", lengths, -1, values));
    if (lengths->ndim < 1 || lengths->ndim > 2)
        return peri__fail(PERI_EINVAL, "%s: lengths are %s, wanted 1 or 2 dimensions", f,
                          peri__tensor_text(lengths, text, sizeof text));
    if (values->ndim < 1)
        return peri__fail(PERI_EINVAL, "%s: values are %s, wanted rows", f,
                          peri__tensor_text(values, text, sizeof text));
    if (!weights) return PERI_OK;
    if (weights->ndim < 1 || weights->shape[0] != values->shape[0])
        return peri__fail(PERI_EINVAL, "%s: weights are %s for %lld values", f,
                          peri__tensor_text(weights, text, sizeof text), (long long)values->shape[0]);
    return peri__check_same_device(f, weights, values);
}

/** m->in: where every segment of @columns bags begins. */
static peri_status source_bounds(moves *m, const peri__bags *b, int64_t columns)
{
    if (columns == 1) {
        peri_tensor_retain(b->offsets);
        m->in = b->offsets;
        return PERI_OK;
    }
    int64_t n = m->parts + 1;
    PERI_TRY(peri_tensor_new(peri__device(b->offsets), PERI_I64, 1, &n, &m->in));
    peri_k_jagged_bounds_args args = {.offsets = peri__data(b->offsets), .out = peri__data(m->in), .step = columns,
                                      .offsets_dtype = b->offsets->dtype, .out_dtype = PERI_I64};
    return PERI_LAUNCH(peri__device(m->in), jagged_bounds, &args, n, PERI_INT_GRAIN);
}

/** m->out: the permuted segments' lengths summed up; *report will say how many rows they are. */
static peri_status result_bounds(moves *m, peri__report **report)
{
    peri_tensor *lengths;
    PERI_TRY(peri_tensor_new(peri__device(m->in), PERI_I64, 1, &m->n, &lengths));
    peri_k_jagged_lengths_args args = {.offsets = peri__data(m->in),
                                       .permute = peri__data(m->permute),
                                       .out = peri__data(lengths),
                                       .offsets_dtype = PERI_I64,
                                       .permute_dtype = m->permute->dtype,
                                       .out_dtype = PERI_I64};
    peri_status status = PERI_LAUNCH(peri__device(m->in), jagged_lengths, &args, m->n, PERI_INT_GRAIN);
    if (status >= 0) status = peri__total_queue(lengths, &m->out, report);
    peri_tensor_release(lengths);
    return status;
}

/** The rows of contiguous @lengths in the order of the permutation. */
static peri_status move_lengths(const moves *m, peri_tensor *lengths, peri_tensor **out)
{
    moves rows = {.permute = m->permute, .parts = m->parts, .n = m->n, .rows = m->n};
    return move_rows(&rows, lengths, out);
}

static void release_permute_result(peri_permute_result *r)
{
    peri_tensor_release(r->lengths);
    peri_tensor_release(r->values);
    peri_tensor_release(r->weights);
}

peri_status peri_sparse_permute(peri_tensor *permute, peri_tensor *lengths, peri_tensor *values, peri_tensor *weights,
                                peri_permute_result *out)
{
    static const char f[] = "peri_sparse_permute";
    PERI_TRY(check_permute(f, permute, lengths, values, weights));
    int64_t columns = lengths->ndim == 2 ? lengths->shape[1] : 1;
    moves m = {.parts = lengths->shape[0], .n = permute->shape[0]};
    peri__bags bags = {0};
    peri_permute_result r = {0};
    peri_tensor *order = NULL, *all = NULL, *flat = NULL, *src = NULL, *src_weights = NULL;
    peri__report *checked = NULL, *total = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(permute, &order), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(lengths, &all), out);
    PERI_TRY_GOTO(peri__flat(all, &flat), out);
    const peri__indices indices = {"permute", order, m.parts};
    const peri__bag_names names = {"lengths", lengths->ndim == 2 ? columns : 0};
    PERI_TRY_GOTO(peri__indices_queue(f, &indices, &m.permute, &checked), out);
    if (peri__numel(flat) == 0) PERI_TRY_GOTO(peri__indices_settle(f, &indices, &checked), out); /* bags are next */
    PERI_TRY_GOTO(peri__bags_queue(f, &names, &bags, flat, NULL, values->shape[0]), out);
    PERI_TRY_GOTO(source_bounds(&m, &bags, columns), out);
    PERI_TRY_GOTO(result_bounds(&m, &total), out);
    PERI_TRY_GOTO(move_lengths(&m, all, &r.lengths), out);
    PERI_TRY_GOTO(peri__report_wait(total), out); /* the last: all are there; the device has work meanwhile */
    PERI_TRY_GOTO(peri__indices_settle(f, &indices, &checked), out);
    PERI_TRY_GOTO(peri__bags_settle(f, &names, &bags), out);
    PERI_TRY_GOTO(peri__total_settle(f, &total, &m.rows), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(values, &src), out);
    PERI_TRY_GOTO(move_rows(&m, src, &r.values), out);
    if (weights) {
        PERI_TRY_GOTO(peri_tensor_contiguous(weights, &src_weights), out);
        PERI_TRY_GOTO(move_rows(&m, src_weights, &r.weights), out);
    }
    *out = r;
    r = (peri_permute_result){0};
out:
    release_permute_result(&r);
    peri__bags_fini(&bags);
    peri__report_return(checked);
    peri__report_return(total);
    peri_tensor *all_of[] = {order, m.permute, m.in, m.out, all, flat, src, src_weights};
    for (size_t i = 0; i < sizeof all_of / sizeof *all_of; i++) peri_tensor_release(all_of[i]);
    return status;
}

/* -- permutations as data ------------------------------------------------------------------------------------------ */

/** A number stands twice in the permutation: say which. */
static peri_status fail_repeated_number(const char *f, const peri_tensor *permute)
{
    int64_t n = permute->shape[0], *host = peri__alloc_zero(sizeof *host * (size_t)(2 * n));
    if (!host) return PERI_ENOMEM;
    peri_tensor *wide = NULL;
    peri_status status = peri_tensor_to((peri_tensor *)permute, PERI_I64, NULL, &wide);
    if (status >= 0) status = peri_tensor_read(wide, host, n * 8);
    int64_t *seen = host + n; /* by number: place + 1 */
    for (int64_t i = 0; i < n && status >= 0; i++) {
        if (seen[host[i]])
            status = peri__fail(PERI_EINVAL,
                                "%s: permute[%lld] is %lld, as permute[%lld] is; allowed: every number of 0..%lld once",
                                f, (long long)i, (long long)host[i], (long long)seen[host[i]] - 1, (long long)n - 1);
        else seen[host[i]] = i + 1;
    }
    peri_tensor_release(wide);
    peri__free(host);
    return status;
}

peri_status peri_sparse_invert_permute(peri_tensor *permute, peri_tensor **out)
{
    static const char f[] = "peri_sparse_invert_permute";
    PERI_TRY(peri__check_ints(f, "permute", permute, 1, NULL));
    int64_t n = permute->shape[0], least = 0, most = 0;
    peri_tensor *flat, *inverse = NULL;
    PERI_TRY(peri_tensor_contiguous(permute, &flat));
    peri_status status;
    PERI_TRY_GOTO(peri__check_indices(f, "permute", flat, n), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &n, &inverse), out);
    PERI_TRY_GOTO(peri_tensor_fill(inverse, -1), out);
    peri_k_invert_permute_args args = {
        .inverse = peri__data(inverse), .permute = peri__data(flat), .n = n, .dtype = flat->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), invert_permute, &args, n, PERI_INT_GRAIN), out);
    if (n > 0) PERI_TRY_GOTO(peri__extent(inverse, &least, &most), out);
    /* a number that nobody hit: another was hit twice */
    if (least < 0) PERI_TRY_GOTO(fail_repeated_number(f, flat), out);
    *out = inverse;
    inverse = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(inverse);
    return status;
}

/** Last entry of complete offsets. Waits. */
static peri_status last_offset(const char *f, const char *what, peri_tensor *offsets, int64_t *last)
{
    double number;
    if (offsets->shape[0] < 1)
        return peri__fail(PERI_EINVAL, "%s: %s are empty; they have one entry more than there are bags", f, what);
    PERI_TRY(peri_tensor_item(offsets, offsets->shape[0] - 1, &number));
    if (number < 0 || number >= 0x1p50)
        return peri__fail(PERI_ERANGE, "%s: %s[%lld] is %g, allowed: 0..2^50", f, what,
                          (long long)offsets->shape[0] - 1, number);
    *last = (int64_t)number;
    return PERI_OK;
}

/** The lengths of @in's segments as permuted are those of @out's. */
static peri_status check_expansion(const char *f, peri_tensor *permute, const peri_tensor *in, peri_tensor *out_offsets,
                                   int64_t rows)
{
    peri_tensor *lengths;
    int64_t n = permute->shape[0];
    PERI_TRY(peri_tensor_new(peri__device(in), PERI_I64, 1, &n, &lengths));
    peri_k_jagged_lengths_args args = {.offsets = peri__data(in),
                                       .permute = peri__data(permute),
                                       .out = peri__data(lengths),
                                       .offsets_dtype = in->dtype,
                                       .permute_dtype = permute->dtype,
                                       .out_dtype = PERI_I64};
    peri__bags bags = {0};
    peri_tensor limit = *lengths;
    limit.shape[0] = rows;
    peri_status status = PERI_LAUNCH(peri__device(in), jagged_lengths, &args, n, PERI_INT_GRAIN);
    PERI_TRY_GOTO(status, out);
    PERI_TRY_GOTO(peri__bags_init(f, &bags, lengths, out_offsets, &limit), out);
    PERI_TRY_GOTO(peri__bags_post(&bags, NULL, 0, 0), out);
    PERI_TRY_GOTO(peri__report_wait(bags.report), out);
    status = peri__bags_judge(&bags, f, peri__bag_name, "output_offset against the permuted input");
out:
    peri__bags_fini(&bags);
    peri_tensor_release(lengths);
    return status;
}

peri_status peri_sparse_expand_permute(peri_tensor *permute, peri_tensor *in_offsets, peri_tensor *out_offsets,
                                       int64_t size, peri_tensor **out)
{
    static const char f[] = "peri_sparse_expand_permute";
    PERI_TRY(peri__check_ints(f, "permute", permute, 1, NULL));
    PERI_TRY(peri__check_ints(f, "input_offset", in_offsets, 1, permute));
    PERI_TRY(peri__check_ints(f, "output_offset", out_offsets, 1, permute));
    if (out_offsets->shape[0] != permute->shape[0] + 1)
        return peri__fail(PERI_EINVAL, "%s: %lld entries of output_offset for a permutation of %lld, wanted one more",
                          f, (long long)out_offsets->shape[0], (long long)permute->shape[0]);
    int64_t in_rows, out_rows;
    peri_tensor *p = NULL, *in = NULL, *to = NULL;
    peri__bags bags = {0};
    peri_status status;
    PERI_TRY_GOTO(last_offset(f, "input_offset", in_offsets, &in_rows), out);
    PERI_TRY_GOTO(last_offset(f, "output_offset", out_offsets, &out_rows), out);
    if (size >= 0 && size != out_rows)
        PERI_TRY_GOTO(peri__fail(PERI_EINVAL, "%s: output_size %lld, but the last output_offset is %lld", f,
                                 (long long)size, (long long)out_rows),
                      out);
    PERI_TRY_GOTO(peri_tensor_contiguous(permute, &p), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(in_offsets, &in), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(out_offsets, &to), out);
    const peri__indices indices = {"permute", p, in->shape[0] - 1};
    PERI_TRY_GOTO(peri__indices_and_bags(f, &indices, "input_offset", &bags, NULL, in, in_rows, 0), out);
    PERI_TRY_GOTO(check_expansion(f, p, in, to, out_rows), out);
    status = row_places(p, to, in, p, out_rows, out);
out:
    peri__bags_fini(&bags);
    peri_tensor_release(p);
    peri_tensor_release(in);
    peri_tensor_release(to);
    return status;
}

peri_status peri_sparse_lengths_range(peri_tensor *lengths, peri_tensor **out)
{
    static const char f[] = "peri_sparse_lengths_range";
    PERI_TRY(peri__check_ints(f, "lengths", lengths, 1, NULL));
    peri_tensor *flat, *offsets = NULL;
    int64_t rows = 0, least = 0, most = 0;
    PERI_TRY(peri_tensor_contiguous(lengths, &flat));
    peri_status status;
    if (flat->shape[0] > 0) PERI_TRY_GOTO(peri__extent(flat, &least, &most), out);
    if (least < 0) PERI_TRY_GOTO(peri__check_indices(f, "lengths", flat, INT64_MAX), out);
    PERI_TRY_GOTO(peri__total_offsets(f, flat, &offsets, &rows), out);
    status = row_places(flat, offsets, NULL, NULL, rows, out);
out:
    peri_tensor_release(flat);
    peri_tensor_release(offsets);
    return status;
}

peri_status peri_sparse_offsets_range(peri_tensor *offsets, int64_t size, peri_tensor **out)
{
    static const char f[] = "peri_sparse_offsets_range";
    PERI_TRY(peri__check_ints(f, "offsets", offsets, 1, NULL));
    if (size < 0 || (offsets->dtype == PERI_I32 && size > INT32_MAX) || size >= (int64_t)1 << 50)
        return peri__fail(PERI_ERANGE, "%s: range_size %lld, allowed: 0 and more, below 2^50 and within %s", f,
                          (long long)size, peri_dtype_name(offsets->dtype));
    int64_t n = offsets->shape[0], complete = n + 1, one = 1;
    if (n == 0 && size > 0) return peri__fail(PERI_EINVAL, "%s: no offsets for a range of %lld", f, (long long)size);
    peri_tensor *all, *head = NULL, *tail = NULL;
    peri__bags bags = {0};
    PERI_TRY(peri_tensor_new(peri__device(offsets), offsets->dtype, 1, &complete, &all));
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_view(all, 1, &n, &one, 0, &head), out);
    PERI_TRY_GOTO(peri__tensor_view(all, 1, &one, &one, n, &tail), out);
    PERI_TRY_GOTO(peri_tensor_copy(head, offsets), out);
    PERI_TRY_GOTO(peri_tensor_fill(tail, (double)size), out);
    PERI_TRY_GOTO(peri__bags_of(f, "offsets", &bags, NULL, all, size, 0), out);
    status = row_places(offsets, all, NULL, NULL, size, out);
out:
    peri__bags_fini(&bags);
    peri_tensor_release(all);
    peri_tensor_release(head);
    peri_tensor_release(tail);
    return status;
}
