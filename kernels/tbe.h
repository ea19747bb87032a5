/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels/tbe.h: table-batched embedding: pooled lookups in many tables at once, and the backward pass fused with its
 * optimizer.
 *
 * Words
 *   table   a shard of an embedding table: rows x cols of a group's weights
 *   bag     ids[offsets[b] .. offsets[b + 1]): what one sample looks up for one feature
 *   block   consecutive bags that look into one table; where block k's bag j lies in the output (and in its gradient)
 *           is out_offset + j * out_stride elements from the start. Blocks may share bags (several tables of one
 *           feature), skip bags, and stand in any order
 *   item    one id of one block. The *list* is all items: block after block, bag after bag, id after id
 *   linear row  number of a row among all rows of the group: table.first_row + row; total_rows means "no row"
 *
 * Ids: -1 is a pruned row. It, and every id outside 0..rows-1, adds nothing, gets no gradient and changes no row, but
 * counts in the length of its bag. Offsets: every read is clamped to [0, n_ids] and to the block's own ids, so no
 * kernel leaves its memory whatever the offsets say; tbe_check says what they say.
 *
 * Arithmetic is f32, and written down so that every instruction set computes the same bits:
 *   fma(a, b, c) = a * b + c rounded once;
 *   sum16(x) over a row: sixteen partial sums s[l], s[l] = x[l] + x[l + 16] + ... in this order (fma where x is a
 *   product), from 0, then s[l] += s[l + 8] for l < 8, += s[l + 4] for l < 4, += s[l + 2], += s[l + 1].
 *   Missing elements of the last sixteen count as +0.
 */
#ifndef PERI_KERNELS_TBE_H
#define PERI_KERNELS_TBE_H

#include <perilune/base.h>

#include "work.h"

/** X(..., width) for each number of columns that lookups and updates know when they are compiled; those of other widths
 *  are slower. */
#define PERI_TBE_WIDTHS(X, ...) X(__VA_ARGS__, 32) X(__VA_ARGS__, 64) X(__VA_ARGS__, 128) X(__VA_ARGS__, 256)

/* -- the list ------------------------------------------------------------------------------------------------------ */

/** Pooling (PERI_POOLING_*) NONE: every id is a bag of its own; the result of id i (its place in ids) of a block lies
 *  at out_offset + i * out_stride, and so does its gradient.
 *
 *  How rows are stored (PERI_ROWS_*): as PERI_F32, PERI_F16, PERI_BF16, or in bytes; offset and stride of a table then
 *  count bytes.
 *    INT8       cols codes, f32 scale, f32 bias (FBGEMM's fused 8-bit rows)               x = fma(code, scale, bias)
 *    INT8_HALF  f16 scale, f16 bias, cols codes (of its inference tables)                 x = fma(code, scale, bias)
 *    INT4, INT2 the same, two or four codes a byte: the first one in the low bits; what is left of the last byte means
 *               nothing
 *    FP8        cols codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; all codes are numbers
 *  Bytes have no alignment. */
typedef struct peri_k_tbe_table {
    int64_t rows, cols; /* of the shard; rows may be 0 */
    int64_t offset;     /* elements (or bytes) from the group's first weight to row 0 */
    int64_t stride;     /* elements (or bytes) from row to row, at least a row */
    int64_t first_row;  /* linear row of row 0: the rows of all tables before */
    int32_t pooling;    /* PERI_POOLING_* */
    int32_t reserved;
    int64_t row_offset, col_offset; /* place of the shard in the whole table */
    uint64_t random_stream;         /* of the whole table's random numbers */
} peri_k_tbe_table;

/** Same layout as the public peri_tbe_block. */
typedef struct peri_k_tbe_block {
    int64_t first_bag, bags;
    int64_t out_offset, out_stride; /* elements */
    int32_t table, feature;         /* place in `tables`; the caller's number, for reports */
} peri_k_tbe_block;

/** What tbe_prepare knows about block k. Entry n_blocks holds the totals. */
typedef struct peri_k_tbe_span {
    int64_t first_id; /* place in ids of the block's first id; clamped */
    int64_t items;    /* items of all blocks before this one */
    int64_t cost;     /* work of all blocks before this one; bag j starts at cost + (offset of bag j - first_id + j) *
                         (cols + 8) */
} peri_k_tbe_span;

