/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.c: optimizers of the dense part: states of every parameter; norms and clipping. Parameters of one dtype and
 * device that have taken equally many steps are updated by one launch (up to PERI_OPTIM_PARTS of them).
 */
#include "tensor_internal.h"
#include "../../kernels/optim.h"
#include "../base/floats.h"

#include <float.h>
#include <math.h>
#include <perilune/optim.h>
#include <xxhash.h>

enum { MAX_STATES = 3 };

struct peri_optim {
    peri__refs refs;
    peri_optim_config args;
    int32_t n, states;              /* parameters; states per parameter */
    const char *names[MAX_STATES];
    peri_tensor **params;           /* n, retained */
    peri_tensor *(*state)[MAX_STATES]; /* n times `states` tensors */
    int64_t *steps;                 /* n: steps taken by each parameter */
    bool *restored;                 /* n: its states may have been loaded since its last step */
};

/* -- making -------------------------------------------------------------------------------------------------------- */

peri_status peri_optim_default(int32_t kind, peri_optim_config *out)
{
    PERI_NEED(out);
    if (kind < 0 || kind >= PERI_OPTIM_KIND_COUNT)
        return peri__fail(PERI_EINVAL, "peri_optim_default: kind %d, allowed: 0..%d", kind, PERI_OPTIM_KIND_COUNT - 1);
    peri_optim_config a = {
        .size = sizeof a, .kind = kind, .lr = 0.01, .eps = 1e-8, .beta1 = 0.9, .beta2 = 0.999, .alpha = 0.99};
    if (kind == PERI_OPTIM_SGD || kind == PERI_OPTIM_ADAM || kind == PERI_OPTIM_ADAMW) a.lr = 1e-3;
    if (kind == PERI_OPTIM_ADAGRAD || kind == PERI_OPTIM_ROWWISE_ADAGRAD) a.eps = 1e-10;
    if (kind == PERI_OPTIM_ADAMW) a.weight_decay = 0.01;
    return PERI_GIVE(peri_optim_config, out, &a);
}

/** A number of the arguments, the range that it must lie in, and its name. */
typedef struct number {
    const char *name;
    size_t offset;
    double low, high; /* low <= x < high */
} number;

static const number numbers[] = {
    {"lr", offsetof(peri_optim_config, lr), 0, INFINITY},
    {"weight_decay", offsetof(peri_optim_config, weight_decay), 0, INFINITY},
    {"momentum", offsetof(peri_optim_config, momentum), 0, INFINITY},
    {"dampening", offsetof(peri_optim_config, dampening), -DBL_MAX, INFINITY},
    {"lr_decay", offsetof(peri_optim_config, lr_decay), 0, INFINITY},
    {"initial_accumulator_value", offsetof(peri_optim_config, initial_accumulator_value), 0, INFINITY},
    {"eps", offsetof(peri_optim_config, eps), 0, INFINITY},
    {"beta1", offsetof(peri_optim_config, beta1), 0, 1},
    {"beta2", offsetof(peri_optim_config, beta2), 0, 1},
    {"alpha", offsetof(peri_optim_config, alpha), 0, 1},
};
enum { NUMBERS = sizeof numbers / sizeof *numbers };

/** The number of that name; NULL, with an error, where there is none. */
static const number *find_number(const char *function, const char *name)
{
    for (int i = 0; i < NUMBERS; i++)
        if (!strcmp(numbers[i].name, name)) return &numbers[i];
    peri__fail(PERI_ENOTFOUND,
               "%s: no number '%.100s', allowed: lr, weight_decay, momentum, dampening, lr_decay, "
               "initial_accumulator_value, eps, beta1, beta2, alpha",
               function, name);
    return NULL;
}

static peri_status check_number(const char *function, const number *k, double value)
{
    if (value >= k->low && value < k->high) return PERI_OK;
    return peri__fail(PERI_EINVAL, "%s: %s is %g, allowed: %g <= %s < %g", function, k->name, value, k->low, k->name,
                      k->high);
}

