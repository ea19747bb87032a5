/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/embed.h: table batches (TBE): embedding tables of one device, looked up and updated together.
 *
 * A table batch holds the weights of several tables, or of shards of tables, and the state of the one optimizer that
 * trains them. A lookup reads all of them in one call; its backward pass sums every row's gradient over the whole batch
 * and applies the optimizer once to each row that was looked up (exact fused update); other rows do not change. There
 * is no separate optimizer step.
 *
 * Everything here is local: nothing communicates. Calls on one table batch follow each other in the order in which they
 * are made, on whatever streams they are queued; lookups in memory do not wait for each other. Results do not depend on
 * the number of threads; the formulas are in kernels/tbe.h.
 *
 * Threads: any thread may call anything about a table batch (peri_tbe), a block list (peri_tbe_blocks) and row marks
 * (peri_row_marks) at any time. Lookups of tables in memory run beside each other; a call that changes something
 * (updates, writes, flushes, and every lookup of tables in files) waits until the calls of other threads have returned,
 * and they for it. So a lookup sees an update as a whole or not at all. One batch (peri_tbe_batch) is in one thread's
 * call at a time: a second thread gets PERI_EINVAL. Views of states (peri_tbe_state, peri_tbe_leaf) are plain memory:
 * who writes through them keeps others away.
 *
 * Memory: peri_tbe_forward allocates nothing, except when more calls are under way at once than ever before, or bags
 * are more than ever before. A program with N threads that cannot have this later makes N batches of its largest size
 * (peri_tbe_batch_new), looks each up once, and then releases them: what they needed is kept for the calls to come.
 */
#ifndef PERILUNE_EMBED_H
#define PERILUNE_EMBED_H

#include <perilune/jagged.h>
#include <perilune/quantize.h>

typedef struct peri_tbe peri_tbe;
typedef struct peri_tbe_blocks peri_tbe_blocks;
typedef struct peri_tbe_batch peri_tbe_batch;

/* -- tables -------------------------------------------------------------------------------------------------------- */

/** What rows of tables are stored as, by PERI_F32, PERI_F16, PERI_BF16 and PERI_ROWS_*: a name ("FP32", ..., "INT8",
 *  "INT8_HALF"; NULL: no table holds that; static text), and bits of a number (0 then). */
PERI_API const char *peri_row_format_name(int32_t dtype);
PERI_API int32_t peri_row_format_bits(int32_t dtype);
/** How rows of @cols numbers are stored where they are bytes (PERI_ROWS_*), as checkpoints say it: "INT8 x 4", in @text
 *  of @bytes bytes, cut to what fits; "" where they are numbers. PERI_EINVAL: @bytes below 1. Local. */
PERI_API peri_status peri_row_format_text(int32_t dtype, int64_t cols, char *text, int64_t bytes);
/** How rows of bytes (PERI_ROWS_*) lie in memory; PERI_EINVAL for any other @dtype. Local. */
PERI_API peri_status peri_row_format_of(int32_t dtype, peri_row_format *out);
/** Numbers @x [rows, cols] (f32, f16 or bf16) as rows of a table are stored: PERI_F32, PERI_F16, PERI_BF16, or u8 of
 *  one of PERI_ROWS_*. PERI_ERANGE: a number would become another than by rounding, infinite or NaN; the message has
 *  @table, the row (that of the first one is number @row), and what is allowed. Waits for the device. @out new. */
PERI_API peri_status peri_rows_encode(const char *table, int32_t dtype, int64_t row, peri_tensor *x,
                                      peri_tensor **out);

/** How weights start. Every element depends on (seed, table name, row, column of the whole table) only, never on the
 *  sharding. */
enum {
    PERI_INIT_DEFAULT = 0,  /* uniform in [-sqrt(1/total_rows), sqrt(1/total_rows)) */
    PERI_INIT_UNIFORM = 1,  /* uniform in [a, b) */
    PERI_INIT_NORMAL = 2,   /* mean a, deviation b */
    PERI_INIT_CONSTANT = 3, /* a */
    PERI_INIT_NONE = 4      /* undefined: the caller writes them */
};

/** A table, or the part of it that lives here: rows [row_offset, row_offset + rows) and columns [col_offset, col_offset
 *  + cols). */
typedef struct peri_table_config {
    int64_t size; /* sizeof(peri_table_config) */
    const char *name;       /* of the whole table; copied */
    int64_t rows, cols;     /* here; rows may be 0, cols >= 1 */
    int64_t row_offset, col_offset;
    int64_t total_rows, total_cols; /* of the whole table; 0: rows, cols */
    int32_t pooling;        /* PERI_POOLING_* */
    int32_t init;           /* PERI_INIT_* */
    double init_a, init_b;
    bool raw_ids;           /* its rows are given to raw ids by a map (perilune/collision.h): see
                               peri_tbe_ids_mark_set */
} peri_table_config;

