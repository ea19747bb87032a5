/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_formula.c: functions of elements that are several steps long, computed in one pass (the kernel `formula`), and
 * the sum or mean of what they give.
 *
 * Their gradients are formulas, too. A backward pass computes the steps again and then, from the last one to the first,
 * what each step adds to the gradients of its operands:
 *
 *   forward    d = t - target          y = |d|
 *   backward   d = t - target   dd = dy * sign(d)   dt = dd   dtarget = -dd
 */
#include "capture.h"
#include "../base/floats.h"
#include "../../kernels/dense.h"

#include <perilune/ops.h>

enum { REGISTERS = PERI_FORMULA_INPUTS + PERI_FORMULA_STEPS, MOST_INPUTS = PERI_FORMULA_INPUTS - 1 };

/* -- names --------------------------------------------------------------------------------------------------------- */

/** A code of peri_formula_code is the kind of a step times this, plus its op. */
enum { KIND = 256 };

int32_t peri_formula_code(const char *name)
{
    static const char *const unary[] = PERI_UNARY_NAMES;
    static const char *const binary[] = {"add", "sub", "mul", "div", "maximum", "minimum"};
    static const char *const compare[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    if (!name) return -1;
    for (int32_t i = 0; i < PERI_UNARY_COUNT; i++)
        if (!strcmp(name, unary[i])) return PERI_FORMULA_UNARY * KIND + i;
    for (int32_t i = 0; i <= PERI_BINARY_LAST_PLAIN; i++)
        if (!strcmp(name, binary[i])) return PERI_FORMULA_BINARY * KIND + i;
    for (int32_t i = 0; i < PERI_COMPARE_COUNT; i++)
        if (!strcmp(name, compare[i])) return PERI_FORMULA_COMPARE * KIND + i;
    if (!strcmp(name, "where")) return PERI_FORMULA_WHERE * KIND;
    return !strcmp(name, "number") ? PERI_FORMULA_NUMBER * KIND : -1;
}

/** Which of a, b and c a kind of step reads: that many from the first on. */
static int32_t operands_of(int32_t kind)
{
    switch (kind) {
    case PERI_FORMULA_UNARY: return 1;
    case PERI_FORMULA_CHAIN:
    case PERI_FORMULA_BINARY:
    case PERI_FORMULA_COMPARE: return 2;
    case PERI_FORMULA_WHERE: return 3;
    default: return 0;
    }
}

/** The steps of the kernel with the numbers in them. */
static peri_status steps_of(const char *function, const peri_formula *f, peri_k_formula_step *steps)
{
    const int32_t numbers = f->n_numbers;
    for (int32_t k = 0; k < f->n_steps; k++) {
        const int32_t *s = f->steps + 6 * k, kind = s[0] / KIND, op = s[0] % KIND;
        bool good = s[0] >= 0 &&
            ((kind == PERI_FORMULA_UNARY && op < PERI_UNARY_COUNT) ||
             (kind == PERI_FORMULA_BINARY && op <= PERI_BINARY_LAST_PLAIN) ||
             (kind == PERI_FORMULA_COMPARE && op < PERI_COMPARE_COUNT) ||
             ((kind == PERI_FORMULA_WHERE || kind == PERI_FORMULA_NUMBER) && op == 0));
        for (int32_t i = 0; good && i < operands_of(kind); i++) good = s[1 + i] >= 0 && s[1 + i] < f->n_in + k;
        for (int32_t i = 4; i < 6; i++) good = good && s[i] >= 0 && s[i] < peri__max(numbers, 1);
        if (!good)
            return peri__fail(PERI_EINVAL, "%s: step %d is {%d, %d, %d, %d, %d, %d}, allowed: a code of "
                              "peri_formula_code, registers before %d, and two of %d numbers", function, k, s[0], s[1],
                              s[2], s[3], s[4], s[5], f->n_in + k, numbers);
        steps[k] = (peri_k_formula_step){.kind = (uint8_t)kind,
                                         .op = (uint8_t)op,
                                         .a = (uint8_t)s[1],
                                         .b = (uint8_t)s[2],
                                         .c = (uint8_t)s[3],
                                         .x = numbers ? f->numbers[s[4]] : 0,
                                         .y = numbers ? f->numbers[s[5]] : 0};
    }
    return PERI_OK;
}

static peri_status check_formula(const char *function, const peri_formula *f, peri_tensor *const *in)
{
    if (f->n_in < 1 || f->n_in > MOST_INPUTS || f->n_steps < 1 || f->n_steps > PERI_FORMULA_STEPS)
        return peri__fail(PERI_EINVAL, "%s: %d inputs and %d steps, allowed: 1..%d and 1..%d", function, f->n_in,
                          f->n_steps, MOST_INPUTS, PERI_FORMULA_STEPS);
    if (!f->steps || f->n_numbers < 0 || (f->n_numbers > 0 && !f->numbers))
        return peri__fail(PERI_EINVAL, "%s: the steps or the %d numbers are missing", function, f->n_numbers);
    if (f->reduction < PERI_LOSS_NONE || f->reduction > PERI_LOSS_SUM)
        return peri__fail(PERI_EINVAL, "%s: reduction %d, allowed: 0 (none), 1 (mean), 2 (sum)", function,
                          f->reduction);
    return peri__check_list(function, "the inputs", in, f->n_in);
}

/* -- one pass ------------------------------------------------------------------------------------------------------ */

/** Set all of @k before its steps but the results: the inputs @in[n], broadcast to @shape[ndim]. */
static peri_status put_inputs(const char *function, peri_k_formula_args *k, peri_tensor *const *in, int32_t n,
                              int32_t ndim, const int64_t *shape)
{
    int64_t *strides[PERI_FORMULA_INPUTS];
    memset(k->dst, 0, sizeof k->dst);
    memset(k->in, 0, sizeof k->in);
    memset(k->stride, 0, sizeof k->stride);
    memset(k->shape, 0, sizeof k->shape);
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri__expanded(function, in[i], ndim, shape, k->stride[i]));
        k->in[i] = peri__data(in[i]);
        strides[i] = k->stride[i];
    }
    memcpy(k->shape, shape, sizeof *shape * (size_t)ndim);
    k->n_in = n;
    k->dtype = in[0]->dtype;
    k->ndim = peri__fold(ndim, k->shape, strides, n);
    return PERI_OK;
}