/** A block list over ids. Pointers are device memory. What stands under "sizes" is for choosing how to split the work:
 *  results do not depend on it. */
typedef struct peri_k_tbe_list {
    const void *ids;       /* n_ids of ids_dtype (PERI_I64, PERI_I32) */
    const void *offsets;   /* n_bags + 1 of offsets_dtype (PERI_I64, PERI_I32) */
    const float *weights;  /* n_ids, or NULL: 1 */
    const float *scale;    /* n_bags, or NULL: 1 */
    const int32_t *places; /* n_placed, or NULL: the result of bag first_placed + i lies, instead of at out_offset + j *
                              out_stride, at out_offset + places[i] * out_stride, and so does its gradient. Of a block
                              all bags are placed, or none; not with pooling NONE */
    int64_t first_placed, n_placed;
    const peri_k_tbe_table *tables;
    const peri_k_tbe_block *blocks;
    const peri_k_tbe_block *ordered; /* the same ones in the order of their tables, else as they stand; may be `blocks`.
                                        For tbe_sort */
    peri_k_tbe_span *spans; /* n_blocks + 1 */
    int64_t n_ids, n_bags, n_tables, n_blocks;
    int64_t capacity; /* most items that the caller has room for */
    int32_t ids_dtype, offsets_dtype;
    /* sizes: bags of all blocks; the most bags that look into one table; mean columns of the blocks, weighted by their
     * bags */
    int64_t all_bags, most_bags, width;
} peri_k_tbe_list;

/** f32 numbers that a pass over a list meets, about. */
static inline int64_t peri_k_tbe_work(const peri_k_tbe_list *s) { return (s->capacity + s->all_bags) * (s->width + 8); }

/** The factor of a bag, and of its ids with pooling NONE: (1 / number of ids if its table's pooling is MEAN, else 1) *
 *  (scale of the bag, else 1); of an item: fl(weight * factor). */

/** Operation and step: fill spans, in the order of the list. An item count beyond `capacity` is cut. range: 1, serial
 *  over blocks. */
typedef struct peri_k_tbe_prepare_args {
    peri_k_tbe_list list;
    int64_t *totals; /* NULL, or [2]: += items, += bags */
} peri_k_tbe_prepare_args;

/* -- checking ------------------------------------------------------------------------------------------------------ */

/** What is wrong with a list. Starts as {0, 0, INT64_MAX, INT64_MAX}. */
typedef struct peri_k_tbe_report {
    int64_t bad_ids, bad_bags;     /* ids outside -1..rows-1; bags without 0 <= begin <= end <= n_ids, or that
                                      `capacity` cut */
    int64_t first_item, first_bag; /* the first of each: place in the list of items, in the list of bags */
    /* Filled by tbe_report when something is bad (the first bad bag if there is one, else the first bad id): */
    int64_t sample;     /* bag in its block */
    int64_t place;      /* id in its bag */
    int64_t id, rows;   /* the id and the allowed number of rows */
    int64_t begin, end; /* the offsets of a bad bag */
    int64_t n_ids;
    int32_t block, table, feature, reserved;
} peri_k_tbe_report;

/** Operation and step: count what is bad into `report` (atomically; the counts and firsts do not depend on the order).
 *  range: chunks; chunk c covers the bags whose cost lies in [c, c + 1) * total cost / chunks. Needs tbe_prepare. */
typedef struct peri_k_tbe_check_args {
    peri_k_tbe_list list;
    peri_k_tbe_report *report;
    int64_t chunks; /* the step's */
} peri_k_tbe_check_args;

/** Operation and step: describe the first offence. range: 1. After it, counters += {bad_ids, bad_bags} if counters is
 *  not NULL. */
typedef struct peri_k_tbe_report_args {
    peri_k_tbe_list list;
    peri_k_tbe_report *report;
    int64_t *counters; /* NULL, or [2] */
} peri_k_tbe_report_args;

/** How rows that lie in memory are reached: times change with it, results do not. Zeros: they are read when they
 *  come. */