/** How row-wise Adagrad counts rows (FBGEMM's CounterBasedRegularizationDefinition and CowClipDefinition). Counters of
 *  rows that come fade with the steps in between; what the numbers do is in the formulas. */
typedef struct peri_tbe_counter {
    int64_t halflife;           /* steps, >= -2; 0: counters are 1; < 0: they do not fade; -1 and -2 are two rules of
                                   ADAGRADW */
    int32_t weight_decay_mode;  /* PERI_COUNTER_*; COWCLIP: not ADAGRADW. COUNTER, L2 and DECOUPLE with
                                   weight_decay: halflife >= 0 */
    int32_t learning_rate_mode; /* COUNTER: PERI_RATES_* */
    int64_t adjustment_iter;    /* COUNTER: rates and decay are as of plain row-wise Adagrad until this step; >= -1 */
    double adjustment_ub;       /* COUNTER: >= 0 */
    double tail_id_threshold;   /* COUNTER: >= 0; a counter, or (tail_id_is_ratio) a share of max_counter */
    int64_t max_counter_update_freq; /* COUNTER: max_counter (which starts as 1) of a table becomes the largest counter
                                        of its rows here, plus 1, before every such step; 0: never. Asked for by
                                        TAIL_ID_* and by ratios */
    double weight_norm_coefficient, lower_bound; /* COWCLIP: >= 0 */
    bool tail_id_is_ratio;
} peri_tbe_counter;

/** Hyperparameters; those that an optimizer does not know must be 0. peri_tbe_optimizer_default fills in FBGEMM's
 *  defaults.
 *
 *  Adam, LAMB, LARS, Lion and their kin use norms, means or counters of a *row of this shard*: a table that is cut into
 *  columns keeps one such number for each column block, as TorchRec does. Everything else is element by element. */
typedef struct peri_tbe_optimizer_config {
    int64_t size; /* sizeof(peri_tbe_optimizer_config) */
    int32_t kind; /* PERI_TBE_* */
    int32_t weight_decay_mode; /* PERI_DECAY_*: SGD, Adagrad, row-wise Adagrad, EMA in place; of all others it is in
                                  their formula */
    double learning_rate, eps, beta1, beta2, weight_decay;
    double eta, momentum;      /* LARS */
    double ema_beta, ar_alpha, min_shrinkage; /* row-wise RMSProp: in [0, 1), >= 0, in [0, 1] */
    double step_ema_coef;      /* EMA in place, in [0, 1]: before the lookup of training step t (counted from 1; at the
                                  latest before its update), if t >= step_start and t is a multiple of step_ema >= 1;
                                  once a step, not in evaluation */
    int64_t step_ema, step_start;
    peri_tbe_counter counter;
    double max_norm;           /* > 0: rows whose norm is larger after an update are scaled down to it */
    double max_gradient;       /* > 0: clamp every element of the upstream gradient to +-max_gradient first; for the
                                  rows only */
    bool row_bias_correction;  /* Adam, LAMB, partial row-wise too: count each row's updates (state row_counter [rows]),
                                  not all */
    bool nearest;              /* tables of f16 and bf16: round updated weights to nearest even instead of
                                  stochastically */
    bool exact;                /* sum gradients so that the result does not depend on their order, to the last bit;
                                  slower. In sharded modules: nor on the number of ranks or the plan; and outputs do not
                                  either */
} peri_tbe_optimizer_config;

/** What happens to ids outside their table, and to bags whose offsets make no sense. Whatever the mode, inputs are
 *  never rewritten; bad ids, like the id -1 of a pruned row, add nothing to their bag, get no gradient and change no
 *  row, but count in the bag's length. */
enum {
    PERI_BOUNDS_FATAL = 0,   /* an error that names table, feature, sample and id. Of tables on a GPU that have been
                                through backward passes of the tape, a later call returns it, one such lookup for each
                                pass: backward, reading or synchronizing, at the latest the lookup behind the next
                                pass. Otherwise the lookup waits for the device's answer */
    PERI_BOUNDS_WARNING = 1, /* the same text as a log line for ids; bad offsets stay an error */
    PERI_BOUNDS_IGNORE = 2,  /* counted in the statistics only */
    PERI_BOUNDS_NONE = 3     /* not even counted */
};

/** Who leaves a full cache: the row that was not used for the longest time, or the one that the fewest batches used
 *  (counts age). */
enum { PERI_CACHE_LRU = 0, PERI_CACHE_LFU = 1 };
enum { PERI_CACHE_WAYS_NONE = -1, PERI_CACHE_WAYS_MAX = 256 };