static double *at_number(peri_optim_config *args, const number *k)
{
    return (double *)(void *)((char *)args + k->offset);
}

/** Numbers that nobody has filled in, by which a gradient of 0 would be divided by 0. */
static peri_status check_filled_in(const peri_optim_config *a)
{
    const bool adam = a->kind == PERI_OPTIM_ADAM || a->kind == PERI_OPTIM_ADAMW, rms = a->kind == PERI_OPTIM_RMSPROP;
    if (a->kind == PERI_OPTIM_SGD || a->eps != 0 || (adam ? a->beta2 : rms ? a->alpha : a->lr) != 0) return PERI_OK;
    return peri__fail(PERI_EINVAL,
                      "peri_optim_new: eps and %s are 0, so that a gradient of 0 would be divided by 0; "
                      "peri_optim_default fills in numbers",
                      adam ? "beta2" : rms ? "alpha" : "lr");
}

static peri_status check_args(const peri_optim_config *args)
{
    static const char *const function = "peri_optim_new";
    if (args->kind < 0 || args->kind >= PERI_OPTIM_KIND_COUNT)
        return peri__fail(PERI_EINVAL, "%s: kind %d, allowed: 0..%d", function, args->kind, PERI_OPTIM_KIND_COUNT - 1);
    peri_optim_config copy = *args;
    for (int i = 0; i < NUMBERS; i++) PERI_TRY(check_number(function, &numbers[i], *at_number(&copy, &numbers[i])));
    if (args->nesterov && (args->momentum <= 0 || args->dampening != 0))
        return peri__fail(PERI_EINVAL, "%s: nesterov needs a momentum and no dampening; they are %g and %g", function,
                          args->momentum, args->dampening);
    return check_filled_in(args);
}

static peri_status check_params(const char *function, peri_tensor *const *params, int32_t n, bool rows)
{
    char text[128];
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri__check_float(function, "a parameter", params[i]));
        if (params[i]->node || !peri__contiguous(params[i]))
            return peri__fail(PERI_EINVAL, "%s: parameter %d (%s) must be a contiguous leaf", function, i,
                              peri__tensor_text(params[i], text, sizeof text));
        if (rows && params[i]->ndim < 2)
            return peri__fail(PERI_EINVAL, "%s: parameter %d is %s; a row-wise optimizer needs two dimensions or more",
                              function, i, peri__tensor_text(params[i], text, sizeof text));
    }
    return PERI_OK;
}

/** Names of the states that the options ask for. */
static void name_states(peri_optim *o)
{
    const peri_optim_config *a = &o->args;
    switch (a->kind) {
    case PERI_OPTIM_SGD:
        if (a->momentum != 0) o->names[o->states++] = "momentum_buffer";
        break;
    case PERI_OPTIM_ADAM:
    case PERI_OPTIM_ADAMW:
        o->names[o->states++] = "exp_avg";
        o->names[o->states++] = "exp_avg_sq";
        if (a->amsgrad) o->names[o->states++] = "max_exp_avg_sq";
        break;
    case PERI_OPTIM_RMSPROP:
        o->names[o->states++] = "square_avg";
        if (a->centered) o->names[o->states++] = "grad_avg";
        if (a->momentum != 0) o->names[o->states++] = "momentum_buffer";
        break;
    default: o->names[o->states++] = "sum"; break;
    }
}

static peri_status make_state(const peri_optim *o, const peri_tensor *param, peri_tensor **out)
{
    bool rows = o->args.kind == PERI_OPTIM_ROWWISE_ADAGRAD, sum = rows || o->args.kind == PERI_OPTIM_ADAGRAD;
    peri_tensor *t;
    if (rows) PERI_TRY(peri__tensor_like(param, 2, (int64_t[]){param->shape[0], 1}, &t));
    else PERI_TRY(peri__tensor_like(param, param->ndim, param->shape, &t));
    peri_status status = peri_tensor_fill(t, sum ? o->args.initial_accumulator_value : 0);
    if (status < 0) peri_tensor_release(t);
    else *out = t;
    return status;
}

