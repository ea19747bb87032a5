/* SPDX-License-Identifier: Apache-2.0
 *
 * embed/embed_internal.h (L4): the struct behind peri_tbe, and what the sharded modules use: lookups whose check they
 * read themselves, and the check alone, against the whole tables, on the rank where a batch enters.
 */
#ifndef PERI_EMBED_INTERNAL_H
#define PERI_EMBED_INTERNAL_H

#include "../../kernels/cache.h"
#include "../../kernels/tbe.h"
#include "../tensor/tensor_internal.h"

#include <perilune/embed.h>
#include <perilune/quantize.h>

#include <pthread.h>

/* -- checks -------------------------------------------------------------------------------------------------------- */

/** A report tensor: PERI__REPORT_WORDS i64, the layout of peri_k_tbe_report. Copy it to the host together with whatever
 *  else is awaited, then hand the copy to a *_status function. */
enum { PERI__REPORT_WORDS = (int)(sizeof(peri_k_tbe_report) / sizeof(int64_t)) };

/** Queue "nothing found yet". */
peri_status peri__report_reset(peri_tensor *report);

/** Turn a host copy of the report of a table batch into PERI_ERANGE with a message that names table, feature, sample
 *  and id (FATAL; WARNING for bad offsets), a log line (WARNING), or nothing (IGNORE, NONE). @function names the public
 *  function for the message. */
peri_status peri__tbe_status(const peri_tbe *tbe, const char *function, const peri_k_tbe_report *report);
/** The same of a matrix called @table, always FATAL. */
peri_status peri__matrix_status(const char *table, const char *function, const peri_k_tbe_report *report);
/** PERI_ERANGE for a report with bad bags, in the same words, whatever the mode: tables in files need the offsets to
 *  find the rows that a batch wants. */
peri_status peri__tbe_bags_status(const peri_tbe *tbe, const char *function, const peri_k_tbe_report *report);

/* -- table batches ------------------------------------------------------------------------------------------------- */

/** A block list with what was computed from it once. */
struct peri_tbe_blocks {
    peri__refs refs;
    uint64_t serial; /* never the same twice in a process */
    peri_tensor *copy;  /* u8: `block`, on the tables' device, and room for as many in the order of their tables */
    peri_event *copied; /* after its upload */
    peri_event *sorted; /* after that of its second half, which is made when it is first asked for; NULL: it was not
                           yet */
    peri_tbe_blocks *wide;   /* a list of those that were widened from it, linked by this field, or NULL */
    int64_t wide_cols, wide_stride; /* of one in that list: what it was widened for */
    pthread_mutex_t sorting; /* guards `sorted` and `wide` */
    int64_t n, n_tables;
    int64_t bags;         /* offsets must have at least bags + 1 entries */
    int64_t total_bags;   /* of all blocks, shared ones counted as often as they are used */
    int64_t out_extent;   /* one past the last element written */
    int64_t covered;      /* elements written */
    int64_t multiplicity; /* most blocks that share a bag: items <= multiplicity * ids */
    int64_t width;        /* mean columns of the blocks, weighted by bags */
    int64_t row_cols;     /* no block pools, and each writes the row of an id at the id's place among rows of this
                             width; 0: not so */
    int64_t largest;      /* most bags that look into one table */
    bool narrow;          /* some block's rows have fewer columns than row_cols */
    bool mean;            /* some table pools by MEAN */
    bool none;            /* some table does not pool: out_extent and covered leave its blocks out; see
                             peri__tbe_extent */
    bool ordered;         /* they stand in the order of their tables */
    peri_k_tbe_block *block; /* n; where the host works in the device's memory, these are the copy's */
};

/** Where the rows of a block lie: elements from the address that all blocks' are counted from. */
typedef struct peri__spot {
    int64_t offset, stride;
    int64_t past; /* one past the last element that they may have; 0: it has no rows */
} peri__spot;

/** A list of the same blocks whose rows lie elsewhere: those of block k at @spots[k]. @out new. */
peri_status peri__tbe_blocks_moved(const peri_tbe *tbe, const peri_tbe_blocks *from, const peri__spot *spots,
                                   peri_tbe_blocks **out);
/** The same blocks with their rows in a window of @cols columns of a matrix whose rows are @stride elements apart;
 *  @from's lie in a matrix of @cols columns. Kept as long as @from, since captured steps know where it is. @out new;
 *  NULL: not all of @from's rows lie in such a matrix. */
