/* SPDX-License-Identifier: Apache-2.0
 *
 * embed/internal.h (L4): the struct behind peri_tbe, and what the sharded modules use: lookups whose check they read themselves, and the
 * check alone, against the whole tables, on the rank where a batch enters.
 */
#ifndef PERI_EMBED_INTERNAL_H
#define PERI_EMBED_INTERNAL_H

#include "../tensor/internal.h"

#include <perilune/embed.h>
#include <perilune/quantize.h>

/* -- checks ---------------------------------------------------------------------------------------------------------------------- */

/** A report tensor: PERI__REPORT_WORDS i64, the layout of peri_k_tbe_report. Copy it to the host together with whatever else is awaited,
 *  then hand the copy to a *_status function. */
enum { PERI__REPORT_WORDS = (int)(sizeof(peri_k_tbe_report) / sizeof(int64_t)) };

/** Queue "nothing found yet". */
peri_status peri__report_reset(peri_tensor *report);

/** Turn a host copy of the report of a table batch into PERI_ERANGE with a message that names table, feature, sample and id (FATAL; WARNING
 *  for bad offsets), a log line (WARNING), or nothing (IGNORE, NONE). @function names the public function for the message. */
peri_status peri__tbe_status(const peri_tbe *tbe, const char *function, const peri_k_tbe_report *report);

/* -- table batches ---------------------------------------------------------------------------------------------------------------- */

/** A block list with what was computed from it once. */
struct peri_tbe_blocks {
    peri__refs refs;
    uint64_t serial; /* never the same twice in a process: tells whether the device copy is this one */
    int64_t n, n_tables;
    int64_t bags;         /* offsets must have at least bags + 1 entries */
    int64_t total_bags;   /* of all blocks, shared ones counted as often as they are used */
    int64_t out_extent;   /* one past the last element written */
    int64_t covered;      /* elements written */
    int64_t multiplicity; /* most blocks that share a bag: items <= multiplicity * ids */
    int64_t width;        /* mean columns of the blocks, weighted by bags */
    int64_t largest;      /* most bags that look into one table */
    bool mean;            /* some table pools by MEAN */
    bool none;            /* some table does not pool: out_extent and covered leave its blocks out; see peri__tbe_extent */
    bool ordered;         /* they stand in the order of their tables */
    peri_k_tbe_block block[]; /* n; unless `ordered`, n more: the same in the order of their tables, otherwise as they stood */
};

typedef struct peri__tbe_table {
    char *name;
    peri_table_config config; /* name points to the copy */
    peri_tensor *leaf;        /* made by peri_tbe_leaf */
} peri__tbe_table;

/** Device memory that calls reuse. Grown, never shrunk. */
enum {
    PERI__TBE_BLOCKS, /* the block list `uploaded` */
    PERI__TBE_SPANS,
    PERI__TBE_REPORT,
    PERI__TBE_KEYS_A,
    PERI__TBE_KEYS_B,
    PERI__TBE_ITEMS,
    PERI__TBE_DIGITS,
    PERI__TBE_SCRATCH,
    PERI__TBE_RUNS,
    PERI__TBE_ROOTS,
    PERI__TBE_ROOT_ROOM,
    PERI__TBE_WORKSPACES
};

/** Places in the counters tensor. */
enum {
    PERI__TBE_COUNT_IDS, /* and bags: tbe_prepare adds both */
    PERI__TBE_COUNT_BAGS,
    PERI__TBE_COUNT_BAD_IDS, /* and bags: tbe_report adds both */
    PERI__TBE_COUNT_BAD_BAGS,
    PERI__TBE_COUNT_ROWS,
    PERI__TBE_COUNTERS
};

typedef struct peri__tier peri__tier; /* tier.h */

struct peri_tbe {
    peri__refs refs;
    peri_device *device;
    int32_t dtype, bounds_check; /* dtype: or PERI_ROWS_*; `weight` is u8 then */
    int32_t output_dtype;
    int64_t n_tables, n_features;
    peri__tbe_table *tables;
    char **features;
    peri_tbe_optimizer optimizer; /* learning_rate is the current one */
    uint64_t seed;
    int64_t iteration;
    int64_t total_rows, total_elements, max_cols; /* elements include the padding between tables */
    peri_k_tbe_table *layout;                     /* host copy of layout_tensor */
    peri_tensor *layout_tensor;
    peri_tensor *weight, *momentum1, *momentum2, *row_counter; /* flat */
    peri_tensor *counters;                                     /* i64 [PERI__TBE_COUNTERS] */
    peri_tensor *workspace[PERI__TBE_WORKSPACES];
    peri_tensor *preconditioner; /* Shampoo: f32, cols x cols of each table; NULL */
    peri_tensor *prev_iter;      /* i64, flat; NULL */
    peri_tensor *max_counter;    /* f32 [tables], where peri__counter_wants_most; NULL */
    int64_t averaged;            /* the last step whose EMA in place was made */
    struct peri__kept *kept; /* backward passes that wait for peri_tbe_accumulated_apply (accumulate.c) */
    int64_t n_kept, room_kept;
    bool accumulate;
    uint64_t uploaded; /* serial of the block list in PERI__TBE_BLOCKS; 0: none */
    peri_event *done;  /* after the last call: calls follow each other on any stream */
    int64_t lookups, updates;
    peri_tensor *slot_row; /* i64 by linear row, where rounding needs it: the row in a slot */
    peri__tier *tier; /* tables in files: `layout` and the flat tensors are of slots, tables[].config of rows. NULL: in memory */
};

