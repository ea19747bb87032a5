/* SPDX-License-Identifier: Apache-2.0
 *
 * select.c: members of bags by mask and by place, rows of several matrices by index, with gradient.
 */
#include "sparse_internal.h"
#include "../../kernels/lookup.h"

/** values [n, ...] and lengths [bags]. */
static peri_status check_bags(const char *f, const peri_tensor *values, const peri_tensor *lengths)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "values", values, -1, -1));
    PERI_TRY(peri__check_ints(f, "lengths", lengths, 1, values));
    if (values->ndim < 1)
        return peri__fail(PERI_EINVAL, "%s: values are %s, wanted rows", f,
                          peri__tensor_text(values, text, sizeof text));
    return PERI_OK;
}

/* -- by mask ------------------------------------------------------------------------------------------------------- */

static peri_status check_mask(const char *f, const peri_tensor *values, const peri_tensor *mask)
{
    char text[128];
    PERI_TRY(peri__check_tensor(f, "mask", mask, PERI_BOOL, 1));
    PERI_TRY(peri__check_same_device(f, mask, values));
    if (mask->shape[0] != values->shape[0])
        return peri__fail(PERI_EINVAL, "%s: mask is %s for %lld values, wanted one for each", f,
                          peri__tensor_text(mask, text, sizeof text), (long long)values->shape[0]);
    return PERI_OK;
}

enum { KEPT_SOURCE_ROWS }; /* of masked_select */

/** saved: mask. */
static peri_status masked_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    int64_t n = node->kept[KEPT_SOURCE_ROWS];
    peri_tensor *flat = NULL, *grad = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(grad_out[0], &flat), out);
    PERI_TRY_GOTO(peri__rows_like(flat, n, &grad), out);
    peri_k_mask_args args = {.mask = peri__data(node->saved[0]),
                             .all = peri__data(grad),
                             .kept = peri__data(flat),
                             .n = n,
                             .width = peri__row_bytes(flat)};
    PERI_TRY_GOTO(PERI_RUN(peri__device(flat), mask_spread, &args), out);
    grad_in[0] = grad;
    grad = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    return status;
}

static const peri__node_vtab masked_vtab = {.name = "masked_select", .backward = masked_backward};

peri_status peri__rows_masked(peri_tensor *src, peri_tensor *mask, peri_tensor **rows)
{
    peri_device *device = peri__device(src);
    int64_t n = mask->shape[0], one = 1, total;
    peri_tensor *count, *kept = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY(peri_tensor_new(device, PERI_I64, 1, &one, &count));
    peri_k_mask_args args = {.mask = peri__data(mask), .total = peri__data(count), .all = peri__data(src), .n = n,
                             .width = peri__row_bytes(src)};
    PERI_TRY_GOTO(PERI_RUN(device, mask_count, &args), out);
    PERI_TRY_GOTO(peri__word_at(count, 0, &total), out);
    PERI_TRY_GOTO(peri__rows_like(src, total, &kept), out);
    args.kept = peri__data(kept);
    PERI_TRY_GOTO(PERI_RUN(device, mask_pick, &args), out);
    if (peri__differentiable(src)) {
        PERI_TRY_GOTO(peri__record(&masked_vtab, &src, 1, &kept, 1, &node), out);
        peri__node_save(node, 0, mask);
        node->kept[KEPT_SOURCE_ROWS] = n;
    }
    *rows = kept;
    kept = NULL;
out:
    peri_tensor_release(kept);
    peri_tensor_release(count);
    return status;
}

peri_status peri_sparse_masked_select(peri_tensor *values, peri_tensor *lengths, peri_tensor *mask,
                                      peri_tensor **out_values, peri_tensor **out_lengths)
{
    static const char f[] = "peri_sparse_masked_select";
    PERI_TRY(check_bags(f, values, lengths));
    PERI_TRY(check_mask(f, values, mask));
    int64_t n = lengths->shape[0];
    peri__bags bags = {0};
    peri_tensor *flat = NULL, *src = NULL, *chosen = NULL, *left = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(lengths, &flat), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(mask, &chosen), out);
    PERI_TRY_GOTO(peri__bags_of(f, "lengths", &bags, flat, NULL, values->shape[0], 0), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &n, &left), out);
    peri_k_mask_args count = {.mask = peri__data(chosen),
                              .offsets = peri__data(bags.offsets),
                              .lengths = peri__data(left),
                              .offsets_dtype = bags.offsets->dtype,
                              .lengths_dtype = left->dtype};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), mask_lengths, &count, n, PERI_INT_GRAIN / 16), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(values, &src), out);
    PERI_TRY_GOTO(peri__rows_masked(src, chosen, out_values), out);
    *out_lengths = left;
    left = NULL;