/** Launch @k, whose inputs and steps are there: *out[i] (new) of @shape[ndim] gets register k->result[i]. */
static peri_status pass(peri_k_formula_args *k, const peri_tensor *like, int32_t ndim, const int64_t *shape,
                        peri_tensor **out)
{
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < k->n_results && status >= 0; i++) {
        out[i] = NULL;
        status = peri__tensor_like(like, ndim, shape, &out[i]);
        if (status >= 0) k->dst[i] = peri__data(out[i]);
    }
    int64_t n = 1;
    for (int32_t d = 0; d < ndim; d++) n *= shape[d];
    const int64_t grain = peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(k->n_steps, 1)); /* a gradient may have none */
    /* No kernel reads the steps behind the last one; a recording looks for addresses in all bytes. */
    if (peri__device_is_captured(peri__device(like)))
        memset(k->step + k->n_steps, 0, sizeof *k->step * (size_t)(PERI_FORMULA_STEPS - k->n_steps));
    if (status >= 0) status = PERI_LAUNCH(peri__device(like), formula, k, n, grain);
    for (int32_t i = 0; i < k->n_results && status < 0; i++) peri_tensor_release(out[i]);
    return status;
}

/* -- the gradient -------------------------------------------------------------------------------------------------- */

/** What a recorded formula keeps. */
typedef struct kept {
    char name[48];
    int32_t n_in, n_steps, ndim;
    uint32_t mask; /* dimensions that were added up */
    double scale;  /* what their sum was multiplied by */
    bool reduced;
    peri_k_formula_step step[];
} kept;

static void kept_free(peri__node *node)
{
    peri__free(node->state);
    node->state = NULL; /* a node that a pass has spent comes here again when it is released */
}

