/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/optim.h: optimizers of the dense part, norms and clipping of gradients. All take f32 or f64 and work in place
 * on contiguous arrays of parameters w, gradients g (not changed) and states; formulas and their order are PyTorch's.
 * f32 results of the vectorised kernels may differ from ref's by rounding. Each takes a list of arrays at once, so that
 * a step of an optimizer is one launch; what an array becomes does not depend on what else is in the list.
 */
#ifndef PERI_KERNELS_OPTIM_H
#define PERI_KERNELS_OPTIM_H

#include <perilune/base.h>

#include "work.h"

/** One array, or one parameter with its gradient and states. Kernels that work on a single array have it in w. */
typedef struct peri_optim_part {
    void *w;
    const void *g;
    void *state[3];
    int64_t end; /* of the range: the units of this part and of all those before it in the list */
    int64_t n;   /* elements of w */
} peri_optim_part;

/** The parts of a launch, by value: a launch's arguments are at most 4 KiB on a GPU. The range of a kernel counts the
 *  units of the first part, then those of the second, and so on: with parts of 3 and 5 elements, unit 4 is element 1 of
 *  part 1. */
enum { PERI_OPTIM_PARTS = 64 };
typedef struct peri_optim_list {
    int32_t n; /* 1..PERI_OPTIM_PARTS */
    peri_optim_part part[PERI_OPTIM_PARTS];
} peri_optim_list;

/** g' = (maximize ? -g : g) + weight_decay * w, where 0 times w is 0 for any w: a weight may be infinite
 *  with momentum:  m = first ? g' : momentum * m + (1 - dampening) * g';  g' = nesterov ? g' + momentum * m : m
 *  w -= lr * g'.  state[0]: m, NULL in all parts: no momentum. range: elements. */
typedef struct peri_k_optim_sgd_args {
    int32_t dtype;
    bool maximize, nesterov, first;
    double lr, momentum, dampening, weight_decay;
    peri_optim_list list;
} peri_k_optim_sgd_args;

/** g' as in sgd;  sum += g'^2;  w -= lr * g' / (sqrt(sum) + eps).  lr includes its decay. state[0]: sum. range:
 *  elements. */
typedef struct peri_k_optim_adagrad_args {
    int32_t dtype;
    bool maximize;
    double lr, weight_decay, eps;
    peri_optim_list list;
} peri_k_optim_adagrad_args;

/** decoupled: w *= 1 - lr * weight_decay, g' = +-g; else g' as in sgd
 *  m += (1 - beta1) * (g' - m);  v = beta2 * v + (1 - beta2) * g'^2;  v' = v, with amsgrad v' = most = max(most, v)
 *  w -= step_size * m / (sqrt(v') / root + eps),  step_size = lr / (1 - beta1^t), root = sqrt(1 - beta2^t).
 *  state: m, v, most; most NULL in all parts: no amsgrad. range: elements. */
typedef struct peri_k_optim_adam_args {
    int32_t dtype;
    bool maximize, decoupled;
    double lr, beta1, beta2, eps, weight_decay, step_size, root;
    peri_optim_list list;
} peri_k_optim_adam_args;

/** g' as in sgd;  v = alpha * v + (1 - alpha) * g'^2
 *  centered: a += (1 - alpha) * (g' - a), d = sqrt(v - a^2) + eps; else d = sqrt(v) + eps
 *  with momentum:  m = momentum * m + g' / d, w -= lr * m; else w -= lr * g' / d.
 *  state: v, a, m; a NULL in all parts: not centered; m NULL in all parts: no momentum. range: elements. */
typedef struct peri_k_optim_rmsprop_args {
    int32_t dtype;
    bool maximize;
    double lr, alpha, eps, weight_decay, momentum;
    peri_optim_list list;
} peri_k_optim_rmsprop_args;

/** Per row of w, which is n / (rows of the part) numbers: g' as in sgd;  sum[r] += mean over the row of g'^2;
 *  w -= lr * g' / (sqrt(sum[r]) + eps).  state[0]: sum. range: rows. */
typedef struct peri_k_optim_rowwise_adagrad_args {
    int32_t dtype;
    bool maximize;
    double lr, weight_decay, eps;
    peri_optim_list list;
} peri_k_optim_rowwise_adagrad_args;

/** Elements of one partial norm. */
enum { PERI_NORM_BLOCK = 4096 };

/** For blocks of PERI_NORM_BLOCK elements of each part: partial[unit] = sum of |w[i]|^p over the block, or their
 *  maximum if p is infinite; in f64. range: the blocks of all parts. */
typedef struct peri_k_norm_partial_args {
    double *partial;
    int32_t dtype;
    double p;
    peri_optim_list list;
} peri_k_norm_partial_args;

/** Operation and step: out[0] = the sum (maximum if p is infinite) of partial[0..count), to the power 1/p if `root`.
 *  range: 1. */
typedef struct peri_k_norm_finish_args {
    double *out;
    const double *partial;
    int64_t count;
    double p;
    bool root;
} peri_k_norm_finish_args;

/** w[i] *= min(1, limit / (norm[0] + 1e-6)); a NaN norm makes everything NaN. range: elements. */
typedef struct peri_k_clip_norm_args {
    const double *norm;
    int32_t dtype;
    double limit;
    peri_optim_list list;
} peri_k_clip_norm_args;

/** w[i] into [-limit, limit]; NaN stays. range: elements. */
typedef struct peri_k_clip_value_args {
    int32_t dtype;
    double limit;
    peri_optim_list list;
} peri_k_clip_value_args;

PERI_KERNELS_OPTIM(PERI_K_ARGS_OF) PERI_OPS_OPTIM(PERI_OP_ARGS_OF)

#endif
