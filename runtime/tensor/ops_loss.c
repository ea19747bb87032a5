/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_loss.c: losses. Their gradients flow to the predictions only.
 */
#include "../base/floats.h"
#include "tensor_internal.h"
#include "../../kernels/dense.h"
#include "../../kernels/elements.h"
#include "../../kernels/sparse.h"

#include <math.h>
#include <perilune/ops.h>

static peri_status check_reduction(const char *function, int32_t reduction)
{
    if (reduction >= PERI_LOSS_NONE && reduction <= PERI_LOSS_SUM) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: reduction %d, allowed: 0 (none), 1 (mean), 2 (sum)", function, reduction);
}

/** Replace the losses of the elements *loss (owned) by their sum or mean, which has no dimension. */
static peri_status reduce_loss(peri_tensor **loss, int32_t reduction)
{
    if (reduction == PERI_LOSS_NONE) return PERI_OK;
    PERI__OWN_FLOATS;
    peri_tensor *total;
    double scale = reduction == PERI_LOSS_MEAN ? 1 / (double)peri__numel(*loss) : 1;
    PERI_TRY(peri__reduce(*loss, (1u << (*loss)->ndim) - 1, scale, &total));
    peri_tensor_release(*loss);
    *loss = total;
    return peri__shaped(loss, 0, NULL);
}

static double gradient_scale(int32_t reduction, int64_t n)
{
    PERI__OWN_FLOATS;
    return reduction == PERI_LOSS_MEAN ? 1 / (double)n : 1;
}

/* -- losses of elements -------------------------------------------------------------------------------------------- */

enum { KEPT_REDUCTION, KEPT_KIND };

/** saved: x, target, weight, pos_weight, contiguous and of one shape. */
static peri_status loss_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *const *saved = node->saved;
    int32_t reduction = (int32_t)node->kept[KEPT_REDUCTION];
    int64_t n = peri__numel(saved[0]);
    peri_tensor *g, *dx = NULL;
    peri_status status;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    PERI_TRY_GOTO(peri__tensor_like(saved[0], saved[0]->ndim, saved[0]->shape, &dx), out);
    peri_k_loss_grad_args args = {.dx = peri__data(dx),
                                  .g = peri__data(g),
                                  .x = peri__data(saved[0]),
                                  .t = peri__data(saved[1]),
                                  .weight = saved[2] ? peri__data(saved[2]) : NULL,
                                  .pos_weight = saved[3] ? peri__data(saved[3]) : NULL,
                                  .dtype = dx->dtype,
                                  .kind = (int32_t)node->kept[KEPT_KIND],
                                  .g_stride = reduction == PERI_LOSS_NONE,
                                  .scale = gradient_scale(reduction, n)};
    status = PERI_LAUNCH(peri__device(dx), loss_grad, &args, n, 1 << 12);
out:
    peri_tensor_release(g);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab loss_vtab = {.name = "loss", .backward = loss_backward};

/** @t repeated to the shape of @x and contiguous. */
static peri_status spread(const char *function, const char *what, const peri_tensor *x, peri_tensor *t,
                          peri_tensor **out)
{
    char text[300];
    int64_t stride[PERI_MAX_DIMS];
    PERI_TRY(peri__check_tensor(function, what, t, x->dtype, -1));
    PERI_TRY(peri__check_same_device(function, x, t));
    if (peri__expanded(function, t, x->ndim, x->shape, stride) < 0)
        return peri__fail(PERI_EINVAL, "%s: x and %s are %s; %s must broadcast to x", function, what,
                          peri__pair_text(x, t, text, sizeof text), what);
    peri_tensor *view;
    PERI_TRY(peri__tensor_view(t, x->ndim, x->shape, stride, t->offset, &view));
    peri_status status = peri__contiguous_of(view, out);
    peri_tensor_release(view);
    return status;
}

