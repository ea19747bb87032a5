/* SPDX-License-Identifier: Apache-2.0
 *
 * regroup.c: columns of several KeyedTensors arranged into groups, in one kernel per direction. The plan is host data;
 * what reaches the device is a table of addresses and strides, written anew for every run.
 */
#include "jagged_internal.h"

/** Columns [from, from + columns) of kt number `kt` become columns [to, to + columns) of their group. */
typedef struct block {
    int32_t kt, key, group;
    int64_t from, to, columns;
} block;

struct peri_regroup {
    peri__refs refs;
    int32_t n_kts, n_groups;
    peri_keys **keys;       /* n_kts, retained */
    int64_t **lengths;      /* n_kts: columns of each key */
    int64_t *first;         /* n_groups + 1: blocks of a group */
    int64_t *columns;       /* n_groups */
    block *blocks;
    int64_t *key_base;      /* n_kts + 1: a number for every key of every kt */
    int64_t *use_first;     /* by that number (and one more): blocks that take its columns */
    int64_t *uses;
};

void peri_regroup_retain(peri_regroup *plan) { if (plan) peri__refs_add(&plan->refs); }

void peri_regroup_release(peri_regroup *p)
{
    if (!p || !peri__refs_drop(&p->refs)) return;
    for (int32_t i = 0; i < p->n_kts; i++) {
        if (p->keys) peri_keys_release(p->keys[i]);
        if (p->lengths) peri__free(p->lengths[i]);
    }
    peri__free(p->keys);
    peri__free(p->lengths);
    peri__free(p->first);
    peri__free(p->columns);
    peri__free(p->blocks);
    peri__free(p->key_base);
    peri__object_count(-1);
    peri__free(p);
}

/** The one kt that has @name. */
static peri_status find(peri_kt *const *kts, int32_t n, const char *name, block *out)
{
    out->kt = -1;
    for (int32_t i = 0; i < n; i++) {
        int32_t key = peri_keys_find(kts[i]->keys, name);
        if (key < 0) continue;
        if (out->kt >= 0)
            return peri__fail(PERI_EINVAL, "peri_regroup_new: key '%.200s' is in kt %d and in kt %d", name, out->kt, i);
        *out =
            (block){.kt = i, .key = key, .from = kts[i]->offset_per_key[key], .columns = kts[i]->length_per_key[key]};
    }
    if (out->kt < 0) return peri__fail(PERI_ENOTFOUND, "peri_regroup_new: no kt has key '%.200s'", name);
    return PERI_OK;
}

/** Blocks by the key that they take, in their order. */
static peri_status list_uses(peri_regroup *p)
{
    int64_t n = 0, blocks = p->first[p->n_groups];
    for (int32_t i = 0; i < p->n_kts; i++) n += p->keys[i]->count;
    p->key_base = peri__alloc_zero(sizeof *p->key_base * (size_t)(p->n_kts + 1 + n + 1 + blocks));
    if (!p->key_base) return PERI_ENOMEM;
    p->use_first = p->key_base + p->n_kts + 1;
    p->uses = p->use_first + n + 1;
    for (int32_t i = 0; i < p->n_kts; i++) p->key_base[i + 1] = p->key_base[i] + p->keys[i]->count;
    for (int64_t b = 0; b < blocks; b++) p->use_first[p->key_base[p->blocks[b].kt] + p->blocks[b].key + 1]++;
    for (int64_t i = 0; i < n; i++) p->use_first[i + 1] += p->use_first[i];
    for (int64_t b = 0; b < blocks; b++) p->uses[p->use_first[p->key_base[p->blocks[b].kt] + p->blocks[b].key]++] = b;
    for (int64_t i = n; i > 0; i--) p->use_first[i] = p->use_first[i - 1]; /* filling moved each start to its end */
    p->use_first[0] = 0;
    return PERI_OK;
}

static peri_status plan_columns(peri_regroup *p, peri_kt *const *kts, peri_keys *const *groups)
{
    for (int32_t i = 0; i < p->n_kts; i++) {
        if (kts[i]->key_dim != 1) return peri__fail(PERI_EINVAL, "peri_regroup_new: kt %d has key_dim 0, wanted 1", i);
        size_t size = sizeof(int64_t) * (size_t)peri__max(1, kts[i]->keys->count);
        p->lengths[i] = peri__alloc(size);
        if (!p->lengths[i]) return PERI_ENOMEM;
        memcpy(p->lengths[i], kts[i]->length_per_key, sizeof(int64_t) * (size_t)kts[i]->keys->count);
        p->keys[i] = kts[i]->keys;
        peri_keys_retain(p->keys[i]);
    }
    for (int32_t g = 0; g < p->n_groups; g++) {
        p->first[g + 1] = p->first[g] + groups[g]->count;
        for (int32_t i = 0; i < groups[g]->count; i++) {
            block *b = &p->blocks[p->first[g] + i];
            PERI_TRY(find(kts, p->n_kts, groups[g]->names[i], b));
            b->to = p->columns[g];
            b->group = g;
            p->columns[g] += b->columns;
        }
    }
    return list_uses(p);
}