peri_status peri_optim_new(const peri_optim_config *args, peri_tensor *const *params, int32_t n, peri_optim **out)
{
    PERI_TAKE(peri_optim_config, args);
    PERI_NEED(out);
    if (n > 0) PERI_NEED(params);
    PERI_TRY(check_args(args));
    if (n < 0) return peri__fail(PERI_EINVAL, "peri_optim_new: %d parameters", n);
    PERI_TRY(check_params("peri_optim_new", params, n, args->kind == PERI_OPTIM_ROWWISE_ADAGRAD));
    for (int32_t i = 1; i < n; i++)
        for (int32_t k = 0; k < i; k++)
            if (params[i] == params[k])
                return peri__fail(PERI_EINVAL,
                                  "peri_optim_new: parameter %d is parameter %d again, and would be stepped twice", i,
                                  k);
    peri_optim *o = peri__alloc_zero(sizeof *o);
    if (!o) return PERI_ENOMEM;
    peri__refs_init(&o->refs);
    peri__object_count(1);
    o->args = *args;
    name_states(o);
    size_t slots = (size_t)peri__max(n, 1);
    peri_status status = PERI_ENOMEM;
    o->params = peri__alloc_zero(sizeof *o->params * slots);
    o->state = peri__alloc_zero(sizeof *o->state * slots);
    o->steps = peri__alloc_zero(sizeof *o->steps * slots);
    o->restored = peri__alloc_zero(sizeof *o->restored * slots);
    if (!o->params || !o->state || !o->steps || !o->restored) goto out;
    status = PERI_OK;
    for (; o->n < n; o->n++) {
        o->params[o->n] = params[o->n];
        peri_tensor_retain(params[o->n]);
        for (int32_t s = 0; s < o->states && status >= 0; s++) status = make_state(o, params[o->n], &o->state[o->n][s]);
        if (status < 0) {
            o->n++;
            goto out;
        }
    }
out:
    if (status < 0) peri_optim_release(o);
    else *out = o;
    return status;
}

void peri_optim_retain(peri_optim *o) { if (o) peri__refs_add(&o->refs); }

void peri_optim_release(peri_optim *o)
{
    if (!o || !peri__refs_drop(&o->refs)) return;
    for (int32_t i = 0; i < o->n; i++) {
        peri_tensor_release(o->params[i]);
        for (int32_t s = 0; s < o->states; s++) peri_tensor_release(o->state[i][s]);
    }
    peri__free(o->params);
    peri__free(o->state);
    peri__free(o->steps);
    peri__free(o->restored);
    peri__object_count(-1);
    peri__free(o);
}

/* -- what ranks compare -------------------------------------------------------------------------------------------- */

/** Names of the numbers of a step for messages (peri__trained): the optimizer, its step, numbers of it, and in the last
 *  place a checksum of all that was done to the parameter. */
static const char *const names_of_step[PERI_OPTIM_KIND_COUNT] = {
    [PERI_OPTIM_SGD] = "SGD,step,lr,weight_decay,momentum,dampening,,weight,history",
    [PERI_OPTIM_ADAGRAD] = "Adagrad,step,lr,weight_decay,lr_decay,eps,,weight,history",
    [PERI_OPTIM_ADAM] = "Adam,step,lr,weight_decay,beta1,beta2,eps,weight,history",
    [PERI_OPTIM_ADAMW] = "AdamW,step,lr,weight_decay,beta1,beta2,eps,weight,history",
    [PERI_OPTIM_RMSPROP] = "RMSprop,step,lr,weight_decay,momentum,alpha,eps,weight,history",
    [PERI_OPTIM_ROWWISE_ADAGRAD] = "RowWiseAdagrad,step,lr,weight_decay,lr_decay,eps,,weight,history",
};

/** A hash over what a step's numbers are, as the kernels have them. */
static uint64_t numbers_hash(const peri_optim_config *a)
{
    peri_optim_config copy = *a;
    uint64_t h = peri__hash_mix((uint64_t)a->kind,
                                (uint64_t)(a->nesterov | a->maximize << 1 | a->amsgrad << 2 | a->centered << 3));
    for (int i = 0; i < NUMBERS; i++) {
        float x = (float)*at_number(&copy, &numbers[i]);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        h = peri__hash_mix(h, bits);
    }
    return h;
}