/** What an optimizer keeps and knows. */
typedef struct peri__optimizer_kind {
    const char *name;
    bool full1, row1, full2, row2, counter, prev, eps, betas, lars, rmsprop, average, decay, decay_mode;
} peri__optimizer_kind;

/** @kind is one of PERI_TBE_*. */
const peri__optimizer_kind *peri__optimizer_kind_of(int32_t kind);

/** The shortest text of @x that reads back as @x. */
const char *peri__number_text(double x, char out[32]);
enum { PERI__START_TEXT = 96 };
/** Start values as users know them: "normal (mean 0, deviation 0.5)". @init is PERI_INIT_*. */
const char *peri__start_text(int32_t init, double a, double b, char out[PERI__START_TEXT]);

/** A table batch without optimizer whose weights are @flat (retained), where table t's rows lie one behind the other, without padding. */
peri_status peri__tbe_over(const peri_tbe_config *config, peri_tensor *flat, peri_tbe **out);
/** What lookups in a tensor keep: a table batch of peri__tbe_over, and the block list. */
typedef struct peri__over {
    peri_tbe *tbe;
    peri_tbe_blocks *blocks;
} peri__over;
void peri__over_release(peri__over *over);
/** Put the lookup @in of @table, which is what over->tbe is over, on the tape, if somebody wants its gradient: *over is taken then. */
peri_status peri__over_record(peri_tensor *table, const peri_tbe_input *in, peri__over *over, peri_tensor *out);
/** Offsets (i64 [bags + 1]) of bags of @length ids each. */
peri_status peri__offsets_of_equal(peri_device *device, int64_t bags, int64_t length, peri_tensor **out);
/** How many tensors of the size of the weights a table batch has. */
double peri__tbe_copies(const peri_tbe_optimizer *optimizer);
/** The flat tensors as parts of records, in the order of peri_tbe_state_name. Returns their number. */
int32_t peri__tbe_parts(const peri_tbe *tbe, peri_k_cache_part part[PERI_CACHE_PARTS]);
/** The dtype of the part with this number. */
int32_t peri__tbe_part_dtype(const peri_tbe *tbe, int32_t part);
/** Whether @dtype is one of PERI_ROWS_*. */
bool peri__tbe_bytes(int32_t dtype);
/** Elements (PERI_ROWS_*: bytes) from row to row. */
int64_t peri__tbe_stride(int32_t dtype, int64_t cols);
/** How one of PERI_ROWS_* stores numbers. */
peri_row_format peri__tbe_row_format(int32_t dtype);
/** Begin a call: the current stream waits for the calls before. */
peri_status peri__tbe_enter(peri_tbe *tbe);
/** End it. */
peri_status peri__tbe_leave(peri_tbe *tbe);
/** Workspace @which of at least @count elements of @dtype. */
peri_status peri__tbe_workspace(peri_tbe *tbe, int32_t which, int32_t dtype, int64_t count, void **out);
/** Give back a workspace in an order that is right for all streams that used it. */
void peri__tbe_forget(peri_tbe *tbe, peri_tensor **tensor);