/** A formula that is being written: its steps write registers from n_in on. */
typedef struct writer {
    peri_k_formula_step step[3 * PERI_FORMULA_STEPS];
    int32_t n_in, n;
    bool full;                /* a step was left out, since there are too many */
    int32_t grad[REGISTERS];  /* register of each forward register's gradient, or -1 */
    bool wanted[REGISTERS];   /* whether somebody wants it */
    int32_t zero;             /* a register that is 0, or -1 */
} writer;

static int32_t append_step(writer *w, int32_t kind, int32_t op, int32_t a, int32_t b, int32_t c, double x, double y)
{
    if (w->n == 3 * PERI_FORMULA_STEPS) {
        w->full = true;
        return 0;
    }
    w->step[w->n] = (peri_k_formula_step){.kind = (uint8_t)kind, .op = (uint8_t)op, .a = (uint8_t)a, .b = (uint8_t)b,
                                          .c = (uint8_t)c, .x = x, .y = y};
    return w->n_in + w->n++;
}

static int32_t write_binary(writer *w, int32_t op, int32_t a, int32_t b)
{
    return append_step(w, PERI_FORMULA_BINARY, op, a, b, 0, 0, 0);
}

static int32_t write_zero(writer *w)
{
    if (w->zero < 0) w->zero = append_step(w, PERI_FORMULA_NUMBER, 0, 0, 0, 0, 0, 0);
    return w->zero;
}

/** Register @r gets the gradient in register @g beside what it has. */
static void add_grad(writer *w, int32_t r, int32_t g)
{
    w->grad[r] = w->grad[r] < 0 ? g : write_binary(w, PERI_BINARY_ADD, w->grad[r], g);
}

static int32_t append_negative(writer *w, int32_t g)
{
    return append_step(w, PERI_FORMULA_UNARY, PERI_UNARY_AFFINE, g, 0, 0, -1, 0);
}

/** The part of gradient @g of @a op @b, which is register @y, that @a (@first) or @b gets. */
static int32_t binary_grad(writer *w, int32_t op, int32_t a, int32_t b, int32_t y, int32_t g, bool first)
{
    const int32_t own = first ? a : b, other = first ? b : a;
    switch (op) {
    case PERI_BINARY_ADD: return g;
    case PERI_BINARY_SUB: return first ? g : append_negative(w, g);
    case PERI_BINARY_MUL: return write_binary(w, PERI_BINARY_MUL, g, other);
    case PERI_BINARY_DIV:
        if (first) return write_binary(w, PERI_BINARY_DIV, g, b);
        return append_negative(w, write_binary(w, PERI_BINARY_DIV, write_binary(w, PERI_BINARY_MUL, g, y), b));
    default: break; /* of extremes nothing where the other one is it, half where both are */
    }
    const int32_t loses = op == PERI_BINARY_MAX ? PERI_COMPARE_LT : PERI_COMPARE_GT;
    const int32_t lost = append_step(w, PERI_FORMULA_COMPARE, loses, own, other, 0, 0, 0);
    const int32_t equal = append_step(w, PERI_FORMULA_COMPARE, PERI_COMPARE_EQ, a, b, 0, 0, 0);
    const int32_t half = append_step(w, PERI_FORMULA_UNARY, PERI_UNARY_AFFINE, g, 0, 0, 0.5, 0);
    const int32_t won = append_step(w, PERI_FORMULA_WHERE, 0, lost, write_zero(w), g, 0, 0);
    return append_step(w, PERI_FORMULA_WHERE, 0, equal, half, won, 0, 0);
}

