/* SPDX-License-Identifier: Apache-2.0
 *
 * hook.c: places on the tape where a backward pass stops for its caller. C calls nobody back: the pass returns, and is
 * continued.
 */
#include "tensor_internal.h"

enum { KEPT_ID, KEPT_REACHED };

/** What has become of a hook in this pass: KEPT_REACHED. */
enum { AHEAD = 0, REACHED = 1, ASKED = 2 };

static peri_status hook_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    if (node->kept[KEPT_REACHED] == AHEAD) {
        node->kept[KEPT_REACHED] = REACHED;
        return PERI_PENDING;
    }
    if (grad_out[0]) peri_tensor_retain(grad_out[0]);
    grad_in[0] = grad_out[0];
    return PERI_OK;
}

/* It posts whatever the caller posts there. */
static const peri__node_vtab hook_vtab = {.name = "hook", .acts = PERI__POSTS | PERI__CALLS, .backward = hook_backward};

peri_status peri_tensor_hooked(peri_tensor *t, int64_t id, peri_tensor **out)
{
    PERI_NEED(t);
    PERI_NEED(out);
    if (id < 1) return peri__fail(PERI_EINVAL, "peri_tensor_hooked: id %lld, allowed: above 0", (long long)id);
    peri_tensor *view;
    peri__node *node;
    PERI_TRY(peri__tensor_view(t, t->ndim, t->shape, t->stride, t->offset, &view));
    peri_status status = peri__attach(&hook_vtab, &t, 1, &view, 1, &node);
    if (status < 0) {
        peri_tensor_release(view);
        return status;
    }
    if (node) node->kept[KEPT_ID] = id;
    *out = view;
    return PERI_OK;
}

int64_t peri__hook_ask(peri__node *node)
{
    if (!(node->vtab->acts & PERI__CALLS) || node->kept[KEPT_REACHED] != REACHED) return 0;
    node->kept[KEPT_REACHED] = ASKED;
    return node->kept[KEPT_ID];
}