peri_status peri__tbe_blocks_widened(const peri_tbe *tbe, peri_tbe_blocks *from, int64_t cols, int64_t stride,
                                     peri_tbe_blocks **out);

/** All states that optimizers keep, the weights before them, in the order in which they are listed. */
enum {
    PERI__STATE_WEIGHT,
    PERI__STATE_MOMENTUM1,
    PERI__STATE_MOMENTUM2,
    PERI__STATE_ROW_COUNTER,
    PERI__STATE_PREV_ITER,
    PERI__STATE_PRECONDITIONER,
    PERI__STATE_MAX_COUNTER,
    PERI__STATES
};

/** A state of a table batch. Everything else about it follows from its geometry: its sizes, whether it travels with
 *  rows between memory and files, what sharding does to it. */
typedef struct peri__state {
    const char *name;  /* static text */
    int32_t which;     /* PERI__STATE_* */
    int32_t dtype;     /* PERI_*; rows of bytes: PERI_U8 */
    int32_t geometry;  /* PERI_STATE_* */
    peri_tensor *flat; /* all tables', one behind the other; NULL: not made yet */
} peri__state;

typedef struct peri__tbe_table {
    char *name;
    peri_table_config config; /* name points to the copy */
    peri_tensor *leaf;        /* made by peri_tbe_leaf */
} peri__tbe_table;

/** Device memory that updates reuse. Grown, never shrunk. */
enum { PERI__TBE_RUNS, PERI__TBE_WORKSPACES };

/** The items of a batch in the order of their rows, from its sort to the end of its update. */
enum { PERI__SORT_KEYS, PERI__SORT_ITEMS, PERI__SORT_ROOMS };
typedef struct peri__sorted {
    peri_tensor *room[PERI__SORT_ROOMS]; /* reused by later batches; grown, never shrunk */
    const uint64_t *keys;                /* in one of the rooms */
    const peri_k_tbe_item *items;        /* NULL: all factors are 1 */
    const int64_t *n;                    /* how many, on the device: in the batch's spans */
    int64_t capacity, work;              /* items at most; peri_k_tbe_work of the batch */
    int32_t payload_bits;
    peri_event *done;                    /* after the last use */
    struct peri__sorted *next;           /* of those that no batch has */
} peri__sorted;

/** Places in the counters tensor. */
enum {
    PERI__TBE_COUNT_IDS, /* and bags: tbe_prepare adds both */
    PERI__TBE_COUNT_BAGS,
    PERI__TBE_COUNT_BAD_IDS, /* and bags: tbe_report adds both */
    PERI__TBE_COUNT_BAD_BAGS,
    PERI__TBE_COUNT_ROWS,
    PERI__TBE_COUNTERS
};

typedef struct peri__ticket peri__ticket; /* what a store keeps for a batch in flight: tier/tier.h */

/** Where the rows of some bags are among those of their block: as places, first_placed and n_placed of
 *  peri_k_tbe_list. */
typedef struct peri__bag_places {
    const int32_t *place; /* NULL: one behind the other */
    int64_t first, n;
} peri__bag_places;

/** A batch: an input, and what was computed from it. The struct and its memory are used again by later batches. */
struct peri_tbe_batch {
    peri__refs refs;
    peri_tbe *tbe;     /* retained, but by batches of a store's own */
    peri_tbe_input in; /* all retained */
    atomic_flag busy;  /* some thread is in a call with it */
    peri_tensor *spans;          /* u8: of the blocks as they stand */
    bool prepared;               /* spans are this input's */
    peri_tbe_batch *alike;       /* retained; NULL, or another batch with the same spans: peri__batch_share_spans */
    peri_tbe_blocks *there;      /* retained; NULL, or where its rows lie instead of where the input's blocks say
                                    (peri__batch_redirect) */
    peri__bag_places bag_places; /* then */
    peri_tensor *report;         /* peri__report_reset */
    peri__sorted *sorted;        /* NULL: not sorted */
    peri__ticket *ticket;        /* tables in files: what holds its rows in memory; NULL: nothing */
    peri_event *done;            /* after the last call: calls on a batch follow each other on any stream */
    struct peri_tbe_batch *next; /* of the idle ones */
};

/** Let lookups write, and backward passes read, the rows of a batch where @there says: a list of the same blocks
 *  (peri__tbe_blocks_moved). *placed false: they cannot, nothing has changed. Until peri__batch_redirect_end, or the
 *  batch's end. Nobody checks that the tensor which they are given reaches so far. */
