/* SPDX-License-Identifier: Apache-2.0
 *
 * ops.c: the public collective operations: what each asks of its tensors.
 */
#include "comm_internal.h"

static int64_t first_dimension(const peri_tensor *t) { return t->ndim ? t->shape[0] : 1; }

static peri_status check_output(const char *function, peri_group *group, const peri_tensor *output)
{
    char text[128];
    PERI_TRY(peri__group_check(function, group));
    PERI_TRY(peri__check_tensor(function, "the output", output, -1, -1));
    if (!peri__contiguous(output))
        return peri__fail(PERI_EINVAL, "%s: the output %s is not contiguous", function,
                          peri__tensor_text(output, text, sizeof text));
    return PERI_OK;
}

/** Checks of an operation from one tensor to another; @rows: both are cut into rows of one size. */
static peri_status check_pair(const char *function, peri_group *group, const peri_tensor *output,
                              const peri_tensor *input, bool rows)
{
    char a[128], b[128];
    PERI_TRY(check_output(function, group, output));
    PERI_TRY(peri__check_tensor(function, "the input", input, output->dtype, -1));
    PERI_TRY(peri__check_same_device(function, output, input));
    if (rows && peri__row_numel(output) != peri__row_numel(input))
        return peri__fail(PERI_EINVAL, "%s: rows of the output %s hold %lld elements, of the input %s %lld", function,
                          peri__tensor_text(output, a, sizeof a), (long long)peri__row_numel(output),
                          peri__tensor_text(input, b, sizeof b), (long long)peri__row_numel(input));
    if (output->storage == input->storage && peri__contiguous(input)) {
        int64_t x = output->offset, y = input->offset;
        if (x < y + peri__numel(input) && y < x + peri__numel(output))
            return peri__fail(PERI_EINVAL, "%s: output and input overlap", function);
    }
    return PERI_OK;
}

static peri_status check_reduce(const char *function, const peri_tensor *t, int32_t reduce)
{
    if (reduce < 0 || reduce >= PERI_REDUCE_COUNT)
        return peri__fail(PERI_EINVAL, "%s: reduce operator %d, allowed: PERI_REDUCE_SUM, _MIN, _MAX", function,
                          reduce);
    bool complex = t->dtype == PERI_C64 || t->dtype == PERI_C128;
    if (complex && reduce != PERI_REDUCE_SUM)
        return peri__fail(PERI_EINVAL, "%s: %s has no order, allowed: sum", function, peri_dtype_name(t->dtype));
    if (t->dtype == PERI_BOOL && reduce == PERI_REDUCE_SUM)
        return peri__fail(PERI_EINVAL, "%s: a sum of bool, allowed: max (or) and min (and)", function);
    return PERI_OK;
}

/** Check rows[size] (>= 0) against the rows of @t, and turn them into elements. */
static peri_status rows_to_elements(const char *function, const char *what, const peri_group *g, const int64_t *rows,
                            const peri_tensor *t, int64_t *out)
{
    char text[128];
    int64_t sum = 0, row = peri__row_numel(t);
    if (!rows) return peri__fail(PERI_EINVAL, "%s: no %s splits", function, what);
    for (int32_t i = 0; i < g->size; i++) {
        if (rows[i] < 0)
            return peri__fail(PERI_EINVAL, "%s: %lld rows for rank %d in the %s splits, allowed: 0 and more", function,
                              (long long)rows[i], i, what);
        sum += rows[i];
        out[i] = rows[i] * row;
    }
    if (sum != first_dimension(t))
        return peri__fail(PERI_EINVAL, "%s: the %s splits sum to %lld rows, the %s %s has %lld", function, what,
                          (long long)sum, what, peri__tensor_text(t, text, sizeof text), (long long)first_dimension(t));
    return PERI_OK;
}

/** Post @op, whose channel and dtype are those of the group and the tensors, with @input made contiguous. */
static peri_status post_pair(peri_group *group, peri_coll_op *op, peri_tensor *output, peri_tensor *input,
                             peri_work **out)
{
    PERI__HELD peri_tensor *flat = NULL;
    bool before = peri__grad_swap(false);
    peri_status status = peri_tensor_contiguous(input, &flat);
    peri__grad_swap(before);
    PERI_TRY(status);
    op->channel = group->channel;
    op->dtype = output->dtype;
    peri__changed(output);
    return peri__coll_post(group, op, flat, output, out);
}

/** Room for two count arrays: on the stack for usual groups. */
enum { USUAL = 64 };
typedef struct counts {
    int64_t *send, *recv;
    int64_t fixed[2 * USUAL];
} counts;