/** The error about the first element of @x (contiguous) outside [0, 1], if there is one. NaN has no sign there. */
static peri_status check_probabilities(const char *function, const char *what, peri_tensor *x)
{
    peri_tensor *wide = NULL;
    double *numbers = NULL;
    peri_status status;
    int64_t n = peri__numel(x);
    PERI_TRY_GOTO(peri_tensor_new(peri__device(x), PERI_F64, x->ndim, x->shape, &wide), out);
    PERI_TRY_GOTO(peri_tensor_copy(wide, x), out);
    numbers = peri__alloc(sizeof *numbers * (size_t)n);
    status = numbers ? peri_tensor_read(wide, numbers, n * (int64_t)sizeof *numbers) : PERI_ENOMEM;
    for (int64_t i = 0; i < n && status >= 0; i++)
        if (!(numbers[i] >= 0 && numbers[i] <= 1))
            status = peri__fail(PERI_ERANGE, "%s: element %lld of %s is %g, allowed: probabilities 0..1", function,
                                (long long)i, what, numbers[i] == numbers[i] ? numbers[i] : (double)NAN);
out:
    peri__free(numbers);
    peri_tensor_release(wide);
    return status;
}

/** Wait for the losses of probabilities @x and @target (contiguous). Of one outside [0, 1] the loss is NaN, and so is
 *  their sum or mean @loss. NaN of another cause passes. */
static peri_status check_bce(const char *function, peri_tensor *x, peri_tensor *target, peri_tensor *loss)
{
    peri_tensor *total;
    double sum = 0;
    PERI_TRY(peri__reduce(loss, (1u << loss->ndim) - 1, 1, &total));
    peri_status status = peri__numel(x) > 0 ? peri_tensor_item(total, 0, &sum) : PERI_OK;
    peri_tensor_release(total);
    if (status < 0 || sum == sum) return status;
    PERI_TRY(check_probabilities(function, "x", x));
    return check_probabilities(function, "target", target);
}

static peri_status loss_wide(const char *function, int32_t kind, peri_tensor *x, peri_tensor *target,
                             peri_tensor *weight, peri_tensor *pos_weight, int32_t reduction, peri_tensor **out)
{
    char text[300];
    PERI_TRY(peri__check_float(function, "x", x));
    if (!out) return peri__fail(PERI_EINVAL, "%s: out is missing", function);
    PERI_TRY(peri__check_tensor(function, "target", target, x->dtype, -1));
    PERI_TRY(check_reduction(function, reduction));
    if (x->ndim != target->ndim || memcmp(x->shape, target->shape, sizeof *x->shape * (size_t)x->ndim) != 0)
        return peri__fail(PERI_EINVAL, "%s: x and target are %s; their shapes must agree", function,
                          peri__pair_text(x, target, text, sizeof text));
    if (target->requires_grad)
        return peri__fail(PERI_EUNSUPPORTED, "%s: the target requires grad; detach it", function);
    if (weight && peri__recording(&weight, 1))
        return peri__fail(PERI_EUNSUPPORTED,
                          "%s: the weight requires grad, and gets none here; detach it, or multiply losses by it "
                          "(reduction none)",
                          function);
    if (pos_weight && peri__recording(&pos_weight, 1))
        return peri__fail(PERI_EUNSUPPORTED, "%s: the pos_weight requires grad, and gets none here; detach it",
                          function);
    peri_tensor *saved[4] = {NULL}, *loss = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY_GOTO(peri__contiguous_of(x, &saved[0]), out);
    PERI_TRY_GOTO(spread(function, "target", x, target, &saved[1]), out);
    if (weight) PERI_TRY_GOTO(spread(function, "weight", x, weight, &saved[2]), out);
    if (pos_weight) PERI_TRY_GOTO(spread(function, "pos_weight", x, pos_weight, &saved[3]), out);
    PERI_TRY_GOTO(peri__tensor_like(x, x->ndim, x->shape, &loss), out);
    peri_k_loss_args args = {.dst = peri__data(loss),
                             .x = peri__data(saved[0]),
                             .t = peri__data(saved[1]),
                             .weight = weight ? peri__data(saved[2]) : NULL,
                             .pos_weight = pos_weight ? peri__data(saved[3]) : NULL,
                             .dtype = x->dtype,
                             .kind = kind};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), loss, &args, peri__numel(x), 1 << 12), out);
    PERI_TRY_GOTO(reduce_loss(&loss, reduction), out);
    if (kind == PERI_LOSS_KIND_BCE) PERI_TRY_GOTO(check_bce(function, saved[0], saved[1], loss), out);
    PERI_TRY_GOTO(peri__attach(&loss_vtab, &x, 1, &loss, 1, &node), out);
    if (node) {
        for (int32_t i = 0; i < 4 && status >= 0; i++)
            if (saved[i]) status = peri__node_save_output(node, i, saved[i]);
        node->name = function;
        node->kept[KEPT_KIND] = kind;
        node->kept[KEPT_REDUCTION] = reduction;
    }
