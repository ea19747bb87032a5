/* SPDX-License-Identifier: Apache-2.0
 *
 * lookup.c: the calls that look up and train. Each checks its arguments, goes to where the rows are (peri__store), and
 * keeps the lookup's node on the tape.
 */
#include "../tensor/report.h"
#include "embed_internal.h"

/* -- batches ------------------------------------------------------------------------------------------------------- */

/** A batch for an input, which is checked for @function. */
static peri_status batch_for(const char *function, peri_tbe *tbe, const peri_tbe_input *in, peri_tbe_batch **out)
{
    PERI_TRY(peri__tbe_input_check(function, tbe, in));
    PERI_TRY(peri__batch_acquire(tbe, in, out));
    peri_tbe_retain(tbe);
    return PERI_OK;
}

peri_status peri_tbe_batch_new(peri_tbe *tbe, const peri_tbe_input *in, peri_tbe_batch **out)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(out);
    return batch_for("peri_tbe_batch_new", tbe, in, out);
}

void peri_tbe_batch_retain(peri_tbe_batch *batch) { if (batch) peri__refs_add(&batch->refs); }

void peri_tbe_batch_release(peri_tbe_batch *b)
{
    if (!b || !peri__refs_drop(&b->refs)) return;
    peri_tbe *tbe = b->tbe;
    peri_tbe_batch *alike = b->alike;
    b->alike = NULL;
    if (b->ticket) tbe->store->drop(b);
    peri__batch_recycle(b);
    peri_tbe_batch_release(alike);
    peri_tbe_release(tbe);
}

peri_status peri_tbe_batch_sort(peri_tbe_batch *b)
{
    PERI_NEED(b);
    /* slots are known with the lookup only */
    if (!b->tbe->store->whole || b->tbe->optimizer.kind == PERI_TBE_NONE) return PERI_OK;
    PERI_TRY(peri__batch_enter("peri_tbe_batch_sort", b, false));
    return peri__batch_leave(b, false, peri__batch_sort(b));
}

/* -- forward ------------------------------------------------------------------------------------------------------- */

static peri_status check_output(const char *function, const peri_tbe *tbe, const peri_tbe_input *in,
                             const peri_tensor *out)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, "the output", out, -1, -1));
    if (out->dtype != PERI_F32 && out->dtype != PERI_F16 && out->dtype != PERI_BF16)
        return peri__fail(PERI_EINVAL, "%s: the output is %s, allowed: f32, f16, bf16", function,
                          peri__tensor_text(out, text, sizeof text));
    if (peri__device(out) != tbe->device || !peri__contiguous(out))
        return peri__fail(PERI_EINVAL, "%s: the output must be contiguous and on device %s", function,
                          tbe->device->name);
    int64_t extent = peri__tbe_extent(tbe, in);
    if (peri__numel(out) >= extent) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: the output is %s, the blocks write up to element %lld", function,
                      peri__tensor_text(out, text, sizeof text), (long long)extent - 1);
}

peri_status peri__batch_forward(const char *function, peri_tbe_batch *b, peri_tensor *out)
{
    return b->tbe->store->forward(function, b, out);
}

static peri_status forward_checked(const char *function, peri_tbe_batch *b, peri_tensor *out)
{
    if (!b->there) PERI_TRY(check_output(function, b->tbe, &b->in, out));
    peri__changed(out);
    return peri__batch_forward(function, b, out);
}

peri_status peri_tbe_batch_forward(peri_tbe_batch *b, peri_tensor *out)
{
    PERI_NEED(b);
    PERI_NEED(out);
    return forward_checked("peri_tbe_batch_forward", b, out);
}

peri_status peri_tbe_forward(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *out)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(out);
    peri_tbe_batch *b;
    PERI_TRY(batch_for("peri_tbe_forward", tbe, in, &b));
    peri_status status = forward_checked("peri_tbe_forward", b, out);
    peri_tbe_batch_release(b);
    return status;
}

/* -- backward ------------------------------------------------------------------------------------------------------ */

/** Gradients of the ids' weights at once, the rest later. */
static peri_status keep_for_later(const char *function, peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights)
{
    PERI_TRY(peri__batch_enter(function, b, true));
    peri_status status = grad_weights ? peri__tbe_weight_gradient(b, grad, grad_weights) : PERI_OK;
    if (status >= 0) status = peri__tbe_accumulate_pass(b->tbe, &b->in, grad);
    return peri__batch_leave(b, true, status);
}

/** After an update of @tbe: say once if one backward pass updates it several times. Who knows autograd expects one step
 *  with the sum of the gradients; of SGD without decay that is the same. */