/** What forward step @s, which wrote register @y, adds to the gradients of its operands. */
static void write_grads(writer *w, const peri_k_formula_step *s, int32_t y)
{
    const int32_t g = w->grad[y];
    if (s->kind == PERI_FORMULA_UNARY && w->wanted[s->a]) {
        const int32_t saved = s->op <= PERI_UNARY_FROM_OUTPUT ? y : s->a;
        add_grad(w, s->a, append_step(w, PERI_FORMULA_CHAIN, s->op, g, saved, 0, s->x, s->y));
    } else if (s->kind == PERI_FORMULA_BINARY) {
        if (w->wanted[s->a]) add_grad(w, s->a, binary_grad(w, s->op, s->a, s->b, y, g, true));
        if (w->wanted[s->b]) add_grad(w, s->b, binary_grad(w, s->op, s->a, s->b, y, g, false));
    } else if (s->kind == PERI_FORMULA_WHERE) {
        if (w->wanted[s->b]) add_grad(w, s->b, append_step(w, PERI_FORMULA_WHERE, 0, s->a, g, write_zero(w), 0, 0));
        if (w->wanted[s->c]) add_grad(w, s->c, append_step(w, PERI_FORMULA_WHERE, 0, s->a, write_zero(w), g, 0, 0));
    }
}

/** Write the formula of the gradients of @node. Its inputs are those of the node and then the gradient that flows back,
 *  so that forward registers behind the inputs are one further on. */
static void write_backward(writer *w, const peri__node *node, const kept *s)
{
    *w = (writer){.n_in = s->n_in + 1, .zero = -1};
    for (int32_t r = 0; r < REGISTERS; r++) w->grad[r] = -1;
    for (int32_t i = 0; i < s->n_in; i++) w->wanted[i] = peri__needs(node, i);
    for (int32_t k = 0; k < s->n_steps; k++) {
        peri_k_formula_step t = s->step[k];
        t.a = (uint8_t)(t.a + (t.a >= s->n_in)), t.b = (uint8_t)(t.b + (t.b >= s->n_in));
        t.c = (uint8_t)(t.c + (t.c >= s->n_in));
        const int32_t y = append_step(w, t.kind, t.op, t.a, t.b, t.c, t.x, t.y);
        w->wanted[y] = (t.kind == PERI_FORMULA_UNARY && w->wanted[t.a]) ||
            (t.kind == PERI_FORMULA_BINARY && (w->wanted[t.a] || w->wanted[t.b])) ||
            (t.kind == PERI_FORMULA_WHERE && (w->wanted[t.b] || w->wanted[t.c]));
    }
    const int32_t last = s->n_in + s->n_steps; /* the register of the result */
    w->grad[last] = s->scale == 1 ? s->n_in
                                  : append_step(w, PERI_FORMULA_UNARY, PERI_UNARY_AFFINE, s->n_in, 0, 0, s->scale, 0);
    for (int32_t k = s->n_steps - 1; k >= 0; k--)
        if (w->grad[s->n_in + 1 + k] >= 0) {
            const peri_k_formula_step t = w->step[k];
            write_grads(w, &t, s->n_in + 1 + k);
        }
}

/** Steps of @w that lead to one of @result[n] go to @k, with registers one behind the other; results become theirs. */
static peri_status keep_needed(const writer *w, int32_t *result, int32_t n, peri_k_formula_args *k)
{
    bool needed[PERI_FORMULA_INPUTS + 3 * PERI_FORMULA_STEPS] = {false};
    uint8_t place[PERI_FORMULA_INPUTS + 3 * PERI_FORMULA_STEPS];
    for (int32_t i = 0; i < n; i++) needed[result[i]] = true;
    for (int32_t i = w->n - 1; i >= 0; i--) {
        const peri_k_formula_step *s = &w->step[i];
        const int32_t reads = operands_of(s->kind);
        if (!needed[w->n_in + i]) continue;
        if (reads > 0) needed[s->a] = true;
        if (reads > 1) needed[s->b] = true;
        if (reads > 2) needed[s->c] = true;
    }
    for (int32_t r = 0; r < w->n_in; r++) place[r] = (uint8_t)r;
    k->n_steps = 0;
    for (int32_t i = 0; i < w->n; i++) {
        if (!needed[w->n_in + i]) continue;
        if (k->n_steps == PERI_FORMULA_STEPS || w->full)
            return peri__fail(PERI_EUNSUPPORTED, "peri_op_formula: its gradient has more than %d steps",
                              PERI_FORMULA_STEPS);
        peri_k_formula_step s = w->step[i];
        const int32_t reads = operands_of(s.kind);
        if (reads > 0) s.a = place[s.a];
        if (reads > 1) s.b = place[s.b];
        if (reads > 2) s.c = place[s.c];
        place[w->n_in + i] = (uint8_t)(w->n_in + k->n_steps);
        k->step[k->n_steps++] = s;
    }
    memset(k->result, 0, sizeof k->result);
    for (int32_t i = 0; i < n; i++) k->result[i] = place[result[i]];
    k->n_results = n;
    return PERI_OK;
}