out:
    for (int32_t i = 0; i < 4; i++) peri_tensor_release(saved[i]);
    if (status < 0) peri_tensor_release(loss);
    else *out = loss;
    return status;
}

static peri_status element_loss(const char *function, int32_t kind, peri_tensor *x, peri_tensor *target,
                                peri_tensor *weight, peri_tensor *pos_weight, int32_t reduction, peri_tensor **out)
{
    peri__operands o;
    peri_tensor *in[4] = {x, target, weight, pos_weight};
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, in, 4));
    return peri__narrow(
        &o, loss_wide(function, kind, o.in[0], o.in[1], o.in[2], o.in[3], reduction, out ? &o.out : NULL), out);
}

peri_status peri_op_bce_with_logits(peri_tensor *x, peri_tensor *target, peri_tensor *weight, peri_tensor *pos_weight,
                                    int32_t reduction, peri_tensor **out)
{
    return element_loss("peri_op_bce_with_logits", PERI_LOSS_KIND_BCE_LOGITS, x, target, weight, pos_weight, reduction,
                        out);
}

peri_status peri_op_bce(peri_tensor *x, peri_tensor *target, peri_tensor *weight, int32_t reduction, peri_tensor **out)
{
    return element_loss("peri_op_bce", PERI_LOSS_KIND_BCE, x, target, weight, NULL, reduction, out);
}

peri_status peri_op_mse(peri_tensor *x, peri_tensor *target, int32_t reduction, peri_tensor **out)
{
    return element_loss("peri_op_mse", PERI_LOSS_KIND_MSE, x, target, NULL, NULL, reduction, out);
}

/* -- cross entropy ------------------------------------------------------------------------------------------------- */

enum { X, LABELS, LSE, WEIGHT, COUNT, SAVED };                 /* what a cross entropy saves */
enum { KEPT_IGNORES = KEPT_REDUCTION + 1, KEPT_IGNORED };

static peri_k_class_shares class_shares(const peri__node *node)
{
    return (peri_k_class_shares){.weight = node->saved[WEIGHT] ? peri__data(node->saved[WEIGHT]) : NULL,
                                 .smoothing = node->number[0],
                                 .ignores = node->kept[KEPT_IGNORES],
                                 .ignored = node->kept[KEPT_IGNORED]};
}

