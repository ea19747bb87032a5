/* SPDX-License-Identifier: Apache-2.0
 *
 * weights_dist.c: the gradients of the ids' weights, from the owners back to the ids: the way of the ids in reverse.
 *
 * The gradient of a weight is that of this rank's own loss: weights are an input of this rank, not a table that all
 * ranks train. So where gradients of rows are divided by the number of ranks, this one is multiplied by it again. It is
 * not clipped.
 */
#include "../base/floats.h"
#include "module_batch.h"
#include "../../kernels/dense.h"
#include "../../kernels/route.h"

#include "../tensor/jagged_internal.h"

peri_status peri__weights_dist_new(peri__input_dist *d, peri__weights_dist **out)
{
    *out = NULL;
    if (!peri__weights_want_grad(d)) return PERI_OK;
    peri__weights_dist *w = peri__alloc_zero(sizeof *w);
    if (!w) return PERI_ENOMEM;
    peri__refs_init(&w->refs);
    peri_work_retain(&d->base);
    w->input = d;
    w->at_home = peri__weights_at_home(d);
    *out = w;
    return PERI_OK;
}

void peri__weights_dist_release(peri__weights_dist *w)
{
    if (!w || !peri__refs_drop(&w->refs)) return;
    peri_tensor_release(w->owner);
    peri_tensor_release(w->replicas);
    peri__transfer_fini(&w->back);
    peri_work_release(&w->input->base);
    peri__free(w);
}

/* -- parts --------------------------------------------------------------------------------------------------------- */

/** Zeros: for each id of the input, or of those received. */
static peri_status zero_gradients(const peri__weights_dist *w, bool replica, peri_tensor **out)
{
    const peri__routing *r = &w->input->routing;
    int64_t n = peri__numel(replica ? r->values : r->received[PERI__IDS]);
    return peri_tensor_full(w->input->ebc->device, PERI_F32, 1, &n, 0, out);
}

peri_status peri__weights_dist_part(const peri__weights_dist *w, int32_t g, peri_tensor **out)
{
    *out = NULL;
    return w && !w->at_home ? zero_gradients(w, w->input->ebc->sets[g].replica, out) : PERI_OK;
}

peri_status peri__weights_dist_add(peri__weights_dist *w, int32_t g, const peri_tensor *part)
{
    const peri_sharded *e = w->input->ebc;
    const peri__table_set *set = &e->sets[g];
    peri_tensor **sum = set->replica ? &w->replicas : &w->owner;
    if (!*sum) PERI_TRY(zero_gradients(w, set->replica, sum));
    /* the gradients of some replicas were divided by a number of their own (see gradient_divisor) */
    peri_k_axpy_args args = {.y = peri__data(*sum),
                             .x = peri__data(part),
                             .dtype = PERI_F32,
                             .alpha = set->replica ? e->tables[set->module_table[0]].divisor : 1};
    return PERI_LAUNCH(e->device, axpy, &args, peri__numel(part), PERI_ELEMENT_GRAIN);
}

/* -- backward ------------------------------------------------------------------------------------------------------ */

static peri_status post_gradients(peri__weights_dist *w)
{
    const peri_sharded *e = w->input->ebc;
    if (w->at_home) return PERI_OK;
    if (!w->owner) PERI_TRY(zero_gradients(w, false, &w->owner));
    return e->world_size == 1 ? PERI_OK : peri__routing_return(&w->input->routing, w->owner, &w->back);
}

/** What came back, added to what the replicas gave. */
static peri_status collect_gradients(peri__weights_dist *w, peri_tensor **out)
{
    const peri_sharded *e = w->input->ebc;
    const peri__routing *r = &w->input->routing;
    const peri_tensor *back = e->world_size == 1 ? w->owner : w->back.numbers;
    int64_t n = r->outbound->wire_bags + 1;
    PERI__HELD peri_tensor *cursor = NULL;
    PERI__OWN_FLOATS;
    if (w->at_home) {
        *out = peri__hand_over(&w->replicas);
        return PERI_OK;
    }
    if (!w->replicas) PERI_TRY(zero_gradients(w, true, &w->replicas));
    PERI_TRY(peri_tensor_new(e->device, PERI_I64, 1, &n, &cursor));
    peri_k_route_return_args args = {.in = peri__routing_ids(r),
                                     .cursor = peri__data(cursor),
                                     .back = peri__data(back),
                                     .out = peri__data(w->replicas),
                                     .factor = (float)e->division};
    PERI_TRY(peri__complete_sum(r->wire_lengths, -1, cursor));
    PERI_TRY(PERI_LAUNCH(e->device, route_return, &args, peri__numel(r->offsets_in) - 1, 512));
    *out = peri__hand_over(&w->replicas);
    return PERI_OK;
}

/** Input: the weights. The gradient of its output came through the parts. */
static peri_status weights_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    (void)grad_out;
    peri__weights_dist *w = node->state;
    if (!w->posted) PERI_TRY(post_gradients(w));
    w->posted = true;
    peri_status status = peri__transfer_test(&w->back);
    if (status != PERI_OK) return status;
    return collect_gradients(w, &grad_in[0]);
}

static void weights_fini(peri__node *node)
{
    peri__weights_dist_release(node->state);
    node->state = NULL;
}

static const peri__node_vtab weights_vtab = {.name = "sharded weights_dist",
                                             .acts = PERI__POSTS | PERI__WAITS,
                                             .backward = weights_backward,
                                             .fini = weights_fini};

peri_status peri__weights_dist_record(peri__weights_dist *w, peri_tensor **token)
{
    int64_t none = 0;
    peri__node *node;
    PERI__HELD peri_tensor *t = NULL;
    PERI_TRY(peri_tensor_new(w->input->ebc->device, PERI_F32, 1, &none, &t));
    PERI_TRY(peri__record(&weights_vtab, &w->input->routing.weights, 1, &t, 1, &node));
    peri__refs_add(&w->refs);
    node->state = w;
    *token = peri__hand_over(&t);
    return PERI_OK;
}