peri_status peri__batch_redirect(peri_tbe_batch *batch, peri_tbe_blocks *there, const peri__bag_places *places,
                              bool *placed);
/** Whether an update of the tables of the lookup that @node is may read gradients where they lie. */
bool peri__may_redirect(const peri__node *node, const peri_tbe *tbe);
/** Whether a gradient on @device can be read where it lies among those of other features (cat): it is a window of a
 *  wider matrix of f32, and its rows begin at multiples of 16 bytes, by which kernels read them. */
bool peri__is_window(const peri_tensor *grad, const peri_device *device);
/** peri__batch_redirect for a backward pass of @grad, if it is a window. *placed false: it has to be made
 *  contiguous. @node: the lookup's. */
peri_status peri__batch_redirect_window(const peri__node *node, peri_tbe_batch *batch, const peri_tensor *grad,
                                     bool *placed);
void peri__batch_redirect_end(peri_tbe_batch *batch);

/** Tell a batch of another one of its table batch, which looks up the same bags with rows elsewhere: where that has
 *  been looked up when @b is updated, its spans are taken over. Does nothing where their bags differ. */
void peri__batch_share_spans(peri_tbe_batch *b, peri_tbe_batch *other);

struct peri_tbe {
    peri__refs refs;
    /* Among threads: lookups in memory hold `lock` together, calls that change something alone. Among streams: lookups
     * wait for `changed`, which follows the last call that changed something; these wait for `looked` too, which
     * follows all lookups. */
    pthread_rwlock_t lock;
    pthread_mutex_t small; /* `looked`, `counted`, the lists of idle batches and rooms, `last_pass` and `told_twice` */
    peri_event *changed, *looked;
    peri_event *counted; /* after the last kernel that added to `counters` beside lookups */
    peri_tbe_batch *idle;
    peri__sorted *idle_sorted;
    int64_t n_idle_sorted;
    int32_t forks; /* peri__forks of the process that made it */
    peri_device *device;
    int32_t dtype, bounds_check; /* dtype: or PERI_ROWS_*; `weight` is u8 then */
    int32_t output_dtype;
    int64_t n_tables, n_features;
    peri__tbe_table *tables;
    char **features;
    peri_tbe_optimizer_config optimizer; /* learning_rate is the current one */
    uint64_t seed;
    int64_t iteration;
    int64_t total_rows, total_elements, max_cols; /* elements include the padding between tables */
    peri_k_tbe_table *layout;                     /* host copy of layout_tensor */
    peri_tensor *layout_tensor;
    peri__state state[PERI__STATES];                           /* n_states; 0: the weights */
    int32_t n_states;
    peri_tensor *weight; /* state[0].flat */
    peri_tensor *counters;                                     /* i64 [PERI__TBE_COUNTERS] */
    peri_tensor *workspace[PERI__TBE_WORKSPACES];
    int64_t ema_step;            /* the last step whose EMA in place was made */
    struct peri__kept *kept; /* backward passes that wait for peri_tbe_accumulated_apply (accumulate.c) */
    int64_t n_kept, room_kept;
    bool accumulate;
    uint64_t last_pass; /* the backward pass of the tape that updated it last */
    bool told_twice;    /* that one pass has updated it several times */
    bool of_inverse; /* its ids are inverse indices and its tables features: messages call them so */
    int32_t halvings; /* of summed gradients, before the optimizer sees them; 0 unless somebody sets it */
    atomic_int_least64_t lookups;
    peri__unheard unheard; /* of lookups in memory */
    int64_t updates, writes; /* calls; writes of weights, rows that started again */
    struct peri__row_watch *watches;  /* told which rows change, before they do (row_watch.h); NULL: nobody */
    peri__storage_watch writes_watch; /* tells them of writes through views; of the flat tensors' storage while there
                                         are watches */
    atomic_uintptr_t holder;          /* the thread that is in a call alone (call_order.c); 0: none */
    peri_tensor *slot_row; /* i64 by linear row, where rounding needs it: the row in a slot */
    struct peri_tbe *next_listed;    /* of those that peri_tbe_new has made (tbe_list.c) */
    const struct peri__store *store; /* where the rows are; set when the table batch is whole */
    void *own;                       /* the store's */
};

/** What an optimizer keeps and knows. */
typedef struct peri__optimizer_kind {
    const char *name;
    /* PERI_STATE_* + 1 of what it keeps, by PERI__STATE_*; 0: it does not. */
    int8_t keeps[PERI__STATES];
    double eps, beta1, beta2; /* defaults; 0: it does not know them */
    bool counter, lars, rmsprop, ema, decay, decay_mode;
} peri__optimizer_kind;