static peri_status counts_init(counts *c, int32_t size)
{
    c->send = size <= USUAL ? c->fixed : peri__alloc(sizeof(int64_t) * 2 * (size_t)size);
    c->recv = c->send + size;
    return c->send ? PERI_OK : PERI_ENOMEM;
}

static void counts_end(counts *c)
{
    if (c->send != c->fixed) peri__free(c->send);
}

/** Two count arrays, until their scope ends. They are made at once. */
#define COUNTS __attribute__((cleanup(counts_end))) counts

/* -- operations without splits ------------------------------------------------------------------------------------- */

peri_status peri_coll_barrier(peri_group *group, uint64_t tag, peri_work **out)
{
    PERI_NEED(out);
    PERI_TRY(peri__group_check("peri_coll_barrier", group));
    peri_coll_op op = {.kind = PERI_COLL_BARRIER, .channel = group->channel, .dtype = PERI_U8, .tag = tag};
    return peri__coll_post(group, &op, NULL, NULL, out);
}

peri_status peri_coll_broadcast(peri_group *group, peri_tensor *tensor, int32_t root, uint64_t tag, peri_work **out)
{
    PERI_NEED(out);
    PERI_TRY(check_output("peri_coll_broadcast", group, tensor));
    if (root < 0 || root >= group->size)
        return peri__fail(PERI_EINVAL, "peri_coll_broadcast: root %d, allowed: 0..%d", root, group->size - 1);
    peri_coll_op op = {.kind = PERI_COLL_BROADCAST, .channel = group->channel, .dtype = tensor->dtype, .root = root,
                       .count = peri__numel(tensor), .tag = tag};
    peri__changed(tensor);
    return peri__coll_post(group, &op, NULL, tensor, out);
}

static peri_status all_reduce(peri_group *group, int32_t channel, peri_tensor *tensor, int32_t reduce, uint64_t tag,
                              const peri_coll_facts *facts, peri_work **out)
{
    PERI_NEED(out);
    PERI_TRY(check_output("peri_coll_all_reduce", group, tensor));
    PERI_TRY(check_reduce("peri_coll_all_reduce", tensor, reduce));
    peri_coll_op op = {.kind = PERI_COLL_ALL_REDUCE, .channel = channel, .dtype = tensor->dtype, .reduce = reduce,
                       .count = peri__numel(tensor), .tag = tag, .facts = facts};
    peri__changed(tensor);
    return peri__coll_post(group, &op, NULL, tensor, out);
}

peri_status peri_coll_all_reduce(peri_group *group, peri_tensor *tensor, int32_t reduce, uint64_t tag, peri_work **out)
{
    return all_reduce(group, group ? group->channel : 0, tensor, reduce, tag, NULL, out);
}

peri_status peri__coll_sum_gradients(peri_group *group, peri_tensor *tensor, uint64_t tag, const peri_coll_facts *facts,
                                     peri_work **out)
{
    return all_reduce(group, PERI_CHANNEL_DENSE, tensor, PERI_REDUCE_SUM, tag, facts, out);
}

/* -- equal parts --------------------------------------------------------------------------------------------------- */

/** The operations on equal parts: @whole has size(group) times the elements of @part. */
static peri_status check_equal_parts(const char *function, peri_group *group, const peri_tensor *whole,
                               const peri_tensor *part, int64_t *count)
{
    char a[128], b[128];
    *count = peri__numel(part);
    if (peri__numel(whole) == *count * group->size) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is not %d times %s", function, peri__tensor_text(whole, a, sizeof a),
                      group->size, peri__tensor_text(part, b, sizeof b));
}

static peri_status post_equal_parts(const char *function, int32_t kind, peri_group *group, peri_tensor *output,
                            peri_tensor *input, int32_t reduce, uint64_t tag, peri_work **out)
{
    char text[128];
    int64_t count;
    PERI_TRY(check_pair(function, group, output, input, false));
    if (kind == PERI_COLL_REDUCE_SCATTER) PERI_TRY(check_reduce(function, input, reduce));
    if (kind == PERI_COLL_ALL_GATHER) PERI_TRY(check_equal_parts(function, group, output, input, &count));
    else if (kind == PERI_COLL_REDUCE_SCATTER) PERI_TRY(check_equal_parts(function, group, input, output, &count));
    else {
        if (peri__numel(output) != peri__numel(input) || first_dimension(input) % group->size != 0)
            return peri__fail(PERI_EINVAL,
                              "%s: input %s, allowed: rows divisible by %d, and an output of the same size", function,
                              peri__tensor_text(input, text, sizeof text), group->size);
        count = peri__numel(input) / group->size;
    }
    COUNTS c;
    PERI_TRY(counts_init(&c, group->size));
    for (int32_t i = 0; i < group->size; i++) c.send[i] = c.recv[i] = count;
    peri_coll_op op = {.kind = kind, .reduce = reduce, .tag = tag, .send_counts = c.send, .recv_counts = c.recv};
    if (kind == PERI_COLL_ALL_TO_ALL) op.count = count; /* equal parts: the ranks must agree on it */
    if (kind == PERI_COLL_REDUCE_SCATTER) op.recv_counts = NULL;
    return post_pair(group, &op, output, input, out);
}