/** A table that is larger than the memory of its device: its rows and their optimizer states live in a file, or, where
 *  the device has a memory of its own and no directory is given, in the host's memory; a cache of them is in the
 *  device's memory (TorchRec's CacheParams with the compute kernel fused_uvm_caching). Results have the same bits as
 *  those of a table in memory. */
typedef struct peri_cache_config {
    int64_t size; /* sizeof(peri_cache_config) */
    double load_factor;      /* rows in memory / rows, in (0, 1]; 0: 0.2. At least the different rows of one batch must
                                fit */
    int64_t reserved_memory; /* bytes of the device's (cpu: the machine's) memory that the caches of this table batch
                                leave to others: they are made smaller */
    const char *directory;   /* of the file, which stays there and is opened again by the same table; NULL: the host's
                                memory, or (cpu) a nameless temporary file */
    int32_t algorithm;       /* PERI_CACHE_LRU, PERI_CACHE_LFU */
    int32_t ways;            /* slots of a set: a row takes one of its set's, which follows from its number; where
                                batches in flight hold them all, one of a following set's. At most PERI_CACHE_WAYS_MAX.
                                PERI_CACHE_WAYS_NONE: no sets, any slot. 0: 64 where the device has a memory of its own,
                                else NONE */
} peri_cache_config;

typedef struct peri_tbe_config {
    int64_t size; /* sizeof(peri_tbe_config) */
    peri_device *device;
    int32_t dtype; /* of the weights: PERI_F32, PERI_F16, PERI_BF16; or PERI_ROWS_*, with optimizer NONE: rows that
                      start as zeros */
    int32_t bounds_check; /* PERI_BOUNDS_* */
    int32_t n_tables; /* may be 0 */
    const peri_table_config *tables; /* copied */
    int32_t n_features;
    const char *const *features; /* names for messages, by peri_tbe_block.feature; copied; may be NULL if n_features is
                                    0 */
    const peri_tbe_optimizer_config *optimizer; /* copied; NULL: PERI_TBE_NONE */
    uint64_t seed; /* of start values and stochastic rounding */
    const peri_cache_config *caches; /* NULL: tables in memory; else one for each table: behind a cache. Needs a fused
                                        optimizer. Copied */
    int32_t output_dtype; /* of peri_tbe_lookup: PERI_F32, PERI_F16, PERI_BF16 */
    bool mapped; /* without caches: rows, and states that have rows, lie in the host's memory, where the device's
                    kernels reach them (TorchRec's fused_uvm). PERI_EUNSUPPORTED on devices that do not. Where the
                    device's memory is the host's: as without */
    peri_tensor *weights; /* the rows of all tables, which lie there already: of `dtype` (rows of bytes: u8),
                             contiguous, on `device`; each table begins at a multiple of 16 elements, behind the table
                             before it. Retained; `init` is not looked at. For tables in memory of the caller's
                             (peri_host_tensor), in a file that is mapped, or shared between processes. NULL:
                             peri_tbe_new allocates and initialises them */
} peri_tbe_config;

/** FBGEMM's defaults of an optimizer, in @out, whose `size` is set:
 *  learning rate 0.01, eps 1e-8 (Shampoo: 1e-4), beta1 0.9, beta2 0.999 (Lion: 0.99, its paper's), eta
 *  0.001, momentum 0.9, ema_beta 0.99, ar_alpha 0, min_shrinkage 0.1, step_ema 10, step_start 0, step_ema_coef 0.6, no
 *  decay; with counters: COUNTER, halflife -1, adjustment_iter -1, adjustment_ub 1, rates EQUAL,
 *  max_counter_update_freq 1000, others 0; what it does not know is 0. PERI_EINVAL for an unknown kind. */
PERI_API peri_status peri_tbe_optimizer_default(int32_t kind, peri_tbe_optimizer_config *out);
/** Name of an optimizer, "rowwise_adagrad"; NULL: there is no such kind. Static text. */
PERI_API const char *peri_tbe_optimizer_name(int32_t kind);
/** Allocate and initialise the tables. @out new. */
PERI_API peri_status peri_tbe_new(const peri_tbe_config *config, peri_tbe **out);

/** What table @table of @tbe is: @out, whose `size` is set, gets the configuration that it was made with; 0 has become
 *  what it stands for. Its name is borrowed from @tbe. */
PERI_API peri_status peri_tbe_table(const peri_tbe *tbe, int64_t table, peri_table_config *out);
/** Bytes of weights, of what optimizers keep for them, and of caches, by where they lie. */
typedef struct peri_tbe_bytes {
    int64_t device; /* in the memory of the tables' device */
    int64_t host;   /* in the host's: rows that are mapped or behind a cache of a device with a memory of its own; what
                       caches know of rows */
    int64_t files;  /* in files: rows behind a cache */
} peri_tbe_bytes;

