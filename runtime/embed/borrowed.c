/* SPDX-License-Identifier: Apache-2.0
 *
 * borrowed.c: lookups in a tensor whose memory a table batch borrows for them (peri__tbe_borrowing), on the tape.
 */
#include "../tensor/report.h"
#include "embed_internal.h"

enum { IN_TABLE, IN_WEIGHTS, INPUTS };
enum { SAVED_IDS, SAVED_OFFSETS, SAVED_WEIGHTS, SAVED_SCALE };

static void borrowed_fini(peri__node *node)
{
    peri_tbe_batch_release(node->state);
    node->state = NULL;
}

void peri__borrowed_passed(const peri_tbe *tbe) { peri__unheard_passed(&tbe->weight->storage->unheard); }

static peri_status borrowed_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tbe_batch *batch = node->state;
    const peri_tensor *in_weights = batch->in.weights;
    peri_tensor *grad = NULL, *weights = NULL, *dense = NULL;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(grad_out[0], &grad), out);
    if (peri__needs(node, IN_WEIGHTS))
        PERI_TRY_GOTO(peri__tensor_like(in_weights, 1, in_weights->shape, &weights), out);
    if (peri__needs(node, IN_TABLE)) {
        PERI_TRY_GOTO(peri_tbe_batch_gradient(batch, grad, weights, &dense), out);
        PERI_TRY_GOTO(peri__tensor_view(dense, node->shape[IN_TABLE].ndim, node->shape[IN_TABLE].size, NULL, 0,
                                        &grad_in[IN_TABLE]),
                      out);
    } else {
        PERI_TRY_GOTO(peri_tbe_batch_backward(batch, grad, weights), out);
    }
    grad_in[IN_WEIGHTS] = weights;
    weights = NULL;
    peri__borrowed_passed(batch->tbe);
out:
    peri_tensor_release(grad);
    peri_tensor_release(weights);
    peri_tensor_release(dense);
    return status;
}

static const peri__node_vtab over_vtab = {
    .name = "tbe_over", .acts = PERI__UPDATES, .backward = borrowed_backward, .fini = borrowed_fini};

peri_status peri__borrowed_record(peri_tensor *table, peri_tbe_batch *batch, peri_tensor *out)
{
    const peri_tbe_input *in = &batch->in;
    peri_tensor *inputs[INPUTS] = {[IN_TABLE] = table, [IN_WEIGHTS] = in->weights};
    peri__node *node;
    if (!peri__recording(inputs, INPUTS)) return PERI_OK;
    PERI_TRY(peri__record(&over_vtab, inputs, INPUTS, &out, 1, &node));
    peri_tbe_batch_retain(batch);
    node->state = batch;
    node->shape[IN_TABLE] = peri__shape_of(table);
    peri__node_save(node, SAVED_IDS, in->ids);
    peri__node_save(node, SAVED_OFFSETS, in->offsets);
    peri__node_save(node, SAVED_WEIGHTS, in->weights);
    peri__node_save(node, SAVED_SCALE, in->scale);
    return PERI_OK;
}

peri_status peri__offsets_of_equal(peri_device *device, int64_t bags, int64_t length, peri_tensor **out)
{
    int64_t *host = peri__alloc(sizeof *host * (size_t)(bags + 1)), n = bags + 1;
    if (!host) return PERI_ENOMEM;
    for (int64_t b = 0; b <= bags; b++) host[b] = b * length;
    peri_tensor *t = NULL;
    peri_status status = peri_tensor_new(device, PERI_I64, 1, &n, &t);
    if (status >= 0) status = peri_tensor_write(t, host, n * 8);
    peri__free(host);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}