typedef struct peri_k_tbe_reach {
    int64_t ahead; /* tbe_forward, tbe_weight_gradient: bytes of rows, tbe_update: items, that are asked for before they
                      are needed */
    int64_t past;  /* tbe_forward: f32 numbers of rows of a call from which on its outputs go past the caches; 0:
                      never */
    bool near;     /* into the first-level cache, else into the second */
    bool in_order; /* the cache lines of a row are read in order: hardware may fetch those behind them; else out of
                      order */
    bool rows_near; /* tbe_update: f16 and bf16 rows are asked for into the first level when they are the next */
    int32_t kept; /* tbe_update: bytes of rows of the gradient that are put next to each other when they are read for
                     the first time, and read there again while the table is the same; 0: none */
} peri_k_tbe_reach;

/* -- forward ------------------------------------------------------------------------------------------------------- */

/** Operation and step. For each bag j of each block k, with row(id) = weight + table.offset + id * table.stride, its
 *  numbers as f32:
 *      acc[d] = 0
 *      for each valid id i of the bag, in order:  acc[d] = fma(weights[i], row(id)[d], acc[d])
 *      out[block.out_offset + j * block.out_stride + d] = acc[d] * factor of the bag, rounded to out_dtype
 *  (weights[i] = 1 without weights). With pooling NONE each id is a bag, and i stands in the place of j. If report is
 *  not NULL, count bad input as tbe_check does. range: chunks, as in tbe_check. */
typedef struct peri_k_tbe_forward_args {
    peri_k_tbe_list list;
    const void *weight;
    void *out;
    peri_k_tbe_report *report;
    int64_t chunks;       /* the step's */
    int32_t weight_dtype; /* PERI_F32, PERI_F16, PERI_BF16, PERI_ROWS_* */
    int32_t out_dtype;    /* PERI_F32, PERI_F16, PERI_BF16 */
    peri_k_tbe_reach reach;
} peri_k_tbe_forward_args;

/** Operation and step. grad_weights[i] = sum over the blocks k that hold id i, in order of k:
 *      fl(sum16(grad[d] * row(id)[d]) * factor of the bag), 0 for invalid ids; ids in no block get 0.
 *  range: chunks; chunk c covers ids [c, c + 1) * n_ids / chunks. Needs tbe_prepare. */
typedef struct peri_k_tbe_weight_gradient_args {
    peri_k_tbe_list list;
    const void *weight;
    int32_t weight_dtype;
    const float *grad;
    float *grad_weights; /* n_ids */
    int64_t chunks;      /* the step's */
    peri_k_tbe_reach reach;
} peri_k_tbe_weight_gradient_args;

/* -- sorting ------------------------------------------------------------------------------------------------------- */

/** Where an item's gradient lies, and its factor. */
typedef struct peri_k_tbe_item {
    int64_t grad; /* elements */
    float scale;
    int32_t reserved;
} peri_k_tbe_item;

/** Operation: the items of a list in the order of their rows. For each item p: a key, linear row << payload_bits |
 *  payload; invalid ids have linear row total_rows.
 *  items NULL (all item factors are 1): payload = out_offset + j * out_stride; else payload = the place of items[..] =
 *  {that, fl(weight * factor)}, which the device chooses (the items' numbers, in the order of `blocks` or of
 *  `ordered`).
 *  keys: the n = spans[n_blocks].items keys, with linear rows ascending, and those of a row in the order of the list;
 *  keys of invalid ids may stand behind the rows of their table instead of at the end. Needs tbe_prepare; spans stay.
 *  Fewer than 2^32 items. */
typedef struct peri_op_tbe_sort {
    peri_k_tbe_list list;
    uint64_t *keys;         /* room for list.capacity */
    peri_k_tbe_item *items; /* as many, or NULL */
    int64_t total_rows;
    int32_t payload_bits;   /* 64 - the bits of total_rows, at most */
} peri_op_tbe_sort;

/** For each item p of the list: keys[p] = linear row << payload_bits | payload. Invalid ids have linear row total_rows.
 *  items NULL (all item factors are 1): payload = out_offset + j * out_stride; else payload = p and
 *  items[p] = {that, fl(weight * factor)}. counts as radix_histogram of keys. range: chunks, as in radix_histogram. */
typedef struct peri_k_tbe_keys_args {
    peri_k_tbe_list list;
    uint64_t *keys;
    peri_k_tbe_item *items;
    uint32_t *counts;
    int64_t total_rows, chunks;
    int32_t payload_bits, shift, bits;
} peri_k_tbe_keys_args;