out:
    peri__bags_fini(&bags);
    peri_tensor *all[] = {flat, src, chosen, left};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}

/* -- by place ------------------------------------------------------------------------------------------------------ */

/** The error about the start of bag @bag. */
static peri_status fail_start(const char *f, const peri_tensor *start, const peri_tensor *lengths, int64_t bag)
{
    int64_t first, members;
    PERI_TRY(peri__int_at(start, bag, &first));
    PERI_TRY(peri__int_at(lengths, bag, &members));
    return peri__fail(PERI_ERANGE, "%s: start[%lld] is %lld, allowed in a bag of %lld: 0..%lld", f, (long long)bag,
                      (long long)first, (long long)members, (long long)members);
}

peri_status peri_sparse_slice(peri_tensor *values, peri_tensor *lengths, peri_tensor *start, int64_t length,
                              peri_tensor **out_values, peri_tensor **out_lengths)
{
    static const char f[] = "peri_sparse_slice";
    PERI_TRY(check_bags(f, values, lengths));
    PERI_TRY(peri__check_ints(f, "start", start, 1, values));
    int64_t n = lengths->shape[0], one = 1, rows, bad;
    if (start->shape[0] != n)
        return peri__fail(PERI_EINVAL, "%s: %lld starts for %lld bags", f, (long long)start->shape[0], (long long)n);
    if (length < 0) return peri__fail(PERI_EINVAL, "%s: slice_length %lld, allowed: 0 and more", f, (long long)length);
    peri__bags bags = {0};
    peri_tensor *flat = NULL, *src = NULL, *first = NULL, *starts = NULL, *taken = NULL, *found = NULL, *ends = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(lengths, &flat), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(start, &first), out);
    PERI_TRY_GOTO(peri__bags_of(f, "lengths", &bags, flat, NULL, values->shape[0], 0), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(flat), PERI_I64, 1, &n, &starts), out);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(flat), PERI_I64, 1, &one, &found), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &n, &taken), out);
    peri_k_slice_bounds_args cut = {.offsets = peri__data(bags.offsets),
                                    .start = peri__data(first),
                                    .starts = peri__data(starts),
                                    .bad = peri__data(found),
                                    .lengths = peri__data(taken),
                                    .bags = n,
                                    .length = length,
                                    .offsets_dtype = bags.offsets->dtype,
                                    .start_dtype = first->dtype,
                                    .lengths_dtype = flat->dtype};
    PERI_TRY_GOTO(PERI_RUN(peri__device(flat), slice_bounds, &cut), out);
    PERI_TRY_GOTO(peri__word_at(found, 0, &bad), out);
    if (bad != INT64_MAX) PERI_TRY_GOTO(fail_start(f, first, flat, bad), out);
    PERI_TRY_GOTO(peri__total_offsets(f, taken, &ends, &rows), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(values, &src), out);
    PERI_TRY_GOTO(peri__rows_pick(src, ends, starts, rows, out_values), out);
    *out_lengths = taken;
    taken = NULL;
out:
    peri__bags_fini(&bags);
    peri_tensor *all[] = {flat, src, first, starts, taken, found, ends};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}

/* -- rows of several matrices -------------------------------------------------------------------------------------- */

/** Matrices that lie one after the other, on the host: word by word, an entry more than there are matrices. */
typedef struct matrices {
    int64_t *words;   /* (n + 1) x PERI_SELECT_WORDS, then (n + 1) first indices, then (n + 1) first rows */
    int64_t n, pitch; /* pitch: columns of all, if the rows of one index of each matrix lie side by side, else 0 */
} matrices;

/** saved: the words on the device, rows by index. integer: matrices, pitch, rows and elements of all. */
enum { SAVED_TABLE, SAVED_ROWS };
enum { KEPT_MATRICES, KEPT_PITCH, KEPT_ROWS, KEPT_ELEMENTS };