peri_status peri_regroup_new(peri_kt *const *kts, int32_t n_kts, peri_keys *const *groups, int32_t n_groups,
                             peri_regroup **out)
{
    PERI_NEED(kts);
    PERI_NEED(groups);
    PERI_NEED(out);
    if (n_kts < 1 || n_groups < 1)
        return peri__fail(PERI_EINVAL, "peri_regroup_new: %d kts and %d groups, wanted at least one of each", n_kts,
                          n_groups);
    PERI_TRY(peri__check_list("peri_regroup_new", "the kts", kts, n_kts));
    PERI_TRY(peri__check_list("peri_regroup_new", "the groups", groups, n_groups));
    peri_regroup *p = peri__alloc_zero(sizeof *p);
    if (!p) return PERI_ENOMEM;
    peri__refs_init(&p->refs);
    peri__object_count(1);
    int64_t blocks = 0;
    for (int32_t g = 0; g < n_groups; g++) blocks += groups[g]->count;
    p->n_kts = n_kts;
    p->n_groups = n_groups;
    p->keys = peri__alloc_zero(sizeof *p->keys * (size_t)n_kts);
    p->lengths = peri__alloc_zero(sizeof *p->lengths * (size_t)n_kts);
    p->first = peri__alloc_zero(sizeof *p->first * (size_t)(n_groups + 1));
    p->columns = peri__alloc_zero(sizeof *p->columns * (size_t)n_groups);
    p->blocks = peri__alloc_zero(sizeof *p->blocks * (size_t)peri__max(blocks, 1));
    bool room = p->keys && p->lengths && p->first && p->columns && p->blocks;
    peri_status status = room ? plan_columns(p, kts, groups) : PERI_ENOMEM;
    if (status < 0) peri_regroup_release(p);
    else *out = p;
    return status;
}

/* -- running ------------------------------------------------------------------------------------------------------- */

static void release_tensors(peri_tensor **t, int64_t n)
{
    for (int64_t i = 0; t && i < n; i++) peri_tensor_release(t[i]);
    peri__free(t);
}

/** For each key of kt @k, its columns of @grad: the sum over the blocks that took them. @flat: gradients of the groups,
 *  or NULL. */
static void backward_items(const peri_regroup *p, int32_t k, peri_tensor *grad, peri_tensor *const *flat,
                           peri__columns *t)
{
    int64_t at = 0;
    for (int32_t key = 0; key < p->keys[k]->count; key++) {
        peri__columns_item(t, grad, at, p->lengths[k][key]);
        int64_t number = p->key_base[k] + key;
        for (int64_t i = p->use_first[number]; i < p->use_first[number + 1]; i++) {
            const block *b = &p->blocks[p->uses[i]];
            if (flat[b->group]) peri__columns_source(t, flat[b->group], b->to);
        }
        at += p->lengths[k][key];
    }
}

/** state: the plan. */
static peri_status regroup_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const peri_regroup *p = node->state;
    const peri_tensor *any = NULL;
    int64_t keys = 0;
    peri__columns t = {0};
    peri_tensor **flat = peri__alloc_zero(sizeof *flat * (size_t)p->n_groups);
    peri_tensor **grad = peri__alloc_zero(sizeof *grad * (size_t)p->n_kts);
    peri_status status = flat && grad ? PERI_OK : PERI_ENOMEM;
    for (int32_t g = 0; g < p->n_groups && status >= 0; g++)
        if (grad_out[g]) {
            any = grad_out[g];
            status = peri__columns_rows(grad_out[g], &flat[g]);
        }
    for (int32_t k = 0; k < p->n_kts; k++) keys += p->keys[k]->count;
    if (status >= 0) status = peri__columns_init(&t, keys, p->first[p->n_groups]);
    for (int32_t k = 0; k < p->n_kts && status >= 0; k++) {
        int64_t shape[2] = {any->shape[0], 0};
        if (!peri__needs(node, k)) continue;
        for (int32_t i = 0; i < p->keys[k]->count; i++) shape[1] += p->lengths[k][i];
        status = peri__tensor_like(any, 2, shape, &grad[k]);
        if (status >= 0) backward_items(p, k, grad[k], flat, &t);
    }
    if (status >= 0) status = peri__columns_run(&t, peri__device(any), any->dtype, any->shape[0]);
    for (int32_t k = 0; k < p->n_kts && status >= 0; k++) {
        grad_in[k] = grad[k];
        grad[k] = NULL;
    }
    peri__columns_fini(&t);
    release_tensors(flat, p->n_groups);
    release_tensors(grad, p->n_kts);
    return status;
}