/** One pass of a stable counting sort by digit(x) = (x >> shift) & (2^bits - 1) of n[0] elements.
 *  radix_histogram: counts[c << bits | d] = elements of chunk c with digit d. range: chunks; chunk c covers elements
 *                   [c, c + 1) * n / chunks.
 *  radix_scan:      counts[c << bits | d] = elements with a smaller digit, and with digit d in chunks before c. range:
 *                   1.
 *  radix_scatter:   for each element of chunk c in order: dst[counts[c << bits | digit]++] = element. range: chunks. */
typedef struct peri_k_radix_args {
    const uint64_t *src;
    uint64_t *dst;
    uint32_t *counts;
    const int64_t *n;
    int64_t chunks;
    int32_t shift, bits;
} peri_k_radix_args;

/** The same order in one kernel, table by table, for lists whose blocks stand in the order of their tables: keys in
 *  ascending order as of tbe_keys and all passes, with items filled alike; but the invalid ids of a table (linear row
 *  total_rows) stand behind its own rows. range: chunks; chunk c covers the tables whose first item lies in [c, c + 1)
 *  * n / chunks, n all items. */
typedef struct peri_k_tbe_sort_args {
    peri_k_tbe_list list;
    uint64_t *keys, *room; /* n each; the result is in keys */
    peri_k_tbe_item *items;
    uint32_t *counts; /* chunks << PERI_K_TBE_SORT_BITS */
    int64_t total_rows, chunks;
    int32_t payload_bits;
} peri_k_tbe_sort_args;
/** BITS: of all digits of a table's keys. PER_THREAD: chunks, so that tables of different sizes even out. */
enum { PERI_K_TBE_SORT_BITS = 13, PERI_K_TBE_SORT_PER_THREAD = 4 };

/* -- updating ------------------------------------------------------------------------------------------------------ */

