/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/optim.h: optimizers of the dense part, gradient clipping. Formulas and defaults are PyTorch's.
 *
 * Everything here is local and queues on the current stream without waiting; nothing is recorded. Parameters are
 * contiguous f32 or f64 leaves, changed in place. Parameters without a gradient are passed over.
 *
 * Threads: an optimizer (peri_optim) and its parameters are used by one thread at a time.
 */
#ifndef PERILUNE_OPTIM_H
#define PERILUNE_OPTIM_H

#include <perilune/tensor.h>

typedef struct peri_optim peri_optim;

/** Kinds of optimizers, and the states that they keep for each parameter. */
enum {
    PERI_OPTIM_SGD = 0,             /* momentum_buffer, if momentum is not 0 */
    PERI_OPTIM_ADAGRAD = 1,         /* sum */
    PERI_OPTIM_ADAM = 2,            /* exp_avg, exp_avg_sq, with amsgrad max_exp_avg_sq */
    PERI_OPTIM_ADAMW = 3,           /* the same */
    PERI_OPTIM_RMSPROP = 4,         /* square_avg, if centered grad_avg, with momentum momentum_buffer */
    PERI_OPTIM_ROWWISE_ADAGRAD = 5, /* sum, [rows, 1]; parameters have two dimensions or more, the first counts rows */
    PERI_OPTIM_KIND_COUNT = 6
};

/** Options; which kinds use them. peri_optim_default fills in the defaults. */
typedef struct peri_optim_config {
    int64_t size; /* sizeof(peri_optim_config) */
    int32_t kind;                     /* PERI_OPTIM_* */
    bool maximize;                    /* all: ascend instead of descend */
    bool nesterov;                    /* sgd */
    bool amsgrad;                     /* adam, adamw */
    bool centered;                    /* rmsprop */
    double lr;                        /* all */
    double weight_decay;              /* all: L2, but decoupled in adamw */
    double momentum, dampening;       /* sgd; rmsprop has momentum */
    double lr_decay;                  /* adagrad, rowwise_adagrad: step t uses lr / (1 + (t - 1) lr_decay) */
    double initial_accumulator_value; /* adagrad, rowwise_adagrad */
    double eps;                       /* all but sgd */
    double beta1, beta2;              /* adam, adamw */
    double alpha;                     /* rmsprop */
} peri_optim_config;

/** Fill in PyTorch's defaults of @kind. @out: its `size` is set. */
PERI_API peri_status peri_optim_default(int32_t kind, peri_optim_config *out);
/** An optimizer of @params[n] (retained) with its states at their initial values. @config is copied. @out new. */
PERI_API peri_status peri_optim_new(const peri_optim_config *config, peri_tensor *const *params, int32_t n,
                                    peri_optim **out);
PERI_API void peri_optim_retain(peri_optim *optim);
PERI_API void peri_optim_release(peri_optim *optim);
/** Update every parameter that has a gradient. */
PERI_API peri_status peri_optim_step(peri_optim *optim);
/** Drop the gradients of all parameters. */
PERI_API peri_status peri_optim_zero_grad(peri_optim *optim);

/** Set or get a number by its name in peri_optim_config ("lr", "momentum", "beta1", ...). Takes effect at the next
 *  step. */
PERI_API peri_status peri_optim_set(peri_optim *optim, const char *name, double value);
PERI_API peri_status peri_optim_get(const peri_optim *optim, const char *name, double *out);

/** Name of state @i (0, 1, ...) that this optimizer keeps for each parameter, NULL past the last. Static text,
 *  borrowed. */
PERI_API const char *peri_optim_state_name(const peri_optim *optim, int32_t i);
/** State @name of parameter @param (0..n-1); copy into it to restore it. @out new. */
PERI_API peri_status peri_optim_state(peri_optim *optim, int32_t param, const char *name, peri_tensor **out);
/** Steps that parameter @param has taken; -1 for a parameter that does not exist. */
PERI_API int64_t peri_optim_steps(const peri_optim *optim, int32_t param);
/** Restore that number. */
PERI_API peri_status peri_optim_steps_set(peri_optim *optim, int32_t param, int64_t steps);

/* -- clipping ------------------------------------------------------------------------------------------------------ */

/** Over all gradients of @params[n] on one device: the sum of |g|^@p (p > 0), or the largest |g| if @p is infinite: an
 *  f64 scalar, which a group may add up (or take the maximum of) before it is finished. @out new. */
PERI_API peri_status peri_grad_norm_power(peri_tensor *const *params, int32_t n, double p, peri_tensor **out);
/** The norm that belongs to such a sum: its 1/@p-th power. @out new. */
PERI_API peri_status peri_grad_norm_finish(peri_tensor *power, double p, peri_tensor **out);
/** Multiply all gradients by min(1, @limit / (@norm + 1e-6)); @norm is an f64 scalar on the device: nothing waits for
 *  it. */
PERI_API peri_status peri_grad_clip_norm(peri_tensor *const *params, int32_t n, peri_tensor *norm, double limit);
/** Limit each element of all gradients to [-@limit, @limit]. */
PERI_API peri_status peri_grad_clip_value(peri_tensor *const *params, int32_t n, double limit);

#endif
