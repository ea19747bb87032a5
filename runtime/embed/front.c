/* SPDX-License-Identifier: Apache-2.0
 *
 * front.c: the calls that look up and train. Each checks its arguments, goes to the tables in memory or to those in files, and keeps the
 * lookup's node on the tape. Memory (lookup.c, update.c, backward.c) knows nothing of files, and files (tier.c) nothing of this.
 */
#include "internal.h"

/* -- forward --------------------------------------------------------------------------------------------------------------------- */

static peri_status check_out(const char *function, const peri_tbe *tbe, const peri_tbe_input *in, const peri_tensor *out)
{
    char text[128];
    PERI_TRY(peri__check_tensor(function, "the output", out, -1, -1));
    if (out->dtype != PERI_F32 && out->dtype != PERI_F16 && out->dtype != PERI_BF16)
        return peri__fail(PERI_EINVAL, "%s: the output is %s, allowed: f32, f16, bf16", function,
                          peri__tensor_text(out, text, sizeof text));
    if (peri__device(out) != tbe->device || !peri__contiguous(out))
        return peri__fail(PERI_EINVAL, "%s: the output must be contiguous and on device %s", function, tbe->device->name);
    int64_t extent = peri__tbe_extent(tbe, in);
    if (peri__numel(out) >= extent) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: the output is %s, the blocks write up to element %lld", function,
                      peri__tensor_text(out, text, sizeof text), (long long)extent - 1);
}

/** What a report on the device says. Waits. */
static peri_status judge(const char *function, const peri_tbe *tbe, const peri_tensor *report)
{
    peri_k_tbe_report found;
    PERI_TRY(peri__copy(tbe->device, &found, peri__data(report), sizeof found, PERI_COPY_D2H));
    PERI_TRY(peri_stream_synchronize(peri_stream_current(tbe->device)));
    return peri__tbe_status(tbe, function, &found);
}

peri_status peri__tbe_checked_forward(const char *function, peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *out)
{
    if (tbe->tier) return peri__tier_forward(function, tbe, in, out);
    if (tbe->bounds_check == PERI_BOUNDS_NONE) return peri__tbe_forward(tbe, in, out, NULL);
    void *unused;
    PERI_TRY(peri__tbe_workspace(tbe, PERI__TBE_REPORT, PERI_I64, PERI__REPORT_WORDS, &unused));
    peri_tensor *report = tbe->workspace[PERI__TBE_REPORT];
    PERI_TRY(peri__tbe_forward(tbe, in, out, report));
    return tbe->bounds_check == PERI_BOUNDS_IGNORE ? PERI_OK : judge(function, tbe, report);
}

peri_status peri__tbe_check(const char *function, peri_tbe *tbe, const peri_tbe_input *in)
{
    void *unused;
    PERI_TRY(peri__tbe_workspace(tbe, PERI__TBE_REPORT, PERI_I64, PERI__REPORT_WORDS, &unused));
    peri_tensor *report = tbe->workspace[PERI__TBE_REPORT];
    PERI_TRY(peri__tbe_enter(tbe));
    PERI_TRY(peri__report_reset(report));
    peri_k_tbe_check_args check = {.report = peri__data(report)};
    int64_t grain;
    PERI_TRY(peri__tbe_stream(tbe, in, false, &check.stream));
    peri__tbe_chunks(in, &check.chunks, &grain);
    PERI_TRY(PERI_LAUNCH(tbe->device, tbe_check, &check, check.chunks, grain));
    peri_k_tbe_report_args describe = {.stream = check.stream, .report = check.report};
    PERI_TRY(PERI_LAUNCH(tbe->device, tbe_report, &describe, 1, 1));
    PERI_TRY(peri__tbe_leave(tbe));
    return judge(function, tbe, report);
}

peri_status peri_tbe_forward(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *out)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(out);
    PERI_TRY(peri__tbe_input_check("peri_tbe_forward", tbe, in));
    PERI_TRY(check_out("peri_tbe_forward", tbe, in, out));
    peri__changed(out);
    return peri__tbe_checked_forward("peri_tbe_forward", tbe, in, out);
}

/* -- backward -------------------------------------------------------------------------------------------------------------------- */

peri_status peri_tbe_backward(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *grad, peri_tensor *grad_weights)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_NEED(grad);
    PERI_TRY(peri__tbe_input_check("peri_tbe_backward", tbe, in));
    PERI_TRY(peri__tbe_gradient_check("peri_tbe_backward", tbe, in, grad, grad_weights));
    if (tbe->accumulate) {
        peri_k_tbe_stream stream;
        if (!grad_weights) return peri__tbe_keep(tbe, in, grad);
        PERI_TRY(peri__tbe_enter(tbe));
        PERI_TRY(peri__tbe_stream(tbe, in, false, &stream));
        PERI_TRY(peri__tbe_weight_gradient(tbe, in, &stream, grad, grad_weights));
        PERI_TRY(peri__tbe_leave(tbe));
        return peri__tbe_keep(tbe, in, grad);
    }
    return tbe->tier ? peri__tier_backward(tbe, in, grad, grad_weights) : peri__tbe_backward(tbe, in, grad, grad_weights);
}

/* -- rows ahead, rows back ------------------------------------------------------------------------------------------------------- */