/** The optimizers are PERI_TBE_* of perilune/base.h. Of NONE the summed gradient is stored and the weights stay;
 *  tbe_update does not know SHAMPOO (see tbe_gram) and EMAINPLACE_ROWWISE_ADAGRAD, which is rowwise adagrad and
 *  tbe_ema.
 *
 *  One row's update, g its summed gradient, n = cols. Multiplications and additions are single f32 operations in the
 *  order written; w, g, h, m, m1, m2 with n elements are meant element by element; norm(x) = sqrt(sum16(x * x)). Rows
 *  that a batch does not touch keep weights and state: decay of weights and of moments is lazy.
 *
 *  Decay of sgd, adagrad and rowwise adagrad:   x = fma(wd, w, g) (L2), g (none, decouple)
 *      keep = 1 - rate * wd, rate = lr (decouple; rowwise adagrad with L2: rate = mult), else 1
 *
 *  sgd (FBGEMM EXACT_SGD; decay: torch.optim.SGD, Loshchilov and Hutter 2019)
 *      w = fma(-lr, x, keep * w)
 *  adagrad (EXACT_ADAGRAD; Duchi, Hazan, Singer 2011; decay: torch.optim.Adagrad)   h = momentum1 [rows, cols]
 *      h = fma(x, x, h)        w = keep * w - (lr * x) / (sqrt(h) + eps)
 *  rowwise adagrad (EXACT_ROWWISE_ADAGRAD; Naumov et al. 2019)   m = momentum1 [rows]
 *      m = m + sum16(x * x) / n       mult = lr / (sqrt(m) + eps)       w = fma(-mult, g, keep * w)
 *  adam (ADAM with AdamW's decay; Kingma, Ba 2015; Loshchilov, Hutter 2019)
 *      m1, m2 = momentum1, momentum2 [rows, cols]
 *      t = iteration, or row_counter + 1 (stored) with row_bias_correction
 *      m1 = fma(1 - beta1, g, beta1 * m1)       m2 = fma((1 - beta2) * g, g, beta2 * m2)
 *      u = (m1 * c1) / (sqrt(m2 * c2) + eps)       c1 = 1 / (1 - beta1^t), c2 = 1 / (1 - beta2^t)
 *      w = w - lr * fma(wd, w, u)
 *      1 - beta and, without row_bias_correction, c1 and c2 are computed in f64 on the host; with it c1 and c2 are
 *      computed per row in f64 with beta^t by repeated squaring (tbe_power), and rounded.
 *  partial rowwise adam (PARTIAL_ROWWISE_ADAM)   as adam, but m2 = momentum2 [rows]
 *      m2 = fma(1 - beta2, sum16(g * g) / n, beta2 * m2)
 *  lamb (LAMB; You et al. 2020, per row)   m1, m2, c1, c2, u as adam
 *      r = fma(wd, w, u)       ratio = norm(w) / norm(r) where both are > 0, else 1       w = fma(-(lr * ratio), r, w)
 *      (FBGEMM has no guard: it freezes rows of zeros for ever, and makes NaN where r is 0. The guard is that of You et
 *      al.'s code.)
 *  partial rowwise lamb (PARTIAL_ROWWISE_LAMB)   as lamb with the m2 of partial rowwise adam
 *  lars sgd (LARS_SGD; You, Gitman, Ginsburg 2017, per row)   m = momentum1 [rows, cols]
 *      a = lr * ((eta * norm(w)) / (norm(g) + wd * norm(w))) where norm(w) and the denominator are > 0, else lr
 *      m = fma(a, fma(wd, w, g), momentum * m)       w = w - m
 *      (FBGEMM has no guard: rows of zeros stay zeros; with a gradient of zeros they become NaN.)
 *  lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2; not in FBGEMM)
 *      m = momentum1 [rows, cols]       s = sign(fma(1 - beta1, g, beta1 * m)), sign(0) = 0
 *      w = w - lr * fma(wd, w, s)       m = fma(1 - beta2, g, beta2 * m)
 *
 *
 *  The last two keep numbers of a row: prev = prev_iter [rows], the last step that touched it (0: none), and c =
 *  row_counter [rows]. With t = iteration, gap = 1 if prev = 0, else max(1, t - prev); then prev = t. What is written
 *  in capitals is computed in f64, from the f32 numbers of the row and of the optimizer, and RATE and KEEP are rounded
 *  to f32 at the end (kernels/ref/tbe_step.h); powers with whole exponents are by repeated squaring (tbe_power), and
 *  the one other is libm's pow, in ref and cpu alike.
 *      w = fma(-RATE, g, KEEP * w)
 *  rowwise rmsprop ar (ROWWISE_RMSPROP_AR: RMSProp, Tieleman, Hinton 2012, with one mean square a row, and the adaptive
 *  regularisation of rows that come rarely)   m = momentum1 [rows]; b = ema_beta (beta1)
 *      m = fma(1 - b, sum16(g * g) / n, b * m)       RATE = lr / (SQRT(m) + eps)
 *      KEEP = MAX(min_shrinkage, 1 - MIN(1, lr * ar_alpha * gap))
 *  rowwise adagrad with counter (EXACT_ROWWISE_ADAGRAD with WeightDecayMode COUNTER or COWCLIP)
 *      m = momentum1 [rows]; h = halflife
 *      c = 1 + 2^(-gap / h) * c (h > 0), 1 (h = 0), c + 1 (h < 0), rounded to f32: how often the row came lately
 *      x = fma(wd, w, g) (L2), g       m = m + sum16(x * x) / n       MULT = lr / (SQRT(m) + eps)
 *      clip = false (COUNTER), with tail = FLOOR(tail * top) if tail_ratio, else tail, and top = max_counter of the
 *      table:
 *        now = adjustment_iter <= 0 or t > adjustment_iter; unless now: RATE = MULT, KEEP = 1; else
 *        RATE = MULT unless c > tail; where c > tail by `rates`:
 *            TAIL_UP: MULT * CLAMP((top / (c + 1))^adjustment_ub, 1, 10)
 *            TAIL_DOWN: MULT * CLAMP(((c + 1) / top)^adjustment_ub, 0.1, 1)
 *            COUNTER_SGD: lr / (SQRT(adjustment_ub * c) + eps)
 *        KEEP = 1 - h / c * wd * MULT (L2), 1 - h / c * wd * lr (DECOUPLE), 1 (NONE)
 *        ADAGRADW: RATE = MULT * SQRT(c) where h = -1, MIN(lr * c, adjustment_ub) / (SQRT(m) + eps) where h = -2, else
 *        as above;
 *            LAZY = (1 - wd * lr)^(min(gap, t - adjustment_iter) - 1): what the row missed       RATE = RATE * LAZY
 *            KEEP = (1 - wd * lr) * LAZY
 *      clip = true (COWCLIP; Zhao et al. 2023, "CowClip: Reducing CTR Prediction Model Training Time from 12 hours to
 *      10 minutes"):
 *        BOUND = c * MAX(weight_norm * norm(w), lower_bound), SIZE = SQRT(sum16(x * x))
 *        RATE = MULT * BOUND / SIZE where BOUND < SIZE, else MULT
 *        KEEP = 1 - wd * RATE (L2), 1 - wd * lr (DECOUPLE), 1 (NONE)
 *      (FBGEMM makes NaN of a row with x = 0 and BOUND = 0: 0 / 0. Its steps t are f32, and wrong beyond 2^24; and a
 *      gap below 1, of an iteration that was set back, makes its counters and weights grow.)
 *
 *  Then, with max_norm > 0 (FBGEMM's max_norm, there for rowwise adagrad on GPU only):
 *      w = w * (max_norm / norm(w)) where norm(w) > max_norm
 *
 *  Tables of f16 and bf16: w is the stored weight converted to f32, which is exact; states are f32; the new w is
 *  rounded when it is stored: to nearest even, or stochastically, tbe_round_f16 and tbe_round_bf16 of
 *  kernels/ref/tbe_round.h with random bits that depend on (seed, iteration, table, row and column of the whole table)
 *  only, so neither on threads nor on the sharding.
 */