/** @kind is one of PERI_TBE_*. */
const peri__optimizer_kind *peri__optimizer_kind_of(int32_t kind);
/** PERI_EINVAL unless it is. */
peri_status peri__optimizer_kind_check(const char *function, int32_t kind);

enum { PERI__START_TEXT = 96 };
/** Start values as users know them: "normal (mean 0, deviation 0.5)". @init is PERI_INIT_*. */
const char *peri__start_text(int32_t init, double a, double b, char out[PERI__START_TEXT]);

/** A table batch without optimizer whose weights are @flat (retained), where table t's rows lie one behind the other,
 *  without padding. */
peri_status peri__tbe_borrowing(const peri_tbe_config *config, peri_tensor *flat, peri_tbe **out);
/** Put the lookup @batch, of a table batch of peri__tbe_borrowing over @table, on the tape if somebody wants its
 *  gradient: it is retained. */
peri_status peri__borrowed_record(peri_tensor *table, peri_tbe_batch *batch, peri_tensor *out);
/** A backward pass has come to a lookup in the tensor that @tbe borrows. */
void peri__borrowed_passed(const peri_tbe *tbe);
/** Offsets (i64 [bags + 1]) of bags of @length ids each. */
peri_status peri__offsets_of_equal(peri_device *device, int64_t bags, int64_t length, peri_tensor **out);
/** What a table batch with weights of @dtype and this optimizer keeps, without tensors. Returns the number of
 *  states. */
int32_t peri__states_of(int32_t dtype, const peri_tbe_optimizer_config *optimizer, peri__state out[PERI__STATES]);
/** Elements that a table's rows take in a table batch, a multiple of @alignment; -1: more than can be counted. */
int64_t peri__table_elements(int32_t dtype, int64_t rows, int64_t cols, int64_t alignment);
/** Whether a state of PERI_STATE_* @geometry has something for each row of a table, as the weights have. */
static inline bool peri__has_rows(int32_t geometry)
{
    return geometry == PERI_STATE_FULL || geometry == PERI_STATE_ROW;
}
/** Elements that a state of PERI_STATE_* @geometry has of a table of @rows x @cols whose rows take @elements. */
int64_t peri__state_elements(int32_t geometry, int64_t rows, int64_t cols, int64_t elements);
/** What peri_tbe_new refuses of @config, apart from its device. */
peri_status peri__tbe_check(const peri_tbe_config *config);
/** PERI_TBE_NONE. In all configurations that were taken from callers, `optimizer` is not NULL. */
extern const peri_tbe_optimizer_config peri__no_optimizer;
/** @given, of @function's caller, and all that it points to, as today's structures have it; given up by
 *  peri__tbe_config_free. */
peri_status peri__tbe_config_of_today(const peri_tbe_config *given, const char *function, peri_tbe_config *c);
void peri__tbe_config_free(peri_tbe_config *c);
/** The caller's array of @n structures of @type that begin with their size, as today's of @size bytes: @out, freed by
 *  peri__free; NULL where there is none. @function: who takes it. */
peri_status peri__structs_of_today(const void *given, int64_t n, size_t size, const char *function, const char *type,
                               void **out);