static void regroup_fini(peri__node *node) /* called when the node is spent and when it is freed */
{
    peri_regroup_release(node->state);
    node->state = NULL;
}

static const peri__node_vtab regroup_vtab = {.name = "regroup", .backward = regroup_backward, .fini = regroup_fini};

static peri_status check_inputs(const peri_regroup *p, peri_kt *const *kts, int32_t n)
{
    static const char f[] = "peri_regroup_run";
    char a[128], b[128];
    if (n != p->n_kts) return peri__fail(PERI_EINVAL, "%s: %d kts, the plan is for %d", f, n, p->n_kts);
    const peri_tensor *first = kts[0]->values;
    if (first->dtype != PERI_F32 && first->dtype != PERI_F64 && first->dtype != PERI_F16 && first->dtype != PERI_BF16)
        return peri__fail(PERI_EINVAL, "%s: values are %s, allowed: f32, f64, f16, bf16", f,
                          peri_dtype_name(first->dtype));
    for (int32_t i = 0; i < n; i++) {
        const peri_tensor *t = kts[i]->values;
        if (kts[i]->key_dim != 1 || !peri_keys_equal(kts[i]->keys, p->keys[i]) ||
            memcmp(kts[i]->length_per_key, p->lengths[i], sizeof(int64_t) * (size_t)kts[i]->keys->count))
            return peri__fail(PERI_EINVAL, "%s: kt %d has other keys or columns than the plan's", f, i);
        if (t->dtype != first->dtype || t->shape[0] != first->shape[0])
            return peri__fail(PERI_EINVAL, "%s: kt %d is %s, kt 0 is %s", f, i, peri__tensor_text(t, a, sizeof a),
                              peri__tensor_text(first, b, sizeof b));
        PERI_TRY(peri__check_same_device(f, t, first));
    }
    return PERI_OK;
}

/** The outputs and the table that fills them. */
static peri_status forward(const peri_regroup *p, peri_tensor *const *in, peri_tensor **made)
{
    peri__columns t;
    PERI_TRY(peri__columns_init(&t, p->first[p->n_groups], p->first[p->n_groups]));
    peri_status status = PERI_OK;
    for (int32_t g = 0; g < p->n_groups && status >= 0; g++) {
        status = peri__tensor_like(in[0], 2, (const int64_t[]){in[0]->shape[0], p->columns[g]}, &made[g]);
        for (int64_t i = p->first[g]; i < p->first[g + 1] && status >= 0; i++) {
            const block *b = &p->blocks[i];
            peri__columns_item(&t, made[g], b->to, b->columns);
            peri__columns_source(&t, in[b->kt], b->from);
        }
    }
    if (status >= 0) status = peri__columns_run(&t, peri__device(in[0]), in[0]->dtype, in[0]->shape[0]);
    peri__columns_fini(&t);
    return status;
}

peri_status peri_regroup_run(peri_regroup *p, peri_kt *const *kts, int32_t n, peri_tensor **out)
{
    PERI_NEED(p);
    PERI_NEED(out);
    PERI_NEED(kts);
    PERI_TRY(peri__check_list("peri_regroup_run", "the kts", kts, n));
    PERI_TRY(check_inputs(p, kts, n));
    peri_tensor **in = peri__alloc_zero(sizeof *in * (size_t)n),
                **made = peri__alloc_zero(sizeof *made * (size_t)p->n_groups);
    peri_status status = in && made ? PERI_OK : PERI_ENOMEM;
    for (int32_t i = 0; i < n && status >= 0; i++) status = peri__columns_rows(kts[i]->values, &in[i]);
    if (status >= 0) status = forward(p, in, made);
    if (status >= 0 && peri__recording(in, n)) {
        peri__node *node;
        status = peri__record(&regroup_vtab, in, n, made, p->n_groups, &node);
        if (status >= 0) {
            node->state = p;
            peri_regroup_retain(p);
        }
    }
    for (int32_t g = 0; g < p->n_groups && status >= 0; g++) {
        out[g] = made[g];
        made[g] = NULL;
    }
    release_tensors(in, n);
    release_tensors(made, p->n_groups);
    return status;
}