typedef struct peri_k_tbe_counter {
    int64_t halflife, adjustment_iter;
    double fading; /* 2^(-1 / halflife); halflife > 0 */
    float adjustment_ub, tail, weight_norm, lower_bound;
    int32_t rates; /* PERI_RATES_* */
    bool tail_ratio, clip;
} peri_k_tbe_counter;

typedef struct peri_k_tbe_optimizer {
    int32_t kind;        /* PERI_TBE_* */
    int32_t decay;       /* PERI_DECAY_* up to DECOUPLE; with counters PERI_COUNTER_* */
    float lr, eps, weight_decay;
    float beta1, beta2, rest1, rest2; /* rest = 1 - beta */
    float correction1, correction2;   /* c1, c2 */
    float eta, momentum, max_norm;
    double exact_beta1, exact_beta2;
    float max_gradient; /* > 0: every element of the upstream gradient is clamped to +-max_gradient before anything
                           else */
    bool row_bias_correction;
    bool stochastic; /* rounding of f16 and bf16 weights */
    bool exact;      /* sum gradients so that their order does not matter; see tbe_update */
    uint64_t seed, iteration; /* of the rounding; iteration: also t of the formulas */
    float ar_alpha, min_shrinkage; /* rowwise rmsprop ar, whose ema_beta is beta1 */
    peri_k_tbe_counter counter;
} peri_k_tbe_optimizer;

/** Where rows live. Full states are laid out as the weights; row states are indexed by linear row. A state pointer that
 *  the optimizer has no use for is NULL. */
typedef struct peri_k_tbe_rows {
    const peri_k_tbe_table *tables;
    int64_t n_tables, total_rows;
    int64_t max_cols; /* of the widest table */
    void *weight;
    int32_t weight_dtype;
    float *momentum1, *momentum2, *row_counter; /* NULL where the optimizer has none */
    int64_t *prev_iter;       /* by linear row */
    const float *max_counter; /* by table; for the rates and tails that ask for it */
    const int64_t *slot_row; /* by linear row: which row of its table it stands for (stochastic rounding in caches);
                                NULL: itself */
} peri_k_tbe_rows;

/** Scratch of a chunk whose widest table has @cols columns, in f32. */
enum { PERI_K_TBE_SCRATCH_ROWS = 5, PERI_K_TBE_SCRATCH_MORE = 64 }; /* rows of round16(cols), and a constant */

