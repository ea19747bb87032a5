/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/ops.h: dense operations with gradients, losses, dropout.
 *
 * Inputs are f32 or f64, all of one dtype and device, with any strides; results are new contiguous tensors. Every
 * operation is local, queues on the current stream, is recorded on the gradient tape when an input requires grad, and
 * leaves outputs untouched on failure. Dimensions count from 0, negative ones from the end. Results do not depend on
 * the number of threads.
 *
 * Threads: any; operands as tensor.h says.
 */
#ifndef PERILUNE_OPS_H
#define PERILUNE_OPS_H

#include <perilune/tensor.h>

/* -- elementwise --------------------------------------------------------------------------------------------------- */

/** max(x, 0) */
PERI_API peri_status peri_op_relu(peri_tensor *x, peri_tensor **out);
/** 1 / (1 + exp(-x)); the hyperbolic tangent of x */
PERI_API peri_status peri_op_sigmoid(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_tanh(peri_tensor *x, peri_tensor **out);
/** x sigmoid(x) */
PERI_API peri_status peri_op_silu(peri_tensor *x, peri_tensor **out);
/** x times the normal distribution function, the exact form with erf */
PERI_API peri_status peri_op_gelu(peri_tensor *x, peri_tensor **out);
/** log(1 + exp x) */
PERI_API peri_status peri_op_softplus(peri_tensor *x, peri_tensor **out);
/** log(sigmoid x) */
PERI_API peri_status peri_op_logsigmoid(peri_tensor *x, peri_tensor **out);
/** x > 0 ? x : slope x; e to the power x; the natural logarithm of x; its square root */
PERI_API peri_status peri_op_leaky_relu(peri_tensor *x, double slope, peri_tensor **out);
PERI_API peri_status peri_op_exp(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_log(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_sqrt(peri_tensor *x, peri_tensor **out);
/** sqrt x, with the gradient 0 where x is 0, as norms and standard deviations want it */
PERI_API peri_status peri_op_root(peri_tensor *x, peri_tensor **out);
/** @low where x is smaller, then @high where it is larger; NaN stays. A bound that is NaN makes floats NaN, and is
 *  PERI_EINVAL for integers. */
PERI_API peri_status peri_op_clamp(peri_tensor *x, double low, double high, peri_tensor **out);
/** |x|, whose gradient at 0 is 0; x * x */
PERI_API peri_status peri_op_abs(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_square(peri_tensor *x, peri_tensor **out);
/** x to the power of @exponent */
PERI_API peri_status peri_op_pow(peri_tensor *x, double exponent, peri_tensor **out);
/** log(1 + x) and exp(x) - 1, also where x is so small that 1 + x is 1 */
PERI_API peri_status peri_op_log1p(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_expm1(peri_tensor *x, peri_tensor **out);
/** 1 / sqrt x; the sine of x; its cosine */
PERI_API peri_status peri_op_rsqrt(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_sin(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_cos(peri_tensor *x, peri_tensor **out);
/** The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x */
PERI_API peri_status peri_op_erf(peri_tensor *x, peri_tensor **out);
/** x rounded down, up, to the nearest whole number (of two the even one), and towards 0. Their gradient is 0, as that
 *  of sign is: 1, -1, or 0 where x is 0 or NaN. Integers stay what they are. */
PERI_API peri_status peri_op_floor(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_ceil(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_round(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_trunc(peri_tensor *x, peri_tensor **out);
PERI_API peri_status peri_op_sign(peri_tensor *x, peri_tensor **out);
/** scale x + shift */
PERI_API peri_status peri_op_affine(peri_tensor *x, double scale, double shift, peri_tensor **out);
/** numerator / x */
PERI_API peri_status peri_op_reciprocal(peri_tensor *x, double numerator, peri_tensor **out);

/** a + b and so on; shapes broadcast as in PyTorch: aligned at the last dimension, sizes equal or 1. So do dtypes: bool
 *  becomes integers, these floats, narrow ones wide ones (f16 and bf16: f32), and a tensor without dimensions changes
 *  another's dtype only where it is of a later kind. Integers wrap around; quotients of integers are f32; of bool, +
 *  is "or" and * is "and". Functions of one number above take integers as PyTorch's do: affine, abs, square, relu, pow
 *  and clamp by whole numbers keep them, exp, log, sqrt, sigmoid, tanh, reciprocal and fractions make f32 of them. */
PERI_API peri_status peri_op_add(peri_tensor *a, peri_tensor *b, peri_tensor **out);
PERI_API peri_status peri_op_sub(peri_tensor *a, peri_tensor *b, peri_tensor **out);
PERI_API peri_status peri_op_mul(peri_tensor *a, peri_tensor *b, peri_tensor **out);
PERI_API peri_status peri_op_div(peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** a to the power b. Of integers it is an integer, and wraps; by a negative exponent it is 0, but of 1 and -1. Not of
 *  bool alone. The gradient of b is NaN where a < 0. */
PERI_API peri_status peri_op_power(peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** a / b rounded down, and what is left of a, with b's sign, as in Python. Of integers: PERI_ERANGE where a divisor is
 *  0; to see that, it waits for b. Of floats: as IEEE 754 has them. Not of bool alone. Gradients of the quotient are
 *  not there. */
PERI_API peri_status peri_op_floor_divide(peri_tensor *a, peri_tensor *b, peri_tensor **out);
PERI_API peri_status peri_op_remainder(peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** What is left of a / b rounded towards 0, with a's sign, as C has it; the rest as in peri_op_remainder. */
PERI_API peri_status peri_op_fmod(peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** The same three by a number, which nothing waits for. Beside integers a whole number is of their dtype, another makes
 *  f32 of both. */
PERI_API peri_status peri_op_floor_divide_number(peri_tensor *x, double divisor, peri_tensor **out);
PERI_API peri_status peri_op_remainder_number(peri_tensor *x, double divisor, peri_tensor **out);
PERI_API peri_status peri_op_fmod_number(peri_tensor *x, double divisor, peri_tensor **out);
/** The larger and the smaller of both; NaN if either is. Where they are equal each gets half of the gradient. */
PERI_API peri_status peri_op_maximum(peri_tensor *a, peri_tensor *b, peri_tensor **out);
PERI_API peri_status peri_op_minimum(peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** a * b + c, all of one shape: one layer of a cross network, x0 * u + x. */
PERI_API peri_status peri_op_muladd(peri_tensor *a, peri_tensor *b, peri_tensor *c, peri_tensor **out);

/* -- matrix products ----------------------------------------------------------------------------------------------- */

/** What a linear layer applies to its result. */
enum { PERI_ACTIVATION_NONE = 0, PERI_ACTIVATION_RELU = 1, PERI_ACTIVATION_SIGMOID = 2, PERI_ACTIVATION_TANH = 3 };

/** f(x W^T + b): @x [..., in], @weight [out, in], @bias [out] or NULL, f = PERI_ACTIVATION_*. @out [..., out]. */
PERI_API peri_status peri_op_linear(peri_tensor *x, peri_tensor *weight, peri_tensor *bias, int32_t activation,
                                    peri_tensor **out);
/** Matrix product of the last two dimensions of @a [..., m, k] and @b [..., k, n]; the leading ones broadcast. A
 *  one-dimensional @a is a row, a one-dimensional @b a column, and that dimension is absent from the result. Transposed
 *  views cost no copy. Integers wrap around, and are slower. */
PERI_API peri_status peri_op_matmul(peri_tensor *a, peri_tensor *b, peri_tensor **out);

/* -- joining ------------------------------------------------------------------------------------------------------- */

/** @tensors[n] (n >= 1), equal in all dimensions but @dim, one after the other along @dim. Any dtype; recorded for f32
 *  and f64. */
PERI_API peri_status peri_op_cat(peri_tensor *const *tensors, int32_t n, int32_t dim, peri_tensor **out);
/** @tensors[n] (n >= 1) of one shape, along a new dimension @dim of the result. */
PERI_API peri_status peri_op_stack(peri_tensor *const *tensors, int32_t n, int32_t dim, peri_tensor **out);
/** @x cut along @dim into @n parts of @sizes[n], which add up to its size: @out[n] new views of it. The gradients of
 *  all parts become that of x at once. */
PERI_API peri_status peri_op_split(peri_tensor *x, const int64_t *sizes, int32_t n, int32_t dim, peri_tensor **out);

/** @x with a border of @value (of x's dtype, without dimensions), or of @number where it is NULL: pads[0] elements
 *  before and pads[1] behind the last dimension, then of the one before it, and so on: two each for some or all
 *  dimensions. Negative: so many are cut off. Any dtype. */
PERI_API peri_status peri_op_pad(peri_tensor *x, const int64_t *pads, int32_t n, peri_tensor *value, double number,
                                 peri_tensor **out);
/** @x with zeros where, in its last two dimensions, column - row > @k (@upper: < @k). Any dtype. */
PERI_API peri_status peri_op_triangle(peri_tensor *x, int64_t k, bool upper, peri_tensor **out);

/* -- reductions ---------------------------------------------------------------------------------------------------- */

/** Sum over dimensions @dims[n]; n = 0: over all. @keepdim leaves them with size 1. The sum of nothing is 0. Integers
 *  and bool: i64, which wraps. */
PERI_API peri_status peri_op_sum(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, peri_tensor **out);
/** The sum divided by the number of elements. */
PERI_API peri_status peri_op_mean(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, peri_tensor **out);
/** The largest element along @dim, which must not be empty, and its place (i64; @indices may be NULL). The first of
 *  equals gets the gradient. */
PERI_API peri_status peri_op_max(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values,
                                 peri_tensor **indices);
/** The same of the smallest. Both: any dtype that is not complex, NaN if there is one. */
PERI_API peri_status peri_op_min(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values,
                                 peri_tensor **indices);
/** The largest element (@least: the smallest) over dimensions @dims[n], as in peri_op_sum; equal ones share the
 *  gradient. */
PERI_API peri_status peri_op_amax(peri_tensor *x, const int32_t *dims, int32_t n, bool keepdim, bool least,
                                  peri_tensor **out);
/** The product along @dim, 1 of nothing. Integers and bool: i64, which wraps. */
PERI_API peri_status peri_op_prod(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **out);
/** x[0] + ... + x[i] along @dim. Integers and bool: i64, which wraps. */
PERI_API peri_status peri_op_running_sum(peri_tensor *x, int32_t dim, peri_tensor **out);
/** x[0] * ... * x[i] along @dim. Integers and bool: i64, which wraps. */
PERI_API peri_status peri_op_running_product(peri_tensor *x, int32_t dim, peri_tensor **out);
/** The largest of x[0], ..., x[i] along @dim, and its place (i64; @indices may be NULL), of equal elements the last
 *  one's, which gets the gradient. From a NaN on it is the last NaN. Any dtype that is not complex. */
PERI_API peri_status peri_op_cummax(peri_tensor *x, int32_t dim, peri_tensor **values, peri_tensor **indices);
/** The same of the smallest. Softmax: exp x / the sum of exp x along @dim; and the natural logarithm of that. */
PERI_API peri_status peri_op_cummin(peri_tensor *x, int32_t dim, peri_tensor **values, peri_tensor **indices);
PERI_API peri_status peri_op_softmax(peri_tensor *x, int32_t dim, peri_tensor **out);
PERI_API peri_status peri_op_log_softmax(peri_tensor *x, int32_t dim, peri_tensor **out);
/** Normalise over the last @dims dimensions (1..ndim): (x - mean) / sqrt(variance + eps) * weight + bias; @weight and
 *  @bias have the shape of those dimensions, or are NULL. */
PERI_API peri_status peri_op_layer_norm(peri_tensor *x, int32_t dims, peri_tensor *weight, peri_tensor *bias,
                                        double eps, peri_tensor **out);

/** The cosine of the angle between @a and @b, which broadcast, along @dim: what is left of their shape. Sizes below
 *  @eps count as eps; @added > 0: a size is the root of the sum of squares plus it. Floats; the result is of the dtype
 *  that they have together. */
PERI_API peri_status peri_op_cosine_similarity(peri_tensor *a, peri_tensor *b, int32_t dim, double eps, double added,
                                               peri_tensor **out);

/** softmax(@scale q k^T) v: q [..., n, D], k [..., m, D], v [..., m, V], whose first dimensions broadcast. @mask (NULL:
 *  none) broadcasts to [..., n, m]: bool, true where a column may be seen, or numbers that are added. @is_causal: row i
 *  sees columns 0..i. A row that sees no column is 0, and has no gradient. */
PERI_API peri_status peri_op_scaled_dot_product_attention(peri_tensor *q, peri_tensor *k, peri_tensor *v,
                                                          peri_tensor *mask, bool is_causal, double scale,
                                                          peri_tensor **out);

/* -- comparing, choosing, picking, sorting ------------------------------------------------------------------------- */

/** bool: a @op b (PERI_COMPARE_*), broadcast as in peri_op_add; @b NULL: with the number @number, rounded to a's dtype
 *  if that is a float. Any dtype that is not complex. Nothing is recorded. */
PERI_API peri_status peri_op_compare(peri_tensor *a, int32_t op, peri_tensor *b, double number, peri_tensor **out);
/** @a where @condition (bool) is true, else @b; all three broadcast; any dtype. */
PERI_API peri_status peri_op_where(peri_tensor *condition, peri_tensor *a, peri_tensor *b, peri_tensor **out);
/** Element (i, j, k) of @out is x[index[i][j][k]][j][k] for @dim 0, x[i][index[i][j][k]][k] for 1, and so on. @index
 *  (i32 or i64) has as many dimensions as x, and is no larger in any but @dim. Waits: PERI_ERANGE names the first index
 *  that x has not. */
PERI_API peri_status peri_op_gather(peri_tensor *x, int32_t dim, peri_tensor *index, peri_tensor **out);
/** @x with src[i][j][k] put, or added if @add, at element [index[i][j][k]][j][k] for @dim 0, [i][index[i][j][k]][k] for
 *  1, and so on: the way back of gather. @index (i32 or i64) is as there, and has the shape of @src, which has x's
 *  dtype, or is one element without dimensions, for all places (one that is put must not want a gradient). Of several
 *  that are put at one place the last along @dim stays; sums are in their order. A line along @dim is the work of one
 *  processor, or of one thread of a GPU. Waits: PERI_ERANGE names the first index that x has not. */
PERI_API peri_status peri_op_scatter(peri_tensor *x, int32_t dim, peri_tensor *index, peri_tensor *src, bool add,
                                     peri_tensor **out);
/** How many elements along the last dimension of @sorted, which rise there, are smaller than each of @x (@right: not
 *  larger): where it goes among them. @sorted has one dimension, or all sizes of x but the last. NaN is larger than all
 *  numbers. Operands of two dtypes become one, as in peri_op_add. @out: i64 of the shape of x. */
PERI_API peri_status peri_op_searchsorted(peri_tensor *sorted, peri_tensor *x, bool right, peri_tensor **out);
/** bool, of the shape of @x: whether each of its elements is one of @tests, of any shape. No NaN is. Operands of two
 *  dtypes become one, as in peri_op_add. */
PERI_API peri_status peri_op_isin(peri_tensor *x, peri_tensor *tests, peri_tensor **out);
/** The first @k elements along @dim in rising (@descending: falling) order, and their places (i64; @indices may be
 *  NULL). NaN is larger than all numbers; equal ones keep their order. @k < 0: all. Any dtype that is not complex. */
PERI_API peri_status peri_op_sort(peri_tensor *x, int32_t dim, bool descending, int64_t k, peri_tensor **values,
                                  peri_tensor **indices);

/** The @k-th smallest element along @dim, from 1 on, as peri_op_sort orders them, and its place (i64; @indices may be
 *  NULL). It is found without sorting the others where the device can. */
PERI_API peri_status peri_op_kthvalue(peri_tensor *x, int64_t k, int32_t dim, bool keepdim, peri_tensor **values,
                                      peri_tensor **indices);
/** @k elements along @dim from rank @first on (0: the smallest), as peri_op_sort orders them, and their places
 *  (@indices may be NULL); of a line that has a NaN all are its first NaN. One or two are found without sorting the
 *  others where the device can. */
PERI_API peri_status peri_op_ranks(peri_tensor *x, int32_t dim, int64_t first, int64_t k, peri_tensor **values,
                                   peri_tensor **indices);
/** The middle element along @dim, which must not be empty, of two the smaller one, and its place; the first NaN if
 *  there is one. The rest as in peri_op_kthvalue. */
PERI_API peri_status peri_op_median(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values,
                                    peri_tensor **indices);

/** The element that is there most often along @dim, which must not be empty, of several the smallest, and the last of
 *  its places. No NaN equals another. The rest as in peri_op_kthvalue. */
PERI_API peri_status peri_op_mode(peri_tensor *x, int32_t dim, bool keepdim, peri_tensor **values,
                                  peri_tensor **indices);
/** For each of @ids (integers) @classes numbers along a new last dimension: 1 at its place and 0 elsewhere, i64. Waits:
 *  PERI_ERANGE names the first id outside 0..classes-1. */
PERI_API peri_status peri_op_one_hot(peri_tensor *ids, int64_t classes, peri_tensor **out);

/* -- dropout ------------------------------------------------------------------------------------------------------- */

/** Zero each element with probability @p (0 <= p < 1) and divide the others by 1 - p. Whether element i stays is a
 *  function of (@seed,
 *  @stream, @offset + i): give each application a stream of its own, and a rank that holds a part of a batch the number
 *  of its first element, and the result does not depend on how the batch is cut. */
PERI_API peri_status peri_op_dropout(peri_tensor *x, double p, uint64_t seed, uint64_t stream, uint64_t offset,
                                     peri_tensor **out);

/* -- recommendation ------------------------------------------------------------------------------------------------ */

/** Pairwise dot products (DLRM): @dense [B, D], @sparse [B, F, D]; with v0 = dense and v1..vF = sparse, @out [B, D + F
 *  (F + 1) / 2] is dense and then vi . vj for i < j, i outermost. */
PERI_API peri_status peri_op_interaction(peri_tensor *dense, peri_tensor *sparse, peri_tensor **out);

/** A cross network (DCN v2) of @n >= 1 layers: x becomes x0 * (W[l] V[l] x + bias[l]) + x in layer l, starting with x =
 *  x0 [..., c].
 *  @v[n] of [r, c] (r may differ), or NULL for no V; @w[n] of [c, r], or [c, c] without V; @bias[n] of c numbers each,
 *  in any shape, or NULL.
 *  The list of tensors is read during the call only. x0 may also be f16 or bf16, with V, W and bias of its dtype or of
 *  f32: products take them rounded to x0's dtype, biases and sums stay f32. @out: x0's shape. */
PERI_API peri_status peri_op_cross_net(peri_tensor *x0, peri_tensor *const *v, peri_tensor *const *w,
                                       peri_tensor *const *bias, int32_t n, peri_tensor **out);

/* -- losses -------------------------------------------------------------------------------------------------------- */

/** What a loss gives: one number for each sample, their mean, or their sum. */
enum { PERI_LOSS_NONE = 0, PERI_LOSS_MEAN = 1, PERI_LOSS_SUM = 2 };

/** Binary cross entropy of logits @x and targets @target (numbers in 0..1, of x's shape). @weight (broadcast to x; or
 *  NULL) scales each element's loss, @pos_weight (broadcast; or NULL) its positive part. The mean is over elements, not
 *  weights. Only @x has a gradient. */
PERI_API peri_status peri_op_bce_with_logits(peri_tensor *x, peri_tensor *target, peri_tensor *weight,
                                             peri_tensor *pos_weight, int32_t reduction, peri_tensor **out);
/** Binary cross entropy of probabilities; logarithms are clamped at -100. @weight as above. Waits: PERI_ERANGE for a
 *  probability or target outside 0..1. */
PERI_API peri_status peri_op_bce(peri_tensor *x, peri_tensor *target, peri_tensor *weight, int32_t reduction,
                                 peri_tensor **out);
/** Squared error. */
PERI_API peri_status peri_op_mse(peri_tensor *x, peri_tensor *target, int32_t reduction, peri_tensor **out);
/** Softmax cross entropy of logits @x [B, C] and class numbers @labels (i64 [B], 0 <= label < C). Waits for the labels
 *  to be checked: PERI_ERANGE names the first bad row. */
PERI_API peri_status peri_op_cross_entropy(peri_tensor *x, peri_tensor *labels, int32_t reduction, peri_tensor **out);
/** The loss of choosing item i of the batch for query i among all: @queries and @items [B, D]. Of the logits, which are
 *  products times @scale, that of item j loses @log_q[j] (the logarithm of how often it is drawn; [B], NULL: 0). Item j
 *  is no negative of query i where it has the id of item i (@ids [B], integers; NULL: all differ). */
PERI_API peri_status peri_op_in_batch_softmax(peri_tensor *queries, peri_tensor *items, peri_tensor *ids,
                                              peri_tensor *log_q, double scale, int32_t reduction, peri_tensor **out);
/** How rows of a cross entropy count. */
typedef struct peri_cross_entropy_config {
    int64_t size;           /* sizeof(peri_cross_entropy_config) */
    peri_tensor *weight;    /* [C]: the factor of losses of rows with that label; a mean is weighted; NULL: 1 each */
    double label_smoothing; /* 0..1: the share of the target that all classes have in equal parts */
    int64_t ignore_index;   /* with `ignores`: rows with this label, which may be no class, have the loss 0, and a mean
                               does not count them */
    bool ignores;
} peri_cross_entropy_config;
/** peri_op_cross_entropy, as @config says. The mean of nothing is NaN. */
PERI_API peri_status peri_op_cross_entropy_with(peri_tensor *x, peri_tensor *labels,
                                                const peri_cross_entropy_config *config, int32_t reduction,
                                                peri_tensor **out);

/* -- formulas ------------------------------------------------------------------------------------------------------ */

/** Several functions of elements that are computed in one pass. The result is that of the last step. Registers 0 to
 *  n_in - 1 are the inputs, and step k writes register n_in + k. For |x - t| times a number, of inputs x and t:
 *
 *    steps[3][6] = {{peri_formula_code("sub"), 0, 1}, {peri_formula_code("abs"), 2},
 *                   {peri_formula_code("affine"), 3, 0, 0, 0, 1}}
 *    numbers[2] = {factor, 0}, n_in = 2, n_steps = 3, n_numbers = 2
 *
 *  The last step's scale is numbers[0], its shift numbers[1].
 */
typedef struct peri_formula {
    int64_t size;         /* sizeof(peri_formula) */
    const char *name;     /* what messages begin with; NULL: peri_op_formula */
    const int32_t *steps; /* [n_steps][6]: code (peri_formula_code), a, b, c, x, y. a, b, c: registers before the step's
                             own: of a function of one element a; of two, a and b; of "where" (a is not 0) ? b : c.
                             x, y: which of the numbers: of "affine" the scale and the shift, of "clamp" the bounds, of
                             "pow" the exponent, of "leaky_relu" the slope, of "reciprocal" the numerator, of "number"
                             the number */
    const double *numbers;             /* [n_numbers] */
    int32_t n_in, n_steps, n_numbers;  /* 1..4 inputs, 1..64 steps, of which the gradient has as many at most, too */
    int32_t reduction;                 /* PERI_LOSS_NONE, or the sum or mean of the results over dims[n_dims] */
    const int32_t *dims;
    int32_t n_dims; /* 0: all */
    bool keepdim;   /* they stay, with size 1 */
    bool in_f32;    /* in a region of autocast a result of 16-bit inputs stays f32, as that of losses does */
} peri_formula;

/** The code of a step: that of the functions of one element "identity", "relu", "sigmoid", "tanh", "exp", "sqrt",
 *  "silu", "gelu", "softplus", "logsigmoid", "leaky_relu", "log", "abs", "square", "pow", "affine", "reciprocal",
 *  "clamp", "root", "log1p", "expm1", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "round", "trunc", "sign"; of two:
 *  "add", "sub", "mul", "div", "maximum", "minimum"; of comparisons, which give 1 or 0: "eq", "ne", "lt", "le", "gt",
 *  "ge"; of "where" and "number". -1: there is no such step. */
PERI_API int32_t peri_formula_code(const char *name);
/** Formula @f of the elements of @in[f->n_in], which broadcast. Computed in f64 if an input is f64, else in f32; a
 *  result of 16-bit inputs is rounded once. All inputs that require grad have gradients, as the functions of this
 *  header that the steps are called after have them. */
PERI_API peri_status peri_op_formula(const peri_formula *f, peri_tensor *const *in, peri_tensor **out);

/* -- means over ranks ---------------------------------------------------------------------------------------------- */

/** What ranks add up for a mean: @out new f64 [2]: @sum (one element, f32 or f64) and @count (one element of any dtype;
 *  NULL: @number). Nothing is recorded. */
PERI_API peri_status peri_op_mean_parts(peri_tensor *sum, peri_tensor *count, double number, peri_tensor **out);
/** The mean parts[0] / parts[1] of what @ranks ranks have added up, as a scalar of @sum's dtype; 0 / 0 is 0. The
 *  gradient of @sum, this rank's part of it, is ranks / parts[1] times the mean's. @parts NULL: this rank is alone, and
 *  the mean is sum / @number. */
PERI_API peri_status peri_op_mean_of(peri_tensor *sum, peri_tensor *parts, double number, int32_t ranks,
                                     peri_tensor **out);

#endif
