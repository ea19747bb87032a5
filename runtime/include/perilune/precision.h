/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/precision.h: how exact products are, by PyTorch's names: TF32 for products of f32, and regions in which
 * products run in 16-bit floats (autocast).
 *
 * Threads: each setting says whether it is the process's or the calling thread's. A region (peri_autocast) is used by
 * one thread at a time: the one that has entered it, until it has left it.
 */
#ifndef PERILUNE_PRECISION_H
#define PERILUNE_PRECISION_H

#include <perilune/tensor.h>

/** How products of f32 may be computed, in this process, from now on: "highest" (the start): in f32. "high" and
 *  "medium": GPUs may round the factors to TF32, which has f32's range and 10 bits of mantissa, and add in f32;
 *  processors compute in f32 anyway. */
PERI_API peri_status peri_float32_matmul_precision_set(const char *precision);
/** "highest", "high" or "medium". Static text. */
PERI_API const char *peri_float32_matmul_precision(void);

/** From now on, whether products of f32 that this thread asks for add in the order of the inner dimension, each product
 *  by one fma, from 0 (default: as the device's library does, which changes with the sizes). A row of a result is then
 *  a function of the row of the left factor alone, to the last bit, whatever the number of rows: what a model file
 *  (perilune/model.h) answers. On processors; other devices refuse such products. Costs time, since matrices are copied
 *  at each product. */
PERI_API peri_status peri_products_ordered_set(bool on);
/** The calling thread's setting. */
PERI_API bool peri_products_ordered(void);

/** A region of autocast, for tensors of one kind of device. Inside it, operations of perilune/ops.h choose their dtype:
 *  - peri_op_linear, peri_op_matmul and peri_op_interaction cast their inputs (f32 or 16-bit floats) to the region's
 *    dtype, and so is their result; products are added in f32. Gradients of f32 inputs are made in f32. So it is with
 *    the products of peri_op_cross_net, whose result has the dtype of x0.
 *  - losses, softmax, layer norm, sum, exp, log, pow, square, reciprocal and softplus cast 16-bit inputs to f32, and so
 *    is their result.
 *  - all others keep the dtype of their inputs, and where these differ, the result has the wider one.
 *  f64 is left alone. Backward passes run in the dtypes of their forward operations, inside of the region or
 *  outside. */
typedef struct peri_autocast peri_autocast;

/** A region for @device, "cuda" or "cpu" (a number behind it, "cuda:1", does not matter), with @dtype PERI_BF16 or
 *  PERI_F16. @enabled false: a region in which nothing is cast, inside of another. @out new. */
PERI_API peri_status peri_autocast_new(const char *device, int32_t dtype, bool enabled, peri_autocast **out);
/** Give up the region; NULL is fine. It must not be entered. */
PERI_API void peri_autocast_release(peri_autocast *region);
/** From now on the calling thread is in @region, inside of those that it has entered already. PERI_EINVAL if it is in
 *  it. */
PERI_API peri_status peri_autocast_enter(peri_autocast *region);
/** Leave @region, which must be the one that the calling thread entered last. What was cast of weights inside is
 *  dropped. */
PERI_API peri_status peri_autocast_exit(peri_autocast *region);
/** The region that the calling thread is in, the innermost; NULL: none. Borrowed. */
PERI_API peri_autocast *peri_autocast_current(void);
/** For schedulers that run several contexts in one thread: make @region (NULL: none), with those that it was entered
 *  in, the one that the calling thread is in. */
PERI_API peri_status peri_autocast_current_set(peri_autocast *region);

#endif