/** saved: x, labels, lse, weight (or NULL), what the losses' sum was divided by (or NULL); number: smoothing. */
static peri_status cross_entropy_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    peri_tensor *x = node->saved[X], *g = NULL, *dx = NULL;
    int32_t reduction = (int32_t)node->kept[KEPT_REDUCTION];
    peri_status status;
    if (node->saved[COUNT])
        PERI_TRY(peri__binary("cross_entropy backward", PERI_BINARY_DIV, grad_out[0], node->saved[COUNT], &g));
    else PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    PERI_TRY_GOTO(peri__tensor_like(x, 2, x->shape, &dx), out);
    peri_k_cross_entropy_grad_args args = {
        .dx = peri__data(dx),
        .g = peri__data(g),
        .x = peri__data(x),
        .lse = peri__data(node->saved[LSE]),
        .labels = peri__data(node->saved[LABELS]),
        .dtype = x->dtype,
        .classes = x->shape[1],
        .g_stride = reduction == PERI_LOSS_NONE,
        .scale = node->saved[COUNT] ? 1 : gradient_scale(reduction, x->shape[0]),
        .of = class_shares(node)};
    status = PERI_LAUNCH(peri__device(x), cross_entropy_grad, &args, x->shape[0],
                         peri__ceil_div(4096, peri__max(x->shape[1], 1)));
out:
    peri_tensor_release(g);
    if (status < 0) peri_tensor_release(dx);
    else grad_in[0] = dx;
    return status;
}

static const peri__node_vtab cross_entropy_vtab = {.name = "cross_entropy", .backward = cross_entropy_backward};

/** *out (new) = labels with 0 for those that are ignored. */
static peri_status without_ignored(peri_tensor *labels, int64_t ignored, peri_tensor **out)
{
    static const char *const function = "peri_op_cross_entropy";
    peri_tensor *counts;
    PERI_TRY(peri__compare(function, PERI_COMPARE_NE, labels, NULL, (double)ignored, ignored, &counts));
    peri_status status = peri__where(function, counts, labels, NULL, out);
    peri_tensor_release(counts);
    return status;
}

/** Wait for the labels and look for one outside 0..classes-1. */
static peri_status check_labels(peri_tensor *labels, int64_t classes)
{
    int64_t one = 1, bad = INT64_MAX;
    double label;
    peri_tensor *found;
    PERI_TRY(peri_tensor_new(peri__device(labels), PERI_I64, 1, &one, &found));
    peri_op_index_check args = {
        .x = peri__data(labels), .bad = peri__data(found), .n = labels->shape[0], .limit = classes, .dtype = PERI_I64};
    peri_status status = PERI_RUN(peri__device(labels), index_check, &args);
    if (status >= 0) status = peri_tensor_read(found, &bad, 8);
    peri_tensor_release(found);
    if (status < 0 || bad == INT64_MAX) return status;
    PERI_TRY(peri_tensor_item(labels, bad, &label));
    return peri__fail(PERI_ERANGE, "peri_op_cross_entropy: label %.0f in row %lld, allowed: 0..%lld", label,
                      (long long)bad, (long long)classes - 1);
}

static peri_status check_rows(const char *function, peri_tensor *x, peri_tensor *labels, int32_t reduction,
                              const peri_cross_entropy_config *how)
{
    char text[300];
    PERI_TRY(peri__check_float(function, "x", x));
    PERI_TRY(peri__check_tensor(function, "x", x, -1, 2));
    PERI_TRY(peri__check_tensor(function, "labels", labels, PERI_I64, 1));
    PERI_TRY(peri__check_same_device(function, x, labels));
    PERI_TRY(check_reduction(function, reduction));
    if (x->shape[0] != labels->shape[0])
        return peri__fail(PERI_EINVAL, "%s: x and labels are %s; their first sizes must agree", function,
                          peri__pair_text(x, labels, text, sizeof text));
    if (!(how->label_smoothing >= 0 && how->label_smoothing <= 1))
        return peri__fail(PERI_EINVAL, "%s: label_smoothing is %g, allowed: 0..1", function, how->label_smoothing);
    if (!how->weight) return PERI_OK;
    PERI_TRY(peri__check_real(function, "weight", how->weight));
    PERI_TRY(peri__check_same_device(function, x, how->weight));
    if (peri__recording(&how->weight, 1))
        return peri__fail(PERI_EUNSUPPORTED, "%s: the weight requires grad, and gets none here; detach it", function);
    if (how->weight->ndim == 1 && how->weight->shape[0] == x->shape[1]) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: x and weight are %s; wanted a weight for each class", function,
                      peri__pair_text(x, how->weight, text, sizeof text));
}