/** What peri_tbe_new would keep for the tables of @config, which it is not told to make: the same sizes, from the same
 *  functions. Planners ask it. @apart: the tables' device has a memory of its own; config->device is not looked at and
 *  may be NULL. Caches have as many rows as load_factor says. Errors are those of peri_tbe_new, but for memory that is
 *  short. */
PERI_API peri_status peri_tbe_bytes_of(const peri_tbe_config *config, bool apart, peri_tbe_bytes *out);
/** Whether lookups and updates on a processor are compiled for rows of @cols columns; those of other widths are
 *  slower. */
PERI_API bool peri_tbe_width_is_common(int64_t cols);
/** Take a reference. NULL is fine. */
PERI_API void peri_tbe_retain(peri_tbe *tbe);
/** Give up a reference; queued work still runs. NULL is fine. */
PERI_API void peri_tbe_release(peri_tbe *tbe);

/* -- lookups ------------------------------------------------------------------------------------------------------- */

/** Consecutive bags that look into one table. Row j of the block is written to (and its gradient read from) elements
 *  out_offset + j * out_stride .. + cols of the output: j counts the block's bags, or, if the table's pooling is NONE,
 *  is the place of an id among all ids of the input. */
typedef struct peri_tbe_block {
    int64_t first_bag, bags;       /* of the offsets of the input */
    int64_t out_offset, out_stride; /* elements */
    int32_t table;                 /* place in config.tables */
    int32_t feature;               /* place in config.features, for messages; -1: none */
} peri_tbe_block;

/** A block list, ready for use with @tbe or with another table batch of the same tables on the same device. Blocks may
 *  share bags, leave bags out and stand in any order; their outputs must not overlap. A gradient of a row that several
 *  bags ask for is summed in the order of the list. @blocks copied. @out new. */
PERI_API peri_status peri_tbe_blocks_new(const peri_tbe *tbe, const peri_tbe_block *blocks, int32_t n,
                                         peri_tbe_blocks **out);
PERI_API void peri_tbe_blocks_retain(peri_tbe_blocks *blocks);
PERI_API void peri_tbe_blocks_release(peri_tbe_blocks *blocks);

/** The input of a lookup. All tensors contiguous, on the table batch's device. */
typedef struct peri_tbe_input {
    peri_tensor *ids;        /* i64 or i32, [n] */
    peri_tensor *offsets;    /* i64 or i32, [bags + 1]: bag b is ids offsets[b] .. offsets[b + 1] */
    peri_tensor *weights;    /* f32 [n]: factors of the ids; NULL: 1 */
    peri_tensor *scale;      /* f32 [bags]: factors of the bags' results, beside the pooling's; NULL: 1 */
    peri_tbe_blocks *blocks;
} peri_tbe_input;

/** Pooled rows into @out (f32, f16 or bf16, rounded to nearest even; contiguous, any shape that the blocks fit into;
 *  elements that no block writes stay). Not recorded. Ids are checked while rows are read: after PERI_ERANGE @out is
 *  undefined. */
PERI_API peri_status peri_tbe_forward(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *out);
/** Update the tables with the gradient @grad (f32) of the output of peri_tbe_forward on the same @input, which has not
 *  failed: ids are not checked again, and bad ones are passed over. Advances the iteration, also when nothing was
 *  looked up. @grad_weights (f32 [n], or NULL) receives the gradient of the ids'
 *  weights. With optimizer NONE only
 *  @grad_weights is computed. */
PERI_API peri_status peri_tbe_backward(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad,
                                       peri_tensor *grad_weights);
/** Lookup on the tape: a new tensor of config.output_dtype and @shape[ndim] (elements that no block writes are 0). When
 *  gradients are recorded, the backward pass updates the tables as peri_tbe_backward does, with the learning rate of
 *  that moment, and gives input->weights a gradient if it wants one. With optimizer NONE the gradient goes to the
 *  tables' leaves (peri_tbe_leaf). @out new. */
PERI_API peri_status peri_tbe_lookup(peri_tbe *tbe, const peri_tbe_input *input, int32_t ndim, const int64_t *shape,
                                     peri_tensor **out);

/** A batch: an input on its way through @tbe. What its calls share is computed once: where the blocks begin in the ids,
 *  which rows are wanted, which of them are in memory. The input's tensors and blocks are retained, and must not change
 *  before the last call. The functions above make a batch of their own for each call (peri_tbe_lookup: for the lookup
 *  and its backward pass). @out new. */
PERI_API peri_status peri_tbe_batch_new(peri_tbe *tbe, const peri_tbe_input *input, peri_tbe_batch **out);
/** Take another reference. */
PERI_API void peri_tbe_batch_retain(peri_tbe_batch *batch);
/** Give up a reference; queued work still runs. NULL is fine. With tables in files rows that were brought for it may
 *  leave. */
