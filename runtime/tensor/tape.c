/* SPDX-License-Identifier: Apache-2.0
 *
 * tape.c: recording operations and running them backwards.
 *
 * Nodes hang on the tensors that they made, so dropping the loss drops the tape. There is no global list: the order of a backward pass
 * is the order of recording, by a process-wide sequence number, reversed. Several ranks of a `sim` world can therefore interleave
 * their passes in one thread.
 */
#include "internal.h"

#include <stdlib.h>

static atomic_uint_least64_t sequence;
static atomic_uint_least64_t passes;
static _Thread_local bool recording_off;

bool peri_grad_enable(bool on)
{
    bool before = !recording_off;
    recording_off = !on;
    return before;
}

bool peri__grad_enabled(void) { return !recording_off; }

bool peri__recording(peri_tensor *const *in, int32_t n)
{
    if (recording_off) return false;
    for (int32_t i = 0; i < n; i++)
        if (in[i] && in[i]->requires_grad) return true;
    return false;
}

void peri__ending_release(peri__ending *ending)
{
    if (ending && peri__refs_drop(&ending->refs)) ending->fini(ending);
}

/* -- nodes --------------------------------------------------------------------------------------------------------------------- */

static void node_retain(peri__node *node) { peri__refs_add(&node->refs); }

/** Drop what the node keeps; nodes that lose their last reference through it go onto the chain, so that long tapes need no deep stack. */
static void node_clear(peri__node *node, peri__node **chain)
{
    for (int i = 0; i < PERI_NODE_SAVED; i++) {
        peri_tensor_release(node->saved[i]);
        node->saved[i] = NULL;
    }
    if (node->vtab->fini) node->vtab->fini(node);
    peri__ending_release(node->ending);
    node->ending = NULL;
    for (int32_t i = 0; i < node->n_in; i++) {
        peri__edge *e = &node->in[i];
        peri_tensor_release(e->leaf);
        if (e->node && peri__refs_drop(&e->node->refs)) {
            e->node->grad_out = (peri_tensor **)*chain; /* the field is free between passes */
            *chain = e->node;
        }
        *e = (peri__edge){0};
    }
    node->n_in = 0;
}

/** Free nodes without references, linked through grad_out. */
static void node_drain(peri__node *chain)
{
    while (chain) {
        peri__node *dead = chain;
        chain = (peri__node *)dead->grad_out;
        node_clear(dead, &chain);
        peri__object_count(-1);
        peri__free(dead);
    }
}

void peri__node_release(peri__node *node)
{
    if (!node || !peri__refs_drop(&node->refs)) return;
    node->grad_out = NULL;
    node_drain(node);
}

static peri__node *node_new(const peri__node_vtab *vtab, int32_t n_in, int32_t n_out)
{
    peri__node *node = peri__alloc_zero(sizeof *node + sizeof *node->in * (size_t)n_in);
    if (!node) return NULL;
    node->in = (peri__edge *)(node + 1);
    atomic_init(&node->refs, n_out);
    node->vtab = vtab;
    node->name = vtab->name;
    node->sequence = atomic_fetch_add(&sequence, 1) + 1;
    node->n_in = n_in;
    node->n_out = n_out;
    peri__object_count(1);
    return node;
}

static void attach(peri__node *node, peri_tensor *const *out, int32_t n_out)
{
    for (int32_t i = 0; i < n_out; i++) {
        out[i]->requires_grad = true;
        out[i]->node = node;
        out[i]->slot = i;
    }
}

peri_status peri__record(const peri__node_vtab *vtab, peri_tensor *const *in, int32_t n_in, peri_tensor *const *out, int32_t n_out,
                         peri__node **result)
{
    peri__node *node = node_new(vtab, n_in, n_out);
    if (!node) return PERI_ENOMEM;
    for (int32_t i = 0; i < n_in; i++) {
        if (!in[i] || !in[i]->requires_grad) continue;
        peri__edge *e = &node->in[i];
        if (in[i]->node) {
            e->node = in[i]->node;
            e->slot = in[i]->slot;
            node_retain(e->node);
        } else {
            e->leaf = in[i];
            peri_tensor_retain(e->leaf);
        }
    }
    if (out) attach(node, out, n_out);
    *result = node;
    return PERI_OK;
}

peri_status peri__record_after(const peri__node_vtab *vtab, peri__node *before, peri_tensor *const *out, int32_t n_out, peri__node **result)
{
    peri__node *node = node_new(vtab, 1, n_out);
    if (!node) return PERI_ENOMEM;
    node->in[0].node = before;
    attach(node, out, n_out);
    *result = node;
    return PERI_OK;
}