/** Mix the states of parameter @i, which somebody may have loaded, into @hash. */
static peri_status mix_states(const peri_optim *o, int32_t i, uint64_t *hash)
{
    for (int32_t s = 0; s < o->states; s++) {
        const peri_tensor *t = o->state[i][s];
        int64_t bytes = peri__numel(t) * peri_dtype_size(t->dtype);
        void *copy = peri__alloc((size_t)peri__max(bytes, 1));
        if (!copy) return PERI_ENOMEM;
        peri_status status = peri_tensor_read(t, copy, bytes);
        if (status >= 0) *hash = peri__hash_mix(*hash, XXH3_64bits(copy, (size_t)bytes));
        peri__free(copy);
        PERI_TRY(status);
    }
    return PERI_OK;
}

/** Of the steps that an optimizer takes at once: what is written down of those of one number. */
typedef struct entry {
    int64_t step; /* 0: nothing yet */
    uint64_t hash;
    peri_coll_facts facts;
} entry;

static void describe_step(const peri_optim_config *a, int64_t step, entry *out)
{
    bool adam = a->kind == PERI_OPTIM_ADAM || a->kind == PERI_OPTIM_ADAMW;
    bool sum = a->kind == PERI_OPTIM_ADAGRAD || a->kind == PERI_OPTIM_ROWWISE_ADAGRAD;
    bool sgd = a->kind == PERI_OPTIM_SGD;
    *out = (entry){.step = step,
                   .hash = peri__hash_mix(numbers_hash(a), (uint64_t)step),
                   .facts = {names_of_step[a->kind],
                             {(double)step, a->lr, a->weight_decay,
                              adam  ? a->beta1
                              : sum ? a->lr_decay
                                    : a->momentum,
                              adam  ? a->beta2
                              : sum ? a->eps
                              : sgd ? a->dampening
                                    : a->alpha,
                              sum || sgd ? 0 : a->eps}}};
}

/** Write down that parameter @i is about to take its step @step. @last: what was written of the parameter before. */
static peri_status note(peri_optim *o, int32_t i, int64_t step, entry *last)
{
    peri__trained *t = o->params[i]->trained;
    if (!t) return PERI_OK;
    if (last->step != step) describe_step(&o->args, step, last);
    uint64_t h = peri__hash_mix(t->history, last->hash);
    if (o->restored[i]) PERI_TRY(mix_states(o, i, &h));
    o->restored[i] = false;
    t->history = h;
    t->step = last->facts;
    return PERI_OK;
}

/* -- lists of a launch --------------------------------------------------------------------------------------------- */

/** Whether a part of the list lies in the memory of @t: no launch changes an element twice. */
static bool holds(const peri_optim_list *list, const peri_tensor *t)
{
    const int64_t size = peri_dtype_size(t->dtype);
    const char *data = peri__data(t), *end = data + peri__numel(t) * size;
    for (int32_t q = 0; q < list->n; q++) {
        const peri_optim_part *p = &list->part[q];
        const char *w = p->w;
        if (w < end && data < w + p->n * size) return true;
    }
    return false;
}

/* -- stepping ------------------------------------------------------------------------------------------------------ */

/** Parameters that one launch updates, and what it needs alive until it is queued. */
typedef struct batch {
    peri_device *device;
    int32_t dtype;
    int64_t steps; /* that each of them has taken, this one included */
    entry last;              /* what was written down last */
    int64_t range, elements; /* in all; the range counts elements, or rows */
    peri_tensor *grads[PERI_OPTIM_PARTS]; /* owned; contiguous */
    peri_optim_list list;
} batch;