PERI_API void peri_tbe_batch_release(peri_tbe_batch *batch);
/** Tables in files: bring the rows that the batch will need, in the background, and keep them until its lookup. A hint:
 *  rows that find no room stay where they are. PERI_OK at once for tables in memory. Blocks only to read the ids. */
PERI_API peri_status peri_tbe_batch_prefetch(peri_tbe_batch *batch);
/** Queue on the current stream, beside other work, what is otherwise part of the backward pass: sort the batch's ids by
 *  row. PERI_OK at once where that cannot be done before: tables in files, optimizer NONE. */
PERI_API peri_status peri_tbe_batch_sort(peri_tbe_batch *batch);
/** peri_tbe_forward, peri_tbe_backward, peri_tbe_lookup and peri_tbe_gradient of a batch; what they give is @out
 *  new. */
PERI_API peri_status peri_tbe_batch_forward(peri_tbe_batch *batch, peri_tensor *out);
PERI_API peri_status peri_tbe_batch_backward(peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *grad_weights);
PERI_API peri_status peri_tbe_batch_lookup(peri_tbe_batch *batch, int32_t ndim, const int64_t *shape,
                                           peri_tensor **out);
PERI_API peri_status peri_tbe_batch_gradient(peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *grad_weights,
                                             peri_tensor **out);
/** Lookup on the tape of a batch whose ids are the values of @kjt, in tables that do not pool: what peri_kjt_cut makes
 *  of the rows that peri_tbe_batch_lookup gives. Gradients of the keys' rows are read where they lie, if each is f32
 *  and contiguous and each block has the ids of one key. PERI_EINVAL unless each block writes the row of an id at the
 *  id's place (out_offset 0, out_stride the columns of all tables). @out: as many as keys, new; not written on
 *  failure. */
PERI_API peri_status peri_tbe_batch_lookup_jagged(peri_tbe_batch *batch, peri_kjt *kjt, bool indices, peri_jt **out);

/** What peri_tbe_expand picks from: feature f's pooled rows, [rows[f], cols[f]] each, one behind the other; they become
 *  columns of the output: row b of feature f is its pooled row inverse[inverse_row[f], b]. */
typedef struct peri_tbe_expand_args {
    peri_tensor *pooled;  /* f32, contiguous, sum of rows[f] * cols[f] elements */
    peri_tensor *inverse; /* i64 or i32 [keys, batch], contiguous, on pooled's device */
    int32_t features;
    const int64_t *rows, *cols;   /* host, features entries */
    const int64_t *inverse_row;   /* host, features entries: which row of inverse is feature f's */
    const char *const *names;     /* of the features, for messages; features entries */
} peri_tbe_expand_args;

/** A batch that was looked up without its repeated bags (variable batch, inverse indices), in full: [batch, sum of
 *  cols]. Recorded. An inverse index outside its feature's rows is PERI_ERANGE; -1 gives zeros. @out new. */
PERI_API peri_status peri_tbe_expand(const peri_tbe_expand_args *args, peri_tensor **out);

/* -- one matrix ---------------------------------------------------------------------------------------------------- */

/** A lookup in one matrix, as of torch.nn.functional.embedding and embedding_bag. */
typedef struct peri_embedding_bag_args {
    int64_t size; /* sizeof(peri_embedding_bag_args) */
    peri_tensor *weight;  /* f32 [rows, cols], contiguous; cols >= 1 */
    peri_tensor *ids;     /* i64 or i32: with offsets [n], without [bags, ids of each]; mode NONE: any shape */
    peri_tensor *offsets; /* i64 or i32 [bags]: bag b is ids offsets[b] .. offsets[b + 1]; the first is 0, the last one
                             ends with the ids; or NULL */
    peri_tensor *weights; /* f32, the shape of ids: factors of the ids; NULL: 1. Mode SUM only */
    int64_t padding_idx;  /* with `padded`: this id adds nothing, does not count in a mean, gives no gradient. Mode
                             NONE: only the last */
    double max_norm;      /* > 0: rows that are looked up, and whose norm is larger, are first scaled down to it, in
                             `weight` itself */
    double norm_type;     /* p of that norm, sum(|x|^p)^(1/p), > 0; 0: 2; infinite: the largest element */
    int32_t mode;         /* PERI_POOLING_* */
    bool include_last_offset; /* offsets [bags + 1], the last of which is the number of ids */
    bool padded;              /* there is a padding_idx */
} peri_embedding_bag_args;

/** @out new, f32: [bags, cols], or with mode NONE the shape of ids and cols. A bag without ids gives zeros; of elements
 *  that are equally large the first one gets the gradient of MAX; NaN is the largest. On the tape: gradients of weight
 *  and weights, dense. Ids are checked (PERI_ERANGE names sample, place and id, and nothing was changed; on a GPU a
 *  call after a backward pass may go on without the verdict, which a later call tells: docs/embedding_tables.md); -1
 *  adds nothing, but counts in a mean. The norms are in f64, (max_norm / (norm + 1e-7)) times the row is rounded once;
 *  scaling is not recorded. */