static uint64_t version_of(const peri_tensor *t) { return atomic_load_explicit(&t->storage->version, memory_order_relaxed); }

void peri__node_save(peri__node *node, int32_t i, peri_tensor *t)
{
    node->saved[i] = t;
    if (!t) return;
    peri_tensor_retain(t);
    node->version[i] = version_of(t);
}

peri_status peri__attach(const peri__node_vtab *vtab, peri_tensor *const *in, int32_t n_in, peri_tensor *const *out, int32_t n_out,
                         peri__node **node)
{
    *node = NULL;
    return peri__recording(in, n_in) ? peri__record(vtab, in, n_in, out, n_out, node) : PERI_OK;
}

peri_status peri__node_save_output(peri__node *node, int32_t i, peri_tensor *out)
{
    PERI_TRY(peri__detached(out, &node->saved[i]));
    node->version[i] = version_of(out);
    return PERI_OK;
}

/** An error if a tensor that the node saved was changed in place since. */
static peri_status check_versions(const peri__node *node)
{
    char text[128];
    for (int i = 0; i < PERI_NODE_SAVED; i++) {
        const peri_tensor *t = node->saved[i];
        if (!t || version_of(t) == node->version[i]) continue;
        return peri__fail(PERI_EINVAL,
                          "peri_backward_step: %s needs a tensor (%s) that was changed in place after it (%llu changes); change a copy, or "
                          "change it after the backward pass",
                          node->name, peri__tensor_text(t, text, sizeof text), (unsigned long long)(version_of(t) - node->version[i]));
    }
    return PERI_OK;
}

/* -- leaves -------------------------------------------------------------------------------------------------------------------- */

peri_status peri_tensor_requires_grad(peri_tensor *leaf, bool on)
{
    PERI_NEED(leaf);
    if (leaf->node) return peri__fail(PERI_EINVAL, "peri_tensor_requires_grad: the result of an operation, not a leaf; detach it first");
    if (on) PERI_TRY(peri__check_float("peri_tensor_requires_grad", "the leaf", leaf));
    leaf->requires_grad = on;
    return PERI_OK;
}

peri_status peri_tensor_grad(peri_tensor *leaf, peri_tensor **out)
{
    PERI_NEED(leaf);
    PERI_NEED(out);
    if (leaf->grad) peri_tensor_retain(leaf->grad);
    *out = leaf->grad;
    return PERI_OK;
}

static bool same_shape(const peri_tensor *a, const peri_tensor *b)
{
    return a->ndim == b->ndim && !memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim);
}

peri_status peri_tensor_grad_set(peri_tensor *leaf, peri_tensor *grad)
{
    PERI_NEED(leaf);
    char a[128], b[128];
    if (grad && (!same_shape(leaf, grad) || leaf->dtype != grad->dtype))
        return peri__fail(PERI_EINVAL, "peri_tensor_grad_set: the gradient is %s, the leaf %s", peri__tensor_text(grad, a, sizeof a),
                          peri__tensor_text(leaf, b, sizeof b));
    if (grad) {
        PERI_TRY(peri__check_same_device("peri_tensor_grad_set", leaf, grad));
        peri_tensor_retain(grad);
    }
    peri_tensor_release(leaf->grad);
    leaf->grad = grad;
    return PERI_OK;
}

bool peri__exclusive(const peri_tensor *t)
{
    return atomic_load(&t->refs) == 1 && atomic_load(&t->storage->refs) == 1 && peri__contiguous(t);
}

/** *sum (owned, may be NULL) += @grad (taken). The sum of a leaf becomes memory of its own: optimizers change it in place. */
static peri_status accumulate(peri_tensor **sum, peri_tensor *grad, bool leaf)
{
    if (!*sum && (!leaf || peri__exclusive(grad))) {
        *sum = grad;
        return PERI_OK;
    }
    peri_status status = PERI_OK;
    if (!*sum) {
        status = peri__tensor_like(grad, grad->ndim, grad->shape, sum);
        if (status >= 0) status = peri_tensor_copy(*sum, grad);
        peri_tensor_release(grad);
        return status;
    }
    peri_tensor *flat = NULL, *into = *sum;
    bool before = peri_grad_enable(false);
    if (!peri__exclusive(into)) {
        PERI_TRY_GOTO(peri__tensor_like(into, into->ndim, into->shape, &into), out);
        status = peri_tensor_copy(into, *sum);
        peri_tensor_release(*sum);
        *sum = into;
        if (status < 0) goto out;
    }
    PERI_TRY_GOTO(peri_tensor_contiguous(grad, &flat), out);
    peri_k_axpy_args args = {.y = peri__data(into), .x = peri__data(flat), .dtype = into->dtype, .alpha = 1};
    status = PERI_LAUNCH(peri__device(into), axpy, &args, peri__numel(into), 1 << 15);
out:
    peri_grad_enable(before);
    peri_tensor_release(flat);
    peri_tensor_release(grad);
    return status;
}