/** Tables start at multiples of so many elements. */
enum { PERI__TABLE_ALIGNMENT = 16 };
/** Whether slots need to know which row they have (slot_row): stochastic rounding goes by it. */
bool peri__tbe_slot_rows(const peri_tbe_config *config);
/** Whether one of the optimizer's states has geometry @geometry. */
bool peri__optimizer_keeps(const peri_tbe_optimizer_config *optimizer, int32_t geometry);
/** Elements of a state's flat tensor before @table; of all: @table is n_tables. */
int64_t peri__state_offset(const peri_tbe *tbe, const peri__state *state, int64_t table);
/** Data of state @which (PERI__STATE_*); NULL: there is none. */
void *peri__state_data(const peri_tbe *tbe, int32_t which);
/** How many tensors of the size of the weights a table batch has. */
double peri__tbe_weight_sized_tensors(const peri_tbe_optimizer_config *optimizer);
/** PERI_ERANGE unless @tbe has a table number @table. */
peri_status peri__tbe_check_table(const char *function, const peri_tbe *tbe, int64_t table);
/** The flat tensors as parts of records, in the order of peri_tbe_state_name. Returns their number. */
int32_t peri__tbe_record_parts(const peri_tbe *tbe, peri_k_cache_part part[PERI_CACHE_PARTS]);
/** What collections call the data type of a table whose rows are stored so: both 8-bit ones are "INT8". */
const char *peri__data_type_name(int32_t dtype);
/** Whether @dtype is one of PERI_ROWS_*. */
bool peri__rows_are_bytes(int32_t dtype);
/** Elements (PERI_ROWS_*: bytes) from row to row. */
int64_t peri__tbe_stride(int32_t dtype, int64_t cols);
/** How one of PERI_ROWS_* stores numbers. */
peri_row_format peri__tbe_row_format(int32_t dtype);
/** Rows of a table that are about to be stored. */
typedef struct peri__rows_place {
    const char *who, *table; /* who stores them, for messages; the table's name */
    int32_t dtype;           /* of the table: a float, or PERI_ROWS_* */
    int64_t row;             /* the first of them; the others follow it */
    const int64_t *list;     /* NULL, or the number of each row, and `row` says nothing */
} peri__rows_place;
/** Whether these rows hold @numbers (f32 [rows, cols], contiguous), of which @bytes was made; PERI_ERANGE names the
 *  first row that does not. Waits for the device. @bytes NULL: there are none, or the numbers alone say it (fp8, f16,
 *  bf16). */
peri_status peri__check_numbers_fit(const peri__rows_place *place, peri_tensor *numbers, peri_tensor *bytes);
/** These rows as the table stores them, of @numbers [rows, cols] of any float dtype; @out new. PERI_ERANGE as above. */
peri_status peri__encode_rows(const peri__rows_place *place, peri_tensor *numbers, peri_tensor **out);
/** The same of rows @src that become f16 or bf16: a finite number may not become an infinity. */
peri_status peri__check_floats_fit(const char *function, const peri_tbe *tbe, int64_t table, int64_t row,
                              const peri_tensor *src);
/* -- calls and batches (call_order.c, tbe_batch.c) ----------------------------------------------------------------- */

/** Whether the device runs later what is queued: else there is nothing for events to order, and a small lookup feels
 *  each of them. */
static inline bool peri__tbe_is_queued(const peri_tbe *tbe) { return !(tbe->device->caps & PERI_DEVICE_IMMEDIATE); }
/** What is queued on the current stream from now on follows @event. */
static inline peri_status peri__tbe_wait_event(const peri_tbe *tbe, peri_event *event)
{
    return peri__tbe_is_queued(tbe) ? peri_stream_wait(peri_stream_current(tbe->device), event) : PERI_OK;
}
/** @event: what has been queued on the current stream so far. */
static inline peri_status peri__tbe_record_event(const peri_tbe *tbe, peri_event *event)
{
    return peri__tbe_is_queued(tbe) ? peri_event_record(event, peri_stream_current(tbe->device)) : PERI_OK;
}

/** The locks and events of a table batch, and the end of what is idle. */
peri_status peri__calls_init(peri_tbe *tbe);
void peri__calls_fini(peri_tbe *tbe);
/** Begin a call: @alone if it changes something, else together with other lookups. Other threads wait on the host, the
 *  current stream for the calls before on the device. After PERI_OK peri__tbe_leave must follow. Not to be nested. */
peri_status peri__tbe_enter(peri_tbe *tbe, bool alone);
/** End it. Returns @status, or what went wrong here. */
peri_status peri__tbe_leave(peri_tbe *tbe, bool alone, peri_status status);
/** Whether this thread is in a call that is alone. */
bool peri__tbe_in_call_alone(const peri_tbe *tbe);
/** Whose memory a view is of is looked up among the table batches that were listed. (tbe_list.c) */
void peri__tbe_list(peri_tbe *tbe);
void peri__tbe_unlist(peri_tbe *tbe);
/** The table batch in whose memory of state *@state @t lies, retained; NULL: there is none. */
peri_tbe *peri__tbe_holding(const peri_tensor *t, int32_t *state);
/** peri__leaf_fn of tables that a fused optimizer trains: rows and states are no parameters. (marks.c) */
peri_status peri__tbe_no_leaf(const peri_tensor *t);
/** The table batch (retained), table and state that @t is a view of, with all rows, where peri_tbe_state has them;
 *  NULL: none. (marks.c) */