/** What the kernel needs, contiguous: x, labels, weight, and room for lse and, where rows count differently, for what
 *  each counts. @checked: the labels are known to be classes; else this waits for them. */
static peri_status take_rows(peri_tensor *x, peri_tensor *labels, const peri_cross_entropy_config *how, bool checked,
                             peri_tensor **saved)
{
    PERI__HELD peri_tensor *known = NULL, *cast = NULL;
    PERI_TRY(peri__contiguous_of(x, &saved[X]));
    PERI_TRY(peri__contiguous_of(labels, &saved[LABELS]));
    if (how->ignores) PERI_TRY(without_ignored(saved[LABELS], how->ignore_index, &known));
    if (!checked) PERI_TRY(check_labels(known ? known : saved[LABELS], x->shape[1]));
    PERI_TRY(peri__tensor_like(x, 1, x->shape, &saved[LSE]));
    if (how->weight) {
        PERI_TRY(peri__cast(how->weight, x->dtype, &cast));
        PERI_TRY(peri__contiguous_of(cast, &saved[WEIGHT]));
    }
    return how->weight || how->ignores ? peri__tensor_like(x, 1, x->shape, &saved[COUNT]) : PERI_OK;
}

/** Replace the losses of rows *loss (owned) by their sum or mean. *counts: what each row counts, or NULL: 1; becomes
 *  the sum that a mean was divided by, or NULL. */
static peri_status reduce_rows(peri_tensor **loss, int32_t reduction, peri_tensor **counts)
{
    const bool divides = *counts && reduction == PERI_LOSS_MEAN;
    peri_tensor *mean;
    PERI_TRY(reduce_loss(loss, divides ? PERI_LOSS_SUM : reduction));
    if (!divides) {
        peri_tensor_release(*counts);
        *counts = NULL;
        return PERI_OK;
    }
    PERI_TRY(reduce_loss(counts, PERI_LOSS_SUM));
    PERI_TRY(peri__binary("peri_op_cross_entropy", PERI_BINARY_DIV, *loss, *counts, &mean));
    peri_tensor_release(*loss);
    *loss = mean;
    return PERI_OK;
}

static peri_status cross_entropy(peri_tensor *x, peri_tensor *labels, const peri_cross_entropy_config *how,
                                 bool checked, int32_t reduction, peri_tensor **out)
{
    peri_tensor *saved[SAVED] = {NULL}, *loss = NULL;
    peri__node *node;
    peri_status status;
    PERI_TRY(check_rows("peri_op_cross_entropy", x, labels, reduction, how));
    PERI_TRY_GOTO(take_rows(x, labels, how, checked, saved), out);
    PERI_TRY_GOTO(peri__tensor_like(x, 1, x->shape, &loss), out);
    peri_k_cross_entropy_args args = {.loss = peri__data(loss),
                                      .lse = peri__data(saved[LSE]),
                                      .counts = saved[COUNT] ? peri__data(saved[COUNT]) : NULL,
                                      .x = peri__data(saved[X]),
                                      .labels = peri__data(saved[LABELS]),
                                      .dtype = x->dtype,
                                      .classes = x->shape[1],
                                      .of = {.weight = saved[WEIGHT] ? peri__data(saved[WEIGHT]) : NULL,
                                             .smoothing = how->label_smoothing,
                                             .ignores = how->ignores,
                                             .ignored = how->ignore_index}};
    PERI_TRY_GOTO(PERI_LAUNCH(peri__device(x), cross_entropy, &args, x->shape[0],
                              peri__ceil_div(4096, peri__max(x->shape[1], 1))),
                  out);
    PERI_TRY_GOTO(reduce_rows(&loss, reduction, &saved[COUNT]), out);
    PERI_TRY_GOTO(peri__attach(&cross_entropy_vtab, &x, 1, &loss, 1, &node), out);
    if (node) {
        for (int32_t i = 0; i < SAVED && status >= 0; i++)
            if (saved[i]) status = peri__node_save_output(node, i, saved[i]);
        node->kept[KEPT_REDUCTION] = reduction;
        node->kept[KEPT_IGNORES] = how->ignores;
        node->kept[KEPT_IGNORED] = how->ignore_index;
        node->number[0] = how->label_smoothing;
    }
out:
    for (int32_t i = 0; i < SAVED; i++) peri_tensor_release(saved[i]);
    if (status < 0) peri_tensor_release(loss);
    else *out = loss;
    return status;
}