/* -- backward passes ------------------------------------------------------------------------------------------------------------- */

struct peri_backward {
    peri__node **nodes; /* retained, from the highest sequence to the lowest */
    int64_t n, capacity, at;
    peri_tensor **grad_in; /* of nodes[at] */
    int64_t grad_in_size;
    int64_t checked; /* nodes whose saved tensors were looked at */
    peri__ending **endings; /* retained; NULL: over */
    int64_t n_endings;
};

static peri_status add_ending(peri_backward *pass, peri__ending *ending, uint64_t id)
{
    if (!ending || ending->pass == id) return PERI_OK;
    peri__ending **more = peri__realloc(pass->endings, sizeof *more * (size_t)(pass->n_endings + 1));
    if (!more) return PERI_ENOMEM;
    pass->endings = more;
    ending->pass = id;
    peri__refs_add(&ending->refs);
    more[pass->n_endings++] = ending;
    return PERI_OK;
}

static peri_status add_node(peri_backward *pass, peri__node *node, uint64_t id)
{
    if (node->pass == id) return PERI_OK;
    if (node->spent)
        return peri__fail(PERI_EINVAL, "peri_backward_new: the graph of node '%s' was already used by a backward pass", node->name);
    if (pass->n == pass->capacity) {
        int64_t more = peri__max(64, pass->capacity * 2);
        peri__node **nodes = peri__realloc(pass->nodes, sizeof *nodes * (size_t)more);
        if (!nodes) return PERI_ENOMEM;
        pass->nodes = nodes;
        pass->capacity = more;
    }
    node->grad_out = peri__alloc_zero(sizeof *node->grad_out * (size_t)node->n_out);
    if (!node->grad_out) return PERI_ENOMEM;
    node->pass = id;
    node_retain(node);
    pass->nodes[pass->n++] = node;
    return add_ending(pass, node->ending, id);
}

static int later_first(const void *a, const void *b)
{
    uint64_t x = (*(peri__node *const *)a)->sequence, y = (*(peri__node *const *)b)->sequence;
    return x < y ? 1 : x > y ? -1 : 0;
}

/** Release the gradients, tape and references of one visited node. */
static void spend(peri__node *node)
{
    if (node->grad_out)
        for (int32_t i = 0; i < node->n_out; i++) peri_tensor_release(node->grad_out[i]);
    peri__free(node->grad_out);
    node->grad_out = NULL;
    node->spent = true;
    peri__node *chain = NULL;
    node_clear(node, &chain);
    node_drain(chain);
    peri__node_release(node);
}

peri_status peri_backward_new(peri_tensor *root, peri_tensor *grad, peri_backward **out)
{
    PERI_NEED(root);
    PERI_NEED(out);
    char a[128], b[128];
    if (!root->requires_grad)
        return peri__fail(PERI_EINVAL, "peri_backward_new: %s does not require grad: no leaf of its computation does",
                          peri__tensor_text(root, a, sizeof a));
    if (!grad && peri__numel(root) != 1)
        return peri__fail(PERI_EINVAL, "peri_backward_new: %s has more than one element; give its upstream gradient",
                          peri__tensor_text(root, a, sizeof a));
    if (grad && (!same_shape(root, grad) || root->dtype != grad->dtype))
        return peri__fail(PERI_EINVAL, "peri_backward_new: the gradient is %s, the root %s", peri__tensor_text(grad, a, sizeof a),
                          peri__tensor_text(root, b, sizeof b));
    peri_tensor *start = grad;
    if (grad) peri_tensor_retain(grad);
    else PERI_TRY(peri_tensor_full(peri__device(root), root->dtype, root->ndim, root->shape, 1, &start));
    peri_backward *pass = peri__alloc_zero(sizeof *pass);
    if (!pass) {
        peri_tensor_release(start);
        return PERI_ENOMEM;
    }
    peri__object_count(1);
    peri_status status = PERI_OK;
    uint64_t id = atomic_fetch_add(&passes, 1) + 1;
    if (!root->node) { /* a leaf: its gradient is the upstream one */
        PERI_TRY_GOTO(add_ending(pass, root->ending, id), out);
        status = accumulate(&root->grad, start, true);
        start = NULL;
        if (status >= 0 && root->ready) root->ready(root->ready_ctx, root);
    } else {
        PERI_TRY_GOTO(add_node(pass, root->node, id), out);
        for (int64_t i = 0; i < pass->n; i++)
            for (int32_t k = 0; k < pass->nodes[i]->n_in; k++) {
                peri__edge *e = &pass->nodes[i]->in[k];
                if (e->leaf) {
                    e->leaf->consumers = 0;
                    PERI_TRY_GOTO(add_ending(pass, e->leaf->ending, id), out);
                }
                if (e->node) PERI_TRY_GOTO(add_node(pass, e->node, id), out);
            }
        for (int64_t i = 0; i < pass->n; i++)
            for (int32_t k = 0; k < pass->nodes[i]->n_in; k++)
                if (pass->nodes[i]->in[k].leaf) pass->nodes[i]->in[k].leaf->consumers++;
        qsort(pass->nodes, (size_t)pass->n, sizeof *pass->nodes, later_first);
        root->node->grad_out[root->slot] = start;
        start = NULL;
    }
    *out = pass;
out:
    peri_tensor_release(start);
    if (status < 0) peri_backward_release(pass);
    return status;
}