peri_tbe *peri__tbe_of_view(const peri_tensor *t, int64_t *table, int32_t *state);
/** How the rows of bytes are stored in which @t lies, those of a quantized table (PERI_ROWS_*), and how many numbers
 *  each has; 0: @t lies in none. (marks.c) */
int32_t peri__tbe_coded_rows(const peri_tensor *t, int64_t *cols);
/** Before the table batch goes: no watch is told any more, also of what is written through views that stay.
 *  (row_watch.c) */
void peri__tbe_unwatch_all(peri_tbe *tbe);
/** Workspace @which of at least @count elements of @dtype. In calls that are alone. */
peri_status peri__tbe_workspace(peri_tbe *tbe, int32_t which, int32_t dtype, int64_t count, void **out);
/** Give back memory of calls that are alone, within one or when no other calls can come, in an order that is right for
 *  all streams. */
void peri__tbe_free_later(peri_tbe *tbe, peri_tensor **tensor);
/** Give memory back when @last (or NULL) has come. */
void peri__free_after(peri_tensor **tensor, peri_event *last);
/** At least @count elements of @dtype in *@tensor, whose last use is before @last. */
peri_status peri__reserve(peri_device *device, peri_tensor **tensor, peri_event *last, int32_t dtype, int64_t count,
                          void **out);

/** An idle or a new batch for @in, which is checked. It does not retain the table batch. */
peri_status peri__batch_acquire(peri_tbe *tbe, const peri_tbe_input *in, peri_tbe_batch **out);
/** Let go of its input; it is idle then. NULL is fine. */
void peri__batch_recycle(peri_tbe_batch *batch);
/** Begin a call on a batch, and end it; see peri__tbe_enter. One thread at a time: PERI_EINVAL names @function. */
peri_status peri__batch_enter(const char *function, peri_tbe_batch *batch, bool alone);
peri_status peri__batch_leave(peri_tbe_batch *batch, bool alone, peri_status status);
/** @status; PERI_ENOMEM in the words of who meets it: the table batch that is being made, the batch in a call
 *  (out_of_memory.c). */
peri_status peri__tbe_out_of_memory(const peri_tbe *tbe, const peri_tbe_config *config, peri_status status);
peri_status peri__batch_out_of_memory(const peri_tbe_batch *batch, peri_status status);
/** The kernels' view of a batch, prepared. Queues tbe_prepare unless that was done, or (@count) to count a lookup. */
peri_status peri__batch_kernel_list(peri_tbe_batch *batch, bool count, peri_k_tbe_list *out);
/** The report tensor of a batch, reset. */
peri_status peri__batch_report(peri_tbe_batch *batch, peri_k_tbe_report **out);
/** Sort its items by row, unless that was done (update.c). */
peri_status peri__batch_sort(peri_tbe_batch *batch);
/** Room for that: idle or new. */
peri_status peri__sorted_acquire(peri_tbe *tbe, peri__sorted **out);
/** What was sorted is of no use any more. */
void peri__sorted_recycle(peri_tbe_batch *batch);
/** Queue the operation @op, which adds to tbe->counters, after others that do. */
peri_status peri__tbe_queue_counting(peri_tbe *tbe, int32_t op, const void *args, size_t size);

/** Room for @n blocks: to be written to its `block`, and then peri__tbe_blocks_finish. @out new. */
peri_status peri__tbe_blocks_alloc(const peri_tbe *tbe, int64_t n, peri_tbe_blocks **out);
/** The blocks are written: refuse those that make no sense. */
peri_status peri__tbe_blocks_check(const peri_tbe *tbe, const peri_tbe_blocks *blocks);
/** The blocks are written, and sound: find out what follows from them, and upload them. */
peri_status peri__tbe_blocks_finish(const peri_tbe *tbe, peri_tbe_blocks *blocks);
/** @out: them in the order of their tables, otherwise as they stand, in device memory; work that is queued from now on
 *  finds them there. */
peri_status peri__tbe_blocks_sorted(const peri_tbe *tbe, peri_tbe_blocks *blocks, const peri_k_tbe_block **out);
/** peri_tbe_blocks_new without its checks: a table of pooling NONE may have a negative out_offset, if its ids all come
 *  late enough. */