peri_status peri_op_cross_entropy_with(peri_tensor *x, peri_tensor *labels, const peri_cross_entropy_config *config,
                                       int32_t reduction, peri_tensor **out)
{
    peri__operands o;
    PERI__NOT_AT_BORDER;
    PERI_TAKE(peri_cross_entropy_config, config);
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, &x, 1));
    return peri__narrow(&o, cross_entropy(o.in[0], labels, config, false, reduction, out ? &o.out : NULL), out);
}

peri_status peri_op_cross_entropy(peri_tensor *x, peri_tensor *labels, int32_t reduction, peri_tensor **out)
{
    const peri_cross_entropy_config plain = {.size = sizeof plain};
    return peri_op_cross_entropy_with(x, labels, &plain, reduction, out);
}

/* -- logits of a batch --------------------------------------------------------------------------------------------- */

/** *out (new) = @x, contiguous, by the kernel; @ids and @log_q, contiguous, may be NULL. */
static peri_status in_batch(const peri_tensor *x, const peri_tensor *ids, const peri_tensor *log_q, double scale,
                            double fill, peri_tensor **out)
{
    const int64_t n = x->shape[0];
    PERI__HELD peri_tensor *y = NULL;
    PERI_TRY(peri__tensor_like(x, 2, x->shape, &y));
    peri_k_in_batch_logits_args args = {.dst = peri__data(y),
                                        .x = peri__data(x),
                                        .log_q = log_q ? peri__data(log_q) : NULL,
                                        .ids = ids ? peri__data(ids) : NULL,
                                        .dtype = x->dtype,
                                        .n = n,
                                        .scale = scale,
                                        .fill = fill};
    PERI_TRY(PERI_LAUNCH(peri__device(x), in_batch_logits, &args, n, peri__ceil_div(1 << 14, peri__max(n, 1))));
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/** saved: the ids, or NULL; number: the scale. */
static peri_status in_batch_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    PERI__HELD peri_tensor *g = NULL, *each = NULL;
    PERI_TRY(peri__contiguous_of(grad_out[0], &g));
    if (peri__needs(node, 0)) PERI_TRY(in_batch(g, node->saved[0], NULL, node->number[0], 0, &grad_in[0]));
    if (!peri__needs(node, 1)) return PERI_OK;
    PERI_TRY(in_batch(g, node->saved[0], NULL, 1, 0, &each));
    PERI_TRY(peri__reduce(each, 1, -1, &grad_in[1]));
    return peri__shaped(&grad_in[1], 1, g->shape);
}

static const peri__node_vtab in_batch_vtab = {.name = "in_batch_logits", .backward = in_batch_backward};

/** @what, which has a number for each of @n items. */
static peri_status check_items(const char *function, const char *what, const peri_tensor *x, const peri_tensor *t)
{
    char text[300];
    PERI_TRY(peri__check_tensor(function, what, t, -1, -1));
    PERI_TRY(peri__check_same_device(function, x, t));
    if (t->ndim == 1 && t->shape[0] == x->shape[0]) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: x and %s are %s; a number for each item is wanted", function, what,
                      peri__pair_text(x, t, text, sizeof text));
}

