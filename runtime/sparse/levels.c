/* SPDX-License-Identifier: Apache-2.0
 *
 * levels.c: values under one or several levels of bags as a padded dense tensor, and back, with gradient.
 */
#include "sparse_internal.h"
#include "../../kernels/convert.h"
#include "../../kernels/sparse.h"
#include "../base/floats.h"

#include <stdio.h>

/** A tree of bags. */
typedef struct tree {
    peri__bags checked[PERI_MAX_LEVELS];   /* until tree_settle they are being checked */
    peri_tensor *offsets[PERI_MAX_LEVELS]; /* contiguous i64 */
    int64_t bags[PERI_MAX_LEVELS], max[PERI_MAX_LEVELS];
    int64_t rows; /* of the values */
    int32_t levels;
} tree;

static void tree_fini(tree *t)
{
    for (int32_t l = 0; l < t->levels; l++) {
        peri_tensor_release(t->offsets[l]);
        peri__bags_fini(&t->checked[l]);
    }
}

static void name_level(int32_t l, char name[32]) { snprintf(name, 32, "offsets of level %d", l); }

/** Level @l: offsets that cut @rows things of the level below. */
static peri_status tree_level(const char *f, tree *t, int32_t l, peri_tensor *offsets, int64_t rows)
{
    char name[32];
    name_level(l, name);
    PERI_TRY(peri__bags_queue(f, &(peri__bag_names){name, 0}, &t->checked[l], NULL, offsets, rows));
    peri_status status = peri_tensor_to(t->checked[l].offsets, PERI_I64, NULL, &t->offsets[l]);
    if (status < 0) peri__bags_fini(&t->checked[l]);
    return status;
}

/** Hear the verdict on the offsets, when what goes where they lead has been queued. */
static peri_status tree_settle(const char *f, tree *t)
{
    PERI_TRY(peri__report_wait(t->checked[t->levels - 1].report)); /* the last: all are there */
    for (int32_t l = 0; l < t->levels; l++) {
        char name[32];
        name_level(l, name);
        PERI_TRY(peri__bags_settle(f, &(peri__bag_names){name, 0}, &t->checked[l]));
    }
    return PERI_OK;
}

/** What shapes say of the tree; what offsets say: tree_check. */
static peri_status tree_init(const char *f, tree *t, peri_tensor *const *offsets, int32_t levels,
                             const peri_tensor *like)
{
    if (levels < 1 || levels > PERI_MAX_LEVELS)
        return peri__fail(PERI_EINVAL, "%s: %d levels of offsets, allowed: 1..%d", f, levels, PERI_MAX_LEVELS);
    for (int32_t l = 0; l < levels; l++) {
        char name[32];
        name_level(l, name);
        PERI_TRY(peri__check_ints(f, name, offsets[l], 1, like));
        if (offsets[l]->shape[0] < 1)
            return peri__fail(PERI_EINVAL, "%s: %s are empty; they have one entry more than there are bags", f, name);
        t->bags[l] = offsets[l]->shape[0] - 1;
    }
    return PERI_OK;
}

/** Begin to check the offsets. @rows < 0: the last offset of the last level says how many values there are. */
static peri_status tree_check(const char *f, tree *t, peri_tensor *const *offsets, int32_t levels, int64_t rows)
{
    if (rows < 0) {
        double last;
        PERI_TRY(peri_tensor_item(offsets[levels - 1], t->bags[levels - 1], &last));
        if (last < 0 || last >= 0x1p50)
            return peri__fail(PERI_ERANGE, "%s: the last offset of level %d is %g, allowed: 0..2^50", f, levels - 1,
                              last);
        rows = (int64_t)last;
    }
    t->rows = rows;
    for (t->levels = 0; t->levels < levels; t->levels++) {
        int32_t l = t->levels;
        peri_status status = tree_level(f, t, l, offsets[l], l + 1 < levels ? t->bags[l + 1] : rows);
        if (status >= 0) continue;
        tree_fini(t);
        return status;
    }
    return PERI_OK;
}

/** Arguments for both directions; the values' rows are of @like. */
static peri_k_levels_args level_arguments(const tree *t, const peri_tensor *values)
{
    peri_k_levels_args a = {.width = peri__row_bytes(values),
                            .element = peri_dtype_size(values->dtype),
                            .levels = t->levels,
                            .offsets_dtype = PERI_I64};
    for (int32_t l = 0; l < t->levels; l++) {
        a.offsets[l] = peri__data(t->offsets[l]);
        a.bags[l] = t->bags[l];
        a.max[l] = t->max[l];
    }
    return a;
}