static peri_status fail_size(const char *f, const char *what, int64_t i, int64_t size)
{
    return peri__fail(PERI_EINVAL, "%s: %s[%lld] is %lld, allowed: 0 and more", f, what, (long long)i, (long long)size);
}

/** Places of all matrices; overflow and negative sizes are errors. */
static peri_status matrices_init(matrices *m, const char *f, const peri_batch_select_args *a, bool side)
{
    int64_t n = a->n, *w;
    m->n = n;
    m->words = w = peri__alloc_zero(sizeof *w * (size_t)((n + 1) * (PERI_SELECT_WORDS + 2)));
    if (!w) return PERI_ENOMEM;
    for (int64_t i = 0; i < n; i++, w += PERI_SELECT_WORDS) {
        int64_t k = a->num_indices[i], rows = a->rows[i], columns = a->columns[i], *next = w + PERI_SELECT_WORDS, in,
                out;
        if (k < 0) return fail_size(f, "input_num_indices", i, k);
        if (rows < 0) return fail_size(f, "input_rows", i, rows);
        if (columns < 0) return fail_size(f, "input_columns", i, columns);
        if (side && k != a->num_indices[0])
            return peri__fail(PERI_EINVAL,
                              "%s: input_num_indices[%lld] is %lld and the first one is %lld: equal ones are wanted by "
                              "permute_output_dim_0_1",
                              f, (long long)i, (long long)k, (long long)a->num_indices[0]);
        bool over = __builtin_mul_overflow(rows, columns, &in) || __builtin_mul_overflow(k, columns, &out) ||
            __builtin_add_overflow(w[PERI_SELECT_PLACE], k, &next[PERI_SELECT_PLACE]) ||
            __builtin_add_overflow(w[PERI_SELECT_ROW], rows, &next[PERI_SELECT_ROW]) ||
            __builtin_add_overflow(w[PERI_SELECT_FROM], in, &next[PERI_SELECT_FROM]) ||
            __builtin_add_overflow(w[PERI_SELECT_TO], side ? columns : out, &next[PERI_SELECT_TO]);
        if (over)
            return peri__fail(PERI_ERANGE, "%s: inputs of 2^63 elements or more up to number %lld", f, (long long)i);
        w[PERI_SELECT_COLUMNS] = columns;
        m->words[(n + 1) * PERI_SELECT_WORDS + i + 1] = next[PERI_SELECT_PLACE];
        m->words[(n + 1) * (PERI_SELECT_WORDS + 1) + i + 1] = next[PERI_SELECT_ROW];
    }
    m->pitch = side ? w[PERI_SELECT_TO] : 0;
    return PERI_OK;
}

static const int64_t *matrix_ends(const matrices *m) { return m->words + m->n * PERI_SELECT_WORDS; }

static peri_status check_inputs(const char *f, const matrices *m, const peri_tensor *inputs, const peri_tensor *indices)
{
    const int64_t *ends = matrix_ends(m);
    if (inputs->shape[0] != ends[PERI_SELECT_FROM])
        return peri__fail(PERI_EINVAL, "%s: inputs have %lld elements, but input_rows and input_columns make %lld", f,
                          (long long)inputs->shape[0], (long long)ends[PERI_SELECT_FROM]);
    if (indices->shape[0] != ends[PERI_SELECT_PLACE])
        return peri__fail(PERI_EINVAL, "%s: %lld indices, but input_num_indices make %lld", f,
                          (long long)indices->shape[0], (long long)ends[PERI_SELECT_PLACE]);
    return PERI_OK;
}

static peri_status select_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    int64_t rows = node->kept[KEPT_ROWS], elements = node->kept[KEPT_ELEMENTS];
    peri_tensor *flat = NULL, *grad = NULL, *list = NULL, *first = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__summands(grad_out[0], &flat), out);
    PERI_TRY_GOTO(peri__tensor_like(flat, 1, &elements, &grad), out);
    PERI_TRY_GOTO(peri__lists_of(node->saved[SAVED_ROWS], rows, &list, &first), out);
    peri_k_batch_select_args args = {.matrix = peri__data(grad),
                                     .result = peri__data(flat),
                                     .table = peri__data(node->saved[SAVED_TABLE]),
                                     .list = peri__data(list),
                                     .list_offsets = peri__data(first),
                                     .matrices = node->kept[KEPT_MATRICES],
                                     .pitch = node->kept[KEPT_PITCH],
                                     .element = peri_dtype_size(flat->dtype)};
    int64_t width = elements / peri__max(rows, 1) * args.element;
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), batch_select_sum, &args, rows, peri__row_grain(width)), out);
    PERI_TRY_GOTO(peri__cast(grad, grad_out[0]->dtype, &grad_in[0]), out);