peri_status peri__tbe_blocks_new(const peri_tbe *tbe, const peri_tbe_block *blocks, int64_t n, peri_tbe_blocks **out);
/** Within a call: look the batch up in memory. @check: fill its report. */
peri_status peri__tbe_forward(peri_tbe_batch *batch, peri_tensor *out, bool check);
/** Forward with the check that the table batch asks for; @function names the caller in messages. */
peri_status peri__batch_forward(const char *function, peri_tbe_batch *batch, peri_tensor *out);
/** Record a lookup with optimizer or leaves; *node NULL: it need not be. Its state is the caller's to set. */
peri_status peri__lookup_record(const peri__node_vtab *vtab, peri_tbe_batch *batch, peri_tensor *const *out, int32_t n,
                                peri__node **node);
/** The backward pass of its node, with the gradient of its rows (taken); the node's own *grad_in. */
peri_status peri__lookup_backward(peri__node *node, peri_tbe_batch *batch, peri_tensor *grad, peri_tensor **grad_in);
/** A lookup, not recorded. */
peri_status peri__lookup_rows(const char *function, peri_tbe_batch *batch, int32_t ndim, const int64_t *shape,
                              peri_tensor **out);
/** On devices whose memory the host reads and that run at once: the first id of bag @bag. */
int64_t peri__batch_offset(const peri_tbe_batch *batch, int64_t bag);
bool peri__batch_readable(const peri_tbe_batch *batch);
/** Whether keys have room for a row and for a place in a gradient of @extent elements (update.c). */
bool peri__tbe_keys_have_room(const peri_tbe *tbe, int64_t extent);
/** One past the last element that a lookup of @input writes. */
int64_t peri__tbe_extent(const peri_tbe *tbe, const peri_tbe_input *input);
/** Check an input's tensors on the host: dtypes, sizes, devices. */
peri_status peri__tbe_input_check(const char *function, const peri_tbe *tbe, const peri_tbe_input *input);
/** The kernels' view of the tables. */
peri_k_tbe_rows peri__tbe_kernel_tables(const peri_tbe *tbe);

/** Check gradients on the host. @grad_weights: or NULL. */
peri_status peri__tbe_gradient_check(const char *function, const peri_tbe *tbe, const peri_tbe_input *input,
                                     const peri_tensor *grad, const peri_tensor *grad_weights);
/* Within a call: */
/** Gradients of the ids' weights: from the rows as they are, so before the update. */
peri_status peri__tbe_weight_gradient(peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *grad_weights);
/** Sum gradients by row and hand them to the optimizer, or, with @dense or @sparse, store them there. */
peri_status peri__tbe_update(peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *dense,
                             const peri_tbe_sparse *sparse);
/** The gradient as sparse rows; see peri_tbe_gradient_sparse. */
peri_status peri__tbe_sparse(peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *grad_weights, peri_tbe_sparse *out);
/** peri_tbe_backward on checked arguments, with ids that are rows of the flat tensors. */
peri_status peri__tbe_backward(peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *grad_weights);

/* -- optimizers (optimizer.c) -------------------------------------------------------------------------------------- */

/** Hyperparameters for the kernels at step @iteration. */
peri_k_tbe_optimizer peri__tbe_kernel_optimizer(const peri_tbe *tbe, int64_t iteration);

/** Fill in the defaults of counters, where @o has them. */
void peri__counter_default(peri_tbe_optimizer_config *o);
/** Check what @o says of counters, and of EMA in place. */
peri_status peri__counter_check(const peri_tbe_optimizer_config *o);
peri_status peri__ema_check(const peri_tbe_optimizer_config *o);
/** Whether updates ask for the largest counter of a table. */
bool peri__counter_wants_most(const peri_tbe_optimizer_config *o);
/** Before the update of step @iteration: the largest counters, if they are due. */
peri_status peri__counter_refresh(peri_tbe *tbe, int64_t iteration);
/** Before a lookup of the next training step: EMA in place, if it is due. */
peri_status peri__tbe_ema(peri_tbe *tbe);
/** The same within a call that is alone: before the step's update. */
peri_status peri__tbe_ema_alone(peri_tbe *tbe);

/** The update of peri__tbe_backward with Shampoo. */
peri_status peri__tbe_shampoo(peri_tbe_batch *batch, peri_tensor *grad);

/* -- kept backward passes (accumulate.c) --------------------------------------------------------------------------- */

/** Keep a checked backward pass. */
peri_status peri__tbe_accumulate_pass(peri_tbe *tbe, const peri_tbe_input *input, peri_tensor *grad);
void peri__tbe_accumulated_free(peri_tbe *tbe);

/* -- stores -------------------------------------------------------------------------------------------------------- */

/** Where the rows of a table batch are, and what that makes of its calls. Arguments are checked. Functions run within a
 *  call that is alone, unless they say otherwise. NULL where a store has nothing to do. */