/** Launch the update of the parameters of a batch that has some. */
static peri_status launch(const peri_optim_config *a, batch *b)
{
    int64_t n = b->range, t = b->steps;
    PERI__OWN_FLOATS;
    double decayed = a->lr / (1 + (double)(t - 1) * a->lr_decay);
    switch (a->kind) {
    case PERI_OPTIM_SGD: {
        peri_k_optim_sgd_args k = {.list = b->list,
                                   .dtype = b->dtype,
                                   .maximize = a->maximize,
                                   .nesterov = a->nesterov,
                                   .first = t == 1,
                                   .lr = a->lr,
                                   .momentum = a->momentum,
                                   .dampening = a->dampening,
                                   .weight_decay = a->weight_decay};
        return PERI_LAUNCH(b->device, optim_sgd, &k, n, PERI_ELEMENT_GRAIN);
    }
    case PERI_OPTIM_ADAGRAD: {
        peri_k_optim_adagrad_args k = {.list = b->list, .dtype = b->dtype, .maximize = a->maximize, .lr = decayed,
                                       .weight_decay = a->weight_decay, .eps = a->eps};
        return PERI_LAUNCH(b->device, optim_adagrad, &k, n, PERI_ELEMENT_GRAIN);
    }
    case PERI_OPTIM_ADAM:
    case PERI_OPTIM_ADAMW: {
        peri_k_optim_adam_args k = {.list = b->list,
                                    .dtype = b->dtype,
                                    .maximize = a->maximize,
                                    .decoupled = a->kind == PERI_OPTIM_ADAMW,
                                    .lr = a->lr,
                                    .beta1 = a->beta1,
                                    .beta2 = a->beta2,
                                    .eps = a->eps,
                                    .weight_decay = a->weight_decay,
                                    .step_size = a->lr / (1 - pow(a->beta1, (double)t)),
                                    .root = sqrt(1 - pow(a->beta2, (double)t))};
        return PERI_LAUNCH(b->device, optim_adam, &k, n, PERI_ELEMENT_GRAIN);
    }
    case PERI_OPTIM_RMSPROP: {
        peri_k_optim_rmsprop_args k = {.list = b->list,
                                       .dtype = b->dtype,
                                       .maximize = a->maximize,
                                       .lr = a->lr,
                                       .alpha = a->alpha,
                                       .eps = a->eps,
                                       .weight_decay = a->weight_decay,
                                       .momentum = a->momentum};
        return PERI_LAUNCH(b->device, optim_rmsprop, &k, n, PERI_ELEMENT_GRAIN);
    }
    default: {
        peri_k_optim_rowwise_adagrad_args k = {.list = b->list,
                                               .dtype = b->dtype,
                                               .maximize = a->maximize,
                                               .lr = decayed,
                                               .weight_decay = a->weight_decay,
                                               .eps = a->eps};
        int64_t cols = b->elements / peri__max(n, 1); /* on average */
        return PERI_LAUNCH(b->device, optim_rowwise_adagrad, &k, n,
                           peri__ceil_div(PERI_ELEMENT_GRAIN, peri__max(cols, 1)));
    }
    }
}

/** Queue the update of the parameters of the batch, if there are any, and leave it empty. */
static peri_status update(const peri_optim *o, batch *b)
{
    if (b->list.n == 0) return PERI_OK;
    peri_status status = launch(&o->args, b);
    while (b->list.n > 0) peri_tensor_release(b->grads[--b->list.n]);
    b->range = b->elements = 0;
    return status;
}

/** Where the states of parameter @i go in the list of a launch: RMSprop's place there does not depend on the
 *  options. */
static void fill_states(const peri_optim *o, int32_t i, peri_optim_part *part)
{
    for (int32_t s = 0; s < o->states; s++) {
        int32_t place = o->args.kind != PERI_OPTIM_RMSPROP || s == 0 ? s : s == 1 && o->args.centered ? 1 : 2;
        part->state[place] = peri__data(o->state[i][s]);
    }
}