out:
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    peri_tensor_release(list);
    peri_tensor_release(first);
    return status;
}

static const peri__node_vtab select_vtab = {.name = "batch_select", .backward = select_backward};

/** The rows at @rows (i64, counted over all matrices) of @src. @table: m->words on the device. */
static peri_status select_rows(const matrices *m, peri_tensor *src, peri_tensor *table, peri_tensor *rows,
                               peri_tensor **out)
{
    const int64_t *ends = matrix_ends(m);
    int64_t n = rows->shape[0], size = m->pitch ? m->pitch * (n / m->n) : ends[PERI_SELECT_TO];
    peri_tensor *result;
    peri__node *node;
    PERI_TRY(peri__tensor_like(src, 1, &size, &result));
    peri_k_batch_select_args args = {.matrix = peri__data(src),
                                     .result = peri__data(result),
                                     .table = peri__data(table),
                                     .rows = peri__data(rows),
                                     .matrices = m->n,
                                     .pitch = m->pitch,
                                     .element = peri_dtype_size(src->dtype)};
    peri_status status =
        PERI_LAUNCH(peri__device(src), batch_select, &args, n, peri__row_grain(size / peri__max(n, 1) * args.element));
    if (status >= 0 && peri__differentiable(src)) {
        status = peri__record(&select_vtab, &src, 1, &result, 1, &node);
        if (status >= 0) {
            peri__node_save(node, SAVED_TABLE, table);
            peri__node_save(node, SAVED_ROWS, rows);
            node->kept[KEPT_MATRICES] = m->n;
            node->kept[KEPT_PITCH] = m->pitch;
            node->kept[KEPT_ROWS] = ends[PERI_SELECT_ROW];
            node->kept[KEPT_ELEMENTS] = ends[PERI_SELECT_FROM];
        }
    }
    if (status < 0) peri_tensor_release(result);
    else *out = result;
    return status;
}

peri_status peri_sparse_batch_index_select(peri_tensor *inputs, peri_tensor *indices,
                                           const peri_batch_select_args *args, peri_tensor **out)
{
    static const char f[] = "peri_sparse_batch_index_select";
    PERI_TRY(peri__check_tensor(f, "inputs", inputs, -1, 1));
    PERI_TRY(peri__check_ints(f, "indices", indices, 1, inputs));
    if (args->n < 1) return peri__fail(PERI_EINVAL, "%s: %lld inputs, allowed: 1 and more", f, (long long)args->n);
    matrices m = {0};
    int64_t ends = args->n + 1, one = 1, words = ends * PERI_SELECT_WORDS;
    peri_tensor *src = NULL, *table = NULL, *places = NULL, *starts = NULL, *ids = NULL, *rows = NULL;
    peri_status status;
    PERI_TRY_GOTO(matrices_init(&m, f, args, args->permute_output_dim_0_1), out);
    PERI_TRY_GOTO(check_inputs(f, &m, inputs, indices), out);
    PERI_TRY_GOTO(peri__upload_i64(peri__device(inputs), m.words, words + 2 * ends, &table), out);
    PERI_TRY_GOTO(peri__tensor_view(table, 1, &ends, &one, words, &places), out);
    PERI_TRY_GOTO(peri__tensor_view(table, 1, &ends, &one, words + ends, &starts), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(indices, &ids), out);
    peri__tables t = {.function = f,
                      .what = "indices",
                      .table = "input",
                      .ids = ids,
                      .offsets = places,
                      .starts = starts,
                      .tables = m.n};
    PERI_TRY_GOTO(peri__table_rows(&t, PERI_I64, &rows, NULL), out);
    PERI_TRY_GOTO(peri_tensor_contiguous(inputs, &src), out);
    status = select_rows(&m, src, table, rows, out);
out:
    peri__free(m.words);
    peri_tensor *all[] = {src, table, places, starts, ids, rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) peri_tensor_release(all[i]);
    return status;
}