typedef struct peri__store {
    const char *name;
    /* The flat tensors hold all rows: there are views of them, dense gradients, and backward passes may be kept. Else
     * they hold slots: `layout` is of slots, tables[].config of rows. */
    bool whole;
    /* Calls by themselves; @function names the public one for messages. */
    peri_status (*forward)(const char *function, peri_tbe_batch *batch, peri_tensor *out);
    peri_status (*backward)(const char *function, peri_tbe_batch *batch, peri_tensor *grad, peri_tensor *grad_weights);
    peri_status (*prefetch)(const char *function, peri_tbe_batch *batch);
    void (*drop)(peri_tbe_batch *batch); /* the batch will not come again: its rows may leave */
    /* Rows from @row on of part @part of @table, into and from a tensor of the user's. */
    peri_status (*read)(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, peri_tensor *dst);
    peri_status (*write)(peri_tbe *tbe, int64_t table, int32_t part, int64_t row, const peri_tensor *src);
    /* Rows (host, ascending, each once) of @table start again, in all states that have rows. */
    peri_status (*reset)(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n);
    /* Flushes; see peri_tbe_flush_prepare. info does not need a call, and @out is zeros before it. */
    void (*flush_info)(const peri_tbe *tbe, peri_flush_info *out);
    peri_status (*flush_prepare)(peri_tbe *tbe);
    peri_status (*flush_commit)(peri_tbe *tbe, int64_t number, uint64_t stamp);
    /* What a table's file says; what the next flush says of its ids. @out is zeros before it. Neither needs a call. */
    void (*table_file)(const peri_tbe *tbe, int64_t table, peri_table_file *out);
    void (*ids_mark)(peri_tbe *tbe, int64_t table, const peri_ids_mark *mark);
    /* Counts: of one table's cache, or (@table -1) of all; bad ids that no kernel has seen; how rows are read (static
     * text). */
    void (*cache_statistics)(const peri_tbe *tbe, int64_t table, peri_tbe_cache_stats *out);
    int64_t (*bad_ids)(const peri_tbe *tbe);
    const char *(*io)(const peri_tbe *tbe);
    void (*free)(peri_tbe *tbe); /* local; does not flush */
} peri__store;

/** Tables in memory. (memory.c) */
extern const peri__store peri__memory;
peri_status peri__memory_reset(peri_tbe *tbe, int64_t table, const int64_t *rows, int64_t n);
/** How a table that starts at random numbers gets those of its rows from @row on, at @weights. (rows_reset.c) */
struct peri_k_random_args peri__tbe_start_values(const peri_tbe *tbe, int64_t table, int64_t row, uint64_t seed,
                                                 void *weights);
/** Start values of row @row of @table, on the host, into @weights; PERI_INIT_NONE: they stay what they are.
 *  (rows_reset.c) */
void peri__tbe_start_row(const peri_tbe *tbe, int64_t table, int64_t row, uint64_t seed, void *weights);
/** Queue the lookup of a batch of tables in memory, or where @out is NULL the check of its ids alone, and the copy of
 *  what that found (a peri_k_tbe_report) to the host: *found, to be given back. */
peri_status peri__memory_queue_lookup(const char *function, peri_tbe_batch *batch, peri_tensor *out,
                                      peri__report **found);

/* Tables in files, with a cache in memory. (tier/tier_open.c) */
/** Rows of each table that @config's caches hold: int64[n_tables], to be freed. */
peri_status peri__tier_slots(const peri_tbe_config *config, int64_t **out);
/** Table @i behind its cache, on a device with a memory of its own (@apart) or not: rows of the cache as its
 *  load_factor says, and, added to @host and @files, bytes of the rows below it and of what it knows of them. */
peri_status peri__tier_bytes(const peri_tbe_config *config, int64_t i, bool apart, int64_t *slots, double *host,
                             double *files);
/** Open the files of a table batch whose flat tensors are there, and make them its store, also when that fails. */
peri_status peri__tier_open(peri_tbe *tbe, const peri_tbe_config *config);

/** A number that is another one after the weights have changed, whoever changed them (but through peri_tensor_data). */
int64_t peri__tbe_change_count(const peri_tbe *tbe);

/** A view of @table's part of state @i. @out new. (optimizer_kinds.c) */
peri_status peri__state_view(const peri_tbe *tbe, int64_t table, int32_t i, peri_tensor **out);

#endif