/** peri_tbe_blocks_new without its checks: a table of pooling NONE may have a negative out_offset, if its ids all come late enough. */
peri_status peri__tbe_blocks_new(const peri_tbe *tbe, const peri_tbe_block *blocks, int64_t n, peri_tbe_blocks **out);
/** peri_tbe_forward without reading a report. @report (NULL: do not check) is reset and filled on the device. */
peri_status peri__tbe_forward(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *out, peri_tensor *report);
/** Forward with the check that the table batch asks for; @function names the caller in messages. */
peri_status peri__tbe_checked_forward(const char *function, peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *out);
/** The check alone, of tables in memory; what it says depends on the table batch's mode. Waits. */
peri_status peri__tbe_check(const char *function, peri_tbe *tbe, const peri_tbe_input *input);
/** One past the last element that a lookup of @input writes. */
int64_t peri__tbe_extent(const peri_tbe *tbe, const peri_tbe_input *input);
/** Check an input's tensors on the host: dtypes, sizes, devices. */
peri_status peri__tbe_input_check(const char *function, const peri_tbe *tbe, const peri_tbe_input *input);
/** The kernels' view of an input; uploads the block list if it is not there yet and queues tbe_prepare. */
peri_status peri__tbe_stream(peri_tbe *tbe, const peri_tbe_input *input, bool count, peri_k_tbe_stream *out);
/** Turn it into the same blocks in the order of their tables; the view before is of no use any more. */
peri_status peri__tbe_stream_order(peri_tbe *tbe, const peri_tbe_input *input, peri_k_tbe_stream *stream);
/** Chunks of a lookup's work, and how many of them are worth a thread. */
void peri__tbe_chunks(const peri_tbe_input *input, int64_t *chunks, int64_t *grain);
/** The kernels' view of the tables. */
peri_k_tbe_rows peri__tbe_rows(const peri_tbe *tbe);

/** Check gradients on the host. @grad_weights: or NULL. */
peri_status peri__tbe_gradient_check(const char *function, const peri_tbe *tbe, const peri_tbe_input *input, const peri_tensor *grad,
                                     const peri_tensor *grad_weights);
/** Gradients of the ids' weights: from the rows as they are, so before the update. */
peri_status peri__tbe_weight_gradient(peri_tbe *tbe, const peri_tbe_input *input, const peri_k_tbe_stream *stream, peri_tensor *grad,
                                      peri_tensor *grad_weights);
/** Sum gradients by row and hand them to the optimizer, or, with @dense or @sparse, store them there. */
peri_status peri__tbe_update(peri_tbe *tbe, const peri_tbe_input *input, peri_k_tbe_stream *stream, peri_tensor *grad, peri_tensor *dense,
                             const peri_tbe_sparse *sparse);
/** peri_tbe_backward on checked arguments, with ids that are rows of the flat tensors. */
peri_status peri__tbe_backward(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad, peri_tensor *grad_weights);

/* -- optimizers (optimizer.c) --------------------------------------------------------------------------------------------------------- */

/** Hyperparameters for the kernels at step @iteration. */
peri_k_tbe_optimizer peri__tbe_optimizer(const peri_tbe *tbe, int64_t iteration);
/** Floats that a chunk of an update works on. */
int64_t peri__tbe_scratch_stride(const peri_tbe *tbe);

/** Fill in the defaults of counters, where @o has them. */
void peri__counter_default(peri_tbe_optimizer *o);
/** Check what @o says of counters, and of EMA in place. */
peri_status peri__counter_check(const peri_tbe_optimizer *o);
peri_status peri__average_check(const peri_tbe_optimizer *o);
/** Whether updates ask for the largest counter of a table. */
bool peri__counter_wants_most(const peri_tbe_optimizer *o);
/** Before the update of step @iteration: the largest counters, if they are due. */
peri_status peri__counter_refresh(peri_tbe *tbe, int64_t iteration);
/** Before a lookup of the next training step, or its update: EMA in place, if it is due. */
peri_status peri__tbe_average(peri_tbe *tbe);

/** Elements of the preconditioners of the tables before @table. */
int64_t peri__tbe_squares(const peri_tbe *tbe, int64_t table);
/** The update of peri__tbe_backward with Shampoo. */
peri_status peri__tbe_shampoo(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad);

/* -- kept backward passes (accumulate.c) -------------------------------------------------------------------------------------------- */

/** Keep a checked backward pass. */
peri_status peri__tbe_keep(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad);
/** Drop them all; and the list too. */
void peri__tbe_kept_forget(peri_tbe *tbe);
void peri__tbe_kept_free(peri_tbe *tbe);

/* -- tables in files (tier.c, tier_rows.c) -------------------------------------------------------------------------------------------- */

/** Rows of each table that @config's caches hold: int64[n_tables], to be freed. */
peri_status peri__tier_slots(const peri_tbe_config *config, int64_t **out);
/** Open the files of a table batch whose flat tensors are there; it owns the tier. */
peri_status peri__tier_new(peri_tbe *tbe, const peri_tbe_config *config);
/** Local; does not flush. */
void peri__tier_free(peri__tier *tier);
/** The public functions, for tables in files. Arguments are checked. */
peri_status peri__tier_forward(const char *function, peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *out);
peri_status peri__tier_backward(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad, peri_tensor *grad_weights);
peri_status peri__tier_prefetch(const char *function, peri_tbe *tbe, const peri_tbe_input *input);
peri_status peri__tier_read(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst);
peri_status peri__tier_write(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src);
int64_t peri__tier_bad_ids(const peri__tier *tier);

#endif