peri_status peri_tbe_prefetch(peri_tbe *tbe, const peri_tbe_input *in)
{
    PERI_NEED(tbe);
    PERI_NEED(in);
    PERI_TRY(peri__tbe_input_check("peri_tbe_prefetch", tbe, in));
    return tbe->tier ? peri__tier_prefetch("peri_tbe_prefetch", tbe, in) : PERI_OK;
}

/* -- on the tape ----------------------------------------------------------------------------------------------------------------- */

/** What the node keeps beside its saved tensors. */
typedef struct lookup_state {
    peri_tbe *tbe;           /* retained */
    peri_tbe_blocks *blocks; /* retained */
} lookup_state;

enum { SAVED_IDS, SAVED_OFFSETS, SAVED_WEIGHTS, SAVED_SCALE };

static void lookup_fini(peri__node *node)
{
    lookup_state *state = node->state;
    if (!state) return;
    peri_tbe_release(state->tbe);
    peri_tbe_blocks_release(state->blocks);
    peri__free(state);
    node->state = NULL;
}

/** Inputs of the node: the ids' weights; with optimizer NONE also the leaf of each table. */
static peri_status lookup_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    lookup_state *state = node->state;
    peri_tbe_input in = {.ids = node->saved[SAVED_IDS],
                         .offsets = node->saved[SAVED_OFFSETS],
                         .weights = node->saved[SAVED_WEIGHTS],
                         .scale = node->saved[SAVED_SCALE],
                         .blocks = state->blocks};
    peri_tensor *grad = NULL, *grad_weights = NULL, *dense = NULL;
    bool leaves = false;
    for (int32_t i = 1; i < node->n_in; i++) leaves = leaves || peri__needs(node, i);
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_contiguous(grad_out[0], &grad), out);
    if (grad->dtype != PERI_F32) {
        peri_tensor *narrow = grad;
        grad = NULL;
        status = peri_tensor_to(narrow, PERI_F32, NULL, &grad);
        peri_tensor_release(narrow);
        PERI_TRY_GOTO(status, out);
    }
    if (node->n_in > 0 && peri__needs(node, 0)) PERI_TRY_GOTO(peri__tensor_like(in.weights, 1, in.weights->shape, &grad_weights), out);
    if (leaves) {
        PERI_TRY_GOTO(peri_tbe_gradient(state->tbe, &in, grad, grad_weights, &dense), out);
        for (int32_t i = 1; i < node->n_in; i++)
            if (peri__needs(node, i)) PERI_TRY_GOTO(peri_tbe_gradient_table(state->tbe, dense, i - 1, &grad_in[i]), out);
    } else {
        PERI_TRY_GOTO(peri_tbe_backward(state->tbe, &in, grad, grad_weights), out);
    }
    if (grad_weights) grad_in[0] = grad_weights;
    grad_weights = NULL;
out:
    peri_tensor_release(grad);
    peri_tensor_release(grad_weights);
    peri_tensor_release(dense);
    return status;
}

static const peri__node_vtab lookup_vtab = {.name = "tbe_lookup", .acts = PERI__UPDATES, .backward = lookup_backward, .fini = lookup_fini};

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

static peri_status lookup_record(peri_tbe *tbe, const peri_tbe_input *in, peri_tensor *out)
{
    if (!peri__grad_enabled()) return PERI_OK;
    peri_tensor **inputs;
    int32_t n;
    PERI_TRY(lookup_inputs(tbe, in, &inputs, &n));
    peri_status status = PERI_OK;
    lookup_state *state = NULL;
    peri__node *node;
    if (tbe->optimizer.kind == PERI_TBE_NONE && !peri__recording(inputs, n)) goto out; /* nobody wants anything */
    state = peri__alloc(sizeof *state);
    if (!state) PERI_TRY_GOTO(PERI_ENOMEM, out);
    PERI_TRY_GOTO(peri__record(&lookup_vtab, inputs, n, &out, 1, &node), out);
    *state = (lookup_state){tbe, in->blocks};
    peri_tbe_retain(tbe);
    peri_tbe_blocks_retain(in->blocks);
    node->state = state;
    state = NULL;
    peri__node_save(node, SAVED_IDS, in->ids);
    peri__node_save(node, SAVED_OFFSETS, in->offsets);
    peri__node_save(node, SAVED_WEIGHTS, in->weights);
    peri__node_save(node, SAVED_SCALE, in->scale);
out:
    peri__free(state);
    peri__free(inputs);
    return status;
}

peri_status peri_tbe_lookup(peri_tbe *tbe, const peri_tbe_input *in, int32_t ndim, const int64_t *shape, peri_tensor **out)
{
    PERI_NEED(in);
    PERI_NEED(tbe);
    PERI_NEED(out);
    PERI_TRY(peri__tbe_input_check("peri_tbe_lookup", tbe, in));
    peri_tensor *t;
    PERI_TRY(peri_tensor_new(tbe->device, tbe->output_dtype, ndim, shape, &t));
    peri_status status = check_out("peri_tbe_lookup", tbe, in, t);
    if (status >= 0 && in->blocks->covered != peri__numel(t)) status = peri__tensor_zero(t);
    if (status >= 0 && peri__grad_enabled()) status = peri__tbe_average(tbe);
    if (status >= 0) status = peri__tbe_checked_forward("peri_tbe_lookup", tbe, in, t);
    if (status >= 0) status = lookup_record(tbe, in, t);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}