static void note_pass(peri_tbe *tbe)
{
    const peri_tbe_optimizer_config *o = &tbe->optimizer;
    uint64_t pass = peri__backward_running();
    if (pass == 0 || tbe->n_tables == 0 || o->kind == PERI_TBE_NONE ||
        (o->kind == PERI_TBE_SGD && o->weight_decay == 0))
        return;
    pthread_mutex_lock(&tbe->small); /* other threads update it, too */
    const bool tell = pass == tbe->last_pass && !tbe->told_twice;
    tbe->last_pass = pass;
    tbe->told_twice = tbe->told_twice || tell;
    pthread_mutex_unlock(&tbe->small);
    if (!tell) return;
    peri__log(PERI_LOG_WARN,
              "table '%.120s'%s: one backward pass updates it for each of several lookups, so its optimizer "
              "(%s) takes "
              "several steps, as FBGEMM's does; one lookup of all features of a step takes one step",
              tbe->tables[0].name, tbe->n_tables > 1 ? " and those beside it" : "", peri_tbe_optimizer_name(o->kind));
}

static peri_status backward_checked(const char *function, peri_tbe_batch *b, peri_tensor *grad,
                                    peri_tensor *grad_weights)
{
    peri_tbe *tbe = b->tbe;
    if (!b->there) PERI_TRY(peri__tbe_gradient_check(function, tbe, &b->in, grad, grad_weights));
    if (tbe->accumulate) return keep_for_later(function, b, grad, grad_weights);
    peri_status status = tbe->store->backward(function, b, grad, grad_weights);
    if (status >= 0) note_pass(tbe);
    return status;
}

peri_status peri_tbe_batch_backward(peri_tbe_batch *b, peri_tensor *grad, peri_tensor *grad_weights)
{
    PERI_NEED(b);
    PERI_NEED(grad);
    return backward_checked("peri_tbe_batch_backward", b, grad, grad_weights);
}

peri_status peri_tbe_backward(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *grad, peri_tensor *grad_weights)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(grad);
    peri_tbe_batch *b;
    PERI_TRY(batch_for("peri_tbe_backward", tbe, in, &b));
    peri_status status = backward_checked("peri_tbe_backward", b, grad, grad_weights);
    peri_tbe_batch_release(b);
    return status;
}

/* -- rows ahead ---------------------------------------------------------------------------------------------------- */

peri_status peri_tbe_batch_prefetch(peri_tbe_batch *b)
{
    PERI_NEED(b);
    const peri__store *store = b->tbe->store;
    return store->prefetch ? store->prefetch("peri_tbe_batch_prefetch", b) : PERI_OK;
}

/* -- on the tape --------------------------------------------------------------------------------------------------- */

/** What the node saves, so that changes in place are noticed; its state is the batch. */
enum { SAVED_IDS, SAVED_OFFSETS, SAVED_WEIGHTS, SAVED_SCALE };

static void lookup_fini(peri__node *node)
{
    peri_tbe_batch_release(node->state);
    node->state = NULL;
}

/** Inputs of the node: the ids' weights; with optimizer NONE also the leaf of each table. */
peri_status peri__lookup_backward(peri__node *node, peri_tbe_batch *batch, peri_tensor *grad, peri_tensor **grad_in)
{
    const peri_tensor *weights = batch->in.weights;
    peri_tensor *grad_weights = NULL, *dense = NULL;
    bool leaves = false;
    for (int32_t i = 1; i < node->n_in; i++) leaves = leaves || peri__needs(node, i);
    peri_status status;
    if (grad->dtype != PERI_F32) {
        peri_tensor *narrow = grad;
        grad = NULL;
        status = peri_tensor_to(narrow, PERI_F32, NULL, &grad);
        peri_tensor_release(narrow);
        PERI_TRY_GOTO(status, out);
    }
    if (node->n_in > 0 && peri__needs(node, 0))
        PERI_TRY_GOTO(peri__tensor_like(weights, 1, weights->shape, &grad_weights), out);
    if (leaves) {
        PERI_TRY_GOTO(peri_tbe_batch_gradient(batch, grad, grad_weights, &dense), out);
        for (int32_t i = 1; i < node->n_in; i++)
            if (peri__needs(node, i))
                PERI_TRY_GOTO(peri_tbe_gradient_table(batch->tbe, dense, i - 1, &grad_in[i]), out);
    } else {
        PERI_TRY_GOTO(backward_checked("peri_tbe_backward", batch, grad, grad_weights), out);
    }
    if (grad_weights) grad_in[0] = grad_weights;
    grad_weights = NULL;
    peri__unheard_passed(&batch->tbe->unheard);
out:
    peri_tensor_release(grad);
    peri_tensor_release(grad_weights);
    peri_tensor_release(dense);
    return status;
}

static peri_status lookup_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *grad = grad_out[0];
    bool placed; /* a gradient among those of other features (cat) is read there */
    PERI_TRY(peri__batch_redirect_window(node, node->state, grad, &placed));
    if (placed) peri_tensor_retain(grad);
    else if (grad->dtype == PERI_F32) PERI_TRY(peri_tensor_contiguous(grad, &grad));
    else PERI_TRY(peri__cast(grad, PERI_F32, &grad)); /* contiguous and wide in one pass */
    peri_status status = peri__lookup_backward(node, node->state, grad, grad_in);
    if (placed) peri__batch_redirect_end(node->state);
    return status;
}

static const peri__node_vtab lookup_vtab = {
    .name = "tbe_lookup", .acts = PERI__UPDATES, .backward = lookup_backward, .fini = lookup_fini};