static int64_t dense_rows(const tree *t)
{
    int64_t n = t->bags[0];
    for (int32_t l = 0; l < t->levels; l++) n *= t->max[l];
    return n;
}

/** Largest sizes of all levels stand from KEPT_MAX on; rows are those of the values. */
enum { KEPT_LEVELS, KEPT_ROWS, KEPT_MAX };
_Static_assert(KEPT_MAX + PERI_MAX_LEVELS <= PERI_NODE_KEPT, "the largest sizes fit");

/** saved: offsets by level. */
static void save_tree(peri__node *node, const tree *t)
{
    node->kept[KEPT_LEVELS] = t->levels;
    node->kept[KEPT_ROWS] = t->rows;
    for (int32_t l = 0; l < t->levels; l++) {
        peri__node_save(node, l, t->offsets[l]);
        node->kept[KEPT_MAX + l] = t->max[l];
    }
}

static tree saved_tree(const peri__node *node)
{
    tree t = {.levels = (int32_t)node->kept[KEPT_LEVELS], .rows = node->kept[KEPT_ROWS]};
    for (int32_t l = 0; l < t.levels; l++) {
        t.offsets[l] = node->saved[l];
        t.bags[l] = t.offsets[l]->shape[0] - 1;
        t.max[l] = node->kept[KEPT_MAX + l];
    }
    return t;
}

static peri_status from_dense(const tree *t, peri_tensor *dense, peri_tensor **out);
static peri_status to_dense(const tree *t, peri_tensor *values, double padding, peri_tensor **out);

static peri_status to_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    tree t = saved_tree(node);
    return from_dense(&t, grad_out[0], &grad_in[0]);
}

static peri_status from_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    tree t = saved_tree(node);
    peri_tensor *flat;
    PERI_TRY(peri_tensor_contiguous(grad_out[0], &flat));
    peri_status status = to_dense(&t, flat, 0, &grad_in[0]);
    peri_tensor_release(flat);
    return status;
}

static const peri__node_vtab to_vtab = {.name = "jagged_levels_to_dense", .backward = to_backward};
static const peri__node_vtab from_vtab = {.name = "jagged_levels_from_dense", .backward = from_backward};

static peri_status record_tree(const peri__node_vtab *vtab, const tree *t, peri_tensor *in, peri_tensor *out)
{
    peri__node *node;
    if (!peri__differentiable(in)) return PERI_OK;
    PERI_TRY(peri__record(vtab, &in, 1, &out, 1, &node));
    save_tree(node, t);
    return PERI_OK;
}

/** @values is contiguous. */
static peri_status to_dense(const tree *t, peri_tensor *values, double padding, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS] = {t->bags[0]};
    int32_t ndim = values->ndim + t->levels;
    for (int32_t l = 0; l < t->levels; l++) shape[1 + l] = t->max[l];
    for (int32_t d = 1; d < values->ndim; d++) shape[t->levels + d] = values->shape[d];
    peri_tensor *dense;
    PERI_TRY(peri__tensor_like(values, ndim, shape, &dense));
    peri_k_levels_args args = level_arguments(t, values);
    args.dense = peri__data(dense);
    args.values = peri__data(values);
    peri_k_convert_args element = {
        .dst = args.padding, .src = &padding, .dst_dtype = values->dtype, .src_dtype = PERI_F64, .ndim = 0};
    PERI__OWN_FLOATS;
    peri_kernels_get()->fn[PERI_K_convert](&element, 0, 1);
    int64_t rows = args.width ? dense_rows(t) : 0;
    peri_status status = PERI_LAUNCH(peri__device(values), levels_to_dense, &args, rows, peri__row_grain(args.width));
    if (status >= 0) status = record_tree(&to_vtab, t, values, dense);
    if (status < 0) peri_tensor_release(dense);
    else *out = dense;
    return status;
}