/** *out (new) = the gradient that flows back in the shape that the elements had: a view that repeats it. */
static peri_status upstream(const kept *s, peri_tensor *g, const int64_t *shape, peri_tensor **out)
{
    int64_t sizes[PERI_MAX_DIMS];
    peri_tensor *flat;
    for (int32_t d = 0; d < s->ndim; d++) sizes[d] = s->reduced && s->mask >> d & 1 ? 1 : shape[d];
    PERI_TRY(peri__contiguous_of(g, &flat));
    peri_status status = peri__tensor_view(flat, s->ndim, sizes, NULL, flat->offset, out);
    peri_tensor_release(flat);
    return status;
}

/** saved: the inputs; shape[0]: what they broadcast to; state: kept. */
static peri_status formula_backward(peri__node *node, peri_tensor *const *grad_out, peri_tensor **grad_in)
{
    const kept *s = node->state;
    const int64_t *shape = node->shape[0].size;
    peri_tensor *in[PERI_FORMULA_INPUTS], *full[MOST_INPUTS];
    int32_t result[MOST_INPUTS], of[MOST_INPUTS], n = 0;
    peri_k_formula_args k;
    writer w;
    write_backward(&w, node, s);
    for (int32_t i = 0; i < s->n_in; i++) {
        in[i] = node->saved[i];
        if (!w.wanted[i]) continue;
        result[n] = w.grad[i] < 0 ? write_zero(&w) : w.grad[i]; /* of a condition nothing flows back */
        of[n++] = i;
    }
    PERI_TRY(keep_needed(&w, result, n, &k));
    PERI_TRY(upstream(s, grad_out[0], shape, &in[s->n_in]));
    peri_status status = put_inputs(s->name, &k, in, s->n_in + 1, s->ndim, shape);
    if (status >= 0) status = pass(&k, in[0], s->ndim, shape, full);
    peri_tensor_release(in[s->n_in]);
    PERI_TRY(status);
    for (int32_t i = 0; i < n; i++) {
        if (status >= 0) status = peri__sum_to(full[i], in[of[i]]->ndim, in[of[i]]->shape, &grad_in[of[i]]);
        peri_tensor_release(full[i]);
    }
    return status;
}

static const peri__node_vtab formula_vtab = {.name = "formula", .backward = formula_backward, .fini = kept_free};

static peri_status record_formula(const char *function, const peri_k_formula_args *k, peri_tensor *const *in,
                                  const kept *how, const int64_t *shape, peri_tensor *y)
{
    peri__node *node;
    PERI_TRY(peri__attach(&formula_vtab, in, k->n_in, &y, 1, &node));
    if (!node) return PERI_OK;
    const size_t steps = sizeof *k->step * (size_t)k->n_steps;
    kept *s = peri__alloc(sizeof *s + steps);
    if (!s) return PERI_ENOMEM;
    *s = *how;
    memcpy(s->step, k->step, steps);
    const size_t length = strnlen(function, sizeof s->name - 1);
    memcpy(s->name, function, length);
    s->name[length] = 0;
    node->state = s;
    node->name = s->name;
    node->shape[0].ndim = how->ndim;
    memcpy(node->shape[0].size, shape, sizeof *shape * (size_t)how->ndim);
    for (int32_t i = 0; i < k->n_in; i++) peri__node_save(node, i, in[i]);
    return PERI_OK;
}

/* -- forward ------------------------------------------------------------------------------------------------------- */