PERI_API peri_status peri_embedding_bag(const peri_embedding_bag_args *args, peri_tensor **out);

/* -- micro-batches ------------------------------------------------------------------------------------------------- */

/** While @on, backward passes (peri_tbe_backward, the tape's, a sharded module's) are kept instead of updating the
 *  tables, until peri_tbe_accumulated_apply: rows, states and iteration stay. Kept are the input's tensors and the
 *  gradient, retained: do not change them. Gradients of the ids' weights are given at once. PERI_EUNSUPPORTED for
 *  tables in files. */
PERI_API peri_status peri_tbe_accumulate_set(peri_tbe *tbe, bool on);
/** Update the tables with all kept backward passes as with one, of the concatenated batch (block k of all of them, then
 *  block k + 1): the same bits, one iteration. Nothing kept: nothing happens. */
PERI_API peri_status peri_tbe_accumulated_apply(peri_tbe *tbe);
/** How many are kept. */
PERI_API int64_t peri_tbe_accumulated(const peri_tbe *tbe);

/* -- dense gradients (data-parallel tables) ------------------------------------------------------------------------ */

/** The gradient of all tables as one flat f32 tensor that ranks may add up: first the weights' gradients in the layout
 *  of the batch, zero where nothing was looked up, then one number per row, above 0 if the row was looked up. @out
 *  new. */
PERI_API peri_status peri_tbe_gradient(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad,
                                       peri_tensor *grad_weights, peri_tensor **out);
/** The gradient of the rows that were looked up. */
typedef struct peri_tbe_sparse {
    peri_tensor *rows;   /* i64: rows of each table, ascending, each once; table after table */
    peri_tensor *values; /* f32 [as many, most columns of a table]: their gradients, in the first columns */
    peri_tensor *first;  /* i64 [tables + 1]: table t has entries first[t] .. first[t + 1]; entries from first[tables]
                            on are undefined */
} peri_tbe_sparse;

/** That gradient; nothing is updated, whatever the optimizer. All members of @out new. */
PERI_API peri_status peri_tbe_gradient_sparse(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad,
                                              peri_tensor *grad_weights, peri_tbe_sparse *out);
/** Update every row that a dense gradient marks; advances the iteration. */
PERI_API peri_status peri_tbe_gradient_apply(peri_tbe *tbe, peri_tensor *gradient);
/** Table @table's part [rows, cols] of such a tensor: a view. @out new. */
PERI_API peri_status peri_tbe_gradient_table(peri_tbe *tbe, peri_tensor *gradient, int64_t table, peri_tensor **out);

/* -- state --------------------------------------------------------------------------------------------------------- */

/** What a state has numbers for: each element of a table, each row, each pair of columns, the table. FULL and ROW are
 *  cut, cached and copied by rows; SQUARE and SCALAR are of all rows at once. */
enum { PERI_STATE_FULL = 0, PERI_STATE_ROW = 1, PERI_STATE_SQUARE = 2, PERI_STATE_SCALAR = 3 };
/** PERI_STATE_* of the state @name; the weights are FULL. PERI_ENOTFOUND if the optimizer keeps no such state. */
PERI_API int32_t peri_tbe_state_geometry(const peri_tbe *tbe, const char *name);
/** A view of a table's weights or state: @name is "weight", "momentum1", "momentum2", "row_counter" or "prev_iter"
 *  (i64); [rows, cols] or [rows]; "preconditioner" [cols, cols], "max_counter" [1]. Writing through it changes the
 *  table. PERI_ENOTFOUND lists the names that the optimizer has; PERI_EUNSUPPORTED for tables in files, which
 *  peri_tbe_read and peri_tbe_write reach. @out new. */
PERI_API peri_status peri_tbe_state(peri_tbe *tbe, int64_t table, const char *name, peri_tensor **out);
/** Number of dimensions of a table's weights or state, 1 or 2, and their sizes in @shape[2]; a negative status as
 *  peri_tbe_state. */
PERI_API int32_t peri_tbe_state_shape(const peri_tbe *tbe, int64_t table, const char *name, int64_t *shape);
/** The leaf tensor of a table's weights (a view that requires grad), always the same one, for optimizers of the dense
 *  part. Optimizer NONE only. @out new. */
PERI_API peri_status peri_tbe_leaf(peri_tbe *tbe, int64_t table, peri_tensor **out);
/** Copy rows from @row on of a table's weights or state into @dst ([n, cols] or [n], any dtype and device). Rows of
 *  bytes are copied as they are into u8 [n, bytes of a row], and decoded into any other dtype. */