/** Operation and step. sorted: keys in ascending order of linear row (ties in list order), from tbe_sort. For each run
 *  of equal linear rows < total_rows:
 *      in groups of 256 items, in order: group[d] = sum over the group of  grad[d] (no items array) or fma(item.scale,
 *      grad[d], .), each starting from its first term (grad[d], or scale * grad[d]);
 *      g[d] = first group, then + each further group in order
 *      update the row with g; kind NONE: dense[table.offset + row * stride + d] = g[d], touched[linear row] = 1; or,
 *      with run_values, for the r-th run of all: run_rows[r] = linear row, run_values[r * run_stride + d] = g[d], and
 *      runs[0] = all runs (the operation alone; a step has run_starts)
 *  range: chunks; chunk c covers the runs that start in elements [c, c + 1) * n / chunks. Each row has one run, so
 *  there are no races. updated[0] += runs.
 *
 *  With optimizer.exact the sum of a column is instead, with the terms t = scale * grad[d] in f64 (exact: 24 + 24
 *  bits):
 *      largest = max |t|
 *      big = 1.5 * 2^(E + L + 1), 2^E the least power of two > largest, 2^L the least >= items, if largest is finite
 *            and > 0, else 0
 *      g[d] = f32(sum of (t + big) - big), in f64
 *  which depends on the multiset of terms only, not on their order: `largest` and `items` do not; q = (t + big) - big
 *  depends on t and big; it is a multiple of u = 2^(E + L - 51), the distance of doubles around big, because |t| <= 2^E
 *  keeps t + big between 2^(E + L + 1) and its double; |q| <= 2^E; so every partial sum of q's, in whatever order, is a
 *  multiple of u and at most 2^(E + L) = 2^51 u, hence a double: no addition rounds. Only the conversion to f32 does.
 *  (With infinities and NaN among the terms the sum is an infinity or NaN: of every order the same one.) A term loses
 *  at most u / 2, and 2^E is at most 2 * largest: the sum is off by at most items * 2^(L - 51) * largest. */
typedef struct peri_k_tbe_update_args {
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    const uint64_t *sorted;
    const int64_t *n;
    const peri_k_tbe_item *items;
    const float *grad;
    float *dense, *touched;
    int64_t *runs;
    int64_t *run_rows;
    float *run_values; /* NULL: dense */
    int64_t run_stride;
    int64_t capacity; /* of the list: *n at most */
    int64_t work;     /* of the list: peri_k_tbe_work; for choosing how to split it */
    const int64_t *run_starts; /* the step's: of tbe_runs, with the same chunks */
    float *scratch; /* the step's: chunks * scratch_stride; stride >= SCRATCH_ROWS * round16(cols) + SCRATCH_MORE. What
                       is more, in all chunks of a call, may hold rows of the gradient (reach.kept) */
    int64_t scratch_stride;
    int64_t chunks;
    int64_t *updated;
    int32_t payload_bits;
    int32_t halvings; /* the sums are multiplied by 2^-halvings (0..30), which rounds none that is not next to 0 */
    peri_k_tbe_reach reach;
} peri_k_tbe_update_args;

/** Operation and step. For each linear row with touched[row] != 0: update it with g = its row of dense. range: chunks;
 *  chunk c covers linear rows [c, c + 1) * total_rows / chunks. */
typedef struct peri_k_tbe_dense_update_args {
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    const float *dense, *touched;
    float *scratch; /* the step's, as tbe_update's */
    int64_t scratch_stride;
    int64_t chunks;
} peri_k_tbe_dense_update_args;

/** starts[c] = runs of linear rows < total_rows that start in elements before chunk c of `sorted`; starts[chunks] =
 *  all.
 *  range: 1, serial. */
typedef struct peri_k_tbe_runs_args {
    const uint64_t *sorted;
    const int64_t *n;
    int64_t *starts; /* chunks + 1 */
    int64_t total_rows, chunks;
    int32_t payload_bits;
} peri_k_tbe_runs_args;

/** first[t] = the first of runs 0..runs[0] - 1 whose run_rows[r] >= first_row of table t; first[n_tables] = all runs;
 *  rows[r] = run_rows[r] - first_row of its table. range: tables; first[n_tables] with table 0. */
typedef struct peri_k_tbe_run_tables_args {
    const peri_k_tbe_table *tables;
    const int64_t *run_rows, *runs; /* of tbe_update */
    int64_t *rows, *first;
    int64_t n_tables;
} peri_k_tbe_run_tables_args;