/** Replace *y (owned), the elements of @shape, by their sum over the dimensions of how->mask times how->scale. */
static peri_status reduce(peri_tensor **y, const kept *how, bool keepdim)
{
    int64_t shape[PERI_MAX_DIMS];
    int32_t ndim = 0;
    peri_tensor *sum;
    for (int32_t d = 0; d < how->ndim; d++) {
        const bool gone = how->mask >> d & 1;
        if (!gone || keepdim) shape[ndim++] = gone ? 1 : (*y)->shape[d];
    }
    PERI_TRY(peri__reduce(*y, how->mask, how->scale, &sum));
    peri_tensor_release(*y);
    *y = sum;
    return peri__shaped(y, ndim, shape);
}

/** Of inputs of one dtype, f32 or f64. */
static peri_status compute(const char *function, const peri_formula *f, peri_tensor *const *in, peri_tensor **out)
{
    peri_k_formula_args k;
    peri_tensor all = *in[0], *y;
    kept how = {.n_in = f->n_in, .n_steps = f->n_steps, .scale = 1, .reduced = f->reduction != PERI_LOSS_NONE};
    PERI_TRY(steps_of(function, f, k.step));
    k.n_steps = f->n_steps;
    k.n_results = 1;
    memset(k.result, 0, sizeof k.result);
    k.result[0] = (uint8_t)(f->n_in + f->n_steps - 1);
    for (int32_t i = 1; i < f->n_in; i++) {
        const peri_tensor before = all;
        PERI_TRY(peri__check_same_device(function, in[0], in[i]));
        PERI_TRY(peri__broadcast_shape(function, &before, in[i], &all.ndim, all.shape));
    }
    how.ndim = all.ndim;
    if (how.reduced) PERI_TRY(peri__mask_of(function, &all, f->dims, f->n_dims, &how.mask));
    if (f->reduction == PERI_LOSS_MEAN) {
        PERI__OWN_FLOATS;
        double count = 1;
        for (int32_t d = 0; d < all.ndim; d++) count *= how.mask >> d & 1 ? (double)all.shape[d] : 1;
        how.scale = 1 / count;
    }
    PERI_TRY(put_inputs(function, &k, in, f->n_in, all.ndim, all.shape));
    PERI_TRY(pass(&k, in[0], all.ndim, all.shape, &y));
    peri_status status = how.reduced ? reduce(&y, &how, f->keepdim) : PERI_OK;
    if (status >= 0) status = record_formula(function, &k, in, &how, all.shape, y);
    if (status < 0) peri_tensor_release(y);
    else *out = y;
    return status;
}

peri_status peri_op_formula(const peri_formula *f, peri_tensor *const *in, peri_tensor **out)
{
    PERI_NEED(in);
    PERI_NEED(out);
    PERI_TAKE(peri_formula, f);
    const char *const function = f->name ? f->name : "peri_op_formula";
    char text[128];
    PERI_TRY(check_formula(function, f, in));
    const int32_t common = peri__common_dtype(in, f->n_in);
    if (common < 0 || common == PERI_C64 || common == PERI_C128)
        return peri__fail(PERI_EINVAL, "%s: the first input is %s, allowed: real numbers", function,
                          peri__tensor_text(in[0], text, sizeof text));
    const int32_t dtype = common == PERI_F64 ? PERI_F64 : PERI_F32;
    const bool back = peri__is_16(common) && !(f->in_f32 && peri__autocast(peri__device(in[0])) >= 0);
    peri_tensor *wide[MOST_INPUTS] = {NULL}, *y = NULL;
    peri_status status = PERI_OK;
    for (int32_t i = 0; i < f->n_in && status >= 0; i++)
        if (in[i]->dtype != dtype) status = peri_tensor_to(in[i], dtype, NULL, &wide[i]);
        else peri_tensor_retain(wide[i] = in[i]);
    if (status >= 0) status = compute(function, f, wide, &y);
    for (int32_t i = 0; i < f->n_in; i++) peri_tensor_release(wide[i]);
    if (status < 0 || !back) {
        if (status >= 0) *out = y;
        return status;
    }
    status = peri_tensor_to(y, common, NULL, out);
    peri_tensor_release(y);
    return status;
}