/** *out (new, recorded) = the logits by the kernel. x [n, n] and log_q are of one dtype, f32 or f64. */
static peri_status in_batch_logits(const char *function, peri_tensor *x, peri_tensor *ids, peri_tensor *log_q,
                                   double scale, peri_tensor **out)
{
    char text[300];
    PERI__HELD peri_tensor *flat = NULL, *wide = NULL, *names = NULL, *q = NULL, *y = NULL;
    peri_tensor *in[2] = {x, log_q};
    peri__node *node;
    PERI_TRY(peri__check_float(function, "x", x));
    if (ids) PERI_TRY(check_items(function, "ids", x, ids));
    if (ids && !peri__is_integer(ids->dtype))
        return peri__fail(PERI_EINVAL, "%s: ids are %s, allowed: integers", function,
                          peri__tensor_text(ids, text, sizeof text));
    if (log_q) PERI_TRY(check_items(function, "log_q", x, log_q));
    if (log_q) PERI_TRY(peri__check_tensor(function, "log_q", log_q, x->dtype, -1));
    if (ids) PERI_TRY(peri__cast(ids, PERI_I64, &wide));
    if (ids) PERI_TRY(peri__contiguous_of(wide, &names));
    if (log_q) PERI_TRY(peri__contiguous_of(log_q, &q));
    PERI_TRY(peri__contiguous_of(x, &flat));
    PERI_TRY(in_batch(flat, names, q, scale, -INFINITY, &y));
    PERI_TRY(peri__attach(&in_batch_vtab, in, 2, &y, 1, &node));
    if (node) {
        if (names) peri__node_save(node, 0, names);
        node->number[0] = scale;
    }
    *out = peri__hand_over(&y);
    return PERI_OK;
}

/** x, the products of queries and items, and log_q of one dtype, f32 or f64. */
static peri_status in_batch_softmax(const char *function, peri_tensor *x, peri_tensor *ids, peri_tensor *log_q,
                                    double scale, int32_t reduction, peri_tensor **out)
{
    const peri_cross_entropy_config plain = {.size = sizeof plain};
    PERI__HELD peri_tensor *logits = NULL, *own = NULL;
    PERI_TRY(in_batch_logits(function, x, ids, log_q, scale, &logits));
    PERI_TRY(peri_tensor_arange(peri__device(x), PERI_I64, 0, 1, x->shape[0], &own));
    return cross_entropy(logits, own, &plain, true, reduction, out);
}

peri_status peri_op_in_batch_softmax(peri_tensor *queries, peri_tensor *items, peri_tensor *ids, peri_tensor *log_q,
                                     double scale, int32_t reduction, peri_tensor **out)
{
    static const char *const function = "peri_op_in_batch_softmax";
    char text[300];
    PERI__HELD peri_tensor *columns = NULL, *products = NULL, *wide = NULL;
    peri__operands o;
    PERI_NEED(out);
    PERI_TRY(peri__check_real(function, "queries", queries));
    PERI_TRY(peri__check_real(function, "items", items));
    if (log_q) PERI_TRY(peri__check_tensor(function, "log_q", log_q, -1, -1));
    if (queries->ndim != 2 || items->ndim != 2 || queries->shape[0] != items->shape[0])
        return peri__fail(PERI_EINVAL, "%s: queries and items are %s, wanted two dimensions each and as many rows",
                          function, peri__pair_text(queries, items, text, sizeof text));
    PERI_TRY(peri_tensor_transpose(items, 0, 1, &columns));
    PERI_TRY(peri_op_matmul(queries, columns, &products));
    PERI_TRY(peri__widen_operands(&o, PERI__IN_F32, (peri_tensor *[]){products, log_q}, 2));
    peri_status status = PERI_OK;
    if (log_q && o.in[1]->dtype != o.in[0]->dtype) status = peri_tensor_to(o.in[1], o.in[0]->dtype, NULL, &wide);
    if (status >= 0)
        status = in_batch_softmax(function, o.in[0], ids, wide ? wide : o.in[1], scale, reduction, &o.out);
    return peri__narrow(&o, status, out);
}