/** Add parameter @i to the batch; what is in it is queued first where both do not fit into one launch. */
static peri_status add(peri_optim *o, int32_t i, batch *b)
{
    peri_tensor *p = o->params[i], *grad;
    int64_t t = o->steps[i] + 1, rows = o->args.kind == PERI_OPTIM_ROWWISE_ADAGRAD ? p->shape[0] : peri__numel(p);
    bool fits = b->list.n < PERI_OPTIM_PARTS && b->device == peri__device(p) && b->dtype == p->dtype && b->steps == t;
    if (!fits || holds(&b->list, p)) PERI_TRY(update(o, b));
    PERI_TRY(note(o, i, t, &b->last));
    PERI_TRY(peri__contiguous_of(p->grad, &grad));
    o->steps[i] = t;
    peri__changed(p);
    b->device = peri__device(p);
    b->dtype = p->dtype;
    b->steps = t;
    b->range += rows;
    b->elements += peri__numel(p);
    b->grads[b->list.n] = grad;
    b->list.part[b->list.n] = (peri_optim_part){.w = peri__data(p), .g = peri__data(grad), .end = b->range,
                                                .n = peri__numel(p)};
    fill_states(o, i, &b->list.part[b->list.n++]);
    return PERI_OK;
}

peri_status peri_optim_step(peri_optim *o)
{
    static const int32_t kernels[PERI_OPTIM_KIND_COUNT] = {
        [PERI_OPTIM_SGD] = PERI_K_optim_sgd,         [PERI_OPTIM_ADAGRAD] = PERI_K_optim_adagrad,
        [PERI_OPTIM_ADAM] = PERI_K_optim_adam,       [PERI_OPTIM_ADAMW] = PERI_K_optim_adam,
        [PERI_OPTIM_RMSPROP] = PERI_K_optim_rmsprop, [PERI_OPTIM_ROWWISE_ADAGRAD] = PERI_K_optim_rowwise_adagrad};
    PERI_NEED(o);
    for (int32_t i = 0; i < o->n; i++)
        if (o->params[i]->grad)
            PERI_TRY(PERI_NEED_WORK("peri_optim_step", peri__device(o->params[i]), kernels[o->args.kind]));
    batch b = {.list.n = 0};
    peri_status status = PERI_OK, last;
    for (int32_t i = 0; i < o->n && status >= 0; i++)
        if (o->params[i]->grad) status = add(o, i, &b);
    last = update(o, &b); /* after an error, too: the steps of these parameters have been counted */
    return status < 0 ? status : last;
}

peri_status peri_optim_zero_grad(peri_optim *o)
{
    PERI_NEED(o);
    for (int32_t i = 0; i < o->n; i++) PERI_TRY(peri_tensor_grad_set(o->params[i], NULL));
    return PERI_OK;
}

/* -- looking and restoring ----------------------------------------------------------------------------------------- */

peri_status peri_optim_set(peri_optim *o, const char *name, double value)
{
    PERI_NEED(o);
    PERI_NEED(name);
    const number *k = find_number("peri_optim_set", name);
    if (!k) return PERI_ENOTFOUND;
    PERI_TRY(check_number("peri_optim_set", k, value));
    if (!strcmp(name, "momentum") && o->args.kind == PERI_OPTIM_SGD && value != 0 && o->states == 0)
        return peri__fail(PERI_EINVAL, "peri_optim_set: momentum %g for an optimizer that was made without momentum",
                          value);
    *at_number(&o->args, k) = value;
    return PERI_OK;
}

peri_status peri_optim_get(const peri_optim *o, const char *name, double *out)
{
    PERI_NEED(o);
    PERI_NEED(name);
    PERI_NEED(out);
    peri_optim_config copy = o->args;
    const number *k = find_number("peri_optim_get", name);
    if (!k) return PERI_ENOTFOUND;
    *out = *at_number(&copy, k);
    return PERI_OK;
}

const char *peri_optim_state_name(const peri_optim *o, int32_t i)
{
    return o && i >= 0 && i < o->states ? o->names[i] : NULL;
}

