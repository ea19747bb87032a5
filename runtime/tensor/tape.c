/* SPDX-License-Identifier: Apache-2.0
 *
 * tape.c: recording operations. backward.c runs them backwards, lifetime.c lets them go.
 *
 * Nodes hang on the tensors that they made, so dropping the loss drops the tape. There is no global list: nodes are
 * ordered by a process-wide sequence number. Several ranks of a `sim` world can therefore interleave their passes in
 * one thread.
 */
#include "tensor_internal.h"

static atomic_uint_least64_t sequence;
static _Thread_local bool recording_off;

bool peri_grad_enabled(void) { return !recording_off; }

peri_status peri_grad_enabled_set(bool on)
{
    PERI__NOT_AT_BORDER;
    recording_off = !on;
    return PERI_OK;
}

bool peri__grad_swap(bool on)
{
    bool before = !recording_off;
    recording_off = !on;
    return before;
}

bool peri__recording(peri_tensor *const *in, int32_t n)
{
    if (recording_off) return false;
    for (int32_t i = 0; i < n; i++)
        if (in[i] && in[i]->requires_grad) return true;
    return false;
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

static void node_retain(peri__node *node) { peri__refs_add(&node->refs); }

static peri__node *node_new(const peri__node_vtab *vtab, int32_t n_in, int32_t n_out)
{
    const int32_t n_saved = n_in > PERI_NODE_SAVED ? n_in : PERI_NODE_SAVED;
    peri__node *node = peri__alloc_zero(sizeof *node + sizeof *node->in * (size_t)n_in +
                                        (sizeof *node->saved + sizeof *node->version) * (size_t)n_saved);
    if (!node) return NULL;
    node->in = (peri__edge *)(node + 1);
    node->saved = (peri_tensor **)(node->in + n_in);
    node->version = (uint64_t *)(node->saved + n_saved);
    node->n_saved = n_saved;
    atomic_init(&node->refs, n_out);
    node->vtab = vtab;
    node->name = vtab->name;
    node->sequence = atomic_fetch_add(&sequence, 1) + 1;
    node->n_in = n_in;
    node->n_out = n_out;
    peri__object_count(1);
    return node;
}

/** The version of which gradients of @out are: a view of a leaf stays one whatever is written into it, a view of what
 *  was computed is as old as that. */
static uint64_t made_of(const peri_tensor *out, peri_tensor *const *in, int32_t n_in)
{
    for (int32_t i = 0; i < n_in; i++)
        if (in[i] && in[i]->storage == out->storage) return in[i]->node ? in[i]->made : PERI__ANY_VERSION;
    return peri__version(out);
}

static peri_status check_not_changed_since(const peri__node_vtab *vtab, const peri_tensor *t)
{
    char text[128];
    if (!t->node || t->made == PERI__ANY_VERSION || t->made == peri__version(t)) return PERI_OK;
    return peri__fail(PERI_EINVAL,
                      "%s: an input (%s) was changed in place after %s had computed it, and gradients would be those "
                      "of its old elements; make a new tensor (where, masked_fill, cat), or detach it",
                      vtab->name, peri__tensor_text(t, text, sizeof text), t->node->name);
}

static void attach_outputs(peri__node *node, peri_tensor *const *out, int32_t n_out)
{
    for (int32_t i = 0; i < n_out; i++) {
        out[i]->requires_grad = true;
        out[i]->node = node;
        out[i]->output = i;
    }
}

peri_status peri__record(const peri__node_vtab *vtab, peri_tensor *const *in, int32_t n_in, peri_tensor *const *out,
                         int32_t n_out, peri__node **result)
{
    for (int32_t i = 0; i < n_in; i++)
        if (in[i]) PERI_TRY(check_not_changed_since(vtab, in[i]));
    peri__node *node = node_new(vtab, n_in, n_out);
    if (!node) return PERI_ENOMEM;
    for (int32_t i = 0; out && i < n_out; i++) out[i]->made = made_of(out[i], in, n_in);
    for (int32_t i = 0; i < n_in; i++) {
        if (!in[i] || !in[i]->requires_grad) continue;
        peri__edge *e = &node->in[i];
        if (in[i]->node) {
            e->node = in[i]->node;
            e->output = in[i]->output;
            node_retain(e->node);
        } else {
            e->leaf = in[i];
            peri_tensor_retain(e->leaf);
        }
    }
    if (out) attach_outputs(node, out, n_out);
    *result = node;
    return PERI_OK;
}

peri_status peri__record_after(const peri__node_vtab *vtab, peri__node *before, peri_tensor *const *out, int32_t n_out,
                               peri__node **result)
{
    peri__node *node = node_new(vtab, 1, n_out);
    if (!node) return PERI_ENOMEM;
    node->in[0].node = before;
    for (int32_t i = 0; i < n_out; i++) out[i]->made = made_of(out[i], NULL, 0);
    attach_outputs(node, out, n_out);
    *result = node;
    return PERI_OK;
}

void peri__node_save(peri__node *node, int32_t i, peri_tensor *t)
{
    node->saved[i] = t;
    if (!t) return;
    peri_tensor_retain(t);
    node->version[i] = peri__version(t);
}

peri_status peri__attach(const peri__node_vtab *vtab, peri_tensor *const *in, int32_t n_in, peri_tensor *const *out,
                         int32_t n_out, peri__node **node)
{
    *node = NULL;
    return peri__recording(in, n_in) ? peri__record(vtab, in, n_in, out, n_out, node) : PERI_OK;
}

peri_status peri__attach_places(const peri__node_vtab *vtab, peri_tensor *x, int32_t dim, peri_tensor *places,
                                peri_tensor *y)
{
    peri__node *node;
    PERI_TRY(peri__attach(vtab, &x, 1, &y, 1, &node));
    if (!node) return PERI_OK;
    peri__node_save(node, 0, places);
    node->kept[0] = dim;
    node->shape[0] = peri__shape_of(x);
    return PERI_OK;
}

peri_status peri__node_save_output(peri__node *node, int32_t i, peri_tensor *out)
{
    PERI_TRY(peri__detached(out, &node->saved[i]));
    node->version[i] = peri__version(out);
    return PERI_OK;
}

/* -- leaves -------------------------------------------------------------------------------------------------------- */

peri_status peri_tensor_requires_grad_set(peri_tensor *leaf, bool on)
{
    PERI_NEED(leaf);
    if (leaf->node)
        return peri__fail(PERI_EINVAL,
                          "peri_tensor_requires_grad_set: the result of an operation, not a leaf; detach it first");
    if (on) PERI_TRY(peri__check_float("peri_tensor_requires_grad_set", "the leaf", leaf));
    peri__leaf_fn may_be = atomic_load_explicit(&leaf->storage->leaf, memory_order_acquire);
    if (may_be) PERI_TRY(may_be(leaf));
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

bool peri__same_shape(const peri_tensor *a, const peri_tensor *b)
{
    return a->ndim == b->ndim && !memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim);
}

peri_status peri_tensor_grad_set(peri_tensor *leaf, peri_tensor *grad)
{
    PERI_NEED(leaf);
    char a[128], b[128];
    if (grad && (!peri__same_shape(leaf, grad) || leaf->dtype != grad->dtype))
        return peri__fail(PERI_EINVAL, "peri_tensor_grad_set: the gradient is %s, the leaf %s",
                          peri__tensor_text(grad, a, sizeof a), peri__tensor_text(leaf, b, sizeof b));
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