/** Hand the gradients of one node's inputs on. */
static peri_status deliver(peri_backward *pass, peri__node *node)
{
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < node->n_in; i++) {
        peri__edge *e = &node->in[i];
        peri_tensor *g = pass->grad_in[i];
        pass->grad_in[i] = NULL;
        if (status < 0 || (!e->node && !e->leaf)) {
            peri_tensor_release(g);
            continue;
        }
        if (g) status = accumulate(e->leaf ? &e->leaf->grad : &e->node->grad_out[e->slot], g, e->leaf != NULL);
        if (status >= 0 && e->leaf && --e->leaf->consumers == 0 && e->leaf->ready) e->leaf->ready(e->leaf->ready_ctx, e->leaf);
    }
    return status;
}

/** Advance all that is left to do, in no order: other ranks may reach it in another one. */
static peri_status finish_endings(peri_backward *pass)
{
    peri_status result = PERI_OK;
    for (int64_t i = 0; i < pass->n_endings; i++) {
        if (!pass->endings[i]) continue;
        peri_status status = pass->endings[i]->finish(pass->endings[i]);
        if (status < 0) return status;
        if (status == PERI_PENDING) {
            result = PERI_PENDING;
            continue;
        }
        peri__ending_release(pass->endings[i]);
        pass->endings[i] = NULL;
    }
    return result;
}

peri_status peri_backward_step(peri_backward *pass)
{
    PERI_NEED(pass);
    while (pass->at < pass->n) {
        peri__node *node = pass->nodes[pass->at];
        bool any = node->vtab->collective;
        for (int32_t i = 0; i < node->n_out; i++) any = any || node->grad_out[i];
        if (node->n_in > pass->grad_in_size) {
            peri_tensor **more = peri__realloc(pass->grad_in, sizeof *more * (size_t)node->n_in);
            if (!more) return PERI_ENOMEM;
            memset(more + pass->grad_in_size, 0, sizeof *more * (size_t)(node->n_in - pass->grad_in_size));
            pass->grad_in = more;
            pass->grad_in_size = node->n_in;
        }
        if (any && pass->checked <= pass->at) { /* once: a node that waits for other ranks is called again */
            PERI_TRY(check_versions(node));
            pass->checked = pass->at + 1;
        }
        if (any) {
            bool before = peri_grad_enable(false);
            peri_status status = node->vtab->backward(node, node->grad_out, pass->grad_in);
            peri_grad_enable(before);
            if (status != PERI_OK) return status;
        }
        PERI_TRY(deliver(pass, node));
        pass->nodes[pass->at++] = NULL;
        spend(node);
    }
    return finish_endings(pass);
}

void peri_backward_release(peri_backward *pass)
{
    if (!pass) return;
    for (int64_t i = pass->at; i < pass->n; i++)
        if (pass->nodes[i]) spend(pass->nodes[i]);
    for (int64_t i = 0; i < pass->grad_in_size; i++) peri_tensor_release(pass->grad_in[i]);
    for (int64_t i = 0; i < pass->n_endings; i++) peri__ending_release(pass->endings[i]);
    peri__free(pass->endings);
    peri__free(pass->grad_in);
    peri__free(pass->nodes);
    peri__object_count(-1);
    peri__free(pass);
}

peri_status peri_tensor_backward(peri_tensor *root, peri_tensor *grad)
{
    PERI_NEED(root);
    peri_backward *pass;
    PERI_TRY(peri_backward_new(root, grad, &pass));
    peri_status status;
    for (int64_t round = 0; (status = peri_backward_step(pass)) == PERI_PENDING; round++) peri_pause(round);
    peri_backward_release(pass);
    return status;
}