peri_status peri_optim_state(peri_optim *o, int32_t param, const char *name, peri_tensor **out)
{
    PERI_NEED(o);
    PERI_NEED(name);
    PERI_NEED(out);
    if (param < 0 || param >= o->n)
        return peri__fail(PERI_ERANGE, "peri_optim_state: parameter %d, allowed: 0..%d", param, o->n - 1);
    for (int32_t s = 0; s < o->states; s++)
        if (!strcmp(o->names[s], name)) {
            *out = o->state[param][s];
            peri_tensor_retain(*out);
            return PERI_OK;
        }
    return peri__fail(PERI_ENOTFOUND, "peri_optim_state: no state '%s'; the first of this optimizer is '%s'", name,
                      o->states ? o->names[0] : "(none)");
}

int64_t peri_optim_steps(const peri_optim *o, int32_t param)
{
    return o && param >= 0 && param < o->n ? o->steps[param] : -1;
}

peri_status peri_optim_steps_set(peri_optim *o, int32_t param, int64_t steps)
{
    PERI_NEED(o);
    if (param < 0 || param >= o->n || steps < 0)
        return peri__fail(PERI_ERANGE, "peri_optim_steps_set: %lld steps of parameter %d, allowed: 0.. and 0..%d",
                          (long long)steps, param, o->n - 1);
    o->steps[param] = steps;
    o->restored[param] = true;
    return PERI_OK;
}

/* -- clipping ------------------------------------------------------------------------------------------------------ */

static peri_status check_p(const char *function, double p)
{
    return p > 0 ? PERI_OK
                 : peri__fail(PERI_EINVAL, "%s: a norm of order %g, allowed: above 0, infinite included", function, p);
}

/** The device of the gradients, NULL if there is none. Gradients become contiguous. */
static peri_status gradients(const char *function, peri_tensor *const *params, int32_t n, peri_device **out)
{
    peri_device *device = NULL;
    if (n < 0) return peri__fail(PERI_EINVAL, "%s: %d parameters, allowed: 0 and more", function, n);
    for (int32_t i = 0; i < n; i++) {
        PERI_TRY(peri__check_float(function, "a parameter", params[i]));
        peri_tensor *grad = params[i]->grad;
        if (!grad) continue;
        if (!device) device = peri__device(grad);
        if (device != peri__device(grad))
            return peri__fail(PERI_EINVAL, "%s: gradients on %s and %s", function, device->name,
                              peri__device(grad)->name);
        if (peri__contiguous(grad)) continue;
        peri_tensor *flat;
        PERI_TRY(peri__contiguous_of(grad, &flat));
        peri_tensor_release(grad);
        params[i]->grad = flat;
    }
    *out = device;
    return PERI_OK;
}

/** The next gradients that one launch can take: those of parameters from number @at on, of one dtype. Units of the list
 *  are blocks of
 *  @block elements. Returns the number of the parameter after them; -1: there are none. */
static int32_t list_gradients(peri_tensor *const *params, int32_t n, int32_t at, int64_t block, peri_optim_list *list,
                              int32_t *dtype)
{
    int64_t end = 0;
    list->n = 0;
    for (; at < n && list->n < PERI_OPTIM_PARTS; at++) {
        const peri_tensor *grad = params[at]->grad;
        if (!grad) continue;
        if (list->n > 0 && (grad->dtype != *dtype || holds(list, grad))) break;
        *dtype = grad->dtype;
        end += peri__ceil_div(peri__numel(grad), block);
        list->part[list->n++] = (peri_optim_part){.w = peri__data(grad), .end = end, .n = peri__numel(grad)};
    }
    return list->n > 0 ? at : -1;
}

static int64_t last_range_end(const peri_optim_list *list) { return list->part[list->n - 1].end; }