/** The node's inputs (borrowed), in a new array. */
static peri_status lookup_inputs(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor ***out, int32_t *n)
{
    bool leaves = tbe->optimizer.kind == PERI_TBE_NONE && tbe->dtype == PERI_F32;
    *n = leaves ? (int32_t)tbe->n_tables + 1 : 1;
    peri_tensor **list = peri__alloc_zero(sizeof *list * (size_t)*n);
    if (!list) return PERI_ENOMEM;
    list[0] = in->weights;
    for (int32_t i = 1; i < *n; i++) {
        peri_status status = peri_tbe_leaf(tbe, i - 1, &list[i]);
        if (status < 0) {
            peri__free(list);
            return status;
        }
        peri_tensor_release(list[i]); /* the table batch keeps it */
    }
    *out = list;
    return PERI_OK;
}

peri_status peri__lookup_record(const peri__node_vtab *vtab, peri_tbe_batch *b, peri_tensor *const *out, int32_t n,
                                peri__node **node)
{
    peri_tensor **inputs;
    int32_t n_in;
    const peri_tbe_input *in = &b->in;
    *node = NULL;
    PERI_TRY(lookup_inputs(b->tbe, in, &inputs, &n_in));
    peri_status status = PERI_OK;
    if (b->tbe->optimizer.kind == PERI_TBE_NONE && !peri__recording(inputs, n_in)) goto out; /* nobody wants anything */
    PERI_TRY_GOTO(peri__record(vtab, inputs, n_in, out, n, node), out);
    peri__node_save(*node, SAVED_IDS, in->ids);
    peri__node_save(*node, SAVED_OFFSETS, in->offsets);
    peri__node_save(*node, SAVED_WEIGHTS, in->weights);
    peri__node_save(*node, SAVED_SCALE, in->scale);
out:
    peri__free(inputs);
    return status;
}

bool peri__batch_readable(const peri_tbe_batch *b) { return peri__immediate(b->tbe->device); }

int64_t peri__batch_offset(const peri_tbe_batch *b, int64_t bag)
{
    const void *offsets = peri__data(b->in.offsets);
    return b->in.offsets->dtype == PERI_I32 ? ((const int32_t *)offsets)[bag] : ((const int64_t *)offsets)[bag];
}

/** Whether the lookup writes all of @out: bags that follow each other from the first id to the last leave no row
 *  out. */
static bool writes_whole_output(const peri_tbe_batch *b, const peri_tensor *out)
{
    const peri_tbe_blocks *l = b->in.blocks;
    int64_t n = peri__numel(b->in.ids), numel = peri__numel(out);
    if (!l->none) return l->covered == numel;
    if (!l->row_cols || l->narrow) return false;
    return n * l->row_cols == numel && l->multiplicity == 1 && l->total_bags == l->bags && peri__batch_readable(b) &&
           peri__batch_offset(b, 0) == 0 && peri__batch_offset(b, l->bags) == n;
}

peri_status peri__lookup_rows(const char *function, peri_tbe_batch *b, int32_t ndim, const int64_t *shape,
                              peri_tensor **out)
{
    peri_tbe *tbe = b->tbe;
    peri_tensor *t;
    PERI_TRY(peri__batch_out_of_memory(b, peri_tensor_new(tbe->device, tbe->output_dtype, ndim, shape, &t)));
    peri_status status = check_output(function, tbe, &b->in, t);
    if (status >= 0 && !writes_whole_output(b, t)) status = peri__tensor_zero(t);
    if (status >= 0 && peri_grad_enabled()) status = peri__tbe_ema(tbe);
    if (status >= 0) status = peri__batch_forward(function, b, t);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

static peri_status look_up_recorded(const char *function, peri_tbe_batch *b, int32_t ndim, const int64_t *shape,
                          peri_tensor **out)
{
    PERI_TRY(peri__lookup_rows(function, b, ndim, shape, out));
    if (!peri_grad_enabled()) return PERI_OK;
    peri__node *node;
    peri_status status = peri__lookup_record(&lookup_vtab, b, out, 1, &node);
    if (status < 0) peri_tensor_release(*out);
    else if (node) peri_tbe_batch_retain(b), node->state = b;
    return status;
}

peri_status peri_tbe_batch_lookup(peri_tbe_batch *b, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    PERI_NEED(b);
    PERI_NEED(out);
    return look_up_recorded("peri_tbe_batch_lookup", b, ndim, shape, out);
}

peri_status peri_tbe_lookup(peri_tbe *tbe, const peri_tbe_input *in, int32_t ndim, const int64_t *shape,
                            peri_tensor **out)
{
    PERI_NEED(in);
    PERI_NEED(tbe);
    PERI_NEED(out);
    peri_tbe_batch *b;
    PERI_TRY(batch_for("peri_tbe_lookup", tbe, in, &b));
    peri_status status = look_up_recorded("peri_tbe_lookup", b, ndim, shape, out);
    peri_tbe_batch_release(b);
    return status;
}