PERI_API peri_status peri_tbe_read(peri_tbe *tbe, int64_t table, const char *name, int64_t row, peri_tensor *dst);
/** Overwrite rows from @row on; numbers become rows of bytes by peri_quantize_rows. */
PERI_API peri_status peri_tbe_write(peri_tbe *tbe, int64_t table, const char *name, int64_t row,
                                    const peri_tensor *src);
/** Rows (i64, one dimension, from 0; repeats are fine) of a table start again: weights as they were initialised
 *  (PERI_INIT_NONE: zeros), and as before the first update all states that have rows. What has none stays:
 *  preconditioners, max_counter, the iteration. Tables in files: in the cache and in the file, also rows that a
 *  prefetch brings or an update still has to change. Waits for the device, to read
 *  @rows. PERI_EUNSUPPORTED for rows of bytes. */
PERI_API peri_status peri_tbe_rows_reset(peri_tbe *tbe, int64_t table, peri_tensor *rows);
/** What @t is a view of: all rows of a table's weights, or of a state that has rows, as peri_tbe_state gives them. @tbe
 *  new, or NULL: @t is no such view. @name borrowed. */
PERI_API peri_status peri_tbe_of_view(const peri_tensor *t, peri_tbe **tbe, int64_t *table, const char **name);
/** The rows that @rows (i64, on the host) lists of a table's weights or of a state that has rows, one after the other.
 *  @out new, on the tables' device; rows of bytes as u8. */
PERI_API peri_status peri_tbe_read_rows(peri_tbe *tbe, int64_t table, const char *name, const peri_tensor *rows,
                                        peri_tensor **out);
/** Overwrite the rows that @rows lists (i64, on the host, ascending) with @src, which has them one after the other, as
 *  peri_tbe_read_rows gives them, on any device. */
PERI_API peri_status peri_tbe_write_rows(peri_tbe *tbe, int64_t table, const char *name, const peri_tensor *rows,
                                         const peri_tensor *src);

/** Which rows of a table batch change, from now on: a bit for each row. Rows count as changed when an update, a write,
 *  a reset or a write through a view was about to change their weights or states, on whichever device and wherever they
 *  are; what is written through peri_tensor_data is not seen. Marking is part of the calls that change rows. */
typedef struct peri_row_marks peri_row_marks;

/** Begin to mark; all bits are 0. @tbe is not retained: when it is released, the marks are of no use any more.
 *  Releasing it and calls on its marks come one at a time. @out new. */
PERI_API peri_status peri_row_marks_new(peri_tbe *tbe, peri_row_marks **out);
/** No more; NULL is fine. */
PERI_API void peri_row_marks_release(peri_row_marks *marks);
/** Whether the table batch is still there. */
PERI_API bool peri_row_marks_alive(const peri_row_marks *marks);
/** The bits so far: i64 words on the host, a bit for each row of all tables of the batch one after the other, row r at
 *  bit r % 64 of word r / 64. They are 0 afterwards. Waits. @out new. */
PERI_API peri_status peri_row_marks_take(peri_row_marks *marks, peri_tensor **out);
/** Set in @bits those that are set in @more. */
PERI_API peri_status peri_row_bits_join(peri_tensor *bits, const peri_tensor *more);
/** The rows of @table whose bits are set: i64, ascending, counted from @first_row on. @out new. */
PERI_API peri_status peri_row_bits_list(const peri_tbe *tbe, int64_t table, const peri_tensor *bits, int64_t first_row,
                                        peri_tensor **out);
/** Name of the i-th state of the optimizer ("weight" is number 0), NULL beyond the last. Static text. */
PERI_API const char *peri_tbe_state_name(const peri_tbe *tbe, int32_t i);

/** Learning rate of later updates. */
PERI_API peri_status peri_tbe_learning_rate_set(peri_tbe *tbe, double learning_rate);
PERI_API double peri_tbe_learning_rate(const peri_tbe *tbe);
/** Updates so far; only updates advance it, evaluation does not. */
PERI_API int64_t peri_tbe_iteration(const peri_tbe *tbe);
PERI_API peri_status peri_tbe_iteration_set(peri_tbe *tbe, int64_t iteration);
/** PERI_EINVAL while the weights are ahead of the iteration: a lookup of the next step has made the averages in place
 *  that are due before that step's update. Local. */
PERI_API peri_status peri_tbe_settled(const peri_tbe *tbe);

/** Counts since the table batch was made. */
typedef struct peri_tbe_stats {
    int64_t size; /* sizeof(peri_tbe_stats) */
    int64_t lookups, updates;              /* calls */
    int64_t ids, bags;                     /* looked up */
    int64_t rows_updated;                  /* rows changed by fused updates, summed over the updates */
    int64_t bad_ids, bad_bags;             /* counted in the modes FATAL, WARNING, IGNORE */
    int64_t weight_bytes, state_bytes, workspace_bytes;
} peri_tbe_stats;