static peri_status from_dense(const tree *t, peri_tensor *dense, peri_tensor **out)
{
    int64_t shape[PERI_MAX_DIMS] = {t->rows};
    int32_t ndim = dense->ndim - t->levels;
    for (int32_t d = 1; d < ndim; d++) shape[d] = dense->shape[t->levels + d];
    peri_tensor *flat, *values = NULL;
    PERI_TRY(peri_tensor_contiguous(dense, &flat));
    peri_status status;
    PERI_TRY_GOTO(peri__tensor_like(flat, ndim, shape, &values), out);
    peri_k_levels_args args = level_arguments(t, values);
    args.dense = peri__data(flat);
    args.values = peri__data(values);
    int64_t rows = args.width ? t->rows : 0;
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(flat), levels_from_dense, &args, rows, peri__row_grain(args.width)), out);
    PERI_TRY_GOTO(record_tree(&from_vtab, t, flat, values), out);
    *out = values;
    values = NULL;
out:
    peri_tensor_release(flat);
    peri_tensor_release(values);
    return status;
}

/* -- public -------------------------------------------------------------------------------------------------------- */

peri_status peri_sparse_jagged_to_dense(peri_tensor *values, peri_tensor *const *offsets, const int64_t *max,
                                        int32_t levels, double padding, peri_tensor **out)
{
    if (levels > 0) PERI_NEED(offsets);
    static const char f[] = "peri_sparse_jagged_to_dense";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "values", values, -1, -1));
    if (values->ndim < 1 || values->ndim + levels > PERI_MAX_DIMS)
        return peri__fail(PERI_EINVAL, "%s: values are %s under %d levels, allowed: 1..%d dimensions in all", f,
                          peri__tensor_text(values, text, sizeof text), levels, PERI_MAX_DIMS);
    tree t = {0};
    PERI_TRY(tree_init(f, &t, offsets, levels, values));
    double elements = (double)t.bags[0] * (double)peri__row_bytes(values);
    for (int32_t l = 0; l < levels; l++) {
        if (max[l] < 0)
            return peri__fail(PERI_EINVAL, "%s: size %lld of level %d, allowed: 0 and more", f, (long long)max[l], l);
        t.max[l] = max[l];
        elements *= (double)max[l];
    }
    if (elements >= 0x1p62) return peri__fail(PERI_ERANGE, "%s: the result would have %g bytes", f, elements);
    PERI_TRY(tree_check(f, &t, offsets, levels, values->shape[0]));
    peri_tensor *flat = NULL, *dense = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(values, &flat), out);
    if (levels == 1) PERI_TRY_GOTO(peri__to_padded(flat, t.offsets[0], max[0], padding, &dense), out);
    else PERI_TRY_GOTO(to_dense(&t, flat, padding, &dense), out);
    PERI_TRY_GOTO(tree_settle(f, &t), out);
    *out = dense;
    dense = NULL;
out:
    peri_tensor_release(dense);
    tree_fini(&t);
    peri_tensor_release(flat);
    return status;
}

peri_status peri_sparse_dense_to_jagged(peri_tensor *dense, peri_tensor *const *offsets, int32_t levels, int64_t rows,
                                        peri_tensor **out)
{
    if (levels > 0) PERI_NEED(offsets);
    static const char f[] = "peri_sparse_dense_to_jagged";
    char text[128];
    PERI_TRY(peri__check_tensor(f, "dense", dense, -1, -1));
    tree t = {0};
    PERI_TRY(tree_init(f, &t, offsets, levels, dense));
    if (dense->ndim < levels + 1 || dense->shape[0] != t.bags[0])
        return peri__fail(PERI_EINVAL, "%s: dense is %s for %lld bags under %d levels, wanted [bags, a size each, ...]",
                          f, peri__tensor_text(dense, text, sizeof text), (long long)t.bags[0], levels);
    for (int32_t l = 0; l < levels; l++) t.max[l] = dense->shape[1 + l];
    PERI_TRY(tree_check(f, &t, offsets, levels, rows));
    peri_tensor *values = NULL;
    peri_status status = PERI_OK;
    const bool first = t.rows > dense_rows(&t); /* memory for more values than there are wants sound offsets */
    if (first) PERI_TRY_GOTO(tree_settle(f, &t), out);
    if (levels == 1) PERI_TRY_GOTO(peri__from_padded(dense, t.offsets[0], t.rows, &values), out);
    else PERI_TRY_GOTO(from_dense(&t, dense, &values), out);
    if (!first) PERI_TRY_GOTO(tree_settle(f, &t), out);
    *out = values;
    values = NULL;
out:
    peri_tensor_release(values);
    tree_fini(&t);
    return status;
}