peri_status peri_coll_all_gather(peri_group *group, peri_tensor *output, peri_tensor *input, uint64_t tag,
                                 peri_work **out)
{
    return post_equal_parts("peri_coll_all_gather", PERI_COLL_ALL_GATHER, group, output, input, 0, tag, out);
}

peri_status peri_coll_reduce_scatter(peri_group *group, peri_tensor *output, peri_tensor *input, int32_t reduce,
                                     uint64_t tag, peri_work **out)
{
    return post_equal_parts("peri_coll_reduce_scatter", PERI_COLL_REDUCE_SCATTER, group, output, input, reduce, tag,
                            out);
}

peri_status peri_coll_all_to_all(peri_group *group, peri_tensor *output, peri_tensor *input, uint64_t tag,
                                 peri_work **out)
{
    return post_equal_parts("peri_coll_all_to_all", PERI_COLL_ALL_TO_ALL, group, output, input, 0, tag, out);
}

/* -- parts of any size --------------------------------------------------------------------------------------------- */

static peri_status check_own_rows(const char *function, const peri_group *g, const char *what, const peri_tensor *t,
                                  int64_t rows)
{
    char text[128];
    if (first_dimension(t) == rows) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: the %s of rank %d is %s, the splits give it %lld rows", function, what, g->rank,
                      peri__tensor_text(t, text, sizeof text), (long long)rows);
}

peri_status peri_coll_all_gather_v(peri_group *group, peri_tensor *output, peri_tensor *input, const int64_t *rows,
                                   uint64_t tag, peri_work **out)
{
    static const char function[] = "peri_coll_all_gather_v";
    PERI_TRY(check_pair(function, group, output, input, true));
    COUNTS c;
    PERI_TRY(counts_init(&c, group->size));
    PERI_TRY(rows_to_elements(function, "output", group, rows, output, c.recv));
    PERI_TRY(check_own_rows(function, group, "input", input, rows[group->rank]));
    c.send[0] = c.recv[group->rank];
    peri_coll_op op = {.kind = PERI_COLL_ALL_GATHER, .tag = tag, .send_counts = c.send, .recv_counts = c.recv};
    return post_pair(group, &op, output, input, out);
}

peri_status peri_coll_reduce_scatter_v(peri_group *group, peri_tensor *output, peri_tensor *input, const int64_t *rows,
                                       int32_t reduce, uint64_t tag, peri_work **out)
{
    static const char function[] = "peri_coll_reduce_scatter_v";
    PERI_TRY(check_pair(function, group, output, input, true));
    PERI_TRY(check_reduce(function, input, reduce));
    COUNTS c;
    PERI_TRY(counts_init(&c, group->size));
    PERI_TRY(rows_to_elements(function, "input", group, rows, input, c.send));
    PERI_TRY(check_own_rows(function, group, "output", output, rows[group->rank]));
    peri_coll_op op = {.kind = PERI_COLL_REDUCE_SCATTER, .reduce = reduce, .tag = tag, .send_counts = c.send};
    return post_pair(group, &op, output, input, out);
}

peri_status peri_coll_all_to_all_v(peri_group *group, peri_tensor *output, peri_tensor *input, const int64_t *recv_rows,
                                   const int64_t *send_rows, uint64_t tag, peri_work **out)
{
    static const char function[] = "peri_coll_all_to_all_v";
    PERI_TRY(check_pair(function, group, output, input, true));
    COUNTS c;
    PERI_TRY(counts_init(&c, group->size));
    PERI_TRY(rows_to_elements(function, "output", group, recv_rows, output, c.recv));
    PERI_TRY(rows_to_elements(function, "input", group, send_rows, input, c.send));
    peri_coll_op op = {.kind = PERI_COLL_ALL_TO_ALL, .tag = tag, .send_counts = c.send, .recv_counts = c.recv};
    return post_pair(group, &op, output, input, out);
}