/** Read the counts; blocks until queued work has run. */
PERI_API peri_status peri_tbe_statistics(peri_tbe *tbe, peri_tbe_stats *out);

/* -- tables larger than memory ------------------------------------------------------------------------------------- */

/** Counts of rows since the table batch was made; each row is counted once per batch. */
typedef struct peri_tbe_cache_stats {
    int64_t size; /* sizeof(peri_tbe_cache_stats) */
    int64_t slots, resident;  /* rows that fit, rows that are there now */
    int64_t hits, misses;     /* rows of lookups that were in memory, or on their way; that the lookup had to bring */
    int64_t prefetched;       /* rows that prefetches brought */
    int64_t prefetch_hits;    /* of them, those that a lookup then found */
    int64_t conflict_misses;  /* rows without a slot because batches in flight held all: not prefetched, or brought
                                 again for the update */
    int64_t set_conflicts;    /* rows that took a slot of another set, because batches in flight held all of their
                                 own */
    int64_t evictions;        /* rows that left for others */
    int64_t initialised;      /* rows used for the first time ever */
    int64_t rows_read, rows_written, bytes_read, bytes_written; /* from and to the files, or the host's memory */
    int64_t wait_ns;          /* in which calls waited for files; of all tables of the batch, noted at the first */
} peri_tbe_cache_stats;

/** Write every changed row to its file and mark the files clean, with the present iteration and the number of the
 *  flush. Blocks. After a failure (a full disk, say) nothing is lost, and it can be called again. PERI_OK for tables in
 *  memory. */
PERI_API peri_status peri_tbe_flush(peri_tbe *tbe);

/** The flush that the files of tables carry. Files open together when number and stamp are equal. */
typedef struct peri_flush_info {
    int64_t number;    /* of the last flush, the highest where files differ; 0: none yet */
    uint64_t stamp;    /* random, so that flushes of different runs differ; 0: none yet */
    int64_t iteration; /* at that flush */
    int64_t files;     /* files with a name; 0: nothing to flush, and the rest says nothing */
    const char *path;  /* of one with this number; borrowed from the tables */
    bool changed;      /* the tables are no longer as the files were flushed, or the files differ */
} peri_flush_info;

/** The flush of the files of @tbe. Local, does not block. */
PERI_API peri_status peri_tbe_flush_info(const peri_tbe *tbe, peri_flush_info *out);
/** A flush in two halves, for table batches (also of several ranks) whose files are to be of one flush: first all are
 *  prepared, then, when none has failed, all are committed with the same @number (one more than the highest of
 *  peri_tbe_flush_info) and @stamp (of one peri_flush_stamp). Prepare writes the rows and waits for the disk, commit
 *  marks the files. No update may come in between (PERI_EINVAL). Both block, and may be called again after a
 *  failure. */
PERI_API peri_status peri_tbe_flush_prepare(peri_tbe *tbe);
PERI_API peri_status peri_tbe_flush_commit(peri_tbe *tbe, int64_t number, uint64_t stamp);
/** A random number that is not 0. */
PERI_API uint64_t peri_flush_stamp(void);
/** Which map of raw ids a table's rows are of, as peri_collision_mark says it. */
typedef struct peri_ids_mark {
    uint64_t sum; /* 0: ids are rows */
    int64_t iteration;
} peri_ids_mark;
/** What a table's file says of its last flush. */
typedef struct peri_table_file {
    const char *path;          /* borrowed from the table; NULL: it has no file with a name, and the rest says
                                  nothing */
    int64_t flush, iteration;  /* 0: none yet */
    peri_ids_mark ids;         /* of the map at that flush */
} peri_table_file;
/** What the file of table @table says. Local, does not block. */
PERI_API peri_status peri_tbe_table_file(const peri_tbe *tbe, int64_t table, peri_table_file *out);
/** The next flush writes down that the rows of @table, which has raw_ids, are those of this map. Who has the map says
 *  so before each flush, and before it uses rows of a file compares its map with what peri_tbe_table_file says: with
 *  another map ids would have rows of other ids. Tables in memory do nothing with it. */
PERI_API peri_status peri_tbe_ids_mark_set(peri_tbe *tbe, int64_t table, const peri_ids_mark *mark);
/** Counts of a table's cache, or of all (@table -1). PERI_EUNSUPPORTED for tables in memory. */
PERI_API peri_status peri_tbe_cache_statistics(peri_tbe *tbe, int64_t table, peri_tbe_cache_stats *out);
/** How rows are read: from files by "io_uring" or "threads", from the host's "memory"; NULL for tables in memory.
 *  Static text. */
PERI_API const char *peri_tbe_cache_io(const peri_tbe *tbe);

#endif