/** Operation tbe_shampoo, and its three steps. Shampoo (Gupta, Koren, Singer 2018), preconditioned on one side, the
 *  columns', with the exponent -1/2 that goes with it, as Anil et al. 2020 ("Scalable Second Order Optimization for
 *  Deep Learning") do for embedding tables, whose rows are too many for a matrix of their own.
 *  For each table, G the summed gradients of the rows that the batch touches (tbe_update's sparse rows, in their
 *  order), n = cols:
 *      tbe_gram          gram[i][j] = fma(g[i], g[j], gram[i][j]) for each row g of G in order
 *                        range: rows of all grams
 *      tbe_root          root = (gram + eps I)^(-1/2), by Jacobi's method in f64, rounded
 *                        range: tables
 *      tbe_precondition  u[j] = sum over i, in order, of fma(g[i], root[i][j], .) from 0; the row is updated as SGD
 *                        does with gradient u
 *                        range: chunks; chunk c covers rows [c, c + 1) * first[n_tables] / chunks of all G
 *  A table that no id asked for keeps its gram. The gram is of the shard's rows and columns: a block of columns
 *  preconditions itself (block diagonal); blocks of rows would each see a part of G only. */
typedef struct peri_k_tbe_shampoo {
    const peri_k_tbe_table *tables;
    int64_t n_tables;
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    const float *values;      /* rows of G, `stride` apart */
    const int64_t *run_rows;  /* rows in their tables */
    const int64_t *first;     /* n_tables + 1 */
    int64_t stride;
    float *gram;              /* cols x cols, table after table */
    int64_t squares, all_cols; /* elements of gram; columns of all tables */
    int64_t most_rows;        /* of G */
    double eps;
    float *root;              /* the steps': as gram */
    double *room;             /* the steps': twice as many */
    float *scratch;           /* the steps': as tbe_update's */
    int64_t scratch_stride, chunks;
} peri_k_tbe_shampoo;

/** Operation and step: what EMAINPLACE_ROWWISE_ADAGRAD does to every row of every table (cols even, half = cols / 2)
 *  before the lookup of certain steps: its right half follows the left one.   w[d + half] = fma(coef, w[d] - w[d +
 *  half], w[d + half])   for d < half; f16 and bf16 are rounded as by tbe_update, with the optimizer's seed (the
 *  caller's: another one than that step's update has).
 *  range: chunks; chunk c covers linear rows [c, c + 1) * total_rows / chunks. */
typedef struct peri_k_tbe_ema_args {
    peri_k_tbe_rows rows;
    peri_k_tbe_optimizer optimizer;
    float *scratch; /* the step's, as tbe_update's */
    int64_t scratch_stride;
    int64_t chunks;
    float coef;
} peri_k_tbe_ema_args;

/** max_counter[t] = 1 + the largest row_counter of table t's rows, 1 without rows. range: tables. */
typedef struct peri_k_tbe_most_counted_args {
    const peri_k_tbe_table *tables;
    const float *row_counter;
    float *max_counter;
} peri_k_tbe_most_counted_args;

/** Set the bits of rows in a bitmap. Each item i of the range may name a linear row r, and no row is named twice:
 *      sorted given:   r = sorted[i] >> payload_bits, if i < n[0], r >= first and item i - 1 has another row (sorted:
 *                      as for tbe_update)
 *      touched given:  r = i, if r >= first and touched[i] != 0
 *      neither:        r = first + i
 *  If 0 <= r < total_rows: bits[r / 64] |= 1 << r % 64; where that bit was 0 before and `fresh` is given:
 *  fresh[n_fresh[0]++] = r, in any order. range: items. */
typedef struct peri_k_tbe_mark_args {
    const uint64_t *sorted;
    const int64_t *n;
    const float *touched;
    int64_t first, total_rows;
    uint64_t *bits;
    int64_t *fresh, *n_fresh; /* both or NULL */
    int32_t payload_bits;
} peri_k_tbe_mark_args;

/** dst[i] = min(max(src[i], 0), most) + add. range: elements. */
typedef struct peri_k_tbe_shift_args {
    const void *src; /* dtype: PERI_I64, PERI_I32 */
    int64_t *dst;
    int64_t most, add;
    int32_t dtype;
} peri_k_tbe_shift_args;

PERI_KERNELS_TBE(PERI_K_ARGS_OF) PERI_OPS_TBE(PERI_OP_ARGS_OF)

#endif