peri_status peri_grad_norm_power(peri_tensor *const *params, int32_t n, double p, peri_tensor **out)
{
    if (n > 0) PERI_NEED(params);
    PERI_NEED(out);
    peri_device *device;
    PERI_TRY(check_p("peri_grad_norm_power", p));
    PERI_TRY(gradients("peri_grad_norm_power", params, n, &device));
    if (!device) {
        if (n > 0) return peri_tensor_full(peri__device(params[0]), PERI_F64, 0, NULL, 0, out);
        return peri__fail(PERI_EINVAL, "peri_grad_norm_power: no parameters");
    }
    int64_t blocks = 0, done = 0;
    for (int32_t i = 0; i < n; i++)
        if (params[i]->grad) blocks += peri__ceil_div(peri__numel(params[i]), PERI_NORM_BLOCK);
    peri_tensor *partial, *sum = NULL;
    PERI_TRY(peri_tensor_new(device, PERI_F64, 1, &blocks, &partial));
    peri_status status;
    PERI_TRY_GOTO(peri_tensor_new(device, PERI_F64, 0, NULL, &sum), out);
    peri_k_norm_partial_args args = {.p = p};
    for (int32_t at = 0; (at = list_gradients(params, n, at, PERI_NORM_BLOCK, &args.list, &args.dtype)) >= 0;) {
        args.partial = (double *)peri__data(partial) + done;
        PERI_TRY_GOTO(
            PERI_LAUNCH(device, norm_partial, &args, last_range_end(&args.list), PERI_ELEMENT_GRAIN / PERI_NORM_BLOCK),
            out);
        done += last_range_end(&args.list);
    }
    peri_k_norm_finish_args last = {.out = peri__data(sum), .partial = peri__data(partial), .count = blocks, .p = p};
    status = PERI_RUN(device, norm_finish, &last);
out:
    peri_tensor_release(partial);
    if (status < 0) peri_tensor_release(sum);
    else *out = sum;
    return status;
}

peri_status peri_grad_norm_finish(peri_tensor *power, double p, peri_tensor **out)
{
    PERI__NOT_AT_BORDER;
    PERI_TRY(check_p("peri_grad_norm_finish", p));
    PERI_TRY(peri__check_tensor("peri_grad_norm_finish", "power", power, PERI_F64, 0));
    peri_tensor *norm;
    PERI_TRY(peri__tensor_like(power, 0, NULL, &norm));
    peri_k_norm_finish_args args = {
        .out = peri__data(norm), .partial = peri__data(power), .count = 1, .p = p, .root = true};
    peri_status status = PERI_RUN(peri__device(power), norm_finish, &args);
    if (status < 0) peri_tensor_release(norm);
    else *out = norm;
    return status;
}

peri_status peri_grad_clip_norm(peri_tensor *const *params, int32_t n, peri_tensor *norm, double limit)
{
    PERI__NOT_AT_BORDER;
    peri_device *device;
    if (!(limit > 0)) return peri__fail(PERI_EINVAL, "peri_grad_clip_norm: limit %g, allowed: above 0", limit);
    PERI_TRY(peri__check_tensor("peri_grad_clip_norm", "norm", norm, PERI_F64, 0));
    PERI_TRY(gradients("peri_grad_clip_norm", params, n, &device));
    if (device && device != peri__device(norm))
        return peri__fail(PERI_EINVAL, "peri_grad_clip_norm: gradients on %s, their norm on %s", device->name,
                          peri__device(norm)->name);
    peri_k_clip_norm_args args = {.norm = peri__data(norm), .limit = limit};
    for (int32_t at = 0; (at = list_gradients(params, n, at, 1, &args.list, &args.dtype)) >= 0;)
        PERI_TRY(PERI_LAUNCH(device, clip_norm, &args, last_range_end(&args.list), PERI_ELEMENT_GRAIN));
    return PERI_OK;
}

peri_status peri_grad_clip_value(peri_tensor *const *params, int32_t n, double limit)
{
    PERI__NOT_AT_BORDER;
    if (n > 0) PERI_NEED(params);
    peri_device *device;
    if (!(limit > 0)) return peri__fail(PERI_EINVAL, "peri_grad_clip_value: limit %g, allowed: above 0", limit);
    PERI_TRY(gradients("peri_grad_clip_value", params, n, &device));
    peri_k_clip_value_args args = {.limit = limit};
    for (int32_t at = 0; (at = list_gradients(params, n, at, 1, &args.list, &args.dtype)) >= 0;)
        PERI_TRY(PERI_LAUNCH(device, clip_value, &args, last_range_end(&args.list), PERI_ELEMENT_GRAIN));
    return PERI_OK;
}
